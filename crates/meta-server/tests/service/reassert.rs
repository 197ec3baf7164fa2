//! A service whose journal another boot wrote: nodes tell it what it may have forgotten, whoever they are
//! and whenever they come.

#![allow(clippy::unwrap_used)]

use crate::common::{Node, ROOT, Service};
use ebb_types::Errno;
use ebb_wire::pb::asserted::Kind;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use ebb_wire::pb::{self, Asserted, Assertion, Reassert};
use std::time::{Duration, Instant};

const LEASE: Duration = Duration::from_secs(2);

async fn two_nodes() -> (Service, u64) {
    let s = Service::start_with(|c| c.lease = LEASE).await;
    let mut a = s.node("a").await;
    let _b = s.node("b").await;
    let ino = a.create(ROOT, "f").await;
    a.attach(ino, 0, 10).await;
    (s.restart_after_a_boot(|c| c.lease = LEASE).await, ino)
}

fn all() -> Option<pb::Range> {
    Some(pb::Range { start: 0, end: u64::MAX })
}

fn own(start: u64, end: u64, version: u64) -> Asserted {
    Asserted { start, end, kind: Kind::Own.into(), node: 0, version, as_of: 0 }
}

fn of(ino: u64, claims: Vec<Asserted>) -> Assertion {
    Assertion { ino, covers: all(), claims, ..Assertion::default() }
}

fn tell(file: Assertion) -> Op {
    Op::Reassert(Reassert { files: vec![file], ..Reassert::default() })
}

fn done() -> Op {
    Op::Reassert(Reassert { done: true, ..Reassert::default() })
}

async fn back(s: &Service, name: &str) -> Node {
    Node::join(s.address, name, 1, None).await.unwrap()
}

#[tokio::test]
async fn requests_wait_until_every_node_has_told() {
    let (s, ino) = two_nodes().await;
    let (mut a, mut b) = (back(&s, "a").await, back(&s, "b").await);
    assert!(a.welcome.reassert && b.welcome.reassert);
    let query = Op::Query(pb::Query { ino, range: all(), ..pb::Query::default() });
    let asked = b.send(query).await;
    b.ask(Op::Heartbeat(pb::Heartbeat::default())).await.unwrap();
    assert!(b.is_quiet(asked).await);
    b.send(done()).await;
    assert!(b.is_quiet(asked).await, "the other one has not told");
    a.ask(tell(of(ino, vec![own(10, 20, 9)]))).await.unwrap();
    a.ask(done()).await.unwrap();
    let Some(Body::Map(map)) = b.wait(asked).await.body else { panic!("no map") };
    assert_eq!((map.size, map.ranges[0].node, map.ranges[0].end), (20, a.id, 20));
    // Nothing of then is given out again.
    let version = a.attach(ino, 0, 1).await;
    assert!(version > 1 << 34, "{version}");
}

#[tokio::test]
async fn nobody_is_waited_for_longer_than_a_lease_and_who_comes_late_is_heard() {
    let (s, ino) = two_nodes().await;
    let begun = Instant::now();
    let mut b = back(&s, "b").await;
    b.ask(done()).await.unwrap();
    assert!(begun.elapsed() < LEASE * 3, "{:?}", begun.elapsed());
    assert!(begun.elapsed() > LEASE / 2, "{:?}", begun.elapsed());
    b.attach(ino, 12, 14).await;
    let mut a = back(&s, "a").await;
    assert!(a.welcome.reassert, "it has not told yet");
    a.ask(tell(of(ino, vec![own(10, 20, 9)]))).await.unwrap();
    a.ask(done()).await.unwrap();
    let map = b.query(ino).await;
    let found: Vec<_> = map.ranges.iter().map(|r| (r.start, r.end, r.node)).collect();
    assert_eq!(found, [(0, 12, a.id), (12, 14, b.id), (14, 20, a.id)], "what came since is newer");
    // Once everybody has told, there is nothing more to be told.
    a.ask(tell(of(ino, vec![own(10, 20, 9)]))).await.unwrap();
    a.ask(tell(of(ino, vec![own(30, 40, 10)]))).await.unwrap();
    assert_eq!(b.query(ino).await.size, 20);
}

/// It goes on asking after another crash, and after one within the same boot as well.
#[tokio::test]
async fn who_has_not_told_still_owes_it_to_the_next_service() {
    let (s, ino) = two_nodes().await;
    let mut b = back(&s, "b").await;
    b.send(done()).await;
    b.ask(Op::Heartbeat(pb::Heartbeat::default())).await.unwrap();
    let s = s.crash_and_restart(|c| c.lease = LEASE).await;
    let (mut a, mut b) = (back(&s, "a").await, back(&s, "b").await);
    assert!(a.welcome.reassert && !b.welcome.reassert);
    a.ask(tell(of(ino, vec![own(10, 20, 9)]))).await.unwrap();
    a.ask(done()).await.unwrap();
    assert_eq!(b.query(ino).await.size, 20);
    let s = s.crash_and_restart(|c| c.lease = LEASE).await;
    assert!(!back(&s, "a").await.welcome.reassert);
    let version = back(&s, "b").await.attach(ino, 0, 1).await;
    assert!(version > 1 << 34, "{version}");
}

#[tokio::test]
async fn only_files_with_news_are_wanted() {
    let (s, ino) = two_nodes().await;
    let (mut a, mut b) = (back(&s, "a").await, back(&s, "b").await);
    let asks = |newest, owns| {
        let known = pb::KnownFile { ino, newest, owns, ..Default::default() };
        let unknown = pb::KnownFile { ino: 999, newest: 5, owns: true, ..Default::default() };
        Op::Reassert(Reassert { asks: vec![known, unknown], ..Reassert::default() })
    };
    let wanted = |body: Option<Body>| match body {
        Some(Body::Wanted(w)) => (w.files.iter().map(|f| f.ino).collect::<Vec<_>>(), w.unknown),
        other => panic!("{other:?}"),
    };
    assert_eq!(wanted(b.ask(asks(2, false)).await.unwrap()), (vec![], vec![999]));
    assert_eq!(wanted(b.ask(asks(3, false)).await.unwrap()), (vec![ino], vec![999]));
    assert_eq!(wanted(b.ask(asks(1, true)).await.unwrap()), (vec![ino], vec![999]));
    // What counts as the asker's is wanted: it may have given it back.
    assert_eq!(wanted(a.ask(asks(0, false)).await.unwrap()), (vec![ino], vec![999]));
}

#[tokio::test]
async fn nonsense_is_refused_and_changes_nothing() {
    let (s, ino) = two_nodes().await;
    let (mut a, mut b) = (back(&s, "a").await, back(&s, "b").await);
    let known = |version, as_of| Asserted {
        start: 0,
        end: 9,
        kind: Kind::Known.into(),
        node: 7,
        version,
        as_of,
    };
    let bad = [
        of(ino, vec![own(5, 5, 9)]),
        of(ino, vec![own(7, 5, 9)]),
        of(ino, vec![own(5, 9, 9), own(8, 12, 9)]),
        of(ino, vec![own(0, u64::MAX, 9)]),
        of(ino, vec![known(9, 8)]),
        of(ino, vec![Asserted { kind: 77, ..own(0, 4, 9) }]),
        Assertion { covers: None, ..of(ino, vec![]) },
        Assertion { covers: Some(pb::Range { start: 3, end: 4 }), ..of(ino, vec![own(0, 9, 9)]) },
        Assertion { size: u64::MAX, size_as_of: 9, ..of(ino, vec![]) },
        Assertion { base_len: u64::MAX, base_len_as_of: 9, ..of(ino, vec![]) },
        Assertion { mtime: Some(pb::Time { sec: 0, nsec: u32::MAX }), ..of(ino, vec![]) },
    ];
    for (case, file) in bad.into_iter().enumerate() {
        let told = a.ask(tell(file)).await;
        assert!(matches!(told, Err(Errno::EPROTO | Errno::EFBIG)), "case {case}: {told:?}");
    }
    // From after the leap, and of a file that is not there: nothing.
    a.ask(tell(of(ino, vec![own(0, 99, 1 << 62)]))).await.unwrap();
    a.ask(tell(of(12345, vec![own(0, 99, 9)]))).await.unwrap();
    a.ask(done()).await.unwrap();
    b.ask(done()).await.unwrap();
    let map = b.query(ino).await;
    assert_eq!((map.size, map.ranges.len(), map.ranges[0].end), (10, 1, 10));
}

/// A file's first flush is forgotten: where that left the bytes is found, in the part file or under the
/// name, and where there is nothing, they are to be flushed again. Never are they taken for zeros.
#[tokio::test]
async fn where_a_forgotten_first_flush_left_the_bytes_is_found() {
    for (published, removed) in [(false, false), (true, false), (false, true)] {
        let what = format!("published: {published}, removed: {removed}");
        let s = Service::start_with(|c| c.lease = LEASE).await;
        let mut a = s.node("a").await;
        let ino = a.create(ROOT, "f").await;
        let version = a.attach(ino, 0, 10).await;
        let journal = s.journal();
        a.flush(&s.backing(), ino, b'x').await;
        if published {
            a.materialize().await;
        }
        drop(a);
        let s = s.restart_on(journal, |c| c.lease = LEASE).await;
        let there = || std::fs::read_dir(s.backing()).unwrap().flatten().collect::<Vec<_>>();
        assert_eq!(there().len(), 1, "{what}");
        if removed {
            std::fs::remove_file(there()[0].path()).unwrap();
        }
        let mut a = back(&s, "a").await;
        let flushed = Asserted { kind: Kind::OwnFlushed.into(), ..own(0, 10, version) };
        let told =
            Assertion { size: 10, size_as_of: version, complete: true, ..of(ino, vec![flushed]) };
        let Some(Body::Wanted(wanted)) = a.ask(tell(told)).await.unwrap() else { panic!("{what}") };
        assert_eq!(wanted.unflushed, if removed { vec![ino] } else { vec![] }, "{what}");
        a.ask(done()).await.unwrap();
        if removed {
            a.flush(&s.backing(), ino, b'x').await;
        }
        assert_eq!(a.materialize().await.remaining, 0, "{what}");
        let name = s.backing().join("f");
        assert_eq!(std::fs::read(&name).unwrap(), b"xxxxxxxxxx", "{what}");
        assert_eq!(there().len(), 1, "{what}: a part file is left");
    }
}
