//! The end of a mount that nobody can serve any more: what waits is answered with EIO, and what
//! comes later finds a dead mount, as without a supervisor.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// The largest request.
const REQUEST_BYTES_MAX: usize = (1 << 20) + 8192;
/// So long those who come late are still answered, at most.
const ANSWERS_FOR: Duration = Duration::from_secs(2);
/// Nobody has come for so long: that was all.
const QUIET: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

const NOTIFY_RESEND: i32 = 7;
/// FORGET, INTERRUPT and BATCH_FORGET are not answered.
const UNANSWERED: [u32; 3] = [2, 36, 42];

/// Answers everything with EIO and ends the connection.
pub fn fail_all(devices: &[OwnedFd], mountpoint: &Path) {
    let connection = connection_of(mountpoint);
    if let Some(first) = devices.first() {
        // Also what dead daemons have read.
        let _ = rustix::io::write(first, &header(0, NOTIFY_RESEND));
        answer(first);
    }
    // Closing the devices would do the same, if a daemon that cannot be killed did not hold them.
    if let Some(connection) = connection {
        let path = format!("/sys/fs/fuse/connections/{connection}/abort");
        let _ = std::fs::write(path, "1");
    }
}

fn answer(device: &OwnedFd) {
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    let end = Instant::now() + ANSWERS_FOR;
    while Instant::now() < end {
        let mut fds = [PollFd::new(device, PollFlags::IN)];
        if !matches!(poll(&mut fds, Some(&QUIET)), Ok(n) if n > 0) {
            return;
        }
        let Ok(got) = rustix::io::read(device, &mut buffer[..]) else { return };
        if let Some(unique) = to_answer(&buffer[..got]) {
            let _ = rustix::io::write(device, &header(unique, -libc::EIO));
        }
    }
}

/// The number of a request that wants an answer.
fn to_answer(request: &[u8]) -> Option<u64> {
    let opcode = u32::from_ne_bytes(request.get(4..8)?.try_into().ok()?);
    let unique = u64::from_ne_bytes(request.get(8..16)?.try_into().ok()?);
    (!UNANSWERED.contains(&opcode)).then_some(unique)
}

/// An answer without a body.
fn header(unique: u64, error: i32) -> [u8; 16] {
    let mut out = [0; 16];
    out[..4].copy_from_slice(&16_u32.to_ne_bytes());
    out[4..8].copy_from_slice(&error.to_ne_bytes());
    out[8..].copy_from_slice(&unique.to_ne_bytes());
    out
}

/// The kernel's number of the mount's connection, without touching the mount.
fn connection_of(mountpoint: &Path) -> Option<u32> {
    Some(crate::mounts::at(mountpoint).ok()??.minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_waits_is_answered() {
        let request = |opcode: u32| {
            [header(77, 0).as_slice(), &[0; 24]]
                .concat()
                .iter()
                .copied()
                .enumerate()
                .map(|(i, b)| if (4..8).contains(&i) { opcode.to_ne_bytes()[i - 4] } else { b })
                .collect::<Vec<u8>>()
        };
        assert_eq!(to_answer(&request(15)), Some(77));
        assert_eq!(to_answer(&request(42)), None);
        assert_eq!(to_answer(&[1, 2, 3]), None);
        assert_eq!(header(1, -5)[4..8], (-5_i32).to_ne_bytes());
    }
}
