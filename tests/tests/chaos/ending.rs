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

/// How `ebb` says what a program wrote to a file that it had open, past the daemon, when its daemon was dead and the
/// next one had begun: it could only be told. (docs/operations.md)
const WRITTEN_ON: &str = "(lost: a program went on writing after its daemon was dead and another one was \
                          mounted; see ";

/// Brings everything to the backing, but what programs wrote past dead daemons; how many files that was. These are
/// removed from what is kept aside, as `ebb` says.
///
/// # Panics
/// When anything else is not on the backing.
pub fn drain_but_late_writes(node: &Node) -> u64 {
    let output = node.ebb("drain", &[], &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    let missing = || said.lines().filter(|l| l.starts_with("  ") && !l.starts_with("  in all "));
    let kept: Vec<&str> = missing()
        .filter_map(|line| line.split_once(WRITTEN_ON)?.1.split_once(','))
        .map(|(path, _)| path)
        .collect();
    if output.status.code() != Some(3) || kept.is_empty() || kept.len() != missing().count() {
        assert!(output.status.success(), "{}: ebb drain: {}", node.name(), describe(&output));
        return 0;
    }
    println!("{}: {said}", node.name());
    for path in &kept {
        std::fs::remove_file(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
    node.drain();
    kept.len() as u64
}

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
