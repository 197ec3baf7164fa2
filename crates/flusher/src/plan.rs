//! From the ranges of a grant to the order in which they are written: merged, ascending, in
//! pieces of bounded size. Pure.

use ebb_types::ByteRange;

/// Size of one write call, and so of what a worker does between two looks at whether it should
/// stop. Larger ones gained nothing (see `ebb-backend`'s `copy_ways`).
pub(crate) const PIECE: u64 = 1 << 20;

/// A file cannot be longer than the kernel's signed offsets.
const LONGEST_FILE: u64 = i64::MAX as u64;

/// The same bytes, each once, ascending, cut at multiples of [`PIECE`]. None when a range lies
/// where no file can have bytes.
pub(crate) fn pieces(ranges: impl Iterator<Item = ByteRange>) -> Option<Vec<ByteRange>> {
    let mut sorted: Vec<ByteRange> = ranges.filter(|r| !r.is_empty()).collect();
    sorted.sort_unstable();
    if sorted.iter().any(|r| r.end() > LONGEST_FILE) {
        return None;
    }
    let mut merged: Vec<ByteRange> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match merged.last_mut() {
            Some(last) if range.start() <= last.end() => {
                *last = ByteRange::new(last.start(), last.end().max(range.end()));
            }
            _ => merged.push(range),
        }
    }
    Some(merged.into_iter().flat_map(cut).collect())
}

fn cut(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let mut at = range.start();
    std::iter::from_fn(move || {
        let end = ((at / PIECE + 1) * PIECE).min(range.end());
        let piece = ByteRange::new(at, end);
        at = end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// How many bytes to ask for at offset `from`, so that a file without holes is granted up to a
/// multiple of `chunk`.
pub(crate) fn aligned_most(from: u64, most: u64, chunk: u64) -> u64 {
    let end = from.saturating_add(most);
    let boundary = end - end % chunk;
    if boundary > from { boundary - from } else { most }
}

/// The size of the next grants after one of `size` bytes took `took_share` of the time that a
/// grant may take (and was stopped, or not).
pub(crate) fn next_grant_size(size: u64, took_share: f64, stopped: bool, most: u64) -> u64 {
    let next = match took_share {
        _ if stopped => size / 2,
        t if t > 1.0 => size / 2,
        t if t < 0.5 => size.saturating_mul(2),
        _ => size,
    };
    next.clamp(PIECE, most.max(PIECE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn some_ranges() -> impl Strategy<Value = Vec<ByteRange>> {
        // Small numbers around piece boundaries: overlaps, touching ranges and cuts are common.
        let point = (0u64..4, 0u64..40).prop_map(|(p, d)| (p * PIECE + d).saturating_sub(20));
        let range = (point, 0u64..40).prop_map(|(start, len)| ByteRange::at(start, len));
        proptest::collection::vec(range, 0..12)
    }

    proptest! {
        #[test]
        fn every_byte_once_in_order_in_pieces(ranges in some_ranges()) {
            let want: BTreeSet<u64> = ranges.iter().flat_map(|r| r.to_std()).collect();
            let plan = pieces(ranges.into_iter()).unwrap();
            let got: Vec<u64> = plan.iter().flat_map(|r| r.to_std()).collect();
            prop_assert_eq!(got, want.into_iter().collect::<Vec<_>>());
            for piece in &plan {
                prop_assert!(!piece.is_empty());
                prop_assert_eq!(piece.start() / PIECE, (piece.end() - 1) / PIECE);
            }
            // Two neighbours touch only where a piece boundary is.
            for pair in plan.windows(2) {
                prop_assert!(pair[0].end() < pair[1].start() || pair[1].start() % PIECE == 0);
            }
        }

        #[test]
        fn asked_bytes_end_at_a_chunk(from in 0u64..1 << 40, most in 1u64..1 << 30) {
            let chunk = 8 << 20;
            let asked = aligned_most(from, most, chunk);
            prop_assert!(asked > 0 && asked <= most);
            prop_assert!((from + asked).is_multiple_of(chunk) || (from % chunk) + most < chunk);
        }
    }

    #[test]
    fn impossible_offsets_are_refused() {
        assert_eq!(pieces([ByteRange::ALL].into_iter()), None);
        assert_eq!(pieces([ByteRange::new(u64::MAX, u64::MAX)].into_iter()), Some(vec![]));
    }

    #[test]
    fn grants_find_the_size_that_fits_their_time() {
        let most = 64 << 20;
        assert_eq!(next_grant_size(8 << 20, 0.1, false, most), 16 << 20);
        assert_eq!(next_grant_size(8 << 20, 0.7, false, most), 8 << 20);
        assert_eq!(next_grant_size(8 << 20, 1.5, false, most), 4 << 20);
        assert_eq!(next_grant_size(8 << 20, 0.1, true, most), 4 << 20);
        assert_eq!(next_grant_size(most, 0.1, false, most), most);
        assert_eq!(next_grant_size(PIECE, 9.0, true, most), PIECE);
    }
}
