//! What was synced is not forgotten here before the service has what took its place on stable storage.
//! Otherwise a power cut may undo the end of a flush, or an unlink, at the service alone: it then asks
//! this node for bytes that are in neither its journal nor its cache any more.
//!
//! | happened at the service | kept until that is on stable storage |
//! |---|---|
//! | a flush of synced bytes ended | what the node journal says of them, and the bytes in the cache; copies |
//! | a file with synced bytes was deleted | the same, and the cache file; noted as nameless, so that no recovery brings it back by itself |
//! | synced bytes were cut off, by this node | the cache file's end; whoever cuts waits for it ([`Node::cut_is_stable`]) |
//!
//! Consistency: what is kept is counted as flushed or deleted everywhere else; a daemon that takes over
//! asks the service what became of it.
//! Retries: after a pause, as long as the service does not answer.

use crate::alone::Alone;
use crate::file::CachedFile;
use crate::node::Node;
use ebb_locks::Mutex;
use ebb_node_journal::Record;
use ebb_types::{ByteRange, Errno, Ino, Version};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// From the first of them on, so that one question answers for many. Not in step with what is done every
/// second here and there.
const PAUSE: Duration = Duration::from_millis(700);

/// A flush that the service has ended.
#[derive(Clone, Debug)]
pub(crate) struct Flushed {
    /// What, and up to which versions.
    pub ranges: Vec<(ByteRange, Version)>,
    /// The file has its name on the backing.
    pub published: bool,
    /// It may get it later: it takes the place of an older one when it is closed.
    pub waits: bool,
}

/// A leaf: held for a few map operations only.
#[derive(Debug, Default)]
pub(crate) struct Unforgotten {
    state: Mutex<State>,
    /// Whoever asks the service has this.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    flushed: BTreeMap<Ino, Vec<Flushed>>,
    /// What lost its last name; with the bytes of the cache file, when nobody has it open any more.
    deleted: BTreeMap<Ino, Option<u64>>,
    /// Somebody is going to ask.
    is_asked_for: bool,
}

impl State {
    fn is_empty(&self) -> bool {
        self.flushed.is_empty() && self.deleted.is_empty()
    }
}

impl Unforgotten {
    /// Something of this file is kept.
    pub fn has(&self, ino: Ino) -> bool {
        let state = self.state.lock();
        state.flushed.contains_key(&ino) || state.deleted.contains_key(&ino)
    }

    /// These bytes of it must stay in the cache.
    pub fn has_in(&self, ino: Ino, range: ByteRange) -> bool {
        let state = self.state.lock();
        let flushed = state.flushed.get(&ino).into_iter().flatten().flat_map(|f| &f.ranges);
        state.deleted.contains_key(&ino) || { flushed }.any(|(r, _)| r.overlaps(range))
    }

    /// Bytes of deleted files.
    pub fn deleted_bytes(&self) -> u64 {
        self.state.lock().deleted.values().flatten().sum()
    }

    /// What was flushed counts as not flushed again.
    pub fn not_flushed(&self, ino: Ino) {
        self.state.lock().flushed.remove(&ino);
    }

    /// These were noted, in this order and before any that came since.
    fn noted(&self, ino: Ino, count: usize) {
        let mut state = self.state.lock();
        let Some(all) = state.flushed.get_mut(&ino) else { return };
        all.drain(..count.min(all.len()));
        if all.is_empty() {
            state.flushed.remove(&ino);
        }
    }
}

impl Node {
    /// The journal says of bytes in these ranges that they were synced, and are nowhere else.
    fn are_vouched_for(&self, ino: Ino, ranges: impl Iterator<Item = ByteRange>) -> bool {
        self.journal().is_some_and(|journal| journal.has_durable(ino, ranges))
    }

    /// The service has ended a flush; the file's state says so already. True when nothing of the file is
    /// noted any more.
    pub(crate) fn forget_flushed(&self, ino: Ino, flushed: Flushed) -> bool {
        let ranges = flushed.ranges.iter().map(|(range, _)| *range);
        if self.unforgotten.has(ino) || self.are_vouched_for(ino, ranges) {
            self.keep_for_now(|state| state.flushed.entry(ino).or_default().push(flushed));
            return false;
        }
        self.flush_is_noted(ino, &flushed)
    }

    /// The file has its name on the backing.
    pub(crate) fn forget_replaced(&self, ino: Ino) {
        let named = Flushed { ranges: Vec::new(), published: true, waits: false };
        self.keep_for_now(|state| state.flushed.entry(ino).or_default().push(named));
    }

    /// The file has no name any more: the journal need not tell of it.
    pub(crate) fn forget_nameless(&self, ino: Ino) {
        if !self.are_vouched_for(ino, [ByteRange::ALL].into_iter()) {
            self.note_gone(ino);
        } else if !self.unforgotten.state.lock().deleted.contains_key(&ino) {
            self.keep_deleted(ino, None);
        }
    }

    /// The file is deleted, and is this node's no more.
    pub(crate) fn forget_deleted(&self, ino: Ino, bytes: u64) {
        if let Some(known) = self.unforgotten.state.lock().deleted.get_mut(&ino) {
            *known = Some(bytes);
        } else if self.are_vouched_for(ino, [ByteRange::ALL].into_iter()) {
            self.keep_deleted(ino, Some(bytes));
        } else {
            self.remove_deleted(ino);
        }
    }

    fn keep_deleted(&self, ino: Ino, bytes: Option<u64>) {
        if let Some(journal) = self.journal() {
            journal.push_if_known(ino, &Record::Nameless(ino));
            self.try_write_notes();
        }
        self.keep_for_now(|state| {
            state.deleted.insert(ino, bytes);
        });
    }

    fn keep_for_now(&self, put: impl FnOnce(&mut State)) {
        self.metrics.kept_until_stable.fetch_add(1, Relaxed);
        let first = {
            let mut state = self.unforgotten.state.lock();
            put(&mut state);
            !std::mem::replace(&mut state.is_asked_for, true)
        };
        if let (true, Some(node)) = (first, self.me_arc()) {
            let node = Arc::downgrade(&node);
            self.runtime.spawn(async move {
                loop {
                    tokio::time::sleep(PAUSE).await;
                    let Some(node) = node.upgrade() else { return };
                    if let Err(e) = node.let_go_of_flushed().await {
                        tracing::debug!(error = %e, "what was flushed is not forgotten yet");
                    }
                    let mut state = node.unforgotten.state.lock();
                    if state.is_empty() {
                        state.is_asked_for = false;
                        return;
                    }
                }
            });
        }
    }

    /// The service has cut the file. Where synced bytes go, they go from the cache file when both journals
    /// have the cut on stable storage, first the service's: else a power cut may leave the file as long as it
    /// was, and its end gone; or this node alone would know that it was cut.
    pub(crate) async fn cut_is_stable(
        &self,
        file: &CachedFile,
        size: u64,
        version: Version,
    ) -> Result<(), Errno> {
        let Some(journal) = self.journal.get().cloned() else { return Ok(()) };
        if !journal.has_durable(file.ino, std::iter::once(ByteRange::from(size))) {
            return Ok(());
        }
        self.meta.sync_meta().await?;
        self.note_cut(file, &mut file.state.write(), size, version);
        tokio::task::spawn_blocking(move || journal.sync()).await.map_err(|_| Errno::EIO)?
    }

    /// Asks the service to bring what it has to stable storage, and forgets what was kept until then.
    pub(crate) async fn let_go_of_flushed(&self) -> Result<(), Errno> {
        let _turn = self.unforgotten.turn.lock().await;
        let (flushed, deleted) = {
            let state = self.unforgotten.state.lock();
            if state.is_empty() {
                return Ok(());
            }
            (state.flushed.clone(), state.deleted.keys().copied().collect::<Vec<Ino>>())
        };
        let session = self.meta.session();
        self.meta.sync_meta().await?;
        // Another service, or one that has begun again, may have forgotten what it had answered before.
        if self.meta.session() != session {
            return Err(Errno::EAGAIN);
        }
        for (ino, all) in flushed {
            // First: as long as they are not noted, their bytes must stay.
            for flushed in &all {
                self.flush_is_noted(ino, flushed);
            }
            self.unforgotten.noted(ino, all.len());
        }
        for ino in deleted {
            let bytes = self.unforgotten.state.lock().deleted.remove(&ino);
            match bytes.flatten() {
                Some(_) => self.remove_deleted(ino),
                // Its cache file goes with the last close.
                None => self.note_gone(ino),
            }
        }
        self.try_write_notes();
        Ok(())
    }

    /// The node journal forgets what the backing has. True when that is all of the file.
    fn flush_is_noted(&self, ino: Ino, flushed: &Flushed) -> bool {
        let mut is_gone = false;
        if let Some(journal) = self.journal() {
            if !flushed.ranges.is_empty() {
                journal.push_if_known(ino, &Record::Flushed(ino, flushed.ranges.clone()));
            }
            let left = journal.holds(ino);
            if !flushed.published && !left && !flushed.waits {
                self.file(ino).iter().for_each(|file| self.lacks_what_others_have(file));
            }
            // What is written quietly from now on, behind the end, the next daemon must tell from what is lost.
            let needed = left || journal.overrides(ino) || journal.is_untold(ino);
            if flushed.published && !needed && journal.is_alone(ino) {
                journal.push_if_known(ino, &Record::Gone(ino));
                is_gone = true;
            }
        }
        self.copies_in_surplus(ino);
        is_gone
    }

    fn lacks_what_others_have(&self, file: &CachedFile) {
        let mut state = file.state.write();
        state.alone = Alone::default();
        self.note_alone(file, &state);
    }

    fn remove_deleted(&self, ino: Ino) {
        self.note_gone(ino);
        self.copies_in_surplus(ino);
        if let Err(e) = self.cache.remove(ino) {
            tracing::warn!(%ino, error = %e, "cannot remove a cache file");
        }
    }
}
