//! The simulation of many nodes, small: a real service, every phase, and every figure is there.

use ebb_benches::nodes::pattern::Pattern;
use ebb_benches::nodes::phase::Phase;
use ebb_benches::nodes::stage::{Measured, Outcome};
use ebb_benches::nodes::{Settings, report, run};
use ebb_transport::Secure;
use std::time::Duration;

const NODES: usize = 3;
const RECORDS: u64 = 5;

fn settings(pattern: Pattern, secure: Secure) -> Settings {
    Settings {
        records: RECORDS,
        pattern,
        secure,
        idle: Duration::from_millis(300),
        ..Settings::default()
    }
}

fn simulated(settings: &Settings) -> Vec<Measured> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let rows = runtime.block_on(run(settings, NODES, |_| ())).expect("a service");
    for m in &rows {
        // An open fails unless the map has every record at the node that attached it.
        assert_eq!(m.outcome, Outcome::Done, "{m:?}");
        assert_eq!((m.nodes, m.done), (NODES as u64, NODES as u64), "{m:?}");
    }
    rows
}

fn of(rows: &[Measured], phase: Phase) -> &Measured {
    rows.iter().find(|m| m.phase == phase).expect("it was run")
}

#[test]
fn every_phase_is_run_and_every_figure_is_there() {
    let settings = settings(Pattern::Strided, Secure::On);
    let rows = simulated(&settings);
    let mut phases: Vec<Phase> = rows.iter().map(|m| m.phase).collect();
    phases.sort();
    assert_eq!(phases, Phase::ALL);
    for m in &rows {
        assert!(!m.took.is_zero() && m.resident > 1 << 20, "{m:?}");
    }
    for phase in [Phase::JoinInTurn, Phase::Join, Phase::Restart] {
        assert!(!of(&rows, phase).cpu.is_zero(), "{phase:?}");
    }
    let all = NODES as u64 * RECORDS;
    for phase in [Phase::Attach, Phase::FlushBegin, Phase::FlushEnd] {
        assert_eq!(of(&rows, phase).ranges, all, "{phase:?}");
    }
    for phase in [Phase::Open, Phase::Look] {
        assert_eq!(of(&rows, phase).ranges, all * NODES as u64, "each heard of each record");
    }
    let carried = of(&rows, Phase::Open).carried;
    assert!(carried.sent > 10 * all * NODES as u64 && carried.sent > carried.received);
    // The probe had no answer while there was no service.
    assert!(of(&rows, Phase::Restart).stall > Duration::from_millis(1));
    let json = report::json(&settings, &rows);
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(Phase::ALL.len()));
    let text = report::tables(&settings, &rows);
    assert!(Phase::ALL.iter().all(|p| text.contains(p.title())), "{text}");
}

#[test]
fn records_of_many_sizes_are_found_without_encryption_too() {
    let wanted = [Phase::Open, Phase::FlushEnd];
    let settings =
        Settings { phases: wanted.to_vec(), ..settings(Pattern::Irregular, Secure::Off) };
    let rows = simulated(&settings);
    let mut phases: Vec<Phase> = rows.iter().map(|m| m.phase).collect();
    phases.sort();
    assert_eq!(phases, wanted);
}

#[test]
fn a_phase_that_reaches_its_limit_says_so_and_is_the_last_one() {
    let limit = Duration::from_secs(2);
    let idle = limit * 20;
    let settings = Settings {
        phases: vec![Phase::Idle, Phase::Goodbye],
        idle,
        limit,
        ..settings(Pattern::Strided, Secure::Off)
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let rows = runtime.block_on(run(&settings, NODES, |_| ())).expect("a service");
    let ends: Vec<_> = rows.iter().map(|m| (m.phase, m.outcome.clone())).collect();
    assert_eq!(ends, [(Phase::Idle, Outcome::Limit)]);
}
