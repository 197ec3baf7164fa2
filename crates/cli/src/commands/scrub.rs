//! `ebb scrub`: whether what is in the buffer is what was written there.

use crate::client;
use crate::exit::{Code, Context, Failure};
use crate::mounts;
use crate::progress::{Progress, list};
use ebb_fs_client::control::{Outcome, Request};
use ebb_types::units::Size;
use std::path::PathBuf;

/// Look whether what is in the node-local buffer is what was written there
#[derive(clap::Args)]
#[command(
    after_help = "Everything is read from the disk once more and compared with the sums of what was
written. What is damaged and on the backing is fetched anew; what is lost is named, and the exit status is 3.

Examples:
  ebb scrub /local/run7
  ebb scrub /local/run7 --json"
)]
pub struct Args {
    /// One JSON object at the end: files, right_bytes, unknown_bytes, damaged_bytes, lost_bytes
    #[arg(long)]
    json: bool,
    /// The mount point
    mountpoint: PathBuf,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let point = mounts::resolve(&self.mountpoint).or_usage(self.mountpoint.display())?;
        let record = client::daemon_of(&point)?;
        let progress = Progress::new();
        let what = format!("scrub {}", point.display());
        let mut found = None;
        let outcome = client::ask(&record, &Request::Scrub, None, |event| {
            progress.update(&event);
            if let ebb_fs_client::control::Event::Reply { body } = event {
                found = Some(body);
            }
        });
        progress.clear();
        let outcome =
            outcome.map_err(|e| Failure { status: e.status, text: format!("{what}: {e}") })?;
        if let Some(found) = found {
            let bytes = |name: &str| Size(found[name].as_u64().unwrap_or_default());
            match self.json {
                true => println!("{found}"),
                false => println!(
                    "{} file(s): {} right, {} without a sum, {} damaged",
                    found["files"],
                    bytes("right_bytes"),
                    bytes("unknown_bytes"),
                    bytes("damaged_bytes"),
                ),
            }
        }
        match outcome {
            Outcome::Incomplete { remaining } => {
                let text = format!("{what}: bytes are lost:\n{}", list(&remaining));
                Err(Failure::new(Code::Incomplete, text))
            }
            other => crate::progress::judge(&what, other).map(|_| ()),
        }
    }
}
