//! Every way a small journal can end, and every bit of it flipped.

use super::*;
use proptest::prelude::*;

fn body(i: u8) -> Vec<u8> {
    (0..=i).map(|b| b.wrapping_mul(31) ^ i).collect()
}

fn small(records: u8) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = header(42);
    let mut ends = vec![bytes.len()];
    for i in 0..records {
        frame(&mut bytes, &body(i));
        ends.push(bytes.len());
    }
    (bytes, ends)
}

#[test]
fn cut_anywhere_it_is_a_prefix() {
    let (bytes, ends) = small(12);
    for cut in HEADER_BYTES..=bytes.len() {
        let (job, records) = parse(Path::new("j"), &bytes[..cut]).unwrap();
        let whole = ends.iter().filter(|e| **e <= cut).count() - 1;
        assert_eq!(job, 42);
        assert_eq!(records, (0..whole as u8).map(body).collect::<Vec<_>>(), "cut at {cut}");
    }
    for cut in 0..HEADER_BYTES {
        let parsed = parse(Path::new("j"), &bytes[..cut]);
        assert!(matches!(parsed, Err(JournalError::Header { .. })), "cut at {cut}");
    }
}

#[test]
fn a_flipped_bit_is_never_read_as_data() {
    let (bytes, ends) = small(6);
    let last = ends[ends.len() - 2];
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            match parse(Path::new("j"), &bad) {
                Err(JournalError::Header { .. }) => assert!(at < HEADER_BYTES),
                Err(JournalError::Damaged { offset, .. }) => {
                    let begins = ends.iter().rev().find(|e| **e <= at).copied().unwrap();
                    assert_eq!(offset, begins as u64, "the record that is damaged is named");
                }
                // Damage at the very end cannot be told from a torn write.
                Ok((_, records)) => assert!(at >= last && records.len() == ends.len() - 2),
                Err(e) => panic!("{e}"),
            }
        }
    }
}

#[test]
fn zeros_behind_the_last_record_are_a_torn_tail() {
    let (mut bytes, _) = small(3);
    bytes.extend([0; 4096]);
    assert_eq!(parse(Path::new("j"), &bytes).unwrap().1.len(), 3);
}

#[test]
fn one_service_to_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let first = StateDir::take(dir.path()).unwrap();
    assert!(matches!(StateDir::take(dir.path()), Err(JournalError::Locked { .. })));
    drop(first);
    StateDir::take(dir.path()).unwrap();
}

#[test]
fn what_was_written_is_there_after_compaction_too() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let journal = Journal::start(StateDir::take(dir.path()).unwrap(), 7, &[]).unwrap();
        journal.append(&body(1));
        let lsn = journal.append(&body(2));
        journal.written(lsn).await.unwrap();
        // Without any stop: what is written survives the service.
        let bytes = std::fs::read(dir.path().join("journal")).unwrap();
        assert_eq!(parse(Path::new("j"), &bytes).unwrap(), (7, vec![body(1), body(2)]));
        let mut snapshot = Vec::new();
        frame(&mut snapshot, &body(100));
        journal.compact(snapshot);
        let lsn = journal.append(&body(3));
        journal.synced(lsn).await.unwrap();
        journal.stop();
    });
    let read = StateDir::take(dir.path()).unwrap().read().unwrap().unwrap();
    assert_eq!(read, (7, vec![body(100), body(3)]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn bodies_come_back_as_they_were(bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 0..20)) {
        let mut bytes = header(1);
        bodies.iter().for_each(|b| frame(&mut bytes, b));
        prop_assert_eq!(parse(Path::new("j"), &bytes).unwrap(), (1, bodies));
    }
}
