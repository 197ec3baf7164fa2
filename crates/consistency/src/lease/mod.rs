//! Leases: a node that was answered about a file need not ask again until it is told that
//! something changed. Two pure halves, driven with clocks as numbers: [`Leases`] is the service's
//! side, [`Trust`], [`FileLease`] and [`Known`] are a node's.
//!
//! # The rule
//!
//! A lease is of one inode and covers all that a node was told of it: the attributes; of a file the
//! ownership map; of a directory its names, those that are there and those that are not. Whoever
//! changes any of it is acknowledged only when every other holder has returned its lease or can no
//! longer trust it.
//!
//! * **Time.** The service counts a lease from when it *received* the last sign of life of the
//!   holder's stream, the node from when it *sent* the last one that was answered, and a tenth
//!   less: the node always stops first. When its trust has lapsed, every lease it had is gone, also
//!   when signs of life are answered again later ([`Trust`] counts epochs).
//! * **Order.** Grants and recalls take numbers from one counter. The service takes the number of
//!   a grant *before* it looks at what it answers with, so an answer is never older than its grant.
//!   A recall ends every grant with a smaller number, also one that is still on its way
//!   ([`FileLease`] remembers the newest recall).
//! * **Streams.** Leases belong to one stream between node and service. A stream that breaks ends
//!   nothing: the node may still trust it, so the time must run out. A node drops all leases before
//!   it says its first word on a new stream, and that word tells the service so.
//! * **Quiet writes.** The only node that has a file open can be lent the right to write to it without
//!   telling ([`QuietWrites`]). The right ends with the lease that it came with, and that is
//!   returned only when all was told. What the service makes of a holder that is lost is in
//!   [`crate::ownership`].
//! * **Restart.** A service that was restarted does not know the leases of before. Every node of
//!   its journal that it has not heard yet counts as a holder of everything, for one lease time.

mod counted;
mod known;
#[cfg(test)]
mod known_tests;
mod node;
mod quiet;
#[cfg(test)]
mod quiet_tests;
mod service;
#[cfg(test)]
mod service_tests;
#[cfg(test)]
mod tests;

pub use known::{Asked, Change, Found, Known, Outcome, Told};
pub use node::{FileLease, Grant, Trust};
pub use quiet::{Held, QuietWrites, Untold};
pub use service::{Blocking, Ended, Leases, Party, Recall, StreamId};

/// Numbers grants and recalls, in one order for all files of a service.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct LeaseSeq(pub u64);
