//! The nodes as they are now: which stream is theirs, when they were heard last, what they were
//! answered recently. Nothing here is journalled.

use crate::state::State;
use ebb_consistency::StreamId;
use ebb_locks::Mutex;
use ebb_types::{Incarnation, Ino, NodeId};
use ebb_wire::{LEASES_UNTIL_GIVEN_UP, pb};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Answers remembered per node: more than a node has requests in flight.
const REMEMBERED_MAX: usize = 4096;

/// What a stream sends.
#[derive(Debug)]
pub enum Out {
    /// Answers.
    Replies(Vec<pb::Reply>),
    /// Something that was not asked.
    Notice(pb::Notice),
}

/// Who asks: a node in one of its lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Who {
    /// The node.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
}

/// A request that must not be done twice.
#[derive(Debug)]
enum Remembered {
    Running(watch::Receiver<Option<pb::Reply>>),
    Done(Box<pb::Reply>),
}

/// What to do with a request that must not be done twice.
#[derive(Debug)]
pub enum Turnout {
    /// Do it, and tell the sender what was answered.
    Do(watch::Sender<Option<pb::Reply>>),
    /// It is being done; the answer will come here.
    Wait(watch::Receiver<Option<pb::Reply>>),
    /// It was done.
    Done(Box<pb::Reply>),
}

/// The service's end of a stream.
#[derive(Debug)]
pub struct Line {
    /// Its number, also for the leases.
    pub serial: StreamId,
    /// Answers and what must be known soon.
    pub out: mpsc::Sender<Out>,
    /// Recalls: one for each lease that the stream holds, and so bounded as they are.
    pub recalls: mpsc::UnboundedSender<pb::Notice>,
    /// Tells the stream to end.
    pub end: watch::Sender<bool>,
}

#[derive(Debug)]
struct Session {
    incarnation: Incarnation,
    /// The stream, as long as it is open.
    stream: Option<Line>,
    /// It has had a stream of this service.
    was_here: bool,
    heard: Instant,
    dirty_bytes: Option<u64>,
    alive: bool,
    expired: bool,
    remembered: HashMap<u64, Remembered>,
    order: VecDeque<u64>,
    /// Where this node's materialising goes on.
    pass: Pass,
    /// The last ping, and the last one that was answered.
    pinged: u64,
    answered: u64,
}

/// A ping of one node, on one of its streams.
#[derive(Clone, Copy, Debug)]
pub struct Pinged {
    on: StreamId,
    number: u64,
}

/// How far a node's materialising has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    /// Everything else is done, the times of directories come now.
    pub directories: bool,
    /// The last inode that was dealt with.
    pub after: Option<Ino>,
}

fn ping(number: u64) -> Out {
    Out::Notice(pb::Notice { what: Some(pb::notice::What::Ping(pb::Ping { number })) })
}

/// All sessions.
#[derive(Debug)]
pub struct Sessions {
    inner: Mutex<BTreeMap<NodeId, Session>>,
}

impl Session {
    fn new(incarnation: Incarnation) -> Session {
        Session {
            incarnation,
            stream: None,
            was_here: false,
            heard: Instant::now(),
            dirty_bytes: None,
            alive: true,
            expired: false,
            remembered: HashMap::new(),
            order: VecDeque::new(),
            pass: Pass::default(),
            pinged: 0,
            answered: 0,
        }
    }

    fn is_gone(&self) -> bool {
        !self.alive || (self.was_here && self.stream.is_none())
    }

    fn forget(&mut self, id: u64) {
        if self.remembered.remove(&id).is_some()
            && let Some(at) = self.order.iter().rposition(|other| *other == id)
        {
            self.order.remove(at);
        }
    }
}

impl Sessions {
    /// The nodes of the journal, each with a whole lease to come back.
    pub fn new(state: &State) -> Sessions {
        let inner = state.nodes.values().map(|n| (n.id, Session::new(n.incarnation))).collect();
        Sessions { inner: Mutex::new(inner) }
    }

    /// True when another life of this node is there and well.
    pub fn is_taken(&self, who: Who, lease: Duration) -> bool {
        self.inner.lock().get(&who.node).is_some_and(|s| {
            let open = s.stream.as_ref().is_some_and(|line| !line.out.is_closed());
            s.incarnation != who.incarnation && open && s.heard.elapsed() < lease
        })
    }

    /// A stream becomes the node's; an older one is told so and ended. `heir`: what was answered
    /// before still counts.
    pub fn attach(&self, who: Who, line: Line, heir: bool) {
        let mut inner = self.inner.lock();
        let session = inner.entry(who.node).or_insert_with(|| Session::new(who.incarnation));
        let takeover = session.incarnation != who.incarnation;
        if let Some(Line { out: old, end, .. }) = session.stream.take() {
            if takeover {
                let reason = "another daemon took this node's name".to_owned();
                let what = Some(pb::notice::What::Fenced(pb::Fenced { reason }));
                // A stream that does not read its notices finds out when it is closed.
                let _ = old.try_send(Out::Notice(pb::Notice { what }));
            }
            end.send_replace(true);
        }
        match (takeover, heir) {
            (true, false) => *session = Session::new(who.incarnation),
            (true, true) => session.incarnation = who.incarnation,
            (false, _) => {}
        }
        session.expired = false;
        session.stream = Some(line);
        session.was_here = true;
        session.heard = Instant::now();
        session.alive = true;
    }

    /// The stream that is a node's now.
    pub fn stream_of(&self, node: NodeId) -> Option<(Who, StreamId)> {
        let inner = self.inner.lock();
        let session = inner.get(&node)?;
        let serial = session.stream.as_ref()?.serial;
        Some((Who { node, incarnation: session.incarnation }, serial))
    }

    /// Sends a recall, if this is still the node's stream. What is recalled from an older one ends
    /// with its time, or with the first word on the new one.
    pub fn notify(&self, node: NodeId, serial: StreamId, recall: pb::Notice) {
        let inner = self.inner.lock();
        let line = inner.get(&node).and_then(|s| s.stream.as_ref());
        if let Some(line) = line.filter(|l| l.serial == serial) {
            // The stream may be ending.
            let _ = line.recalls.send(recall);
        }
    }

    /// Asks every node for a sign of life, whose answer tells it what has changed. A stream that is full
    /// gives one in its own time.
    pub fn ping_all(&self) {
        let inner = self.inner.lock();
        for line in inner.values().filter_map(|s| s.stream.as_ref()) {
            let _ = line.out.try_send(ping(0));
        }
    }

    /// True when a node has answered a ping, or is gone. It is asked once on each stream.
    pub fn answered_or_gone(&self, node: NodeId, pinged: &mut Option<Pinged>) -> bool {
        let mut inner = self.inner.lock();
        let Some(session) = inner.get_mut(&node).filter(|s| !s.is_gone()) else { return true };
        let Some(line) = &session.stream else { return false };
        match *pinged {
            Some(Pinged { on, number }) if on == line.serial => session.answered >= number,
            _ => {
                let number = session.pinged + 1;
                // A stream that is full is asked later.
                if line.out.try_send(ping(number)).is_ok() {
                    session.pinged = number;
                    *pinged = Some(Pinged { on: line.serial, number });
                }
                false
            }
        }
    }

    /// A node answers a ping.
    pub fn ping_answered(&self, node: NodeId, number: u64) {
        if let Some(session) = self.inner.lock().get_mut(&node) {
            session.answered = session.answered.max(number);
        }
    }

    /// Ends a stream of a node; it comes back with another one.
    pub fn end(&self, node: NodeId, serial: StreamId) {
        if let Some(session) = self.inner.lock().get_mut(&node)
            && let Some(line) = session.stream.take_if(|l| l.serial == serial)
        {
            line.end.send_replace(true);
        }
    }

    /// A stream ended. The node may come back within its lease.
    pub fn detach(&self, node: NodeId, serial: StreamId) {
        if let Some(session) = self.inner.lock().get_mut(&node)
            && session.stream.as_ref().is_some_and(|l| l.serial == serial)
        {
            session.stream = None;
        }
    }

    /// The service ends: so do all streams.
    pub fn end_all(&self) {
        for session in self.inner.lock().values_mut() {
            if let Some(line) = session.stream.take() {
                line.end.send_replace(true);
            }
        }
    }

    /// A sign of life.
    pub fn heard(&self, node: NodeId, dirty_bytes: Option<u64>) {
        if let Some(session) = self.inner.lock().get_mut(&node) {
            session.heard = Instant::now();
            session.alive = true;
            session.dirty_bytes = dirty_bytes.or(session.dirty_bytes);
        }
    }

    /// The node is gone for good; its stream ends after what is queued.
    pub fn remove(&self, node: NodeId) {
        self.inner.lock().remove(&node);
    }

    /// Nodes whose lease ended since the last call, and nodes whose locks and opens go now.
    pub fn overdue(&self, lease: Duration) -> (Vec<NodeId>, Vec<NodeId>) {
        let (mut silent, mut lost) = (Vec::new(), Vec::new());
        for (node, session) in self.inner.lock().iter_mut() {
            let silence = session.heard.elapsed();
            if silence > lease && session.alive {
                session.alive = false;
                silent.push(*node);
            }
            if silence > lease * LEASES_UNTIL_GIVEN_UP && !session.expired {
                session.expired = true;
                lost.push(*node);
                // What it has on the way must not be done: it comes back and is told first.
                if let Some(line) = session.stream.take() {
                    line.end.send_replace(true);
                }
            }
        }
        (silent, lost)
    }

    /// True while its stream is open and within its lease.
    pub fn is_connected(&self, node: NodeId) -> bool {
        let inner = self.inner.lock();
        let session = inner.get(&node).filter(|s| s.alive);
        session.is_some_and(|s| s.stream.as_ref().is_some_and(|line| !line.out.is_closed()))
    }

    /// True when it has gone without a word: its stream is broken, or its lease is over. A node that has
    /// not come back yet to a service that has just begun is not gone.
    pub fn is_gone(&self, node: NodeId) -> bool {
        self.inner.lock().get(&node).is_none_or(Session::is_gone)
    }

    /// True within the lease; and what the node has said it has to flush, if it has.
    pub fn is_alive(&self, node: NodeId) -> (bool, Option<u64>) {
        self.inner.lock().get(&node).map_or((false, None), |s| (s.alive, s.dirty_bytes))
    }

    /// Has this request been done before?
    pub fn once(&self, who: Who, id: u64) -> Option<Turnout> {
        let mut inner = self.inner.lock();
        let session = inner.get_mut(&who.node).filter(|s| s.incarnation == who.incarnation)?;
        match session.remembered.get(&id) {
            Some(Remembered::Done(reply)) => return Some(Turnout::Done(reply.clone())),
            Some(Remembered::Running(wait)) => return Some(Turnout::Wait(wait.clone())),
            None => {}
        }
        let (tell, told) = watch::channel(None);
        session.remembered.insert(id, Remembered::Running(told));
        session.order.push_back(id);
        while session.order.len() > REMEMBERED_MAX {
            let oldest = session.order.pop_front().unwrap_or_default();
            session.remembered.remove(&oldest);
        }
        Some(Turnout::Do(tell))
    }

    /// The answer of a request that must not be done twice. What was not done can be: a node asks
    /// once more under the same number, so that its next daemon is told of what was done then.
    pub fn remember(&self, who: Who, reply: &pb::Reply) {
        let mut inner = self.inner.lock();
        let Some(session) = inner.get_mut(&who.node) else { return };
        if session.incarnation != who.incarnation {
            return;
        }
        if reply.errno != 0 || ebb_wire::sends_on(reply.body.as_ref()) {
            session.forget(reply.id);
        } else if let Some(slot) = session.remembered.get_mut(&reply.id) {
            *slot = Remembered::Done(Box::new(reply.clone()));
        }
    }

    /// Where this node's materialising goes on.
    pub fn pass(&self, node: NodeId) -> Pass {
        self.inner.lock().get(&node).map(|s| s.pass).unwrap_or_default()
    }

    /// See [`Sessions::pass`].
    pub fn set_pass(&self, node: NodeId, pass: Pass) {
        if let Some(session) = self.inner.lock().get_mut(&node) {
            session.pass = pass;
        }
    }
}
