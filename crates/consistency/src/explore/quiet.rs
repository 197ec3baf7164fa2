//! Quiet writes in the explorer: a node that alone uses the file writes without telling, and tells
//! before anybody else is answered. The rules are in [`crate::lease::QuietWrites`] and
//! [`crate::FileState`]; who follows them here are `meta-server/src/quiet.rs`,
//! `fs-client/src/quiet.rs` and `fs-client/src/ops/sync.rs`, in miniature. Sync events of a node take
//! turns, as in the daemon.
//!
//! A holder that is not heard in time is given up, and what it may have written cannot be read until
//! it tells: a read that finds that is an error for its caller and says nothing wrong.

use super::fault::Fault;
use super::parts::Part;
use super::program::FILE_MAX;
use super::world::{FILE, Hand, Setup, World, indexes};
use crate::lease::{Grant, Held, LeaseSeq, QuietWrites, Untold};
use ebb_types::{ByteRange, NodeId, Version, split_by};

/// The turn of the node itself, beside those of the processes.
const NODE: usize = usize::MAX;

/// A node's part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Quietly {
    pub(super) writes: QuietWrites,
    /// Whose sync event it is.
    turn: Option<usize>,
    /// A lease that is returned when all is told.
    owed: Option<LeaseSeq>,
    /// The node tells because it must.
    letter: Option<Letter>,
}

/// The service's part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Lent {
    /// With which lease the right went out.
    with: Option<LeaseSeq>,
    /// Its holder was asked to tell.
    asked: bool,
}

/// An attach on its way, and its answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Letter {
    exact: Vec<ByteRange>,
    quiet: Vec<ByteRange>,
    /// It tells all that was written quietly.
    untold: Option<Untold>,
    wishes: bool,
    /// The node's trust when it was sent.
    epoch: Option<u64>,
    answer: Option<Answer>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Answer {
    version: Version,
    size: u64,
    refused: Vec<ByteRange>,
    grant: Option<Grant>,
    /// How far may be written quietly from now on.
    end: u64,
    /// What must be returned before it comes.
    upto: LeaseSeq,
}

/// The parts of a write.
pub(super) fn write(r: ByteRange, value: u8, out: &mut Vec<Part>) {
    out.push(Part::QuietWrite(r, value));
    attach(r, true, out);
}

/// The parts of an attach that publishes.
pub(super) fn attach(within: ByteRange, wishes: bool, out: &mut Vec<Part>) {
    out.extend([Part::QuietTurn, Part::QuietTake(within, wishes), Part::QuietSend]);
    out.extend([Part::QuietSent, Part::QuietMap, Part::Ask(FILE), Part::Learn, Part::QuietEnd]);
}

/// What is owed is told before anything is asked.
pub(super) fn ask(range: ByteRange, out: &mut Vec<Part>) {
    out.push(Part::QuietOwed);
    let before = out.len();
    attach(FILE, false, out);
    debug_assert_eq!(out.len() - before, ATTACH_PARTS);
    out.extend([Part::Ask(range), Part::Learn]);
}

/// The parts of a truncate: everything is told first.
pub(super) fn cut(len: u64, out: &mut Vec<Part>) {
    out.extend([Part::QuietTurn, Part::QuietGiveUp, Part::QuietTake(FILE, false)]);
    out.extend([Part::QuietSend, Part::QuietSent, Part::Cut(len), Part::HaveCut(len)]);
    out.push(Part::QuietEnd);
}

const ATTACH_PARTS: usize = 8;

impl World {
    fn id(&self, n: usize) -> NodeId {
        self.nodes[n].id
    }

    fn epoch(&self, setup: &Setup<'_>, n: usize) -> Option<u64> {
        let for_ever = setup.fault == Some(Fault::QuietForEver);
        let now = if for_ever { 0 } else { self.lending.now() };
        self.lending.epoch_at(n, now)
    }

    fn must_tell(&self, setup: &Setup<'_>, n: usize) -> bool {
        self.nodes[n].quietly.writes.must_tell(self.epoch(setup, n))
    }

    /// True when this can be done now.
    pub(super) fn may_quietly(&self, setup: &Setup<'_>, p: usize, n: usize, part: Part) -> bool {
        match part {
            Part::QuietTurn => self.nodes[n].quietly.turn.is_none(),
            Part::QuietSent => match self.procs[p].hand() {
                Hand::Letter(letter) => self.is_answered(setup, n, letter),
                _ => true,
            },
            _ => true,
        }
    }

    /// An answer to what tells does not wait for what its node returns only afterwards.
    fn is_answered(&self, setup: &Setup<'_>, n: usize, letter: &Letter) -> bool {
        let Some(answer) = &letter.answer else { return true };
        let but = letter.untold.is_some().then_some(n);
        !self.is_owed_to(setup, answer.upto, but)
    }

    pub(super) fn quiet_part(
        &mut self,
        setup: &Setup<'_>,
        p: usize,
        part: Part,
        hand: Hand,
    ) -> Hand {
        let n = setup.node(p);
        match (part, hand) {
            (Part::QuietWrite(r, value), _) => {
                if self.write_quietly(setup, n, r, value) {
                    self.skip(p, usize::MAX / 2);
                }
                Hand::Nothing
            }
            (Part::QuietOwed, _) => {
                if !self.must_tell(setup, n) {
                    self.skip(p, ATTACH_PARTS);
                }
                Hand::Nothing
            }
            (Part::QuietTurn, _) => {
                self.nodes[n].quietly.turn = Some(p);
                Hand::Nothing
            }
            (Part::QuietGiveUp, _) => {
                self.nodes[n].quietly.writes.give_up();
                Hand::Nothing
            }
            (Part::QuietTake(within, wishes), _) => {
                let letter = self.write_letter(setup, n, within, wishes);
                letter.map_or(Hand::Nothing, Hand::Letter)
            }
            (Part::QuietSend, Hand::Letter(letter)) => {
                Hand::Letter(self.serve_letter(setup, n, letter))
            }
            (Part::QuietSent, Hand::Letter(letter)) => {
                self.answered(n, letter);
                Hand::Nothing
            }
            (Part::QuietMap, _) => {
                let node = &self.nodes[n];
                if !node.quietly.writes.wants_map(&node.view) {
                    self.skip(p, 2);
                }
                Hand::Nothing
            }
            (Part::QuietEnd, _) => {
                self.nodes[n].quietly.turn = None;
                Hand::Nothing
            }
            // There was nothing to send.
            (_, hand) => hand,
        }
    }

    /// The daemon stores bytes under a lock, with the note that they are written.
    fn write_quietly(&mut self, setup: &Setup<'_>, n: usize, r: ByteRange, value: u8) -> bool {
        let epoch = self.epoch(setup, n);
        let node = &mut self.nodes[n];
        let quietly = node.quietly.writes.allows(r, &node.view, epoch);
        node.cache[indexes(r)].fill(value);
        node.view.write(r);
        match quietly {
            true => node.quietly.writes.wrote(r),
            false => node.quietly.writes.wrote_aloud(r),
        }
        self.memory[indexes(r)].fill(value);
        quietly
    }

    // ---- telling -------------------------------------------------------------------------------

    fn write_letter(
        &mut self,
        setup: &Setup<'_>,
        n: usize,
        within: ByteRange,
        wishes: bool,
    ) -> Option<Letter> {
        let must = self.must_tell(setup, n);
        let epoch = self.lending.epoch_at(n, self.lending.now());
        let node = &mut self.nodes[n];
        let tells = node.quietly.writes.is_some();
        let taken = node.view.take_unattached(if tells { FILE } else { within });
        let owes = tells && (!taken.is_empty() || must);
        let untold = (wishes || owes).then(|| node.quietly.writes.tell());
        if taken.is_empty() && untold.is_none() {
            return None;
        }
        let ranges = untold.as_ref().map_or(&[][..], |u| &u.ranges);
        let (exact, quiet) = split_by(&taken, ranges);
        Some(Letter { exact, quiet, untold, wishes, epoch, answer: None })
    }

    fn serve_letter(&mut self, setup: &Setup<'_>, n: usize, mut letter: Letter) -> Letter {
        let id = self.id(n);
        let since = letter.untold.as_ref().map_or(Version::ZERO, |u| u.since);
        let (granted, refused) = self.service.judge_quiet(id, &letter.quiet, since);
        let ranges = [&letter.exact[..], &granted].concat();
        if !ranges.is_empty() {
            self.service.attach(id, &ranges);
            self.call_back(setup, n);
        }
        let mut end = 0;
        if letter.untold.is_some() {
            if self.service.has_lapsed(id) {
                self.service.take_back(id);
                self.call_back(setup, n);
            }
            if letter.wishes && self.lends_alone(n) {
                end = FILE_MAX;
                self.service.lend_quiet(id, end);
                self.lent = Lent::default();
                self.call_back(setup, n);
            } else {
                self.end_quiet(n);
            }
        }
        let (version, size) = (self.service.version(), self.service.size());
        let grant = self.grant(setup, n);
        if end > 0 {
            self.lent.with = grant.map(|g| g.seq);
        }
        let upto = self.lending.upto();
        letter.answer = Some(Answer { version, size, refused, grant, end, upto });
        letter
    }

    fn lends_alone(&self, n: usize) -> bool {
        let free = self.service.quiet().is_none_or(|q| q.node == self.id(n));
        free && self.lending.lends_alone(n)
    }

    fn end_quiet(&mut self, n: usize) {
        if self.service.quiet().is_some_and(|q| q.node == self.id(n)) {
            self.service.end_quiet(self.id(n));
            self.lent = Lent::default();
        }
    }

    fn answered(&mut self, n: usize, letter: Letter) {
        let Some(answer) = letter.answer else { return };
        let taken = [letter.exact, letter.quiet].concat();
        let (ranges, overtaken) = split_by(&taken, &answer.refused);
        let mut lost = self.nodes[n].view.not_attached(&overtaken).overtaken;
        let attached = self.nodes[n].view.attached(&ranges, answer.version, answer.size);
        lost.extend(attached.overtaken);
        self.scramble(n, &lost);
        if letter.untold.is_none() {
            return;
        }
        let writes = &mut self.nodes[n].quietly.writes;
        writes.heard();
        if answer.end == 0 {
            return writes.told();
        }
        if let (Some(grant), Some(epoch)) = (answer.grant, letter.epoch)
            && self.lending.take_grant(n, grant, epoch)
        {
            let window = ByteRange::new(answer.size, answer.end.max(answer.size));
            let held = Held { seq: grant.seq, epoch, version: answer.version, window };
            writes.granted(held);
        }
    }

    // ---- being asked ---------------------------------------------------------------------------

    /// True when node `n` can be answered only when another one has told.
    pub(super) fn must_settle(&self, setup: &Setup<'_>, n: usize) -> bool {
        let asks = setup.quiet && setup.fault != Some(Fault::QuietNotAsked);
        asks && self.service.quiet().is_some_and(|q| q.node != self.id(n))
    }

    /// True when there is something to do about that but to wait.
    pub(super) fn may_knock(&self) -> bool {
        let holder = self.service.quiet().map(|q| q.node);
        !self.lent.asked || holder.is_some_and(|h| !self.lending.is_trusted(h))
    }

    /// The holder is asked to tell, or given up.
    pub(super) fn knock(&mut self, setup: &Setup<'_>) {
        let Some(quiet) = self.service.quiet() else { return };
        self.lent.asked = true;
        self.lending.demand(quiet.node);
        if !self.lending.is_trusted(quiet.node) {
            match setup.fault {
                Some(Fault::LapseForgets) => self.service.end_quiet(quiet.node),
                _ => drop(self.service.lapse()),
            }
            self.lent = Lent::default();
        }
    }

    /// A recall has come; false when the lease is returned later.
    pub(super) fn recall_quiet(&mut self, setup: &Setup<'_>, n: usize, seq: LeaseSeq) -> bool {
        let quietly = &mut self.nodes[n].quietly;
        quietly.writes.recall(seq);
        let tells = quietly.writes.has_untold() && setup.fault != Some(Fault::QuietKept);
        if tells {
            quietly.owed = quietly.owed.max(Some(seq));
        }
        !tells
    }

    /// A node has returned a lease, and the right with it.
    pub(super) fn returned_quiet(&mut self, n: usize, seq: LeaseSeq) {
        if self.lent.with.is_none_or(|with| with <= seq) {
            self.end_quiet(n);
        }
    }

    /// True when node `n` can go on telling, or returns what it owes. Before a flush everything is told
    /// as well.
    pub(super) fn may_tell(&self, setup: &Setup<'_>, n: usize) -> bool {
        let quietly = &self.nodes[n].quietly;
        match &quietly.letter {
            Some(letter) if letter.answer.is_some() => self.is_answered(setup, n, letter),
            Some(_) => !self.must_settle(setup, n) || self.may_knock(),
            None => {
                let flushes = self.left.flushes > 0 && self.nodes[n].view.has_unattached();
                let begins = self.must_tell(setup, n) || flushes;
                quietly.turn.is_none() && begins
                    || quietly.owed.is_some() && !self.must_tell(setup, n)
            }
        }
    }

    pub(super) fn tell(&mut self, setup: &Setup<'_>, n: usize) {
        match self.nodes[n].quietly.letter.take() {
            Some(letter) if letter.answer.is_some() => {
                self.answered(n, letter);
                self.nodes[n].quietly.turn = None;
            }
            Some(letter) if self.must_settle(setup, n) => {
                self.nodes[n].quietly.letter = Some(letter);
                self.knock(setup);
            }
            Some(letter) => {
                self.nodes[n].quietly.letter = Some(self.serve_letter(setup, n, letter));
            }
            None if self.nodes[n].quietly.owed.is_some() && !self.must_tell(setup, n) => {
                if let Some(seq) = self.nodes[n].quietly.owed.take() {
                    self.return_lease(n, seq);
                }
            }
            None => {
                let letter = self.write_letter(setup, n, FILE, false);
                self.nodes[n].quietly.turn = letter.is_some().then_some(NODE);
                self.nodes[n].quietly.letter = letter;
            }
        }
    }

    /// Nobody writes any more.
    pub(super) fn end_of_quiet(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.quietly.writes.give_up());
    }
}
