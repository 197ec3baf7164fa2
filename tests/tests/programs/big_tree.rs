//! Many small files: made in nested directories, listed, drained, compared, removed; and what one
//! costs the daemon in memory.
//!
//! EBB_TREE_FILES: how many.

use ebb_testkit::Cluster;
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::{self, shell, wait_until};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const FILES: u64 = 4_000;
const PER_DIRECTORY: u64 = 250;
const THREADS: u64 = 4;
/// Every so many files the content is compared on the backing.
const SAMPLE: u64 = 37;
/// More than this for one file that is neither open nor dirty would not fit the jobs this is for.
const BYTES_PER_FILE_MAX: u64 = 8 << 10;

fn nested(n: u64) -> PathBuf {
    let dir = n / PER_DIRECTORY;
    PathBuf::from(format!("tree/{}/{}/file-{n}", dir / 20, dir % 20))
}

fn content(n: u64) -> Vec<u8> {
    bytes(n % 200, 0, n, n % 300)
}

/// Says how long a step took, as files per second.
fn timed<T>(what: &str, files: u64, step: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = step();
    let time = start.elapsed();
    println!(
        "{what}: {files} files in {time:.2?}, {:.0} per second",
        files as f64 / time.as_secs_f64()
    );
    value
}

fn in_threads(files: u64, work: impl Fn(u64) + Sync) {
    std::thread::scope(|threads| {
        for t in 0..THREADS {
            let work = &work;
            threads.spawn(move || (t..files).step_by(THREADS as usize).for_each(work));
        }
    });
}

fn names(dir: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for item in fs::read_dir(dir).expect("list") {
        let name = item.expect("entry").file_name().into_string().expect("UTF-8");
        assert!(found.insert(name.clone()), "{name} is listed twice in {}", dir.display());
    }
    found
}

fn count(root: &Path, limit: Duration) -> u64 {
    let text = shell(root, "find . -type f | wc -l", limit);
    text.trim().parse().expect("a number")
}

/// Files in the subdirectories of a cache.
fn data_files(shards: fs::ReadDir) -> usize {
    shards.flatten().filter_map(|d| fs::read_dir(d.path()).ok()).map(Iterator::count).sum()
}

#[test]
fn many_small_files() {
    let files = tools::amount("EBB_TREE_FILES", FILES);
    let limit = Duration::from_secs(120) + Duration::from_millis(files * 20);
    let cluster = Cluster::builder().nodes(1).consistency("session").start();
    let node = &cluster.nodes()[0];
    let resident = || node.status()["resident_bytes"].as_u64().expect("resident_bytes");
    let before = resident();

    for n in (0..files).step_by(PER_DIRECTORY as usize) {
        fs::create_dir_all(node.path("").join(nested(n)).parent().expect("has one"))
            .expect("mkdir");
    }
    let root = node.path("");
    timed("create", files, || {
        in_threads(files, |n| fs::write(root.join(nested(n)), content(n)).expect("write"));
    });
    let made = resident();
    timed("find", files, || assert_eq!(count(&root, limit), files));
    timed("stat", files, || {
        in_threads(files, |n| {
            let meta = fs::metadata(root.join(nested(n))).expect("stat");
            assert_eq!(meta.len(), content(n).len() as u64, "size of {n}");
        });
    });
    timed("read", files, || {
        in_threads(files, |n| {
            same("read", &fs::read(root.join(nested(n))).expect("read"), &content(n));
        });
    });
    timed("drain", files, || node.drain());
    let drained = resident();
    assert_eq!(count(cluster.backing(), limit), files, "files on the backing");
    for n in (0..files).step_by(SAMPLE as usize) {
        let got = fs::read(cluster.backing().join(nested(n))).expect("read");
        same(&format!("backing, file {n}"), &got, &content(n));
    }
    let per_file = drained.saturating_sub(before) / files;
    println!(
        "daemon: {before} bytes at start, {made} with all files dirty, {drained} drained: \
         {per_file} bytes per file"
    );

    timed("rm -rf", files, || shell(&root, "rm -rf tree", limit));
    assert_eq!(names(&root), BTreeSet::new());
    assert_eq!(names(cluster.backing()), BTreeSet::new(), "removal is written through");
    let left = || std::fs::read_dir(node.cache().join("data")).map_or(0, data_files);
    let empty = || left() == 0 && node.status()["dirty_bytes"] == 0;
    wait_until(limit, "the cache gives up what was removed", empty);
    println!("daemon: {} bytes after removal", resident());
    // Give it time to hand freed memory back; how much that is depends on the C library.
    std::thread::sleep(Duration::from_secs(if files >= 20_000 { 12 } else { 0 }));
    println!("daemon: {} bytes when idle", resident());
    // What a process holds at first would count for every file of a small run.
    if files >= 20_000 {
        assert!(per_file <= BYTES_PER_FILE_MAX, "{per_file} bytes per file");
    }
}

#[test]
fn one_flat_directory() {
    let files = tools::amount("EBB_TREE_FILES", FILES) / 2;
    let cluster = Cluster::builder().nodes(2).consistency("session").start();
    let roots: Vec<PathBuf> = cluster.nodes().iter().map(|n| n.path("flat")).collect();
    fs::create_dir(&roots[0]).expect("mkdir");
    let name = |n: u64| format!("a name that is not very short {n:07}");
    timed("create on two nodes", files, || {
        in_threads(files, |n| {
            fs::write(roots[(n % 2) as usize].join(name(n)), content(n)).expect("write");
        });
    });
    let want: BTreeSet<String> = (0..files).map(name).collect();
    for root in &roots {
        let got = timed("list", files, || names(root));
        assert!(got == want, "{} of {} names", got.len(), want.len());
    }
    for node in cluster.nodes() {
        timed("drain", files / 2, || node.drain());
    }
    assert!(names(&cluster.backing().join("flat")) == want, "names on the backing");
    for n in (0..files).step_by(SAMPLE as usize) {
        let got = fs::read(cluster.backing().join("flat").join(name(n))).expect("read");
        same(&format!("backing, file {n}"), &got, &content(n));
    }
    timed("remove what the other node made", files, || {
        in_threads(files, |n| {
            fs::remove_file(roots[((n + 1) % 2) as usize].join(name(n))).expect("unlink");
        });
    });
    for root in &roots {
        assert_eq!(names(root), BTreeSet::new());
        assert!(!root.join(name(0)).exists());
    }
    fs::remove_dir(&roots[1]).expect("rmdir");
}

/// A removal makes the service answer and send something right behind it. Where the second waits
/// for the acknowledgement of the first, which the kernel delays by 40 ms, many take that long.
#[test]
fn requests_do_not_wait_for_delayed_acknowledgements() {
    const FILES: usize = 200;
    let cluster = Cluster::builder().nodes(1).consistency("session").start();
    let node = cluster.node(0);
    let paths: Vec<PathBuf> = (0..FILES).map(|n| node.path(format!("f{n}"))).collect();
    for path in &paths {
        fs::write(path, "x").expect("write");
    }
    node.drain();
    let delayed = |path: &&PathBuf| {
        let start = Instant::now();
        fs::symlink_metadata(path).expect("stat");
        fs::remove_file(path).expect("unlink");
        start.elapsed() > Duration::from_millis(35)
    };
    let count = paths.iter().filter(delayed).count();
    println!("{count} of {FILES} removals took more than 35 ms");
    assert!(count < FILES / 8, "{count} of {FILES} removals were delayed");
}
