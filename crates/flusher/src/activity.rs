//! Counts the foreground operations of this node, so that the flusher can keep out of their way.
//!
//! The counter goes up at the start and down at the end of every operation. Two conditions
//! follow from it: *no activity* (it came to zero) and *I/O activity* (it went up). Only a
//! flusher ever waits for them, and each wait arms its condition for one signal: an operation
//! that nobody waits for costs two atomic additions and a look at the coarse clock: 7 ns,
//! or 16 ns when two threads count at the same time (the example `activity_cost`).
//!
//! It decides nothing; see `policy`.

use ebb_locks::{Condvar, Mutex};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One started operation: the upper 40 bits of the state count them.
const STARTED: u64 = 1 << 24;
/// The lower 24 bits of the state: operations in flight.
const IN_FLIGHT: u64 = STARTED - 1;

const WANT_NO_ACTIVITY: u32 = 1;
const WANT_IO_ACTIVITY: u32 = 2;

/// A second source of activity: I/O that does not pass through the daemon.
pub trait BypassSource: Send + Sync + 'static {
    /// A number that differs from the last answer when there was I/O since. Called some ten
    /// times a second; must be cheap and must not block.
    fn changes(&self) -> u64;
}

/// How many operations had begun at some moment. Equal epochs: nothing began in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(u64);

/// The counter and its conditions.
// Alone on its cache lines: every operation writes to it.
#[repr(align(128))]
pub struct Activity {
    state: AtomicU64,
    last_end_ns: AtomicU64,
    armed: AtomicU32,
    waiters: Mutex<Signalled>,
    no_activity: Condvar,
    io_activity: Condvar,
    bypass: Mutex<Vec<Watched>>,
}

#[derive(Default)]
struct Signalled {
    /// The first operation since [`Activity::watch`].
    began: Option<Instant>,
}

struct Watched {
    source: Arc<dyn BypassSource>,
    last: u64,
}

impl Default for Activity {
    fn default() -> Activity {
        Activity {
            state: AtomicU64::new(0),
            last_end_ns: AtomicU64::new(now_ns(ClockId::MonotonicCoarse)),
            armed: AtomicU32::new(0),
            waiters: Mutex::default(),
            no_activity: Condvar::new(),
            io_activity: Condvar::new(),
            bypass: Mutex::default(),
        }
    }
}

/// Monotonic nanoseconds. The coarse clock lags by up to one timer tick (1 to 10 ms) and is
/// cheap on every machine.
fn now_ns(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    (t.tv_sec.unsigned_abs()).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec.unsigned_abs())
}

impl Activity {
    /// A counter at zero. The time before its making counts as activity.
    #[must_use]
    pub fn new() -> Arc<Activity> {
        Arc::new(Activity::default())
    }

    /// Counts one operation until the guard is dropped.
    pub fn enter(&self) -> ActivityGuard<'_> {
        self.begin();
        ActivityGuard(self)
    }

    /// The same for an operation that moves to another thread.
    pub fn enter_owned(self: &Arc<Self>) -> OwnedActivityGuard {
        self.begin();
        OwnedActivityGuard(Arc::clone(self))
    }

    fn begin(&self) {
        // SeqCst pairs with the waiters: they arm, then look at the state; we change the state,
        // then look at what is armed. One of the two sees the other.
        self.state.fetch_add(STARTED + 1, Ordering::SeqCst);
        if self.armed.load(Ordering::SeqCst) & WANT_IO_ACTIVITY != 0 {
            self.signal_io_activity();
        }
    }

    fn finish(&self) {
        // fetch_max: a thread that was off the CPU must not set the clock back. Before the
        // subtraction: whoever sees zero in flight sees this end.
        self.last_end_ns.fetch_max(now_ns(ClockId::MonotonicCoarse), Ordering::Relaxed);
        let before = self.state.fetch_sub(1, Ordering::SeqCst);
        if before & IN_FLIGHT == 1 && self.armed.load(Ordering::SeqCst) & WANT_NO_ACTIVITY != 0 {
            self.signal_no_activity();
        }
    }

    #[cold]
    fn signal_io_activity(&self) {
        if self.armed.fetch_and(!WANT_IO_ACTIVITY, Ordering::SeqCst) & WANT_IO_ACTIVITY != 0 {
            let mut signalled = self.waiters.lock();
            signalled.began.get_or_insert_with(Instant::now);
            self.io_activity.notify_all();
        }
    }

    #[cold]
    fn signal_no_activity(&self) {
        if self.armed.fetch_and(!WANT_NO_ACTIVITY, Ordering::SeqCst) & WANT_NO_ACTIVITY != 0 {
            let _signalled = self.waiters.lock();
            self.no_activity.notify_all();
        }
    }

    /// Operations in flight.
    #[must_use]
    pub fn active(&self) -> u64 {
        self.state.load(Ordering::SeqCst) & IN_FLIGHT
    }

    /// For [`Activity::wait_io_activity`].
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.state.load(Ordering::SeqCst) / STARTED)
    }

    /// How long there has been no operation; zero while there is one.
    #[must_use]
    pub fn idle_for(&self) -> Duration {
        if self.active() > 0 {
            return Duration::ZERO;
        }
        let last = self.last_end_ns.load(Ordering::Relaxed);
        Duration::from_nanos(now_ns(ClockId::Monotonic).saturating_sub(last))
    }

    /// Waits until no operation is in flight; false when `timeout` passed before that.
    pub fn wait_no_activity(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut signalled = self.waiters.lock();
        loop {
            self.armed.fetch_or(WANT_NO_ACTIVITY, Ordering::SeqCst);
            if self.active() == 0 {
                return true;
            }
            if self.no_activity.wait_until(&mut signalled, deadline).timed_out() {
                return self.active() == 0;
            }
        }
    }

    /// Waits until an operation began after `since`; false when `timeout` passed before that.
    pub fn wait_io_activity(&self, since: Epoch, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut signalled = self.waiters.lock();
        loop {
            self.armed.fetch_or(WANT_IO_ACTIVITY, Ordering::SeqCst);
            if self.epoch() != since {
                return true;
            }
            if self.io_activity.wait_until(&mut signalled, deadline).timed_out() {
                return self.epoch() != since;
            }
        }
    }

    /// From now on the moment of the next operation is remembered for [`Activity::began`].
    pub fn watch(&self) {
        let mut signalled = self.waiters.lock();
        signalled.began = None;
        self.armed.fetch_or(WANT_IO_ACTIVITY, Ordering::SeqCst);
    }

    /// When the first operation since [`Activity::watch`] began.
    #[must_use]
    pub fn began(&self) -> Option<Instant> {
        self.waiters.lock().began
    }

    /// Adds a source of activity that must be asked.
    pub fn add_source(&self, source: Arc<dyn BypassSource>) {
        let last = source.changes();
        self.bypass.lock().push(Watched { source, last });
    }

    /// Asks the sources; what they saw counts as an operation that began and ended now.
    pub fn poll_sources(&self) {
        let mut seen = false;
        for watched in self.bypass.lock().iter_mut() {
            let now = watched.source.changes();
            seen |= now != watched.last;
            watched.last = now;
        }
        if seen {
            drop(self.enter());
        }
    }
}

/// One operation in flight.
#[must_use = "the operation counts only while the guard lives"]
pub struct ActivityGuard<'a>(&'a Activity);

impl Drop for ActivityGuard<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// One operation in flight, on whichever thread.
#[must_use = "the operation counts only while the guard lives"]
pub struct OwnedActivityGuard(Arc<Activity>);

impl Drop for OwnedActivityGuard {
    fn drop(&mut self) {
        self.0.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn counts_what_is_in_flight() {
        let activity = Activity::new();
        let before = activity.epoch();
        let one = activity.enter();
        let two = activity.enter_owned();
        assert_eq!(activity.active(), 2);
        assert_eq!(activity.idle_for(), Duration::ZERO);
        assert_ne!(activity.epoch(), before);
        drop(one);
        std::thread::spawn(move || drop(two)).join().unwrap();
        assert_eq!(activity.active(), 0);
    }

    #[test]
    fn idle_time_grows_from_the_last_end() {
        let activity = Activity::new();
        drop(activity.enter());
        std::thread::sleep(Duration::from_millis(30));
        let idle = activity.idle_for();
        assert!(idle >= Duration::from_millis(30), "{idle:?}");
        // More than one try: on a busy machine the thread may be off the CPU in between.
        let restarted = (0..100).any(|_| {
            drop(activity.enter());
            activity.idle_for() < idle
        });
        assert!(restarted, "a new operation does not restart the idle time");
    }

    #[test]
    fn conditions_are_signalled_to_a_waiter() {
        let activity = Activity::new();
        let guard = activity.enter();
        let waiter = {
            let activity = Arc::clone(&activity);
            std::thread::spawn(move || activity.wait_no_activity(LONG))
        };
        drop(guard);
        assert!(waiter.join().unwrap());

        let since = activity.epoch();
        activity.watch();
        let waiter = {
            let activity = Arc::clone(&activity);
            std::thread::spawn(move || activity.wait_io_activity(since, LONG))
        };
        drop(activity.enter());
        assert!(waiter.join().unwrap());
        assert!(activity.began().is_some());
    }

    #[test]
    fn waits_end_with_their_time() {
        let activity = Activity::new();
        let _guard = activity.enter();
        assert!(!activity.wait_no_activity(Duration::from_millis(5)));
        assert!(!activity.wait_io_activity(activity.epoch(), Duration::from_millis(5)));
    }

    #[test]
    fn no_signal_is_lost_between_threads() {
        let activity = Activity::new();
        for _ in 0..2000 {
            let since = activity.epoch();
            let worker = Arc::clone(&activity);
            std::thread::scope(|scope| {
                scope.spawn(move || drop(worker.enter()));
                assert!(activity.wait_io_activity(since, LONG));
                assert!(activity.wait_no_activity(LONG));
            });
        }
    }

    #[test]
    fn io_that_bypasses_us_is_activity() {
        struct Device(AtomicU64);
        impl BypassSource for Device {
            fn changes(&self) -> u64 {
                self.0.load(Ordering::Relaxed)
            }
        }
        let activity = Activity::new();
        let device = Arc::new(Device(AtomicU64::new(7)));
        activity.add_source(Arc::clone(&device) as Arc<dyn BypassSource>);
        let before = activity.epoch();
        activity.poll_sources();
        assert_eq!(activity.epoch(), before, "an unchanged source is silence");
        device.0.fetch_add(1, Ordering::Relaxed);
        activity.poll_sources();
        assert_ne!(activity.epoch(), before);
        assert_eq!(activity.active(), 0);
    }
}
