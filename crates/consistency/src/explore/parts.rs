//! What an operation consists of: the parts that nothing comes in between of, as the model's row says.

use super::fault::Fault;
use super::past;
use super::program::Op;
use super::quiet;
use super::seats;
use super::world::{FILE, Setup};
use crate::model::{Scope, SyncEvent};
use ebb_types::ByteRange;

/// A part of an operation that nothing comes in between of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Under the view's lock, as the daemon writes.
    Write(ByteRange, u8),
    // The same without the lock: planted bugs.
    Announce(ByteRange),
    Put(ByteRange, u8),
    Take(ByteRange),
    Attach,
    Attached,
    WaitForAttaches,
    Ask(ByteRange),
    Learn,
    Plan(ByteRange),
    Fetch,
    Deliver(ByteRange),
    Cut(u64),
    HaveCut(u64),
    Lock,
    Unlock,
    Send(u8),
    Recv(u8),
    Nothing,
    // Past the daemon.
    Past(ByteRange, u8),
    Peek(ByteRange),
    Turn,
    Collect,
    Claim,
    Claimed,
    Bring,
    Keep,
    EndTurn,
    Die,
    Revive,
    // Without telling.
    QuietWrite(ByteRange, u8),
    QuietOwed,
    QuietTurn,
    QuietGiveUp,
    QuietTake(ByteRange, bool),
    QuietSend,
    QuietSent,
    QuietMap,
    QuietEnd,
    // Where the file sits.
    SeatPublish,
    SeatBring,
    SeatStore,
    SeatDone,
    SeatCut(u64),
}

/// With this the service answers, or changes something.
pub(super) fn settles(part: Part) -> bool {
    matches!(part, Part::Ask(_) | Part::Cut(_) | Part::QuietSend)
}

/// The parts of an operation, as the row says.
pub(super) fn parts(setup: &Setup<'_>, p: usize, index: usize, op: Op) -> Vec<Part> {
    let mut out = Vec::with_capacity(8);
    let n = setup.node(p);
    let past = setup.passes(n);
    let sync = |event, range, out: &mut Vec<Part>| sync(setup, n, event, range, out);
    match op {
        Op::Sync(event) => sync(event, FILE, &mut out),
        Op::Lock => {
            out.push(Part::Lock);
            sync(SyncEvent::Lock, FILE, &mut out);
        }
        Op::Unlock => {
            sync(SyncEvent::Unlock, FILE, &mut out);
            out.push(Part::Unlock);
        }
        Op::Read(r) if past => {
            sync(SyncEvent::Read, r, &mut out);
            out.push(Part::Peek(r));
        }
        Op::Read(r) => {
            sync(SyncEvent::Read, r, &mut out);
            out.extend([Part::Plan(r), Part::Fetch, Part::Deliver(r)]);
        }
        Op::Write(r) | Op::Zero(r) => {
            let value = if op == Op::Zero(r) { 0 } else { (p as u8 + 1) * 16 + index as u8 };
            if past {
                out.push(Part::Past(r, value));
                sync(SyncEvent::Write, r, &mut out);
                return out;
            }
            if setup.quiet {
                quiet::write(r, value, &mut out);
                return out;
            }
            match setup.fault {
                Some(Fault::WriteAnnouncedLate) => {
                    out.extend([Part::Put(r, value), Part::Announce(r)]);
                }
                Some(Fault::WriteBesideLock) => {
                    out.extend([Part::Announce(r), Part::Put(r, value), Part::Announce(r)]);
                }
                _ => out.push(Part::Write(r, value)),
            }
            sync(SyncEvent::Write, r, &mut out);
        }
        Op::Restart if past => {
            sync(SyncEvent::Fsync, FILE, &mut out);
            past::restart(&mut out);
        }
        // Elsewhere nothing is noted, so nothing could come back.
        Op::Restart => {}
        Op::Truncate(len) if past => past::cut(len, &mut out),
        Op::Truncate(len) if setup.is_seated_elsewhere(n) => seats::cut(len, &mut out),
        Op::Truncate(len) if setup.quiet => quiet::cut(len, &mut out),
        Op::Truncate(len) => out.extend([Part::Cut(len), Part::HaveCut(len)]),
        Op::Send(m) => out.push(Part::Send(m)),
        Op::Recv(m) => out.push(Part::Recv(m)),
    }
    // An operation that does nothing under this model still is one.
    if out.is_empty() {
        out.push(Part::Nothing);
    }
    out
}

fn sync(setup: &Setup<'_>, n: usize, event: SyncEvent, range: ByteRange, out: &mut Vec<Part>) {
    let mut actions = setup.model.on(event);
    if let Some(fault) = setup.fault {
        actions = fault.actions(event, actions);
    }
    if setup.seat {
        return seats::sync(setup, n, event, actions, range, out);
    }
    if setup.past {
        if actions.attach.is_some() || actions.query.is_some() {
            past::sync(actions.query.is_some(), out);
        }
        return;
    }
    if setup.quiet {
        match (actions.attach, actions.query) {
            (Some(_), asks) => {
                quiet::attach(FILE, event == SyncEvent::Write, out);
                out.extend(asks.iter().flat_map(|_| [Part::Ask(FILE), Part::Learn]));
            }
            (None, Some(scope)) => {
                quiet::ask(if scope == Scope::File { FILE } else { range }, out);
            }
            (None, None) => {}
        }
        return;
    }
    let whole = |scope: Scope| if scope == Scope::File { FILE } else { range };
    if let Some(scope) = actions.attach {
        out.extend([Part::Take(whole(scope)), Part::Attach, Part::Attached, Part::WaitForAttaches]);
    }
    if let Some(scope) = actions.query {
        out.extend([Part::Ask(whole(scope)), Part::Learn]);
    }
}
