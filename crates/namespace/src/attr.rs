//! Planning changes of attributes.

use crate::inode::{Home, Inode};
use crate::make::SETGID;
use crate::plan::{Plan, Planner};
use crate::record::{AttrChange, Effect, Record};
use crate::tree::Namespace;
use ebb_types::{Errno, FileKind, Ino, Time};

const SETUID: u32 = 0o4000;
const GROUP_EXEC: u32 = 0o010;

/// A time to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// When the operation happens.
    Now,
    /// To this.
    At(Time),
}

impl SetTime {
    fn at(self, now: Time) -> Time {
        match self {
            SetTime::Now => now,
            SetTime::At(t) => t,
        }
    }
}

/// The attributes that chmod, chown and utimens change; sizes are the driver's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Change {
    pub perm: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    /// Clear setuid, and setgid where group-executable.
    pub kill_priv: bool,
}

fn without_privileges(perm: u32) -> u32 {
    let perm = perm & !SETUID;
    if perm & GROUP_EXEC != 0 { perm & !SETGID } else { perm }
}

impl Change {
    /// The permission bits afterwards, when they differ.
    fn new_perm(&self, inode: &Inode) -> Option<u32> {
        let mut perm = self.perm.map_or(inode.perm, |m| m & 0o7777);
        let chown = self.uid.is_some() || self.gid.is_some();
        // On a directory the bits mean something else: it keeps them.
        if !inode.is_dir() && (self.kill_priv || (chown && self.perm.is_none())) {
            perm = without_privileges(perm);
        }
        (perm != inode.perm || self.perm.is_some()).then_some(perm)
    }
}

impl Namespace {
    /// chmod, chown, utimens; written through when the inode is on the backing.
    pub fn plan_set_attr(&self, ino: Ino, change: &Change, now: Time) -> Result<Plan, Errno> {
        let inode = self.inode(ino)?;
        if inode.kind == FileKind::Symlink && change.perm.is_some() {
            return Err(Errno::EOPNOTSUPP);
        }
        let record = AttrChange {
            perm: change.new_perm(inode),
            uid: change.uid,
            gid: change.gid,
            atime: change.atime.map(|t| t.at(now)),
            mtime: change.mtime.map(|t| t.at(now)),
            ctime: Some(now),
        };
        let mut p = Planner::new(self, now);
        if inode.home == Home::Own {
            write_through(&mut p, inode, &record)?;
        }
        if record != (AttrChange { ctime: Some(now), ..AttrChange::default() }) {
            p.record(Record::Attr { ino, change: record });
        }
        Ok(p.finish(Some(ino)))
    }
}

fn write_through(p: &mut Planner<'_>, inode: &Inode, c: &AttrChange) -> Result<(), Errno> {
    let path = p.path(inode.ino)?;
    if c.uid.is_some() || c.gid.is_some() {
        p.effect(Effect::Chown { path: path.clone(), uid: c.uid, gid: c.gid, strict: true });
    }
    // After a chown, which clears bits by the backing's own rules.
    let chown_clears = (c.uid.is_some() || c.gid.is_some()) && inode.perm & 0o6000 != 0;
    let perm = c.perm.or(chown_clears.then_some(inode.perm));
    if let Some(perm) = perm
        && inode.kind != FileKind::Symlink
    {
        p.effect(Effect::Chmod { path: path.clone(), perm });
    }
    if c.atime.is_some() || c.mtime.is_some() {
        p.effect(Effect::Utimens { path: path.clone(), atime: c.atime, mtime: c.mtime });
    }
    p.restat(inode.ino, path);
    Ok(())
}
