//! Which file a descriptor is of. What was opened where the tracer did not see it is looked up when it
//! is used first.

use crate::sys;
use crate::tracer::{At, Tracer};
use ebb_trace_format::{Event, What};

/// Descriptors above this number are looked up each time.
const KEPT: usize = 1 << 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Descriptor {
    /// Not met yet.
    #[default]
    Unknown,
    /// Not a file with bytes that stay.
    Other,
    /// A regular file.
    Regular {
        file: u32,
        appends: bool,
        /// A lock of the descriptor (flock) is held.
        is_locked: bool,
    },
}

#[derive(Debug, Default)]
pub struct Descriptors {
    of: Vec<Descriptor>,
}

impl Descriptors {
    fn get(&self, fd: i32) -> Descriptor {
        let index = usize::try_from(fd).unwrap_or(usize::MAX);
        self.of.get(index).copied().unwrap_or_default()
    }

    pub fn set(&mut self, fd: i32, to: Descriptor) {
        let Ok(index) = usize::try_from(fd) else { return };
        if index >= KEPT {
            return;
        }
        if index >= self.of.len() {
            self.of.resize(index + 1, Descriptor::Unknown);
        }
        self.of[index] = to;
    }
}

impl Tracer {
    /// What a descriptor is of.
    pub fn descriptor(&mut self, at: At, fd: i32) -> Descriptor {
        match self.descriptors.get(fd) {
            Descriptor::Unknown => self.look_up(at, fd),
            known => known,
        }
    }

    /// The regular file of a descriptor.
    pub fn regular(&mut self, at: At, fd: i32) -> Option<u32> {
        match self.descriptor(at, fd) {
            Descriptor::Regular { file, .. } => Some(file),
            _ => None,
        }
    }

    fn look_up(&mut self, at: At, fd: i32) -> Descriptor {
        if fd < 0 {
            return Descriptor::Other;
        }
        let found = match sys::facts_of(fd) {
            None => return Descriptor::Other,
            Some(facts) if facts.is_regular => match self.file(at, fd, &facts) {
                Some(file) => {
                    let appends = sys::status_flags(fd) & libc::O_APPEND != 0;
                    Descriptor::Regular { file, appends, is_locked: false }
                }
                None => Descriptor::Other,
            },
            Some(_) => Descriptor::Other,
        };
        self.descriptors.set(fd, found);
        found
    }

    /// A file was opened as `fd`; it had `old` bytes before it was cut, if it was.
    pub fn opened(&mut self, at: At, fd: i32, old: Option<u64>) {
        self.descriptors.set(fd, Descriptor::Unknown);
        let Some(file) = self.regular(at, fd) else { return };
        self.record(at, What::Sync { file, event: Event::Open });
        if let Some(old) = old {
            self.cut(at, file, old, 0);
        }
    }

    /// A descriptor is about to be closed, and with it the record locks of its file.
    pub fn closing(&mut self, at: At, fd: i32) {
        if let Descriptor::Regular { file, is_locked, .. } = self.descriptor(at, fd) {
            self.record(at, What::Sync { file, event: Event::Close });
            let has_locks = std::mem::take(&mut self.known(file).has_locks);
            if is_locked || has_locks {
                self.record(at, What::Unlock { file, start: 0, end: u64::MAX });
            }
        }
        self.descriptors.set(fd, Descriptor::Unknown);
    }

    /// All descriptors from `first` to `last` are about to be closed.
    pub fn closing_from(&mut self, at: At, first: u32, last: u32) {
        let known = self.descriptors.of.len() as u32;
        for fd in first..known.min(last.saturating_add(1)) {
            if self.descriptors.get(fd as i32) != Descriptor::Unknown {
                self.closing(at, fd as i32);
            }
        }
    }

    /// The process ends. Descriptors that it never used are of no interest.
    pub fn close_all(&mut self, at: At) {
        self.closing_from(at, 0, u32::MAX);
    }

    /// `new` is now a copy of `old`.
    pub fn copied(&mut self, at: At, old: i32, new: i32) {
        let is = self.descriptor(at, old);
        self.descriptors.set(new, is);
    }
}
