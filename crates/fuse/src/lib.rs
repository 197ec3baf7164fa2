//! The kernel's side of a file system in user space: the FUSE protocol of Linux (`linux/fuse.h`,
//! 7.23 and later). Mounts, negotiates, runs the event loops, decodes what the kernel asks and
//! encodes what it is answered. It decides nothing and knows no file system.
//!
//! * [`abi`]: the protocol as bytes.
//! * [`Request`]: what is asked, decoded with every bound checked; [`Call`]: the same with the reply
//!   of its kind, which is sent once, and is EIO when it is dropped.
//! * [`Device`]: `/dev/fuse` of one mount; several event loops have one each. [`BackingId`] and
//!   [`Notifier`] are what else it is used for.
//! * [`Session`]: the handshake and the event loops. A session can end and another process go on
//!   with its devices ([`Session::resume`]), without a handshake and without the mount's users
//!   noticing.
//!
//! Types without a protocol behind them (flags, numbers, attributes) are those of the crate
//! `fuser`. Its own session cannot do what is needed here: it refuses interrupts, so that whoever
//! waits for a lock cannot be killed, and does not tell `flock` from `fcntl` locks.

pub mod abi;
mod attributes;
mod body;
mod device;
mod handshake;
mod listing;
mod mount;
mod notify;
mod reply;
mod request;
mod session;

pub use device::{BackingId, Device};
pub use handshake::{Handshake, REQUEST_DATA_MAX};
pub use listing::{Listing, ListingPlus};
pub use mount::unmount;
pub use notify::Notifier;
pub use reply::{
    Answer, Reply, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Statistics,
};
pub use request::*;
pub use session::{Background, Filesystem, Options, REQUEST_BYTES_MAX, Session};

pub use fuser::{
    Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, InitFlags, LockOwner,
    OpenFlags, RenameFlags, RequestId, TimeOrNow, WriteFlags,
};
