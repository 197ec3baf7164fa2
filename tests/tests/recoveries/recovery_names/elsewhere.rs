//! A file was flushed, and then other nodes moved or linked it on the backing and forgot that, as it was done.
//! The node that has bytes of it died without hearing of its new name.

use crate::recovery_names::{cluster_of, look, sync};
use ebb_testkit::Cluster;
use ebb_tests::recoveries::{ended_with, recover};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const NEW: [u8; 4_096] = [2; 4_096];

/// `f` has bytes of the first node that are not flushed; on the backing it is `d/g` by now, as the second
/// node has it. `heard`: the first node has heard that its name `f` got there.
fn moved(model: &str, heard: bool) -> Option<Cluster> {
    let cluster = cluster_of(model, 2)?;
    let (a, b) = (cluster.node(0), cluster.node(1));
    std::fs::write(a.path("f"), [1; 10_000]).expect("write");
    a.drain();
    if heard {
        look(a);
    }
    let file = OpenOptions::new().write(true).open(a.path("f")).expect("open");
    file.write_all_at(&NEW, 0).expect("write");
    file.sync_all().expect("fsync");
    drop(file);
    sync(a);
    a.kill9();
    b.shell("mkdir d && mv f d/g");
    b.drain();
    look(b);
    b.wait_status(Duration::from_secs(20), |s| s["names_noted"] == 0);
    assert!(cluster.backing().join("d/g").is_file(), "{model}: it is moved there");
    Some(cluster)
}

fn has_all(cluster: &Cluster, model: &str) {
    let wanted = [&NEW[..], &[1; 10_000 - 4_096]].concat();
    let there = std::fs::read(cluster.backing().join("d/g")).expect("read");
    assert!(there == wanted, "{model}: bytes of the first node are not there");
    assert!(!cluster.backing().join("f").exists(), "{model}");
}

#[test]
fn bytes_of_a_file_that_was_moved_on_the_backing_come_back_without_the_service() {
    for (model, heard) in [("posix", true), ("session", true), ("session", false), ("mpiio", false)]
    {
        let Some(mut cluster) = moved(model, heard) else { return };
        cluster.node(1).kill9();
        cluster.kill_meta();
        std::fs::remove_dir_all(cluster.meta_state()).expect("the state");
        for node in cluster.nodes() {
            let _ = node.ebb("umount", &[], &[]);
        }
        for node in cluster.nodes().iter().rev() {
            ended_with(&recover(&cluster, node, &["--wait", "0s"]), 0, &[]);
        }
        has_all(&cluster, &format!("{model}, heard: {heard}"));
    }
}

#[test]
fn bytes_of_a_file_that_was_moved_on_the_backing_come_back_with_the_service() {
    for model in ["posix", "commit"] {
        let Some(cluster) = moved(model, true) else { return };
        let _ = cluster.node(0).ebb("umount", &[], &[]);
        ended_with(&recover(&cluster, cluster.node(0), &[]), 0, &[]);
        has_all(&cluster, model);
    }
}
