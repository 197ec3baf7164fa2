//! Coupled files on the wire: who waits, who is counted, and what a service that begins again knows.

use crate::common::{Node, ROOT, Service, make};
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::notice::What;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::time::Duration;

async fn couple(node: &mut Node, terms: &str) -> u64 {
    let dir = node.make(ROOT, "d", libc::S_IFDIR | 0o755).await.expect("a directory");
    set(node, dir, terms).await.expect(terms);
    dir
}

async fn set(node: &mut Node, ino: u64, terms: &str) -> Result<(), Errno> {
    let (name, value) = (b"user.ebb.couple".to_vec(), terms.as_bytes().to_vec());
    node.ask(Op::SetXattr(pb::SetXattr { ino, name, value, flags: 0 })).await.map(drop)
}

/// Makes a file and opens it to write.
async fn produce(node: &mut Node, dir: u64, name: &str, handle: u64) -> u64 {
    let Op::Make(made) = make(dir, name, libc::S_IFREG | 0o644) else { unreachable!() };
    match node.ask(Op::Make(pb::Make { open: true, handle, ..made })).await {
        Ok(Some(Body::Opened(opened))) => {
            assert!(opened.coupled && opened.held);
            opened.attr.expect("attributes").ino
        }
        other => panic!("{other:?}"),
    }
}

async fn open(node: &mut Node, ino: u64, write: bool, handle: u64) -> Result<pb::Opened, Errno> {
    let open = pb::Open { ino, write, handle, ..Default::default() };
    match node.ask(Op::Open(open)).await? {
        Some(Body::Opened(opened)) => Ok(opened),
        other => panic!("{other:?}"),
    }
}

async fn leave(node: &mut Node, ino: u64, handle: u64, through: bool) {
    let left = pb::Leave { ino, handle, through, withdraws: false, asks: false };
    node.ask(Op::Leave(left)).await.expect("left");
}

async fn stands(node: &mut Node, ino: u64) -> String {
    match node.ask(Op::Describe(pb::Describe { ino })).await {
        Ok(Some(Body::Description(told))) => told.couple,
        other => panic!("{other:?}"),
    }
}

fn named(parent: u64, name: &str) -> Op {
    Op::Await(pb::Await { ino: 0, parent, name: name.into() })
}

fn file(ino: u64) -> Op {
    Op::Await(pb::Await { ino, ..Default::default() })
}

#[tokio::test]
async fn who_waits_is_answered_when_the_last_producer_is_through() {
    let service = Service::start().await;
    let (mut a, mut b) = (service.node("a").await, service.node("b").await);
    let dir = couple(&mut a, "producers=2 consumers=1").await;
    let missing = pb::Lookup { parent: dir, name: b"f".to_vec(), lease: 1, tell: false };
    match b.ask(Op::Lookup(missing)).await {
        Ok(Some(Body::Entry(entry))) => {
            assert_eq!((entry.await_ms, entry.attr, entry.dir), (30_000, None, None));
        }
        other => panic!("{other:?}"),
    }
    let waits = b.send(named(dir, "f")).await;
    let ino = produce(&mut a, dir, "f", 7).await;
    assert_eq!(open(&mut b, ino, false, 1).await.expect("an answer").await_ms, 30_000);
    leave(&mut a, ino, 7, true).await;
    // Told once more, as after a broken connection.
    leave(&mut a, ino, 7, true).await;
    assert!(b.is_quiet(waits).await, "one of two");
    open(&mut a, ino, true, 8).await.expect("the second one");
    leave(&mut a, ino, 8, true).await;
    assert_eq!(b.wait(waits).await.errno, 0);
    assert_eq!(b.ask(file(ino)).await, Ok(None), "at once");
    let opened = open(&mut b, ino, false, 2).await.expect("ready");
    assert!(opened.attr.is_some() && opened.coupled && opened.await_ms == 0);
    assert_eq!(open(&mut b, ino, false, 2).await.map(|o| o.await_ms), Ok(0), "asked again");
    leave(&mut b, ino, 2, true).await;
    for node in [&mut a, &mut b] {
        node.ask(Op::Release(pb::Release { ino, settles: false })).await.ok();
    }
    // Its names go by themselves, and who had it open is told.
    let gone = async {
        while a.names(dir).await != Vec::<String>::new() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        loop {
            match a.notices.pop().and_then(|n| n.what) {
                Some(What::Deleted(gone)) => return assert_eq!(gone.ino, ino),
                _ => assert!(a.receive().await, "the stream ended"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.expect("it is removed");
}

#[tokio::test]
async fn who_is_not_there_any_more_neither_waits_nor_produces() {
    let service = Service::start().await;
    let (mut a, mut b) = (service.node("a").await, service.node("b").await);
    let mut c = service.node("c").await;
    let dir = couple(&mut a, "producers=1 consumers=1 wait=5m").await;
    let ino = produce(&mut a, dir, "f", 7).await;
    let (waits, cancelled) = (b.send(file(ino)).await, b.send(named(dir, "never")).await);
    b.ask(Op::Cancel(pb::Cancel { request: cancelled })).await.expect("cancelled");
    assert_eq!(b.wait(cancelled).await.errno, Errno::EINTR.0);
    c.send(file(ino)).await;
    c.ask(Op::Goodbye(pb::Goodbye {})).await.expect("goodbye");
    a.ask(Op::Goodbye(pb::Goodbye {})).await.expect("goodbye");
    assert_eq!(b.wait(waits).await.errno, Errno::EIO.0);
    assert_eq!(open(&mut b, ino, false, 1).await, Err(Errno::EIO));
    assert!(stands(&mut b, ino).await.starts_with("lost"));
    // Written anew.
    let anew = pb::Open { ino, write: true, truncate: true, handle: 5, ..Default::default() };
    b.ask(Op::Open(anew)).await.expect("open");
    let waits = b.send(file(ino)).await;
    leave(&mut b, ino, 5, true).await;
    assert_eq!(b.wait(waits).await.errno, 0);
    // A file that is removed is not waited for.
    let other = produce(&mut b, dir, "g", 9).await;
    let waits = b.send(file(other)).await;
    b.unlink(dir, "g").await.expect("removed");
    b.ask(Op::Release(pb::Release { ino: other, settles: false })).await.ok();
    assert_eq!(b.wait(waits).await.errno, Errno::ENOENT.0);
}

#[tokio::test]
async fn a_service_that_begins_again_knows_who_was_counted() {
    let service = Service::start().await;
    let mut a = service.node("a").await;
    let dir = couple(&mut a, "producers=3 consumers=2 wait=1s").await;
    let ino = produce(&mut a, dir, "f", 7).await;
    open(&mut a, ino, true, 8).await.expect("open");
    leave(&mut a, ino, 8, true).await;
    let before = stands(&mut a, ino).await;
    assert!(before.starts_with("awaited: 1 of 3 producers through, 1 writing"), "{before}");
    let said = stands(&mut a, dir).await;
    assert_eq!(said, "producers=3 consumers=2 keep=none wait=1s");
    // From its journal, and from the snapshot that it then made of it.
    let mut service = service;
    for _ in 0..2 {
        service = service.crash_and_restart(|_| {}).await;
        let mut b = service.node("b").await;
        assert_eq!(
            (stands(&mut b, ino).await, stands(&mut b, dir).await),
            (before.clone(), said.clone())
        );
        assert_eq!(open(&mut b, ino, false, 1).await.map(|o| o.await_ms), Ok(1000));
        b.ask(Op::Goodbye(pb::Goodbye {})).await.expect("goodbye");
    }
}

#[tokio::test]
async fn terms_that_are_none_are_refused() {
    let service = Service::start().await;
    let mut a = service.node("a").await;
    let dir = couple(&mut a, "producers=1 consumers=1").await;
    let ino = produce(&mut a, dir, "f", 7).await;
    assert_eq!(set(&mut a, ino, "producers=1 consumers=1").await, Err(Errno::ENOTDIR));
    for terms in ["", "producers=1", "producers=99999999 consumers=1", &"x".repeat(5000)] {
        assert_eq!(set(&mut a, dir, terms).await, Err(Errno::EINVAL));
    }
    assert!(set(&mut a, 4711, "producers=1 consumers=1").await.is_err());
    let text = [0xff, 0xfe].to_vec();
    let bad = pb::SetXattr { ino: dir, name: b"user.ebb.couple".to_vec(), value: text, flags: 0 };
    assert_eq!(a.ask(Op::SetXattr(bad)).await, Err(Errno::EINVAL));
    // Waiting for what cannot be.
    assert_eq!(a.ask(named(dir, "a/b")).await, Err(Errno::EINVAL));
    assert_eq!(a.ask(named(ino, "x")).await, Err(Errno::ENOTDIR));
    assert_eq!(a.ask(file(4711)).await, Err(Errno::ENOENT));
    leave(&mut a, 4711, 1, true).await;
    leave(&mut a, ino, 999, true).await;
    assert!(stands(&mut a, ino).await.starts_with("awaited: 0 of 1"));
}

async fn join(node: &mut Node, ino: u64, handle: u64, of: u32) -> Result<(), Errno> {
    node.ask(Op::Join(pb::Join { ino, handle, of })).await.map(drop)
}

#[tokio::test]
async fn who_is_one_too_many_is_not_counted() {
    let service = Service::start().await;
    let (mut a, mut b) = (service.node("a").await, service.node("b").await);
    let dir = couple(&mut a, "producers=1 consumers=1").await;
    let ino = produce(&mut a, dir, "f", 7).await;
    assert_eq!(join(&mut a, ino, 7, 2).await, Ok(()));
    assert_eq!(join(&mut a, ino, 7, 2).await, Ok(()), "told once more");
    assert_eq!(join(&mut b, ino, 7, 2).await, Err(Errno::ESTALE), "another node's");
    assert_eq!(join(&mut a, ino, 8, 2).await, Err(Errno::ESTALE), "nobody's");
    assert_eq!(join(&mut a, dir, 7, 2).await, Err(Errno::ENODATA));
    assert_eq!(join(&mut a, 4711, 7, 2).await, Err(Errno::ENODATA));
    leave(&mut a, ino, 7, true).await;
    let waits = b.send(file(ino)).await;
    open(&mut b, ino, true, 1).await.expect("open");
    open(&mut a, ino, true, 9).await.expect("open");
    assert_eq!(join(&mut b, ino, 1, 0).await, Err(Errno::EEXIST), "three of two");
    assert_eq!(join(&mut a, ino, 9, 0).await, Ok(()));
    assert!(b.is_quiet(waits).await);
    leave(&mut b, ino, 1, true).await;
    let asks =
        |handle| Op::Leave(pb::Leave { ino, handle, through: true, withdraws: false, asks: true });
    assert_eq!(b.ask(asks(1)).await, Err(Errno::ESTALE));
    for of in [1, u32::MAX] {
        open(&mut b, ino, true, 2).await.expect("open");
        assert_eq!(
            join(&mut b, ino, 2, of).await,
            Err(if of == 1 { Errno::EEXIST } else { Errno::EINVAL })
        );
        leave(&mut b, ino, 2, true).await;
    }
    assert!(b.is_quiet(waits).await, "it was not one");
    leave(&mut a, ino, 9, true).await;
    assert_eq!(b.wait(waits).await.errno, 0);
    for (node, handle) in [(&mut a, 21), (&mut b, 22)] {
        open(node, ino, false, handle).await.expect("ready");
        assert_eq!(join(node, ino, handle, 2).await, Ok(()));
    }
    open(&mut b, ino, false, 23).await.expect("ready");
    assert_eq!(join(&mut b, ino, 23, 2).await, Err(Errno::EUSERS));
    let told = "ready: 2 of 2 producers through, 0 writing; 0 of 2 consumers through, 2 reading";
    assert_eq!(stands(&mut a, ino).await, told);
    let service = service.crash_and_restart(|_| {}).await;
    assert_eq!(stands(&mut service.node("c").await, ino).await, told, "from its journal");
}

/// The journal has lost its end, and with it of how many the open is one: its node says it again.
#[tokio::test]
async fn of_how_many_an_open_is_one_is_told_again() {
    let short = |c: &mut ebb_meta_server::Config| c.lease = Duration::from_secs(2);
    let service = Service::start_with(short).await;
    let mut a = service.node("a").await;
    let dir = couple(&mut a, "producers=1 consumers=1").await;
    let ino = produce(&mut a, dir, "f", 7).await;
    let journal = service.journal();
    assert_eq!(join(&mut a, ino, 7, 3).await, Ok(()));
    let service = service.restart_on(journal, short).await;
    let mut a = Node::join(service.address, "a", 1, None).await.expect("a");
    let open = pb::CoupledHandle {
        ino,
        handle: 7,
        write: true,
        coupled: true,
        of: 3,
        ..Default::default()
    };
    let told =
        pb::Reassert { done: true, all_coupled: true, coupled: vec![open], ..Default::default() };
    a.ask(Op::Reassert(told)).await.expect("told");
    leave(&mut a, ino, 7, true).await;
    assert!(stands(&mut a, ino).await.starts_with("awaited: 1 of 3 producers through, 0 writing"));
}
