//! The words that every Ebb crate shares: ids, byte ranges, attributes, errnos and units.
//!
//! Nothing here does I/O, knows a protocol or holds a lock.

pub mod access;
pub mod attr;
pub mod errno;
pub mod extents;
pub mod facts;
pub mod ids;
pub mod lives;
pub mod name;
pub mod range;
pub mod striping;
pub mod units;

pub use access::Access;
pub use attr::{Attr, FileKind, Time};
pub use errno::Errno;
pub use extents::{Extents, split_by};
pub use facts::{Facts, Subjects};
pub use ids::{Incarnation, Ino, NodeId, Version};
pub use lives::Lives;
pub use name::Name;
pub use range::{ByteRange, in_steps};
pub use striping::Striping;
