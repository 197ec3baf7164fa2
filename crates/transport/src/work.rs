//! Work that peers want done, the serving end.

use crate::source::{ByteSource, Work};
use crate::wire::{Order, Status};
use ebb_types::Errno;
use std::sync::Arc;

/// Does it where it may wait for the disk.
pub(crate) async fn carry_out(
    source: &Arc<dyn ByteSource>,
    order: Order,
    bytes: Vec<u8>,
) -> Status {
    let source = Arc::clone(source);
    let Order { set, ino, ranges, work, payload, .. } = order;
    let done = tokio::task::spawn_blocking(move || match work {
        work if work.brings_bytes() && crc32c::crc32c(&bytes) != payload.crc => Err(Errno::EPROTO),
        Work::BeginCopies => source.begin_copies(set),
        Work::Keep => source.keep_copies(set, ino, &ranges, &bytes),
        Work::Drop => source.drop_copies(set, ino, &ranges),
        Work::AtSeat(work) => source.at_seat(ino, work, &ranges, &bytes),
    });
    match done.await {
        Ok(Ok(())) => Status::Ok,
        Ok(Err(errno)) => Status::Errno(errno),
        Err(_) => Status::Errno(Errno::EIO),
    }
}
