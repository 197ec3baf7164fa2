//! Planning rename(2) and its two flags.

use crate::inode::{Dentry, Home, Inode, Under};
use crate::plan::{Plan, Planner};
use crate::record::{Effect, Record, Replace};
use crate::tree::Namespace;
use ebb_types::{Errno, Ino, Name, Time};

/// The flags of renameat2(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// What is under the new name is replaced.
    Replace,
    /// EEXIST when there is something.
    NoReplace,
    /// Both change places.
    Exchange,
}

/// A name that takes part.
type Place<'a> = (Ino, &'a Name);

impl Namespace {
    /// rename(2): rules first, then who moves on the backing and who only here.
    pub fn plan_rename(
        &self,
        from: Place<'_>,
        to: Place<'_>,
        mode: RenameMode,
        now: Time,
    ) -> Result<Plan, Errno> {
        self.dir_inode(from.0)?;
        let new_parent = self.dir_inode(to.0)?;
        if to.0 != Ino::ROOT && new_parent.links.is_empty() {
            return Err(Errno::ENOENT);
        }
        let src = self.dentry(from.0, from.1)?.ok_or(Errno::ENOENT)?;
        let dst = self.dentry(to.0, to.1)?;
        if to.1.is_reserved() {
            return Err(Errno::EPERM);
        }
        match (mode, dst) {
            (RenameMode::NoReplace, Some(_)) => return Err(Errno::EEXIST),
            (RenameMode::Exchange, None) => return Err(Errno::ENOENT),
            _ if self.is_within(to.0, src.ino) => return Err(Errno::EINVAL),
            (RenameMode::Exchange, Some(d)) if self.is_within(from.0, d.ino) => {
                return Err(Errno::EINVAL);
            }
            (_, Some(d)) if self.is_within(from.0, d.ino) => return Err(Errno::ENOTEMPTY),
            (_, Some(d)) if d.ino == src.ino => return Ok(Plan::default()),
            _ => {}
        }
        let mut p = Planner::new(self, now);
        match (mode, dst) {
            (RenameMode::Exchange, Some(d)) => exchange(&mut p, from, src, to, d)?,
            (_, Some(d)) => {
                self.may_replace(src, d)?;
                replace(&mut p, from, src, to, Some(d), mode)?;
            }
            (_, None) => replace(&mut p, from, src, to, None, mode)?,
        }
        p.touch_dir(from.0);
        if to.0 != from.0 {
            p.touch_dir(to.0);
        }
        Ok(p.finish_names(Some(src.ino)))
    }

    fn may_replace(&self, src: Dentry, dst: Dentry) -> Result<(), Errno> {
        match (self.inode(src.ino)?.is_dir(), self.inode(dst.ino)?.is_dir()) {
            (true, false) => Err(Errno::ENOTDIR),
            (false, true) => Err(Errno::EISDIR),
            (true, true) if !self.dir(dst.ino)?.entries.is_empty() => Err(Errno::ENOTEMPTY),
            _ => Ok(()),
        }
    }
}

fn replace(
    p: &mut Planner<'_>,
    from: Place<'_>,
    src: Dentry,
    to: Place<'_>,
    dst: Option<Dentry>,
    mode: RenameMode,
) -> Result<(), Errno> {
    let inode = p.ns.inode(src.ino)?;
    let under = if src.under == Under::This {
        move_on_backing(p, from, src, to, mode)?;
        Under::This
    } else {
        move_here(p, from, src, to, dst, inode)?
    };
    // The new name first: an inode must not look nameless in between.
    p.dentry(to.0, to.1, src.ino, under);
    p.no_dentry(from.0, from.1);
    if let Some(d) = dst {
        let gone = p.ns.inode(d.ino)?;
        p.unlinked(gone, to.0, to.1)?;
    }
    p.ctime(src.ino);
    follow_part(p, inode, &[(from, None), (to, Some(()))])
}

/// The object is on the backing and moves there, replacing whatever is in its way.
fn move_on_backing(
    p: &mut Planner<'_>,
    from: Place<'_>,
    src: Dentry,
    to: Place<'_>,
    mode: RenameMode,
) -> Result<(), Errno> {
    p.ensure_dir(to.0)?;
    let (from_path, to_path) = (p.child(from.0, from.1)?, p.child(to.0, to.1)?);
    let replace = if mode == RenameMode::NoReplace { Replace::No } else { Replace::Yes };
    p.uncover(to.0, to.1)?;
    p.effect(Effect::Rename { from: from_path, to: to_path.clone(), replace });
    p.restat(src.ino, to_path);
    p.restat_dir(from.0);
    p.restat_dir(to.0);
    Ok(())
}

/// The object is job-local: an older file under the new name stays on the backing until the new
/// one is published; an older one under the old name has been replaced and renamed away.
fn move_here(
    p: &mut Planner<'_>,
    from: Place<'_>,
    src: Dentry,
    to: Place<'_>,
    dst: Option<Dentry>,
    inode: &Inode,
) -> Result<Under, Errno> {
    if src.under == Under::Older {
        let path = p.child(from.0, from.1)?;
        p.effect(Effect::Unlink { path });
        p.uncover(from.0, from.1)?;
        p.restat_dir(from.0);
    }
    Ok(match dst.map(|d| d.under) {
        None | Some(Under::Nothing) => Under::Nothing,
        Some(Under::This) if inode.is_dir() => {
            let path = p.child(to.0, to.1)?;
            p.effect(Effect::Rmdir { path });
            p.restat_dir(to.0);
            Under::Nothing
        }
        Some(Under::This | Under::Older) => Under::Older,
    })
}

/// Keeps a part file in a directory where its inode has a name, after the given names were taken
/// from it (`None`) or given to it.
fn follow_part(
    p: &mut Planner<'_>,
    inode: &Inode,
    changes: &[(Place<'_>, Option<()>)],
) -> Result<(), Errno> {
    let lost = |parent: Ino, name: &Name| {
        changes.iter().any(|((c, n), gain)| gain.is_none() && *c == parent && *n == name)
    };
    let kept = inode.links.iter().filter(|l| !lost(l.parent, &l.name)).map(|l| l.parent);
    let gained = changes.iter().filter(|(_, gain)| gain.is_some()).map(|((c, _), _)| *c);
    let parents: Vec<Ino> = kept.chain(gained).collect();
    let Home::Part { dir } = inode.home else {
        let left =
            changes.iter().filter(|((dir, _), gain)| gain.is_none() && !parents.contains(dir));
        return left.map(|((dir, _), _)| *dir).try_for_each(|dir| p.no_part(inode, dir));
    };
    match parents.first() {
        Some(to) if !parents.contains(&dir) => p.move_part(inode, dir, *to),
        _ => Ok(()),
    }
}

/// What is older under a name is no directory, and the kernel lets none replace it. What is under the
/// name then.
fn make_way(p: &mut Planner<'_>, src: Dentry, to: Place<'_>, under: Under) -> Result<Under, Errno> {
    if under != Under::Older || !p.ns.inode(src.ino)?.is_dir() {
        return Ok(under);
    }
    let path = p.child(to.0, to.1)?;
    p.effect(Effect::Unlink { path });
    p.uncover(to.0, to.1)?;
    p.restat_dir(to.0);
    Ok(Under::Nothing)
}

fn exchange(
    p: &mut Planner<'_>,
    a: Place<'_>,
    a_entry: Dentry,
    b: Place<'_>,
    b_entry: Dentry,
) -> Result<(), Errno> {
    let (a_under, b_under) = match (a_entry.under, b_entry.under) {
        (Under::This, Under::This) => {
            let (pa, pb) = (p.child(a.0, a.1)?, p.child(b.0, b.1)?);
            let replace = Replace::Exchange;
            p.effect(Effect::Rename { from: pa.clone(), to: pb.clone(), replace });
            p.restat(a_entry.ino, pb);
            p.restat(b_entry.ino, pa);
            p.restat_dir(a.0);
            p.restat_dir(b.0);
            (Under::This, Under::This)
        }
        // One is there, the other job-local: the one moves over, where it replaces what was
        // older, and leaves nothing behind.
        (Under::This, under) => {
            make_way(p, a_entry, b, under)?;
            move_on_backing(p, a, a_entry, b, RenameMode::Replace)?;
            (Under::Nothing, Under::This)
        }
        (under, Under::This) => {
            make_way(p, b_entry, a, under)?;
            move_on_backing(p, b, b_entry, a, RenameMode::Replace)?;
            (Under::This, Under::Nothing)
        }
        // What is older belongs to the name, not to the inode.
        (under_a, under_b) => {
            (make_way(p, b_entry, a, under_a)?, make_way(p, a_entry, b, under_b)?)
        }
    };
    let (ia, ib) = (p.ns.inode(a_entry.ino)?, p.ns.inode(b_entry.ino)?);
    p.record(Record::Dentry { parent: a.0, name: a.1.clone(), ino: b_entry.ino, under: a_under });
    p.record(Record::Dentry { parent: b.0, name: b.1.clone(), ino: a_entry.ino, under: b_under });
    p.ctime(a_entry.ino);
    p.ctime(b_entry.ino);
    follow_part(p, ia, &[(a, None), (b, Some(()))])?;
    follow_part(p, ib, &[(b, None), (a, Some(()))])
}
