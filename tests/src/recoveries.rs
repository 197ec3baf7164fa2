//! `ebb recover` on the caches of a job of which nothing else is left.

use ebb_testkit::{Cluster, Node, describe};
use std::process::{Child, Command, Output, Stdio};

/// Nothing but the caches is left of the job.
pub fn all_die(cluster: &mut Cluster) {
    cluster.nodes().iter().for_each(Node::kill9);
    cluster.kill_meta();
    std::fs::remove_dir_all(cluster.meta_state()).expect("the state");
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
