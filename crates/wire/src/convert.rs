//! Checked conversions between messages and types.

use crate::pb;
use ebb_types::{Attr, ByteRange, Errno, FileKind, Ino, Time};

/// A time as sent.
#[must_use]
pub fn time_to_pb(t: Time) -> pb::Time {
    pb::Time { sec: t.sec, nsec: t.nsec }
}

/// A time as received; nanoseconds out of range are refused.
pub fn time_from_pb(t: pb::Time) -> Result<Time, Errno> {
    if t.nsec < 1_000_000_000 { Ok(Time { sec: t.sec, nsec: t.nsec }) } else { Err(Errno::EPROTO) }
}

/// A range as sent.
#[must_use]
pub fn range_to_pb(r: ByteRange) -> pb::Range {
    pb::Range { start: r.start(), end: r.end() }
}

/// A range as received; an inverted one is refused.
pub fn range_from_pb(r: pb::Range) -> Result<ByteRange, Errno> {
    if r.start <= r.end { Ok(ByteRange::new(r.start, r.end)) } else { Err(Errno::EPROTO) }
}

/// Attributes as sent.
#[must_use]
pub fn attr_to_pb(a: &Attr) -> pb::Attr {
    pb::Attr {
        ino: a.ino.0,
        mode: a.kind.mode_bits() | (a.perm & 0o7777),
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        size: a.size,
        atime: Some(time_to_pb(a.atime)),
        mtime: Some(time_to_pb(a.mtime)),
        ctime: Some(time_to_pb(a.ctime)),
    }
}

/// Attributes as received; a missing time or an unknown type is refused.
pub fn attr_from_pb(a: &pb::Attr) -> Result<Attr, Errno> {
    let time = |t: Option<pb::Time>| t.ok_or(Errno::EPROTO).and_then(time_from_pb);
    Ok(Attr {
        ino: Ino(a.ino),
        kind: FileKind::from_mode(a.mode).ok_or(Errno::EPROTO)?,
        perm: a.mode & 0o7777,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        size: a.size,
        atime: time(a.atime)?,
        mtime: time(a.mtime)?,
        ctime: time(a.ctime)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_values_are_refused() {
        assert!(range_from_pb(pb::Range { start: 2, end: 1 }).is_err());
        assert!(time_from_pb(pb::Time { sec: 0, nsec: 1_000_000_000 }).is_err());
        assert!(attr_from_pb(&pb::Attr::default()).is_err());
    }

    #[test]
    fn attributes_survive_the_way_there_and_back() {
        let attr = Attr {
            ino: Ino(7),
            kind: FileKind::Symlink,
            perm: 0o777,
            nlink: 1,
            uid: 3,
            gid: 4,
            rdev: 0,
            size: 9,
            atime: Time { sec: -1, nsec: 5 },
            mtime: Time { sec: 1, nsec: 999_999_999 },
            ctime: Time::now(),
        };
        assert_eq!(attr_from_pb(&attr_to_pb(&attr)), Ok(attr));
    }
}
