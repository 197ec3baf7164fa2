//! One call: an ioctl on an open file. What comes back is another process's word, and is checked.

use ebb_api_format::{BUFFER_MAX, Malformed, Request, command};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// ENOTTY for what is no regular file. An ioctl means something else to every kind of device; to a file of
/// another file system this one means nothing, and it says ENOTTY. Told by what the kernel knows: asking the
/// file system would be a request of its own.
fn check(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the path is empty and ends with a zero, and there is room for the answer.
    let done = unsafe {
        libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_TYPE, found.as_mut_ptr())
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeros would be one, too.
    let mode = u32::from(unsafe { found.assume_init() }.stx_mode);
    if mode & libc::S_IFMT == libc::S_IFREG { Ok(()) } else { Err(error(libc::ENOTTY)) }
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
    check(fd)?;
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
