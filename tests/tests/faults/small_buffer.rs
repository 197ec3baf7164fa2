//! Buffers smaller than the data: what is flushed goes to make room, and every node must then find
//! it on the backing.

use ebb_testkit::{Builder, Cluster, Node, skip_reason};
use ebb_tests::content::{bytes, same};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::Duration;

/// More than the buffer holds.
const MUCH: u64 = 600_000;

fn write_at(node: &Node, offset: u64, data: &[u8]) {
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false).open(node.path("f"));
    file.expect("open").write_all_at(data, offset).expect("write");
}

/// So that the node gives up what it has flushed.
fn need_room(node: &Node) {
    node.drain();
    for i in 0..3 {
        fs::write(node.path(format!("{}-{i}", node.name())), bytes(9, i, 0, MUCH)).expect("write");
    }
    node.drain();
}

/// A node that has given bytes up must still learn how much of the file the backing has: this was
/// zeros once.
#[test]
fn what_others_append_and_give_up_is_read_from_the_backing() {
    if skip_reason().is_some() {
        return;
    }
    let builder = Cluster::builder().nodes(2).consistency("session").flush("immediate");
    let cluster = builder.option("--cache-size", "400KiB").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    let whole = bytes(1, 1, 0, 5_000);
    write_at(a, 0, &whole[..1_000]);
    need_room(a);
    // Held open: the node keeps what it knows of the file.
    let held = File::open(a.path("f")).expect("open");
    write_at(b, 1_000, &whole[1_000..]);
    need_room(b);
    same("on the node that was first", &fs::read(a.path("f")).expect("read"), &whole);
    same("on the other", &fs::read(b.path("f")).expect("read"), &whole);
    drop(held);
    cluster.umount_all();
    same("on the backing", &fs::read(cluster.backing().join("f")).expect("read"), &whole);
}

/// A program writes the same bytes again and again through one descriptor, while they are flushed and given up
/// in between. What it synced last comes back after its daemon was killed: the flushes were its own, and
/// nobody has overtaken it.
#[test]
fn what_is_written_again_after_it_was_given_up_survives_the_daemon() {
    for (model, io_path) in [("session", "daemon"), ("session", "auto"), ("commit", "daemon")] {
        if skip_reason().is_none() {
            written_again_after_it_was_given_up(model, io_path);
        }
    }
}

fn written_again_after_it_was_given_up(model: &str, io_path: &str) {
    let builder = Cluster::builder().nodes(1).consistency(model).flush("end");
    let builder = builder.option("--cache-size", "400KiB").option("--io-path", io_path);
    let cluster = builder.start();
    let node = cluster.node(0);
    let file = File::options().write(true).create_new(true).open(node.path("f")).expect("create");
    let written = |round| bytes(1, round, 0, 100_000);
    for round in 1..=2 {
        file.write_all_at(&written(round), 0).expect("write");
        need_room(node);
    }
    let evicted = node.status()["ledger"]["evicted_bytes"].as_u64().expect("a number");
    assert!(evicted >= 200_000, "both were given up: {evicted}");
    file.write_all_at(&written(3), 0).expect("write");
    file.sync_all().expect("fsync");
    node.kill9();
    drop(file);
    let _ = node.ebb("umount", &[], &[]);
    node.mount();
    let what = format!("{model}, {io_path}, after a crash");
    same(&what, &fs::read(node.path("f")).expect("read"), &written(3));
    cluster.umount_all();
    same("on the backing", &fs::read(cluster.backing().join("f")).expect("read"), &written(3));
}

/// More than the share of 1 MiB beyond which writers wait.
const NEARLY_ALL: u64 = 1_040_000;

const SOON: Duration = Duration::from_secs(20);

/// So often it is tried, until the service dies before it has said that the end of the flush is safe.
const ROUNDS: u64 = 8;

/// Everything in the buffer is flushed, and stays only until the service's word: who waits for room while
/// the service is away goes on when it is back, although nothing else happens.
#[test]
fn a_writer_that_waits_for_room_goes_on_when_the_service_is_back() {
    if skip_reason().is_some() {
        return;
    }
    let waited = (0..ROUNDS).any(|round| {
        let builder = Cluster::builder().nodes(1).separate_meta().consistency("session");
        let builder = builder.flush("immediate").option("--cache-size", "1MiB");
        let mut cluster = builder.option("--request-timeout", "5s").start();
        let node = cluster.node(0);
        let (first, next) = (node.path("first"), node.path("next"));
        let next = File::create(next).expect("create");
        let file = File::create(&first).expect("create");
        file.write_all_at(&bytes(1, round, 0, NEARLY_ALL), 0).expect("write");
        file.sync_all().expect("fsync");
        node.wait_status(SOON, |s| s["dirty_bytes"] == 0);
        cluster.kill_meta();
        let (told, end) = mpsc::channel();
        std::thread::spawn(move || {
            let done = next.write_all_at(&[7; 10], 0);
            let _ = told.send((done, next));
        });
        let at_once = end.recv_timeout(Duration::from_secs(2));
        cluster.restart_meta();
        if at_once.is_ok() {
            // The service was faster.
            return false;
        }
        let (done, next) = end.recv_timeout(SOON).expect("it goes on");
        done.expect("write");
        drop((file, next));
        cluster.umount_all();
        same(
            "first",
            &fs::read(cluster.backing().join("first")).expect("read"),
            &bytes(1, round, 0, NEARLY_ALL),
        );
        true
    });
    assert!(waited, "nobody ever had to wait");
}

/// A buffer full of files that another node has deleted since: nothing of them can be detached, and nobody
/// tells this node. Who writes here next goes on, and does not wait for room that nobody makes.
#[test]
fn what_another_node_has_deleted_makes_room() {
    type Way = (&'static str, fn(Builder) -> Builder);
    let ways: [Way; 6] = [
        ("posix", |b| b),
        ("commit", |b| b),
        ("session", |b| b),
        ("posix", |b| b.option("--io-path", "auto")),
        ("session", |b| b.option("--replicas", "2")),
        ("posix", Builder::supervised),
    ];
    for (at, (model, way)) in ways.into_iter().enumerate() {
        if skip_reason().is_none() {
            deleted_elsewhere(&format!("way {at}, {model}"), way(small(model, 2)).start());
        }
    }
}

/// Room for 4 MiB.
fn small(model: &str, nodes: usize) -> Builder {
    let builder = Cluster::builder().nodes(nodes).consistency(model).flush("immediate");
    builder.option("--cache-size", "4MiB")
}

/// Writes so much to another file, for which there is no room.
fn goes_on(what: &str, node: &Node, round: u64) {
    let (told, end) = mpsc::channel();
    let next = node.path(format!("next-{round}"));
    std::thread::spawn(move || told.send(fs::write(next, bytes(4, round, 0, 2_000_000))));
    let done = end.recv_timeout(Duration::from_secs(40));
    done.unwrap_or_else(|_| panic!("{what}: it waits for ever")).expect("write");
}

fn clean_bytes(node: &Node) -> u64 {
    node.status()["clean_bytes"].as_u64().expect("a number")
}

fn deleted_elsewhere(what: &str, cluster: Cluster) {
    let (a, b) = (cluster.node(0), cluster.node(1));
    for round in 0..3 {
        let written: Vec<_> = (0..7).map(|i| format!("{round}-{i}")).collect();
        for (i, name) in (0..).zip(&written) {
            fs::write(a.path(name), bytes(3, i, 0, 560_000)).expect("write");
        }
        a.drain();
        for name in &written {
            fs::remove_file(b.path(name)).expect("rm");
        }
        let kept = clean_bytes(a);
        // Some may have made room for each other: what comes now has none without the others' in any case.
        assert!(kept + 2_000_000 > 4 << 20, "{what}: they fill the buffer: {kept}");
        goes_on(what, a, round);
        // With the new file's bytes, which are clean then.
        a.drain();
        let left = clean_bytes(a);
        assert!(left < kept + 2_000_000, "{what}: they made room: {left} of {kept}");
        same(
            what,
            &fs::read(b.path(format!("next-{round}"))).expect("read"),
            &bytes(4, round, 0, 2_000_000),
        );
    }
    cluster.umount_all();
    let want = bytes(4, 2, 0, 2_000_000);
    same(what, &fs::read(cluster.backing().join("next-2")).expect("read"), &want);
}

/// What is flushed of a file that lost its name while it is open here goes to make room, as of any other.
#[test]
fn what_is_open_without_a_name_makes_room() {
    for model in ["posix", "session"] {
        if skip_reason().is_some() {
            return;
        }
        let cluster = small(model, 1).option("--io-path", "daemon").start();
        let node = cluster.node(0);
        let mut options = File::options();
        let open = options.read(true).write(true).create_new(true).open(node.path("f"));
        let file = open.expect("create");
        let content = bytes(5, 1, 0, 4_050_000);
        file.write_all_at(&content, 0).expect("write");
        file.sync_all().expect("fsync");
        node.wait_status(SOON, |s| s["dirty_bytes"] == 0);
        fs::remove_file(node.path("f")).expect("rm");
        // The flusher finds out that it has no name.
        file.write_all_at(&[7; 10], 4_100_000).expect("write");
        file.sync_all().expect("fsync");
        node.wait_status(SOON, |s| s["dirty_files_total"] == 0);
        goes_on(model, node, 1);
        let mut got = vec![0; content.len()];
        file.read_exact_at(&mut got, 0).expect("read");
        same(model, &got, &content);
    }
}
