//! `/dev/fuse`: one descriptor of a mount. Requests are read from it, answers and notifications are
//! written to it, and files are registered with the kernel on it. A mount has as many as it has event
//! loops, each with a queue of its own.

use crate::abi;
use fuser::{Errno, RequestId};
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Weak};
use zerocopy::IntoBytes;

/// Where it is.
const PATH: &str = "/dev/fuse";

/// The kernel takes no errors beyond this.
const ERRNO_MAX: i32 = 511;

/// One descriptor of a mount.
#[derive(Debug)]
pub struct Device(OwnedFd);

impl From<OwnedFd> for Device {
    fn from(fd: OwnedFd) -> Device {
        Device(fd)
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Device {
    /// One that is of no mount yet.
    pub(crate) fn open() -> io::Result<Device> {
        let file = File::options().read(true).write(true).open(Path::new(PATH))?;
        Ok(Device(file.into()))
    }

    /// Another one of the same mount.
    pub(crate) fn sibling(&self) -> io::Result<Device> {
        let device = Device::open()?;
        let mut of = self.0.as_raw_fd() as u32;
        device.ioctl(abi::DEV_IOC_CLONE, &mut of)?;
        Ok(device)
    }

    /// The next request; none when the mount has ended. Blocks.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        use rustix::io::Errno;
        loop {
            return match rustix::io::read(&self.0, &mut *buffer) {
                Ok(len) => Ok(Some(len)),
                // ENOENT: whoever asked has given up while the request was being copied.
                Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => continue,
                Err(Errno::NODEV) => Ok(None),
                Err(e) => Err(e.into()),
            };
        }
    }

    /// Fails a request.
    pub fn refuse(&self, unique: RequestId, error: Errno) {
        self.answer(unique, Err(error));
    }

    /// Answers a request with the parts of a body, which are not copied before the kernel does.
    pub(crate) fn answer(&self, unique: RequestId, body: Result<[&[u8]; 2], Errno>) {
        let (error, parts) = match body {
            Ok(parts) => (0, parts),
            Err(e) if (1..=ERRNO_MAX).contains(&e.code()) => (-e.code(), [&[][..]; 2]),
            // The kernel would not take it, and whoever asked would wait for ever.
            Err(_) => (-libc::EIO, [&[][..]; 2]),
        };
        match self.send(error, unique, parts) {
            Ok(()) => {}
            // Whoever asked was killed, or the mount has ended: nobody waits.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {
                tracing::debug!(unique = unique.0, "nobody waits for an answer any more");
            }
            Err(e) => tracing::error!(unique = unique.0, error = %e, "an answer was not taken"),
        }
    }

    /// Tells the kernel something.
    pub(crate) fn notify(&self, code: i32, parts: [&[u8]; 2]) -> io::Result<()> {
        // Zero is what tells a notification from an answer.
        self.send(code, RequestId(0), parts)
    }

    fn send(&self, error: i32, unique: RequestId, parts: [&[u8]; 2]) -> io::Result<()> {
        let len = size_of::<abi::OutHeader>() + parts[0].len() + parts[1].len();
        let len = u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let header = abi::OutHeader { len, error, unique: unique.0 };
        let slices = [header.as_bytes(), parts[0], parts[1]].map(IoSlice::new);
        // The kernel takes all of it or nothing.
        rustix::io::writev(&self.0, &slices)?;
        Ok(())
    }

    /// True until the mount is gone everywhere; one that was only detached counts as there.
    pub(crate) fn is_mounted(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.0, PollFlags::empty())];
        // An error of the device, not of the call, is what a mount that is gone shows.
        let _ = poll(&mut fds, Some(&Timespec::default()));
        !fds[0].revents().contains(PollFlags::ERR)
    }

    /// Registers a file, which the kernel reads and writes itself where an open is answered with the
    /// number.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; ELOOP and EOPNOTSUPP for files that cannot be used so; ENOTTY where
    /// the kernel has no such thing.
    pub fn open_backing(self: &Arc<Device>, file: impl AsFd) -> io::Result<BackingId> {
        let mut map =
            abi::BackingMap { fd: file.as_fd().as_raw_fd(), ..abi::BackingMap::default() };
        let number = self.ioctl(abi::DEV_IOC_BACKING_OPEN, &mut map)? as u32;
        Ok(BackingId { device: Arc::downgrade(self), number })
    }

    fn ioctl<T: IntoBytes>(&self, request: u32, argument: &mut T) -> io::Result<i32> {
        // SAFETY: all requests here are of this device, and the kernel looks at no more of the
        // argument than the structure of the request, which is what callers pass.
        let done =
            unsafe { libc::ioctl(self.0.as_raw_fd(), request as libc::Ioctl, argument as *mut T) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
    }
}

/// The kernel's number of a file that it reads and writes itself, given back when this is dropped.
/// Files that were opened with it go on.
#[derive(Debug)]
pub struct BackingId {
    /// It does not keep the connection: with the last device all numbers end.
    device: Weak<Device>,
    number: u32,
}

impl BackingId {
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// A number that no kernel has given.
    #[cfg(test)]
    pub(crate) fn unregistered(number: u32) -> BackingId {
        BackingId { device: Weak::new(), number }
    }
}

impl Drop for BackingId {
    fn drop(&mut self) {
        let Some(device) = self.device.upgrade() else { return };
        let mut number = self.number;
        if let Err(e) = device.ioctl(abi::DEV_IOC_BACKING_CLOSE, &mut number) {
            tracing::error!(error = %e, number, "the number of a file was not taken back");
        }
    }
}
