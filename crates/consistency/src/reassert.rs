//! Telling a service again what it has forgotten. Part of [`FileState`].
//!
//! A power loss takes the end of the service's journal. What it said in that time nodes know: each
//! of its own bytes, and of the rest what it was last told. The service that comes after begins with
//! [`FileState::leap`] on every file: numbers of versions that may have been given out are not given
//! out again, so each number below the leap and above what is left ([`Leap::from`]) is of the time that
//! was lost. Then every node tells what it knows from that time ([`Assertion`]), and each byte becomes
//! what the latest word says of it.
//!
//! # The latest word
//!
//! A [`Claimed::Known`] says who had a byte as of a version. What the state says itself is as of the
//! version of its last change, or of the end of what is left. The later one stands, so the order in which nodes
//! speak does not matter, nothing is undone by telling it twice, and what was changed since the leap
//! is later than every word from before it.
//!
//! Of its own bytes a node knows more than anybody: what it has and whether it was flushed
//! ([`Claimed::Own`]), and what it has given back, which is all that it does not name
//! ([`Assertion::complete`]).
//!
//! One thing is not known: a node's own bytes that were published at several times, and lie side by side,
//! share the newest version. Where another node has published over the older of them in the time that was
//! lost, without a word between the two, they count as published with the newer.

use super::FileState;
use ebb_types::{ByteRange, NodeId, Version};
use rangemap::{RangeMap, RangeSet};
use serde::{Deserialize, Serialize};

/// What a node tells of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Claimed {
    /// They are its own, published at this version; the backing has them too, or not.
    Own(Version, bool),
    /// It has written them again. Who has the published ones stays as it is.
    Keep,
    /// They had last changed at `version`, as of `as_of`.
    Known {
        /// Whose they are then.
        node: NodeId,
        /// When they had changed, or later.
        version: Version,
        /// When that was true.
        as_of: Version,
    },
}

/// What a node knows of a part of a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Assertion {
    /// The size, and the version of which it is true.
    pub size: (u64, Version),
    /// The same of the length of what the backing has.
    pub base_len: (u64, Version),
    /// The part.
    pub covers: ByteRange,
    /// Sorted and disjoint, inside of it.
    pub claims: Vec<(ByteRange, Claimed)>,
    /// The node has no other byte there of those that count as its own.
    pub complete: bool,
}

/// A jump of the versions, and what was told again since.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Leap {
    /// What is left ends here.
    from: Version,
    size_as_of: Version,
    base_len_as_of: Version,
    /// Since then the backing was given bytes up to here,
    given: u64,
    /// the file was made at least so long,
    grown: u64,
    /// and cut to this.
    cut: u64,
    told: Vec<(ByteRange, Told)>,
    /// Which nodes have told all that is theirs, and of which part.
    complete: Vec<(NodeId, ByteRange)>,
}

/// As of when a byte is known by a word of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Told {
    as_of: Version,
    /// By the word of who owns it.
    own: bool,
}

impl Leap {
    fn is_complete(&mut self, node: NodeId, range: ByteRange) {
        match self.complete.iter_mut().rev().find(|(by, _)| *by == node) {
            Some((_, part)) if part.contains(range) => {}
            Some((_, part)) if part.end() == range.start() => {
                *part = ByteRange::new(part.start(), range.end());
            }
            _ => self.complete.push((node, range)),
        }
    }

    /// The parts of `range`, and whether the node has told all that is its own there.
    fn heard(&self, node: NodeId, range: ByteRange) -> Vec<(ByteRange, bool)> {
        let mut heard: RangeMap<u64, bool> = RangeMap::new();
        heard.insert(range.to_std(), false);
        for (_, part) in self.complete.iter().filter(|(by, _)| *by == node) {
            let part = part.intersect(range);
            if !part.is_empty() {
                heard.insert(part.to_std(), true);
            }
        }
        heard.iter().map(|(r, heard)| (ByteRange::new(r.start, r.end), *heard)).collect()
    }
}

/// A part of the file in one state.
#[derive(Clone, Copy, Debug)]
struct Part {
    range: ByteRange,
    node: NodeId,
    version: Version,
    told: Told,
}

impl Claimed {
    /// The newest version that it speaks of.
    fn newest(self) -> Version {
        match self {
            Claimed::Own(version, _) => version,
            Claimed::Keep => Version::ZERO,
            Claimed::Known { version, as_of, .. } => version.max(as_of),
        }
    }
}

impl Assertion {
    /// The other nodes that it names as owners; one may come several times.
    pub fn owners(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.claims.iter().filter_map(|(_, claim)| match claim {
            Claimed::Known { node, .. } => Some(*node).filter(|node| *node != NodeId::NOBODY),
            Claimed::Own(..) | Claimed::Keep => None,
        })
    }

    /// The newest version before `floor` that it speaks of.
    fn newest(&self, floor: Version) -> Version {
        let claims = self.claims.iter().map(|(_, claim)| claim.newest());
        let all = claims.chain([self.size.1, self.base_len.1]);
        all.filter(|version| *version < floor).fold(Version::ZERO, Version::max)
    }
}

impl FileState {
    /// The next version is at least `to`, whatever was given out by a service whose last words are
    /// lost. Until [`FileState::end_leap`] nodes can tell those again.
    pub fn leap(&mut self, to: Version) {
        self.floor = self.floor.max(to);
        let from = self.version;
        self.leap.get_or_insert_with(|| {
            Box::new(Leap {
                from,
                size_as_of: from,
                base_len_as_of: from,
                given: 0,
                grown: 0,
                cut: u64::MAX,
                told: Vec::new(),
                complete: Vec::new(),
            })
        });
    }

    /// Everybody has told.
    pub fn end_leap(&mut self) {
        self.leap = None;
    }

    /// What is left of the file ends at this version, and nodes may know more; `None`: nothing
    /// is missing.
    #[must_use]
    pub fn leapt_from(&self) -> Option<Version> {
        self.leap.as_ref().map(|leap| leap.from)
    }

    /// What is to be stored beside the state itself: from where on versions are given out, and the
    /// leap.
    #[must_use]
    pub fn stored_leap(&self) -> Option<(Version, Option<Leap>)> {
        let some = self.floor != Version::ZERO;
        some.then(|| (self.floor, self.leap.as_deref().cloned()))
    }

    /// Brings that back.
    pub fn restore_leap(&mut self, (floor, leap): (Version, Option<Leap>)) {
        (self.floor, self.leap) = (floor, leap.map(Box::new));
    }

    /// `teller` tells what it knows from the time that was lost. Words that speak of versions from
    /// after the leap are no such words and change nothing.
    pub fn reassert(&mut self, teller: NodeId, assertion: &Assertion) {
        let floor = self.floor;
        let Some(leap) = self.leap.as_deref_mut() else { return };
        let mut told: RangeMap<u64, Told> =
            std::mem::take(&mut leap.told).into_iter().map(|(r, t)| (r.to_std(), t)).collect();
        self.version = self.version.max(assertion.newest(floor));
        let (base_len, as_of) = assertion.base_len;
        if as_of > leap.base_len_as_of && as_of < floor {
            self.base_len = base_len.min(leap.cut).max(leap.given);
            leap.base_len_as_of = as_of;
        }
        let (size, as_of) = assertion.size;
        if as_of > leap.size_as_of && as_of < floor {
            leap.size_as_of = as_of;
            let later = self.tree.iter().filter(|o| o.version > as_of);
            self.size = later.map(|o| o.range.end()).fold(size.max(leap.grown), u64::max);
        }
        let since = (leap.from, leap.size_as_of);
        for (range, claim) in assertion.claims.iter().filter(|(_, c)| c.newest() < floor) {
            let range = range.intersect(assertion.covers);
            for (range, claim) in self.as_its_owner_says(teller, range, *claim) {
                self.take_word(teller, range, claim, since, &mut told);
            }
        }
        if assertion.complete {
            self.take_back_unnamed(teller, assertion);
        }
        self.base_len = self.base_len.min(self.size);
        if let Some(leap) = &mut self.leap {
            leap.told = told.iter().map(|(r, t)| (ByteRange::new(r.start, r.end), *t)).collect();
        }
    }

    /// The backing has bytes up to here.
    pub(super) fn base_reaches(&mut self, end: u64) {
        self.base_len = self.base_len.max(end);
        self.leap.iter_mut().for_each(|leap| leap.given = leap.given.max(end));
    }

    /// The size is set to `len`: older words of it are old.
    pub(super) fn sized(&mut self, len: u64, version: Version) {
        if let Some(leap) = &mut self.leap {
            leap.size_as_of = version;
            (leap.cut, leap.given) = (leap.cut.min(len), leap.given.min(len));
        }
    }

    /// The file is at least so long.
    pub(super) fn grown(&mut self, len: u64) {
        self.leap.iter_mut().for_each(|leap| leap.grown = leap.grown.max(len));
    }

    /// All of it was changed on the backing: older words of that are old.
    pub(super) fn base_is_of(&mut self, version: Version) {
        if let Some(leap) = &mut self.leap {
            (leap.size_as_of, leap.base_len_as_of) = (version, version);
        }
    }

    /// What another node has given back, and has said so, is nobody's.
    fn as_its_owner_says(
        &self,
        teller: NodeId,
        range: ByteRange,
        claim: Claimed,
    ) -> Vec<(ByteRange, Claimed)> {
        let (Some(leap), Claimed::Known { node, version, as_of }) = (&self.leap, claim) else {
            return vec![(range, claim)];
        };
        if range.is_empty() || node == teller || node == NodeId::NOBODY {
            return vec![(range, claim)];
        }
        let mut out = Vec::new();
        for (part, heard) in leap.heard(node, range) {
            if !heard {
                out.push((part, claim));
                continue;
            }
            let mut at = part.start();
            let gap = |start, end, out: &mut Vec<_>| {
                let gap = ByteRange::new(start, end);
                let claim = Claimed::Known { node: NodeId::NOBODY, version, as_of };
                out.extend((!gap.is_empty()).then_some((gap, claim)));
            };
            for own in self.tree.overlapping(part).filter(|o| o.node == node) {
                gap(at, own.range.start(), &mut out);
                out.push((own.range, claim));
                at = own.range.end();
            }
            gap(at, part.end(), &mut out);
        }
        out
    }

    fn take_word(
        &mut self,
        teller: NodeId,
        range: ByteRange,
        claim: Claimed,
        (from, size_as_of): (Version, Version),
        told: &mut RangeMap<u64, Told>,
    ) {
        let (node, version, as_of, own) = match claim {
            Claimed::Own(version, flushed) => (teller, version, version, Some(flushed)),
            Claimed::Known { node, version, as_of } => (node, version, as_of, None),
            Claimed::Keep => return,
        };
        for part in self.parts(range, from, told) {
            let same = part.node == node && node != NodeId::NOBODY;
            let takes = match own {
                // Of what is its own nobody knows more, unless it has changed since.
                Some(_) if same => part.version < self.floor,
                _ if same && part.told.own => false,
                _ => as_of > part.told.as_of,
            };
            let now = Told { as_of: as_of.max(part.told.as_of), ..part.told };
            if !takes {
                if now != part.told {
                    told.insert(part.range.to_std(), now);
                }
                continue;
            }
            told.insert(part.range.to_std(), Told { own: own.is_some(), ..now });
            match node {
                NodeId::NOBODY => self.give_up(part.range, version),
                _ => {
                    let flushed = own.unwrap_or(false);
                    self.tree.insert(super::Owned { range: part.range, node, version, flushed });
                    if flushed {
                        self.base_reaches(part.range.end());
                    }
                    if version > size_as_of {
                        self.size = self.size.max(part.range.end());
                    }
                }
            }
        }
    }

    /// `range` by who has it and when that was told: whole, in order.
    fn parts(&self, range: ByteRange, from: Version, told: &RangeMap<u64, Told>) -> Vec<Part> {
        let mut parts = Vec::new();
        let unowned = |gap: ByteRange, parts: &mut Vec<(ByteRange, NodeId, Version)>| {
            let segments = self.changes.segments(gap);
            parts.extend(segments.into_iter().map(|(r, v)| (r, NodeId::NOBODY, v)));
        };
        let mut at = range.start();
        for owned in self.tree.overlapping(range) {
            unowned(ByteRange::new(at, owned.range.start()), &mut parts);
            parts.push((owned.range, owned.node, owned.version));
            at = owned.range.end();
        }
        unowned(ByteRange::new(at, range.end()), &mut parts);
        let mut out = Vec::with_capacity(parts.len());
        for (range, node, version) in parts {
            let mut add = |start: u64, end: u64, word: Option<&Told>| {
                let range = ByteRange::new(start, end);
                let by_itself = Told { as_of: version.max(from), own: false };
                let told = word.filter(|w| w.as_of >= version).copied().unwrap_or(by_itself);
                out.extend((!range.is_empty()).then_some(Part { range, node, version, told }));
            };
            let mut at = range.start();
            for (word, told) in told.overlapping(range.to_std()) {
                let word = ByteRange::new(word.start, word.end).intersect(range);
                add(at, word.start(), None);
                add(word.start(), word.end(), Some(told));
                at = word.end();
            }
            add(at, range.end(), None);
        }
        out
    }

    /// What counts as the teller's and is not named is the backing's.
    fn take_back_unnamed(&mut self, teller: NodeId, assertion: &Assertion) {
        let its = |claim: &Claimed| match claim {
            Claimed::Own(..) | Claimed::Keep => true,
            Claimed::Known { node, .. } => *node == teller,
        };
        let named = assertion.claims.iter().filter(|(_, claim)| its(claim));
        let named: RangeSet<u64> =
            named.filter(|(r, _)| !r.is_empty()).map(|(r, _)| r.to_std()).collect();
        let floor = self.floor;
        let own = |o: &super::Owned| o.node == teller && o.version < floor;
        let pieces: Vec<_> = self.tree.overlapping(assertion.covers).filter(own).collect();
        self.leap.iter_mut().for_each(|leap| leap.is_complete(teller, assertion.covers));
        for piece in pieces {
            for gap in named.gaps(&piece.range.to_std()) {
                self.give_up(ByteRange::new(gap.start, gap.end), piece.version);
                self.base_reaches(gap.end);
            }
        }
    }

    fn give_up(&mut self, range: ByteRange, version: Version) {
        self.tree.remove(range);
        self.changes.mark(range, version);
        self.base_version = self.base_version.max(version);
    }
}

#[cfg(test)]
#[path = "reassert_tests.rs"]
mod tests;
