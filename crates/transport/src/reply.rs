//! Sends the bytes of one request: copied out of the file when they are few or when nothing
//! keeps them in place or the connection is encrypted, straight from the page cache otherwise. The runtime's threads never wait
//! for the disk: pages that are not in memory are read on the blocking pool.

use crate::secure::Channel;
use crate::source::{ByteSource, Hold, Lent, SourceError, Subject};
use crate::wire::{self, REPLY_LEN, Reply, Status, TRAILER_LEN};
use ebb_rdma::Place;
use ebb_types::{ByteRange, Errno};
use rustix::io::ReadWriteFlags;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;

/// Bytes that are copied out of the file in one go.
const COPY_BYTES: usize = 128 << 10;

/// From here on what is held is sent from the page cache. Below it copying takes less CPU time
/// even so (measured over loopback, `benches/peer.rs`: equal at about 450 KiB, a quarter less at
/// 1 MiB), because the copies stay in the processor's cache.
const PAGES_BYTES_MIN: u64 = 512 << 10;

/// Bytes of one sendfile call; whether they are in memory is checked before each.
const SENDFILE_BYTES: u64 = 512 << 10;

/// One request, as the source was asked.
pub(crate) struct Asked<'a> {
    pub id: u64,
    pub subject: Subject,
    pub ranges: &'a [ByteRange],
    pub total: u64,
    pub landing: Option<Place>,
}

/// The sending half of a connection.
pub(crate) struct Sender {
    /// At most a copied chunk with its frames.
    scratch: Vec<u8>,
    /// A peer that takes nothing for so long is given up.
    pub(crate) stall_timeout: Duration,
}

/// Why the bytes that were promised are not coming.
pub(crate) type Short = Status;

impl Sender {
    pub fn new(stall_timeout: Duration) -> Sender {
        Sender { scratch: Vec::new(), stall_timeout }
    }

    /// An answer without bytes.
    pub async fn refuse(&self, stream: &Channel, id: u64, status: Status) -> io::Result<()> {
        let reply = Reply { status, held: false, placed: false, id, len: 0 };
        self.write(stream, &wire::encode_reply(&reply)).await
    }

    /// The whole answer to a request about copies.
    pub async fn acknowledge(&self, stream: &Channel, id: u64, status: Status) -> io::Result<()> {
        self.write(stream, &wire::encode_trailer(id, status)).await
    }

    /// Answers `asked` from `lent`: how it ended, and what to hold until the peer has the bytes.
    pub async fn answer(
        &mut self,
        stream: &Channel,
        source: &Arc<dyn ByteSource>,
        asked: &Asked<'_>,
        lent: Lent,
    ) -> io::Result<(Status, Option<Hold>)> {
        if let (Some(place), Some(rdma)) = (asked.landing, stream.rdma()) {
            let status = self.place(stream, rdma, source, asked, &lent.file, place).await?;
            return Ok((status, None));
        }
        if asked.total <= COPY_BYTES as u64 {
            return Ok((self.copy_whole(stream, source, asked, &lent.file).await?, None));
        }
        let from_pages = asked.total >= PAGES_BYTES_MIN && stream.is_bare();
        let hold = lent.hold.filter(|_| from_pages);
        let held = hold.is_some();
        let reply =
            Reply { status: Status::Ok, held, placed: false, id: asked.id, len: asked.total };
        self.write_more(stream, &wire::encode_reply(&reply)).await?;
        let (sent, short) = if held {
            self.send_pages(stream, asked.ranges, &lent.file).await?
        } else {
            self.send_copies(stream, asked.ranges, &lent.file).await?
        };
        let status = match short {
            Some(status) => {
                self.pad(stream, asked.total - sent).await?;
                status
            }
            None => verdict(source, asked),
        };
        self.write(stream, &wire::encode_trailer(asked.id, status)).await?;
        Ok((status, hold))
    }

    /// Head, bytes and trailer in one write; or the head of a refusal, since nothing is sent yet.
    async fn copy_whole(
        &mut self,
        stream: &Channel,
        source: &Arc<dyn ByteSource>,
        asked: &Asked<'_>,
        file: &Arc<File>,
    ) -> io::Result<Status> {
        let total = asked.total as usize;
        self.scratch.resize(REPLY_LEN + total + TRAILER_LEN, 0);
        let mut at = REPLY_LEN;
        for range in asked.ranges {
            let len = range.len() as usize;
            if let Err(status) = self.read_scratch(file, range.start(), at, len).await {
                self.refuse(stream, asked.id, status).await?;
                return Ok(status);
            }
            at += len;
        }
        let status = verdict(source, asked);
        if status != Status::Ok {
            self.refuse(stream, asked.id, status).await?;
            return Ok(status);
        }
        let reply = Reply { status, held: false, placed: false, id: asked.id, len: asked.total };
        self.scratch[..REPLY_LEN].copy_from_slice(&wire::encode_reply(&reply));
        self.scratch[at..].copy_from_slice(&wire::encode_trailer(asked.id, status));
        self.write(stream, &self.scratch).await?;
        Ok(status)
    }

    /// Sends `ranges` through the scratch buffer: how many bytes, and what stopped it early.
    async fn send_copies(
        &mut self,
        stream: &Channel,
        ranges: &[ByteRange],
        file: &Arc<File>,
    ) -> io::Result<(u64, Option<Short>)> {
        let mut sent = 0;
        for range in ranges {
            let mut rest = *range;
            while !rest.is_empty() {
                let len = rest.len().min(COPY_BYTES as u64);
                self.scratch.resize(len as usize, 0);
                if let Err(short) = self.read_scratch(file, rest.start(), 0, len as usize).await {
                    return Ok((sent, Some(short)));
                }
                self.write(stream, &self.scratch).await?;
                sent += len;
                rest = ByteRange::new(rest.start() + len, rest.end());
            }
        }
        Ok((sent, None))
    }

    /// Sends `ranges` from the page cache: how many bytes, and what stopped it early.
    async fn send_pages(
        &self,
        stream: &Channel,
        ranges: &[ByteRange],
        file: &Arc<File>,
    ) -> io::Result<(u64, Option<Short>)> {
        let mut sent = 0;
        for range in ranges {
            let mut at = range.start();
            while at < range.end() {
                let end = range.end().min(at + SENDFILE_BYTES);
                if let Err(short) = warm(file, ByteRange::new(at, end)).await {
                    return Ok((sent, Some(short)));
                }
                while at < end {
                    match self.sendfile(stream, file, at, (end - at) as usize).await? {
                        Ok(0) => return Ok((sent, Some(Status::NotHere))),
                        Ok(n) => {
                            at += n;
                            sent += n;
                        }
                        Err(errno) => return Ok((sent, Some(Status::Errno(errno)))),
                    }
                }
            }
        }
        Ok((sent, None))
    }

    /// One sendfile call that sent something: 0 at the end of the file. The inner error is the
    /// file's, the outer one the connection's.
    async fn sendfile(
        &self,
        channel: &Channel,
        file: &File,
        at: u64,
        len: usize,
    ) -> io::Result<Result<u64, Errno>> {
        loop {
            let mut offset = at;
            let stream = channel.tcp();
            let sent = stream.try_io(Interest::WRITABLE, || {
                Ok(rustix::fs::sendfile(stream, file, Some(&mut offset), len)?)
            });
            match sent {
                Ok(n) => return Ok(Ok(n as u64)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.writable(channel).await?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if is_of_file(&e) => return Ok(Err(Errno::from(e))),
                Err(e) => return Err(e),
            }
        }
    }

    /// Keeps the promise of the head's length after the bytes ran out; the trailer disowns them.
    async fn pad(&self, stream: &Channel, mut len: u64) -> io::Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        while len > 0 {
            let n = len.min(ZEROS.len() as u64);
            self.write(stream, &ZEROS[..n as usize]).await?;
            len -= n;
        }
        Ok(())
    }

    /// Reads `len` bytes of `file` from `offset` to place `at` of the scratch buffer.
    async fn read_scratch(
        &mut self,
        file: &Arc<File>,
        offset: u64,
        at: usize,
        len: usize,
    ) -> Result<(), Short> {
        match read_cached(file, offset, &mut self.scratch[at..at + len])? {
            n if n == len => Ok(()),
            done => {
                let mut scratch = std::mem::take(&mut self.scratch);
                let file = file.clone();
                let (scratch, read) = on_blocking_pool(move || {
                    let rest = &mut scratch[at + done..at + len];
                    let read = file.read_exact_at(rest, offset + done as u64);
                    (scratch, read)
                })
                .await?;
                self.scratch = scratch;
                read.map_err(|e| short_of(&e))
            }
        }
    }

    pub(crate) async fn write(&self, stream: &Channel, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match stream.try_write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.writable(stream).await?,
                Err(e) => return Err(e),
            }
        }
        while stream.has_unsent() {
            match stream.try_flush() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.writable(stream).await?,
                flushed => flushed?,
            }
        }
        Ok(())
    }

    /// Writes what the kernel should send together with what follows.
    async fn write_more(&self, channel: &Channel, bytes: &[u8]) -> io::Result<()> {
        if !channel.is_bare() {
            return self.write(channel, bytes).await;
        }
        let stream = channel.tcp();
        let sent = stream.try_io(Interest::WRITABLE, || {
            Ok(rustix::net::send(stream, bytes, rustix::net::SendFlags::MORE)?)
        });
        let sent = match sent {
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
            Err(e) => return Err(e),
        };
        self.write(channel, &bytes[sent..]).await
    }

    async fn writable(&self, stream: &Channel) -> io::Result<()> {
        tokio::time::timeout(self.stall_timeout, stream.writable())
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

/// After everything was read: does the source still stand by it?
pub(crate) fn verdict(source: &Arc<dyn ByteSource>, asked: &Asked<'_>) -> Status {
    if source.still_here(asked.subject, asked.ranges) { Status::Ok } else { Status::NotHere }
}

impl From<SourceError> for Status {
    fn from(e: SourceError) -> Status {
        match e {
            SourceError::NotHere => Status::NotHere,
            SourceError::Errno(errno) => Status::Errno(errno),
        }
    }
}

/// Sendfile reports both its ends through one errno; these come from reading the file.
fn is_of_file(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EIO | libc::EINVAL | libc::ENOMEM | libc::EOVERFLOW | libc::EUCLEAN)
    )
}

pub(crate) fn short_of(e: &io::Error) -> Short {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => Status::NotHere,
        _ => Status::Errno(Errno::from(e)),
    }
}

/// Reads as much of `into` as is in memory; less than all of it means that the disk must be
/// asked (or is not there: the disk says so).
pub(crate) fn read_cached(file: &File, offset: u64, into: &mut [u8]) -> Result<usize, Short> {
    let mut done = 0;
    while done < into.len() {
        let rest = &mut [IoSliceMut::new(&mut into[done..])];
        match rustix::io::preadv2(file, rest, offset + done as u64, ReadWriteFlags::NOWAIT) {
            Ok(0) => return Err(Status::NotHere),
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            // Not in memory; or a file system that cannot tell.
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::OPNOTSUPP) => break,
            Err(e) => return Err(Status::Errno(Errno(e.raw_os_error()))),
        }
    }
    Ok(done)
}

/// Brings `range` into the page cache when its last byte is not there.
async fn warm(file: &Arc<File>, range: ByteRange) -> Result<(), Short> {
    if read_cached(file, range.end() - 1, &mut [0])? == 1 {
        return Ok(());
    }
    let file = file.clone();
    let read = on_blocking_pool(move || {
        let mut buffer = vec![0; range.len() as usize];
        file.read_exact_at(&mut buffer, range.start())
    });
    read.await?.map_err(|e| short_of(&e))
}

pub(crate) async fn on_blocking_pool<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Short> {
    // Fails only when the runtime shuts down in the middle of it.
    tokio::task::spawn_blocking(work).await.map_err(|_| Status::Errno(Errno::EIO))
}
