//! Programs on nodes whose disk loses its power, and what must be there afterwards.
//!
//! A program is a process that says on its standard output what it is going to do, and that it was
//! done. From these lines the test knows what was acknowledged before the power went: content that
//! an fsync of its file answered for, and names that an fsync of the file or of the directory
//! answered for.

mod books;
mod program;

pub use books::{Books, Verdict};
pub use program::run;

use serde::{Deserialize, Serialize};

/// Files that a program uses, in one directory of its own.
pub const NAMES: [&str; 5] = ["a", "b", "c", "d", "new"];

/// A file, whatever its name: programs count them.
pub type Id = u64;

/// Something that a program does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Op {
    /// A new file; what had the name loses it.
    Create {
        /// Its name.
        name: String,
        /// Its number from now on.
        id: Id,
    },
    /// Bytes that only this operation writes (see [`crate::content`]).
    Write {
        /// To which file.
        id: Id,
        /// The number of the operation.
        operation: u64,
        /// Where.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// ftruncate, and O_TRUNC when it is 0.
    Cut {
        /// Which file.
        id: Id,
        /// Its new length.
        len: u64,
    },
    /// fsync of a file.
    Sync {
        /// Which.
        id: Id,
    },
    /// rename(2) of a name to another one.
    Rename {
        /// From this one.
        from: String,
        /// To that one.
        to: String,
    },
    /// unlink(2).
    Unlink {
        /// Which name.
        name: String,
    },
    /// fsync of the directory.
    SyncNames,
}

impl Op {
    fn is_of(&self, file: Id) -> bool {
        match self {
            Op::Create { id, .. } | Op::Write { id, .. } | Op::Cut { id, .. } | Op::Sync { id } => {
                *id == file
            }
            Op::Rename { .. } | Op::Unlink { .. } | Op::SyncNames => true,
        }
    }
}

/// A line of a program's output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Line {
    /// It is going to do this.
    Try(Op),
    /// It was done.
    Done,
    /// It failed, and the program ends.
    Failed(String),
}
