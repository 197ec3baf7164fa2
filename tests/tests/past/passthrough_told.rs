//! Files with content that are written past the daemon, which the kernel tells what was written: exact
//! on every node and on the backing, and no more is published or flushed than was written; what is
//! not told is found. Where the kernel cannot tell, these say SKIPPED (EBB_REQUIRE_TRACKER=1: fail).
//!
//! EBB_SEED: only this seed. EBB_STEPS: steps of the random programs.

use ebb_testkit::number;
use ebb_testkit::{Builder, Cluster, Node};
use ebb_tests::content::same;
use ebb_tests::model::close;
use ebb_tests::nodes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::Signal;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn past(model: &str, nodes: usize, tracker: &str) -> Builder {
    let cluster = Cluster::builder().nodes(nodes).consistency(model).flush("end");
    cluster.option("--io-path", "passthrough").option("--tracker", tracker)
}

/// Nodes that the kernel tells; or a word why not.
fn told(model: &str, nodes: usize) -> Option<Cluster> {
    nodes::told(past(model, nodes, "auto").separate_meta().start())
}

fn opens(node: &Node, way: &str) -> u64 {
    node.status()["opens"][way].as_u64().unwrap_or(0)
}

/// How writes of the one open file are found out.
fn writes(node: &Node) -> String {
    let status = node.status();
    let writes = status["io_paths"][0]["writes"].as_str();
    writes.unwrap_or_else(|| panic!("no open file: {status:#}")).to_owned()
}

fn write_only(path: &Path) -> File {
    OpenOptions::new().write(true).open(path).expect("open")
}

fn rw(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("open")
}

fn put(oracle: &mut Vec<u8>, at: u64, data: &[u8]) {
    let end = at as usize + data.len();
    oracle.resize(oracle.len().max(end), 0);
    oracle[at as usize..end].copy_from_slice(data);
}

fn write(file: &File, oracle: &mut Vec<u8>, at: u64, data: &[u8]) {
    file.write_all_at(data, at).expect("write");
    put(oracle, at, data);
}

/// Stores through a shared mapping.
fn store_mapped(file: &File, oracle: &mut [u8], at: usize, data: &[u8]) {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let (len, how) = (oracle.len(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: the mapping is as long as the file, which nobody cuts meanwhile, and goes at the end.
    unsafe {
        let map = mmap(std::ptr::null_mut(), len, how, MapFlags::SHARED, file, 0).expect("mmap");
        std::ptr::copy_nonoverlapping(data.as_ptr(), map.cast::<u8>().add(at), data.len());
        munmap(map, len).expect("munmap");
    }
    oracle[at..at + data.len()].copy_from_slice(data);
}

/// Every node and then the backing show `want`.
fn everywhere(cluster: &Cluster, want: &[u8]) {
    for node in cluster.nodes() {
        let shown = std::fs::read(node.path("f")).expect("read");
        same(&format!("on {}", node.name()), &shown, want);
    }
    cluster.nodes().iter().for_each(Node::drain);
    let drained = std::fs::read(cluster.backing().join("f")).expect("read");
    same("on the backing", &drained, want);
}

fn content(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 7) as u8 ^ seed).collect()
}

/// Own bytes that are on the backing already are written again: what goes there are these bytes, not
/// the file.
#[test]
fn a_file_is_rewritten_and_only_what_was_written_is_flushed() {
    let Some(cluster) = told("session", 2) else { return };
    let one = cluster.node(0);
    let mut want = content(1, 1 << 20);
    std::fs::write(one.path("f"), &want).expect("write");
    one.drain();
    let before = number(&one.status(), "flushed_bytes");
    let file = write_only(&one.path("f"));
    for at in [0, 5000, 70_001, 900_000] {
        write(&file, &mut want, at, &content(9, 333));
    }
    assert_eq!((opens(one, "passthrough-write"), writes(one).as_str()), (2, "told"));
    close(file).expect("close");
    assert_eq!(number(&one.status(), "dirty_bytes"), 4 * 333);
    everywhere(&cluster, &want);
    let flushed = number(&one.status(), "flushed_bytes") - before;
    assert_eq!(flushed, 4 * 333);
    assert_eq!(number(&one.status(), "tracker_losses"), 0);
}

/// The same without: the way is the daemon's, and why is told.
#[test]
fn without_a_tracker_files_with_content_are_the_daemons() {
    let cluster = past("session", 1, "off").start();
    let node = cluster.node(0);
    assert_eq!(node.status()["tracker"], "switched off");
    std::fs::write(node.path("f"), content(1, 10_000)).expect("write");
    node.wait_closed();
    let file = write_only(&node.path("f"));
    assert_eq!(opens(node, "daemon:not-empty"), 1);
    close(file).expect("close");
    let fresh = rw_new(&node.path("g"));
    assert_eq!(writes(node), "looked-for");
    close(fresh).expect("close");
}

fn rw_new(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("create")
}

/// Bytes of the backing and of another node, read here before; and other nodes' bytes of the same
/// blocks stay what they are.
#[test]
fn others_bytes_are_rewritten_by_the_byte() {
    let mut want = content(1, 50_000);
    let Some(cluster) = told("session", 2) else { return };
    std::fs::write(cluster.backing().join("f"), &want).expect("write");
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    for node in [one, two] {
        same("first", &std::fs::read(node.path("f")).expect("read"), &want);
    }
    let (ours, theirs) = (write_only(&one.path("f")), rw(&two.path("f")));
    // Neighbours in one block, zeros among them, and a hole behind the end.
    for k in 0..40 {
        write(&ours, &mut want, 1000 * k, &[0; 17]);
        write(&theirs, &mut want, 1000 * k + 17, &[k as u8; 5]);
    }
    write(&theirs, &mut want, 60_000, b"far");
    assert_eq!((writes(one).as_str(), writes(two).as_str()), ("told", "told"));
    close(ours).expect("close");
    close(theirs).expect("close");
    everywhere(&cluster, &want);
}

/// Readers have it open past the daemon when a writer comes: both go past it.
#[test]
fn a_writer_beside_readers_goes_past_the_daemon() {
    let Some(cluster) = told("session", 2) else { return };
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let mut want = content(3, 50_000);
    std::fs::write(one.path("f"), &want).expect("write");
    same("fetched", &std::fs::read(two.path("f")).expect("read"), &want);
    let reader = reader_past(two);
    let writer = rw(&two.path("f"));
    assert_eq!(opens(two, "passthrough-write"), 1);
    write(&writer, &mut want, 4093, b"beside");
    let mut got = vec![0; want.len()];
    reader.read_exact_at(&mut got, 0).expect("read");
    same("the reader", &got, &want);
    close(writer).expect("close");
    same("published", &std::fs::read(one.path("f")).expect("read"), &want);
    close(reader).expect("close");
    everywhere(&cluster, &want);
}

/// The handle that fetched the file goes through the daemon, and so does who opens it before that one
/// is gone.
fn reader_past(node: &Node) -> File {
    for _ in 0..100 {
        let before = opens(node, "passthrough-read");
        let reader = File::open(node.path("f")).expect("open");
        if opens(node, "passthrough-read") > before {
            return reader;
        }
        drop(reader);
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("never past the daemon: {:#}", node.status())
}

/// Stores through mappings and direct writes are not told; they are found all the same, in own
/// bytes, others' bytes and new ones.
#[test]
fn mappings_and_direct_writes_are_looked_for() {
    let Some(cluster) = told("session", 2) else { return };
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let mut want = content(5, 100_000);
    std::fs::write(one.path("f"), &want).expect("write");
    for node in [one, two] {
        same("before", &std::fs::read(node.path("f")).expect("read"), &want);
        let file = rw(&node.path("f"));
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).expect("read");
        write(&file, &mut want, 100, b"told");
        assert_eq!(writes(node), "told", "reading is no reason to look");
        store_mapped(&file, &mut want, 50_000, b"stored");
        write(&file, &mut want, 99_000, &[7; 3000]);
        close(file).expect("close");
        everywhere(&cluster, &want);
        assert_eq!(number(&node.status(), "tracker_losses"), 1);
        let mut how = OpenOptions::new();
        let direct = how.write(true).custom_flags(libc::O_DIRECT).open(node.path("f"));
        let direct = direct.expect("open");
        write_directly(&direct, &mut want, 8192);
        close(direct).expect("close");
        everywhere(&cluster, &want);
        assert_eq!(number(&node.status(), "tracker_losses"), 2, "{}", node.name());
    }
}

fn write_directly(file: &File, oracle: &mut Vec<u8>, at: u64) {
    let bytes = vec![0xd1; 8192];
    let skip = bytes.as_ptr().align_offset(4096);
    write(file, oracle, at, &bytes[skip..skip + 4096]);
}

/// More writes than the ring holds while the daemon is stopped: what was lost is found. The writer is
/// a process of its own, which writes byte by byte what comes through a pipe.
#[test]
fn lost_events_are_looked_for() {
    let Some(cluster) = told("session", 2) else { return };
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let mut want = content(5, 1 << 20);
    std::fs::write(two.path("f"), &want).expect("write");
    same("others' bytes", &std::fs::read(one.path("f")).expect("read"), &want);
    let mut writer = Command::new("dd");
    writer.arg(format!("of={}", one.path("f").display())).args(["bs=1", "conv=notrunc"]);
    writer.args(["seek=1000", "status=none"]).stdin(Stdio::piped());
    let mut writer = writer.spawn().expect("dd");
    let mut pipe = writer.stdin.take().expect("a pipe");
    // The first write of an inode asks the daemon for its capabilities.
    pipe.write_all(&[1]).expect("pipe");
    one.wait_status(Duration::from_secs(10), |s| s["opens"]["passthrough-write"] == 1);
    std::thread::sleep(Duration::from_millis(200));
    one.signal(Signal::STOP);
    let new: Vec<u8> = want[1001..].iter().take(320_000).map(|b| b.wrapping_add(1)).collect();
    let fed = std::thread::spawn({
        let new = new.clone();
        move || pipe.write_all(&new)
    });
    // What a pipe holds may be left to write.
    let limit = Instant::now() + Duration::from_secs(20);
    while !fed.is_finished() && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(20));
    }
    let finished = fed.is_finished();
    one.signal(Signal::CONT);
    assert!(finished, "writes past the daemon waited for it");
    fed.join().expect("no panic").expect("pipe");
    assert!(writer.wait().expect("dd").success());
    put(&mut want, 1000, &[&[1], &new[..]].concat());
    same("published", &std::fs::read(two.path("f")).expect("read"), &want);
    assert!(number(&one.status(), "tracker_losses") >= 1);
    everywhere(&cluster, &want);
    // It goes on after that.
    let file = write_only(&one.path("f"));
    write(&file, &mut want, 12_345, b"told again");
    close(file).expect("close");
    assert_eq!(number(&one.status(), "dirty_bytes"), 10);
    everywhere(&cluster, &want);
}

/// Writes that are told are activity: the flusher waits for their end.
#[test]
fn the_flusher_waits_while_writes_are_told() {
    let Some(cluster) = told("session", 1) else { return };
    drop(cluster);
    let cluster = Cluster::builder().consistency("session").flush("idle");
    let cluster = cluster.option("--io-path", "passthrough").option("--tracker", "on").start();
    let node = cluster.node(0);
    std::fs::write(node.path("busy"), content(1, 10_000)).expect("write");
    let busy = write_only(&node.path("busy"));
    assert_eq!(writes(node), "told");
    std::fs::write(node.path("waits"), content(2, 10_000)).expect("write");
    // No more than a tenth of a second between two writes, and nothing else: 1 s counts as idle.
    let began = Instant::now();
    let mut longest = Duration::ZERO;
    while began.elapsed() < Duration::from_secs(4) {
        let last = Instant::now();
        busy.write_all_at(b"busy", 5000).expect("write");
        std::thread::sleep(Duration::from_millis(20));
        longest = longest.max(last.elapsed());
    }
    let flushed = cluster.backing().join("waits").exists();
    assert!(!flushed || longest > Duration::from_millis(800), "flushed beside a writer");
    close(busy).expect("close");
    let limit = Instant::now() + Duration::from_secs(30);
    while !cluster.backing().join("waits").exists() {
        assert!(Instant::now() < limit, "never flushed");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What was synced over content is there after the daemon died.
#[test]
fn synced_bytes_over_content_survive_a_killed_daemon() {
    let Some(cluster) = told("session", 2) else { return };
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let mut want = content(5, 100_000);
    std::fs::write(two.path("f"), &want).expect("write");
    two.drain();
    same("others' bytes", &std::fs::read(one.path("f")).expect("read"), &want);
    let file = write_only(&one.path("f"));
    write(&file, &mut want, 5000, &[0; 100]);
    write(&file, &mut want, 90_000, &[1; 5000]);
    file.sync_all().expect("sync");
    assert_eq!(opens(one, "passthrough-write"), 1);
    one.kill9();
    drop(file);
    let _ = one.ebb("umount", &[], &[]);
    one.mount();
    close(write_only(&one.path("f"))).expect("what came back is published by a close");
    everywhere(&cluster, &want);
}

/// Nodes take turns at one file with content, each closing before the next one opens it, with
/// everything that an open file can be used for.
#[test]
fn nodes_rewrite_a_file_in_turn() {
    let seed = std::env::var("EBB_SEED").ok().and_then(|s| s.parse().ok());
    let seeds = seed.map_or(vec![1, 2, rand::random()], |s| vec![s]);
    for seed in seeds {
        for model in ["session", "mpiio"] {
            turns(model, seed);
        }
    }
}

fn turns(model: &str, seed: u64) {
    let steps = std::env::var("EBB_STEPS").ok().and_then(|s| s.parse().ok()).unwrap_or(60);
    let Some(cluster) = told(model, 3) else { return };
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut want = content(seed as u8, 30_000);
    std::fs::write(cluster.backing().join("f"), &want).expect("write");
    for step in 0..steps {
        let node = cluster.node(random.random_range(0..3));
        let what = format!("EBB_SEED={seed}, {model}, step {step}, {}", node.name());
        let shown = std::fs::read(node.path("f")).expect("read");
        same(&what, &shown, &want);
        let reads = random.random_bool(0.5);
        let file = OpenOptions::new().read(reads).write(true).open(node.path("f")).expect("open");
        for _ in 0..random.random_range(1..6) {
            change(&file, reads, &mut want, &mut random);
            if random.random_ratio(1, 8) {
                file.sync_all().expect("sync");
            }
        }
        close(file).expect("close");
        if random.random_ratio(1, 10) {
            node.drain();
        }
    }
    everywhere(&cluster, &want);
    let ways: Vec<_> = cluster.nodes().iter().map(|n| n.status()["opens"].clone()).collect();
    let passed: u64 = cluster.nodes().iter().map(|n| opens(n, "passthrough-write")).sum();
    // Under mpiio only where no other node still counts as having it open.
    assert!(passed > steps / 2, "{passed} of {steps} were passed through: {ways:?}");
}

fn change(file: &File, reads: bool, want: &mut Vec<u8>, random: &mut ChaCha8Rng) {
    let at = random.random_range(0..40_000);
    let most = if random.random_ratio(1, 4) { 9000 } else { 40 };
    let len = random.random_range(1..most);
    let data = vec![if random.random_ratio(1, 3) { 0 } else { random.random() }; len];
    match random.random_range(0..20) {
        0 => {
            file.set_len(at).expect("truncate");
            want.resize(at as usize, 0);
        }
        1 if reads && at as usize + len <= want.len() => {
            store_mapped(file, want, at as usize, &data);
        }
        _ => write(file, want, at, &data),
    }
}
