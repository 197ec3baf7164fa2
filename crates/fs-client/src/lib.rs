//! The per-node daemon: FUSE adapter, operations, local cache, control socket.
