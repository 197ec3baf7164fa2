//! Where data ends: the backing directory. Opens files beneath it, reads and writes them and
//! proves that they are still the files that were meant.
//!
//! It creates no names (the metadata service's executor does) and knows no FUSE and no gRPC. All
//! calls block; whoever must not block calls them on a thread of its own.

mod error;
pub mod faulty;
pub mod lustre;
mod paths;
mod posix;

use ebb_types::{Attr, ByteRange, Time};
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use error::{BackendError, Operation};
pub use faulty::Faulty;
pub use posix::{Confinement, PosixDir};

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    Read,
    /// Reading and writing (what was written is read back to verify it).
    Write,
}

/// Which file this is, and in which state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// `st_ino` on the backing file system.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of content or attributes.
    pub ctime: Time,
}

/// Room on the backing file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Size of the file system in bytes.
    pub total_bytes: u64,
    /// What this user can still write, in bytes.
    pub available_bytes: u64,
}

/// A place where data ends. Paths are relative to it, without a leading slash.
pub trait Backend: Send + Sync + 'static {
    /// Opens the regular file at `path`, which must be inode `ino`. Follows no symbolic link
    /// and never leaves the backing. A path that names another file by now, or none, is
    /// [`BackendError::Moved`].
    fn open(
        &self,
        path: &[u8],
        ino: u64,
        access: Access,
    ) -> Result<Arc<dyn BackingFile>, BackendError>;

    /// What is at `path` now, of whatever type; a symbolic link is not followed.
    fn identity(&self, path: &[u8]) -> Result<Identity, BackendError>;

    /// Room left.
    fn space(&self) -> Result<Space, BackendError>;

    /// Bytes after which a file goes on at another storage server, where that is so; writes are
    /// best cut at multiples of it.
    fn stripe_size(&self) -> Option<u32> {
        None
    }

    /// Goes on with a file that another process of this program has opened here; none when that
    /// is not a matter of descriptors.
    fn adopt(&self, _file: OwnedFd) -> Option<Arc<dyn BackingFile>> {
        None
    }

    /// Opens the regular file at `path` for reading; see [`Backend::open`].
    fn open_read(&self, path: &[u8], ino: u64) -> Result<Arc<dyn BackingFile>, BackendError> {
        self.open(path, ino, Access::Read)
    }
}

/// An open file of the backing.
pub trait BackingFile: Send + Sync {
    /// Reads at `offset`; fewer bytes than asked are possible anywhere, 0 is the end.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, BackendError>;

    /// Writes at `offset`; fewer bytes than given are possible, but never 0 of a full buffer.
    fn write_at(&self, buf: &[u8], offset: u64) -> Result<usize, BackendError>;

    /// Returns when content and length are on stable storage.
    fn sync_data(&self) -> Result<(), BackendError>;

    /// Refuses a part file that neither we nor `owner`, whose file it is to become, can have made:
    /// numbers of inodes are given out again.
    fn check_owner(&self, owner: u32) -> Result<(), BackendError> {
        let _ = owner;
        Ok(())
    }

    /// Gives a file that has the size of `shape` its owner, permissions and times. False when it has
    /// another size, or when we may not; some of it may be done then.
    fn take_shape(&self, shape: &Attr) -> Result<bool, BackendError>;

    /// Returns when content and attributes are on stable storage.
    fn sync_all(&self) -> Result<(), BackendError>;

    /// Asks for written pages of `range` to be sent to the storage soon, without waiting for it: a
    /// sync that comes later has less to do. Advice: what cannot does nothing.
    fn start_writing(&self, _range: ByteRange) {}

    /// Which file this is, and its state now.
    fn identity(&self) -> Result<Identity, BackendError>;

    /// Another descriptor of it; see [`Backend::adopt`].
    fn descriptor(&self) -> Option<OwnedFd> {
        None
    }

    /// Asks for `range` to be dropped from this node's page cache, so that the next read comes
    /// from the storage. Advice: only synced pages can be dropped. Call it after `sync_data`.
    fn drop_cached(&self, range: ByteRange) -> Result<(), BackendError>;

    /// Reads until `buf` is full or the file ends; returns how much there was.
    fn read_full_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, BackendError> {
        let mut have = 0;
        while have < buf.len() {
            match self.read_at(&mut buf[have..], offset.saturating_add(have as u64))? {
                0 => break,
                n => have += n,
            }
        }
        Ok(have)
    }

    /// Writes all of `buf`.
    fn write_all_at(&self, buf: &[u8], offset: u64) -> Result<(), BackendError> {
        let mut have = 0;
        while have < buf.len() {
            have += self.write_at(&buf[have..], offset.saturating_add(have as u64))?;
        }
        Ok(())
    }
}
