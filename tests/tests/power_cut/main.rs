//! The power of a whole stack is cut: caches, journals of nodes and service, part files and
//! backing lie on one disk of ext4 that loses what was not flushed, sector by sector, while
//! programs write, sync, truncate and rename. Afterwards everything that an fsync answered for must
//! be there, what cannot be there must be an error and never zeros, and the exit status of
//! `ebb umount` must say which it is. `EBB_POWER_CUTS` cuts (3); each has the next seed.

mod undone;

use ebb_testkit::power::Cut;
use ebb_testkit::{Builder, Cluster, Node, PowerDisk, describe, mounts, random, skip_reason};
use ebb_tests::power::{Books, Line, Verdict};
use ebb_tests::reboot;
use ebb_tests::tools::amount;
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const DISK_MIB: u64 = 192;
const NODES: usize = 2;
/// So long the kernel writes back what paused programs left.
const PAUSE: Duration = Duration::from_millis(30);
const MODELS: [&str; 4] = ["posix", "commit", "session", "mpiio"];
const FLUSHES: [&str; 4] = ["end", "idle", "immediate", "close"];

/// Over all cuts, so that a run in which nothing happened is no success.
#[derive(Debug, Default)]
struct Total {
    operations: u64,
    syncs: u64,
    sectors_at_stake: usize,
    sectors_lost: usize,
    files_lost: usize,
    past_the_daemon: u64,
}

#[test]
fn what_was_synced_survives_the_power_of_the_whole_stack() {
    let Some(mut disk) = disk() else { return };
    let (first, cuts) = (random::seed(), amount("EBB_POWER_CUTS", 3));
    let mut total = Total::default();
    for seed in first..first + cuts {
        one_cut(&mut disk, seed, &mut total);
        disk.reset();
    }
    println!("{cuts} power cuts: {total:?}");
    assert!(
        total.syncs > 10 * cuts && total.sectors_at_stake > 0,
        "nothing was at stake: {total:?}"
    );
}

fn disk() -> Option<PowerDisk> {
    if skip_reason().is_some() {
        return None;
    }
    match PowerDisk::new(DISK_MIB) {
        Ok(disk) => Some(disk),
        Err(why) => {
            let is_root = rustix::process::geteuid().is_root();
            assert!(!is_root || std::env::var_os("EBB_REQUIRE_TOOLS").is_none(), "{why}");
            println!("SKIPPED: no disk that can lose its power: {why}");
            None
        }
    }
}

/// The judge of the judge: such a disk keeps what was synced and forgets what was only written.
#[test]
fn a_disk_without_power_forgets_what_was_not_flushed() {
    let Ok(mut disk) = PowerDisk::new(64) else { return println!("SKIPPED: no such disk here") };
    let (synced, written) = (disk.path().join("synced"), disk.path().join("written"));
    std::fs::write(&synced, vec![7; 300_000]).expect("write");
    std::fs::write(&written, vec![8; 300_000]).expect("write");
    for path in [&synced, &written] {
        std::fs::File::open(path).and_then(|file| file.sync_all()).expect("fsync");
    }
    let again = std::fs::File::options().write(true).open(&written).expect("open");
    again.write_all_at(&[9; 300_000], 0).expect("write");
    let wait = libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the descriptor is open; 0 and 0 stand for the whole file.
    let sent = unsafe { libc::sync_file_range(again.as_raw_fd(), 0, 0, wait) };
    assert_eq!(sent, 0, "it is on its way to the disk");
    disk.power_off();
    assert!(again.write_all_at(&[1], 400_000).and_then(|()| again.sync_all()).is_err());
    drop(again);
    let loss = disk.power_on(Cut::Nothing, 1);
    assert!(loss.lost >= 300_000 / 512 && loss.lost == loss.at_stake, "{loss:?}");
    assert_eq!(std::fs::read(&synced).expect("read"), vec![7; 300_000]);
    assert_eq!(std::fs::read(&written).expect("read"), vec![8; 300_000]);
}

struct Plan {
    model: &'static str,
    flush: &'static str,
    io_path: &'static str,
    cut: Cut,
    runs: Duration,
    /// The programs do nothing when it happens; else they are in the middle of something.
    pauses: bool,
}

impl Plan {
    fn new(dice: &mut ChaCha8Rng, seed: u64) -> Plan {
        let mut one = |of: &[&'static str]| *of.choose(dice).expect("never empty");
        let (model, flush, io_path) = (one(&MODELS), one(&FLUSHES), one(&["daemon", "auto"]));
        let runs = Duration::from_millis(dice.random_range(200..2_500));
        Plan {
            model,
            flush,
            io_path,
            cut: Cut::random(dice),
            runs,
            pauses: !seed.is_multiple_of(2),
        }
    }
}

/// A program, and what it says.
struct Program {
    child: Child,
    lines: JoinHandle<Vec<Line>>,
}

impl Program {
    fn stop(&self) {
        let pid = libc::pid_t::try_from(self.child.id()).expect("a process number");
        // SAFETY: a signal to a child that was not waited for.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
    }
}

fn one_cut(disk: &mut PowerDisk, seed: u64, total: &mut Total) {
    let mut dice = random::generator(seed);
    let plan = Plan::new(&mut dice, seed);
    let what = format!(
        "seed {seed}, {} --flush {} --io-path {}, {:?} after {:?}",
        plan.model, plan.flush, plan.io_path, plan.cut, plan.runs
    );
    println!("{what}");
    let mut cluster = start(&disk.path(), &plan);
    let programs: Vec<Program> = (0..NODES).map(|n| start_program(&cluster, n, seed)).collect();
    write_back(&disk.path(), plan.runs, &mut dice);
    total.past_the_daemon += past_the_daemon(&cluster);
    if plan.pauses {
        // Any fsync makes everything safe that was written before it.
        programs.iter().for_each(|program| program.stop());
        write_back(&disk.path(), PAUSE, &mut dice);
    }
    disk.power_off();
    let books: Vec<Books> = end_everything(&mut cluster, programs);
    let loss = disk.power_on(plan.cut, seed);
    begin_again(&mut cluster);
    let found = judge(&what, &cluster, &books);
    judge_drain(&what, &cluster, &found);
    drop(cluster);
    total.sectors_at_stake += loss.at_stake;
    total.sectors_lost += loss.lost;
    for (books, found) in books.iter().zip(&found) {
        total.operations += books.operations;
        total.syncs += books.syncs;
        total.files_lost += found.lost.len();
    }
}

/// Everything of a job is on the disk, but what is gone with its processes.
fn builder(disk: &Path, model: &str, flush: &str) -> Builder {
    Cluster::builder()
        .nodes(NODES)
        .separate_meta()
        .consistency(model)
        .flush(flush)
        .option("--request-timeout", "5s")
        .below("/dev/shm")
        .backing(disk.join("backing"))
        .caches_below(disk.join("caches"))
        .state(disk.join("state"))
}

fn start(disk: &Path, plan: &Plan) -> Cluster {
    let cluster = builder(disk, plan.model, plan.flush).option("--io-path", plan.io_path).start();
    for node in 0..NODES {
        let directory = cluster.node(node).path(format!("p{node}"));
        std::fs::create_dir(&directory).expect("a directory for the program");
        std::fs::File::open(directory).and_then(|d| d.sync_all()).expect("it is there for good");
    }
    cluster
}

fn start_program(cluster: &Cluster, node: usize, seed: u64) -> Program {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ebb-power-load"))
        .arg(cluster.node(node).path(format!("p{node}")))
        .arg(seed.wrapping_mul(10).wrapping_add(node as u64).to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program can be started");
    let out = BufReader::new(child.stdout.take().expect("it was piped"));
    let lines = std::thread::spawn(move || {
        let lines = out.lines().map_while(Result::ok);
        lines.map_while(|line| serde_json::from_str(&line).ok()).collect()
    });
    Program { child, lines }
}

/// Has the kernel write to the disk, as it does when it likes, and without a flush: otherwise hardly
/// anything would be on its way when the power goes.
fn write_back(disk: &Path, time: Duration, dice: &mut ChaCha8Rng) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        for path in files_below(disk) {
            if dice.random_bool(0.5) {
                continue;
            }
            // It may be gone by now.
            let Ok(file) = std::fs::File::open(path) else { continue };
            // SAFETY: the descriptor is open; 0 and 0 stand for the whole file.
            unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let Ok(list) = std::fs::read_dir(directory) else { return Vec::new() };
    let entries = list.flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// How many opens for writing went past the daemons.
fn past_the_daemon(cluster: &Cluster) -> u64 {
    let opens = |node: &Node| node.status()["opens"]["passthrough-write"].as_u64().unwrap_or(0);
    cluster.nodes().iter().map(opens).sum()
}

/// What the loss of power does to processes and mounts.
fn end_everything(cluster: &mut Cluster, programs: Vec<Program>) -> Vec<Books> {
    cluster.kill_meta();
    cluster.nodes().iter().filter(|node| node.pid().is_some()).for_each(Node::kill9);
    let books = programs.into_iter().map(|mut program| {
        let _ = program.child.kill();
        let _ = program.child.wait();
        let mut books = Books::default();
        program.lines.join().expect("the reader ends").iter().for_each(|line| books.read(line));
        books
    });
    let books = books.collect();
    for node in cluster.nodes() {
        assert!(mounts::clear(node.mountpoint()), "{} stays mounted", node.name());
    }
    let _ = std::fs::remove_dir_all(cluster.root().join("run"));
    books
}

/// The machine comes up: the same addresses, caches and state.
fn begin_again(cluster: &mut Cluster) {
    reboot::of_the_service(&cluster.meta_state().join("journal"));
    let journals = cluster.nodes().iter().map(|node| node.cache().join("journal"));
    // Who has left has none.
    journals.filter(|journal| journal.exists()).for_each(|journal| reboot::of_a_node(&journal));
    cluster.restart_meta();
    // At the same time, as a cluster's nodes do: whoever comes first waits for what the others know.
    std::thread::scope(|s| {
        for node in cluster.nodes() {
            s.spawn(|| node.mount());
        }
    });
}

/// Each program's files, on its own node.
fn judge(what: &str, cluster: &Cluster, books: &[Books]) -> Vec<Verdict> {
    let of = |(node, books): (usize, &Books)| {
        let directory = cluster.node(node).path(format!("p{node}"));
        books.judge(&format!("{what}, node {node}"), &directory)
    };
    books.iter().enumerate().map(of).collect()
}

/// What is on the disk, for who looks for what went wrong.
fn room(disk: &Path) -> String {
    let vfs = rustix::fs::statvfs(disk).expect("statvfs");
    let (free, inodes) = ((vfs.f_bavail * vfs.f_frsize) >> 20, vfs.f_favail);
    let used = Command::new("du").args(["-a", "-m", "-t", "1M"]).arg(disk).output().expect("du");
    format!("{free} MiB and {inodes} inodes are free; {}", String::from_utf8_lossy(&used.stdout))
}

/// Status 0 says that everything is on the backing; 3 names what is not. What could be read through
/// the mount is there in both cases.
fn judge_drain(what: &str, cluster: &Cluster, found: &[Verdict]) {
    for (n, (node, verdict)) in cluster.nodes().iter().zip(found).enumerate() {
        let output = node.ebb("drain", &[], &[]);
        let said = describe(&output);
        let wanted = if verdict.lost.is_empty() { 0 } else { 3 };
        let (lost, disk) = (&verdict.lost, cluster.backing().parent().expect("the disk"));
        assert_eq!(output.status.code(), Some(wanted), "{what}: {lost:?}: {said}{}", room(disk));
        for name in &verdict.lost {
            let path = format!("p{n}/{name}");
            assert!(said.contains(&path), "{what}: {path} is not named: {said}");
        }
    }
    for (n, verdict) in found.iter().enumerate() {
        for (name, bytes) in &verdict.whole {
            let path = cluster.backing().join(format!("p{n}")).join(name);
            let have = std::fs::read(&path).unwrap_or_else(|e| panic!("{what}: {path:?}: {e}"));
            ebb_tests::content::same(&format!("{what}: {}", path.display()), &have, bytes);
        }
    }
}
