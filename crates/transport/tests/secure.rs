//! Encrypted connections of peers: the conformance suite over them, who is refused and told what,
//! and a relay in the middle that records and changes what passes.

#![allow(clippy::unwrap_used)] // a failure here is a failed test

mod conformance;

use conformance::files::{Files, Lending, eventually};
use ebb_testkit::{Change, Relay, Towards};
use ebb_transport::secure::{Channel, Purpose};
use ebb_transport::{
    ByteSource, PeerChannel, PeerPool, PeerServer, PeerServing, PeerTransport, PoolOptions,
    ReadError, ReadRequest, Secure, ServeError, ServeOptions, Tcp, Token,
};
use ebb_types::{ByteRange, Ino};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const INO: Ino = Ino(3);

/// A transport that encrypts, with a token where the suite does not bring one.
struct Always {
    tcp: Tcp,
    token: Arc<Token>,
}

fn always(token: &Arc<Token>, connections_per_peer: usize) -> Always {
    let secure = Secure::On;
    let pool = PoolOptions { secure, connections_per_peer, ..PoolOptions::default() };
    let serve = ServeOptions { secure, ..ServeOptions::default() };
    Always { tcp: Tcp { serve, pool }, token: token.clone() }
}

impl PeerTransport for Always {
    fn serve(
        &self,
        listener: TcpListener,
        source: Arc<dyn ByteSource>,
        token: Option<Arc<Token>>,
    ) -> Result<Box<dyn PeerServing>, ServeError> {
        let is_near = listener.local_addr()?.ip().is_loopback();
        self.tcp.serve(listener, source, token.or_else(|| is_near.then(|| self.token.clone())))
    }

    fn channel(&self, token: Option<Arc<Token>>) -> Arc<dyn PeerChannel> {
        self.tcp.channel(token.or_else(|| Some(self.token.clone())))
    }
}

fn token() -> Arc<Token> {
    let dir = tempfile::tempdir().unwrap();
    Arc::new(Token::generate_to(dir.path().join("token")).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conforms() {
    let token = token();
    conformance::suite(&always(&token, 4)).await;
    let stats = token.encrypted();
    assert!(stats.handshakes > 0 && stats.sent_bytes > 1 << 20, "{stats:?}");
    assert_eq!(stats.broken, 0, "{stats:?}");
}

#[tokio::test]
async fn conforms_on_one_connection_and_one_thread() {
    conformance::suite(&always(&token(), 1)).await;
}

fn served_with(token: Option<Arc<Token>>, secure: Secure) -> (PeerServer, Arc<Files>) {
    let files = Arc::new(Files::new(Lending::Held));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let options = ServeOptions {
        secure,
        handshake_timeout: Duration::from_millis(400),
        strangers_max: 8,
        ..ServeOptions::default()
    };
    let listener = TcpListener::from_std(listener).unwrap();
    (PeerServer::serve(listener, files.clone(), token, options).unwrap(), files)
}

fn pool(token: Option<Arc<Token>>, secure: Secure) -> PeerPool {
    let patience = Duration::from_secs(3);
    let options = PoolOptions {
        connections_per_peer: 2,
        connect_timeout: patience,
        read_timeout: patience,
        secure,
    };
    PeerPool::new(token, options)
}

fn request(start: u64, end: u64) -> ReadRequest {
    ReadRequest::of_owner(INO, vec![ByteRange::new(start, end)])
}

/// Which ends take each other, and what the others are told.
#[tokio::test]
async fn mixed_ends_say_what_to_do() {
    let job = token();
    let some = || Some(job.clone());
    for (server, client, said) in [
        ((some(), Secure::On), (some(), Secure::On), ""),
        ((some(), Secure::Loopback), (some(), Secure::On), ""),
        ((some(), Secure::Loopback), (some(), Secure::Loopback), ""),
        ((some(), Secure::Loopback), (some(), Secure::Off), ""),
        ((some(), Secure::Off), (some(), Secure::Off), ""),
        ((None, Secure::Loopback), (None, Secure::Loopback), ""),
        ((some(), Secure::On), (some(), Secure::Off), "takes only encrypted connections"),
        ((some(), Secure::On), (some(), Secure::Loopback), "takes only encrypted connections"),
        ((some(), Secure::On), (None, Secure::Loopback), "--token-file"),
        ((some(), Secure::Off), (some(), Secure::On), "does not encrypt, but this end does"),
        ((None, Secure::Loopback), (some(), Secure::On), "it has no job token"),
        ((some(), Secure::On), (Some(token()), Secure::On), "has another job token"),
    ] {
        let case = format!("server {} client {}: {said}", server.1, client.1);
        let (server, files) = served_with(server.0, server.1);
        let content = files.fill(INO, 1000, 7);
        let read =
            pool(client.0, client.1).read(&server.address().to_string(), &request(0, 1000)).await;
        match (read, said) {
            (Ok(bytes), "") => assert!(bytes == content, "{case}"),
            (Err(ReadError::Refused(why)), said) if !said.is_empty() => {
                assert!(why.contains(said), "{case}: {why}");
                assert!(!said.starts_with("takes") || why.contains("--secure"), "{why}");
            }
            (other, _) => panic!("{case}: {other:?}"),
        }
    }
}

/// Keys of one purpose and role are no good for another, although all come from one token.
#[tokio::test]
async fn a_peer_cannot_be_taken_for_the_service() {
    let job = token();
    let (server, _) = served_with(Some(job.clone()), Secure::On);
    let connect = async |token: &Token, purpose| {
        let tcp = TcpStream::connect(server.address()).await.unwrap();
        Channel::client(tcp, token.keys(), purpose).await
    };
    assert!(connect(&job, Purpose::Peer).await.unwrap().is_secure());
    let error = connect(&job, Purpose::Service).await.unwrap_err();
    assert!(error.to_string().contains("is a node's peer port"), "{error}");
    let error = connect(&token(), Purpose::Service).await.unwrap_err();
    assert!(error.to_string().contains("another job token"), "{error}");
}

/// Nothing of the protocol is said before both ends have proven themselves; who stays half-way is
/// closed in time, and there are never more of them than strangers may be.
#[tokio::test]
async fn half_a_handshake_is_a_strangers() {
    let job = token();
    let (server, files) = served_with(Some(job.clone()), Secure::On);
    let content = files.fill(INO, 1000, 1);
    // What a real one begins with.
    let relay = Relay::new(&server.address().to_string());
    let read = pool(Some(job.clone()), Secure::On);
    let address = relay.address().to_string();
    assert!(read.read(&address, &request(0, 1000)).await.unwrap() == content);
    let hello: Vec<u8> = relay.recorded()[..150].to_vec();
    assert_eq!(hello[0], 22, "a handshake");
    let mut half = Vec::new();
    for _ in 0..40 {
        let mut stream = TcpStream::connect(server.address()).await.unwrap();
        let _ = stream.write_all(&hello).await;
        half.push(stream);
    }
    eventually("all but the newest are shut out", || server.stats().refused >= 32).await;
    assert!(read.read(&server.address().to_string(), &request(0, 9)).await.is_ok());
    for mut stream in half {
        let mut rest = Vec::new();
        let end = stream.read_to_end(&mut rest);
        assert!(tokio::time::timeout(Duration::from_secs(2), end).await.is_ok(), "in time");
    }
    assert_eq!(server.stats().refused, 40);
}

/// A relay that answers as a peer without encryption would is told nothing, and believed nothing.
#[tokio::test]
async fn an_offer_to_do_without_is_not_taken() {
    let welcome: &[u8] = b"EbP2\x01\x00\x00\x00";
    for offer in [[welcome, &[0; 64]].concat(), b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), vec![22; 300]]
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let liar = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut said = vec![0; 4096];
            let n = stream.read(&mut said).await.unwrap();
            stream.write_all(&offer).await.unwrap();
            said.truncate(n);
            let _ = stream.read_to_end(&mut said).await;
            said
        });
        let read = pool(Some(token()), Secure::On).read(&address, &request(0, 10)).await;
        assert!(matches!(read, Err(ReadError::Unreachable(_))), "{read:?}");
        let said = liar.await.unwrap();
        assert!(!said.windows(4).any(|w| w == b"EbP2"), "nothing of the protocol was said");
    }
}

const SECRET: &[u8] = b"nobody on the way may read this. ";

fn fill_with_secret(files: &Files, bytes: usize) -> Vec<u8> {
    let content = SECRET.iter().copied().cycle().take(bytes).collect::<Vec<u8>>();
    files.put(INO, &content, 0);
    content
}

#[tokio::test]
async fn a_relay_sees_nothing() {
    for (secure, seen) in [(Secure::Off, true), (Secure::On, false)] {
        let job = token();
        let (server, files) = served_with(Some(job.clone()), secure);
        let content = fill_with_secret(&files, 3_000_000);
        let relay = Relay::new(&server.address().to_string());
        let pool = pool(Some(job.clone()), secure);
        let address = relay.address().to_string();
        assert!(pool.read(&address, &request(0, 3_000_000)).await.unwrap() == content);
        assert!(relay.recorded().len() > 3_000_000, "all went through it");
        assert_eq!(relay.has_seen(SECRET), seen, "{secure}");
        assert_eq!(relay.has_seen(b"EbRq"), seen, "{secure}");
        assert_eq!(job.encrypted().sent_bytes > 3_000_000, !seen);
    }
}

/// Whatever a relay does to the bytes, what is read is right, or is an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_changes_nothing() {
    let job = token();
    let (server, files) = served_with(Some(job.clone()), Secure::On);
    let content = fill_with_secret(&files, 1_000_000);
    let changes =
        [Change::Flip, Change::Insert(vec![23, 3, 3, 0, 1, 0]), Change::Remove, Change::Repeat];
    let places = [
        (Towards::Server, 0),
        (Towards::Server, 70),
        (Towards::Server, 300),
        (Towards::Server, 700),
        (Towards::Client, 40),
        (Towards::Client, 200),
        (Towards::Client, 800),
        (Towards::Client, 20_000),
        (Towards::Client, 700_001),
    ];
    let mut reached = 0;
    for change in changes {
        for (towards, at) in places {
            let relay = Relay::new(&server.address().to_string());
            relay.change(towards, at, change.clone(), 1);
            let pool = pool(Some(job.clone()), Secure::On);
            let address = relay.address().to_string();
            for _ in 0..3 {
                match pool.read(&address, &request(0, 1_000_000)).await {
                    Ok(bytes) => assert!(bytes == content, "{change:?} {towards:?} {at}"),
                    Err(ReadError::NotHere | ReadError::Errno(_)) => {
                        panic!("believed: {change:?} {at}")
                    }
                    Err(_) => {}
                }
            }
            reached += usize::from(relay.changes_left() == 0);
        }
    }
    assert!(reached >= 30, "{reached} of 36 changes were made");
    let stats = job.encrypted();
    assert!(stats.broken > 0 && stats.refused > 0, "{stats:?}");
}

/// The same, plain, finds out that such a relay is able to do harm: the test above can fail.
#[tokio::test]
async fn without_encryption_a_relay_changes_what_is_read() {
    let job = token();
    let (server, files) = served_with(Some(job.clone()), Secure::Off);
    let content = fill_with_secret(&files, 1_000_000);
    let relay = Relay::new(&server.address().to_string());
    relay.change(Towards::Client, 20_000, Change::Flip, 1);
    let pool = pool(Some(job), Secure::Off);
    let read = pool.read(&relay.address().to_string(), &request(0, 1_000_000)).await.unwrap();
    assert!(read != content);
}
