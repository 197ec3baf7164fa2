//! The supervisor: holds the devices of the mount and the memory that outlives a daemon, starts
//! the daemon as its child, and starts another one when that ends unexpectedly. It does as little
//! as possible: one thread, no runtime, no lock, nothing of what a daemon does.
//!
//! Consistency: as long as it holds the devices the kernel keeps the requests that nobody
//! answered; it never answers one itself before it gives up. Retries: a daemon is started again at
//! once, later ones after a pause, until one serves or the time is over. Cancellation: signals are
//! passed on to the daemon; in the background SIGHUP replaces it by the program that is on the disk
//! now. Completion: it ends with its daemon. Crash: when it is killed, the daemon goes on without it.

mod giveup;
mod wake;

use crate::exit::{Context, Failure};
use crate::plan::Plan;
use ebb_handover::{Area, Line, Word};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
pub use wake::Signals;
use wake::Wake;

/// A daemon that served for so long was well: what ends it then is no part of a row.
const WELL: Duration = Duration::from_millis(300);
/// So many daemons in a row that were not well are enough.
const ROW_MAX: u32 = 8;
/// Between a daemon that did not come up and the next one.
const PAUSE: Duration = Duration::from_millis(250);
/// A daemon that was killed and does not end waits for a device that does not answer.
const KILLED_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Where the supervisor stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    /// The daemon reports through the standard output that it inherits.
    Background,
    /// The supervisor shows the report.
    Foreground,
}

/// How a daemon's life ended.
enum End {
    /// The mount is gone, or never was: so does the supervisor.
    Final(ExitStatus),
    /// The mount is there and nobody serves it.
    Sudden(String),
}

/// Runs daemons for a plan until one ends in order; does not return when that one failed, but
/// exits as it did.
pub fn run(plan: &Plan, ground: Ground) -> Result<(), Failure> {
    // The kernel should take everybody else first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-600");
    crate::daemon::allow_many_files();
    let signals = Signals::block().or_failed("signals")?;
    let mut keeper = Keeper::new(plan, ground, signals)?;
    let mut end = keeper.life(None)?;
    loop {
        let why = match end {
            End::Final(status) => leave(status),
            End::Sudden(why) => why,
        };
        say(&format!("the daemon ended: {why}; starting another one"));
        let until = Instant::now() + keeper.patience;
        end = match keeper.revive(until, why) {
            Some(end) => end,
            None => {
                say("no daemon can go on: what waits fails, what was written stays in the cache");
                giveup::fail_all(&keeper.devices, &plan.config.mountpoint);
                return Err(Failure::failed("the daemon could not be started again"));
            }
        };
    }
}

fn leave(status: ExitStatus) -> ! {
    std::process::exit(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}

/// Into the log, which is this process's standard error.
fn say(text: &str) {
    // On a full disk it goes on without a word.
    let _ = writeln!(std::io::stderr(), "ebb supervisor (process {}): {text}", std::process::id());
}

struct Keeper {
    signals: Signals,
    plan: File,
    mountpoint: PathBuf,
    program: PathBuf,
    patience: Duration,
    ground: Ground,
    area: OwnedFd,
    devices: Vec<OwnedFd>,
    kept: BTreeMap<u64, OwnedFd>,
    restarts: u32,
    row: u32,
    /// The last one did.
    served: bool,
    /// For the next one that serves.
    signal: Option<Signal>,
}

/// A daemon that runs.
struct Running {
    child: Child,
    ended: OwnedFd,
    line: Line,
    up: Option<Instant>,
    leaving: bool,
    /// What it said of its end, or what was done to it.
    why: Option<String>,
}

impl Keeper {
    fn new(plan: &Plan, ground: Ground, signals: Signals) -> Result<Keeper, Failure> {
        let text = serde_json::to_vec(plan).or_failed("the daemon's configuration")?;
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let fd = rustix::fs::memfd_create("ebb-plan", flags);
        let mut file =
            File::from(fd.map_err(std::io::Error::from).or_failed("memory for the plan")?);
        file.write_all(&text).or_failed("memory for the plan")?;
        Ok(Keeper {
            signals,
            plan: file,
            mountpoint: plan.config.mountpoint.clone(),
            program: std::env::current_exe().or_failed("/proc/self/exe")?,
            patience: plan.restart_timeout.0,
            ground,
            area: Area::create().or_failed("memory that outlives the daemon")?,
            devices: Vec::new(),
            kept: BTreeMap::new(),
            restarts: 0,
            row: 0,
            served: false,
            signal: None,
        })
    }

    /// Starts daemons until one has served; how that one ended. None: it is no use.
    fn revive(&mut self, until: Instant, mut why: String) -> Option<End> {
        loop {
            self.row += 1;
            if self.row > ROW_MAX || Instant::now() >= until {
                return None;
            }
            if self.row > 1 {
                std::thread::sleep(PAUSE);
            }
            self.restarts += 1;
            match self.life(Some((until, why))) {
                // None that served: the time goes on.
                Ok(End::Sudden(again)) if !self.served => why = again,
                Ok(end) => return Some(end),
                Err(e) => {
                    say(&e.to_string());
                    why = e.text;
                }
            }
        }
    }

    /// The life of one daemon. `again`: until when it must serve, and how the last one ended.
    fn life(&mut self, again: Option<(Instant, String)>) -> Result<End, Failure> {
        let (mut until, why) = again.map_or((None, String::new()), |(t, w)| (Some(t), w));
        let goes_on = until.is_some();
        let mut running = self.start(goes_on, &why)?;
        loop {
            let waits = if running.up.is_none() { until } else { None };
            let wake = wake::wait(&running.ended, &running.line, &self.signals, waits);
            match wake.or_failed("waiting for the daemon")? {
                Wake::Ended => return self.ended(running),
                Wake::Said => {
                    self.listen(&mut running);
                    if running.up.is_some()
                        && let Some(signal) = self.signal.take()
                    {
                        kill(&running.child, signal);
                    }
                }
                // A terminal that goes away says the same.
                Wake::Signal(Signal::HUP) if self.ground == Ground::Foreground => {
                    kill(&running.child, Signal::TERM);
                }
                Wake::Signal(Signal::HUP) => {
                    running.why = Some("replaced by the program on the disk (SIGHUP)".into());
                    kill(&running.child, Signal::KILL);
                }
                // One that goes on for another one would take it for a failed start.
                Wake::Signal(signal) if goes_on && running.up.is_none() => {
                    self.signal = Some(signal);
                }
                Wake::Signal(signal) => kill(&running.child, signal),
                Wake::Late => {
                    // Only once: now its end is waited for.
                    until = None;
                    kill(&running.child, Signal::KILL);
                    if !wake::ends_within(&running.ended, KILLED_ENDS_WITHIN) {
                        // It cannot even be killed: nobody may wait for it.
                        return Ok(End::Sudden("it does not come up and cannot be killed".into()));
                    }
                    running.why = Some("it did not serve in time".into());
                }
            }
        }
    }

    fn start(&mut self, again: bool, why: &str) -> Result<Running, Failure> {
        let (mine, theirs) = Line::pair().or_failed("a line to the daemon")?;
        self.plan.rewind().or_failed("memory for the plan")?;
        let plan = self.plan.try_clone().or_failed("memory for the plan")?;
        // First the program that is on the disk now; when that does not come up, this one.
        let upgraded = self.row <= 1 && self.program.exists();
        let program = if upgraded { &self.program } else { &PathBuf::from("/proc/self/exe") };
        let shown = program.display().to_string();
        let inherit = rustix::io::FdFlags::empty();
        rustix::io::fcntl_setfd(theirs.as_fd(), inherit)
            .map_err(std::io::Error::from)
            .or_failed("a line to the daemon")?;
        let report = match (again, self.ground) {
            (true, _) => Stdio::null(),
            (false, Ground::Background) => Stdio::inherit(),
            (false, Ground::Foreground) => Stdio::piped(),
        };
        let mut child = Command::new(program)
            .arg("daemon")
            .arg(&self.mountpoint)
            .args(["--heir", &theirs.as_fd().as_raw_fd().to_string()])
            .stdin(plan)
            .stdout(report)
            .current_dir("/")
            .spawn()
            .or_failed(shown)?;
        drop(theirs);
        match child.stdout.take() {
            Some(report) => drop(std::thread::spawn(move || show(BufReader::new(report)))),
            // The daemon alone holds the pipe on which somebody may wait for its report.
            None if !again => silence(),
            None => {}
        }
        let pid = Pid::from_child(&child);
        let ended = pidfd_open(pid, PidfdFlags::empty()).map_err(std::io::Error::from);
        let running = Running {
            ended: ended.or_failed("watching the daemon")?,
            child,
            line: mine,
            up: None,
            leaving: false,
            why: None,
        };
        // A daemon that is dead already does not hear; that shows at once.
        if let Err(e) = self.hand_over(&running.line, why) {
            say(&format!("the daemon does not take over: {e}"));
        }
        Ok(running)
    }

    fn hand_over(&self, line: &Line, why: &str) -> std::io::Result<()> {
        line.say(&Word::Area(self.area.try_clone()?))?;
        for device in &self.devices {
            line.lend_device(device.as_fd())?;
        }
        for (id, fd) in &self.kept {
            line.say(&Word::Keep(*id, fd.try_clone()?))?;
        }
        line.say(&Word::Start(self.restarts, std::process::id(), why.to_owned()))
    }

    fn listen(&mut self, running: &mut Running) {
        while let Ok(Some(word)) = running.line.hear(false) {
            match word {
                Word::Device(fd) => self.devices.push(fd),
                Word::Keep(id, fd) => drop(self.kept.insert(id, fd)),
                Word::Forget(id) => drop(self.kept.remove(&id)),
                Word::Up => running.up = Some(Instant::now()),
                Word::Leaving => running.leaving = true,
                Word::Ending(why) => running.why = Some(why),
                Word::Area(_) | Word::Start(..) => {}
            }
        }
    }

    fn ended(&mut self, mut running: Running) -> Result<End, Failure> {
        self.listen(&mut running);
        let status = running.child.wait().or_failed("waiting for the daemon")?;
        if running.leaving || self.devices.is_empty() {
            return Ok(End::Final(status));
        }
        self.served = running.up.is_some();
        if running.up.is_some_and(|since| since.elapsed() >= WELL) {
            self.row = 0;
        }
        let how = match status.signal() {
            Some(signal) => format!("killed by signal {signal}"),
            None => format!("exit status {}", status.code().unwrap_or(0)),
        };
        Ok(End::Sudden(running.why.map_or(how.clone(), |why| format!("{why} ({how})"))))
    }
}

fn kill(child: &Child, signal: Signal) {
    // The pid is not reused before the child is waited for.
    let _ = kill_process(Pid::from_child(child), signal);
}

/// Lets go of the standard output, which the daemon has now.
fn silence() {
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(null);
    }
}

/// Shows the daemon's report in the foreground.
fn show(mut report: impl BufRead) {
    let mut line = String::new();
    if report.read_line(&mut line).is_ok()
        && let Ok(crate::launch::Report::Ready(up)) = serde_json::from_str(&line)
    {
        crate::commands::mount::say(&up);
    }
}
