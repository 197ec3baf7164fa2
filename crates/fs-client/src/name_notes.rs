//! What the node journal keeps of names: what the service says along with its answers to this node's
//! changes of names (`ebb_namespace::Book`). So names, modes, links, empty files and directories that this
//! node made come back with `ebb recover`, also when the service and its state are lost.
//!
//! Facts are pushed before the answer that they came with is handed on. They are written like every other
//! note: within a second, or with a sync of names. So that nothing is missing when the daemon is killed and
//! another one takes its place, each request is noted, and that is written, before it is sent; of those
//! without a noted answer the next daemon asks how the names are.

use crate::config::Durability;
use crate::node::Node;
use ebb_meta_client::NameNotes;
use ebb_node_journal::Journal;
use ebb_types::{Errno, Facts, Subjects};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often it is looked for directories of which it is not known where they are.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Directories that are asked for at once.
const PLACES_AT_ONCE: usize = 256;

/// So many facts are much to remember: the service is asked to bring names to the backing.
const MANY: usize = 1 << 17;

/// And so often at most.
const SETTLE_EVERY: Duration = Duration::from_secs(30);

/// Keeps what is heard of names in the node's journal, once there is one.
pub(crate) struct InJournal(pub Weak<Node>);

impl InJournal {
    fn journal(&self) -> Option<Arc<Journal>> {
        self.0.upgrade()?.journal.get().cloned()
    }
}

/// A request from before there was a journal.
const UNNOTED: u64 = 0;

impl NameNotes for InJournal {
    fn asking(&self, about: Subjects) -> u64 {
        self.journal().map_or(UNNOTED, |journal| journal.ask(about))
    }

    fn answered(&self, number: u64) {
        if let Some(journal) = self.journal().filter(|_| number != UNNOTED) {
            journal.answered(number);
        }
    }

    fn unanswered(&self, number: u64) {
        if let Some(journal) = self.journal().filter(|_| number != UNNOTED) {
            journal.unanswered(number);
        }
    }

    fn heard(&self, facts: Facts) {
        if let Some(journal) = self.journal() {
            journal.hear(facts);
        }
    }
}

impl Node {
    /// Asks how the names are about which requests were not answered.
    pub(crate) async fn ask_doubts(&self, journal: &Journal) -> Result<(), Errno> {
        for (number, about) in journal.doubts() {
            self.meta.beside_seats().tell(&about).await?;
            journal.answered(number);
        }
        Ok(())
    }

    /// Learns where directories are in which this node changes names, as long as the node lives.
    pub(crate) async fn keep_places(node: Weak<Node>) {
        let mut settled: Option<Instant> = None;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(node) = node.upgrade() else { return };
            let Some(journal) = node.journal.get() else { continue };
            // What is not answered is asked for again.
            let _ = node.ask_doubts(journal).await;
            let _ = node.ask_places(journal).await;
            if journal.facts() > MANY && settled.is_none_or(|at| at.elapsed() > SETTLE_EVERY) {
                // What cannot be brought there yet stays noted. A file that is open for the whole job and
                // replaces an older one must not hold back everything else for ever.
                let _ = node.settle_names(journal.facts() < 4 * MANY).await;
                settled = Some(Instant::now());
            }
        }
    }

    /// The answers come to the journal by the way that all facts come.
    async fn ask_places(&self, journal: &Journal) -> Result<(), Errno> {
        for dir in journal.unplaced(PLACES_AT_ONCE) {
            match self.meta.describe(dir).await {
                // When it is gone, so is what was in it.
                Ok(_) | Err(Errno::ESTALE | Errno::ENOENT) => journal.give_up(dir),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Brings to the backing what has no bytes that would have to be flushed first; `closed`: but for files
    /// that replace older ones and are open.
    async fn settle_names(&self, closed: bool) -> Result<(), Errno> {
        loop {
            let step = match closed {
                true => self.meta.materialize_closed().await,
                false => self.meta.materialize(0).await,
            };
            if step.map_err(Errno::from)?.remaining == 0 {
                return Ok(());
            }
        }
    }

    /// Names are as durable as the service's journal, and as this node's.
    pub async fn sync_names(&self) -> Result<(), Errno> {
        if self.durability() == Durability::None {
            return Ok(());
        }
        self.meta.sync_meta().await?;
        let Some(journal) = self.journal.get() else { return Ok(()) };
        self.ask_places(journal).await?;
        let journal = Arc::clone(journal);
        let synced = tokio::task::spawn_blocking(move || journal.sync()).await;
        synced.unwrap_or(Err(Errno::EIO))
    }
}
