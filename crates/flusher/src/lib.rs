//! Decides when dirty bytes go to the backing and moves them there.
//!
//! The daemon owns an [`Engine`], counts its foreground operations in an [`Activity`] and
//! implements [`FlushSource`]. Rooms:
//!
//! * `activity`: is the application doing I/O?
//! * `adaptive`: when will it do so again? Learned, pure, for the adaptive wait interval.
//! * `policy`: should a run start now? A table and a pure function.
//! * `queue`: which file is next, who is on it, what a drain still waits for. Pure.
//! * `engine`, `worker`: the threads.
//! * `plan`, `copy`: from the ranges of one grant to large ordered writes, synced and verified.
//! * `drain`: everything now, and the truth about it.
//!
//! Nothing here knows FUSE, gRPC or who owns which byte.

mod activity;
mod adaptive;
mod copy;
mod drain;
mod engine;
mod errors;
mod nice;
mod options;
mod plan;
mod policy;
mod queue;
mod source;
mod status;
mod throttle;
mod worker;

pub use activity::{Activity, ActivityGuard, BypassSource, Epoch, OwnedActivityGuard};
pub use adaptive::{Plan as PausePlan, Rhythm, Waiting};
pub use drain::{DrainReport, DrainScope, Failure, Progress, Remaining};
pub use engine::Engine;
pub use errors::ErrorRecord;
pub use options::{IoClass, Options, ReadBack};
pub use policy::{Decision, Halt, Policy, PolicyError, PolicyKind, Scope, Situation, decide};
pub use source::{DirtyFile, Fate, FileUse, FlushError, FlushSource, Grant, Guard, Want};
pub use status::{FlushState, Status, StopLatency, Working};
