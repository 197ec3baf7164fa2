//! The lock table: fcntl(2) byte-range locks and flock(2) locks of all nodes, with waiting. Pure:
//! the driver answers the requests that an operation reports as granted.
//!
//! Fairness: waiting requests of one file are granted in the order they came, except that nobody
//! who holds a lock waits behind somebody who merely waits; that alone could deadlock. A request
//! that would deadlock over held fcntl locks is refused.

use ebb_types::{ByteRange, Ino, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The two universes of locks, which do not see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Space {
    /// fcntl(2).
    Posix,
    /// flock(2).
    Flock,
}

/// Who holds a lock: an owner as its node's kernel numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Owner {
    /// The node.
    pub node: NodeId,
    /// The owner on that node.
    pub id: u64,
}

/// Shared or exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Others may read too.
    Read,
    /// Nobody else.
    Write,
}

/// A lock, held or wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// Whose.
    pub owner: Owner,
    /// The process, for F_GETLK.
    pub pid: u32,
    /// Which bytes.
    pub range: ByteRange,
    /// How.
    pub kind: Kind,
}

impl Lock {
    fn conflicts(&self, other: &Lock) -> bool {
        self.owner != other.owner
            && self.range.overlaps(other.range)
            && (self.kind == Kind::Write || other.kind == Kind::Write)
    }
}

/// Identifies a waiting request; chosen by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A request that waited and has its lock now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Which request.
    pub ticket: Ticket,
    /// The file.
    pub ino: Ino,
    /// The universe.
    pub space: Space,
    /// The lock.
    pub lock: Lock,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has the lock; so have these others, because it gave something up (write to read).
    Granted(Vec<Granted>),
    /// Somebody else has it.
    Conflict(Lock),
    /// It waits.
    Waiting,
    /// It would wait for ever (EDEADLK).
    Deadlock,
}

type Key = (Ino, Space);

#[derive(Clone, Debug, Default)]
struct File {
    held: Vec<Lock>,
    waiting: Vec<(Ticket, Lock)>,
}

/// All locks of the job.
#[derive(Clone, Debug, Default)]
pub struct LockTable {
    files: BTreeMap<Key, File>,
    /// How many locks an owner holds.
    counts: BTreeMap<Owner, usize>,
    tickets: BTreeMap<Ticket, Key>,
}

impl LockTable {
    /// An empty table.
    #[must_use]
    pub fn new() -> LockTable {
        LockTable::default()
    }

    /// The first lock of somebody else that is in the way (F_GETLK).
    #[must_use]
    pub fn conflict(&self, ino: Ino, space: Space, wanted: &Lock) -> Option<Lock> {
        let held = &self.files.get(&(ino, space))?.held;
        held.iter().filter(|h| h.conflicts(wanted)).min_by_key(|h| h.range.start()).copied()
    }

    /// Takes a lock, or waits for it when there is a ticket to wait with.
    pub fn set(&mut self, ino: Ino, space: Space, wanted: Lock, wait: Option<Ticket>) -> Outcome {
        let key = (ino, space);
        match (self.conflict(ino, space, &wanted), wait) {
            (Some(held), None) => return Outcome::Conflict(held),
            (Some(_), Some(_)) if space == Space::Posix && self.deadlocks(key, &wanted) => {
                return Outcome::Deadlock;
            }
            (Some(_), Some(ticket)) => return self.wait(key, ticket, wanted),
            (None, Some(ticket)) if self.must_queue(key, &wanted, usize::MAX) => {
                return self.wait(key, ticket, wanted);
            }
            (None, _) => {}
        }
        self.force(ino, space, wanted);
        Outcome::Granted(self.wake(BTreeSet::from([key]), wanted.owner))
    }

    /// Gives up what an owner holds of a range; returns who got a lock by that.
    pub fn unlock(
        &mut self,
        ino: Ino,
        space: Space,
        owner: Owner,
        range: ByteRange,
    ) -> Vec<Granted> {
        self.force_unlock(ino, space, owner, range);
        self.wake(BTreeSet::from([(ino, space)]), owner)
    }

    /// A request stops waiting. `None` when it does not wait (any more).
    pub fn cancel(&mut self, ticket: Ticket) -> Option<Vec<Granted>> {
        let key = self.tickets.remove(&ticket)?;
        let file = self.files.get_mut(&key)?;
        let at = file.waiting.iter().position(|(t, _)| *t == ticket)?;
        let (_, lock) = file.waiting.remove(at);
        Some(self.wake(BTreeSet::from([key]), lock.owner))
    }

    /// Everything of an owner in a file goes, waiting requests too (their tickets come first).
    pub fn release_owner(
        &mut self,
        ino: Ino,
        space: Space,
        owner: Owner,
    ) -> (Vec<Ticket>, Vec<Granted>) {
        let gone = self.drop_waiting(|key, lock| key == (ino, space) && lock.owner == owner);
        (gone, self.unlock(ino, space, owner, ByteRange::ALL))
    }

    /// Everything of a node goes.
    pub fn release_node(&mut self, node: NodeId) -> (Vec<Ticket>, Vec<Granted>) {
        if !self.holds_any(node) && self.tickets.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let gone = self.drop_waiting(|_, lock| lock.owner.node == node);
        let mut touched = BTreeSet::new();
        for (key, file) in &mut self.files {
            file.held.retain(|l| l.owner.node != node);
            touched.insert(*key);
        }
        self.counts.retain(|o, _| o.node != node);
        (gone, self.wake(touched, Owner { node, id: 0 }))
    }

    /// Nobody on a node waits any more; its locks stay.
    pub fn end_waits(&mut self, node: NodeId) -> (Vec<Ticket>, Vec<Granted>) {
        if self.tickets.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let touched = self.files.keys().copied().collect();
        let gone = self.drop_waiting(|_, lock| lock.owner.node == node);
        (gone, self.wake(touched, Owner { node, id: 0 }))
    }

    /// A file is gone, with its locks; its waiting requests are returned.
    pub fn drop_file(&mut self, ino: Ino) -> Vec<Ticket> {
        let gone = self.drop_waiting(|key, _| key.0 == ino);
        for space in [Space::Posix, Space::Flock] {
            if let Some(file) = self.files.remove(&(ino, space)) {
                file.held.iter().for_each(|l| self.count(l.owner, -1));
            }
        }
        gone
    }

    /// Makes a lock held without asking: replay, and the last step of taking one.
    pub fn force(&mut self, ino: Ino, space: Space, lock: Lock) {
        self.force_unlock(ino, space, lock.owner, lock.range);
        if lock.range.is_empty() {
            return;
        }
        let mut whole = lock;
        let held = &mut self.files.entry((ino, space)).or_default().held;
        let touches = |h: &Lock, w: &Lock| {
            (h.owner, h.pid, h.kind) == (w.owner, w.pid, w.kind)
                && h.range.start() <= w.range.end()
                && w.range.start() <= h.range.end()
        };
        let mut merged = 0;
        while let Some(at) = held.iter().position(|h| touches(h, &whole)) {
            let other = held.swap_remove(at);
            merged += 1;
            whole.range = ByteRange::new(
                whole.range.start().min(other.range.start()),
                whole.range.end().max(other.range.end()),
            );
        }
        held.push(whole);
        self.count(lock.owner, 1 - merged);
    }

    /// Gives up without waking anybody: replay.
    pub fn force_unlock(&mut self, ino: Ino, space: Space, owner: Owner, range: ByteRange) {
        let Some(file) = self.files.get_mut(&(ino, space)) else { return };
        let mut kept = Vec::with_capacity(file.held.len() + 1);
        let before = file.held.len() as isize;
        for lock in file.held.drain(..) {
            if lock.owner != owner || !lock.range.overlaps(range) {
                kept.push(lock);
                continue;
            }
            let left = ByteRange::new(lock.range.start(), range.start());
            let right = ByteRange::new(range.end(), lock.range.end());
            kept.extend(
                [left, right].iter().filter(|r| !r.is_empty()).map(|r| Lock { range: *r, ..lock }),
            );
        }
        file.held = kept;
        let by = file.held.len() as isize - before;
        if file.held.is_empty() && file.waiting.is_empty() {
            self.files.remove(&(ino, space));
        }
        self.count(owner, by);
    }

    /// Every lock that is held, in a fixed order.
    pub fn held(&self) -> impl Iterator<Item = (Ino, Space, Lock)> {
        self.files.iter().flat_map(|((ino, space), file)| {
            let mut held = file.held.clone();
            held.sort_by_key(|l| (l.owner, l.range));
            held.into_iter().map(|l| (*ino, *space, l))
        })
    }

    /// True when somebody holds a lock of the file, or waits for one.
    #[must_use]
    pub fn has_file(&self, ino: Ino) -> bool {
        self.files.range((ino, Space::Posix)..).next().is_some_and(|((of, _), _)| *of == ino)
    }

    /// True when the node holds any lock.
    #[must_use]
    pub fn holds_any(&self, node: NodeId) -> bool {
        let (first, last) = (Owner { node, id: 0 }, Owner { node, id: u64::MAX });
        self.counts.range(first..=last).next().is_some()
    }

    fn count(&mut self, owner: Owner, by: isize) {
        let count = self.counts.entry(owner).or_default();
        *count = count.saturating_add_signed(by);
        if *count == 0 {
            self.counts.remove(&owner);
        }
    }

    fn wait(&mut self, key: Key, ticket: Ticket, lock: Lock) -> Outcome {
        self.files.entry(key).or_default().waiting.push((ticket, lock));
        self.tickets.insert(ticket, key);
        Outcome::Waiting
    }

    fn drop_waiting(&mut self, gone: impl Fn(Key, &Lock) -> bool) -> Vec<Ticket> {
        let mut out = Vec::new();
        for (key, file) in &mut self.files {
            file.waiting.retain(|(ticket, lock)| {
                let goes = gone(*key, lock);
                if goes {
                    out.push(*ticket);
                }
                !goes
            });
        }
        for ticket in &out {
            self.tickets.remove(ticket);
        }
        out
    }

    /// True when an earlier waiting request (of the first `before`) wants what conflicts with
    /// `wanted`, whose owner holds nothing.
    fn must_queue(&self, key: Key, wanted: &Lock, before: usize) -> bool {
        let Some(file) = self.files.get(&key) else { return false };
        !self.counts.contains_key(&wanted.owner)
            && file.waiting.iter().take(before).any(|(_, w)| w.conflicts(wanted))
    }

    /// True when a chain of owners who wait for owners who hold leads back to the asker.
    fn deadlocks(&self, key: Key, wanted: &Lock) -> bool {
        let mut seen = BTreeSet::new();
        let mut next = self.blockers(key, wanted);
        while let Some(owner) = next.pop() {
            if owner == wanted.owner {
                return true;
            }
            if seen.insert(owner) {
                next.extend(self.waits_for(owner));
            }
        }
        false
    }

    fn waits_for(&self, owner: Owner) -> Vec<Owner> {
        let mine = |((_, space), _): &(&Key, &File)| *space == Space::Posix;
        let files = self.files.iter().filter(mine);
        files
            .flat_map(|(key, f)| f.waiting.iter().map(move |(_, l)| (*key, l)))
            .filter(|(_, l)| l.owner == owner)
            .flat_map(|(key, l)| self.blockers(key, l))
            .collect()
    }

    fn blockers(&self, key: Key, wanted: &Lock) -> Vec<Owner> {
        let held = self.files.get(&key).map_or(&[][..], |f| &f.held);
        held.iter().filter(|h| h.conflicts(wanted)).map(|h| h.owner).collect()
    }

    /// Grants what can be granted in the files that changed. Whoever got a lock no longer queues
    /// behind others elsewhere, so the files where it waits are looked at again.
    fn wake(&mut self, mut files: BTreeSet<Key>, changed: Owner) -> Vec<Granted> {
        let mut out = Vec::new();
        files.extend(self.waiting_files(changed));
        while let Some(key) = files.pop_first() {
            while let Some((ticket, lock)) = self.next_grantable(key) {
                self.tickets.remove(&ticket);
                self.force(key.0, key.1, lock);
                out.push(Granted { ticket, ino: key.0, space: key.1, lock });
                files.extend(self.waiting_files(lock.owner).into_iter().filter(|k| *k != key));
            }
            if self.files.get(&key).is_some_and(|f| f.held.is_empty() && f.waiting.is_empty()) {
                self.files.remove(&key);
            }
        }
        out
    }

    fn waiting_files(&self, owner: Owner) -> Vec<Key> {
        let waits = |f: &File| f.waiting.iter().any(|(_, l)| l.owner == owner);
        if self.tickets.is_empty() {
            return Vec::new();
        }
        self.files.iter().filter(|(_, f)| waits(f)).map(|(k, _)| *k).collect()
    }

    fn next_grantable(&mut self, key: Key) -> Option<(Ticket, Lock)> {
        let file = self.files.get(&key)?;
        let at = file.waiting.iter().enumerate().position(|(i, (_, lock))| {
            !file.held.iter().any(|h| h.conflicts(lock)) && !self.must_queue(key, lock, i)
        })?;
        Some(self.files.get_mut(&key)?.waiting.remove(at))
    }
}

#[cfg(test)]
#[path = "locks_tests.rs"]
mod tests;
