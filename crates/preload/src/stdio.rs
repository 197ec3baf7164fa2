//! Streams of the C library. What they read and write inside the C library cannot be intercepted, so it
//! is told from where they stand before and after: of a stream that writes, where the kernel's position
//! is (what is still in its buffer is not in the file); of one that reads, where the program is.
//!
//! Calls that are not intercepted (fprintf, getline) show at the next one that is, at the latest before
//! anything that orders processes, when all streams are looked at.

use crate::opening::before_open;
use crate::state::Guard;
use crate::sys;
use crate::tracer::{At, Tracer};
use crate::{hooks, real};
use ebb_trace_format::{Act, Call};
use libc::{FILE, c_char, c_int, c_long, c_void, off_t, size_t};
use std::collections::HashMap;
use std::ffi::CStr;

unsafe extern "C" {
    fn __fwriting(stream: *mut FILE) -> c_int;
    fn ftrylockfile(stream: *mut FILE) -> c_int;
    fn funlockfile(stream: *mut FILE);
}

hooks! {
    2 fopen, fopen64 => fopen;
    2 fdopen => fdopen;
    3 freopen, freopen64 => freopen;
    1 fclose => fclose;
    1 fflush => fflush;
    4 fread, fread_unlocked => fread;
    4 fwrite, fwrite_unlocked => fwrite;
    3 fseek, fseeko, fseeko64 => fseek;
    1 rewind => rewind;
    2 fsetpos, fsetpos64 => fsetpos;
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    fd: c_int,
    appends: bool,
    /// Up to where it was told.
    told: u64,
}

#[derive(Debug, Default)]
pub struct Streams {
    of: HashMap<usize, Stream>,
}

impl Streams {
    /// The child shares the positions of its parent's streams; what they have done is told.
    pub fn in_child(&mut self) {
        for stream in self.of.values_mut() {
            stream.told = sys::position(stream.fd).unwrap_or(stream.told);
        }
    }
}

fn position_of(stream: *mut FILE) -> Option<u64> {
    // SAFETY: a stream that is open.
    u64::try_from(unsafe { libc::ftello(stream) }).ok()
}

impl Tracer {
    fn stream_opened(&mut self, at: At, stream: *mut FILE, appends: bool) -> Option<c_int> {
        // SAFETY: a stream that was just opened.
        let fd = unsafe { libc::fileno(stream) };
        let told = sys::position(fd)?;
        self.regular(at, fd)?;
        self.streams.of.insert(stream as usize, Stream { fd, appends, told });
        Some(fd)
    }

    /// Tells what a stream has done since it was looked at last; `reached` is how far the program
    /// wanted to read.
    fn settle(&mut self, at: At, stream: *mut FILE, reached: Option<u64>) {
        let Some(known) = self.streams.of.get(&(stream as usize)).copied() else { return };
        // Somebody else is using it: that call looks itself.
        // SAFETY: a stream that is open.
        if unsafe { ftrylockfile(stream) } != 0 {
            return;
        }
        // SAFETY: as above.
        let writes = unsafe { __fwriting(stream) } != 0;
        let now = if writes { sys::position(known.fd) } else { position_of(stream) };
        // SAFETY: as above.
        unsafe { funlockfile(stream) };
        let (Some(now), Some(file)) = (now, self.regular(at, known.fd)) else { return };
        let act = match (writes, known.appends) {
            (false, _) => Act::Read,
            (true, false) => Act::Write,
            (true, true) => Act::Append,
        };
        let end = if writes { now } else { reached.unwrap_or(now).max(now) };
        self.access(at, file, act, known.told, end);
        if let Some(known) = self.streams.of.get_mut(&(stream as usize)) {
            known.told = now;
        }
    }

    /// Before a stream may write: others may have appended since.
    fn before_write(&mut self, stream: *mut FILE) {
        if let Some(known) = self.streams.of.get_mut(&(stream as usize))
            && known.appends
            && let Some(facts) = sys::facts_of(known.fd)
        {
            known.told = facts.size;
        }
    }

    /// Before anything that orders processes.
    pub fn settle_streams(&mut self, call: Call) {
        if self.streams.of.is_empty() {
            return;
        }
        let is_end = call == Call::Exit;
        let at = At::now(if is_end { Call::Exit } else { Call::Stdio }, 0);
        let all: Vec<usize> = self.streams.of.keys().copied().collect();
        all.into_iter().for_each(|stream| self.settle(at, stream as *mut FILE, None));
    }

    /// The process ends in order: what is in the buffers is written now rather than a moment later.
    pub fn flush_streams(&mut self, at: At) {
        let all: Vec<usize> = self.streams.of.keys().copied().collect();
        for stream in all {
            let stream = stream as *mut FILE;
            // SAFETY: a stream that is open.
            if unsafe { ftrylockfile(stream) } != 0 {
                continue;
            }
            // SAFETY: as above.
            if unsafe { __fwriting(stream) } != 0 {
                self.before_write(stream);
                // SAFETY: as above.
                unsafe { real!(fflush as fn(*mut FILE) -> c_int)(stream) };
            }
            // SAFETY: as above.
            unsafe { funlockfile(stream) };
            self.settle(at, stream, None);
        }
    }
}

/// Mode "w" cuts, mode "a" appends.
fn mode_of(mode: *const c_char) -> (c_int, bool) {
    // SAFETY: the program's text.
    let first = unsafe { CStr::from_ptr(mode) }.to_bytes().first().copied();
    (if first == Some(b'w') { libc::O_TRUNC } else { 0 }, first == Some(b'a'))
}

unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char, from: usize) -> *mut FILE {
    let at = At::now(Call::Fopen, from);
    let (flags, appends) = mode_of(mode);
    let old = before_open(libc::AT_FDCWD, path, flags);
    let work = real!(fopen64 as fn(*const c_char, *const c_char) -> *mut FILE);
    let stream = unsafe { work(path, mode) };
    opened(at, stream, old, appends);
    stream
}

fn opened(at: At, stream: *mut FILE, old: Option<u64>, appends: bool) {
    if stream.is_null() {
        return;
    }
    if let Some(mut tracer) = Guard::take() {
        // SAFETY: a stream that was just opened.
        tracer.opened(at, unsafe { libc::fileno(stream) }, old);
        tracer.stream_opened(at, stream, appends);
    }
}

unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char, from: usize) -> *mut FILE {
    let at = At::now(Call::Fdopen, from);
    let stream = unsafe { real!(fdopen as fn(c_int, *const c_char) -> *mut FILE)(fd, mode) };
    if !stream.is_null()
        && let Some(mut tracer) = Guard::take()
    {
        tracer.stream_opened(at, stream, mode_of(mode).1);
    }
    stream
}

/// A stream is about to let its file go.
fn leaving(at: At, stream: *mut FILE) {
    if let Some(mut tracer) = Guard::take()
        && let Some(known) = tracer.streams.of.get(&(stream as usize)).copied()
    {
        // SAFETY: the program's stream.
        if unsafe { __fwriting(stream) } != 0 {
            tracer.before_write(stream);
            // SAFETY: as above.
            unsafe { real!(fflush as fn(*mut FILE) -> c_int)(stream) };
        }
        tracer.settle(at, stream, None);
        tracer.closing(at, known.fd);
        tracer.streams.of.remove(&(stream as usize));
    }
}

unsafe extern "C" fn freopen(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
    from: usize,
) -> *mut FILE {
    let at = At::now(Call::Freopen, from);
    let (flags, appends) = mode_of(mode);
    leaving(at, stream);
    let old = before_open(libc::AT_FDCWD, path, flags);
    let work = real!(freopen64 as fn(*const c_char, *const c_char, *mut FILE) -> *mut FILE);
    let stream = unsafe { work(path, mode, stream) };
    opened(at, stream, old, appends);
    stream
}

unsafe extern "C" fn fclose(stream: *mut FILE, from: usize) -> c_int {
    leaving(At::now(Call::Fclose, from), stream);
    unsafe { real!(fclose as fn(*mut FILE) -> c_int)(stream) }
}

unsafe extern "C" fn fflush(stream: *mut FILE, from: usize) -> c_int {
    let at = At::now(Call::Fflush, from);
    if let Some(mut tracer) = Guard::take() {
        tracer.before_write(stream);
    }
    let result = unsafe { real!(fflush as fn(*mut FILE) -> c_int)(stream) };
    if let Some(mut tracer) = Guard::take() {
        match stream.is_null() {
            true => tracer.settle_streams(Call::Fflush),
            false => tracer.settle(at, stream, None),
        }
    }
    result
}

unsafe extern "C" fn fread(
    to: *mut c_void,
    size: size_t,
    count: size_t,
    stream: *mut FILE,
    from: usize,
) -> size_t {
    let at = At::now(Call::Fread, from);
    let work = real!(fread as fn(*mut c_void, size_t, size_t, *mut FILE) -> size_t);
    let got = unsafe { work(to, size, count, stream) };
    if let Some(mut tracer) = Guard::take()
        && let Some(known) = tracer.streams.of.get(&(stream as usize))
    {
        let wanted = known.told.saturating_add(size.saturating_mul(count) as u64);
        tracer.settle(at, stream, (got < count).then_some(wanted));
    }
    got
}

unsafe extern "C" fn fwrite(
    of: *const c_void,
    size: size_t,
    count: size_t,
    stream: *mut FILE,
    from: usize,
) -> size_t {
    let at = At::now(Call::Fwrite, from);
    let work = real!(fwrite as fn(*const c_void, size_t, size_t, *mut FILE) -> size_t);
    if let Some(mut tracer) = Guard::take() {
        tracer.before_write(stream);
    }
    let put = unsafe { work(of, size, count, stream) };
    if let Some(mut tracer) = Guard::take() {
        tracer.settle(at, stream, None);
    }
    put
}

/// A stream is moved: what it has in its buffer is written first, as the call itself would.
fn moving<R>(call: Call, from: usize, stream: *mut FILE, work: impl FnOnce() -> R) -> R {
    let at = At::now(call, from);
    if let Some(mut tracer) = Guard::take()
        && tracer.streams.of.contains_key(&(stream as usize))
    {
        // SAFETY: the program's stream.
        if unsafe { __fwriting(stream) } != 0 {
            tracer.before_write(stream);
            // SAFETY: as above.
            unsafe { real!(fflush as fn(*mut FILE) -> c_int)(stream) };
        }
        tracer.settle(at, stream, None);
    }
    let result = work();
    if let Some(mut tracer) = Guard::take()
        && let Some(known) = tracer.streams.of.get_mut(&(stream as usize))
        && let Some(now) = position_of(stream)
    {
        known.told = now;
    }
    result
}

unsafe extern "C" fn fseek(stream: *mut FILE, to: c_long, whence: c_int, from: usize) -> c_int {
    let work = real!(fseek as fn(*mut FILE, c_long, c_int) -> c_int);
    moving(Call::Fseek, from, stream, || unsafe { work(stream, to, whence) })
}

unsafe extern "C" fn rewind(stream: *mut FILE, from: usize) {
    let work = real!(rewind as fn(*mut FILE) -> ());
    moving(Call::Fseek, from, stream, || unsafe { work(stream) });
}

unsafe extern "C" fn fsetpos(stream: *mut FILE, to: *const c_void, from: usize) -> c_int {
    let work = real!(fsetpos as fn(*mut FILE, *const c_void) -> c_int);
    moving(Call::Fseek, from, stream, || unsafe { work(stream, to) })
}

const _: () = assert!(size_of::<c_long>() == size_of::<off_t>(), "fseek and fseeko are one");
