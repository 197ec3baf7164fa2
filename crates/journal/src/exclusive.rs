//! The lock of a directory that one process has for itself, as long as it lives.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

/// A process that was killed keeps its locks until its last thread has come back from the disk.
const ENDING_MAX: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(20);

/// Takes the lock of `file`; [`io::ErrorKind::WouldBlock`] when another process has it, and does
/// not end within three seconds.
pub fn take_lock(file: &File) -> io::Result<()> {
    let end = Instant::now() + ENDING_MAX;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(POLL),
            done => return done.map_err(io::Error::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_that_is_about_to_end_is_waited_for_and_another_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let open = || File::create(dir.path().join("lock")).unwrap();
        let first = open();
        take_lock(&first).unwrap();
        let ending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            drop(first);
        });
        let second = open();
        take_lock(&second).unwrap();
        ending.join().unwrap();
        let e = take_lock(&open()).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
        drop(second);
    }
}
