//! kill -9 of daemons at random moments while a program writes, under each model and flush
//! policy: after a new mount, or `ebb recover`, every acknowledged byte is there and nothing
//! stale is. `EBB_KILL_ROUNDS` rounds in all (25), `EBB_SEED` repeats the operations; the moment
//! of the kill is a matter of the machine.

use ebb_testkit::{Cluster, Node, describe, random, skip_reason};
use ebb_tests::content;
use ebb_tests::crash::{Expected, Files};
use ebb_tests::model::{Model, close};
use ebb_tests::tools::amount;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const FILE_BYTES: u64 = 192 << 10;
const FILES: usize = 5;

/// A program that writes: one operation after the other until one fails.
struct Writer<'a> {
    model: Model,
    root: &'a Path,
    files: &'a mut Files,
    dice: &'a mut ChaCha8Rng,
    round: u64,
    operations: u64,
}

impl Writer<'_> {
    fn run(&mut self) {
        while self.session().is_ok() {}
    }

    /// Opens a file, writes to it, publishes.
    fn session(&mut self) -> io::Result<()> {
        let name = format!("d/file-{}", self.dice.random_range(0..FILES));
        let path = self.root.join(&name);
        let append = self.dice.random_bool(0.2);
        let mut options = File::options();
        options.read(true).write(true).create(true).append(append);
        let file = options.open(&path)?;
        let mut expected = self.files.remove(&name).unwrap_or_default();
        let done = self.write(&file, &mut expected, append);
        let done = done.and_then(|()| close(file));
        if done.is_ok() && self.model == Model::Session {
            expected.acknowledge_all();
        }
        self.files.insert(name, expected);
        done
    }

    fn write(&mut self, file: &File, expected: &mut Expected, append: bool) -> io::Result<()> {
        for _ in 0..self.dice.random_range(1..8) {
            self.operations += 1;
            if self.dice.random_bool(0.04) {
                let len = self.dice.random_range(0..=expected.len());
                expected.cut(len);
                file.set_len(len)?;
                expected.acknowledge_cut(len);
                continue;
            }
            let len = self.dice.random_range(1..20_000u64);
            let offset = match append {
                true => expected.len(),
                false => self.dice.random_range(0..FILE_BYTES),
            };
            let data = content::bytes(self.round % 200, self.operations, offset, len);
            expected.write(offset, &data);
            // With O_APPEND the kernel chooses the place, which is the same here.
            file.write_all_at(&data, offset)?;
            if self.model == Model::Posix {
                expected.acknowledge(offset, len);
            }
            if matches!(self.model, Model::Commit | Model::Mpiio | Model::Romio)
                && self.dice.random_bool(0.5)
            {
                file.sync_all()?;
                expected.acknowledge_all();
            }
        }
        Ok(())
    }
}

fn settle(what: &str, root: &Path, files: &mut Files) {
    for (name, expected) in files {
        let got = match std::fs::read(root.join(name)) {
            // Its creation may have been what failed.
            Err(e) if e.kind() == io::ErrorKind::NotFound && expected.is_empty() => continue,
            got => got.unwrap_or_else(|e| panic!("{what}: {name}: {e}")),
        };
        expected.settle(&format!("{what}: {name}"), &got);
    }
}

/// As a program does whose truncate was not answered.
fn repeat_cuts(root: &Path, files: &mut Files) {
    for (name, expected) in files {
        if let Some(len) = expected.unanswered_cut() {
            let file = File::options().write(true).open(root.join(name)).expect("open");
            file.set_len(len).expect("truncate");
            expected.acknowledge_cut(len);
        }
    }
}

/// Writes until the daemon is killed.
fn killed_while_writing(node: &Node, writer: &mut Writer<'_>, wait: Duration) {
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(wait);
            node.kill9();
        });
        writer.run();
    });
}

fn clear_dead_mount(node: &Node) {
    let output = node.ebb("umount", &[], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
}

fn recover(cluster: &Cluster, node: &Node) {
    let mut command = cluster.ebb();
    command.arg("recover").arg(node.cache()).arg("--backing").arg(cluster.backing());
    let output = command.output().expect("ebb can be started");
    assert!(output.status.success(), "recover: {}", describe(&output));
}

fn rounds(model: Model, flush: &str, more: &[(&str, &str)]) {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let mut builder = Cluster::builder().consistency(model.name()).flush(flush);
    for (name, value) in more {
        builder = builder.option(name, value);
    }
    let cluster = builder.start();
    let node = cluster.node(0);
    let mut dice = random::generator(seed);
    let mut files = Files::default();
    std::fs::create_dir(node.path("d")).expect("mkdir");
    let mut operations = 0;
    for round in 1..=amount("EBB_KILL_ROUNDS", 25).div_ceil(4) {
        let what = format!("seed {seed}, {} {flush}, round {round}", model.name());
        let wait = Duration::from_millis(dice.random_range(1..400));
        let root = node.mountpoint();
        let mut writer =
            Writer { model, root, files: &mut files, dice: &mut dice, round, operations: 0 };
        killed_while_writing(node, &mut writer, wait);
        operations += writer.operations;
        clear_dead_mount(node);
        if round % 3 == 0 {
            recover(&cluster, node);
            settle(&format!("{what}, recovered"), cluster.backing(), &mut files);
        }
        node.mount();
        settle(&what, node.mountpoint(), &mut files);
        repeat_cuts(node.mountpoint(), &mut files);
    }
    assert!(operations > 0, "nothing was ever written");
    node.umount();
    settle(&format!("seed {seed}, drained"), cluster.backing(), &mut files);
    assert!(!node.cache().join("journal").exists(), "a journal is left");
}

#[test]
fn posix_writes_survive_kills() {
    rounds(Model::Posix, "immediate", &[]);
}

#[test]
fn commits_survive_kills() {
    rounds(Model::Commit, "end", &[("--durability", "local")]);
}

#[test]
fn sessions_survive_kills() {
    rounds(Model::Session, "close", &[("--durability", "none")]);
}

#[test]
fn mpiio_syncs_survive_kills_with_a_small_buffer() {
    rounds(Model::Mpiio, "idle", &[("--wait-interval", "50ms"), ("--cache-size", "400KiB")]);
}
