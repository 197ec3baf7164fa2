//! A lock that was granted is answered when the other nodes that have the file open have published
//! what they wrote in the locked range: who reads and writes back bytes under it must not bring back
//! what was there before. For models whose writes publish that is so anyway, and nobody is asked.
//!
//! Consistency: the lock is held before anybody is asked, so nobody else gets one meanwhile. What is
//! published is what was written before the question came.
//! Retries: a node that is heard on a new stream is asked again there.
//! Completion: a node answers, closes the file, or is silent for a lease: then what it wrote and did
//! not publish comes later, as after any close. A node that is there and does not answer makes the
//! lock fail; it is given back, but for what a later call of the same owner was granted meanwhile (the
//! first one was interrupted, and the program asked again).
//!
//! Publishing takes no lock, and who waits for one holds nothing that publishing needs: nodes that lock
//! parts of one file at the same time do not wait for each other's locks.

use crate::core::Core;
use crate::leases::now_ms;
use crate::ops::{OpError, OpResult};
use crate::state::Entry;
use ebb_consistency::StreamId;
use ebb_locks::Mutex;
use ebb_namespace::locks::{Owner, Space, Ticket};
use ebb_types::{ByteRange, Errno, Ino, NodeId};
use ebb_wire::pb;
use rangemap::RangeSet;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// It is looked so often whether a node came back on another stream.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What nodes were asked and have not answered.
#[derive(Debug, Default)]
pub struct Publishing {
    /// Bounded by the lock requests under way times the nodes that have their files open.
    open: Mutex<HashSet<(NodeId, u64)>>,
    numbers: AtomicU64,
    answered: Notify,
    /// The lock requests under way after which others publish, in the order in which they came. A leaf,
    /// changed under the state.
    calls: Mutex<HashMap<Whose, Vec<UnderWay>>>,
}

/// Of which file, in which universe, and for whom a lock is.
type Whose = (Ino, Space, Owner);

/// A lock request under way.
#[derive(Debug)]
struct UnderWay {
    number: u64,
    /// It has no lock so far.
    waits: Option<Ticket>,
    /// What its owner was granted after it: not its own to give back.
    later: RangeSet<u64>,
}

/// A lock request after which others publish.
#[derive(Clone, Copy, Debug)]
pub struct LockCall {
    locked: Locked,
    number: u64,
}

/// What is asked for, or was granted.
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

impl Locked {
    fn whose(&self) -> Whose {
        (self.ino, self.space, self.owner)
    }
}

impl Publishing {
    /// A lock request after which others publish; `waits`: it has no lock so far. Under the state.
    pub fn begin(&self, locked: Locked, waits: Option<Ticket>) -> LockCall {
        let number = self.numbers.fetch_add(1, Relaxed);
        let call = UnderWay { number, waits, later: RangeSet::new() };
        self.calls.lock().entry(locked.whose()).or_default().push(call);
        LockCall { locked, number }
    }

    /// An owner has a lock, for the request that waited with this ticket or at once. Under the state.
    pub fn granted(&self, locked: &Locked, ticket: Option<Ticket>) {
        let mut calls = self.calls.lock();
        for call in calls.get_mut(&locked.whose()).into_iter().flatten() {
            if ticket.is_some() && call.waits == ticket {
                call.waits = None;
            } else if call.waits.is_none() {
                call.later.insert(locked.range.start()..locked.range.end());
            }
        }
    }

    /// What of it is nobody's but this call's. Under the state.
    fn own(&self, call: &LockCall) -> Vec<ByteRange> {
        let calls = self.calls.lock();
        let mut of_owner = calls.get(&call.locked.whose()).into_iter().flatten();
        let Some(found) = of_owner.find(|c| c.number == call.number) else { return Vec::new() };
        let all = call.locked.range.start()..call.locked.range.end();
        found.later.gaps(&all).map(|r| ByteRange::new(r.start, r.end)).collect()
    }

    /// It is answered, or about to be.
    pub fn end(&self, call: &LockCall) {
        let mut calls = self.calls.lock();
        let whose = call.locked.whose();
        let Some(of_owner) = calls.get_mut(&whose) else { return };
        of_owner.retain(|c| c.number != call.number);
        if of_owner.is_empty() {
            calls.remove(&whose);
        }
    }
}

/// One node, as far as it has been asked.
struct Asked {
    node: NodeId,
    number: u64,
    on: Option<StreamId>,
}

impl Core {
    /// Waits until the other nodes have published what they wrote there. An error gives the lock back.
    pub async fn publish_before(&self, call: &LockCall) -> Result<(), OpError> {
        let locked = call.locked;
        let others: Vec<NodeId> =
            self.state().ns.open_by(locked.ino).filter(|n| *n != locked.owner.node).collect();
        let ask = |node| {
            let mut asked = Asked { node, number: self.new_number(), on: None };
            self.ask_to_publish(&locked, &mut asked);
            asked
        };
        // All are asked before anybody is waited for.
        let all: Vec<Asked> = others.into_iter().map(ask).collect();
        let end = Instant::now() + self.publishes_within;
        let mut published = Ok(());
        for mut asked in all {
            if published.is_ok() {
                published = self.published_by(&locked, &mut asked, end).await;
            }
            self.publishing.open.lock().remove(&(asked.node, asked.number));
        }
        if published.is_err() {
            self.give_back(call);
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

    fn give_back(&self, call: &LockCall) {
        let mut state = self.state();
        let Locked { ino, space, owner, .. } = call.locked;
        for range in self.publishing.own(call) {
            let granted = state.locks.unlock(ino, space, owner, range);
            self.commit(&mut state, &[Entry::Unlock(ino, space, owner, range)]);
            self.granted(&mut state, &granted);
        }
    }
}
