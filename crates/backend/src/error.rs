//! What can go wrong on the backing. Every error names the path and what was tried.

use ebb_types::Errno;
use std::fmt;

/// What was tried when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Opening a file.
    Open,
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Bringing it to stable storage.
    Sync,
    /// Asking what a file is.
    Stat,
    /// Giving it owner, permissions and times.
    Attributes,
    /// Asking for the room left.
    Space,
}

impl Operation {
    /// As shown in status and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Operation::Open => "open",
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Sync => "fsync",
            Operation::Stat => "stat",
            Operation::Attributes => "attributes",
            Operation::Space => "statfs",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An operation on the backing that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The path names another file than the one that was meant, or none.
    #[error("{path}: is no longer the same file on the backing (inode {expected}, now {})",
        found.map_or_else(|| "gone".to_owned(), |i| i.to_string()))]
    Moved {
        /// Relative to the backing.
        path: String,
        /// The inode that was meant.
        expected: u64,
        /// The inode that is there.
        found: Option<u64>,
    },
    /// Not a path that can be beneath the backing.
    #[error("'{path}': not a path beneath the backing directory")]
    BadPath {
        /// As given.
        path: String,
    },
    /// What should be a part file of the job is another user's file.
    #[error(
        "{path}: this part file belongs to user {uid}, who put it there; nothing is written to it"
    )]
    Foreign {
        /// Relative to the backing.
        path: String,
        /// Whose it is.
        uid: u32,
    },
    /// There is something else than a regular file.
    #[error("{path}: not a regular file")]
    NotRegular {
        /// Relative to the backing.
        path: String,
    },
    /// The system said no.
    #[error("{path}: {operation}: {errno}")]
    Io {
        /// What was tried.
        operation: Operation,
        /// Relative to the backing; `.` is the backing itself.
        path: String,
        /// What the system said.
        errno: Errno,
    },
}

impl BackendError {
    /// The same as an errno, for whoever can say no more.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            BackendError::Moved { .. } | BackendError::Foreign { .. } => Errno::ESTALE,
            BackendError::BadPath { .. } | BackendError::NotRegular { .. } => Errno::EINVAL,
            BackendError::Io { errno, .. } => *errno,
        }
    }

    /// What was tried.
    #[must_use]
    pub fn operation(&self) -> Operation {
        match self {
            BackendError::Io { operation, .. } => *operation,
            _ => Operation::Open,
        }
    }
}
