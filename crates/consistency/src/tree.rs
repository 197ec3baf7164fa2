//! Who owns which bytes of one file: disjoint intervals, split, deleted and merged as owners
//! change. No sizes, no history, no requests: those are in [`crate::ownership`].
//!
//! # What is merged, and why not more
//!
//! Adjacent intervals of one owner become one when they agree in `flushed` and
//! * their versions are equal, anywhere; or
//! * both are flushed and lie in the same aligned span of [`MERGE_SPAN`] bytes: the merged
//!   interval takes the larger version. A larger version only makes readers fetch again what they
//!   already had, and only within the span.
//!
//! *Unflushed* intervals of different versions are left apart in the tree, because a flush that
//! is under way is judged by versions: the bytes it was granted count as flushed when they were
//! not attached again since, that is, when their version is not newer than the grant. Raising the
//! version of a byte that was not attached would make the flush fall short: the node would
//! believe the bytes flushed and the service would not. (A writer that appends while a flush
//! of earlier bytes of the same span is out would cause that on every flush.) What is sent to
//! readers is merged on the way out, flushed or not ([`OwnershipTree::answer`]), so their maps
//! have one entry per span and real change of owner.
//!
//! A file written in tiny pieces under a model that attaches each of them can thus have many
//! entries until they are flushed. [`OwnershipTree::compact`] merges those too; it must be told
//! which bytes are being flushed, and leaves them alone.

//!
//! # What is one node's
//!
//! All nodes of a job may write one file in turn, so that one node has a thousandth of its intervals. Where
//! the intervals of each node begin is kept beside them (`Starts`): what is one node's is found by a look
//! for each of its own, whatever others have.

use ebb_types::{ByteRange, Extents, NodeId, Version};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Versions of one owner are merged only within an aligned span of so many bytes.
pub const MERGE_SPAN: u64 = 1 << 20;

/// A range of bytes with its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Owned {
    /// The bytes.
    pub range: ByteRange,
    /// The node whose cache has their newest published values.
    pub node: NodeId,
    /// When they were last attached; when merged, the newest of its parts.
    pub version: Version,
    /// The backing holds the same bytes.
    pub flushed: bool,
}

impl Owned {
    /// True when this and the next one may be shown to readers as one.
    fn joins(&self, next: &Owned) -> bool {
        self.range.end() == next.range.start()
            && self.node == next.node
            && self.flushed == next.flushed
            && (self.version == next.version || same_span(self.range, next.range))
    }
}

/// True when two adjacent ranges lie in one aligned span.
pub(crate) fn same_span(left: ByteRange, right: ByteRange) -> bool {
    !right.is_empty() && left.start() / MERGE_SPAN == (right.end() - 1) / MERGE_SPAN
}

/// What is known of owned bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Owner {
    node: NodeId,
    version: Version,
    flushed: bool,
}

fn owned((range, Owner { node, version, flushed }): (ByteRange, Owner)) -> Owned {
    Owned { range, node, version, flushed }
}

/// Where the intervals of each node begin. Nodes without any are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Starts(BTreeMap<NodeId, BTreeSet<u64>>);

impl Starts {
    fn of(&self, node: NodeId) -> impl Iterator<Item = u64> + '_ {
        self.0.get(&node).into_iter().flatten().copied()
    }

    /// `extent` is one interval of this node.
    fn note(&mut self, node: NodeId, extent: ByteRange) {
        let its = self.0.entry(node).or_default();
        its.insert(extent.start());
        while let Some(inside) = its.range(extent.start() + 1..extent.end()).next().copied() {
            its.remove(&inside);
        }
    }

    /// No interval of this node begins within `range` any more.
    fn forget(&mut self, node: NodeId, range: ByteRange) {
        let Some(its) = self.0.get_mut(&node) else { return };
        while let Some(inside) = its.range(range.to_std()).next().copied() {
            its.remove(&inside);
        }
        if its.is_empty() {
            self.0.remove(&node);
        }
    }
}

/// Disjoint intervals of owned bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct OwnershipTree {
    extents: Extents<Owner>,
    /// Bytes owned unflushed, per node; no zeros.
    unflushed: BTreeMap<NodeId, u64>,
    starts: Starts,
}

impl OwnershipTree {
    /// Nobody owns anything.
    #[must_use]
    pub fn new() -> OwnershipTree {
        OwnershipTree::default()
    }

    /// Number of intervals.
    #[must_use]
    pub fn len(&self) -> usize {
        self.extents.len()
    }

    /// True when nobody owns anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// One past the last byte that somebody owns.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.extents.end()
    }

    /// Bytes owned unflushed, per node.
    #[must_use]
    pub fn unflushed(&self) -> &BTreeMap<NodeId, u64> {
        &self.unflushed
    }

    /// Every node that owns something.
    pub fn owners(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.starts.0.keys().copied()
    }

    /// True when this node owns something.
    #[must_use]
    pub fn has_owner(&self, node: NodeId) -> bool {
        self.starts.0.contains_key(&node)
    }

    /// The intervals of one node in order; what it costs grows with their number alone.
    pub fn of_node(&self, node: NodeId) -> impl Iterator<Item = Owned> + '_ {
        self.starts.of(node).filter_map(|start| self.extents.get(start)).map(owned)
    }

    /// All intervals in order.
    pub fn iter(&self) -> impl Iterator<Item = Owned> + '_ {
        self.extents.iter().map(owned)
    }

    /// The intervals that meet `range`, clipped to it.
    pub fn overlapping(&self, range: ByteRange) -> impl Iterator<Item = Owned> + '_ {
        self.extents.overlapping(range).map(owned)
    }

    /// The intervals that meet `range`, clipped to it and merged for readers.
    pub fn answer(&self, range: ByteRange) -> Vec<Owned> {
        self.first_of_answer(range, usize::MAX).0
    }

    /// The same, at most `most` of them, and the part of `range` that they speak of.
    pub fn first_of_answer(&self, range: ByteRange, most: usize) -> (Vec<Owned>, ByteRange) {
        let mut out: Vec<Owned> = Vec::new();
        for next in self.overlapping(range) {
            let full = out.len() >= most;
            match out.last_mut() {
                Some(last) if last.joins(&next) => {
                    last.range = ByteRange::new(last.range.start(), next.range.end());
                    last.version = last.version.max(next.version);
                }
                _ if full => {
                    return (out, ByteRange::new(range.start(), next.range.start()));
                }
                _ => out.push(next),
            }
        }
        (out, range)
    }

    /// `owned.node` takes those bytes from whoever has them.
    pub fn insert(&mut self, owned: Owned) {
        let Owned { range, node, version, flushed } = owned;
        self.replace(&[range], Some(Owner { node, version, flushed }));
        if flushed {
            self.extents.join_at(range.end(), newest_of_joined);
            self.extents.join_at(range.start(), newest_of_joined);
            self.note_start_at(range.start());
        }
    }

    /// The interval that `offset` is in may be another one than it was.
    fn note_start_at(&mut self, offset: u64) {
        if let Some((extent, owner)) = self.extents.get(offset) {
            self.starts.note(owner.node, extent);
        }
    }

    /// `node` takes all of `ranges`, unflushed. Cheap for many that are in order.
    pub fn insert_all(&mut self, node: NodeId, ranges: &[ByteRange], version: Version) {
        let owner = Some(Owner { node, version, flushed: false });
        match ranges.is_sorted_by(|one, next| one.end() <= next.start()) {
            true => self.replace(ranges, owner),
            false => ranges.iter().for_each(|range| self.replace(&[*range], owner)),
        }
    }

    /// Nobody owns `range` any more.
    pub fn remove(&mut self, range: ByteRange) {
        self.replace(&[range], None);
    }

    /// The bytes of `ranges`, which do not meet, change hands.
    fn replace(&mut self, ranges: &[ByteRange], to: Option<Owner>) {
        let before = self.extents.within(ranges);
        for (range, from) in &before {
            self.count(*from, |bytes| bytes - range.len());
            self.starts.forget(from.node, *range);
        }
        self.extents.assign(&ranges.iter().map(|range| (*range, to)).collect::<Vec<_>>());
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            if to.is_some() {
                self.note_start_at(range.start());
            }
            // What an interval that reached further has left.
            if !before.is_empty() {
                self.note_start_at(range.end());
            }
        }
        if let Some(to) = to {
            let more: u64 = ranges.iter().map(|range| range.len()).sum();
            self.count(to, |bytes| bytes + more);
        }
    }

    fn count(&mut self, owner: Owner, change: impl FnOnce(u64) -> u64) {
        if owner.flushed {
            return;
        }
        let bytes = self.unflushed.entry(owner.node).or_default();
        *bytes = change(*bytes);
        if *bytes == 0 {
            self.unflushed.remove(&owner.node);
        }
    }

    /// Marks the bytes of `range` that `node` owns, at a version not newer than `upto`, as
    /// flushed. Returns those that were not so before.
    pub fn mark_flushed(
        &mut self,
        range: ByteRange,
        node: NodeId,
        upto: Version,
    ) -> Vec<ByteRange> {
        let fits = |o: &Owned| o.node == node && !o.flushed && o.version <= upto;
        let pieces: Vec<Owned> = self.overlapping(range).filter(fits).collect();
        for piece in &pieces {
            self.insert(Owned { flushed: true, ..*piece });
        }
        pieces.into_iter().map(|p| p.range).collect()
    }

    /// Merges unflushed intervals within spans as well, but nothing that meets `busy`.
    pub fn compact(&mut self, busy: &[ByteRange]) {
        let free = |r: ByteRange| !busy.iter().any(|b| b.overlaps(r));
        self.extents.join(|left, right| {
            let both = newest_of_joined(left, right)?;
            (free(left.0) && free(right.0)).then_some(both)
        });
        self.starts = Starts::default();
        for (extent, owner) in self.extents.iter() {
            self.starts.note(owner.node, extent);
        }
    }
}

/// What two neighbours are as one, if they may be.
fn newest_of_joined(left: (ByteRange, Owner), right: (ByteRange, Owner)) -> Option<Owner> {
    let version = left.1.version.max(right.1.version);
    owned(left).joins(&owned(right)).then_some(Owner { version, ..left.1 })
}

/// A stored tree whose intervals are empty, overlap or are out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ownership tree is damaged at {0}")]
pub struct DamagedTree(pub ByteRange);

impl TryFrom<Vec<Owned>> for OwnershipTree {
    type Error = DamagedTree;

    fn try_from(list: Vec<Owned>) -> Result<OwnershipTree, DamagedTree> {
        let (mut tree, mut end) = (OwnershipTree::new(), 0);
        for o in list {
            if o.range.is_empty() || o.range.start() < end || o.node == NodeId::NOBODY {
                return Err(DamagedTree(o.range));
            }
            end = o.range.end();
            let Owned { range, node, version, flushed } = o;
            tree.replace(&[range], Some(Owner { node, version, flushed }));
        }
        Ok(tree)
    }
}

impl From<OwnershipTree> for Vec<Owned> {
    fn from(tree: OwnershipTree) -> Vec<Owned> {
        tree.iter().collect()
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
