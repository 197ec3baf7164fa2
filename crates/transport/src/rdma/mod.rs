//! The peer protocol over RDMA.
//!
//! Peers know a node by one address, where it is spoken to over TCP. Whoever has RDMA asks there whether the other
//! end has it too, and where ([`meeting`]); then both go on with the same frames over a connection of their
//! devices (`ebb_rdma::Stream`). So one decoder judges what comes, whatever carries it.
//!
//! ```text
//! over TCP         greeting, proofs of the token | meet -> meeting
//! over RDMA        request to connect (hello) -> acceptance (answer)
//! on the stream    requests, replies, orders with their bytes, all as over TCP; but
//!                  a read of many bytes has a landing: the reader registers its buffer, the owner writes
//!                  the bytes into it and then sends head and trailer
//! ```
//!
//! | what happens | what is done |
//! |---|---|
//! | the other end has no RDMA | the connection goes on over TCP, and is asked again in [`AGAIN`] |
//! | the ends do not meet in time | a new connection over TCP, without asking until [`AGAIN`] |
//! | a connection over RDMA breaks | its landings end with it; reads are asked again, plainly, on another one; what peers should do is not done twice |
//! | no memory can be registered | the bytes come through the stream |
//! | a read is given up | its landing stays until the owner has answered or the connection is closed |
//! | the device goes | TCP from there on |
//!
//! All of it is visible: [`Fabric::report`] says which peer is reached how, and why not over RDMA.
//!
//! Nothing is encrypted: see `Secure` for who may use it, which is decided where the node's options are known.

pub(crate) mod meeting;
mod place;
pub(crate) mod read;

use crate::auth::Token;
use crate::handshake::HandshakeError;
use crate::peer::{PeerChannel, PeerServing, PeerTransport};
use crate::pool::PeerPool;
use crate::secure::Channel;
use crate::server::{PeerServer, ServeError};
use crate::source::ByteSource;
use crate::tcp::Tcp;
use crate::wire::{self, Status, TRAILER_LEN};
use ebb_locks::Mutex;
use ebb_rdma::{Endpoint, Expected, Landing, Options, Stats, Stream};
use meeting::{MEETING_LEN, Meeting};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::time::timeout;

/// Until a peer that was not reached over RDMA is asked again.
pub const AGAIN: Duration = Duration::from_secs(30);

/// Until two ends that both have RDMA must have met; less than the time to connect to a peer at all.
const MEET_WITHIN: Duration = Duration::from_millis(2500);

/// RDMA at this node: its device, and how its peers are reached.
pub struct Fabric {
    endpoint: Endpoint,
    peers: Mutex<BTreeMap<Arc<str>, Reached>>,
    moved: AtomicU64,
    fell_back: AtomicU64,
    placed: AtomicU64,
}

/// How a peer was reached last.
#[derive(Clone, Debug)]
enum Reached {
    OverRdma,
    OverTcp { why: Arc<str>, since: Instant },
}

/// What RDMA did so far at a node, and which peer is reached how.
#[derive(Clone, Debug)]
pub struct RdmaReport {
    /// Where connections are taken.
    pub address: SocketAddr,
    /// Why it does not work any more.
    pub failed: Option<String>,
    /// Of the device.
    pub stats: Stats,
    /// Connections to peers that moved to RDMA.
    pub moved: u64,
    /// Connections to peers that stayed on TCP, or went back there.
    pub fell_back: u64,
    /// Bytes that owners wrote into buffers here.
    pub placed_bytes: u64,
    /// By address of the peer: none where it is reached over RDMA, or why it is not.
    pub peers: BTreeMap<String, Option<String>>,
}

impl Fabric {
    /// Opens the device; must be called on a runtime, which then does the work.
    pub fn open(options: Options) -> io::Result<Fabric> {
        Ok(Fabric {
            endpoint: Endpoint::open(options)?,
            peers: Mutex::default(),
            moved: AtomicU64::new(0),
            fell_back: AtomicU64::new(0),
            placed: AtomicU64::new(0),
        })
    }

    /// What it did so far.
    #[must_use]
    pub fn report(&self) -> RdmaReport {
        let why = |reached: &Reached| match reached {
            Reached::OverRdma => None,
            Reached::OverTcp { why, .. } => Some(why.to_string()),
        };
        let peers = self.peers.lock();
        RdmaReport {
            address: self.endpoint.address(),
            failed: self.endpoint.failed(),
            stats: self.endpoint.stats(),
            moved: self.moved.load(Relaxed),
            fell_back: self.fell_back.load(Relaxed),
            placed_bytes: self.placed.load(Relaxed),
            peers: peers.iter().map(|(peer, how)| (peer.to_string(), why(how))).collect(),
        }
    }

    /// Whether the peer at `address` is to be asked.
    pub(crate) fn may_ask(&self, address: &str) -> bool {
        let late = |since: &Instant| since.elapsed() >= AGAIN;
        self.endpoint.failed().is_none()
            && match self.peers.lock().get(address) {
                Some(Reached::OverTcp { since, .. }) => late(since),
                _ => true,
            }
    }

    fn note(&self, address: &str, reached: Reached) {
        match &reached {
            Reached::OverRdma => self.moved.fetch_add(1, Relaxed),
            Reached::OverTcp { .. } => self.fell_back.fetch_add(1, Relaxed),
        };
        self.peers.lock().insert(address.into(), reached);
    }

    /// Moves a connection over TCP, whose ends know each other, to RDMA, if the other end has it. After an error the
    /// connection is of no use any more.
    pub(crate) async fn move_over(
        &self,
        address: &str,
        channel: &Channel,
        token: Option<&Token>,
    ) -> Result<(), HandshakeError> {
        let met = timeout(MEET_WITHIN, self.meet(channel, token)).await;
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "is not reached over RDMA in time");
        match met.map_err(late).and_then(|met| met) {
            Ok(Some(stream)) => {
                channel.move_to(stream);
                self.note(address, Reached::OverRdma);
                Ok(())
            }
            Ok(None) => {
                self.note_tcp(address, "has no RDMA");
                Ok(())
            }
            Err(e) => {
                tracing::warn!(peer = address, why = %e, "this peer is spoken to over TCP");
                self.note_tcp(address, &e.to_string());
                Err(HandshakeError::Io(e))
            }
        }
    }

    fn note_tcp(&self, address: &str, why: &str) {
        self.note(address, Reached::OverTcp { why: why.into(), since: Instant::now() });
    }

    async fn meet(&self, channel: &Channel, token: Option<&Token>) -> io::Result<Option<Stream>> {
        let mut question = Vec::new();
        wire::put_meet(&mut question, 0);
        channel.write_all(&question).await?;
        let mut trailer = [0; TRAILER_LEN];
        channel.read_exact(&mut trailer).await?;
        match wire::decode_trailer(&trailer, 0).map_err(io::Error::other)? {
            Status::Ok => {}
            _ => return Ok(None),
        }
        let mut meeting = [0; MEETING_LEN];
        channel.read_exact(&mut meeting).await?;
        let meeting = Meeting::decode(&meeting).ok_or_else(|| io::Error::other("says nonsense"))?;
        let hello = meeting.hello(token);
        let (stream, answer) = self.endpoint.connect(meeting.address, &hello).await?;
        if !meeting.is_answer(token, &answer) {
            return Err(io::Error::other("somebody else answers over RDMA"));
        }
        Ok(Some(stream))
    }

    /// The server's end: where to meet, and who is expected there.
    pub(crate) fn invite(&self, token: Option<&Token>) -> io::Result<(Meeting, Expected)> {
        if let Some(why) = self.endpoint.failed() {
            return Err(io::Error::other(why));
        }
        let meeting = Meeting::new(self.endpoint.address());
        let expected = self.endpoint.expect(meeting.hello(token), meeting.answer(token))?;
        Ok((meeting, expected))
    }

    pub(crate) fn land(&self, buffer: bytes::BytesMut) -> io::Result<Landing> {
        self.endpoint.land(buffer)
    }

    pub(crate) fn count_placed(&self, bytes: u64) {
        self.placed.fetch_add(bytes, Relaxed);
    }
}

/// RDMA where both ends have it, TCP elsewhere.
#[derive(Clone)]
pub struct Rdma {
    /// How nodes meet, and what goes on without RDMA.
    pub tcp: Tcp,
    /// This node's device.
    pub fabric: Arc<Fabric>,
}

impl PeerTransport for Rdma {
    fn serve(
        &self,
        listener: TcpListener,
        source: Arc<dyn ByteSource>,
        token: Option<Arc<Token>>,
    ) -> Result<Box<dyn PeerServing>, ServeError> {
        let fabric = Some(Arc::clone(&self.fabric));
        let server = PeerServer::serve_over(listener, source, token, self.tcp.serve, fabric)?;
        Ok(Box::new(server))
    }

    fn channel(&self, token: Option<Arc<Token>>) -> Arc<dyn PeerChannel> {
        Arc::new(PeerPool::over(token, self.tcp.pool, Some(Arc::clone(&self.fabric))))
    }
}
