//! Every way a small journal can end, and every bit of it flipped.

use super::format::{BODY_BYTES_MAX, HEADER_BYTES};
use super::*;
use ebb_journal::MARK_BYTES;
use proptest::prelude::*;

fn body(i: u8) -> Vec<u8> {
    (0..=i).map(|b| b.wrapping_mul(31) ^ i).collect()
}

const HERE: Boot = Boot(7);

/// What a snapshot of nothing takes.
const BEGIN: usize = HEADER_BYTES + MARK_BYTES;

fn parsed(bytes: &[u8]) -> Result<(u64, Vec<Vec<u8>>), JournalError> {
    parse(Path::new("j"), bytes, HERE).map(|read| (read.job, read.bodies))
}

fn small(records: u8) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = fresh(42, HERE, &[]);
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
    for cut in BEGIN..=bytes.len() {
        let (job, records) = parsed(&bytes[..cut]).unwrap();
        let whole = ends.iter().filter(|e| **e <= cut).count() - 1;
        assert_eq!(job, 42);
        assert_eq!(records, (0..whole as u8).map(body).collect::<Vec<_>>(), "cut at {cut}");
    }
    for cut in 0..HEADER_BYTES {
        let result = parsed(&bytes[..cut]);
        assert!(matches!(result, Err(JournalError::Header { .. })), "cut at {cut}");
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
            match parsed(&bad) {
                Err(JournalError::Header { .. }) => assert!(at < HEADER_BYTES),
                Err(JournalError::Damaged { offset, .. }) => {
                    let begins =
                        ends.iter().rev().find(|e| **e <= at).copied().unwrap_or(HEADER_BYTES);
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
    assert_eq!(parsed(&bytes).unwrap().1.len(), 3);
}

#[test]
fn one_service_to_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let first = StateDir::take(dir.path()).unwrap();
    assert!(matches!(StateDir::take(dir.path()), Err(JournalError::Locked { .. })));
    drop(first);
    StateDir::take(dir.path()).unwrap();
}

/// All at once.
pub fn compact(journal: &Journal, snapshot: &[u8]) {
    if journal.begin_compaction() {
        journal.finish_compaction(snapshot);
    }
}

#[test]
fn what_comes_while_a_snapshot_is_made_is_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let journal = Journal::start(StateDir::take(dir.path()).unwrap(), 7, &[]).unwrap();
        journal.written(journal.append(&body(1))).await.unwrap();
        // In the queue when the snapshot is taken, and so in it.
        journal.append(&body(2));
        assert!(journal.begin_compaction());
        assert!(!journal.begin_compaction(), "one at a time");
        // Answered before it is there, on stable storage too.
        journal.written(journal.append(&body(3))).await.unwrap();
        journal.synced(journal.append(&body(4))).await.unwrap();
        let mut snapshot = Vec::new();
        frame(&mut snapshot, &body(100));
        journal.append(&body(5));
        journal.finish_compaction(&snapshot);
        journal.synced(journal.append(&body(6))).await.unwrap();
        let bytes = std::fs::read(dir.path().join("journal")).unwrap();
        let found = parse(Path::new("j"), &bytes, Boot::now()).unwrap();
        assert_eq!(found.bodies, [100, 3, 4, 5, 6].map(body));
        assert!(journal.begin_compaction(), "and then another one");
        journal.append(&body(7));
        journal.stop();
    });
    let read = StateDir::take(dir.path()).unwrap().read().unwrap().unwrap();
    assert_eq!(
        read.bodies,
        [100, 3, 4, 5, 6, 7].map(body),
        "one that was not finished changes nothing"
    );
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
        let found = parse(Path::new("j"), &bytes, Boot::now()).unwrap();
        assert_eq!((found.job, found.bodies), (7, vec![body(1), body(2)]));
        assert!(!found.rebooted);
        let mut snapshot = Vec::new();
        frame(&mut snapshot, &body(100));
        compact(&journal, &snapshot);
        let lsn = journal.append(&body(3));
        journal.synced(lsn).await.unwrap();
        journal.stop();
    });
    let read = StateDir::take(dir.path()).unwrap().read().unwrap().unwrap();
    assert_eq!((read.job, read.bodies), (7, vec![body(100), body(3)]));
}

#[test]
fn only_what_was_synced_is_damage_after_a_power_loss() {
    let (mut bytes, ends) = small(6);
    let elsewhere = |bytes: &[u8]| parse(Path::new("j"), bytes, Boot(8));
    bytes[ends[2]..ends[3]].fill(0);
    assert!(parsed(&bytes).is_err(), "in the same boot nothing is out of order");
    let found = elsewhere(&bytes).unwrap();
    assert_eq!((found.bodies.len(), found.rebooted), (2, true));
    put_mark(&mut bytes, ends[2] as u64);
    assert_eq!(elsewhere(&bytes).unwrap().bodies.len(), 2, "what was before it was synced");
    put_mark(&mut bytes, ends[3] as u64);
    let found = elsewhere(&bytes);
    assert!(matches!(found, Err(JournalError::Damaged { offset, .. }) if offset == ends[2] as u64));
    assert!(parse(Path::new("j"), &bytes, Boot(0)).is_err(), "a boot that is not known is another");
}

#[test]
fn journals_of_older_formats_are_still_read() {
    let (bytes, _) = small(3);
    let mut old = bytes[..8].to_vec();
    old.extend_from_slice(&1u32.to_le_bytes());
    old.extend_from_slice(&42u64.to_le_bytes());
    old.extend_from_slice(&crc32c::crc32c(&old).to_le_bytes());
    old.extend_from_slice(&bytes[BEGIN..]);
    assert_eq!(parsed(&old).unwrap(), (42, (0..3).map(body).collect()));
    old[30] ^= 1;
    assert!(matches!(parsed(&old), Err(JournalError::Damaged { .. })));
    let mut newer = bytes;
    newer[8] += 1;
    let next = format!("format Some({})", newer[8]);
    assert!(parsed(&newer).unwrap_err().to_string().contains(&next));
}

/// With a body that format 3 writes in parts.
#[test]
fn a_journal_of_the_second_format_is_still_read() {
    let long = vec![7; BODY_BYTES_MAX + 5];
    let (bytes, _) = small(3);
    let mut old = bytes[..8].to_vec();
    old.extend_from_slice(&2u32.to_le_bytes());
    old.extend_from_slice(&bytes[12..HEADER_BYTES - 4]);
    old.extend_from_slice(&crc32c::crc32c(&old).to_le_bytes());
    old.extend_from_slice(&bytes[HEADER_BYTES..]);
    ebb_journal::put(&mut old, &long, usize::MAX).unwrap();
    let (_, found) = parsed(&old).unwrap();
    assert_eq!((found.len(), found.last() == Some(&long)), (4, true));
}

#[test]
fn a_long_body_is_there_whole_or_not_at_all() {
    let long: Vec<u8> = (0..BODY_BYTES_MAX + 9).map(|i| i as u8).collect();
    let (mut bytes, _) = small(2);
    let before = bytes.len();
    frame(&mut bytes, &long);
    let part = before + ebb_journal::FRAME_BYTES + BODY_BYTES_MAX;
    assert_eq!(bytes.len(), part + ebb_journal::FRAME_BYTES + 9, "in two parts");
    assert_eq!(parsed(&bytes).unwrap().1, [body(0), body(1), long]);
    for cut in [before + 1, part, bytes.len() - 1] {
        assert_eq!(parsed(&bytes[..cut]).unwrap().1, [body(0), body(1)], "cut at {cut}");
    }
    bytes[before + 20] ^= 1;
    let found = parsed(&bytes);
    assert!(matches!(found, Err(JournalError::Damaged { offset, .. }) if offset == before as u64));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn bodies_come_back_as_they_were(bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 0..20)) {
        let mut bytes = fresh(1, HERE, &[]);
        bodies.iter().for_each(|b| frame(&mut bytes, b));
        prop_assert_eq!(parsed(&bytes).unwrap(), (1, bodies));
    }
}

/// A directory on a disk that is full now and then.
struct FullNowAndThen {
    inner: Directory,
    full: Arc<std::sync::atomic::AtomicBool>,
}

struct Limited(Arc<dyn Stored>, Arc<std::sync::atomic::AtomicBool>);

impl Stored for Limited {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if !self.1.load(Ordering::Relaxed) {
            return self.0.write_at(bytes, offset);
        }
        // As a full disk does: some of it is there.
        self.0.write_at(&bytes[..bytes.len() / 2], offset)?;
        Err(io::Error::from_raw_os_error(Errno::ENOSPC.0))
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn reserve(&self, offset: u64, len: u64) {
        self.0.reserve(offset, len);
    }
}

impl Storage for FullNowAndThen {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.inner.read(name)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn Stored>> {
        Ok(Arc::new(Limited(self.inner.create(name)?, Arc::clone(&self.full))))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn sync_names(&self) -> io::Result<()> {
        self.inner.sync_names()
    }
}

/// A journal on a disk that is full while the flag says so.
pub fn on_a_disk_that_fills(dir: &Path, full: &Arc<std::sync::atomic::AtomicBool>) -> Journal {
    let storage = FullNowAndThen { inner: Directory::new(dir), full: Arc::clone(full) };
    Journal::start_on(Arc::new(storage), None, 42, &[]).unwrap()
}

/// A directory on a disk that stands still now and then, and what is in it.
struct StillNowAndThen<T>(T, Arc<std::sync::atomic::AtomicBool>);

impl Stored for StillNowAndThen<Arc<dyn Stored>> {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        while self.1.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn reserve(&self, offset: u64, len: u64) {
        self.0.reserve(offset, len);
    }
}

impl Storage for StillNowAndThen<Directory> {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.0.read(name)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn Stored>> {
        Ok(Arc::new(StillNowAndThen(self.0.create(name)?, Arc::clone(&self.1))))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn sync_names(&self) -> io::Result<()> {
        self.0.sync_names()
    }
}

/// A journal on a disk that stands still while the flag says so.
pub fn on_a_disk_that_stands_still(
    dir: &Path,
    still: &Arc<std::sync::atomic::AtomicBool>,
) -> Journal {
    let storage = StillNowAndThen(Directory::new(dir), Arc::clone(still));
    Journal::start_on(Arc::new(storage), None, 42, &[]).unwrap()
}

#[tokio::test]
async fn a_full_disk_is_waited_for_and_nothing_is_written_twice() {
    let dir = tempfile::tempdir().unwrap();
    let full = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let inner = Directory::new(dir.path());
    let storage = Arc::new(FullNowAndThen { inner, full: Arc::clone(&full) });
    let journal = Journal::start_on(storage.clone(), None, 42, &[]).unwrap();
    let mut want = Vec::new();
    for round in 0..4u8 {
        want.push(body(3 * round));
        journal.synced(journal.append(&body(3 * round))).await.unwrap();
        full.store(true, Ordering::Relaxed);
        let mut waiting = journal.append(&body(3 * round + 1));
        if round == 2 {
            // No room for a snapshot either: the old file goes on.
            let mut snapshot = Vec::new();
            want.push(body(3 * round + 1));
            want.iter().for_each(|b| frame(&mut snapshot, b));
            compact(&journal, &snapshot);
            waiting = journal.append(&body(3 * round + 2));
        } else {
            want.push(body(3 * round + 1));
            waiting = journal.append(&body(3 * round + 2)).max(waiting);
        }
        want.push(body(3 * round + 2));
        assert_eq!(journal.written(waiting).await, Err(Errno::ENOSPC));
        assert!(!journal.is_written(waiting));
        full.store(false, Ordering::Relaxed);
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while journal.synced(waiting).await.is_err() {
            assert!(std::time::Instant::now() < end, "it does not go on");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let found = read(&*storage, Path::new("j")).unwrap().unwrap();
        assert_eq!(found.bodies, want, "round {round}");
    }
}
