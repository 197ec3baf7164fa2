//! All nodes of a job and its service are gone, after they wrote to one file and changed its length,
//! each what the others had: what recoveries bring is what was there, or they say what is missing.

use ebb_testkit::{Cluster, Node, random, skip_reason};
use ebb_tests::content::same;
use ebb_tests::recoveries::{all_die, ended_with, recover, said, start};
use ebb_tests::tools::amount;
use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Output};
use std::time::Duration;

/// No byte is behind this.
const LEN_MAX: usize = 20_000;

/// What a run did, so that a test can show that it was what its name says.
#[derive(Debug, Default)]
struct Seen {
    cuts_below_others: u64,
    extensions: u64,
    drains: u64,
    whole: u64,
    told: u64,
}

/// The file as everybody sees it, and who wrote which bytes last; 0: nobody.
struct Model {
    bytes: Vec<u8>,
    whose: Vec<usize>,
}

impl Model {
    fn write(&mut self, who: usize, at: usize, data: &[u8]) {
        let end = at + data.len();
        self.set_len(self.bytes.len().max(end));
        self.bytes[at..end].copy_from_slice(data);
        self.whose[at..end].fill(who + 1);
    }

    fn set_len(&mut self, len: usize) {
        self.bytes.resize(len, 0);
        self.whose.resize(len, 0);
    }

    fn has_holes(&self) -> bool {
        self.whose.contains(&0)
    }
}

fn change(
    cluster: &Cluster,
    files: &[File],
    model: &mut Model,
    seen: &mut Seen,
    dice: &mut ChaCha8Rng,
) {
    let who = dice.random_range(0..files.len());
    match dice.random_range(0..12) {
        0..6 => {
            let at = dice.random_range(0..LEN_MAX);
            let len = dice.random_range(1..=(LEN_MAX - at).min(6_000));
            let data = random::bytes(dice, len);
            files[who].write_all_at(&data, at as u64).expect("write");
            model.write(who, at, &data);
        }
        6..11 => {
            // Mostly shorter: what is longer has holes, of which only a service can tell.
            let most = if dice.random_bool(0.8) { model.bytes.len() } else { LEN_MAX };
            let len = dice.random_range(0..=most);
            files[who].set_len(len as u64).expect("a length");
            let others = model.whose.iter().skip(len).any(|w| *w != 0 && *w != who + 1);
            seen.cuts_below_others += u64::from(others);
            seen.extensions += u64::from(len > model.bytes.len());
            model.set_len(len);
        }
        _ => {
            let _ = cluster.node(who).ebb("drain", &[], &[]);
            seen.drains += 1;
        }
    }
    files[who].sync_all().expect("fsync");
}

/// Names are in the node's journal on disk.
fn sync(node: &Node) {
    File::open(node.mountpoint()).and_then(|dir| dir.sync_all()).expect("fsync of a directory");
}

/// All of them run, at once or in turn; what they ended with at last.
fn run_all(cluster: &Cluster, dice: &mut ChaCha8Rng) -> Vec<Output> {
    let mut order: Vec<&Node> = cluster.nodes().iter().collect();
    order.shuffle(dice);
    if dice.random_bool(0.5) {
        let running: Vec<Child> = order.iter().map(|n| start(cluster, n)).collect();
        running.into_iter().for_each(|c| drop(c.wait_with_output().expect("wait")));
    } else {
        order.iter().for_each(|n| drop(recover(cluster, n, &["--wait", "0s"])));
    }
    // Whoever was first was told that others were missing; in turn twice, perhaps.
    order.iter().for_each(|n| drop(recover(cluster, n, &["--wait", "0s"])));
    order.iter().map(|n| recover(cluster, n, &["--wait", "0s"])).collect()
}

#[test]
fn what_nodes_wrote_and_cut_comes_back_or_is_told() {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let mut seen = Seen::default();
    for round in 0..amount("EBB_RECOVERY_ROUNDS", 12) {
        let seed = seed.wrapping_add(round);
        let mut dice = random::generator(seed);
        let nodes = dice.random_range(0..3usize).max(1) + usize::from(dice.random_bool(0.7));
        let mut cluster = Cluster::builder()
            .nodes(nodes)
            .separate_meta()
            .flush("end")
            .consistency("posix")
            .start();
        let files: Vec<File> = cluster.nodes().iter().map(open).collect();
        let mut model = Model { bytes: Vec::new(), whose: Vec::new() };
        let drains = seen.drains;
        for _ in 0..dice.random_range(2..10) {
            change(&cluster, &files, &mut model, &mut seen, &mut dice);
        }
        drop(files);
        cluster.nodes().iter().for_each(sync);
        all_die(&mut cluster);
        let ended = run_all(&cluster, &mut dice);
        let what = format!("seed {seed}, {nodes} node(s), holes: {}", model.has_holes());
        let all: String = ended.iter().map(said).collect();
        if ended.iter().all(|o| o.status.code() == Some(0)) {
            let got = std::fs::read(cluster.backing().join("f"))
                .unwrap_or_else(|e| panic!("{what}: {e}\n{all}"));
            same(&what, &got, &model.bytes);
            seen.whole += 1;
        } else {
            // The service alone knew that nobody had written there, or that it had made the file.
            let holes = model.has_holes() && all.contains("waiting for bytes");
            let made = seen.drains > drains && all.contains("something else has this name");
            assert!(holes || made, "{what}\n{all}");
            seen.told += 1;
        }
    }
    println!("{seen:?}");
    assert!(seen.cuts_below_others > 0 && seen.extensions > 0 && seen.whole > 0, "{seen:?}");
}

/// A file of which node 0 has bytes in its cache that node 1 has superseded since: node 0 has not heard of
/// that before all die. Recovered one after the other, whichever is first.
fn is_superseded(supersede: impl Fn(&Node), wanted: &[u8]) {
    if skip_reason().is_some() {
        return;
    }
    let default = [(false, 0), (false, 1), (true, 0), (true, 1)]
        .map(|(placed, first)| ("", "", placed, first));
    let others = [
        ("--io-path", "auto", false, 0),
        ("--io-path", "auto", false, 1),
        ("--cache-size", "64MiB", false, 0),
        ("--replicas", "2", false, 0),
        ("--replicas", "2", true, 1),
    ];
    for (option, value, on_the_backing, first) in default.into_iter().chain(others) {
        let builder = Cluster::builder().nodes(2).separate_meta().flush("end").consistency("posix");
        let builder = if option.is_empty() { builder } else { builder.option(option, value) };
        let mut cluster = builder.start();
        if on_the_backing {
            std::fs::write(cluster.backing().join("f"), vec![1; 13_000]).expect("write");
        }
        let (a, b) = (cluster.node(0), cluster.node(1));
        if option == "--replicas" {
            a.wait_status(Duration::from_secs(20), |s| !s["copies"]["partner"].is_null());
        }
        let file = open(a);
        file.write_all_at(&[7; 13_000], 0).expect("write");
        file.sync_all().expect("fsync");
        let what =
            format!("{option} {value}, on the backing before: {on_the_backing}, first: {first}");
        went_its_way(a, option, &what);
        drop(file);
        supersede(b);
        cluster.nodes().iter().for_each(sync);
        all_die(&mut cluster);
        let early = recover(&cluster, cluster.node(first), &["--wait", "0s"]);
        println!("{what}: {}", said(&early));
        for node in [1 - first, first] {
            ended_with(&recover(&cluster, cluster.node(node), &["--wait", "0s"]), 0, &[]);
        }
        same(&what, &std::fs::read(cluster.backing().join("f")).expect("the file"), wanted);
    }
}

/// The node works in the way that the option asks for, where it can here.
fn went_its_way(node: &Node, option: &str, what: &str) {
    let status = node.status();
    match option {
        "--io-path" if status["io_path_obstacle"].is_null() => {
            let past = status["opens"]["passthrough-write"].as_u64();
            assert!(past > Some(0), "{what}: {}", status["opens"]);
        }
        "--replicas" => {
            assert!(
                status["copies"]["copied_bytes"].as_u64() > Some(0),
                "{what}: {}",
                status["copies"]
            );
        }
        _ => {}
    }
}

fn open(node: &Node) -> File {
    let mut options = File::options();
    options.write(true).create(true).truncate(false).open(node.path("f")).expect("open")
}

#[test]
fn bytes_that_another_node_cut_off_stay_away() {
    is_superseded(
        |node| {
            let file = open(node);
            file.set_len(100).expect("cut");
            file.sync_all().expect("fsync");
        },
        &[7; 100],
    );
}

#[test]
fn bytes_of_a_file_that_another_node_made_empty_stay_away() {
    let cut = |node: &Node| {
        let file = File::options().write(true).truncate(true).open(node.path("f"));
        file.and_then(|f| f.sync_all()).expect("fsync");
    };
    is_superseded(cut, &[]);
}

#[test]
fn bytes_of_a_file_that_another_node_wrote_anew_stay_away() {
    let anew = |node: &Node| {
        for len in [500, 600] {
            std::fs::write(node.path("f"), vec![9; len]).expect("write");
            let _ = node.ebb("drain", &[], &[]);
        }
    };
    is_superseded(anew, &[9; 600]);
}

#[test]
fn bytes_that_another_node_wrote_over_and_flushed_stay_away() {
    let over = |node: &Node| {
        for _ in 0..2 {
            let file = open(node);
            file.write_all_at(&[9; 13_000], 0).expect("write");
            file.sync_all().expect("fsync");
            drop(file);
            let _ = node.ebb("drain", &[], &[]);
        }
    };
    is_superseded(over, &[9; 13_000]);
}

/// The daemon that goes on for a killed one holds nothing of the file, but the cut.
#[test]
fn bytes_that_a_dead_daemon_cut_off_stay_away() {
    let cut = |node: &Node| {
        let file = File::options().write(true).truncate(true).open(node.path("f"));
        file.and_then(|f| f.sync_all()).expect("fsync");
        node.kill9();
        let _ = node.ebb("umount", &[], &[]);
        node.mount();
    };
    is_superseded(cut, &[]);
}
