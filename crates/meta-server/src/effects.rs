//! Effects on the backing: the changes that the namespace has planned, done one after the other.
//! Where it is known which object belongs under a path, no other one is changed: in a directory to
//! which others may write they can swap files.

use crate::backing::{Backing, errno};
use ebb_backend::lustre;
use ebb_namespace::{BackingKey, BackingPath, Effect, Known, Replace, XattrMode};
use ebb_types::{Errno, FileKind, Striping, Time};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno as Os;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

type Res<T> = Result<T, Errno>;

impl Backing {
    /// Carries out the effects of a step: all of them or, where one fails, none that shows. Gives
    /// what its objects lack. `wanted`: whether anybody waits for it; what was
    /// given up between two effects is taken back.
    pub fn effects(
        &self,
        effects: &[Effect],
        known: &Known,
        wanted: impl Fn() -> bool,
    ) -> Res<Vec<Lack>> {
        let mut hands = Hands { known: known.clone(), lacks: Vec::new() };
        for (i, effect) in effects.iter().enumerate() {
            // It may have waited until nobody did any more.
            let result = self.may_change().and_then(|()| match wanted() {
                true => self.effect_by(effect, &mut hands),
                false => Err(Errno::ETIMEDOUT),
            });
            let Err(errno) = result else { continue };
            // The change itself is done, and nobody looks for this any more; nor for what may not even be there.
            let at = effect.checked_path();
            let useless = i > 0 || at.is_some_and(|path| !hands.known.contains_key(path));
            if effect.clears() && useless && errno != Errno::ENOENT {
                tracing::warn!(?effect, ?errno, "left on the backing until a drain");
                self.useless.lock().push(effect.clone());
                continue;
            }
            tracing::debug!(?effect, ?errno, "failed");
            self.take_back(&effects[..i], &hands.known);
            return Err(errno);
        }
        Ok(hands.lacks)
    }

    /// Removes what could not be removed when it had become useless.
    pub fn sweep(&self) -> Res<()> {
        let useless = std::mem::take(&mut *self.useless.lock());
        let remains =
            |e: &Effect| !matches!(self.effect(e, &Known::new()), Ok(()) | Err(Errno::ENOENT));
        let left: Vec<Effect> = useless.into_iter().filter(remains).collect();
        self.useless.lock().extend(left);
        Ok(())
    }

    /// True when there is something to sweep.
    pub fn has_useless(&self) -> bool {
        !self.useless.lock().is_empty()
    }

    /// Undoes effects of a change that failed, the last one first.
    pub fn take_back(&self, done: &[Effect], known: &Known) {
        for effect in done.iter().rev().filter_map(Effect::reverse) {
            if let Err(errno) = self.effect(&effect, known) {
                tracing::error!(?effect, ?errno, "a change that failed cannot be taken back");
            }
        }
    }

    /// Carries out one effect.
    pub fn effect(&self, effect: &Effect, known: &Known) -> Res<()> {
        self.may_change()?;
        self.effect_by(effect, &mut Hands { known: known.clone(), lacks: Vec::new() })
    }

    /// The caller has made sure that this service may.
    fn effect_by(&self, effect: &Effect, hands: &mut Hands) -> Res<()> {
        #[cfg(test)]
        self.death.may_come().and_then(|()| self.death.may_fail())?;
        match effect {
            Effect::Mkdir { path, perm } => self.mkdir(path, *perm),
            Effect::Rmdir { path } => self.unlink(path, AtFlags::REMOVEDIR),
            Effect::Unlink { path } => match hands.check(self, path) {
                // Somebody else's by now: it is none of ours to remove.
                Err(Errno::ESTALE | Errno::ENOENT) => Ok(()),
                Err(e) => Err(e),
                Ok(()) => self.unlink(path, AtFlags::empty()),
            },
            Effect::Rename { from, to, replace } => self.rename_known(from, to, *replace, hands),
            Effect::Link { from, to } => {
                hands.note(to, self.link(from, to)?);
                Ok(())
            }
            Effect::Symlink { path, target } => {
                let make =
                    |dir: &_, name: &_| rustix::fs::symlinkat(OsStr::from_bytes(target), dir, name);
                self.fresh(path, make)?;
                self.note_made(path, FileKind::Symlink, hands)
            }
            Effect::Mknod { path, kind, perm, rdev } => {
                let kind = FileType::from_raw_mode(kind.mode_bits());
                let mode = Mode::from_raw_mode(*perm);
                let rdev = u64::from(*rdev);
                let of = FileKind::from_mode(kind.as_raw_mode()).ok_or(Errno::EINVAL)?;
                self.fresh(path, |dir, name| rustix::fs::mknodat(dir, name, kind, mode, rdev))?;
                self.note_made(path, of, hands)
            }
            Effect::CreatePart { path, striping } => {
                hands.note(path, self.create_part(path, *striping)?);
                Ok(())
            }
            Effect::Chmod { path, perm } => {
                let (_fd, proc) = self.checked_object(path, hands)?;
                // Whose it is decides who may read it.
                let perm = if hands.is_unowned(path) { perm & 0o700 } else { *perm };
                match rustix::fs::chmod(&proc, Mode::from_raw_mode(perm)) {
                    // Somebody who may has done it.
                    Err(Os::PERM) if self.stat(path)?.perm == perm => Ok(()),
                    other => other.map_err(errno),
                }
            }
            Effect::Chown { path, uid, gid, strict } => {
                let result = self.chown(path, *uid, *gid, hands);
                match result {
                    Err(Errno::EPERM) if !strict => {
                        tracing::warn!(%path, ?uid, ?gid, "the service may not set the owner");
                        hands.lacks.push(Lack {
                            path: path.clone(),
                            what: What::Owner,
                            errno: Errno::EPERM,
                        });
                        Ok(())
                    }
                    other => other,
                }
            }
            Effect::Utimens { path, atime, mtime } => self.utimens(path, *atime, *mtime, hands),
            Effect::SetXattr { path, name, value, mode } => {
                let set = self.set_xattr(path, name, value, *mode, hands);
                match set {
                    Err(errno) if *mode == XattrMode::Offer && errno != Errno::ESTALE => {
                        let shown = String::from_utf8_lossy(name);
                        tracing::warn!(%path, attribute = %shown, ?errno, "not set on the backing");
                        let what = What::Xattr(name.clone(), value.clone());
                        hands.lacks.push(Lack { path: path.clone(), what, errno });
                        Ok(())
                    }
                    other => other,
                }
            }
            Effect::RemoveXattr { path, name } => {
                let (_fd, proc) = self.checked_object(path, hands)?;
                rustix::fs::removexattr(&proc, OsStr::from_bytes(name)).map_err(errno)
            }
            Effect::SetSize { path, len } => {
                rustix::fs::ftruncate(self.writable(path, hands)?, *len).map_err(errno)
            }
            Effect::SyncFile { path } => {
                rustix::fs::fsync(self.writable(path, hands)?).map_err(errno)
            }
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
    fn writable(&self, path: &BackingPath, hands: &Hands) -> Res<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = self.beneath(path.names(), flags)?;
        let st = rustix::fs::fstat(&fd).map_err(errno)?;
        match FileKind::from_mode(st.st_mode) {
            Some(FileKind::Regular) if hands.knows(path, st.st_ino) => Ok(fd),
            _ => Err(swapped(path)),
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

    /// A rename of an object that is known: another one is never given the name.
    fn rename_known(
        &self,
        from: &BackingPath,
        to: &BackingPath,
        replace: Replace,
        hands: &mut Hands,
    ) -> Res<()> {
        hands.check(self, from)?;
        self.rename(from, to, replace)?;
        let Some(key) = hands.known.remove(from) else { return Ok(()) };
        hands.known.insert(to.clone(), key);
        let Err(errno) = hands.check(self, to) else { return Ok(()) };
        // Swapped between the look and the rename.
        if let Err(errno) = self.rename(to, from, Replace::No) {
            tracing::error!(%from, %to, ?errno, "a file of somebody else has this name now");
        }
        Err(errno)
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

    /// Gives the object that has the name now.
    fn link(&self, from: &BackingPath, to: &BackingPath) -> Res<BackingKey> {
        let (from_dir, from_name) = self.parent(from)?;
        let there = rustix::fs::statat(&from_dir, from_name, AtFlags::SYMLINK_NOFOLLOW);
        let there = there.map_err(errno)?;
        let key = BackingKey { dev: there.st_dev, ino: there.st_ino };
        let result = self.fresh(to, |dir, name| {
            rustix::fs::linkat(&from_dir, from_name, dir, name, AtFlags::empty())
        });
        if result == Err(Errno::EEXIST) {
            let (dir, name) = self.parent(to)?;
            let st = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(errno)?;
            if (st.st_dev, st.st_ino) == (there.st_dev, there.st_ino) {
                return Ok(key);
            }
        }
        result.map(|()| key)
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

    /// An empty file that only we have: never one that was there already. It is spread over the
    /// targets of Lustre, where that is asked for.
    fn create_part(&self, path: &BackingPath, striping: Option<Striping>) -> Res<BackingKey> {
        let flags = OFlags::WRONLY
            | OFlags::CREATE
            | OFlags::EXCL
            | OFlags::NOFOLLOW
            | OFlags::NONBLOCK
            | OFlags::CLOEXEC;
        let flags = if striping.is_some() { flags | lustre::DELAYED } else { flags };
        let made = std::cell::Cell::new(None);
        self.fresh(path, |dir, name| {
            let file = rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?;
            if let Some(striping) = striping
                && let Err(errno) = lustre::set_striping(&file, striping)
            {
                // Then it gets the directory's default with its first bytes, which matter more.
                tracing::warn!(%path, ?striping, ?errno, "the stripes cannot be set");
            }
            made.set(Some(rustix::fs::fstat(&file)?));
            Ok(())
        })?;
        let st = made.take().ok_or(Errno::EIO)?;
        Ok(BackingKey { dev: st.st_dev, ino: st.st_ino })
    }

    /// What has just been made under a reserved name and cannot be held open, unless somebody put
    /// another thing in its place: a further name of a file would show by its links.
    fn note_made(&self, path: &BackingPath, kind: FileKind, hands: &mut Hands) -> Res<()> {
        if !path.split().is_some_and(|(_, name)| name.is_reserved()) {
            return Ok(());
        }
        let found = self.stat(path)?;
        if found.kind != kind || found.seen.nlink != 1 {
            return Err(swapped(path));
        }
        hands.note(path, found.seen.key);
        Ok(())
    }

    /// The object at a path, when it is the one that is known.
    fn checked_object(&self, path: &BackingPath, hands: &Hands) -> Res<(OwnedFd, PathBuf)> {
        let (fd, proc) = self.object(path)?;
        let st = rustix::fs::fstat(&fd).map_err(errno)?;
        if hands.knows(path, st.st_ino) { Ok((fd, proc)) } else { Err(swapped(path)) }
    }

    fn set_xattr(
        &self,
        path: &BackingPath,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        hands: &Hands,
    ) -> Res<()> {
        let (_fd, proc) = self.checked_object(path, hands)?;
        let flags = match mode {
            XattrMode::Either | XattrMode::Offer => XattrFlags::empty(),
            XattrMode::Create => XattrFlags::CREATE,
            XattrMode::Replace => XattrFlags::REPLACE,
        };
        rustix::fs::setxattr(&proc, OsStr::from_bytes(name), value, flags).map_err(errno)
    }

    fn chown(
        &self,
        path: &BackingPath,
        uid: Option<u32>,
        gid: Option<u32>,
        hands: &Hands,
    ) -> Res<()> {
        let (fd, _) = self.checked_object(path, hands)?;
        let (to_uid, to_gid) =
            (uid.map(rustix::fs::Uid::from_raw), gid.map(rustix::fs::Gid::from_raw));
        match rustix::fs::chownat(&fd, "", to_uid, to_gid, AtFlags::EMPTY_PATH) {
            Err(Os::PERM) => {
                let st = rustix::fs::fstat(&fd).map_err(errno)?;
                let is = |wanted: Option<u32>, id| wanted.is_none_or(|w| w == id);
                // Somebody who may has done it.
                if is(uid, st.st_uid) && is(gid, st.st_gid) { Ok(()) } else { Err(Errno::EPERM) }
            }
            other => other.map_err(errno),
        }
    }

    fn utimens(
        &self,
        path: &BackingPath,
        atime: Option<Time>,
        mtime: Option<Time>,
        hands: &Hands,
    ) -> Res<()> {
        let spec = |t: Option<Time>| match t {
            Some(t) => Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() },
            None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        };
        let times = Timestamps { last_access: spec(atime), last_modification: spec(mtime) };
        // The link in /proc leads to the object itself, also where that is a symbolic link.
        let (_fd, proc) = self.checked_object(path, hands)?;
        rustix::fs::utimensat(rustix::fs::CWD, &proc, &times, AtFlags::empty()).map_err(errno)
    }
}

/// What an object on the backing was to get and did not: the rest of it matters more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// The object.
    pub path: BackingPath,
    /// What it lacks.
    pub what: What,
    /// Why.
    pub errno: Errno,
}

/// What an object can lack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Its owner and group.
    Owner,
    /// An extended attribute, by name and value.
    Xattr(Box<[u8]>, Box<[u8]>),
}

/// What is known while a list of effects is carried out.
struct Hands {
    known: Known,
    lacks: Vec<Lack>,
}

impl Hands {
    fn is_unowned(&self, path: &BackingPath) -> bool {
        self.lacks.iter().any(|l| l.what == What::Owner && l.path == *path)
    }

    /// What was made or linked under a reserved name.
    fn note(&mut self, path: &BackingPath, key: BackingKey) {
        if path.split().is_some_and(|(_, name)| name.is_reserved()) {
            self.known.insert(path.clone(), key);
        }
    }

    /// False when another object than this one belongs there. (Device numbers differ from boot to
    /// boot.)
    fn knows(&self, path: &BackingPath, ino: u64) -> bool {
        self.known.get(path).is_none_or(|k| k.ino == ino)
    }

    /// ESTALE when another object is there than the one that is known.
    fn check(&self, backing: &Backing, path: &BackingPath) -> Res<()> {
        if !self.known.contains_key(path) {
            return Ok(());
        }
        let found = backing.stat(path)?;
        if self.knows(path, found.seen.key.ino) { Ok(()) } else { Err(swapped(path)) }
    }
}

/// Somebody put something else in the place of our file.
fn swapped(path: &BackingPath) -> Errno {
    tracing::error!(%path, "this is not the file that was made here: others replaced it");
    Errno::ESTALE
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_types::Name;
    use std::os::unix::fs::MetadataExt;

    fn path(name: &str) -> BackingPath {
        BackingPath::ROOT.join(&Name::new(name.as_bytes()).unwrap())
    }

    /// What somebody left under the name of a part file, or put there, is not what we get.
    #[test]
    fn a_part_file_is_always_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let backing = Backing::open(dir.path()).unwrap();
        let (victim, part) = (dir.path().join("victim"), dir.path().join(".ebb-part-1"));
        std::fs::write(&victim, "precious").unwrap();
        for striping in [None, Some(Striping { count: 2, size: 1 << 20 })] {
            std::fs::hard_link(&victim, &part).unwrap();
            let effect = Effect::CreatePart { path: path(".ebb-part-1"), striping };
            backing.effect(&effect, &Known::new()).unwrap();
            assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
            let made = std::fs::metadata(&part).unwrap();
            assert_ne!(made.ino(), std::fs::metadata(&victim).unwrap().ino());
            assert_eq!((made.len(), made.mode() & 0o7777, made.nlink()), (0, 0o600, 1));
            std::fs::remove_file(&part).unwrap();
        }
    }

    /// A special file is changed by its path: a further name of somebody's file there is noticed.
    #[test]
    fn effects_on_another_object_than_the_known_one_are_not_done() {
        let dir = tempfile::tempdir().unwrap();
        let backing = Backing::open(dir.path()).unwrap();
        let at = dir.path().join(".ebb-part-2");
        std::fs::write(&at, "not ours").unwrap();
        let there = std::fs::metadata(&at).unwrap();
        let of = path(".ebb-part-2");
        let key = BackingKey { dev: there.dev(), ino: there.ino() + 1 };
        let known = Known::from([(of.clone(), key)]);
        let (from, to) = (of.clone(), path("f"));
        let effects = [
            Effect::SetSize { path: of.clone(), len: 0 },
            Effect::Chmod { path: of.clone(), perm: 0o777 },
            Effect::Chown { path: of.clone(), uid: Some(1), gid: Some(1), strict: true },
            Effect::Utimens { path: of.clone(), atime: None, mtime: Some(Time::default()) },
            Effect::SyncFile { path: of.clone() },
            Effect::Rename { from, to, replace: Replace::Yes },
        ];
        for effect in effects {
            assert_eq!(backing.effect(&effect, &known), Err(Errno::ESTALE), "{effect:?}");
        }
        // Nothing of ours is there, which is what an unlink wants.
        backing.effect(&Effect::Unlink { path: of }, &known).unwrap();
        let now = std::fs::metadata(&at).unwrap();
        assert_eq!(
            (now.len(), now.mode(), now.uid(), now.ctime_nsec()),
            (8, there.mode(), there.uid(), there.ctime_nsec())
        );
        assert!(!dir.path().join("f").exists());
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let backing = Backing::open(dir.path()).unwrap();
        let asked = std::cell::Cell::new(0);
        let wanted = || {
            asked.set(asked.get() + 1);
            asked.get() < 3
        };
        let part = |n| Effect::CreatePart { path: path(&format!(".ebb-part-{n}")), striping: None };
        let result = backing.effects(&[part(1), part(2), part(3)], &Known::new(), wanted);
        assert_eq!(result.unwrap_err(), Errno::ETIMEDOUT);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
