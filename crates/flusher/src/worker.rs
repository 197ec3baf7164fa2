//! One flushing thread: takes the next step from the queue, gets a grant, moves it, reports.

use crate::copy::{How, Moved, Step, Unmoved, move_grant};
use crate::engine::{Shared, State};
use crate::nice;
use crate::options::ReadBack;
use crate::plan;
use crate::queue::{Ask, Ended, Lane};
use crate::source::{FlushError, Grant};
use crate::status::Counters;
use ebb_types::Ino;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A thread without work ends after this time.
const UNEMPLOYED: Duration = Duration::from_secs(10);
/// Sleeps of the bandwidth cap are cut so, to see a pause or the end in between.
const NAP: Duration = Duration::from_millis(50);

/// A worker as others see it.
pub(crate) struct Slot {
    number: u64,
    pub(crate) lane: Lane,
    busy: Mutex<Option<Busy>>,
}

struct Busy {
    ino: Ino,
    label: Arc<str>,
    operation: &'static str,
    since: Instant,
    reported: bool,
}

/// A call that does not come back.
pub(crate) struct Stuck {
    pub(crate) lane: Lane,
    pub(crate) ino: Ino,
    pub(crate) label: Arc<str>,
    pub(crate) operation: &'static str,
    pub(crate) since: Instant,
}

impl Slot {
    fn begins(&self, ino: Ino, label: &Arc<str>, operation: &'static str) {
        let label = Arc::clone(label);
        let since = Instant::now();
        *self.busy.lock() = Some(Busy { ino, label, operation, since, reported: false });
    }

    fn rests(&self) {
        *self.busy.lock() = None;
    }

    /// Reported as hanging, and still is.
    pub(crate) fn is_hanging(&self) -> bool {
        self.busy.lock().as_ref().is_some_and(|busy| busy.reported)
    }

    /// Answers once for every call that takes longer than `after`.
    pub(crate) fn starts_hanging(&self, after: Duration) -> Option<Stuck> {
        let mut busy = self.busy.lock();
        let busy = busy.as_mut().filter(|b| !b.reported && b.since.elapsed() > after)?;
        busy.reported = true;
        Some(self.stuck(busy))
    }

    /// The call that this worker is in.
    pub(crate) fn working(&self) -> Option<Stuck> {
        self.busy.lock().as_ref().map(|b| self.stuck(b))
    }

    /// The call that this worker is in, when it is for `ino`.
    pub(crate) fn working_on(&self, ino: Ino) -> Option<Stuck> {
        let busy = self.busy.lock();
        busy.as_ref().filter(|b| b.ino == ino).map(|b| self.stuck(b))
    }

    fn stuck(&self, busy: &Busy) -> Stuck {
        Stuck {
            lane: self.lane,
            ino: busy.ino,
            label: Arc::clone(&busy.label),
            operation: busy.operation,
            since: busy.since,
        }
    }
}

/// Starts a worker; the caller puts its slot into the state.
pub(crate) fn spawn(shared: &Arc<Shared>, lane: Lane) -> std::io::Result<Arc<Slot>> {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let slot = Arc::new(Slot { number, lane, busy: Mutex::new(None) });
    let name = match lane {
        Lane::Background => "ebb-flush-bg",
        Lane::Drain => "ebb-flush-drain",
    };
    let worker = Worker { shared: Arc::clone(shared), slot: Arc::clone(&slot), buf: Vec::new() };
    std::thread::Builder::new().name(name.to_owned()).spawn(move || worker.run())?;
    Ok(slot)
}

struct Worker {
    shared: Arc<Shared>,
    slot: Arc<Slot>,
    buf: Vec<u8>,
}

/// Whatever way the thread ends, nobody counts on it any more.
impl Drop for Worker {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.slots.retain(|s| s.number != self.slot.number);
        self.shared.changed.notify_all();
    }
}

impl Worker {
    fn run(mut self) {
        if self.slot.lane == Lane::Background {
            nice::yield_to_foreground(&self.shared.options);
        }
        while let Some(ask) = self.next() {
            self.serve(ask);
        }
    }

    /// Waits for work; None when the thread is to end.
    fn next(&self) -> Option<Ask> {
        let shared = &self.shared;
        let background = self.slot.lane == Lane::Background;
        if background {
            shared.relieve();
        }
        let deadline = Instant::now() + UNEMPLOYED;
        let mut expired = false;
        let mut state = shared.state.lock();
        loop {
            if shared.is_stopping() {
                return None;
            }
            if background && state.queue.give_way(shared.activity.epoch()) {
                shared.settle(&mut state);
            }
            if let Some(ask) = state.queue.take(self.slot.lane, Instant::now()) {
                return Some(ask);
            }
            if expired {
                // Within the same hold of the lock, so that nobody counts on us any more.
                state.slots.retain(|s| s.number != self.slot.number);
                return None;
            }
            let due = if background { None } else { state.queue.next_due() };
            let until = due.unwrap_or(deadline).min(deadline);
            expired = shared.work.wait_until(&mut state, until).timed_out() && due.is_none();
        }
    }

    fn serve(&mut self, ask: Ask) {
        let label: Arc<str> = Arc::from("");
        self.slot.begins(ask.ino, &label, "flush begin");
        let most = self.bytes_to_ask(&ask);
        let answer = self.shared.source.begin(ask.ino, ask.from, most);
        let answer = answer.and_then(|grant| self.checked(&ask, grant));
        self.slot.rests();
        match answer {
            Ok(Some(grant)) => {
                self.report(|state, _| {
                    state.queue.granted(ask.ino, grant.next);
                    None
                });
                self.carry_out(&ask, grant);
            }
            Ok(None) => self.report(|state, now| state.queue.nothing(ask.ino, now)),
            Err(e) => {
                tracing::warn!("flusher: {}: {e}", self.shared.source.label(ask.ino));
                self.report(|state, now| state.queue.refused(ask.ino, e, now));
            }
        }
    }

    fn bytes_to_ask(&self, ask: &Ask) -> u64 {
        let options = &self.shared.options;
        let most = match ask.interrupt {
            Some(_) => self.shared.grant_size.load(Ordering::Relaxed),
            None => options.grant_bytes,
        };
        plan::aligned_most(ask.from, most, options.chunk)
    }

    fn carry_out(&mut self, ask: &Ask, grant: Grant) {
        let mut held_back = Duration::ZERO;
        let began = Instant::now();
        let outcome = self.write(ask, &grant, &mut held_back);
        let took = began.elapsed().saturating_sub(held_back);
        if ask.interrupt.is_some() {
            self.learn(&outcome, took);
        }
        let (ino, label) = (ask.ino, grant.label.clone());
        self.slot.begins(ino, &Arc::from(label.as_str()), "flush end");
        let outcome = match outcome {
            // Written, but when the service does not learn it, it must be flushed again.
            Ok(moved) => match self.shared.source.end(grant, true) {
                Ok(()) => Ok(moved),
                Err(e) => Err(Unmoved::Failed(e)),
            },
            Err(unmoved) => {
                self.give_back(grant);
                Err(unmoved)
            }
        };
        self.slot.rests();
        match outcome {
            Ok(moved) => {
                self.count(moved);
                self.report(|s, now| s.queue.written(ino, moved.bytes, moved.verified, now));
            }
            Err(Unmoved::Stopped) => self.report(|state, now| state.queue.interrupted(ino, now)),
            Err(Unmoved::Failed(e)) => {
                tracing::warn!("flusher: {label}: {e}");
                Counters::add(&self.shared.counters.failed_grants, 1);
                self.report(|state, now| state.queue.failed(ino, e, now));
            }
        }
    }

    fn write(
        &mut self,
        ask: &Ask,
        grant: &Grant,
        held_back: &mut Duration,
    ) -> Result<Moved, Unmoved> {
        let (shared, slot) = (&self.shared, &self.slot);
        let label: Arc<str> = Arc::from(grant.label.as_str());
        let verify = slot.lane == Lane::Drain || shared.options.verify_background;
        // After a failure memory and storage may differ, whatever the next fsync says.
        let read_back = match shared.state.lock().errors.has(ask.ino) {
            true => Some(ReadBack::Storage),
            false => verify.then_some(shared.options.read_back),
        };
        let how = How { verify: read_back, eager: ask.interrupt.is_none() };
        let mut proceed = |step: Step| {
            if let Step::Write(bytes) = step {
                // Waiting for the bandwidth cap is not hanging.
                slot.rests();
                if !shared.may_write(slot.lane, ask, bytes, held_back) {
                    return false;
                }
            }
            slot.begins(ask.ino, &label, step.name());
            true
        };
        let moved = move_grant(shared.backend.as_ref(), grant, how, &mut self.buf, &mut proceed);
        slot.rests();
        moved
    }

    /// Grants of runs that must give way take about as long as a stop may take.
    fn learn(&self, outcome: &Result<Moved, Unmoved>, took: Duration) {
        let options = &self.shared.options;
        let stopped = match outcome {
            Ok(_) => false,
            Err(Unmoved::Stopped) => true,
            Err(Unmoved::Failed(_)) => return,
        };
        let share = took.as_secs_f64() / options.stop_within.as_secs_f64().max(1e-6);
        // Several workers learn at once; a lost step of one of them does not matter.
        let size = self.shared.grant_size.load(Ordering::Relaxed);
        let next = plan::next_grant_size(size, share, stopped, options.grant_bytes);
        self.shared.grant_size.store(next, Ordering::Relaxed);
    }

    fn count(&self, moved: Moved) {
        let counters = &self.shared.counters;
        Counters::add(&counters.flushed_bytes, moved.bytes);
        Counters::add(&counters.verified_bytes, moved.verified);
        Counters::add(&counters.grants, 1);
    }

    /// A grant from outside is checked before use, and given back when it makes no sense.
    fn checked(&self, ask: &Ask, grant: Option<Grant>) -> Result<Option<Grant>, FlushError> {
        let Some(grant) = grant else { return Ok(None) };
        let what = if grant.ino != ask.ino {
            "it is for another file"
        } else if grant.next.is_some_and(|next| next <= ask.from) {
            "it leads backwards"
        } else {
            return Ok(Some(grant));
        };
        self.give_back(grant);
        Err(FlushError::BadGrant { what: what.to_owned() })
    }

    fn give_back(&self, grant: Grant) {
        let label = grant.label.clone();
        if let Err(e) = self.shared.source.end(grant, false) {
            // The service forgets the grant with our session, or has done so.
            tracing::debug!("flusher: {label}: {e}");
        }
    }

    fn report(&self, change: impl FnOnce(&mut State, Instant) -> Option<Ended>) {
        let mut state: MutexGuard<'_, State> = self.shared.state.lock();
        if let Some(ended) = change(&mut state, Instant::now()) {
            self.shared.pass_ended(&mut state, ended);
        }
        self.shared.settle(&mut state);
    }
}

impl Shared {
    /// Waits for its turn under the bandwidth cap; false when the write must not be made.
    fn may_write(&self, lane: Lane, ask: &Ask, bytes: u64, held_back: &mut Duration) -> bool {
        if lane == Lane::Drain {
            return !self.is_stopping();
        }
        let mut left = self.throttle.reserve(bytes, Instant::now());
        loop {
            let interrupted = ask.interrupt.is_some_and(|epoch| epoch != self.activity.epoch());
            if interrupted || self.is_stopping() || self.is_paused() {
                return false;
            }
            if left.is_zero() || self.drains.load(Ordering::Relaxed) > 0 {
                return true;
            }
            let nap = left.min(NAP);
            match ask.interrupt {
                Some(epoch) => drop(self.activity.wait_io_activity(epoch, nap)),
                None => std::thread::sleep(nap),
            }
            *held_back += nap;
            left -= nap;
        }
    }
}
