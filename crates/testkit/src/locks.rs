//! Record locks: the standard library has only those of whole files.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `fcntl` with a command that sets a lock (`F_SETLK`, `F_OFD_SETLKW`, ...), of `len` bytes; 0: to the end.
///
/// # Errors
/// What the system says; EINVAL also for a place that no file has.
pub fn record_lock(
    file: &File,
    command: libc::c_int,
    kind: libc::c_int,
    (start, len): (u64, u64),
) -> io::Result<()> {
    let place = |n: u64| i64::try_from(n).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
    // SAFETY: plain numbers, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    (lock.l_start, lock.l_len) = (place(start)?, place(len)?);
    // SAFETY: the descriptor is open and the lock lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw const lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
