//! What a node last learned from the service about one file: per byte the owner, the version of
//! its last change and as of when that is known. No local state: that is in [`crate::view`].

use super::bytes;
use crate::ownership::MapAnswer;
use ebb_types::{ByteRange, NodeId, Version};
use rangemap::RangeMap;

/// What is known of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fact {
    /// Its owner, or nobody.
    pub(crate) owner: NodeId,
    /// When it last changed, or later.
    pub(crate) version: Version,
    /// The state of the file that this is true of, or a newer one in which it was not changed.
    pub(crate) as_of: Version,
}

/// The part of an answer that says one thing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) range: ByteRange,
    pub(crate) owner: NodeId,
    pub(crate) version: Version,
    pub(crate) flushed: bool,
}

/// A number that the service tells with every answer, and the version it was true of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Told {
    /// The newest one told.
    pub(crate) value: u64,
    as_of: Version,
}

impl Told {
    /// As of which version.
    pub(crate) fn as_of(self) -> Version {
        self.as_of
    }

    pub(crate) fn update(&mut self, value: u64, as_of: Version) {
        if as_of >= self.as_of {
            *self = Told { value, as_of };
        }
    }
}

/// The map of one file. Facts are stored for every byte; an `as_of` older than `whole` means
/// `whole`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Known {
    facts: RangeMap<u64, Fact>,
    whole: Version,
    /// What is known as of an older version does not count: it must be asked for.
    must_see: Version,
    pub(crate) size: Told,
    pub(crate) base_len: Told,
}

impl Known {
    pub(crate) fn nothing() -> Known {
        let mut facts = RangeMap::new();
        let fact = Fact { owner: NodeId::NOBODY, version: Version::ZERO, as_of: Version::ZERO };
        facts.insert(ByteRange::ALL.to_std(), fact);
        let (size, base_len) = (Told::default(), Told::default());
        Known { facts, whole: Version::ZERO, must_see: Version::ZERO, size, base_len }
    }

    /// From now on nothing counts that is known as of an older version.
    pub(crate) fn require(&mut self, version: Version) {
        self.must_see = self.must_see.max(version);
    }

    /// What must be seen is at least this version.
    pub(crate) fn must_see(&self) -> Version {
        self.must_see
    }

    /// True when a fact known as of then counts.
    pub(crate) fn counts(&self, as_of: Version) -> bool {
        as_of >= self.must_see
    }

    /// True when every fact counts.
    pub(crate) fn is_current(&self) -> bool {
        self.counts(self.whole) || self.facts.iter().all(|(_, fact)| self.counts(fact.as_of))
    }

    /// The version of which every byte's owner is known.
    pub(crate) fn whole(&self) -> Version {
        self.whole
    }

    /// Every byte's owner is known as of `version`.
    pub(crate) fn set_whole(&mut self, version: Version) {
        self.whole = self.whole.max(version);
    }

    /// Number of facts kept.
    pub(crate) fn len(&self) -> usize {
        self.facts.len()
    }

    /// The facts about `range`, clipped to it, without gaps.
    pub(crate) fn facts(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, Fact)> + '_ {
        let some = (!range.is_empty()).then(|| self.facts.overlapping(range.to_std()));
        some.into_iter().flatten().map(move |(r, f)| {
            let as_of = f.as_of.max(self.whole);
            (bytes(r).intersect(range), Fact { as_of, ..*f })
        })
    }

    /// True when one fact that counts says exactly this of the whole segment, as of `whole` or later.
    pub(crate) fn says(&self, s: &Segment) -> bool {
        let found = self.facts.get_key_value(&s.range.start());
        found.is_some_and(|(r, f)| {
            let same = f.owner == s.owner && f.version == s.version;
            same && s.range.end() <= r.end && self.counts(f.as_of.max(self.whole))
        })
    }

    /// Learns a fact. Next to one that differs only in `as_of` the older `as_of` is taken for
    /// both: the byte has not changed between the two, so nothing is lost but detail. (But for one that
    /// does not count any more: with it this one would not, either.)
    pub(crate) fn learn(&mut self, range: ByteRange, mut fact: Fact) {
        if range.is_empty() {
            return;
        }
        let counts = |f: &Fact| self.counts(f.as_of.max(self.whole));
        let new = fact;
        let alike = |f: &Fact| {
            f.owner == new.owner && f.version == new.version && counts(f) == counts(&new)
        };
        let left = range.start().checked_sub(1).and_then(|at| self.facts.get_key_value(&at));
        let right = self.facts.get_key_value(&range.end());
        let mut join = range;
        for (r, f) in [left, right].into_iter().flatten().filter(|(_, f)| alike(f)) {
            join = ByteRange::new(join.start().min(r.start), join.end().max(r.end));
            fact.as_of = fact.as_of.min(f.as_of);
        }
        self.facts.insert(join.to_std(), fact);
    }

    /// The owned byte at or after `offset` that comes first.
    pub(crate) fn next_owned_from(&self, offset: u64) -> Option<u64> {
        let mut owned = self.facts(ByteRange::from(offset));
        owned.find(|(_, f)| f.owner != NodeId::NOBODY).map(|(r, _)| r.start())
    }

    /// The end of the owned fact that `offset` is in.
    pub(crate) fn owned_until(&self, offset: u64) -> Option<u64> {
        let found = self.facts.get_key_value(&offset);
        found.filter(|(_, f)| f.owner != NodeId::NOBODY).map(|(r, _)| r.end)
    }
}

/// Cuts an answer into segments that cover all it speaks of: its ranges and the unowned bytes
/// between them. What is out of order in a (remote) answer is left out.
pub(crate) fn segments(answer: &MapAnswer) -> Vec<Segment> {
    let unowned = |start, end| Segment {
        range: ByteRange::new(start, end),
        owner: NodeId::NOBODY,
        version: answer.base_version,
        flushed: false,
    };
    let mut out = Vec::with_capacity(answer.ranges.len() * 2 + 1);
    let mut at = answer.covers.start();
    for o in &answer.ranges {
        let range = o.range.intersect(answer.covers);
        if range.is_empty() || range.start() < at {
            continue;
        }
        if range.start() > at {
            out.push(unowned(at, range.start()));
        }
        out.push(Segment { range, owner: o.node, version: o.version, flushed: o.flushed });
        at = range.end();
    }
    if at < answer.covers.end() {
        out.push(unowned(at, answer.covers.end()));
    }
    out
}
