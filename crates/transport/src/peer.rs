//! The two ends of a peer transport as traits, so that every transport passes one conformance
//! suite (`tests/conformance`) and the daemon does not know which one it runs on.

use crate::auth::Token;
use crate::rdma::RdmaReport;
use crate::secure::{Secure, SecureStats};
use crate::server::ServeError;
use crate::source::{ByteSource, CopySet, SourceError, Subject, Work};
use crate::stats::{PoolStats, ServerStats};
use bytes::{Bytes, BytesMut};
use ebb_types::{ByteRange, Errno, Ino, Version};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use tokio::net::TcpListener;

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

/// Fills a buffer with the bytes of a range.
pub type ReadBytes<'a> = &'a (dyn Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send + Sync);

/// Something that a peer shall do.
#[derive(Clone, Copy)]
pub struct WorkRequest<'a> {
    /// Which copies; of nobody for what is not about copies.
    pub set: CopySet,
    /// The file; 0 when there are no ranges.
    pub ino: Ino,
    /// What to do.
    pub work: Work,
    /// What of the file, any number of ranges.
    pub ranges: &'a [ByteRange],
    /// Gives the bytes of the ranges, where the work brings bytes.
    pub read: ReadBytes<'a>,
}

/// Why a peer has not done what it should, or perhaps not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkError {
    /// It says no.
    #[error("the peer refuses: {0}")]
    Refused(Errno),
    /// It does not answer, or not in time: what was asked may be done, in part or whole.
    #[error("the peer does not answer: {0}")]
    Silent(String),
    /// The same, before it was asked to do anything.
    #[error("the peer is not reached: {0}")]
    Unreached(String),
    /// The bytes cannot be read here.
    #[error("reading the bytes for the peer: {0}")]
    Local(Errno),
}

/// The asking end: all that a daemon wants of other daemons goes through it. Connections are its own matter: made
/// when they are needed, shared, made again.
pub trait PeerChannel: Send + Sync + 'static {
    /// All bytes of `request` from the peer at `address` (HOST:PORT), one range after the other, in
    /// `buffer`, whose content is replaced: reusing one saves the page faults of fresh memory. It is lost on an
    /// error. Reads may be repeated by the channel.
    fn read_into<'a>(
        &'a self,
        address: &'a str,
        request: &'a ReadRequest,
        buffer: BytesMut,
    ) -> BoxFuture<'a, Result<BytesMut, ReadError>>;

    /// Has the peer at `address` do something. Done when this returns; never done twice.
    fn work<'a>(
        &'a self,
        address: &'a str,
        request: WorkRequest<'a>,
    ) -> BoxFuture<'a, Result<(), WorkError>>;

    /// Makes sure that the peer at `address` can be asked to do something.
    fn reach<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Result<(), WorkError>>;

    /// Which connections are encrypted; none where there is no token.
    fn secure(&self) -> Option<Secure>;

    /// What went encrypted so far with the keys that this channel shares with others of its process.
    fn encrypted(&self) -> SecureStats;

    /// What it did so far.
    fn stats(&self) -> PoolStats;

    /// What RDMA did so far, where there is any.
    fn rdma(&self) -> Option<RdmaReport> {
        None
    }
}

impl dyn PeerChannel {
    /// [`PeerChannel::read_into`] fresh memory.
    pub async fn read(&self, address: &str, request: &ReadRequest) -> Result<Bytes, ReadError> {
        self.read_into(address, request, BytesMut::new()).await.map(BytesMut::freeze)
    }
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
    /// Starts lending to whoever comes to `listener`; must be called on a runtime, which then does the work. Peers
    /// know a node by this one address: a transport that does not move bytes over TCP is agreed on there.
    /// Without a token only loopback is served.
    fn serve(
        &self,
        listener: TcpListener,
        source: Arc<dyn ByteSource>,
        token: Option<Arc<Token>>,
    ) -> Result<Box<dyn PeerServing>, ServeError>;

    /// An asking end.
    fn channel(&self, token: Option<Arc<Token>>) -> Arc<dyn PeerChannel>;
}
