//! The same for C; `include/ebb.h` says what each function does. Every function returns -1 and sets errno where
//! the Rust one gives an error. Pointers are the caller's word: NULL is found and answered with EFAULT, what
//! else is wrong with one cannot be.

use crate::call::error;
use crate::layers::{CommitFs, PosixFs, SessionFs};
use crate::lists::{ReadPiece, WritePiece};
use crate::{Extended, HANDLE};
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// `struct ebb_owner`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct COwner {
    offset: u64,
    len: u64,
    node: u32,
    reserved: u32,
}

/// `struct ebb_stat`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CStat {
    size: u64,
    unattached: u64,
    unflushed: u64,
    node: u32,
    reserved: u32,
}

/// `struct ebb_piece`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CPiece {
    offset: u64,
    data: *mut c_void,
    len: usize,
}

/// A file of the caller's descriptor, which stays his.
fn file(fd: c_int) -> io::Result<ManuallyDrop<File>> {
    // SAFETY: asks about a number only.
    if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(error(libc::EBADF));
    }
    // SAFETY: it is open, as far as a library can know, and is not closed here.
    Ok(ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }))
}

fn answer<T: From<i8>>(result: io::Result<T>) -> T {
    result.unwrap_or_else(|e| {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        // SAFETY: each thread has an errno.
        unsafe { *libc::__errno_location() = errno };
        T::from(-1)
    })
}

fn done(result: io::Result<()>) -> c_int {
    answer(result.map(|()| 0))
}

fn count(result: io::Result<usize>) -> isize {
    answer(result.and_then(|n| isize::try_from(n).map_err(|_| error(libc::EOVERFLOW))))
}

fn range(offset: u64, len: u64) -> io::Result<Option<Range<u64>>> {
    let end = offset.checked_add(len).ok_or_else(|| error(libc::EINVAL))?;
    Ok(Some(offset..end))
}

/// # Safety
/// There are `len` bytes at `data`, unless it is NULL.
unsafe fn bytes<'a>(data: *const c_void, len: usize) -> io::Result<&'a [u8]> {
    match len {
        0 => Ok(&[]),
        _ if data.is_null() => Err(error(libc::EFAULT)),
        _ if isize::try_from(len).is_err() => Err(error(libc::EINVAL)),
        // SAFETY: the caller says so.
        _ => Ok(unsafe { std::slice::from_raw_parts(data.cast(), len) }),
    }
}

/// # Safety
/// As above, and nobody else uses them.
unsafe fn bytes_mut<'a>(data: *mut c_void, len: usize) -> io::Result<&'a mut [u8]> {
    match len {
        0 => Ok(&mut []),
        _ if data.is_null() => Err(error(libc::EFAULT)),
        _ if isize::try_from(len).is_err() => Err(error(libc::EINVAL)),
        // SAFETY: the caller says so.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), len) }),
    }
}

/// # Safety
/// It is a string, unless it is NULL.
unsafe fn path<'a>(text: *const c_char) -> io::Result<&'a Path> {
    if text.is_null() {
        return Err(error(libc::EFAULT));
    }
    // SAFETY: the caller says so.
    let text = unsafe { CStr::from_ptr(text) };
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

/// # Safety
/// There are `n` of them, unless it is NULL.
unsafe fn pieces<'a>(all: *const CPiece, n: usize) -> io::Result<&'a [CPiece]> {
    match n {
        0 => Ok(&[]),
        _ if all.is_null() => Err(error(libc::EFAULT)),
        _ if n > isize::MAX as usize / size_of::<CPiece>() => Err(error(libc::EINVAL)),
        // SAFETY: the caller says so.
        _ => Ok(unsafe { std::slice::from_raw_parts(all, n) }),
    }
}

/// Version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn ebb_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// open(2).
///
/// # Safety
/// `name` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_open(name: *const c_char, flags: c_int, mode: u32) -> c_int {
    if name.is_null() {
        return done(Err(error(libc::EFAULT)));
    }
    // SAFETY: as above.
    let fd = unsafe { libc::open(name, flags | libc::O_CLOEXEC, mode) };
    if fd < 0 {
        return fd;
    }
    let checked = file(fd).and_then(|f| crate::primitives::probe(f.as_fd()));
    if checked.is_err() {
        // SAFETY: it was just opened here.
        unsafe { libc::close(fd) };
    }
    answer(checked.map(|()| fd))
}

/// close(2).
#[unsafe(no_mangle)]
pub extern "C" fn ebb_close(fd: c_int) -> c_int {
    // SAFETY: the caller's own descriptor, which he gives up.
    unsafe { libc::close(fd) }
}

/// See `ebb.h`, as for all that follow.
///
/// # Safety
/// There are `len` bytes at `data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_write(
    fd: c_int,
    data: *const c_void,
    len: usize,
    offset: u64,
) -> isize {
    // SAFETY: the caller says so.
    let data = unsafe { bytes(data, len) };
    count(data.and_then(|data| file(fd)?.write_at(data, offset)))
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_read(
    fd: c_int,
    data: *mut c_void,
    len: usize,
    offset: u64,
    owner: u32,
) -> isize {
    // SAFETY: the caller says so.
    let buffer = unsafe { bytes_mut(data, len) };
    count(buffer.and_then(|buffer| file(fd)?.read_owner(buffer, offset, owner)))
}

#[allow(missing_docs)]
#[unsafe(no_mangle)]
pub extern "C" fn ebb_seek(fd: c_int, offset: i64, whence: c_int) -> i64 {
    // SAFETY: numbers only.
    unsafe { libc::lseek(fd, offset, whence) }
}

#[allow(missing_docs)]
#[unsafe(no_mangle)]
pub extern "C" fn ebb_tell(fd: c_int) -> i64 {
    // SAFETY: numbers only.
    unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }
}

macro_rules! on_ranges {
    ($($of_range:ident, $of_file:ident: $method:ident;)*) => {$(
        #[allow(missing_docs)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $of_range(fd: c_int, offset: u64, len: u64) -> c_int {
            done(file(fd).and_then(|f| f.$method(range(offset, len)?)))
        }

        #[allow(missing_docs)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $of_file(fd: c_int) -> c_int {
            done(file(fd).and_then(|f| f.$method(None)))
        }
    )*};
}

on_ranges! {
    ebb_attach, ebb_attach_file: attach;
    ebb_detach, ebb_detach_file: detach;
    ebb_flush, ebb_flush_file: flush;
}

/// # Safety
/// There is room for `n` at `owners`.
unsafe fn query(
    fd: c_int,
    range: io::Result<Option<Range<u64>>>,
    owners: *mut COwner,
    n: usize,
) -> io::Result<usize> {
    if owners.is_null() && n > 0 {
        return Err(error(libc::EFAULT));
    }
    let found = file(fd)?.query(range?)?;
    for (at, owner) in found.iter().take(n).enumerate() {
        let (offset, len) = (owner.range.start, owner.range.end - owner.range.start);
        let owner = COwner { offset, len, node: owner.node, reserved: 0 };
        // SAFETY: the caller says that there is room.
        unsafe { owners.add(at).write(owner) };
    }
    Ok(found.len())
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_query(
    fd: c_int,
    offset: u64,
    len: u64,
    owners: *mut COwner,
    n: usize,
) -> isize {
    // SAFETY: the caller says so.
    count(unsafe { query(fd, range(offset, len), owners, n) })
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_query_file(fd: c_int, owners: *mut COwner, n: usize) -> isize {
    // SAFETY: the caller says so.
    count(unsafe { query(fd, Ok(None), owners, n) })
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_stat(fd: c_int, into: *mut CStat) -> c_int {
    if into.is_null() {
        return done(Err(error(libc::EFAULT)));
    }
    done(file(fd).and_then(|f| {
        let crate::Stat { size, node, unattached, unflushed, .. } = f.ebb_stat()?;
        // SAFETY: the caller says that there is room.
        unsafe { into.write(CStat { size, unattached, unflushed, node, reserved: 0 }) };
        Ok(())
    }))
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_writex(fd: c_int, list: *const CPiece, n: usize) -> isize {
    // SAFETY: the caller says so.
    let all = unsafe { pieces(list, n) };
    count(all.and_then(|all| {
        let one = |p: &CPiece| {
            // SAFETY: as above.
            let data = unsafe { bytes(p.data, p.len) }?;
            Ok(WritePiece { offset: p.offset, data })
        };
        let all: Vec<WritePiece<'_>> = all.iter().map(one).collect::<io::Result<_>>()?;
        file(fd)?.write_list(&all)
    }))
}

/// EINVAL when two pieces would be read to the same place.
fn apart(all: &[CPiece]) -> io::Result<()> {
    let mut places: Vec<(usize, usize)> =
        all.iter().filter(|p| p.len > 0).map(|p| (p.data as usize, p.len)).collect();
    places.sort_unstable();
    let meet = places.windows(2).any(|w| w[0].0.saturating_add(w[0].1) > w[1].0);
    if meet { Err(error(libc::EINVAL)) } else { Ok(()) }
}

/// Pieces into which is read.
///
/// # Safety
/// They are where they say, and nobody else uses them.
unsafe fn read_pieces<'a>(all: &'a [CPiece]) -> io::Result<Vec<ReadPiece<'a>>> {
    apart(all)?;
    let one = |p: &CPiece| {
        // SAFETY: the caller says so, and they are apart.
        let buffer = unsafe { bytes_mut(p.data, p.len) }?;
        Ok(ReadPiece { offset: p.offset, buffer, got: 0 })
    };
    all.iter().map(one).collect()
}

/// # Safety
/// There is room for as many, unless it is NULL.
unsafe fn tell_got(all: &[ReadPiece<'_>], got: *mut usize) {
    if got.is_null() {
        return;
    }
    for (at, piece) in all.iter().enumerate() {
        // SAFETY: the caller says so.
        unsafe { got.add(at).write(piece.got) };
    }
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_readx(
    fd: c_int,
    list: *const CPiece,
    n: usize,
    got: *mut usize,
) -> isize {
    // SAFETY: the caller says so.
    let all = unsafe { pieces(list, n) };
    count(all.and_then(|all| {
        // SAFETY: as above.
        let mut all = unsafe { read_pieces(all) }?;
        let sum = file(fd)?.read_list(&mut all)?;
        // SAFETY: as above.
        unsafe { tell_got(&all, got) };
        Ok(sum)
    }))
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_exchange(dir: *const c_char, terms: *const c_char) -> c_int {
    // SAFETY: the caller says so.
    let (dir, words) = unsafe { (path(dir), (!terms.is_null()).then(|| CStr::from_ptr(terms))) };
    answer(dir.and_then(|dir| {
        let words = words.map(|words| words.to_str().map_err(|_| error(libc::EINVAL)));
        crate::exchange::exchange(dir, words.transpose()?).map(IntoRawFd::into_raw_fd)
    }))
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_putx(
    exchange: c_int,
    name: *const c_char,
    list: *const CPiece,
    n: usize,
    participants: u32,
) -> c_int {
    // SAFETY: the caller says so.
    let (name, all) = unsafe { (path(name), pieces(list, n)) };
    let put = || {
        let one = |p: &CPiece| {
            // SAFETY: as above.
            let data = unsafe { bytes(p.data, p.len) }?;
            Ok(WritePiece { offset: p.offset, data })
        };
        let all: Vec<WritePiece<'_>> = all?.iter().map(one).collect::<io::Result<_>>()?;
        crate::exchange::put(file(exchange)?.as_fd(), name?, &all, participants)
    };
    done(put())
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_getx(
    exchange: c_int,
    name: *const c_char,
    list: *const CPiece,
    n: usize,
    got: *mut usize,
    participants: u32,
) -> isize {
    // SAFETY: the caller says so.
    let (name, all) = unsafe { (path(name), pieces(list, n)) };
    let get = || {
        // SAFETY: as above.
        let mut all = unsafe { read_pieces(all?) }?;
        let sum = crate::exchange::get(file(exchange)?.as_fd(), name?, &mut all, participants)?;
        // SAFETY: as above.
        unsafe { tell_got(&all, got) };
        Ok(sum)
    };
    count(get())
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_put(
    exchange: c_int,
    name: *const c_char,
    data: *const c_void,
    len: usize,
    offset: u64,
    participants: u32,
) -> c_int {
    let piece = CPiece { offset, data: data.cast_mut(), len };
    // SAFETY: the caller says so; nothing is written to it.
    unsafe { ebb_putx(exchange, name, &raw const piece, 1, participants) }
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_get(
    exchange: c_int,
    name: *const c_char,
    data: *mut c_void,
    len: usize,
    offset: u64,
    participants: u32,
) -> isize {
    let piece = CPiece { offset, data, len };
    // SAFETY: the caller says so.
    unsafe { ebb_getx(exchange, name, &raw const piece, 1, std::ptr::null_mut(), participants) }
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_handle_get(fd: c_int, into: *mut [u8; HANDLE]) -> c_int {
    if into.is_null() {
        return done(Err(error(libc::EFAULT)));
    }
    // SAFETY: the caller says that there is room.
    done(file(fd).and_then(|f| f.handle()).map(|handle| unsafe { into.write(handle) }))
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_handle_open(
    mount: *const c_char,
    handle: *const [u8; HANDLE],
    flags: c_int,
) -> c_int {
    if handle.is_null() {
        return done(Err(error(libc::EFAULT)));
    }
    // SAFETY: the caller says so of both.
    let (mount, handle) = unsafe { (path(mount), handle.read()) };
    answer(mount.and_then(|mount| Ok(crate::open_handle(mount, &handle, flags)?.into_raw_fd())))
}

#[allow(missing_docs, clippy::missing_safety_doc)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ebb_handle_path(
    mount: *const c_char,
    handle: *const [u8; HANDLE],
    into: *mut c_char,
    room: usize,
) -> isize {
    if handle.is_null() || into.is_null() {
        return count(Err(error(libc::EFAULT)));
    }
    // SAFETY: the caller says so of both.
    let (mount, handle) = unsafe { (path(mount), handle.read()) };
    count(mount.and_then(|mount| {
        let path = crate::handle_path(mount, &handle).into_os_string().into_vec();
        if path.len() >= room {
            return Err(error(libc::ERANGE));
        }
        // SAFETY: the caller says that there is so much room; the path and a zero are shorter.
        unsafe {
            into.copy_from_nonoverlapping(path.as_ptr().cast(), path.len());
            into.add(path.len()).write(0);
        }
        Ok(path.len())
    }))
}

/// Has a layer do something with the caller's file, which stays open.
macro_rules! layers {
    ($($layer:ident: $write:ident, $read:ident $(, $sync:ident = $method:ident)*;)*) => {$(
        #[allow(missing_docs, clippy::missing_safety_doc)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $write(
            fd: c_int,
            data: *const c_void,
            len: usize,
            offset: u64,
        ) -> isize {
            // SAFETY: the caller says so.
            let data = unsafe { bytes(data, len) };
            count(data.and_then(|data| {
                let layer = ManuallyDrop::new($layer(ManuallyDrop::into_inner(file(fd)?)));
                layer.write(data, offset).map(|()| len)
            }))
        }

        #[allow(missing_docs, clippy::missing_safety_doc)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $read(
            fd: c_int,
            data: *mut c_void,
            len: usize,
            offset: u64,
        ) -> isize {
            // SAFETY: the caller says so.
            let buffer = unsafe { bytes_mut(data, len) };
            count(buffer.and_then(|buffer| {
                let layer = ManuallyDrop::new($layer(ManuallyDrop::into_inner(file(fd)?)));
                layer.read(buffer, offset)
            }))
        }

        $(
            #[allow(missing_docs)]
            #[unsafe(no_mangle)]
            pub extern "C" fn $sync(fd: c_int) -> c_int {
                done(file(fd).and_then(|f| {
                    ManuallyDrop::new($layer(ManuallyDrop::into_inner(f))).$method()
                }))
            }
        )*
    )*};
}

layers! {
    PosixFs: ebb_posix_write, ebb_posix_read;
    CommitFs: ebb_commit_write, ebb_commit_read, ebb_commit = commit;
    SessionFs: ebb_session_write, ebb_session_read,
        ebb_session_open = session_open, ebb_session_close = session_close;
}
