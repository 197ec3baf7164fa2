//! Locks that wait, and requests that nobody should send: each gets a clean error and changes
//! nothing.

use crate::common::{Node, ROOT, Service, connect, lock, make};
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;

#[tokio::test]
async fn locks_of_two_nodes_wait_and_are_cancelled() {
    let s = Service::start().await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let f = a.create(ROOT, "f").await;
    assert_eq!(a.ask(lock(f, 1, 1, true)).await, Ok(None));
    assert_eq!(b.ask(lock(f, 2, 0, false)).await, Err(Errno::EAGAIN));
    let get = pb::GetLock { ino: f, owner: 2, range: None, r#type: 1, flock: false };
    match b.ask(Op::GetLock(get)).await {
        Ok(Some(Body::LockState(l))) => assert_eq!((l.r#type, l.pid, l.node), (1, 1, a.id)),
        other => panic!("{other:?}"),
    }
    let waiting = b.send(lock(f, 2, 1, true)).await;
    assert!(b.is_quiet(waiting).await);
    b.ask(Op::Cancel(pb::Cancel { request: waiting })).await.unwrap();
    assert_eq!(b.wait(waiting).await.errno, Errno::EINTR.0);
    let waiting = b.send(lock(f, 2, 1, true)).await;
    let third = b.send(lock(f, 3, 1, true)).await;
    assert!(b.is_quiet(waiting).await);
    let release = pb::ReleaseLocks { ino: f, owner: 1, flock: false };
    a.ask(Op::ReleaseLocks(release)).await.unwrap();
    assert_eq!(b.wait(waiting).await.errno, 0);
    assert!(b.is_quiet(third).await);
    // The same owner twice in a circle.
    let g = a.create(ROOT, "g").await;
    assert_eq!(a.ask(lock(g, 1, 1, false)).await, Ok(None));
    let circle = a.send(lock(f, 1, 1, true)).await;
    assert!(a.is_quiet(circle).await);
    assert_eq!(b.ask(lock(g, 2, 1, true)).await, Err(Errno::EDEADLK));
    // Its node leaves: the waiting ones get on.
    drop(b.ask(Op::Goodbye(pb::Goodbye {})).await);
    assert_eq!(a.wait(circle).await.errno, 0);
}

#[tokio::test]
async fn bad_requests_change_nothing() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let f = a.create(ROOT, "f").await;
    let d = a.make(ROOT, "d", libc::S_IFDIR | 0o755).await.unwrap();
    a.attach(f, 0, 10).await;
    let before = a.query(f).await;
    let range = |start, end| vec![pb::Range { start, end }];
    let attach = |ino, ranges| Op::Attach(pb::Attach { ino, ranges, ..Default::default() });
    let bad_time = Some(pb::Time { sec: 0, nsec: 2_000_000_000 });
    let many = vec![pb::Range { start: 0, end: 1 }; (1 << 20) + 1];
    let cases: Vec<(Op, Errno)> = vec![
        (attach(f, range(9, 3)), Errno::EPROTO),
        (attach(f, range(0, u64::MAX)), Errno::EFBIG),
        (attach(f, many), Errno::E2BIG),
        (attach(d, range(0, 1)), Errno::EISDIR),
        (attach(999, range(0, 1)), Errno::ESTALE),
        (
            Op::Attach(pb::Attach {
                ino: f,
                ranges: range(0, 1),
                mtime: bad_time,
                ..Default::default()
            }),
            Errno::EPROTO,
        ),
        (
            Op::Attach(pb::Attach {
                ino: f,
                ranges: range(90, 91),
                then_query: Some(pb::Query { ino: 999, ..Default::default() }),
                ..Default::default()
            }),
            Errno::ESTALE,
        ),
        (Op::Append(pb::Append { ino: f, len: u64::MAX, ..Default::default() }), Errno::EFBIG),
        (
            Op::Append(pb::Append { ino: f, len: i64::MAX as u64, ..Default::default() }),
            Errno::EFBIG,
        ),
        (Op::Share(pb::Share { ino: 999, range: None, take: false }), Errno::ESTALE),
        (Op::Detach(pb::Detach { ino: f, ranges: range(0, 10), anew: false }), Errno::EBUSY),
        (
            Op::FlushEnd(pb::FlushEnd { ino: f, grant: 12345, done: true, shaped: false }),
            Errno::ESTALE,
        ),
        (make(ROOT, "", libc::S_IFREG), Errno::ENOENT),
        (make(ROOT, "..", libc::S_IFREG), Errno::EINVAL),
        (make(ROOT, "a/b", libc::S_IFREG), Errno::EINVAL),
        (make(ROOT, &"x".repeat(256), libc::S_IFREG), Errno::ENAMETOOLONG),
        (make(ROOT, ".ebb-part-1", libc::S_IFREG), Errno::EPERM),
        (make(ROOT, "odd", 0o170_000), Errno::EINVAL),
        (make(f, "x", libc::S_IFREG), Errno::ENOTDIR),
        (make(777, "x", libc::S_IFREG), Errno::ESTALE),
        (make(ROOT, "link", libc::S_IFLNK), Errno::ENOENT),
        (Op::SetAttr(pb::SetAttr { ino: d, size: Some(1), ..Default::default() }), Errno::EISDIR),
        (
            Op::SetAttr(pb::SetAttr { ino: f, size: Some(u64::MAX), ..Default::default() }),
            Errno::EFBIG,
        ),
        (
            Op::Rename(pb::Rename {
                parent: ROOT,
                name: b"f".to_vec(),
                flags: 7,
                new_parent: ROOT,
                new_name: b"g".to_vec(),
                ..Default::default()
            }),
            Errno::EINVAL,
        ),
        (
            Op::Rename(pb::Rename {
                parent: ROOT,
                name: b"d".to_vec(),
                flags: 0,
                new_parent: d,
                new_name: b"g".to_vec(),
                ..Default::default()
            }),
            Errno::EINVAL,
        ),
        (
            Op::Link(pb::Link {
                ino: d,
                new_parent: ROOT,
                new_name: b"l".to_vec(),
                ..Default::default()
            }),
            Errno::EPERM,
        ),
        (Op::ReadLink(pb::ReadLink { ino: f }), Errno::EINVAL),
        (
            Op::ReadDir(pb::ReadDir { ino: f, after: vec![], limit: 0, ..Default::default() }),
            Errno::ENOTDIR,
        ),
        (
            Op::ReadDir(pb::ReadDir {
                ino: ROOT,
                after: b"..".to_vec(),
                limit: 0,
                ..Default::default()
            }),
            Errno::EINVAL,
        ),
        (lock(f, 1, 9, false), Errno::EINVAL),
        (lock(999, 1, 1, true), Errno::ESTALE),
        (Op::Hello(pb::Hello::default()), Errno::EPROTO),
    ];
    for (op, errno) in cases {
        assert_eq!(a.ask(op.clone()).await, Err(errno), "{op:?}");
    }
    assert_eq!(a.query(f).await, before);
    assert_eq!(a.names(ROOT).await, ["d", "f"]);
    let backing = std::fs::read_dir(s.backing()).unwrap().count();
    assert_eq!(backing, 0);
    // A request without an operation that is known, and one in the name of nobody.
    let id = a.send(Op::Cancel(pb::Cancel { request: 4242 })).await;
    assert_eq!(a.wait(id).await.errno, 0, "nothing waits: nothing to cancel");
    assert_eq!(a.ask(Op::Goodbye(pb::Goodbye {})).await, Ok(None));
    assert_eq!(a.ask(attach(f, range(0, 1))).await, Err(Errno::ESTALE));
}

#[tokio::test]
async fn nothing_leads_out_of_the_backing() {
    let s = Service::start().await;
    let outside = s.dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret"), b"s").unwrap();
    std::fs::create_dir(s.backing().join("d")).unwrap();
    let mut a = s.node("a").await;
    let d = a.lookup(ROOT, "d").await.unwrap().ino;
    a.lookup(d, "secret").await.unwrap_err();
    // The directory becomes a link to the outside behind the service's back.
    std::fs::remove_dir(s.backing().join("d")).unwrap();
    std::os::unix::fs::symlink(&outside, s.backing().join("d")).unwrap();
    assert!(a.lookup(d, "secret2").await.is_err());
    let f = a.make(d, "f", libc::S_IFREG | 0o644).await;
    if let Ok(f) = f {
        a.attach(f, 0, 4).await;
        assert!(a.begin(f, 0, 4).await.is_err());
    }
    let unlink =
        pb::Unlink { parent: d, name: b"secret".to_vec(), dir: false, ..Default::default() };
    assert!(a.ask(Op::Unlink(unlink)).await.is_err());
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
    assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"s");
}

#[tokio::test]
async fn who_does_not_say_hello_is_not_heard() {
    let s = Service::start().await;
    let (to, out) = tokio::sync::mpsc::channel(4);
    let op = Some(make(ROOT, "f", libc::S_IFREG));
    to.send(pb::ClientFrame { requests: vec![pb::Request { id: 5, op, ..Default::default() }] })
        .await
        .unwrap();
    let stream = tokio_stream::wrappers::ReceiverStream::new(out);
    let mut from = connect(s.address).await.session(stream).await.unwrap().into_inner();
    let frame = from.message().await.unwrap().unwrap();
    assert_eq!((frame.replies[0].id, frame.replies[0].errno), (5, Errno::EPROTO.0));
    assert!(from.message().await.unwrap().is_none(), "and the stream ends");
    let mut a = Node::join(s.address, "a", 1, None).await.unwrap();
    assert_eq!(a.names(ROOT).await, Vec::<String>::new());
    let status = connect(s.address).await.status(pb::StatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.nodes.len(), status.consistency.as_str()), (1, "session"));
    assert_eq!(status.rpc.get("read_dir"), Some(&1));
}
