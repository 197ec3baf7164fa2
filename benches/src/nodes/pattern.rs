//! Who writes which bytes of the shared file, and whether a map says so.

use ebb_types::ByteRange;
use ebb_wire::pb::OwnedRange;
use std::str::FromStr;

/// Bytes of a record: those of the IO500's `ior-hard`, aligned to nothing.
const RECORD: u64 = 47_008;

/// How the records of the nodes lie. In both the nodes take turns, record by record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// All are of one size.
    Strided,
    /// Each is of another size, between a quarter and seven quarters of that, as after compression.
    Irregular,
}

impl Pattern {
    /// As it is written.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Pattern::Strided => "strided",
            Pattern::Irregular => "irregular",
        }
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(word: &str) -> Result<Pattern, String> {
        let found = [Pattern::Strided, Pattern::Irregular].into_iter().find(|p| p.word() == word);
        found.ok_or_else(|| format!("'{word}' is neither strided nor irregular"))
    }
}

/// The shared file.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// How the records lie.
    pub pattern: Pattern,
    /// How many nodes write.
    pub nodes: u64,
    /// Records of each.
    pub records: u64,
}

impl Layout {
    /// Bytes of the file.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.nodes * self.records * RECORD
    }

    /// True when nobody writes anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The records of a node, in order.
    #[must_use]
    pub fn of_node(&self, node: u64) -> Vec<ByteRange> {
        (0..self.records).map(|turn| self.record(turn * self.nodes + node)).collect()
    }

    fn record(&self, number: u64) -> ByteRange {
        ByteRange::new(self.edge(number), self.edge(number + 1))
    }

    fn edge(&self, number: u64) -> u64 {
        let even = number * RECORD;
        match self.pattern {
            Pattern::Irregular if even != 0 && even != self.len() => {
                even + scattered(number) % (RECORD * 3 / 4)
            }
            _ => even,
        }
    }

    /// Whether `map`, sorted, gives each record to the node that wrote it; `owners` are the numbers of
    /// the nodes in the job.
    pub fn check(&self, map: &[OwnedRange], owners: &[u32]) -> Result<(), String> {
        let mut map = map.iter().peekable();
        for number in 0..self.nodes * self.records {
            let (record, owner) = (self.record(number), owners[(number % self.nodes) as usize]);
            let mut at = record.start();
            while at < record.end() {
                while map.peek().is_some_and(|held| held.end <= at) {
                    map.next();
                }
                match map.peek() {
                    Some(held) if held.start <= at && held.node == owner => at = held.end,
                    held => {
                        return Err(format!(
                            "byte {at} is of node {owner}, and the map has {held:?}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

/// A number that looks like chance and is the same in every run (SplitMix64).
fn scattered(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNERS: [u32; 3] = [7, 8, 11];

    fn layout(pattern: Pattern) -> Layout {
        Layout { pattern, nodes: 3, records: 20 }
    }

    fn map(layout: &Layout) -> Vec<OwnedRange> {
        let of = |node: usize| {
            layout.of_node(node as u64).into_iter().map(move |r| OwnedRange {
                start: r.start(),
                end: r.end(),
                node: OWNERS[node],
                ..OwnedRange::default()
            })
        };
        let mut all: Vec<OwnedRange> = (0..3).flat_map(of).collect();
        all.sort_by_key(|r| r.start);
        all
    }

    #[test]
    fn the_records_are_the_file_without_gaps() {
        for pattern in [Pattern::Strided, Pattern::Irregular] {
            let layout = layout(pattern);
            let all = map(&layout);
            assert_eq!((all[0].start, all[59].end), (0, layout.len()), "{pattern:?}");
            assert!(all.windows(2).all(|w| w[0].end == w[1].start), "{pattern:?}");
            assert!(all.iter().all(|r| r.end > r.start), "{pattern:?}");
        }
        let lengths = layout(Pattern::Irregular).of_node(0);
        let lengths: std::collections::BTreeSet<u64> = lengths.iter().map(|r| r.len()).collect();
        assert!(lengths.len() > 10, "{lengths:?}");
    }

    #[test]
    fn a_wrong_map_is_found() {
        for pattern in [Pattern::Strided, Pattern::Irregular] {
            let (layout, right) = (layout(pattern), map(&layout(pattern)));
            assert_eq!(layout.check(&right, &OWNERS), Ok(()));
            for at in 0..right.len() {
                let mut wrong = right.clone();
                wrong[at].node = OWNERS[(at + 1) % 3];
                assert!(layout.check(&wrong, &OWNERS).is_err(), "another owner at {at}");
                wrong = right.clone();
                wrong[at].end -= 1;
                assert!(layout.check(&wrong, &OWNERS).is_err(), "a byte less at {at}");
                wrong.remove(at);
                assert!(layout.check(&wrong, &OWNERS).is_err(), "nothing at {at}");
            }
        }
    }
}
