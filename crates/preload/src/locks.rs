//! Record locks and locks of whole files. What is let go is told before the call, what is taken after
//! it, so that on one clock the order of the two is right.

use crate::descriptors::Descriptor;
use crate::opening::copied;
use crate::state::Guard;
use crate::sys;
use crate::tracer::At;
use crate::{hooks, real};
use ebb_trace_format::{Call, What};
use libc::{c_int, off_t};

hooks! {
    3 fcntl, fcntl64 => fcntl;
    3 lockf, lockf64 => lockf;
    2 flock => flock;
}

/// The bytes of a lock, as the kernel counts them.
fn range(fd: c_int, whence: c_int, start: off_t, len: off_t) -> Option<(u64, u64)> {
    let base = match whence {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => sys::position(fd)?,
        _ => sys::facts_of(fd)?.size,
    };
    let start = base.checked_add_signed(start)?;
    match len {
        0 => Some((start, u64::MAX)),
        1.. => Some((start, start.saturating_add(len as u64))),
        _ => Some((start.saturating_add_signed(len), start)),
    }
}

/// A lock is about to be given up.
fn releasing(at: At, fd: c_int, range: Option<(u64, u64)>) {
    if let Some(mut tracer) = Guard::take()
        && let Some(file) = tracer.regular(at, fd)
        && let Some((start, end)) = range
    {
        tracer.record(at, What::Unlock { file, start, end });
    }
}

/// A lock was granted. `of_process` says that the process has it, not the descriptor.
fn granted(at: At, fd: c_int, range: Option<(u64, u64)>, exclusive: bool, of_process: bool) {
    let Some(mut tracer) = Guard::take() else { return };
    let Descriptor::Regular { file, appends, .. } = tracer.descriptor(at, fd) else { return };
    let Some((start, end)) = range else { return };
    tracer.record(at, What::Lock { file, start, end, exclusive });
    if of_process {
        tracer.known(file).has_locks = true;
    } else {
        tracer.descriptors.set(fd, Descriptor::Regular { file, appends, is_locked: true });
    }
}

unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize, from: usize) -> c_int {
    let at = At::now(Call::Fcntl, from);
    let work = real!(fcntl64 as fn(c_int, c_int, usize) -> c_int);
    let of_process = matches!(command, libc::F_SETLK | libc::F_SETLKW);
    if of_process || matches!(command, libc::F_OFD_SETLK | libc::F_OFD_SETLKW) {
        // SAFETY: these commands come with this structure.
        let lock = unsafe { (argument as *const libc::flock).as_ref() };
        let bytes = lock.and_then(|l| range(fd, l.l_whence.into(), l.l_start, l.l_len));
        let kind = lock.map_or(-1, |l| c_int::from(l.l_type));
        if kind == c_int::from(libc::F_UNLCK as i16) {
            releasing(at, fd, bytes);
            return unsafe { work(fd, command, argument) };
        }
        let result = unsafe { work(fd, command, argument) };
        if result == 0 {
            granted(at, fd, bytes, kind == c_int::from(libc::F_WRLCK as i16), of_process);
        }
        return result;
    }
    let result = unsafe { work(fd, command, argument) };
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copied(at, fd, result),
        // Whether it appends may have changed.
        libc::F_SETFL => {
            if let Some(mut tracer) = Guard::take()
                && let Descriptor::Regular { file, is_locked, .. } = tracer.descriptor(at, fd)
            {
                let appends = argument as c_int & libc::O_APPEND != 0;
                tracer.descriptors.set(fd, Descriptor::Regular { file, appends, is_locked });
            }
        }
        _ => {}
    }
    result
}

unsafe extern "C" fn lockf(fd: c_int, command: c_int, len: off_t, from: usize) -> c_int {
    let at = At::now(Call::Lockf, from);
    let work = real!(lockf64 as fn(c_int, c_int, off_t) -> c_int);
    let bytes = range(fd, libc::SEEK_CUR, 0, len);
    if command == libc::F_ULOCK {
        releasing(at, fd, bytes);
    }
    let result = unsafe { work(fd, command, len) };
    if result == 0 && matches!(command, libc::F_LOCK | libc::F_TLOCK) {
        granted(at, fd, bytes, true, true);
    }
    result
}

unsafe extern "C" fn flock(fd: c_int, operation: c_int, from: usize) -> c_int {
    let at = At::now(Call::Flock, from);
    let all = Some((0, u64::MAX));
    let wanted = operation & !libc::LOCK_NB;
    if wanted == libc::LOCK_UN {
        releasing(at, fd, all);
    }
    let result = unsafe { real!(flock as fn(c_int, c_int) -> c_int)(fd, operation) };
    if result == 0 && wanted != libc::LOCK_UN {
        granted(at, fd, all, wanted == libc::LOCK_EX, false);
    }
    result
}
