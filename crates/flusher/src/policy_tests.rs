//! The table against the sentences that describe it, over every combination that matters.

use super::*;

const WAIT: Duration = Duration::from_secs(1);
const PERIOD: Duration = Duration::from_secs(30);

fn policy(kind: PolicyKind) -> Policy {
    Policy {
        kind,
        wait_interval: WAIT,
        waiting: Waiting::Fixed,
        period: PERIOD,
        low: Percent(10.0),
        high: Percent(50.0),
    }
}

/// Every situation made of these values.
fn situations() -> Vec<Situation> {
    let mut all = Vec::new();
    let no_yes = [false, true];
    for paused in no_yes {
        for draining in no_yes {
            for active in no_yes {
                for closed_dirty in no_yes {
                    for (dirty_bytes, pressed) in [(0, false), (5, false), (60, true)] {
                        for idle_ms in [0, 400, 1000, 5000] {
                            for since_s in [0, 29, 30, 99] {
                                all.push(Situation {
                                    paused,
                                    draining,
                                    active,
                                    idle_for: Duration::from_millis(if active {
                                        0
                                    } else {
                                        idle_ms
                                    }),
                                    wait: WAIT,
                                    dirty_bytes,
                                    closed_dirty: closed_dirty && dirty_bytes > 0,
                                    pressed,
                                    since_last_run: Duration::from_secs(since_s),
                                });
                            }
                        }
                    }
                }
            }
        }
    }
    all
}

/// The same decision written as prose would have it, without the table.
fn in_words(kind: PolicyKind, s: &Situation) -> Decision {
    if s.paused || s.draining || s.dirty_bytes == 0 {
        return Decision::Sleep;
    }
    if s.pressed {
        return Decision::Flush { scope: Scope::All, halt: Halt::AtLowWatermark };
    }
    let settled = Decision::Flush { scope: Scope::Settled, halt: Halt::Never };
    match kind {
        PolicyKind::Idle if s.active => Decision::Quiet,
        PolicyKind::Idle if s.idle_for < WAIT => Decision::Wait(WAIT - s.idle_for),
        PolicyKind::Idle => Decision::Flush { scope: Scope::Settled, halt: Halt::OnActivity },
        PolicyKind::Immediate => settled,
        PolicyKind::Close if s.closed_dirty => {
            Decision::Flush { scope: Scope::Closed, halt: Halt::Never }
        }
        PolicyKind::Periodic if s.since_last_run < PERIOD => {
            Decision::Wait(PERIOD - s.since_last_run)
        }
        PolicyKind::Periodic => settled,
        PolicyKind::Close | PolicyKind::Watermark | PolicyKind::End => Decision::Sleep,
    }
}

#[test]
fn every_row_does_what_it_says() {
    let situations = situations();
    assert_eq!(situations.len(), 16 * 3 * 4 * 4);
    for kind in PolicyKind::ALL {
        for s in &situations {
            assert_eq!(decide(&policy(kind), s), in_words(kind, s), "{kind} in {s:?}");
        }
    }
}

#[test]
fn a_zero_wait_interval_still_respects_operations() {
    let policy = policy(PolicyKind::Idle);
    for s in situations().iter().filter(|s| s.dirty_bytes == 5 && !s.paused && !s.draining) {
        let expected = if s.active {
            Decision::Quiet
        } else {
            Decision::Flush { scope: Scope::Settled, halt: Halt::OnActivity }
        };
        let s = Situation { wait: Duration::ZERO, ..*s };
        assert_eq!(decide(&policy, &s), expected, "{s:?}");
    }
}

#[test]
fn only_the_idle_policy_learns() {
    for kind in PolicyKind::ALL {
        let adaptive = Policy { waiting: Waiting::Adaptive, ..policy(kind) };
        assert_eq!(adaptive.learns(), kind == PolicyKind::Idle);
        assert!(!policy(kind).learns());
    }
}

#[test]
fn the_table_is_whole_and_its_names_go_both_ways() {
    for kind in PolicyKind::ALL {
        assert_eq!(TABLE.iter().filter(|r| r.kind == kind).count(), 1);
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    // A new kind must be added here, and then to the table.
    for kind in PolicyKind::ALL {
        match kind {
            PolicyKind::Idle
            | PolicyKind::Immediate
            | PolicyKind::Close
            | PolicyKind::Watermark
            | PolicyKind::Periodic
            | PolicyKind::End => {}
        }
    }
    let e = "sometimes".parse::<PolicyKind>().unwrap_err();
    assert!(e.to_string().contains("'sometimes'") && e.to_string().contains("watermark"), "{e}");
    assert!(Policy::of(PolicyKind::Close).asks_for_closed());
    assert!(!Policy::default().asks_for_closed());
}

#[test]
fn pressure_has_hysteresis() {
    let policy = policy(PolicyKind::Idle);
    let mut pressed = false;
    // Fills to 50 %, drains to 10 %, fills again.
    for (dirty, expected) in [
        (49, false),
        (50, true),
        (90, true),
        (49, true),
        (11, true),
        (10, false),
        (11, false),
        (49, false),
        (50, true),
        (0, false),
    ] {
        pressed = policy.pressed(pressed, dirty, 100);
        assert_eq!(pressed, expected, "at {dirty}");
    }
    assert!(!policy.pressed(true, 1 << 40, 0), "a buffer without a bound is never full");
    let to_the_last = Policy { low: Percent(0.0), ..policy };
    assert!(to_the_last.pressed(true, 1, 100) && !to_the_last.pressed(true, 0, 100));
}

#[test]
fn contradictions_are_refused() {
    assert_eq!(Policy::default().check(), Ok(()));
    for (low, high) in [(50.0, 50.0), (60.0, 50.0), (0.0, 0.0)] {
        let policy = Policy { low: Percent(low), high: Percent(high), ..Policy::default() };
        assert!(matches!(policy.check(), Err(PolicyError::Watermarks { .. })), "{low} {high}");
    }
    let policy = Policy { period: Duration::ZERO, ..Policy::default() };
    assert_eq!(policy.check(), Err(PolicyError::Period));
}
