//! A file that is on the backing and is cut to nothing begins anew: what the backing has under its
//! name stays there, whole, until the new one is, and is replaced by it then, as in a rename over it.

use crate::inode::{BackingKey, Home, Inode, Under};
use crate::plan::{Plan, Planner};
use crate::record::{BackingPath, Record};
use crate::tree::Namespace;
use ebb_types::{Errno, FileKind, Ino, Time};
use std::collections::BTreeMap;

/// The object that stays under the name, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Older {
    /// Where.
    pub path: BackingPath,
    /// Which.
    pub key: BackingKey,
}

impl Namespace {
    /// What would stay under the name of a file that begins anew; `None` where it cannot: it is not on
    /// the backing, or not only under this name.
    #[must_use]
    pub fn older(&self, ino: Ino) -> Option<Older> {
        let inode = self.get(ino).filter(|i| i.kind == FileKind::Regular && i.home == Home::Own)?;
        let (seen, [link]) = (inode.seen?, &inode.links[..]) else { return None };
        // Other names would go on with the old content.
        let single = seen.nlink == 1 && !inode.owed && self.is_on_backing(link);
        single.then_some(Older { path: self.path(ino)?, key: seen.key })
    }

    /// The file begins anew. `xattrs` are those that the older object has and the new one will be given.
    /// Its bytes are the driver's to cut.
    pub fn plan_renew(
        &self,
        ino: Ino,
        xattrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
        now: Time,
    ) -> Result<Plan, Errno> {
        let inode = self.inode(ino)?;
        let link = inode.links.first().ok_or(Errno::ENOENT)?;
        let mut p = Planner::new(self, now);
        // While it is known which object this is.
        p.dentry(link.parent, &link.name, ino, Under::Older);
        p.record(Record::Home { ino, home: Home::None });
        p.record(Record::Seen { ino, seen: None });
        p.record(Record::Due { ino, due: false });
        for (name, value) in xattrs {
            p.record(Record::Xattr { ino, name, value: Some(value) });
        }
        Ok(p.finish(Some(ino)))
    }

    /// The number of the object that the file replaces when it is published; 0 for none that is known.
    #[must_use]
    pub fn replaces(&self, ino: Ino) -> u64 {
        let of = |i: &Inode| i.links.iter().find_map(|l| self.covered(l.parent, &l.name));
        let job_local = self.get(ino).filter(|i| i.home != Home::Own);
        job_local.and_then(of).map_or(0, |key| key.ino)
    }
}
