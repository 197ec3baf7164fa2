//! What this library does itself, as system calls: the C library's functions of these names are ours.

use libc::{c_int, c_long, off_t};
use std::ffi::CStr;

/// What is asked of a file.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub is_regular: bool,
    pub ino: u64,
    pub dev: u64,
    /// When it was made, in nanoseconds since 1970; 0 where that is not known.
    pub born: u64,
    pub size: u64,
}

/// Nanoseconds of the clock that does not jump.
pub fn now() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

pub fn clock(which: libc::clockid_t) -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes the structure.
    unsafe { libc::clock_gettime(which, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

pub fn position(fd: c_int) -> Option<u64> {
    // SAFETY: no memory.
    let at = unsafe { libc::syscall(libc::SYS_lseek, fd, 0, libc::SEEK_CUR) };
    u64::try_from(at).ok()
}

pub fn facts(dir: c_int, path: &CStr, flags: c_int) -> Option<Facts> {
    // SAFETY: all zeros is a value of this structure of numbers.
    let mut x: libc::statx = unsafe { std::mem::zeroed() };
    let mask = libc::STATX_TYPE | libc::STATX_INO | libc::STATX_SIZE | libc::STATX_BTIME;
    // SAFETY: a path that ends, a structure that is written.
    let done =
        unsafe { libc::syscall(libc::SYS_statx, dir, path.as_ptr(), flags, mask, &raw mut x) };
    if done != 0 {
        return None;
    }
    let has_born = x.stx_mask & libc::STATX_BTIME != 0;
    let born = x.stx_btime.tv_sec as u64 * 1_000_000_000 + u64::from(x.stx_btime.tv_nsec);
    Some(Facts {
        is_regular: u32::from(x.stx_mode) & libc::S_IFMT == libc::S_IFREG,
        ino: x.stx_ino,
        dev: (u64::from(x.stx_dev_major) << 32) | u64::from(x.stx_dev_minor),
        born: if has_born { born } else { 0 },
        size: x.stx_size,
    })
}

pub fn facts_of(fd: c_int) -> Option<Facts> {
    facts(fd, c"", libc::AT_EMPTY_PATH)
}

/// The path of a descriptor, as the kernel says it.
pub fn path_of(fd: c_int) -> Vec<u8> {
    let mut link = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
    let mut digits = fd.unsigned_abs();
    let len = 1 + digits.checked_ilog10().unwrap_or(0) as usize;
    for i in (0..len).rev() {
        link[14 + i] = b'0' + (digits % 10) as u8;
        digits /= 10;
    }
    let mut path = vec![0u8; ebb_trace_format::PATH_MAX];
    // SAFETY: a path that ends in zeros, and as many bytes as are said.
    let got = unsafe {
        libc::syscall(
            libc::SYS_readlinkat,
            libc::AT_FDCWD,
            link.as_ptr(),
            path.as_mut_ptr(),
            path.len(),
        )
    };
    path.truncate(usize::try_from(got).unwrap_or(0));
    path
}

pub fn open(path: &CStr, flags: c_int) -> Option<c_int> {
    let flags = flags | libc::O_CLOEXEC;
    // SAFETY: a path that ends.
    let fd =
        unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o644) };
    c_int::try_from(fd).ok().filter(|fd| *fd >= 0)
}

pub fn close(fd: c_int) {
    // SAFETY: no memory; the descriptor is ours.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

pub fn write_at(fd: c_int, bytes: &[u8], at: u64) -> bool {
    // SAFETY: as many bytes as are said.
    let n = unsafe { libc::syscall(libc::SYS_pwrite64, fd, bytes.as_ptr(), bytes.len(), at) };
    usize::try_from(n) == Ok(bytes.len())
}

pub fn truncate(path: &CStr, len: u64) {
    // SAFETY: a path that ends.
    unsafe { libc::syscall(libc::SYS_truncate, path.as_ptr(), len) };
}

/// Makes room, so that writing into a mapping cannot fail.
pub fn reserve(fd: c_int, at: u64, len: usize) -> bool {
    // SAFETY: no memory.
    if unsafe { libc::syscall(libc::SYS_fallocate, fd, 0, at as off_t, len as off_t) } == 0 {
        return true;
    }
    const ZEROS: [u8; 4096] = [0; 4096];
    (0..len as u64).step_by(ZEROS.len()).all(|n| write_at(fd, &ZEROS, at + n))
}

pub fn map(fd: c_int, at: u64, len: usize) -> Option<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS } else { libc::MAP_SHARED };
    // SAFETY: a new mapping at a place of the kernel's choice.
    let got = unsafe { libc::syscall(libc::SYS_mmap, 0, len, protection, flags, fd, at) };
    (!(-4095..=0).contains(&got)).then_some(got as *mut u8)
}

/// # Safety
/// Nobody uses the mapping any more.
pub unsafe fn unmap(at: *mut u8, len: usize) {
    // SAFETY: see above.
    unsafe { libc::syscall(libc::SYS_munmap, at, len) };
}

pub fn wipe_on_fork(page: *mut u8, len: usize) -> bool {
    const MADV_WIPEONFORK: c_long = 18;
    // SAFETY: the mapping is ours.
    unsafe { libc::syscall(libc::SYS_madvise, page, len, MADV_WIPEONFORK) == 0 }
}

pub fn pid() -> u32 {
    // SAFETY: no memory.
    unsafe { libc::syscall(libc::SYS_getpid) as u32 }
}

pub fn parent() -> u32 {
    // SAFETY: no memory.
    unsafe { libc::syscall(libc::SYS_getppid) as u32 }
}

pub fn status_flags(fd: c_int) -> c_int {
    // SAFETY: no memory.
    unsafe { libc::syscall(libc::SYS_fcntl, fd, libc::F_GETFL) as c_int }
}
