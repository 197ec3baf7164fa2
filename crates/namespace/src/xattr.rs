//! Rules of extended attributes. Those of inodes on the backing are the backing's own; those of
//! job-local ones are kept here until they get there.

use crate::inode::{Home, Inode};
use crate::plan::{Plan, Planner};
use crate::record::{BackingPath, Effect, Record};
use crate::tree::Namespace;
use ebb_types::{Errno, FileKind, Ino, Time};
use serde::{Deserialize, Serialize};

const NAME_MAX: usize = 255;
const VALUE_MAX: usize = 65_536;
/// All names and values of a job-local inode together: what ext4 and XFS hold at most.
const TOTAL_MAX: usize = 1 << 20;

/// XATTR_CREATE, XATTR_REPLACE or neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum XattrMode {
    /// Set it, there or not.
    Either,
    /// EEXIST when it is there.
    Create,
    /// ENODATA when it is not.
    Replace,
}

/// Where to read an extended attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XattrSource<T> {
    /// Here it is.
    Here(T),
    /// Ask the backing.
    Backing(BackingPath),
}

fn check_name(name: &[u8]) -> Result<(), Errno> {
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Errno::ERANGE);
    }
    if name.contains(&0) {
        return Err(Errno::EINVAL);
    }
    if name.starts_with(b"user.ebb.") {
        return Err(Errno::EPERM);
    }
    let known: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    if known.iter().any(|p| name.starts_with(p) && name.len() > p.len()) {
        Ok(())
    } else {
        Err(Errno::EOPNOTSUPP)
    }
}

fn check_kind(inode: &Inode, name: &[u8]) -> Result<(), Errno> {
    let plain = matches!(inode.kind, FileKind::Regular | FileKind::Directory);
    if name.starts_with(b"user.") && !plain { Err(Errno::EPERM) } else { Ok(()) }
}

impl Namespace {
    /// Where to read one attribute; ENODATA when it is known not to be there.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<XattrSource<&[u8]>, Errno> {
        let inode = self.inode(ino)?;
        check_name(name)?;
        if inode.home == Home::Own {
            return Ok(XattrSource::Backing(self.path(ino).ok_or(Errno::ENOENT)?));
        }
        inode.xattrs.get(name).map(|v| XattrSource::Here(&**v)).ok_or(Errno::ENODATA)
    }

    /// Where to list all attributes.
    pub fn xattr_names(&self, ino: Ino) -> Result<XattrSource<Vec<Box<[u8]>>>, Errno> {
        let inode = self.inode(ino)?;
        if inode.home == Home::Own {
            return Ok(XattrSource::Backing(self.path(ino).ok_or(Errno::ENOENT)?));
        }
        Ok(XattrSource::Here(inode.xattrs.keys().cloned().collect()))
    }

    /// setxattr(2).
    pub fn plan_set_xattr(
        &self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        now: Time,
    ) -> Result<Plan, Errno> {
        let inode = self.inode(ino)?;
        check_name(name)?;
        check_kind(inode, name)?;
        if value.len() > VALUE_MAX {
            return Err(Errno::E2BIG);
        }
        let (name, value): (Box<[u8]>, Box<[u8]>) = (name.into(), value.into());
        let mut p = Planner::new(self, now);
        if inode.home == Home::Own {
            let path = p.path(ino)?;
            p.effect(Effect::SetXattr { path: path.clone(), name, value, mode });
            p.restat(ino, path);
        } else {
            check_local(inode, &name, &value, mode)?;
            p.record(Record::Xattr { ino, name, value: Some(value) });
        }
        p.ctime(ino);
        Ok(p.finish(Some(ino)))
    }

    /// removexattr(2).
    pub fn plan_remove_xattr(&self, ino: Ino, name: &[u8], now: Time) -> Result<Plan, Errno> {
        let inode = self.inode(ino)?;
        check_name(name)?;
        check_kind(inode, name)?;
        let mut p = Planner::new(self, now);
        if inode.home == Home::Own {
            let path = p.path(ino)?;
            p.effect(Effect::RemoveXattr { path: path.clone(), name: name.into() });
            p.restat(ino, path);
        } else if inode.xattrs.contains_key(name) {
            p.record(Record::Xattr { ino, name: name.into(), value: None });
        } else {
            return Err(Errno::ENODATA);
        }
        p.ctime(ino);
        Ok(p.finish(Some(ino)))
    }
}

fn check_local(inode: &Inode, name: &[u8], value: &[u8], mode: XattrMode) -> Result<(), Errno> {
    match (mode, inode.xattrs.contains_key(name)) {
        (XattrMode::Create, true) => return Err(Errno::EEXIST),
        (XattrMode::Replace, false) => return Err(Errno::ENODATA),
        _ => {}
    }
    let others = inode.xattrs.iter().filter(|(n, _)| &***n != name);
    let total: usize = others.map(|(n, v)| n.len() + v.len()).sum();
    if total + name.len() + value.len() > TOTAL_MAX { Err(Errno::ENOSPC) } else { Ok(()) }
}
