//! Bandwidth of one file on a mount against the same file in the bare directory: writing a new file,
//! overwriting and reading a cached one in several record sizes, and reading another node's file
//! for the first time. New files are small and removed in turn: fresh memory would measure the host.

use ebb_benches::one_file::NAME;
use ebb_benches::through::Through;
use ebb_benches::{MIB, Report, rate, write, write_new};
use ebb_testkit::Cluster;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

const FILE_BYTES: usize = 64 << 20;
const NEW_BYTES: usize = 32 << 20;
const LOCAL_BYTES: usize = 32 << 20;
/// How often an open file is written over in a round.
const PASSES: usize = 4;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).expect("open")
}

/// Opens a file with content, writes records over all of it, and closes it.
fn rewrite(path: &Path, record: usize) -> f64 {
    let data = vec![0xa5; record];
    rate(|| {
        let file = OpenOptions::new().write(true).open(path).expect("open");
        for at in (0..LOCAL_BYTES).step_by(record) {
            file.write_all_at(&data, at as u64).expect("write");
        }
        drop(file);
        LOCAL_BYTES as f64 / MIB
    })
}

/// Writes records over all of an open file, several times.
fn overwrite(file: &File, record: usize) -> f64 {
    let data = vec![0xa6; record];
    rate(|| {
        for _ in 0..PASSES {
            for at in (0..LOCAL_BYTES).step_by(record) {
                file.write_all_at(&data, at as u64).expect("write");
            }
        }
        (PASSES * LOCAL_BYTES) as f64 / MIB
    })
}

/// Every record of a local file that is opened for reading alone.
fn read_local(path: &Path, record: usize, bytes: usize, random: bool) -> f64 {
    read(&File::open(path).expect("open"), record, bytes, random)
}

fn read(file: &File, record: usize, bytes: usize, random: bool) -> f64 {
    let mut data = vec![0; record];
    let records = bytes / record;
    let mut at = 0usize;
    rate(|| {
        for i in 0..records {
            // A full cycle through all records, far apart from each other.
            at = if random { (at + records / 2 + 7) % records } else { i };
            file.read_exact_at(&mut data, (at * record) as u64).expect("read");
        }
        (records * record) as f64 / MIB
    })
}

fn main() {
    let mut report = Report::new("mount_io");
    report.head("bare", "mount");
    what_the_kernel_leaves(&mut report);
    past_the_daemon(&mut report);
    for model in ["session", "commit", "posix"] {
        let cluster = Cluster::builder().nodes(1).consistency(model).flush("end").start();
        let bare_dir = tempfile::tempdir().expect("tempdir");
        let (bare, mount) = (open(&bare_dir.path().join("f")), open(&cluster.nodes()[0].path("f")));
        write(&bare, 1 << 20, FILE_BYTES);
        write(&mount, 1 << 20, FILE_BYTES);
        for (record, bytes) in [(8 << 10, 4 << 20), (64 << 10, 16 << 20), (1 << 20, FILE_BYTES)] {
            let size = record >> 10;
            report.compare(
                format!("{model}: overwrite {size} KiB records"),
                "MiB/s",
                || write(&bare, record, bytes),
                || write(&mount, record, bytes),
            );
            for (random, how) in [(false, "sequential"), (true, "random")] {
                report.compare(
                    format!("{model}: {how} read {size} KiB"),
                    "MiB/s",
                    || read(&bare, record, bytes, random),
                    || read(&mount, record, bytes, random),
                );
            }
        }
    }
    first_touch(&mut report);
    println!("{}", report.save().expect("save").display());
}

/// Reading a local file past a daemon that does nothing but open it.
fn what_the_kernel_leaves(report: &mut Report) {
    let dir = tempfile::tempdir().expect("tempdir");
    let (bare, mount) = (dir.path().join("bare"), dir.path().join("mount"));
    std::fs::write(&bare, vec![0x5a; LOCAL_BYTES]).expect("write");
    std::fs::create_dir(&mount).expect("mkdir");
    let _mounted = match Through::mount(&mount, open(&bare)) {
        Ok(mounted) => mounted,
        Err(e) => return println!("no passthrough here: {e}"),
    };
    for size in [4, 8, 64, 1024] {
        for (random, how) in [(false, "sequential"), (true, "random")] {
            report.compare(
                format!("nothing behind it: {how} read {size} KiB"),
                "MiB/s",
                || read_local(&bare, size << 10, LOCAL_BYTES, random),
                || read_local(&mount.join(NAME), size << 10, LOCAL_BYTES, random),
            );
        }
    }
}

/// A new file, and a local one that is read, as the kernel does it for session.
fn past_the_daemon(report: &mut Report) {
    let cluster = Cluster::builder().nodes(1).consistency("session").flush("end");
    let cluster = cluster.option("--io-path", "auto").start();
    let bare_dir = tempfile::tempdir().expect("tempdir");
    let (bare, mount) = (bare_dir.path().join("new"), cluster.nodes()[0].path("new"));
    let (old_bare, old_mount) = (bare_dir.path().join("old"), cluster.nodes()[0].path("old"));
    for path in [&old_bare, &old_mount] {
        std::fs::write(path, vec![0x5a; LOCAL_BYTES]).expect("write");
    }
    for size in [4, 8, 64, 1024] {
        let record = size << 10;
        report.compare(
            format!("session: write new {size} KiB records"),
            "MiB/s",
            || write_new(&bare, record, NEW_BYTES),
            || write_new(&mount, record, NEW_BYTES),
        );
        for (random, how) in [(false, "sequential"), (true, "random")] {
            report.compare(
                format!("session: {how} read of a local file {size} KiB"),
                "MiB/s",
                || read_local(&old_bare, record, LOCAL_BYTES, random),
                || read_local(&old_mount, record, LOCAL_BYTES, random),
            );
        }
    }
    let node = cluster.node(0);
    rewriting(report, &bare_dir.path().join("again"), &node.path("again"));
    let opens = |when: &str| println!("{when}: opens {}", node.status()["opens"]);
    opens("before an open file is written over");
    overwriting(report, &bare_dir.path().join("again"), &node.path("again"));
    opens("after it");
    println!("tracker: {}", node.status()["tracker"]);
}

/// The same file, opened once for all of it.
fn overwriting(report: &mut Report, bare: &Path, mount: &Path) {
    let (bare, mount) = (open(bare), open(mount));
    for size in [4, 8, 64, 1024] {
        report.compare(
            format!("session: overwrite an open file {size} KiB records"),
            "MiB/s",
            || overwrite(&bare, size << 10),
            || overwrite(&mount, size << 10),
        );
    }
}

/// A file with content that is opened, written over and closed.
fn rewriting(report: &mut Report, bare: &Path, mount: &Path) {
    for path in [bare, mount] {
        std::fs::write(path, vec![0x5a; LOCAL_BYTES]).expect("write");
    }
    for size in [4, 8, 64, 1024] {
        report.compare(
            format!("session: rewrite {size} KiB records"),
            "MiB/s",
            || rewrite(bare, size << 10),
            || rewrite(mount, size << 10),
        );
    }
}

/// A file that another node wrote, read for the first time: through its cache and the network.
fn first_touch(report: &mut Report) {
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").start();
    let bare_dir = tempfile::tempdir().expect("tempdir");
    let bare = open(&bare_dir.path().join("f"));
    write(&bare, 1 << 20, FILE_BYTES);
    let mut n = 0;
    report.compare(
        "session: first read of a peer's file, 1 MiB",
        "MiB/s",
        || read(&bare, 1 << 20, FILE_BYTES, false),
        || {
            n += 1;
            let name = format!("peer-{n}");
            let written = open(&cluster.nodes()[0].path(&name));
            write(&written, 1 << 20, FILE_BYTES);
            drop(written);
            let speed = read(&open(&cluster.nodes()[1].path(&name)), 1 << 20, FILE_BYTES, false);
            std::fs::remove_file(cluster.nodes()[0].path(&name)).expect("remove");
            speed
        },
    );
}
