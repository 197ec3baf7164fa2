//! A lost node's bytes become this node's: those of which it holds copies, and which the lost node
//! still owned. From then on they are dirty bytes like others: read, flushed, journalled.
//!
//! Consistency: the service moves the ownership first; until the bytes are stored here, peers
//! that ask for them are told to come again, and so are readers here. Before the service is asked,
//! the journal knows what others have written over of this node's bytes, and the log of the set
//! what the service is asked for: a daemon that dies in between leaves no doubt about whose bytes
//! the copies are by then ([`super::resume`]).

use crate::cache;
use crate::file::CachedFile;
use crate::node::{Fate, Node};
use crate::replica::held::bytes;
use ebb_meta_client::{Adopted, Place};
use ebb_transport::CopySet;
use ebb_types::{ByteRange, Errno, Ino, Time, in_steps};
use rangemap::RangeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Bytes that are adopted in one step.
const STEP_BYTES: u64 = 4 << 20;

/// Ranges that are adopted in one step.
const STEP_RANGES: usize = 1024;

/// Until something that failed is tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// An adoption that is asked for is carried out once; its answer must not be missed.
const PATIENCE: Duration = Duration::from_secs(3600);

/// How long a drain waits for nodes that do not answer to be declared lost, and for what is adopted
/// to become less.
const LAST_ADOPTIONS: Duration = Duration::from_secs(45);

/// Copies of nodes that do not answer, which are not this node's own bytes yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// How many bytes.
    pub bytes: u64,
    /// Of how many nodes.
    pub sets: usize,
}

/// The parts of `ranges` that are not this node's published bytes.
fn not_owned(file: &CachedFile, ranges: &[ByteRange]) -> Vec<ByteRange> {
    let state = file.state.read();
    let full = |r: &ByteRange| !r.is_empty();
    let mut owned: RangeSet<u64> = RangeSet::new();
    let unflushed = state.view.unflushed(ByteRange::ALL).into_iter().map(|(range, _)| range);
    unflushed.filter(full).for_each(|r| owned.insert(r.to_std()));
    let ranges = ranges.iter().filter(|r| full(r));
    ranges
        .flat_map(|r| owned.gaps(&r.to_std()).map(|gap| bytes(&gap)).collect::<Vec<_>>())
        .collect()
}

impl Node {
    /// The owner of the copies of this epoch is lost.
    pub(super) fn begin_adoption(&self, epoch: u64) {
        let held = &self.replicas.held;
        let Some(set) = held.set_of(epoch) else { return };
        if held.begin_adoption(set)
            && let Some(node) = self.me_arc()
        {
            tracing::warn!(owner = %set.owner, "adopting the bytes of a lost node");
            self.runtime.spawn(async move { node.adopt_all(set).await });
        }
    }

    async fn adopt_all(&self, set: CopySet) {
        let held = &self.replicas.held;
        for (ino, ranges) in held.files(set) {
            loop {
                match self.adopt_file(set, ino, &ranges).await {
                    Ok(()) => break,
                    // It has no name and no user any more.
                    Err(Errno::ENOENT | Errno::ESTALE | Errno::EISDIR | Errno::EINVAL) => {
                        match self.fate(ino).await {
                            Ok(Fate::Deleted | Fate::Nameless) => break,
                            fate => tracing::warn!(%ino, ?fate, "its copies are kept"),
                        }
                    }
                    // Its owner is back, or another set of its copies counts.
                    Err(Errno::EREMCHG) => return,
                    Err(e) => tracing::warn!(%ino, error = %e, "adopting again in a moment"),
                }
                if held.set_of(set.epoch).is_none() {
                    return;
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
        tracing::info!(owner = %set.owner, "adopted what was held of it");
        held.finish(set);
    }

    async fn adopt_file(&self, set: CopySet, ino: Ino, held: &[ByteRange]) -> Result<(), Errno> {
        let place = self.meta.describe(ino).await?;
        if place.path.is_empty() {
            return Err(Errno::ENOENT);
        }
        let file = self.file_to_adopt(ino, &place).await?;
        for step in in_steps(held, STEP_BYTES, STEP_RANGES) {
            // What is left after a failure in between.
            let step: Vec<ByteRange> =
                step.into_iter().filter(|r| self.replicas.held.has(set, ino, &[*r])).collect();
            if step.is_empty() {
                continue;
            }
            let _turn = file.turn.lock().await;
            self.query(&file, ByteRange::ALL).await?;
            self.write_notes()?;
            // What this node's own partner has of these bytes is older than they are.
            for range in &step {
                self.uncopy(ino, *range).await?;
            }
            let wanted = not_owned(&file, &step);
            if !wanted.is_empty() {
                let adopted = self.ask_for(set, ino, &wanted).await?;
                self.store_adopted(set, &file, &adopted).await;
            }
            self.replicas.held.forget(set, ino, &step)?;
        }
        self.copies_behind();
        self.query(&file, ByteRange::ALL).await
    }

    async fn ask_for(
        &self,
        set: CopySet,
        ino: Ino,
        wanted: &[ByteRange],
    ) -> Result<Adopted, Errno> {
        let held = &self.replicas.held;
        held.note_adopting(set, ino, wanted)?;
        let adopted = self.meta.within(PATIENCE).adopt(set.owner, set.epoch, ino, wanted).await;
        if adopted.is_err() {
            held.note_adopting(set, ino, &[])?;
        }
        adopted
    }

    async fn file_to_adopt(&self, ino: Ino, place: &Place) -> Result<Arc<CachedFile>, Errno> {
        let attr = self.meta.getattr(ino).await?;
        let file = self.file_or_new(ino, &self.rules.of(&place.path, &place.model));
        let mut state = file.state.write();
        if state.path.is_empty() {
            state.path.clone_from(&place.path);
        }
        state.attr.get_or_insert(attr);
        drop(state);
        Ok(file)
    }

    /// The service counts on these bytes being here: it is tried until they are.
    async fn store_adopted(&self, set: CopySet, file: &Arc<CachedFile>, adopted: &Adopted) {
        for range in &adopted.ranges {
            // On the list before the bytes are there: a drain waits for them.
            self.list_dirty(file);
            while let Err(e) = self.store_one(set, file, *range, adopted) {
                tracing::error!(ino = %file.ino, %range, error = %e, "cannot store adopted bytes");
                tokio::time::sleep(AGAIN).await;
            }
            self.note_stored(file, *range);
            self.list_dirty(file);
            self.replicas.adopted.fetch_add(range.len(), Relaxed);
            self.metrics.taken_over.fetch_add(range.len(), Relaxed);
        }
        self.try_write_notes();
    }

    fn store_one(
        &self,
        set: CopySet,
        file: &CachedFile,
        range: ByteRange,
        adopted: &Adopted,
    ) -> Result<(), Errno> {
        let copies = self.replicas.held.open(set, file.ino, &[range]).ok_or(Errno::EIO)?;
        let cache = file.cache_to_write(&self.cache)?;
        let mut state = file.state.write();
        // What was written here since is newer.
        let written = state.view.unattached(range);
        let mut at = range.start();
        let mut parts = Vec::new();
        for bytes in written.iter().map(|w| w.intersect(range)) {
            parts.push(ByteRange::new(at, bytes.start()));
            at = bytes.end();
        }
        parts.push(ByteRange::new(at, range.end()));
        parts.retain(|part| !part.is_empty());
        parts.iter().for_each(|part| state.sums.forget(*part));
        cache::copy(&copies, &cache, &parts)?;
        for part in parts {
            state.view.write(part);
            let changes = state.view.appended(part, adopted.version, adopted.size);
            let at = state.attr.map_or_else(Time::now, |a| a.mtime);
            self.note_here(file, &state, (part, adopted.version), adopted.size, at);
            self.note_changes(file, &changes);
        }
        Ok(())
    }

    /// What this node holds of nodes that do not answer any more is adopted, so that it can be
    /// drained. It is waited for as long as it goes on. Returns what is left.
    pub(crate) async fn adopt_before_drain(&self, limit: Option<Duration>) -> Waiting {
        let last = limit.map(|limit| Instant::now() + limit);
        let mut left = u64::MAX;
        let mut end = Instant::now();
        loop {
            let waiting = self.waiting_copies().await;
            if waiting.bytes == 0 {
                return waiting;
            }
            if waiting.bytes < left {
                left = waiting.bytes;
                end = Instant::now() + LAST_ADOPTIONS;
            }
            if Instant::now() >= last.map_or(end, |last| last.min(end)) {
                tracing::error!(?waiting, "bytes of other nodes were not adopted in time");
                return waiting;
            }
            tokio::time::sleep(AGAIN / 5).await;
        }
    }

    /// What this node holds of nodes that are lost, or that may be: nobody knows for certain while
    /// the service does not answer.
    pub(crate) async fn waiting_copies(&self) -> Waiting {
        let held = &self.replicas.held;
        let list = held.list();
        if list.is_empty() {
            return Waiting::default();
        }
        let Ok(pairs) = self.meta.copies(&list, false, &[]).await else {
            return Waiting { bytes: held.bytes(), sets: list.len() };
        };
        for epoch in &pairs.drop {
            self.drop_set(*epoch);
        }
        for epoch in &pairs.take {
            self.begin_adoption(*epoch);
        }
        let waiting: Vec<u64> = pairs
            .take
            .iter()
            .chain(&pairs.silent)
            .filter_map(|epoch| held.set_of(*epoch))
            .map(|set| held.bytes_in(set))
            .filter(|bytes| *bytes > 0)
            .collect();
        Waiting { bytes: waiting.iter().sum(), sets: waiting.len() }
    }

    pub(super) fn drop_set(&self, epoch: u64) {
        let held = &self.replicas.held;
        held.set_of(epoch).into_iter().for_each(|set| held.remove(set));
    }
}
