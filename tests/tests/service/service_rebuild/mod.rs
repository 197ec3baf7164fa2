//! The service's state is lost, or its journal damaged: `ebb meta --rebuild` begins with what the nodes know.
//! What they had written and read is as it was, on the nodes and on the backing; before that, and
//! without them, nothing is answered.

mod histories;

use ebb_testkit::{Builder, Cluster, Node, describe};
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::{open, requests, went_past};
use ebb_tests::recoveries::{ended_with, recover};
use ebb_tests::tools::wait_until;
use rustix::fs::{FallocateFlags, FlockOperation, XattrFlags, flock};
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(30);
const LEN: u64 = 300_000;

fn builder(model: &str) -> Builder {
    let cluster = Cluster::builder().nodes(3).flush("end").separate_meta();
    cluster.consistency(model).option("--request-timeout", "30s")
}

fn content(stream: u64) -> Vec<u8> {
    bytes(11, stream, 0, LEN)
}

/// Written and synced; open until the test ends it.
fn write(path: &Path, data: &[u8]) -> File {
    let mut file = File::create(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    file.write_all(data).expect("write");
    file.sync_all().expect("fsync");
    file
}

fn sync(node: &Node) {
    File::open(node.mountpoint()).and_then(|dir| dir.sync_all()).expect("fsync of the root");
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The service dies and its state with it; the next one hears so many nodes.
fn lose_and_rebuild(cluster: &mut Cluster, nodes: usize) {
    let told = told(cluster);
    lose(cluster);
    cluster.rebuild_meta(nodes);
    all_have_told(cluster, &told);
}

fn lose(cluster: &mut Cluster) {
    cluster.kill_meta();
    fs::remove_dir_all(cluster.meta_state()).expect("the state goes");
}

/// How often each node has told something again. (While there is no service that takes long to ask.)
fn told(cluster: &Cluster) -> Vec<u64> {
    let alive = |node: &Node| node.pid().is_some();
    cluster.nodes().iter().map(|n| if alive(n) { requests(n, "reassert") } else { 0 }).collect()
}

/// Every node that lives has told more than `before`.
fn all_have_told(cluster: &Cluster, before: &[u64]) {
    wait_until(SOON, "every node has told", || {
        let pairs = cluster.nodes().iter().zip(told(cluster).into_iter().zip(before));
        pairs.into_iter().all(|(node, (now, before))| node.pid().is_none() || now > *before)
    });
}

/// What a job has: some of it on the backing, some of it only in caches, some of it half.
struct Job {
    /// The checkpoint that is written over, open.
    half: File,
    /// A file of the job that is on the backing and was written again, open.
    again: File,
}

fn in_place() -> Vec<u8> {
    let mut data = content(0);
    data[5_000..6_000].fill(9);
    data
}

fn written_again() -> Vec<u8> {
    let mut data = content(4);
    data[100_000..200_000].fill(8);
    data
}

impl Job {
    fn begin(cluster: &Cluster) -> Job {
        let (a, b, c) = (cluster.node(0), cluster.node(1), cluster.node(2));
        let there = |name: &str| cluster.backing().join(name);
        fs::write(there("old"), content(0)).expect("write");
        fs::create_dir(there("before")).expect("mkdir");
        fs::write(there("before/checkpoint"), content(1)).expect("write");
        // On the backing by and by: what the job has made and drained.
        fs::create_dir_all(a.path("made/deep")).expect("mkdir");
        drop(write(&a.path("made/deep/drained"), &content(4)));
        a.drain();
        same("drained", &read(&there("made/deep/drained")), &content(4));
        // Only in caches.
        drop(write(&a.path("new"), &content(2)));
        fs::set_permissions(a.path("new"), Permissions::from_mode(0o640)).expect("chmod");
        rustix::fs::setxattr(a.path("new"), "user.run", b"7", XattrFlags::empty())
            .expect("setxattr");
        fs::hard_link(a.path("new"), a.path("linked")).expect("link");
        symlink("new", b.path("symbolic")).expect("symlink");
        fs::create_dir(b.path("made/deep/local")).expect("mkdir");
        drop(write(&b.path("made/deep/local/file"), &content(3)));
        drop(write(&b.path("name"), &content(5)));
        fs::rename(b.path("name"), b.path("renamed")).expect("rename");
        // In place of what was there.
        let file = open(&b.path("old"));
        file.write_all_at(&[9; 1000], 5_000).expect("write");
        file.sync_all().expect("fsync");
        let again = open(&c.path("made/deep/drained"));
        again.write_all_at(&[8; 100_000], 100_000).expect("write");
        again.sync_all().expect("fsync");
        let half = File::options().write(true).truncate(true).open(c.path("before/checkpoint"));
        let half = half.expect("open");
        half.write_all_at(&content(6)[..100_000], 0).expect("write");
        half.sync_all().expect("fsync");
        cluster.nodes().iter().for_each(sync);
        Job { half, again }
    }

    /// `open`: what is written is seen before its close.
    fn is_there(cluster: &Cluster, open: bool, what: &str) {
        for node in cluster.nodes().iter().filter(|node| node.pid().is_some()) {
            let what = format!("{what}, {}", node.name());
            let holds = |name: &str, data: &[u8]| {
                same(&format!("{what}: {name}"), &read(&node.path(name)), data);
            };
            holds("old", &in_place());
            if open || node.name() == cluster.node(2).name() {
                holds("made/deep/drained", &written_again());
                holds("before/checkpoint", &content(6)[..100_000]);
            }
            holds("new", &content(2));
            holds("linked", &content(2));
            holds("symbolic", &content(2));
            holds("made/deep/local/file", &content(3));
            holds("renamed", &content(5));
            assert!(!node.path("name").exists(), "{what}: the old name");
            let new = fs::metadata(node.path("new")).expect("stat");
            assert_eq!((new.mode() & 0o7777, new.nlink()), (0o640, 2), "{what}");
            let mut value = [0; 8];
            let len = rustix::fs::getxattr(node.path("new"), "user.run", &mut value[..]);
            assert_eq!(&value[..len.expect("the attribute")], b"7", "{what}");
        }
    }

    /// It goes on through the handles that it has, and ends.
    fn end(self, cluster: &Cluster, what: &str) {
        let there = |name: &str| read(&cluster.backing().join(name));
        same(what, &there("before/checkpoint"), &content(1));
        self.half.write_all_at(&content(6)[100_000..], 100_000).expect("write");
        self.half.sync_all().expect("fsync");
        let mut last = written_again();
        last[..10].fill(7);
        self.again.write_all_at(&[7; 10], 0).expect("write");
        self.again.sync_all().expect("fsync");
        drop(self.again);
        drop(write(&cluster.node(1).path("after"), &content(7)));
        same(what, &there("before/checkpoint"), &content(1));
        drop(self.half);
        cluster.umount_all();
        for (name, data) in [
            ("old", in_place()),
            ("made/deep/drained", last),
            ("new", content(2)),
            ("linked", content(2)),
            ("symbolic", content(2)),
            ("made/deep/local/file", content(3)),
            ("renamed", content(5)),
            ("before/checkpoint", content(6)),
            ("after", content(7)),
        ] {
            same(&format!("{what}, on the backing: {name}"), &there(name), &data);
        }
        let new = fs::metadata(cluster.backing().join("new")).expect("stat");
        assert_eq!((new.mode() & 0o7777, new.nlink()), (0o640, 2), "{what}");
        no_part_files(cluster.backing());
    }
}

fn no_part_files(dir: &Path) {
    for entry in fs::read_dir(dir).expect("list") {
        let entry = entry.expect("list");
        let name = entry.file_name();
        assert!(!name.to_string_lossy().starts_with(".ebb"), "{name:?} stays in {}", dir.display());
        if entry.file_type().expect("type").is_dir() {
            no_part_files(&entry.path());
        }
    }
}

/// Every node that makes copies knows where.
fn partners_are_there(cluster: &Cluster) {
    for node in cluster.nodes() {
        let copies = |status: &Value| status["copies"]["replicas"].as_u64() == Some(2);
        node.wait_status(SOON, |s| !copies(s) || !s["copies"]["partner"].is_null());
    }
}

/// On every node; and on the backing, when all have left.
fn everywhere(cluster: &Cluster, check: impl Fn(&Path)) {
    cluster.nodes().iter().for_each(|node| check(node.mountpoint()));
    cluster.umount_all();
    check(cluster.backing());
    no_part_files(cluster.backing());
}

fn a_job_goes_on(model: &str, options: &[(&str, &str)], went: fn(&Value) -> bool) {
    a_job_goes_on_as(|builder| builder, model, options, went);
}

fn a_job_goes_on_as(
    shape: fn(Builder) -> Builder,
    model: &str,
    options: &[(&str, &str)],
    went: fn(&Value) -> bool,
) {
    let what = format!("{model} {options:?}");
    let add = |b: Builder, (name, value): &(&str, &str)| b.option(name, value);
    let mut cluster = options.iter().fold(shape(builder(model)), add).start();
    let open = model != "session";
    partners_are_there(&cluster);
    let job = Job::begin(&cluster);
    Job::is_there(&cluster, open, &format!("{what}: before"));
    let status = cluster.node(0).status();
    assert!(went(&status), "{what}: {status:#}");
    lose_and_rebuild(&mut cluster, 3);
    Job::is_there(&cluster, open, &format!("{what}: rebuilt"));
    // What it is now is what a restart finds.
    cluster.kill_meta();
    cluster.restart_meta();
    Job::is_there(&cluster, open, &format!("{what}: restarted"));
    job.end(&cluster, &what);
}

fn through_the_daemon(status: &Value) -> bool {
    status["opens"]["daemon:switched-off"].as_u64() > Some(0)
}

fn has_copies(status: &Value) -> bool {
    status["copies"]["copied_bytes"].as_u64() > Some(0)
}

fn is_supervised(status: &Value) -> bool {
    !status["supervisor"].is_null()
}

fn has_flushed(status: &Value) -> bool {
    status["flushed_bytes"].as_u64() > Some(0)
}

#[test]
fn a_job_goes_on_under_posix() {
    a_job_goes_on("posix", &[("--io-path", "daemon")], through_the_daemon);
}

#[test]
fn a_job_goes_on_under_session() {
    a_job_goes_on("session", &[("--io-path", "daemon")], through_the_daemon);
}

#[test]
fn a_job_goes_on_under_commit() {
    a_job_goes_on("commit", &[("--io-path", "daemon")], through_the_daemon);
}

#[test]
fn a_job_goes_on_under_mpiio() {
    a_job_goes_on("mpiio", &[("--io-path", "daemon")], through_the_daemon);
}

#[test]
fn a_job_goes_on_past_the_daemon() {
    a_job_goes_on("session", &[("--io-path", "auto")], went_past);
}

#[test]
fn a_job_goes_on_with_copies() {
    a_job_goes_on("session", &[("--replicas", "2")], has_copies);
}

#[test]
fn a_job_goes_on_with_supervisors_and_a_token() {
    let shape = |builder: Builder| builder.supervised().token();
    a_job_goes_on_as(shape, "commit", &[], is_supervised);
}

/// Made longer than its bytes by one node, while it has no place on the backing or when it has one; another
/// node's bytes are there, and the first one's are not.
#[test]
fn a_length_that_only_one_node_has_asked_for_is_known() {
    let daemon = |model| builder(model).option("--io-path", "daemon");
    lengths_are_known("posix", daemon("posix"), through_the_daemon);
    lengths_are_known("session", daemon("session"), through_the_daemon);
}

#[test]
fn a_length_that_only_one_node_has_asked_for_is_known_past_the_daemon() {
    lengths_are_known("past", builder("session").option("--io-path", "auto"), went_past);
}

#[test]
fn a_length_that_only_one_node_has_asked_for_is_known_with_copies() {
    lengths_are_known("copies", builder("posix").option("--replicas", "2"), has_copies);
}

#[test]
fn a_length_that_only_one_node_has_asked_for_is_known_with_supervisors() {
    lengths_are_known("supervised", builder("commit").supervised().token(), is_supervised);
}

/// The five files are more than it holds: some are whole on the backing before they are made longer.
#[test]
fn a_length_that_only_one_node_has_asked_for_is_known_with_a_small_cache() {
    let small = builder("posix").option("--io-path", "daemon").option("--cache-size", "1MiB");
    lengths_are_known("small cache", small, has_flushed);
}

fn lengths_are_known(what: &str, builder: Builder, went: fn(&Value) -> bool) {
    const LONG: u64 = 2 * LEN;
    let mut cluster = builder.start();
    partners_are_there(&cluster);
    let names = ["truncate", "fallocate", "and cut", "late", "late and cut"];
    let open = |node: &Node, name: &str| {
        File::options().write(true).open(node.path(name)).expect("open to write")
    };
    for name in names {
        drop(write(&cluster.node(0).path(name), &content(1)));
    }
    let (patcher, sizer) = (cluster.node(1), cluster.node(2));
    let resize = |name: &str| {
        let file = open(sizer, name);
        match name {
            "fallocate" => rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, LONG)
                .unwrap_or_else(|e| panic!("{name}: {e}")),
            _ => file.set_len(LONG).unwrap_or_else(|e| panic!("{name}: {e}")),
        }
        if name.ends_with("cut") {
            file.set_len(LONG - 1).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    };
    names[..3].iter().for_each(|name| resize(name));
    for name in names {
        open(patcher, name).write_all_at(&[7; 10], 5000).expect("write");
    }
    patcher.drain();
    names[3..].iter().for_each(|name| resize(name));
    let listed =
        fs::read_dir(cluster.backing()).expect("list").map(|e| e.expect("list").file_name());
    let (parts, whole): (Vec<_>, Vec<_>) =
        listed.partition(|name| name.to_string_lossy().starts_with(".ebb-part-"));
    assert_eq!(parts.len() + whole.len(), names.len(), "{what}: {parts:?} {whole:?}");
    let status = cluster.node(0).status();
    assert!(went(&status), "{what}: {status:#}");
    assert!(whole.is_empty() || has_flushed(&status), "{what}: whole on the backing: {whole:?}");
    lose_and_rebuild(&mut cluster, 3);
    everywhere(&cluster, |dir| {
        for name in names {
            let mut want = content(1);
            want[5000..5010].fill(7);
            want.resize((LONG - u64::from(name.ends_with("cut"))) as usize, 0);
            same(&format!("{what}: {name}"), &read(&dir.join(name)), &want);
        }
    });
}

/// A file gets to the backing under the first of its names, and the directory of the second one cannot: something
/// else is there. Then the service's state is lost.
#[test]
fn a_name_that_did_not_get_to_the_backing_with_its_file_comes_back() {
    half_published(false);
}

/// The same, and somebody outside of the job has made a file of that name since.
#[test]
fn a_name_that_is_somebody_elses_by_now_stays_his() {
    half_published(true);
}

fn half_published(is_taken: bool) {
    let mut cluster = builder("posix").start();
    let (first, second) = (cluster.node(0), cluster.node(1));
    drop(write(&first.path("file"), &content(1)));
    fs::create_dir(second.path("dir")).expect("mkdir");
    fs::hard_link(second.path("file"), second.path("dir/name")).expect("link");
    cluster.nodes().iter().for_each(sync);
    let in_the_way = cluster.backing().join("dir");
    assert!(!in_the_way.exists(), "the directory is on the backing already");
    File::create(&in_the_way).expect("create");
    let drained = first.ebb("drain", &[], &[]);
    assert_eq!(drained.status.code(), Some(3), "{}", describe(&drained));
    same("on the backing", &read(&cluster.backing().join("file")), &content(1));
    fs::remove_file(&in_the_way).expect("remove");
    if is_taken {
        fs::create_dir(&in_the_way).expect("mkdir");
        fs::write(in_the_way.join("name"), content(2)).expect("write");
    }
    lose_and_rebuild(&mut cluster, 3);
    everywhere(&cluster, |dir| {
        same("the first name", &read(&dir.join("file")), &content(1));
        let second = content(if is_taken { 2 } else { 1 });
        same("the second name", &read(&dir.join("dir/name")), &second);
        let inode = |name: &str| fs::metadata(dir.join(name)).expect("stat").ino();
        assert_eq!(inode("file") == inode("dir/name"), !is_taken);
    });
}

/// Most of it is in the part file alone, whose name nobody knows any more.
#[test]
fn a_file_that_is_larger_than_the_cache_is_found() {
    const PIECE: u64 = 4 << 20;
    const PIECES: u64 = 24;
    let cluster = builder("posix").option("--cache-size", "64MiB").option("--io-path", "daemon");
    let mut cluster = cluster.flush("immediate").start();
    let file = File::create(cluster.node(0).path("large")).expect("create");
    for piece in 0..PIECES {
        file.write_all_at(&bytes(5, piece, 0, PIECE), piece * PIECE).expect("write");
    }
    file.sync_all().expect("fsync");
    let status = cluster.node(0).wait_status(SOON, |s| s["dirty_bytes"] == 0);
    let cached = status["clean_bytes"].as_u64();
    assert!(cached < Some(PIECES * PIECE - PIECE), "all of it is cached: {status:#}");
    lose_and_rebuild(&mut cluster, 3);
    let check = |path: &Path| {
        let there = File::open(path).expect("open");
        for piece in 0..PIECES {
            let mut data = vec![0; PIECE as usize];
            there.read_exact_at(&mut data, piece * PIECE).expect("read");
            same(
                &format!("piece {piece} of {}", path.display()),
                &data,
                &bytes(5, piece, 0, PIECE),
            );
        }
    };
    for node in cluster.nodes().iter().rev() {
        check(&node.path("large"));
    }
    drop(file);
    cluster.umount_all();
    check(&cluster.backing().join("large"));
    no_part_files(cluster.backing());
}

#[test]
fn a_job_goes_on_with_a_small_cache_and_a_flusher_that_never_waits() {
    let options = [("--flush", "immediate"), ("--cache-size", "64MiB")];
    a_job_goes_on("posix", &options, has_flushed);
}

/// A damaged journal is said to be, and kept.
#[test]
fn a_journal_that_cannot_be_read_is_kept_aside() {
    let mut cluster = builder("posix").start();
    drop(write(&cluster.node(0).path("f"), &content(0)));
    cluster.nodes().iter().for_each(sync);
    let told = told(&cluster);
    cluster.kill_meta();
    let journal = cluster.meta_state().join("journal");
    let mut damaged = read(&journal);
    damaged[40] ^= 1;
    fs::write(&journal, &damaged).expect("write");
    let refused = cluster.run_ebb(&[
        "meta",
        "--listen",
        "127.0.0.1:0",
        "--state",
        &cluster.meta_state().display().to_string(),
        &cluster.backing().display().to_string(),
    ]);
    ended_with(&refused, 1, &["damaged at byte", "--rebuild NODES", "is kept"]);
    same("not touched", &read(&journal), &damaged);
    cluster.rebuild_meta(3);
    all_have_told(&cluster, &told);
    let aside = fs::read_dir(cluster.meta_state()).expect("list").filter_map(Result::ok);
    let aside = aside.map(|entry| entry.path());
    let aside: Vec<_> = aside.filter(|p| p.display().to_string().contains("before-")).collect();
    let [aside] = &aside[..] else { panic!("{aside:?}") };
    same("kept", &read(aside), &damaged);
    same("rebuilt", &read(&cluster.node(1).path("f")), &content(0));
    cluster.umount_all();
    same("on the backing", &read(&cluster.backing().join("f")), &content(0));
}

/// Nothing is answered before so many have told; then those that have are the job.
#[test]
fn nothing_is_answered_before_all_have_told_and_who_has_not_is_out() {
    let mut cluster = builder("posix").lease("2s").start();
    for (at, node) in cluster.nodes().iter().enumerate() {
        drop(write(&node.path(format!("of{at}")), &content(at as u64)));
        sync(node);
    }
    cluster.node(2).signal(rustix::process::Signal::STOP);
    lose(&mut cluster);
    cluster.rebuild_meta(3);
    let mut reader = Command::new("cat");
    reader.arg(cluster.node(1).path("of0")).stdout(Stdio::null());
    let mut reader = reader.spawn().expect("cat");
    std::thread::sleep(Duration::from_secs(4));
    assert!(reader.try_wait().expect("wait").is_none(), "answered before the third had told");
    // Somebody decides that it will not come: two are enough.
    cluster.kill_meta();
    cluster.rebuild_meta(2);
    assert!(reader.wait().expect("wait").success(), "the one that waited goes on");
    for node in [cluster.node(0), cluster.node(1)] {
        same("of the first", &read(&node.path("of0")), &content(0));
        same("of the second", &read(&node.path("of1")), &content(1));
        assert!(!node.path("of2").exists(), "of a node that has not told");
    }
    cluster.node(2).signal(rustix::process::Signal::CONT);
    let third = cluster.node(2);
    third.wait_status(SOON, |s| s.to_string().contains("rebuilt without this node"));
    ended_with(&third.ebb("umount", &[], &[]), 3, &["rebuilt without this node", "of2"]);
    third.kill9();
    let _ = third.ebb("umount", &[], &[]);
    // Nor may another daemon bring what it has: nobody knows what is newer.
    let mounted = third.mount_command(&[]).output().expect("ebb mount");
    ended_with(&mounted, 2, &["rebuilt without this node", "ebb recover"]);
    let [first, second, _] = cluster.nodes() else { panic!("three nodes") };
    first.umount();
    second.umount();
    ended_with(&recover(&cluster, third, &["--wait", "0s"]), 0, &[]);
    for at in 0..3 {
        let name = format!("of{at}");
        same(&name, &read(&cluster.backing().join(&name)), &content(at));
    }
}

/// Locks are as the nodes know them, and who asks for one that is held does not get it.
#[test]
fn locks_are_held_by_those_who_had_them() {
    let mut cluster = builder("posix").start();
    drop(write(&cluster.node(0).path("f"), b"x"));
    cluster.nodes().iter().for_each(sync);
    let held = open(&cluster.node(0).path("f"));
    flock(&held, FlockOperation::NonBlockingLockExclusive).expect("nobody has it");
    lose_and_rebuild(&mut cluster, 3);
    let other = open(&cluster.node(1).path("f"));
    let refused = flock(&other, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(refused, Err(rustix::io::Errno::WOULDBLOCK), "it is held");
    drop(held);
    let free = || flock(&other, FlockOperation::NonBlockingLockExclusive).is_ok();
    wait_until(SOON, "free after the close", free);
}

/// The service dies again while it is told: the next one asks those that it has not heard.
#[test]
fn the_service_dies_while_it_is_rebuilt() {
    let mut cluster = builder("commit").start();
    for (at, node) in cluster.nodes().iter().enumerate() {
        drop(write(&node.path(format!("of{at}")), &content(at as u64)));
        sync(node);
    }
    lose(&mut cluster);
    for step in 0..12 {
        if step == 0 {
            cluster.rebuild_meta(3);
        } else {
            cluster.restart_meta();
        }
        std::thread::sleep(Duration::from_millis(7 * step));
        cluster.kill_meta();
    }
    cluster.restart_meta();
    for node in cluster.nodes() {
        for at in 0..3 {
            let name = format!("of{at}");
            same(&name, &read(&node.path(&name)), &content(at));
        }
    }
    cluster.nodes().iter().for_each(|node| assert!(requests(node, "reassert") > 0, "not asked"));
    cluster.umount_all();
    for at in 0..3 {
        let name = format!("of{at}");
        same(&name, &read(&cluster.backing().join(&name)), &content(at));
    }
}
