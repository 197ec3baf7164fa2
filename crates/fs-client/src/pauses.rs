//! Pauses between attempts that nobody waits for: each twice as long as the one before, up to a bound.

use std::time::Duration;

/// How long until the next attempt.
pub struct Pauses {
    next: Duration,
    most: Duration,
}

impl Pauses {
    /// From the first to the longest.
    pub const fn between(first: Duration, most: Duration) -> Pauses {
        Pauses { next: first, most }
    }

    /// Waits for the next attempt.
    pub async fn pause(&mut self) {
        tokio::time::sleep(self.next).await;
        self.next = (self.next * 2).min(self.most);
    }
}
