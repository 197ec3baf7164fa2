//! PURE. The model table, ownership trees, a node's view of a file, the race checker and the explorer.
//!
//! Nothing here does I/O, reads a clock, spawns a task or takes a lock. The metadata service and
//! the daemon drive these structures; the explorer drives the very same ones through every
//! interleaving of small programs.
//!
//! * [`model`], [`table`], [`msc`]: what each consistency model does at which call, as data.
//! * [`ownership`] (on [`tree`]): the service's side of one file, who owns which bytes; and what nodes
//!   tell a service that lost the end of its journal ([`Assertion`]).
//! * [`view`]: a node's side of one file, what is in its cache and what it last learned.
//! * [`lease`]: what a node need not ask again, on the service's side and on a node's.
//! * [`claim`]: claims of whole blocks, for writers whose exact bytes are not known.
//! * [`path`]: whether an open may go to the kernel, past the daemon.
//! * [`checker`]: which pairs of operations of a trace race under a model; [`run`] and [`sweep`] are
//!   the same for traces of millions of operations.
//! * [`explore`]: small programs, every schedule, the real structures, one question: is every
//!   read of a race-free program the one that sequential consistency gives?

mod base;
pub mod checker;
pub mod claim;
pub mod explore;
pub mod lease;
pub mod model;
pub mod msc;
pub mod ownership;
pub mod path;
#[cfg(test)]
mod planted;
pub mod run;
pub mod sweep;
pub mod table;
pub mod tree;
pub mod view;

pub use base::{StoredChanges, StoredGuesses};
pub use claim::Claim;
pub use lease::{
    Asked, Change, FileLease, Found, Grant, Held, Known, LeaseSeq, Leases, Outcome, Party,
    QuietWrites, Recall, StreamId, Told, Trust, Untold,
};
pub use model::{Actions, Model, Scope, SyncEvent};
pub use msc::Msc;
pub use ownership::{
    Assertion, Claimed, Detached, FileState, Leap, MapAnswer, NotFlushed, Owned, Quiet, QuietState,
    Seat,
};
pub use path::{Beside, IoPath, Reason};
pub use table::{ModelError, ModelTable};
pub use tree::{MERGE_SPAN, OwnershipTree};
pub use view::{AttachedBook, Changes, Damaged, FileView, Piece, Source};
