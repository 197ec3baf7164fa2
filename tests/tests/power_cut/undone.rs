//! What the service had answered and not on stable storage yet is undone by a power cut. What was
//! synced before must not be gone by then.

use super::{Plan, begin_again, disk, end_everything, start};
use ebb_testkit::power::Cut;
use ebb_testkit::{Cluster, Node, PowerDisk, mounts};
use ebb_tests::content;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

const BYTES: u64 = 300_000;

/// What a power cut must not take is tried so often, until it has tried to.
const ROUNDS: usize = 12;

/// A job on the disk; a file that was written, synced and closed.
fn one_file(disk: &PowerDisk, model: &'static str, flush: &'static str) -> (Cluster, PathBuf) {
    let plan = Plan {
        model,
        flush,
        io_path: "daemon",
        cut: Cut::Everything,
        runs: Duration::ZERO,
        pauses: true,
    };
    let cluster = start(disk.path(), &plan);
    let path = cluster.node(0).path("p0/f");
    let file = File::create(&path).expect("create");
    file.write_all_at(&content::bytes(1, 2, 0, BYTES), 0).expect("write");
    file.sync_all().expect("fsync");
    File::open(cluster.node(0).path("p0")).and_then(|d| d.sync_all()).expect("fsync");
    (cluster, path)
}

/// The kernel writes what it likes and when: here the node's journal, and what was removed from its
/// cache, and not the service's journal.
fn sync_journal(node: &Node) {
    for entry in std::fs::read_dir(node.cache()).expect("the cache").flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b"journal") {
            File::open(entry.path()).and_then(|file| file.sync_all()).expect("fsync");
        }
    }
}

fn power_cut(disk: &mut PowerDisk, cluster: &mut Cluster) {
    disk.power_off();
    end_everything(cluster, Vec::new());
    disk.power_on(Cut::Everything, 1);
    begin_again(cluster);
}

fn counted(node: &Node, name: &str) -> u64 {
    let text = std::fs::read_to_string(node.path(".ebb/metrics")).expect("counters");
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |value| value.trim().parse().expect("a number"))
}

/// Service and node write their journals when they like. When the service's is lost that says that a
/// synced file was deleted, the file is there again, with all that it had.
#[test]
fn a_synced_file_that_comes_back_is_whole() {
    let Some(mut disk) = disk() else { return };
    let mut came_back = 0;
    for _ in 0..ROUNDS {
        let (mut cluster, path) = one_file(&disk, "posix", "end");
        std::fs::remove_file(&path).expect("unlink");
        let kept = counted(cluster.node(0), "ebb_kept_until_stable_total");
        sync_journal(cluster.node(0));
        power_cut(&mut disk, &mut cluster);
        match std::fs::read(&path) {
            Ok(bytes) => {
                let wanted = content::bytes(1, 2, 0, BYTES);
                content::same("it came back", &bytes, &wanted);
                came_back += 1;
            }
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::NotFound, "{e}"),
        }
        assert_eq!(kept, 1, "it was not this that kept it");
        cluster.umount_all();
        drop(cluster);
        disk.reset();
        if came_back > 1 {
            break;
        }
    }
    assert!(came_back > 0, "no deletion was ever undone");
}

/// The node's journal says that it was flushed, and the service's does not any more.
#[test]
fn a_synced_file_whose_flush_is_forgotten_is_whole() {
    let Some(mut disk) = disk() else { return };
    let mut forgotten = 0;
    for round in 0..ROUNDS {
        let (mut cluster, path) = one_file(&disk, "posix", "close");
        let published = || {
            let there = std::fs::metadata(cluster.backing().join("p0/f"));
            there.is_ok_and(|m| m.len() == BYTES)
        };
        assert!(mounts::wait_until(Duration::from_secs(20), published), "it is not flushed");
        let kept = counted(cluster.node(0), "ebb_kept_until_stable_total");
        sync_journal(cluster.node(0));
        power_cut(&mut disk, &mut cluster);
        let what = format!("round {round}");
        let wanted = content::bytes(1, 2, 0, BYTES);
        content::same(&what, &std::fs::read(&path).expect(&what), &wanted);
        forgotten += u64::from(cluster.node(0).log().contains("files=1"));
        assert_eq!(kept, 1, "it was not this that kept it");
        cluster.umount_all();
        let there = std::fs::read(cluster.backing().join("p0/f")).expect(&what);
        content::same(&what, &there, &wanted);
        drop(cluster);
        disk.reset();
        if forgotten > 1 {
            break;
        }
    }
    assert!(forgotten > 0, "no flush was ever forgotten");
}
