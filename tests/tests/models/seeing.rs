//! What a user and a monitor can see of a mount: `ebb top --once`, and metrics that a strict
//! reader of the Prometheus text format takes.

use ebb_testkit::{Cluster, describe, skip_reason};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;

/// Samples by series (name with labels), as the text format defines them; panics at whatever a
/// scraper would refuse.
fn scrape(text: &str) -> BTreeMap<String, f64> {
    let is_name = |n: &str| {
        !n.is_empty()
            && !n.starts_with(|c: char| c.is_ascii_digit())
            && n.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
    };
    let (mut types, mut helped) = (BTreeMap::<String, String>::new(), BTreeSet::new());
    let (mut samples, mut closed) = (BTreeMap::new(), BTreeSet::<String>::new());
    let mut family = String::new();
    assert!(text.ends_with('\n'), "the last line has no end");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("HELP has a text");
            assert!(is_name(name) && !help.is_empty() && helped.insert(name.to_owned()), "{line}");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("TYPE has a type");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{line}: twice");
            closed.insert(std::mem::replace(&mut family, name.to_owned()));
            assert!(!closed.contains(name), "{line}: the family was interrupted");
        } else {
            let (series, value) = line.rsplit_once(' ').expect("a sample has a value");
            let name = series.split('{').next().expect("split gives one");
            assert!(is_name(name), "{line}");
            assert!(name.starts_with(&family), "{line}: not of the family {family}");
            if let Some(labels) = series.strip_prefix(name).filter(|l| !l.is_empty()) {
                let inner = labels.strip_prefix('{').and_then(|l| l.strip_suffix('}'));
                for label in inner.expect("braces").split(',') {
                    let (key, quoted) = label.split_once('=').expect("a label has a value");
                    assert!(
                        is_name(key) && quoted.starts_with('"') && quoted.ends_with('"'),
                        "{line}"
                    );
                }
            }
            let value: f64 = value.parse().unwrap_or_else(|e| panic!("{line}: {e}"));
            assert!(value.is_finite() && value >= 0.0, "{line}");
            assert!(samples.insert(series.to_owned(), value).is_none(), "{line}: twice");
        }
    }
    for (name, kind) in &types {
        assert!(helped.contains(name), "{name} has no HELP");
        if kind == "counter" {
            assert!(name.ends_with("_total"), "{name} is a counter");
        }
    }
    samples
}

/// Buckets grow, and the last one counts everything.
fn check_histogram(samples: &BTreeMap<String, f64>, operation: &str) {
    let prefix = format!("ebb_operation_seconds_bucket{{op=\"{operation}\",le=\"");
    let mut buckets: Vec<(f64, f64)> = samples
        .iter()
        .filter_map(|(series, count)| {
            let bound = series.strip_prefix(&prefix)?.strip_suffix("\"}")?;
            Some((if bound == "+Inf" { f64::INFINITY } else { bound.parse().ok()? }, *count))
        })
        .collect();
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert!(buckets.len() > 2, "{operation} has no buckets");
    assert!(buckets.windows(2).all(|w| w[0].1 <= w[1].1), "{operation}: {buckets:?}");
    let count = samples[&format!("ebb_operation_seconds_count{{op=\"{operation}\"}}")];
    assert_eq!(buckets.last(), Some(&(f64::INFINITY, count)), "{operation}");
}

#[test]
fn metrics_are_valid_and_complete() {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    // With a tracker nothing of it would come through the daemon.
    let cluster = Cluster::builder().nodes(2).flush("end").option("--tracker", "off").start();
    let node = cluster.node(0);
    // What is written past the daemon counts, and what is written over it through the daemon.
    fs::write(node.path("f"), vec![1; 60_000]).expect("write");
    // While the first one is open, others of the node go past the daemon, too.
    node.wait_closed();
    let mut file = fs::OpenOptions::new().append(true).open(node.path("f")).expect("open");
    file.write_all(&[1; 40_000]).expect("append");
    drop(file);
    assert_eq!(fs::read(node.path("f")).expect("read").len(), 100_000);
    let before = scrape(&fs::read_to_string(node.path(".ebb/metrics")).expect("metrics"));
    for (series, value) in [
        ("ebb_dirty_bytes", 100_000.0),
        ("ebb_absorbed_bytes_total", 100_000.0),
        ("ebb_flushed_bytes_total", 0.0),
        ("ebb_dirty_files", 1.0),
        ("ebb_peers", 1.0),
        ("ebb_errors", 0.0),
        ("ebb_flush_state{state=\"waiting\"}", 1.0),
        ("ebb_flush_state{state=\"flushing\"}", 0.0),
    ] {
        assert_eq!(before.get(series), Some(&value), "{series}");
    }
    for operation in ["write", "create", "lookup"] {
        check_histogram(&before, operation);
    }
    node.drain();
    let output = node.ebb("stats", &["--prometheus"], &[]);
    let after = scrape(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(after["ebb_dirty_bytes"], 0.0);
    assert_eq!(after["ebb_flushed_bytes_total"], 100_000.0);
    assert_eq!(after["ebb_verified_bytes_total"], 100_000.0);
    assert_eq!(after["ebb_flush_state{state=\"idle\"}"], 1.0);
    assert!(after["ebb_requests_total{request=\"attach\"}"] >= 1.0, "{after:?}");
    for (series, value) in &before {
        let is_counter = series.split('{').next().is_some_and(|n| n.ends_with("_total"));
        assert!(!is_counter || after[series] >= *value, "{series} went back");
    }
    cluster.umount_all();
}

#[test]
fn top_prints_one_frame() {
    if let Some(why) = skip_reason() {
        return println!("SKIPPED: {why}");
    }
    let cluster = Cluster::builder().nodes(1).flush("end").start();
    let node = cluster.node(0);
    fs::write(node.path("large-one"), vec![1; 3 << 20]).expect("write");
    let output = node.ebb("top", &["--once", "--interval", "100ms"], &[]);
    assert!(output.status.success(), "{}", describe(&output));
    let frame = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in
        ["policy end", "flush waiting", "3MiB dirty", "3MiB absorbed", "large-one", "flushing |"]
    {
        assert!(frame.contains(part), "{part} in\n{frame}");
    }
    assert!(!frame.contains('\x1b'), "plain text only:\n{frame}");
    let output = node.ebb("top", &[], &[]);
    assert_eq!(output.status.code(), Some(2), "without a terminal: {}", describe(&output));
    cluster.umount_all();
}
