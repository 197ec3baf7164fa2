//! Cuts a scatter list into the requests that go over the wire.

use crate::wire::RANGES_MAX;
use ebb_types::ByteRange;

/// Bytes of one request. Large enough that its fixed costs vanish, small enough that a short
/// read queued behind one waits well under a millisecond and that several connections share
/// a large read.
pub const PART_BYTES: u64 = 1 << 20;

/// What one request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub ranges: Vec<ByteRange>,
    pub len: usize,
}

/// `ranges` in order, in parts of at most `part_bytes` and [`RANGES_MAX`] ranges, without the
/// empty ones.
pub fn split(ranges: &[ByteRange], part_bytes: u64) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut part = Part { ranges: Vec::new(), len: 0 };
    for range in ranges {
        let mut rest = *range;
        while !rest.is_empty() {
            let room = part_bytes - part.len as u64;
            if room == 0 || part.ranges.len() == RANGES_MAX {
                parts.push(std::mem::replace(&mut part, Part { ranges: Vec::new(), len: 0 }));
                continue;
            }
            let piece = ByteRange::at(rest.start(), rest.len().min(room));
            part.ranges.push(piece);
            part.len += piece.len() as usize;
            rest = ByteRange::new(piece.end(), rest.end());
        }
    }
    if part.len > 0 {
        parts.push(part);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offsets(ranges: &[ByteRange]) -> Vec<u64> {
        ranges.iter().flat_map(|r| r.to_std()).collect()
    }

    proptest! {
        #[test]
        fn parts_are_bounded_and_together_the_same_bytes(
            list in prop::collection::vec((0..5000u64, 0..300u64), 0..40), part_bytes in 1..500u64,
        ) {
            let ranges: Vec<_> = list.iter().map(|(s, l)| ByteRange::at(*s, *l)).collect();
            let parts = split(&ranges, part_bytes);
            for part in &parts {
                prop_assert!(part.len > 0 && part.len as u64 <= part_bytes);
                prop_assert_eq!(part.len as u64, part.ranges.iter().map(|r| r.len()).sum::<u64>());
                prop_assert!(part.ranges.iter().all(|r| !r.is_empty()));
            }
            let together: Vec<_> = parts.iter().flat_map(|p| offsets(&p.ranges)).collect();
            prop_assert_eq!(together, offsets(&ranges));
        }
    }

    #[test]
    fn a_part_has_a_bounded_number_of_ranges() {
        let ranges = vec![ByteRange::at(7, 1); RANGES_MAX * 2 + 1];
        let parts: Vec<_> = split(&ranges, PART_BYTES).iter().map(|p| p.ranges.len()).collect();
        assert_eq!(parts, [RANGES_MAX, RANGES_MAX, 1]);
    }
}
