//! The process that is the disk: `disk` is its content, and what is written to `control` is done
//! to it (`off`, `on CUT SEED`, `save`, `reset`); reading `control` tells how many sectors were at
//! stake in the last power cut, and how many it has changed.

use super::medium::{Cut, Loss, Medium};
use crate::random;
use ebb_fuse::{
    Call, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Head, INodeNo, Options,
    Read, ReplyData, ReplyEntry, Session, Statistics, Write,
};
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
    let power =
        Mutex::new(Power { medium: Medium::new(bytes), is_on: true, last: Loss::default() });
    Session::mount(Disk { power }, at, &Options::new("ebb-power-disk"))?.run()
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

impl Disk {
    fn lookup(&self, name: &[u8], reply: ReplyEntry) {
        match name {
            b"disk" => reply.entry(TTL, &self.attr(DISK)),
            b"control" => reply.entry(TTL, &self.attr(CONTROL)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn read(&self, asked: &Read, reply: ReplyData) {
        let (offset, size) = (asked.offset as usize, asked.size as usize);
        if asked.inode.0 == CONTROL {
            let Loss { at_stake, lost } = self.power().last;
            let text = format!("{at_stake} {lost}");
            return reply.data(text.as_bytes().get(offset..).unwrap_or_default());
        }
        match self.powered(|m| Ok(m.read(offset, size).to_vec())) {
            Ok(data) => reply.data(&data),
            Err(e) => reply.error(e),
        }
    }

    fn write(&self, asked: &Write<'_>) -> Result<(), Errno> {
        if asked.inode.0 == CONTROL {
            return self.power().obey(&String::from_utf8_lossy(asked.data));
        }
        self.powered(|m| {
            m.write(asked.offset as usize, asked.data).then_some(()).ok_or(Errno::ENOSPC)
        })
    }

    fn flush(&self) -> Result<(), Errno> {
        self.powered(|medium| {
            medium.flush();
            Ok(())
        })
    }
}

impl Filesystem for Disk {
    fn serve(&self, _: &Head, call: Call<'_>) {
        match call {
            Call::Lookup(asked, reply) => self.lookup(asked.name, reply),
            Call::GetAttr(asked, reply) => reply.attr(TTL, &self.attr(asked.inode.0)),
            // O_TRUNC of `control`; nothing else has attributes that change.
            Call::SetAttr(asked, reply) => reply.attr(TTL, &self.attr(asked.inode.0)),
            // Nothing may wait in the page cache of this machine.
            Call::Open(_, reply) => {
                reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO, None);
            }
            Call::OpenDir(_, reply) => reply.opened(FileHandle(0), FopenFlags::empty(), None),
            Call::Release(_, reply) | Call::ReleaseDir(_, reply) => reply.ok(),
            Call::Read(asked, reply) => self.read(&asked, reply),
            Call::Write(asked, reply) => match self.write(&asked) {
                Ok(()) => reply.written(u32::try_from(asked.data.len()).expect("one request")),
                Err(e) => reply.error(e),
            },
            Call::Fsync(_, reply) => match self.flush() {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(e),
            },
            Call::StatFs(_, reply) => reply.statfs(&Statistics::UNKNOWN),
            other => other.error(Errno::ENOSYS),
        }
    }
}
