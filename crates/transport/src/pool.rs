//! The asking end: a few connections to every peer, made when they are needed, shared
//! by all reads; others for work ([`crate::lines`]). Reads are idempotent, so a part that was lost with its connection is asked for
//! once more on another one; everything ends by the deadline of its read.

use crate::auth::Token;
use crate::dial::Dialer;
use crate::handshake::HandshakeError;
use crate::lines::Lines;
use crate::link::{Link, Outcome, Target};
use crate::peer::{BoxFuture, PeerChannel, ReadError, ReadRequest, WorkError, WorkRequest};
use crate::rdma::read::Attempt;
use crate::rdma::{Fabric, RdmaReport};
use crate::secure::{Secure, SecureError, SecureStats};
use crate::source::{Subject, Work};
use crate::split::{PART_BYTES, Part, split};
use crate::stats::{PoolCells, PoolStats, add};
use crate::wire::Status;
use bytes::{Bytes, BytesMut};
use ebb_locks::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Connections that may close between being chosen and being used before a read gives up.
const LAUNCHES_MAX: usize = 4;

/// How a pool treats its peers.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// Connections to each peer at most.
    pub connections_per_peer: usize,
    /// Until a connection with its handshake must have come about.
    pub connect_timeout: Duration,
    /// Until a read must have ended. Servers keep what they lend for longer than this.
    pub read_timeout: Duration,
    /// Which connections are encrypted.
    pub secure: Secure,
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions {
            connections_per_peer: 4,
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(30),
            secure: Secure::default(),
        }
    }
}

/// Connections to peers, by address.
pub struct PeerPool {
    dialer: Dialer,
    options: PoolOptions,
    peers: Mutex<HashMap<Arc<str>, Arc<Peer>>>,
    pub(crate) cells: PoolCells,
}

pub(crate) struct Peer {
    address: Arc<str>,
    slots: Box<[Slot]>,
    /// For copies.
    copies: Lines,
    /// For files that sit there. Not those for copies: what is to be done there may wait for a copy of this node.
    seats: Lines,
}

/// A place for one connection.
#[derive(Default)]
struct Slot {
    link: Mutex<Option<Arc<Link>>>,
    /// Whoever connects holds it, so that a burst of reads does not make a burst of connections.
    turn: tokio::sync::Mutex<()>,
}

impl Slot {
    fn open_link(&self) -> Option<Arc<Link>> {
        self.link.lock().clone().filter(|link| link.is_open())
    }
}

/// A part that was asked for.
pub(crate) struct Flight {
    pub part: Part,
    pub link: Arc<Link>,
    pub arrived_before: u64,
    pub outcome: oneshot::Receiver<Outcome>,
}

impl PeerPool {
    /// A pool without connections.
    #[must_use]
    pub fn new(token: Option<Arc<Token>>, options: PoolOptions) -> PeerPool {
        PeerPool::over(token, options, None)
    }

    /// The same, over RDMA where the peers have it too.
    #[must_use]
    pub fn over(
        token: Option<Arc<Token>>,
        options: PoolOptions,
        fabric: Option<Arc<Fabric>>,
    ) -> PeerPool {
        let dialer = Dialer { token, secure: options.secure, fabric };
        PeerPool { dialer, options, peers: Mutex::default(), cells: PoolCells::default() }
    }

    /// All bytes of `request` from the peer at `address` (HOST:PORT), one range after the other.
    pub async fn read(&self, address: &str, request: &ReadRequest) -> Result<Bytes, ReadError> {
        self.read_into(address, request, BytesMut::new()).await.map(BytesMut::freeze)
    }

    /// The same into `buffer`, whose content is replaced: reusing one saves the page faults of
    /// fresh memory. It is lost on an error.
    pub async fn read_into(
        &self,
        address: &str,
        request: &ReadRequest,
        mut buffer: BytesMut,
    ) -> Result<BytesMut, ReadError> {
        add(&self.cells.reads, 1);
        let total = request.total().ok_or(ReadError::Oversized)?;
        if total == 0 {
            buffer.clear();
            return Ok(buffer);
        }
        let parts = split(&request.ranges, PART_BYTES);
        let mut flights = Vec::with_capacity(parts.len());
        let flown = self.fetch(address, request.subject(), parts, buffer, &mut flights);
        let result = match timeout(self.options.read_timeout, flown).await {
            Ok(result) => result,
            Err(_) => {
                close_stuck(&flights);
                Err(ReadError::TimedOut)
            }
        };
        match &result {
            Ok(_) => add(&self.cells.bytes_received, total),
            Err(ReadError::NotHere) => {}
            Err(_) => add(&self.cells.errors, 1),
        }
        result
    }

    /// What it did so far.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.cells.snapshot()
    }

    async fn fetch(
        &self,
        address: &str,
        subject: Subject,
        parts: Vec<Part>,
        mut buffer: BytesMut,
        flights: &mut Vec<Flight>,
    ) -> Result<BytesMut, ReadError> {
        let peer = self.peer(address);
        if let Some(fabric) = &self.dialer.fabric {
            match self.fly_placed(fabric, &peer, subject, &parts, buffer, flights).await {
                Attempt::Done(result) => return result,
                Attempt::NotSo(back) => buffer = back,
            }
            flights.clear();
        }
        self.fly(&peer, subject, parts, buffer, flights).await
    }

    /// Sends every part, then collects them in order.
    async fn fly(
        &self,
        peer: &Peer,
        subject: Subject,
        parts: Vec<Part>,
        mut rest: BytesMut,
        flights: &mut Vec<Flight>,
    ) -> Result<BytesMut, ReadError> {
        rest.clear();
        rest.reserve(parts.iter().map(|part| part.len).sum());
        for part in parts {
            // The parts share one allocation, so that they are one again when all are filled.
            let following = rest.split_off(part.len);
            flights.push(self.launch(peer, subject, part, rest).await?);
            rest = following;
        }
        let mut whole = BytesMut::new();
        for flight in flights {
            whole.unsplit(self.land(peer, subject, flight).await?);
        }
        Ok(whole)
    }

    async fn launch(
        &self,
        peer: &Peer,
        subject: Subject,
        part: Part,
        mut into: BytesMut,
    ) -> Result<Flight, ReadError> {
        for _ in 0..LAUNCHES_MAX {
            let link = self.link(peer).await?;
            let arrived_before = link.arrived();
            match link.submit(subject, &part.ranges, part.len, Target::Buffer(into)) {
                Ok(outcome) => return Ok(Flight { part, link, arrived_before, outcome }),
                Err(Target::Buffer(back)) => into = back,
                Err(Target::Landing(..)) => break,
            }
        }
        Err(ReadError::Unreachable(format!("{}: hangs up after every greeting", peer.address)))
    }

    async fn land(
        &self,
        peer: &Peer,
        subject: Subject,
        flight: &mut Flight,
    ) -> Result<BytesMut, ReadError> {
        if let Ok(result) = outcome_of(flight).await {
            return result;
        }
        add(&self.cells.retries, 1);
        let part = flight.part.clone();
        let buffer = BytesMut::with_capacity(part.len);
        *flight = self.launch(peer, subject, part, buffer).await?;
        match outcome_of(flight).await {
            Ok(result) => result,
            Err(reason) => Err(ReadError::Unreachable(format!("{}: {reason}", peer.address))),
        }
    }

    fn peer(&self, address: &str) -> Arc<Peer> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(address) {
            return peer.clone();
        }
        let address: Arc<str> = address.into();
        let slots = (0..self.options.connections_per_peer.max(1)).map(|_| Slot::default());
        let lines = || Lines::new(address.clone(), self.dialer.clone(), self.options.read_timeout);
        let peer = Arc::new(Peer {
            slots: slots.collect(),
            copies: lines(),
            seats: lines(),
            address: address.clone(),
        });
        peers.insert(address, peer.clone());
        peer
    }

    /// An idle connection, else a new one while there is room, else the least busy one.
    pub(crate) async fn link(&self, peer: &Peer) -> Result<Arc<Link>, ReadError> {
        let mut best: Option<Arc<Link>> = None;
        let mut empty = None;
        for slot in &peer.slots {
            match slot.open_link() {
                Some(link) if link.load() == 0 => return Ok(link),
                Some(link) if best.as_ref().is_none_or(|b| link.load() < b.load()) => {
                    best = Some(link);
                }
                Some(_) => {}
                None if empty.is_none() && slot.turn.try_lock().is_ok() => empty = Some(slot),
                None => {}
            }
        }
        match (empty, best) {
            (None, Some(link)) => Ok(link),
            (Some(slot), Some(link)) => Ok(self.connect(peer, slot).await.unwrap_or(link)),
            (empty, None) => self.connect(peer, empty.unwrap_or(&peer.slots[0])).await,
        }
    }

    async fn connect(&self, peer: &Peer, slot: &Slot) -> Result<Arc<Link>, ReadError> {
        let _turn = slot.turn.lock().await;
        if let Some(link) = slot.open_link() {
            return Ok(link);
        }
        let unreachable =
            |e: &dyn std::fmt::Display| ReadError::Unreachable(format!("{}: {e}", peer.address));
        let greeted = timeout(self.options.connect_timeout, self.dialer.dial(&peer.address));
        let stream = match greeted.await {
            Ok(Ok(stream)) => stream,
            Ok(Err(HandshakeError::Refused(why))) => {
                return Err(ReadError::Refused(format!("{}: {why}", peer.address)));
            }
            // What is altered on the way now may not be later.
            Ok(Err(HandshakeError::Insecure(why))) if !matches!(why, SecureError::Broken(_)) => {
                return Err(ReadError::Refused(format!("{}: {why}", peer.address)));
            }
            Ok(Err(e)) => return Err(unreachable(&e)),
            Err(_) => return Err(unreachable(&"no connection in time")),
        };
        add(&self.cells.connects, 1);
        let link = Arc::new(Link::new(stream));
        *slot.link.lock() = Some(link.clone());
        Ok(link)
    }
}

/// Waits for a part: what the read is told, or why the connection broke.
async fn outcome_of(flight: &mut Flight) -> Result<Result<BytesMut, ReadError>, Arc<str>> {
    match (&mut flight.outcome).await {
        Ok(Outcome::Good(bytes)) => Ok(Ok(bytes)),
        Ok(Outcome::Answered(status)) => Ok(Err(error_of(status))),
        Ok(Outcome::Broken(reason)) => Err(reason),
        Ok(Outcome::Placed) => Err("the bytes went elsewhere".into()),
        Err(_) => Err("the connection was closed".into()),
    }
}

/// What a read is told when the owner answers without bytes.
pub(crate) fn error_of(status: Status) -> ReadError {
    match status {
        Status::Errno(errno) => ReadError::Errno(errno),
        _ => ReadError::NotHere,
    }
}

/// After a read timed out: its connections that brought nothing at all meanwhile are given up,
/// those that are merely slow go on serving others.
fn close_stuck(flights: &[Flight]) {
    for flight in flights {
        if flight.link.load() > 0 && flight.link.arrived() == flight.arrived_before {
            flight.link.close("the peer does not answer");
        }
    }
}

impl PeerChannel for PeerPool {
    fn read_into<'a>(
        &'a self,
        address: &'a str,
        request: &'a ReadRequest,
        buffer: BytesMut,
    ) -> BoxFuture<'a, Result<BytesMut, ReadError>> {
        Box::pin(PeerPool::read_into(self, address, request, buffer))
    }

    fn work<'a>(
        &'a self,
        address: &'a str,
        request: WorkRequest<'a>,
    ) -> BoxFuture<'a, Result<(), WorkError>> {
        let peer = self.peer(address);
        Box::pin(async move {
            match request.work {
                Work::AtSeat(_) => peer.seats.work(&request).await,
                _ => peer.copies.work(&request).await,
            }
        })
    }

    fn reach<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Result<(), WorkError>> {
        let peer = self.peer(address);
        Box::pin(async move { peer.copies.reach().await })
    }

    fn secure(&self) -> Option<Secure> {
        self.dialer.token.as_ref().map(|_| self.options.secure)
    }

    fn encrypted(&self) -> SecureStats {
        self.dialer.token.as_ref().map(|token| token.encrypted()).unwrap_or_default()
    }

    fn stats(&self) -> PoolStats {
        PeerPool::stats(self)
    }

    fn rdma(&self) -> Option<RdmaReport> {
        self.dialer.fabric.as_ref().map(|fabric| fabric.report())
    }
}
