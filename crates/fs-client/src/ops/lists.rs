//! Lists of pieces: many reads or writes of one file in a few requests. They see and do what single
//! calls would; what a model says of a read or write is done once for all pieces, and bytes of other nodes
//! come in one message from each.
//!
//! Nothing but the pieces themselves is written: what is between them may be others'. A request keeps
//! nothing for the next one. Pieces that were stored and not published, because their program died before
//! the last request, are published with its close, as those of a write whose publication failed.

use crate::file::{CachedFile, Place};
use crate::node::Node;
use crate::ops::data::{Rest, Written};
use crate::ops::fetch::is_unknown;
use crate::ops::sync::is_gone;
use bytes::Bytes;
use ebb_consistency::{Piece, Source, SyncEvent};
use ebb_transport::ReadRequest;
use ebb_types::{ByteRange, Errno, NodeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Bytes between two pieces that are fetched with them.
const GAP: u64 = 4096;

/// How many bytes of a list are stored.
#[derive(Default)]
pub(crate) struct ListStored {
    pub bytes: usize,
    /// Why not all.
    pub stopped: Option<Errno>,
    /// They must be published before the program may go on.
    pub publish: bool,
}

impl Node {
    /// Stores the bytes of `data` in `pieces`, one after the other.
    pub(crate) async fn write_list(
        &self,
        file: &Arc<CachedFile>,
        pieces: &[ByteRange],
        data: &[u8],
    ) -> ListStored {
        let mut done = ListStored::default();
        for piece in pieces {
            let Some(part) = data.get(done.bytes..done.bytes + piece.len() as usize) else {
                done.stopped = Some(Errno::EINVAL);
                break;
            };
            if let Err(e) = self.write_piece(file, piece.start(), part, &mut done).await {
                done.stopped = Some(e);
                break;
            }
        }
        // Pages that the kernel has of the file for mappings are of before.
        self.locked_anew(file).await;
        done
    }

    async fn write_piece(
        &self,
        file: &Arc<CachedFile>,
        offset: u64,
        data: &[u8],
        done: &mut ListStored,
    ) -> Result<(), Errno> {
        let mut at = 0;
        while at < data.len() {
            let place = Place::At(offset + at as u64);
            let stored = match self.write_at(file, place, &data[at..])? {
                Written::Done(n) => n as usize,
                Written::Then(Rest::Publish(range)) => {
                    done.publish = true;
                    range.len() as usize
                }
                Written::Then(Rest::NoRoom(need, ..)) => {
                    self.make_room(need).await?;
                    continue;
                }
                Written::Then(_) => return Err(Errno::EIO),
            };
            if stored == 0 {
                return Err(Errno::ENOSPC);
            }
            at += stored;
            done.bytes += stored;
        }
        Ok(())
    }

    /// What the model says of a write of these bytes.
    pub(crate) async fn end_list(
        &self,
        file: &Arc<CachedFile>,
        around: ByteRange,
    ) -> Result<(), Errno> {
        let published = self.event(file, SyncEvent::Write, around, false).await;
        if let Err(e) = published
            && !is_gone(e)
        {
            self.write_failed(file, around);
        }
        published
    }

    /// What the model says of a read of these bytes.
    pub(crate) async fn ask_for_list(
        &self,
        file: &Arc<CachedFile>,
        around: ByteRange,
    ) -> Result<(), Errno> {
        self.wait_for_the_disk(file).await?;
        if file.state.read().passing.is_some() {
            return Ok(());
        }
        self.event(file, SyncEvent::Read, around, false).await
    }

    /// What there is of each piece; `each` hears it.
    pub(crate) async fn read_list(
        &self,
        file: &Arc<CachedFile>,
        pieces: &[ByteRange],
        mut each: impl FnMut(&[u8]) + Send,
    ) -> Result<(), Errno> {
        self.fetch_list(file, pieces).await;
        let mut bytes_read = 0;
        for piece in pieces {
            let bytes = self.read_piece(file, *piece).await?;
            bytes_read += bytes.len() as u64;
            each(&bytes);
        }
        self.metrics.bytes_read.fetch_add(bytes_read, Relaxed);
        Ok(())
    }

    async fn read_piece(&self, file: &Arc<CachedFile>, piece: ByteRange) -> Result<Bytes, Errno> {
        if piece.is_empty() {
            return Ok(Bytes::new());
        }
        if file.state.read().passing.is_some() {
            let mut passed = vec![0; piece.len() as usize];
            if let Some(n) = self.read_passed(file, piece.start(), &mut passed)? {
                passed.truncate(n);
                return Ok(passed.into());
            }
        }
        self.gather(file, piece).await
    }

    /// Brings what other nodes have of these pieces, in one message to each of them. Whatever is not
    /// brought, the reads of the pieces fetch as every read does.
    pub(crate) async fn fetch_list(&self, file: &Arc<CachedFile>, pieces: &[ByteRange]) {
        let elsewhere = self.pieces_elsewhere(file, pieces);
        if elsewhere.is_empty() || self.is_over_capacity() && !self.make_room_to_keep().await {
            return;
        }
        let fetches = elsewhere.iter().map(|(node, pieces)| self.fetch_from(file, *node, pieces));
        for (node, fetched) in elsewhere.keys().zip(futures_util::future::join_all(fetches).await) {
            if let Err(e) = fetched {
                tracing::debug!(file = file.label(), %node, error = %e, "pieces of a list are not fetched");
            }
        }
    }

    /// What is not here and with which node; each byte once.
    fn pieces_elsewhere(
        &self,
        file: &CachedFile,
        pieces: &[ByteRange],
    ) -> BTreeMap<NodeId, Vec<Piece>> {
        let mut found: BTreeMap<NodeId, Vec<Piece>> = BTreeMap::new();
        let state = file.state.read();
        if state.passing.is_some() {
            return found;
        }
        // What lies between near pieces costs less than to ask for each of them.
        for range in joined(pieces, GAP) {
            for piece in state.view.plan_read(range) {
                match piece.source {
                    Source::Peer { node, .. } if node != self.me && !is_unknown(&piece) => {
                        found.entry(node).or_default().push(piece);
                    }
                    _ => {}
                }
            }
        }
        found
    }

    async fn fetch_from(
        &self,
        file: &Arc<CachedFile>,
        node: NodeId,
        pieces: &[Piece],
    ) -> Result<(), Errno> {
        let Some(address) = self.address_of(node).await? else { return Err(Errno::ESTALE) };
        let ranges: Vec<ByteRange> = pieces.iter().map(|p| p.range).collect();
        let request = ReadRequest::of_owner(file.ino, ranges);
        let bytes = self.peers.read(&address, &request).await.map_err(|_| Errno::EIO)?;
        if Some(bytes.len() as u64) != request.total() {
            return Err(Errno::EPROTO);
        }
        let mut at = 0;
        for piece in pieces {
            let part = &bytes[at..at + piece.range.len() as usize];
            at += part.len();
            file.keep(&self.cache, piece.range, piece.as_of, part)?;
            self.note_stored(file, piece.range);
        }
        self.metrics.fetched_peer.fetch_add(bytes.len() as u64, Relaxed);
        Ok(())
    }
}

/// The bytes of all pieces, sorted, each once; with those between two of them, where these are not more than
/// `gap`.
fn joined(pieces: &[ByteRange], gap: u64) -> Vec<ByteRange> {
    let mut sorted: Vec<ByteRange> = pieces.iter().copied().filter(|p| !p.is_empty()).collect();
    sorted.sort_unstable();
    let mut all: Vec<ByteRange> = Vec::with_capacity(sorted.len());
    for piece in sorted {
        match all.last_mut() {
            Some(last) if piece.start().saturating_sub(last.end()) <= gap => {
                *last = ByteRange::new(last.start(), last.end().max(piece.end()));
            }
            _ => all.push(piece),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn near_pieces_are_fetched_together(pieces in prop::collection::vec((0_u64..40, 0_u64..9), 0..20), gap in 0_u64..5) {
            let pieces: Vec<_> = pieces.into_iter().map(|(at, len)| ByteRange::at(at, len)).collect();
            let all = joined(&pieces, gap);
            prop_assert!(all.windows(2).all(|w| w[0].end() + gap < w[1].start()));
            for at in 0..60 {
                let of = |ranges: &[ByteRange], at| ranges.iter().any(|r| r.contains_offset(at));
                // Between two pieces that are not further apart than that.
                let before = (0..at).rev().find(|before| of(&pieces, *before));
                let after = (at + 1..60).find(|after| of(&pieces, *after));
                let near = before.zip(after).is_some_and(|(b, a)| a - b - 1 <= gap);
                prop_assert_eq!(of(&all, at), of(&pieces, at) || near, "{}", at);
            }
        }
    }
}
