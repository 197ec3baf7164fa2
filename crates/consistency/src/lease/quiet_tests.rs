//! Quiet writes in a pretend job: one file, nodes that write aloud and quietly and look at it, streams
//! that deliver late, break and lose, nodes that stand still, a service that restarts. One question
//! whenever somebody looks: is what it is shown older than what was acknowledged before it asked?
//! An error instead of bytes of a node that does not answer is no lie.

use super::*;
use crate::ownership::{FileState, MapAnswer};
use crate::planted::{every_one_is_caught, healthy};
use crate::view::FileView;
use ebb_types::{ByteRange, Incarnation, Ino, NodeId, Version};
use std::collections::VecDeque;

const LEASE: u64 = 100;
const NODES: usize = 3;
const BYTES: usize = 24;
const FILE: Ino = Ino(1);

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// Others go on without waiting for the holder.
    SkipSettle,
    /// A node writes quietly although its trust has lapsed.
    IgnoreLapse,
    /// A lost holder's bytes do not become its own.
    ForgetConversion,
    /// What is told late is attached whatever others did since.
    SettleOverwrites,
    /// A lease is returned before everything was told.
    ReturnAtOnce,
    /// A restarted service takes a holder that it has not heard for lost.
    RestartForgets,
}

#[derive(Clone, Debug)]
enum Up {
    Beat { sent: u64 },
    Attach { sending: Sending, wish: u64 },
    Look { acked: [u64; BYTES] },
    Returned { seq: LeaseSeq },
}

#[derive(Clone, Debug)]
enum Down {
    Beat {
        sent: u64,
    },
    Attached {
        version: Version,
        size: u64,
        refused: Vec<ByteRange>,
        grant: Option<(LeaseSeq, u64)>,
    },
    Map(MapAnswer),
    Recall {
        seq: LeaseSeq,
    },
}

/// What an attach takes along.
#[derive(Clone, Debug, Default)]
struct Sending {
    aloud: Vec<ByteRange>,
    quiet: Vec<ByteRange>,
    untold: Untold,
    tells: bool,
    epoch: Option<u64>,
}

#[derive(Default)]
struct Stream {
    id: Option<StreamId>,
    up: VecDeque<Up>,
    answers: VecDeque<Down>,
    notices: VecDeque<Down>,
}

struct Node {
    trust: Trust,
    lease: FileLease,
    quiet: QuietWrites,
    view: FileView,
    /// Which write each byte of its cache is of.
    content: [u64; BYTES],
    sending: Option<Sending>,
    to_return: Vec<LeaseSeq>,
    stream: Stream,
    /// It does nothing, and answers nobody.
    stands_until: u64,
}

struct Job {
    now: u64,
    leases: Leases,
    file: FileState,
    granted: Option<(StreamId, LeaseSeq)>,
    waiting: Vec<(usize, StreamId, Up)>,
    nodes: Vec<Node>,
    /// The newest write of each byte that was acknowledged.
    acked: [u64; BYTES],
    writes: u64,
    quiet_writes: usize,
    random: u64,
    bug: Option<Bug>,
    wrong: Option<String>,
}

fn party(n: usize) -> Party {
    Party { node: NodeId(n as u32 + 1), life: Incarnation(7) }
}

fn each(ranges: &[ByteRange]) -> impl Iterator<Item = usize> + '_ {
    ranges.iter().flat_map(|r| r.to_std()).map(|b| b as usize)
}

fn split(ranges: &[ByteRange], marked: &[ByteRange]) -> (Vec<ByteRange>, Vec<ByteRange>) {
    let one = |b: usize| ByteRange::at(b as u64, 1);
    let inside = |b: &usize| marked.iter().any(|m| m.contains_offset(*b as u64));
    let (inner, outer): (Vec<usize>, Vec<usize>) = each(ranges).partition(inside);
    (outer.into_iter().map(one).collect(), inner.into_iter().map(one).collect())
}

impl Job {
    fn new(seed: u64, bug: Option<Bug>) -> Job {
        let node = |n: usize| Node {
            trust: Trust::default(),
            lease: FileLease::default(),
            quiet: QuietWrites::default(),
            view: FileView::new(party(n).node),
            content: [0; BYTES],
            sending: None,
            to_return: Vec::new(),
            stream: Stream::default(),
            stands_until: 0,
        };
        Job {
            now: 1000,
            leases: Leases::new(LEASE, &[], 1000),
            file: FileState::new(0),
            granted: None,
            waiting: Vec::new(),
            nodes: (0..NODES).map(node).collect(),
            acked: [0; BYTES],
            writes: 0,
            quiet_writes: 0,
            random: (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            bug,
            wrong: None,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % n
    }

    fn step(&mut self) {
        // Mostly one node, so that it is alone.
        let n = if self.below(7) == 0 { self.below(NODES as u64) as usize } else { 0 };
        let choice = self.below(100);
        match choice {
            0..6 => self.now += self.below(LEASE / 8),
            6 if self.below(2) == 0 => {
                self.nodes[n].stands_until = self.now + self.below(2 * LEASE)
            }
            7 if self.below(4) == 0 => self.reconnect(n),
            8 if self.below(8) == 0 => self.restart(),
            40..60 => self.serve(n),
            _ if self.nodes[n].stands_until > self.now => {}
            9..20 => {
                let sent = self.now;
                self.nodes[n].stream.up.push_back(Up::Beat { sent });
            }
            20..34 => self.write(n),
            34..40 if n > 0 || choice == 34 => self.look(n),
            60..80 => self.receive_answer(n),
            80..90 => self.receive_notice(n),
            90..95 => self.tell(n),
            _ => {}
        }
        self.go_on();
    }

    fn reconnect(&mut self, n: usize) {
        if let Some(id) = self.nodes[n].stream.id {
            self.leases.left(id);
        }
        let id = self.leases.join(party(n), LEASE, self.now).0;
        let node = &mut self.nodes[n];
        node.stream = Stream { id: Some(id), ..Stream::default() };
        node.trust.begin(LEASE);
        node.to_return.clear();
        // Unanswered requests are as good as failed here.
        if let Some(sending) = node.sending.take() {
            node.failed(&sending);
        }
    }

    fn restart(&mut self) {
        let all: Vec<NodeId> = (0..NODES).map(|n| party(n).node).collect();
        let before = if self.bug == Some(Bug::RestartForgets) { &[][..] } else { &all[..] };
        self.leases = Leases::new(LEASE, before, self.now);
        self.granted = None;
        self.waiting.clear();
        self.nodes.iter_mut().for_each(|n| n.stream = Stream::default());
    }

    // ---- nodes ---------------------------------------------------------------------------------

    fn write(&mut self, n: usize) {
        let start = self.below(BYTES as u64 - 4);
        let range = ByteRange::at(start, 1 + self.below(4));
        let (now, bug) = (self.now, self.bug);
        let node = &mut self.nodes[n];
        let epoch = match bug {
            Some(Bug::IgnoreLapse) => node.trust.clone().epoch(0),
            _ => node.trust.epoch(now),
        };
        if node.quiet.allows(range, &node.view, epoch) {
            self.writes += 1;
            self.quiet_writes += 1;
            node.view.write(range);
            node.quiet.wrote(range);
            for b in each(&[range]) {
                node.content[b] = self.writes;
                self.acked[b] = self.writes;
            }
            return;
        }
        if node.sending.is_none() && node.stream.id.is_some() {
            node.view.write(range);
            node.quiet.wrote_aloud(range);
            // Told and acknowledged by the answer; a write that failed may be there or not.
            self.send(n, true);
        }
    }

    fn tell(&mut self, n: usize) {
        let node = &self.nodes[n];
        let owes = node.quiet.must_tell(node.trust.epoch(self.now));
        if owes && node.sending.is_none() && node.stream.id.is_some() {
            self.send(n, false);
        }
    }

    fn send(&mut self, n: usize, wishes: bool) {
        let wish = if wishes && self.below(4) > 0 { BYTES as u64 } else { 0 };
        let node = &mut self.nodes[n];
        let taken = node.view.take_unattached(ByteRange::ALL);
        let tells = node.quiet.is_some() || wish > 0;
        let untold = if tells { node.quiet.tell() } else { Untold::default() };
        let (aloud, quiet) = split(&taken, &untold.ranges);
        let epoch = node.trust.epoch(self.now);
        let sending = Sending { aloud, quiet, untold, tells, epoch };
        node.sending = Some(sending.clone());
        node.stream.up.push_back(Up::Attach { sending, wish });
    }

    fn look(&mut self, n: usize) {
        let acked = self.acked;
        let node = &mut self.nodes[n];
        if !node.quiet.must_tell(node.trust.epoch(self.now)) && node.sending.is_none() {
            node.stream.up.push_back(Up::Look { acked });
        }
    }

    fn receive_answer(&mut self, n: usize) {
        let now = self.now;
        let node = &mut self.nodes[n];
        match node.stream.answers.pop_front() {
            Some(Down::Beat { sent }) => node.trust.answered(sent, now),
            Some(Down::Attached { version, size, refused, grant }) => {
                let Some(sending) = node.sending.take() else { return };
                let (quiet, refused) = split(&sending.quiet, &refused);
                node.quiet.heard();
                node.view.not_attached(&refused);
                node.view.attached(&[sending.aloud.clone(), quiet].concat(), version, size);
                match (grant, sending.epoch) {
                    (Some((seq, end)), Some(epoch)) => {
                        let (compared, window) = (false, ByteRange::new(size, end.max(size)));
                        if node.lease.granted(Grant { seq, version, compared }, epoch) {
                            node.quiet.granted(Held { seq, epoch, version, window });
                        }
                    }
                    (Some(_), None) => {}
                    (None, _) if sending.tells => node.quiet.told(),
                    (None, _) => {}
                }
                if node.quiet.wants_map(&node.view) {
                    node.stream.up.push_back(Up::Look { acked: self.acked });
                }
                for b in each(&sending.aloud) {
                    // Another one may have written there since, and been acknowledged.
                    self.acked[b] = self.acked[b].max(node.content[b]);
                }
            }
            Some(Down::Map(answer)) => drop(node.view.apply(&answer)),
            _ => {}
        }
        self.return_told(n);
    }

    fn receive_notice(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        if let Some(Down::Recall { seq }) = node.stream.notices.pop_front() {
            node.lease.recall(seq);
            node.quiet.recall(seq);
            node.to_return.push(seq);
        }
        if self.bug != Some(Bug::ReturnAtOnce) {
            self.tell(n);
        }
        self.return_told(n);
    }

    fn return_told(&mut self, n: usize) {
        let bug = self.bug;
        let node = &mut self.nodes[n];
        if !node.quiet.has_untold() || bug == Some(Bug::ReturnAtOnce) {
            let returns = std::mem::take(&mut node.to_return);
            node.stream.up.extend(returns.into_iter().map(|seq| Up::Returned { seq }));
        }
    }

    // ---- the service ---------------------------------------------------------------------------

    fn serve(&mut self, n: usize) {
        let Some(id) = self.nodes[n].stream.id else {
            if self.nodes[n].stands_until <= self.now {
                self.reconnect(n);
            }
            return;
        };
        let Some(request) = self.nodes[n].stream.up.pop_front() else { return };
        self.leases.heard(id, self.now);
        match request {
            Up::Beat { sent } => self.nodes[n].stream.answers.push_back(Down::Beat { sent }),
            Up::Returned { seq } => {
                let newer = |(on, at): (StreamId, LeaseSeq)| on == id && at > seq;
                if !self.granted.is_some_and(newer) {
                    self.file.end_quiet(party(n).node);
                }
                self.leases.returned(id, FILE, seq);
            }
            request => self.waiting.push((n, id, request)),
        }
    }

    /// Does what waits and need not any more.
    fn go_on(&mut self) {
        for (n, id, request) in std::mem::take(&mut self.waiting) {
            if self.nodes[n].stream.id != Some(id) {
                continue;
            }
            if self.bug != Some(Bug::SkipSettle) && !self.settled(party(n).node) {
                self.waiting.push((n, id, request));
                continue;
            }
            match request {
                Up::Attach { sending, wish } => self.attach(n, id, &sending, wish),
                Up::Look { acked } => self.show(n, &acked),
                Up::Beat { .. } | Up::Returned { .. } => {}
            }
        }
    }

    fn settled(&mut self, asker: NodeId) -> bool {
        let Some(holder) = self.file.quiet().map(|q| q.node).filter(|h| *h != asker) else {
            return true;
        };
        for recall in self.leases.demand(FILE, holder, self.now) {
            let to = &mut self.nodes[recall.node.0 as usize - 1].stream;
            if to.id == Some(recall.stream) {
                to.notices.push_back(Down::Recall { seq: recall.seq });
            }
        }
        if self.leases.trusted_until(holder, self.now).is_some() {
            return false;
        }
        match self.bug {
            Some(Bug::ForgetConversion) => self.file.end_quiet(holder),
            _ => drop(self.file.lapse()),
        }
        true
    }

    fn attach(&mut self, n: usize, id: StreamId, sending: &Sending, wish: u64) {
        let me = party(n).node;
        let (granted, refused) = match self.bug {
            Some(Bug::SettleOverwrites) => (sending.quiet.clone(), Vec::new()),
            _ => self.file.judge_quiet(me, &sending.quiet, sending.untold.since),
        };
        let mut all = sending.aloud.clone();
        all.extend(granted);
        self.file.attach(me, &all);
        // What is told aloud is a new write from now on.
        for b in each(&sending.aloud) {
            self.writes += 1;
            self.nodes[n].content[b] = self.writes;
        }
        let mut grant = None;
        if sending.tells {
            self.file.take_back(me);
            let alone = self.file.quiet().is_none_or(|q| q.node == me);
            if wish > 0 && alone && self.leases.lends_alone(id, FILE, self.now) {
                self.file.lend_quiet(me, wish);
                let lent = self.leases.grant(id, FILE);
                grant = lent.map(|(seq, _)| (seq, wish));
                self.granted = lent.map(|(seq, _)| (id, seq));
            } else {
                self.file.end_quiet(me);
            }
        }
        let (version, size) = (self.file.version(), self.file.size());
        let answer = Down::Attached { version, size, refused, grant };
        self.nodes[n].stream.answers.push_back(answer);
    }

    /// What a node is shown: bytes of an owner that stands still are an error.
    fn show(&mut self, n: usize, acked: &[u64; BYTES]) {
        for (b, acked) in acked.iter().enumerate() {
            let range = ByteRange::at(b as u64, 1);
            let owner = self.file.owned_in(range).next().map(|o| o.node.0 as usize - 1);
            let dirty = !self.nodes[n].view.unattached(range).is_empty();
            let shown = match owner {
                // A write of its own that is under way, or failed.
                _ if dirty && !self.nodes[n].knows_its_bytes(self.now) => continue,
                _ if dirty => self.nodes[n].content[b],
                None => 0,
                Some(o) if self.nodes[o].stands_until > self.now => continue,
                Some(o) if !self.nodes[o].view.local(range) => continue,
                Some(o) => self.nodes[o].content[b],
            };
            if shown < *acked {
                self.wrong =
                    Some(format!("node {n} is shown write {shown} of byte {b}, not {acked}"));
            }
        }
        let answer = self.file.query(ByteRange::ALL, Version::ZERO);
        self.nodes[n].stream.answers.push_back(Down::Map(answer));
    }
}

impl Node {
    fn knows_its_bytes(&self, now: u64) -> bool {
        self.sending.is_none() && self.quiet.is_held(self.trust.epoch(now))
    }

    fn failed(&mut self, sending: &Sending) {
        self.view.attach_failed(&sending.aloud);
        self.view.attach_failed(&sending.quiet);
        if sending.tells {
            self.quiet.not_told(&sending.untold);
        }
    }
}

/// Runs a job; how many quiet writes there were, or what went wrong.
fn run(seed: u64, bug: Option<Bug>) -> Result<usize, String> {
    let mut job = Job::new(seed, bug);
    (0..NODES).for_each(|n| job.reconnect(n));
    for step in 0..1500 {
        job.step();
        if let Some(what) = job.wrong.take() {
            return Err(format!("seed {seed}, step {step}: {what}"));
        }
    }
    // Whoever waits is served once the time of every holder is over.
    job.now += 2 * LEASE;
    job.go_on();
    if !job.waiting.is_empty() {
        return Err(format!("seed {seed}: {} requests are never answered", job.waiting.len()));
    }
    Ok(job.quiet_writes)
}

#[test]
fn nobody_is_shown_what_is_older_than_acknowledged() {
    let quiet = healthy(4000, run);
    assert!(quiet > 10_000, "it must be of use: {quiet}");
}

#[test]
fn every_planted_bug_is_caught() {
    let bugs = [
        Bug::SkipSettle,
        Bug::IgnoreLapse,
        Bug::ForgetConversion,
        Bug::SettleOverwrites,
        Bug::ReturnAtOnce,
        Bug::RestartForgets,
    ];
    every_one_is_caught(&bugs, 30_000, run);
}

/// Nobody waits for what was never acknowledged; and it is told with the older of two versions.
#[test]
fn what_failed_is_told_as_what_was_written_quietly() {
    let mut quiet = QuietWrites::default();
    let (first, second) = (ByteRange::new(0, 10), ByteRange::new(20, 30));
    quiet.failed(&[first], Version(7));
    quiet.failed(&[second], Version(5));
    assert!(quiet.must_tell(None) && !quiet.has_untold());
    let untold = quiet.tell();
    assert_eq!((untold.ranges.as_slice(), untold.since), (&[first, second][..], Version(5)));
    assert!(!quiet.has_untold() && untold.failed == untold.ranges);
    quiet.not_told(&untold);
    // It is written again, and that succeeds; the rest is cut off.
    quiet.wrote_aloud(first);
    assert_eq!(quiet.tell().ranges, [second]);
    quiet.failed(&[second], Version(9));
    quiet.cut(0);
    quiet.told();
    assert!(!quiet.is_some());
}
