//! The daemon process: takes the cache, starts the embedded metadata service unless there is one
//! to join, runs the mount until it ends, and stays while the service still has other nodes.
//!
//! Signals: SIGTERM and SIGINT drain and unmount, for at most the stop timeout; a second one
//! unmounts at once and leaves what is dirty in the cache. While nothing is mounted yet they end
//! the process, and after the mount is gone they end the service.

use crate::cachedir;
use crate::client;
use crate::exit::{Context, Failure};
use crate::launch::{Report, Up};
use crate::lock::{Lock, Use};
use crate::plan::Plan;
use crate::service::Service;
use crate::{keeper, mounts, progress, unmount};
use ebb_fs_client::control::Request;
use ebb_fs_client::{MetaAt, leftover, registry};
use ebb_handover::Heirloom;
use ebb_locks::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

/// The phases of a daemon, for whoever gets a signal.
const STARTING: u8 = 0;
const MOUNTED: u8 = 1;
const LINGERING: u8 = 2;

/// Runs the daemon of a plan; `report` hears once, when the mount is up. `heir`: what a supervisor
/// gave to it.
pub fn run(
    plan: &Plan,
    heir: Option<Arc<Heirloom>>,
    report: impl FnOnce(Report) + Send + 'static,
) -> Result<(), Failure> {
    prepare_process();
    cachedir::prepare(&plan.config.cache)?;
    let lock = Lock::take(&plan.config.cache, &Use::Mount(plan.config.mountpoint.clone()))?;
    cachedir::refuse_unknown(&plan.config.cache)?;
    // Before a service is started, which would begin a new job.
    let plan = &successor(plan)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("service")
        .enable_all()
        .build()
        .or_failed("threads")?;
    let phase = Arc::new(AtomicU8::new(STARTING));
    let left_behind = watch_signals(&runtime, plan, phase.clone())?;
    if heir.is_some() {
        keeper::Signals::unblock();
    }
    let service = match &plan.config.meta {
        Some(_) => None,
        None => {
            let before = heir.as_ref().map(|h| h.addresses().0).unwrap_or_default();
            let service = Service::embedded(&runtime, plan, &before)?;
            if let Some(heir) = &heir {
                heir.meta_is_at(&service.bound.to_string());
            }
            Some(service)
        }
    };
    let at = match (&service, &plan.config.meta) {
        (Some(service), _) => service.at(),
        (None, Some(address)) => MetaAt { address: address.clone(), side_door: None },
        (None, None) => unreachable!("without an address a service was started"),
    };
    let ended = mount(plan, at, heir, phase.clone(), report)
        .and_then(|()| left_behind.lock().take().map_or(Ok(()), Err));
    phase.store(LINGERING, Ordering::SeqCst);
    if let Some(service) = service {
        let address = service.address().to_owned();
        let tell = |nodes: &str| say_who_stays(&lock, plan, &address, nodes);
        let nobody_needs_it = runtime.block_on(service.linger(&plan.config.node, tell));
        if ended.is_ok() && nobody_needs_it {
            forget_state(plan);
        }
    }
    runtime.shutdown_background();
    drop(lock);
    ended
}

/// Whoever wants the cache meanwhile is told why it cannot be had.
fn say_who_stays(lock: &Lock, plan: &Plan, address: &str, nodes: &str) {
    let (was, address) = (plan.config.mountpoint.clone(), address.to_owned());
    let said = lock.say(&Use::Service { was, address, nodes: nodes.to_owned() });
    if let Err(e) = said {
        tracing::warn!(error = %e, "what the cache is used for is not noted in it");
    }
}

/// The plan of a daemon that takes over what another one left: it goes by the same name.
fn successor(plan: &Plan) -> Result<Plan, Failure> {
    let mut plan = plan.clone();
    let left = leftover::of(&plan.config);
    let left = left.map_err(|e| Failure::with_status(e.exit_code(), e.to_string()))?;
    if left.is_empty() {
        return Ok(plan);
    }
    if let Some(node) = left.node().filter(|node| **node != plan.config.node) {
        tracing::info!("going on as node {node}, whose bytes are in the cache");
        plan.config.node = node.to_owned();
    }
    Ok(plan)
}

fn mount(
    plan: &Plan,
    meta: MetaAt,
    heir: Option<Arc<Heirloom>>,
    phase: Arc<AtomicU8>,
    report: impl FnOnce(Report) + Send + 'static,
) -> Result<(), Failure> {
    let on_ready = Box::new(move |ready: &ebb_fs_client::Ready| {
        phase.store(MOUNTED, Ordering::SeqCst);
        report(Report::Ready(Up {
            node: ready.node.clone(),
            meta: ready.meta.clone(),
            mountpoint: ready.mountpoint.clone(),
            pid: std::process::id(),
        }));
    });
    ebb_fs_client::run(plan.config.clone(), meta, heir, on_ready)
        .map_err(|e| Failure::with_status(e.exit_code(), e.to_string()))
}

/// Every file that is open in the mount is open in the cache, too.
pub fn allow_many_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, files) {
        tracing::warn!("the limit of open files stays low: {e}");
    }
}

/// What a process that serves others needs from the system; none of it is vital.
fn prepare_process() {
    // Files of the daemon itself are private; the modes of the user's files are set exactly.
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    allow_many_files();
    // Only the privileged may; the kernel should take the job's own processes first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-500");
}

/// What a drain that a signal began did not bring to the backing.
type LeftBehind = Arc<Mutex<Option<Failure>>>;

fn watch_signals(
    runtime: &Runtime,
    plan: &Plan,
    phase: Arc<AtomicU8>,
) -> Result<LeftBehind, Failure> {
    let left_behind = LeftBehind::default();
    let verdict = left_behind.clone();
    let _context = runtime.enter();
    let mut terminate = signal(SignalKind::terminate()).or_failed("signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).or_failed("signals")?;
    let point = plan.config.mountpoint.clone();
    let timeout = plan.stop_timeout.0;
    runtime.spawn(async move {
        let mut drain = true;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            match phase.load(Ordering::SeqCst) {
                MOUNTED => {
                    let (point, verdict) = (point.clone(), verdict.clone());
                    std::thread::spawn(move || stop(&point, drain, timeout, &verdict));
                    drain = false;
                }
                LINGERING => {
                    tracing::info!("told to end while other nodes still use the service");
                    std::process::exit(0);
                }
                _ => give_up_starting(&point),
            }
        }
    });
    Ok(left_behind)
}

/// Asks this very daemon to unmount, the way `ebb umount` does. A drain that cannot finish in
/// time ends without it: the bytes stay in the cache, and the log says so.
fn stop(point: &Path, drain: bool, timeout: Duration, verdict: &LeftBehind) {
    tracing::info!(drain, "told by a signal to unmount {}", point.display());
    let asked = ask_to_unmount(point, drain, timeout);
    let Err(failure) = asked else { return };
    tracing::error!("{failure}");
    *verdict.lock() = Some(failure);
    if drain && let Err(e) = ask_to_unmount(point, false, client::SHORT) {
        tracing::error!("without draining: {e}");
    }
}

fn ask_to_unmount(point: &Path, drain: bool, timeout: Duration) -> Result<(), Failure> {
    let record = client::daemon_of(point)?;
    let request = Request::Unmount { drain, timeout_ms: Some(unmount::millis(timeout)) };
    let limit = Some(timeout.saturating_add(client::SHORT));
    let outcome = client::ask(&record, &request, limit, |_| {})?;
    progress::judge(&format!("umount {}", point.display()), outcome).map(drop)
}

/// Ends a daemon whose mount is not up yet, and leaves nothing behind.
fn give_up_starting(point: &Path) -> ! {
    tracing::warn!("told by a signal to end before the mount was up");
    if matches!(mounts::at(point), Ok(Some(m)) if m.is_ebb()) {
        let _ = mounts::lazy_unmount(point);
    }
    if let Ok(Some(record)) = registry::find(point)
        && record.pid == std::process::id()
    {
        let _ = std::fs::remove_file(&record.socket);
        let _ = registry::leave(point);
    }
    std::process::exit(1);
}

/// After an end with everything on the backing nothing in the service's own journal matters.
/// A directory that the user named is the user's.
fn forget_state(plan: &Plan) {
    if plan.own_state {
        let state = &plan.config.state;
        if let Err(e) = std::fs::remove_dir_all(state) {
            tracing::warn!("{}: {e}", state.display());
        }
    }
}
