//! Moves the bytes of one grant, in two halves: reads them from the cache file and writes them to
//! the backing; then syncs, and (when asked) reads them back and compares. Small files are written
//! one after the other before the first of them is synced.
//!
//! What is compared is the checksum of the very buffer that was written. The cache file may
//! change while it is read; such bytes are dirty again and their turn comes again.

use crate::options::ReadBack;
use crate::plan;
use crate::source::{FlushError, Grant, Guard};
use ebb_backend::{Access, Backend, BackingFile};
use ebb_types::{Attr, ByteRange, Errno};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// A blocking call that is about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Open,
    /// Reading that many bytes from the cache and writing them.
    Write(u64),
    Sync,
    Verify,
}

impl Step {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Step::Open => "open",
            Step::Write(_) => "write",
            Step::Sync => "fsync",
            Step::Verify => "verify",
        }
    }
}

/// How a grant is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct How {
    /// Read back and compare, from there.
    pub(crate) verify: Option<ReadBack>,
    /// Nobody may want the disk back soon: written pages are sent to it at once, so that the
    /// fsync finds little left to do. Otherwise they wait for the fsync, which can be left out.
    pub(crate) eager: bool,
}

/// How many written bytes are sent to the storage together.
const SEND_BYTES: u64 = 8 << 20;

/// All bytes of the grant are on stable storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    pub(crate) verified: u64,
    /// And the file has the shape that the grant asked for.
    pub(crate) shaped: bool,
}

/// They are not.
#[derive(Debug)]
pub(crate) enum Unmoved {
    /// `proceed` said no.
    Stopped,
    Failed(FlushError),
}

impl<E: Into<FlushError>> From<E> for Unmoved {
    fn from(e: E) -> Unmoved {
        Unmoved::Failed(e.into())
    }
}

/// The bytes of a grant are written, and on no stable storage yet.
pub(crate) struct Written {
    file: Arc<dyn BackingFile>,
    pieces: Vec<ByteRange>,
    span: ByteRange,
    /// Of each piece, when it is to be read back.
    sums: Vec<u64>,
    bytes: u64,
    shape: Option<Attr>,
    guard: Option<Arc<dyn Guard>>,
    how: How,
}

/// Writes the bytes of `grant`. `proceed` is told each step before it is made; it may wait, and
/// its no is respected before a write and before the sync. None: there is nothing to write.
pub(crate) fn write_grant(
    backend: &dyn Backend,
    grant: &Grant,
    how: How,
    buf: &mut Vec<u8>,
    proceed: &mut dyn FnMut(Step) -> bool,
) -> Result<Option<Written>, Unmoved> {
    let ranges = grant.ranges.iter().map(|(range, _)| *range);
    let pieces = plan::pieces(ranges)
        .ok_or_else(|| FlushError::BadGrant { what: "ranges beyond any file".to_owned() })?;
    let Some(span) = span(&pieces) else { return Ok(None) };
    proceed(Step::Open);
    let file = backend.open(&grant.backing_path, grant.backing_ino, Access::Write)?;
    let name = grant.backing_path.rsplit(|c| *c == b'/').next().unwrap_or_default();
    if name.starts_with(ebb_types::name::PART_PREFIX) {
        file.check_owner(grant.owner)?;
    }
    // Pages that are left from a write that failed earlier (perhaps of a daemon before us) must
    // not be written into: ext4 takes their blocks for allocated and written, says yes to the
    // next fsync, and reads zeros once the pages are gone. Without such pages this costs one call.
    let _ = file.drop_cached(span);
    buf.resize(plan::PIECE as usize, 0);
    let mut sums = Vec::with_capacity(if how.verify.is_some() { pieces.len() } else { 0 });
    let (mut bytes, mut sent) = (0, 0);
    for piece in &pieces {
        if !proceed(Step::Write(piece.len())) {
            return Err(Unmoved::Stopped);
        }
        let data = &mut buf[..piece.len() as usize];
        read_cache(grant, data, piece.start())?;
        if how.verify.is_some() {
            sums.push(xxh3_64(data));
        }
        still_granted(grant.guard.as_deref())?;
        file.write_all_at(data, piece.start())?;
        bytes += piece.len();
        if how.eager && bytes - sent >= SEND_BYTES {
            file.start_writing(span);
            sent = bytes;
        }
    }
    Ok(Some(Written {
        file,
        pieces,
        span,
        sums,
        bytes,
        shape: grant.shape,
        guard: grant.guard.clone(),
        how,
    }))
}

impl Written {
    /// Sends it to the storage without waiting for it.
    pub(crate) fn start(&self) {
        if self.how.eager {
            self.file.start_writing(self.span);
        }
    }

    /// Waits until it is on stable storage, and looks whether it is right there.
    pub(crate) fn finish(
        self,
        buf: &mut [u8],
        proceed: &mut dyn FnMut(Step) -> bool,
    ) -> Result<Moved, Unmoved> {
        if !proceed(Step::Sync) {
            return Err(Unmoved::Stopped);
        }
        still_granted(self.guard.as_deref())?;
        let shaped = match &self.shape {
            Some(shape) => self.file.take_shape(shape)?,
            None => false,
        };
        if shaped {
            self.file.sync_all()?;
        } else {
            self.file.sync_data()?;
        }
        let mut moved = Moved { bytes: self.bytes, verified: 0, shaped };
        if let Some(from) = self.how.verify {
            proceed(Step::Verify);
            if from == ReadBack::Storage {
                self.file.drop_cached(self.span)?;
            }
            read_back(self.file.as_ref(), &self.pieces, &self.sums, self.span, buf)?;
            moved.verified = moved.bytes;
        }
        // The pages are the application's: what is on the backing is in the cache file too. Best
        // effort only: the bytes are safe.
        let _ = self.file.drop_cached(self.span);
        Ok(moved)
    }
}

/// A daemon that stood still does not go on where others may have gone on meanwhile.
fn still_granted(guard: Option<&dyn Guard>) -> Result<(), FlushError> {
    if guard.is_none_or(Guard::may_write) {
        return Ok(());
    }
    let text = "this node was not heard for too long, or the service is away: others may flush these bytes";
    Err(FlushError::LostGrant { text: text.to_owned() })
}

fn span(pieces: &[ByteRange]) -> Option<ByteRange> {
    Some(ByteRange::new(pieces.first()?.start(), pieces.last()?.end()))
}

/// Fills `bytes` from the cache. A cache file that ends early is damage: zeros must not take
/// the place of bytes that somebody wrote.
fn read_cache(grant: &Grant, bytes: &mut [u8], offset: u64) -> Result<(), FlushError> {
    let guard = grant.guard.as_ref();
    if let Err(e) = grant.cache.read_exact_at(bytes, offset) {
        guard.inspect(|guard| guard.is_unreadable());
        return Err(FlushError::Cache { offset, errno: Errno::from(&e) });
    }
    match guard.is_none_or(|guard| guard.is_right(bytes, offset)) {
        true => Ok(()),
        false => Err(FlushError::Damaged { range: ByteRange::at(offset, bytes.len() as u64) }),
    }
}

fn read_back(
    file: &dyn BackingFile,
    pieces: &[ByteRange],
    sums: &[u64],
    span: ByteRange,
    buf: &mut [u8],
) -> Result<(), FlushError> {
    let found = file.identity()?.size;
    if found < span.end() {
        return Err(FlushError::Short { found, expected: span.end() });
    }
    for (piece, sum) in pieces.iter().zip(sums) {
        let bytes = &mut buf[..piece.len() as usize];
        let have = file.read_full_at(bytes, piece.start())?;
        if have < bytes.len() || xxh3_64(bytes) != *sum {
            return Err(FlushError::Mismatch { range: *piece });
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "copy_tests.rs"]
mod tests;
