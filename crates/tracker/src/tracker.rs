//! A tracker of one file system: its programs are in the kernel as long as it or anything that it
//! watches lives.

use crate::hooks::{self, Kind};
use crate::program::{KEY_WORDS, Maps, VALUE_WORDS, assemble};
use crate::ring::{Event, Meter, Ring, Stuck};
use crate::sys;
use crate::trial;
use crate::unavailable::Unavailable;
use crate::watched::{Pending, Watched};
use ebb_locks::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

/// Whose writes are told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// Everybody's.
    All,
    /// Those of other processes than this one.
    Others,
}

/// How much memory a tracker takes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of the ring: a power of two, at least a page. An event takes 40 bytes.
    pub ring_bytes: u32,
    /// Files watched at once.
    pub files_max: u32,
    /// Ranges kept of one file between two drains.
    pub ranges_max: usize,
}

impl Default for Limits {
    /// 8 MiB are 200,000 writes. A thread wakes up after a quarter of them, so there is a third of a
    /// second left for it when a processor writes 8 KiB at a time as fast as it can.
    fn default() -> Limits {
        Limits { ring_bytes: 8 << 20, files_max: 1 << 16, ranges_max: 1 << 16 }
    }
}

/// Tells which bytes of files are written. See the crate.
pub struct Tracker {
    pub(crate) inner: Arc<Inner>,
}

/// The programs, and the thread that empties the ring while nobody asks.
pub(crate) struct Inner {
    pub core: Arc<Core>,
    /// Each program and what keeps it attached.
    programs: Vec<(OwnedFd, OwnedFd)>,
    map: OwnedFd,
    pub kind: Kind,
    tags: AtomicU64,
    /// This process as the kernel numbers it, which in a container is not what it is told.
    own: AtomicU64,
    ending: OwnedFd,
    reader: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread shares.
pub(crate) struct Core {
    books: Mutex<Books>,
    meter: Meter,
    ring_fd: OwnedFd,
}

/// Everything read from the ring that nobody has asked for yet.
struct Books {
    ring: Ring,
    pending: HashMap<u64, Pending>,
    /// Raised when something was missed and nobody knows of which file.
    holes: u64,
    misses_seen: u64,
    ranges_max: usize,
}

impl Tracker {
    /// For the file system that `dir` is on.
    pub fn open(dir: &Path) -> Result<Tracker, Unavailable> {
        Tracker::with(dir, Limits::default())
    }

    /// The same with other limits.
    pub fn with(dir: &Path, limits: Limits) -> Result<Tracker, Unavailable> {
        let io = |source| Unavailable::Io { path: dir.into(), source };
        let magic = rustix::fs::statfs(dir).map_err(|e| io(e.into()))?.f_type as u64;
        let unknown = || Unavailable::FileSystem { dir: dir.into(), magic };
        let kind = Kind::of(magic).ok_or_else(unknown)?;
        let tracker = Tracker { inner: Arc::new(Inner::start(kind, limits)?) };
        trial::run(&tracker, dir)?;
        Ok(tracker)
    }

    /// From now on writes of this file are told of. It stays open as long as it is watched, for
    /// reading at least.
    pub fn watch(&self, file: &File, writers: Writers) -> io::Result<Watched> {
        Watched::start(Arc::clone(&self.inner), file, writers)
    }

    /// A number that moves with every write of watched files, and costs nothing to ask for.
    #[must_use]
    pub fn activity(&self) -> u64 {
        self.inner.core.meter.produced()
    }

    pub(crate) fn set_own_process(&self, number: u64) {
        self.inner.own.store(number, Relaxed);
    }
}

impl Inner {
    fn start(kind: Kind, limits: Limits) -> Result<Inner, Unavailable> {
        // First of all: without the right to it everything else is of no interest.
        let step = "making a map in the kernel";
        let refused = |step| move |e| Unavailable::refused(step, e, String::new());
        let map = sys::hash_map(KEY_WORDS * 8, VALUE_WORDS * 8, limits.files_max);
        let map = map.map_err(refused(step))?;
        let ring_fd = sys::ring(limits.ring_bytes).map_err(refused("making a ring"))?;
        let ring = Ring::map(&ring_fd, limits.ring_bytes).map_err(refused("mapping a ring"))?;
        let meter = Meter::map(&ring_fd).map_err(refused("mapping a ring"))?;
        let kernel = hooks::survey(kind)?;
        let maps = Maps {
            watched: map.as_raw_fd(),
            ring: ring_fd.as_raw_fd(),
            ring_bytes: limits.ring_bytes,
        };
        let mut programs = Vec::new();
        for point in &kernel.points {
            let words = assemble(point.shape, &kernel.fields, maps);
            let words = words.expect("every label is placed, and the programs are short");
            let module = kernel.module.as_ref().filter(|_| point.module);
            let program = sys::load(point.name, &words, point.btf_id, module)
                .map_err(|(e, log)| Unavailable::refused("loading a program", e, log))?;
            let link = sys::attach(&program).map_err(refused("attaching a program"))?;
            programs.push((program, link));
        }
        let misses = misses(&programs).map_err(refused("asking for a program"))?;
        let misses_seen = misses
            .ok_or_else(|| Unavailable::Kernel("a count of programs that were left out".into()))?;
        let (pending, ranges_max) = (HashMap::new(), limits.ranges_max);
        let books = Books { ring, pending, holes: 0, misses_seen, ranges_max };
        let core = Arc::new(Core { books: Mutex::new(books), meter, ring_fd });
        let (ending, reader) = start_reader(&core).map_err(refused("waiting for a ring"))?;
        let (tags, own) = (AtomicU64::new(1), AtomicU64::new(0));
        let reader = Mutex::new(Some(reader));
        Ok(Inner { core, programs, map, kind, tags, own, ending, reader })
    }

    /// Puts a file on the list; its events have the number that is returned.
    pub fn register(&self, key: &[u64; KEY_WORDS], writers: Writers) -> io::Result<u64> {
        let tag = self.tags.fetch_add(1, Relaxed);
        let except = match writers {
            Writers::All => 0,
            Writers::Others => self.own.load(Relaxed),
        };
        self.core.books.lock().pending.insert(tag, Pending::new(key[0]));
        let value: [u64; VALUE_WORDS] = [tag, except, 0, 0, 0, 0];
        // Fails when it is on the list already.
        sys::insert(&self.map, key, &value).inspect_err(|_| {
            self.core.books.lock().pending.remove(&tag);
        })?;
        Ok(tag)
    }

    /// Takes it off the list.
    pub fn unregister(&self, key: &[u64; KEY_WORDS], tag: u64) {
        if let Err(e) = sys::delete(&self.map, key) {
            tracing::error!(ino = key[0], error = %e, "a tracked file stays on the kernel's list");
        }
        self.core.books.lock().pending.remove(&tag);
    }

    /// What the kernel counts of a file.
    pub fn counters(&self, key: &[u64; KEY_WORDS]) -> io::Result<[u64; VALUE_WORDS]> {
        let mut value = [0; VALUE_WORDS];
        sys::lookup(&self.map, key, &mut value)?;
        Ok(value)
    }

    /// What was read of a file since the last call, and a number that is raised when something was
    /// missed that can be of any file.
    pub fn take(&self, tag: u64) -> (Pending, u64) {
        let mut books = self.core.books.lock();
        books.read();
        match misses(&self.programs) {
            Ok(Some(now)) if now == books.misses_seen => {}
            Ok(Some(now)) => {
                books.misses_seen = now;
                books.holes += 1;
            }
            _ => books.holes += 1,
        }
        let holes = books.holes;
        (books.pending.get_mut(&tag).map(Pending::take).unwrap_or_default(), holes)
    }

    /// Where the number is now.
    pub fn holes(&self) -> u64 {
        self.core.books.lock().holes
    }
}

/// Over all programs.
fn misses(programs: &[(OwnedFd, OwnedFd)]) -> io::Result<Option<u64>> {
    let each = programs.iter().map(|(program, _)| sys::misses(program));
    each.sum::<io::Result<Option<u64>>>()
}

impl Drop for Inner {
    fn drop(&mut self) {
        let one = 1u64.to_ne_bytes();
        if rustix::io::write(&self.ending, &one).is_ok()
            && let Some(reader) = self.reader.lock().take()
        {
            let _ = reader.join();
        }
    }
}

impl Books {
    fn read(&mut self) {
        let Books { ring, pending, ranges_max, .. } = self;
        let done = ring.read(|event: Event| {
            // A number of an inode that is not the registration's: it was taken off the list while
            // the program ran, and its place given to another one.
            if let Some(of) = pending.get_mut(&event.tag).filter(|of| of.ino == event.ino) {
                of.add(event, *ranges_max);
            }
        });
        if let Err(Stuck) = done {
            self.holes += 1;
        }
    }
}

/// Empties the ring when it fills up between two drains.
fn start_reader(core: &Arc<Core>) -> io::Result<(OwnedFd, JoinHandle<()>)> {
    use rustix::event::{EventfdFlags, epoll, eventfd};
    let ending = eventfd(0, EventfdFlags::CLOEXEC)?;
    let waits = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    // By edge: the ring counts as readable from its first event, but wakes nobody before it is
    // worth it.
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&waits, &core.ring_fd, epoll::EventData::new_u64(0), flags)?;
    epoll::add(&waits, &ending, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;
    let core = Arc::clone(core);
    let work = move || {
        let mut events = Vec::with_capacity(2);
        loop {
            events.clear();
            match epoll::wait(&waits, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) if events.iter().any(|e: &epoll::Event| e.data.u64() == 1) => return,
                Ok(_) => core.books.lock().read(),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    return tracing::error!(error = %e, "the tracker's ring is not waited for");
                }
            }
        }
    };
    let reader = std::thread::Builder::new().name("ebb-tracker".into()).spawn(work)?;
    Ok((ending, reader))
}
