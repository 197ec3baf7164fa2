//! The service's side of one file: versions, sizes and who owns which bytes. Every mutating call
//! is a pure function of the state and its arguments, so a journal of the calls replays to the
//! same state; nothing here knows sessions, grants or the backing itself.
//!
//! # Flushes
//!
//! [`FileState::grantable`] changes nothing and need not be journalled. The grant is judged when
//! it ends: a grant carries the file's version at the time it was given, and
//! [`FileState::mark_flushed`] marks what is still the node's at a version not newer than that.
//! Versions of unflushed bytes are exact (see [`crate::tree`]) and every attach after the grant
//! has a newer one, so the mark covers exactly the bytes that were neither attached again nor
//! taken by others since: a flush never falls short because a neighbouring byte was written, and
//! never marks a byte too many. The node judges its own extents by the same version
//! ([`crate::FileView::flushed`]), so that both always agree.
//!
//! # What happens to the backing's bytes
//!
//! `base_version` is at least the version of every byte that ever went from an owner to the
//! backing. It is not raised further by a detach: a clean copy that another node fetched after the
//! last attach of those bytes stays valid.

use crate::base::{BaseChanges, Guesses, StoredChanges, StoredGuesses};
use crate::claim::Claim;
use crate::tree::{DamagedTree, OwnershipTree};
use ebb_types::{ByteRange, NodeId, Version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[path = "answer.rs"]
mod answer;
#[path = "quiet.rs"]
mod quiet;
#[path = "reassert.rs"]
mod reassert;
#[path = "seat.rs"]
mod seat;

pub use crate::tree::Owned;
pub use answer::MapAnswer;
pub use quiet::{Quiet, QuietState};
pub use reassert::{Assertion, Claimed, Leap};
pub use seat::Seat;

/// The largest size a file can have.
const SIZE_MAX: u64 = i64::MAX as u64;

/// A detach of bytes that only the node's cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bytes {0} are not flushed")]
pub struct NotFlushed(pub ByteRange);

/// What the service answers to a detach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Detached {
    /// The file's version then.
    pub version: Version,
    /// Published size.
    pub size: u64,
    /// As in [`MapAnswer`]: what the node has flushed itself tells only a part of it.
    pub base_len: u64,
}

/// Everything the service knows of one file's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct FileState {
    version: Version,
    size: u64,
    base_version: Version,
    base_len: u64,
    /// The same as `base_version`, exactly; stored apart.
    changes: BaseChanges,
    /// What was published last by a guess; stored apart.
    guesses: Guesses,
    /// Who may write without telling; stored apart.
    quiet: QuietState,
    /// At which node it sits; stored apart.
    seat: Option<Seat>,
    /// No version below it is given out any more; stored apart.
    floor: Version,
    /// What nodes may know better; stored apart.
    leap: Option<Box<Leap>>,
    tree: OwnershipTree,
}

/// The stored form; counters are made anew and order is checked when it is read.
#[derive(Serialize, Deserialize)]
struct Stored {
    version: Version,
    size: u64,
    base_version: Version,
    base_len: u64,
    owned: Vec<Owned>,
}

impl FileState {
    /// A file of which the backing has `size` bytes (0: it may not exist there at all). The
    /// first version is 1, so that it differs from "nothing known".
    #[must_use]
    pub fn new(size: u64) -> FileState {
        FileState::found(size, Version::ZERO)
    }

    /// The same of a file that was known before, at versions up to `last`, and forgotten: whatever
    /// nodes remember of then is older.
    #[must_use]
    pub fn found(size: u64, last: Version) -> FileState {
        let first = last.next();
        FileState {
            version: first,
            size,
            base_version: first,
            base_len: size,
            changes: BaseChanges::new(first),
            guesses: Guesses::default(),
            quiet: QuietState::default(),
            seat: None,
            floor: Version::ZERO,
            leap: None,
            tree: OwnershipTree::new(),
        }
    }

    /// The newest version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Published size.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The published size, when it was made larger than what nodes have of it.
    #[must_use]
    pub fn len_beyond_bytes(&self) -> Option<u64> {
        let end = self.tree.end();
        (self.size > end).then_some(self.size)
    }

    /// Unowned bytes below it are the backing's.
    #[must_use]
    pub fn base_len(&self) -> u64 {
        self.base_len
    }

    /// When the unowned bytes last changed.
    #[must_use]
    pub fn base_version(&self) -> Version {
        self.base_version
    }

    /// The unowned bytes that changed after this version: somebody's bytes went to the backing, or
    /// the file was cut, or changed there. (Owned ones may be among them.)
    #[must_use]
    pub fn changed_after(&self, known: Version) -> Vec<ByteRange> {
        self.changes.after(known)
    }

    /// What [`FileState::changed_after`] knows, to be stored beside the state itself; `None` when it
    /// is what a stored state begins with.
    #[must_use]
    pub fn stored_changes(&self) -> Option<StoredChanges> {
        self.changes.stored(self.base_version)
    }

    /// Brings that back.
    pub fn restore_changes(&mut self, stored: &StoredChanges) {
        self.changes = BaseChanges::from(stored);
    }

    /// The bytes whose only change after this version is a claim of blocks ([`FileState::claim`]):
    /// nobody is known to have written there. Sorted and disjoint.
    #[must_use]
    pub fn guessed_after(&self, known: Version) -> Vec<ByteRange> {
        self.guesses.after(known)
    }

    /// What [`FileState::guessed_after`] knows, to be stored beside the state itself; `None` when
    /// that is nothing.
    #[must_use]
    pub fn stored_guesses(&self) -> Option<StoredGuesses> {
        self.guesses.stored()
    }

    /// Brings that back.
    pub fn restore_guesses(&mut self, stored: &StoredGuesses) {
        self.guesses = Guesses::from(stored);
    }

    /// `node` becomes the owner of `ranges`, unflushed, taking them from others. Nothing happens,
    /// and no version is used up, when there is no byte in them.
    pub fn attach(&mut self, node: NodeId, ranges: &[ByteRange]) -> Version {
        if ranges.iter().all(|r| r.is_empty()) {
            return self.version;
        }
        let version = self.step();
        ranges.iter().for_each(|range| self.guesses.forget(*range));
        self.insert(node, ranges, version);
        version
    }

    /// The same for `ranges` that were written, and in the same step for `claimed`, which
    /// [`FileState::judge_claim`] granted: perhaps nothing was written there. That is remembered,
    /// also when the bytes have gone to the backing, until somebody attaches them by name.
    pub fn claim(&mut self, node: NodeId, ranges: &[ByteRange], claimed: &[ByteRange]) -> Version {
        if claimed.iter().all(|r| r.is_empty()) {
            return self.attach(node, ranges);
        }
        for range in claimed {
            let mut at = range.start();
            let owned: Vec<ByteRange> = self.tree.overlapping(*range).map(|o| o.range).collect();
            for owned in owned.into_iter().chain([ByteRange::at(range.end(), 0)]) {
                self.guesses.note(ByteRange::new(at, owned.start()), &self.changes);
                at = owned.end();
            }
        }
        let before = self.version;
        let mut version = self.attach(node, ranges);
        if version == before {
            version = self.step();
        }
        self.insert(node, claimed, version);
        version
    }

    fn insert(&mut self, node: NodeId, ranges: &[ByteRange], version: Version) {
        self.tree.insert_all(node, ranges, version);
        let some = ranges.iter().filter(|range| !range.is_empty());
        self.size = some.map(|range| range.end()).fold(self.size, u64::max);
    }

    /// What of `range` the claimant `node` gets without taking a byte that another node has:
    /// (granted, contested), both sorted. Changes nothing; see [`crate::claim`].
    #[must_use]
    pub fn judge_claim(
        &self,
        node: NodeId,
        range: ByteRange,
        claim: Claim,
    ) -> (Vec<ByteRange>, Vec<ByteRange>) {
        let (mut granted, mut contested) = (Vec::new(), Vec::new());
        let newer = match claim {
            Claim::Guessed { known } if known != Version::ZERO && known < self.base_version => {
                self.changes.after_within(known, range)
            }
            _ => Vec::new(),
        };
        let mut unowned = |from: u64, to: u64, granted: &mut Vec<ByteRange>| {
            let gap = ByteRange::new(from, to);
            let base = ByteRange::new(0, self.base_len);
            let zeros = gap.intersect(ByteRange::from(base.end()));
            push(&mut contested, gap.intersect(base));
            match claim {
                Claim::Guessed { .. } => {
                    let mut at = zeros.start();
                    for newer in newer.iter().map(|n| n.intersect(zeros)) {
                        if !newer.is_empty() {
                            push(granted, ByteRange::new(at, newer.start()));
                            push(&mut contested, newer);
                            at = newer.end();
                        }
                    }
                    push(granted, ByteRange::new(at, zeros.end()));
                }
                Claim::Again => push(&mut contested, zeros),
            }
        };
        let mut at = range.start();
        let mut others = Vec::new();
        for owned in self.tree.overlapping(range) {
            unowned(at, owned.range.start(), &mut granted);
            match owned.node == node {
                true => push(&mut granted, owned.range),
                false => others.push(owned.range),
            }
            at = owned.range.end();
        }
        unowned(at, range.end(), &mut granted);
        contested.extend(others);
        contested.sort_unstable();
        (granted, contested)
    }

    /// `to` has copies of `ranges` of the lost node `from`: what `from` still owns of them
    /// unflushed becomes `to`'s, at a new version. Returns what that was.
    pub fn adopt(&mut self, from: NodeId, to: NodeId, ranges: &[ByteRange]) -> Vec<ByteRange> {
        let pieces = self.grantable(from, ranges);
        let moved: Vec<ByteRange> = pieces.into_iter().map(|piece| piece.range).collect();
        self.attach(to, &moved);
        moved
    }

    /// Reserves `len` bytes at the end of the file for `node` and attaches them. Returns where
    /// they begin; `None` when the file would become too large.
    pub fn append(&mut self, node: NodeId, len: u64) -> Option<(u64, Version)> {
        let start = self.size;
        let end = start.checked_add(len).filter(|end| *end <= SIZE_MAX)?;
        Some((start, self.attach(node, &[ByteRange::new(start, end)])))
    }

    /// `node` is lost, was appending `range` when that happened, and nobody has bytes of what it still
    /// owns there: they never came into being. Where nothing came behind it the file ends before it
    /// again, else there are zeros.
    pub fn undo_append(&mut self, node: NodeId, range: ByteRange) -> Version {
        let its = |o: &Owned| o.node == node && !o.flushed;
        let missing: Vec<ByteRange> =
            self.tree.overlapping(range).filter(its).map(|o| o.range).collect();
        self.disown(&missing, range)
    }

    /// `missing`, parts of `within`, which are owned unflushed, were never written: they are zeros,
    /// and where the file ends with `within` it ends with the last byte of it that was.
    fn disown(&mut self, missing: &[ByteRange], within: ByteRange) -> Version {
        if missing.is_empty() {
            return self.version;
        }
        let version = self.step();
        for range in missing {
            self.tree.remove(*range);
            self.changes.mark(*range, version);
        }
        self.base_version = version;
        if self.size == within.end() {
            let last = self.tree.overlapping(within).last().map_or(0, |o| o.range.end());
            self.size = last.max(within.start()).max(self.base_len);
        }
        version
    }

    /// `node` gives up flushed bytes, which become the backing's. Bytes of other owners or of
    /// nobody are left alone; an own unflushed byte is an error that changes nothing.
    pub fn detach(&mut self, node: NodeId, ranges: &[ByteRange]) -> Result<Detached, NotFlushed> {
        let pieces = self.flushed_of(node, ranges)?;
        self.give_to_backing(&pieces);
        Ok(self.detached())
    }

    /// Whether [`FileState::detach`] would do it. Changes nothing, and looks at nothing but `ranges`.
    pub fn check_detach(&self, node: NodeId, ranges: &[ByteRange]) -> Result<(), NotFlushed> {
        self.flushed_of(node, ranges).map(drop)
    }

    fn detached(&self) -> Detached {
        Detached { version: self.version, size: self.size, base_len: self.base_len }
    }

    fn flushed_of(&self, node: NodeId, ranges: &[ByteRange]) -> Result<Vec<Owned>, NotFlushed> {
        let mut pieces = Vec::new();
        for range in ranges {
            for piece in self.tree.overlapping(*range).filter(|o| o.node == node) {
                if !piece.flushed {
                    return Err(NotFlushed(piece.range));
                }
                pieces.push(piece);
            }
        }
        Ok(pieces)
    }

    /// The same by a node that cannot say whether the backing has what others copied from it: it
    /// may have written there again before the bytes were flushed. All copies of unowned bytes
    /// made before are not the newest any more.
    pub fn detach_anew(
        &mut self,
        node: NodeId,
        ranges: &[ByteRange],
    ) -> Result<Detached, NotFlushed> {
        let pieces = self.flushed_of(node, ranges)?;
        let version = self.give_to_backing(&pieces);
        if !pieces.is_empty() {
            self.base_version = version;
            pieces.iter().for_each(|piece| self.changes.mark(piece.range, version));
        }
        Ok(self.detached())
    }

    /// Sets the size. A cut takes the bytes beyond it from everyone; an extension adds zeros.
    pub fn truncate(&mut self, len: u64) -> Version {
        let version = self.step();
        // While words are missing, the file may be longer than is known.
        if len < self.size || self.leap.is_some() {
            self.tree.remove(ByteRange::from(len));
            self.base_len = self.base_len.min(len);
            self.base_version = version;
            self.changes.mark(ByteRange::from(len), version);
            self.guesses.forget(ByteRange::from(len));
        }
        self.sized(len, version);
        self.size = len;
        version
    }

    /// The file ends at `len` if it ended before; never cuts.
    pub fn grow(&mut self, len: u64) -> Version {
        self.grown(len);
        if len > self.size {
            self.size = len;
            self.step();
        }
        self.version
    }

    /// Somebody outside of the job changed the file on the backing. Owned flushed bytes are no
    /// longer what the backing has and go. Callers see to it that nothing is owned unflushed
    /// ([`FileState::is_clean`]); if something is, it stays, and so does the size it needs.
    pub fn base_changed(&mut self, new_len: u64) -> Version {
        let version = self.step();
        let kept: Vec<Owned> = self.tree.iter().filter(|o| !o.flushed).collect();
        self.size = kept.last().map_or(new_len, |o| o.range.end().max(new_len));
        self.tree = OwnershipTree::new();
        kept.into_iter().for_each(|o| self.tree.insert(o));
        self.base_len = new_len;
        self.base_is_of(version);
        self.base_version = version;
        self.changes = BaseChanges::new(version);
        self.guesses = Guesses::default();
        version
    }

    /// What was flushed may have been written over, cut or made longer by others, who have flushed that and
    /// forgotten it. So the backing has the newest of it, and whatever nodes have of that is old. Unflushed
    /// bytes stay their owners'. `len`: of the object on the backing, when there is one.
    pub fn believe_the_backing(&mut self, len: Option<u64>) {
        let flushed: Vec<Owned> = self.tree.iter().filter(|o| o.flushed).collect();
        self.give_to_backing(&flushed);
        self.base_version = self.step();
        self.changes = BaseChanges::new(self.base_version);
        self.guesses = Guesses::default();
        if let Some(len) = len {
            let end = self.tree.end();
            (self.base_len, self.size) = (len, len.max(end));
            self.base_is_of(self.base_version);
        }
    }

    /// True when no node has a byte of it, nobody may be writing without a word, and the backing has none
    /// either: it is as many zeros as it is long.
    #[must_use]
    pub fn is_zeros(&self) -> bool {
        let silent = self.seat.is_some() || self.stored_quiet().is_some();
        self.tree.is_empty() && self.base_len == 0 && !silent
    }

    /// True when the backing has all of it and nobody anything: nothing would be lost with it but its
    /// version.
    #[must_use]
    pub fn is_as_found(&self) -> bool {
        self.tree.is_empty()
            && self.base_len == self.size
            && self.seat.is_none()
            && self.leap.is_none()
            && self.stored_guesses().is_none()
            && self.stored_quiet().is_none()
    }

    /// True when the backing holds every published byte.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.tree.unflushed().is_empty()
    }

    /// The parts of `ranges` that `node` may flush now: its own unflushed bytes, neighbours as
    /// one. Their version is the file's at this moment: whatever is attached later has a newer one.
    #[must_use]
    pub fn grantable(&self, node: NodeId, ranges: &[ByteRange]) -> Vec<Owned> {
        let mut out: Vec<Owned> = Vec::new();
        for range in ranges {
            for next in self.tree.overlapping(*range).filter(|o| o.node == node && !o.flushed) {
                match out.last_mut() {
                    Some(last) if last.range.end() == next.range.start() => {
                        last.range = ByteRange::new(last.range.start(), next.range.end());
                    }
                    _ => out.push(Owned { version: self.version, ..next }),
                }
            }
        }
        out
    }

    /// The backing now holds what `node` had at the time of the grant. Marks what is still so and
    /// returns the number of bytes marked.
    pub fn mark_flushed(&mut self, node: NodeId, granted: &[Owned]) -> u64 {
        let mut bytes = 0;
        for grant in granted {
            for marked in self.tree.mark_flushed(grant.range, node, grant.version) {
                bytes += marked.len();
                self.base_reaches(marked.end());
            }
        }
        bytes
    }

    /// Of what `node` was granted, the bytes that it owns at a newer version by now, so that they were
    /// not marked: it wrote them again, or was given up meanwhile ([`FileState::lapse`]) and does not
    /// know.
    #[must_use]
    pub fn newer_than_granted(&self, node: NodeId, granted: &[Owned]) -> Vec<ByteRange> {
        let newer = |g: &Owned| {
            let own = |o: &Owned| o.node == node && !o.flushed;
            let version = g.version;
            self.owned_in(g.range).filter(move |o| own(o) && o.version > version).map(|o| o.range)
        };
        granted.iter().flat_map(newer).collect()
    }

    /// `node` left for good. Its flushed bytes become the backing's; the ones returned were only
    /// in its cache and stay its own, so that whoever reads them gets an error and not old bytes.
    /// It may have written over flushed bytes and died before it published that: whoever fetched
    /// them from it asks the backing. (For a node that comes back with such bytes nothing was
    /// overtaken: what is marked is when they were published.)
    pub fn node_gone(&mut self, node: NodeId) -> Vec<ByteRange> {
        self.lose_quiet(node);
        self.seat.take_if(|seat| seat.node == node);
        let (flushed, lost): (Vec<Owned>, Vec<Owned>) =
            self.tree.of_node(node).partition(|o| o.flushed);
        let version = self.give_to_backing(&flushed);
        if !flushed.is_empty() {
            self.base_version = version;
        }
        lost.into_iter().map(|o| o.range).collect()
    }

    fn give_to_backing(&mut self, pieces: &[Owned]) -> Version {
        if pieces.is_empty() {
            return self.version;
        }
        for piece in pieces {
            self.tree.remove(piece.range);
            self.base_version = self.base_version.max(piece.version);
            self.changes.mark(piece.range, piece.version);
            self.base_reaches(piece.range.end());
        }
        self.step()
    }

    /// Merges unflushed entries within spans, to save memory, except where `busy` (the ranges of
    /// all grants that are out). Changes no answer's meaning and need not be journalled: a
    /// replay without it has older, exact versions, under which every recorded
    /// [`FileState::mark_flushed`] marks at least as much.
    pub fn compact(&mut self, busy: &[ByteRange]) {
        self.tree.compact(busy);
    }

    /// Bytes that only some node's cache holds.
    #[must_use]
    pub fn unflushed_bytes(&self) -> u64 {
        self.tree.unflushed().values().sum()
    }

    /// The same per node; nodes with none are left out.
    #[must_use]
    pub fn unflushed_by_node(&self) -> &BTreeMap<NodeId, u64> {
        self.tree.unflushed()
    }

    /// Number of intervals kept.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.tree.len()
    }

    /// All intervals in order, with their exact versions.
    pub fn owned(&self) -> impl Iterator<Item = Owned> + '_ {
        self.tree.iter()
    }

    /// The intervals that meet `range`, clipped to it.
    pub fn owned_in(&self, range: ByteRange) -> impl Iterator<Item = Owned> + '_ {
        self.tree.overlapping(range)
    }

    /// Every node that owns something.
    pub fn owners(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.tree.owners()
    }

    /// The intervals of one node in order, found without a look at those of others.
    pub fn owned_by(&self, node: NodeId) -> impl Iterator<Item = Owned> + '_ {
        self.tree.of_node(node)
    }

    /// True when this node owns something.
    #[must_use]
    pub fn is_owned_by(&self, node: NodeId) -> bool {
        self.tree.has_owner(node)
    }

    /// True when the file changes with this node's leaving: it owns something, may write without telling,
    /// or has done so and was given up.
    #[must_use]
    pub fn concerns(&self, node: NodeId) -> bool {
        self.tree.has_owner(node)
            || self.quiet.holder.is_some_and(|q| q.node == node)
            || self.seat.is_some_and(|seat| seat.node == node)
            || self.has_lapsed(node)
    }

    /// All nodes that it [`FileState::concerns`]; some may be named twice.
    pub fn concerned(&self) -> impl Iterator<Item = NodeId> + '_ {
        let silent = self.quiet.nodes().chain(self.seat.map(|seat| seat.node));
        self.tree.owners().chain(silent)
    }

    fn step(&mut self) -> Version {
        self.version = self.version.next().max(self.floor);
        self.version
    }
}

fn push(into: &mut Vec<ByteRange>, range: ByteRange) {
    match into.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end() == range.start() => {
            *last = ByteRange::new(last.start(), range.end());
        }
        _ => into.push(range),
    }
}

impl TryFrom<Stored> for FileState {
    type Error = DamagedTree;

    fn try_from(s: Stored) -> Result<FileState, DamagedTree> {
        Ok(FileState {
            version: s.version,
            size: s.size,
            base_version: s.base_version,
            base_len: s.base_len,
            changes: BaseChanges::new(s.base_version),
            guesses: Guesses::default(),
            quiet: QuietState::default(),
            seat: None,
            floor: Version::ZERO,
            leap: None,
            tree: OwnershipTree::try_from(s.owned)?,
        })
    }
}

impl From<FileState> for Stored {
    fn from(f: FileState) -> Stored {
        Stored {
            version: f.version,
            size: f.size,
            base_version: f.base_version,
            base_len: f.base_len,
            owned: f.tree.into(),
        }
    }
}

#[cfg(test)]
#[path = "ownership_tests.rs"]
mod tests;
