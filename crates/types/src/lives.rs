//! Which daemons have ever been in a job, so that a recovery without a service can tell whether all of
//! them have said what they have.
//!
//! The service gives each daemon that joins with a cache of its own, or again after an end that left
//! something, the next number: a *life*. A daemon that takes over a cache answers for the lives of
//! the daemons before it on that cache, too. A node that leaves says so on the backing, where recoveries
//! tell each other what they have; when all have left, with nothing in any cache, the numbers begin
//! anew. A node that came back without its cache leaves a life behind for which nobody answers: then no
//! recovery takes a gap for a hole.

use serde::{Deserialize, Serialize};

/// Nobody knows how many there were: the service lost that.
pub const UNKNOWN: u32 = u32::MAX;

/// The lives that one cache answers for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lives {
    /// Their numbers.
    own: Vec<u32>,
    /// So many there were in the job when last heard of; 0: nothing was heard.
    count: u32,
}

impl Lives {
    /// A daemon begins on this cache, under this number. 0: it was given none.
    pub fn begin(&mut self, life: u32, count: u32) {
        self.own.extend((life != 0 && !self.own.contains(&life)).then_some(life));
        self.hear(count);
    }

    /// True when there are more than was heard.
    #[must_use]
    pub fn is_news(&self, count: u32) -> bool {
        count > self.count
    }

    /// There are so many.
    pub fn hear(&mut self, count: u32) {
        self.count = self.count.max(count);
    }

    /// True when there were others.
    #[must_use]
    pub fn has_others(&self) -> bool {
        self.count as usize > self.own.len()
    }

    /// True when nothing can be said with it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.own.is_empty() && self.count == 0
    }

    /// True when these are all lives that any of them has heard of.
    #[must_use]
    pub fn are_all<'a>(some: impl Iterator<Item = &'a Lives>) -> bool {
        let (mut own, mut count) = (Vec::new(), 0);
        for lives in some {
            own.extend(lives.own.iter().filter(|life| **life != 0));
            count = count.max(lives.count);
        }
        own.sort_unstable();
        own.dedup();
        let known = count != 0 && count != UNKNOWN;
        // Numbers begin with 1, so that as many different ones, none greater, are all of them.
        known && own.len() == count as usize && own.last() == Some(&count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lives(own: &[u32], count: u32) -> Lives {
        let mut lives = Lives::default();
        own.iter().for_each(|life| lives.begin(*life, count));
        lives.hear(count);
        lives
    }

    fn are_all(some: &[Lives]) -> bool {
        Lives::are_all(some.iter())
    }

    #[test]
    fn all_are_there_when_every_number_up_to_the_highest_count_is() {
        assert!(are_all(&[lives(&[1], 2), lives(&[2], 2)]));
        assert!(
            are_all(&[lives(&[2], 1), lives(&[1], 2)]),
            "the one that was there first heard less"
        );
        assert!(!are_all(&[lives(&[1], 2)]), "the second one is missing");
        assert!(!are_all(&[lives(&[1], 1), lives(&[2], 3)]), "one that only the second heard of");
        assert!(
            are_all(&[lives(&[1, 3], 3), lives(&[2], 3)]),
            "a second daemon on the first cache"
        );
        assert!(!are_all(&[lives(&[3], 3), lives(&[2], 3)]), "it came back without its cache");
        assert!(!are_all(&[lives(&[1, 3], 3), lives(&[1, 3], 3)]), "the same twice");
    }

    #[test]
    fn nothing_is_known_when_nothing_was_told() {
        assert!(!are_all(&[]));
        assert!(!are_all(&[lives(&[], 0)]) && !are_all(&[lives(&[0], 0)]));
        assert!(!are_all(&[lives(&[1], UNKNOWN)]), "a service that lost its journal");
        assert!(!are_all(&[lives(&[0, 1, 1], 2)]));
        assert!(!are_all(&[lives(&[1, 7], 2)]), "numbers that nobody gave");
    }
}
