//! What passes between a node and the service, and from where a node gets bytes: the pretend
//! RPCs and the pretend I/O of the explorer.

use super::fault::Fault;
use super::world::{FILE, GARBAGE, Setup, World, Wrong, indexes, only_of};
use crate::ownership::MapAnswer;
use crate::view::{Piece, Source};
use ebb_types::{ByteRange, Version};

impl World {
    // ---- between node and service --------------------------------------------------------------

    pub(super) fn serve_attach(
        &mut self,
        setup: &Setup<'_>,
        n: usize,
        ranges: &[ByteRange],
    ) -> (Version, u64) {
        if setup.fault != Some(Fault::AttachLost) {
            self.service.attach(self.nodes[n].id, ranges);
            if !ranges.is_empty() {
                self.call_back(setup, n);
            }
        }
        let size = match setup.fault {
            Some(Fault::SizeNeverGrows) => setup.program.base,
            _ => self.service.size(),
        };
        (self.service.version(), size)
    }

    pub(super) fn end_attach(
        &mut self,
        setup: &Setup<'_>,
        n: usize,
        ranges: &[ByteRange],
        version: Version,
        size: u64,
    ) {
        if ranges.is_empty() {
            return;
        }
        let view = &mut self.nodes[n].view;
        let mut ranges = ranges.to_vec();
        if setup.fault == Some(Fault::AttachCoversRewritten) {
            ranges.extend(view.take_unattached(FILE));
        }
        let changes = view.attached(&ranges, version, size);
        self.scramble(n, &changes.overtaken);
    }

    pub(super) fn serve_query(
        &self,
        setup: &Setup<'_>,
        n: usize,
        range: ByteRange,
        narrow: bool,
    ) -> MapAnswer {
        let narrow = narrow && range != FILE;
        let known = if narrow { Version::ZERO } else { self.nodes[n].view.known_version() };
        let mut answer = self.service.query(range, known);
        if narrow {
            only_of(&mut answer, range);
        }
        self.spoil(setup, &mut answer);
        answer
    }

    pub(super) fn spoil(&self, setup: &Setup<'_>, answer: &mut MapAnswer) {
        if let Some(fault) = setup.fault {
            fault.spoil(answer, &self.service, setup.program.base);
        }
    }

    /// The node learns an answer; false when it must ask again.
    pub(super) fn learn(&mut self, setup: &Setup<'_>, n: usize, answer: &MapAnswer) -> bool {
        let changes = self.nodes[n].view.apply(answer);
        if setup.passes(n) {
            self.replace_lost(n, &changes);
            return changes.doubtful.is_empty();
        }
        let kept = |fault| setup.fault == Some(fault);
        for (gone, keep) in [
            (&changes.stale, kept(Fault::KeepStale)),
            (&changes.overtaken, kept(Fault::KeepOvertaken)),
        ] {
            if keep {
                let view = &mut self.nodes[n].view;
                gone.iter().for_each(|r| drop(view.fetched(*r, Version(u64::MAX))));
            } else {
                self.scramble(n, gone);
            }
        }
        changes.doubtful.is_empty()
    }

    /// Bytes that are not in the cache any more have no value there.
    pub(super) fn scramble(&mut self, n: usize, gone: &[ByteRange]) {
        gone.iter().for_each(|r| self.nodes[n].cache[indexes(*r)].fill(GARBAGE));
    }

    pub(super) fn cut(&mut self, setup: &Setup<'_>, n: usize, len: u64) {
        let beyond = ByteRange::from(len);
        if len < self.service.size() {
            self.backing[indexes(beyond)].fill(0);
        }
        self.service.truncate(len);
        self.call_back(setup, n);
        self.memory[indexes(beyond)].fill(0);
    }

    // ---- reading -------------------------------------------------------------------------------

    /// The bytes of a piece from where they are; none for a local piece. `None` when they are not
    /// there, or when it is not known where they are.
    pub(super) fn bytes_of(&self, n: usize, piece: &Piece) -> Option<Vec<u8>> {
        let at = indexes(piece.range);
        match piece.source {
            Source::Local => Some(Vec::new()),
            Source::Unknown => None,
            _ if piece.as_of == Version::ZERO => None,
            Source::Peer { node, .. } => {
                let peer = self.nodes.iter().find(|p| p.id == node)?;
                let has = node != self.nodes[n].id && peer.view.local(piece.range);
                has.then(|| peer.cache[at].to_vec())
            }
            Source::Backing => Some(self.backing[at].to_vec()),
            Source::Zero => Some(vec![0; at.len()]),
        }
    }

    pub(super) fn fill(&mut self, setup: &Setup<'_>, n: usize, plan: &[Piece], data: &[Vec<u8>]) {
        let node = &mut self.nodes[n];
        for (piece, bytes) in plan.iter().zip(data).filter(|(_, b)| !b.is_empty()) {
            let as_of = match setup.fault {
                Some(Fault::FetchedNeverAges) => Version(u64::MAX),
                _ => piece.as_of,
            };
            let mut accepted = node.view.fetched(piece.range, as_of);
            if setup.fault == Some(Fault::FillOverLocal) {
                accepted = vec![piece.range];
            }
            for i in accepted.iter().flat_map(|r| indexes(*r)) {
                node.cache[i] = bytes[i - piece.range.start() as usize];
            }
        }
    }

    /// What a read returns: local bytes where there are any, else the fetched ones, else zeros.
    /// `None` when bytes that were local are not any more.
    pub(super) fn result(
        &self,
        n: usize,
        range: ByteRange,
        plan: &[Piece],
        data: &[Vec<u8>],
    ) -> Option<Vec<u8>> {
        let node = &self.nodes[n];
        let mut out = vec![0; range.len() as usize];
        for (piece, bytes) in plan.iter().zip(data) {
            for i in indexes(piece.range) {
                let fetched = bytes.get(i - piece.range.start() as usize);
                let local = node.view.local(ByteRange::at(i as u64, 1));
                let value = if local { node.cache[i] } else { *fetched? };
                out[i - range.start() as usize] = value;
            }
        }
        Some(out)
    }

    pub(super) fn judge(&self, p: usize, range: ByteRange, got: Vec<u8>) -> Result<(), Wrong> {
        let expected = self.memory[indexes(range)].to_vec();
        if got == expected {
            return Ok(());
        }
        Err(Wrong::Read { process: p, op: self.procs[p].op, got, expected })
    }
}
