//! Requests of a real kernel (Linux 6.18), byte by byte, and what no kernel would send.

use super::*;
use fuser::{FileHandle, InitFlags, LockOwner, OpenFlags, RenameFlags, TimeOrNow, WriteFlags};
use proptest::prelude::*;
use std::time::{Duration, UNIX_EPOCH};
use zerocopy::IntoBytes;

const ROOT: INodeNo = INodeNo(1);
const FILE: INodeNo = INodeNo(2);
const HANDLE: FileHandle = FileHandle(2);
const OWNER: LockOwner = LockOwner(0xd934_6890_d70e_4e80);

fn nothing_set() -> SetAttr {
    SetAttr {
        inode: FILE,
        handle: None,
        mode: None,
        uid: None,
        gid: None,
        size: None,
        atime: None,
        mtime: None,
    }
}

fn raw(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap());
    digits.map(|two| u8::from_str_radix(two, 16).unwrap()).collect()
}

/// What was asked on a mount, without the head; the operation and the inode stand before it.
#[rustfmt::skip]
fn golden() -> Vec<(u32, INodeNo, &'static str, Request<'static>)> {
    vec![
        (opcode::LOOKUP, INodeNo(1), "6600",
         Request::Lookup(Named { parent: ROOT, name: b"f" })),
        (opcode::CREATE, INodeNo(1), "41820000a481000012000000000000006600",
         Request::Create(Create { parent: ROOT, name: b"f", mode: 0o100_644, umask: 0o22, flags: OpenFlags(0o101_101) })),
        (opcode::WRITE, INodeNo(2), "020000000000000000000000000000000500000002000000804e0ed7906834d9018000000000000068656c6c6f",
         Request::Write(Write { inode: FILE, handle: HANDLE, offset: 0, data: b"hello", write_flags: WriteFlags::FUSE_WRITE_LOCKOWNER, flags: OpenFlags(0o100_001), owner: Some(OWNER) })),
        (opcode::FLUSH, INodeNo(2), "02000000000000000000000000000000804e0ed7906834d9",
         Request::Flush(Flush { inode: FILE, handle: HANDLE, owner: OWNER })),
        (opcode::RELEASE, INodeNo(2), "020000000000000001800000000000000000000000000000",
         Request::Release(Release { inode: FILE, handle: HANDLE, flags: OpenFlags(0o100_001) })),
        (opcode::OPEN, INodeNo(2), "0284000000000000",
         Request::Open(Open { inode: FILE, flags: OpenFlags(0o102_002) })),
        (opcode::READ, INodeNo(2), "020000000000000000000000000000006400000002000000804e0ed7906834d90284000000000000",
         Request::Read(Read { inode: FILE, handle: HANDLE, offset: 0, size: 100, flags: OpenFlags(0o102_002), owner: Some(OWNER) })),
        (opcode::FSYNC, INodeNo(2), "02000000000000000100000000000000",
         Request::Fsync(Fsync { inode: FILE, handle: HANDLE, datasync: true })),
        (opcode::GETATTR, INodeNo(2), "01000000000000000200000000000000",
         Request::GetAttr(GetAttr { inode: FILE, handle: Some(HANDLE) })),
        (opcode::GETATTR, INodeNo(1), "00000000000000000000000000000000",
         Request::GetAttr(GetAttr { inode: ROOT, handle: None })),
        (opcode::SETATTR, INodeNo(2), "480200000000000002000000000000000300000000000000804e0ed7906834d90000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
         Request::SetAttr(SetAttr { handle: Some(HANDLE), size: Some(3), ..nothing_set() })),
        (opcode::SETATTR, INodeNo(2), "200000000000000000000000000000000000000000000000000000000000000000000000000000004d0000000000000000000000000000000000000063000000000000000000000000000000000000000000000000000000",
         Request::SetAttr(SetAttr { mtime: Some(TimeOrNow::SpecificTime(UNIX_EPOCH + Duration::new(77, 99))), ..nothing_set() })),
        (opcode::SETLKW, INodeNo(2), "0200000000000000f0af2f01b01ca9690000000000000000ffffffffffffff7f01000000f73900000100000000000000",
         Request::SetLock(Lock { inode: FILE, handle: HANDLE, owner: LockOwner(0x69a9_1cb0_012f_aff0), start: 0, end: i64::MAX as u64, kind: libc::F_WRLCK, pid: 14839, waits: true, flock: true })),
        (opcode::SETLKW, INodeNo(2), "0200000000000000804e0ed7906834d905000000000000000e0000000000000001000000f73900000000000000000000",
         Request::SetLock(Lock { inode: FILE, handle: HANDLE, owner: OWNER, start: 5, end: 14, kind: libc::F_WRLCK, pid: 14839, waits: true, flock: false })),
        (opcode::GETLK, INodeNo(2), "0200000000000000804e0ed7906834d905000000000000000e0000000000000001000000000000000000000000000000",
         Request::GetLock(Lock { inode: FILE, handle: HANDLE, owner: OWNER, start: 5, end: 14, kind: libc::F_WRLCK, pid: 0, waits: false, flock: false })),
        (opcode::FALLOCATE, INodeNo(2), "0200000000000000001000000000000000200000000000000100000000000000",
         Request::Fallocate(Fallocate { inode: FILE, handle: HANDLE, offset: 4096, length: 8192, mode: libc::FALLOC_FL_KEEP_SIZE })),
        (opcode::LSEEK, INodeNo(2), "020000000000000001000000000000000300000000000000",
         Request::Lseek(Lseek { inode: FILE, handle: HANDLE, offset: 1, whence: libc::SEEK_DATA })),
        (opcode::SETXATTR, INodeNo(2), "0500000001000000757365722e610076616c7565",
         Request::SetXattr(SetXattr { inode: FILE, name: b"user.a", value: b"value", flags: libc::XATTR_CREATE as u32 })),
        (opcode::GETXATTR, INodeNo(2), "000000000000000073656375726974792e6361706162696c69747900",
         Request::GetXattr(GetXattr { inode: FILE, name: b"security.capability", size: 0 })),
        (opcode::LISTXATTR, INodeNo(2), "0000000000000000",
         Request::ListXattr(ListXattr { inode: FILE, size: 0 })),
        (opcode::REMOVEXATTR, INodeNo(2), "757365722e6100",
         Request::RemoveXattr(RemoveXattr { inode: FILE, name: b"user.a" })),
        (opcode::MKDIR, INodeNo(1), "ed010000120000006400",
         Request::MkDir(MkDir { parent: ROOT, name: b"d", mode: 0o755, umask: 0o22 })),
        (opcode::SYMLINK, INodeNo(1), "730074617267657400",
         Request::SymLink(SymLink { parent: ROOT, name: b"s", target: b"target" })),
        (opcode::MKNOD, INodeNo(1), "a41100000000000012000000000000006e00",
         Request::MkNod(MkNod { parent: ROOT, name: b"n", mode: 0o010_644, umask: 0o22, rdev: 0 })),
        (opcode::LINK, INodeNo(1), "02000000000000006c00",
         Request::Link(Link { inode: FILE, new_parent: ROOT, new_name: b"l" })),
        (opcode::RENAME2, INodeNo(1), "0100000000000000010000000000000066006700",
         Request::Rename(Rename { parent: ROOT, name: b"f", new_parent: ROOT, new_name: b"g", flags: RenameFlags::RENAME_NOREPLACE })),
        (opcode::UNLINK, INodeNo(1), "6700",
         Request::Unlink(Named { parent: ROOT, name: b"g" })),
        (opcode::OPENDIR, INodeNo(1), "0088010000000000",
         Request::OpenDir(Open { inode: ROOT, flags: OpenFlags(0o304_000) })),
        (opcode::READDIR, INodeNo(1), "00000000000000000100000000000000008000000000000000000000000000000088010000000000",
         Request::ReadDir(ReadDir { inode: ROOT, handle: FileHandle(0), offset: 1, size: 32768 })),
        (opcode::RELEASEDIR, INodeNo(1), "000000000000000000880100000000000000000000000000",
         Request::ReleaseDir(Release { inode: ROOT, handle: FileHandle(0), flags: OpenFlags(0o304_000) })),
        (opcode::IOCTL, INodeNo(2), "0200000000000000000000000154000020c2fa83847f00000000000000000000",
         Request::Ioctl(Ioctl { inode: FILE, handle: HANDLE, command: libc::TCGETS as u32, data: b"", out_size: 0 })),
        (opcode::ACCESS, INodeNo(2), "0200000000000000",
         Request::Access(Access { inode: FILE, mask: libc::W_OK as u32 })),
        (opcode::STATFS, INodeNo(1), "",
         Request::StatFs(Inode { inode: ROOT })),
        (opcode::FORGET, INodeNo(2), "0a00000000000000",
         Request::Forget(Forgets::One(FILE, 10))),
        (opcode::RENAME, INodeNo(1), "010000000000000066006700",
         Request::Rename(Rename { parent: ROOT, name: b"f", new_parent: ROOT, new_name: b"g", flags: RenameFlags::empty() })),
        (opcode::INTERRUPT, INodeNo(0), "1200000000000000",
         Request::Interrupt(RequestId(0x12))),
        (opcode::INIT, INodeNo(0), "070000002d00000000000200fbffff73ff0700000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
         Request::Init(Init { major: 7, minor: 45, max_readahead: 128 << 10, flags: InitFlags::from_bits_retain(0x7ff_73ff_fffb) })),
        (opcode::INIT, INodeNo(0), "070000001f00000000000200fbffff03",
         Request::Init(Init { major: 7, minor: 31, max_readahead: 128 << 10, flags: InitFlags::from_bits_retain(0x03ff_fffb) })),
        (opcode::DESTROY, INodeNo(0), "",
         Request::Destroy),
    ]
}

/// One of them with its head.
fn whole(opcode: u32, inode: INodeNo, body: &[u8]) -> Vec<u8> {
    let len = (size_of::<abi::InHeader>() + body.len()) as u32;
    let head = abi::InHeader {
        len,
        opcode,
        unique: 4,
        nodeid: inode.0,
        uid: 1000,
        gid: 100,
        pid: 14840,
        ..Default::default()
    };
    [head.as_bytes(), body].concat()
}

fn first() -> (Head, Vec<u8>) {
    let (opcode, inode, body, _) = &golden()[0];
    let bytes = whole(*opcode, *inode, &raw(body));
    (Head::decode(&bytes).unwrap().0, bytes)
}

#[test]
fn requests_of_a_kernel_are_what_was_asked() {
    for (opcode, inode, body, expected) in golden() {
        let bytes = whole(opcode, inode, &raw(body));
        let (head, body) = Head::decode(&bytes).unwrap();
        assert_eq!(Request::decode(&head, body), Ok(expected), "{opcode}");
    }
}

#[test]
fn a_head_says_who_asks_what() {
    // The whole LOOKUP of `f` in the root by root's process 14840, as it came.
    let bytes = raw(concat!(
        "2a000000",
        "01000000",
        "0400000000000000",
        "0100000000000000",
        "00000000",
        "00000000",
        "f8390000",
        "0000",
        "0000",
        "6600",
    ));
    let (head, body) = Head::decode(&bytes).unwrap();
    let unique = RequestId(4);
    let expected = Head { unique, opcode: opcode::LOOKUP, inode: ROOT, uid: 0, gid: 0, pid: 14840 };
    assert_eq!((head, body), (expected, &b"f\0"[..]));
}

#[test]
fn several_inodes_are_forgotten_at_once() {
    let pairs = [2_u64, 10, 3, 1].map(u64::to_ne_bytes).concat();
    let body = [&2_u64.to_ne_bytes()[..], &pairs].concat();
    let head = Head { opcode: opcode::BATCH_FORGET, ..first().0 };
    let Ok(Request::Forget(forgets)) = Request::decode(&head, &body) else { panic!("no forgets") };
    assert_eq!(forgets.iter().collect::<Vec<_>>(), [(FILE, 10), (INodeNo(3), 1)]);
    assert!(!head.wants_answer());
    assert!(first().0.wants_answer());
}

proptest! {
    /// Whatever comes, the decoder refuses it or keeps within it.
    #[test]
    fn hostile_bytes_stay_bytes(
        opcode in 0_u32..60,
        body in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let len = (size_of::<abi::InHeader>() + body.len()) as u32;
        let head = abi::InHeader { len, opcode, unique: 3, nodeid: 1, ..Default::default() };
        let bytes = [head.as_bytes(), &body].concat();
        let (head, body) = Head::decode(&bytes).unwrap();
        if let Ok(request) = Request::decode(&head, body) {
            check(&request, body);
        }
    }

    /// A real request that was cut off, or has other lengths in it, does no harm either.
    #[test]
    fn damaged_requests_stay_requests(
        which in 0..golden().len(),
        cut in 0_usize..200,
        at in 40_usize..200,
        byte: u8,
    ) {
        let (opcode, inode, body, _) = &golden()[which];
        let mut bytes = whole(*opcode, *inode, &raw(body));
        bytes.truncate(cut.max(40));
        if let Some(there) = bytes.get_mut(at) {
            *there = byte;
        }
        let len = (bytes.len() as u32).to_ne_bytes();
        bytes[..4].copy_from_slice(&len);
        let (head, body) = Head::decode(&bytes).unwrap();
        if let Ok(request) = Request::decode(&head, body) {
            check(&request, body);
        }
    }

    #[test]
    fn no_head_is_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        if let Ok((head, body)) = Head::decode(&bytes) {
            let _ = Request::decode(&head, body);
        }
    }
}

/// What a request borrows is within its body.
fn check(request: &Request<'_>, body: &[u8]) {
    let borrowed = match request {
        Request::Lookup(n) | Request::Unlink(n) | Request::RmDir(n) => vec![n.name],
        Request::SymLink(s) => vec![s.name, s.target],
        Request::Rename(r) => vec![r.name, r.new_name],
        Request::Write(w) => vec![w.data],
        Request::SetXattr(x) => vec![x.name, x.value],
        Request::Ioctl(i) => vec![i.data],
        Request::Forget(f) => {
            assert!(f.iter().count() <= body.len() / 8);
            vec![]
        }
        _ => vec![],
    };
    let within = body.as_ptr_range();
    for part in borrowed {
        let part = part.as_ptr_range();
        assert!(within.start <= part.start && part.end <= within.end);
    }
}

#[test]
fn what_is_too_short_too_long_or_negative_is_refused() {
    let (_, bytes) = first();
    assert_eq!(Head::decode(&bytes[..39]), Err(Malformed::Short));
    assert_eq!(Head::decode(&bytes[..bytes.len() - 1]), Err(Malformed::Short));
    let (head, body) = Head::decode(&bytes).unwrap();
    let unended = Request::decode(&head, &body[..body.len() - 1]);
    assert_eq!(unended, Err(Malformed::Name));
    let read = Head { opcode: opcode::READ, ..head };
    assert_eq!(Request::decode(&read, &[0xff; 40]), Err(Malformed::Offset));
    assert_eq!(Malformed::Offset.errno(), fuser::Errno::EINVAL);
    let write = Head { opcode: opcode::WRITE, ..head };
    let claims = abi::WriteIn { size: 4, ..Default::default() };
    let short = [claims.as_bytes(), b"abc"].concat();
    assert_eq!(Request::decode(&write, &short), Err(Malformed::Short));
    let many = Head { opcode: opcode::BATCH_FORGET, ..head };
    assert_eq!(Request::decode(&many, &[0xff; 24]), Err(Malformed::Short));
}

#[test]
fn what_is_not_known_is_said_so() {
    let (_, bytes) = first();
    let (head, body) = Head::decode(&bytes).unwrap();
    for opcode in [0, 7, 19, 37, 40, 50, 51, 4096, u32::MAX] {
        let unknown = Head { opcode, ..head };
        assert_eq!(Request::decode(&unknown, body), Ok(Request::Unknown), "{opcode}");
    }
}
