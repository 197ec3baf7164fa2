//! Calls about names and attributes.

use crate::bytes::{Opened, SeatWish, node_from_pb};
use crate::client::MetaClient;
use crate::map::{Mapped, grant_from_pb, map_from_pb};
use crate::opened::opened_from_pb;
use ebb_consistency::{Found, Grant, Told};
use ebb_types::{Attr, Errno, FileKind, Ino, Name, NodeId, Time};
use ebb_wire::pb::{self, reply::Body, request::Op};
use ebb_wire::{attr_from_pb, time_to_pb};
use std::time::Duration;

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The service's clock.
    Now,
    /// This one.
    To(Time),
}

impl SetTime {
    fn to_pb(self) -> pb::TimeSet {
        match self {
            SetTime::Now => pb::TimeSet { now: true, time: None },
            SetTime::To(time) => pb::TimeSet { now: false, time: Some(time_to_pb(time)) },
        }
    }
}

/// Attributes to change; what is `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size: cuts or extends the file for everyone, at once.
    pub size: Option<u64>,
    /// The size is set only where the file is shorter.
    pub only_grow: bool,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last change of the content.
    pub mtime: Option<SetTime>,
    /// Clear setuid, and setgid where the group may execute.
    pub kill_priv: bool,
}

/// What [`MetaClient::setattr`] gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAttrDone {
    /// As they are now.
    pub attr: Attr,
    /// Whose the bytes are after a change of size.
    pub map: Option<Mapped>,
    /// A lease of the attributes.
    pub lease: Option<Grant>,
    /// Nothing was done: the file sits at that node.
    pub seat: Option<NodeId>,
}

/// A new inode under a new name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MakeRequest {
    /// The directory.
    pub parent: Ino,
    /// The name.
    pub name: Name,
    /// Its type.
    pub kind: FileKind,
    /// Permission bits, with the umask applied.
    pub perm: u32,
    /// Owner.
    pub uid: u32,
    /// Group; the service applies setgid directories.
    pub gid: u32,
    /// For device files.
    pub rdev: u32,
    /// For symlinks.
    pub target: Vec<u8>,
    /// Open it in the same step (regular files).
    pub open: bool,
    /// Leases of the directory and the new inode.
    pub lease: Wish,
    /// It should sit at this node.
    pub seat: Option<SeatWish>,
    /// With `open`: a number of the open, if the file is coupled; 0: it does not count.
    pub handle: u64,
}

/// What lease a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wish {
    /// None.
    #[default]
    No,
    /// One where it seems to pay.
    Light,
    /// Where it is about a file: one in any case.
    Full,
}

impl Wish {
    pub(crate) fn to_pb(self) -> u32 {
        match self {
            Wish::No => 0,
            Wish::Light => 1,
            Wish::Full => 2,
        }
    }
}

/// What [`MetaClient::look_up`] gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookedUp {
    /// Of the inode that the name means; none: it is not there.
    pub attr: Option<Attr>,
    /// Everything that was told under a lease.
    pub told: Vec<Told>,
    /// It is not there, and who opens it to read waits so long.
    pub awaits: Option<Duration>,
}

/// What a change of names gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Renamed {
    /// Everything that was told under a lease.
    pub told: Vec<Told>,
    /// The inode whose last name it was, when it is no more; as it was before.
    pub gone: Option<Attr>,
}

/// What [`MetaClient::make`] gives.
#[derive(Clone, Debug, PartialEq, Eq)]
// It is taken apart as soon as it is there.
#[allow(clippy::large_enum_variant)]
pub enum Made {
    /// The inode is there.
    Made(Attr, New),
    /// And open.
    Opened(Opened, New),
}

/// What came with a new inode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct New {
    /// Everything that was told under a lease.
    pub told: Vec<Told>,
    /// It is a directory of which all names are known: there are none.
    pub empty: Option<Grant>,
}

/// One name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The name.
    pub name: Name,
    /// Of its inode.
    pub attr: Attr,
}

/// A part of a directory, sorted as the service sorts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirPage {
    /// In order.
    pub entries: Vec<DirEntry>,
    /// Nothing follows.
    pub end: bool,
    /// The directory that this one is in.
    pub parent: Ino,
    /// A lease of its names.
    pub lease: Option<Grant>,
}

/// A body of the kind that was asked for; anything else is not the protocol.
macro_rules! expect_body {
    ($reply:expr, $kind:ident) => {
        match $reply {
            Some(Body::$kind(body)) => body,
            _ => return Err(Errno::EPROTO.into()),
        }
    };
}
pub(crate) use expect_body;

pub(crate) fn attr_of(attr: Option<pb::Attr>) -> Result<Attr, Errno> {
    let attr = attr_from_pb(&attr.ok_or(Errno::EPROTO)?)?;
    if attr.ino == Ino(0) || attr.size > i64::MAX as u64 { Err(Errno::EPROTO) } else { Ok(attr) }
}

/// The attributes of `ino`, when they are those of `ino`.
pub(crate) fn attr_for(ino: Ino, attr: Option<pb::Attr>) -> Result<Attr, Errno> {
    attr_of(attr).and_then(|attr| if attr.ino == ino { Ok(attr) } else { Err(Errno::EPROTO) })
}

fn gone(ino: u64, attr: Option<pb::Attr>) -> Result<Option<Attr>, Errno> {
    if ino == 0 { Ok(None) } else { attr_for(Ino(ino), attr).map(Some) }
}

fn name_pb(name: &Name) -> Vec<u8> {
    name.as_bytes().to_vec()
}

/// What an answer tells of an inode, when it comes with a lease.
pub(crate) fn told_attr(attr: Attr, lease: Option<Grant>) -> Option<Told> {
    lease.map(|grant| Told { ino: attr.ino, grant, attr: Some(attr), found: None })
}

/// What an answer tells of a directory and of `name` in it. `looked`: the name was looked for.
fn told_dir(
    dir: Ino,
    name: &Name,
    looked: bool,
    told: Option<pb::Told>,
) -> Result<Option<Told>, Errno> {
    let Some(pb::Told { attr, lease: Some(lease), ino, complete }) = told else { return Ok(None) };
    let attr = attr.map(|attr| attr_for(dir, Some(attr))).transpose()?;
    let ino = (ino != 0).then_some(Ino(ino));
    let complete = (looked && ino.is_none()).then_some(complete);
    let found = Some(Found { name: name.clone(), ino, complete });
    Ok(Some(Told { ino: dir, grant: grant_from_pb(lease), attr, found }))
}

impl MetaClient {
    /// What `name` means in `parent`, and leases of both.
    pub async fn look_up(&self, parent: Ino, name: &Name, lease: Wish) -> Result<LookedUp, Errno> {
        let (name_, lease) = (name_pb(name), lease.to_pb());
        let op = Op::Lookup(pb::Lookup { parent: parent.0, name: name_, lease, tell: false });
        let entry = expect_body!(self.call(op).await?, Entry);
        let dir = told_dir(parent, name, true, entry.dir)?;
        if entry.attr.is_none() && entry.await_ms > 0 {
            let awaits = Some(Duration::from_millis(entry.await_ms));
            return Ok(LookedUp { attr: None, told: Vec::new(), awaits });
        }
        let Some(attr) = entry.attr else {
            let absent =
                dir.as_ref().and_then(|d| d.found.as_ref()).is_some_and(|f| f.ino.is_none());
            let told = dir.into_iter().collect();
            let looked = LookedUp { attr: None, told, awaits: None };
            return if absent { Ok(looked) } else { Err(Errno::EPROTO) };
        };
        let attr = attr_of(Some(attr))?;
        let child = told_attr(attr, entry.lease.map(grant_from_pb));
        let told = child.into_iter().chain(dir).collect();
        Ok(LookedUp { attr: Some(attr), told, awaits: None })
    }

    /// The inode that `name` means in `parent`.
    pub async fn lookup(&self, parent: Ino, name: &Name) -> Result<Attr, Errno> {
        let name = name_pb(name);
        let op = Op::Lookup(pb::Lookup { parent: parent.0, name, lease: 0, tell: false });
        let entry = expect_body!(self.call(op).await?, Entry);
        match entry.attr {
            None if entry.await_ms > 0 => Err(Errno::ENOENT),
            attr => attr_of(attr),
        }
    }

    /// Its attributes, with the published size.
    pub async fn getattr(&self, ino: Ino) -> Result<Attr, Errno> {
        self.getattr_leased(ino, Wish::No).await.map(|(attr, _)| attr)
    }

    /// The same, with a lease when one is wanted and granted.
    pub async fn getattr_leased(
        &self,
        ino: Ino,
        lease: Wish,
    ) -> Result<(Attr, Option<Grant>), Errno> {
        let lease = lease.to_pb();
        let reply = self.call(Op::GetAttr(pb::GetAttr { ino: ino.0, lease, tell: false })).await?;
        let entry = expect_body!(reply, Entry);
        Ok((attr_for(ino, entry.attr)?, entry.lease.map(grant_from_pb)))
    }

    /// Changes attributes.
    pub async fn setattr(&self, ino: Ino, set: &SetAttr) -> Result<SetAttrDone, Errno> {
        self.setattr_leased(ino, set, Wish::No).await
    }

    /// The same, with a lease when one is wanted and granted.
    pub async fn setattr_leased(
        &self,
        ino: Ino,
        set: &SetAttr,
        lease: Wish,
    ) -> Result<SetAttrDone, Errno> {
        let op = Op::SetAttr(pb::SetAttr {
            ino: ino.0,
            mode: set.mode,
            uid: set.uid,
            gid: set.gid,
            size: set.size,
            atime: set.atime.map(SetTime::to_pb),
            mtime: set.mtime.map(SetTime::to_pb),
            kill_priv: set.kill_priv,
            lease: lease.to_pb(),
            only_grow: set.only_grow,
        });
        let entry = expect_body!(self.call(op).await?, Entry);
        let map = entry.map.map(map_from_pb).transpose()?;
        let lease = entry.lease.map(grant_from_pb);
        let seat = node_from_pb(entry.seat);
        Ok(SetAttrDone { attr: attr_for(ino, entry.attr)?, map, lease, seat })
    }

    /// Makes an inode.
    pub async fn make(&self, make: &MakeRequest) -> Result<Made, Errno> {
        let op = Op::Make(pb::Make {
            parent: make.parent.0,
            name: name_pb(&make.name),
            mode: make.kind.mode_bits() | (make.perm & 0o7777),
            uid: make.uid,
            gid: make.gid,
            rdev: make.rdev,
            target: make.target.clone(),
            open: make.open,
            lease: make.lease.to_pb(),
            seat: make.seat.map(SeatWish::to_pb),
            handle: make.handle,
        });
        let told = |attr, lease, dir| {
            let dir = told_dir(make.parent, &make.name, false, dir)?;
            Ok::<_, Errno>(told_attr(attr, lease).into_iter().chain(dir).collect())
        };
        let made = match self.call(op).await? {
            Some(Body::Entry(entry)) if !make.open => {
                let attr = attr_of(entry.attr)?;
                let told = told(attr, entry.lease.map(grant_from_pb), entry.dir)?;
                let empty =
                    entry.new_dir.filter(|d| d.complete && attr.kind == FileKind::Directory);
                let empty = empty.and_then(|d| d.lease).map(grant_from_pb);
                Made::Made(attr, New { told, empty })
            }
            Some(Body::Opened(mut opened)) if make.open => {
                let dir = opened.dir.take();
                let opened = opened_from_pb(opened)?;
                let told = told(opened.attr, opened.map.lease, dir)?;
                Made::Opened(opened, New { told, empty: None })
            }
            _ => return Err(Errno::EPROTO),
        };
        let (Made::Made(attr, _) | Made::Opened(Opened { attr, .. }, _)) = &made;
        if attr.kind == make.kind { Ok(made) } else { Err(Errno::EPROTO) }
    }

    /// Takes a name away from a file.
    pub async fn unlink(&self, parent: Ino, name: &Name) -> Result<(), Errno> {
        self.remove(parent, name, false, Wish::No, None).await.map(drop)
    }

    /// Removes an empty directory.
    pub async fn rmdir(&self, parent: Ino, name: &Name) -> Result<(), Errno> {
        self.remove(parent, name, true, Wish::No, None).await.map(drop)
    }

    /// Takes a name away, of a directory with `dir`. `believed`: what it means as far as is known.
    pub async fn remove(
        &self,
        parent: Ino,
        name: &Name,
        dir: bool,
        lease: Wish,
        believed: Option<Ino>,
    ) -> Result<Renamed, Errno> {
        let op = Op::Unlink(pb::Unlink {
            parent: parent.0,
            name: name_pb(name),
            dir,
            lease: lease.to_pb(),
            ino: believed.map_or(0, |i| i.0),
        });
        match self.call(op).await? {
            None => Ok(Renamed::default()),
            Some(Body::Entry(entry)) => {
                let told = told_dir(parent, name, false, entry.dir)?.into_iter().collect();
                Ok(Renamed { told, gone: gone(entry.gone, entry.attr)? })
            }
            _ => Err(Errno::EPROTO),
        }
    }

    /// Renames; `flags` as in renameat2(2).
    pub async fn rename(
        &self,
        from: (Ino, &Name),
        to: (Ino, &Name),
        flags: u32,
    ) -> Result<(), Errno> {
        self.rename_leased(from, to, flags, Wish::No, [None, None]).await.map(drop)
    }

    /// The same, with leases of the directories. `believed`: what the names mean as far as is known.
    pub async fn rename_leased(
        &self,
        from: (Ino, &Name),
        to: (Ino, &Name),
        flags: u32,
        lease: Wish,
        believed: [Option<Ino>; 2],
    ) -> Result<Renamed, Errno> {
        let [ino, new_ino] = believed.map(|ino| ino.map_or(0, |i| i.0));
        let op = Op::Rename(pb::Rename {
            parent: from.0.0,
            name: name_pb(from.1),
            new_parent: to.0.0,
            new_name: name_pb(to.1),
            flags,
            lease: lease.to_pb(),
            ino,
            new_ino,
        });
        match self.call(op).await? {
            None => Ok(Renamed::default()),
            Some(Body::Entry(entry)) => {
                let (dir, new_dir) = (entry.dir, entry.new_dir);
                let old = told_dir(from.0, from.1, false, dir)?;
                let new = told_dir(to.0, to.1, false, new_dir)?;
                let gone = gone(entry.gone, entry.attr)?;
                Ok(Renamed { told: old.into_iter().chain(new).collect(), gone })
            }
            _ => Err(Errno::EPROTO),
        }
    }

    /// Gives an inode another name.
    pub async fn link(&self, ino: Ino, parent: Ino, name: &Name) -> Result<Attr, Errno> {
        self.link_leased(ino, parent, name, Wish::No).await.map(|(attr, _)| attr)
    }

    /// The same, with leases of the inode and the directory.
    pub async fn link_leased(
        &self,
        ino: Ino,
        parent: Ino,
        name: &Name,
        lease: Wish,
    ) -> Result<(Attr, Vec<Told>), Errno> {
        let (new_name, lease) = (name_pb(name), lease.to_pb());
        let op = Op::Link(pb::Link { ino: ino.0, new_parent: parent.0, new_name, lease });
        let entry = expect_body!(self.call(op).await?, Entry);
        let attr = attr_for(ino, entry.attr)?;
        let told = told_attr(attr, entry.lease.map(grant_from_pb));
        Ok((attr, told.into_iter().chain(told_dir(parent, name, false, entry.dir)?).collect()))
    }

    /// At most `limit` names that follow `after` (none: from the beginning).
    pub async fn readdir(
        &self,
        ino: Ino,
        after: Option<&Name>,
        limit: u32,
    ) -> Result<DirPage, Errno> {
        self.readdir_leased(ino, after, limit, Wish::No).await
    }

    /// The same, with a lease of the directory.
    pub async fn readdir_leased(
        &self,
        ino: Ino,
        after: Option<&Name>,
        limit: u32,
        lease: Wish,
    ) -> Result<DirPage, Errno> {
        let after = after.map(name_pb).unwrap_or_default();
        let lease = lease.to_pb();
        let reply = self.call(Op::ReadDir(pb::ReadDir { ino: ino.0, after, limit, lease })).await?;
        let page = expect_body!(reply, DirPage);
        let entry = |item: pb::DirItem| {
            let name = Name::new(&item.name).map_err(|_| Errno::EPROTO)?;
            Ok(DirEntry { name, attr: attr_of(item.attr)? })
        };
        let entries = page.items.into_iter().map(entry).collect::<Result<Vec<_>, Errno>>()?;
        // A page that is empty but not the last would be asked for again for ever.
        if page.parent == 0 || (entries.is_empty() && !page.end) {
            return Err(Errno::EPROTO);
        }
        let lease = page.lease.map(grant_from_pb);
        Ok(DirPage { entries, end: page.end, parent: Ino(page.parent), lease })
    }

    /// Where a symlink points.
    pub async fn readlink(&self, ino: Ino) -> Result<Vec<u8>, Errno> {
        let reply = self.call(Op::ReadLink(pb::ReadLink { ino: ino.0 })).await?;
        Ok(expect_body!(reply, Bytes).data)
    }

    /// An extended attribute.
    pub async fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let op = Op::GetXattr(pb::GetXattr { ino: ino.0, name: name.to_vec(), tell: false });
        Ok(expect_body!(self.call(op).await?, Bytes).data)
    }

    /// Sets an extended attribute; `flags` as in setxattr(2).
    pub async fn setxattr(
        &self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
    ) -> Result<(), Errno> {
        let (name, value) = (name.to_vec(), value.to_vec());
        self.call(Op::SetXattr(pb::SetXattr { ino: ino.0, name, value, flags })).await.map(drop)
    }

    /// Names of the extended attributes.
    pub async fn listxattr(&self, ino: Ino) -> Result<Vec<Vec<u8>>, Errno> {
        let reply = self.call(Op::ListXattr(pb::ListXattr { ino: ino.0 })).await?;
        Ok(expect_body!(reply, XattrNames).names)
    }

    /// Removes an extended attribute.
    pub async fn removexattr(&self, ino: Ino, name: &[u8]) -> Result<(), Errno> {
        let op = Op::RemoveXattr(pb::RemoveXattr { ino: ino.0, name: name.to_vec() });
        self.call(op).await.map(drop)
    }

    /// Room on the backing, as it was not longer ago than `age`.
    pub async fn statfs(&self, age: Duration) -> Result<pb::StatFsReply, Errno> {
        let ask = |left| async move {
            Ok(expect_body!(self.within(left).call(Op::StatFs(pb::StatFs {})).await?, StatFs))
        };
        self.inner.room.get(age, self.timeout, ask).await
    }

    /// Is the inode still there?
    pub async fn access(&self, ino: Ino) -> Result<(), Errno> {
        self.call(Op::Access(pb::Access { ino: ino.0 })).await.map(drop)
    }
}
