//! The adaptive wait interval of the `idle` policy: learns how long the application's pauses
//! last, starts earlier in a pause that is likely to be long, and is out of the way when the
//! next burst is due. It decides; it has no clock, no threads and moves nothing.
//!
//! A *pause* is a time without operations that lasted at least a tenth of the wait interval
//! (shorter ones are part of a burst). The last [`REMEMBERED`] pauses are kept, each with the
//! burst before it; an older one counts 5 % less than the next. At the beginning of a pause a
//! [`Plan`] is made: from how long it must have lasted before flushing starts, and when flushing
//! is held back. At any moment `t` of the pause the question is: of the known pauses that lasted
//! longer than `t`, what share ended within the *guard* (the time a stop takes, and a sixteenth
//! of `t` for what is never the same twice)?
//!
//! * a small share: flush; and this may be long before the wait interval is over;
//! * a large share: the next burst is due, do not flush;
//! * fewer than three such pauses: nothing is known. Before the wait interval is over, wait;
//!   after it, flush.
//!
//! When burst and pause together are steadier than the pause alone (an application that writes
//! every ten minutes, however long that takes), pauses are predicted from the period.
//!
//! Bounds, whatever was learned: flushing begins at the latest after 2.7 wait intervals without
//! an operation, and what is held back beyond the first interval is never more than one interval
//! and a quarter of the pause so far. Without enough pauses known it is exactly the fixed one.
//!
//! # Measured against the fixed interval
//!
//! A simulation of 400 bursts (the test `the_figures_in_the_documentation_are_true`), wait
//! interval 1 s, a stop takes 200 ms, and something is always dirty. *Used* is the share of all
//! pause time in which is flushed; *hits* are the bursts, in 100, that find the flusher at work.
//!
//! ```text
//! trace                                fixed: used  hits   adaptive: used  hits
//! regular, 10 s, +-3 %                        90 %   100            89 %     1
//! regular, 0.8 s, +-5 %                        0 %     0            54 %     0
//! every 15 s, bursts of 2 to 9 s              90 %   100            90 %     1
//! drifting between 4 and 12 s, +-3 %          88 %   100            80 %    22
//! 2 s, and each fifth 30 s, +-5 %             87 %   100            86 %     4
//! irregular, exponential, mean 5 s            82 %    82            72 %    73
//! irregular, exponential, mean 1 s            35 %    34            14 %    14
//! ```
//!
//! So where there is a rhythm, the flusher has about as much time as with the fixed interval and
//! is almost never in the way; and pauses shorter than the interval, in which it would never flush
//! before the high watermark, become useful. Where there is none, it is no better: fewer hits,
//! and less time used in the same measure. A drift costs hits while it lasts.

use crate::activity::Epoch;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Duration;

/// Whether the wait interval follows the application.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Waiting {
    /// It is what it was set to.
    #[default]
    Fixed,
    /// It is learned; what it was set to is where it starts and what it falls back to.
    Adaptive,
}

/// Pauses that are remembered.
const REMEMBERED: usize = 64;
/// What a pause counts, against the one after it.
const DECAY: f64 = 0.95;
/// Fewer known pauses than this prove nothing.
const KNOWN_MIN: usize = 3;
/// No prediction at all before so many pauses.
const LEARNED_MIN: usize = 5;
/// The share of ends within the guard that is still called safe.
const RISK: f64 = 0.1;
/// The guard grows by this share of the pause.
const SPREAD: f64 = 1.0 / 16.0;
/// Beyond the wait interval this share of a pause may be held back, and one interval.
const HELD_SHARE: f64 = 0.25;
/// A pause lasts at least this share of the wait interval.
const PAUSE_SHARE: u32 = 10;
/// The period must be steadier than the pause by this factor to be used instead.
const STEADIER: f64 = 0.5;

/// A burst and the pause after it, in seconds.
#[derive(Clone, Copy, Debug)]
struct Beat {
    /// None when its beginning was not seen.
    burst: Option<f64>,
    pause: f64,
}

/// What is known about the application.
#[derive(Clone, Debug)]
pub struct Rhythm {
    interval: f64,
    guard: f64,
    /// The newest last.
    beats: VecDeque<Beat>,
}

/// When to flush in one pause.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Not before it has lasted this long, in seconds.
    start: f64,
    /// And not within these, in order, in seconds.
    holds: Vec<(f64, f64)>,
}

impl Plan {
    /// How long the pause must have lasted for flushing, given that it has lasted `idle_for`: a
    /// time that is not after `idle_for` means now.
    #[must_use]
    pub fn wait(&self, idle_for: Duration) -> Duration {
        let t = idle_for.as_secs_f64();
        let held = self.holds.iter().find(|(from, to)| (*from..*to).contains(&t));
        seconds(held.map_or(self.start, |(_, to)| to.max(self.start)))
    }
}

/// How sure it is to flush at some moment of a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Safe,
    Due,
    Unknown,
}

impl Rhythm {
    /// Nothing is known yet. `stop` is how long it takes until a flusher has stopped.
    #[must_use]
    pub fn new(interval: Duration, stop: Duration) -> Rhythm {
        Rhythm {
            interval: interval.as_secs_f64(),
            guard: stop.as_secs_f64(),
            beats: VecDeque::with_capacity(REMEMBERED),
        }
    }

    /// Times without operations that are shorter belong to a burst.
    #[must_use]
    pub fn shortest_pause(&self) -> Duration {
        seconds(self.interval / f64::from(PAUSE_SHARE))
    }

    /// A pause has ended. The burst before it is unknown when its beginning was not seen.
    pub fn learn(&mut self, burst: Option<Duration>, pause: Duration) {
        if pause < self.shortest_pause() {
            return;
        }
        if self.beats.len() == REMEMBERED {
            self.beats.pop_front();
        }
        let burst = burst.map(|b| b.as_secs_f64());
        self.beats.push_back(Beat { burst, pause: pause.as_secs_f64() });
    }

    /// The plan for the pause that begins now, after this burst.
    #[must_use]
    pub fn plan(&self, burst: Option<Duration>) -> Plan {
        let mut pauses = self.predicted(burst.map(|b| b.as_secs_f64()));
        if self.beats.len() < LEARNED_MIN || pauses.len() < KNOWN_MIN {
            return Plan { start: self.interval, holds: Vec::new() };
        }
        pauses.sort_by(|a, b| a.0.total_cmp(&b.0));
        let floor = self.interval / f64::from(PAUSE_SHARE);
        // Between two of these moments nothing changes: a known pause ends there, or comes
        // within the guard.
        let entered = |p: f64| (p - self.guard) / (1.0 + SPREAD);
        let mut moments: Vec<f64> = pauses.iter().flat_map(|(p, _)| [*p, entered(*p)]).collect();
        moments.extend([floor, self.interval]);
        moments.retain(|t| *t >= floor);
        moments.sort_by(f64::total_cmp);
        moments.dedup();
        self.lay_out(&pauses, &moments)
    }

    /// Pauses that may be expected, each with its weight.
    fn predicted(&self, burst: Option<f64>) -> Vec<(f64, f64)> {
        let weights = || (0..self.beats.len()).rev().map(|age| DECAY.powi(age as i32));
        let beats = || self.beats.iter().zip(weights());
        let pauses: Vec<(f64, f64)> = beats().map(|(b, w)| (b.pause, w)).collect();
        // Bursts whose beginning was not seen say nothing about the period.
        let periods: Vec<(f64, f64)> =
            beats().filter_map(|(b, w)| Some((b.burst? + b.pause, w))).collect();
        let steadier =
            periods.len() >= LEARNED_MIN && spread(&periods) < STEADIER * spread(&pauses);
        match burst {
            Some(burst) if steadier => {
                let rest = periods.into_iter().map(|(p, w)| (p - burst, w));
                rest.filter(|(p, _)| *p > 0.0).collect()
            }
            _ => pauses,
        }
    }

    /// `pauses` and `moments` are in order.
    fn lay_out(&self, pauses: &[(f64, f64)], moments: &[f64]) -> Plan {
        let mut holds: Vec<(f64, f64)> = Vec::new();
        let mut start = None;
        let mut held = 0.0;
        let mut was_due = false;
        for (i, from) in moments.iter().copied().enumerate() {
            let to = moments.get(i + 1).copied().unwrap_or(f64::INFINITY);
            // In the middle, where rounding cannot put a pause on the wrong side.
            let moment = self.look(pauses, if to.is_finite() { (from + to) / 2.0 } else { from });
            let hold = match moment {
                Moment::Safe => false,
                Moment::Due => true,
                // A burst that was due and has not come is overdue, not off.
                Moment::Unknown => was_due || from < self.interval,
            };
            was_due = hold && (was_due || moment == Moment::Due);
            let until = if hold { to.min(self.held_until(from, held)) } else { from };
            held += (until - from.max(self.interval)).max(0.0);
            match holds.last_mut() {
                Some(last) if last.1 == from => last.1 = until,
                _ if until > from => holds.push((from, until)),
                _ => {}
            }
            if until < to {
                start.get_or_insert(until);
            }
        }
        Plan { start: start.unwrap_or(self.interval), holds }
    }

    /// How long holding back may go on from here, when so much was held back before.
    fn held_until(&self, from: f64, held: f64) -> f64 {
        let counted = from.max(self.interval);
        counted + (self.interval + HELD_SHARE * counted - held).max(0.0)
    }

    fn look(&self, pauses: &[(f64, f64)], t: f64) -> Moment {
        let guarded = t + self.guard + t * SPREAD;
        let (mut known, mut longer, mut ending) = (0, 0.0, 0.0);
        for (pause, weight) in pauses.iter().filter(|(p, _)| *p > t) {
            known += 1;
            longer += weight;
            if *pause <= guarded {
                ending += weight;
            }
        }
        match known {
            n if n < KNOWN_MIN => Moment::Unknown,
            _ if ending <= RISK * longer => Moment::Safe,
            _ => Moment::Due,
        }
    }
}

/// Mean distance from the mean.
fn spread(values: &[(f64, f64)]) -> f64 {
    let weight: f64 = values.iter().map(|(_, w)| w).sum();
    if weight == 0.0 {
        return 0.0;
    }
    let mean = values.iter().map(|(v, w)| v * w).sum::<f64>() / weight;
    values.iter().map(|(v, w)| (v - mean).abs() * w).sum::<f64>() / weight
}

fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s.max(0.0)).unwrap_or(Duration::MAX)
}

/// Watches the activity counter for the rhythm: tells from looks at it when pauses begin and end.
/// All times are since one fixed moment.
pub(crate) struct Observer {
    rhythm: Rhythm,
    /// The pause that is going on.
    pause: Option<Pause>,
    /// Since when the burst before it, or the one that is going on, has lasted.
    burst_since: Option<Duration>,
}

struct Pause {
    epoch: Epoch,
    since: Duration,
    plan: Plan,
    burst: Option<Duration>,
}

/// What the activity counter shows at one look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Glance {
    pub(crate) now: Duration,
    pub(crate) epoch: Epoch,
    /// Zero while an operation is in flight.
    pub(crate) idle_for: Duration,
    /// The first operation since the watch was set.
    pub(crate) began: Option<Duration>,
}

/// What follows from a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outlook {
    /// How long there must have been no operation, as seen now.
    pub(crate) wait: Duration,
    /// A pause has begun: the next operation must be noticed.
    pub(crate) watch: bool,
}

impl Observer {
    pub(crate) fn new(interval: Duration, stop: Duration) -> Observer {
        Observer { rhythm: Rhythm::new(interval, stop), pause: None, burst_since: None }
    }

    pub(crate) fn look(&mut self, glance: &Glance) -> Outlook {
        if self.pause.as_ref().is_some_and(|p| p.epoch != glance.epoch) {
            self.pause_ended(glance);
        }
        let shortest = self.rhythm.shortest_pause();
        if let Some(pause) = &self.pause {
            return Outlook { wait: pause.plan.wait(glance.idle_for), watch: false };
        }
        if glance.idle_for < shortest {
            return Outlook { wait: shortest, watch: false };
        }
        let since = glance.now.saturating_sub(glance.idle_for);
        let burst = self.burst_since.map(|b| since.saturating_sub(b));
        let plan = self.rhythm.plan(burst);
        let wait = plan.wait(glance.idle_for);
        self.pause = Some(Pause { epoch: glance.epoch, since, plan, burst });
        Outlook { wait, watch: true }
    }

    fn pause_ended(&mut self, glance: &Glance) {
        let Some(pause) = self.pause.take() else { return };
        // When the moment was missed nothing is learned rather than something wrong.
        self.burst_since = glance.began.filter(|b| *b >= pause.since);
        if let Some(end) = self.burst_since {
            self.rhythm.learn(pause.burst, end - pause.since);
        }
    }
}

#[cfg(test)]
#[path = "adaptive_tests.rs"]
mod tests;
