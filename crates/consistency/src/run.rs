//! A recorded run of any size: what [`crate::checker`] defines, for millions of operations. Here the
//! operations are taken in; [`crate::sweep`] finds the races.
//!
//! Each process counts its steps. What happened before a step is a vector of such counts, which
//! changes only where something of another process is heard of: the steps between two such places
//! share one vector (a *segment*), so memory grows with messages and operations, not with their product.

use crate::checker::{File, LockKind, Process};
use crate::model::SyncEvent;
use ebb_types::ByteRange;
use rangemap::RangeMap;
use std::collections::HashMap;
use std::sync::Arc;

/// What an access does to its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Act {
    /// It reads them.
    Read,
    /// It writes them, or cuts them off.
    Write,
    /// It writes them behind what was the end. Where appends are not atomic
    /// ([`crate::Model::append_is_atomic`]) this builds on the byte before them.
    Append,
}

/// Where in a program an access is made, as the caller numbers such places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site(pub u32);

/// Everything that a process did up to a moment, and what happened before that.
#[derive(Clone, Debug)]
pub struct Moment {
    clock: Arc<[u32]>,
    own: Option<(u32, u32)>,
}

/// Several moments put together, as at a barrier.
#[derive(Clone, Debug)]
pub struct Gathering {
    clock: Vec<u32>,
}

impl Gathering {
    /// Nothing has happened yet, of so many processes.
    #[must_use]
    pub fn new(processes: usize) -> Gathering {
        Gathering { clock: vec![0; processes] }
    }

    /// Adds what happened before and up to `moment`.
    pub fn add(&mut self, moment: &Moment) {
        raise(&mut self.clock, moment);
    }

    /// All of it.
    #[must_use]
    pub fn moment(&self) -> Moment {
        Moment { clock: self.clock.as_slice().into(), own: None }
    }
}

fn raise(clock: &mut [u32], moment: &Moment) {
    for (mine, theirs) in clock.iter_mut().zip(moment.clock.iter()) {
        *mine = (*mine).max(*theirs);
    }
    if let Some((process, steps)) = moment.own {
        let mine = &mut clock[process as usize];
        *mine = (*mine).max(steps);
    }
}

/// One access, as small as it can be: there are millions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub start: u64,
    pub end: u64,
    pub file: u32,
    pub process: u32,
    pub site: u32,
    /// Its step.
    pub number: u32,
    /// What happened before it: an index into its process's segments.
    pub segment: u32,
    /// Its place among the accesses of all processes.
    pub id: u32,
    pub act: Act,
}

/// A sync operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyncStep {
    pub number: u32,
    pub segment: u32,
    pub event: SyncEvent,
}

#[derive(Clone, Debug)]
struct Line {
    now: Arc<[u32]>,
    steps: u32,
    segments: Vec<Arc<[u32]>>,
    node: Option<u32>,
}

/// What unlocks of a range have let go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Released {
    shared: Option<Arc<[u32]>>,
    exclusive: Option<Arc<[u32]>>,
}

/// The operations of a run, given in an order in which they could have happened.
#[derive(Clone, Debug)]
pub struct Run {
    lines: Vec<Line>,
    accesses: Vec<Access>,
    syncs: HashMap<(u32, u32), Vec<SyncStep>>,
    locks: HashMap<u32, RangeMap<u64, Released>>,
}

impl Run {
    /// A run of so many processes, in which nothing has happened.
    #[must_use]
    pub fn new(processes: usize) -> Run {
        let zero: Arc<[u32]> = vec![0; processes].into();
        let line = Line { now: zero, steps: 0, segments: Vec::new(), node: None };
        Run {
            lines: vec![line; processes],
            accesses: Vec::new(),
            syncs: HashMap::new(),
            locks: HashMap::new(),
        }
    }

    /// `process` runs on `node` and shares its view with the others there.
    pub fn place(&mut self, process: Process, node: u32) {
        self.line(process).node = Some(node);
    }

    /// The next step of a process begins: what is told of it from now on belongs to that step. Its
    /// number, from 0.
    pub fn step(&mut self, process: Process) -> u32 {
        let line = self.line(process);
        line.steps = line.steps.checked_add(1).expect("fewer than 2^32 steps of a process");
        line.steps - 1
    }

    /// How many accesses there are.
    #[must_use]
    pub fn accesses(&self) -> usize {
        self.accesses.len()
    }

    /// An access of the current step.
    pub fn access(&mut self, process: Process, file: File, range: ByteRange, act: Act, site: Site) {
        if range.is_empty() {
            return;
        }
        let (number, segment) = self.here(process);
        let id = u32::try_from(self.accesses.len()).expect("fewer than 2^32 accesses");
        self.accesses.push(Access {
            start: range.start(),
            end: range.end(),
            file: file.0,
            process: process.0,
            site: site.0,
            number,
            segment,
            id,
            act,
        });
    }

    /// A sync operation in the current step. Locks are told with [`Run::lock`].
    pub fn sync(&mut self, process: Process, file: File, event: SyncEvent) {
        let (number, segment) = self.here(process);
        let steps = self.syncs.entry((process.0, file.0)).or_default();
        steps.push(SyncStep { number, segment, event });
    }

    /// A lock was granted: after every earlier unlock that excluded it.
    pub fn lock(&mut self, process: Process, file: File, range: ByteRange, kind: LockKind) {
        let mut heard: Vec<Moment> = Vec::new();
        if let Some(released) = self.locks.get(&file.0).filter(|_| !range.is_empty()) {
            for (_, r) in released.overlapping(range.to_std()) {
                let shared = r.shared.as_ref().filter(|_| kind == LockKind::Exclusive);
                let clocks = r.exclusive.iter().chain(shared);
                heard.extend(clocks.map(|c| Moment { clock: c.clone(), own: None }));
            }
        }
        heard.iter().for_each(|moment| self.after(process, moment));
        self.sync(process, file, SyncEvent::Lock);
    }

    /// A lock of that range and kind was given up.
    pub fn unlock(&mut self, process: Process, file: File, range: ByteRange, kind: LockKind) {
        self.sync(process, file, SyncEvent::Unlock);
        if range.is_empty() {
            return;
        }
        let moment = self.moment(process);
        let released = self.locks.entry(file.0).or_default();
        let mut pieces: Vec<(std::ops::Range<u64>, Released)> =
            released.gaps(&range.to_std()).map(|gap| (gap, Released::default())).collect();
        pieces.extend(
            released
                .overlapping(range.to_std())
                .map(|(at, r)| (at.start.max(range.start())..at.end.min(range.end()), r.clone())),
        );
        for (at, mut piece) in pieces {
            let side = match kind {
                LockKind::Shared => &mut piece.shared,
                LockKind::Exclusive => &mut piece.exclusive,
            };
            let mut clock = side.as_ref().map_or_else(|| vec![0; self.lines.len()], |c| c.to_vec());
            raise(&mut clock, &moment);
            *side = Some(clock.into());
            released.insert(at, piece);
        }
    }

    /// Everything that `process` has done, the current step included.
    #[must_use]
    pub fn moment(&self, process: Process) -> Moment {
        let line = &self.lines[process.0 as usize];
        Moment { clock: line.now.clone(), own: Some((process.0, line.steps)) }
    }

    /// What `process` does from here on, the rest of the current step included, comes after `moment`.
    pub fn after(&mut self, process: Process, moment: &Moment) {
        let own = process.0 as usize;
        let line = &mut self.lines[own];
        let other = |i: usize| i != own;
        let news = line.now.iter().zip(moment.clock.iter()).enumerate();
        let mut is_news = news.filter(|(i, _)| other(*i)).any(|(_, (mine, theirs))| mine < theirs);
        if let Some((process, steps)) = moment.own {
            is_news |= other(process as usize) && line.now[process as usize] < steps;
        }
        if !is_news {
            return;
        }
        let covers = |(i, (mine, theirs)): (usize, (&u32, &u32))| i == own || mine <= theirs;
        if moment.own.is_none() && line.now.iter().zip(moment.clock.iter()).enumerate().all(covers)
        {
            line.now = moment.clock.clone();
            return;
        }
        let mut clock = line.now.to_vec();
        raise(&mut clock, moment);
        line.now = clock.into();
    }

    /// The current step of a process and its segment.
    fn here(&mut self, process: Process) -> (u32, u32) {
        let line = self.line(process);
        if line.segments.last().is_none_or(|last| !Arc::ptr_eq(last, &line.now)) {
            line.segments.push(line.now.clone());
        }
        let segment = u32::try_from(line.segments.len() - 1).expect("not more than steps");
        (line.steps.saturating_sub(1), segment)
    }

    fn line(&mut self, process: Process) -> &mut Line {
        &mut self.lines[process.0 as usize]
    }

    pub(crate) fn take_accesses(&mut self) -> Vec<Access> {
        std::mem::take(&mut self.accesses)
    }

    pub(crate) fn syncs_of(&self, process: u32, file: u32) -> &[SyncStep] {
        self.syncs.get(&(process, file)).map_or(&[], Vec::as_slice)
    }

    /// Whether step `number` of `process` happens before what has this segment of `other`.
    pub(crate) fn before(&self, process: u32, number: u32, other: u32, segment: u32) -> bool {
        let clock = &self.lines[other as usize].segments[segment as usize];
        clock[process as usize] > number
    }

    pub(crate) fn same_view(&self, a: u32, b: u32) -> bool {
        let node = |p: u32| self.lines[p as usize].node;
        a == b || (node(a).is_some() && node(a) == node(b))
    }
}
