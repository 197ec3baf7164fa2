//! Programs of a node that ask for the same at the same time: the node asks once for all of them.

use ebb_testkit::{Cluster, skip_reason};
use ebb_tests::nodes::requests;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const PROGRAMS: usize = 16;

fn started() -> Option<Cluster> {
    let cluster = Cluster::builder().consistency("posix").flush("end").separate_meta();
    skip_reason().is_none().then(|| cluster.start())
}

#[test]
fn room_on_the_backing_is_asked_for_once_a_second() {
    let Some(cluster) = started() else { return };
    let node = cluster.node(0);
    let (before, began) = (requests(node, "statfs"), Instant::now());
    for _ in 0..200 {
        rustix::fs::statfs(node.mountpoint()).expect("statfs");
    }
    let seconds = began.elapsed().as_secs();
    let asked = requests(node, "statfs") - before;
    assert!((1..=seconds + 2).contains(&asked), "asked {asked} times in {seconds} s");
    std::thread::sleep(Duration::from_millis(1100));
    rustix::fs::statfs(node.mountpoint()).expect("statfs");
    assert_eq!(requests(node, "statfs") - before, asked + 1, "what is older is asked for again");
    cluster.umount_all();
}

/// Each of them has a file of its own: of one file the kernel lets one fsync in at a time.
#[test]
fn files_that_are_synced_at_the_same_time_are_asked_for_together() {
    let Some(cluster) = started() else { return };
    let node = cluster.node(0);
    let make = |n| {
        let file = File::create(node.path(format!("of{n}"))).expect("create");
        file.write_all_at(&[1; 4096], 0).expect("write");
        file
    };
    let files: Vec<File> = (0..PROGRAMS).map(make).collect();
    let syncs = |files: &[&File]| {
        let before = requests(node, "sync_meta");
        let together = Barrier::new(files.len());
        std::thread::scope(|scope| {
            for file in files {
                scope.spawn(|| {
                    together.wait();
                    file.sync_all().expect("fsync");
                });
            }
        });
        requests(node, "sync_meta") - before
    };
    let one_after_another: u64 = files.iter().map(|file| syncs(&[file])).sum();
    assert_eq!(one_after_another, PROGRAMS as u64, "who syncs alone asks");
    let rounds: Vec<u64> = (0..5).map(|_| syncs(&files.iter().collect::<Vec<_>>())).collect();
    println!("requests for {PROGRAMS} syncs at a time: {rounds:?}");
    let least = rounds.iter().min().expect("five of them");
    assert!((1..=PROGRAMS as u64 / 2).contains(least), "{rounds:?}");
    drop(files);
    cluster.umount_all();
}
