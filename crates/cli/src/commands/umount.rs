//! `ebb umount`: drains with a progress bar, unmounts, stops the daemon.

use crate::exit::{Context, Failure};
use crate::{mounts, unmount};
use ebb_types::units::Span;
use std::path::PathBuf;

/// Drain, unmount and stop the daemon; also clears away a mount whose daemon is dead
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb umount /local/run7
  ebb umount --timeout 30m /local/run7      (exit status 4 when time runs out; it stays mounted)
  ebb umount --no-drain /local/run7         (dirty bytes stay in the cache directory)")]
pub struct Args {
    /// Leave dirty bytes in the cache directory; exit status 3 when there are any
    #[arg(long)]
    no_drain: bool,
    /// Longest time for draining, in ms, s, m, h
    #[arg(long, value_name = "TIME", default_value = "10m")]
    timeout: Span,
    /// The mount point
    mountpoint: PathBuf,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let point = mounts::resolve(&self.mountpoint).or_usage(self.mountpoint.display())?;
        unmount::unmount(&point, !self.no_drain, self.timeout.0)
    }
}
