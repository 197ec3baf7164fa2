//! Counters and latency histograms of the daemon, in one table; read by `ebb stats` and
//! `.ebb/metrics`.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

macro_rules! operations {
    ($($variant:ident $name:literal),* $(,)?) => {
        /// Everything that is timed: the operations of the mount.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Operation { $($variant),* }
        const NAMES: &[&str] = &[$($name),*];
    };
}
operations! {
    Lookup "lookup", GetAttr "getattr", SetAttr "setattr", ReadLink "readlink", Make "make",
    Unlink "unlink", Rename "rename", Link "link", Open "open", Create "create", Read "read",
    Write "write", Flush "flush", Fsync "fsync", Release "release", ReadDir "readdir",
    Xattr "xattr", Lock "lock", Fallocate "fallocate", Seek "lseek", Copy "copy_file_range",
    StatFs "statfs", Library "library",
}

/// Buckets are powers of two of microseconds: below 1, 2, 4 … 2^22 (four seconds), and the rest.
const BUCKETS: usize = 24;

#[derive(Default)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    count: AtomicU64,
    sum_us: AtomicU64,
}

/// The counters of one daemon.
pub struct Metrics {
    operations: Vec<Histogram>,
    /// Bytes written by applications.
    pub bytes_written: AtomicU64,
    /// Bytes read by applications.
    pub bytes_read: AtomicU64,
    /// Bytes fetched from other nodes.
    pub fetched_peer: AtomicU64,
    /// Bytes fetched from the backing.
    pub fetched_backing: AtomicU64,
    /// Bytes made zeros by applications (holes punched, zeros written).
    pub zeroed: AtomicU64,
    /// Dirty bytes that an earlier daemon left in the cache.
    pub taken_over: AtomicU64,
    /// Bytes and files that were staged.
    pub staged_bytes: AtomicU64,
    #[allow(missing_docs)]
    pub staged_files: AtomicU64,
    /// Bytes that another node took over before they were flushed here.
    pub overtaken: AtomicU64,
    /// Files of which a service that lost the end of its journal was told what it may have forgotten.
    pub reasserted: AtomicU64,
    /// Waits for coupled files.
    pub awaited: AtomicU64,
    /// Ends of flushes, and deletions, of synced files.
    pub kept_until_stable: AtomicU64,
    /// How often pages that the kernel kept of a file were dropped.
    pub pages_dropped: AtomicU64,
    /// Files whose locks were given up because this node was silent.
    pub locks_lost: AtomicU64,
    /// Places of appends that failed, which became zeros.
    pub appends_undone: AtomicU64,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            operations: NAMES.iter().map(|_| Histogram::default()).collect(),
            bytes_written: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
            fetched_peer: AtomicU64::new(0),
            fetched_backing: AtomicU64::new(0),
            zeroed: AtomicU64::new(0),
            taken_over: AtomicU64::new(0),
            staged_bytes: AtomicU64::new(0),
            staged_files: AtomicU64::new(0),
            overtaken: AtomicU64::new(0),
            reasserted: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            kept_until_stable: AtomicU64::new(0),
            pages_dropped: AtomicU64::new(0),
            locks_lost: AtomicU64::new(0),
            appends_undone: AtomicU64::new(0),
        }
    }
}

impl Metrics {
    /// Counts one operation that began at `start`.
    pub fn finished(&self, operation: Operation, start: Instant) {
        let us = start.elapsed().as_micros() as u64;
        let histogram = &self.operations[operation as usize];
        let bucket = (64 - us.leading_zeros() as usize).min(BUCKETS - 1);
        histogram.buckets[bucket].fetch_add(1, Relaxed);
        histogram.count.fetch_add(1, Relaxed);
        histogram.sum_us.fetch_add(us, Relaxed);
    }

    fn totals(&self) -> [(&'static str, &'static str, u64); 11] {
        [
            ("bytes_written", "Bytes written by applications", self.bytes_written.load(Relaxed)),
            ("bytes_read", "Bytes read by applications", self.bytes_read.load(Relaxed)),
            ("fetched_bytes_peer", "Bytes from other nodes", self.fetched_peer.load(Relaxed)),
            ("fetched_bytes_backing", "Bytes from the backing", self.fetched_backing.load(Relaxed)),
            ("overtaken_bytes", "Bytes another node overwrote", self.overtaken.load(Relaxed)),
            (
                "reasserted_files",
                "Files told again to a service that lost the end of its journal",
                self.reasserted.load(Relaxed),
            ),
            ("awaited_files", "Waits for coupled files", self.awaited.load(Relaxed)),
            (
                "kept_until_stable",
                "Flushes and deletions of synced bytes that waited for the service's stable storage",
                self.kept_until_stable.load(Relaxed),
            ),
            (
                "kernel_pages_dropped",
                "How often pages that the kernel kept of a file were dropped",
                self.pages_dropped.load(Relaxed),
            ),
            (
                "locks_lost",
                "Files whose locks were given up while this node was silent",
                self.locks_lost.load(Relaxed),
            ),
            (
                "appends_undone",
                "Appends that failed and left zeros at the end of a file",
                self.appends_undone.load(Relaxed),
            ),
        ]
    }

    /// The counters and histograms as Prometheus text; `exposition` adds what a status says.
    pub(crate) fn write_prometheus(&self, out: &mut String) {
        for (name, help, value) in self.totals() {
            let _ = writeln!(out, "# HELP ebb_{name}_total {help}.");
            let _ = writeln!(out, "# TYPE ebb_{name}_total counter\nebb_{name}_total {value}");
        }
        out.push_str("# HELP ebb_operation_seconds Time of mount operations.\n");
        out.push_str("# TYPE ebb_operation_seconds histogram\n");
        for (name, h) in NAMES.iter().zip(&self.operations) {
            // One look at each bucket: operations that end meanwhile must not make the sums differ.
            let buckets: Vec<u64> = h.buckets.iter().map(|b| b.load(Relaxed)).collect();
            let count: u64 = buckets.iter().sum();
            if count == 0 {
                continue;
            }
            let mut below = 0;
            for (i, bucket) in buckets.iter().enumerate().take(BUCKETS - 1) {
                below += bucket;
                let le = (1u64 << i) as f64 / 1e6;
                let _ = writeln!(
                    out,
                    "ebb_operation_seconds_bucket{{op=\"{name}\",le=\"{le}\"}} {below}"
                );
            }
            let _ =
                writeln!(out, "ebb_operation_seconds_bucket{{op=\"{name}\",le=\"+Inf\"}} {count}");
            let sum = h.sum_us.load(Relaxed) as f64 / 1e6;
            let _ = writeln!(out, "ebb_operation_seconds_sum{{op=\"{name}\"}} {sum}");
            let _ = writeln!(out, "ebb_operation_seconds_count{{op=\"{name}\"}} {count}");
        }
    }

    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out =
            format!("{:<18}{:>12}{:>12}{:>12}\n", "operation", "count", "mean us", "p99 us");
        for (name, h) in NAMES.iter().zip(&self.operations) {
            let count = h.count.load(Relaxed);
            if count > 0 {
                let mean = h.sum_us.load(Relaxed) as f64 / count as f64;
                let _ =
                    writeln!(out, "{name:<18}{count:>12}{mean:>12.1}{:>12}", h.percentile(0.99));
            }
        }
        for (name, _, value) in self.totals() {
            let _ = writeln!(out, "{name:<30}{value:>24}");
        }
        out
    }
}

impl Histogram {
    /// Upper bound of the bucket in which the given share of all operations has ended.
    fn percentile(&self, share: f64) -> u64 {
        let wanted = (self.count.load(Relaxed) as f64 * share).ceil() as u64;
        let mut below = 0;
        for (i, bucket) in self.buckets.iter().enumerate() {
            below += bucket.load(Relaxed);
            if below >= wanted {
                return 1 << i;
            }
        }
        1 << (BUCKETS - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_shown() {
        let metrics = Metrics::default();
        metrics.finished(Operation::Write, Instant::now());
        metrics.bytes_written.fetch_add(42, Relaxed);
        let mut text = String::new();
        metrics.write_prometheus(&mut text);
        assert!(text.contains("ebb_bytes_written_total 42"), "{text}");
        assert!(text.contains("ebb_operation_seconds_count{op=\"write\"} 1"), "{text}");
        assert!(metrics.table().contains("write"), "{}", metrics.table());
    }
}
