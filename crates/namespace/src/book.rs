//! What has been heard of names, from one service by one node, or by all nodes of a job together.
//!
//! A book keeps of every name, inode and extended attribute the newest fact. So it does not matter
//! in which order facts come, whether some come twice, or which of several books they were in:
//! joining books is taking the newer of each. What a service calls settled is on the backing; facts
//! up to there are dropped, except where a directory is that others are in, and which inodes were
//! removed: other nodes may hold bytes of them and not have heard it. Of these the newest are kept.

use crate::facts::DEPTH_MAX;
use ebb_types::facts::{Bound, Facts, InodeFact, Moment, NameFact, Shape, XattrFact};
use ebb_types::{Ino, Name};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Facts of each kind to a record: keeps records far below a MiB.
const STEP: usize = 128;
/// The same of extended attributes, which may be large.
const XATTR_STEP: usize = 8;
/// Removed inodes that are remembered when that is settled: the newest.
const REMOVED_MAX: usize = 4096;

type Key = (Ino, Name);

/// See the head of the file.
#[derive(Clone, Debug, Default)]
pub struct Book {
    settled: Moment,
    shared: bool,
    nodes: u32,
    names: BTreeMap<Key, (Moment, Option<Bound>)>,
    inodes: BTreeMap<Ino, (Moment, Option<Shape>)>,
    xattrs: BTreeMap<(Ino, Box<[u8]>), (Moment, Option<Box<[u8]>>)>,
    /// Inodes without a name, since a moment that is settled.
    removed: BTreeMap<Ino, Moment>,
    /// How many names each inode has here.
    bound: HashMap<Ino, usize>,
    /// Directories that names are in and of which it is not known where they are, or only where they
    /// were before a moment that is settled: others may have moved them since and forgotten it.
    unplaced: BTreeSet<Ino>,
}

/// Something that has a name and is not under it on the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing<'a> {
    /// Its path, from the root of the backing.
    pub path: Vec<Name>,
    /// The directories on the way, the root not among them.
    pub dirs: Vec<Ino>,
    /// Which inode.
    pub ino: Ino,
    /// `st_ino` of the object whose place it takes; 0: none.
    pub replaces: u64,
    /// What it is.
    pub shape: &'a Shape,
}

impl Missing<'_> {
    fn key(&self) -> Option<Key> {
        let parent = self.dirs.last().copied().unwrap_or(Ino::ROOT);
        Some((parent, self.path.last()?.clone()))
    }
}

/// Why a path is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Astray(
    /// The directory of which nobody knows where it is.
    pub Ino,
);

impl PartialEq for Book {
    fn eq(&self, other: &Book) -> bool {
        let all = |b: &Book| {
            let told = (b.settled, b.shared, b.nodes, b.removed.clone());
            (told, b.names.clone(), b.inodes.clone(), b.xattrs.clone())
        };
        all(self) == all(other)
    }
}

impl Eq for Book {}

impl Book {
    /// Hears more from the service of the node.
    pub fn hear(&mut self, facts: &Facts) {
        self.take(facts, self.settled);
        if facts.settled > self.settled {
            self.settle(facts.settled);
        }
    }

    /// Takes in what is newer than `after`.
    fn take(&mut self, facts: &Facts, after: Moment) {
        self.shared |= facts.shared;
        self.nodes = if facts.nodes > 0 { facts.nodes } else { self.nodes };
        for fact in facts.names.iter().filter(|f| f.at > after) {
            self.hear_name(fact);
        }
        for fact in facts.inodes.iter().filter(|f| f.at > after) {
            if self.inodes.get(&fact.ino).is_none_or(|(at, _)| *at <= fact.at) {
                self.inodes.insert(fact.ino, (fact.at, fact.shape.clone()));
                let gone = self.removed.get(&fact.ino);
                if fact.shape.is_some() && gone.is_some_and(|gone| *gone < fact.at) {
                    self.removed.remove(&fact.ino);
                }
            }
        }
        for fact in facts.xattrs.iter().filter(|f| f.at > after) {
            let key = (fact.ino, fact.name.clone());
            if self.xattrs.get(&key).is_none_or(|(at, _)| *at <= fact.at) {
                self.xattrs.insert(key, (fact.at, fact.value.clone()));
            }
        }
    }

    fn hear_name(&mut self, fact: &NameFact) {
        let key = (fact.parent, fact.name.clone());
        if self.names.get(&key).is_some_and(|(at, _)| *at > fact.at) {
            return;
        }
        let old = self.names.insert(key, (fact.at, fact.bound));
        if let Some((_, Some(old))) = old {
            self.count(old.ino, false);
        }
        if let Some(bound) = fact.bound {
            self.count(bound.ino, true);
            if fact.parent != Ino::ROOT && !self.bound.contains_key(&fact.parent) {
                self.unplaced.insert(fact.parent);
            }
        }
    }

    fn count(&mut self, ino: Ino, more: bool) {
        let count = self.bound.entry(ino).or_default();
        *count = if more { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            self.bound.remove(&ino);
        } else {
            self.unplaced.remove(&ino);
        }
    }

    /// Everything up to this moment is on the backing.
    fn settle(&mut self, upto: Moment) {
        self.settled = upto;
        let newer = |at: &Moment| *at > upto;
        let needed = self.directories_of(|at| at > upto);
        self.keep_removed(upto);
        self.names.retain(|_, (at, b)| newer(at) || b.is_some_and(|b| needed.contains(&b.ino)));
        self.inodes.retain(|ino, (at, _)| newer(at) || needed.contains(ino));
        self.xattrs.retain(|_, (at, _)| newer(at));
        self.index();
    }

    /// What was removed by then stays known, as far as there is room for it.
    fn keep_removed(&mut self, upto: Moment) {
        let settled = self.inodes.iter().filter(|(_, (at, shape))| *at <= upto && shape.is_none());
        self.removed.extend(settled.map(|(ino, (at, _))| (*ino, *at)));
        let surplus = self.removed.len().saturating_sub(REMOVED_MAX);
        if surplus > 0 {
            let mut oldest: Vec<_> = self.removed.iter().map(|(ino, at)| (*at, *ino)).collect();
            oldest.sort_unstable();
            for (_, ino) in &oldest[..surplus] {
                self.removed.remove(ino);
            }
        }
    }

    /// The directories that names of such moments are in, and those above them.
    fn directories_of(&self, which: impl Fn(Moment) -> bool) -> BTreeSet<Ino> {
        let mut parents = HashMap::new();
        for ((parent, _), (_, bound)) in &self.names {
            parents.extend(bound.map(|b| (b.ino, *parent)));
        }
        let mut needed = BTreeSet::new();
        for ((parent, _), (at, _)) in &self.names {
            let mut dir = *parent;
            while which(*at) && needed.insert(dir) {
                let Some(above) = parents.get(&dir) else { break };
                dir = *above;
            }
        }
        needed
    }

    fn index(&mut self) {
        self.bound.clear();
        self.unplaced.clear();
        for (_, bound) in self.names.values() {
            if let Some(bound) = bound {
                *self.bound.entry(bound.ino).or_default() += 1;
            }
        }
        let live = self.names.iter().filter(|(_, (_, bound))| bound.is_some());
        let parents = live.map(|((parent, _), _)| *parent);
        let lost = parents.filter(|p| *p != Ino::ROOT && !self.bound.contains_key(p));
        self.unplaced = lost.collect();
        let old = self.names.values().filter(|(at, _)| *at <= self.settled);
        self.unplaced.extend(old.filter_map(|(_, bound)| bound.map(|b| b.ino)));
    }

    /// Takes in what another node has heard.
    pub fn join(&mut self, other: &Book) {
        let nodes = self.nodes.max(other.nodes);
        other.facts().iter().for_each(|facts| self.take(facts, 0));
        self.nodes = nodes;
        self.settle(self.settled.max(other.settled));
    }

    /// True when nothing has been heard that still matters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.inodes.is_empty() && self.xattrs.is_empty()
    }

    /// True when others have nothing to learn from it, not even what is settled.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.is_empty() && !(self.shared && self.settled > 0)
    }

    /// True when there were other nodes in the job.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// How many nodes there were in the job when last heard of.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes as usize
    }

    /// Up to where everything is on the backing.
    #[must_use]
    pub fn settled(&self) -> Moment {
        self.settled
    }

    /// The newest moment of which something is known.
    #[must_use]
    pub fn newest(&self) -> Moment {
        let names = self.names.values().map(|(at, _)| *at);
        let inodes = self.inodes.values().map(|(at, _)| *at);
        let xattrs = self.xattrs.values().map(|(at, _)| *at);
        names.chain(inodes).chain(xattrs).max().unwrap_or(0).max(self.settled)
    }

    /// What a name meant when last heard of.
    #[must_use]
    pub fn bound(&self, parent: Ino, name: &Name) -> Option<Ino> {
        let (_, bound) = self.names.get(&(parent, name.clone()))?;
        bound.map(|b| b.ino)
    }

    /// True when something is named in this directory.
    #[must_use]
    pub fn has_names(&self, dir: Ino) -> bool {
        // No name comes before this one.
        let Ok(least) = Name::new(&[1]) else { return false };
        let first = self.names.range((dir, least)..).next();
        first.is_some_and(|((parent, _), _)| *parent == dir)
    }

    /// The inodes of which the last word is that they have no name any more.
    pub fn nameless(&self) -> impl Iterator<Item = Ino> + '_ {
        let gone = self.inodes.iter().filter(|(_, (_, shape))| shape.is_none());
        gone.map(|(ino, _)| *ino)
    }

    /// How many facts there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len() + self.inodes.len() + self.xattrs.len()
    }

    /// Directories of which it must be asked where they are: some of them. What is answered settles it;
    /// what is not is given up.
    #[must_use]
    pub fn unplaced(&self, most: usize) -> Vec<Ino> {
        self.unplaced.iter().take(most).copied().collect()
    }

    /// Nobody knows where it is; it is not asked for again.
    pub fn give_up(&mut self, dir: Ino) {
        self.unplaced.remove(&dir);
    }

    /// What was heard after a moment, each moment for itself.
    #[must_use]
    pub fn facts_after(&self, after: Moment) -> BTreeMap<Moment, Facts> {
        let mut out: BTreeMap<Moment, Facts> = BTreeMap::new();
        for (parent, name, at, bound) in self.names_after(after) {
            let fact = NameFact { at, parent, name: name.clone(), bound };
            out.entry(at).or_default().names.push(fact);
        }
        for (ino, at, shape) in self.shapes_after(after) {
            let fact = InodeFact { at, ino, shape: shape.cloned() };
            out.entry(at).or_default().inodes.push(fact);
        }
        for (ino, name, at, value) in self.xattrs_after(after) {
            let fact = XattrFact { at, ino, name: name.into(), value: value.map(Box::from) };
            out.entry(at).or_default().xattrs.push(fact);
        }
        out
    }

    pub(crate) fn names_after(
        &self,
        after: Moment,
    ) -> impl Iterator<Item = (Ino, &Name, Moment, Option<Bound>)> {
        let newer = self.names.iter().filter(move |(_, (at, _))| *at > after);
        newer.map(|((parent, name), (at, bound))| (*parent, name, *at, *bound))
    }

    pub(crate) fn shapes_after(
        &self,
        after: Moment,
    ) -> impl Iterator<Item = (Ino, Moment, Option<&Shape>)> {
        let newer = self.inodes.iter().filter(move |(_, (at, _))| *at > after);
        newer.map(|(ino, (at, shape))| (*ino, *at, shape.as_ref()))
    }

    pub(crate) fn xattrs_after(
        &self,
        after: Moment,
    ) -> impl Iterator<Item = (Ino, &[u8], Moment, Option<&[u8]>)> {
        let newer = self.xattrs.iter().filter(move |(_, (at, _))| *at > after);
        newer.map(|((ino, name), (at, value))| (*ino, &**name, *at, value.as_deref()))
    }

    /// All facts, in pieces of moderate size.
    #[must_use]
    pub fn facts(&self) -> Vec<Facts> {
        let names = self.names.iter().map(|((parent, name), (at, bound))| NameFact {
            at: *at,
            parent: *parent,
            name: name.clone(),
            bound: *bound,
        });
        let inodes = self.inodes.iter().map(|(ino, (at, shape))| InodeFact {
            at: *at,
            ino: *ino,
            shape: shape.clone(),
        });
        let xattrs = self.xattrs.iter().map(|((ino, name), (at, value))| XattrFact {
            at: *at,
            ino: *ino,
            name: name.clone(),
            value: value.clone(),
        });
        // Whoever hears that it is settled, too, keeps it as removed.
        let removed =
            self.removed.iter().map(|(ino, at)| InodeFact { at: *at, ino: *ino, shape: None });
        let names: Vec<_> = names.collect();
        let inodes: Vec<_> = removed.chain(inodes).collect();
        let xattrs: Vec<_> = xattrs.collect();
        let mut out = Vec::new();
        let piece = Facts::default;
        out.extend(names.chunks(STEP).map(|c| Facts { names: c.to_vec(), ..piece() }));
        out.extend(inodes.chunks(STEP).map(|c| Facts { inodes: c.to_vec(), ..piece() }));
        out.extend(xattrs.chunks(XATTR_STEP).map(|c| Facts { xattrs: c.to_vec(), ..piece() }));
        // Last, so that where directories are is known when the rest goes.
        let (settled, shared, nodes) = (self.settled, self.shared, self.nodes);
        let last = Facts { settled, shared, nodes, ..piece() };
        out.extend((last != piece()).then_some(last));
        out
    }

    // ---- the tree ----------------------------------------------------------------------------

    /// What an inode is, as far as was heard.
    #[must_use]
    pub fn shape(&self, ino: Ino) -> Option<&Shape> {
        self.inodes.get(&ino)?.1.as_ref()
    }

    /// True when it was heard that the inode has no name any more.
    #[must_use]
    pub fn is_gone(&self, ino: Ino) -> bool {
        self.inodes.get(&ino).is_some_and(|(_, shape)| shape.is_none())
    }

    /// The same, also when that was settled long ago.
    #[must_use]
    pub fn was_removed(&self, ino: Ino) -> bool {
        self.is_gone(ino) || self.removed.contains_key(&ino)
    }

    /// Extended attributes of an inode that the backing does not have.
    pub fn xattrs(&self, ino: Ino) -> impl Iterator<Item = (&[u8], &[u8])> {
        let from = (ino, Box::from(&[][..]));
        let of_it = self.xattrs.range(from..).take_while(move |((i, _), _)| *i == ino);
        of_it.filter_map(|((_, name), (_, value))| Some((&**name, value.as_deref()?)))
    }

    /// Everything that has a name and is not under it on the backing, directories before what is in
    /// them; and names of which the directory is not known.
    #[must_use]
    pub fn missing(&self) -> (Vec<Missing<'_>>, Vec<((Ino, Name), Astray)>) {
        let places = self.places();
        let (mut found, mut astray) = (Vec::new(), Vec::new());
        for ((parent, name), (at, bound)) in &self.names {
            let open = bound.filter(|b| !b.placed && *at > self.settled);
            let Some(bound) = open else { continue };
            let Some(shape) = self.shape(bound.ino).filter(|s| s.placed == 0) else { continue };
            match self.path_below(*parent, name, &places) {
                Ok((path, dirs)) => {
                    let (ino, replaces) = (bound.ino, bound.replaces);
                    found.push(Missing { path, dirs, ino, replaces, shape });
                }
                Err(lost) => astray.push(((*parent, name.clone()), lost)),
            }
        }
        found.sort_by(|a, b| (a.path.len(), &a.path).cmp(&(b.path.len(), &b.path)));
        (found, astray)
    }

    /// The paths that an inode has, as far as was heard.
    #[must_use]
    pub fn paths(&self, ino: Ino) -> Vec<Vec<Name>> {
        let places = self.places();
        let names = self.names.iter().filter(|(_, (_, b))| b.is_some_and(|b| b.ino == ino));
        names.filter_map(|((p, n), _)| Some(self.path_below(*p, n, &places).ok()?.0)).collect()
    }

    /// The paths of all inodes that have any here.
    #[must_use]
    pub fn all_paths(&self) -> BTreeMap<Ino, Vec<Vec<Name>>> {
        let places = self.places();
        let mut out: BTreeMap<Ino, Vec<Vec<Name>>> = BTreeMap::new();
        for ((parent, name), (_, bound)) in &self.names {
            if let Some(bound) = bound
                && let Ok((path, _)) = self.path_below(*parent, name, &places)
            {
                out.entry(bound.ino).or_default().push(path);
            }
        }
        out
    }

    /// True when nobody has heard anything newer about that name than `own` has.
    #[must_use]
    pub fn is_heard_by(&self, own: &Book, missing: &Missing<'_>) -> bool {
        let key = missing.key();
        let at = |book: &Book| Some(book.names.get(key.as_ref()?)?.0);
        at(own).is_some() && at(own) == at(self)
    }

    /// True when nobody has heard anything newer of how the inode is than `own` has.
    #[must_use]
    pub fn is_shaped_by(&self, own: &Book, ino: Ino) -> bool {
        let at = |book: &Book| Some(book.inodes.get(&ino)?.0);
        at(own).is_some() && at(own) == at(self)
    }

    /// True when something was heard of that name.
    #[must_use]
    pub fn has(&self, name: &(Ino, Name)) -> bool {
        self.names.contains_key(name)
    }

    /// A book of these names alone, and of the directories that they are in.
    #[must_use]
    pub fn only<'a>(&self, which: impl Iterator<Item = &'a Missing<'a>>) -> Book {
        let places = self.places();
        let mut book = Book { settled: self.settled, shared: self.shared, ..Book::default() };
        let mut take = |key: &Key| {
            let Some(fact) = self.names.get(key) else { return };
            book.names.insert(key.clone(), *fact);
            let ino = fact.1.map_or(Ino::ROOT, |bound| bound.ino);
            book.inodes.extend(self.inodes.get(&ino).map(|fact| (ino, fact.clone())));
        };
        for missing in which {
            missing.key().iter().for_each(&mut take);
            missing.dirs.iter().filter_map(|dir| places.get(dir)).for_each(|(_, key)| take(key));
        }
        book.index();
        book
    }

    /// What this book says that the backing lacks and `newer` says otherwise of: it was somewhere else,
    /// or nowhere, by then. That nothing is said any more is no contradiction, it was settled. What is
    /// deepest comes first.
    #[must_use]
    pub fn overruled(&self, newer: &Book) -> Vec<Missing<'_>> {
        let (now, places) = (newer.all_paths(), self.places());
        let is_there = |m: &Missing<'_>| now.get(&m.ino).is_some_and(|all| all.contains(&m.path));
        let is_other = |key: &Key, ino: Ino| {
            let (Some((was, _)), Some((at, bound))) = (self.names.get(key), newer.names.get(key))
            else {
                return false;
            };
            at > was && bound.is_none_or(|bound| bound.ino != ino)
        };
        let is_moved = |dir: &Ino| places.get(dir).is_some_and(|(_, key)| is_other(key, *dir));
        let (mut was, _) = self.missing();
        was.retain(|m| {
            let other = m.key().is_some_and(|key| is_other(&key, m.ino));
            !is_there(m) && (other || newer.is_gone(m.ino) || m.dirs.iter().any(is_moved))
        });
        was.reverse();
        was
    }

    /// Where each inode is: of several names the newest.
    fn places(&self) -> HashMap<Ino, (Moment, &Key)> {
        let mut places: HashMap<Ino, (Moment, &Key)> = HashMap::new();
        for (key, (at, bound)) in &self.names {
            let Some(bound) = bound else { continue };
            if places.get(&bound.ino).is_none_or(|(other, _)| other <= at) {
                places.insert(bound.ino, (*at, key));
            }
        }
        places
    }

    fn path_below(
        &self,
        parent: Ino,
        name: &Name,
        places: &HashMap<Ino, (Moment, &Key)>,
    ) -> Result<(Vec<Name>, Vec<Ino>), Astray> {
        let (mut path, mut dirs) = (vec![name.clone()], Vec::new());
        let mut dir = parent;
        while dir != Ino::ROOT {
            let place = places.get(&dir).filter(|_| path.len() < DEPTH_MAX);
            let (above, name) = place.ok_or(Astray(dir))?.1;
            path.push(name.clone());
            dirs.push(dir);
            dir = *above;
        }
        path.reverse();
        dirs.reverse();
        Ok((path, dirs))
    }
}
