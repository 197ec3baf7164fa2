//! The operations of the stream. `fast` answers what needs neither the backing nor waiting,
//! right where the request was read; `slow` does the rest in a task of its own.

mod attrs;
mod bytes;
pub(crate) mod copies;
mod coupling;
mod describe;
mod dirs;
mod flush;
pub(crate) mod locking;
mod materialize;
mod names;
mod nodes;
mod reassert;
mod xattrs;

pub(crate) use coupling::{awaits_names_in, terms_from};
pub(crate) use names::keeps_bytes;

use crate::core::{Core, LockResult};
use crate::publishing::LockCall;
use crate::sessions::Who;
use crate::state::{Entry, Outcome, State};
use ebb_consistency::StreamId;
use ebb_types::{ByteRange, Errno, Ino, Name};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Why an operation failed; `text` where the errno alone does not explain it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpError {
    /// What the application sees.
    pub errno: Errno,
    /// For people.
    pub text: String,
}

impl From<Errno> for OpError {
    fn from(errno: Errno) -> OpError {
        OpError { errno, text: String::new() }
    }
}

impl OpError {
    pub(crate) fn new(errno: Errno, text: impl Into<String>) -> OpError {
        OpError { errno, text: text.into() }
    }
}

/// How an operation ends.
pub type OpResult = Result<Option<Body>, OpError>;

/// What became of a request at once.
// It is taken apart as soon as it is there.
#[allow(clippy::large_enum_variant)]
pub enum Fast {
    /// Answered.
    Done(OpResult),
    /// A lock request that waits, and after which others may have to publish.
    Lock(oneshot::Receiver<LockResult>, Option<LockCall>),
    /// Needs the backing, or patience.
    Slow(Op),
}

/// One operation on its way.
#[derive(Clone)]
pub struct Call {
    pub(crate) core: Arc<Core>,
    pub(crate) who: Who,
    pub(crate) stream: StreamId,
    pub(crate) id: u64,
    /// Nobody is asked at whose node a file sits.
    pub(crate) beside_seats: bool,
}

/// More ranges than this in one request are not a file but an attack.
const RANGES_MAX: usize = 1 << 20;

/// Largest offset that a file has.
const OFFSET_MAX: u64 = i64::MAX as u64;

impl Call {
    /// Operations that must not be done twice when they are sent again.
    pub fn is_once(op: &Op) -> bool {
        match op {
            Op::Make(_) | Op::Unlink(_) | Op::Rename(_) | Op::Link(_) | Op::Append(_) => true,
            Op::RemoveXattr(_) | Op::FlushBegin(_) | Op::FlushEnd(_) | Op::SetLock(_) => true,
            Op::Pair(_) | Op::Adopt(_) => true,
            Op::SetXattr(x) => x.flags != 0,
            Op::Leave(l) => l.asks,
            _ => false,
        }
    }

    /// Does it at once, if that is possible.
    pub fn fast(&self, op: Op) -> Fast {
        if let Err(e) = self.check_life() {
            return Fast::Done(Err(e));
        }
        let done = match &op {
            Op::Heartbeat(h) => {
                self.core.sessions.heard(self.who.node, Some(h.dirty_bytes));
                self.core.heard_welcome(self.who.node, self.stream);
                self.core.ping_answered(self.who.node, h.answers);
                Some(Ok(None))
            }
            Op::Returned(r) => {
                self.core.quiet_returned(self.who.node, self.stream, r);
                self.core.desk.returned(self.stream, r);
                Some(Ok(None))
            }
            Op::Published(p) if p.seat == 0 => Some(self.core.published_for_lock(self.who.node, p)),
            Op::Published(p) => Some(self.core.seat_published(self.who.node, p)),
            Op::NodeInfo(n) => Some(self.node_info(n)),
            Op::Lookup(l) => self.lookup_fast(l),
            Op::GetAttr(g) => self.get_attr_fast(g),
            Op::Make(m) => self.make_fast(m),
            Op::Unlink(u) => self.unlink_fast(u),
            Op::ReadLink(r) => Some(self.read_link(r)),
            Op::GetXattr(x) => self.get_xattr_fast(x),
            Op::Access(a) => Some(self.access(a)),
            Op::Describe(d) => Some(self.describe(d)),
            Op::Exists(e) => Some(self.exists(e)),
            Op::SetXattr(x) if describe::is_model(&x.name) => {
                Some(self.choose_model(Ino(x.ino), Some(&x.value)))
            }
            Op::RemoveXattr(x) if describe::is_model(&x.name) => {
                Some(self.choose_model(Ino(x.ino), None))
            }
            Op::SetXattr(x) if coupling::is_couple(&x.name) => {
                Some(coupling::couple(self, Ino(x.ino), Some(&x.value)))
            }
            Op::RemoveXattr(x) if coupling::is_couple(&x.name) => {
                Some(coupling::couple(self, Ino(x.ino), None))
            }
            Op::Open(o) => self.open_fast(o),
            Op::Release(r) => Some(self.release(r)),
            Op::Query(q) => Some(self.query(q)),
            Op::Attach(a) if !a.durable => Some(self.attach(a)),
            Op::Append(a) => Some(self.append(a)),
            Op::Detach(d) => Some(self.detach(d)),
            Op::Share(s) => Some(self.share(s)),
            Op::Pair(p) => Some(self.pair(p)),
            Op::Copies(c) => Some(self.copies(c)),
            Op::Adopt(a) => Some(self.adopt(a)),
            Op::SetLock(l) => return self.set_lock(l),
            Op::GetLock(l) => Some(self.get_lock(l)),
            Op::ReleaseLocks(l) => Some(self.release_locks(l)),
            Op::Cancel(c) => Some(self.cancel(c)),
            Op::Await(a) => return coupling::await_coupled(self, a),
            Op::Leave(l) => Some(coupling::leave(self, l)),
            Op::Join(j) => Some(coupling::join(self, j)),
            Op::Hello(_) | Op::Prove(_) => {
                Some(Err(OpError::new(Errno::EPROTO, "the handshake is over")))
            }
            _ => None,
        };
        done.map_or(Fast::Slow(op), Fast::Done)
    }

    /// Does it, waiting as long as it takes.
    pub async fn slow(&self, op: Op) -> OpResult {
        match &op {
            Op::Lookup(l) => self.lookup(l).await,
            Op::GetAttr(g) => self.get_attr(g).await,
            Op::SetAttr(s) => self.set_attr(s).await,
            Op::Make(m) => self.make(m).await,
            Op::Unlink(u) => self.unlink(u).await,
            Op::Rename(r) => self.rename(r).await,
            Op::Link(l) => self.link(l).await,
            Op::ReadDir(r) => self.read_dir(r).await,
            Op::GetXattr(x) => self.get_xattr(x).await,
            Op::SetXattr(x) => self.set_xattr(x).await,
            Op::ListXattr(x) => self.list_xattr(x).await,
            Op::RemoveXattr(x) => self.remove_xattr(x).await,
            Op::StatFs(_) => self.stat_fs().await,
            Op::Open(o) => self.open(o).await,
            Op::Attach(a) => self.attach_durably(a).await,
            Op::FlushBegin(f) => self.flush_begin(f).await,
            Op::FlushEnd(f) => self.flush_end(f).await,
            Op::Materialize(m) => self.materialize(m).await,
            Op::SyncMeta(_) => {
                self.core.journal.synced(self.core.journal.tail()).await?;
                Ok(None)
            }
            Op::Goodbye(_) => self.goodbye().await,
            Op::Reassert(r) => self.reassert(r).await,
            _ => Err(OpError::new(Errno::EPROTO, "not an operation")),
        }
    }

    /// A daemon that was replaced must not change anything any more.
    fn check_life(&self) -> Result<(), OpError> {
        let state = self.core.state();
        match state.nodes.get(&self.who.node) {
            Some(n) if n.incarnation == self.who.incarnation => Ok(()),
            _ => Err(OpError::new(Errno::ESTALE, "this node has left or was replaced")),
        }
    }

    /// What was answered before the service was restarted.
    pub fn answered_before(&self, op: &Op) -> Option<OpResult> {
        let mut state = self.core.state();
        let outcome = state.answered.get(&self.who.node)?.get(self.id)?;
        Some(match outcome {
            Outcome::Plain => Ok(None),
            Outcome::Inode(ino) => match op {
                Op::Make(make) if make.open && state.file(ino).is_ok() => {
                    // It can be on its way out by now; then nobody has it open there.
                    let _ = coupling::produces(self, &mut state, ino, make.handle, false);
                    self.opened(&state, ino, 0)
                }
                _ => entry(&state, ino),
            },
            Outcome::Appended(_, version) if matches!(op, Op::Adopt(_)) => {
                let Op::Adopt(adopt) = op else { return None };
                let ranges = ranges(&adopt.ranges);
                ranges
                    .map_err(OpError::from)
                    .and_then(|ranges| self.adopted(&state, Ino(adopt.ino), &ranges, version))
            }
            Outcome::Appended(size, version) => Ok(Some(Body::Attached(pb::Attached {
                version: version.0,
                size,
                ..Default::default()
            }))),
        })
    }

    fn answered(&self, outcome: Outcome) -> Entry {
        Entry::Answered(self.who.node, self.id, outcome)
    }
}

pub(crate) fn name(bytes: &[u8]) -> Result<Name, Errno> {
    Name::new(bytes)
}

pub(crate) fn entry(state: &State, ino: Ino) -> OpResult {
    let attr = ebb_wire::attr_to_pb(&state.attr(ino)?);
    Ok(Some(Body::Entry(pb::Entry { attr: Some(attr), ..Default::default() })))
}

pub(crate) fn ranges(sent: &[pb::Range]) -> Result<Vec<ByteRange>, Errno> {
    if sent.len() > RANGES_MAX {
        return Err(Errno::E2BIG);
    }
    sent.iter().map(|r| checked(*r)).collect()
}

fn checked(r: pb::Range) -> Result<ByteRange, Errno> {
    let range = ebb_wire::range_from_pb(r)?;
    if range.end() > OFFSET_MAX { Err(Errno::EFBIG) } else { Ok(range) }
}

pub(crate) fn size(len: u64) -> Result<u64, Errno> {
    if len > OFFSET_MAX { Err(Errno::EFBIG) } else { Ok(len) }
}
