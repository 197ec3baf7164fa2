//! The TCP transport: the conformance suite, and what only a byte stream can suffer.

#![allow(clippy::unwrap_used)] // a failure here is a failed test or bench

mod conformance;

use conformance::files::{Files, Lending, eventually};
use ebb_transport::wire::{self, Request};
use ebb_transport::{
    PeerPool, PeerServer, PoolOptions, ReadError, ReadRequest, ServeOptions, Tcp, begins_as_peer,
};
use ebb_types::{ByteRange, Ino};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const INO: Ino = Ino(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conforms() {
    conformance::suite(&Tcp::default()).await;
}

/// Everything on one connection per peer, so that all parts and reads share it.
#[tokio::test]
async fn conforms_on_one_connection_and_one_thread() {
    let pool = PoolOptions { connections_per_peer: 1, ..PoolOptions::default() };
    conformance::suite(&Tcp { pool, ..Tcp::default() }).await;
}

fn quick() -> (ServeOptions, PoolOptions) {
    let serve = ServeOptions {
        connections_max: 4,
        strangers_max: 4,
        handshake_timeout: Duration::from_millis(200),
        idle_timeout: Duration::from_millis(300),
        stall_timeout: Duration::from_millis(300),
        ..ServeOptions::default()
    };
    let pool = PoolOptions {
        connections_per_peer: 2,
        connect_timeout: Duration::from_millis(500),
        read_timeout: Duration::from_millis(500),
        ..PoolOptions::default()
    };
    (serve, pool)
}

async fn serve(files: &Arc<Files>, options: ServeOptions) -> PeerServer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    PeerServer::serve(listener, files.clone(), None, options).unwrap()
}

fn request(start: u64, end: u64) -> ReadRequest {
    ReadRequest::of_owner(INO, vec![ByteRange::new(start, end)])
}

/// Past the handshake by hand.
async fn greeted(server: &PeerServer) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    let mut hello = b"EbP2\x01\x00\x00\x00".to_vec();
    hello.extend_from_slice(&[9; 32]);
    stream.write_all(&hello).await.unwrap();
    let mut answer = [0; 72];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer[..8], b"EbP2\x01\x00\x00\x00");
    stream
}

/// Reads until the other end closes, for two seconds at most.
async fn closes(stream: &mut TcpStream) -> bool {
    let mut sink = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(2), stream.read_to_end(&mut sink)).await;
    read.is_ok()
}

#[tokio::test]
async fn garbage_and_silence_are_closed_and_harm_nobody() {
    let (options, pool_options) = quick();
    let files = Arc::new(Files::new(Lending::Held));
    let content = files.fill(INO, 500_000, 1);
    let server = serve(&files, options).await;
    let mut silent = TcpStream::connect(server.address()).await.unwrap();
    assert!(closes(&mut silent).await, "no hello");
    let mut http = TcpStream::connect(server.address()).await.unwrap();
    http.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(closes(&mut http).await, "another protocol");
    let mut half = TcpStream::connect(server.address()).await.unwrap();
    half.write_all(b"EbP2\x01\x00").await.unwrap();
    assert!(closes(&mut half).await, "half a hello");
    assert_eq!(server.stats().refused, 3);
    let mut mistaken = TcpStream::connect(server.address()).await.unwrap();
    mistaken.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    mistaken.read_to_end(&mut answer).await.unwrap();
    assert!(answer.len() == 8 && begins_as_peer(&answer), "it says where that is: {answer:?}");
    drop(mistaken);
    eventually("it is turned away", || server.stats().refused == 4).await;

    let mut garbage = greeted(&server).await;
    garbage.write_all(&[0x5a; 100]).await.unwrap();
    let mut answer = Vec::new();
    // It may be reset, since the rest of the garbage was never read.
    let _ = garbage.read_to_end(&mut answer).await;
    if let Ok(head) = <&[u8; wire::REPLY_LEN]>::try_from(answer.as_slice()) {
        assert_eq!(wire::decode_reply(head).map(|r| r.status), Ok(wire::Status::Malformed));
    }
    let mut unasked = greeted(&server).await;
    let mut confirmation = Vec::new();
    wire::put_received(&mut confirmation, 5);
    unasked.write_all(&confirmation).await.unwrap();
    assert!(closes(&mut unasked).await, "confirms what was never sent");
    assert_eq!(server.stats().errors, 2);

    let mut unfinished = greeted(&server).await;
    let mut whole = Vec::new();
    wire::put_read(&mut whole, 1, INO, &[ByteRange::new(0, 10)]);
    unfinished.write_all(&whole[..whole.len() - 1]).await.unwrap();
    assert!(closes(&mut unfinished).await, "half a request");
    let mut idle = greeted(&server).await;
    assert!(closes(&mut idle).await, "idle");
    eventually("all of them are gone", || server.stats().connections == 0).await;

    let pool = PeerPool::new(None, pool_options);
    let address = server.address().to_string();
    assert!(pool.read(&address, &request(0, 500_000)).await.unwrap() == content);
    // The pool's own connections go idle too; the next read makes new ones and nobody notices.
    eventually("the pool's connections are idle", || server.stats().connections == 0).await;
    assert!(pool.read(&address, &request(0, 500_000)).await.unwrap() == content);
    assert_eq!(pool.stats().errors, 0);
}

#[tokio::test]
async fn a_peer_that_takes_nothing_is_given_up_and_what_it_held_is_free() {
    let (options, _) = quick();
    let files = Arc::new(Files::new(Lending::Held));
    files.fill(INO, 16 << 20, 1);
    let server = serve(&files, options).await;
    let mut stuck = greeted(&server).await;
    let mut out = Vec::new();
    for id in 0..4 {
        wire::put_read(&mut out, id, INO, &[ByteRange::new(0, 16 << 20)]);
    }
    stuck.write_all(&out).await.unwrap();
    eventually("lent", || files.holds() > 0).await;
    eventually("given up", || server.stats().connections == 0 && files.holds() == 0).await;

    // Takes everything but never confirms.
    let mut silent = greeted(&server).await;
    out.clear();
    wire::put_read(&mut out, 0, INO, &[ByteRange::new(0, 1 << 20)]);
    silent.write_all(&out).await.unwrap();
    let mut bytes = vec![0; wire::REPLY_LEN + (1 << 20) + wire::TRAILER_LEN];
    silent.read_exact(&mut bytes).await.unwrap();
    assert_eq!(files.holds(), 1, "held until it is confirmed");
    eventually("given up", || server.stats().connections == 0 && files.holds() == 0).await;
}

#[tokio::test]
async fn connections_are_bounded_and_the_bound_is_told() {
    let (options, pool_options) = quick();
    let files = Arc::new(Files::new(Lending::Held));
    files.fill(INO, 1000, 1);
    let server = serve(&files, ServeOptions { connections_max: 2, ..options }).await;
    let (first, _second) = (greeted(&server).await, greeted(&server).await);
    let pool = PeerPool::new(None, pool_options);
    let address = server.address().to_string();
    let full = pool.read(&address, &request(0, 10)).await;
    let Err(ReadError::Unreachable(text)) = full else { panic!("{full:?}") };
    assert!(text.contains("too many connections"), "{text}");
    drop(first);
    eventually("room again", || server.stats().connections < 2).await;
    assert!(pool.read(&address, &request(0, 10)).await.is_ok());
}

/// A server that does what the script says after the handshake.
async fn scripted<F, Fut>(script: F) -> String
where
    F: Fn(TcpStream, u64) -> Fut + Send + 'static,
    Fut: Future<Output = io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        for connection in 0.. {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut hello = [0; 40];
            stream.read_exact(&mut hello).await.unwrap();
            let mut answer = b"EbP2\x01\x00\x00\x00".to_vec();
            answer.extend_from_slice(&[0; 64]);
            stream.write_all(&answer).await.unwrap();
            tokio::spawn(script(stream, connection));
        }
    });
    address
}

async fn next_read(stream: &mut TcpStream) -> io::Result<(u64, u64)> {
    let mut head = vec![0; wire::REQUEST_LEN + wire::RANGE_LEN];
    stream.read_exact(&mut head).await?;
    match wire::take_request(&head) {
        Ok(Some((Request::Read { id, total, .. }, _))) => Ok((id, total)),
        other => Err(io::Error::other(format!("{other:?}"))),
    }
}

fn reply(id: u64, len: u64, held: bool) -> [u8; wire::REPLY_LEN] {
    wire::encode_reply(&wire::Reply { status: wire::Status::Ok, held, placed: false, id, len })
}

#[tokio::test]
async fn a_connection_that_breaks_in_the_middle_is_tried_once_more() {
    let address = scripted(async |mut stream: TcpStream, connection: u64| {
        let (id, total) = next_read(&mut stream).await?;
        stream.write_all(&reply(id, total, false)).await?;
        if connection == 0 {
            // Half of the bytes, then gone.
            return stream.write_all(&vec![1; total as usize / 2]).await;
        }
        stream.write_all(&vec![2; total as usize]).await?;
        stream.write_all(&wire::encode_trailer(id, wire::Status::Ok)).await?;
        stream.read_u8().await.map(drop)
    })
    .await;
    let pool = PeerPool::new(None, quick().1);
    let got = pool.read(&address, &request(0, 100_000)).await.unwrap();
    assert!(got == vec![2; 100_000], "nothing of the first answer is left");
    assert_eq!((pool.stats().retries, pool.stats().errors), (1, 0));
}

#[tokio::test]
async fn a_connection_that_breaks_again_is_an_error() {
    let address = scripted(async |mut stream: TcpStream, _| {
        let (id, total) = next_read(&mut stream).await?;
        stream.write_all(&reply(id, total, false)).await?;
        stream.write_all(&vec![1; total as usize]).await
    })
    .await;
    let pool = PeerPool::new(None, quick().1);
    let broken = pool.read(&address, &request(0, 50_000)).await;
    assert!(matches!(broken, Err(ReadError::Unreachable(_))), "{broken:?}");
    assert_eq!((pool.stats().retries, pool.stats().errors), (1, 1));
}

#[tokio::test]
async fn wrong_replies_close_the_connection() {
    let wrong: [fn(u64, u64) -> Vec<u8>; 5] = [
        |id, total| reply(id + 1, total, false).to_vec(),
        |id, total| reply(id, total + 1, false).to_vec(),
        |id, total| [&reply(id, total, false)[..], &vec![1; total as usize], &[0; 16]].concat(),
        |_, _| vec![0xff; 64],
        |id, total| {
            let trailer = wire::encode_trailer(id + 1, wire::Status::Ok);
            [&reply(id, total, false)[..], &vec![1; total as usize], &trailer].concat()
        },
    ];
    for (case, wrong) in wrong.into_iter().enumerate() {
        let address = scripted(move |mut stream: TcpStream, _| async move {
            let (id, total) = next_read(&mut stream).await?;
            stream.write_all(&wrong(id, total)).await?;
            stream.read_u8().await.map(drop)
        })
        .await;
        let pool = PeerPool::new(None, quick().1);
        let result = pool.read(&address, &request(0, 5000)).await;
        assert!(matches!(result, Err(ReadError::Unreachable(_))), "case {case}: {result:?}");
    }
}

#[tokio::test]
async fn a_silent_peer_times_out_and_is_connected_anew() {
    let address = scripted(async |mut stream: TcpStream, connection: u64| {
        let (id, total) = next_read(&mut stream).await?;
        if connection > 0 {
            stream.write_all(&reply(id, total, true)).await?;
            stream.write_all(&vec![4; total as usize]).await?;
            stream.write_all(&wire::encode_trailer(id, wire::Status::Ok)).await?;
            let mut confirmation = [0; wire::REQUEST_LEN];
            stream.read_exact(&mut confirmation).await?;
            let confirmed = wire::take_request(&confirmation);
            assert_eq!(confirmed, Ok(Some((Request::Received { id }, wire::REQUEST_LEN))));
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
        Ok(())
    })
    .await;
    let pool = PeerPool::new(None, quick().1);
    let begin = Instant::now();
    assert_eq!(pool.read(&address, &request(0, 5000)).await, Err(ReadError::TimedOut));
    assert!(begin.elapsed() < Duration::from_secs(3));
    assert!(pool.read(&address, &request(0, 5000)).await.unwrap() == vec![4; 5000]);
    assert_eq!(pool.stats().connects, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_in_the_middle_of_many_reads_gives_whole_answers_or_errors() {
    let files = Arc::new(Files::new(Lending::Held));
    let content = Arc::new(files.fill(INO, 8 << 20, 1));
    for round in 0..5 {
        let server = serve(&files, ServeOptions::default()).await;
        let address = server.address().to_string();
        let pool = Arc::new(PeerPool::new(None, PoolOptions::default()));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let (pool, address, content) = (pool.clone(), address.clone(), content.clone());
            tasks.spawn(async move {
                let mut whole = 0;
                loop {
                    match pool.read(&address, &request(0, 8 << 20)).await {
                        Ok(got) => assert!(got == *content),
                        Err(ReadError::Unreachable(_)) => return whole,
                        Err(e) => panic!("{e:?}"),
                    }
                    whole += 1;
                }
            });
        }
        tokio::time::sleep(Duration::from_millis(20 + 17 * round)).await;
        drop(server);
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    }
    files.expect_all_holds_dropped().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_that_are_given_up_do_not_disturb_others() {
    let files = Arc::new(Files::new(Lending::Held));
    let content = files.fill(INO, 4 << 20, 1);
    let server = serve(&files, ServeOptions::default()).await;
    let address = server.address().to_string();
    let pool = PeerPool::new(None, PoolOptions::default());
    for i in 0..200u64 {
        let given_up = Duration::from_micros(i * 10);
        let whole = request(0, 4 << 20);
        let _ = tokio::time::timeout(given_up, pool.read(&address, &whole)).await;
        let start = i * 1000;
        let got = pool.read(&address, &request(start, start + 9000)).await.unwrap();
        assert!(got == content[start as usize..][..9000]);
    }
    files.expect_all_holds_dropped().await;
}

#[tokio::test]
async fn a_buffer_is_used_again() {
    let files = Arc::new(Files::new(Lending::Held));
    let content = files.fill(INO, 3 << 20, 1);
    let server = serve(&files, ServeOptions::default()).await;
    let address = server.address().to_string();
    let pool = PeerPool::new(None, PoolOptions::default());
    let mut buffer = bytes::BytesMut::with_capacity(3 << 20);
    let place = buffer.as_ptr();
    for _ in 0..5 {
        buffer = pool.read_into(&address, &request(0, 3 << 20), buffer).await.unwrap();
        assert!(buffer == content);
        assert_eq!(buffer.as_ptr(), place);
    }
}

#[tokio::test]
async fn a_node_without_rdma_says_so_and_the_connection_goes_on() {
    let files = Arc::new(Files::new(Lending::Held));
    let content = files.fill(INO, 1000, 1);
    let server = serve(&files, ServeOptions::default()).await;
    let mut stream = greeted(&server).await;
    let mut out = Vec::new();
    wire::put_meet(&mut out, 8);
    wire::put_read(&mut out, 9, INO, &[ByteRange::new(0, 1000)]);
    stream.write_all(&out).await.unwrap();
    let mut trailer = [0; wire::TRAILER_LEN];
    stream.read_exact(&mut trailer).await.unwrap();
    let no = wire::Status::Errno(ebb_types::Errno::EOPNOTSUPP);
    assert_eq!(wire::decode_trailer(&trailer, 8), Ok(no));
    let mut bytes = vec![0; wire::REPLY_LEN + 1000 + wire::TRAILER_LEN];
    stream.read_exact(&mut bytes).await.unwrap();
    assert!(bytes[wire::REPLY_LEN..][..1000] == content);
}

#[tokio::test]
async fn a_landing_without_rdma_ends_the_connection() {
    let files = Arc::new(Files::new(Lending::Held));
    files.fill(INO, 1000, 1);
    let server = serve(&files, ServeOptions::default()).await;
    let mut stream = greeted(&server).await;
    let mut out = Vec::new();
    let place = ebb_rdma::Place { address: 4096, key: 1 };
    wire::put_read_to(&mut out, 1, INO, &[ByteRange::new(0, 1000)], Some(place));
    stream.write_all(&out).await.unwrap();
    assert!(closes(&mut stream).await);
    assert_eq!((server.stats().errors, server.stats().bytes_sent, files.holds()), (1, 0, 0));
}
