//! The client against the real service: every typed call once with its effects, the ways to be
//! refused, and a service that dies with answers under way.

#![allow(clippy::unwrap_used)] // a failure here is a failed test

use ebb_meta_client::{
    AttachRequest, ConnectError, ConnectOptions, Event, Holding, LockKind, LockRequest, Made,
    MakeRequest, MetaClient, Opened, QueryRequest, SetAttr, SetTime, Wish, service_status,
};
use ebb_meta_server::{Config, Server};
use ebb_transport::{Secure, Token};
use ebb_types::{ByteRange, Errno, FileKind, Incarnation, Ino, Name, Time, Version};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

fn name(s: &str) -> Name {
    Name::new(s.as_bytes()).unwrap()
}

struct Dirs {
    root: tempfile::TempDir,
}

impl Dirs {
    fn new() -> Dirs {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("backing")).unwrap();
        Dirs { root }
    }

    fn backing(&self) -> std::path::PathBuf {
        self.root.path().join("backing")
    }
}

struct Running {
    server: Arc<Server>,
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn start(dirs: &Dirs, token: Option<Token>) -> Running {
        Running::with_lease(dirs, token, Config::LEASE).await
    }

    async fn with_lease(dirs: &Dirs, token: Option<Token>, lease: Duration) -> Running {
        let state = dirs.root.path().join("state");
        let config = Config { token, lease, ..Config::new(dirs.backing(), state) };
        let server = Server::open(config).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = server.clone();
        let task = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            serving.serve(listener, stopped).await.unwrap();
        });
        Running { server, address, stop, task }
    }

    fn options(&self, node: &str) -> ConnectOptions {
        ConnectOptions {
            incarnation: Incarnation(node.len() as u64),
            peer_address: "127.0.0.1:1".into(),
            consistency: "session".into(),
            ..ConnectOptions::new(self.address.to_string(), node)
        }
    }

    async fn connect(&self, node: &str) -> MetaClient {
        MetaClient::connect(self.options(node)).await.unwrap().0
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap();
        self.server.shutdown();
    }
}

fn make(at: &str, kind: FileKind, open: bool) -> MakeRequest {
    MakeRequest {
        parent: Ino::ROOT,
        name: name(at),
        kind,
        perm: 0o644,
        uid: 1000,
        gid: 1000,
        rdev: 0,
        target: if kind == FileKind::Symlink { b"file".to_vec() } else { Vec::new() },
        open,
        lease: Wish::No,
        seat: None,
        handle: 0,
    }
}

async fn create(client: &MetaClient, at: &str) -> Opened {
    match client.make(&make(at, FileKind::Regular, true)).await.unwrap() {
        Made::Opened(opened, _) => opened,
        made => panic!("{made:?}"),
    }
}

fn attach(ino: Ino, start: u64, end: u64) -> AttachRequest {
    let ranges = vec![ByteRange::new(start, end)];
    AttachRequest { mtime: Some(Time::now()), ..AttachRequest::new(ino, ranges) }
}

#[tokio::test]
async fn names_and_attributes() {
    let dirs = Dirs::new();
    std::fs::write(dirs.backing().join("old"), b"from before").unwrap();
    let running = Running::start(&dirs, None).await;
    let client = running.connect("n1").await;

    let old = client.lookup(Ino::ROOT, &name("old")).await.unwrap();
    assert_eq!((old.kind, old.size), (FileKind::Regular, 11));
    assert_eq!(client.lookup(Ino::ROOT, &name("none")).await, Err(Errno::ENOENT));
    let file = create(&client, "file").await;
    assert_eq!((file.attr.uid, file.attr.perm, file.map.map.size), (1000, 0o644, 0));
    let again = client.make(&make("file", FileKind::Regular, true)).await;
    assert_eq!(again, Err(Errno::EEXIST));
    let Made::Made(dir, _) = client.make(&make("dir", FileKind::Directory, false)).await.unwrap()
    else {
        panic!()
    };
    let Made::Made(link, _) = client.make(&make("sym", FileKind::Symlink, false)).await.unwrap()
    else {
        panic!()
    };
    assert_eq!(client.readlink(link.ino).await.unwrap(), b"file");
    let hard = client.link(file.attr.ino, dir.ino, &name("hard")).await.unwrap();
    assert_eq!((hard.ino, hard.nlink), (file.attr.ino, 2));
    client.rename((dir.ino, &name("hard")), (dir.ino, &name("moved")), 0).await.unwrap();
    assert_eq!(client.rmdir(Ino::ROOT, &name("dir")).await, Err(Errno::ENOTEMPTY));
    client.unlink(dir.ino, &name("moved")).await.unwrap();
    client.rmdir(Ino::ROOT, &name("dir")).await.unwrap();
    assert_eq!(client.access(file.attr.ino).await, Ok(()));

    let mut names = Vec::new();
    let mut after = None;
    loop {
        let page = client.readdir(Ino::ROOT, after.as_ref(), 1).await.unwrap();
        assert!(page.entries.len() <= 1);
        names.extend(page.entries.iter().map(|e| e.name.to_string()));
        if page.end {
            break;
        }
        after = page.entries.last().map(|e| e.name.clone());
    }
    names.sort();
    assert_eq!(names, ["file", "old", "sym"]);

    let set = SetAttr {
        mode: Some(0o600),
        mtime: Some(SetTime::To(Time { sec: 5, nsec: 6 })),
        ..SetAttr::default()
    };
    let done = client.setattr(file.attr.ino, &set).await.unwrap();
    assert_eq!((done.attr.perm, done.attr.mtime), (0o600, Time { sec: 5, nsec: 6 }));
    let cut = SetAttr { size: Some(4), ..SetAttr::default() };
    let cut = client.setattr(old.ino, &cut).await.unwrap();
    assert_eq!(cut.attr.size, 4);
    assert_eq!(cut.map.unwrap().map.base_len, 4);
    assert_eq!(std::fs::read(dirs.backing().join("old")).unwrap(), b"from");
    assert_eq!(client.getattr(old.ino).await.unwrap().size, 4);
    let statfs = client.statfs(std::time::Duration::ZERO).await.unwrap();
    assert!(statfs.blocks > 0 && statfs.bsize > 0);
    let nodes = client.nodes(None).await.unwrap();
    assert_eq!((nodes.len(), nodes[0].name.as_str(), nodes[0].alive), (1, "n1", true));
    let calls = client.stats().calls;
    assert_eq!((calls["create"], calls["mkdir"], calls["symlink"]), (2, 1, 1));
    client.goodbye().await.unwrap();
    eventually("the session has ended", || !client.stats().connected).await;
    assert_eq!(client.access(old.ino).await, Err(Errno::ENOTCONN));
    running.stop().await;
}

#[tokio::test]
async fn bytes_move_between_nodes_and_to_the_backing() {
    let dirs = Dirs::new();
    let running = Running::start(&dirs, None).await;
    let (one, two) = (running.connect("n1").await, running.connect("node2").await);
    assert_ne!(one.node_id(), two.node_id());
    let ino = create(&one, "shared").await.attr.ino;
    let opened = two.open(ino, true, false, Version::ZERO, Wish::No).await.unwrap();
    assert_eq!(opened.map.map.size, 0);

    one.attach(&attach(ino, 0, 100)).await.unwrap();
    let query = QueryRequest { ino, range: ByteRange::ALL, known: Version::ZERO, lease: false };
    let attached = two
        .attach(&AttachRequest { then_query: Some(query), durable: true, ..attach(ino, 40, 60) })
        .await
        .unwrap();
    let map = attached.map.unwrap().map;
    let owners: Vec<_> = map.ranges.iter().map(|o| (o.range, o.node)).collect();
    let (n1, n2) = (one.node_id(), two.node_id());
    let parts = [(0, 40, n1), (40, 60, n2), (60, 100, n1)];
    assert_eq!(owners, parts.map(|(s, e, n)| (ByteRange::new(s, e), n)));
    assert_eq!((map.version, map.size, attached.size), (attached.version, 100, 100));
    let same = one.query(QueryRequest { known: map.version, ..query }).await.unwrap();
    assert!(same.map.unchanged && same.map.ranges.is_empty());

    let appended = one.append(ino, 50, Time::now(), 0, 0, Wish::No).await.unwrap();
    assert_eq!(appended.size, 150);
    one.sync_meta().await.unwrap();

    // Node one flushes what is its own; the file is short until node two did so too.
    for (client, content) in [(&one, [(0, 40), (60, 150)].as_slice()), (&two, &[(40, 60)])] {
        let grant = client.flush_begin(ino, &[ByteRange::new(0, 150)]).await.unwrap();
        let granted: Vec<_> =
            grant.ranges.iter().map(|o| (o.range.start(), o.range.end())).collect();
        assert_eq!(granted, content);
        let backing = grant.backing.unwrap();
        let path = dirs.backing().join(std::str::from_utf8(&backing.path).unwrap());
        write_ranges(&path, content);
        let done = client.flush_end(ino, grant.grant, true, false).await.unwrap();
        assert_eq!(done.published, std::ptr::eq(client, &two));
    }
    let bytes = std::fs::read(dirs.backing().join("shared")).unwrap();
    assert!(bytes.len() == 150 && bytes.iter().all(|b| *b == 7));
    let stale = one.flush_end(ino, 12345, true, false).await.unwrap_err();
    assert_eq!(stale.errno, Errno::ESTALE);
    assert!(!stale.text.is_empty());
    let detached = one.detach(ino, &[ByteRange::new(0, 40)]).await.unwrap();
    let map = two.query(query).await.unwrap().map;
    assert_eq!((detached.version, detached.size), (map.version, map.size));
    assert_eq!((detached.base_len, map.base_len), (150, 150), "as far as both have flushed");
    assert_eq!(map.ranges.first().unwrap().range, ByteRange::new(40, 60));
    one.release(ino, false).await.unwrap();
    running.stop().await;
}

fn write_ranges(path: &Path, ranges: &[(u64, u64)]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(path).unwrap();
    for (start, end) in ranges {
        file.write_all_at(&vec![7; (end - start) as usize], *start).unwrap();
    }
    file.sync_all().unwrap();
}

#[tokio::test]
async fn locks_exclude_wait_and_are_cancelled() {
    let dirs = Dirs::new();
    let running = Running::start(&dirs, None).await;
    let (one, two) = (running.connect("n1").await, running.connect("node2").await);
    let ino = create(&one, "file").await.attr.ino;
    let lock = |owner, kind, wait| LockRequest {
        ino,
        owner,
        pid: 99,
        range: ByteRange::new(0, 10),
        kind,
        flock: false,
        wait,
        publish: false,
    };
    one.set_lock(&lock(1, LockKind::Write, false)).await.unwrap();
    let busy = two.set_lock(&lock(1, LockKind::Read, false)).await;
    assert_eq!(busy, Err(Errno::EAGAIN));
    let holder = two.get_lock(&lock(1, LockKind::Read, false)).await.unwrap().unwrap();
    assert_eq!((holder.kind, holder.pid, holder.node), (LockKind::Write, 99, one.node_id()));

    let waiting = two.set_lock(&lock(1, LockKind::Write, true));
    let cancel = waiting.canceller();
    let waiting = tokio::spawn(waiting);
    tokio::time::sleep(Duration::from_millis(50)).await;
    cancel.cancel();
    assert_eq!(waiting.await.unwrap(), Err(Errno::EINTR));

    // A call that is dropped does not get the lock later.
    let dropped = two.set_lock(&lock(1, LockKind::Write, true));
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(dropped);
    let waiting = tokio::spawn(two.set_lock(&lock(2, LockKind::Write, true)));
    one.release_locks(ino, 1, false).await.unwrap();
    waiting.await.unwrap().unwrap();
    two.set_lock(&lock(2, LockKind::Unlock, false)).await.unwrap();
    assert_eq!(one.get_lock(&lock(1, LockKind::Write, false)).await.unwrap(), None);
    running.stop().await;
}

#[tokio::test]
async fn strangers_and_doubles_are_refused() {
    let dirs = Dirs::new();
    let token = |file: &str| {
        let path = dirs.root.path().join(file);
        (Token::generate_to(&path).unwrap(), Arc::new(Token::load(&path).unwrap()))
    };
    let ((theirs, ours), (_, other)) = (token("job"), token("other"));
    let running = Running::start(&dirs, Some(theirs)).await;
    let connect = async |node: &str, token: Option<Arc<Token>>, consistency: &str| {
        let consistency = consistency.to_owned();
        let options = ConnectOptions { token, consistency, ..running.options(node) };
        MetaClient::connect(options).await.map(|(client, _)| client)
    };
    let client = connect("n1", Some(ours.clone()), "session").await.unwrap();
    assert!(client.getattr(Ino::ROOT).await.is_ok());
    for stranger in [None, Some(other)] {
        let refused = connect("n22", stranger, "session").await.unwrap_err();
        assert!(matches!(refused, ConnectError::BadToken(_)), "{refused:?}");
    }
    let wrong = connect("n22", Some(ours.clone()), "posix").await.unwrap_err();
    assert!(matches!(wrong, ConnectError::WrongConsistency(_)), "{wrong:?}");
    let mut double = ConnectOptions { token: Some(ours.clone()), ..running.options("n1") };
    double.incarnation = Incarnation(99);
    let taken = MetaClient::connect(double).await.unwrap_err();
    assert!(matches!(taken, ConnectError::NameTaken(_)), "{taken:?}");
    let address = running.address.to_string();
    let status = service_status(&address, Some(&ours), Secure::default(), Duration::from_secs(5))
        .await
        .unwrap();
    assert_eq!((status.consistency.as_str(), status.nodes.len()), ("session", 1));
    running.stop().await;
}

/// Forwards connections; what the service answers can be held back, and everything cut.
struct Proxy {
    address: SocketAddr,
    target: watch::Sender<SocketAddr>,
    swallow: Arc<AtomicBool>,
    cut: watch::Sender<u64>,
}

impl Proxy {
    async fn start(target: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (target, to) = watch::channel(target);
        let (cut, cuts) = watch::channel(0);
        let swallow = Arc::new(AtomicBool::new(false));
        let swallowing = swallow.clone();
        tokio::spawn(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let target = *to.borrow();
                let (swallowing, mut cuts) = (swallowing.clone(), cuts.clone());
                cuts.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(far) = TcpStream::connect(target).await else { return };
                    tokio::select! {
                        _ = cuts.changed() => {}
                        () = forward(near, far, &swallowing) => {}
                    }
                });
            }
        });
        Proxy { address, target, swallow, cut }
    }
}

async fn forward(near: TcpStream, far: TcpStream, swallow: &AtomicBool) {
    let ((mut near_in, mut near_out), (mut far_in, mut far_out)) =
        (near.into_split(), far.into_split());
    let there = async { drop(tokio::io::copy(&mut near_in, &mut far_out).await) };
    let back = async {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = far_in.read(&mut bytes).await {
            if !swallow.load(SeqCst) && near_out.write_all(&bytes[..n]).await.is_err() {
                return;
            }
        }
    };
    tokio::join!(there, back);
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never: {what}");
}

/// An append gets its place before anybody has a copy of its bytes. When its node is lost then, its
/// partner has everything that was acknowledged, and the rest never was.
#[tokio::test]
async fn appends_under_way_when_their_node_is_lost_never_were() {
    let dirs = Dirs::new();
    let running = Running::with_lease(&dirs, None, Duration::from_millis(400)).await;
    let (one, two) = (running.connect("n1").await, running.connect("node2").await);
    let (lost, me) = (one.node_id(), two.node_id());
    let epoch = one.pair(Some(me)).await.unwrap();
    let (end, middle) = (create(&one, "end").await, create(&one, "middle").await);
    let (end, middle) = (end.attr.ino, middle.attr.ino);
    for ino in [end, middle] {
        one.attach(&AttachRequest { copies: epoch, ..attach(ino, 0, 100) }).await.unwrap();
        // Copied and acknowledged; then one that is not.
        for len in [20, 50] {
            one.append(ino, len, Time::now(), epoch, 0, Wish::No).await.unwrap();
        }
    }
    // Behind it, another one has written.
    two.attach(&attach(middle, 170, 180)).await.unwrap();
    drop(one);
    let held = |done| [Holding { owner: lost, epoch, done }];
    let mut waited = 0;
    while two.copies(&held(false), false, &[]).await.unwrap().take != [epoch] {
        assert!(waited < 200, "never lost");
        waited += 1;
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    for ino in [end, middle] {
        let copied = ByteRange::new(0, 120);
        let adopted = two.adopt(lost, epoch, ino, &[copied]).await.unwrap();
        assert_eq!(adopted.ranges.iter().map(|r| r.len()).sum::<u64>(), 120);
    }
    assert_eq!(two.copies(&held(true), false, &[]).await.unwrap().drop, [epoch]);
    let query =
        |ino| QueryRequest { ino, range: ByteRange::ALL, known: Version::ZERO, lease: false };
    for (ino, size, owned) in [(end, 120, 120), (middle, 180, 130)] {
        let map = two.query(query(ino)).await.unwrap().map;
        assert!(map.ranges.iter().all(|o| o.node == me), "{map:?}");
        assert_eq!(map.ranges.iter().map(|o| o.range.len()).sum::<u64>(), owned);
        assert_eq!(map.size, size);
    }
    running.stop().await;
}

/// Operations that would fail or change more when they were done twice, under way.
fn changes(client: &MetaClient, file: Ino) -> Vec<tokio::task::JoinHandle<Result<u64, Errno>>> {
    let each = || client.clone();
    let (unlinks, renames, makes) = (each(), each(), each());
    let (appends, links, creates) = (each(), each(), each());
    vec![
        tokio::spawn(async move { unlinks.unlink(Ino::ROOT, &name("gone")).await.map(|()| 0) }),
        tokio::spawn(async move {
            let (from, to) = (name("from"), name("to"));
            renames.rename((Ino::ROOT, &from), (Ino::ROOT, &to), 0).await.map(|()| 0)
        }),
        tokio::spawn(async move {
            makes.make(&make("dir", FileKind::Directory, false)).await.map(|_| 0)
        }),
        tokio::spawn(async move {
            appends.append(file, 1000, Time::now(), 0, 0, Wish::No).await.map(|done| done.size)
        }),
        tokio::spawn(async move {
            let linked = links.link(file, Ino::ROOT, &name("hard")).await;
            linked.map(|attr| u64::from(attr.nlink))
        }),
        tokio::spawn(async move { Ok(create(&creates, "new").await.map.map.size) }),
    ]
}

/// The service has done what was asked, and dies (or only the connection does) before the
/// answers arrive: the application notices nothing, and nothing is done twice.
async fn done_but_not_answered(service_dies: bool) {
    let dirs = Dirs::new();
    let mut running = Running::start(&dirs, None).await;
    let proxy = Proxy::start(running.address).await;
    let options = ConnectOptions { address: proxy.address.to_string(), ..running.options("n1") };
    let (client, _) = MetaClient::connect(options).await.unwrap();
    let mut events = client.events();
    let file = create(&client, "file").await.attr.ino;
    create(&client, "gone").await;
    create(&client, "from").await;
    let before = running.server.status().rpc.values().sum::<u64>();
    let heartbeats = |running: &Running| running.server.status().rpc["heartbeat"];
    let beats_before = heartbeats(&running);

    proxy.swallow.store(true, SeqCst);
    let calls = changes(&client, file);
    eventually("all were done", || {
        let status = running.server.status();
        let beats = heartbeats(&running) - beats_before;
        status.rpc.values().sum::<u64>() - beats >= before + 6
    })
    .await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(calls.iter().all(|c| !c.is_finished()));
    if service_dies {
        proxy.cut.send_modify(|n| *n += 1);
        running.stop().await;
        running = Running::start(&dirs, None).await;
        proxy.target.send_replace(running.address);
    }
    proxy.swallow.store(false, SeqCst);
    proxy.cut.send_modify(|n| *n += 1);
    let mut got = Vec::new();
    for call in calls {
        got.push(call.await.unwrap());
    }
    assert_eq!(got, [Ok(0), Ok(0), Ok(0), Ok(1000), Ok(2), Ok(0)]);
    assert_eq!(client.getattr(file).await.unwrap().size, 1000, "appended once");
    let page = client.readdir(Ino::ROOT, None, 100).await.unwrap();
    let mut names: Vec<_> = page.entries.iter().map(|e| e.name.to_string()).collect();
    names.sort();
    assert_eq!(names, ["dir", "file", "hard", "new", "to"]);
    let mut seen = Vec::new();
    while let Ok(event) = events.try_recv() {
        seen.push(event);
    }
    let restarted = seen.iter().any(|e| matches!(e, Event::ServiceRestarted { .. }));
    let resumed = seen.iter().any(|e| matches!(e, Event::Resumed { expired: false }));
    assert_eq!((restarted, resumed), (service_dies, !service_dies), "{seen:?}");
    running.stop().await;
}

#[tokio::test]
async fn a_broken_connection_with_answers_under_way_is_not_noticed() {
    done_but_not_answered(false).await;
}

#[tokio::test]
async fn a_service_that_dies_with_answers_under_way_is_not_noticed() {
    done_but_not_answered(true).await;
}

/// Who writes past the daemon claims blocks: it gets what nobody else has.
#[tokio::test]
async fn claims_take_nothing_from_others() {
    let dirs = Dirs::new();
    let running = Running::start(&dirs, None).await;
    let (one, two) = (running.connect("n1").await, running.connect("node2").await);
    let opened = create(&one, "claimed").await;
    assert!(opened.sole, "it was just made");
    let ino = opened.attr.ino;
    assert!(!two.open(ino, true, false, Version::ZERO, Wish::No).await.unwrap().sole);

    let range = ByteRange::new;
    let claims = |guessed: &[ByteRange], again: &[ByteRange]| AttachRequest {
        ranges: Vec::new(),
        guessed: guessed.to_vec(),
        again: again.to_vec(),
        ..attach(ino, 0, 0)
    };
    let first = one.attach(&claims(&[range(0, 8192)], &[])).await.unwrap();
    assert_eq!((first.size, first.contested), (8192, Vec::new()));
    two.attach(&attach(ino, 100, 200)).await.unwrap();
    let again = one.attach(&claims(&[range(8192, 9000)], &[range(0, 8192)])).await.unwrap();
    assert_eq!((again.size, again.contested), (9000, vec![range(100, 200)]));
    let late = two.attach(&claims(&[range(0, 4096)], &[range(8192, 9000)])).await.unwrap();
    let theirs = [range(0, 100), range(200, 4096), range(8192, 9000)];
    assert_eq!((late.version, late.contested), (again.version.next(), theirs.to_vec()));
    two.release(ino, false).await.unwrap();
    assert!(one.open(ino, false, false, Version::ZERO, Wish::No).await.unwrap().sole);
    running.stop().await;
}

/// As a new mount does: again where it is hung up on, and only there.
async fn come(options: ConnectOptions, late: u64) -> MetaClient {
    let end = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        match MetaClient::connect(options.clone()).await {
            Ok((client, _)) => return client,
            Err(ConnectError::HungUp(_)) if tokio::time::Instant::now() < end => {}
            Err(e) => panic!("{e:?}"),
        }
        tokio::time::sleep(Duration::from_millis(100 + late)).await;
    }
}

/// More than there are places for strangers, of which some are taken.
#[tokio::test]
async fn many_nodes_at_once_get_in_beside_strangers() {
    const NODES: u64 = 300;
    let dirs = Dirs::new();
    let path = dirs.root.path().join("token");
    let token = Arc::new(Token::generate_to(&path).unwrap());
    let running = Running::start(&dirs, Some(Token::load(&path).unwrap())).await;
    let mut strangers = Vec::new();
    for _ in 0..40 {
        strangers.push(TcpStream::connect(running.address).await.unwrap());
    }
    let mut coming = tokio::task::JoinSet::new();
    for i in 0..NODES {
        let options =
            ConnectOptions { token: Some(token.clone()), ..running.options(&format!("n{i}")) };
        coming.spawn(come(options, i * 3));
    }
    let clients = coming.join_all().await;
    let nodes = running.server.status().nodes;
    assert_eq!(nodes.iter().filter(|n| n.alive).count() as u64, NODES);
    drop((clients, strangers));
    running.stop().await;
}
