//! Until when this node may trust its leases, by a clock that does not stop while the machine
//! sleeps; and whom to tell of recalls.

use crate::client::{Inner, MetaClient};
use ebb_consistency::{LeaseSeq, Trust};
use ebb_locks::Mutex;
use ebb_types::{ByteRange, Ino};
use ebb_wire::pb::{self, request::Op};
use ebb_wire::{LEASES_UNTIL_GIVEN_UP, range_from_pb};
use rustix::time::{ClockId, clock_gettime};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};

/// Told of a recall: the inode, and the number below which grants end. Must not wait. False: something
/// must be told first, and then [`MetaClient::return_recalled`] is called.
pub type OnRecall = Box<dyn Fn(Ino, LeaseSeq) -> bool + Send + Sync>;

/// Told that something is to be published for others, and then [`MetaClient::published`] called. Must
/// not wait.
pub type OnPublish = Box<dyn Fn(PublishFor) + Send + Sync>;

/// What is to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishFor {
    /// Of which file.
    pub ino: Ino,
    /// Which bytes.
    pub range: ByteRange,
    /// The seat that this node has of it, as far as the service knows; 0: somebody has locked the
    /// range.
    pub seat: u64,
    /// The number to answer with.
    pub seq: u64,
}

/// Told that the service has given this node up, before anything is heard on the new connection. Must
/// not wait.
pub type OnGivenUp = Box<dyn Fn() + Send + Sync>;

/// Called when a coupled file that this node has used is no more. Must not block.
pub type OnDeleted = Box<dyn Fn(Ino) + Send + Sync>;

/// Milliseconds that pass also while the machine sleeps, and that leap when the time of day was set
/// forward (see [`Leaps`]).
#[must_use]
pub fn now_ms() -> u64 {
    static LEAPS: Leaps = Leaps::new();
    let ms = |clock| {
        let now = clock_gettime(clock);
        now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
    };
    LEAPS.now(ms(ClockId::Boottime), ms(ClockId::Realtime))
}

/// A virtual machine that was paused or moved to another host has missed time, and none of its own
/// clocks has: it learns of it when its time of day is set right. So a step forward of the time of
/// day is time that passed. Where it was not (somebody set the date) leases are asked for again once.
/// Until the time of day is set right, nothing in the machine can tell.
struct Leaps {
    /// Time of day less the other clock when last taken, in milliseconds.
    apart: AtomicI64,
    leapt: AtomicU64,
}

/// Clocks drift apart by less between two looks, or it does not matter.
const LEAP_MS: i64 = 100;

impl Leaps {
    const fn new() -> Leaps {
        Leaps { apart: AtomicI64::new(i64::MIN), leapt: AtomicU64::new(0) }
    }

    fn now(&self, clock: u64, day: u64) -> u64 {
        let (apart, before) =
            (day.cast_signed().wrapping_sub(clock.cast_signed()), self.apart.load(Acquire));
        if before == i64::MIN {
            // Who comes second compares with what the first one saw.
            let _ = self.apart.compare_exchange(before, apart, AcqRel, Acquire);
        } else if apart.abs_diff(before) > LEAP_MS.unsigned_abs() {
            if apart > before {
                // First this. Several threads may add the same: the later it seems the better.
                self.leapt.fetch_add(apart.abs_diff(before), AcqRel);
            }
            self.apart.store(apart, Release);
        }
        clock.saturating_add(self.leapt.load(Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_forward_of_the_time_of_day_is_time_that_passed() {
        let leaps = Leaps::new();
        assert_eq!(leaps.now(1000, 50_000), 1000);
        assert_eq!(leaps.now(1500, 50_510), 1500, "clocks are not exact");
        // Paused for a minute, and set right.
        assert_eq!(leaps.now(1600, 110_600), 61_600);
        assert_eq!(leaps.now(1700, 110_700), 61_700);
        // Set back: nothing was missed, and what was is still so.
        assert_eq!(leaps.now(1800, 10_800), 61_800);
        assert_eq!(leaps.now(1900, 10_900), 61_900);
    }

    #[test]
    fn what_was_trusted_before_a_leap_is_not_after_it() {
        let leaps = Leaps::new();
        let mut trust = Trust::default();
        trust.begin(5000);
        let sent = leaps.now(1000, 900_000);
        trust.answered(sent, leaps.now(1001, 900_001));
        assert!(trust.epoch(leaps.now(2000, 901_000)).is_some());
        assert!(trust.epoch(leaps.now(2100, 961_000)).is_none(), "a minute was missed");
        let sent = leaps.now(2200, 961_100);
        trust.answered(sent, leaps.now(2201, 961_101));
        assert!(trust.epoch(leaps.now(2300, 961_200)).is_some(), "heard again since");
    }
}

/// What the service asked for on a connection before somebody listened.
enum Early {
    Recall(u64, pb::Recall),
    Publish(u64, pb::Publish),
}

#[derive(Default)]
pub(crate) struct Trusting {
    trust: Mutex<Trust>,
    /// The same of grants to flush, which end when this node is not heard for a whole lease.
    grants: Mutex<Trust>,
    on_recall: OnceLock<OnRecall>,
    on_publish: OnceLock<OnPublish>,
    on_given_up: OnceLock<OnGivenUp>,
    on_deleted: OnceLock<OnDeleted>,
    /// What the service asked for before there was anybody to be told: between the welcome and the
    /// first lease. So it is no more than what the lives before this one have left to be told.
    early: Mutex<Vec<Early>>,
    /// Nobody could be told yet.
    was_given_up: AtomicBool,
    /// When the last word that was answered was sent, and until when locks are this node's after
    /// that.
    last_word: AtomicU64,
    locks_for: AtomicU64,
}

impl Trusting {
    /// A new stream was welcomed.
    pub fn begin(&self, lease_ms: u32) {
        self.trust.lock().begin(u64::from(lease_ms));
    }

    /// A heartbeat that was sent at `sent` was answered.
    pub fn answered(&self, sent: u64) {
        let now = now_ms();
        self.trust.lock().answered(sent, now);
        self.grants.lock().answered(sent, now);
        self.last_word.fetch_max(sent, Relaxed);
    }

    /// The service said in which time it misses a node. The Hello that it answered was sent at `sent`.
    pub fn welcomed(&self, sent: u64, lease_ms: u32, given_up: bool) {
        let until = u64::from(lease_ms) * u64::from(LEASES_UNTIL_GIVEN_UP);
        self.locks_for.store(until - until / 10, Relaxed);
        {
            let mut grants = self.grants.lock();
            grants.begin(u64::from(lease_ms));
            grants.answered(sent, now_ms());
        }
        match self.on_given_up.get() {
            Some(tell) if given_up => tell(),
            None if given_up => self.was_given_up.store(true, Relaxed),
            _ => {}
        }
        self.last_word.fetch_max(sent, Relaxed);
    }
}

impl Inner {
    /// A lease is called back: it is dropped, and returned at once if nothing must be told first.
    pub fn recalled(&self, recall: &pb::Recall) {
        if self.waits(&self.trusting.on_recall, |on| Early::Recall(on, *recall)) {
            return;
        }
        let (ino, seq) = (Ino(recall.ino), LeaseSeq(recall.seq));
        if self.trusting.on_recall.get().is_none_or(|on_recall| on_recall(ino, seq)) {
            self.give_back(ino, seq);
        }
    }

    /// True when what was asked is kept until there is somebody to be told. (An earlier life may have
    /// written without telling: to return its lease would be to say that it has told everything.)
    fn waits<T>(&self, listener: &OnceLock<T>, what: impl FnOnce(u64) -> Early) -> bool {
        if !self.options.listens {
            return false;
        }
        let mut early = self.trusting.early.lock();
        let waits = listener.get().is_none();
        if waits {
            early.push(what(self.sessions.load(Relaxed)));
        }
        waits
    }

    /// Somebody is told from now on, also of what came before, but for what was asked on a
    /// connection that is no more: it is asked again.
    fn listen<T>(&self, to: &OnceLock<T>, listener: T, which: fn(&Early) -> bool) {
        let mut early = self.trusting.early.lock();
        let _ = to.set(listener);
        let kept: Vec<Early> = early.extract_if(.., |e| which(e)).collect();
        drop(early);
        let now = self.sessions.load(Relaxed);
        for what in kept {
            match what {
                Early::Recall(on, recall) if on == now => self.recalled(&recall),
                Early::Publish(on, asked) if on == now => self.asked_to_publish(&asked),
                _ => {}
            }
        }
    }

    /// Something is to be published for others.
    pub fn asked_to_publish(&self, asked: &pb::Publish) {
        if self.waits(&self.trusting.on_publish, |on| Early::Publish(on, *asked)) {
            return;
        }
        let range = asked.range.map(range_from_pb);
        let Ok(range) = range.unwrap_or(Ok(ByteRange::ALL)) else { return };
        let pb::Publish { ino, seat, seq, .. } = *asked;
        if let Some(on_publish) = self.trusting.on_publish.get() {
            on_publish(PublishFor { ino: Ino(ino), range, seat, seq });
        }
    }

    /// Without a listener the node asks in its own time.
    pub fn is_deleted(&self, ino: Ino) {
        self.trusting.on_deleted.get().iter().for_each(|tell| tell(ino));
    }

    fn give_back(&self, ino: Ino, seq: LeaseSeq) {
        let op = Op::Returned(pb::Returned { ino: ino.0, seq: seq.0 });
        self.post(op, self.on_this_connection());
    }
}

impl MetaClient {
    /// Whom to tell of recalls; only the first one is told. Before it is set no lease may be asked
    /// for.
    pub fn on_recall(&self, on_recall: OnRecall) {
        let which = |e: &Early| matches!(e, Early::Recall(..));
        self.inner.listen(&self.inner.trusting.on_recall, on_recall, which);
    }

    /// Whom to tell of what is to be published for others; only the first one is told.
    pub fn on_publish(&self, on_publish: OnPublish) {
        let which = |e: &Early| matches!(e, Early::Publish(..));
        self.inner.listen(&self.inner.trusting.on_publish, on_publish, which);
    }

    /// Whom to tell that this node was given up; only the first one is told.
    pub fn on_deleted(&self, on_deleted: OnDeleted) {
        let _ = self.inner.trusting.on_deleted.set(on_deleted);
    }

    /// See [`OnGivenUp`]. Once.
    pub fn on_given_up(&self, on_given_up: OnGivenUp) {
        let _ = self.inner.trusting.on_given_up.set(on_given_up);
    }

    /// True when the life that this daemon goes on for had been given up.
    #[must_use]
    pub fn was_given_up(&self) -> bool {
        self.inner.trusting.was_given_up.load(Relaxed)
    }

    /// False: the service may have given this node's locks to others. It counts from when it received
    /// the last word, this node from when it sent the last one that was answered, less a tenth.
    #[must_use]
    pub fn keeps_locks(&self) -> bool {
        let trusting = &self.inner.trusting;
        let silence = now_ms().saturating_sub(trusting.last_word.load(Relaxed));
        silence < trusting.locks_for.load(Relaxed)
    }

    /// What a grant to flush that is asked for now, or is used, is compared with: it may have ended, and
    /// others may flush the same bytes, when the two differ. `None` while nobody hears this node.
    #[must_use]
    pub fn grants(&self) -> Option<u64> {
        if !self.inner.exchange.is_up() {
            return None;
        }
        self.inner.trusting.grants.lock().epoch(now_ms())
    }

    /// What a lease that is asked for now, or was granted, is compared with; `None` while nothing
    /// may be trusted.
    #[must_use]
    pub fn trust(&self) -> Option<u64> {
        self.inner.trusting.trust.lock().epoch(now_ms())
    }

    /// The number of the connection that answers come on now.
    #[must_use]
    pub fn connection(&self) -> u64 {
        self.inner.sessions.load(Relaxed)
    }

    /// What a lease that was called back on this connection covered has been told. On another one
    /// its number means nothing.
    pub fn return_recalled(&self, connection: u64, ino: Ino, seq: LeaseSeq) {
        if self.connection() == connection {
            self.inner.give_back(ino, seq);
        }
    }

    /// A lease is given up without being asked.
    pub fn return_lease(&self, ino: Ino, seq: LeaseSeq) {
        self.inner.give_back(ino, seq);
    }
}
