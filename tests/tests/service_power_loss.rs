//! The service's machine loses its power, and with it the end of the service's journal. What nodes were
//! told in that time they tell again: nobody reads what was before, nothing is taken for something else,
//! and what was published then reaches the backing. (Names from that time: `identity.rs`.)

use ebb_testkit::{Builder, Cluster, Node, describe};
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::{open, requests};
use ebb_tests::reboot;
use ebb_tests::tools::wait_until;
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;
use rustix::process::Signal;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(30);
/// The service's lease, and what a busy machine may add to it.
const LEASE: Duration = Duration::from_secs(10);
const BUSY: Duration = Duration::from_secs(10);
const LEN: u64 = 200_000;

fn builder(model: &str) -> Builder {
    let cluster = Cluster::builder().nodes(3).flush("end").separate_meta();
    cluster.consistency(model).option("--request-timeout", "30s")
}

fn content(round: u64) -> Vec<u8> {
    bytes(7, round, 0, LEN)
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("mkdir");
    for entry in fs::read_dir(from).expect("list").flatten() {
        fs::copy(entry.path(), to.join(entry.file_name())).expect("copy");
    }
}

/// A file that is on the backing, and that the service will not forget.
fn make_synced(cluster: &Cluster, name: &str, data: &[u8]) {
    let mut file = File::create(cluster.node(0).path(name)).expect("create");
    file.write_all(data).expect("write");
    file.sync_all().expect("fsync");
}

fn read(node: &Node, name: &str) -> Vec<u8> {
    fs::read(node.path(name)).unwrap_or_else(|e| panic!("{name} on {}: {e}", node.name()))
}

/// Written in place, from open to close.
fn write_over(node: &Node, name: &str, data: &[u8], offset: u64) {
    let file = OpenOptions::new().write(true).open(node.path(name)).expect("open");
    file.write_all_at(data, offset).expect("write");
}

/// The service forgets what `change` has told it. Now and then its journal is synced in between and a node
/// knows it: then the older one is refused, and it is done once more, with the next number. Returns that
/// number.
fn forget(cluster: &mut Cluster, change: impl Fn(&Cluster, u64)) -> u64 {
    forget_beside(cluster, None, change)
}

/// The same, where one of the nodes stands still.
fn forget_beside(
    cluster: &mut Cluster,
    still: Option<usize>,
    change: impl Fn(&Cluster, u64),
) -> u64 {
    forget_after(cluster, still, |_| (), change)
}

/// The same, with something that it does not forget.
fn forget_after(
    cluster: &mut Cluster,
    still: Option<usize>,
    before: impl Fn(&Cluster),
    change: impl Fn(&Cluster, u64),
) -> u64 {
    let (state, old) = (cluster.meta_state(), cluster.root().join("old"));
    for round in 1..20 {
        before(cluster);
        fs::write(cluster.node(0).path(format!("before-{round}")), "x").expect("write");
        std::thread::sleep(Duration::from_millis(1200 + 130 * round));
        copy_dir(&state, &old);
        change(cluster, round);
        cluster.kill_meta();
        let newest = cluster.root().join(format!("newest-{round}"));
        fs::rename(&state, &newest).expect("put it away");
        copy_dir(&old, &state);
        reboot::of_the_service(&state.join("journal"));
        cluster.restart_meta();
        let refuses = |node: &Node| node.status().to_string().contains("older one");
        let mut refused = false;
        wait_until(SOON, "every node has seen the service", || {
            let alive = that_answer(cluster, still);
            refused = alive.iter().any(|node| refuses(node));
            refused || alive.iter().all(|node| fs::metadata(node.path("")).is_ok())
        });
        if !refused {
            return round;
        }
        cluster.kill_meta();
        fs::remove_dir_all(&state).expect("remove");
        fs::rename(&newest, &state).expect("put it back");
        cluster.restart_meta();
        wait_until(SOON, "the right service", || {
            let mut alive = that_answer(cluster, still).into_iter();
            alive.all(|node| !refuses(node) && fs::metadata(node.path("")).is_ok())
        });
    }
    panic!("never without the syncer");
}

fn that_answer(cluster: &Cluster, still: Option<usize>) -> Vec<&Node> {
    let nodes = cluster.nodes().iter().enumerate().filter(|(at, _)| Some(*at) != still);
    nodes.map(|(_, node)| node).filter(|node| node.pid().is_some()).collect()
}

fn drained(cluster: &Cluster, name: &str, want: &[u8]) {
    cluster.umount_all();
    same("on the backing", &fs::read(cluster.backing().join(name)).expect("read"), want);
}

fn bytes_are_told_again(model: &str, options: &[&str]) {
    let mut cluster = builder(model).prepare();
    cluster.nodes().iter().for_each(|node| node.mount_with(options));
    make_synced(&cluster, "f", &content(0));
    for node in cluster.nodes() {
        same("before", &read(node, "f"), &content(0));
    }
    let round = forget(&mut cluster, |cluster, round| {
        write_over(cluster.node(0), "f", &content(round), 0);
        same("at once", &read(cluster.node(1), "f"), &content(round));
    });
    // One node has never seen it.
    for node in cluster.nodes().iter().rev() {
        same("what was forgotten", &read(node, "f"), &content(round));
    }
    let asked: u64 = cluster.nodes().iter().map(|node| requests(node, "reassert")).sum();
    assert!(asked > 0, "nobody was asked");
    write_over(cluster.node(0), "f", &content(100), 0);
    for node in cluster.nodes().iter().rev() {
        same("what came after it", &read(node, "f"), &content(100));
    }
    drained(&cluster, "f", &content(100));
}

#[test]
fn bytes_are_told_again_under_session() {
    bytes_are_told_again("session", &[]);
}

#[test]
fn bytes_are_told_again_under_posix() {
    bytes_are_told_again("posix", &[]);
}

#[test]
fn bytes_are_told_again_under_commit() {
    let options = ["--io-path", "daemon"];
    let mut cluster = builder("commit").prepare();
    cluster.nodes().iter().for_each(|node| node.mount_with(&options));
    make_synced(&cluster, "f", &content(0));
    // An fsync is a commit; it is on stable storage at the service then, and not forgotten. What
    // is not, is a commit by close.
    let round = forget(&mut cluster, |cluster, round| {
        write_over(cluster.node(0), "f", &content(round), 0);
    });
    for node in cluster.nodes().iter().rev() {
        same("what was forgotten", &read(node, "f"), &content(round));
    }
    drained(&cluster, "f", &content(round));
}

#[test]
fn bytes_are_told_again_with_copies_and_a_small_cache() {
    bytes_are_told_again("session", &["--replicas", "2", "--cache-size", "64M"]);
}

/// Two nodes have written to the same file in that time, one over the other's bytes; nobody else has seen
/// it.
#[test]
fn the_later_of_two_writers_counts() {
    let mut cluster = builder("session").start();
    make_synced(&cluster, "f", &content(0));
    let half = LEN / 2;
    let round = forget(&mut cluster, |cluster, round| {
        write_over(cluster.node(0), "f", &content(round), 0);
        let over = bytes(9, round, half, half);
        write_over(cluster.node(1), "f", &over, half);
    });
    let mut want = content(round);
    want[half as usize..].copy_from_slice(&bytes(9, round, half, half));
    for node in cluster.nodes().iter().rev() {
        same("on every node", &read(node, "f"), &want);
    }
    drained(&cluster, "f", &want);
}

/// A file that was cut in that time does not get its end back, and one that grew keeps what it got.
#[test]
fn lengths_are_told_again() {
    let mut cluster = builder("session").start();
    make_synced(&cluster, "cut", &content(0));
    make_synced(&cluster, "grown", &content(0)[..1000]);
    let round = forget(&mut cluster, |cluster, round| {
        let cut = open(&cluster.node(0).path("cut"));
        cut.set_len(30_000 + round).expect("cut");
        drop(cut);
        let grown = open(&cluster.node(1).path("grown"));
        grown.set_len(50_000 + round).expect("grow");
        drop(grown);
    });
    let cut = content(0)[..30_000 + round as usize].to_vec();
    let mut grown = content(0)[..1000].to_vec();
    grown.resize(50_000 + round as usize, 0);
    for node in cluster.nodes().iter().rev() {
        same("cut", &read(node, "cut"), &cut);
        same("grown", &read(node, "grown"), &grown);
    }
    cluster.umount_all();
    same("cut", &fs::read(cluster.backing().join("cut")).expect("read"), &cut);
    same("grown", &fs::read(cluster.backing().join("grown")).expect("read"), &grown);
}

/// What was flushed in that time is not waited for by a drain.
#[test]
fn what_was_flushed_then_counts_as_flushed() {
    let mut cluster = builder("session").flush("immediate").start();
    make_synced(&cluster, "f", &content(0));
    let round = forget(&mut cluster, |cluster, round| {
        write_over(cluster.node(0), "f", &content(round), 0);
        let nothing = |status: &serde_json::Value| status["dirty_bytes"] == 0;
        cluster.node(0).wait_status(SOON, nothing);
    });
    let drain = cluster.node(0).ebb("drain", &["--timeout", "20s"], &[]);
    assert!(drain.status.success(), "{}", describe(&drain));
    same("on the backing", &fs::read(cluster.backing().join("f")).expect("read"), &content(round));
    for node in cluster.nodes().iter().rev() {
        same("on every node", &read(node, "f"), &content(round));
    }
    drained(&cluster, "f", &content(round));
}

/// Of a node that died in that time another one knows that it had the bytes: reading them is an error and
/// not what was before, and when it is back, they are.
#[test]
fn bytes_of_a_dead_node_are_not_those_of_before() {
    let mut cluster = builder("session").start();
    make_synced(&cluster, "f", &content(0));
    let round = forget(&mut cluster, |cluster, round| {
        let node = cluster.node(0);
        if node.pid().is_none() {
            node.mount();
        }
        write_over(node, "f", &content(round), 0);
        same("at once", &read(cluster.node(1), "f"), &content(round));
        node.kill9();
        let _ = node.ebb("umount", &[], &[]);
    });
    let start = Instant::now();
    let got = fs::read(cluster.node(2).path("f"));
    assert!(start.elapsed() < LEASE + BUSY, "{:?}", start.elapsed());
    if let Ok(got) = got {
        // From the cache of the other one.
        same("not what was before", &got, &content(round));
    }
    cluster.node(0).mount();
    for node in cluster.nodes().iter().rev() {
        same("back", &read(node, "f"), &content(round));
    }
    drained(&cluster, "f", &content(round));
}

/// A daemon that takes a cache over knows from its journal what the service has forgotten; what others
/// have written since is newer.
#[test]
fn a_daemon_that_takes_over_tells_what_the_one_before_knew() {
    let mut cluster = builder("session").start();
    make_synced(&cluster, "f", &content(0));
    make_synced(&cluster, "g", &content(0));
    let round = forget(&mut cluster, |cluster, round| {
        let node = cluster.node(0);
        if node.pid().is_none() {
            node.mount();
        }
        write_over(node, "f", &content(round), 0);
        write_over(node, "g", &content(round), 0);
        node.kill9();
        let _ = node.ebb("umount", &[], &[]);
    });
    // Nobody else knows of it. After a lease it goes on without that node.
    let over = bytes(9, round, 0, 1000);
    write_over(cluster.node(1), "g", &over, 5000);
    cluster.node(0).mount();
    let mut want = content(round);
    for node in cluster.nodes().iter().rev() {
        same("f", &read(node, "f"), &want);
    }
    want[5000..6000].copy_from_slice(&over);
    for node in cluster.nodes().iter().rev() {
        same("g", &read(node, "g"), &want);
    }
    drained(&cluster, "g", &want);
}

/// A service that dies while nodes tell goes on asking.
#[test]
fn the_service_dies_while_it_is_told() {
    let mut cluster = builder("session").start();
    make_synced(&cluster, "f", &content(0));
    let round = forget_beside(&mut cluster, Some(0), |cluster, round| {
        let node = cluster.node(0);
        node.signal(Signal::CONT);
        write_over(node, "f", &content(round), 0);
        // It hears of the new service only after that one is gone again.
        node.signal(Signal::STOP);
    });
    cluster.kill_meta();
    cluster.restart_meta();
    cluster.node(0).signal(Signal::CONT);
    for node in cluster.nodes().iter().rev() {
        same("on every node", &read(node, "f"), &content(round));
    }
    drained(&cluster, "f", &content(round));
}

/// Locks that were taken in that time hold, those that were given back are free, and one that went from
/// one node to another is the other's.
#[test]
fn locks_are_as_the_nodes_know_them() {
    let mut cluster = builder("session").start();
    let names = ["taken", "record", "given-back", "handed-over"];
    names.iter().for_each(|name| make_synced(&cluster, name, &content(0)));
    let on = |name: &str| [0, 1, 2].map(|node| open(&cluster.node(node).path(name)));
    let [taken, record, given_back, handed_over] = names.map(on);
    let try_lock = |file: &File| flock(file, FlockOperation::NonBlockingLockExclusive);
    let unlock = |file: &File| flock(file, FlockOperation::Unlock).expect("unlock");
    let before = |_: &Cluster| {
        unlock(&taken[0]);
        fcntl_lock(&record[0], FlockOperation::Unlock).expect("unlock");
        unlock(&handed_over[1]);
        try_lock(&given_back[0]).expect("lock");
        try_lock(&handed_over[0]).expect("lock");
    };
    forget_after(&mut cluster, None, before, |_, _| {
        try_lock(&taken[0]).expect("lock");
        fcntl_lock(&record[0], FlockOperation::NonBlockingLockExclusive).expect("lock");
        unlock(&given_back[0]);
        unlock(&handed_over[0]);
        try_lock(&handed_over[1]).expect("lock");
    });
    assert_eq!(try_lock(&taken[2]), Err(Errno::AGAIN), "taken then");
    let other = fcntl_lock(&record[2], FlockOperation::NonBlockingLockShared);
    assert!(matches!(other, Err(Errno::AGAIN | Errno::ACCESS)), "{other:?}");
    try_lock(&given_back[2]).expect("given back then");
    assert_eq!(try_lock(&handed_over[2]), Err(Errno::AGAIN), "handed over then");
    assert_eq!(try_lock(&handed_over[0]), Err(Errno::AGAIN), "handed over then");
    // Nobody's lock was broken by it, and all of them end as ever.
    for file in [&taken[0], &record[0], &handed_over[1]] {
        file.write_all_at(b"y", 3).expect("write");
    }
    fcntl_lock(&record[0], FlockOperation::Unlock).expect("unlock");
    fcntl_lock(&record[2], FlockOperation::NonBlockingLockShared).expect("lock");
    for (held, wanted) in [(&taken[0], &taken[2]), (&handed_over[1], &handed_over[0])] {
        unlock(held);
        try_lock(wanted).expect("free again");
    }
}
