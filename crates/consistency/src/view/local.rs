//! What a node's cache file holds of one file: extents with their state, kept apart by class, so
//! that attach, flush and status are cheap however many extents there are. No rules: those are in
//! [`crate::view`].

use crate::tree::same_span;
use ebb_types::{ByteRange, Extents, Version};

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

/// The classes that are kept apart and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Dirty,
    Attaching,
    Unflushed,
    Flushed,
    Clean,
}

const CLASSES: [Class; 5] =
    [Class::Dirty, Class::Attaching, Class::Unflushed, Class::Flushed, Class::Clean];

/// Oldest and newest version of the parts of an extent; of no meaning where nothing is owned.
type Versions = (Version, Version);

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

    fn versions(self) -> Versions {
        match self {
            Local::Owned { first, last, .. } => (first, last),
            _ => (Version::ZERO, Version::ZERO),
        }
    }

    fn new(class: Class, (first, last): Versions) -> Local {
        match class {
            Class::Dirty => Local::Dirty,
            Class::Attaching => Local::Attaching,
            Class::Unflushed => Local::Owned { first, last, flushed: false },
            Class::Flushed => Local::Owned { first, last, flushed: true },
            Class::Clean => Local::Clean,
        }
    }
}

/// The extents of every class, and how many bytes they have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct LocalMap {
    classes: [Extents<Versions>; CLASSES.len()],
    bytes: [u64; CLASSES.len()],
}

impl LocalMap {
    /// Number of extents.
    pub(crate) fn len(&self) -> usize {
        self.classes.iter().map(Extents::len).sum()
    }

    pub(crate) fn bytes(&self, class: Class) -> u64 {
        self.bytes[class as usize]
    }

    /// One past the last byte of that class; 0 when there is none.
    pub(crate) fn end_of(&self, class: Class) -> u64 {
        self.classes[class as usize].end()
    }

    /// The extents that meet `range`, clipped to it, in order.
    pub(crate) fn overlapping(
        &self,
        range: ByteRange,
    ) -> impl Iterator<Item = (ByteRange, Local)> + '_ {
        let some = CLASSES.iter().filter(|class| self.bytes(**class) > 0);
        let of = |class: Class| {
            let found = self.classes[class as usize].overlapping(range);
            found.map(move |(r, versions)| (r, Local::new(class, versions))).peekable()
        };
        let mut parts: Vec<_> = some.map(|class| of(*class)).collect();
        std::iter::from_fn(move || {
            let start = |found: Option<&(ByteRange, Local)>| found.map(|(r, _)| r.start());
            let with_more = parts.iter_mut().filter_map(|p| Some((start(p.peek())?, p)));
            with_more.min_by_key(|(start, _)| *start).and_then(|(_, part)| part.next())
        })
    }

    /// The ranges of that class that meet `range`, clipped to it, neighbours as one.
    pub(crate) fn of_class(&self, class: Class, range: ByteRange) -> Vec<ByteRange> {
        let mut ranges = Vec::new();
        for (found, _) in self.classes[class as usize].overlapping(range) {
            super::push_joined(&mut ranges, found);
        }
        ranges
    }

    /// Where the extent of some class begins that has `most` others of its class before it within
    /// `range`: the first such place.
    pub(crate) fn nth_from(&self, range: ByteRange, most: usize) -> Option<u64> {
        let nth = |class: &Extents<_>| class.overlapping(range).nth(most).map(|(r, _)| r.start());
        let many = self.classes.iter().filter(|class| class.len() > most);
        many.filter_map(nth).min()
    }

    /// The parts of `ranges` that are of that class.
    pub(crate) fn extents(&self, class: Class, ranges: &[ByteRange]) -> Vec<ByteRange> {
        self.classes[class as usize].within(ranges).into_iter().map(|(found, _)| found).collect()
    }

    /// The parts of `range` that are not in the cache file.
    pub(crate) fn gaps(&self, range: ByteRange) -> Vec<ByteRange> {
        let mut gaps = Vec::new();
        let mut at = range.start();
        let end = ByteRange::at(range.end(), 0);
        for next in self.overlapping(range).map(|(r, _)| r).chain([end]) {
            gaps.extend(Some(ByteRange::new(at, next.start())).filter(|gap| !gap.is_empty()));
            at = next.end();
        }
        gaps
    }

    /// The parts of many ranges that are not in the cache file, neighbours as one.
    pub(crate) fn gaps_in(&self, ranges: &[ByteRange]) -> Vec<ByteRange> {
        let first = ranges.iter().map(|range| range.start()).min().unwrap_or(0);
        let hull = ByteRange::new(first, ranges.iter().map(|r| r.end()).max().unwrap_or(0));
        let mut missing: Extents<()> = Extents::new();
        missing.assign(&ranges.iter().map(|range| (*range, Some(()))).collect::<Vec<_>>());
        for extents in self.classes.iter().filter(|extents| !extents.is_empty()) {
            let there: Vec<_> = extents.overlapping(hull).map(|(range, _)| (range, None)).collect();
            missing.assign(&there);
        }
        missing.iter().map(|(range, ())| range).collect()
    }

    /// True when every byte of `range` is in the cache file.
    pub(crate) fn has_all(&self, range: ByteRange) -> bool {
        let mut at = range.start();
        let mut follows = |next: ByteRange| std::mem::replace(&mut at, next.end()) == next.start();
        self.overlapping(range).all(|(next, _)| follows(next)) && at == range.end()
    }

    /// The extent that holds `offset`.
    pub(crate) fn at(&self, offset: u64) -> Option<ByteRange> {
        self.classes.iter().find_map(|extents| extents.get(offset)).map(|(range, _)| range)
    }

    /// The first byte at or after `offset` that is in the cache file.
    pub(crate) fn next_from(&self, offset: u64) -> Option<u64> {
        let first = self.overlapping(ByteRange::from(offset)).next();
        first.map(|(r, _)| r.start())
    }

    /// The bytes of `range` are now in that state; `None`: no longer in the cache file.
    pub(crate) fn set(&mut self, range: ByteRange, state: Option<Local>) {
        if state.is_some_and(|state| self.is(range, state)) {
            return;
        }
        for (extents, bytes) in self.classes.iter_mut().zip(&mut self.bytes) {
            *bytes -= extents.remove(range);
        }
        if let Some(state) = state {
            let class = state.class() as usize;
            self.classes[class].insert(range, state.versions());
            self.bytes[class] += range.len();
        }
    }

    /// The same for many ranges, which do not meet.
    pub(crate) fn set_all(&mut self, ranges: &[ByteRange], state: Local) {
        let all = |value| -> Vec<_> { ranges.iter().map(|range| (*range, value)).collect() };
        let gone = all(None);
        for (extents, bytes) in self.classes.iter_mut().zip(&mut self.bytes) {
            if *bytes > 0 {
                *bytes -= extents.assign(&gone);
            }
        }
        let class = state.class() as usize;
        self.classes[class].assign(&all(Some(state.versions())));
        self.bytes[class] += ranges.iter().map(|range| range.len()).sum::<u64>();
    }

    fn is(&self, range: ByteRange, state: Local) -> bool {
        let found = self.classes[state.class() as usize].get(range.start());
        found.is_some_and(|(extent, v)| extent.contains(range) && v == state.versions())
    }

    /// Joins the owned extents of one class on either side of `at` when they lie in one merge
    /// span; the joined one remembers both its oldest and its newest version.
    pub(crate) fn merge_owned_at(&mut self, at: u64) {
        for class in [Class::Unflushed, Class::Flushed] {
            self.classes[class as usize].join_at(at, both_in_span);
        }
    }

    /// Joins every pair of neighbouring unflushed owned extents that lies in one span and does
    /// not meet `busy`.
    pub(crate) fn compact(&mut self, busy: &[ByteRange]) {
        let free = |r: ByteRange| !busy.iter().any(|b| b.overlaps(r));
        for class in [Class::Unflushed, Class::Flushed] {
            self.classes[class as usize].join(|left, right| {
                let both = both_in_span(left, right)?;
                (free(left.0) && free(right.0)).then_some(both)
            });
        }
    }
}

/// The oldest and the newest version of two neighbours, when they lie in one merge span.
fn both_in_span(left: (ByteRange, Versions), right: (ByteRange, Versions)) -> Option<Versions> {
    let both = (left.1.0.min(right.1.0), left.1.1.max(right.1.1));
    same_span(left.0, right.0).then_some(both)
}
