//! Rules of extended attributes. Those of inodes on the backing are the backing's own; those of
//! job-local ones are kept here until they get there.

use crate::inode::{Home, Inode};
use crate::plan::{Plan, Planner};
use crate::record::{BackingPath, Effect, Record};
use crate::tree::Namespace;
use ebb_types::{Errno, FileKind, Ino, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where Linux keeps the capabilities of a program. No file has any here: a write must drop them, and
/// the kernel does not tell of each one, least of all past the daemon. Where the backing has some, it
/// drops them itself when the first bytes are written there.
pub const FILE_CAPABILITIES: &[u8] = b"security.capability";

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
    /// Of a new object: where the backing does not take it, it is kept here and the rest goes on.
    Offer,
}

/// Where to read an extended attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XattrSource<T> {
    /// Here it is.
    Here(T),
    /// Ask the backing.
    Backing(BackingPath),
}

/// What a new object on the backing would have to hold: tried on another one, because an inode
/// that the job alone has may not get there for a long time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XattrTrial {
    /// The directory that the object would be in, or the nearest one above it that is there.
    pub dir: BackingPath,
    /// Names and values.
    pub xattrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
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
    if name == FILE_CAPABILITIES {
        return Err(Errno::EOPNOTSUPP);
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
        if name == FILE_CAPABILITIES {
            return Err(Errno::ENODATA);
        }
        check_name(name)?;
        if inode.home == Home::Own && !inode.xattrs.contains_key(name) {
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

    /// The names of attributes that are here because the backing did not take them.
    #[must_use]
    pub fn xattrs_kept(&self, ino: Ino) -> Vec<Box<[u8]>> {
        self.get(ino).map_or_else(Vec::new, |i| i.xattrs.keys().cloned().collect())
    }

    /// What is to be tried on the backing before one more attribute is taken in; `None` where the
    /// backing is asked itself, or never will be.
    #[must_use]
    pub fn xattr_trial(&self, ino: Ino, name: &[u8], value: &[u8]) -> Option<XattrTrial> {
        let inode = self.get(ino).filter(|i| i.home != Home::Own)?;
        let mut dir = inode.links.first()?.parent;
        while self.get(dir)?.home != Home::Own {
            dir = self.get(dir)?.links.first()?.parent;
        }
        let mut xattrs = inode.xattrs.clone();
        xattrs.insert(name.into(), value.into());
        Some(XattrTrial { dir: self.path(dir)?, xattrs })
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
            let mode = match (inode.xattrs.contains_key(&name), mode) {
                (true, XattrMode::Create) => return Err(Errno::EEXIST),
                (true, _) => XattrMode::Either,
                (false, mode) => mode,
            };
            p.effect(Effect::SetXattr { path: path.clone(), name: name.clone(), value, mode });
            no_longer_kept(&mut p, inode, &name);
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
        if inode.home == Home::Own && !inode.xattrs.contains_key(name) {
            let path = p.path(ino)?;
            p.effect(Effect::RemoveXattr { path: path.clone(), name: name.into() });
            p.restat(ino, path);
        } else if inode.xattrs.contains_key(name) {
            no_longer_kept(&mut p, inode, name);
        } else {
            return Err(Errno::ENODATA);
        }
        p.ctime(ino);
        Ok(p.finish(Some(ino)))
    }
}

fn no_longer_kept(p: &mut Planner<'_>, inode: &Inode, name: &[u8]) {
    if inode.xattrs.contains_key(name) {
        p.record(Record::Xattr { ino: inode.ino, name: name.into(), value: None });
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
