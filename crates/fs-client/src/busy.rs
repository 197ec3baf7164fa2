//! Who keeps a mount busy: for the message when it cannot be unmounted.

use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

/// At most so many are named.
const NAMED_MAX: usize = 5;

/// What /proc tells of a process that hangs somewhere else can hang as well: by then the answer
/// names who was found.
const PATIENCE: Duration = Duration::from_secs(3);

/// Processes with a working directory or an open file in the mount, as "name (pid)".
pub async fn users_of(mountpoint: &Path) -> Vec<String> {
    let (found, mut users) = mpsc::unbounded_channel();
    let mountpoint = PathBuf::from(mountpoint);
    let search = move || search(&mountpoint, &found);
    // Not a thread of the runtime's, which waits for them at its end.
    if std::thread::Builder::new().name("ebb-users".into()).spawn(search).is_err() {
        return Vec::new();
    }
    let (mut named, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    while named.len() < NAMED_MAX
        && let Ok(Some(user)) = timeout_at(deadline, users.recv()).await
    {
        named.push(user);
    }
    named
}

/// Looks at every process until nobody listens any more.
fn search(mountpoint: &Path, found: &mpsc::UnboundedSender<String>) {
    let Ok(processes) = std::fs::read_dir("/proc") else { return };
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        if pid != std::process::id() && uses(&process.path(), mountpoint) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            if found.send(format!("{} ({pid})", name.trim())).is_err() {
                return;
            }
        }
    }
}

fn uses(process: &Path, mountpoint: &Path) -> bool {
    let inside = |link: &Path| std::fs::read_link(link).is_ok_and(|t| t.starts_with(mountpoint));
    if inside(&process.join("cwd")) || inside(&process.join("root")) || inside(&process.join("exe"))
    {
        return true;
    }
    let fds = std::fs::read_dir(process.join("fd"));
    fds.is_ok_and(|fds| fds.flatten().any(|fd| inside(&fd.path())))
}
