//! The service's machine loses its power, and with it the end of the service's journal. What nodes were
//! told in that time they tell again: nobody reads what was before, nothing is taken for something else,
//! and what was published then reaches the backing. (Names from that time: `identity.rs`.)

use ebb_testkit::{Builder, Cluster, Node, describe};
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::{open, requests, went_past};
use ebb_tests::reboot::{self, copy_dir};
use ebb_tests::tools::wait_until;
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;
use rustix::process::Signal;
use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(30);
/// The service's lease, and what a busy machine may add to it.
const LEASE: Duration = Duration::from_secs(10);
const BUSY: Duration = Duration::from_secs(10);
const LEN: u64 = 200_000;

/// Clusters so far.
static STEP: AtomicU64 = AtomicU64::new(0);

fn builder(model: &str) -> Builder {
    let cluster = Cluster::builder().nodes(3).flush("end").separate_meta();
    cluster.consistency(model).option("--request-timeout", "30s")
}

fn content(round: u64) -> Vec<u8> {
    bytes(7, round, 0, LEN)
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

/// The journal was synced in between, and a node knows it: nothing of it can be lost.
struct Synced;

/// Now and then the syncer comes in between: once more then, with another cluster.
fn unless_synced(run: fn()) {
    for _ in 0..8 {
        match std::panic::catch_unwind(run) {
            Ok(()) => return,
            Err(why) if why.is::<Synced>() => {}
            Err(why) => std::panic::resume_unwind(why),
        }
    }
    panic!("never without the syncer");
}

/// The service forgets what `change` has told it. Every node that lives is asked what it knows.
fn forget(cluster: &mut Cluster, change: impl Fn(&Cluster)) {
    forget_beside(cluster, None, change)
}

/// The same, where one of the nodes stands still.
fn forget_beside(cluster: &mut Cluster, still: Option<usize>, change: impl Fn(&Cluster)) {
    forget_after(cluster, still, |_| (), change)
}

/// The same, with something that it does not forget.
fn forget_after(
    cluster: &mut Cluster,
    still: Option<usize>,
    before: impl Fn(&Cluster),
    change: impl Fn(&Cluster),
) {
    let (state, old) = (cluster.meta_state(), cluster.root().join("old"));
    before(cluster);
    fs::write(cluster.node(0).path("before"), "x").expect("write");
    // Not in step with the syncer, which comes every second.
    let step = STEP.fetch_add(1, Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(1200 + 170 * (step % 6)));
    copy_dir(&state, &old);
    change(cluster);
    cluster.kill_meta();
    fs::remove_dir_all(&state).expect("remove");
    copy_dir(&old, &state);
    reboot::of_the_service(&state.join("journal"));
    cluster.restart_meta();
    wait_until(SOON, "every node was asked", || {
        let alive = that_answer(cluster, still);
        if alive.iter().any(|node| node.status().to_string().contains("older one")) {
            std::panic::panic_any(Synced);
        }
        alive.iter().all(|node| requests(node, "reassert") > 0)
    });
}

fn that_answer(cluster: &Cluster, still: Option<usize>) -> Vec<&Node> {
    let nodes = cluster.nodes().iter().enumerate().filter(|(at, _)| Some(*at) != still);
    nodes.map(|(_, node)| node).filter(|node| node.pid().is_some()).collect()
}

fn drained(cluster: &Cluster, name: &str, want: &[u8]) {
    cluster.umount_all();
    same("on the backing", &fs::read(cluster.backing().join(name)).expect("read"), want);
}

/// `went`: whether the node that writes went the way that the test is of.
fn bytes_are_told_again(builder: Builder, went: fn(&serde_json::Value) -> bool) {
    let mut cluster = builder.start();
    make_synced(&cluster, "f", &content(0));
    for node in cluster.nodes() {
        same("before", &read(node, "f"), &content(0));
    }
    forget(&mut cluster, |cluster| {
        write_over(cluster.node(0), "f", &content(1), 0);
        same("at once", &read(cluster.node(1), "f"), &content(1));
    });
    let status = cluster.node(0).status();
    assert!(went(&status), "{status:#}");
    // One node has never seen it.
    for node in cluster.nodes().iter().rev() {
        same("what was forgotten", &read(node, "f"), &content(1));
    }
    write_over(cluster.node(0), "f", &content(100), 0);
    for node in cluster.nodes().iter().rev() {
        same("what came after it", &read(node, "f"), &content(100));
    }
    drained(&cluster, "f", &content(100));
}

#[test]
fn bytes_are_told_again_under_session() {
    unless_synced(|| {
        bytes_are_told_again(builder("session"), |_| true);
    });
}

#[test]
fn bytes_are_told_again_under_posix() {
    unless_synced(|| {
        bytes_are_told_again(builder("posix"), |_| true);
    });
}

#[test]
fn bytes_are_told_again_under_commit() {
    unless_synced(|| {
        let options = ["--io-path", "daemon"];
        let mut cluster = builder("commit").prepare();
        cluster.nodes().iter().for_each(|node| node.mount_with(&options));
        make_synced(&cluster, "f", &content(0));
        // An fsync is a commit; it is on stable storage at the service then, and not forgotten. What
        // is not, is a commit by close.
        forget(&mut cluster, |cluster| {
            write_over(cluster.node(0), "f", &content(1), 0);
        });
        for node in cluster.nodes().iter().rev() {
            same("what was forgotten", &read(node, "f"), &content(1));
        }
        drained(&cluster, "f", &content(1));
    });
}

#[test]
fn bytes_are_told_again_past_the_daemon() {
    unless_synced(|| {
        let past = builder("session").option("--io-path", "auto");
        bytes_are_told_again(past, went_past);
    });
}

#[test]
fn bytes_are_told_again_with_copies() {
    unless_synced(|| {
        let copies = builder("session").option("--replicas", "2");
        bytes_are_told_again(copies, |status| status["copies"]["copied_bytes"].as_u64() > Some(0));
    });
}

/// The daemon dies in that time, and the one that its supervisor starts knows what it knew.
#[test]
fn a_supervised_daemon_tells_what_the_one_before_knew() {
    unless_synced(|| {
        let mut cluster = builder("session").supervised().start();
        make_synced(&cluster, "f", &content(0));
        forget(&mut cluster, |cluster| {
            write_over(cluster.node(0), "f", &content(1), 0);
            fs::write(cluster.node(0).path("new"), content(2)).expect("write");
            assert!(cluster.node(0).kill_daemon_only(), "no daemon to kill");
        });
        for node in cluster.nodes().iter().rev() {
            same("f", &read(node, "f"), &content(1));
            same("new", &read(node, "new"), &content(2));
        }
        drained(&cluster, "f", &content(1));
    });
}

/// Two nodes have written to the same file in that time, one over the other's bytes; nobody else has seen
/// it.
#[test]
fn the_later_of_two_writers_counts() {
    unless_synced(|| {
        let mut cluster = builder("session").start();
        make_synced(&cluster, "f", &content(0));
        let half = LEN / 2;
        forget(&mut cluster, |cluster| {
            write_over(cluster.node(0), "f", &content(1), 0);
            let over = bytes(9, 1, half, half);
            write_over(cluster.node(1), "f", &over, half);
        });
        let mut want = content(1);
        want[half as usize..].copy_from_slice(&bytes(9, 1, half, half));
        for node in cluster.nodes().iter().rev() {
            same("on every node", &read(node, "f"), &want);
        }
        drained(&cluster, "f", &want);
    });
}

/// A file that was cut in that time does not get its end back, and one that grew keeps what it got.
#[test]
fn lengths_are_told_again() {
    unless_synced(|| {
        let mut cluster = builder("session").start();
        // Not synced: a cut of what was waits for the service's stable storage, and is not forgotten.
        fs::write(cluster.node(0).path("cut"), content(0)).expect("write");
        make_synced(&cluster, "grown", &content(0)[..1000]);
        forget(&mut cluster, |cluster| {
            let cut = open(&cluster.node(0).path("cut"));
            cut.set_len(30_000).expect("cut");
            drop(cut);
            let grown = open(&cluster.node(1).path("grown"));
            grown.set_len(50_000).expect("grow");
            drop(grown);
        });
        let cut = content(0)[..30_000].to_vec();
        let mut grown = content(0)[..1000].to_vec();
        grown.resize(50_000, 0);
        for node in cluster.nodes().iter().rev() {
            same("cut", &read(node, "cut"), &cut);
            same("grown", &read(node, "grown"), &grown);
        }
        cluster.umount_all();
        same("cut", &fs::read(cluster.backing().join("cut")).expect("read"), &cut);
        same("grown", &fs::read(cluster.backing().join("grown")).expect("read"), &grown);
    });
}

/// What was flushed in that time is not waited for by a drain.
#[test]
fn what_was_flushed_then_counts_as_flushed() {
    unless_synced(|| {
        let mut cluster = builder("session").flush("immediate").start();
        make_synced(&cluster, "f", &content(0));
        forget(&mut cluster, |cluster| {
            write_over(cluster.node(0), "f", &content(1), 0);
            let nothing = |status: &serde_json::Value| status["dirty_bytes"] == 0;
            cluster.node(0).wait_status(SOON, nothing);
        });
        let drain = cluster.node(0).ebb("drain", &["--timeout", "20s"], &[]);
        assert!(drain.status.success(), "{}", describe(&drain));
        same("on the backing", &fs::read(cluster.backing().join("f")).expect("read"), &content(1));
        for node in cluster.nodes().iter().rev() {
            same("on every node", &read(node, "f"), &content(1));
        }
        drained(&cluster, "f", &content(1));
    });
}

/// A node gives back in that time what it has flushed, and has never heard of what another one has flushed
/// and given back behind that: the backing is not believed to end where its own bytes do.
#[test]
fn who_gives_bytes_back_then_does_not_make_the_backing_shorter() {
    unless_synced(|| {
        let mut cluster = builder("session").option("--cache-size", "400KiB").start();
        let (half, whole) = (LEN / 2, content(1));
        // More than the cache takes beside that: the next write finds it full.
        let fill = |node: &Node, name: &str| {
            fs::write(node.path(name), bytes(9, 1, 0, 350_000)).expect("write");
            fs::write(node.path(format!("{name}-more")), "x").expect("write");
        };
        let asked = requests(cluster.node(0), "detach");
        // The node keeps what it knows of the file.
        let held = RefCell::new(None);
        let before = |cluster: &Cluster| {
            let (near, far) = (cluster.node(0), cluster.node(1));
            fs::write(near.path("f"), &whole[..half as usize]).expect("write");
            *held.borrow_mut() = Some(File::open(near.path("f")).expect("open"));
            write_over(far, "f", &whole[half as usize..], half);
            near.drain();
            far.drain();
            fill(far, "other");
            let gave_back = || requests(far, "detach") > 0;
            wait_until(SOON, "the end is given back", gave_back);
        };
        let change = |cluster: &Cluster| {
            assert_eq!(requests(cluster.node(0), "detach"), asked, "not yet");
            fill(cluster.node(0), "mine");
            let gave_back = || requests(cluster.node(0), "detach") > asked;
            wait_until(SOON, "the beginning is given back", gave_back);
        };
        forget_after(&mut cluster, None, before, change);
        for node in cluster.nodes().iter().rev() {
            same("on every node", &read(node, "f"), &whole);
        }
        drop(held);
        drained(&cluster, "f", &whole);
    });
}

/// Of a node that died in that time another one knows that it had the bytes: reading them is an error and
/// not what was before, and when it is back, they are.
#[test]
fn bytes_of_a_dead_node_are_not_those_of_before() {
    unless_synced(|| {
        let mut cluster = builder("session").start();
        make_synced(&cluster, "f", &content(0));
        forget(&mut cluster, |cluster| {
            let node = cluster.node(0);
            if node.pid().is_none() {
                node.mount();
            }
            write_over(node, "f", &content(1), 0);
            same("at once", &read(cluster.node(1), "f"), &content(1));
            node.kill9();
            let _ = node.ebb("umount", &[], &[]);
        });
        let start = Instant::now();
        let got = fs::read(cluster.node(2).path("f"));
        assert!(start.elapsed() < LEASE + BUSY, "{:?}", start.elapsed());
        if let Ok(got) = got {
            // From the cache of the other one.
            same("not what was before", &got, &content(1));
        }
        cluster.node(0).mount();
        for node in cluster.nodes().iter().rev() {
            same("back", &read(node, "f"), &content(1));
        }
        drained(&cluster, "f", &content(1));
    });
}

/// A daemon that takes a cache over knows from its journal what the service has forgotten; what others
/// have written since is newer.
#[test]
fn a_daemon_that_takes_over_tells_what_the_one_before_knew() {
    unless_synced(|| {
        let mut cluster = builder("session").start();
        make_synced(&cluster, "f", &content(0));
        make_synced(&cluster, "g", &content(0));
        forget(&mut cluster, |cluster| {
            let node = cluster.node(0);
            if node.pid().is_none() {
                node.mount();
            }
            write_over(node, "f", &content(1), 0);
            write_over(node, "g", &content(1), 0);
            node.kill9();
            let _ = node.ebb("umount", &[], &[]);
        });
        // Nobody else knows of it. After a lease it goes on without that node.
        let over = bytes(9, 1, 0, 1000);
        write_over(cluster.node(1), "g", &over, 5000);
        cluster.node(0).mount();
        let mut want = content(1);
        for node in cluster.nodes().iter().rev() {
            same("f", &read(node, "f"), &want);
        }
        want[5000..6000].copy_from_slice(&over);
        for node in cluster.nodes().iter().rev() {
            same("g", &read(node, "g"), &want);
        }
        drained(&cluster, "g", &want);
    });
}

/// A service that dies while nodes tell goes on asking.
#[test]
fn the_service_dies_while_it_is_told() {
    unless_synced(|| {
        let mut cluster = builder("session").start();
        make_synced(&cluster, "f", &content(0));
        forget_beside(&mut cluster, Some(0), |cluster| {
            let node = cluster.node(0);
            node.signal(Signal::CONT);
            write_over(node, "f", &content(1), 0);
            // It hears of the new service only after that one is gone again.
            node.signal(Signal::STOP);
        });
        cluster.kill_meta();
        cluster.restart_meta();
        cluster.node(0).signal(Signal::CONT);
        for node in cluster.nodes().iter().rev() {
            same("on every node", &read(node, "f"), &content(1));
        }
        drained(&cluster, "f", &content(1));
    });
}

/// Locks that were taken in that time hold, those that were given back are free, and one that went from
/// one node to another is the other's.
#[test]
fn locks_are_as_the_nodes_know_them() {
    unless_synced(|| {
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
        forget_after(&mut cluster, None, before, |_| {
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
    });
}

fn names_in(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).expect("list").flatten();
    let mut names: Vec<_> = names.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| !name.starts_with("before-"));
    names.sort();
    names
}

/// Files, directories and links that were made, renamed, written over, removed and changed in that time, by
/// two nodes, none of it on the backing: everything is as it was left, on every node and in the end there.
#[test]
fn names_are_told_again() {
    unless_synced(|| {
        let mut cluster = builder("session").start();
        let kinds = ["renamed", "removed", "private", "over", "handed"];
        let a = |cluster: &Cluster, name: &str| cluster.node(0).path(name);
        for kind in kinds {
            fs::write(a(&cluster, kind), kind).expect("write");
        }
        forget(&mut cluster, |cluster| {
            let b = |name: &str| cluster.node(1).path(name);
            let a = |name: &str| a(cluster, name);
            fs::write(a("new"), content(1)).expect("write");
            fs::create_dir_all(a("dir/deep")).expect("mkdir");
            fs::write(a("dir/deep/file"), "deep").expect("write");
            std::os::unix::fs::symlink("deep/file", a("dir/link")).expect("symlink");
            fs::rename(a("renamed"), a("dir/renamed")).expect("rename");
            fs::remove_file(a("removed")).expect("unlink");
            let private = fs::Permissions::from_mode(0o600);
            fs::set_permissions(a("private"), private).expect("chmod");
            fs::write(a("tmp"), content(2)).expect("write");
            fs::rename(a("tmp"), a("over")).expect("rename over");
            // One node after the other: what the second says is the last word.
            fs::rename(a("handed"), a("handed-once")).expect("rename");
            fs::rename(b("handed-once"), b("handed-twice")).expect("rename");
            fs::hard_link(b("handed-twice"), b("second")).expect("link");
        });
        let check = |root: &Path, what: &str| {
            let at = |name: &str| root.join(name);
            let read =
                |name: &str| fs::read(at(name)).unwrap_or_else(|e| panic!("{what}: {name}: {e}"));
            same(what, &read("new"), &content(1));
            assert_eq!(read("dir/deep/file"), b"deep", "{what}");
            assert_eq!(fs::read_link(at("dir/link")).expect("link").to_str(), Some("deep/file"));
            assert_eq!(read("dir/renamed"), b"renamed", "{what}");
            let mode = fs::metadata(at("private")).expect("stat").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{what}");
            same(what, &read("over"), &content(2));
            for name in ["handed-twice", "second"] {
                assert_eq!(read(name), b"handed", "{what}");
            }
            for gone in ["renamed", "removed", "tmp", "handed", "handed-once"] {
                let found = fs::symlink_metadata(at(gone)).map_err(|e| e.kind());
                assert_eq!(found.err(), Some(std::io::ErrorKind::NotFound), "{what}: {gone}");
            }
            names_in(root)
        };
        let listed: Vec<_> =
            cluster.nodes().iter().rev().map(|n| check(&n.path(""), n.name())).collect();
        assert!(listed.iter().all(|names| *names == listed[0]), "{listed:?}");
        cluster.umount_all();
        assert_eq!(check(cluster.backing(), "on the backing"), listed[0]);
        let parts = |name: &String| name.starts_with(".ebb");
        assert!(!names_in(cluster.backing()).iter().any(parts), "part files are left");
    });
}

/// A file that was open while it was made, and is still written to.
#[test]
fn who_has_a_forgotten_file_open_goes_on() {
    unless_synced(|| {
        for model in ["posix", "session"] {
            let mut cluster = builder(model).start();
            let opened = std::sync::Mutex::new(None);
            forget(&mut cluster, |cluster| {
                let file = open(&cluster.node(0).path("f"));
                file.write_all_at(&content(1), 0).expect("write");
                *opened.lock().expect("a lock") = Some(file);
            });
            let file = opened.into_inner().expect("a lock").expect("a file");
            file.write_all_at(b"and on", 1000).expect("write");
            file.sync_all().expect("fsync");
            let mut want = content(1);
            want[1000..1006].copy_from_slice(b"and on");
            drop(file);
            for node in cluster.nodes().iter().rev() {
                same(model, &read(node, "f"), &want);
            }
            drained(&cluster, "f", &want);
        }
    });
}

/// A checkpoint begins anew in the time that is lost: the old one stays, and the new one is not looked for
/// in it, nor flushed into it.
#[test]
fn a_checkpoint_that_began_anew_then_does_not_spoil_the_old_one() {
    unless_synced(|| {
        let mut cluster = builder("posix").flush("idle").start();
        let there = cluster.backing().join("f");
        fs::write(&there, content(0)).expect("write");
        same("before", &read(cluster.node(1), "f"), &content(0));
        let half = std::sync::Mutex::new(None);
        forget(&mut cluster, |cluster| {
            let file =
                OpenOptions::new().write(true).truncate(true).open(cluster.node(0).path("f"));
            let file = file.expect("open");
            // No fsync, and no flush: these would bring the service's journal to its disk.
            file.write_all_at(&content(1)[..100_000], 0).expect("write");
            *half.lock().expect("nobody else has it") = Some(file);
        });
        let half = half.into_inner().expect("nobody else has it").expect("it was opened");
        same("the old one", &read_at(&there), &content(0));
        for node in cluster.nodes() {
            same("the new one", &read(node, "f"), &content(1)[..100_000]);
        }
        half.write_all_at(&content(1)[100_000..], 100_000).expect("write");
        half.sync_all().expect("fsync");
        cluster.node(0).wait_status(SOON, |s| s["dirty_bytes"] == 0);
        same("the old one, until the close", &read_at(&there), &content(0));
        drop(half);
        drained(&cluster, "f", &content(1));
    });
}

fn read_at(path: &Path) -> Vec<u8> {
    fs::read(path).expect("read")
}
