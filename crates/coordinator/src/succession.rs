//! Who may take the place of a service that says nothing any more.
//!
//! A service with a standby says that it lives ([`Directory::beat`]) before each look for a newer term. A standby that
//! sees no other beat for a lease takes the next term, and looks at the beat once more: when that is still the same, the
//! service has made no look since that did not see the new term, and the lease of its last one is over. So who was
//! silent for a lease need not be waited for again.

use crate::directory::{CoordinatorError, Directory};
use crate::tenure::{Taken, begin, claim_after, may_be_passed_over, ms, now_ms, quiet_after};
use crate::term::{Holder, Term};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A service that a standby follows, as the directory shows it.
#[derive(Debug)]
pub struct Succession {
    dir: PathBuf,
    term: Term,
    beat: Option<String>,
    /// Since then at the latest the beat stands there.
    since: u64,
}

/// What a standby sees of the service that it follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It may answer.
    Lives,
    /// It can answer nothing any more: it has said so, is dead for certain, or was silent for its lease.
    Silent,
    /// Another one has come after it.
    Replaced,
}

impl Succession {
    /// After the service of the newest term; none: there is none.
    pub fn of(dir: &Path) -> Result<Option<Succession>, CoordinatorError> {
        let Some(term) = crate::newest_in(dir)? else { return Ok(None) };
        let beat = Directory::open(dir)?.last_beat(term.number)?;
        Ok(Some(Succession { dir: dir.to_owned(), term, beat, since: now_ms() }))
    }

    /// The service.
    #[must_use]
    pub fn term(&self) -> &Term {
        &self.term
    }

    /// Its last beat that was seen; 0: none. What is none counts as the last one of all.
    #[must_use]
    pub fn beat(&self) -> u64 {
        number_of(self.beat.as_deref())
    }

    /// Looks at it once more.
    pub fn look(&mut self) -> Result<Seen, CoordinatorError> {
        // What is seen is as of then, or later: this process, too, may stand still at any point.
        let now = now_ms();
        let dir = Directory::open(&self.dir)?;
        let newest = dir.newest()?.map(|newest| newest.number);
        if newest != Some(self.term.number) {
            return Ok(Seen::Replaced);
        }
        let has_ended = may_be_passed_over(&dir, &self.term);
        let beat = dir.last_beat(self.term.number)?;
        if beat != self.beat {
            (self.beat, self.since) = (beat, now_ms());
        }
        let silent = has_ended || self.is_over(now);
        Ok(if silent { Seen::Silent } else { Seen::Lives })
    }

    /// It was silent for so long that it has no right any more, if it has seen all since.
    fn is_over(&self, now: u64) -> bool {
        self.beat.is_some() && now.saturating_sub(self.since) >= ms(quiet_after(&self.term))
    }

    /// Takes the term after it, for the service at `address`, unless it has beaten `most` times; none: it has, or another
    /// one has the term. It must have answered.
    pub fn take(
        mut self,
        address: &str,
        lease: Duration,
        most: u64,
    ) -> Result<Option<Taken>, CoordinatorError> {
        let now = now_ms();
        let dir = Directory::open(&self.dir)?;
        let mut before = dir.terms()?;
        // Others may have waited for this look.
        if self.look()? != Seen::Silent || self.beat() >= most {
            return Ok(None);
        }
        let Some(term) = claim_after(&dir, self.term.number, address, lease)? else {
            return Ok(None);
        };
        // Those before it can say nothing: it answered.
        before.retain(|other| other.number >= self.term.number);
        // What it has not shown by now it shows only when it has seen the new term. Who cannot see that waits.
        let same = dir.last_beat(self.term.number).is_ok_and(|beat| beat == self.beat);
        if same && self.is_over(now) {
            before.retain(|other| other.number > self.term.number);
        }
        let taken = begin(&dir, term, before)?;
        let beat = dir.last_beat(self.term.number).unwrap_or_default();
        if number_of(beat.as_deref()) >= most {
            taken.tenure.end();
            return Ok(None);
        }
        Ok(Some(taken))
    }

    /// When this process has the term, for it failed after it had taken it: nobody waits for it any more. True then.
    #[must_use]
    pub fn end_if_mine(&self) -> bool {
        let mine = self.term.holder == Holder::me();
        if mine {
            let ended = Directory::open(&self.dir).and_then(|dir| dir.end(self.term.number));
            if let Err(e) = ended {
                tracing::warn!(error = %e, "that a term was given up is not noted");
            }
        }
        mine
    }
}

fn number_of(beat: Option<&str>) -> u64 {
    beat.map_or(0, |beat| beat.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenure::tests::{LEASE, alone, dir};
    use crate::tenure::{Tenure, take};
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Instant;

    fn succession(path: &Path) -> Succession {
        Succession::of(path).expect("terms").expect("a service")
    }

    /// The service is this process, so it is never dead for certain.
    #[tokio::test]
    async fn who_is_silent_for_a_lease_is_succeeded_and_not_waited_for_again() {
        let (_root, path) = dir();
        let first = alone(&path, "a:1").await;
        let mut beats = first.beats().expect("a directory");
        let seen = *beats.wait_for(|beat| *beat > 0).await.expect("it beats");
        let mut heir = succession(&path);
        assert!(heir.beat() >= seen && heir.term().address == "a:1");
        for _ in 0..20 {
            assert_eq!(heir.look().expect("a look"), Seen::Lives);
            tokio::time::sleep(LEASE / 10).await;
        }
        let inner = first.0.clone().expect("it has a term");
        let begun = Instant::now();
        let paused = inner.pause.lock().await;
        while heir.look().expect("a look") == Seen::Lives {
            tokio::time::sleep(LEASE / 20).await;
        }
        assert!(begun.elapsed() >= LEASE && inner.is_held().is_none(), "{:?}", begun.elapsed());
        let taken = heir.take("b:1", LEASE, u64::MAX).expect("terms").expect("nobody else");
        assert!(taken.waits_for().is_none(), "it was silent for long enough");
        let second = taken.alone().await.expect("alone");
        drop(paused);
        assert!(first.over().await.0.contains("term 2 at b:1"));
        assert_eq!(second.held().await, Ok(()));
    }

    /// So whoever stood still after it had seen that is not a successor any more.
    #[tokio::test]
    async fn who_beats_again_before_the_term_is_taken_is_not_succeeded() {
        let (_root, path) = dir();
        let first = alone(&path, "a:1").await;
        let mut beats = first.beats().expect("a directory");
        beats.wait_for(|beat| *beat > 0).await.expect("it beats");
        let mut heir = succession(&path);
        let inner = first.0.clone().expect("it has a term");
        let paused = inner.pause.lock().await;
        while heir.look().expect("a look") == Seen::Lives {
            tokio::time::sleep(LEASE / 20).await;
        }
        Directory::open(&path).and_then(|dir| dir.beat(1, 1000)).expect("a beat");
        assert!(heir.take("b:1", LEASE, u64::MAX).expect("terms").is_none(), "it lives");
        drop(paused);
        let mut heir = succession(&path);
        first.end();
        assert_eq!(heir.look().expect("a look"), Seen::Silent);
        let most = heir.beat();
        assert!(most > 0 && heir.take("b:1", LEASE, most).expect("terms").is_none(), "too often");
        let mut late = succession(&path);
        assert_eq!((late.term().number, late.end_if_mine()), (1, true));
        assert!(take(&path, "c:1", LEASE).is_ok());
        assert_eq!(late.look().expect("a look"), Seen::Replaced);
        assert!(late.take("d:1", LEASE, u64::MAX).expect("terms").is_none(), "it has one already");
    }

    #[tokio::test]
    async fn who_has_ended_is_succeeded_at_once_and_who_never_beat_is_not() {
        let (_root, path) = dir();
        assert!(Succession::of(&path).expect("terms").is_none());
        let first = alone(&path, "a:1").await;
        let mut heir = succession(&path);
        tokio::time::sleep(LEASE * 2).await;
        assert_eq!(heir.look().expect("a look"), Seen::Lives, "nothing is known of it");
        first.end();
        assert_eq!(heir.look().expect("a look"), Seen::Silent);
        let taken = heir.take("b:1", LEASE, u64::MAX).expect("terms").expect("nobody else");
        assert!(taken.waits_for().is_none());
    }

    /// A directory without room for it: the service goes on, and nobody may take it for silent.
    #[tokio::test]
    async fn who_cannot_begin_to_beat_goes_on_without_a_successor() {
        let (_root, path) = dir();
        let first = alone(&path, "a:1").await;
        let beat = path.join("service-00000000000000000001.beat");
        let mut heir = succession(&path);
        std::fs::create_dir(&beat).expect("in the way");
        let mut beats = first.beats().expect("a directory");
        for _ in 0..20 {
            tokio::time::sleep(LEASE / 10).await;
            assert_eq!(first.0.as_ref().and_then(|inner| inner.is_held()), Some(Ok(())));
            assert!(heir.look().is_err());
        }
        assert_eq!(*beats.borrow_and_update(), 0);
        // Once it has begun it must go on.
        std::fs::remove_dir(&beat).expect("rmdir");
        beats.wait_for(|beat| *beat > 0).await.expect("it beats");
        std::fs::remove_file(&beat).and_then(|()| std::fs::create_dir(&beat)).expect("in the way");
        tokio::time::sleep(LEASE * 2).await;
        assert!(tokio::time::timeout(LEASE / 2, first.held()).await.is_err(), "it answers");
    }

    /// Services that stand still between what they say and what they see, and successors that come as early as they may.
    #[test]
    fn a_successor_never_answers_at_once_with_who_was_before() {
        let (_root, path) = dir();
        let lease = Duration::from_millis(60);
        let runtime = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            runtime.expect("a runtime")
        };
        let answered = std::sync::Mutex::new(Vec::<(u64, u64)>::new());
        let successions = std::sync::atomic::AtomicU64::new(0);
        // Answers, and stands still now and then, until another one has come.
        let serves = |tenure: Tenure, stalls: u64| {
            let inner = tenure.0.clone().expect("it has a term");
            tenure.beats().expect("a directory");
            let (mut first, mut last, mut n) = (None, 0, 0_u64);
            let end = Instant::now() + Duration::from_secs(7);
            while inner.over().is_none() && Instant::now() < end {
                let now = now_ms();
                if inner.is_held() == Some(Ok(())) {
                    first.get_or_insert(now);
                    last = now;
                }
                n += 1;
                if n.is_multiple_of(25) {
                    let paused = inner.pause.blocking_lock();
                    let stall = Duration::from_millis((stalls * 37 + n * 13) % 130);
                    let until = Instant::now() + stall;
                    while Instant::now() < until {
                        let now = now_ms();
                        if inner.is_held() == Some(Ok(())) {
                            last = now;
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    drop(paused);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let span = first.map(|first| (first, last));
            answered.lock().expect("no panic").extend(span);
        };
        let first = take(&path, "a:1", lease).expect("taken");
        let first = runtime().block_on(first.alone()).expect("alone");
        std::thread::scope(|threads| {
            threads.spawn(|| serves(first, 1));
            for who in 0..3 {
                let (path, serves, successions) = (&path, &serves, &successions);
                threads.spawn(move || {
                    let end = Instant::now() + Duration::from_secs(6);
                    let mut heir = succession(path);
                    while Instant::now() < end {
                        match heir.look().expect("a look") {
                            Seen::Lives => std::thread::sleep(Duration::from_millis(2)),
                            Seen::Replaced => heir = succession(path),
                            Seen::Silent => {
                                let old = std::mem::replace(&mut heir, succession(path));
                                let Some(taken) = old.take("a:1", lease, u64::MAX).expect("terms")
                                else {
                                    continue;
                                };
                                let Ok(tenure) = runtime().block_on(taken.alone()) else {
                                    continue;
                                };
                                let n = successions.fetch_add(1, Relaxed);
                                serves(tenure, n * 3 + who);
                            }
                        }
                    }
                });
            }
        });
        let mut all = answered.into_inner().expect("no panic");
        all.sort_unstable();
        let count = successions.into_inner();
        assert!(count >= 5, "hardly anybody was succeeded: {count}");
        assert!(all.is_sorted_by(|a, b| a.1 < b.0), "two answered: {all:?}");
    }
}
