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
use ebb_consistency::lease::{Blocking, Ended};
use ebb_consistency::{LeaseSeq, Leases, Party, Recall, StreamId};
use ebb_locks::Mutex;
use ebb_namespace::{Home, Record, Seen};
use ebb_types::{FileKind, Ino, NodeId};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};

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
    pub(crate) leases: Mutex<Leases>,
    /// Who waits until something that is owed has ended, by its number. A leaf, changed under the leases.
    waiting: Mutex<HashMap<LeaseSeq, Vec<oneshot::Sender<()>>>>,
    /// Something was returned, or ended: for the few who wait for what a node tells besides.
    pub(crate) returned: Notify,
    recalls: AtomicU64,
    /// The last number when the desk was last looked over, and when that was.
    looked: Mutex<(LeaseSeq, u64)>,
}

/// An operation, as far as the leases that it ends are concerned.
pub struct Asking {
    stream: StreamId,
    /// Inodes of which the asker believes nothing until it is answered, and then what it is told.
    knows: Vec<Ino>,
    /// What is being changed is what others did on the backing.
    finding: Cell<bool>,
    changed: RefCell<Vec<Ino>>,
}

/// A lease in any case, where leases of a file's map are of use.
const FULL: u32 = 2;

/// What an answer must wait for.
#[derive(Debug, Default)]
pub struct Owed {
    inos: Vec<Ino>,
    upto: LeaseSeq,
    /// What this stream owes is returned only after the answer.
    to: Option<StreamId>,
}

impl Desk {
    /// A desk that grants leases of `duration`; `before` may hold some of an earlier service.
    pub fn new(duration: Duration, before: &[NodeId]) -> Desk {
        let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 4);
        let now = now_ms();
        Desk {
            leases: Mutex::new(Leases::new(ms, before, now)),
            waiting: Mutex::default(),
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
        let ended = self.leases.lock().succeeded(party(who));
        self.wake(ended);
        self.returned.notify_waiters();
    }

    /// A frame came on a stream.
    pub fn heard(&self, stream: StreamId) {
        let ended = self.leases.lock().heard(stream, now_ms());
        if !ended.is_empty() {
            self.wake(ended);
            self.returned.notify_waiters();
        }
    }

    /// A stream ended.
    pub fn left(&self, stream: StreamId) {
        self.leases.lock().left(stream);
    }

    /// A node said goodbye: it trusts nothing any more.
    pub fn forget(&self, stream: StreamId) {
        let ended = self.leases.lock().forget(stream);
        self.wake(ended);
        self.returned.notify_waiters();
    }

    /// What the node held of an inode is void.
    pub fn returned(&self, stream: StreamId, op: &pb::Returned) {
        let ended = self.leases.lock().returned(stream, Ino(op.ino), LeaseSeq(op.seq));
        self.wake(ended);
        self.returned.notify_waiters();
    }

    /// Those who wait for any of this look again; nobody else does.
    fn wake(&self, ended: Ended) {
        if ended.is_empty() {
            return;
        }
        let mut waiting = self.waiting.lock();
        for tell in ended.iter().filter_map(|seq| waiting.remove(seq)).flatten() {
            // Who has looked meanwhile, because its time was over, does not listen.
            let _ = tell.send(());
        }
    }

    /// Waits until nobody trusts any more what was before.
    pub async fn settled(&self, owed: &Owed) {
        while let Some((wait, ended)) = self.next_owed(owed) {
            // In either case it is looked again.
            let _ = tokio::time::timeout(wait, ended).await;
        }
    }

    /// One thing that is to be waited for, and how long at most.
    fn next_owed(&self, owed: &Owed) -> Option<(Duration, oneshot::Receiver<()>)> {
        let now = now_ms();
        let leases = self.leases.lock();
        let next = owed.inos.iter().find_map(|ino| owed.blocking(&leases, *ino, now))?;
        let (tell, ended) = oneshot::channel();
        self.waiting.lock().entry(next.seq).or_default().push(tell);
        Some((Duration::from_millis(next.until.saturating_sub(now) + 1), ended))
    }

    /// Ends what has run out. Returns the streams that must end, because they are heard and do not
    /// return what they owe.
    pub fn look_over(&self) -> Vec<(StreamId, NodeId)> {
        let now = now_ms();
        let mut leases = self.leases.lock();
        self.wake(leases.sweep(now));
        let mut looked = self.looked.lock();
        if now < looked.1 + 2 * leases.duration() {
            return Vec::new();
        }
        let stubborn = leases.stubborn(looked.0);
        *looked = (leases.last(), now);
        stubborn
    }
}

impl Owed {
    fn blocking(&self, leases: &Leases, ino: Ino, now: u64) -> Option<Blocking> {
        leases.blocking(ino, self.upto, self.to, now)
    }
}

fn party(who: Who) -> Party {
    Party { node: who.node, life: who.incarnation }
}

impl Asking {
    /// An operation that came on this stream.
    pub fn new(stream: StreamId, op: &Op) -> Asking {
        let (finding, changed) = Default::default();
        Asking { stream, knows: knows(op), finding, changed }
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

/// Changes that were found on the backing: whoever asks does not know of them.
pub fn finding<T>(work: impl FnOnce() -> T) -> T {
    let set = |to: bool| ASKING.try_with(|asking| asking.finding.replace(to)).unwrap_or(false);
    let before = set(true);
    let done = work();
    set(before);
    done
}

fn inos<const N: usize>(list: [u64; N]) -> Vec<Ino> {
    list.into_iter().filter(|ino| *ino != 0).map(Ino).collect()
}

fn knows(op: &Op) -> Vec<Ino> {
    match op {
        Op::Attach(a) => inos([a.ino]),
        Op::Append(a) => inos([a.ino]),
        Op::SetAttr(s) => inos([s.ino]),
        Op::Open(o) => inos([o.ino]),
        // Nobody looks at what nobody has open.
        Op::Release(r) => inos([r.ino]),
        Op::Make(m) if m.lease > 0 => inos([m.parent]),
        Op::Unlink(u) if u.lease > 0 => inos([u.parent, u.ino]),
        Op::Rename(r) if r.lease > 0 => inos([r.parent, r.new_parent, r.ino, r.new_ino]),
        Op::Link(l) if l.lease > 0 => inos([l.ino, l.new_parent]),
        _ => Vec::new(),
    }
}

/// The inodes whose state an answer tells, also when it is an error.
pub fn subjects(op: &Op) -> Vec<Ino> {
    match op {
        Op::Query(q) => inos([q.ino]),
        Op::GetAttr(g) => inos([g.ino]),
        Op::SetAttr(s) => inos([s.ino]),
        Op::Open(o) => inos([o.ino]),
        Op::Attach(a) => inos([a.ino]),
        Op::Append(a) => inos([a.ino]),
        Op::Lookup(l) => inos([l.parent]),
        Op::ReadDir(r) => inos([r.ino]),
        Op::Make(m) => inos([m.parent]),
        Op::Unlink(u) => inos([u.parent]),
        Op::Rename(r) => inos([r.parent, r.new_parent]),
        Op::Link(l) => inos([l.ino, l.new_parent]),
        _ => Vec::new(),
    }
}

pub fn told(result: &OpResult) -> Vec<Ino> {
    let ino = |attr: &pb::Attr| Ino(attr.ino);
    match result {
        Ok(Some(Body::Entry(e))) => e.attr.iter().map(ino).collect(),
        Ok(Some(Body::Opened(o))) => o.attr.iter().map(ino).collect(),
        Ok(Some(Body::DirPage(p))) => {
            p.items.iter().filter_map(|i| i.attr.as_ref().map(ino)).collect()
        }
        _ => Vec::new(),
    }
}

fn wish(op: &Op) -> Option<(Ino, u32)> {
    let (ino, wish) = match op {
        Op::Query(q) => (q.ino, q.lease),
        Op::GetAttr(g) => (g.ino, g.lease),
        Op::Open(o) => (o.ino, o.lease),
        Op::ReadDir(r) => (r.ino, r.lease),
        _ => return None,
    };
    (wish > 0).then_some((Ino(ino), wish))
}

/// An answer that is given again: what was granted with it belongs to the stream of the first time,
/// and what it told may have changed since.
pub fn without_leases(mut answer: pb::Reply) -> pb::Reply {
    match &mut answer.body {
        Some(Body::Map(map)) => map.lease = None,
        Some(Body::Entry(e)) => (e.lease, e.dir, e.new_dir) = (None, None, None),
        Some(Body::DirPage(page)) => page.lease = None,
        Some(Body::Attached(attached)) => attached.lease = None,
        Some(Body::Opened(opened)) => {
            opened.dir = None;
            if let Some(map) = &mut opened.map {
                map.lease = None;
            }
        }
        _ => {}
    }
    answer
}

/// Puts a grant into the answer that it belongs to.
pub fn put(lease: Option<pb::Lease>, result: &mut OpResult) {
    if lease.is_none() {
        return;
    }
    match result {
        Ok(Some(Body::Map(map))) => map.lease = lease,
        Ok(Some(Body::Entry(entry))) => entry.lease = lease,
        Ok(Some(Body::DirPage(page))) => page.lease = lease,
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
    pub fn grant(&self, who: Who, stream: StreamId, op: &Op) -> Option<pb::Lease> {
        let (ino, wish) = wish(op)?;
        self.lend(&self.state(), who.node, stream, ino, wish)
    }

    /// Grants a lease of what is told from this state, with a number of now.
    pub fn lend(
        &self,
        state: &State,
        node: NodeId,
        stream: StreamId,
        ino: Ino,
        wish: u32,
    ) -> Option<pb::Lease> {
        if wish == 0 {
            return None;
        }
        let inode = state.ns.get(ino)?;
        if inode.is_dir() && crate::ops::awaits_names_in(state, ino) > 0 {
            // Who asks for a name that is missing there may have to wait for it.
            return None;
        }
        if state.untold_writer(ino).is_some_and(|writer| writer != node) {
            return None;
        }
        let version = state.files.get(&ino).map_or(0, |f| f.version().0);
        let compared = inode.home == Home::Own;
        let (seq, too_many) = if inode.kind == FileKind::Regular && wish >= FULL {
            self.desk.leases.lock().grant(stream, ino)?
        } else if state.ns.is_open_by_others(ino, node) {
            // Where several write, each of them would be called back for every write of the others.
            return None;
        } else {
            self.desk.leases.lock().grant_lightly(stream, ino, now_ms())?
        };
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
                self.call_back_inode(ino, told);
            }
        }
    }

    fn call_back_inode(&self, ino: Ino, told: bool) {
        let knows = |a: &Asking| told && !a.finding.get() && a.knows.contains(&ino);
        // What others did on the backing is nobody's change here.
        let by = |a: &Asking| (!a.finding.get()).then_some(a.stream);
        let (by, knows) = ASKING.try_with(|a| (by(a), knows(a))).unwrap_or_default();
        let now = now_ms();
        let (recalls, owed) = {
            let mut leases = self.desk.leases.lock();
            let recalls = leases.change(ino, by, knows, now);
            (recalls, leases.owed(ino, leases.last(), now))
        };
        if owed {
            // Without an operation (housekeeping) nobody waits.
            let _ = ASKING.try_with(|asking| asking.changed.borrow_mut().push(ino));
        }
        recalls.into_iter().for_each(|recall| self.send_recall(recall));
    }

    pub(crate) fn send_recall(&self, recall: Recall) {
        self.desk.recalls.fetch_add(1, Relaxed);
        let what = pb::Recall { ino: recall.ino.0, seq: recall.seq.0 };
        let notice = pb::Notice { what: Some(pb::notice::What::Recall(what)) };
        self.sessions.notify(recall.node, recall.stream, notice);
    }

    /// What the answer to an operation waits for; `None`: nothing. `first`: its stream can return what it
    /// owes only after that.
    pub fn owed(
        &self,
        (by, first): (StreamId, bool),
        mut inos: Vec<Ino>,
        subjects: &[Ino],
        result: &OpResult,
    ) -> Option<Owed> {
        let leases = self.desk.leases.lock();
        if leases.owing() == 0 {
            return None;
        }
        inos.extend_from_slice(subjects);
        inos.extend(told(result));
        let to = (first || leases.believes_nothing(by)).then_some(by);
        let owed = Owed { inos, upto: leases.last(), to };
        let now = now_ms();
        let is_owed = owed.inos.iter().any(|ino| owed.blocking(&leases, *ino, now).is_some());
        is_owed.then_some(owed)
    }
}

/// The inodes of which an entry changes what leases cover, and whether the answer to the operation
/// tells whoever says so.
fn concerned(state: &State, entry: &Entry) -> (Vec<Ino>, bool) {
    match entry {
        Entry::File(ino, op) => match op {
            // Owners stay as they are, or readers find out by asking the owner.
            FileOp::Detach(..)
            | FileOp::Flushed(..)
            | FileOp::Changes(_)
            | FileOp::Guesses(_)
            | FileOp::Leap(_) => (Vec::new(), true),
            FileOp::Quiet(_, None) | FileOp::QuietState(_) => (Vec::new(), true),
            // Whoever may write quietly must be the only one who believes anything.
            FileOp::Quiet(_, Some(_)) => (vec![*ino], true),
            FileOp::Seat(seat) => (if seat.asked { vec![*ino] } else { Vec::new() }, true),
            FileOp::NoSeat(..) => (Vec::new(), true),
            FileOp::Lapse | FileOp::Lose(_) | FileOp::TakeBack(_) => (vec![*ino], true),
            FileOp::State(_)
            | FileOp::Attach(..)
            | FileOp::Claim(..)
            | FileOp::Append(..)
            | FileOp::Truncate(_)
            | FileOp::Grow(_)
            | FileOp::Adopt(..)
            | FileOp::Lost(_)
            | FileOp::UndoAppend(..)
            | FileOp::Reassert(..)
            | FileOp::DetachAnew(..) => (vec![*ino], true),
        },
        Entry::Ns(Record::Attr { ino, .. } | Record::Free { ino }) => (vec![*ino], true),
        // From now on nobody may believe that a name is missing there.
        Entry::Couples(ino, _) => (vec![*ino], false),
        // What comes to the backing is something that others can change from then on.
        Entry::Ns(Record::Home { ino, home }) => (vec![*ino], *home != Home::Own),
        Entry::Ns(Record::Base { ino, .. }) => (vec![*ino], false),
        Entry::Ns(Record::Seen { ino, seen }) if looks_different(state, *ino, seen.as_ref()) => {
            (vec![*ino], true)
        }
        Entry::Ns(Record::Dentry { parent, name, ino, .. }) => {
            let before = state.ns.dentry(*parent, name).ok().flatten().map(|d| d.ino);
            (before.into_iter().chain([*ino, *parent]).collect(), true)
        }
        Entry::Ns(Record::NoDentry { parent, name }) => {
            let before = state.ns.dentry(*parent, name).ok().flatten().map(|d| d.ino);
            (before.into_iter().chain([*parent]).collect(), true)
        }
        Entry::Ns(Record::Covers { key, .. }) => {
            (state.ns.by_key(*key).into_iter().collect(), false)
        }
        // Bytes that only this node had are nowhere now.
        Entry::NodeLeft(node) => {
            let files = state.files_of(*node).filter(|(_, f)| f.is_owned_by(*node));
            (files.map(|(ino, _)| ino).collect(), false)
        }
        _ => (Vec::new(), false),
    }
}

/// Of the object on the backing, `stat` shows the number of names and a directory's size.
fn looks_different(state: &State, ino: Ino, seen: Option<&Seen>) -> bool {
    let shown = |s: &Seen| (s.nlink, s.size);
    let Some(inode) = state.ns.get(ino) else { return false };
    let (old, new) = (inode.seen.as_ref().map(shown), seen.map(shown));
    if inode.is_dir() { old != new } else { old.map(|o| o.0) != new.map(|n| n.0) }
}
