//! What was measured, as a table for each phase and as JSON.

use super::Settings;
use super::phase::Phase;
use super::stage::{Measured, Outcome};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::Duration;

const HEAD: [&str; 11] = [
    "N",
    "CPU s",
    "us/node",
    "us/range",
    "memory MiB",
    "sent/node",
    "received/node",
    "stall ms",
    "again",
    "took s",
    "end",
];

/// CPU microseconds of each node that got through; in the idle phase of a second.
#[must_use]
pub fn per_node(m: &Measured) -> Option<f64> {
    let seconds = if m.phase == Phase::Idle { m.took.as_secs_f64() } else { 1.0 };
    (m.done > 0).then(|| micros(m.cpu) / m.done as f64 / seconds)
}

/// CPU microseconds of each range that was named; what a phase cut short has named is not known.
fn per_range(m: &Measured) -> Option<f64> {
    (m.ranges > 0 && m.outcome == Outcome::Done).then(|| micros(m.cpu) / m.ranges as f64)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// How many times as much a node costs with the most nodes as with the fewest, and how many times as many
/// these are; of phases that were completed.
#[must_use]
pub fn growth(rows: &[&Measured]) -> Option<(f64, f64)> {
    let done = || rows.iter().filter(|m| m.outcome == Outcome::Done);
    let (first, last) = (done().min_by_key(|m| m.nodes)?, done().max_by_key(|m| m.nodes)?);
    let cost = per_node(last)? / per_node(first)?;
    (last.nodes > first.nodes && cost.is_finite())
        .then(|| (cost, last.nodes as f64 / first.nodes as f64))
}

/// All tables.
#[must_use]
pub fn tables(settings: &Settings, rows: &[Measured]) -> String {
    let mut out = format!(
        "{} records a node, {}, --secure {}, limit {} s a phase\n",
        settings.records,
        settings.pattern.word(),
        settings.secure,
        settings.limit.as_secs()
    );
    for phase in Phase::ALL {
        let its: Vec<&Measured> = rows.iter().filter(|m| m.phase == phase).collect();
        if !its.is_empty() {
            table(&mut out, phase, &its);
        }
    }
    out
}

fn table(out: &mut String, phase: Phase, rows: &[&Measured]) {
    let cells: Vec<[String; 11]> =
        std::iter::once(HEAD.map(str::to_owned)).chain(rows.iter().map(|m| line(m))).collect();
    let width = |column: usize| cells.iter().map(|c| c[column].len()).max().unwrap_or(0);
    let widths: [usize; 11] = std::array::from_fn(width);
    let _ = writeln!(out, "\n{} ({})\n", phase.title(), phase.word());
    for (i, row) in cells.iter().enumerate() {
        let padded = row.iter().zip(widths).map(|(cell, width)| format!(" {cell:>width$} |"));
        let _ = writeln!(out, "|{}", padded.collect::<String>());
        if i == 0 {
            let rule = widths.map(|width| format!("{}:|", "-".repeat(width + 1)));
            let _ = writeln!(out, "|{}", rule.concat());
        }
    }
    if let Some((cost, nodes)) = growth(rows) {
        let _ = writeln!(out, "\n{nodes:.0} times the nodes: {cost:.2} times the cost of each");
    }
}

fn line(m: &Measured) -> [String; 11] {
    let or_none = |value: Option<f64>, digits: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
    };
    [
        m.nodes.to_string(),
        format!("{:.3}", m.cpu.as_secs_f64()),
        or_none(per_node(m), 1),
        or_none(per_range(m), 2),
        format!("{:.1}", m.resident as f64 / crate::MIB),
        bytes(m.carried.sent / m.nodes.max(1)),
        bytes(m.carried.received / m.nodes.max(1)),
        format!("{:.1}", m.stall.as_secs_f64() * 1e3),
        m.again.to_string(),
        format!("{:.2}", m.took.as_secs_f64()),
        end(m),
    ]
}

fn end(m: &Measured) -> String {
    match &m.outcome {
        Outcome::Done => "done".to_owned(),
        Outcome::Limit => format!("at the limit, {} of {}", m.done, m.nodes),
        Outcome::Failed(why) => format!("failed, {} of {}: {why}", m.done, m.nodes),
    }
}

fn bytes(amount: u64) -> String {
    match amount {
        0..10_000 => format!("{amount} B"),
        10_000..10_000_000 => format!("{:.1} KiB", amount as f64 / 1024.0),
        _ => format!("{:.1} MiB", amount as f64 / crate::MIB),
    }
}

/// The same for programs. Times are in seconds and microseconds, sizes in bytes.
#[must_use]
pub fn json(settings: &Settings, rows: &[Measured]) -> Value {
    json!({
        "records": settings.records,
        "pattern": settings.pattern.word(),
        "secure": settings.secure.to_string(),
        "lease_s": settings.lease.as_secs_f64(),
        "limit_s": settings.limit.as_secs_f64(),
        "idle_s": settings.idle.as_secs_f64(),
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    })
}

fn row(m: &Measured) -> Value {
    json!({
        "phase": m.phase.word(),
        "nodes": m.nodes,
        "done": m.done,
        "ranges": m.ranges,
        "cpu_s": m.cpu.as_secs_f64(),
        "cpu_us_per_node": per_node(m),
        "cpu_us_per_range": per_range(m),
        "resident_bytes": m.resident,
        "sent_bytes": m.carried.sent,
        "received_bytes": m.carried.received,
        "stall_s": m.stall.as_secs_f64(),
        "again": m.again,
        "took_s": m.took.as_secs_f64(),
        "end": end(m),
    })
}

#[cfg(test)]
mod tests {
    use super::super::traffic::Carried;
    use super::*;

    fn measured(nodes: u64, cpu_ms: u64, outcome: Outcome) -> Measured {
        Measured {
            phase: Phase::Attach,
            nodes,
            done: nodes,
            ranges: nodes * 10,
            cpu: Duration::from_millis(cpu_ms),
            took: Duration::from_secs(1),
            resident: 1 << 20,
            carried: Carried { sent: 0, received: 20 << 20 },
            stall: Duration::ZERO,
            again: 0,
            outcome,
        }
    }

    #[test]
    fn growth_is_of_the_cost_of_one_node_in_phases_that_were_completed() {
        let (few, many) = (measured(10, 10, Outcome::Done), measured(40, 120, Outcome::Done));
        let cut = measured(160, 30_000, Outcome::Limit);
        assert_eq!(growth(&[&few, &many, &cut]), Some((3.0, 4.0)));
        assert_eq!(growth(&[&few, &cut]), None);
    }

    #[test]
    fn a_table_says_what_ended_at_the_limit() {
        let rows = [measured(10, 10, Outcome::Done), measured(40, 10, Outcome::Limit)];
        let text = tables(&Settings::default(), &rows);
        assert!(text.contains("at the limit, 40 of 40") && text.contains("1000.0"), "{text}");
        assert!(text.contains("2048.0 KiB") && !text.contains("join"), "{text}");
        let json = json(&Settings::default(), &rows);
        assert_eq!(json["rows"][0]["cpu_us_per_range"], 100.0);
        assert_eq!(json["rows"][1]["cpu_us_per_range"], Value::Null);
    }
}
