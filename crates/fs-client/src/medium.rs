//! The disk of the cache, which can fail: what was written there is told wrong when it is, before
//! anybody relies on it.
//!
//! Two things tell. The kernel does when a page could not be written back, but only to descriptors that
//! were opened before, and once: so a file's descriptor is kept, closed or not, until what was written
//! through it is on the disk ([`CachedFile::hear`] asks). And the sums of what was written do
//! ([`crate::sums`]), when bytes are about to leave this node.
//!
//! # What happens then
//! The file is *failing*: it is not flushed, read or lent until it was looked through
//! (`Node::look_through`). Unpublished bytes are published first, so that nobody takes older ones for
//! them. What has its sum is written again. The rest is taken from the backing where that has it, and
//! is lost where not: reads say EIO, a drain names it, as after a power loss.
//!
//! * Consistency: whoever syncs a file may be the one who is told of an error; `CachedFile::syncs`
//!   keeps others from hearing that all is well before it is noted.
//! * In time: pages that could not be written back count as clean, so the kernel may give them up at any
//!   moment, and what is in none is lost. So a file is looked through as soon as it is known to fail.
//! * Retries: a file stays failing until it could be looked through; every second it is tried again.

use crate::cache::{CacheDir, read_padded};
use crate::file::{CachedFile, State};
use crate::node::Node;
use crate::ops::sync::is_gone;
use crate::sums::{BLOCK, Prepared};
use ebb_consistency::{Piece, Source};
use ebb_locks::Mutex;
use ebb_types::{ByteRange, Errno, Ino};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;

/// The kernel writes pages back after so long; then a closed file is asked for and let go.
const WRITTEN_BACK_MS: u64 = 35_000;
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Of so many files descriptors are kept for longer than a moment, or of a quarter of as many as this
/// process may have.
const KEPT_MAX: usize = 16 << 10;
/// Before it is looked again whether a file was looked through.
const PAUSE: Duration = Duration::from_millis(50);
/// What is looked through at a time.
const STEP: u64 = 1 << 20;

/// What the daemon knows of its disk.
#[derive(Debug)]
pub(crate) struct Medium {
    /// Written since it was known to be on the disk, or failing.
    unsettled: Mutex<BTreeSet<Ino>>,
    /// Above so many of them, closed ones are waited for.
    kept_max: usize,
    /// Sums are kept of what is written.
    pub checksums: AtomicBool,
    /// Bytes that were lost.
    lost: Mutex<BTreeMap<Ino, Lost>>,
    /// Errors that the kernel told of.
    pub errors: AtomicU64,
    /// Blocks that were not what was written into them.
    pub damaged: AtomicU64,
    /// A file has begun to fail.
    failed: Arc<Notify>,
}

/// Bytes of one file that the disk has lost.
#[derive(Debug)]
struct Lost {
    ranges: Vec<ByteRange>,
    /// Seconds since 1970.
    since: u64,
}

impl Lost {
    /// Bytes that are lost twice are one loss.
    fn add(&mut self, ranges: &[ByteRange]) {
        for range in ranges {
            let new = without(*range, &self.ranges);
            self.ranges.extend(new);
            self.ranges.sort_unstable();
        }
    }
}

/// The same, as it is told.
pub(crate) struct LostBytes {
    pub path: String,
    pub bytes: u64,
    pub since: u64,
}

impl Default for Medium {
    fn default() -> Medium {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let quarter = limit.map_or(KEPT_MAX, |n| n as usize / 4);
        Medium {
            unsettled: Mutex::default(),
            kept_max: quarter.clamp(64, KEPT_MAX),
            checksums: AtomicBool::new(false),
            lost: Mutex::default(),
            errors: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            failed: Arc::default(),
        }
    }
}

impl Medium {
    fn look_at(&self, ino: Ino) {
        self.unsettled.lock().insert(ino);
    }
}

/// What a scrub found, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scrubbed {
    /// Files that were looked at.
    pub files: u64,
    /// Bytes that are what was written.
    pub right: u64,
    /// Bytes of which no sum is known.
    pub unknown: u64,
    /// Bytes of blocks that are not what was written.
    pub damaged: u64,
    /// Of these, bytes that are nowhere else.
    pub lost: u64,
}

impl std::ops::AddAssign for Scrubbed {
    fn add_assign(&mut self, other: Scrubbed) {
        self.files += other.files;
        self.right += other.right;
        self.unknown += other.unknown;
        self.damaged += other.damaged;
        self.lost += other.lost;
    }
}

// ---- a file --------------------------------------------------------------------------------------

impl CachedFile {
    /// The cache file, for writing into it: from now on its descriptor is kept until what was written is
    /// known to be on the disk.
    pub fn cache_to_write(&self, dir: &CacheDir) -> Result<Arc<File>, Errno> {
        self.will_be_written(dir);
        self.cache(dir)
    }

    /// The same of whoever writes past the daemon.
    pub fn will_be_written(&self, dir: &CacheDir) {
        if !self.unsettled.load(Acquire) && !self.unsettled.swap(true, AcqRel) {
            dir.medium.look_at(self.ino);
        }
    }

    /// What was written by the daemon before this one may not be on the disk yet.
    pub fn goes_on(&self, dir: &CacheDir) -> Result<(), Errno> {
        let cache = self.cache_to_write(dir)?;
        // An error that nobody was told of yet is told to those who come later, too.
        self.hear_last(dir, &cache);
        if dir.medium.unsettled.lock().len() > dir.medium.kept_max {
            match written_back(&cache) {
                Err(e) => self.is_told(dir, &e),
                Ok(()) if self.is_failing() => {}
                Ok(()) => {
                    dir.medium.unsettled.lock().remove(&self.ino);
                    self.unsettled.store(false, Release);
                    self.let_go();
                }
            }
        }
        Ok(())
    }

    /// True until it was looked through.
    pub fn is_failing(&self) -> bool {
        self.failing.load(Acquire)
    }

    /// Something in it is not what was written: it is looked through soon.
    fn fails(&self, dir: &CacheDir, why: &str) {
        if !self.failing.swap(true, AcqRel) {
            // Its path would take the state, which the caller may have.
            tracing::error!(ino = %self.ino, why, "the disk of the cache failed");
        }
        self.unsettled.store(true, Release);
        dir.medium.look_at(self.ino);
        dir.medium.failed.notify_one();
    }

    /// The kernel says that something could not be written back.
    fn is_told(&self, dir: &CacheDir, e: &io::Error) {
        dir.medium.errors.fetch_add(1, Relaxed);
        self.distrusted.store(true, Release);
        self.fails(dir, &e.to_string());
    }

    /// It cannot be read, at some place.
    pub fn is_unreadable(&self, dir: &CacheDir) {
        self.distrusted.store(true, Release);
        self.fails(dir, "it cannot be read");
    }

    /// The same as [`CachedFile::hear`] without waiting: what a sync that is under way will be told of is not
    /// known yet.
    pub fn hear_now(&self, dir: &CacheDir) -> Result<(), Errno> {
        if let Some(cache) = self.kept()
            && let Some(_whole) = self.syncs.try_write()
        {
            self.ask_all(dir, &cache);
        }
        self.unless_failing()
    }

    /// EIO when something that was written could not be written back, or is not what it was. All that was
    /// read before an Ok was right, as far as the kernel knows. Waits for a sync that is under way.
    pub fn hear(&self, dir: &CacheDir) -> Result<(), Errno> {
        if let Some(cache) = self.kept() {
            let _whole = self.syncs.write();
            self.ask_all(dir, &cache);
        }
        self.unless_failing()
    }

    fn ask_all(&self, dir: &CacheDir, cache: &File) {
        self.hear_last(dir, cache);
        if let Some(Err(e)) = self.ask_witness(told) {
            self.is_told(dir, &e);
        }
    }

    /// The same of a descriptor that is about to be closed.
    pub fn hear_last(&self, dir: &CacheDir, cache: &File) {
        if let Err(e) = told(cache) {
            self.is_told(dir, &e);
        }
    }

    fn unless_failing(&self) -> Result<(), Errno> {
        if self.is_failing() { Err(Errno::EIO) } else { Ok(()) }
    }

    /// fdatasync of the cache file. Blocks.
    pub fn sync_data(&self, dir: &CacheDir, cache: &File) -> Result<(), Errno> {
        let synced = {
            let _turn = self.syncs.read();
            cache.sync_data().inspect_err(|e| self.is_told(dir, e))
        };
        synced?;
        self.unless_failing()
    }

    /// Writes an application's bytes, as far as they go, with their sums. The caller has the state.
    pub fn put(
        &self,
        dir: &CacheDir,
        cache: &File,
        state: &mut State,
        data: &[u8],
        offset: u64,
    ) -> (usize, Option<io::Error>) {
        if !has_sums(dir, state) {
            return crate::file::write_most(cache, data, offset);
        }
        let prepared = state.sums.prepare(cache, data, offset);
        let (n, error) = crate::file::write_most(cache, data, offset);
        self.put_sums(dir, state, &prepared, n);
        (n, error)
    }

    /// So many bytes of what was prepared were written.
    pub fn put_sums(&self, dir: &CacheDir, state: &mut State, prepared: &Prepared, bytes: usize) {
        state.sums.written(prepared, bytes);
        if !prepared.damaged.is_empty() {
            state.damaged.extend_from_slice(&prepared.damaged);
            self.is_damaged(dir, prepared.damaged.len());
        }
    }

    /// Some blocks are not what was written into them.
    fn is_damaged(&self, dir: &CacheDir, blocks: usize) {
        dir.medium.damaged.fetch_add(blocks as u64, Relaxed);
        self.fails(dir, "a block is not what was written into it");
    }

    /// True when what was read is what was written, as far as that is known. Blocks for a moment.
    pub fn is_right(&self, dir: &CacheDir, bytes: &[u8], offset: u64) -> bool {
        let range = ByteRange::at(offset, bytes.len() as u64);
        let Ok(cache) = self.cache(dir) else { return false };
        {
            let state = self.state.read();
            let in_part = |at: &u64| !at.is_multiple_of(BLOCK);
            let mut edges = [range.start(), range.end()].into_iter().filter(in_part);
            let is_right = |at| state.sums.wrong(&cache, ByteRange::at(at, 1)).is_empty();
            if state.sums.is_empty() || state.sums.fit(bytes, offset) && edges.all(is_right) {
                return true;
            }
        }
        // Somebody may have written there since it was read, or be at it: not while this is held.
        let wrong = self.state.write().sums.wrong(&cache, range);
        if !wrong.is_empty() {
            self.is_damaged(dir, wrong.len());
        }
        wrong.is_empty()
    }
}

/// Sums are kept of what the daemon itself writes.
pub(crate) fn has_sums(dir: &CacheDir, state: &State) -> bool {
    state.passing.is_none() && dir.medium.checksums.load(Relaxed)
}

/// Asks whether a page could not be written back, without waiting for any.
pub(crate) fn told(file: &File) -> io::Result<()> {
    // Behind the end of every file: there are no pages to wait for.
    range_synced(file, i64::MAX - 4095, 1, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
}

/// Waits until all pages are written, as far as the disk's own memory.
fn written_back(file: &File) -> io::Result<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    range_synced(file, 0, 0, all)
}

fn range_synced(file: &File, at: i64, len: i64, how: u32) -> io::Result<()> {
    // SAFETY: a descriptor that lives and plain integers go in.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), at, len, how) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            // A file system that cannot tell.
            e if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE)) => {
                Ok(())
            }
            e => Err(e),
        },
    }
}

// ---- the node ------------------------------------------------------------------------------------

/// Looks after the files that were written, as long as the node lives.
pub(crate) async fn watch(node: Weak<Node>) {
    let Some(failed) = node.upgrade().map(|n| Arc::clone(&n.cache.medium.failed)) else { return };
    let mut tick = tokio::time::interval(LOOK_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let all = tokio::select! {
            _ = tick.tick() => true,
            () = failed.notified() => false,
        };
        let Some(node) = node.upgrade() else { return };
        let mut inos: Vec<Ino> = node.cache.medium.unsettled.lock().iter().copied().collect();
        if !all {
            inos.retain(|ino| node.file(*ino).is_some_and(|file| file.is_failing()));
        }
        let asked = Arc::clone(&node);
        let ask = move || {
            asked.unheard();
            asked.hear_of(&inos)
        };
        let Ok(failing) = tokio::task::spawn_blocking(ask).await else { continue };
        for file in failing {
            node.look_through(&file).await;
        }
    }
}

impl Node {
    /// Asks about every file that was written, and lets those go that are on the disk; the failing ones.
    fn hear_of(&self, inos: &[Ino]) -> Vec<Arc<CachedFile>> {
        let mut failing = Vec::new();
        let mut kept = inos.len();
        for ino in inos {
            let Some(file) = self.file(*ino) else {
                self.cache.medium.unsettled.lock().remove(ino);
                continue;
            };
            let due = kept > self.cache.medium.kept_max || file.closed_for_ms() > WRITTEN_BACK_MS;
            if file.hear(&self.cache).is_err() {
                failing.push(file);
            } else if !file.is_in_use() && due {
                self.settle(&file);
                kept -= 1;
            }
        }
        failing
    }

    /// What was written is on the disk, or the file is failing; its descriptor is not needed any more.
    fn settle(&self, file: &CachedFile) {
        // Whoever writes from now on says so once more.
        self.cache.medium.unsettled.lock().remove(&file.ino);
        file.unsettled.store(false, Release);
        if let Some(cache) = file.kept() {
            let _whole = file.syncs.write();
            if let Err(e) = written_back(&cache) {
                return file.is_told(&self.cache, &e);
            }
        }
        file.let_go();
    }

    /// Closed files whose descriptors are kept are too many: of this one it is waited for the disk.
    pub(crate) async fn settle_if_many(self: &Arc<Self>, file: &Arc<CachedFile>) {
        let medium = &self.cache.medium;
        if medium.unsettled.lock().len() <= 2 * medium.kept_max {
            return;
        }
        let (node, file) = (Arc::clone(self), Arc::clone(file));
        // A daemon that is ending has no threads for this any more.
        let _ = tokio::task::spawn_blocking(move || node.settle(&file)).await;
    }

    /// Returns when the file is not failing any more.
    pub(crate) async fn wait_for_the_disk(&self, file: &CachedFile) -> Result<(), Errno> {
        let end = std::time::Instant::now() + self.deadline();
        while file.is_failing() {
            if std::time::Instant::now() > end {
                return Err(Errno::EIO);
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Looks through a failing file; when that could not be done, it is failing as before.
    async fn look_through(self: &Arc<Self>, file: &Arc<CachedFile>) {
        let gone = match self.publish(file).await {
            Ok(()) => false,
            Err(e) if is_gone(e) => true,
            Err(e) => {
                tracing::warn!(path = file.label(), error = %e, "failing, and not published yet");
                return;
            }
        };
        let _turn = file.turn.lock().await;
        let (node, looked) = (Arc::clone(self), Arc::clone(file));
        let look = move || node.look_through_in_turn(&looked, gone);
        let Ok(Ok(found)) = tokio::task::spawn_blocking(look).await else { return };
        if !found.flushed.is_empty() && !gone {
            match self.meta.detach(file.ino, &found.flushed).await {
                Ok(answer) => {
                    let mut state = file.state.write();
                    state.view.detached(&found.flushed, answer);
                    state.alone.changed(answer.version, false);
                    found.flushed.iter().for_each(|r| self.fetch_anew(file, &mut state, *r));
                }
                Err(e) => {
                    tracing::warn!(path = file.label(), error = %e, "not given back yet");
                    return;
                }
            }
        }
        if found.unpublished {
            return;
        }
        file.distrusted.store(false, Release);
        file.failing.store(false, Release);
        tracing::warn!(path = file.label(), "looked through; what is not lost goes on");
    }

    /// The same, with the turn.
    fn look_through_in_turn(&self, file: &CachedFile, gone: bool) -> Result<Found, Errno> {
        let mut found = Found::default();
        let cache = file.cache_to_write(&self.cache)?;
        let distrusted = file.distrusted.load(Acquire);
        let mut at = 0;
        loop {
            let mut state = file.state.write();
            let Some(start) = state.view.next_present(at) else { return Ok(found) };
            let step = ByteRange::new(start, ByteRange::at(start & !(STEP - 1), STEP).end());
            at = step.end();
            for range in bad_parts(&cache, &mut state, step, distrusted) {
                let dirty = state.view.unattached(range);
                if !gone && !dirty.is_empty() {
                    // Written since; it is published first.
                    found.unpublished = true;
                    state.damaged.push(range);
                    continue;
                }
                self.fetch_anew(file, &mut state, range);
                let damaged = state.view.damaged(range);
                found.flushed.extend(damaged.flushed);
                if !damaged.lost.is_empty() {
                    self.lose(file, &state, &damaged.lost);
                }
                state.sums.forget(range);
            }
        }
    }

    /// Clean bytes that are not what they were are fetched when they are read.
    fn fetch_anew(&self, file: &CachedFile, state: &mut State, range: ByteRange) {
        if state.passing.is_some() {
            return;
        }
        let dropped = state.view.drop_clean(range);
        if let Ok(cache) = file.cache(&self.cache) {
            for part in dropped {
                state.sums.forget(part);
                let _ = crate::cache::punch(&cache, part);
            }
        }
    }

    /// These bytes are nowhere any more.
    fn lose(&self, file: &CachedFile, state: &State, ranges: &[ByteRange]) {
        let bytes: u64 = ranges.iter().map(|r| r.len()).sum();
        self.note_damaged(file.ino, ranges);
        let path = String::from_utf8_lossy(&state.path).into_owned();
        tracing::error!(path, bytes, "bytes are lost: the disk of the cache failed");
        let since = std::time::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_secs());
        let mut lost = self.cache.medium.lost.lock();
        let entry = lost.entry(file.ino).or_insert_with(|| Lost { ranges: Vec::new(), since });
        entry.add(ranges);
    }

    /// What the disk has lost and nobody has written or deleted since.
    pub(crate) fn lost(&self) -> Vec<LostBytes> {
        let lost: Vec<_> = {
            let lost = self.cache.medium.lost.lock();
            lost.iter().map(|(ino, lost)| (*ino, lost.ranges.clone(), lost.since)).collect()
        };
        let mut told = Vec::new();
        for (ino, ranges, since) in &lost {
            let Some(file) = self.file(*ino) else { continue };
            let state = file.state.read();
            let pieces = ranges.iter().flat_map(|r| state.view.plan_read(*r));
            let mine = |p: &Piece| matches!(p.source, Source::Peer { node, .. } if node == self.me);
            let bytes = pieces.filter(mine).map(|p| p.range.len()).sum();
            if bytes > 0 {
                let path = String::from_utf8_lossy(&state.path).into_owned();
                told.push(LostBytes { path, bytes, since: *since });
            }
        }
        told
    }

    /// How many bytes these are.
    pub(crate) fn lost_bytes(&self) -> u64 {
        self.lost().iter().map(|lost| lost.bytes).sum()
    }

    /// Looks whether everything that has a sum is what was written, on the disk and not in memory. What is
    /// not is dealt with before this returns.
    pub(crate) async fn scrub(self: &Arc<Self>, mut each: impl FnMut(&Scrubbed)) -> Scrubbed {
        let mut all = Scrubbed::default();
        let lost_before = self.lost_bytes();
        for file in self.all_files() {
            let (node, asked) = (Arc::clone(self), Arc::clone(&file));
            let Ok(one) = tokio::task::spawn_blocking(move || node.scrub_file(&asked)).await else {
                continue;
            };
            if file.is_failing() {
                self.look_through(&file).await;
            }
            all += one;
            all.lost = self.lost_bytes() - lost_before;
            each(&all);
        }
        all
    }

    fn scrub_file(&self, file: &CachedFile) -> Scrubbed {
        let mut all = Scrubbed { files: 1, ..Scrubbed::default() };
        let Ok(cache) = file.cache(&self.cache) else { return all };
        // An error is heard of as always.
        let _ = written_back(&cache);
        let _ = file.hear(&self.cache);
        let _ = rustix::fs::fadvise(&*cache, 0, None, rustix::fs::Advice::DontNeed);
        let mut at = 0;
        loop {
            // Alone: nobody else is in the middle of a write.
            let state = file.state.write();
            let Some(start) = state.view.next_present(at) else { return all };
            let step = ByteRange::new(start, ByteRange::at(start & !(STEP - 1), STEP).end());
            at = step.end();
            for local in state.view.present(step) {
                let wrong = state.sums.wrong(&cache, local);
                let bytes = |ranges: &[ByteRange]| {
                    ranges.iter().map(|r| r.intersect(local).len()).sum::<u64>()
                };
                let unknown = bytes(&state.sums.unknown(local));
                all.unknown += unknown;
                all.damaged += bytes(&wrong);
                all.right += local.len() - unknown - bytes(&wrong);
                if !wrong.is_empty() {
                    file.is_damaged(&self.cache, wrong.len());
                }
            }
        }
    }
}

/// What was found in a failing file.
#[derive(Default)]
struct Found {
    /// What the backing has and this node must give back.
    flushed: Vec<ByteRange>,
    /// Some of it was written meanwhile, and has to be published before it can be lost.
    unpublished: bool,
}

/// What of `step` is not what was written. What is right is written again where it may be in memory only.
fn bad_parts(cache: &File, state: &mut State, step: ByteRange, distrusted: bool) -> Vec<ByteRange> {
    let State { view, sums, damaged, .. } = state;
    let mut bad: Vec<ByteRange> =
        damaged.iter().map(|r| r.intersect(step)).filter(|r| !r.is_empty()).collect();
    damaged.retain(|r| !r.overlaps(step));
    let present = view.present(step);
    for local in &present {
        bad.extend(sums.wrong(cache, *local).into_iter().map(|r| r.intersect(*local)));
        if distrusted {
            // Bytes that were written since the error are no worse than before.
            let unknown = sums.unknown(*local).into_iter();
            bad.extend(unknown.filter(|r| view.unattached(*r).is_empty()));
        }
    }
    if distrusted {
        bad.sort_unstable();
        write_again(cache, step, &present, &bad);
    }
    bad
}

/// Writes what is right of `present` once more, with the rest of its blocks. The pages have to go before:
/// ext4 takes the blocks of those that failed for written, and reads zeros there once they are gone.
fn write_again(cache: &File, step: ByteRange, present: &[ByteRange], bad: &[ByteRange]) {
    let len = cache.metadata().map_or(0, |m| m.len());
    let mut kept: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut last = 0;
    for good in present.iter().flat_map(|r| without(*r, bad)) {
        let before = bad.iter().map(|b| b.end()).filter(|end| *end <= good.start()).max();
        let after = bad.iter().map(|b| b.start()).find(|start| *start >= good.end());
        let from = (good.start() & !(BLOCK - 1)).max(before.unwrap_or(0)).max(last);
        let to = good.end().next_multiple_of(BLOCK).min(after.unwrap_or(u64::MAX)).min(len);
        last = last.max(to);
        let mut bytes = vec![0; to.saturating_sub(from) as usize];
        if read_padded(cache, &mut bytes, from).is_ok() {
            kept.push((from, bytes));
        }
    }
    let window = ByteRange::new(step.start() & !(BLOCK - 1), step.end().next_multiple_of(BLOCK));
    let bytes = std::num::NonZeroU64::new(window.len());
    let _ = rustix::fs::fadvise(cache, window.start(), bytes, rustix::fs::Advice::DontNeed);
    for (at, bytes) in kept {
        // What fails again is told of again.
        let _ = cache.write_all_at(&bytes, at);
    }
}

/// The parts of `range` that are not in `bad`, which is sorted.
fn without(range: ByteRange, bad: &[ByteRange]) -> Vec<ByteRange> {
    ebb_types::split_by(&[range], bad).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_lost_twice_are_counted_once() {
        let mut lost = Lost { ranges: Vec::new(), since: 0 };
        let range = ByteRange::new;
        lost.add(&[range(10, 20), range(30, 40)]);
        lost.add(&[range(0, 15), range(15, 35)]);
        lost.add(&[range(0, 40)]);
        let bytes: u64 = lost.ranges.iter().map(|r| r.len()).sum();
        assert_eq!(bytes, 40, "{:?}", lost.ranges);
    }
}
