//! An end that was let in and sends what it must not, on a real device if there is one.

#![allow(clippy::unwrap_used)] // a failure here is a failed test

use crate::flow::{HEAD_BYTES, Head, MESSAGE_BYTES, WINDOW};
use crate::verbs::{Arena, Post, Tag};
use crate::{ANSWER_BYTES, Endpoint, HELLO_BYTES, Options, Stream, local};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

fn endpoint() -> Option<Endpoint> {
    let opened = local::choose(&local::gids(), None)
        .and_then(|address| Endpoint::open(Options::at(address)).map_err(|e| e.to_string()));
    match opened {
        Ok(endpoint) => Some(endpoint),
        Err(why) if std::env::var_os("EBB_REQUIRE_RDMA").is_none() => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

async fn connected(endpoint: &Endpoint, number: u8) -> (Stream, Stream) {
    let hello = [number; HELLO_BYTES];
    let expected = endpoint.expect(hello, [0; ANSWER_BYTES]).unwrap();
    let (near, _) = endpoint.connect(endpoint.address(), &hello).await.unwrap();
    (near, expected.connected().await.unwrap())
}

/// Past every rule of the stream.
fn send_raw(from: &Stream, arena: &Arc<Arena>, message: &[u8]) -> io::Result<()> {
    let mut block = arena.take().ok_or(io::ErrorKind::WouldBlock)?;
    block[..message.len()].copy_from_slice(message);
    from.inner.pair().post(&Post::Send, block, message.len(), Tag::Raw)
}

/// What the reader hears in the end.
async fn heard(of: &Stream) -> io::Error {
    let mut sink = Vec::new();
    loop {
        match of.try_read_buf(&mut sink) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => of.readable().await.unwrap(),
            Err(e) => return e,
            Ok(0) => panic!("an end without an error"),
            Ok(_) => {}
        }
    }
}

#[test]
fn what_breaks_the_rules_ends_its_connection_and_no_other() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        let Some(endpoint) = endpoint() else { return };
        let arena = Arena::new(endpoint.domain(), MESSAGE_BYTES, 64).unwrap();
        let (other_near, other_far) = connected(&endpoint, 1).await;
        let message = |credits, bytes: &[u8]| {
            [&Head { credits, len: bytes.len() as u32 }.encode()[..], bytes].concat()
        };
        let mut longer = message(0, b"abc");
        longer.push(0);
        let cases = [
            vec![vec![0x5a; 100]],
            vec![vec![1]],
            vec![longer],
            vec![message(1, b"a")],
            vec![message(u16::MAX, b"a")],
            vec![message(0, &[7; MESSAGE_BYTES - HEAD_BYTES]); usize::from(WINDOW) + 1],
        ];
        for (number, case) in (2..).zip(cases) {
            let (near, far) = connected(&endpoint, number).await;
            for message in &case {
                while let Err(e) = send_raw(&near, &arena, message) {
                    if e.kind() != io::ErrorKind::WouldBlock {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            // A reader that does not read either: the message past the window is seen all the same.
            tokio::time::sleep(Duration::from_millis(100)).await;
            let why = timeout(Duration::from_secs(60), heard(&far)).await.expect("it is told");
            assert!(why.to_string().contains("the other end"), "{number}: {why}");
        }
        assert_eq!(other_near.try_write(b"goes on").unwrap(), 7);
        let mut got = Vec::new();
        while got.is_empty() {
            if other_far.try_read_buf(&mut got).is_err() {
                timeout(Duration::from_secs(60), other_far.readable()).await.unwrap().unwrap();
            }
        }
        assert_eq!(got, b"goes on");
    });
}
