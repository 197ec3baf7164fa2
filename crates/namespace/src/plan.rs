//! Plans, and the planner that collects one while an operation's rules are worked through.

use crate::inode::{Home, Inode, Under};
use crate::record::{AttrChange, BackingPath, Effect, NewInode, Record, Replace};
use crate::tree::Namespace;
use crate::xattr::XattrMode;
use ebb_types::{Errno, FileKind, Ino, Name, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A backing object to look at again after the effects of a step: its state as seen then becomes
/// a [`Record::Seen`] of `ino`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restat {
    /// The inode.
    pub ino: Ino,
    /// Where its object is once the effects are done.
    pub path: BackingPath,
}

/// Effects that belong together and what is true when all of them succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// In order.
    pub effects: Vec<Effect>,
    /// To look at afterwards.
    pub restat: Vec<Restat>,
    /// To apply afterwards, before the results of `restat`.
    pub records: Vec<Record>,
}

/// What an operation does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In order; each is applied before the next begins.
    pub steps: Vec<Step>,
    /// The inode that the operation made or found.
    pub ino: Option<Ino>,
}

impl Plan {
    /// True when the backing is not touched.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.steps.iter().all(|s| s.effects.is_empty() && s.restat.is_empty())
    }

    /// True when nothing happens at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.is_local() && self.steps.iter().all(|s| s.records.is_empty())
    }
}

/// Collects a plan. Reads the state as it was before the plan: whoever adds effects after moving
/// something computes the paths first.
pub(crate) struct Planner<'a> {
    pub ns: &'a Namespace,
    pub now: Time,
    done: Vec<Step>,
    step: Step,
    made_dirs: BTreeSet<Ino>,
    next: u64,
}

impl<'a> Planner<'a> {
    pub fn new(ns: &'a Namespace, now: Time) -> Planner<'a> {
        Planner {
            ns,
            now,
            done: Vec::new(),
            step: Step::default(),
            made_dirs: BTreeSet::new(),
            next: ns.next_ino().0,
        }
    }

    pub fn finish(mut self, ino: Option<Ino>) -> Plan {
        self.end_step();
        Plan { steps: self.done, ino }
    }

    /// The same for a change of names. Nothing of one may be left when a part of it fails, and what
    /// it takes away must not be gone before the rest is done.
    pub fn finish_names(mut self, ino: Option<Ino>) -> Plan {
        self.step.effects.sort_by_key(Effect::rank);
        self.finish(ino)
    }

    pub fn end_step(&mut self) {
        let step = std::mem::take(&mut self.step);
        if step != Step::default() {
            self.done.push(step);
        }
    }

    pub fn effect(&mut self, effect: Effect) {
        self.step.effects.push(effect);
    }

    pub fn record(&mut self, record: Record) {
        self.step.records.push(record);
    }

    pub fn restat(&mut self, ino: Ino, path: BackingPath) {
        self.step.restat.retain(|r| r.ino != ino);
        self.step.restat.push(Restat { ino, path });
    }

    pub fn new_ino(&mut self) -> Ino {
        self.next += 1;
        Ino(self.next - 1)
    }

    pub fn new_inode(&mut self, inode: NewInode) {
        self.record(Record::Inode(Box::new(inode)));
    }

    pub fn dentry(&mut self, parent: Ino, name: &Name, ino: Ino, under: Under) {
        self.record(Record::Dentry { parent, name: name.clone(), ino, under });
    }

    pub fn no_dentry(&mut self, parent: Ino, name: &Name) {
        self.record(Record::NoDentry { parent, name: name.clone() });
    }

    pub fn ctime(&mut self, ino: Ino) {
        let change = AttrChange { ctime: Some(self.now), ..AttrChange::default() };
        self.record(Record::Attr { ino, change });
    }

    /// A name in `dir` changed.
    pub fn touch_dir(&mut self, dir: Ino) {
        let now = Some(self.now);
        let change = AttrChange { mtime: now, ctime: now, ..AttrChange::default() };
        self.record(Record::Attr { ino: dir, change });
    }

    pub fn path(&self, ino: Ino) -> Result<BackingPath, Errno> {
        self.ns.path(ino).ok_or(Errno::ENOENT)
    }

    pub fn child(&self, parent: Ino, name: &Name) -> Result<BackingPath, Errno> {
        Ok(self.path(parent)?.join(name))
    }

    fn on_backing(&self, dir: Ino) -> bool {
        self.made_dirs.contains(&dir) || self.ns.get(dir).is_some_and(|i| i.home == Home::Own)
    }

    /// Look again at a directory whose names on the backing changed.
    pub fn restat_dir(&mut self, dir: Ino) {
        if self.on_backing(dir)
            && let Some(path) = self.ns.path(dir)
        {
            self.restat(dir, path);
        }
    }

    /// Brings `dir` and its ancestors to the backing, as steps of their own.
    pub fn ensure_dir(&mut self, dir: Ino) -> Result<(), Errno> {
        let mut chain = Vec::new();
        let mut at = dir;
        while !self.on_backing(at) {
            let inode = self.ns.dir_inode(at)?;
            chain.push(at);
            at = inode.links.first().ok_or(Errno::ENOENT)?.parent;
        }
        for ino in chain.into_iter().rev() {
            let kept = std::mem::take(&mut self.step);
            self.make_dir(ino)?;
            self.end_step();
            self.step = kept;
        }
        Ok(())
    }

    fn make_dir(&mut self, ino: Ino) -> Result<(), Errno> {
        let inode = self.ns.dir_inode(ino)?;
        let link = inode.links.first().ok_or(Errno::ENOENT)?.clone();
        let path = self.path(ino)?;
        self.effect(Effect::Mkdir { path: path.clone(), perm: inode.perm | 0o700 });
        self.attributes(inode, &path);
        self.record(Record::Home { ino, home: Home::Own });
        self.dentry(link.parent, &link.name, ino, Under::This);
        self.record(Record::XattrsMoved { ino });
        // What is made in it later moves its mtime; the last step of a drain puts it right.
        self.record(Record::Due { ino, due: true });
        self.names_added(link.parent);
        self.made_dirs.insert(ino);
        self.restat(ino, path);
        Ok(())
    }

    /// What the backing lacks of the extended attributes. One that it does not take must not hold
    /// back the rest.
    pub fn offer_xattrs(&mut self, inode: &Inode, path: &BackingPath) {
        for (name, value) in &inode.xattrs {
            let (path, name, value) = (path.clone(), name.clone(), value.clone());
            self.effect(Effect::SetXattr { path, name, value, mode: XattrMode::Offer });
        }
    }

    /// Gives a new object of the backing the attributes of its inode. Times come last.
    pub fn attributes(&mut self, inode: &Inode, path: &BackingPath) {
        let path = || path.clone();
        let (uid, gid) = (Some(inode.uid), Some(inode.gid));
        self.effect(Effect::Chown { path: path(), uid, gid, strict: false });
        self.offer_xattrs(inode, &path());
        if inode.kind != FileKind::Symlink {
            self.effect(Effect::Chmod { path: path(), perm: inode.perm });
        }
        let (atime, mtime) = (Some(inode.atime), Some(inode.mtime));
        self.effect(Effect::Utimens { path: path(), atime, mtime });
    }

    /// What the backing has under a job-local name goes: other names of it lose a link.
    pub fn uncover(&mut self, parent: Ino, name: &Name) -> Result<(), Errno> {
        let covered = self.ns.covered(parent, name).and_then(|key| self.ns.by_key(key));
        let Some(inode) = covered.and_then(|ino| self.ns.get(ino)) else { return Ok(()) };
        if let Some(there) = inode.links.iter().find(|l| self.ns.is_on_backing(l)) {
            let path = self.child(there.parent, &there.name)?;
            self.restat(inode.ino, path);
        }
        Ok(())
    }

    /// Materialising put names into `dir` on the backing, long after the job made them.
    pub fn names_added(&mut self, dir: Ino) {
        if !self.made_dirs.contains(&dir) {
            self.record(Record::Due { ino: dir, due: true });
        }
        self.restat_dir(dir);
    }

    /// `inode` loses the name (`parent`, `name`), whose own fate on the backing the caller
    /// decides: frees it after its last name, keeps its part file beside one of the others.
    pub fn unlinked(&mut self, inode: &Inode, parent: Ino, name: &Name) -> Result<(), Errno> {
        let gone = |l: &&crate::Link| l.parent == parent && l.name == *name;
        let rest: Vec<_> = inode.links.iter().filter(|l| !gone(l)).collect();
        self.ctime(inode.ino);
        if rest.iter().all(|l| l.parent != parent) {
            self.no_part(inode, parent)?;
        }
        let Some(other) = rest.first() else {
            return self.orphaned(inode);
        };
        match inode.home {
            Home::Own => match rest.iter().find(|l| self.ns.is_on_backing(l)) {
                Some(there) => {
                    let path = self.child(there.parent, &there.name)?;
                    self.restat(inode.ino, path);
                }
                None => self.stranded(inode)?,
            },
            Home::Part { dir } if rest.iter().all(|l| l.parent != dir) => {
                self.move_part(inode, dir, other.parent)?;
            }
            Home::Part { .. } | Home::None => {}
        }
        Ok(())
    }

    /// A file has no name in `dir` any more: nor may it have a part file there that nobody has noted.
    pub fn no_part(&mut self, inode: &Inode, dir: Ino) -> Result<(), Errno> {
        if self.ns.may_have_part(inode) && self.on_backing(dir) {
            let path = self.child(dir, &self.ns.part_name(inode.ino))?;
            self.effect(Effect::Unlink { path });
        }
        Ok(())
    }

    /// The only name that the backing had is going, before the others got there: the object
    /// waits for them as a part file. (The caller has removed the name; the object is kept by
    /// the link that is made first.)
    fn stranded(&mut self, inode: &Inode) -> Result<(), Errno> {
        let there = inode.links.iter().find(|l| self.ns.is_on_backing(l));
        let (Some(there), Some(rest)) =
            (there, inode.links.iter().find(|l| !self.ns.is_on_backing(l)))
        else {
            return Ok(());
        };
        self.ensure_dir(rest.parent)?;
        let from = self.child(there.parent, &there.name)?;
        let part = self.child(rest.parent, &self.ns.part_name(inode.ino))?;
        self.step.effects.insert(0, Effect::Link { from, to: part.clone() });
        self.record(Record::Home { ino: inode.ino, home: Home::Part { dir: rest.parent } });
        self.record(Record::Due { ino: inode.ino, due: false });
        self.restat(inode.ino, part);
        Ok(())
    }

    fn orphaned(&mut self, inode: &Inode) -> Result<(), Errno> {
        if let Home::Part { dir } = inode.home {
            let path = self.child(dir, &self.ns.part_name(inode.ino))?;
            self.effect(Effect::Unlink { path });
        }
        self.forgotten(inode);
        Ok(())
    }

    /// The last name is gone and so is everything on the backing.
    pub fn forgotten(&mut self, inode: &Inode) {
        if self.ns.is_open(inode.ino) {
            self.record(Record::Home { ino: inode.ino, home: Home::None });
            self.record(Record::Seen { ino: inode.ino, seen: None });
            self.record(Record::Due { ino: inode.ino, due: false });
        } else {
            self.record(Record::Free { ino: inode.ino });
        }
    }

    /// The part file goes where one of the inode's names is.
    pub fn move_part(&mut self, inode: &Inode, from: Ino, to: Ino) -> Result<(), Errno> {
        self.ensure_dir(to)?;
        let part = self.ns.part_name(inode.ino);
        let (from_path, to_path) = (self.child(from, &part)?, self.child(to, &part)?);
        self.effect(Effect::Rename { from: from_path, to: to_path.clone(), replace: Replace::Yes });
        self.record(Record::Home { ino: inode.ino, home: Home::Part { dir: to } });
        self.restat(inode.ino, to_path);
        self.restat_dir(from);
        self.restat_dir(to);
        Ok(())
    }
}
