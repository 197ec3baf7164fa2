//! Holds the background threads to a number of bytes per second, all together.

use ebb_locks::Mutex;
use std::time::{Duration, Instant};

/// A rate shared by threads. Callers take their turn on a common time line: whoever writes
/// `n` bytes moves its end by `n / rate` and waits until his part of it begins.
pub(crate) struct Throttle {
    bytes_per_second: Option<u64>,
    free_at: Mutex<Option<Instant>>,
}

impl Throttle {
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Throttle {
        Throttle { bytes_per_second, free_at: Mutex::new(None) }
    }

    /// Reserves `bytes`; returns how long to wait before writing them.
    pub(crate) fn reserve(&self, bytes: u64, now: Instant) -> Duration {
        let Some(rate) = self.bytes_per_second else { return Duration::ZERO };
        let takes = Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        let mut free_at = self.free_at.lock();
        let begins = free_at.map_or(now, |at| at.max(now));
        *free_at = Some(begins + takes);
        begins - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_follow_each_other_at_the_rate() {
        let throttle = Throttle::new(Some(1000));
        let now = Instant::now();
        assert_eq!(throttle.reserve(500, now), Duration::ZERO);
        assert_eq!(throttle.reserve(250, now), Duration::from_millis(500));
        assert_eq!(throttle.reserve(1, now), Duration::from_millis(750));
        // Unused time is not saved up for a burst.
        let later = now + Duration::from_secs(60);
        assert_eq!(throttle.reserve(1000, later), Duration::ZERO);
        assert_eq!(throttle.reserve(1, later), Duration::from_secs(1));
    }

    #[test]
    fn without_a_cap_nobody_waits() {
        let throttle = Throttle::new(None);
        assert_eq!(throttle.reserve(u64::MAX, Instant::now()), Duration::ZERO);
        assert_eq!(throttle.reserve(u64::MAX, Instant::now()), Duration::ZERO);
    }
}
