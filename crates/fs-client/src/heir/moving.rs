//! Others' bytes on their way into a cache file that is passed through. They are put there and into
//! its twin, one after the other; a daemon that dies in between would leave bytes that look as if
//! they had been written here. So they are noted first, in memory that the supervisor keeps.
//!
//! Layout: four words (1 while the note counts, the inode, the offset, the length), then the bytes.

use ebb_types::Ino;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

const HEAD: u64 = 32;
/// Longer than anything that is fetched at once.
const BYTES_MAX: u64 = 64 << 20;

/// Where they are noted.
#[derive(Debug, Default)]
pub struct Moving(Mutex<Option<File>>);

/// What a dead daemon was putting somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The file.
    pub ino: Ino,
    /// Where.
    pub offset: u64,
    /// What.
    pub bytes: Vec<u8>,
}

/// Until this goes, the note counts.
pub struct Noted<'a>(MutexGuard<'a, Option<File>>);

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        if let Some(file) = &*self.0
            && let Err(e) = file.write_all_at(&[0; 8], 0)
        {
            tracing::warn!(error = %e, "a note of bytes that were put into a file stays");
        }
    }
}

impl Moving {
    /// Goes on with what a daemon before this one had.
    #[must_use]
    pub fn new(fd: Option<OwnedFd>) -> Moving {
        Moving(Mutex::new(fd.map(File::from)))
    }

    /// Makes sure that there is a place; one that is new is for the supervisor.
    pub fn begin(&self) -> io::Result<Option<OwnedFd>> {
        let mut file = self.0.lock();
        if file.is_some() {
            return Ok(None);
        }
        let new = File::from(memfd_create("ebb-moving", MemfdFlags::CLOEXEC)?);
        let fd = new.try_clone()?.into();
        *file = Some(new);
        Ok(Some(fd))
    }

    /// These bytes are going to be put there.
    pub fn note(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<Noted<'_>> {
        let guard = self.0.lock();
        let file = guard.as_ref().ok_or(io::ErrorKind::NotFound)?;
        file.write_all_at(bytes, HEAD)?;
        let words = [1, ino.0, offset, bytes.len() as u64];
        let head: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        file.write_all_at(&head[8..], 8)?;
        file.write_all_at(&head[..8], 0)?;
        Ok(Noted(guard))
    }

    /// What a dead daemon has left there.
    pub fn left(&self) -> io::Result<Option<Moved>> {
        let guard = self.0.lock();
        let Some(file) = &*guard else { return Ok(None) };
        let mut head = [0; HEAD as usize];
        if file.read_at(&mut head, 0)? < head.len() {
            return Ok(None);
        }
        let mut words = head.as_chunks::<8>().0.iter().map(|w| u64::from_ne_bytes(*w));
        let mut next = || words.next().unwrap_or(0);
        let (counts, ino, offset, len) = (next(), next(), next(), next());
        if counts != 1 {
            return Ok(None);
        }
        if len > BYTES_MAX || offset.checked_add(len).is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a note makes no sense"));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, HEAD)?;
        Ok(Some(Moved { ino: Ino(ino), offset, bytes }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_under_way_is_known_to_the_next() {
        let moving = Moving::default();
        assert!(moving.note(Ino(1), 0, b"x").is_err(), "there is no place for it");
        let kept = moving.begin().unwrap().expect("a new one");
        assert!(moving.begin().unwrap().is_none());
        assert_eq!(moving.left().unwrap(), None);
        let noted = moving.note(Ino(7), 100, b"others").unwrap();
        let next = Moving::new(Some(kept));
        let moved = Moved { ino: Ino(7), offset: 100, bytes: b"others".to_vec() };
        assert_eq!(next.left().unwrap(), Some(moved));
        drop(noted);
        assert_eq!(next.left().unwrap(), None);
    }
}
