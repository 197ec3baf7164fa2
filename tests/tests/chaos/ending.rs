//! The end of a cluster of which nothing is left but the caches.

use ebb_testkit::{Cluster, Node, describe};
use ebb_tests::recoveries::{all_die, recover, start};
use std::process::{Child, Command, Output};
use std::thread::sleep;
use std::time::Duration;

/// What was in the last second before the end may be missing (docs/operations.md).
const KEPT_AFTER: Duration = Duration::from_millis(1_500);
/// Whoever was first may have to wait for what the others bring, and is run again.
const ROUNDS: usize = 3;

/// Kills everything, and brings all caches to the backing at the same time: how many there were, and
/// how many say to the end that something is missing. What is there the programs judge; a service that died
/// between the end of a flush and its word to the node leaves a node that calls flushed bytes lost
/// (docs/testing.md, seed 124).
///
/// # Panics
/// When one of them ends with anything else.
pub fn recover_side_by_side(cluster: &mut Cluster, what: &str) -> (u64, u64) {
    sleep(KEPT_AFTER);
    all_die(cluster);
    // A cache that holds nothing is none.
    let left = |node: &&Node| node.cache().join("journal").exists();
    let nodes: Vec<&Node> = cluster.nodes().iter().filter(left).collect();
    let running: Vec<Child> = nodes.iter().map(|node| start(cluster, node)).collect();
    for child in running {
        let ended = child.wait_with_output().expect("a recovery");
        let code = ended.status.code();
        assert!(matches!(code, Some(0 | 3)), "{what}: ebb recover: {}", describe(&ended));
    }
    let mut unfinished: Vec<(&Node, Output)> = Vec::new();
    for _ in 0..ROUNDS {
        let again = nodes.iter().map(|node| (*node, recover(cluster, node, &["--wait", "0s"])));
        unfinished = again.filter(|(_, ended)| !ended.status.success()).collect();
        if unfinished.is_empty() {
            break;
        }
    }
    for (node, ended) in &unfinished {
        println!("{what}: {}: {}", node.name(), describe(ended));
    }
    if !unfinished.is_empty() && std::env::var_os("EBB_TEST_KEEP").is_some() {
        keep(cluster, &nodes);
    }
    (nodes.len() as u64, unfinished.len() as u64)
}

/// What recoveries left, to be looked at: the disks of caches go with the test.
fn keep(cluster: &Cluster, nodes: &[&Node]) {
    let kept = tempfile::Builder::new().prefix("ebb-unfinished-").tempdir().expect("a directory");
    let kept = kept.keep();
    let copies = nodes.iter().map(|node| (node.cache().to_owned(), kept.join(node.name())));
    for (from, to) in copies.chain([(cluster.backing().to_owned(), kept.join("backing"))]) {
        let copied = Command::new("cp").arg("-a").args([from, to]).status();
        assert!(copied.expect("cp can be started").success());
    }
    println!("what {} recoveries left is in {}", nodes.len(), kept.display());
}
