//! Which bytes leave the buffer first when room is needed: chunks of files in an order that a
//! policy gives. Pure: what of a chunk may go is known by the file's view, not by this.
//!
//! | policy | the first to go |
//! |--------|-----------------|
//! | lru    | what was used longest ago: the default |
//! | mru    | what was used last: for programs that read more than the buffer holds, again and again |
//! | fifo   | what came first, however much it is used |
//! | lfu    | what was used in the fewest visits, of these the one used longest ago |
//!
//! A new policy is a row of [`TABLE`].

use ebb_types::{ByteRange, Ino};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes that come and go together. Small enough that a file larger than the buffer keeps its
/// useful parts, large enough that terabytes have few of them.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// The name of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictPolicy {
    /// Least recently used first.
    #[default]
    Lru,
    /// Most recently used first.
    Mru,
    /// First in, first out.
    Fifo,
    /// Least frequently used first.
    Lfu,
}

/// Smaller ones go first.
type Rank = (u64, u64);

struct Row {
    policy: EvictPolicy,
    rank: fn(&Use) -> Rank,
}

const TABLE: [Row; 4] = [
    Row { policy: EvictPolicy::Lru, rank: |u| (u.last, 0) },
    Row { policy: EvictPolicy::Mru, rank: |u| (u64::MAX - u.last, 0) },
    Row { policy: EvictPolicy::Fifo, rank: |u| (u.first, 0) },
    Row { policy: EvictPolicy::Lfu, rank: |u| (u.visits, u.last) },
];

/// A chunk of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Chunk {
    /// The file.
    pub ino: Ino,
    /// Its number in the file.
    pub index: u64,
}

impl Chunk {
    /// Its bytes.
    #[must_use]
    pub fn range(self) -> ByteRange {
        ByteRange::at(self.index.saturating_mul(CHUNK_BYTES), CHUNK_BYTES)
    }

    /// The chunks of a file that `range` meets.
    pub fn of(ino: Ino, range: ByteRange) -> impl Iterator<Item = Chunk> {
        let end = if range.is_empty() { 0 } else { (range.end() - 1) / CHUNK_BYTES + 1 };
        (range.start() / CHUNK_BYTES..end).map(move |index| Chunk { ino, index })
    }
}

/// How a chunk was used; times are positions in the order of all uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    first: u64,
    last: u64,
    visits: u64,
}

/// A place in the order, to go on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(Rank, Chunk);

impl Place {
    /// The chunk there.
    #[must_use]
    pub fn chunk(self) -> Chunk {
        self.1
    }
}

/// All chunks that may be in the buffer, in the order in which they go.
pub struct Order {
    rank: fn(&Use) -> Rank,
    clock: u64,
    uses: BTreeMap<Chunk, Use>,
    ranked: BTreeSet<Place>,
}

impl Order {
    /// An empty one.
    #[must_use]
    pub fn new(policy: EvictPolicy) -> Order {
        let row = TABLE.iter().find(|r| r.policy == policy);
        let rank = row.expect("the table has a row for every policy (tested)").rank;
        Order { rank, clock: 0, uses: BTreeMap::new(), ranked: BTreeSet::new() }
    }

    /// The chunk is used now.
    pub fn touch(&mut self, chunk: Chunk) {
        self.clock += 1;
        let now = self.clock;
        let new = match self.take(chunk) {
            Some(old) => Use { last: now, visits: old.visits + 1, ..old },
            None => Use { first: now, last: now, visits: 1 },
        };
        self.put(chunk, new);
    }

    /// Takes a chunk in that was forgotten; one that is known keeps its place.
    pub fn remember(&mut self, chunk: Chunk) {
        if !self.uses.contains_key(&chunk) {
            self.touch(chunk);
        }
    }

    /// Takes a chunk out.
    pub fn take(&mut self, chunk: Chunk) -> Option<Use> {
        let old = self.uses.remove(&chunk)?;
        self.ranked.remove(&Place((self.rank)(&old), chunk));
        Some(old)
    }

    /// Puts a chunk back that was taken out, unless it was used meanwhile.
    pub fn put_back(&mut self, chunk: Chunk, old: Use) {
        if !self.uses.contains_key(&chunk) {
            self.put(chunk, old);
        }
    }

    fn put(&mut self, chunk: Chunk, new: Use) {
        self.ranked.insert(Place((self.rank)(&new), chunk));
        self.uses.insert(chunk, new);
    }

    /// Takes out every chunk of a file.
    pub fn take_file(&mut self, ino: Ino) {
        let all = Chunk { ino, index: 0 }..=Chunk { ino, index: u64::MAX };
        let chunks: Vec<Chunk> = self.uses.range(all).map(|(chunk, _)| *chunk).collect();
        for chunk in chunks {
            self.take(chunk);
        }
    }

    /// The next `most` places behind `after`; from the beginning when there is none.
    #[must_use]
    pub fn behind(&self, after: Option<Place>, most: usize) -> Vec<Place> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        self.ranked.range((from, Unbounded)).take(most).copied().collect()
    }

    /// How many chunks it knows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.uses.len()
    }

    /// True when it knows none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.uses.is_empty()
    }
}

#[cfg(test)]
#[path = "evict_tests.rs"]
mod tests;
