//! `ebb mount`, `umount`, `drain`, `status` on real mounts: what the contract says of them,
//! and that a start that fails leaves nothing.

use ebb_testkit::{Cluster, Node, describe, mounts, skip_reason};
use rustix::process::Signal;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);

fn one() -> Option<Cluster> {
    skip_reason().is_none().then(|| Cluster::builder().flush("end").start())
}

fn status_of(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn ended_with(output: &Output, status: i32, words: &[&str]) {
    assert_eq!(status_of(output), status, "{}", describe(output));
    let said = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(said.contains(word), "no '{word}' in: {said}");
    }
}

/// No mount, no daemon, no socket, no record.
fn nothing_is_left(cluster: &Cluster, node: &Node) {
    assert!(!mounts::is_mounted(node.mountpoint()), "a mount is left");
    assert!(!node.cache().join("control.sock").exists(), "a socket is left");
    let records = std::fs::read_dir(cluster.root().join("run"));
    let left: Vec<_> = records.into_iter().flatten().flatten().map(|e| e.path()).collect();
    assert!(left.is_empty(), "records are left: {left:?}");
    let point = node.mountpoint().display().to_string();
    let gone = mounts::wait_until(Duration::from_secs(5), || processes_with(&point).is_empty());
    assert!(gone, "processes are left: {:?}", processes_with(&point));
}

/// Processes with this argument on their command line.
fn processes_with(argument: &str) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let has = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(|a| a == argument.as_bytes())
    };
    pids.filter(has).collect()
}

#[test]
fn the_status_object_has_the_keys_of_the_contract() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("f"), [7; 5000]).expect("write");
    let status = node.status();
    for key in ["node", "consistency", "backing", "mountpoint", "meta", "flush_state"] {
        assert!(status[key].is_string(), "{key} in {status:#}");
    }
    for key in [
        "dirty_bytes",
        "clean_bytes",
        "cache_bytes",
        "flushed_bytes",
        "fetched_bytes_peer",
        "fetched_bytes_backing",
        "activity",
    ] {
        assert!(status[key].is_u64(), "{key} in {status:#}");
    }
    assert!(status["rpc"].is_object() && status["peers"].is_array() && status["errors"].is_array());
    assert_eq!(status["dirty_bytes"], 5000);
    assert_eq!(status["consistency"], "session");
    assert_eq!(Some(node.mountpoint()), status["mountpoint"].as_str().map(Path::new));
    assert_eq!(Some(cluster.backing()), status["backing"].as_str().map(Path::new));
    assert!(status["rpc"]["create"].as_u64().is_some(), "{status:#}");
    let states = ["idle", "waiting", "flushing", "paused"];
    assert!(states.contains(&status["flush_state"].as_str().unwrap_or_default()), "{status:#}");

    let screen = node.ebb("status", &[], &[]);
    let text = String::from_utf8_lossy(&screen.stdout);
    assert!(text.contains("session") && text.lines().count() <= 30, "{text}");
    let stats = node.ebb("stats", &[], &[]);
    assert!(stats.status.success() && !stats.stdout.is_empty(), "{}", describe(&stats));
    let stats = node.ebb("stats", &["--prometheus"], &[]);
    assert!(String::from_utf8_lossy(&stats.stdout).contains("# TYPE"), "{}", describe(&stats));
    let virtual_status = std::fs::read(node.path(".ebb/status.json")).expect("status.json");
    serde_json::from_slice::<serde_json::Value>(&virtual_status).expect("JSON");
}

#[test]
fn a_drain_and_an_umount_bring_everything_to_the_backing() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::create_dir(node.path("d")).expect("mkdir");
    std::fs::write(node.path("d/a"), vec![1; 300_000]).expect("write");
    std::fs::write(node.path("b"), vec![2; 100]).expect("write");
    assert!(!cluster.backing().join("b").exists(), "the end policy flushes nothing by itself");
    let drained = node.ebb("drain", &[], &[&node.path("d").display().to_string()]);
    ended_with(&drained, 0, &[]);
    assert_eq!(std::fs::read(cluster.backing().join("d/a")).expect("drained"), vec![1; 300_000]);
    let outside = node.ebb("drain", &[], &["/etc/passwd"]);
    ended_with(&outside, 2, &["/etc/passwd"]);
    node.drain();
    assert_eq!(node.status()["dirty_bytes"], 0);
    std::fs::write(node.path("c"), vec![3; 77]).expect("write");
    node.umount();
    for (name, content) in [("b", vec![2; 100]), ("c", vec![3; 77])] {
        assert_eq!(std::fs::read(cluster.backing().join(name)).expect("drained"), content);
    }
    nothing_is_left(&cluster, node);
    ended_with(&node.ebb("umount", &[], &[]), 1, &["no mount of Ebb"]);
    // And again on the same cache.
    node.mount();
    assert_eq!(std::fs::read(node.path("c")).expect("read"), vec![3; 77]);
    node.umount();
}

#[test]
fn paths_of_a_drain_may_be_relative_to_the_working_directory() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    node.shell("mkdir d; echo 1 > d/a; echo 2 > d/b");
    let mut drain = cluster.ebb();
    drain.current_dir(node.path("d")).arg("drain").arg(node.mountpoint()).arg("a");
    let output = drain.output().expect("ebb can be started");
    ended_with(&output, 0, &[]);
    assert!(cluster.backing().join("d/a").exists());
    assert!(!cluster.backing().join("d/b").exists());
}

#[test]
fn a_start_that_fails_leaves_nothing() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().prepare();
    let node = cluster.node(0);
    let start = |more: &[&str]| node.mount_command(more).output().expect("ebb can be started");
    ended_with(&start(&["--meta", "127.0.0.1:1"]), 5, &["127.0.0.1:1"]);
    nothing_is_left(&cluster, node);
    let holder = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = holder.local_addr().expect("bound").to_string();
    ended_with(&start(&["--listen", &taken]), 2, &[&taken]);
    drop(holder);
    nothing_is_left(&cluster, node);
    std::fs::write(node.path("occupied"), "").expect("write");
    ended_with(&start(&[]), 2, &["not empty"]);
    std::fs::remove_file(node.path("occupied")).expect("remove");
    nothing_is_left(&cluster, node);
    let odd = cluster.root().join("file");
    std::fs::write(&odd, "").expect("write");
    let odd = odd.display().to_string();
    ended_with(&start(&["--state", &odd]), 1, &[&odd]);
    nothing_is_left(&cluster, node);
    let mut nowhere = cluster.ebb();
    nowhere.args(["mount", "/nonexistent/backing"]).arg(node.mountpoint());
    ended_with(&nowhere.output().expect("ebb"), 2, &["/nonexistent/backing"]);
    // Nothing of all that is in the way.
    node.mount();
    node.umount();
    nothing_is_left(&cluster, node);
}

#[test]
fn one_mount_point_and_one_cache_serve_one_daemon() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    let again = node.mount_command(&[]).output().expect("ebb");
    ended_with(&again, 2, &["mounted there already"]);
    let other = cluster.root().join("other");
    std::fs::create_dir(&other).expect("mkdir");
    let mut second = cluster.ebb();
    second.arg("mount").arg("--cache").arg(node.cache()).arg(cluster.backing()).arg(&other);
    let pid = node.pid().expect("mounted").to_string();
    ended_with(&second.output().expect("ebb"), 2, &[&node.cache().display().to_string(), &pid]);
    assert!(!mounts::is_mounted(&other));
    assert_eq!(node.status()["pid"].to_string(), pid);
    node.umount();
}

#[test]
fn the_mount_of_a_dead_daemon_is_cleared_and_its_data_is_named() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("precious"), vec![5; 9000]).expect("write");
    node.kill9();
    assert!(std::fs::metadata(node.mountpoint()).is_err(), "the mount should be dead");
    let cache = node.cache().display().to_string();
    ended_with(&node.ebb("status", &[], &[]), 1, &["dead", &cache]);
    ended_with(&node.ebb("drain", &[], &[]), 1, &["dead"]);
    let in_the_way = node.mount_command(&[]).output().expect("ebb");
    ended_with(&in_the_way, 2, &["dead", "ebb umount"]);
    let said = ["precious: 9000 bytes", &cache, "ebb mount", "ebb recover"];
    ended_with(&node.ebb("umount", &[], &[]), 3, &said);
    nothing_is_left(&cluster, node);
    // The data is still there, and a new daemon goes on with it.
    node.mount();
    assert_eq!(std::fs::read(node.path("precious")).expect("read"), vec![5; 9000]);
    node.umount();
    nothing_is_left(&cluster, node);
}

#[test]
fn a_dead_daemon_without_data_is_no_loss() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    node.kill9();
    ended_with(&node.ebb("umount", &[], &[]), 0, &["dead"]);
    nothing_is_left(&cluster, node);
    node.mount();
    node.umount();
}

#[test]
fn umount_without_draining_keeps_the_bytes_and_says_so() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("f"), vec![5; 9000]).expect("write");
    ended_with(&node.ebb("umount", &["--no-drain"], &[]), 3, &["f: 9000 bytes"]);
    nothing_is_left(&cluster, node);
    assert!(!cluster.backing().join("f").exists());
}

#[test]
fn a_mount_in_use_is_not_taken_away_and_the_user_is_named() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    let mut user = node.spawn("exec sleep 60");
    let busy = node.ebb("umount", &[], &[]);
    let _ = user.kill();
    let _ = user.wait();
    ended_with(&busy, 1, &["in use", &user.id().to_string()]);
    assert!(node.path(".ebb/status.json").exists(), "it still serves");
    node.umount();
}

#[test]
fn umount_comes_to_an_end_when_the_daemon_does_not_answer() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("f"), "content").expect("write");
    node.signal(Signal::STOP);
    let stuck = node.ebb("umount", &["--timeout", "1s"], &[]);
    node.signal(Signal::CONT);
    ended_with(&stuck, 4, &["does not answer"]);
    // What was asked is still done when it runs again.
    assert!(mounts::wait_until(SOON, || !mounts::is_mounted(node.mountpoint())));
    let drained = || std::fs::read(cluster.backing().join("f")).is_ok_and(|c| c == b"content");
    assert!(mounts::wait_until(SOON, drained));
}

#[test]
fn a_signal_drains_before_the_daemon_ends() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("f"), vec![9; 123_456]).expect("write");
    node.signal(Signal::TERM);
    assert!(mounts::wait_until(SOON, || !mounts::is_mounted(node.mountpoint())), "{}", node.log());
    // The mount goes before the daemon does.
    let point = node.mountpoint().display().to_string();
    assert!(mounts::wait_until(SOON, || processes_with(&point).is_empty()), "{}", node.log());
    nothing_is_left(&cluster, node);
    assert_eq!(std::fs::read(cluster.backing().join("f")).expect("drained"), vec![9; 123_456]);
}

#[test]
fn a_daemon_in_the_foreground_ends_with_its_mount() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().flush("end").prepare();
    let node = cluster.node(0);
    let mut daemon = node.mount_command(&["--foreground"]).spawn().expect("ebb");
    // The mount is there a moment before the commands know whose it is.
    let up = || node.ebb("status", &[], &[]).status.success();
    assert!(mounts::wait_until(SOON, up), "it does not come up");
    assert_eq!(node.status()["pid"], daemon.id());
    std::fs::write(node.path("f"), "content").expect("write");
    ended_with(&node.ebb("umount", &[], &[]), 0, &[]);
    let status = daemon.wait().expect("it ends");
    assert_eq!(status.code(), Some(0));
    assert_eq!(std::fs::read(cluster.backing().join("f")).expect("drained"), b"content");
}

#[test]
fn when_the_starter_is_killed_nothing_is_mounted() {
    if skip_reason().is_some() {
        return;
    }
    // Killed at different moments of the start: before, while and after the mount comes up.
    for wait_ms in [1, 20, 60, 150] {
        let cluster = Cluster::builder().prepare();
        let node = cluster.node(0);
        let mut starter = node.mount_command(&[]).spawn().expect("ebb");
        std::thread::sleep(Duration::from_millis(wait_ms));
        let _ = starter.kill();
        if starter.wait().expect("it ends").success() {
            node.umount();
        }
        let point = node.mountpoint().display().to_string();
        let gone = || processes_with(&point).is_empty() && !mounts::is_mounted(node.mountpoint());
        assert!(mounts::wait_until(SOON, gone), "after {wait_ms} ms something is left");
    }
}

/// The moment between the daemon's word that it is up and the starter's own end, held open.
#[test]
fn a_starter_that_was_killed_before_it_said_so_leaves_no_mount() {
    if skip_reason().is_some() {
        return;
    }
    for supervised in ["off", "auto"] {
        // One that is stopped too early has not told its plan, one too late has done its work.
        let mut after = (4..60).step_by(3).cycle().take(60).map(Duration::from_millis);
        let held = after.any(|after| killed_while_it_waits(supervised, after));
        assert!(held, "supervise {supervised}: no starter was stopped in time");
    }
}

/// Stops a starter so long after its begin, and kills it when its daemon is up. False when it was
/// not stopped while it waited for that.
fn killed_while_it_waits(supervised: &str, after: Duration) -> bool {
    let cluster = Cluster::builder().prepare();
    let node = cluster.node(0);
    let mut starter = node.mount_command(&["--supervise", supervised]).spawn().expect("ebb");
    let point = node.mountpoint().display().to_string();
    let pid = rustix::process::Pid::from_child(&starter);
    std::thread::sleep(after);
    rustix::process::kill_process(pid, Signal::STOP).expect("signal");
    let up = || node.ebb("status", &[], &[]).status.success();
    let comes_up = mounts::wait_until(Duration::from_secs(2), up);
    if comes_up {
        std::thread::sleep(Duration::from_millis(300));
        assert!(up(), "it does not wait for a starter that is slow");
    }
    starter.kill().expect("signal");
    if starter.wait().expect("it ends").success() {
        node.umount();
        return false;
    }
    let gone = || processes_with(&point).is_empty() && !mounts::is_mounted(node.mountpoint());
    assert!(mounts::wait_until(SOON, gone), "supervise {supervised}: something is left");
    comes_up
}

/// A container, or anything with mount namespaces of its own, has a copy of every mount there is.
#[test]
fn umount_does_not_wait_for_other_mount_namespaces() {
    if skip_reason().is_some() {
        return;
    }
    for supervised in ["off", "on"] {
        let builder = Cluster::builder().flush("end");
        let builder = if supervised == "on" { builder.supervised() } else { builder };
        let cluster = builder.start();
        let node = cluster.node(0);
        std::fs::write(node.path("f"), supervised).expect("write");
        let script = format!("exec 3<{0}/f; exec sleep 1000", node.mountpoint().display());
        let mut other = match Command::new("unshare").args(["-m", "sh", "-c", &script]).spawn() {
            Ok(child) => child,
            Err(e) => return println!("SKIPPED: unshare: {e}"),
        };
        let inside = format!("/proc/{}/root{}/f", other.id(), node.mountpoint().display());
        let own = || std::fs::read_link(format!("/proc/{}/ns/mnt", other.id())).ok();
        let here = std::fs::read_link("/proc/self/ns/mnt").ok();
        if !mounts::wait_until(Duration::from_secs(10), || own().is_some_and(|n| Some(n) != here)) {
            other.kill().and_then(|()| other.wait()).expect("an end");
            return println!("SKIPPED: no mount namespaces here");
        }
        assert_eq!(std::fs::read_to_string(&inside).expect("read there"), supervised);
        let start = Instant::now();
        let output = node.ebb("umount", &["--timeout", "10s"], &[]);
        let took = start.elapsed();
        assert!(output.status.success(), "{}", describe(&output));
        assert!(took < Duration::from_secs(5), "{supervised}: {took:?}");
        assert_eq!(std::fs::read_to_string(cluster.backing().join("f")).expect("read"), supervised);
        // It is dead there, not stuck, and its daemon is gone.
        std::fs::read_to_string(&inside).expect_err("the mount has ended");
        nothing_is_left(&cluster, node);
        other.kill().and_then(|()| other.wait()).expect("an end");
    }
}

#[test]
fn a_clean_end_warns_of_nothing() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("f"), "x").expect("write");
    node.umount();
    let log = node.log();
    let bad: Vec<_> = log.lines().filter(|l| l.contains("WARN") || l.contains("ERROR")).collect();
    assert!(bad.is_empty(), "{bad:#?}");
}
