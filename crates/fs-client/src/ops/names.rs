//! Names and attributes: asked of the metadata service unless a lease says that they have not changed
//! (`known.rs`), so that they are the same on all nodes at once. Size and mtime are merged with what this node has not published yet.

use crate::node::Node;
use crate::ops::coupling::Looked;
use crate::ops::open::Again;
use ebb_consistency::Told;
use ebb_meta_client::{Made, MakeRequest, QueryRequest, SetAttr, SetAttrDone, Wish};
use ebb_types::{Attr, ByteRange, Errno, FileKind, Ino, Name, Version};

/// What a new inode is to be.
#[derive(Clone, Debug)]
pub struct MakeArgs {
    /// Type and permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number.
    pub rdev: u32,
    /// Target of a symlink.
    pub target: Vec<u8>,
}

impl MakeArgs {
    pub(crate) fn request(
        self,
        parent: Ino,
        name: &Name,
        open: bool,
        lease: Wish,
    ) -> Result<MakeRequest, Errno> {
        Ok(MakeRequest {
            parent,
            name: name.clone(),
            kind: FileKind::from_mode(self.mode).ok_or(Errno::EINVAL)?,
            perm: self.mode & 0o7777,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev,
            target: self.target,
            open,
            lease,
            seat: None,
            handle: 0,
        })
    }
}

impl Node {
    /// What an answer to a question that is asked now may not know of.
    pub(crate) fn published_so_far(&self) -> u64 {
        self.leases.publications.so_far()
    }

    /// The inode of a name.
    pub async fn lookup(&self, parent: Ino, name: &Name) -> Result<Attr, Errno> {
        match self.look(parent, name).await? {
            Looked::There(attr) => Ok(attr),
            Looked::Missing | Looked::Awaited(_) => Err(Errno::ENOENT),
        }
    }

    /// The same, and whether one waits for the name.
    pub async fn look(&self, parent: Ino, name: &Name) -> Result<Looked, Errno> {
        match self.known_name(parent, name) {
            Some(Ok(attr)) => return Ok(Looked::There(attr)),
            Some(Err(Errno::ENOENT)) => return Ok(Looked::Missing),
            Some(Err(e)) => return Err(e),
            None => {}
        }
        let asked = self.published_so_far();
        let found = self.ask_name(parent, name).await;
        match self.in_dirs(&[parent], found).await? {
            Looked::There(attr) => self.seen(asked, attr).await.map(Looked::There),
            missing => Ok(missing),
        }
    }

    /// The attributes of an inode.
    pub async fn getattr(&self, ino: Ino) -> Result<Attr, Errno> {
        match self.leased_attr(ino) {
            Some(attr) => Ok(attr),
            None => {
                let asked = self.published_so_far();
                match self.ask_attr(ino).await {
                    Ok(attr) => self.seen(asked, attr).await,
                    Err(e) => self.gone(ino, e).await.ok_or(e),
                }
            }
        }
    }

    /// Changes attributes; a new size is published at once in every model.
    pub async fn setattr(&self, ino: Ino, args: SetAttr) -> Result<Attr, Errno> {
        match self.set_attr_there(ino, args).await {
            Err(e) => self.change_gone(ino, &args, e).await,
            done => done,
        }
    }

    async fn set_attr_there(&self, ino: Ino, mut args: SetAttr) -> Result<Attr, Errno> {
        if args.size.is_some_and(|s| s > crate::file::SIZE_MAX) {
            return Err(Errno::EFBIG);
        }
        args.kill_priv |= args.uid.is_some() || args.gid.is_some();
        let file = match (args.size, args.mtime) {
            (Some(_), _) => Some(self.file_or_new(ino, self.rules.job())),
            (None, Some(_)) => self.file(ino),
            (None, None) => None,
        };
        if let Some(file) = &file {
            self.collect(file)?;
        }
        let touching = file.as_ref().map(|f| self.note_touching(f));
        let asked = self.published_so_far();
        let attr = match args.size {
            Some(size) => self.cut(ino, &args, size).await?,
            None if args.mtime.is_some() => self.set_times(ino, &args).await?,
            None => self.send_attr(ino, &args).await?.attr,
        };
        drop(touching);
        self.note_attr(ino, attr);
        self.seen(asked, attr).await
    }

    /// Sets attributes at the service.
    pub(crate) async fn send_attr(&self, ino: Ino, args: &SetAttr) -> Result<SetAttrDone, Errno> {
        let mut changing = self.changing(&[], &[ino]);
        let wish = self.wish(changing.asked(), Some(ino));
        let done = self.meta.setattr_leased(ino, args, wish).await;
        changing.heard(&done);
        let done = done?;
        let told = |grant| Told { ino, grant, attr: Some(done.attr), found: None };
        changing.told(done.lease.map(told));
        Ok(done)
    }

    /// Sets an explicit mtime, which is newer than the writes before it: these are published
    /// without a time. No publishing happens meanwhile, for it would bring theirs.
    async fn set_times(&self, ino: Ino, args: &SetAttr) -> Result<Attr, Errno> {
        let Some(file) = self.file(ino) else {
            return Ok(self.send_attr(ino, args).await?.attr);
        };
        let _turn = file.turn.lock().await;
        let attr = self.send_attr(ino, args).await?.attr;
        file.state.write().mtime = None;
        Ok(attr)
    }

    /// Sets the size, here and at the service.
    async fn cut(&self, ino: Ino, args: &SetAttr, size: u64) -> Result<Attr, Errno> {
        let file = self.file_or_new(ino, self.rules.job());
        let _turn = file.turn.lock().await;
        self.publish_unseen(&file).await?;
        self.end_quiet_in_turn(&file).await?;
        let mut again = Again::within(self.deadline());
        let mut done = self.send_attr(ino, args).await?;
        while let Some(node) = done.seat {
            let there = match args.only_grow {
                true => self.grow_at_seat(ino, node, size).await,
                false => self.cut_at_seat(ino, node, size).await,
            };
            match there {
                // The rest of what is to be set; the answer tells how the file is now.
                Ok(()) => done = self.send_attr(ino, &SetAttr { size: None, ..*args }).await?,
                Err(e) => {
                    self.seat_again(&mut again, e).await?;
                    done = self.send_attr(ino, args).await?;
                }
            }
        }
        let map = match done.map {
            Some(map) => map,
            None => {
                let range = ByteRange::ALL;
                let known = Version::ZERO;
                self.meta.query(QueryRequest { ino, range, known, lease: false }).await?
            }
        };
        match args.only_grow {
            true => self.apply_grown(&file, &map).await?,
            false => {
                let stable = self.cut_is_stable(&file, size, map.map.version).await;
                self.apply_cut(&file, size, &map);
                stable?;
            }
        }
        self.complete(&file).await?;
        Ok(done.attr)
    }

    /// A new inode under a new name.
    pub async fn make(&self, parent: Ino, name: &Name, args: MakeArgs) -> Result<Attr, Errno> {
        let mut changing = self.changing(&[(parent, name)], &[]);
        let made = self.meta.make(&args.request(parent, name, false, changing.wish())?).await;
        changing.heard(&made);
        match self.in_dirs(&[parent], made).await? {
            Made::Made(attr, new) => {
                let asked = changing.asked();
                changing.told(new.told);
                changing.end();
                self.known.made(asked, attr.ino, new.empty);
                Ok(attr)
            }
            Made::Opened(..) => Err(Errno::EPROTO),
        }
    }

    /// The target of a symlink.
    pub async fn readlink(&self, ino: Ino) -> Result<Vec<u8>, Errno> {
        self.meta.readlink(ino).await
    }

    /// Takes a name away.
    pub async fn unlink(&self, parent: Ino, name: &Name, dir: bool) -> Result<(), Errno> {
        match self.unlink_now(parent, name, dir).await {
            Err(Errno::EBUSY) => {
                self.bring_for_other_names(parent, name).await?;
                self.unlink_now(parent, name, dir).await
            }
            done => done,
        }
    }

    /// The last name that is known of a file may not go as long as bytes of it are here alone: the backing
    /// has names of it that nobody has looked at yet, and they would have to show those bytes. The backing has them
    /// afterwards, or it is said why not.
    async fn bring_for_other_names(&self, parent: Ino, name: &Name) -> Result<(), Errno> {
        let known = self.lookup(parent, name).await.ok().and_then(|attr| self.file(attr.ino));
        match known {
            Some(file) => self.drain_file(file.ino).await,
            // They are another node's, or the backing is busy for a reason of its own.
            None => Err(Errno::EBUSY),
        }
    }

    async fn unlink_now(&self, parent: Ino, name: &Name, dir: bool) -> Result<(), Errno> {
        if !dir {
            self.keep_open_file(parent, name).await;
        }
        let believed = self.known.believed(parent, name);
        let mut changing = self.changing(&[(parent, name)], believed.as_slice());
        let done = self.meta.remove(parent, name, dir, changing.wish(), believed).await;
        changing.heard(&done);
        let done = self.in_dirs(&[parent], done).await?;
        changing.told(done.told);
        changing.end();
        self.is_gone(done.gone);
        if !dir {
            self.names_changed(&[name]).await;
        }
        Ok(())
    }

    /// It was the last name of this, and nobody has it open.
    fn is_gone(&self, gone: Option<Attr>) {
        if let Some(attr) = gone {
            self.gone.removed(&attr);
            self.discard(attr.ino);
        }
    }

    /// Moves a name.
    pub async fn rename(
        &self,
        parent: Ino,
        name: &Name,
        new_parent: Ino,
        new_name: &Name,
        flags: u32,
    ) -> Result<(), Errno> {
        let known = libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE;
        if flags & !known != 0 || flags == known {
            return Err(Errno::EINVAL);
        }
        let (from, to) = ((parent, name), (new_parent, new_name));
        match self.rename_now(from, to, flags).await {
            Err(Errno::EBUSY) => {
                self.bring_for_other_names(new_parent, new_name).await?;
                self.rename_now(from, to, flags).await
            }
            done => done,
        }
    }

    async fn rename_now(
        &self,
        from: (Ino, &Name),
        to: (Ino, &Name),
        flags: u32,
    ) -> Result<(), Errno> {
        self.keep_open_file(to.0, to.1).await;
        let believed = [from, to].map(|(dir, name)| self.known.believed(dir, name));
        let inos: Vec<Ino> = believed.into_iter().flatten().collect();
        let mut changing = self.changing(&[from, to], &inos);
        let done = self.meta.rename_leased(from, to, flags, changing.wish(), believed).await;
        changing.heard(&done);
        let done = self.in_dirs(&[from.0, to.0], done).await?;
        changing.told(done.told);
        changing.end();
        self.is_gone(done.gone);
        self.names_changed(&[from.1, to.1]).await;
        Ok(())
    }

    /// Another name for an inode.
    pub async fn link(&self, ino: Ino, new_parent: Ino, new_name: &Name) -> Result<Attr, Errno> {
        let asked = self.published_so_far();
        let mut changing = self.changing(&[(new_parent, new_name)], &[ino]);
        let linked = self.meta.link_leased(ino, new_parent, new_name, changing.wish()).await;
        changing.heard(&linked);
        let (attr, told) = self.in_dirs(&[new_parent], linked).await?;
        changing.told(told);
        changing.end();
        self.seen(asked, attr).await
    }
}
