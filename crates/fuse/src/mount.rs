//! Mounts and unmounts: directly with the privilege to do so, else by `fusermount3`, the setuid helper
//! of fuse3, which sends the device over a socket.

use crate::{Device, Options};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::ffi::CString;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

const HELPER: &str = "fusermount3";

/// Names the helper's end of the socket.
const HELPER_SOCKET: &str = "_FUSE_COMMFD";

/// A mount of this process; dropping it takes it away.
#[derive(Debug)]
pub(crate) struct Mount {
    at: PathBuf,
    device: Arc<Device>,
}

impl Mount {
    pub fn new(at: &Path, options: &Options) -> io::Result<Mount> {
        let at = at.canonicalize()?;
        let device = match directly(&at, options) {
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => by_helper(&at, options)?,
            other => other?,
        };
        Ok(Mount { at, device: Arc::new(device) })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // What is gone is not unmounted again: another mount can have come to the place meanwhile.
        if !self.device.is_mounted() {
            return;
        }
        let done = match rustix::mount::unmount(&self.at, UnmountFlags::empty()) {
            Err(rustix::io::Errno::PERM) => unmount_by_helper(&self.at, true),
            other => other.map_err(io::Error::from),
        };
        if let Err(e) = done {
            tracing::warn!(at = %self.at.display(), error = %e, "not unmounted");
        }
    }
}

fn directly(at: &Path, options: &Options) -> io::Result<Device> {
    let mode = std::fs::metadata(at)?.mode();
    let device = Device::open()?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let fd = device.as_fd().as_raw_fd();
    let mut data = format!("fd={fd},rootmode={mode:o},user_id={uid},group_id={gid}");
    for word in options.words() {
        data.push(',');
        data.push_str(word);
    }
    let data = CString::new(data).map_err(|_| io::ErrorKind::InvalidInput)?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID;
    rustix::mount::mount(options.name.as_str(), at, "fuse", flags, data.as_c_str())?;
    Ok(device)
}

fn by_helper(at: &Path, options: &Options) -> io::Result<Device> {
    let (ours, helpers) = UnixStream::pair()?;
    let mut words = vec![format!("fsname={}", options.name)];
    if !options.subtype.is_empty() {
        words.push(format!("subtype={}", options.subtype));
    }
    words.extend(options.words().map(str::to_owned));
    // The socket is the helper's standard input: nothing else need be inherited.
    let helper = Command::new(HELPER)
        .arg("-o")
        .arg(words.join(","))
        .arg("--")
        .arg(at)
        .env(HELPER_SOCKET, "0")
        .stdin(Stdio::from(OwnedFd::from(helpers)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let received = receive_device(&ours);
    drop(ours);
    let output = helper.wait_with_output()?;
    received.map_err(|e| said(&output).unwrap_or(e))
}

/// The descriptor that the helper sends.
fn receive_device(socket: &UnixStream) -> io::Result<Device> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    loop {
        let into = &mut [IoSliceMut::new(&mut byte)];
        match recvmsg(socket, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => {
                other?;
                break;
            }
        };
    }
    let mut fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fd = fds.next().and_then(|mut fds| fds.next());
    fd.map(Device::from).ok_or_else(|| io::Error::other(format!("{HELPER} sent no device")))
}

/// What the helper said, as an error.
fn said(output: &Output) -> Option<io::Error> {
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match text {
        text if text.is_empty() => None,
        text if text.contains("busy") => Some(io::Error::from_raw_os_error(libc::EBUSY)),
        text => Some(io::Error::other(text)),
    }
}

/// Takes a mount away; `lazy` also when somebody still uses it. That nothing is mounted there (any
/// more) is what was wanted.
///
/// # Errors
/// EBUSY when somebody uses it; and when it cannot be taken away.
pub fn unmount(at: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(at, flags) {
        Err(rustix::io::Errno::PERM) => unmount_by_helper(at, lazy),
        Err(rustix::io::Errno::INVAL) => Ok(()),
        other => other.map_err(io::Error::from),
    }
}

fn unmount_by_helper(at: &Path, lazy: bool) -> io::Result<()> {
    let mut command = Command::new(HELPER);
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(at);
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(said(&output).unwrap_or_else(|| io::Error::other(format!("{HELPER}: {}", output.status))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn type_of(at: &Path) -> Option<String> {
        let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = text.lines().find(|l| l.split(' ').nth(4) == at.to_str())?;
        let kind = line.split(" - ").nth(1)?.split(' ').take(2);
        Some(kind.collect::<Vec<_>>().join(" "))
    }

    /// Who has the privilege does not need the helper; it is asked all the same.
    #[test]
    fn the_helper_mounts_sends_the_device_and_unmounts() {
        if Command::new(HELPER).arg("--version").output().is_err() {
            return println!("SKIPPED: {HELPER} is not there");
        }
        if ebb_testkit::skip_reason().is_some() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().canonicalize().unwrap();
        let options = Options { subtype: "sub".into(), ..Options::new("a name") };
        let device = Arc::new(by_helper(&at, &options).unwrap());
        assert_eq!(type_of(&at).as_deref(), Some("fuse.sub a\\040name"));
        let mount = Mount { at: at.clone(), device: Arc::clone(&device) };
        assert!(mount.device.is_mounted());
        unmount_by_helper(&at, true).unwrap();
        assert_eq!(type_of(&at), None);
        drop(mount);

        let nowhere = at.join("nowhere");
        let error = by_helper(&nowhere, &options).unwrap_err().to_string();
        assert!(error.contains("nowhere"), "what the helper says: {error}");
        let error = unmount_by_helper(&at, false).unwrap_err().to_string();
        assert!(error.contains(HELPER), "the same: {error}");
    }

    #[test]
    fn a_mount_is_taken_away_when_it_is_dropped_and_not_when_it_is_gone() {
        if ebb_testkit::skip_reason().is_some() || !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().canonicalize().unwrap();
        let mount = || {
            let device = directly(&at, &Options::new("tiny")).unwrap();
            Mount { at: at.clone(), device: Arc::new(device) }
        };
        let first = mount();
        assert_eq!(type_of(&at).as_deref(), Some("fuse tiny"));
        unmount(&at, false).unwrap();
        assert!(!first.device.is_mounted());
        let second = mount();
        drop(first);
        assert!(type_of(&at).is_some(), "it is another one's");
        drop(second);
        assert_eq!(type_of(&at), None);
    }
}
