//! lookup, make, unlink, rename, link.

use super::coupling::{awaits_names_in, made_in};
use super::{Call, OpError, OpResult, coupling, name};
use crate::core::Checked;
use crate::state::{Entry, Outcome, State};
use ebb_locks::Mutex;
use ebb_namespace::{Absence, Home, New, Plan, RenameMode};
use ebb_types::{Attr, Errno, FileKind, Ino, Name, Time};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;

impl Call {
    pub(super) fn lookup_fast(&self, op: &pb::Lookup) -> Option<OpResult> {
        let known = name(&op.name).and_then(|n| self.core.is_known(Ino(op.parent), &n));
        match known {
            Err(e) => Some(Err(e.into())),
            Ok(true) => Some(self.found(op)),
            Ok(false) => None,
        }
    }

    pub(super) async fn lookup(&self, op: &pb::Lookup) -> OpResult {
        let (parent, name) = (Ino(op.parent), name(&op.name)?);
        loop {
            let before = self.core.forgetting.count();
            self.core.learn(parent, &name).await?;
            let unknown = self.core.state().ns.look(parent, &name)? == Absence::Unknown;
            // What was forgotten again in between must not be said to be missing.
            if !unknown || self.core.forgetting.count() == before {
                return self.found(op);
            }
        }
    }

    fn found(&self, op: &pb::Lookup) -> OpResult {
        let state = self.core.state();
        let (parent, name) = (Ino(op.parent), name(&op.name)?);
        let dentry = state.ns.dentry(parent, &name)?;
        let dir = self.told(&state, parent, Some(&name), op.lease, false);
        let Some(dentry) = dentry else {
            // Nothing can be said along with an error.
            let await_ms = awaits_names_in(&state, parent);
            if await_ms > 0 {
                let awaited = pb::Entry { await_ms, ..Default::default() };
                return Ok(Some(Body::Entry(awaited)));
            }
            let absent =
                dir.map(|dir| Body::Entry(pb::Entry { dir: Some(dir), ..Default::default() }));
            return absent.map_or(Err(Errno::ENOENT.into()), |body| Ok(Some(body)));
        };
        let found = pb::Entry { dir, ..self.entry_leased(&state, dentry.ino, op.lease)? };
        Ok(Some(Body::Entry(found)))
    }

    /// A directory as it is now, with a lease when one is wanted and granted.
    fn told(
        &self,
        state: &State,
        dir: Ino,
        name: Option<&Name>,
        wish: u32,
        attr: bool,
    ) -> Option<pb::Told> {
        let lease = self.core.lend(state, self.who.node, self.stream, dir, wish)?;
        let inode = state.ns.get(dir)?;
        let named = name.and_then(|n| state.ns.dentry(dir, n).ok().flatten());
        let sure = inode.home != Home::Own || self.core.is_fresh(dir, Checked::Names);
        let attr = state.attr(dir).ok().filter(|_| attr).map(|a| ebb_wire::attr_to_pb(&a));
        let complete = sure && state.ns.is_complete(dir);
        let ino = named.map_or(0, |d| d.ino.0);
        Some(pb::Told { attr, lease: Some(lease), ino, complete })
    }

    fn entry_leased(&self, state: &State, ino: Ino, wish: u32) -> Result<pb::Entry, Errno> {
        let lease = self.core.lend(state, self.who.node, self.stream, ino, wish);
        let attr = Some(ebb_wire::attr_to_pb(&state.attr(ino)?));
        Ok(pb::Entry { attr, lease, ..Default::default() })
    }

    /// The answer to a change of names; empty for who wants no lease.
    /// `victim`: what had a name that was taken away.
    fn changed(
        &self,
        names: [(Ino, Option<&Name>); 2],
        victim: Option<Attr>,
        wish: u32,
    ) -> OpResult {
        let state = self.core.state();
        let gone = victim.filter(|victim| state.ns.get(victim.ino).is_none());
        if wish == 0 && gone.is_none() {
            return Ok(None);
        }
        let told = |(dir, name): (Ino, Option<&Name>)| {
            name.and_then(|name| self.told(&state, dir, Some(name), wish, true))
        };
        let [dir, new_dir] = if wish == 0 { [None, None] } else { names.map(told) };
        let attr = gone.as_ref().map(ebb_wire::attr_to_pb);
        let gone = gone.map_or(0, |gone| gone.ino.0);
        Ok(Some(Body::Entry(pb::Entry { attr, dir, new_dir, gone, ..Default::default() })))
    }

    /// In a directory of which the name is known to be free nothing but memory is needed, unless
    /// somebody else is just changing names.
    pub(super) fn make_fast(&self, op: &pb::Make) -> Option<OpResult> {
        let wanted = match name(&op.name) {
            Ok(n) => n,
            Err(e) => return Some(Err(e.into())),
        };
        let parent = Ino(op.parent);
        if !self.core.is_known(parent, &wanted).unwrap_or(false) {
            return None;
        }
        let _turn = self.core.try_turn()?;
        let mut state = self.core.state();
        let plan = match plan_make(&state, op) {
            Ok(plan) => plan,
            Err(e) => return Some(Err(e.into())),
        };
        let mut entries = self.outcome(&plan);
        let coupled = made_in(&state, parent, kind_of(op).ok());
        entries.extend(coupled.zip(plan.ino).map(|(file, ino)| Entry::Coupled(ino, Some(file))));
        let done = self.local_with(&mut state, plan, entries);
        Some(done.and_then(|ino| self.made(&mut state, op, ino)))
    }

    pub(super) async fn make(&self, op: &pb::Make) -> OpResult {
        let wanted = name(&op.name)?;
        let names = [(Ino(op.parent), &wanted)];
        let coupled = Mutex::new(None);
        let plan = |state: &State| {
            *coupled.lock() = made_in(state, Ino(op.parent), kind_of(op).ok());
            plan_make(state, op)
        };
        let done = |plan: &Plan| {
            let mut entries = self.outcome(plan);
            let coupled = coupled.lock().clone();
            entries
                .extend(coupled.zip(plan.ino).map(|(file, ino)| Entry::Coupled(ino, Some(file))));
            entries
        };
        let ino = self.core.change(&names, plan, done).await?;
        let mut state = self.core.state();
        self.made(&mut state, op, ino.ok_or(Errno::EIO)?)
    }

    fn made(&self, state: &mut State, op: &pb::Make, ino: Ino) -> OpResult {
        let mut seated = false;
        if op.open && state.file(ino).is_ok() {
            coupling::produces(self, state, ino, op.handle, false)?;
            let records = state.ns.plan_open(self.who.node, ino)?;
            self.core.commit_ns(state, records);
            // Before anything is lent of it, which this would call back.
            seated = self.core.take_seat(state, self, ino, op.seat.as_ref());
        }
        let dir = self.told(state, Ino(op.parent), Some(&name(&op.name)?), op.lease, true);
        if op.open && state.file(ino).is_ok() {
            let lease = self.core.lend(state, self.who.node, self.stream, ino, op.lease);
            let mut opened = self.opened(state, ino, 0)?;
            if let Some(Body::Opened(opened)) = &mut opened {
                opened.dir = dir;
                opened.seated = seated;
                if let Some(map) = &mut opened.map {
                    map.lease = lease;
                }
            }
            return Ok(opened);
        }
        let names = state.ns.entries_after(ino, None).map(|mut names| names.next().is_some());
        let new_dir = match names {
            Ok(false) => self.told(state, ino, None, op.lease, false),
            _ => None,
        };
        let made = pb::Entry { dir, new_dir, ..self.entry_leased(state, ino, op.lease)? };
        Ok(Some(Body::Entry(made)))
    }

    /// Applies a plan that needs nothing but memory.
    fn local(&self, state: &mut State, plan: Plan) -> Result<Ino, OpError> {
        let entries = self.outcome(&plan);
        self.local_with(state, plan, entries)
    }

    fn local_with(
        &self,
        state: &mut State,
        plan: Plan,
        entries: Vec<Entry>,
    ) -> Result<Ino, OpError> {
        let ino = plan.ino.unwrap_or(Ino::ROOT);
        self.core.apply_local_with(state, plan, entries);
        Ok(ino)
    }

    fn outcome(&self, plan: &Plan) -> Vec<crate::state::Entry> {
        vec![self.answered(plan.ino.map_or(Outcome::Plain, Outcome::Inode))]
    }

    pub(super) fn unlink_fast(&self, op: &pb::Unlink) -> Option<OpResult> {
        let gone = name(&op.name).ok()?;
        let parent = Ino(op.parent);
        if !self.core.is_known(parent, &gone).unwrap_or(false) {
            return None;
        }
        let _turn = self.core.try_turn()?;
        let mut state = self.core.state();
        let plan = state.ns.plan_remove(parent, &gone, op.dir, Time::now()).ok()?;
        if !plan.is_local() {
            return None;
        }
        let removed = attr_of(&state, parent, &gone);
        let done = self.local(&mut state, plan);
        drop(state);
        Some(
            done.and_then(|_| {
                self.changed([(parent, Some(&gone)), (parent, None)], removed, op.lease)
            }),
        )
    }

    pub(super) async fn unlink(&self, op: &pb::Unlink) -> OpResult {
        let gone = name(&op.name)?;
        let parent = Ino(op.parent);
        if op.dir {
            self.core.learn(parent, &gone).await?;
            let dir = self.core.state().ns.dentry(parent, &gone)?.ok_or(Errno::ENOENT)?.ino;
            if self.core.state().ns.inode(dir)?.is_dir() {
                self.core.learn_all(dir).await?;
            }
        }
        let removed = Mutex::new(None);
        let plan = |state: &State| {
            keeps_bytes(state, parent, &gone)?;
            *removed.lock() = attr_of(state, parent, &gone);
            state.ns.plan_remove(parent, &gone, op.dir, Time::now())
        };
        let done = |_: &Plan| vec![self.answered(Outcome::Plain)];
        self.core.change(&[(parent, &gone)], plan, done).await?;
        self.changed([(parent, Some(&gone)), (parent, None)], removed.into_inner(), op.lease)
    }

    pub(super) async fn rename(&self, op: &pb::Rename) -> OpResult {
        let (from, to) = (name(&op.name)?, name(&op.new_name)?);
        let mode = match op.flags {
            0 => RenameMode::Replace,
            libc::RENAME_NOREPLACE => RenameMode::NoReplace,
            libc::RENAME_EXCHANGE => RenameMode::Exchange,
            _ => return Err(Errno::EINVAL.into()),
        };
        let (from, to) = ((Ino(op.parent), &from), (Ino(op.new_parent), &to));
        self.core.learn(to.0, to.1).await?;
        let replaced = self.core.state().ns.dentry(to.0, to.1)?;
        if let Some(d) = replaced
            && mode == RenameMode::Replace
            && self.core.state().ns.inode(d.ino)?.is_dir()
        {
            self.core.learn_all(d.ino).await?;
        }
        let replaced = Mutex::new(None);
        let plan = |state: &State| {
            if mode == RenameMode::Replace {
                keeps_bytes(state, to.0, to.1)?;
            }
            *replaced.lock() = attr_of(state, to.0, to.1);
            state.ns.plan_rename(from, to, mode, Time::now())
        };
        let done = |_: &Plan| vec![self.answered(Outcome::Plain)];
        self.core.change(&[from, to], plan, done).await?;
        let names = [(from.0, Some(from.1)), (to.0, Some(to.1))];
        self.changed(names, replaced.into_inner(), op.lease)
    }

    pub(super) async fn link(&self, op: &pb::Link) -> OpResult {
        let new = name(&op.new_name)?;
        let (ino, parent) = (Ino(op.ino), Ino(op.new_parent));
        let plan = |state: &State| state.ns.plan_link(ino, parent, &new, Time::now());
        self.core.change(&[(parent, &new)], plan, |plan| self.outcome(plan)).await?;
        let state = self.core.state();
        let dir = self.told(&state, parent, Some(&new), op.lease, true);
        let linked = pb::Entry { dir, ..self.entry_leased(&state, ino, op.lease)? };
        Ok(Some(Body::Entry(linked)))
    }
}

fn attr_of(state: &State, parent: Ino, name: &Name) -> Option<Attr> {
    let dentry = state.ns.dentry(parent, name).ok().flatten()?;
    state.attr(dentry.ino).ok()
}

/// The last name that is known of a file must not go while bytes of it are unflushed and the
/// backing has names for it that others made: they would have to show those bytes. EBUSY: flush
/// first. (A name that the job has given to another file does not count: that one replaces it.)
pub(crate) fn keeps_bytes(state: &State, parent: Ino, gone: &Name) -> Result<(), Errno> {
    let Some(dentry) = state.ns.dentry(parent, gone)? else { return Ok(()) };
    let inode = state.ns.inode(dentry.ino)?;
    let last = inode.links.len() == 1 && !inode.is_dir();
    if last && state.is_dirty(inode.ino) && state.ns.unseen_names(inode) > 0 {
        return Err(Errno::EBUSY);
    }
    Ok(())
}

fn kind_of(op: &pb::Make) -> Result<FileKind, Errno> {
    match op.mode & libc::S_IFMT {
        0 => Ok(FileKind::Regular),
        _ => FileKind::from_mode(op.mode).ok_or(Errno::EINVAL),
    }
}

fn plan_make(state: &State, op: &pb::Make) -> Result<Plan, Errno> {
    let kind = kind_of(op)?;
    let target = (kind == FileKind::Symlink).then(|| op.target.as_slice().into());
    let new = New { kind, perm: op.mode & 0o7777, uid: op.uid, gid: op.gid, rdev: op.rdev, target };
    state.ns.plan_make(Ino(op.parent), &name(&op.name)?, &new, Time::now())
}
