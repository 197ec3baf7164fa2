//! Requests per second: operations over one stream, many to a frame and several frames on their
//! way, against unary calls.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ebb_meta_server::{Config, Server};
use ebb_wire::pb;
use ebb_wire::pb::metadata_client::MetadataClient;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

const PER_FRAME: u64 = 64;
const FRAMES: u64 = 16;

/// A node's end of the stream.
struct Node {
    to: mpsc::Sender<pb::ClientFrame>,
    from: Streaming<pb::ServerFrame>,
    next: u64,
}

impl Node {
    async fn join(client: &mut MetadataClient<Channel>) -> Node {
        let (to, out) = mpsc::channel(64);
        let hello = pb::Hello { protocol: 1, node: "bench".into(), ..Default::default() };
        let requests =
            vec![pb::Request { id: 1, op: Some(Op::Hello(hello)), ..Default::default() }];
        to.send(pb::ClientFrame { requests }).await.expect("the stream is open");
        let from = client.session(ReceiverStream::new(out)).await.expect("a session").into_inner();
        let mut node = Node { to, from, next: 1 };
        node.replies(1).await;
        node
    }

    async fn replies(&mut self, wanted: u64) -> Vec<pb::Reply> {
        let mut replies = Vec::new();
        while (replies.len() as u64) < wanted {
            let frame = self.from.message().await.expect("a frame").expect("an open stream");
            replies.extend(frame.replies);
        }
        assert!(replies.iter().all(|r| r.errno == 0), "{:?}", replies[0]);
        replies
    }

    /// Several frames of requests at once, then all their answers.
    async fn burst(&mut self, frames: u64, per_frame: u64, op: impl Fn(u64) -> Op) {
        for _ in 0..frames {
            let request = |i| pb::Request {
                id: self.next + i,
                op: Some(op(self.next + i)),
                ..Default::default()
            };
            let requests = (1..=per_frame).map(request).collect();
            self.next += per_frame;
            self.to.send(pb::ClientFrame { requests }).await.expect("the stream is open");
        }
        self.replies(frames * per_frame).await;
    }
}

async fn start(dir: &std::path::Path) -> (Arc<Server>, SocketAddr) {
    let server = Server::open(Config::new(dir, dir.join("state"))).expect("a service");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let serving = Arc::clone(&server);
    tokio::spawn(async move { serving.serve(listener, std::future::pending()).await });
    (server, address)
}

fn rpc(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a directory");
    let runtime = Runtime::new().expect("a runtime");
    let (mut client, mut node, file) = runtime.block_on(async {
        let (_server, address) = start(dir.path()).await;
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        let mut client =
            MetadataClient::new(endpoint.tcp_nodelay(true).connect().await.expect("up"));
        let mut node = Node::join(&mut client).await;
        let make =
            pb::Make { parent: 1, name: b"f".to_vec(), mode: 0o100_644, ..Default::default() };
        let requests = vec![pb::Request { id: 2, op: Some(Op::Make(make)), ..Default::default() }];
        node.next = 2;
        node.to.send(pb::ClientFrame { requests }).await.expect("the stream is open");
        let file = match node.replies(1).await.remove(0).body {
            Some(Body::Entry(e)) => e.attr.expect("attributes").ino,
            other => panic!("{other:?}"),
        };
        (client, node, file)
    });
    let query = |_| Op::Query(pb::Query { ino: file, ..Default::default() });
    let attach = |i: u64| {
        let ranges = vec![pb::Range { start: (i % 64) * 8192, end: (i % 64 + 1) * 8192 }];
        Op::Attach(pb::Attach { ino: file, ranges, ..Default::default() })
    };

    let mut group = c.benchmark_group("requests");
    group.sample_size(20);
    group.throughput(Throughput::Elements(FRAMES * PER_FRAME));
    group.bench_function("stream/query/pipelined", |b| {
        b.iter(|| runtime.block_on(node.burst(FRAMES, PER_FRAME, query)));
    });
    group.bench_function("stream/attach/pipelined", |b| {
        b.iter(|| runtime.block_on(node.burst(FRAMES, PER_FRAME, attach)));
    });
    group.throughput(Throughput::Elements(1));
    group.bench_function("stream/query/one", |b| {
        b.iter(|| runtime.block_on(node.burst(1, 1, query)));
    });
    group.bench_function("stream/attach/one", |b| {
        b.iter(|| runtime.block_on(node.burst(1, 1, attach)));
    });
    group.bench_function("unary/echo/one", |b| {
        b.iter(|| runtime.block_on(client.echo(pb::EchoMessage::default())).expect("an echo"));
    });
    group.finish();
}

criterion_group!(benches, rpc);
criterion_main!(benches);
