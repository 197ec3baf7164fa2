//! A FUSE file system with one file, which the kernel reads and writes past it: what passthrough
//! leaves to any daemon.

use crate::hollow::attr;
use fuser::{
    BackingId, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, MountOption, OpenFlags, ReplyAttr, ReplyEntry, ReplyOpen,
    Request, Session,
};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

const ROOT: INodeNo = INodeNo(1);
const FILE: INodeNo = INodeNo(2);

/// How the file is called.
pub const NAME: &str = "f";

/// A mounted one; dropping it unmounts.
#[derive(Debug)]
pub struct Through {
    _session: fuser::BackgroundSession,
}

impl Through {
    /// Mounts it: its file has the bytes of `file`.
    pub fn mount(at: &Path, file: File) -> io::Result<Through> {
        let mut config = Config::default();
        config.mount_options =
            vec![MountOption::FSName("through".into()), MountOption::DefaultPermissions];
        Ok(Through {
            _session: Session::new(OneFile { file, id: OnceLock::new() }, at, &config)?.spawn()?,
        })
    }
}

struct OneFile {
    file: File,
    /// The kernel looks for it after the answer to the open.
    id: OnceLock<BackingId>,
}

impl OneFile {
    fn attr(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        match ino {
            ROOT => Ok(attr(ino.0, FileType::Directory, 0)),
            FILE => {
                let size = self.file.metadata().map_err(|_| Errno::EIO)?.len();
                Ok(attr(ino.0, FileType::RegularFile, size))
            }
            _ => Err(Errno::ENOENT),
        }
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        ebb_fs_client::ask_kernel(config);
        let refused = || io::Error::from(io::ErrorKind::Unsupported);
        config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).map_err(|_| refused())?;
        config.set_max_stack_depth(2).map(drop).map_err(|_| refused())
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
        if self.id.get().is_none()
            && let Ok(id) = reply.open_backing(&self.file)
        {
            let _ = self.id.set(id);
        }
        match self.id.get() {
            Some(id) => reply.opened_passthrough(FileHandle(0), FopenFlags::empty(), id),
            None => reply.error(Errno::EOPNOTSUPP),
        }
    }
}
