//! What a view can tell at a glance: sizes, sums, holes, and whether the cache file alone reads
//! right. Nothing here changes it, except that [`FileView::compact`] saves memory.

use super::FileView;
use super::known::Fact;
use super::local::Class;
use ebb_types::{ByteRange, NodeId, Version};

impl FileView {
    /// The size that this node sees: the published one, or the end of its last unattached byte.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.known.size.value.max(self.unattached_end())
    }

    /// The end of the last byte that was written here and not yet published; 0: there is none.
    #[must_use]
    pub fn unattached_end(&self) -> u64 {
        self.local.end_of(Class::Dirty).max(self.local.end_of(Class::Attaching))
    }

    /// The published size, as last learned.
    #[must_use]
    pub fn published_size(&self) -> u64 {
        self.known.size.value
    }

    /// True when, as far as is known, another node owns some byte.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        let others = |f: &Fact| f.owner != NodeId::NOBODY && f.owner != self.me;
        self.known.facts(ByteRange::ALL).any(|(_, f)| others(&f))
    }

    /// True when some written byte is not attached for certain.
    #[must_use]
    pub fn has_unattached(&self) -> bool {
        self.unattached_bytes() > 0
    }

    /// Written bytes that are not attached for certain.
    #[must_use]
    pub fn unattached_bytes(&self) -> u64 {
        self.local.bytes(Class::Dirty) + self.local.bytes(Class::Attaching)
    }

    /// Bytes that only this node's cache holds: unattached, or owned and not flushed.
    #[must_use]
    pub fn unflushed_bytes(&self) -> u64 {
        self.unattached_bytes() + self.local.bytes(Class::Unflushed)
    }

    /// Local bytes that others hold as well: clean, or owned and flushed.
    #[must_use]
    pub fn clean_bytes(&self) -> u64 {
        self.local.bytes(Class::Clean) + self.local.bytes(Class::Flushed)
    }

    /// Local bytes that this node does not own.
    #[must_use]
    pub fn borrowed_bytes(&self) -> u64 {
        self.local.bytes(Class::Clean)
    }

    /// Local bytes of `within` that others hold as well.
    #[must_use]
    pub fn clean_bytes_in(&self, within: ByteRange) -> u64 {
        let of = |class| self.local.of_class(class, within).iter().map(|r| r.len()).sum::<u64>();
        of(Class::Clean) + of(Class::Flushed)
    }

    /// True when some byte of `within` is in the cache file.
    #[must_use]
    pub fn holds_any(&self, within: ByteRange) -> bool {
        self.local.overlapping(within).next().is_some()
    }

    /// Owned flushed ranges within `within`: those that a detach would make droppable.
    #[must_use]
    pub fn detachable(&self, within: ByteRange) -> Vec<ByteRange> {
        self.local.of_class(Class::Flushed, within)
    }

    /// True when every byte of `range` is in the cache file.
    #[must_use]
    pub fn local(&self, range: ByteRange) -> bool {
        self.local.has_all(range)
    }

    /// True when all of `range` is here as a copy of bytes that nobody owns, and none has changed since `version` as far as is known: then another node that needs
    /// them as of that version can have them from here.
    #[must_use]
    pub fn has_copy(&self, range: ByteRange, version: Version) -> bool {
        let clean = self.local.of_class(Class::Clean, range);
        let bytes: u64 = clean.iter().map(|r| r.len()).sum();
        let current = |f: Fact| f.owner == NodeId::NOBODY && f.as_of >= version;
        bytes == range.len() && self.known.facts(range).all(|(_, f)| current(f))
    }

    /// True when every byte below the size is in the cache file or a hole that is a hole for
    /// everybody, as far as is known, and that is what must be seen: the cache file by itself reads right.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        if !self.is_current() {
            return false;
        }
        let gaps = self.local.gaps(ByteRange::new(0, self.size()));
        gaps.into_iter().all(|gap| {
            gap.start() >= self.known.base_len.value
                && self.known.facts(gap).all(|(_, f)| f.owner == NodeId::NOBODY)
        })
    }

    /// True when, as far as is known, there is no byte but zeros in the file: nothing local,
    /// nothing owned, nothing on the backing. What the cache file holds later was written here.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        self.is_current()
            && self.local.len() == 0
            && self.known.base_len.value == 0
            && self.known.next_owned_from(0).is_none()
    }

    /// Number of extents and facts kept, for status and for deciding on [`FileView::compact`].
    #[must_use]
    pub fn entries(&self) -> usize {
        self.local.len() + self.known.len()
    }

    /// Merges neighbouring owned extents of different versions within spans, to save memory,
    /// except where `busy` (all ranges that are being flushed).
    pub fn compact(&mut self, busy: &[ByteRange]) {
        self.local.compact(busy);
    }

    /// The first byte at or after `offset` that is not a hole; `None` when there is none.
    #[must_use]
    pub fn seek_data(&self, offset: u64) -> Option<u64> {
        let size = self.size();
        if offset < self.known.base_len.value.min(size) {
            return Some(offset);
        }
        let local = self.local.next_from(offset);
        let owned = self.known.next_owned_from(offset);
        local.into_iter().chain(owned).min().filter(|at| *at < size)
    }

    /// The first byte at or after `offset` that is a hole; the end of the file counts as one.
    /// `None` when `offset` is not in the file.
    #[must_use]
    pub fn seek_hole(&self, offset: u64) -> Option<u64> {
        let size = self.size();
        if offset >= size {
            return None;
        }
        let mut at = offset.max(self.known.base_len.value);
        while at < size {
            let local = self.local.at(at).map(ByteRange::end);
            match local.or_else(|| self.known.owned_until(at)) {
                Some(end) => at = end,
                None => break,
            }
        }
        Some(at.min(size))
    }
}
