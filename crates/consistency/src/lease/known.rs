//! A node's side: what it knows of names and attributes under its leases, so that it need not ask.
//!
//! * **Facts are as of a number.** Every answer that tells something under a lease has the number of
//!   its grant, taken while the service looked. A recall ends all facts with smaller numbers, one by
//!   one: a newer grant of a directory does not make older names good that its answer did not tell.
//! * **Own changes** do not recall this node's leases. From before one is sent until it is answered
//!   ([`Known::begin`], [`Known::end`]) nothing it may change is told from here: others may have
//!   seen it already. Its answer tells what is true afterwards, with a number taken after it was
//!   done; older answers that come later count no more.
//! * **An own change without such an answer** (it failed, or is answered again after a reconnect)
//!   leaves nothing known of what it may have changed, nor do answers to questions before its end
//!   count. When it is not even known whether it will still be done, nothing is known on this stream
//!   any more: the service tells the stream that asked for a change of nothing.
//! * **Bounded.** What was not used for long is forgotten, half of everything at a time. What was
//!   remembered of recalls goes into one number for all that is not here ([`Known::floor`]).

use super::node::stream_of;
use super::{Grant, LeaseSeq};
use ebb_types::{Attr, Ino, Name};
use std::collections::HashMap;

/// Names and inodes that are remembered at most.
const FACTS_MAX: usize = 1 << 17;

/// After so many names in vain it may pay to learn all names of a directory, and after twice as
/// many again.
const MISSES_MIN: u32 = 4;

/// A question that is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    epoch: u64,
    number: u64,
    at: u64,
}

impl Asked {
    /// The epoch of [`super::Trust`] in which it was asked.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

/// An own change: which names of which directories, and which inodes besides these directories.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Directory and name.
    pub names: Vec<(Ino, Name)>,
    /// Inodes whose attributes change.
    pub inos: Vec<Ino>,
}

/// What an answer tells of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name.
    pub name: Name,
    /// What it means.
    pub ino: Option<Ino>,
    /// Whether the service has just made sure that it knows all names of the directory; none: it was
    /// not looked.
    pub complete: Option<bool>,
}

/// What an answer tells of an inode under a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// Which inode.
    pub ino: Ino,
    /// The lease.
    pub grant: Grant,
    /// Its attributes.
    pub attr: Option<Attr>,
    /// A name in it.
    pub found: Option<Found>,
}

/// How an own change ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was answered; what is true now, as far as the answer tells it.
    Answered(Vec<Told>),
    /// Nobody knows.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
struct Fact {
    attr: Attr,
    seq: LeaseSeq,
    epoch: u64,
    at: u64,
    compared: bool,
}

#[derive(Clone, Copy, Debug)]
struct Seat {
    ino: Option<Ino>,
    seq: LeaseSeq,
    at: u64,
}

/// Names of a directory, all told under one unbroken lease.
#[derive(Clone, Debug)]
struct Names {
    seats: HashMap<Name, Seat>,
    /// The number of the first of them.
    first: LeaseSeq,
    epoch: u64,
    /// Others can change the directory on the backing.
    compared: bool,
    /// Names that have no seat are not there; when the service last made sure of that.
    complete: Option<u64>,
    /// An own change of which only this much is known: it changed some name.
    doubt: LeaseSeq,
    misses: u32,
}

#[derive(Clone, Debug, Default)]
struct Entry {
    attr: Option<Fact>,
    names: Option<Box<Names>>,
    recalled: LeaseSeq,
    /// The newest own change.
    changed: LeaseSeq,
    /// Answers to questions up to this one do not count.
    barrier: u64,
    /// The stream on which it is not known what own changes may still come.
    spoilt: Option<u64>,
    /// Own changes on their way.
    flux: u32,
    flux_names: Vec<Name>,
}

impl Entry {
    fn is_busy(&self) -> bool {
        self.flux > 0 || self.spoilt.is_some()
    }

    fn weight(&self) -> usize {
        1 + self.names.as_ref().map_or(0, |n| n.seats.len())
    }

    fn forget(&mut self, barrier: u64) {
        (self.attr, self.names) = (None, None);
        self.barrier = barrier;
    }
}

/// The table.
#[derive(Debug)]
pub struct Known {
    young: HashMap<Ino, Entry>,
    old: HashMap<Ino, Entry>,
    /// Of what is in `young`, or more, and how much that may be.
    weight: usize,
    weight_max: usize,
    stream: u64,
    asked: u64,
    floor: LeaseSeq,
    barrier: u64,
}

impl Default for Known {
    fn default() -> Known {
        Known::with_capacity(FACTS_MAX)
    }
}

impl Known {
    /// A table of at most so many names and inodes.
    #[must_use]
    pub fn with_capacity(facts_max: usize) -> Known {
        Known {
            young: HashMap::new(),
            old: HashMap::new(),
            weight: 0,
            weight_max: facts_max / 2,
            stream: 0,
            asked: 0,
            floor: LeaseSeq(0),
            barrier: 0,
        }
    }

    /// How many inodes and names it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.young.values().chain(self.old.values()).map(Entry::weight).sum()
    }

    /// True when it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.young.is_empty() && self.old.is_empty()
    }

    /// No grant up to this number is good of an inode that is not in the table.
    #[must_use]
    pub fn floor(&self) -> LeaseSeq {
        self.floor
    }

    // ---- asking --------------------------------------------------------------------------------

    /// A question is about to be sent, in this epoch.
    pub fn ask(&mut self, epoch: u64, now: u64) -> Asked {
        self.turn_to(stream_of(epoch));
        self.asked += 1;
        Asked { epoch, number: self.asked, at: now }
    }

    /// On a new stream nothing of before counts, and numbers begin anew.
    fn turn_to(&mut self, stream: u64) {
        if stream <= self.stream {
            return;
        }
        self.stream = stream;
        self.floor = LeaseSeq(0);
        self.barrier = self.asked;
        self.young.extend(self.old.drain());
        self.young.retain(|_, e| e.flux > 0);
        for entry in self.young.values_mut() {
            entry.forget(0);
            (entry.recalled, entry.changed, entry.spoilt) = (LeaseSeq(0), LeaseSeq(0), None);
        }
        self.weight = self.young.len();
    }

    /// The attributes of an inode, when they need no question. `fresh`: for how long those are good
    /// that others can change on the backing.
    pub fn attr(&mut self, ino: Ino, epoch: Option<u64>, now: u64, fresh: u64) -> Option<Attr> {
        let entry = self.touch(ino)?;
        let fact = entry.attr.filter(|f| entry.flux == 0 && epoch == Some(f.epoch))?;
        let good = !fact.compared || now < fact.at.saturating_add(fresh);
        good.then_some(fact.attr)
    }

    /// What a name means, when that needs no question: nothing, or an inode. The inode counts only
    /// with its own attributes, whose lease tells when it has changed on the backing.
    pub fn name(
        &mut self,
        dir: Ino,
        name: &Name,
        epoch: Option<u64>,
        now: u64,
        fresh: u64,
    ) -> Option<Option<Ino>> {
        let entry = self.touch(dir)?;
        if entry.flux_names.contains(name) {
            return None;
        }
        let names = entry.names.as_ref().filter(|n| epoch == Some(n.epoch))?;
        let young = |at: u64| !names.compared || now < at.saturating_add(fresh);
        match names.seats.get(name) {
            Some(Seat { ino: Some(ino), .. }) => Some(Some(*ino)),
            Some(seat) if young(seat.at) => Some(None),
            _ => names.complete.filter(|at| young(*at)).map(|_| None),
        }
    }

    /// What the name is believed to mean by now, to be named in an own change.
    #[must_use]
    pub fn believed(&self, dir: Ino, name: &Name) -> Option<Ino> {
        self.get(dir)?.names.as_ref()?.seats.get(name)?.ino
    }

    /// A name was not found by a question. True when it pays to learn all names of the directory.
    pub fn missed(&mut self, dir: Ino, epoch: Option<u64>) -> bool {
        let Some(entry) = self.touch(dir) else { return false };
        let Some(names) = entry.names.as_mut().filter(|n| epoch == Some(n.epoch)) else {
            return false;
        };
        names.misses = names.misses.saturating_add(1);
        let many = names.misses >= MISSES_MIN && names.misses.is_power_of_two();
        names.complete.is_none() && many
    }

    // ---- learning ------------------------------------------------------------------------------

    /// An answer has come.
    pub fn learn(&mut self, asked: Asked, told: Told) {
        let Told { ino, grant, attr, found } = told;
        if !self.counts(asked, ino, grant.seq) {
            return;
        }
        if let Some(attr) = attr {
            self.put_attr(asked, ino, grant, attr);
        }
        if let Some(found) = found {
            self.put_name(asked, ino, grant, found);
        }
    }

    /// False for an answer that was overtaken before it came, by others or by this node.
    fn counts(&self, asked: Asked, ino: Ino, seq: LeaseSeq) -> bool {
        let changed = self.get(ino).map_or(LeaseSeq(0), |e| e.changed);
        seq > changed && self.is_good(asked, ino, seq)
    }

    /// False for an answer whose lease is over, or that may not know of an own change.
    fn is_good(&self, asked: Asked, ino: Ino, seq: LeaseSeq) -> bool {
        let here = stream_of(asked.epoch) == self.stream;
        if !here || asked.number <= self.barrier || seq <= self.floor {
            return false;
        }
        let good = |e: &Entry| {
            seq > e.recalled && asked.number > e.barrier && e.spoilt != Some(self.stream)
        };
        self.get(ino).is_none_or(good)
    }

    fn get(&self, ino: Ino) -> Option<&Entry> {
        self.young.get(&ino).or_else(|| self.old.get(&ino))
    }

    fn put_attr(&mut self, asked: Asked, ino: Ino, grant: Grant, attr: Attr) {
        let entry = self.entry(ino);
        let older = |f: Fact| f.epoch < asked.epoch || f.seq < grant.seq;
        if entry.attr.is_none_or(older) {
            let (epoch, at, compared) = (asked.epoch, asked.at, grant.compared);
            entry.attr = Some(Fact { attr, seq: grant.seq, epoch, at, compared });
        }
    }

    /// The names of a directory as far as they are known under the lease that this grant goes on with.
    fn names(&mut self, asked: Asked, dir: Ino, grant: Grant) -> &mut Names {
        let entry = self.entry(dir);
        let goes_on = |n: &Names| {
            n.epoch == asked.epoch && n.compared == grant.compared && n.first <= grant.seq
        };
        if !entry.names.as_deref().is_some_and(goes_on) {
            entry.names = None;
        }
        entry.names.get_or_insert_with(|| {
            Box::new(Names {
                seats: HashMap::new(),
                first: grant.seq,
                epoch: asked.epoch,
                compared: grant.compared,
                complete: None,
                doubt: LeaseSeq(0),
                misses: 0,
            })
        })
    }

    fn put_name(&mut self, asked: Asked, dir: Ino, grant: Grant, found: Found) {
        let names = self.names(asked, dir, grant);
        match (&mut names.complete, found.complete) {
            (Some(at), Some(true)) => *at = (*at).max(asked.at),
            // The service knew them all, and does not any more: the directory changed on the backing.
            (Some(at), Some(false)) if *at < asked.at => names.complete = None,
            _ => {}
        }
        if names.seats.get(&found.name).is_none_or(|s| s.seq < grant.seq) {
            let seat = Seat { ino: found.ino, seq: grant.seq, at: asked.at };
            let new = names.seats.insert(found.name, seat).is_none();
            self.grown(dir, usize::from(new));
        }
    }

    /// The first page of a listing has come.
    pub fn listing_begins(&mut self, asked: Asked, dir: Ino, grant: Grant) {
        if self.counts(asked, dir, grant.seq) {
            self.names(asked, dir, grant);
        }
    }

    /// The last page has come, and these are all names, from the first page that was `asked` for and
    /// granted as `first`. What this node changed meanwhile has seats of its own.
    pub fn listed(&mut self, asked: Asked, dir: Ino, first: Grant, all: Vec<(Name, Ino)>) {
        if !self.is_good(asked, dir, first.seq) || all.len() >= self.weight_max / 4 {
            return;
        }
        let Some(names) = self.entry(dir).names.as_mut() else { return };
        // One lease from the first page until now.
        let unbroken = names.epoch == asked.epoch && names.first <= first.seq;
        if !unbroken || names.doubt > first.seq {
            return;
        }
        let before = names.seats.len();
        names.seats.retain(|_, seat| seat.seq > first.seq);
        for (name, ino) in all {
            let seat = Seat { ino: Some(ino), seq: first.seq, at: asked.at };
            names.seats.entry(name).or_insert(seat);
        }
        names.complete = Some(asked.at);
        let grown = names.seats.len().saturating_sub(before);
        self.grown(dir, grown);
    }

    /// A directory that this node has made, and that nobody has changed since it was granted: it has
    /// no names.
    pub fn made(&mut self, asked: Asked, dir: Ino, grant: Grant) {
        if self.counts(asked, dir, grant.seq) {
            self.names(asked, dir, grant).complete = Some(asked.at);
        }
    }

    // ---- own changes ---------------------------------------------------------------------------

    /// An own change is about to be sent.
    pub fn begin(&mut self, change: &Change) {
        for (dir, name) in &change.names {
            let entry = self.entry(*dir);
            entry.flux += 1;
            entry.flux_names.push(name.clone());
        }
        for ino in &change.inos {
            self.entry(*ino).flux += 1;
        }
    }

    /// It is answered, or given up. `asked` is from when it was sent; none: without any trust.
    pub fn end(&mut self, change: &Change, asked: Option<Asked>, outcome: Outcome) {
        let told = match outcome {
            Outcome::Answered(told) => told,
            Outcome::Unknown => {
                let stream = self.stream;
                self.each(change, |e| e.spoilt = Some(stream));
                Vec::new()
            }
        };
        let mut certain: Vec<Ino> = Vec::new();
        for told in told {
            // (An own change that was done later does not make it void: both are known to be done.)
            if let Some(asked) = asked.filter(|a| self.is_good(*a, told.ino, told.grant.seq)) {
                certain.push(told.ino);
                self.take_own(asked, told);
            }
        }
        let barrier = self.asked;
        for (dir, name) in &change.names {
            let sure = certain.contains(dir);
            let entry = self.entry(*dir);
            entry.flux = entry.flux.saturating_sub(1);
            if let Some(at) = entry.flux_names.iter().position(|n| n == name) {
                entry.flux_names.swap_remove(at);
            }
            if !sure {
                entry.forget(barrier);
            }
        }
        for ino in &change.inos {
            let sure = certain.contains(ino);
            let entry = self.entry(*ino);
            entry.flux = entry.flux.saturating_sub(1);
            if !sure {
                entry.forget(barrier);
            }
        }
    }

    fn each(&mut self, change: &Change, what: impl Fn(&mut Entry)) {
        let dirs = change.names.iter().map(|(dir, _)| dir);
        for ino in dirs.chain(&change.inos) {
            what(self.entry(*ino));
        }
    }

    fn take_own(&mut self, asked: Asked, told: Told) {
        let Told { ino, grant, attr, found } = told;
        let entry = self.entry(ino);
        let last = entry.changed < grant.seq;
        entry.changed = entry.changed.max(grant.seq);
        match attr {
            Some(attr) => self.put_attr(asked, ino, grant, attr),
            None => entry.attr = None,
        }
        match found {
            Some(found) if last => self.put_name(asked, ino, grant, found),
            // Another own change of the directory was done after this one and answered before it,
            // perhaps of the same name.
            Some(found) => {
                if let Some(names) = &mut self.entry(ino).names {
                    names.seats.remove(&found.name);
                    names.complete = None;
                    names.doubt = names.doubt.max(grant.seq);
                }
            }
            None => {}
        }
    }

    // ---- the end of leases -----------------------------------------------------------------------

    /// The service calls back what was granted before `seq`.
    pub fn recall(&mut self, ino: Ino, seq: LeaseSeq) {
        let entry = match self.young.get_mut(&ino) {
            Some(entry) => entry,
            None => match self.old.get_mut(&ino) {
                Some(entry) => entry,
                // Answers on their way may have been granted before.
                None => return self.floor = self.floor.max(seq),
            },
        };
        entry.recalled = entry.recalled.max(seq);
        entry.attr = entry.attr.filter(|f| f.seq >= seq);
        if entry.names.as_ref().is_some_and(|n| n.first < seq) {
            entry.names = None;
        }
    }

    /// This node returns its lease of an inode, up to this number.
    pub fn give_up(&mut self, ino: Ino, seq: LeaseSeq) {
        self.recall(ino, LeaseSeq(seq.0 + 1));
    }

    /// The inode is of no interest any more.
    pub fn drop_inode(&mut self, ino: Ino) {
        let entry = self.young.remove(&ino).or_else(|| self.old.remove(&ino));
        match entry {
            Some(mut entry) if entry.is_busy() => {
                entry.forget(self.asked);
                self.young.insert(ino, entry);
            }
            Some(entry) => self.remember_of(&entry),
            None => {}
        }
    }

    // ---- memory --------------------------------------------------------------------------------

    fn remember_of(&mut self, entry: &Entry) {
        self.floor = self.floor.max(entry.recalled).max(entry.changed);
        self.barrier = self.barrier.max(entry.barrier);
    }

    fn touch(&mut self, ino: Ino) -> Option<&mut Entry> {
        if let Some(entry) = self.old.remove(&ino) {
            let weight = entry.weight();
            self.young.insert(ino, entry);
            self.grown(ino, weight);
        }
        self.young.get_mut(&ino)
    }

    fn entry(&mut self, ino: Ino) -> &mut Entry {
        if self.touch(ino).is_none() {
            self.young.insert(ino, Entry::default());
            self.grown(ino, 1);
        }
        self.young.entry(ino).or_default()
    }

    /// `ino` has become so much heavier: when it is too much, what was not used lately goes.
    fn grown(&mut self, ino: Ino, by: usize) {
        self.weight += by;
        if self.weight <= self.weight_max {
            return;
        }
        // What went since it was counted last.
        self.weight = self.young.values().map(Entry::weight).sum();
        if self.weight <= self.weight_max / 4 * 3 {
            return;
        }
        let last = self.young.remove_entry(&ino);
        let gone = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
        for (ino, entry) in gone {
            if entry.is_busy() {
                self.young.insert(ino, entry);
            } else {
                self.remember_of(&entry);
            }
        }
        self.young.extend(last);
        self.weight = self.young.values().map(Entry::weight).sum();
        // One directory alone can be too much.
        if self.weight > self.weight_max
            && let Some(entry) = self.young.get_mut(&ino)
        {
            entry.names = None;
            self.weight = self.young.values().map(Entry::weight).sum();
        }
    }
}
