//! One file as this node holds it: its view, its cache file, who has it open, and the turn in
//! which its synchronisation events happen.
//!
//! Lock order: `CachedFile::turn` (async, a queue for sync events, held across RPCs and guarding
//! no data) before `CachedFile::state` (short, never across an RPC or fsync) before
//! `CachedFile::fetching` and `CachedFile::held` (short).

use crate::alone::Alone;
use crate::cache::{self, CacheDir};
use crate::home::Whereabouts;
use crate::leases::Published;
use crate::lock_book::{LockBook, LockOwner};
use crate::map_ahead::MapAhead;
use crate::medium::has_sums;
use crate::passing::Passing;
use crate::sums::{Prepared, Sums};
use bytes::Bytes;
use ebb_backend::BackingFile;
use ebb_consistency::{AttachedBook, FileLease, FileView, Model, QuietWrites};
use ebb_handover::Opened;
use ebb_locks::{Mutex, RwLock, RwLockUpgradableReadGuard};
use ebb_node_journal::Home;
use ebb_types::{Attr, ByteRange, Errno, Ino, NodeId, Time, Version};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tokio::sync::watch;

/// What changes together under the state lock.
pub struct State {
    /// Which bytes are where.
    pub view: FileView,
    /// The model that applies to this file.
    pub model: Arc<Model>,
    /// Local open handles.
    pub opens: u32,
    /// The service knows that this node has the file open.
    pub registered: bool,
    /// The backing file that the unowned bytes come from, with its inode number there.
    pub backing: Option<(u64, Arc<dyn BackingFile>)>,
    /// When an application last wrote here, until that is published.
    pub mtime: Option<Time>,
    /// Path in the mount when last heard of; for messages.
    pub path: Vec<u8>,
    /// Its attributes when last heard of, for the journal.
    pub attr: Option<Attr>,
    /// Where its bytes are on the backing, when last heard of; for the journal.
    pub home: Whereabouts,
    /// What the backing has under its name until it is published; for the journal.
    pub under: Option<Home>,
    /// Whether any other node ever had it; for the journal.
    pub alone: Alone,
    /// An append failed that may have been made all the same, at a later version than this.
    pub append_unheard: Option<Version>,
    /// Where this node cut it, and at which versions; for the journal.
    pub cuts: Vec<(u64, Version)>,
    /// It has no name any more: its bytes never go to the backing.
    pub orphan: bool,
    /// Opens and closes of it count (`ops::coupling`).
    pub coupled: bool,
    /// It is flushed only under pressure or on request.
    pub held: bool,
    /// What need not be asked.
    pub lease: FileLease,
    /// What need not be told.
    pub quiet: QuietWrites,
    /// This node's last publication of it.
    pub published: Published,
    /// What programs attached themselves.
    pub attached: AttachedBook,
    /// The kernel reads and writes the cache file past the daemon.
    pub passing: Option<Passing>,
    /// Of what the daemon has put into the cache file.
    pub sums: Sums,
    /// Bytes of the cache file that were found not to be what was put there.
    pub damaged: Vec<ByteRange>,
}

/// One file of this node. Lives as long as it has local bytes or is open.
pub struct CachedFile {
    /// Which file.
    pub ino: Ino,
    /// Sync events of this file take turns. A queue, not a data lock.
    pub turn: tokio::sync::Mutex<()>,
    /// Everything that changes.
    pub state: RwLock<State>,
    /// It is in the node's list of files that may be dirty.
    pub listed: AtomicBool,
    /// The cache file's name is on stable storage.
    pub name_synced: AtomicBool,
    /// The log says that bytes of it are lost.
    pub said_lost: AtomicBool,
    /// One for this, and one for each open handle by which somebody may have it mapped to store into it.
    pub mappable: Arc<()>,
    /// One more than the number of the chunk that was used last, for the eviction order; 0: none.
    pub last_chunk: AtomicU64,
    /// Who may hold locks of it at the service.
    pub locks: Mutex<LockBook>,
    /// The book is not empty: there may be locks, broken handles, or locks to be given back.
    pub guarded: AtomicBool,
    /// Locks are given back in turn.
    pub giving_back: tokio::sync::Mutex<()>,
    /// What reads have asked of its map.
    pub map_ahead: Mutex<MapAhead>,
    fetching: Mutex<Vec<InFlight>>,
    held: Mutex<Vec<ByteRange>>,
    /// The kernel let go of it while it was still open here: whoever releases it last looks
    /// whether it has a name.
    pub forgotten: AtomicBool,
    /// When it was closed last, or taken in, by [`now_ms`].
    pub closed_at: AtomicU64,
    /// It was written since it was known to be on the disk.
    pub unsettled: AtomicBool,
    /// The disk has failed, and it was not looked through since.
    pub failing: AtomicBool,
    /// And the kernel said so: what has no sum is not trusted.
    pub distrusted: AtomicBool,
    /// Held by whoever syncs the cache file, and alone by whoever asks what came of that.
    pub syncs: RwLock<Syncs>,
    /// Hears of errors in place of the descriptor below when that had to be closed.
    witness: Mutex<Option<File>>,
    /// Somebody has it open here.
    in_use: AtomicBool,
    cache: Mutex<Option<Arc<File>>>,
}

struct InFlight {
    range: ByteRange,
    done: watch::Receiver<Option<Fetched>>,
}

/// What a lock of this stands for: the cache file is being synced.
#[derive(Debug)]
pub struct Syncs;

/// What a fetch brought.
#[derive(Clone, Debug)]
pub struct Fetched {
    range: ByteRange,
    as_of: Version,
    bytes: Bytes,
}

impl Fetched {
    /// What it brought, if that is what somebody wants who knows of nothing newer than `as_of`.
    #[must_use]
    pub fn part(&self, range: ByteRange, as_of: Version) -> Option<Bytes> {
        let at = range.start().checked_sub(self.range.start())? as usize;
        let fits = range.end() <= self.range.end() && as_of <= self.as_of;
        fits.then(|| self.bytes.slice(at..at + range.len() as usize))
    }
}

/// Held by whoever fetches a range; others that want it wait until it is dropped.
pub struct FetchTicket {
    file: Arc<CachedFile>,
    range: ByteRange,
    done: watch::Sender<Option<Fetched>>,
}

impl FetchTicket {
    /// All `bytes` of the range have come, as they were at `as_of`.
    pub fn finish(self, as_of: Version, bytes: &Bytes) {
        self.done.send_replace(Some(Fetched { range: self.range, as_of, bytes: bytes.clone() }));
    }
}

impl Drop for FetchTicket {
    fn drop(&mut self) {
        let mut fetching = self.file.fetching.lock();
        if let Some(at) = fetching.iter().position(|f| f.range == self.range) {
            fetching.swap_remove(at);
        }
    }
}

/// While this lives, these bytes of the cache file are not given up to make room.
pub struct HeldBytes {
    file: Arc<CachedFile>,
    ranges: Vec<ByteRange>,
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        let mut held = self.file.held.lock();
        for range in &self.ranges {
            if let Some(at) = held.iter().position(|h| h == range) {
                held.swap_remove(at);
            }
        }
    }
}

/// What to do about a range that is not here.
pub enum Fetch {
    /// This caller fetches it.
    Mine(FetchTicket),
    /// Somebody does already; look again when this has no sender any more.
    Wait(watch::Receiver<Option<Fetched>>),
}

/// Milliseconds since somebody asked first.
#[must_use]
pub fn now_ms() -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed().as_millis() as u64
}

impl CachedFile {
    /// A file of which nothing is here yet.
    #[must_use]
    pub fn new(ino: Ino, me: NodeId, model: Arc<Model>) -> CachedFile {
        CachedFile {
            ino,
            turn: tokio::sync::Mutex::new(()),
            state: RwLock::new(State {
                view: FileView::new(me),
                model,
                opens: 0,
                registered: false,
                backing: None,
                mtime: None,
                path: Vec::new(),
                attr: None,
                home: Whereabouts::default(),
                under: None,
                alone: Alone::default(),
                append_unheard: None,
                cuts: Vec::new(),
                orphan: false,
                coupled: false,
                held: false,
                lease: FileLease::default(),
                quiet: QuietWrites::default(),
                published: Published::default(),
                attached: AttachedBook::default(),
                passing: None,
                sums: Sums::default(),
                damaged: Vec::new(),
            }),
            listed: AtomicBool::new(false),
            name_synced: AtomicBool::new(false),
            said_lost: AtomicBool::new(false),
            mappable: Arc::default(),
            last_chunk: AtomicU64::new(0),
            locks: Mutex::default(),
            guarded: AtomicBool::new(false),
            giving_back: tokio::sync::Mutex::new(()),
            map_ahead: Mutex::default(),
            fetching: Mutex::new(Vec::new()),
            held: Mutex::new(Vec::new()),
            forgotten: AtomicBool::new(false),
            closed_at: AtomicU64::new(now_ms()),
            unsettled: AtomicBool::new(false),
            failing: AtomicBool::new(false),
            distrusted: AtomicBool::new(false),
            syncs: RwLock::new(Syncs),
            witness: Mutex::new(None),
            in_use: AtomicBool::new(false),
            cache: Mutex::new(None),
        }
    }

    /// True when its book of locks has anything in it.
    pub fn is_guarded(&self) -> bool {
        self.guarded.load(Acquire)
    }

    /// Changes the book of locks.
    pub fn change_locks<T>(&self, change: impl FnOnce(&mut LockBook) -> T) -> T {
        let mut book = self.locks.lock();
        let result = change(&mut book);
        self.guarded.store(!book.is_empty(), Release);
        result
    }

    /// The locks that were taken through handles of a dead daemon.
    pub fn inherit_locks(&self, handles: &[Opened]) {
        self.change_locks(|book| {
            for handle in handles {
                for id in &handle.record_owners {
                    book.inherit(LockOwner { id: *id, flock: false }, handle.fh);
                }
                if handle.flock_owner != 0 {
                    let owner = LockOwner { id: handle.flock_owner, flock: true };
                    book.inherit(owner, handle.fh);
                }
                if handle.broken {
                    book.break_handle(handle.fh);
                }
            }
        });
    }

    /// The cache file; made when first needed. Its descriptor is kept while somebody has the file
    /// open here, or what was written may not be on the disk, and no longer: a node can hold more
    /// files than descriptors.
    pub fn cache(&self, dir: &CacheDir) -> Result<Arc<File>, Errno> {
        let mut kept = self.cache.lock();
        if let Some(file) = &*kept {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(dir.file(self.ino)?);
        if self.is_in_use() || self.unsettled.load(Acquire) {
            *kept = Some(Arc::clone(&file));
        }
        Ok(file)
    }

    /// Somebody has it open here.
    pub fn is_in_use(&self) -> bool {
        self.in_use.load(Acquire)
    }

    /// The descriptor that is kept.
    pub fn kept(&self) -> Option<Arc<File>> {
        self.cache.lock().clone()
    }

    /// What else hears of errors.
    pub fn ask_witness<T>(&self, ask: impl FnOnce(&File) -> T) -> Option<T> {
        self.witness.lock().as_ref().map(ask)
    }

    /// Gives up the descriptors that nobody needs any more.
    pub fn let_go(&self) {
        let mut kept = self.cache.lock();
        if !self.unsettled.load(Acquire) {
            *self.witness.lock() = None;
            if !self.is_in_use() {
                *kept = None;
            }
        }
    }

    /// For how long nobody has had it open.
    pub fn closed_for_ms(&self) -> u64 {
        now_ms().saturating_sub(self.closed_at.load(Acquire))
    }

    /// Somebody has it open here now, or nobody any more.
    pub fn set_in_use(&self, in_use: bool) {
        let mut kept = self.cache.lock();
        self.in_use.store(in_use, Release);
        if !in_use {
            self.closed_at.store(now_ms(), Release);
            if !self.unsettled.load(Acquire) {
                *kept = None;
            }
        }
    }

    /// True when writes past the daemon are looked for.
    pub fn is_tracked(&self) -> bool {
        self.state.read().passing.as_ref().is_some_and(|p| p.track.is_some())
    }

    /// True when nobody has the cache file open for writing or mapped writably. False as well
    /// while somebody of this daemon holds it. Called with the turn, so that nobody opens it.
    pub fn has_no_writers(&self, dir: &CacheDir) -> bool {
        let mut kept = self.cache.lock();
        // Open before the other one is closed: one of them hears of every error.
        let file = dir.read_only(self.ino);
        if let Some(ours) = kept.take() {
            if Arc::strong_count(&ours) == 1 {
                self.hear_last(dir, &ours);
            }
            if let Err(shared) = Arc::try_unwrap(ours) {
                *kept = Some(shared);
                return false;
            }
        }
        match file {
            Ok(file) => {
                let alone = cache::has_no_writers(&file).unwrap_or(false);
                if self.unsettled.load(Acquire) {
                    *self.witness.lock() = Some(file);
                }
                alone
            }
            // Without a name it cannot be asked for; and nobody else will ever read it.
            Err(e) => e.kind() == std::io::ErrorKind::NotFound,
        }
    }

    /// Somebody here may have it mapped to store into it: a mapping keeps its handle.
    pub fn may_be_mapped(&self) -> bool {
        Arc::strong_count(&self.mappable) > 1
    }

    /// Its path for messages.
    #[must_use]
    pub fn label(&self) -> String {
        let state = self.state.read();
        if state.path.is_empty() {
            format!("inode {}", self.ino)
        } else {
            String::from_utf8_lossy(&state.path).into_owned()
        }
    }

    /// Keeps bytes of the cache file from being given up. Whoever asks under the state lock
    /// afterwards finds them here for as long as the answer lives, or not here now.
    #[must_use]
    pub fn hold(self: &Arc<Self>, ranges: &[ByteRange]) -> HeldBytes {
        self.held.lock().extend_from_slice(ranges);
        HeldBytes { file: Arc::clone(self), ranges: ranges.to_vec() }
    }

    /// Somebody holds some of these bytes.
    #[must_use]
    pub fn is_held(&self, range: ByteRange) -> bool {
        self.held.lock().iter().any(|h| h.overlaps(range))
    }

    /// Asks for the right to fetch `range`.
    pub fn fetch(self: &Arc<Self>, range: ByteRange) -> Fetch {
        let mut fetching = self.fetching.lock();
        if let Some(other) = fetching.iter().find(|f| f.range.overlaps(range)) {
            return Fetch::Wait(other.done.clone());
        }
        let (sender, receiver) = watch::channel(None);
        fetching.push(InFlight { range, done: receiver });
        Fetch::Mine(FetchTicket { file: Arc::clone(self), range, done: sender })
    }

    /// Stores an application's bytes. Returns where they went; that is less than all of them
    /// only when the buffer is full.
    /// `placed` hears where an append is about to go.
    pub fn store(
        &self,
        dir: &CacheDir,
        place: Place,
        data: &[u8],
        placed: impl Fn(ByteRange),
    ) -> Result<ByteRange, Errno> {
        let cache = self.cache_to_write(dir)?;
        let mut state = self.state.write();
        let offset = match place {
            Place::At(offset) => offset,
            Place::End if state.passing.is_some() => cache.metadata()?.len(),
            Place::End => state.view.size(),
        };
        let range = checked_range(offset, data.len() as u64)?;
        // The lock is held over the copy into the page cache, so that neither a fetch nor an
        // attach can come between the bytes and the note of them.
        if place == Place::End {
            placed(range);
        }
        let done = self.put(dir, &cache, &mut state, data, offset);
        let stored = match done {
            (0, Some(e)) => {
                placed(ByteRange::at(range.start(), 0));
                return Err(Errno::from(e));
            }
            (n, _) => ByteRange::at(range.start(), n as u64),
        };
        if place == Place::End && stored != range {
            placed(stored);
        }
        let range = stored;
        state.view.write(range);
        state.quiet.wrote_aloud(range);
        state.mtime = Some(Time::now());
        Ok(range)
    }

    /// Makes `range` zeros that this node has written.
    pub fn store_zeros(&self, dir: &CacheDir, range: ByteRange) -> Result<(), Errno> {
        let cache = self.cache_to_write(dir)?;
        let mut state = self.state.write();
        state.sums.forget(range);
        cache::punch(&cache, range)?;
        // What is ours is in the cache file, zeros too: readers of it expect every byte.
        cache::extend(&cache, range.end())?;
        state.view.write(range);
        state.quiet.wrote_aloud(range);
        state.mtime = Some(Time::now());
        Ok(())
    }

    /// Keeps fetched bytes where they are still wanted and still right.
    pub fn keep(
        &self,
        dir: &CacheDir,
        range: ByteRange,
        as_of: Version,
        data: &[u8],
    ) -> Result<(), Errno> {
        let cache = self.cache_to_write(dir)?;
        // Nobody writes meanwhile; readers go on, as these bytes are not here yet.
        let state = self.state.upgradable_read();
        let at = |part: ByteRange| {
            let from = (part.start() - range.start()) as usize;
            &data[from..from + part.len() as usize]
        };
        let wanted = state.view.still_wanted(range, as_of);
        let is_tracked = state.passing.as_ref().is_some_and(|p| p.track.is_some());
        let sums = has_sums(dir, &state);
        let mut prepared: Vec<Prepared> = Vec::new();
        let mut stored = Ok(());
        if !is_tracked {
            for part in &wanted {
                if sums {
                    prepared.push(state.sums.prepare_after(
                        prepared.last(),
                        &cache,
                        at(*part),
                        part.start(),
                    ));
                }
                stored = stored.and_then(|()| cache.write_all_at(at(*part), part.start()));
            }
        }
        let mut state = RwLockUpgradableReadGuard::upgrade(state);
        for prepared in &prepared {
            // Of a write that failed nobody knows how much there is of it.
            let bytes = if stored.is_ok() { prepared.len() } else { 0 };
            self.put_sums(dir, &mut state, prepared, bytes);
        }
        stored?;
        if let Some(Passing { track: Some(track), .. }) = &mut state.passing {
            for part in &wanted {
                track.merge(&cache, part.start(), at(*part))?;
            }
        }
        state.view.filled(&wanted);
        Ok(())
    }
}

/// Where written bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At this offset.
    At(u64),
    /// At the end of the file as this node sees it.
    End,
}

/// Writes as much as goes; says how much that was and what stopped it.
pub(crate) fn write_most(file: &File, data: &[u8], offset: u64) -> (usize, Option<std::io::Error>) {
    let mut done = 0;
    while done < data.len() {
        match file.write_at(&data[done..], offset + done as u64) {
            Ok(0) => return (done, Some(std::io::ErrorKind::WriteZero.into())),
            Ok(n) => done += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return (done, Some(e)),
        }
    }
    (done, None)
}

/// The largest size a file may have, as on Linux.
pub const SIZE_MAX: u64 = i64::MAX as u64;

/// `len` bytes at `offset`, if a file may have them.
pub fn checked_range(offset: u64, len: u64) -> Result<ByteRange, Errno> {
    match offset.checked_add(len) {
        Some(end) if end <= SIZE_MAX => Ok(ByteRange::new(offset, end)),
        _ => Err(Errno::EFBIG),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_consistency::{FileState, ModelTable};

    /// Bytes that did not arrive, as on a full disk, do not count as here: neither those that could
    /// not be stored nor what comes after them.
    #[test]
    fn what_cannot_be_stored_is_not_here() {
        let at = tempfile::tempdir().expect("a directory");
        let dir = CacheDir::open(at.path()).expect("a cache");
        let model = ModelTable::builtin().get("session").expect("a built-in model");
        let file = CachedFile::new(Ino(7), NodeId(1), model);
        let mut service = FileState::new(0);
        service.attach(NodeId(2), &[ByteRange::new(0, 30)]);
        let answer = service.query(ByteRange::ALL, Version::ZERO);
        let written = ByteRange::new(10, 20);
        {
            let mut state = file.state.write();
            state.view.apply(&answer);
            state.view.write(written);
        }
        let refusing = cache::reopened_for_reading(&file.cache(&dir).expect("made"));
        *file.cache.lock() = Some(Arc::new(refusing.expect("opened")));
        let all = ByteRange::new(0, 30);
        file.keep(&dir, all, answer.version, &[5; 30]).expect_err("it cannot be written to");
        let gone = [ByteRange::new(0, 10), ByteRange::new(20, 30)];
        let is_here = |range: &ByteRange| file.state.read().view.local(*range);
        assert!(is_here(&written) && !gone.iter().any(is_here));

        *file.cache.lock() = None;
        file.keep(&dir, all, answer.version, &[5; 30]).expect("stored");
        assert!(is_here(&all));
        let mut bytes = [0; 30];
        file.cache(&dir).expect("there").read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!([&bytes[..10], &bytes[20..]].concat(), [5; 20]);
    }
}
