//! The log of a set of copies: which bytes of it are here, so that a daemon that takes the cache
//! over knows them again. Appended to before a copy is acknowledged, and before one is given up.
//!
//! # Format
//!
//! `CACHE/copies/OWNER-EPOCH/log`: `EBBCOPY1`, then records as in every journal (length, CRC32C,
//! postcard body of one [`Record`]); the first one is [`Record::Begun`].
//!
//! # What a reader believes
//!
//! Nothing is synced: copies outlive their daemon, not the machine. So a log of another boot, or of
//! another job, is worth nothing. One process wrote it and another one reads it as it was written:
//! a record at the end that is not whole was never acknowledged; anything else that does not check
//! is damage, and the whole set is given up, because a record that is missing could have been one
//! of bytes that were given up.

use ebb_transport::CopySet;
use ebb_types::{ByteRange, Ino};
use rangemap::RangeSet;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const NAME: &str = "log";

const MAGIC: &[u8; 8] = b"EBBCOPY1";

/// Largest body of a record.
const BODY_BYTES_MAX: usize = 4 << 20;

/// Ranges of a record: keeps it far below the largest body.
const RANGES_MAX: usize = 8192;

/// A log smaller than this is not worth writing anew.
const COMPACT_BYTES: u64 = 1 << 20;

/// Largest offset of a file.
const OFFSET_MAX: u64 = i64::MAX as u64;

/// Something that happened to a set. New kinds go to the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Record {
    /// Whose copies, of which epoch, of which job, in which boot of the machine.
    Begun { owner: u32, epoch: u64, job: u64, boot: String },
    /// These bytes are here.
    Kept(Ino, Vec<ByteRange>),
    /// They are not any more.
    Dropped(Ino, Vec<ByteRange>),
    /// The service is going to be asked to make them this node's, and of this file no others; none:
    /// it was not done.
    Adopting(Ino, Vec<ByteRange>),
}

/// Which bytes of a file are here, and which of them are perhaps this node's by now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    pub here: RangeSet<u64>,
    pub adopting: RangeSet<u64>,
}

/// What a log adds up to.
pub(super) type Files = HashMap<Ino, Kept>;

/// How many bytes are new.
fn put(set: &mut RangeSet<u64>, ranges: &[ByteRange]) -> u64 {
    let mut new = 0;
    for range in ranges.iter().filter(|r| !r.is_empty()) {
        new += set.gaps(&range.to_std()).map(|gap| gap.end - gap.start).sum::<u64>();
        set.insert(range.to_std());
    }
    new
}

/// How many bytes were there.
fn take(set: &mut RangeSet<u64>, ranges: &[ByteRange]) -> u64 {
    let mut gone = 0;
    for range in ranges.iter().filter(|r| !r.is_empty()) {
        let missing: u64 = set.gaps(&range.to_std()).map(|gap| gap.end - gap.start).sum();
        gone += range.len() - missing;
        set.remove(range.to_std());
    }
    gone
}

/// Makes a record true. How many bytes came, and how many went.
pub(super) fn apply(files: &mut Files, record: &Record) -> (u64, u64) {
    match record {
        Record::Begun { .. } => (0, 0),
        Record::Kept(_, ranges) if ranges.iter().all(|r| r.is_empty()) => (0, 0),
        Record::Kept(ino, ranges) => (put(&mut files.entry(*ino).or_default().here, ranges), 0),
        Record::Dropped(ino, ranges) => {
            let Some(kept) = files.get_mut(ino) else { return (0, 0) };
            let gone = take(&mut kept.here, ranges);
            take(&mut kept.adopting, ranges);
            if kept.here.is_empty() {
                files.remove(ino);
            }
            (0, gone)
        }
        Record::Adopting(ino, ranges) => {
            if let Some(kept) = files.get_mut(ino) {
                kept.adopting.clear();
                put(&mut kept.adopting, ranges);
            }
            (0, 0)
        }
    }
}

fn sound(record: &Record) -> bool {
    match record {
        Record::Begun { .. } => true,
        // A range that was read need not have gone through its constructors.
        Record::Kept(_, r) | Record::Dropped(_, r) | Record::Adopting(_, r) => {
            r.iter().all(|r| r.start() <= r.end() && r.end() <= OFFSET_MAX)
        }
    }
}

fn encode(out: &mut Vec<u8>, record: &Record) -> io::Result<()> {
    let body = postcard::to_stdvec(record).expect("records have no types that postcard refuses");
    // A record that no reader believes would cost the whole set.
    ebb_journal::put(out, &body, BODY_BYTES_MAX)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))
}

/// Records that say that these bytes are here.
fn snapshot(begun: &Record, files: &Files) -> io::Result<Vec<u8>> {
    let mut out = MAGIC.to_vec();
    encode(&mut out, begun)?;
    for (ino, kept) in files {
        let here: Vec<ByteRange> = kept.here.iter().map(super::held::bytes).collect();
        for some in here.chunks(RANGES_MAX) {
            encode(&mut out, &Record::Kept(*ino, some.to_vec()))?;
        }
        if !kept.adopting.is_empty() {
            let adopting = kept.adopting.iter().map(super::held::bytes).collect();
            encode(&mut out, &Record::Adopting(*ino, adopting))?;
        }
    }
    Ok(out)
}

/// The log of a set that is kept here.
pub(super) struct Log {
    dir: PathBuf,
    begun: Record,
    file: File,
    len: u64,
    snapshot_len: u64,
}

impl Log {
    /// Begins the log of a new set, whose directory is there.
    pub fn begin(dir: PathBuf, set: CopySet, job: u64) -> io::Result<Log> {
        let (owner, epoch) = (set.owner.0, set.epoch);
        let begun = Record::Begun { owner, epoch, job, boot: ebb_journal::boot_id() };
        let (file, len) = replace(&dir, &begun, &Files::new())?;
        Ok(Log { dir, begun, file, len, snapshot_len: len })
    }

    /// Returns when the record survives this daemon.
    pub fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut bytes = Vec::new();
        encode(&mut bytes, record)?;
        // What a failure leaves behind is written over by the next one.
        self.file.write_all_at(&bytes, self.len)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// True when the log is much longer than what it says.
    pub fn is_long(&self) -> bool {
        self.len > COMPACT_BYTES.max(self.snapshot_len.saturating_mul(4))
    }

    /// Writes it anew, for these files.
    pub fn compact(&mut self, files: &Files) -> io::Result<()> {
        let (file, len) = replace(&self.dir, &self.begun, files)?;
        (self.file, self.len, self.snapshot_len) = (file, len, len);
        Ok(())
    }
}

fn replace(dir: &Path, begun: &Record, files: &Files) -> io::Result<(File, u64)> {
    let bytes = snapshot(begun, files)?;
    let new = dir.join("log.new");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW).open(&new)?;
    file.write_all_at(&bytes, 0)?;
    std::fs::rename(&new, dir.join(NAME))?;
    Ok((file, bytes.len() as u64))
}

/// The set has no log from here on: nobody takes it over.
pub(super) fn remove(dir: &Path) {
    let _ = std::fs::remove_file(dir.join(NAME));
}

/// Reads the log in `dir`; nothing when it is worth nothing in this boot, or for another job than
/// `job` (`None`: any).
pub(super) fn read(dir: &Path, job: Option<u64>) -> io::Result<Option<(CopySet, Files, Log)>> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(dir.join(NAME))?;
    let mut bytes = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut bytes, 0)?;
    let boot = ebb_journal::boot_id();
    let Some((begun, files, len)) = judge(&bytes) else { return Ok(None) };
    let Record::Begun { owner, epoch, job: of, boot: then } = &begun else { return Ok(None) };
    if boot.is_empty() || *then != boot || job.is_some_and(|job| job != *of) {
        return Ok(None);
    }
    let set = CopySet { owner: ebb_types::NodeId(*owner), epoch: *epoch };
    file.set_len(len)?;
    let log = Log { dir: dir.to_owned(), begun, file, len, snapshot_len: len };
    Ok(Some((set, files, log)))
}

/// What the bytes of a log say, and up to where they are whole records.
fn judge(bytes: &[u8]) -> Option<(Record, Files, u64)> {
    if bytes.get(..MAGIC.len())? != MAGIC {
        return None;
    }
    let (begun, mut at) = record_at(bytes, MAGIC.len())?;
    if !matches!(begun, Record::Begun { .. }) {
        return None;
    }
    let mut files = Files::new();
    while let Some((record, next)) = record_at(bytes, at) {
        apply(&mut files, &record);
        at = next;
    }
    let torn = (at + 1..bytes.len()).all(|behind| record_at(bytes, behind).is_none());
    torn.then_some((begun, files, at as u64))
}

fn record_at(bytes: &[u8], at: usize) -> Option<(Record, usize)> {
    let (body, end) = ebb_journal::body_at(bytes, at, BODY_BYTES_MAX)?;
    let record: Record = postcard::from_bytes(body).ok()?;
    sound(&record).then_some((record, end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_types::NodeId;
    use proptest::prelude::*;

    const SET: CopySet = CopySet { owner: NodeId(7), epoch: 3 };

    fn ranges() -> impl Strategy<Value = Vec<ByteRange>> {
        prop::collection::vec((0..99u64, 0..20u64).prop_map(|(a, n)| ByteRange::at(a, n)), 1..4)
    }

    fn record() -> impl Strategy<Value = Record> {
        let ino = || (1..4u64).prop_map(Ino);
        prop_oneof![
            3 => (ino(), ranges()).prop_map(|(i, r)| Record::Kept(i, r)),
            2 => (ino(), ranges()).prop_map(|(i, r)| Record::Dropped(i, r)),
            1 => (ino(), ranges()).prop_map(|(i, r)| Record::Adopting(i, r)),
        ]
    }

    fn written(dir: &Path, records: &[Record]) -> (Files, Log) {
        let mut log = Log::begin(dir.to_owned(), SET, 5).expect("begin");
        let mut files = Files::new();
        for record in records {
            log.append(record).expect("append");
            apply(&mut files, record);
        }
        (files, log)
    }

    proptest! {
        #[test]
        fn what_was_noted_is_read_again_and_goes_on(
            records in prop::collection::vec(record(), 0..20), more in record(), anew: bool,
        ) {
            let dir = tempfile::tempdir().expect("tempdir");
            let (mut files, mut log) = written(dir.path(), &records);
            if anew {
                log.compact(&files).expect("compact");
            }
            let (set, found, mut log) = read(dir.path(), Some(5)).expect("read").expect("ours");
            prop_assert_eq!((set, &found), (SET, &files));
            log.append(&more).expect("append");
            apply(&mut files, &more);
            let (_, found, _) = read(dir.path(), None).expect("read").expect("ours");
            prop_assert_eq!(found, files);
            prop_assert!(read(dir.path(), Some(6)).expect("read").is_none(), "another job's");
        }

        /// Cut anywhere it is what was noted up to there; a flipped bit is never overlooked, but
        /// for one in the last record, which may as well be torn.
        #[test]
        fn torn_is_a_prefix_and_damage_is_nothing(
            records in prop::collection::vec(record(), 2..12), at: prop::sample::Index,
        ) {
            let dir = tempfile::tempdir().expect("tempdir");
            let (_, log) = written(dir.path(), &records[..records.len() - 1]);
            let before_last = log.len as usize;
            drop(log);
            written(dir.path(), &records);
            let bytes = std::fs::read(dir.path().join(NAME)).expect("read");
            let at = at.index(bytes.len());
            if let Some((_, found, len)) = judge(&bytes[..at]) {
                let mut files = Files::new();
                let mut whole = vec![files.clone()];
                for record in &records {
                    apply(&mut files, record);
                    whole.push(files.clone());
                }
                prop_assert!(len as usize <= at && whole.contains(&found));
            }
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            match judge(&flipped) {
                None => {}
                Some((_, _, len)) => prop_assert_eq!(len as usize, before_last),
            }
        }
    }

    #[test]
    fn what_no_reader_would_believe_is_not_written() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (_, mut log) = written(dir.path(), &[]);
        let many = vec![ByteRange::at(1 << 60, 1); BODY_BYTES_MAX / 16];
        log.append(&Record::Kept(Ino(1), many)).expect_err("too long");
        log.append(&Record::Kept(Ino(1), vec![ByteRange::at(5, 1)])).expect("append");
        let (_, found, _) = read(dir.path(), None).expect("read").expect("ours");
        assert_eq!(found[&Ino(1)].here.iter().count(), 1);
    }

    #[test]
    fn of_another_boot_or_without_a_log_there_is_nothing() {
        let dir = tempfile::tempdir().expect("tempdir");
        let boot = "another".to_owned();
        let begun = Record::Begun { owner: 7, epoch: 3, job: 5, boot };
        replace(dir.path(), &begun, &Files::new()).expect("write");
        assert!(read(dir.path(), None).expect("read").is_none());
        remove(dir.path());
        assert!(read(dir.path(), None).is_err());
    }
}
