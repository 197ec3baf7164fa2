//! Deadlines, signals, who died, and what may be said of a directory.

use crate::together::*;
use ebb_testkit::{Cluster, skip_reason};
use ebb_tests::tools;
use rustix::fs::{OFlags, XattrFlags};
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};
use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

fn start(model: &str) -> Option<Cluster> {
    if let Some(why) = skip_reason() {
        eprintln!("SKIPPED: {why}");
        return None;
    }
    Some(Cluster::builder().nodes(2).separate_meta().consistency(model).lease("2s").start())
}

fn pid(child: &std::process::Child) -> rustix::process::Pid {
    rustix::process::Pid::from_child(child)
}

fn open(path: &std::path::Path, flags: OFlags) -> Result<(), Errno> {
    rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map(drop)
}

#[test]
fn nobody_waits_longer_than_the_directory_says() {
    let Some(cluster) = start("session") else { return };
    let node = cluster.node(0);
    couple(node, "d", "producers=2 consumers=1 wait=700ms");
    let open_for = |file: &str| {
        let began = Instant::now();
        let opened = open(&node.path(file), OFlags::RDONLY);
        (opened, began.elapsed())
    };
    let waited = Duration::from_millis(600)..Duration::from_secs(10);
    let (opened, after) = open_for("d/never");
    assert_eq!(opened, Err(Errno::NOENT));
    assert!(waited.contains(&after), "{after:?}");
    node.shell("echo half > d/f");
    let (opened, after) = open_for("d/f");
    assert_eq!(opened, Err(Errno::TIMEDOUT));
    assert!(waited.contains(&after), "{after:?}");
    // Who does not want to wait does not.
    let began = Instant::now();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    assert_eq!(open(&node.path("d/f"), flags), Err(Errno::AGAIN));
    assert_eq!(open(&node.path("d/never"), flags), Err(Errno::NOENT));
    assert!(began.elapsed() < Duration::from_millis(600));
    assert_eq!(coupled(&cluster)["awaiting"], 0, "nobody waits any more");
    cluster.umount_all();
}

#[test]
fn a_signal_ends_a_wait() {
    let Some(cluster) = start("posix") else { return };
    let node = cluster.node(1);
    couple(node, "d", "producers=2 consumers=1 wait=10m");
    node.shell("echo half > d/f");
    for file in ["d/f", "d/never"] {
        let consumer = reads(node, file, &cluster.root().join("copy"));
        wait_awaiting(&cluster, 1);
        kill_process(pid(&consumer), Signal::TERM).expect("a signal");
        let status = ended(consumer, file);
        assert_eq!(status.signal(), Some(Signal::TERM.as_raw()), "{file}: {status}");
        wait_awaiting(&cluster, 0);
    }
    cluster.umount_all();
}

/// A producer that is killed leaves a file that nobody takes for a whole one.
#[test]
fn a_file_whose_producer_was_killed_cannot_be_read() {
    let Some(cluster) = start("session") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=1 consumers=1 wait=1m");
    let copy = cluster.root().join("copy");
    let consumer = reads(b, "d/f", &copy);
    wait_awaiting(&cluster, 1);
    let producer =
        a.command("sh").args(["-c", "exec 3> d/f; echo half >&3; exec sleep 100"]).spawn();
    let producer = producer.expect("sh");
    let writes = || attribute(&b.path("d/f")).is_ok_and(|text| text.contains("1 writing"));
    tools::wait_until(LIMIT, "somebody writes", writes);
    kill_process(pid(&producer), Signal::KILL).expect("a signal");
    ended(producer, "the producer");
    let status = ended(consumer, "the consumer");
    assert!(!status.success() && fs::read(&copy).expect("a copy").is_empty(), "{status}");
    assert_eq!(open(&b.path("d/f"), OFlags::RDONLY), Err(Errno::IO));
    let lost = coupled(&cluster)["lost"].clone();
    assert_eq!(lost[0]["path"], "d/f", "{lost}");
    let address = cluster.meta_address().expect("a service");
    let said = cluster.run_ebb(&["status", address]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("d/f: a producer at node"), "{said}");
    // Written anew it is whole.
    a.shell("echo whole > d/f");
    is_done(reads(b, "d/f", &copy), "the next consumer");
    assert_eq!(fs::read(&copy).expect("a copy"), b"whole\n");
    wait_released(&cluster, "d/f");
    cluster.umount_all();
}

/// Whoever executes another program closes files in the middle of it. The daemon looks at who closes, and must
/// not wait for what waits for its answer.
#[test]
fn who_executes_another_program_is_not_waited_for() {
    let Some(cluster) = start("session") else { return };
    let node = cluster.node(0);
    couple(node, "d", "producers=1 consumers=1 wait=1m");
    // The shell keeps its descriptor under another number for the command, which is closed by exec.
    let script = "exec 3> d/f; sleep 1 3>&-; for n in 1 2 3 4 5; do true 3>&-; /bin/true 3>&-; done; \
                  echo whole >&3";
    let producer = node.command("sh").args(["-c", script]).spawn().expect("sh");
    is_done(producer, script);
    // What this program has open its children close when they execute another one.
    let mut file = fs::File::create(node.path("d/f2")).expect("made");
    for _ in 0..5 {
        is_done(node.command("true").spawn().expect("true"), "true");
    }
    file.write_all(b"early").expect("written");
    drop(file);
    let copy = cluster.root().join("copy");
    for (file, want) in [("d/f", "whole\n"), ("d/f2", "early")] {
        is_done(reads(cluster.node(1), file, &copy), file);
        assert_eq!(fs::read_to_string(&copy).expect("a copy"), want);
    }
    wait_released(&cluster, "d/f");
    wait_released(&cluster, "d/f2");
    cluster.umount_all();
}

/// One of several that have it open, who may have been the one that writes; and one that had closed it.
#[test]
fn a_helper_that_is_killed_loses_what_it_has_open() {
    let Some(cluster) = start("session") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=1 consumers=1 wait=1m");
    let kills = |file: &str, closed: &str| {
        let script = format!(
            "exec 3> {file}; sleep 100 {closed} & sleep 0.5; kill -9 $!; wait $! || true; echo x >&3"
        );
        is_done(a.command("sh").args(["-c", &script]).spawn().expect("sh"), &script);
    };
    kills("d/f", "");
    wait_stands(b, "d/f", "lost");
    kills("d/g", "3>&-");
    wait_stands(b, "d/g", "ready");
    cluster.umount_all();
}

/// A program that ends by itself, whatever its status, has produced.
#[test]
fn who_ends_by_itself_is_not_killed() {
    let Some(cluster) = start("session") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=1 consumers=1 wait=1m");
    let copy = cluster.root().join("copy");
    let script = "exec 3> d/f; echo three >&3; exit 3";
    let producer = a.command("sh").args(["-c", script]).spawn().expect("sh");
    assert_eq!(ended(producer, script).code(), Some(3));
    is_done(reads(b, "d/f", &copy), script);
    assert_eq!(fs::read_to_string(&copy).expect("a copy"), "three\n");
    wait_released(&cluster, "d/f");
    cluster.umount_all();
}

#[test]
fn a_consumer_that_was_killed_may_come_again() {
    let Some(cluster) = start("session") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=1 consumers=1 wait=1m");
    a.shell("echo hello > d/f");
    let reader = b.command("sh").args(["-c", "exec 3< d/f; read line <&3; exec sleep 100"]).spawn();
    let reader = reader.expect("sh");
    let reads_it = || attribute(&a.path("d/f")).is_ok_and(|text| text.contains("1 reading"));
    tools::wait_until(LIMIT, "somebody reads", reads_it);
    kill_process(pid(&reader), Signal::KILL).expect("a signal");
    ended(reader, "the reader");
    let left = || attribute(&a.path("d/f")).is_ok_and(|text| text.contains("0 reading"));
    tools::wait_until(LIMIT, "nobody reads", left);
    let copy = cluster.root().join("copy");
    is_done(reads(b, "d/f", &copy), "the next one");
    assert_eq!(fs::read(&copy).expect("a copy"), b"hello\n");
    wait_released(&cluster, "d/f");
    cluster.umount_all();
}

/// A node that is lost has its producers lost.
#[test]
fn a_file_whose_producers_node_is_lost_cannot_be_read() {
    let Some(cluster) = start("session") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(b, "d", "producers=1 consumers=1 wait=1m");
    let copy = cluster.root().join("copy");
    let producer =
        a.command("sh").args(["-c", "exec 3> d/f; echo half >&3; exec sleep 100"]).spawn();
    let mut producer = producer.expect("sh");
    let writes = || attribute(&b.path("d/f")).is_ok_and(|text| text.contains("1 writing"));
    tools::wait_until(LIMIT, "somebody writes", writes);
    let consumer = reads(b, "d/f", &copy);
    wait_awaiting(&cluster, 1);
    a.kill9();
    let status = ended(consumer, "the consumer");
    assert!(!status.success() && fs::read(&copy).expect("a copy").is_empty(), "{status}");
    assert_eq!(open(&b.path("d/f"), OFlags::RDONLY), Err(Errno::IO));
    let _ = producer.kill();
    let _ = producer.wait();
}

#[test]
fn what_may_be_said_of_a_directory() {
    let Some(cluster) = start("session") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    let set = |path: &std::path::Path, terms: &str| {
        rustix::fs::setxattr(path, COUPLE, terms.as_bytes(), XattrFlags::empty())
    };
    couple(a, "d", "producers=1 consumers=2");
    let said = "producers=1 consumers=2 keep=none wait=30s";
    assert_eq!(attribute(&b.path("d")).as_deref(), Ok(said));
    fs::create_dir(b.path("d/below")).expect("a directory below");
    assert_eq!(attribute(&a.path("d/below")).as_deref(), Ok(said));
    assert_eq!(attribute(&a.path(".")), Err(Errno::NODATA));
    assert_eq!(set(&a.path("d"), "producers=1 consumers=1"), Err(Errno::NOTEMPTY));
    assert_eq!(set(&a.path("d/below"), "producers=1"), Err(Errno::INVAL));
    assert_eq!(set(&a.path("d/below"), "producers=1 consumers=1 stream"), Err(Errno::INVAL));
    assert_eq!(set(&a.path("d/below"), "producers=3 consumers=1"), Ok(()));
    fs::write(b.path("d/below/f"), "one of three").expect("written");
    wait_stands(a, "d/below/f", "awaited: 1 of 3 producers");
    assert_eq!(set(&a.path("d/below/f"), "producers=1 consumers=1"), Err(Errno::NOTDIR));
    rustix::fs::removexattr(a.path("d/below"), COUPLE).expect("taken back");
    assert_eq!(attribute(&b.path("d/below")).as_deref(), Ok(said), "as the directory above says");
    rustix::fs::removexattr(a.path("d"), COUPLE).expect("taken back");
    assert_eq!(rustix::fs::removexattr(a.path("d"), COUPLE), Err(Errno::NODATA));
    fs::write(b.path("d/free"), "not coupled").expect("written");
    assert_eq!(fs::read(a.path("d/free")).expect("read at once"), b"not coupled");
    // What was made before is as it was.
    fs::remove_file(b.path("d/below/f")).expect("removed");
    cluster.umount_all();
}
