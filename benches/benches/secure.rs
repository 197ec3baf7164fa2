//! What encryption costs over loopback: reads of a peer's bytes, questions to the metadata service and
//! new connections, encrypted, plain and (reads) as a bare loop on a TCP connection, in turn. Loopback
//! moves bytes at the speed of memory: over a real network the difference is smaller.

use bytes::BytesMut;
use ebb_benches::{Report, rounds};
use ebb_meta_client::{ConnectOptions, MetaClient};
use ebb_meta_server::{Config, Server};
use ebb_transport::{
    ByteSource, Lent, PeerPool, PeerServer, PoolOptions, ReadRequest, Secure, ServeOptions,
    SourceError, Subject, Token,
};
use ebb_types::{ByteRange, Incarnation, Ino};
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tokio::net::TcpListener;

const FILE_BYTES: usize = 16 << 20;
/// Bytes of the reads of a round.
const ROUND_BYTES: usize = 256 << 20;
const QUESTIONS: usize = 3000;
const CONNECTIONS: usize = 100;

struct OneFile(Arc<File>);

impl ByteSource for OneFile {
    fn open_read(&self, _: Subject, _: &[ByteRange]) -> Result<Lent, SourceError> {
        Ok(Lent::held(self.0.clone(), Box::new(())))
    }

    fn still_here(&self, _: Subject, _: &[ByteRange]) -> bool {
        true
    }
}

/// One job with a peer and a service.
struct Side {
    secure: Secure,
    token: Arc<Token>,
    peer: PeerServer,
    pool: PeerPool,
    client: MetaClient,
}

impl Side {
    async fn new(secure: Secure, file: &Arc<File>, at: &Path) -> Side {
        std::fs::create_dir_all(at.join("backing")).expect("directories");
        let path = at.join("token");
        let token = Token::generate_to(&path).expect("a token");
        let config = Config {
            token: Some(token),
            secure,
            ..Config::new(at.join("backing"), at.join("state"))
        };
        let (service, token) = (Server::open(config), Arc::new(Token::load(&path).expect("token")));
        let (service, door) = (service.expect("a service"), listener().await);
        let address = door.local_addr().expect("an address").to_string();
        tokio::spawn(async move { service.serve(door, std::future::pending()).await });
        let options = ConnectOptions {
            incarnation: Incarnation(1),
            peer_address: "127.0.0.1:1".into(),
            consistency: "session".into(),
            token: Some(token.clone()),
            secure,
            ..ConnectOptions::new(address, "n1")
        };
        let (client, _) = MetaClient::connect(options).await.expect("a session");
        let lent = Arc::new(OneFile(file.clone()));
        let serve = ServeOptions { secure, ..ServeOptions::default() };
        let peer = PeerServer::serve(listener().await, lent, Some(token.clone()), serve);
        let pool = PeerPool::new(Some(token.clone()), PoolOptions { secure, ..Default::default() });
        Side { secure, token, peer: peer.expect("a peer"), pool, client }
    }

    /// Microseconds of one read.
    async fn reads(&self, len: usize) -> f64 {
        let (address, count) = (self.peer.address().to_string(), count(len));
        let mut buffer = BytesMut::with_capacity(len);
        let begin = Instant::now();
        for i in 0..count {
            let range = ByteRange::at(offset(i, len) as u64, len as u64);
            let request = ReadRequest::of_owner(Ino(2), vec![range]);
            buffer = self.pool.read_into(&address, &request, buffer).await.expect("a read");
        }
        each(begin, count)
    }

    async fn questions(&self) -> f64 {
        let begin = Instant::now();
        for _ in 0..QUESTIONS {
            self.client.getattr(Ino::ROOT).await.expect("an answer");
        }
        each(begin, QUESTIONS)
    }

    /// A pool's first read of a byte, and the end of the pool.
    async fn connections(&self) -> f64 {
        let address = self.peer.address().to_string();
        let begin = Instant::now();
        for _ in 0..CONNECTIONS {
            let options = PoolOptions { secure: self.secure, ..PoolOptions::default() };
            let pool = PeerPool::new(Some(self.token.clone()), options);
            let request = ReadRequest::of_owner(Ino(2), vec![ByteRange::new(0, 1)]);
            pool.read(&address, &request).await.expect("a read");
        }
        each(begin, CONNECTIONS)
    }
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.expect("a port")
}

/// Reads of a round: fewer of small ones, which cost more each.
fn count(len: usize) -> usize {
    (ROUND_BYTES / len).min(5000)
}

fn offset(i: usize, len: usize) -> usize {
    i * len % (FILE_BYTES - len + 1)
}

fn each(begin: Instant, count: usize) -> f64 {
    begin.elapsed().as_secs_f64() * 1e6 / count as f64
}

/// Answers every offset of 8 bytes with `len` bytes from there.
fn bare(file: &Arc<File>, len: usize) -> TcpStream {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let (file, address) = (file.clone(), listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.set_nodelay(true).expect("an option");
        let (mut offset, mut bytes) = ([0; 8], vec![0; len]);
        while stream.read_exact(&mut offset).is_ok() {
            file.read_exact_at(&mut bytes, u64::from_le_bytes(offset)).expect("the file");
            if stream.write_all(&bytes).is_err() {
                return;
            }
        }
    });
    let stream = TcpStream::connect(address).expect("a connection");
    stream.set_nodelay(true).expect("an option");
    stream
}

fn bare_reads(stream: &mut TcpStream, len: usize) -> f64 {
    let (mut bytes, begin) = (vec![0; len], Instant::now());
    for i in 0..count(len) {
        stream.write_all(&(offset(i, len) as u64).to_le_bytes()).expect("a question");
        stream.read_exact(&mut bytes).expect("an answer");
    }
    each(begin, count(len))
}

fn main() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; FILE_BYTES]).expect("a file");
    let file = Arc::new(File::open(path).expect("a file"));
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build().expect("threads");
    let side = |secure, name| runtime.block_on(Side::new(secure, &file, &dir.path().join(name)));
    let (plain, secure) = (side(Secure::Off, "plain"), side(Secure::On, "secure"));
    let mut report = Report::new("secure");
    report.head("plain", "encrypted");
    for len in [1 << 20, 8 << 10] {
        let mut stream = bare(&file, len);
        let [mut tcp, mut of_plain, mut of_secure] = [const { Vec::new() }; 3];
        for round in 0..=rounds() {
            let now = bare_reads(&mut stream, len);
            let (p, s) =
                runtime.block_on(async { (plain.reads(len).await, secure.reads(len).await) });
            if round > 0 {
                [(&mut tcp, now), (&mut of_plain, p), (&mut of_secure, s)]
                    .into_iter()
                    .for_each(|(all, one)| all.push(one));
            }
        }
        let size = format!("{} KiB", len >> 10);
        report.add(format!("read {size} from a peer"), "us", of_plain, of_secure.clone());
        report.add(format!("the same, bare TCP beside it: {size}"), "us", tcp, of_secure);
    }
    let [mut asked, mut connected] = [const { (Vec::new(), Vec::new()) }; 2];
    for round in 0..=rounds() {
        runtime.block_on(async {
            let (a, b) = (plain.questions().await, secure.questions().await);
            let (c, d) = (plain.connections().await, secure.connections().await);
            if round > 0 {
                asked.0.push(a);
                asked.1.push(b);
                connected.0.push(c);
                connected.1.push(d);
            }
        });
    }
    report.add("getattr at the service".to_owned(), "us", asked.0, asked.1);
    report.add("new connection to a peer, with a read".to_owned(), "us", connected.0, connected.1);
    println!("{}", report.save().expect("save").display());
}
