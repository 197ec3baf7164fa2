//! Planning the end of names: unlink and rmdir.

use crate::inode::Under;
use crate::plan::{Plan, Planner};
use crate::record::Effect;
use crate::tree::Namespace;
use ebb_types::{Errno, Ino, Name, Time};

impl Namespace {
    /// unlink(2), or rmdir(2) with `dir`. What the backing has under the name goes at once,
    /// also when it is an older object that was to be replaced.
    pub fn plan_remove(
        &self,
        parent: Ino,
        name: &Name,
        dir: bool,
        now: Time,
    ) -> Result<Plan, Errno> {
        self.dir_inode(parent)?;
        let dentry = self.dentry(parent, name)?.ok_or(Errno::ENOENT)?;
        let inode = self.inode(dentry.ino)?;
        match (dir, inode.is_dir()) {
            (true, false) => return Err(Errno::ENOTDIR),
            (false, true) => return Err(Errno::EISDIR),
            (true, true) if !self.dir(dentry.ino)?.entries.is_empty() => {
                return Err(Errno::ENOTEMPTY);
            }
            _ => {}
        }
        let mut p = Planner::new(self, now);
        let path = p.child(parent, name)?;
        match dentry.under {
            Under::Nothing => {}
            Under::This if dir => p.effect(Effect::Rmdir { path }),
            Under::This | Under::Older => p.effect(Effect::Unlink { path }),
        }
        p.no_dentry(parent, name);
        p.unlinked(inode, parent, name)?;
        p.uncover(parent, name)?;
        p.touch_dir(parent);
        if dentry.under != Under::Nothing {
            p.restat_dir(parent);
        }
        Ok(p.finish_names(None))
    }
}
