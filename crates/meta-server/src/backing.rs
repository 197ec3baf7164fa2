//! The only hands of the service on the backing directory: look, list, carry out effects. No
//! path can leave the directory and no symbolic link is ever followed. Knows nothing of what
//! names mean.

use ebb_backend::lustre;
use ebb_locks::Mutex;
use ebb_namespace::{
    BackingKey, BackingPath, DirStamp, Effect, Found, Record, Replace, Restat, Seen, XattrMode,
};
use ebb_types::{Errno, FileKind, Name, Striping, Time};
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, Timespec, Timestamps,
    XattrFlags,
};
use rustix::io::Errno as Os;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// A call on the backing that takes longer counts as failed (ETIMEDOUT), so that a hung backing
/// makes operations fail and not the service stand still.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// A directory whose mtime is younger than this may change again without a new mtime: what was
/// learned of it is not trusted to be complete.
const SETTLED_NS: i128 = 50_000_000;

/// Entries that one listing may have; more would not fit a service's memory either.
const LIST_MAX: usize = 8_000_000;

type Res<T> = Result<T, Errno>;

fn errno(e: Os) -> Errno {
    Errno(e.raw_os_error())
}

/// The backing directory.
#[derive(Debug)]
pub struct Backing {
    root: OwnedFd,
    path: PathBuf,
    /// Part files of nobody that could not be removed yet.
    useless: Mutex<Vec<Effect>>,
    /// When the service is to die.
    #[cfg(test)]
    pub death: death::Death,
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
            #[cfg(test)]
            death: death::Death::default(),
        })
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
        tokio::task::spawn_blocking(move || f(&me))
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
        let seen = |r: &Restat| Some((r.ino, self.stat(&r.path).ok()?.seen));
        let seen = objects.iter().filter_map(seen);
        seen.map(|(ino, seen)| Record::Seen { ino, seen: Some(seen) }).collect()
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
        let hidden = |n: &[u8]| n.starts_with(b"system.posix_acl_");
        Ok(names.filter(|n| !hidden(n)).map(<[u8]>::to_vec).collect())
    }

    /// Room and inodes of the backing file system.
    pub fn stat_fs(&self) -> Res<rustix::fs::StatVfs> {
        rustix::fs::fstatvfs(&self.root).map_err(errno)
    }

    /// What there is to know about Lustre; None when the backing is something else.
    pub fn lustre(&self) -> Res<Option<lustre::Facts>> {
        lustre::facts(&self.root)
    }

    fn found(&self, dir: BorrowedFd<'_>, name: Option<&Name>) -> Res<Found> {
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
        Ok(Found {
            kind,
            perm: st.st_mode & 0o7777,
            uid: st.st_uid,
            gid: st.st_gid,
            rdev: st.st_rdev as u32,
            atime: time(st.st_atime, st.st_atime_nsec as i64),
            seen: seen(&st),
            target,
        })
    }

    // ---- reaching ----------------------------------------------------------------------------

    fn dir(&self, names: &[Name]) -> Res<OwnedFd> {
        self.beneath(names, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC)
    }

    /// Opens what is below the root, through no symbolic link.
    fn beneath(&self, names: &[Name], flags: OFlags) -> Res<OwnedFd> {
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

    fn parent<'p>(&self, path: &'p BackingPath) -> Res<(OwnedFd, &'p OsStr)> {
        let (dir, name) = path.split().ok_or(Errno::EBUSY)?;
        Ok((self.dir(dir)?, name.as_os_str()))
    }

    /// A handle of the object itself, and the path by which calls without an `at` form reach it.
    fn object(&self, path: &BackingPath) -> Res<(OwnedFd, PathBuf)> {
        let fd = self.beneath(path.names(), OFlags::PATH | OFlags::CLOEXEC)?;
        let proc = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        Ok((fd, proc))
    }

    // ---- effects -----------------------------------------------------------------------------

    /// Carries out the effects of a step: all of them or, where one fails, none that shows.
    pub fn effects(&self, effects: &[Effect]) -> Res<()> {
        for (i, effect) in effects.iter().enumerate() {
            let Err(errno) = self.effect(effect) else { continue };
            // The change itself is done, and nobody looks for this any more.
            if i > 0 && effect.clears() && errno != Errno::ENOENT {
                tracing::warn!(?effect, ?errno, "left on the backing until a drain");
                self.useless.lock().push(effect.clone());
                continue;
            }
            tracing::debug!(?effect, ?errno, "failed");
            self.take_back(&effects[..i]);
            return Err(errno);
        }
        Ok(())
    }

    /// Removes what could not be removed when it had become useless.
    pub fn sweep(&self) -> Res<()> {
        let useless = std::mem::take(&mut *self.useless.lock());
        let remains = |effect: &Effect| !matches!(self.effect(effect), Ok(()) | Err(Errno::ENOENT));
        let left: Vec<Effect> = useless.into_iter().filter(remains).collect();
        self.useless.lock().extend(left);
        Ok(())
    }

    /// True when there is something to sweep.
    pub fn has_useless(&self) -> bool {
        !self.useless.lock().is_empty()
    }

    /// Undoes effects of a change that failed, the last one first.
    pub fn take_back(&self, done: &[Effect]) {
        for effect in done.iter().rev().filter_map(Effect::reverse) {
            if let Err(errno) = self.effect(&effect) {
                tracing::error!(?effect, ?errno, "a change that failed cannot be taken back");
            }
        }
    }

    /// Carries out one effect.
    pub fn effect(&self, effect: &Effect) -> Res<()> {
        #[cfg(test)]
        self.death.may_come().and_then(|()| self.death.may_fail())?;
        match effect {
            Effect::Mkdir { path, perm } => self.mkdir(path, *perm),
            Effect::Rmdir { path } => self.unlink(path, AtFlags::REMOVEDIR),
            Effect::Unlink { path } => self.unlink(path, AtFlags::empty()),
            Effect::Rename { from, to, replace } => self.rename(from, to, *replace),
            Effect::Link { from, to } => self.link(from, to),
            Effect::Symlink { path, target } => self.fresh(path, |dir, name| {
                rustix::fs::symlinkat(OsStr::from_bytes(target), dir, name)
            }),
            Effect::Mknod { path, kind, perm, rdev } => {
                let kind = FileType::from_raw_mode(kind.mode_bits());
                let mode = Mode::from_raw_mode(*perm);
                let rdev = u64::from(*rdev);
                self.fresh(path, |dir, name| rustix::fs::mknodat(dir, name, kind, mode, rdev))
            }
            Effect::CreatePart { path, striping: None } => self.create_part(path),
            Effect::CreatePart { path, striping: Some(striping) } => {
                self.create_striped_part(path, *striping)
            }
            Effect::Chmod { path, perm } => {
                let (_fd, proc) = self.object(path)?;
                rustix::fs::chmod(&proc, Mode::from_raw_mode(*perm)).map_err(errno)
            }
            Effect::Chown { path, uid, gid, strict } => self.chown(path, *uid, *gid, *strict),
            Effect::Utimens { path, atime, mtime } => self.utimens(path, *atime, *mtime),
            Effect::SetXattr { path, name, value, mode } => {
                let (_fd, proc) = self.object(path)?;
                let flags = match mode {
                    XattrMode::Either => XattrFlags::empty(),
                    XattrMode::Create => XattrFlags::CREATE,
                    XattrMode::Replace => XattrFlags::REPLACE,
                };
                rustix::fs::setxattr(&proc, OsStr::from_bytes(name), value, flags).map_err(errno)
            }
            Effect::RemoveXattr { path, name } => {
                let (_fd, proc) = self.object(path)?;
                rustix::fs::removexattr(&proc, OsStr::from_bytes(name)).map_err(errno)
            }
            Effect::SetSize { path, len } => {
                rustix::fs::ftruncate(self.writable(path)?, *len).map_err(errno)
            }
            Effect::SyncFile { path } => rustix::fs::fsync(self.writable(path)?).map_err(errno),
            Effect::SyncDir { path } => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let fd = self.beneath(path.names(), flags)?;
                match rustix::fs::fsync(fd) {
                    // Some network file systems cannot, and need not.
                    Err(Os::INVAL | Os::OPNOTSUPP) => Ok(()),
                    other => other.map_err(errno),
                }
            }
        }
    }

    /// A regular file for writing; never waits for the other end of a pipe.
    fn writable(&self, path: &BackingPath) -> Res<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = self.beneath(path.names(), flags)?;
        let st = rustix::fs::fstat(&fd).map_err(errno)?;
        match FileKind::from_mode(st.st_mode) {
            Some(FileKind::Regular) => Ok(fd),
            _ => Err(Errno::ESTALE),
        }
    }

    fn mkdir(&self, path: &BackingPath, perm: u32) -> Res<()> {
        let (dir, name) = self.parent(path)?;
        match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(perm)) {
            Err(Os::EXIST) => {
                let st =
                    rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(errno)?;
                let kind = FileKind::from_mode(st.st_mode);
                if kind == Some(FileKind::Directory) { Ok(()) } else { Err(Errno::EEXIST) }
            }
            other => other.map_err(errno),
        }
    }

    fn unlink(&self, path: &BackingPath, flags: AtFlags) -> Res<()> {
        let (dir, name) = self.parent(path)?;
        match rustix::fs::unlinkat(dir, name, flags) {
            // Somebody was faster; the name is gone, which is what was wanted.
            Err(Os::NOENT) => Ok(()),
            other => other.map_err(errno),
        }
    }

    fn rename(&self, from: &BackingPath, to: &BackingPath, replace: Replace) -> Res<()> {
        let ((from_dir, from), (to_dir, to)) = (self.parent(from)?, self.parent(to)?);
        let flags = match replace {
            Replace::Yes => RenameFlags::empty(),
            Replace::No => RenameFlags::NOREPLACE,
            Replace::Exchange => RenameFlags::EXCHANGE,
        };
        match rustix::fs::renameat_with(&from_dir, from, &to_dir, to, flags) {
            // Not every network file system knows the flag; the check is then not atomic.
            Err(Os::INVAL | Os::NOSYS) if replace == Replace::No => {
                match rustix::fs::statat(&to_dir, to, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(_) => Err(Errno::EEXIST),
                    Err(Os::NOENT) => {
                        rustix::fs::renameat(&from_dir, from, &to_dir, to).map_err(errno)
                    }
                    Err(e) => Err(errno(e)),
                }
            }
            Ok(()) if replace == Replace::Yes => {
                // Between two names of one object a rename does nothing.
                let id = |dir: &OwnedFd, name: &OsStr| {
                    let st = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
                    Some((st.st_dev, st.st_ino))
                };
                match id(&from_dir, from) {
                    Some(left) if Some(left) == id(&to_dir, to) => {
                        rustix::fs::unlinkat(&from_dir, from, AtFlags::empty()).map_err(errno)
                    }
                    _ => Ok(()),
                }
            }
            other => other.map_err(errno),
        }
    }

    fn link(&self, from: &BackingPath, to: &BackingPath) -> Res<()> {
        let (from_dir, from_name) = self.parent(from)?;
        let there = rustix::fs::statat(&from_dir, from_name, AtFlags::SYMLINK_NOFOLLOW);
        let there = there.map_err(errno)?;
        let result = self.fresh(to, |dir, name| {
            rustix::fs::linkat(&from_dir, from_name, dir, name, AtFlags::empty())
        });
        if result == Err(Errno::EEXIST) {
            let (dir, name) = self.parent(to)?;
            let st = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(errno)?;
            if (st.st_dev, st.st_ino) == (there.st_dev, there.st_ino) {
                return Ok(());
            }
        }
        result
    }

    /// Makes something under a name that is free; a reserved name is ours, so what an interrupted
    /// attempt left there goes first.
    fn fresh(
        &self,
        path: &BackingPath,
        make: impl Fn(&OwnedFd, &OsStr) -> rustix::io::Result<()>,
    ) -> Res<()> {
        let (dir, name) = self.parent(path)?;
        let reserved = path.split().is_some_and(|(_, n)| n.is_reserved());
        match make(&dir, name) {
            Err(Os::EXIST) if reserved => {
                rustix::fs::unlinkat(&dir, name, AtFlags::empty()).map_err(errno)?;
                make(&dir, name).map_err(errno)
            }
            other => other.map_err(errno),
        }
    }

    fn create_part(&self, path: &BackingPath) -> Res<()> {
        let (dir, name) = self.parent(path)?;
        let flags = OFlags::WRONLY
            | OFlags::CREATE
            | OFlags::TRUNC
            | OFlags::NOFOLLOW
            | OFlags::NONBLOCK
            | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::openat(dir, name, flags, mode).map(drop).map_err(errno)
    }

    /// The same for a file that is to be spread over the targets of Lustre. One that a crash
    /// left may have stripes already, so it is not emptied but made anew.
    fn create_striped_part(&self, path: &BackingPath, striping: Striping) -> Res<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        self.fresh(path, |dir, name| {
            let file = rustix::fs::openat(dir, name, flags | lustre::DELAYED, mode)?;
            if let Err(errno) = lustre::set_striping(&file, striping) {
                // Then it gets the directory's default with its first bytes, which matter more.
                tracing::warn!(%path, ?striping, ?errno, "the stripes cannot be set");
            }
            Ok(())
        })
    }

    fn chown(
        &self,
        path: &BackingPath,
        uid: Option<u32>,
        gid: Option<u32>,
        strict: bool,
    ) -> Res<()> {
        let uid = uid.map(rustix::fs::Uid::from_raw);
        let gid = gid.map(rustix::fs::Gid::from_raw);
        let result = match path.split() {
            None => rustix::fs::fchown(&self.root, uid, gid),
            Some((dir, name)) => {
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::chownat(self.dir(dir)?, name.as_os_str(), uid, gid, flags)
            }
        };
        match result {
            Err(Os::PERM) if !strict => {
                tracing::warn!(%path, "the service may not set the owner on the backing");
                Ok(())
            }
            other => other.map_err(errno),
        }
    }

    fn utimens(&self, path: &BackingPath, atime: Option<Time>, mtime: Option<Time>) -> Res<()> {
        let spec = |t: Option<Time>| match t {
            Some(t) => Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() },
            None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        };
        let times = Timestamps { last_access: spec(atime), last_modification: spec(mtime) };
        match path.split() {
            None => rustix::fs::futimens(&self.root, &times).map_err(errno),
            Some((dir, name)) => {
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::utimensat(self.dir(dir)?, name.as_os_str(), &times, flags)
                    .map_err(errno)
            }
        }
    }
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

/// The service's death between two effects, and effects that fail, for tests.
#[cfg(test)]
pub mod death {
    use ebb_types::Errno;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use tokio::sync::Notify;

    /// No errno of any system.
    const DEAD: Errno = Errno(9999);

    #[derive(Debug)]
    pub struct Death {
        /// So many effects are lived to see.
        left: AtomicU32,
        /// So many succeed before one fails.
        good: AtomicU32,
        pub came: Notify,
    }

    impl Default for Death {
        fn default() -> Death {
            let never = || AtomicU32::new(u32::MAX);
            Death { left: never(), good: never(), came: Notify::new() }
        }
    }

    impl Death {
        pub fn after(&self, effects: u32) {
            self.left.store(effects, Relaxed);
        }

        /// One effect fails after so many.
        pub fn fails_after(&self, effects: u32) {
            self.good.store(effects, Relaxed);
        }

        pub fn may_fail(&self) -> Result<(), Errno> {
            match self.good.load(Relaxed) {
                u32::MAX => Ok(()),
                0 => {
                    self.good.store(u32::MAX, Relaxed);
                    Err(Errno::EDQUOT)
                }
                n => {
                    self.good.store(n - 1, Relaxed);
                    Ok(())
                }
            }
        }

        pub fn may_come(&self) -> Result<(), Errno> {
            match self.left.load(Relaxed) {
                u32::MAX => Ok(()),
                0 => Err(DEAD),
                n => {
                    self.left.store(n - 1, Relaxed);
                    Ok(())
                }
            }
        }

        /// Goes no further if this is the end.
        pub async fn stop_here<T>(&self, result: &Result<T, Errno>) {
            if result.as_ref().is_err_and(|e| *e == DEAD) {
                self.came.notify_one();
                std::future::pending::<()>().await;
            }
        }
    }
}
