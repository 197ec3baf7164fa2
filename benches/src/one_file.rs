//! A FUSE file system with one file; what its bytes are and how the kernel gets at them is up to who
//! mounts it. Daemons that do next to nothing, to see what is left to any daemon.

use crate::hollow::attr;
use ebb_fuse::{
    Background, Call, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Handshake,
    Head, INodeNo, Options, ReplyData, ReplyEntry, ReplyOpen, Session, Statistics,
};
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
    fn init(&self, kernel: &mut Handshake) -> io::Result<()>;

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
pub fn mount(at: &Path, loops: usize, file: impl Behind) -> io::Result<Background> {
    let options = Options { default_permissions: true, loops, ..Options::new("one-file") };
    Session::mount(OneFile(file), at, &options)?.spawn()
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

    fn lookup(&self, parent: INodeNo, name: &[u8], reply: ReplyEntry) {
        let is_it = parent == ROOT && name == NAME.as_bytes();
        match if is_it { self.attr(FILE) } else { Err(Errno::ENOENT) } {
            Ok(a) => reply.entry(Duration::ZERO, &a),
            Err(e) => reply.error(e),
        }
    }
}

impl<B: Behind> Filesystem for OneFile<B> {
    fn init(&mut self, kernel: &mut Handshake) -> io::Result<()> {
        ebb_fs_client::ask_kernel(kernel);
        self.0.init(kernel)
    }

    fn serve(&self, _: &Head, call: Call<'_>) {
        match call {
            Call::Lookup(asked, reply) => self.lookup(asked.parent, asked.name, reply),
            Call::GetAttr(asked, reply) => match self.attr(asked.inode) {
                Ok(a) => reply.attr(Duration::ZERO, &a),
                Err(e) => reply.error(e),
            },
            Call::Open(_, reply) => self.0.open(reply),
            Call::OpenDir(_, reply) => reply.opened(FileHandle(0), FopenFlags::empty(), None),
            Call::Read(asked, reply) => self.0.read(asked.offset, asked.size as usize, reply),
            Call::Release(_, reply) | Call::ReleaseDir(_, reply) => reply.ok(),
            Call::StatFs(_, reply) => reply.statfs(&Statistics::UNKNOWN),
            other => other.error(Errno::ENOSYS),
        }
    }
}
