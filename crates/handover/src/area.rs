//! The memory that outlives a daemon: a memfd of 64-bit words that its supervisor holds. Whoever
//! is killed between two words leaves all the words before them. What is in it is checked by
//! whoever reads it.
//!
//! # Layout, in words
//! | from | what |
//! |---|---|
//! | 0 | magic, layout, generation, incarnation, the incarnation that is about to be |
//! | 5 | head and tail of the ring, appends so far, slots ever used |
//! | 64, 128 | address of the embedded metadata service; of the peer port: length, then bytes |
//! | 512 | slots of four words: kind, and three numbers (`table.rs`) |
//! | then | the last appends, four words each (`table.rs`) |
//! | then | the ring: records of the node journal that are not written yet (`ring.rs`) |

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

const MAGIC: u64 = u64::from_le_bytes(*b"EBBHEIR1");
/// A daemon of another layout does not take over.
const LAYOUT: u64 = 1;

pub(crate) const GENERATION: usize = 2;
pub(crate) const INCARNATION: usize = 3;
pub(crate) const NEXT_INCARNATION: usize = 4;
pub(crate) const RING_HEAD: usize = 5;
pub(crate) const RING_TAIL: usize = 6;
pub(crate) const APPENDS: usize = 7;
pub(crate) const SLOTS_USED: usize = 8;
/// Where texts are, each of at most [`TEXT_BYTES_MAX`].
pub(crate) const META_ADDRESS: usize = 64;
pub(crate) const PEER_ADDRESS: usize = 128;
const TEXT_BYTES_MAX: usize = 504;

/// Open files, and owners of their locks, that survive: more than a node has descriptors.
pub(crate) const SLOTS: usize = 1 << 18;
/// Appends that can be unanswered at the same time: more than there are event loops.
pub(crate) const APPENDS_KEPT: usize = 4096;
/// 4 MiB: seconds of notes.
pub(crate) const RING_WORDS: usize = 1 << 19;

pub(crate) const SLOTS_AT: usize = 512;
pub(crate) const APPENDS_AT: usize = SLOTS_AT + 4 * SLOTS;
pub(crate) const RING_AT: usize = APPENDS_AT + 4 * APPENDS_KEPT;
const WORDS: usize = RING_AT + RING_WORDS;
const BYTES: usize = WORDS * 8;

/// The memory, mapped.
pub struct Area {
    words: &'static [AtomicU64],
}

impl Area {
    /// Memory for a mount that begins.
    pub fn create() -> io::Result<OwnedFd> {
        let fd = memfd_create("ebb-heir", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, BYTES as u64)?;
        let area = Area::map(&fd)?;
        area.set(1, LAYOUT);
        area.set(0, MAGIC);
        Ok(fd)
    }

    /// The memory behind a descriptor, if it is what it should be.
    pub fn open(fd: &impl AsFd) -> io::Result<Area> {
        let size = rustix::fs::fstat(fd)?.st_size;
        if size != BYTES as i64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "another size"));
        }
        let area = Area::map(fd)?;
        if (area.get(0), area.get(1)) != (MAGIC, LAYOUT) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "another layout"));
        }
        Ok(area)
    }

    fn map(fd: &impl AsFd) -> io::Result<Area> {
        let (protection, raw) = (libc::PROT_READ | libc::PROT_WRITE, fd.as_fd().as_raw_fd());
        // SAFETY: a new mapping of a file of this size; nothing else is at the address.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), BYTES, protection, libc::MAP_SHARED, raw, 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: mapped, aligned to a page, never unmapped (a process has one), and every access
        // is atomic.
        let words = unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>(), WORDS) };
        Ok(Area { words })
    }

    pub(crate) fn get(&self, at: usize) -> u64 {
        self.words[at].load(Acquire)
    }

    pub(crate) fn set(&self, at: usize, value: u64) {
        self.words[at].store(value, Release);
    }

    /// A text; empty when there is none or none that can be one.
    pub(crate) fn text(&self, at: usize) -> String {
        let len = (self.get(at) as usize).min(TEXT_BYTES_MAX);
        let words = (0..len.div_ceil(8)).flat_map(|i| self.get(at + 1 + i).to_le_bytes());
        String::from_utf8(words.take(len).collect()).unwrap_or_default()
    }

    pub(crate) fn set_text(&self, at: usize, text: &str) {
        if text.len() > TEXT_BYTES_MAX {
            return;
        }
        for (i, chunk) in text.as_bytes().chunks(8).enumerate() {
            self.set(at + 1 + i, word(chunk));
        }
        self.set(at, text.len() as u64);
    }
}

/// Up to eight bytes as a word.
pub(crate) fn word(bytes: &[u8]) -> u64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_there_for_the_next_who_maps_it() {
        let fd = Area::create().unwrap();
        let area = Area::open(&fd).unwrap();
        area.set(GENERATION, 7);
        area.set_text(META_ADDRESS, "127.0.0.1:7400");
        area.set_text(PEER_ADDRESS, &"x".repeat(TEXT_BYTES_MAX + 1));
        let again = Area::open(&fd).unwrap();
        assert_eq!(again.get(GENERATION), 7);
        assert_eq!(again.text(META_ADDRESS), "127.0.0.1:7400");
        assert_eq!(again.text(PEER_ADDRESS), "");
        again.set(1, LAYOUT + 1);
        assert!(Area::open(&fd).is_err());
        ftruncate(&fd, 4096).unwrap();
        assert!(Area::open(&fd).is_err());
    }
}
