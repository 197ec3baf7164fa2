//! Leases on the wire: granted with answers, called back before a change is acknowledged, ended by
//! their time, by a new stream, and by a goodbye.

use crate::common::{Node, ROOT, Service, write_granted};
use ebb_wire::pb;
use ebb_wire::pb::notice::What;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::time::{Duration, Instant};

const TRUST: Duration = Duration::from_millis(1500);

async fn service() -> Service {
    Service::start_with(|config| config.trust = TRUST).await
}

async fn join(service: &Service, name: &str, incarnation: u64) -> Node {
    let hello = pb::Hello {
        protocol: ebb_wire::PROTOCOL,
        node: name.to_owned(),
        incarnation,
        peer_address: "127.0.0.1:1".to_owned(),
        consistency: "session".to_owned(),
        trust_ms_max: 60_000,
        heir_of: Vec::new(),
        ..Default::default()
    };
    let node = Node::join_as(service.address, hello, None).await.expect("joined");
    assert_eq!(u128::from(node.welcome.trust_ms), TRUST.as_millis());
    node
}

async fn query(node: &mut Node, ino: u64) -> pb::Lease {
    match node.ask(Op::Query(pb::Query { ino, lease: 2, ..Default::default() })).await {
        Ok(Some(Body::Map(map))) => map.lease.expect("a lease"),
        other => panic!("{other:?}"),
    }
}

fn attach(ino: u64) -> Op {
    let ranges = vec![pb::Range { start: 0, end: 10 }];
    Op::Attach(pb::Attach { ino, ranges, ..Default::default() })
}

async fn recall(node: &mut Node) -> pb::Recall {
    loop {
        if let Some(notice) = node.notices.pop() {
            match notice.what {
                Some(What::Recall(recall)) => return recall,
                other => panic!("{other:?}"),
            }
        }
        assert!(node.receive().await, "the stream ended");
    }
}

#[tokio::test]
async fn a_change_waits_for_the_holder_and_for_nobody_else() {
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    let mut c = join(&service, "c", 1).await;
    let ino = a.create(ROOT, "f").await;
    let own = query(&mut a, ino).await;
    let lease = query(&mut b, ino).await;
    assert!(lease.seq > own.seq);
    let first = a.send(attach(ino)).await;
    assert!(a.is_quiet(first).await, "acknowledged although b may trust what was before");
    let called = recall(&mut b).await;
    assert_eq!(called.ino, ino);
    assert!(called.seq > lease.seq);
    // Nobody hears of the change before b does: not even c, who asks.
    let asked = c.send(Op::Query(pb::Query { ino, ..Default::default() })).await;
    assert!(c.is_quiet(asked).await, "c hears of what b does not know");
    let returned = pb::Returned { ino, seq: called.seq };
    b.ask(Op::Returned(returned)).await.unwrap();
    assert_eq!(a.wait(first).await.errno, 0);
    assert_eq!(c.wait(asked).await.errno, 0);
    // The one who changes it keeps its own lease, and nobody holds another one.
    a.ask(attach(ino)).await.unwrap();
    assert!(a.notices.is_empty(), "{:?}", a.notices);
}

#[tokio::test]
async fn names_and_attributes_are_part_of_it() {
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    let ino = a.create(ROOT, "f").await;
    for op in [
        Op::SetAttr(pb::SetAttr { ino, mode: Some(0o600), ..Default::default() }),
        Op::SetAttr(pb::SetAttr { ino, size: Some(5), ..Default::default() }),
        Op::Append(pb::Append { ino, len: 3, ..Default::default() }),
        Op::Link(pb::Link { ino, new_parent: ROOT, new_name: b"g".to_vec(), ..Default::default() }),
        Op::Unlink(pb::Unlink {
            parent: ROOT,
            name: b"g".to_vec(),
            dir: false,
            ..Default::default()
        }),
        Op::Open(pb::Open { ino, truncate: true, ..Default::default() }),
    ] {
        query(&mut b, ino).await;
        let text = format!("{op:?}");
        let id = a.send(op).await;
        assert!(a.is_quiet(id).await, "{text}");
        let seq = recall(&mut b).await.seq;
        b.ask(Op::Returned(pb::Returned { ino, seq })).await.unwrap();
        assert_eq!(a.wait(id).await.errno, 0, "{text}");
    }
}

#[tokio::test]
async fn a_silent_holder_is_waited_for_no_longer_than_its_lease() {
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    let ino = a.create(ROOT, "f").await;
    query(&mut b, ino).await;
    let start = Instant::now();
    a.ask(attach(ino)).await.unwrap();
    let took = start.elapsed();
    assert!(took > TRUST / 2 && took < TRUST * 3, "{took:?}");
    // A word of it renews nothing that has ended.
    b.ask(Op::Heartbeat(pb::Heartbeat { dirty_bytes: 0, ..Default::default() })).await.unwrap();
    let start = Instant::now();
    a.ask(attach(ino)).await.unwrap();
    assert!(start.elapsed() < TRUST / 2);
}

#[tokio::test]
async fn a_broken_stream_ends_nothing_but_the_first_word_on_a_new_one_does() {
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 7).await);
    let ino = a.create(ROOT, "f").await;
    query(&mut b, ino).await;
    drop(b);
    let id = a.send(attach(ino)).await;
    assert!(a.is_quiet(id).await, "a node without a stream may still trust its lease");
    let mut b = join(&service, "b", 7).await;
    assert!(a.is_quiet(id).await, "the node may not have heard the welcome yet");
    let start = Instant::now();
    b.ask(Op::Heartbeat(pb::Heartbeat { dirty_bytes: 0, ..Default::default() })).await.unwrap();
    assert_eq!(a.wait(id).await.errno, 0);
    assert!(start.elapsed() < TRUST / 3, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_node_that_says_goodbye_holds_nothing() {
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    let ino = a.create(ROOT, "f").await;
    query(&mut b, ino).await;
    let id = a.send(attach(ino)).await;
    assert!(a.is_quiet(id).await);
    let _ = b.send(Op::Goodbye(pb::Goodbye {})).await;
    let start = Instant::now();
    assert_eq!(a.wait(id).await.errno, 0);
    assert!(start.elapsed() < TRUST / 2, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_node_that_is_back_on_its_cache_is_not_waited_for_as_it_was_before() {
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    let ino = a.create(ROOT, "f").await;
    query(&mut b, ino).await;
    drop(b);
    let id = a.send(attach(ino)).await;
    assert!(a.is_quiet(id).await, "a node without a stream may still trust its lease");
    let start = Instant::now();
    let _b = join(&service, "b", 2).await;
    assert_eq!(a.wait(id).await.errno, 0);
    assert!(start.elapsed() < TRUST / 3, "{:?}", start.elapsed());
}

#[tokio::test]
async fn after_a_restart_changes_wait_for_the_nodes_of_before_or_a_lease() {
    let service = service().await;
    let mut a = join(&service, "a", 1).await;
    let _b = join(&service, "b", 1).await;
    let ino = a.create(ROOT, "f").await;
    let service = service.crash_and_restart(|config| config.trust = TRUST).await;
    let start = Instant::now();
    let mut a = join(&service, "a", 1).await;
    a.ask(attach(ino)).await.unwrap();
    assert!(start.elapsed() > TRUST / 2, "b may hold a lease: {:?}", start.elapsed());

    let service = service.crash_and_restart(|config| config.trust = TRUST).await;
    let start = Instant::now();
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    b.ask(Op::Heartbeat(pb::Heartbeat { dirty_bytes: 0, ..Default::default() })).await.unwrap();
    a.ask(attach(ino)).await.unwrap();
    assert!(start.elapsed() < TRUST / 2, "everybody is there: {:?}", start.elapsed());
}

fn look_up(name: &str) -> Op {
    Op::Lookup(pb::Lookup { parent: ROOT, name: name.into(), lease: 1, tell: false })
}

fn make(name: &str) -> Op {
    let mode = 0o100_644;
    Op::Make(pb::Make { parent: ROOT, name: name.into(), mode, lease: 1, ..Default::default() })
}

fn entry(reply: pb::Reply) -> pb::Entry {
    match reply.body {
        Some(Body::Entry(entry)) if reply.errno == 0 => entry,
        other => panic!("{} {other:?}", reply.errno),
    }
}

#[tokio::test]
async fn a_name_is_made_when_everybody_knows_that_it_is_not_absent_any_more() {
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    let mut c = join(&service, "c", 1).await;
    let asked = b.send(look_up("f")).await;
    let absent = entry(b.wait(asked).await);
    let dir = absent.dir.expect("a lease of the directory");
    assert_eq!((absent.attr, dir.ino), (None, 0));
    let lease = dir.lease.expect("a lease");
    let made = a.send(make("f")).await;
    assert!(a.is_quiet(made).await, "acknowledged although b may take it for absent");
    let called = recall(&mut b).await;
    assert!(called.ino == ROOT && called.seq > lease.seq);
    // Nor does anybody hear of it who looks, at the name or at the directory.
    let looks = [c.send(look_up("f")).await, c.send(list()).await];
    for look in looks {
        assert!(c.is_quiet(look).await, "c hears of what b does not know");
    }
    b.ask(Op::Returned(pb::Returned { ino: ROOT, seq: called.seq })).await.unwrap();
    let made = entry(a.wait(made).await);
    let ino = made.attr.expect("made").ino;
    assert_eq!(entry(c.wait(looks[0]).await).attr.map(|attr| attr.ino), Some(ino));
    assert_eq!(c.wait(looks[1]).await.errno, 0);
}

fn list() -> Op {
    Op::ReadDir(pb::ReadDir { ino: ROOT, ..Default::default() })
}

#[tokio::test]
async fn own_changes_are_told_and_recall_nothing_but_only_when_they_say_so() {
    let service = service().await;
    let mut a = join(&service, "a", 1).await;
    let asked = a.send(look_up("f")).await;
    let lease = entry(a.wait(asked).await).dir.and_then(|d| d.lease).expect("a lease");
    let asked = a.send(make("f")).await;
    let made = entry(a.wait(asked).await);
    let (dir, attr) = (made.dir.expect("the directory as it is now"), made.attr.expect("made"));
    assert!(dir.ino == attr.ino && dir.lease.is_some_and(|l| l.seq > lease.seq));
    assert_eq!(dir.attr.map(|attr| attr.ino), Some(ROOT));
    // Of this inode the node believes nothing meanwhile; of that one it does not say so.
    for (name, says) in [("f", true), ("g", false)] {
        if !says {
            let asked = a.send(make(name)).await;
            entry(a.wait(asked).await);
        }
        let ino = if says { attr.ino } else { 0 };
        let unlink = pb::Unlink { parent: ROOT, name: name.into(), lease: 1, ino, dir: false };
        let unlink = a.send(Op::Unlink(unlink)).await;
        assert_eq!(a.is_quiet(unlink).await, !says, "{name}");
        if !says {
            let called = recall(&mut a).await;
            a.ask(Op::Returned(pb::Returned { ino: called.ino, seq: called.seq })).await.unwrap();
        }
        let gone = entry(a.wait(unlink).await);
        assert_eq!(gone.dir.map(|d| d.ino), Some(0));
    }
}

#[tokio::test]
async fn an_answer_that_is_given_again_brings_no_lease() {
    let service = service().await;
    let mut a = join(&service, "a", 1).await;
    let made = a.send(make("f")).await;
    let first = entry(a.wait(made).await);
    assert!(first.lease.is_some() && first.dir.is_some());
    a.send_as(made, make("f")).await;
    let again = entry(a.wait(made).await);
    assert_eq!(again.attr.map(|a| a.ino), first.attr.map(|a| a.ino), "it was done once");
    assert_eq!((again.lease, again.dir), (None, None));
}

/// The node tells of the first bytes, and may write up to 100 without telling.
async fn writes_quietly(node: &mut Node, ino: u64) {
    let attach = pb::Attach {
        ino,
        ranges: vec![pb::Range { start: 0, end: 10 }],
        lease: 2,
        settles: true,
        quiet_wish: 100,
        ..Default::default()
    };
    match node.ask(Op::Attach(attach)).await {
        Ok(Some(Body::Attached(done))) => assert_eq!(done.quiet_end, 100, "it may write quietly"),
        other => panic!("{other:?}"),
    }
}

/// A node has begun to open, cut or ask about a file when it is asked to tell what it wrote: it tells
/// after that, and is answered before.
#[tokio::test]
async fn who_must_tell_is_answered_what_it_had_asked_before() {
    let open = |ino| Op::Open(pb::Open { ino, lease: 2, ..Default::default() });
    let cut = |ino| Op::SetAttr(pb::SetAttr { ino, size: Some(5), ..Default::default() });
    let query = |ino| Op::Query(pb::Query { ino, lease: 2, ..Default::default() });
    let ops: [&dyn Fn(u64) -> Op; 3] = [&open, &cut, &query];
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    for (i, op) in ops.into_iter().enumerate() {
        let ino = a.create(ROOT, &i.to_string()).await;
        a.open(ino).await.unwrap();
        writes_quietly(&mut a, ino).await;
        let asked = b.send(Op::GetAttr(pb::GetAttr { ino, ..Default::default() })).await;
        assert!(b.is_quiet(asked).await, "{i}: a has not told");
        let start = Instant::now();
        a.ask(op(ino)).await.unwrap();
        assert!(start.elapsed() < TRUST / 4, "{i}: waited for what the node itself owes");
        let tell = pb::Attach { ino, settles: true, ..Default::default() };
        a.ask(Op::Attach(tell)).await.unwrap();
        // It has told, and goes on before it returns the lease.
        let append = pb::Append { ino, len: 3, ..Default::default() };
        a.ask(Op::Append(append)).await.unwrap();
        assert!(start.elapsed() < TRUST / 4, "{i}: an append waited for what the node itself owes");
        while let Some(notice) = a.notices.pop() {
            if let Some(What::Recall(r)) = notice.what {
                a.ask(Op::Returned(pb::Returned { ino: r.ino, seq: r.seq })).await.unwrap();
            }
        }
        assert_eq!(b.wait(asked).await.errno, 0, "{i}");
    }
}

/// A node that may write quietly is given up in the middle of a flush: what was flushed counts as
/// unflushed, and the node hears so.
#[tokio::test]
async fn what_is_flushed_when_its_node_is_given_up_is_flushed_again() {
    let service = service().await;
    let (mut a, mut b) = (join(&service, "a", 1).await, join(&service, "b", 1).await);
    let ino = a.create(ROOT, "f").await;
    a.open(ino).await.unwrap();
    // It has its place on the backing already.
    a.attach(ino, 0, 10).await;
    a.flush(&service.backing(), ino, 6).await;
    writes_quietly(&mut a, ino).await;
    let grant = a.begin(ino, 0, 10).await.unwrap();
    write_granted(&service.backing(), &grant, 7);
    // It is asked to tell, and says nothing.
    let start = Instant::now();
    let seen = b.query(ino).await;
    assert!(start.elapsed() > TRUST / 2, "nobody was waited for");
    assert_eq!(seen.size, 100, "what may have been written is an error for readers, not absent");
    let done = a.end(ino, grant.grant, true).await.unwrap();
    let again: Vec<(u64, u64)> = done.again.iter().map(|r| (r.start, r.end)).collect();
    assert_eq!((again, done.published), (vec![(0, 10)], false));
    // It tells that it wrote nothing else, and flushes again.
    let tell = pb::Attach { ino, settles: true, ..Default::default() };
    a.ask(Op::Attach(tell)).await.unwrap();
    let done = a.flush(&service.backing(), ino, 7).await;
    assert!(done.again.is_empty() && done.published, "{done:?}");
    assert_eq!(std::fs::read(service.backing().join("f")).unwrap(), [7; 10]);
}
