//! `ebb run`: whose exit status it is, and that it never hides bytes that did not arrive.

use ebb_testkit::{Cluster, Node, describe, mounts, skip_reason};
use rustix::process::{Pid, Signal, kill_process};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn run_command(cluster: &Cluster, node: &Node, options: &[&str], script: &str) -> Command {
    let mut command = cluster.ebb();
    command.arg("run").args(options).arg("--cache").arg(node.cache());
    command.arg(cluster.backing()).arg(node.mountpoint());
    command.args(["--", "sh", "-c", script]);
    command
}

fn run(cluster: &Cluster, options: &[&str], script: &str) -> Output {
    let node = cluster.node(0);
    let output = run_command(cluster, node, options, script).output().expect("ebb can be started");
    let clear =
        mounts::wait_until(Duration::from_secs(5), || !mounts::is_mounted(node.mountpoint()));
    assert!(clear || output.status.code() != Some(0), "still mounted: {}", describe(&output));
    output
}

#[test]
fn the_status_of_the_command_is_passed_on() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().prepare();
    let file = cluster.node(0).path("out").display().to_string();
    let script = format!("echo to stdout; echo to stderr >&2; echo result > {file}; cat {file}");
    let output = run(&cluster, &[], &script);
    assert_eq!(output.status.code(), Some(0), "{}", describe(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "to stdout\nresult\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("to stderr"));
    assert_eq!(std::fs::read(cluster.backing().join("out")).expect("drained"), b"result\n");

    let failed = run(&cluster, &[], &format!("echo half > {file}.2; exit 42"));
    assert_eq!(failed.status.code(), Some(42), "{}", describe(&failed));
    assert!(cluster.backing().join("out.2").exists(), "drained all the same");
    let killed = run(&cluster, &[], "kill -TERM $$");
    assert_eq!(killed.status.code(), Some(143), "{}", describe(&killed));

    let mut missing = cluster.ebb();
    missing.arg("run").arg("--cache").arg(cluster.node(0).cache()).arg(cluster.backing());
    missing.arg(cluster.node(0).mountpoint()).args(["--", "/nonexistent/program"]);
    assert_eq!(missing.output().expect("ebb").status.code(), Some(127));
    assert!(!mounts::is_mounted(cluster.node(0).mountpoint()));
}

#[test]
fn signals_reach_the_command_and_the_drain_still_happens() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().flush("end").prepare();
    let node = cluster.node(0);
    let file = node.path("f").display().to_string();
    let script = format!(
        "trap 'echo caught >> {file}; exit 7' TERM; echo started > {file}; while :; do sleep 0.05; done"
    );
    let mut child = run_command(&cluster, node, &["--flush", "end"], &script)
        .stdin(Stdio::null())
        .spawn()
        .expect("ebb");
    let started = || std::fs::read(node.path("f")).is_ok_and(|c| c == b"started\n");
    assert!(mounts::wait_until(Duration::from_secs(20), started), "the command does not start");
    let pid = Pid::from_raw(child.id().cast_signed()).expect("a process id");
    kill_process(pid, Signal::TERM).expect("signal");
    assert_eq!(child.wait().expect("it ends").code(), Some(7));
    let drained = std::fs::read(cluster.backing().join("f")).expect("drained");
    assert_eq!(drained, b"started\ncaught\n");
    assert!(!mounts::is_mounted(node.mountpoint()));
}

/// A file system of one MiB, so that a backing can be full. Only root can make one.
struct Small(PathBuf);

impl Small {
    fn new(at: PathBuf) -> Option<Small> {
        std::fs::create_dir(&at).expect("mkdir");
        let made = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
            .arg(&at)
            .status()
            .is_ok_and(|s| s.success());
        made.then_some(Small(at))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_backing_is_status_3_or_4_and_the_file_is_named() {
    if skip_reason().is_some() {
        return;
    }
    let place = tempfile::TempDir::with_prefix("ebb-full-").expect("temporary directory");
    let Some(small) = Small::new(place.path().join("small")) else {
        println!("skipped: cannot mount a tmpfs here");
        return;
    };
    let cluster = Cluster::builder().backing(&small.0).prepare();
    let file = cluster.node(0).path("big").display().to_string();
    let script = format!("head -c 3000000 /dev/zero | tr '\\0' x > {file}");
    let output = run(&cluster, &["--stop-timeout", "5s"], &script);
    let status = output.status.code();
    assert!(matches!(status, Some(3 | 4)), "{}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("big: 3000000 bytes"), "{said}");
    assert!(!small.0.join("big").exists(), "a short file must not have the real name");
}
