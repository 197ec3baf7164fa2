//! What this node lends to its peers: the bytes that are in its cache files.

use crate::file::CachedFile;
use crate::node::Node;
use ebb_transport::{ByteSource, CopySet, Lent, SeatWork, SourceError, Subject};
use ebb_types::{ByteRange, Errno, Ino};
use std::sync::{Arc, Weak};

/// The daemon as its peers see it.
pub struct PeerSource(pub Weak<Node>);

impl PeerSource {
    fn file(&self, ino: Ino) -> Option<(Arc<Node>, Arc<CachedFile>)> {
        let node = self.0.upgrade()?;
        let file = node.file(ino)?;
        Some((node, file))
    }

    fn with<T>(
        &self,
        subject: Subject,
        ranges: &[ByteRange],
        then: impl FnOnce(Arc<std::fs::File>) -> T,
    ) -> Option<T> {
        if let Some(set) = subject.held {
            // Whoever asks has heard that the owner is lost: the copies stay as they are.
            let node = self.0.upgrade()?;
            node.replicas.held.close(set);
            return node.replicas.held.open(set, subject.ino, ranges).map(then);
        }
        let (node, file) = self.file(subject.ino)?;
        let all_here = {
            let state = file.state.read();
            // What is written past the daemon is not known to be, and was not published.
            let written = state.passing.as_ref().is_some_and(|p| p.track.is_some());
            ranges.iter().all(|r| match subject.copy_since {
                None => state.view.local(*r),
                Some(version) => !written && state.view.has_copy(*r, version),
            })
        };
        if !all_here {
            return None;
        }
        file.cache(&node.cache).ok().map(then)
    }
}

impl ByteSource for PeerSource {
    fn open_read(&self, subject: Subject, ranges: &[ByteRange]) -> Result<Lent, SourceError> {
        if subject.held.is_some() {
            return self.with(subject, ranges, Lent::copied).ok_or(SourceError::NotHere);
        }
        // Held before the look whether they are here, so that they cannot be given up in between.
        // Other nodes' writes and truncates still take bytes away in place, so they are copied
        // and looked at again afterwards, not sent from the page cache.
        let (_, file) = self.file(subject.ino).ok_or(SourceError::NotHere)?;
        let held = file.hold(ranges);
        self.with(subject, ranges, |cache| Lent::copied_under(cache, Box::new(held)))
            .ok_or(SourceError::NotHere)
    }

    fn still_here(&self, subject: Subject, ranges: &[ByteRange]) -> bool {
        self.with(subject, ranges, |_| ()).is_some() && self.is_right(subject, ranges)
    }

    fn begin_copies(&self, set: CopySet) -> Result<(), Errno> {
        self.0.upgrade().ok_or(Errno::ESTALE)?.replicas.held.begin(set)
    }

    fn keep_copies(
        &self,
        set: CopySet,
        ino: Ino,
        ranges: &[ByteRange],
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let node = self.0.upgrade().ok_or(Errno::ESTALE)?;
        if !node.has_room_for_copies(bytes.len() as u64) {
            return Err(Errno::ENOSPC);
        }
        node.replicas.held.keep(set, ino, ranges, bytes)
    }

    fn at_seat(
        &self,
        ino: Ino,
        work: SeatWork,
        ranges: &[ByteRange],
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let node = self.0.upgrade().ok_or(Errno::ESTALE)?;
        node.runtime.block_on(node.do_at_seat(ino, work, ranges, bytes))
    }

    fn drop_copies(&self, set: CopySet, ino: Ino, ranges: &[ByteRange]) -> Result<(), Errno> {
        self.0.upgrade().ok_or(Errno::ESTALE)?.replicas.held.drop_ranges(set, ino, ranges)
    }
}

/// So much is looked at at a time.
const STEP: u64 = 256 << 10;

impl PeerSource {
    /// What was just sent is what was written here, as far as that is known.
    fn is_right(&self, subject: Subject, ranges: &[ByteRange]) -> bool {
        if subject.held.is_some() {
            return true;
        }
        let Some((node, file)) = self.file(subject.ino) else { return false };
        if file.hear_now(&node.cache).is_err() {
            return false;
        }
        if file.state.read().sums.is_empty() {
            return true;
        }
        let Ok(cache) = file.cache(&node.cache) else { return false };
        let mut bytes = Vec::new();
        ebb_types::in_steps(ranges, STEP, 1).into_iter().flatten().all(|part| {
            bytes.resize(part.len() as usize, 0);
            let read = crate::cache::read_padded(&cache, &mut bytes, part.start());
            read.is_ok() && file.is_right(&node.cache, &bytes, part.start())
        })
    }
}
