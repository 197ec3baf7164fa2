//! The backing as a recovery without a service changes it: directories, names, attributes. Every
//! path is walked from the root one component at a time, and no symbolic link is followed.

use ebb_node_journal::Home;
use ebb_types::{Name, Time, name::PART_PREFIX};
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno as Os;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Directories that have to be made, and of which nothing but the name is known.
const DIRECTORY_PERM: u32 = 0o700;

/// No list of extended attributes, and no value, is larger.
const XATTRS_MAX: usize = 64 << 10;

/// The root of the backing.
pub(crate) struct Places {
    root: OwnedFd,
}

/// A name in a directory that is open.
pub(crate) struct At {
    pub dir: OwnedFd,
    pub name: Name,
}

/// The names of a path.
pub(crate) fn names(path: &[u8]) -> io::Result<Vec<Name>> {
    let parts = path.split(|b| *b == b'/').map(Name::new);
    parts.collect::<Result<_, _>>().map_err(io::Error::from)
}

impl Places {
    pub fn open(root: &Path) -> io::Result<Places> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Places { root: rustix::fs::open(root, flags, Mode::empty())? })
    }

    /// The directory of these names; those that are missing are made when that is wanted.
    pub fn dir(&self, names: &[Name], make: bool) -> io::Result<OwnedFd> {
        let mut at = self.root.try_clone()?;
        for name in names {
            at = match open_dir(&at, name) {
                Err(Os::NOENT) if make => {
                    match rustix::fs::mkdirat(&at, name.as_os_str(), DIRECTORY_PERM.into()) {
                        Ok(()) => sync_dir(&at)?,
                        Err(Os::EXIST) => {}
                        Err(e) => return Err(e.into()),
                    }
                    open_dir(&at, name)?
                }
                other => other?,
            };
        }
        Ok(at)
    }

    /// Where a path is.
    pub fn at(&self, path: &[u8], make: bool) -> io::Result<At> {
        let mut names = names(path)?;
        let name = names.pop().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(At { dir: self.dir(&names, make)?, name })
    }

    /// What is there, of whatever type.
    pub fn stat(&self, path: &[u8]) -> io::Result<Option<Stat>> {
        match self.at(path, false) {
            Ok(at) => at.stat(),
            Err(e) => missing_is_none(e),
        }
    }

    /// The regular file of that number there; `None`: it is not there.
    pub fn file(&self, path: &[u8], ino: u64) -> io::Result<Option<File>> {
        let at = match self.at(path, false) {
            Ok(at) => at,
            Err(e) => return missing_is_none(e),
        };
        let found = at.stat()?.filter(|s| s.st_ino == ino && kind(s) == FileType::RegularFile);
        if found.is_none() {
            return Ok(None);
        }
        let file = match at.open(OFlags::RDWR) {
            Ok(file) => file,
            Err(e) => return missing_is_none(e),
        };
        let same = rustix::fs::fstat(&file)?.st_ino == ino;
        Ok(same.then_some(file))
    }
}

impl Places {
    /// The file that bytes go into, and where it is: where it was, or under this path that it may have got, or
    /// beside it: a file without a name of its own yet goes along into another directory.
    pub fn home(&self, home: &Home, path: &[u8]) -> io::Result<Option<(Vec<u8>, File)>> {
        let mut paths = vec![home.path.clone()];
        if home.is_part() && !path.is_empty() {
            let dir = |path: &[u8]| path.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
            paths.push(path.to_vec());
            paths.push([&path[..dir(path)], &home.path[dir(&home.path)..]].concat());
        }
        for path in paths {
            if let Some(file) = self.file(&path, home.ino)? {
                return Ok(Some((path, file)));
            }
        }
        Ok(None)
    }
}

/// What a look at the whole backing has found.
#[derive(Default)]
pub(crate) struct Listing {
    /// Part files by name and number.
    pub parts: BTreeSet<(Vec<u8>, u64)>,
    /// Where files of the numbers are that were asked for, by all their names.
    pub numbered: BTreeMap<u64, Vec<Vec<u8>>>,
    /// There are directories that may not be read.
    pub has_closed: bool,
}

impl Places {
    /// All part files, and all names of files of these numbers, on the file system of the root.
    pub fn listing(&self, numbers: &BTreeSet<u64>) -> io::Result<Listing> {
        let mut listing = Listing::default();
        let device = rustix::fs::fstat(&self.root)?.st_dev;
        let mut dirs: Vec<Vec<Name>> = vec![Vec::new()];
        while let Some(path) = dirs.pop() {
            let dir = match self.dir(&path, false) {
                Ok(dir) => dir,
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                    listing.has_closed = true;
                    continue;
                }
                Err(e) => {
                    missing_is_none::<()>(e)?;
                    continue;
                }
            };
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            for entry in Dir::read_from(rustix::fs::openat(&dir, ".", flags, Mode::empty())?)? {
                let entry = entry?;
                let is_part = entry.file_name().to_bytes().starts_with(PART_PREFIX);
                let is_wanted = is_part || numbers.contains(&entry.ino());
                let known = entry.file_type();
                // "." and ".." are no names.
                let Ok(name) = Name::new(entry.file_name().to_bytes()) else { continue };
                if !is_wanted && matches!(known, FileType::RegularFile | FileType::Symlink) {
                    continue;
                }
                let at = At { dir: dir.try_clone()?, name };
                let Some(stat) = at.stat()? else { continue };
                let below = || [&path[..], std::slice::from_ref(&at.name)].concat();
                match kind(&stat) {
                    FileType::RegularFile if is_part => {
                        listing.parts.insert((at.name.as_bytes().to_vec(), stat.st_ino));
                    }
                    FileType::RegularFile
                        if stat.st_dev == device && numbers.contains(&stat.st_ino) =>
                    {
                        let names = below();
                        let names: Vec<&[u8]> = names.iter().map(Name::as_bytes).collect();
                        let all = listing.numbered.entry(stat.st_ino).or_default();
                        all.push(names.join(&b'/'));
                    }
                    FileType::Directory => dirs.push(below()),
                    _ => {}
                }
            }
        }
        listing.numbered.values_mut().for_each(|all| all.sort_unstable());
        Ok(listing)
    }
}

fn missing_is_none<T>(e: io::Error) -> io::Result<Option<T>> {
    match e.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE) => Ok(None),
        _ => Err(e),
    }
}

pub(crate) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

pub(crate) fn open_dir(at: impl AsFd, name: &Name) -> Result<OwnedFd, Os> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name.as_os_str(), flags, Mode::empty())
}

/// Names made in it, or taken away, are on stable storage.
pub(crate) fn sync_dir(dir: impl AsFd) -> io::Result<()> {
    match rustix::fs::fsync(dir) {
        // Some file systems have nothing to sync there.
        Err(Os::INVAL) => Ok(()),
        other => Ok(other?),
    }
}

impl At {
    pub fn stat(&self) -> io::Result<Option<Stat>> {
        let found = rustix::fs::statat(&self.dir, self.name.as_os_str(), AtFlags::SYMLINK_NOFOLLOW);
        found.map(Some).or_else(|e| missing_is_none(e.into()))
    }

    /// Opens the file, and not what a link points to.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let mode = Mode::from_raw_mode(0o600);
        Ok(File::from(rustix::fs::openat(&self.dir, self.name.as_os_str(), flags, mode)?))
    }

    pub fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.dir, self.name.as_os_str(), AtFlags::empty())?)
    }

    /// Gives the file another name, where nothing may be. EEXIST when something is.
    pub fn rename_to_free(&self, to: &At) -> io::Result<()> {
        let (from_name, to_name) = (self.name.as_os_str(), to.name.as_os_str());
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.dir, from_name, &to.dir, to_name, flags) {
            // NFS has no such rename, but links do not replace anything either.
            Err(Os::INVAL | Os::NOSYS | Os::OPNOTSUPP) => {
                rustix::fs::linkat(&self.dir, from_name, &to.dir, to_name, AtFlags::empty())?;
                self.remove()?;
            }
            other => other?,
        }
        sync_dir(&to.dir)
    }

    /// The same in the place of what is there.
    pub fn rename_over(&self, to: &At) -> io::Result<()> {
        let (from_name, to_name) = (self.name.as_os_str(), to.name.as_os_str());
        rustix::fs::renameat(&self.dir, from_name, &to.dir, to_name)?;
        sync_dir(&to.dir)
    }
}

/// What users and their tools keep with a file.
pub(crate) fn copy_xattrs(from: &File, to: &File) {
    let names = list_xattrs(from).unwrap_or_default();
    for name in names.iter().filter(|name| is_users(name)) {
        match read_xattr(from, name) {
            Ok(value) => set_xattr(to, name, &value),
            Err(e) => tracing::debug!(error = %e, "an extended attribute cannot be read"),
        }
    }
}

/// One that the backing does not take must not hold back the rest, as in a drain.
pub(crate) fn set_xattr(file: impl AsFd, name: &[u8], value: &[u8]) {
    let set = rustix::fs::fsetxattr(file, OsStr::from_bytes(name), value, XattrFlags::empty());
    if let Err(e) = set {
        tracing::debug!(error = %e, "an extended attribute is not taken by the backing");
    }
}

fn is_users(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_")
}

fn list_xattrs(file: &File) -> io::Result<Vec<Vec<u8>>> {
    let mut names = vec![0u8; XATTRS_MAX];
    let len = rustix::fs::flistxattr(file, &mut names[..])?;
    let names = names.get(..len).unwrap_or_default();
    Ok(names.split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
}

fn read_xattr(file: &File, name: &[u8]) -> io::Result<Vec<u8>> {
    let mut value = vec![0u8; XATTRS_MAX];
    let len = rustix::fs::fgetxattr(file, OsStr::from_bytes(name), &mut value[..])?;
    value.truncate(len);
    Ok(value)
}

/// Owner, permissions and times. A user cannot give files away; the bytes matter more.
pub(crate) fn dress(
    file: impl AsFd,
    perm: u32,
    (uid, gid): (u32, u32),
    (atime, mtime): (Time, Time),
) -> io::Result<()> {
    let stat = rustix::fs::fstat(&file)?;
    if (stat.st_uid, stat.st_gid) != (uid, gid) {
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        match rustix::fs::fchown(&file, Some(uid), Some(gid)) {
            Err(Os::PERM) => match rustix::fs::fchown(&file, None, Some(gid)) {
                Err(Os::PERM) => {}
                other => other?,
            },
            other => other?,
        }
    }
    if stat.st_mode & 0o7777 != perm & 0o7777 {
        rustix::fs::fchmod(&file, Mode::from_raw_mode(perm & 0o7777))?;
    }
    let spec = |t: Time| Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() };
    let times = Timestamps { last_access: spec(atime), last_modification: spec(mtime) };
    match rustix::fs::futimens(&file, &times) {
        Err(Os::PERM | Os::ACCESS) => Ok(()),
        other => Ok(other?),
    }
}
