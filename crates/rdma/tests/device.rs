//! Endpoints on a real device, both ends in this process: what a stream carries, what a landing takes, and
//! what is told when something is wrong. Without a device there is nothing to test; where there must be one
//! `EBB_REQUIRE_RDMA=1` says so.
#![cfg(feature = "verbs")]
#![allow(clippy::unwrap_used)] // a failure here is a failed test

use bytes::{BufMut, BytesMut};
use ebb_rdma::{
    ANSWER_BYTES, Answer, Endpoint, HELLO_BYTES, Hello, Options, STAGED_BYTES, Stream, flow, local,
};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::timeout;

const ANSWER: Answer = [7; ANSWER_BYTES];

fn endpoint() -> Option<Arc<Endpoint>> {
    let opened = local::choose(&local::gids(), None)
        .and_then(|address| Endpoint::open(Options::at(address)).map_err(|e| e.to_string()));
    match opened {
        Ok(endpoint) => Some(Arc::new(endpoint)),
        Err(why) if std::env::var_os("EBB_REQUIRE_RDMA").is_none() => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

fn hello() -> Hello {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut hello = [9; HELLO_BYTES];
    hello[..8].copy_from_slice(&NEXT.fetch_add(1, Relaxed).to_le_bytes());
    hello
}

/// Both ends of a connection.
async fn connected(endpoint: &Endpoint) -> (Stream, Stream) {
    let hello = hello();
    let expected = endpoint.expect(hello, ANSWER).unwrap();
    let (near, answer) = endpoint.connect(endpoint.address(), &hello).await.unwrap();
    assert_eq!(answer, ANSWER);
    (near, expected.connected().await.unwrap())
}

async fn write_all(stream: &Stream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// So many bytes, or as many as there are until the end.
async fn read(stream: &Stream, len: usize) -> io::Result<Vec<u8>> {
    let mut got = Vec::with_capacity(len);
    while got.len() < len {
        let rest = len - got.len();
        match stream.try_read_buf(&mut (&mut got).limit(rest)) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => stream.readable().await?,
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + 1).wrapping_mul(seed | 1) >> 7) as u8).collect()
}

/// Runs a test where there is a device, for two minutes at most (under emulation everything is slow).
fn on_device<F: Future<Output = ()>>(test: impl FnOnce(Arc<Endpoint>) -> F) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        if let Some(endpoint) = endpoint() {
            timeout(Duration::from_secs(120), test(endpoint)).await.expect("in time");
        }
    });
}

#[test]
fn streams_carry_bytes_in_order_both_ways() {
    on_device(|endpoint| async move {
        let (near, far) = connected(&endpoint).await;
        let (near, far) = (Arc::new(near), Arc::new(far));
        for len in [1, 7, 212, 213, 8184, 8185, 100_000, 3_000_000] {
            let (there, back) = (Arc::new(bytes(len, 3)), Arc::new(bytes(len, 5)));
            let mut tasks = tokio::task::JoinSet::new();
            for (out, into, bytes) in [(&near, &far, there), (&far, &near, back)] {
                let (out, into, copy) = (Arc::clone(out), Arc::clone(into), Arc::clone(&bytes));
                tasks.spawn(async move { write_all(&out, &copy).await.unwrap() });
                tasks.spawn(async move {
                    assert!(read(&into, bytes.len()).await.unwrap() == *bytes, "{}", bytes.len());
                });
            }
            while let Some(done) = tasks.join_next().await {
                done.unwrap();
            }
        }
    });
}

#[test]
fn what_is_written_to_a_landing_is_there_before_the_word_of_it() {
    on_device(|endpoint| async move {
        let (near, far) = connected(&endpoint).await;
        for round in 0..20 {
            let len = [1, 4096, STAGED_BYTES, 5 * STAGED_BYTES + 3][round % 4];
            let landing = endpoint.land(BytesMut::zeroed(len)).unwrap();
            let content = bytes(len, round as u64);
            for (i, piece) in content.chunks(STAGED_BYTES).enumerate() {
                let mut staged = far.stage().await.unwrap();
                staged[..piece.len()].copy_from_slice(piece);
                let place = landing.place(i * STAGED_BYTES);
                far.write_to(staged, piece.len(), place).await.unwrap();
            }
            write_all(&far, b"x").await.unwrap();
            assert_eq!(read(&near, 1).await.unwrap(), b"x");
            assert!(landing.take() == content, "round {round}");
        }
        assert_eq!(endpoint.stats().landing_bytes, 0);
    });
}

#[test]
fn only_who_is_expected_comes_in_and_only_once() {
    on_device(|endpoint| async move {
        let to = endpoint.address();
        let right = hello();
        let mut wrong = right;
        wrong[20] ^= 1;
        let expected = endpoint.expect(right, ANSWER).unwrap();
        let refused = |tried: io::Result<(Stream, Answer)>| tried.unwrap_err().to_string();
        assert!(refused(endpoint.connect(to, &wrong).await).contains("refuses"), "wrong proof");
        assert!(refused(endpoint.connect(to, &hello()).await).contains("refuses"), "a stranger");
        let near = endpoint.connect(to, &right).await.unwrap();
        let far = expected.connected().await.unwrap();
        assert!(refused(endpoint.connect(to, &right).await).contains("refuses"), "it is used up");
        drop(endpoint.expect(right, ANSWER).unwrap());
        assert!(refused(endpoint.connect(to, &right).await).contains("refuses"), "taken back");
        assert_eq!(endpoint.stats().refused, 4);
        drop((near, far));
        let mut nobody = to;
        nobody.set_port(1);
        assert!(endpoint.connect(nobody, &right).await.is_err());
    });
}

#[test]
fn a_landing_that_was_taken_back_is_not_written_and_its_writer_hears_so() {
    on_device(|endpoint| async move {
        let (near, far) = connected(&endpoint).await;
        let (_other_near, other_far) = connected(&endpoint).await;
        let landing = endpoint.land(BytesMut::zeroed(8192)).unwrap();
        let place = landing.place(0);
        let buffer = landing.take();
        let mut staged = far.stage().await.unwrap();
        staged[..8192].fill(1);
        far.write_to(staged, 8192, place).await.unwrap();
        let broken = loop {
            match write_all(&far, b"x").await {
                Ok(()) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(e) => break e,
            }
        };
        assert!(broken.to_string().contains("may not be written"), "{broken}");
        assert!(read(&near, 1 << 20).await.is_err() || near.try_write(b"x").is_err());
        assert!(buffer.iter().all(|b| *b == 0), "nothing was written");
        write_all(&other_far, b"other connections go on").await.unwrap();
    });
}

#[test]
fn a_reader_that_stands_still_stops_its_writer_and_nobody_else() {
    on_device(|endpoint| async move {
        let (near, far) = connected(&endpoint).await;
        let (other_near, other_far) = connected(&endpoint).await;
        let content = bytes(4 << 20, 11);
        let mut sent = 0;
        // Until nothing is taken for a while.
        loop {
            while let Ok(n) = far.try_write(&content[sent..]) {
                sent += n;
            }
            if timeout(Duration::from_millis(500), far.writable()).await.is_err() {
                break;
            }
        }
        let most = usize::from(flow::WINDOW) * flow::MESSAGE_BYTES;
        assert!(sent > 0 && sent <= most, "{sent} of at most {most} bytes are ahead");
        write_all(&other_far, &content[..500_000]).await.unwrap_or_else(|e| panic!("{e}"));
        assert!(read(&other_near, 500_000).await.unwrap() == content[..500_000]);
        let rest = content[sent..].to_vec();
        let writer = tokio::spawn(async move {
            write_all(&far, &rest).await.unwrap();
            far
        });
        assert!(read(&near, content.len()).await.unwrap() == content);
        writer.await.unwrap();
    });
}

#[test]
fn connections_come_and_go_and_no_memory_stays() {
    on_device(|endpoint| async move {
        let before = endpoint.stats();
        for round in 0..30 {
            let (near, far) = connected(&endpoint).await;
            write_all(&near, &bytes(10_000, round)).await.unwrap();
            if round % 2 == 0 {
                assert!(read(&far, 10_000).await.unwrap() == bytes(10_000, round));
            }
            drop(near);
            // The other end hears of it: an end, or an error, and not silence.
            let rest = timeout(Duration::from_secs(20), read(&far, 1 << 20)).await;
            assert!(rest.is_ok(), "round {round}");
        }
        let after = endpoint.stats();
        assert_eq!(after.connections, 0);
        assert_eq!(after.registered_bytes, before.registered_bytes);
    });
}

#[test]
fn landings_are_bounded() {
    on_device(|endpoint| async move {
        let most = Options::at(endpoint.address().ip()).landing_bytes_max as usize;
        let half = endpoint.land(BytesMut::zeroed(most / 2 + 1)).unwrap();
        assert!(endpoint.land(BytesMut::zeroed(most / 2 + 1)).is_err());
        drop(half);
        assert!(endpoint.land(BytesMut::zeroed(most / 2 + 1)).is_ok());
        assert_eq!(endpoint.stats().landing_bytes, 0);
    });
}
