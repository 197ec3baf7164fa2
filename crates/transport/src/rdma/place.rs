//! The owner's end of a read with a landing: bytes go from the cache file into registered memory, and from there
//! into the reader's buffer without its processor.

use crate::reply::{Asked, Sender, Short, on_blocking_pool, read_cached, short_of, verdict};
use crate::secure::Channel;
use crate::source::ByteSource;
use crate::wire::{self, Reply, Status};
use ebb_rdma::{Place, STAGED_BYTES, Staged, Stream};
use ebb_types::ByteRange;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tokio::time::timeout;

impl Sender {
    /// Writes the bytes of `asked` to `place` and says how it ended. What was written before it turned out that they
    /// are not good is disowned.
    pub(crate) async fn place(
        &self,
        channel: &Channel,
        rdma: &Stream,
        source: &Arc<dyn ByteSource>,
        asked: &Asked<'_>,
        file: &Arc<File>,
        place: Place,
    ) -> io::Result<Status> {
        let status = match self.write_ranges(rdma, asked.ranges, file, place).await? {
            Some(short) => short,
            None => verdict(source, asked),
        };
        if status != Status::Ok {
            self.refuse(channel, asked.id, status).await?;
            return Ok(status);
        }
        let reply = Reply { status, held: false, placed: true, id: asked.id, len: asked.total };
        let mut out = wire::encode_reply(&reply).to_vec();
        out.extend_from_slice(&wire::encode_trailer(asked.id, status));
        self.write(channel, &out).await?;
        Ok(status)
    }

    /// What stopped it early. The outer error is the connection's.
    async fn write_ranges(
        &self,
        rdma: &Stream,
        ranges: &[ByteRange],
        file: &Arc<File>,
        mut place: Place,
    ) -> io::Result<Option<Short>> {
        for pieces in in_stages(ranges) {
            let mut staged = self.stage(rdma).await?;
            let mut filled = 0;
            for piece in pieces {
                match fill(staged, filled, file, piece).await {
                    Ok(back) => staged = back,
                    Err(short) => return Ok(Some(short)),
                }
                filled += piece.len() as usize;
            }
            let written = rdma.write_to(staged, filled, place);
            timeout(self.stall_timeout, written).await.map_err(late)??;
            place.address = place.address.wrapping_add(filled as u64);
        }
        Ok(None)
    }

    async fn stage(&self, rdma: &Stream) -> io::Result<Staged> {
        timeout(self.stall_timeout, rdma.stage()).await.map_err(late)?
    }
}

fn late<E>(_: E) -> io::Error {
    io::ErrorKind::TimedOut.into()
}

/// The ranges in order, in groups of at most the bytes of one stage.
fn in_stages(ranges: &[ByteRange]) -> Vec<Vec<ByteRange>> {
    ebb_types::in_steps(ranges, STAGED_BYTES as u64, usize::MAX)
}

/// Reads a piece of the file to place `at` of the stage.
async fn fill(
    mut staged: Staged,
    at: usize,
    file: &Arc<File>,
    piece: ByteRange,
) -> Result<Staged, Short> {
    let len = piece.len() as usize;
    let done = read_cached(file, piece.start(), &mut staged[at..at + len])?;
    if done == len {
        return Ok(staged);
    }
    let file = Arc::clone(file);
    let read = on_blocking_pool(move || {
        let rest = &mut staged[at + done..at + len];
        let read = file.read_exact_at(rest, piece.start() + done as u64);
        (staged, read)
    });
    let (staged, read) = read.await?;
    read.map(|()| staged).map_err(|e| short_of(&e))
}
