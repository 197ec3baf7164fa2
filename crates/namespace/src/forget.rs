//! Forgetting what the backing has exactly so, and finding it again.
//!
//! An inode that was found on the backing has a number that follows from the object (`st_dev` and
//! `st_ino`), in a space of its own: the top two bits are 01, and numbers that are counted stay
//! below. So it has the same number when it is forgotten and found again, which matters to
//! kernels that still know the number, to leases and to caches.
//!
//!  * Only such an inode is forgotten, and only when the backing has all of it: names, times,
//!    attributes; nobody has it open, nothing is below it, nothing is on its way
//!    ([`Namespace::is_forgettable`]).
//!  * Of what was forgotten, a name is kept ([`Namespace::place`]): who asks by number alone (a
//!    working directory, an O_PATH descriptor) is led there. Of very many only the newest are;
//!    then such a number is ESTALE, and the kernel looks names up again.
//!  * File systems hand out inode numbers again. So a number that was *freed* (the job, or others,
//!    took the object away) is never given a second time, nor is one whose file a node had open that
//!    was given up: it may come back with bytes for it. These numbers are `used_up`; their
//!    objects, found again, get counted numbers and are not forgotten.

use crate::inode::{BackingKey, Home, Inode, Link, Under};
use crate::record::Record;
use crate::tree::{Namespace, ReplayError};
use ebb_types::Ino;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The two top bits of what follows from an object.
const FOUND: u64 = 1 << 62;

/// Set besides for objects whose number does not fit, or of another device.
const HASHED: u64 = 1 << 61;

/// A generation of places is as large as this; there are two.
const PLACES_MAX: usize = 1 << 21;

/// True for a number that follows from an object of the backing.
#[must_use]
pub fn is_found(ino: Ino) -> bool {
    ino.0 >> 62 == FOUND >> 62
}

/// Which object of the backing's own file system such a number follows from; `None` where it does not say.
#[must_use]
pub fn object_of(ino: Ino) -> Option<u64> {
    let plain = is_found(ino) && ino.0 & HASHED == 0;
    plain.then_some(ino.0 & (HASHED - 1))
}

/// The number of an object of the backing whose root is on `root_dev`.
fn number_of(key: BackingKey, root_dev: u64) -> Ino {
    if key.dev == root_dev && key.ino < HASHED {
        return Ino(FOUND | key.ino);
    }
    // splitmix64 twice: cheap, the same everywhere, and spread well.
    let mix = |mut x: u64| {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    Ino(FOUND | HASHED | (mix(mix(key.dev) ^ key.ino) & (HASHED - 1)))
}

/// What is left of forgotten inodes, and which numbers must not come back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Forgotten {
    young: HashMap<Ino, Link>,
    old: HashMap<Ino, Link>,
    used_up: HashSet<Ino>,
    /// How many part files are in a directory. It must not be forgotten.
    parts: HashMap<Ino, usize>,
}

impl Forgotten {
    fn keep(&mut self, ino: Ino, link: Link) {
        if self.young.len() >= PLACES_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.old.remove(&ino);
        self.young.insert(ino, link);
    }

    /// It is known again, or will not come back.
    pub fn drop_place(&mut self, ino: Ino) {
        if !self.young.is_empty() || !self.old.is_empty() {
            self.young.remove(&ino);
            self.old.remove(&ino);
        }
    }

    pub fn use_up(&mut self, ino: Ino) {
        if is_found(ino) {
            self.used_up.insert(ino);
        }
    }

    /// An inode's bytes are there now, and were there.
    pub fn moved_home(&mut self, from: Option<Home>, to: Option<Home>) {
        if let Some(Home::Part { dir }) = to {
            *self.parts.entry(dir).or_default() += 1;
        }
        if let Some(Home::Part { dir }) = from
            && let Some(n) = self.parts.get_mut(&dir)
        {
            *n -= 1;
            if *n == 0 {
                self.parts.remove(&dir);
            }
        }
    }

    pub fn snapshot(&self, out: &mut Vec<Record>) {
        let used_up: BTreeSet<Ino> = self.used_up.iter().copied().collect();
        out.extend(used_up.into_iter().map(|ino| Record::UsedUp { ino }));
        for places in [&self.old, &self.young] {
            let places: BTreeMap<_, _> = places.iter().collect();
            let record = |(ino, link): (&Ino, &Link)| Record::Place {
                ino: *ino,
                parent: link.parent,
                name: link.name.clone(),
            };
            out.extend(places.into_iter().map(record));
        }
    }
}

impl Namespace {
    /// The number for an object that is found for the first time, or again; `None` when it must
    /// be counted.
    pub(crate) fn number_for(&self, key: BackingKey) -> Option<Ino> {
        let root = self.get(Ino::ROOT)?.seen?.key;
        let ino = number_of(key, root.dev);
        let free = self.get(ino).is_none() && !self.forgotten.used_up.contains(&ino);
        free.then_some(ino)
    }

    /// Where a forgotten inode was.
    #[must_use]
    pub fn place(&self, ino: Ino) -> Option<&Link> {
        let kept = &self.forgotten;
        kept.young.get(&ino).or_else(|| kept.old.get(&ino))
    }

    /// True for a number that followed from an object of the backing and will not come back: when no
    /// inode has it, that one was deleted.
    #[must_use]
    pub fn is_used_up(&self, ino: Ino) -> bool {
        self.forgotten.used_up.contains(&ino)
    }

    /// How many forgotten inodes could be found by number.
    #[must_use]
    pub fn places(&self) -> usize {
        self.forgotten.young.len() + self.forgotten.old.len()
    }

    /// A forgotten inode is not where it was. (A cache: not recorded.)
    pub fn drop_place(&mut self, ino: Ino) {
        self.forgotten.drop_place(ino);
    }

    /// True when the backing has exactly what is known of the inode, and nothing refers to it. A
    /// file's bytes are the driver's to judge.
    #[must_use]
    pub fn is_forgettable(&self, ino: Ino) -> bool {
        let Some(inode) = self.get(ino) else { return false };
        let Some(seen) = inode.seen else { return false };
        let here = |l: &Link| self.is_on_backing(l) && self.covered(l.parent, &l.name).is_none();
        let empty = |d: &crate::inode::Dir| d.entries.is_empty();
        is_found(ino)
            && ino != Ino::ROOT
            && !self.forgotten.used_up.contains(&ino)
            && inode.home == Home::Own
            && !inode.due
            && !inode.owed
            && inode.xattrs.is_empty()
            && (inode.mtime, inode.ctime) == (seen.mtime, seen.ctime)
            && !inode.links.is_empty()
            && inode.links.iter().all(here)
            && inode.dir.as_deref().is_none_or(empty)
            && !self.forgotten.parts.contains_key(&ino)
            && self.by_key(seen.key) == Some(ino)
            && self.is_number_of(ino, seen.key)
            && !self.is_open(ino)
    }

    /// False when it is another object by now than the one that the number followed from: found
    /// again, it would have another number.
    fn is_number_of(&self, ino: Ino, key: BackingKey) -> bool {
        let root = self.get(Ino::ROOT).and_then(|root| root.seen);
        root.is_some_and(|root| number_of(key, root.key.dev) == ino)
    }

    /// Some of a directory's inodes that are forgettable, after `after`; and the last name that
    /// was looked at, when there may be more.
    #[must_use]
    pub fn forgettable_in(
        &self,
        dir: Ino,
        after: Option<&ebb_types::Name>,
        look_at: usize,
    ) -> (Vec<Ino>, Option<ebb_types::Name>) {
        let Ok(entries) = self.entries_after(dir, after) else { return (Vec::new(), None) };
        let mut out = Vec::new();
        for (n, (name, dentry)) in entries.enumerate() {
            if dentry.under == Under::This && self.is_forgettable(dentry.ino) {
                out.push(dentry.ino);
            }
            if n + 1 >= look_at {
                return (out, Some(name.clone()));
            }
        }
        (out, None)
    }

    /// True when all names that the backing has in a directory were taken in, and none of them
    /// was forgotten since.
    #[must_use]
    pub fn is_listed(&self, dir: Ino) -> bool {
        let listed = |i: &Inode| i.dir.as_ref().is_some_and(|d| d.listed || d.complete);
        self.get(dir).is_some_and(|i| i.home != Home::Own || listed(i))
    }

    /// All names that the backing has in it have been taken in.
    pub fn note_taken_in(&mut self, dir: Ino) {
        if let Some(dir) = self.dir_mut(dir) {
            dir.listed = true;
        }
    }

    /// Makes [`Record::Forget`] true.
    pub(crate) fn forget(&mut self, ino: Ino) -> Result<(), ReplayError> {
        let misfit = || ReplayError(format!("{ino} cannot be forgotten"));
        let below = |i: &Inode| i.dir.as_ref().is_some_and(|d| !d.entries.is_empty());
        let inode = self.get(ino).filter(|i| !below(i) && !self.is_open(ino));
        let links = inode.ok_or_else(misfit)?.links.clone();
        for link in &links {
            self.drop_dentry(link.parent, &link.name)?;
            if let Some(dir) = self.dir_mut(link.parent) {
                dir.complete = false;
                dir.listed = false;
            }
        }
        self.remove_inode(ino);
        if let Some(link) = links.into_iter().next() {
            self.forgotten.keep(ino, link);
        }
        Ok(())
    }

    /// Makes [`Record::Place`] true.
    pub(crate) fn keep_place(&mut self, ino: Ino, link: Link) {
        self.forgotten.keep(ino, link);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_objects_are_in_a_space_of_their_own() {
        let key = |dev, ino| BackingKey { dev, ino };
        for k in [key(7, 0), key(7, 1 << 32), key(7, u64::MAX), key(8, 1), key(0, 0)] {
            let ino = number_of(k, 7);
            assert!(is_found(ino), "{ino}");
            assert_eq!(ino, number_of(k, 7));
            assert!(i64::try_from(ino.0).is_ok(), "positive for whoever reads it signed");
        }
        assert_ne!(number_of(key(7, 1), 7), number_of(key(8, 1), 7));
        assert_ne!(number_of(key(8, 1), 7), number_of(key(8, 2), 7));
        // What is counted: from 30 random bits, shifted by 32.
        assert!(!is_found(Ino(((1 << 30) - 1) << 32)) && !is_found(Ino(u64::MAX)));
    }
}
