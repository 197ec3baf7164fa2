//! Quiet writes of this node: writing without telling where the service allows it, and telling. The
//! rules are in [`ebb_consistency::QuietWrites`]; what was written so counts as unpublished in the
//! file's view until it is told, as the bytes of the models do whose writes do not publish.
//!
//! * Consistency: whether a write may be quiet is judged under the file's state lock, before and
//!   after its bytes are stored; a recall ends the right under the same lock.
//! * Retries: what could not be told is told again, until it is or the file is gone.
//! * Completion: a lease that is called back is returned when everything was told; the service
//!   gives this node up when that takes longer than its trust lasts.

use crate::cache::{self, CacheDir};
use crate::file::{CachedFile, Place, State, checked_range};
use crate::node::Node;
use ebb_consistency::{Asked, Held, LeaseSeq, QuietWrites, SyncEvent, Untold};
use ebb_locks::Mutex;
use ebb_meta_client::Attached;
use ebb_types::{ByteRange, Errno, Ino, Time};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Weak, atomic::AtomicU64};
use std::time::Duration;

/// It is looked so often whether something must be told.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Before it is tried again to tell.
const PAUSE: Duration = Duration::from_millis(200);

/// A first write of so many bytes is not the last one.
const MUCH: u64 = 64 << 10;

/// After a wish in vain, an append does not ask again for so long: asking is a request of its own.
const WISH_PAUSE_MS: u64 = 200;

/// The files of this node that are written quietly, or were.
#[derive(Default)]
pub(crate) struct QuietFiles {
    files: Mutex<HashMap<Ino, Weak<CachedFile>>>,
    wishes_from: AtomicU64,
}

/// How bytes were stored.
pub(crate) enum Stored {
    /// Nobody need be told now.
    Quietly(ByteRange),
    /// As every write.
    Aloud(ByteRange),
}

impl CachedFile {
    /// Stores an application's bytes if they may be written quietly; `None`: nothing was done.
    fn store_quietly(
        &self,
        dir: &CacheDir,
        place: Place,
        data: &[u8],
        allowed: impl Fn(&State, ByteRange) -> bool,
        placed: impl Fn(ByteRange),
    ) -> Result<Option<Stored>, Errno> {
        let cache = self.cache_to_write(dir)?;
        let mut state = self.state.write();
        let appends = place == Place::End;
        let offset = match place {
            Place::At(offset) => offset,
            Place::End => state.view.size(),
        };
        let range = checked_range(offset, data.len() as u64)?;
        if !allowed(&state, range) {
            return Ok(None);
        }
        if appends {
            placed(range);
        }
        let stored = match self.put(dir, &cache, &mut state, data, offset) {
            (0, Some(e)) => {
                if appends {
                    placed(ByteRange::at(offset, 0));
                }
                return Err(Errno::from(e));
            }
            (n, _) => ByteRange::at(offset, n as u64),
        };
        let still = allowed(&state, stored);
        if !still && appends {
            // Others may have put something at this place meanwhile.
            placed(ByteRange::at(offset, 0));
            state.sums.forget(stored);
            cache::punch(&cache, stored)?;
            return Ok(None);
        }
        if appends && stored != range {
            placed(stored);
        }
        state.view.write(stored);
        state.mtime = Some(Time::now());
        Ok(Some(if still {
            state.quiet.wrote(stored);
            Stored::Quietly(stored)
        } else {
            state.quiet.wrote_aloud(stored);
            Stored::Aloud(stored)
        }))
    }
}

impl Node {
    /// Writes without telling, if that is allowed. `None`: nothing was done.
    pub(crate) fn write_quietly(
        &self,
        file: &Arc<CachedFile>,
        place: Place,
        data: &[u8],
    ) -> Result<Option<Stored>, Errno> {
        // First what needs no clock.
        if !file.state.read().quiet.is_some() {
            return Ok(None);
        }
        let allowed = |state: &State, range| {
            state.passing.is_none()
                && state.model.on(SyncEvent::Write).attach.is_some()
                && state.quiet.allows(range, &state.view, self.meta.trust())
        };
        let placed = |range| self.note_place(file.ino, range);
        let stored = file.store_quietly(&self.cache, place, data, allowed, placed)?;
        if let Some(Stored::Quietly(_)) = stored {
            self.leases.quiet.fetch_add(1, Relaxed);
        }
        Ok(stored)
    }

    /// How far this node would like to write quietly, when it tells of a write; 0: not.
    pub(crate) fn quiet_wish(&self, state: &State, end: u64) -> u64 {
        let fits = !self.config.naive
            && self.config.replicas <= 1
            && state.model.writes_publish()
            && state.opens > 0
            && state.passing.is_none()
            && !state.orphan;
        // Whoever writes once gains nothing; whoever begins with much does not write once.
        let goes_on = state.published.is_some() || state.view.unattached_bytes() >= MUCH;
        if fits && goes_on { state.quiet.wish(end) } else { 0 }
    }

    /// True when it seems to pay to ask for the right alone.
    pub(crate) fn may_ask_to_write_quietly(&self, state: &State) -> bool {
        self.quiet_wish(state, 0) > 0
            && ebb_meta_client::now_ms() >= self.quiet_files.wishes_from.load(Relaxed)
    }

    /// An answer did not bring it.
    fn note_wish_in_vain(&self) {
        let from = ebb_meta_client::now_ms() + WISH_PAUSE_MS;
        self.quiet_files.wishes_from.store(from, Relaxed);
    }

    /// Everything is going to be told, and as much more asked for.
    pub(crate) fn begin_telling(
        &self,
        file: &Arc<CachedFile>,
        state: &mut State,
        wish: u64,
    ) -> (Untold, u64) {
        if wish > 0 {
            // A daemon that comes after this one must know where it may have written.
            self.note_window(file, state, ByteRange::new(state.view.published_size(), wish));
            self.look_after_quiet(file);
        }
        (state.quiet.tell(), wish)
    }

    /// What was written quietly was told; perhaps more may be.
    pub(crate) fn told_quiet(
        &self,
        file: &CachedFile,
        state: &mut State,
        (done, wish): (&Attached, u64),
        asked: Option<Asked>,
    ) {
        self.leases.told.fetch_add(1, Relaxed);
        state.quiet.heard();
        if done.quiet_end == 0 {
            state.quiet.told();
            if wish > 0 {
                self.note_wish_in_vain();
            }
            return self.note_no_window(file);
        }
        let grant = done.told.as_ref().map(|told| told.grant);
        let (Some(grant), Some(asked)) = (grant, asked) else { return };
        // Otherwise it was called back before it came, and the service must hear that all is told.
        if state.lease.granted(grant, asked.epoch()) {
            let window = ByteRange::new(done.size, done.quiet_end.max(done.size));
            let (seq, epoch, version) = (grant.seq, asked.epoch(), done.version);
            state.quiet.granted(Held { seq, epoch, version, window });
        }
    }

    /// From now on it is looked after whether the file has something to tell.
    pub(crate) fn look_after_quiet(&self, file: &Arc<CachedFile>) {
        self.quiet_files.files.lock().insert(file.ino, Arc::downgrade(file));
    }

    pub(crate) fn owes_telling(&self, file: &CachedFile) -> bool {
        let state = file.state.read();
        state.quiet.is_some() && state.quiet.must_tell(self.meta.trust())
    }

    /// Tells what was written quietly, if this may no longer wait. True when something was told.
    pub(crate) async fn tell_if_owed(&self, file: &Arc<CachedFile>) -> Result<bool, Errno> {
        if !self.owes_telling(file) {
            return Ok(false);
        }
        let _turn = file.turn.lock().await;
        self.tell_owed_in_turn(file).await
    }

    /// The same by who has the turn.
    pub(crate) async fn tell_owed_in_turn(&self, file: &Arc<CachedFile>) -> Result<bool, Errno> {
        let owes = self.owes_telling(file);
        if owes {
            self.attach(file, ByteRange::ALL, false, false).await?;
        }
        Ok(owes)
    }

    /// Nothing is written quietly from now on, and all that was is told. The caller has the turn.
    pub(crate) async fn end_quiet_in_turn(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        if file.state.read().quiet.is_some() {
            file.state.write().quiet.give_up();
            self.tell_owed_in_turn(file).await?;
        }
        Ok(())
    }

    /// Nobody here has the file open any more: the right is of no use. True when it need only be given
    /// up.
    pub(crate) async fn close_quiet_in_turn(&self, file: &Arc<CachedFile>) -> bool {
        if file.state.read().quiet.is_some() && file.state.write().quiet.end_told() {
            return true;
        }
        if let Err(e) = self.end_quiet_in_turn(file).await {
            tracing::warn!(ino = %file.ino, error = %e, "quiet writes are not told yet");
        }
        false
    }

    /// The service was told, or could not be, that the right is given up: until it has heard it, a
    /// daemon after this one must know of the right, and this one must say it again.
    pub(crate) fn quiet_given_up(&self, file: &Arc<CachedFile>, heard: bool) {
        if heard {
            return self.note_no_window(file);
        }
        let mut state = file.state.write();
        if !state.quiet.is_some() {
            state.quiet = QuietWrites::inherited(&[], state.view.known_version());
            self.look_after_quiet(file);
        }
    }

    /// A lease that was called back is returned when all is told.
    pub(crate) fn return_once_told(&self, file: Arc<CachedFile>, seq: LeaseSeq) {
        let Some(node) = self.me_arc() else { return };
        let connection = self.meta.connection();
        self.runtime.spawn(async move {
            while let Err(e) = node.tell_if_owed(&file).await {
                tracing::debug!(ino = %file.ino, error = %e, "told again in a moment");
                if node.meta.connection() != connection {
                    // It is called back again there.
                    return;
                }
                tokio::time::sleep(PAUSE).await;
            }
            if node.has_pages(file.ino) {
                node.drop_pages(file.ino).await;
            }
            node.meta.return_recalled(connection, file.ino, seq);
        });
    }

    /// True once everything that a daemon before this one left is published.
    pub(crate) fn has_begun(&self) -> bool {
        *self.begun.borrow()
    }

    /// Until then what is called back may still have to be told.
    pub(crate) fn return_once_begun(&self, ino: Ino, seq: LeaseSeq) {
        let Some(node) = self.me_arc() else { return };
        let connection = self.meta.connection();
        self.runtime.spawn(async move {
            let mut begun = node.begun.subscribe();
            if begun.wait_for(|b| *b).await.is_err() {
                return;
            }
            match node.file(ino) {
                Some(file) => {
                    file.state.write().lease.recall(seq);
                    node.return_once_told(file, seq);
                }
                None => node.return_without_pages(connection, ino, seq),
            }
        });
    }

    /// Tells what nobody asks for, as long as the node lives: after its trust lapsed, or when it
    /// could not be told.
    pub(crate) async fn keep_telling(node: Weak<Node>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(node) = node.upgrade() else { return };
            node.drop_all_pages_without_trust();
            node.publish_seats().await;
            for file in node.all_quiet() {
                if let Err(e) = node.tell_if_owed(&file).await {
                    tracing::debug!(ino = %file.ino, error = %e, "quiet writes are not told yet");
                }
            }
        }
    }

    /// Everything is told, except of files whose turn somebody keeps for so long: these come back.
    pub(crate) async fn tell_quiet_within(&self, patience: Duration) -> Vec<Arc<CachedFile>> {
        let until = tokio::time::Instant::now() + patience;
        let mut busy = Vec::new();
        for file in self.all_quiet() {
            let Ok(_turn) = tokio::time::timeout_at(until, file.turn.lock()).await else {
                busy.push(Arc::clone(&file));
                continue;
            };
            if let Err(e) = self.end_quiet_in_turn(&file).await {
                tracing::warn!(ino = %file.ino, error = %e, "quiet writes are not told yet");
            }
        }
        busy
    }

    /// Everything is told, for this node leaves.
    pub(crate) async fn tell_everything(&self) {
        for file in self.all_quiet() {
            let _turn = file.turn.lock().await;
            if let Err(e) = self.end_quiet_in_turn(&file).await {
                tracing::warn!(ino = %file.ino, error = %e, "quiet writes are not told");
            }
        }
    }

    /// A file's state is locked before this list (it is listed with what makes it quiet), never while
    /// the list is.
    fn all_quiet(&self) -> Vec<Arc<CachedFile>> {
        let mut all: Vec<_> = {
            let mut files = self.quiet_files.files.lock();
            files.retain(|_, file| file.strong_count() > 0);
            files.values().filter_map(Weak::upgrade).collect()
        };
        all.retain(|file| {
            let state = file.state.read();
            if !state.quiet.is_some() {
                self.quiet_files.files.lock().remove(&file.ino);
            }
            state.quiet.is_some()
        });
        all
    }
}
