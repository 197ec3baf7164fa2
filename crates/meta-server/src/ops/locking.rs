//! Locks of files, across all nodes.

use super::{Call, Fast, OpError, OpResult};
use crate::core::Core;
use crate::publishing::Locked;
use crate::state::Entry;
use ebb_namespace::locks::{Kind, Lock, Outcome, Owner, Space};
use ebb_types::{ByteRange, Errno, Ino, NodeId};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;

pub(crate) const READ: u32 = 0;
pub(crate) const WRITE: u32 = 1;
const UNLOCK: u32 = 2;

pub(crate) fn space(flock: bool) -> Space {
    if flock { Space::Flock } else { Space::Posix }
}

pub(crate) fn range(flock: bool, range: Option<pb::Range>) -> Result<ByteRange, Errno> {
    match range {
        _ if flock => Ok(ByteRange::ALL),
        None => Ok(ByteRange::ALL),
        Some(r) => match ebb_wire::range_from_pb(r)? {
            r if r.is_empty() => Err(Errno::EINVAL),
            r => Ok(r),
        },
    }
}

impl Call {
    fn owner(&self, id: u64) -> Owner {
        Owner { node: self.who.node, id }
    }

    pub(super) fn set_lock(&self, op: &pb::SetLock) -> Fast {
        match self.try_set_lock(op) {
            Ok(fast) => fast,
            Err(e) => Fast::Done(Err(e.into())),
        }
    }

    fn try_set_lock(&self, op: &pb::SetLock) -> Result<Fast, Errno> {
        let (ino, space) = (Ino(op.ino), space(op.flock));
        let range = range(op.flock, op.range)?;
        let owner = self.owner(op.owner);
        let mut state = self.core.state();
        state.ns.inode(ino)?;
        let kind = match op.r#type {
            READ => Kind::Read,
            WRITE => Kind::Write,
            UNLOCK => {
                let granted = state.locks.unlock(ino, space, owner, range);
                self.core.commit(&mut state, &[Entry::Unlock(ino, space, owner, range)]);
                self.core.granted(&mut state, &granted);
                return Ok(Fast::Done(Ok(None)));
            }
            _ => return Err(Errno::EINVAL),
        };
        let lock = Lock { owner, pid: op.pid, range, kind };
        // flock(2) converts by giving up first, so that two converters cannot block each other.
        if space == Space::Flock && op.wait {
            let granted = state.locks.unlock(ino, space, owner, range);
            self.core.commit(&mut state, &[Entry::Unlock(ino, space, owner, range)]);
            self.core.granted(&mut state, &granted);
        }
        let waiting = op.wait.then(|| self.core.new_ticket());
        let ticket = waiting.as_ref().map(|(t, _)| *t);
        let locked = Locked { ino, space, owner, range };
        let begin = |waits| op.publish.then(|| self.core.publishing.begin(locked, waits));
        let outcome = state.locks.set(ino, space, lock, ticket);
        if let (Some(ticket), false) = (ticket, outcome == Outcome::Waiting) {
            self.core.end_waiting(&[ticket], Ok(()));
        }
        match (outcome, waiting) {
            (Outcome::Granted(others), _) => {
                self.core.commit(&mut state, &[Entry::Lock(ino, space, lock)]);
                self.core.publishing.granted(&locked, None);
                self.core.granted(&mut state, &others);
                if !op.publish || !state.ns.is_open_by_others(ino, self.who.node) {
                    return Ok(Fast::Done(Ok(None)));
                }
                let (tell, told) = tokio::sync::oneshot::channel();
                let _ = tell.send(Ok(()));
                Ok(Fast::Lock(told, begin(None)))
            }
            (Outcome::Waiting, Some((ticket, told))) => {
                self.core.waits.lock().insert((self.who.node, self.id), ticket);
                Ok(Fast::Lock(told, begin(Some(ticket))))
            }
            (Outcome::Deadlock, _) => Err(Errno::EDEADLK),
            (Outcome::Conflict(_) | Outcome::Waiting, _) => Err(Errno::EAGAIN),
        }
    }

    pub(super) fn get_lock(&self, op: &pb::GetLock) -> OpResult {
        let range = range(op.flock, op.range)?;
        let kind = match op.r#type {
            READ => Kind::Read,
            WRITE => Kind::Write,
            _ => return Err(Errno::EINVAL.into()),
        };
        let wanted = Lock { owner: self.owner(op.owner), pid: 0, range, kind };
        let state = self.core.state();
        state.ns.inode(Ino(op.ino))?;
        let answer = match state.locks.conflict(Ino(op.ino), space(op.flock), &wanted) {
            None => pb::LockState { r#type: UNLOCK, range: None, pid: 0, node: 0 },
            Some(held) => pb::LockState {
                r#type: if held.kind == Kind::Read { READ } else { WRITE },
                range: Some(ebb_wire::range_to_pb(held.range)),
                pid: held.pid,
                node: held.owner.node.0,
            },
        };
        Ok(Some(Body::LockState(answer)))
    }

    pub(super) fn release_locks(&self, op: &pb::ReleaseLocks) -> OpResult {
        let (ino, space, owner) = (Ino(op.ino), space(op.flock), self.owner(op.owner));
        let mut state = self.core.state();
        let (gone, granted) = state.locks.release_owner(ino, space, owner);
        self.core.commit(&mut state, &[Entry::Unlock(ino, space, owner, ByteRange::ALL)]);
        self.core.end_waiting(&gone, Err(Errno::EINTR));
        self.core.granted(&mut state, &granted);
        Ok(None)
    }

    pub(super) fn cancel(&self, op: &pb::Cancel) -> OpResult {
        let ticket = self.core.waits.lock().remove(&(self.who.node, op.request));
        let Some(ticket) = ticket else { return Ok(None) };
        let mut state = self.core.state();
        if let Some(granted) = state.locks.cancel(ticket) {
            self.core.end_waiting(&[ticket], Err(Errno::EINTR));
            self.core.granted(&mut state, &granted);
        } else if self.core.awaiting.cancel(ticket) {
            self.core.end_waiting(&[ticket], Err(Errno::EINTR));
        }
        Ok(None)
    }

    /// Waits until a lock request ends.
    pub async fn lock_wait(
        &self,
        told: tokio::sync::oneshot::Receiver<crate::core::LockResult>,
    ) -> OpResult {
        let result = told.await;
        // Unless it waits again meanwhile, asked on another connection.
        let request = (self.who.node, self.id);
        let mut waits = self.core.waits.lock();
        if waits.get(&request).is_some_and(|ticket| !self.core.still_waits(*ticket)) {
            waits.remove(&request);
        }
        drop(waits);
        match result {
            Ok(Ok(())) => Ok(None),
            Ok(Err(e)) => Err(e.into()),
            Err(_service_ends) => Err(OpError::from(Errno::EINTR)),
        }
    }
}

impl Core {
    /// What a node waits for is waited for no longer; what it holds stays.
    pub fn end_lock_waits_of(&self, node: NodeId) {
        let mut state = self.state();
        let (gone, granted) = state.locks.end_waits(node);
        self.end_waiting(&gone, Err(Errno::EINTR));
        self.granted(&mut state, &granted);
    }

    /// A node loses its locks and what it waits for.
    pub fn unlock_node(&self, node: NodeId) {
        let mut state = self.state();
        let (gone, granted) = state.locks.release_node(node);
        self.commit(&mut state, &[Entry::UnlockNode(node)]);
        self.end_waiting(&gone, Err(Errno::EINTR));
        self.granted(&mut state, &granted);
    }
}
