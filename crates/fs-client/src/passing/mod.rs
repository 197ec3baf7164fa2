//! An inode that is passed through: what this node remembers of it while the kernel reads and
//! writes its cache file without asking. The rules are in `ebb_consistency::{path, claim}`; when
//! they are carried out is in `ops::passing`.
//!
//! While an inode is passed through, its cache file reads right by itself: it is as long as the
//! file, holes are zeros for everybody this node has heard of, and nothing of it is given up.

mod telling;
mod track;

pub use telling::Telling;
pub use track::{Stamp, Track, written_runs};

use ebb_consistency::{Beside, IoPath, Reason};
use ebb_fuse::BackingId;
use ebb_locks::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the kernel and the daemon share of a passed-through inode.
pub struct Passing {
    /// The kernel's number of the cache file: one for an inode.
    pub id: Arc<BackingId>,
    /// How writes past the daemon are found; none while there are only readers.
    pub track: Option<Track>,
    /// The published size that the cache file was made to agree with: a smaller one is a cut.
    pub size: u64,
    /// Bytes of the buffer that it keeps, when last looked at.
    pub held: u64,
    /// Blocks before this offset were taken ahead of its writers; 0: none.
    pub ahead: u64,
    /// The file sits here.
    pub seat: Option<MySeat>,
}

/// The seat of a file at this node; see [`ebb_consistency::Seat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MySeat {
    /// Its number.
    pub id: u64,
    /// This node writes without telling, and is asked to publish before others are told.
    pub asked: bool,
    /// The file is written past the daemon here, not only read.
    pub writes: bool,
}

/// Registers a file with the kernel: the reply to an open can do that.
pub trait Door: Sync {
    /// The kernel's number for `file`.
    fn register(&self, file: BorrowedFd<'_>) -> io::Result<BackingId>;

    /// Why it cannot.
    fn obstacle(&self) -> Option<Reason> {
        None
    }
}

/// The door of an open that no kernel has asked for.
pub struct Inside;

impl Door for Inside {
    fn register(&self, _: BorrowedFd<'_>) -> io::Result<BackingId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn obstacle(&self) -> Option<Reason> {
        Some(Reason::Inside)
    }
}

/// What an open was answered with.
pub struct Opening {
    /// The handle's number.
    pub fh: u64,
    /// Which way it goes.
    pub path: IoPath,
    /// The kernel's number of the cache file, when the inode is passed through.
    pub id: Option<Arc<BackingId>>,
}

/// What the other handles of an inode are.
pub fn beside(passing: Option<&Passing>, others: u32) -> Beside {
    match passing {
        Some(Passing { track: Some(_), .. }) => Beside::Writers,
        Some(_) => Beside::Readers,
        None if others > 0 => Beside::Daemon,
        None => Beside::Nobody,
    }
}

/// What keeps this whole mount from passing anything through, and how often opens went which way.
pub struct Paths {
    obstacle: Mutex<Option<Reason>>,
    /// Files of the cache get a new time at each write that somebody looked for.
    fine_times: AtomicU64,
    /// Mapping a file of the cache shows in its access time.
    access_times: AtomicU64,
    /// Whether the kernel tells what is written.
    pub telling: Telling,
    reads: AtomicU64,
    writes: AtomicU64,
    daemon: [AtomicU64; Reason::ALL.len()],
    beside: AtomicU64,
}

impl Default for Paths {
    fn default() -> Paths {
        Paths {
            // Until the kernel has been asked.
            obstacle: Mutex::new(Some(Reason::Kernel)),
            fine_times: AtomicU64::new(0),
            access_times: AtomicU64::new(0),
            telling: Telling::default(),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            daemon: Default::default(),
            beside: AtomicU64::new(0),
        }
    }
}

impl Paths {
    /// What is in the way.
    #[must_use]
    pub fn obstacle(&self) -> Option<Reason> {
        *self.obstacle.lock()
    }

    /// Something is in the way, or nothing any more.
    pub fn set_obstacle(&self, reason: Option<Reason>) {
        *self.obstacle.lock() = reason;
    }

    /// Times of the cache's files can be told apart however close they are.
    pub fn set_fine_times(&self, fine: bool) {
        self.fine_times.store(u64::from(fine), Relaxed);
    }

    /// The same, asked.
    #[must_use]
    pub fn fine_times(&self) -> bool {
        self.fine_times.load(Relaxed) != 0
    }

    /// Mapping a file of the cache shows in its access time.
    pub fn set_access_times(&self, shows: bool) {
        self.access_times.store(u64::from(shows), Relaxed);
    }

    /// The same, asked.
    #[must_use]
    pub fn access_times(&self) -> bool {
        self.access_times.load(Relaxed) != 0
    }

    /// Counts an open.
    pub fn count(&self, path: IoPath) {
        let counter = match path {
            IoPath::Read => &self.reads,
            IoPath::Write => &self.writes,
            IoPath::DaemonBeside(_) => &self.beside,
            IoPath::Daemon(reason) => &self.daemon[reason as usize],
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Opens so far, by way; the ways that nothing went are left out.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<String, u64> {
        let mut out = BTreeMap::new();
        let mut put = |path: IoPath, n: &AtomicU64| {
            let n = n.load(Relaxed);
            if n > 0 {
                out.insert(name(path), n);
            }
        };
        put(IoPath::Read, &self.reads);
        put(IoPath::Write, &self.writes);
        put(IoPath::DaemonBeside(Reason::NotEmpty), &self.beside);
        for reason in Reason::ALL {
            put(IoPath::Daemon(reason), &self.daemon[reason as usize]);
        }
        out
    }

    /// The same as lines for people.
    #[must_use]
    pub fn table(&self) -> String {
        let line = |(way, n): (String, u64)| format!("{:<40}{n:>14}\n", format!("opens {way}"));
        self.counts().into_iter().map(line).collect()
    }
}

/// A way as status and metrics call it.
#[must_use]
pub fn name(path: IoPath) -> String {
    match path {
        IoPath::Read => "passthrough-read".into(),
        IoPath::Write => "passthrough-write".into(),
        IoPath::DaemonBeside(_) => "daemon-beside-passthrough".into(),
        IoPath::Daemon(reason) => format!("daemon:{reason}"),
    }
}

/// What an error of the kernel's says about passing through.
#[must_use]
pub fn obstacle_of(error: &io::Error) -> Reason {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Reason::Privilege,
        Some(libc::ELOOP | libc::EOPNOTSUPP) => Reason::Stacked,
        _ => Reason::Kernel,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_are_counted_by_way_and_reason() {
        let paths = Paths::default();
        assert_eq!(paths.obstacle(), Some(Reason::Kernel), "nobody has asked the kernel yet");
        paths.count(IoPath::Write);
        paths.count(IoPath::Daemon(Reason::NotLocal));
        paths.count(IoPath::Daemon(Reason::NotLocal));
        let counts: Vec<_> = paths.counts().into_iter().collect();
        let expected = [("daemon:not-local", 2), ("passthrough-write", 1)];
        assert_eq!(counts, expected.map(|(name, n)| (name.to_string(), n)));
        assert_eq!(paths.table().lines().count(), 2);
    }

    #[test]
    fn reasons_are_the_index_of_their_counters() {
        for (i, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, i);
        }
    }
}
