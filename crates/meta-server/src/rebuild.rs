//! A service without its journal: what there is is found again, from what nodes say.
//!
//! Names, modes and bytes of what the backing does not have come back as after a power loss
//! (`reassert.rs`), only that all of them are forgotten and not those of a second. What the backing has is
//! found there; but nodes and the kernels above them know it by numbers that this service would not
//! give it. So directories that names are in, as the nodes have heard of them, and files of which they say where
//! they are, get the numbers that they had, where the object is still the same one. Part files
//! had names that nobody can foretell: they get new ones.

use crate::backing::Backing;
use crate::core::Core;
use crate::lineage::EPOCH;
use ebb_namespace::{BackingPath, Book, Home, Seen};
use ebb_types::{Errno, FileKind, Ino, Name, NodeId, Version};
use rustix::fs::{OFlags, RenameFlags};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::time::SystemTime;

/// No job has had so many nodes before its first rebuild.
const FIRST_NEW_MIN: u32 = 1 << 20;

/// Of so many files nodes may say where they are.
const LOCATED_MAX: usize = 1 << 22;

/// In so many places one file may be.
const PLACES_MAX: usize = 64;

/// A state that is rebuilt from what nodes know, or was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuild {
    /// So many nodes must tell.
    wanted: u32,
    /// Who has.
    told: BTreeSet<NodeId>,
    /// Of copies of epochs below it this state knows nothing.
    pub epochs: u64,
    /// Nodes of before have numbers below it.
    pub first_new: NodeId,
    /// It is in the state.
    pub done: bool,
}

impl Rebuild {
    /// From so many nodes.
    pub fn from_nodes(wanted: u32) -> Rebuild {
        // As the clock counts, both are above all that were given out before.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let seconds = now.map_or(1, |d| d.as_secs());
        let since_first = u32::try_from(seconds.saturating_sub(EPOCH)).unwrap_or(u32::MAX / 2);
        Rebuild {
            wanted,
            told: BTreeSet::new(),
            epochs: seconds << 24,
            first_new: NodeId(since_first.max(FIRST_NEW_MIN)),
            done: false,
        }
    }

    /// A node has told everything.
    pub fn hear(&mut self, node: NodeId) {
        if !self.done {
            self.told.insert(node);
        }
    }

    /// How many have told, and how many must.
    pub fn progress(&self) -> (usize, u32) {
        (self.told.len(), self.wanted)
    }

    /// True until so many have told.
    pub fn lacks_nodes(&self) -> bool {
        self.lacks_beside(&BTreeSet::new())
    }

    /// The same, when these count, too.
    pub fn lacks_beside(&self, more: &BTreeSet<NodeId>) -> bool {
        self.told.union(more).count() < self.wanted as usize
    }

    /// True for a node of before that has not told.
    pub fn lacks(&self, node: NodeId) -> bool {
        node < self.first_new && !self.told.contains(&node)
    }
}

/// In which directory the part file of an inode is, and which object that is.
type Parts = BTreeMap<Ino, (Ino, Seen)>;

/// Where nodes say that a file is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Located {
    /// As each of them knows it, the newest word first. A file that was written over is another object since, and a
    /// node that had nothing to do with that may only know the one before.
    pub places: Vec<Place>,
    /// Somebody has it open, or has bytes of it that the backing lacks.
    pub needed: bool,
}

/// Where one node says that a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The newest version of the file that the node knows.
    pub as_of: Version,
    /// `st_ino` of the object.
    pub object: u64,
    /// From the root of the backing; or its part file was there.
    pub paths: Vec<Vec<Name>>,
}

impl Located {
    /// One more node has told. Of more than so many places those are forgotten of which least is known.
    fn hear(&mut self, other: Located) {
        self.needed |= other.needed;
        for place in other.places {
            let same =
                |known: &&mut Place| known.object == place.object && known.paths == place.paths;
            match self.places.iter_mut().find(same) {
                Some(known) => known.as_of = known.as_of.max(place.as_of),
                None => self.places.push(place),
            }
        }
        self.places.sort_by_key(|place| std::cmp::Reverse(place.as_of));
        self.places.truncate(PLACES_MAX);
    }
}

/// Takes out what cannot be: numbers of objects come again, so an object at a place is that file's which is told to be
/// there by its newest word; of several of these the one's that is needed. Otherwise it is nobody's, and found as ever.
fn without_doubles(mut told: BTreeMap<Ino, Located>) -> BTreeMap<Ino, Located> {
    let mut claims: BTreeMap<(u64, Vec<Name>), Vec<(Ino, bool)>> = BTreeMap::new();
    for (ino, located) in &told {
        for newest in located.places.iter().take(1) {
            for path in &newest.paths {
                let claim = claims.entry((newest.object, path.clone())).or_default();
                claim.push((*ino, located.needed));
            }
        }
    }
    let whose = |of: Vec<(Ino, bool)>| match of.as_slice() {
        [(only, _)] => Some(*only),
        several => {
            let mut needed = several.iter().filter(|(_, needed)| *needed);
            needed.next().filter(|_| needed.next().is_none()).map(|(ino, _)| *ino)
        }
    };
    let owners: BTreeMap<(u64, Vec<Name>), Option<Ino>> =
        claims.into_iter().map(|(at, of)| (at, whose(of))).collect();
    for (ino, located) in &mut told {
        for place in &mut located.places {
            let object = place.object;
            let may_be = |path: &Vec<Name>| {
                owners.get(&(object, path.clone())).is_none_or(|owner| *owner == Some(*ino))
            };
            place.paths.retain(may_be);
        }
    }
    told
}

impl Core {
    /// A node says where files are. It comes too late when others have gone on.
    pub fn hear_where(&self, ino: Ino, located: Located) {
        if self.state().is_being_rebuilt() {
            let mut known = self.words.located.lock();
            if known.len() < LOCATED_MAX {
                known.entry(ino).or_default().hear(located);
            }
        }
    }

    /// Directories that names are in, and the files that nodes have. Where part files are.
    pub(crate) async fn find_what_there_is(&self, told: &Book) -> Parts {
        let mut tried = BTreeSet::new();
        loop {
            let mut dirs = self.state().ns.directories_in(told);
            dirs.retain(|dir| tried.insert(dir.clone()));
            if dirs.is_empty() {
                break;
            }
            for (parent, name, ino) in dirs {
                self.find_object(parent, &name, ino, None).await;
            }
        }
        let mut parts = Parts::new();
        let located = without_doubles(std::mem::take(&mut *self.words.located.lock()));
        for (ino, at) in &located {
            for place in &at.places {
                if parts.contains_key(ino) || self.state().ns.get(*ino).is_some() {
                    break;
                }
                for path in &place.paths {
                    self.find_at(*ino, place.object, path, &mut parts).await;
                }
            }
        }
        // Others may have renamed it, or a directory above it, unheard; and what is moved to where the
        // backing has no directory becomes a part file.
        let local = self.state().ns.local_files(told);
        let is_lost = |ino: &Ino, needed: bool| {
            let known = self.state().ns.get(*ino).is_some() || parts.contains_key(ino);
            !known && (needed || local.contains(ino))
        };
        let of_nodes = located.iter().filter(|(ino, at)| is_lost(ino, at.needed));
        let of_nodes = of_nodes.flat_map(|(ino, at)| at.places.iter().map(|p| (p.object, *ino)));
        let found_before = local.iter().filter(|ino| is_lost(ino, true));
        let found_before = found_before.filter_map(|i| Some((ebb_namespace::object_of(*i)?, *i)));
        let lost: BTreeMap<u64, Ino> = of_nodes.chain(found_before).collect();
        if !lost.is_empty() {
            tracing::warn!(
                files = lost.len(),
                "not where nodes knew them: the backing is searched for their objects"
            );
            let objects = lost.keys().copied().collect();
            let found = self.backing.start(move |b| b.find_objects(objects)).await;
            for (object, path) in found.ok().and_then(Result::ok).unwrap_or_default() {
                let is_part = path.last().is_some_and(Name::is_reserved);
                if let Some(ino) = lost.get(&object).filter(|i| is_part || !local.contains(i)) {
                    self.find_at(*ino, object, &path, &mut parts).await;
                }
            }
        }
        parts
    }

    async fn find_at(&self, ino: Ino, object: u64, path: &[Name], parts: &mut Parts) {
        let Some((name, dirs)) = path.split_last() else { return };
        if name.is_reserved() {
            let part = self.take_part(ino, dirs, name, object).await;
            parts.extend(part.map(|part| (ino, part)));
        } else {
            self.find_file(ino, dirs, name, object).await;
        }
    }

    /// What is there is this inode, if it is that object and nothing else says otherwise.
    async fn find_object(&self, parent: Ino, name: &Name, ino: Ino, object: Option<u64>) {
        if ebb_namespace::is_found(ino) {
            // Its number follows from the object.
            if let Err(e) = self.look_again(parent, name).await {
                tracing::debug!(%parent, %name, error = %e, "not looked at");
            }
            return;
        }
        let _turn = self.turn().await;
        let Some(path) = self.state().ns.path(parent).map(|dir| dir.join(name)) else { return };
        let Ok(found) = self.backing.run(move |b| b.stat(&path)).await else { return };
        let same = match object {
            Some(object) => found.kind == FileKind::Regular && found.seen.key.ino == object,
            None => found.kind == FileKind::Directory,
        };
        if same {
            let mut state = self.state();
            let records = state.ns.plan_known(parent, name, ino, &found);
            self.commit_ns(&mut state, records);
        }
    }

    /// The directory of that path, looked for on the backing.
    async fn find_dir(&self, dirs: &[Name]) -> Option<Ino> {
        let mut at = Ino::ROOT;
        for name in dirs {
            let known =
                |core: &Core| core.state().ns.dentry(at, name).ok().flatten().map(|d| d.ino);
            let next = match known(self) {
                Some(next) => Some(next),
                None => {
                    self.look_again(at, name).await.ok()?;
                    known(self)
                }
            };
            at = next?;
        }
        let state = self.state();
        state.ns.get(at).filter(|dir| dir.is_dir() && dir.home == Home::Own).map(|dir| dir.ino)
    }

    async fn find_file(&self, ino: Ino, dirs: &[Name], name: &Name, object: u64) {
        if self.state().ns.get(ino).is_none()
            && let Some(dir) = self.find_dir(dirs).await
        {
            self.find_object(dir, name, ino, Some(object)).await;
        }
    }

    /// The part file of an inode gets the name that this service looks for. The directory that it is in, and
    /// which object it is.
    async fn take_part(
        &self,
        ino: Ino,
        dirs: &[Name],
        name: &Name,
        object: u64,
    ) -> Option<(Ino, Seen)> {
        if ebb_namespace::part_of(name) != Some(ino) {
            return None;
        }
        let dir = self.find_dir(dirs).await?;
        let (from, to) = {
            let state = self.state();
            let path = state.ns.path(dir)?;
            (path.join(name), path.join(&state.ns.part_name(ino)))
        };
        let shown = from.to_bytes();
        match self.backing.run(move |b| b.take_part(&from, &to, object)).await {
            Ok(seen) => Some((dir, seen)),
            Err(e) => {
                let path = String::from_utf8_lossy(&shown).into_owned();
                // It may have got its name.
                tracing::debug!(path, error = %e, "no part file of this object is there");
                None
            }
        }
    }
}

impl Backing {
    /// Where these objects are, as far as directories say; each once.
    fn find_objects(&self, mut wanted: BTreeSet<u64>) -> Result<Vec<(u64, Vec<Name>)>, Errno> {
        let mut found = Vec::new();
        let mut dirs: Vec<Vec<Name>> = vec![Vec::new()];
        while let Some(at) = dirs.pop() {
            // What others take away meanwhile is not there.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let Ok(dir) = self.beneath(&at, flags) else { continue };
            let Ok(entries) = rustix::fs::Dir::read_from(&dir) else { continue };
            for entry in entries.flatten() {
                let Ok(name) = Name::new(entry.file_name().to_bytes()) else { continue };
                let path = || [&at[..], std::slice::from_ref(&name)].concat();
                if wanted.remove(&entry.ino()) {
                    found.push((entry.ino(), path()));
                }
                if entry.file_type() == rustix::fs::FileType::Directory {
                    dirs.push(path());
                }
            }
            if wanted.is_empty() {
                break;
            }
        }
        Ok(found)
    }

    /// Gives a part file another name, if it is that object and has no further name.
    fn take_part(&self, from: &BackingPath, to: &BackingPath, object: u64) -> Result<Seen, Errno> {
        let there = self.stat(from)?;
        let single = there.kind == FileKind::Regular && there.seen.nlink == 1;
        if !single || there.seen.key.ino != object {
            return Err(Errno::ESTALE);
        }
        if from == to {
            // A service that died in the middle had found it.
            return Ok(there.seen);
        }
        let (Some((dir, from)), Some((_, name))) = (from.split(), to.split()) else {
            return Err(Errno::EINVAL);
        };
        let dir = self.dir(dir)?;
        let (from, name) = (from.as_os_str(), name.as_os_str());
        self.may_change()?;
        rustix::fs::renameat_with(dir.as_fd(), from, dir.as_fd(), name, RenameFlags::NOREPLACE)
            .map_err(crate::backing::errno)?;
        Ok(self.stat(to)?.seen)
    }
}
