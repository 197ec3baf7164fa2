//! `ebb mount`: checks, then starts the daemon and waits until its mount answers.

use crate::exit::{Context, Failure};
use crate::keeper::{self, Ground};
use crate::launch::{self, Report, Up};
use crate::options::MountOptions;
use crate::plan::Plan;
use crate::{checks, daemon, logging};
use std::path::{Path, PathBuf};

/// Start the per-node daemon: mounts BACKING at MOUNTPOINT; returns once the mount answers
#[derive(clap::Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:
  ebb mount /lustre/proj/run7 /local/$SLURM_JOB_ID
  ebb mount --consistency commit --cache /nvme/$USER --cache-size 400GiB /lustre/proj/run7 /local/run7
  ebb mount --meta node001:7400 --listen $(hostname):7401 --token-file ~/job.token /lustre/run /local/run"
)]
pub struct Args {
    #[command(flatten)]
    options: MountOptions,
    /// Stay in the foreground; ends when it is unmounted, or by SIGTERM after a drain
    #[arg(long)]
    foreground: bool,
    /// Directory of the parallel file system that is shown at MOUNTPOINT
    backing: PathBuf,
    /// Empty directory to mount at
    mountpoint: PathBuf,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let plan = checked_plan(self.options, &self.backing, &self.mountpoint)?;
        if self.foreground {
            return foreground(&plan);
        }
        let started = launch::start(&plan)?;
        say(started.up());
        // The last step: killed before it, nothing stays mounted.
        started.take();
        Ok(())
    }
}

/// The plan of a mount that can be started here.
pub fn checked_plan(
    options: MountOptions,
    backing: &Path,
    mountpoint: &Path,
) -> Result<Plan, Failure> {
    let mut plan = Plan::new(&options.resolve()?, backing, mountpoint)?;
    for note in checks::mount(&plan.config)? {
        eprintln!("ebb: note: {note}");
    }
    let backing = &mut plan.config.backing;
    *backing = backing.canonicalize().or_usage(backing.display())?;
    Ok(plan)
}

fn foreground(plan: &Plan) -> Result<(), Failure> {
    if plan.supervise {
        return keeper::run(plan, Ground::Foreground);
    }
    logging::start(&plan.log_level, plan.log.as_deref())?;
    daemon::run(plan, None, |report| {
        if let Report::Ready(up) = report {
            say(&up);
        }
    })
}

/// Says where it is mounted.
pub fn say(up: &Up) {
    println!(
        "ebb: mounted at {} (node {}, metadata service {}, process {})",
        up.mountpoint.display(),
        up.node,
        up.meta,
        up.pid
    );
}
