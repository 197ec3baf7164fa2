//! The life of a daemon: everything is brought up in order, the mount is served, and everything
//! is taken down in order.
//!
//! Consistency: a mount that answers has a session with the service. Cancellation: unmounting
//! (by command, signal or `umount`) is the only way to end; draining comes before it and after
//! it, because applications can write in between. Crash: what is in the cache stays there.

use crate::cache::CacheDir;
use crate::carrier;
use crate::config::{IoMode, MountConfig, TrackerMode};
use crate::control::{Outcome, Remaining};
use crate::control_server;
use crate::ending::{FLUSHER_ENDS_WITHIN, finish, leave};
use crate::exposition;
use crate::flush_source::NodeSource;
use crate::fuse::{self, Mounted};
use crate::ledger::Ledger;
use crate::leftover;
use crate::memory;
use crate::node::{Node, Parts};
use crate::ops::passing::Bypass;
use crate::peer_source::PeerSource;
use crate::references::References;
use crate::registry::{self, Record};
use crate::replica;
use crate::rules::Rules;
use crate::status::{self, Status};
use crate::takeover;
use ebb_backend::{Backend, PosixDir};
use ebb_flusher::{Activity, Engine, Options, Policy};
use ebb_handover::{Heirloom, Inheritance, Word};
use ebb_meta_client::{ConnectError, ConnectOptions};
use ebb_transport::side_door::SideDoor;
use ebb_transport::{PeerServing, Token};
use ebb_types::{Incarnation, NodeId};
use std::io;
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long a fresh mount may take to answer.
const MOUNT_ANSWERS_WITHIN: Duration = Duration::from_secs(20);

/// A mount that is busy, but not by an open file or a directory that somebody is in: a call on its
/// way (a `stat`, a close) that ends soon.
const UNSEEN_USERS_LEAVE_WITHIN: Duration = Duration::from_secs(2);

/// What is known once a mount answers.
#[derive(Clone, Debug)]
pub struct Ready {
    /// This node's name.
    pub node: String,
    /// Address of the metadata service.
    pub meta: String,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
}

/// Why a daemon did not start, or how it ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A flag or file of the user's is wrong.
    #[error("{0}")]
    Config(String),
    /// Something on this machine failed.
    #[error("{what}: {cause}")]
    Local {
        /// What was tried, on which path.
        what: String,
        /// What came of it.
        cause: io::Error,
    },
    /// The service cannot be reached or does not want this node.
    #[error(transparent)]
    Meta(#[from] ConnectError),
    /// The mount did not come up.
    #[error(transparent)]
    Mount(#[from] fuse::MountError),
    /// The service has told this node to go, or is not this job's.
    #[error("{0}")]
    Fenced(String),
    /// The mount is gone, but not everything is on the backing.
    #[error("{bytes} bytes of {files} files are not on the backing; they are kept in {cache}")]
    Undrained {
        /// How many bytes.
        bytes: u64,
        /// Of how many files.
        files: usize,
        /// Where they are.
        cache: PathBuf,
        /// Which, and why.
        left: Vec<Remaining>,
    },
}

impl RunError {
    /// The exit status of the command.
    #[must_use]
    pub fn exit_code(&self) -> i32 {
        match self {
            RunError::Config(_) => 2,
            RunError::Meta(cause) if !cause.may_pass() => 2,
            RunError::Meta(_) => 5,
            RunError::Undrained { .. } => 3,
            RunError::Local { .. } | RunError::Mount(_) | RunError::Fenced(_) => 1,
        }
    }
}

pub(crate) fn local(what: impl Into<String>) -> impl FnOnce(io::Error) -> RunError {
    let what = what.into();
    move |cause| RunError::Local { what, cause }
}

/// A daemon that runs, as the control socket sees it.
pub struct Daemon {
    /// The node.
    pub node: Arc<Node>,
    /// Its flusher.
    pub flusher: Arc<Engine>,
    /// Held by control clients that are being served.
    pub busy: Arc<()>,
    pub(crate) peers: Box<dyn PeerServing>,
    mountpoint: PathBuf,
    /// How it ended, once it has.
    pub(crate) ended: watch::Sender<Option<Outcome>>,
    /// False after `umount --no-drain`.
    pub(crate) drain_at_end: std::sync::atomic::AtomicBool,
}

impl Daemon {
    /// The books of this node.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        Ledger::of(&self.node, &self.flusher.status())
    }

    /// Everything that can be measured, as Prometheus text.
    pub async fn prometheus(&self) -> String {
        exposition::text(&self.status().await, &self.node.metrics)
    }

    /// The status object.
    pub async fn status(&self) -> Status {
        status::collect(&self.node, &self.flusher, self.peers.stats()).await
    }

    /// Ends this process, so that its supervisor starts another one.
    pub(crate) fn make_way(&self) -> Outcome {
        let heir = self.node.heir.get().filter(|h| h.is_handed_over() && h.has_supervisor());
        let Some(heir) = heir.cloned() else {
            let text = "there is no supervisor that could start another daemon".into();
            return Outcome::Failed { text };
        };
        self.node.runtime.spawn(async move {
            // The client hears of it first.
            tokio::time::sleep(Duration::from_millis(50)).await;
            heir.say(&Word::Ending("a restart was asked for".into()));
            end_now();
        });
        Outcome::Ok { bytes: 0, files: 0 }
    }

    /// Takes the mount away and waits until the daemon has ended.
    pub async fn unmount(&self, drain: bool) -> Outcome {
        use std::sync::atomic::Ordering::Release;
        self.drain_at_end.store(drain, Release);
        if let Err(text) = self.take_mount_away().await {
            self.drain_at_end.store(true, Release);
            return Outcome::Failed { text };
        }
        let mut ended = self.ended.subscribe();
        let outcome = ended.wait_for(Option::is_some).await.map(|o| o.clone());
        outcome.ok().flatten().unwrap_or(Outcome::Failed { text: "the daemon ended".into() })
    }

    fn mount_was_taken_away(&self) {
        if let Some(tell) = self.node.mount_moments.get() {
            // Nobody waits when it has ended already.
            let _ = tell.send(fuse::Moment::TakenAway);
        }
    }

    async fn take_mount_away(&self) -> Result<(), String> {
        let shown = self.mountpoint.display();
        let until = Instant::now() + UNSEEN_USERS_LEAVE_WITHIN;
        loop {
            let at = self.mountpoint.clone();
            let unmounted = tokio::task::spawn_blocking(move || fuse::unmount(&at, false)).await;
            match unmounted.map_err(|e| e.to_string())? {
                Ok(()) => {
                    self.mount_was_taken_away();
                    return Ok(());
                }
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) => return Err(format!("cannot unmount {shown}: {e}")),
            }
            let users = crate::busy::users_of(&self.mountpoint).await;
            if !users.is_empty() || Instant::now() >= until {
                let who = if users.is_empty() { "a process".into() } else { users.join(", ") };
                let advice = "end it or leave the directory, then try again";
                return Err(format!("{shown} is in use by {who}: {advice}"));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Ends this process as a crash would: what must survive does so at any moment.
pub(crate) fn end_now() -> ! {
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    std::process::abort()
}

/// Where the metadata service is.
#[derive(Clone, Debug)]
pub struct MetaAt {
    /// HOST:PORT.
    pub address: String,
    /// A way to it that does not go over the network, when it is in this process.
    pub side_door: Option<SideDoor>,
}

/// Runs a daemon until it is unmounted. Blocks the calling thread.
pub fn run(
    config: MountConfig,
    meta: MetaAt,
    heir: Option<Arc<Heirloom>>,
    on_ready: Box<dyn FnOnce(&Ready) + Send>,
) -> Result<(), RunError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(crate::aside::THREADS)
        .thread_name("ebb-node")
        .enable_all()
        .build()
        .map_err(local("cannot start the runtime"))?;
    let result = run_on(&runtime, config, meta, heir, on_ready);
    // Reads of a hanging backing must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

fn run_on(
    runtime: &tokio::runtime::Runtime,
    config: MountConfig,
    meta: MetaAt,
    heir: Option<Arc<Heirloom>>,
    on_ready: Box<dyn FnOnce(&Ready) + Send>,
) -> Result<(), RunError> {
    let ready = Ready {
        node: config.node.clone(),
        meta: meta.address.clone(),
        mountpoint: config.mountpoint.clone(),
    };
    let (daemon, mounted) = start(runtime, config, meta, heir.clone())?;
    let fenced = watch_for_fencing(runtime, &daemon);
    if let Some(heir) = &heir {
        heir.say(&Word::Up);
        watch_supervisor(heir);
    }
    on_ready(&ready);
    if let Err(e) = mounted.wait(&daemon.node) {
        tracing::warn!(error = %e, "the mount ended with an error");
    }
    if let Some(heir) = &heir {
        heir.say(&Word::Leaving);
    }
    let fenced = fenced.borrow().clone();
    let result = match fenced {
        Some(reason) => {
            daemon.flusher.shutdown(FLUSHER_ENDS_WITHIN);
            daemon.node.last_notes();
            Err(RunError::Fenced(reason))
        }
        None => finish(runtime, &daemon),
    };
    leave(runtime, &daemon, &result);
    result
}

/// Everything up to a mount that answers. On an error everything is taken down again.
fn start(
    runtime: &tokio::runtime::Runtime,
    config: MountConfig,
    meta: MetaAt,
    heir: Option<Arc<Heirloom>>,
) -> Result<(Arc<Daemon>, Mounted), RunError> {
    let _in_runtime = runtime.enter();
    let rules = Rules::new(&config).map_err(|e| RunError::Config(e.to_string()))?;
    let token = match &config.token_file {
        Some(path) => {
            Some(Arc::new(Token::load(path).map_err(|e| RunError::Config(e.to_string()))?))
        }
        None => None,
    };
    let mut left = leftover::of(&config)?;
    let inherited = inheritance(heir.as_deref(), &config.cache, &mut left)?;
    let cache = CacheDir::open(&config.cache)
        .map_err(local(format!("cannot use the cache {}", config.cache.display())))?;
    cache.medium.checksums.store(config.checksums, std::sync::atomic::Ordering::Relaxed);
    let backing: Arc<dyn Backend> =
        Arc::new(PosixDir::open_root(&config.backing).map_err(|e| RunError::Local {
            what: format!("cannot use the backing {}", config.backing.display()),
            cause: e.errno().into(),
        })?);
    let listener = listen(runtime, &peer_address(&config, heir.as_deref()))?;
    let peer_address = listener.local_addr().map_err(local("peer socket"))?;
    let config = MountConfig { listen: peer_address.to_string(), ..config };
    let life = incarnation();
    let empty = inherited.is_none()
        && left.is_empty()
        && !left.has_untold()
        && !left.has_nameless()
        && !replica::are_left_in(&config.cache);
    let options = ConnectOptions {
        incarnation: life,
        heir_of: inherited.as_ref().map(|i| i.lives.clone()).unwrap_or_default(),
        first_request: heir.as_ref().map_or(1, |h| h.first_number().max(1)),
        peer_address: peer_address.to_string(),
        consistency: rules.describe(),
        token: token.clone(),
        secure: config.secure,
        request_timeout: config.request_timeout,
        trust_max: if config.naive { Duration::ZERO } else { config.request_timeout / 2 },
        empty,
        listens: true,
        side_door: meta.side_door,
        ..ConnectOptions::new(meta.address, config.node.clone())
    };
    let patience = if empty { Duration::ZERO } else { takeover::JOIN_WITHIN };
    if let Some(heir) = &heir {
        heir.joining(life);
        heir.peers_come_to(&config.listen);
    }
    let (meta, welcome) = runtime.block_on(takeover::join(options, patience))?;
    if let Some(heir) = &heir {
        heir.joined(life);
    }
    check_same_backing(&config, welcome.backing_dev_ino)?;
    let activity = Activity::new();
    let (transport, tcp_because) = carrier::transport(&config)?;
    let node = Node::new(Parts {
        me: NodeId(welcome.node_id),
        meta,
        peers: transport.channel(token.clone()),
        backing: Arc::clone(&backing),
        cache,
        rules,
        activity: Arc::clone(&activity),
        runtime: runtime.handle().clone(),
        config,
    });
    let _ = node.references.set(References::new(token.clone(), welcome.job));
    if let Some(why) = tcp_because {
        let _ = node.tcp_because.set(why);
    }
    if let Some(heir) = &heir {
        let _ = node.heir.set(Arc::clone(heir));
        node.handles.outlive(Arc::clone(heir));
        let notes = node.config.cache.join("awaited");
        node.awaited.begin(&notes, inherited.is_some()).map_err(local("notes of awaited names"))?;
    }
    node.replicas.held.load(welcome.job).map_err(local("copies of other nodes"))?;
    takeover::take_over(runtime, &node, &mut left, &welcome, inherited.as_ref())?;
    // Before the flusher looks at files that only those have who have them open.
    if let (Some(heir), Some(inherited)) = (&heir, &inherited) {
        takeover::go_on(runtime, &node, heir, inherited)?;
    }
    runtime.block_on(node.publish_what_was_begun());
    node.begun.send_replace(true);
    runtime.spawn(Node::keep_telling(Arc::downgrade(&node)));
    runtime.spawn(Node::keep_reasserting(Arc::downgrade(&node)));
    node.metrics.taken_over.store(node.local_bytes().0, std::sync::atomic::Ordering::Relaxed);
    let source = Arc::new(PeerSource(Arc::downgrade(&node)));
    let peers = transport
        .serve(listener, source, token)
        .map_err(|e| RunError::Config(format!("--listen: {e}")))?;
    let source = Arc::new(NodeSource(Arc::downgrade(&node)));
    let engine =
        Engine::start(flush_options(&node), policy(&node.config), activity, backing, source)
            .map_err(local("cannot start the flusher"))?;
    let flusher = Arc::new(engine);
    let _ = node.flusher.set(Arc::clone(&flusher));
    let config = &node.config;
    let mounted = fuse::mount(Arc::clone(&node))?;
    let daemon = Arc::new(Daemon {
        mountpoint: config.mountpoint.clone(),
        flusher,
        busy: Arc::new(()),
        peers,
        ended: watch::Sender::new(None),
        drain_at_end: true.into(),
        node: Arc::clone(&node),
    });
    let _ = node.daemon.set(Arc::downgrade(&daemon));
    crate::watchdog::start(Arc::downgrade(&node));
    runtime.spawn(crate::ops::few::keep_few(Arc::downgrade(&node)));
    runtime.spawn(crate::medium::watch(Arc::downgrade(&node)));
    match open_doors(runtime, &daemon, &mounted, inherited.is_some()) {
        Ok(()) => Ok((daemon, mounted)),
        // The supervisor tries once more.
        Err(e) if inherited.is_some() => Err(e),
        Err(e) => {
            if let Some(heir) = &heir {
                heir.say(&Word::Leaving);
            }
            if fuse::unmount(&daemon.mountpoint, true).is_ok() {
                daemon.mount_was_taken_away();
            }
            let _ = mounted.wait(&daemon.node);
            Err(e)
        }
    }
}

/// What a daemon before this one left to it, with the end of its journal.
fn inheritance(
    heir: Option<&Heirloom>,
    cache: &Path,
    left: &mut leftover::Leftover,
) -> Result<Option<Inheritance>, RunError> {
    let inherited = match heir {
        Some(heir) => heir.inheritance().map_err(local("what the dead daemon left"))?,
        None => None,
    };
    if let Some(inherited) = &inherited {
        *left = leftover::read_noted(cache)?;
        left.go_on(&ebb_node_journal::records(&inherited.records));
    }
    Ok(inherited)
}

/// Where peers reach this node: where they reached the daemons before this one.
fn peer_address(config: &MountConfig, heir: Option<&Heirloom>) -> String {
    let before = heir.map(|h| h.addresses().1).unwrap_or_default();
    if before.is_empty() { config.listen.clone() } else { before }
}

/// The control socket, the registry, and a look whether a new mount answers. Not one that was taken
/// over: a daemon that is killed while it waits for its own mount does not end before another one
/// answers, and that one cannot begin while the cache is in use.
fn open_doors(
    runtime: &tokio::runtime::Runtime,
    daemon: &Arc<Daemon>,
    mounted: &Mounted,
    goes_on: bool,
) -> Result<(), RunError> {
    let config = &daemon.node.config;
    let path = config.cache.join("control.sock");
    let listener = control_server::bind(&path)
        .map_err(local(format!("cannot open the control socket {}", path.display())))?;
    runtime.spawn(control_server::serve(listener, Arc::clone(daemon)));
    runtime.spawn(memory::trim_when_idle(Arc::downgrade(&daemon.node)));
    runtime.spawn(Node::tend_copies(Arc::downgrade(&daemon.node)));
    if !goes_on {
        wait_for_the_mount(runtime, config.mountpoint.clone())?;
    }
    mounted.probe(&daemon.node);
    if let (IoMode::Passthrough, Some(why)) = (config.io_path, daemon.node.paths.obstacle()) {
        return Err(RunError::Config(format!("--io-path passthrough is not possible here: {why}")));
    }
    if let (TrackerMode::On, Err(why)) = (config.tracker, daemon.node.paths.telling.state()) {
        return Err(RunError::Config(format!("--tracker on is not possible here: {why}")));
    }
    daemon.node.activity.add_source(Arc::new(Bypass(Arc::downgrade(&daemon.node))));
    let pid = std::process::id();
    registry::enter(&Record {
        pid,
        started: registry::process_start(pid).unwrap_or(0),
        mountpoint: config.mountpoint.clone(),
        socket: path,
        cache: config.cache.clone(),
        supervisor: supervisor_of(&daemon.node),
    })
    .map_err(local("cannot write the registry of mounts"))
}

fn wait_for_the_mount(runtime: &tokio::runtime::Runtime, at: PathBuf) -> Result<(), RunError> {
    let answers = runtime.block_on(async move {
        let look = tokio::task::spawn_blocking(move || std::fs::metadata(at));
        tokio::time::timeout(MOUNT_ANSWERS_WITHIN, look).await
    });
    match answers {
        Ok(Ok(Ok(_))) => Ok(()),
        Ok(Ok(Err(e))) => Err(local("the new mount answers with an error")(e)),
        _ => Err(local("the new mount does not answer")(io::ErrorKind::TimedOut.into())),
    }
}

fn supervisor_of(node: &Node) -> Option<registry::Process> {
    let pid = node.heir.get()?.supervisor;
    Some(registry::Process { pid, started: registry::process_start(pid)? })
}

fn listen(
    runtime: &tokio::runtime::Runtime,
    address: &str,
) -> Result<tokio::net::TcpListener, RunError> {
    let wrong = |e| RunError::Config(format!("--listen {address}: {e}"));
    let resolved = address.to_socket_addrs().map_err(wrong)?.next();
    let Some(at) = resolved else {
        return Err(RunError::Config(format!("--listen {address}: no such address")));
    };
    runtime.block_on(tokio::net::TcpListener::bind(at)).map_err(wrong)
}

pub(crate) fn incarnation() -> Incarnation {
    let mut bytes = [0; 8];
    // Uniqueness is all that is asked of it; the clock serves where randomness fails.
    if getrandom::fill(&mut bytes).is_err() {
        let now = std::time::UNIX_EPOCH.elapsed().map_or(1, |d| d.as_nanos() as u64);
        return Incarnation(now | 1);
    }
    Incarnation(u64::from_le_bytes(bytes) | 1)
}

/// A job whose nodes look at different directories would mix them up.
pub(crate) fn check_same_backing(config: &MountConfig, of_service: u64) -> Result<(), RunError> {
    use std::os::unix::fs::MetadataExt;
    let what = format!("cannot look at the backing {}", config.backing.display());
    let mine = std::fs::metadata(&config.backing).map_err(local(what))?.ino();
    if of_service != 0 && mine != of_service {
        return Err(RunError::Config(format!(
            "{} is not the directory that the metadata service serves (inode {mine}, there {of_service})",
            config.backing.display()
        )));
    }
    Ok(())
}

/// How the flusher works on this node.
fn flush_options(node: &Node) -> Options {
    let (config, usual) = (&node.config, Options::default());
    Options {
        threads: config.flush_threads,
        bandwidth_cap: config.flush_bandwidth.map(|s| s.0),
        nice: config.flush_nice,
        io_class: config.flush_io,
        read_back: config.verify,
        // Room is made grant by grant: a small buffer needs small ones.
        grant_bytes: usual.grant_bytes.min(node.capacity() / 16),
        ..usual
    }
}

pub(crate) fn policy(config: &MountConfig) -> Policy {
    Policy {
        kind: config.flush,
        wait_interval: config.wait_interval,
        waiting: config.waiting,
        period: config.wait_interval,
        low: config.low_watermark,
        high: config.high_watermark,
    }
}

/// A node that another daemon has replaced must not touch anything any more. Its mount stays, and every
/// operation in it fails: were it taken away, programs would go on in the directory below, where
/// nobody looks. `ebb umount` ends it.
fn watch_for_fencing(
    runtime: &tokio::runtime::Runtime,
    daemon: &Arc<Daemon>,
) -> watch::Receiver<Option<String>> {
    let (sender, receiver) = watch::channel(None);
    let daemon = Arc::clone(daemon);
    runtime.spawn(async move {
        let reason = daemon.node.meta.fenced().await;
        daemon.node.is_out.store(true, std::sync::atomic::Ordering::Release);
        tracing::error!(
            %reason,
            "this node is out of the job: its mount answers nothing but errors until ebb umount"
        );
        let _ = sender.send(Some(reason));
        daemon.peers.stop();
    });
    receiver
}

/// A daemon whose supervisor is gone goes on.
fn watch_supervisor(heir: &Arc<Heirloom>) {
    let heir = Arc::clone(heir);
    let watch = std::thread::Builder::new().name("supervisor".into()).spawn(move || {
        heir.wait_for_its_end();
        tracing::warn!("the supervisor is gone: nobody would go on after this daemon");
    });
    if let Err(e) = watch {
        tracing::warn!(error = %e, "the supervisor is not watched");
    }
}
