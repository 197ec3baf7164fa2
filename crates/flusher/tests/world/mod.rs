//! A daemon in small: real cache files, a real backing directory, and the bookkeeping of who is
//! dirty. It checks what the flusher promises (grants do not overlap, every grant is ended) and
//! can say at any time whether the backing holds what was written.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "every test binary uses a part of it")]

use ebb_backend::{Backend, Faulty, PosixDir};
use ebb_flusher::{
    Activity, DirtyFile, DrainReport, DrainScope, Engine, Fate, FileUse, FlushError, FlushSource,
    Grant, Options, Policy, Want,
};
use ebb_locks::Mutex;
use ebb_types::{ByteRange, Errno, Ino, Version};
use rangemap::RangeSet;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Far beyond what anything here takes; only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct World {
    dir: tempfile::TempDir,
    files: Mutex<BTreeMap<Ino, OneFile>>,
    grants: Mutex<HashMap<u64, (Ino, RangeSet<u64>)>>,
    next_grant: AtomicU64,
    capacity: AtomicU64,
    /// The service refuses `begin` this many times.
    pub refuse_begin: AtomicU64,
    /// The service loses this many successful ends.
    pub lose_end: AtomicU64,
    /// The service has forgotten the grant this many times when it is reported as done.
    pub lose_grant: AtomicU64,
    pub begins: AtomicU64,
    pub activity: Arc<Activity>,
    pub faulty: Arc<Faulty>,
}

struct OneFile {
    cache: Arc<File>,
    content: Vec<u8>,
    dirty: RangeSet<u64>,
    in_use: FileUse,
    backing_ino: Option<u64>,
}

impl World {
    pub fn new(seed: u64) -> Arc<World> {
        let dir = tempfile::tempdir().unwrap();
        for sub in ["cache", "backing"] {
            std::fs::create_dir(dir.path().join(sub)).unwrap();
        }
        let posix = PosixDir::open_root(&dir.path().join("backing")).unwrap();
        Arc::new(World {
            faulty: Faulty::new(Arc::new(posix), seed),
            dir,
            files: Mutex::default(),
            grants: Mutex::default(),
            next_grant: AtomicU64::new(1),
            capacity: AtomicU64::new(1 << 40),
            refuse_begin: AtomicU64::new(0),
            lose_end: AtomicU64::new(0),
            lose_grant: AtomicU64::new(0),
            begins: AtomicU64::new(0),
            activity: Activity::new(),
        })
    }

    pub fn start(self: &Arc<Self>, options: Options, policy: Policy) -> Engine {
        let activity = Arc::clone(&self.activity);
        let backend = Arc::clone(&self.faulty) as Arc<dyn Backend>;
        let source = Arc::clone(self) as Arc<dyn FlushSource>;
        Engine::start(options, policy, activity, backend, source).unwrap()
    }

    pub fn set_capacity(&self, bytes: u64) {
        self.capacity.store(bytes, Ordering::Relaxed);
    }

    fn name(ino: Ino) -> String {
        format!("file-{ino}-")
    }

    pub fn backing_path(&self, ino: Ino) -> PathBuf {
        self.dir.path().join("backing").join(World::name(ino))
    }

    pub fn on_backing(&self, ino: Ino) -> bool {
        self.backing_path(ino).exists()
    }

    /// An application's write, as the daemon does it: counted as activity, into the cache.
    pub fn write(&self, ino: Ino, offset: u64, bytes: &[u8]) {
        let _operation = self.activity.enter();
        self.write_silently(ino, offset, bytes);
    }

    /// The same without activity (as if it had come before).
    pub fn write_silently(&self, ino: Ino, offset: u64, bytes: &[u8]) {
        let mut files = self.files.lock();
        let file = files.entry(ino).or_insert_with(|| {
            let path = self.dir.path().join("cache").join(World::name(ino));
            let cache = File::options().create_new(true).read(true).write(true).open(path).unwrap();
            OneFile {
                cache: Arc::new(cache),
                content: Vec::new(),
                dirty: RangeSet::new(),
                in_use: FileUse::Closed,
                backing_ino: None,
            }
        });
        let end = offset as usize + bytes.len();
        let longer = file.content.len().max(end);
        file.content.resize(longer, 0);
        file.content[offset as usize..end].copy_from_slice(bytes);
        file.cache.write_all_at(bytes, offset).unwrap();
        if !bytes.is_empty() {
            file.dirty.insert(offset..end as u64);
        }
    }

    pub fn set_use(&self, ino: Ino, in_use: FileUse) {
        self.files.lock().get_mut(&ino).unwrap().in_use = in_use;
    }

    pub fn remove(&self, ino: Ino) {
        let removed = self.files.lock().remove(&ino);
        if removed.is_some_and(|f| f.backing_ino.is_some()) {
            std::fs::remove_file(self.backing_path(ino)).unwrap();
        }
        let cache = self.dir.path().join("cache").join(World::name(ino));
        if cache.exists() {
            std::fs::remove_file(cache).unwrap();
        }
    }

    /// Bytes of this file that are not on the backing, granted ones included.
    pub fn dirty_of(&self, ino: Ino) -> u64 {
        self.dirty_files().iter().find(|f| f.ino == ino).map_or(0, |f| f.bytes)
    }

    /// The backing holds exactly what was written, for every file.
    pub fn assert_all_arrived(&self) {
        assert_eq!(self.dirty_bytes(), 0);
        for (ino, file) in self.files.lock().iter() {
            let stored = std::fs::read(self.backing_path(*ino)).unwrap();
            assert_eq!(stored.len(), file.content.len(), "length of {ino:?}");
            let wrong = stored.iter().zip(&file.content).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "first wrong byte of {ino:?}");
        }
        assert!(self.grants.lock().is_empty(), "a grant was never ended");
    }

    pub fn drain(&self, engine: &Engine) -> DrainReport {
        engine.drain(&DrainScope::All, Instant::now() + PATIENCE, &mut |_| {})
    }

    fn ranges_of(file: &OneFile, from: u64, most: u64) -> (RangeSet<u64>, Option<u64>) {
        let (mut taken, mut left) = (RangeSet::new(), most);
        for range in file.dirty.iter().filter(|r| r.end > from) {
            let start = range.start.max(from);
            if left == 0 {
                return (taken, Some(start));
            }
            let end = range.end.min(start + left);
            left -= end - start;
            taken.insert(start..end);
            if end < range.end {
                return (taken, Some(end));
            }
        }
        (taken, None)
    }

    fn refusal(counter: &AtomicU64, operation: &'static str) -> Result<(), FlushError> {
        match World::is_due(counter) {
            true => Err(FlushError::Service {
                operation,
                errno: Errno::EHOSTUNREACH,
                text: "the service is away".to_owned(),
            }),
            false => Ok(()),
        }
    }

    fn is_due(counter: &AtomicU64) -> bool {
        let one_less = |n: u64| n.checked_sub(1);
        counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }
}

fn len(ranges: &RangeSet<u64>) -> u64 {
    ranges.iter().map(|r| r.end - r.start).sum()
}

impl FlushSource for World {
    fn dirty_files(&self) -> Vec<DirtyFile> {
        let files = self.files.lock();
        let grants = self.grants.lock();
        let all = files.iter().map(|(ino, file)| {
            let granted: u64 = grants.values().filter(|g| g.0 == *ino).map(|g| len(&g.1)).sum();
            DirtyFile { ino: *ino, bytes: len(&file.dirty) + granted, in_use: file.in_use }
        });
        all.filter(|f| f.bytes > 0).collect()
    }

    fn dirty_bytes(&self) -> u64 {
        self.dirty_files().iter().map(|f| f.bytes).sum()
    }

    fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    fn label(&self, ino: Ino) -> String {
        World::name(ino)
    }

    fn begin(&self, wants: &[Want]) -> Vec<Result<Option<Grant>, FlushError>> {
        wants.iter().map(|w| self.begin_one(w.ino, w.from, w.most_bytes)).collect()
    }

    fn end(&self, grants: Vec<(Grant, Fate)>) -> Vec<Result<(), FlushError>> {
        let end = |(grant, fate)| self.end_one(grant, fate != Fate::GivenBack);
        grants.into_iter().map(end).collect()
    }
}

impl World {
    fn begin_one(&self, ino: Ino, from: u64, most_bytes: u64) -> Result<Option<Grant>, FlushError> {
        self.begins.fetch_add(1, Ordering::Relaxed);
        World::refusal(&self.refuse_begin, "flush begin")?;
        let mut files = self.files.lock();
        let Some(file) = files.get_mut(&ino) else { return Ok(None) };
        let (ranges, next) = World::ranges_of(file, from, most_bytes);
        if ranges.is_empty() {
            return Ok(None);
        }
        let mut grants = self.grants.lock();
        for range in ranges.iter() {
            for (_, other) in grants.values().filter(|g| g.0 == ino) {
                assert!(!other.overlaps(range), "{ino:?}: grants overlap at {range:?}");
            }
            file.dirty.remove(range.clone());
        }
        let path = self.backing_path(ino);
        let backing_ino = *file.backing_ino.get_or_insert_with(|| {
            File::create_new(&path).unwrap();
            std::fs::metadata(&path).unwrap().ino()
        });
        let id = self.next_grant.fetch_add(1, Ordering::Relaxed);
        let list = ranges.iter().map(|r| (ByteRange::new(r.start, r.end), Version(id))).collect();
        grants.insert(id, (ino, ranges));
        Ok(Some(Grant {
            shape: None,
            ino,
            id,
            ranges: list,
            next,
            cache: Arc::clone(&file.cache),
            guard: None,
            backing_path: World::name(ino).into_bytes(),
            backing_ino,
            owner: 0,
            label: World::name(ino),
        }))
    }

    fn end_one(&self, grant: Grant, done: bool) -> Result<(), FlushError> {
        let forgotten = done && World::is_due(&self.lose_grant);
        let lost = forgotten || done && World::is_due(&self.lose_end);
        let mut files = self.files.lock();
        let (ino, ranges) = self.grants.lock().remove(&grant.id).expect("ended once");
        if let Some(file) = files.get_mut(&ino)
            && (!done || lost)
        {
            file.dirty.extend(ranges);
        }
        if lost {
            return Err(match forgotten {
                true => FlushError::LostGrant { text: "no such grant".to_owned() },
                false => FlushError::Service {
                    operation: "flush end",
                    errno: Errno::ETIMEDOUT,
                    text: "no answer".to_owned(),
                },
            });
        }
        Ok(())
    }
}

/// Small numbers, so that a test needs no long waits.
pub fn quick() -> Options {
    Options {
        threads: 4,
        chunk: 1 << 20,
        grant_bytes: 2 << 20,
        backoff_first: Duration::from_millis(2),
        backoff_most: Duration::from_millis(40),
        observe_every: Duration::from_millis(5),
        ..Options::default()
    }
}

/// Waits until `done`, which must happen some time.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that differ from place to place and from `tag` to `tag`.
pub fn pattern(tag: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ tag).collect()
}
