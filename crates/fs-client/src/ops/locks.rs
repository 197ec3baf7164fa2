//! Record locks (`fcntl`) and whole-file locks (`flock`): held by the metadata service for all
//! nodes, and synchronisation events of the model: what was written under a lock is published
//! before it is given back, and looked up after it is taken. Before a lock is granted the other nodes
//! publish what they wrote in its range, locked or not.

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
            publish: false,
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
        let mut wanted = lock.wanted(wait)?;
        let file = &handle.file;
        // Where writes publish there is nothing left to be published.
        wanted.publish = !file.state.read().model.writes_publish();
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
            note(&mut file.state.write().lock_owners, lock.owner);
            note(&mut handle.record_owners.lock(), lock.owner);
        }
        self.event(file, SyncEvent::Lock, ByteRange::ALL, false).await
    }

    /// Gives back what was locked through a handle, when the handle goes. Record locks of a
    /// process have gone with its `close` before.
    pub(crate) async fn release_locks_of(&self, handle: &OpenFile) {
        let file = &handle.file;
        let mut held = Vec::new();
        let owner = handle.flock_owner.swap(0, Relaxed);
        if owner != 0 {
            held.push((owner, true));
        }
        {
            let mut state = file.state.write();
            for owner in std::mem::take(&mut *handle.record_owners.lock()) {
                if state.lock_owners.contains(&owner) {
                    state.lock_owners.retain(|o| *o != owner);
                    held.push((owner, false));
                }
            }
        }
        if held.is_empty() {
            return;
        }
        if let Err(e) = self.event(file, SyncEvent::Unlock, ByteRange::ALL, false).await {
            tracing::error!(ino = %file.ino, error = %e, "bytes written under a lock not published");
        }
        for (owner, flock) in held {
            if let Err(e) = self.meta.release_locks(file.ino, owner, flock).await {
                tracing::warn!(ino = %file.ino, error = %e, "locks not given back");
            }
        }
    }
}

fn note(owners: &mut Vec<u64>, owner: u64) {
    if !owners.contains(&owner) {
        owners.push(owner);
    }
}
