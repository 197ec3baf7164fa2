//! The protocol as bytes: structures, operation codes and flags of `linux/fuse.h`, in the machine's
//! byte order. Names are the kernel's, without the prefix. That a structure has no gaps is checked
//! when this is compiled (`IntoBytes`), its size by the tests below.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The version spoken here: backing files, and requests that are sent again.
pub const VERSION: u32 = 7;
/// Its minor number.
pub const MINOR_VERSION: u32 = 40;
/// Before this minor version (Linux 3.15) the answer to INIT had another size.
pub const MINOR_VERSION_MIN: u32 = 23;

/// What the kernel asks.
#[allow(missing_docs)]
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
}

/// What the kernel is told without having asked; stands where an error would.
#[allow(missing_docs)]
pub mod notification {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const STORE: i32 = 4;
    pub const DELETE: i32 = 6;
    pub const RESEND: i32 = 7;
}

/// Which fields of a SETATTR are to be set.
#[allow(missing_docs)]
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// GETATTR has a handle.
pub const GETATTR_FH: u32 = 1 << 0;
/// READ has a lock owner.
pub const READ_LOCKOWNER: u32 = 1 << 1;
/// A lock of flock(2), not of fcntl(2).
pub const LK_FLOCK: u32 = 1 << 0;
/// FSYNC of the data alone.
pub const FSYNC_FDATASYNC: u32 = 1 << 0;

/// `_IOR(229, 0, uint32_t)`: this descriptor becomes another one of a mount.
pub const DEV_IOC_CLONE: u32 = 0x8004_e500;
/// `_IOW(229, 1, struct fuse_backing_map)`: registers a file that the kernel reads and writes itself.
pub const DEV_IOC_BACKING_OPEN: u32 = 0x4010_e501;
/// `_IOW(229, 2, uint32_t)`: gives its number back.
pub const DEV_IOC_BACKING_CLOSE: u32 = 0x4004_e502;

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $name {
            $(pub $field: $type,)*
        }
    )*};
}

structures! {
    /// Before every request.
    InHeader {
        len: u32, opcode: u32, unique: u64, nodeid: u64,
        uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16,
    }

    /// Before every answer and every notification.
    OutHeader { len: u32, error: i32, unique: u64, }

    Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }

    EntryOut {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64,
        entry_valid_nsec: u32, attr_valid_nsec: u32, attr: Attr,
    }

    AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr, }

    /// What INIT had before Linux 5.17, and the beginning of what it has.
    InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32, }

    InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32,
        max_background: u16, congestion_threshold: u16, max_write: u32, time_gran: u32,
        max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        request_timeout: u16, unused: [u16; 11],
    }

    ForgetIn { nlookup: u64, }
    ForgetOne { nodeid: u64, nlookup: u64, }
    BatchForgetIn { count: u32, dummy: u32, }
    InterruptIn { unique: u64, }
    GetattrIn { getattr_flags: u32, dummy: u32, fh: u64, }
    SetattrIn {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64,
        atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32, }
    MkdirIn { mode: u32, umask: u32, }
    RenameIn { newdir: u64, }
    Rename2In { newdir: u64, flags: u32, padding: u32, }
    LinkIn { oldnodeid: u64, }
    OpenIn { flags: u32, open_flags: u32, }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32, }
    /// `backing_id` counts with FOPEN_PASSTHROUGH alone.
    OpenOut { fh: u64, open_flags: u32, backing_id: u32, }
    ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64, }
    FlushIn { fh: u64, unused: u32, padding: u32, lock_owner: u64, }
    ReadIn {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    WriteIn {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    WriteOut { size: u32, padding: u32, }
    FsyncIn { fh: u64, fsync_flags: u32, padding: u32, }
    /// As long as FUSE_SETXATTR_EXT is not asked for.
    SetxattrIn { size: u32, flags: u32, }
    GetxattrIn { size: u32, padding: u32, }
    GetxattrOut { size: u32, padding: u32, }
    FileLock { start: u64, end: u64, kind: u32, pid: u32, }
    LkIn { fh: u64, owner: u64, lk: FileLock, lk_flags: u32, padding: u32, }
    AccessIn { mask: u32, padding: u32, }
    IoctlIn { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32, }
    IoctlOut { result: i32, flags: u32, in_iovs: u32, out_iovs: u32, }
    FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, padding: u32, }
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32, }
    LseekOut { offset: u64, }
    CopyFileRangeIn {
        fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64,
    }
    StatfsOut {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64,
        bsize: u32, namelen: u32, frsize: u32, padding: u32, spare: [u32; 6],
    }

    /// A name of a listing; the name follows, padded to eight bytes.
    Dirent { ino: u64, off: u64, namelen: u32, kind: u32, }

    BackingMap { fd: i32, flags: u32, padding: u64, }

    NotifyInvalInode { ino: u64, off: i64, len: i64, }
    NotifyInvalEntry { parent: u64, namelen: u32, flags: u32, }
    NotifyDelete { parent: u64, child: u64, namelen: u32, padding: u32, }
    NotifyStore { nodeid: u64, offset: u64, size: u32, padding: u32, }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_as_long_as_the_kernels() {
        let sizes = [
            (size_of::<InHeader>(), 40),
            (size_of::<OutHeader>(), 16),
            (size_of::<Attr>(), 88),
            (size_of::<EntryOut>(), 128),
            (size_of::<AttrOut>(), 104),
            (size_of::<InitIn>(), 16),
            (size_of::<InitOut>(), 64),
            (size_of::<SetattrIn>(), 88),
            (size_of::<MknodIn>(), 16),
            (size_of::<CreateIn>(), 16),
            (size_of::<OpenOut>(), 16),
            (size_of::<ReleaseIn>(), 24),
            (size_of::<FlushIn>(), 24),
            (size_of::<ReadIn>(), 40),
            (size_of::<WriteIn>(), 40),
            (size_of::<SetxattrIn>(), 8),
            (size_of::<LkIn>(), 48),
            (size_of::<IoctlIn>(), 32),
            (size_of::<IoctlOut>(), 16),
            (size_of::<FallocateIn>(), 32),
            (size_of::<CopyFileRangeIn>(), 56),
            (size_of::<StatfsOut>(), 80),
            (size_of::<Dirent>(), 24),
            (size_of::<BackingMap>(), 16),
            (size_of::<NotifyStore>(), 24),
        ];
        for (i, (ours, kernels)) in sizes.into_iter().enumerate() {
            assert_eq!(ours, kernels, "number {i} of this list");
        }
    }
}
