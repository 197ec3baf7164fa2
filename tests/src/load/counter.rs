//! A number in a file that all programs count up, each under a record lock of it: no node may lose
//! another one's count, whatever the model.

use super::book::COMMON;
use ebb_testkit::record_lock;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const COUNTER: &str = "counter";
/// Unaligned, and beside bytes of others.
const AT: u64 = 5;

fn lock(file: &File, kind: libc::c_int) -> io::Result<()> {
    lock_record(file, kind, AT, 8)
}

/// Waits for a lock of some bytes, or gives it back. Closing the file would do that, too.
pub(super) fn lock_record(file: &File, kind: libc::c_int, at: u64, len: u64) -> io::Result<()> {
    record_lock(file, libc::F_SETLKW, kind, (at, len))
}

/// What is in the file; nothing counts as 0.
fn value(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    match file.read_exact_at(&mut bytes, AT) {
        Ok(()) => Ok(u64::from_le_bytes(bytes)),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        Err(e) => Err(e),
    }
}

/// Counts one up below `root`. False: the number is at a node that does not answer just now.
pub(super) fn count(root: &Path) -> io::Result<bool> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(root.join(COMMON).join(COUNTER))?;
    lock(&file, libc::F_WRLCK)?;
    let next = match value(&file) {
        Ok(now) => now + 1,
        Err(e) if e.raw_os_error() == Some(libc::EIO) => return Ok(false),
        Err(e) => return Err(e),
    };
    file.write_all_at(&next.to_le_bytes(), AT)?;
    lock(&file, libc::F_UNLCK)?;
    crate::model::close(file).map(|()| true)
}

/// The number, as it is found below `root`.
///
/// # Panics
/// When it cannot be read.
#[must_use]
pub fn counted(root: &Path) -> u64 {
    let path = root.join(COMMON).join(COUNTER);
    match File::open(&path) {
        Ok(file) => value(&file).unwrap_or_else(|e| panic!("{}: {e}", path.display())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => 0,
        Err(e) => panic!("{}: {e}", path.display()),
    }
}
