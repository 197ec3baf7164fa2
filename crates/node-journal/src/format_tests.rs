//! Journals that were cut, flipped and mixed: what is believed is a prefix, or nothing.

use super::*;
use crate::record::{Header, Life};
use ebb_types::{ByteRange, Ino, Time, Version};
use proptest::prelude::*;

const BOOT: &str = "this-boot";

fn life(boot: &str) -> Record {
    Record::Life(Box::new(Life {
        node: "n".to_owned(),
        config: "{}".to_owned(),
        boot: boot.to_owned(),
        job: 7,
        backing_ino: 2,
        began: Time::default(),
    }))
}

fn records(n: u64, boot: &str) -> Vec<Record> {
    let header = Header {
        path: b"dir/file".to_vec(),
        perm: 0o600,
        uid: 0,
        gid: 0,
        atime: Time::default(),
        mtime: Time::default(),
        size: 0,
        home: None,
        under: None,
        shared: false,
    };
    let mut out = vec![life(boot), Record::File(Ino(9), Box::new(header))];
    for i in 0..n {
        let range = ByteRange::at(i * 100, 100);
        out.push(Record::Attaching(Ino(9), vec![range], Version(i), Time::default()));
        out.push(Record::Attached(Ino(9), vec![range], Version(i + 1), (i + 1) * 100));
    }
    out
}

/// The bytes, and where each record ends.
fn file(records: &[Record]) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = header();
    let mut ends = vec![bytes.len()];
    for record in records {
        encode(&mut bytes, record);
        ends.push(bytes.len());
    }
    (bytes, ends)
}

fn image_of(records: &[Record]) -> Image {
    let mut image = Image::default();
    records.iter().for_each(|r| image.apply(r));
    image
}

fn judged(bytes: &[u8], boot: &str) -> Result<Found, JournalError> {
    judge(Path::new("journal"), bytes, boot, false)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Cut anywhere: exactly the whole records before the cut.
    #[test]
    fn a_torn_tail_leaves_a_prefix(n in 0..12u64, cut in 0.0..1.0f64) {
        let records = records(n, BOOT);
        let (bytes, ends) = file(&records);
        let cut = HEADER_BYTES + ((bytes.len() - HEADER_BYTES) as f64 * cut) as usize;
        let whole = ends.iter().filter(|e| **e <= cut).count() - 1;
        if whole == 0 {
            prop_assert!(judged(&bytes[..cut], BOOT).is_err());
            return Ok(());
        }
        let found = judged(&bytes[..cut], BOOT).unwrap();
        prop_assert_eq!(&found.image, &image_of(&records[..whole]));
        prop_assert_eq!(found.torn, ends[whole] != cut);
    }

    /// A flipped bit anywhere: a prefix, or an error that says where.
    #[test]
    fn a_flipped_bit_is_never_believed(n in 0..12u64, place in 0.0..1.0f64, bit in 0..8u32) {
        let records = records(n, BOOT);
        let (mut bytes, ends) = file(&records);
        let at = ((bytes.len() - 1) as f64 * place) as usize;
        bytes[at] ^= 1 << bit;
        match judged(&bytes, BOOT) {
            Err(JournalError::Header { .. }) => prop_assert!(at < HEADER_BYTES),
            Err(JournalError::Damaged { offset, .. }) => {
                let record = ends.iter().rposition(|e| *e <= at).unwrap();
                prop_assert_eq!(offset as usize, ends[record]);
                // And when told to look past it: the prefix.
                let Ok(found) = judge(Path::new("j"), &bytes, BOOT, true) else {
                    prop_assert_eq!(record, 0);
                    return Ok(());
                };
                prop_assert_eq!(found.image, image_of(&records[..record]));
            }
            Err(e) => panic!("{e}"),
            Ok(found) => {
                // Only the last record can look like a torn tail.
                prop_assert!(at >= ends[records.len() - 1] && found.torn);
                prop_assert_eq!(found.image, image_of(&records[..records.len() - 1]));
            }
        }
    }

    /// Any bytes at all: no panic.
    #[test]
    fn garbage_is_an_error_or_a_prefix(garbage in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = judged(&garbage, BOOT);
        let (mut bytes, _) = file(&records(2, BOOT));
        bytes.extend(garbage);
        if let Ok(found) = judged(&bytes, BOOT) {
            prop_assert_eq!(found.image, image_of(&records(2, BOOT)));
        }
    }
}

/// After a power loss a block in the middle of what was not synced may be missing.
#[test]
fn only_what_was_synced_is_damage_after_a_power_loss() {
    let records = records(6, "an-older-boot");
    let (bytes, ends) = file(&records);
    let mut torn = bytes.clone();
    torn[ends[8]..ends[9]].fill(0);
    let found = judged(&torn, BOOT).unwrap();
    assert!(found.torn && found.rebooted);
    assert_eq!(found.image, image_of(&records[..8]));
    // The same with a word behind it that says that it had been synced.
    encode(&mut torn, &Record::Synced(ends[9] as u64));
    assert!(matches!(judged(&torn, BOOT), Err(JournalError::Damaged { offset, .. })
        if offset == ends[8] as u64));
    // And with one that speaks of what was before it.
    let mut torn = bytes.clone();
    torn[ends[8]..ends[9]].fill(0);
    encode(&mut torn, &Record::Synced(ends[8] as u64));
    assert!(judged(&torn, BOOT).is_ok());
    // Without a boot in between it is damage in any case.
    assert!(judged(&torn, "an-older-boot").is_err());
    // A machine that does not say which boot it is in is not trusted.
    assert!(judged(&bytes, "").unwrap().rebooted);
}

#[test]
fn long_lists_become_several_records() {
    let ranges: Vec<ByteRange> = (0..1_000_000).map(|i| ByteRange::at(i * 1000, 10)).collect();
    let mut all = records(0, BOOT);
    all.push(Record::Attaching(Ino(9), ranges, Version(3), Time::default()));
    let (bytes, _) = file(&all);
    let found = judged(&bytes, BOOT).unwrap();
    assert_eq!(found.image, image_of(&all));
    assert!(!found.torn);
}

#[test]
fn other_files_and_versions_are_refused() {
    let (mut bytes, _) = file(&records(1, BOOT));
    assert!(judged(b"", BOOT).is_err());
    assert!(judged(b"EBBNODE1", BOOT).is_err());
    bytes[8] = FORMAT as u8 + 1;
    let sum = crc32c::crc32c(&bytes[..12]).to_le_bytes();
    bytes[12..16].copy_from_slice(&sum);
    let error = judged(&bytes, BOOT).unwrap_err().to_string();
    assert!(error.contains(&format!("format Some({})", FORMAT + 1)), "{error}");
}

/// What the program before files without names had written.
#[test]
fn older_formats_are_still_read_and_a_newer_one_is_not() {
    let records = records(5, BOOT);
    let (mut bytes, _) = file(&records);
    let mut with_format = |format: u32| {
        bytes[8..12].copy_from_slice(&format.to_le_bytes());
        let sum = crc32c::crc32c(&bytes[..12]);
        bytes[12..16].copy_from_slice(&sum.to_le_bytes());
        judged(&bytes, BOOT)
    };
    for old in 1..FORMAT {
        assert_eq!(with_format(old).unwrap().image, image_of(&records));
    }
    assert!(matches!(with_format(0), Err(JournalError::Header { .. })));
    assert!(matches!(with_format(FORMAT + 1), Err(JournalError::Header { .. })));
}
