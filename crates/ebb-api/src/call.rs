//! One call: an ioctl on an open file. What comes back is another process's word, and is checked.

use ebb_api_format::{BUFFER_MAX, FUSE_MAGIC, Malformed, Request, command};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The file is on a FUSE mount. An ioctl means something else to every other kind of file, so nothing else
/// is asked.
fn is_fuse(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open, and the structure is written by the kernel before it is read.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has succeeded.
    Ok(unsafe { found.assume_init() }.f_type == FUSE_MAGIC)
}

/// ENOTTY for a descriptor that is none of a regular file on a FUSE mount.
pub(crate) fn check(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: as above.
    if unsafe { libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has succeeded.
    let mode = unsafe { stat.assume_init() }.st_mode;
    if mode & libc::S_IFMT == libc::S_IFREG && is_fuse(fd)? {
        return Ok(());
    }
    Err(error(libc::ENOTTY))
}

pub(crate) fn error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

pub(crate) fn malformed(_: Malformed) -> io::Error {
    error(libc::EPROTO)
}

/// Asks; `room`: so long an answer is expected at most.
pub(crate) fn ask(fd: BorrowedFd<'_>, request: &Request<'_>, room: usize) -> io::Result<Vec<u8>> {
    send(fd, request.encode().ok_or_else(|| error(libc::E2BIG))?, room)
}

/// The same of a request that is bytes already.
pub(crate) fn send(fd: BorrowedFd<'_>, mut buffer: Vec<u8>, room: usize) -> io::Result<Vec<u8>> {
    if !is_fuse(fd)? {
        return Err(error(libc::ENOTTY));
    }
    buffer.resize(buffer.len().max(room).min(BUFFER_MAX), 0);
    let number = command(buffer.len()) as libc::Ioctl;
    loop {
        // SAFETY: the number says how long the buffer is; the kernel copies no more, either way.
        let n = unsafe { libc::ioctl(fd.as_raw_fd(), number, buffer.as_mut_ptr()) };
        if n >= 0 {
            let n = n as usize;
            if n > buffer.len() {
                return Err(error(libc::EPROTO));
            }
            buffer.truncate(n);
            return Ok(buffer);
        }
        let e = io::Error::last_os_error();
        // The kernel says so where the mount has ended: the same for every call.
        if e.raw_os_error() != Some(libc::EINTR) {
            return Err(e);
        }
    }
}
