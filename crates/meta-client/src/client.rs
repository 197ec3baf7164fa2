//! The handle that calls go through. Cheap to clone; the last one dropped ends the session.

use crate::driver::{self, Event};
pub(crate) use crate::exchange::Answer;
use crate::exchange::{Ask, Exchange, Patience};
use crate::facts::{Asking, NameNotes};
use crate::heard::Heard;
use crate::lately::Lately;
use crate::ops::{NAMES, counter};
use crate::session::{self, Acquaintance, ConnectError, ConnectOptions, Terms};
use crate::silence::Silence;
use crate::trust::Trusting;
use ebb_locks::Mutex;
use ebb_transport::{Secure, Token, admin};
use ebb_types::{Errno, NodeId};
use ebb_wire::pb::{self, reply::Body, request::Op};
use prost::Message;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, broadcast, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tonic::Code;
use tonic::metadata::MetadataValue;

/// Calls in flight at most; others wait their turn. No more than the answers that the service
/// remembers for a node across a restart.
const CALLS_MAX: usize = 1024;
/// Events that a listener may be behind before it misses some (it is told so).
const EVENTS_MAX: usize = 64;

/// Metadata key of the proof that administration carries.
const ADMIN_KEY: &str = "ebb-proof-bin";

/// Why a call failed, where the service may say more than an errno.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub struct CallError {
    /// What an application is told.
    pub errno: Errno,
    /// For status and logs; may be empty.
    pub text: Box<str>,
    /// The service has said it: nothing else came of the call.
    is_answer: bool,
}

impl CallError {
    pub(crate) fn new(errno: Errno, text: &str) -> CallError {
        CallError { errno, text: text.into(), is_answer: false }
    }

    pub(crate) fn answer(errno: Errno, text: &str) -> CallError {
        CallError { is_answer: true, ..CallError::new(errno, text) }
    }

    pub(crate) fn is_answer(&self) -> bool {
        self.is_answer
    }
}

/// True when the service says that nothing came of a request.
fn is_not_done(answer: &Answer) -> bool {
    match answer {
        Ok(body) => ebb_wire::sends_on(body.as_ref()),
        Err(e) => e.is_answer(),
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.text.is_empty() { self.errno.fmt(f) } else { f.write_str(&self.text) }
    }
}

impl fmt::Debug for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.errno, self.text)
    }
}

impl From<CallError> for Errno {
    fn from(e: CallError) -> Errno {
        e.errno
    }
}

impl From<Errno> for CallError {
    fn from(errno: Errno) -> CallError {
        CallError::new(errno, "")
    }
}

/// What a client did so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientStats {
    /// Calls by name of operation; those that never happened are left out.
    pub calls: BTreeMap<&'static str, u64>,
    /// Calls without an answer at the moment.
    pub unanswered: u64,
    /// Calls that got no answer in time.
    pub timeouts: u64,
    /// Sessions that were made, the first one included.
    pub sessions: u64,
    /// Answers that came twice or too late.
    pub unknown_replies: u64,
    /// Requests flow at the moment.
    pub connected: bool,
}

pub(crate) struct Inner {
    pub exchange: Arc<Exchange>,
    pub options: ConnectOptions,
    /// Where the service is.
    pub at: Mutex<String>,
    pub terms: Terms,
    pub events: broadcast::Sender<Event>,
    /// Why this node is out of the job, once it is.
    pub fenced: watch::Sender<Option<String>>,
    /// Why the service that answers is not spoken to, as long as that is so.
    pub refused: Mutex<Option<String>>,
    /// Who the service is.
    pub known: Mutex<Acquaintance>,
    pub dirty_bytes: AtomicU64,
    /// How long the shortest of the service's leases lives without a heartbeat.
    pub lease_ms: AtomicU32,
    pub node_id: AtomicU32,
    pub instance: AtomicU64,
    pub sessions: AtomicU64,
    pub timeouts: AtomicU64,
    pub unknown_replies: AtomicU64,
    /// The goodbye is on its way: a stream that ends is not resumed.
    pub leaving: AtomicBool,
    pub trusting: Trusting,
    /// Counts the sessions whose service wants to be told again what this node knows.
    pub owed: watch::Sender<u64>,
    /// After which moment such a service may have forgotten something that it said of names.
    pub names_after: AtomicU64,
    /// Who keeps what is heard of names.
    pub notes: OnceLock<Box<dyn NameNotes>>,
    calls: [AtomicU64; NAMES.len()],
    turns: Semaphore,
    pub synced: Lately<()>,
    pub room: Lately<pb::StatFsReply>,
}

impl Inner {
    fn count(&self, op: &Op) {
        self.calls[counter(op)].fetch_add(1, Relaxed);
    }

    pub fn patience(&self) -> Patience {
        Patience::Until(Instant::now() + self.options.request_timeout)
    }

    /// Sends what nobody waits for.
    pub fn post(&self, op: Op, patience: Patience) {
        self.count(&op);
        self.exchange.post(op, patience);
    }

    pub fn submit(
        &self,
        ask: impl Into<Ask>,
        patience: Patience,
    ) -> Result<(u64, oneshot::Receiver<Answer>), Errno> {
        let ask = ask.into();
        self.count(&ask.op);
        self.exchange.submit(ask, patience)
    }
}

/// Ends the tasks of a session with the last handle.
struct Tasks(Vec<AbortHandle>, Arc<Inner>);

impl Drop for Tasks {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
        self.1.exchange.end(Errno::EIO, "the session was closed");
    }
}

/// A node's end of the metadata stream. Calls may be awaited on any executor.
#[derive(Clone)]
pub struct MetaClient {
    pub(crate) inner: Arc<Inner>,
    pub(crate) timeout: Duration,
    beside_seats: bool,
    _tasks: Arc<Tasks>,
}

impl fmt::Debug for MetaClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MetaClient").field(&self.inner.options.address).finish()
    }
}

impl MetaClient {
    /// Joins the job. The connection lives on the runtime on which this is awaited; keep that
    /// apart from threads that block.
    pub async fn connect(
        options: ConnectOptions,
    ) -> Result<(MetaClient, pb::Welcome), ConnectError> {
        let exchange = Arc::new(Exchange::new(options.first_request));
        let terms = Terms::default();
        let session = session::open(&options, &exchange, None, &terms, Silence::default()).await?;
        let welcome = session.welcome;
        let inner = Arc::new(Inner {
            exchange,
            options,
            at: Mutex::default(),
            terms,
            events: broadcast::channel(EVENTS_MAX).0,
            fenced: watch::Sender::new(None),
            refused: Mutex::new(None),
            known: Mutex::new(Acquaintance::default()),
            dirty_bytes: AtomicU64::new(0),
            lease_ms: AtomicU32::new(driver::shortest_lease(&welcome)),
            node_id: AtomicU32::new(welcome.node_id),
            instance: AtomicU64::new(welcome.service_instance),
            sessions: AtomicU64::new(0),
            timeouts: AtomicU64::new(0),
            unknown_replies: AtomicU64::new(0),
            leaving: AtomicBool::new(false),
            trusting: Trusting::default(),
            owed: watch::Sender::new(0),
            names_after: AtomicU64::new(u64::MAX),
            notes: OnceLock::new(),
            calls: std::array::from_fn(|_| AtomicU64::new(0)),
            turns: Semaphore::new(CALLS_MAX),
            synced: Lately::default(),
            room: Lately::default(),
        });
        driver::welcome(&inner, &session);
        let tasks = [
            tokio::spawn(driver::beat(inner.clone())),
            tokio::spawn(driver::watch_deadlines(inner.clone())),
            tokio::spawn(driver::drive(inner.clone(), session)),
        ];
        let tasks = tasks.iter().map(tokio::task::JoinHandle::abort_handle).collect();
        let client = MetaClient {
            timeout: inner.options.request_timeout,
            beside_seats: false,
            _tasks: Arc::new(Tasks(tasks, inner.clone())),
            inner,
        };
        Ok((client, welcome))
    }

    /// One call, as it is on the wire. Without an answer by the deadline: ETIMEDOUT.
    pub async fn call(&self, op: Op) -> Result<Option<Body>, Errno> {
        Ok(self.call_explained(op).await?)
    }

    /// The same, with the text that may come with an errno.
    pub async fn call_explained(&self, op: Op) -> Answer {
        // Those before it end by their deadlines, so the turn comes; nothing ever closes it.
        let _turn = self.inner.turns.acquire().await.map_err(|_| Errno::EIO)?;
        let (asking, kind) = (self.inner.asking(&op), crate::once::kind(&op));
        let ask = Ask { op, beside_seats: self.beside_seats };
        let (_, answer) = match self.inner.submit(ask, self.patience()) {
            Ok(sent) => sent,
            Err(e) => {
                asking.into_iter().for_each(Asking::taken_back);
                return Err(e.into());
            }
        };
        let answer = answer.await.unwrap_or_else(|_| Err(Errno::EIO.into()));
        asking.into_iter().for_each(|asking| asking.end(&answer));
        if let Some(kind) = kind.filter(|_| is_not_done(&answer)) {
            crate::once::not_done(kind);
        }
        answer
    }

    /// The same session for calls with another deadline: those that move data take longer than
    /// those that a person waits for.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> MetaClient {
        MetaClient { timeout, ..self.clone() }
    }

    /// The same session for whoever takes a cache over: files that sit at other nodes are told as they were
    /// published last, so that no other node need be there.
    #[must_use]
    pub fn beside_seats(&self) -> MetaClient {
        MetaClient { beside_seats: true, ..self.clone() }
    }

    pub(crate) fn patience(&self) -> Patience {
        Patience::Until(Instant::now() + self.timeout)
    }

    /// Whether the connection breaks, comes back, or ends for good.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.inner.events.subscribe()
    }

    /// Waits until this node is out of the job (or was before this call), and says why.
    pub async fn fenced(&self) -> String {
        let mut fenced = self.inner.fenced.subscribe();
        let reason = fenced.wait_for(Option::is_some).await.map(|reason| reason.clone());
        match reason {
            Ok(reason) => reason.unwrap_or_default(),
            // The sender lives as long as this handle.
            Err(_) => std::future::pending().await,
        }
    }

    /// Why this node speaks to no service although one answers: it is another one, or none that
    /// could prove itself. Or this node is out of the job.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        let fenced = self.inner.fenced.borrow().clone();
        fenced.or_else(|| self.inner.refused.lock().clone())
    }

    /// What the next heartbeats tell of this node.
    pub fn set_dirty_bytes(&self, bytes: u64) {
        self.inner.dirty_bytes.store(bytes, Relaxed);
    }

    /// This node's number in the job.
    #[must_use]
    pub fn node_id(&self) -> NodeId {
        NodeId(self.inner.node_id.load(Relaxed))
    }

    /// Address of the service, as this node has found it last.
    #[must_use]
    pub fn address(&self) -> String {
        self.inner.at.lock().clone()
    }

    /// True while requests flow.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.inner.exchange.is_up()
    }

    /// The number of the session with the service: another one may be with a service that has begun
    /// again.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.inner.sessions.load(Relaxed)
    }

    /// What it did so far.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        let inner = &self.inner;
        let calls = NAMES.iter().zip(&inner.calls).map(|(name, n)| (*name, n.load(Relaxed)));
        ClientStats {
            calls: calls.filter(|(_, n)| *n > 0).collect(),
            unanswered: inner.exchange.unanswered() as u64,
            timeouts: inner.timeouts.load(Relaxed),
            sessions: inner.sessions.load(Relaxed),
            unknown_replies: inner.unknown_replies.load(Relaxed),
            connected: inner.exchange.is_up(),
        }
    }
}

/// What a standby hears of the service that it follows, and how it says what it has.
pub struct Followed {
    /// Copies of the journal, and signs of life.
    pub heard: tonic::Streaming<pb::Followed>,
    /// What is on stable storage here.
    pub say: tokio::sync::mpsc::Sender<pb::Following>,
}

/// Follows the service at `address`, which must have this term, as the standby `name`.
pub async fn follow(
    (address, term): (&str, u64),
    name: &str,
    token: Option<&Token>,
    secure: Secure,
    patience: Duration,
) -> Result<Followed, ConnectError> {
    let heard = Arc::new(Heard::default());
    let asked = async {
        let way =
            session::channel(address, None, token, secure, &heard, Silence::default()).await?;
        let mut client = session::client(way);
        let (say, said) = tokio::sync::mpsc::channel(16);
        let first = pb::Following { has: 0, name: name.to_owned(), term };
        // There is room for it.
        let _ = say.send(first).await;
        let mut request = tonic::Request::new(tokio_stream::wrappers::ReceiverStream::new(said));
        if let Some(token) = token {
            let asked = pb::Following::default().encode_to_vec();
            let call = admin::Call { name: "follow", request: &asked };
            let proof = MetadataValue::from_bytes(&admin::proof(token, call));
            request.metadata_mut().insert_bin(ADMIN_KEY, proof);
        }
        let followed = client.follow(request).await;
        let followed = followed.map_err(|e| of_status(address, &e))?;
        Ok(Followed { heard: followed.into_inner(), say })
    };
    let late = |_| Err(ConnectError::Unreachable(format!("{address}: no answer in time")));
    let answered = timeout(patience, asked).await.unwrap_or_else(late);
    answered.map_err(|e| heard.explain(address, e))
}

fn of_status(address: &str, e: &tonic::Status) -> ConnectError {
    let text = format!("{address}: {}", e.message());
    match e.code() {
        Code::PermissionDenied => ConnectError::BadToken(text),
        _ => ConnectError::Unreachable(text),
    }
}

/// What the service at `address` (or where `dir:DIR` says) tells of itself, without joining the job. From another machine
/// it wants to see the job's token.
pub async fn service_status(
    address: &str,
    token: Option<&Token>,
    secure: Secure,
    patience: Duration,
) -> Result<pb::StatusReply, ConnectError> {
    let heard = Arc::new(Heard::default());
    let asked = async {
        let at = session::whereabouts(address, &Terms::default()).await?;
        let at = &at.ok_or_else(|| session::nowhere(address))?;
        let way = session::channel(at, None, token, secure, &heard, Silence::default()).await?;
        let mut client = session::client(way);
        let asked = pb::StatusRequest {};
        let call = admin::Call { name: "status", request: &asked.encode_to_vec() };
        let mut request = tonic::Request::new(asked);
        if let Some(token) = token {
            let proof = MetadataValue::from_bytes(&admin::proof(token, call));
            request.metadata_mut().insert_bin(ADMIN_KEY, proof);
        }
        let answered = client.status(request).await;
        answered.map(tonic::Response::into_inner).map_err(|e| of_status(address, &e))
    };
    let late = |_| Err(ConnectError::Unreachable(format!("{address}: no answer in time")));
    let answered = timeout(patience, asked).await.unwrap_or_else(late);
    answered.map_err(|e| heard.explain(address, e))
}
