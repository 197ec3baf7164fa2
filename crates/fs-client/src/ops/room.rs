//! Room in the buffer. Clean bytes are given up first, in the order of the eviction policy; when
//! that is not enough the flusher is told to hurry, and writers wait for what it brings to the
//! backing. They are slowed, and fail only when the backing takes nothing for a long time.
//!
//! Never given up: bytes that are not on the backing, and bytes that somebody holds
//! ([`CachedFile::hold`]), as a peer that is reading them, or the kernel past the daemon.

use crate::cache;
use crate::evict::{Chunk, EvictPolicy, Order, Place, Use};
use crate::file::CachedFile;
use crate::node::Node;
use crate::ops::sync::is_gone;
use crate::ops::unseen::Past;
use crate::unforgotten::Flushed;
use ebb_flusher::Engine;
use ebb_locks::Mutex;
use ebb_types::{ByteRange, Errno, Ino, Time};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::{Duration, Instant};

/// Shares of the capacity, in 64ths. Beyond `FULL` writers wait; they go on at `ENOUGH`, so that
/// a slow backing slows them in small steps; eviction goes on down to `ROOMY`, so that it is
/// not needed at once again.
const FULL: u64 = 63;
const ENOUGH: u64 = 60;
const ROOMY: u64 = 48;

/// A disk with less free space than this counts as full.
const SPARE_BYTES: u64 = 16 << 20;

/// So many inodes, too.
const SPARE_INODES: u64 = 16;

/// Places of the order that are looked at under one hold of its lock.
const BATCH: usize = 256;

/// Files whose bytes are given up at the same time: each costs a request.
const FILES_AT_ONCE: usize = 16;

/// Between two looks at what the flusher has brought to the backing; longer when a look takes long
/// because there are many files, so that looking seldom costs more than a tenth of the time. A look that
/// waited, as for a service that is away, says nothing about the next one: hence the upper bound.
const LOOK_EVERY: Duration = Duration::from_millis(5);
const LOOK_SHARE: u32 = 10;
const LOOK_AT_LEAST_EVERY: Duration = Duration::from_millis(200);

/// What could not be given up is tried again so often while writers wait: somebody was reading it, or the
/// service did not answer.
const TRIED_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// A backing that refuses everything for so long fails the writers that wait for it: sooner when
/// it says that it is full, which seldom passes by itself.
const FULL_BACKING_PATIENCE: Duration = Duration::from_secs(5);
const FAILING_BACKING_PATIENCE: Duration = Duration::from_secs(60);

/// How long a writer waits when nothing fails and nothing moves either.
const PATIENCE: Duration = Duration::from_secs(600);

/// Why room is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The buffer may hold more than it should.
    Share,
    /// The file system of the cache has refused: no blocks, inodes or quota are left there,
    /// whatever its figures say.
    Disk,
}

/// What the node keeps for making room.
pub struct Room {
    /// A leaf: held for a few map operations only.
    order: Mutex<Order>,
    /// Upper bound of the bytes in the buffer.
    used: AtomicU64,
    /// Bytes given up so far.
    evicted: AtomicU64,
    /// Files forgotten so far: there were too many, their bytes made room, or the kernel forgot them.
    forgotten: AtomicU64,
    /// Whoever makes room has this; when room was made last.
    making: tokio::sync::Mutex<Option<Instant>>,
    /// What the kernel has of it.
    pub(crate) past: Past,
    /// Since when the file system of the cache takes nothing, in seconds since 1970; 0: it does.
    refused: AtomicU64,
}

impl Room {
    /// For an empty buffer.
    #[must_use]
    pub fn new(policy: EvictPolicy) -> Room {
        Room {
            order: Mutex::new(Order::new(policy)),
            used: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
            making: tokio::sync::Mutex::new(None),
            past: Past::default(),
            refused: AtomicU64::new(0),
        }
    }

    /// Bytes given up so far.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Relaxed)
    }

    /// Files forgotten so far: there were too many, their bytes made room, or the kernel forgot them.
    #[must_use]
    pub fn forgotten(&self) -> u64 {
        self.forgotten.load(Relaxed)
    }

    /// One more.
    pub(crate) fn file_gone(&self) {
        self.forgotten.fetch_add(1, Relaxed);
    }

    /// Since when writers fail because the file system of the cache is full, if they do.
    #[must_use]
    pub fn refused_since(&self) -> Option<u64> {
        Some(self.refused.load(Relaxed)).filter(|since| *since > 0)
    }

    /// Nothing of the file is in the buffer any more.
    pub fn forget_file(&self, ino: Ino) {
        self.order.lock().take_file(ino);
    }
}

/// The flusher hurries while this lives.
struct Hurry(Arc<Engine>);

impl Hurry {
    fn new(flusher: Arc<Engine>) -> Hurry {
        flusher.hurry(true);
        Hurry(flusher)
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        self.0.hurry(false);
    }
}

impl Node {
    /// Bytes came into the buffer that nobody noted.
    pub(crate) fn note_unseen(&self, bytes: u64) {
        self.room.used.fetch_add(bytes, Relaxed);
    }

    /// Bytes that can still come before writers wait, as far as is noted.
    pub(crate) fn room_left(&self) -> u64 {
        self.share(FULL).saturating_sub(self.room.used.load(Relaxed))
    }

    fn share(&self, sixty_fourths: u64) -> u64 {
        // What is kept for others is not there for this node.
        let capacity = self.capacity().saturating_sub(self.replicas.held.bytes());
        (u128::from(capacity) * u128::from(sixty_fourths) / 64) as u64
    }

    /// True when the buffer holds more than it should. The sum is an upper bound that is made
    /// exact when it matters.
    pub(crate) fn is_over_capacity(&self) -> bool {
        self.is_over(self.share(FULL))
    }

    /// True when it holds more than `limit`.
    pub(crate) fn is_over(&self, limit: u64) -> bool {
        self.room.used.load(Relaxed) > limit && self.count_used() > limit
    }

    /// Whether copies of so many bytes of another node fit: in half of the buffer at most, and
    /// never in place of bytes that must stay.
    pub(crate) fn has_room_for_copies(&self, bytes: u64) -> bool {
        let held = self.replicas.held.bytes().saturating_add(bytes);
        let capacity = self.capacity();
        let fits = |own: u64| own.saturating_add(held) <= capacity;
        let free = self.cache.space().is_ok_and(|(_, free)| free >= SPARE_BYTES + bytes);
        // The dirty bytes are counted only when the sum of all does not fit.
        let room = || fits(self.room.used.load(Relaxed)) || fits(self.count().0);
        held <= capacity / 2 && free && room()
    }

    /// How many clean bytes can stay in the buffer beside so many dirty ones.
    pub(crate) fn room_for_clean(&self, dirty: u64) -> u64 {
        self.share(FULL).saturating_sub(dirty)
    }

    fn count_used(&self) -> u64 {
        let (dirty, clean) = self.count();
        dirty + clean
    }

    /// Dirty and clean bytes in the buffer; corrects the upper bound.
    fn count(&self) -> (u64, u64) {
        let (dirty, clean) = self.local_bytes();
        let dirty = dirty + self.unforgotten.deleted_bytes();
        self.room.used.store(dirty + clean, Relaxed);
        (dirty, clean)
    }

    /// Notes that bytes of a file came into the buffer.
    pub(crate) fn note_stored(&self, file: &CachedFile, range: ByteRange) {
        self.room.used.fetch_add(range.len(), Relaxed);
        self.note_used(file, range);
    }

    /// Notes that bytes of a file that are in the buffer were used.
    pub(crate) fn note_used(&self, file: &CachedFile, range: ByteRange) {
        for chunk in Chunk::of(file.ino, range) {
            // Uses in a row count once: most operations cost a load here.
            if file.last_chunk.load(Acquire) != chunk.index + 1 {
                file.last_chunk.swap(chunk.index + 1, AcqRel);
                self.room.order.lock().touch(chunk);
            }
        }
    }

    /// Makes room for writers. One caller works, the others wait for it.
    pub(crate) async fn make_room(&self, need: Need) -> Result<(), Errno> {
        let asked = Instant::now();
        let mut last = self.room.making.lock().await;
        // Somebody has just made room.
        if last.is_some_and(|at| at > asked) {
            return Ok(());
        }
        let short = self.is_disk_short();
        let full_disk = need == Need::Disk || short;
        if !full_disk && !self.is_over_capacity() {
            return Ok(());
        }
        let used = self.count_used();
        if used == 0 {
            self.note_refused();
            return Err(Errno::ENOSPC);
        }
        // A disk that something else fills is relieved of a quarter of what is here.
        let bound = |share| self.share(share).min(if full_disk { used / 64 * share } else { used });
        let (enough, roomy) = (bound(ENOUGH), bound(ROOMY));
        self.let_go_and_evict(roomy).await;
        if self.count_used() > enough {
            let of_disk = full_disk.then_some(short);
            self.wait_for_flusher(enough, roomy, of_disk).await?;
        }
        *last = Some(Instant::now());
        Ok(())
    }

    /// True when the file system of the cache has little left, in bytes or inodes.
    pub(crate) fn is_disk_short(&self) -> bool {
        let bytes = self.cache.space().is_ok_and(|(_, free)| free < SPARE_BYTES);
        bytes || self.cache.free_inodes().is_ok_and(|free| free.is_some_and(|n| n < SPARE_INODES))
    }

    /// Nothing of ours is in the cache, and its file system is full all the same.
    fn note_refused(&self) {
        if self.room.refused.swap(Time::now().sec.unsigned_abs().max(1), Relaxed) == 0 {
            let cache = self.config.cache.display();
            tracing::error!(%cache, "the file system of --cache is full of other files");
        }
    }

    /// It has taken something.
    pub(crate) fn note_taken(&self) {
        if self.room.refused.load(Relaxed) > 0 {
            self.room.refused.store(0, Relaxed);
        }
    }

    /// Gives up clean bytes for a reader that found the buffer full; false when somebody is at it
    /// already, or when it is full of dirty bytes.
    pub(crate) async fn make_room_to_keep(&self) -> bool {
        let Ok(mut last) = self.room.making.try_lock() else { return false };
        self.evict(self.share(ROOMY)).await;
        *last = Some(Instant::now());
        self.count_used() <= self.share(FULL)
    }

    /// Waits until the flusher has made bytes clean and these are given up. When it is the disk that
    /// is full (`short`: by its own figures), others may make room on it as well, and what nobody
    /// can flush, as the bytes of an open file without a name, is not waited for.
    async fn wait_for_flusher(
        &self,
        enough: u64,
        roomy: u64,
        disk_short: Option<bool>,
    ) -> Result<(), Errno> {
        let flusher = self.flusher.get().cloned().ok_or(Errno::ENOSPC)?;
        let _hurry = Hurry::new(Arc::clone(&flusher));
        let began = Instant::now();
        let mut moved = ((flusher.flushed_bytes(), self.room.past.pinned()), began);
        let (mut took, mut tried) = (Duration::ZERO, began);
        loop {
            tokio::time::sleep(pause_after(took)).await;
            let look = Instant::now();
            // What the kernel lets go of can be given up as well.
            let now = (flusher.flushed_bytes(), self.room.past.pinned());
            let still = now == moved.0;
            if !still {
                moved = (now, Instant::now());
            }
            if !still || tried.elapsed() >= TRIED_AGAIN_AFTER {
                self.let_go_and_evict(roomy).await;
                tried = Instant::now();
            }
            let has_room = disk_short == Some(true) && !self.is_disk_short();
            // Bytes also go when files are deleted or cut.
            if has_room || self.count_used() <= enough {
                return Ok(());
            }
            let stuck = moved.1.elapsed();
            let waited = still && stuck > FULL_BACKING_PATIENCE;
            if waited && disk_short.is_some() && flusher.status().in_flight == 0 {
                self.note_refused();
                return Err(Errno::ENOSPC);
            }
            let kept = stuck >= FULL_BACKING_PATIENCE && self.room.past.pinned() > enough;
            let errno = if kept { Some(Errno::ENOSPC) } else { hopeless(&flusher, stuck) };
            if still && let Some(errno) = errno {
                // What became clean without us having seen it.
                self.evict(roomy).await;
                return if self.count_used() <= enough { Ok(()) } else { Err(errno) };
            }
            took = look.elapsed();
        }
    }

    /// For writers, who wait for room: also what is kept until the service is asked.
    async fn let_go_and_evict(&self, wanted: u64) {
        if let Err(e) = self.let_go_of_flushed().await {
            tracing::debug!(error = %e, "what was flushed stays in the cache");
        }
        self.evict(wanted).await;
    }

    /// Gives up clean bytes, in the order of the policy, until no more than `wanted` bytes are
    /// here or none is left that may go.
    async fn evict(&self, wanted: u64) {
        for remembered in [false, true] {
            let (dirty, clean) = self.count();
            let excess = (dirty + clean).saturating_sub(wanted).min(clean);
            if excess == 0 {
                return;
            }
            if remembered {
                // Clean bytes that the order does not know, as after a takeover.
                self.remember_all();
            }
            let victims = self.victims(excess);
            self.give_up(victims).await;
        }
        self.count_used();
    }

    /// These chunks may have bytes, whether they are known or not.
    pub(crate) fn remember(&self, chunks: &[Chunk]) {
        let mut order = self.room.order.lock();
        chunks.iter().for_each(|c| order.remember(*c));
    }

    fn remember_all(&self) {
        for file in self.all_files() {
            let (clean, size) = {
                let state = file.state.read();
                (state.view.clean_bytes(), state.view.size())
            };
            if clean > 0 {
                let mut order = self.room.order.lock();
                Chunk::of(file.ino, ByteRange::new(0, size)).for_each(|c| order.remember(c));
            }
        }
    }

    /// The first chunks of the order with `excess` clean bytes together, by file.
    fn victims(&self, excess: u64) -> BTreeMap<Ino, Vec<Chunk>> {
        let (mut found, mut bytes) = (BTreeMap::<Ino, Vec<Chunk>>::new(), 0);
        let mut at: Option<Place> = None;
        while bytes < excess {
            let places = self.room.order.lock().behind(at, BATCH);
            let Some(last) = places.last() else { break };
            at = Some(*last);
            for chunk in places.into_iter().map(Place::chunk) {
                if bytes >= excess {
                    break;
                }
                let Some(file) = self.file(chunk.ino) else {
                    self.room.order.lock().take(chunk);
                    continue;
                };
                if file.is_held(chunk.range()) {
                    continue;
                }
                let clean = {
                    let state = file.state.read();
                    let passed = state.passing.is_some();
                    if passed { 0 } else { state.view.clean_bytes_in(chunk.range()) }
                };
                if clean > 0 {
                    bytes += clean;
                    found.entry(chunk.ino).or_default().push(chunk);
                }
            }
        }
        found
    }

    async fn give_up(&self, victims: BTreeMap<Ino, Vec<Chunk>>) {
        let Some(node) = self.me_arc() else { return };
        let mut tasks = tokio::task::JoinSet::new();
        for (ino, chunks) in victims {
            if tasks.len() >= FILES_AT_ONCE {
                tasks.join_next().await;
            }
            let node = Arc::clone(&node);
            tasks.spawn(async move { node.give_up_of_file(ino, &chunks).await });
        }
        while tasks.join_next().await.is_some() {}
    }

    pub(crate) async fn give_up_of_file(&self, ino: Ino, chunks: &[Chunk]) {
        let Some(file) = self.file(ino) else { return };
        if let Err(error) = self.detach_flushed(&file, chunks).await {
            tracing::debug!(%ino, %error, "not detached");
            // Another node has deleted it, and nobody told this one: what is here of it goes, too. What
            // stays, because it is open, is not what is tried first from now on.
            if is_gone(error) && self.unlinked(&file, error).await.is_ok() {
                return self.room.forget_file(ino);
            }
        }
        for chunk in chunks {
            self.drop_clean(&file, *chunk);
        }
        let is_empty = {
            let state = file.state.read();
            state.opens == 0 && state.view.clean_bytes() + state.view.unflushed_bytes() == 0
        };
        drop(file);
        if is_empty {
            self.forget(ino);
        }
    }

    /// What is flushed is the backing's again, so that nobody asks this node for it.
    async fn detach_flushed(&self, file: &Arc<CachedFile>, chunks: &[Chunk]) -> Result<(), Errno> {
        // With the turn, nobody begins to pass it through.
        let _turn = file.turn.lock().await;
        let ranges: Vec<ByteRange> = {
            let state = file.state.read();
            if state.passing.is_some() {
                return Ok(());
            }
            let free = chunks.iter().map(|c| c.range()).filter(|r| !file.is_held(*r));
            joined(free.flat_map(|r| state.view.detachable(r)))
        };
        if ranges.is_empty() {
            return Ok(());
        }
        let answer = self.meta.detach(file.ino, &ranges).await?;
        // With the turn, none of them can have been attached again since.
        let mut state = file.state.write();
        state.view.detached(&ranges, answer);
        state.alone.changed(answer.version, false);
        Ok(())
    }

    /// Drops the clean bytes of a chunk and frees their space.
    fn drop_clean(&self, file: &CachedFile, chunk: Chunk) {
        let Ok(cache) = file.cache(&self.cache) else { return };
        // Out of the order before the bytes go: whoever uses the chunk from now on puts it in
        // again, because the next line makes that use a new one.
        let Some(old) = self.room.order.lock().take(chunk) else { return };
        file.last_chunk.swap(0, AcqRel);
        let mut state = file.state.write();
        // Asked under the lock that whoever holds bytes must take to see that they are here.
        let used = state.passing.is_some() || file.is_held(chunk.range());
        if used || self.unforgotten.has_in(chunk.ino, chunk.range()) {
            drop(state);
            return self.put_back(chunk, old);
        }
        // That they were flushed must be noted and written first: a journal that still has them for ours
        // would take the holes for bytes. It has, when the end of the flush was not heard, and an
        // answer about the file told of it.
        let clean = state.view.clean(chunk.range());
        let unnoted = self.journal().map(|journal| journal.owned_in(chunk.ino, &clean));
        if let Some(ranges) = unnoted.filter(|ranges| !ranges.is_empty()) {
            drop(state);
            // What became of its name was not heard.
            let flushed = Flushed { ranges, published: false, waits: true };
            self.forget_flushed(chunk.ino, flushed);
            return self.put_back(chunk, old);
        }
        if self.write_notes().is_err() {
            drop(state);
            return self.put_back(chunk, old);
        }
        let freed = state.view.drop_clean(chunk.range()).iter().map(|r| r.len()).sum();
        // With what lies between the bytes: blocks may have been taken ahead there.
        for part in state.view.vacant(chunk.range()) {
            state.sums.forget(part);
            if let Err(e) = cache::punch(&cache, part) {
                tracing::warn!(ino = %file.ino, error = %e, "cannot free cache space");
            }
        }
        let is_left = state.view.holds_any(chunk.range());
        drop(state);
        self.room.evicted.fetch_add(freed, Relaxed);
        if is_left {
            self.put_back(chunk, old);
        }
    }

    fn put_back(&self, chunk: Chunk, old: Use) {
        self.room.order.lock().put_back(chunk, old);
    }
}

/// How long to wait after a look that took so long.
fn pause_after(took: Duration) -> Duration {
    took.saturating_mul(LOOK_SHARE).clamp(LOOK_EVERY, LOOK_AT_LEAST_EVERY)
}

/// Why waiting for the flusher makes no sense any more, when it has brought nothing to the backing
/// for so long.
fn hopeless(flusher: &Engine, stuck: Duration) -> Option<Errno> {
    if stuck < FULL_BACKING_PATIENCE {
        return None;
    }
    // There may be room since: who is asked again, and has not answered yet, says nothing.
    if let Some(full) = flusher.no_room() {
        tracing::error!(path = %full.path, error = %full.text, "buffer and backing are full");
        return Some(Errno(full.errno));
    }
    let errors = flusher.status().errors;
    let patience = if errors.is_empty() { PATIENCE } else { FAILING_BACKING_PATIENCE };
    if stuck < patience {
        return None;
    }
    let first = errors.first();
    let text = first.map_or("nothing moves", |e| e.text.as_str());
    tracing::error!(error = %text, "the buffer is full and the backing takes nothing");
    Some(Errno::EIO)
}

/// Sorted ranges with neighbours as one.
fn joined(ranges: impl Iterator<Item = ByteRange>) -> Vec<ByteRange> {
    let mut out: Vec<ByteRange> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if last.end() == range.start() => {
                *last = ByteRange::new(last.start(), range.end());
            }
            _ => out.push(range),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_took_long_is_not_followed_by_a_longer_pause_than_any_other() {
        assert_eq!(pause_after(Duration::ZERO), LOOK_EVERY);
        assert_eq!(pause_after(Duration::from_millis(2)), Duration::from_millis(20));
        for seconds in [1, 14, 1 << 40] {
            assert_eq!(pause_after(Duration::from_secs(seconds)), LOOK_AT_LEAST_EVERY);
        }
    }
}
