//! What is counted: requests by operation, and the last failures on the backing.

use ebb_locks::Mutex;
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::request::Op;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Failures kept for status.
const ERRORS_MAX: usize = 64;

macro_rules! operations {
    ($($variant:ident $name:literal)*) => {
        const NAMES: &[&str] = &[$($name),*];

        fn index(op: &Op) -> usize {
            #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
            enum Index { $($variant),* }
            match op { $(Op::$variant(_) => Index::$variant as usize),* }
        }
    };
}
operations! {
    Hello "hello" Prove "prove" Heartbeat "heartbeat" Goodbye "goodbye" NodeInfo "node_info"
    Lookup "lookup" GetAttr "get_attr" SetAttr "set_attr" Make "make" Unlink "unlink"
    Rename "rename" Link "link" ReadDir "read_dir" ReadLink "read_link" GetXattr "get_xattr"
    SetXattr "set_xattr" ListXattr "list_xattr" RemoveXattr "remove_xattr" StatFs "stat_fs"
    Access "access" Open "open" Release "release" Query "query" Attach "attach" Append "append"
    Detach "detach" FlushBegin "flush_begin" FlushEnd "flush_end" Materialize "materialize"
    SyncMeta "sync_meta" SetLock "set_lock" GetLock "get_lock" ReleaseLocks "release_locks"
    Cancel "cancel" Describe "describe" Returned "returned" Share "share" Pair "pair" Exists "exists"
    Copies "copies" Adopt "adopt" Published "published" Await "await" Leave "leave" Reassert "reassert"
    Join "join"
}

/// The name of an operation, for counters and logs.
pub fn name(op: &Op) -> &'static str {
    NAMES[index(op)]
}

/// Counters of the service.
#[derive(Debug)]
pub struct Stats {
    requests: Vec<AtomicU64>,
    errors: Mutex<VecDeque<pb::Failure>>,
    started: Instant,
}

impl Default for Stats {
    fn default() -> Stats {
        Stats {
            requests: NAMES.iter().map(|_| AtomicU64::new(0)).collect(),
            errors: Mutex::default(),
            started: Instant::now(),
        }
    }
}

impl Stats {
    /// One more request.
    pub fn count(&self, op: &Op) {
        self.requests[index(op)].fetch_add(1, Ordering::Relaxed);
    }

    /// Something failed on the backing that no application was told.
    pub fn failed(&self, path: &[u8], operation: &str, errno: Errno) {
        let mut errors = self.errors.lock();
        if errors.len() >= ERRORS_MAX {
            errors.pop_front();
        }
        errors.push_back(failure(path, operation, errno));
    }

    /// Requests by operation; those that never came are left out.
    pub fn requests(&self) -> HashMap<String, u64> {
        let counts = NAMES.iter().zip(&self.requests);
        let counts = counts.map(|(n, c)| ((*n).to_owned(), c.load(Ordering::Relaxed)));
        counts.filter(|(_, c)| *c > 0).collect()
    }

    /// The last failures.
    pub fn errors(&self) -> Vec<pb::Failure> {
        self.errors.lock().iter().cloned().collect()
    }

    /// How long the service runs.
    pub fn uptime_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// A failure as sent.
pub fn failure(path: &[u8], operation: &str, errno: Errno) -> pb::Failure {
    pb::Failure { path: path.to_vec(), operation: operation.to_owned(), errno: errno.0 }
}
