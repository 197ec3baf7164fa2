//! `--replicas 2`: unflushed bytes are also with a partner node. [`owner`] copies them there before
//! they are published, [`held`] keeps those of others, [`log`] lets these outlive a daemon, [`adopt`]
//! makes the copies of a lost node this node's own bytes, [`resume`] what a daemon was adopting when
//! it died, [`reading`] reads copies of a node that does not answer.
//!
//! Consistency: bytes are published (attached) only under the epoch of the pair under which they were
//! copied, and the service refuses any other, so a copy is never older than what its owner has
//! published. It may be newer: bytes that were written over published ones count as published,
//! as after a daemon's crash.
//! Retries: nothing is sent to a partner twice. After the first answer that is not a yes the pair
//! ends, which the service hears before anything else is published, and another one begins.
//! Completion: [`Node::tend_copies`] looks after all of it as long as the node lives.

mod adopt;
mod held;
mod log;
mod owner;
mod reading;
mod resume;
mod status;

use crate::node::Node;
use ebb_locks::Mutex;
use ebb_types::NodeId;
use held::Held;
use owner::Owner;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Weak;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

pub(crate) use adopt::Waiting;
pub(crate) use held::are_left_in;
pub(crate) use reading::Instead;
pub use status::CopyStatus;

/// Between two looks at pairs and copies.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Everything about copies that a node has.
pub struct Replicas {
    owner: Owner,
    pub(crate) held: Held,
    /// Nodes that did not answer a moment ago.
    down: Mutex<HashMap<NodeId, Instant>>,
    /// Bytes of lost nodes that are this node's now.
    adopted: AtomicU64,
}

impl Replicas {
    /// For `replicas` copies of everything, the own one included.
    pub fn new(replicas: u32, cache: &Path) -> Replicas {
        Replicas {
            owner: Owner::new(replicas > 1),
            held: Held::new(cache),
            down: Mutex::default(),
            adopted: AtomicU64::new(0),
        }
    }
}

impl Node {
    /// Looks after pairs and copies as long as the node lives.
    pub(crate) async fn tend_copies(node: Weak<Node>) {
        loop {
            let Some(this) = node.upgrade() else { return };
            if let Err(e) = this.look_after_copies().await {
                tracing::debug!(error = %e, "pairs cannot be looked after just now");
            }
            let wake = this.replicas.owner.wake();
            drop(this);
            // Somebody wakes us, or it is time again.
            let _ = tokio::time::timeout(LOOK_EVERY, wake.notified()).await;
        }
    }

    async fn look_after_copies(&self) -> Result<(), ebb_types::Errno> {
        let replicas = &self.replicas;
        let list = replicas.held.list();
        if list.is_empty() && !replicas.owner.is_wanted() {
            return Ok(());
        }
        let (wants, avoid) = replicas.owner.wishes();
        let pairs = self.meta.copies(&list, wants, &avoid).await?;
        for epoch in &pairs.drop {
            self.drop_set(*epoch);
        }
        for epoch in &pairs.take {
            self.begin_adoption(*epoch);
        }
        self.look_after_pair(pairs).await
    }
}
