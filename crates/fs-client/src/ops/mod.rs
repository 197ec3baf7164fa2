//! The operations of the mount, as methods of `Node`, one file a family. None of them knows FUSE.

mod ahead;
pub mod coupling;
pub mod data;
pub mod dirs;
pub mod fetch;
pub mod few;
pub(crate) mod lists;
pub mod locks;
pub mod nameless;
pub mod names;
pub mod open;
pub mod passing;
mod primitives;
pub mod renew;
pub mod reopen;
pub mod room;
pub mod seat;
pub mod space;
pub mod sync;
mod unheard;
pub mod unseen;
pub mod xattr;
