//! What the flusher needs from the daemon: which files are dirty, the right to write their
//! bytes to the backing, and where those bytes are.

use ebb_backend::BackendError;
use ebb_types::{Attr, ByteRange, Errno, Ino, Version};
use std::fs::File;
use std::sync::Arc;

/// How a dirty file is being used on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// Nobody has it open.
    Closed,
    /// It is open; what is written is known range by range.
    Open,
    /// It is open and written past the daemon, which learns the ranges later. Flushed only
    /// under pressure or on request.
    Untracked,
    /// Others are to read it before it goes to the backing, if it goes there at all. As well.
    Coupled,
}

/// A file with bytes that are not on the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyFile {
    /// Which.
    pub ino: Ino,
    /// How many: dirty ones, and owned ones that are not flushed. Bytes under a grant count
    /// until [`FlushSource::end`].
    pub bytes: u64,
    /// How it is used.
    pub in_use: FileUse,
}

/// The right to write some bytes of one file to the backing. Until [`FlushSource::end`] nobody
/// else flushes or cuts them.
pub struct Grant {
    /// The file.
    pub ino: Ino,
    /// The service's number of this grant.
    pub id: u64,
    /// What may be written, with the version that each range had when it was granted. Empty
    /// when everything was overtaken meanwhile.
    pub ranges: Vec<(ByteRange, Version)>,
    /// Where the next [`FlushSource::begin`] of this file goes on; None when nothing that was
    /// dirty lies behind this grant. Greater than the `from` of this one.
    pub next: Option<u64>,
    /// What the file may be given before it is synced, when these are the last bytes of it that
    /// are missing on the backing.
    pub shape: Option<Attr>,
    /// The cache file; the bytes have the same offsets as in the file itself.
    pub cache: Arc<File>,
    /// Who knows what should be in it, if anybody does.
    pub guard: Option<Arc<dyn Guard>>,
    /// Where to write, relative to the backing.
    pub backing_path: Vec<u8>,
    /// `st_ino` there.
    pub backing_ino: u64,
    /// The file's user, whose a part file may be already.
    pub owner: u32,
    /// The file's path for messages.
    pub label: String,
}

/// Knows what was written into a cache file, in some way.
pub trait Guard: Send + Sync {
    /// False when bytes that were read from it are not those that were written there. Called from the
    /// flusher's threads.
    fn is_right(&self, bytes: &[u8], offset: u64) -> bool;

    /// It could not be read.
    fn is_unreadable(&self);

    /// False when the grant may have ended: what is written now could come over what others have flushed
    /// since. Asked right before each write.
    fn may_write(&self) -> bool;
}

/// What [`FlushSource::begin`] is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// The file.
    pub ino: Ino,
    /// From this offset on.
    pub from: u64,
    /// That many bytes at most.
    pub most_bytes: u64,
}

/// The daemon, as the flusher sees it. Called from the flusher's threads; must not call back
/// into the flusher while holding a lock that these calls need.
pub trait FlushSource: Send + Sync + 'static {
    /// The dirty files, in the order in which they should be flushed. Must be cheap.
    fn dirty_files(&self) -> Vec<DirtyFile>;

    /// Bytes that are not on the backing. Must be very cheap; asked some ten times a second.
    fn dirty_bytes(&self) -> u64;

    /// Size of the buffer in bytes; 0 when it has no bound.
    fn capacity(&self) -> u64;

    /// The path of a file, for messages.
    fn label(&self, ino: Ino) -> String;

    /// Of each file: publishes what is dirty at or behind offset `from` and asks the service for
    /// permission to write the first `most_bytes` of it. None: nothing is dirty there any more, or
    /// the file is gone. Blocks, but not beyond a deadline of its own. May be called for one file
    /// several times before `end`, with growing `from`, so its grants do not overlap. The answers
    /// come in the order of the questions.
    fn begin(&self, wants: &[Want]) -> Vec<Result<Option<Grant>, FlushError>>;

    /// Reports what became of grants; the answers come in their order. Bytes that were written
    /// again under a grant stay dirty in either case.
    fn end(&self, grants: Vec<(Grant, Fate)>) -> Vec<Result<(), FlushError>>;
}

/// What became of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Every byte of it is on the backing's stable storage.
    Done {
        /// And so are the attributes of its shape.
        shaped: bool,
    },
    /// It is given back; its bytes stay dirty.
    GivenBack,
}

/// Why bytes did not reach the backing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// The service (or the daemon) refused or could not be asked.
    #[error("{operation}: {text}")]
    Service {
        /// What was asked, as shown in status.
        operation: &'static str,
        /// As an errno.
        errno: Errno,
        /// In words.
        text: String,
    },
    /// A grant ended before it was reported as done, with the service's life or with a lease. Nothing is
    /// wrong: its bytes are dirty, and are flushed again.
    #[error("flush_end: {text}")]
    LostGrant {
        /// What the service said, or why it need not be asked.
        text: String,
    },
    /// The backing failed.
    #[error(transparent)]
    Backing(#[from] BackendError),
    /// The node's own cache could not be read.
    #[error("cache file: read at {offset}: {errno}")]
    Cache {
        /// Where.
        offset: u64,
        /// Why.
        errno: Errno,
    },
    /// The cache does not give back what was written into it.
    #[error("cache file: bytes {range} are not the ones that were written")]
    Damaged {
        /// Where.
        range: ByteRange,
    },
    /// What was read back is not what was written.
    #[error("verification: bytes {range} on the backing are not the ones that were written")]
    Mismatch {
        /// Where.
        range: ByteRange,
    },
    /// The backing file is shorter than what was written to it.
    #[error("verification: the backing file has {found} bytes, {expected} were written")]
    Short {
        /// The length it has.
        found: u64,
        /// The least it must have.
        expected: u64,
    },
    /// The backing does not answer; the operation is still waiting for it.
    #[error("{operation}: no answer for {seconds} s")]
    Hanging {
        /// What was tried.
        operation: &'static str,
        /// For how long by now.
        seconds: u64,
    },
    /// A grant that makes no sense.
    #[error("the grant is unusable: {what}")]
    BadGrant {
        /// What is wrong with it.
        what: String,
    },
}

impl FlushError {
    /// What was tried, as shown in status.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        match self {
            FlushError::Service { operation, .. } | FlushError::Hanging { operation, .. } => {
                operation
            }
            FlushError::LostGrant { .. } => "flush_end",
            FlushError::Backing(e) => e.operation().name(),
            FlushError::Cache { .. } | FlushError::Damaged { .. } => "read cache",
            FlushError::Mismatch { .. } | FlushError::Short { .. } => "verify",
            FlushError::BadGrant { .. } => "grant",
        }
    }

    /// The same as an errno.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            FlushError::Service { errno, .. } | FlushError::Cache { errno, .. } => *errno,
            FlushError::LostGrant { .. } => Errno::ESTALE,
            FlushError::Backing(e) => e.errno(),
            FlushError::Mismatch { .. } | FlushError::Short { .. } | FlushError::Damaged { .. } => {
                Errno::EIO
            }
            FlushError::Hanging { .. } => Errno::ETIMEDOUT,
            FlushError::BadGrant { .. } => Errno::EPROTO,
        }
    }

    /// True when other bytes of the same file will not fare better now.
    pub(crate) fn ends_the_pass(&self) -> bool {
        match self {
            FlushError::Service { .. }
            | FlushError::LostGrant { .. }
            | FlushError::BadGrant { .. } => true,
            FlushError::Backing(BackendError::Io { errno, .. }) => {
                matches!(*errno, Errno::ENOSPC | Errno::EDQUOT | Errno::EROFS | Errno::EACCES)
            }
            FlushError::Backing(_) => true,
            _ => false,
        }
    }
}
