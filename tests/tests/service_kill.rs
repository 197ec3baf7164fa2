//! kill -9 of the metadata service at random moments while programs on several nodes write, under
//! each model: they wait and go on when it is back, and no acknowledged byte is lost or wrong.
//! Now and then a daemon is killed too. `EBB_SERVICE_KILLS` kills in all (12), `EBB_SEED` repeats
//! the operations; the moments of the kills are a matter of the machine.

use ebb_testkit::{Cluster, Node, describe, random, skip_reason};
use ebb_tests::content;
use ebb_tests::crash::{Expected, Files};
use ebb_tests::model::{Model, close};
use ebb_tests::tools::amount;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const NODES: usize = 2;
const FILES: usize = 3;
const FILE_BYTES: u64 = 96 << 10;
/// In each so many rounds the daemon of the first node dies too.
const DAEMON_KILLED_EVERY: u64 = 3;
/// An operation over a restart of the service may take so long, and not longer.
const OPERATION_MAX: Duration = Duration::from_secs(25);

/// A program on one node, with files of its own.
struct Program {
    model: Model,
    node: usize,
    files: Files,
    dice: ChaCha8Rng,
    round: u64,
    operations: u64,
}

impl Program {
    fn new(model: Model, node: usize, seed: u64) -> Program {
        let dice = ChaCha8Rng::seed_from_u64(seed ^ node as u64);
        Program { model, node, files: Files::default(), dice, round: 0, operations: 0 }
    }

    /// Until it is told to stop, or an operation fails.
    fn run(&mut self, root: &Path, stop: &AtomicBool) -> io::Result<()> {
        self.round += 1;
        while !stop.load(Ordering::Relaxed) {
            let start = Instant::now();
            self.session(root)?;
            let time = start.elapsed();
            assert!(time < OPERATION_MAX, "node {}: {time:?} for one session", self.node);
        }
        Ok(())
    }

    fn session(&mut self, root: &Path) -> io::Result<()> {
        let name = format!("n{}-{}", self.node, self.dice.random_range(0..FILES));
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false);
        let file = file.open(root.join(&name))?;
        let mut expected = self.files.remove(&name).unwrap_or_default();
        let done = self.write(&file, &mut expected).and_then(|()| close(file));
        // Under every model a close that succeeded has published everything.
        if done.is_ok() {
            expected.acknowledge_all();
        }
        self.files.insert(name, expected);
        done
    }

    fn write(&mut self, file: &File, expected: &mut Expected) -> io::Result<()> {
        for _ in 0..self.dice.random_range(1..6) {
            self.operations += 1;
            let len = self.dice.random_range(1..9_000u64);
            let offset = self.dice.random_range(0..FILE_BYTES);
            let data = content::bytes(self.round % 200, self.operations, offset, len);
            expected.write(offset, &data);
            file.write_all_at(&data, offset)?;
            if self.model == Model::Posix {
                expected.acknowledge(offset, len);
            }
            if matches!(self.model, Model::Commit | Model::Mpiio) && self.dice.random_bool(0.4) {
                file.sync_all()?;
                expected.acknowledge_all();
            }
        }
        Ok(())
    }

    fn settle(&mut self, what: &str, root: &Path) {
        for (name, expected) in &mut self.files {
            let got = match std::fs::read(root.join(name)) {
                Err(e) if e.kind() == io::ErrorKind::NotFound && expected.is_empty() => continue,
                got => got.unwrap_or_else(|e| panic!("{what}: {name}: {e}")),
            };
            expected.settle(&format!("{what}: {name}"), &got);
        }
    }
}

fn mount_again(node: &Node) {
    let output = node.ebb("umount", &[], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
    node.mount();
}

fn rounds(model: Model, flush: &str) {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let mut cluster = Cluster::builder()
        .nodes(NODES)
        .consistency(model.name())
        .flush(flush)
        .option("--request-timeout", "20s")
        .separate_meta()
        // A killed service is gone when its last fsync is, which a busy disk can make long.
        .below("/dev/shm")
        .start();
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    let mut programs: Vec<Program> = (0..NODES).map(|n| Program::new(model, n, seed)).collect();
    let roots: Vec<_> = cluster.nodes().iter().map(|n| n.mountpoint().to_owned()).collect();
    let kills = amount("EBB_SERVICE_KILLS", 12).div_ceil(4);
    for round in 1..=kills {
        let what = format!("seed {seed}, {} {flush}, kill {round}", model.name());
        let stop = AtomicBool::new(false);
        let kills_daemon = round % DAEMON_KILLED_EVERY == 0;
        let ended: Vec<io::Result<()>> = std::thread::scope(|s| {
            let stop = &stop;
            let programs = programs.iter_mut().zip(&roots);
            let running: Vec<_> =
                programs.map(|(p, root)| s.spawn(move || p.run(root, stop))).collect();
            std::thread::sleep(Duration::from_millis(dice.random_range(20..500)));
            cluster.kill_meta();
            std::thread::sleep(Duration::from_millis(dice.random_range(0..400)));
            if kills_daemon {
                cluster.node(0).kill9();
            }
            cluster.restart_meta();
            std::thread::sleep(Duration::from_millis(dice.random_range(100..600)));
            stop.store(true, Ordering::Relaxed);
            running.into_iter().map(|r| r.join().expect("a program does not panic")).collect()
        });
        for (node, result) in ended.iter().enumerate() {
            let may_fail = kills_daemon && node == 0;
            assert!(may_fail || result.is_ok(), "{what}: node {node}: {result:?}");
        }
        if kills_daemon {
            mount_again(cluster.node(0));
        }
        for (program, root) in programs.iter_mut().zip(&roots) {
            program.settle(&what, root);
        }
        // What is published on one node is what the other one reads. A daemon that was killed
        // may have brought back bytes that were never published: only its own node sees those.
        for program in programs.iter_mut().filter(|p| p.node > 0 || round < DAEMON_KILLED_EVERY) {
            program.settle(&format!("{what}, read elsewhere"), &roots[(program.node + 1) % NODES]);
        }
    }
    let operations: u64 = programs.iter().map(|p| p.operations).sum();
    assert!(operations > 0, "nothing was ever written");
    cluster.umount_all();
    for program in &mut programs {
        program.settle(&format!("seed {seed}, drained"), cluster.backing());
    }
    println!("{} {flush}: {kills} kills, {operations} writes, seed {seed}", model.name());
}

#[test]
fn posix_goes_on_over_killed_services() {
    rounds(Model::Posix, "immediate");
}

#[test]
fn commit_goes_on_over_killed_services() {
    rounds(Model::Commit, "close");
}

#[test]
fn session_goes_on_over_killed_services() {
    rounds(Model::Session, "end");
}

#[test]
fn mpiio_goes_on_over_killed_services() {
    rounds(Model::Mpiio, "idle");
}
