//! Synchronisation events: what the model's row says becomes attach and query requests here, and
//! nowhere else. Events of one file take turns.

use crate::cache;
use crate::config::Durability;
use crate::file::{CachedFile, State};
use crate::handles::OpenFile;
use crate::known::Changing;
use crate::node::Node;
use crate::ops::open::Again;
use ebb_consistency::{Asked, Changes, Grant, Scope, SyncEvent, Untold};
use ebb_meta_client::{AttachRequest, Attached, Mapped, QueryRequest, Quietly};
use ebb_types::{ByteRange, Errno, NodeId, Time, Version, split_by};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Files published at once after a takeover.
const AT_ONCE: usize = 128;

/// Ranges of a kind in one attach: what is more goes in several, one after the other. Readers that ask
/// in between see some of it; what the model promises, it promises at the end of the call.
const RANGES_PER_ATTACH: usize = 1 << 18;

/// How often a query is repeated when an attach of this node overtakes its answer.
const QUERIES_MAX: u32 = 16;

impl Node {
    /// Takes an answer of the service into the view. False when the answer is too old to judge
    /// some of our own bytes: ask again.
    pub(crate) fn learn(&self, file: &CachedFile, answer: &Mapped) -> bool {
        self.learn_leased(file, answer, None, None)
    }

    fn learn_leased(
        &self,
        file: &CachedFile,
        answer: &Mapped,
        ticket: Option<Asked>,
        grant: Option<Grant>,
    ) -> bool {
        let mut state = file.state.write();
        self.learn_base(file, &mut state, answer.base);
        let changes = state.view.apply(&answer.map);
        self.note_changes(file, &changes);
        self.take_away(file, &mut state, &changes);
        let certain = changes.doubtful.is_empty();
        if certain {
            self.take_grant(&mut state, ticket, grant);
        }
        certain
    }

    /// What becomes of bytes in the cache file that an answer took away.
    fn take_away(&self, file: &CachedFile, state: &mut State, changes: &Changes) {
        if state.passing.is_none() {
            return self.free_lost(file, state, changes);
        }
        if let Err(e) = self.replace_lost(file, state, changes) {
            tracing::error!(ino = %file.ino, error = %e, "a cache file that is passed through is not up to date");
        }
    }

    /// Frees the cache space of bytes that an answer took away. The caller holds the state, so
    /// that nobody writes there meanwhile.
    fn free_lost(&self, file: &CachedFile, state: &mut State, changes: &Changes) {
        // Not before it is written that they are lost: nobody must take the holes for bytes.
        if !changes.overtaken.is_empty() && self.write_notes().is_err() {
            return;
        }
        let lost = changes.stale.iter().chain(&changes.overtaken);
        for range in lost {
            state.sums.forget(*range);
            let freed = file.cache(&self.cache).and_then(|c| Ok(cache::punch(&c, *range)?));
            if let Err(e) = freed {
                tracing::warn!(ino = %file.ino, error = %e, "cannot free cache space");
            }
        }
    }

    /// Called with the file's state locked.
    pub(crate) fn note_changes(&self, file: &CachedFile, changes: &Changes) {
        self.note_lost(file, changes);
        let lost: u64 = changes.overtaken.iter().map(|r| r.len()).sum();
        if lost > 0 {
            self.copies_in_surplus(file.ino);
            self.metrics.overtaken.fetch_add(lost, Relaxed);
            tracing::debug!(ino = %file.ino, bytes = lost, "another node wrote over bytes of ours");
        }
    }

    /// A cut that the service has carried out.
    pub(crate) fn apply_cut(&self, file: &CachedFile, size: u64, answer: &Mapped) {
        let Mapped { map, base, .. } = answer;
        let mut state = file.state.write();
        self.learn_base(file, &mut state, *base);
        let changes = state.view.truncated(size, map);
        state.quiet.cut(size);
        state.attached.detached(ByteRange::from(size));
        self.note_cut(file, &mut state, size, map.version);
        self.copies_in_surplus(file.ino);
        self.note_changes(file, &changes);
        // Before the cache file changes: it must not be shorter than the journal knows.
        self.try_write_notes();
        if !state.view.has_unattached() {
            state.mtime = None;
        }
        if state.passing.is_some() {
            self.take_away(file, &mut state, &changes);
            return self.resize_passed(file, &mut state, size);
        }
        if let Ok(cache) = file.cache(&self.cache)
            && cache.metadata().is_ok_and(|m| m.len() > size)
            && let Err(e) = {
                state.sums.forget(ByteRange::from(size));
                cache.set_len(size)
            }
        {
            tracing::warn!(ino = %file.ino, error = %e, "cannot shorten a cache file");
        }
    }

    /// The service has made the file longer, if it was shorter.
    pub(crate) async fn apply_grown(
        &self,
        file: &CachedFile,
        answer: &Mapped,
    ) -> Result<(), Errno> {
        self.learn_whole(file, answer).await?;
        let mut state = file.state.write();
        // Not shorter than what was written here and is not published yet.
        let size = state.view.size();
        self.note_cut(file, &mut state, size, answer.map.version);
        Ok(())
    }

    /// Asks the service who owns what.
    pub(crate) async fn query(&self, file: &CachedFile, range: ByteRange) -> Result<(), Errno> {
        let (mut range, mut uncertain) = (range, 0);
        while uncertain < QUERIES_MAX {
            let (query, ticket) = self.question(file, range);
            let answer = self.meta.query(query).await?;
            if !self.learn_leased(file, &answer, ticket, answer.lease) {
                uncertain += 1;
                continue;
            }
            // Of a file that changes meanwhile each part is as of its own moment after the call.
            match answer.map.rest_of(query.range) {
                Some(rest) => range = rest,
                None => return Ok(()),
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Asks about what a read needs and nothing is known of, and about some more.
    pub(crate) async fn look_up(&self, file: &CachedFile, range: ByteRange) -> Result<(), Errno> {
        let (mut wanted, mut uncertain) = (range, 0);
        while uncertain < QUERIES_MAX {
            let window = file.map_ahead.lock().next(wanted);
            let (query, ticket) = self.question(file, window);
            let answer = self.meta.query_part(query).await?;
            if !self.learn_leased(file, &answer, ticket, answer.lease) {
                uncertain += 1;
                continue;
            }
            match answer.map.rest_of(wanted) {
                Some(rest) => wanted = rest,
                None => return Ok(()),
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Learns an answer about the whole file that came with something else. Where it is uncertain, or
    /// ends before the file does, the service is asked.
    pub(crate) async fn learn_whole(
        &self,
        file: &CachedFile,
        answer: &Mapped,
    ) -> Result<(), Errno> {
        let certain = self.learn(file, answer);
        match certain && answer.map.rest_of(ByteRange::ALL).is_none() {
            true => Ok(()),
            false => self.query(file, ByteRange::ALL).await,
        }
    }

    /// What to ask about a range, and how a lease may come of it.
    fn question(&self, file: &CachedFile, range: ByteRange) -> (QueryRequest, Option<Asked>) {
        let mut state = file.state.write();
        let ticket = self.ticket(&state);
        let widen = ticket.is_some() && range != ByteRange::ALL && state.lease.widen();
        let range = if widen { ByteRange::ALL } else { range };
        let (known, lease) = (state.view.known_version(), ticket.is_some());
        (QueryRequest { ino: file.ino, range, known, lease }, ticket)
    }

    /// Publishes what was written here and not yet attached. The caller has the turn.
    pub(crate) async fn attach(
        &self,
        file: &Arc<CachedFile>,
        within: ByteRange,
        durable: bool,
        then_query: bool,
    ) -> Result<(), Errno> {
        self.attach_wishing(file, within, durable, then_query, false).await
    }

    /// The same; `wishes`: it would be of use to write quietly afterwards.
    async fn attach_wishing(
        &self,
        file: &Arc<CachedFile>,
        within: ByteRange,
        durable: bool,
        then_query: bool,
        wishes: bool,
    ) -> Result<(), Errno> {
        self.collect(file)?;
        let mut again = Again::within(self.deadline());
        let mut within = within;
        loop {
            let sending = self.begin_attach(file, within, wishes);
            let last = sending.part.end() >= within.end();
            if sending.is_empty() && last {
                self.attached_nothing(file, durable, then_query).await?;
                break;
            }
            if sending.is_empty() {
                within = ByteRange::new(sending.part.end(), within.end());
                continue;
            }
            let done =
                self.send_attach(file, &sending, durable && last, then_query && last).await?;
            if let Some(node) = done.seat {
                if let Err(e) = self.bring_to_seat(file, node, &sending, durable).await {
                    self.seat_again(&mut again, e).await?;
                }
                continue;
            }
            // What others have of guessed bytes is attached by name, in another round.
            let (_, contested) = file.state.read().view.by_precision(&done.contested);
            if contested.is_empty() && !last {
                within = ByteRange::new(sending.part.end(), within.end());
            } else if contested.is_empty() {
                if let Some(answer) = &done.map {
                    self.learn_whole(file, answer).await?;
                }
                break;
            } else {
                self.settle_contested(file, &contested)?;
            }
        }
        let wants_map = {
            let state = file.state.read();
            state.quiet.wants_map(&state.view)
        };
        if wants_map {
            self.query(file, ByteRange::ALL).await?;
        }
        if then_query { self.complete(file).await } else { Ok(()) }
    }

    /// What else an attach is for, when there is nothing to attach.
    async fn attached_nothing(
        &self,
        file: &CachedFile,
        durable: bool,
        then_query: bool,
    ) -> Result<(), Errno> {
        if durable {
            self.meta.sync_meta().await?;
        }
        if then_query { self.query(file, ByteRange::ALL).await } else { Ok(()) }
    }

    /// Asks for the right to write quietly, and for nothing else. The caller has the turn.
    pub(crate) async fn ask_to_write_quietly(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        self.attach_wishing(file, ByteRange::ALL, false, false, true).await
    }

    fn begin_attach(&self, file: &Arc<CachedFile>, within: ByteRange, wishes: bool) -> Sending {
        let mut state = file.state.write();
        // Who tells something tells all: afterwards the service counts on nothing else.
        let tells = state.quiet.is_some();
        let part = match tells {
            true => ByteRange::ALL,
            false => state.view.part(within, RANGES_PER_ATTACH),
        };
        let last = part.end() >= within.end();
        let taken = state.view.take_unattached(part);
        if !taken.is_empty() {
            self.note_attaching(file, &state, &taken);
        }
        let (exact, guessed) = state.view.by_precision(&taken);
        let again = self.take_again(&mut state, part, last);
        self.note_again(file, &state, &again);
        let known = state.view.known_version();
        let wish = if wishes && last { self.quiet_wish(&state, state.view.size()) } else { 0 };
        let owes = tells && (!taken.is_empty() || state.quiet.must_tell(self.meta.trust()));
        let quietly = (wish > 0 || owes).then(|| self.begin_telling(file, &mut state, wish));
        let untold = quietly.as_ref().map_or(&[][..], |(untold, _)| &untold.ranges);
        let (exact, quiet) = split_by(&exact, untold);
        Sending { part, taken, exact, quiet, guessed, again, mtime: state.mtime, known, quietly }
    }

    async fn send_attach(
        &self,
        file: &CachedFile,
        sending: &Sending,
        durable: bool,
        then_query: bool,
    ) -> Result<Attached, Errno> {
        let query = QueryRequest {
            ino: file.ino,
            range: ByteRange::ALL,
            known: sending.known,
            lease: false,
        };
        let mut changing = self.changing(&[], &[file.ino]);
        let request = AttachRequest {
            ino: file.ino,
            lease: changing.wish_for(&file.state.read().model),
            ranges: sending.exact.clone(),
            guessed: sending.guessed.clone(),
            known: sending.known,
            again: sending.again.clone(),
            mtime: sending.mtime,
            durable,
            then_query: then_query.then_some(query),
            copies: 0,
            quietly: sending.quietly.as_ref().map(|(untold, wish)| Quietly {
                ranges: sending.quiet.clone(),
                since: untold.since,
                wish: *wish,
            }),
        };
        let asked = changing.asked();
        // A daemon that comes after this one must know of every byte that is published.
        let done = match self.write_notes() {
            Ok(()) => self.copy_and_attach(file, request).await,
            Err(e) => Err(e),
        };
        changing.heard(&done);
        match &done {
            Ok(done) if done.seat.is_some() => {
                let mut state = file.state.write();
                if let Some((untold, _)) = &sending.quietly {
                    state.quiet.not_told(untold);
                }
                if !sending.again.is_empty() {
                    self.again_failed(&mut state);
                }
            }
            Ok(done) => self.take_attached(file, sending, done, (changing, asked)),
            Err(e) => {
                let mut state = file.state.write();
                state.view.attach_failed(&sending.taken);
                match &sending.quietly {
                    Some(_) if is_gone(*e) => state.quiet.forget(),
                    Some((untold, _)) => state.quiet.not_told(untold),
                    None => {}
                }
                if !sending.again.is_empty() {
                    self.again_failed(&mut state);
                }
            }
        }
        done
    }

    /// The file sits at another node: what was to be attached is brought there, and is here no more.
    async fn bring_to_seat(
        &self,
        file: &Arc<CachedFile>,
        node: NodeId,
        sending: &Sending,
        durable: bool,
    ) -> Result<(), Errno> {
        let brought = self.write_at_seat(file, node, &sending.exact).await;
        let brought = match brought {
            Ok(()) if durable => self.sync_at_seat(file.ino, node).await,
            brought => brought,
        };
        // Before they go from here it must be known where they are: a read that is under way would
        // go by what was known before.
        let brought = match brought {
            Ok(()) => self.query_anew(file, ByteRange::ALL).await,
            brought => brought,
        };
        let mut state = file.state.write();
        if let Err(e) = brought {
            state.view.attach_failed(&sending.taken);
            return Err(e);
        }
        state.view.attach_failed(&sending.guessed);
        state.view.attach_failed(&sending.quiet);
        let changes = state.view.not_attached(&sending.exact);
        self.note_not_attached(file, &changes.overtaken);
        self.try_write_notes();
        self.free_lost(file, &mut state, &changes);
        if !state.view.has_unattached() {
            state.mtime = None;
        }
        Ok(())
    }

    fn take_attached(
        &self,
        file: &CachedFile,
        sending: &Sending,
        done: &Attached,
        (mut changing, asked): (Changing<'_>, Option<Asked>),
    ) {
        let mut state = file.state.write();
        self.attr_published(&mut state, done.size, sending.mtime);
        changing.told(done.told.clone());
        changing.end();
        let (ranges, refused) = split_by(&sending.taken, &done.contested);
        let (mut ranges, overtaken) = split_by(&ranges, &done.overtaken);
        let lost = state.view.not_attached(&overtaken);
        self.note_not_attached(file, &lost.overtaken);
        let (again, taken) = split_by(&sending.again, &done.contested);
        self.note_not_attached(file, &taken);
        state.view.attach_failed(&refused);
        let mut changes = state.view.attached(&ranges, done.version, done.size);
        let more = state.view.attached_again(&again, done.version);
        changes.overtaken.extend(more.overtaken);
        changes.overtaken.extend(lost.overtaken);
        if let Some((_, wish)) = &sending.quietly {
            self.told_quiet(file, &mut state, (done, *wish), asked);
        }
        if !state.view.has_unattached() {
            state.mtime = None;
        }
        if let Some(passing) = &mut state.passing {
            passing.size = passing.size.max(done.size);
        }
        ranges.extend(again);
        state.alone.changed(done.version, done.others);
        self.note_attached(file, &state, &ranges, done.version, done.size);
        if let Some(at) = &done.backing {
            self.note_backing(file, &mut state, at);
        }
        self.note_changes(file, &changes);
        drop(state);
        self.try_write_notes();
    }

    /// Carries out what the file's model says about `event`.
    pub(crate) async fn event(
        &self,
        file: &Arc<CachedFile>,
        event: SyncEvent,
        range: ByteRange,
        durable: bool,
    ) -> Result<(), Errno> {
        let (actions, seated) = {
            let state = file.state.read();
            (state.model.on(event), state.seat().is_some())
        };
        // Who has the seat knows everything.
        let ask = actions.query.filter(|_| !seated);
        match actions.attach {
            Some(scope) => {
                let within = scoped(scope, range);
                let _turn = file.turn.lock().await;
                let wishes = event == SyncEvent::Write;
                self.attach_wishing(file, within, durable, ask.is_some(), wishes).await
            }
            // What is looked up must not be taken for newer than what is not known to be written.
            None if ask.is_some() && file.is_tracked() => {
                let _turn = file.turn.lock().await;
                self.attach(file, ByteRange::ALL, durable, true).await
            }
            None => {
                if durable {
                    self.meta.sync_meta().await?;
                }
                if let Some(scope) = ask {
                    self.tell_if_owed(file).await?;
                    self.ask(file, scoped(scope, range)).await?;
                    self.complete(file).await?;
                }
                Ok(())
            }
        }
    }

    /// True when closing has nothing to publish and no locks to give back.
    #[must_use]
    pub fn nothing_to_do_at_close(&self, handle: &OpenFile, owner: u64) -> bool {
        let state = handle.file.state.read();
        let actions = state.model.on(SyncEvent::Close);
        let unseen = self.may_hold_unseen(&handle.file, &state);
        let publishes = actions.attach.is_some() && (unseen || state.view.has_unattached());
        let owes = owes_publication(&state);
        let locks = handle.file.is_guarded() && {
            let book = handle.file.locks.lock();
            book.process_holds(owner) || book.is_broken(handle.fh, Some(owner))
        };
        !(publishes || owes || actions.query.is_some() || locks)
    }

    /// `close`: publishes, then gives back the locks of the owner who closed. Comes once for every
    /// duplicate of a descriptor; doing it again does nothing.
    pub async fn close(&self, handle: &OpenFile, owner: u64) -> Result<(), Errno> {
        let file = &handle.file;
        self.collect(file)?;
        let published = match self.event(file, SyncEvent::Close, ByteRange::ALL, false).await {
            Ok(()) => self.publish_what_is_owed(file).await,
            failed => failed,
        };
        self.note_written_now(file);
        let unlocked = self.unlock_at_close(handle, owner).await;
        published.and(unlocked)
    }

    /// `fsync`: what the model says, and the durability that was asked for.
    pub async fn fsync(&self, handle: &OpenFile) -> Result<(), Errno> {
        self.fsync_file(&handle.file).await
    }

    pub(crate) async fn fsync_file(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        self.collect(file)?;
        if self.fsync_publishes() || owes_publication(&file.state.read()) {
            self.publish(file).await?;
        }
        match self.durability() {
            Durability::None => {
                self.event(file, SyncEvent::Fsync, ByteRange::ALL, false).await?;
                self.note_written_now(file);
            }
            Durability::Local => {
                let held = self.held_now(file);
                self.sync_cache(file).await?;
                self.event(file, SyncEvent::Fsync, ByteRange::ALL, true).await?;
                self.note_durable(file, held).await?;
            }
            Durability::Backing => {
                self.event(file, SyncEvent::Fsync, ByteRange::ALL, false).await?;
                self.drain_file(file.ino).await?;
            }
        }
        Ok(())
    }

    async fn sync_cache(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        let (node, synced) = (self.me_arc().ok_or(Errno::EIO)?, Arc::clone(file));
        let sync = move || synced.sync_data(&node.cache, &*synced.cache(&node.cache)?);
        tokio::task::spawn_blocking(sync).await.map_err(|_| Errno::EIO)??;
        if !file.name_synced.load(Acquire) {
            let (node, ino) = (self.me_arc().ok_or(Errno::EIO)?, file.ino);
            let named = move || node.cache.sync_name(ino);
            tokio::task::spawn_blocking(named).await.map_err(|_| Errno::EIO)??;
            file.name_synced.store(true, Release);
        }
        Ok(())
    }

    /// Publishes everything of a file in any model: an explicit commit, or before a flush.
    pub async fn publish(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        let _turn = file.turn.lock().await;
        // Without a visible change it is not published again and again: a flush would never end.
        if file.is_tracked() && !self.has_visible_work(file) {
            return Ok(());
        }
        self.attach(file, ByteRange::ALL, false, false).await
    }

    fn has_visible_work(&self, file: &CachedFile) -> bool {
        let state = file.state.read();
        state.view.has_unattached() || self.shows_unseen(file, &state)
    }

    async fn publish_what_is_owed(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        let owes = owes_publication(&file.state.read());
        if owes { self.publish(file).await } else { Ok(()) }
    }

    /// The same of all files: what a dead daemon was publishing must not be seen on this node alone.
    pub(crate) async fn publish_what_was_begun(self: &Arc<Self>) {
        let mut begun: Vec<_> = self.all_files();
        begun.retain(|f| {
            let state = f.state.read();
            owes_publication(&state) || state.quiet.is_some()
        });
        for step in begun.chunks(AT_ONCE) {
            let one = |file: &Arc<CachedFile>| {
                let (node, file) = (Arc::clone(self), Arc::clone(file));
                async move { (file.label(), node.publish(&file).await) }
            };
            let all = step.iter().map(one).collect::<tokio::task::JoinSet<_>>();
            for (label, published) in all.join_all().await {
                if let Err(error) = published {
                    tracing::warn!(label, ?error, "cannot be published yet; a sync event will");
                }
            }
        }
    }

    /// What the explicit commit (`user.ebb.commit`) does.
    pub async fn commit(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        self.event(file, SyncEvent::Commit, ByteRange::ALL, false).await
    }

    /// Asks anew, whatever is known: after an owner said that it does not have the bytes.
    pub(crate) async fn query_anew(
        &self,
        file: &CachedFile,
        range: ByteRange,
    ) -> Result<(), Errno> {
        let known = Version::ZERO;
        let query = QueryRequest { ino: file.ino, range, known, lease: false };
        let answer = self.meta.query(query).await?;
        match self.learn(file, &answer) && answer.map.rest_of(range).is_none() {
            true => Ok(()),
            false => self.query(file, range).await,
        }
    }
}

/// What one attach takes along.
struct Sending {
    /// From this part of the file.
    part: ByteRange,
    /// Unattached bytes, which count as sent.
    taken: Vec<ByteRange>,
    /// Those that were written for certain.
    exact: Vec<ByteRange>,
    /// Of these, what was written quietly, which is not in the list before.
    quiet: Vec<ByteRange>,
    /// Those that are only guessed to be.
    guessed: Vec<ByteRange>,
    /// Own bytes that may have been written again.
    again: Vec<ByteRange>,
    mtime: Option<Time>,
    known: Version,
    /// All that was written quietly, and how far this node would like to go on with that.
    quietly: Option<(Untold, u64)>,
}

impl Sending {
    fn is_empty(&self) -> bool {
        self.taken.is_empty() && self.again.is_empty() && self.quietly.is_none()
    }
}

/// The file has lost its last name; ESTALE: and its last user, so that the service forgot it.
pub(crate) fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ESTALE)
}

fn scoped(scope: Scope, range: ByteRange) -> ByteRange {
    match scope {
        Scope::Range => range,
        Scope::File => ByteRange::ALL,
    }
}

/// True when something is unpublished although writes publish: the write failed, or its daemon died
/// of it.
pub(crate) fn owes_publication(state: &State) -> bool {
    state.model.writes_publish() && state.view.has_unattached()
}
