//! Connections over RDMA: streams of bytes between processes, and bytes that the other end writes
//! into place without anybody's processor copying them there.
//!
//! ```text
//! Endpoint    a device at one of its addresses: its domain, its memory, its event loops, a place where
//!             connections are taken (by the RDMA connection manager)
//! Stream      a connection: bytes in order both ways, with back pressure; used as a socket is
//! Landing     a buffer into which the other end may write, until it is taken back
//! Staged      a piece of registered memory from which bytes go to a landing of the other end
//! ```
//!
//! * *Who is let in*: nobody but who says exactly the bytes that were [expected](Endpoint::expect). They are good
//!   once. What they prove is the caller's matter.
//! * *Streams* go as messages of at most [`flow::MESSAGE_BYTES`] into a receive queue that all connections share. What
//!   arrives is copied out at once, so the queue never stands still for a connection that nobody reads; each
//!   sender may be only so many messages ahead of the reader ([`flow`]).
//! * *Order*: what was written to a landing is there before what is sent on the stream afterwards.
//! * *Bounds*: connections, memory of each and in all, bytes that are landings at a time. What is beyond is an
//!   error, never more memory.
//! * *Waiting*: nobody polls. A descriptor tells the runtime when there is something.
//! * *What the other end can reach*: landings of this process while they are, and nothing else. Keys are 32 bits,
//!   and hold for all connections: they protect from mistakes, not from an end that was let in and guesses.
//!
//! Nothing here knows files, requests or who the other end is. Without the feature `verbs` the types are
//! there and no endpoint can be opened, so that those who use them need no second form of themselves.

pub mod flow;

#[cfg(feature = "verbs")]
mod endpoint;
#[cfg(all(test, feature = "verbs"))]
mod hostile_tests;
#[cfg(feature = "verbs")]
mod lane;
#[cfg(feature = "verbs")]
mod stream;
#[cfg(feature = "verbs")]
mod verbs;

#[cfg(feature = "verbs")]
pub use endpoint::{Endpoint, Expected};
#[cfg(feature = "verbs")]
pub use stream::{Landing, Staged, Stream};

#[cfg(not(feature = "verbs"))]
mod absent;
#[cfg(not(feature = "verbs"))]
pub use absent::{Endpoint, Expected, Landing, Staged, Stream};

pub mod local;

use std::net::IpAddr;
use std::time::Duration;

/// Bytes by which a connection is told from others: what [`Endpoint::expect`] expects.
pub const HELLO_BYTES: usize = 40;
/// The number with which a hello begins.
pub const NUMBER_BYTES: usize = 8;
/// Bytes of the answer to a hello.
pub const ANSWER_BYTES: usize = 32;
/// Bytes of a [`Staged`].
pub const STAGED_BYTES: usize = 256 << 10;

/// Whether endpoints can be opened at all.
pub const IS_BUILT_IN: bool = cfg!(feature = "verbs");
/// Why they cannot, if not.
pub const NOT_BUILT_IN: &str =
    "this ebb was built without RDMA (`make build-rdma` builds one with it)";

/// What whoever connects says: a number that was given to it, and proof.
pub type Hello = [u8; HELLO_BYTES];
/// What it is answered.
pub type Answer = [u8; ANSWER_BYTES];

/// A place in the memory of the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where.
    pub address: u64,
    /// The key of the landing.
    pub key: u32,
}

/// How an endpoint is opened.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// An address of the RDMA device.
    pub address: IpAddr,
    /// Event loops.
    pub lanes: usize,
    /// Connections at most.
    pub connections_max: usize,
    /// Bytes that are landings at a time, at most.
    pub landing_bytes_max: u64,
    /// Until each step of connecting must be done.
    pub patience: Duration,
}

impl Options {
    /// The usual ones.
    #[must_use]
    pub fn at(address: IpAddr) -> Options {
        Options {
            address,
            lanes: 2,
            connections_max: 1024,
            landing_bytes_max: 256 << 20,
            patience: Duration::from_secs(3),
        }
    }
}

/// What an endpoint did so far, and has now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Connections that are open now.
    pub connections: u64,
    /// Requests to connect that said nothing that was expected.
    pub refused: u64,
    /// Connections that ended with an error.
    pub broken: u64,
    /// Bytes that the other ends may write into now.
    pub landing_bytes: u64,
    /// Bytes of memory that are registered now, landings included.
    pub registered_bytes: u64,
    /// Bytes that were written into landings of other ends.
    pub written_bytes: u64,
}
