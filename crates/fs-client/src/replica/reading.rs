//! Reading the copies of a node that does not answer, from its partner.

use crate::cache::read_padded;
use crate::file::CachedFile;
use crate::node::Node;
use ebb_consistency::Owned;
use ebb_meta_client::QueryRequest;
use ebb_transport::{CopySet, ReadError, ReadRequest};
use ebb_types::{ByteRange, Errno, NodeId, Version};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// A node that did not answer is not asked again for so long, when its partner can be.
const DOWN: Duration = Duration::from_secs(2);

/// Between two looks whether its partner has taken over.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// What there is instead of an owner's answer.
pub(crate) enum Instead {
    /// The bytes.
    Bytes(Vec<u8>),
    /// Somebody else owns them by now, or soon: ask the service again.
    Again,
    /// The owner is heard by the service: it may be back since it did not answer.
    Owner,
    /// Nothing.
    Nothing,
}

impl Node {
    /// True when this node did not answer a moment ago.
    pub(crate) fn is_down(&self, node: NodeId) -> bool {
        let mut down = self.replicas.down.lock();
        down.retain(|_, since| since.elapsed() < DOWN);
        down.contains_key(&node)
    }

    /// `owner` did not answer: from where else its bytes can be had, when its partner takes over
    /// within `patience`. Without `--replicas 2` there is nothing but the owner.
    ///
    /// Copies are read only once the service counts their owner as lost: it publishes nothing any
    /// more, the set is closed, and what others have fetched from it before is not the newest.
    pub(crate) async fn instead_of(
        &self,
        file: &CachedFile,
        owner: NodeId,
        range: ByteRange,
        patience: Duration,
    ) -> Result<Instead, Errno> {
        if !self.replicas.owner.is_wanted() {
            return self.owner_or_nothing(owner).await;
        }
        let end = Instant::now() + patience;
        loop {
            let record = self.meta.silent_node(owner).await?;
            // Tells the new versions, and waits until everybody knows.
            if !self.is_owner(file, owner, range).await? {
                return Ok(Instead::Again);
            }
            let Some(record) = record else { return Ok(Instead::Nothing) };
            if record.alive && !record.lost {
                return Ok(Instead::Owner);
            }
            if record.partner == 0 {
                return Ok(Instead::Nothing);
            }
            if record.lost {
                let set = CopySet { owner, epoch: record.copies };
                if let Some(bytes) =
                    self.read_copies(NodeId(record.partner), set, file, range).await?
                {
                    self.replicas.down.lock().insert(owner, Instant::now());
                    return Ok(Instead::Bytes(bytes));
                }
                // Being adopted just now, or not there.
            }
            if Instant::now() >= end {
                return Ok(Instead::Nothing);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Within its lease a node may come back: another daemon goes on for one that was killed.
    async fn owner_or_nothing(&self, owner: NodeId) -> Result<Instead, Errno> {
        let nodes = self.meta.nodes(Some(owner)).await?;
        let alive = nodes.iter().any(|n| n.id == owner.0 && n.alive);
        Ok(if alive { Instead::Owner } else { Instead::Nothing })
    }

    async fn read_copies(
        &self,
        partner: NodeId,
        set: CopySet,
        file: &CachedFile,
        range: ByteRange,
    ) -> Result<Option<Vec<u8>>, Errno> {
        match partner == self.me {
            true => Ok(self.read_held(set, file, range)),
            false => self.read_at_partner(partner, set, file, range).await,
        }
    }

    fn read_held(&self, set: CopySet, file: &CachedFile, range: ByteRange) -> Option<Vec<u8>> {
        let held = &self.replicas.held;
        held.close(set);
        let copies = held.open(set, file.ino, &[range])?;
        let mut bytes = vec![0; range.len() as usize];
        read_padded(&copies, &mut bytes, range.start()).ok()?;
        // They may have gone while they were read.
        held.has(set, file.ino, &[range]).then_some(bytes)
    }

    async fn read_at_partner(
        &self,
        partner: NodeId,
        set: CopySet,
        file: &CachedFile,
        range: ByteRange,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let Some(address) = self.address_of(partner).await? else { return Ok(None) };
        let (ino, ranges) = (file.ino, vec![range]);
        let request = ReadRequest { ino, copy_since: None, held: Some(set), ranges };
        match self.peers.read(&address, &request).await {
            Ok(bytes) if bytes.len() as u64 == range.len() => {
                self.metrics.fetched_peer.fetch_add(range.len(), Relaxed);
                Ok(Some(bytes.to_vec()))
            }
            Ok(_) => Err(Errno::EPROTO),
            Err(e) => {
                self.addresses.lock().remove(&partner);
                if e != ReadError::NotHere {
                    tracing::warn!(ino = %file.ino, %range, node = %partner, error = %e, "no copy");
                }
                Ok(None)
            }
        }
    }

    async fn is_owner(
        &self,
        file: &CachedFile,
        owner: NodeId,
        range: ByteRange,
    ) -> Result<bool, Errno> {
        let query = QueryRequest { ino: file.ino, range, known: Version::ZERO, lease: false };
        let map = self.meta.query(query).await?.map;
        Ok(map.ranges.iter().any(|o: &Owned| o.node == owner && o.range.overlaps(range)))
    }
}
