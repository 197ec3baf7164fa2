//! After a power loss: what the end of the journal said is lost, and the nodes know it.
//!
//! A journal that another boot wrote may lack its end: what was not on stable storage, at most the last
//! second. The service that reads it gives out no number that may have been given out then ([`leap`]),
//! and asks every node of the job to tell what it knows of files from that time ([`Op::Reassert`]; what
//! becomes of it is in [`ebb_consistency::Assertion`]). Names are not told again: a file that was
//! made in that time is not known, and kept where its bytes are.
//!
//! Consistency: until every node has told, requests wait, but for those that telling needs
//! ([`Core::awaits_words`]); so nobody is answered from a state that is about to be mended. Who has not
//! told within a lease is waited for no longer: what it tells when it comes is taken all the
//! same, where nobody has changed anything since.
//! Retries: to tell again what was told changes nothing. A service that dies meanwhile goes on asking
//! those who have not told ([`State::owing`]).
//! Completion: a lease after the service began, at the latest.

use crate::core::Core;
use crate::lineage::Start;
use crate::quiet::tells_first;
use crate::state::State;
use ebb_types::Version;
use ebb_wire::pb::request::Op;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Below these bits of a version stands how many there were since a leap; above, which start leapt.
const VERSION_BITS: u32 = 34;

/// Whether requests wait for what nodes tell.
#[derive(Debug)]
pub struct Waiting {
    on: AtomicBool,
    until: Instant,
    changed: Notify,
}

impl Waiting {
    /// For a service that begins on this state.
    pub fn begin(state: &State, lease: Duration) -> Waiting {
        let on = !state.owing.is_empty();
        if on {
            tracing::warn!(
                nodes = state.owing.len(),
                "the machine was booted since the journal was written, and its end may be missing: the \
                 nodes are asked what they know"
            );
        }
        Waiting { on: on.into(), until: Instant::now() + lease, changed: Notify::new() }
    }
}

/// The end of this state may be lost: what it may have given out is not given out again.
pub fn leap(state: &mut State) {
    let block = state.lineage.starts().next_back().map_or(0, Start::block);
    state.leap(Version(block << VERSION_BITS));
}

impl Core {
    /// True when this must wait until the nodes have told what they know.
    pub fn awaits_words(&self, op: &Op) -> bool {
        let needed = |op: &Op| {
            matches!(
                op,
                Op::Reassert(_)
                    | Op::Heartbeat(_)
                    | Op::Returned(_)
                    | Op::NodeInfo(_)
                    | Op::Cancel(_)
                    | Op::Hello(_)
                    | Op::Prove(_)
            ) || tells_first(op)
        };
        self.words.on.load(Relaxed) && !needed(op) && self.still_waits()
    }

    /// Somebody has told everything, or has left.
    pub fn look_who_owes_words(&self) {
        self.still_waits();
    }

    fn still_waits(&self) -> bool {
        if !self.words.on.load(Relaxed) {
            return false;
        }
        let (owing, late) =
            (self.state().owing.len(), Instant::now() >= self.words.until);
        let waits = owing > 0 && !late;
        if !waits && self.words.on.swap(false, Relaxed) {
            match owing {
                0 => tracing::info!("every node has told what it knows"),
                nodes => tracing::warn!(nodes, "nodes have not told what they know; it goes on without"),
            }
            self.words.changed.notify_waiters();
        }
        waits
    }

    /// Until every node has told, or a lease is over.
    pub async fn words_are_heard(&self) {
        loop {
            let changed = self.words.changed.notified();
            if !self.still_waits() {
                return;
            }
            // In either case it is looked again.
            let _ = tokio::time::timeout_at(self.words.until, changed).await;
        }
    }
}
