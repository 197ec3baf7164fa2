//! Who holds copies of whose unflushed bytes, and what becomes of them when their owner is lost.
//! No bytes come here: a pair is a promise of its owner, kept by the epoch that every attach names.

use super::{Call, OpError, OpResult, ranges};
use crate::core::Core;
use crate::state::{Entry, FileOp, NodeRecord, Orphaned, Outcome, Pair, State};
use ebb_types::{ByteRange, Errno, Incarnation, Ino, NodeId, Version, lives};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use std::collections::{HashMap, VecDeque};

/// Copies of more lost lives than one node can hold are not a list but an attack.
const HELD_MAX: usize = 4096;

/// Appends of a node that are remembered: more than can be under way at a time.
const APPENDS_KEPT: usize = 4096;

/// No daemon has this incarnation: nothing is done for a node that has it.
const NO_LIFE: Incarnation = Incarnation(0);

fn refused(text: &str) -> OpError {
    OpError::new(Errno::EREMCHG, text)
}

/// True for the node that a daemon with an empty cache has left behind.
fn is_ghost(node: &NodeRecord) -> bool {
    node.incarnation == NO_LIFE
}

/// The last appends of each node, with the epoch of their copies: an append gets its place before there
/// are any. In memory only: a service that restarts while a node with an append under way is lost
/// leaves a hole that nobody can read.
#[derive(Debug, Default)]
pub struct Appends(HashMap<NodeId, VecDeque<(u64, Ino, ByteRange)>>);

impl Appends {
    /// A node has got this place.
    pub fn note(&mut self, node: NodeId, epoch: u64, ino: Ino, range: ByteRange) {
        let its = self.0.entry(node).or_default();
        if its.len() == APPENDS_KEPT {
            its.pop_front();
        }
        its.push_back((epoch, ino, range));
    }

    /// It has the bytes itself, or nobody is to have them.
    pub fn forget(&mut self, node: NodeId) {
        self.0.remove(&node);
    }

    fn take(&mut self, node: NodeId, epoch: u64) -> Vec<(Ino, ByteRange)> {
        let all = self.0.remove(&node).unwrap_or_default().into_iter();
        all.filter(|(e, ..)| *e == epoch).map(|(_, ino, range)| (ino, range)).collect()
    }
}

impl Call {
    /// Bytes may only be published under the epoch under which they were copied: older copies of
    /// them, elsewhere, must not count.
    pub(super) fn check_copies(&self, state: &State, epoch: u64) -> Result<(), OpError> {
        let now = state.pairs.get(&self.who.node).map_or(0, |pair| pair.epoch);
        match epoch == now {
            true => Ok(()),
            false => Err(refused("copies of these bytes belong to another pair")),
        }
    }

    pub(super) fn pair(&self, op: &pb::Pair) -> OpResult {
        let me = self.who.node;
        let partner = NodeId(op.partner);
        let mut state = self.core.state();
        if partner == me || (op.partner != 0 && !state.nodes.contains_key(&partner)) {
            return Err(OpError::new(Errno::EINVAL, "no such partner"));
        }
        // This node lives, with its bytes: nobody adopts what it had.
        self.core.appends.lock().forget(me);
        let mut entries = forget_orphans(&state, me);
        let mut epoch = 0;
        if op.partner != 0 {
            epoch = state.next_epoch;
            entries.push(Entry::Paired(me, Some(Pair { partner, epoch })));
        } else if state.pairs.contains_key(&me) {
            entries.push(Entry::Paired(me, None));
        }
        self.core.commit(&mut state, &entries);
        Ok(Some(Body::Paired(pb::Paired { epoch })))
    }

    pub(super) fn copies(&self, op: &pb::Copies) -> OpResult {
        if op.held.len() > HELD_MAX || op.avoid.len() > HELD_MAX {
            return Err(Errno::E2BIG.into());
        }
        let me = self.who.node;
        let mut state = self.core.state();
        let mut reply = pb::CopiesReply::default();
        for held in &op.held {
            self.judge_held(&mut state, held, &mut reply);
        }
        if let Some(pair) = state.pairs.get(&me) {
            reply.epoch = pair.epoch;
            reply.partner_alive = self.core.sessions.is_alive(pair.partner).0;
        }
        if op.wants
            && let Some(node) = self.choose_partner(&state, &op.avoid)
        {
            reply.partner = node.id.0;
            reply.address.clone_from(&node.peer_address);
        }
        Ok(Some(Body::Copies(reply)))
    }

    fn judge_held(&self, state: &mut State, held: &pb::Holding, reply: &mut pb::CopiesReply) {
        let (owner, me) = (NodeId(held.owner), self.who.node);
        let pair = Pair { partner: me, epoch: held.epoch };
        if state.pairs.get(&owner) == Some(&pair) {
            if !self.core.sessions.is_connected(owner) {
                reply.silent.push(held.epoch);
            }
        } else if state.orphaned.get(&held.epoch) != Some(&Orphaned { owner, partner: me }) {
            // Nothing is known of copies from before a state was rebuilt: they are of no use when their owner
            // is here, and perhaps all that there is when it is not.
            let of_before = state.rebuild.as_ref().is_some_and(|r| held.epoch < r.epochs);
            let unproven = of_before
                && (state.owing.contains(&owner) || !self.core.sessions.is_connected(owner));
            if !unproven {
                reply.drop.push(held.epoch);
            }
        } else if held.done {
            let mut entries = vec![Entry::Orphaned(held.epoch, None)];
            entries.extend(self.undo_appends(state, owner, held.epoch));
            let more = state.orphaned.iter().any(|(e, o)| *e != held.epoch && o.owner == owner);
            if !more && state.nodes.get(&owner).is_some_and(is_ghost) {
                entries.push(Entry::NodeLeft(owner));
                // Nobody answers for it any more, unless its cache comes to light.
                entries.push(Entry::Lives(lives::UNKNOWN));
            }
            self.core.commit(state, &entries);
            reply.drop.push(held.epoch);
        } else {
            reply.take.push(held.epoch);
        }
    }

    /// Everything that `owner`'s partner had is adopted. An append gets its place before there are
    /// copies, and is acknowledged when there are: of what the owner was appending when it was lost,
    /// nobody has what is its own still, and nobody was told that it is there.
    fn undo_appends(&self, state: &State, owner: NodeId, epoch: u64) -> Vec<Entry> {
        let appends = self.core.appends.lock().take(owner, epoch);
        let its = |o: &ebb_consistency::Owned| o.node == owner && !o.flushed;
        let missing = |(ino, range): &(Ino, ByteRange)| {
            state.files.get(ino).is_some_and(|file| file.owned_in(*range).any(|o| its(&o)))
        };
        let undone = appends.into_iter().filter(missing);
        undone.map(|(ino, range)| Entry::File(ino, FileOp::UndoAppend(owner, range))).collect()
    }

    /// The next node after this one, in a ring of those that are there.
    fn choose_partner<'s>(&self, state: &'s State, avoid: &[u32]) -> Option<&'s NodeRecord> {
        let me = self.who.node;
        let fits = |n: &&NodeRecord| {
            n.id != me
                && !avoid.contains(&n.id.0)
                && !n.peer_address.is_empty()
                && self.core.sessions.is_connected(n.id)
        };
        let after = state.nodes.range(me..).map(|(_, n)| n);
        after.chain(state.nodes.range(..me).map(|(_, n)| n)).find(fits)
    }

    pub(super) fn adopt(&self, op: &pb::Adopt) -> OpResult {
        let (ino, me) = (Ino(op.ino), self.who.node);
        let ranges = ranges(&op.ranges)?;
        let mut state = self.core.state();
        let owner = NodeId(op.owner);
        if state.orphaned.get(&op.epoch) != Some(&Orphaned { owner, partner: me }) {
            return Err(refused("these copies are of no use any more"));
        }
        let file = state.file(ino)?;
        let any = !file.grantable(owner, &ranges).is_empty();
        let version = if any { file.version().next() } else { Version::ZERO };
        let size = file.size();
        // One record: when it is asked again after a crash, the answer must be the same.
        let mut entries = vec![self.answered(Outcome::Appended(size, version))];
        if any {
            entries.push(Entry::File(ino, FileOp::Adopt(owner, me, ranges.clone())));
        }
        self.core.commit(&mut state, &entries);
        self.adopted(&state, ino, &ranges, version)
    }

    /// The answer to an adoption that took `version`.
    pub(super) fn adopted(
        &self,
        state: &State,
        ino: Ino,
        ranges: &[ByteRange],
        version: Version,
    ) -> OpResult {
        let file = state.file(ino)?;
        let me = self.who.node;
        let moved = ranges.iter().flat_map(|r| file.owned_in(*r));
        let moved = moved.filter(|o| o.node == me && !o.flushed && o.version == version);
        Ok(Some(Body::Adopted(pb::Adopted {
            version: file.version().0,
            size: file.size(),
            ranges: moved.map(|o| ebb_wire::range_to_pb(o.range)).collect(),
        })))
    }
}

/// What makes copies of `owner`'s bytes useless: it has them itself.
pub(crate) fn forget_orphans(state: &State, owner: NodeId) -> Vec<Entry> {
    let its = state.orphaned.iter().filter(|(_, o)| o.owner == owner);
    its.map(|(epoch, _)| Entry::Orphaned(*epoch, None)).collect()
}

/// `partner` has lost what it kept: nobody waits for it.
pub(crate) fn forget_kept_by(state: &State, partner: NodeId) -> Vec<Entry> {
    let kept = state.orphaned.iter().filter(|(_, o)| o.partner == partner);
    kept.map(|(epoch, _)| Entry::Orphaned(*epoch, None)).collect()
}

/// What a node that lost its cache had flushed is the backing's, and no file sits there. The rest
/// gets new versions: copies may be newer than what was published, so nothing that others have
/// fetched counts as the newest.
pub(crate) fn last_words(state: &State, node: NodeId) -> Vec<Entry> {
    // It will have no bytes of them by which that could be told.
    let halves = state.ns.opens_of(node).filter(|ino| state.may_be_half(*ino, node));
    let mut entries: Vec<Entry> = halves.map(|ino| Entry::WritesOver(ino, node, true)).collect();
    for (ino, file) in state.files_of(node) {
        let sits = file.seat().is_some_and(|seat| seat.node == node);
        if sits || file.owned_by(node).any(|o| o.flushed) {
            entries.push(Entry::File(ino, FileOp::Lost(node)));
        }
        let unflushed: Vec<_> =
            file.owned_by(node).filter(|o| !o.flushed).map(|o| o.range).collect();
        if !unflushed.is_empty() {
            entries.push(Entry::File(ino, FileOp::Attach(node, unflushed)));
        }
    }
    entries
}

/// A daemon of this name is back without the bytes of its predecessor. When a partner has copies
/// of these, the predecessor stays behind as a node of its own, which is lost; the new one is
/// another node.
pub(crate) fn leave_ghost(state: &State, node: &NodeRecord) -> Vec<Entry> {
    let orphan = |pair: &Pair| {
        let orphaned = Orphaned { owner: node.id, partner: pair.partner };
        Entry::Orphaned(pair.epoch, Some(orphaned))
    };
    let mut entries: Vec<Entry> = state.pairs.get(&node.id).map(orphan).into_iter().collect();
    if entries.is_empty() && !state.orphaned.values().any(|o| o.owner == node.id) {
        return Vec::new();
    }
    entries.push(Entry::Paired(node.id, None));
    entries.extend(last_words(state, node.id));
    entries.push(Entry::Node(NodeRecord {
        id: node.id,
        name: format!("{} (lost as n{})", node.name, node.id),
        incarnation: NO_LIFE,
        peer_address: String::new(),
    }));
    entries
}

impl Core {
    /// A node is lost, or as good as lost: its partner may adopt what it holds copies of, and what
    /// it had flushed is read from the backing. It publishes nothing before it has begun another
    /// pair.
    pub fn orphan(&self, node: NodeId) {
        let mut state = self.state();
        let Some(pair) = state.pairs.get(&node).copied() else { return };
        let orphaned = Orphaned { owner: node, partner: pair.partner };
        let mut entries =
            vec![Entry::Paired(node, None), Entry::Orphaned(pair.epoch, Some(orphaned))];
        entries.extend(last_words(&state, node));
        tracing::warn!(%node, partner = %pair.partner, "lost: its partner adopts its bytes");
        self.commit(&mut state, &entries);
    }
}
