//! The books of one node for its job: what became of every byte that applications wrote here.
//!
//! Each of them is flushed, or still dirty, or was skipped: deleted, cut or written over before
//! its turn came (by this node or another one). So what is skipped is known without watching the
//! ways in which bytes go: it is what the other entries leave over.

use crate::metrics::Metrics;
use crate::node::Node;
use ebb_flusher::Status as FlushStatus;
use ebb_types::units::Size;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

/// The books.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Written by applications, and dirty bytes that an earlier daemon left in the cache.
    pub absorbed_bytes: u64,
    /// Brought to the backing.
    pub flushed_bytes: u64,
    /// Deleted, cut or written over before that: they never cost the backing anything.
    pub skipped_bytes: u64,
    /// Not on the backing yet.
    pub dirty_bytes: u64,
    /// Of these, bytes of files that could not be brought there so far.
    pub failed_bytes: u64,
    /// Given up to make room; they were on the backing.
    pub evicted_bytes: u64,
    /// Fetched from other nodes.
    pub fetched_peer_bytes: u64,
    /// Fetched from the backing.
    pub fetched_backing_bytes: u64,
    /// Fetched because somebody asked for it before it was read.
    pub staged_bytes: u64,
    /// Files of these.
    pub staged_files: u64,
}

impl Ledger {
    /// The books as they stand.
    #[must_use]
    pub fn of(node: &Node, flush: &FlushStatus) -> Ledger {
        let Metrics { bytes_written, zeroed, taken_over, .. } = &node.metrics;
        let absorbed = [bytes_written, zeroed, taken_over].map(|n| n.load(Relaxed)).iter().sum();
        let skipped = u64::saturating_sub(absorbed, flush.flushed_bytes);
        Ledger {
            absorbed_bytes: absorbed,
            flushed_bytes: flush.flushed_bytes,
            skipped_bytes: skipped.saturating_sub(flush.dirty_bytes),
            dirty_bytes: flush.dirty_bytes,
            failed_bytes: flush.failing_bytes,
            evicted_bytes: node.room.evicted(),
            fetched_peer_bytes: node.metrics.fetched_peer.load(Relaxed),
            fetched_backing_bytes: node.metrics.fetched_backing.load(Relaxed),
            staged_bytes: node.metrics.staged_bytes.load(Relaxed),
            staged_files: node.metrics.staged_files.load(Relaxed),
        }
    }
}

/// The summary line at the end of a job.
impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} absorbed, {} flushed, {} skipped, {} failed, {} not on the backing, {} evicted, \
             {} fetched from the backing and {} from peers, {} staged",
            Size(self.absorbed_bytes),
            Size(self.flushed_bytes),
            Size(self.skipped_bytes),
            Size(self.failed_bytes),
            Size(self.dirty_bytes),
            Size(self.evicted_bytes),
            Size(self.fetched_backing_bytes),
            Size(self.fetched_peer_bytes),
            Size(self.staged_bytes),
        )
    }
}
