//! What nodes have done by a peer, in the words of who wants it: copies that a partner keeps, and files that sit at
//! a peer. What copies and seats mean is decided elsewhere, and how the bytes get there by the channel.

use crate::peer::{PeerChannel, WorkError, WorkRequest};
use crate::source::{CopySet, SeatWork, Work};
use crate::wire::KEEP_BYTES_MAX;
use ebb_types::{ByteRange, Errno, Ino, NodeId};
use std::io;
use std::sync::Arc;

/// Nothing is read: the work brings no bytes.
fn nothing(_: ByteRange, _: &mut [u8]) -> io::Result<()> {
    Ok(())
}

/// One set of copies at a partner. It is as good as the answers: an error leaves open what the partner has, and
/// the sender begins another set, perhaps elsewhere.
pub struct CopyLink {
    channel: Arc<dyn PeerChannel>,
    address: String,
    set: CopySet,
}

impl CopyLink {
    /// Begins a set of copies at the node at `address`.
    pub async fn begin(
        channel: Arc<dyn PeerChannel>,
        address: String,
        set: CopySet,
    ) -> Result<CopyLink, WorkError> {
        let link = CopyLink { channel, address, set };
        link.ask(Ino(0), Work::BeginCopies, &[]).await?;
        Ok(link)
    }

    /// Which copies these are.
    #[must_use]
    pub fn set(&self) -> CopySet {
        self.set
    }

    /// Whether the partner still keeps the set.
    pub async fn check(&self) -> Result<(), WorkError> {
        self.ask(Ino(0), Work::Drop, &[]).await
    }

    /// Copies of these bytes are not needed any more.
    pub async fn drop_ranges(&self, ino: Ino, ranges: &[ByteRange]) -> Result<(), WorkError> {
        match ranges {
            // Without ranges it would be a question.
            [] => Ok(()),
            ranges => self.ask(ino, Work::Drop, ranges).await,
        }
    }

    /// Copies bytes of a file; `read` fills a buffer with a range of them. When this returns
    /// the partner has all of them.
    pub async fn keep(
        &self,
        ino: Ino,
        ranges: &[ByteRange],
        read: impl Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send + Sync,
    ) -> Result<(), WorkError> {
        let request = WorkRequest { set: self.set, ino, work: Work::Keep, ranges, read: &read };
        self.channel.work(&self.address, request).await
    }

    async fn ask(&self, ino: Ino, work: Work, ranges: &[ByteRange]) -> Result<(), WorkError> {
        let request = WorkRequest { set: self.set, ino, work, ranges, read: &nothing };
        self.channel.work(&self.address, request).await
    }
}

/// A node at which files sit.
pub struct SeatLink {
    channel: Arc<dyn PeerChannel>,
    address: String,
}

impl SeatLink {
    /// Of the node at `address`.
    #[must_use]
    pub fn new(channel: Arc<dyn PeerChannel>, address: String) -> SeatLink {
        SeatLink { channel, address }
    }

    /// Writes bytes of a file that sits there; `read` fills a buffer with a range of them.
    pub async fn write(
        &self,
        ino: Ino,
        ranges: &[ByteRange],
        read: impl Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send + Sync,
    ) -> Result<(), WorkError> {
        self.work(ino, SeatWork::Write, ranges, &read).await
    }

    /// Writes bytes, at most [`KEEP_BYTES_MAX`], behind the end of the file. When this
    /// fails with [`WorkError::Silent`] nobody knows whether it was done.
    pub async fn append(&self, ino: Ino, data: &[u8]) -> Result<(), WorkError> {
        let total = data.len() as u64;
        if total > KEEP_BYTES_MAX {
            return Err(WorkError::Local(Errno::EINVAL));
        }
        let read = |range: ByteRange, into: &mut [u8]| {
            into.copy_from_slice(&data[range.start() as usize..range.end() as usize]);
            Ok(())
        };
        self.work(ino, SeatWork::Append, &[ByteRange::new(0, total)], &read).await
    }

    /// Cuts or extends the file.
    pub async fn cut(&self, ino: Ino, size: u64) -> Result<(), WorkError> {
        self.work(ino, SeatWork::Cut, &[ByteRange::new(0, size)], &nothing).await
    }

    /// Extends the file, if it is shorter.
    pub async fn grow(&self, ino: Ino, size: u64) -> Result<(), WorkError> {
        self.work(ino, SeatWork::Grow, &[ByteRange::new(0, size)], &nothing).await
    }

    /// `fsync` of the file.
    pub async fn sync(&self, ino: Ino) -> Result<(), WorkError> {
        self.work(ino, SeatWork::Sync, &[], &nothing).await
    }

    async fn work(
        &self,
        ino: Ino,
        work: SeatWork,
        ranges: &[ByteRange],
        read: &(dyn Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send + Sync),
    ) -> Result<(), WorkError> {
        let set = CopySet { owner: NodeId::NOBODY, epoch: 0 };
        let request = WorkRequest { set, ino, work: Work::AtSeat(work), ranges, read };
        self.channel.work(&self.address, request).await
    }
}
