//! The per-node daemon: FUSE adapter, operations, local cache, control socket.

pub mod config;
pub mod control;
pub mod hash;
pub mod registry;
