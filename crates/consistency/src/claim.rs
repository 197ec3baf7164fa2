//! Claims of bytes by a writer whose exact writes are not known: the kernel wrote for it
//! (passthrough), and all there is to see is which 4 KiB blocks of its cache file hold data. Pure
//! rules; how the blocks are found and fetched is the daemon's business.
//!
//! A *block* claim says: this node wrote somewhere in these blocks of a file that held nothing but
//! zeros when it was opened here. Several nodes can truthfully claim the same block, each having
//! written other bytes of it. When a node attaches a block claim and another node already
//! claimed bytes in it, the claim is *contested*: the later one fetches the other's bytes and
//! takes them wherever its own byte is zero ([`merge`]), then owns the merged block.
//!
//! # When this is exact
//!
//! "My byte is zero" is read as "I did not write it". That is wrong for one case only: the byte
//! was written by the other node, and then overwritten with zero here. Both writes conflict, so in
//! a race-free program the model's chain lies between them. If that chain *ends with an
//! operation of the second process* ([`crate::Msc::ends_with_observation`]: session ends with an
//! open, mpiio with a sync), this node asked the service after the other's write was published
//! and before it wrote its zero; that query ended the claim's life (the file did not
//! hold nothing but zeros any more, or the claim was attached before) and the case cannot arise.
//!
//! Under posix and commit the chain may end with a message alone: another node writes 5 and
//! commits, this one learns of it from the program and overwrites with 0 without ever asking.
//! Its 0 would be taken for "not written" and 5 would come back. There a block claim is right
//! only for a node that is the sole writer for the whole time of the open.

use crate::model::Model;
use ebb_types::ByteRange;
use rangemap::RangeMap;

/// Size of the blocks in which a file system tells data from holes.
pub const BLOCK: u64 = 4096;

/// How well the written bytes of a claim are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Precision {
    /// Every byte of it was written.
    Exact,
    /// Somewhere in each of its blocks something was written.
    Block,
}

/// A range of bytes that a node says it wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The bytes.
    pub range: ByteRange,
    /// How well they are known.
    pub precision: Precision,
}

/// May several nodes write one file through the kernel at once under this model, and claim blocks
/// afterwards?
#[must_use]
pub fn shared_block_claims_are_exact(model: &Model) -> bool {
    model.msc().ends_with_observation()
}

/// The claims of one node for one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    ranges: RangeMap<u64, Precision>,
}

impl Claims {
    /// No claims.
    #[must_use]
    pub fn new() -> Claims {
        Claims::default()
    }

    /// Those bytes were written: known exactly, whatever was known before.
    pub fn add_exact(&mut self, range: ByteRange) {
        if !range.is_empty() {
            self.ranges.insert(range.to_std(), Precision::Exact);
        }
    }

    /// The cache file holds data in `segment` (as SEEK_DATA and SEEK_HOLE say) and is `size`
    /// bytes long. Claims the whole blocks, up to the size, where no exact claim is there already.
    pub fn add_segment(&mut self, segment: ByteRange, size: u64) {
        if segment.is_empty() {
            return;
        }
        let start = segment.start() / BLOCK * BLOCK;
        let end = segment.end().checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX).min(size);
        if start >= end {
            return;
        }
        let outer = start..end;
        let gaps: Vec<_> = self.ranges.gaps(&outer).collect();
        gaps.into_iter().for_each(|gap| self.ranges.insert(gap, Precision::Block));
    }

    /// All claims in order.
    pub fn iter(&self) -> impl Iterator<Item = Claim> + '_ {
        self.ranges.iter().map(|(r, p)| Claim { range: (r.start..r.end).into(), precision: *p })
    }

    /// The ranges to attach, whatever their precision.
    #[must_use]
    pub fn ranges(&self) -> Vec<ByteRange> {
        let mut out: Vec<ByteRange> = Vec::new();
        for claim in self.iter() {
            match out.last_mut() {
                Some(last) if last.end() == claim.range.start() => {
                    *last = ByteRange::new(last.start(), claim.range.end());
                }
                _ => out.push(claim.range),
            }
        }
        out
    }

    /// The bytes that must be fetched from the owner of `theirs` and merged before these claims
    /// are attached: what both claim, as far as it is not known exactly here.
    #[must_use]
    pub fn contested(&self, theirs: &[ByteRange]) -> Vec<ByteRange> {
        let mut out = Vec::new();
        for other in theirs.iter().filter(|r| !r.is_empty()) {
            let meets = self.ranges.overlapping(other.to_std());
            let blocks = meets.filter(|(_, p)| **p == Precision::Block);
            out.extend(blocks.map(|(r, _)| other.intersect(ByteRange::new(r.start, r.end))));
        }
        out
    }
}

/// Takes the other's byte wherever the own one is zero. Both speak of the same bytes; what the
/// other does not have counts as zeros.
pub fn merge(own: &mut [u8], other: &[u8]) {
    for (mine, theirs) in own.iter_mut().zip(other) {
        if *mine == 0 {
            *mine = *theirs;
        }
    }
}

#[cfg(test)]
#[path = "claim_tests.rs"]
mod tests;
