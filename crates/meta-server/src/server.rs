//! The service from outside: open, serve, status, shutdown.

use crate::config::{Config, StartError};
use crate::core::Core;
use crate::doors::{Doors, Visitor};
use crate::following;
use crate::stream;
use ebb_locks::Mutex;
use ebb_transport::secure::MUST_ENCRYPT;
use ebb_transport::side_door::{Arrivals, SideDoor};
use ebb_transport::{Secure, Token, admin};
use ebb_types::NodeId;
use ebb_wire::pb;
use ebb_wire::pb::metadata_server::{Metadata, MetadataServer};
use prost::Message;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// HTTP/2 flow control: the defaults of 64 KiB would make bursts of small requests wait.
const WINDOW_BYTES: u32 = 16 << 20;

/// Streams that nobody reads are noticed.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// How often leases and the size of the journal are looked at, at least.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// After the word to stop, streams get this long to send what they have.
const GRACE: Duration = Duration::from_secs(2);

/// Largest payload of an echo.
const ECHO_MAX: usize = 1 << 20;

/// Metadata key of the proof that unary calls of others carry (`ebb_transport::admin`).
const ADMIN_KEY: &str = "ebb-proof-bin";

/// The metadata service of one job.
pub struct Server {
    core: Arc<Core>,
    token: Option<Arc<Token>>,
    secure: Secure,
    calls: admin::Calls,
    side_door: SideDoor,
    arrivals: Mutex<Option<Arrivals>>,
}

/// So many are named in a status.
const LOST_MAX: usize = 16;

fn lost_files(state: &crate::state::State) -> Vec<pb::LostFile> {
    let path = |ino| state.ns.path(ino).map(|p| p.to_bytes()).unwrap_or_default();
    let lost = state.couplings.lost().take(LOST_MAX);
    lost.map(|(ino, node)| pb::LostFile { path: path(ino), node: node.0 }).collect()
}

impl Server {
    /// Opens backing and journal; what was known before is known again.
    pub fn open(config: Config) -> Result<Arc<Server>, StartError> {
        let core = Arc::new(Core::open(&config)?);
        Ok(Server::of(core, config))
    }

    pub(crate) fn of(core: Arc<Core>, config: Config) -> Arc<Server> {
        let (token, calls) = (config.token.map(Arc::new), admin::Calls::default());
        let secure = config.secure;
        let (side_door, arrivals) = SideDoor::new();
        let arrivals = Mutex::new(Some(arrivals));
        Arc::new(Server { core, token, secure, calls, side_door, arrivals })
    }

    /// A way in for the daemon that this service is in. It leads nowhere before the service serves,
    /// and after it has ended.
    #[must_use]
    pub fn side_door(&self) -> SideDoor {
        self.side_door.clone()
    }

    /// Serves nodes until `shutdown` resolves. Without a token only on loopback.
    pub async fn serve(
        self: &Arc<Self>,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), StartError> {
        let failed = |e: &dyn std::fmt::Display| StartError::Serve(e.to_string());
        let address = listener.local_addr().map_err(|e| failed(&e))?;
        if self.token.is_none() && !address.ip().is_loopback() {
            return Err(StartError::NeedsToken { address });
        }
        let service = MetadataServer::new(Service { server: Arc::clone(self) })
            .max_decoding_message_size(ebb_wire::MESSAGE_BYTES_MAX)
            .max_encoding_message_size(ebb_wire::MESSAGE_BYTES_MAX);
        let (aside, token) = (self.arrivals.lock().take(), self.token.clone());
        let incoming = Doors::open(listener, aside, token, self.secure);
        let (stop, mut stopping) = tokio::sync::watch::channel(false);
        let serving = tonic::transport::Server::builder()
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE))
            .add_service(service)
            .serve_with_incoming_shutdown(incoming, async move {
                // The sender lives as long as this function.
                let _ = stopping.wait_for(|s| *s).await;
            });
        tokio::pin!(serving, shutdown);
        let housekeeping = self.keep_house();
        tokio::pin!(housekeeping);
        let forgetting = self.core.keep_small();
        tokio::pin!(forgetting);
        tokio::select! {
            result = &mut serving => return result.map_err(|e| failed(&e)),
            () = &mut housekeeping => {}
            () = &mut forgetting => {}
            () = &mut shutdown => {}
        }
        stop.send_replace(true);
        self.core.sessions.end_all();
        self.core.standbys.end();
        match tokio::time::timeout(GRACE, serving).await {
            Ok(result) => result.map_err(|e| failed(&e)),
            // Whoever does not hang up is hung up on.
            Err(_) => Ok(()),
        }
    }

    async fn keep_house(&self) {
        let mut tick = tokio::time::interval(HOUSEKEEPING.min(self.core.lease / 4));
        let mut lives = self.core.state().lives();
        let mut compacting: Option<tokio::task::JoinHandle<()>> = None;
        let mut removing: Option<tokio::task::JoinHandle<()>> = None;
        loop {
            tick.tick().await;
            // The others note soon that there is another one, for a recovery without this service.
            let by_now = self.core.state().lives();
            if std::mem::replace(&mut lives, by_now) != by_now {
                self.core.sessions.ping_all();
            }
            self.core.check_leases();
            // Beside the rest as well: the backing may hang.
            let idle = removing.as_ref().is_none_or(tokio::task::JoinHandle::is_finished);
            if idle && crate::coupling::has_consumed(&self.core) {
                let core = Arc::clone(&self.core);
                removing =
                    Some(tokio::spawn(
                        async move { crate::coupling::remove_consumed(&core).await },
                    ));
            }
            for (stream, node) in self.core.desk.look_over() {
                tracing::warn!(%node, "leases are not returned; its stream is ended");
                self.core.sessions.end(node, stream);
            }
            // Beside the rest: it takes as long as the state is large.
            if compacting.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
                let core = Arc::clone(&self.core);
                let compact = tokio::task::spawn_blocking(move || core.compact(false));
                compacting = Some(compact);
            }
        }
    }

    /// What there is to know about the service.
    #[must_use]
    pub fn status(&self) -> pb::StatusReply {
        let core = &self.core;
        let (leases, recalls) = core.desk.counts();
        let encrypted = self.token.as_ref().map(|t| t.encrypted()).unwrap_or_default();
        let state = core.state();
        pb::StatusReply {
            backing: core.backing.path().display().to_string(),
            consistency: state.consistency.clone().unwrap_or_default(),
            nodes: core.node_records(&state, None),
            inodes: state.ns.len() as u64,
            owned_ranges: state.files.values().map(|f| f.entries() as u64).sum(),
            unflushed_bytes: state.files.values().map(|f| f.unflushed_bytes()).sum(),
            journal_bytes: core.journal.bytes(),
            rpc: core.stats.requests(),
            errors: core.stats.errors(),
            uptime_ms: core.stats.uptime_ms(),
            leases,
            recalls,
            quiet: state.quiet.len() as u64,
            inodes_max: core.forgetting.most() as u64,
            forgotten: core.forgetting.count(),
            places: state.ns.places() as u64,
            secure: self.secure.to_string(),
            encrypted_sent_bytes: encrypted.sent_bytes,
            encrypted_received_bytes: encrypted.received_bytes,
            job: core.job(),
            standbys: core.standbys.list(core.journal.tail()),
            coupled: state.couplings.len() as u64,
            awaiting: core.awaiting.len() as u64,
            lost: lost_files(&state),
        }
    }

    /// Answers one request of a node that has a stream, without that stream. Only benches do so, which
    /// compare the stream with calls; nobody is asked for a proof.
    #[doc(hidden)]
    pub async fn answer(&self, node: NodeId, request: pb::Request) -> Option<pb::Reply> {
        stream::answer(Arc::clone(&self.core), node, request).await
    }

    /// Compacts the journal, brings it to stable storage and closes it. Blocks; nothing can be
    /// changed afterwards.
    pub fn shutdown(&self) {
        self.core.compact(true);
        self.core.journal.stop();
        // A call that hangs may still change something: then who comes next waits.
        match self.core.backing.is_idle() {
            true => self.core.tenure.end(),
            false => self.core.tenure.give_up(),
        }
    }

    /// Who has connected, and may at least say hello: with a token that proves the rest.
    fn admit<T>(&self, request: &Request<T>) -> Result<Visitor, Status> {
        match request.extensions().get::<Visitor>() {
            Some(visitor) if visitor.must_encrypt() => Err(Status::permission_denied(MUST_ENCRYPT)),
            Some(visitor) if self.token.is_some() || visitor.is_ours => Ok(visitor.clone()),
            _ => Err(Status::permission_denied(
                "without a job token only this user's processes on this machine are served",
            )),
        }
    }

    fn admit_admin<T: Message>(&self, name: &str, request: &Request<T>) -> Result<(), Status> {
        self.admit_proven(name, request, request.get_ref())
    }

    /// `asked`: what the proof that came with the request is of.
    fn admit_proven<T>(
        &self,
        name: &str,
        request: &Request<T>,
        asked: &impl Message,
    ) -> Result<(), Status> {
        let visitor = self.admit(request)?;
        let proof = request.metadata().get_bin(ADMIN_KEY).and_then(|v| v.to_bytes().ok());
        let call = admin::Call { name, request: &asked.encode_to_vec() };
        let proven = match (&self.token, proof) {
            _ if visitor.is_ours => true,
            (Some(token), Some(proof)) => self.calls.admit(token, call, &proof),
            _ => false,
        };
        if !proven {
            return Err(Status::permission_denied("no proof of the job token, or a used one"));
        }
        visitor.admit();
        Ok(())
    }
}

/// The generated trait on a type of ours.
struct Service {
    server: Arc<Server>,
}

#[tonic::async_trait]
impl Metadata for Service {
    type SessionStream =
        Pin<Box<dyn tokio_stream::Stream<Item = Result<pb::ServerFrame, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<pb::ClientFrame>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let visitor = self.server.admit(&request)?;
        // Frames that wait for HTTP/2; what waits for frames is bounded elsewhere.
        let (to_node, frames) = mpsc::channel(16);
        let core = Arc::clone(&self.server.core);
        let token = self.server.token.clone();
        tokio::spawn(stream::serve(core, token, visitor, request.into_inner(), to_node));
        Ok(Response::new(Box::pin(ReceiverStream::new(frames))))
    }

    type FollowStream =
        Pin<Box<dyn tokio_stream::Stream<Item = Result<pb::Followed, Status>> + Send>>;

    async fn follow(
        &self,
        request: Request<Streaming<pb::Following>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        self.server.admit_proven("follow", &request, &pb::Following::default())?;
        let (out, frames) = mpsc::channel(16);
        let core = Arc::clone(&self.server.core);
        tokio::spawn(following::serve(core, request.into_inner(), out));
        Ok(Response::new(Box::pin(ReceiverStream::new(frames))))
    }

    async fn status(
        &self,
        request: Request<pb::StatusRequest>,
    ) -> Result<Response<pb::StatusReply>, Status> {
        self.server.admit_admin("status", &request)?;
        Ok(Response::new(self.server.status()))
    }

    async fn echo(
        &self,
        request: Request<pb::EchoMessage>,
    ) -> Result<Response<pb::EchoMessage>, Status> {
        self.server.admit_admin("echo", &request)?;
        let message = request.into_inner();
        if message.payload.len() > ECHO_MAX {
            return Err(Status::invalid_argument("an echo carries at most 1 MiB"));
        }
        Ok(Response::new(message))
    }
}
