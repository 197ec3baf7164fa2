//! Parts that die, hang, fill up or come back: errors within their deadline instead of hanging,
//! the truth from drain and umount, and going on where that is possible.

use ebb_testkit::environment::wrapped;
use ebb_testkit::{Builder, Cluster, Node, describe, mounts};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::{shell, wait_until, within};
use rustix::process::Signal;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// What the daemons of these tests are told about remote requests.
const TIMEOUT: &str = "2s";
/// An operation is a few requests, one after the other.
const OPERATION_MAX: Duration = Duration::from_secs(12);
const COMMAND_MAX: Duration = Duration::from_secs(60);
/// The service's lease for a silent node, and some.
const LEASE_MAX: Duration = Duration::from_secs(40);

fn builder(nodes: usize, model: &str) -> Builder {
    let cluster = Cluster::builder().nodes(nodes).consistency(model).flush("end");
    cluster.option("--request-timeout", TIMEOUT).separate_meta()
}

fn cluster(nodes: usize, model: &str) -> Cluster {
    builder(nodes, model).start()
}

/// Past the daemon, what a node alone does under posix needs no service.
fn through_the_daemon(nodes: usize) -> Cluster {
    builder(nodes, "posix").option("--io-path", "daemon").start()
}

fn ebb(node: &Node, command: &str, options: &[&str]) -> (Output, Duration) {
    let start = Instant::now();
    let output = node.ebb(command, options, &[]);
    let time = start.elapsed();
    println!("ebb {command} {options:?}: {} after {time:.1?}", output.status);
    assert!(time < COMMAND_MAX, "ebb {command}: {time:?}\n{}", describe(&output));
    (output, time)
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{}", describe(output)))
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

fn read_fresh(path: &Path) -> io::Result<Vec<u8>> {
    let path = path.to_owned();
    within(OPERATION_MAX, "read", move || fs::read(path))
}

/// Whoever waits is told at once that the service is away, and waits no longer than for a request. A service
/// inside a daemon comes back where it was, also when its whole node was down.
#[test]
fn a_drain_without_the_service_says_so_and_ends_and_goes_on_when_it_is_back() {
    const PATIENCE: Duration = Duration::from_secs(4);
    for (dirty, command) in [(false, "umount"), (true, "umount"), (true, "drain")] {
        let cluster = Cluster::builder().nodes(2).consistency("commit").flush("end");
        let patience = format!("{}s", PATIENCE.as_secs());
        let cluster = cluster.option("--request-timeout", &patience).start();
        let [home, node] = [cluster.node(0), cluster.node(1)];
        if dirty {
            fs::write(node.path("f"), "dirty").expect("write");
        }
        home.kill9();
        let (output, time) = ebb(node, command, &[]);
        assert_eq!(code(&output), 5, "{}", describe(&output));
        assert!(time < 2 * PATIENCE, "{time:?}");
        let amount = if dirty { "5B of 1 file(s)" } else { "0B of 0 file(s)" };
        for words in ["does not answer; waiting for it, at most 4 s", amount, "Nothing is lost"] {
            assert!(said(&output).contains(words), "{}", describe(&output));
        }
        // The dead mount; its cache may tell of bytes on the other node.
        let (output, _) = ebb(home, "umount", &[]);
        assert_eq!(code(&output), if dirty { 3 } else { 0 }, "{}", describe(&output));
        home.mount();
        let (output, time) = ebb(node, command, &[]);
        assert_eq!(code(&output), 0, "{}", describe(&output));
        assert!(time < 2 * PATIENCE, "{time:?}");
        let there = fs::read_to_string(cluster.backing().join("f")).ok();
        assert_eq!(there.as_deref(), dirty.then_some("dirty"));
    }
}

/// Every operation ends in time, with an error where it needs the service.
#[test]
fn without_the_service_operations_end_with_an_error_and_the_mount_can_go() {
    let mut cluster = through_the_daemon(1);
    let node = cluster.node(0);
    let at = |p: &str| node.path(p);
    fs::write(at("f"), "content").expect("write");
    fs::create_dir(at("d")).expect("mkdir");
    let open = OpenOptions::new().read(true).write(true).open(at("f")).expect("open");
    let root = at("");
    cluster.kill_meta();

    type Work = Box<dyn FnOnce() -> io::Result<()> + Send>;
    let twin = || open.try_clone().expect("dup");
    let (r, w, s) = (twin(), twin(), twin());
    let p = |name: &str| root.join(name);
    let (f, d, new, dir, to) = (p("f"), p("d"), p("new"), p("new dir"), p("to"));
    let (f2, f3, list) = (f.clone(), f.clone(), root.clone());
    let operations: Vec<(&str, Work)> = vec![
        ("create", Box::new(move || File::create(new).map(drop))),
        ("mkdir", Box::new(move || fs::create_dir(dir))),
        ("rename", Box::new(move || fs::rename(f3, to))),
        ("rmdir", Box::new(move || fs::remove_dir(d))),
        (
            "list",
            Box::new(move || fs::read_dir(list).and_then(|mut l| l.next().transpose()).map(drop)),
        ),
        ("read", Box::new(move || r.read_at(&mut [0; 7], 0).map(drop))),
        ("write", Box::new(move || w.write_at(b"new", 0).map(drop))),
        ("fsync", Box::new(move || s.sync_all())),
        // At first leases answer these, rightly: nobody can change anything meanwhile.
        ("open", Box::new(move || File::open(f2).map(drop))),
        ("stat", Box::new(move || fs::metadata(f).map(drop))),
    ];
    for (what, work) in operations {
        let start = Instant::now();
        let result = within(OPERATION_MAX, what, work);
        println!("{what}: {result:?} after {:.1?}", start.elapsed());
        assert!(result.is_err(), "{what} cannot be done without the service under posix");
    }
    drop(open);
    let node = cluster.node(0);
    let status = node.status();
    let errors = status["errors"].as_array().expect("errors");
    assert!(errors.iter().any(|e| e["operation"] == "metadata service"), "{errors:?}");
    let (drain, _) = ebb(node, "drain", &["--timeout", "5s"]);
    assert!([4, 5].contains(&code(&drain)), "{}", describe(&drain));
    let (refused, _) = ebb(node, "umount", &["--timeout", "5s"]);
    assert!([3, 4, 5].contains(&code(&refused)), "{}", describe(&refused));
    if mounts::is_mounted(node.mountpoint()) {
        let (output, time) = ebb(node, "umount", &["--no-drain"]);
        assert_eq!(code(&output), 3, "dirty bytes are left: {}", describe(&output));
        assert!(time < Duration::from_secs(20), "{time:?}");
    }
    assert!(!mounts::is_mounted(node.mountpoint()));
}

#[test]
fn nodes_go_on_when_the_service_is_back_on_its_state() {
    let mut cluster = cluster(2, "posix");
    let paths: Vec<PathBuf> = cluster.nodes().iter().map(|n| n.path("")).collect();
    let (a, b) = (&paths[0], &paths[1]);
    fs::create_dir(a.join("d")).expect("mkdir");
    let mut open = File::create(a.join("d/f")).expect("create");
    open.write_all(b"before").expect("write");
    fs::write(b.join("closed"), bytes(1, 1, 0, 200_000)).expect("write");
    for round in 0..3 {
        cluster.kill_meta();
        // Waits for the service, which is back before its deadline.
        let stat = a.join("closed");
        let waiting = std::thread::spawn(move || fs::metadata(stat).map(|m| m.len()));
        std::thread::sleep(Duration::from_millis(500));
        cluster.restart_meta();
        let found = within(OPERATION_MAX, "stat", move || waiting.join()).expect("no panic");
        assert_eq!(found.expect("stat over a restart"), 200_000, "round {round}");
        open.write_all(b", after").expect("write to a file that stayed open");
        let want = "before".to_string() + &", after".repeat(round + 1);
        assert_eq!(read_fresh(&b.join("d/f")).expect("read"), want.as_bytes());
        same("closed", &read_fresh(&a.join("closed")).expect("read"), &bytes(1, 1, 0, 200_000));
        fs::write(b.join(format!("new-{round}")), "new").expect("create");
        fs::rename(b.join(format!("new-{round}")), b.join(format!("d/n{round}"))).expect("rename");
        assert_eq!(read_fresh(&a.join(format!("d/n{round}"))).expect("read"), b"new");
    }
    drop(open);
    cluster.umount_all();
    let backing = |p: &str| fs::read(cluster.backing().join(p)).expect("read");
    assert_eq!(backing("d/f"), b"before, after, after, after");
    same("closed", &backing("closed"), &bytes(1, 1, 0, 200_000));
    assert_eq!(backing("d/n2"), b"new");
}

/// Writes files until `stop` exists, each with an fsync, and says at the end how many.
const WRITER: &str = r#"
n=0
while [ ! -e "$STOP" ]; do
    { echo "$WHO $n"; cat "$DATA"; } | dd of="$WHO-$n" conv=fsync status=none
    n=$((n + 1))
done
echo $n
"#;

/// What was acknowledged stays, however often the service dies under load. The writers are other
/// processes: starting the service from a process with open files would close these in the child,
/// which waits for the service.
#[test]
fn a_service_that_dies_under_load_loses_nothing_it_answered() {
    let mut cluster = Cluster::builder().nodes(2).consistency("commit").separate_meta().start();
    let (stop, data) = (cluster.root().join("stop"), cluster.root().join("data"));
    fs::write(&data, bytes(1, 0, 0, 5_000)).expect("write");
    let start_writer = |(who, node): (usize, &Node)| {
        let mut command = node.command("bash");
        command.args(["-euo", "pipefail", "-c", WRITER]).env("WHO", who.to_string());
        command.env("STOP", &stop).env("DATA", &data).stdout(Stdio::piped());
        command.spawn().expect("bash can be started")
    };
    let writers: Vec<_> = cluster.nodes().iter().enumerate().map(start_writer).collect();
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(700));
        let start = Instant::now();
        cluster.kill_meta();
        cluster.restart_meta();
        println!("back after {:.1?}", start.elapsed());
    }
    std::thread::sleep(Duration::from_millis(700));
    fs::write(&stop, "").expect("write");
    let counts = writers.into_iter().map(|writer| {
        let output = writer.wait_with_output().expect("it ends");
        assert!(output.status.success(), "a writer failed: {}", describe(&output));
        said(&output).trim().parse().expect("a number")
    });
    let written: Vec<u64> = counts.collect();
    println!("files written: {written:?}");
    assert!(written.iter().all(|n| *n > 4), "both went on: {written:?}");
    let check = |dir: &Path, who: usize, n: u64| {
        let want = [format!("{who} {n}\n").as_bytes(), &bytes(1, 0, 0, 5_000)].concat();
        let name = format!("{who}-{n}");
        same(&name, &fs::read(dir.join(&name)).expect("read"), &want);
    };
    for (who, count) in written.iter().enumerate() {
        (0..*count).for_each(|n| check(&cluster.node(1 - who).path(""), who, n));
    }
    cluster.umount_all();
    for (who, count) in written.iter().enumerate() {
        (0..*count).for_each(|n| check(cluster.backing(), who, n));
    }
}

/// Node 0 writes what only it has; node 1 has files of its own, and some on the backing.
fn with_bytes_on_node_0(cluster: &Cluster) {
    fs::write(cluster.backing().join("old"), "old").expect("write");
    fs::write(cluster.node(0).path("lost"), bytes(1, 1, 0, 3_000_000)).expect("write");
    fs::write(cluster.node(0).path("fetched"), bytes(1, 2, 0, 50_000)).expect("write");
    fs::write(cluster.node(1).path("own"), bytes(2, 1, 0, 50_000)).expect("write");
    assert_eq!(fs::read(cluster.node(1).path("fetched")).expect("read").len(), 50_000);
}

fn only_the_lost_bytes_fail(cluster: &Cluster) {
    let at = |p: &str| cluster.node(1).path(p);
    let start = Instant::now();
    let lost = read_fresh(&at("lost")).expect_err("these bytes are gone");
    println!("reading lost bytes: {lost} after {:.1?}", start.elapsed());
    assert_eq!(lost.raw_os_error(), Some(libc::EIO));
    assert_eq!(read_fresh(&at("old")).expect("read"), b"old");
    same("own", &read_fresh(&at("own")).expect("read"), &bytes(2, 1, 0, 50_000));
    let fetched = read_fresh(&at("fetched")).expect("fetched before");
    same("fetched", &fetched, &bytes(1, 2, 0, 50_000));
    fs::write(at("new"), "new").expect("write");
    fs::write(at("lost"), "written anew").expect("overwrite");
    assert_eq!(read_fresh(&at("lost")).expect("read"), b"written anew");
}

#[test]
fn bytes_of_a_dead_node_read_as_eio_and_everything_else_works() {
    let cluster = cluster(2, "session");
    with_bytes_on_node_0(&cluster);
    cluster.node(0).kill9();
    only_the_lost_bytes_fail(&cluster);
    let (output, _) = ebb(cluster.node(1), "umount", &[]);
    assert_eq!(code(&output), 0, "node 1 has all its bytes: {}", describe(&output));
    assert_eq!(fs::read(cluster.backing().join("lost")).expect("read"), b"written anew");
    assert_eq!(fs::read(cluster.backing().join("new")).expect("read"), b"new");
}

#[test]
fn bytes_of_a_node_that_hangs_read_as_eio_until_it_goes_on() {
    let cluster = cluster(2, "session");
    with_bytes_on_node_0(&cluster);
    let pid = cluster.node(0).pid().expect("a daemon") as libc::pid_t;
    // SAFETY: a signal to our own daemon.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let start = Instant::now();
    let lost = read_fresh(&cluster.node(1).path("lost")).expect_err("its owner hangs");
    println!("reading from a node that hangs: {lost} after {:.1?}", start.elapsed());
    assert_eq!(lost.raw_os_error(), Some(libc::EIO));
    assert_eq!(read_fresh(&cluster.node(1).path("old")).expect("read"), b"old");
    // SAFETY: as above.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    wait_until(LEASE_MAX, "its bytes are back", || {
        read_fresh(&cluster.node(1).path("lost")).is_ok()
    });
    let back = read_fresh(&cluster.node(1).path("lost")).expect("read");
    same("back", &back, &bytes(1, 1, 0, 3_000_000));
    cluster.umount_all();
}

#[test]
fn locks_of_a_dead_node_are_given_back() {
    let cluster = cluster(2, "posix");
    // Not at the node that dies: past the daemon the file may sit where it was made.
    File::create(cluster.node(1).path("f")).expect("create");
    let held = File::open(cluster.node(0).path("f")).expect("open");
    held.lock().expect("flock");
    let other = File::open(cluster.node(1).path("f")).expect("open");
    assert!(other.try_lock().is_err(), "held by node 0");
    cluster.node(0).kill9();
    wait_until(LEASE_MAX, "the lock of a dead node", || other.try_lock().is_ok());
}

#[test]
fn a_dead_daemons_mount_is_cleared_away_and_can_be_mounted_again() {
    let cluster = Cluster::builder().nodes(1).consistency("session").flush("end").start();
    let node = cluster.node(0);
    fs::write(node.path("dirty"), bytes(1, 1, 0, 100_000)).expect("write");
    node.kill9();
    let gone = fs::metadata(node.path("dirty")).expect_err("dead").raw_os_error();
    assert_eq!(gone, Some(libc::ENOTCONN));
    let (output, time) = ebb(node, "umount", &[]);
    assert_eq!(code(&output), 3, "{}", describe(&output));
    assert!(time < Duration::from_secs(10), "{time:?}");
    assert!(said(&output).contains(&node.cache().display().to_string()), "{}", describe(&output));
    assert!(!mounts::is_mounted(node.mountpoint()));
    assert_eq!(fs::read_dir(node.mountpoint()).expect("list").count(), 0);
}

/// A backing of its own that can be made full or read-only: a tmpfs. Taken away when dropped.
struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    /// None where mounting one is not allowed.
    fn new(size: &str) -> Option<Small> {
        // SAFETY: no arguments, no failure.
        if unsafe { libc::geteuid() } != 0 {
            println!("SKIPPED: only root may mount a tmpfs");
            return None;
        }
        let small = Small { dir: tempfile::tempdir().expect("tempdir") };
        let path = small.dir.path().display();
        shell(
            Path::new("/"),
            &format!("mount -t tmpfs -o size={size} ebb-test '{path}'"),
            COMMAND_MAX,
        );
        Some(small)
    }

    fn remount(&self, options: &str) {
        let path = self.dir.path().display();
        shell(Path::new("/"), &format!("mount -o remount,{options} '{path}'"), COMMAND_MAX);
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        assert!(mounts::clear(self.dir.path()) || std::thread::panicking(), "tmpfs stays");
    }
}

fn on_small_backing(small: &Small) -> Cluster {
    let builder = Cluster::builder().nodes(1).consistency("session").flush("end");
    builder.backing(small.dir.path().canonicalize().expect("path")).start()
}

#[test]
fn a_full_backing_is_told_by_drain_and_made_good_later() {
    let Some(small) = Small::new("8m") else { return };
    let cluster = on_small_backing(&small);
    let node = cluster.node(0);
    let large = bytes(1, 1, 0, 20_000_000);
    fs::write(node.path("small"), "small").expect("write");
    fs::write(node.path("too-large"), &large).expect("the buffer takes it");
    for command in ["drain", "umount"] {
        let (output, _) = ebb(node, command, &[]);
        assert_eq!(code(&output), 3, "{}", describe(&output));
        let named = said(&output).matches("\n  too-large: ").count();
        assert_eq!(named, 1, "once: {}", describe(&output));
        assert!(mounts::is_mounted(node.mountpoint()));
        same("still there", &read_fresh(&node.path("too-large")).expect("read"), &large);
    }
    assert!(!cluster.backing().join("too-large").exists(), "never short under its own name");
    let errors = node.status()["errors"].clone();
    assert!(errors.to_string().contains("too-large"), "{errors}");
    small.remount("size=64m");
    node.drain();
    same("backing", &fs::read(cluster.backing().join("too-large")).expect("read"), &large);
    assert_eq!(fs::read(cluster.backing().join("small")).expect("read"), b"small");
    assert_eq!(node.status()["errors"].as_array().map(Vec::len), Some(0), "made good");
    node.umount();
}

/// The backing has another name for a file, and no room for its bytes: the name that is known stays, and who wants to
/// take it away hears why.
#[test]
fn a_name_that_cannot_go_before_its_bytes_are_on_a_full_backing_says_so() {
    let Some(small) = Small::new("8m") else { return };
    let cluster = on_small_backing(&small);
    let (node, backing) = (cluster.node(0), cluster.backing());
    fs::write(backing.join("a"), "old").expect("write");
    fs::hard_link(backing.join("a"), backing.join("b")).expect("link");
    let large = bytes(1, 1, 0, 20_000_000);
    fs::write(node.path("a"), &large).expect("the buffer takes it");
    fs::write(node.path("new"), "new").expect("write");
    let refused = fs::remove_file(node.path("a")).expect_err("its bytes are needed");
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{refused}");
    let refused = fs::rename(node.path("new"), node.path("a")).expect_err("the same");
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{refused}");
    same("still there", &read_fresh(&node.path("a")).expect("read"), &large);
    small.remount("size=64m");
    fs::rename(node.path("new"), node.path("a")).expect("there is room now");
    same("the other name", &fs::read(backing.join("b")).expect("read"), &large);
    node.umount();
    assert_eq!(fs::read(backing.join("a")).expect("read"), b"new");
}

#[test]
fn a_read_only_backing_is_told_by_drain_and_made_good_later() {
    let Some(small) = Small::new("64m") else { return };
    let cluster = on_small_backing(&small);
    let node = cluster.node(0);
    fs::write(cluster.backing().join("old"), "old").expect("write");
    fs::write(node.path("new"), bytes(1, 1, 0, 100_000)).expect("write");
    fs::create_dir(node.path("dir")).expect("mkdir");
    small.remount("ro");
    let removed = fs::remove_file(node.path("old")).expect_err("it is written through");
    assert_eq!(removed.raw_os_error(), Some(libc::EROFS));
    assert_eq!(fs::read(node.path("old")).expect("read"), b"old");
    let (output, _) = ebb(node, "drain", &[]);
    assert_eq!(code(&output), 3, "{}", describe(&output));
    let text = said(&output);
    assert!(text.contains("new") && text.contains("dir"), "{}", describe(&output));
    same("still there", &read_fresh(&node.path("new")).expect("read"), &bytes(1, 1, 0, 100_000));
    small.remount("rw");
    node.drain();
    same(
        "backing",
        &fs::read(cluster.backing().join("new")).expect("read"),
        &bytes(1, 1, 0, 100_000),
    );
    assert!(cluster.backing().join("dir").is_dir());
    node.umount();
}

/// A write that nobody answered before its daemon was killed is there or not, but for all nodes
/// alike: under `posix` nothing waits for a sync event.
#[test]
fn a_write_that_was_under_way_when_its_daemon_died_is_the_same_on_all_nodes() {
    let mut cluster = through_the_daemon(2);
    let (old, new) = (bytes(1, 1, 0, 100_000), bytes(2, 1, 0, 100_000));
    let (here, there) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    fs::write(&here, &old).expect("write");
    let (drained, _) = ebb(cluster.node(0), "drain", &[]);
    assert_eq!(code(&drained), 0);
    same("f", &read_fresh(&there).expect("read"), &old);
    // It is in the cache of this node at once; publishing it waits for the service.
    let file = OpenOptions::new().write(true).open(&here).expect("open");
    cluster.kill_meta();
    let waiting = std::thread::spawn(move || file.write_all_at(&new, 0));
    std::thread::sleep(Duration::from_millis(500));
    cluster.node(0).kill9();
    let answer = within(OPERATION_MAX, "write", move || waiting.join()).expect("no panic");
    answer.expect_err("a daemon that is dead answers nothing");
    cluster.restart_meta();
    assert!(matches!(code(&ebb(cluster.node(0), "umount", &[]).0), 0 | 3));
    cluster.node(0).mount();
    let seen = read_fresh(&here).expect("read");
    same("f, on the other node", &read_fresh(&there).expect("read"), &seen);
}

/// Where the bytes of a file are in the node's cache.
fn cache_file(node: &Node, name: &str) -> PathBuf {
    let ino = fs::metadata(node.path(name)).expect("stat").ino();
    let script = format!("find data -name '*{ino:x}' -type f");
    node.cache().join(shell(node.cache(), &script, COMMAND_MAX).trim())
}

fn has_open(node: &Node, path: &Path) -> bool {
    let descriptors = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    let mut all = node.pids().into_iter().flat_map(descriptors).flatten();
    all.any(|entry| fs::read_link(entry.path()).is_ok_and(|at| at == path))
}

/// A flush is granted and cannot begin: nobody waits for its end.
#[test]
fn a_granted_flush_whose_bytes_cannot_be_read_keeps_nobody_out() {
    let cluster = Cluster::builder().nodes(1).consistency("posix").flush("end");
    let cluster = cluster.option("--io-path", "daemon").option("--request-timeout", TIMEOUT);
    let cluster = cluster.prepare();
    let node = cluster.node(0);
    // With so few descriptors those of closed files are given up soon.
    let few = wrapped(&node.mount_command(&[]), "prlimit", &["--nofile=300:300"]).output();
    assert!(few.as_ref().is_ok_and(|o| o.status.success()), "{few:?}");
    let content = bytes(7, 0, 0, 100_000);
    for i in 0..100 {
        let file = File::create(node.path(format!("f{i}"))).expect("create");
        file.write_all_at(&content, 0).expect("write");
    }
    let cached = cache_file(node, "f0");
    wait_until(COMMAND_MAX, "its descriptor is given up", || !has_open(node, &cached));
    let aside = cached.with_extension("aside");
    fs::rename(&cached, &aside).expect("rename");
    fs::create_dir(&cached).expect("what cannot be opened");
    let (output, _) = ebb(node, "drain", &[]);
    assert_eq!(code(&output), 3, "{}", describe(&output));
    assert!(said(&output).contains("f0: "), "{}", describe(&output));
    fs::remove_dir(&cached).expect("rmdir");
    fs::rename(&aside, &cached).expect("rename");
    let path = node.path("f0");
    let cut = move || OpenOptions::new().write(true).open(path)?.set_len(50_000);
    within(OPERATION_MAX, "a cut", cut).expect("nobody flushes");
    node.drain();
    same("f0", &fs::read(cluster.backing().join("f0")).expect("read"), &content[..50_000]);
}

fn append(node: &Node, name: &str, text: &str) -> io::Result<()> {
    let (path, text) = (node.path(name), text.to_owned());
    within(OPERATION_MAX, "append", move || {
        OpenOptions::new().append(true).create(true).open(path)?.write_all(text.as_bytes())
    })
}

/// The service makes room for an append whose program was told that nothing came of it: nobody has
/// bytes for it, which must not make the file unreadable.
fn an_append_that_failed_and_was_made(cluster: &Cluster) {
    let (one, two) = (cluster.node(0), cluster.node(1));
    for node in [one, two, one] {
        append(node, "log", "line\n").expect("append");
    }
    let mut file = OpenOptions::new().append(true).open(one.path("log")).expect("open");
    cluster.signal_meta(Signal::STOP);
    let failed = within(OPERATION_MAX, "append", move || file.write_all(b"lost\n"));
    println!("beside a service that stands still: {failed:?}");
    cluster.signal_meta(Signal::CONT);
    let failed = failed.expect_err("nobody answers");
    assert_eq!(failed.raw_os_error(), Some(libc::ETIMEDOUT));
    let read = [two, one].map(|node| read_fresh(&node.path("log")).expect("every byte is known"));
    for node in [two, one] {
        append(node, "log", "after\n").expect("append");
    }
    let whole = [&read[0][..], b"after\nafter\n"].concat();
    assert_eq!(read[0], read[1]);
    assert_eq!(read[0], b"line\nline\nline\n\0\0\0\0\0");
    for node in [one, two] {
        same("log", &read_fresh(&node.path("log")).expect("read"), &whole);
    }
    assert_eq!(one.counter("ebb_appends_undone_total"), 1, "it was made");
    if one.status()["copies"]["replicas"] == 2 {
        assert_eq!(one.counter("ebb_uncopied_bytes"), 0, "the zeros have a copy, too");
        assert_eq!(one.counter("ebb_copied_bytes_total"), 2 * 5 + 5 + 6);
    }
    cluster.umount_all();
    same("log", &fs::read(cluster.backing().join("log")).expect("read"), &whole);
}

#[test]
fn an_append_that_failed_and_was_made_leaves_zeros_and_no_error() {
    an_append_that_failed_and_was_made(&through_the_daemon(2));
}

#[test]
fn an_append_that_failed_and_was_made_leaves_zeros_with_io_path_auto_and_with_copies() {
    an_append_that_failed_and_was_made(&builder(2, "posix").option("--io-path", "auto").start());
    let copied = builder(2, "posix").option("--replicas", "2").start();
    copied.node(0).wait_status(OPERATION_MAX, |s| s["copies"]["partner"].is_u64());
    an_append_that_failed_and_was_made(&copied);
}

/// Somebody who reads where another program of the node appends hears of the place before its bytes are here, or
/// before it is known that there are none.
fn reads_beside_appends(cluster: &Cluster, asks: bool) {
    const LINES: u64 = 300;
    let (one, two) = (cluster.node(0), cluster.node(1));
    let line = [b'x'; 3000];
    File::create(one.path("log")).expect("create");
    let (mut reads, both_there) = (0, Barrier::new(2));
    std::thread::scope(|scope| {
        let appending = [one, two].map(|node| {
            let (path, both_there) = (node.path("log"), &both_there);
            scope.spawn(move || {
                let mut file = OpenOptions::new().append(true).open(path).expect("open");
                both_there.wait();
                (0..LINES).for_each(|_| file.write_all(&line).expect("append"));
            })
        });
        while appending.iter().any(|thread| !thread.is_finished()) {
            let read = fs::read(one.path("log"));
            assert!(read.is_ok(), "after {reads}: {read:?}");
            reads += 1;
        }
    });
    let appends = one.status()["rpc"]["append"].as_u64().unwrap_or_default();
    println!("{reads} reads beside {appends} appends that asked the service");
    let past = |node: &Node| node.status()["opens"]["passthrough-write"].as_u64().unwrap_or(0);
    assert_eq!(past(one) + past(two) > 0, !asks, "opens for writing past the daemons");
    // Where a file sits the other node appends; one that is ahead of the other is alone, and need not ask.
    assert!(reads > 0 && (!asks || appends > LINES / 10), "{reads} reads, {appends} appends");
    if !asks {
        let whole = vec![b'x'; 2 * LINES as usize * line.len()];
        cluster.umount_all();
        return same("log", &fs::read(cluster.backing().join("log")).expect("read"), &whole);
    }
    // Of a file of its own a node would not ask.
    append(two, "log", "next").expect("append");
    let mut file = OpenOptions::new().append(true).open(one.path("log")).expect("open");
    file.write_all(b"next").expect("append");
    cluster.signal_meta(Signal::STOP);
    let failed = within(OPERATION_MAX, "append", move || file.write_all(b"lost"));
    let path = one.path("log");
    let reading = std::thread::spawn(move || fs::read(path));
    std::thread::sleep(Duration::from_millis(300));
    cluster.signal_meta(Signal::CONT);
    let failed = failed.map_err(|e| e.raw_os_error());
    let read = reading.join().expect("a thread");
    assert_eq!(failed, Err(Some(libc::ETIMEDOUT)), "nobody answers");
    assert!(read.is_ok(), "{read:?}");
    let whole = fs::read(two.path("log")).expect("read");
    // It was made, or it was not: the node knows which.
    let made = one.counter("ebb_appends_undone_total");
    assert_eq!(whole.len() as u64, 2 * LINES * line.len() as u64 + 2 * 4 + made * 4);
    cluster.umount_all();
    same("log", &fs::read(cluster.backing().join("log")).expect("read"), &whole);
}

#[test]
fn a_reader_beside_appends_is_not_told_that_bytes_are_lost() {
    reads_beside_appends(&through_the_daemon(2), true);
}

#[test]
fn a_reader_beside_appends_is_not_told_so_with_io_path_auto_copies_a_small_cache_or_a_supervisor() {
    reads_beside_appends(&builder(2, "posix").option("--io-path", "auto").start(), false);
    let daemon = || builder(2, "posix").option("--io-path", "daemon");
    let copied = daemon().option("--replicas", "2").start();
    copied.node(0).wait_status(OPERATION_MAX, |s| s["copies"]["partner"].is_u64());
    reads_beside_appends(&copied, true);
    reads_beside_appends(&daemon().option("--cache-size", "1MiB").start(), true);
    reads_beside_appends(&daemon().supervised().start(), true);
}

/// Whoever was told that it has no lock must not keep others out.
#[test]
fn a_lock_that_failed_and_was_granted_is_given_back() {
    let cluster = through_the_daemon(2);
    let (one, two) = (cluster.node(0), cluster.node(1));
    fs::write(one.path("locked"), "x").expect("write");
    let [file, other] = [one, two].map(|node| File::open(node.path("locked")).expect("open"));
    let again = file.try_clone().expect("dup");
    cluster.signal_meta(Signal::STOP);
    let failed = within(OPERATION_MAX, "lock", move || file.try_lock());
    cluster.signal_meta(Signal::CONT);
    let Err(TryLockError::Error(failed)) = failed else { panic!("nobody answers: {failed:?}") };
    assert_eq!(failed.raw_os_error(), Some(libc::ETIMEDOUT));
    let other = within(OPERATION_MAX, "lock on the other node", move || {
        other.lock().expect("it is nobody's");
        other
    });
    // Its first owner waits in turn, and is not taken for who has it.
    let held = again.try_lock();
    assert!(matches!(held, Err(TryLockError::WouldBlock)), "the other node has it: {held:?}");
    drop(other);
    within(OPERATION_MAX, "lock again", move || {
        again.lock().expect("it is free");
        again.lock().expect("it has it");
    });
    cluster.umount_all();
}
