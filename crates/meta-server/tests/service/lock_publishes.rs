//! A lock is answered when the other nodes that have the file open have published what they wrote there.

#![allow(clippy::unwrap_used)]

use crate::common::{Node, ROOT, Service};
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::notice::What;
use ebb_wire::pb::request::Op;
use std::time::Duration;

const READ: u32 = 0;
const WRITE: u32 = 1;

fn lock(ino: u64, kind: u32, publish: bool) -> Op {
    lock_of(ino, (10, 20), kind, publish)
}

fn lock_of(ino: u64, (start, end): (u64, u64), kind: u32, publish: bool) -> Op {
    let range = Some(pb::Range { start, end });
    let (owner, pid, wait) = (1, 1, true);
    Op::SetLock(pb::SetLock { ino, owner, pid, range, r#type: kind, flock: false, wait, publish })
}

fn unlock(ino: u64) -> Op {
    lock(ino, 2, false)
}

/// The next question to a node.
async fn asked(node: &mut Node) -> pb::Publish {
    let ask = async {
        loop {
            if let Some(What::Publish(p)) = node.notices.pop().and_then(|n| n.what) {
                return p;
            }
            assert!(node.receive().await, "the stream ended");
        }
    };
    tokio::time::timeout(Duration::from_secs(10), ask).await.expect("a question")
}

async fn answer(node: &mut Node, p: &pb::Publish) {
    let published = pb::Published { ino: p.ino, seat: p.seat, seq: p.seq, seated: false };
    node.ask(Op::Published(published)).await.unwrap();
}

#[tokio::test]
async fn a_lock_waits_until_all_others_have_published() {
    let s = Service::start().await;
    let (mut a, mut b, mut c) = (s.node("a").await, s.node("b").await, s.node("c").await);
    let file = a.create(ROOT, "f").await;
    for node in [&mut a, &mut b, &mut c] {
        node.open(file).await.unwrap();
    }
    for kind in [WRITE, READ] {
        let id = a.send(lock(file, kind, true)).await;
        let (to_b, to_c) = (asked(&mut b).await, asked(&mut c).await);
        for p in [&to_b, &to_c] {
            assert_eq!((p.ino, p.seat), (file, 0));
            assert_eq!(p.range, Some(pb::Range { start: 10, end: 20 }));
        }
        answer(&mut b, &to_b).await;
        assert!(a.is_quiet(id).await, "not before the last one");
        b.attach(file, 12, 13).await;
        answer(&mut c, &to_c).await;
        assert_eq!(a.wait(id).await.errno, 0);
        a.ask(unlock(file)).await.unwrap();
    }
    assert!(a.notices.is_empty(), "who locks is not asked");
}

#[tokio::test]
async fn nobody_is_asked_who_cannot_have_written_or_where_writes_publish() {
    let s = Service::start().await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let file = a.create(ROOT, "f").await;
    a.open(file).await.unwrap();
    a.ask(lock(file, WRITE, true)).await.unwrap();
    a.ask(unlock(file)).await.unwrap();
    b.open(file).await.unwrap();
    a.ask(lock(file, WRITE, false)).await.unwrap();
    a.ask(unlock(file)).await.unwrap();
    b.ask(Op::Release(pb::Release { ino: file, settles: false })).await.unwrap();
    a.ask(lock(file, WRITE, true)).await.unwrap();
    // Whatever was sent to it comes before this answer.
    b.attr(file).await.unwrap();
    assert!(b.notices.is_empty(), "{:?}", b.notices);
}

/// Both wait for the other one to publish, and none for the other one's lock.
#[tokio::test]
async fn two_locks_at_the_same_time_ask_each_other() {
    let s = Service::start().await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let file = a.create(ROOT, "f").await;
    a.open(file).await.unwrap();
    b.open(file).await.unwrap();
    let first = a.send(lock(file, WRITE, true)).await;
    let to_b = asked(&mut b).await;
    let second = b.send(lock(file, WRITE, true)).await;
    answer(&mut b, &to_b).await;
    assert_eq!(a.wait(first).await.errno, 0);
    assert!(b.is_quiet(second).await, "the first one has it");
    a.ask(unlock(file)).await.unwrap();
    let to_a = asked(&mut a).await;
    assert!(b.is_quiet(second).await, "granted, and not published");
    answer(&mut a, &to_a).await;
    assert_eq!(b.wait(second).await.errno, 0);
    // It is held: nobody else gets it.
    let Op::SetLock(again) = lock(file, READ, false) else { unreachable!() };
    let again = Op::SetLock(pb::SetLock { wait: false, ..again });
    assert_eq!(a.ask(again).await, Err(Errno::EAGAIN));
}

#[tokio::test]
async fn a_silent_node_holds_a_lock_up_for_its_lease_at_most() {
    let s = Service::start_with(|c| c.lease = Duration::from_secs(1)).await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let file = a.create(ROOT, "f").await;
    a.open(file).await.unwrap();
    b.open(file).await.unwrap();
    let id = a.send(lock(file, WRITE, true)).await;
    assert!(a.is_quiet(id).await);
    // It says nothing more.
    drop(b);
    let beat = tokio::time::Instant::now() + Duration::from_secs(15);
    while a.is_quiet(id).await {
        assert!(tokio::time::Instant::now() < beat, "still not granted");
        a.ask(Op::Heartbeat(pb::Heartbeat { dirty_bytes: 0, ..Default::default() })).await.unwrap();
    }
    assert_eq!(a.wait(id).await.errno, 0);
}

/// True when the node gets a lock of these bytes at once; it is given up again.
async fn is_free(node: &mut Node, ino: u64, bytes: (u64, u64)) -> bool {
    let Op::SetLock(asked) = lock_of(ino, bytes, WRITE, false) else { unreachable!() };
    match node.ask(Op::SetLock(pb::SetLock { wait: false, ..asked })).await {
        Ok(_) => {
            node.ask(lock_of(ino, bytes, 2, false)).await.unwrap();
            true
        }
        Err(e) => {
            assert_eq!(e, Errno::EAGAIN);
            false
        }
    }
}

/// Two nodes that have a file open: the second one is there, and publishes only when it is told to.
async fn one_that_does_not_publish(within: Duration) -> (Service, Node, Node, u64) {
    let s = Service::start_with(|c| c.publishes_within = within).await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let file = a.create(ROOT, "f").await;
    a.open(file).await.unwrap();
    b.open(file).await.unwrap();
    (s, a, b, file)
}

#[tokio::test]
async fn where_a_node_cannot_publish_the_lock_fails_and_is_given_back() {
    let within = Duration::from_secs(1);
    let (_s, mut a, mut b, file) = one_that_does_not_publish(within).await;
    let began = tokio::time::Instant::now();
    let id = a.send(lock(file, WRITE, true)).await;
    asked(&mut b).await;
    assert!(!is_free(&mut b, file, (10, 20)).await);
    while a.is_quiet(id).await {
        b.ask(Op::Heartbeat(pb::Heartbeat { dirty_bytes: 0, ..Default::default() })).await.unwrap();
    }
    let failed = a.wait(id).await;
    assert!(began.elapsed() >= within);
    assert_eq!(failed.errno, Errno::EIO.0);
    assert!(failed.text.contains("node b does not publish"), "{}", failed.text);
    assert!(is_free(&mut b, file, (0, 30)).await);
}

/// A program was interrupted and asks again: the end of its first call does not take what the second
/// one has got.
#[tokio::test]
async fn a_call_that_fails_gives_back_nothing_of_a_later_one() {
    let (_s, mut a, mut b, file) = one_that_does_not_publish(Duration::from_secs(2)).await;
    let first = a.send(lock(file, WRITE, true)).await;
    asked(&mut b).await;
    let second = a.send(lock_of(file, (15, 30), WRITE, true)).await;
    let of_second = asked(&mut b).await;
    answer(&mut b, &of_second).await;
    assert_eq!(a.wait(second).await.errno, 0);
    assert_eq!(a.wait(first).await.errno, Errno::EIO.0);
    assert!(!is_free(&mut b, file, (15, 20)).await, "the second call has it");
    assert!(!is_free(&mut b, file, (20, 30)).await);
    assert!(is_free(&mut b, file, (10, 15)).await, "nobody else has it");
    a.ask(lock_of(file, (15, 30), 2, false)).await.unwrap();
    assert!(is_free(&mut b, file, (0, 40)).await);
}

#[tokio::test]
async fn calls_that_all_fail_give_back_everything() {
    let (_s, mut a, mut b, file) = one_that_does_not_publish(Duration::from_secs(1)).await;
    let first = a.send(lock(file, WRITE, true)).await;
    let second = a.send(lock_of(file, (15, 30), WRITE, true)).await;
    for id in [first, second] {
        assert_eq!(a.wait(id).await.errno, Errno::EIO.0);
    }
    assert!(is_free(&mut b, file, (0, 40)).await);
}

/// The first call waits for another one's lock when the second one is asked for.
#[tokio::test]
async fn a_call_that_waited_gives_back_what_it_was_granted_last() {
    let (_s, mut a, mut b, file) = one_that_does_not_publish(Duration::from_secs(1)).await;
    b.ask(lock(file, WRITE, false)).await.unwrap();
    let first = a.send(lock(file, WRITE, true)).await;
    assert!(a.is_quiet(first).await);
    a.ask(lock_of(file, (20, 30), WRITE, false)).await.unwrap();
    b.ask(unlock(file)).await.unwrap();
    asked(&mut b).await;
    assert_eq!(a.wait(first).await.errno, Errno::EIO.0);
    assert!(is_free(&mut b, file, (10, 20)).await);
    assert!(!is_free(&mut b, file, (20, 30)).await, "another lock of its owner");
}
