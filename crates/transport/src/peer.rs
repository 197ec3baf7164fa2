//! The two ends of a peer transport as traits, so that every transport passes one conformance
//! suite (`tests/conformance`) and the daemon does not know which one it runs on.

use crate::auth::Token;
use crate::source::{ByteSource, CopySet, SourceError, Subject};
use crate::stats::ServerStats;
use bytes::Bytes;
use ebb_types::{ByteRange, Errno, Ino, Version};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

/// Most bytes of one read. Bounds what a caller can be made to hold in memory.
pub const READ_BYTES_MAX: u64 = 64 << 20;

/// Byte ranges of one file that a peer shall send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The file.
    pub ino: Ino,
    /// See [`Subject::copy_since`].
    pub copy_since: Option<Version>,
    /// See [`Subject::held`].
    pub held: Option<CopySet>,
    /// What of it, in the order in which the bytes are wanted. Ranges may be empty or overlap.
    pub ranges: Vec<ByteRange>,
}

impl ReadRequest {
    /// Bytes that the peer owns.
    #[must_use]
    pub fn of_owner(ino: Ino, ranges: Vec<ByteRange>) -> ReadRequest {
        ReadRequest { ino, copy_since: None, held: None, ranges }
    }

    /// Of which file, on which terms.
    #[must_use]
    pub fn subject(&self) -> Subject {
        Subject { ino: self.ino, copy_since: self.copy_since, held: self.held }
    }

    /// How many bytes the answer has; `None` when a range ends beyond the largest file offset
    /// or all together exceed [`READ_BYTES_MAX`].
    #[must_use]
    pub fn total(&self) -> Option<u64> {
        let mut total = 0u64;
        for range in &self.ranges {
            if range.end() > i64::MAX as u64 {
                return None;
            }
            total = total.checked_add(range.len()).filter(|t| *t <= READ_BYTES_MAX)?;
        }
        Some(total)
    }
}

/// Why a read from a peer did not give the bytes. There are no partial answers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The peer does not have these bytes (any more): ask the metadata service again.
    #[error("the peer no longer has the bytes")]
    NotHere,
    /// The peer has them but cannot read them.
    #[error("the peer cannot read the bytes: {0}")]
    Errno(Errno),
    /// The peer cannot be reached, or the connection broke, and once more when tried again.
    #[error("peer {0}")]
    Unreachable(String),
    /// The answer was not complete before the deadline.
    #[error("the peer did not answer in time")]
    TimedOut,
    /// One of the two does not accept the other: another token, another version.
    #[error("peer {0}")]
    Refused(String),
    /// The request is beyond [`READ_BYTES_MAX`] or the largest file offset.
    #[error("the read is too large")]
    Oversized,
}

impl ReadError {
    /// What an application is told when nobody finds another way to the bytes.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            ReadError::Errno(errno) => *errno,
            ReadError::TimedOut => Errno::ETIMEDOUT,
            ReadError::Unreachable(_) => Errno::EHOSTUNREACH,
            ReadError::Refused(_) => Errno::EACCES,
            ReadError::NotHere => Errno::EIO,
            ReadError::Oversized => Errno::EINVAL,
        }
    }
}

impl From<SourceError> for ReadError {
    fn from(e: SourceError) -> ReadError {
        match e {
            SourceError::NotHere => ReadError::NotHere,
            SourceError::Errno(errno) => ReadError::Errno(errno),
        }
    }
}

/// A future of a trait that is used as `dyn`.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The fetching end.
pub trait PeerReader: Send + Sync + 'static {
    /// All bytes of `request` from the peer at `address` (HOST:PORT), one range after the other.
    fn read<'a>(
        &'a self,
        address: &'a str,
        request: &'a ReadRequest,
    ) -> BoxFuture<'a, Result<Bytes, ReadError>>;
}

/// The lending end, while it runs. Dropping it stops it.
pub trait PeerServing: Send + Sync + 'static {
    /// Where it can be reached, as HOST:PORT.
    fn address(&self) -> String;
    /// What it did so far.
    fn stats(&self) -> ServerStats;
    /// Ends it: no new connections, the open ones are closed.
    fn stop(&self);
}

/// A way to move bytes between daemons.
pub trait PeerTransport: Send + Sync + 'static {
    /// Starts lending at the local address `bind`. Without a token only loopback is served.
    fn serve<'a>(
        &'a self,
        bind: &'a str,
        source: Arc<dyn ByteSource>,
        token: Option<Arc<Token>>,
    ) -> BoxFuture<'a, io::Result<Box<dyn PeerServing>>>;

    /// A fetching end.
    fn reader(&self, token: Option<Arc<Token>>) -> Arc<dyn PeerReader>;
}
