//! What a daemon says about itself: the object of `ebb status --json`.

use crate::carrier::Carriers;
use crate::config::IoMode;
use crate::ledger::Ledger;
use crate::node::Node;
use crate::passing::{Passing, Track};
use crate::replica::CopyStatus;
use ebb_flusher::{Engine, StopLatency, Working};
use ebb_transport::ServerStats;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

/// The status object. Fields may be added, never renamed.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Status {
    pub node: String,
    /// Its number in the job, which other nodes' status names.
    pub number: u32,
    pub consistency: String,
    pub backing: PathBuf,
    pub mountpoint: PathBuf,
    pub meta: String,
    pub listen: String,
    /// Which connections are encrypted: "on" (all), "loopback" (all but those over loopback), or
    /// "off" (none).
    pub secure: &'static str,
    pub encrypted: Encrypted,
    pub transport: Carriers,
    pub pid: u32,
    pub supervisor: Option<Supervisor>,
    /// Why there is none.
    pub unsupervised: Option<&'static str>,
    pub stuck: Stuck,
    pub dirty_bytes: u64,
    pub clean_bytes: u64,
    pub cache_bytes: u64,
    pub cache_capacity_bytes: u64,
    pub flushed_bytes: u64,
    pub fetched_bytes_peer: u64,
    pub fetched_bytes_backing: u64,
    pub served_bytes_peer: u64,
    pub served_reads_peer: u64,
    pub flush_policy: String,
    pub flush_state: String,
    pub activity: u64,
    pub open_files: usize,
    /// Opens so far, by the way that their reads and writes go.
    pub opens: BTreeMap<String, u64>,
    /// What keeps every file of this mount from being passed through, if anything.
    pub io_path_obstacle: Option<String>,
    /// Whether the kernel tells what is written past the daemon: "on", or why not.
    pub tracker: String,
    /// How often it did not tell all of it.
    pub tracker_losses: u64,
    /// Files that are open now; at most as many as fit on a screen or two.
    pub io_paths: Vec<OpenPath>,
    pub rpc: BTreeMap<String, u64>,
    pub leases: Leases,
    pub copies: CopyStatus,
    pub medium: Medium,
    /// What the node journal keeps of names that the backing may not have.
    pub names_noted: usize,
    pub peers: Vec<Peer>,
    pub errors: Vec<StatusError>,
    pub resident_bytes: u64,
    /// Files that this node knows, and how many it forgot so far.
    pub files: usize,
    pub files_forgotten: u64,
    pub ledger: Ledger,
    pub flush: Flush,
    pub dirty_files: Vec<DirtyEntry>,
    pub dirty_files_total: usize,
}

/// What is known of the disk of the cache.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Medium {
    /// Sums are kept of what is written.
    pub checksums: bool,
    /// How often the kernel told that something could not be written back.
    pub errors: u64,
    /// How often a block was found that is not what was written into it.
    pub damaged_blocks: u64,
    /// Bytes that are nowhere any more.
    pub lost_bytes: u64,
}

fn medium(node: &Node) -> Medium {
    let medium = &node.cache.medium;
    Medium {
        checksums: medium.checksums.load(Relaxed),
        errors: medium.errors.load(Relaxed),
        damaged_blocks: medium.damaged.load(Relaxed),
        lost_bytes: node.lost_bytes(),
    }
}

/// What went encrypted between this node and others, and the metadata service.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Encrypted {
    /// There is a token to make keys from.
    pub has_keys: bool,
    pub handshakes: u64,
    /// Connections that failed the handshake.
    pub refused: u64,
    /// Connections on which something came that the other end did not send.
    pub broken: u64,
    pub sent_bytes: u64,
    pub received_bytes: u64,
}

fn encrypted(node: &Node) -> Encrypted {
    let so_far = node.peers.encrypted();
    Encrypted {
        has_keys: node.peers.secure().is_some(),
        handshakes: so_far.handshakes,
        refused: so_far.refused,
        broken: so_far.broken,
        sent_bytes: so_far.sent_bytes,
        received_bytes: so_far.received_bytes,
    }
}

/// What the flusher is doing, in detail.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Flush {
    pub runs: u64,
    pub grants: u64,
    pub failed_grants: u64,
    pub verified_bytes: u64,
    pub in_flight: usize,
    pub working: Vec<Working>,
    /// From the first foreground operation to a flusher that has stopped.
    pub stop_latency: Option<StopLatency>,
}

/// Who starts another daemon when this one ends unexpectedly.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Supervisor {
    pub pid: u32,
    /// Daemons of this mount before this one.
    pub restarts: u32,
    /// How the last of them ended.
    pub reason: String,
    pub alive: bool,
}

/// Operations that take longer than they should.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Stuck {
    pub now: u64,
    pub ever: u64,
}

fn stuck(node: &Node) -> Stuck {
    let (now, ever) = node.watchdog.stuck();
    Stuck { now, ever }
}

fn unsupervised(node: &Node) -> Option<&'static str> {
    match node.heir.get() {
        None if node.config.io_path != IoMode::Daemon => Some("--io-path is not daemon"),
        None => Some("--supervise off"),
        Some(heir) if !heir.is_handed_over() => {
            Some("this kernel cannot send requests again; Linux 6.9 and later can")
        }
        Some(_) => None,
    }
}

fn supervisor(node: &Node) -> Option<Supervisor> {
    let heir = node.heir.get().filter(|h| h.is_handed_over())?;
    Some(Supervisor {
        pid: heir.supervisor,
        restarts: heir.restarts,
        reason: heir.reason.clone(),
        alive: heir.has_supervisor(),
    })
}

/// A file with bytes that are not on the backing.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct DirtyEntry {
    pub path: String,
    pub bytes: u64,
}

/// Largest dirty files that a status names.
const DIRTY_SHOWN: usize = 50;

/// What this node need not ask the metadata service.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Leases {
    pub held: usize,
    pub granted: u64,
    pub recalled: u64,
    /// Questions that a lease answered.
    pub answered: u64,
    /// Writes that were not told at once.
    pub quiet: u64,
    /// How often the service was told of such writes, or asked for the right to them.
    pub told: u64,
    /// Opens with which a file came to sit here.
    pub seats: u64,
    /// What was done at other nodes, because files sit there.
    pub at_seats: u64,
}

/// An open file and the way of its reads and writes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[allow(missing_docs)]
pub struct OpenPath {
    pub path: String,
    pub io_path: String,
    /// How writes past the daemon are found out, where there may be some: "told" by the kernel, or
    /// "looked-for".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writes: Option<&'static str>,
    pub handles: u64,
}

/// Open files that the status lists.
const OPEN_PATHS_MAX: usize = 100;

fn open_paths(node: &Node) -> Vec<OpenPath> {
    let mut counted: BTreeMap<(String, String, Option<&str>), u64> = BTreeMap::new();
    for handle in node.handles.all_files().into_iter().take(OPEN_PATHS_MAX) {
        let way = crate::passing::name(handle.path);
        let tracked = |p: &Passing| p.track.as_ref().map(Track::is_told);
        let told = handle.file.state.read().passing.as_ref().and_then(tracked);
        let writes = told.map(|told| if told { "told" } else { "looked-for" });
        *counted.entry((handle.file.label(), way, writes)).or_default() += 1;
    }
    let one = |((path, io_path, writes), handles)| OpenPath { path, io_path, writes, handles };
    counted.into_iter().map(one).collect()
}

/// Another node of the job.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Peer {
    pub name: String,
    pub address: String,
    pub alive: bool,
    /// As it told the service last, some seconds ago; nothing before it has told a service that just began.
    pub dirty_bytes: Option<u64>,
}

/// Something that went wrong and has not been made good yet.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct StatusError {
    pub path: String,
    pub operation: String,
    pub errno: i32,
    pub text: String,
    /// Seconds since 1970.
    pub since: u64,
}

/// Bytes of memory that this process holds.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|p| p.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// Collects the status. Asks the service for the peers, within a short deadline.
pub async fn collect(node: &Node, flusher: &Engine, served: ServerStats) -> Status {
    let (dirty, clean) = node.local_bytes();
    let flush = flusher.status();
    let asked = node.meta.nodes(None);
    let peers = tokio::time::timeout(std::time::Duration::from_secs(2), asked).await;
    let mut files = node.dirty_files();
    files.sort_by_key(|f| std::cmp::Reverse(f.bytes));
    let named = |f: &ebb_flusher::DirtyFile| {
        Some(DirtyEntry { path: node.file(f.ino)?.label(), bytes: f.bytes })
    };
    let mut errors: Vec<StatusError> = flush
        .errors
        .iter()
        .map(|e| StatusError {
            path: e.path.clone(),
            operation: e.operation.clone(),
            errno: e.errno,
            text: e.text.clone(),
            since: e.since.sec.unsigned_abs(),
        })
        .collect();
    let mut names = BTreeMap::new();
    let peers = match peers {
        Ok(Ok(nodes)) => nodes
            .into_iter()
            .filter(|n| n.id != node.me.0)
            .inspect(|n| drop(names.insert(n.id, n.name.clone())))
            .map(|n| Peer {
                name: n.name,
                address: n.peer_address,
                alive: n.alive,
                dirty_bytes: n.dirty_bytes,
            })
            .collect(),
        _ => {
            errors.push(unreachable_meta(node));
            Vec::new()
        }
    };
    let copies = node.copy_status(|n| names.get(&n.0).cloned());
    if let Some(degraded) = &copies.degraded {
        errors.push(StatusError {
            path: String::new(),
            operation: "copies with a partner".into(),
            errno: libc::EHOSTUNREACH,
            text: format!("unflushed bytes have no copy: {}", degraded.why),
            since: degraded.since,
        });
    }
    errors.extend(node.room.refused_since().map(|since| full_cache(node, since)));
    errors.extend(node.lost().into_iter().map(|lost| StatusError {
        path: lost.path,
        operation: "cache".into(),
        errno: libc::EIO,
        text: format!("{} bytes are lost: the disk of the cache failed", lost.bytes),
        since: lost.since,
    }));
    errors.extend(node.unheard().into_iter().map(|(path, unheard)| StatusError {
        path,
        operation: "write".into(),
        errno: libc::EIO,
        text: unheard.why(),
        since: unheard.since,
    }));
    Status {
        medium: medium(node),
        names_noted: node.journal.get().map_or(0, |journal| journal.facts()),
        copies,
        node: node.config.node.clone(),
        number: node.me.0,
        consistency: node.rules.job().name().to_string(),
        backing: node.config.backing.clone(),
        mountpoint: node.config.mountpoint.clone(),
        meta: node.meta.address().to_string(),
        listen: node.config.listen.clone(),
        secure: node.config.secure.word(),
        encrypted: encrypted(node),
        transport: Carriers::of(node.config.transport, node.tcp_because.get(), node.peers.rdma()),
        pid: std::process::id(),
        supervisor: supervisor(node),
        unsupervised: unsupervised(node),
        stuck: stuck(node),
        dirty_bytes: dirty,
        clean_bytes: clean,
        cache_bytes: dirty + clean,
        cache_capacity_bytes: node.capacity(),
        flushed_bytes: flush.flushed_bytes,
        fetched_bytes_peer: node.metrics.fetched_peer.load(Relaxed),
        fetched_bytes_backing: node.metrics.fetched_backing.load(Relaxed),
        served_bytes_peer: served.bytes_sent,
        served_reads_peer: served.requests,
        flush_policy: flush.policy.to_string(),
        flush_state: flush.state.name().to_string(),
        activity: flush.activity,
        open_files: node.handles.open_files(),
        opens: node.paths.counts(),
        io_path_obstacle: node.paths.obstacle().map(|r| r.name().to_string()),
        tracker: node.paths.telling.state().err().unwrap_or("on").to_string(),
        tracker_losses: node.paths.telling.losses(),
        io_paths: open_paths(node),
        rpc: node.meta.stats().calls.into_iter().map(|(k, v)| (k.to_string(), v)).collect(),
        leases: Leases {
            held: node.leases_held(),
            granted: node.leases.granted.load(Relaxed),
            recalled: node.leases.recalled.load(Relaxed),
            answered: node.leases.answered.load(Relaxed),
            quiet: node.leases.quiet.load(Relaxed),
            told: node.leases.told.load(Relaxed),
            seats: node.leases.seats.load(Relaxed),
            at_seats: node.leases.at_seats.load(Relaxed),
        },
        peers,
        errors,
        resident_bytes: resident_bytes(),
        files: node.files_known(),
        files_forgotten: node.room.forgotten(),
        ledger: Ledger::of(node, &flush),
        dirty_files: files.iter().take(DIRTY_SHOWN).filter_map(named).collect(),
        dirty_files_total: files.len(),
        flush: Flush {
            runs: flush.runs,
            grants: flush.grants,
            failed_grants: flush.failed_grants,
            verified_bytes: flush.verified_bytes,
            in_flight: flush.in_flight,
            working: flush.working,
            stop_latency: flush.stop_latency,
        },
    }
}

fn unreachable_meta(node: &Node) -> StatusError {
    let (errno, text) = match node.meta.refusal() {
        Some(why) => (libc::EIO, why),
        None => (libc::ETIMEDOUT, format!("{} does not answer", node.meta.address())),
    };
    StatusError {
        path: String::new(),
        operation: "metadata service".into(),
        errno,
        text,
        since: std::time::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_secs()),
    }
}

/// Writers fail for want of room that others have taken.
fn full_cache(node: &Node, since: u64) -> StatusError {
    let cache = node.config.cache.display();
    StatusError {
        path: cache.to_string(),
        operation: "write to the cache".into(),
        errno: libc::ENOSPC,
        text: format!(
            "the file system of --cache {cache} is full of other files: make room there (df, df -i)"
        ),
        since,
    }
}
