//! Runs and blocks against byte-by-byte definitions. That claims of several nodes come out right
//! is tried on real mounts (`tests/tests/past/passthrough.rs`).

use super::*;
use crate::table::ModelTable;
use proptest::prelude::*;

proptest! {
    #[test]
    fn runs_are_exactly_the_changed_bytes(
        at in 0..1000u64,
        now in prop::collection::vec(0..3u8, 0..200),
        then in prop::collection::vec(0..3u8, 0..200),
    ) {
        let runs = changed_runs(at, &now, &then);
        for (i, new) in now.iter().enumerate() {
            let offset = at + i as u64;
            let inside = runs.iter().any(|r| r.contains_offset(offset));
            prop_assert_eq!(inside, *new != then.get(i).copied().unwrap_or(0), "byte {}", i);
        }
        for pair in runs.windows(2) {
            prop_assert!(pair[0].end() < pair[1].start(), "runs are maximal and in order");
        }
        prop_assert!(runs.iter().all(|r| !r.is_empty() && r.end() <= at + now.len() as u64));
    }

    #[test]
    fn blocks_are_whole_and_end_with_the_file(
        start in 0..50_000u64,
        len in 0..20_000u64,
        size in 0..60_000u64,
    ) {
        let segment = ByteRange::at(start, len);
        let blocks = blocks_of(segment, size);
        let block = |offset: u64| offset / BLOCK;
        for offset in (0..70_000).step_by(97) {
            let touched = !segment.is_empty()
                && (block(segment.start())..=block(segment.end() - 1)).contains(&block(offset));
            prop_assert_eq!(blocks.contains_offset(offset), touched && offset < size);
        }
    }
}

#[test]
fn shared_claims_are_for_models_whose_chain_ends_with_a_look() {
    let table = ModelTable::builtin();
    for (name, exact) in [("posix", false), ("commit", false), ("session", true), ("mpiio", true)] {
        let model = table.get(name).expect("a built-in model");
        assert_eq!(shared_claims_are_exact(&model), exact, "{name}");
    }
}
