//! A FUSE file system with nothing behind it: it keeps names and sizes in memory and throws bytes
//! away. Mounted as Ebb is, it shows what any daemon can reach; with an [`Asker`], what requests to
//! a metadata service cost on top of that.

use crate::asking::Asker;
use ebb_fuse::{
    Background, Call, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Handshake,
    Head, INodeNo, ListingPlus, Options, ReadDir, ReplyAttr, ReplyCreate, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, Session, SetAttr, Statistics, Write,
};
use ebb_wire::pb::{self, request::Op};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The root, for the kernel and for the service.
const ROOT: u64 = 1;

/// As in Ebb's adapter (`fs-client/src/fuse/mod.rs`), like the rest of the mount here.
const TTL: Duration = Duration::ZERO;

/// Event loops: the default of `--fuse-threads`.
const LOOPS: usize = 2;

#[derive(Debug)]
struct Inode {
    parent: u64,
    name: OsString,
    kind: FileType,
    size: u64,
}

#[derive(Debug, Default)]
struct Tree {
    last: u64,
    inodes: BTreeMap<u64, Inode>,
    names: HashMap<(u64, OsString), u64>,
}

impl Tree {
    fn new() -> Tree {
        let mut tree = Tree { last: ROOT, ..Tree::default() };
        let root =
            Inode { parent: ROOT, name: OsString::new(), kind: FileType::Directory, size: 0 };
        tree.inodes.insert(ROOT, root);
        tree
    }

    /// A new inode, with the service's number when it was asked.
    fn make(&mut self, number: Option<u64>, parent: u64, name: &OsStr, kind: FileType) -> FileAttr {
        let ino = number.unwrap_or(self.last + 1);
        self.last = self.last.max(ino);
        self.inodes.insert(ino, Inode { parent, name: name.to_owned(), kind, size: 0 });
        self.names.insert((parent, name.to_owned()), ino);
        attr(ino, kind, 0)
    }

    fn attr(&self, ino: u64) -> Result<FileAttr, Errno> {
        self.inodes.get(&ino).map(|i| attr(ino, i.kind, i.size)).ok_or(Errno::ENOENT)
    }

    fn named(&self, parent: u64, name: &OsStr) -> Result<FileAttr, Errno> {
        let ino = self.names.get(&(parent, name.to_owned())).ok_or(Errno::ENOENT)?;
        self.attr(*ino)
    }

    fn remove(&mut self, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let ino = self.names.remove(&(parent, name.to_owned())).ok_or(Errno::ENOENT)?;
        self.inodes.remove(&ino);
        Ok(())
    }
}

pub(crate) fn attr(ino: u64, kind: FileType, size: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size,
        blocks: size.div_ceil(512),
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind,
        perm: if kind == FileType::Directory { 0o755 } else { 0o644 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 1 << 20,
        flags: 0,
    }
}

/// A mounted one; dropping it unmounts.
#[derive(Debug)]
pub struct Hollow {
    _session: Background,
}

impl Hollow {
    /// Mounts it; `asker` is asked before the answers that a service would have to give.
    pub fn mount(at: &Path, asker: Option<Asker>) -> io::Result<Hollow> {
        let options = Options {
            subtype: "hollow".into(),
            default_permissions: true,
            loops: LOOPS,
            ..Options::new("hollow")
        };
        let files = Files { tree: Arc::new(Mutex::new(Tree::new())), asker };
        Ok(Hollow { _session: Session::mount(files, at, &options)?.spawn()? })
    }
}

struct Files {
    tree: Arc<Mutex<Tree>>,
    asker: Option<Asker>,
}

impl Files {
    /// Answers after `op`, which only somebody without leases asks for when it is `seldom`; at once
    /// when nobody is asked. The answer gets the number of an inode that was made.
    fn after(
        &self,
        seldom: bool,
        op: impl FnOnce() -> Op,
        answer: impl FnOnce(&mut Tree, Option<u64>) + Send + 'static,
    ) {
        let tree = Arc::clone(&self.tree);
        match &self.asker {
            Some(asker) if asker.asks_all() || !seldom => {
                asker.ask(op(), move |made| answer(&mut tree.lock(), made));
            }
            _ => answer(&mut tree.lock(), None),
        }
    }
}

fn make(parent: INodeNo, name: &[u8], mode: u32, open: bool) -> Op {
    Op::Make(pb::Make { parent: parent.0, name: name.to_vec(), mode, open, ..Default::default() })
}

fn unlink(parent: INodeNo, name: &[u8], dir: bool) -> Op {
    Op::Unlink(pb::Unlink { parent: parent.0, name: name.to_vec(), dir, ..Default::default() })
}

fn empty(done: Result<(), Errno>, reply: ReplyEmpty) {
    match done {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(e),
    }
}

impl Files {
    fn lookup(&self, parent: INodeNo, name: &[u8], reply: ReplyEntry) {
        let wanted = OsStr::from_bytes(name).to_owned();
        let op = || {
            Op::Lookup(pb::Lookup { parent: parent.0, name: name.to_vec(), lease: 0, tell: false })
        };
        self.after(true, op, move |tree, _| match tree.named(parent.0, &wanted) {
            Ok(a) => reply.entry(TTL, &a),
            Err(e) => reply.error(e),
        });
    }

    fn getattr(&self, i: INodeNo, reply: ReplyAttr) {
        let op = || Op::GetAttr(pb::GetAttr { ino: i.0, lease: 0, tell: false });
        self.after(true, op, move |tree, _| match tree.attr(i.0) {
            Ok(a) => reply.attr(TTL, &a),
            Err(e) => reply.error(e),
        });
    }

    fn setattr(&self, asked: &SetAttr, reply: ReplyAttr) {
        let mut tree = self.tree.lock();
        if let (Some(size), Some(inode)) = (asked.size, tree.inodes.get_mut(&asked.inode.0)) {
            inode.size = size;
        }
        match tree.attr(asked.inode.0) {
            Ok(a) => reply.attr(TTL, &a),
            Err(e) => reply.error(e),
        }
    }

    fn mkdir(&self, parent: INodeNo, name: &[u8], mode: u32, reply: ReplyEntry) {
        let wanted = OsStr::from_bytes(name).to_owned();
        let op = || make(parent, name, (mode & 0o7777) | libc::S_IFDIR, false);
        self.after(false, op, move |tree, made| {
            let made = tree.make(made, parent.0, &wanted, FileType::Directory);
            reply.entry(TTL, &made);
        });
    }

    fn create(&self, parent: INodeNo, name: &[u8], mode: u32, reply: ReplyCreate) {
        let wanted = OsStr::from_bytes(name).to_owned();
        let op = || make(parent, name, (mode & 0o7777) | libc::S_IFREG, true);
        self.after(false, op, move |tree, made| {
            let made = tree.make(made, parent.0, &wanted, FileType::RegularFile);
            let flags = ebb_fs_client::open_flags();
            reply.created(TTL, &made, FileHandle(made.ino.0), flags, None);
        });
    }

    fn write(&self, asked: &Write<'_>) -> u32 {
        if let Some(inode) = self.tree.lock().inodes.get_mut(&asked.inode.0) {
            inode.size = inode.size.max(asked.offset + asked.data.len() as u64);
        }
        asked.data.len() as u32
    }

    fn flush(&self, i: INodeNo, reply: ReplyEmpty) {
        let end = self.tree.lock().inodes.get(&i.0).map_or(0, |i| i.size);
        let op = || {
            let ranges = vec![pb::Range { start: 0, end }];
            Op::Attach(pb::Attach { ino: i.0, ranges, ..Default::default() })
        };
        self.after(false, op, |_, _| reply.ok());
    }

    fn release(&self, i: INodeNo, reply: ReplyEmpty) {
        let op = || Op::Release(pb::Release { ino: i.0, settles: false });
        self.after(false, op, |_, _| reply.ok());
    }

    fn remove(&self, parent: INodeNo, name: &[u8], dir: bool, reply: ReplyEmpty) {
        let wanted = OsStr::from_bytes(name).to_owned();
        let op = || unlink(parent, name, dir);
        self.after(false, op, move |tree, _| empty(tree.remove(parent.0, &wanted), reply));
    }

    fn readdirplus(&self, asked: &ReadDir, reply: ReplyDirectoryPlus) {
        let tree = self.tree.lock();
        let mut listing = ListingPlus::new(asked.size);
        let behind = tree.inodes.range(asked.offset + 1..);
        for (ino, inode) in behind.filter(|(_, f)| f.parent == asked.inode.0) {
            let found = attr(*ino, inode.kind, inode.size);
            let is_root = *ino == ROOT;
            if !is_root && !listing.add(*ino, inode.name.as_bytes(), TTL, &found) {
                break;
            }
        }
        reply.listed(&listing);
    }
}

impl Filesystem for Files {
    fn init(&mut self, kernel: &mut Handshake) -> io::Result<()> {
        ebb_fs_client::ask_kernel(kernel);
        Ok(())
    }

    fn serve(&self, _: &Head, call: Call<'_>) {
        match call {
            Call::Lookup(asked, reply) => self.lookup(asked.parent, asked.name, reply),
            Call::GetAttr(asked, reply) => self.getattr(asked.inode, reply),
            Call::SetAttr(asked, reply) => self.setattr(&asked, reply),
            Call::MkDir(asked, reply) => self.mkdir(asked.parent, asked.name, asked.mode, reply),
            Call::Create(asked, reply) => self.create(asked.parent, asked.name, asked.mode, reply),
            Call::Open(_, reply) | Call::OpenDir(_, reply) => {
                reply.opened(FileHandle(0), FopenFlags::empty(), None);
            }
            Call::Write(asked, reply) => reply.written(self.write(&asked)),
            Call::Flush(asked, reply) => self.flush(asked.inode, reply),
            Call::Release(asked, reply) => self.release(asked.inode, reply),
            Call::ReleaseDir(_, reply) => reply.ok(),
            Call::Unlink(asked, reply) => self.remove(asked.parent, asked.name, false, reply),
            Call::RmDir(asked, reply) => self.remove(asked.parent, asked.name, true, reply),
            Call::ReadDirPlus(asked, reply) => self.readdirplus(&asked, reply),
            Call::GetXattr(asked, reply) => {
                let (ino, name) = (asked.inode.0, asked.name.to_vec());
                let op = || Op::GetXattr(pb::GetXattr { ino, name, tell: false });
                self.after(true, op, |_, _| reply.error(Errno::ENODATA));
            }
            Call::StatFs(_, reply) => reply.statfs(&Statistics::UNKNOWN),
            other => other.error(Errno::ENOSYS),
        }
    }
}
