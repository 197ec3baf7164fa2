//! The flusher's numbers, with the reason for each default.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How the disk scheduler should rank the background threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoClass {
    /// As everybody else.
    Normal,
    /// Best effort, last in line. The default: an idle-class thread can be starved altogether,
    /// and one that holds a grant would make a truncate of another node starve with it.
    #[default]
    Low,
    /// Only when the disk is otherwise idle.
    Idle,
}

/// From where written bytes are read back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReadBack {
    /// As this node's kernel has the backing file after the fsync: finds what went wrong on the
    /// way there and whatever another writer did. Costs no storage bandwidth. The default.
    #[default]
    Memory,
    /// The pages are dropped first, so that the bytes come from the storage: finds a storage that
    /// lost what it said to have, at the cost of reading everything once.
    Storage,
}

/// How the flusher works; when it does is the policy's.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Threads that flush in the background, and again as many for drains (8, as in the paper).
    pub threads: usize,
    /// Grants of one file that are written at the same time. Few, ordered streams keep the
    /// storage servers behind one file from being swamped.
    pub streams_per_file: usize,
    /// The same for drains, when there are not enough files for all threads: one stream waits for its
    /// fsync while others write.
    pub drain_streams_per_file: usize,
    /// Grants end at multiples of this where they can; the stripe size or a multiple of it.
    pub chunk: u64,
    /// Most bytes written under one grant, and so between two fsyncs of a stream.
    pub grant_bytes: u64,
    /// How long one grant should take at most while activity may return: an fsync cannot be
    /// interrupted, so grants shrink until one takes no longer than this.
    pub stop_within: Duration,
    /// From where bytes are read back to be compared.
    pub read_back: ReadBack,
    /// Read back and compare what background runs write. Drains always do.
    pub verify_background: bool,
    /// Most bytes per second of all background threads together. Drains are not held back.
    pub bandwidth_cap: Option<u64>,
    /// CPU niceness of the background threads.
    pub nice: i32,
    /// I/O rank of the background threads.
    pub io_class: IoClass,
    /// First pause after a failure; doubled after each further one.
    pub backoff_first: Duration,
    /// Longest such pause in the background (a drain's is at most a tenth of it).
    pub backoff_most: Duration,
    /// Attempts for one file before a drain gives it up and reports the failure.
    pub drain_attempts: u32,
    /// A backing call that takes longer is reported and its thread replaced.
    pub hang_after: Duration,
    /// How often pressure and bypassing I/O are looked at.
    pub observe_every: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            threads: 8,
            streams_per_file: 2,
            drain_streams_per_file: 4,
            chunk: 8 << 20,
            grant_bytes: 64 << 20,
            stop_within: Duration::from_millis(200),
            read_back: ReadBack::Memory,
            verify_background: false,
            bandwidth_cap: None,
            nice: 10,
            io_class: IoClass::Low,
            backoff_first: Duration::from_millis(100),
            backoff_most: Duration::from_secs(30),
            drain_attempts: 5,
            hang_after: Duration::from_secs(30),
            observe_every: Duration::from_millis(100),
        }
    }
}

impl Options {
    /// The pause after so many failures in a row.
    pub(crate) fn backoff(&self, attempts: u32) -> Duration {
        let doubled = self.backoff_first.saturating_mul(1 << attempts.saturating_sub(1).min(16));
        doubled.min(self.backoff_most)
    }

    /// The pause where somebody is waiting: for a drain, or for room.
    pub(crate) fn short_backoff(&self, attempts: u32) -> Duration {
        self.backoff(attempts).min(self.backoff_most / 10)
    }

    /// Grants end where stripes end.
    pub(crate) fn aligned(mut self, stripe_size: Option<u32>) -> Options {
        if let Some(stripe) = stripe_size {
            self.chunk = ebb_backend::lustre::aligned_chunk(self.chunk, stripe);
        }
        self
    }

    /// Zeros would mean that nothing ever moves.
    pub(crate) fn sane(mut self) -> Options {
        self.threads = self.threads.clamp(1, 256);
        self.streams_per_file = self.streams_per_file.clamp(1, self.threads);
        self.drain_streams_per_file = self.drain_streams_per_file.clamp(1, self.threads);
        self.chunk = self.chunk.max(crate::plan::PIECE);
        self.grant_bytes = self.grant_bytes.max(crate::plan::PIECE);
        self.drain_attempts = self.drain_attempts.max(1);
        self.observe_every = self.observe_every.max(Duration::from_millis(1));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_stripes_where_there_are_any() {
        let chunk = |stripe| Options::default().aligned(stripe).sane().chunk;
        assert_eq!(chunk(None), 8 << 20);
        assert_eq!(chunk(Some(1 << 20)), 8 << 20);
        assert_eq!(chunk(Some(16 << 20)), 16 << 20);
        assert_eq!(chunk(Some(3 << 20)), 9 << 20);
    }
}
