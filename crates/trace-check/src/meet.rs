//! Where processes meet: messages, collective calls, beginnings and ends of children.

use crate::survey::{Channel, Point};
use ebb_consistency::run::{Gathering, Moment};
use ebb_trace_format::Flow;
use std::collections::HashMap;

/// What a process waits for before its next record can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Need {
    /// A record of another process.
    Record(Point),
    /// The end of a process.
    End(usize),
    /// A message: the how-manyth of a channel.
    Message(Channel, u64),
    /// Others in a collective call.
    Collective(u64, u64),
}

#[derive(Debug)]
struct Collective {
    flow: Flow,
    root: u32,
    size: u32,
    entered: u32,
    left: u32,
    is_rooted: bool,
    all: Gathering,
    by_rank: Vec<(u32, Moment)>,
}

/// A collective call that a process enters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub key: (u64, u64),
    pub rank: u32,
    pub size: u32,
    pub root: u32,
    pub flow: Flow,
}

/// What has happened and somebody may still hear of.
#[derive(Debug)]
pub(crate) struct Meetings {
    processes: usize,
    messages: HashMap<(Channel, u64), Moment>,
    sent: HashMap<Channel, u64>,
    collectives: HashMap<(u64, u64), Collective>,
}

impl Meetings {
    pub fn new(processes: usize) -> Meetings {
        let (messages, sent, collectives) = Default::default();
        Meetings { processes, messages, sent, collectives }
    }

    pub fn send(&mut self, channel: Channel, moment: Moment) -> Need {
        let number = self.sent.entry(channel).or_default();
        self.messages.insert((channel, *number), moment);
        *number += 1;
        Need::Message(channel, *number - 1)
    }

    /// What the message of that number tells, once.
    pub fn receive(&mut self, channel: Channel, number: u64) -> Option<Moment> {
        self.messages.remove(&(channel, number))
    }

    pub fn enter(&mut self, entry: Entry, moment: Moment) -> Need {
        let Entry { key, rank, size, root, flow } = entry;
        let processes = self.processes;
        let of = self.collectives.entry(key).or_insert_with(|| Collective {
            flow,
            root,
            size,
            entered: 0,
            left: 0,
            is_rooted: false,
            all: Gathering::new(processes),
            by_rank: Vec::new(),
        });
        of.entered += 1;
        match flow {
            Flow::All | Flow::ToRoot => of.all.add(&moment),
            Flow::FromRoot if rank == root => of.all.add(&moment),
            Flow::FromRoot => {}
            Flow::Prefix => of.by_rank.push((rank, moment)),
        }
        of.is_rooted |= rank == root;
        Need::Collective(key.0, key.1)
    }

    /// Whether that message was sent, and nobody has it yet.
    pub fn has(&self, channel: Channel, number: u64) -> bool {
        self.messages.contains_key(&(channel, number))
    }

    /// Whether all have come whom this rank hears of.
    pub fn may_leave(&self, key: (u64, u64), rank: u32) -> bool {
        self.collectives.get(&key).is_some_and(|of| match of.flow {
            Flow::All => of.entered >= of.size,
            Flow::FromRoot => of.is_rooted,
            Flow::ToRoot => rank != of.root || of.entered >= of.size,
            Flow::Prefix => of.by_rank.iter().filter(|(r, _)| *r < rank).count() >= rank as usize,
        })
    }

    /// What a rank hears of in a call that it leaves.
    pub fn leave(&mut self, key: (u64, u64), rank: u32) -> Vec<Moment> {
        let Some(of) = self.collectives.get_mut(&key) else { return Vec::new() };
        let heard = match of.flow {
            Flow::All | Flow::FromRoot => vec![of.all.moment()],
            Flow::ToRoot if rank == of.root => vec![of.all.moment()],
            Flow::ToRoot => Vec::new(),
            Flow::Prefix => {
                let lower = of.by_rank.iter().filter(|(r, _)| *r < rank);
                lower.map(|(_, m)| m.clone()).collect()
            }
        };
        of.left += 1;
        if of.left >= of.size {
            self.collectives.remove(&key);
        }
        heard
    }
}
