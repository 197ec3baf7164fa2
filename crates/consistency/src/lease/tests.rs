//! Both halves of the lease protocol in a pretend job: streams that deliver late, break and lose;
//! nodes that stand still; a service that restarts. One question after every step: does a node
//! trust something that is older than what another node's change was acknowledged with?

use super::*;
use crate::planted::{every_one_is_caught, healthy};
use ebb_types::{Incarnation, Ino, NodeId, Version};
use std::collections::VecDeque;

const LEASE: u64 = 100;
const NODES: usize = 3;
const FILES: usize = 2;

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// A change is acknowledged although somebody owes a lease.
    AckAtOnce,
    /// A node counts its trust from when the sign of life was answered.
    TrustFromAnswer,
    /// A node takes a grant that was recalled before it came.
    ForgetRecalls,
    /// The service looks at the file first and takes the grant's number later.
    GrantAfterLook,
    /// A node keeps its leases on a new stream.
    KeepOnNewStream,
    /// A restarted service knows of nobody.
    RestartForgets,
}

#[derive(Clone, Debug)]
enum Up {
    Beat { sent: u64 },
    Ask { file: usize, epoch: Option<u64> },
    Change { file: usize },
    Returned { file: usize, seq: LeaseSeq },
}

#[derive(Clone, Debug)]
enum Down {
    Beat { sent: u64 },
    Answer { file: usize, value: u64, grant: Option<Grant>, epoch: Option<u64> },
    Recall { file: usize, seq: LeaseSeq },
}

#[derive(Default)]
struct Stream {
    id: Option<StreamId>,
    up: VecDeque<Up>,
    answers: VecDeque<Down>,
    notices: VecDeque<Down>,
    /// Looked at, but not granted yet (a bug).
    looked: Vec<(usize, u64, Option<u64>)>,
}

#[derive(Default)]
struct Node {
    trust: Trust,
    leases: [FileLease; FILES],
    seen: [u64; FILES],
    stream: Stream,
}

struct Job {
    now: u64,
    service: Leases,
    /// The value of each file, its changes that wait for an acknowledgement, and the newest
    /// acknowledged one of each node.
    value: [u64; FILES],
    waiting: Vec<(usize, usize, u64, LeaseSeq)>,
    acked: [[u64; NODES]; FILES],
    nodes: [Node; NODES],
    random: u64,
    bug: Option<Bug>,
    used: usize,
}

impl Job {
    fn new(seed: u64, bug: Option<Bug>) -> Job {
        Job {
            now: 1000,
            service: Leases::new(LEASE, &[], 1000),
            value: [1; FILES],
            waiting: Vec::new(),
            acked: [[0; NODES]; FILES],
            nodes: Default::default(),
            random: (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            bug,
            used: 0,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % n
    }

    fn party(n: usize) -> Party {
        Party { node: NodeId(n as u32 + 1), life: Incarnation(7) }
    }

    fn step(&mut self) {
        let n = self.below(NODES as u64) as usize;
        let file = self.below(FILES as u64) as usize;
        match self.below(100) {
            0..10 => self.now += self.below(LEASE / 16),
            10 if self.below(3) == 0 => self.now += self.below(LEASE),
            11 => self.reconnect(n),
            12 if self.bug.is_none_or(|b| b == Bug::RestartForgets) && self.below(4) == 0 => {
                self.restart();
            }
            13..25 => self.nodes[n].stream.up.push_back(Up::Beat { sent: self.now }),
            25..35 => {
                let epoch = self.nodes[n].trust.epoch(self.now);
                self.nodes[n].stream.up.push_back(Up::Ask { file, epoch });
            }
            35..40 => self.nodes[n].stream.up.push_back(Up::Change { file }),
            40..70 => self.serve(n),
            70..83 => self.receive_answer(n),
            83..93 => self.receive_notice(n),
            93 => self.give_up(n, file),
            94 => drop(self.service.sweep(self.now)),
            _ => self.grant_late(n),
        }
        self.acknowledge();
    }

    fn reconnect(&mut self, n: usize) {
        if let Some(id) = self.nodes[n].stream.id {
            self.service.left(id);
        }
        let id = self.service.join(Job::party(n), LEASE, self.now).0;
        self.nodes[n].stream = Stream { id: Some(id), ..Stream::default() };
        if self.bug != Some(Bug::KeepOnNewStream) || self.nodes[n].trust == Trust::default() {
            self.nodes[n].trust.begin(LEASE);
        }
    }

    fn restart(&mut self) {
        let ids: Vec<NodeId> = (0..NODES).map(|n| Job::party(n).node).collect();
        let known = if self.bug.is_some() { &[][..] } else { &ids[..] };
        self.service = Leases::new(LEASE, known, self.now);
        self.waiting.clear();
        self.nodes.iter_mut().for_each(|n| n.stream = Stream::default());
    }

    fn serve(&mut self, n: usize) {
        let Some(id) = self.nodes[n].stream.id else { return };
        let Some(request) = self.nodes[n].stream.up.pop_front() else { return };
        self.service.heard(id, self.now);
        match request {
            Up::Beat { sent } => self.nodes[n].stream.answers.push_back(Down::Beat { sent }),
            Up::Ask { file, epoch } if self.bug == Some(Bug::GrantAfterLook) => {
                let value = self.value[file];
                self.nodes[n].stream.looked.push((file, value, epoch));
            }
            Up::Ask { file, epoch } => self.answer(n, file, self.value[file], epoch),
            Up::Change { file } => {
                self.value[file] += 1;
                let recalls = self.service.change(Ino(file as u64 + 1), Some(id), true, self.now);
                self.waiting.push((n, file, self.value[file], self.service.last()));
                for recall in recalls {
                    let to = &mut self.nodes[recall.node.0 as usize - 1].stream;
                    if to.id == Some(recall.stream) {
                        to.notices.push_back(Down::Recall { file, seq: recall.seq });
                    }
                }
            }
            Up::Returned { file, seq } => {
                self.service.returned(id, Ino(file as u64 + 1), seq);
            }
        }
    }

    fn answer(&mut self, n: usize, file: usize, value: u64, epoch: Option<u64>) {
        let Some(id) = self.nodes[n].stream.id else { return };
        let grant = self.service.grant(id, Ino(file as u64 + 1)).map(|(seq, _)| Grant {
            seq,
            version: Version(value),
            compared: false,
        });
        self.nodes[n].stream.answers.push_back(Down::Answer { file, value, grant, epoch });
    }

    fn grant_late(&mut self, n: usize) {
        if let Some((file, value, epoch)) = self.nodes[n].stream.looked.pop() {
            self.answer(n, file, value, epoch);
        }
    }

    fn receive_answer(&mut self, n: usize) {
        let (now, bug) = (self.now, self.bug);
        let node = &mut self.nodes[n];
        match node.stream.answers.pop_front() {
            Some(Down::Beat { sent }) => {
                let sent = if bug == Some(Bug::TrustFromAnswer) { now } else { sent };
                node.trust.answered(sent, now);
            }
            Some(Down::Answer { file, value, grant, epoch }) => {
                if let (Some(grant), Some(epoch)) = (grant, epoch)
                    && node.leases[file].granted(grant, epoch)
                {
                    node.seen[file] = value;
                }
            }
            _ => {}
        }
    }

    fn receive_notice(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        if let Some(Down::Recall { file, seq }) = node.stream.notices.pop_front() {
            let lease = &mut node.leases[file];
            if self.bug == Some(Bug::ForgetRecalls) {
                lease.give_up();
            } else {
                lease.recall(seq);
            }
            node.stream.up.push_back(Up::Returned { file, seq });
        }
    }

    fn give_up(&mut self, n: usize, file: usize) {
        let node = &mut self.nodes[n];
        if let Some(seq) = node.leases[file].give_up() {
            node.stream.up.push_back(Up::Returned { file, seq });
        }
    }

    fn acknowledge(&mut self) {
        for (n, file, value, upto) in std::mem::take(&mut self.waiting) {
            let owed = self.service.owed(Ino(file as u64 + 1), upto, self.now);
            if owed && self.bug != Some(Bug::AckAtOnce) {
                self.waiting.push((n, file, value, upto));
            } else {
                self.acked[file][n] = self.acked[file][n].max(value);
            }
        }
    }

    /// A node that trusts what others have changed since.
    fn wrong(&mut self) -> Option<String> {
        for (n, node) in self.nodes.iter().enumerate() {
            for (file, lease) in node.leases.iter().enumerate() {
                if !lease.holds(node.trust.epoch(self.now)) {
                    continue;
                }
                self.used += 1;
                let others = (0..NODES).filter(|o| *o != n).map(|o| self.acked[file][o]);
                let newest = others.max().unwrap_or(0);
                if node.seen[file] < newest {
                    let seen = node.seen[file];
                    return Some(format!(
                        "node {n} trusts {seen} of file {file}, {newest} is there"
                    ));
                }
            }
        }
        None
    }
}

/// Runs a job; how often a lease was valid, or what went wrong.
fn run(seed: u64, bug: Option<Bug>) -> Result<usize, String> {
    let mut job = Job::new(seed, bug);
    (0..NODES).for_each(|n| job.reconnect(n));
    for step in 0..600 {
        job.step();
        if let Some(what) = job.wrong() {
            return Err(format!("seed {seed}, step {step}: {what}"));
        }
    }
    // Whoever waits is served once the time of every holder is over.
    job.now += 2 * LEASE;
    job.acknowledge();
    if !job.waiting.is_empty() {
        return Err(format!("seed {seed}: {} changes are never acknowledged", job.waiting.len()));
    }
    job.service.sweep(job.now);
    let (held, owed) = job.service.counts();
    if (held, owed) != (0, 0) || !job.service.is_idle() {
        return Err(format!("seed {seed}: {held} held and {owed} owed after the end"));
    }
    Ok(job.used)
}

#[test]
fn nobody_trusts_what_was_changed_and_acknowledged() {
    let used = healthy(3000, run);
    assert!(used > 100_000, "leases must be of use: {used}");
}

#[test]
fn every_planted_bug_is_caught() {
    let bugs = [
        Bug::AckAtOnce,
        Bug::TrustFromAnswer,
        Bug::ForgetRecalls,
        Bug::GrantAfterLook,
        Bug::KeepOnNewStream,
        Bug::RestartForgets,
    ];
    every_one_is_caught(&bugs, 30_000, run);
}

fn grant(seq: u64, version: u64) -> Grant {
    Grant { seq: LeaseSeq(seq), version: Version(version), compared: false }
}

#[test]
fn a_map_older_than_the_grant_is_not_covered() {
    let mut lease = FileLease::default();
    assert!(lease.granted(grant(5, 9), 1));
    assert!(!lease.covers_map(Some(1), Version(8)) && lease.covers_map(Some(1), Version(9)));
    assert!(!lease.covers_map(Some(2), Version(9)), "another epoch");
    assert!(!lease.covers_map(None, Version(9)), "no trust");
    lease.recall(LeaseSeq(4));
    assert!(lease.holds(Some(1)), "an older recall");
    lease.recall(LeaseSeq(6));
    assert!(!lease.holds(Some(1)));
    assert!(!lease.granted(grant(5, 9), 1), "recalled before it came");
}

#[test]
fn files_that_others_can_change_are_compared() {
    let mut lease = FileLease::default();
    let compared = Grant { compared: true, ..grant(1, 1) };
    assert!(lease.granted(compared, 1));
    assert!(lease.covers_map(Some(1), Version(1)) && !lease.covers_open(Some(1), Version(1)));
}

#[test]
fn a_large_map_is_asked_for_wholly_after_some_parts() {
    let mut lease = FileLease::default();
    assert_eq!((0..9).filter(|_| lease.widen()).count(), 1);
    lease.recall(LeaseSeq(1));
    assert!(!lease.widen());
}

#[test]
fn a_node_that_holds_too_many_is_called_back_for_the_oldest() {
    let mut leases = Leases::new(LEASE, &[], 0);
    let id = leases.join(Job::party(0), LEASE, 0).0;
    let first = (1..=1 << 16).filter_map(|i| leases.grant(id, Ino(i))?.1).count();
    assert_eq!(first, 0);
    let (_, recall) = leases.grant(id, Ino(1 << 20)).expect("one more");
    assert_eq!(recall.map(|r| (r.ino, r.stream)), Some((Ino(1), id)));
    assert_eq!(leases.counts(), (1 << 16, 1));
}

#[test]
fn what_several_nodes_change_is_not_granted_lightly_for_a_while() {
    let mut leases = Leases::new(LEASE, &[], 0);
    let (a, b) = (leases.join(Job::party(0), LEASE, 0).0, leases.join(Job::party(1), LEASE, 0).0);
    let ino = Ino(5);
    assert!(leases.grant_lightly(a, ino, 0).is_some() && leases.grant_lightly(b, ino, 0).is_some());
    assert_eq!(leases.change(ino, Some(a), true, 10).len(), 1);
    assert!(leases.grant_lightly(b, ino, 11).is_none(), "just changed by another node");
    assert!(leases.grant_lightly(a, ino, 11).is_some(), "it has it");
    assert!(leases.grant_lightly(b, Ino(6), 11).is_some(), "another inode");
    assert!(leases.grant(b, ino).is_some(), "where it is wanted all the same");
    let later = 10 + LEASE / 8;
    assert!(leases.grant_lightly(b, ino, later).is_some());
    leases.sweep(later);
    assert_eq!(leases.change(ino, Some(a), true, later).len(), 1);
    // What a node finds out for itself alone is no contention.
    assert_eq!(leases.change(Ino(7), Some(a), false, later).len(), 0);
    assert!(leases.grant_lightly(a, Ino(7), later).is_some());
    assert_eq!(leases.change(Ino(7), Some(a), false, later).len(), 1);
    assert!(leases.grant_lightly(a, Ino(7), later).is_some());
}

/// Whoever takes over owes what the life before it has to tell, and must be answered before it can.
#[test]
fn what_a_stream_owes_holds_its_own_answers_only_if_it_was_granted_something() {
    let mut leases = Leases::new(LEASE, &[], 0);
    let party = |node, life| Party { node: NodeId(node), life: Incarnation(life) };
    let (ours, _) = leases.join(party(1, 1), LEASE, 0);
    let (other, _) = leases.join(party(2, 2), LEASE, 0);
    let ino = Ino(7);
    let recalls = leases.demand(ino, NodeId(1), 0);
    assert_eq!(recalls.iter().map(|r| r.stream).collect::<Vec<_>>(), [ours]);
    assert!(leases.believes_nothing(ours) && leases.believes_nothing(other));
    let upto = leases.last();
    assert_eq!(leases.blocking(ino, upto, Some(ours), 0), None);
    let blocking = leases.blocking(ino, upto, Some(other), 0).expect("others wait for it");
    assert_eq!(blocking, Blocking { seq: recalls[0].seq, until: LEASE });
    leases.grant(ours, Ino(8)).unwrap();
    assert!(!leases.believes_nothing(ours), "whatever it was granted may be what is changing");
    assert_eq!(leases.returned(ours, ino, recalls[0].seq), [blocking.seq]);
    assert!(!leases.owed(ino, leases.last(), 0));
}
