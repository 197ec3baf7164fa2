//! The end of a mount that nobody can serve any more: what waits is answered with EIO, and what
//! comes later finds a dead mount, as without a supervisor.

use ebb_fuse::{Device, Errno, Head, Notifier, REQUEST_BYTES_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So long those who come late are still answered, at most.
const ANSWERS_FOR: Duration = Duration::from_secs(2);
/// Nobody has come for so long: that was all.
const QUIET: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Answers everything with EIO and ends the connection.
pub fn fail_all(devices: &[OwnedFd], mountpoint: &Path) {
    let connection = connection_of(mountpoint);
    if let Some(Ok(first)) = devices.first().map(OwnedFd::try_clone) {
        let device = Arc::new(Device::from(first));
        // Also what dead daemons have read.
        let _ = Notifier::new(Arc::clone(&device)).resend();
        answer(&device);
    }
    // Closing the devices would do the same, if a daemon that cannot be killed did not hold them.
    if let Some(connection) = connection {
        let path = format!("/sys/fs/fuse/connections/{connection}/abort");
        let _ = std::fs::write(path, "1");
    }
}

fn answer(device: &Device) {
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    let end = Instant::now() + ANSWERS_FOR;
    while Instant::now() < end {
        let mut fds = [PollFd::new(device, PollFlags::IN)];
        if !matches!(poll(&mut fds, Some(&QUIET)), Ok(n) if n > 0) {
            return;
        }
        // Not with `Device::receive`, which waits for the next request when one was withdrawn.
        let got = match rustix::io::read(device, &mut buffer[..]) {
            Ok(got) => got,
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        };
        match Head::decode(&buffer[..got]) {
            Ok((head, _)) if head.wants_answer() => device.refuse(head.unique, Errno::EIO),
            _ => {}
        }
    }
}

/// The kernel's number of the mount's connection, without touching the mount.
fn connection_of(mountpoint: &Path) -> Option<u32> {
    Some(crate::mounts::at(mountpoint).ok()??.minor)
}
