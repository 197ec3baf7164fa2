//! lookup, make, unlink, rename, link.

use super::{Call, OpError, OpResult, entry, name};
use crate::state::{Outcome, State};
use ebb_namespace::{New, Plan, RenameMode};
use ebb_types::{Errno, FileKind, Ino, Name, Time};
use ebb_wire::pb;

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
        self.core.learn(Ino(op.parent), &name(&op.name)?).await?;
        self.found(op)
    }

    fn found(&self, op: &pb::Lookup) -> OpResult {
        let state = self.core.state();
        let dentry = state.ns.dentry(Ino(op.parent), &name(&op.name)?)?;
        entry(&state, dentry.ok_or(Errno::ENOENT)?.ino)
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
        Some(self.local(&mut state, plan).and_then(|ino| self.made(&mut state, op, ino)))
    }

    pub(super) async fn make(&self, op: &pb::Make) -> OpResult {
        let wanted = name(&op.name)?;
        let names = [(Ino(op.parent), &wanted)];
        let ino = self
            .core
            .change(&names, |state| plan_make(state, op), |plan| self.outcome(plan))
            .await?;
        let mut state = self.core.state();
        self.made(&mut state, op, ino.ok_or(Errno::EIO)?)
    }

    fn made(&self, state: &mut State, op: &pb::Make, ino: Ino) -> OpResult {
        if op.open && state.file(ino).is_ok() {
            let records = state.ns.plan_open(self.who.node, ino);
            self.core.commit_ns(state, records);
            return self.opened(state, ino, 0);
        }
        entry(state, ino)
    }

    /// Applies a plan that needs nothing but memory.
    fn local(&self, state: &mut State, plan: Plan) -> Result<Ino, OpError> {
        let entries = self.outcome(&plan);
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
        Some(self.local(&mut state, plan).map(|_| None))
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
        let plan = |state: &State| {
            keeps_bytes(state, parent, &gone)?;
            state.ns.plan_remove(parent, &gone, op.dir, Time::now())
        };
        let done = |_: &Plan| vec![self.answered(Outcome::Plain)];
        self.core.change(&[(parent, &gone)], plan, done).await?;
        Ok(None)
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
        let plan = |state: &State| {
            if mode == RenameMode::Replace {
                keeps_bytes(state, to.0, to.1)?;
            }
            state.ns.plan_rename(from, to, mode, Time::now())
        };
        let done = |_: &Plan| vec![self.answered(Outcome::Plain)];
        self.core.change(&[from, to], plan, done).await?;
        Ok(None)
    }

    pub(super) async fn link(&self, op: &pb::Link) -> OpResult {
        let new = name(&op.new_name)?;
        let (ino, parent) = (Ino(op.ino), Ino(op.new_parent));
        let plan = |state: &State| state.ns.plan_link(ino, parent, &new, Time::now());
        self.core.change(&[(parent, &new)], plan, |plan| self.outcome(plan)).await?;
        entry(&self.core.state(), ino)
    }
}

/// The last name that is known of a file must not go while bytes of it are unflushed and the
/// backing has names for it that others made: they would have to show those bytes. EBUSY: flush
/// first. (A name that the job has given to another file does not count: that one replaces it.)
fn keeps_bytes(state: &State, parent: Ino, gone: &Name) -> Result<(), Errno> {
    let Some(dentry) = state.ns.dentry(parent, gone)? else { return Ok(()) };
    let inode = state.ns.inode(dentry.ino)?;
    let last = inode.links.len() == 1 && !inode.is_dir();
    if last && state.is_dirty(inode.ino) && state.ns.unseen_names(inode) > 0 {
        return Err(Errno::EBUSY);
    }
    Ok(())
}

fn plan_make(state: &State, op: &pb::Make) -> Result<Plan, Errno> {
    let kind = match op.mode & libc::S_IFMT {
        0 => FileKind::Regular,
        _ => FileKind::from_mode(op.mode).ok_or(Errno::EINVAL)?,
    };
    let target = (kind == FileKind::Symlink).then(|| op.target.as_slice().into());
    let new = New { kind, perm: op.mode & 0o7777, uid: op.uid, gid: op.gid, rdev: op.rdev, target };
    state.ns.plan_make(Ino(op.parent), &name(&op.name)?, &new, Time::now())
}
