//! The service's side of quiet writes: one node may write to a file without telling, as long as
//! nobody else asks about the file. Part of [`FileState`].
//!
//! # What may be written quietly
//!
//! Bytes that the node owns unflushed, and bytes that nobody owns from the published size at the
//! time of the grant up to an end ([`Quiet::window`]). So what is lost with the node is known: the
//! former are lost with their owner anyway, the latter become its own when it is lost
//! ([`FileState::lapse`]), so that they read as errors and neither as zeros nor as a short file.
//!
//! # What the node tells later
//!
//! [`FileState::judge_quiet`] takes what is still the node's, and what is nobody's and has not
//! changed since the grant. It depends on versions alone: a write from before the node was given
//! up never replaces what others have written since, and a service that forgot the grant with the
//! end of its journal takes the bytes all the same.
//!
//! A node that was given up and comes back says what it wrote; what it never wrote of the window is
//! given back ([`FileState::take_back`]) and the file is as long as it was written.

use super::FileState;
use crate::claim::Claim;
use ebb_types::{ByteRange, NodeId, Version};
use serde::{Deserialize, Serialize};

/// A node that may write without telling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Quiet {
    /// Which one.
    pub node: NodeId,
    /// Where it may write new bytes.
    pub window: ByteRange,
}

/// A node that was given up while it could write quietly: what it may have written is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lapsed {
    node: NodeId,
    window: ByteRange,
    version: Version,
}

/// Both, as they are stored beside the state itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuietState {
    pub(super) holder: Option<Quiet>,
    /// At most one for each node.
    pub(super) lapsed: Vec<Lapsed>,
}

impl QuietState {
    /// All nodes that it speaks of.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.holder.iter().map(|q| q.node).chain(self.lapsed.iter().map(|l| l.node))
    }
}

impl FileState {
    /// Who may write quietly.
    #[must_use]
    pub fn quiet(&self) -> Option<Quiet> {
        self.quiet.holder
    }

    /// Who may write without telling.
    #[must_use]
    pub fn untold_writer(&self) -> Option<NodeId> {
        let seat = self.seat.filter(|seat| seat.asked);
        self.quiet.holder.map(|q| q.node).or(seat.map(|seat| seat.node))
    }

    /// True when this node was given up and has not said since what it wrote.
    #[must_use]
    pub fn has_lapsed(&self, node: NodeId) -> bool {
        self.quiet.lapsed.iter().any(|l| l.node == node)
    }

    /// From now on `node` may write quietly, behind the published size as far as `end`. Nobody else
    /// may at that time.
    pub fn lend_quiet(&mut self, node: NodeId, end: u64) {
        let window = ByteRange::new(self.size, end.max(self.size));
        self.quiet.holder = Some(Quiet { node, window });
    }

    /// `node` has told all that it wrote and writes quietly no more.
    pub fn end_quiet(&mut self, node: NodeId) {
        self.quiet.holder.take_if(|q| q.node == node);
    }

    /// What of `ranges`, which `node` wrote quietly since a grant at version `known`, becomes its
    /// own, and what others have changed since: (granted, refused).
    #[must_use]
    pub fn judge_quiet(
        &self,
        node: NodeId,
        ranges: &[ByteRange],
        known: Version,
    ) -> (Vec<ByteRange>, Vec<ByteRange>) {
        let (mut granted, mut refused) = (Vec::new(), Vec::new());
        for range in ranges.iter().copied().filter(|r| !r.is_empty()) {
            let (ours, others) = self.judge_claim(node, range, Claim::Guessed { known });
            granted.extend(ours);
            refused.extend(others);
        }
        (granted, refused)
    }

    /// The node that may write quietly is lost, or as good as lost. What it may have written is its
    /// own, at a new version: copies of it that others have are not the newest.
    pub fn lapse(&mut self) -> Version {
        let Some(Quiet { node, window }) = self.quiet.holder.take() else { return self.version };
        let unflushed = self.tree.of_node(node).filter(|o| !o.flushed);
        let mut ranges: Vec<ByteRange> = unflushed.map(|o| o.range).collect();
        ranges.extend(self.unowned_zeros(window));
        let version = self.attach(node, &ranges);
        self.quiet.lapsed.retain(|l| l.node != node);
        if !window.is_empty() {
            self.quiet.lapsed.push(Lapsed { node, window, version });
        }
        version
    }

    /// A node that was given up is here, and all that it wrote is attached: the rest of what
    /// became its own was never written. It is zeros below the end of what was, and nothing behind.
    pub fn take_back(&mut self, node: NodeId) -> Version {
        let Some(at) = self.quiet.lapsed.iter().position(|l| l.node == node) else {
            return self.version;
        };
        let lapsed = self.quiet.lapsed.remove(at);
        let unwritten =
            |o: &super::Owned| o.node == node && !o.flushed && o.version == lapsed.version;
        let unwritten: Vec<ByteRange> =
            self.tree.overlapping(lapsed.window).filter(unwritten).map(|o| o.range).collect();
        self.disown(&unwritten, lapsed.window)
    }

    /// What a node wrote quietly is lost: it will never be told.
    pub fn lose_quiet(&mut self, node: NodeId) {
        if self.quiet.holder.is_some_and(|q| q.node == node) {
            self.lapse();
        }
        self.quiet.lapsed.retain(|l| l.node != node);
    }

    /// The parts of `range` that nobody owns and the backing does not have.
    fn unowned_zeros(&self, range: ByteRange) -> Vec<ByteRange> {
        let zeros = range.intersect(ByteRange::from(self.base_len));
        let mut out = Vec::new();
        let mut at = zeros.start();
        for owned in self.tree.overlapping(zeros) {
            super::push(&mut out, ByteRange::new(at, owned.range.start()));
            at = owned.range.end();
        }
        super::push(&mut out, ByteRange::new(at, zeros.end()));
        out
    }

    /// What is known of quiet writes, to be stored beside the state itself; `None`: nothing.
    #[must_use]
    pub fn stored_quiet(&self) -> Option<QuietState> {
        (self.quiet != QuietState::default()).then(|| self.quiet.clone())
    }

    /// Brings that back.
    pub fn restore_quiet(&mut self, stored: &QuietState) {
        self.quiet = stored.clone();
    }
}

#[cfg(test)]
#[path = "quiet_tests.rs"]
mod tests;
