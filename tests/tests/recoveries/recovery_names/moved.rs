//! A directory is moved by a node that forgets it, because the backing has it so; another node has made a
//! file in it meanwhile, and knew the directory by its old name.

use crate::recovery_names::{cluster_of, look, sync};
use ebb_testkit::Node;
use ebb_tests::recoveries::{ended_with, start};
use std::process::Output;
use std::time::Duration;

#[test]
fn a_file_in_a_directory_that_was_moved_comes_back_where_that_is() {
    for model in ["session", "commit"] {
        moved_meanwhile(model, false);
    }
}

/// The service does not know what was moved before.
#[test]
fn the_same_with_a_restart_of_the_service_in_between() {
    moved_meanwhile("session", true);
}

fn moved_meanwhile(model: &str, restarted: bool) {
    let Some(mut cluster) = cluster_of(model, 3) else { return };
    let [a, b, c] = [0, 1, 2].map(|i| cluster.node(i));
    // What is waited for first, and then.
    std::fs::write(a.path("first"), "1").expect("write");
    look(a);
    b.shell("mkdir -p d/deep && echo old > d/deep/old");
    b.drain();
    std::fs::write(c.path("second"), "2").expect("write");
    c.shell("mv d e");
    if restarted {
        cluster.kill_meta();
        cluster.restart_meta();
        cluster.nodes().iter().for_each(look);
    }
    let [a, b, c] = [0, 1, 2].map(|i| cluster.node(i));
    a.drain();
    look(a);
    b.shell("echo new > e/deep/new && sync e/deep/new");
    sync(b);
    b.kill9();
    c.drain();
    look(c);
    c.wait_status(Duration::from_secs(20), |s| s["names_noted"] == 0);
    a.shell("mkdir d");
    sync(a);
    assert!(!cluster.backing().join("e/deep/new").exists(), "{model}: nobody else has it");
    [a, c].into_iter().for_each(Node::kill9);
    cluster.kill_meta();
    std::fs::remove_dir_all(cluster.meta_state()).expect("the state");
    for node in cluster.nodes() {
        let _ = node.ebb("umount", &[], &[]);
    }
    let running: Vec<_> = cluster.nodes().iter().map(|n| start(&cluster, n)).collect();
    let ended: Vec<Output> =
        running.into_iter().map(|child| child.wait_with_output().expect("wait")).collect();
    ended.iter().for_each(|output| ended_with(output, 0, &[]));
    let new = std::fs::read(cluster.backing().join("e/deep/new"));
    assert_eq!(new.expect("it came back"), b"new\n", "{model}");
    let d = std::fs::read_dir(cluster.backing().join("d")).expect("the other directory");
    assert_eq!(d.count(), 0, "{model}: nothing is in it");
}
