//! What can happen to a file while the kernel writes it past the daemon: every way to write, names
//! that go, cuts by others, a cache that is small or full, a daemon that dies.

use ebb_testkit::number;
use ebb_testkit::{Builder, Cluster, Node, mounts};
use ebb_tests::content::same;
use ebb_tests::model::close;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn past(nodes: usize) -> Builder {
    let cluster = Cluster::builder().nodes(nodes).consistency("session");
    cluster.flush("end").option("--io-path", "passthrough")
}

fn opens(node: &Node, way: &str) -> u64 {
    node.status()["opens"][way].as_u64().unwrap_or(0)
}

fn created(path: &Path) -> File {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true).truncate(true).open(path).expect("create")
}

fn put(oracle: &mut Vec<u8>, at: usize, data: &[u8]) {
    oracle.resize(oracle.len().max(at + data.len()), 0);
    oracle[at..at + data.len()].copy_from_slice(data);
}

/// Every node and then the backing show `want`.
fn everywhere(cluster: &Cluster, name: &str, want: &[u8]) {
    for node in cluster.nodes() {
        let shown = std::fs::read(node.path(name)).expect("read");
        same(&format!("{name} on {}", node.name()), &shown, want);
    }
    cluster.nodes().iter().for_each(Node::drain);
    let drained = std::fs::read(cluster.backing().join(name)).expect("read");
    same(&format!("{name} on the backing"), &drained, want);
}

fn seek(file: &File, at: i64, whence: i32) -> i64 {
    // SAFETY: plain numbers.
    unsafe { libc::lseek(file.as_raw_fd(), at, whence) }
}

fn fallocate(file: &File, mode: i32, at: i64, len: i64) {
    // SAFETY: plain numbers.
    let done = unsafe { libc::fallocate(file.as_raw_fd(), mode, at, len) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn every_way_to_write_is_found() {
    let cluster = past(2).start();
    let node = &cluster.nodes()[0];
    let path = node.path("f");
    let mut want = Vec::new();
    let file = created(&path);
    file.write_all_at(b"plain", 10_000).expect("write");
    put(&mut want, 10_000, b"plain");
    let mut end = OpenOptions::new().append(true).open(&path).expect("open");
    end.write_all(b"at the end").expect("append");
    put(&mut want, 10_005, b"at the end");
    let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path);
    let direct = direct.expect("open");
    let mut block = vec![0u8; 8192];
    let aligned = block.as_ptr().align_offset(4096);
    block[aligned..aligned + 4096].fill(4);
    direct.write_all_at(&block[aligned..aligned + 4096], 4096).expect("direct");
    put(&mut want, 4096, &[4; 4096]);
    fallocate(&file, 0, 0, 50_000);
    want.resize(50_000, 0);
    fallocate(&file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 5000, 100);
    put(&mut want, 5000, &[0; 100]);
    assert_eq!(file.metadata().expect("stat").size(), 50_000);
    let other = created(&node.path("other"));
    other.write_all_at(&[6; 9000], 0).expect("write");
    let (mut from, mut to) = (0, 30_000);
    while from < 9000 {
        // SAFETY: the offsets live through the call.
        let n = unsafe {
            let (a, b) = (other.as_raw_fd(), file.as_raw_fd());
            libc::copy_file_range(a, &raw mut from, b, &raw mut to, 9000 - from as usize, 0)
        };
        assert!(n > 0, "{}", std::io::Error::last_os_error());
    }
    put(&mut want, 30_000, &[6; 9000]);
    assert_eq!(opens(node, "passthrough-write"), 4, "{:#}", node.status());
    let data = seek(&file, 20_480, libc::SEEK_DATA);
    assert!((20_480..=30_000).contains(&data), "{data}");
    let hole = seek(&file, 30_000, libc::SEEK_HOLE);
    assert!((39_000..=50_000).contains(&hole), "{hole}");
    for handle in [file, end, direct, other] {
        close(handle).expect("close");
    }
    everywhere(&cluster, "f", &want);
    everywhere(&cluster, "other", &[6; 9000]);
}

#[test]
fn times_that_are_set_stay_and_sizes_are_seen_at_once() {
    let cluster = past(2).start();
    let node = &cluster.nodes()[0];
    let mut file = created(&node.path("f"));
    file.write_all(&[1; 5000]).expect("write");
    assert_eq!(std::fs::metadata(node.path("f")).expect("stat").size(), 5000);
    let old = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    file.set_modified(old).expect("utimens");
    assert_eq!(file.metadata().expect("stat").modified().expect("mtime"), old);
    close(file).expect("close");
    for node in cluster.nodes() {
        let meta = std::fs::metadata(node.path("f")).expect("stat");
        assert_eq!((meta.modified().expect("mtime"), meta.size()), (old, 5000), "{}", node.name());
    }
    node.drain();
    let drained = std::fs::metadata(cluster.backing().join("f")).expect("stat");
    assert_eq!((drained.modified().expect("mtime"), drained.size()), (old, 5000));
}

#[test]
fn names_come_and_go_while_a_file_is_written() {
    let cluster = past(2).start();
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let file = created(&one.path("gone"));
    file.write_all_at(&[1; 7000], 0).expect("write");
    std::fs::remove_file(two.path("gone")).expect("unlink elsewhere");
    file.write_all_at(&[2; 7000], 7000).expect("write on");
    let mut got = vec![0; 14_000];
    file.read_exact_at(&mut got, 0).expect("read");
    assert_eq!((got[6999], got[7000]), (1, 2));
    close(file).expect("close");
    assert!(!one.path("gone").exists());
    // A checkpoint that replaces the one before.
    std::fs::write(one.path("checkpoint"), vec![8; 20_000]).expect("write");
    one.drain();
    let file = created(&one.path("new"));
    file.write_all_at(&[9; 10_000], 0).expect("write");
    std::fs::rename(one.path("new"), one.path("checkpoint")).expect("rename");
    file.write_all_at(&[9; 2000], 10_000).expect("write on");
    close(file).expect("close");
    everywhere(&cluster, "checkpoint", &[9; 12_000]);
    let names = std::fs::read_dir(cluster.backing()).expect("list").count();
    assert_eq!(names, 1, "the checkpoint alone");
}

/// A cut by another node is seen at the next open, and what was written before it does not come
/// back.
#[test]
fn another_node_cuts_the_file_in_between() {
    let cluster = past(2).start();
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let file = created(&one.path("f"));
    file.write_all_at(&[1; 30_000], 0).expect("write");
    let again = OpenOptions::new().write(true).open(one.path("f")).expect("open");
    close(again).expect("close publishes");
    let cutter = OpenOptions::new().write(true).open(two.path("f")).expect("open");
    cutter.set_len(9000).expect("cut");
    cutter.set_len(40_000).expect("grow");
    close(cutter).expect("close");
    let mut want = vec![1; 9000];
    want.resize(40_000, 0);
    let reader = File::open(one.path("f")).expect("open asks");
    let mut got = Vec::new();
    (&reader).read_to_end(&mut got).expect("read");
    same("after the cut", &got, &want);
    file.write_all_at(&[3; 10], 35_000).expect("write");
    put(&mut want, 35_000, &[3; 10]);
    close(file).expect("close");
    everywhere(&cluster, "f", &want);
}

/// Other files push clean bytes out of a small buffer, but not from under the kernel.
#[test]
fn files_read_past_the_daemon_are_not_given_up() {
    let cluster = past(1).option("--cache-size", "4MiB").start();
    let node = &cluster.nodes()[0];
    let content: Vec<u8> = (0..1u32 << 18).flat_map(u32::to_le_bytes).collect();
    std::fs::write(node.path("f"), &content).expect("write");
    node.drain();
    let reader = File::open(node.path("f")).expect("open");
    assert_eq!(opens(node, "passthrough-read"), 1, "{:#}", node.status());
    for i in 0..12 {
        std::fs::write(node.path(format!("other{i}")), vec![i; 1 << 20]).expect("write");
    }
    let mut got = vec![0; content.len()];
    reader.read_exact_at(&mut got, 0).expect("read");
    same("under pressure", &got, &content);
    assert!(opens(node, "daemon:cache-size") > 0, "{:#}", node.status());
    close(reader).expect("close");
    for i in 0..12 {
        let got = std::fs::read(node.path(format!("other{i}"))).expect("read");
        same(&format!("other{i}"), &got, &vec![i; 1 << 20]);
    }
    everywhere(&cluster, "f", &content);
}

/// A small tmpfs for the cache.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "ebb-test"]).arg(dir.path());
        if mount.status().is_ok_and(|s| s.success()) {
            return Some(SmallDisk(dir));
        }
        println!("SKIPPED: only root may mount a tmpfs");
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        assert!(mounts::clear(self.0.path()) || std::thread::panicking(), "tmpfs stays");
    }
}

/// Half of the buffer is never open past the daemon for reading: it can be given up.
#[test]
fn what_is_read_past_the_daemon_leaves_room() {
    let cluster = past(1).option("--cache-size", "4MiB").start();
    let node = &cluster.nodes()[0];
    let content = |i: u8| vec![i + 1; 700 << 10];
    for i in 0..4 {
        std::fs::write(node.path(format!("f{i}")), content(i)).expect("write");
    }
    node.drain();
    let readers: Vec<File> =
        (0..4).map(|i| File::open(node.path(format!("f{i}"))).expect("open")).collect();
    assert_eq!(opens(node, "passthrough-read"), 2, "{:#}", node.status());
    assert_eq!(opens(node, "daemon:buffer-pinned"), 2, "{:#}", node.status());
    let large: Vec<u8> = (0..3u32 << 20).flat_map(u32::to_le_bytes).collect();
    std::fs::write(node.path("large"), &large).expect("a writer is slowed, not failed");
    for (i, reader) in readers.into_iter().enumerate() {
        let mut got = vec![0; 700 << 10];
        reader.read_exact_at(&mut got, 0).expect("read");
        same(&format!("f{i}"), &got, &content(i as u8));
        close(reader).expect("close");
    }
    // What was kept is given back with the last handle.
    let began = Instant::now();
    while opens(node, "passthrough-read") == 2 {
        assert!(began.elapsed() < Duration::from_secs(30), "{:#}", node.status());
        assert!(std::fs::read(node.path("f0")).expect("read") == content(0));
    }
    everywhere(&cluster, "large", &large);
}

/// Bytes that the buffer may be larger than it should: to the end of its disk.
const DISK: u64 = 64 << 20;

/// A buffer on a small disk, with this limit.
fn on_small_disk(disk: &SmallDisk, backing: &Path, options: &[(&str, &str)]) -> Cluster {
    let builder = past(1).below(disk.0.path()).backing(backing);
    options.iter().fold(builder, |b, (name, value)| b.option(name, value)).start()
}

/// Nothing but the disk stops a writer past the daemon: it is one only where the disk ends at most
/// a quarter beyond the limit, and the limit is exceeded by no more than that.
#[test]
fn the_limit_is_exceeded_by_a_quarter_at_most() {
    for (limit, passed) in [("48MiB", 0), ("52MiB", 1)] {
        let Some(disk) = SmallDisk::new("64m") else { return };
        let backing = tempfile::tempdir().expect("tempdir");
        let cluster = on_small_disk(&disk, backing.path(), &[("--cache-size", limit)]);
        let node = &cluster.nodes()[0];
        let file = OpenOptions::new().write(true).create_new(true).open(node.path("large"));
        let mut file = file.expect("create");
        assert_eq!(opens(node, "passthrough-write"), passed, "{limit}: {:#}", node.status());
        assert_eq!(opens(node, "daemon:cache-size"), 1 - passed, "{limit}: {:#}", node.status());
        let mut want = Vec::new();
        while want.len() < 2 * DISK as usize {
            let block = vec![(want.len() >> 18) as u8 | 1; 1 << 18];
            match file.write(&block) {
                Ok(n) => want.extend_from_slice(&block[..n]),
                Err(e) => {
                    assert_eq!((e.raw_os_error(), passed), (Some(libc::ENOSPC), 1), "{limit}: {e}");
                    break;
                }
            }
            let most = if passed == 1 { DISK } else { (48 + 4) << 20 };
            if want.len() % (8 << 20) == 0 {
                assert!(number(&node.status(), "cache_bytes") <= most, "{:#}", node.status());
            }
        }
        assert_eq!(want.len() as u64 >= 2 * DISK, passed == 0, "{limit}: {} bytes", want.len());
        close(file).expect("close");
        everywhere(&cluster, "large", &want);
    }
}

/// What is in the buffer and on the backing gives way to a writer past the daemon.
#[test]
fn room_is_made_for_writers_past_the_daemon() {
    let Some(disk) = SmallDisk::new("64m") else { return };
    let backing = tempfile::tempdir().expect("tempdir");
    let cluster = on_small_disk(&disk, backing.path(), &[("--flush", "immediate")]);
    let node = &cluster.nodes()[0];
    let old: Vec<u8> = (0..7u32 << 20).flat_map(u32::to_le_bytes).collect();
    std::fs::write(node.path("old"), &old).expect("write");
    node.drain();
    let mut file =
        OpenOptions::new().write(true).create_new(true).open(node.path("new")).expect("create");
    assert_eq!(opens(node, "passthrough-write"), 2, "{:#}", node.status());
    let evicted = || node.status()["ledger"]["evicted_bytes"].as_u64().expect("a number");
    let new = vec![9; 44 << 20];
    let (first, rest) = new.split_at(26 << 20);
    file.write_all(first).expect("28 and 26 MiB are more than there should be");
    let began = Instant::now();
    while evicted() < 10 << 20 {
        assert!(began.elapsed() < Duration::from_secs(30), "{:#}", node.status());
        std::thread::sleep(Duration::from_millis(20));
    }
    file.write_all(rest).expect("28 and 44 MiB are too much for the disk together");
    close(file).expect("close");
    everywhere(&cluster, "new", &new);
    everywhere(&cluster, "old", &old);
}

/// The disk of the cache gets full under a writer past the daemon: it hears ENOSPC as from the disk
/// itself, what it wrote before is whole, and others go through the daemon.
#[test]
fn a_full_cache_is_told_to_the_writer() {
    let Some(disk) = SmallDisk::new("32m") else { return };
    let backing = tempfile::tempdir().expect("tempdir");
    let cluster = past(1).below(disk.0.path()).backing(backing.path()).start();
    let node = &cluster.nodes()[0];
    let mut file = created(&node.path("large"));
    let mut want = Vec::new();
    let refused = loop {
        let block = vec![want.len() as u8 ^ (want.len() >> 20) as u8 | 1; 1 << 20];
        match file.write(&block) {
            Ok(n) => want.extend_from_slice(&block[..n]),
            Err(e) => break e,
        }
        assert!(want.len() < 64 << 20, "never full");
    };
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{refused}");
    assert!(want.len() > 16 << 20);
    assert_eq!(opens(node, "passthrough-write"), 1);
    let small = OpenOptions::new().write(true).create_new(true).open(node.path("small"));
    let small = small.expect("create");
    assert_eq!(opens(node, "daemon:buffer-nearly-full"), 1, "{:#}", node.status());
    close(file).expect("close");
    // Room is made of what is closed.
    small.write_all_at(&[5; 3 << 20], 0).expect("write");
    close(small).expect("close");
    everywhere(&cluster, "small", &[5; 3 << 20]);
    everywhere(&cluster, "large", &want);
}

/// What another node wrote does not fit beside an open file: whoever opens it once more hears so, and
/// does not wait for ever.
#[test]
fn an_open_for_which_the_disk_has_no_room_fails() {
    let Some(disk) = SmallDisk::new("64m") else { return };
    let backing = tempfile::tempdir().expect("tempdir");
    let cluster = past(2).below(disk.0.path()).backing(backing.path()).start();
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let file = created(&one.path("f"));
    file.write_all_at(&[1; 4096], 0).expect("write");
    let mut want = vec![2; 40 << 20];
    want[..4096].fill(1);
    let theirs = OpenOptions::new().write(true).open(two.path("f")).expect("open");
    theirs.write_all_at(&want[4096..], 4096).expect("40 of 64 MiB are free");
    close(theirs).expect("close");
    let began = Instant::now();
    let refused = File::open(one.path("f")).expect_err("24 MiB are left for 40");
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{refused}");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    // The one that was open before goes on.
    file.write_all_at(&[3; 100], 0).expect("write");
    want[..100].fill(3);
    close(file).expect("close");
    two.drain();
    one.drain();
    let drained = std::fs::read(cluster.backing().join("f")).expect("read");
    same("f on the backing", &drained, &want);
}

/// What was written past a daemon that died before anything was published may be lost; it breaks
/// nothing, and a program that lives on does not write into files of the next daemon.
#[test]
fn a_program_outlives_its_daemon() {
    let cluster = past(2).separate_meta().start();
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let published = created(&one.path("published"));
    published.write_all_at(&[1; 50_000], 0).expect("write");
    close(published.try_clone().expect("dup")).expect("close publishes");
    let old = created(&one.path("f"));
    old.write_all_at(&[2; 20_000], 0).expect("write");
    one.kill9();
    let _ = old.write_all_at(&[3; 20_000], 20_000);
    let unmounted = Command::new("umount").arg("-l").arg(one.mountpoint()).status();
    assert!(unmounted.expect("umount").success());
    one.mount();
    let file = created(&one.path("f"));
    file.write_all_at(&[4; 10], 100).expect("write");
    // The program of before, on descriptors of before.
    let _ = old.write_all_at(&[5; 30_000], 0);
    let _ = published.write_all_at(&[6; 100], 0);
    let mut want = vec![0; 100];
    put(&mut want, 100, &[4; 10]);
    close(file).expect("close");
    assert!(close(old).is_err(), "it is told");
    everywhere(&cluster, "f", &want);
    everywhere(&cluster, "published", &[1; 50_000]);
    assert_eq!(number(&two.status(), "dirty_bytes"), 0);
}
