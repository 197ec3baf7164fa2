//! Requests about inodes as such: attributes, permissions, extended attributes, locks.

use super::{Decode, Head, Malformed};
use crate::abi::{self, fattr};
use crate::attributes::from_wire;
use crate::body::Body;
use fuser::{FileHandle, INodeNo, LockOwner, TimeOrNow};

/// Something about an inode that needs no more words.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Inode {
    pub inode: INodeNo,
}

impl Decode<'_> for Inode {
    fn decode(head: &Head, _: &mut Body<'_>) -> Result<Self, Malformed> {
        Ok(Inode { inode: head.inode })
    }
}

/// Attributes that are asked for.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct GetAttr {
    pub inode: INodeNo,
    pub handle: Option<FileHandle>,
}

impl Decode<'_> for GetAttr {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let abi::GetattrIn { getattr_flags, fh, .. } = body.take()?;
        let handle = (getattr_flags & abi::GETATTR_FH != 0).then_some(FileHandle(fh));
        Ok(GetAttr { inode: head.inode, handle })
    }
}

/// Attributes that are changed: those that are there.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct SetAttr {
    pub inode: INodeNo,
    pub handle: Option<FileHandle>,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<TimeOrNow>,
    pub mtime: Option<TimeOrNow>,
}

impl Decode<'_> for SetAttr {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let raw: abi::SetattrIn = body.take()?;
        let has = |field: u32| raw.valid & field != 0;
        let time = |field, now, seconds, nanoseconds| match has(now) {
            true if has(field) => Some(TimeOrNow::Now),
            _ => has(field).then(|| TimeOrNow::SpecificTime(from_wire(seconds, nanoseconds))),
        };
        Ok(SetAttr {
            inode: head.inode,
            handle: has(fattr::FH).then_some(FileHandle(raw.fh)),
            mode: has(fattr::MODE).then_some(raw.mode),
            uid: has(fattr::UID).then_some(raw.uid),
            gid: has(fattr::GID).then_some(raw.gid),
            size: has(fattr::SIZE).then_some(raw.size),
            atime: time(fattr::ATIME, fattr::ATIME_NOW, raw.atime, raw.atimensec),
            mtime: time(fattr::MTIME, fattr::MTIME_NOW, raw.mtime, raw.mtimensec),
        })
    }
}

/// access(2), where the kernel does not check permissions itself.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Access {
    pub inode: INodeNo,
    pub mask: u32,
}

impl Decode<'_> for Access {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        Ok(Access { inode: head.inode, mask: body.take::<abi::AccessIn>()?.mask })
    }
}

/// An extended attribute that is set.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct SetXattr<'a> {
    pub inode: INodeNo,
    pub name: &'a [u8],
    pub value: &'a [u8],
    /// XATTR_CREATE or XATTR_REPLACE.
    pub flags: u32,
}

impl<'a> Decode<'a> for SetXattr<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let abi::SetxattrIn { size, flags } = body.take()?;
        Ok(SetXattr { inode: head.inode, name: body.name()?, value: body.bytes(size)?, flags })
    }
}

/// An extended attribute that is read; with a size of 0 its length alone.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct GetXattr<'a> {
    pub inode: INodeNo,
    pub name: &'a [u8],
    pub size: u32,
}

impl<'a> Decode<'a> for GetXattr<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let abi::GetxattrIn { size, .. } = body.take()?;
        Ok(GetXattr { inode: head.inode, name: body.name()?, size })
    }
}

/// The names of all extended attributes; with a size of 0 their length alone.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct ListXattr {
    pub inode: INodeNo,
    pub size: u32,
}

impl Decode<'_> for ListXattr {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        Ok(ListXattr { inode: head.inode, size: body.take::<abi::GetxattrIn>()?.size })
    }
}

/// An extended attribute that is removed.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct RemoveXattr<'a> {
    pub inode: INodeNo,
    pub name: &'a [u8],
}

impl<'a> Decode<'a> for RemoveXattr<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        Ok(RemoveXattr { inode: head.inode, name: body.name()? })
    }
}

/// A lock that is asked for, taken, or given back.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Lock {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub owner: LockOwner,
    pub start: u64,
    /// The last byte.
    pub end: u64,
    /// F_RDLCK, F_WRLCK or F_UNLCK.
    pub kind: i32,
    pub pid: u32,
    /// It is waited for.
    pub waits: bool,
    /// By flock(2): of the handle, beside the locks of fcntl(2), which are of processes.
    pub flock: bool,
}

impl Decode<'_> for Lock {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let raw: abi::LkIn = body.take()?;
        Ok(Lock {
            inode: head.inode,
            handle: FileHandle(raw.fh),
            owner: LockOwner(raw.owner),
            start: raw.lk.start,
            end: raw.lk.end,
            kind: raw.lk.kind as i32,
            pid: raw.lk.pid,
            waits: head.opcode == abi::opcode::SETLKW,
            flock: raw.lk_flags & abi::LK_FLOCK != 0,
        })
    }
}
