//! What `stat` tells of an inode.

use crate::ids::Ino;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds and nanoseconds since 1970; negative seconds are before it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Time {
    /// Whole seconds, rounded towards the past.
    pub sec: i64,
    /// 0 to 999,999,999.
    pub nsec: u32,
}

impl Time {
    /// The wall clock now.
    #[must_use]
    pub fn now() -> Time {
        Time::from(SystemTime::now())
    }
}

impl From<SystemTime> for Time {
    fn from(t: SystemTime) -> Time {
        match t.duration_since(UNIX_EPOCH) {
            Ok(d) => Time { sec: d.as_secs() as i64, nsec: d.subsec_nanos() },
            Err(before) => {
                let d = before.duration();
                match d.subsec_nanos() {
                    0 => Time { sec: -(d.as_secs() as i64), nsec: 0 },
                    n => Time { sec: -(d.as_secs() as i64) - 1, nsec: 1_000_000_000 - n },
                }
            }
        }
    }
}

impl From<Time> for SystemTime {
    fn from(t: Time) -> SystemTime {
        let nsec = t.nsec.min(999_999_999);
        if t.sec >= 0 {
            UNIX_EPOCH + Duration::new(t.sec as u64, nsec)
        } else {
            UNIX_EPOCH - Duration::new(t.sec.unsigned_abs(), 0) + Duration::new(0, nsec)
        }
    }
}

/// The type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl FileKind {
    /// The kind that the type bits of a `st_mode` mean.
    #[must_use]
    pub fn from_mode(mode: u32) -> Option<FileKind> {
        Some(match mode & libc::S_IFMT {
            libc::S_IFREG => FileKind::Regular,
            libc::S_IFDIR => FileKind::Directory,
            libc::S_IFLNK => FileKind::Symlink,
            libc::S_IFIFO => FileKind::Fifo,
            libc::S_IFSOCK => FileKind::Socket,
            libc::S_IFCHR => FileKind::CharDevice,
            libc::S_IFBLK => FileKind::BlockDevice,
            _ => return None,
        })
    }

    /// The type bits of `st_mode`.
    #[must_use]
    pub fn mode_bits(self) -> u32 {
        match self {
            FileKind::Regular => libc::S_IFREG,
            FileKind::Directory => libc::S_IFDIR,
            FileKind::Symlink => libc::S_IFLNK,
            FileKind::Fifo => libc::S_IFIFO,
            FileKind::Socket => libc::S_IFSOCK,
            FileKind::CharDevice => libc::S_IFCHR,
            FileKind::BlockDevice => libc::S_IFBLK,
        }
    }
}

/// The attributes of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// Job-wide inode number.
    pub ino: Ino,
    /// Type.
    pub kind: FileKind,
    /// Permission bits with setuid, setgid and sticky (`0o7777`).
    pub perm: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number, for device files.
    pub rdev: u32,
    /// Size in bytes; for a symlink the length of its target.
    pub size: u64,
    /// Last access (set explicitly only: reads do not change it).
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of content or attributes.
    pub ctime: Time,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_survive() {
        for t in [Time { sec: -5, nsec: 250_000_000 }, Time { sec: -5, nsec: 0 }, Time::now()] {
            assert_eq!(Time::from(SystemTime::from(t)), t);
        }
    }
}
