//! A lock that was granted is answered when the other nodes that have the file open have published
//! what they wrote in the locked range: who reads and writes back bytes under it must not bring back
//! what was there before. For models whose writes publish that is so anyway, and nobody is asked.
//!
//! Consistency: the lock is held before anybody is asked, so nobody else gets one meanwhile. What is
//! published is what was written before the question came.
//! Retries: a node that is heard on a new stream is asked again there.
//! Completion: a node answers, closes the file, or is silent for a lease: then what it wrote and did
//! not publish comes later, as after any close. A node that is there and does not answer makes the
//! lock fail; it is given back.
//!
//! Publishing takes no lock, and who waits for one holds nothing that publishing needs: nodes that lock
//! parts of one file at the same time do not wait for each other's locks.

use crate::core::Core;
use crate::leases::now_ms;
use crate::ops::{OpError, OpResult};
use ebb_consistency::StreamId;
use ebb_locks::Mutex;
use ebb_namespace::locks::{Owner, Space};
use ebb_types::{ByteRange, Errno, Ino, NodeId};
use ebb_wire::pb;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// A node that is there has so long to publish: less than the deadline of who waits.
const PATIENCE: Duration = Duration::from_secs(20);

/// It is looked so often whether a node came back on another stream.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What nodes were asked and have not answered.
#[derive(Debug, Default)]
pub struct Publishing {
    /// Bounded by the lock requests under way times the nodes that have their files open.
    open: Mutex<HashSet<(NodeId, u64)>>,
    numbers: AtomicU64,
    answered: Notify,
}

/// A lock that was granted.
#[derive(Clone, Copy, Debug)]
pub struct Locked {
    /// The file.
    pub ino: Ino,
    /// Which kind of lock.
    pub space: Space,
    /// Whose.
    pub owner: Owner,
    /// Its bytes.
    pub range: ByteRange,
}

/// One node, as far as it has been asked.
struct Asked {
    node: NodeId,
    number: u64,
    on: Option<StreamId>,
}

impl Core {
    /// Waits until the other nodes have published what they wrote there. An error gives the lock back.
    pub async fn publish_before(&self, locked: Locked) -> Result<(), OpError> {
        let others: Vec<NodeId> =
            self.state().ns.open_by(locked.ino).filter(|n| *n != locked.owner.node).collect();
        let ask = |node| {
            let mut asked = Asked { node, number: self.new_number(), on: None };
            self.ask_to_publish(&locked, &mut asked);
            asked
        };
        // All are asked before anybody is waited for.
        let all: Vec<Asked> = others.into_iter().map(ask).collect();
        let end = Instant::now() + PATIENCE;
        let mut published = Ok(());
        for mut asked in all {
            if published.is_ok() {
                published = self.published_by(&locked, &mut asked, end).await;
            }
            self.publishing.open.lock().remove(&(asked.node, asked.number));
        }
        if published.is_err() {
            self.give_back(&locked);
        }
        published
    }

    fn new_number(&self) -> u64 {
        // A number of a service before this one must not be taken for an answer.
        let number = self.publishing.numbers.fetch_add(1, Relaxed);
        now_ms().saturating_mul(1 << 20).saturating_add(number % (1 << 20))
    }

    /// Once on each stream.
    fn ask_to_publish(&self, locked: &Locked, asked: &mut Asked) {
        let Some((who, stream)) = self.sessions.stream_of(asked.node) else { return };
        if asked.on.replace(stream) == Some(stream) {
            return;
        }
        self.publishing.open.lock().insert((asked.node, asked.number));
        let range = Some(ebb_wire::range_to_pb(locked.range));
        let what = pb::Publish { ino: locked.ino.0, seq: asked.number, seat: 0, range };
        let what = Some(pb::notice::What::Publish(what));
        self.sessions.notify(who.node, stream, pb::Notice { what });
    }

    async fn published_by(
        &self,
        locked: &Locked,
        asked: &mut Asked,
        end: Instant,
    ) -> Result<(), OpError> {
        loop {
            let answered = self.publishing.answered.notified();
            self.ask_to_publish(locked, asked);
            let waits = asked.on.is_none()
                || self.publishing.open.lock().contains(&(asked.node, asked.number));
            if !waits || !self.state().ns.is_open_by(locked.ino, asked.node) {
                return Ok(());
            }
            if !self.sessions.is_alive(asked.node).0 {
                tracing::warn!(ino = %locked.ino, node = %asked.node, "is silent: a lock is granted without what it may have written");
                return Ok(());
            }
            if Instant::now() >= end {
                let name = self.state().nodes.get(&asked.node).map(|n| n.name.clone());
                let name = name.unwrap_or_default();
                let text = format!("node {name} does not publish what it wrote in a locked range");
                return Err(OpError::new(Errno::EIO, text));
            }
            // In either case it is looked again.
            let _ = tokio::time::timeout(LOOK_EVERY, answered).await;
        }
    }

    /// A node has published what it was asked to for a lock.
    pub fn published_for_lock(&self, node: NodeId, op: &pb::Published) -> OpResult {
        self.publishing.open.lock().remove(&(node, op.seq));
        self.publishing.answered.notify_waiters();
        Ok(None)
    }

    fn give_back(&self, locked: &Locked) {
        let mut state = self.state();
        let Locked { ino, space, owner, range } = *locked;
        let granted = state.locks.unlock(ino, space, owner, range);
        self.commit(&mut state, &[crate::state::Entry::Unlock(ino, space, owner, range)]);
        self.granted(&mut state, &granted);
    }
}
