//! The bounds that hold whatever was learned, and a simulation against the fixed interval.

use super::*;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const INTERVAL: Duration = Duration::from_secs(1);
const STOP: Duration = Duration::from_millis(200);
/// An interval, another one held back, and a quarter of all that: t = 2 + t / 4, in intervals.
const START_MOST: f64 = 8.0 / 3.0;

fn rhythm(pauses: &[f64]) -> Rhythm {
    let mut rhythm = Rhythm::new(INTERVAL, STOP);
    for pause in pauses {
        rhythm.learn(None, seconds(*pause));
    }
    rhythm
}

fn flushes(plan: &Plan, t: f64) -> bool {
    plan.wait(seconds(t)) <= seconds(t)
}

fn beats() -> impl Strategy<Value = Vec<(Option<f64>, f64)>> {
    // Steady and wild ones, at every scale.
    let scale = prop_oneof![Just(0.05), Just(0.5), Just(1.0), Just(10.0), Just(3600.0)];
    let beat = (proptest::option::of(0.0f64..100.0), 0.0f64..3.0);
    (scale, proptest::collection::vec(beat, 0..150)).prop_map(|(scale, beats)| {
        beats.into_iter().map(|(burst, pause)| (burst, pause * scale)).collect()
    })
}

proptest! {
    #[test]
    fn flushing_begins_in_time_and_is_held_back_for_a_bounded_time(
        beats in beats(), burst in proptest::option::of(0.0f64..100.0),
    ) {
        let mut rhythm = Rhythm::new(INTERVAL, STOP);
        for (burst, pause) in &beats {
            rhythm.learn(burst.map(seconds), seconds(*pause));
        }
        let plan = rhythm.plan(burst.map(seconds));
        prop_assert!(plan.start >= 0.1 && plan.start <= START_MOST, "{:?}", plan);
        for pair in plan.holds.windows(2) {
            prop_assert!(pair[0].1 <= pair[1].0, "{:?}", plan);
        }
        let mut held = 0.0;
        for (from, to) in &plan.holds {
            held += (to.max(1.0) - from.max(1.0)).max(0.0);
            prop_assert!(held <= 1.0 + 0.25 * to.max(1.0) + 1e-9, "{:?}", plan);
        }
        prop_assert!(plan.holds.iter().all(|(from, to)| from < to && to.is_finite()));
        // What is told to wait for comes: following the advice ends in flushing.
        let mut t = 0.0;
        for _ in 0..plan.holds.len() + 2 {
            if flushes(&plan, t) {
                break;
            }
            t = plan.wait(seconds(t)).as_secs_f64();
        }
        prop_assert!(flushes(&plan, t) && t <= START_MOST + 1e-6, "{} {:?}", t, plan);
    }

    #[test]
    fn a_plan_is_what_looking_at_every_moment_says(
        pauses in proptest::collection::vec(0.1f64..20.0, 5..70),
    ) {
        let rhythm = rhythm(&pauses);
        let known = rhythm.predicted(None);
        let plan = rhythm.plan(None);
        // Before the interval is over, flushing is exactly where it is safe.
        for step in 10..100 {
            let t = f64::from(step) / 100.0 + 1e-4;
            let safe = rhythm.look(&known, t) == Moment::Safe;
            prop_assert_eq!(flushes(&plan, t), safe, "at {} in {:?}", t, plan);
        }
        // After it, what is safe is never held back.
        for step in 100..2500 {
            let t = f64::from(step) / 100.0 + 1e-4;
            let safe = rhythm.look(&known, t) == Moment::Safe;
            prop_assert!(!safe || flushes(&plan, t), "at {} in {:?}", t, plan);
        }
    }
}

#[test]
fn without_experience_it_is_the_fixed_interval() {
    let plan = rhythm(&[7.0; 4]).plan(None);
    assert_eq!(plan, Plan { start: 1.0, holds: Vec::new() });
    assert_eq!(plan.wait(Duration::ZERO), INTERVAL);
    // Operations a few milliseconds apart are one burst, not pauses.
    assert_eq!(rhythm(&[0.05; 500]).plan(None), plan);
}

#[test]
fn steady_pauses_are_used_from_the_beginning_and_left_before_the_end() {
    let plan = rhythm(&[10.0; 20]).plan(None);
    for t in [0.1, 0.5, 1.0, 5.0, 9.0] {
        assert!(flushes(&plan, t), "{t}");
    }
    // A stop takes 0.2 s, and a sixteenth is never known: the burst is due from 9.23 s on.
    for t in [9.3, 9.9, 10.0] {
        assert!(!flushes(&plan, t), "{t}");
    }
    assert!(flushes(&plan, 12.8), "held back for an interval and a quarter, and no longer");
}

#[test]
fn pauses_that_are_too_short_are_left_alone_and_longer_ones_are_told_apart() {
    // 0.3 s: too short to flush in; the fixed interval did not either.
    let plan = rhythm(&[0.3; 30]).plan(None);
    assert!(!flushes(&plan, 0.1) && !flushes(&plan, 0.29));
    assert!(flushes(&plan, START_MOST), "a longer pause than any known one is used");
    // 2 s or 30 s: from 2 s on it is a long one.
    let mut mixed = vec![2.0, 2.0, 2.0, 2.0, 30.0];
    mixed = mixed.iter().copied().cycle().take(60).collect();
    let plan = rhythm(&mixed).plan(None);
    assert!(flushes(&plan, 0.5) && !flushes(&plan, 1.9) && flushes(&plan, 2.1));
    assert!(flushes(&plan, 25.0) && !flushes(&plan, 29.0));
}

#[test]
fn a_steady_period_predicts_better_than_uneven_pauses() {
    let mut rhythm = Rhythm::new(INTERVAL, STOP);
    // The first burst that is seen began before anybody looked.
    rhythm.learn(None, seconds(15.0));
    for i in 0..30 {
        let burst = 2.0 + f64::from(i * 7 % 10);
        rhythm.learn(Some(seconds(burst)), seconds(20.0 - burst));
    }
    let after = |burst: f64| rhythm.plan(Some(seconds(burst)));
    assert!(flushes(&after(2.0), 15.0) && !flushes(&after(2.0), 17.5));
    assert!(flushes(&after(11.0), 8.0) && !flushes(&after(11.0), 8.9));
    // Pauses from 9 to 18 s, all equally likely: without the burst nothing says which.
    let blind = rhythm.plan(None);
    assert!(flushes(&blind, 8.0) && flushes(&after(2.0), 14.0) && !flushes(&after(11.0), 10.0));
    assert_ne!(blind, after(2.0));
}

#[test]
fn the_observer_learns_from_looks() {
    let mut observer = Observer::new(INTERVAL, STOP);
    let activity = crate::Activity::new();
    let mut now = Duration::from_secs(100);
    // Bursts of 2 s and pauses of 10 s, looked at every 100 ms.
    for round in 0..8 {
        drop(activity.enter());
        let busy =
            Glance { now, epoch: activity.epoch(), idle_for: Duration::ZERO, began: Some(now) };
        assert_eq!(observer.look(&busy), Outlook { wait: INTERVAL / 10, watch: false });
        now += Duration::from_secs(2);
        drop(activity.enter());
        let mut watched = 0;
        for tick in 0..100 {
            let idle_for = Duration::from_millis(100 * tick);
            let glance =
                Glance { now: now + idle_for, epoch: activity.epoch(), idle_for, began: None };
            let outlook = observer.look(&glance);
            watched += u32::from(outlook.watch);
            let flushing = outlook.wait <= idle_for;
            if round < 5 {
                assert_eq!(flushing, tick >= 10, "fixed at first: {round} {tick}");
            } else {
                let expected = (1..=92).contains(&tick);
                assert_eq!(flushing, expected, "learned: {round} {tick} {outlook:?}");
            }
        }
        assert_eq!(watched, 1, "each pause is watched once");
        now += Duration::from_secs(10);
    }
    let beat = observer.rhythm.beats.back().unwrap();
    assert!((beat.pause - 10.0).abs() < 1e-6 && (beat.burst.unwrap() - 2.0).abs() < 1e-6);
}

#[test]
fn an_end_that_was_not_seen_teaches_nothing() {
    let mut observer = Observer::new(INTERVAL, STOP);
    let activity = crate::Activity::new();
    let at = |s: u64, idle: u64, began: Option<u64>| Glance {
        now: Duration::from_secs(s),
        epoch: activity.epoch(),
        idle_for: Duration::from_secs(idle),
        began: began.map(Duration::from_secs),
    };
    assert!(observer.look(&at(100, 5, None)).watch);
    drop(activity.enter());
    // An older watch: before the pause began.
    observer.look(&at(101, 0, Some(90)));
    assert!(observer.rhythm.beats.is_empty() && observer.pause.is_none());
    assert!(observer.look(&at(103, 1, None)).watch);
    drop(activity.enter());
    observer.look(&at(110, 0, Some(109)));
    assert_eq!(observer.rhythm.beats.len(), 1);
    assert!((observer.rhythm.beats[0].pause - 7.0).abs() < 1e-9);
}

// ---- simulation ------------------------------------------------------------------------------

/// Bursts and the pauses after them, in seconds.
type Trace = Vec<(f64, f64)>;

const ROUNDS: u32 = 400;

fn trace(seed: u64, mut beat: impl FnMut(u32, &mut ChaCha8Rng) -> (f64, f64)) -> Trace {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..ROUNDS).map(|i| beat(i, &mut rng)).collect()
}

fn about(rng: &mut ChaCha8Rng, value: f64, percent: f64) -> f64 {
    value * (1.0 + percent / 100.0 * rng.random_range(-1.0..1.0))
}

fn exponential(rng: &mut ChaCha8Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.random::<f64>()).ln()
}

fn traces() -> Vec<(&'static str, Trace)> {
    vec![
        ("regular, 10 s, +-3 %", trace(1, |_, r| (about(r, 3.0, 10.0), about(r, 10.0, 3.0)))),
        ("regular, 0.8 s, +-5 %", trace(2, |_, r| (about(r, 1.0, 10.0), about(r, 0.8, 5.0)))),
        (
            "every 15 s, bursts of 2 to 9 s",
            trace(3, |_, r| {
                let burst = r.random_range(2.0..9.0);
                (burst, about(r, 15.0, 1.0) - burst)
            }),
        ),
        (
            "drifting between 4 and 12 s, +-3 %",
            trace(4, |i, r| {
                let middle = 8.0 + 4.0 * (f64::from(i) * std::f64::consts::TAU / 100.0).sin();
                (2.0, about(r, middle, 3.0))
            }),
        ),
        (
            "2 s, and each fifth 30 s, +-5 %",
            trace(5, |i, r| (2.0, about(r, if i % 5 == 4 { 30.0 } else { 2.0 }, 5.0))),
        ),
        ("irregular, exponential, mean 5 s", trace(6, |_, r| (2.0, exponential(r, 5.0)))),
        ("irregular, exponential, mean 1 s", trace(7, |_, r| (2.0, exponential(r, 1.0)))),
    ]
}

/// Share of the pause time that was flushed in, and hits in 100 bursts.
#[derive(Clone, Copy, Debug)]
struct Score {
    used: f64,
    hits: f64,
}

/// `plan` is asked at the beginning of each pause and told how it was at its end.
fn simulate(
    trace: &Trace,
    mut plan: impl FnMut(f64) -> Plan,
    mut ended: impl FnMut(f64, f64),
) -> (Score, Plan) {
    let (mut all, mut used, mut hits) = (0.0, 0.0, 0u32);
    let mut last = Plan { start: 0.0, holds: Vec::new() };
    ended(0.0, 0.0);
    for (burst, pause) in trace {
        last = plan(*burst);
        // Shorter times without an operation are not noticed as pauses.
        let (mut t, step) = (0.0, 0.01);
        let mut flushing = false;
        while t < *pause {
            flushing = flushes(&last, t);
            used += if flushing { step } else { 0.0 };
            t += step;
        }
        all += pause;
        hits += u32::from(flushing);
        ended(*burst, *pause);
    }
    (Score { used: used / all, hits: f64::from(hits) * 100.0 / trace.len() as f64 }, last)
}

fn scores(trace: &Trace) -> (Score, Score) {
    let fixed = Plan { start: INTERVAL.as_secs_f64(), holds: Vec::new() };
    let (by_clock, _) = simulate(trace, |_| fixed.clone(), |_, _| {});
    let rhythm = std::cell::RefCell::new(Rhythm::new(INTERVAL, STOP));
    let (learned, _) = simulate(
        trace,
        |burst| rhythm.borrow().plan(Some(seconds(burst))),
        |burst, pause| rhythm.borrow_mut().learn(Some(seconds(burst)), seconds(pause)),
    );
    (by_clock, learned)
}

#[test]
fn the_figures_in_the_documentation_are_true() {
    let documented = include_str!("adaptive.rs");
    let mut missing = Vec::new();
    for (name, trace) in traces() {
        let (fixed, adaptive) = scores(&trace);
        let row = format!(
            "//! {name:<36} {:>9.0} % {:>5.0} {:>13.0} % {:>5.0}",
            fixed.used * 100.0,
            fixed.hits,
            adaptive.used * 100.0,
            adaptive.hits
        );
        if !documented.lines().any(|line| line == row) {
            missing.push(row);
        }
    }
    assert!(missing.is_empty(), "not documented:\n{}", missing.join("\n"));
}
