//! A file in memory, as programs store into it and load from it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// For stores, too.
pub const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A mapping of a file from its start.
#[derive(Debug)]
pub struct Map {
    at: *mut u8,
    len: usize,
}

impl Map {
    /// Maps so many bytes.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn new(file: &File, len: usize, protection: i32, sharing: i32) -> Map {
        // SAFETY: a fresh mapping of an open descriptor.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, sharing, file.as_raw_fd(), 0)
        };
        assert_ne!(at, libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        Map { at: at.cast(), len }
    }

    /// Shared, for loads and stores.
    #[must_use]
    pub fn shared(file: &File, len: usize) -> Map {
        Map::new(file, len, WRITABLE, libc::MAP_SHARED)
    }

    /// Stores these bytes.
    ///
    /// # Panics
    /// When they go beyond the mapping.
    pub fn store(&self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.len);
        // SAFETY: inside the mapping, which is writable.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.at.add(offset), data.len()) }
    }

    /// What is there.
    ///
    /// # Panics
    /// When it goes beyond the mapping.
    #[must_use]
    pub fn load(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut got = vec![0; len];
        // SAFETY: inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(self.at.add(offset), got.as_mut_ptr(), len) }
        got
    }

    /// msync(2), all of it.
    ///
    /// # Panics
    /// When that fails.
    pub fn sync(&self) {
        // SAFETY: this very mapping.
        let done = unsafe { libc::msync(self.at.cast(), self.len, libc::MS_SYNC) };
        assert_eq!(done, 0, "msync: {}", io::Error::last_os_error());
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: this very mapping; nothing refers to it any more.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}
