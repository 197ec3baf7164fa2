//! A file that sits at the first node: its processes write and read the cache file past the daemon,
//! and the others, whose operations go through theirs, do there what they want to change. Where the
//! model's writes publish, the node publishes before others are answered. When its processes are
//! done it may leave the seat, and the file is as every other.

use super::fault::Fault;
use super::parts::Part;
use super::world::{Bytes, FILE, Hand, Setup, World, indexes};
use crate::model::{Actions, Scope, SyncEvent};
use ebb_types::{ByteRange, Version};

/// The node at which the file sits.
pub(super) const SEAT: usize = 0;

impl Setup<'_> {
    /// The kernel reads and writes the cache file of this node.
    pub(super) fn passes(&self, n: usize) -> bool {
        self.past && (!self.seat || n == SEAT)
    }

    /// This node's changes are done where the file sits.
    pub(super) fn is_seated_elsewhere(&self, n: usize) -> bool {
        self.seat && n != SEAT
    }
}

/// The parts of what a row says, at the seat or elsewhere.
pub(super) fn sync(
    setup: &Setup<'_>,
    n: usize,
    event: SyncEvent,
    actions: Actions,
    range: ByteRange,
    out: &mut Vec<Part>,
) {
    let whole = |scope: Scope| if scope == Scope::File { FILE } else { range };
    if !setup.is_seated_elsewhere(n) {
        // Nothing is asked here, and a write is told when somebody asks.
        if actions.attach.is_some() && event != SyncEvent::Write {
            super::past::sync(false, out);
        }
        return;
    }
    if let Some(scope) = actions.attach {
        out.extend([Part::Take(whole(scope)), Part::SeatPublish, Part::SeatBring]);
        out.extend([Part::SeatStore, Part::SeatDone, Part::WaitForAttaches]);
    }
    if let Some(scope) = actions.query {
        if setup.model.writes_publish() {
            out.push(Part::SeatPublish);
        }
        out.extend([Part::Ask(whole(scope)), Part::Learn]);
    }
}

/// The parts of a truncate elsewhere.
pub(super) fn cut(len: u64, out: &mut Vec<Part>) {
    out.extend([Part::SeatPublish, Part::SeatCut(len), Part::HaveCut(len)]);
}

impl World {
    /// The file as the seat has it at the beginning: all of it.
    pub(super) fn sit_down(&mut self) {
        self.sits = true;
        let size = self.service.size();
        let node = &mut self.nodes[SEAT];
        let answer = self.service.query(FILE, Version::ZERO);
        node.view.apply(&answer);
        node.view.fetched(ByteRange::new(0, size), answer.version);
        node.cache = self.backing;
        if size > 0 {
            node.past.twin = Some(self.backing);
            node.past.touch(0..size as usize);
        }
        (node.past.changed, node.past.size) = (false, size);
    }

    /// True when the file sits and somebody has the turn there.
    pub(super) fn seat_is_taken(&self) -> bool {
        self.sits && !self.has_turn(SEAT)
    }

    /// True when the seat may be left: nobody has the file open there any more.
    pub(super) fn may_leave(&self, setup: &Setup<'_>) -> bool {
        let here = |(p, _): &(usize, _)| setup.node(*p) == SEAT;
        let done = self.procs.iter().zip(&setup.program.processes).enumerate().filter(here);
        self.sits
            && self.has_turn(SEAT)
            && done.into_iter().all(|(_, (p, program))| p.op == program.ops.len())
    }

    pub(super) fn leave_seat(&mut self, setup: &Setup<'_>) {
        if setup.fault != Some(Fault::SeatLeftUntold) {
            self.publish_past(setup, SEAT);
        }
        self.sits = false;
    }

    /// Brings bytes of another node to the seat, which publishes them.
    pub(super) fn store_at_seat(&mut self, setup: &Setup<'_>, ranges: &[ByteRange], bytes: &Bytes) {
        let node = &mut self.nodes[SEAT];
        for range in ranges {
            let at = indexes(*range);
            node.cache[at.clone()].copy_from_slice(&bytes[at.clone()]);
            node.view.write(*range);
            node.past.touch(at);
        }
        self.publish_past(setup, SEAT);
    }

    /// They are at the seat: here they are no more.
    pub(super) fn gone_to_seat(&mut self, setup: &Setup<'_>, n: usize, ranges: &[ByteRange]) {
        if setup.fault != Some(Fault::SeatNotLearned) {
            self.learn_anew(setup, n);
        }
        let changes = self.nodes[n].view.not_attached(ranges);
        self.scramble(n, &changes.overtaken);
    }

    pub(super) fn seat_part(
        &mut self,
        setup: &Setup<'_>,
        p: usize,
        part: Part,
        hand: Hand,
    ) -> Hand {
        let n = setup.node(p);
        match (part, hand) {
            (Part::SeatPublish, hand) => {
                if self.sits && setup.fault != Some(Fault::SeatNotAsked) {
                    self.publish_past(setup, SEAT);
                }
                hand
            }
            (Part::SeatBring, Hand::Taken(ranges)) => {
                if self.sits && setup.fault != Some(Fault::SeatPassedBy) {
                    return Hand::AtSeat(ranges, self.nodes[n].cache);
                }
                let (version, size) = self.serve_attach(setup, n, &ranges);
                Hand::Reply(ranges, version, size)
            }
            (Part::SeatStore, Hand::AtSeat(ranges, bytes)) => {
                if !self.sits {
                    // It was left meanwhile: the service is asked again.
                    self.procs[p].part -= 2;
                    return Hand::Taken(ranges);
                }
                self.store_at_seat(setup, &ranges, &bytes);
                Hand::AtSeat(ranges, bytes)
            }
            (Part::SeatStore, hand) => hand,
            (Part::SeatDone, Hand::AtSeat(ranges, _)) => {
                self.gone_to_seat(setup, n, &ranges);
                Hand::Nothing
            }
            (Part::SeatDone, Hand::Reply(ranges, version, size)) => {
                self.end_attach(setup, n, &ranges, version, size);
                Hand::Nothing
            }
            (Part::SeatCut(len), _) => {
                if self.sits && setup.fault != Some(Fault::SeatNotCut) {
                    self.publish_past(setup, SEAT);
                    self.cut(setup, SEAT, len);
                    let answer = self.service.query(FILE, Version::ZERO);
                    self.have_cut(setup, SEAT, len, &answer);
                } else {
                    self.cut(setup, n, len);
                }
                self.nodes[n].cutting = true;
                Hand::Answer(FILE, self.service.query(FILE, Version::ZERO), None)
            }
            (part, hand) => unreachable!("{part:?} with {hand:?}: the parts are in order"),
        }
    }
}
