//! Who may hold locks of one file at the service, as far as this node knows. Pure.
//!
//! An owner is what the kernel says it is: a process (of record locks), or an open file description
//! (of `flock` and of `F_OFD_SETLK`). It is noted *before* the service is asked and leaves the book
//! before its locks are given back, so whatever comes of the request, the end of the owner ends the lock:
//!
//! | event | who leaves the book |
//! |---|---|
//! | `close` of any descriptor by a process (FLUSH has the owner) | that process, whatever handles it locked through |
//! | the last descriptor of a handle is gone (RELEASE) | who locked through it and is still there: descriptions |
//! | this node was given up ([`LockBook::lose`]) | everybody; their handles and processes are *broken* |
//!
//! That a RELEASE comes late does no harm: a process that locks again meanwhile does so through another
//! handle. What could not be given back is *owed*, and given back before its owner locks again. So is
//! what may have been granted to an owner that was told of an error, and knows of no lock.
//!
//! Broken handles and owners fail until they are closed: others may have had the lock meanwhile.

use ebb_meta_client::LockKind;
use ebb_types::ByteRange;
use rangemap::RangeMap;

/// Whose lock, as the kernel numbers them. `flock` and record locks do not see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockOwner {
    /// The kernel's number.
    pub id: u64,
    /// Of `flock`.
    pub flock: bool,
}

/// An owner, and the handles through which it has locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Who.
    pub owner: LockOwner,
    /// Through which handles.
    pub through: Vec<u64>,
    /// Requests that are not answered yet.
    asking: u32,
    /// Requests ever.
    asked: u32,
    /// It may have a lock.
    held: bool,
    /// What it has, as far as this daemon has seen it locked.
    locks: RangeMap<u64, HeldAs>,
    /// A daemon before this one may have seen more.
    inherited: bool,
}

/// How a range is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldAs {
    /// Shared or not.
    pub kind: LockKind,
    /// The process, for whoever asks.
    pub pid: u32,
}

impl Holder {
    fn new(owner: LockOwner) -> Holder {
        let (through, locks) = (Vec::new(), RangeMap::new());
        Holder { owner, through, asking: 0, asked: 0, held: false, locks, inherited: false }
    }

    /// What it holds.
    pub fn locks(&self) -> impl Iterator<Item = (ByteRange, HeldAs)> + '_ {
        self.locks.iter().map(|(range, held)| (ByteRange::new(range.start, range.end), *held))
    }

    /// True when that is certain: no answer is awaited, and nothing is from before.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        self.asking == 0 && !self.inherited
    }
}

/// All of one file.
#[derive(Debug, Default)]
pub struct LockBook {
    holders: Vec<Holder>,
    owed: Vec<Holder>,
    broken_handles: Vec<u64>,
    broken_processes: Vec<u64>,
}

impl LockBook {
    fn holder(&mut self, owner: LockOwner, handle: u64) -> &mut Holder {
        let known = self.holders.iter().position(|h| h.owner == owner);
        let at = known.unwrap_or_else(|| {
            self.holders.push(Holder::new(owner));
            self.holders.len() - 1
        });
        let holder = &mut self.holders[at];
        if !holder.through.contains(&handle) {
            holder.through.push(handle);
        }
        holder
    }

    /// Somebody is about to lock something through a handle.
    pub fn asks(&mut self, owner: LockOwner, handle: u64) {
        let holder = self.holder(owner, handle);
        holder.asking += 1;
        holder.asked = holder.asked.wrapping_add(1);
    }

    /// That was answered. `refused`: certainly not granted.
    pub fn answered(&mut self, owner: LockOwner, handle: u64, refused: bool) {
        let known = self.holders.iter().position(|h| h.owner == owner);
        match known {
            // Its owner has closed meanwhile, and the service heard that first.
            None if !refused => self.holder(owner, handle).held = true,
            None => {}
            Some(at) => {
                let holder = &mut self.holders[at];
                holder.asking = holder.asking.saturating_sub(1);
                holder.held |= !refused;
                if !holder.held && holder.asking == 0 {
                    self.holders.swap_remove(at);
                }
            }
        }
    }

    /// An owner has locked a range. (One that has closed meanwhile has left the book.)
    pub fn locked(&mut self, owner: LockOwner, range: ByteRange, held: HeldAs) {
        if let Some(holder) = self.holders.iter_mut().find(|h| h.owner == owner) {
            holder.locks.insert(range.to_std(), held);
        }
    }

    /// True when an owner has no lock that this daemon knows of, and there is none that it does not.
    #[must_use]
    pub fn holds_nothing(&self, owner: LockOwner) -> bool {
        let holder = self.holders.iter().find(|h| h.owner == owner);
        holder.is_none_or(|h| h.is_certain() && h.locks.iter().next().is_none())
    }

    /// An owner was told that it has no lock, which the service may have granted all the same: it
    /// is owed, unless the owner has others. True when it is.
    pub fn failed(&mut self, owner: LockOwner) -> bool {
        let known = self.holders.iter().position(|h| h.owner == owner);
        let Some(at) = known.filter(|_| self.holds_nothing(owner)) else { return false };
        let holder = self.holders.swap_remove(at);
        self.owe(holder);
        true
    }

    /// An owner is giving a range back.
    pub fn unlocks(&mut self, owner: LockOwner, range: ByteRange) {
        if let Some(holder) = self.holders.iter_mut().find(|h| h.owner == owner) {
            holder.locks.remove(range.to_std());
        }
    }

    /// Everybody who may have locks.
    pub fn holders(&self) -> impl Iterator<Item = &Holder> {
        self.holders.iter()
    }

    /// An owner (a daemon that died knew it) may have locks.
    pub fn inherit(&mut self, owner: LockOwner, handle: u64) {
        let holder = self.holder(owner, handle);
        (holder.held, holder.inherited) = (true, true);
    }

    /// How often an owner has asked, for [`LockBook::unlocked`].
    #[must_use]
    pub fn asked(&self, owner: LockOwner) -> u32 {
        self.holders.iter().find(|h| h.owner == owner).map_or(0, |h| h.asked)
    }

    /// An owner has given everything back, and had asked so often before.
    pub fn unlocked(&mut self, owner: LockOwner, asked: u32) {
        self.holders.retain(|h| h.owner != owner || h.asking > 0 || h.asked != asked);
    }

    /// True when this process may hold record locks.
    #[must_use]
    pub fn process_holds(&self, process: u64) -> bool {
        self.holders.iter().any(|h| !h.owner.flock && h.owner.id == process)
    }

    /// True when there is nothing to be thought of.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
            && self.owed.is_empty()
            && self.broken_handles.is_empty()
            && self.broken_processes.is_empty()
    }

    /// A process closes a descriptor of the file: its record locks go.
    pub fn closes(&mut self, process: u64) -> Option<Holder> {
        let at = self.holders.iter().position(|h| !h.owner.flock && h.owner.id == process)?;
        Some(self.holders.swap_remove(at))
    }

    /// A handle is gone: so are the locks taken through it that nobody has given back.
    pub fn released(&mut self, handle: u64) -> Vec<Holder> {
        self.broken_handles.retain(|h| *h != handle);
        self.holders.extract_if(.., |h| h.through.contains(&handle)).collect()
    }

    /// The locks of somebody who left the book are still to be given back.
    pub fn owe(&mut self, holder: Holder) {
        self.owed.push(holder);
    }

    /// What is to be given back of an owner; of anybody.
    #[must_use]
    pub fn owed(&self, owner: Option<LockOwner>) -> Option<LockOwner> {
        self.owed.iter().map(|h| h.owner).find(|o| owner.is_none_or(|owner| owner == *o))
    }

    /// It was given back. The handles of which nothing of this owner's need be remembered.
    pub fn given_back(&mut self, owner: LockOwner) -> Vec<u64> {
        let gone: Vec<Holder> = self.owed.extract_if(.., |h| h.owner == owner).collect();
        let now = self.holders.iter().find(|h| h.owner == owner);
        let again = |handle: &u64| now.is_some_and(|h| h.through.contains(handle));
        gone.into_iter().flat_map(|h| h.through).filter(|handle| !again(handle)).collect()
    }

    /// The locks of this node were given up. True when there were any.
    pub fn lose(&mut self) -> bool {
        let mut lost = std::mem::take(&mut self.holders);
        lost.retain(|h| h.held);
        for Holder { owner, through, .. } in &lost {
            // The number of a description means nothing to reads and writes.
            if !owner.flock && !self.broken_processes.contains(&owner.id) {
                self.broken_processes.push(owner.id);
            }
            for handle in through {
                if !self.broken_handles.contains(handle) {
                    self.broken_handles.push(*handle);
                }
            }
        }
        let any = !lost.is_empty();
        // The service may not have given them up, or not yet.
        self.owed.extend(lost);
        any
    }

    /// What comes through these handles fails.
    #[must_use]
    pub fn broken_handles(&self) -> &[u64] {
        &self.broken_handles
    }

    /// A daemon that died knew that the locks of this handle were given up.
    pub fn break_handle(&mut self, handle: u64) {
        if !self.broken_handles.contains(&handle) {
            self.broken_handles.push(handle);
        }
    }

    /// True when what comes through this handle, or from this process, must fail.
    #[must_use]
    pub fn is_broken(&self, handle: u64, process: Option<u64>) -> bool {
        self.broken_handles.contains(&handle)
            || process.is_some_and(|p| self.broken_processes.contains(&p))
    }

    /// A process has closed a descriptor, and was told: it may begin anew with another handle.
    pub fn told(&mut self, process: u64) {
        self.broken_processes.retain(|p| *p != process);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const fn process(id: u64) -> LockOwner {
        LockOwner { id, flock: false }
    }

    impl LockBook {
        fn note(&mut self, owner: LockOwner, handle: u64) {
            self.asks(owner, handle);
            self.answered(owner, handle, false);
        }
    }

    #[test]
    fn who_was_refused_or_has_unlocked_holds_nothing() {
        let mut book = LockBook::default();
        book.asks(process(7), 1);
        assert!(book.process_holds(7), "it may be granted by now");
        book.answered(process(7), 1, true);
        assert!(book.is_empty());
        book.note(process(7), 1);
        let asked = book.asked(process(7));
        book.asks(process(7), 1);
        book.unlocked(process(7), asked);
        assert!(book.process_holds(7), "it asked again meanwhile");
        book.answered(process(7), 1, false);
        book.unlocked(process(7), book.asked(process(7)));
        assert!(book.is_empty());
    }

    #[test]
    fn what_failed_is_owed_unless_its_owner_has_other_locks() {
        let mut book = LockBook::default();
        let write = HeldAs { kind: LockKind::Write, pid: 3 };
        assert!(book.holds_nothing(process(7)));
        book.asks(process(7), 1);
        book.asks(process(7), 1);
        book.answered(process(7), 1, false);
        assert!(!book.failed(process(7)), "another request is not answered");
        book.answered(process(7), 1, false);
        assert!(book.failed(process(7)));
        assert_eq!((book.owed(None), book.process_holds(7)), (Some(process(7)), false));
        assert_eq!(book.given_back(process(7)), [1]);
        book.note(process(7), 1);
        book.locked(process(7), ByteRange::new(0, 10), write);
        assert!(!book.failed(process(7)), "what it has must stay");
        book.inherit(process(8), 1);
        assert!(!book.failed(process(8)), "it may have had one before");
    }

    #[test]
    fn a_lock_that_comes_after_the_close_of_its_owner_is_known() {
        let mut book = LockBook::default();
        book.asks(process(7), 1);
        assert!(book.closes(7).is_some());
        book.answered(process(7), 1, false);
        assert!(book.process_holds(7));
    }

    #[test]
    fn what_an_owner_holds_is_known_by_range() {
        let mut book = LockBook::default();
        let (owner, write) = (process(7), HeldAs { kind: LockKind::Write, pid: 3 });
        let locks = |book: &LockBook| -> Vec<(u64, u64)> {
            let holder = book.holders().find(|h| h.owner == owner);
            holder.map_or_else(Vec::new, |h| h.locks().map(|(r, _)| (r.start(), r.end())).collect())
        };
        book.asks(owner, 1);
        assert!(!book.holders().next().expect("asks").is_certain(), "no answer yet");
        book.answered(owner, 1, false);
        book.locked(owner, ByteRange::new(0, 100), write);
        book.unlocks(owner, ByteRange::new(40, 60));
        assert_eq!(locks(&book), [(0, 40), (60, 100)]);
        assert!(book.holders().all(Holder::is_certain));
        // Who has left the book when the answer comes holds nothing that is told.
        book.closes(7);
        book.locked(owner, ByteRange::new(0, 9), write);
        assert_eq!(locks(&book), []);
        book.inherit(owner, 2);
        assert!(!book.holders().next().expect("inherited").is_certain());
    }

    #[test]
    fn a_late_release_of_an_old_handle_takes_nothing_of_a_new_one() {
        let mut book = LockBook::default();
        book.note(process(7), 1);
        let old = book.closes(7).unwrap();
        book.note(process(7), 2);
        book.owe(old);
        assert_eq!(book.released(1), vec![]);
        assert!(book.process_holds(7));
        assert_eq!(book.given_back(process(7)), vec![1]);
        assert!(book.process_holds(7));
    }

    #[test]
    fn descriptions_end_with_their_handle_and_with_no_close() {
        let mut book = LockBook::default();
        let flock = LockOwner { id: 9, flock: true };
        book.note(flock, 1);
        book.note(process(8), 1);
        assert_eq!(book.closes(9), None, "a process of the same number");
        let released = book.released(1);
        assert_eq!(released.iter().map(|h| h.owner).collect::<Vec<_>>(), [flock, process(8)]);
        assert!(book.is_empty());
    }

    #[test]
    fn what_was_given_up_breaks_handle_and_process_until_they_are_closed() {
        let mut book = LockBook::default();
        book.note(process(7), 1);
        assert!(book.lose() && !book.lose());
        assert!(book.is_broken(1, None) && book.is_broken(2, Some(7)));
        assert!(!book.is_broken(2, Some(6)));
        book.told(7);
        assert!(book.is_broken(1, Some(7)) && !book.is_broken(2, Some(7)));
        book.released(1);
        assert!(!book.is_broken(1, Some(7)));
        assert_eq!(book.owed(None), Some(process(7)), "in case that it was not given up");
        book.given_back(process(7));
        assert!(book.is_empty());
    }

    proptest! {
        /// Against the obvious model: a set of (process, handle), in which a close takes all of a
        /// process, and a release what is left of a handle together with its owners.
        #[test]
        fn the_book_holds_whom_posix_says(
            steps in prop::collection::vec((0_u8..3, 1_u64..4, 1_u64..5), 0..60),
        ) {
            let (mut book, mut model) = (LockBook::default(), BTreeSet::new());
            for (step, who, handle) in steps {
                match step {
                    0 => {
                        book.note(process(who), handle);
                        model.insert((who, handle));
                    }
                    1 => {
                        let took = book.closes(who).is_some();
                        let had = model.iter().any(|(w, _)| *w == who);
                        prop_assert_eq!(took, had);
                        model.retain(|(w, _)| *w != who);
                    }
                    _ => {
                        let took: BTreeSet<u64> =
                            book.released(handle).iter().map(|h| h.owner.id).collect();
                        let had: BTreeSet<u64> =
                            model.iter().filter(|(_, h)| *h == handle).map(|(w, _)| *w).collect();
                        prop_assert_eq!(&took, &had);
                        model.retain(|(w, _)| !had.contains(w));
                    }
                }
                for who in 1..4 {
                    let had = model.iter().any(|(w, _)| *w == who);
                    prop_assert_eq!(book.process_holds(who), had);
                }
            }
        }
    }
}
