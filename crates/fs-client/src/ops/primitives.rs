//! The primitives of BaseFS ([`ebb_api_format`]), for programs that say themselves what is published and
//! when it is looked up. They are what the models are made of, so each is a call that the model's
//! events make as well; what is added here are the errors of who asks for something that is not so.
//!
//! | primitive | here | fails when |
//! |---|---|---|
//! | attach | [`Node::attach`] of the range | some of it was never written here (ENODATA) |
//! | query | a question to the service, whatever is known | |
//! | read of an owner | the bytes, when they are that owner's before and after they were had | they are not (ESTALE) |
//! | flush | a drain of the file, when some of the range is not on the backing | the backing fails |
//! | detach | flush, then the service's detach | some of it was never attached here (ENODATA) |
//!
//! * Who *attaches* is the node: its processes share its buffer, as they do in the mount.
//! * A byte that another node took over counts as attached here until it is detached ([`ebb_consistency::AttachedBook`]):
//!   to attach it again, or to detach it, does nothing.
//! * Bytes that were attached and not flushed are on no other disk. BaseFS drops them with a detach; here the
//!   flusher may have been there first, so whether they were dropped would be chance. They are flushed.
//! * A model's own events go on as in every call: primitives make bytes visible earlier, never later.

use crate::file::CachedFile;
use crate::node::Node;
use bytes::Bytes;
use ebb_consistency::Owned;
use ebb_meta_client::QueryRequest;
use ebb_transport::ReadRequest;
use ebb_types::{ByteRange, Errno, NodeId, Version};
use std::sync::Arc;

/// How often what was flushed is written again meanwhile before a detach gives up.
const FLUSHES: usize = 4;

/// What is said of a file.
pub(crate) struct Standing {
    pub size: u64,
    pub unattached: u64,
    pub unflushed: u64,
    pub model: String,
}

impl Node {
    /// The length of the file as the service has it now, and what of it is only here.
    pub(crate) async fn standing(&self, file: &Arc<CachedFile>) -> Result<Standing, Errno> {
        self.collect(file)?;
        self.query(file, ByteRange::at(0, 0)).await?;
        let state = file.state.read();
        Ok(Standing {
            size: state.view.size(),
            unattached: state.view.unattached_bytes(),
            unflushed: state.view.unflushed_bytes(),
            model: state.model.name().to_owned(),
        })
    }

    /// Publishes what was written here; `None`: of the whole file, whatever there is.
    pub(crate) async fn attach_asked(
        &self,
        file: &Arc<CachedFile>,
        range: Option<ByteRange>,
    ) -> Result<(), Errno> {
        self.collect(file)?;
        let _turn = file.turn.lock().await;
        if let Some(range) = range {
            let state = file.state.read();
            if !state.attached.covers(range, &state.view.written(range)) {
                return Err(Errno::ENODATA);
            }
        }
        let within = range.unwrap_or(ByteRange::ALL);
        self.attach(file, within, false, false).await?;
        let mut state = file.state.write();
        let ours = range.map_or_else(|| state.view.attached_here(within), |range| vec![range]);
        state.attached.attached(&ours);
        Ok(())
    }

    /// Who attached which bytes of `range` last, and where the answer ends.
    pub(crate) async fn owners(
        &self,
        file: &Arc<CachedFile>,
        range: ByteRange,
    ) -> Result<(Vec<Owned>, u64), Errno> {
        self.tell_if_owed(file).await?;
        // An answer that says nothing because nothing has changed would be of no use.
        let known = Version::ZERO;
        let query = QueryRequest { ino: file.ino, range, known, lease: false };
        let answer = self.meta.query(query).await?;
        if !self.learn(file, &answer) {
            self.query(file, range).await?;
        }
        self.complete(file).await?;
        let map = answer.map;
        let end = map.rest_of(range).map_or(range.end(), ByteRange::start);
        let within = ByteRange::new(range.start(), end);
        let owned = map.ranges.into_iter().filter(|o| o.node != NodeId::NOBODY);
        let owned = owned.map(|o| Owned { range: o.range.intersect(within), ..o });
        Ok((joined(owned.filter(|o| !o.range.is_empty())), end))
    }

    /// The bytes of `range` as `owner` has them, up to the end of the file; nobody: as the backing has.
    pub(crate) async fn read_from(
        &self,
        file: &Arc<CachedFile>,
        range: ByteRange,
        owner: NodeId,
    ) -> Result<Bytes, Errno> {
        self.wait_for_the_disk(file).await?;
        self.collect(file)?;
        let is_owners = || {
            let state = file.state.read();
            let within = range.intersect(ByteRange::new(0, state.view.size()));
            let is = !within.is_empty() && state.view.belongs_to(owner, within);
            (within, is)
        };
        if !is_owners().1 {
            let (owned, end) = self.owners(file, range).await?;
            let (within, is) = is_owners();
            if within.is_empty() {
                return Ok(Bytes::new());
            }
            if !is {
                // What was written here and not attached is over it in this node's eyes.
                let known = ByteRange::new(range.start(), end).contains(within);
                let theirs = known && owner != self.me && is_all(&owned, within, owner);
                return if theirs {
                    self.read_below(file, within, owner).await
                } else {
                    Err(Errno::ESTALE)
                };
            }
        }
        let (within, _) = is_owners();
        let bytes = self.gather(file, within).await?;
        match file.state.read().view.belongs_to(owner, within) {
            true => Ok(bytes),
            false => Err(Errno::ESTALE),
        }
    }

    /// Bytes of another node, or of the backing, over which this one has written.
    async fn read_below(
        &self,
        file: &Arc<CachedFile>,
        range: ByteRange,
        owner: NodeId,
    ) -> Result<Bytes, Errno> {
        if owner == NodeId::NOBODY {
            let base = file.state.read().view.base_len();
            let there = range.intersect(ByteRange::new(0, base));
            let mut bytes = match there.is_empty() {
                true => Vec::new(),
                false => self.fetch_from_backing(file, there).await?,
            };
            bytes.resize(range.len() as usize, 0);
            return Ok(bytes.into());
        }
        let address = self.address_of(owner).await?.ok_or(Errno::ESTALE)?;
        let request = ReadRequest::of_owner(file.ino, vec![range]);
        match self.peers.read(&address, &request).await {
            Ok(bytes) if bytes.len() as u64 == range.len() => Ok(bytes),
            Ok(_) => Err(Errno::EPROTO),
            Err(ebb_transport::ReadError::NotHere) => Err(Errno::ESTALE),
            Err(e) => {
                tracing::warn!(file = file.label(), node = %owner, error = %e, "read of an owner");
                Err(Errno::EIO)
            }
        }
    }

    /// Copies to the backing what was written here, attached or not.
    pub(crate) async fn flush_asked(
        &self,
        file: &Arc<CachedFile>,
        range: Option<ByteRange>,
    ) -> Result<(), Errno> {
        self.collect(file)?;
        let range = range.unwrap_or(ByteRange::ALL);
        let owes = {
            let view = &file.state.read().view;
            !view.unflushed(range).is_empty() || !view.unattached(range).is_empty()
        };
        if owes { self.drain_file(file.ino).await } else { Ok(()) }
    }

    /// Gives up what was attached here. `again`: the same call may have done it before.
    pub(crate) async fn detach_asked(
        &self,
        file: &Arc<CachedFile>,
        range: Option<ByteRange>,
        again: bool,
    ) -> Result<(), Errno> {
        self.collect(file)?;
        if let Some(range) = range.filter(|_| !again) {
            let state = file.state.read();
            let own = state.view.attached_here(range);
            if !state.attached.covers(range, &own) || !state.view.unattached(range).is_empty() {
                return Err(Errno::ENODATA);
            }
        }
        let range = range.unwrap_or(ByteRange::ALL);
        for _ in 0..FLUSHES {
            if file.state.read().view.unflushed(range).is_empty() {
                let _turn = file.turn.lock().await;
                if self.detach_in_turn(file, range).await? {
                    return Ok(());
                }
            }
            self.drain_file(file.ino).await?;
        }
        Err(Errno::EBUSY)
    }

    /// False: some of it is not flushed.
    async fn detach_in_turn(&self, file: &CachedFile, range: ByteRange) -> Result<bool, Errno> {
        let ranges = {
            let state = file.state.read();
            if !state.view.unflushed(range).is_empty() {
                return Ok(false);
            }
            let ranges = state.view.detachable(range);
            // What the kernel reads past the daemon must stay.
            if state.passing.is_some() && !ranges.is_empty() {
                return Err(Errno::EBUSY);
            }
            ranges
        };
        if !ranges.is_empty() {
            // With the turn, none of them can be attached again meanwhile.
            let answer = self.meta.detach(file.ino, &ranges).await?;
            let mut state = file.state.write();
            state.view.detached(&ranges, answer);
            state.alone.changed(answer.version, false);
        }
        file.state.write().attached.detached(range);
        Ok(true)
    }
}

/// Neighbours of one owner are one.
fn joined(owned: impl Iterator<Item = Owned>) -> Vec<Owned> {
    let mut all: Vec<Owned> = Vec::new();
    for o in owned {
        match all.last_mut() {
            Some(last) if last.node == o.node && last.range.end() == o.range.start() => {
                last.range = ByteRange::new(last.range.start(), o.range.end());
            }
            _ => all.push(o),
        }
    }
    all
}

/// True when `owned`, in order and neighbours joined, says that all of `range` is `owner`'s.
fn is_all(owned: &[Owned], range: ByteRange, owner: NodeId) -> bool {
    match owner {
        NodeId::NOBODY => !owned.iter().any(|o| o.range.overlaps(range)),
        _ => owned.iter().any(|o| o.node == owner && o.range.contains(range)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Beside one cell for each byte.
        #[test]
        fn who_owns_all_of_it(cells in prop::collection::vec(0_u32..3, 30), at in 0_usize..29, len in 1_usize..9) {
            let single = |(at, node): (usize, &u32)| Owned {
                range: ByteRange::at(at as u64, 1),
                node: NodeId(*node),
                version: Version(1),
                flushed: false,
            };
            let owned = cells.iter().enumerate().filter(|(_, n)| **n != 0).map(single);
            let owned = joined(owned);
            prop_assert!(owned.windows(2).all(|w| w[0].range.end() < w[1].range.start() || w[0].node != w[1].node));
            let end = (at + len).min(30);
            let range = ByteRange::new(at as u64, end as u64);
            for who in 0..3 {
                let all = cells[at..end].iter().all(|n| *n == who);
                prop_assert_eq!(is_all(&owned, range, NodeId(who)), all, "{}", who);
            }
        }
    }
}
