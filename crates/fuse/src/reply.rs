//! Answers: one type for each kind that there is. An answer is sent once, by whoever has it, on any
//! thread; one that is dropped says EIO, so that nobody waits for ever.

use crate::{BackingId, Device, Listing, ListingPlus, abi, attributes};
use fuser::{Errno, FileAttr, FileHandle, FopenFlags, Generation, RequestId};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The duty to answer a request.
#[derive(Debug)]
pub struct Answer {
    unique: RequestId,
    /// None when it was answered.
    to: Option<Arc<Device>>,
}

impl Answer {
    /// To be sent on the device on which the request came.
    #[must_use]
    pub fn new(unique: RequestId, device: &Arc<Device>) -> Answer {
        Answer { unique, to: Some(Arc::clone(device)) }
    }

    fn body(self, bytes: &[u8]) {
        self.bodies(bytes, &[]);
    }

    /// A body in two pieces.
    fn bodies(mut self, first: &[u8], second: &[u8]) {
        if let Some(device) = self.to.take() {
            device.answer(self.unique, Ok([first, second]));
        }
    }

    fn fail(mut self, error: Errno) {
        if let Some(device) = self.to.take() {
            device.answer(self.unique, Err(error));
        }
    }

    fn open_backing(&self, file: impl AsFd) -> io::Result<BackingId> {
        self.to.as_ref().ok_or(io::ErrorKind::NotConnected)?.open_backing(file)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(device) = self.to.take() {
            tracing::warn!(unique = self.unique.0, "an answer was dropped");
            device.answer(self.unique, Err(Errno::EIO));
        }
    }
}

/// What all answers have in common.
pub trait Reply: From<Answer> {
    /// The operation failed.
    fn error(self, error: Errno);
}

macro_rules! replies {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(Answer);

        impl From<Answer> for $name {
            fn from(answer: Answer) -> $name {
                $name(answer)
            }
        }

        impl Reply for $name {
            fn error(self, error: Errno) {
                self.0.fail(error);
            }
        }

        impl $name {
            /// The operation failed.
            pub fn error(self, error: Errno) {
                self.0.fail(error);
            }
        }
    )*};
}

replies! {
    /// That it was done.
    ReplyEmpty,
    /// Bytes of a file, or a link's target.
    ReplyData,
    /// An inode by name.
    ReplyEntry,
    /// Attributes.
    ReplyAttr,
    /// A handle.
    ReplyOpen,
    /// A new inode and a handle of it.
    ReplyCreate,
    /// How much was written.
    ReplyWrite,
    /// How large and how full the file system is.
    ReplyStatfs,
    /// Extended attributes, or how long they are.
    ReplyXattr,
    /// A lock that is in the way.
    ReplyLock,
    /// Bytes for the caller's buffer.
    ReplyIoctl,
    /// An offset.
    ReplyLseek,
    /// Names.
    ReplyDirectory,
    /// Names with attributes.
    ReplyDirectoryPlus,
}

impl ReplyEmpty {
    /// It was done.
    pub fn ok(self) {
        self.0.body(&[]);
    }
}

impl ReplyData {
    /// These bytes; fewer than asked for is the end of the file.
    pub fn data(self, bytes: &[u8]) {
        self.0.body(bytes);
    }
}

impl ReplyIoctl {
    /// These bytes are copied to the caller; their number is what the call returns. No more than the request
    /// has room for.
    pub fn bytes(self, bytes: &[u8]) {
        let out = abi::IoctlOut { result: bytes.len() as i32, flags: 0, in_iovs: 0, out_iovs: 0 };
        self.0.bodies(out.as_bytes(), bytes);
    }
}

impl ReplyEntry {
    /// This inode, which the kernel has looked up once more now; for so long it may believe that.
    pub fn entry(self, ttl: Duration, attr: &FileAttr) {
        self.0.body(attributes::entry(ttl, attr, Generation(0)).as_bytes());
    }
}

impl ReplyAttr {
    /// These attributes; for so long the kernel may believe them.
    pub fn attr(self, ttl: Duration, attr: &FileAttr) {
        let out = abi::AttrOut {
            attr_valid: ttl.as_secs(),
            attr_valid_nsec: ttl.subsec_nanos(),
            dummy: 0,
            attr: attributes::attr(attr),
        };
        self.0.body(out.as_bytes());
    }
}

/// A handle as the kernel is told of it, with the file that it reads and writes itself, if any.
fn opened(handle: FileHandle, flags: FopenFlags, backing: Option<&BackingId>) -> abi::OpenOut {
    let flags = match backing {
        Some(_) => flags | FopenFlags::FOPEN_PASSTHROUGH,
        None => flags,
    };
    abi::OpenOut {
        fh: handle.0,
        open_flags: flags.bits(),
        backing_id: backing.map_or(0, BackingId::number),
    }
}

impl ReplyOpen {
    /// This handle. With a backing file the kernel reads and writes that one itself.
    pub fn opened(self, handle: FileHandle, flags: FopenFlags, backing: Option<&BackingId>) {
        self.0.body(opened(handle, flags, backing).as_bytes());
    }

    /// Registers a file with the kernel, to answer with it.
    ///
    /// # Errors
    /// See [`Device::open_backing`].
    pub fn open_backing(&self, file: impl AsFd) -> io::Result<BackingId> {
        self.0.open_backing(file)
    }
}

impl ReplyCreate {
    /// This inode and this handle of it.
    pub fn created(
        self,
        ttl: Duration,
        attr: &FileAttr,
        handle: FileHandle,
        flags: FopenFlags,
        backing: Option<&BackingId>,
    ) {
        let entry = attributes::entry(ttl, attr, Generation(0));
        self.0.bodies(entry.as_bytes(), opened(handle, flags, backing).as_bytes());
    }

    /// Registers a file with the kernel, to answer with it.
    ///
    /// # Errors
    /// See [`Device::open_backing`].
    pub fn open_backing(&self, file: impl AsFd) -> io::Result<BackingId> {
        self.0.open_backing(file)
    }
}

impl ReplyWrite {
    /// So many bytes.
    pub fn written(self, size: u32) {
        self.0.body(abi::WriteOut { size, padding: 0 }.as_bytes());
    }
}

/// How large and how full a file system is, as statvfs(3) has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Statistics {
    pub blocks: u64,
    pub bfree: u64,
    pub bavail: u64,
    pub files: u64,
    pub ffree: u64,
    pub bsize: u32,
    pub namelen: u32,
    pub frsize: u32,
}

impl Statistics {
    /// Those of a file system that does not count.
    pub const UNKNOWN: Statistics = Statistics {
        blocks: 0,
        bfree: 0,
        bavail: 0,
        files: 0,
        ffree: 0,
        bsize: 512,
        namelen: 255,
        frsize: 0,
    };
}

impl ReplyStatfs {
    /// This is how.
    pub fn statfs(self, s: &Statistics) {
        let out = abi::StatfsOut {
            blocks: s.blocks,
            bfree: s.bfree,
            bavail: s.bavail,
            files: s.files,
            ffree: s.ffree,
            bsize: s.bsize,
            namelen: s.namelen,
            frsize: s.frsize,
            ..abi::StatfsOut::default()
        };
        self.0.body(out.as_bytes());
    }
}

impl ReplyXattr {
    /// The length alone, which was asked for.
    pub fn size(self, size: u32) {
        self.0.body(abi::GetxattrOut { size, padding: 0 }.as_bytes());
    }

    /// These bytes, no more than asked for.
    pub fn data(self, bytes: &[u8]) {
        self.0.body(bytes);
    }
}

impl ReplyLock {
    /// This lock, or F_UNLCK when none is in the way.
    pub fn locked(self, start: u64, end: u64, kind: i32, pid: u32) {
        self.0.body(abi::FileLock { start, end, kind: kind as u32, pid }.as_bytes());
    }
}

impl ReplyLseek {
    /// This offset.
    pub fn offset(self, offset: i64) {
        self.0.body(abi::LseekOut { offset: offset as u64 }.as_bytes());
    }
}

impl ReplyDirectory {
    /// These names; none at the end.
    pub fn listed(self, listing: &Listing) {
        self.0.body(listing.bytes());
    }
}

impl ReplyDirectoryPlus {
    /// These names; none at the end.
    pub fn listed(self, listing: &ListingPlus) {
        self.0.body(listing.bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, recv, socketpair};
    use std::os::fd::OwnedFd;

    /// What `send` makes the kernel hear.
    fn heard<R: Reply>(send: impl FnOnce(R)) -> Vec<u8> {
        let (ours, kernels): (OwnedFd, OwnedFd) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let device = Arc::new(Device::from(ours));
        send(Answer::new(RequestId(0x1122_3344_5566_7788), &device).into());
        drop(device);
        let mut bytes = [0; 4096];
        let flags = rustix::net::RecvFlags::empty();
        let (len, _) = recv(&kernels, &mut bytes, flags).unwrap();
        let (more, _) = recv(&kernels, &mut [0; 64][..], flags).unwrap();
        assert_eq!(more, 0, "one answer is one message");
        bytes[..len].to_vec()
    }

    fn header(len: u32, error: i32) -> Vec<u8> {
        [
            len.to_ne_bytes().as_slice(),
            &error.to_ne_bytes(),
            &0x1122_3344_5566_7788_u64.to_ne_bytes(),
        ]
        .concat()
    }

    #[test]
    fn answers_are_the_bytes_that_the_kernel_expects() {
        assert_eq!(heard(ReplyEmpty::ok), header(16, 0));
        assert_eq!(heard(|r: ReplyEmpty| r.error(Errno::ENOENT)), header(16, -2));
        let read = heard(|r: ReplyData| r.data(b"bytes"));
        assert_eq!(read, [header(21, 0), b"bytes".to_vec()].concat());
        let written = heard(|r: ReplyWrite| r.written(0x01_0000));
        assert_eq!(written[16..], [0x01_0000_u32.to_ne_bytes(), [0; 4]].concat());
        let opened = heard(|r: ReplyOpen| r.opened(FileHandle(9), FopenFlags::empty(), None));
        assert_eq!(opened[16..], [9_u64.to_ne_bytes(), [0; 8]].concat());
        let id = BackingId::unregistered(7);
        let passed = heard(|r: ReplyOpen| r.opened(FileHandle(9), FopenFlags::empty(), Some(&id)));
        let expected =
            [9_u64.to_ne_bytes().as_slice(), &0x80_u32.to_ne_bytes(), &7_u32.to_ne_bytes()]
                .concat();
        assert_eq!(passed[16..], expected);
        let locked = heard(|r: ReplyLock| r.locked(1, 2, libc::F_WRLCK, 3));
        let expected = [
            1_u64.to_ne_bytes().as_slice(),
            &2_u64.to_ne_bytes(),
            &1_u32.to_ne_bytes(),
            &3_u32.to_ne_bytes(),
        ]
        .concat();
        assert_eq!(locked[16..], expected);
    }

    #[test]
    fn whoever_asked_hears_of_an_answer_that_was_dropped() {
        assert_eq!(heard(drop::<ReplyOpen>), header(16, -libc::EIO));
    }

    #[test]
    fn an_error_that_the_kernel_would_not_take_is_another() {
        for code in [512, -3, i32::MAX, i32::MIN] {
            let error = heard(|r: ReplyEmpty| r.error(Errno::from_i32(code)));
            assert_eq!(error, header(16, -libc::EIO), "{code}");
        }
    }
}
