//! The per-node daemon: FUSE adapter, operations, local cache, control socket.
//!
//! `fuse` decodes and replies, `ops` decides (as methods of `node::Node`), `file` holds what is
//! known of one file, `cache` the bytes; `drain` and `flush_source` bring them to the backing,
//! `peer_source` lends them to other nodes; `daemon` is the life of the whole.

mod alone;
mod aside;
mod awaited;
mod busy;
mod cache;
pub mod carrier;
pub mod config;
pub mod control;
mod control_server;
mod counted;
mod daemon;
mod dirty;
mod drain;
mod ending;
pub mod evict;
mod exposition;
mod file;
mod flush_source;
mod fuse;
mod gone;
mod handles;
pub mod hash;
mod home;
mod interrupt;
mod kernel_pages;
mod known;
mod leases;
pub mod ledger;
pub mod leftover;
mod lock_book;
mod map_ahead;
mod medium;
mod memory;
mod metrics;
mod name_notes;
mod node;
mod notes;
mod ops;
mod overtaken;
mod parting;
mod passing;
mod pauses;
mod peer_source;
mod quiet;
mod read_ahead;
mod reassert;
pub mod recover;
mod references;
pub mod registry;
pub mod replica;
mod restore;
mod rules;
mod stage;
mod status;
mod sums;
mod takeover;
mod tree;
mod unforgotten;
mod virtual_files;
mod watchdog;

pub use daemon::{MetaAt, Ready, RunError, run};
pub use fuse::{ask_kernel, open_flags, unmount};
pub use rules::{Rules, RulesError};
