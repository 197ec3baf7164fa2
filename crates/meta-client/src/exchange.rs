//! The requests that have no answer yet: who waits for them, what goes into the next frame, and
//! what happens to them when the connection goes. No sockets, no clock, no tasks;
//! one short lock, under which nothing is awaited and nobody is woken.

use crate::client::CallError;
use crate::ops::UNLOCK;
use ebb_locks::Mutex;
use ebb_types::Errno;
use ebb_wire::pb::{self, reply::Body, request::Op};
use std::collections::{HashMap, VecDeque};
use std::task::Waker;
use std::time::Instant;
use tokio::sync::oneshot;

/// Requests of one frame at most, so that the service begins with the first ones while the next
/// frame is on its way.
const FRAME_REQUESTS_MAX: usize = 512;
/// Bytes after which a frame takes no further request.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// What a call gets.
pub(crate) type Answer = Result<Option<Body>, CallError>;

/// How long a request may stay unanswered, and what it is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Until then.
    Until(Instant),
    /// What somebody else holds: as long as the service can be reached.
    Granted,
    /// A heartbeat: until then, and of no use on another connection.
    Connection(Instant),
}

/// What is asked, and how.
#[derive(Clone)]
pub(crate) struct Ask {
    pub op: Op,
    /// Other nodes at which files sit are not asked for it.
    pub beside_seats: bool,
}

impl From<Op> for Ask {
    fn from(op: Op) -> Ask {
        Ask { op, beside_seats: false }
    }
}

struct Pending {
    ask: Ask,
    size: usize,
    patience: Patience,
    /// When it was taken in, among the others.
    order: u64,
    /// Some service may have seen it.
    sent: bool,
    /// A lock that is no longer wanted.
    gone: Gone,
    done: oneshot::Sender<Answer>,
}

/// What becomes of a lock that is granted to a caller who has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    /// The caller is there.
    No,
    /// It is taken away again.
    GivesBack,
    /// Its owner has asked for another lock of the file since. To take this one away could take that one; and
    /// what was granted before is given back before the next one is asked for.
    AskedAgain,
}

impl Pending {
    /// The service may be about to give it the right to flush.
    fn may_be_granted(&self) -> bool {
        self.sent && matches!(self.ask.op, Op::FlushBegin(_))
    }

    /// Its caller waits no longer; the request does, so that what is granted can be given back.
    fn desert(&mut self) -> Pending {
        let done = std::mem::replace(&mut self.done, oneshot::channel().0);
        let patience = std::mem::replace(&mut self.patience, Patience::Granted);
        Pending { ask: self.ask.clone(), done, patience, ..*self }
    }
}

/// Where the stream to the service stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No connection, or one that is not welcome yet: requests wait.
    Down,
    /// The same, and somebody else answers: requests fail with EIO.
    Refused,
    /// Requests flow.
    Up,
    /// For good: every request fails with this.
    Ended(Errno),
}

struct State {
    phase: Phase,
    /// Counts connections; a stream of an older one ends.
    session: u64,
    /// Of the handshake, before everything else.
    first: Option<pb::Request>,
    next_id: u64,
    taken_in: u64,
    pending: HashMap<u64, Pending>,
    /// Ids in the order in which they are to be sent. Bounded by the calls in flight (see
    /// `client::CALLS_MAX`), the locks waited for and one heartbeat.
    queue: VecDeque<u64>,
    /// So many cancelled locks at most have no answer yet; 0: none need be looked for.
    gone: u64,
    waker: Option<Waker>,
}

/// What the stream of a session sends next.
#[derive(Debug, PartialEq)]
pub(crate) enum Next {
    Frame(pb::ClientFrame),
    /// Nothing now; the waker is called when there is.
    Wait,
    /// The session is over.
    End,
}

/// See the head of the file.
pub(crate) struct Exchange {
    state: Mutex<State>,
}

impl Exchange {
    /// `first_id`: no request before had this id or a larger counted one.
    pub fn new(first_id: u64) -> Exchange {
        Exchange {
            state: Mutex::new(State {
                phase: Phase::Down,
                session: 0,
                first: None,
                next_id: first_id,
                taken_in: 0,
                pending: HashMap::new(),
                queue: VecDeque::new(),
                gone: 0,
                waker: None,
            }),
        }
    }

    /// Takes a request in: its id, and where the answer will be.
    pub fn submit(
        &self,
        ask: impl Into<Ask>,
        patience: Patience,
    ) -> Result<(u64, oneshot::Receiver<Answer>), Errno> {
        let ask = ask.into();
        let (done, answer) = oneshot::channel();
        // The id and the frame around it take less than 32 bytes more.
        let size = ask.op.encoded_len() + 32;
        if size > ebb_wire::MESSAGE_BYTES_MAX {
            return Err(Errno::E2BIG);
        }
        let mut state = self.state.lock();
        match state.phase {
            Phase::Ended(errno) => return Err(errno),
            Phase::Refused => return Err(Errno::EIO),
            Phase::Down | Phase::Up => {}
        }
        state.asks_again(&ask.op);
        let made = crate::once::id(&ask.op).filter(|id| !state.pending.contains_key(id));
        let id = made.unwrap_or_else(|| state.take_id());
        state.taken_in += 1;
        let order = state.taken_in;
        state
            .pending
            .insert(id, Pending { ask, size, patience, order, sent: false, gone: Gone::No, done });
        state.queue.push_back(id);
        let waker = if state.phase == Phase::Up { state.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok((id, answer))
    }

    /// A request whose answer nobody waits for.
    pub fn post(&self, op: Op, patience: Patience) {
        // Refused only after the end, when nothing is to be said any more.
        let _ = self.submit(op, patience);
    }

    /// Begins a session: older streams end. Its number, and the id for its Hello.
    pub fn begin(&self) -> (u64, u64) {
        let mut state = self.state.lock();
        let waker = state.down();
        state.session += 1;
        let ids = (state.session, state.take_id());
        drop(state);
        wake(waker);
        ids
    }

    /// Sends `request` of the handshake of `session`.
    pub fn offer(&self, session: u64, request: pb::Request) {
        let mut state = self.state.lock();
        if state.session != session {
            return;
        }
        state.first = Some(request);
        let waker = state.waker.take();
        drop(state);
        wake(waker);
    }

    /// A fresh id for a handshake.
    pub fn handshake_id(&self) -> u64 {
        self.state.lock().take_id()
    }

    /// The session is welcome: everything unanswered goes out again, under its old ids and in
    /// their order. What must not be done twice the service knows by its id, even after a restart:
    /// it journals such answers together with what was done.
    pub fn up(&self, session: u64) {
        let mut state = self.state.lock();
        if state.session != session || !matches!(state.phase, Phase::Down | Phase::Refused) {
            return;
        }
        let mut ids: Vec<(u64, u64)> = state.pending.iter().map(|(i, p)| (p.order, *i)).collect();
        ids.sort_unstable();
        state.queue = ids.into_iter().map(|(_, id)| id).collect();
        state.phase = Phase::Up;
        let waker = state.waker.take();
        drop(state);
        wake(waker);
    }

    /// The connection of the current session is gone.
    pub fn down(&self) {
        let mut state = self.state.lock();
        let waker = state.down();
        let lost = state.take_where(|p| matches!(p.patience, Patience::Connection(_)));
        drop(state);
        wake(waker);
        fail(lost, &CallError::new(Errno::ENOTCONN, ""));
    }

    /// Somebody answers who is not the service: everything fails, until a session is welcome.
    pub fn refuse(&self, text: &str) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Ended(_)) {
            return;
        }
        let waker = state.down();
        state.phase = Phase::Refused;
        state.queue.clear();
        let lost = state.take_where(|_| true);
        drop(state);
        wake(waker);
        fail(lost, &CallError::new(Errno::EIO, text));
    }

    /// For good: everything fails with `errno`, now and later.
    pub fn end(&self, errno: Errno, text: &str) {
        let mut state = self.state.lock();
        let waker = state.down();
        state.phase = Phase::Ended(errno);
        state.session += 1;
        state.queue.clear();
        let lost = state.take_where(|_| true);
        drop(state);
        wake(waker);
        fail(lost, &CallError::new(errno, text));
    }

    /// Fails what should have been answered by `now`, and lock waits when nobody could grant
    /// them since `unreachable_before`. How many. A flush that the service may still grant is waited for
    /// without its caller.
    pub fn expire(&self, now: Instant, waits_too: bool) -> usize {
        let mut state = self.state.lock();
        let mut lost = state.take_where(|p| match p.patience {
            Patience::Until(deadline) => deadline <= now && !p.may_be_granted(),
            Patience::Connection(deadline) => deadline <= now,
            Patience::Granted => waits_too,
        });
        let late = |p: &&mut Pending| matches!(p.patience, Patience::Until(t) if t <= now);
        lost.extend(state.pending.values_mut().filter(late).map(Pending::desert));
        drop(state);
        let count = lost.len();
        fail(
            lost,
            &CallError::new(Errno::ETIMEDOUT, "no answer from the metadata service in time"),
        );
        count
    }

    /// The next frame of `session`.
    pub fn next(&self, session: u64, waker: &Waker) -> Next {
        let mut state = self.state.lock();
        if state.session != session {
            return Next::End;
        }
        if let Some(request) = state.first.take() {
            return Next::Frame(pb::ClientFrame { requests: vec![request] });
        }
        let requests = if state.phase == Phase::Up { state.pack() } else { Vec::new() };
        if requests.is_empty() {
            state.waker = Some(waker.clone());
            return Next::Wait;
        }
        Next::Frame(pb::ClientFrame { requests })
    }

    /// Hands the answers to whoever waits for them. Those of unknown requests (answered before,
    /// timed out) are dropped; how many were.
    pub fn resolve(&self, replies: Vec<pb::Reply>) -> usize {
        let mut unknown = 0;
        let mut known = Vec::with_capacity(replies.len());
        let mut state = self.state.lock();
        for reply in replies {
            match state.pending.remove(&reply.id) {
                Some(pending) => known.push((pending, reply)),
                None => unknown += 1,
            }
        }
        drop(state);
        for (pending, reply) in known {
            let answer = match reply.errno {
                0 => Ok(reply.body),
                n => Err(CallError::answer(checked_errno(n), &reply.text)),
            };
            if let Err(Ok(body)) = pending.done.send(answer)
                && pending.gone != Gone::AskedAgain
            {
                self.undo(pending.ask.op, body);
            }
        }
        unknown
    }

    /// A lock, or the right to flush, that was granted to a caller who has gone would stay for ever.
    pub fn undo(&self, op: Op, body: Option<Body>) {
        match (op, body) {
            (Op::SetLock(mut lock), _) if lock.r#type != UNLOCK => {
                lock.r#type = UNLOCK;
                lock.wait = false;
                self.post(Op::SetLock(lock), Patience::Granted);
            }
            (Op::FlushBegin(begun), Some(Body::FlushGrant(given))) if given.grant != 0 => {
                let (ino, grant) = (begun.ino, given.grant);
                let end = pb::FlushEnd { ino, grant, done: false, shaped: false };
                self.post(Op::FlushEnd(end), Patience::Granted);
            }
            _ => {}
        }
    }

    /// The caller of `id` no longer wants it. One that no service has seen ends here and now.
    pub fn cancel(&self, id: u64, patience: Patience) {
        let mut state = self.state.lock();
        match state.pending.get_mut(&id) {
            None => {}
            Some(pending) if pending.sent => {
                pending.gone = Gone::GivesBack;
                state.gone += 1;
                drop(state);
                self.post(Op::Cancel(pb::Cancel { request: id }), patience);
            }
            Some(_) => {
                let pending = state.pending.remove(&id);
                drop(state);
                fail(pending.into_iter().collect(), &CallError::new(Errno::EINTR, ""));
            }
        }
    }

    /// Requests without an answer.
    pub fn unanswered(&self) -> usize {
        self.state.lock().pending.len()
    }

    /// True while requests flow.
    pub fn is_up(&self) -> bool {
        self.state.lock().phase == Phase::Up
    }
}

impl State {
    /// A lock is asked for: what its owner has cancelled in this file is not taken away any more.
    fn asks_again(&mut self, op: &Op) {
        let Op::SetLock(lock) = op else { return };
        if self.gone == 0 || lock.r#type == UNLOCK {
            return;
        }
        let mut left = 0;
        for pending in self.pending.values_mut().filter(|p| p.gone == Gone::GivesBack) {
            let Op::SetLock(old) = &pending.ask.op else { continue };
            if (old.ino, old.owner, old.flock) == (lock.ino, lock.owner, lock.flock) {
                pending.gone = Gone::AskedAgain;
            } else {
                left += 1;
            }
        }
        self.gone = left;
    }

    fn take_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    #[must_use]
    fn down(&mut self) -> Option<Waker> {
        if self.phase == Phase::Up {
            self.phase = Phase::Down;
        }
        self.first = None;
        self.waker.take()
    }

    /// Requests from the queue that fit into one frame. They stay pending.
    fn pack(&mut self) -> Vec<pb::Request> {
        let mut requests = Vec::new();
        let mut bytes = 0;
        while let Some(id) = self.queue.front()
            && requests.len() < FRAME_REQUESTS_MAX
        {
            // What was cancelled or has timed out is no longer there.
            if let Some(pending) = self.pending.get_mut(id) {
                if bytes > 0 && bytes + pending.size > FRAME_BYTES_MAX {
                    break;
                }
                bytes += pending.size;
                pending.sent = true;
                let Ask { op, beside_seats } = pending.ask.clone();
                requests.push(pb::Request { id: *id, beside_seats, op: Some(op) });
            }
            self.queue.pop_front();
        }
        requests
    }

    fn take_where(&mut self, which: impl Fn(&Pending) -> bool) -> Vec<Pending> {
        self.pending.extract_if(|_, p| which(p)).map(|(_, p)| p).collect()
    }
}

/// An errno from the service: anything that is none becomes EPROTO.
fn checked_errno(n: i32) -> Errno {
    if (1..=4095).contains(&n) { Errno(n) } else { Errno::EPROTO }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn fail(lost: Vec<Pending>, error: &CallError) {
    for pending in lost {
        // Callers that have gone do not listen.
        let _ = pending.done.send(Err(error.clone()));
    }
}

#[cfg(test)]
mod tests;
