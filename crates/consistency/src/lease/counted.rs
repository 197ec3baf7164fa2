//! Ranges in use by several at a time, counted per byte.

use ebb_types::ByteRange;
use rangemap::RangeMap;

/// How many use each byte.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Counted {
    counts: RangeMap<u64, u32>,
}

impl Counted {
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

    /// The parts of `range` that nobody uses.
    pub(crate) fn idle(&self, range: ByteRange) -> Vec<ByteRange> {
        if self.counts.is_empty() || range.is_empty() {
            return vec![range];
        }
        self.counts.gaps(&range.to_std()).map(|r| ByteRange::new(r.start, r.end)).collect()
    }

    fn pieces(&self, range: ByteRange) -> Vec<(ByteRange, u32)> {
        if range.is_empty() {
            return Vec::new();
        }
        let found = self.counts.overlapping(range.to_std());
        found.map(|(r, n)| (ByteRange::new(r.start, r.end).intersect(range), *n)).collect()
    }
}
