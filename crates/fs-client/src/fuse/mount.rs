//! Mounts, runs the event loops, and takes the mount away again.

use super::Adapter;
use crate::node::Node;
use fuser::{Config, MountOption, Session, SessionACL};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Why a mount did not come up.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel or fusermount3 said no.
    #[error("cannot mount at {path}: {cause}{hint}")]
    Mount {
        /// Where.
        path: PathBuf,
        /// What was said.
        cause: io::Error,
        /// What to look at.
        hint: &'static str,
    },
}

/// A mount whose event loops run.
pub struct Mounted {
    loops: JoinHandle<io::Result<()>>,
}

/// Mounts `node` at `mountpoint`; returns when the kernel knows it.
pub fn mount(
    node: Arc<Node>,
    mountpoint: &Path,
    threads: usize,
    allow_other: bool,
) -> Result<Mounted, MountError> {
    let failed = |cause: io::Error| MountError::Mount {
        path: mountpoint.to_path_buf(),
        hint: hint(&cause),
        cause,
    };
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("ebb".into()),
        MountOption::Subtype("ebb".into()),
        MountOption::DefaultPermissions,
    ];
    config.acl = if allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(threads.max(1));
    config.clone_fd = true;
    let adapter = Adapter::new(node);
    let places = adapter.places();
    let session = Session::new(adapter, mountpoint, &config).map_err(failed)?;
    places.connect(session.notifier());
    let loops = std::thread::Builder::new()
        .name("fuse".into())
        .spawn(move || session.run())
        .map_err(failed)?;
    Ok(Mounted { loops })
}

fn hint(cause: &io::Error) -> &'static str {
    match cause.raw_os_error() {
        Some(libc::ENOENT) => " (is /dev/fuse there? install fuse3)",
        Some(libc::EPERM | libc::EACCES) => {
            " (as a normal user fusermount3 must be installed setuid: install fuse3; \
             --allow-other needs user_allow_other in /etc/fuse.conf)"
        }
        _ => "",
    }
}

impl Mounted {
    /// Waits until the mount is gone.
    pub fn wait(self) -> io::Result<()> {
        self.loops.join().unwrap_or_else(|_| Err(io::Error::other("an event loop panicked")))
    }
}

/// Takes the mount away; `lazy` also when somebody still uses it.
pub fn unmount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    use rustix::mount::UnmountFlags;
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(mountpoint, flags) {
        Err(rustix::io::Errno::PERM) => with_fusermount(mountpoint, lazy),
        // It is not mounted (any more): that is what was wanted.
        Err(rustix::io::Errno::INVAL) => Ok(()),
        other => other.map_err(io::Error::from),
    }
}

fn with_fusermount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let mut command = std::process::Command::new("fusermount3");
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(mountpoint);
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_string();
    let busy = text.contains("busy");
    Err(if busy { io::Error::from_raw_os_error(libc::EBUSY) } else { io::Error::other(text) })
}
