//! A service on loopback and raw clients of its stream.

#![allow(clippy::unwrap_used)]

use ebb_meta_server::{Config, Server};
use ebb_transport::Token;
use ebb_transport::auth::{self, SessionHandshake};
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::metadata_client::MetadataClient;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use prost::Message;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

pub const ROOT: u64 = 1;

/// A service with its directories.
pub struct Service {
    pub dir: tempfile::TempDir,
    pub server: Arc<Server>,
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    running: tokio::task::JoinHandle<()>,
}

impl Service {
    pub async fn start() -> Service {
        Service::start_with(|_| {}).await
    }

    pub async fn start_with(change: impl Fn(&mut Config)) -> Service {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        std::fs::create_dir(dir.path().join("backing")).unwrap();
        Service::on(dir, change).await
    }

    pub async fn on(dir: tempfile::TempDir, change: impl Fn(&mut Config)) -> Service {
        let mut config = Config::new(dir.path().join("backing"), dir.path().join("state"));
        change(&mut config);
        let server = Server::open(config).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = Arc::clone(&server);
        let running = tokio::spawn(async move {
            serving.serve(listener, async { drop(stopped.await) }).await.unwrap();
        });
        Service { dir, server, address, stop: Some(stop), running }
    }

    /// Ends the service without any goodbye to the journal, as a crash does, and starts another
    /// one on the same state.
    pub async fn crash_and_restart(self, change: impl Fn(&mut Config)) -> Service {
        Service::on(self.crash().await, change).await
    }

    /// The same on a machine that was booted in between.
    pub async fn restart_after_a_boot(self, change: impl Fn(&mut Config)) -> Service {
        let journal = self.journal();
        self.restart_on(journal, change).await
    }

    /// What is journalled by now.
    pub fn journal(&self) -> Vec<u8> {
        std::fs::read(self.dir.path().join("state/journal")).unwrap()
    }

    /// The same, and all that the journal has is this.
    pub async fn restart_on(self, mut bytes: Vec<u8>, change: impl Fn(&mut Config)) -> Service {
        let dir = self.crash().await;
        let journal = dir.path().join("state/journal");
        // In the header: magic, format, job, boot, and the sum of these.
        bytes[20] ^= 1;
        let sum = crc32c::crc32c(&bytes[..28]);
        bytes[28..32].copy_from_slice(&sum.to_le_bytes());
        std::fs::write(journal, bytes).unwrap();
        Service::on(dir, change).await
    }

    async fn crash(self) -> tempfile::TempDir {
        let Service { dir, server, stop, running, .. } = self;
        drop(stop);
        running.await.unwrap();
        drop(server);
        // Streams that are still ending hold the old service for a moment.
        for _ in 0..200 {
            if ebb_free(&dir.path().join("state/lock")) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        dir
    }

    pub fn backing(&self) -> PathBuf {
        self.dir.path().join("backing")
    }

    pub async fn node(&self, name: &str) -> Node {
        Node::join(self.address, name, 1, None).await.unwrap()
    }
}

fn ebb_free(lock: &Path) -> bool {
    let file = std::fs::File::open(lock).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// One node's end of a stream.
pub struct Node {
    pub id: u32,
    pub welcome: pb::Welcome,
    to: mpsc::Sender<pb::ClientFrame>,
    from: Streaming<pb::ServerFrame>,
    replies: HashMap<u64, pb::Reply>,
    pub notices: Vec<pb::Notice>,
    pub next: u64,
}

pub async fn connect(address: SocketAddr) -> MetadataClient<tonic::transport::Channel> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = endpoint.tcp_nodelay(true).connect().await.unwrap();
    MetadataClient::new(channel).max_decoding_message_size(ebb_wire::MESSAGE_BYTES_MAX)
}

/// The first word of a node.
pub fn hello(name: &str, incarnation: u64) -> pb::Hello {
    pb::Hello {
        protocol: ebb_wire::PROTOCOL,
        node: name.to_owned(),
        incarnation,
        peer_address: "127.0.0.1:1".to_owned(),
        consistency: "session".to_owned(),
        nonce: auth::nonce().to_vec(),
        ..pb::Hello::default()
    }
}

impl Node {
    pub async fn join(
        address: SocketAddr,
        name: &str,
        incarnation: u64,
        token: Option<&Token>,
    ) -> Result<Node, pb::Reply> {
        Node::join_as(address, hello(name, incarnation), token).await
    }

    pub async fn join_as(
        address: SocketAddr,
        hello: pb::Hello,
        token: Option<&Token>,
    ) -> Result<Node, pb::Reply> {
        let (to, out) = mpsc::channel(64);
        let first = Op::Hello(hello.clone());
        let request = |id, op| pb::ClientFrame {
            requests: vec![pb::Request { id, op: Some(op), ..Default::default() }],
        };
        to.send(request(1, first)).await.unwrap();
        let from = connect(address).await.session(ReceiverStream::new(out)).await.unwrap();
        let mut node = Node {
            id: 0,
            welcome: pb::Welcome::default(),
            to,
            from: from.into_inner(),
            replies: HashMap::new(),
            notices: Vec::new(),
            next: 100,
        };
        let mut reply = node.wait(1).await;
        if let Some(Body::Challenge(c)) = &reply.body {
            let token = token.expect("a challenge needs a token");
            let shake = SessionHandshake {
                hello_nonce: &hello.nonce,
                service_nonce: &c.nonce,
                hello: &hello.encode_to_vec(),
            };
            // A node with another token goes on, to be refused by the service.
            let _ = shake.service_proof_is(token, &c.proof);
            let proof = shake.node_proof(token).to_vec();
            node.to.send(request(2, Op::Prove(pb::Prove { proof }))).await.unwrap();
            reply = node.wait(2).await;
        }
        match reply.body.take() {
            Some(Body::Welcome(w)) => {
                node.id = w.node_id;
                node.welcome = w;
                Ok(node)
            }
            _ => Err(reply),
        }
    }

    /// Sends without waiting.
    pub async fn send(&mut self, op: Op) -> u64 {
        self.next += 1;
        self.send_as(self.next, op).await;
        self.next
    }

    pub async fn send_as(&mut self, id: u64, op: Op) {
        let frame = pb::ClientFrame {
            requests: vec![pb::Request { id, op: Some(op), ..Default::default() }],
        };
        self.to.send(frame).await.unwrap();
    }

    /// Takes what has come; false when the stream has ended.
    pub async fn receive(&mut self) -> bool {
        match self.from.message().await {
            Ok(Some(frame)) => {
                self.replies.extend(frame.replies.into_iter().map(|r| (r.id, r)));
                for notice in frame.notices {
                    match notice.what {
                        // Whoever is asked for a sign of life gives one in its own time; or now.
                        Some(pb::notice::What::Ping(pb::Ping { number: 0 })) => {}
                        Some(pb::notice::What::Ping(ping)) => {
                            let beat = pb::Heartbeat { answers: ping.number, ..Default::default() };
                            self.send(Op::Heartbeat(beat)).await;
                        }
                        _ => self.notices.push(notice),
                    }
                }
                true
            }
            Ok(None) | Err(_) => false,
        }
    }

    pub async fn wait(&mut self, id: u64) -> pb::Reply {
        let got = tokio::time::timeout(Duration::from_secs(20), async {
            loop {
                if let Some(reply) = self.replies.remove(&id) {
                    return reply;
                }
                assert!(self.receive().await, "the stream ended");
            }
        });
        got.await.expect("an answer within 20 seconds")
    }

    /// True when no answer comes for a while.
    pub async fn is_quiet(&mut self, id: u64) -> bool {
        let wait = async {
            while !self.replies.contains_key(&id) {
                assert!(self.receive().await, "the stream ended");
            }
        };
        tokio::time::timeout(Duration::from_millis(200), wait).await.is_err()
    }

    pub async fn ask(&mut self, op: Op) -> Result<Option<Body>, Errno> {
        let id = self.send(op).await;
        let reply = self.wait(id).await;
        if reply.errno == 0 { Ok(reply.body) } else { Err(Errno(reply.errno)) }
    }

    pub async fn make(&mut self, parent: u64, name: &str, mode: u32) -> Result<u64, Errno> {
        match self.ask(make(parent, name, mode)).await? {
            Some(Body::Entry(e)) => Ok(e.attr.unwrap().ino),
            Some(Body::Opened(o)) => Ok(o.attr.unwrap().ino),
            other => panic!("{other:?}"),
        }
    }

    pub async fn create(&mut self, parent: u64, name: &str) -> u64 {
        self.make(parent, name, libc::S_IFREG | 0o644).await.unwrap()
    }

    pub async fn lookup(&mut self, parent: u64, name: &str) -> Result<pb::Attr, Errno> {
        match self
            .ask(Op::Lookup(pb::Lookup { parent, name: name.into(), ..Default::default() }))
            .await?
        {
            Some(Body::Entry(e)) => Ok(e.attr.unwrap()),
            other => panic!("{other:?}"),
        }
    }

    pub async fn attr(&mut self, ino: u64) -> Result<pb::Attr, Errno> {
        match self.ask(Op::GetAttr(pb::GetAttr { ino, lease: 0, ..Default::default() })).await? {
            Some(Body::Entry(e)) => Ok(e.attr.unwrap()),
            other => panic!("{other:?}"),
        }
    }

    pub async fn names(&mut self, dir: u64) -> Vec<String> {
        let mut names = Vec::new();
        let mut after = Vec::new();
        loop {
            let op = Op::ReadDir(pb::ReadDir { ino: dir, after, limit: 2, ..Default::default() });
            let Ok(Some(Body::DirPage(page))) = self.ask(op).await else { panic!("no page") };
            after = page.items.last().map(|i| i.name.clone()).unwrap_or_default();
            names.extend(page.items.into_iter().map(|i| String::from_utf8(i.name).unwrap()));
            if page.end {
                return names;
            }
        }
    }

    pub async fn open(&mut self, ino: u64) -> Result<pb::Opened, Errno> {
        let op = pb::Open { ino, write: true, ..Default::default() };
        match self.ask(Op::Open(op)).await? {
            Some(Body::Opened(o)) => Ok(o),
            other => panic!("{other:?}"),
        }
    }

    pub async fn attach(&mut self, ino: u64, start: u64, end: u64) -> u64 {
        self.attached(ino, start, end).await.version
    }

    pub async fn attached(&mut self, ino: u64, start: u64, end: u64) -> pb::Attached {
        let ranges = vec![pb::Range { start, end }];
        let op = pb::Attach { ino, ranges, ..Default::default() };
        match self.ask(Op::Attach(op)).await {
            Ok(Some(Body::Attached(a))) => a,
            other => panic!("{other:?}"),
        }
    }

    pub async fn query(&mut self, ino: u64) -> pb::FileMap {
        let op = pb::Query { ino, ..Default::default() };
        match self.ask(Op::Query(op)).await {
            Ok(Some(Body::Map(m))) => m,
            other => panic!("{other:?}"),
        }
    }

    pub async fn begin(&mut self, ino: u64, start: u64, end: u64) -> Result<pb::FlushGrant, Errno> {
        match self.ask(begin(ino, start, end)).await? {
            Some(Body::FlushGrant(g)) => Ok(g),
            other => panic!("{other:?}"),
        }
    }

    pub async fn end(&mut self, ino: u64, grant: u64, done: bool) -> Result<pb::FlushDone, Errno> {
        match self.ask(Op::FlushEnd(pb::FlushEnd { ino, grant, done, shaped: false })).await? {
            Some(Body::FlushDone(d)) => Ok(d),
            other => panic!("{other:?}"),
        }
    }

    /// Flushes bytes of a fixed pattern, as a daemon would.
    pub async fn flush(&mut self, backing: &Path, ino: u64, fill: u8) -> pb::FlushDone {
        let grant = self.begin(ino, 0, 1 << 40).await.unwrap();
        write_granted(backing, &grant, fill);
        self.end(ino, grant.grant, true).await.unwrap()
    }

    pub async fn rename(&mut self, from: (u64, &str), to: (u64, &str)) -> Result<(), Errno> {
        let op = pb::Rename {
            parent: from.0,
            name: from.1.into(),
            new_parent: to.0,
            new_name: to.1.into(),
            flags: 0,
            ..Default::default()
        };
        self.ask(Op::Rename(op)).await.map(drop)
    }

    pub async fn unlink(&mut self, parent: u64, name: &str) -> Result<(), Errno> {
        let op = pb::Unlink { parent, name: name.into(), dir: false, ..Default::default() };
        self.ask(Op::Unlink(op)).await.map(drop)
    }

    pub async fn materialize(&mut self) -> pb::MaterializeReply {
        let mut sum = pb::MaterializeReply::default();
        for _ in 0..1000 {
            match self
                .ask(Op::Materialize(pb::Materialize { limit: 2, ..Default::default() }))
                .await
            {
                Ok(Some(Body::Materialize(m))) => {
                    sum.done += m.done;
                    sum.failures.extend(m.failures);
                    sum.unfinished.extend(m.unfinished);
                    if m.remaining == 0 {
                        return sum;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("materialising never ends");
    }
}

pub fn begin(ino: u64, start: u64, end: u64) -> Op {
    Op::FlushBegin(pb::FlushBegin { ino, ranges: vec![pb::Range { start, end }] })
}

pub fn make(parent: u64, name: &str, mode: u32) -> Op {
    Op::Make(pb::Make {
        parent,
        name: name.into(),
        mode,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        ..Default::default()
    })
}

pub fn write_granted(backing: &Path, grant: &pb::FlushGrant, fill: u8) {
    use std::os::unix::fs::FileExt;
    let place = grant.backing.as_ref().unwrap();
    let path = backing.join(String::from_utf8(place.path.clone()).unwrap());
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    for r in &grant.ranges {
        file.write_all_at(&vec![fill; (r.end - r.start) as usize], r.start).unwrap();
    }
}

pub fn lock(ino: u64, owner: u64, kind: u32, wait: bool) -> Op {
    Op::SetLock(pb::SetLock {
        ino,
        owner,
        pid: owner as u32,
        range: Some(pb::Range { start: 0, end: 10 }),
        r#type: kind,
        flock: false,
        wait,
        publish: false,
    })
}
