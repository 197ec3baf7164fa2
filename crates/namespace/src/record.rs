//! The two vocabularies of the namespace: effects on the backing, and records of what is true.

use crate::inode::{BackingKey, Home, Seen, Under};
use ebb_types::{FileKind, Ino, Name, NodeId, Striping, Time};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A path relative to the backing directory, made of checked names; empty for the root itself.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct BackingPath(Vec<Name>);

impl BackingPath {
    /// The backing directory itself.
    pub const ROOT: BackingPath = BackingPath(Vec::new());

    pub(crate) fn from_reversed(mut names: Vec<Name>) -> BackingPath {
        names.reverse();
        BackingPath(names)
    }

    /// The path of `name` in this directory.
    #[must_use]
    pub fn join(&self, name: &Name) -> BackingPath {
        let mut names = self.0.clone();
        names.push(name.clone());
        BackingPath(names)
    }

    /// The directory part and the last name; `None` for the root.
    #[must_use]
    pub fn split(&self) -> Option<(&[Name], &Name)> {
        self.0.split_last().map(|(last, dir)| (dir, last))
    }

    /// Its components.
    #[must_use]
    pub fn names(&self) -> &[Name] {
        &self.0
    }

    /// The components joined by slashes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().map(Name::as_bytes).collect::<Vec<_>>().join(&b'/')
    }
}

impl fmt::Debug for BackingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.to_bytes()))
    }
}

impl fmt::Display for BackingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", String::from_utf8_lossy(&self.to_bytes()))
    }
}

/// What becomes of an object that is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Replace {
    /// It is replaced atomically.
    Yes,
    /// The effect fails with EEXIST.
    No,
    /// The two change places.
    Exchange,
}

/// Something to be done on the backing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Effect {
    /// Fine when it is a directory already.
    Mkdir {
        path: BackingPath,
        perm: u32,
    },
    Rmdir {
        path: BackingPath,
    },
    Unlink {
        path: BackingPath,
    },
    Rename {
        from: BackingPath,
        to: BackingPath,
        replace: Replace,
    },
    Link {
        from: BackingPath,
        to: BackingPath,
    },
    Symlink {
        path: BackingPath,
        target: Box<[u8]>,
    },
    Mknod {
        path: BackingPath,
        kind: FileKind,
        perm: u32,
        rdev: u32,
    },
    /// An empty regular file of mode 0600, always a new one; what is found under that name goes.
    /// `striping` is how it should be spread over storage targets, where that can be said.
    CreatePart {
        path: BackingPath,
        striping: Option<Striping>,
    },
    Chmod {
        path: BackingPath,
        perm: u32,
    },
    /// `strict` is false where the owner of a new object is set. A service without privileges
    /// cannot; the bytes matter more, so it is published, but for its actual owner alone.
    Chown {
        path: BackingPath,
        uid: Option<u32>,
        gid: Option<u32>,
        strict: bool,
    },
    Utimens {
        path: BackingPath,
        atime: Option<Time>,
        mtime: Option<Time>,
    },
    SetXattr {
        path: BackingPath,
        name: Box<[u8]>,
        value: Box<[u8]>,
        mode: crate::XattrMode,
    },
    RemoveXattr {
        path: BackingPath,
        name: Box<[u8]>,
    },
    SetSize {
        path: BackingPath,
        len: u64,
    },
    /// Content and attributes of a file reach stable storage.
    SyncFile {
        path: BackingPath,
    },
    /// The names of a directory reach stable storage.
    SyncDir {
        path: BackingPath,
    },
}

impl Effect {
    /// What takes it back, where that is needed: names that were moved or made. (An attribute can
    /// be set again.)
    #[must_use]
    pub fn reverse(&self) -> Option<Effect> {
        match self {
            Effect::Rename { replace: Replace::Exchange, .. } => Some(self.clone()),
            Effect::Rename { from, to, .. } if is_part(from) || is_part(to) => {
                let (from, to) = (to.clone(), from.clone());
                Some(Effect::Rename { from, to, replace: Replace::No })
            }
            Effect::Link { to, .. } => Some(Effect::Unlink { path: to.clone() }),
            // Half made it would be taken for somebody else's. (One that is not empty stays.)
            Effect::Mkdir { path, .. } => Some(Effect::Rmdir { path: path.clone() }),
            Effect::CreatePart { path, .. }
            | Effect::Symlink { path, .. }
            | Effect::Mknod { path, .. }
                if is_part(path) =>
            {
                Some(Effect::Unlink { path: path.clone() })
            }
            _ => None,
        }
    }

    /// True when it takes away what nobody can reach any more.
    #[must_use]
    pub fn clears(&self) -> bool {
        matches!(self, Effect::Unlink { path } if is_part(path))
    }

    /// The path at which it must find an object that is known, or do nothing: a part file, or a file
    /// whose size changes.
    #[must_use]
    pub fn checked_path(&self) -> Option<&BackingPath> {
        match self {
            Effect::SetSize { path, .. } => Some(path),
            Effect::Unlink { path }
            | Effect::Rename { from: path, .. }
            | Effect::Chmod { path, .. }
            | Effect::Chown { path, .. }
            | Effect::Utimens { path, .. }
            | Effect::SetXattr { path, .. }
            | Effect::RemoveXattr { path, .. }
            | Effect::SyncFile { path }
                if is_part(path) =>
            {
                Some(path)
            }
            _ => None,
        }
    }

    /// The path whose name it makes, moves or takes away, and the other one of a rename.
    #[must_use]
    pub fn names(&self) -> [Option<&BackingPath>; 2] {
        match self {
            Effect::Mkdir { path, .. }
            | Effect::Rmdir { path }
            | Effect::Unlink { path }
            | Effect::Symlink { path, .. }
            | Effect::Mknod { path, .. }
            | Effect::CreatePart { path, .. }
            | Effect::SetSize { path, .. } => [Some(path), None],
            Effect::Rename { from, to, .. } => [Some(from), Some(to)],
            Effect::Link { to, .. } => [Some(to), None],
            _ => [None, None],
        }
    }

    /// The order of a change of names: first what can be taken back, at the end what is of no use.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Effect::Rename { from, to, .. } if is_part(from) && is_part(to) => 0,
            Effect::Link { to, .. } if is_part(to) => 0,
            effect if effect.clears() => 2,
            _ => 1,
        }
    }
}

fn is_part(path: &BackingPath) -> bool {
    path.names().last().is_some_and(Name::is_reserved)
}

/// Attributes that change; `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct AttrChange {
    pub perm: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
    pub ctime: Option<Time>,
}

/// A whole inode without its names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct NewInode {
    pub ino: Ino,
    pub kind: FileKind,
    pub perm: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub target: Option<Box<[u8]>>,
    pub xattrs: Vec<(Box<[u8]>, Box<[u8]>)>,
    pub home: Home,
    pub seen: Option<Seen>,
    pub due: bool,
    /// Size of a regular file that was found on the backing; the driver keeps sizes.
    pub size: u64,
}

/// Something that is true from here on. Small and absolute, so that replay needs no rules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Record {
    /// The numbers below this one are taken.
    NextIno(Ino),
    Inode(Box<NewInode>),
    /// `name` in `parent` is `ino`; replaces what it was.
    Dentry {
        parent: Ino,
        name: Name,
        ino: Ino,
        under: Under,
    },
    NoDentry {
        parent: Ino,
        name: Name,
    },
    Attr {
        ino: Ino,
        change: AttrChange,
    },
    Xattr {
        ino: Ino,
        name: Box<[u8]>,
        value: Option<Box<[u8]>>,
    },
    /// The backing has the extended attributes now.
    XattrsMoved {
        ino: Ino,
    },
    Home {
        ino: Ino,
        home: Home,
    },
    Seen {
        ino: Ino,
        seen: Option<Seen>,
    },
    Due {
        ino: Ino,
        due: bool,
    },
    /// Others changed the backing file: unowned bytes are new and end at `len`. Means something
    /// only to the driver, which keeps the bytes.
    Base {
        ino: Ino,
        len: u64,
    },
    Open {
        node: NodeId,
        ino: Ino,
    },
    Close {
        node: NodeId,
        ino: Ino,
    },
    /// The inode is gone for good.
    Free {
        ino: Ino,
    },
    /// The older object under this name is that one. (Where a name of the job takes the place of
    /// one that was seen on the backing, this follows from the `Dentry` record.)
    Covers {
        parent: Ino,
        name: Name,
        key: BackingKey,
    },
    /// Part files of inodes from this one on have names that nobody can foretell: they follow from
    /// this secret.
    PartNames {
        secret: [u8; 16],
        from: Ino,
    },
    /// The backing object has not the owner or the extended attributes that it should have: the
    /// service may not set them.
    Owed {
        ino: Ino,
        owed: bool,
    },
    /// The backing has all of it. It is not known here until somebody finds it there.
    Forget {
        ino: Ino,
    },
    /// This number, which follows from an object, is never given again.
    UsedUp {
        ino: Ino,
    },
    /// A forgotten inode was there.
    Place {
        ino: Ino,
        parent: Ino,
        name: Name,
    },
}
