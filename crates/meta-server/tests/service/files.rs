//! Names and bytes of files: two nodes, a real backing, and others who change it.

#![allow(clippy::unwrap_used)]

use crate::common::{ROOT, Service, begin, write_granted};
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

fn parts(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
    let names = names.map(|n| n.into_string().unwrap());
    names.filter(|n| n.starts_with(".ebb-part-")).collect()
}

#[tokio::test]
async fn a_file_written_by_two_nodes_reaches_the_backing_whole() {
    let s = Service::start().await;
    let backing = s.backing();
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let dir = a.make(ROOT, "d", libc::S_IFDIR | 0o755).await.unwrap();
    let file = a.create(dir, "f").await;
    assert_eq!(b.lookup(dir, "f").await.unwrap().ino, file);
    a.attach(file, 0, 100).await;
    b.attach(file, 50, 200).await;
    let map = a.query(file).await;
    let owners: Vec<_> = map.ranges.iter().map(|r| (r.start, r.end, r.node)).collect();
    assert_eq!(owners, [(0, 50, a.id), (50, 200, b.id)]);
    assert!(!backing.join("d").exists(), "job-local until the first flush");

    let grant = a.begin(file, 0, 200).await.unwrap();
    assert_eq!(grant.ranges.iter().map(|r| (r.start, r.end)).collect::<Vec<_>>(), [(0, 50)]);
    assert_eq!(parts(&backing.join("d")).len(), 1);
    assert_eq!(a.names(dir).await, ["f"], "part files are hidden");
    assert_eq!(a.lookup(dir, &parts(&backing.join("d"))[0]).await, Err(Errno::ENOENT));
    write_granted(&backing, &grant, b'a');
    assert!(!a.end(file, grant.grant, true).await.unwrap().published);
    assert!(!backing.join("d/f").exists(), "never a short file under its own name");

    assert!(b.flush(&backing, file, b'b').await.published);
    let data = std::fs::read(backing.join("d/f")).unwrap();
    assert_eq!(data, [vec![b'a'; 50], vec![b'b'; 150]].concat());
    assert_eq!(std::fs::metadata(backing.join("d/f")).unwrap().mode() & 0o7777, 0o644);
    assert!(parts(&backing.join("d")).is_empty());
    assert!(a.query(file).await.ranges.iter().all(|r| r.flushed));

    // From here on in place.
    a.attach(file, 150, 300).await;
    assert!(a.flush(&backing, file, b'c').await.published);
    assert_eq!(std::fs::read(backing.join("d/f")).unwrap().len(), 300);
    let opened = b.open(file).await.unwrap();
    assert_eq!(opened.backing.unwrap().path, b"d/f");
    assert_eq!(opened.map.unwrap().size, 300);
}

/// As a daemon does that takes over what a dead one left.
#[tokio::test]
async fn renewing_takes_nothing_from_others_and_makes_copies_stale() {
    let s = Service::start().await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let file = a.create(ROOT, "f").await;
    a.attach(file, 0, 100).await;
    let before = b.attach(file, 50, 80).await;
    let ranges = vec![pb::Range { start: 10, end: 90 }, pb::Range { start: 200, end: 300 }];
    let renew = pb::Attach { ino: file, ranges, renew: true, ..Default::default() };
    a.ask(Op::Attach(renew)).await.unwrap();
    let map = b.query(file).await;
    assert_eq!(map.size, 100, "nobody had written beyond");
    let owner = |at| map.ranges.iter().find(|r| r.start <= at && at < r.end).unwrap();
    for at in [10, 89] {
        assert!(owner(at).node == a.id && owner(at).version > before, "{at}: {map:?}");
    }
    assert_eq!((owner(60).node, owner(60).version), (b.id, before));
}

/// They may be in the other node's journal for long, and a recovery must not take them for the newest ones.
#[tokio::test]
async fn who_writes_over_anothers_bytes_hears_that_there_were_any() {
    let s = Service::start().await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let file = a.create(ROOT, "f").await;
    b.attach(file, 0, 80).await;
    let others = [a.attached(file, 0, 100).await.others, a.attached(file, 0, 100).await.others];
    assert_eq!(others, [true, false]);
}

#[tokio::test]
async fn a_checkpoint_replaced_by_rename_stays_until_the_new_one_is_whole() {
    let s = Service::start().await;
    let backing = s.backing();
    std::fs::write(backing.join("ckpt"), b"old").unwrap();
    let mut a = s.node("a").await;
    let new = a.create(ROOT, "ckpt.tmp").await;
    a.attach(new, 0, 5).await;
    a.rename((ROOT, "ckpt.tmp"), (ROOT, "ckpt")).await.unwrap();
    assert_eq!(a.lookup(ROOT, "ckpt").await.unwrap().ino, new);
    assert_eq!(std::fs::read(backing.join("ckpt")).unwrap(), b"old");
    let grant = a.begin(new, 0, 5).await.unwrap();
    assert_eq!(std::fs::read(backing.join("ckpt")).unwrap(), b"old");
    write_granted(&backing, &grant, b'n');
    assert!(a.end(new, grant.grant, true).await.unwrap().published);
    assert_eq!(std::fs::read(backing.join("ckpt")).unwrap(), b"nnnnn");

    // Deleted before it was whole: the old one goes too.
    std::fs::write(backing.join("x"), b"old").unwrap();
    let new = a.create(ROOT, "y").await;
    a.attach(new, 0, 5).await;
    let grant = a.begin(new, 0, 5).await.unwrap();
    a.rename((ROOT, "y"), (ROOT, "x")).await.unwrap();
    a.unlink(ROOT, "x").await.unwrap();
    assert!(!backing.join("x").exists() && parts(&backing).is_empty());
    assert_eq!(a.end(new, grant.grant, true).await, Err(Errno::ENOENT));
    assert_eq!(a.begin(new, 0, 5).await.err(), Some(Errno::ESTALE));
}

#[tokio::test]
async fn a_deleted_file_lives_while_it_is_open() {
    let s = Service::start().await;
    std::fs::write(s.backing().join("f"), b"12345").unwrap();
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let ino = a.lookup(ROOT, "f").await.unwrap().ino;
    a.open(ino).await.unwrap();
    b.unlink(ROOT, "f").await.unwrap();
    assert!(!s.backing().join("f").exists());
    assert_eq!(a.attr(ino).await.unwrap().nlink, 0);
    a.attach(ino, 0, 3).await;
    assert_eq!(a.begin(ino, 0, 3).await.err(), Some(Errno::ENOENT), "nobody needs it there");
    a.ask(Op::Release(pb::Release { ino, settles: false })).await.unwrap();
    assert_eq!(a.attr(ino).await.err(), Some(Errno::ESTALE));
}

#[tokio::test]
async fn flushes_and_truncates_of_the_same_bytes_take_turns() {
    let s = Service::start().await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let file = a.create(ROOT, "f").await;
    a.attach(file, 0, 100).await;
    let grant = a.begin(file, 0, 100).await.unwrap();
    b.attach(file, 50, 100).await;
    let flush = b.send(begin(file, 50, 100)).await;
    let cut = Op::SetAttr(pb::SetAttr { ino: file, size: Some(10), ..Default::default() });
    let cut = b.send(cut).await;
    assert!(b.is_quiet(flush).await && b.is_quiet(cut).await);
    // Bytes that were overtaken meanwhile are not flushed by this.
    a.end(file, grant.grant, true).await.unwrap();
    assert_eq!(a.end(file, grant.grant, true).await, Err(Errno::ESTALE), "a grant ends once");
    // One of the two goes first; the other one waits for it, or finds nothing left.
    let flush = b.wait(flush).await;
    if let Some(Body::FlushGrant(g)) = flush.body
        && g.grant != 0
    {
        assert!(b.is_quiet(cut).await);
        write_granted(&s.backing(), &g, 1);
        b.end(file, g.grant, true).await.unwrap();
    }
    match b.wait(cut).await.body {
        Some(Body::Entry(e)) => {
            assert_eq!(e.attr.unwrap().size, 10);
            let map = e.map.unwrap();
            assert_eq!((map.size, map.ranges.iter().map(|r| r.end).max()), (10, Some(10)));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_others_do_on_the_backing_is_seen() {
    let s = Service::start().await;
    let backing = s.backing();
    std::fs::create_dir(backing.join("d")).unwrap();
    std::fs::write(backing.join("d/f"), b"one").unwrap();
    let mut a = s.node("a").await;
    let dir = a.lookup(ROOT, "d").await.unwrap().ino;
    let file = a.lookup(dir, "f").await.unwrap().ino;
    let before = a.open(file).await.unwrap().map.unwrap();
    assert_eq!(a.lookup(dir, "g").await.err(), Some(Errno::ENOENT));
    assert_eq!(a.names(dir).await, ["f"]);

    tokio::time::sleep(Duration::from_millis(60)).await;
    std::fs::write(backing.join("d/f"), b"and more").unwrap();
    std::fs::write(backing.join("d/g"), b"new").unwrap();
    let after = a.open(file).await.unwrap().map.unwrap();
    assert_eq!((after.size, after.base_len), (8, 8));
    assert!(after.base_version > before.base_version);
    assert_eq!(a.names(dir).await, ["f", "g"], "a listing always looks");

    tokio::time::sleep(Duration::from_millis(1100)).await;
    std::fs::rename(backing.join("d"), backing.join("e")).unwrap();
    assert_eq!(a.lookup(ROOT, "e").await.unwrap().ino, dir, "moved, not another one");
    assert_eq!(a.lookup(dir, "f").await.unwrap().ino, file);
    std::fs::remove_dir_all(backing.join("e")).unwrap();
    assert_eq!(a.names(ROOT).await, Vec::<String>::new());
    assert_eq!(a.lookup(ROOT, "e").await.err(), Some(Errno::ENOENT));
}

#[tokio::test]
async fn unflushed_bytes_win_over_what_others_do() {
    let s = Service::start().await;
    let backing = s.backing();
    std::fs::create_dir(backing.join("d")).unwrap();
    std::fs::write(backing.join("d/f"), b"theirs").unwrap();
    let mut a = s.node("a").await;
    let dir = a.lookup(ROOT, "d").await.unwrap().ino;
    let file = a.lookup(dir, "f").await.unwrap().ino;
    a.attach(file, 0, 10).await;
    std::fs::remove_dir_all(backing.join("d")).unwrap();
    std::fs::write(backing.join("d"), b"in the way").unwrap();
    std::fs::remove_file(backing.join("d")).unwrap();
    assert_eq!(a.names(ROOT).await, ["d"]);
    assert_eq!(a.names(dir).await, ["f"]);
    assert!(a.flush(&backing, file, b'm').await.published);
    assert_eq!(std::fs::read(backing.join("d/f")).unwrap(), vec![b'm'; 10]);
}

#[tokio::test]
async fn a_drain_says_what_is_done_and_what_is_not() {
    let s = Service::start().await;
    let backing = s.backing();
    let mut a = s.node("a").await;
    let dir = a.make(ROOT, "d", libc::S_IFDIR | 0o700).await.unwrap();
    let empty = a.create(dir, "empty").await;
    let sparse = a.create(dir, "sparse").await;
    let dirty = a.create(dir, "dirty").await;
    a.attach(dirty, 0, 9).await;
    let set = pb::SetAttr { ino: sparse, size: Some(1 << 20), ..Default::default() };
    a.ask(Op::SetAttr(set)).await.unwrap();
    let link =
        pb::Link { ino: empty, new_parent: ROOT, new_name: b"same".to_vec(), ..Default::default() };
    a.ask(Op::Link(link)).await.unwrap();
    let long_ago = pb::TimeSet { now: false, time: Some(pb::Time { sec: 86400, nsec: 5 }) };
    let set = pb::SetAttr { ino: dir, mtime: Some(long_ago), ..Default::default() };
    a.ask(Op::SetAttr(set)).await.unwrap();

    let drained = a.materialize().await;
    assert_eq!(drained.failures, []);
    let unfinished: Vec<_> =
        drained.unfinished.iter().map(|u| (u.path.clone(), u.bytes, u.node)).collect();
    assert_eq!(unfinished, [(b"d/dirty".to_vec(), 9, a.id)]);
    let meta = |p: &str| std::fs::metadata(backing.join(p)).unwrap();
    assert_eq!(meta("d/sparse").len(), 1 << 20);
    assert_eq!((meta("d/empty").nlink(), meta("d/empty").ino()), (2, meta("same").ino()));
    assert!(!backing.join("d/dirty").exists());
    assert!(a.flush(&backing, dirty, 1).await.published);
    assert_eq!(a.materialize().await.unfinished, []);
    assert_eq!((meta("d").mtime(), meta("d").mtime_nsec()), (86400, 5), "what came in moved it");

    // A directory where a file is in the way cannot be made; it is named, the rest goes on.
    a.make(ROOT, "taken", libc::S_IFDIR | 0o755).await.unwrap();
    a.make(ROOT, "free", libc::S_IFDIR | 0o755).await.unwrap();
    std::fs::write(backing.join("taken"), b"x").unwrap();
    let drained = a.materialize().await;
    assert_eq!(drained.failures.len(), 1);
    assert_eq!(drained.failures[0].path, b"taken");
    assert_eq!(drained.failures[0].errno, Errno::EEXIST.0);
    assert!(backing.join("free").is_dir());
}

#[tokio::test]
async fn attributes_and_xattrs_are_written_through() {
    let s = Service::start().await;
    let path = s.backing().join("f");
    std::fs::write(&path, b"x").unwrap();
    let mut a = s.node("a").await;
    let ino = a.lookup(ROOT, "f").await.unwrap().ino;
    let set = |mode| Op::SetAttr(pb::SetAttr { ino, mode: Some(mode), ..Default::default() });
    a.ask(set(0o4755)).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o4755);
    let kill = pb::SetAttr { ino, kill_priv: true, ..Default::default() };
    a.ask(Op::SetAttr(kill)).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o755);
    let xattr = |name: &str, flags| {
        let (name, value) = (name.as_bytes().to_vec(), b"v".to_vec());
        Op::SetXattr(pb::SetXattr { ino, name, value, flags })
    };
    a.ask(xattr("user.k", 1)).await.unwrap();
    assert_eq!(a.ask(xattr("user.k", 1)).await, Err(Errno::EEXIST));
    assert_eq!(a.ask(xattr("user.other", 2)).await, Err(Errno::ENODATA));
    assert_eq!(a.ask(xattr("user.ebb.owner", 0)).await, Err(Errno::EPERM));
    assert_eq!(a.ask(xattr("system.posix_acl_access", 0)).await, Err(Errno::EOPNOTSUPP));
    let get = Op::GetXattr(pb::GetXattr { ino, name: b"user.k".to_vec(), tell: false });
    assert_eq!(a.ask(get).await, Ok(Some(Body::Bytes(pb::Bytes { data: b"v".to_vec() }))));
    let list = Op::ListXattr(pb::ListXattr { ino });
    match a.ask(list).await {
        Ok(Some(Body::XattrNames(n))) => assert_eq!(n.names, [b"user.k".to_vec()]),
        other => panic!("{other:?}"),
    }
}

/// A fixed sequence that looks random.
fn shuffled(seed: &mut u64, below: u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % below
}

fn random_op(seed: &mut u64, dirs: &[u64], inos: &[u64]) -> Op {
    let parent = dirs[shuffled(seed, dirs.len() as u64) as usize];
    let new_parent = dirs[shuffled(seed, dirs.len() as u64) as usize];
    let ino = inos[shuffled(seed, inos.len() as u64) as usize];
    let mut name = || format!("n{}", shuffled(seed, 4)).into_bytes();
    let (name, new_name) = (name(), name());
    let at = shuffled(seed, 1000);
    let ranges = vec![pb::Range { start: at, end: at + 50 }];
    match shuffled(seed, 14) {
        0 | 1 => Op::Make(pb::Make {
            parent,
            name,
            mode: libc::S_IFREG | 0o644,
            open: at.is_multiple_of(2),
            ..Default::default()
        }),
        2 => Op::Make(pb::Make { parent, name, mode: libc::S_IFDIR | 0o755, ..Default::default() }),
        3 => {
            Op::Unlink(pb::Unlink { parent, name, dir: at.is_multiple_of(4), ..Default::default() })
        }
        4 => Op::Rename(pb::Rename {
            parent,
            name,
            new_parent,
            new_name,
            flags: (at % 3) as u32,
            ..Default::default()
        }),
        5 => Op::Link(pb::Link { ino, new_parent, new_name, ..Default::default() }),
        6 => Op::Open(pb::Open { ino, truncate: at.is_multiple_of(8), ..Default::default() }),
        7 => Op::Release(pb::Release { ino, settles: false }),
        8 | 9 => Op::Attach(pb::Attach { ino, ranges, ..Default::default() }),
        10 => Op::SetAttr(pb::SetAttr { ino, mode: Some(0o600), ..Default::default() }),
        11 => Op::ReadDir(pb::ReadDir { ino: parent, ..Default::default() }),
        12 => Op::Materialize(pb::Materialize { limit: 3, ..Default::default() }),
        _ => Op::Lookup(pb::Lookup { parent, name, ..Default::default() }),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_two_nodes_is_answered_and_survives_a_crash() {
    let s = Service::start().await;
    std::fs::create_dir(s.backing().join("there")).unwrap();
    std::fs::write(s.backing().join("there/n1"), b"x").unwrap();
    std::fs::write(s.backing().join("n2"), b"x").unwrap();
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let mut dirs = vec![ROOT, a.lookup(ROOT, "there").await.unwrap().ino];
    let mut inos = vec![a.lookup(ROOT, "n2").await.unwrap().ino];
    let mut seed = 7;
    for _ in 0..30 {
        let mut sent = Vec::new();
        for _ in 0..20 {
            sent.push(a.send(random_op(&mut seed, &dirs, &inos)).await);
            b.send_as(*sent.last().unwrap(), random_op(&mut seed, &dirs, &inos)).await;
        }
        for id in sent {
            for reply in [a.wait(id).await, b.wait(id).await] {
                assert_ne!(reply.errno, Errno::EIO.0, "{}", reply.text);
                let attr = match reply.body {
                    Some(Body::Entry(e)) => e.attr,
                    Some(Body::Opened(o)) => o.attr,
                    _ => None,
                };
                if let Some(attr) = attr {
                    let dir = attr.mode & libc::S_IFMT == libc::S_IFDIR;
                    if dir { dirs.push(attr.ino) } else { inos.push(attr.ino) }
                }
            }
        }
    }
    let mut before = Vec::new();
    for dir in dirs.iter().filter(|d| **d != 0) {
        let op = Op::ReadDir(pb::ReadDir { ino: *dir, ..Default::default() });
        before.push(a.ask(op).await);
    }
    let s = s.crash_and_restart(|_| {}).await;
    let mut a = s.node("a").await;
    for (dir, before) in dirs.iter().zip(before) {
        let op = Op::ReadDir(pb::ReadDir { ino: *dir, ..Default::default() });
        assert_eq!(a.ask(op).await, before);
    }
}

/// One node empties a file at an open while another one takes its name away: the open finds it, or does not, and
/// the service goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_goes_while_it_is_opened_is_an_error_of_the_open_alone() {
    let s = Service::start().await;
    let (mut a, mut b) = (s.node("a").await, s.node("b").await);
    let mut missed = 0;
    for round in 0..300 {
        let name = format!("f{round}");
        // On the backing, so that the open has to look there.
        std::fs::write(s.backing().join(&name), b"x").unwrap();
        let ino = a.lookup(ROOT, &name).await.unwrap().ino;
        b.lookup(ROOT, &name).await.unwrap();
        let open = a.send(Op::Open(pb::Open { ino, truncate: true, ..Default::default() })).await;
        let unlink = pb::Unlink { parent: ROOT, name: name.into_bytes(), ..Default::default() };
        let unlink = b.send(Op::Unlink(unlink)).await;
        assert_eq!(b.wait(unlink).await.errno, 0);
        let opened = a.wait(open).await;
        assert_ne!(opened.errno, Errno::EIO.0, "round {round}: {}", opened.text);
        missed += u64::from(opened.errno != 0);
        let _ = a.ask(Op::Release(pb::Release { ino, settles: false })).await;
    }
    println!("{missed} opens came too late");
}

/// The service stops between the rename of a part file and the note of it.
#[tokio::test]
async fn a_part_file_that_got_its_name_unnoted_is_found_at_the_next_start() {
    let s = Service::start().await;
    let backing = s.backing();
    let mut a = s.node("a").await;
    let dir = a.make(ROOT, "d", libc::S_IFDIR | 0o755).await.unwrap();
    let file = a.create(dir, "f").await;
    a.attach(file, 0, 5).await;
    let link =
        pb::Link { ino: file, new_parent: dir, new_name: b"g".to_vec(), ..Default::default() };
    a.ask(Op::Link(link)).await.unwrap();
    let grant = a.begin(file, 0, 5).await.unwrap();
    write_granted(&backing, &grant, b'a');
    drop(a);
    let [part] = &parts(&backing.join("d"))[..] else { panic!("one part file") };
    std::fs::rename(backing.join("d").join(part), backing.join("d/f")).unwrap();

    let s = s.crash_and_restart(|_| {}).await;
    let mut a = s.node("a").await;
    a.next = 1000;
    let opened = a.open(file).await.unwrap();
    let at = opened.backing.unwrap();
    assert_eq!(at.path, b"d/f");
    assert_eq!(at.ino, std::fs::metadata(backing.join("d/f")).unwrap().ino());
    assert!(a.flush(&backing, file, b'b').await.published);
    assert_eq!(std::fs::read(backing.join("d/g")).unwrap(), b"bbbbb");
    assert_eq!(std::fs::metadata(backing.join("d/f")).unwrap().nlink(), 2);
    assert!(parts(&backing.join("d")).is_empty());
}

/// rename(2) does nothing between two names of one object.
#[tokio::test]
async fn a_name_that_hides_another_name_of_the_object_moved_there_gives_way() {
    let s = Service::start().await;
    let backing = s.backing();
    std::fs::write(backing.join("a"), b"12345").unwrap();
    std::fs::hard_link(backing.join("a"), backing.join("b")).unwrap();
    let mut n = s.node("n").await;
    n.create(ROOT, "new").await;
    n.rename((ROOT, "new"), (ROOT, "b")).await.unwrap();
    n.rename((ROOT, "a"), (ROOT, "b")).await.unwrap();
    assert!(!backing.join("a").exists());
    assert_eq!(n.names(ROOT).await, ["b"]);
    assert_eq!(std::fs::read(backing.join("b")).unwrap(), b"12345");
}

#[tokio::test]
async fn many_files_are_brought_to_the_backing_together_and_a_failure_stays_alone() {
    let s = Service::start().await;
    let backing = s.backing();
    let mut a = s.node("a").await;
    let d = a.make(ROOT, "d", libc::S_IFDIR | 0o755).await.unwrap();
    let e = a.make(d, "e", libc::S_IFDIR | 0o700).await.unwrap();
    let mut files = Vec::new();
    for i in 0..40u8 {
        let (dir, path) = [(ROOT, ""), (d, "d/"), (e, "d/e/")][usize::from(i % 3)];
        let name = format!("f{i}");
        let ino = a.create(dir, &name).await;
        a.attach(ino, 0, 100 + u64::from(i)).await;
        files.push((i, ino, backing.join(format!("{path}{name}"))));
    }
    // What others put in the way of one of them.
    let (_, blocked, there) = files.swap_remove(0);
    std::fs::create_dir_all(there.join("full")).unwrap();

    let mut asked = Vec::new();
    for (i, ino, _) in files.iter().chain([&(0, blocked, there.clone())]) {
        asked.push((*i, *ino, a.send(begin(*ino, 0, 1000)).await));
    }
    let mut ending = Vec::new();
    for (i, ino, id) in asked {
        let Some(Body::FlushGrant(grant)) = a.wait(id).await.body else { panic!("no grant") };
        write_granted(&backing, &grant, i);
        let end = pb::FlushEnd { ino, grant: grant.grant, done: true, shaped: false };
        ending.push((ino, a.send(Op::FlushEnd(end)).await));
    }
    for (ino, id) in ending {
        let Some(Body::FlushDone(done)) = a.wait(id).await.body else { panic!("no end") };
        assert_eq!(done.published, ino != blocked);
    }
    for (i, ino, path) in &files {
        assert_eq!(std::fs::read(path).unwrap(), vec![*i; 100 + usize::from(*i)], "{path:?}");
        assert!(a.query(*ino).await.ranges.iter().all(|r| r.flushed));
    }
    assert!(there.join("full").exists());
    assert_eq!(parts(&backing).len(), 1, "the one that is in nobody's way");
    assert!(parts(&backing.join("d")).is_empty() && parts(&backing.join("d/e")).is_empty());
    assert_eq!(std::fs::metadata(backing.join("d/e")).unwrap().mode() & 0o777, 0o700);

    // Out of the way again: whoever asks for what is missing brings it there.
    std::fs::remove_dir_all(&there).unwrap();
    let s = s.crash_and_restart(|_| {}).await;
    let mut a = s.node("a").await;
    a.ask(Op::Materialize(pb::Materialize { limit: 0, ..Default::default() })).await.unwrap();
    assert_eq!(std::fs::read(&there).unwrap(), [0; 100]);
    assert!(parts(&backing).is_empty());
}
