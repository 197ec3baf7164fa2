//! Calls about copies of unflushed bytes: where this node's are, and whose it holds.

use crate::client::MetaClient;
use crate::names::expect_body;
use ebb_types::{ByteRange, Errno, Ino, NodeId, Version};
use ebb_wire::pb::{self, reply::Body, request::Op};
use ebb_wire::{range_from_pb, range_to_pb};

/// Copies that this node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Whose bytes.
    pub owner: NodeId,
    /// Of which pair.
    pub epoch: u64,
    /// Everything of them was adopted.
    pub done: bool,
}

/// What the service thinks of pairs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    /// Who should hold copies for this node, and where it is.
    pub partner: Option<(NodeId, String)>,
    /// Of this node's pair as the service has it; 0: none.
    pub epoch: u64,
    /// The partner of that pair is alive.
    pub partner_alive: bool,
    /// Held epochs whose owner is lost: adopt them.
    pub take: Vec<u64>,
    /// Held epochs that are of no use any more.
    pub drop: Vec<u64>,
    /// Held epochs whose owner is not connected just now.
    pub silent: Vec<u64>,
}

/// What became of an adoption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Version of the adopted bytes, when there are any.
    pub version: Version,
    /// Published size of the file.
    pub size: u64,
    /// What is this node's now.
    pub ranges: Vec<ByteRange>,
}

impl MetaClient {
    /// From now on copies of this node's unflushed bytes go to `partner`; the epoch of the new
    /// pair, 0 without a partner.
    pub async fn pair(&self, partner: Option<NodeId>) -> Result<u64, Errno> {
        let partner = partner.map_or(0, |n| n.0);
        let paired = expect_body!(self.call(Op::Pair(pb::Pair { partner })).await?, Paired);
        // A pair without an epoch, or the other way round, is no answer.
        if (paired.epoch == 0) == (partner == 0) { Ok(paired.epoch) } else { Err(Errno::EPROTO) }
    }

    /// Tells what this node holds and asks what the service knows of pairs.
    pub async fn copies(
        &self,
        held: &[Holding],
        wants: bool,
        avoid: &[NodeId],
    ) -> Result<Pairs, Errno> {
        let held =
            held.iter().map(|h| pb::Holding { owner: h.owner.0, epoch: h.epoch, done: h.done });
        let avoid = avoid.iter().map(|n| n.0).collect();
        let op = Op::Copies(pb::Copies { held: held.collect(), wants, avoid });
        let reply = expect_body!(self.call(op).await?, Copies);
        Ok(Pairs {
            partner: (reply.partner != 0).then_some((NodeId(reply.partner), reply.address)),
            epoch: reply.epoch,
            partner_alive: reply.partner_alive,
            take: reply.take,
            drop: reply.drop,
            silent: reply.silent,
        })
    }

    /// Makes this node the owner of what the lost `owner` still owns of these bytes.
    pub async fn adopt(
        &self,
        owner: NodeId,
        epoch: u64,
        ino: Ino,
        ranges: &[ByteRange],
    ) -> Result<Adopted, Errno> {
        let sent = ranges.iter().copied().map(range_to_pb).collect();
        let op = Op::Adopt(pb::Adopt { owner: owner.0, epoch, ino: ino.0, ranges: sent });
        let adopted = expect_body!(self.call(op).await?, Adopted);
        let moved = adopted.ranges.into_iter().map(range_from_pb);
        let moved: Vec<ByteRange> = moved.collect::<Result<_, _>>()?;
        let asked = |m: &ByteRange| ranges.iter().any(|r| r.contains(*m));
        if adopted.version == 0 || adopted.size > i64::MAX as u64 || !moved.iter().all(asked) {
            return Err(Errno::EPROTO);
        }
        Ok(Adopted { version: Version(adopted.version), size: adopted.size, ranges: moved })
    }
}
