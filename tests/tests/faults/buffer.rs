//! Files that together, or alone, are larger than the buffer: they arrive intact, writers are
//! slowed and not failed, and what another node is reading is not pulled away.
//!
//! `EBB_BUFFER_MIB` (default 16) is the buffer's size; the large file is 16 times as large. The
//! full figures are `EBB_BUFFER_MIB=64 EBB_BUFFER_FILES=20000`.

use ebb_testkit::cluster::number;
use ebb_testkit::{Cluster, skip_reason};
use ebb_tests::tools::amount;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB: usize = 1 << 20;

fn buffer_mib() -> usize {
    amount("EBB_BUFFER_MIB", 16) as usize
}

fn cluster(nodes: usize, options: &[(&str, &str)]) -> Cluster {
    let size = format!("{}MiB", buffer_mib());
    let builder = Cluster::builder().nodes(nodes).option("--cache-size", &size);
    options.iter().fold(builder, |b, (name, value)| b.option(name, value)).start()
}

/// The bytes of block `index` of a file: every 8 bytes tell file, block and place.
fn block(file: u64, index: usize, len: usize) -> Vec<u8> {
    let word = |i: usize| (file << 48 | (index as u64) << 24 | i as u64).to_le_bytes();
    (0..len.div_ceil(8)).flat_map(word).take(len).collect()
}

fn write_large(path: &Path, file: u64, mib: usize) {
    let mut f = File::create(path).expect("create");
    for index in 0..mib {
        f.write_all(&block(file, index, MIB)).expect("a writer is slowed, not failed");
    }
}

fn check_large(path: &Path, file: u64, mib: usize) {
    let mut f = File::open(path).expect("open");
    let mut got = vec![0; MIB];
    for index in 0..mib {
        f.read_exact(&mut got).expect("read");
        assert!(got == block(file, index, MIB), "{}: MiB {index} differs", path.display());
    }
    assert_eq!(f.read(&mut got).expect("read"), 0, "longer than it was written");
}

/// No more than what writers that come at the same time may bring at once.
fn assert_bounded(cluster: &Cluster, node: usize) {
    let status = cluster.node(node).status();
    let bound = ((buffer_mib() + 4) * MIB) as u64;
    assert!(number(&status, "cache_bytes") <= bound, "{status:#}");
}

fn a_large_file_goes_through(options: &[(&str, &str)]) {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    let mib = 16 * buffer_mib();
    let cluster = cluster(1, options);
    let node = cluster.node(0);
    write_large(&node.path("large"), 1, mib);
    assert_bounded(&cluster, 0);
    check_large(&node.path("large"), 1, mib);
    assert_bounded(&cluster, 0);
    let status = node.status();
    let passed = status["opens"]["passthrough-write"].as_u64();
    assert_eq!(passed, None, "nothing would stop the kernel: {status:#}");
    let evicted = status["ledger"]["evicted_bytes"].as_u64().expect("a number");
    assert!(evicted >= ((mib - buffer_mib()) * MIB) as u64, "{status:#}");
    assert_eq!(status["ledger"]["skipped_bytes"], 0, "{status:#}");
    cluster.umount_all();
    check_large(&cluster.backing().join("large"), 1, mib);
}

#[test]
fn a_file_larger_than_the_buffer_arrives_intact() {
    a_large_file_goes_through(&[]);
}

#[test]
fn so_it_does_without_background_flushing_and_in_posix() {
    a_large_file_goes_through(&[
        ("--flush", "end"),
        ("--consistency", "posix"),
        ("--evict", "mru"),
    ]);
}

#[test]
fn so_it_does_when_it_is_rewritten_at_random_places() {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    let mib = 4 * buffer_mib();
    let cluster = cluster(1, &[("--evict", "lfu"), ("--flush", "immediate")]);
    let node = cluster.node(0);
    write_large(&node.path("f"), 1, mib);
    let f = File::options().read(true).write(true).open(node.path("f")).expect("open");
    let mut newest = vec![1; mib];
    let mut at = 0;
    for round in 2..4u64 {
        for _ in 0..mib {
            // A walk that comes everywhere sooner or later, in no order that a cache would like.
            at = (at * 5 + 3) % mib;
            f.write_all_at(&block(round, at, MIB), (at * MIB) as u64).expect("write");
            newest[at] = round;
            let back = (at * 7 + 1) % mib;
            let mut got = vec![0; MIB];
            f.read_exact_at(&mut got, (back * MIB) as u64).expect("read");
            assert!(got == block(newest[back], back, MIB), "MiB {back}");
        }
    }
    drop(f);
    cluster.umount_all();
    let kept = fs::read(cluster.backing().join("f")).expect("read");
    for (index, got) in kept.chunks(MIB).enumerate() {
        assert!(got == block(newest[index], index, MIB), "MiB {index} on the backing");
    }
}

#[test]
fn many_small_files_go_through_a_small_buffer() {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    let files = amount("EBB_BUFFER_FILES", 3000) as usize;
    // Together at least four times the buffer.
    let mean = (4 * buffer_mib() * MIB / files).max(1024);
    let size = |i: usize| (i * 7919) % (2 * mean);
    let cluster = cluster(1, &[("--evict", "fifo")]);
    let node = cluster.node(0);
    for dir in 0..files.div_ceil(500) {
        fs::create_dir(node.path(format!("d{dir}"))).expect("mkdir");
    }
    let name = |i: usize| format!("d{}/f{i}", i / 500);
    std::thread::scope(|scope| {
        for half in 0..2 {
            let node = &node;
            scope.spawn(move || {
                for i in (half..files).step_by(2) {
                    let bytes = block(i as u64, 0, size(i));
                    fs::write(node.path(name(i)), bytes).expect("a writer is slowed, not failed");
                }
            });
        }
    });
    assert_bounded(&cluster, 0);
    let check = |root: &Path| {
        for i in 0..files {
            let got = fs::read(root.join(name(i))).expect("read");
            assert!(got == block(i as u64, 0, size(i)), "{}", name(i));
        }
    };
    check(node.mountpoint());
    assert_bounded(&cluster, 0);
    cluster.umount_all();
    check(cluster.backing());
}

#[test]
fn what_another_node_reads_is_whole_while_room_is_made_here() {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    let cluster = cluster(2, &[]);
    let (owner, reader) = (cluster.node(0), cluster.node(1));
    let shared = buffer_mib() / 2;
    write_large(&owner.path("shared"), 7, shared);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut reads = 0;
            while !is_over.load(Ordering::Relaxed) || reads == 0 {
                check_large(&reader.path("shared"), 7, shared);
                reads += 1;
            }
        });
        for round in 0..4 {
            write_large(&owner.path("other"), 10 + round, 2 * buffer_mib());
        }
        is_over.store(true, Ordering::Relaxed);
        reading.join().expect("the reader saw wrong bytes");
    });
    check_large(&reader.path("other"), 13, 2 * buffer_mib());
    cluster.umount_all();
    check_large(&cluster.backing().join("shared"), 7, shared);
}

/// Ends the writers also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A file has its name there after an fsync, also one of which nobody has a byte.
#[test]
fn an_fsync_to_the_backing_brings_a_file_without_a_byte() {
    for (model, io_path) in [("posix", "daemon"), ("posix", "auto"), ("commit", "auto")] {
        if let Some(why) = skip_reason() {
            return println!("SKIPPED: {why}");
        }
        let builder = Cluster::builder().consistency(model).flush("end");
        let builder = builder.option("--durability", "backing").option("--io-path", io_path);
        let cluster = builder.start();
        let node = cluster.node(0);
        std::fs::create_dir(node.path("d")).expect("mkdir");
        type Change = fn(&File) -> std::io::Result<()>;
        let files: [(&str, u64, Change); 4] = [
            ("empty", 0, |_| Ok(())),
            ("d/empty", 0, |_| Ok(())),
            ("zeros", 100, |file| file.set_len(100)),
            ("cut", 1000, |file| file.write_all_at(&[1; 45], 5000).and(file.set_len(1000))),
        ];
        for (name, len, change) in files {
            let file = File::create(node.path(name)).expect("create");
            change(&file).and(file.sync_all()).expect("fsync");
            let there = std::fs::read(cluster.backing().join(name));
            assert_eq!(there.ok(), Some(vec![0; len as usize]), "{model} {io_path}: {name}");
        }
        let gone = File::create(node.path("gone")).expect("create");
        std::fs::remove_file(node.path("gone")).expect("unlink");
        gone.sync_all().expect("fsync of what has no name");
        assert!(!cluster.backing().join("gone").exists());
    }
}

/// What was written before an fsync is on the backing after it, also while others write on: the
/// fsync does not wait for theirs, and does not fail because of them.
#[test]
fn an_fsync_to_the_backing_beside_a_writer_brings_what_was_written_before_it() {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    let builder = Cluster::builder().consistency("commit").flush("end");
    let cluster = builder.option("--durability", "backing").start();
    let path = cluster.node(0).path("f");
    let file = File::create(&path).expect("create");
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        for writer in 1..3u64 {
            let (file, done) = (&file, &done);
            s.spawn(move || {
                let mut round = 0u8;
                while !done.load(Ordering::Acquire) {
                    round = round.wrapping_add(1);
                    for at in 0..64 {
                        let at = writer * MIB as u64 + at * 4096;
                        file.write_all_at(&[round; 4000], at).expect("write");
                    }
                }
            });
        }
        let _stop = Stop(&done);
        for round in 0..200u64 {
            let mine = block(round, 0, 3000);
            file.write_all_at(&mine, 5 + round * 4001).expect("write");
            file.sync_all().unwrap_or_else(|e| panic!("fsync {round}: {e}"));
            let there = File::open(cluster.backing().join("f")).expect("it has its name");
            let mut got = vec![0; mine.len()];
            there.read_exact_at(&mut got, 5 + round * 4001).expect("read");
            assert!(got == mine, "round {round} is not on the backing");
        }
    });
    drop(file);
    cluster.umount_all();
}
