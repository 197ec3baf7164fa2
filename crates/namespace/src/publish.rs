//! Planning what brings job-local things to the backing: part files, publishing, and everything
//! that has no content.

use crate::inode::{Home, Inode, Link, Under};
use crate::plan::{Plan, Planner};
use crate::record::{BackingPath, Effect, Record, Replace};
use crate::tree::Namespace;
use ebb_types::{Attr, Errno, FileKind, Ino, Striping, Time};

impl Namespace {
    /// The file gets a place on the backing that bytes can be written to, with this striping. Nothing to do
    /// when it has one. ENOENT when it has no name any more.
    ///
    /// `len`: how long it was made beyond its bytes, which come later. Of a file that has a place the length
    /// is always set there, so that it is known when nothing else is.
    pub fn plan_place(
        &self,
        ino: Ino,
        striping: Option<Striping>,
        len: Option<u64>,
        now: Time,
    ) -> Result<Plan, Errno> {
        let inode = self.inode(ino)?;
        let mut p = Planner::new(self, now);
        let is_new = inode.home == Home::None;
        let path = make_part(&mut p, inode, striping)?;
        if let Some(len) = len.filter(|_| is_new) {
            p.effect(Effect::SetSize { path, len });
        }
        Ok(p.finish(Some(ino)))
    }

    /// Everything of `ino` but unflushed bytes reaches the backing: a directory with its
    /// ancestors, a symlink, a special file, or a regular file of which no byte is missing, with
    /// its `size`, attributes and all its names.
    ///
    /// `shaped`: what its part file was given before its last sync, when somebody did that.
    pub fn plan_publish(
        &self,
        ino: Ino,
        size: u64,
        shaped: Option<&Attr>,
        now: Time,
    ) -> Result<Plan, Errno> {
        let inode = self.inode(ino)?;
        let mut p = Planner::new(self, now);
        match (inode.home, inode.kind) {
            (Home::Own, _) if !inode.due && !inode.owed => {}
            (Home::Own, _) => settle(&mut p, inode, size)?,
            (_, FileKind::Directory) => p.ensure_dir(ino)?,
            (_, FileKind::Regular) => {
                // Without bytes to flush there is nothing to spread.
                let part = make_part(&mut p, inode, None)?;
                p.end_step();
                let wanted = Attr { size, ..self.attr(ino)? };
                if shaped != Some(&wanted) || !self.needs_only_a_shape(ino) {
                    p.effect(Effect::SetSize { path: part.clone(), len: size });
                    p.attributes(inode, &part);
                    p.effect(Effect::SyncFile { path: part.clone() });
                }
                take_names(&mut p, inode, Some(part))?;
            }
            (_, _) => make_special(&mut p, inode)?,
        }
        Ok(p.finish(Some(ino)))
    }

    /// True for a part file that must be given only its attributes before it gets its name.
    #[must_use]
    pub fn needs_only_a_shape(&self, ino: Ino) -> bool {
        let plain = |i: &Inode| matches!(i.home, Home::Part { .. }) && i.xattrs.is_empty();
        self.get(ino).is_some_and(plain)
    }
}

/// Where the file's bytes go; made when there is no such place yet.
fn make_part(
    p: &mut Planner<'_>,
    inode: &Inode,
    striping: Option<Striping>,
) -> Result<BackingPath, Errno> {
    let link = inode.links.first().ok_or(Errno::ENOENT)?;
    if inode.kind != FileKind::Regular {
        return Err(Errno::EINVAL);
    }
    if inode.home != Home::None {
        return p.ns.home_path(inode.ino).ok_or(Errno::ENOENT);
    }
    p.ensure_dir(link.parent)?;
    let path = p.child(link.parent, &p.ns.part_name(inode.ino))?;
    p.effect(Effect::CreatePart { path: path.clone(), striping });
    p.record(Record::Home { ino: inode.ino, home: Home::Part { dir: link.parent } });
    p.restat(inode.ino, path.clone());
    p.names_added(link.parent);
    Ok(path)
}

/// An object in place gets the names, size and times that it should have.
fn settle(p: &mut Planner<'_>, inode: &Inode, size: u64) -> Result<(), Errno> {
    let path = p.path(inode.ino)?;
    for link in &inode.links {
        if p.ns.dentry(link.parent, &link.name)?.is_some_and(|d| d.under != Under::This) {
            add_name(p, inode.ino, &path, link)?;
            p.end_step();
        }
    }
    if inode.kind == FileKind::Regular && inode.seen.is_none_or(|s| s.size != size) {
        p.effect(Effect::SetSize { path: path.clone(), len: size });
    }
    if inode.owed {
        let (uid, gid) = (Some(inode.uid), Some(inode.gid));
        p.effect(Effect::Chown { path: path.clone(), uid, gid, strict: false });
        p.offer_xattrs(inode, &path);
        if inode.kind != FileKind::Symlink {
            p.effect(Effect::Chmod { path: path.clone(), perm: inode.perm });
        }
        p.record(Record::XattrsMoved { ino: inode.ino });
        p.record(Record::Owed { ino: inode.ino, owed: false });
    }
    let (atime, mtime) = (Some(inode.atime), Some(inode.mtime));
    p.effect(Effect::Utimens { path: path.clone(), atime, mtime });
    p.record(Record::Due { ino: inode.ino, due: false });
    p.restat(inode.ino, path);
    Ok(())
}

fn make_special(p: &mut Planner<'_>, inode: &Inode) -> Result<(), Errno> {
    let link = inode.links.first().ok_or(Errno::ENOENT)?;
    let older = replace_at(p, link)? == Replace::Yes;
    p.ensure_dir(link.parent)?;
    // Only a rename replaces something atomically.
    let name = if older { p.ns.part_name(inode.ino) } else { link.name.clone() };
    let path = p.child(link.parent, &name)?;
    p.effect(match (&inode.target, inode.kind) {
        (Some(target), FileKind::Symlink) => {
            Effect::Symlink { path: path.clone(), target: target.clone() }
        }
        _ => Effect::Mknod {
            path: path.clone(),
            kind: inode.kind,
            perm: inode.perm,
            rdev: inode.rdev,
        },
    });
    p.attributes(inode, &path);
    take_names(p, inode, older.then_some(path))
}

/// The object gets the inode's names: the first by an atomic rename from `part` (or it has it
/// already), the others as hard links, each in a step of its own so that a failure in between
/// leaves a state that can be continued.
fn take_names(p: &mut Planner<'_>, inode: &Inode, part: Option<BackingPath>) -> Result<(), Errno> {
    let ino = inode.ino;
    let first = inode.links.first().ok_or(Errno::ENOENT)?;
    let path = p.child(first.parent, &first.name)?;
    if let Some(from) = part {
        let replace = replace_at(p, first)?;
        p.effect(Effect::Rename { from, to: path.clone(), replace });
        p.uncover(first.parent, &first.name)?;
    }
    p.dentry(first.parent, &first.name, ino, Under::This);
    p.names_added(first.parent);
    let dir = p.path(first.parent)?;
    p.effect(Effect::SyncDir { path: dir });
    p.record(Record::Home { ino, home: Home::Own });
    p.record(Record::XattrsMoved { ino });
    if inode.owed {
        p.record(Record::Owed { ino, owed: false });
    }
    p.record(Record::Due { ino, due: inode.links.len() > 1 });
    p.restat(ino, path.clone());
    for link in &inode.links[1..] {
        p.end_step();
        add_name(p, ino, &path, link)?;
    }
    if inode.links.len() > 1 {
        p.record(Record::Due { ino, due: false });
        p.restat(ino, path);
    }
    Ok(())
}

fn replace_at(p: &Planner<'_>, link: &Link) -> Result<Replace, Errno> {
    let older = p.ns.dentry(link.parent, &link.name)?.is_some_and(|d| d.under == Under::Older);
    Ok(if older { Replace::Yes } else { Replace::No })
}

/// One more name for what is at `from`.
fn add_name(p: &mut Planner<'_>, ino: Ino, from: &BackingPath, link: &Link) -> Result<(), Errno> {
    p.ensure_dir(link.parent)?;
    let to = p.child(link.parent, &link.name)?;
    match replace_at(p, link)? {
        Replace::Yes => {
            let part = p.child(link.parent, &p.ns.part_name(ino))?;
            p.effect(Effect::Link { from: from.clone(), to: part.clone() });
            p.effect(Effect::Rename { from: part, to, replace: Replace::Yes });
            p.uncover(link.parent, &link.name)?;
        }
        Replace::No | Replace::Exchange => p.effect(Effect::Link { from: from.clone(), to }),
    }
    let dir = p.path(link.parent)?;
    p.effect(Effect::SyncDir { path: dir });
    p.dentry(link.parent, &link.name, ino, Under::This);
    p.names_added(link.parent);
    Ok(())
}
