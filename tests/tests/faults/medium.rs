//! A disk of the cache that fails: what it loses is told, wherever it would have gone, and what it did
//! not lose goes on. Real disks that fail, and bytes of cache files that change behind the daemon.

use ebb_testkit::{Cluster, Disk, Node, describe, random, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::{available, wait_until};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

const BYTES: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const SOON: Duration = Duration::from_secs(20);

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{}", describe(output)))
}

fn faulty() -> Option<Disk> {
    if let Some(why) = skip_reason() {
        println!("SKIPPED: {why}");
        return None;
    }
    if !available(&["nbdkit", "nbdfuse", "mkfs.ext4"]) {
        return None;
    }
    Disk::faulty(96).map_err(|why| println!("SKIPPED: {why}")).ok()
}

fn one_node(checksums: &str) -> ebb_testkit::Builder {
    let cluster = Cluster::builder().nodes(1).consistency("session").flush("end").separate_meta();
    let cluster = cluster.option("--checksums", checksums);
    // What is written past the daemon has no sums (docs/operations.md).
    if checksums == "on" { cluster.option("--io-path", "daemon") } else { cluster }
}

fn write(node: &Node, name: &str, who: u64) {
    fs::write(node.path(name), bytes(who, 0, 0, BYTES)).expect("written");
}

/// The cache files of a node that are as long as what these tests write.
fn cache_files(node: &Node) -> Vec<PathBuf> {
    let shards = fs::read_dir(node.cache().join("data")).expect("the cache").flatten();
    let files = shards.flat_map(|s| fs::read_dir(s.path()).expect("a directory").flatten());
    files.map(|f| f.path()).filter(|p| fs::metadata(p).is_ok_and(|m| m.len() == BYTES)).collect()
}

/// That of a file whose content nobody else has.
fn cache_file(node: &Node, who: u64) -> PathBuf {
    let is = |path: &PathBuf| fs::read(path).is_ok_and(|b| b == bytes(who, 0, 0, BYTES));
    cache_files(node).into_iter().find(is).expect("its cache file")
}

/// The kernel tries to write everything back, now.
fn write_back(disk: &Disk) {
    let _ = Command::new("sync").arg("--file-system").arg(disk.path()).output().expect("sync");
}

/// What is in memory of the cache files, and on the disk, is given up.
fn drop_pages(node: &Node) {
    for path in cache_files(node) {
        fadvise(File::open(path).expect("open"), 0, None, Advice::DontNeed).expect("fadvise");
    }
}

fn damaged_blocks(node: &Node) -> u64 {
    node.status()["medium"]["damaged_blocks"].as_u64().expect("a counter")
}

/// Changes one byte of a cache file behind the daemon.
fn flip(path: &PathBuf, at: u64) {
    let file = File::options().read(true).write(true).open(path).expect("open");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[!byte[0]], at).expect("write");
}

/// Pages that did not reach the disk and are gone from memory read as zeros there.
fn what_the_disk_lost_is_told(checksums: &str) {
    let Some(disk) = faulty() else { return };
    let cluster = one_node(checksums).caches_below(disk.path()).start();
    let node = cluster.node(0);
    write(node, "before", 1);
    File::open(node.path("before")).and_then(|f| f.sync_all()).expect("fsync");
    write(node, "lost", 2);
    disk.fail();
    // After the disk was told to sync by the rig.
    write(node, "also lost", 3);
    fs::write(node.path("lost"), bytes(2, 1, 0, BYTES)).expect("written over");
    write_back(&disk);
    drop_pages(node);
    disk.heal();
    wait_until(SOON, "the daemon notices", || {
        node.status()["medium"]["lost_bytes"].as_u64() > Some(0)
    });
    let drained = node.ebb("drain", &[], &[]);
    assert_eq!(code(&drained), 3, "{}", describe(&drained));
    let text = describe(&drained);
    assert!(text.contains("also lost") && text.contains("the disk of the cache failed"), "{text}");
    for name in ["lost", "also lost"] {
        let read = fs::read(node.path(name)).expect_err("lost bytes are no zeros");
        assert_eq!(read.raw_os_error(), Some(libc::EIO), "{name}");
        assert!(!cluster.backing().join(name).exists(), "{name} is not whole");
    }
    same(
        "before",
        &fs::read(cluster.backing().join("before")).expect("drained"),
        &bytes(1, 0, 0, BYTES),
    );
    // Written anew they are as any file.
    write(node, "lost", 4);
    same("anew", &fs::read(node.path("lost")).expect("read"), &bytes(4, 0, 0, BYTES));
    let ended = node.ebb("umount", &[], &[]);
    assert_eq!(code(&ended), 3, "the other one is still lost: {}", describe(&ended));
    same(
        "anew",
        &fs::read(cluster.backing().join("lost")).expect("drained"),
        &bytes(4, 0, 0, BYTES),
    );
    let _ = node.ebb("umount", &["--no-drain"], &[]);
}

#[test]
fn what_the_disk_lost_is_told_and_never_drained_as_zeros() {
    what_the_disk_lost_is_told("on");
}

#[test]
fn what_the_disk_lost_is_told_also_without_checksums() {
    what_the_disk_lost_is_told("off");
}

#[test]
fn what_did_not_reach_the_disk_and_is_in_memory_is_not_lost() {
    let Some(disk) = faulty() else { return };
    let cluster = one_node("on").caches_below(disk.path()).start();
    let node = cluster.node(0);
    disk.fail();
    write(node, "file", 1);
    let synced = File::options().write(true).open(node.path("file")).and_then(|f| f.sync_all());
    assert_eq!(synced.expect_err("nothing reaches the disk").raw_os_error(), Some(libc::EIO));
    disk.heal();
    wait_until(SOON, "it was looked through", || {
        File::options().write(true).open(node.path("file")).is_ok_and(|f| f.sync_all().is_ok())
    });
    // What was written once more is on the disk now, and right.
    drop_pages(node);
    same("file", &fs::read(node.path("file")).expect("read"), &bytes(1, 0, 0, BYTES));
    let ended = node.ebb("umount", &[], &[]);
    assert_eq!(code(&ended), 0, "{}", describe(&ended));
    same(
        "file",
        &fs::read(cluster.backing().join("file")).expect("drained"),
        &bytes(1, 0, 0, BYTES),
    );
}

#[test]
fn an_fsync_on_a_disk_that_fails_says_so() {
    let Some(disk) = faulty() else { return };
    let cluster = one_node("off").caches_below(disk.path()).start();
    let node = cluster.node(0);
    disk.fail();
    write(node, "file", 1);
    // Beside a handle past the daemon there is no other way to open it, and what is lost cannot be
    // brought to that one.
    node.wait_closed();
    let file = File::options().read(true).write(true).open(node.path("file")).expect("open");
    assert_eq!(file.sync_all().expect_err("it failed").raw_os_error(), Some(libc::EIO));
    disk.heal();
    wait_until(SOON, "the daemon gives it up", || {
        node.status()["medium"]["lost_bytes"].as_u64() == Some(BYTES)
    });
    // Who has it open past the daemon reads what the disk gives.
    let past = node.status()["opens"]["passthrough-write"].as_u64().unwrap_or(0) > 0;
    let is_lost = |file: &File| {
        file.read_at(&mut [0; 10], 0).expect_err("lost").raw_os_error() == Some(libc::EIO)
    };
    assert!(past || is_lost(&file));
    drop(file);
    node.wait_closed();
    assert!(is_lost(&File::open(node.path("file")).expect("open")));
    let ended = node.ebb("umount", &[], &[]);
    assert_eq!(code(&ended), 3, "{}", describe(&ended));
    // Its journal knows, too.
    let unmounted = node.ebb("umount", &["--no-drain"], &[]);
    assert_eq!(code(&unmounted), 3, "{}", describe(&unmounted));
    let cache = node.cache().display().to_string();
    let backing = cluster.backing().display().to_string();
    let recovered = cluster.run_ebb(&["recover", "--backing", &backing, &cache]);
    assert_eq!(code(&recovered), 3, "{}", describe(&recovered));
    assert!(!cluster.backing().join("file").exists());
}

#[test]
fn bytes_that_changed_in_the_cache_are_not_flushed() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = one_node("on").start();
    let node = cluster.node(0);
    let mut dice = random::generator(random::seed());
    write(node, "good", 1);
    write(node, "bad", 2);
    let at = rand::Rng::random_range(&mut dice, 0..BYTES);
    flip(&cache_file(node, 2), at);
    let drained = node.ebb("drain", &[], &[]);
    assert_eq!(code(&drained), 3, "{}", describe(&drained));
    assert!(describe(&drained).contains("bad"), "{}", describe(&drained));
    wait_until(SOON, "it was looked through", || {
        node.status()["medium"]["lost_bytes"].as_u64() == Some(BLOCK)
    });
    assert!(!cluster.backing().join("bad").exists());
    same(
        "good",
        &fs::read(cluster.backing().join("good")).expect("drained"),
        &bytes(1, 0, 0, BYTES),
    );
    // Of the rest every byte is there.
    let (file, block) = (File::open(node.path("bad")).expect("open"), at / BLOCK * BLOCK);
    let want = bytes(2, 0, 0, BYTES);
    for from in (0..BYTES).step_by(BLOCK as usize) {
        let mut got = vec![0; BLOCK as usize];
        let read = file.read_exact_at(&mut got, from);
        assert_eq!(read.is_err(), from == block, "block at {from}: {read:?}");
        if from != block {
            same("a block", &got, &want[from as usize..(from + BLOCK) as usize]);
        }
    }
    drop(file);
    // Who writes there again makes it whole.
    let again = File::options().write(true).open(node.path("bad")).expect("open");
    again.write_all_at(&want[block as usize..(block + BLOCK) as usize], block).expect("write");
    drop(again);
    let ended = node.ebb("umount", &[], &[]);
    assert_eq!(code(&ended), 0, "{}", describe(&ended));
    same("bad", &fs::read(cluster.backing().join("bad")).expect("drained"), &want);
}

#[test]
fn bytes_that_changed_in_the_cache_are_not_sent_to_peers() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder()
        .nodes(2)
        .consistency("session")
        .flush("end")
        .option("--io-path", "daemon")
        .option("--request-timeout", "3s")
        .separate_meta()
        .start();
    let (writer, reader) = (cluster.node(0), cluster.node(1));
    write(writer, "file", 1);
    write(writer, "other", 2);
    flip(&cache_file(writer, 1), 700_000);
    let file = File::open(reader.path("file")).expect("open");
    let mut got = vec![0; BYTES as usize];
    let read = file.read_exact_at(&mut got, 0);
    assert_eq!(read.expect_err("no wrong bytes").raw_os_error(), Some(libc::EIO));
    same("other", &fs::read(reader.path("other")).expect("read"), &bytes(2, 0, 0, BYTES));
    assert!(damaged_blocks(writer) > 0 && damaged_blocks(reader) == 0);
}

#[test]
fn a_scrub_finds_what_changed_and_what_the_backing_has_is_fetched_anew() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = one_node("on").start();
    let node = cluster.node(0);
    write(node, "flushed", 1);
    write(node, "fine", 2);
    let drained = node.ebb("drain", &[], &[]);
    assert_eq!(code(&drained), 0, "{}", describe(&drained));
    write(node, "dirty", 3);
    let clean = node.ebb("scrub", &["--json"], &[]);
    assert_eq!(code(&clean), 0, "{}", describe(&clean));
    let found: serde_json::Value = serde_json::from_slice(&clean.stdout).expect("JSON");
    assert_eq!((&found["right_bytes"], &found["damaged_bytes"]), (&(3 * BYTES).into(), &0.into()));
    flip(&cache_file(node, 1), 5);
    let scrubbed = node.ebb("scrub", &["--json"], &[]);
    assert_eq!(code(&scrubbed), 0, "the backing has it: {}", describe(&scrubbed));
    let found: serde_json::Value = serde_json::from_slice(&scrubbed.stdout).expect("JSON");
    assert_eq!((&found["damaged_bytes"], &found["lost_bytes"]), (&BLOCK.into(), &0.into()));
    same("flushed", &fs::read(node.path("flushed")).expect("read"), &bytes(1, 0, 0, BYTES));
    flip(&cache_file(node, 3), BYTES - 1);
    let scrubbed = node.ebb("scrub", &[], &[]);
    assert_eq!(code(&scrubbed), 3, "{}", describe(&scrubbed));
    assert!(describe(&scrubbed).contains("dirty: 4096 bytes"), "{}", describe(&scrubbed));
    let _ = node.ebb("umount", &["--no-drain"], &[]);
}

#[test]
fn a_write_beside_damaged_bytes_does_not_make_them_good() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = one_node("on").start();
    let node = cluster.node(0);
    write(node, "file", 1);
    flip(&cache_file(node, 1), 10 * BLOCK + 100);
    let file = File::options().read(true).write(true).open(node.path("file")).expect("open");
    file.write_all_at(b"new", 10 * BLOCK + 200).expect("write");
    drop(file);
    let ended = node.ebb("umount", &[], &[]);
    assert_eq!(code(&ended), 3, "{}", describe(&ended));
    wait_until(SOON, "it was looked through", || {
        node.status()["medium"]["lost_bytes"].as_u64() == Some(BLOCK - 3)
    });
    let file = File::open(node.path("file")).expect("open");
    let mut got = [0; 3];
    file.read_exact_at(&mut got, 10 * BLOCK + 200).expect("what was written is there");
    assert_eq!(&got, b"new");
    file.read_exact_at(&mut got, 10 * BLOCK + 100).expect_err("lost");
    drop(file);
    let _ = node.ebb("umount", &["--no-drain"], &[]);
}
