//! One daemon with its mount point and its cache, driven by the `ebb` command as a user would.

use crate::describe;
use crate::environment::{ebb_command, entered, wrapped};
use crate::mounts;
use ebb_links::{Network, Port};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Where the nodes of a cluster find their metadata service.
pub(crate) type MetaAddress = Arc<Mutex<Option<String>>>;

/// How `setpriv` takes away what overrides permissions.
const SQUASHED: [&str; 4] = [
    "--inh-caps",
    "-dac_override,-dac_read_search,-fowner",
    "--bounding-set",
    "-dac_override,-dac_read_search,-fowner",
];

/// A process that is being started may have what its parent had open for so long.
const IN_USE_FOR: Duration = Duration::from_secs(2);

/// A node of a cluster.
#[derive(Debug)]
pub struct Node {
    name: String,
    root: PathBuf,
    backing: PathBuf,
    mountpoint: PathBuf,
    cache: PathBuf,
    options: Vec<String>,
    /// The first node of a cluster without a service of its own has it inside.
    is_service: bool,
    meta: MetaAddress,
    pid: Mutex<Option<u32>>,
    /// Without the capabilities that override permissions.
    squashed: bool,
    /// A mount without a supervisor is a failure.
    supervised: bool,
    network: Option<(Arc<Network>, Port)>,
}

/// A panic of another thread does not make these values wrong.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    pub(crate) fn new(
        root: &Path,
        backing: &Path,
        index: usize,
        options: Vec<String>,
        is_service: bool,
        meta: MetaAddress,
    ) -> Node {
        let name = format!("node{index}");
        let home = root.join(&name);
        let mountpoint = home.join("mnt");
        std::fs::create_dir_all(&mountpoint).expect("directories of a node");
        Node {
            cache: home.join("cache"),
            name,
            root: root.to_owned(),
            backing: backing.to_owned(),
            mountpoint,
            options,
            is_service,
            meta,
            pid: Mutex::new(None),
            squashed: false,
            supervised: false,
            network: None,
        }
    }

    pub(crate) fn set_listen(&mut self, address: &str) {
        self.options.extend(["--listen".to_owned(), address.to_owned()]);
    }

    pub(crate) fn set_network(&mut self, network: Arc<Network>, index: usize) {
        let listen = format!("{}:0", network.host(Port::Node(index)));
        self.options.extend(["--listen".to_owned(), listen]);
        self.network = Some((network, Port::Node(index)));
    }

    pub(crate) fn squash(&mut self) {
        self.squashed = true;
    }

    pub(crate) fn supervise(&mut self) {
        self.supervised = true;
    }

    pub(crate) fn set_cache(&mut self, cache: PathBuf) {
        self.cache = cache;
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its mount point.
    #[must_use]
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Its cache directory.
    #[must_use]
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// A path in its mount.
    #[must_use]
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.mountpoint.join(relative)
    }

    /// The daemon's process, while it is mounted.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        let started = (*locked(&self.pid))?;
        // Another one may have followed it.
        let serves = self.registered("/pid").into_iter().find(|pid| is_running(*pid));
        Some(serves.unwrap_or(started))
    }

    /// `ebb mount` for this node with further options, not run yet.
    #[must_use]
    pub fn mount_command(&self, more: &[&str]) -> Command {
        self.mount_command_at(&self.cache, &self.mountpoint, more)
    }

    /// The same with another cache, at another place.
    #[must_use]
    pub fn mount_command_at(&self, cache: &Path, mountpoint: &Path, more: &[&str]) -> Command {
        let mut command = ebb_command(&self.root);
        command.arg("mount").args(&self.options).args(more);
        if let (false, Some(address)) = (self.is_service, locked(&self.meta).as_ref()) {
            command.args(["--meta", address]);
        }
        command.args(["--node", &self.name]).arg("--cache").arg(cache);
        command.arg(&self.backing).arg(mountpoint);
        if self.squashed {
            command = wrapped(&command, "setpriv", &SQUASHED);
        }
        match &self.network {
            Some((network, port)) => entered(&command, network, *port),
            None => command,
        }
    }

    /// Mounts with further options.
    ///
    /// # Panics
    /// When it fails, or has no supervisor and should.
    pub fn mount_with(&self, more: &[&str]) {
        let output = self.mount_command(more).output().expect("ebb can be started");
        assert!(output.status.success(), "{}: ebb mount: {}", self.name, describe(&output));
        let status = self.status();
        *locked(&self.pid) = status["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        if self.is_service {
            *locked(&self.meta) = status["meta"].as_str().map(str::to_owned);
        }
        if self.supervised && !self.does_without_supervisor(more) {
            self.check_supervisor(&status);
        }
    }

    /// True when the test itself asks for a mount that has none.
    fn does_without_supervisor(&self, more: &[&str]) -> bool {
        let options: Vec<&str> =
            self.options.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let last = |name| options.iter().rposition(|o| *o == name).map(|at| options[at + 1]);
        last("--supervise") == Some("off") || last("--io-path").is_some_and(|way| way != "daemon")
    }

    /// What the daemon says, and what the system says of the same processes.
    fn check_supervisor(&self, status: &Value) {
        let name = &self.name;
        let supervisor = &status["supervisor"];
        let none = &status["unsupervised"];
        assert!(supervisor["alive"] == true, "{name}: no supervisor ({none}): {supervisor}");
        let daemon = self.pid().expect("it is mounted");
        let parent = stat_of(daemon).and_then(|stat| stat.parent);
        assert_eq!(
            parent.map(Value::from).as_ref(),
            supervisor.get("pid"),
            "{name}: the parent of the daemon is not its supervisor"
        );
    }

    /// Mounts; also again after an unmount or a crash.
    pub fn mount(&self) {
        self.mount_with(&[]);
    }

    /// `ebb COMMAND [options] MOUNTPOINT [paths]`, run to its end.
    #[must_use]
    pub fn ebb(&self, command: &str, options: &[&str], after: &[&str]) -> Output {
        let mut line = ebb_command(&self.root);
        line.arg(command).args(options).arg(&self.mountpoint).args(after);
        if let Some((network, port)) = &self.network {
            line = entered(&line, network, *port);
        }
        line.output().expect("ebb can be started")
    }

    fn must(&self, command: &str, options: &[&str], after: &[&str]) -> Output {
        let output = self.ebb(command, options, after);
        assert!(output.status.success(), "{}: ebb {command}: {}", self.name, describe(&output));
        output
    }

    /// `ebb umount`, which must end with everything on the backing.
    ///
    /// # Panics
    /// When it does not.
    pub fn umount(&self) {
        // A child that another thread of the test is starting has what this one had open, until it is another
        // program.
        let begun = Instant::now();
        loop {
            let output = self.ebb("umount", &[], &[]);
            let in_use = String::from_utf8_lossy(&output.stderr).contains("is in use by a process");
            if output.status.success() || !in_use || begun.elapsed() > IN_USE_FOR {
                assert!(
                    output.status.success(),
                    "{}: ebb umount: {}",
                    self.name,
                    describe(&output)
                );
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!mounts::is_mounted(&self.mountpoint), "{}: still mounted", self.name);
        assert!(!mounts::is_mounted(&self.mountpoint), "{}: still mounted", self.name);
        *locked(&self.pid) = None;
    }

    /// `ebb drain`, which must end with everything on the backing.
    ///
    /// # Panics
    /// When it does not.
    pub fn drain(&self) {
        self.must("drain", &[], &[]);
    }

    /// The object of `ebb status --json`.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn status(&self) -> Value {
        let output = self.must("status", &["--json"], &[]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| {
            panic!("{}: status is not JSON ({e}): {}", self.name, describe(&output))
        })
    }

    /// One of the counters that monitors read, by its whole name; 0 when there is none of that name.
    ///
    /// # Panics
    /// When they cannot be read.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(self.path(".ebb/metrics")).expect("the counters");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().expect("a number"))
    }

    /// Waits until nothing is open: the kernel tells of a last close after it returned.
    ///
    /// # Panics
    /// When something stays open.
    pub fn wait_closed(&self) {
        let none = |status: &Value| status["io_paths"].as_array().is_none_or(Vec::is_empty);
        self.wait_status(Duration::from_secs(10), none);
    }

    /// Waits until the status is as wanted; answers it.
    ///
    /// # Panics
    /// When that takes longer than `limit`.
    pub fn wait_status(&self, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + limit;
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < end, "{}: after {limit:?} still {status:#}", self.name);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills the daemon as a crash would: no signal handler runs, the mount stays and is dead. (A
    /// supervisor is killed first.)
    ///
    /// # Panics
    /// When it is not mounted.
    pub fn kill9(&self) {
        let daemon = self.pid().expect("a daemon to kill");
        *locked(&self.pid) = None;
        for pid in self.registered("/supervisor/pid").into_iter().chain([daemon]) {
            if is_running(pid) {
                kill(pid, Signal::KILL);
            }
            let gone = || !is_running(pid);
            assert!(
                mounts::wait_until(Duration::from_secs(10), gone),
                "process {pid} does not end"
            );
        }
    }

    /// Kills the daemon that a supervisor has started, also one that does not serve yet, and does
    /// not wait for the next one. False when there was none just then.
    #[must_use]
    pub fn kill_daemon_only(&self) -> bool {
        let Some(supervisor) = self.registered("/supervisor/pid").first().copied() else {
            return false;
        };
        let children = format!("/proc/{supervisor}/task/{supervisor}/children");
        let children = std::fs::read_to_string(children).unwrap_or_default();
        // The one before it may not have come to its end.
        let mut pids = children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok());
        let Some(pid) = pids.rfind(|pid| is_running(*pid)) else { return false };
        kill(pid, Signal::KILL);
        true
    }

    /// The same for one that serves, until another one does.
    #[must_use]
    pub fn kill_daemon(&self) -> bool {
        let serving = || self.registered("/pid").first().copied().filter(|pid| is_running(*pid));
        let Some(pid) = serving() else { return false };
        kill(pid, Signal::KILL);
        let next = || serving().is_some_and(|next| next != pid);
        mounts::wait_until(Duration::from_secs(30), next)
    }

    /// Its daemon, and its supervisor when it has one.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let mut pids = self.registered("/pid");
        pids.extend(self.registered("/supervisor/pid"));
        pids
    }

    /// Ends everything of this node at once, for tests that found it stuck.
    pub fn kill_all(&self) {
        self.kill_quietly();
    }

    /// Sends a signal to the daemon; after one that stops it, it stands still.
    ///
    /// # Panics
    /// When it is not mounted.
    pub fn signal(&self, signal: Signal) {
        signal_process(self.pid().expect("a daemon to signal"), signal);
    }

    /// A program in this node's mount: its working directory is the mount point.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.mountpoint);
        command
    }

    /// Starts a shell script in this node's mount.
    #[must_use]
    pub fn spawn(&self, script: &str) -> Child {
        self.command("sh").args(["-ec", script]).spawn().expect("sh can be started")
    }

    /// Runs a shell script in this node's mount; its standard output.
    ///
    /// # Panics
    /// When it fails.
    pub fn shell(&self, script: &str) -> String {
        let output = self.command("sh").args(["-ec", script]).output().expect("sh can be started");
        assert!(output.status.success(), "{}: {script}: {}", self.name, describe(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The daemon's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.cache.join("ebb.log")).unwrap_or_default()
    }

    pub(crate) fn show_log(&self) {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(40)..].join("\n");
        eprintln!("--- log of {} (last lines)\n{last}\n---", self.name);
    }

    pub(crate) fn kill_quietly(&self) {
        // The registry also knows a daemon that a test has started in its own way.
        let end = |pids: Vec<u32>| {
            for pid in pids.into_iter().filter(|p| is_daemon(*p)) {
                kill(pid, Signal::KILL);
                mounts::wait_until(Duration::from_secs(5), || !is_running(pid));
            }
        };
        // First who would start another one.
        end(self.registered("/supervisor/pid"));
        end(locked(&self.pid).take().into_iter().chain(self.registered("/pid")).collect());
    }

    /// Processes that the cluster's registry names for this mount point.
    fn registered(&self, which: &str) -> Vec<u32> {
        let Ok(records) = std::fs::read_dir(self.root.join("run")) else { return Vec::new() };
        let pid_of = |path: PathBuf| {
            let record: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
            let is_own = record["mountpoint"].as_str()? == self.mountpoint.to_str()?;
            is_own.then(|| u32::try_from(record.pointer(which)?.as_u64()?).ok())?
        };
        records.filter_map(|r| pid_of(r.ok()?.path())).collect()
    }
}

fn kill(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, signal);
    }
}

/// Sends a signal; after one that stops it, the process stands still.
pub(crate) fn signal_process(pid: u32, signal: Signal) {
    kill(pid, signal);
    if signal == Signal::STOP {
        // Its threads run on until one of them has taken the signal, which takes a while on a busy
        // machine.
        let stands = || is_stopped(pid);
        assert!(mounts::wait_until(Duration::from_secs(10), stands), "process {pid} goes on");
    }
}

/// True when no thread of the process runs.
fn is_stopped(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        // One that waits for a device stops when it has it.
        state.is_none_or(|s| matches!(s, 'T' | 't' | 'D' | 'Z' | 'X'))
    })
}

/// True for a process that runs; one that only waits to be collected does not.
#[must_use]
pub fn is_running(pid: u32) -> bool {
    match stat_of(pid).map(|stat| stat.state) {
        None | Some('X') => false,
        // Its first thread has ended; the others may still hold its files and locks.
        Some('Z') => std::fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|t| t.count() > 1),
        Some(_) => true,
    }
}

/// What the system tells of a process.
struct Stat {
    /// The letter that stands for what it does.
    state: char,
    parent: Option<u32>,
}

fn stat_of(pid: u32) -> Option<Stat> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name, which may have anything in it, ends with the last parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some(Stat { state, parent: fields.next().and_then(|pid| pid.parse().ok()) })
}

/// Only daemons are ended: a process id may have been taken over by another program.
fn is_daemon(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let program = line.split(|b| *b == 0).next().unwrap_or_default();
    program.ends_with(b"ebb")
}
