//! A FUSE file system with one file; what its bytes are and how the kernel gets at them is up to who
//! mounts it. Daemons that do next to nothing, to see what is left to any daemon.

use crate::hollow::attr;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, KernelConfig,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
    Session,
};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::Duration;

const ROOT: INodeNo = INodeNo(1);
const FILE: INodeNo = INodeNo(2);

/// How the file is called.
pub const NAME: &str = "f";

/// What is behind the file.
pub trait Behind: Send + Sync + 'static {
    /// Asks the kernel for what it needs.
    fn init(&self, config: &mut KernelConfig) -> io::Result<()>;

    /// Bytes of the file.
    fn size(&self) -> io::Result<u64>;

    /// Answers an open.
    fn open(&self, reply: ReplyOpen);

    /// Answers a read.
    fn read(&self, _offset: u64, _size: usize, reply: ReplyData) {
        reply.error(Errno::EIO);
    }
}

/// Mounts it with so many event loops; dropping the session unmounts.
pub fn mount(at: &Path, loops: usize, file: impl Behind) -> io::Result<fuser::BackgroundSession> {
    let mut config = Config::default();
    config.mount_options =
        vec![MountOption::FSName("one-file".into()), MountOption::DefaultPermissions];
    config.n_threads = Some(loops);
    config.clone_fd = loops > 1;
    Session::new(OneFile(file), at, &config)?.spawn()
}

struct OneFile<B>(B);

impl<B: Behind> OneFile<B> {
    fn attr(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        match ino {
            ROOT => Ok(attr(ino.0, FileType::Directory, 0)),
            FILE => {
                let size = self.0.size().map_err(|_| Errno::EIO)?;
                Ok(attr(ino.0, FileType::RegularFile, size))
            }
            _ => Err(Errno::ENOENT),
        }
    }
}

impl<B: Behind> Filesystem for OneFile<B> {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        ebb_fs_client::ask_kernel(config);
        self.0.init(config)
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found =
            if parent == ROOT && name == NAME { self.attr(FILE) } else { Err(Errno::ENOENT) };
        match found {
            Ok(a) => reply.entry(&Duration::ZERO, &a, Generation(0)),
            Err(e) => reply.error(e),
        }
    }

    fn getattr(&self, _req: &Request, i: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(i) {
            Ok(a) => reply.attr(&Duration::ZERO, &a),
            Err(e) => reply.error(e),
        }
    }

    fn open(&self, _req: &Request, _i: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.0.open(reply);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.0.read(offset, size as usize, reply);
    }
}
