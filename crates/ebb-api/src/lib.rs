//! `libebb`: what a parallel program can ask of a mount of Ebb beside what every file system has. Nothing
//! of it is needed for right results.
//!
//! * [`Extended`]: the primitives of BaseFS (attach, query, read of an owner, flush, detach) on any open file
//!   of a mount; lists of pieces; handles.
//! * [`layers`]: PosixFS, CommitFS and SessionFS of them.
//! * [`exchange`]: buffers that some programs put and others get.
//! * [`c`]: the same for C (`ebb.h`).
//!
//! It speaks with the daemon by ioctls on the program's own descriptor; why, and how, is in
//! [`ebb_api_format`]. So it keeps no state, starts no thread, opens nothing, and may be used from any
//! thread, after a fork, and in a container.
//!
//! What a program can rely on when the daemon ends: without a supervisor calls fail with ENOTCONN at once;
//! under one (the default) they wait for the next daemon and are carried out by it.

pub mod c;
mod call;
pub mod exchange;
pub mod layers;
mod lists;
mod primitives;

pub use lists::{ReadPiece, WritePiece};
pub use primitives::{Extended, NOBODY, Owner, Stat, handle_path, open_handle};

/// Length of a handle.
pub const HANDLE: usize = ebb_api_format::HANDLE;
