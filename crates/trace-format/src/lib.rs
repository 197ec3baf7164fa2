//! The files that `ebb trace` leaves, one per program that a process ran.
//!
//! A file is a header ([`Header`], one page) and blocks of [`BLOCK`] bytes. A block has a head
//! (magic, bytes used, whether it is sealed, checksum, time base) and records, none of which crosses
//! its end. The traced process writes into a shared mapping, so what it has committed is in the file
//! whatever ends the process. A block that is full is sealed with the checksum of its records; the
//! last one is not, and is good up to its count of bytes. What follows the first block that is not
//! right is not believed.
//!
//! Nothing here opens files, knows the C library, MPI or a consistency model.

mod bytes;
mod call;
mod header;
mod read;
mod record;
mod write;

pub use call::Call;
pub use header::Header;
pub use read::{Damage, Reader};
pub use record::{Act, Event, Flow, Record, What};
pub use write::{Block, Full};

/// Bytes of the header.
pub const HEADER: usize = 4096;
/// Bytes of a block with its head.
pub const BLOCK: usize = 64 << 10;
/// Bytes of the head of a block.
pub const HEAD: usize = 32;
/// Longest path in a record; longer ones are cut, which names another file.
pub const PATH_MAX: usize = 4096;
/// How the name of a trace file ends.
pub const ENDING: &str = "ebbtrace";

#[cfg(test)]
mod tests;
