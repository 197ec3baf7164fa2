//! The journal: a file of checksummed records that one thread writes in groups. Knows nothing of
//! what a record means; the bytes are in [`format`] and `docs/journal.md`.
//!
//! Consistency: a record is *written* when write(2) returned (it survives the service), *synced*
//! when fdatasync(2) did (it survives the machine). Records become written in the order they were
//! appended, so what is found at start is always a prefix of what was appended.
//! Retries: what finds the disk full is written again, at the same place, until there is room;
//! meanwhile those who wait are told ENOSPC. Room is kept behind the end, so that a flush that
//! makes room can still be noted. After any other failed write, or a failed sync, nobody knows
//! what the disk has; every later wait fails with EIO until the service is started again.
//! Crash consistency: a torn tail is cut off at start; damage is an error that names the offset.
//! The first group that is written after a sync begins with a mark of how far it reached, by
//! which a reader can tell the two apart after a power loss. A compacted journal replaces the old
//! one by rename after it was synced. Making the new file takes its time, and nobody waits for it: the snapshot is
//! of one moment ([`Journal::begin_compaction`]), and what is appended while it is encoded and written
//! ([`Journal::finish_compaction`], in the thread of whoever does it) goes to the old file, and is kept until it is
//! put behind the snapshot.

mod copy;
mod format;
mod taps;

pub use copy::{Copy, Fits};
pub use format::{Read, frame};
pub use taps::{Keeper, Keepers, Records, Tap};

use ebb_journal::{Directory, MARK_BYTES, Storage, Stored, put_mark};
use ebb_locks::{Condvar, Mutex};
use ebb_types::Errno;
use format::{Boot, fresh, parse};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

const NAME: &str = "journal";
/// Beside it, until it takes its place.
const COMING: &str = "journal.new";

/// What fsync nobody asked for is done this often.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// An answer that waits for the disk longer than this fails (EIO).
const WAIT_MAX: Duration = Duration::from_secs(30);

/// So much room is kept behind the end of the journal, and taken anew when half of it is used.
const RESERVED_BYTES: u64 = 1 << 20;

/// Between two attempts to write to a full disk; how many at the end.
const FULL_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRIES: u32 = 100;

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
        match ebb_journal::take_lock(&lock) {
            Ok(()) => Ok(StateDir { path: path.to_owned(), _lock: lock }),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Err(JournalError::Locked { path: path.to_owned() })
            }
            Err(e) => Err(failed(e)),
        }
    }

    fn journal(&self) -> PathBuf {
        self.path.join("journal")
    }

    /// Another journal begins here; the one that there is is kept, under another name.
    pub fn set_aside(&self) -> Result<Option<PathBuf>, JournalError> {
        let failed = |source| JournalError::Io { path: self.journal(), source };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let seconds = now.map_or(0, |d| d.as_secs());
        let free = |n: &u64| !self.path.join(format!("journal.before-{n}")).exists();
        let aside = (seconds..).find(free).map(|n| self.path.join(format!("journal.before-{n}")));
        let Some(aside) = aside.filter(|_| self.journal().exists()) else { return Ok(None) };
        std::fs::rename(self.journal(), &aside).map_err(failed)?;
        File::open(&self.path).and_then(|dir| dir.sync_all()).map_err(failed)?;
        Ok(Some(aside))
    }

    /// What the journal says; `None` when there is none.
    pub fn read(&self) -> Result<Option<Read>, JournalError> {
        read(&Directory::new(&self.path), &self.journal())
    }
}

fn read(storage: &dyn Storage, path: &Path) -> Result<Option<Read>, JournalError> {
    let bytes = storage.read(NAME);
    let bytes = bytes.map_err(|source| JournalError::Io { path: path.to_owned(), source })?;
    bytes.map(|b| parse(path, &b, Boot::now())).transpose()
}

/// What the bytes of a journal say in this boot.
pub fn judge(bytes: &[u8]) -> Result<Read, JournalError> {
    parse(Path::new(NAME), bytes, Boot::now())
}

#[derive(Default)]
struct Queue {
    bytes: Vec<u8>,
    appended: Lsn,
    /// What was appended since the moment of a snapshot that is being made.
    since: Option<Vec<u8>>,
    /// Whoever follows.
    taps: Vec<Weak<Tap>>,
    rotate: Option<Rotation>,
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
    /// The disk is full: the rest waits for room.
    full: bool,
}

/// A file and how much of it is whole records.
#[derive(Clone)]
struct Out {
    file: Arc<dyn Stored>,
    len: u64,
    /// Up to where it has room.
    reserved: u64,
    /// Counts the files: an offset in one means nothing in the next.
    generation: u64,
}

struct Shared {
    storage: Arc<dyn Storage>,
    job: u64,
    queue: Mutex<Queue>,
    /// Wakes the writer.
    work: Condvar,
    /// Wakes the syncer.
    sync: Condvar,
    /// The file that is written; replaced by compaction.
    out: Mutex<Out>,
    /// How far which file was synced; the writer's next group says so.
    mark: Mutex<Option<(u64, u64)>>,
    written: watch::Sender<Progress>,
    synced: watch::Sender<Progress>,
    keepers: Arc<Keepers>,
    bytes: AtomicU64,
    snapshot_bytes: AtomicU64,
}

/// The journal, open for appending.
pub struct Journal {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    _dir: Option<StateDir>,
}

impl Journal {
    /// Begins a journal with a snapshot (framed records), replacing the old one.
    pub fn start(dir: StateDir, job: u64, snapshot: &[u8]) -> Result<Journal, JournalError> {
        let storage = Arc::new(Directory::new(&dir.path));
        let path = dir.journal();
        Journal::start_on(storage, Some(dir), job, snapshot)
            .map_err(|source| JournalError::Io { path, source })
    }

    fn start_on(
        storage: Arc<dyn Storage>,
        dir: Option<StateDir>,
        job: u64,
        snapshot: &[u8],
    ) -> io::Result<Journal> {
        let (file, bytes) = replace(&*storage, job, snapshot)?;
        let shared = Arc::new(Shared {
            storage,
            job,
            queue: Mutex::new(Queue::default()),
            work: Condvar::new(),
            sync: Condvar::new(),
            out: Mutex::new(Out::new(file, bytes, 0)),
            mark: Mutex::new(None),
            written: watch::Sender::new(Progress::default()),
            synced: watch::Sender::new(Progress::default()),
            keepers: Arc::default(),
            bytes: AtomicU64::new(bytes),
            snapshot_bytes: AtomicU64::new(bytes),
        });
        let spawn = |name: &str, body: fn(&Shared)| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(move || body(&shared))
        };
        let threads = vec![spawn("journal-write", write_loop)?, spawn("journal-sync", sync_loop)?];
        Ok(Journal { shared, threads: Mutex::new(threads), _dir: dir })
    }

    /// Queues a record; never waits. Call it under the lock that orders what it describes.
    pub fn append(&self, body: &[u8]) -> Lsn {
        let mut queue = self.shared.queue.lock();
        let begin = queue.bytes.len();
        frame(&mut queue.bytes, body);
        queue.appended += 1;
        let lsn = queue.appended;
        let Queue { bytes, since, taps, .. } = &mut *queue;
        if let Some(since) = since {
            since.extend_from_slice(&bytes[begin..]);
        }
        if !taps.is_empty() {
            taps.retain(|tap| tap.upgrade().is_some_and(|tap| tap.put(&bytes[begin..], lsn)));
        }
        drop(queue);
        self.shared.work.notify_one();
        lsn
    }

    /// Whatever is appended from now on; what is there is in a snapshot that is taken under the same lock, the one
    /// that orders appends.
    #[must_use]
    pub fn follow(&self) -> Arc<Tap> {
        let mut queue = self.shared.queue.lock();
        let tap = Arc::new(Tap::from(queue.appended));
        queue.taps.push(Arc::downgrade(&tap));
        tap
    }

    /// Who keeps it as well.
    #[must_use]
    pub fn keepers(&self) -> &Arc<Keepers> {
        &self.shared.keepers
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

    /// Waits until a record is on stable storage, with all who keep it.
    pub async fn synced(&self, lsn: Lsn) -> Result<(), Errno> {
        self.written(lsn).await?;
        {
            let mut queue = self.shared.queue.lock();
            queue.sync_wanted = queue.sync_wanted.max(lsn);
        }
        self.shared.sync.notify_one();
        wait(self.shared.synced.subscribe(), lsn).await?;
        if self.shared.keepers.least() >= lsn {
            return Ok(());
        }
        let mut least = self.shared.keepers.watch();
        match tokio::time::timeout(WAIT_MAX, least.wait_for(|least| *least >= lsn)).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Errno::EIO),
        }
    }

    /// Everything up to this record is on stable storage, with all who keep it.
    #[must_use]
    pub fn synced_so_far(&self) -> Lsn {
        let synced = *self.shared.synced.borrow();
        // After a failed sync nobody knows.
        if synced.failed { 0 } else { synced.lsn.min(self.shared.keepers.least()) }
    }

    /// Nobody knows what is in it.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.shared.written.borrow().failed || self.shared.synced.borrow().failed
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

    /// All records up to now are to be replaced by a snapshot of them. Call it under the lock that orders
    /// appends, when the snapshot is taken; false when one is being made already.
    #[must_use]
    pub fn begin_compaction(&self) -> bool {
        let mut queue = self.shared.queue.lock();
        let free = queue.rotate.is_none() && queue.since.is_none();
        if free {
            queue.since = Some(Vec::new());
        }
        free
    }

    /// The snapshot of that moment (framed records). Blocks until it is on stable storage; it takes the place of
    /// the old records soon after.
    pub fn finish_compaction(&self, snapshot: &[u8]) {
        let prepared = prepare(&*self.shared.storage, self.shared.job, snapshot);
        let mut queue = self.shared.queue.lock();
        let since = queue.since.take().unwrap_or_default();
        match prepared {
            Ok((file, len)) => {
                let at = queue.bytes.len();
                queue.rotate = Some(Rotation { at, file, len, since });
            }
            // The old one goes on; the next compaction may find room.
            Err(error) => tracing::warn!(%error, "the journal cannot be compacted"),
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
    let there = progress.wait_for(|p| p.failed || p.closed || p.full || p.lsn >= lsn);
    match tokio::time::timeout(WAIT_MAX, there).await {
        Ok(Ok(p)) if !p.failed && p.lsn >= lsn => Ok(()),
        Ok(Ok(p)) if !p.failed && p.full => Err(Errno::ENOSPC),
        _ => Err(Errno::EIO),
    }
}

impl Out {
    fn new(file: Arc<dyn Stored>, len: u64, generation: u64) -> Out {
        let mut out = Out { file, len, reserved: 0, generation };
        out.keep_room();
        out
    }

    fn keep_room(&mut self) {
        if self.len + RESERVED_BYTES / 2 > self.reserved {
            self.file.reserve(self.len, RESERVED_BYTES);
            self.reserved = self.len + RESERVED_BYTES;
        }
    }
}

/// Writes a whole new journal beside the old one.
fn prepare(storage: &dyn Storage, job: u64, snapshot: &[u8]) -> io::Result<(Arc<dyn Stored>, u64)> {
    let bytes = fresh(job, Boot::now(), snapshot);
    Ok((written_whole(storage, &bytes)?, bytes.len() as u64))
}

fn written_whole(storage: &dyn Storage, bytes: &[u8]) -> io::Result<Arc<dyn Stored>> {
    let file = storage.create(COMING)?;
    file.write_at(bytes, 0)?;
    file.sync()?;
    Ok(file)
}

/// Puts it in the place of the old one.
fn install(storage: &dyn Storage) -> io::Result<()> {
    storage.rename(COMING, NAME)?;
    storage.sync_names()
}

fn replace(storage: &dyn Storage, job: u64, snapshot: &[u8]) -> io::Result<(Arc<dyn Stored>, u64)> {
    let new = prepare(storage, job, snapshot)?;
    install(storage)?;
    Ok(new)
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
        let result = write_when_there_is_room(shared, &bytes, rotate.as_ref());
        let failed = result.is_err() || shared.written.borrow().failed;
        if let Err(error) = result {
            tracing::error!(%error, "the journal cannot be written; every change fails from here on");
        }
        shared.written.send_replace(Progress { lsn, failed, closed: stop, full: false });
        if stop {
            shared.sync.notify_one();
            return;
        }
    }
}

/// A new journal that takes the place of the old one.
struct Rotation {
    /// What was queued before that still goes to the old one.
    at: usize,
    /// It has the snapshot, so many bytes,
    file: Arc<dyn Stored>,
    len: u64,
    /// and lacks what was appended since.
    since: Vec<u8>,
}

impl Rotation {
    /// Completes it, and puts it in the place of the old one.
    fn install(&self, storage: &dyn Storage) -> io::Result<(Arc<dyn Stored>, u64)> {
        let mut len = self.len;
        if !self.since.is_empty() {
            let mut group = self.since.clone();
            // All of it is on stable storage before the file gets its name.
            let upto = self.len + (group.len() + MARK_BYTES) as u64;
            put_mark(&mut group, upto);
            self.file.write_at(&group, self.len)?;
            self.file.sync()?;
            len = upto;
        }
        install(storage)?;
        Ok((Arc::clone(&self.file), len))
    }
}

fn write_when_there_is_room(
    shared: &Shared,
    bytes: &[u8],
    rotate: Option<&Rotation>,
) -> io::Result<()> {
    let mut last = LAST_RETRIES;
    loop {
        let error = match write_group(shared, bytes, rotate) {
            Err(e) if Errno::from(&e).is_full() => e,
            done => return done,
        };
        if !shared.written.borrow().full {
            tracing::error!(%error, "no room for the journal: changes fail until there is some where --state (or --cache) is");
            shared.written.send_modify(|p| p.full = true);
        }
        if shared.queue.lock().stop {
            last -= 1;
        }
        if last == 0 {
            return Err(error);
        }
        std::thread::sleep(FULL_RETRY);
    }
}

/// Writes records where the last group ended. After an error it can be done again.
fn write_group(shared: &Shared, bytes: &[u8], rotate: Option<&Rotation>) -> io::Result<()> {
    // Only this thread changes it.
    let mut out = shared.out.lock().clone();
    let (old, new) = bytes.split_at(rotate.map_or(bytes.len(), |rotation| rotation.at));
    append(shared, &mut out, old)?;
    if let Some(rotation) = rotate {
        match rotation.install(&*shared.storage) {
            Ok((file, len)) => {
                out = Out::new(file, len, out.generation + 1);
                shared.snapshot_bytes.store(len, Ordering::Relaxed);
            }
            // The old one goes on; the next compaction may find room.
            Err(e) if Errno::from(&e).is_full() => {
                tracing::warn!(error = %e, "no room to compact the journal")
            }
            Err(e) => return Err(e),
        }
        append(shared, &mut out, new)?;
    }
    shared.bytes.store(out.len, Ordering::Relaxed);
    *shared.out.lock() = out;
    Ok(())
}

fn append(shared: &Shared, out: &mut Out, records: &[u8]) -> io::Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    let mut group = Vec::new();
    let mark = *shared.mark.lock();
    if let Some((generation, upto)) = mark
        && generation == out.generation
    {
        put_mark(&mut group, upto);
    }
    group.extend_from_slice(records);
    out.file.write_at(&group, out.len)?;
    out.len += group.len() as u64;
    out.keep_room();
    // The syncer may have come to another one meanwhile.
    let mut newest = shared.mark.lock();
    if *newest == mark {
        *newest = None;
    }
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
        let out = shared.out.lock().clone();
        let synced = *shared.synced.borrow();
        if written.lsn > synced.lsn || stop {
            let failed = synced.failed || written.failed || out.file.sync().is_err();
            if failed {
                shared.written.send_modify(|p| p.failed = true);
            }
            if !failed {
                *shared.mark.lock() = Some((out.generation, out.len));
            }
            shared.synced.send_replace(Progress {
                lsn: written.lsn,
                failed,
                closed: stop,
                full: false,
            });
        }
        if stop {
            return;
        }
    }
}

#[cfg(test)]
pub mod tests;

#[cfg(test)]
mod power_tests;
