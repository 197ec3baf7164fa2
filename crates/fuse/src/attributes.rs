//! Attributes and times between the words of `fuser` and the protocol's.

use crate::abi;
use fuser::{FileAttr, FileType, Generation};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const NANOSECONDS: u32 = 1_000_000_000;

/// The bits of a mode that say what it is.
pub(crate) fn type_bits(kind: FileType) -> u32 {
    match kind {
        FileType::NamedPipe => libc::S_IFIFO,
        FileType::CharDevice => libc::S_IFCHR,
        FileType::BlockDevice => libc::S_IFBLK,
        FileType::Directory => libc::S_IFDIR,
        FileType::RegularFile => libc::S_IFREG,
        FileType::Symlink => libc::S_IFLNK,
        FileType::Socket => libc::S_IFSOCK,
    }
}

pub(crate) fn attr(a: &FileAttr) -> abi::Attr {
    let [(atime, atimensec), (mtime, mtimensec), (ctime, ctimensec)] =
        [a.atime, a.mtime, a.ctime].map(to_wire);
    abi::Attr {
        ino: a.ino.0,
        size: a.size,
        blocks: a.blocks,
        atime,
        mtime,
        ctime,
        atimensec,
        mtimensec,
        ctimensec,
        mode: type_bits(a.kind) | u32::from(a.perm),
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        blksize: a.blksize,
        flags: 0,
    }
}

/// An inode by name; `ttl` is how long the kernel may believe both.
pub(crate) fn entry(ttl: Duration, a: &FileAttr, generation: Generation) -> abi::EntryOut {
    abi::EntryOut {
        nodeid: a.ino.0,
        generation: generation.0,
        entry_valid: ttl.as_secs(),
        attr_valid: ttl.as_secs(),
        entry_valid_nsec: ttl.subsec_nanos(),
        attr_valid_nsec: ttl.subsec_nanos(),
        attr: attr(a),
    }
}

/// Seconds (negative before 1970, in two's complement) and nanoseconds after them.
pub(crate) fn to_wire(time: SystemTime) -> (u64, u32) {
    let (seconds, nanoseconds) = match time.duration_since(UNIX_EPOCH) {
        Ok(since) => (i64::try_from(since.as_secs()).unwrap_or(i64::MAX), since.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            let whole = i64::try_from(before.as_secs()).unwrap_or(i64::MAX);
            match before.subsec_nanos() {
                0 => (-whole, 0),
                part => ((-whole).saturating_sub(1), NANOSECONDS - part),
            }
        }
    };
    (seconds as u64, nanoseconds)
}

/// The other way round. A time that this machine cannot have is 1970.
pub(crate) fn from_wire(seconds: u64, nanoseconds: u32) -> SystemTime {
    let seconds = seconds as i64;
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let start = match seconds < 0 {
        true => UNIX_EPOCH.checked_sub(whole),
        false => UNIX_EPOCH.checked_add(whole),
    };
    let part = Duration::from_nanos(u64::from(nanoseconds.min(NANOSECONDS - 1)));
    start.and_then(|at| at.checked_add(part)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn times_before_1970_have_nanoseconds_after_their_second() {
        assert_eq!(to_wire(UNIX_EPOCH), (0, 0));
        let before = UNIX_EPOCH - Duration::new(1, 200_000_000);
        assert_eq!(to_wire(before), (-2_i64 as u64, 800_000_000));
        assert_eq!(from_wire(-2_i64 as u64, 800_000_000), before);
        assert_eq!(to_wire(UNIX_EPOCH - Duration::from_secs(3)), (-3_i64 as u64, 0));
    }

    proptest! {
        #[test]
        fn times_come_back(seconds in -(1_i64 << 40)..1 << 40, nanoseconds in 0..NANOSECONDS) {
            let there = from_wire(seconds as u64, nanoseconds);
            prop_assert_eq!(to_wire(there), (seconds as u64, nanoseconds));
        }

        #[test]
        fn no_time_is_too_much(seconds: u64, nanoseconds: u32) {
            let _ = to_wire(from_wire(seconds, nanoseconds));
        }
    }
}
