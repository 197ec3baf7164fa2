//! What takes too long is named, and commands end all the same.

use ebb_testkit::{Cluster, mounts, skip_reason};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

#[test]
fn an_operation_that_is_stuck_is_named_once_and_counted() {
    if let Some(reason) = skip_reason() {
        return eprintln!("skipped: {reason}");
    }
    let cluster = Cluster::builder()
        .nodes(2)
        .consistency("posix")
        .flush("end")
        .option("--stuck-after", "1s")
        .option("--request-timeout", "4s")
        .start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    fs::write(b.path("f"), b"only there").unwrap();
    b.signal(Signal::STOP);
    let path = a.path("f");
    let reader = std::thread::spawn(move || fs::read(path));
    let during = a.wait_status(Duration::from_secs(10), |s| s["stuck"]["now"] == 1);
    assert_eq!(during["stuck"]["ever"], 1);
    assert!(reader.join().unwrap().is_err(), "it ends by its deadline");
    b.signal(Signal::CONT);
    let after = a.wait_status(Duration::from_secs(10), |s| s["stuck"]["now"] == 0);
    assert_eq!(after["stuck"]["ever"], 1);
    let named = a.log().lines().filter(|l| l.contains("an operation is stuck")).count();
    assert_eq!(named, 1);
    cluster.umount_all();
}

#[test]
fn umount_of_a_daemon_that_stands_still_ends_and_so_does_one_under_a_supervisor() {
    if let Some(reason) = skip_reason() {
        return eprintln!("skipped: {reason}");
    }
    let cluster = Cluster::builder().supervised().flush("end").start();
    let node = cluster.node(0);
    fs::write(node.path("f"), b"kept").unwrap();
    node.signal(Signal::STOP);
    let began = Instant::now();
    let output = node.ebb("umount", &["--timeout", "1s"], &[]);
    assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    assert!(mounts::is_mounted(node.mountpoint()));
    // What stands still can be replaced.
    assert!(node.kill_daemon());
    assert_eq!(fs::read(node.path("f")).unwrap(), b"kept");
    node.umount();
    assert_eq!(fs::read(cluster.backing().join("f")).unwrap(), b"kept");
}

/// A mount whose backing is another mount, the daemon of which stands still: whoever asks it waits,
/// as with a parallel file system that has lost its servers.
fn on_a_backing_that_can_hang(supervised: bool) -> (Cluster, Cluster) {
    let below = Cluster::builder().consistency("posix").flush("end").start();
    let backing = below.node(0).path("backing");
    let builder = Cluster::builder()
        .backing(backing)
        .flush("end")
        .option("--request-timeout", "2s")
        .option("--stuck-after", "3s");
    (below, if supervised { builder.supervised() } else { builder }.start())
}

/// Threads of these processes that wait where no signal reaches them.
fn uninterruptible(pids: &[u32]) -> Vec<String> {
    let threads = |pid: &u32| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        tasks.map(|t| t.path()).collect::<Vec<_>>()
    };
    let waits = |task: &Path| {
        let stat = fs::read_to_string(task.join("stat")).ok()?;
        let state = stat.rsplit(')').next()?.split_ascii_whitespace().next()?.to_owned();
        (state == "D").then(|| task.display().to_string())
    };
    pids.iter().flat_map(threads).filter_map(|t| waits(&t)).collect()
}

#[test]
fn umount_ends_while_the_backing_hangs_and_nobody_stays_behind() {
    if let Some(reason) = skip_reason() {
        return eprintln!("skipped: {reason}");
    }
    for supervised in [false, true] {
        let (below, cluster) = on_a_backing_that_can_hang(supervised);
        let node = cluster.node(0);
        for name in ["there", "changed"] {
            fs::write(below.node(0).path("backing").join(name), b"on the backing").unwrap();
        }
        // In place: a mount does not take the names of part files.
        let changed = fs::File::options().write(true).open(node.path("changed")).unwrap();
        changed.write_all_at(b"IN", 0).unwrap();
        drop(changed);
        below.node(0).signal(Signal::STOP);
        let path = node.path("there");
        let reader = std::thread::spawn(move || fs::read(path));
        let began = Instant::now();
        let output = node.ebb("umount", &["--timeout", "2s"], &[]);
        assert!(!output.status.success(), "it cannot have drained");
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
        assert!(reader.join().unwrap().is_err(), "a reader is told in time");
        // What the kernel lets wait for the backing ends when that answers.
        let pids = node.pids();
        assert!(!pids.is_empty());
        node.kill_all();
        below.node(0).signal(Signal::CONT);
        let gone = || pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        assert!(mounts::wait_until(Duration::from_secs(10), gone), "{:?}", uninterruptible(&pids));
        let output = node.ebb("umount", &[], &[]);
        assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(!mounts::is_mounted(node.mountpoint()));
        node.mount();
        assert_eq!(fs::read(node.path("changed")).unwrap(), b"IN the backing");
        node.umount();
        assert_eq!(fs::read(below.node(0).path("backing/changed")).unwrap(), b"IN the backing");
        drop(cluster);
        below.umount_all();
    }
}
