//! Which services were on this state, and what each of them can have told.
//!
//! Every service that begins on a state writes so into it, with a random number of its own
//! ([`Start::instance`]), how many records there were before ([`Start::at`]), and from where on it
//! gives out inode numbers. A node remembers who spoke to it last, and how many records that one
//! had on stable storage. From that any later service sees whether its own state has all of it: it does
//! when the instance is in its lineage and the next one began with no fewer records. A state that was
//! lost has no such instance; an older copy that was put back has the instance and fewer records, or
//! has gone on with another one. What a power loss takes was not on stable storage, so it does not count.
//!
//! Inode numbers are given out by each start from a place of its own that follows from the clock, so that
//! a service on an older copy does not give out what was given out already. And so a number says by
//! which start it was made, and whether this state remembers that ([`Lineage::has_made`]): what it made
//! and does not have any more was deleted; of what it does not remember nothing is known.

use ebb_types::Ino;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

/// Starts that are remembered. A node that was last told by an older one is told to go.
const STARTS_MAX: usize = 4096;

/// Numbers of inodes have so many bits; those above are kept free.
const INO_BITS: u32 = 62;
/// Below these bits of an inode number stands when its start was.
const START_BITS: u32 = 32;
/// Seconds since 1970 from which starts are counted (2026), which makes 34 years.
pub const EPOCH: u64 = 1_767_225_600;

/// One service on this state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Told apart from all others by chance.
    pub instance: u64,
    /// So many records were journalled before.
    pub at: u64,
    /// Inode numbers below this one, and from the start before on, are given out or unused: as
    /// far as the records before tell.
    pub used: Ino,
    /// It gives out numbers from here on.
    pub first: Ino,
}

impl Start {
    /// Which of all starts it is: greater for those that come later, whatever state they are on.
    #[must_use]
    pub fn block(&self) -> u64 {
        self.first.0 >> START_BITS
    }
}

/// See the head of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lineage {
    starts: VecDeque<Start>,
    journalled: u64,
}

impl Lineage {
    /// So many records lie behind this state.
    #[must_use]
    pub fn journalled(&self) -> u64 {
        self.journalled
    }

    /// One more.
    pub fn note_record(&mut self) {
        self.journalled = self.journalled.wrapping_add(1);
    }

    /// A snapshot ends; its own records are not counted.
    pub fn restore(&mut self, records: u64) {
        // The record in which this stands is counted after it.
        self.journalled = records.wrapping_sub(1);
    }

    /// The services so far.
    pub fn starts(&self) -> impl DoubleEndedIterator<Item = &Start> {
        self.starts.iter()
    }

    /// Another one.
    pub fn begin(&mut self, start: Start) {
        self.starts.push_back(start);
        if self.starts.len() > STARTS_MAX {
            self.starts.pop_front();
        }
    }

    /// How many of the records of that instance are in this state: all that it will ever have, when it
    /// is the last one. `None`: it never was on this state.
    #[must_use]
    pub fn kept_of(&self, instance: u64) -> Option<u64> {
        let at = self.starts.iter().rposition(|s| s.instance == instance)?;
        Some(self.starts.get(at + 1).map_or(u64::MAX, |next| next.at))
    }

    /// True when this state remembers that the number was given out. `next` is the one that is given
    /// out next.
    #[must_use]
    pub fn has_made(&self, ino: Ino, next: Ino) -> bool {
        let after = self.starts.partition_point(|s| s.first <= ino);
        let used = self.starts.get(after).map_or(next, |s| s.used);
        ino < used && after > 0
    }
}

/// From where on a start gives out numbers: behind all that are known, and where the clock says, so
/// that no two starts share any, whatever the state is. `salt` keeps jobs of one directory apart.
#[must_use]
pub fn first_ino(next: Ino, now: SystemTime, salt: u64) -> Ino {
    let seconds = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let by_clock = seconds.saturating_sub(EPOCH).max(1);
    let block = by_clock.max((next.0 >> START_BITS) + 1);
    let highest = (1 << (INO_BITS - START_BITS)) - 1;
    // Half of the numbers below are left, for two thousand million files.
    let low = salt & ((1 << (START_BITS - 1)) - 1);
    Ino((block.min(highest) << START_BITS | low).max(next.0))
}

/// For the clock a start waits no longer.
pub const CLOCK_WAIT: Duration = Duration::from_secs(3);

/// A start that goes on after `next` comes before each that is counted `ahead` of its clock from now on, once so much
/// time has passed.
#[must_use]
pub fn early_by(next: Ino, now: SystemTime, ahead: Duration) -> Duration {
    let block = (next.0 >> START_BITS) + 1;
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Duration::from_secs(block + 1 + EPOCH).saturating_sub(ahead).saturating_sub(since)
}

/// From then on a start is another one, as the clock says.
#[must_use]
pub fn until_the_next(now: SystemTime) -> Duration {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Duration::from_secs(since.as_secs() + 1).saturating_sub(since)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(instance: u64, at: u64, used: u64, first: u64) -> Start {
        Start { instance, at, used: Ino(used), first: Ino(first) }
    }

    #[test]
    fn a_state_knows_what_each_service_on_it_can_have_told() {
        let mut lineage = Lineage::default();
        assert_eq!(lineage.kept_of(7), None, "a state of nobody");
        lineage.begin(start(7, 0, 2, 100));
        assert_eq!(lineage.kept_of(7), Some(u64::MAX), "it is still there");
        let copy = lineage.clone();
        lineage.begin(start(8, 50, 120, 200));
        assert_eq!((lineage.kept_of(7), lineage.kept_of(8)), (Some(50), Some(u64::MAX)));
        // An older copy that another service has gone on with.
        let mut other = copy;
        other.begin(start(9, 20, 110, 300));
        assert_eq!((other.kept_of(7), other.kept_of(8)), (Some(20), None));
    }

    #[test]
    fn only_numbers_that_a_start_is_known_to_have_given_out_count_as_made() {
        let mut lineage = Lineage::default();
        assert!(!lineage.has_made(Ino(5), Ino(10)), "before lineages were noted");
        lineage.begin(start(1, 0, 2, 100));
        assert!(lineage.has_made(Ino(100), Ino(103)) && lineage.has_made(Ino(102), Ino(103)));
        assert!(!lineage.has_made(Ino(103), Ino(103)), "not given out yet");
        // The power went: what was given out from 103 on is forgotten.
        lineage.begin(start(2, 9, 103, 200));
        assert!(lineage.has_made(Ino(102), Ino(201)) && lineage.has_made(Ino(200), Ino(201)));
        for forgotten in [103, 199, 201, 99] {
            assert!(!lineage.has_made(Ino(forgotten), Ino(201)), "{forgotten}");
        }
    }

    #[test]
    fn no_two_starts_give_out_the_same_numbers_not_even_on_an_older_state() {
        let at = |s| SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH + s);
        let first = first_ino(Ino(2), at(1000), 77);
        let second = first_ino(Ino(first.0 + 5), at(2000), 77);
        assert!(second.0 - first.0 > 1 << START_BITS);
        // The first one's state is put back; its next number is as it was then.
        let again = first_ino(Ino(first.0 + 3), at(3000), 77);
        assert!(again.0 - second.0 > 1 << START_BITS);
        // At once, with a clock that went back, and one that never was right.
        for now in [at(2000), at(3), SystemTime::UNIX_EPOCH] {
            assert!(first_ino(Ino(second.0 + 9), now, u64::MAX).0 > second.0 + 9);
        }
        let late = first_ino(Ino(2), at(u64::from(u32::MAX)), u64::MAX);
        assert!(late.0 < 1 << INO_BITS, "{late}");
    }

    /// A state that is rebuilt has nothing but the clock, and what was before it may have been rebuilt, too, and gone on
    /// from its state again and again.
    #[test]
    fn who_goes_by_the_clock_alone_comes_after_all_that_were_before() {
        let ahead = Duration::from_secs(10);
        let mut dice = 12345_u64;
        let mut random = move |n: u64| {
            dice = dice
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % n
        };
        let mut now = SystemTime::UNIX_EPOCH + Duration::from_millis(1000 * EPOCH + 123_456);
        let (mut last, mut rebuilt) = (first_ino(Ino(2), now, 0), 0);
        for _ in 0..2000 {
            now += Duration::from_millis(random(300));
            let first = match random(4) {
                0 => {
                    rebuilt += 1;
                    let first = first_ino(Ino(2), now + ahead, random(1 << 31));
                    now += until_the_next(now);
                    first
                }
                _ => {
                    let early = early_by(last, now, ahead);
                    assert!(early <= CLOCK_WAIT, "{early:?}");
                    now += early;
                    first_ino(last, now, random(1 << 31))
                }
            };
            assert!(first.0 >> START_BITS > last.0 >> START_BITS, "{first} after {last}");
            last = Ino(first.0 + random(1000));
        }
        assert!(rebuilt > 300);
        assert_eq!(early_by(Ino(2), now, ahead), Duration::ZERO, "a state as they mostly are");
    }

    #[test]
    fn the_number_of_starts_is_bounded() {
        let mut lineage = Lineage::default();
        for n in 0..STARTS_MAX as u64 + 5 {
            lineage.begin(start(n, n, n, n));
        }
        assert_eq!(lineage.starts().count(), STARTS_MAX);
        assert_eq!((lineage.kept_of(4), lineage.kept_of(5)), (None, Some(6)));
    }
}
