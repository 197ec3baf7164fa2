//! Seats of files at nodes: who gets one, what others are answered meanwhile, and how the node is
//! brought to publish before anybody else is told of the file. What a seat is, is in
//! [`ebb_consistency::Seat`].
//!
//! Consistency: an operation that tells another node of a file, or wants to change its bytes,
//! begins only when the seat has published everything that was written before the operation came.
//! A change of bytes by another node is not done here: the answer names the seat.
//! Retries: a seat that is heard on a new stream is asked again there.
//! Completion: the seat answers, or is silent and the operation fails: nobody is told anything
//! that may be old. Names can be looked up and listed all the same.

use crate::core::Core;
use crate::leases::now_ms;
use crate::ops::{Call, OpError, OpResult};
use crate::state::{Entry, FileOp, State};
use ebb_consistency::{Seat, StreamId};
use ebb_locks::Mutex;
use ebb_types::{Errno, Ino, NodeId};
use ebb_wire::pb;
use ebb_wire::pb::request::Op;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A seat that is there has so long to publish: less than the deadline of who waits.
const PATIENCE: Duration = Duration::from_secs(20);

/// It is looked so often whether a seat came back on another stream.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What seats were asked, and have answered.
#[derive(Debug, Default)]
pub struct Seats {
    answers: Mutex<HashMap<Ino, Answers>>,
    numbers: AtomicU64,
}

/// What one seat has answered.
#[derive(Clone, Copy, Debug, Default)]
struct Answers {
    /// The seat's id.
    seat: u64,
    /// The last number that was answered.
    last: u64,
    /// It does not answer any more, which was said.
    silence_told: bool,
}

impl Seats {
    /// The answers of this seat, and of none before it.
    fn with_answers<T>(&self, ino: Ino, seat: u64, then: impl FnOnce(&mut Answers) -> T) -> T {
        let mut all = self.answers.lock();
        let answers = all.entry(ino).or_default();
        if answers.seat != seat {
            *answers = Answers { seat, ..Answers::default() };
        }
        then(answers)
    }

    fn has_answered(&self, asked: &Asked) -> bool {
        let answers = self.answers.lock().get(&asked.ino).copied();
        asked.on.is_some()
            && answers.is_some_and(|a| a.seat == asked.seat.id && a.last >= asked.number)
    }
}

/// One question, as far as it has got.
#[derive(Debug)]
pub struct Asked {
    ino: Ino,
    seat: Seat,
    number: u64,
    on: Option<StreamId>,
    since: Instant,
}

impl Core {
    /// Gives the file its seat at the node that has just opened it, if it wants that and nobody else
    /// uses the file.
    pub fn take_seat(
        &self,
        state: &mut State,
        call: &Call,
        ino: Ino,
        wish: Option<&pb::Seat>,
    ) -> bool {
        let Some(wish) = wish.filter(|w| w.id != 0) else { return false };
        let node = call.who.node;
        let free = |f: &Arc<ebb_consistency::FileState>| {
            f.seat_elsewhere(node).is_none() && f.quiet().is_none_or(|q| q.node == node)
        };
        let may = state.files.get(&ino).is_some_and(free)
            && state.ns.is_open_by(ino, node)
            && !state.ns.is_open_by_others(ino, node)
            && !state.pairs.contains_key(&node)
            && !self.is_being_cut(ino);
        if may {
            let seat = Seat { node, id: wish.id, asked: wish.asked };
            self.commit(state, &[Entry::File(ino, FileOp::Seat(seat))]);
        }
        may
    }

    /// The node at which others than `node` must change the bytes of a file; 0: none.
    pub fn seat_elsewhere(&self, state: &State, node: NodeId, ino: Ino) -> u32 {
        let seat = state.files.get(&ino).and_then(|f| f.seat_elsewhere(node));
        seat.map_or(0, |seat| seat.node.0)
    }

    /// The node has closed the file, and everything that was written there is published.
    pub fn leave_seat(&self, state: &mut State, node: NodeId, ino: Ino) {
        let seat = state.files.get(&ino).and_then(|f| f.seat()).filter(|s| s.node == node);
        if let Some(seat) = seat {
            self.seats.answers.lock().remove(&ino);
            self.commit(state, &[Entry::File(ino, FileOp::NoSeat(node, seat.id))]);
        }
    }

    /// A seat has published, at its own wish or because it was asked.
    pub fn seat_published(&self, node: NodeId, op: &pb::Published) -> OpResult {
        let ino = Ino(op.ino);
        let mut state = self.state();
        let seat = state.files.get(&ino).and_then(|f| f.seat());
        let its = seat.is_some_and(|s| s.node == node && s.id == op.seat);
        if !its {
            return Err(OpError::new(Errno::ESTALE, "the file does not sit at this node"));
        }
        if op.seated {
            self.seats.with_answers(ino, op.seat, |answers| {
                // Answers can come in another order than they were asked for.
                answers.last = answers.last.max(op.seq);
                answers.silence_told = false;
            });
        } else {
            self.leave_seat(&mut state, node, ino);
        }
        drop(state);
        self.desk.returned.notify_waiters();
        Ok(None)
    }

    /// Asks the seat of a file, if it is at another node.
    pub fn ask_seat(&self, asker: NodeId, ino: Ino) -> Option<Asked> {
        let seat = self.state().files.get(&ino)?.seat_elsewhere(asker)?;
        let mut asked = Asked { ino, seat, number: 0, on: None, since: Instant::now() };
        self.send_publish(&mut asked);
        Some(asked)
    }

    /// Once on each stream.
    fn send_publish(&self, asked: &mut Asked) {
        let Some((who, stream)) = self.sessions.stream_of(asked.seat.node) else { return };
        if asked.on == Some(stream) {
            return;
        }
        asked.on = Some(stream);
        // A number of a service before this one must not be taken for an answer.
        let number = self.seats.numbers.fetch_add(1, Relaxed);
        asked.number = now_ms().saturating_mul(1 << 20).saturating_add(number % (1 << 20));
        let what =
            pb::Publish { ino: asked.ino.0, seq: asked.number, seat: asked.seat.id, range: None };
        let what = Some(pb::notice::What::Publish(what));
        self.sessions.notify(who.node, stream, pb::Notice { what });
    }

    /// Waits until the seat has published, or is none any more.
    pub async fn settle_seat(&self, mut asked: Asked) -> Result<(), OpError> {
        loop {
            let returned = self.desk.returned.notified();
            let seat = self.state().files.get(&asked.ino).and_then(|f| f.seat());
            if seat != Some(asked.seat) {
                return Ok(());
            }
            self.send_publish(&mut asked);
            if self.seats.has_answered(&asked) {
                return Ok(());
            }
            let node = asked.seat.node;
            let waited = asked.since.elapsed();
            let silent = !self.sessions.is_alive(node).0;
            if waited >= PATIENCE || silent {
                let name =
                    self.state().nodes.get(&node).map_or_else(String::new, |n| n.name.clone());
                // Whoever tries again and again need not fill the log.
                let told = self.seats.with_answers(asked.ino, asked.seat.id, |answers| {
                    std::mem::replace(&mut answers.silence_told, true)
                });
                if !told {
                    tracing::warn!(ino = %asked.ino, %node, name, "has the file open past its daemon, and does not answer");
                }
                let text = format!("node {name} has the file open and does not answer");
                return Err(OpError::new(Errno::EIO, text));
            }
            // In either case it is looked again.
            let _ = tokio::time::timeout(LOOK_EVERY, returned).await;
        }
    }
}

/// The file whose bytes an operation changes.
pub fn changes(op: &Op) -> Option<Ino> {
    let ino = match op {
        Op::Attach(a) if !a.renew && !a.ranges.is_empty() => a.ino,
        Op::Append(a) => a.ino,
        Op::SetAttr(s) if s.size.is_some() => s.ino,
        Op::Open(o) if o.truncate => o.ino,
        _ => return None,
    };
    Some(Ino(ino))
}

/// What tells of names, or of everything: better old sizes than nothing at all.
pub fn goes_on_without(op: &Op) -> bool {
    matches!(op, Op::Lookup(_) | Op::ReadDir(_) | Op::Materialize(_))
}
