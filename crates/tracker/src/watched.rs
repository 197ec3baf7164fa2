//! A file whose writes are told of.

use crate::hooks::Kind;
use crate::program::{KEY_WORDS, VALUE_WORDS, Value};
use crate::ring::Event;
use crate::tracker::{Inner, Writers};
use ebb_locks::Mutex;
use rangemap::RangeSet;
use rustix::fs::{SeekFrom, fstat, major, minor};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// What was written since the last drain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// These bytes, and no others: in order, neighbours as one.
    pub ranges: Vec<Range<u64>>,
}

/// Something was written since the last drain, and not all of it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// How that came.
    pub why: Why,
    /// Of these bytes it is known that they were written; in order.
    pub known: Vec<Range<u64>>,
}

/// Why writes are not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The ring was full.
    RingFull,
    /// There were more ranges than are kept.
    TooManyRanges,
    /// The file was written with O_DIRECT: from now on it always says this, because such a write
    /// may be under way.
    Direct,
    /// The file is or was mapped, so that stores need not be told of: from now on it always says this.
    Mapped,
    /// The kernel left a program out, or an event did not come to an end.
    Missed,
    /// The kernel does not answer.
    Kernel,
}

impl Why {
    /// It will be the same with every drain.
    #[must_use]
    pub fn lasts(self) -> bool {
        matches!(self, Why::Direct | Why::Mapped)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::RingFull => "the ring of events was full",
            Why::TooManyRanges => "too many ranges were written",
            Why::Direct => "it was written with O_DIRECT",
            Why::Mapped => "it was mapped",
            Why::Missed => "the kernel missed events",
            Why::Kernel => "the kernel does not tell",
        })
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "what was written is not known: {}", self.why)
    }
}

impl std::error::Error for Lost {}

/// What was read from the ring of a file and not asked for yet.
#[derive(Default)]
pub(crate) struct Pending {
    pub ino: u64,
    /// Ranges that came in order, with gaps between them: that of most files.
    ordered: Vec<Range<u64>>,
    /// The others.
    others: RangeSet<u64>,
    /// The last range: most writes go on where the one before ended.
    last: Range<u64>,
    events: u64,
    overflow: bool,
}

/// What was taken of it.
struct Taken {
    ranges: Vec<Range<u64>>,
    events: u64,
    overflow: bool,
}

impl Pending {
    pub fn new(ino: u64) -> Pending {
        Pending { ino, ..Pending::default() }
    }

    pub fn add(&mut self, event: Event, ranges_max: usize) {
        self.events += 1;
        let end = event.offset.saturating_add(event.len);
        if event.offset == self.last.end && !self.last.is_empty() {
            self.last.end = end;
            return;
        }
        self.put_last();
        self.last = event.offset..end;
        if self.ordered.len() + self.others.len() >= ranges_max {
            self.overflow = true;
            self.ordered.clear();
            self.others.clear();
        }
    }

    fn put_last(&mut self) {
        let last = std::mem::take(&mut self.last);
        if last.is_empty() {
            return;
        }
        match self.ordered.last() {
            Some(before) if last.start <= before.end => self.others.insert(last),
            _ => self.ordered.push(last),
        }
    }

    /// What there is; nothing is left.
    pub fn take(&mut self) -> Pending {
        self.put_last();
        std::mem::replace(self, Pending::new(self.ino))
    }

    fn taken(mut self) -> Taken {
        let ranges = match self.others.is_empty() {
            true => self.ordered,
            false => {
                self.others.extend(self.ordered);
                self.others.into_iter().collect()
            }
        };
        Taken { ranges, events: self.events, overflow: self.overflow }
    }
}

/// Writes of a file are told of as long as this lives.
pub struct Watched {
    tracker: Arc<Inner>,
    file: File,
    key: [u64; KEY_WORDS],
    tag: u64,
    seen: Mutex<Seen>,
}

/// Where counters were when they were asked for last.
#[derive(Default)]
struct Seen {
    lost: u64,
    holes: u64,
    events: u64,
}

impl Watched {
    pub(crate) fn start(tracker: Arc<Inner>, file: &File, writers: Writers) -> io::Result<Watched> {
        // An inode that is open keeps its number.
        let file = file.try_clone()?;
        let stat = fstat(&file)?;
        let device = u64::from(major(stat.st_dev)) << 20 | u64::from(minor(stat.st_dev));
        let key = [stat.st_ino, device];
        let seen = Seen { holes: tracker.holes(), ..Seen::default() };
        let tag = tracker.register(&key, writers)?;
        Ok(Watched { tracker, file, key, tag, seen: Mutex::new(seen) })
    }

    /// Everything that was written since the last call by writes that had returned before this one,
    /// perhaps also by some that were under way; these have ended then. A write of which the file's
    /// times told before the call is among them.
    pub fn drain(&self) -> Result<Written, Lost> {
        let mut seen = self.seen.lock();
        // Times change before a write is told of.
        let begun_have_ended = self.settle().is_ok();
        self.ask();
        let (pending, holes) = self.tracker.take(self.tag);
        let pending = pending.taken();
        // Counters after the ring: a write that had no room in it has been counted by now.
        let counters = self.tracker.counters(&self.key);
        seen.events += pending.events;
        let ranges = pending.ranges;
        let settled = begun_have_ended && (ranges.is_empty() || self.settle().is_ok());
        let why = match &counters {
            Err(_) => Some(Why::Kernel),
            Ok(now) if lasting(now).is_some() => lasting(now),
            Ok(now) if now[Value::Lost as usize] != seen.lost => Some(Why::RingFull),
            Ok(_) if pending.overflow => Some(Why::TooManyRanges),
            Ok(_) if holes != seen.holes => Some(Why::Missed),
            Ok(_) => (!settled).then_some(Why::Kernel),
        };
        seen.holes = holes;
        if let Ok(now) = counters {
            seen.lost = now[Value::Lost as usize];
        }
        match why {
            None => Ok(Written { ranges }),
            Some(why) => Err(Lost { why, known: ranges }),
        }
    }

    /// Events of this file so far, as of the last drain.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.seen.lock().events
    }

    /// The number of the process that wrote last, as the kernel has it.
    pub(crate) fn last_writer(&self) -> io::Result<u64> {
        Ok(self.tracker.counters(&self.key)?[Value::Writer as usize])
    }

    /// True when the next drain will be an error whatever was written.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.ask();
        self.tracker.counters(&self.key).map_or(true, |now| lasting(&now).is_some())
    }

    /// Makes the kernel look whether anybody has the file mapped. A mapping that is gone has left a
    /// page fault if it was written through; one that is there may have its fault still to be
    /// counted.
    fn ask(&self) {
        // Nobody locks it; to unlock it passes the tracepoint all the same.
        let _ = rustix::fs::flock(&self.file, rustix::fs::FlockOperation::Unlock);
    }

    /// Waits for a write that is under way: both file systems tell of it while they hold the inode's
    /// lock for writing, before its bytes or the file's size can be read. Each has a call that
    /// changes nothing and takes that lock for reading.
    fn settle(&self) -> io::Result<()> {
        match self.tracker.kind {
            // Past every end: there is nothing to look for under the lock.
            Kind::Ext4 => match rustix::fs::seek(&self.file, SeekFrom::Data(i64::MAX as u64)) {
                Ok(_) | Err(rustix::io::Errno::NXIO) => Ok(()),
                Err(e) => Err(e.into()),
            },
            Kind::Xfs => self.file.read_at(&mut [0], 0).map(drop),
        }
    }
}

/// What the kernel counts of a file and never takes back.
fn lasting(counters: &[u64; VALUE_WORDS]) -> Option<Why> {
    let counted = |what: Value| counters[what as usize] > 0;
    counted(Value::Direct)
        .then_some(Why::Direct)
        .or_else(|| counted(Value::Mapped).then_some(Why::Mapped))
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.tracker.unregister(&self.key, self.tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(offset: u64, len: u64) -> Event {
        Event { tag: 1, ino: 7, offset, len }
    }

    #[test]
    fn writes_in_a_row_are_one_range() {
        let mut pending = Pending::new(7);
        (0..100).for_each(|i| pending.add(event(10 * i, 10), 4));
        pending.add(event(2000, 5), 4);
        let taken = pending.take().taken();
        assert_eq!(taken.ranges, [0..1000, 2000..2005]);
        assert_eq!(taken.events, 101);
        assert!(pending.take().taken().ranges.is_empty());
    }

    #[test]
    fn ranges_come_in_order_whatever_the_order_of_writes() {
        let mut pending = Pending::new(7);
        for (offset, len) in [(40, 5), (60, 10), (10, 10), (65, 10), (20, 5), (90, 1), (80, 5)] {
            pending.add(event(offset, len), 100);
        }
        assert_eq!(pending.take().taken().ranges, [10..25, 40..45, 60..75, 80..85, 90..91]);
    }

    #[test]
    fn too_many_ranges_are_told_of() {
        let mut pending = Pending::new(7);
        (0..4).for_each(|i| pending.add(event(10 * i, 1), 4));
        assert!(!pending.overflow);
        (4..20).for_each(|i| pending.add(event(10 * i, 1), 4));
        let taken = pending.take().taken();
        assert!(taken.overflow && taken.ranges.len() <= 5);
        assert!(!pending.take().taken().overflow, "told of once");
    }
}
