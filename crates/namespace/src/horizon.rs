//! Up to which moment the backing has everything that was made or changed.
//!
//! What is not there at some moment is waited for; when all of it has got there, or is gone, that
//! moment is settled, and what is not there by then is waited for next. So it moves on while there is
//! always something on its way, at the cost of one look at each inode that is.
//!
//! Who moved a directory that the backing has forgets that when it is settled. Another node may have
//! made a name in it meanwhile, and know the directory from before it was moved: so until that moment
//! is settled, who hears of names in a moved directory hears where it is, too. Who hears that it is
//! settled asks for itself (see [`crate::Book::unplaced`]).

use crate::facts::DEPTH_MAX;
use crate::tree::Namespace;
use ebb_types::Ino;
use ebb_types::facts::{Facts, Moment, NameFact};
use std::collections::{BTreeMap, BTreeSet};
use std::iter::successors;

/// Moved directories that are remembered one by one.
const MOVED_MAX: usize = 1 << 16;

/// See the head of the file.
#[derive(Clone, Debug, Default)]
pub struct Horizon {
    settled: Moment,
    next: Moment,
    waiting: BTreeSet<Ino>,
    /// Directories that were moved, since `settled`.
    moved: BTreeMap<Ino, Moment>,
    /// Until then any directory may have been.
    any_moved: Moment,
}

impl Horizon {
    /// The moment that is settled, after a look at what is still on its way. `now` counts up.
    pub fn look(&mut self, ns: &Namespace, now: Moment) -> Moment {
        // What comes back later, because others took it away on the backing, was not changed by the job.
        while let Some(ino) = self.waiting.first().copied()
            && !ns.is_local(ino)
        {
            self.waiting.remove(&ino);
        }
        if self.waiting.is_empty() {
            self.settled = self.next;
            self.next = now;
            self.waiting = ns.pending_after(None).filter(|ino| ns.is_local(*ino)).collect();
            if self.waiting.is_empty() {
                self.settled = now;
            }
            let settled = self.settled;
            self.moved.retain(|_, at| *at > settled);
        }
        self.settled
    }

    /// A directory has another place since this moment.
    pub fn note_moved(&mut self, dir: Ino, at: Moment) {
        if self.moved.len() >= MOVED_MAX {
            self.note_any_moved(at);
        }
        self.moved.insert(dir, at);
    }

    /// It is not known which directories were moved until then.
    pub fn note_any_moved(&mut self, at: Moment) {
        self.any_moved = at;
        self.moved.clear();
    }

    /// Where the directories of these names are, as far as they or those above them were moved.
    #[must_use]
    pub fn places(&self, ns: &Namespace, at: Moment, names: &[NameFact]) -> Facts {
        let mut facts = Facts::default();
        let any = self.any_moved > self.settled;
        if !any && self.moved.is_empty() {
            return facts;
        }
        let live = names.iter().filter(|fact| fact.bound.is_some());
        let parents: BTreeSet<Ino> = live.map(|fact| fact.parent).collect();
        for parent in parents.into_iter().filter(|parent| any || self.is_moved(ns, *parent)) {
            let chain = ns.chain(at, parent, (0, false));
            facts.names.extend(chain.names);
            facts.inodes.extend(chain.inodes);
        }
        facts
    }

    /// True when this directory was moved, or one above it.
    fn is_moved(&self, ns: &Namespace, dir: Ino) -> bool {
        let above = |dir: &Ino| Some(ns.get(*dir)?.links.first()?.parent);
        let mut up = successors(Some(dir), above).take(DEPTH_MAX);
        up.any(|dir| self.moved.contains_key(&dir))
    }

    /// The same as it was at the last look.
    #[must_use]
    pub fn settled(&self) -> Moment {
        self.settled
    }
}
