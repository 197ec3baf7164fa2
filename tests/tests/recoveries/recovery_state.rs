//! All daemons of a job are gone, with the service that was in the first of them, whose cache has its state:
//! `ebb recover` on each cache, at once or in turn, killed and repeated, brings everything, as it does without
//! the state, and what the state knows of names besides.

use ebb_testkit::{Cluster, Node, random, skip_reason};
use ebb_tests::content::same;
use ebb_tests::recoveries::{Way, daemons_die, ended_with, recover, run_and_kill, run_at_once};
use ebb_tests::tools::names;
use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const RECORD: usize = 3_000;
const NODES: usize = 3;
/// After this time what a node has heard of names is in its journal.
const NOTED_WITHIN: Duration = Duration::from_millis(1300);

fn rounds() -> u64 {
    std::env::var("EBB_RECOVERY_ROUNDS").ok().and_then(|v| v.parse().ok()).unwrap_or(4)
}

/// How the daemons are started.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Setting {
    Usual,
    Supervised,
    /// The kernel writes past the daemons where the model lets it.
    Past,
    Copies,
}

/// The service is in the first node.
fn cluster(model: &str, setting: Setting) -> Cluster {
    let builder = Cluster::builder().nodes(NODES).flush("end").fixed_port().consistency(model);
    match setting {
        Setting::Usual => builder,
        Setting::Supervised => builder.supervised(),
        Setting::Past => builder.option("--io-path", "auto"),
        Setting::Copies => builder.option("--replicas", "2"),
    }
    .start()
}

/// That it went the way that the setting says.
fn went(cluster: &Cluster, setting: Setting) {
    let status = |node: &Node| node.status();
    match setting {
        Setting::Usual => {}
        Setting::Supervised => assert!(status(cluster.node(0))["supervisor"].is_object()),
        Setting::Past => {
            let past = |node| status(node)["opens"]["passthrough-write"].as_u64().unwrap_or(0);
            assert!(
                cluster.nodes().iter().map(past).sum::<u64>() > 0,
                "nothing went past a daemon"
            );
        }
        Setting::Copies => {
            let copied = |node| status(node)["copies"]["copied_bytes"].as_u64().unwrap_or(0);
            assert!(cluster.nodes().iter().map(copied).sum::<u64>() > 0, "nothing was copied");
        }
    }
}

/// A file of all nodes, and names of which one node made what another one changed.
fn work(cluster: &Cluster, dice: &mut ChaCha8Rng) -> Vec<u8> {
    let nodes = cluster.nodes();
    let records = NODES * dice.random_range(2..9);
    let short = dice.random_range(0..RECORD);
    let content = random::bytes(dice, records * RECORD - short);
    for (at, node) in nodes.iter().enumerate() {
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).open(node.path("f"));
        let file = file.expect("open");
        for (i, record) in content.chunks(RECORD).enumerate().filter(|(i, _)| i % NODES == at) {
            file.write_all_at(record, (i * RECORD) as u64).expect("write");
        }
    }
    let [first, second, third] = nodes else { panic!("three nodes") };
    std::fs::create_dir(second.path("d")).expect("mkdir");
    std::fs::write(third.path("d/from"), "third").expect("write");
    std::fs::write(third.path("d/gone"), "nothing").expect("write");
    std::fs::write(first.path("d/first"), "first").expect("write");
    second.path("d/from").exists().then_some(()).expect("it is there");
    std::fs::rename(second.path("d/from"), second.path("d/to")).expect("rename");
    std::fs::rename(third.path("d"), third.path("e")).expect("rename");
    std::fs::remove_file(second.path("e/gone")).expect("unlink");
    std::os::unix::fs::symlink("to", first.path("e/link")).expect("symlink");
    content
}

fn run_all(cluster: &Cluster, way: Way, dice: &mut ChaCha8Rng) {
    let mut order: Vec<&Node> = cluster.nodes().iter().collect();
    order.shuffle(dice);
    match way {
        Way::InTurn => {}
        Way::AtOnce => {
            run_at_once(cluster, &order).iter().for_each(|ended| ended_with(ended, 0, &[]));
        }
        Way::Killed => run_and_kill(cluster, &order, dice),
    }
    for (i, node) in order.iter().enumerate() {
        let output = recover(cluster, node, &["--wait", "0s"]);
        if i + 1 == order.len() || way == Way::AtOnce {
            ended_with(&output, 0, &[]);
        }
    }
    // Who was told that others were missing: by now they are not.
    for node in order {
        ended_with(&recover(cluster, node, &["--wait", "0s"]), 0, &[]);
        ended_with(&recover(cluster, node, &["--dry-run"]), 0, &["nothing"]);
    }
}

#[test]
fn recoveries_of_all_caches_bring_everything_also_where_the_state_is() {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    for round in 0..rounds() {
        let mut dice = random::generator(seed ^ round);
        let model = ["session", "commit", "posix"][dice.random_range(0..3)];
        // Each of them, however few rounds there are.
        let way = [Way::AtOnce, Way::InTurn, Way::Killed, Way::AtOnce][round as usize % 4];
        let settings = [Setting::Usual, Setting::Supervised, Setting::Past, Setting::Copies];
        let setting = settings[(seed.wrapping_add(round) % 4) as usize];
        println!("seed {seed} round {round}: {model}, {way:?}, {setting:?}");
        let cluster = cluster(model, setting);
        let content = work(&cluster, &mut dice);
        went(&cluster, setting);
        if way != Way::AtOnce {
            // What only the state knows is told to those that are recovered at the same time.
            std::thread::sleep(NOTED_WITHIN);
        }
        daemons_die(&cluster);
        run_all(&cluster, way, &mut dice);
        let read = |name: &str| std::fs::read(cluster.backing().join(name)).expect(name);
        same(&format!("seed {seed} round {round} {way:?}"), &read("f"), &content);
        assert_eq!(names(cluster.backing()), ["e", "f"], "seed {seed} round {round}");
        assert_eq!(names(&cluster.backing().join("e")), ["first", "link", "to"]);
        assert_eq!((read("e/to"), read("e/first")), (b"third".to_vec(), b"first".to_vec()));
    }
}

/// Of a job of which only one node is left the service itself brings everything.
#[test]
fn a_node_that_was_left_alone_is_recovered_with_the_service() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster("session", Setting::Usual);
    let [first, second, third] = cluster.nodes() else { panic!("three nodes") };
    std::fs::write(second.path("second"), "second").expect("write");
    second.umount();
    third.umount();
    std::fs::write(first.path("first"), "first").expect("write");
    std::fs::rename(first.path("second"), first.path("2")).expect("rename");
    first.kill9();
    let _ = first.ebb("umount", &[], &[]);
    ended_with(&recover(&cluster, first, &[]), 0, &[]);
    assert_eq!(names(cluster.backing()), ["2", "first"], "and no board of recoveries");
}
