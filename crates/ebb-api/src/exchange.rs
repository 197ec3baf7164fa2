//! Buffers that some programs put and others get, in a coupled directory: an *exchange*. A buffer is one of its
//! files, with a name that its programs agree upon. A put is an open, writes and a close, a get an open that waits,
//! reads and a close; beside that each says of how many it is one, which a program that knows nothing of Ebb cannot.

use crate::call::{ask, ask_dir, error};
use crate::lists::{ReadPiece, WritePiece, read_list, write_list};
use ebb_api_format::Request;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

const COUPLE: &CStr = c"user.ebb.couple";

/// A buffer that all have read is gone after that, or the metadata service does not answer.
const GONE_WITHIN: Duration = Duration::from_secs(30);
const LOOK_AGAIN_MS: i32 = 1;
/// So often others are faster.
const WAITS_MAX: u32 = 1000;

fn is(e: &io::Error, errno: i32) -> bool {
    e.raw_os_error() == Some(errno)
}

/// Trying again what finds a buffer that all have read, and that goes.
struct Tries(Instant);

impl Tries {
    fn again(&self) -> io::Result<()> {
        if self.0.elapsed() > GONE_WITHIN {
            return Err(error(libc::ETIMEDOUT));
        }
        // SAFETY: waits for no descriptor.
        match unsafe { libc::poll(std::ptr::null_mut(), 0, LOOK_AGAIN_MS) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Opens an exchange. With `terms` ("producers=1 consumers=1 keep=none wait=30s") it is made where there is none:
/// an empty directory becomes one. What an exchange says that is there stays.
///
/// # Errors
/// ENODATA: without terms, and the directory is no exchange. ENOTEMPTY: it has files already, and is none.
/// EINVAL: these are no terms. ENOTTY: it is not on a mount of Ebb.
pub fn exchange(path: &Path, terms: Option<&str>) -> io::Result<File> {
    let made = match terms.map(|_| std::fs::create_dir(path)) {
        Some(Ok(())) => true,
        Some(Err(e)) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => false,
    };
    let opened = open_exchange(path, terms);
    if opened.is_err() && made {
        // Nobody has asked for an empty directory.
        let _ = std::fs::remove_dir(path);
    }
    opened
}

fn open_exchange(path: &Path, terms: Option<&str>) -> io::Result<File> {
    let dir = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path)?;
    // Whoever understands the question knows that there is no such name.
    match ask_dir(dir.as_fd(), &Request::Await(b"")) {
        Err(e) if is(&e, libc::ENOENT) => {}
        Err(e) => return Err(e),
        Ok(()) => return Err(error(libc::EPROTO)),
    }
    let terms = match (couples(&dir), terms) {
        (Ok(()), _) => return Ok(dir),
        (Err(e), Some(terms)) if is(&e, libc::ENODATA) => terms,
        (Err(e), _) => return Err(e),
    };
    // SAFETY: the name ends with a zero, and there are so many bytes of terms.
    let set = unsafe {
        let (value, len) = (terms.as_ptr().cast(), terms.len());
        libc::fsetxattr(dir.as_raw_fd(), COUPLE.as_ptr(), value, len, 0)
    };
    match set {
        0 => Ok(dir),
        _ => match io::Error::last_os_error() {
            // Another rank was faster.
            _ if couples(&dir).is_ok() => Ok(dir),
            e => Err(e),
        },
    }
}

fn couples(dir: &File) -> io::Result<()> {
    // SAFETY: the name ends with a zero, and there is room for nothing.
    let has = unsafe { libc::fgetxattr(dir.as_raw_fd(), COUPLE.as_ptr(), std::ptr::null_mut(), 0) };
    if has >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Puts a part of a buffer, of which this is one of so many producers; 0: of as many as the exchange says.
///
/// # Errors
/// EEXIST: it has all its producers, and was not read by all of its consumers yet. EINVAL: the exchange, or
/// another one, has said that there are more. EIO: a producer of it died; it is to be removed (unlink) before it can
/// be put anew. ESTALE: it was removed, or begun anew, meanwhile. ENODATA: that is no exchange. A write that fails
/// makes the buffer lost: who waits for it gets EIO.
pub fn put(
    exchange: BorrowedFd<'_>,
    name: &Path,
    pieces: &[WritePiece<'_>],
    of: u32,
) -> io::Result<()> {
    let name = c_name(name)?;
    let tries = Tries(Instant::now());
    let file = loop {
        let opened = open(exchange, &name, libc::O_WRONLY | libc::O_CREAT);
        match opened.and_then(|file| joined(file, of)) {
            // All have read it, and it goes; or it was made anew in between.
            Err(e) if is(&e, libc::ESTALE) => tries.again()?,
            other => break other?,
        }
    };
    let written = match pieces {
        [one] => file.write_all_at(one.data, one.offset),
        _ => write_all(file.as_fd(), pieces),
    };
    end(file, written, &Request::Fail)
}

/// An open that says of how many it is one. One that cannot be counts for nothing.
fn joined(file: File, of: u32) -> io::Result<File> {
    match ask(file.as_fd(), &Request::Join(of), 0) {
        Ok(_) => Ok(file),
        Err(e) => {
            let _ = ask(file.as_fd(), &Request::Withdraw, 0);
            Err(e)
        }
    }
}

/// It counts, or, where something failed, it ends so.
fn end<T>(file: File, result: io::Result<T>, failed: &Request<'_>) -> io::Result<T> {
    let counted = result.and_then(|done| ask(file.as_fd(), &Request::Done, 0).map(|_| done));
    if counted.is_err() {
        let _ = ask(file.as_fd(), failed, 0);
    }
    let closed = close(file);
    counted.and_then(|done| closed.map(|()| done))
}

fn write_all(file: BorrowedFd<'_>, pieces: &[WritePiece<'_>]) -> io::Result<()> {
    let all: usize = pieces.iter().map(|p| p.data.len()).sum();
    // What stopped it, the same list says when it cannot go on.
    if write_list(file, pieces)? == all { Ok(()) } else { Err(error(libc::EIO)) }
}

/// Gets parts of a buffer, when all its producers have put theirs; this is one of so many consumers of it, 0: of as
/// many as the exchange says. How much there is of each piece goes into its `got`; returns the sum.
///
/// # Errors
/// ETIMEDOUT: its producers did not come for as long as the exchange waits. EIO: one of them died. EINTR: a signal
/// came. EUSERS: so many others are reading it, or have. EINVAL: the exchange, or another one, has said that there are
/// more. ENODATA: that is no exchange, or no buffer of it.
pub fn get(
    exchange: BorrowedFd<'_>,
    name: &Path,
    pieces: &mut [ReadPiece<'_>],
    of: u32,
) -> io::Result<usize> {
    let name = c_name(name)?;
    let (mut tries, mut waits) = (Tries(Instant::now()), 0);
    loop {
        let opened = open_unawaited(exchange, &name).and_then(|file| joined(file, of));
        let got = opened.and_then(|file| {
            let got = match &mut *pieces {
                [one] => read_full(&file, one),
                pieces => read_list(file.as_fd(), pieces),
            };
            end(file, got, &Request::Withdraw)
        });
        match got {
            Err(e) if is(&e, libc::ENOENT) && waits < WAITS_MAX => {
                ask_dir(exchange, &Request::Await(name.to_bytes()))?;
                (tries, waits) = (Tries(Instant::now()), waits + 1);
            }
            // It goes, or was begun anew.
            Err(e) if is(&e, libc::ESTALE) => tries.again()?,
            other => return other,
        }
    }
}

fn read_full(file: &File, piece: &mut ReadPiece<'_>) -> io::Result<usize> {
    piece.got = 0;
    while piece.got < piece.buffer.len() {
        let at = piece.offset.checked_add(piece.got as u64).ok_or_else(|| error(libc::EINVAL))?;
        match file.read_at(&mut piece.buffer[piece.got..], at) {
            Ok(0) => break,
            Ok(n) => piece.got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(piece.got)
}

/// One name: no path.
fn c_name(name: &Path) -> io::Result<CString> {
    let bytes = name.as_os_str().as_bytes();
    if bytes.contains(&b'/') || matches!(bytes, b"" | b"." | b"..") {
        return Err(error(libc::EINVAL));
    }
    CString::new(bytes).map_err(|_| error(libc::EINVAL))
}

fn open(dir: BorrowedFd<'_>, name: &CStr, flags: i32) -> io::Result<File> {
    let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: the name ends with a zero.
    let fd = unsafe { libc::openat(dir.as_raw_fd(), name.as_ptr(), flags, 0o666) };
    opened(fd)
}

/// To read; where there is no such name it is not waited for, as that has a call of its own.
fn open_unawaited(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<File> {
    // SAFETY: all zeros are one.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOFOLLOW) as u64;
    let size = size_of::<libc::open_how>();
    // SAFETY: the name ends with a zero, and `how` has that size.
    let fd = unsafe {
        libc::syscall(libc::SYS_openat2, dir.as_raw_fd(), name.as_ptr(), &raw const how, size)
    };
    opened(fd as i32)
}

fn opened(fd: i32) -> io::Result<File> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just opened, and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// With what the close says.
fn close(file: File) -> io::Result<()> {
    // SAFETY: it is this one's, and not used again.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
