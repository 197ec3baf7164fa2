//! The state: inodes by number, names by directory, and how records change them.

use crate::covered::Covered;
use crate::forget::Forgotten;
use crate::inode::{BackingKey, Dentry, Dir, DirStamp, Home, Inode, Link, Seen, Under};
use crate::opens::Opens;
use crate::parts::PartNames;
use crate::record::{AttrChange, BackingPath, NewInode, Record};
use ebb_types::{Attr, Errno, FileKind, Ino, Name, NodeId};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

/// More absent names than this of one directory are forgotten all at once: a program that
/// probes endlessly must not fill the memory.
const ABSENT_MAX: usize = 65_536;

/// A record that does not fit the state: the journal is not this job's, or damaged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("record does not fit the state: {0}")]
pub struct ReplayError(pub String);

/// What is known of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// It is there.
    Present(Dentry),
    /// It is not there, as far as the directory has not changed on the backing.
    Absent,
    /// Only the backing knows.
    Unknown,
}

/// The names, inodes and opens of a job.
#[derive(Clone, Debug)]
pub struct Namespace {
    inodes: HashMap<Ino, Inode>,
    by_key: HashMap<BackingKey, Ino>,
    covered: Covered,
    opens: Opens,
    pub(crate) part_names: Option<PartNames>,
    /// Everything that has a name and is not on the backing as it should be.
    pending: BTreeSet<Ino>,
    next: u64,
    moves: u64,
    /// Counts the looks at the backing that were taken in.
    looks: u64,
    pub(crate) forgotten: Forgotten,
    /// Inodes below it are older than the service.
    pub(crate) older_below: Ino,
}

impl Namespace {
    /// A namespace that knows only the root directory of the backing. Inode numbers are counted
    /// from `first`, which should differ between jobs: part files are named by them as well.
    #[must_use]
    pub fn new(root: &crate::Found, first: Ino) -> Namespace {
        let mut ns = Namespace::empty();
        ns.next = first.0.max(Ino::ROOT.0 + 1);
        let root = crate::adopt::found_inode(Ino::ROOT, root);
        ns.insert(&root);
        ns
    }

    /// A namespace without anything, for replay: the first record is the root.
    #[must_use]
    pub fn empty() -> Namespace {
        Namespace {
            inodes: HashMap::new(),
            by_key: HashMap::new(),
            covered: Covered::default(),
            opens: Opens::default(),
            part_names: None,
            pending: BTreeSet::new(),
            next: Ino::ROOT.0 + 1,
            moves: 0,
            looks: 0,
            forgotten: Forgotten::default(),
            older_below: Ino(0),
        }
    }

    // ---- questions ---------------------------------------------------------------------------

    /// The inode, if it exists.
    #[must_use]
    pub fn get(&self, ino: Ino) -> Option<&Inode> {
        self.inodes.get(&ino)
    }

    /// The inode, or ESTALE.
    pub fn inode(&self, ino: Ino) -> Result<&Inode, Errno> {
        self.inodes.get(&ino).ok_or(Errno::ESTALE)
    }

    pub(crate) fn dir_inode(&self, ino: Ino) -> Result<&Inode, Errno> {
        let inode = self.inode(ino)?;
        if inode.is_dir() { Ok(inode) } else { Err(Errno::ENOTDIR) }
    }

    pub(crate) fn dir(&self, ino: Ino) -> Result<&Dir, Errno> {
        self.inode(ino)?.dir.as_deref().ok_or(Errno::ENOTDIR)
    }

    /// How many inodes are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inodes.len()
    }

    /// True when not even the root is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inodes.is_empty()
    }

    /// Every inode, in no order.
    pub fn inodes(&self) -> impl Iterator<Item = &Inode> {
        self.inodes.values()
    }

    /// The number that the next new inode gets.
    #[must_use]
    pub fn next_ino(&self) -> Ino {
        Ino(self.next)
    }

    /// Attributes; the size of a regular file is 0 here.
    pub fn attr(&self, ino: Ino) -> Result<Attr, Errno> {
        let i = self.inode(ino)?;
        Ok(Attr {
            ino,
            kind: i.kind,
            perm: i.perm,
            nlink: self.nlink(i),
            uid: i.uid,
            gid: i.gid,
            rdev: i.rdev,
            size: i.own_size(),
            atime: i.atime,
            mtime: i.mtime,
            ctime: i.ctime,
        })
    }

    /// The number of names, as `stat` shows it.
    fn nlink(&self, inode: &Inode) -> u32 {
        let names = inode.links.len() as u32;
        match (&inode.dir, &inode.seen, inode.home) {
            (Some(d), Some(s), Home::Own) if s.nlink >= 2 => s.nlink + d.local_subdirs,
            // A file system that does not count directories says 1.
            (Some(_), Some(_), Home::Own) => 1,
            (Some(d), ..) => 2 + d.subdirs,
            (None, ..) => names + self.unseen_names(inode),
        }
    }

    /// Names on the backing of an inode's object that the job neither has nor hides: others made
    /// them, and nobody has looked at them yet.
    #[must_use]
    pub fn unseen_names(&self, inode: &Inode) -> u32 {
        let own = |s: &Seen| inode.home == Home::Own && s.nlink > 1;
        let Some(seen) = inode.seen.filter(own) else { return 0 };
        let there = inode.links.iter().filter(|l| self.is_on_backing(l)).count() as u32;
        seen.nlink.saturating_sub(there + self.covered.count(seen.key))
    }

    /// The object of the backing that a job-local name hides.
    pub(crate) fn covered(&self, parent: Ino, name: &Name) -> Option<BackingKey> {
        self.covered.at(parent, name)
    }

    /// What is known of a name, with the errno of a parent that cannot have names.
    pub fn look(&self, parent: Ino, name: &Name) -> Result<Absence, Errno> {
        let inode = self.dir_inode(parent)?;
        let dir = self.dir(parent)?;
        Ok(match dir.entries.get(name) {
            Some(d) => Absence::Present(*d),
            None if name.is_reserved() || inode.home != Home::Own => Absence::Absent,
            None if dir.complete || dir.absent.contains(name) => Absence::Absent,
            None => Absence::Unknown,
        })
    }

    /// The entry of a name that is known to be there.
    pub fn dentry(&self, parent: Ino, name: &Name) -> Result<Option<Dentry>, Errno> {
        Ok(self.dir(parent)?.entries.get(name).copied())
    }

    /// The names of a directory after `after`, in order.
    pub fn entries_after(
        &self,
        dir: Ino,
        after: Option<&Name>,
    ) -> Result<impl Iterator<Item = (&Name, Dentry)>, Errno> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let entries = &self.dir(dir)?.entries;
        Ok(entries.range::<Name, _>((from, Bound::Unbounded)).map(|(n, d)| (n, *d)))
    }

    /// The parent of a directory; the root is its own.
    pub fn parent(&self, dir: Ino) -> Result<Ino, Errno> {
        Ok(self.dir_inode(dir)?.links.first().map_or(Ino::ROOT, |l| l.parent))
    }

    /// The path of an inode by its first name, preferably one that the backing has; `None` when
    /// it has none.
    #[must_use]
    pub fn path(&self, ino: Ino) -> Option<BackingPath> {
        let mut names = Vec::new();
        let mut at = ino;
        while at != Ino::ROOT {
            let links = &self.get(at)?.links;
            let there = links.iter().find(|l| links.len() > 1 && self.is_on_backing(l));
            let link = there.or(links.first())?;
            names.push(link.name.clone());
            at = link.parent;
        }
        Some(BackingPath::from_reversed(names))
    }

    /// True when the backing has this name for the inode, as far as is noted.
    #[must_use]
    pub fn is_on_backing(&self, link: &Link) -> bool {
        self.dentry(link.parent, &link.name)
            .is_ok_and(|d| d.is_some_and(|d| d.under == Under::This))
    }

    /// Where the bytes of an inode are on the backing now.
    #[must_use]
    pub fn home_path(&self, ino: Ino) -> Option<BackingPath> {
        match self.get(ino)?.home {
            Home::None => None,
            Home::Part { dir } => Some(self.path(dir)?.join(&self.part_name(ino))),
            Home::Own => self.path(ino),
        }
    }

    /// True when `dir` is `ancestor` or below it.
    #[must_use]
    pub fn is_within(&self, dir: Ino, ancestor: Ino) -> bool {
        let mut at = dir;
        loop {
            if at == ancestor {
                return true;
            }
            match self.get(at).and_then(|i| i.links.first()) {
                Some(link) if at != Ino::ROOT => at = link.parent,
                _ => return false,
            }
        }
    }

    /// The inode that is this object of the backing.
    #[must_use]
    pub fn by_key(&self, key: BackingKey) -> Option<Ino> {
        self.by_key.get(&key).copied()
    }

    /// True while some node has it open.
    #[must_use]
    pub fn is_open(&self, ino: Ino) -> bool {
        self.opens.by(ino).is_some_and(|o| !o.is_empty())
    }

    /// The nodes that have it open.
    pub fn open_by(&self, ino: Ino) -> impl Iterator<Item = NodeId> + '_ {
        self.opens.by(ino).into_iter().flatten().copied()
    }

    /// What a node has open, in order.
    pub fn opens_of(&self, node: NodeId) -> impl Iterator<Item = Ino> + '_ {
        self.opens.of(node)
    }

    /// True when a node other than `node` has the file open.
    #[must_use]
    pub fn is_open_by_others(&self, ino: Ino, node: NodeId) -> bool {
        self.opens.by(ino).is_some_and(|nodes| nodes.iter().any(|n| *n != node))
    }

    /// True when this node has it open.
    #[must_use]
    pub fn is_open_by(&self, ino: Ino, node: NodeId) -> bool {
        self.opens.by(ino).is_some_and(|o| o.contains(&node))
    }

    /// Changes whenever a path may have changed or a name of `dir` did.
    #[must_use]
    pub fn generation(&self, dir: Ino) -> (u64, u64) {
        (self.moves, self.dir(dir).map_or(0, |d| d.generation))
    }

    /// A point in the history of looks at the backing, to be remembered before one.
    #[must_use]
    pub fn now_seen(&self) -> u64 {
        self.looks
    }

    /// What has still to reach the backing, after `after`, in order of inode numbers.
    pub fn pending_after(&self, after: Option<Ino>) -> impl Iterator<Item = Ino> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.pending.range((from, Bound::Unbounded)).copied()
    }

    /// How many inodes have still to reach the backing.
    #[must_use]
    pub fn pending_len(&self) -> usize {
        self.pending.len()
    }

    // ---- what is known of absence (a cache) --------------------------------------------------

    /// The backing does not have `name`, under this state of the directory.
    pub fn note_absent(&mut self, parent: Ino, name: &Name, stamp: DirStamp) {
        self.check_stamp(parent, stamp);
        if let Some(dir) = self.dir_mut(parent) {
            if dir.absent.len() >= ABSENT_MAX {
                dir.absent.clear();
            }
            dir.stamp = Some(stamp);
            dir.absent.insert(name.clone());
        }
    }

    /// All names of the directory are known, under this state of it.
    pub fn note_listed(&mut self, parent: Ino, stamp: DirStamp) {
        self.check_stamp(parent, stamp);
        if let Some(dir) = self.dir_mut(parent) {
            dir.stamp = Some(stamp);
            dir.complete = true;
            dir.listed = true;
            dir.absent.clear();
        }
    }

    /// The directory looks like this now: what was learned under another state is forgotten.
    /// True when nothing had to be.
    pub fn check_stamp(&mut self, parent: Ino, stamp: DirStamp) -> bool {
        match self.dir_mut(parent) {
            Some(dir) if dir.stamp != Some(stamp) => {
                dir.stamp = None;
                dir.complete = false;
                dir.absent.clear();
                false
            }
            _ => true,
        }
    }

    /// Nothing is known of the absence of names in this directory.
    pub fn forget_absence(&mut self, parent: Ino) {
        if let Some(dir) = self.dir_mut(parent) {
            dir.stamp = None;
            dir.complete = false;
            dir.absent.clear();
        }
    }

    /// True when all its names are known, as far as it has not changed on the backing.
    #[must_use]
    pub fn is_complete(&self, dir: Ino) -> bool {
        self.get(dir)
            .is_some_and(|i| i.home != Home::Own || i.dir.as_ref().is_some_and(|d| d.complete))
    }

    // ---- records -----------------------------------------------------------------------------

    /// Makes a record true.
    pub fn apply(&mut self, record: &Record) -> Result<(), ReplayError> {
        match record {
            Record::NextIno(ino) => self.next = self.next.max(ino.0),
            Record::Inode(new) => {
                if self.inodes.contains_key(&new.ino) {
                    return Err(ReplayError(format!("{} exists", new.ino)));
                }
                self.insert(new);
            }
            Record::Dentry { parent, name, ino, under } => {
                self.set_dentry(*parent, name, *ino, *under)?;
            }
            Record::NoDentry { parent, name } => self.drop_dentry(*parent, name)?,
            Record::Attr { ino, change } => change_attr(self.need(*ino)?, change),
            Record::Xattr { ino, name, value: Some(v) } => {
                self.need(*ino)?.xattrs.insert(name.clone(), v.clone());
            }
            Record::Xattr { ino, name, value: None } => {
                self.need(*ino)?.xattrs.remove(name);
            }
            Record::XattrsMoved { ino } => self.need(*ino)?.xattrs.clear(),
            Record::Home { ino, home } => {
                let inode = self.need(*ino)?;
                let old = std::mem::replace(&mut inode.home, *home);
                if let (Home::Own, Some(dir)) = (home, &mut inode.dir) {
                    dir.complete = false;
                    dir.absent.clear();
                }
                self.forgotten.moved_home(Some(old), Some(*home));
            }
            Record::Seen { ino, seen } => self.set_seen(*ino, *seen)?,
            Record::Due { ino, due } => self.need(*ino)?.due = *due,
            Record::Base { ino, .. } => {
                self.need(*ino)?;
            }
            Record::Open { node, ino } => {
                self.need(*ino)?;
                self.opens.open(*node, *ino);
            }
            Record::Close { node, ino } => self.opens.close(*node, *ino),
            Record::Free { ino } => self.free(*ino),
            Record::Covers { parent, name, key } => {
                if self.need_dir(*parent)?.entries.get(name).is_none_or(|d| d.under != Under::Older)
                {
                    return Err(ReplayError(format!("{name} in {parent} hides nothing")));
                }
                self.covered.set(*parent, name, Some(*key));
            }
            Record::PartNames { secret, from } => {
                self.part_names = Some(PartNames { secret: *secret, from: *from });
            }
            Record::Owed { ino, owed } => self.need(*ino)?.owed = *owed,
            Record::Forget { ino } => self.forget(*ino)?,
            Record::UsedUp { ino } => self.forgotten.use_up(*ino),
            Record::Place { ino, parent, name } => {
                self.keep_place(*ino, Link { parent: *parent, name: name.clone() });
            }
        }
        self.index(record);
        Ok(())
    }

    /// Keeps `pending` right for the inode that a record was about.
    fn index(&mut self, record: &Record) {
        let ino = match record {
            Record::Home { ino, .. }
            | Record::Due { ino, .. }
            | Record::Owed { ino, .. }
            | Record::Free { ino } => *ino,
            Record::Dentry { ino, .. } => *ino,
            _ => return,
        };
        self.index_ino(ino);
    }

    fn index_ino(&mut self, ino: Ino) {
        let wanted = self.get(ino).is_some_and(|i| {
            (i.home != Home::Own && !i.links.is_empty())
                || ((i.due || i.owed) && i.home == Home::Own)
        });
        if wanted {
            self.pending.insert(ino)
        } else {
            self.pending.remove(&ino)
        };
    }

    fn need(&mut self, ino: Ino) -> Result<&mut Inode, ReplayError> {
        self.inodes.get_mut(&ino).ok_or_else(|| ReplayError(format!("no {ino}")))
    }

    pub(crate) fn dir_mut(&mut self, ino: Ino) -> Option<&mut Dir> {
        self.inodes.get_mut(&ino)?.dir.as_deref_mut()
    }

    fn need_dir(&mut self, ino: Ino) -> Result<&mut Dir, ReplayError> {
        self.dir_mut(ino).ok_or_else(|| ReplayError(format!("{ino} is not a directory")))
    }

    fn insert(&mut self, new: &NewInode) {
        let dir = (new.kind == FileKind::Directory).then(Box::default);
        if !crate::forget::is_found(new.ino) {
            self.next = self.next.max(new.ino.0 + 1);
        }
        self.forgotten.drop_place(new.ino);
        self.forgotten.moved_home(None, Some(new.home));
        if let Some(seen) = new.seen {
            self.by_key.insert(seen.key, new.ino);
        }
        let inode = Inode {
            ino: new.ino,
            kind: new.kind,
            perm: new.perm,
            uid: new.uid,
            gid: new.gid,
            rdev: new.rdev,
            atime: new.atime,
            mtime: new.mtime,
            ctime: new.ctime,
            target: new.target.clone(),
            xattrs: new.xattrs.iter().cloned().collect(),
            links: SmallVec::new(),
            home: new.home,
            seen: new.seen,
            due: new.due,
            owed: false,
            seen_at: 0,
            dir,
        };
        self.inodes.insert(new.ino, inode);
        self.index_ino(new.ino);
    }

    fn set_dentry(
        &mut self,
        parent: Ino,
        name: &Name,
        ino: Ino,
        under: Under,
    ) -> Result<(), ReplayError> {
        let is_dir = self.need(ino)?.is_dir();
        let old = self.need_dir(parent)?.entries.get(name).copied();
        let covered = match (under, old) {
            (Under::Older, Some(Dentry { ino, under: Under::This })) => {
                self.get(ino).and_then(|i| i.seen).map(|s| s.key)
            }
            (Under::Older, Some(Dentry { under: Under::Older, .. })) => self.covered(parent, name),
            _ => None,
        };
        if old.is_none_or(|d| d.ino != ino) {
            if old.is_some() {
                self.drop_dentry(parent, name)?;
            }
            self.need(ino)?.links.push(Link { parent, name: name.clone() });
            self.moves += u64::from(is_dir);
        } else if let Some(old) = old {
            self.count_subdir(parent, old, -1);
        }
        let dir = self.need_dir(parent)?;
        let dentry = Dentry { ino, under };
        dir.entries.insert(name.clone(), dentry);
        dir.absent.remove(name);
        dir.generation += 1;
        self.count_subdir(parent, dentry, 1);
        self.covered.set(parent, name, covered);
        Ok(())
    }

    pub(crate) fn drop_dentry(&mut self, parent: Ino, name: &Name) -> Result<(), ReplayError> {
        let dir = self.need_dir(parent)?;
        let Some(old) = dir.entries.remove(name) else {
            return Err(ReplayError(format!("no {name} in {parent}")));
        };
        dir.generation += 1;
        self.covered.set(parent, name, None);
        self.count_subdir(parent, old, -1);
        let inode = self.need(old.ino)?;
        inode.links.retain(|l| !(l.parent == parent && l.name == *name));
        self.moves += u64::from(inode.is_dir());
        self.index_ino(old.ino);
        Ok(())
    }

    fn count_subdir(&mut self, parent: Ino, dentry: Dentry, by: i32) {
        let is_dir = self.get(dentry.ino).is_some_and(Inode::is_dir);
        if let (true, Some(dir)) = (is_dir, self.dir_mut(parent)) {
            dir.subdirs = dir.subdirs.saturating_add_signed(by);
            if dentry.under != Under::This {
                dir.local_subdirs = dir.local_subdirs.saturating_add_signed(by);
            }
        }
    }

    fn set_seen(&mut self, ino: Ino, seen: Option<Seen>) -> Result<(), ReplayError> {
        self.looks += 1;
        let now = self.looks;
        let inode = self.need(ino)?;
        inode.seen_at = now;
        let old = std::mem::replace(&mut inode.seen, seen);
        self.unindex_key(ino, old);
        if let Some(seen) = seen {
            self.by_key.insert(seen.key, ino);
        }
        Ok(())
    }

    /// An object may have been handed to another inode meanwhile; only its own entry goes.
    fn unindex_key(&mut self, ino: Ino, seen: Option<Seen>) {
        if let Some(seen) = seen
            && self.by_key.get(&seen.key) == Some(&ino)
        {
            self.by_key.remove(&seen.key);
        }
    }

    fn free(&mut self, ino: Ino) {
        self.remove_inode(ino);
        self.opens.free(ino);
        self.forgotten.use_up(ino);
    }

    pub(crate) fn remove_inode(&mut self, ino: Ino) {
        if let Some(inode) = self.inodes.remove(&ino) {
            self.unindex_key(ino, inode.seen);
            self.forgotten.moved_home(Some(inode.home), None);
        }
    }

    /// The whole state as records: applied to an empty namespace they give an equal one.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Record> {
        let ordered: BTreeMap<Ino, &Inode> = self.inodes.iter().map(|(k, v)| (*k, v)).collect();
        let mut out = vec![Record::NextIno(self.next_ino())];
        out.extend(self.part_names.map(PartNames::record));
        out.extend(ordered.values().map(|i| Record::Inode(Box::new(whole(i)))));
        for inode in ordered.values() {
            // Through the links, so that the order of an inode's names survives.
            for link in &inode.links {
                let under = self.dentry(link.parent, &link.name).ok().flatten();
                let under = under.map_or(Under::Nothing, |d| d.under);
                let (parent, name) = (link.parent, link.name.clone());
                let covered = self.covered(parent, &name);
                out.push(Record::Dentry { parent, name: name.clone(), ino: inode.ino, under });
                out.extend(covered.map(|key| Record::Covers { parent, name, key }));
            }
        }
        let owed = ordered.values().filter(|i| i.owed);
        out.extend(owed.map(|i| Record::Owed { ino: i.ino, owed: true }));
        let opens = self.opens.all().into_iter();
        out.extend(opens.map(|(ino, node)| Record::Open { node, ino }));
        self.forgotten.snapshot(&mut out);
        out
    }

    // ---- opens -------------------------------------------------------------------------------

    /// What it takes to note that a node has a file open: nothing when it is noted.
    pub fn plan_open(&self, node: NodeId, ino: Ino) -> Result<Vec<Record>, Errno> {
        self.inode(ino)?;
        Ok(if self.is_open_by(ino, node) { Vec::new() } else { vec![Record::Open { node, ino }] })
    }

    /// A node closed a file; the last close of a file without names frees it.
    #[must_use]
    pub fn plan_release(&self, node: NodeId, ino: Ino) -> Vec<Record> {
        if !self.is_open_by(ino, node) {
            return Vec::new();
        }
        let mut out = vec![Record::Close { node, ino }];
        let last = self.opens.by(ino).is_some_and(|o| o.len() == 1);
        if last && ino != Ino::ROOT && self.get(ino).is_some_and(|i| i.links.is_empty()) {
            out.push(Record::Free { ino });
        }
        out
    }

    /// Everything that a node has open is closed, not by itself: it may come back with bytes of it.
    #[must_use]
    pub fn plan_release_all(&self, node: NodeId) -> Vec<Record> {
        let inos: Vec<Ino> = self.opens.of(node).collect();
        let found = inos.iter().filter(|ino| crate::forget::is_found(**ino));
        let mut out: Vec<Record> = found.map(|ino| Record::UsedUp { ino: *ino }).collect();
        out.extend(inos.into_iter().flat_map(|ino| self.plan_release(node, ino)));
        out
    }
}

fn change_attr(inode: &mut Inode, c: &AttrChange) {
    inode.perm = c.perm.unwrap_or(inode.perm);
    inode.uid = c.uid.unwrap_or(inode.uid);
    inode.gid = c.gid.unwrap_or(inode.gid);
    inode.atime = c.atime.unwrap_or(inode.atime);
    inode.mtime = c.mtime.unwrap_or(inode.mtime);
    inode.ctime = c.ctime.unwrap_or(inode.ctime);
}

fn whole(i: &Inode) -> NewInode {
    NewInode {
        ino: i.ino,
        kind: i.kind,
        perm: i.perm,
        uid: i.uid,
        gid: i.gid,
        rdev: i.rdev,
        atime: i.atime,
        mtime: i.mtime,
        ctime: i.ctime,
        target: i.target.clone(),
        xattrs: i.xattrs.iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
        home: i.home,
        seen: i.seen,
        due: i.due,
        size: 0,
    }
}
