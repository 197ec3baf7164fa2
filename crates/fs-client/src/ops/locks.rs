//! Record locks (`fcntl`) and whole-file locks (`flock`): held by the metadata service for all
//! nodes, and synchronisation events of the model: what was written under a lock is published
//! before it is given back, and looked up after it is taken. Before a lock is granted the other nodes
//! publish what they wrote in its range, locked or not.
//!
//! Who may hold what is in each file's [`LockBook`](crate::lock_book::LockBook).

use crate::file::CachedFile;
use crate::handles::OpenFile;
use crate::lock_book::{HeldAs, Holder, LockOwner};
use crate::node::Node;
use ebb_consistency::SyncEvent;
use ebb_meta_client::LockRequest as Wanted;
use ebb_meta_client::{LockKind, OwnedLocks, Wish};
use ebb_types::{ByteRange, Errno, Ino, Version};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Between two attempts to give back what the service could not be told of.
const GIVE_BACK_AGAIN: Duration = Duration::from_secs(1);

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
        let owner = LockOwner { id: lock.owner, flock: lock.flock };
        self.locks_hold(handle, (!lock.flock).then_some(lock.owner))?;
        // Where writes publish there is nothing left to be published.
        wanted.publish = !file.state.read().model.writes_publish();
        if wanted.kind == LockKind::Unlock {
            let asked = file.locks.lock().asked(owner);
            file.change_locks(|book| book.unlocks(owner, wanted.range));
            let published = self.event(file, SyncEvent::Unlock, ByteRange::ALL, false).await;
            self.meta.set_lock(&wanted).await?;
            if lock.flock || wanted.range == ByteRange::ALL {
                file.change_locks(|book| book.unlocked(owner, asked));
            }
            return published;
        }
        self.give_back(file, Some(owner)).await?;
        let had_none = file.locks.lock().holds_nothing(owner);
        // Before the service is asked: whatever becomes of the answer, closing gives it back.
        file.change_locks(|book| book.asks(owner, handle.fh));
        self.handles.locked(handle.fh, lock.owner, lock.flock);
        let answer = match wait {
            true => self.interrupts.run(unique, self.meta.set_lock(&wanted)).await,
            false => self.meta.set_lock(&wanted).await,
        };
        let refused = matches!(answer, Err(Errno::EAGAIN | Errno::EDEADLK | Errno::EINVAL));
        file.change_locks(|book| {
            book.answered(owner, handle.fh, refused);
            if answer.is_ok() {
                book.locked(owner, wanted.range, HeldAs { kind: wanted.kind, pid: lock.pid });
            }
        });
        let done = match answer {
            Ok(()) => self.event(file, SyncEvent::Lock, ByteRange::ALL, false).await,
            failed => failed,
        };
        if done.is_err() && !refused && had_none {
            self.has_no_lock(file, owner, wanted.range);
        }
        done?;
        // The node can have been given up while the answer was on its way.
        self.locks_hold(handle, (!lock.flock).then_some(lock.owner))
    }

    /// An owner is told that it did not get its first lock, which it may have all the same: nobody
    /// would give it back before the file is closed.
    fn has_no_lock(&self, file: &Arc<CachedFile>, owner: LockOwner, range: ByteRange) {
        let owed = file.change_locks(|book| {
            book.unlocks(owner, range);
            book.failed(owner)
        });
        if owed {
            self.give_back_later(file);
        }
    }

    /// Closing any descriptor of a file gives up its process's record locks: an unlock.
    pub(crate) async fn unlock_at_close(
        &self,
        handle: &OpenFile,
        process: u64,
    ) -> Result<(), Errno> {
        let file = &handle.file;
        if !file.is_guarded() {
            return Ok(());
        }
        let broken = file.locks.lock().is_broken(handle.fh, Some(process));
        file.change_locks(|book| book.told(process));
        let left = file.locks.lock().closes(process);
        let given_back = match left {
            Some(holder) => self.unlock_all(file, vec![holder]).await,
            None => Ok(()),
        };
        if broken { Err(Errno::EIO) } else { given_back }
    }

    /// Gives back what was locked through a handle, when the handle goes. Record locks of a
    /// process have gone with its `close` before.
    pub(crate) async fn release_locks_of(&self, handle: &OpenFile) {
        let file = &handle.file;
        if !file.is_guarded() {
            return;
        }
        let left = file.change_locks(|book| book.released(handle.fh));
        if left.is_empty() {
            return;
        }
        if let Err(e) = self.unlock_all(file, left).await {
            tracing::error!(ino = %file.ino, error = %e, "bytes written under a lock not published");
        }
    }

    /// The owners who left the book have no locks any more: publishes, and gives them back. What
    /// cannot be given back now is as soon as the service can be asked.
    async fn unlock_all(&self, file: &Arc<CachedFile>, left: Vec<Holder>) -> Result<(), Errno> {
        let published = self.event(file, SyncEvent::Unlock, ByteRange::ALL, false).await;
        let owners: Vec<LockOwner> = left.iter().map(|h| h.owner).collect();
        file.change_locks(|book| left.into_iter().for_each(|holder| book.owe(holder)));
        let mut given_back = Ok(());
        for owner in owners {
            if let Err(e) = self.give_back(file, Some(owner)).await {
                given_back = Err(e);
            }
        }
        if let Err(e) = given_back {
            tracing::warn!(ino = %file.ino, error = %e, "locks not given back yet");
            self.give_back_later(file);
        }
        published.and(given_back)
    }

    /// Gives back what is owed of one owner, or of all.
    async fn give_back(&self, file: &CachedFile, of: Option<LockOwner>) -> Result<(), Errno> {
        if !file.is_guarded() || file.locks.lock().owed(of).is_none() {
            return Ok(());
        }
        let _turn = file.giving_back.lock().await;
        loop {
            let Some(owner) = file.locks.lock().owed(of) else { return Ok(()) };
            self.meta.release_locks(file.ino, owner.id, owner.flock).await?;
            file.change_locks(|book| {
                for handle in book.given_back(owner) {
                    self.handles.unlocked(handle, owner.id, owner.flock);
                }
            });
        }
    }

    fn give_back_later(&self, file: &Arc<CachedFile>) {
        let (Some(node), file) = (self.me_arc(), Arc::clone(file)) else { return };
        let node = Arc::downgrade(&node);
        self.runtime.spawn(async move {
            loop {
                tokio::time::sleep(GIVE_BACK_AGAIN).await;
                let Some(node) = node.upgrade() else { return };
                if node.give_back(&file, None).await.is_ok() {
                    return;
                }
            }
        });
    }

    /// Fails what comes through a handle, or from a process, whose locks were given up.
    pub fn locks_hold(&self, handle: &OpenFile, process: Option<u64>) -> Result<(), Errno> {
        let file = &handle.file;
        if !file.is_guarded() {
            return Ok(());
        }
        if !self.meta.keeps_locks() {
            self.lose_locks_of(file);
        }
        let broken = file.locks.lock().is_broken(handle.fh, process);
        if broken { Err(Errno::EIO) } else { Ok(()) }
    }

    /// Everything that may be locked on this node.
    pub(crate) fn locks_now(&self) -> Vec<OwnedLocks> {
        let mut all = Vec::new();
        for file in self.all_files().into_iter().filter(|file| file.is_guarded()) {
            let book = file.locks.lock();
            all.extend(book.holders().map(|holder| OwnedLocks {
                ino: file.ino,
                owner: holder.owner.id,
                flock: holder.owner.flock,
                certain: holder.is_certain(),
                locks: holder.locks().map(|(range, h)| (range, h.kind, h.pid)).collect(),
            }));
        }
        all
    }

    pub(crate) fn lose_locks_of(&self, file: &Arc<CachedFile>) {
        let lost = file.change_locks(|book| {
            let lost = book.lose();
            for handle in book.broken_handles() {
                self.handles.broken(*handle);
            }
            lost
        });
        if lost {
            tracing::error!(
                file = file.label(),
                "this node's locks may be others' now, because it was silent for too long, or the \
                 service forgot them: what had locked the file fails with EIO until it is closed"
            );
            self.metrics.locks_lost.fetch_add(1, Relaxed);
            self.give_back_later(file);
        }
    }

    /// The service has given this node up: its locks can be others', and it does not count its
    /// opens any more. Called before anything is heard on the new connection.
    pub(crate) fn given_up(&self) {
        let mut opened = Vec::new();
        for file in self.all_files() {
            if file.is_guarded() {
                self.lose_locks_of(&file);
            }
            let mut state = file.state.write();
            if std::mem::take(&mut state.registered) {
                drop(state);
                opened.push(file);
            }
        }
        let Some(node) = self.me_arc() else { return };
        self.runtime.spawn(async move {
            let count = opened.len();
            for file in opened {
                node.register_again(&file).await;
            }
            tracing::warn!(
                open = count,
                "this node was given up; the service knows its opens again"
            );
        });
    }

    async fn register_again(&self, file: &Arc<CachedFile>) {
        loop {
            let turn = file.turn.lock().await;
            let wanted = {
                let state = file.state.read();
                state.opens > 0 && !state.registered
            };
            if !wanted {
                return;
            }
            match self.meta.open(file.ino, false, false, Version::ZERO, Wish::No).await {
                Ok(opened) => {
                    self.learn(file, &opened.map);
                    if self.require_opened(file, &opened.map.map) {
                        // What it shows of the file comes with the next event otherwise.
                        let _ = self.query(file, ByteRange::ALL).await;
                    }
                    file.state.write().registered = true;
                    return;
                }
                Err(Errno::ENOENT | Errno::ESTALE) => {
                    tracing::error!(file = file.label(), "removed while this node was given up");
                    return;
                }
                Err(e) => tracing::debug!(file = file.label(), error = %e, "not registered yet"),
            }
            drop(turn);
            tokio::time::sleep(GIVE_BACK_AGAIN).await;
        }
    }
}
