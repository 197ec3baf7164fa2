//! Blocks taken ahead of those who write past the daemon with gaps: the records of one node in a file
//! that many write.
//!
//! A file system that puts off the choice of blocks (ext4, XFS) keeps a note of every piece that was
//! written and has none yet. With gaps between the pieces none of these notes joins another, and
//! writing is slower by a third; where there are blocks already, it is as fast as without gaps. What
//! is not written of them is given back with the chunks of the file that leave the buffer, and what
//! is beyond its end with the last close. So it is done only where the disk has plenty of room, and where
//! the kernel tells what is written: blocks that are merely there must not be taken for written ones.

use crate::cache;
use crate::file::CachedFile;
use crate::node::Node;
use crate::passing::{Passing, Track};
use ebb_types::ByteRange;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;

/// At first, and at most, so much at once.
const LEAST: u64 = 64 << 20;
const MOST: u64 = 1 << 30;

/// Never more than this part of what is free, and nothing where less than a quarter of the disk is.
const FREE_PARTS: u64 = 16;
const PLENTY: u64 = 4;

/// From this length on it is seen whether a file has gaps.
const TELLING_LENGTH: u64 = 1 << 20;

impl Node {
    /// A file is about to be written with gaps, perhaps, or has been: takes the next blocks.
    pub(crate) fn take_ahead(&self, file: &CachedFile, passing: &mut Passing) {
        if !passing.track.as_ref().is_some_and(Track::is_told) {
            return;
        }
        let taken = file.cache(&self.cache).and_then(|cache| {
            let (len, (all, free)) = (cache.metadata()?.len(), self.cache.space()?);
            let Some(range) = next(len, passing.ahead, all, free) else { return Ok(()) };
            passing.ahead = range.end();
            Ok(cache::reserve(&cache, range)?)
        });
        if let Err(e) = taken {
            tracing::debug!(ino = %file.ino, error = ?e, "no blocks are taken ahead");
        }
    }
}

/// True for a file that is to be looked at for [`Node::take_ahead`].
pub(crate) fn has_gaps(passing: &Passing, meta: &Metadata) -> bool {
    let sparse = meta.len() >= TELLING_LENGTH && meta.blocks() * 512 < meta.len() / 2;
    passing.ahead > 0 || sparse
}

/// Gives back what is beyond the end of a file that nobody writes any more.
pub(crate) fn give_back(cache: &std::fs::File, passing: &Passing) -> io::Result<()> {
    let len = cache.metadata()?.len();
    if passing.ahead > len { cache.set_len(len) } else { Ok(()) }
}

/// The blocks to take next for a file of this length, of which those before `ahead` are taken.
fn next(len: u64, ahead: u64, all: u64, free: u64) -> Option<ByteRange> {
    let step = (len / 2).clamp(LEAST, MOST).min(free / FREE_PARTS);
    let soon = len.saturating_add(step / 2) > ahead;
    let start = ahead.max(len);
    (soon && free > all / PLENTY).then(|| ByteRange::at(start, step)).filter(|r| !r.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn blocks_are_taken_before_they_are_needed_and_never_behind_the_end() {
        let all = 1024 * GIB;
        assert_eq!(next(0, 0, all, all), Some(ByteRange::new(0, LEAST)));
        assert_eq!(next(LEAST / 4, LEAST, all, all), None);
        assert_eq!(next(LEAST / 2 + 1, LEAST, all, all), Some(ByteRange::at(LEAST, LEAST)));
        // Whoever has jumped ahead.
        assert_eq!(next(20 * GIB, LEAST, all, all), Some(ByteRange::at(20 * GIB, MOST)));
    }

    #[test]
    fn a_disk_that_fills_is_left_alone() {
        assert_eq!(next(0, 0, 100 * GIB, 25 * GIB), None);
        assert_eq!(next(0, 0, 2 << 20, 2 << 20), Some(ByteRange::new(0, (2 << 20) / 16)));
        assert_eq!(next(0, 0, 0, 0), None);
        // However often: a part of what is left, and down to a quarter of the disk.
        let (all, mut free, mut ahead) = (100 * GIB, 100 * GIB, 0);
        while let Some(range) = next(ahead, ahead, all, free) {
            ahead = range.end();
            free -= range.len();
        }
        assert!(free > 24 * GIB && free <= 25 * GIB);
    }
}
