//! Joining, leaving, being replaced, being silent, and what survives the service.

use crate::common::{Node, ROOT, Service, hello, lock, make};
use ebb_meta_server::StartError;
use ebb_transport::Token;
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::time::Duration;

#[tokio::test]
async fn a_node_is_replaced_only_when_it_is_gone() {
    let s = Service::start_with(|c| c.lease = Duration::from_secs(2)).await;
    let mut first = s.node("a").await;
    let ino = first.create(ROOT, "f").await;
    let refused = Node::join(s.address, "a", 2, None).await.err().unwrap();
    assert_eq!(refused.errno, Errno::EBUSY.0);
    assert!(refused.text.contains("'a'"), "{}", refused.text);

    // Silent for longer than its lease: another daemon of that name takes its place.
    tokio::time::sleep(Duration::from_millis(2300)).await;
    let mut second = Node::join(s.address, "a", 2, None).await.unwrap();
    assert_eq!(second.id, first.id, "what the node owns is in a cache that both know");
    while first.receive().await {}
    assert!(matches!(first.notices[0].what, Some(pb::notice::What::Fenced(_))));
    second.attach(ino, 0, 5).await;
    assert_eq!(second.query(ino).await.ranges[0].node, second.id);
}

#[tokio::test]
async fn a_broken_stream_frees_the_name_at_once() {
    let s = Service::start().await;
    drop(s.node("a").await);
    for _ in 0..100 {
        if Node::join(s.address, "a", 2, None).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never admitted");
}

#[tokio::test]
async fn all_nodes_agree_on_the_consistency() {
    let s = Service::start().await;
    let _first = s.node("a").await;
    let other = pb::Hello { consistency: "posix".to_owned(), ..hello("b", 1) };
    let refused = Node::join_as(s.address, other, None).await.err().unwrap();
    assert_eq!(refused.errno, Errno::EINVAL.0);
    assert!(refused.text.contains("'session'") && refused.text.contains("'posix'"));
    let old = pb::Hello { protocol: 99, ..hello("b", 1) };
    assert_eq!(Node::join_as(s.address, old, None).await.err().unwrap().errno, Errno::EPROTO.0);
}

#[tokio::test]
async fn only_the_token_opens_the_door() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    Token::generate_to(&path).unwrap();
    let other = Token::generate_to(dir.path().join("other")).unwrap();
    let s = Service::start_with(|c| c.token = Some(Token::load(&path).unwrap())).await;
    let token = Token::load(&path).unwrap();
    let refused = Node::join(s.address, "a", 1, Some(&other)).await.err().unwrap();
    assert_eq!(refused.errno, Errno::EACCES.0);
    let mut node = Node::join(s.address, "a", 1, Some(&token)).await.unwrap();
    node.create(ROOT, "f").await;
    // Without Hello there is nothing to be had.
    assert_eq!(s.server.status().nodes.len(), 1);
}

#[tokio::test]
async fn without_a_token_only_loopback_is_served() {
    let s = Service::start().await;
    let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let refused = s.server.serve(listener, std::future::pending()).await;
    assert!(matches!(refused, Err(StartError::NeedsToken { .. })));
}

#[tokio::test]
async fn the_state_survives_a_crash_of_the_service() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let dir = a.make(ROOT, "d", libc::S_IFDIR | 0o750).await.unwrap();
    let file = a.create(dir, "f").await;
    let version = a.attach(file, 0, 4096).await;
    assert_eq!(a.ask(lock(file, 7, 1, false)).await, Ok(None));
    let op = Op::Append(pb::Append { ino: file, len: 4, ..Default::default() });
    a.send_as(900, op.clone()).await;
    assert_eq!(a.wait(900).await.errno, 0);
    a.send_as(901, make(dir, "g", libc::S_IFREG | 0o600)).await;
    assert_eq!(a.wait(901).await.errno, 0);
    let instance = a.welcome.service_instance;

    let s = s.crash_and_restart(|_| {}).await;
    let mut a = s.node("a").await;
    assert_ne!(a.welcome.service_instance, instance);
    assert_eq!(a.lookup(ROOT, "d").await.unwrap().ino, dir);
    assert_eq!(a.attr(dir).await.unwrap().mode & 0o7777, 0o750);
    // Sent again, because the answers might have been lost: done once all the same.
    a.send_as(900, op).await;
    match a.wait(900).await.body {
        Some(Body::Attached(done)) => assert_eq!((done.size, done.version), (4100, version + 1)),
        other => panic!("{other:?}"),
    }
    a.send_as(901, make(dir, "g", libc::S_IFREG | 0o600)).await;
    assert_eq!(a.wait(901).await.errno, 0);
    assert_eq!(a.names(dir).await, ["f", "g"]);
    let map = a.query(file).await;
    assert_eq!((map.size, map.version), (4100, version + 1));
    assert!(map.ranges.iter().all(|r| r.node == a.id));

    let mut b = s.node("b").await;
    assert_eq!(b.ask(lock(file, 1, 0, false)).await, Err(Errno::EAGAIN));
    s.server.shutdown();
    assert_eq!(b.ask(make(dir, "late", libc::S_IFREG | 0o600)).await, Err(Errno::EIO));
}

#[tokio::test]
async fn a_request_sent_twice_is_done_once() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let file = a.create(ROOT, "f").await;
    for _ in 0..3 {
        a.send_as(77, Op::Append(pb::Append { ino: file, len: 10, ..Default::default() })).await;
        match a.wait(77).await.body {
            Some(Body::Attached(done)) => assert_eq!(done.size, 10),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(a.query(file).await.size, 10);
}

/// What was refused was not done: the same number can ask once more, and then for what was done.
#[tokio::test]
async fn a_request_that_was_refused_is_done_when_it_is_sent_again() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let ino = a.create(ROOT, "log").await;
    let append =
        |not_below| Op::Append(pb::Append { ino, len: 5, not_below, ..Default::default() });
    a.send_as(1 << 20, append(9)).await;
    assert_eq!(a.wait(1 << 20).await.errno, Errno::EREMCHG.0, "the file is shorter than 9");
    for _ in 0..2 {
        a.send_as(1 << 20, append(0)).await;
        let reply = a.wait(1 << 20).await;
        let Some(Body::Attached(made)) = &reply.body else { panic!("{reply:?}") };
        assert_eq!((reply.errno, made.size), (0, 5));
    }
    assert_eq!(a.attr(ino).await.unwrap().size, 5, "it is made once");
}

#[tokio::test]
async fn a_silent_node_loses_grants_then_locks_and_opens() {
    let s = Service::start_with(|c| c.lease = Duration::from_millis(400)).await;
    let mut a = s.node("a").await;
    let file = a.create(ROOT, "f").await;
    a.open(file).await.unwrap();
    a.attach(file, 0, 10).await;
    assert_eq!(a.ask(lock(file, 1, 1, false)).await, Ok(None));
    assert_ne!(a.begin(file, 0, 10).await.unwrap().grant, 0);

    let mut b = s.node("b").await;
    b.attach(file, 5, 10).await;
    let waiting = b.send(lock(file, 9, 1, true)).await;
    let flush = b.send(crate::common::begin(file, 0, 10)).await;
    // The grant ends with the lease, the lock after three.
    let mut granted = false;
    for _ in 0..40 {
        b.ask(Op::Heartbeat(pb::Heartbeat { dirty_bytes: 5, ..Default::default() })).await.unwrap();
        granted |= !b.is_quiet(flush).await;
        if !b.is_quiet(waiting).await {
            break;
        }
    }
    assert!(granted);
    assert_eq!(b.wait(waiting).await.errno, 0);
    match b.ask(Op::NodeInfo(pb::NodeInfo { node: 0, silent: false })).await {
        Ok(Some(Body::NodeInfo(n))) => {
            assert_eq!(n.nodes.iter().map(|n| n.alive).collect::<Vec<_>>(), [false, true]);
            assert_eq!(n.nodes[1].dirty_bytes, Some(5));
            assert_eq!(n.nodes[0].dirty_bytes, None, "it has not said so: that is not 0");
        }
        other => panic!("{other:?}"),
    }
    // What it owns is still its own; and it is told what it lost.
    assert!(b.query(file).await.ranges.iter().any(|r| r.node == a.id));
    drop(a);
    let again = Node::join_as(s.address, pb::Hello { resume: true, ..hello("a", 1) }, None).await;
    assert!(again.unwrap().welcome.expired);
}

#[tokio::test]
async fn goodbye_gives_the_flushed_bytes_to_the_backing() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let kept = a.create(ROOT, "kept").await;
    let lost = a.create(ROOT, "lost").await;
    a.attach(kept, 0, 10).await;
    a.attach(lost, 0, 10).await;
    assert!(a.flush(&s.backing(), kept, 3).await.published);
    assert_eq!(a.ask(Op::Goodbye(pb::Goodbye {})).await, Ok(None));
    let mut b = s.node("b").await;
    let map = b.query(kept).await;
    assert_eq!((map.ranges.len(), map.base_len), (0, 10));
    let errors = s.server.status().errors;
    assert_eq!(errors.len(), 1, "bytes that are lost are named");
    assert_eq!(errors[0].path, b"lost");
}

/// Nodes that come back at the very moment at which they are given up: whoever is not told of it has its
/// lock still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_told_that_it_was_given_up_has_its_locks() {
    const LEASE_MS: u64 = 60;
    let s = std::sync::Arc::new(
        Service::start_with(|c| c.lease = Duration::from_millis(LEASE_MS)).await,
    );
    let rounds = (0..8).map(|who: u64| {
        let s = std::sync::Arc::clone(&s);
        tokio::spawn(async move {
            let (mut told, mut kept) = (0, 0);
            let mut node = s.node(&format!("n{who}")).await;
            let file = node.create(ROOT, &format!("f{who}")).await;
            for round in 0..15 {
                node.ask(Op::Heartbeat(pb::Heartbeat::default())).await.unwrap();
                assert_eq!(node.ask(lock(file, 7, 1, false)).await, Ok(None));
                // Around the third lease, in steps of a fifth of a millisecond.
                tokio::time::sleep(Duration::from_millis(3 * LEASE_MS - 20)).await;
                let mut other = s.node(&format!("o{who}")).await;
                let rest = 10_000 + (round * 8 + who) * 37 % 120 * 200;
                tokio::time::sleep(Duration::from_micros(rest)).await;
                node = s.node(&format!("n{who}")).await;
                // Numbers of requests that were answered before are not used again.
                (node.next, other.next) = ((round + 2) * 100, (round + 2) * 100);
                let is_free = other.ask(lock(file, 1, 1, false)).await.is_ok();
                assert!(node.welcome.expired || !is_free, "round {round} of {who}");
                told += u32::from(node.welcome.expired);
                kept += u32::from(!is_free);
                other.ask(lock(file, 1, 2, false)).await.unwrap();
            }
            (told, kept)
        })
    });
    let (mut told, mut kept) = (0, 0);
    for done in rounds.collect::<Vec<_>>() {
        let (t, k) = done.await.unwrap();
        (told, kept) = (told + t, kept + k);
    }
    assert!(told > 20 && kept > 20, "both happen: {told}, {kept}");
}
