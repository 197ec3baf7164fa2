//! One file that several nodes write at once, each its own bytes: allocation beside others' writes,
//! read-modify-write under locks, and very many small pieces. No byte of anybody may be lost.

use ebb_testkit::disk::Disk;
use ebb_testkit::{Cluster, Node, record_lock, skip_reason};
use ebb_tests::model::close;
use ebb_tests::nodes::{open, requests};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Barrier;

const ALL: [&str; 5] = ["posix", "commit", "session", "mpiio", "romio"];
const PATHS: [&str; 2] = ["daemon", "auto"];

fn two(model: &str, path: &str) -> Cluster {
    Cluster::builder().nodes(2).consistency(model).option("--io-path", path).start()
}

fn checked(done: i32, what: &str) {
    assert_eq!(done, 0, "{what}: {}", io::Error::last_os_error());
}

fn fallocate(file: &File, mode: i32, end: i64) {
    // SAFETY: an open descriptor.
    checked(unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, end) }, "fallocate");
}

fn size(node: &Node, name: &str) -> u64 {
    open(&node.path(name)).metadata().expect("stat").len()
}

/// Each node does its part at the same time as the other one.
fn both(cluster: &Cluster, part: impl Fn(usize, &Node, &Barrier) + Sync) {
    let barrier = Barrier::new(2);
    std::thread::scope(|threads| {
        for (who, node) in cluster.nodes().iter().enumerate() {
            let (barrier, part) = (&barrier, &part);
            threads.spawn(move || part(who, node, barrier));
        }
    });
}

#[test]
fn allocation_beside_others_writes_never_cuts() {
    for (model, path) in ["posix", "commit", "romio"].iter().flat_map(|m| PATHS.map(|p| (m, p))) {
        let cluster = two(model, path);
        for round in 0..70 {
            let name = format!("f{round}");
            drop(open(&cluster.node(0).path(&name)));
            both(&cluster, |who, node, barrier| {
                let file = open(&node.path(&name));
                barrier.wait();
                if who == 0 {
                    fallocate(&file, 0, 4096);
                } else {
                    file.write_all_at(&[7; 100], 8192).expect("write");
                    file.sync_all().expect("fsync");
                }
                close(file).expect("close");
            });
            for node in cluster.nodes() {
                let got = std::fs::read(node.path(&name)).expect("read");
                let what = format!("{model}, {path}, round {round}");
                assert_eq!(got.len(), 8292, "{what}");
                assert!(got[..8192].iter().all(|b| *b == 0) && got[8192..] == [7; 100], "{what}");
            }
        }
        cluster.umount_all();
        assert_eq!(std::fs::read(cluster.backing().join("f3")).expect("read").len(), 8292);
    }
}

/// The node that allocates has an old view, in which the file is empty.
#[test]
fn allocation_under_an_old_view_never_cuts() {
    for (model, path) in ALL.iter().flat_map(|m| PATHS.map(|p| (m, p))) {
        let cluster = two(model, path);
        let (a, b) = (cluster.node(0), cluster.node(1));
        let early = open(&a.path("f"));
        std::fs::write(b.path("f"), vec![9; 1 << 20]).expect("write");
        fallocate(&early, 0, 4096);
        fallocate(&early, libc::FALLOC_FL_KEEP_SIZE, 4 << 20);
        for node in [a, b] {
            assert_eq!(size(node, "f"), 1 << 20, "{model}, {path}");
        }
        assert!(std::fs::read(b.path("f")).expect("read") == vec![9; 1 << 20], "{model}, {path}");
        fallocate(&early, 0, 2 << 20);
        for node in [b, a] {
            assert_eq!(size(node, "f"), 2 << 20, "{model}, {path}");
        }
        close(early).expect("close");
        cluster.umount_all();
        let want = [vec![9; 1 << 20], vec![0; 1 << 20]].concat();
        assert!(std::fs::read(cluster.backing().join("f")).expect("read") == want);
    }
}

/// What a node has written past its daemon is not cut by another one's allocation either.
#[test]
fn allocation_of_a_file_that_sits_elsewhere_never_cuts() {
    for model in ["posix", "commit"] {
        let cluster = two(model, "auto");
        let (a, b) = (cluster.node(0), cluster.node(1));
        let mine = open(&a.path("f"));
        mine.write_all_at(&[5; 100_000], 0).expect("write");
        let theirs = open(&b.path("f"));
        fallocate(&theirs, 0, 4096);
        mine.write_all_at(&[6; 100_000], 100_000).expect("write");
        fallocate(&theirs, 0, 150_000);
        mine.sync_all().expect("fsync");
        assert_eq!(size(b, "f"), 200_000, "{model}");
        fallocate(&theirs, 0, 250_000);
        let want = [vec![5; 100_000], vec![6; 100_000], vec![0; 50_000]].concat();
        for node in [a, b] {
            assert!(std::fs::read(node.path("f")).expect("read") == want, "{model}");
        }
    }
}

fn lock(file: &File, kind: libc::c_int, start: u64, len: u64) {
    record_lock(file, libc::F_SETLKW, kind, (start, len)).expect("lock");
}

const RECORD: u64 = 100;
const STRETCH: u64 = 10 * RECORD;
const STRETCHES: u64 = 8;

/// What a record is in a round: written plainly, then perhaps under a lock. Never zero.
fn content(round: u64, record: u64, under_lock: bool) -> u8 {
    (1 + (round * 67 + record * 2 + u64::from(under_lock)) % 255) as u8
}

fn is_rewritten(record: u64) -> bool {
    record % 2 == (record * RECORD / STRETCH) % 2
}

/// Data sieving, as MPI libraries do it: every node writes its records; then each locks stretches that
/// hold the other's records as well, reads them, changes its own records, and writes all of it back.
fn sieve(who: u64, node: &Node, round: u64, barrier: &Barrier) {
    let file = open(&node.path("f"));
    let own = |r: &u64| r % 2 == who;
    barrier.wait();
    for record in (0..STRETCHES * STRETCH / RECORD).filter(own) {
        let data = [content(round, record, false); RECORD as usize];
        file.write_all_at(&data, record * RECORD).expect("write");
    }
    barrier.wait();
    for start in (who..STRETCHES).step_by(2).map(|s| s * STRETCH) {
        lock(&file, libc::F_WRLCK, start, STRETCH);
        let mut stretch = [0; STRETCH as usize];
        let got = file.read_at(&mut stretch, start).expect("read");
        assert!(got as u64 == STRETCH || start + STRETCH == STRETCHES * STRETCH, "{got}");
        for record in (start / RECORD..(start + STRETCH) / RECORD).filter(own) {
            let at = (record * RECORD - start) as usize;
            stretch[at..at + RECORD as usize].fill(content(round, record, true));
        }
        file.write_all_at(&stretch, start).expect("write back");
        lock(&file, libc::F_UNLCK, start, STRETCH);
    }
    close(file).expect("close");
    barrier.wait();
}

fn all_records(round: u64) -> Vec<u8> {
    let records = 0..STRETCHES * STRETCH / RECORD;
    records.flat_map(|r| [content(round, r, is_rewritten(r)); RECORD as usize]).collect()
}

#[test]
fn read_modify_write_under_locks_loses_no_byte() {
    for (model, path) in ALL.iter().flat_map(|m| PATHS.map(|p| (m, p))) {
        let cluster = two(model, path);
        drop(open(&cluster.node(0).path("f")));
        let began = std::time::Instant::now();
        for round in 0..20 {
            both(&cluster, |who, node, barrier| sieve(who as u64, node, round, barrier));
            for node in cluster.nodes() {
                let got = std::fs::read(node.path("f")).expect("read");
                let wrong = got.iter().zip(all_records(round)).position(|(a, b)| *a != b);
                assert_eq!(
                    (got.len() as u64, wrong),
                    (STRETCHES * STRETCH, None),
                    "{model}, {path}, round {round}"
                );
            }
        }
        println!("{model}, {path}: {:?}", began.elapsed());
        cluster.umount_all();
        assert!(std::fs::read(cluster.backing().join("f")).expect("read") == all_records(19));
    }
}

/// A node whose cache disk is full cannot publish what it wrote under a lock: unlock and close say so. What
/// another node writes there under the lock after that is not written over when there is room again.
#[test]
fn what_could_not_be_published_does_not_come_after_what_others_wrote() {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    for model in ["posix", "mpiio", "commit", "session"] {
        let disk = match Disk::new(96) {
            Ok(disk) => disk,
            Err(why) => return println!("SKIPPED: {why}"),
        };
        let builder = Cluster::builder().nodes(2).consistency(model).flush("end");
        let builder = builder.option("--durability", "none").option("--io-path", "daemon");
        let cluster = builder.separate_meta().caches_below(disk.path()).start();
        let (one, two) = (cluster.node(0), cluster.node(1));
        let first = open(&one.path("f"));
        first.write_all_at(&[0; 64], 0).expect("write");
        close(first).expect("close");
        disk.fill();
        // What the journal of the node has in reserve is used up as well: it notes names within a second.
        std::fs::create_dir(one.path("d")).expect("mkdir");
        for n in 0..6_000 {
            std::fs::create_dir(one.path(format!("d/{n}"))).expect("mkdir");
        }
        std::thread::sleep(std::time::Duration::from_secs(2));
        let first = open(&one.path("f"));
        lock(&first, libc::F_WRLCK, 0, 64);
        // Under posix it is the write that publishes.
        let written = first.write_all_at(&[1; 64], 0);
        assert!(written.is_ok() || model == "posix", "{model}: {written:?}");
        let done = written.and(close(first));
        assert!(done.is_err(), "{model}: not published, and nobody says so");
        disk.unfill();
        let second = open(&two.path("f"));
        lock(&second, libc::F_WRLCK, 0, 64);
        second.write_all_at(&[2; 64], 0).expect("write");
        close(second).expect("close");
        cluster.nodes().iter().for_each(Node::drain);
        let got = std::fs::read(cluster.backing().join("f")).expect("read");
        assert_eq!(got, [2; 64], "{model}: older bytes came later");
    }
}

/// A lock of one node waits for nothing when nobody else has the file open, and for no locks of others
/// when they lock other parts of it at the same time.
#[test]
fn locks_of_disjoint_parts_do_not_wait_for_each_other() {
    let cluster = two("session", "daemon");
    drop(open(&cluster.node(0).path("f")));
    both(&cluster, |who, node, barrier| {
        let file = open(&node.path("f"));
        let at = who as u64 * STRETCH;
        barrier.wait();
        lock(&file, libc::F_WRLCK, at, STRETCH);
        file.write_all_at(&[1 + who as u8; 10], at).expect("write");
        // Both hold theirs now.
        barrier.wait();
        lock(&file, libc::F_WRLCK, at + 10 * STRETCH, STRETCH);
        barrier.wait();
        lock(&file, libc::F_UNLCK, 0, 0);
    });
    let got = std::fs::read(cluster.node(0).path("f")).expect("read");
    assert_eq!((got[..10].to_vec(), got[1000..].to_vec()), (vec![1; 10], vec![2; 10]));
}

/// A writable mapping of a file from its start.
fn store(file: &File, len: usize, bytes: impl Iterator<Item = (usize, u8)>) {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping of an open descriptor.
    let at = unsafe {
        libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(at, libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
    for (offset, byte) in bytes {
        assert!(offset < len);
        // SAFETY: inside the mapping.
        unsafe { at.cast::<u8>().add(offset).write_volatile(byte) }
    }
    // SAFETY: it was mapped above, and nobody has a reference into it.
    checked(unsafe { libc::munmap(at, len) }, "munmap");
}

fn memory_kib(node: &Node) -> u64 {
    let pid = node.pid().expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find(|l| l.starts_with("VmHWM")).expect("VmHWM");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

/// What a daemon may have needed at most after such a test. (Of 655,360 ranges at each node 440 to 830 MB were
/// seen, more on a busy machine; 1.1 to 1.7 GB where it grew faster than they do.)
const MEMORY_KIB_MAX: u64 = 1 << 20;

/// What one node stored through a mapping lies between bytes of the other's blocks: each byte is a range
/// of its own, and there are several hundred thousand of them, more than one message takes.
#[test]
fn a_file_of_very_many_ranges_is_published_by_close() {
    const LEN: usize = 5 << 18;
    let cluster = two("session", "passthrough");
    let (a, b) = (cluster.node(0), cluster.node(1));
    open(&a.path("f")).set_len(LEN as u64).expect("extend");
    let (first, second) = (open(&a.path("f")), open(&b.path("f")));
    let before = [a, b].map(|node| requests(node, "attach"));
    store(&first, LEN, (0..LEN).step_by(2).map(|at| (at, 1 + (at / 2 % 255) as u8)));
    store(&second, LEN, (1..LEN).step_by(2).map(|at| (at, 1 + (at / 3 % 255) as u8)));
    close(first).expect("close");
    let began = std::time::Instant::now();
    close(second).expect("close");
    a.wait_closed();
    b.wait_closed();
    let sent = [(a, before[0]), (b, before[1])].map(|(node, was)| requests(node, "attach") - was);
    println!("messages of each: {sent:?}");
    // 262,144 ranges at a time.
    assert!(sent[0].max(sent[1]) >= 3, "they fit into one message: {sent:?}");
    println!("published after {:?}; {} and {} KiB", began.elapsed(), memory_kib(a), memory_kib(b));
    let want = |at: usize| 1 + (if at.is_multiple_of(2) { at / 2 } else { at / 3 } % 255) as u8;
    for node in [a, b] {
        let got = std::fs::read(node.path("f")).expect("read");
        let wrong = got.iter().enumerate().position(|(at, byte)| *byte != want(at));
        assert_eq!((got.len(), wrong), (LEN, None), "on {}", node.name());
        assert!(!node.log().contains("Argument list too long"), "{}", node.log());
    }
    let most = memory_kib(a).max(memory_kib(b));
    assert!(most < MEMORY_KIB_MAX, "{most} KiB: memory grows with the ranges, not faster");
    cluster.umount_all();
    let there = std::fs::read(cluster.backing().join("f")).expect("read");
    assert!(there.iter().enumerate().all(|(at, byte)| *byte == want(at)), "on the backing");
}

const RANKS: u64 = 4;
/// No multiple of anything.
const UNALIGNED: u64 = 1_003;
/// Stored through a mapping by one rank: whole pages, for two nodes may not store into one page at a time.
const STORED: u64 = 3 * 4096;
/// Written plainly, in records; what is behind it is stored through mappings.
const HALF: u64 = RANKS * STORED * 11;

/// A byte of a round: small numbers of four bytes each, so that three of four bytes are zeros.
fn small_number(round: u64, at: u64) -> u8 {
    if at.is_multiple_of(4) { (1 + (round * 83 + at / 4) % 255) as u8 } else { 0 }
}

/// Where processes say that they have opened the file, and wait until all have.
struct Gate {
    ready: (File, File),
    go: (File, File),
}

impl Gate {
    fn new() -> Gate {
        let pipe = || {
            let mut ends = [0; 2];
            // SAFETY: an array that lives through the call, and descriptors that are ours.
            unsafe {
                checked(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), "pipe");
                (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
            }
        };
        Gate { ready: pipe(), go: pipe() }
    }

    fn open(&self) {
        let mut all = [0; RANKS as usize];
        (&self.ready.0).read_exact(&mut all).expect("all of them");
        (&self.go.1).write_all(&all).expect("all of them");
    }

    /// In a child, which closes every other descriptor first.
    unsafe fn alone(&self) -> (i32, i32) {
        let (say, hear) = (self.ready.1.as_raw_fd(), self.go.0.as_raw_fd());
        for fd in (3..4096).filter(|fd| ![say, hear].contains(fd)) {
            // SAFETY: nobody uses it in this process.
            unsafe { libc::close(fd) };
        }
        (say, hear)
    }
}

/// A process of its own that writes its records of the first half, stores those of the second one through
/// a mapping, and closes the file.
fn rank(node: &Node, name: &str, round: u64, rank: u64, gate: &Gate) -> libc::pid_t {
    let path = CString::new(node.path(name).into_os_string().into_encoded_bytes()).expect("a path");
    let whole: Vec<u8> = (0..2 * HALF).map(|at| small_number(round, at)).collect();
    // SAFETY: the child only makes system calls and stores into its mapping, and ends by _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: as above.
        unsafe { libc::_exit(write_and_store(&path, &whole, rank, gate)) }
    }
    pid
}

/// 0, or the step that failed.
unsafe fn write_and_store(path: &CString, whole: &[u8], rank: u64, gate: &Gate) -> i32 {
    let own = |start: u64, each: u64| {
        let starts = (start + rank * each..start + HALF).step_by((RANKS * each) as usize);
        starts.map(move |at| (at, each.min(start + HALF - at)))
    };
    let len = whole.len();
    // SAFETY: system calls on memory that lives through them; stores are inside the mapping.
    unsafe {
        let (say, hear) = gate.alone();
        let fd = libc::open(path.as_ptr(), libc::O_RDWR);
        let mut byte = 0_u8;
        libc::write(say, (&raw const byte).cast(), 1);
        if libc::read(hear, (&raw mut byte).cast(), 1) != 1 || fd < 0 {
            return 1;
        }
        for (at, n) in own(0, UNALIGNED) {
            let from = whole[at as usize..].as_ptr().cast();
            if libc::pwrite(fd, from, n as usize, at as i64) != n as isize {
                return 2;
            }
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let map = libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, 0);
        if map == libc::MAP_FAILED {
            return 3;
        }
        for at in own(HALF, STORED).flat_map(|(at, n)| at..at + n) {
            map.cast::<u8>().add(at as usize).write_volatile(whole[at as usize]);
        }
        if libc::munmap(map, len) != 0 {
            return 4;
        }
        if libc::close(fd) == 0 { 0 } else { 5 }
    }
}

fn ended(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: `status` lives through the call.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

/// Two processes on each of two nodes, past their daemons: unaligned records of all of them beside each
/// other, and stores into mappings. Three of four bytes are zeros, so that who looks for what was written
/// (`--tracker off`) finds very many pieces.
#[test]
fn unaligned_records_and_mapped_stores_of_many_processes_hang_nothing() {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    for (tracker, rounds) in [("auto", 5), ("off", 2)] {
        processes_past_the_daemon(tracker, rounds);
    }
}

fn processes_past_the_daemon(tracker: &str, rounds: u64) {
    let cluster = Cluster::builder().nodes(2).consistency("session");
    let cluster = cluster.option("--io-path", "auto").option("--tracker", tracker).start();
    let past = |node: &Node| node.status()["opens"]["passthrough-write"].as_u64().unwrap_or(0);
    for round in 0..rounds {
        let name = format!("f{round}");
        open(&cluster.node(0).path(&name)).set_len(2 * HALF).expect("extend");
        let before: Vec<u64> = cluster.nodes().iter().map(past).collect();
        let node = |n: u64| cluster.node((n % 2) as usize);
        let began = std::time::Instant::now();
        let gate = Gate::new();
        let pids: Vec<_> = (0..RANKS).map(|n| rank(node(n), &name, round, n, &gate)).collect();
        gate.open();
        let codes: Vec<_> = pids.into_iter().map(ended).collect();
        assert_eq!(codes, [0; RANKS as usize], "round {round}");
        cluster.nodes().iter().for_each(Node::wait_closed);
        println!("--tracker {tracker}, round {round}: {:?}", began.elapsed());
        for (node, before) in cluster.nodes().iter().zip(before) {
            let went = past(node) - before;
            assert!(went >= 2, "round {round}: {went} opens past the daemon of {}", node.name());
            let got = std::fs::read(node.path(&name)).expect("read");
            let mut wrong =
                (0_u64..).zip(&got).filter(|(at, byte)| **byte != small_number(round, *at));
            let first = wrong.next();
            assert_eq!(
                (got.len() as u64, first),
                (2 * HALF, None),
                "round {round}, {}",
                node.name()
            );
        }
    }
    for node in cluster.nodes() {
        println!("{}: {} KiB", node.name(), memory_kib(node));
        assert!(memory_kib(node) < MEMORY_KIB_MAX, "{} KiB", memory_kib(node));
        assert_eq!(node.counter("ebb_stuck_operations_total"), 0, "{}", node.log());
        assert!(!node.log().contains("not published at the last close"), "{}", node.log());
    }
    cluster.umount_all();
    for round in 0..rounds {
        let got = std::fs::read(cluster.backing().join(format!("f{round}"))).expect("read");
        assert!((0_u64..).zip(&got).all(|(at, byte)| *byte == small_number(round, at)), "backing");
    }
}

/// Every request that the node has sent.
fn all_requests(node: &Node) -> u64 {
    let status = node.status();
    let rpc = status["rpc"].as_object().expect("requests by name");
    rpc.values().filter_map(serde_json::Value::as_u64).sum()
}

/// What docs/semantics.md says of `posix` where many nodes write small pieces of one file.
#[test]
fn small_pieces_of_a_shared_file_cost_a_request_each_under_posix_alone() {
    const PIECES: u64 = 300;
    for model in ["posix", "session", "mpiio"] {
        let cluster = two(model, "daemon");
        drop(open(&cluster.node(0).path("f")));
        let before: Vec<u64> = cluster.nodes().iter().map(all_requests).collect();
        both(&cluster, |who, node, barrier| {
            let file = open(&node.path("f"));
            barrier.wait();
            for piece in (who as u64..2 * PIECES).step_by(2) {
                file.write_all_at(&[1 + who as u8; 100], piece * 100).expect("write");
            }
            barrier.wait();
            close(file).expect("close");
        });
        for (node, before) in cluster.nodes().iter().zip(before) {
            let sent = all_requests(node) - before;
            println!("{model}: {sent} requests for {PIECES} pieces");
            match model {
                // One to publish, and often one to ask for what the other has changed.
                "posix" => assert!((PIECES..4 * PIECES).contains(&sent), "{sent}"),
                _ => assert!(sent < PIECES / 10, "{model}: {sent}"),
            }
            let got = std::fs::read(node.path("f")).expect("read");
            assert_eq!(got.len() as u64, 2 * PIECES * 100, "{model}");
            assert!((0..).zip(&got).all(|(at, byte)| *byte == 1 + (at / 100 % 2) as u8), "{model}");
        }
    }
}
