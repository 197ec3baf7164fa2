//! When unowned bytes of a file changed, byte by byte: what tells a node that comes back whether
//! what it wrote and never published was overtaken by somebody meanwhile. (Readers do with one
//! version for all unowned bytes; a false alarm costs them a fetch, and here it would cost bytes.)
//! Exact but for bytes that were flushed beside later ones of the same owner: those share the newest
//! version within a span ([`crate::tree`]).

use ebb_types::{ByteRange, Version};
use rangemap::RangeMap;
use serde::{Deserialize, Serialize};

/// More intervals than this are not kept: all bytes then count as changed with the newest.
const INTERVALS_MAX: usize = 1 << 16;

/// The version of the last change of every unowned byte. Of owned ones it is an older one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BaseChanges {
    /// Of bytes without an interval.
    floor: Version,
    newer: RangeMap<u64, Version>,
}

/// The stored form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredChanges {
    floor: Version,
    newer: Vec<(ByteRange, Version)>,
}

impl BaseChanges {
    pub fn new(floor: Version) -> BaseChanges {
        BaseChanges { floor, newer: RangeMap::new() }
    }

    /// These bytes changed at this version.
    pub fn mark(&mut self, range: ByteRange, version: Version) {
        if !range.is_empty() {
            self.newer.insert(range.to_std(), version);
        }
        if self.newer.len() > INTERVALS_MAX {
            let newest = self.newer.iter().map(|(_, v)| *v).max();
            *self = BaseChanges::new(newest.map_or(self.floor, |v| v.max(self.floor)));
        }
    }

    /// What changed after this version, sorted and disjoint.
    pub fn after(&self, known: Version) -> Vec<ByteRange> {
        self.after_within(known, ByteRange::ALL)
    }

    /// What of `within` did, and perhaps more beside it.
    pub fn after_within(&self, known: Version, within: ByteRange) -> Vec<ByteRange> {
        if self.floor > known {
            return vec![ByteRange::ALL];
        }
        if within.is_empty() {
            return Vec::new();
        }
        let mut out: Vec<ByteRange> = Vec::new();
        let near = self.newer.overlapping(within.to_std());
        for (range, _) in near.filter(|(_, v)| **v > known) {
            match out.last_mut() {
                Some(last) if last.end() == range.start => {
                    *last = ByteRange::new(last.start(), range.end);
                }
                _ => out.push(ByteRange::new(range.start, range.end)),
            }
        }
        out
    }

    /// The stored form; `None` when it says no more than the floor does.
    pub fn stored(&self, floor: Version) -> Option<StoredChanges> {
        let newer = self.newer.iter().map(|(r, v)| (ByteRange::new(r.start, r.end), *v)).collect();
        (*self != BaseChanges::new(floor)).then_some(StoredChanges { floor: self.floor, newer })
    }
}

impl BaseChanges {
    /// `range`, cut by when its bytes changed last.
    pub fn segments(&self, range: ByteRange) -> Vec<(ByteRange, Version)> {
        if range.is_empty() {
            return Vec::new();
        }
        let outer = range.to_std();
        let mut out: Vec<_> =
            self.newer.gaps(&outer).map(|r| (ByteRange::new(r.start, r.end), self.floor)).collect();
        let newer = self.newer.overlapping(&outer);
        out.extend(newer.map(|(r, v)| (ByteRange::new(r.start, r.end).intersect(range), *v)));
        out
    }
}

/// Bytes whose last publication was a guess ([`crate::claim`]): whether their node wrote there nobody
/// knows. With each the version at which it had changed last before that. A node that comes
/// back with bytes that it wrote there and never published has not been overtaken for certain: what
/// is there now tells, a zero or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Guesses(RangeMap<u64, Version>);

/// The stored form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredGuesses(Vec<(ByteRange, Version)>);

impl Guesses {
    /// Unowned bytes are claimed, which changed last as `changes` says.
    pub fn note(&mut self, range: ByteRange, changes: &BaseChanges) {
        for (part, version) in changes.segments(range) {
            self.0.insert(part.to_std(), version);
        }
        self.bound();
    }

    /// Somebody wrote there, or cut it off.
    pub fn forget(&mut self, range: ByteRange) {
        if !range.is_empty() && !self.0.is_empty() {
            self.0.remove(range.to_std());
            self.bound();
        }
    }

    /// What is not known counts as written by name.
    fn bound(&mut self) {
        if self.0.len() > INTERVALS_MAX {
            self.0.clear();
        }
    }

    /// What has changed after this version by a guess alone.
    pub fn after(&self, known: Version) -> Vec<ByteRange> {
        let mut out: Vec<ByteRange> = Vec::new();
        for (range, _) in self.0.iter().filter(|(_, v)| **v <= known) {
            match out.last_mut() {
                Some(last) if last.end() == range.start => {
                    *last = ByteRange::new(last.start(), range.end);
                }
                _ => out.push(ByteRange::new(range.start, range.end)),
            }
        }
        out
    }

    /// The stored form; `None` when there is nothing to store.
    pub fn stored(&self) -> Option<StoredGuesses> {
        let all = self.0.iter().map(|(r, v)| (ByteRange::new(r.start, r.end), *v));
        (!self.0.is_empty()).then(|| StoredGuesses(all.collect()))
    }
}

impl From<&StoredGuesses> for Guesses {
    fn from(stored: &StoredGuesses) -> Guesses {
        // A range that was read need not have gone through its constructors.
        let sound = stored.0.iter().filter(|(r, _)| r.start() < r.end());
        Guesses(sound.map(|(r, v)| (r.start()..r.end(), *v)).collect())
    }
}

impl From<&StoredChanges> for BaseChanges {
    fn from(stored: &StoredChanges) -> BaseChanges {
        let mut changes = BaseChanges::new(stored.floor);
        // A range that was read need not have gone through its constructors.
        let sound = stored.newer.iter().filter(|(r, _)| r.start() < r.end());
        sound.for_each(|(range, version)| changes.mark(*range, *version));
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_intervals_become_one_that_forgets_no_change() {
        let mut changes = BaseChanges::new(Version(1));
        let last = INTERVALS_MAX as u64;
        for i in 0..=last {
            assert!(changes.newer.len() <= INTERVALS_MAX);
            changes.mark(ByteRange::at(i * 10, 1), Version(2 + i % 7));
        }
        assert!(changes.newer.is_empty());
        assert_eq!(changes.after(Version(7)), [ByteRange::ALL]);
        assert!(changes.after(Version(8)).is_empty());
    }
}
