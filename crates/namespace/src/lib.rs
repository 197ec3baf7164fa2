//! The names, inodes and attributes of a job over the backing tree, and its lock table. Pure:
//! no I/O, no clocks, no threads; whoever drives it carries the effects out.
//!
//! An operation is *planned* against the state (`Namespace::plan_*`). A plan is a list of steps;
//! each says what must happen on the backing ([`Effect`]) and what is true afterwards
//! ([`Record`]). The driver executes the effects of a step in order, looks again at what the step
//! changed there ([`Restat`]) and applies its records, which are also what the journal keeps.
//! When an effect fails the operation ends with that errno; steps already applied stay true.
//!
//! Invariants:
//!  * An inode that is at home under its [`Home::Own`] names has [`Under::This`] in every name;
//!    one that is not has it in none.
//!  * Whatever is on the backing has all its ancestors there.
//!  * Paths are computed from names, never stored, so moving a directory moves all below it.
//!  * What is known of absence ([`Namespace::note_absent`], [`Namespace::note_listed`]) is a
//!    cache: it is neither recorded nor compared.

mod adopt;
mod attr;
mod book;
mod covered;
mod facts;
mod forget;
mod horizon;
mod inode;
pub mod locks;
mod make;
mod opens;
mod parts;
mod plan;
mod publish;
mod reassert;
mod record;
mod remove;
mod rename;
mod renew;
mod tree;
mod xattr;

pub use attr::{Change, SetTime};
pub use book::{Astray, Book, Missing};
pub use forget::{is_found, object_of};
pub use horizon::Horizon;
pub use inode::{BackingKey, Dentry, DirStamp, Found, Home, Inode, Link, Seen, Under};
pub use make::New;
pub use parts::{Known, part_of};
pub use plan::{Plan, Restat, Step};
pub use reassert::{Forgotten, OnBacking, Whereabouts};
pub use record::{AttrChange, BackingPath, Effect, NewInode, Record, Replace};
pub use rename::RenameMode;
pub use renew::Older;
pub use tree::{Absence, Namespace, ReplayError};
pub use xattr::{FILE_CAPABILITIES, XattrMode, XattrSource, XattrTrial};
