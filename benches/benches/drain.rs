//! How fast a drain is, beside a plain parallel copy of the same files to the same backing with
//! as many threads as the flusher has, each file synced at its end as a drain does. In turn, round by
//! round, once from large files and once from small ones; the backing is fast, and then slow.
//!
//! Variables: EBB_BENCH_ROUNDS, EBB_BENCH_DRAIN_MIB, EBB_BENCH_BACKING_MIB_S (of the slow one),
//! EBB_BENCH_DIR (a directory on the disk to measure; default: the temporary directory).

use ebb_benches::{Report, rate};
use ebb_testkit::{Cluster, Disk};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

const THREADS: usize = 8;
const MIB: f64 = (1 << 20) as f64;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// A set of files of equal size.
#[derive(Clone, Copy)]
struct Files {
    name: &'static str,
    count: usize,
    bytes: usize,
    /// Each round makes them in a directory of its own, instead of writing over what is there.
    fresh: bool,
}

impl Files {
    fn mib(self) -> f64 {
        (self.count * self.bytes) as f64 / MIB
    }

    fn file(i: usize) -> String {
        format!("f{i}")
    }

    /// Where the files of a round are.
    fn dir(self, below: &Path, round: u8) -> PathBuf {
        if self.fresh { below.join(format!("round{round}")) } else { below.to_owned() }
    }

    /// Makes all of them or writes over them.
    fn write(self, dir: &Path, round: u8) {
        let dir = self.dir(dir, round);
        fs::create_dir_all(&dir).expect("mkdir");
        let data: Vec<u8> = (0..self.bytes).map(|i| (i % 251) as u8 ^ round).collect();
        for i in 0..self.count {
            let mut options = File::options();
            let options = options.write(true).create(true).truncate(false);
            let mut file = options.open(dir.join(Files::file(i))).expect("open");
            file.write_all(&data).expect("write");
        }
    }

    /// Copies all of them.
    fn copy(self, from: &Path, to: &Path, round: u8) {
        let (from, to) = (self.dir(from, round), self.dir(to, round));
        fs::create_dir_all(&to).expect("mkdir");
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        if i >= self.count {
                            return;
                        }
                        let mut source = File::open(from.join(Files::file(i))).expect("open");
                        let mut options = File::options();
                        let options = options.write(true).create(true).truncate(false);
                        let mut file = options.open(to.join(Files::file(i))).expect("open");
                        io::copy(&mut source, &mut file).expect("copy");
                        file.sync_data().expect("sync");
                    }
                });
            }
        });
    }
}

fn main() {
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    if let Some(why) = ebb_testkit::skip_reason() {
        return println!("SKIPPED: {why}");
    }
    let mut report = Report::new("drain");
    report.head("copy", "drain");
    let mib = number("EBB_BENCH_DRAIN_MIB", 512) as usize;
    let large = Files { name: "8 large files", count: 8, bytes: (mib << 20) / 8, fresh: false };
    let single = Files { name: "1 large file", count: 1, bytes: mib << 20, fresh: false };
    let small = Files { name: "2000 files of 64 KiB", count: 2000, bytes: 64 << 10, fresh: false };
    let new = Files { name: "2000 new files of 64 KiB", fresh: true, ..small };
    for files in [large, single, small, new] {
        compare(&mut report, "disk", None, files);
    }
    for files in [Files { bytes: large.bytes / 4, ..large }, small, new] {
        slow(&mut report, files);
    }
    println!("{}", report.save().expect("save").display());
}

fn slow(report: &mut Report, files: Files) {
    let mut disk = match Disk::new(4096) {
        Ok(disk) => disk,
        Err(why) => return println!("SKIPPED: no disk to slow down: {why}"),
    };
    match disk.throttle(number("EBB_BENCH_BACKING_MIB_S", 100) << 20) {
        Ok(()) => compare(report, "slow disk", Some(&disk.path()), files),
        Err(why) => println!("SKIPPED: the disk cannot be slowed: {why}"),
    }
}

fn compare(report: &mut Report, what: &str, backing: Option<&Path>, files: Files) {
    let below = std::env::var_os("EBB_BENCH_DIR").unwrap_or_else(|| std::env::temp_dir().into());
    let mut builder = Cluster::builder().nodes(1).flush("end").below(&below);
    if let Some(backing) = backing {
        builder = builder.backing(backing.join("b"));
    }
    let cluster = builder.start();
    let node = cluster.node(0);
    // The copy's source is on the disk that the buffer is on, its target on the backing's.
    let source = tempfile::tempdir_in(&below).expect("tempdir");
    let target = tempfile::tempdir_in(cluster.backing().parent().expect("a parent")).expect("dir");
    let (mut round, mut other) = (0u8, 0u8);
    report.compare(
        format!("{what}: {}", files.name),
        "MiB/s",
        || {
            round = round.wrapping_add(1);
            files.write(source.path(), round);
            rate(|| {
                files.copy(source.path(), target.path(), round);
                files.mib()
            })
        },
        || {
            other = other.wrapping_add(1);
            files.write(node.mountpoint(), other);
            rate(|| {
                node.drain();
                files.mib()
            })
        },
    );
    cluster.umount_all();
    if backing.is_some() {
        let _ = fs::remove_dir_all(cluster.backing());
    }
}
