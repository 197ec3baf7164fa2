//! Planning new names: make and link.

use crate::inode::{Home, Inode, Under};
use crate::plan::{Plan, Planner};
use crate::record::{Effect, NewInode};
use crate::tree::{Absence, Namespace};
use ebb_types::{Errno, FileKind, Ino, Name, Time};

/// As ext4 and most others.
const LINKS_MAX: usize = 65_000;
/// PATH_MAX without the NUL.
const TARGET_MAX: usize = 4095;

/// What a new inode shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct New {
    /// Its type.
    pub kind: FileKind,
    /// Permission bits, umask applied.
    pub perm: u32,
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory hands down its own.
    pub gid: u32,
    /// Device number.
    pub rdev: u32,
    /// Target of a symbolic link.
    pub target: Option<Box<[u8]>>,
}

impl Namespace {
    /// A new inode under a new name. Job-local: nothing happens on the backing.
    pub fn plan_make(&self, parent: Ino, name: &Name, new: &New, now: Time) -> Result<Plan, Errno> {
        let dir = self.free_name(parent, name)?;
        let target = target_of(new)?;
        let mut perm = new.perm & 0o7777;
        let mut gid = new.gid;
        if dir.perm & SETGID != 0 {
            gid = dir.gid;
            if new.kind == FileKind::Directory {
                perm |= SETGID;
            }
        }
        let mut p = Planner::new(self, now);
        let ino = p.new_ino();
        p.new_inode(NewInode {
            ino,
            kind: new.kind,
            perm,
            uid: new.uid,
            gid,
            rdev: if is_device(new.kind) { new.rdev } else { 0 },
            atime: now,
            mtime: now,
            ctime: now,
            target,
            xattrs: Vec::new(),
            home: Home::None,
            seen: None,
            due: false,
            size: 0,
        });
        p.dentry(parent, name, ino, Under::Nothing);
        p.touch_dir(parent);
        Ok(p.finish(Some(ino)))
    }

    /// One more name for an inode that is not a directory.
    pub fn plan_link(&self, ino: Ino, parent: Ino, name: &Name, now: Time) -> Result<Plan, Errno> {
        let inode = self.inode(ino)?;
        self.free_name(parent, name)?;
        if inode.is_dir() {
            return Err(Errno::EPERM);
        }
        let first = inode.links.first().ok_or(Errno::ENOENT)?.clone();
        if inode.links.len() >= LINKS_MAX {
            return Err(Errno::EMLINK);
        }
        let mut p = Planner::new(self, now);
        let under = if inode.home == Home::Own {
            p.ensure_dir(parent)?;
            let from = p.child(first.parent, &first.name)?;
            let to = p.child(parent, name)?;
            p.effect(Effect::Link { from: from.clone(), to });
            p.restat(ino, from);
            p.restat_dir(parent);
            Under::This
        } else {
            Under::Nothing
        };
        p.dentry(parent, name, ino, under);
        p.ctime(ino);
        p.touch_dir(parent);
        Ok(p.finish(Some(ino)))
    }

    /// The directory, when `name` may be made in it.
    fn free_name(&self, parent: Ino, name: &Name) -> Result<&Inode, Errno> {
        let dir = self.dir_inode(parent)?;
        if parent != Ino::ROOT && dir.links.is_empty() {
            return Err(Errno::ENOENT);
        }
        if name.is_reserved() {
            return Err(Errno::EPERM);
        }
        match self.look(parent, name)? {
            Absence::Present(_) => Err(Errno::EEXIST),
            Absence::Absent | Absence::Unknown => Ok(dir),
        }
    }
}

/// `S_ISGID`.
pub(crate) const SETGID: u32 = 0o2000;

fn is_device(kind: FileKind) -> bool {
    matches!(kind, FileKind::CharDevice | FileKind::BlockDevice)
}

fn target_of(new: &New) -> Result<Option<Box<[u8]>>, Errno> {
    match (new.kind, &new.target) {
        (FileKind::Symlink, Some(t)) if t.is_empty() => Err(Errno::ENOENT),
        (FileKind::Symlink, Some(t)) if t.len() > TARGET_MAX => Err(Errno::ENAMETOOLONG),
        (FileKind::Symlink, Some(t)) if t.contains(&0) => Err(Errno::EINVAL),
        (FileKind::Symlink, Some(t)) => Ok(Some(t.clone())),
        (FileKind::Symlink, None) => Err(Errno::EINVAL),
        (_, Some(_)) => Err(Errno::EINVAL),
        (_, None) => Ok(None),
    }
}
