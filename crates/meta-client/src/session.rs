//! Makes one session: connects, says who this node is, proves the token in both directions and
//! waits for the welcome.

use crate::exchange::Exchange;
use crate::frames::Frames;
use crate::heard::{self, Heard, Overheard};
use crate::silence::Silence;
use ebb_locks::Mutex;
use ebb_transport::auth::{self, SessionHandshake};
use ebb_transport::secure::{self, Channel as Wire, Purpose, SecureError};
use ebb_transport::side_door::SideDoor;
use ebb_transport::{Secure, Token};
use ebb_types::{Errno, Incarnation};
use ebb_wire::pb::{self, metadata_client::MetadataClient, reply::Body, request::Op};
use hyper_util::rt::TokioIo;
use prost::Message;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};

/// Bytes that may be on their way to one side before it has taken any: the default of 64 KiB
/// would stall every large ownership map.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
/// HTTP/2 frames: fewer of them for large maps.
const HTTP_FRAME_BYTES: u32 = 256 << 10;
/// A connection on which nothing came for so long is probed ([`Silence`] says when it is given up).
const KEEP_ALIVE: Duration = Duration::from_secs(3);

/// Between two looks whether the job's first service has come.
const TERM_LOOK: Duration = Duration::from_millis(100);

/// Whom to connect to, and who is connecting.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// HOST:PORT of the metadata service, or `dir:DIR` where the newest term says it (`ebb_coordinator`).
    pub address: String,
    /// A way to it that does not go over the network, when it is in this process.
    pub side_door: Option<SideDoor>,
    /// This node's name, unique in the job.
    pub node: String,
    /// This life of its daemon.
    pub incarnation: Incarnation,
    /// Lives of its daemon that are over and whose applications go on with this one.
    pub heir_of: Vec<Incarnation>,
    /// The first id of a request; above all that those lives have used.
    pub first_request: u64,
    /// HOST:PORT where this node lends its bytes.
    pub peer_address: String,
    /// Name and rules of the consistency model; all nodes of a job must send the same.
    pub consistency: String,
    /// The job's secret, when it has one.
    pub token: Option<Arc<Token>>,
    /// Which connections are encrypted.
    pub secure: Secure,
    /// Until a call must have ended.
    pub request_timeout: Duration,
    /// Until a connection must have been welcomed.
    pub connect_timeout: Duration,
    /// Leases of at most so long; zero: none. Others' requests may have to wait for so long when
    /// this node dies, so it should be well below their deadlines.
    pub trust_max: Duration,
    /// This node's cache holds nothing of an earlier life.
    pub empty: bool,
    /// Somebody is going to be told of what the service asks for ([`crate::MetaClient::on_recall`],
    /// [`crate::MetaClient::on_publish`]): what it asks before that waits.
    pub listens: bool,
}

impl ConnectOptions {
    /// With the default deadlines (30 s for a call, 10 s for a connection) and no token.
    #[must_use]
    pub fn new(address: impl Into<String>, node: impl Into<String>) -> ConnectOptions {
        ConnectOptions {
            address: address.into(),
            side_door: None,
            node: node.into(),
            incarnation: Incarnation(0),
            heir_of: Vec::new(),
            first_request: 1,
            peer_address: String::new(),
            consistency: String::new(),
            token: None,
            secure: Secure::default(),
            request_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            trust_max: Duration::from_secs(5),
            empty: false,
            listens: false,
        }
    }
}

/// Why there is no session. Every text names the service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// Nobody is there, or answers in time, or speaks this protocol. It may work later.
    #[error("metadata service {0}")]
    Unreachable(String),
    /// Somebody answers there, and hung up before a welcome or a refusal: a service does so when more
    /// come at once than it can greet. It may work in a moment.
    #[error("metadata service {0}")]
    HungUp(String),
    /// What answers there is something else. It may work later, when a service is in its place.
    #[error("metadata service {0}")]
    Stranger(String),
    /// The address cannot be one.
    #[error("metadata service address {0}")]
    BadAddress(String),
    /// One side does not hold the other's job token.
    #[error("metadata service {0}")]
    BadToken(String),
    /// The job runs another consistency model, or other rules under the same name.
    #[error("metadata service {0}")]
    WrongConsistency(String),
    /// Another daemon of this name is alive; when it is the same one's crashed predecessor, it
    /// counts as gone after its lease.
    #[error("metadata service {0}")]
    NameTaken(String),
    /// The service does not want this node for another reason.
    #[error("metadata service {0}")]
    Refused(String),
    /// The service that answers is not the one that this node is of, or lacks what that one had on
    /// stable storage.
    #[error("metadata service {0}")]
    AnotherService(String),
    /// What says no has not shown that it is the service of this job: nothing follows from it.
    #[error("{0} (but it has not shown that it is the service of this job)")]
    Unproven(Box<ConnectError>),
}

impl ConnectError {
    /// Trying again without changing anything may help.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        use ConnectError::{HungUp, Stranger, Unreachable};
        matches!(self, Unreachable(_) | HungUp(_) | Stranger(_))
    }

    /// True when the job's own service has said so, and for good. Who only sits where it was cannot end
    /// a mount.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            ConnectError::Unreachable(_)
            | ConnectError::HungUp(_)
            | ConnectError::Stranger(_)
            | ConnectError::AnotherService(_)
            | ConnectError::Unproven(_) => false,
            ConnectError::BadAddress(_)
            | ConnectError::BadToken(_)
            | ConnectError::WrongConsistency(_)
            | ConnectError::NameTaken(_)
            | ConnectError::Refused(_) => true,
        }
    }

    /// For a node that has been in the job: what nobody has proven is not final.
    fn proven_if(self, proven: bool) -> ConnectError {
        match self {
            e if proven || !e.is_final() => e,
            e => ConnectError::Unproven(Box::new(e)),
        }
    }

    fn of_reply(address: &str, errno: i32, text: &str) -> ConnectError {
        let text = if text.is_empty() { Errno(errno).to_string() } else { text.to_owned() };
        let text = format!("{address}: {text}");
        match Errno(errno) {
            Errno::EACCES | Errno::EPERM => ConnectError::BadToken(text),
            Errno::EINVAL => ConnectError::WrongConsistency(text),
            Errno::EBUSY => ConnectError::NameTaken(text),
            Errno::EAGAIN => ConnectError::Unreachable(text),
            Errno::ESTALE => ConnectError::AnotherService(text),
            _ => ConnectError::Refused(text),
        }
    }
}

/// A session that was welcomed.
pub(crate) struct Session {
    pub number: u64,
    /// Where the service is.
    pub address: String,
    pub welcome: pb::Welcome,
    /// When this node's first word in it was sent (see [`crate::trust::now_ms`]).
    pub sent: u64,
    pub stream: Streaming<pb::ServerFrame>,
    /// What came in one frame with the welcome.
    pub early: pb::ServerFrame,
}

/// A channel to the service at `address`, connected, and encrypted where it should be. What comes
/// first over the network is `heard`.
pub(crate) async fn channel(
    address: &str,
    side_door: Option<&SideDoor>,
    token: Option<&Token>,
    secure: Secure,
    heard: &Arc<Heard>,
    silence: Silence,
) -> Result<Channel, ConnectError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| ConnectError::BadAddress(format!("'{address}': {e}")))?
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(HTTP_FRAME_BYTES)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(silence.longest())
        .keep_alive_while_idle(true);
    let connected = match side_door.cloned() {
        None => {
            let wire = secure::connect(address, Purpose::Service, token, secure).await;
            let wire = wire.map_err(|e| unconnected(address, &e))?;
            let wire = once(heard.over(wire));
            endpoint.connect_with_connector(tower::service_fn(wire)).await
        }
        Some(door) => {
            let enter = move |_| std::future::ready(door.enter().map(TokioIo::new));
            endpoint.connect_with_connector(tower::service_fn(enter)).await
        }
    };
    connected.map_err(|e| ConnectError::Unreachable(format!("{address}: {}", innermost(&e))))
}

/// Hands a connection out, once: a broken one is replaced by a new session, not below it.
fn once<T>(
    wire: Overheard<Wire>,
) -> impl FnMut(T) -> std::future::Ready<io::Result<TokioIo<Overheard<Wire>>>> {
    let wire = Mutex::new(Some(wire));
    move |_| {
        let taken = wire.lock().take().map(TokioIo::new);
        std::future::ready(taken.ok_or_else(|| io::ErrorKind::NotConnected.into()))
    }
}

fn unconnected(address: &str, e: &io::Error) -> ConnectError {
    match SecureError::in_io(e) {
        Some(SecureError::OtherToken) => {
            ConnectError::BadToken(format!("{address}: {}", SecureError::OtherToken))
        }
        Some(SecureError::PeerPort) => heard::peer_port(address),
        Some(why @ SecureError::Broken(_)) => {
            ConnectError::Unreachable(format!("{address}: {why} ({})", heard::ADVICE))
        }
        None if is_end(e.kind()) => heard::hung_up(address),
        _ => ConnectError::Unreachable(format!("{address}: {e}")),
    }
}

/// There was a connection.
fn is_end(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// A stream that ended, or was never one.
fn broken(address: &str, e: &tonic::Status) -> ConnectError {
    let text = format!("{address}: {}", e.message());
    match e.code() {
        // Somebody has said so.
        Code::PermissionDenied | Code::Unauthenticated => ConnectError::Unreachable(text),
        Code::Unimplemented => ConnectError::Stranger(format!(
            "{address}: speaks HTTP/2, but is no metadata service of Ebb: {} ({})",
            e.message(),
            heard::ADVICE
        )),
        _ => ConnectError::HungUp(text),
    }
}

/// The generated client with the message limits of the protocol.
pub(crate) fn client(channel: Channel) -> MetadataClient<Channel> {
    MetadataClient::new(channel)
        .max_decoding_message_size(ebb_wire::MESSAGE_BYTES_MAX)
        .max_encoding_message_size(ebb_wire::MESSAGE_BYTES_MAX)
}

/// Who the service was that this node has spoken to, and what it was told; all 0 at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Acquaintance {
    /// The job.
    pub job: u64,
    /// Which life of its service.
    pub told_by: u64,
    /// So many changes of the state that one had on stable storage.
    pub told: u64,
    /// This node's number.
    pub node: u32,
}

impl Acquaintance {
    /// Of whom a welcome is.
    pub fn made(welcome: &pb::Welcome) -> Acquaintance {
        let told_by = welcome.service_instance;
        Acquaintance { job: welcome.job, told_by, told: 0, node: welcome.node_id }
    }

    /// The service should know by itself; but it may be any.
    fn check(&self, welcome: &pb::Welcome) -> Result<(), String> {
        if self.job == 0 {
            return Ok(());
        }
        if welcome.job != self.job {
            return Err(format!(
                "is of another job ({:016x}, this node is of {:016x})",
                welcome.job, self.job
            ));
        }
        if welcome.node_id != self.node {
            return Err(format!(
                "calls this node n{}, and n{} before: it has an older state, or another one",
                welcome.node_id, self.node
            ));
        }
        if welcome.kept < self.told {
            return Err(format!(
                "has an older state than this node was told of: it ends at change {} of {}",
                welcome.kept, self.told
            ));
        }
        Ok(())
    }
}

/// What a node has heard of the services of its job, where a directory says that.
#[derive(Debug)]
pub(crate) struct Terms {
    /// The newest term.
    pub newest: AtomicU64,
    /// One look at a time: the directory may hang.
    looks: Arc<Semaphore>,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { newest: AtomicU64::new(0), looks: Arc::new(Semaphore::new(1)) }
    }
}

/// Where the service is now. `None`: where that is said nobody has said so yet.
pub(crate) async fn whereabouts(text: &str, terms: &Terms) -> Result<Option<String>, ConnectError> {
    let Some(dir) = ebb_coordinator::directory_of(text) else { return Ok(Some(text.to_owned())) };
    let unknown = |why: &dyn std::fmt::Display| ConnectError::Unreachable(format!("{text}: {why}"));
    let dir = dir.to_owned();
    let turn = Arc::clone(&terms.looks).acquire_owned().await.map_err(|e| unknown(&e))?;
    let look = move || {
        let found = ebb_coordinator::newest_in(&dir);
        drop(turn);
        found
    };
    let found = tokio::task::spawn_blocking(look).await.map_err(|e| unknown(&e))?;
    let Some(term) = found.map_err(|e| unknown(&e))? else { return Ok(None) };
    // A directory of a network can be looked at late.
    if terms.newest.fetch_max(term.number, Relaxed) > term.number {
        return Err(unknown(&format!("shows an older state: term {}", term.number)));
    }
    Ok(Some(term.address))
}

/// Waits for the job's first service, as long as a connection may take.
async fn first_term(options: &ConnectOptions, terms: &Terms) -> Result<String, ConnectError> {
    let end = tokio::time::Instant::now() + options.connect_timeout.mul_f64(0.8);
    loop {
        tokio::time::sleep(TERM_LOOK).await;
        match whereabouts(&options.address, terms).await? {
            Some(address) => return Ok(address),
            None if tokio::time::Instant::now() < end => {}
            None => return Err(nowhere(&options.address)),
        }
    }
}

pub(crate) fn nowhere(text: &str) -> ConnectError {
    ConnectError::Unreachable(format!(
        "{text}: no service has come yet (start `ebb meta --coordinator {text} ...` on one of the machines)"
    ))
}

/// Connects and introduces this node; `known`: with whom this incarnation had a session before.
pub(crate) async fn open(
    options: &ConnectOptions,
    exchange: &Arc<Exchange>,
    known: Option<Acquaintance>,
    terms: &Terms,
    silence: Silence,
) -> Result<Session, ConnectError> {
    let heard = Arc::new(Heard::default());
    let introduced = introduce(options, exchange, known, terms, &heard, silence);
    let introduced = timeout(options.connect_timeout, introduced).await.unwrap_or_else(|_| {
        Err(ConnectError::Unreachable(format!("{}: no welcome in time", options.address)))
    });
    introduced.map_err(|e| heard.explain(&options.address, e))
}

async fn introduce(
    options: &ConnectOptions,
    exchange: &Arc<Exchange>,
    known: Option<Acquaintance>,
    terms: &Terms,
    heard: &Arc<Heard>,
    silence: Silence,
) -> Result<Session, ConnectError> {
    let ConnectOptions { side_door, token, secure, .. } = options;
    let resume = known.is_some();
    let address = &match whereabouts(&options.address, terms).await? {
        Some(address) => address,
        // Who has been in the job looks again later.
        None if resume => return Err(nowhere(&options.address)),
        None => first_term(options, terms).await?,
    };
    let known = known.unwrap_or_default();
    let token = token.as_deref();
    let way = channel(address, side_door.as_ref(), token, *secure, heard, silence).await;
    let way = way.map_err(|e| e.proven_if(!resume))?;
    let mut client = client(way);
    let (number, id) = exchange.begin();
    let sent = crate::trust::now_ms();
    let nonce = auth::nonce();
    let hello = pb::Hello {
        protocol: ebb_wire::PROTOCOL,
        node: options.node.clone(),
        incarnation: options.incarnation.0,
        peer_address: options.peer_address.clone(),
        consistency: options.consistency.clone(),
        nonce: nonce.to_vec(),
        resume,
        heir_of: options.heir_of.iter().map(|i| i.0).collect(),
        trust_ms_max: u32::try_from(options.trust_max.as_millis()).unwrap_or(u32::MAX),
        empty: options.empty,
        job: known.job,
        told_by: known.told_by,
        told: known.told,
        node_id: known.node,
    };
    let said = hello.encode_to_vec();
    let op = Some(Op::Hello(hello));
    exchange.offer(number, pb::Request { id, op, ..Default::default() });
    let frames = Frames { exchange: exchange.clone(), session: number };
    let broken = |e: tonic::Status| broken(address, &e);
    let mut stream = client.session(frames).await.map_err(broken)?.into_inner();
    let proven = false;
    let mut conversation =
        Conversation { options, address, exchange, number, id, nonce, said, known, resume, proven };
    loop {
        let Some(mut frame) = stream.message().await.map_err(broken)? else {
            let text = format!("{address}: closed the stream instead of an answer");
            return Err(ConnectError::HungUp(text));
        };
        let Some(at) = frame.replies.iter().position(|r| r.id == conversation.id) else {
            continue;
        };
        let reply = frame.replies.swap_remove(at);
        if let Some(welcome) = conversation.hear(reply)? {
            let address = address.clone();
            return Ok(Session { number, address, welcome, sent, stream, early: frame });
        }
    }
}

/// The handshake so far.
struct Conversation<'a> {
    options: &'a ConnectOptions,
    /// Where the service is.
    address: &'a str,
    exchange: &'a Exchange,
    number: u64,
    /// Of the request whose answer is awaited.
    id: u64,
    nonce: auth::Proof,
    /// The hello, encoded.
    said: Vec<u8>,
    known: Acquaintance,
    /// This node is in the job.
    resume: bool,
    /// The service has shown that it holds the token.
    proven: bool,
}

impl Conversation<'_> {
    fn hear(&mut self, reply: pb::Reply) -> Result<Option<pb::Welcome>, ConnectError> {
        // A stranger who lacks the token, or of whom nothing else is known, does not know the job either.
        let is_ours = self.known.job != 0 && reply.job == self.known.job;
        let proven = !self.resume || self.proven || self.options.token.is_none() && is_ours;
        self.understand(reply).map_err(|e| e.proven_if(proven))
    }

    fn understand(&mut self, reply: pb::Reply) -> Result<Option<pb::Welcome>, ConnectError> {
        let address = self.address;
        if reply.errno != 0 {
            return Err(ConnectError::of_reply(address, reply.errno, &reply.text));
        }
        match (reply.body, &self.options.token) {
            (Some(Body::Welcome(welcome)), None) => self.check(welcome).map(Some),
            (Some(Body::Welcome(welcome)), Some(_)) if self.proven => self.check(welcome).map(Some),
            (Some(Body::Welcome(_)), Some(_)) => Err(ConnectError::BadToken(format!(
                "{address}: has no job token, but this node has"
            ))),
            (Some(Body::Challenge(challenge)), Some(token)) if !self.proven => {
                self.answer(token.clone(), &challenge)?;
                Ok(None)
            }
            (Some(Body::Challenge(_)), None) => Err(ConnectError::BadToken(format!(
                "{address}: asks for the job token (--token-file)"
            ))),
            _ => Err(self.unreachable("does not follow the protocol")),
        }
    }

    fn answer(&mut self, token: Arc<Token>, challenge: &pb::Challenge) -> Result<(), ConnectError> {
        let handshake = SessionHandshake {
            hello_nonce: &self.nonce,
            service_nonce: &challenge.nonce,
            hello: &self.said,
        };
        if !handshake.service_proof_is(&token, &challenge.proof) {
            let address = self.address;
            return Err(ConnectError::BadToken(format!("{address}: has another job token")));
        }
        self.proven = true;
        self.id = self.exchange.handshake_id();
        let prove = pb::Prove { proof: handshake.node_proof(&token).to_vec() };
        let op = Some(Op::Prove(prove));
        let request = pb::Request { id: self.id, op, ..Default::default() };
        self.exchange.offer(self.number, request);
        Ok(())
    }

    fn check(&self, welcome: pb::Welcome) -> Result<pb::Welcome, ConnectError> {
        if welcome.node_id == 0 || welcome.lease_ms == 0 {
            return Err(self.unreachable("sent a welcome without a node number or a lease"));
        }
        let address = self.address;
        let other = |what| ConnectError::AnotherService(format!("{address}: {what}"));
        self.known.check(&welcome).map_err(other)?;
        Ok(welcome)
    }

    fn unreachable(&self, why: &str) -> ConnectError {
        ConnectError::Unreachable(format!("{}: {why}", self.address))
    }
}

/// The cause that a user can do something about: tonic's own text is "transport error".
fn innermost(e: &dyn std::error::Error) -> String {
    let mut cause = e;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
