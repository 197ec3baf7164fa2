//! A daemon that stands still in the middle of a flush for longer than its lease: what it still writes to the
//! backing must not come over what other nodes have flushed since.

use ebb_testkit::{Cluster, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::wait_until;
use rustix::process::Signal;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const BLOCK: u64 = 4096;
const SOON: Duration = Duration::from_secs(60);

/// What is on the backing, under whatever name.
fn flushed(backing: &Path) -> u64 {
    let entries = fs::read_dir(backing).expect("list").filter_map(Result::ok);
    entries.filter_map(|e| e.metadata().ok()).map(|m| m.blocks() * 512).max().unwrap_or(0)
}

fn stopped_in_the_middle(model: &str, options: &[(&str, &str)]) {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(2).consistency(model).flush("immediate");
    let cluster = options.iter().fold(cluster, |c, (name, value)| c.option(name, value));
    let cluster = cluster.option("--flush-bandwidth", "16MiB").lease("3s").separate_meta().start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    let mut want = bytes(1, 1, 0, SIZE);
    let file = File::create(a.path("f")).expect("create");
    file.write_all_at(&want, 0).expect("write");
    file.sync_all().expect("fsync");
    drop(file);
    let backing = cluster.backing();
    wait_until(SOON, "it is being flushed", || flushed(backing) > 2 * MIB);
    a.signal(Signal::STOP);
    let began = flushed(backing);
    assert!(began < SIZE / 2, "stopped too late: {began} bytes");
    // One block of each MiB is another node's, which flushes it once the lease of the first one is over.
    let file = File::options().write(true).open(b.path("f")).expect("open");
    for at in (0..SIZE).step_by(MIB as usize) {
        let block = bytes(2, 1, at, BLOCK);
        file.write_all_at(&block, at).expect("write");
        want[at as usize..(at + BLOCK) as usize].copy_from_slice(&block);
    }
    file.sync_all().expect("fsync");
    drop(file);
    b.wait_status(SOON, |s| s["dirty_bytes"] == 0);
    a.signal(Signal::CONT);
    a.wait_status(SOON, |s| s["dirty_bytes"] == 0);
    assert!(a.log().contains("others may flush these bytes"), "it was in no flush:\n{}", a.log());
    for node in [a, b] {
        same("f", &fs::read(node.path("f")).expect("read"), &want);
    }
    cluster.umount_all();
    same("f", &fs::read(backing.join("f")).expect("read"), &want);
}

#[test]
fn what_others_flushed_meanwhile_stays_under_commit() {
    stopped_in_the_middle("commit", &[]);
}

#[test]
fn what_others_flushed_meanwhile_stays_under_posix() {
    stopped_in_the_middle("posix", &[("--io-path", "daemon")]);
}

#[test]
fn what_others_flushed_meanwhile_stays_with_a_small_cache() {
    stopped_in_the_middle("session", &[("--cache-size", "96MiB"), ("--io-path", "auto")]);
}

#[test]
fn what_others_flushed_meanwhile_stays_with_copies() {
    stopped_in_the_middle("commit", &[("--replicas", "2"), ("--request-timeout", "4s")]);
}
