//! The reader's end of the ring that the kernel's programs put events into.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The entry is being written.
const BUSY: u32 = 1 << 31;
/// The entry is void.
const VOID: u32 = 1 << 30;
const HEADER: u64 = 8;

/// How long an entry may stay busy. The kernel writes it in a microsecond, unless its processor is
/// taken away from it, as from a virtual machine.
const BUSY_MAX: Duration = Duration::from_millis(500);

/// Words of an event.
pub const EVENT_WORDS: usize = 4;

/// A write, as the program tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub tag: u64,
    pub ino: u64,
    pub offset: u64,
    pub len: u64,
}

/// An entry stayed busy for too long.
#[derive(Debug)]
pub struct Stuck;

/// A mapped ring. It has one reader: `read` wants it mutably.
pub struct Ring {
    consumer: Mapping,
    producer: Mapping,
    page: usize,
    bytes: u64,
}

impl Ring {
    /// Of `bytes`, a power of two.
    pub fn map(fd: &OwnedFd, bytes: u32) -> io::Result<Ring> {
        let page = rustix::param::page_size();
        let consumer = Mapping::new(fd, page, 0, libc::PROT_READ | libc::PROT_WRITE)?;
        // The data are there twice, one behind the other, so that no entry is torn.
        let producer = Mapping::new(fd, page + 2 * bytes as usize, page, libc::PROT_READ)?;
        Ok(Ring { consumer, producer, page, bytes: u64::from(bytes) })
    }

    /// Everything that was put in before the call.
    pub fn read(&mut self, mut take: impl FnMut(Event)) -> Result<(), Stuck> {
        let end = self.producer.word(0).load(Ordering::Acquire);
        let position = self.consumer.word(0);
        let mut at = position.load(Ordering::Relaxed);
        while at < end {
            let header = self.wait(at)?;
            let len = u64::from(header & !(BUSY | VOID));
            if header & VOID == 0 && len == (EVENT_WORDS * 8) as u64 {
                let word = |i: u64| self.data(at + HEADER + 8 * i).load(Ordering::Relaxed);
                take(Event { tag: word(0), ino: word(1), offset: word(2), len: word(3) });
            }
            at += (HEADER + len).next_multiple_of(8);
            position.store(at, Ordering::Release);
        }
        Ok(())
    }

    fn data(&self, at: u64) -> &AtomicU64 {
        self.producer.word(self.page + (at & (self.bytes - 1)) as usize)
    }

    fn wait(&self, at: u64) -> Result<u32, Stuck> {
        let half = std::ptr::from_ref(self.data(at)).cast::<AtomicU32>();
        // SAFETY: the lower half of a mapped, aligned word that lives as long as `self`.
        let header = unsafe { &*half };
        let began = Instant::now();
        loop {
            let value = header.load(Ordering::Acquire);
            if value & BUSY == 0 {
                return Ok(value);
            }
            if began.elapsed() > BUSY_MAX {
                return Err(Stuck);
            }
            std::thread::yield_now();
        }
    }
}

/// How much was put into a ring so far, for whoever only wants to know that.
pub struct Meter(Mapping);

impl Meter {
    pub fn map(fd: &OwnedFd) -> io::Result<Meter> {
        let page = rustix::param::page_size();
        Ok(Meter(Mapping::new(fd, page, page, libc::PROT_READ)?))
    }

    /// Bytes: it moves with every event.
    pub fn produced(&self) -> u64 {
        self.0.word(0).load(Ordering::Acquire)
    }
}

/// Shared memory of a descriptor.
struct Mapping {
    at: *mut libc::c_void,
    bytes: usize,
}

// SAFETY: the memory is only reached through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: &OwnedFd, bytes: usize, offset: usize, protection: i32) -> io::Result<Mapping> {
        let (flags, fd, offset) = (libc::MAP_SHARED, fd.as_raw_fd(), offset as libc::off_t);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, offset) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { at, bytes })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes, "inside the mapping");
        // SAFETY: inside the mapping and aligned; others change it only atomically.
        unsafe { &*self.at.byte_add(offset).cast::<AtomicU64>() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own, and no reference into it outlives it.
        unsafe { libc::munmap(self.at, self.bytes) };
    }
}
