//! A block as it is written: records are added, each counted when it is whole.

use crate::{BLOCK, HEAD, Record};
use std::sync::atomic::{Ordering, compiler_fence};

pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"EBBK");
pub(crate) const SEALED: u32 = 1;

/// A record does not fit any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Writes one block into memory that others may see at any time.
#[derive(Debug)]
pub struct Block<'a> {
    bytes: &'a mut [u8],
    used: usize,
    base: u64,
}

impl<'a> Block<'a> {
    /// Begins an empty block at time `base`. `bytes` are [`BLOCK`] many and zero.
    ///
    /// # Panics
    /// When there are not so many.
    #[must_use]
    pub fn begin(bytes: &'a mut [u8], base: u64) -> Block<'a> {
        assert!(bytes.len() == BLOCK, "a block has its size");
        bytes[16..24].copy_from_slice(&base.to_le_bytes());
        compiler_fence(Ordering::SeqCst);
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        Block { bytes, used: 0, base }
    }

    /// Goes on with a block of which this much is used.
    #[must_use]
    pub fn resume(bytes: &'a mut [u8], used: usize, base: u64) -> Block<'a> {
        assert!(bytes.len() == BLOCK && used <= BLOCK - HEAD, "a block has its size");
        Block { bytes, used, base }
    }

    /// Adds a record.
    pub fn push(&mut self, record: &Record) -> Result<(), Full> {
        let len = record.encode(self.base, &mut self.bytes[HEAD + self.used..]).ok_or(Full)?;
        self.used += len;
        self.base = record.end;
        // It counts when it is whole: the process may die here.
        compiler_fence(Ordering::SeqCst);
        self.bytes[4..8].copy_from_slice(&(self.used as u32).to_le_bytes());
        Ok(())
    }

    /// Bytes used, and the time to which the next record is relative.
    #[must_use]
    pub fn state(&self) -> (usize, u64) {
        (self.used, self.base)
    }

    /// The memory, to go on later with [`Block::resume`].
    #[must_use]
    pub fn into_bytes(self) -> &'a mut [u8] {
        self.bytes
    }

    /// Ends the block with a checksum.
    pub fn seal(self) {
        let sum = crc32c::crc32c(&self.bytes[HEAD..HEAD + self.used]);
        self.bytes[12..16].copy_from_slice(&sum.to_le_bytes());
        compiler_fence(Ordering::SeqCst);
        self.bytes[8..12].copy_from_slice(&SEALED.to_le_bytes());
    }
}
