//! A FUSE file system with nothing behind it: it keeps names and sizes in memory and throws bytes
//! away. Mounted as Ebb is, it shows what any daemon can reach; with an [`Asker`], what requests to
//! a metadata service cost on top of that.

use crate::asking::Asker;
use ebb_wire::pb::{self, request::Op};
use fuser::{
    AccessFlags, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    Generation, INodeNo, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyWrite, ReplyXattr, Request, Session,
    TimeOrNow, WriteFlags,
};
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
    _session: fuser::BackgroundSession,
}

impl Hollow {
    /// Mounts it; `asker` is asked before the answers that a service would have to give.
    pub fn mount(at: &Path, asker: Option<Asker>) -> io::Result<Hollow> {
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("hollow".into()),
            MountOption::Subtype("hollow".into()),
            MountOption::DefaultPermissions,
        ];
        config.n_threads = Some(LOOPS);
        config.clone_fd = true;
        let files = Files { tree: Arc::new(Mutex::new(Tree::new())), asker };
        Ok(Hollow { _session: Session::new(files, at, &config)?.spawn()? })
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

fn make(parent: INodeNo, name: &OsStr, mode: u32, open: bool) -> Op {
    let name = name.as_bytes().to_vec();
    Op::Make(pb::Make { parent: parent.0, name, mode, open, ..Default::default() })
}

fn unlink(parent: INodeNo, name: &OsStr, dir: bool) -> Op {
    let name = name.as_bytes().to_vec();
    Op::Unlink(pb::Unlink { parent: parent.0, name, dir, ..Default::default() })
}

fn empty(done: Result<(), Errno>, reply: ReplyEmpty) {
    match done {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(e),
    }
}

impl Filesystem for Files {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        ebb_fs_client::ask_kernel(config);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let wanted = name.to_owned();
        let op = || {
            let name = name.as_bytes().to_vec();
            Op::Lookup(pb::Lookup { parent: parent.0, name, lease: 0 })
        };
        self.after(true, op, move |tree, _| match tree.named(parent.0, &wanted) {
            Ok(a) => reply.entry(&TTL, &a, Generation(0)),
            Err(e) => reply.error(e),
        });
    }

    fn getattr(&self, _req: &Request, i: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let op = || Op::GetAttr(pb::GetAttr { ino: i.0, lease: 0 });
        self.after(true, op, move |tree, _| match tree.attr(i.0) {
            Ok(a) => reply.attr(&TTL, &a),
            Err(e) => reply.error(e),
        });
    }

    fn setattr(
        &self,
        _req: &Request,
        i: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut tree = self.tree.lock();
        if let (Some(size), Some(inode)) = (size, tree.inodes.get_mut(&i.0)) {
            inode.size = size;
        }
        match tree.attr(i.0) {
            Ok(a) => reply.attr(&TTL, &a),
            Err(e) => reply.error(e),
        }
    }

    fn mkdir(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let wanted = name.to_owned();
        let op = || make(parent, name, (mode & 0o7777) | libc::S_IFDIR, false);
        self.after(false, op, move |tree, made| {
            let made = tree.make(made, parent.0, &wanted, FileType::Directory);
            reply.entry(&TTL, &made, Generation(0));
        });
    }

    fn create(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let wanted = name.to_owned();
        let op = || make(parent, name, (mode & 0o7777) | libc::S_IFREG, true);
        self.after(false, op, move |tree, made| {
            let made = tree.make(made, parent.0, &wanted, FileType::RegularFile);
            let flags = ebb_fs_client::open_flags();
            reply.created(&TTL, &made, Generation(0), FileHandle(made.ino.0), flags);
        });
    }

    fn write(
        &self,
        _req: &Request,
        i: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if let Some(inode) = self.tree.lock().inodes.get_mut(&i.0) {
            inode.size = inode.size.max(offset + data.len() as u64);
        }
        reply.written(data.len() as u32);
    }

    fn flush(
        &self,
        _req: &Request,
        i: INodeNo,
        _fh: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let end = self.tree.lock().inodes.get(&i.0).map_or(0, |i| i.size);
        let op = || {
            let ranges = vec![pb::Range { start: 0, end }];
            Op::Attach(pb::Attach { ino: i.0, ranges, ..Default::default() })
        };
        self.after(false, op, |_, _| reply.ok());
    }

    fn release(
        &self,
        _req: &Request,
        i: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.after(
            false,
            || Op::Release(pb::Release { ino: i.0, settles: false }),
            |_, _| reply.ok(),
        );
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let wanted = name.to_owned();
        let op = || unlink(parent, name, false);
        self.after(false, op, move |tree, _| empty(tree.remove(parent.0, &wanted), reply));
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let wanted = name.to_owned();
        let op = || unlink(parent, name, true);
        self.after(false, op, move |tree, _| empty(tree.remove(parent.0, &wanted), reply));
    }

    fn readdirplus(
        &self,
        _req: &Request,
        i: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let tree = self.tree.lock();
        for (ino, inode) in tree.inodes.range(offset + 1..).filter(|(_, f)| f.parent == i.0) {
            let found = attr(*ino, inode.kind, inode.size);
            let is_root = *ino == ROOT;
            if !is_root && reply.add(found.ino, *ino, &inode.name, &TTL, &found, Generation(0)) {
                break;
            }
        }
        reply.ok();
    }

    fn getxattr(&self, _req: &Request, i: INodeNo, name: &OsStr, _size: u32, reply: ReplyXattr) {
        let op = || Op::GetXattr(pb::GetXattr { ino: i.0, name: name.as_bytes().to_vec() });
        self.after(true, op, |_, _| reply.error(Errno::ENODATA));
    }

    fn access(&self, _req: &Request, _i: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
}
