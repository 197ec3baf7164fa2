//! The backing as a directory of any POSIX file system, reached through one descriptor of it.
//!
//! Confinement: the kernel resolves each path beneath the root and through no symbolic link
//! (`openat2`, Linux 5.6). Where that call is missing or forbidden by a seccomp filter, the path
//! is walked one component at a time with `O_NOFOLLOW`. Both refuse the same paths.
//!
//! How bytes move: plain `pread` and `pwrite`, best in pieces of 1 MiB. Medians of five copies of
//! 256 MiB over an existing file on ext4 over virtio, fsync included (the example `copy_ways`):
//! 1 MiB pieces 2100 to 2290 MiB/s (with their checksum), 8 MiB 1830 to 1870, 256 KiB 1740 to 1800,
//! `copy_file_range` 1790 to 1810, O_DIRECT 1400 to 1880. The kernel's copy is no faster without
//! reflinks, shows us no bytes to sum, and O_DIRECT would need aligned ranges.

use crate::error::{BackendError, Operation};
use crate::lustre;
use crate::paths::{components, shown};
use crate::{Access, Backend, BackingFile, Identity, Space};
use ebb_types::{Attr, ByteRange, Errno, Time};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid,
};
use rustix::io::Errno as Os;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// No Linux machine has larger pages.
const LARGEST_PAGE: u64 = 64 << 10;

/// How paths are kept beneath the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confinement {
    /// By the kernel, in one call.
    Kernel,
    /// One component at a time.
    Walk,
}

/// A backing directory.
#[derive(Debug)]
pub struct PosixDir {
    root: OwnedFd,
    confinement: Confinement,
    stripe_size: Option<u32>,
}

impl PosixDir {
    /// Opens `root`, with whatever confinement the kernel offers.
    pub fn open_root(root: &Path) -> Result<PosixDir, BackendError> {
        let mut dir = PosixDir::open_root_with(root, Confinement::Walk)?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        // Missing: ENOSYS. Filtered: EPERM in older container runtimes.
        if rustix::fs::openat2(&dir.root, ".", flags, Mode::empty(), beneath()).is_ok() {
            dir.confinement = Confinement::Kernel;
        }
        Ok(dir)
    }

    /// Opens `root` with this confinement.
    pub fn open_root_with(root: &Path, how: Confinement) -> Result<PosixDir, BackendError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty())
            .map_err(|e| io_error(Operation::Open, &root.display().to_string(), e))?;
        // Only a hint for the size of writes: whoever cannot say has none.
        let stripe_size = match lustre::is_lustre(&root) {
            Ok(true) => lustre::stripe_size(&root).ok(),
            _ => None,
        };
        Ok(PosixDir { root, confinement: how, stripe_size })
    }

    /// How paths are kept beneath the root.
    #[must_use]
    pub fn confinement(&self) -> Confinement {
        self.confinement
    }

    /// Takes away a part file of a job that is over (and nothing else), if it is still the inode
    /// that was meant.
    pub fn remove_part(&self, path: &[u8], ino: u64) -> Result<(), BackendError> {
        let name = shown(path);
        let parts = components(path)?;
        let Some((last, dirs)) = parts.split_last().filter(|(last, _)| last.is_reserved()) else {
            return Err(BackendError::BadPath { path: name });
        };
        let dir = match dirs {
            [] => None,
            _ => {
                let above = dirs.iter().map(ebb_types::Name::as_bytes).collect::<Vec<_>>();
                let flags = OFlags::PATH | OFlags::DIRECTORY;
                match self.resolve(&above.join(&b'/'), flags) {
                    Ok(fd) => Some(fd),
                    Err(Resolve::Refused(e)) => return Err(e),
                    Err(Resolve::Os(e)) => return Err(io_error(Operation::Open, &name, e)),
                }
            }
        };
        let dir = dir.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
        let stat = rustix::fs::statat(dir, last.as_bytes(), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| io_error(Operation::Stat, &name, e))?;
        if stat.st_ino != ino {
            let found = Some(stat.st_ino);
            return Err(BackendError::Moved { path: name, expected: ino, found });
        }
        rustix::fs::unlinkat(dir, last.as_bytes(), AtFlags::empty())
            .map_err(|e| io_error(Operation::Open, &name, e))
    }

    fn resolve(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Resolve> {
        let parts = components(path).map_err(Resolve::Refused)?;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = match self.confinement {
            Confinement::Kernel => {
                rustix::fs::openat2(&self.root, path, flags, Mode::empty(), beneath())
            }
            Confinement::Walk => walk(self.root.as_fd(), &parts, flags),
        };
        opened.map_err(Resolve::Os)
    }
}

/// Why a path did not lead to a file.
enum Resolve {
    Refused(BackendError),
    Os(Os),
}

fn beneath() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS
}

fn walk(
    root: BorrowedFd<'_>,
    parts: &[ebb_types::Name],
    last_flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    let (last, dirs) = parts.split_last().ok_or(Os::NOENT)?;
    let mut at: Option<OwnedFd> = None;
    for dir in dirs {
        let here = at.as_ref().map_or(root, AsFd::as_fd);
        // O_PATH with O_NOFOLLOW opens a symbolic link itself; O_DIRECTORY then refuses it.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        at = Some(rustix::fs::openat(here, dir.as_bytes(), flags, Mode::empty())?);
    }
    let here = at.as_ref().map_or(root, AsFd::as_fd);
    rustix::fs::openat(here, last.as_bytes(), last_flags, Mode::empty())
}

impl Backend for PosixDir {
    fn adopt(&self, file: OwnedFd) -> Option<Arc<dyn BackingFile>> {
        Some(Arc::new(PosixFile { file: File::from(file), name: "(a file without a name)".into() }))
    }

    fn open(
        &self,
        path: &[u8],
        ino: u64,
        access: Access,
    ) -> Result<Arc<dyn BackingFile>, BackendError> {
        let mode = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
        };
        // O_NONBLOCK: a pipe that took the file's place must not hang us before it is refused.
        let fd = match self.resolve(path, mode | OFlags::NONBLOCK | OFlags::NOCTTY) {
            Ok(fd) => fd,
            Err(Resolve::Refused(e)) => return Err(e),
            Err(Resolve::Os(Os::NOENT | Os::NOTDIR)) => {
                return Err(BackendError::Moved { path: shown(path), expected: ino, found: None });
            }
            Err(Resolve::Os(e)) => return Err(io_error(Operation::Open, &shown(path), e)),
        };
        let name = shown(path);
        let stat = rustix::fs::fstat(&fd).map_err(|e| io_error(Operation::Stat, &name, e))?;
        if stat.st_ino != ino {
            return Err(BackendError::Moved {
                path: name,
                expected: ino,
                found: Some(stat.st_ino),
            });
        }
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(BackendError::NotRegular { path: name });
        }
        Ok(Arc::new(PosixFile { file: File::from(fd), name }))
    }

    fn identity(&self, path: &[u8]) -> Result<Identity, BackendError> {
        let stat = match self.resolve(path, OFlags::PATH) {
            Ok(fd) => rustix::fs::statat(&fd, "", AtFlags::EMPTY_PATH),
            Err(Resolve::Refused(e)) => return Err(e),
            Err(Resolve::Os(e)) => Err(e),
        };
        let stat = stat.map_err(|e| io_error(Operation::Stat, &shown(path), e))?;
        Ok(identity_of(&stat))
    }

    fn space(&self) -> Result<Space, BackendError> {
        let fs =
            rustix::fs::fstatvfs(&self.root).map_err(|e| io_error(Operation::Space, ".", e))?;
        Ok(Space {
            total_bytes: fs.f_blocks.saturating_mul(fs.f_frsize),
            available_bytes: fs.f_bavail.saturating_mul(fs.f_frsize),
        })
    }

    fn stripe_size(&self) -> Option<u32> {
        self.stripe_size
    }
}

struct PosixFile {
    file: File,
    name: String,
}

impl PosixFile {
    fn failed(&self, operation: Operation, e: &std::io::Error) -> BackendError {
        BackendError::Io { operation, path: self.name.clone(), errno: Errno::from(e) }
    }

    /// A server that squashes root gives root's files to somebody else, and has checked itself who
    /// may write to this one. Only there root cannot take a file; else it is given back.
    fn is_squashed(&self, stat: &Stat) -> bool {
        let me = Some(rustix::process::geteuid());
        match rustix::fs::fchown(&self.file, me, None) {
            Ok(()) => {
                // Who could take it can give it back.
                let _ = rustix::fs::fchown(&self.file, Some(Uid::from_raw(stat.st_uid)), None);
                false
            }
            Err(e) => e == Os::PERM,
        }
    }

    fn retrying(
        &self,
        operation: Operation,
        mut call: impl FnMut() -> std::io::Result<usize>,
    ) -> Result<usize, BackendError> {
        loop {
            match call() {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                other => return other.map_err(|e| self.failed(operation, &e)),
            }
        }
    }
}

impl BackingFile for PosixFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, BackendError> {
        self.retrying(Operation::Read, || self.file.read_at(buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> Result<usize, BackendError> {
        let wrote = self.retrying(Operation::Write, || self.file.write_at(buf, offset))?;
        if wrote == 0 && !buf.is_empty() {
            // Nothing written and no reason given: a loop around this would never end.
            return Err(BackendError::Io {
                operation: Operation::Write,
                path: self.name.clone(),
                errno: Errno::EIO,
            });
        }
        Ok(wrote)
    }

    fn sync_data(&self) -> Result<(), BackendError> {
        self.retrying(Operation::Sync, || self.file.sync_data().map(|()| 0)).map(|_| ())
    }

    fn sync_all(&self) -> Result<(), BackendError> {
        self.retrying(Operation::Sync, || self.file.sync_all().map(|()| 0)).map(|_| ())
    }

    fn check_owner(&self, owner: u32) -> Result<(), BackendError> {
        // Two at a time would see each other's questions.
        static ASKING: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _asking = ASKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let stat =
            rustix::fs::fstat(&self.file).map_err(|e| io_error(Operation::Stat, &self.name, e))?;
        let me = rustix::process::geteuid();
        let ours = stat.st_uid == me.as_raw() || stat.st_uid == owner;
        if ours || (me.is_root() && stat.st_mode & 0o077 == 0 && self.is_squashed(&stat)) {
            return Ok(());
        }
        Err(BackendError::Foreign { path: self.name.clone(), uid: stat.st_uid })
    }

    fn take_shape(&self, shape: &Attr) -> Result<bool, BackendError> {
        let stat =
            rustix::fs::fstat(&self.file).map_err(|e| io_error(Operation::Stat, &self.name, e))?;
        if u64::try_from(stat.st_size) != Ok(shape.size) {
            return Ok(false);
        }
        let set = || {
            // The owner before the permissions: another one takes setuid and setgid away.
            if (stat.st_uid, stat.st_gid) != (shape.uid, shape.gid) {
                let (uid, gid) = (Uid::from_raw(shape.uid), Gid::from_raw(shape.gid));
                rustix::fs::fchown(&self.file, Some(uid), Some(gid))?;
            }
            rustix::fs::fchmod(&self.file, Mode::from_raw_mode(shape.perm & 0o7777))?;
            let spec = |t: Time| Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() };
            let (last_access, last_modification) = (spec(shape.atime), spec(shape.mtime));
            rustix::fs::futimens(&self.file, &Timestamps { last_access, last_modification })
        };
        match set() {
            Ok(()) => Ok(true),
            Err(Os::PERM | Os::ACCESS) => Ok(false),
            Err(e) => Err(io_error(Operation::Attributes, &self.name, e)),
        }
    }

    fn start_writing(&self, range: ByteRange) {
        use std::os::fd::AsRawFd;
        let (Ok(offset), Ok(len)) = (i64::try_from(range.start()), i64::try_from(range.len()))
        else {
            return;
        };
        // SAFETY: a descriptor that we own, and numbers. An error shows at the sync.
        unsafe {
            libc::sync_file_range(self.file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE);
        }
    }

    fn identity(&self) -> Result<Identity, BackendError> {
        let stat =
            rustix::fs::fstat(&self.file).map_err(|e| io_error(Operation::Stat, &self.name, e))?;
        Ok(identity_of(&stat))
    }

    fn descriptor(&self) -> Option<OwnedFd> {
        self.file.try_clone().ok().map(OwnedFd::from)
    }

    fn drop_cached(&self, range: ByteRange) -> Result<(), BackendError> {
        let longest = i64::MAX as u64;
        if range.is_empty() || range.start() >= longest {
            return Ok(());
        }
        // The kernel drops whole pages only, so the pages at both ends are taken in. No length
        // means "to the end of the file".
        let start = range.start() - range.start() % LARGEST_PAGE;
        let end = range.end().checked_next_multiple_of(LARGEST_PAGE).filter(|end| *end < longest);
        let len = end.and_then(|end| std::num::NonZeroU64::new(end - start));
        rustix::fs::fadvise(&self.file, start, len, rustix::fs::Advice::DontNeed)
            .map_err(|e| io_error(Operation::Sync, &self.name, e))
    }
}

fn io_error(operation: Operation, path: &str, e: Os) -> BackendError {
    BackendError::Io { operation, path: path.to_owned(), errno: Errno(e.raw_os_error()) }
}

fn identity_of(stat: &Stat) -> Identity {
    Identity {
        ino: stat.st_ino,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
    }
}

fn time(sec: i64, nsec: u64) -> Time {
    Time { sec, nsec: u32::try_from(nsec).unwrap_or(0).min(999_999_999) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn only_the_part_file_that_is_meant_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("d")).unwrap();
        for name in ["f", ".ebb-part-1", "d/.ebb-part-2"] {
            std::fs::write(at(name), name).unwrap();
        }
        std::os::unix::fs::symlink("d", at("link")).unwrap();
        let ino = |name: &str| std::fs::metadata(at(name)).unwrap().ino();
        let root = PosixDir::open_root(dir.path()).unwrap();
        let refused = |path: &str, ino: u64| root.remove_part(path.as_bytes(), ino).is_err();
        assert!(refused("f", ino("f")), "a user's file");
        assert!(refused(".ebb-part-1", ino("f")), "another inode");
        assert!(refused("link/.ebb-part-2", ino("d/.ebb-part-2")), "through a link");
        assert!(refused("d/../.ebb-part-1", ino(".ebb-part-1")), "not a plain path");
        root.remove_part(b".ebb-part-1", ino(".ebb-part-1")).unwrap();
        root.remove_part(b"d/.ebb-part-2", ino("d/.ebb-part-2")).unwrap();
        assert!(at("f").exists() && !at(".ebb-part-1").exists() && !at("d/.ebb-part-2").exists());
    }
}
