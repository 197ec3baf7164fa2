//! Requests about names and directories.

use super::{Decode, Head, Malformed};
use crate::abi;
use crate::body::Body;
use fuser::{FileHandle, INodeNo, OpenFlags, RenameFlags};

/// A name that is looked up or removed.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Named<'a> {
    pub parent: INodeNo,
    pub name: &'a [u8],
}

impl<'a> Decode<'a> for Named<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        Ok(Named { parent: head.inode, name: body.name()? })
    }
}

/// A new symbolic link.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct SymLink<'a> {
    pub parent: INodeNo,
    pub name: &'a [u8],
    pub target: &'a [u8],
}

impl<'a> Decode<'a> for SymLink<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        Ok(SymLink { parent: head.inode, name: body.name()?, target: body.name()? })
    }
}

/// A new inode that is not opened. The kernel has applied the umask unless FUSE_DONT_MASK was asked
/// for.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct MkNod<'a> {
    pub parent: INodeNo,
    pub name: &'a [u8],
    pub mode: u32,
    pub umask: u32,
    pub rdev: u32,
}

impl<'a> Decode<'a> for MkNod<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let abi::MknodIn { mode, rdev, umask, .. } = body.take()?;
        Ok(MkNod { parent: head.inode, name: body.name()?, mode, umask, rdev })
    }
}

/// A new directory.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct MkDir<'a> {
    pub parent: INodeNo,
    pub name: &'a [u8],
    pub mode: u32,
    pub umask: u32,
}

impl<'a> Decode<'a> for MkDir<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let abi::MkdirIn { mode, umask } = body.take()?;
        Ok(MkDir { parent: head.inode, name: body.name()?, mode, umask })
    }
}

/// A name that becomes another one.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Rename<'a> {
    pub parent: INodeNo,
    pub name: &'a [u8],
    pub new_parent: INodeNo,
    pub new_name: &'a [u8],
    pub flags: RenameFlags,
}

impl<'a> Decode<'a> for Rename<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let (newdir, flags) = match head.opcode {
            abi::opcode::RENAME2 => {
                let abi::Rename2In { newdir, flags, .. } = body.take()?;
                (newdir, flags)
            }
            _ => (body.take::<abi::RenameIn>()?.newdir, 0),
        };
        Ok(Rename {
            parent: head.inode,
            name: body.name()?,
            new_parent: INodeNo(newdir),
            new_name: body.name()?,
            flags: RenameFlags::from_bits_retain(flags),
        })
    }
}

/// A further name of an inode.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Link<'a> {
    pub inode: INodeNo,
    pub new_parent: INodeNo,
    pub new_name: &'a [u8],
}

impl<'a> Decode<'a> for Link<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let inode = INodeNo(body.take::<abi::LinkIn>()?.oldnodeid);
        Ok(Link { inode, new_parent: head.inode, new_name: body.name()? })
    }
}

/// A file that is made, if it is not there, and opened.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Create<'a> {
    pub parent: INodeNo,
    pub name: &'a [u8],
    pub mode: u32,
    pub umask: u32,
    pub flags: OpenFlags,
}

impl<'a> Decode<'a> for Create<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        let abi::CreateIn { flags, mode, umask, .. } = body.take()?;
        let flags = OpenFlags(flags as i32);
        Ok(Create { parent: head.inode, name: body.name()?, mode, umask, flags })
    }
}

/// The names of a directory from an offset on, in so many bytes.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct ReadDir {
    pub inode: INodeNo,
    pub handle: FileHandle,
    pub offset: u64,
    pub size: u32,
}

impl Decode<'_> for ReadDir {
    fn decode(head: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let abi::ReadIn { fh, offset, size, .. } = body.take()?;
        // Offsets in a directory are the file system's own: any number.
        Ok(ReadDir { inode: head.inode, handle: FileHandle(fh), offset, size })
    }
}
