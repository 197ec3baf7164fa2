//! Seats on the wire: who gets one, what others are answered, and when they are.

use crate::common::{Node, ROOT, Service};
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::notice::What;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::time::{Duration, Instant};

fn sit(ino: u64, id: u64, asked: bool) -> Op {
    let seat = Some(pb::Seat { id, asked });
    Op::Open(pb::Open { ino, write: true, seat, ..Default::default() })
}

async fn opened(node: &mut Node, op: Op) -> pb::Opened {
    match node.ask(op).await {
        Ok(Some(Body::Opened(opened))) => opened,
        other => panic!("{other:?}"),
    }
}

fn attach(ino: u64, start: u64, end: u64) -> Op {
    let ranges = vec![pb::Range { start, end }];
    Op::Attach(pb::Attach { ino, ranges, ..Default::default() })
}

fn query(ino: u64) -> Op {
    Op::Query(pb::Query { ino, ..Default::default() })
}

async fn asked(node: &mut Node) -> pb::Publish {
    loop {
        match node.notices.pop().and_then(|n| n.what) {
            Some(What::Publish(publish)) => return publish,
            Some(other) => panic!("{other:?}"),
            None => assert!(node.receive().await, "the stream ended"),
        }
    }
}

async fn published(node: &mut Node, publish: &pb::Publish, seated: bool) -> Result<(), Errno> {
    let pb::Publish { ino, seq, seat, .. } = *publish;
    node.ask(Op::Published(pb::Published { ino, seat, seq, seated })).await.map(drop)
}

/// Nothing was done by this answer but to say where it must be.
fn seat_of(body: Option<Body>) -> u32 {
    match body {
        Some(Body::Attached(a)) => a.seat,
        Some(Body::Opened(o)) => o.seat,
        Some(Body::Entry(e)) => e.seat,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_node_alone_gets_the_seat() {
    let service = Service::start().await;
    let (mut a, mut b) = (service.node("a").await, service.node("b").await);
    let ino = a.create(ROOT, "f").await;
    assert!(!opened(&mut a, sit(ino, 0, true)).await.seated, "without a number");
    assert!(opened(&mut a, sit(ino, 1, true)).await.seated);
    assert!(opened(&mut a, sit(ino, 2, true)).await.seated, "the same node once more");
    let b_opens = b.send(sit(ino, 1, true)).await;
    let publish = asked(&mut a).await;
    assert_eq!((publish.ino, publish.seat), (ino, 2));
    published(&mut a, &publish, true).await.expect("it sits here");
    assert_eq!(b.wait(b_opens).await.errno, 0);
    a.ask(Op::Release(pb::Release { ino, settles: false })).await.expect("release");
    // It is open at b now, which is not its seat.
    assert!(!opened(&mut a, sit(ino, 3, false)).await.seated);
    a.ask(Op::Release(pb::Release { ino, settles: false })).await.expect("release");
    assert!(opened(&mut b, sit(ino, 2, false)).await.seated);
    let not_mine = pb::Publish { ino, seq: 0, seat: 3, range: None };
    assert_eq!(published(&mut a, &not_mine, false).await, Err(Errno::ESTALE));
}

#[tokio::test]
async fn what_others_want_to_change_is_not_done_here() {
    let service = Service::start().await;
    let (mut a, mut b) = (service.node("a").await, service.node("b").await);
    let ino = a.create(ROOT, "f").await;
    assert!(opened(&mut a, sit(ino, 7, true)).await.seated);
    let version = a.attach(ino, 0, 10).await;
    let cut = pb::SetAttr { ino, size: Some(3), mode: Some(0o600), ..Default::default() };
    for op in [
        attach(ino, 5, 20),
        Op::Append(pb::Append { ino, len: 3, ..Default::default() }),
        Op::SetAttr(cut),
        Op::Open(pb::Open { ino, truncate: true, ..Default::default() }),
    ] {
        let text = format!("{op:?}");
        let id = b.send(op).await;
        let publish = asked(&mut a).await;
        assert!(b.is_quiet(id).await, "{text}");
        published(&mut a, &publish, true).await.expect("it sits here");
        let answer = b.wait(id).await;
        assert_eq!((answer.errno, seat_of(answer.body)), (0, a.id), "{text}");
    }
    let map = a.query(ino).await;
    assert_eq!((map.version, map.size, map.ranges.len()), (version, 10, 1));
    assert_ne!(a.attr(ino).await.expect("attributes").mode & 0o777, 0o600);
    // Guesses are refused as if others had the bytes.
    let guessed = vec![pb::Range { start: 50, end: 60 }];
    let guess = pb::Attach { ino, guessed: guessed.clone(), ..Default::default() };
    let id = b.send(Op::Attach(guess)).await;
    let publish = asked(&mut a).await;
    published(&mut a, &publish, true).await.expect("it sits here");
    match b.wait(id).await.body {
        Some(Body::Attached(done)) => assert_eq!((done.seat, done.contested), (0, guessed)),
        other => panic!("{other:?}"),
    }
    // So are quiet writes that are told late, and the right to more of them.
    let quiet = vec![pb::Range { start: 70, end: 80 }];
    let late = pb::Attach {
        ino,
        quiet: quiet.clone(),
        quiet_since: u64::MAX >> 1,
        quiet_wish: 100,
        settles: true,
        lease: 2,
        ..Default::default()
    };
    let id = b.send(Op::Attach(late)).await;
    let publish = asked(&mut a).await;
    published(&mut a, &publish, true).await.expect("it sits here");
    match b.wait(id).await.body {
        Some(Body::Attached(done)) => assert_eq!((done.quiet_end, done.overtaken), (0, quiet)),
        other => panic!("{other:?}"),
    }
    // What it is asked when it sits there no more is done here.
    let id = b.send(attach(ino, 5, 20)).await;
    let publish = asked(&mut a).await;
    published(&mut a, &publish, false).await.expect("it sat here");
    let answer = b.wait(id).await;
    assert_eq!((answer.errno, seat_of(answer.body)), (0, 0));
    assert_eq!(b.query(ino).await.size, 20);
}

#[tokio::test]
async fn others_are_told_when_everything_is_published() {
    let service = Service::start().await;
    let (mut a, mut b) = (service.node("a").await, service.node("b").await);
    let ino = a.create(ROOT, "f").await;
    assert!(opened(&mut a, sit(ino, 7, true)).await.seated);
    for op in [
        query(ino),
        Op::GetAttr(pb::GetAttr { ino, lease: 0, ..Default::default() }),
        Op::Lookup(pb::Lookup { parent: ROOT, name: b"f".into(), ..Default::default() }),
        Op::ReadDir(pb::ReadDir { ino: ROOT, limit: 10, ..Default::default() }),
        crate::common::lock(ino, 1, 0, false),
    ] {
        let text = format!("{op:?}");
        let size = a.query(ino).await.size;
        let (first, second) = (b.send(op.clone()).await, b.send(op).await);
        let (one, two) = (asked(&mut a).await, asked(&mut a).await);
        assert!(b.is_quiet(first).await, "{text}");
        a.attach(ino, size, size + 10).await;
        // Answers in another order than the questions.
        let (one, two) = if one.seq < two.seq { (one, two) } else { (two, one) };
        published(&mut a, &two, true).await.expect("it sits here");
        published(&mut a, &one, true).await.expect("it sits here");
        for id in [first, second] {
            let answer = b.wait(id).await;
            assert_eq!(answer.errno, 0, "{text}");
            let size_told = match answer.body {
                Some(Body::Map(map)) => map.size,
                Some(Body::Entry(entry)) => entry.attr.expect("attributes").size,
                Some(Body::DirPage(page)) => page.items[0].attr.as_ref().expect("attributes").size,
                _ => continue,
            };
            assert_eq!(size_told, size + 10, "{text}");
        }
    }
    // One that tells of its writes is not asked.
    a.ask(Op::Release(pb::Release { ino, settles: false })).await.expect("release");
    assert!(opened(&mut a, sit(ino, 8, false)).await.seated);
    b.query(ino).await;
    assert!(a.notices.is_empty(), "{:?}", a.notices);
}

#[tokio::test]
async fn nobody_is_told_anything_while_the_seat_is_silent() {
    let service = Service::start_with(|config| config.lease = Duration::from_millis(1500)).await;
    let (mut a, mut b) = (service.node("a").await, service.node("b").await);
    let ino = a.create(ROOT, "f").await;
    assert!(opened(&mut a, sit(ino, 7, true)).await.seated);
    let start = Instant::now();
    let id = b.send(query(ino)).await;
    tokio::spawn(async move {
        // b says that it lives; a does not.
        let answer = b.wait(id).await;
        assert_eq!(answer.errno, Errno::EIO.0, "{answer:?}");
        assert!(answer.text.contains("node a"), "{}", answer.text);
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        // Names are told all the same.
        assert_eq!(b.names(ROOT).await, ["f"]);
    })
    .await
    .expect("b");
}

#[tokio::test]
async fn a_restarted_service_knows_the_seat() {
    let service = Service::start().await;
    let mut a = service.node("a").await;
    let ino = a.create(ROOT, "f").await;
    assert!(opened(&mut a, sit(ino, 7, true)).await.seated);
    drop(a);
    // From the records, and then from the snapshot.
    let service = service.crash_and_restart(|_| {}).await;
    let service = service.crash_and_restart(|_| {}).await;
    let mut b = service.node("b").await;
    let id = b.send(query(ino)).await;
    assert!(b.is_quiet(id).await, "answered without the seat");
    // It comes back, and is asked there.
    let mut a = service.node("a").await;
    let publish = asked(&mut a).await;
    assert_eq!((publish.ino, publish.seat), (ino, 7));
    a.attach(ino, 0, 33).await;
    published(&mut a, &publish, true).await.expect("it sits here");
    match b.wait(id).await.body {
        Some(Body::Map(map)) => assert_eq!(map.size, 33),
        other => panic!("{other:?}"),
    }
    // For good.
    a.ask(Op::Goodbye(pb::Goodbye {})).await.expect("goodbye");
    b.query(ino).await;
}

/// A service that forgot where a file sits hears it, and asks there before others are told of the file.
/// Whoever says it second, or without having the file open, has no seat.
#[tokio::test]
async fn a_seat_that_is_forgotten_is_told_again() {
    let short = |c: &mut ebb_meta_server::Config| c.lease = Duration::from_secs(2);
    let service = Service::start_with(short).await;
    let mut a = service.node("a").await;
    let _b = service.node("b").await;
    let ino = a.create(ROOT, "f").await;
    let journal = service.journal();
    assert!(opened(&mut a, sit(ino, 7, true)).await.seated);
    let service = service.restart_on(journal, short).await;
    let join = |name| Node::join(service.address, name, 1, None);
    let (mut a, mut b) = (join("a").await.expect("a"), join("b").await.expect("b"));
    let knows = |open, id| {
        let seat = Some(pb::Seat { id, asked: true });
        let asks = vec![pb::KnownFile { ino, open, seat, ..Default::default() }];
        Op::Reassert(pb::Reassert { asks, ..Default::default() })
    };
    let done = || Op::Reassert(pb::Reassert { done: true, ..Default::default() });
    b.ask(knows(false, 5)).await.expect("told");
    a.ask(knows(true, 7)).await.expect("told");
    b.ask(knows(true, 6)).await.expect("told");
    let all_told = b.send(done()).await;
    a.ask(done()).await.expect("told");
    assert_eq!(b.wait(all_told).await.errno, 0);
    let id = b.send(query(ino)).await;
    let publish = asked(&mut a).await;
    assert_eq!((publish.ino, publish.seat), (ino, 7));
    assert!(b.is_quiet(id).await, "it is told before the seat has answered");
    published(&mut a, &publish, true).await.expect("it sits here");
    assert_eq!(b.wait(id).await.errno, 0);
}
