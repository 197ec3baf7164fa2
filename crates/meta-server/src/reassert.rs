//! After a power loss: what the end of the journal said is lost, and the nodes know it.
//!
//! A journal that another boot wrote may lack its end: what was not on stable storage, at most the last
//! second. The service that reads it gives out no number that may have been given out then ([`leap`]),
//! and asks every node of the job to tell what it knows of files from that time ([`Op::Reassert`]; what
//! becomes of it is in [`ebb_consistency::Assertion`]), and what is locked on it. Names are not told again: a file that was
//! made in that time is not known, and kept where its bytes are.
//!
//! Consistency: until every node has told, requests wait, but for those that telling needs
//! ([`Core::awaits_words`]); so nobody is answered from a state that is about to be mended. Who has not
//! told within a lease is waited for no longer: what it tells when it comes is taken all the
//! same, where nobody has changed anything since.
//! Retries: to tell again what was told changes nothing. A service that dies meanwhile goes on asking
//! those who have not told ([`State::owing`]).
//! Completion: a lease after the service began, at the latest.

use crate::core::Core;
use crate::lineage::Start;
use crate::quiet::tells_first;
use crate::state::{Entry, State};
use ebb_locks::Mutex;
use ebb_namespace::locks::{Kind, Lock, Outcome, Owner, Space};
use ebb_types::{ByteRange, Errno, Ino, NodeId, Version};
use ebb_wire::pb;
use ebb_wire::pb::request::Op;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Below these bits of a version stands how many there were since a leap; above, which start leapt.
const VERSION_BITS: u32 = 34;

/// Whether requests wait for what nodes tell.
#[derive(Debug)]
pub struct Waiting {
    on: AtomicBool,
    until: Instant,
    changed: Notify,
    /// What nodes say is locked: they are compared with each other when all have told.
    told: Mutex<Vec<(NodeId, Vec<Holding>)>>,
    /// What of it is not theirs any more.
    lost: Mutex<Vec<(NodeId, Holding)>>,
}

/// What an owner on a node has locked.
#[derive(Clone, Debug)]
pub struct Holding {
    /// Of which file.
    pub ino: Ino,
    /// By which call.
    pub space: Space,
    /// The owner's number there.
    pub owner: u64,
    /// These, and no others.
    pub certain: bool,
    /// The ranges.
    pub locks: Vec<(ByteRange, Kind, u32)>,
}

impl Waiting {
    /// For a service that begins on this state.
    pub fn begin(state: &State, lease: Duration) -> Waiting {
        let on = !state.owing.is_empty();
        if on {
            tracing::warn!(
                nodes = state.owing.len(),
                "the machine was booted since the journal was written, and its end may be missing: the \
                 nodes are asked what they know"
            );
        }
        Waiting {
            on: on.into(),
            until: Instant::now() + lease,
            changed: Notify::new(),
            told: Mutex::default(),
            lost: Mutex::default(),
        }
    }
}

/// The end of this state may be lost: what it may have given out is not given out again.
pub fn leap(state: &mut State) {
    let block = state.lineage.starts().next_back().map_or(0, Start::block);
    state.leap(Version(block << VERSION_BITS));
}

impl Core {
    /// True when this must wait until the nodes have told what they know.
    pub fn awaits_words(&self, op: &Op) -> bool {
        let needed = |op: &Op| {
            matches!(
                op,
                Op::Reassert(_)
                    | Op::Heartbeat(_)
                    | Op::Returned(_)
                    | Op::NodeInfo(_)
                    | Op::Cancel(_)
                    | Op::Hello(_)
                    | Op::Prove(_)
            ) || tells_first(op)
        };
        self.words.on.load(Relaxed) && !needed(op) && self.still_waits()
    }

    /// Somebody has told everything, or has left.
    pub fn look_who_owes_words(&self) {
        self.still_waits();
    }

    fn still_waits(&self) -> bool {
        if !self.words.on.load(Relaxed) {
            return false;
        }
        let (owing, late) = (self.state().owing.len(), Instant::now() >= self.words.until);
        let waits = owing > 0 && !late;
        if !waits && self.words.on.swap(false, Relaxed) {
            match owing {
                0 => tracing::info!("every node has told what it knows"),
                nodes => {
                    tracing::warn!(nodes, "nodes have not told what they know; it goes on without")
                }
            }
            self.settle_locks();
            self.words.changed.notify_waiters();
        }
        waits
    }

    /// What is locked on a node that has told everything; `None`: it does not say.
    pub fn hear_locks(&self, node: NodeId, locks: Option<Vec<Holding>>) {
        self.words.told.lock().extend(locks.map(|locks| (node, locks)));
    }

    /// What was given back in the time that is lost is free, and what was locked is locked. First the
    /// former of all nodes: one may have locked what another had given back.
    fn settle_locks(&self) {
        let told = std::mem::take(&mut *self.words.told.lock());
        let mut state = self.state();
        let mut anew: Vec<(NodeId, Holding)> = Vec::new();
        for (node, holdings) in told {
            let mut held: BTreeMap<(Ino, Space, u64), Vec<(ByteRange, Kind)>> = BTreeMap::new();
            for (ino, space, lock) in state.locks.held().filter(|(.., l)| l.owner.node == node) {
                held.entry((ino, space, lock.owner.id)).or_default().push((lock.range, lock.kind));
            }
            for holding in holdings {
                let had = held.remove(&(holding.ino, holding.space, holding.owner));
                let mut has: Vec<_> =
                    holding.locks.iter().map(|(r, kind, _)| (*r, *kind)).collect();
                has.sort_unstable_by_key(|(range, _)| *range);
                let mut had = had.unwrap_or_default();
                had.sort_unstable_by_key(|(range, _)| *range);
                if holding.certain && had != has {
                    self.free(&mut state, holding.ino, holding.space, (node, holding.owner));
                    anew.push((node, holding));
                }
            }
            for (ino, space, owner) in held.into_keys() {
                self.free(&mut state, ino, space, (node, owner));
            }
        }
        for (node, holding) in anew {
            let lock = |(range, kind, pid): &(ByteRange, Kind, u32)| Lock {
                owner: Owner { node, id: holding.owner },
                pid: *pid,
                range: *range,
                kind: *kind,
            };
            let mut lost = state.ns.inode(holding.ino).is_err() && !holding.locks.is_empty();
            for lock in holding.locks.iter().map(lock).take_while(|_| !lost).collect::<Vec<_>>() {
                match state.locks.set(holding.ino, holding.space, lock, None) {
                    Outcome::Granted(others) => {
                        let entry = Entry::Lock(holding.ino, holding.space, lock);
                        self.commit(&mut state, &[entry]);
                        self.granted(&mut state, &others);
                    }
                    _ => lost = true,
                }
            }
            if lost {
                tracing::warn!(ino = %holding.ino, %node, "a lock that was forgotten is another's");
                self.free(&mut state, holding.ino, holding.space, (node, holding.owner));
                self.words.lost.lock().push((node, holding));
            }
        }
    }

    fn free(&self, state: &mut State, ino: Ino, space: Space, (node, id): (NodeId, u64)) {
        let owner = Owner { node, id };
        let (gone, granted) = state.locks.release_owner(ino, space, owner);
        self.commit(state, &[Entry::Unlock(ino, space, owner, ByteRange::ALL)]);
        self.end_waiting(&gone, Err(Errno::EINTR));
        self.granted(state, &granted);
    }

    /// The owners on a node whose locks are others' now.
    pub fn lost_locks_of(&self, node: NodeId) -> Vec<pb::LockOwner> {
        if !self.words.told.lock().is_empty() {
            // It came late.
            self.settle_locks();
        }
        let mut lost = self.words.lost.lock();
        let its = lost.extract_if(.., |(of, _)| *of == node);
        its.map(|(_, holding)| pb::LockOwner {
            ino: holding.ino.0,
            owner: holding.owner,
            flock: holding.space == Space::Flock,
            ..pb::LockOwner::default()
        })
        .collect()
    }

    /// Until every node has told, or a lease is over.
    pub async fn words_are_heard(&self) {
        loop {
            let changed = self.words.changed.notified();
            if !self.still_waits() {
                return;
            }
            // In either case it is looked again.
            let _ = tokio::time::timeout_at(self.words.until, changed).await;
        }
    }
}
