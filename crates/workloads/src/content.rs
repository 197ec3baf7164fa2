//! What the patterns write: every 4 KiB of a file begins with a number made from its offset and the
//! round, so that a read from the wrong place or of old bytes shows, at next to no cost.

use crate::WorkloadError;
use std::path::Path;

/// Distance of the marks in a file.
const STEP: u64 = 4096;
const MARK: usize = 8;

fn mark(offset: u64, round: u64) -> [u8; MARK] {
    let mixed = (offset ^ round.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).to_le_bytes()
}

/// The places of marks that lie wholly in a record of `len` bytes at `offset`, as offsets in it.
fn places(offset: u64, len: usize) -> impl Iterator<Item = usize> {
    let first = offset.next_multiple_of(STEP) - offset;
    (first..len as u64).step_by(STEP as usize).map(|p| p as usize).filter(move |p| p + MARK <= len)
}

/// Puts the marks of that place into a record.
pub fn stamp(record: &mut [u8], offset: u64, round: u64) {
    for at in places(offset, record.len()) {
        record[at..at + MARK].copy_from_slice(&mark(offset + at as u64, round));
    }
}

/// Are they there?
pub fn verify(record: &[u8], offset: u64, round: u64, path: &Path) -> Result<(), WorkloadError> {
    for at in places(offset, record.len()) {
        let place = offset + at as u64;
        if record[at..at + MARK] != mark(place, round) {
            return Err(WorkloadError::Wrong { path: path.display().to_string(), offset: place });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_place_another_round_and_zeros_are_seen() {
        let path = Path::new("f");
        for (offset, len) in [(0u64, 8192usize), (47_008, 47_008), (8192, 8192), (5000, 100_000)] {
            let mut record = vec![0; len];
            assert!(verify(&record, offset, 1, path).is_err());
            stamp(&mut record, offset, 1);
            assert!(verify(&record, offset, 1, path).is_ok());
            assert!(verify(&record, offset, 2, path).is_err());
            assert!(verify(&record, offset + 4096, 1, path).is_err());
        }
    }

    #[test]
    fn a_short_record_may_have_no_mark() {
        let mut record = vec![7; 100];
        stamp(&mut record, 4000, 3);
        // The mark at 4096 would reach beyond none of it: 4096 + 8 > 4100 is cut off.
        assert!(verify(&record, 4000, 3, Path::new("f")).is_ok());
    }
}
