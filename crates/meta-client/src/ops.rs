//! What is known of every operation: the name under which it is counted, and whether a restarted
//! service may be asked again when nobody knows what became of the first time.

use ebb_types::FileKind;
use ebb_wire::pb::request::Op;

/// May a request be sent to a new instance of the service after an old one took it and did not
/// answer? (The same instance always gets it again: it knows by its id what it has answered.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    /// Doing it twice is doing it once, or no program can tell.
    Yes,
    /// The second time would fail for a reason that the first one made, or change more.
    Never,
}

/// Names by index of counter.
pub(crate) const NAMES: [&str; 38] = [
    "hello",
    "prove",
    "heartbeat",
    "goodbye",
    "node_info",
    "lookup",
    "getattr",
    "setattr",
    "create",
    "mkdir",
    "symlink",
    "mknod",
    "unlink",
    "rename",
    "link",
    "readdir",
    "readlink",
    "getxattr",
    "setxattr",
    "listxattr",
    "removexattr",
    "statfs",
    "access",
    "open",
    "release",
    "query",
    "attach",
    "append",
    "detach",
    "flush_begin",
    "flush_end",
    "materialize",
    "sync_meta",
    "set_lock",
    "get_lock",
    "release_locks",
    "cancel",
    "describe",
];

/// Index into [`NAMES`] and the rule of repetition.
pub(crate) fn describe(op: &Op) -> (usize, Again) {
    use Again::{Never, Yes};
    match op {
        Op::Hello(_) => (0, Never),
        Op::Prove(_) => (1, Never),
        Op::Heartbeat(_) => (2, Yes),
        Op::Goodbye(_) => (3, Yes),
        Op::NodeInfo(_) => (4, Yes),
        Op::Lookup(_) => (5, Yes),
        Op::GetAttr(_) => (6, Yes),
        // The same values again; whoever cut or changed the file in between did so at the same
        // time as this request, and either order is right.
        Op::SetAttr(_) => (7, Yes),
        Op::Make(make) => (made(make.mode), Never),
        Op::Unlink(_) => (12, Never),
        Op::Rename(_) => (13, Never),
        Op::Link(_) => (14, Never),
        Op::ReadDir(_) => (15, Yes),
        Op::ReadLink(_) => (16, Yes),
        Op::GetXattr(_) => (17, Yes),
        // XATTR_CREATE and XATTR_REPLACE look at what is there.
        Op::SetXattr(set) => (18, if set.flags == 0 { Yes } else { Never }),
        Op::ListXattr(_) => (19, Yes),
        Op::RemoveXattr(_) => (20, Never),
        Op::StatFs(_) => (21, Yes),
        Op::Access(_) => (22, Yes),
        Op::Open(_) => (23, Yes),
        Op::Release(_) => (24, Yes),
        Op::Query(_) => (25, Yes),
        Op::Attach(_) => (26, Yes),
        Op::Append(_) => (27, Never),
        Op::Detach(_) => (28, Yes),
        // Grants end with the instance that gave them: a new one is taken, an old one is void.
        Op::FlushBegin(_) => (29, Yes),
        Op::FlushEnd(_) => (30, Never),
        Op::Materialize(_) => (31, Yes),
        Op::SyncMeta(_) => (32, Yes),
        Op::SetLock(lock) => (33, if lock.r#type == UNLOCK { Yes } else { Never }),
        Op::GetLock(_) => (34, Yes),
        Op::ReleaseLocks(_) => (35, Yes),
        Op::Cancel(_) => (36, Yes),
        Op::Describe(_) => (37, Yes),
    }
}

/// `SetLock.type` that takes a lock away.
pub(crate) const UNLOCK: u32 = 2;

fn made(mode: u32) -> usize {
    match FileKind::from_mode(mode) {
        Some(FileKind::Directory) => 9,
        Some(FileKind::Symlink) => 10,
        Some(FileKind::Regular) => 8,
        _ => 11,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_wire::pb;

    fn name(op: Op) -> &'static str {
        NAMES[describe(&op).0]
    }

    #[test]
    fn operations_are_counted_under_their_names() {
        let make = |mode| Op::Make(pb::Make { mode, ..Default::default() });
        assert_eq!(name(make(libc::S_IFREG | 0o644)), "create");
        assert_eq!(name(make(libc::S_IFDIR)), "mkdir");
        assert_eq!(name(make(libc::S_IFLNK)), "symlink");
        assert_eq!(name(make(libc::S_IFIFO)), "mknod");
        assert_eq!(name(Op::Lookup(pb::Lookup::default())), "lookup");
        assert_eq!(name(Op::Attach(pb::Attach::default())), "attach");
        assert_eq!(name(Op::Query(pb::Query::default())), "query");
        assert_eq!(name(Op::Open(pb::Open::default())), "open");
        assert_eq!(name(Op::SetLock(pb::SetLock::default())), "set_lock");
        assert_eq!(name(Op::Cancel(pb::Cancel::default())), "cancel");
    }

    #[test]
    fn what_must_not_be_done_twice_is_not_repeated() {
        let set = |flags| describe(&Op::SetXattr(pb::SetXattr { flags, ..Default::default() })).1;
        assert_eq!((set(0), set(1)), (Again::Yes, Again::Never));
        let lock = |r#type| describe(&Op::SetLock(pb::SetLock { r#type, ..Default::default() })).1;
        assert_eq!((lock(0), lock(1), lock(2)), (Again::Never, Again::Never, Again::Yes));
        for op in [
            Op::Append(pb::Append::default()),
            Op::Make(pb::Make::default()),
            Op::Rename(pb::Rename::default()),
            Op::Unlink(pb::Unlink::default()),
            Op::Link(pb::Link::default()),
            Op::FlushEnd(pb::FlushEnd::default()),
        ] {
            assert_eq!(describe(&op).1, Again::Never, "{op:?}");
        }
    }
}
