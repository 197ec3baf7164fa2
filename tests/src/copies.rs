//! What tests of `--replicas 2` have in common: losing nodes, and what status tells of copies.

use crate::content::same;
use crate::model::close;
use ebb_testkit::{Builder, Cluster, Node, describe};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// A lease of the service, and some.
pub const LEASE_MAX: Duration = Duration::from_secs(30);

/// Nodes whose bytes go to the backing only at a drain, and to a partner before.
#[must_use]
pub fn builder(nodes: usize, model: &str) -> Builder {
    Cluster::builder()
        .nodes(nodes)
        .consistency(model)
        .flush("end")
        .option("--replicas", "2")
        .option("--request-timeout", "4s")
}

/// Such nodes with a service of their own, each with a partner.
#[must_use]
pub fn cluster(nodes: usize, model: &str) -> Cluster {
    let cluster = builder(nodes, model).separate_meta().start();
    cluster.nodes().iter().for_each(has_partner);
    cluster
}

/// Which node has the copies of another one.
///
/// # Panics
/// When it has no partner, or an unknown one.
#[must_use]
pub fn partner_of(cluster: &Cluster, node: usize) -> usize {
    let name = copies(cluster.node(node))["partner_name"].as_str().expect("a partner").to_owned();
    let found = cluster.nodes().iter().position(|n| n.name() == name);
    found.unwrap_or_else(|| panic!("a node of the cluster, not {name}"))
}

/// Waits until everything unflushed of a node has a copy.
pub fn has_partner(node: &Node) {
    node.wait_status(LEASE_MAX, |s| {
        s["copies"]["partner"].is_u64()
            && s["copies"]["degraded"].is_null()
            && s["copies"]["uncopied_bytes"] == 0
    });
}

/// The daemon dies, and its cache with it.
///
/// # Panics
/// When the cache cannot be removed.
pub fn lose(node: &Node) {
    node.kill9();
    fs::remove_dir_all(node.cache()).expect("its cache goes too");
}

/// Takes the mount of a dead daemon away, or ends one that may keep something.
///
/// # Panics
/// When that fails.
pub fn clear(node: &Node) {
    let output = node.ebb("umount", &["--no-drain"], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
}

/// What status tells of copies.
#[must_use]
pub fn copies(node: &Node) -> Value {
    node.status()["copies"].clone()
}

/// How many bytes of lost nodes are this node's.
///
/// # Panics
/// When status does not tell.
#[must_use]
pub fn adopted(node: &Node) -> u64 {
    copies(node)["adopted_bytes"].as_u64().expect("a number")
}

/// Waits until a node has adopted so much.
pub fn wait_adopted(node: &Node, bytes: u64) {
    node.wait_status(LEASE_MAX, |s| s["copies"]["adopted_bytes"].as_u64() >= Some(bytes));
}

/// Writes and closes a file.
///
/// # Panics
/// When that fails.
pub fn store(node: &Node, name: &str, data: &[u8]) {
    let file = File::create(node.path(name)).expect("create");
    file.write_all_at(data, 0).expect("write");
    close(file).expect("close");
}

/// Compares a file on the backing.
///
/// # Panics
/// When it is not there, or differs.
pub fn on_backing(cluster: &Cluster, name: &str, want: &[u8]) {
    same(name, &fs::read(cluster.backing().join(name)).expect("read on the backing"), want);
}

/// By the status of all nodes: everything unflushed has a copy, every node's copies are somewhere,
/// and nothing of a lost node waits to be adopted.
#[must_use]
pub fn is_whole(status: &[Value]) -> bool {
    let numbers =
        |v: &Value| v.as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let held = status.iter().flat_map(|s| -> Vec<u64> { numbers(&s["copies"]["held_for"]) });
    let nodes = status.iter().filter_map(|s| s["number"].as_u64());
    let safe = |s: &Value| s["copies"]["partner"].is_u64() && s["copies"]["degraded"].is_null();
    status.iter().all(safe) && held.collect::<BTreeSet<_>>() == nodes.collect::<BTreeSet<_>>()
}
