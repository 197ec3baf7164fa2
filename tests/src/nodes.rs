//! What several tests ask of nodes: how many requests they have sent, whether the kernel tells them
//! what is written past their daemons; and files as the tests open them.

use ebb_testkit::{Builder, Cluster, Node};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::path::Path;

/// Requests of this name that the node has sent.
#[must_use]
pub fn requests(node: &Node, name: &str) -> u64 {
    node.status()["rpc"][name].as_u64().unwrap_or(0)
}

/// A counter of what the node need not ask.
#[must_use]
pub fn unasked(node: &Node, name: &str) -> u64 {
    node.status()["leases"][name].as_u64().unwrap_or(0)
}

/// Nodes of which nothing publishes but who says so, not even a close, and nobody flushes before the end.
#[must_use]
pub fn only_asked(nodes: usize) -> Builder {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/asked.toml");
    Cluster::builder().nodes(nodes).option("--config", models).consistency("asked").flush("end")
}

/// True when files of a node were written past its daemon, as its status says; also where the machine cannot do that,
/// unless it must (`EBB_REQUIRE_TRACKER`).
#[must_use]
pub fn went_past(status: &Value) -> bool {
    let cannot = !status["io_path_obstacle"].is_null();
    let may_not = cannot && std::env::var_os("EBB_REQUIRE_TRACKER").is_none();
    may_not || status["opens"]["passthrough-write"].as_u64() > Some(0)
}

/// The cluster, if the kernel tells its nodes what is written past their daemons; or a word why not.
///
/// # Panics
/// When it does not and `EBB_REQUIRE_TRACKER` is set.
#[must_use]
pub fn told(cluster: Cluster) -> Option<Cluster> {
    let status = cluster.node(0).status();
    let state = status["tracker"].as_str().unwrap_or_else(|| panic!("{status:#}"));
    let required = std::env::var_os("EBB_REQUIRE_TRACKER").is_some();
    assert!(state == "on" || !required, "no tracker: {state}");
    if state != "on" {
        eprintln!("SKIPPED: {state}");
        return None;
    }
    Some(cluster)
}

/// For reading and writing; made when it is not there.
///
/// # Panics
/// When it cannot be opened, as the next one.
#[must_use]
pub fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).expect("open")
}

/// For appending.
///
/// # Panics
/// As above.
#[must_use]
pub fn append(path: &Path) -> File {
    OpenOptions::new().append(true).create(true).open(path).expect("open")
}
