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

use ebb_types::{ByteRange, NodeId, Version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Versions of one owner are merged only within an aligned span of so many bytes.
pub const MERGE_SPAN: u64 = 1 << 20;

/// A list of ranges is cheaper taken as a whole from this length on, and when there are not more
/// than so many entries for each of them.
const MANY_RANGES: usize = 16;
const ENTRIES_A_RANGE: usize = 8;

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
    fn clipped(self, range: ByteRange) -> Owned {
        Owned { range: self.range.intersect(range), ..self }
    }

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Entry {
    end: u64,
    node: NodeId,
    version: Version,
    flushed: bool,
}

impl Entry {
    fn owned(self, start: u64) -> Owned {
        Owned {
            range: ByteRange::new(start, self.end),
            node: self.node,
            version: self.version,
            flushed: self.flushed,
        }
    }
}

/// Disjoint intervals of owned bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct OwnershipTree {
    entries: BTreeMap<u64, Entry>,
    /// Bytes owned unflushed, per node; no zeros.
    unflushed: BTreeMap<NodeId, u64>,
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
        self.entries.len()
    }

    /// True when nobody owns anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes owned unflushed, per node.
    #[must_use]
    pub fn unflushed(&self) -> &BTreeMap<NodeId, u64> {
        &self.unflushed
    }

    /// All intervals in order.
    pub fn iter(&self) -> impl Iterator<Item = Owned> + '_ {
        self.entries.iter().map(|(start, e)| e.owned(*start))
    }

    /// The intervals that meet `range`, clipped to it.
    pub fn overlapping(&self, range: ByteRange) -> impl Iterator<Item = Owned> + '_ {
        let before = self.entries.range(..range.start()).next_back();
        let before = before.filter(move |(_, e)| e.end > range.start() && !range.is_empty());
        let within = self.entries.range(range.to_std());
        before.into_iter().chain(within).map(move |(start, e)| e.owned(*start).clipped(range))
    }

    /// The intervals that meet `range`, clipped to it and merged for readers.
    pub fn answer(&self, range: ByteRange) -> Vec<Owned> {
        let mut out: Vec<Owned> = Vec::new();
        for next in self.overlapping(range) {
            match out.last_mut() {
                Some(last) if last.joins(&next) => {
                    last.range = ByteRange::new(last.range.start(), next.range.end());
                    last.version = last.version.max(next.version);
                }
                _ => out.push(next),
            }
        }
        out
    }

    /// `owned.node` takes those bytes from whoever has them.
    pub fn insert(&mut self, owned: Owned) {
        let Owned { range, node, version, flushed } = owned;
        if range.is_empty() {
            return;
        }
        self.remove(range);
        self.add(range.start(), Entry { end: range.end(), node, version, flushed });
        self.merge_at(range.end());
        self.merge_at(range.start());
    }

    /// `node` takes all of `ranges`, unflushed, at a version that no older one exceeds. Cheap for many
    /// that are in order.
    pub fn insert_all(&mut self, node: NodeId, ranges: &[ByteRange], version: Version) {
        let few = ranges.len() < MANY_RANGES || self.len() / ranges.len() > ENTRIES_A_RANGE;
        let in_order = |pair: &[ByteRange]| pair[0].end() <= pair[1].start();
        if few || !ranges.windows(2).all(in_order) {
            let one = |range: &ByteRange| Owned { range: *range, node, version, flushed: false };
            return ranges.iter().map(one).for_each(|owned| self.insert(owned));
        }
        self.insert_in_order(node, ranges, version);
    }

    /// One pass over all there is and all that is new.
    fn insert_in_order(&mut self, node: NodeId, ranges: &[ByteRange], version: Version) {
        let old: Vec<Owned> = std::mem::take(self).into();
        let mut old = old.into_iter();
        let mut all: Vec<Owned> = Vec::with_capacity(old.len() + ranges.len());
        // Others were joined as far as they may be.
        let mut push = |owned: Owned| match all.last_mut() {
            _ if owned.range.is_empty() => {}
            Some(last) if last.joins(&owned) && [last.version, owned.version] == [version; 2] => {
                last.range = ByteRange::new(last.range.start(), owned.range.end());
            }
            _ => all.push(owned),
        };
        let mut next = old.next();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            // What lies before the range stays, what lies in it goes; what goes on behind it is next.
            while let Some(owned) = next.filter(|o| o.range.start() < range.end()) {
                push(owned.clipped(ByteRange::new(owned.range.start(), range.start())));
                if owned.range.end() > range.end() {
                    next = Some(owned.clipped(ByteRange::from(range.end())));
                    break;
                }
                next = old.next();
            }
            push(Owned { range: *range, node, version, flushed: false });
        }
        next.into_iter().chain(old).for_each(push);
        for owned in all.iter().filter(|o| !o.flushed) {
            *self.unflushed.entry(owned.node).or_default() += owned.range.len();
        }
        self.entries = all.into_iter().map(|o| (o.range.start(), Entry::from(o))).collect();
    }

    /// Nobody owns `range` any more.
    pub fn remove(&mut self, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        self.split_at(range.start());
        self.split_at(range.end());
        while let Some((&start, _)) = self.entries.range(range.to_std()).next() {
            self.take(start);
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
        let mut out: Vec<Owned> = Vec::with_capacity(self.entries.len());
        for next in self.iter() {
            match out.last_mut() {
                Some(last) if last.joins(&next) && free(last.range) && free(next.range) => {
                    last.range = ByteRange::new(last.range.start(), next.range.end());
                    last.version = last.version.max(next.version);
                }
                _ => out.push(next),
            }
        }
        self.entries = out.into_iter().map(|o| (o.range.start(), Entry::from(o))).collect();
    }

    fn add(&mut self, start: u64, entry: Entry) {
        if !entry.flushed {
            *self.unflushed.entry(entry.node).or_default() += entry.end - start;
        }
        self.entries.insert(start, entry);
    }

    fn take(&mut self, start: u64) -> Option<Entry> {
        let entry = self.entries.remove(&start)?;
        if !entry.flushed
            && let Some(bytes) = self.unflushed.get_mut(&entry.node)
        {
            *bytes -= entry.end - start;
            if *bytes == 0 {
                self.unflushed.remove(&entry.node);
            }
        }
        Some(entry)
    }

    fn split_at(&mut self, at: u64) {
        if let Some((_, left)) = self.entries.range_mut(..at).next_back()
            && left.end > at
        {
            let right = *left;
            left.end = at;
            self.entries.insert(at, right);
        }
    }

    /// Joins the interval that ends at `at` with the one that starts there, if they may.
    fn merge_at(&mut self, at: u64) {
        let Some((&start, &left)) = self.entries.range(..at).next_back() else { return };
        let Some(&right) = self.entries.get(&at) else { return };
        let (l, r) = (left.owned(start), right.owned(at));
        if !l.joins(&r) || (left.version != right.version && !left.flushed) {
            return;
        }
        self.entries.remove(&at);
        let version = left.version.max(right.version);
        self.entries.insert(start, Entry { end: right.end, version, ..left });
    }
}

impl From<Owned> for Entry {
    fn from(o: Owned) -> Entry {
        Entry { end: o.range.end(), node: o.node, version: o.version, flushed: o.flushed }
    }
}

/// A stored tree whose intervals are empty, overlap or are out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ownership tree is damaged at {0}")]
pub struct DamagedTree(pub ByteRange);

impl TryFrom<Vec<Owned>> for OwnershipTree {
    type Error = DamagedTree;

    fn try_from(list: Vec<Owned>) -> Result<OwnershipTree, DamagedTree> {
        let mut tree = OwnershipTree::new();
        let mut end = 0;
        for o in list {
            if o.range.is_empty() || o.range.start() < end || o.node == NodeId::NOBODY {
                return Err(DamagedTree(o.range));
            }
            end = o.range.end();
            tree.add(o.range.start(), Entry::from(o));
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
