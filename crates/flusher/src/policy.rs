//! When dirty bytes go to the backing: a table of policies and one pure decision. Moves nothing.
//!
//! | policy    | a run starts when                        | with files  | and stops early          |
//! |-----------|------------------------------------------|-------------|--------------------------|
//! | idle      | no operation for the wait interval       | settled     | when activity returns    |
//! | immediate | anything is dirty                        | settled     | –                        |
//! | close     | a closed file is dirty                   | closed      | –                        |
//! | watermark | the high watermark is reached            | all         | at the low watermark     |
//! | periodic  | the period is over                       | settled     | –                        |
//! | end       | never                                    | –           | –                        |
//!
//! In every policy reaching the high watermark starts a run as in the `watermark` row: a full
//! buffer would stop the application. A drain asks nobody. *Settled* files are all except those
//! that are written without the daemon seeing where, and those that other programs are to read first. The wait interval is fixed, or learned (see
//! `adaptive`); then a run of `idle` also stops when the next burst is due.

use crate::adaptive::Waiting;
use crate::source::FileUse;
use ebb_types::units::Percent;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The name of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// While the application does no I/O.
    Idle,
    /// At once.
    Immediate,
    /// When a file is closed.
    Close,
    /// When the buffer fills.
    Watermark,
    /// From time to time.
    Periodic,
    /// Not before the end of the job.
    End,
}

/// What starts a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Quiet,
    Dirty,
    ClosedDirty,
    PeriodOver,
    HighWatermark,
    Never,
}

/// Which files a run takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Closed ones.
    Closed,
    /// Closed ones and open ones whose written ranges are known.
    Settled,
    /// Every one.
    All,
}

impl Scope {
    /// True when a file in that use belongs to the run.
    #[must_use]
    pub fn takes(self, in_use: FileUse) -> bool {
        match self {
            Scope::Closed => in_use == FileUse::Closed,
            Scope::Settled => !matches!(in_use, FileUse::Untracked | FileUse::Coupled),
            Scope::All => true,
        }
    }
}

/// What ends a run before everything in it is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Halt {
    /// The next foreground operation, at once.
    OnActivity,
    /// The low watermark; what has begun is finished.
    AtLowWatermark,
    /// Nothing.
    Never,
}

struct Row {
    kind: PolicyKind,
    name: &'static str,
    start: Start,
    scope: Scope,
    halt: Halt,
}

const TABLE: [Row; 6] = [
    row(PolicyKind::Idle, "idle", Start::Quiet, Scope::Settled, Halt::OnActivity),
    row(PolicyKind::Immediate, "immediate", Start::Dirty, Scope::Settled, Halt::Never),
    row(PolicyKind::Close, "close", Start::ClosedDirty, Scope::Closed, Halt::Never),
    row(PolicyKind::Watermark, "watermark", Start::HighWatermark, Scope::All, Halt::AtLowWatermark),
    row(PolicyKind::Periodic, "periodic", Start::PeriodOver, Scope::Settled, Halt::Never),
    row(PolicyKind::End, "end", Start::Never, Scope::All, Halt::Never),
];

const fn row(kind: PolicyKind, name: &'static str, start: Start, scope: Scope, halt: Halt) -> Row {
    Row { kind, name, start, scope, halt }
}

impl PolicyKind {
    /// All of them, in the order of the table.
    pub const ALL: [PolicyKind; 6] = {
        let mut all = [PolicyKind::Idle; 6];
        let mut i = 0;
        while i < all.len() {
            all[i] = TABLE[i].kind;
            i += 1;
        }
        all
    };

    /// As users write them, in the same order.
    pub const NAMES: [&'static str; 6] = {
        let mut all = [""; 6];
        let mut i = 0;
        while i < all.len() {
            all[i] = TABLE[i].name;
            i += 1;
        }
        all
    };

    fn row(self) -> &'static Row {
        TABLE.iter().find(|r| r.kind == self).expect("the table has a row for every kind (tested)")
    }

    /// As users write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().name
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is wrong with a policy as written.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// No such row.
    #[error("'{0}' is not a flush policy (use idle, immediate, close, watermark, periodic or end)")]
    Unknown(String),
    /// The watermarks contradict each other.
    #[error("--low-watermark {low} must be below --high-watermark {high}, and that above 0%")]
    Watermarks {
        /// Where a run under pressure stops.
        low: Percent,
        /// Where it starts.
        high: Percent,
    },
    /// A period of zero.
    #[error("the flush period must be longer than 0s")]
    Period,
}

impl FromStr for PolicyKind {
    type Err = PolicyError;

    fn from_str(s: &str) -> Result<PolicyKind, PolicyError> {
        let row = TABLE.iter().find(|r| r.name == s);
        row.map(|r| r.kind).ok_or_else(|| PolicyError::Unknown(s.to_owned()))
    }
}

/// A policy with its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// The row.
    pub kind: PolicyKind,
    /// `idle`: how long there must have been no operation.
    pub wait_interval: Duration,
    /// `idle`: whether that follows the application's rhythm.
    #[serde(default)]
    pub waiting: Waiting,
    /// `periodic`: from the start of one run to the start of the next.
    pub period: Duration,
    /// Share of the capacity that is dirty when a run under pressure stops.
    pub low: Percent,
    /// Share of the capacity that is dirty when it starts.
    pub high: Percent,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            kind: PolicyKind::Idle,
            wait_interval: Duration::from_secs(1),
            waiting: Waiting::Fixed,
            period: Duration::from_secs(30),
            low: Percent(10.0),
            high: Percent(50.0),
        }
    }
}

impl Policy {
    /// The default numbers with this row.
    #[must_use]
    pub fn of(kind: PolicyKind) -> Policy {
        Policy { kind, ..Policy::default() }
    }

    /// Refuses numbers that make no sense.
    pub fn check(&self) -> Result<(), PolicyError> {
        let ordered = self.low < self.high;
        if !ordered {
            return Err(PolicyError::Watermarks { low: self.low, high: self.high });
        }
        if self.period.is_zero() { Err(PolicyError::Period) } else { Ok(()) }
    }

    /// True when the decision depends on [`Situation::closed_dirty`], which is not free to know.
    #[must_use]
    pub fn asks_for_closed(&self) -> bool {
        self.kind.row().start == Start::ClosedDirty
    }

    /// True when the wait interval is to be learned.
    #[must_use]
    pub fn learns(&self) -> bool {
        self.kind.row().start == Start::Quiet && self.waiting == Waiting::Adaptive
    }

    /// Whether the buffer is under pressure now, given whether it was: from the high watermark
    /// down to the low one.
    #[must_use]
    pub fn pressed(&self, was: bool, dirty_bytes: u64, capacity: u64) -> bool {
        if dirty_bytes == 0 || capacity == 0 {
            return false;
        }
        if was {
            dirty_bytes > self.low.of(capacity)
        } else {
            dirty_bytes >= self.high.of(capacity)
        }
    }
}

/// What a decision depends on, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// Somebody told us not to flush.
    pub paused: bool,
    /// Everything is being drained anyway.
    pub draining: bool,
    /// A foreground operation is in flight.
    pub active: bool,
    /// How long none has been.
    pub idle_for: Duration,
    /// How long there must have been none: the wait interval, or what was learned for now.
    pub wait: Duration,
    /// Bytes that are not on the backing.
    pub dirty_bytes: u64,
    /// A closed file has such bytes.
    pub closed_dirty: bool,
    /// [`Policy::pressed`].
    pub pressed: bool,
    /// Since the start of the last run (or since the mount).
    pub since_last_run: Duration,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Start a run.
    Flush {
        /// With these files,
        scope: Scope,
        /// until this.
        halt: Halt,
    },
    /// Not before no operation is in flight; look again then.
    Quiet,
    /// Not before this time has passed; look again then.
    Wait(Duration),
    /// Nothing to do until something changes.
    Sleep,
}

/// The decision.
#[must_use]
pub fn decide(policy: &Policy, now: &Situation) -> Decision {
    if now.paused || now.draining || now.dirty_bytes == 0 {
        return Decision::Sleep;
    }
    let row = if now.pressed { PolicyKind::Watermark.row() } else { policy.kind.row() };
    let wait = match row.start {
        // The interval has not even begun.
        Start::Quiet if now.active => return Decision::Quiet,
        Start::Quiet => Some(now.wait.saturating_sub(now.idle_for)),
        Start::Dirty => Some(Duration::ZERO),
        Start::ClosedDirty => now.closed_dirty.then_some(Duration::ZERO),
        Start::PeriodOver => Some(policy.period.saturating_sub(now.since_last_run)),
        Start::HighWatermark => now.pressed.then_some(Duration::ZERO),
        Start::Never => None,
    };
    match wait {
        None => Decision::Sleep,
        Some(wait) if wait.is_zero() => Decision::Flush { scope: row.scope, halt: row.halt },
        Some(wait) => Decision::Wait(wait),
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
