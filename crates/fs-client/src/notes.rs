//! What the node tells its journal, and when. The order of records is the order of changes:
//! whatever changes which bytes are held pushes under the lock of the file's state. Without a
//! journal (`ebb recover` runs a node without one) nothing happens here.

use crate::file::{CachedFile, State};
use crate::node::{Fate, Node};
use crate::unforgotten::Flushed;
use ebb_backend::{BackendError, Identity};
use ebb_consistency::Changes;
use ebb_meta_client::Backing;
use ebb_node_journal::{Header, Home, Introduction, Journal, Kept, Record, Seen, remember_cut};
use ebb_types::{ByteRange, Errno, Ino, Name, Time, Version};
use std::sync::Arc;
use std::time::Duration;

/// Unpublished bytes are noted at least this often, so that little of what an application wrote
/// and never published is unknown after a crash.
const NOTE_INTERVAL: Duration = Duration::from_secs(1);

/// The file as the journal introduces it.
fn header(state: &State) -> Header {
    let attr = state.attr;
    Header {
        path: state.path.clone(),
        perm: attr.map_or(0o600, |a| a.perm),
        uid: attr.map_or_else(|| rustix::process::geteuid().as_raw(), |a| a.uid),
        gid: attr.map_or_else(|| rustix::process::getegid().as_raw(), |a| a.gid),
        atime: attr.map_or_else(Time::now, |a| a.atime),
        mtime: state.mtime.or(attr.map(|a| a.mtime)).unwrap_or_else(Time::now),
        size: state.view.size(),
        home: state.home.home().cloned(),
        under: state.under.clone(),
        shared: state.view.is_shared(),
    }
}

fn introduction(state: &State) -> Introduction {
    let alone = state.alone.is_proven();
    Introduction { header: header(state), alone, cuts: state.cuts.clone() }
}

/// A backing file as it was found.
pub(crate) fn home_of(path: &[u8], identity: &Identity) -> Home {
    let seen = Seen { size: identity.size, mtime: identity.mtime };
    Home { path: path.to_vec(), ino: identity.ino, seen: Some(seen), changing: false }
}

/// While this lives, size or times of the file are being set on the backing.
pub(crate) struct Touching(Arc<CachedFile>);

impl Drop for Touching {
    fn drop(&mut self) {
        self.0.state.write().home.changed();
    }
}

impl Node {
    /// The journal of this node.
    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.get().map(Arc::as_ref)
    }

    /// Everything pushed so far survives this daemon.
    pub(crate) fn write_notes(&self) -> Result<(), Errno> {
        self.journal().map_or(Ok(()), Journal::write)
    }

    /// The same where the operation itself is done already and cannot fail any more: what could
    /// not be written stays queued.
    pub(crate) fn try_write_notes(&self) {
        if let Err(e) = self.write_notes() {
            tracing::warn!(error = %e, "the node journal cannot be written");
        }
    }

    /// An attach of `ranges` is going to be sent.
    pub(crate) fn note_attaching(&self, file: &CachedFile, state: &State, ranges: &[ByteRange]) {
        let Some(journal) = self.journal() else { return };
        let (ino, known) = (file.ino, state.view.heard_version());
        let at = state.mtime.unwrap_or_else(Time::now);
        let (exact, guessed) = state.view.by_precision(ranges);
        if !exact.is_empty() {
            let record = Record::Attaching(ino, exact, known, at);
            journal.push_about(ino, || introduction(state), &record);
        }
        if !guessed.is_empty() {
            let record = Record::Guessed(ino, guessed, Kept::Attaching, known, at);
            journal.push_about(ino, || introduction(state), &record);
        }
    }

    /// An attach is going to be sent of own bytes that were perhaps written again.
    pub(crate) fn note_again(&self, file: &CachedFile, state: &State, ranges: &[ByteRange]) {
        if let Some(journal) = self.journal().filter(|_| !ranges.is_empty() && !state.orphan) {
            let record = Record::Again(file.ino, ranges.to_vec(), state.view.known_version());
            journal.push_about(file.ino, || introduction(state), &record);
        }
    }

    /// Others have these claimed bytes.
    pub(crate) fn note_not_attached(&self, file: &CachedFile, ranges: &[ByteRange]) {
        if let Some(journal) = self.journal().filter(|_| !ranges.is_empty()) {
            journal.push_if_known(file.ino, &Record::Refused(file.ino, ranges.to_vec()));
        }
    }

    /// This node may be about to write quietly there.
    pub(crate) fn note_window(&self, file: &CachedFile, state: &State, window: ByteRange) {
        if let Some(journal) = self.journal().filter(|_| !state.orphan) {
            let record = Record::Window(file.ino, window, state.view.known_version());
            journal.push_about(file.ino, || introduction(state), &record);
        }
    }

    /// The file sits here from now on: what its cache file has is right.
    pub(crate) fn note_seat(&self, file: &CachedFile, state: &State, seat: u64) {
        if let Some(journal) = self.journal().filter(|_| !state.orphan) {
            let record = Record::Seat(file.ino, seat, state.view.known_version());
            journal.push_about(file.ino, || introduction(state), &record);
        }
    }

    /// Not any more.
    pub(crate) fn note_no_seat(&self, file: &CachedFile) {
        if let Some(journal) = self.journal() {
            journal.push_if_known(file.ino, &Record::Seat(file.ino, 0, Version::ZERO));
        }
    }

    /// It does not write quietly any more.
    pub(crate) fn note_no_window(&self, file: &CachedFile) {
        if let Some(journal) = self.journal() {
            let none = ByteRange::new(0, 0);
            journal.push_if_known(file.ino, &Record::Window(file.ino, none, Version::ZERO));
        }
    }

    /// It succeeded.
    pub(crate) fn note_attached(
        &self,
        file: &CachedFile,
        state: &State,
        ranges: &[ByteRange],
        version: Version,
        size: u64,
    ) {
        let Some(journal) = self.journal() else { return };
        let record = Record::Attached(file.ino, ranges.to_vec(), version, size);
        if journal.push_if_known(file.ino, &record)
            && state.view.is_shared()
            && !journal.is_shared(file.ino)
        {
            self.note_header(file, state);
        }
        self.note_alone(file, state);
    }

    /// Whether others have the file has perhaps changed.
    pub(crate) fn note_alone(&self, file: &CachedFile, state: &State) {
        if let Some(journal) = self.journal() {
            journal.push_alone(file.ino, state.alone.is_proven());
        }
    }

    /// Where the file is on the backing, as an answer says that was asked for something else.
    pub(crate) fn note_backing(&self, file: &CachedFile, state: &mut State, at: &Backing) {
        if state.home.home().is_some_and(|h| h.ino == at.ino) {
            return;
        }
        let home = Home { path: at.path.clone(), ino: at.ino, seen: None, changing: false };
        let look = state.home.look();
        state.home.found(look, Some(home));
        self.note_header(file, state);
    }

    /// An append is going to be sent.
    pub(crate) fn note_appending(&self, file: &CachedFile) -> Result<(), Errno> {
        let Some(journal) = self.journal() else { return Ok(()) };
        {
            let state = file.state.read();
            journal.push_about(file.ino, || introduction(&state), &Record::Appending(file.ino));
        }
        journal.write()
    }

    /// Its bytes are stored.
    pub(crate) fn note_appended(
        &self,
        file: &CachedFile,
        state: &State,
        range: ByteRange,
        version: Version,
        size: u64,
    ) {
        self.note_here(file, state, (range, version), size, Time::now());
    }

    /// Bytes that are published already are stored here now.
    pub(crate) fn note_here(
        &self,
        file: &CachedFile,
        state: &State,
        (range, version): (ByteRange, Version),
        size: u64,
        at: Time,
    ) {
        let Some(journal) = self.journal() else { return };
        let record = Record::Appended(file.ino, range, version, size, at);
        journal.push_about(file.ino, || introduction(state), &record);
    }

    /// Others took bytes of ours.
    pub(crate) fn note_lost(&self, file: &CachedFile, changes: &Changes) {
        if changes.overtaken.is_empty() {
            return;
        }
        if let Some(journal) = self.journal() {
            journal.push_if_known(file.ino, &Record::Lost(file.ino, changes.overtaken.clone()));
        }
    }

    /// The disk of the cache has lost these bytes.
    pub(crate) fn note_damaged(&self, ino: Ino, ranges: &[ByteRange]) {
        if let Some(journal) = self.journal() {
            journal.push_if_known(ino, &Record::Damaged(ino, ranges.to_vec()));
            self.try_write_notes();
        }
    }

    /// This node cut the file.
    pub(crate) fn note_cut(
        &self,
        file: &CachedFile,
        state: &mut State,
        size: u64,
        version: Version,
    ) {
        state.alone.changed(version, false);
        remember_cut(&mut state.cuts, size, version);
        let Some(journal) = self.journal() else { return };
        // Somebody else may have had what was cut, and not hear of it any more.
        if !state.alone.is_proven() && !state.orphan {
            journal.push_overrides(file.ino, || introduction(state));
        }
        journal.push_if_known(file.ino, &Record::Cut(file.ino, size, version));
    }

    /// The file is of no use any more.
    pub(crate) fn note_gone(&self, ino: Ino) {
        if let Some(journal) = self.journal()
            && journal.push_if_known(ino, &Record::Gone(ino))
        {
            self.try_write_notes();
        }
    }

    /// What is known of the file besides its bytes has changed.
    pub(crate) fn note_header(&self, file: &CachedFile, state: &State) -> bool {
        let Some(journal) = self.journal() else { return false };
        // A file that was forgotten and is only being taken in again: less is known than was noted.
        if state.path.is_empty() && !state.orphan {
            return false;
        }
        journal.renew_header(file.ino, |noted| {
            let mut new = header(state);
            if new.home.is_none() {
                let older = |home: &Home| new.under.as_ref().is_some_and(|u| u.ino == home.ino);
                new.home = noted.home.clone().filter(|home| !older(home));
            }
            new
        })
    }

    /// Notes bytes that were written and not published, as far as they are not noted yet.
    pub(crate) fn note_written(&self, file: &CachedFile, state: &State) {
        let Some(journal) = self.journal() else { return };
        let dirty = state.view.unattached(ByteRange::ALL);
        let missing = if dirty.is_empty() { dirty } else { journal.not_written(file.ino, &dirty) };
        if !missing.is_empty() && (!state.orphan || self.heir.get().is_some()) {
            let (ino, known) = (file.ino, state.view.heard_version());
            let at = state.mtime.unwrap_or_else(Time::now);
            let (exact, guessed) = state.view.by_precision(&missing);
            if !exact.is_empty() {
                let record = Record::Written(ino, exact, known, at);
                journal.push_about(ino, || introduction(state), &record);
            }
            if !guessed.is_empty() {
                let record = Record::Guessed(ino, guessed, Kept::Written, known, at);
                journal.push_about(ino, || introduction(state), &record);
            }
        }
    }

    /// Notes that own bytes may have been written again past the daemon. (Those that were flushed
    /// before are not noted any more.)
    fn note_due(&self, file: &CachedFile, state: &State) {
        if is_due(state) {
            self.note_again(file, state, &state.view.owned(ByteRange::ALL));
        }
    }

    /// The same for what was just written, where an heir must know of every byte that an
    /// application was told is written.
    pub(crate) fn note_for_heir(&self, file: &CachedFile, range: ByteRange) {
        let (Some(journal), Some(_)) = (self.journal(), self.heir.get()) else { return };
        let state = file.state.read();
        let dirty = state.view.unattached(range);
        let missing = journal.not_written(file.ino, &dirty);
        if !missing.is_empty() {
            let at = state.mtime.unwrap_or_else(Time::now);
            let record = Record::Written(file.ino, missing, state.view.heard_version(), at);
            journal.push_about(file.ino, || introduction(&state), &record);
            if state.orphan {
                journal.push(&Record::Nameless(file.ino));
            }
        }
    }

    /// An append of the call at hand is about to be stored there.
    pub(crate) fn note_place(&self, ino: Ino, range: ByteRange) {
        if let (Some(heir), Some(caller)) = (self.heir.get(), ebb_meta_client::caller()) {
            heir.table.append(caller.number, ino, range);
        }
    }

    /// The same at the end of a call that did not publish.
    pub(crate) fn note_written_now(&self, file: &CachedFile) {
        let state = file.state.read();
        if self.journal().is_some() && (state.view.has_unattached() || is_due(&state)) {
            self.note_written(file, &state);
            self.note_due(file, &state);
            drop(state);
            self.try_write_notes();
        }
    }

    /// The bytes that a sync of the cache file that begins now makes safe.
    pub(crate) fn held_now(&self, file: &CachedFile) -> Vec<ByteRange> {
        let state = file.state.read();
        self.note_written(file, &state);
        self.note_due(file, &state);
        let mut held = state.view.unattached(ByteRange::ALL);
        // Past the daemon, flushed bytes may have been written again.
        held.extend(state.view.owned(ByteRange::ALL));
        held
    }

    /// The cache file was synced after these bytes were in it: the journal is, too.
    pub(crate) async fn note_durable(
        &self,
        file: &CachedFile,
        held: Vec<ByteRange>,
    ) -> Result<(), Errno> {
        let Some(journal) = self.journal.get().cloned() else { return Ok(()) };
        if !journal.push_if_known(file.ino, &Record::Durable(file.ino, held)) {
            return Ok(());
        }
        tokio::task::spawn_blocking(move || journal.sync()).await.map_err(|_| Errno::EIO)?
    }

    /// The flusher is going to write to this backing file.
    pub(crate) fn note_flushing(&self, file: &CachedFile, path: &[u8], ino: u64) {
        let mut state = file.state.write();
        if state.home.changes(Some((path, ino))) && self.note_header(file, &state) {
            drop(state);
            self.try_write_notes();
        }
    }

    /// The flusher has written, synced and told the service.
    pub(crate) async fn note_flushed(
        &self,
        file: &CachedFile,
        ranges: &[(ByteRange, Version)],
        grant: (&[u8], u64),
        (published, waits): (bool, bool),
    ) {
        let look = {
            let mut state = file.state.write();
            state.view.flushed(ranges);
            // It may have begun anew since, over what was just published.
            if published && state.under.as_ref().is_some_and(|u| u.ino != grant.1) {
                state.under = None;
            }
            state.home.look()
        };
        let flushed = Flushed { ranges: ranges.to_vec(), published, waits };
        let is_gone = self.forget_flushed(file.ino, flushed);
        let left = self.journal().is_some_and(|j| j.holds(file.ino));
        if !is_gone && (left || published) {
            let named = file.state.read().path.clone();
            let path = if published && !named.is_empty() { named } else { grant.0.to_vec() };
            // More is left to flush: whoever does that without us should know what we left.
            let seen = if left { self.look_at_backing(&path).await } else { None };
            // A part file keeps its number when it gets its name.
            let home = Home { path, ino: grant.1, seen: None, changing: false };
            let mut state = file.state.write();
            state.home.found(look, Some(seen.unwrap_or(home)));
            self.note_header(file, &state);
        }
        self.try_write_notes();
    }

    /// It has its name on the backing, in place of this older one; unless it has begun anew since.
    pub(crate) fn note_replaced(&self, file: &CachedFile, older: u64) {
        let mut state = file.state.write();
        if state.under.as_ref().is_none_or(|u| u.ino != older) {
            return;
        }
        state.under = None;
        let Some(journal) = self.journal() else { return };
        let kept = journal.holds(file.ino) || journal.overrides(file.ino);
        let is_whole = !kept && journal.is_alone(file.ino);
        // Held may be what was flushed and is not forgotten yet.
        if is_whole || self.unforgotten.has(file.ino) {
            self.forget_replaced(file.ino);
        }
        if !is_whole {
            // A part file keeps its number when it gets its name.
            let path = state.path.clone();
            let named = |home: &Home| Home { path, seen: None, changing: false, ..home.clone() };
            let home = state.home.home().filter(|h| h.is_part()).map(named);
            let look = state.home.look();
            if home.is_some() {
                state.home.found(look, home);
            }
            self.note_header(file, &state);
        }
        drop(state);
        self.try_write_notes();
    }

    /// What is at a path of the backing.
    async fn look_at_backing(&self, path: &[u8]) -> Option<Home> {
        let backing = Arc::clone(&self.backing);
        let asked = path.to_vec();
        match self.on_backing(move || backing.identity(&asked)).await {
            Ok(Ok(identity)) => Some(home_of(path, &identity)),
            Ok(Err(BackendError::Io { errno: Errno::ENOENT, .. })) => None,
            other => {
                tracing::debug!(?other, "backing not looked at");
                None
            }
        }
    }

    /// Something of one of these names was moved or removed: of noted files that it may concern,
    /// it is asked where they are now.
    pub(crate) async fn names_changed(&self, names: &[&Name]) {
        let Some(journal) = self.journal() else { return };
        let mut inos: Vec<Ino> = names.iter().flat_map(|n| journal.named(n.as_bytes())).collect();
        inos.sort_unstable();
        inos.dedup();
        for ino in inos {
            let place = self.meta.describe(ino).await;
            match (place, self.file(ino)) {
                (Ok(place), file) if place.path.is_empty() => self.note_nameless(ino, file),
                (Err(Errno::ENOENT | Errno::ESTALE), file) => match self.fate(ino).await {
                    Ok(Fate::Deleted | Fate::Nameless) => self.note_nameless(ino, file),
                    fate => tracing::warn!(%ino, ?fate, "not known to the service; it stays noted"),
                },
                (Ok(place), Some(file)) if file.state.read().path != place.path => {
                    self.note_moved(&file, place.path).await;
                }
                (Ok(_), _) => {}
                (Err(e), _) => tracing::debug!(%ino, error = %e, "not known where it is now"),
            }
        }
    }

    /// It has no name any more; what is still written to it is nobody's.
    pub(crate) fn note_nameless(&self, ino: Ino, file: Option<Arc<CachedFile>>) {
        if let Some(file) = file {
            let mut state = file.state.write();
            state.path.clear();
            // An heir goes on with it for those who have it open.
            if state.opens > 0 && self.heir.get().is_some() {
                self.make_orphan(ino, &mut state);
                if self.note_header(&file, &state)
                    && let Some(journal) = self.journal()
                {
                    journal.push(&Record::Nameless(ino));
                }
                return;
            }
        }
        self.forget_nameless(ino);
    }

    async fn note_moved(&self, file: &CachedFile, path: Vec<u8>) {
        let job_local = file.state.read().home.home().is_none_or(Home::is_part);
        let under = if job_local { self.look_at_backing(&path).await } else { None };
        {
            let mut state = file.state.write();
            state.home.moved(&path);
            state.path = path;
            state.under = under;
            self.note_header(file, &state);
        }
        self.try_write_notes();
    }

    /// Size or times are going to be set, on the backing too: what it looks like then is our own
    /// doing, also when nobody lives to note that it was done.
    #[must_use]
    pub(crate) fn note_touching(&self, file: &Arc<CachedFile>) -> Touching {
        let touching = Touching(Arc::clone(file));
        let mut state = file.state.write();
        if state.home.changes(None) && self.note_header(file, &state) {
            drop(state);
            self.try_write_notes();
        }
        touching
    }

    /// Attributes were set.
    pub(crate) fn note_attr(&self, ino: Ino, attr: ebb_types::Attr) {
        let Some(file) = self.file(ino) else { return };
        let mut state = file.state.write();
        state.attr = Some(attr);
        if self.note_header(&file, &state) {
            drop(state);
            self.try_write_notes();
        }
    }

    /// Notes what is unpublished every second, and keeps the journal small, as long as the node
    /// lives.
    pub(crate) async fn keep_notes(node: std::sync::Weak<Node>) {
        loop {
            tokio::time::sleep(NOTE_INTERVAL).await;
            let Some(node) = node.upgrade() else { return };
            node.note_all();
            let Some(journal) = node.journal.get().cloned() else { return };
            let tended = tokio::task::spawn_blocking(move || journal.tend()).await;
            if let Ok(Err(e)) = tended {
                tracing::warn!(error = %e, "the node journal cannot be written");
            }
        }
    }

    fn note_all(&self) {
        for file in self.listed_dirty() {
            let shows = self.shows_unseen(&file, &file.state.read());
            if shows && let Err(e) = self.collect(&file) {
                tracing::warn!(ino = %file.ino, error = %e, "cache file not looked at");
            }
            let state = file.state.read();
            if state.view.has_unattached() {
                self.note_written(&file, &state);
            }
            self.note_due(&file, &state);
        }
    }

    /// The daemon ends with bytes in its cache: the next one shall know all of them.
    pub(crate) fn last_notes(&self) {
        self.note_all();
        if let Some(journal) = self.journal()
            && let Err(e) = journal.sync()
        {
            tracing::error!(error = %e, "the node journal cannot be written");
        }
    }
}

/// Own bytes of it may have been written again past the daemon since they were attached.
fn is_due(state: &State) -> bool {
    let track = state.passing.as_ref().and_then(|p| p.track.as_ref());
    track.is_some_and(|t| t.is_due())
}
