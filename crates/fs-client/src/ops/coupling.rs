//! Coupled files: waiting until one can be read, and telling the service when a handle is through with it.

use crate::awaited;
use crate::file::CachedFile;
use crate::handles::OpenFile;
use crate::node::Node;
use crate::ops::sync::is_gone;
use crate::passing::Opening;
use crate::pauses::Pauses;
use ebb_coupling::Terms;
use ebb_handover::AGAIN;
use ebb_meta_client::{Awaited, Left};
use ebb_types::{Attr, Errno, Ino, Name};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Between two attempts to publish, or to tell the service.
const TRY_AGAIN: Duration = Duration::from_millis(100);
const TRY_AGAIN_MOST: Duration = Duration::from_secs(2);

/// A node that leaves tells of what was closed for so long.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);

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

/// Waits for what is awaited. ETIMEDOUT when that takes too long, EINTR after a signal, EIO when a producer
/// died.
pub async fn await_coupled(
    node: &Node,
    what: &Awaited,
    patience: &mut Patience,
    wait: Duration,
) -> Result<(), Errno> {
    let left = patience.left(wait);
    if left.is_zero() {
        return Err(Errno::ETIMEDOUT);
    }
    node.metrics.awaited.fetch_add(1, Relaxed);
    let asked = async {
        let answer = tokio::time::timeout(left, node.meta.await_coupled(what)).await;
        answer.unwrap_or(Err(Errno::ETIMEDOUT))
    };
    let unique = ebb_meta_client::caller().map(|c| c.number | if c.again { AGAIN } else { 0 });
    match unique {
        Some(unique) => node.interrupts.run(unique, asked).await,
        None => asked.await,
    }
}

/// Asks again and again until it is opened, or was waited for as long as its directory says.
/// EIO when the service does not know any more that it was awaited: nobody can say that it is whole.
pub(crate) async fn when_ready<F: Future<Output = Result<Opening, NotOpened>>>(
    node: &Node,
    ino: Ino,
    flags: i32,
    first: Duration,
    ask: impl Fn() -> F,
) -> Result<Opening, Errno> {
    let (mut patience, mut wait) = (Patience::default(), first);
    loop {
        if flags & libc::O_NONBLOCK != 0 {
            return Err(Errno::EAGAIN);
        }
        match await_coupled(node, &Awaited::File(ino), &mut patience, wait).await {
            Ok(()) => {}
            // The name may be another file's by now: the kernel looks again.
            Err(Errno::ENOENT) => return Err(Errno::ESTALE),
            Err(e) => return Err(e),
        }
        match ask().await {
            Ok(opened) if node.handles.file(opened.fh).is_some_and(|h| h.couple != 0) => {
                return Ok(opened);
            }
            Ok(forgotten) => {
                tracing::error!(%ino, "the service has forgotten that this file is awaited");
                if let Some(handle) = node.handles.remove_file(forgotten.fh) {
                    node.release(&handle).await;
                }
                return Err(Errno::EIO);
            }
            Err(NotOpened::Failed(e)) => return Err(e),
            Err(NotOpened::Awaits(again)) => wait = again,
        }
    }
}

/// The open of an inode that stands for a name: fails when the name is there, so that the kernel looks.
pub async fn open_awaited(node: &Node, ino: Ino) -> Errno {
    let Some((parent, name, wait)) = node.awaited.name(ino) else { return Errno::ESTALE };
    let mut patience = Patience::default();
    match await_coupled(node, &Awaited::Named(parent, name), &mut patience, wait).await {
        Ok(()) => Errno::ESTALE,
        // It never came.
        Err(Errno::ETIMEDOUT) => Errno::ENOENT,
        Err(e) => e,
    }
}

/// Waits until a directory has a file of that name which can be read. ENODATA where none is awaited, EIO when a
/// producer of it died.
pub async fn await_in(node: &Node, dir: Ino, name: Name) -> Result<(), Errno> {
    let wait = match node.look(dir, &name).await? {
        Looked::There(_) => return Ok(()),
        Looked::Missing => return Err(Errno::ENODATA),
        Looked::Awaited(wait) => wait,
    };
    let named = Awaited::Named(dir, name);
    await_coupled(node, &named, &mut Patience::default(), wait).await
}

/// An open says of how many producers, or consumers, it is one.
pub async fn join(node: &Node, open: &OpenFile, of: u32) -> Result<(), Errno> {
    if open.couple == 0 {
        return Err(Errno::ENODATA);
    }
    node.meta.join_coupled(open.file.ino, open.couple, of).await?;
    node.counted.joins(open.couple, of);
    Ok(())
}

/// An open is through with its file, before it is closed: the service counts it when this returns. ESTALE: it
/// does not, as the file is gone or was begun anew.
pub async fn done(node: &Node, open: &OpenFile) -> Result<(), Errno> {
    let (file, couple) = (&open.file, open.couple);
    if couple == 0 {
        return Err(Errno::ENODATA);
    }
    if open.access.is_none_or(|access| access.writes()) {
        node.publish(file).await?;
    }
    node.counted.ends(couple, Left::Through);
    node.meta.done_with_coupled(file.ino, couple).await?;
    node.counted.has_ended(couple);
    open.told.store(true, Relaxed);
    Ok(())
}

/// An open ends so, whatever its close says; the service is told now.
pub async fn gives_up(node: &Node, open: &OpenFile, how: Left) -> Result<(), Errno> {
    if open.couple == 0 {
        return Err(Errno::ENODATA);
    }
    if !open.told.swap(true, Relaxed) {
        leave(node, open.file.ino, open.couple, how).await;
    }
    Ok(())
}

/// The inode that stands for a name which that thread opens to read.
pub async fn await_name(
    node: &Node,
    parent: Ino,
    name: Name,
    wait: Duration,
    thread: u32,
) -> Result<Attr, Errno> {
    match awaited::opens_to_read(thread).await {
        true => Ok(awaited::attr(node.awaited.tell(parent, name, wait))),
        false => Err(Errno::ENOENT),
    }
}

/// An open that counted, or may have, came to nothing.
pub(crate) async fn not_entered(node: &Node, ino: Ino, handle: u64) {
    if handle != 0 {
        leave(node, ino, handle, Left::Withdrawn).await;
    }
}

/// A handle of a coupled file is closed: the service is told when what was written is published.
pub(crate) async fn left_coupled(node: &Node, handle: &OpenFile) {
    let (file, couple) = (&handle.file, handle.couple);
    if couple == 0 || handle.told.load(Relaxed) {
        return;
    }
    let writes = handle.access.is_none_or(|access| access.writes());
    let is_whole = handle.closed_well.load(Relaxed) && !handle.killed.load(Relaxed);
    let how = if is_whole { Left::Through } else { Left::Died };
    if !writes || how == Left::Died || is_published(node, file).await {
        return leave(node, file.ino, couple, how).await;
    }
    let (weak, file) = (node.me_weak(), Arc::clone(file));
    node.runtime.spawn(async move {
        let mut pauses = Pauses::between(TRY_AGAIN, TRY_AGAIN_MOST);
        loop {
            pauses.pause().await;
            let Some(node) = weak.upgrade() else { return };
            if is_published(&node, &file).await {
                return leave(&node, file.ino, couple, how).await;
            }
        }
    });
}

/// What was written is published, also by who has it mapped; or nobody can want it any more.
async fn is_published(node: &Node, file: &Arc<CachedFile>) -> bool {
    let mapped = {
        let _turn = file.turn.lock().await;
        file.is_tracked() && !file.has_no_writers(&node.cache)
    };
    if mapped {
        return false;
    }
    match node.publish(file).await {
        Ok(()) => true,
        Err(e) if is_gone(e) => true,
        Err(e) => {
            tracing::debug!(file = file.label(), error = %e, "not published");
            false
        }
    }
}

/// Tells the service how an open ended, as soon as it can be told.
async fn leave(node: &Node, ino: Ino, handle: u64, how: Left) {
    node.counted.ends(handle, how);
    if node.meta.leave_coupled(ino, handle, how).await.is_ok() {
        return node.counted.has_ended(handle);
    }
    let weak = node.me_weak();
    node.runtime.spawn(async move {
        let mut pauses = Pauses::between(TRY_AGAIN, TRY_AGAIN_MOST);
        loop {
            pauses.pause().await;
            let Some(node) = weak.upgrade() else { return };
            match node.meta.leave_coupled(ino, handle, how).await {
                Ok(()) => return node.counted.has_ended(handle),
                Err(e) => tracing::debug!(%ino, error = %e, "not told that it is closed"),
            }
        }
    });
}

/// Before the node leaves: what was closed counts. Not that it waits for a service that does not answer.
pub(crate) async fn all_left(node: &Node) {
    let end = Instant::now() + LEAVE_WITHIN;
    while !node.counted.all_told() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A coupled file that this node has used is no more.
pub(crate) fn consumed(node: &Node, ino: Ino) {
    let Some(me) = node.me_arc() else { return };
    node.runtime.spawn(async move { me.discard_if_deleted(ino).await });
}

/// Couples the files of an empty directory.
pub(crate) async fn couple(node: &Node, ino: Ino, value: Vec<u8>) -> Result<(), Errno> {
    let text = std::str::from_utf8(&value).map_err(|_| Errno::EINVAL)?;
    if let Err(e) = text.parse::<Terms>() {
        tracing::warn!(%ino, "user.ebb.couple: {e}");
        return Err(Errno::EINVAL);
    }
    node.is_empty_directory(ino).await?;
    node.meta.setxattr(ino, COUPLE, &value, 0).await
}

/// Where a coupled file stands, or how a directory couples its files.
pub(crate) async fn coupling(node: &Node, ino: Ino) -> Result<String, Errno> {
    let text = node.meta.describe(ino).await?.couple;
    if text.is_empty() { Err(Errno::ENODATA) } else { Ok(text) }
}
