//! Everything that can be measured of a node, as Prometheus text: the gauges and counters of its
//! status in one table, then the histograms of its operations.

use crate::carrier::OverRdma;
use crate::metrics::Metrics;
use crate::status::Status;
use std::fmt::Write as _;

/// What a number means to Prometheus.
#[derive(Clone, Copy)]
enum Kind {
    Gauge,
    Counter,
}

use Kind::{Counter, Gauge};

/// The states of the flusher, as `flush_state` names them.
const FLUSH_STATES: [&str; 4] = ["idle", "waiting", "flushing", "paused"];

/// Name, kind, help and value; the unit stands in the name.
fn table(s: &Status) -> Vec<(&'static str, Kind, &'static str, f64)> {
    let (ledger, flush) = (&s.ledger, &s.flush);
    let stop = flush.stop_latency;
    let seconds = |us: Option<u64>| us.map_or(0.0, |us| us as f64 / 1e6);
    vec![
        ("dirty_bytes", Gauge, "Bytes that are not on the backing", s.dirty_bytes as f64),
        ("clean_bytes", Gauge, "Bytes in the buffer that are elsewhere too", s.clean_bytes as f64),
        ("cache_bytes", Gauge, "Bytes in the buffer", s.cache_bytes as f64),
        ("cache_capacity_bytes", Gauge, "Bytes it may hold", s.cache_capacity_bytes as f64),
        ("dirty_files", Gauge, "Files with dirty bytes", s.dirty_files_total as f64),
        ("open_files", Gauge, "Open files", s.open_files as f64),
        ("activity", Gauge, "Foreground operations in flight", s.activity as f64),
        ("stuck_operations", Gauge, "Of these, longer than they should be", s.stuck.now as f64),
        ("stuck_operations_total", Counter, "The same, ever", s.stuck.ever as f64),
        ("errors", Gauge, "Files that cannot be brought to the backing", s.errors.len() as f64),
        ("failed_bytes", Gauge, "Dirty bytes of these files", ledger.failed_bytes as f64),
        ("resident_bytes", Gauge, "Memory of the daemon", s.resident_bytes as f64),
        ("peers", Gauge, "Other nodes that are alive", alive(s) as f64),
        ("flush_in_flight", Gauge, "Grants being written", flush.in_flight as f64),
        (
            "flush_stop_p99_seconds",
            Gauge,
            "From the first foreground operation to a stopped flusher, 99 of 100",
            seconds(stop.map(|l| l.p99_us)),
        ),
        ("flush_stop_max_seconds", Gauge, "The same, longest", seconds(stop.map(|l| l.max_us))),
        (
            "flush_stops_total",
            Counter,
            "Runs stopped by activity",
            stop.map_or(0, |l| l.count) as f64,
        ),
        ("flush_runs_total", Counter, "Background runs", flush.runs as f64),
        ("flush_grants_total", Counter, "Grants written", flush.grants as f64),
        ("flush_failed_grants_total", Counter, "Grants that failed", flush.failed_grants as f64),
        ("absorbed_bytes_total", Counter, "Bytes taken in", ledger.absorbed_bytes as f64),
        ("flushed_bytes_total", Counter, "Bytes brought to the backing", s.flushed_bytes as f64),
        ("verified_bytes_total", Counter, "Of these, compared", flush.verified_bytes as f64),
        ("evicted_bytes_total", Counter, "Bytes given up for room", ledger.evicted_bytes as f64),
        ("staged_bytes_total", Counter, "Bytes staged", ledger.staged_bytes as f64),
        ("staged_files_total", Counter, "Files staged", ledger.staged_files as f64),
        ("copied_bytes_total", Counter, "Bytes copied to a partner", s.copies.copied_bytes as f64),
        (
            "uncopied_bytes",
            Gauge,
            "Published bytes that should have a copy and have none",
            s.copies.uncopied_bytes as f64,
        ),
        ("held_copy_bytes", Gauge, "Copies kept for other nodes", s.copies.held_bytes as f64),
        (
            "adopted_bytes_total",
            Counter,
            "Bytes of lost nodes that became this node's",
            s.copies.adopted_bytes as f64,
        ),
        (
            "copies_degraded",
            Gauge,
            "1 while unflushed bytes have no copy although they should",
            f64::from(u8::from(s.copies.degraded.is_some())),
        ),
        (
            "medium_errors_total",
            Counter,
            "Times that the disk of the cache could not write something back",
            s.medium.errors as f64,
        ),
        (
            "damaged_blocks_total",
            Counter,
            "Blocks of the cache that were not what was written into them",
            s.medium.damaged_blocks as f64,
        ),
        (
            "names_noted",
            Gauge,
            "Facts of names in the node journal that the backing may not have",
            s.names_noted as f64,
        ),
        ("lost_bytes", Gauge, "Bytes that the disk of the cache lost", s.medium.lost_bytes as f64),
        (
            "encrypted_sent_bytes_total",
            Counter,
            "Bytes sent encrypted to peers and the metadata service",
            s.encrypted.sent_bytes as f64,
        ),
        (
            "encrypted_received_bytes_total",
            Counter,
            "The same, received",
            s.encrypted.received_bytes as f64,
        ),
        (
            "encrypted_broken_total",
            Counter,
            "Connections on which something came that the other end did not send",
            s.encrypted.broken as f64,
        ),
        (
            "rdma_connections",
            Gauge,
            "Connections to and from peers over RDMA",
            rdma(s, |r| r.connections),
        ),
        (
            "rdma_registered_bytes",
            Gauge,
            "Memory that the RDMA device may use",
            rdma(s, |r| r.registered_bytes),
        ),
        (
            "rdma_placed_bytes_total",
            Counter,
            "Bytes that peers wrote into buffers here over RDMA",
            rdma(s, |r| r.placed_bytes),
        ),
        (
            "rdma_written_bytes_total",
            Counter,
            "Bytes written into buffers of peers over RDMA",
            rdma(s, |r| r.written_bytes),
        ),
        (
            "rdma_fell_back_total",
            Counter,
            "Connections to peers that stayed on TCP although this node has RDMA",
            rdma(s, |r| r.fell_back),
        ),
        (
            "rdma_broken_total",
            Counter,
            "Connections over RDMA that ended with an error",
            rdma(s, |r| r.broken),
        ),
        ("served_bytes_peer_total", Counter, "Bytes sent to peers", s.served_bytes_peer as f64),
        ("served_reads_peer_total", Counter, "Reads of peers", s.served_reads_peer as f64),
        // Shrinks by what is flushed between the two looks that it is made of.
        ("skipped_bytes", Gauge, "Bytes that never had to be", ledger.skipped_bytes as f64),
    ]
}

fn rdma(status: &Status, number: impl Fn(&OverRdma) -> u64) -> f64 {
    status.transport.rdma.as_ref().map_or(0, number) as f64
}

fn alive(status: &Status) -> usize {
    status.peers.iter().filter(|p| p.alive).count()
}

/// The whole text.
pub(crate) fn text(status: &Status, metrics: &Metrics) -> String {
    let mut out = String::new();
    for (name, kind, help, value) in table(status) {
        let kind = match kind {
            Gauge => "gauge",
            Counter => "counter",
        };
        let _ = writeln!(out, "# HELP ebb_{name} {help}.");
        let _ = writeln!(out, "# TYPE ebb_{name} {kind}\nebb_{name} {value}");
    }
    out.push_str("# HELP ebb_flush_state What the flusher is doing: 1 for the state it is in.\n");
    out.push_str("# TYPE ebb_flush_state gauge\n");
    for state in FLUSH_STATES {
        let is_it = u8::from(status.flush_state == state);
        let _ = writeln!(out, "ebb_flush_state{{state=\"{state}\"}} {is_it}");
    }
    out.push_str("# HELP ebb_requests_total Requests to the metadata service.\n");
    out.push_str("# TYPE ebb_requests_total counter\n");
    for (name, count) in &status.rpc {
        let _ = writeln!(out, "ebb_requests_total{{request=\"{name}\"}} {count}");
    }
    out.push_str("# HELP ebb_opens_total Opens by the way of their data.\n");
    out.push_str("# TYPE ebb_opens_total counter\n");
    for (way, count) in &status.opens {
        let _ = writeln!(out, "ebb_opens_total{{path=\"{way}\"}} {count}");
    }
    metrics.write_prometheus(&mut out);
    out
}
