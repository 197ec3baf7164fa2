//! Calls about locks. A lock may be waited for without a deadline, so such a call can be
//! cancelled, and nothing stays locked for a caller who has gone.

use crate::client::{Inner, MetaClient};
use crate::coupling::{Awaited, Left};
use crate::exchange::{Answer, Patience};
use crate::names::expect_body;
use crate::ops::UNLOCK;
use ebb_types::{ByteRange, Errno, Ino, NodeId};
use ebb_wire::pb::{self, reply::Body, request::Op};
use ebb_wire::{range_from_pb, range_to_pb};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::oneshot;

/// What to do with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// F_RDLCK: shared.
    Read,
    /// F_WRLCK: exclusive.
    Write,
    /// F_UNLCK.
    Unlock,
}

impl LockKind {
    pub(crate) fn to_wire(self) -> u32 {
        match self {
            LockKind::Read => 0,
            LockKind::Write => 1,
            LockKind::Unlock => UNLOCK,
        }
    }

    fn from_wire(n: u32) -> Result<LockKind, Errno> {
        match n {
            0 => Ok(LockKind::Read),
            1 => Ok(LockKind::Write),
            UNLOCK => Ok(LockKind::Unlock),
            _ => Err(Errno::EPROTO),
        }
    }
}

/// A change of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest {
    /// The file.
    pub ino: Ino,
    /// Whose lock, as the kernel of this node numbers owners.
    pub owner: u64,
    /// The process, for those who ask who holds it.
    pub pid: u32,
    /// Which bytes.
    pub range: ByteRange,
    /// What to do.
    pub kind: LockKind,
    /// flock(2); fcntl(2) otherwise. The two do not see each other.
    pub flock: bool,
    /// Wait until it is granted; otherwise EAGAIN when somebody else holds it.
    pub wait: bool,
    /// What others have written there is published before this is answered.
    pub publish: bool,
}

/// A lock that stands in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// Read or Write.
    pub kind: LockKind,
    /// Its bytes.
    pub range: ByteRange,
    /// The process that holds it, on its node.
    pub pid: u32,
    /// That node.
    pub node: NodeId,
}

/// A change of locks, or a wait for a coupled file, under way. Dropping it before its answer cancels it, and
/// takes the lock away again if it was granted at that moment.
#[must_use = "dropping it cancels the lock"]
pub struct LockCall {
    inner: Arc<Inner>,
    state: CallState,
    op: Op,
}

enum CallState {
    /// It never began.
    Failed(Errno),
    /// Under way.
    Waiting { id: u64, answer: oneshot::Receiver<Answer> },
    /// The caller has the answer.
    Answered,
}

/// Cancels a [`LockCall`], which then ends with EINTR unless it was granted before.
#[derive(Clone)]
pub struct CancelLock {
    inner: Arc<Inner>,
    id: Option<u64>,
}

impl CancelLock {
    /// See [`CancelLock`]. Harmless when the call has ended.
    pub fn cancel(&self) {
        if let Some(id) = self.id {
            self.inner.exchange.cancel(id, self.inner.patience());
        }
    }
}

impl LockCall {
    /// A way to cancel it while it is awaited.
    #[must_use]
    pub fn canceller(&self) -> CancelLock {
        let id = match self.state {
            CallState::Waiting { id, .. } => Some(id),
            CallState::Failed(_) | CallState::Answered => None,
        };
        CancelLock { inner: self.inner.clone(), id }
    }
}

impl Future for LockCall {
    type Output = Result<(), Errno>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Errno>> {
        let result = match &mut self.state {
            CallState::Failed(errno) => Err(*errno),
            CallState::Answered => Err(Errno::EINVAL),
            CallState::Waiting { answer, .. } => match Pin::new(answer).poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(Ok(_))) => Ok(()),
                Poll::Ready(Ok(Err(e))) => Err(e.errno),
                Poll::Ready(Err(_)) => Err(Errno::EIO),
            },
        };
        self.state = CallState::Answered;
        Poll::Ready(result)
    }
}

impl Drop for LockCall {
    fn drop(&mut self) {
        let CallState::Waiting { id, answer } = &mut self.state else { return };
        let id = *id;
        // From here on an answer that comes is undone by the exchange.
        answer.close();
        match answer.try_recv() {
            Ok(Ok(body)) => self.inner.exchange.undo(self.op.clone(), body),
            Ok(Err(_)) => {}
            Err(_) => self.inner.exchange.cancel(id, self.inner.patience()),
        }
    }
}

impl MetaClient {
    /// Waits until a coupled file can be read. EIO: a producer died. As with a lock, nothing but the caller
    /// ends it; dropping it cancels.
    pub fn await_coupled(&self, what: &Awaited) -> LockCall {
        let (ino, parent, name) = match what {
            Awaited::File(ino) => (ino.0, 0, Vec::new()),
            Awaited::Named(parent, name) => (0, parent.0, name.as_bytes().to_vec()),
        };
        self.waiting_call(Op::Await(pb::Await { ino, parent, name }), true)
    }

    /// An open of a coupled file has ended.
    pub async fn leave_coupled(&self, ino: Ino, handle: u64, how: Left) -> Result<(), Errno> {
        let (through, withdraws) = (how == Left::Through, how == Left::Withdrawn);
        let left = pb::Leave { ino: ino.0, handle, through, withdraws, asks: false };
        self.call(Op::Leave(left)).await.map(drop)
    }

    /// An open is through with its file. ESTALE: it does not count, as the file is gone or was begun anew.
    pub async fn done_with_coupled(&self, ino: Ino, handle: u64) -> Result<(), Errno> {
        let (ino, through) = (ino.0, true);
        let left = pb::Leave { ino, handle, through, withdraws: false, asks: true };
        self.call(Op::Leave(left)).await.map(drop)
    }

    /// Who has a coupled file open is one of so many producers, or consumers; 0: of as many as are known.
    /// EEXIST: it has all its producers; EUSERS: all its consumers; the open does not count then.
    pub async fn join_coupled(&self, ino: Ino, handle: u64, of: u32) -> Result<(), Errno> {
        self.call(Op::Join(pb::Join { ino: ino.0, handle, of })).await.map(drop)
    }

    /// Takes, changes or gives back a lock.
    pub fn set_lock(&self, lock: &LockRequest) -> LockCall {
        let op = Op::SetLock(pb::SetLock {
            ino: lock.ino.0,
            owner: lock.owner,
            pid: lock.pid,
            range: Some(range_to_pb(lock.range)),
            r#type: lock.kind.to_wire(),
            flock: lock.flock,
            wait: lock.wait,
            publish: lock.publish,
        });
        self.waiting_call(op, lock.wait && lock.kind != LockKind::Unlock)
    }

    /// A call that may wait for somebody else.
    pub(crate) fn waiting_call(&self, op: Op, waits: bool) -> LockCall {
        let patience = if waits { Patience::Granted } else { self.patience() };
        let state = match self.inner.submit(op.clone(), patience) {
            Ok((id, answer)) => CallState::Waiting { id, answer },
            Err(errno) => CallState::Failed(errno),
        };
        LockCall { inner: self.inner.clone(), state, op }
    }

    /// Who stands in the way of this lock? `None`: nobody.
    pub async fn get_lock(&self, lock: &LockRequest) -> Result<Option<LockHolder>, Errno> {
        let op = Op::GetLock(pb::GetLock {
            ino: lock.ino.0,
            owner: lock.owner,
            range: Some(range_to_pb(lock.range)),
            r#type: lock.kind.to_wire(),
            flock: lock.flock,
        });
        let state = expect_body!(self.call(op).await?, LockState);
        let kind = LockKind::from_wire(state.r#type)?;
        if kind == LockKind::Unlock {
            return Ok(None);
        }
        let range = range_from_pb(state.range.ok_or(Errno::EPROTO)?)?;
        Ok(Some(LockHolder { kind, range, pid: state.pid, node: NodeId(state.node) }))
    }

    /// An owner closed the file: all its locks on it go.
    pub async fn release_locks(&self, ino: Ino, owner: u64, flock: bool) -> Result<(), Errno> {
        let op = Op::ReleaseLocks(pb::ReleaseLocks { ino: ino.0, owner, flock });
        self.call(op).await.map(drop)
    }
}
