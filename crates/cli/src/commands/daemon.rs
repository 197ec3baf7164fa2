//! The hidden command that `ebb mount` starts in the background: reads its plan from standard
//! input and reports through standard output. Not for users.

use crate::exit::{Code, Context, Failure};
use crate::keeper::{self, Ground};
use crate::launch::{self, Report};
use crate::plan::Plan;
use crate::{daemon, logging};
use ebb_handover::{Heirloom, Line};
use rustix::process::Signal;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

/// (started by `ebb mount`)
#[derive(clap::Args)]
pub struct Args {
    /// Shown in process lists; the plan says the same.
    #[arg(hide = true)]
    _mountpoint: PathBuf,
    /// The line to a supervisor, as the number of a descriptor that was inherited.
    #[arg(long, hide = true)]
    heir: Option<i32>,
}

impl Args {
    /// Runs the daemon to its end.
    pub fn run(self) -> Result<(), Failure> {
        // Not the process group that a terminal or a job step signals.
        let _ = rustix::process::setsid();
        let outcome = read_plan().and_then(|plan| match self.heir {
            None if plan.supervise => keeper::run(&plan, Ground::Background),
            line => {
                logging::start(&plan.log_level, plan.log.as_deref())?;
                let heir = line.map(take_over).transpose()?;
                let begins = heir.as_ref().is_some_and(|h| !h.is_handed_over());
                if begins {
                    end_with_supervisor(Some(Signal::KILL));
                }
                daemon::run(&plan, heir, move |said| {
                    if begins {
                        end_with_supervisor(None);
                    }
                    report(said);
                })
            }
        });
        if let Err(failure) = &outcome {
            tracing::error!("{failure}");
            // Nobody reads this any more when the mount was up before.
            report(Report::Failed { status: failure.status.into(), text: failure.text.clone() });
        }
        outcome
    }
}

/// What the supervisor hands over.
fn take_over(line: i32) -> Result<Arc<Heirloom>, Failure> {
    // SAFETY: the supervisor says that it is open, and nothing else has this number by now.
    let line = unsafe { OwnedFd::from_raw_fd(line) };
    rustix::io::fcntl_setfd(&line, rustix::io::FdFlags::CLOEXEC)
        .map_err(std::io::Error::from)
        .or_usage("--heir (use `ebb mount`)")?;
    Heirloom::receive(Line::inherited(line)).map(Arc::new).or_failed("what the supervisor gives")
}

/// A start that is broken off ends with its supervisor; a mount that is up goes on without it.
fn end_with_supervisor(signal: Option<Signal>) {
    if let Err(e) = rustix::process::set_parent_process_death_signal(signal) {
        tracing::warn!("the end of the supervisor is not heard: {e}");
    }
}

fn read_plan() -> Result<Plan, Failure> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).or_usage("standard input")?;
    let plan = serde_json::from_str(&text).or_usage("standard input (use `ebb mount`)")?;
    redirect(|null| rustix::stdio::dup2_stdin(null))?;
    Ok(plan)
}

/// Says how the start went, and lets go of the standard output. When nobody is there to take the
/// mount, `ebb mount` was killed: then nobody wants the mount either.
fn report(report: Report) {
    let mut line = serde_json::to_string(&report).unwrap_or_default();
    line.push('\n');
    let mut out = std::io::stdout();
    let starter = starter();
    let heard = out.write_all(line.as_bytes()).and_then(|()| out.flush());
    let _ = redirect(|null| rustix::stdio::dup2_stdout(null));
    if matches!(report, Report::Failed { .. }) {
        return;
    }
    match (heard, starter) {
        (Err(e), _) => end(&e.to_string()),
        (Ok(()), Some(line)) => drop(std::thread::spawn(move || {
            if !launch::was_taken(line) {
                end("it was killed before it could say that the mount is up");
            }
        })),
        (Ok(()), None) => {}
    }
}

/// The line to an `ebb mount` that waits; nothing where a supervisor shows the report, or where
/// this daemon goes on for another one.
fn starter() -> Option<OwnedFd> {
    let out = rustix::stdio::stdout();
    let is = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(out).ok()?.st_mode);
    (is == rustix::fs::FileType::Socket).then(|| out.try_clone_to_owned().ok()).flatten()
}

fn end(why: &str) {
    tracing::error!("`ebb mount` is gone ({why}); ending");
    let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::TERM);
}

/// Connects a standard stream with /dev/null.
fn redirect(dup: impl FnOnce(&File) -> rustix::io::Result<()>) -> Result<(), Failure> {
    let null = File::options().read(true).write(true).open("/dev/null").or_failed("/dev/null")?;
    dup(&null).map_err(|e| Failure::new(Code::Failed, format!("/dev/null: {e}")))
}
