//! Record locks (`fcntl`) and whole-file locks (`flock`): held by the metadata service for all
//! nodes, and synchronisation events of the model: what was written under a lock is published
//! before it is given back, and looked up after it is taken.

use crate::handles::OpenFile;
use crate::node::Node;
use ebb_consistency::SyncEvent;
use ebb_meta_client::LockKind;
use ebb_meta_client::LockRequest as Wanted;
use ebb_types::{ByteRange, Errno, Ino};
use std::sync::atomic::Ordering::Relaxed;

/// A lock as the kernel speaks of it: `end` is the last byte.
#[derive(Clone, Copy, Debug)]
pub struct LockRequest {
    /// Which file.
    pub ino: Ino,
    /// Whose.
    pub owner: u64,
    /// Process id, for whoever asks.
    pub pid: u32,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
    /// `F_RDLCK`, `F_WRLCK`, `F_UNLCK`.
    pub typ: i32,
    /// `flock` rather than `fcntl`.
    pub flock: bool,
}

impl LockRequest {
    fn wanted(self, wait: bool) -> Result<Wanted, Errno> {
        let kind = match self.typ {
            libc::F_RDLCK => LockKind::Read,
            libc::F_WRLCK => LockKind::Write,
            libc::F_UNLCK => LockKind::Unlock,
            _ => return Err(Errno::EINVAL),
        };
        // The kernel writes "to the end" as the largest signed offset.
        let range = if self.end >= i64::MAX as u64 {
            ByteRange::from(self.start)
        } else {
            ByteRange::new(self.start, self.end + 1)
        };
        Ok(Wanted {
            ino: self.ino,
            owner: self.owner,
            pid: self.pid,
            range,
            kind,
            flock: self.flock,
            wait,
        })
    }
}

impl Node {
    /// Who would be in the way of this lock.
    pub async fn get_lock(&self, lock: LockRequest) -> Result<LockRequest, Errno> {
        let found = self.meta.get_lock(&lock.wanted(false)?).await?;
        let Some(other) = found else {
            return Ok(LockRequest { typ: libc::F_UNLCK, ..lock });
        };
        let end =
            if other.range.end() == u64::MAX { i64::MAX as u64 } else { other.range.end() - 1 };
        let typ = match other.kind {
            LockKind::Read => libc::F_RDLCK,
            LockKind::Write => libc::F_WRLCK,
            LockKind::Unlock => libc::F_UNLCK,
        };
        // A process id means something on its own node only.
        let pid = if other.node == self.me { other.pid } else { 0 };
        Ok(LockRequest { start: other.range.start(), end, typ, pid, ..lock })
    }

    /// Takes or gives back a lock. Waiting ends with EINTR when the process gets a signal.
    pub async fn set_lock(
        &self,
        handle: &OpenFile,
        lock: LockRequest,
        wait: bool,
        unique: u64,
    ) -> Result<(), Errno> {
        let wanted = lock.wanted(wait)?;
        let file = &handle.file;
        if wanted.kind == LockKind::Unlock {
            let published = self.event(file, SyncEvent::Unlock, ByteRange::ALL, false).await;
            self.meta.set_lock(&wanted).await?;
            return published;
        }
        if wait {
            self.interrupts.run(unique, self.meta.set_lock(&wanted)).await?;
        } else {
            self.meta.set_lock(&wanted).await?;
        }
        if lock.flock {
            handle.flock_owner.store(lock.owner, Relaxed);
        } else {
            let mut state = file.state.write();
            if !state.lock_owners.contains(&lock.owner) {
                state.lock_owners.push(lock.owner);
            }
        }
        self.event(file, SyncEvent::Lock, ByteRange::ALL, false).await
    }

    /// Gives back the flock that was taken through a handle, when the handle goes.
    pub(crate) async fn release_flock(&self, handle: &OpenFile) {
        let owner = handle.flock_owner.swap(0, Relaxed);
        if owner == 0 {
            return;
        }
        let file = &handle.file;
        if let Err(e) = self.event(file, SyncEvent::Unlock, ByteRange::ALL, false).await {
            tracing::error!(ino = %file.ino, error = %e, "bytes written under a lock not published");
        }
        if let Err(e) = self.meta.release_locks(file.ino, owner, true).await {
            tracing::warn!(ino = %file.ino, error = %e, "flock not given back");
        }
    }
}
