//! Bringing everything but unflushed bytes to the backing, a little at a time.

use super::flush::Unless;
use super::{Call, OpResult};
use crate::core::Core;
use crate::sessions::Pass;
use crate::state::State;
use crate::stats::failure;
use ebb_namespace::Home;
use ebb_types::{Errno, Ino, NodeId};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use std::sync::Arc;
use tokio::task::JoinSet;

/// Inodes to a call, when the node does not say, and at most.
const BATCH: u32 = 256;
const BATCH_MAX: u32 = 4096;

impl Call {
    /// One batch of this node's pass: first everything that is missing, then the times of the
    /// directories, which what came into them has moved.
    pub(super) async fn materialize(&self, op: &pb::Materialize) -> OpResult {
        if op.ino != 0 {
            return self.materialize_one(Ino(op.ino), op.closed).await;
        }
        let limit = if op.limit == 0 { BATCH } else { op.limit.min(BATCH_MAX) } as usize;
        let mut pass = self.core.sessions.pass(self.who.node);
        let batch = self.batch(pass, limit);
        let mut reply = pb::MaterializeReply::default();
        if self.core.backing.has_useless() {
            self.core.backing.run(crate::backing::Backing::sweep).await?;
        }
        pass.after = batch.last().copied().or(pass.after);
        let mut publishing = JoinSet::new();
        let unless = if op.closed { Unless::Open } else { Unless::OpenByTheDead };
        self.who_died_is_gone(&batch, unless).await;
        for ino in &batch {
            if self.core.waits_for(*ino, unless) {
                reply.held_back.extend(self.held_back(*ino));
                continue;
            }
            let waits = unfinished(&self.core.state(), *ino);
            if waits.is_empty() {
                publishing.spawn(publish(Arc::clone(&self.core), *ino, unless));
            } else {
                reply.held_back.extend(self.held_back(*ino));
                reply.unfinished.extend(waits);
            }
        }
        // At the same time, so that rounds are made of them.
        while let Some(published) = publishing.join_next().await {
            match published {
                Ok(Ok(done)) => reply.done += u64::from(done),
                Ok(Err(failed)) => reply.failures.extend(failed),
                Err(e) => tracing::error!(error = %e, "publishing ended unexpectedly"),
            }
        }
        let full = batch.len() == limit;
        let next = match (full, pass.directories) {
            (true, _) => Some(pass),
            (false, false) => Some(Pass { directories: true, after: None }),
            (false, true) => None,
        };
        let left = next.is_some_and(|p| full || !self.batch(p, 1).is_empty());
        if left {
            reply.remaining = self.core.state().ns.pending_len().max(1) as u64;
        }
        let next = next.filter(|_| left).unwrap_or_default();
        self.core.sessions.set_pass(self.who.node, next);
        Ok(Some(Body::Materialize(reply)))
    }

    /// A file of which nothing is missing gets its name; `closed`: unless somebody has it open, or it has
    /// no byte on the backing yet. (One that was only made empty is likely to be written next.)
    async fn materialize_one(&self, ino: Ino, closed: bool) -> OpResult {
        let early = {
            let state = self.core.state();
            let part = state.ns.get(ino).is_some_and(|i| matches!(i.home, Home::Part { .. }));
            closed && (!part || state.ns.is_open(ino))
        };
        let waits = unfinished(&self.core.state(), ino);
        let mut reply = pb::MaterializeReply { unfinished: waits, ..Default::default() };
        let unless = if closed { Unless::Open } else { Unless::OpenByTheDead };
        self.who_died_is_gone(&[ino], unless).await;
        if self.core.waits_for(ino, unless) || !reply.unfinished.is_empty() {
            reply.held_back.extend(self.held_back(ino));
        } else if !early {
            match publish(Arc::clone(&self.core), ino, unless).await {
                Ok(done) => reply.done = u64::from(done),
                Err(failed) => reply.failures.extend(failed),
            }
        }
        Ok(Some(Body::Materialize(reply)))
    }

    /// A node that died in the middle of writing one of these files over counts as gone from here on, also when
    /// nobody has noticed it yet.
    async fn who_died_is_gone(&self, files: &[Ino], unless: Unless) {
        if unless != Unless::OpenByTheDead {
            return;
        }
        let others: Vec<NodeId> = {
            let state = self.core.state();
            let writers = files.iter().flat_map(|ino| state.writes_over(*ino));
            writers.filter(|node| *node != self.who.node).collect()
        };
        self.core.alive_or_gone(others).await;
    }

    /// What of this node's bytes is on the backing and not under the file's name, because of a node that is
    /// gone: it may have died in the middle of writing the file over, or has bytes of it in its cache.
    fn held_back(&self, ino: Ino) -> Option<pb::HeldBack> {
        let state = self.core.state();
        let file = state.files.get(&ino)?;
        if !matches!(state.ns.get(ino)?.home, Home::Part { .. }) {
            return None;
        }
        let unflushed = file.unflushed_by_node();
        let holder = unflushed.iter().find(|(node, _)| self.core.sessions.is_gone(**node));
        let half = || self.core.left_half_by(&state, ino).first().map(|node| (*node, 0));
        let (node, missing) = holder.map(|(node, bytes)| (*node, *bytes)).or_else(half)?;
        let mine = file.owned_by(self.who.node).filter(|o| o.flushed);
        let bytes: u64 = mine.map(|o| o.range.len()).sum();
        if bytes == 0 {
            return None;
        }
        let path = state.ns.path(ino)?.to_bytes();
        let node = state.nodes.get(&node).map_or_else(|| node.to_string(), |n| n.name.clone());
        Some(pb::HeldBack { path, bytes, node, missing })
    }

    fn batch(&self, pass: Pass, limit: usize) -> Vec<Ino> {
        let state = self.core.state();
        let settled_last =
            |ino: &Ino| state.ns.get(*ino).is_some_and(|i| i.is_dir() && i.home == Home::Own);
        let pending = state.ns.pending_after(pass.after);
        pending.filter(|i| settled_last(i) == pass.directories).take(limit).collect()
    }
}

/// What failed when a file could not be given its owner. The bytes are there, readable by the
/// service's user alone.
const OWNER: &str = "set owner and group (published for the service's user alone)";

/// False: somebody is writing to it; who does publishes it, or has more to flush. A failure of
/// what was deleted meanwhile is none: nothing is missing.
async fn publish(core: Arc<Core>, ino: Ino, unless: Unless) -> Result<bool, Option<pb::Failure>> {
    let published = core.publish(ino, unless).await;
    let failed = |operation: &str, errno| {
        let path = core.state().ns.path(ino)?;
        Some(failure(&path.to_bytes(), operation, errno))
    };
    let done = published.map_err(|errno| failed("materialize", errno))?;
    match lacking(&core, ino) {
        Some((operation, errno)) => Err(failed(&operation, errno)),
        None => Ok(done),
    }
}

/// What an object on the backing still lacks, and why.
fn lacking(core: &Core, ino: Ino) -> Option<(String, Errno)> {
    let state = core.state();
    let inode = state.ns.get(ino).filter(|i| i.owed)?;
    if inode.xattrs.is_empty() {
        return Some((OWNER.to_string(), Errno::EPERM));
    }
    let names: Vec<_> = inode.xattrs.keys().map(|n| String::from_utf8_lossy(n)).collect();
    let errno = core.refused.lock().get(&ino).copied().unwrap_or(Errno::EIO);
    Some((format!("set extended attribute {} (published without it)", names.join(", ")), errno))
}

/// Whose caches have bytes of this file that the backing lacks.
fn unfinished(state: &State, ino: Ino) -> Vec<pb::Unfinished> {
    let Some(file) = state.files.get(&ino) else { return Vec::new() };
    let path = state.ns.path(ino).map(|p| p.to_bytes()).unwrap_or_default();
    let by_node = file.unflushed_by_node();
    let one = |(node, bytes): (&ebb_types::NodeId, &u64)| pb::Unfinished {
        path: path.clone(),
        bytes: *bytes,
        node: node.0,
    };
    by_node.iter().map(one).collect()
}
