//! Nodes: who is there, who leaves, who was silent for too long.

use super::{Call, OpResult};
use crate::core::Core;
use crate::state::{Entry, State};
use ebb_consistency::StreamId;
use ebb_namespace::Record;
use ebb_types::{Errno, Ino, NodeId, lives};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use std::time::Duration;

/// The last node that leaves waits so long until what was said for recoveries is gone.
const BOARD_GOES_WITHIN: Duration = Duration::from_secs(2);

impl Call {
    pub(super) fn node_info(&self, op: &pb::NodeInfo) -> OpResult {
        let node = NodeId(op.node);
        if op.silent && !self.core.sessions.is_connected(node) {
            self.core.orphan(node);
        }
        let only = (op.node != 0).then_some(node);
        let nodes = self.core.node_records(&self.core.state(), only);
        Ok(Some(Body::NodeInfo(pb::NodeInfoReply { nodes })))
    }

    /// The node leaves: what it flushed is the backing's, what it did not is lost and said so.
    /// On stable storage: from now on nobody can tell again what it flushed.
    pub(super) async fn goodbye(&self) -> OpResult {
        self.check_life()?;
        let node = self.who.node;
        self.core.give_up(node);
        self.core.appends.lock().forget(node);
        let lost: Vec<_> = {
            let mut state = self.core.state();
            let its = state.files_of(node);
            let its = its.filter(|(_, f)| f.unflushed_by_node().contains_key(&node));
            let lost = its.map(|(ino, _)| ino).collect();
            self.core.commit(&mut state, &[Entry::NodeLeft(node)]);
            lost
        };
        for ino in lost {
            self.core.report(ino, "bytes lost with the node that left", Errno::EIO);
        }
        self.core.desk.forget(self.stream);
        self.core.journal.synced(self.core.journal.tail()).await?;
        self.core.sessions.remove(node);
        self.core.remove_board().await;
        Ok(None)
    }
}

/// No node is there, and nothing is in any cache.
fn is_over(state: &State) -> bool {
    let clean = || state.files.values().all(|file| file.is_clean());
    // Nodes without which this state was rebuilt have something to recover.
    let whole = state.rebuild.as_ref().is_none_or(|r| r.done && !r.lacks_nodes());
    state.nodes.is_empty() && whole && clean()
}

impl Core {
    /// The last node has left, and nothing is in any cache: what those that left before have said on the backing
    /// for recoveries is of no use any more.
    async fn remove_board(&self) {
        if !is_over(&self.state()) {
            return;
        }
        let board = self.backing.path().join(ebb_types::name::board_of(self.job()));
        let removing = tokio::task::spawn_blocking(move || match std::fs::remove_dir_all(&board) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                tracing::debug!(error = %e, board = %board.display(), "stays");
                false
            }
            _ => true,
        });
        // Not that the node waits for a backing that hangs.
        let removed = tokio::time::timeout(BOARD_GOES_WITHIN, removing).await;
        let mut state = self.state();
        // Nobody need answer for those that were: whoever joins now begins anew. Not while words of theirs are
        // still there: these would be taken for words of others, who have the same numbers then.
        let gone = matches!(removed, Ok(Ok(true))) && is_over(&state);
        if gone && state.lives() != lives::UNKNOWN {
            self.commit(&mut state, &[Entry::Lives(0)]);
        }
    }

    /// Locks, opens and grants of a node go.
    pub fn give_up(&self, node: NodeId) {
        self.give_up_but(node, |_, _| false);
    }

    /// The same, but for opens of files that are kept.
    fn give_up_but(&self, node: NodeId, kept: impl Fn(&State, Ino) -> bool) {
        self.end_claims_of(node);
        self.unlock_node(node);
        crate::coupling::end_couplings_of(self, node);
        let mut state = self.state();
        let mut records = state.ns.plan_release_all(node);
        records.retain(|r| !matches!(r, Record::Close { ino, .. } if kept(&state, *ino)));
        self.commit_ns(&mut state, records);
    }

    /// A node goes on in another life: only what its dead daemon was doing ends.
    pub fn inherit(&self, node: NodeId) {
        self.end_claims_of(node);
        self.end_lock_waits_of(node);
        crate::coupling::end_awaiting_of(self, node);
    }

    /// Looks for nodes that were silent for too long.
    pub fn check_leases(&self) {
        let _whole = self.coming_and_going.lock();
        let (silent, lost) = self.sessions.overdue(self.lease);
        for node in silent {
            tracing::warn!(%node, "no sign of life for a whole lease");
            self.end_claims_of(node);
            self.orphan(node);
        }
        for node in lost {
            tracing::warn!(%node, "locks and opens given up");
            // First, and in the journal: who gets its locks must not have them beside it.
            let mut state = self.state();
            if state.nodes.contains_key(&node) {
                self.commit(&mut state, &[Entry::GivenUp(node, true)]);
            }
            drop(state);
            // What it was writing over may be half of it: the older file stays until it is back.
            self.give_up_but(node, |state, ino| state.may_be_half(ino, node));
        }
    }

    /// A heartbeat on the node's stream: it has heard what it was welcomed with.
    pub fn heard_welcome(&self, node: NodeId, stream: StreamId) {
        let mut state = self.state();
        if state.given_up.contains(&node)
            && self.sessions.stream_of(node).is_some_and(|(_, serial)| serial == stream)
        {
            self.commit(&mut state, &[Entry::GivenUp(node, false)]);
        }
    }

    /// All nodes, or one, as sent.
    pub fn node_records(&self, state: &State, only: Option<NodeId>) -> Vec<pb::NodeRecord> {
        let record = |n: &crate::state::NodeRecord| {
            let (alive, dirty_bytes) = self.sessions.is_alive(n.id);
            let pair = copies_of(state, n.id);
            let lost = pair.is_some() && !state.pairs.contains_key(&n.id);
            pb::NodeRecord {
                id: n.id.0,
                name: n.name.clone(),
                peer_address: n.peer_address.clone(),
                alive,
                incarnation: n.incarnation.0,
                dirty_bytes,
                partner: pair.map_or(0, |(partner, _)| partner.0),
                copies: pair.map_or(0, |(_, epoch)| epoch),
                lost,
            }
        };
        match only {
            Some(node) => state.nodes.get(&node).map(record).into_iter().collect(),
            None => state.nodes.values().map(record).collect(),
        }
    }
}

/// Who has copies of a node's bytes, and of which epoch; the newest ones, when it is lost.
fn copies_of(state: &State, node: NodeId) -> Option<(NodeId, u64)> {
    let orphaned = state.orphaned.iter().filter(|(_, o)| o.owner == node);
    let orphaned = orphaned.map(|(epoch, o)| (o.partner, *epoch)).next_back();
    state.pairs.get(&node).map(|pair| (pair.partner, pair.epoch)).or(orphaned)
}
