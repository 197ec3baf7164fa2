//! A FUSE file system with one file, which the kernel reads and writes past it: what passthrough
//! leaves to any daemon.

use crate::one_file::{self, Behind};
use ebb_fuse::{
    Background, BackingId, Errno, FileHandle, FopenFlags, Handshake, InitFlags, ReplyOpen,
};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

/// A mounted one; dropping it unmounts.
#[derive(Debug)]
pub struct Through {
    _session: Background,
}

impl Through {
    /// Mounts it: its file has the bytes of `file`.
    pub fn mount(at: &Path, file: File) -> io::Result<Through> {
        let past = Past { file, id: OnceLock::new() };
        Ok(Through { _session: one_file::mount(at, 1, past)? })
    }
}

struct Past {
    file: File,
    /// The kernel looks for it after the answer to the open.
    id: OnceLock<BackingId>,
}

impl Behind for Past {
    fn init(&self, kernel: &mut Handshake) -> io::Result<()> {
        if !kernel.ask_for(InitFlags::FUSE_PASSTHROUGH) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        kernel.set_max_stack_depth(2);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn open(&self, reply: ReplyOpen) {
        if self.id.get().is_none()
            && let Ok(id) = reply.open_backing(&self.file)
        {
            let _ = self.id.set(id);
        }
        match self.id.get() {
            Some(id) => reply.opened(FileHandle(0), FopenFlags::empty(), Some(id)),
            None => reply.error(Errno::EOPNOTSUPP),
        }
    }
}
