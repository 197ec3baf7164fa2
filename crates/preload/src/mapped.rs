//! Mappings: which bytes a program touches through one is not seen. A shared mapping reads all its
//! bytes when it is made, and one that is writable writes them all at msync, munmap and the end.

use crate::state::{self, Guard};
use crate::tracer::{At, Tracer};
use crate::{hooks, real};
use ebb_trace_format::{Act, Call, Event, What};
use libc::{c_int, c_void, off_t, size_t};

hooks! {
    3 msync => msync;
    2 munmap => munmap;
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    address: usize,
    len: usize,
    file: u32,
    offset: u64,
}

/// Those that are shared and writable.
#[derive(Debug, Default)]
pub struct Mappings {
    of: Vec<Mapping>,
}

impl Tracer {
    fn written(&mut self, at: At, address: usize, len: usize, is_sync: bool) {
        let end = address.saturating_add(len);
        for i in 0..self.mappings.of.len() {
            let m = self.mappings.of[i];
            let (from, to) = (m.address.max(address), (m.address + m.len).min(end));
            if from >= to {
                continue;
            }
            let start = m.offset + (from - m.address) as u64;
            self.access(at, m.file, Act::Write, start, start + (to - from) as u64);
            if is_sync {
                self.record(at, What::Sync { file: m.file, event: Event::Fsync });
            }
        }
    }

    /// What of the mappings is in a range of addresses is gone.
    fn unmapped(&mut self, address: usize, len: usize) {
        let end = address.saturating_add(len);
        let old = std::mem::take(&mut self.mappings.of);
        for m in old {
            let (m_end, keep) = (m.address + m.len, &mut self.mappings.of);
            if m.address < address.min(m_end) {
                keep.push(Mapping { len: address.min(m_end) - m.address, ..m });
            }
            if m_end > end.max(m.address) {
                let skip = end.max(m.address) - m.address;
                let offset = m.offset + skip as u64;
                keep.push(Mapping { address: m.address + skip, len: m.len - skip, offset, ..m });
            }
        }
    }

    /// The process ends.
    pub fn end_mappings(&mut self, at: At) {
        self.written(at, 0, usize::MAX, false);
        self.mappings.of.clear();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let work = real!(mmap64 as fn(*mut c_void, size_t, c_int, c_int, c_int, off_t) -> *mut c_void);
    let got = unsafe { work(address, len, protection, flags, fd, offset) };
    if fd < 0 || flags & libc::MAP_ANONYMOUS != 0 || got == libc::MAP_FAILED || !state::is_on() {
        return got;
    }
    let at = At::now(Call::Mmap, 0);
    if let Some(mut tracer) = Guard::take()
        && let Some(file) = tracer.regular(at, fd)
    {
        let offset = offset as u64;
        tracer.access(at, file, Act::Read, offset, offset.saturating_add(len as u64));
        if flags & libc::MAP_TYPE != libc::MAP_PRIVATE && protection & libc::PROT_WRITE != 0 {
            let address = got as usize;
            tracer.unmapped(address, len);
            tracer.mappings.of.push(Mapping { address, len, file, offset });
        }
    }
    got
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the same function.
    unsafe { mmap(address, len, protection, flags, fd, offset) }
}

unsafe extern "C" fn msync(address: *mut c_void, len: size_t, flags: c_int, from: usize) -> c_int {
    let at = At::now(Call::Msync, from);
    let result =
        unsafe { real!(msync as fn(*mut c_void, size_t, c_int) -> c_int)(address, len, flags) };
    if result == 0
        && let Some(mut tracer) = Guard::take()
    {
        tracer.written(at, address as usize, len, flags & libc::MS_SYNC != 0);
    }
    result
}

unsafe extern "C" fn munmap(address: *mut c_void, len: size_t, from: usize) -> c_int {
    if state::is_on()
        && let Some(mut tracer) = Guard::take()
        && !tracer.mappings.of.is_empty()
    {
        let at = At::now(Call::Munmap, from);
        tracer.written(at, address as usize, len, false);
        tracer.unmapped(address as usize, len);
    }
    unsafe { real!(munmap as fn(*mut c_void, size_t) -> c_int)(address, len) }
}
