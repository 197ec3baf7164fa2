//! Requests about handles and the bytes behind them.

use super::{Decode, Head, Malformed};
use crate::abi;
use crate::body::{Body, offset};
use fuser::{FileHandle, INodeNo, LockOwner, OpenFlags, WriteFlags};

/// A file or a directory that is opened.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Open {
    pub inode: INodeNo,
    pub flags: OpenFlags,
}

impl Decode<'_> for Open {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let abi::OpenIn { flags, .. } = body.take()?;
        Ok(Open { inode: head.inode, flags: OpenFlags(flags as i32) })
    }
}

/// Bytes that are read.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Read {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub offset: u64,
    pub size: u32,
    /// Of the handle, as they are now.
    pub flags: OpenFlags,
    pub owner: Option<LockOwner>,
}

impl Decode<'_> for Read {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let raw: abi::ReadIn = body.take()?;
        let owned = raw.read_flags & abi::READ_LOCKOWNER != 0;
        Ok(Read {
            inode: head.inode,
            handle: FileHandle(raw.fh),
            offset: offset(raw.offset)?,
            size: raw.size,
            flags: OpenFlags(raw.flags as i32),
            owner: owned.then_some(LockOwner(raw.lock_owner)),
        })
    }
}

/// Bytes that are written. They are where the kernel has put them, and stay there only until this
/// request was served.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Write<'a> {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub offset: u64,
    pub data: &'a [u8],
    pub write_flags: WriteFlags,
    /// Of the handle, as they are now.
    pub flags: OpenFlags,
    pub owner: Option<LockOwner>,
}

impl<'a> Decode<'a> for Write<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let raw: abi::WriteIn = body.take()?;
        let write_flags = WriteFlags::from_bits_retain(raw.write_flags);
        let owned = write_flags.contains(WriteFlags::FUSE_WRITE_LOCKOWNER);
        Ok(Write {
            inode: head.inode,
            handle: FileHandle(raw.fh),
            offset: offset(raw.offset)?,
            data: body.bytes(raw.size)?,
            write_flags,
            flags: OpenFlags(raw.flags as i32),
            owner: owned.then_some(LockOwner(raw.lock_owner)),
        })
    }
}

/// One of the descriptors of a handle is closed.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Flush {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub owner: LockOwner,
}

impl Decode<'_> for Flush {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let abi::FlushIn { fh, lock_owner, .. } = body.take()?;
        Ok(Flush { inode: head.inode, handle: FileHandle(fh), owner: LockOwner(lock_owner) })
    }
}

/// The last descriptor of a handle was closed.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Release {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub flags: OpenFlags,
}

impl Decode<'_> for Release {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let abi::ReleaseIn { fh, flags, .. } = body.take()?;
        Ok(Release { inode: head.inode, handle: FileHandle(fh), flags: OpenFlags(flags as i32) })
    }
}

/// What was written is to be safe.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Fsync {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub datasync: bool,
}

impl Decode<'_> for Fsync {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let abi::FsyncIn { fh, fsync_flags, .. } = body.take()?;
        let datasync = fsync_flags & abi::FSYNC_FDATASYNC != 0;
        Ok(Fsync { inode: head.inode, handle: FileHandle(fh), datasync })
    }
}

/// Room for bytes, or holes, by fallocate(2).
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Fallocate {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub offset: u64,
    pub length: u64,
    pub mode: i32,
}

impl Decode<'_> for Fallocate {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let raw: abi::FallocateIn = body.take()?;
        Ok(Fallocate {
            inode: head.inode,
            handle: FileHandle(raw.fh),
            offset: offset(raw.offset)?,
            length: offset(raw.length)?,
            mode: raw.mode as i32,
        })
    }
}

/// Where data or a hole begins, by lseek(2).
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Lseek {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub offset: i64,
    pub whence: i32,
}

impl Decode<'_> for Lseek {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let abi::LseekIn { fh, offset, whence, .. } = body.take()?;
        Ok(Lseek {
            inode: head.inode,
            handle: FileHandle(fh),
            offset: offset as i64,
            whence: whence as i32,
        })
    }
}

/// Bytes of one handle that become bytes of another.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct CopyFileRange {
    pub from: FileHandle,
    pub from_offset: u64,
    pub to: FileHandle,
    pub to_offset: u64,
    pub length: u64,
}

impl Decode<'_> for CopyFileRange {
    fn decode(_: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let raw: abi::CopyFileRangeIn = body.take()?;
        Ok(CopyFileRange {
            from: FileHandle(raw.fh_in),
            from_offset: offset(raw.off_in)?,
            to: FileHandle(raw.fh_out),
            to_offset: offset(raw.off_out)?,
            length: raw.len,
        })
    }
}

/// An ioctl(2).
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Ioctl<'a> {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub command: u32,
    pub data: &'a [u8],
    pub out_size: u32,
}

impl<'a> Decode<'a> for Ioctl<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let raw: abi::IoctlIn = body.take()?;
        Ok(Ioctl {
            inode: head.inode,
            handle: FileHandle(raw.fh),
            command: raw.cmd,
            data: body.bytes(raw.in_size)?,
            out_size: raw.out_size,
        })
    }
}
