//! Newtypes for every id, so that an inode number cannot be passed where a node is meant.

use serde::{Deserialize, Serialize};
use std::fmt;

/// An inode number of the mounted file system: job-wide, the same on every node, never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ino(pub u64);

impl Ino {
    /// The root directory, in FUSE and here.
    pub const ROOT: Ino = Ino(1);
}

/// A node (one daemon) of the job, as numbered by the metadata service. 0 is nobody.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u32);

impl NodeId {
    /// No node: the bytes are the backing's.
    pub const NOBODY: NodeId = NodeId(0);
}

/// Which life of a node's daemon this is: chosen at random at start, so that a returning old
/// daemon is told apart from the one that took its place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

/// A point in the history of one file, counted by the metadata service: every attach, detach,
/// truncate and change of the backing file takes the next one. Bytes fetched as of version `v`
/// are still good when nothing newer than `v` touched them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Version(pub u64);

impl Version {
    /// Before everything.
    pub const ZERO: Version = Version(0);

    /// The version after this one.
    #[must_use]
    pub fn next(self) -> Version {
        Version(self.0 + 1)
    }
}

macro_rules! short_debug {
    ($($t:ident $p:literal),*) => {$(
        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($p, "{}"), self.0)
            }
        }
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    )*};
}
short_debug!(Ino "ino", NodeId "n", Incarnation "inc", Version "v");
