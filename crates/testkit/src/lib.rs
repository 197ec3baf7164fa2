//! Real mounts, nodes and processes for tests and benches: a [`Cluster`] is a backing directory
//! and several daemons on this machine, each with a cache and a mount point of its own. Nothing
//! here is simulated, and nothing of it stays when a test ends, also when it panics.
//!
//! Operating errors panic with a message that says what was run and what it printed: in a test
//! there is nobody to handle them.

pub mod cluster;
pub mod disk;
pub mod environment;
pub mod locks;
pub mod mounts;
pub mod node;
pub mod power;
pub mod random;
pub mod relay;
pub mod service;
pub mod steps;

pub use cluster::{Builder, Cluster, number};
pub use disk::Disk;
pub use ebb_links::{Network, Port};
pub use environment::{ebb_binary, skip_reason};
pub use locks::record_lock;
pub use node::Node;
pub use power::PowerDisk;
pub use relay::{Change, Relay, Towards};
pub use service::{Standby, Stranger};
pub use steps::Steps;

use std::process::Output;

/// What a program printed and how it ended, for messages.
#[must_use]
pub fn describe(output: &Output) -> String {
    format!(
        "{}\n--- standard output\n{}--- standard error\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
