//! The words spoken over a daemon's control socket: one JSON object a line, in both directions.
//!
//! A client sends one `Request` and reads `Event`s until `Done`. The socket is
//! `CACHE/control.sock` with mode 0600; a record of it stands in the user's registry
//! (`registry.rs`), so that a mount point leads to its daemon even when the mount is dead.

use crate::ledger::Ledger;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a client may ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case")]
pub enum Request {
    /// The status object of `ebb status --json`.
    Status,
    /// Counters and latency histograms.
    Stats {
        /// As Prometheus text.
        prometheus: bool,
    },
    /// The effective configuration.
    Config,
    /// Push dirty bytes to the backing, wait, verify.
    Drain {
        /// Paths in the mount, relative to its root; empty: everything.
        paths: Vec<PathBuf>,
        /// Give up after so many milliseconds.
        timeout_ms: Option<u64>,
    },
    /// Bring files into the buffer before they are read.
    StageIn {
        /// Paths in the mount, relative to its root.
        paths: Vec<PathBuf>,
        /// Give up after so many milliseconds.
        timeout_ms: Option<u64>,
    },
    /// Look whether what is in the buffer is what was written.
    Scrub,
    /// End at once, for another daemon to go on.
    Restart,
    /// Drain (unless told not to), unmount, leave the job, stop.
    Unmount {
        /// False: leave dirty bytes in the cache.
        drain: bool,
        /// Give up draining after so many milliseconds; the daemon then stays mounted.
        timeout_ms: Option<u64>,
    },
}

impl Request {
    /// What a line asks for, or what is wrong with it.
    pub fn decode(line: &[u8]) -> Result<Request, String> {
        serde_json::from_slice(line).map_err(|e| format!("not a request: {e}"))
    }
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// How far a drain is.
    Progress {
        /// Bytes on the backing so far, of this drain.
        bytes_done: u64,
        /// Bytes this drain has to move, as known now.
        bytes_total: u64,
        /// Files finished.
        files_done: u64,
        /// Files to do.
        files_total: u64,
        /// What it is at: `flushing`, `staging`, `namespace`, `unmounting`.
        stage: String,
    },
    /// It does not go on, and what it waits for.
    Waiting {
        /// For people.
        text: String,
    },
    /// The books of the node, at the end of its job.
    Summary {
        /// What became of every byte.
        ledger: Ledger,
    },
    /// Any other answer, as text or JSON.
    Reply {
        /// The answer.
        body: serde_json::Value,
    },
    /// The last event.
    Done(Outcome),
}

/// How a request ended: decides the exit status of the command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// Done and durable: exit status 0.
    Ok {
        /// Bytes that were brought to the backing.
        bytes: u64,
        /// Files that were brought to the backing.
        files: u64,
    },
    /// Some things are not on the backing: exit status 3.
    Incomplete {
        /// They, with bytes and reason.
        remaining: Vec<Remaining>,
    },
    /// Time ran out: exit status 4; what is not on the backing yet.
    TimedOut {
        /// They, with bytes and reason.
        remaining: Vec<Remaining>,
    },
    /// The metadata service or a peer cannot be reached: exit status 5.
    Unreachable {
        /// Which, and what to look at.
        text: String,
    },
    /// Anything else: exit status 1.
    Failed {
        /// What happened to which path, and what to do.
        text: String,
    },
}

/// Something that is not on the backing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remaining {
    /// Its path in the mount.
    pub path: String,
    /// How many bytes of it.
    pub bytes: u64,
    /// Why, as an errno text with the operation.
    pub why: String,
}
