//! Coupling: files that some programs write and others read, once. In a directory with
//! `user.ebb.couple = "producers=4 consumers=2"` a file that is made is *awaited* until four opens for
//! writing of it were closed; who opens it for reading before that waits. After the close of the second
//! reader it is *consumed*, and without `keep=pfs` it goes.
//!
//! | state    | until                                                       | an open for reading  |
//! |----------|-------------------------------------------------------------|----------------------|
//! | awaited  | enough producers are through and none is writing            | waits                |
//! | ready    | enough consumers are through and none is reading            | is counted, and reads |
//! | lost     | it is truncated by an open: a producer died while it wrote  | fails                |
//! | consumed | (`keep=none`) its names are removed                         | reads what is there  |
//!
//! Who has a file open may say of how many producers, or consumers, it is one: of such a file that counts, and not
//! what its directory says.
//!
//! Who died, was killed by a signal or has left with its node is not *through*: a producer loses the file, a
//! consumer may come again. Everything here is what was decided, nothing waits: the metadata service keeps
//! it, journals [`Step`]s and wakes who waits when [`Coupled::state`] changes.

mod file;
mod terms;

#[cfg(test)]
mod tests;

pub use file::{Coupled, NotOne, State, Step, User};
pub use terms::{Keep, PARTIES_MAX, TERMS_BYTES_MAX, Terms, TermsError};
