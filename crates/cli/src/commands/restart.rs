//! `ebb restart`: puts another daemon in the place of the one that serves a mount, by the program
//! that is on the disk now. Open files go on.

use crate::client;
use crate::exit::{Code, Context, Failure};
use crate::{mounts, progress};
use ebb_fs_client::control::Request;
use ebb_types::units::Span;
use std::path::PathBuf;

/// Replace the daemon of a mount, for an upgrade; applications wait a moment and go on
#[derive(clap::Args)]
#[command(after_help = "Example:
  ebb restart /local/run7                   (also: kill -HUP of the supervisor that `ebb status` shows)")]
pub struct Args {
    /// Longest time until another daemon answers, in ms, s, m, h
    #[arg(long, value_name = "TIME", default_value = "1m")]
    timeout: Span,
    /// The mount point
    mountpoint: PathBuf,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let point = mounts::resolve(&self.mountpoint).or_usage(self.mountpoint.display())?;
        let shown = point.display();
        let old = client::daemon_of(&point)?;
        let asked = client::ask(&old, &Request::Restart, Some(client::SHORT), |_| {})?;
        progress::judge(&format!("restart {shown}"), asked)?;
        let mut new = None;
        mounts::poll(self.timeout.0, || {
            new = client::daemon_of(&point).ok().filter(|r| r.pid != old.pid);
            new.as_ref().is_some_and(|r| client::ask_body(r, &Request::Status).is_ok())
        });
        match new {
            Some(record) => {
                println!("ebb: {shown} is served by process {}", record.pid);
                Ok(())
            }
            None => Err(Failure::new(Code::TimedOut, format!("{shown}: no daemon answers yet"))),
        }
    }
}
