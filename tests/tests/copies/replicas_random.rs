//! `--replicas 2` under load: programs on every node; at random moments one node is killed, mostly
//! with its cache deleted, sometimes with its cache kept. Programs on the other nodes go on without an error, and every acknowledged byte of all of
//! them is there: on a new mount of the lost node, on another node, and on the backing.
//! `EBB_REPLICA_LOSSES` losses in all (12), `EBB_SEED` repeats the operations; the moments are a
//! matter of the machine.

use ebb_testkit::{Cluster, Node, describe, random, skip_reason};
use ebb_tests::copies;
use ebb_tests::load::{Load, Mix, Order, Setup, all_right};
use ebb_tests::model::Model;
use ebb_tests::tools::amount;
use rand::Rng;
use std::path::Path;
use std::time::{Duration, Instant};

/// For everything that a program does until it answers.
const ANSWER_MAX: Duration = Duration::from_secs(90);
/// Until every unflushed byte has a copy again.
const WHOLE_MAX: Duration = Duration::from_secs(40);

fn start_loads(cluster: &Cluster, model: Model, mix: Mix, seed: u64) -> Vec<Load> {
    let nodes = cluster.nodes().len();
    let setup = |who: usize| Setup {
        model,
        mix,
        seed,
        who: who as u64,
        of: nodes as u64,
        root: cluster.node(who).mountpoint().to_owned(),
        elsewhere: cluster.node((who + 1) % nodes).mountpoint().to_owned(),
        blocks: 0,
        log: std::env::temp_dir().join(format!("ebb-replicas-{seed}-{}-{who}", model.name())),
        extra: ebb_tests::load::Extra::default(),
    };
    let binary = Path::new(env!("CARGO_BIN_EXE_ebb-load"));
    (0..nodes).map(|who| Load::start(binary, setup(who))).collect()
}

fn is_whole(cluster: &Cluster) -> bool {
    copies::is_whole(&cluster.nodes().iter().map(Node::status).collect::<Vec<_>>())
}

fn wait_until_whole(cluster: &Cluster, what: &str) {
    let end = Instant::now() + WHOLE_MAX;
    while !is_whole(cluster) {
        if Instant::now() > end {
            let copies: Vec<_> =
                cluster.nodes().iter().map(|n| n.status()["copies"].clone()).collect();
            panic!("{what}: still not whole: {copies:#?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What happens to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    WithItsCache,
    CacheKept,
}

fn lose(node: &Node, loss: Loss) {
    node.kill9();
    if loss == Loss::WithItsCache {
        std::fs::remove_dir_all(node.cache()).expect("its cache goes too");
    }
}

fn mount_again(node: &Node) {
    let output = node.ebb("umount", &["--no-drain"], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
    node.mount();
}

fn rounds(nodes: usize, model: Model, flush: &str, mix: Mix) {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let cluster = Cluster::builder()
        .nodes(nodes)
        .consistency(model.name())
        .flush(flush)
        .option("--replicas", "2")
        .option("--request-timeout", "5s")
        .separate_meta()
        .below("/dev/shm")
        .start();
    let mut dice = random::generator(seed);
    let mut loads = start_loads(&cluster, model, mix, seed);
    let (mut operations, mut adopted) = (0, 0);
    let losses = amount("EBB_REPLICA_LOSSES", 12).div_ceil(4);
    for round in 1..=losses {
        wait_until_whole(&cluster, &format!("seed {seed}, before round {round}"));
        let lost = dice.random_range(0..nodes);
        let loss = if dice.random_bool(0.75) { Loss::WithItsCache } else { Loss::CacheKept };
        let what = format!("seed {seed}, {} {flush}, round {round}, {loss:?}", model.name());
        loads.iter_mut().for_each(|load| load.tell(&Order::Go { round }));
        std::thread::sleep(Duration::from_millis(dice.random_range(20..600)));
        lose(cluster.node(lost), loss);
        std::thread::sleep(Duration::from_millis(dice.random_range(0..800)));
        loads.iter_mut().for_each(|load| load.tell(&Order::Pause));
        for (node, load) in loads.iter().enumerate() {
            let work = load.paused(ANSWER_MAX);
            assert!(node == lost || work.failure.is_none(), "{what}: node {node}: {work:?}");
            operations += work.operations;
        }
        mount_again(cluster.node(lost));
        // What it was just publishing may come from its partner until then.
        wait_until_whole(&cluster, &what);
        all_right(&mut loads, ANSWER_MAX, |_| Order::Settle(what.clone()));
        all_right(&mut loads, ANSWER_MAX, |setup| Order::Compare {
            what: format!("{what}, on the next node"),
            root: setup.elsewhere.clone(),
        });
        let of = |n: &Node| n.status()["copies"]["adopted_bytes"].as_u64().unwrap_or(0);
        adopted += cluster.nodes().iter().map(of).max().unwrap_or(0);
    }
    wait_until_whole(&cluster, &format!("seed {seed}, at the end"));
    cluster.umount_all();
    all_right(&mut loads, ANSWER_MAX, |_| Order::Compare {
        what: format!("seed {seed}, drained"),
        root: cluster.backing().to_owned(),
    });
    println!("{} {flush}: {losses} losses, {operations} operations, seed {seed}", model.name());
    assert!(operations > losses && (losses < 3 || flush != "end" || adopted > 0), "{adopted}");
}

#[test]
fn posix_loses_nothing_with_a_node() {
    rounds(3, Model::Posix, "immediate", Mix::All);
}

#[test]
fn commit_loses_nothing_with_a_node() {
    rounds(3, Model::Commit, "end", Mix::All);
}

#[test]
fn session_loses_nothing_with_a_node() {
    rounds(4, Model::Session, "end", Mix::All);
}

#[test]
fn mpiio_loses_nothing_with_a_node() {
    rounds(2, Model::Mpiio, "close", Mix::All);
}
