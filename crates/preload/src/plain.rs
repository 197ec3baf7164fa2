//! Reading, writing, syncing and cutting by descriptor.

use crate::descriptors::Descriptor;
use crate::state::{self, Guard};
use crate::sys;
use crate::tracer::{At, Tracer};
use crate::{hooks, real};
use ebb_trace_format::{Act, Call, Event, What};
use libc::{c_int, c_uint, c_void, iovec, off_t, size_t, ssize_t};
use std::ffi::CStr;

hooks! {
    3 read => read;
    3 write => write;
    4 pread, pread64 => pread;
    4 pwrite, pwrite64 => pwrite;
    3 readv => readv;
    3 writev => writev;
    4 preadv, preadv64 => preadv;
    4 pwritev, pwritev64 => pwritev;
    1 fsync => fsync;
    1 fdatasync => fdatasync;
    2 ftruncate, ftruncate64 => ftruncate;
    2 truncate, truncate64 => truncate;
    4 fallocate, fallocate64 => fallocate;
    3 posix_fallocate, posix_fallocate64 => posix_fallocate;
    4 sendfile, sendfile64 => sendfile;
    5 fsetxattr => fsetxattr;
}

/// A call was made that moved `n` bytes of `fd`, of `asked` ones: at an offset of its own, or at the
/// descriptor's, which has moved on.
fn moved(at: At, fd: c_int, offset: Option<off_t>, n: ssize_t, asked: usize, writes: bool) {
    let Ok(n) = u64::try_from(n) else { return };
    let Some(mut tracer) = Guard::take() else { return };
    let Descriptor::Regular { file, appends, .. } = tracer.descriptor(at, fd) else { return };
    let start = match offset {
        // Linux appends whatever the offset.
        Some(offset) if !(writes && appends) => Some(offset as u64),
        Some(_) => sys::facts_of(fd).map(|f| f.size.saturating_sub(n)),
        None => sys::position(fd).map(|end| end.saturating_sub(n)),
    };
    let Some(start) = start else { return };
    let act = match (writes, appends) {
        (false, _) => Act::Read,
        (true, false) => Act::Write,
        (true, true) => Act::Append,
    };
    // A read that ends early has seen that there is no more.
    let len = if writes { n } else { n.max(asked as u64) };
    tracer.access(at, file, act, start, start.saturating_add(len));
}

fn bytes_of(list: *const iovec, count: c_int) -> usize {
    let Ok(count) = usize::try_from(count) else { return 0 };
    // SAFETY: the kernel has just used the list.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    list.iter().fold(0, |sum, part| sum.saturating_add(part.iov_len))
}

unsafe extern "C" fn read(fd: c_int, to: *mut c_void, len: size_t, from: usize) -> ssize_t {
    let work = real!(read as fn(c_int, *mut c_void, size_t) -> ssize_t);
    if !state::is_on() {
        return unsafe { work(fd, to, len) };
    }
    let at = At::now(Call::Read, from);
    let n = unsafe { work(fd, to, len) };
    moved(at, fd, None, n, len, false);
    n
}

unsafe extern "C" fn write(fd: c_int, of: *const c_void, len: size_t, from: usize) -> ssize_t {
    let work = real!(write as fn(c_int, *const c_void, size_t) -> ssize_t);
    if !state::is_on() {
        return unsafe { work(fd, of, len) };
    }
    let at = At::now(Call::Write, from);
    let n = unsafe { work(fd, of, len) };
    moved(at, fd, None, n, len, true);
    n
}

unsafe extern "C" fn pread(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    offset: off_t,
    from: usize,
) -> ssize_t {
    let work = real!(pread64 as fn(c_int, *mut c_void, size_t, off_t) -> ssize_t);
    let at = At::now(Call::Pread, from);
    let n = unsafe { work(fd, to, len, offset) };
    moved(at, fd, Some(offset), n, len, false);
    n
}

unsafe extern "C" fn pwrite(
    fd: c_int,
    of: *const c_void,
    len: size_t,
    offset: off_t,
    from: usize,
) -> ssize_t {
    let work = real!(pwrite64 as fn(c_int, *const c_void, size_t, off_t) -> ssize_t);
    let at = At::now(Call::Pwrite, from);
    let n = unsafe { work(fd, of, len, offset) };
    moved(at, fd, Some(offset), n, len, true);
    n
}

unsafe extern "C" fn readv(fd: c_int, list: *const iovec, count: c_int, from: usize) -> ssize_t {
    let at = At::now(Call::Readv, from);
    let n = unsafe { real!(readv as fn(c_int, *const iovec, c_int) -> ssize_t)(fd, list, count) };
    if n >= 0 {
        moved(at, fd, None, n, bytes_of(list, count), false);
    }
    n
}

unsafe extern "C" fn writev(fd: c_int, list: *const iovec, count: c_int, from: usize) -> ssize_t {
    let at = At::now(Call::Writev, from);
    let n = unsafe { real!(writev as fn(c_int, *const iovec, c_int) -> ssize_t)(fd, list, count) };
    moved(at, fd, None, n, 0, true);
    n
}

unsafe extern "C" fn preadv(
    fd: c_int,
    list: *const iovec,
    count: c_int,
    offset: off_t,
    from: usize,
) -> ssize_t {
    let at = At::now(Call::Preadv, from);
    let work = real!(preadv64 as fn(c_int, *const iovec, c_int, off_t) -> ssize_t);
    let n = unsafe { work(fd, list, count, offset) };
    if n >= 0 {
        moved(at, fd, Some(offset), n, bytes_of(list, count), false);
    }
    n
}

unsafe extern "C" fn pwritev(
    fd: c_int,
    list: *const iovec,
    count: c_int,
    offset: off_t,
    from: usize,
) -> ssize_t {
    let at = At::now(Call::Pwritev, from);
    let work = real!(pwritev64 as fn(c_int, *const iovec, c_int, off_t) -> ssize_t);
    let n = unsafe { work(fd, list, count, offset) };
    moved(at, fd, Some(offset), n, 0, true);
    n
}

fn synced(at: At, fd: c_int, result: c_int) {
    if result == 0
        && let Some(mut tracer) = Guard::take()
        && let Some(file) = tracer.regular(at, fd)
    {
        tracer.record(at, What::Sync { file, event: Event::Fsync });
    }
}

unsafe extern "C" fn fsync(fd: c_int, from: usize) -> c_int {
    let at = At::now(Call::Fsync, from);
    let result = unsafe { real!(fsync as fn(c_int) -> c_int)(fd) };
    synced(at, fd, result);
    result
}

unsafe extern "C" fn fdatasync(fd: c_int, from: usize) -> c_int {
    let at = At::now(Call::Fdatasync, from);
    let result = unsafe { real!(fdatasync as fn(c_int) -> c_int)(fd) };
    synced(at, fd, result);
    result
}

/// The commit of an Ebb mount: any value of this attribute.
unsafe extern "C" fn fsetxattr(
    fd: c_int,
    name: *const libc::c_char,
    value: *const c_void,
    len: size_t,
    flags: c_int,
    from: usize,
) -> c_int {
    let at = At::now(Call::Setxattr, from);
    let work =
        real!(fsetxattr as fn(c_int, *const libc::c_char, *const c_void, size_t, c_int) -> c_int);
    let result = unsafe { work(fd, name, value, len, flags) };
    // SAFETY: the kernel has just read the name.
    if result == 0
        && unsafe { CStr::from_ptr(name) } == c"user.ebb.commit"
        && let Some(mut tracer) = Guard::take()
        && let Some(file) = tracer.regular(at, fd)
    {
        tracer.record(at, What::Sync { file, event: Event::Commit });
    }
    result
}

/// How long the file of a descriptor is, where that matters.
fn size_of(fd: c_int) -> Option<u64> {
    let guard = Guard::take()?;
    let size = sys::facts_of(fd).filter(|f| f.is_regular).map(|f| f.size);
    drop(guard);
    size
}

fn resized(at: At, fd: c_int, old: Option<u64>, change: impl FnOnce(&mut Tracer, u32, u64)) {
    if let Some(old) = old
        && let Some(mut tracer) = Guard::take()
        && let Some(file) = tracer.regular(at, fd)
    {
        change(&mut tracer, file, old);
    }
}

unsafe extern "C" fn ftruncate(fd: c_int, len: off_t, from: usize) -> c_int {
    let at = At::now(Call::Ftruncate, from);
    let old = size_of(fd);
    let result = unsafe { real!(ftruncate64 as fn(c_int, off_t) -> c_int)(fd, len) };
    if result == 0 {
        resized(at, fd, old, |tracer, file, old| tracer.cut(at, file, old, len as u64));
    }
    result
}

unsafe extern "C" fn truncate(path: *const libc::c_char, len: off_t, from: usize) -> c_int {
    let at = At::now(Call::Truncate, from);
    // By a descriptor that says which file it is; the program's call is made as it is.
    // SAFETY: the program's path.
    let fd =
        state::is_on().then(|| sys::open(unsafe { CStr::from_ptr(path) }, libc::O_PATH)).flatten();
    let old = fd.and_then(size_of);
    let result = unsafe { real!(truncate64 as fn(*const libc::c_char, off_t) -> c_int)(path, len) };
    let Some(fd) = fd else { return result };
    if let Some(mut tracer) = Guard::take() {
        if result == 0
            && let Some(facts) = sys::facts_of(fd).filter(|f| f.is_regular)
            && let Some(file) = tracer.file(at, fd, &facts)
        {
            tracer.cut(at, file, old.unwrap_or(0), len as u64);
        }
        sys::close(fd);
    }
    result
}

/// Only what makes a file longer changes what is read.
fn allocated(at: At, fd: c_int, old: Option<u64>, mode: c_int, start: off_t, len: off_t) {
    let end = (start as u64).saturating_add(len as u64);
    resized(at, fd, old, |tracer, file, old| match mode {
        0 => tracer.access(at, file, Act::Write, old, end),
        libc::FALLOC_FL_KEEP_SIZE => {}
        // Holes, zeros, and ranges that are moved.
        _ => tracer.access(at, file, Act::Write, start as u64, end),
    });
}

unsafe extern "C" fn fallocate(
    fd: c_int,
    mode: c_int,
    start: off_t,
    len: off_t,
    from: usize,
) -> c_int {
    let at = At::now(Call::Fallocate, from);
    let old = size_of(fd);
    let result = unsafe {
        real!(fallocate64 as fn(c_int, c_int, off_t, off_t) -> c_int)(fd, mode, start, len)
    };
    if result == 0 {
        allocated(at, fd, old, mode, start, len);
    }
    result
}

unsafe extern "C" fn posix_fallocate(fd: c_int, start: off_t, len: off_t, from: usize) -> c_int {
    let at = At::now(Call::Fallocate, from);
    let old = size_of(fd);
    let result =
        unsafe { real!(posix_fallocate64 as fn(c_int, off_t, off_t) -> c_int)(fd, start, len) };
    if result == 0 {
        allocated(at, fd, old, 0, start, len);
    }
    result
}

unsafe extern "C" fn sendfile(
    to: c_int,
    of: c_int,
    offset: *mut off_t,
    len: size_t,
    from: usize,
) -> ssize_t {
    let at = At::now(Call::Sendfile, from);
    // SAFETY: the program's pointer, if there is one.
    let start = (!offset.is_null()).then(|| unsafe { *offset });
    let n = unsafe {
        real!(sendfile64 as fn(c_int, c_int, *mut off_t, size_t) -> ssize_t)(to, of, offset, len)
    };
    moved(at, of, start, n, 0, false);
    moved(at, to, None, n, 0, true);
    n
}

/// Six arguments leave no register for where it came from.
#[unsafe(no_mangle)]
unsafe extern "C" fn copy_file_range(
    of: c_int,
    of_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let at = At::now(Call::CopyFileRange, 0);
    // SAFETY: the program's pointers, if there are any.
    let (first, second) =
        unsafe { ((!of_at.is_null()).then(|| *of_at), (!to_at.is_null()).then(|| *to_at)) };
    let work = real!(
        copy_file_range as fn(c_int, *mut off_t, c_int, *mut off_t, size_t, c_uint) -> ssize_t
    );
    let n = unsafe { work(of, of_at, to, to_at, len, flags) };
    moved(at, of, first, n, 0, false);
    moved(at, to, second, n, 0, true);
    n
}
