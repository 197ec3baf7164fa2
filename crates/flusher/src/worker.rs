//! One flushing thread: takes the next step from the queue, gets a grant, moves it, reports. The
//! same with several small files at a time, which are asked for and reported together.

use crate::copy::{How, Moved, Step, Unmoved, Written, write_grant};
use crate::engine::{Shared, State};
use crate::nice;
use crate::options::ReadBack;
use crate::plan;
use crate::queue::{Ask, Ended, Lane, Queue, SMALL};
use crate::source::{Fate, FlushError, Grant, Want};
use crate::status::Counters;
use ebb_locks::{Mutex, MutexGuard};
use ebb_types::Ino;
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
    /// Other files that wait for the same call.
    with: Arc<[Ino]>,
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
    fn begins(&self, ino: Ino, with: &Arc<[Ino]>, label: &Arc<str>, operation: &'static str) {
        let (with, label) = (Arc::clone(with), Arc::clone(label));
        let since = Instant::now();
        *self.busy.lock() = Some(Busy { ino, with, label, operation, since, reported: false });
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
        let busy = busy.as_ref().filter(|b| b.ino == ino || b.with.contains(&ino));
        busy.map(|b| self.stuck(b))
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
    let (to, slot_of) = (Arc::clone(shared), Arc::clone(&slot));
    let worker = Worker { shared: to, slot: slot_of, buf: Vec::new(), asked: 0 };
    std::thread::Builder::new().name(name.to_owned()).spawn(move || worker.run())?;
    Ok(slot)
}

struct Worker {
    shared: Arc<Shared>,
    slot: Arc<Slot>,
    buf: Vec<u8>,
    /// The size that grants of runs that must give way had when this worker asked last.
    asked: u64,
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
        loop {
            let asks = self.next();
            if asks.is_empty() {
                return;
            }
            self.serve(&asks);
        }
    }

    /// Waits for work; nothing when the thread is to end.
    fn next(&mut self) -> Vec<Ask> {
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
                return Vec::new();
            }
            if background && state.queue.give_way(shared.activity.epoch()) {
                shared.settle(&mut state);
            }
            let size = shared.grant_size.load(Ordering::Relaxed);
            let most = if background { size } else { u64::MAX };
            let asks = state.queue.take(self.slot.lane, most, Instant::now());
            if !asks.is_empty() {
                self.asked = size;
                return asks;
            }
            if expired {
                // Within the same hold of the lock, so that nobody counts on us any more.
                state.slots.retain(|s| s.number != self.slot.number);
                return Vec::new();
            }
            let due = if background { None } else { state.queue.next_due() };
            let until = due.unwrap_or(deadline).min(deadline);
            expired = shared.work.wait_until(&mut state, until).timed_out() && due.is_none();
        }
    }

    fn serve(&mut self, asks: &[Ask]) {
        let Some(first) = asks.first() else { return };
        let with: Arc<[Ino]> = asks.iter().map(|ask| ask.ino).collect();
        let wants: Vec<Want> = asks.iter().map(|ask| self.wanted(ask)).collect();
        self.slot.begins(first.ino, &with, &Arc::from(""), "flush begin");
        let answers = self.shared.source.begin(&wants);
        self.slot.rests();
        let mut granted = Vec::with_capacity(asks.len());
        let mut answered = Vec::with_capacity(asks.len());
        for (ask, answer) in asks.iter().zip(answers) {
            answered.push(match answer.and_then(|grant| self.checked(ask, grant)) {
                Ok(Some(grant)) => {
                    let next = grant.next;
                    granted.push((*ask, grant));
                    Answered::Granted(ask.ino, next)
                }
                Ok(None) => Answered::Nothing(ask.ino),
                Err(e) => {
                    tracing::warn!("flusher: {}: {e}", self.shared.source.label(ask.ino));
                    Answered::Refused(ask.ino, e)
                }
            });
        }
        self.report(answered, Answered::tell);
        if !granted.is_empty() {
            self.carry_out(granted);
        }
    }

    fn wanted(&self, ask: &Ask) -> Want {
        let options = &self.shared.options;
        let most = match ask.interrupt {
            _ if ask.small => SMALL,
            Some(_) => self.asked,
            None => options.grant_bytes,
        };
        let most_bytes = plan::aligned_most(ask.from, most, options.chunk);
        Want { ino: ask.ino, from: ask.from, most_bytes }
    }

    fn carry_out(&mut self, granted: Vec<(Ask, Grant)>) {
        let mut held_back = Duration::ZERO;
        let began = Instant::now();
        let interrupt = granted.first().and_then(|(ask, _)| ask.interrupt);
        let moved = self.move_all(&granted, &mut held_back);
        let took = began.elapsed().saturating_sub(held_back);
        if interrupt.is_some() {
            self.learn(&moved, took);
        }
        let inos: Vec<Ino> = granted.iter().map(|(ask, _)| ask.ino).collect();
        let labels: Vec<String> = granted.iter().map(|(_, grant)| grant.label.clone()).collect();
        let (Some(first), Some(label)) = (inos.first(), labels.first()) else { return };
        self.slot.begins(*first, &inos.clone().into(), &Arc::from(label.as_str()), "flush end");
        let fates = moved.iter().map(|moved| match moved {
            Ok(moved) => Fate::Done { shaped: moved.shaped },
            Err(_) => Fate::GivenBack,
        });
        let ending = granted.into_iter().map(|(_, grant)| grant).zip(fates).collect();
        let ended = self.shared.source.end(ending);
        self.slot.rests();
        let mut outcomes = Vec::with_capacity(inos.len());
        for (((ino, label), moved), ended) in inos.into_iter().zip(labels).zip(moved).zip(ended) {
            let outcome = match (moved, ended) {
                (Ok(moved), Ok(())) => {
                    self.count(moved);
                    Outcome::Moved(ino, moved)
                }
                // Written, but when the service does not learn it, it must be flushed again.
                (Ok(_), Err(e)) | (Err(Unmoved::Failed(e)), _) => {
                    tracing::warn!("flusher: {label}: {e}");
                    Counters::add(&self.shared.counters.failed_grants, 1);
                    Outcome::Failed(ino, e)
                }
                // Given back, or forgotten by the service with our session.
                (Err(Unmoved::Stopped), _) => Outcome::Stopped(ino),
            };
            outcomes.push(outcome);
        }
        self.report(outcomes, Outcome::tell);
    }

    /// Writes all of them before the first is synced: the storage gets them together.
    fn move_all(
        &mut self,
        granted: &[(Ask, Grant)],
        held_back: &mut Duration,
    ) -> Vec<Result<Moved, Unmoved>> {
        let with: Arc<[Ino]> = granted.iter().map(|(ask, _)| ask.ino).collect();
        let mut stopped = false;
        let mut written = Vec::with_capacity(granted.len());
        for (ask, grant) in granted {
            let outcome = match stopped {
                true => Err(Unmoved::Stopped),
                false => self.write(ask, grant, &with, held_back),
            };
            stopped |= matches!(outcome, Err(Unmoved::Stopped));
            if let (Ok(Some(written)), true) = (&outcome, granted.len() > 1) {
                written.start();
            }
            written.push(outcome);
        }
        let finish = |(i, written): (usize, Result<Option<Written>, Unmoved>)| {
            let (ask, grant) = &granted[i];
            match written? {
                // The first is finished whatever happens: half of the work is done.
                Some(written) => self.finish(ask, grant, &with, written, i == 0),
                None => Ok(Moved::default()),
            }
        };
        written.into_iter().enumerate().map(finish).collect()
    }

    fn write(
        &mut self,
        ask: &Ask,
        grant: &Grant,
        with: &Arc<[Ino]>,
        held_back: &mut Duration,
    ) -> Result<Option<Written>, Unmoved> {
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
            slot.begins(ask.ino, with, &label, step.name());
            true
        };
        let written = write_grant(shared.backend.as_ref(), grant, how, &mut self.buf, &mut proceed);
        slot.rests();
        written
    }

    fn finish(
        &mut self,
        ask: &Ask,
        grant: &Grant,
        with: &Arc<[Ino]>,
        written: Written,
        whatever: bool,
    ) -> Result<Moved, Unmoved> {
        let (shared, slot) = (&self.shared, &self.slot);
        let label: Arc<str> = Arc::from(grant.label.as_str());
        let mut proceed = |step: Step| {
            if step == Step::Sync && !whatever && shared.is_over(ask) {
                return false;
            }
            slot.begins(ask.ino, with, &label, step.name());
            true
        };
        let moved = written.finish(&mut self.buf, &mut proceed);
        slot.rests();
        moved
    }

    /// Grants of runs that must give way take about as long as a stop may take.
    fn learn(&self, moved: &[Result<Moved, Unmoved>], took: Duration) {
        let options = &self.shared.options;
        let stopped = moved.iter().any(|m| matches!(m, Err(Unmoved::Stopped)));
        if moved.iter().any(|m| matches!(m, Err(Unmoved::Failed(_)))) {
            return;
        }
        let share = took.as_secs_f64() / options.stop_within.as_secs_f64().max(1e-6);
        // One step from what this grant was asked with: what others have learned meanwhile counts
        // more, or many small grants that were fast would make the next ones far too large.
        let next = plan::next_grant_size(self.asked, share, stopped, options.grant_bytes);
        // One that was smaller than it might have been says nothing of larger ones.
        let bytes: u64 = moved.iter().flatten().map(|m| m.bytes).sum();
        if next > self.asked && bytes < self.asked / 2 {
            return;
        }
        let learn = |size: u64| (size == self.asked || next < size).then_some(next);
        let _ = self.shared.grant_size.fetch_update(Ordering::Relaxed, Ordering::Relaxed, learn);
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
        for failed in self.shared.source.end(vec![(grant, Fate::GivenBack)]) {
            // The service forgets the grant with our session, or has done so.
            let _ = failed.inspect_err(|e| tracing::debug!("flusher: {label}: {e}"));
        }
    }

    fn report<T>(&self, news: Vec<T>, tell: impl Fn(T, &mut Queue, Instant) -> Option<Ended>) {
        let mut state: MutexGuard<'_, State> = self.shared.state.lock();
        for news in news {
            if let Some(ended) = tell(news, &mut state.queue, Instant::now()) {
                self.shared.pass_ended(&mut state, ended);
            }
        }
        self.shared.settle(&mut state);
    }
}

/// What the source said about a file.
enum Answered {
    /// And where the file goes on.
    Granted(Ino, Option<u64>),
    Nothing(Ino),
    Refused(Ino, FlushError),
}

impl Answered {
    fn tell(self, queue: &mut Queue, now: Instant) -> Option<Ended> {
        match self {
            Answered::Granted(ino, next) => {
                queue.granted(ino, next);
                None
            }
            Answered::Nothing(ino) => queue.nothing(ino, now),
            Answered::Refused(ino, e) => queue.refused(ino, e, now),
        }
    }
}

/// What became of a grant.
enum Outcome {
    Moved(Ino, Moved),
    Stopped(Ino),
    Failed(Ino, FlushError),
}

impl Outcome {
    fn tell(self, queue: &mut Queue, now: Instant) -> Option<Ended> {
        match self {
            Outcome::Moved(ino, moved) => queue.written(ino, moved.bytes, moved.verified, now),
            Outcome::Stopped(ino) => queue.interrupted(ino, now),
            Outcome::Failed(ino, e) => queue.failed(ino, e, now),
        }
    }
}

impl Shared {
    /// Whoever must be given way to is there.
    fn is_over(&self, ask: &Ask) -> bool {
        let interrupted = ask.interrupt.is_some_and(|epoch| epoch != self.activity.epoch());
        interrupted || self.is_stopping()
    }

    /// Waits for its turn under the bandwidth cap; false when the write must not be made.
    fn may_write(&self, lane: Lane, ask: &Ask, bytes: u64, held_back: &mut Duration) -> bool {
        if lane == Lane::Drain {
            return !self.is_stopping();
        }
        let mut left = self.throttle.reserve(bytes, Instant::now());
        loop {
            if self.is_over(ask) || self.is_paused() {
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
