//! What nodes were answered last, for requests that come again after a restart.

use super::Outcome;
use std::collections::{HashMap, VecDeque};

/// Answers remembered across a restart, per node.
const ANSWERED_MAX: usize = 1024;

/// What a node was answered last, oldest first. (The numbers say nothing about the order: a
/// request that took long has a low one, and those of an application's calls are the kernel's.)
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answers {
    outcomes: HashMap<u64, Outcome>,
    order: VecDeque<u64>,
}

impl Answers {
    /// One more.
    pub fn insert(&mut self, id: u64, outcome: Outcome) {
        if self.outcomes.insert(id, outcome).is_none() {
            self.order.push_back(id);
        }
        if self.order.len() > ANSWERED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.outcomes.remove(&oldest);
        }
    }

    /// The answer to a request.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<Outcome> {
        self.outcomes.get(&id).copied()
    }

    /// All of them, the oldest first.
    pub fn in_order(&self) -> impl Iterator<Item = (u64, Outcome)> {
        self.order.iter().filter_map(|id| Some((*id, self.get(*id)?)))
    }
}

#[cfg(test)]
mod answers_tests {
    use super::*;
    use ebb_types::Version;

    #[test]
    fn the_last_answers_are_known_whatever_their_numbers() {
        let mut answers = Answers::default();
        let outcome = |n: u64| Outcome::Appended(n, Version(n));
        // High ones first, then one that took long.
        for n in 0..ANSWERED_MAX as u64 + 3 {
            answers.insert(u64::MAX - n, outcome(n));
        }
        answers.insert(1, outcome(77));
        answers.insert(1, outcome(78));
        assert_eq!(answers.get(1), Some(outcome(78)));
        assert_eq!(answers.get(u64::MAX - 3), None);
        assert_eq!(answers.get(u64::MAX - 4), Some(outcome(4)));
        let mut again = Answers::default();
        answers.in_order().for_each(|(id, o)| again.insert(id, o));
        assert_eq!(again, answers);
        assert_eq!(again.in_order().count(), ANSWERED_MAX);
    }
}
