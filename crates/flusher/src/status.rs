//! What the flusher tells about itself.

use crate::errors::ErrorRecord;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What the flusher is doing, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FlushState {
    /// Nothing is dirty.
    Idle,
    /// Something is, and its time has not come.
    Waiting,
    /// Bytes are on their way.
    Flushing,
    /// Told not to flush in the background.
    Paused,
}

impl FlushState {
    /// As shown in status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FlushState::Idle => "idle",
            FlushState::Waiting => "waiting",
            FlushState::Flushing => "flushing",
            FlushState::Paused => "paused",
        }
    }
}

/// From the first foreground operation to a flusher that has stopped, over the last 1024 stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StopLatency {
    /// Stops since the start, also those that have left the window.
    pub count: u64,
    /// Half of them took at most this, in microseconds.
    pub p50_us: u64,
    /// 99 of 100 took at most this, in microseconds.
    pub p99_us: u64,
    /// The longest, in microseconds.
    pub max_us: u64,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Status {
    /// In one word.
    pub state: FlushState,
    /// The policy's name.
    pub policy: &'static str,
    /// Foreground operations in flight.
    pub activity: u64,
    /// Bytes that are not on the backing.
    pub dirty_bytes: u64,
    /// Bytes brought to the backing since the start.
    pub flushed_bytes: u64,
    /// Of these, bytes that were read back and compared.
    pub verified_bytes: u64,
    /// Grants that ended well.
    pub grants: u64,
    /// Background runs started.
    pub runs: u64,
    /// Grants that failed; each was tried again or is going to be.
    pub failed_grants: u64,
    /// Bytes of the files in `errors` that are not on the backing.
    pub failing_bytes: u64,
    /// Grants being written now.
    pub in_flight: usize,
    /// What the flusher's threads are doing.
    pub working: Vec<Working>,
    /// The files whose bytes could not be brought to the backing, and why.
    pub errors: Vec<ErrorRecord>,
    /// None when the flusher was never stopped by activity.
    pub stop_latency: Option<StopLatency>,
}

/// What a thread of the flusher is doing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Working {
    /// The file.
    pub path: String,
    /// The call that it is in.
    pub operation: &'static str,
    /// For how long.
    pub seconds: f64,
}

/// Counters that only grow.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) flushed_bytes: AtomicU64,
    pub(crate) verified_bytes: AtomicU64,
    pub(crate) grants: AtomicU64,
    pub(crate) failed_grants: AtomicU64,
    pub(crate) runs: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}

/// The last stops.
#[derive(Default)]
pub(crate) struct StopTimes {
    recent_us: Vec<u64>,
    count: u64,
}

impl StopTimes {
    /// Enough for a p99, little enough to sort for a status.
    const WINDOW: usize = 1024;

    pub(crate) fn record(&mut self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        if self.recent_us.len() < StopTimes::WINDOW {
            self.recent_us.push(us);
        } else {
            self.recent_us[self.count as usize % StopTimes::WINDOW] = us;
        }
        self.count += 1;
    }

    pub(crate) fn summary(&self) -> Option<StopLatency> {
        let mut sorted = self.recent_us.clone();
        sorted.sort_unstable();
        let max_us = *sorted.last()?;
        let at = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
        Some(StopLatency { count: self.count, p50_us: at(50), p99_us: at(99), max_us })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_the_window() {
        let mut times = StopTimes::default();
        assert_eq!(times.summary(), None);
        for us in (1..=200).rev() {
            times.record(Duration::from_micros(us));
        }
        let s = times.summary().unwrap();
        assert_eq!((s.count, s.p50_us, s.p99_us, s.max_us), (200, 100, 198, 200));
        for _ in 0..StopTimes::WINDOW {
            times.record(Duration::from_micros(7));
        }
        let s = times.summary().unwrap();
        assert_eq!((s.count, s.p99_us, s.max_us), (1224, 7, 7), "old stops leave the window");
    }
}
