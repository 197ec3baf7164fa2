//! Where a daemon's or service's log lines go: standard error, which a daemon in the background
//! has connected to its log file.

use crate::exit::{Context, Failure};
use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;
use tracing_subscriber::EnvFilter;

/// Starts logging to `file`, or to standard error.
pub fn start(level: &str, file: Option<&Path>) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(level).or_usage(format!("--log-level {level}"))?;
    // A line that cannot be written (the disk is full) is no reason for another one, which would
    // end the thread that logs.
    let lines = tracing_subscriber::fmt().log_internal_errors(false).with_env_filter(filter);
    match file {
        None => {
            let ansi = std::io::stderr().is_terminal();
            lines.with_writer(std::io::stderr).with_ansi(ansi).try_init()
        }
        Some(path) => {
            // It names the user's files.
            let mut options = File::options();
            let file = options.create(true).append(true).mode(0o600).open(path);
            let file = file.or_usage(path.display())?;
            lines.with_writer(Mutex::new(file)).with_ansi(false).try_init()
        }
    }
    .map_err(|e| Failure::failed(format!("log: {e}")))
}
