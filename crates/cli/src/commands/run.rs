//! `ebb run`: mounts, runs a command, drains, unmounts. The command's exit status is passed on,
//! unless something did not reach the backing: that must not look like success.

use super::mount::checked_plan;
use crate::exit::{Code, Context, Failure};
use crate::options::MountOptions;
use crate::plan::Plan;
use crate::{launch, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::signal::unix::{self, SignalKind};

/// Signals that are meant for the command.
const FORWARDED: [Signal; 6] =
    [Signal::INT, Signal::QUIT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2];

/// Mount, run CMD, drain, unmount; exits with CMD's status (128 + signal when one killed it),
/// or 3 or 4 when not everything reached the backing
#[derive(clap::Args)]
#[command(
    args_override_self = true,
    after_help = "Example:
  ebb run --consistency commit /lustre/proj/run7 /local/run7 -- mpirun ./solver /local/run7/out"
)]
pub struct Args {
    #[command(flatten)]
    options: MountOptions,
    /// Directory of the parallel file system that is shown at MOUNTPOINT
    backing: PathBuf,
    /// Empty directory to mount at
    mountpoint: PathBuf,
    /// Command and arguments, after `--`
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Args {
    /// Runs the command; its exit status.
    pub fn run(self) -> Result<u8, Failure> {
        let plan = checked_plan(self.options, &self.backing, &self.mountpoint)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .or_failed("threads")?;
        let outcome = runtime.block_on(whole(plan, &self.command));
        // A wait that was given up must not hold this process.
        runtime.shutdown_background();
        outcome
    }
}

/// Mount, command, drain and unmount.
async fn whole(plan: Plan, command: &[OsString]) -> Result<u8, Failure> {
    // From here on no signal may end this process before the mount is taken down.
    let mut signals = Signals::new().or_failed("signals")?;
    let timeout = plan.stop_timeout.0;
    let start = tokio::task::spawn_blocking(move || launch::start(&plan));
    let started = tokio::select! {
        started = start => started.or_failed("start")??,
        // The daemon notices that nobody waits for it any more, and ends.
        signal = signals.next() => {
            let status = 128 + signal.as_raw();
            return Err(Failure::with_status(status, "ended by a signal before the mount was up"));
        }
    };
    let up = started.take();
    let status = run(command, &mut signals).await;
    let drained = unmounted(up.mountpoint, timeout, &mut signals).await;
    verdict(status, drained)
}

/// What to exit with: lost durability outweighs the command's own status.
fn verdict(status: Result<u8, Failure>, drained: Result<(), Failure>) -> Result<u8, Failure> {
    match (status, drained) {
        (status, Ok(())) => status,
        (Ok(status), Err(mut failure)) => {
            failure.text.push_str(&format!("\n(the command ended with status {status})"));
            Err(failure)
        }
        (Err(first), Err(second)) => {
            Err(Failure { status: first.status, text: format!("{first}\n{second}") })
        }
    }
}

async fn run(command: &[OsString], signals: &mut Signals) -> Result<u8, Failure> {
    run_with(command, &[], signals).await
}

/// Runs a command with more in its environment, and passes signals on to it.
pub(super) async fn run_with(
    command: &[OsString],
    environment: &[(&str, OsString)],
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let [program, arguments @ ..] = command else {
        return Err(Failure::usage("no command after --"));
    };
    let mut child = Command::new(program)
        .args(arguments)
        .envs(environment.iter().map(|(k, v)| (k, v)))
        .spawn()
        .map_err(|e| {
            let text = format!("{}: {e}", program.to_string_lossy());
            // As a shell would say it.
            Failure {
                status: if e.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 },
                text,
            }
        })?;
    loop {
        tokio::select! {
            status = child.wait() => return status.map(status_of).or_failed("waiting for the command"),
            signal = signals.next() => forward(&child, signal),
        }
    }
}

fn status_of(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(Code::Failed as u8)
}

/// Passes a signal on. What the terminal sends has reached the command already.
fn forward(child: &Child, signal: Signal) {
    let from_keyboard = matches!(signal, Signal::INT | Signal::QUIT) && on_terminal();
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    if let (Some(pid), false) = (pid, from_keyboard) {
        let _ = kill_process(pid, signal);
    }
}

/// True when this process and its children are the foreground of a terminal.
fn on_terminal() -> bool {
    std::io::stdin().is_terminal()
        && rustix::termios::tcgetpgrp(std::io::stdin())
            .is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Drains and unmounts. The first signal meanwhile is answered with a word, the second one ends
/// the wait: the daemon goes on draining.
async fn unmounted(
    point: PathBuf,
    timeout: Duration,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let shown = point.display().to_string();
    let mut work = tokio::task::spawn_blocking(move || unmount::unmount(&point, true, timeout));
    for attempt in 0..2 {
        tokio::select! {
            done = &mut work => return done.unwrap_or_else(|e| Err(Failure::failed(e.to_string()))),
            _ = signals.next() => {}
        }
        if attempt == 0 {
            eprintln!("ebb: draining {shown}; another signal leaves that to the daemon");
        }
    }
    Err(Failure::new(
        Code::Incomplete,
        format!(
            "{shown}: left before everything was on the backing; the daemon goes on (`ebb status {shown}`)"
        ),
    ))
}

/// The forwarded signals as they arrive.
pub(super) struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
}

impl Signals {
    pub(super) fn new() -> std::io::Result<Signals> {
        let stream = |s: Signal| Ok((s, unix::signal(SignalKind::from_raw(s.as_raw()))?));
        Ok(Signals { streams: FORWARDED.into_iter().map(stream).collect::<std::io::Result<_>>()? })
    }

    async fn next(&mut self) -> Signal {
        std::future::poll_fn(|cx| {
            for (signal, stream) in &mut self.streams {
                if stream.poll_recv(cx).is_ready() {
                    return std::task::Poll::Ready(*signal);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_shell(script: &str) -> Result<u8, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut signals = Signals::new().unwrap();
            run(&["sh".into(), "-c".into(), script.into()], &mut signals).await
        })
    }

    #[test]
    fn statuses_are_passed_on() {
        assert_eq!(run_shell("exit 0"), Ok(0));
        assert_eq!(run_shell("exit 42"), Ok(42));
        assert_eq!(run_shell("kill -TERM $$"), Ok(143));
    }

    #[test]
    fn what_is_not_durable_outweighs_success() {
        let lost = || Err(Failure::new(Code::Incomplete, "a: 7 bytes"));
        assert_eq!(verdict(Ok(0), Ok(())), Ok(0));
        assert_eq!(verdict(Ok(9), Ok(())), Ok(9));
        let e = verdict(Ok(0), lost()).unwrap_err();
        assert!(e.status == 3 && e.text.contains("a: 7 bytes"));
        assert_eq!(verdict(Ok(9), lost()).unwrap_err().status, 3);
    }
}
