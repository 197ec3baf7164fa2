//! `ebb recover` on the caches of a job of which nothing else is left.

use ebb_testkit::{Cluster, Node, describe};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// How recoveries run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// All at the same time.
    AtOnce,
    /// One after the other.
    InTurn,
    /// All at the same time, and killed in the middle, again and again.
    Killed,
}

/// All begin at the same time; how they ended.
#[must_use]
pub fn run_at_once(cluster: &Cluster, nodes: &[&Node]) -> Vec<Output> {
    let running: Vec<Child> = nodes.iter().map(|n| start(cluster, n)).collect();
    running.into_iter().map(|c| c.wait_with_output().expect("wait")).collect()
}

/// All begin at the same time, and none comes far.
pub fn run_and_kill(cluster: &Cluster, nodes: &[&Node], dice: &mut ChaCha8Rng) {
    for _ in 0..4 {
        let mut running: Vec<Child> = nodes.iter().map(|n| start(cluster, n)).collect();
        for child in &mut running {
            std::thread::sleep(Duration::from_micros(dice.random_range(0..12_000)));
            let _ = child.kill();
        }
        running.iter_mut().for_each(|c| drop(c.wait()));
    }
}

/// Nothing but the caches is left of the job.
pub fn all_die(cluster: &mut Cluster) {
    cluster.nodes().iter().for_each(Node::kill9);
    cluster.kill_meta();
    std::fs::remove_dir_all(cluster.meta_state()).expect("the state");
    unmount_dead(cluster);
}

/// All daemons are killed; a service in one of them leaves its state.
pub fn daemons_die(cluster: &Cluster) {
    cluster.nodes().iter().for_each(Node::kill9);
    unmount_dead(cluster);
}

fn unmount_dead(cluster: &Cluster) {
    for node in cluster.nodes() {
        let _ = node.ebb("umount", &[], &[]);
    }
}

/// The command for one cache.
#[must_use]
pub fn command(cluster: &Cluster, node: &Node, more: &[&str]) -> Command {
    let mut command = cluster.ebb();
    command.arg("recover").arg(node.cache()).arg("--backing").arg(cluster.backing()).args(more);
    command
}

/// Runs it to its end.
#[must_use]
pub fn recover(cluster: &Cluster, node: &Node, more: &[&str]) -> Output {
    command(cluster, node, more).output().expect("ebb can be started")
}

/// Begins it.
#[must_use]
pub fn start(cluster: &Cluster, node: &Node) -> Child {
    let mut command = command(cluster, node, &[]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("ebb can be started")
}

/// What it wrote.
#[must_use]
pub fn said(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

/// It ended with this status and said these words.
pub fn ended_with(output: &Output, status: i32, words: &[&str]) {
    assert_eq!(output.status.code(), Some(status), "{}", describe(output));
    words.iter().for_each(|w| assert!(said(output).contains(w), "no '{w}' in {}", said(output)));
}
