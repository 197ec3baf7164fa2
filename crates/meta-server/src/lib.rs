//! The metadata service: namespace, ownership, sessions and locks behind one stream, and their
//! journal. Knows nothing of FUSE and of the nodes' caches.
//!
//! A node that is silent for one lease counts as gone: it is shown as not alive and its flush
//! grants end. After three leases its locks and opens are given up ([`pb::Welcome`] tells it so
//! when it comes back). What it owns stays its own: its cache file may come back.
//!
//! [`pb::Welcome`]: ebb_wire::pb::Welcome

mod acl;
mod alive;
mod backing;
mod begun;
mod config;
mod copies;
mod core;
mod coupling;
#[cfg(test)]
mod death;
mod doors;
mod effects;
mod engine;
mod facts;
mod following;
mod forgetting;
#[cfg(test)]
mod full_tests;
mod grants;
mod halves;
mod joining;
mod journal;
mod late;
mod leases;
mod lineage;
mod older;
mod ops;
#[cfg(test)]
mod overlay_tests;
mod peek;
mod publishing;
mod quiet;
mod reassert;
mod rebuild;
mod remembered;
mod rounds;
mod seats;
mod server;
mod sessions;
mod state;
mod stats;
#[cfg(test)]
mod storm_tests;
mod stream;
mod striping;

pub use config::{Config, StartError};
pub use following::BEATS;
pub use journal::{Copy, Fits, JournalError};
pub use peek::{Peek, Pending, judge};
pub use remembered::Remembered;
pub use server::Server;
