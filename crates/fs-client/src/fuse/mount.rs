//! Mounts, or goes on with the mount of a dead daemon, and runs the event loops.

use super::Adapter;
use crate::node::Node;
use ebb_fuse::{Device, Options, Session};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

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

/// What other mount namespaces (containers) may take to let go of a mount that was taken away here. The
/// kernel ends the event loops at once where there are none.
const OTHERS_LET_GO_WITHIN: Duration = Duration::from_millis(300);

/// A mount whose event loops run.
pub struct Mounted {
    loops: JoinHandle<io::Result<()>>,
    device: Arc<Device>,
    moments: mpsc::Receiver<Moment>,
}

/// What happens to a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// It was taken away in the mount namespace of this daemon.
    TakenAway,
    /// The kernel has ended it.
    Ended,
}

/// Mounts `node` where its configuration says, or goes on with the mount of a dead daemon;
/// returns when the kernel knows it.
pub fn mount(node: Arc<Node>) -> Result<Mounted, MountError> {
    let (mountpoint, heir) = (node.config.mountpoint.clone(), node.heir.get().cloned());
    let failed = |cause: io::Error| MountError::Mount {
        path: mountpoint.clone(),
        hint: hint(&cause),
        cause,
    };
    let options = Options {
        subtype: "ebb".into(),
        default_permissions: true,
        allow_other: node.config.allow_other,
        loops: node.config.fuse_threads.max(1),
        ..Options::new("ebb")
    };
    let adapter = Adapter::new(Arc::clone(&node));
    let (places, resends) = (adapter.places(), adapter.resends());
    let inherited = heir.as_ref().map(|h| h.take_devices()).unwrap_or_default();
    let goes_on = !inherited.is_empty();
    let mut session = match goes_on {
        true => Session::resume(adapter, inherited, &options).map_err(failed)?,
        false => Session::mount(adapter, &mountpoint, &options).map_err(failed)?,
    };
    let device = Arc::clone(session.device());
    places.connect(session.notifier());
    node.kernel_pages.connect(places, goes_on);
    match &heir {
        Some(_) if goes_on => session.notifier().resend().map_err(failed)?,
        Some(heir) if resends.load(Acquire) => {
            let devices = session.devices().map_err(failed)?;
            heir.hand_over(devices).map_err(failed)?;
        }
        Some(_) => tracing::warn!(
            "not supervised: this kernel (before Linux 6.9) does not send requests again that a \
             dead daemon has read"
        ),
        None => {}
    }
    if heir.is_some_and(|h| h.is_handed_over()) {
        end_with_a_loop();
    }
    let (tell, moments) = mpsc::channel();
    let _ = node.mount_moments.set(tell.clone());
    let loops = std::thread::Builder::new()
        .name("fuse".into())
        .spawn(move || {
            let ended = session.run();
            // Nobody waits for it when the daemon has ended before.
            let _ = tell.send(Moment::Ended);
            ended
        })
        .map_err(failed)?;
    Ok(Mounted { loops, device, moments })
}

/// An event loop that panics leaves requests that nobody answers: the next daemon is asked again.
fn end_with_a_loop() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        let thread = std::thread::current();
        if thread.name().is_some_and(|n| n.starts_with("fuse")) {
            tracing::error!("an event loop panicked: {panic}");
            std::process::abort();
        }
    }));
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
    /// Finds out whether files can be passed through, once the mount answers.
    pub fn probe(&self, node: &Node) {
        super::passing::probe(node, &self.device);
    }

    /// Waits until the mount is gone. What processes in other mount namespaces still do there fails from
    /// then on: nothing that they would write could come to the backing any more.
    pub fn wait(self, node: &Node) -> io::Result<()> {
        let taken_away = self.moments.recv() == Ok(Moment::TakenAway);
        if taken_away && self.moments.recv_timeout(OTHERS_LET_GO_WITHIN).is_err() {
            node.is_ending.store(true, Release);
            tracing::info!("other mount namespaces still have the mount; it is dead there now");
            return Ok(());
        }
        self.loops.join().unwrap_or_else(|_| Err(io::Error::other("an event loop panicked")))
    }
}
