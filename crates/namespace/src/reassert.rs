//! Names that a service has forgotten, and nodes have heard of ([`Book`]): the records that bring back
//! what the backing does not have. What it has (names and modes of what is on the backing were changed
//! there at once) is found there as it is.
//!
//! A fact says how something was at a moment; the newest one of each name and inode stands. So a file
//! that was made, renamed twice and written over by another node is where the last word leaves it, whoever
//! said it. Facts of a node that is lost are missing; what the others say is then applied as
//! far as it makes a tree: no name in what is not a directory, no directory within itself or under two names.

use crate::book::Book;
use crate::inode::{Found, Home, Inode, Link, Seen, Under};
use crate::record::{AttrChange, BackingPath, NewInode, Record};
use crate::tree::Namespace;
use ebb_types::facts::{Bound, Moment, Shape};
use ebb_types::{FileKind, Ino, Name};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What is not known any more, and is to come back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// Its number.
    pub ino: Ino,
    /// A directory that it has a name in.
    pub parent: Ino,
    /// That name.
    pub name: Name,
    /// `st_ino` of what it is to replace on the backing; 0: nothing.
    pub replaces: u64,
    /// What it is.
    pub kind: FileKind,
}

/// What the backing says of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnBacking {
    /// In which directories their part files are, and which objects these are.
    pub parts: BTreeMap<Ino, (Ino, Seen)>,
    /// Something else has their name, perhaps they themselves: they do not come back.
    pub taken: BTreeSet<Ino>,
    /// Directories that have got there.
    pub dirs: BTreeMap<Ino, Seen>,
}

impl OnBacking {
    /// What the backing has under the name of one of them, and whether it has its part file.
    pub fn note(&mut self, of: &Forgotten, object: Option<(FileKind, Seen)>, part: Option<Seen>) {
        match object {
            Some((FileKind::Directory, seen)) if of.kind == FileKind::Directory => {
                self.dirs.insert(of.ino, seen);
            }
            Some((_, seen)) if seen.key.ino != of.replaces => {
                self.taken.insert(of.ino);
            }
            _ => {}
        }
        if let Some(seen) = part.filter(|_| of.kind == FileKind::Regular) {
            self.parts.entry(of.ino).or_insert((of.parent, seen));
        }
    }
}

/// Where the bytes of a regular file are on the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// Where it is noted.
    Noted,
    /// Nothing is noted, and nothing can be there.
    Nowhere,
    /// Nothing is noted, but they may be there.
    Perhaps {
        /// In the part file,
        part: BackingPath,
        /// or under its name by now.
        name: BackingPath,
    },
}

/// Directories on a way up: more are a circle.
const DEPTH_MAX: usize = 4096;

impl Namespace {
    /// The files and directories that would come back, so that the backing can be asked of them first.
    /// `first`: numbers from here on are given out by the service that asks.
    #[must_use]
    pub fn forgotten_in(&self, told: &Book, after: Moment, first: Ino) -> Vec<Forgotten> {
        let mut found = Vec::new();
        for (parent, name, _, bound) in told.names_after(after) {
            let Some((bound, shape)) = bound.and_then(|b| Some((b, told.shape(b.ino)?))) else {
                continue;
            };
            // What has got there is found there; a directory is what others are in by its number.
            if bound.placed && shape.kind != FileKind::Directory {
                continue;
            }
            let moved_there = |i: &Inode| i.is_dir() && bound.placed;
            let wanted = self.get(bound.ino).is_none_or(moved_there);
            let begins_anew = bound.replaces != 0 && !bound.placed;
            // Something else may have got the name there since.
            let is_new = |i: &Inode| {
                let own = i.kind == FileKind::Regular && i.home == Home::Own;
                own && self.dentry(parent, name).is_ok_and(|d| d.is_none())
            };
            let lacks = !bound.placed && self.get(bound.ino).is_some_and(is_new);
            if lacks
                || (wanted && self.may_come_back(told, bound.ino, first))
                || (begins_anew && self.get(bound.ino).is_none_or(|i| i.home == Home::Own))
            {
                let (ino, replaces, kind) = (bound.ino, bound.replaces, shape.kind);
                found.push(Forgotten { ino, parent, name: name.clone(), replaces, kind });
            }
        }
        found
    }

    fn may_come_back(&self, told: &Book, ino: Ino, first: Ino) -> bool {
        // What the backing had, too, when it was moved to where the backing has no directory yet.
        let is_found = crate::forget::is_found(ino);
        let is_of_then = (ino < first || is_found) && ino != Ino::ROOT;
        let comes = |s: &Shape| s.placed == 0 || (s.kind == FileKind::Directory && !is_found);
        is_of_then && told.shape(ino).is_some_and(comes)
    }

    /// Regular files that are told to be in the job alone, and replace nothing.
    #[must_use]
    pub fn local_files(&self, told: &Book) -> BTreeSet<Ino> {
        let local = |ino: &Ino| {
            let shape = told.shape(*ino);
            shape.is_some_and(|s| s.placed == 0 && s.kind == FileKind::Regular)
        };
        let names = told.names_after(0).filter_map(|(.., bound)| bound);
        let nowhere = names.filter(|bound| !bound.placed && bound.replaces == 0);
        nowhere.map(|bound| bound.ino).filter(local).collect()
    }

    /// Directories that may be on the backing (by now), as they were told of: where, and their numbers.
    /// Those whose parents are known.
    #[must_use]
    pub fn directories_in(&self, told: &Book) -> Vec<(Ino, Name, Ino)> {
        let is_dir = |ino: Ino| {
            told.shape(ino).map_or_else(|| told.has_names(ino), |s| s.kind == FileKind::Directory)
        };
        let dir = |bound: Bound| is_dir(bound.ino).then_some(bound.ino);
        let wanted = |parent: Ino, name: &Name, ino: Ino| {
            self.get(parent).is_some_and(|dir| dir.home == Home::Own)
                && self.get(ino).is_none()
                && self.dentry(parent, name).is_ok_and(|d| d.is_none())
        };
        told.names_after(0)
            .filter_map(|(parent, name, _, bound)| Some((parent, name, bound.and_then(dir)?)))
            .filter(|(parent, name, ino)| wanted(*parent, name, *ino))
            .map(|(parent, name, ino)| (parent, name.clone(), ino))
            .collect()
    }

    /// Where to look for the bytes of a file that was flushed, when that may have been forgotten.
    #[must_use]
    pub fn whereabouts(&self, ino: Ino) -> Whereabouts {
        let regular = |i: &&Inode| i.kind == FileKind::Regular && i.home == Home::None;
        let Some(inode) = self.get(ino).filter(regular) else { return Whereabouts::Noted };
        let dir = match &inode.links[..] {
            [link] => self.get(link.parent).filter(|dir| dir.home == Home::Own).map(|_| link),
            _ => None,
        };
        let place = dir.and_then(|link| Some((self.path(link.parent)?, &link.name)));
        place.map_or(Whereabouts::Nowhere, |(dir, name)| Whereabouts::Perhaps {
            part: dir.join(&self.part_name(ino)),
            name: dir.join(name),
        })
    }

    /// They were looked for there. No record: they are nowhere.
    #[must_use]
    pub fn plan_home(&self, ino: Ino, part: Option<Seen>, found: Option<&Found>) -> Vec<Record> {
        let Some([link]) = self.get(ino).map(|inode| &inode.links[..]) else { return Vec::new() };
        let Link { parent, name } = link.clone();
        if part.is_some() {
            let home = Record::Home { ino, home: Home::Part { dir: parent } };
            return vec![home, Record::Seen { ino, seen: part }];
        }
        // What it is to replace is not it, nor what others are.
        let own = |f: &&Found| {
            let key = f.seen.key;
            let others = self.covered(parent, &name) == Some(key) || self.by_key(key).is_some();
            f.kind == FileKind::Regular && !others
        };
        let Some(found) = found.filter(own) else { return Vec::new() };
        vec![
            Record::Home { ino, home: Home::Own },
            Record::Seen { ino, seen: Some(found.seen) },
            Record::Dentry { parent, name, ino, under: Under::This },
        ]
    }

    /// An object of the backing is this inode: the records that bring it back; none, when its number, its
    /// name or the object is something else by now.
    #[must_use]
    pub fn plan_known(&self, parent: Ino, name: &Name, ino: Ino, found: &Found) -> Vec<Record> {
        let is_there = |dir: &Inode| dir.home == Home::Own && dir.dir.is_some();
        let free = self.get(ino).is_none()
            && !crate::forget::is_found(ino)
            && ino != Ino::ROOT
            && self.get(parent).is_some_and(is_there)
            && self.dentry(parent, name).is_ok_and(|d| d.is_none())
            && self.by_key(found.seen.key).is_none()
            && !name.is_reserved();
        if !free {
            return Vec::new();
        }
        let inode = crate::adopt::found_inode(ino, found);
        let dentry = Record::Dentry { parent, name: name.clone(), ino, under: Under::This };
        vec![Record::Inode(Box::new(inode)), dentry]
    }

    /// The files that had begun anew and are known as what they are to replace; see
    /// [`Namespace::plan_renew`].
    #[must_use]
    pub fn plan_begun_anew(
        &self,
        told: &Book,
        after: Moment,
        there: &OnBacking,
    ) -> BTreeMap<Ino, Vec<Record>> {
        let mut plans = BTreeMap::new();
        for (parent, name, _, bound) in told.names_after(after) {
            let Some(bound) = bound.filter(|b| b.replaces != 0 && !b.placed) else { continue };
            let Some(inode) = self.get(bound.ino).filter(|i| i.home == Home::Own) else { continue };
            let older = inode.seen.is_some_and(|seen| seen.key.ino == bound.replaces);
            let [link] = &inode.links[..] else { continue };
            if !older || inode.kind != FileKind::Regular || !self.is_on_backing(link) {
                continue;
            }
            if (link.parent, &link.name) != (parent, name) {
                continue;
            }
            let (ino, name) = (bound.ino, name.clone());
            let part = there.parts.get(&ino).copied();
            let home = part.map_or(Home::None, |(dir, _)| Home::Part { dir });
            plans.insert(
                ino,
                vec![
                    // While it is known which object this is.
                    Record::Dentry { parent, name, ino, under: Under::Older },
                    Record::Home { ino, home },
                    Record::Seen { ino, seen: part.map(|(_, seen)| seen) },
                    Record::Due { ino, due: false },
                ],
            );
        }
        plans
    }

    /// The records that bring back what was told after `after`.
    #[must_use]
    pub fn plan_reassert(
        &self,
        told: &Book,
        after: Moment,
        first: Ino,
        there: &OnBacking,
    ) -> Vec<Record> {
        let mut plan = Plan { ns: self, made: BTreeMap::new(), ups: HashMap::new() };
        let comes = |ino: Ino| {
            let placed = told.shape(ino).is_some_and(|shape| shape.placed != 0);
            self.may_come_back(told, ino, first)
                && !there.taken.contains(&ino)
                && (!placed || there.dirs.contains_key(&ino))
        };
        let is_local = |i: &Inode| i.home != Home::Own;
        let mut cleared: Vec<(Ino, &Name, Ino)> = Vec::new();
        let mut bound: Vec<(Ino, &Name, Ino)> = Vec::new();
        let mut stale: Vec<(Ino, &Name, Ino)> = Vec::new();
        for (parent, name, _, now) in told.names_after(after) {
            let known = self.dentry(parent, name).ok().flatten().map(|d| d.ino);
            // Perhaps the backing has it by now: that is seen there.
            if known.is_some() && known == now.map(|b| b.ino) {
                continue;
            }
            let now = now.filter(|b| !b.placed || there.dirs.contains_key(&b.ino)).map(|b| b.ino);
            // A file with several names may have got to the backing with the first of them.
            let lacks = |i: &Inode| i.kind == FileKind::Regular && known.is_none();
            let moves = |i: &Inode| is_local(i) || there.dirs.contains_key(&i.ino) || lacks(i);
            let now = now.filter(|ino| self.get(*ino).map_or_else(|| comes(*ino), moves));
            match (now, known) {
                (Some(ino), _) => bound.push((parent, name, ino)),
                // What the backing had there is found to be gone.
                (None, Some(ino)) if self.get(ino).is_some_and(is_local) => {
                    cleared.push((parent, name, ino));
                }
                _ => {}
            }
        }
        plan.make_what_has_a_place(told, &bound);
        bound.retain(|(parent, _, ino)| plan.is_dir(*parent) && plan.is_there(*ino));
        bound.retain(|(parent, _, ino)| !plan.is_dir(*ino) || plan.moves(*ino, *parent));
        // A directory has one name: where it was, it is not, unless something else is there by now.
        for (_, _, ino) in bound.iter().filter(|(.., ino)| plan.is_dir(*ino)) {
            for link in self.get(*ino).into_iter().flat_map(|i| &i.links) {
                let there =
                    |(parent, name): (Ino, &Name)| link.parent == parent && link.name == *name;
                let told =
                    bound.iter().chain(&cleared).any(|(parent, name, _)| there((*parent, name)));
                if !told {
                    stale.push((link.parent, &link.name, *ino));
                }
            }
        }
        cleared.extend(stale);
        let mut out = Vec::new();
        for (ino, kind) in &plan.made {
            let Some(shape) = told.shape(*ino) else { continue };
            let part = there.parts.get(ino).filter(|_| *kind == FileKind::Regular);
            let home = part.map_or(Home::None, |(dir, _)| Home::Part { dir: *dir });
            let dir = there.dirs.get(ino).filter(|_| *kind == FileKind::Directory);
            let home = if dir.is_some() { Home::Own } else { home };
            let seen = dir.or(part.map(|(_, seen)| seen)).copied();
            let inode = NewInode { seen, ..made(*ino, shape, home) };
            out.push(Record::Inode(Box::new(inode)));
        }
        let got_there = bound.iter().filter(|(.., ino)| self.get(*ino).is_some());
        for (_, _, ino) in got_there {
            if let Some(seen) = there.dirs.get(ino).copied() {
                out.push(Record::Home { ino: *ino, home: Home::Own });
                out.push(Record::Seen { ino: *ino, seen: Some(seen) });
            }
        }
        let mut links: BTreeMap<Ino, isize> = BTreeMap::new();
        for (parent, name, ino) in &cleared {
            *links.entry(*ino).or_default() -= 1;
            out.push(Record::NoDentry { parent: *parent, name: (*name).clone() });
        }
        for (parent, name, ino) in bound {
            let known = self.dentry(parent, name).ok().flatten();
            let under = match known.map(|d| d.under) {
                _ if there.dirs.contains_key(&ino) => Under::This,
                None | Some(Under::Nothing) => Under::Nothing,
                Some(Under::This | Under::Older) => Under::Older,
            };
            if let Some(replaced) = known {
                *links.entry(replaced.ino).or_default() -= 1;
            }
            *links.entry(ino).or_default() += 1;
            out.push(Record::Dentry { parent, name: name.clone(), ino, under });
            let lacks = |i: &Inode| i.home == Home::Own && under == Under::Nothing;
            if self.get(ino).is_some_and(lacks) {
                out.push(Record::Due { ino, due: true });
            }
        }
        self.bring_shapes_back(told, after, &plan, &mut out);
        for (ino, more) in links {
            let Some(inode) = self.get(ino) else { continue };
            // A directory that still has names is not gone, whatever is told.
            let empty = inode.dir.as_ref().is_none_or(|dir| dir.entries.is_empty());
            let nameless = inode.links.len() as isize + more <= 0;
            if nameless && empty && !self.is_open(ino) {
                out.push(Record::Free { ino });
            }
        }
        out
    }

    fn bring_shapes_back(
        &self,
        told: &Book,
        after: Moment,
        plan: &Plan<'_>,
        out: &mut Vec<Record>,
    ) {
        let is_local = |ino: Ino| self.get(ino).is_some_and(|i| i.home != Home::Own);
        for (ino, _, shape) in told.shapes_after(after) {
            if let Some(shape) = shape.filter(|_| is_local(ino)) {
                let change = AttrChange {
                    perm: Some(shape.perm),
                    uid: Some(shape.uid),
                    gid: Some(shape.gid),
                    atime: Some(shape.atime),
                    mtime: Some(shape.mtime),
                    ctime: None,
                };
                out.push(Record::Attr { ino, change });
            }
        }
        for (ino, name, _, value) in told.xattrs_after(after) {
            if is_local(ino) || plan.made.contains_key(&ino) {
                let (name, value) = (name.into(), value.map(Box::from));
                out.push(Record::Xattr { ino, name, value });
            }
        }
    }
}

/// The tree while it is planned.
struct Plan<'a> {
    ns: &'a Namespace,
    /// What comes back.
    made: BTreeMap<Ino, FileKind>,
    /// Where directories are put.
    ups: HashMap<Ino, Ino>,
}

impl Plan<'_> {
    /// What is not known is made when it has a name in a directory that is known, or made itself.
    fn make_what_has_a_place(&mut self, told: &Book, bound: &[(Ino, &Name, Ino)]) {
        loop {
            let before = self.made.len();
            for (parent, _, ino) in bound {
                if !self.is_there(*ino) && self.is_dir(*parent) {
                    let kind = told.shape(*ino).map(|shape| shape.kind);
                    self.made.extend(kind.map(|kind| (*ino, kind)));
                }
            }
            if self.made.len() == before {
                return;
            }
        }
    }

    fn is_there(&self, ino: Ino) -> bool {
        self.made.contains_key(&ino) || self.ns.get(ino).is_some()
    }

    fn is_dir(&self, ino: Ino) -> bool {
        let made = self.made.get(&ino).map(|kind| *kind == FileKind::Directory);
        made.unwrap_or_else(|| self.ns.get(ino).is_some_and(Inode::is_dir))
    }

    /// Puts a directory there, unless that is within itself or it was put somewhere already.
    fn moves(&mut self, dir: Ino, parent: Ino) -> bool {
        let mut at = parent;
        for _ in 0..DEPTH_MAX {
            if at == dir {
                return false;
            }
            if at == Ino::ROOT {
                break;
            }
            let up = self.ups.get(&at).copied();
            let link = || self.ns.get(at)?.links.first().map(|l| l.parent);
            // Where it will be is told later, or never.
            let Some(up) = up.or_else(link) else { break };
            at = up;
        }
        let free = !self.ups.contains_key(&dir);
        if free {
            self.ups.insert(dir, parent);
        }
        free
    }
}

fn made(ino: Ino, shape: &Shape, home: Home) -> NewInode {
    NewInode {
        ino,
        kind: shape.kind,
        perm: shape.perm,
        uid: shape.uid,
        gid: shape.gid,
        rdev: shape.rdev,
        atime: shape.atime,
        mtime: shape.mtime,
        ctime: shape.mtime,
        target: shape.target.clone(),
        xattrs: Vec::new(),
        home,
        seen: None,
        due: false,
        size: 0,
    }
}
