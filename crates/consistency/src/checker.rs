//! The race checker: which conflicting operations of a recorded run are not properly synchronised
//! under a model. It knows traces and the model's minimum synchronisation, not how a system
//! carries it out.
//!
//! Two operations *conflict* when they are of different processes, their ranges overlap and one is
//! a write. X is *properly synchronised* before Y when X is a read and `X hb Y`, or X is a write
//! and the model's chain ([`Msc`]) lies between them. A *storage race* is a conflicting pair with
//! neither before the other. A program none of whose runs has a race sees, under that model,
//! what sequential consistency gives.
//!
//! Processes of one node share the node's view, so between them `X hb Y` is enough; say where
//! processes are with [`Trace::place`]. Without it every process counts as a node of its own, as
//! in the papers.

use crate::model::{Model, SyncEvent};
use crate::msc::Msc;
use crate::run::Act;
use ebb_types::ByteRange;
use std::collections::BTreeMap;
use std::fmt;

/// A process of the traced program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Process(pub u32);

/// A file of the traced program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct File(pub u32);

/// An operation: its place in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub usize);

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockKind {
    /// With others that share it.
    Shared,
    /// Alone.
    Exclusive,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Read(ByteRange),
    Write(ByteRange),
    Append(ByteRange),
    Sync(SyncEvent),
    /// Sends, receives and whatever else only orders.
    Mark,
}

#[derive(Clone, Copy, Debug)]
struct Op {
    process: Process,
    file: File,
    what: What,
}

/// An edge from a later operation to an earlier one, or from one that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operation {} cannot happen before {}", .before.0, .after.0)]
pub struct BadEdge {
    /// The cause.
    pub before: OpId,
    /// The effect.
    pub after: OpId,
}

#[derive(Clone, Copy, Debug)]
struct Unlocked {
    op: OpId,
    file: File,
    range: ByteRange,
    kind: LockKind,
}

/// A run of a program: operations in an order in which they could have happened, and what orders
/// them across processes.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    ops: Vec<Op>,
    /// For each operation, those of other processes that directly happen before it.
    causes: Vec<Vec<OpId>>,
    unlocked: Vec<Unlocked>,
    nodes: BTreeMap<Process, u32>,
}

impl Trace {
    /// An empty trace.
    #[must_use]
    pub fn new() -> Trace {
        Trace::default()
    }

    /// Number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// True when nothing happened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// `process` runs on `node` and shares its view with the others there.
    pub fn place(&mut self, process: Process, node: u32) {
        self.nodes.insert(process, node);
    }

    /// A read.
    pub fn read(&mut self, process: Process, file: File, range: ByteRange) -> OpId {
        self.push(process, file, What::Read(range))
    }

    /// A write; a truncate is a write of everything beyond the new size.
    pub fn write(&mut self, process: Process, file: File, range: ByteRange) -> OpId {
        self.push(process, file, What::Write(range))
    }

    /// A write behind what was the end of the file.
    pub fn append(&mut self, process: Process, file: File, range: ByteRange) -> OpId {
        self.push(process, file, What::Append(range))
    }

    /// A sync operation. Locks are better recorded with [`Trace::lock`].
    pub fn sync(&mut self, process: Process, file: File, event: SyncEvent) -> OpId {
        self.push(process, file, What::Sync(event))
    }

    /// A lock was granted: after every earlier unlock that excluded it.
    pub fn lock(&mut self, process: Process, file: File, range: ByteRange, kind: LockKind) -> OpId {
        let id = self.sync(process, file, SyncEvent::Lock);
        let excludes = |u: &&Unlocked| {
            u.file == file
                && u.range.overlaps(range)
                && (u.kind == LockKind::Exclusive || kind == LockKind::Exclusive)
        };
        self.causes[id.0] = self.unlocked.iter().filter(excludes).map(|u| u.op).collect();
        id
    }

    /// A lock of that range and kind was given up.
    pub fn unlock(
        &mut self,
        process: Process,
        file: File,
        range: ByteRange,
        kind: LockKind,
    ) -> OpId {
        let op = self.sync(process, file, SyncEvent::Unlock);
        self.unlocked.push(Unlocked { op, file, range, kind });
        op
    }

    /// A point in a process, to hang edges on: a message sent or received, a barrier.
    pub fn mark(&mut self, process: Process) -> OpId {
        self.push(process, File(0), What::Mark)
    }

    /// `before` happens before `after`: a message sent and received.
    pub fn order(&mut self, before: OpId, after: OpId) -> Result<(), BadEdge> {
        if before >= after || after.0 >= self.ops.len() {
            return Err(BadEdge { before, after });
        }
        self.causes[after.0].push(before);
        Ok(())
    }

    fn push(&mut self, process: Process, file: File, what: What) -> OpId {
        self.ops.push(Op { process, file, what });
        self.causes.push(Vec::new());
        OpId(self.ops.len() - 1)
    }

    fn same_view(&self, a: Process, b: Process) -> bool {
        a == b || self.nodes.get(&a).is_some_and(|n| self.nodes.get(&b) == Some(n))
    }
}

/// What a racing pair lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Neither happens before the other.
    Order,
    /// The write is not published: none of these follows it in its process.
    Publish(Vec<SyncEvent>),
    /// The second process does not observe: none of these precedes its access.
    Observe(Vec<SyncEvent>),
    /// Both are there, but the one does not happen before the other.
    Chain,
}

/// Two operations that race.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// The one that comes first in the trace.
    pub first: OpId,
    /// The other.
    pub second: OpId,
    /// The bytes that both touch.
    pub range: ByteRange,
    /// What is missing between them.
    pub missing: Missing,
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operations {} and {} race for {}: ", self.first.0, self.second.0, self.range)?;
        let names = |e: &[SyncEvent]| e.iter().map(|e| e.name()).collect::<Vec<_>>().join(" or ");
        match &self.missing {
            Missing::Order => write!(f, "nothing orders them"),
            Missing::Publish(events) => write!(f, "no {} after the first", names(events)),
            Missing::Observe(events) => write!(f, "no {} before the second", names(events)),
            Missing::Chain => write!(f, "the second looked before the first published"),
        }
    }
}

/// All races of a run under a model, in trace order.
#[must_use]
pub fn check(trace: &Trace, model: &Model) -> Vec<Race> {
    Checker::new(trace, model).races()
}

struct Checker<'a> {
    trace: &'a Trace,
    model: &'a Model,
    msc: Msc,
    /// Per operation and process: how many operations of the process happen before or are it.
    clocks: Vec<Vec<u32>>,
    /// Per operation: its process, as an index, and its number in it.
    places: Vec<(usize, u32)>,
    /// Per operation: the next one of its process that publishes the file.
    publishes: Vec<Option<OpId>>,
    /// Per operation: the last one of its process that observes the file.
    observes: Vec<Option<OpId>>,
}

impl<'a> Checker<'a> {
    fn new(trace: &'a Trace, model: &'a Model) -> Checker<'a> {
        let msc = model.msc();
        let (places, clocks) = clocks(trace);
        let observes = nearest(trace, &msc.observe, false);
        let publishes = nearest(trace, &msc.publish, true);
        Checker { trace, model, msc, clocks, places, publishes, observes }
    }

    fn races(&self) -> Vec<Race> {
        let mut by_file: BTreeMap<File, Vec<(ByteRange, OpId)>> = BTreeMap::new();
        for (i, op) in self.trace.ops.iter().enumerate() {
            let touched = match op.what {
                What::Read(r) | What::Write(r) => Some(r),
                What::Append(r) => Some(Act::Append.touches(r, self.model)),
                What::Sync(_) | What::Mark => None,
            };
            if let Some(r) = touched {
                by_file.entry(op.file).or_default().push((r, OpId(i)));
            }
        }
        let mut races = Vec::new();
        for mut accesses in by_file.into_values() {
            accesses.sort();
            for (i, (range, a)) in accesses.iter().enumerate() {
                let meets = |(r, _): &&(ByteRange, OpId)| r.start() < range.end();
                for (other, b) in accesses[i + 1..].iter().take_while(meets) {
                    races.extend(self.race((*a).min(*b), (*a).max(*b), range.intersect(*other)));
                }
            }
        }
        races.sort_by_key(|r| (r.first, r.second));
        races
    }

    fn race(&self, first: OpId, second: OpId, range: ByteRange) -> Option<Race> {
        let (x, y) = (self.trace.ops[first.0], self.trace.ops[second.0]);
        let reads = |o: &Op| matches!(o.what, What::Read(_));
        if x.process == y.process || range.is_empty() || (reads(&x) && reads(&y)) {
            return None;
        }
        let missing = self.missing(first, second)?;
        Some(Race { first, second, range, missing })
    }

    /// What `y` lacks to be properly synchronised after `x`; the other way round is impossible,
    /// as the trace is an order in which things happened.
    fn missing(&self, x: OpId, y: OpId) -> Option<Missing> {
        if !self.before(x, y) {
            return Some(Missing::Order);
        }
        let (a, b) = (self.trace.ops[x.0], self.trace.ops[y.0]);
        if matches!(a.what, What::Read(_)) || self.trace.same_view(a.process, b.process) {
            return None;
        }
        let s1 = match &self.msc.publish {
            None => x,
            Some(events) => match self.publishes[x.0] {
                Some(s1) => s1,
                None => return Some(Missing::Publish(events.clone())),
            },
        };
        let s2 = match &self.msc.observe {
            None => y,
            Some(events) => match self.observes[y.0] {
                Some(s2) => s2,
                None => return Some(Missing::Observe(events.clone())),
            },
        };
        (!self.before(s1, s2)).then_some(Missing::Chain)
    }

    fn before(&self, a: OpId, b: OpId) -> bool {
        let (process, number) = self.places[a.0];
        a != b && self.clocks[b.0][process] > number
    }
}

fn clocks(trace: &Trace) -> (Vec<(usize, u32)>, Vec<Vec<u32>>) {
    let mut indexes: BTreeMap<Process, usize> = BTreeMap::new();
    for op in &trace.ops {
        let next = indexes.len();
        indexes.entry(op.process).or_insert(next);
    }
    let mut now = vec![vec![0u32; indexes.len()]; indexes.len()];
    let mut places = Vec::with_capacity(trace.len());
    let mut clocks: Vec<Vec<u32>> = Vec::with_capacity(trace.len());
    for (op, causes) in trace.ops.iter().zip(&trace.causes) {
        let process = indexes[&op.process];
        places.push((process, now[process][process]));
        for cause in causes {
            for (mine, theirs) in now[process].iter_mut().zip(&clocks[cause.0]) {
                *mine = (*mine).max(*theirs);
            }
        }
        now[process][process] += 1;
        clocks.push(now[process].clone());
    }
    (places, clocks)
}

/// For each operation the nearest sync operation out of `events` of its process and file, after
/// it or before it.
fn nearest(trace: &Trace, events: &Option<Vec<SyncEvent>>, after: bool) -> Vec<Option<OpId>> {
    let mut found = vec![None; trace.len()];
    let Some(events) = events else { return found };
    let mut last: BTreeMap<(Process, File), OpId> = BTreeMap::new();
    let mut visit = |i: usize| {
        let op = trace.ops[i];
        found[i] = last.get(&(op.process, op.file)).copied();
        if matches!(op.what, What::Sync(e) if events.contains(&e)) {
            last.insert((op.process, op.file), OpId(i));
        }
    };
    match after {
        true => (0..trace.len()).rev().for_each(&mut visit),
        false => (0..trace.len()).for_each(&mut visit),
    }
    found
}

#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
