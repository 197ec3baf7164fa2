//! Peer-to-peer bytes over TCP and RDMA, the proof of the job token, and encrypted connections.
//!
//! A daemon lends byte ranges of its cache files ([`ByteSource`], [`PeerServing`]) and asks other daemons for
//! ranges, to keep copies and to write ([`PeerChannel`]). How bytes travel is one [`PeerTransport`], of which the
//! daemon knows nothing else. Which bytes to ask whom for, and what they mean, is
//! decided elsewhere; nothing here knows FUSE or the metadata service.

pub mod admin;
pub mod auth;
mod dial;
pub mod gate;
mod handshake;
mod lines;
mod link;
mod links;
pub mod neighbour;
mod peer;
mod pool;
pub mod rdma;
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
mod work;

pub use auth::{Token, TokenError};
pub use handshake::begins_as_peer;
pub use links::{CopyLink, SeatLink};
pub use peer::{
    BoxFuture, PeerChannel, PeerServing, PeerTransport, READ_BYTES_MAX, ReadBytes, ReadError,
    ReadRequest, WorkError, WorkRequest,
};
pub use pool::{PeerPool, PoolOptions};
pub use rdma::{Fabric, Rdma, RdmaReport};
pub use secure::Secure;
pub use server::{PeerServer, ServeError, ServeOptions};
pub use source::{ByteSource, CopySet, Hold, Lent, SeatWork, SourceError, Subject, Work};
pub use stats::{PoolStats, ServerStats};
pub use tcp::Tcp;
