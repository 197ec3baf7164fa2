//! What a node's cache file holds of one file: extents with their state, kept with the indexes
//! and counters that make attach, flush and status cheap however many extents there are. No
//! rules: those are in [`crate::view`].

use super::bytes;
use crate::tree::same_span;
use ebb_types::{ByteRange, Version};
use rangemap::{RangeMap, RangeSet};

/// The state of bytes that are in the cache file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Local {
    /// Written, not attached.
    Dirty,
    /// Written; an attach of them is under way.
    Attaching,
    /// Attached by this node.
    Owned {
        /// The version of the part that was attached first.
        first: Version,
        /// The version of the part that was attached last.
        last: Version,
        /// The backing has them.
        flushed: bool,
    },
    /// Fetched, or owned once and given back: others have them too.
    Clean,
}

/// The classes that are indexed and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Dirty,
    Attaching,
    Unflushed,
    Flushed,
    Clean,
}

impl Local {
    pub(crate) fn class(self) -> Class {
        match self {
            Local::Dirty => Class::Dirty,
            Local::Attaching => Class::Attaching,
            Local::Owned { flushed: false, .. } => Class::Unflushed,
            Local::Owned { flushed: true, .. } => Class::Flushed,
            Local::Clean => Class::Clean,
        }
    }
}

/// Extents, and per class an index and a number of bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct LocalMap {
    extents: RangeMap<u64, Local>,
    sets: [RangeSet<u64>; 5],
    bytes: [u64; 5],
}

impl LocalMap {
    /// Number of extents.
    pub(crate) fn len(&self) -> usize {
        self.extents.len()
    }

    pub(crate) fn bytes(&self, class: Class) -> u64 {
        self.bytes[class as usize]
    }

    /// One past the last byte of that class; 0 when there is none.
    pub(crate) fn end_of(&self, class: Class) -> u64 {
        self.sets[class as usize].last().map_or(0, |r| r.end)
    }

    /// The extents that meet `range`, clipped to it.
    pub(crate) fn overlapping(
        &self,
        range: ByteRange,
    ) -> impl Iterator<Item = (ByteRange, Local)> + '_ {
        let some = (!range.is_empty()).then(|| self.extents.overlapping(range.to_std()));
        some.into_iter().flatten().map(move |(r, l)| (bytes(r).intersect(range), *l))
    }

    /// The ranges of that class that meet `range`, clipped to it.
    pub(crate) fn of_class(&self, class: Class, range: ByteRange) -> Vec<ByteRange> {
        if range.is_empty() || self.bytes(class) == 0 {
            return Vec::new();
        }
        let found = self.sets[class as usize].overlapping(range.to_std());
        found.map(|r| bytes(r).intersect(range)).collect()
    }

    /// The parts of `range` that are not in the cache file.
    pub(crate) fn gaps(&self, range: ByteRange) -> Vec<ByteRange> {
        if range.is_empty() {
            return Vec::new();
        }
        self.extents.gaps(&range.to_std()).map(|r| bytes(&r)).collect()
    }

    /// True when every byte of `range` is in the cache file.
    pub(crate) fn has_all(&self, range: ByteRange) -> bool {
        range.is_empty() || self.extents.gaps(&range.to_std()).next().is_none()
    }

    /// The extent that holds `offset`.
    pub(crate) fn at(&self, offset: u64) -> Option<ByteRange> {
        self.extents.get_key_value(&offset).map(|(r, _)| bytes(r))
    }

    /// The first byte at or after `offset` that is in the cache file.
    pub(crate) fn next_from(&self, offset: u64) -> Option<u64> {
        let first = self.overlapping(ByteRange::from(offset)).next();
        first.map(|(r, _)| r.start())
    }

    /// The bytes of `range` are now in that state; `None`: no longer in the cache file.
    pub(crate) fn set(&mut self, range: ByteRange, state: Option<Local>) {
        if range.is_empty() {
            return;
        }
        let old: Vec<(ByteRange, Local)> = self.overlapping(range).collect();
        for (r, l) in old {
            self.bytes[l.class() as usize] -= r.len();
            if state.is_none_or(|s| s.class() != l.class()) {
                self.sets[l.class() as usize].remove(r.to_std());
            }
        }
        match state {
            None => self.extents.remove(range.to_std()),
            Some(state) => {
                self.bytes[state.class() as usize] += range.len();
                self.sets[state.class() as usize].insert(range.to_std());
                self.extents.insert(range.to_std(), state);
            }
        }
    }

    /// Joins the owned extents of one class on either side of `at` when they lie in one merge
    /// span; the joined one remembers both its oldest and its newest version.
    pub(crate) fn merge_owned_at(&mut self, at: u64) {
        let Some(before) = at.checked_sub(1) else { return };
        let (Some((lr, l)), Some((rr, r))) =
            (self.extents.get_key_value(&before), self.extents.get_key_value(&at))
        else {
            return;
        };
        let (left, right) = (bytes(lr), bytes(rr));
        if left == right || !same_span(left, right) {
            return;
        }
        if let Some(joined) = join(*l, *r) {
            self.extents.insert(left.start()..right.end(), joined);
        }
    }

    /// Joins every pair of neighbouring unflushed owned extents that lies in one span and does
    /// not meet `busy`.
    pub(crate) fn compact(&mut self, busy: &[ByteRange]) {
        let free = |r: ByteRange| !busy.iter().any(|b| b.overlaps(r));
        let mut joined: Vec<(ByteRange, Local)> = Vec::new();
        for (range, state) in self.extents.iter() {
            let range = bytes(range);
            if let Some((last, old)) = joined.last_mut()
                && last.end() == range.start()
                && same_span(*last, range)
                && free(*last)
                && free(range)
                && let Some(both) = join(*old, *state)
            {
                *last = ByteRange::new(last.start(), range.end());
                *old = both;
                continue;
            }
            joined.push((range, *state));
        }
        self.extents = joined.into_iter().map(|(r, l)| (r.to_std(), l)).collect();
    }
}

fn join(left: Local, right: Local) -> Option<Local> {
    match (left, right) {
        (
            Local::Owned { first: f1, last: l1, flushed: a },
            Local::Owned { first: f2, last: l2, flushed: b },
        ) if a == b => Some(Local::Owned { first: f1.min(f2), last: l1.max(l2), flushed: a }),
        _ => None,
    }
}
