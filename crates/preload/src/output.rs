//! The trace file of this process: a window of it is mapped, and records go straight there, so that
//! they are in the file whatever ends the process. Memory is bounded by the window.

use crate::sys;
use ebb_trace_format::{BLOCK, Block, ENDING, HEAD, HEADER, Header, Record};
use std::ffi::CString;

/// Blocks of the first window: many processes are short.
const FIRST: usize = 1;
/// Blocks of the others.
const MORE: usize = 16;

#[derive(Debug)]
pub struct Output {
    path: CString,
    window: *mut u8,
    /// Blocks of the window, and which of them is written.
    blocks: usize,
    block: usize,
    used: usize,
    base: u64,
    /// Where the window begins in the file.
    at: u64,
}

impl Output {
    /// Makes the file of this process: the first free generation.
    pub fn create(dir: &[u8], mut header: Header) -> Option<Output> {
        for generation in 0..10_000 {
            header.generation = generation;
            let host = String::from_utf8_lossy(&header.host).replace('/', "_");
            let name = format!("/{host}-{}-{generation}.{ENDING}", header.pid);
            let path = CString::new([dir, name.as_bytes()].concat()).ok()?;
            let Some(fd) = sys::open(&path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL) else {
                // SAFETY: errno of this thread.
                match unsafe { *libc::__errno_location() } {
                    libc::EEXIST => continue,
                    _ => return None,
                }
            };
            let is_written = sys::write_at(fd, &header.encode(), 0);
            let window = is_written.then(|| room(fd, HEADER as u64, FIRST)).flatten();
            sys::close(fd);
            let window = window?;
            let at = HEADER as u64;
            let mut made = Output { path, window, blocks: FIRST, block: 0, used: 0, base: 0, at };
            made.begin(header.start);
            return Some(made);
        }
        None
    }

    /// Adds a record; false when there is no room on the disk.
    pub fn push(&mut self, record: &Record) -> bool {
        for _ in 0..2 {
            let (used, base) = (self.used, self.base);
            let mut block = Block::resume(self.bytes(), used, base);
            let is_in = block.push(record).is_ok();
            let (used, base) = block.state();
            if is_in {
                (self.used, self.base) = (used, base);
                return true;
            }
            block.seal();
            if !self.next(record.end) {
                return false;
            }
        }
        false
    }

    /// The process ends: what is not used of the file is given back.
    pub fn trim(&self) {
        sys::truncate(&self.path, self.at + (self.block * BLOCK + HEAD + self.used) as u64);
    }

    /// The child of a fork leaves its parent's file alone.
    pub fn leave(self) {
        // SAFETY: the window is dropped with its only owner.
        unsafe { sys::unmap(self.window, self.blocks * BLOCK) };
    }

    fn next(&mut self, now: u64) -> bool {
        self.block += 1;
        if self.block == self.blocks {
            let at = self.at + (self.blocks * BLOCK) as u64;
            let Some(fd) = sys::open(&self.path, libc::O_RDWR) else { return false };
            let window = room(fd, at, MORE);
            sys::close(fd);
            let Some(window) = window else { return false };
            // SAFETY: nothing refers to the old window but this structure.
            unsafe { sys::unmap(self.window, self.blocks * BLOCK) };
            (self.window, self.blocks, self.block, self.at) = (window, MORE, 0, at);
        }
        self.begin(now);
        true
    }

    fn begin(&mut self, now: u64) {
        (self.used, self.base) = Block::begin(self.bytes(), now).state();
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the window has so many blocks, is mapped writably and only this process writes there.
        unsafe { std::slice::from_raw_parts_mut(self.window.add(self.block * BLOCK), BLOCK) }
    }
}

fn room(fd: i32, at: u64, blocks: usize) -> Option<*mut u8> {
    let len = blocks * BLOCK;
    if !sys::reserve(fd, at, len) {
        return None;
    }
    sys::map(fd, at, len)
}
