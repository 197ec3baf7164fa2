//! Whose bytes count where several nodes have some of one file. Pure: statements in, ranges out.
//!
//! The rule by which recoveries that run at the same time write to one file without a lock:
//!
//! 1. Before a node writes anything, its statement with all its claims is on the backing. It reads
//!    the others' statements after that.
//! 2. It never writes a byte of which another statement claims a newer version.
//! 3. It writes a byte of which another statement claims an older version only when that one is not
//!    [`Fate::Pending`] any more: its node has written the byte, or will never do so.
//!
//! Of two nodes that claim a byte, at least the one that made its statement later sees the other.
//! If that is the older one, it does not write. If it is the newer one, it waits for the older one.
//! So the newer byte is written last, in whatever order they run and wherever they are killed: a
//! run that is repeated makes its statement anew, in which only what was written before is not
//! pending, and reads the others' after that. Nobody waits for newer bytes, so nobody waits in a
//! circle.

use super::statement::{Claim, Fate, Key, Statement};
use ebb_types::{ByteRange, Extents, Version};

/// What a node may do with its bytes now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Theirs is the newest.
    pub write: Vec<ByteRange>,
    /// Another node's is newer.
    pub overtaken: Vec<ByteRange>,
    /// A node that has older ones may still write them; which.
    pub wait: Vec<(ByteRange, String)>,
}

/// What the file lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Nobody has said anything of these bytes.
    pub holes: Vec<ByteRange>,
    /// A node has them in its cache and has not written them.
    pub waiting: Vec<(ByteRange, String)>,
    /// A node had them: lost with its power, or flushed to a file that is gone.
    pub lost: Vec<(ByteRange, String)>,
    /// Others had the file, too, and none of them has said anything: nobody knows where it ends.
    pub silent: bool,
    /// This node has them, and what is there may be newer, of a node that has said nothing.
    pub doubtful: Vec<ByteRange>,
}

impl Missing {
    /// True when the file is whole.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let named = self.waiting.is_empty() && self.lost.is_empty();
        self.holes.is_empty() && named && !self.silent && self.doubtful.is_empty()
    }

    /// How many bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let named = self.waiting.iter().chain(&self.lost).map(|(r, _)| r);
        self.holes.iter().chain(&self.doubtful).chain(named).map(|r| r.len()).sum()
    }

    /// For people: which ranges, and whose.
    #[must_use]
    pub fn describe(&self) -> String {
        const SHOWN: usize = 3;
        let mut said = Vec::new();
        if self.silent && self.holes.is_empty() {
            said.push(
                "waiting for bytes of other nodes: they had the file, too, and none of them has said \
                 what it has"
                    .to_owned(),
            );
        }
        let list = |ranges: &[ByteRange]| {
            let some = ranges.iter().take(SHOWN).map(|r| format!("{}-{}", r.start(), r.end()));
            let more = ranges.len().saturating_sub(SHOWN);
            let more = (more > 0).then(|| format!("and {more} more"));
            some.chain(more).collect::<Vec<_>>().join(", ")
        };
        if !self.holes.is_empty() {
            let (holes, bytes) =
                (list(&self.holes), self.holes.iter().map(|r| r.len()).sum::<u64>());
            said.push(format!(
                "waiting for bytes of other nodes: nobody has said yet what is in {bytes} of them \
                 ({holes})"
            ));
        }
        if !self.doubtful.is_empty() {
            let (ranges, bytes) =
                (list(&self.doubtful), self.doubtful.iter().map(|r| r.len()).sum::<u64>());
            said.push(format!(
                "waiting for other nodes: what the backing has of {bytes} of them ({ranges}) may be \
                 newer, from a node that has not been recovered"
            ));
        }
        for (ranges, what) in [
            (&self.waiting, "not yet brought by"),
            (&self.lost, "in no cache and no file, lost with"),
        ] {
            let mut nodes: Vec<&str> = ranges.iter().map(|(_, n)| n.as_str()).collect();
            nodes.sort_unstable();
            nodes.dedup();
            if !nodes.is_empty() {
                let ranges: Vec<ByteRange> = ranges.iter().map(|(r, _)| *r).collect();
                said.push(format!("{} {what} {}", list(&ranges), nodes.join(", ")));
            }
        }
        said.join("; ")
    }
}

/// The cuts of all nodes.
struct Cuts {
    /// By version, each with the least length to which the file was cut at it or later.
    least: Vec<(Version, u64)>,
}

impl Cuts {
    fn of<'a>(all: impl Iterator<Item = &'a Statement>) -> Cuts {
        let mut least: Vec<(Version, u64)> =
            all.flat_map(|s| s.cuts.iter().map(|(len, at)| (*at, *len))).collect();
        least.sort_unstable();
        let mut after = u64::MAX;
        for (_, len) in least.iter_mut().rev() {
            after = after.min(*len);
            *len = after;
        }
        Cuts { least }
    }

    /// The least length to which the file was cut after `version`.
    fn after(&self, version: Version) -> Option<u64> {
        let first = self.least.partition_point(|(at, _)| *at <= version);
        self.least.get(first).map(|(_, len)| *len)
    }

    /// The length to which it was cut last.
    fn last(&self) -> u64 {
        self.least.last().map_or(0, |(_, len)| *len)
    }

    /// The part of `range`, of this key, that no cut has made void.
    fn valid(&self, range: ByteRange, key: Key) -> ByteRange {
        let cut = self.after(key.version);
        let end = cut.map_or(range.end(), |len| range.end().min(len.max(range.start())));
        ByteRange::new(range.start(), end)
    }
}

/// Decides about the bytes of `mine` that are not written. `force`: what others have and have not
/// written does not count.
#[must_use]
pub fn decide(mine: &Statement, others: &[Statement], force: bool) -> Decision {
    let mut decision = Decision::default();
    let cuts = Cuts::of(others.iter().chain([mine]));
    for (range, claim) in mine.claims.iter().filter(|(_, c)| c.fate == Fate::Pending) {
        let kept = cuts.valid(range, claim.key);
        decision.overtaken.push(ByteRange::new(kept.end(), range.end()));
        let mut left: Extents<Verdict> = [(kept, Verdict::Write)].into_iter().collect();
        for (at, other) in others.iter().enumerate() {
            let rival = (claim.key, mine.node.as_str());
            let found = other.claims.overlapping(kept);
            let found =
                found.map(|(r, c)| (cuts.valid(r, c.key), c)).filter(|(r, _)| !r.is_empty());
            for (part, theirs) in found.collect::<Vec<_>>() {
                let newer = (theirs.key, other.node.as_str()) > rival;
                let verdict = match theirs.fate {
                    Fate::Pending | Fate::Lost if force => continue,
                    _ if newer => Verdict::Overtaken,
                    Fate::Pending => Verdict::Wait(at),
                    _ => continue,
                };
                worsen(&mut left, part, verdict);
            }
        }
        for (part, verdict) in left.iter() {
            match verdict {
                Verdict::Write => decision.write.push(part),
                Verdict::Overtaken => decision.overtaken.push(part),
                Verdict::Wait(at) => decision.wait.push((part, others[at].node.clone())),
            }
        }
    }
    decision.overtaken.retain(|r| !r.is_empty());
    decision
}

/// What becomes of own bytes, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Write,
    Wait(usize),
    Overtaken,
}

fn worsen(left: &mut Extents<Verdict>, range: ByteRange, verdict: Verdict) {
    let better: Vec<_> = left.overlapping(range).filter(|(_, had)| *had < verdict).collect();
    better.into_iter().for_each(|(part, _)| left.insert(part, verdict));
}

/// Where the last byte ends that counts.
fn end_of_bytes(all: &[Statement], cuts: &Cuts) -> u64 {
    let claims = all.iter().flat_map(|s| s.claims.iter());
    let kept = claims.map(|(r, c)| cuts.valid(r, c.key)).filter(|r| !r.is_empty());
    kept.map(|r| r.end()).max().unwrap_or(0)
}

/// Claimed bytes that somebody has cut off; another one may have newer ones there.
fn cut_off(all: &[Statement], cuts: &Cuts) -> Extents<()> {
    let claims = all.iter().flat_map(|s| s.claims.iter());
    let cut = claims.map(|(r, c)| ByteRange::new(cuts.valid(r, c.key).end(), r.end()));
    cut.filter(|r| !r.is_empty()).map(|r| (r, ())).collect()
}

/// The size that the file has when all is there.
#[must_use]
pub fn size(all: &[Statement]) -> u64 {
    let cuts = Cuts::of(all.iter());
    let told = all.iter().map(|s| cuts.after(s.known).map_or(s.size, |len| s.size.min(len)));
    told.max().unwrap_or(0).max(end_of_bytes(all, &cuts))
}

fn has_bytes(statement: &Statement, cuts: &Cuts) -> bool {
    statement.claims.iter().any(|(r, c)| !cuts.valid(r, c.key).is_empty())
}

/// True when nobody has said that it has a byte, but for those that were cut off.
#[must_use]
pub fn is_nobodys(all: &[Statement]) -> bool {
    let cuts = Cuts::of(all.iter());
    !all.iter().any(|s| has_bytes(s, &cuts))
}

/// So much of the file is there for certain, as bytes or as a length that somebody set: what a node has heard of
/// the length besides may be older than a cut of which nobody's journal tells.
fn vouched(all: &[Statement], base: u64) -> u64 {
    let cuts = Cuts::of(all.iter());
    cuts.last().max(end_of_bytes(all, &cuts)).max(base)
}

/// What is missing of a file of which the backing had the first `base` bytes before. `everybody`: no node
/// of the job has more to say than it has said, so that a gap between bytes is a hole.
#[must_use]
pub fn missing(all: &[Statement], base: u64, everybody: bool) -> Missing {
    let cuts = Cuts::of(all.iter());
    let whole = ByteRange::new(0, size(all));
    let mut best: Extents<(Claim, usize)> = Extents::new();
    for (at, statement) in all.iter().enumerate() {
        for (range, claim) in statement.claims.iter() {
            let range = cuts.valid(range, claim.key);
            let rank = |(c, at): (Claim, usize)| (c.key, all[at].node.as_str());
            let mut new: Vec<ByteRange> = best.gaps(range).collect();
            let weaker = best.overlapping(range).filter(|(_, had)| rank(*had) < rank((claim, at)));
            new.extend(weaker.map(|(r, _)| r));
            new.into_iter().for_each(|r| best.insert(r, (claim, at)));
        }
    }
    let mut missing = Missing::default();
    // Who was alone knows of every byte; but nobody is, of whom another one has bytes that count.
    let others = |s: &Statement| all.iter().any(|o| o.node != s.node && has_bytes(o, &cuts));
    let alone = all.iter().any(|s| s.alone && !others(s));
    missing.silent = all.len() == 1 && !alone && base == 0 && !everybody;
    if !alone {
        // Others may have written into a gap.
        let known = if everybody { vouched(all, base) } else { base };
        let gaps = best.gaps(whole).map(|r| ByteRange::new(r.start().max(known), r.end()));
        missing.holes.extend(gaps.filter(|r| !r.is_empty()));
    }
    // The backing has bytes that somebody has cut off, or others that were written there since: nobody knows.
    let behind = cut_off(all, &cuts);
    let longer = ByteRange::new(whole.end().min(base), base);
    missing.holes.extend(behind.overlapping(longer).map(|(r, ())| r).filter(|r| !r.is_empty()));
    for (range, (claim, at)) in best.iter() {
        let node = all[at].node.clone();
        match claim.fate {
            Fate::Written => {}
            Fate::Pending | Fate::Overtaken => missing.waiting.push((range, node)),
            Fate::Lost => missing.lost.push((range, node)),
        }
    }
    missing
}

/// Bytes that were written before it was known that somebody had cut them off, and that are part
/// of the file again: zeros. Not of the `base` bytes that the backing had before.
#[must_use]
pub fn void(all: &[Statement], base: u64) -> Vec<ByteRange> {
    let cuts = Cuts::of(all.iter());
    let size = size(all);
    let whole = ByteRange::new(base.min(size), size);
    let cut = cut_off(all, &cuts);
    let mut void: Extents<()> = cut.overlapping(whole).collect();
    for (range, claim) in all.iter().flat_map(|s| s.claims.iter()) {
        void.remove(cuts.valid(range, claim.key));
    }
    void.iter().map(|(r, ())| r).collect()
}

#[cfg(test)]
mod cuts_tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn they_are_as_one_by_one(
            said in prop::collection::vec((0..20u64, 0..20u64), 0..12),
            versions in prop::collection::vec(0..22u64, 1..8),
        ) {
            let told = said.iter().map(|(len, at)| (*len, Version(*at))).collect();
            let statement = Statement { cuts: told, ..super::super::tests::statement("a", &[]) };
            let cuts = Cuts::of([&statement].into_iter());
            for version in versions {
                let newer = said.iter().filter(|(_, at)| version < *at).map(|(len, _)| *len);
                prop_assert_eq!(cuts.after(Version(version)), newer.min());
            }
            let last = said.iter().map(|(_, at)| *at).max();
            let want = said.iter().filter(|(_, at)| Some(*at) == last).map(|(len, _)| *len).max();
            prop_assert_eq!(cuts.last(), want.unwrap_or(0));
        }
    }
}
