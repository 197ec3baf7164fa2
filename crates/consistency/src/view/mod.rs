//! A node's side of one file: what its cache file holds, what the service last said, and from
//! where each byte is read. Pure: the caller does the RPCs, the I/O and the waiting.
//!
//! # How a caller uses it
//!
//! * **Write**: put the bytes into the cache file and call [`FileView::write`], while the view's lock is
//!   held over both. Without the lock that is not enough, also when called before and after: fetched bytes, or an
//!   early attach, flush and eviction can come in between, and the second call would claim bytes that are gone
//!   (the explorer's `WriteAnnouncedLate` and `WriteBesideLock`).
//! * **Attach**: send what [`FileView::take_unattached`] gives, then [`FileView::attached`] or
//!   [`FileView::attach_failed`]. A sync event that must publish is not done before every
//!   attach of these bytes that is under way was answered, also one that somebody else sent
//!   ([`FileView::has_unattached`] is still true until then). Attaches may overlap and be answered
//!   in any order.
//! * **Query**: ask with [`FileView::known_version`], then [`FileView::apply`]. Ask again at
//!   once when the answer left something doubtful (see below).
//! * **Read**: [`FileView::plan_read`], get each piece from where it says, then under the lock of
//!   the view [`FileView::fetched`] and fill exactly what that returns into the cache file. Where
//!   bytes became local meanwhile, the local ones are read. A peer that no longer has the bytes
//!   means that the map is out of date: query and plan again.
//! * **Flush**: get a grant for [`FileView::unflushed`], copy the granted ranges, end the grant,
//!   [`FileView::flushed`] with the granted ranges and versions. What was asked for and not granted
//!   was taken by others or is flushed already: query anew, with version zero as the known one.
//! * **Make room**: detach flushed ranges at the service, [`FileView::detached`] with its answer,
//!   [`FileView::drop_clean`]. Holes are punched into the cache file while the view's lock is
//!   held, for dropped bytes as for those in [`Changes`].
//! * **Truncate**: waits until no attach of the file is under way on this node, lets none begin, and
//!   ends with [`FileView::truncated`]. An attach that the service took after the cut would claim
//!   bytes beyond it that are gone here.
//!
//! # Versions
//!
//! Every fact about a byte is known *as of* some version. An answer older than that changes
//! nothing, so answers and attach replies may arrive in any order. Clean bytes have no version of
//! their own: they are good as of the same version as the fact about them; when a newer answer
//! says that they changed after it, they go (rule 3 of the architecture).
//!
//! # What must be seen
//!
//! A synchronisation event need not hear of the whole file: of one with many ranges the answer speaks of a
//! part, and tells the newest version. [`FileView::require`] says that from then on nothing counts that is
//! known as of an older version, neither facts about absent bytes nor clean or owned ones that are here:
//! [`FileView::plan_read`] says that they are unknown until an answer at least so new has spoken of them
//! (bytes attached later are sure by themselves, and written ones in any case). So a read asks about what it
//! reads, and the view is what it would be had all been asked for at once, or newer.
//!
//! Owned extents remember the oldest and the newest version of their parts. An answer from between
//! the two that shows another owner cannot be judged (which of our parts is older than it?) and
//! is reported as doubtful; the next query is newer than all of them and can be.

mod assertion;
mod claims;
mod flying;
mod known;
mod local;
mod primitives;
mod sums;

use crate::ownership::{Detached, MapAnswer};
use ebb_types::{ByteRange, NodeId, Version};
use flying::Flying;
use known::{Fact, Known, Segment, segments};
use local::{Class, Local, LocalMap};
pub use primitives::AttachedBook;
use rangemap::RangeSet;
use std::collections::BTreeMap;

/// Where bytes are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The cache file of this node.
    Local,
    /// The cache of their owner. When that is this node itself, the bytes should be here and are
    /// not: they are lost, and a read of them fails.
    Peer {
        /// The owner.
        node: NodeId,
        /// When it attached them, or later.
        version: Version,
    },
    /// The file on the backing; what it does not have there is zeros.
    Backing,
    /// Nowhere: they are zeros.
    Zero,
    /// They are in the cache file, and it is not known whether they are what must be seen: a query must
    /// come first.
    Unknown,
}

/// A part of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The bytes.
    pub range: ByteRange,
    /// Where they are.
    pub source: Source,
    /// The version that this is known as of, for [`FileView::fetched`]. Zero: nothing is known
    /// about these bytes, or nothing that counts: a query must come first. For local bytes it means nothing.
    pub as_of: Version,
}

/// What an answer took away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Bytes this node owned and another one took, or a truncate; no longer local.
    pub overtaken: Vec<ByteRange>,
    /// Clean bytes that changed elsewhere; no longer local.
    pub stale: Vec<ByteRange>,
    /// Own bytes that the answer is too old to judge: query again before relying on them. Never
    /// when the sync events of a file take turns.
    pub doubtful: Vec<ByteRange>,
}

/// Owned bytes that are not in the cache file as they should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Damaged {
    /// They are nowhere any more.
    pub lost: Vec<ByteRange>,
    /// The backing has them.
    pub flushed: Vec<ByteRange>,
}

/// A node's view of one file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileView {
    me: NodeId,
    local: LocalMap,
    flying: Flying,
    known: Known,
    /// Dirty bytes that may not have been written; see [`crate::claim`].
    guessed: RangeSet<u64>,
}

impl FileView {
    /// Nothing local, nothing known.
    #[must_use]
    pub fn new(me: NodeId) -> FileView {
        FileView {
            me,
            local: LocalMap::default(),
            flying: Flying::default(),
            known: Known::nothing(),
            guessed: RangeSet::new(),
        }
    }

    /// What a daemon that takes a cache over holds of a file, after the service's `answer`:
    /// `owned` are bytes that the answer shows as this node's, unflushed, at these versions or
    /// older ones; `dirty` were written and are not known to be attached. Both are in the cache
    /// file. Bytes that the answer shows as this node's and that are in neither are lost: reads
    /// of them say so ([`Source::Peer`] with this node).
    #[must_use]
    pub fn restored(
        me: NodeId,
        answer: &MapAnswer,
        owned: &[(ByteRange, Version)],
        dirty: &[ByteRange],
    ) -> FileView {
        let mut view = FileView::new(me);
        view.apply(answer);
        for (range, version) in owned {
            let state = Local::Owned { first: *version, last: *version, flushed: false };
            view.local.set(*range, Some(state));
        }
        dirty.iter().for_each(|range| view.local.set(*range, Some(Local::Dirty)));
        view
    }

    /// The version for which the whole map is known; zero when there is none.
    #[must_use]
    pub fn known_version(&self) -> Version {
        self.known.whole()
    }

    /// The newest version of which anything was heard, own attaches included: what changed up to it
    /// has not overtaken what is written now. [`FileView::known_version`] may stay behind for
    /// long: this node's own flushes and detaches take versions, too.
    #[must_use]
    pub fn heard_version(&self) -> Version {
        self.known.whole().max(self.known.size.as_of())
    }

    /// From now on nothing counts that is known as of an older version than this one.
    pub fn require(&mut self, version: Version) {
        self.known.require(version);
    }

    /// The version that reads are at least of, once they have asked where they must.
    #[must_use]
    pub fn seen_version(&self) -> Version {
        self.known.whole().max(self.known.must_see())
    }

    /// True when every byte's owner is known as of what must be seen.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.known.is_current()
    }

    // ---- learning ------------------------------------------------------------------------------

    /// Learns what an answer says about the bytes that it covers.
    pub fn apply(&mut self, answer: &MapAnswer) -> Changes {
        let mut changes = Changes::default();
        self.known.size.update(answer.size, answer.version);
        self.known.base_len.update(answer.base_len, answer.version);
        if answer.unchanged || answer.version < self.known.whole() {
            return changes;
        }
        for segment in segments(answer) {
            // What was known already has been judged already.
            if !self.known.says(&segment) {
                self.apply_segment(&segment, answer.version, &mut changes);
            }
            if segment.owner == self.me && segment.flushed {
                self.note_flushed(segment.range, answer.version);
            }
        }
        if answer.covers == ByteRange::ALL && changes.doubtful.is_empty() {
            self.known.set_whole(answer.version);
        }
        changes
    }

    fn apply_segment(&mut self, segment: &Segment, as_of: Version, changes: &mut Changes) {
        let older: Vec<(ByteRange, Fact)> =
            self.known.facts(segment.range).filter(|(_, f)| f.as_of <= as_of).collect();
        for (range, fact) in older {
            let mut doubtful = Vec::new();
            if segment.version > fact.as_of {
                let stale = self.local.of_class(Class::Clean, range);
                self.forget(&stale, &mut changes.stale);
                if segment.owner != self.me {
                    doubtful = self.judge_owned(range, segment, as_of, changes);
                }
            }
            let new = Fact { owner: segment.owner, version: segment.version, as_of };
            for certain in without(range, &doubtful) {
                self.known.learn(certain, new);
            }
            doubtful.into_iter().for_each(|r| push_joined(&mut changes.doubtful, r));
        }
    }

    /// Rule 4: owned bytes of which a newer answer says that they are not ours. Returns those that
    /// the answer is too old for.
    fn judge_owned(
        &mut self,
        range: ByteRange,
        segment: &Segment,
        as_of: Version,
        changes: &mut Changes,
    ) -> Vec<ByteRange> {
        let mut doubtful = Vec::new();
        let extents: Vec<(ByteRange, Local)> = self.local.overlapping(range).collect();
        for (bytes, state) in extents {
            let Local::Owned { first, last, flushed } = state else { continue };
            if as_of < first {
                continue;
            }
            if as_of < last {
                doubtful.push(bytes);
            } else if flushed && segment.owner == NodeId::NOBODY && segment.version <= first {
                // Given back (by a detach whose reply is not here yet), and unchanged since.
                self.local.set(bytes, Some(Local::Clean));
            } else {
                self.forget(&[bytes], &mut changes.overtaken);
            }
        }
        doubtful
    }

    fn forget(&mut self, ranges: &[ByteRange], into: &mut Vec<ByteRange>) {
        for range in ranges {
            self.local.set(*range, None);
            if !range.is_empty() {
                push_joined(into, *range);
            }
        }
    }

    /// The service has our bytes as flushed: when it said so after we attached them last, they are.
    fn note_flushed(&mut self, range: ByteRange, as_of: Version) {
        for bytes in self.local.of_class(Class::Unflushed, range) {
            self.flushed(&[(bytes, as_of)]);
        }
    }

    // ---- writing and attaching -----------------------------------------------------------------

    /// The bytes of `range` were written; they are dirty.
    pub fn write(&mut self, range: ByteRange) {
        self.settle(range);
        self.local.set(range, Some(Local::Dirty));
    }

    /// The same for many ranges, which do not meet.
    pub fn write_all(&mut self, ranges: &[ByteRange]) {
        ranges.iter().for_each(|range| self.settle(*range));
        self.local.set_all(ranges, Local::Dirty);
    }

    /// The part of `within`, from its beginning, in which not more than `most` ranges each are written
    /// and not sent, are guessed to be written, or are this node's: what fits into one message.
    #[must_use]
    pub fn part(&self, within: ByteRange, most: usize) -> ByteRange {
        if within.is_empty() {
            return within;
        }
        let guessed = self.guessed.overlapping(within.to_std()).nth(most).map(|r| r.start);
        let end = self.local.nth_from(within, most).into_iter().chain(guessed).min();
        ByteRange::new(within.start(), end.unwrap_or(within.end()).max(within.start()))
    }

    /// The written bytes within `within` that no attach was sent for. They count as sent now.
    pub fn take_unattached(&mut self, within: ByteRange) -> Vec<ByteRange> {
        let taken = self.local.of_class(Class::Dirty, within);
        self.local.set_all(&taken, Local::Attaching);
        self.flying.start_all(&taken);
        taken
    }

    /// The written bytes within `within` that are not attached for certain.
    #[must_use]
    pub fn unattached(&self, within: ByteRange) -> Vec<ByteRange> {
        let mut ranges = self.local.of_class(Class::Dirty, within);
        ranges.extend(self.local.of_class(Class::Attaching, within));
        ranges.sort_unstable();
        ranges
    }

    /// The service attached `ranges` (as they were taken) at `version`; `size` is the published
    /// size then. What was written again meanwhile stays unattached. Returns what turns out to
    /// be overtaken already.
    pub fn attached(&mut self, ranges: &[ByteRange], version: Version, size: u64) -> Changes {
        let mut changes = Changes::default();
        self.known.size.update(size, version);
        let mut landed: BTreeMap<Version, Vec<ByteRange>> = BTreeMap::new();
        for (range, newest) in self.flying.land(ranges, version) {
            landed.entry(newest).or_default().push(range);
        }
        let mut owned = 0;
        for (newest, ranges) in landed {
            let attaching = self.local.extents(Class::Attaching, &ranges);
            owned += attaching.iter().map(|range| range.len()).sum::<u64>();
            self.own(&attaching, newest, &mut changes);
        }
        if owned < ranges.iter().map(|range| range.len()).sum() || !changes.overtaken.is_empty() {
            for lost in self.local.gaps_in(ranges) {
                self.learn_newer(lost, Fact { owner: self.me, version, as_of: version });
            }
        }
        self.extend_whole(ranges, version);
        changes
    }

    /// `range` was written at a place that the service had reserved and attached for it at
    /// `version` (append): no attach of it is needed. Until then other nodes already hear that the
    /// bytes are here; a peer that asks for bytes that are not [`FileView::local`] must be told
    /// to come again, never zeros.
    pub fn appended(&mut self, range: ByteRange, version: Version, size: u64) -> Changes {
        let mut changes = Changes::default();
        self.known.size.update(size, version);
        let dirty = self.local.of_class(Class::Dirty, range);
        self.own(&dirty, version, &mut changes);
        self.extend_whole(&[range], version);
        changes
    }

    /// An attach of `ranges` came to nothing: they wait for the next one.
    pub fn attach_failed(&mut self, ranges: &[ByteRange]) {
        self.flying.land(ranges, Version::ZERO);
        for range in ranges {
            for bytes in self.local.of_class(Class::Attaching, *range) {
                self.local.set(bytes, Some(Local::Dirty));
            }
        }
    }

    /// The service did not attach these bytes, because others have changed them since they were
    /// written: what was not written again meanwhile is no longer local.
    pub fn not_attached(&mut self, ranges: &[ByteRange]) -> Changes {
        let mut changes = Changes::default();
        for (landed, _) in self.flying.land(ranges, Version::ZERO) {
            let gone = self.local.of_class(Class::Attaching, landed);
            self.forget(&gone, &mut changes.overtaken);
        }
        changes
    }

    /// Bytes attached at `version` become owned, except where a newer answer that came first
    /// shows that they were taken from us since.
    fn own(&mut self, ranges: &[ByteRange], version: Version, changes: &mut Changes) {
        let newer = |fact: &Fact| fact.owner != self.me && fact.version >= version;
        let facts = ranges.iter().flat_map(|range| self.known.facts(*range));
        let taken: Vec<ByteRange> = facts.filter(|(_, f)| newer(f)).map(|(r, _)| r).collect();
        ranges.iter().for_each(|range| self.settle(*range));
        let owned = Local::Owned { first: version, last: version, flushed: false };
        self.local.set_all(ranges, owned);
        self.forget(&taken, &mut changes.overtaken);
    }

    /// When nothing happened to the file between what we know wholly and our own attach, then
    /// we know it wholly as of that attach too.
    fn extend_whole(&mut self, ranges: &[ByteRange], version: Version) {
        let some = ranges.iter().any(|r| !r.is_empty());
        if some && self.known.whole() != Version::ZERO && version == self.known.whole().next() {
            self.known.set_whole(version);
        }
    }

    fn learn_newer(&mut self, range: ByteRange, new: Fact) {
        let older: Vec<ByteRange> =
            self.known.facts(range).filter(|(_, f)| f.as_of < new.as_of).map(|(r, _)| r).collect();
        older.into_iter().for_each(|r| self.known.learn(r, new));
    }

    // ---- reading -------------------------------------------------------------------------------

    /// From where each byte of `range` below the size is read: sorted, disjoint and complete.
    #[must_use]
    pub fn plan_read(&self, range: ByteRange) -> Vec<Piece> {
        let range = range.intersect(ByteRange::new(0, self.size()));
        let mut pieces = Vec::new();
        let mut at = range.start();
        for (bytes, state) in self.local.overlapping(range) {
            self.plan_absent(ByteRange::new(at, bytes.start()), &mut pieces);
            self.plan_local(bytes, state, &mut pieces);
            at = bytes.end();
        }
        self.plan_absent(ByteRange::new(at, range.end()), &mut pieces);
        pieces
    }

    fn plan_local(&self, range: ByteRange, state: Local, pieces: &mut Vec<Piece>) {
        let is_sure = match state {
            Local::Dirty | Local::Attaching => true,
            Local::Owned { first, .. } => self.known.counts(first),
            Local::Clean => false,
        };
        if is_sure || self.known.counts(self.known.whole()) {
            return self.push_local(range, pieces);
        }
        for (bytes, fact) in self.known.facts(range) {
            match self.known.counts(fact.as_of) {
                true => self.push_local(bytes, pieces),
                false => {
                    let (source, as_of) = (Source::Unknown, Version::ZERO);
                    pieces.push(Piece { range: bytes, source, as_of });
                }
            }
        }
    }

    fn push_local(&self, range: ByteRange, pieces: &mut Vec<Piece>) {
        match pieces.last_mut() {
            Some(last) if last.source == Source::Local && last.range.end() == range.start() => {
                last.range = ByteRange::new(last.range.start(), range.end());
            }
            _ => pieces.push(Piece { range, source: Source::Local, as_of: self.known.whole() }),
        }
    }

    fn plan_absent(&self, range: ByteRange, pieces: &mut Vec<Piece>) {
        if range.is_empty() {
            return;
        }
        let base = ByteRange::new(0, self.known.base_len.value);
        for (bytes, fact) in self.known.facts(range) {
            let as_of = if self.known.counts(fact.as_of) { fact.as_of } else { Version::ZERO };
            let mut push = |range: ByteRange, source| {
                if !range.is_empty() {
                    pieces.push(Piece { range, source, as_of });
                }
            };
            if fact.owner != NodeId::NOBODY {
                push(bytes, Source::Peer { node: fact.owner, version: fact.version });
                continue;
            }
            push(bytes.intersect(base), Source::Backing);
            push(bytes.intersect(ByteRange::from(base.end())), Source::Zero);
        }
    }

    /// Bytes of `range` came from a piece of that `as_of`. Returns the parts that are still
    /// absent and have not changed since, as far as is known: the caller fills these into the
    /// cache file and says so ([`FileView::filled`]) before anything else happens to the view.
    #[must_use]
    pub fn still_wanted(&self, range: ByteRange, as_of: Version) -> Vec<ByteRange> {
        let mut accepted = Vec::new();
        let gaps = self.local.gaps(range);
        for gap in gaps {
            for (bytes, fact) in self.known.facts(gap) {
                if fact.version <= as_of && fact.owner != self.me {
                    push_joined(&mut accepted, bytes);
                }
            }
        }
        accepted
    }

    /// What was still wanted is in the cache file: clean from now on.
    pub fn filled(&mut self, wanted: &[ByteRange]) {
        wanted.iter().for_each(|r| self.local.set(*r, Some(Local::Clean)));
    }

    /// Both at once, where the bytes themselves do not matter.
    pub fn fetched(&mut self, range: ByteRange, as_of: Version) -> Vec<ByteRange> {
        let wanted = self.still_wanted(range, as_of);
        self.filled(&wanted);
        wanted
    }

    /// Gives up clean bytes within `within`; returns which.
    pub fn drop_clean(&mut self, within: ByteRange) -> Vec<ByteRange> {
        let dropped = self.local.of_class(Class::Clean, within);
        dropped.iter().for_each(|r| self.local.set(*r, None));
        dropped
    }

    // ---- flushing ------------------------------------------------------------------------------

    /// Owned, unflushed ranges within `within`, neighbours as one, each with the newest version of
    /// its parts.
    #[must_use]
    pub fn unflushed(&self, within: ByteRange) -> Vec<(ByteRange, Version)> {
        let newest = |range: ByteRange| {
            let versions = self.local.overlapping(range).map(|(_, state)| match state {
                Local::Owned { last, .. } => last,
                _ => Version::ZERO,
            });
            versions.max().unwrap_or_default()
        };
        let ranges = self.local.of_class(Class::Unflushed, within);
        ranges.into_iter().map(|r| (r, newest(r))).collect()
    }

    /// The backing has these ranges as they were at these versions (those of the grant): what was
    /// not attached again since, nor written, is flushed.
    pub fn flushed(&mut self, ranges: &[(ByteRange, Version)]) {
        for (range, upto) in ranges {
            let extents: Vec<(ByteRange, Local)> = self.local.overlapping(*range).collect();
            for (bytes, state) in extents {
                if let Local::Owned { first, last, flushed: false } = state
                    && last <= *upto
                {
                    self.local.set(bytes, Some(Local::Owned { first, last, flushed: true }));
                    self.local.merge_owned_at(bytes.end());
                    self.local.merge_owned_at(bytes.start());
                }
            }
        }
    }

    /// The service took these flushed ranges off us: they are clean, and the backing's.
    ///
    /// The bytes are not known as of the version of the answer: the service also says yes when
    /// another node had taken some of them long before. Nor does it follow from them how much the
    /// backing has of the file: others have flushed, too, and may have cut it.
    pub fn detached(&mut self, ranges: &[ByteRange], answer: Detached) {
        self.known.size.update(answer.size, answer.version);
        self.known.base_len.update(answer.base_len, answer.version);
        for range in ranges {
            let extents: Vec<(ByteRange, Local)> = self.local.overlapping(*range).collect();
            for (bytes, state) in extents {
                if let Local::Owned { first, last, flushed: true } = state
                    && last <= answer.version
                {
                    self.give_back(bytes, first);
                }
            }
        }
    }

    fn give_back(&mut self, range: ByteRange, since: Version) {
        let facts: Vec<(ByteRange, Fact)> = self.known.facts(range).collect();
        for (bytes, fact) in facts {
            let as_of = fact.as_of.max(since);
            self.known.learn(bytes, Fact { owner: NodeId::NOBODY, version: as_of, as_of });
        }
        self.local.set(range, Some(Local::Clean));
    }

    /// This node's own truncate to `len` was done, with this answer: local bytes beyond it are
    /// gone, also unattached ones.
    pub fn truncated(&mut self, len: u64, answer: &MapAnswer) -> Changes {
        self.settle(ByteRange::from(len));
        self.local.set(ByteRange::from(len), None);
        self.apply(answer)
    }
}

/// `range` without `holes`, which are sorted.
fn without(range: ByteRange, holes: &[ByteRange]) -> Vec<ByteRange> {
    let mut out = Vec::with_capacity(holes.len() + 1);
    let mut at = range.start();
    for hole in holes {
        out.push(ByteRange::new(at, hole.start()));
        at = hole.end();
    }
    out.push(ByteRange::new(at, range.end()));
    out
}

/// A range of the maps as ours.
fn bytes(range: &std::ops::Range<u64>) -> ByteRange {
    ByteRange::new(range.start, range.end)
}

fn push_joined(into: &mut Vec<ByteRange>, range: ByteRange) {
    match into.last_mut() {
        Some(last) if last.end() == range.start() => {
            *last = ByteRange::new(last.start(), range.end());
        }
        _ => into.push(range),
    }
}

#[cfg(test)]
#[path = "../view_examples.rs"]
mod examples;
#[cfg(test)]
#[path = "../view_tests.rs"]
mod tests;
