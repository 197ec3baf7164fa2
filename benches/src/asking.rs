//! A metadata service, and two ways to ask it: over the stream as Ebb does, and with a unary call
//! for every request, which does the same behind the call.

use ebb_meta_client::{ConnectOptions, MetaClient};
use ebb_meta_server::{Config, Server};
use ebb_types::NodeId;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::{self, request::Op};
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tonic::body::Body as HttpBody;
use tonic::client::Grpc;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{NamedService, UnaryService};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

/// The path of the call.
const PATH: &str = "/ebb.bench.Unary/Call";

/// Request ids of the calls are above those of the stream.
const FIRST_CALL: u64 = 1 << 40;

/// How the service is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Requests on one stream, several to a frame when there are several.
    Stream,
    /// A call for each.
    Unary,
}

/// Both ends: a service with a backing and a journal, and a node, each on a runtime with as many
/// threads as in a daemon that has the service inside.
pub struct Asked {
    _serving: Runtime,
    asking: Runtime,
    client: MetaClient,
    channel: Channel,
    /// The id of the next call: of one node, whoever asks.
    next: Arc<AtomicU64>,
}

impl Asked {
    /// Starts a service with its backing and state in `dir`, and joins it.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn start(dir: &Path) -> Asked {
        let runtime = || {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(2).enable_all().build().expect("a runtime")
        };
        let (serving, asking) = (runtime(), runtime());
        let backing = dir.join("backing");
        std::fs::create_dir(&backing).expect("mkdir");
        let server = Server::open(Config::new(backing, dir.join("state"))).expect("a service");
        let address = serving.block_on(serve(Arc::clone(&server)));
        let options = ConnectOptions::new(&address, "bench");
        let (client, _) = asking.block_on(MetaClient::connect(options)).expect("a session");
        let called = serving.block_on(serve_calls(server, client.node_id()));
        let channel = asking.block_on(async {
            let endpoint = Endpoint::from_shared(format!("http://{called}")).expect("an address");
            endpoint.tcp_nodelay(true).connect().await.expect("it listens")
        });
        let next = Arc::new(AtomicU64::new(FIRST_CALL));
        Asked { _serving: serving, asking, client, channel, next }
    }

    /// Somebody who asks in this way; with `all` also for what a lease would answer.
    #[must_use]
    pub fn asker(&self, way: Way, all: bool) -> Asker {
        Asker {
            way,
            all,
            runtime: self.asking.handle().clone(),
            client: self.client.clone(),
            channel: self.channel.clone(),
            next: Arc::clone(&self.next),
            asked: Arc::default(),
        }
    }
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    (listener, address)
}

async fn serve(server: Arc<Server>) -> String {
    let (listener, address) = listen().await;
    tokio::spawn(async move { server.serve(listener, std::future::pending()).await });
    address
}

async fn serve_calls(server: Arc<Server>, node: NodeId) -> String {
    let (listener, address) = listen().await;
    let calls = Calls { server, node };
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let http = tonic::transport::Server::builder().add_service(calls);
    tokio::spawn(http.serve_with_incoming(incoming));
    address
}

/// Asks, and counts that.
#[derive(Clone)]
pub struct Asker {
    way: Way,
    all: bool,
    runtime: tokio::runtime::Handle,
    client: MetaClient,
    channel: Channel,
    next: Arc<AtomicU64>,
    asked: Arc<AtomicU64>,
}

impl Asker {
    /// Asks also for what a lease would answer.
    #[must_use]
    pub fn asks_all(&self) -> bool {
        self.all
    }

    /// Requests so far.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Relaxed)
    }

    /// Asks, then does the rest with the number of the inode that was made, if one was.
    pub fn ask(&self, op: Op, then: impl FnOnce(Option<u64>) + Send + 'static) {
        let asker = self.clone();
        self.runtime.spawn(async move {
            let body = asker.answer(op).await;
            then(match body {
                Some(Body::Opened(opened)) => opened.attr.map(|a| a.ino),
                Some(Body::Entry(entry)) => entry.attr.map(|a| a.ino),
                _ => None,
            });
        });
    }

    /// Requests for names that are not there and attributes that are not set fail as they should.
    async fn answer(&self, op: Op) -> Option<Body> {
        self.asked.fetch_add(1, Relaxed);
        if self.way == Way::Stream {
            return self.client.call(op).await.ok().flatten();
        }
        let id = self.next.fetch_add(1, Relaxed);
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.expect("a connection");
        let request = tonic::Request::new(pb::Request { id, op: Some(op), ..Default::default() });
        let path = http::uri::PathAndQuery::from_static(PATH);
        let answer = grpc.unary(request, path, ProstCodec::<pb::Request, pb::Reply>::default());
        answer.await.expect("an answer").into_inner().body
    }
}

impl std::fmt::Debug for Asker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asker").field("way", &self.way).field("all", &self.all).finish()
    }
}

/// The service as unary calls: what `tonic-prost-build` would write for a service of one method.
#[derive(Clone)]
struct Calls {
    server: Arc<Server>,
    node: NodeId,
}

impl NamedService for Calls {
    const NAME: &'static str = "ebb.bench.Unary";
}

impl Service<http::Request<HttpBody>> for Calls {
    type Response = http::Response<HttpBody>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<HttpBody>) -> Self::Future {
        let method = self.clone();
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(ProstCodec::default());
            Ok(grpc.unary(method, request).await)
        })
    }
}

impl UnaryService<pb::Request> for Calls {
    type Response = pb::Reply;
    type Future = BoxFuture<tonic::Response<pb::Reply>, tonic::Status>;

    fn call(&mut self, request: tonic::Request<pb::Request>) -> Self::Future {
        let Calls { server, node } = self.clone();
        Box::pin(async move {
            let answer = server.answer(node, request.into_inner()).await;
            let gone = || tonic::Status::unavailable("the node has no stream");
            answer.map(tonic::Response::new).ok_or_else(gone)
        })
    }
}
