//! How long a connection to the service may be silent, once it was probed, before it is given up.
//!
//! A link that is cut is noticed by that and by nothing else, so it is a few seconds. But an overloaded service
//! answers late, too: nodes that give their connections up then come back and ask everything again, and keep it
//! overloaded. So a node that has to come back soon waits longer the next time, if the service is the same.

use std::time::Duration;

/// At first, and when another service was there.
const SHORTEST: Duration = Duration::from_secs(3);
/// Twice that, and twice again.
const LONGEST: Duration = Duration::from_secs(12);
/// A session that lasted so long was not given up because of too little patience.
const CALM: Duration = Duration::from_secs(60);

/// The patience of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Silence(Duration);

impl Default for Silence {
    fn default() -> Silence {
        Silence(SHORTEST)
    }
}

impl Silence {
    /// Of the next connection.
    pub(crate) fn longest(self) -> Duration {
        self.0
    }

    /// Of the connection that follows one that ended after `lasted`.
    #[must_use]
    pub(crate) fn after(self, lasted: Duration) -> Silence {
        match lasted < CALM {
            true => Silence((self.0 * 2).min(LONGEST)),
            false => Silence((self.0 / 2).max(SHORTEST)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_break_soon_are_given_more_time() {
        let (mut silence, soon) = (Silence::default(), Duration::from_secs(7));
        let mut patience = || {
            silence = silence.after(soon);
            silence.longest().as_secs()
        };
        assert_eq!([patience(), patience(), patience()], [6, 12, 12]);
        silence = silence.after(CALM);
        assert_eq!(silence.longest().as_secs(), 6, "it was calm");
        assert_eq!(silence.after(CALM).after(CALM * 2), Silence::default(), "never less than that");
    }
}
