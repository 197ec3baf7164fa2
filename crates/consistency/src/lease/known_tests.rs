//! A pretend job of nodes that change and look up names and attributes of one directory: streams
//! that deliver late and in any order, break and lose; calls that are given up; changes that take
//! their time; nodes that stand still; a service that restarts. One question after every step: does
//! a node answer from its table what is older than what somebody has been told?

use super::*;
use crate::planted::{every_one_is_caught, healthy};
use ebb_types::{FileKind, Incarnation, Ino, Name, NodeId, Time, Version};
use std::collections::{BTreeMap, VecDeque};

const LEASE: u64 = 100;
const FRESH: u64 = 1_000_000;
const NODES: usize = 3;
const NAMES: usize = 3;
const DIR: Ino = Ino(1);

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// Answers tell of a change while somebody owes a lease of what it changed.
    TellAtOnce,
    /// A node answers what its own change on the way may have changed already.
    NoFlux,
    /// A node does not care for changes that it gave up waiting for.
    NoSpoil,
    /// The number of an own change's answer is taken before the change is done.
    NumberBeforeChange,
    /// All streams of a node are spared, and so is what was granted on a new one.
    SpareNode,
    /// A node keeps what it knows on a new stream.
    KeepOnNewStream,
}

fn name(n: usize) -> Name {
    Name::new(&[b'a' + n as u8]).unwrap()
}

fn attr(ino: Ino, value: u64) -> ebb_types::Attr {
    let (kind, time) = (FileKind::Regular, Time { sec: 0, nsec: 0 });
    ebb_types::Attr {
        ino,
        kind,
        perm: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        size: value,
        atime: time,
        mtime: time,
        ctime: time,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Name(usize),
    Attr(Ino),
}

/// What is true of a subject, at all times; and the newest that somebody was told.
#[derive(Default)]
struct History {
    values: Vec<u64>,
    told: usize,
}

#[derive(Clone, Debug)]
enum Op {
    Lookup(usize),
    GetAttr(Ino),
    /// Makes the name, or takes it away.
    Toggle(usize),
    Rename(usize, usize),
    Chmod(Ino),
    List,
}

#[derive(Clone, Debug)]
struct Request {
    id: u64,
    op: Op,
    /// The inodes that an own change names.
    declared: Vec<Ino>,
}

#[derive(Clone, Debug)]
struct Answer {
    id: u64,
    told: Vec<Told>,
    listing: Option<(Grant, Vec<(Name, Ino)>)>,
    /// What it tells, for the judge.
    subjects: Vec<(Subject, usize)>,
    inos: Vec<Ino>,
    upto: LeaseSeq,
}

#[derive(Clone, Debug)]
enum Up {
    Beat(u64),
    Ask(Request),
    Returned(Ino, LeaseSeq),
}

#[derive(Default)]
struct Stream {
    id: Option<StreamId>,
    up: VecDeque<Up>,
    answers: Vec<Answer>,
    beats: VecDeque<u64>,
    notices: VecDeque<(Ino, LeaseSeq)>,
}

struct Waiting {
    asked: Option<super::Asked>,
    change: Option<Change>,
}

#[derive(Default)]
struct Node {
    trust: Trust,
    known: Known,
    stream: Stream,
    waits: BTreeMap<u64, Waiting>,
}

/// A change that the service has begun.
struct Running {
    stream: StreamId,
    node: usize,
    request: Request,
    early: Vec<LeaseSeq>,
    done: bool,
}

struct Job {
    now: u64,
    service: Leases,
    names: [Option<Ino>; NAMES],
    values: BTreeMap<Ino, u64>,
    past: BTreeMap<Subject, History>,
    next_ino: u64,
    next_id: u64,
    nodes: [Node; NODES],
    running: Vec<Running>,
    held_back: Vec<(usize, StreamId, Answer)>,
    random: u64,
    bug: Option<Bug>,
    used: usize,
}

impl Job {
    fn new(seed: u64, bug: Option<Bug>) -> Job {
        let mut job = Job {
            now: 1000,
            service: Leases::new(LEASE, &[], 1000),
            names: [None; NAMES],
            values: BTreeMap::from([(DIR, 1)]),
            past: BTreeMap::new(),
            next_ino: 2,
            next_id: 1,
            nodes: Default::default(),
            running: Vec::new(),
            held_back: Vec::new(),
            random: (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            bug,
            used: 0,
        };
        (0..NAMES).for_each(|n| job.note(Subject::Name(n), 0));
        job.note(Subject::Attr(DIR), 1);
        (0..NODES).for_each(|n| job.reconnect(n));
        job
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % n
    }

    fn note(&mut self, subject: Subject, value: u64) {
        self.past.entry(subject).or_default().values.push(value);
    }

    fn newest(&self, subject: Subject) -> usize {
        self.past[&subject].values.len() - 1
    }

    fn some_ino(&mut self) -> Ino {
        let n = self.below(NAMES as u64 + 1) as usize;
        self.names.get(n).copied().flatten().unwrap_or(DIR)
    }

    fn step(&mut self) {
        let n = self.below(NODES as u64) as usize;
        match self.below(100) {
            0..8 => self.now += self.below(LEASE / 24),
            8 if self.below(6) == 0 => self.now += self.below(LEASE),
            9 if self.below(4) == 0 => self.reconnect(n),
            10 if self.bug.is_none() && self.below(30) == 0 => self.restart(),
            11..19 => {
                let sent = self.now;
                self.nodes[n].stream.up.push_back(Up::Beat(sent));
            }
            19..38 => self.ask(n),
            38..60 => self.serve(n),
            60..66 => self.go_on(),
            66..80 => self.receive(n),
            80..86 => {
                if let Some(sent) = self.nodes[n].stream.beats.pop_front() {
                    self.nodes[n].trust.answered(sent, self.now);
                }
            }
            86..95 => self.hear(n),
            95 => self.give_up_waiting(n),
            96 => {
                let ino = self.some_ino();
                self.nodes[n].known.drop_inode(ino);
            }
            97 => drop(self.service.sweep(self.now)),
            _ => {}
        }
        self.let_go();
    }

    fn reconnect(&mut self, n: usize) {
        if let Some(id) = self.nodes[n].stream.id {
            self.service.left(id);
        }
        let party = Party { node: NodeId(n as u32 + 1), life: Incarnation(7) };
        let id = self.service.join(party, LEASE, self.now).0;
        let keep = self.bug == Some(Bug::KeepOnNewStream);
        let node = &mut self.nodes[n];
        node.stream = Stream { id: Some(id), ..Stream::default() };
        if !keep || node.trust == Trust::default() {
            node.trust.begin(LEASE);
        }
        for (_, wait) in std::mem::take(&mut node.waits) {
            Job::end(self.bug, node, &wait, Outcome::Unknown);
        }
    }

    fn restart(&mut self) {
        let before: Vec<NodeId> = (0..NODES).map(|n| NodeId(n as u32 + 1)).collect();
        self.service = Leases::new(LEASE, &before, self.now);
        self.running.clear();
        self.held_back.clear();
        (0..NODES).for_each(|n| self.nodes[n].stream.id = None);
        (0..NODES).for_each(|n| self.nodes[n].stream.up.clear());
        (0..NODES).for_each(|n| self.reconnect(n));
    }

    fn ask(&mut self, n: usize) {
        let (a, ino) = (self.below(NAMES as u64) as usize, self.some_ino());
        let b = (a + 1 + self.below(NAMES as u64 - 1) as usize) % NAMES;
        let op = match self.below(12) {
            0..4 => Op::Lookup(a),
            4..7 => Op::GetAttr(ino),
            7..9 => Op::Toggle(a),
            9 => Op::Rename(a, b),
            10 => Op::Chmod(ino),
            _ => Op::List,
        };
        let node = &mut self.nodes[n];
        let believed = |n: usize| node.known.believed(DIR, &name(n));
        let (names, inos): (Vec<usize>, Vec<Ino>) = match &op {
            Op::Toggle(a) => (vec![*a], believed(*a).into_iter().collect()),
            Op::Rename(a, b) => {
                (vec![*a, *b], [believed(*a), believed(*b)].into_iter().flatten().collect())
            }
            Op::Chmod(ino) => (vec![], vec![*ino]),
            _ => (vec![], vec![]),
        };
        let change = Change { names: names.iter().map(|n| (DIR, name(*n))).collect(), inos };
        let asked = node.trust.epoch(self.now).map(|epoch| node.known.ask(epoch, self.now));
        let is_change = change != Change::default();
        if is_change && self.bug != Some(Bug::NoFlux) {
            node.known.begin(&change);
        }
        let id = self.next_id;
        self.next_id += 1;
        let mut declared = change.inos.clone();
        declared.extend((!change.names.is_empty()).then_some(DIR));
        node.waits.insert(id, Waiting { asked, change: is_change.then_some(change) });
        node.stream.up.push_back(Up::Ask(Request { id, op, declared }));
    }

    fn grant(&mut self, stream: StreamId, ino: Ino) -> Option<Grant> {
        let (seq, _) = self.service.grant_lightly(stream, ino, self.now)?;
        Some(Grant { seq, version: Version(0), compared: false })
    }

    fn tell(
        &mut self,
        stream: StreamId,
        ino: Ino,
        of: Option<usize>,
        answer: &mut Answer,
        attr_too: bool,
    ) {
        answer.inos.push(ino);
        let value = self.values.get(&ino).copied();
        let found = of.map(|n| Found { name: name(n), ino: self.names[n], complete: None });
        if let Some(n) = of {
            answer.subjects.push((Subject::Name(n), self.newest(Subject::Name(n))));
        }
        let attr = value.filter(|_| attr_too).map(|v| attr(ino, v));
        if attr.is_some() {
            answer.subjects.push((Subject::Attr(ino), self.newest(Subject::Attr(ino))));
        }
        if let Some(grant) = self.grant(stream, ino) {
            answer.told.push(Told { ino, grant, attr, found });
        }
    }

    fn serve(&mut self, n: usize) {
        let Some(id) = self.nodes[n].stream.id else { return };
        let Some(up) = self.nodes[n].stream.up.pop_front() else { return };
        self.service.heard(id, self.now);
        match up {
            Up::Beat(sent) => self.nodes[n].stream.beats.push_back(sent),
            Up::Returned(ino, seq) => drop(self.service.returned(id, ino, seq)),
            Up::Ask(request) => match request.op {
                Op::Lookup(_) | Op::GetAttr(_) | Op::List => self.look(n, id, &request),
                _ => {
                    let early = self.bug == Some(Bug::NumberBeforeChange);
                    let early = if early {
                        vec![self.grant(id, DIR).map_or(LeaseSeq(0), |g| g.seq)]
                    } else {
                        vec![]
                    };
                    self.running.push(Running { stream: id, node: n, request, early, done: false });
                    // Most are done at once.
                    if self.below(3) > 0 {
                        let last = self.running.len() - 1;
                        self.carry_out(last);
                        self.carry_out(last);
                    }
                }
            },
        }
    }

    fn answer(id: u64) -> Answer {
        let (told, subjects, inos) = Default::default();
        Answer { id, told, listing: None, subjects, inos, upto: LeaseSeq(0) }
    }

    fn look(&mut self, n: usize, stream: StreamId, request: &Request) {
        let mut answer = Job::answer(request.id);
        match request.op {
            Op::Lookup(a) => {
                if let Some(ino) = self.names[a] {
                    self.tell(stream, ino, None, &mut answer, true);
                }
                self.tell(stream, DIR, Some(a), &mut answer, false);
            }
            Op::GetAttr(ino) => self.tell(stream, ino, None, &mut answer, true),
            _ => {
                answer.inos.push(DIR);
                for n in 0..NAMES {
                    answer.subjects.push((Subject::Name(n), self.newest(Subject::Name(n))));
                }
                let all = (0..NAMES).filter_map(|n| Some((name(n), self.names[n]?))).collect();
                answer.listing = self.grant(stream, DIR).map(|grant| (grant, all));
            }
        }
        self.send(n, stream, answer);
    }

    fn send(&mut self, n: usize, stream: StreamId, mut answer: Answer) {
        answer.upto = self.service.last();
        self.held_back.push((n, stream, answer));
    }

    fn go_on(&mut self) {
        if !self.running.is_empty() {
            let at = self.below(self.running.len() as u64) as usize;
            self.carry_out(at);
        }
    }

    /// The next part of a change: it is done, or answered.
    fn carry_out(&mut self, at: usize) {
        if !self.running[at].done {
            self.running[at].done = true;
            let (op, stream) = (self.running[at].request.op.clone(), self.running[at].stream);
            let declared = self.running[at].request.declared.clone();
            return self.change(&op, stream, self.running[at].node, &declared);
        }
        let Running { stream, node, request, early, .. } = self.running.remove(at);
        let mut answer = Job::answer(request.id);
        match request.op {
            Op::Toggle(a) => self.tell(stream, DIR, Some(a), &mut answer, true),
            Op::Rename(a, b) => {
                self.tell(stream, DIR, Some(a), &mut answer, true);
                self.tell(stream, DIR, Some(b), &mut answer, true);
            }
            Op::Chmod(ino) if self.values.contains_key(&ino) => {
                self.tell(stream, ino, None, &mut answer, true);
            }
            _ => {}
        }
        if let (Some(seq), Some(told)) = (early.first(), answer.told.first_mut()) {
            told.grant.seq = *seq;
        }
        self.send(node, stream, answer);
    }

    fn change(&mut self, op: &Op, stream: StreamId, node: usize, declared: &[Ino]) {
        let mut changed = Vec::new();
        match *op {
            Op::Toggle(a) => match self.names[a] {
                Some(ino) => self.unlink(a, ino, &mut changed),
                None => {
                    let ino = Ino(self.next_ino);
                    self.next_ino += 1;
                    self.values.insert(ino, 1);
                    self.note(Subject::Attr(ino), 1);
                    self.set_name(a, Some(ino));
                }
            },
            Op::Rename(a, b) => {
                let Some(moved) = self.names[a] else { return };
                if let Some(victim) = self.names[b] {
                    self.unlink(b, victim, &mut changed);
                }
                self.set_name(b, Some(moved));
                self.set_name(a, None);
                self.touch(moved, &mut changed);
            }
            Op::Chmod(ino) if self.values.contains_key(&ino) => self.touch(ino, &mut changed),
            _ => return,
        }
        if !matches!(op, Op::Chmod(_)) {
            self.touch(DIR, &mut changed);
        }
        for ino in changed {
            let by = match self.bug {
                Some(Bug::SpareNode) => self.nodes[node].stream.id,
                _ => Some(stream),
            };
            for recall in self.service.change(ino, by, declared.contains(&ino), self.now) {
                let to = &mut self.nodes[recall.node.0 as usize - 1].stream;
                if to.id == Some(recall.stream) {
                    to.notices.push_back((ino, recall.seq));
                }
            }
        }
    }

    fn set_name(&mut self, n: usize, ino: Option<Ino>) {
        self.names[n] = ino;
        self.note(Subject::Name(n), ino.map_or(0, |i| i.0));
    }

    fn touch(&mut self, ino: Ino, changed: &mut Vec<Ino>) {
        let value = self.values.entry(ino).or_default();
        *value += 1;
        let value = *value;
        self.note(Subject::Attr(ino), value);
        changed.push(ino);
    }

    fn unlink(&mut self, n: usize, ino: Ino, changed: &mut Vec<Ino>) {
        self.set_name(n, None);
        // It may be open somewhere; its link count changes.
        self.touch(ino, changed);
        self.values.remove(&ino);
    }

    /// Answers go out when nobody owes what they tell.
    fn let_go(&mut self) {
        for (n, stream, answer) in std::mem::take(&mut self.held_back) {
            let owed = |ino: &Ino| self.service.owed(*ino, answer.upto, self.now);
            if answer.inos.iter().any(owed) && self.bug != Some(Bug::TellAtOnce) {
                self.held_back.push((n, stream, answer));
            } else if self.nodes[n].stream.id == Some(stream) {
                self.nodes[n].stream.answers.push(answer);
            }
        }
    }

    fn end(bug: Option<Bug>, node: &mut Node, wait: &Waiting, outcome: Outcome) {
        let Some(change) = &wait.change else { return };
        if bug == Some(Bug::NoFlux) {
            node.known.begin(change);
        }
        let unknown = outcome == Outcome::Unknown && bug == Some(Bug::NoSpoil);
        let outcome = if unknown { Outcome::Answered(Vec::new()) } else { outcome };
        node.known.end(change, wait.asked, outcome);
    }

    fn receive(&mut self, n: usize) {
        let count = self.nodes[n].stream.answers.len() as u64;
        if count == 0 {
            return;
        }
        let at = self.below(count) as usize;
        let bug = self.bug;
        let answer = self.nodes[n].stream.answers.remove(at);
        let node = &mut self.nodes[n];
        let Some(wait) = node.waits.remove(&answer.id) else { return };
        if wait.change.is_some() {
            Job::end(bug, node, &wait, Outcome::Answered(answer.told));
        } else if let Some(asked) = wait.asked {
            for told in answer.told {
                node.known.learn(asked, told);
            }
            if let Some((grant, all)) = answer.listing {
                node.known.listing_begins(asked, DIR, grant);
                node.known.listed(asked, DIR, grant, all);
            }
        }
        for (subject, at) in answer.subjects {
            let past = self.past.get_mut(&subject).expect("told");
            past.told = past.told.max(at);
        }
    }

    fn hear(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        if let Some((ino, seq)) = node.stream.notices.pop_front() {
            node.known.recall(ino, seq);
            node.stream.up.push_back(Up::Returned(ino, seq));
        }
    }

    fn give_up_waiting(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        let changing = node.waits.iter().find(|(_, w)| w.change.is_some()).map(|(id, _)| *id);
        if let Some(wait) = changing.and_then(|id| node.waits.remove(&id)) {
            Job::end(self.bug, node, &wait, Outcome::Unknown);
        }
    }

    /// What a node answers from its table must be as new as what anybody was told.
    fn judge(&mut self) -> Result<(), String> {
        for n in 0..NODES {
            let epoch = self.nodes[n].trust.epoch(self.now);
            for a in 0..NAMES {
                let known = self.nodes[n].known.name(DIR, &name(a), epoch, self.now, FRESH);
                if let Some(ino) = known {
                    self.check(n, Subject::Name(a), ino.map_or(0, |i| i.0))?;
                }
            }
            let inos: Vec<Ino> = self.names.iter().copied().flatten().chain([DIR]).collect();
            for ino in inos {
                if let Some(attr) = self.nodes[n].known.attr(ino, epoch, self.now, FRESH) {
                    self.check(n, Subject::Attr(ino), attr.size)?;
                }
            }
        }
        Ok(())
    }

    fn check(&mut self, n: usize, subject: Subject, value: u64) -> Result<(), String> {
        self.used += 1;
        let past = self.past.get_mut(&subject).expect("a subject");
        let since = past.told;
        match past.values[since..].iter().position(|v| *v == value) {
            // Who hears it here may tell others.
            Some(at) => past.told = since + at,
            None => {
                let now = &past.values[since..];
                return Err(format!("node {n} knows {subject:?} as {value}, told is {now:?}"));
            }
        }
        Ok(())
    }
}

fn run(seed: u64, bug: Option<Bug>) -> Result<usize, String> {
    let mut job = Job::new(seed, bug);
    for step in 0..500 {
        job.step();
        job.judge().map_err(|what| format!("seed {seed}, step {step}: {what}"))?;
    }
    Ok(job.used)
}

#[test]
fn nobody_answers_what_is_older_than_what_somebody_was_told() {
    let used = healthy(4000, run);
    assert!(used > 200_000, "the table must be of use: {used}");
}

#[test]
fn every_planted_bug_is_caught() {
    let bugs = [
        Bug::TellAtOnce,
        Bug::NoFlux,
        Bug::NoSpoil,
        Bug::NumberBeforeChange,
        Bug::SpareNode,
        Bug::KeepOnNewStream,
    ];
    every_one_is_caught(&bugs, 60_000, run);
}
