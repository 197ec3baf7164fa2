//! How simulations in this crate are judged: by many seeds with nothing wrong, and by mistakes that are
//! planted in them, each of which some seed must show.

use std::fmt::Debug;

/// Runs every seed without a mistake; the sum of what the runs return.
pub(crate) fn healthy<B>(
    seeds: u64,
    run: impl Fn(u64, Option<B>) -> Result<usize, String>,
) -> usize {
    (0..seeds).map(|seed| run(seed, None).unwrap_or_else(|e| panic!("{e}"))).sum()
}

/// Each of the mistakes is shown by a seed.
pub(crate) fn every_one_is_caught<B: Copy + Debug, T>(
    bugs: &[B],
    seeds: u64,
    run: impl Fn(u64, Option<B>) -> Result<T, String>,
) {
    for bug in bugs {
        assert!((0..seeds).any(|seed| run(seed, Some(*bug)).is_err()), "{bug:?} is not caught");
    }
}
