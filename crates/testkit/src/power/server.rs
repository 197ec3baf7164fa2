//! The process that is the disk: `disk` is its content, and what is written to `control` is done
//! to it (`off`, `on CUT SEED`, `save`, `reset`); reading `control` tells how many sectors were at
//! stake in the last power cut, and how many it has changed.

use super::medium::{Cut, Loss, Medium};
use crate::random;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

const DISK: u64 = 2;
const CONTROL: u64 = 3;
const TTL: Duration = Duration::from_secs(1);

struct Power {
    medium: Medium,
    is_on: bool,
    last: Loss,
}

struct Disk {
    power: Mutex<Power>,
}

/// Serves a disk of `bytes` at `at` until that is unmounted.
///
/// # Errors
/// When it cannot be mounted.
pub fn serve(at: &Path, bytes: usize) -> io::Result<()> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("ebb-power-disk".into())];
    config.n_threads = Some(1);
    let power =
        Mutex::new(Power { medium: Medium::new(bytes), is_on: true, last: Loss::default() });
    let session = Session::new(Disk { power }, at, &config)?.spawn()?;
    session.join()
}

impl Power {
    fn obey(&mut self, order: &str) -> Result<(), Errno> {
        let words: Vec<&str> = order.split_whitespace().collect();
        match words.as_slice() {
            ["off"] => self.is_on = false,
            ["save"] => self.medium.save(),
            ["reset"] => self.medium.reset(),
            ["on", cut, seed] => {
                let cut = [Cut::Nothing, Cut::Everything, Cut::Any, Cut::Prefix]
                    .into_iter()
                    .find(|c| (*c as u8).to_string() == *cut)
                    .ok_or(Errno::EINVAL)?;
                let seed = seed.parse().map_err(|_| Errno::EINVAL)?;
                self.last = self.medium.cut(cut, &mut random::generator(seed));
                self.is_on = true;
            }
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }
}

impl Disk {
    fn power(&self) -> MutexGuard<'_, Power> {
        self.power.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attr(&self, ino: u64) -> FileAttr {
        let kind = if ino == 1 { FileType::Directory } else { FileType::RegularFile };
        let size = if ino == DISK { self.power().medium.len() as u64 } else { 0 };
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size / 512,
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind,
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// What needs power.
    fn powered<T>(&self, work: impl FnOnce(&mut Medium) -> Result<T, Errno>) -> Result<T, Errno> {
        let mut power = self.power();
        if power.is_on { work(&mut power.medium) } else { Err(Errno::EIO) }
    }
}

impl Filesystem for Disk {
    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("disk") => reply.entry(&TTL, &self.attr(DISK), Generation(0)),
            Some("control") => reply.entry(&TTL, &self.attr(CONTROL), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino.0));
    }

    /// O_TRUNC of `control`; nothing else has attributes that change.
    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.attr(&TTL, &self.attr(ino.0));
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Nothing may wait in the page cache of this machine.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if ino.0 == CONTROL {
            let Loss { at_stake, lost } = self.power().last;
            let text = format!("{at_stake} {lost}");
            return reply.data(text.as_bytes().get(offset as usize..).unwrap_or_default());
        }
        let read = self.powered(|m| Ok(m.read(offset as usize, size as usize).to_vec()));
        match read {
            Ok(data) => reply.data(&data),
            Err(e) => reply.error(e),
        }
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = match ino.0 {
            CONTROL => self.power().obey(&String::from_utf8_lossy(data)),
            _ => {
                self.powered(|m| m.write(offset as usize, data).then_some(()).ok_or(Errno::ENOSPC))
            }
        };
        match written {
            Ok(()) => reply.written(u32::try_from(data.len()).expect("one request")),
            Err(e) => reply.error(e),
        }
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let synced = self.powered(|medium| {
            medium.flush();
            Ok(())
        });
        match synced {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        }
    }
}
