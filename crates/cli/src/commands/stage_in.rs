//! `ebb stage-in`: files come into the buffer before the job reads them.

use super::drain::inside;
use crate::client;
use crate::exit::{Context, Failure};
use crate::mounts;
use crate::progress::{Progress, judge};
use crate::unmount::millis;
use ebb_fs_client::control::Request;
use ebb_types::units::Span;
use serde_json::json;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What the daemon may need on top of the time it was given.
const GRACE: Duration = Duration::from_secs(15);

/// Bring files into the node-local buffer before they are read
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb stage-in /local/run7 /local/run7/mesh /local/run7/input.nc
  ebb stage-in /local/run7 --list inputs.txt --json
  find /local/run7/train -name '*.tfrecord' -print0 | ebb stage-in /local/run7 --list - --null")]
pub struct Args {
    /// Read paths from FILE, one a line; - for standard input
    #[arg(long, value_name = "FILE")]
    list: Option<PathBuf>,
    /// The paths of --list end with a zero byte, not with a newline
    #[arg(long, requires = "list")]
    null: bool,
    /// One JSON object at the end: files, bytes, seconds
    #[arg(long)]
    json: bool,
    /// Give up after this time, in ms, s, m, h [default: none]
    #[arg(long, value_name = "TIME")]
    timeout: Option<Span>,
    /// The mount point
    mountpoint: PathBuf,
    /// Files or directories in it; relative ones begin at the working directory
    #[arg(required_unless_present = "list")]
    paths: Vec<PathBuf>,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let point = mounts::resolve(&self.mountpoint).or_usage(self.mountpoint.display())?;
        let record = client::daemon_of(&point)?;
        let mut named = self.paths.clone();
        if let Some(list) = &self.list {
            named.extend(listed(list, if self.null { 0 } else { b'\n' })?);
        }
        let paths = named.iter().map(|p| inside(&point, p)).collect::<Result<Vec<_>, _>>()?;
        let timeout = self.timeout.map(|t| t.0);
        let request = Request::StageIn { paths, timeout_ms: timeout.map(millis) };
        let limit = timeout.map(|t| t.saturating_add(GRACE));
        let (progress, began) = (Progress::new(), Instant::now());
        let outcome = client::ask(&record, &request, limit, |event| progress.update(&event));
        let what = format!("stage-in {}", point.display());
        let outcome =
            outcome.map_err(|e| Failure { status: e.status, text: format!("{what}: {e}") })?;
        if !self.json {
            return progress.finish_as(&what, "in the buffer", outcome);
        }
        progress.clear();
        let (bytes, files) = judge(&what, outcome)?;
        let seconds = began.elapsed().as_secs_f64();
        println!("{}", json!({ "files": files, "bytes": bytes, "seconds": seconds }));
        Ok(())
    }
}

/// The paths of a list.
fn listed(list: &Path, end: u8) -> Result<Vec<PathBuf>, Failure> {
    let mut text = Vec::new();
    if list == Path::new("-") {
        std::io::stdin().lock().read_to_end(&mut text).or_usage("standard input")?;
    } else {
        text = std::fs::read(list).or_usage(list.display())?;
    }
    let parts = text.split(|b| *b == end).filter(|part| !part.is_empty());
    Ok(parts.map(|part| PathBuf::from(std::ffi::OsString::from_vec(part.to_vec()))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_end_their_paths_as_told() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("list");
        std::fs::write(&list, "a b\n\nc\n").unwrap();
        assert_eq!(listed(&list, b'\n').unwrap(), [PathBuf::from("a b"), PathBuf::from("c")]);
        std::fs::write(&list, "a\nb\0c\0").unwrap();
        assert_eq!(listed(&list, 0).unwrap(), [PathBuf::from("a\nb"), PathBuf::from("c")]);
        assert_eq!(listed(&dir.path().join("none"), 0).unwrap_err().status, 2);
    }
}
