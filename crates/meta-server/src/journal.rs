//! The journal: a file of checksummed records that one thread writes in groups. Knows nothing of
//! what a record means.
//!
//! Format: `EBBJRNL1`, format version (u32 LE), job id (u64 LE), CRC32C of these 20 bytes (u32
//! LE); then records: length of the body (u32 LE), CRC32C of length and body (u32 LE), body.
//!
//! Consistency: a record is *written* when write(2) returned (it survives the service), *synced*
//! when fdatasync(2) did (it survives the machine). Records become written in the order they were
//! appended, so what is found at start is always a prefix of what was appended.
//! Retries: none. After a failed write or sync nobody knows what the disk has; every later wait
//! fails with EIO until the service is started again.
//! Crash consistency: a torn tail (nothing valid after it) is cut off at start; damage with valid
//! records after it is an error that names the offset. A compacted journal replaces the old one by
//! rename after it was synced.

use ebb_types::Errno;
use parking_lot::{Condvar, Mutex};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

const MAGIC: &[u8; 8] = b"EBBJRNL1";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 24;
const FRAME_BYTES: usize = 8;

/// Largest body of a record: what the service appends is split to stay well below.
pub const BODY_BYTES_MAX: usize = 16 << 20;

/// What fsync nobody asked for is done this often.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// An answer that waits for the disk longer than this fails (EIO).
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Position in the journal: how many records were appended up to and with this one.
pub type Lsn = u64;

/// Why a journal cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The system refused something.
    #[error("journal {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another service uses the directory.
    #[error("state directory {} is in use by another metadata service", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// Not a journal, or of another version.
    #[error("journal {}: {what}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A record in the middle is damaged; the records behind it cannot be trusted.
    #[error("journal {}: damaged at byte {offset}: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the record begins.
        offset: u64,
        /// What is wrong with it.
        what: String,
    },
}

/// A state directory that this process has to itself.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    /// Holds the lock as long as it lives.
    _lock: File,
}

impl StateDir {
    /// Takes the directory, making it when it does not exist.
    pub fn take(path: &Path) -> Result<StateDir, JournalError> {
        let failed = |source| JournalError::Io { path: path.to_owned(), source };
        // Its records name the user's files.
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(failed)?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(StateDir { path: path.to_owned(), _lock: lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                Err(JournalError::Locked { path: path.to_owned() })
            }
            Err(e) => Err(failed(e.into())),
        }
    }

    fn journal(&self) -> PathBuf {
        self.path.join("journal")
    }

    /// The records of the journal, oldest first, and its job; `None` when there is no journal.
    pub fn read(&self) -> Result<Option<(u64, Vec<Vec<u8>>)>, JournalError> {
        let path = self.journal();
        let mut bytes = Vec::new();
        match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(JournalError::Io { path, source }),
            Ok(mut f) => f
                .read_to_end(&mut bytes)
                .map_err(|source| JournalError::Io { path: path.clone(), source })?,
        };
        parse(&path, &bytes).map(Some)
    }
}

fn header(job: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&job.to_le_bytes());
    out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
    out
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// The body of a valid record at `at`.
fn record_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let len = u32_at(bytes, at)? as usize;
    let crc = u32_at(bytes, at + 4)?;
    if len == 0 || len > BODY_BYTES_MAX {
        return None;
    }
    let body = bytes.get(at + FRAME_BYTES..at + FRAME_BYTES + len)?;
    (checksum(&bytes[at..at + 4], body) == crc).then_some(body)
}

fn checksum(len: &[u8], body: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(len), body)
}

/// Appends one framed record.
pub fn frame(out: &mut Vec<u8>, body: &[u8]) {
    let len = (body.len() as u32).to_le_bytes();
    out.extend_from_slice(&len);
    out.extend_from_slice(&checksum(&len, body).to_le_bytes());
    out.extend_from_slice(body);
}

fn parse(path: &Path, bytes: &[u8]) -> Result<(u64, Vec<Vec<u8>>), JournalError> {
    let wrong = |what: String| JournalError::Header { path: path.to_owned(), what };
    if bytes.len() < HEADER_BYTES || &bytes[..8] != MAGIC {
        return Err(wrong("not a journal of Ebb".to_owned()));
    }
    if u32_at(bytes, 20) != Some(crc32c::crc32c(&bytes[..20])) {
        return Err(wrong("damaged header".to_owned()));
    }
    match u32_at(bytes, 8) {
        Some(FORMAT) => {}
        other => return Err(wrong(format!("format {other:?}, this program knows {FORMAT}"))),
    }
    let job = u64::from_le_bytes(bytes[12..20].try_into().unwrap_or_default());
    let mut records = Vec::new();
    let mut at = HEADER_BYTES;
    while at < bytes.len() {
        match record_at(bytes, at) {
            Some(body) => {
                records.push(body.to_vec());
                at += FRAME_BYTES + body.len();
            }
            None => {
                if let Some(next) = (at + 1..bytes.len()).find(|p| record_at(bytes, *p).is_some()) {
                    let what = format!("bad record, but a good one at byte {next}");
                    let (path, offset) = (path.to_owned(), at as u64);
                    return Err(JournalError::Damaged { path, offset, what });
                }
                tracing::warn!(at, cut = bytes.len() - at, "torn tail of the journal cut off");
                break;
            }
        }
    }
    Ok((job, records))
}

#[derive(Default)]
struct Queue {
    bytes: Vec<u8>,
    appended: Lsn,
    /// A compaction: what was queued before `at` still goes to the old file.
    rotate: Option<(usize, Vec<u8>)>,
    stop: bool,
    sync_wanted: Lsn,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    lsn: Lsn,
    /// Nobody knows what the disk has.
    failed: bool,
    /// Nothing more will be done.
    closed: bool,
}

struct Shared {
    dir: PathBuf,
    job: u64,
    queue: Mutex<Queue>,
    /// Wakes the writer.
    work: Condvar,
    /// Wakes the syncer.
    sync: Condvar,
    /// The file that is written; replaced by compaction.
    file: Mutex<Arc<File>>,
    written: watch::Sender<Progress>,
    synced: watch::Sender<Progress>,
    bytes: AtomicU64,
    snapshot_bytes: AtomicU64,
}

/// The journal, open for appending.
pub struct Journal {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    _dir: StateDir,
}

impl Journal {
    /// Begins a journal with a snapshot (framed records), replacing the old one.
    pub fn start(dir: StateDir, job: u64, snapshot: &[u8]) -> Result<Journal, JournalError> {
        let failed = |source| JournalError::Io { path: dir.journal(), source };
        let file = replace(&dir.path, job, snapshot).map_err(failed)?;
        let bytes = (HEADER_BYTES + snapshot.len()) as u64;
        let shared = Arc::new(Shared {
            dir: dir.path.clone(),
            job,
            queue: Mutex::new(Queue::default()),
            work: Condvar::new(),
            sync: Condvar::new(),
            file: Mutex::new(Arc::new(file)),
            written: watch::Sender::new(Progress::default()),
            synced: watch::Sender::new(Progress::default()),
            bytes: AtomicU64::new(bytes),
            snapshot_bytes: AtomicU64::new(bytes),
        });
        let spawn = |name: &str, body: fn(&Shared)| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(move || body(&shared)).map_err(failed)
        };
        let threads = vec![spawn("journal-write", write_loop)?, spawn("journal-sync", sync_loop)?];
        Ok(Journal { shared, threads: Mutex::new(threads), _dir: dir })
    }

    /// Queues a record; never waits. Call it under the lock that orders what it describes.
    pub fn append(&self, body: &[u8]) -> Lsn {
        debug_assert!(body.len() <= BODY_BYTES_MAX, "records are split before");
        let mut queue = self.shared.queue.lock();
        frame(&mut queue.bytes, body);
        queue.appended += 1;
        let lsn = queue.appended;
        drop(queue);
        self.shared.work.notify_one();
        lsn
    }

    /// The last record appended.
    #[must_use]
    pub fn tail(&self) -> Lsn {
        self.shared.queue.lock().appended
    }

    /// True when everything up to `lsn` is written and nothing failed.
    #[must_use]
    pub fn is_written(&self, lsn: Lsn) -> bool {
        let p = *self.shared.written.borrow();
        p.lsn >= lsn && !p.failed
    }

    /// Waits until a record survives a crash of the service.
    pub async fn written(&self, lsn: Lsn) -> Result<(), Errno> {
        wait(self.shared.written.subscribe(), lsn).await
    }

    /// Waits until a record is on stable storage.
    pub async fn synced(&self, lsn: Lsn) -> Result<(), Errno> {
        self.written(lsn).await?;
        {
            let mut queue = self.shared.queue.lock();
            queue.sync_wanted = queue.sync_wanted.max(lsn);
        }
        self.shared.sync.notify_one();
        wait(self.shared.synced.subscribe(), lsn).await
    }

    /// From here on everything that waits for the journal fails.
    pub fn fail(&self) {
        self.shared.written.send_modify(|p| p.failed = true);
        self.shared.synced.send_modify(|p| p.failed = true);
    }

    /// Size of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// True when the file is so much larger than a snapshot that compaction pays.
    #[must_use]
    pub fn wants_compaction(&self) -> bool {
        let snapshot = self.shared.snapshot_bytes.load(Ordering::Relaxed);
        self.bytes() > (64 << 20).max(snapshot.saturating_mul(4))
    }

    /// Replaces all records up to now by a snapshot of them. Call it under the lock that orders
    /// appends; the work is done by the writer.
    pub fn compact(&self, snapshot: Vec<u8>) {
        let mut queue = self.shared.queue.lock();
        if queue.rotate.is_none() {
            queue.rotate = Some((queue.bytes.len(), snapshot));
        }
        drop(queue);
        self.shared.work.notify_one();
    }

    /// Writes and syncs what is queued and ends the threads. Blocks.
    pub fn stop(&self) {
        self.shared.queue.lock().stop = true;
        self.shared.work.notify_one();
        self.shared.sync.notify_one();
        for thread in self.threads.lock().drain(..) {
            // A thread that panicked has left a failed journal behind; nothing more to do here.
            let _ = thread.join();
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn wait(mut progress: watch::Receiver<Progress>, lsn: Lsn) -> Result<(), Errno> {
    let there = progress.wait_for(|p| p.failed || p.closed || p.lsn >= lsn);
    match tokio::time::timeout(WAIT_MAX, there).await {
        Ok(Ok(p)) if !p.failed && p.lsn >= lsn => Ok(()),
        _ => Err(Errno::EIO),
    }
}

/// Writes a whole new journal beside the old one and puts it in its place.
fn replace(dir: &Path, job: u64, snapshot: &[u8]) -> io::Result<File> {
    let fresh = dir.join("journal.new");
    let mut options = OpenOptions::new();
    let mut file = options.create(true).write(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(&header(job))?;
    file.write_all(snapshot)?;
    file.sync_all()?;
    // Freeing a large file can take seconds; whoever waits for the new one does not wait for that.
    let old = File::open(dir.join("journal")).ok();
    std::fs::rename(&fresh, dir.join("journal"))?;
    std::thread::spawn(move || drop(old));
    File::open(dir)?.sync_all()?;
    Ok(file)
}

fn write_loop(shared: &Shared) {
    loop {
        let (bytes, rotate, lsn, stop) = {
            let mut queue = shared.queue.lock();
            while queue.bytes.is_empty() && queue.rotate.is_none() && !queue.stop {
                shared.work.wait(&mut queue);
            }
            let bytes = std::mem::take(&mut queue.bytes);
            (bytes, queue.rotate.take(), queue.appended, queue.stop)
        };
        let result = write_group(shared, &bytes, rotate);
        let failed = result.is_err() || shared.written.borrow().failed;
        if let Err(error) = result {
            tracing::error!(%error, "the journal cannot be written; every change fails from here on");
        }
        shared.written.send_replace(Progress { lsn, failed, closed: stop });
        if stop {
            shared.sync.notify_one();
            return;
        }
    }
}

fn write_group(shared: &Shared, bytes: &[u8], rotate: Option<(usize, Vec<u8>)>) -> io::Result<()> {
    let file = Arc::clone(&shared.file.lock());
    let Some((at, snapshot)) = rotate else {
        shared.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        return (&*file).write_all(bytes);
    };
    (&*file).write_all(&bytes[..at])?;
    let mut fresh = replace(&shared.dir, shared.job, &snapshot)?;
    fresh.write_all(&bytes[at..])?;
    let size = (HEADER_BYTES + snapshot.len()) as u64;
    shared.snapshot_bytes.store(size, Ordering::Relaxed);
    shared.bytes.store(size + (bytes.len() - at) as u64, Ordering::Relaxed);
    *shared.file.lock() = Arc::new(fresh);
    Ok(())
}

fn sync_loop(shared: &Shared) {
    loop {
        let stop = {
            let mut queue = shared.queue.lock();
            if queue.sync_wanted <= shared.synced.borrow().lsn && !queue.stop {
                shared.sync.wait_for(&mut queue, SYNC_INTERVAL);
            }
            queue.stop
        };
        if stop {
            let lsn = shared.queue.lock().appended;
            // The writer finishes first; what is appended after its end is nobody's.
            for _ in 0..5_000 {
                let written = *shared.written.borrow();
                if written.lsn >= lsn || written.failed {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // The position first: what is written after it is not covered by this sync.
        let written = *shared.written.borrow();
        let file = Arc::clone(&shared.file.lock());
        let synced = *shared.synced.borrow();
        if written.lsn > synced.lsn || stop {
            let failed = synced.failed || written.failed || file.sync_data().is_err();
            if failed {
                shared.written.send_modify(|p| p.failed = true);
            }
            shared.synced.send_replace(Progress { lsn: written.lsn, failed, closed: stop });
        }
        if stop {
            return;
        }
    }
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
