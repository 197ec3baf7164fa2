//! Descriptors that come and go.

use crate::descriptors::Descriptor;
use crate::state::Guard;
use crate::sys;
use crate::tracer::At;
use crate::{hooks, real};
use ebb_trace_format::Call;
use libc::{c_char, c_int, c_uint, mode_t};
use std::ffi::CStr;

hooks! {
    3 open, open64 => open;
    4 openat, openat64 => openat;
    2 creat, creat64 => creat;
    1 close => close;
    3 close_range => close_range;
    1 closefrom => closefrom;
    1 dup => dup;
    2 dup2 => dup2;
    3 dup3 => dup3;
}

/// How long the file is that an open is about to cut.
pub fn before_open(dir: c_int, path: *const c_char, flags: c_int) -> Option<u64> {
    if flags & libc::O_TRUNC == 0 || path.is_null() {
        return None;
    }
    let guard = Guard::take()?;
    // SAFETY: the program's path.
    let facts = sys::facts(dir, unsafe { CStr::from_ptr(path) }, 0);
    drop(guard);
    Some(facts.map_or(0, |f| f.size))
}

fn after_open(at: At, fd: c_int, old: Option<u64>) {
    if fd >= 0
        && let Some(mut tracer) = Guard::take()
    {
        tracer.opened(at, fd, old);
    }
}

unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: mode_t, from: usize) -> c_int {
    let at = At::now(Call::Open, from);
    let old = before_open(libc::AT_FDCWD, path, flags);
    let fd =
        unsafe { real!(open64 as fn(*const c_char, c_int, mode_t) -> c_int)(path, flags, mode) };
    after_open(at, fd, old);
    fd
}

unsafe extern "C" fn openat(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
    from: usize,
) -> c_int {
    let at = At::now(Call::Openat, from);
    let old = before_open(dir, path, flags);
    let work = real!(openat64 as fn(c_int, *const c_char, c_int, mode_t) -> c_int);
    let fd = unsafe { work(dir, path, flags, mode) };
    after_open(at, fd, old);
    fd
}

unsafe extern "C" fn creat(path: *const c_char, mode: mode_t, from: usize) -> c_int {
    let at = At::now(Call::Creat, from);
    let old = before_open(libc::AT_FDCWD, path, libc::O_TRUNC);
    let fd = unsafe { real!(creat64 as fn(*const c_char, mode_t) -> c_int)(path, mode) };
    after_open(at, fd, old);
    fd
}

/// Before the call: afterwards the number can be somebody else's.
unsafe extern "C" fn close(fd: c_int, from: usize) -> c_int {
    let at = At::now(Call::Close, from);
    if let Some(mut tracer) = Guard::take() {
        tracer.closing(at, fd);
    }
    unsafe { real!(close as fn(c_int) -> c_int)(fd) }
}

unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int, from: usize) -> c_int {
    let at = At::now(Call::Close, from);
    // CLOSE_RANGE_CLOEXEC closes nothing yet.
    if flags & 4 == 0
        && let Some(mut tracer) = Guard::take()
    {
        tracer.closing_from(at, first, last);
    }
    unsafe { real!(close_range as fn(c_uint, c_uint, c_int) -> c_int)(first, last, flags) }
}

unsafe extern "C" fn closefrom(first: c_int, from: usize) {
    let at = At::now(Call::Close, from);
    if let Some(mut tracer) = Guard::take() {
        tracer.closing_from(at, u32::try_from(first).unwrap_or(0), u32::MAX);
    }
    unsafe { real!(closefrom as fn(c_int) -> ())(first) }
}

unsafe extern "C" fn dup(old: c_int, from: usize) -> c_int {
    let at = At::now(Call::Dup2, from);
    let new = unsafe { real!(dup as fn(c_int) -> c_int)(old) };
    copied(at, old, new);
    new
}

pub fn copied(at: At, old: c_int, new: c_int) {
    if new >= 0
        && let Some(mut tracer) = Guard::take()
    {
        tracer.copied(at, old, new);
    }
}

/// `new` is closed first, if it is open.
fn replacing(at: At, old: c_int, new: c_int) {
    if old != new
        && let Some(mut tracer) = Guard::take()
        && tracer.descriptor(at, old) != Descriptor::Unknown
    {
        tracer.closing(at, new);
    }
}

unsafe extern "C" fn dup2(old: c_int, new: c_int, from: usize) -> c_int {
    let at = At::now(Call::Dup2, from);
    replacing(at, old, new);
    let got = unsafe { real!(dup2 as fn(c_int, c_int) -> c_int)(old, new) };
    copied(at, old, got);
    got
}

unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int, from: usize) -> c_int {
    let at = At::now(Call::Dup2, from);
    replacing(at, old, new);
    let got = unsafe { real!(dup3 as fn(c_int, c_int, c_int) -> c_int)(old, new, flags) };
    copied(at, old, got);
    got
}
