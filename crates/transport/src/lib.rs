//! Peer-to-peer bytes over TCP, the proof of the job token, and encrypted connections.
//!
//! A daemon lends byte ranges of its cache files ([`ByteSource`], [`PeerServer`]) and fetches
//! ranges from other daemons ([`PeerPool`]). Which bytes to ask whom for, and what they mean, is
//! decided elsewhere; nothing here knows FUSE or the metadata service.

pub mod admin;
pub mod auth;
mod copies;
pub mod gate;
mod handshake;
mod link;
pub mod neighbour;
mod peer;
mod pool;
mod reply;
pub mod secure;
mod server;
pub mod side_door;
mod source;
mod split;
mod stats;
mod sys;
mod tcp;
pub mod wire;

pub use auth::{Token, TokenError};
pub use copies::{CopyError, CopyLink};
pub use handshake::begins_as_peer;
pub use peer::{
    BoxFuture, PeerReader, PeerServing, PeerTransport, READ_BYTES_MAX, ReadError, ReadRequest,
};
pub use pool::{PeerPool, PoolOptions};
pub use secure::Secure;
pub use server::{PeerServer, ServeError, ServeOptions};
pub use source::{ByteSource, CopySet, Hold, Lent, SourceError, Subject};
pub use stats::{PoolStats, ServerStats};
pub use tcp::Tcp;
pub use wire::SeatWork;
