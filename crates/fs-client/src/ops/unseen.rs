//! Room in the buffer that the kernel uses past the daemon: how much files keep there that are
//! passed through, what is written into them unseen, and the limit that holds all the same.
//!
//! The kernel has no way to take a passed-through file back from a writer, nor to slow it, and
//! nothing of such a file can be given up. What stops it is the end of the disk. So writers go
//! past the daemon only where the disk ends at `--cache-size`, or a quarter beyond it (the usual
//! `--cache-size` is four fifths of the disk): that is how far the limit can be exceeded. A quota
//! of the project that the cache's directory belongs to counts as the disk.

use crate::file::{CachedFile, State};
use crate::node::Node;
use crate::ops::ahead;
use crate::ops::room::Need;
use crate::passing::Stamp;
use ebb_locks::Mutex;
use ebb_types::Ino;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Between two looks at files that are written past the daemon: so that no more than a part of
/// the room that is left is written in between, and looking costs a tenth of the time at most.
const LOOK_LEAST: Duration = Duration::from_millis(5);
const LOOK_MOST: Duration = Duration::from_millis(250);
const LOOK_SHARE: u32 = 10;
const LOOKS_PER_ROOM: u64 = 8;

/// After room could not be made.
const PAUSE: Duration = Duration::from_secs(1);

/// What the kernel has of the buffer.
#[derive(Default)]
pub(crate) struct Past {
    /// Bytes of files that are passed through.
    pinned: AtomicU64,
    writers: Mutex<Writers>,
}

/// Files that are written past the daemon.
#[derive(Default)]
struct Writers {
    files: BTreeMap<Ino, Arc<CachedFile>>,
    /// Somebody looks at them.
    watched: bool,
}

impl Past {
    /// A file keeps `now` bytes, and not `before`.
    pub(crate) fn pin(&self, before: u64, now: u64) {
        self.pinned.fetch_add(now, Relaxed);
        self.pinned.fetch_sub(before, Relaxed);
    }

    /// Bytes that cannot be given up because the kernel has them.
    pub(crate) fn pinned(&self) -> u64 {
        self.pinned.load(Relaxed)
    }

    fn files(&self) -> Vec<Arc<CachedFile>> {
        self.writers.lock().files.values().cloned().collect()
    }
}

impl Node {
    /// True when the buffer is so full that nobody should write to it unseen.
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_over(self.capacity() / 10 * 9)
            || self.cache.space().is_ok_and(|(all, free)| free < all / 50)
    }

    /// True when the disk ends at the limit of the buffer, or no more than a quarter beyond it.
    pub(crate) fn is_confined(&self) -> bool {
        self.cache.space().is_ok_and(|(all, _)| all / 5 * 4 <= self.capacity())
    }

    /// True when one more file that cannot be given up is too much.
    pub(crate) fn is_pinned(&self, state: &State) -> bool {
        let held = state.view.unflushed_bytes() + state.view.clean_bytes();
        self.room.past.pinned() + held > self.capacity() / 2
    }

    /// Bytes that were written past the daemon and not looked for yet; an estimate.
    pub(crate) fn unseen_bytes(&self, file: &CachedFile, state: &State) -> u64 {
        let Some(track) = state.passing.as_ref().and_then(|p| p.track.as_ref()) else { return 0 };
        let Some(meta) = file.cache(&self.cache).ok().and_then(|c| c.metadata().ok()) else {
            return 0;
        };
        if !track.shows_change(&Stamp::from_meta(&meta)) {
            return 0;
        }
        let known = state.view.unflushed_bytes() + state.view.clean_bytes();
        (meta.blocks() * 512).saturating_sub(known)
    }

    /// Bytes came into a file that is passed through.
    pub(crate) fn note_pinned(&self, state: &mut State) {
        let known = state.view.unflushed_bytes() + state.view.clean_bytes();
        if let Some(passing) = &mut state.passing {
            let before = std::mem::replace(&mut passing.held, known);
            self.room.past.pin(before, known);
        }
    }

    /// The inode is not passed through any more.
    pub(crate) fn stop_passing(&self, file: &CachedFile, state: &mut State) {
        let Some(passing) = state.passing.take() else { return };
        let kept = file.cache(&self.cache).map(|cache| ahead::give_back(&cache, &passing));
        if let Ok(Err(e)) = kept {
            tracing::warn!(ino = %file.ino, error = %e, "blocks taken ahead stay until the file leaves the buffer");
        }
        self.room.past.pin(passing.held, 0);
        if passing.seat.is_some_and(|s| s.writes) {
            self.note_no_seat(file);
            // Before others may change the file, and before anything of it is given up here: to a daemon after
            // this one all that the cache file of a seat has is right, its holes as well.
            self.try_write_notes();
        }
        if passing.track.is_some() {
            self.room.past.writers.lock().files.remove(&file.ino);
        }
    }

    /// From now on the file is written past the daemon: what comes into the buffer is counted, and
    /// room is made for it as for other writers, though this one does not wait for it.
    pub(crate) fn watch(&self, file: &Arc<CachedFile>) {
        let Some(node) = self.me_arc() else { return };
        let mut writers = self.room.past.writers.lock();
        writers.files.entry(file.ino).or_insert_with(|| Arc::clone(file));
        if !std::mem::replace(&mut writers.watched, true) {
            self.runtime.spawn(watch(Arc::downgrade(&node)));
        }
    }

    pub(crate) fn files_written_past(&self) -> Vec<Arc<CachedFile>> {
        self.room.past.writers.lock().files.values().cloned().collect()
    }

    /// Clean bytes are given up behind an open that found the buffer full of them.
    pub(crate) fn clear_up(&self) {
        if let Some(node) = self.me_arc() {
            self.runtime.spawn(async move { node.make_room_to_keep().await });
        }
    }

    /// Looks at every file that is written past the daemon; the bytes not looked for yet.
    fn look_at_writers(&self) -> u64 {
        let mut unseen = 0;
        for file in self.room.past.files() {
            let mut state = file.state.write();
            let new = self.unseen_bytes(&file, &state);
            let meta = file.cache(&self.cache).ok().and_then(|c| c.metadata().ok());
            let known = state.view.unflushed_bytes() + state.view.clean_bytes();
            if let Some(passing) = &mut state.passing {
                let before = std::mem::replace(&mut passing.held, known + new);
                self.room.past.pin(before, known + new);
                if meta.is_some_and(|meta| ahead::has_gaps(passing, &meta)) {
                    self.take_ahead(&file, passing);
                }
            }
            unseen += new;
        }
        unseen
    }

    /// Waits for what is being published of files that are written past the daemon: the service has
    /// those bytes as dirty before this node has.
    pub(crate) async fn wait_for_writers(&self) {
        for file in self.room.past.files() {
            drop(file.turn.lock().await);
        }
    }

    /// Waits until nobody can write past the daemon any more and the last looks are made: what they find is
    /// published, and would be dirty after a drain that had ended before. Not longer than `limit`.
    pub(crate) async fn wait_for_last_looks(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while !self.files_written_past().is_empty() && Instant::now() < end {
            tokio::time::sleep(LOOK_LEAST).await;
        }
    }

    /// True when nobody need look any more.
    fn may_rest(&self) -> bool {
        let mut writers = self.room.past.writers.lock();
        let none = writers.files.is_empty();
        if none {
            writers.watched = false;
        }
        none
    }
}

/// Looks as often as it is worth, until nobody writes past the daemon any more.
async fn watch(node: Weak<Node>) {
    let mut before = 0;
    let mut pause = LOOK_LEAST;
    loop {
        tokio::time::sleep(pause).await;
        let Some(node) = node.upgrade() else { return };
        if node.may_rest() {
            return;
        }
        let began = Instant::now();
        let unseen = node.look_at_writers();
        let came = unseen.saturating_sub(before);
        before = unseen;
        node.note_unseen(came);
        let full = node.is_over_capacity();
        let took = began.elapsed();
        if full && node.make_room(Need::Share).await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        pause = next_look(pause, came, node.room_left()).max(took * LOOK_SHARE);
    }
}

/// When to look again, when so many bytes came in `pause` and there is room for so many.
fn next_look(pause: Duration, came: u64, room: u64) -> Duration {
    if came == 0 {
        return (pause * 2).clamp(LOOK_LEAST, LOOK_MOST);
    }
    let share = (room / LOOKS_PER_ROOM) as f64 / came as f64;
    pause.mul_f64(share.clamp(0.01, 2.0)).clamp(LOOK_LEAST, LOOK_MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_come_faster_the_sooner_the_buffer_is_full() {
        let ms = Duration::from_millis;
        assert_eq!(next_look(ms(100), 0, 0), ms(200));
        assert_eq!(next_look(ms(200), 0, 0), LOOK_MOST);
        // 100 MiB in 100 ms, and room for 400 MiB: an eighth of that is written in 50 ms.
        assert_eq!(next_look(ms(100), 100 << 20, 400 << 20), ms(50));
        assert_eq!(next_look(ms(100), 100 << 20, 0), LOOK_LEAST);
        assert_eq!(next_look(ms(100), 1, u64::MAX), ms(200));
    }

    #[test]
    fn what_is_pinned_is_a_sum() {
        let past = Past::default();
        past.pin(0, 100);
        past.pin(0, 50);
        past.pin(100, 120);
        past.pin(50, 0);
        assert_eq!(past.pinned(), 120);
    }
}
