//! Space inside files: fallocate with its holes, and where data and holes are.

use crate::cache;
use crate::file::{CachedFile, checked_range};
use crate::handles::OpenFile;
use crate::node::Node;
use ebb_consistency::SyncEvent;
use ebb_meta_client::SetAttr;
use ebb_types::{ByteRange, Errno, Ino};
use ebb_wire::pb::StatFsReply;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// So old may be what `df` shows.
const ROOM_KEPT: Duration = Duration::from_secs(1);

/// What `fallocate` was asked to do.
enum Space {
    /// Reserve, and grow the file unless told to keep its size.
    Reserve { keep_size: bool },
    /// Make it zeros; grow the file unless told to keep its size.
    Zero { keep_size: bool },
}

fn space(mode: i32) -> Result<Space, Errno> {
    let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
    match mode & !libc::FALLOC_FL_KEEP_SIZE {
        0 => Ok(Space::Reserve { keep_size }),
        libc::FALLOC_FL_PUNCH_HOLE if keep_size => Ok(Space::Zero { keep_size: true }),
        libc::FALLOC_FL_PUNCH_HOLE => Err(Errno::EOPNOTSUPP),
        libc::FALLOC_FL_ZERO_RANGE => Ok(Space::Zero { keep_size }),
        _ => Err(Errno::EOPNOTSUPP),
    }
}

impl Node {
    /// `fallocate`: reserves in the buffer, punches holes, writes zeros.
    pub async fn fallocate(
        &self,
        handle: &OpenFile,
        offset: u64,
        length: u64,
        mode: i32,
    ) -> Result<(), Errno> {
        let wanted = space(mode)?;
        let range = checked_range(offset, length)?;
        if range.is_empty() {
            return Err(Errno::EINVAL);
        }
        let file = &handle.file;
        // The size must be today's: growing must not cut what another node has appended.
        if file.state.read().model.on(SyncEvent::Stat).query.is_some() {
            self.ask(file, ByteRange::ALL).await?;
        }
        match wanted {
            Space::Reserve { keep_size } => {
                self.has_room_for(
                    range.end().saturating_sub(range.start().max(self.size_of(handle))),
                )
                .await?;
                self.reserve(handle, range).await?;
                if !keep_size {
                    self.grow(file.ino, range.end(), true).await?;
                }
            }
            Space::Zero { keep_size } => {
                let inside = range.intersect(ByteRange::new(0, self.size_of(handle)));
                let zeroed = if keep_size { inside } else { range };
                if !zeroed.is_empty() {
                    file.store_zeros(&self.cache, zeroed)?;
                    self.note_for_heir(file, zeroed);
                    self.note_stored(file, zeroed);
                    self.metrics.zeroed.fetch_add(zeroed.len(), Relaxed);
                    self.list_dirty(file);
                    self.event(file, SyncEvent::Write, zeroed, false).await?;
                }
            }
        }
        Ok(())
    }

    fn size_of(&self, handle: &OpenFile) -> u64 {
        let state = handle.file.state.read();
        let passed = state.passing.as_ref().and_then(|_| handle.file.cache(&self.cache).ok());
        let len = passed.and_then(|cache| cache.metadata().ok()).map(|m| m.len());
        len.unwrap_or_else(|| state.view.size())
    }

    /// ENOSPC when the backing cannot take so many new bytes: the promise of a reservation could not be
    /// kept, however large the buffer is. What other files have not brought there yet is not counted.
    async fn has_room_for(&self, bytes: u64) -> Result<(), Errno> {
        if bytes == 0 {
            return Ok(());
        }
        let there = self.meta.statfs(Duration::ZERO).await?;
        let room = there.bavail.saturating_mul(u64::from(there.frsize));
        if bytes > room { Err(Errno::ENOSPC) } else { Ok(()) }
    }

    async fn reserve(&self, handle: &OpenFile, range: ByteRange) -> Result<(), Errno> {
        // More than the buffer may hold goes through it piece by piece: nothing to reserve.
        if range.len() > self.room_for_clean(0) {
            return Ok(());
        }
        let cache = handle.file.cache(&self.cache)?;
        let reserved = tokio::task::spawn_blocking(move || {
            let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&*cache, keep, range.start(), range.len())
        });
        match reserved.await.map_err(|_| Errno::EIO)? {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            Err(e) => Err(Errno(e.raw_os_error())),
        }
    }

    /// Makes the file at least `size` long. The service decides whether it is shorter: what this
    /// node knows of the size may be old.
    pub(crate) async fn grow(&self, ino: Ino, size: u64, kill_priv: bool) -> Result<(), Errno> {
        let args = SetAttr { size: Some(size), only_grow: true, kill_priv, ..SetAttr::default() };
        self.setattr(ino, args).await.map(drop)
    }

    /// `lseek` with SEEK_DATA and SEEK_HOLE; the kernel does the others itself.
    pub async fn seek(&self, handle: &OpenFile, offset: i64, whence: i32) -> Result<i64, Errno> {
        let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
        let file = &handle.file;
        if file.state.read().model.on(SyncEvent::Read).query.is_some() {
            self.ask(file, ByteRange::ALL).await?;
        }
        // Where the next byte is may be told by any part of the map.
        if !file.state.read().view.is_current() {
            self.query(file, ByteRange::ALL).await?;
        }
        let state = file.state.read();
        if state.passing.is_some() {
            return self.seek_passed(file, offset, whence);
        }
        if offset >= state.view.size() {
            return Err(Errno::ENXIO);
        }
        let found = match whence {
            libc::SEEK_DATA => state.view.seek_data(offset).ok_or(Errno::ENXIO)?,
            libc::SEEK_HOLE => state.view.seek_hole(offset).ok_or(Errno::ENXIO)?,
            _ => return Err(Errno::EINVAL),
        };
        i64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    }

    /// The same in the cache file of a passed-through inode, which has every byte.
    fn seek_passed(&self, file: &CachedFile, offset: u64, whence: i32) -> Result<i64, Errno> {
        let cache = file.cache(&self.cache)?;
        if offset >= cache.metadata()?.len() {
            return Err(Errno::ENXIO);
        }
        let found = match whence {
            libc::SEEK_DATA => cache::next_data(&cache, offset)?.ok_or(Errno::ENXIO)?,
            libc::SEEK_HOLE => cache::next_hole(&cache, offset)?,
            _ => return Err(Errno::EINVAL),
        };
        i64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    }

    /// The backing's space, as `df` shows it. MPI libraries ask that for every file that they open, in every rank.
    pub async fn statfs(&self) -> Result<StatFsReply, Errno> {
        self.meta.statfs(ROOM_KEPT).await
    }

    /// Clears setuid and setgid as a write by somebody without the right does.
    pub(crate) async fn kill_priv(&self, ino: Ino) -> Result<(), Errno> {
        let args = SetAttr { kill_priv: true, ..SetAttr::default() };
        self.send_attr(ino, &args).await.map(drop)
    }
}
