//! A file of which a node has unflushed bytes is removed, and that node has not heard of it when everything
//! dies.

use crate::recovery_names::{cluster, cluster_of};
use ebb_testkit::{Cluster, Node};
use ebb_tests::content::same;
use ebb_tests::recoveries::{all_die, ended_with, recover, start};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Output;
use std::time::Duration;

/// The service looks once a second what has reached the backing.
const LOOKED_AFTER: Duration = Duration::from_millis(1_200);
const OLD: &[u8] = b"published";
const RECORD: usize = 5_000;

/// The first node has written to a file that is on the backing, and keeps it open.
fn rewritten(cluster: &Cluster) -> File {
    let a = cluster.node(0);
    std::fs::write(a.path("old"), OLD).expect("write");
    a.drain();
    assert_eq!(std::fs::read(cluster.backing().join("old")).expect("it is published"), OLD);
    let file = File::options().write(true).open(a.path("old")).expect("open");
    file.write_all_at(b"new", 0).expect("write");
    file.sync_all().expect("fsync");
    file
}

fn record(node: &Node, at: usize) {
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false).open(node.path("f")).expect("open");
    file.write_all_at(&[1 + at as u8; RECORD], (at * RECORD) as u64).expect("write");
    file.sync_all().expect("fsync");
}

/// Both nodes have written to it, and left a hole.
fn with_a_hole(cluster: &Cluster) -> Vec<u8> {
    record(cluster.node(0), 0);
    record(cluster.node(1), 2);
    [vec![1; RECORD], vec![0; RECORD], vec![3; RECORD]].concat()
}

fn both(cluster: &Cluster) -> Vec<Output> {
    let running: Vec<_> = cluster.nodes().iter().map(|n| start(cluster, n)).collect();
    running.into_iter().map(|child| child.wait_with_output().expect("wait")).collect()
}

fn f_is(cluster: &Cluster, wanted: &[u8]) {
    same("f", &std::fs::read(cluster.backing().join("f")).expect("f is there"), wanted);
}

#[test]
fn what_another_node_removed_is_gone_and_nobody_waits_for_it() {
    for model in ["session", "commit"] {
        removed_elsewhere(model);
    }
}

fn removed_elsewhere(model: &str) {
    let Some(mut cluster) = cluster_of(model, 2) else { return };
    let file = rewritten(&cluster);
    let b = cluster.node(1);
    std::fs::remove_file(b.path("old")).expect("rm");
    // The other node hears that the backing has got so far, and nothing need be remembered for that.
    std::thread::sleep(LOOKED_AFTER);
    for _ in 0..2 {
        b.shell("mkdir d && rmdir d");
    }
    b.wait_status(Duration::from_secs(20), |s| s["names_noted"] == 0);
    let wanted = with_a_hole(&cluster);
    assert_eq!(cluster.node(0).status()["dirty_files_total"], 2, "the first one has not heard it");
    all_die(&mut cluster);
    drop(file);
    for output in both(&cluster) {
        ended_with(&output, 0, &[]);
    }
    f_is(&cluster, &wanted);
    assert!(!cluster.backing().join("old").exists(), "it came back");
}

/// Nobody knows that the job did that: the bytes stay, and what else the node has to say is said.
#[test]
fn what_a_stranger_removed_stays_and_holds_no_other_file_up() {
    let Some(mut cluster) = cluster(2) else { return };
    let file = rewritten(&cluster);
    let wanted = with_a_hole(&cluster);
    all_die(&mut cluster);
    drop(file);
    std::fs::remove_file(cluster.backing().join("old")).expect("rm");
    for round in 0..2 {
        let ended = both(&cluster);
        ended_with(&ended[0], 3, &["old: 3 bytes (the file on the backing is gone)"]);
        let said = String::from_utf8_lossy(&ended[0].stderr);
        assert!(!said.contains("f: "), "round {round}: {said}");
        ended_with(&ended[1], 0, &[]);
        f_is(&cluster, &wanted);
        assert!(!cluster.backing().join("old").exists(), "round {round}: it came back");
    }
    ended_with(&recover(&cluster, cluster.node(0), &["--force"]), 0, &[]);
    let back = std::fs::read(cluster.backing().join("old")).expect("by force");
    assert_eq!(&back[..3], b"new");
}
