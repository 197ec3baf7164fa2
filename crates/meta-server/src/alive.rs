//! Which nodes are there. That a node died is known when its connection ends, or when it was silent for a
//! whole lease; until then it looks like one that lives. Where that is not enough it is asked.
//!
//! Completion: a node answers, its connection ends, or so does its lease.

use crate::core::Core;
use crate::sessions::Pinged;
use ebb_types::NodeId;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::Notify;

/// It is looked so often whether a node is gone, or came back on another stream.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Tells who waits for a sign of life that there was one.
#[derive(Debug, Default)]
pub struct SignsOfLife(Notify);

impl Core {
    /// Waits until each of these nodes has given a sign of life that it was asked for now, or is gone.
    pub async fn alive_or_gone(&self, nodes: impl IntoIterator<Item = NodeId>) {
        let mut waits: BTreeMap<NodeId, Option<Pinged>> =
            nodes.into_iter().map(|node| (node, None)).collect();
        loop {
            let sign = self.signs.0.notified();
            waits.retain(|node, pinged| !self.sessions.answered_or_gone(*node, pinged));
            if waits.is_empty() {
                return;
            }
            // In either case it is looked again.
            let _ = tokio::time::timeout(LOOK_EVERY, sign).await;
        }
    }

    /// A heartbeat answers a ping.
    pub fn ping_answered(&self, node: NodeId, number: u64) {
        if number != 0 {
            self.sessions.ping_answered(node, number);
            self.signs.0.notify_waiters();
        }
    }
}
