//! The state of a run and the steps of its processes: the engine of a daemon in miniature. It
//! asks the model's row what to do at each event, as the daemon does, and splits every operation
//! where something else can come in between. The actors that nobody asked are in
//! [`super::actors`].

use super::actors::{Ahead, Evictor, Flusher};
use super::fault::Fault;
use super::leases::Lending;
use super::parts::{Part, parts, settles};
use super::past::{Claimed, Past, Sending, Telling};
use super::program::{FILE_MAX, Program};
use super::quiet::{Lent, Letter, Quietly};
use crate::lease::{Grant, LeaseSeq};
use crate::model::Model;
use crate::ownership::{FileState, MapAnswer};
use crate::view::{FileView, Piece};
use ebb_types::{ByteRange, NodeId, Version};
use std::fmt;

/// Every byte of the pretend file.
pub(super) const FILE: ByteRange = ByteRange::ALL;
pub(super) const LEN: usize = FILE_MAX as usize;
/// What is in a cache file where no byte is supposed to be.
pub(super) const GARBAGE: u8 = 0xEE;
/// How often a read may find its map out of date.
pub(super) const READ_TRIES: u8 = 4;

/// The end of what an open hears of.
const WINDOW: u64 = 1;

pub(super) type Bytes = [u8; LEN];

/// What every step of a run has in common.
#[derive(Clone, Debug)]
pub struct Setup<'a> {
    /// The program.
    pub program: &'a Program,
    /// The model.
    pub model: &'a Model,
    /// The planted bug.
    pub fault: Option<Fault>,
    /// Operations are split into requests, service work and replies. Otherwise each operation of
    /// a process is one step, as far as it need not wait.
    pub split: bool,
    /// Queries about a range are answered about that range only, as for large maps.
    pub narrow: bool,
    /// Questions about the whole file are answered about its beginning, as opens of large ones: what is
    /// read is asked for then.
    pub windows: bool,
    /// Nodes know nothing at the start. Otherwise they know the file as it was then.
    pub cold: bool,
    /// Answers come with leases.
    pub leases: bool,
    /// Who alone uses the file writes without telling.
    pub quiet: bool,
    /// The kernel reads and writes the cache files.
    pub past: bool,
    /// Whom it tells what was written.
    pub telling: Telling,
    /// With `past`: of the first node only, at which the file sits.
    pub seat: bool,
}

impl Setup<'_> {
    /// The node of a process.
    pub(super) fn node(&self, p: usize) -> usize {
        self.program.processes[p].node
    }
}

/// What a process holds between two parts of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Hand {
    #[default]
    Nothing,
    Taken(Vec<ByteRange>),
    Reply(Vec<ByteRange>, Version, u64),
    Answer(ByteRange, MapAnswer, Option<Grant>),
    Read(Vec<Piece>, Vec<Vec<u8>>, u8),
    Sending(Sending),
    Claimed(Claimed),
    Brought(Vec<(Piece, Option<Vec<u8>>)>, u8),
    /// What is brought to where the file sits, as it was read here.
    AtSeat(Vec<ByteRange>, Bytes),
    Letter(Letter),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Proc {
    pub(super) op: usize,
    pub(super) part: usize,
    hand: Hand,
    /// What must be returned before the answer that is awaited comes.
    upto: LeaseSeq,
}

impl Proc {
    pub(super) fn hand(&self) -> &Hand {
        &self.hand
    }
}

/// One node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) view: FileView,
    pub(super) cache: Bytes,
    /// A truncate of this node is under way: no attach may begin.
    pub(super) cutting: bool,
    pub(super) flusher: Flusher,
    pub(super) evictor: Evictor,
    pub(super) ahead: Ahead,
    pub(super) past: Past,
    pub(super) quietly: Quietly,
}

/// A step that can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The next part of a process's operation.
    Process(usize),
    /// The next step of a node's flusher.
    Flush(usize),
    /// The next step of a node's evictor.
    Evict(usize),
    /// The next step of a node's read-ahead.
    Ahead(usize),
    /// A node tells what it wrote quietly.
    Tell(usize),
    /// The file leaves the node at which it sits.
    Leave,
    /// A node hears of a recall.
    Mail(usize),
    /// Time passes.
    Tick,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Process(p) => write!(f, "p{p}"),
            Step::Flush(n) => write!(f, "f{n}"),
            Step::Evict(n) => write!(f, "e{n}"),
            Step::Ahead(n) => write!(f, "a{n}"),
            Step::Tell(n) => write!(f, "q{n}"),
            Step::Leave => write!(f, "l"),
            Step::Mail(n) => write!(f, "m{n}"),
            Step::Tick => write!(f, "t"),
        }
    }
}

/// What a run did that it must not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// A read returned something else than sequential consistency gives.
    Read {
        /// The process.
        process: usize,
        /// Which of its operations.
        op: usize,
        /// What it returned.
        got: Vec<u8>,
        /// What it should have.
        expected: Vec<u8>,
    },
    /// A read could not find its bytes anywhere.
    Unreadable {
        /// The process.
        process: usize,
        /// Which of its operations.
        op: usize,
    },
    /// Nothing can go on, and not everybody is done.
    Stuck,
    /// After the end and a drain the backing does not have the file.
    Drained {
        /// What it has.
        got: Vec<u8>,
        /// What it should have.
        expected: Vec<u8>,
    },
    /// The drain does not come to an end.
    NotDrained,
}

/// How often the actors may still begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Flushes.
    pub flushes: u8,
    /// Evictions.
    pub evictions: u8,
    /// Read-aheads.
    pub aheads: u8,
}

/// The state of a run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub(super) service: FileState,
    pub(super) backing: Bytes,
    pub(super) nodes: Vec<Node>,
    pub(super) procs: Vec<Proc>,
    /// The file as sequential consistency has it.
    pub(super) memory: Bytes,
    sent: u64,
    locked: Option<usize>,
    pub(super) lending: Lending,
    pub(super) lent: Lent,
    pub(super) left: Budget,
    /// The file sits at the first node.
    pub(super) sits: bool,
}

pub(super) fn indexes(range: ByteRange) -> std::ops::Range<usize> {
    range.start().min(FILE_MAX) as usize..range.end().min(FILE_MAX) as usize
}

/// The answer speaks of nothing else.
pub(super) fn only_of(answer: &mut MapAnswer, range: ByteRange) {
    answer.covers = range;
    answer.ranges.retain(|o| o.range.overlaps(range));
    answer.ranges.iter_mut().for_each(|o| o.range = o.range.intersect(range));
}

impl World {
    /// The start of a run.
    #[must_use]
    pub fn new(setup: &Setup<'_>, left: Budget) -> World {
        let base = setup.program.base;
        let service = FileState::new(base);
        let mut backing = [0; LEN];
        (0..base as usize).for_each(|i| backing[i] = 0xB0 + i as u8);
        let node = |i: usize| {
            let id = NodeId(i as u32 + 1);
            let mut view = FileView::new(id);
            if !setup.cold {
                view.apply(&service.query(FILE, Version::ZERO));
            }
            Node {
                id,
                view,
                cache: if setup.passes(i) { [0; LEN] } else { [GARBAGE; LEN] },
                cutting: false,
                flusher: Flusher::Idle,
                evictor: Evictor::Idle,
                ahead: Ahead::Idle,
                past: Past::default(),
                quietly: Quietly::default(),
            }
        };
        let mut world = World {
            nodes: (0..setup.program.nodes()).map(node).collect(),
            procs: vec![Proc::default(); setup.program.processes.len()],
            memory: backing,
            sent: 0,
            locked: None,
            lending: Lending::new(setup.program.nodes(), setup.quiet),
            lent: Lent::default(),
            service,
            backing,
            left,
            sits: false,
        };
        if setup.seat {
            world.sit_down();
        }
        world
    }

    /// True when every process has done all it had to do.
    #[must_use]
    pub fn is_done(&self, setup: &Setup<'_>) -> bool {
        let mut procs = self.procs.iter().zip(&setup.program.processes);
        procs.all(|(p, program)| p.op == program.ops.len())
    }

    /// What sequential consistency has in the file.
    #[must_use]
    pub fn memory(&self) -> &[u8] {
        &self.memory
    }

    /// The steps of processes that can be taken now.
    #[must_use]
    pub fn ready(&self, setup: &Setup<'_>) -> Vec<Step> {
        let ready = |p: &usize| self.part(setup, *p).is_some_and(|part| self.may(setup, *p, part));
        (0..self.procs.len()).filter(ready).map(Step::Process).collect()
    }

    fn part(&self, setup: &Setup<'_>, p: usize) -> Option<Part> {
        let op = setup.program.processes[p].ops.get(self.procs[p].op)?;
        parts(setup, p, self.procs[p].op, *op).get(self.procs[p].part).copied()
    }

    fn may(&self, setup: &Setup<'_>, p: usize, part: Part) -> bool {
        let node = setup.node(p);
        match part {
            Part::Recv(m) => self.sent & (1 << m) != 0,
            Part::Lock => self.locked.is_none(),
            Part::WaitForAttaches => {
                setup.fault == Some(Fault::NoWaitForAttaches) || !self.others_attach(setup, p)
            }
            Part::Attached | Part::Learn | Part::HaveCut(_) => {
                !self.is_owed(setup, self.procs[p].upto)
            }
            part if settles(part) && self.must_settle(setup, node) => self.may_knock(),
            Part::QuietTurn | Part::QuietSent => self.may_quietly(setup, p, node, part),
            Part::Turn => self.has_turn(setup.node(p)),
            Part::SeatPublish | Part::SeatStore => !self.seat_is_taken(),
            Part::SeatCut(_) if self.seat_is_taken() => false,
            Part::Take(_) => !self.nodes[setup.node(p)].cutting,
            Part::Cut(len) | Part::SeatCut(len) => {
                let beside = setup.fault == Some(Fault::TruncateBesideAttaches);
                let over = setup.fault == Some(Fault::TruncateIgnoresGrants);
                (beside || !self.others_attach(setup, p))
                    && (over || !self.nodes.iter().any(|n| n.flusher.holds(ByteRange::from(len))))
            }
            _ => true,
        }
    }

    /// True when somebody else on the node of `p` has an attach under way.
    fn others_attach(&self, setup: &Setup<'_>, p: usize) -> bool {
        let node = setup.node(p);
        let other = |(i, q): (usize, &Proc)| {
            let here = i != p && setup.node(i) == node;
            here && matches!(q.hand, Hand::Taken(_) | Hand::Reply(..) | Hand::AtSeat(..))
        };
        self.procs.iter().enumerate().any(other) || self.nodes[node].flusher.is_attaching()
    }

    /// A process goes on: by one part, or without `split` to the end of its operation, as far as
    /// it need not wait.
    pub fn go(&mut self, setup: &Setup<'_>, p: usize) -> Result<(), Wrong> {
        let op = self.procs[p].op;
        loop {
            let Some(part) = self.part(setup, p) else { return Ok(()) };
            if !self.may(setup, p, part) {
                return Ok(());
            }
            let node = setup.node(p);
            if settles(part) && self.must_settle(setup, node) {
                self.knock(setup);
                return Ok(());
            }
            self.procs[p].part += 1;
            self.perform(setup, p, part)?;
            if self.part(setup, p).is_none() {
                (self.procs[p].op, self.procs[p].part) = (op + 1, 0);
                return Ok(());
            }
            if setup.split {
                return Ok(());
            }
        }
    }

    fn perform(&mut self, setup: &Setup<'_>, p: usize, part: Part) -> Result<(), Wrong> {
        let n = setup.node(p);
        let hand = std::mem::take(&mut self.procs[p].hand);
        let hand = match part {
            Part::Plan(_) | Part::Fetch | Part::Deliver(_) => self.read(setup, p, part, hand)?,
            Part::Write(r, _) | Part::Announce(r) | Part::Put(r, _) => {
                self.write(n, part, r);
                Hand::Nothing
            }
            Part::Lock | Part::Unlock | Part::Send(_) => {
                self.signal(p, part);
                Hand::Nothing
            }
            Part::Recv(_) | Part::WaitForAttaches | Part::Nothing => hand,
            Part::Past(..)
            | Part::Peek(_)
            | Part::Turn
            | Part::EndTurn
            | Part::Bring
            | Part::Keep
            | Part::Collect
            | Part::Claim
            | Part::Claimed
            | Part::Die
            | Part::Revive => self.past_part(setup, p, part, hand)?,
            Part::SeatPublish
            | Part::SeatBring
            | Part::SeatStore
            | Part::SeatDone
            | Part::SeatCut(_) => self.seat_part(setup, p, part, hand),
            Part::QuietWrite(..)
            | Part::QuietOwed
            | Part::QuietTurn
            | Part::QuietGiveUp
            | Part::QuietTake(..)
            | Part::QuietSend
            | Part::QuietSent
            | Part::QuietMap
            | Part::QuietEnd => self.quiet_part(setup, p, part, hand),
            Part::Ask(_) if self.is_leased(setup, n) => {
                // Nothing to ask, nothing to learn.
                self.procs[p].part += 1;
                Hand::Nothing
            }
            _ => {
                let hand = self.synchronise(setup, p, part, hand);
                self.procs[p].upto = self.lending.upto();
                hand
            }
        };
        self.procs[p].hand = hand;
        Ok(())
    }

    fn write(&mut self, n: usize, part: Part, r: ByteRange) {
        if let Part::Write(_, value) | Part::Put(_, value) = part {
            self.nodes[n].cache[indexes(r)].fill(value);
            self.memory[indexes(r)].fill(value);
        }
        if let Part::Write(..) | Part::Announce(_) = part {
            self.nodes[n].view.write(r);
        }
    }

    /// The next so many parts are not needed.
    pub(super) fn skip(&mut self, p: usize, parts: usize) {
        self.procs[p].part = self.procs[p].part.saturating_add(parts);
    }

    fn signal(&mut self, p: usize, part: Part) {
        match part {
            Part::Lock => self.locked = Some(p),
            Part::Unlock => self.locked = None,
            Part::Send(m) => self.sent |= 1 << m,
            _ => {}
        }
    }

    fn synchronise(&mut self, setup: &Setup<'_>, p: usize, part: Part, hand: Hand) -> Hand {
        let n = setup.node(p);
        match (part, hand) {
            (Part::Take(within), _) => Hand::Taken(self.nodes[n].view.take_unattached(within)),
            (Part::Attach, Hand::Taken(ranges)) => {
                let (version, size) = self.serve_attach(setup, n, &ranges);
                Hand::Reply(ranges, version, size)
            }
            (Part::Attached, Hand::Reply(ranges, version, size)) => {
                self.end_attach(setup, n, &ranges, version, size);
                Hand::Nothing
            }
            (Part::Ask(range), _) => self.question(setup, n, range),
            (Part::Learn, Hand::Answer(range, answer, grant)) => {
                if range == FILE && setup.fault != Some(Fault::WindowsRequireNothing) {
                    self.nodes[n].view.require(answer.version);
                }
                if self.learn(setup, n, &answer) {
                    self.take_grant(setup, n, grant);
                    return Hand::Nothing;
                }
                self.procs[p].part -= 1;
                self.question(setup, n, range)
            }
            (Part::Cut(len), _) => {
                self.cut(setup, n, len);
                self.nodes[n].cutting = setup.fault != Some(Fault::TruncateBesideAttaches);
                let mut answer = self.service.query(FILE, Version::ZERO);
                self.spoil(setup, &mut answer);
                Hand::Answer(FILE, answer, None)
            }
            (Part::HaveCut(len), Hand::Answer(_, answer, _)) => {
                self.have_cut(setup, n, len, &answer);
                Hand::Nothing
            }
            (part, hand) => unreachable!("{part:?} with {hand:?}: the parts are in order"),
        }
    }

    fn question(&mut self, setup: &Setup<'_>, n: usize, range: ByteRange) -> Hand {
        let grant = self.grant(setup, n);
        let mut answer = self.serve_query(setup, n, range, setup.narrow);
        if setup.windows && range == FILE && !answer.unchanged {
            only_of(&mut answer, ByteRange::new(0, WINDOW));
        }
        Hand::Answer(range, answer, grant)
    }

    pub(super) fn have_cut(&mut self, setup: &Setup<'_>, n: usize, len: u64, answer: &MapAnswer) {
        let keep = setup.fault == Some(Fault::TruncateKeepsLocal);
        let len = if keep { u64::MAX } else { len };
        self.nodes[n].cutting = false;
        let changes = self.nodes[n].view.truncated(len, answer);
        if setup.passes(n) {
            self.replace_lost(n, &changes);
            return self.resized(n, len);
        }
        self.scramble(n, &changes.overtaken);
        self.scramble(n, &changes.stale);
        if setup.quiet {
            self.nodes[n].quietly.writes.cut(len);
        }
        self.scramble(n, &[ByteRange::from(len)]);
    }

    fn read(&mut self, setup: &Setup<'_>, p: usize, part: Part, hand: Hand) -> Result<Hand, Wrong> {
        let n = setup.node(p);
        Ok(match (part, hand) {
            (Part::Plan(range), hand) => {
                let tries = if let Hand::Read(_, _, tries) = hand { tries } else { 0 };
                Hand::Read(self.nodes[n].view.plan_read(range), Vec::new(), tries)
            }
            (Part::Fetch, Hand::Read(plan, _, tries)) => {
                match plan.iter().map(|piece| self.bytes_of(n, piece)).collect() {
                    Some(data) => Hand::Read(plan, data, tries),
                    None => {
                        let first = plan.first().map_or(0, |piece| piece.range.start());
                        let end = plan.last().map_or(u64::MAX, |piece| piece.range.end());
                        let asked = if setup.windows { ByteRange::new(first, end) } else { FILE };
                        let answer = self.serve_query(setup, n, asked, setup.windows);
                        self.learn(setup, n, &answer);
                        self.again(p, tries)?
                    }
                }
            }
            (Part::Deliver(range), Hand::Read(plan, data, tries)) => {
                self.fill(setup, n, &plan, &data);
                match self.result(n, range, &plan, &data) {
                    Some(got) => {
                        self.judge(p, range, got)?;
                        Hand::Nothing
                    }
                    None => {
                        self.procs[p].part -= 1;
                        self.again(p, tries)?
                    }
                }
            }
            (part, hand) => unreachable!("{part:?} with {hand:?}: the parts are in order"),
        })
    }

    /// Goes back to planning a read.
    fn again(&mut self, p: usize, tries: u8) -> Result<Hand, Wrong> {
        if self.nodes.iter().any(|n| self.service.has_lapsed(n.id)) {
            // An error for who reads, until it is known what was written.
            self.skip(p, usize::MAX / 2);
            return Ok(Hand::Nothing);
        }
        self.procs[p].part -= 2;
        if tries >= READ_TRIES {
            return Err(Wrong::Unreadable { process: p, op: self.procs[p].op });
        }
        Ok(Hand::Read(Vec::new(), Vec::new(), tries + 1))
    }
}
