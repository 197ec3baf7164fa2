//! A small-scope model checker. It runs small programs through every schedule on the real
//! [`crate::ModelTable`] rows, [`crate::FileState`], [`crate::FileView`] and [`crate::lease`], with bytes in
//! pretend caches and a pretend backing, and asks one question: does every read of a race-free
//! program return what sequential consistency gives, and does the backing hold it after a drain?
//!
//! * [`program`]: programs, as data and as text.
//! * [`races`]: is a program race-free under a model, in all of its runs?
//! * [`world`], [`actors`]: the state, and every step that can be taken in it. A sync operation is
//!   not one step: requests, the service's work and replies interleave with everything else.
//!   Besides the processes there are actors that nobody asked: per node a flusher (attach early,
//!   grant, copy, mark), an evictor (detach, drop) and a read-ahead (plan, fetch, fill).
//! * [`parts`]: what an operation consists of.
//! * [`leases`]: with leases, answers come with grants, recalls travel by themselves, answers to
//!   changes wait for their return, and time can pass.
//! * [`quiet`]: who alone uses the file writes without telling, and tells before others are answered.
//! * [`past`]: the kernel writes and reads the cache files, and the nodes find that out afterwards.
//! * [`seats`]: a file sits at a node, and the others do there what they want to change.
//! * [`restart`]: a daemon dies after a sync, and another one takes its cache over.
//! * [`search`]: depth first over all steps, every state once; a failing schedule as text that
//!   [`search::replay`] takes.
//! * [`generate`]: programs, systematically.
//! * [`fault`]: planted bugs. Each must be caught; else the explorer proves nothing.
//!
//! Sizes are part of what is checked only as bytes: a read that ends early counts as zeros there,
//! because a write beyond the end conflicts with nothing but changes the size.

pub mod actors;
pub mod fault;
pub mod generate;
mod leases;
mod parts;
mod past;
pub mod program;
mod quiet;
pub mod races;
mod restart;
pub mod search;
mod seats;
mod wires;
pub mod world;

pub use fault::Fault;
pub use past::Telling;
pub use program::{Op, Program};
pub use races::is_race_free;
pub use search::{Bounds, Failure, Report, explore, replay};
