//! The only hands of the service on the backing directory: look and list; `effects.rs` carries out
//! effects. No path can leave the directory and no symbolic link is ever followed. Knows nothing of what
//! names mean.

use crate::acl::{self, Now};
use crate::late::UnderWay;
use ebb_backend::lustre;
use ebb_coordinator::Tenure;
use ebb_locks::Mutex;
use ebb_namespace::{
    BackingKey, BackingPath, DirStamp, Effect, FILE_CAPABILITIES, Found, Record, Restat, Seen,
    XattrTrial,
};
use ebb_types::name::PART_PREFIX;
use ebb_types::{Errno, FileKind, Name, Time};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, ResolveFlags, Stat, XattrFlags};
use rustix::io::Errno as Os;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// A call on the backing that takes longer counts as failed (ETIMEDOUT), so that a hung backing
/// makes operations fail and not the service stand still.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Calls that may be on the backing at a time. One that hangs keeps its thread as long as it likes,
/// and the runtime has twice as many.
const CALLS_MAX: usize = 256;

/// A directory whose mtime is younger than this may change again without a new mtime: what was
/// learned of it is not trusted to be complete.
const SETTLED_NS: i128 = 50_000_000;

/// Entries that one listing may have; more would not fit a service's memory either.
const LIST_MAX: usize = 8_000_000;

type Res<T> = Result<T, Errno>;

pub(crate) fn errno(e: Os) -> Errno {
    Errno(e.raw_os_error())
}

/// The backing directory.
#[derive(Debug)]
pub struct Backing {
    root: OwnedFd,
    path: PathBuf,
    /// Part files of nobody that could not be removed yet.
    pub(crate) useless: Mutex<Vec<Effect>>,
    /// Effects that are being carried out, also those that nobody waits for any more.
    pub under_way: UnderWay,
    /// Nothing is changed after its end.
    pub(crate) tenure: Tenure,
    /// Places for calls that may hang: threads for everything else always remain.
    places: std::sync::Arc<Semaphore>,
    /// When the service is to die.
    #[cfg(test)]
    pub death: crate::death::Death,
}

/// What a look into a directory showed.
#[derive(Debug)]
pub struct Look {
    /// The directory when it was looked at.
    pub stamp: DirStamp,
    /// False when the stamp is too young to prove anything later.
    pub settled: bool,
    /// What is under the name.
    pub found: Option<Found>,
}

/// What a listing showed.
#[derive(Debug)]
pub struct Listing {
    /// The directory before it was listed.
    pub stamp: DirStamp,
    /// False when the stamp is too young to prove anything later.
    pub settled: bool,
    /// Everything in it.
    pub entries: BTreeMap<Name, Found>,
}

impl Backing {
    /// Opens the directory; all that follows is relative to what was opened.
    pub fn open(path: &Path) -> std::io::Result<Backing> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Backing {
            root,
            path: path.to_owned(),
            useless: Mutex::default(),
            under_way: UnderWay::default(),
            tenure: Tenure::default(),
            places: std::sync::Arc::new(Semaphore::new(CALLS_MAX)),
            #[cfg(test)]
            death: crate::death::Death::default(),
        })
    }

    /// Changes it only as long as this service may answer.
    #[must_use]
    pub fn within(self, tenure: Tenure) -> Backing {
        Backing { tenure, ..self }
    }

    /// A service that was replaced changes nothing any more, whatever it had begun. Waits while that is in doubt.
    pub(crate) fn may_change(&self) -> Res<()> {
        self.tenure.held_by_thread().map_err(|_| Errno::ESTALE)
    }

    /// True when no call is on it, not even one that nobody waits for any more.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.places.available_permits() == CALLS_MAX
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `f` on a thread that may block, for at most [`DEADLINE`].
    pub async fn run<T: Send + 'static>(
        self: &std::sync::Arc<Self>,
        f: impl FnOnce(&Backing) -> Res<T> + Send + 'static,
    ) -> Res<T> {
        self.finish(&mut self.start(f), Instant::now() + DEADLINE).await
    }

    /// Starts `f` on a thread that may block.
    pub fn start<T: Send + 'static>(
        self: &std::sync::Arc<Self>,
        f: impl FnOnce(&Backing) -> Res<T> + Send + 'static,
    ) -> JoinHandle<Res<T>> {
        let me = std::sync::Arc::clone(self);
        let places = std::sync::Arc::clone(&self.places);
        tokio::spawn(async move {
            // Kept until the call returns, also when nobody waits for it any more.
            let place = places.acquire_owned().await.map_err(|_closed| Errno::EIO)?;
            let work = move || {
                let done = f(&me);
                drop(place);
                done
            };
            tokio::task::spawn_blocking(work).await.map_err(|_panicked| Errno::EIO)?
        })
    }

    /// Waits for what was started, until then.
    pub async fn finish<T>(&self, work: &mut JoinHandle<Res<T>>, by: Instant) -> Res<T> {
        match tokio::time::timeout_at(by, work).await {
            Ok(Ok(result)) => result,
            Ok(Err(_panicked)) => Err(Errno::EIO),
            Err(_late) => Err(Errno::ETIMEDOUT),
        }
    }

    // ---- looking -----------------------------------------------------------------------------

    /// What is at `path`.
    pub fn stat(&self, path: &BackingPath) -> Res<Found> {
        match path.split() {
            None => self.found(self.root.as_fd(), None),
            Some((dir, name)) => self.found(self.dir(dir)?.as_fd(), Some(name)),
        }
    }

    /// What objects look like after effects. What others took away in this moment is found missing
    /// when it is needed.
    pub fn look_at(&self, objects: &[Restat]) -> Vec<Record> {
        let now = objects.iter().filter_map(|r| Some((r.ino, self.now_at(&r.path)?)));
        now.flat_map(|(ino, now)| now.records(ino)).collect()
    }

    /// What an object looks like after it was changed.
    pub fn now_at(&self, path: &BackingPath) -> Option<Now> {
        let (dir, name) = match path.split() {
            None => (self.dir(&[]).ok()?, None),
            Some((dir, name)) => (self.dir(dir).ok()?, Some(name)),
        };
        let (found, perm) = self.found_with_mode(dir.as_fd(), name).ok()?;
        // A part file is given its mode later.
        let part = name.is_some_and(Name::is_reserved);
        let limited = (found.perm != perm && !part).then_some(found.perm);
        Some(Now { seen: found.seen, limited })
    }

    /// The directory itself, and what is under a name in it.
    pub fn look(&self, dir: &BackingPath, name: &Name) -> Res<Look> {
        let dir = self.dir(dir.names())?;
        let (stamp, settled) = stamp(dir.as_fd())?;
        let found = match self.found(dir.as_fd(), Some(name)) {
            Ok(f) => Some(f),
            Err(Errno::ENOENT) => None,
            Err(e) => return Err(e),
        };
        Ok(Look { stamp, settled, found })
    }

    /// The state of a directory.
    pub fn stamp(&self, dir: &BackingPath) -> Res<(DirStamp, bool)> {
        stamp(self.dir(dir.names())?.as_fd())
    }

    /// Everything in a directory.
    pub fn list(&self, dir: &BackingPath) -> Res<Listing> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = self.beneath(dir.names(), flags)?;
        let (stamp, settled) = stamp(fd.as_fd())?;
        let mut entries = BTreeMap::new();
        for entry in Dir::read_from(&fd).map_err(errno)? {
            let entry = entry.map_err(errno)?;
            let Ok(name) = Name::new(entry.file_name().to_bytes()) else { continue };
            if name.is_reserved() {
                continue;
            }
            match self.found(fd.as_fd(), Some(&name)) {
                Ok(found) => drop(entries.insert(name, found)),
                // Gone since, or of a type that no file system here knows.
                Err(Errno::ENOENT | Errno::EINVAL) => {}
                Err(e) => return Err(e),
            }
            if entries.len() > LIST_MAX {
                return Err(Errno::ENOMEM);
            }
        }
        Ok(Listing { stamp, settled, entries })
    }

    /// One extended attribute.
    pub fn get_xattr(&self, path: &BackingPath, name: &[u8]) -> Res<Vec<u8>> {
        let (_fd, proc) = self.object(path)?;
        let mut buf = vec![0u8; 65_536];
        let n =
            rustix::fs::getxattr(&proc, OsStr::from_bytes(name), &mut buf[..]).map_err(errno)?;
        buf.truncate(n);
        Ok(buf)
    }

    /// The names of all extended attributes.
    pub fn list_xattr(&self, path: &BackingPath) -> Res<Vec<Vec<u8>>> {
        let (_fd, proc) = self.object(path)?;
        let mut buf = vec![0u8; 65_536];
        let n = match rustix::fs::listxattr(&proc, &mut buf[..]) {
            Ok(n) => n,
            Err(Os::OPNOTSUPP) => 0,
            Err(e) => return Err(errno(e)),
        };
        let names = buf[..n].split(|c| *c == 0).filter(|n| !n.is_empty());
        let hidden = |n: &[u8]| n.starts_with(b"system.posix_acl_") || n == FILE_CAPABILITIES;
        Ok(names.filter(|n| !hidden(n)).map(<[u8]>::to_vec).collect())
    }

    /// Whether a new object there could hold these attributes: an error says why not. What else is
    /// in the way of a new object says nothing about them.
    pub fn try_xattrs(&self, trial: &XattrTrial) -> Res<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let made = self.beneath(trial.dir.names(), flags).and_then(|dir| trial_file(&dir));
        let file = match made {
            Ok(file) => file,
            Err(errno) => {
                tracing::debug!(dir = %trial.dir, ?errno, "attributes are not tried");
                return Ok(());
            }
        };
        for (name, value) in &trial.xattrs {
            let name = OsStr::from_bytes(name);
            rustix::fs::fsetxattr(&file, name, value, XattrFlags::empty()).map_err(errno)?;
        }
        Ok(())
    }

    /// Room and inodes of the backing file system.
    pub fn stat_fs(&self) -> Res<rustix::fs::StatVfs> {
        rustix::fs::fstatvfs(&self.root).map_err(errno)
    }

    /// What there is to know about Lustre; None when the backing is something else.
    pub fn lustre(&self) -> Res<Option<lustre::Facts>> {
        lustre::facts(&self.root)
    }

    pub(crate) fn found(&self, dir: BorrowedFd<'_>, name: Option<&Name>) -> Res<Found> {
        self.found_with_mode(dir, name).map(|(found, _)| found)
    }

    /// Also the permission bits as they are there, which an ACL may say less than.
    fn found_with_mode(&self, dir: BorrowedFd<'_>, name: Option<&Name>) -> Res<(Found, u32)> {
        let st = match name {
            None => rustix::fs::fstat(dir),
            Some(n) => rustix::fs::statat(dir, n.as_os_str(), AtFlags::SYMLINK_NOFOLLOW),
        };
        let st = st.map_err(errno)?;
        let kind = FileKind::from_mode(st.st_mode).ok_or(Errno::EINVAL)?;
        let target = match (kind, name) {
            (FileKind::Symlink, Some(n)) => {
                let t = rustix::fs::readlinkat(dir, n.as_os_str(), Vec::new()).map_err(errno)?;
                Some(t.into_bytes().into())
            }
            _ => None,
        };
        let perm = st.st_mode & 0o7777;
        let shown = match kind {
            FileKind::Symlink => perm,
            _ => acl::shown(&reached(dir, name), perm),
        };
        let found = Found {
            kind,
            perm: shown,
            uid: st.st_uid,
            gid: st.st_gid,
            rdev: st.st_rdev as u32,
            atime: time(st.st_atime, st.st_atime_nsec as i64),
            seen: seen(&st),
            target,
        };
        Ok((found, perm))
    }

    // ---- reaching ----------------------------------------------------------------------------

    pub(crate) fn dir(&self, names: &[Name]) -> Res<OwnedFd> {
        self.beneath(names, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC)
    }

    /// Opens what is below the root, through no symbolic link.
    pub(crate) fn beneath(&self, names: &[Name], flags: OFlags) -> Res<OwnedFd> {
        let path = names.iter().map(Name::as_bytes).collect::<Vec<_>>().join(&b'/');
        let path = if path.is_empty() { b".".to_vec() } else { path };
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::NOFOLLOW;
        let os = OsStr::from_bytes(&path);
        match rustix::fs::openat2(&self.root, os, flags, Mode::empty(), how) {
            // Longer than PATH_MAX, or no openat2 here: one component after the other.
            Err(Os::NOSYS | Os::PERM | Os::NAMETOOLONG) => self.step_by_step(names, flags),
            other => other.map_err(errno),
        }
    }

    fn step_by_step(&self, names: &[Name], flags: OFlags) -> Res<OwnedFd> {
        let on_the_way = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut at =
            rustix::fs::openat(&self.root, ".", on_the_way, Mode::empty()).map_err(errno)?;
        let Some((last, dirs)) = names.split_last() else {
            return rustix::fs::openat(&at, ".", flags, Mode::empty()).map_err(errno);
        };
        for name in dirs {
            at = rustix::fs::openat(&at, name.as_os_str(), on_the_way, Mode::empty())
                .map_err(errno)?;
        }
        rustix::fs::openat(&at, last.as_os_str(), flags, Mode::empty()).map_err(errno)
    }

    pub(crate) fn parent<'p>(&self, path: &'p BackingPath) -> Res<(OwnedFd, &'p OsStr)> {
        let (dir, name) = path.split().ok_or(Errno::EBUSY)?;
        Ok((self.dir(dir)?, name.as_os_str()))
    }

    /// A handle of the object itself, and the path by which calls without an `at` form reach it.
    pub(crate) fn object(&self, path: &BackingPath) -> Res<(OwnedFd, PathBuf)> {
        let fd = self.beneath(path.names(), OFlags::PATH | OFlags::CLOEXEC)?;
        let proc = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        Ok((fd, proc))
    }
}

/// The path by which calls without an `at` form reach what is in a directory.
fn reached(dir: BorrowedFd<'_>, name: Option<&Name>) -> PathBuf {
    let dir = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
    // The directory itself: beyond the link in /proc.
    dir.join(name.map_or(OsStr::new("."), Name::as_os_str))
}

/// A file of our own that nobody will find.
fn trial_file(dir: &OwnedFd) -> Res<OwnedFd> {
    let (flags, mode) = (OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    if let Ok(file) = rustix::fs::openat(dir, ".", flags | OFlags::TMPFILE, mode) {
        return Ok(file);
    }
    // Not every file system has files without names.
    let prefix = String::from_utf8_lossy(PART_PREFIX);
    let name = format!("{prefix}try-{:016x}", crate::core::random());
    let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(dir, &*name, flags, mode).map_err(errno)?;
    rustix::fs::unlinkat(dir, &*name, AtFlags::empty()).map_err(errno)?;
    Ok(file)
}

fn time(sec: i64, nsec: i64) -> Time {
    Time { sec, nsec: u32::try_from(nsec).unwrap_or(0).min(999_999_999) }
}

fn seen(st: &Stat) -> Seen {
    Seen {
        key: BackingKey { dev: st.st_dev, ino: st.st_ino },
        size: u64::try_from(st.st_size).unwrap_or(0),
        nlink: u32::try_from(st.st_nlink).unwrap_or(u32::MAX),
        mtime: time(st.st_mtime, st.st_mtime_nsec as i64),
        ctime: time(st.st_ctime, st.st_ctime_nsec as i64),
    }
}

fn stamp(dir: BorrowedFd<'_>) -> Res<(DirStamp, bool)> {
    let s = seen(&rustix::fs::fstat(dir).map_err(errno)?);
    let ns = |t: Time| i128::from(t.sec) * 1_000_000_000 + i128::from(t.nsec);
    let settled = ns(Time::now()) - ns(s.ctime.max(s.mtime)) > SETTLED_NS;
    Ok((DirStamp { key: s.key, mtime: s.mtime, ctime: s.ctime }, settled))
}
