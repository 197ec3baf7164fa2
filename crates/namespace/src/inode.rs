//! What the namespace keeps of one inode, and what it knows of the backing object behind it.

use ebb_types::{FileKind, Ino, Name, Time};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// `st_dev` and `st_ino`: which object of the backing it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BackingKey {
    /// `st_dev`.
    pub dev: u64,
    /// `st_ino`.
    pub ino: u64,
}

/// The state of a backing object when it was looked at last; a difference means that others
/// changed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Which object.
    pub key: BackingKey,
    /// Its size.
    pub size: u64,
    /// Its number of names there.
    pub nlink: u32,
    /// Its mtime.
    pub mtime: Time,
    /// Its ctime.
    pub ctime: Time,
}

/// What was found under a name of the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its type.
    pub kind: FileKind,
    /// Permission bits (`0o7777`).
    pub perm: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number.
    pub rdev: u32,
    /// Last access.
    pub atime: Time,
    /// Identity, size and times of change.
    pub seen: Seen,
    /// Target of a symbolic link.
    pub target: Option<Box<[u8]>>,
}

/// Where the bytes of an inode are on the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Home {
    /// Nowhere yet: the inode is job-local (or has no name any more).
    None,
    /// In the part file of this directory.
    Part {
        /// The directory that holds the part file.
        dir: Ino,
    },
    /// Under its own names.
    Own,
}

/// What the backing has under a name of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Under {
    /// Nothing.
    Nothing,
    /// This inode.
    This,
    /// An older object that this inode replaces when it is published.
    Older,
}

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dentry {
    /// What it names.
    pub ino: Ino,
    /// What the backing has there.
    pub under: Under,
}

/// One name of an inode, seen from the inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The directory.
    pub parent: Ino,
    /// The name in it.
    pub name: Name,
}

/// The state of a backing directory under which listings and absences were learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirStamp {
    /// Which directory.
    pub key: BackingKey,
    /// Its mtime.
    pub mtime: Time,
    /// Its ctime.
    pub ctime: Time,
}

/// Names of a directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dir {
    pub entries: BTreeMap<Name, Dentry>,
    /// Sub-directories among `entries`.
    pub subdirs: u32,
    /// Those of them that the backing does not have.
    pub local_subdirs: u32,
    /// Bumped by every change of a name in it, so that optimistic look-ups notice.
    pub generation: u64,
    /// Everything below is a cache of what the backing does not have.
    pub stamp: Option<DirStamp>,
    pub complete: bool,
    /// What the backing has was taken in whole, and nothing of it forgotten since.
    pub listed: bool,
    pub absent: BTreeSet<Name>,
}

/// One inode.
#[derive(Clone, Debug)]
pub struct Inode {
    /// Its number.
    pub ino: Ino,
    /// Its type.
    pub kind: FileKind,
    /// Permission bits with setuid, setgid and sticky.
    pub perm: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number.
    pub rdev: u32,
    /// Last access, set explicitly only.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of anything.
    pub ctime: Time,
    /// Target of a symbolic link.
    pub target: Option<Box<[u8]>>,
    /// Extended attributes that the backing does not have (yet).
    pub xattrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
    /// Its names.
    pub links: SmallVec<[Link; 1]>,
    /// Where its bytes are on the backing.
    pub home: Home,
    /// The backing object as it was seen last.
    pub seen: Option<Seen>,
    /// The backing object exists, but its times (and a file's size) are not yet what they
    /// should be.
    pub due: bool,
    /// The backing object has not the owner that it should have, and is closed to everybody else;
    /// or it lacks `xattrs`.
    pub owed: bool,
    /// When `seen` was last recorded, by [`crate::Namespace::now_seen`].
    pub(crate) seen_at: u64,
    pub(crate) dir: Option<Box<Dir>>,
}

impl Inode {
    /// True for a directory.
    #[must_use]
    pub fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// The target's length for a symlink; what directories show; 0 for everything else (the size
    /// of a regular file is kept with its ownership).
    #[must_use]
    pub fn own_size(&self) -> u64 {
        match (&self.target, &self.seen) {
            (Some(t), _) => t.len() as u64,
            (None, Some(s)) if self.is_dir() => s.size,
            _ if self.is_dir() => 4096,
            _ => 0,
        }
    }
}
