//! Whether an object of the backing can stay under its name while a file of the job begins anew there
//! (`ebb_namespace::Older`), and be replaced by one that is the same in all but its content.

use crate::backing::{Backing, errno};
use crate::core::{Core, Turn};
use crate::state::{Entry, FileOp, State};
use ebb_namespace::{AttrChange, Older, Plan, Record};
use ebb_types::{Errno, Ino, NodeId, Time};
use rustix::fs::{Access, AtFlags};
use std::collections::BTreeMap;
use std::os::fd::AsFd;

/// Extended attributes, by name.
type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// More than that is not carried along.
const XATTRS_MAX: usize = 64 << 10;

/// What a new object has of its own, whoever makes it: labels, and what Lustre keeps of a layout.
const ITS_OWN: [&[u8]; 6] = [
    b"security.selinux",
    b"trusted.lov",
    b"trusted.lma",
    b"trusted.link",
    b"trusted.fid",
    b"lustre.",
];

impl Backing {
    /// What a new object in its place must be given; `None` where it could not be the same: another
    /// owner, rights that are more than a mode, or a directory in which nothing can be made.
    pub fn may_be_replaced(&self, older: &Older) -> Result<Option<Xattrs>, Errno> {
        let Some((dir, name)) = older.path.split() else { return Ok(None) };
        let dir = self.dir(dir)?;
        let found = self.found(dir.as_fd(), Some(name))?;
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        let member = || {
            let groups = rustix::process::getgroups().unwrap_or_default();
            uid == 0 || found.gid == gid || groups.iter().any(|g| g.as_raw() == found.gid)
        };
        if found.seen.key != older.key || found.seen.nlink != 1 || found.uid != uid || !member() {
            return Ok(None);
        }
        let rights = Access::WRITE_OK | Access::EXEC_OK;
        if rustix::fs::accessat(&dir, ".", rights, AtFlags::EACCESS).is_err() {
            return Ok(None);
        }
        self.carried(older)
    }

    fn carried(&self, older: &Older) -> Result<Option<Xattrs>, Errno> {
        let (_fd, proc) = self.object(&older.path)?;
        let mut names = vec![0u8; XATTRS_MAX];
        let len = match rustix::fs::listxattr(&proc, &mut names[..]) {
            Ok(len) => len,
            Err(rustix::io::Errno::OPNOTSUPP) => 0,
            Err(rustix::io::Errno::RANGE) => return Ok(None),
            Err(e) => return Err(errno(e)),
        };
        let (mut carried, mut total) = (Xattrs::new(), 0);
        for name in names[..len].split(|c| *c == 0).filter(|n| !n.is_empty()) {
            if ITS_OWN.iter().any(|prefix| name.starts_with(prefix)) {
                continue;
            }
            if !name.starts_with(b"user.") {
                return Ok(None);
            }
            let value = self.get_xattr(&older.path, name)?;
            total += name.len() + value.len();
            carried.insert(name.into(), value.into());
        }
        Ok((total <= XATTRS_MAX).then_some(carried))
    }
}

impl Core {
    /// A file is cut to nothing: if what the backing has of it can stay there until the new content is
    /// whole, it does, and this says so. The caller cuts it otherwise.
    pub(crate) async fn renew(
        &self,
        turn: &Turn<'_>,
        node: NodeId,
        ino: Ino,
    ) -> Result<bool, Errno> {
        let Some(older) = self.state().ns.older(ino) else { return Ok(false) };
        let asked = older.clone();
        let xattrs = match self.backing.run(move |b| b.may_be_replaced(&asked)).await {
            Ok(Some(xattrs)) => xattrs,
            Ok(None) => return Ok(false),
            Err(Errno::ETIMEDOUT) => return Err(Errno::ETIMEDOUT),
            Err(errno) => {
                tracing::debug!(%ino, ?errno, "what the backing has is cut");
                return Ok(false);
            }
        };
        let (plan, with) = {
            let state = self.state();
            // It may be another one by now.
            if state.ns.older(ino) != Some(older) {
                return Ok(false);
            }
            let cut = Entry::File(ino, FileOp::Truncate(0));
            (begin_anew(&state, ino, xattrs)?, vec![cut, Entry::WritesOver(ino, node, true)])
        };
        self.execute(turn, plan, with).await?;
        Ok(true)
    }
}

fn begin_anew(state: &State, ino: Ino, xattrs: Xattrs) -> Result<Plan, Errno> {
    let now = Time::now();
    let mut plan = state.ns.plan_renew(ino, xattrs, now)?;
    let times = AttrChange { mtime: Some(now), ctime: Some(now), ..AttrChange::default() };
    if let Some(step) = plan.steps.last_mut() {
        step.records.push(Record::Attr { ino, change: times });
    }
    Ok(plan)
}
