//! What a service says of names and inodes, each with when it was true: counted in the changes that
//! the service journals. Facts are absolute, so of two about the same thing the newer one counts, in
//! whatever order and from whomever they are heard. `ebb_namespace::Book` puts them together.

use crate::{FileKind, Ino, Name, Time};
use serde::{Deserialize, Serialize};

/// When it was true: so many changes the service had made by then.
pub type Moment = u64;

/// What a name means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameFact {
    /// When.
    pub at: Moment,
    /// The directory.
    pub parent: Ino,
    /// The name in it.
    pub name: Name,
    /// What it means; `None`: nothing.
    pub bound: Option<Bound>,
}

/// What is under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bound {
    /// The inode.
    pub ino: Ino,
    /// The backing has this name for it.
    pub placed: bool,
    /// `st_ino` of the object that this one is to replace on the backing; 0: there is none.
    pub replaces: u64,
}

/// An inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeFact {
    /// When.
    pub at: Moment,
    /// Its number.
    pub ino: Ino,
    /// How it is; `None`: it has no name any more.
    pub shape: Option<Shape>,
}

/// What an inode is besides its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredShape", into = "StoredShape")]
pub struct Shape {
    /// Its type.
    pub kind: FileKind,
    /// Permission bits.
    pub perm: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number.
    pub rdev: u32,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Target of a symbolic link.
    pub target: Option<Box<[u8]>>,
    /// Of a regular file.
    pub size: u64,
    /// No node and no backing has a byte of it: all of it is zeros.
    pub zeros: bool,
    /// `st_ino` of its object on the backing, when it is there under its names; 0: it is not.
    pub placed: u64,
}

impl Shape {
    /// True for a regular file of which no bytes are anywhere.
    #[must_use]
    pub fn is_zeros(&self) -> bool {
        self.kind == FileKind::Regular && (self.size == 0 || self.zeros)
    }
}

/// A [`Shape`] in a node journal. No file is so long that its size needs the bit that says that it is
/// zeros, and journals that do not say so are read as well.
#[derive(Clone, Serialize, Deserialize)]
struct StoredShape {
    kind: FileKind,
    perm: u32,
    uid: u32,
    gid: u32,
    rdev: u32,
    atime: Time,
    mtime: Time,
    target: Option<Box<[u8]>>,
    size: u64,
    placed: u64,
}

const ZEROS: u64 = 1 << 63;

impl From<Shape> for StoredShape {
    fn from(shape: Shape) -> StoredShape {
        let Shape { kind, perm, uid, gid, rdev, atime, mtime, target, size, zeros, placed } = shape;
        let size = if zeros { size | ZEROS } else { size };
        StoredShape { kind, perm, uid, gid, rdev, atime, mtime, target, size, placed }
    }
}

impl From<StoredShape> for Shape {
    fn from(stored: StoredShape) -> Shape {
        let StoredShape { kind, perm, uid, gid, rdev, atime, mtime, target, size, placed } = stored;
        let (size, zeros) = (size & !ZEROS, size & ZEROS != 0);
        Shape { kind, perm, uid, gid, rdev, atime, mtime, target, size, zeros, placed }
    }
}

/// An extended attribute that the backing does not have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct XattrFact {
    /// When.
    pub at: Moment,
    /// Whose.
    pub ino: Ino,
    /// Its name.
    pub name: Box<[u8]>,
    /// Its value; `None`: there is none, or the backing has it.
    pub value: Option<Box<[u8]>>,
}

/// Some of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The backing has everything that was made or changed up to this moment, so that what was true
    /// then need not be known any more.
    pub settled: Moment,
    /// There are, or were, other nodes in the job.
    pub shared: bool,
    /// How many there are; 0: not said.
    pub nodes: u32,
    /// How many lives of nodes there were so far ([`crate::lives`]); 0: not said. Kept by itself.
    #[serde(skip)]
    pub lives: u32,
    /// About names.
    pub names: Vec<NameFact>,
    /// About inodes.
    pub inodes: Vec<InodeFact>,
    /// About extended attributes.
    pub xattrs: Vec<XattrFact>,
}

/// What a request is going to change, or was: what came of it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subjects {
    /// What these mean.
    pub names: Vec<(Ino, Name)>,
    /// How these are.
    pub inos: Vec<Ino>,
    /// Extended attributes.
    pub xattrs: Vec<(Ino, Box<[u8]>)>,
}

impl Subjects {
    /// False for what no service is asked about.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let xattr =
            |(ino, name): &(Ino, Box<[u8]>)| ino.0 != 0 && !name.is_empty() && !name.contains(&0);
        let name =
            |(parent, name): &(Ino, Name)| parent.0 != 0 && Name::new(name.as_bytes()).is_ok();
        self.names.iter().all(name)
            && self.inos.iter().all(|ino| ino.0 != 0)
            && self.xattrs.iter().all(xattr)
    }
}

impl Facts {
    /// False for what no service says: of what was read, nothing else is acted on.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let link = |s: &Shape| match &s.target {
            Some(target) => !target.is_empty() && !target.contains(&0) && target.len() < 4096,
            None => true,
        };
        let shape = |s: &Shape| {
            s.target.is_some() == (s.kind == FileKind::Symlink)
                && link(s)
                && s.perm <= 0o7777
                && s.size <= i64::MAX as u64
                && s.atime.nsec.max(s.mtime.nsec) < 1_000_000_000
        };
        let name = |n: &NameFact| Name::new(n.name.as_bytes()).is_ok() && n.parent.0 != 0;
        let xattr = |x: &XattrFact| !x.name.is_empty() && !x.name.contains(&0) && x.ino.0 != 0;
        self.names.iter().all(|n| name(n) && n.bound.is_none_or(|b| b.ino.0 != 0))
            && self.inodes.iter().all(|i| i.ino.0 != 0 && i.shape.as_ref().is_none_or(shape))
            && self.xattrs.iter().all(xattr)
    }

    /// True when nothing is said of any name or inode.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.inodes.is_empty() && self.xattrs.is_empty()
    }
}
