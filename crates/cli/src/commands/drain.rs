//! `ebb drain`: dirty bytes go to the backing now; returns when they are there, verified.

use crate::client;
use crate::exit::{Context, Failure};
use crate::mounts;
use crate::progress::Progress;
use crate::unmount::millis;
use ebb_fs_client::control::Request;
use ebb_types::units::Span;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the daemon may need on top of the time it was given.
const GRACE: Duration = Duration::from_secs(15);

/// Push dirty bytes to the backing now, wait, verify
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb drain /local/run7
  ebb drain /local/run7 /local/run7/ckpt.0042 --timeout 5m")]
pub struct Args {
    /// Give up after this time, in ms, s, m, h [default: none]
    #[arg(long, value_name = "TIME")]
    timeout: Option<Span>,
    /// The mount point
    mountpoint: PathBuf,
    /// Files or directories in it [default: everything]
    paths: Vec<PathBuf>,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let point = mounts::resolve(&self.mountpoint).or_usage(self.mountpoint.display())?;
        let record = client::daemon_of(&point)?;
        let paths = self.paths.iter().map(|p| inside(&point, p)).collect::<Result<Vec<_>, _>>()?;
        // The mount point itself means everything, whatever else is named.
        let paths = if paths.iter().any(|p| p.as_os_str().is_empty()) { Vec::new() } else { paths };
        let timeout = self.timeout.map(|t| t.0);
        let request = Request::Drain { paths, timeout_ms: timeout.map(millis) };
        let progress = Progress::new();
        let limit = timeout.map(|t| t.saturating_add(GRACE));
        let outcome = client::ask(&record, &request, limit, |event| progress.update(&event));
        let what = format!("drain {}", point.display());
        match outcome {
            Ok(outcome) => progress.finish(&what, outcome),
            Err(e) => Err(Failure { status: e.status, text: format!("{what}: {e}") }),
        }
    }
}

/// A path relative to the mount's root. The last component is taken as it is: it may be a
/// symbolic link, which is drained itself.
pub(super) fn inside(point: &Path, path: &Path) -> Result<PathBuf, Failure> {
    let absolute = std::path::absolute(path).or_usage(path.display())?;
    if let Ok(rest) = absolute.strip_prefix(point)
        && !rest.components().any(|c| c == std::path::Component::ParentDir)
    {
        return Ok(rest.to_owned());
    }
    let real = match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => parent.canonicalize().map(|p| p.join(name)),
        _ => absolute.canonicalize(),
    };
    let real = real.or_usage(path.display())?;
    match real.strip_prefix(point) {
        Ok(rest) => Ok(rest.to_owned()),
        Err(_) => {
            let (path, point) = (path.display(), point.display());
            Err(Failure::usage(format!("{path} is not in the mount at {point}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_relative_to_the_mount() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let point = base.join("mount");
        std::fs::create_dir_all(point.join("a")).unwrap();
        std::os::unix::fs::symlink("mount", base.join("link")).unwrap();
        assert_eq!(inside(&point, &point.join("a/f")).unwrap(), Path::new("a/f"));
        assert_eq!(inside(&point, &base.join("link/a/f")).unwrap(), Path::new("a/f"));
        assert_eq!(inside(&point, &point.join("a/../f")).unwrap(), Path::new("f"));
        assert_eq!(inside(&point, &point).unwrap(), Path::new(""));
        assert_eq!(inside(&point, &base.join("mountain")).unwrap_err().status, 2);
        assert_eq!(inside(&point, &point.join("../x")).unwrap_err().status, 2);
    }
}
