//! What the backing has is taken into the state, once, name by name. What the job made or has
//! not flushed always wins over what others did there.

use crate::inode::{BackingKey, Dentry, Found, Home, Inode, Under};
use crate::plan::{Plan, Planner};
use crate::record::{AttrChange, NewInode, Record};
use crate::tree::Namespace;
use ebb_types::{Errno, FileKind, Ino, Name, Time};
use std::collections::{BTreeMap, BTreeSet};

/// Which files have bytes that only some node's cache holds.
pub type IsDirty<'a> = &'a dyn Fn(Ino) -> bool;

pub(crate) fn found_inode(ino: Ino, f: &Found) -> NewInode {
    NewInode {
        ino,
        kind: f.kind,
        perm: f.perm,
        uid: f.uid,
        gid: f.gid,
        rdev: f.rdev,
        atime: f.atime,
        mtime: f.seen.mtime,
        ctime: f.seen.ctime,
        target: f.target.clone(),
        xattrs: Vec::new(),
        home: Home::Own,
        seen: Some(f.seen),
        due: false,
        size: f.seen.size,
    }
}

impl Namespace {
    /// The backing was asked for `name` in `parent` and answered `found`. `plan.ino` is what the
    /// name means afterwards. Nothing is done on the backing. `asked` is
    /// [`Namespace::now_seen`] from before the question: what was seen later is newer.
    pub fn plan_found(
        &self,
        parent: Ino,
        name: &Name,
        found: Option<&Found>,
        dirty: IsDirty<'_>,
        asked: u64,
        now: Time,
    ) -> Result<Plan, Errno> {
        let mut a = Adopter::new(Planner::new(self, now), dirty, asked);
        let ino = a.reconcile(parent, name, found)?;
        Ok(a.p.finish(ino))
    }

    /// The backing directory was listed whole.
    pub fn plan_listed(
        &self,
        parent: Ino,
        listed: &BTreeMap<Name, Found>,
        dirty: IsDirty<'_>,
        asked: u64,
        now: Time,
    ) -> Result<Plan, Errno> {
        let mut a = Adopter::new(Planner::new(self, now), dirty, asked);
        for (name, found) in listed {
            a.reconcile(parent, name, Some(found))?;
        }
        for name in self.dir(parent)?.entries.keys() {
            if !listed.contains_key(name) {
                a.reconcile(parent, name, None)?;
            }
        }
        Ok(a.p.finish(Some(parent)))
    }

    /// The root was looked at again; another directory in its place is an error.
    pub fn plan_root_found(&self, found: &Found, asked: u64, now: Time) -> Result<Plan, Errno> {
        let root = self.inode(Ino::ROOT)?;
        if found.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let mut a = Adopter::new(Planner::new(self, now), &|_| false, asked);
        a.refresh(root, found);
        Ok(a.p.finish(Some(Ino::ROOT)))
    }
}

struct Adopter<'a> {
    p: Planner<'a>,
    dirty: IsDirty<'a>,
    asked: u64,
    /// Adopted within this plan: two names of one object in one listing.
    fresh: BTreeMap<(u64, u64), Ino>,
    /// Names taken from (negative) and given to known inodes within this plan.
    balance: BTreeMap<Ino, isize>,
    /// Directories that others moved within one listing: their old names are dealt with.
    moved: BTreeSet<Ino>,
    /// Inodes that this plan lets go: their objects, found again, are new ones.
    gone: BTreeSet<Ino>,
    /// Numbers of objects that this plan uses.
    given: BTreeSet<Ino>,
}

impl<'a> Adopter<'a> {
    fn new(p: Planner<'a>, dirty: IsDirty<'a>, asked: u64) -> Adopter<'a> {
        Adopter {
            p,
            dirty,
            asked,
            fresh: BTreeMap::new(),
            balance: BTreeMap::new(),
            moved: BTreeSet::new(),
            gone: BTreeSet::new(),
            given: BTreeSet::new(),
        }
    }

    /// How many names the inode has at this point of the plan.
    fn names(&self, inode: &Inode) -> usize {
        let by = self.balance.get(&inode.ino).copied().unwrap_or(0);
        inode.links.len().saturating_add_signed(by)
    }

    fn reconcile(
        &mut self,
        parent: Ino,
        name: &Name,
        found: Option<&Found>,
    ) -> Result<Option<Ino>, Errno> {
        if name.is_reserved() {
            return Ok(None);
        }
        let entry = self.p.ns.dentry(parent, name)?.filter(|d| !self.moved.contains(&d.ino));
        match (entry, found) {
            (None, None) => Ok(None),
            (None, Some(f)) => self.adopt(parent, name, f),
            (Some(d), None) => self.missing(parent, name, d),
            (Some(d), Some(f)) => self.compare(parent, name, d, f),
        }
    }

    /// A name that only the backing had.
    fn adopt(&mut self, parent: Ino, name: &Name, f: &Found) -> Result<Option<Ino>, Errno> {
        if let Some(ino) = self.fresh.get(&key_pair(f.seen.key)).copied() {
            self.p.dentry(parent, name, ino, Under::This);
            return Ok(Some(ino));
        }
        let known = self.p.ns.by_key(f.seen.key).and_then(|i| self.p.ns.get(i));
        if let Some(inode) = known
            .filter(|i| i.home == Home::Own && same_object(i, f) && !self.gone.contains(&i.ino))
        {
            return self.adopt_known(parent, name, inode, f);
        }
        let number = self.p.ns.number_for(f.seen.key).filter(|n| self.given.insert(*n));
        let ino = number.unwrap_or_else(|| self.p.new_ino());
        self.p.new_inode(found_inode(ino, f));
        self.p.dentry(parent, name, ino, Under::This);
        if f.kind != FileKind::Directory {
            self.fresh.insert(key_pair(f.seen.key), ino);
        }
        Ok(Some(ino))
    }

    /// Another name of an object we know: a hard link, or a directory that others moved.
    fn adopt_known(
        &mut self,
        parent: Ino,
        name: &Name,
        inode: &Inode,
        f: &Found,
    ) -> Result<Option<Ino>, Errno> {
        if inode.is_dir() {
            if self.p.ns.is_within(parent, inode.ino) {
                return Err(Errno::ESTALE);
            }
            self.p.dentry(parent, name, inode.ino, Under::This);
            for link in &inode.links {
                self.p.no_dentry(link.parent, &link.name);
            }
            self.moved.insert(inode.ino);
        } else {
            self.p.dentry(parent, name, inode.ino, Under::This);
            *self.balance.entry(inode.ino).or_default() += 1;
        }
        self.refresh(inode, f);
        Ok(Some(inode.ino))
    }

    /// The backing does not have a name that we have.
    fn missing(&mut self, parent: Ino, name: &Name, d: Dentry) -> Result<Option<Ino>, Errno> {
        match d.under {
            Under::Nothing => Ok(Some(d.ino)),
            Under::Older => {
                self.p.dentry(parent, name, d.ino, Under::Nothing);
                Ok(Some(d.ino))
            }
            Under::This => {
                let kept = self.lose(parent, name, d.ino, Under::Nothing)?;
                Ok(kept.then_some(d.ino))
            }
        }
    }

    /// The backing has something under a name that we have.
    fn compare(
        &mut self,
        parent: Ino,
        name: &Name,
        d: Dentry,
        f: &Found,
    ) -> Result<Option<Ino>, Errno> {
        let inode = self.p.ns.inode(d.ino)?;
        let same = same_object(inode, f);
        match d.under {
            Under::This if same => {
                self.refresh(inode, f);
                Ok(Some(d.ino))
            }
            Under::This => {
                if self.lose(parent, name, d.ino, Under::Older)? {
                    self.covers(parent, name, f);
                    Ok(Some(d.ino))
                } else {
                    self.adopt(parent, name, f)
                }
            }
            // Published or made by us, but the service stopped before it could note that.
            Under::Nothing | Under::Older if same => {
                self.at_home(parent, name, inode, f);
                Ok(Some(d.ino))
            }
            Under::Nothing if inode.is_dir() && f.kind == FileKind::Directory => {
                self.at_home(parent, name, inode, f);
                Ok(Some(d.ino))
            }
            Under::Nothing => {
                self.p.dentry(parent, name, d.ino, Under::Older);
                self.covers(parent, name, f);
                Ok(Some(d.ino))
            }
            Under::Older => {
                self.covers(parent, name, f);
                Ok(Some(d.ino))
            }
        }
    }

    /// A job-local name has this under it on the backing.
    fn covers(&mut self, parent: Ino, name: &Name, f: &Found) {
        let key = f.seen.key;
        if self.p.ns.covered(parent, name) != Some(key) {
            self.p.record(Record::Covers { parent, name: name.clone(), key });
        }
    }

    /// A job-local inode turns out to be on the backing under its name.
    fn at_home(&mut self, parent: Ino, name: &Name, inode: &Inode, f: &Found) {
        let ino = inode.ino;
        self.p.record(Record::Home { ino, home: Home::Own });
        self.p.record(Record::Seen { ino, seen: Some(f.seen) });
        self.p.dentry(parent, name, ino, Under::This);
        self.p.record(Record::Due { ino, due: true });
    }

    /// Attributes that others changed become ours, unless our own are still on their way.
    fn refresh(&mut self, inode: &Inode, f: &Found) {
        // While the backing was asked, we may have changed the object ourselves.
        if inode.seen == Some(f.seen) || inode.seen_at > self.asked {
            return;
        }
        let ino = inode.ino;
        self.p.record(Record::Seen { ino, seen: Some(f.seen) });
        if inode.due || (self.dirty)(ino) {
            return;
        }
        let own_mtime = inode.is_dir().then_some(inode.mtime);
        let change = AttrChange {
            perm: Some(f.perm),
            uid: Some(f.uid),
            gid: Some(f.gid),
            atime: Some(f.atime),
            mtime: Some(f.seen.mtime.max(own_mtime.unwrap_or(f.seen.mtime))),
            ctime: Some(f.seen.ctime.max(own_mtime.unwrap_or(f.seen.ctime))),
        };
        self.p.record(Record::Attr { ino, change });
        let old = inode.seen;
        let content = |s: crate::Seen| (s.key, s.size, s.mtime, s.ctime);
        // A change of nlink alone comes with a new ctime; so does every change of content.
        if inode.kind == FileKind::Regular && old.map(content) != Some(content(f.seen)) {
            self.p.record(Record::Base { ino, len: f.seen.size });
        }
    }

    /// The object behind (`parent`, `name`) is gone or another one. True when the job still
    /// needs the inode: then it is job-local again, over whatever is `under` the name now.
    fn lose(&mut self, parent: Ino, name: &Name, ino: Ino, under: Under) -> Result<bool, Errno> {
        let inode = self.p.ns.inode(ino)?;
        if inode.is_dir() {
            return self.lose_dir(parent, name, inode, under);
        }
        let moved = self.balance.get(&ino).is_some_and(|b| *b > 0);
        if moved || !(self.dirty)(ino) {
            self.p.no_dentry(parent, name);
            *self.balance.entry(ino).or_default() -= 1;
            if self.names(inode) == 0 {
                self.forget(inode);
            } else {
                self.p.ctime(ino);
            }
            return Ok(false);
        }
        self.homeless(inode);
        self.p.record(Record::Base { ino, len: 0 });
        for link in &inode.links {
            let here = link.parent == parent && link.name == *name;
            let under = if here { under } else { Under::Older };
            self.p.dentry(link.parent, &link.name, ino, under);
        }
        Ok(true)
    }

    fn lose_dir(
        &mut self,
        parent: Ino,
        name: &Name,
        inode: &Inode,
        under: Under,
    ) -> Result<bool, Errno> {
        let mut kept = false;
        let moved = self.moved.clone();
        let children: Vec<(Name, Dentry)> =
            self.p.ns.dir(inode.ino)?.entries.iter().map(|(n, d)| (n.clone(), *d)).collect();
        for (child, d) in children.into_iter().filter(|(_, d)| !moved.contains(&d.ino)) {
            kept |= match d.under {
                Under::This => self.lose(inode.ino, &child, d.ino, Under::Nothing)?,
                Under::Nothing => true,
                Under::Older => {
                    self.p.dentry(inode.ino, &child, d.ino, Under::Nothing);
                    true
                }
            };
        }
        if kept {
            self.homeless(inode);
            self.p.dentry(parent, name, inode.ino, under);
        } else {
            self.p.no_dentry(parent, name);
            self.forget(inode);
        }
        Ok(kept)
    }

    fn forget(&mut self, inode: &Inode) {
        self.gone.insert(inode.ino);
        self.p.forgotten(inode);
    }

    fn homeless(&mut self, inode: &Inode) {
        let ino = inode.ino;
        self.p.record(Record::Home { ino, home: Home::None });
        self.p.record(Record::Seen { ino, seen: None });
        self.p.record(Record::Due { ino, due: false });
    }
}

fn key_pair(k: BackingKey) -> (u64, u64) {
    (k.dev, k.ino)
}

/// The same object: file systems hand out inode numbers again, so the type must fit, and the
/// target of a symlink, which cannot change.
fn same_object(inode: &Inode, f: &Found) -> bool {
    inode.seen.is_some_and(|s| s.key == f.seen.key)
        && inode.kind == f.kind
        && (f.kind != FileKind::Symlink || inode.target == f.target)
}
