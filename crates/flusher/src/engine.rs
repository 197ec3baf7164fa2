//! The flusher's threads and what they share. The *conductor* looks at the situation, decides
//! and starts runs; *workers* (see `worker`) move bytes.
//!
//! Progress: a file occupies at most `streams_per_file` workers (of its lane), so a backing call that hangs
//! holds up that file and no other. A worker that hangs longer than `hang_after` is reported in
//! the error table and replaced, up to twice the configured threads of each lane; when all of
//! those hang, the backing as a whole does not answer. A grant whose write hangs is never given
//! back: the write may still land.
//!
//! Locks: `Shared::state` is a leaf. It is held for bookkeeping only, never across a call to the
//! source, the backing or the activity counter's waits.
//!
//! Retries: a failed file is left alone in the background for a growing pause; a drain tries it
//! again by itself, a bounded number of times.
//!
//! End: dropping the engine tells all threads to stop; they do so after their current backing
//! call. Grants in progress are given back.

use crate::activity::{Activity, Epoch};
use crate::adaptive::{Glance, Observer};
use crate::errors::{ErrorRecord, ErrorTable};
use crate::options::Options;
use crate::policy::{Decision, Halt, Policy, Scope, Situation, decide};
use crate::queue::{Ended, Lane, Listed, Queue};
use crate::source::{FileUse, FlushError, FlushSource};
use crate::status::{Counters, FlushState, Status, StopTimes, Working};
use crate::throttle::Throttle;
use crate::worker::{self, Slot};
use ebb_backend::Backend;
use ebb_locks::{Condvar, Mutex, MutexGuard};
use ebb_types::{Errno, Ino};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The longest sleep of the conductor: a kick that was forgotten costs no more.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// Between two looks that kicks ask for.
const KICK_PAUSE: Duration = Duration::from_millis(2);
/// Between two looks at bypassing I/O during a run that must give way to it.
const WATCHFUL: Duration = Duration::from_millis(10);

/// The flusher of one mount.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) policy: Policy,
    pub(crate) activity: Arc<Activity>,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) source: Arc<dyn FlushSource>,
    /// What the observer's times count from.
    started: Instant,
    pub(crate) throttle: Throttle,
    pub(crate) counters: Counters,
    pub(crate) state: Mutex<State>,
    /// Workers wait here for something to take.
    pub(crate) work: Condvar,
    /// The conductor and waiting drains look again.
    pub(crate) changed: Condvar,
    /// Every thread ends soon.
    pub(crate) stopping: AtomicBool,
    /// No background flushing.
    pub(crate) paused: AtomicBool,
    /// The conductor sleeps until something is dirty, so a kick must wake it.
    wants_kick: AtomicBool,
    /// Writers that wait for room: there is pressure, whatever the watermarks say.
    hurried: AtomicUsize,
    /// Drains going on; nothing is held back meanwhile.
    pub(crate) drains: AtomicUsize,
    /// Size of grants in runs that must give way; follows the speed of the backing.
    pub(crate) grant_size: AtomicU64,
}

pub(crate) struct State {
    pub(crate) queue: Queue,
    pub(crate) errors: ErrorTable,
    pub(crate) slots: Vec<Arc<Slot>>,
    /// Learns the application's rhythm, when the policy is to follow it.
    observer: Option<Observer>,
    stop_times: StopTimes,
    pressed: bool,
    last_run: Instant,
    kicked: bool,
    conducting: bool,
}

/// What the conductor does after a look.
enum Next {
    /// Look again after this time, or when something changed.
    Look(Duration),
    /// The same, and at once when no operation is in flight any more.
    Quiet(Duration),
    /// Look when something is kicked.
    Kick,
}

impl Engine {
    /// Starts the flusher. Fails when its first thread cannot be started.
    pub fn start(
        options: Options,
        policy: Policy,
        activity: Arc<Activity>,
        backend: Arc<dyn Backend>,
        source: Arc<dyn FlushSource>,
    ) -> std::io::Result<Engine> {
        let options = options.aligned(backend.stripe_size()).sane();
        let state = State {
            queue: Queue::new(&options),
            errors: ErrorTable::default(),
            slots: Vec::new(),
            observer: policy
                .learns()
                .then(|| Observer::new(policy.wait_interval, options.stop_within)),
            stop_times: StopTimes::default(),
            pressed: false,
            last_run: Instant::now(),
            kicked: false,
            conducting: true,
        };
        let shared = Arc::new(Shared {
            throttle: Throttle::new(options.bandwidth_cap),
            // Small at first: until something is known of the backing's speed, the first stop must
            // not have to wait for eight large grants.
            grant_size: AtomicU64::new(crate::plan::PIECE),
            options,
            policy,
            activity,
            backend,
            source,
            started: Instant::now(),
            counters: Counters::default(),
            state: Mutex::new(state),
            work: Condvar::new(),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            wants_kick: AtomicBool::new(false),
            hurried: AtomicUsize::new(0),
            drains: AtomicUsize::new(0),
        });
        let conductor = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("ebb-flush".to_owned())
            .spawn(move || conductor.conduct())?;
        Ok(Engine { shared })
    }

    /// Something became dirty, or a file was closed. Costs a load when nobody waits for it.
    pub fn kick(&self) {
        let shared = &self.shared;
        if shared.wants_kick.load(Ordering::SeqCst)
            && shared.wants_kick.swap(false, Ordering::SeqCst)
        {
            shared.state.lock().kicked = true;
            shared.changed.notify_all();
        }
    }

    /// No background flushing until [`Engine::resume`]; drains still work.
    pub fn pause(&self) {
        self.shared.paused.store(true, Ordering::SeqCst);
        self.shared.look_now();
    }

    /// Ends [`Engine::pause`].
    pub fn resume(&self) {
        self.shared.paused.store(false, Ordering::SeqCst);
        self.shared.look_now();
    }

    /// From a yes to the no that belongs to it there is pressure: somebody cannot go on before
    /// something is on the backing.
    pub fn hurry(&self, yes: bool) {
        if yes {
            self.shared.hurried.fetch_add(1, Ordering::SeqCst);
            self.shared.look_now();
        } else {
            self.shared.hurried.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Bytes brought to the backing since the start.
    #[must_use]
    pub fn flushed_bytes(&self) -> u64 {
        Counters::get(&self.shared.counters.flushed_bytes)
    }

    /// What the flusher is doing.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// A file that found no room the last time, and is not being tried again just now.
    #[must_use]
    pub fn no_room(&self) -> Option<ErrorRecord> {
        let shared = &self.shared;
        let (ino, record) = {
            let state = shared.state.lock();
            let full = |(ino, e): &(Ino, ErrorRecord)| {
                Errno(e.errno).is_full() && !state.queue.is_at(*ino)
            };
            state.errors.records().into_iter().find(full)?
        };
        Some(ErrorRecord { path: shared.source.label(ino), ..record })
    }

    /// Stops all threads after their current backing call and waits for that, but not longer
    /// than `patience`. False when some are still hanging. Nothing is flushed; drain first.
    pub fn shutdown(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        self.shared.stop();
        let mut state = self.shared.state.lock();
        while state.conducting || !state.slots.is_empty() {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return !state.conducting && state.slots.is_empty();
            }
        }
        true
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

impl Shared {
    fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.look_now();
    }

    fn look_now(&self) {
        self.state.lock().kicked = true;
        self.work.notify_all();
        self.changed.notify_all();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    // ---- the conductor ----

    fn conduct(self: Arc<Self>) {
        while !self.is_stopping() {
            // Armed before the look: whatever is kicked after it is not missed.
            self.wants_kick.store(true, Ordering::SeqCst);
            match self.look() {
                Next::Quiet(most) => {
                    self.wants_kick.store(false, Ordering::SeqCst);
                    self.activity.wait_no_activity(most);
                }
                Next::Look(most) => {
                    self.wants_kick.store(false, Ordering::SeqCst);
                    self.sleep(most);
                }
                Next::Kick => {
                    self.sleep(LONGEST_SLEEP);
                    // A stream of small writes must not make us look at each of them.
                    std::thread::sleep(KICK_PAUSE);
                }
            }
        }
        self.state.lock().conducting = false;
        self.changed.notify_all();
    }

    fn sleep(&self, most: Duration) {
        let mut state = self.state.lock();
        let until = Instant::now() + most;
        // What workers report does not concern us: a look goes through all dirty files.
        while !state.kicked && !self.is_stopping() {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.kicked = false;
    }

    fn look(self: &Arc<Self>) -> Next {
        self.activity.poll_sources();
        // Before the situation: an operation that begins after this look ends the run that
        // follows from it.
        let epoch = self.activity.epoch();
        let dirty_bytes = self.source.dirty_bytes();
        let capacity = self.source.capacity();
        let closed_dirty = dirty_bytes > 0
            && self.policy.asks_for_closed()
            && self.source.dirty_files().iter().any(|f| f.in_use == FileUse::Closed);
        let idle_for = self.activity.idle_for();
        let mut state = self.state.lock();
        state.pressed = self.is_pressed(state.pressed, dirty_bytes, capacity);
        self.replace_hanging(&mut state);
        let wait = self.observe(&mut state, epoch, idle_for);
        if state.queue.run_halt().is_some() {
            return self.supervise(&mut state, idle_for < wait);
        }
        let situation = Situation {
            paused: self.is_paused(),
            draining: state.queue.draining_everything(),
            active: self.activity.active() > 0,
            idle_for,
            wait,
            dirty_bytes,
            closed_dirty,
            pressed: state.pressed,
            since_last_run: state.last_run.elapsed(),
        };
        let every = self.options.observe_every;
        match decide(&self.policy, &situation) {
            Decision::Flush { scope, halt } => {
                drop(state);
                self.start_run(scope, halt, epoch)
            }
            Decision::Quiet => Next::Quiet(every),
            Decision::Wait(wait) => Next::Look(wait.min(every)),
            // Failing files keep the error table honest at this pace, too.
            Decision::Sleep if !state.errors.is_empty() => {
                drop(state);
                self.forget_clean_files();
                Next::Look(every)
            }
            // Nothing to flush, but something to learn.
            Decision::Sleep if state.observer.is_some() => Next::Look(every),
            Decision::Sleep => Next::Kick,
        }
    }

    /// How long there must have been no operation, as seen now.
    fn observe(&self, state: &mut State, epoch: Epoch, idle_for: Duration) -> Duration {
        let Some(observer) = &mut state.observer else { return self.policy.wait_interval };
        let since_start = |t: Instant| t.saturating_duration_since(self.started);
        let began = self.activity.began().map(since_start);
        let glance = Glance { now: since_start(Instant::now()), epoch, idle_for, began };
        let outlook = observer.look(&glance);
        if outlook.watch {
            self.activity.watch();
        }
        outlook.wait
    }

    fn start_run(self: &Arc<Self>, scope: Scope, halt: Halt, epoch: Epoch) -> Next {
        self.activity.watch();
        let dirty = self.source.dirty_files();
        let now = Instant::now();
        let mut state = self.state.lock();
        let alive: HashSet<Ino> = dirty.iter().map(|f| f.ino).collect();
        state.errors.keep_only(&alive);
        let pressed = state.pressed;
        let waits = |ino| state.errors.must_wait(ino, now, pressed, &self.options);
        let files: Vec<Listed> = dirty
            .iter()
            .filter(|f| scope.takes(f.in_use) && !waits(f.ino))
            .map(|f| Listed { ino: f.ino, bytes: f.bytes })
            .collect();
        if files.is_empty() {
            // All of them wait for their next attempt, or for somebody to close them.
            return Next::Look(self.options.observe_every);
        }
        state.last_run = now;
        Counters::add(&self.counters.runs, 1);
        let want = files.len().saturating_mul(self.options.streams_per_file);
        tracing::debug!("flusher: run of {} files, {halt:?}", files.len());
        state.queue.start_run(files, halt, epoch);
        self.ensure_workers(&mut state, Lane::Background, want);
        self.work.notify_all();
        self.pace()
    }

    /// `due`: there has not been quiet for as long as there must be (any more).
    fn supervise(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, due: bool) -> Next {
        let relieved = state.queue.run_halt() == Some(Halt::AtLowWatermark) && !state.pressed;
        if relieved || self.is_paused() || state.queue.draining_everything() {
            state.queue.stop_run();
        }
        // As of now, not as of when the look began: an operation that made the run due in between
        // is what it gives way to.
        state.queue.give_way(self.activity.epoch());
        if due && state.queue.run_halt() == Some(Halt::OnActivity) {
            // Before the next burst comes; what is being written is finished.
            state.queue.stop_run();
        }
        self.settle(state);
        if state.queue.run_halt().is_none() { Next::Look(Duration::ZERO) } else { self.pace() }
    }

    /// Stops a run under pressure when there is none any more. Called between grants, so that
    /// the run overshoots the low watermark by no more than what is being written.
    pub(crate) fn relieve(self: &Arc<Self>) {
        if self.state.lock().queue.run_halt() != Some(Halt::AtLowWatermark) {
            return;
        }
        let (dirty_bytes, capacity) = (self.source.dirty_bytes(), self.source.capacity());
        let mut state = self.state.lock();
        state.pressed = self.is_pressed(state.pressed, dirty_bytes, capacity);
        if state.queue.run_halt() == Some(Halt::AtLowWatermark) && !state.pressed {
            state.queue.stop_run();
            self.settle(&mut state);
        }
    }

    fn is_pressed(&self, was: bool, dirty_bytes: u64, capacity: u64) -> bool {
        let hurried = dirty_bytes > 0 && self.hurried.load(Ordering::SeqCst) > 0;
        hurried || self.policy.pressed(was, dirty_bytes, capacity)
    }

    fn pace(&self) -> Next {
        Next::Look(WATCHFUL.min(self.options.observe_every))
    }

    fn forget_clean_files(&self) {
        let alive: HashSet<Ino> = self.source.dirty_files().iter().map(|f| f.ino).collect();
        self.state.lock().errors.keep_only(&alive);
    }

    // ---- shared with the workers ----

    /// After every change of the queue: ends what nobody is on, the run when it is through, and
    /// wakes whoever may go on now.
    pub(crate) fn settle(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) {
        for ended in state.queue.settle_all(Instant::now()) {
            self.pass_ended(state, ended);
        }
        if let Some(run) = state.queue.finish_run() {
            state.kicked = true;
            if run.interrupted {
                // None: the operation has begun so recently that its time is not noted yet.
                let began = self.activity.began();
                state.stop_times.record(began.map_or(Duration::ZERO, |began| began.elapsed()));
            }
        }
        let backlog = state.queue.drain_backlog();
        if backlog > 0 {
            let want = backlog.saturating_mul(self.options.drain_streams_per_file);
            self.ensure_workers(state, Lane::Drain, want);
        }
        self.work.notify_all();
        self.changed.notify_all();
    }

    /// Keeps the error table true.
    pub(crate) fn pass_ended(&self, state: &mut State, ended: Ended) {
        match ended.error {
            Some(error) => {
                state.errors.failed(ended.ino, &error, Instant::now());
            }
            None if ended.complete => state.errors.cleared(ended.ino),
            None => {}
        }
    }

    /// Has at least `want` working threads in `lane`, as far as the options allow.
    pub(crate) fn ensure_workers(self: &Arc<Self>, state: &mut State, lane: Lane, want: usize) {
        let (mut all, mut well) = (0, 0);
        for slot in state.slots.iter().filter(|s| s.lane == lane) {
            all += 1;
            well += usize::from(!slot.is_hanging());
        }
        let most = self.options.threads;
        while well < want.min(most) && all < 2 * most && !self.is_stopping() {
            match worker::spawn(self, lane) {
                Ok(slot) => state.slots.push(slot),
                Err(e) => {
                    tracing::error!("flusher: cannot start a thread: {e}");
                    return;
                }
            }
            (all, well) = (all + 1, well + 1);
        }
    }

    fn replace_hanging(self: &Arc<Self>, state: &mut State) {
        let hanging: Vec<_> =
            state.slots.iter().filter_map(|s| s.starts_hanging(self.options.hang_after)).collect();
        for stuck in hanging {
            let error = FlushError::Hanging {
                operation: stuck.operation,
                seconds: stuck.since.elapsed().as_secs(),
            };
            tracing::warn!("flusher: {}: {error}", stuck.label);
            let now = Instant::now();
            state.errors.failed(stuck.ino, &error, now);
            self.ensure_workers(state, stuck.lane, self.options.threads);
        }
    }

    fn status(&self) -> Status {
        let dirty = self.source.dirty_files();
        let dirty_bytes = dirty.iter().map(|f| f.bytes).fold(0, u64::saturating_add);
        let (in_flight, errors, stop_latency, stuck) = {
            let state = self.state.lock();
            let stuck: Vec<_> = state.slots.iter().filter_map(|s| s.working()).collect();
            (state.queue.in_flight(), state.errors.records(), state.stop_times.summary(), stuck)
        };
        let failing: HashSet<Ino> = errors.iter().map(|(ino, _)| *ino).collect();
        let failing = dirty.iter().filter(|f| failing.contains(&f.ino)).map(|f| f.bytes);
        let working = stuck.into_iter().map(|s| Working {
            path: self.source.label(s.ino),
            operation: s.operation,
            seconds: s.since.elapsed().as_secs_f64(),
        });
        let named = |(ino, e)| ErrorRecord { path: self.source.label(ino), ..e };
        let errors = errors.into_iter().map(named).collect();
        let state_now = if in_flight > 0 {
            FlushState::Flushing
        } else if self.is_paused() {
            FlushState::Paused
        } else if dirty_bytes > 0 {
            FlushState::Waiting
        } else {
            FlushState::Idle
        };
        Status {
            state: state_now,
            policy: self.policy.kind.name(),
            activity: self.activity.active(),
            dirty_bytes,
            flushed_bytes: Counters::get(&self.counters.flushed_bytes),
            verified_bytes: Counters::get(&self.counters.verified_bytes),
            grants: Counters::get(&self.counters.grants),
            runs: Counters::get(&self.counters.runs),
            failed_grants: Counters::get(&self.counters.failed_grants),
            failing_bytes: failing.sum(),
            working: working.collect(),
            in_flight,
            errors,
            stop_latency,
        }
    }
}
