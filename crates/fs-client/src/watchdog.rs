//! Notices what is stuck: every operation that has been in the daemon for longer than a bound is
//! named once in the log, with what it may wait for, and counted. When no event loop can answer
//! any more, or the runtime does nothing more, and a supervisor is there, the daemon ends, so that
//! another one is asked.
//!
//! Waiting for a lock may take for ever and is nobody's fault; it is not watched.

use crate::metrics::Operation;
use crate::node::Node;
use ebb_handover::Word;
use ebb_locks::Mutex;
use std::collections::HashMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often it looks.
const LOOK: Duration = Duration::from_millis(500);

/// Event loops that can be watched; there are no more (`--fuse-threads`).
const LOOPS_MAX: usize = 64;

/// So many of these deadlines one operation may need: several steps, and the service four times
/// as long as others for the backing.
const DEADLINES: u32 = 8;

/// What goes on, and what is stuck.
pub struct Watchdog {
    began: Instant,
    next: AtomicU64,
    running: Arc<Mutex<HashMap<u64, Running>>>,
    /// When an event loop began what it does itself, in milliseconds plus one; 0: it waits.
    loops: [AtomicU64; LOOPS_MAX],
    loops_seen: AtomicU64,
    /// The runtime has done something since it was looked, and how often it had not.
    turned: AtomicBool,
    looks_in_vain: AtomicU32,
    stuck_now: AtomicU64,
    stuck_ever: AtomicU64,
}

struct Running {
    operation: Operation,
    since: Instant,
    told: bool,
}

thread_local! {
    static LOOP: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

impl Default for Watchdog {
    fn default() -> Watchdog {
        Watchdog {
            began: Instant::now(),
            next: AtomicU64::new(0),
            running: Arc::default(),
            loops: std::array::from_fn(|_| AtomicU64::new(0)),
            loops_seen: AtomicU64::new(0),
            turned: AtomicBool::new(false),
            looks_in_vain: AtomicU32::new(0),
            stuck_now: AtomicU64::new(0),
            stuck_ever: AtomicU64::new(0),
        }
    }
}

/// An operation that is watched, as long as this lives.
pub struct Watched {
    among: Arc<Mutex<HashMap<u64, Running>>>,
    id: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.among.lock().remove(&self.id);
    }
}

/// An event loop does something itself, as long as this lives.
pub struct InLoop<'a>(Option<&'a AtomicU64>);

impl Drop for InLoop<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.store(0, Release);
        }
    }
}

impl Watchdog {
    /// An operation begins, and lasts until the answer is dropped.
    pub fn begin(&self, operation: Operation) -> Watched {
        let id = self.next.fetch_add(1, Relaxed);
        if !matches!(operation, Operation::Lock) {
            let running = Running { operation, since: Instant::now(), told: false };
            self.running.lock().insert(id, running);
        }
        Watched { among: Arc::clone(&self.running), id }
    }

    /// The event loop that calls this answers something itself.
    pub fn in_loop(&self) -> InLoop<'_> {
        let mine = LOOP.with(|slot| {
            slot.get().or_else(|| {
                let index = self.loops_seen.fetch_add(1, AcqRel) as usize;
                slot.set(Some(index));
                Some(index)
            })
        });
        let slot = mine.and_then(|index| self.loops.get(index));
        if let Some(slot) = slot {
            slot.store(self.began.elapsed().as_millis() as u64 + 1, Release);
        }
        InLoop(slot)
    }

    /// Operations that are stuck now, and that ever were.
    #[must_use]
    pub fn stuck(&self) -> (u64, u64) {
        (self.stuck_now.load(Relaxed), self.stuck_ever.load(Relaxed))
    }

    /// The operations that are late for the first time.
    fn late(&self, bound: Duration) -> Vec<(Operation, Duration)> {
        let mut out = Vec::new();
        let mut now = 0;
        for running in self.running.lock().values_mut() {
            let time = running.since.elapsed();
            if time < bound {
                continue;
            }
            now += 1;
            if !std::mem::replace(&mut running.told, true) {
                out.push((running.operation, time));
            }
        }
        self.stuck_now.store(now, Relaxed);
        self.stuck_ever.fetch_add(out.len() as u64, Relaxed);
        out
    }

    /// True when each of `loops` event loops has been at one thing for longer than the bound.
    fn all_loops_stuck(&self, loops: usize, bound: Duration) -> bool {
        let now = self.began.elapsed().as_millis() as u64 + 1;
        let stuck = |slot: &AtomicU64| {
            let since = slot.load(Acquire);
            since > 0 && u128::from(now.saturating_sub(since)) > bound.as_millis()
        };
        let loops = loops.min(LOOPS_MAX);
        loops > 0 && self.loops.iter().filter(|slot| stuck(slot)).count() >= loops
    }

    /// True when the runtime has done nothing for longer than the bound. Counted in looks, not in
    /// time: a process that was stopped has not looked either.
    fn runtime_is_stuck(&self, bound: Duration) -> bool {
        if self.turned.swap(false, AcqRel) {
            self.looks_in_vain.store(0, Relaxed);
            return false;
        }
        LOOK.saturating_mul(self.looks_in_vain.fetch_add(1, Relaxed) + 1) > bound
    }
}

/// How long an operation may take.
#[must_use]
pub fn bound(node: &Node) -> Duration {
    node.config.stuck_after.unwrap_or(node.deadline().saturating_mul(DEADLINES))
}

/// Watches a node as long as it lives, on a thread of its own: the runtime may be what is stuck.
pub fn start(node: Weak<Node>) {
    if let Some(alive) = node.upgrade() {
        alive.runtime.spawn(keep_turning(node.clone()));
    }
    let watch = std::thread::Builder::new().name("watchdog".into()).spawn(move || {
        loop {
            std::thread::sleep(LOOK);
            let Some(node) = node.upgrade() else { return };
            look(&node);
        }
    });
    if let Err(e) = watch {
        tracing::warn!(error = %e, "nobody watches for operations that are stuck");
    }
}

/// What the runtime does at least.
async fn keep_turning(node: Weak<Node>) {
    while let Some(node) = node.upgrade() {
        node.watchdog.turned.store(true, Release);
        drop(node);
        tokio::time::sleep(LOOK / 2).await;
    }
}

fn look(node: &Node) {
    let bound = bound(node);
    let late = node.watchdog.late(bound);
    if !late.is_empty() {
        let waits = waits_for(node);
        for (operation, time) in late {
            tracing::error!(?operation, seconds = time.as_secs(), waits, "an operation is stuck");
        }
    }
    let runtime_is_stuck = node.watchdog.runtime_is_stuck(bound);
    let what = if node.watchdog.all_loops_stuck(node.config.fuse_threads, bound) {
        "all event loops are stuck"
    } else if runtime_is_stuck {
        "the runtime is stuck"
    } else {
        return;
    };
    if let Some(heir) = node.heir.get().filter(|h| h.is_handed_over() && h.has_supervisor()) {
        tracing::error!("{what} in the cache or a lock; another daemon is asked");
        heir.say(&Word::Ending(what.into()));
        crate::daemon::end_now();
    }
}

/// What a stuck operation may be waiting for, as far as it can be told without waiting.
fn waits_for(node: &Node) -> String {
    let service = node.meta.stats();
    match (service.connected, service.unanswered) {
        (false, n) => format!("the metadata service is not connected ({n} requests wait)"),
        (true, 0) => "no request to the metadata service is open: a peer, the backing or the \
                      cache device"
            .to_owned(),
        (true, n) => format!("the metadata service has not answered {n} request(s)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_late_is_told_once_and_counted() {
        let dog = Watchdog::default();
        let (a, lock) = (dog.begin(Operation::Read), dog.begin(Operation::Lock));
        assert!(dog.late(Duration::from_secs(60)).is_empty());
        assert_eq!(dog.late(Duration::ZERO).len(), 1);
        assert!(dog.late(Duration::ZERO).is_empty(), "only once");
        assert_eq!(dog.stuck(), (1, 1));
        drop((a, lock));
        assert!(dog.late(Duration::ZERO).is_empty());
        assert_eq!(dog.stuck(), (0, 1));
    }

    #[test]
    fn loops_are_stuck_when_every_one_is() {
        let dog = Watchdog::default();
        let busy = dog.in_loop();
        std::thread::sleep(Duration::from_millis(5));
        assert!(dog.all_loops_stuck(1, Duration::from_millis(1)));
        assert!(!dog.all_loops_stuck(1, Duration::from_secs(5)));
        assert!(!dog.all_loops_stuck(2, Duration::from_millis(1)), "another one works");
        drop(busy);
        assert!(!dog.all_loops_stuck(1, Duration::from_millis(1)));
    }
    #[test]
    fn a_runtime_is_stuck_when_it_does_nothing_at_many_looks() {
        let dog = Watchdog::default();
        let turn = || dog.turned.store(true, Release);
        for _ in 0..10 {
            assert!(!dog.runtime_is_stuck(LOOK), "one look in vain is none");
            turn();
            assert!(!dog.runtime_is_stuck(LOOK));
        }
        assert!(!dog.runtime_is_stuck(LOOK));
        assert!(dog.runtime_is_stuck(LOOK));
        assert!(dog.runtime_is_stuck(LOOK), "until it turns again");
        turn();
        assert!(!dog.runtime_is_stuck(LOOK));
    }
}
