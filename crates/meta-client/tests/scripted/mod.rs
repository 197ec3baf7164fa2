//! The other end of the stream, played by the test: it sees every request and sends what it
//! likes, so that lost, late, doubled and wrong answers can be made on purpose.

use ebb_meta_client::ConnectOptions;
use ebb_types::Incarnation;
use ebb_wire::pb::{self, metadata_server, reply::Body, request::Op};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

type Sent = Result<pb::ServerFrame, Status>;

struct Scripted(mpsc::Sender<Peer>);

#[tonic::async_trait]
impl metadata_server::Metadata for Scripted {
    type SessionStream = Pin<Box<dyn Stream<Item = Sent> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<pb::ClientFrame>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (out, frames) = mpsc::channel(16);
        let peer = Peer { out, stream: request.into_inner(), unread: VecDeque::new(), frames: 0 };
        self.0.send(peer).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(frames))))
    }

    type FollowStream = Pin<Box<dyn Stream<Item = Result<pb::Followed, Status>> + Send>>;

    async fn follow(
        &self,
        _: Request<Streaming<pb::Following>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        Err(Status::unimplemented("a standby"))
    }

    async fn status(
        &self,
        _: Request<pb::StatusRequest>,
    ) -> Result<Response<pb::StatusReply>, Status> {
        Ok(Response::new(pb::StatusReply { consistency: "session".into(), ..Default::default() }))
    }

    async fn echo(
        &self,
        request: Request<pb::EchoMessage>,
    ) -> Result<Response<pb::EchoMessage>, Status> {
        Ok(Response::new(request.into_inner()))
    }
}

/// A service that waits for nodes.
pub struct Service {
    pub address: SocketAddr,
    peers: mpsc::Receiver<Peer>,
    task: tokio::task::JoinHandle<()>,
}

/// The service's end of one session.
pub struct Peer {
    out: mpsc::Sender<Sent>,
    stream: Streaming<pb::ClientFrame>,
    unread: VecDeque<pb::Request>,
    /// How many came.
    pub frames: usize,
}

impl Service {
    pub async fn start() -> Service {
        Service::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    pub async fn start_at(address: SocketAddr) -> Service {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, peers) = mpsc::channel(4);
        let metadata = metadata_server::MetadataServer::new(Scripted(sender))
            .max_decoding_message_size(ebb_wire::MESSAGE_BYTES_MAX)
            .max_encoding_message_size(ebb_wire::MESSAGE_BYTES_MAX);
        let incoming = TcpListenerStream::new(listener)
            .map(|stream| stream.inspect(|s| s.set_nodelay(true).unwrap()));
        let server = tonic::transport::Server::builder().add_service(metadata);
        let task = tokio::spawn(async move {
            server.serve_with_incoming(incoming).await.unwrap();
        });
        Service { address, peers, task }
    }

    /// Gone, with its listener and its connections.
    pub async fn stop(self) {
        self.task.abort();
        assert!(self.task.await.is_err());
    }

    pub fn options(&self) -> ConnectOptions {
        ConnectOptions {
            incarnation: Incarnation(77),
            peer_address: "127.0.0.1:9".into(),
            consistency: "session".into(),
            request_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            ..ConnectOptions::new(self.address.to_string(), "n1")
        }
    }

    /// The next session, before its Hello.
    pub async fn accept(&mut self) -> Peer {
        let next = tokio::time::timeout(Duration::from_secs(10), self.peers.recv()).await;
        next.expect("a session in time").unwrap()
    }

    /// The next session, welcomed; and its Hello.
    pub async fn welcome(&mut self, instance: u64) -> (Peer, pb::Hello) {
        let mut peer = self.accept().await;
        let (id, op) = peer.next().await;
        let Op::Hello(hello) = op else { panic!("{op:?}") };
        peer.reply(id, Body::Welcome(welcome(instance))).await;
        (peer, hello)
    }

    /// True when nobody comes for a while.
    pub async fn is_left_alone(&mut self) -> bool {
        tokio::time::timeout(Duration::from_millis(300), self.peers.recv()).await.is_err()
    }
}

/// Whose service it is.
const JOB: u64 = 9;

/// With a lease so long that heartbeats do not get in the way.
pub fn welcome(instance: u64) -> pb::Welcome {
    let (node_id, lease_ms) = (5, 600_000);
    pb::Welcome { node_id, service_instance: instance, lease_ms, job: JOB, ..Default::default() }
}

pub fn attr(ino: u64) -> pb::Attr {
    let time = Some(pb::Time { sec: 1, nsec: 2 });
    pb::Attr {
        ino,
        mode: 0o100_644,
        nlink: 1,
        size: 10,
        atime: time,
        mtime: time,
        ctime: time,
        ..Default::default()
    }
}

pub fn entry(ino: u64) -> Body {
    Body::Entry(pb::Entry { attr: Some(attr(ino)), ..Default::default() })
}

impl Peer {
    /// The next request that is not a heartbeat; those are answered.
    pub async fn next(&mut self) -> (u64, Op) {
        loop {
            let (id, op) = self.next_of_any_kind().await;
            if !matches!(op, Op::Heartbeat(_)) {
                return (id, op);
            }
            self.done(id).await;
        }
    }

    pub async fn next_of_any_kind(&mut self) -> (u64, Op) {
        loop {
            if let Some(request) = self.unread.pop_front() {
                return (request.id, request.op.unwrap());
            }
            let frame = tokio::time::timeout(Duration::from_secs(10), self.stream.message());
            let frame = frame.await.expect("a frame in time").unwrap();
            self.unread.extend(frame.expect("the stream is open").requests);
            self.frames += 1;
        }
    }

    /// Everything of the next frame.
    pub async fn frame(&mut self) -> Vec<(u64, Op)> {
        match self.stream.message().await {
            Ok(Some(frame)) => frame.requests.into_iter().map(|r| (r.id, r.op.unwrap())).collect(),
            _ => std::future::pending().await,
        }
    }

    /// True when the client ends the stream.
    pub async fn is_closed(&mut self) -> bool {
        let closed = async { while let Ok(Some(_)) = self.stream.message().await {} };
        tokio::time::timeout(Duration::from_secs(5), closed).await.is_ok()
    }

    /// True when no request but heartbeats comes for a while.
    pub async fn is_left_alone(&mut self) -> bool {
        tokio::time::timeout(Duration::from_millis(200), self.next()).await.is_err()
    }

    pub async fn send(&self, replies: Vec<pb::Reply>) {
        self.out.send(Ok(pb::ServerFrame { replies, ..Default::default() })).await.unwrap();
    }

    pub async fn reply(&self, id: u64, body: Body) {
        self.send(vec![pb::Reply { id, body: Some(body), ..Default::default() }]).await;
    }

    pub async fn done(&self, id: u64) {
        self.send(vec![pb::Reply { id, ..Default::default() }]).await;
    }

    pub async fn refuse(&self, id: u64, errno: i32, text: &str) {
        let text = text.into();
        self.send(vec![pb::Reply { id, errno, text, job: JOB, ..Default::default() }]).await;
    }

    pub async fn notice(&self, what: pb::notice::What) {
        let notices = vec![pb::Notice { what: Some(what) }];
        self.out.send(Ok(pb::ServerFrame { notices, ..Default::default() })).await.unwrap();
    }
}
