//! A service's right to answer: until a lease after the beginning of its last look that has found no newer term.
//! Whoever takes the next term waits for that lease, counted from when his term could be seen, so that two
//! services never answer at the same time, also when the older one stood still meanwhile.
//!
//! The clock is that of the time since boot, which goes on while a machine sleeps. Two machines need not agree on
//! the time, only on how long a second is, within an eighth.

use crate::directory::{CoordinatorError, Directory};
use crate::term::{Holder, Term};
use rustix::time::{ClockId, clock_gettime};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// So often, as a part of the lease, a service looks for a newer term.
const LOOKS_PER_LEASE: u32 = 10;
const LOOK_MOST: Duration = Duration::from_millis(500);
const LOOK_LEAST: Duration = Duration::from_millis(20);
/// Between two looks whether the services before have ended.
const WAIT_LOOK: Duration = Duration::from_millis(50);

/// The right is gone, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Ended(pub String);

/// A service's right to answer. Of a service without a directory of terms (the default) it never ends.
#[derive(Clone, Debug, Default)]
pub struct Tenure(pub(crate) Option<Arc<Inner>>);

#[derive(Debug)]
pub(crate) struct Inner {
    path: PathBuf,
    term: Term,
    right: watch::Sender<Right>,
    /// A standby wants to know that this service lives.
    beats: AtomicBool,
    /// The last beat.
    beat: watch::Sender<u64>,
    /// Stops a look between what it says and what it sees.
    #[cfg(test)]
    pub(crate) pause: tokio::sync::Mutex<()>,
}

/// How long it lasts.
#[derive(Clone, Debug)]
enum Right {
    /// Until this moment, if no other look is made before.
    Until(u64),
    /// It is over, for good.
    Over(Ended),
}

/// A term that was taken.
#[derive(Debug)]
pub struct Taken {
    /// The right to answer, once [`Taken::alone`] says so.
    pub tenure: Tenure,
    /// The services that may still answer.
    before: Vec<Term>,
    /// Since then they can see that their terms are over.
    since: u64,
}

/// Takes the next term for the service at `address`, as this process.
pub fn take(path: &Path, address: &str, lease: Duration) -> Result<Taken, CoordinatorError> {
    let dir = Directory::make(path)?;
    let (term, before) = loop {
        let before = dir.terms()?;
        let last = before.iter().map(|term| term.number).max().unwrap_or(0);
        if let Some(term) = claim_after(&dir, last, address, lease)? {
            break (term, before);
        }
    };
    begin(&dir, term, before)
}

/// Takes the term after that number; none: another one has it.
pub(crate) fn claim_after(
    dir: &Directory,
    last: u64,
    address: &str,
    lease: Duration,
) -> Result<Option<Term>, CoordinatorError> {
    let there = address.to_owned();
    let term = last.checked_add(1);
    let term = term.map(|number| Term { number, address: there, lease, holder: Holder::me() });
    // What goes wrong goes wrong before the service that is there is replaced.
    let Some(term) = term.filter(|t| Term::decode(&t.encode()).as_ref() == Ok(t)) else {
        return Err(CoordinatorError::Absurd {
            path: dir.path().to_owned(),
            address: address.to_owned(),
            lease,
        });
    };
    Ok(dir.claim(&term)?.then_some(term))
}

/// The term is this process's, which has to wait for those of `before`.
pub(crate) fn begin(
    dir: &Directory,
    term: Term,
    mut before: Vec<Term>,
) -> Result<Taken, CoordinatorError> {
    let path = dir.path();
    let since = now_ms();
    before.retain(|other| !may_be_passed_over(dir, other));
    let inner = Arc::new(Inner {
        path: path.to_owned(),
        term,
        right: watch::Sender::new(Right::Until(0)),
        beats: AtomicBool::new(false),
        beat: watch::Sender::new(0),
        #[cfg(test)]
        pause: tokio::sync::Mutex::new(()),
    });
    let watched = Arc::downgrade(&inner);
    std::thread::Builder::new()
        .name("term".to_owned())
        .spawn(move || keep(&watched))
        .map_err(|source| CoordinatorError::Io { path: path.to_owned(), source })?;
    Ok(Taken { tenure: Tenure(Some(inner)), before, since })
}

/// True when a service can say nothing any more.
pub(crate) fn may_be_passed_over(dir: &Directory, term: &Term) -> bool {
    dir.has_ended(term.number).unwrap_or(false) || term.holder.is_dead()
}

/// Milliseconds since this machine was started, those in which it slept included.
pub(crate) fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

pub(crate) fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Taken {
    /// The number of the term.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.tenure.number()
    }

    /// The service before, if it may still answer, and how long that can take.
    #[must_use]
    pub fn waits_for(&self) -> Option<(&Term, Duration)> {
        let last = self.before.iter().max_by_key(|term| term.number)?;
        let most = self.before.iter().map(quiet_after).max()?;
        Some((last, most))
    }

    /// Waits until none of the services before can answer any more.
    pub async fn alone(mut self) -> Result<Tenure, Ended> {
        while let Some((_, most)) = self.waits_for() {
            let Some(inner) = &self.tenure.0 else { break };
            if let Some(over) = inner.over() {
                return Err(over);
            }
            if now_ms().saturating_sub(self.since) >= ms(most) {
                break;
            }
            tokio::time::sleep(WAIT_LOOK).await;
            let (path, mut before) = (inner.path.clone(), std::mem::take(&mut self.before));
            let looked = tokio::task::spawn_blocking(move || {
                if let Ok(dir) = Directory::open(&path) {
                    before.retain(|term| !may_be_passed_over(&dir, term));
                }
                before
            });
            self.before = looked.await.map_err(|e| Ended(e.to_string()))?;
        }
        self.tenure.held().await?;
        if let Some(inner) = self.tenure.0.clone() {
            // Nobody waits for those before any more. What cannot be removed is in nobody's way.
            let tidy = move || Directory::open(&inner.path).and_then(|d| d.tidy(inner.term.number));
            let _ = tokio::task::spawn_blocking(tidy).await;
        }
        Ok(self.tenure)
    }
}

/// When a service whose term is over says nothing any more.
pub(crate) fn quiet_after(term: &Term) -> Duration {
    term.lease + term.lease / 8
}

impl Tenure {
    /// Waits until this service may answer. Between this and what is done then no time may pass for which the
    /// caller waits.
    pub async fn held(&self) -> Result<(), Ended> {
        let Some(inner) = &self.0 else { return Ok(()) };
        if let Some(known) = inner.is_held() {
            return known;
        }
        let mut right = inner.right.subscribe();
        loop {
            right.mark_unchanged();
            if let Some(known) = inner.is_held() {
                return known;
            }
            // The sender lives as long as this handle.
            let _ = right.changed().await;
        }
    }

    /// The same for a thread that may block.
    pub fn held_by_thread(&self) -> Result<(), Ended> {
        let Some(inner) = &self.0 else { return Ok(()) };
        loop {
            if let Some(known) = inner.is_held() {
                return known;
            }
            std::thread::sleep(LOOK_LEAST);
        }
    }

    /// Waits until the right is gone for good, and says why.
    pub async fn over(&self) -> Ended {
        let Some(inner) = &self.0 else { return std::future::pending().await };
        let mut right = inner.right.subscribe();
        loop {
            right.mark_unchanged();
            if let Some(ended) = inner.over() {
                return ended;
            }
            // The sender lives as long as this handle.
            let _ = right.changed().await;
        }
    }

    /// The number of its term; 0: there is no directory.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0.as_ref().map_or(0, |inner| inner.term.number)
    }

    /// From now on the directory shows that this service lives. Counts the beats; none without a directory.
    #[must_use]
    pub fn beats(&self) -> Option<watch::Receiver<u64>> {
        let inner = self.0.as_ref()?;
        inner.beats.store(true, Relaxed);
        Some(inner.beat.subscribe())
    }

    /// This service says nothing any more.
    pub fn give_up(&self) {
        if let Some(inner) = &self.0 {
            inner.set(Right::Over(Ended("this service has ended".to_owned())));
        }
    }

    /// The same, and nothing that it began is under way: whoever comes need not wait.
    pub fn end(&self) {
        let Some(inner) = &self.0 else { return };
        self.give_up();
        let said = Directory::open(&inner.path).and_then(|dir| dir.end(inner.term.number));
        if let Err(e) = said {
            tracing::warn!(error = %e, "that this service has ended is not noted: the next one waits for its lease");
        }
    }
}

impl Inner {
    /// Whether it may be used now; none: that is in doubt.
    pub(crate) fn is_held(&self) -> Option<Result<(), Ended>> {
        match &*self.right.borrow() {
            Right::Over(ended) => Some(Err(ended.clone())),
            Right::Until(until) => (now_ms() < *until).then_some(Ok(())),
        }
    }

    pub(crate) fn over(&self) -> Option<Ended> {
        self.is_held()?.err()
    }

    /// Changes the right, unless it is over.
    fn set(&self, new: Right) {
        self.right.send_if_modified(|right| match right {
            Right::Over(_) => false,
            Right::Until(_) => {
                *right = new;
                true
            }
        });
    }

    /// Once it has beaten it must go on: a standby takes it for dead. One that cannot begin, because the directory is
    /// full, has no standby that could take over.
    fn say_that_it_lives(&self) -> Result<(), CoordinatorError> {
        let last = *self.beat.borrow();
        match Directory::open(&self.path)?.beat(self.term.number, last + 1) {
            Ok(()) => {
                self.beat.send_replace(last + 1);
                Ok(())
            }
            Err(e) if last == 0 => {
                tracing::debug!(error = %e, "no standby can be in step");
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Looks for a newer term. False when there is one.
    fn look(&self) -> Result<bool, CoordinatorError> {
        let began = now_ms();
        if self.beats.load(Relaxed) {
            self.say_that_it_lives()?;
        }
        #[cfg(test)]
        drop(self.pause.blocking_lock());
        // Opened after that: a network file system shows what is new at an open.
        let newest = Directory::open(&self.path)?.newest()?;
        match newest {
            Some(newest) if newest.number > self.term.number => {
                self.set(Right::Over(Ended(format!(
                    "another metadata service has taken over: term {} at {} (this one had term {})",
                    newest.number, newest.address, self.term.number
                ))));
                Ok(false)
            }
            Some(newest) if newest == self.term => {
                self.set(Right::Until(began.saturating_add(ms(self.term.lease))));
                Ok(true)
            }
            _ => Err(CoordinatorError::Gone { path: self.path.clone(), number: self.term.number }),
        }
    }
}

/// Looks for a newer term as long as anybody needs to know.
fn keep(inner: &Weak<Inner>) {
    let mut said = None;
    while let Some(inner) = inner.upgrade() {
        if inner.over().is_some() {
            return;
        }
        match inner.look() {
            Ok(true) => {
                if said.take().is_some() {
                    tracing::warn!("the directory of terms can be read again");
                }
            }
            Ok(false) => return,
            Err(e) => {
                let text = e.to_string();
                if said.as_ref() != Some(&text) {
                    tracing::error!(
                        error = text,
                        "whether another metadata service has taken over cannot be seen: this one answers nothing \
                         until it can"
                    );
                }
                said = Some(text);
            }
        }
        let period = (inner.term.lease / LOOKS_PER_LEASE).clamp(LOOK_LEAST, LOOK_MOST);
        drop(inner);
        std::thread::sleep(period);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::time::Instant;

    pub const LEASE: Duration = Duration::from_millis(1000);

    pub fn dir() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().expect("tempdir");
        let path = root.path().join("terms");
        (root, path)
    }

    pub async fn alone(path: &Path, address: &str) -> Tenure {
        take(path, address, LEASE).expect("taken").alone().await.expect("alone")
    }

    #[tokio::test]
    async fn the_first_one_waits_for_nobody_and_the_second_one_for_the_end_of_the_first() {
        let (_root, path) = dir();
        let begun = Instant::now();
        let first = alone(&path, "a:1").await;
        assert!(begun.elapsed() < LEASE, "there is nobody before it");
        assert_eq!(first.held().await, Ok(()));
        let second = take(&path, "b:1", LEASE).expect("taken");
        let ended = first.over().await;
        assert!(ended.0.contains("term 2 at b:1"), "{ended}");
        assert!(first.held().await.is_err() && first.held_by_thread().is_err());
        let waiting = tokio::spawn(second.alone());
        tokio::time::sleep(LEASE / 4).await;
        assert!(!waiting.is_finished(), "the first one has not said that it has ended");
        first.end();
        let second = waiting.await.expect("no panic").expect("alone");
        assert!(begun.elapsed() < LEASE * 4);
        assert_eq!(second.held().await, Ok(()));
        assert_eq!(second.held_by_thread(), Ok(()));
    }

    /// What goes wrong goes wrong before anybody is replaced.
    #[tokio::test]
    async fn an_absurd_term_replaces_nobody() {
        let (_root, path) = dir();
        let first = alone(&path, "a:1").await;
        for (address, lease) in [("b", LEASE), ("b:0", LEASE), ("b:1", Duration::from_secs(7200))] {
            let refused = take(&path, address, lease);
            assert!(matches!(refused, Err(CoordinatorError::Absurd { .. })), "{address} {lease:?}");
        }
        std::fs::write(path.join("service-00000000000000000000"), "?").expect("write");
        assert!(matches!(take(&path, "b:1", LEASE), Err(CoordinatorError::Garbage { .. })));
        tokio::time::sleep(LEASE + LEASE / 2).await;
        assert_eq!(first.held().await, Ok(()));
        std::fs::remove_file(path.join("service-00000000000000000000")).expect("remove");
        let last = Term {
            number: u64::MAX,
            address: "c:1".to_owned(),
            lease: LEASE,
            holder: Holder::me(),
        };
        assert!(Directory::open(&path).expect("open").claim(&last).expect("claim"));
        assert!(matches!(take(&path, "b:1", LEASE), Err(CoordinatorError::Absurd { .. })));
    }

    /// However many were begun and given up meanwhile.
    #[tokio::test]
    async fn who_is_waited_for_is_not_forgotten() {
        let (_root, path) = dir();
        let first = take(&path, "a:1", LEASE * 2).expect("taken").alone().await.expect("alone");
        let begun = Instant::now();
        for _ in 0..20 {
            let taken = take(&path, "b:1", LEASE).expect("taken");
            taken.tenure.end();
        }
        let last = take(&path, "c:1", LEASE).expect("taken").alone().await.expect("alone");
        assert!(begun.elapsed() >= LEASE * 2, "{:?}", begun.elapsed());
        assert!(first.held().await.is_err() && last.held().await.is_ok());
        let left = Directory::open(&path).expect("open").terms().expect("terms");
        assert!(left.len() <= 9, "{} are left", left.len());
    }

    #[tokio::test]
    async fn who_says_nothing_is_waited_for() {
        let (_root, path) = dir();
        let first = alone(&path, "a:1").await;
        let begun = Instant::now();
        let second = take(&path, "b:1", LEASE).expect("taken");
        assert_eq!(
            second.waits_for().map(|(term, _)| term.address.clone()),
            Some("a:1".to_owned())
        );
        let second = second.alone().await.expect("alone");
        assert!(begun.elapsed() >= LEASE, "{:?}", begun.elapsed());
        assert!(first.held().await.is_err());
        assert_eq!(second.held().await, Ok(()));
    }

    /// The service before the last one had the longer lease.
    #[tokio::test]
    async fn all_that_were_before_are_waited_for() {
        let (_root, path) = dir();
        let first = take(&path, "a:1", LEASE * 3).expect("taken").alone().await.expect("alone");
        let begun = Instant::now();
        let second = take(&path, "b:1", LEASE / 4).expect("taken");
        let third = take(&path, "c:1", LEASE / 4).expect("taken");
        assert!(second.alone().await.is_err(), "it never began");
        third.alone().await.expect("alone");
        assert!(begun.elapsed() >= LEASE * 3, "{:?}", begun.elapsed());
        drop(first);
    }

    #[tokio::test]
    async fn who_cannot_look_does_not_answer() {
        let (root, path) = dir();
        let first = alone(&path, "a:1").await;
        let aside = root.path().join("aside");
        std::fs::rename(&path, &aside).expect("rename");
        tokio::time::sleep(LEASE * 2).await;
        let waits = tokio::time::timeout(LEASE, first.held()).await;
        assert!(waits.is_err(), "it answers, and cannot know that it may");
        // Somebody has made another one there, in which nothing is known of this service.
        std::fs::create_dir(&path).expect("mkdir");
        assert!(tokio::time::timeout(LEASE, first.held()).await.is_err());
        std::fs::remove_dir(&path).expect("rmdir");
        std::fs::rename(&aside, &path).expect("rename");
        tokio::time::timeout(LEASE * 4, first.held()).await.expect("in time").expect("held");
    }

    /// Services come and go in one directory, some of them say that they end: never could two answer at once.
    #[test]
    fn two_never_answer_at_once() {
        let (_root, path) = dir();
        let lease = Duration::from_millis(60);
        let serves = |who: u64, round: u64| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            let runtime = runtime.expect("a runtime");
            std::thread::sleep(Duration::from_millis((who * 137 + round * 211) % 700));
            let taken = take(&path, "a:1", lease).expect("taken");
            let Ok(tenure) = runtime.block_on(taken.alone()) else { return None };
            let inner = tenure.0.clone().expect("it has a term");
            let mut answered: Option<(u64, u64)> = None;
            let end = Instant::now() + Duration::from_millis(90 * (round % 4));
            while Instant::now() < end && inner.over().is_none() {
                let now = now_ms();
                // It is good at this moment, and so it was at `now`.
                if inner.is_held() == Some(Ok(())) {
                    answered = Some((answered.map_or(now, |(first, _)| first), now));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            if round.is_multiple_of(2) {
                tenure.end();
            }
            answered
        };
        let mut all: Vec<(u64, u64)> = std::thread::scope(|threads| {
            let serves = &serves;
            let one = move |who| (0..8).filter_map(|round| serves(who, round)).collect::<Vec<_>>();
            let running: Vec<_> = (0..3).map(|who| threads.spawn(move || one(who))).collect();
            running.into_iter().flat_map(|t| t.join().expect("no panic")).collect()
        });
        all.sort_unstable();
        assert!(all.len() >= 4, "hardly anybody got so far: {all:?}");
        assert!(all.is_sorted_by(|a, b| a.1 < b.0), "two answered: {all:?}");
    }
}
