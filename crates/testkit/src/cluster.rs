//! Several daemons of one job on this machine.

use crate::environment::{ebb_command, entered};
use crate::node::{MetaAddress, Node, signal_process};
use crate::service::{Standby, Stranger};
use crate::{describe, mounts};
use ebb_links::{Network, Port};
use rustix::process::Signal;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// What a cluster is to be.
#[derive(Clone, Debug)]
pub struct Builder {
    nodes: usize,
    options: Vec<String>,
    separate_meta: bool,
    token: bool,
    supervised: bool,
    backing: Option<PathBuf>,
    below: Option<PathBuf>,
    caches: Option<PathBuf>,
    state: Option<PathBuf>,
    squashed: bool,
    network: Option<Arc<Network>>,
    lease: Option<String>,
    fixed_port: bool,
    coordinator: bool,
}

impl Builder {
    /// How many nodes (default: 1).
    #[must_use]
    pub fn nodes(mut self, nodes: usize) -> Builder {
        self.nodes = nodes;
        self
    }

    /// The job's model (default: the command's own).
    #[must_use]
    pub fn consistency(self, model: &str) -> Builder {
        self.option("--consistency", model)
    }

    /// The flush policy (default: the command's own).
    #[must_use]
    pub fn flush(self, policy: &str) -> Builder {
        self.option("--flush", policy)
    }

    /// Any other option of `ebb mount` with a value, for every node.
    #[must_use]
    pub fn option(mut self, name: &str, value: &str) -> Builder {
        self.options.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// The metadata service is `ebb meta`, not inside the first node's daemon.
    #[must_use]
    pub fn separate_meta(mut self) -> Builder {
        self.separate_meta = true;
        self
    }

    /// Other daemons go on for those that are killed (without: a daemon that dies leaves a dead
    /// mount, as most tests of crashes want it).
    #[must_use]
    pub fn supervised(mut self) -> Builder {
        self.supervised = true;
        self
    }

    /// All of them share a job token.
    #[must_use]
    pub fn token(mut self) -> Builder {
        self.token = true;
        self
    }

    /// An existing directory as backing (default: a fresh one).
    #[must_use]
    pub fn backing(mut self, dir: impl Into<PathBuf>) -> Builder {
        self.backing = Some(dir.into());
        self
    }

    /// Where the cluster's directory is made (default: the system's temporary directory). Benches
    /// name the file system to measure.
    #[must_use]
    pub fn below(mut self, dir: impl Into<PathBuf>) -> Builder {
        self.below = Some(dir.into());
        self
    }

    /// Where the nodes' caches are made (default: in the cluster's directory). They stay there.
    #[must_use]
    pub fn caches_below(mut self, dir: impl Into<PathBuf>) -> Builder {
        self.caches = Some(dir.into());
        self
    }

    /// Where the separate service has its state (default: in the cluster's directory). It stays there.
    #[must_use]
    pub fn state(mut self, dir: impl Into<PathBuf>) -> Builder {
        self.state = Some(dir.into());
        self
    }

    /// The daemons may not do on the backing what permissions forbid, as root on a file system that
    /// squashes it (they lack the capabilities that override them). Needs `setpriv`.
    #[must_use]
    pub fn squashed(mut self) -> Builder {
        self.squashed = true;
        self
    }

    /// The separate service and the nodes are on this network, with a job token.
    #[must_use]
    pub fn network(mut self, network: Arc<Network>) -> Builder {
        self.network = Some(network);
        self.separate_meta().token()
    }

    /// The metadata service is a process of its own and misses nodes after so long.
    #[must_use]
    pub fn lease(mut self, time: &str) -> Builder {
        self.lease = Some(time.to_owned());
        self.separate_meta()
    }

    /// The first node, with the metadata service inside, is found where it was also when it is mounted
    /// again after a crash.
    #[must_use]
    pub fn fixed_port(mut self) -> Builder {
        self.fixed_port = true;
        self
    }

    /// The metadata service is `ebb meta`, and says in a directory where it is: it may begin elsewhere.
    #[must_use]
    pub fn coordinator(mut self) -> Builder {
        self.coordinator = true;
        self.separate_meta()
    }

    /// Starts it.
    ///
    /// # Panics
    /// When a daemon does not come up, with what it said.
    #[must_use]
    pub fn start(self) -> Cluster {
        let cluster = self.prepare();
        for node in &cluster.nodes {
            node.mount();
        }
        cluster
    }

    /// Everything but the mounts: for tests that start the nodes themselves.
    #[must_use]
    pub fn prepare(self) -> Cluster {
        let root = match &self.below {
            Some(dir) => TempDir::with_prefix_in("ebb-test-", dir),
            None => TempDir::with_prefix("ebb-test-"),
        };
        let root = root.expect("a temporary directory");
        let real = root.path().canonicalize().expect("it was just made");
        let backing = self.backing.clone().unwrap_or_else(|| real.join("backing"));
        for dir in [&backing, &real.join("tmp")] {
            std::fs::create_dir_all(dir).expect("directories of a cluster");
        }
        let mut options = self.options.clone();
        // EBB_SUPERVISED=1 runs any test with supervisors, also those that are not about them.
        let supervised = self.supervised || std::env::var_os("EBB_SUPERVISED").is_some();
        // The same tests once more on another data path; supervised daemons have only one.
        if !supervised
            && let Ok(way) = std::env::var("EBB_TEST_IO_PATH")
            && !options.iter().any(|o| o == "--io-path")
        {
            options.extend(["--io-path".to_owned(), way]);
        }
        if let Ok(when) = std::env::var("EBB_TEST_TRACKER")
            && !options.iter().any(|o| o == "--tracker")
        {
            options.extend(["--tracker".to_owned(), when]);
        }
        if !supervised {
            options.splice(0..0, ["--supervise".to_owned(), "off".to_owned()]);
        }
        // EBB_TEST_SECURE=on runs any test encrypted, also those that are not about it.
        let secure = std::env::var("EBB_TEST_SECURE").ok();
        if let Some(which) = &secure
            && !options.iter().any(|o| o == "--secure")
        {
            options.extend(["--secure".to_owned(), which.clone()]);
        }
        if self.token || secure.is_some() {
            let file = real.join("token");
            let made = ebb_command(&real).arg("token").arg(&file).output().expect("ebb token");
            assert!(made.status.success(), "ebb token: {}", describe(&made));
            options.extend(["--token-file".to_owned(), file.display().to_string()]);
        }
        let mut cluster = Cluster {
            nodes: Vec::new(),
            meta: None,
            backing,
            state: self.state.clone().unwrap_or_else(|| real.join("meta")),
            root: Some(root),
            real,
            network: self.network.clone(),
        };
        let address = MetaAddress::default();
        if self.separate_meta {
            let terms = self.coordinator.then(|| cluster.terms());
            let service = cluster.start_meta(&options, self.lease.as_deref(), terms.as_deref());
            *address.lock().expect("nobody else has it yet") = Some(terms.unwrap_or(service));
        }
        for index in 0..self.nodes {
            let is_service = index == 0 && !self.separate_meta;
            let (root, backing) = (&cluster.real, &cluster.backing);
            let mut node =
                Node::new(root, backing, index, options.clone(), is_service, address.clone());
            if let Some(caches) = &self.caches {
                node.set_cache(caches.join(node.name()));
            }
            if self.squashed {
                node.squash();
            }
            if supervised {
                node.supervise();
            }
            if let Some(network) = &self.network {
                node.set_network(Arc::clone(network), index);
            }
            if is_service && self.fixed_port {
                node.set_listen(&format!("127.0.0.1:{}", free_port()));
            }
            cluster.nodes.push(node);
        }
        cluster
    }
}

/// A backing directory, daemons, and perhaps a metadata service of its own. Dropping it takes
/// everything away.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    meta: Option<Meta>,
    backing: PathBuf,
    state: PathBuf,
    root: Option<TempDir>,
    real: PathBuf,
    /// Behind the daemons, which go first.
    network: Option<Arc<Network>>,
}

#[derive(Debug)]
struct Meta {
    child: Child,
    address: String,
    command: Vec<String>,
}

impl Cluster {
    /// What a cluster is to be; one node and the command's own defaults unless told otherwise.
    #[must_use]
    pub fn builder() -> Builder {
        Builder {
            nodes: 1,
            options: Vec::new(),
            separate_meta: false,
            token: false,
            supervised: false,
            backing: None,
            below: None,
            caches: None,
            state: None,
            squashed: false,
            network: None,
            lease: None,
            fixed_port: false,
            coordinator: false,
        }
    }

    /// The nodes, in order. The first one has the metadata service inside, if no other has.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// One node.
    #[must_use]
    pub fn node(&self, index: usize) -> &Node {
        &self.nodes[index]
    }

    /// The backing directory.
    #[must_use]
    pub fn backing(&self) -> &Path {
        &self.backing
    }

    /// The directory that holds everything of this cluster.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.real
    }

    /// An `ebb` command line in the surroundings of this cluster.
    #[must_use]
    pub fn ebb(&self) -> Command {
        ebb_command(&self.real)
    }

    /// Runs `ebb` with these arguments.
    #[must_use]
    pub fn run_ebb(&self, arguments: &[&str]) -> Output {
        self.ebb().args(arguments).output().expect("ebb can be started")
    }

    /// Unmounts every node in reverse order, so that the service ends last.
    ///
    /// # Panics
    /// When one does not end with everything on the backing.
    pub fn umount_all(&self) {
        self.nodes.iter().rev().for_each(Node::umount);
    }

    /// The address of the separate metadata service.
    #[must_use]
    pub fn meta_address(&self) -> Option<&str> {
        self.meta.as_ref().map(|m| m.address.as_str())
    }

    /// True when the metadata service is a process of its own.
    #[must_use]
    pub fn has_meta(&self) -> bool {
        self.meta.is_some()
    }

    /// The process of the separate metadata service.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn meta_pid(&self) -> u32 {
        self.meta.as_ref().expect("a cluster with a separate service").child.id()
    }

    /// Sends a signal to the separate metadata service; after one that stops it, it stands still.
    ///
    /// # Panics
    /// When there is none.
    pub fn signal_meta(&self, signal: Signal) {
        signal_process(self.meta_pid(), signal);
    }

    /// Kills the separate metadata service, as a crash would.
    pub fn kill_meta(&mut self) {
        let meta = self.meta.as_mut().expect("a cluster with a separate service");
        let _ = meta.child.kill();
        let _ = meta.child.wait();
    }

    /// Starts the killed metadata service again, on its state and its address.
    pub fn restart_meta(&mut self) {
        let meta = self.meta.as_mut().expect("a cluster with a separate service");
        let command = meta.command.clone();
        let (child, address) = self.spawn_meta(&command);
        let meta = self.meta.as_mut().expect("checked above");
        assert_eq!(address, meta.address, "it must come back where it was");
        meta.child = child;
    }

    /// Starts the killed metadata service anew, with what so many nodes know.
    pub fn rebuild_meta(&mut self, nodes: usize) {
        let meta = self.meta.as_mut().expect("a cluster with a separate service");
        let mut command = meta.command.clone();
        command.splice(1..1, ["--rebuild".to_owned(), nodes.to_string()]);
        let (child, address) = self.spawn_meta(&command);
        let meta = self.meta.as_mut().expect("checked above");
        assert_eq!(address, meta.address, "it must come back where it was");
        meta.child = child;
    }

    /// Starts the service of another job, with a token of its own, where the killed one was.
    ///
    /// # Panics
    /// When there is no separate service, or the other one does not start.
    #[must_use]
    pub fn start_stranger(&self) -> Stranger {
        let address = self.meta_address().expect("a cluster with a separate service");
        let token = self.real.join("another token");
        if !token.exists() {
            let made = self.ebb().arg("token").arg(&token).output().expect("ebb token");
            assert!(made.status.success(), "ebb token: {}", describe(&made));
        }
        let path = |p: &Path| p.display().to_string();
        let line = [
            ["meta".to_owned(), "--state".to_owned()],
            [path(&self.real.join("strange state")), "--token-file".to_owned()],
            [path(&token), path(&self.backing)],
            ["--listen".to_owned(), address.to_owned()],
        ];
        Stranger(self.spawn_meta(&line.concat()).0)
    }

    /// The directory of the separate service's state.
    #[must_use]
    pub fn meta_state(&self) -> PathBuf {
        self.state.clone()
    }

    fn terms(&self) -> String {
        format!("dir:{}", self.real.join("terms").display())
    }

    /// Starts the service anew, on another port and with a state elsewhere, as on another machine. The one before
    /// it is as it is.
    ///
    /// # Panics
    /// When there is no separate service, or it does not start.
    pub fn begin_meta_elsewhere(&mut self, state: &str, extra: &[&str]) -> Stranger {
        let (mut command, state) = self.meta_command_elsewhere(state);
        self.state = state;
        let listen = ["--listen".to_owned(), "127.0.0.1:0".to_owned()];
        let extra = extra.iter().map(|part| (*part).to_owned());
        let line = command[..1].iter().cloned().chain(extra).chain(command[1..].iter().cloned());
        let (child, address) = self.spawn_meta(&line.chain(listen).collect::<Vec<_>>());
        command.extend(["--listen".to_owned(), address.clone()]);
        let before = self.meta.replace(Meta { child, address, command });
        Stranger(before.expect("checked above").child)
    }

    /// The command of the service with its state elsewhere, and without its address.
    fn meta_command_elsewhere(&self, state: &str) -> (Vec<String>, PathBuf) {
        let before = self.meta.as_ref().expect("a cluster with a separate service");
        let (old, state) = (self.state.display().to_string(), self.real.join(state));
        let mut command = before.command.clone();
        for part in command.iter_mut().filter(|part| **part == old) {
            *part = state.display().to_string();
        }
        command.retain(|part| part != "--listen" && *part != before.address);
        (command, state)
    }

    /// Starts a standby of the service, with its copy elsewhere.
    ///
    /// # Panics
    /// When there is no separate service, or it does not start.
    #[must_use]
    pub fn start_standby(&self, state: &str) -> Standby {
        let (command, state) = self.meta_command_elsewhere(state);
        let more = ["--listen", "127.0.0.1:0", "--standby"].map(str::to_owned);
        let child = start(&self.real, self.meta_command(&[&command[..], &more].concat()));
        Standby::heard(child, state, command)
    }

    /// A standby that has taken over is the service from now on. Comes back with the one before.
    ///
    /// # Panics
    /// When it has not.
    pub fn is_succeeded_by(&mut self, standby: Standby, limit: Duration) -> Stranger {
        let line = standby.says("listening on ", limit);
        let address = address_in(&line).expect("an address");
        let Standby { mut process, state, mut command, .. } = standby;
        command.extend(["--listen".to_owned(), address.clone()]);
        let meta = self.meta.as_mut().expect("a cluster with a separate service");
        std::mem::swap(&mut meta.child, &mut process.0);
        (meta.address, meta.command, self.state) = (address, command, state);
        process
    }

    fn start_meta(
        &mut self,
        options: &[String],
        lease: Option<&str>,
        terms: Option<&str>,
    ) -> String {
        let mut command: Vec<String> = ["meta", "--state"].into_iter().map(str::to_owned).collect();
        command.push(self.state.display().to_string());
        if let Some(lease) = lease {
            command.extend(["--lease".to_owned(), lease.to_owned()]);
        }
        if let Some(terms) = terms {
            command.extend(["--coordinator".to_owned(), terms.to_owned()]);
        }
        for name in ["--token-file", "--secure", "--inodes-max"] {
            if let Some(at) = options.iter().position(|o| o == name) {
                command.extend_from_slice(&options[at..at + 2]);
            }
        }
        command.push(self.backing.display().to_string());
        command.push("--listen".to_owned());
        let host = self.network.as_ref().map(|n| n.host(Port::Service));
        let host = host.unwrap_or_else(|| "127.0.0.1".to_owned());
        let any = [command.clone(), vec![format!("{host}:0")]].concat();
        let (child, address) = self.spawn_meta(&any);
        command.push(address.clone());
        self.meta = Some(Meta { child, address: address.clone(), command });
        address
    }

    fn spawn_meta(&self, arguments: &[String]) -> (Child, String) {
        spawn_meta(&self.real, self.meta_command(arguments))
    }

    fn meta_command(&self, arguments: &[String]) -> Command {
        let mut command = ebb_command(&self.real);
        command.args(arguments);
        match &self.network {
            Some(network) => entered(&command, network, Port::Service),
            None => command,
        }
    }
}

/// A port that is free, as the one after it, where the service will listen.
fn free_port() -> u16 {
    loop {
        let probe = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = probe.local_addr().expect("it has one").port();
        // Not one of those that the kernel gives to whoever connects.
        let port = 10_000 + port % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok()
            && TcpListener::bind(("127.0.0.1", port + 1)).is_ok()
        {
            return port;
        }
    }
}

/// Starts `ebb meta` and reads the address that it prints.
/// Where a service says that it listens.
fn address_in(line: &str) -> Option<String> {
    let said = line.trim().strip_prefix("ebb meta: listening on ")?;
    said.split(' ').next().map(str::to_owned)
}

/// A service, with its standard output in a pipe and the rest in a log.
fn start(root: &Path, mut command: Command) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(root.join("meta.log"));
    let log = log.expect("the service's log");
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    command.spawn().expect("ebb meta can be started")
}

fn spawn_meta(root: &Path, command: Command) -> (Child, String) {
    let mut child = start(root, command);
    let stdout = BufReader::new(child.stdout.take().expect("it was piped"));
    let mut line = String::new();
    for said in stdout.lines().map_while(Result::ok) {
        line = said;
        if !line.starts_with("ebb meta: waiting") {
            break;
        }
    }
    let address = address_in(&line).unwrap_or_else(|| {
        let log = std::fs::read_to_string(root.join("meta.log")).unwrap_or_default();
        panic!("ebb meta said {line:?}; its log:\n{log}")
    });
    (child, address)
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.nodes.iter().for_each(Node::show_log);
        }
        // First the daemons: a dead mount cannot block, a living one may.
        self.nodes.iter().for_each(Node::kill_quietly);
        if let Some(meta) = &mut self.meta {
            let _ = meta.child.kill();
            let _ = meta.child.wait();
        }
        let is_clear = mounts::wait_until(Duration::from_secs(5), || mounts::clear(&self.real));
        let wanted = std::thread::panicking() && std::env::var_os("EBB_TEST_KEEP").is_some();
        match self.root.take() {
            Some(root) if wanted => eprintln!("kept: {}", root.keep().display()),
            Some(root) if is_clear => drop(root),
            // Removing files through a mount that is still there would remove the backing's.
            Some(root) => eprintln!("still mounted, kept: {}", root.keep().display()),
            None => {}
        }
    }
}

/// A member of a status object that must be there.
///
/// # Panics
/// When it is not.
#[must_use]
pub fn number(status: &Value, key: &str) -> u64 {
    status[key].as_u64().unwrap_or_else(|| panic!("no number '{key}' in {status:#}"))
}
