//! Bytes that are being written into the cache file right now. Nobody may put fetched bytes
//! there, drop them or count them as flushed until the writer is done.

use super::bytes;
use ebb_types::ByteRange;
use rangemap::RangeMap;

/// Writes in progress, counted per byte.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Writing {
    counts: RangeMap<u64, u32>,
}

impl Writing {
    pub(crate) fn begin(&mut self, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        let outer = range.to_std();
        let gaps: Vec<_> = self.counts.gaps(&outer).collect();
        let more: Vec<_> = self.pieces(range);
        gaps.into_iter().for_each(|gap| self.counts.insert(gap, 1));
        more.into_iter().for_each(|(r, n)| self.counts.insert(r.to_std(), n.saturating_add(1)));
    }

    pub(crate) fn end(&mut self, range: ByteRange) {
        for (r, n) in self.pieces(range) {
            match n {
                0 | 1 => self.counts.remove(r.to_std()),
                n => self.counts.insert(r.to_std(), n - 1),
            }
        }
    }

    /// The parts of `range` that nobody is writing.
    pub(crate) fn idle(&self, range: ByteRange) -> Vec<ByteRange> {
        if self.counts.is_empty() || range.is_empty() {
            return vec![range];
        }
        self.counts.gaps(&range.to_std()).map(|r| bytes(&r)).collect()
    }

    fn pieces(&self, range: ByteRange) -> Vec<(ByteRange, u32)> {
        if range.is_empty() {
            return Vec::new();
        }
        let found = self.counts.overlapping(range.to_std());
        found.map(|(r, n)| (bytes(r).intersect(range), *n)).collect()
    }
}
