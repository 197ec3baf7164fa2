//! Bounds the connections of strangers: those that have not proven yet that they belong to the
//! job. When there are too many, the oldest is shut out for the newest, so that a flood of
//! connections that never say anything cannot keep out those that do: a handshake takes
//! milliseconds, and each connection of the flood costs the flood a place of its own.
//!
//! When thousands come at once who all have something to say, throwing out the oldest throws out those who are
//! nearly done, and they come again: the more come, the fewer get in. So who can leave newcomers at the
//! door (in the backlog of the socket) asks first whether there is room ([`Gate::room`]). There is, besides free
//! places, where a stranger has kept the gate waiting for too long; that the gate has not come to look at one
//! yet is not held against it.

use ebb_locks::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Who has had nothing to say for so long must go when others wait at the door.
const SILENT_TOO_LONG: Duration = Duration::from_millis(250);

/// And who has been a stranger for so long, whatever it says.
const STRANGER_TOO_LONG: Duration = Duration::from_secs(2);

/// Between two looks whether one of them has to.
const LOOK: Duration = Duration::from_millis(25);

/// Counts strangers.
#[derive(Debug)]
pub struct Gate {
    limit: usize,
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    next: u64,
    /// By arrival.
    strangers: BTreeMap<u64, Inmate>,
    /// Who waits for a place.
    at_the_door: Option<Waker>,
}

#[derive(Debug)]
struct Inmate {
    /// What is sent tells it to go.
    out: oneshot::Sender<()>,
    came: Instant,
    /// Since when it has had nothing more to say; `None`: it has not been looked at since it said something.
    silent: Option<Instant>,
}

impl Inmate {
    fn must_go(&self, now: Instant) -> bool {
        let silent = self.silent.map_or(Duration::ZERO, |since| now.duration_since(since));
        silent >= SILENT_TOO_LONG || now.duration_since(self.came) >= STRANGER_TOO_LONG
    }
}

/// Whether one more may come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Now.
    Some,
    /// Not now; it should be looked again after this time, if nobody is woken before.
    None(Duration),
}

/// A place at the gate; dropping it gives it up, because the stranger has proven itself or left.
#[derive(Debug)]
pub struct Stranger {
    gate: Arc<Gate>,
    number: u64,
}

/// Resolves when the stranger is shut out; never once its place was given up.
#[derive(Debug)]
pub struct ShutOut(oneshot::Receiver<()>);

impl Gate {
    /// A gate with room for `limit` strangers, at least one.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Gate> {
        Arc::new(Gate { limit: limit.max(1), inside: Mutex::default() })
    }

    /// Whether one more can come in without another being sent away that may be about to say something.
    /// `at_the_door` is woken when a place is given up.
    pub fn room(&self, now: Instant, at_the_door: &Waker) -> Room {
        let mut inside = self.inside.lock();
        if inside.strangers.len() < self.limit
            || inside.strangers.values().any(|stranger| stranger.must_go(now))
        {
            return Room::Some;
        }
        inside.at_the_door = Some(at_the_door.clone());
        Room::None(LOOK)
    }

    /// Lets one more in, and one out when there is no room: the first that must go anyway, else the oldest.
    pub fn enter(self: &Arc<Gate>) -> (Stranger, ShutOut) {
        let (out, shut_out) = oneshot::channel();
        let now = Instant::now();
        let mut inside = self.inside.lock();
        if inside.strangers.len() >= self.limit {
            let mut all = inside.strangers.iter();
            let goes = all.find(|(_, stranger)| stranger.must_go(now)).map(|(number, _)| *number);
            let goes = goes.or_else(|| inside.strangers.keys().next().copied());
            if let Some(stranger) = goes.and_then(|number| inside.strangers.remove(&number)) {
                // It may be about to leave by itself.
                let _ = stranger.out.send(());
            }
        }
        let number = inside.next;
        inside.next += 1;
        inside.strangers.insert(number, Inmate { out, came: now, silent: None });
        drop(inside);
        (Stranger { gate: Arc::clone(self), number }, ShutOut(shut_out))
    }

    /// How many there are now.
    #[must_use]
    pub fn strangers(&self) -> usize {
        self.inside.lock().strangers.len()
    }
}

impl Stranger {
    /// It was looked at and has nothing to say so far; `now`: not since then.
    pub fn is_silent(&self, now: Instant) {
        self.note(Some(now));
    }

    /// It has said something.
    pub fn speaks(&self) {
        self.note(None);
    }

    fn note(&self, silent: Option<Instant>) {
        if let Some(inmate) = self.gate.inside.lock().strangers.get_mut(&self.number) {
            inmate.silent = silent;
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut inside = self.gate.inside.lock();
        inside.strangers.remove(&self.number);
        let at_the_door = inside.at_the_door.take();
        drop(inside);
        if let Some(waker) = at_the_door {
            waker.wake();
        }
    }
}

impl ShutOut {
    /// Waits for the word to go.
    pub async fn wait(self) {
        if self.0.await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::timeout;

    async fn is_out(shut_out: ShutOut) -> bool {
        timeout(Duration::from_millis(20), shut_out.wait()).await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_goes_when_there_is_no_room() {
        let gate = Gate::new(2);
        let (a, out_a) = gate.enter();
        let (b, out_b) = gate.enter();
        let (c, out_c) = gate.enter();
        assert_eq!(gate.strangers(), 2);
        assert!(is_out(out_a).await);
        drop(b);
        assert!(!is_out(out_b).await, "who has proven itself is never told to go");
        let (d, out_d) = gate.enter();
        assert_eq!(gate.strangers(), 2, "a place given up is free");
        assert!(!is_out(out_d).await);
        let (_e, _) = gate.enter();
        assert!(is_out(out_c).await);
        drop((a, c, d));
        assert_eq!(gate.strangers(), 1);
    }

    /// Counts how often it is woken.
    #[derive(Default)]
    struct Bell(std::sync::atomic::AtomicUsize);

    impl std::task::Wake for Bell {
        fn wake(self: Arc<Bell>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn who_waits_at_the_door_comes_in_when_a_place_is_free_or_somebody_is_silent_for_long() {
        let bell = Arc::new(Bell::default());
        let waker = Waker::from(Arc::clone(&bell));
        let rung = || bell.0.load(std::sync::atomic::Ordering::Relaxed);
        let gate = Gate::new(2);
        let now = Instant::now();
        assert_eq!(gate.room(now, &waker), Room::Some);
        let (a, mut out_a) = gate.enter();
        let (b, out_b) = gate.enter();
        assert_eq!(gate.room(now, &waker), Room::None(LOOK), "nobody is sent away");
        assert_eq!(rung(), 0);
        drop(a);
        assert_eq!((rung(), gate.room(now, &waker)), (1, Room::Some));
        assert!(out_a.0.try_recv().is_err(), "it left by itself");
        let (c, out_c) = gate.enter();
        let later = Instant::now() + SILENT_TOO_LONG;
        assert_eq!(gate.room(later, &waker), Room::None(LOOK), "none was looked at so far");
        // The younger one is silent, the older one speaks.
        c.is_silent(Instant::now() - SILENT_TOO_LONG);
        b.is_silent(Instant::now() - SILENT_TOO_LONG);
        b.speaks();
        assert_eq!(gate.room(Instant::now(), &waker), Room::Some);
        let (d, out_d) = gate.enter();
        assert!(is_out(out_c).await);
        assert!(!is_out(out_b).await && !is_out(out_d).await);
        assert_eq!(gate.strangers(), 2);
        let much_later = Instant::now() + STRANGER_TOO_LONG;
        assert_eq!(gate.room(much_later, &waker), Room::Some, "whatever they say");
        drop((b, c, d));
        assert_eq!(gate.strangers(), 0);
    }

    #[tokio::test]
    async fn a_flood_never_holds_more_than_the_limit() {
        let gate = Gate::new(16);
        let all: Vec<_> = (0..10_000).map(|_| gate.enter()).collect();
        assert_eq!(gate.strangers(), 16);
        drop(all);
        assert_eq!(gate.strangers(), 0);
    }
}
