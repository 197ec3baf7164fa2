//! The names under which operations are counted.

use ebb_types::FileKind;
use ebb_wire::pb::request::Op;

/// Names by index of counter.
pub(crate) const NAMES: [&str; 49] = [
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
    "returned",
    "share",
    "pair",
    "copies",
    "adopt",
    "published",
    "exists",
    "reassert",
    "await",
    "leave",
    "join",
];

/// Index into [`NAMES`].
pub(crate) fn counter(op: &Op) -> usize {
    match op {
        Op::Make(make) => made(make.mode),
        Op::Hello(_) => 0,
        Op::Prove(_) => 1,
        Op::Heartbeat(_) => 2,
        Op::Goodbye(_) => 3,
        Op::NodeInfo(_) => 4,
        Op::Lookup(_) => 5,
        Op::GetAttr(_) => 6,
        Op::SetAttr(_) => 7,
        Op::Unlink(_) => 12,
        Op::Rename(_) => 13,
        Op::Link(_) => 14,
        Op::ReadDir(_) => 15,
        Op::ReadLink(_) => 16,
        Op::GetXattr(_) => 17,
        Op::SetXattr(_) => 18,
        Op::ListXattr(_) => 19,
        Op::RemoveXattr(_) => 20,
        Op::StatFs(_) => 21,
        Op::Access(_) => 22,
        Op::Open(_) => 23,
        Op::Release(_) => 24,
        Op::Query(_) => 25,
        Op::Attach(_) => 26,
        Op::Append(_) => 27,
        Op::Detach(_) => 28,
        Op::FlushBegin(_) => 29,
        Op::FlushEnd(_) => 30,
        Op::Materialize(_) => 31,
        Op::SyncMeta(_) => 32,
        Op::SetLock(_) => 33,
        Op::GetLock(_) => 34,
        Op::ReleaseLocks(_) => 35,
        Op::Cancel(_) => 36,
        Op::Describe(_) => 37,
        Op::Returned(_) => 38,
        Op::Share(_) => 39,
        Op::Pair(_) => 40,
        Op::Copies(_) => 41,
        Op::Adopt(_) => 42,
        Op::Published(_) => 43,
        Op::Exists(_) => 44,
        Op::Reassert(_) => 45,
        Op::Await(_) => 46,
        Op::Leave(_) => 47,
        Op::Join(_) => 48,
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
        NAMES[counter(&op)]
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
        assert_eq!(name(Op::SyncMeta(pb::SyncMeta::default())), "sync_meta");
        assert_eq!(name(Op::SetLock(pb::SetLock::default())), "set_lock");
        assert_eq!(name(Op::Cancel(pb::Cancel::default())), "cancel");
        assert_eq!(name(Op::Describe(pb::Describe::default())), "describe");
    }
}
