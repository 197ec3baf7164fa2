//! A backing that hangs holds up who needs it, and nobody else: while more readers than the daemon has
//! threads for wait for a disk that does not answer, other programs write, sync and read what is
//! in the buffer.

use ebb_testkit::{Cluster, Disk, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::{available, wait_until};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// More than the runtime of a daemon has threads that may block.
const READERS: u64 = 200;
const BYTES: u64 = 64 << 10;

/// An fsync or a read of the local disk, on a machine that does other things as well.
const AT_ONCE: Duration = Duration::from_secs(1);

#[test]
fn readers_of_a_hung_backing_leave_the_local_disk_to_others() {
    if let Some(why) = skip_reason() {
        println!("SKIPPED: {why}");
        return;
    }
    if !available(&["nbdkit", "nbdfuse", "mkfs.ext4"]) {
        return;
    }
    let disk = match Disk::faulty(192) {
        Ok(disk) => disk,
        Err(why) => {
            println!("SKIPPED: {why}");
            return;
        }
    };
    let name = |n: u64| format!("input-{n}");
    for n in 0..READERS {
        let file = File::create(disk.path().join(name(n))).expect("create");
        file.write_all_at(&bytes(n, 0, 0, BYTES), 0).expect("write");
        file.sync_all().expect("sync");
        // The kernel must not have it.
        fadvise(&file, 0, None, Advice::DontNeed).expect("fadvise");
    }
    let cluster = Cluster::builder()
        .nodes(1)
        .flush("end")
        .option("--request-timeout", "20s")
        .backing(disk.path())
        .start();
    let node = cluster.node(0);
    let local = File::create_new(node.path("local")).expect("create");
    drop(local);
    let local = File::options().read(true).write(true).open(node.path("local")).expect("open");
    local.write_all_at(&bytes(1, 1, 0, BYTES), 0).expect("write");
    local.sync_all().expect("sync");
    // Opened while the backing answers; nothing is read yet.
    let inputs: Vec<File> =
        (0..READERS).map(|n| File::open(node.path(name(n))).expect("open")).collect();

    disk.stall();
    let mut slowest = [Duration::ZERO; 3];
    std::thread::scope(|threads| {
        let readers: Vec<_> = inputs
            .iter()
            .enumerate()
            .map(|(n, input)| {
                threads.spawn(move || {
                    let mut got = vec![0; BYTES as usize];
                    input
                        .read_exact_at(&mut got, 0)
                        .map(|()| same("input", &got, &bytes(n as u64, 0, 0, BYTES)))
                })
            })
            .collect();
        let activity = || node.status()["activity"].as_u64().unwrap_or(0);
        wait_until(Duration::from_secs(10), "the readers wait", || activity() >= READERS);
        for round in 0..5 {
            let content = bytes(2, round, 0, BYTES);
            let mut timed = |which: usize, step: &dyn Fn()| {
                let began = Instant::now();
                step();
                slowest[which] = slowest[which].max(began.elapsed());
            };
            timed(0, &|| local.write_all_at(&content, round * BYTES).expect("write"));
            timed(1, &|| local.sync_all().expect("fsync"));
            timed(2, &|| {
                let mut got = vec![0; BYTES as usize];
                local.read_exact_at(&mut got, round * BYTES).expect("read");
                same("local", &got, &content);
            });
        }
        assert!(readers.iter().all(|r| !r.is_finished()), "the disk hangs for all of them");
        disk.go_on();
        for reader in readers {
            reader.join().expect("thread").expect("what was asked while it hung is answered");
        }
    });
    println!("beside {READERS} readers: write, fsync, read took {slowest:?} at most");
    assert!(slowest.iter().all(|t| *t < AT_ONCE), "write, fsync, read: {slowest:?}");
    drop((inputs, local));
    cluster.umount_all();
    let got = fs::read(cluster.backing().join("local")).expect("read");
    same("local on the backing", &got[..BYTES as usize], &bytes(2, 0, 0, BYTES));
}
