//! Zeros of new blocks that are left unclaimed. They are zeros for everybody without a claim; and
//! another node may have written there and not published it. When that node dies, its bytes come
//! back only if nobody has taken them meanwhile.

use crate::cache;
use ebb_consistency::claim::BLOCK;
use ebb_types::ByteRange;
use rangemap::RangeSet;
use std::fs::File;
use std::io;

/// Bytes looked at together.
const CELL: usize = 32;

/// Shorter runs are claimed: records of others hardly are so short, and content can be full of
/// them.
const RUN_LEAST: u64 = 64;

/// So many runs of one look at most, the longest ones: the service keeps every gap.
const RUNS_MAX: usize = 1 << 14;

/// Bytes read at a time.
const STEP: u64 = 1 << 20;

/// What of the new blocks `new` is not to be claimed: runs of zeros, and of long runs the blocks at
/// both ends, where another record can be. Sorted; nothing of `tail`.
pub fn unclaimed(cache: &File, new: &[ByteRange], tail: ByteRange) -> io::Result<Vec<ByteRange>> {
    let mut runs = Vec::new();
    let mut bytes = vec![0; STEP as usize];
    for range in new {
        let mut at = range.start();
        while at < range.end() {
            let part = &mut bytes[..(range.end() - at).min(STEP) as usize];
            cache::read_padded(cache, part, at)?;
            zero_runs(at, part, &mut runs);
            at += part.len() as u64;
        }
    }
    runs.retain(|r| r.len() >= RUN_LEAST);
    if runs.len() > RUNS_MAX {
        runs.sort_unstable_by_key(|r| std::cmp::Reverse(r.len()));
        runs.truncate(RUNS_MAX);
    }
    let mut ends: Vec<ByteRange> = runs.into_iter().flat_map(ends_of).collect();
    ends.sort_unstable();
    Ok(without(&ends, &[tail]))
}

/// What of `ranges` is not in `taken`.
pub fn without(ranges: &[ByteRange], taken: &[ByteRange]) -> Vec<ByteRange> {
    let taken: RangeSet<u64> = taken.iter().filter(|r| !r.is_empty()).map(|r| r.to_std()).collect();
    let gaps = |r: &ByteRange| taken.gaps(&r.to_std()).collect::<Vec<_>>();
    let parts = ranges.iter().filter(|r| !r.is_empty()).flat_map(gaps);
    parts.map(|r| ByteRange::new(r.start, r.end)).collect()
}

fn ends_of(run: ByteRange) -> Vec<ByteRange> {
    match run.len() <= 2 * BLOCK {
        true => vec![run],
        false => vec![
            ByteRange::new(run.start(), run.start() + BLOCK),
            ByteRange::new(run.end() - BLOCK, run.end()),
        ],
    }
}

/// The runs of zeros in `bytes`, which are at `at`, that have a whole cell in them. A run that
/// touches the one before becomes one with it.
fn zero_runs(at: u64, bytes: &[u8], runs: &mut Vec<ByteRange>) {
    let mut i = 0;
    while i < bytes.len() {
        let cell = &bytes[i..bytes.len().min(i + CELL)];
        if !is_zero(cell) {
            i += cell.len();
            continue;
        }
        let before = bytes[..i].iter().rev().take_while(|b| **b == 0).count();
        let mut end = i + cell.len();
        while end < bytes.len() && is_zero(&bytes[end..bytes.len().min(end + CELL)]) {
            end = bytes.len().min(end + CELL);
        }
        end += bytes[end..].iter().take_while(|b| **b == 0).count();
        let run = ByteRange::new(at + (i - before) as u64, at + end as u64);
        match runs.last_mut() {
            Some(last) if last.end() == run.start() => {
                *last = ByteRange::new(last.start(), run.end());
            }
            _ => runs.push(run),
        }
        i = end;
    }
}

fn is_zero(cell: &[u8]) -> bool {
    cell.iter().fold(0, |all, b| all | b) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::FileExt;

    fn found(content: &[u8], new: &[ByteRange], tail: ByteRange) -> Vec<ByteRange> {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(content, 0).expect("write");
        unclaimed(&file, new, tail).expect("look")
    }

    #[test]
    fn the_ends_of_long_runs_and_the_whole_of_short_ones() {
        let mut content = vec![7; 100_000];
        content[1000..2000].fill(0);
        content[3000..3040].fill(0);
        content[10_000..90_000].fill(0);
        let all = [ByteRange::new(0, 100_000)];
        let want = [(1000, 2000), (10_000, 14_096), (85_904, 90_000)];
        let want = want.map(|(a, b)| ByteRange::new(a, b));
        assert_eq!(found(&content, &all, ByteRange::new(0, 0)), want);
        let part = [ByteRange::new(0, 1500)];
        assert_eq!(found(&content, &part, ByteRange::new(0, 0)), [ByteRange::new(1000, 1500)]);
        let tail = ByteRange::new(1499, 1500);
        assert_eq!(found(&content, &part, tail), [ByteRange::new(1000, 1499)]);
    }

    #[test]
    fn runs_go_on_over_the_bounds_of_reading() {
        let content = vec![0; 3 << 20];
        let want = [ByteRange::new(0, BLOCK), ByteRange::new((3 << 20) - BLOCK, 3 << 20)];
        assert_eq!(found(&content, &[ByteRange::new(0, 3 << 20)], ByteRange::new(0, 0)), want);
    }

    proptest! {
        #[test]
        fn only_zeros_are_left_out_and_all_long_runs(
            pieces in prop::collection::vec((0u8..3, 1usize..200), 1..60), from in 0usize..300,
        ) {
            let content: Vec<u8> =
                pieces.iter().flat_map(|(value, len)| vec![*value; *len]).collect();
            let from = from.min(content.len());
            let range = ByteRange::new(from as u64, content.len() as u64);
            let left = found(&content, &[range], ByteRange::new(0, 0));
            let mut want = Vec::new();
            let mut i = from;
            while i < content.len() {
                let run = content[i..].iter().take_while(|b| **b == 0).count();
                if run as u64 >= RUN_LEAST {
                    want.push(ByteRange::at(i as u64, run as u64));
                }
                i += run.max(1);
            }
            want.retain(|r| r.len() <= 2 * BLOCK);
            let short: Vec<_> = left.iter().filter(|r| want.contains(r)).collect();
            prop_assert_eq!(short.len(), want.len());
            for range in &left {
                let bytes = &content[range.start() as usize..range.end() as usize];
                prop_assert!(bytes.iter().all(|b| *b == 0));
            }
        }
    }
}
