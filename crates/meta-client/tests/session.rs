//! A whole client against a service that is played by the test.

#![allow(clippy::unwrap_used)] // a failure here is a failed test

#[allow(dead_code)] // the bench uses the rest
mod scripted;

use ebb_meta_client::{
    ConnectError, ConnectOptions, Event, LockKind, LockRequest, MetaClient, QueryRequest,
    service_status,
};
use ebb_transport::auth::{self, SessionHandshake};
use ebb_transport::{Secure, Token};
use ebb_types::{ByteRange, Errno, Ino, Name, NodeId, Version};
use ebb_wire::pb::{self, notice::What, reply::Body, request::Op};
use prost::Message;
use scripted::{Peer, Service, attr, entry, welcome};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::broadcast::Receiver;

fn name(s: &str) -> Name {
    Name::new(s.as_bytes()).unwrap()
}

async fn connected(options: impl FnOnce(&mut ConnectOptions)) -> (Service, Peer, MetaClient) {
    let mut service = Service::start().await;
    let mut with = service.options();
    options(&mut with);
    let connect = tokio::spawn(MetaClient::connect(with));
    let (peer, hello) = service.welcome(1).await;
    assert!(!hello.resume);
    let (client, welcome) = connect.await.unwrap().unwrap();
    assert_eq!((welcome.node_id, client.node_id()), (5, NodeId(5)));
    (service, peer, client)
}

fn spawn_lookup(client: &MetaClient, parent: u64) -> tokio::task::JoinHandle<Result<u64, Errno>> {
    let client = client.clone();
    tokio::spawn(async move { client.lookup(Ino(parent), &name("x")).await.map(|a| a.ino.0) })
}

async fn event(events: &mut Receiver<Event>) -> Event {
    tokio::time::timeout(Duration::from_secs(10), events.recv()).await.unwrap().unwrap()
}

/// The ids of `n` requests, and what they look up.
async fn lookups(peer: &mut Peer, n: usize) -> Vec<(u64, u64)> {
    let mut got = Vec::new();
    for _ in 0..n {
        match peer.next().await {
            (id, Op::Lookup(l)) => got.push((id, l.parent)),
            other => panic!("{other:?}"),
        }
    }
    got
}

#[tokio::test]
async fn answers_find_their_calls_in_any_order_and_calls_share_frames() {
    let (_service, mut peer, client) = connected(|_| ()).await;
    let calls: Vec<_> = (0..300).map(|i| spawn_lookup(&client, 1000 + i)).collect();
    let mut asked = lookups(&mut peer, 300).await;
    assert!(peer.frames < 100, "{} frames for 300 calls", peer.frames);
    asked.reverse();
    let reply = |(id, parent)| pb::Reply { id, body: Some(entry(parent)), ..Default::default() };
    peer.send(asked.into_iter().map(reply).collect()).await;
    for (i, call) in calls.into_iter().enumerate() {
        assert_eq!(call.await.unwrap(), Ok(1000 + i as u64));
    }
    let stats = client.stats();
    assert_eq!((stats.calls["lookup"], stats.unanswered, stats.connected), (300, 0, true));
    assert!(!stats.calls.contains_key("query"));
}

#[tokio::test]
async fn errnos_and_nonsense_come_back_as_errors() {
    let (_service, mut peer, client) = connected(|_| ()).await;
    let refused = spawn_lookup(&client, 1);
    let (id, _) = peer.next().await;
    peer.refuse(id, libc::ENOENT, "").await;
    assert_eq!(refused.await.unwrap(), Err(Errno::ENOENT));
    let query =
        QueryRequest { ino: Ino(9), range: ByteRange::ALL, known: Version::ZERO, lease: false };
    let wrong =
        [Some(entry(9)), None, Some(Body::Map(pb::FileMap { base_len: 9, ..Default::default() }))];
    for body in wrong {
        let client = client.clone();
        let call = tokio::spawn(async move { client.query(query).await });
        let (id, _) = peer.next().await;
        peer.send(vec![pb::Reply { id, body, ..Default::default() }]).await;
        assert_eq!(call.await.unwrap(), Err(Errno::EPROTO));
    }
    let sound = pb::Attached { version: 4, size: 100, base_len: Some(100), ..Default::default() };
    let answers = [
        (sound.clone(), Ok(100)),
        (pb::Attached { base_len: Some(0), ..sound.clone() }, Ok(0)),
        (pb::Attached { base_len: None, ..sound.clone() }, Err(Errno::EPROTO)),
        (pb::Attached { base_len: Some(101), ..sound.clone() }, Err(Errno::EPROTO)),
        (pb::Attached { base_len: Some(u64::MAX), ..sound.clone() }, Err(Errno::EPROTO)),
        (pb::Attached { size: u64::MAX, ..sound.clone() }, Err(Errno::EPROTO)),
        (pb::Attached { version: 0, ..sound }, Err(Errno::EPROTO)),
    ];
    for (answer, want) in answers {
        let client = client.clone();
        let call = tokio::spawn(async move { client.detach(Ino(7), &[ByteRange::ALL]).await });
        let (id, _) = peer.next().await;
        peer.reply(id, Body::Attached(answer)).await;
        assert_eq!(call.await.unwrap().map(|detached| detached.base_len), want);
    }
    let other = client.clone();
    let call = tokio::spawn(async move { other.getattr(Ino(7)).await });
    let (id, _) = peer.next().await;
    peer.reply(id, entry(8)).await;
    assert_eq!(call.await.unwrap(), Err(Errno::EPROTO), "attributes of another inode");
    let flush = client.clone();
    let call = tokio::spawn(async move { flush.flush_begin(Ino(7), &[ByteRange::ALL]).await });
    let (id, _) = peer.next().await;
    peer.refuse(id, libc::EROFS, "/backing is read-only").await;
    let error = call.await.unwrap().unwrap_err();
    assert_eq!((error.errno, error.to_string().as_str()), (Errno::EROFS, "/backing is read-only"));
    let call = {
        let client = client.clone();
        tokio::spawn(async move {
            client.open(Ino(7), false, false, Version::ZERO, ebb_meta_client::Wish::No).await
        })
    };
    let (id, _) = peer.next().await;
    let escape = pb::Opened {
        attr: Some(attr(7)),
        map: Some(pb::FileMap { unchanged: true, ..Default::default() }),
        backing: Some(pb::BackingRef { path: b"a/../../etc/passwd".to_vec(), ino: 1 }),
        ..Default::default()
    };
    peer.reply(id, Body::Opened(escape)).await;
    assert_eq!(call.await.unwrap(), Err(Errno::EPROTO), "a path out of the backing");
}

#[tokio::test]
async fn a_broken_connection_is_resumed_and_the_same_requests_come_again() {
    let (mut service, mut peer, client) = connected(|_| ()).await;
    let mut events = client.events();
    let calls = [spawn_lookup(&client, 10), spawn_lookup(&client, 20)];
    let first = lookups(&mut peer, 2).await;
    let unlink = {
        let client = client.clone();
        tokio::spawn(async move { client.unlink(Ino(1), &name("gone")).await })
    };
    let (unlink_id, _) = peer.next().await;
    drop(peer);
    let (mut peer, hello) = service.welcome(1).await;
    assert!(hello.resume);
    assert_eq!((hello.incarnation, hello.node.as_str()), (77, "n1"));
    assert_eq!(event(&mut events).await, Event::Disconnected);
    assert_eq!(event(&mut events).await, Event::Resumed { expired: false });
    assert_eq!(lookups(&mut peer, 2).await, first);
    let (again, op) = peer.next().await;
    assert!(matches!(op, Op::Unlink(_)));
    assert_eq!(again, unlink_id);
    for (id, parent) in first {
        // The lost answer comes too, in the end.
        peer.reply(id, entry(parent)).await;
        peer.reply(id, entry(parent + 1)).await;
    }
    peer.done(unlink_id).await;
    unlink.await.unwrap().unwrap();
    let [a, b] = calls;
    assert_eq!((a.await.unwrap(), b.await.unwrap()), (Ok(10), Ok(20)));
    let stats = client.stats();
    assert_eq!((stats.sessions, stats.unknown_replies), (2, 2));
}

#[tokio::test]
async fn a_restarted_service_is_announced_before_it_is_asked() {
    let (mut service, mut peer, client) = connected(|_| ()).await;
    let mut events = client.events();
    let lookup = spawn_lookup(&client, 10);
    let (lookup_id, _) = peer.next().await;
    drop(peer);
    assert_eq!(event(&mut events).await, Event::Disconnected);
    // Made while there is no service.
    let later = spawn_lookup(&client, 20);
    let mut peer = service.accept().await;
    let (id, _) = peer.next().await;
    peer.reply(id, Body::Welcome(pb::Welcome { expired: true, ..welcome(2) })).await;
    let restarted = Event::ServiceRestarted { instance: 2, expired: true };
    assert_eq!(event(&mut events).await, restarted);
    let asked = lookups(&mut peer, 2).await;
    assert_eq!(asked[0], (lookup_id, 10));
    for (id, parent) in asked {
        peer.reply(id, entry(parent)).await;
    }
    assert_eq!((lookup.await.unwrap(), later.await.unwrap()), (Ok(10), Ok(20)));
}

#[tokio::test]
async fn a_service_that_comes_back_elsewhere_in_time_loses_nothing() {
    let (service, peer, client) = connected(|_| ()).await;
    let address = service.address;
    drop(peer);
    service.stop().await;
    let call = spawn_lookup(&client, 3);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut service = Service::start_at(address).await;
    let (mut peer, _) = service.welcome(1).await;
    let (id, _) = peer.next().await;
    peer.reply(id, entry(3)).await;
    assert_eq!(call.await.unwrap(), Ok(3));
}

#[tokio::test]
async fn calls_end_by_their_deadline_whether_or_not_the_service_is_there() {
    let quick = |o: &mut ConnectOptions| o.request_timeout = Duration::from_millis(300);
    let (service, mut peer, client) = connected(quick).await;
    let begin = Instant::now();
    let silent = spawn_lookup(&client, 1);
    let (id, _) = peer.next().await;
    assert_eq!(silent.await.unwrap(), Err(Errno::ETIMEDOUT));
    peer.reply(id, entry(1)).await;
    // Patience of its own.
    let long = client.within(Duration::from_secs(20));
    let patient = spawn_lookup(&long, 2);
    let (id, _) = peer.next().await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    peer.reply(id, entry(2)).await;
    assert_eq!(patient.await.unwrap(), Ok(2));

    let lock = client.set_lock(&write_lock(true));
    drop(peer);
    service.stop().await;
    assert_eq!(spawn_lookup(&client, 1).await.unwrap(), Err(Errno::ETIMEDOUT));
    assert_eq!(lock.await, Err(Errno::ETIMEDOUT), "nobody is there to grant it");
    assert!(begin.elapsed() < Duration::from_secs(5));
    let stats = client.stats();
    assert_eq!((stats.timeouts, stats.unknown_replies, stats.connected), (3, 1, false));
}

#[tokio::test]
async fn a_fenced_node_stops() {
    let (mut service, mut peer, client) = connected(|_| ()).await;
    let mut events = client.events();
    let call = spawn_lookup(&client, 1);
    peer.next().await;
    peer.notice(pb::notice::What::Fenced(pb::Fenced { reason: "another n1".into() })).await;
    assert_eq!(call.await.unwrap(), Err(Errno::EIO));
    assert_eq!(event(&mut events).await, Event::Fenced { reason: "another n1".into() });
    assert_eq!(client.fenced().await, "another n1", "also for those who ask later");
    assert_eq!(spawn_lookup(&client, 1).await.unwrap(), Err(Errno::EIO));
    assert!(service.is_left_alone().await, "it does not come back");
}

#[tokio::test]
async fn a_node_that_is_refused_when_it_comes_back_stops() {
    let (mut service, peer, client) = connected(|_| ()).await;
    let mut events = client.events();
    drop(peer);
    let mut peer = service.accept().await;
    let (id, _) = peer.next().await;
    peer.refuse(id, libc::EBUSY, "another daemon is n1 now").await;
    assert_eq!(event(&mut events).await, Event::Disconnected);
    let Event::Fenced { reason } = event(&mut events).await else { panic!() };
    assert!(reason.contains("another daemon is n1 now"), "{reason}");
    assert_eq!(spawn_lookup(&client, 1).await.unwrap(), Err(Errno::EIO));
}

fn write_lock(wait: bool) -> LockRequest {
    LockRequest {
        ino: Ino(4),
        owner: 11,
        pid: 12,
        range: ByteRange::new(5, 9),
        kind: LockKind::Write,
        flock: false,
        wait,
        publish: false,
    }
}

#[tokio::test]
async fn a_lock_is_waited_for_beyond_the_deadline_until_cancelled() {
    let quick = |o: &mut ConnectOptions| o.request_timeout = Duration::from_millis(100);
    let (_service, mut peer, client) = connected(quick).await;
    let call = client.set_lock(&write_lock(true));
    let cancel = call.canceller();
    let call = tokio::spawn(call);
    let (id, op) = peer.next().await;
    let Op::SetLock(lock) = op else { panic!("{op:?}") };
    assert_eq!((lock.ino, lock.owner, lock.pid, lock.r#type, lock.wait), (4, 11, 12, 1, true));
    assert_eq!(lock.range, Some(pb::Range { start: 5, end: 9 }));
    tokio::time::sleep(Duration::from_millis(400)).await;
    cancel.cancel();
    let (cancel_id, op) = peer.next().await;
    assert_eq!(op, Op::Cancel(pb::Cancel { request: id }));
    assert!(!call.is_finished());
    peer.refuse(id, libc::EINTR, "").await;
    peer.done(cancel_id).await;
    assert_eq!(call.await.unwrap(), Err(Errno::EINTR));
    cancel.cancel();
    assert!(peer.is_left_alone().await);
}

#[tokio::test]
async fn a_dropped_lock_call_leaves_no_lock_behind() {
    let (_service, mut peer, client) = connected(|_| ()).await;
    let call = client.set_lock(&write_lock(true));
    let (id, _) = peer.next().await;
    drop(call);
    let (cancel_id, op) = peer.next().await;
    assert_eq!(op, Op::Cancel(pb::Cancel { request: id }));
    // Granted before the cancel arrived.
    peer.done(id).await;
    peer.done(cancel_id).await;
    let (unlock_id, op) = peer.next().await;
    let Op::SetLock(unlock) = op else { panic!("{op:?}") };
    assert_eq!((unlock.r#type, unlock.owner, unlock.wait), (2, 11, false));
    peer.done(unlock_id).await;

    // Granted, but never looked at.
    let call = client.set_lock(&write_lock(false));
    let (id, _) = peer.next().await;
    peer.done(id).await;
    while client.stats().unanswered > 0 {
        tokio::task::yield_now().await;
    }
    drop(call);
    let (_, op) = peer.next().await;
    assert!(matches!(op, Op::SetLock(l) if l.r#type == 2));

    // Granted and looked at: it stays.
    let call = client.set_lock(&write_lock(false));
    let (id, _) = peer.next().await;
    peer.done(id).await;
    assert_eq!(call.await, Ok(()));
    assert!(peer.is_left_alone().await);
}

#[tokio::test]
async fn heartbeats_come_three_times_a_lease_and_tell_the_dirty_bytes() {
    let mut service = Service::start().await;
    let connect = tokio::spawn(MetaClient::connect(service.options()));
    let mut peer = service.accept().await;
    let (id, _) = peer.next().await;
    peer.reply(id, Body::Welcome(pb::Welcome { lease_ms: 300, ..welcome(1) })).await;
    let (client, _) = connect.await.unwrap().unwrap();
    client.set_dirty_bytes(4711);
    let begin = Instant::now();
    let mut told = Vec::new();
    for _ in 0..6 {
        let (id, op) = peer.next_of_any_kind().await;
        let Op::Heartbeat(beat) = op else { panic!("{op:?}") };
        told.push(beat.dirty_bytes);
        peer.done(id).await;
    }
    assert_eq!(told[1..], [4711; 5]);
    let took = begin.elapsed();
    assert!(took > Duration::from_millis(350) && took < Duration::from_secs(4), "{took:?}");
    // A ping is answered at once.
    peer.notice(pb::notice::What::Ping(pb::Ping { number: 7 })).await;
    let (_, op) = peer.next_of_any_kind().await;
    assert!(matches!(op, Op::Heartbeat(beat) if beat.answers == 7), "{op:?}");
}

#[tokio::test]
async fn a_large_map_comes_through() {
    const RANGES: u64 = 400_000;
    let (_service, mut peer, client) = connected(|_| ()).await;
    let query =
        QueryRequest { ino: Ino(9), range: ByteRange::ALL, known: Version::ZERO, lease: false };
    let call = tokio::spawn(async move { client.query(query).await });
    let (id, _) = peer.next().await;
    let range =
        |i| pb::OwnedRange { start: i * 10, end: i * 10 + 5, node: 2, version: 3, flushed: true };
    let map = pb::FileMap {
        version: 3,
        size: RANGES * 10,
        covers: Some(pb::Range { start: 0, end: u64::MAX }),
        ranges: (0..RANGES).map(range).collect(),
        ..Default::default()
    };
    peer.reply(id, Body::Map(map)).await;
    assert_eq!(call.await.unwrap().unwrap().map.ranges.len() as u64, RANGES);
}

#[tokio::test]
async fn the_last_handle_closes_the_session() {
    let (mut service, mut peer, client) = connected(|_| ()).await;
    let other = client.clone();
    drop(client);
    let call = spawn_lookup(&other, 1);
    let (id, _) = peer.next().await;
    peer.reply(id, entry(1)).await;
    assert_eq!(call.await.unwrap(), Ok(1));
    drop(other);
    assert!(peer.is_closed().await);
    assert!(service.is_left_alone().await);
}

#[tokio::test]
async fn after_a_goodbye_nobody_comes_back() {
    let (mut service, mut peer, client) = connected(|_| ()).await;
    let mut events = client.events();
    let leaving = {
        let client = client.clone();
        tokio::spawn(async move { client.goodbye().await })
    };
    let (_, op) = peer.next().await;
    assert!(matches!(op, Op::Goodbye(_)));
    // The answer is lost with the stream.
    drop(peer);
    assert_eq!(leaving.await.unwrap(), Ok(()));
    assert_eq!(spawn_lookup(&client, 1).await.unwrap(), Err(Errno::ENOTCONN));
    assert!(service.is_left_alone().await);
    assert!(events.try_recv().is_err(), "leaving is no event");
}

fn token(dir: &tempfile::TempDir, name: &str) -> Arc<Token> {
    Arc::new(Token::generate_to(dir.path().join(name)).unwrap())
}

/// Connects with `ours` to a service that holds `theirs` and follows the protocol.
async fn prove(ours: Option<Arc<Token>>, theirs: &Token) -> Result<(), ConnectError> {
    let mut service = Service::start().await;
    let with = ConnectOptions { token: ours, ..service.options() };
    let mut connect = tokio::spawn(MetaClient::connect(with));
    let mut peer = service.accept().await;
    let (id, op) = peer.next().await;
    let Op::Hello(hello) = op else { panic!("{op:?}") };
    let (service_nonce, said) = (auth::nonce(), hello.encode_to_vec());
    let handshake =
        SessionHandshake { hello_nonce: &hello.nonce, service_nonce: &service_nonce, hello: &said };
    let proof = handshake.service_proof(theirs).to_vec();
    peer.reply(id, Body::Challenge(pb::Challenge { nonce: service_nonce.to_vec(), proof })).await;
    tokio::select! {
        ended = &mut connect => return ended.unwrap().map(|_| ()),
        (id, op) = peer.next() => {
            let Op::Prove(prove) = op else { panic!("{op:?}") };
            assert!(handshake.node_proof_is(theirs, &prove.proof));
            peer.reply(id, Body::Welcome(welcome(1))).await;
        }
    }
    connect.await.unwrap().map(|_| ())
}

#[tokio::test]
async fn both_ends_prove_the_token() {
    let dir = tempfile::tempdir().unwrap();
    let (job, other) = (token(&dir, "job"), token(&dir, "other"));
    assert_eq!(prove(Some(job.clone()), &job).await, Ok(()));
    let stranger = prove(Some(other), &job).await;
    assert!(matches!(stranger, Err(ConnectError::BadToken(_))), "{stranger:?}");
    let none = prove(None, &job).await.unwrap_err();
    assert!(none.to_string().contains("--token-file"), "{none}");

    // A service without a token is not the job's.
    let mut service = Service::start().await;
    let with = ConnectOptions { token: Some(job), ..service.options() };
    let connect = tokio::spawn(MetaClient::connect(with));
    service.welcome(1).await;
    assert!(matches!(connect.await.unwrap(), Err(ConnectError::BadToken(_))));
}

#[tokio::test]
async fn refusals_are_told_apart_and_name_the_service() {
    let kind: [(i32, fn(&ConnectError) -> bool); 5] = [
        (libc::EBUSY, |e| matches!(e, ConnectError::NameTaken(_))),
        (libc::EINVAL, |e| matches!(e, ConnectError::WrongConsistency(_))),
        (libc::EACCES, |e| matches!(e, ConnectError::BadToken(_))),
        (libc::EEXIST, |e| matches!(e, ConnectError::Refused(_))),
        (libc::EAGAIN, ConnectError::may_pass),
    ];
    for (errno, is_right) in kind {
        let mut service = Service::start().await;
        let connect = tokio::spawn(MetaClient::connect(service.options()));
        let mut peer = service.accept().await;
        let (id, _) = peer.next().await;
        peer.refuse(id, errno, "because").await;
        let error = connect.await.unwrap().unwrap_err();
        assert!(is_right(&error), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("because") && text.contains(&service.address.to_string()), "{text}");
    }
}

#[tokio::test]
async fn nobody_there_is_said_at_once_and_silence_in_time() {
    let service = Service::start().await;
    let mut options = service.options();
    options.connect_timeout = Duration::from_millis(300);
    let begin = Instant::now();
    // It accepts, but never answers the Hello.
    let silent = MetaClient::connect(options.clone()).await.unwrap_err();
    assert!(matches!(silent, ConnectError::Unreachable(_)), "{silent:?}");
    service.stop().await;
    let gone = MetaClient::connect(options.clone()).await.unwrap_err();
    assert!(gone.to_string().to_lowercase().contains("refused"), "{gone}");
    assert!(gone.may_pass());
    assert!(begin.elapsed() < Duration::from_secs(3));
    options.address = "no such address".into();
    let bad = MetaClient::connect(options).await.unwrap_err();
    assert!(matches!(bad, ConnectError::BadAddress(_)), "{bad:?}");
}

#[tokio::test]
async fn the_status_of_a_service_needs_no_session() {
    let service = Service::start().await;
    let address = service.address.to_string();
    let status =
        service_status(&address, None, Secure::default(), Duration::from_secs(5)).await.unwrap();
    assert_eq!(status.consistency, "session");
    service.stop().await;
    let gone = service_status(&address, None, Secure::default(), Duration::from_secs(5)).await;
    assert!(matches!(gone, Err(ConnectError::Unreachable(_))), "{gone:?}");
}

/// What an earlier life wrote without telling must be told before its lease is returned, and a daemon
/// that begins knows of it only later.
#[tokio::test]
async fn what_is_asked_before_anybody_listens_waits_for_who_will() {
    let (_service, mut peer, client) = connected(|options| options.listens = true).await;
    peer.notice(What::Recall(pb::Recall { ino: 7, seq: 3 })).await;
    let asked = pb::Publish { ino: 8, seq: 4, seat: 2, range: None };
    peer.notice(What::Publish(asked)).await;
    assert!(peer.is_left_alone().await, "nobody has told anything yet");
    let heard = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (recalls, publishes) = (heard.clone(), heard.clone());
    client.on_publish(Box::new(move |asked| {
        publishes.lock().unwrap().push((asked.ino, asked.seq));
    }));
    client.on_recall(Box::new(move |ino, seq| {
        recalls.lock().unwrap().push((ino, seq.0));
        ino == Ino(7)
    }));
    assert_eq!(*heard.lock().unwrap(), [(Ino(8), 4), (Ino(7), 3)]);
    let (_, op) = peer.next().await;
    assert!(matches!(op, Op::Returned(r) if r.ino == 7 && r.seq == 3));
    // From then on at once.
    peer.notice(What::Recall(pb::Recall { ino: 9, seq: 5 })).await;
    assert!(peer.is_left_alone().await, "it said that something is to be told first");
    assert_eq!(heard.lock().unwrap().last(), Some(&(Ino(9), 5)));
}

/// On another connection the numbers mean nothing, and everything is asked for again.
#[tokio::test]
async fn what_was_asked_on_a_connection_that_is_no_more_is_forgotten() {
    let (mut service, peer, client) = connected(|options| options.listens = true).await;
    let mut events = client.events();
    peer.notice(What::Recall(pb::Recall { ino: 7, seq: 3 })).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(peer);
    assert_eq!(event(&mut events).await, Event::Disconnected);
    let (mut peer, _) = service.welcome(1).await;
    assert_eq!(event(&mut events).await, Event::Resumed { expired: false });
    client.on_recall(Box::new(|_, _| true));
    assert!(peer.is_left_alone().await, "a lease of another connection was returned");
}
