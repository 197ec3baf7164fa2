//! A journal on a full disk: what a node is refused for want of room it does not hold either.

use crate::config::Config;
use crate::core::Core;
use crate::journal::tests::on_a_disk_that_fills;
use crate::server::Server;
use crate::sessions::{Line, Who};
use crate::state::{Entry, NodeRecord};
use crate::stream::answer;
use ebb_types::{Errno, Incarnation, Ino, NodeId};
use ebb_wire::pb;
use ebb_wire::pb::metadata_client::MetadataClient;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);

/// A service whose journal has a disk of its own, and two nodes.
struct Service {
    dir: tempfile::TempDir,
    core: Arc<Core>,
    full: Arc<AtomicBool>,
    next: AtomicU64,
}

impl Service {
    fn start() -> Service {
        let dir = tempfile::tempdir().unwrap();
        let [backing, state, disk] = ["backing", "state", "disk"].map(|d| dir.path().join(d));
        [&backing, &disk].iter().for_each(|d| std::fs::create_dir(d).unwrap());
        let full = Arc::new(AtomicBool::new(false));
        let mut core = Core::open(&Config::new(backing, state)).unwrap();
        core.journal = on_a_disk_that_fills(&disk, &full);
        let service = Service { dir, core: Arc::new(core), full, next: 1.into() };
        [A, B].iter().for_each(|node| service.join(*node));
        service
    }

    fn join(&self, node: NodeId) {
        let (incarnation, name) = (Incarnation(1), node.to_string());
        let record = NodeRecord { id: node, name, incarnation, peer_address: String::new() };
        self.core.commit(&mut self.core.state(), &[Entry::Node(record)]);
        let who = Who { node, incarnation };
        let serial = self.core.desk.join(who, 0).0;
        let (out, recalls) = (mpsc::channel(1).0, mpsc::unbounded_channel().0);
        let line = Line { serial, out, recalls, end: watch::channel(false).0 };
        self.core.sessions.attach(who, line, false);
    }

    async fn ask_as(&self, node: NodeId, id: u64, op: Op) -> pb::Reply {
        let request = pb::Request { id, op: Some(op), ..Default::default() };
        let answer = answer(Arc::clone(&self.core), node, request);
        // Much less than anybody waits for a claim of bytes.
        let answered = tokio::time::timeout(Duration::from_secs(10), answer).await;
        answered.expect("answered soon").expect("answered")
    }

    async fn ask(&self, node: NodeId, op: Op) -> Result<Option<Body>, Errno> {
        let answer = self.ask_as(node, self.next.fetch_add(1, Relaxed), op).await;
        if answer.errno == 0 { Ok(answer.body) } else { Err(Errno(answer.errno)) }
    }

    /// A new file, open at the node, with so many bytes that are not flushed.
    async fn write(&self, node: NodeId, name: &str, len: u64) -> u64 {
        let (parent, mode, name) = (Ino::ROOT.0, libc::S_IFREG | 0o644, name.into());
        let op = Op::Make(pb::Make { parent, name, mode, open: true, ..Default::default() });
        let made = match self.ask(node, op).await.unwrap() {
            Some(Body::Opened(opened)) => opened.attr.unwrap().ino,
            other => panic!("{other:?}"),
        };
        let ranges = vec![pb::Range { start: 0, end: len }];
        let op = Op::Attach(pb::Attach { ino: made, ranges, ..Default::default() });
        self.ask(node, op).await.unwrap();
        made
    }

    /// The disk is full, and the journal knows.
    async fn fill(&self) {
        self.full.store(true, Relaxed);
        self.core.commit(&mut self.core.state(), &[Entry::Lives(1)]);
        assert_eq!(self.core.settled().await, Err(Errno::ENOSPC));
    }

    async fn free(&self) {
        self.full.store(false, Relaxed);
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while self.core.settled().await.is_err() {
            assert!(std::time::Instant::now() < end, "the journal does not go on");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn flush(ino: u64, len: u64) -> Op {
    Op::FlushBegin(pb::FlushBegin { ino, ranges: vec![pb::Range { start: 0, end: len }] })
}

fn cut(ino: u64, size: u64) -> Op {
    Op::SetAttr(pb::SetAttr { ino, size: Some(size), ..Default::default() })
}

fn grant_of(body: Option<Body>) -> u64 {
    match body {
        Some(Body::FlushGrant(granted)) => granted.grant,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn who_is_refused_a_flush_holds_no_bytes() {
    let service = Service::start();
    let ino = service.write(A, "f", 10).await;
    service.fill().await;
    assert_eq!(service.ask(A, flush(ino, 10)).await, Err(Errno::ENOSPC));
    assert!(!service.core.is_busy(Ino(ino)));
    service.free().await;
    service.ask(B, cut(ino, 5)).await.unwrap();
    assert_ne!(grant_of(service.ask(A, flush(ino, 5)).await.unwrap()), 0);
}

/// The answer was lost with its stream, the disk is full when the node asks again.
#[tokio::test]
async fn a_grant_that_was_given_is_told_also_without_room() {
    let service = Service::start();
    let ino = service.write(A, "f", 10).await;
    let granted = service.ask_as(A, 77, flush(ino, 10)).await;
    service.fill().await;
    assert_eq!(service.ask_as(A, 77, flush(ino, 10)).await, granted);
    let grant = grant_of(granted.body);
    let end = pb::FlushEnd { ino, grant, ..Default::default() };
    assert_eq!(service.ask(A, Op::FlushEnd(end)).await, Err(Errno::ENOSPC));
    assert!(!service.core.is_busy(Ino(ino)), "the end is done all the same");
    service.free().await;
}

/// What a node that comes on a stream of its own is answered.
async fn hello(address: SocketAddr) -> pb::Reply {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut client = MetadataClient::new(endpoint.connect().await.unwrap());
    let hello = pb::Hello {
        protocol: ebb_wire::PROTOCOL,
        node: "c".to_owned(),
        incarnation: 1,
        ..Default::default()
    };
    let request = pb::Request { id: 1, op: Some(Op::Hello(hello)), ..Default::default() };
    let frame = pb::ClientFrame { requests: vec![request] };
    let mut answers = client.session(tokio_stream::once(frame)).await.unwrap().into_inner();
    answers.message().await.unwrap().unwrap().replies.remove(0)
}

#[tokio::test]
async fn no_node_is_refused_for_good_for_want_of_room() {
    let service = Service::start();
    let [backing, state] = ["backing", "state"].map(|d| service.dir.path().join(d));
    let server = Server::of(Arc::clone(&service.core), Config::new(backing, state));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { server.serve(listener, std::future::pending()).await });
    service.fill().await;
    let refused = hello(address).await;
    assert_eq!(Errno(refused.errno), Errno::EAGAIN, "it comes again: {refused:?}");
    let id = service.core.state().node_named("c").map(|n| n.id).unwrap();
    assert!(service.core.sessions.stream_of(id).is_none(), "and has no stream meanwhile");
    service.free().await;
    assert!(matches!(hello(address).await.body, Some(Body::Welcome(_))));
}
