//! Leases at work: who asks while the state changes, whom a change calls back, and the wait for
//! it. The rules are in [`ebb_consistency::lease`].
//!
//! A change is in the state (and in the journal's queue) before anybody is called back; what waits
//! is only the answer to whoever changed it, and the answers that tell others of it: nobody hears
//! of a change while a third node still trusts what was before.

use crate::core::Core;
use crate::ops::OpResult;
use crate::sessions::Who;
use crate::state::{Entry, FileOp, State};
use ebb_consistency::{LeaseSeq, Leases, Party, Recall, StreamId};
use ebb_namespace::{Home, Record};
use ebb_types::{FileKind, Ino, NodeId};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Notify;

tokio::task_local! {
    /// The operation that changes the state in this task.
    static ASKING: Asking;
}

/// Milliseconds that pass also while the machine sleeps.
pub fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

/// The leases of a service.
#[derive(Debug)]
pub struct Desk {
    leases: Mutex<Leases>,
    /// Something was returned, or ended.
    returned: Notify,
    recalls: AtomicU64,
    /// The last number when the desk was last looked over, and when that was.
    looked: Mutex<(LeaseSeq, u64)>,
}

/// An operation, as far as the leases that it ends are concerned.
pub struct Asking {
    /// Who knows what is changed, because the answer tells it.
    knows: Option<Party>,
    changed: RefCell<Vec<Ino>>,
}

/// What an answer must wait for.
#[derive(Debug, Default)]
pub struct Owed {
    inos: Vec<Ino>,
    upto: LeaseSeq,
}

impl Desk {
    /// A desk that grants leases of `duration`; `before` may hold some of an earlier service.
    pub fn new(duration: Duration, before: &[NodeId]) -> Desk {
        let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 4);
        let now = now_ms();
        Desk {
            leases: Mutex::new(Leases::new(ms, before, now)),
            returned: Notify::new(),
            recalls: AtomicU64::new(0),
            looked: Mutex::new((LeaseSeq(0), now)),
        }
    }

    /// Leases held now, and recalls so far.
    pub fn counts(&self) -> (u64, u64) {
        (self.leases.lock().counts().0 as u64, self.recalls.load(Relaxed))
    }

    /// A stream was welcomed whose node wants leases of at most `ms`; how long they are.
    pub fn join(&self, who: Who, ms: u32) -> (StreamId, u32) {
        let (stream, ms) = self.leases.lock().join(party(who), u64::from(ms), now_ms());
        // No longer than what was asked for.
        (stream, u32::try_from(ms).unwrap_or(u32::MAX))
    }

    /// A node goes on in another life, its daemon is dead: nobody waits for what that held.
    pub fn succeeded(&self, who: Who) {
        self.leases.lock().succeeded(party(who));
        self.returned.notify_waiters();
    }

    /// A frame came on a stream.
    pub fn heard(&self, stream: StreamId) {
        let mut leases = self.leases.lock();
        let owing = leases.owing();
        leases.heard(stream, now_ms());
        let fewer = leases.owing() < owing;
        drop(leases);
        if fewer {
            self.returned.notify_waiters();
        }
    }

    /// A stream ended.
    pub fn left(&self, stream: StreamId) {
        self.leases.lock().left(stream);
    }

    /// A node said goodbye: it trusts nothing any more.
    pub fn forget(&self, stream: StreamId) {
        self.leases.lock().forget(stream);
        self.returned.notify_waiters();
    }

    /// What the node held of a file is void.
    pub fn returned(&self, stream: StreamId, op: &pb::Returned) {
        self.leases.lock().returned(stream, Ino(op.ino), LeaseSeq(op.seq));
        self.returned.notify_waiters();
    }

    /// Waits until nobody trusts any more what was before.
    pub async fn settled(&self, owed: &Owed) {
        loop {
            let returned = self.returned.notified();
            let now = now_ms();
            let Some(until) = self.until(owed, now) else { return };
            let wait = Duration::from_millis(until.saturating_sub(now) + 1);
            // In either case it is looked again.
            let _ = tokio::time::timeout(wait, returned).await;
        }
    }

    fn until(&self, owed: &Owed, now: u64) -> Option<u64> {
        let leases = self.leases.lock();
        owed.inos.iter().filter_map(|ino| leases.owed(*ino, owed.upto, now)).max()
    }

    /// Ends what has run out. Returns the streams that must end, because they are heard and do not
    /// return what they owe.
    pub fn look_over(&self) -> Vec<(StreamId, NodeId)> {
        let now = now_ms();
        let mut leases = self.leases.lock();
        leases.sweep(now);
        let mut looked = self.looked.lock();
        if now < looked.1 + 2 * leases.duration() {
            return Vec::new();
        }
        let stubborn = leases.stubborn(looked.0);
        *looked = (leases.last(), now);
        stubborn
    }
}

fn party(who: Who) -> Party {
    Party { node: who.node, life: who.incarnation }
}

impl Asking {
    /// An operation of `who`. Of some the answer tells the node all that is changed.
    pub fn new(who: Who, op: &Op) -> Asking {
        let told = matches!(op, Op::Attach(_) | Op::Append(_) | Op::SetAttr(_) | Op::Open(_));
        Asking { knows: told.then(|| party(who)), changed: RefCell::default() }
    }

    /// Runs what is done at once; also which files were changed in a way that concerned others.
    pub fn at_once<T>(self, work: impl FnOnce() -> T) -> (T, Vec<Ino>) {
        ASKING.sync_scope(self, || (work(), changed()))
    }

    /// The same for what takes its time.
    pub async fn later<T>(self, work: impl Future<Output = T>) -> (T, Vec<Ino>) {
        ASKING.scope(self, async { (work.await, changed()) }).await
    }
}

fn changed() -> Vec<Ino> {
    ASKING.with(|asking| asking.changed.take())
}

/// The file whose state an answer tells.
pub fn subject(op: &Op) -> Option<Ino> {
    match op {
        Op::Query(q) => Some(Ino(q.ino)),
        Op::GetAttr(g) => Some(Ino(g.ino)),
        Op::SetAttr(s) => Some(Ino(s.ino)),
        Op::Open(o) => Some(Ino(o.ino)),
        Op::Attach(a) => Some(Ino(a.ino)),
        Op::Append(a) => Some(Ino(a.ino)),
        _ => None,
    }
}

fn told(result: &OpResult) -> Option<Ino> {
    match result {
        Ok(Some(Body::Entry(e))) => e.attr.map(|a| Ino(a.ino)),
        _ => None,
    }
}

fn wants_lease(op: &Op) -> Option<Ino> {
    match op {
        Op::Query(q) if q.lease => Some(Ino(q.ino)),
        Op::GetAttr(g) if g.lease => Some(Ino(g.ino)),
        Op::Open(o) if o.lease => Some(Ino(o.ino)),
        _ => None,
    }
}

/// Puts a grant into the answer that it belongs to.
pub fn put(lease: Option<pb::Lease>, result: &mut OpResult) {
    match result {
        Ok(Some(Body::Map(map))) => map.lease = lease,
        Ok(Some(Body::Entry(entry))) => entry.lease = lease,
        Ok(Some(Body::Opened(opened))) => {
            if let Some(map) = &mut opened.map {
                map.lease = lease;
            }
        }
        _ => {}
    }
}

impl Core {
    /// Grants the lease that an operation asks for. Before the operation looks at the state.
    pub fn grant(&self, stream: StreamId, op: &Op) -> Option<pb::Lease> {
        let ino = wants_lease(op)?;
        let state = self.state();
        let inode = state.ns.get(ino).filter(|i| i.kind == FileKind::Regular)?;
        let version = state.files.get(&ino)?.version().0;
        let compared = inode.home == Home::Own;
        let (seq, too_many) = self.desk.leases.lock().grant(stream, ino)?;
        too_many.into_iter().for_each(|recall| self.send_recall(recall));
        Some(pb::Lease { seq: seq.0, version, compared })
    }

    /// Calls back the leases of what these entries, not yet applied, will change.
    pub fn call_back(&self, state: &State, entries: &[Entry]) {
        if self.desk.leases.lock().is_idle() {
            return;
        }
        for entry in entries {
            let (inos, told) = concerned(state, entry);
            for ino in inos {
                self.call_back_file(ino, told);
            }
        }
    }

    fn call_back_file(&self, ino: Ino, told: bool) {
        let knows = ASKING.try_with(|asking| asking.knows).ok().flatten().filter(|_| told);
        let (recalls, owed) = {
            let mut leases = self.desk.leases.lock();
            let recalls = leases.change(ino, knows);
            (recalls, leases.owed(ino, leases.last(), now_ms()).is_some())
        };
        if owed {
            // Without an operation (housekeeping) nobody waits.
            let _ = ASKING.try_with(|asking| asking.changed.borrow_mut().push(ino));
        }
        recalls.into_iter().for_each(|recall| self.send_recall(recall));
    }

    fn send_recall(&self, recall: Recall) {
        self.desk.recalls.fetch_add(1, Relaxed);
        let what = pb::Recall { ino: recall.ino.0, seq: recall.seq.0 };
        let notice = pb::Notice { what: Some(pb::notice::What::Recall(what)) };
        self.sessions.notify(recall.node, recall.stream, notice);
    }

    /// What the answer to an operation waits for; `None`: nothing.
    pub fn owed(
        &self,
        mut inos: Vec<Ino>,
        subject: Option<Ino>,
        result: &OpResult,
    ) -> Option<Owed> {
        inos.extend(subject.into_iter().chain(told(result)));
        let leases = self.desk.leases.lock();
        let owed = Owed { inos, upto: leases.last() };
        let now = now_ms();
        owed.inos.iter().any(|i| leases.owed(*i, owed.upto, now).is_some()).then_some(owed)
    }
}

/// The files whose map or attributes an entry changes, and whether the answer to the operation
/// tells them.
fn concerned(state: &State, entry: &Entry) -> (Vec<Ino>, bool) {
    match entry {
        Entry::File(ino, op) => match op {
            // Owners stay as they are, or readers find out by asking the owner.
            FileOp::Detach(..) | FileOp::Flushed(..) | FileOp::Changes(_) | FileOp::Guesses(_) => {
                (Vec::new(), true)
            }
            FileOp::State(_)
            | FileOp::Attach(..)
            | FileOp::Claim(..)
            | FileOp::Append(..)
            | FileOp::Truncate(_)
            | FileOp::Adopt(..)
            | FileOp::Lost(_)
            | FileOp::DetachAnew(..) => (vec![*ino], true),
        },
        Entry::Ns(Record::Attr { ino, .. }) => (vec![*ino], true),
        // A file that comes to the backing is one that others can change from then on.
        Entry::Ns(Record::Base { ino, .. } | Record::Home { ino, .. } | Record::Free { ino }) => {
            (vec![*ino], false)
        }
        Entry::Ns(Record::Dentry { parent, name, ino, .. }) => {
            let before = state.ns.dentry(*parent, name).ok().flatten().map(|d| d.ino);
            (before.into_iter().chain([*ino]).collect(), false)
        }
        Entry::Ns(Record::NoDentry { parent, name }) => {
            let before = state.ns.dentry(*parent, name).ok().flatten().map(|d| d.ino);
            (before.into_iter().collect(), false)
        }
        // Bytes that only this node had are nowhere now.
        Entry::NodeLeft(node) => {
            let files = state.files.iter().filter(|(_, f)| f.owners().contains(node));
            (files.map(|(ino, _)| *ino).collect(), false)
        }
        _ => (Vec::new(), false),
    }
}
