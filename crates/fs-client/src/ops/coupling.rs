//! Coupled files: waiting until one can be read, and telling the service when a handle is through with it.

use crate::awaited::{self, AwaitedNames};
use crate::file::CachedFile;
use crate::handles::OpenFile;
use crate::node::Node;
use crate::ops::sync::is_gone;
use ebb_coupling::Terms;
use ebb_handover::AGAIN;
use ebb_meta_client::{Awaited, CoupledHandle};
use ebb_types::{Attr, Errno, FileKind, Ino, Name};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Between two attempts to publish, or to tell the service.
const TRY_AGAIN: Duration = Duration::from_millis(100);
const TRY_AGAIN_MOST: Duration = Duration::from_secs(2);

pub(crate) const COUPLE: &[u8] = b"user.ebb.couple";

/// What a name was found to be.
pub enum Looked {
    /// It is there.
    There(Attr),
    /// It is not.
    Missing,
    /// It is not, and who opens it to read waits so long.
    Awaited(Duration),
}

/// Why a file was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotOpened {
    /// As the caller is told.
    Failed(Errno),
    /// It is awaited; to be asked again when it is ready, at most so long from now.
    Awaits(Duration),
}

impl From<Errno> for NotOpened {
    fn from(errno: Errno) -> NotOpened {
        NotOpened::Failed(errno)
    }
}

/// The number under which an open of an application counts, which it has again after the death of a daemon; 0
/// for what is opened on nobody's behalf.
pub(crate) fn counted() -> u64 {
    ebb_meta_client::caller().map_or(0, |caller| caller.number)
}

/// Waiting for one file, which is asked for again and again.
#[derive(Default)]
pub struct Patience {
    until: Option<Instant>,
}

impl Patience {
    fn left(&mut self, wait: Duration) -> Duration {
        let now = Instant::now();
        let until = *self.until.get_or_insert_with(|| now + wait);
        until.saturating_duration_since(now)
    }
}

impl Node {
    /// Waits for what is awaited. ETIMEDOUT when that takes too long, EINTR after a signal, EIO when a producer
    /// died.
    pub async fn await_coupled(
        &self,
        what: &Awaited,
        patience: &mut Patience,
        wait: Duration,
    ) -> Result<(), Errno> {
        let left = patience.left(wait);
        if left.is_zero() {
            return Err(Errno::ETIMEDOUT);
        }
        self.metrics.awaited.fetch_add(1, Relaxed);
        let asked = async {
            let answer = tokio::time::timeout(left, self.meta.await_coupled(what)).await;
            answer.unwrap_or(Err(Errno::ETIMEDOUT))
        };
        let unique = ebb_meta_client::caller().map(|c| c.number | if c.again { AGAIN } else { 0 });
        match unique {
            Some(unique) => self.interrupts.run(unique, asked).await,
            None => asked.await,
        }
    }

    /// Asks again and again until it is opened, or was waited for as long as its directory says.
    pub(crate) async fn when_ready<T, F: Future<Output = Result<T, NotOpened>>>(
        &self,
        ino: Ino,
        flags: i32,
        first: Duration,
        ask: impl Fn() -> F,
    ) -> Result<T, Errno> {
        let (mut patience, mut wait) = (Patience::default(), first);
        loop {
            if flags & libc::O_NONBLOCK != 0 {
                return Err(Errno::EAGAIN);
            }
            self.await_coupled(&Awaited::File(ino), &mut patience, wait).await?;
            match ask().await {
                Ok(opened) => return Ok(opened),
                Err(NotOpened::Failed(e)) => return Err(e),
                Err(NotOpened::Awaits(again)) => wait = again,
            }
        }
    }

    /// The open of an inode that stands for a name: fails when the name is there, so that the kernel looks.
    pub async fn open_awaited(&self, ino: Ino) -> Errno {
        let Some((parent, name, wait)) = self.awaited.name(ino) else { return Errno::ESTALE };
        let mut patience = Patience::default();
        match self.await_coupled(&Awaited::Named(parent, name), &mut patience, wait).await {
            Ok(()) => Errno::ESTALE,
            // It never came.
            Err(Errno::ETIMEDOUT) => Errno::ENOENT,
            Err(e) => e,
        }
    }

    /// The inode that stands for a name which that thread opens to read.
    pub async fn await_name(
        &self,
        parent: Ino,
        name: Name,
        wait: Duration,
        thread: u32,
    ) -> Result<Attr, Errno> {
        match awaited::opens_to_read(thread).await {
            true => Ok(awaited::attr(self.awaited.tell(parent, name, wait))),
            false => Err(Errno::ENOENT),
        }
    }

    /// The names that are awaited.
    #[must_use]
    pub fn awaited(&self) -> &AwaitedNames {
        &self.awaited
    }

    /// An open that counted came to nothing.
    pub(crate) async fn not_entered(&self, ino: Ino, handle: u64) {
        if handle != 0 && self.meta.leave_coupled(ino, handle, false).await.is_err() {
            self.leave_coupled_later(ino, handle, false);
        }
    }

    /// A handle of a coupled file is closed: the service is told when what was written is published.
    pub(crate) async fn left_coupled(&self, handle: &OpenFile) {
        let (file, couple) = (&handle.file, handle.couple);
        if couple == 0 {
            return;
        }
        let writes = handle.access.is_none_or(|access| access.writes());
        let through = handle.closed_well.load(Relaxed);
        let waits = writes && file.is_tracked() && !file.has_no_writers(&self.cache);
        let ready = !waits && (!writes || !through || self.publish(file).await.is_ok());
        if ready && self.meta.leave_coupled(file.ino, couple, through).await.is_ok() {
            return;
        }
        let Some(node) = self.me_arc() else { return };
        let file = Arc::clone(file);
        self.runtime.spawn(async move {
            if writes {
                node.publish_coupled(&file).await;
            }
            node.leave_coupled_later(file.ino, couple, through);
        });
    }

    /// Until what was written is published, also by who has it mapped, or nobody can want it any more.
    async fn publish_coupled(&self, file: &Arc<CachedFile>) {
        let mut pause = TRY_AGAIN;
        loop {
            let mapped = file.is_tracked() && !file.has_no_writers(&self.cache);
            if !mapped {
                match self.publish(file).await {
                    Ok(()) => return,
                    Err(e) if is_gone(e) => return,
                    Err(e) => tracing::debug!(file = file.label(), error = %e, "not published"),
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(TRY_AGAIN_MOST);
        }
    }

    fn leave_coupled_later(&self, ino: Ino, handle: u64, through: bool) {
        let node = self.me_weak();
        self.runtime.spawn(async move {
            let mut pause = TRY_AGAIN;
            loop {
                let Some(node) = node.upgrade() else { return };
                match node.meta.leave_coupled(ino, handle, through).await {
                    Ok(()) => return,
                    Err(e) => tracing::debug!(%ino, error = %e, "not told that it is closed"),
                }
                drop(node);
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(TRY_AGAIN_MOST);
            }
        });
    }

    /// Every open that counts, for a service that may have forgotten some.
    pub(crate) fn coupled_now(&self) -> Vec<CoupledHandle> {
        let files = self.handles.all_files();
        let counts = files.iter().filter(|open| open.couple != 0);
        let of = |open: &Arc<OpenFile>| CoupledHandle {
            ino: open.file.ino,
            handle: open.couple,
            write: open.access.is_none_or(|access| access.writes()),
        };
        counts.map(of).collect()
    }

    /// A coupled file that this node has used is no more.
    pub(crate) fn consumed(&self, ino: Ino) {
        let Some(node) = self.me_arc() else { return };
        self.runtime.spawn(async move { node.discard_if_deleted(ino).await });
    }

    /// Couples the files of an empty directory.
    pub(crate) async fn couple(&self, ino: Ino, value: Vec<u8>) -> Result<(), Errno> {
        let text = std::str::from_utf8(&value).map_err(|_| Errno::EINVAL)?;
        if let Err(e) = text.parse::<Terms>() {
            tracing::warn!(%ino, "user.ebb.couple: {e}");
            return Err(Errno::EINVAL);
        }
        let attr: Attr = self.meta.getattr(ino).await?;
        if attr.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        if !self.meta.readdir(ino, None, 1).await?.entries.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.meta.setxattr(ino, COUPLE, &value, 0).await
    }

    /// Where a coupled file stands, or how a directory couples its files.
    pub(crate) async fn coupling(&self, ino: Ino) -> Result<String, Errno> {
        let text = self.meta.describe(ino).await?.couple;
        if text.is_empty() { Err(Errno::ENODATA) } else { Ok(text) }
    }
}
