//! Between FUSE's words and ours.

use ebb_fuse::{FileAttr, FileType, INodeNo, TimeOrNow};
use ebb_meta_client::SetTime;
use ebb_types::{Attr, Errno, FileKind, Ino, Time};
use std::time::SystemTime;

/// Preferred size of an application's buffers.
const BLOCK_SIZE: u32 = 1 << 20;

pub fn errno(e: Errno) -> ebb_fuse::Errno {
    ebb_fuse::Errno::from_i32(e.0)
}

pub fn ino(i: INodeNo) -> Ino {
    Ino(i.0)
}

pub fn kind(k: FileKind) -> FileType {
    match k {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

pub fn attr(a: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(a.ino.0),
        size: a.size,
        blocks: a.size.div_ceil(512),
        atime: a.atime.into(),
        mtime: a.mtime.into(),
        ctime: a.ctime.into(),
        crtime: SystemTime::UNIX_EPOCH,
        kind: kind(a.kind),
        perm: (a.perm & 0o7777) as u16,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        blksize: BLOCK_SIZE,
        flags: 0,
    }
}

/// A time that the kernel asks to set.
pub fn time(t: TimeOrNow) -> SetTime {
    match t {
        TimeOrNow::SpecificTime(t) => SetTime::To(Time::from(t)),
        TimeOrNow::Now => SetTime::Now,
    }
}
