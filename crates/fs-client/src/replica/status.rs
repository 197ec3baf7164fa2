//! What `ebb status` tells of copies.

use crate::node::Node;
use ebb_types::NodeId;
use serde::Serialize;
use std::sync::atomic::Ordering::Relaxed;

/// The copies of this node's bytes, and those that it keeps for others.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct CopyStatus {
    /// 2 with `--replicas 2`.
    pub replicas: u32,
    /// The number of the node that has the copies.
    pub partner: Option<u32>,
    pub partner_name: Option<String>,
    pub copied_bytes: u64,
    /// Published bytes that are here alone just now.
    pub uncopied_bytes: u64,
    /// Something unflushed is here alone.
    pub degraded: Option<Degraded>,
    /// Bytes that this node keeps for others, and of how many of them.
    pub held_bytes: u64,
    pub held_sets: usize,
    /// The numbers of these nodes: one that is lost is among them until its bytes are adopted.
    pub held_for: Vec<u32>,
    /// Bytes of lost nodes that are this node's now.
    pub adopted_bytes: u64,
    /// The metadata service is part of this daemon: when this node is lost, so are the names and the
    /// word whose copies are where.
    pub lost_with_this_node: bool,
}

/// Why unflushed bytes have no copy.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Degraded {
    pub why: String,
    /// Seconds since 1970.
    pub since: u64,
}

impl Node {
    /// See [`CopyStatus`]; `name_of` knows the names of nodes.
    pub(crate) fn copy_status(&self, name_of: impl Fn(NodeId) -> Option<String>) -> CopyStatus {
        let (told, held) = (self.replicas.owner.told(), &self.replicas.held);
        let partner = told.partner.as_ref();
        let list = held.list();
        CopyStatus {
            replicas: if told.wanted { 2 } else { 1 },
            partner: partner.map(|(node, _)| node.0),
            partner_name: partner.map(|(n, at)| name_of(*n).unwrap_or_else(|| at.clone())),
            copied_bytes: told.copied_bytes,
            uncopied_bytes: self.uncopied_bytes(),
            degraded: told
                .degraded
                .map(|(since, why)| Degraded { why, since: since.sec.unsigned_abs() }),
            held_bytes: held.bytes(),
            held_sets: list.len(),
            held_for: list.iter().map(|h| h.owner.0).collect(),
            adopted_bytes: self.replicas.adopted.load(Relaxed),
            lost_with_this_node: told.wanted && self.config.meta.is_none(),
        }
    }
}
