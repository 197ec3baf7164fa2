//! Quiet writes: who may write a file without telling, and how it is brought to tell before
//! anybody else asks about the file. What may be written so, and what becomes of it, is in
//! [`ebb_consistency::FileState`]; how long the right is trusted, in [`ebb_consistency::lease`]: it
//! ends with the lease of the inode that it was granted with.
//!
//! Consistency: an operation that names an inode, or tells of it, begins only when no other node
//! may have written to it quietly. While such an operation runs, the right can be lent anew; what
//! is written then is concurrent with the operation.
//! Retries: a holder that is heard on a new stream is asked again there.
//! Completion: the holder tells and returns its lease, or can trust it no longer and is given up.

use crate::core::Core;
use crate::leases::{now_ms, told};
use crate::ops::{Call, OpError, OpResult};
use crate::seats::changes;
use crate::state::{Entry, FileOp, State};
use ebb_consistency::{FileState, StreamId};
use ebb_types::{ByteRange, Errno, Ino, NodeId, Version};
use ebb_wire::pb;
use ebb_wire::pb::request::Op;
use std::time::Duration;

/// Nobody may write quietly further than this behind the published size.
const WINDOW_MAX: u64 = 64 << 20;

/// Largest offset that a file has.
const OFFSET_MAX: u64 = i64::MAX as u64;

/// What was settled for an operation already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It has just come.
    Nothing,
    /// Nodes at which files sit have published what was written before it came; they go on.
    Seats,
}

/// What became of bytes that were written quietly.
pub struct Told {
    /// They are attached.
    pub granted: Vec<ByteRange>,
    /// Others have changed them since.
    pub refused: Vec<ByteRange>,
}

impl Core {
    /// A node tells what it wrote quietly: which of it is to be attached.
    pub fn told_quietly(
        &self,
        state: &mut State,
        node: NodeId,
        op: &pb::Attach,
        ranges: &[ByteRange],
    ) -> Result<Told, Errno> {
        let ino = Ino(op.ino);
        if self.seat_elsewhere(state, node, ino) != 0 {
            // A word that comes late: the file sits somewhere since.
            return Ok(Told { granted: Vec::new(), refused: ranges.to_vec() });
        }
        let since = Version(op.quiet_since);
        let (granted, refused) = state.file(ino)?.judge_quiet(node, ranges, since);
        Ok(Told { granted, refused })
    }

    /// A node has told all that it wrote quietly. How far it may write so from now on; 0: no more.
    pub fn quiet_again(&self, state: &mut State, call: &Call, op: &pb::Attach) -> u64 {
        let (ino, node) = (Ino(op.ino), call.who.node);
        let Some(file) = state.files.get(&ino) else { return 0 };
        let mut entries = Vec::new();
        if file.has_lapsed(node) {
            entries.push(Entry::File(ino, FileOp::TakeBack(node)));
        }
        let end = op.quiet_wish.min(file.size().saturating_add(WINDOW_MAX)).min(OFFSET_MAX);
        let lends = end > 0 && op.lease > 0 && self.may_lend_quiet(state, call, ino);
        if lends {
            entries.push(Entry::File(ino, FileOp::Quiet(node, Some(end))));
        }
        self.commit(state, &entries);
        if !lends {
            self.end_quiet(state, node, ino);
        }
        if lends { end } else { 0 }
    }

    /// Only to the one node that has the file open, and not where others have just asked.
    fn may_lend_quiet(&self, state: &State, call: &Call, ino: Ino) -> bool {
        let node = call.who.node;
        state.quiet_node(ino).is_none_or(|holder| holder == node)
            && self.seat_elsewhere(state, node, ino) == 0
            && state.ns.is_open_by(ino, node)
            && !state.ns.is_open_by_others(ino, node)
            && !state.pairs.contains_key(&node)
            && self.desk.leases.lock().lends_alone(call.stream, ino, now_ms())
    }

    /// With which lease the right to write quietly went out.
    pub fn note_quiet_grant(&self, ino: Ino, stream: StreamId, seq: u64) {
        self.quiet_grants.lock().insert(ino, (stream, seq));
    }

    /// A node has returned a lease: with the one that its right came with, the right ends. (On
    /// another stream it has no right any more, and has told what there was.)
    pub fn quiet_returned(&self, node: NodeId, stream: StreamId, op: &pb::Returned) {
        let ino = Ino(op.ino);
        let mut state = self.state();
        if state.quiet_node(ino) != Some(node) {
            return;
        }
        let newer = |(on, seq): &(StreamId, u64)| *on == stream && *seq > op.seq;
        let grants = self.quiet_grants.lock();
        if grants.get(&ino).is_some_and(newer) {
            return;
        }
        drop(grants);
        self.end_quiet(&mut state, node, ino);
    }

    /// A node has told all that it wrote quietly and writes so no more.
    pub fn end_quiet(&self, state: &mut State, node: NodeId, ino: Ino) {
        if state.quiet_node(ino) == Some(node) {
            self.quiet_grants.lock().remove(&ino);
            self.commit(state, &[Entry::File(ino, FileOp::Quiet(node, None))]);
        }
    }

    /// A node has closed a file of which it has told everything. It may have been given up since, while
    /// its word was on the way: then what became its own was never written.
    pub fn settled_at_close(&self, state: &mut State, node: NodeId, ino: Ino) {
        self.end_quiet(state, node, ino);
        if state.files.get(&ino).is_some_and(|f| f.has_lapsed(node)) {
            self.commit(state, &[Entry::File(ino, FileOp::TakeBack(node))]);
        }
    }

    /// The inodes of an operation that another node may have written to quietly.
    pub fn quiet_before(&self, node: NodeId, op: &Op, settled: Settled) -> Vec<Ino> {
        // What is made tells nothing of what is there, and a seat that is asked may have to wait for
        // its own node to make something.
        let settled = if matches!(op, Op::Make(_)) { Settled::Seats } else { settled };
        let state = self.state();
        let seated = |ino: Ino| self.seat_elsewhere(&state, node, ino) != 0;
        if state.quiet.is_empty() && !changes(op).is_some_and(seated) {
            return Vec::new();
        }
        let others = |ino: &Ino| match settled {
            Settled::Seats => state.quiet_node(*ino).is_some_and(|holder| holder != node),
            Settled::Nothing => {
                state.untold_writer(*ino).is_some_and(|writer| writer != node)
                    || (changes(op) == Some(*ino) && seated(*ino))
            }
        };
        let in_dir = |dir: u64, name: Option<&[u8]>| {
            let named = |ino: &&Ino| {
                let links = state.ns.get(**ino).map_or(&[][..], |inode| &inode.links);
                links
                    .iter()
                    .any(|l| l.parent.0 == dir && name.is_none_or(|n| l.name.as_bytes() == n))
            };
            state.quiet.iter().filter(named).copied().collect::<Vec<_>>()
        };
        let mut inos = match op {
            Op::Lookup(l) => in_dir(l.parent, Some(&l.name)),
            Op::Make(m) => in_dir(m.parent, Some(&m.name)),
            Op::ReadDir(r) => in_dir(r.ino, None),
            Op::Materialize(_) => state.quiet.iter().copied().collect(),
            op => named(op).map(Ino).into_iter().collect(),
        };
        inos.retain(others);
        inos
    }

    /// The same of what an answer tells: a name can mean another inode by now.
    fn quiet_told(&self, node: NodeId, settled: Settled, result: &OpResult) -> Vec<Ino> {
        let state = self.state();
        if state.quiet.is_empty() {
            return Vec::new();
        }
        let mut inos = told(result);
        let writer = |ino: Ino| match settled {
            Settled::Seats => state.quiet_node(ino),
            Settled::Nothing => state.untold_writer(ino),
        };
        inos.retain(|ino| writer(*ino).is_some_and(|writer| writer != node));
        inos
    }

    /// The operation to be done again, and what must be settled for it first.
    pub fn told_too_little(
        &self,
        (node, settled): (NodeId, Settled),
        again: Option<Op>,
        result: &OpResult,
    ) -> Option<(Op, Vec<Ino>)> {
        let again = again?;
        let quiet = self.quiet_told(node, settled, result);
        (!quiet.is_empty()).then_some((again, quiet))
    }

    /// Waits until no node but `asker` may have written to these inodes quietly, or past its daemon
    /// before this.
    pub async fn settle_quiet(&self, asker: NodeId, inos: &[Ino]) -> Result<(), OpError> {
        // All are asked before anybody is waited for.
        for ino in inos {
            let _ = self.ask_quiet(asker, *ino);
        }
        let seats: Vec<_> = inos.iter().filter_map(|ino| self.ask_seat(asker, *ino)).collect();
        for ino in inos {
            loop {
                let returned = self.desk.returned.notified();
                let Some(wait) = self.ask_quiet(asker, *ino) else { break };
                // In either case it is looked again.
                let _ = tokio::time::timeout(wait, returned).await;
            }
        }
        let mut settled = Ok(());
        for asked in seats {
            settled = self.settle_seat(asked).await.and(settled);
        }
        settled
    }

    /// Asks the holder to tell. How long it may take at most until it must be looked again; `None`:
    /// nobody else writes quietly.
    fn ask_quiet(&self, asker: NodeId, ino: Ino) -> Option<Duration> {
        let mut state = self.state();
        let holder = state.quiet_node(ino).filter(|holder| *holder != asker)?;
        let now = now_ms();
        let (recalls, until) = {
            let mut leases = self.desk.leases.lock();
            let recalls = leases.demand(ino, holder, now);
            (recalls, leases.trusted_until(holder, now))
        };
        recalls.into_iter().for_each(|recall| self.send_recall(recall));
        let Some(until) = until else {
            tracing::warn!(%ino, node = %holder, "given up: what it wrote and did not tell is lost");
            self.commit(&mut state, &[Entry::File(ino, FileOp::Lapse)]);
            self.quiet_grants.lock().remove(&ino);
            return None;
        };
        Some(Duration::from_millis(until.saturating_sub(now) + 1))
    }

    /// What a node wrote quietly is lost with its cache.
    pub fn lose_quiet_of(&self, node: NodeId) {
        let mut state = self.state();
        let its = |f: &FileState| f.has_lapsed(node) || f.quiet().is_some_and(|q| q.node == node);
        let files = state.files_of(node).filter(|(_, file)| its(file));
        let lost: Vec<Entry> = files.map(|(ino, _)| Entry::File(ino, FileOp::Lose(node))).collect();
        self.commit(&mut state, &lost);
    }
}

/// The file whose bytes, size or times an operation tells or changes.
fn named(op: &Op) -> Option<u64> {
    match op {
        Op::GetAttr(g) => Some(g.ino),
        Op::SetAttr(s) => Some(s.ino),
        Op::Link(l) => Some(l.ino),
        Op::Open(o) => Some(o.ino),
        Op::Query(q) => Some(q.ino),
        Op::Attach(a) => Some(a.ino),
        Op::Append(a) => Some(a.ino),
        Op::Detach(d) => Some(d.ino),
        Op::FlushBegin(f) => Some(f.ino),
        Op::Adopt(a) => Some(a.ino),
        Op::Share(s) => Some(s.ino),
        Op::GetXattr(x) => Some(x.ino),
        Op::SetXattr(x) => Some(x.ino),
        Op::SetLock(l) => Some(l.ino),
        _ => None,
    }
}

/// With this a node tells what it must before it returns a lease of the inode. (It believes nothing of
/// the inode meanwhile.)
pub fn tells_first(op: &Op) -> bool {
    matches!(op, Op::Attach(a) if a.settles)
}

/// What a node asks while nothing else can happen to the file there: what it has written without telling it
/// can only tell after that, and so return the lease of the inode. (It has been called back before the
/// answer, and is not believed any more.)
pub fn comes_first(op: &Op) -> bool {
    matches!(op, Op::Attach(_) | Op::Append(_) | Op::Open(_) | Op::SetAttr(_) | Op::Query(_))
}

/// What can be done again when its answer would tell too little.
pub fn can_be_repeated(op: &Op) -> bool {
    matches!(op, Op::Lookup(_) | Op::ReadDir(_))
}
