//! The lending end over TCP: takes connections, checks who is there, answers requests in order.
//!
//! * Bounds: connections, strangers among them, the time of a handshake, the time a connection
//!   may be idle, and the time a peer may take nothing or leave bytes that it was sent
//!   unconfirmed. What breaks a bound or the protocol is closed; other connections notice nothing.
//! * Without a token only processes of this user (and root) on this machine are served; with one,
//!   what comes from elsewhere is encrypted ([`crate::secure`]).
//! * Stopping aborts every connection; a peer in the middle of a read sees it break.

use crate::auth::Token;
use crate::gate::Gate;
use crate::handshake::{self, HandshakeError};
use crate::neighbour;
use crate::peer::PeerServing;
use crate::rdma::Fabric;
use crate::reply::{Asked, Sender};
use crate::secure::{Arrival, Channel, Purpose, Secure, Whose};
use crate::source::{ByteSource, Hold};
use crate::stats::{ServerCells, ServerStats, add, sub};
use crate::wire::{self, FrameError, RANGE_LEN, RANGES_MAX, REQUEST_LEN, Request, Status};
use crate::work;
use bytes::{Buf, BufMut, BytesMut};
use ebb_types::Errno;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

/// Room for the longest request, and for many short ones that were sent together.
const BUFFER_BYTES: usize = 2 * (REQUEST_LEN + RANGES_MAX * RANGE_LEN);

/// Unconfirmed replies of one connection for which the source is held; the next ones are copied.
/// As many as a read of the largest size has parts.
const HOLDS_MAX: usize = 64;

/// Connections that are told politely that there is no room, at a time; more are just closed.
const TURNED_AWAY_MAX: usize = 16;

/// Connections beside the strangers that may still be on their way out.
const SHUT_OUT_MAX: usize = 64;

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// Open connections at most. A node of a large job has four of every other node that reads
    /// from it; beyond this they are turned away, so that files keep their share of descriptors.
    pub connections_max: usize,
    /// Connections that have not proven themselves yet; beyond this the oldest is closed.
    pub strangers_max: usize,
    /// Until a new connection must have proven itself.
    pub handshake_timeout: Duration,
    /// How long a connection may stay without a request.
    pub idle_timeout: Duration,
    /// How long a peer may take nothing, send half a request, or leave bytes unconfirmed. Longer
    /// than the deadline of a read, so that what is lent is kept until nobody waits for it.
    pub stall_timeout: Duration,
    /// Which connections are encrypted.
    pub secure: Secure,
}

impl Default for ServeOptions {
    fn default() -> ServeOptions {
        ServeOptions {
            connections_max: 4096,
            strangers_max: 256,
            handshake_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(300),
            stall_timeout: Duration::from_secs(60),
            secure: Secure::default(),
        }
    }
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Everybody who can reach the address could read every file.
    #[error("{0}: without a job token (--token-file) only a loopback address is served")]
    NeedsToken(SocketAddr),
    /// The listener is unusable.
    #[error("peer listener: {0}")]
    Io(#[from] io::Error),
}

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub struct PeerServer {
    address: SocketAddr,
    cells: Arc<ServerCells>,
    task: AbortHandle,
}

impl PeerServer {
    /// Lends the bytes of `source` to whoever connects to `listener` and holds the token; must be
    /// called on a runtime, which then does the work.
    pub fn serve(
        listener: TcpListener,
        source: Arc<dyn ByteSource>,
        token: Option<Arc<Token>>,
        options: ServeOptions,
    ) -> Result<PeerServer, ServeError> {
        PeerServer::serve_over(listener, source, token, options, None)
    }

    /// The same, and over RDMA for whoever asks.
    pub fn serve_over(
        listener: TcpListener,
        source: Arc<dyn ByteSource>,
        token: Option<Arc<Token>>,
        options: ServeOptions,
        fabric: Option<Arc<Fabric>>,
    ) -> Result<PeerServer, ServeError> {
        let address = listener.local_addr()?;
        if token.is_none() && !address.ip().is_loopback() {
            return Err(ServeError::NeedsToken(address));
        }
        let cells = Arc::new(ServerCells::default());
        let gate = Gate::new(options.strangers_max);
        let shared =
            Arc::new(Shared { source, token, options, gate, fabric, cells: cells.clone() });
        let task = tokio::spawn(accept_all(listener, shared)).abort_handle();
        Ok(PeerServer { address, cells, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it did so far.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.cells.snapshot()
    }

    /// No new connections; the open ones are closed.
    pub fn stop(&self) {
        self.task.abort();
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl PeerServing for PeerServer {
    fn address(&self) -> String {
        self.address.to_string()
    }

    fn stats(&self) -> ServerStats {
        PeerServer::stats(self)
    }

    fn stop(&self) {
        PeerServer::stop(self);
    }
}

struct Shared {
    source: Arc<dyn ByteSource>,
    token: Option<Arc<Token>>,
    options: ServeOptions,
    gate: Arc<Gate>,
    fabric: Option<Arc<Fabric>>,
    cells: Arc<ServerCells>,
}

async fn accept_all(listener: TcpListener, shared: Arc<Shared>) {
    let room = Arc::new(Semaphore::new(shared.options.connections_max));
    let turned_away = Arc::new(Semaphore::new(TURNED_AWAY_MAX));
    // Who was shut out has a descriptor until its task has run: accepting must not run ahead of that.
    let greeted = Arc::new(Semaphore::new(shared.options.strangers_max.max(1) + SHUT_OUT_MAX));
    // Ends with this task, and all connections with it.
    let mut connections = JoinSet::new();
    loop {
        // Never closed.
        let Ok(greeting) = greeted.clone().acquire_owned().await else { return };
        let accepted = loop {
            tokio::select! {
                accepted = listener.accept() => break accepted,
                Some(_) = connections.join_next() => {}
            }
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                // Out of descriptors, or the connection is gone already.
                tracing::warn!(error = %e, "cannot accept a peer");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        if room.available_permits() > 0 {
            let (shared, room) = (shared.clone(), room.clone());
            connections.spawn(async move {
                serve_connection(stream, from, &shared, &room, greeting).await;
            });
            continue;
        }
        add(&shared.cells.refused, 1);
        tracing::warn!(%from, "no room for another peer connection");
        if let Ok(permit) = turned_away.clone().try_acquire_owned() {
            let (patience, shared) = (shared.options.handshake_timeout, shared.clone());
            connections.spawn(async move {
                let _permit = permit;
                let told = async {
                    let (stream, _) = arrive(stream, from, &shared).await?;
                    handshake::turn_away(&stream).await
                };
                // Whether the peer hears it is its own concern.
                let _ = timeout(patience, told).await;
            });
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    from: SocketAddr,
    shared: &Shared,
    room: &Arc<Semaphore>,
    greeting: OwnedSemaphorePermit,
) {
    let greeted = greet(stream, from, shared).await;
    drop(greeting);
    // Only who has proven itself takes a place from others.
    let placed = greeted.and_then(|stream| match room.clone().try_acquire_owned() {
        Ok(place) => Ok((stream, place)),
        Err(_) => Err("no room for another connection".to_owned()),
    });
    let (stream, _place) = match placed {
        Ok(placed) => placed,
        Err(why) => {
            add(&shared.cells.refused, 1);
            tracing::debug!(%from, why, "peer connection refused");
            return;
        }
    };
    let _counted = Counted::new(&shared.cells);
    let mut connection = Connection {
        stream: &stream,
        shared,
        buffer: BytesMut::with_capacity(BUFFER_BYTES),
        sender: Sender::new(shared.options.stall_timeout),
        holds: VecDeque::new(),
    };
    if let Err(e) = connection.run().await {
        tracing::debug!(%from, error = %e, "peer connection closed");
    }
}

/// Until the peer has proven itself, or is refused, late, or shut out by newer ones.
async fn greet(stream: TcpStream, from: SocketAddr, shared: &Shared) -> Result<Channel, String> {
    let (_stranger, shut_out) = shared.gate.enter();
    let greeted = async {
        let (stream, may_be_plain) = arrive(stream, from, shared).await?;
        match may_be_plain {
            true => handshake::greet_client(&stream, shared.token.as_deref()).await?,
            false => handshake::ask_to_encrypt(&stream).await?,
        }
        Ok::<_, HandshakeError>(stream)
    };
    tokio::select! {
        greeted = timeout(shared.options.handshake_timeout, greeted) => match greeted {
            Ok(greeted) => greeted.map_err(|e| e.to_string()),
            Err(_) => Err("no handshake in time".to_owned()),
        },
        () = shut_out.wait() => Err("too many connections that prove nothing".to_owned()),
    }
}

/// Until it is known how the peer speaks: false when it does not encrypt although it should.
async fn arrive(
    stream: TcpStream,
    from: SocketAddr,
    shared: &Shared,
) -> Result<(Channel, bool), HandshakeError> {
    stream.set_nodelay(true)?;
    let is_ours = neighbour::is_ours(from, stream.local_addr()?);
    if shared.token.is_none() && !is_ours {
        return Err(HandshakeError::Refused("is another user's, and there is no job token"));
    }
    let whose = if is_ours { Whose::Ours } else { Whose::Anybodys };
    let (secure, token) = (shared.options.secure, shared.token.clone());
    let arrival = Arrival::new(stream, whose, secure, token, Purpose::Peer);
    let spoken = arrival.spoken();
    let channel = arrival.open().await?;
    Ok((channel, !spoken.must_encrypt()))
}

/// Counts a connection while it is open.
struct Counted<'a>(&'a ServerCells);

impl Counted<'_> {
    fn new(cells: &ServerCells) -> Counted<'_> {
        add(&cells.connections, 1);
        Counted(cells)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        sub(&self.0.connections, 1);
    }
}

struct Connection<'a> {
    stream: &'a Channel,
    shared: &'a Shared,
    buffer: BytesMut,
    sender: Sender,
    /// What must stay in place until the peer confirms the reply with this id, oldest first.
    holds: VecDeque<(u64, Hold)>,
}

impl Connection<'_> {
    /// Until the peer hangs up (Ok) or the connection is no longer of use.
    async fn run(&mut self) -> io::Result<()> {
        loop {
            match wire::take_request(&self.buffer) {
                Ok(Some((request, len))) => {
                    self.buffer.advance(len);
                    self.handle(request).await?;
                }
                Ok(None) if self.fill().await? => {}
                Ok(None) => return Ok(()),
                Err(e) => return self.reject(e).await,
            }
        }
    }

    async fn handle(&mut self, request: Request) -> io::Result<()> {
        match request {
            Request::Received { id } => match self.holds.front() {
                Some((first, _)) if *first == id => {
                    self.holds.pop_front();
                    Ok(())
                }
                _ => self.reject(FrameError::Bound("confirmation")).await,
            },
            Request::Order(order) => {
                let bytes = self.payload(order.payload.total as usize).await?;
                let id = order.id;
                let status = work::carry_out(&self.shared.source, order, bytes).await;
                self.sender.acknowledge(self.stream, id, status).await
            }
            Request::Meet { id } => self.meet(id).await,
            Request::Read { landing: Some(_), .. } if self.stream.rdma().is_none() => {
                self.reject(FrameError::Undefined("request")).await
            }
            Request::Read { id, subject, ranges, total, landing } => {
                let asked = Asked { id, subject, ranges: &ranges, total, landing };
                let status = self.read(&asked).await?;
                self.count(status, total);
                Ok(())
            }
        }
    }

    /// Moves to RDMA, if this node has it; then the peer has nothing more to say here.
    async fn meet(&mut self, id: u64) -> io::Result<()> {
        let no = Status::Errno(Errno::EOPNOTSUPP);
        let Some(fabric) = &self.shared.fabric else {
            return self.sender.acknowledge(self.stream, id, no).await;
        };
        if self.stream.rdma().is_some() || !self.buffer.is_empty() || !self.holds.is_empty() {
            return self.reject(FrameError::Undefined("request")).await;
        }
        let (meeting, expected) = match fabric.invite(self.shared.token.as_deref()) {
            Ok(invited) => invited,
            Err(why) => {
                tracing::warn!(%why, "a peer is not invited over RDMA");
                return self.sender.acknowledge(self.stream, id, no).await;
            }
        };
        let mut answer = wire::encode_trailer(id, Status::Ok).to_vec();
        answer.extend_from_slice(&meeting.encode());
        self.stream.write_all(&answer).await?;
        let patience = self.shared.options.handshake_timeout;
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        let stream = timeout(patience, expected.connected()).await.map_err(late)??;
        self.stream.move_to(stream);
        Ok(())
    }

    async fn read(&mut self, asked: &Asked<'_>) -> io::Result<Status> {
        let source = &self.shared.source;
        let mut lent = match source.open_read(asked.subject, asked.ranges) {
            Ok(lent) => lent,
            Err(e) => {
                let status = Status::from(e);
                self.sender.refuse(self.stream, asked.id, status).await?;
                return Ok(status);
            }
        };
        if self.holds.len() >= HOLDS_MAX {
            lent.hold = None;
        }
        let (status, hold) = self.sender.answer(self.stream, source, asked, lent).await?;
        self.holds.extend(hold.map(|hold| (asked.id, hold)));
        Ok(status)
    }

    fn count(&self, status: Status, total: u64) {
        let cells = &self.shared.cells;
        add(&cells.requests, 1);
        match status {
            Status::Ok => add(&cells.bytes_sent, total),
            Status::NotHere => add(&cells.not_here, 1),
            Status::Errno(_) | Status::Malformed => add(&cells.errors, 1),
        }
    }

    /// Tells the peer that it is not understood; the connection ends.
    async fn reject(&self, e: FrameError) -> io::Result<()> {
        add(&self.shared.cells.errors, 1);
        self.sender.refuse(self.stream, 0, Status::Malformed).await?;
        Err(io::Error::other(e))
    }

    /// The bytes that follow a request.
    async fn payload(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut done = self.buffer.len().min(len);
        self.buffer.copy_to_slice(&mut bytes[..done]);
        while done < len {
            match self.stream.try_read(&mut bytes[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    timeout(self.shared.options.stall_timeout, self.stream.readable())
                        .await
                        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(bytes)
    }

    /// Reads more into the buffer; false when the peer has hung up.
    async fn fill(&mut self) -> io::Result<bool> {
        let options = &self.shared.options;
        let quiet = self.buffer.is_empty() && self.holds.is_empty();
        let patience = if quiet { options.idle_timeout } else { options.stall_timeout };
        self.buffer.reserve(BUFFER_BYTES - self.buffer.len());
        loop {
            let room = BUFFER_BYTES - self.buffer.len();
            match self.stream.try_read_buf(&mut (&mut self.buffer).limit(room)) {
                Ok(n) => return Ok(n > 0),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            timeout(patience, self.stream.readable())
                .await
                .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        }
    }
}
