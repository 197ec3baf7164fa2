//! One call: an ioctl on an open file. What comes back is another process's word, and is checked.

use ebb_api_format::{BUFFER_MAX, Malformed, Request, command};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// ENOTTY for what is not of that kind. An ioctl means something else to every kind of device; to a file of
/// another file system this one means nothing, and it says ENOTTY. Told by what the kernel knows: asking the
/// file system would be a request of its own.
fn check(fd: BorrowedFd<'_>, kind: u32) -> io::Result<()> {
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
    if mode & libc::S_IFMT == kind { Ok(()) } else { Err(error(libc::ENOTTY)) }
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
    check(fd, libc::S_IFREG)?;
    buffer.resize(buffer.len().max(room).min(BUFFER_MAX), 0);
    loop {
        match once(fd, &mut buffer) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
            Ok(n) => {
                buffer.truncate(n);
                return Ok(buffer);
            }
        }
    }
}

/// Asks something of a directory that may take long: EINTR when a signal comes.
pub(crate) fn ask_dir(fd: BorrowedFd<'_>, request: &Request<'_>) -> io::Result<()> {
    check(fd, libc::S_IFDIR)?;
    once(fd, &mut request.encode().ok_or_else(|| error(libc::E2BIG))?).map(drop)
}

/// How many bytes of the buffer are the answer.
fn once(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    let number = command(buffer.len()) as libc::Ioctl;
    // SAFETY: the number says how long the buffer is; the kernel copies no more, either way.
    let n = unsafe { libc::ioctl(fd.as_raw_fd(), number, buffer.as_mut_ptr()) };
    match usize::try_from(n) {
        Ok(n) if n <= buffer.len() => Ok(n),
        Ok(_) => Err(error(libc::EPROTO)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
