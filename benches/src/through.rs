//! A FUSE file system with one file, which the kernel reads and writes past it: what passthrough
//! leaves to any daemon.

use crate::one_file::{self, Behind};
use fuser::{BackingId, Errno, FileHandle, FopenFlags, InitFlags, KernelConfig, ReplyOpen};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

/// A mounted one; dropping it unmounts.
#[derive(Debug)]
pub struct Through {
    _session: fuser::BackgroundSession,
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
    fn init(&self, config: &mut KernelConfig) -> io::Result<()> {
        let refused = || io::Error::from(io::ErrorKind::Unsupported);
        config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).map_err(|_| refused())?;
        config.set_max_stack_depth(2).map(drop).map_err(|_| refused())
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
            Some(id) => reply.opened_passthrough(FileHandle(0), FopenFlags::empty(), id),
            None => reply.error(Errno::EOPNOTSUPP),
        }
    }
}
