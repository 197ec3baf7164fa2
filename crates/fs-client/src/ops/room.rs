//! Room in the buffer. When it is full, clean bytes are given up first, then dirty ones are
//! brought to the backing; writers wait for that and fail only when the backing is full too.

use crate::cache;
use crate::file::CachedFile;
use crate::node::Node;
use ebb_flusher::DrainScope;
use ebb_types::{ByteRange, Errno};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// A buffer that overflowed is emptied to this share, so that it does not overflow at once again.
const KEEP_PERCENT: u64 = 75;

/// How long a writer waits for room. Long: a slow backing slows writers, it does not fail them.
const PATIENCE: Duration = Duration::from_secs(600);

impl Node {
    /// True when the buffer holds more than it may. The sum is an upper bound that is made exact
    /// when it matters.
    pub(crate) fn is_over_capacity(&self) -> bool {
        let capacity = self.capacity();
        if self.used.load(Relaxed) <= capacity {
            return false;
        }
        let (dirty, clean) = self.local_bytes();
        self.used.store(dirty + clean, Relaxed);
        dirty + clean > capacity
    }

    /// Notes that so many bytes more may be in the buffer.
    pub(crate) fn note_stored(&self, bytes: u64) {
        self.used.fetch_add(bytes, Relaxed);
    }

    /// Makes room. One caller works, the others wait for it.
    pub(crate) async fn make_room(&self) -> Result<(), Errno> {
        let asked = Instant::now();
        let mut last = self.making_room.lock().await;
        // Somebody has just made room.
        if last.is_some_and(|at| at > asked) {
            return Ok(());
        }
        let wanted = self.capacity() / 100 * KEEP_PERCENT;
        self.give_up_clean(wanted).await;
        if self.local_sum() > wanted {
            self.flush_for_room().await?;
            self.give_up_clean(wanted).await;
        }
        let used = self.local_sum();
        self.used.store(used, Relaxed);
        *last = Some(Instant::now());
        Ok(())
    }

    fn local_sum(&self) -> u64 {
        let (dirty, clean) = self.local_bytes();
        dirty + clean
    }

    async fn flush_for_room(&self) -> Result<(), Errno> {
        let flusher = self.flusher.get().cloned().ok_or(Errno::ENOSPC)?;
        let deadline = Instant::now() + PATIENCE;
        let work = move || flusher.drain(&DrainScope::All, deadline, &mut |_| {});
        let report = tokio::task::spawn_blocking(work).await.map_err(|_| Errno::EIO)?;
        match report.failures.first() {
            Some(failure) if report.bytes == 0 => {
                tracing::error!(path = %failure.path, error = %failure.text, "the buffer is full");
                Err(Errno::ENOSPC)
            }
            _ => Ok(()),
        }
    }

    /// Gives up clean bytes until no more than `wanted` bytes are here: closed files first.
    async fn give_up_clean(&self, wanted: u64) {
        let mut files = self.all_files();
        files.sort_by_key(|f| f.state.read().opens);
        for file in files {
            if self.local_sum() <= wanted {
                return;
            }
            self.detach_flushed(&file).await;
            self.drop_clean(&file);
        }
    }

    /// What is flushed is the backing's again, so that nobody asks this node for it.
    async fn detach_flushed(&self, file: &Arc<CachedFile>) {
        let _turn = file.turn.lock().await;
        let ranges = file.state.read().view.detachable(ByteRange::ALL);
        if ranges.is_empty() {
            return;
        }
        match self.meta.detach(file.ino, &ranges).await {
            // With the turn, none of them can have been attached again since.
            Ok(version) => file.state.write().view.detached(&ranges, version),
            Err(e) => tracing::debug!(ino = %file.ino, error = %e, "not detached"),
        }
    }

    /// Drops the clean bytes of a file and frees their space.
    fn drop_clean(&self, file: &CachedFile) {
        let Ok(cache) = file.cache(&self.cache) else { return };
        let mut state = file.state.write();
        // That they were flushed must be written first: a journal that still has them for ours
        // would take the holes for bytes.
        if self.write_notes().is_err() {
            return;
        }
        for part in state.view.drop_clean(ByteRange::ALL) {
            if let Err(e) = cache::punch(&cache, part) {
                tracing::warn!(ino = %file.ino, error = %e, "cannot free cache space");
            }
        }
    }
}
