//! Everything to the backing now, and the truth about what got there.
//!
//! A drain ignores policy and activity. When it reports a file as done, every byte of it that
//! was dirty when the drain began is on the backing's stable storage, was read back and
//! compared. Bytes written meanwhile may or may not be; whatever is still dirty at the end is
//! listed as remaining, whyever.

use crate::engine::{Engine, Shared};
use crate::queue::{Drain, DrainId, Listed};
use crate::source::{DirtyFile, FlushError};
use ebb_types::Ino;
use serde::Serialize;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often the progress callback is called.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// A call that has not come back for so long when the deadline passes is named in the report.
const SUSPICIOUS: Duration = Duration::from_secs(5);

/// Which files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DrainScope {
    /// All dirty ones.
    All,
    /// These, as far as they are dirty.
    Files(HashSet<Ino>),
}

impl DrainScope {
    fn takes(&self, ino: Ino) -> bool {
        match self {
            DrainScope::All => true,
            DrainScope::Files(inos) => inos.contains(&ino),
        }
    }
}

/// How far a drain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Progress {
    /// Files that are through.
    pub files_done: u64,
    /// Files that were dirty at the beginning.
    pub files_total: u64,
    /// Bytes brought to the backing.
    pub bytes_done: u64,
    /// Bytes that were dirty at the beginning; more when files grew meanwhile.
    pub bytes_total: u64,
    /// Since the beginning.
    pub elapsed: Duration,
    /// Over the whole time so far.
    pub bytes_per_second: f64,
}

/// A file that could not be flushed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The file.
    pub path: String,
    /// What was tried.
    pub operation: String,
    /// What the system said.
    pub errno: i32,
    /// In words.
    pub text: String,
}

/// A file with bytes that are not on the backing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remaining {
    /// The file.
    pub path: String,
    /// How many bytes.
    pub bytes: u64,
}

/// The outcome.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DrainReport {
    /// Files that are through.
    pub files: u64,
    /// Bytes brought to the backing for the files of this drain while it lasted.
    pub bytes: u64,
    /// Of these, bytes that were read back and compared. Fewer when a background run that was
    /// under way brought some of them and does not verify.
    pub verified_bytes: u64,
    /// Files that failed and still have bytes that are not on the backing.
    pub failures: Vec<Failure>,
    /// Files of this drain that still have bytes that are not on the backing.
    pub remaining: Vec<Remaining>,
    /// The deadline came first.
    pub timed_out: bool,
    /// How long it took.
    pub elapsed: Duration,
}

impl DrainReport {
    /// Everything asked for is on the backing.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.failures.is_empty() && self.remaining.is_empty() && !self.timed_out
    }
}

impl Engine {
    /// Brings the dirty bytes of `scope` to the backing, verified. Blocks the calling thread
    /// until that is done, every file is done or given up, or `deadline` has come; `progress`
    /// is called from it a few times a second. Several drains may run at the same time.
    pub fn drain(
        &self,
        scope: &DrainScope,
        deadline: Instant,
        progress: &mut dyn FnMut(&Progress),
    ) -> DrainReport {
        self.drain_while(scope, deadline, &mut |so_far| {
            progress(so_far);
            true
        })
    }

    /// The same, for as long as `progress` says so: then the drain ends as at its deadline.
    pub fn drain_while(
        &self,
        scope: &DrainScope,
        deadline: Instant,
        progress: &mut dyn FnMut(&Progress) -> bool,
    ) -> DrainReport {
        let shared = &self.shared;
        let began = Instant::now();
        let dirty = shared.dirty_in(scope);
        let mut total = Progress {
            files_total: dirty.len() as u64,
            bytes_total: dirty.iter().map(|f| f.bytes).fold(0, u64::saturating_add),
            ..Progress::default()
        };
        let id = shared.begin_drain(&dirty, scope);
        while shared.wait_for_drain(id, deadline, |drain| {
            total.update(drain, began.elapsed());
        }) {
            if !progress(&total) {
                break;
            }
        }
        let report = shared.end_drain(id, scope, began);
        total.files_done = report.files;
        total.set_bytes(report.bytes, report.elapsed);
        let _ = progress(&total);
        report
    }
}

impl Progress {
    fn update(&mut self, drain: &Drain, elapsed: Duration) {
        self.files_done = drain.files_done;
        self.set_bytes(drain.bytes, elapsed);
    }

    fn set_bytes(&mut self, bytes: u64, elapsed: Duration) {
        self.bytes_done = bytes;
        self.bytes_total = self.bytes_total.max(bytes);
        self.elapsed = elapsed;
        self.bytes_per_second = bytes as f64 / elapsed.as_secs_f64().max(1e-6);
    }
}

impl Shared {
    fn dirty_in(&self, scope: &DrainScope) -> Vec<DirtyFile> {
        let mut dirty = self.source.dirty_files();
        dirty.retain(|f| f.bytes > 0 && scope.takes(f.ino));
        dirty
    }

    fn begin_drain(self: &Arc<Self>, dirty: &[DirtyFile], scope: &DrainScope) -> DrainId {
        let files: Vec<_> = dirty.iter().map(|f| Listed { ino: f.ino, bytes: f.bytes }).collect();
        self.drains.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        let id = state.queue.begin_drain(&files, *scope == DrainScope::All);
        self.settle(&mut state);
        id
    }

    /// Waits a moment; false when the drain is over one way or the other.
    fn wait_for_drain(&self, id: DrainId, deadline: Instant, see: impl FnOnce(&Drain)) -> bool {
        let mut state = self.state.lock();
        let pause = deadline.min(Instant::now() + PROGRESS_EVERY);
        loop {
            let Some(drain) = state.queue.drain(id) else { return false };
            if drain.pending.is_empty() || Instant::now() >= deadline || self.is_stopping() {
                return false;
            }
            if self.changed.wait_until(&mut state, pause).timed_out() {
                break;
            }
        }
        if let Some(drain) = state.queue.drain(id) {
            see(drain);
        }
        true
    }

    fn end_drain(self: &Arc<Self>, id: DrainId, scope: &DrainScope, began: Instant) -> DrainReport {
        self.drains.fetch_sub(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        let Some(drain) = state.queue.end_drain(id) else { return DrainReport::default() };
        self.settle(&mut state);
        let mut failed = drain.given_up.clone();
        for (ino, file) in &drain.pending {
            let waiting = || {
                let stuck = state.slots.iter().find_map(|s| s.working_on(*ino))?;
                let waited = stuck.since.elapsed();
                // Out of time in the middle of healthy work is no failure of the backing.
                let hangs = waited >= self.options.hang_after.min(SUSPICIOUS);
                let (operation, seconds) = (stuck.operation, waited.as_secs());
                hangs.then_some(FlushError::Hanging { operation, seconds })
            };
            if let Some(error) = file.last_error.clone().or_else(waiting) {
                failed.push((*ino, error));
            }
        }
        drop(state);
        let dirty = self.dirty_in(scope);
        let left: HashSet<Ino> = dirty.iter().map(|f| f.ino).collect();
        // A failure that was overcome (perhaps just now, by a background run) is none.
        failed.retain(|(ino, _)| left.contains(ino));
        failed.sort_by_key(|(ino, _)| *ino);
        DrainReport {
            files: drain.files_done,
            bytes: drain.bytes,
            verified_bytes: drain.verified_bytes,
            failures: failed.iter().map(|(ino, e)| self.failure(*ino, e)).collect(),
            remaining: self.remaining(&dirty),
            timed_out: !drain.pending.is_empty(),
            elapsed: began.elapsed(),
        }
    }

    fn failure(&self, ino: Ino, error: &FlushError) -> Failure {
        Failure {
            path: self.source.label(ino),
            operation: error.operation().to_owned(),
            errno: error.errno().0,
            text: error.to_string(),
        }
    }

    fn remaining(&self, dirty: &[DirtyFile]) -> Vec<Remaining> {
        dirty.iter().map(|f| Remaining { path: self.source.label(f.ino), bytes: f.bytes }).collect()
    }
}
