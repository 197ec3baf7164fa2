//! Who keeps a mount busy: for the message when it cannot be unmounted.

use std::path::Path;

/// At most so many are named.
const NAMED_MAX: usize = 5;

/// Processes with a working directory or an open file in the mount, as "name (pid)".
#[must_use]
pub fn users_of(mountpoint: &Path) -> Vec<String> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut found = Vec::new();
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        if pid != std::process::id() && uses(&process.path(), mountpoint) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.push(format!("{} ({pid})", name.trim()));
            if found.len() == NAMED_MAX {
                break;
            }
        }
    }
    found
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
