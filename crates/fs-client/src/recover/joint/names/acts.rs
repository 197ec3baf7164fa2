//! One thing at a time on the backing. Everything acts below a descriptor of the directory, which is
//! known to be the one that was meant, and follows no symbolic link.

use super::super::board::Place;
use super::super::file::{Site, Stay};
use super::super::tick;
use crate::recover::places::{At, dress as dress_file, kind, open_dir, set_xattr, sync_dir};
use ebb_namespace::{Book, Missing};
use ebb_types::{FileKind, Ino, Name};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawMode, Stat};
use rustix::io::Errno as Os;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

/// Why something is not on the backing.
#[derive(Debug)]
pub(super) enum Trouble {
    Io(io::Error),
    Other(String),
}

impl From<io::Error> for Trouble {
    fn from(e: io::Error) -> Trouble {
        Trouble::Io(e)
    }
}

impl From<Os> for Trouble {
    fn from(e: Os) -> Trouble {
        Trouble::Io(e.into())
    }
}

impl From<Stay> for Trouble {
    fn from(stay: Stay) -> Trouble {
        match stay {
            Stay::Io(e) => Trouble::Io(e),
            stay => Trouble::Other(stay.text()),
        }
    }
}

impl Trouble {
    pub fn text(self) -> String {
        match self {
            Trouble::Io(e) => Stay::Io(e).text(),
            Trouble::Other(why) => why,
        }
    }
}

fn occupied() -> Trouble {
    Trouble::Other("something else has this name on the backing now".to_owned())
}

/// The directory that something is in, when it is the one that is meant.
fn parent(site: &Site<'_>, book: &Book, missing: &Missing<'_>) -> Result<OwnedFd, Trouble> {
    let mut at = site.places.dir(&[], false)?;
    for (name, ino) in missing.path.iter().zip(&missing.dirs) {
        at = open_dir(&at, name).map_err(|e| match e {
            Os::NOENT => Trouble::Other("its directory is not on the backing".to_owned()),
            Os::NOTDIR | Os::LOOP => occupied(),
            e => e.into(),
        })?;
        check_dir(&at, book, *ino)?;
    }
    Ok(at)
}

fn check_dir(dir: &OwnedFd, book: &Book, ino: Ino) -> Result<(), Trouble> {
    let expected = book.shape(ino).map_or(0, |shape| shape.placed);
    if expected != 0 && rustix::fs::fstat(dir)?.st_ino != expected {
        let text = "its directory on the backing is another one now";
        return Err(Trouble::Other(text.to_owned()));
    }
    Ok(())
}

fn at(site: &Site<'_>, book: &Book, missing: &Missing<'_>) -> Result<At, Trouble> {
    let dir = parent(site, book, missing)?;
    let name = missing.path.last().cloned().ok_or_else(occupied)?;
    Ok(At { dir, name })
}

/// A directory, made where it is missing; until the end its owner can work in it.
pub(super) fn directory(
    site: &Site<'_>,
    book: &Book,
    missing: &Missing<'_>,
) -> Result<(), Trouble> {
    let at = at(site, book, missing)?;
    tick::effect()?;
    let made = match rustix::fs::mkdirat(&at.dir, at.name.as_os_str(), Mode::RWXU) {
        Ok(()) => true,
        Err(Os::EXIST) => false,
        Err(e) => return Err(e.into()),
    };
    let dir = match open_dir(&at.dir, &at.name) {
        Err(Os::NOTDIR | Os::LOOP) => return Err(occupied()),
        dir => dir?,
    };
    if made {
        sync_dir(&at.dir)?;
        if site.shared {
            let ino = rustix::fs::fstat(&dir)?.st_ino;
            let path = missing.path.iter().map(Name::as_bytes).collect::<Vec<_>>().join(&b'/');
            site.board.corner(missing.ino)?.settle(site.node, &Place::of(path, ino))?;
        }
    } else if is_ours(site, missing.ino, &dir)? {
        let mode = (rustix::fs::fstat(&dir)?.st_mode & 0o7777) | 0o700;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode))?;
    }
    Ok(())
}

/// True for a directory that a recovery made: others have the modes that they should have, of which a
/// node may not have heard. Where there was one node, it has heard of everything.
fn is_ours(site: &Site<'_>, ino: Ino, dir: &OwnedFd) -> Result<bool, Trouble> {
    let stat = rustix::fs::fstat(dir)?;
    // Killed before it was told.
    let bare = stat.st_mode & 0o7777 == 0o700;
    let told = || site.board.place(ino).map(|p| p.is_some_and(|p| p.ino == stat.st_ino));
    Ok(!site.shared || bare || told()?)
}

/// Owner, modes, times and extended attributes of a directory that was made.
pub(super) fn dress_directory(
    site: &Site<'_>,
    book: &Book,
    missing: &Missing<'_>,
) -> Result<(), Trouble> {
    let at = at(site, book, missing)?;
    let dir = open_dir(&at.dir, &at.name)?;
    if !is_ours(site, missing.ino, &dir)? {
        return Ok(());
    }
    put_xattrs(&dir, book, missing.ino);
    let shape = missing.shape;
    dress_file(&dir, shape.perm, (shape.uid, shape.gid), (shape.atime, shape.mtime))?;
    Ok(sync_dir(&dir)?)
}

/// The number of the object under one of the names, when it is the one that is meant: of a regular
/// file `ours`. What the job was going to replace is not.
pub(super) fn find(
    site: &Site<'_>,
    book: &Book,
    missing: &Missing<'_>,
    ours: Option<u64>,
) -> Result<Option<u64>, Trouble> {
    let at = at(site, book, missing)?;
    let Some(there) = at.stat()? else { return Ok(None) };
    if there.st_ino == missing.replaces && ours != Some(there.st_ino) {
        return Ok(None);
    }
    if kind(&there) != type_of(missing.shape.kind) || !is_same(&at, missing, &there)? {
        return Err(occupied());
    }
    let is_file = missing.shape.kind == FileKind::Regular;
    Ok((!is_file || ours == Some(there.st_ino)).then_some(there.st_ino))
}

/// The same under any other of its names.
pub(super) fn elsewhere(
    site: &Site<'_>,
    book: &Book,
    missing: &Missing<'_>,
    ours: Option<u64>,
) -> Option<u64> {
    let is_file = missing.shape.kind == FileKind::Regular;
    book.paths(missing.ino).iter().find_map(|path| {
        let (name, dirs) = path.split_last()?;
        let at = At { dir: site.places.dir(dirs, false).ok()?, name: name.clone() };
        let there = at.stat().ok()??;
        let same = kind(&there) == type_of(missing.shape.kind)
            && if is_file {
                ours == Some(there.st_ino)
            } else {
                is_same(&at, missing, &there).ok()?
            };
        same.then_some(there.st_ino)
    })
}

/// True when a regular file has this name, and not one that was to be replaced.
pub(super) fn is_file(site: &Site<'_>, book: &Book, missing: &Missing<'_>) -> bool {
    let there = at(site, book, missing).and_then(|at| Ok(at.stat()?)).ok().flatten();
    missing.shape.kind == FileKind::Regular
        && there.is_some_and(|t| kind(&t) == FileType::RegularFile && t.st_ino != missing.replaces)
}

fn is_same(at: &At, missing: &Missing<'_>, there: &Stat) -> Result<bool, Trouble> {
    match (missing.shape.kind, &missing.shape.target) {
        (FileKind::Symlink, Some(target)) => {
            let found = rustix::fs::readlinkat(&at.dir, at.name.as_os_str(), Vec::new())?;
            Ok(found.as_bytes() == &**target)
        }
        (FileKind::CharDevice | FileKind::BlockDevice, _) => {
            Ok(there.st_rdev == u64::from(missing.shape.rdev))
        }
        // Of a file nothing but its bytes would tell, and who has these has brought them there.
        _ => Ok(true),
    }
}

fn type_of(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::Fifo,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharacterDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// A place of our own in which something can be made before it takes a name that is taken.
fn aside(site: &Site<'_>, ino: Ino) -> Result<At, Trouble> {
    let name = format!("new-{:016x}-{}", ino.0, std::process::id());
    let at =
        At { dir: site.board.dir()?, name: Name::new(name.as_bytes()).map_err(io::Error::from)? };
    match at.remove() {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.into()),
        _ => Ok(at),
    }
}

/// A symbolic link, a pipe, a socket or a device.
pub(super) fn special(site: &Site<'_>, book: &Book, missing: &Missing<'_>) -> Result<(), Trouble> {
    let to = at(site, book, missing)?;
    let shape = missing.shape;
    let made = aside(site, missing.ino)?;
    tick::effect()?;
    let (dir, name) = (&made.dir, made.name.as_os_str());
    match &shape.target {
        Some(target) => rustix::fs::symlinkat(OsStr::from_bytes(target), dir, name)?,
        None => {
            let device = u64::from(shape.rdev);
            rustix::fs::mknodat(dir, name, type_of(shape.kind), Mode::RWXU, device)?;
            let mode = Mode::from_raw_mode(RawMode::from(shape.perm & 0o7777));
            rustix::fs::chmodat(dir, name, mode, AtFlags::empty())?;
        }
    }
    let (uid, gid) = (rustix::fs::Uid::from_raw(shape.uid), rustix::fs::Gid::from_raw(shape.gid));
    match rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW) {
        // A user cannot give it away.
        Ok(()) | Err(Os::PERM) => {}
        Err(e) => return Err(e.into()),
    }
    tick::effect()?;
    let done = put(&made, &to, missing.replaces);
    let _ = made.remove();
    done
}

/// Gives something the name that it is to have, unless somebody else has it.
fn put(from: &At, to: &At, replaces: u64) -> Result<(), Trouble> {
    match to.stat()? {
        Some(there) if there.st_ino == replaces => Ok(from.rename_over(to)?),
        // Another recovery was faster, or it is somebody else's: whoever looks next tells.
        Some(_) => Ok(()),
        None => match from.rename_to_free(to) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => Ok(other?),
        },
    }
}

/// One more name for an object, where it does not have it.
pub(super) fn name(
    site: &Site<'_>,
    book: &Book,
    missing: &Missing<'_>,
    object: u64,
) -> Result<(), Trouble> {
    let to = at(site, book, missing)?;
    match to.stat()? {
        Some(there) if there.st_ino == object => return Ok(()),
        Some(there) if there.st_ino != missing.replaces => return Err(occupied()),
        _ => {}
    }
    let source = book.paths(missing.ino);
    for path in &source {
        let Some((name, dirs)) = path.split_last() else { continue };
        let Ok(dir) = site.places.dir(dirs, false) else { continue };
        let from = At { dir, name: name.clone() };
        if from.stat()?.is_none_or(|s| s.st_ino != object) {
            continue;
        }
        let made = aside(site, missing.ino)?;
        tick::effect()?;
        let (old, new) = (from.name.as_os_str(), made.name.as_os_str());
        rustix::fs::linkat(&from.dir, old, &made.dir, new, AtFlags::empty())?;
        let done = put(&made, &to, missing.replaces);
        let _ = made.remove();
        return done;
    }
    Err(Trouble::Other("the file that it is a name of cannot be found".to_owned()))
}

/// Modes and extended attributes of a file.
pub(super) fn dress(
    site: &Site<'_>,
    book: &Book,
    missing: &Missing<'_>,
    object: u64,
) -> Result<(), Trouble> {
    if missing.shape.kind != FileKind::Regular {
        return Ok(());
    }
    let at = at(site, book, missing)?;
    // Whoever may not read it may still have made it.
    let Ok(file) = at.open(OFlags::RDONLY) else { return Ok(()) };
    let stat = rustix::fs::fstat(&file)?;
    if stat.st_ino != object {
        return Ok(());
    }
    put_xattrs(&file, book, missing.ino);
    let mode = stat.st_mode & 0o7777;
    if mode != missing.shape.perm {
        let perm = Mode::from_raw_mode(RawMode::from(missing.shape.perm));
        match rustix::fs::fchmod(&file, perm) {
            Ok(()) | Err(Os::PERM) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn put_xattrs(file: impl AsFd, book: &Book, ino: Ino) {
    book.xattrs(ino).for_each(|(name, value)| set_xattr(&file, name, value));
}

/// Takes a name back that a recovery gave: a file waits for its new one, the rest is made anew. True when
/// nothing of the kind is there. `useless`: it has no name any more, or is under another one already.
pub(super) fn take_back(
    site: &Site<'_>,
    book: &Book,
    stale: &Missing<'_>,
    useless: bool,
) -> Result<bool, Trouble> {
    let at = match at(site, book, stale) {
        Err(Trouble::Io(e)) => return Err(e.into()),
        Err(Trouble::Other(_)) => return Ok(true),
        Ok(at) => at,
    };
    let Some(there) = at.stat()? else { return Ok(true) };
    if kind(&there) != type_of(stale.shape.kind) || !is_same(&at, stale, &there)? {
        return Ok(true);
    }
    tick::effect()?;
    match stale.shape.kind {
        FileKind::Directory => {
            match rustix::fs::unlinkat(&at.dir, at.name.as_os_str(), AtFlags::REMOVEDIR) {
                Ok(()) => Ok(true),
                // Something is in it still.
                Err(Os::NOTEMPTY | Os::EXIST) => Ok(false),
                Err(e) => Err(e.into()),
            }
        }
        // Only what is known to have been made by a recovery.
        FileKind::Regular => {
            let ours = site.board.place(stale.ino)?.is_some_and(|p| p.ino == there.st_ino);
            match ours {
                false => return Ok(true),
                true if useless => at.remove()?,
                true => make_ready(&at, &site.board.ready(stale.ino)?, there.st_ino)?,
            }
            Ok(true)
        }
        _ => {
            at.remove()?;
            Ok(true)
        }
    }
}

/// A file waits for another name. Another one that it has may be taken back at the same time, so this one
/// is given up only where it has the one to wait under.
fn make_ready(at: &At, ready: &At, object: u64) -> Result<(), Trouble> {
    match at.rename_to_free(ready) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        done => return Ok(done?),
    }
    match ready.stat()? {
        Some(there) if there.st_ino == object => Ok(at.remove()?),
        _ => Ok(()),
    }
}

/// A file that waits for its name gets it.
pub(super) fn from_ready(
    site: &Site<'_>,
    book: &Book,
    missing: &Missing<'_>,
    object: u64,
) -> Result<bool, Trouble> {
    let ready = site.board.ready(missing.ino)?;
    if ready.stat()?.is_none_or(|s| s.st_ino != object) {
        return Ok(false);
    }
    let to = at(site, book, missing)?;
    tick::effect()?;
    put(&ready, &to, missing.replaces)?;
    Ok(to.stat()?.is_some_and(|s| s.st_ino == object))
}

/// What has its names need not wait for one.
pub(super) fn tidy_ready(site: &Site<'_>, ino: Ino, object: u64) -> Result<(), Trouble> {
    if !site.board.has(ino)? {
        return Ok(());
    }
    let ready = site.board.ready(ino)?;
    match ready.stat()? {
        Some(there) if there.st_ino == object => Ok(ready.remove()?),
        _ => Ok(()),
    }
}

/// Removes an empty directory that has the mode in which recoveries make directories of which they know
/// nothing but the name.
pub(super) fn remove_bare(site: &Site<'_>, path: &[u8]) -> Result<bool, Trouble> {
    let at = site.places.at(path, false)?;
    let is_bare = |s: Stat| kind(&s) == FileType::Directory && s.st_mode & 0o7777 == 0o700;
    if !at.stat()?.is_some_and(is_bare) {
        return Ok(false);
    }
    tick::effect()?;
    rustix::fs::unlinkat(&at.dir, at.name.as_os_str(), AtFlags::REMOVEDIR)?;
    Ok(true)
}
