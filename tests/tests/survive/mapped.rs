//! kill -9 while the kernel writes mappings back to the daemon because the daemon has told it to.

use ebb_testkit::{Cluster, skip_reason};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

const PAGES: usize = 64;
const PAGE: usize = 4096;

/// Stores to every page of a shared mapping and locks, without an end. A process of its own:
/// what waits in a mount that hangs cannot be ended.
const STORES: &str = "import fcntl, mmap, os, sys
f = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(f, int(sys.argv[2]))
i = 0
while True:
    for page in range(0, int(sys.argv[2]), 4096):
        m[page + 8 * int(sys.argv[3])] = i % 256
    try:
        fcntl.lockf(f, fcntl.LOCK_EX, 8, 8 * int(sys.argv[3]))
        fcntl.lockf(f, fcntl.LOCK_UN, 8, 8 * int(sys.argv[3]))
    except OSError:
        pass
    i += 1
";

fn stores(file: &Path, number: usize) -> std::io::Result<Child> {
    let size = (PAGES * PAGE).to_string();
    let mut line = Command::new("python3");
    line.args(["-c", STORES]).arg(file).args([&size, &number.to_string()]).spawn()
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("open")
}

/// A thread of the daemon waits for an answer of its own mount and cannot be killed: the next daemon
/// begins all the same, and answers it.
#[test]
fn a_daemon_that_waits_for_its_own_mount_does_not_keep_the_next_one_out() {
    if let Some(reason) = skip_reason() {
        return eprintln!("skipped: {reason}");
    }
    let cluster = Cluster::builder().nodes(2).supervised().consistency("posix").start();
    let paths = [0, 1].map(|n| cluster.node(n).path("f"));
    std::fs::write(&paths[0], vec![0; PAGES * PAGE]).expect("write");
    let mut writers = Vec::new();
    for (number, path) in paths.iter().enumerate() {
        match stores(path, number) {
            Ok(child) => writers.push(child),
            Err(e) => return eprintln!("skipped: python3: {e}"),
        }
    }
    let killed = cluster.node(1);
    for round in 0..6 {
        std::thread::sleep(Duration::from_millis(300));
        if !killed.kill_daemon() {
            // Nothing of it would ever end.
            eprintln!("round {round}: nobody serves; the log says\n{}", killed.log());
            std::process::exit(1);
        }
    }
    for writer in &mut writers {
        writer.kill().and_then(|()| writer.wait()).expect("an end");
    }
    let (a, b) = (open(&paths[0]), open(&paths[1]));
    a.write_all_at(b"after", 100).expect("write");
    let mut got = [0; 5];
    b.read_exact_at(&mut got, 100).expect("read");
    assert_eq!(&got, b"after");
    drop((a, b));
    cluster.node(1).umount();
    cluster.node(0).umount();
}
