//! What a daemon lends to its peers: open cache files and the word that the bytes are in them.

use ebb_types::{ByteRange, Errno, Ino, NodeId, Version};
use std::fmt;
use std::fs::File;
use std::sync::Arc;

/// Why a source does not give the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Some of the bytes are not (any more) in this node's cache.
    #[error("the bytes are not here")]
    NotHere,
    /// They should be, but reading them fails.
    #[error("{0}")]
    Errno(Errno),
}

/// Which file's bytes are asked for, and on which terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The file.
    pub ino: Ino,
    /// None: the peer owns the bytes, and gives what it has there. Otherwise nobody owns them, and
    /// the peer gives its copy if it was not written over and no byte has changed since this
    /// version as far as it knows.
    pub copy_since: Option<Version>,
    /// The peer holds copies of these bytes for a node that does not answer.
    pub held: Option<CopySet>,
}

/// The copies that a node has with its partner, told apart from those of every other pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopySet {
    /// Whose bytes.
    pub owner: NodeId,
    /// Of which pair.
    pub epoch: u64,
}

/// What a node asks of a peer, beside reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Begin a set of copies.
    BeginCopies,
    /// Keep these bytes.
    Keep,
    /// Give up the copies of these ranges. Without ranges: is the set still here?
    Drop,
    /// Not about copies: to be done to a file that sits at the peer.
    AtSeat(SeatWork),
}

impl Work {
    /// The bytes of the ranges come with it.
    #[must_use]
    pub fn brings_bytes(self) -> bool {
        matches!(self, Work::Keep | Work::AtSeat(SeatWork::Write | SeatWork::Append))
    }
}

/// What a node wants done where a file sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeatWork {
    /// Does it sit there?
    Look,
    /// Write the bytes into the ranges.
    Write,
    /// Write the bytes behind its end. The one range is as long as they are.
    Append,
    /// Make it end where the one range does.
    Cut,
    /// Make it end there if it ends before.
    Grow,
    /// Make it safe, as `fsync` does there.
    Sync,
}

impl From<Ino> for Subject {
    fn from(ino: Ino) -> Subject {
        Subject { ino, copy_since: None, held: None }
    }
}

/// Something that the source keeps an eye on while it lives; see [`Lent::held`].
pub type Hold = Box<dyn Send + Sync>;

/// A cache file that holds the bytes that were asked for, at the same offsets.
pub struct Lent {
    pub(crate) file: Arc<File>,
    pub(crate) hold: Option<Hold>,
    /// Kept only while the bytes are copied.
    _while_copied: Option<Hold>,
}

impl Lent {
    /// The bytes are in `file` now and may go at any time. They are copied out before
    /// [`ByteSource::still_here`] is asked.
    #[must_use]
    pub fn copied(file: Arc<File>) -> Lent {
        Lent { file, hold: None, _while_copied: None }
    }

    /// The same; `hold` lives until they are copied out, and tells the source that somebody is at
    /// it: not to give them up just now, if it has the choice.
    #[must_use]
    pub fn copied_under(file: Arc<File>, hold: Hold) -> Lent {
        Lent { file, hold: None, _while_copied: Some(hold) }
    }

    /// As long as `hold` lives the source itself does not zero, cut or replace the lent bytes in
    /// place (evicting them is the usual reason to). This permits sending straight from the page
    /// cache, where the network may still read a page long after the call that sent it; `hold`
    /// is dropped when the peer has said that it has the bytes.
    #[must_use]
    pub fn held(file: Arc<File>, hold: Hold) -> Lent {
        Lent { file, hold: Some(hold), _while_copied: None }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent")
            .field("file", &self.file)
            .field("held", &self.hold.is_some())
            .finish()
    }
}

/// What the daemon implements to be a peer. Both calls are made on the runtime's threads, many
/// at a time, and must not wait for the network or the disk.
pub trait ByteSource: Send + Sync + 'static {
    /// The open cache file that holds every byte of `ranges` now, or why not.
    fn open_read(&self, subject: Subject, ranges: &[ByteRange]) -> Result<Lent, SourceError>;

    /// Asked after the bytes were read: were all of them in the cache throughout, since
    /// [`ByteSource::open_read`] lent them? Without a yes the peer gets an error in their place.
    fn still_here(&self, subject: Subject, ranges: &[ByteRange]) -> bool;

    /// A node begins to keep copies here. This and the next two are made where waiting for the
    /// disk harms nobody.
    fn begin_copies(&self, _set: CopySet) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    /// Keep these bytes of another node, one range after the other. ESTALE: that set was not begun
    /// here, or is of no use any more.
    fn keep_copies(
        &self,
        _set: CopySet,
        _ino: Ino,
        _ranges: &[ByteRange],
        _bytes: &[u8],
    ) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    /// Something is to be done to a file that sits here; made where waiting harms nobody. ESTALE: it
    /// does not sit here.
    fn at_seat(
        &self,
        _ino: Ino,
        _work: SeatWork,
        _ranges: &[ByteRange],
        _bytes: &[u8],
    ) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    /// Copies of these bytes are not needed any more. Without ranges: is the set still here?
    fn drop_copies(&self, _set: CopySet, _ino: Ino, _ranges: &[ByteRange]) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }
}
