//! A buffer that begins with a page, as those of dd, fio and MPI-IO do. The kernel gives a FUSE
//! daemon 256 pages with one request: 1 MiB that begins within a page lies in 257 of them, and takes
//! two.

use std::ops::{Deref, DerefMut};

/// More than that on no machine that is measured.
const PAGE: usize = 4096;

/// Bytes that begin with a page.
pub struct PageBuffer {
    bytes: Vec<u8>,
    from: usize,
    len: usize,
}

impl PageBuffer {
    /// `len` bytes, all of them `value`.
    #[must_use]
    pub fn filled(value: u8, len: usize) -> PageBuffer {
        // Never grown: it stays where it is.
        let bytes = vec![value; len + PAGE];
        let from = bytes.as_ptr().align_offset(PAGE);
        PageBuffer { bytes, from, len }
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.from..][..self.len]
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_with_a_page_and_has_its_length() {
        for len in [0, 1, 4096, 47_008, 1 << 20] {
            let mut buffer = PageBuffer::filled(7, len);
            assert_eq!(buffer.len(), len);
            assert!(len == 0 || (buffer.as_ptr() as usize).is_multiple_of(PAGE));
            assert!(buffer.iter().all(|b| *b == 7));
            buffer.fill(9);
            assert!(buffer.iter().all(|b| *b == 9));
        }
    }
}
