//! The value of `--wait-interval`: a time, or `adaptive` (also `auto`), or `adaptive:TIME`.

use ebb_fs_client::config::Waiting;
use ebb_types::units::{Span, UnitError};
use std::str::FromStr;
use std::time::Duration;

/// What `adaptive` alone starts from and falls back to: the default of the fixed interval.
const FALLBACK: Duration = Duration::from_secs(1);

/// How long applications must pause before the idle policy flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitInterval {
    /// Fixed or learned.
    pub waiting: Waiting,
    /// The time itself, or what learning falls back to.
    pub interval: Duration,
}

/// Why a value is none.
#[derive(Debug)]
pub enum WaitError {
    /// Not a time.
    Unit(UnitError),
    /// There is nothing to learn below no time at all.
    Zero,
}

impl std::fmt::Display for WaitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WaitError::Unit(e) => write!(f, "{e}, or adaptive, or adaptive:TIME"),
            WaitError::Zero => f.write_str("'adaptive' needs a time longer than 0s"),
        }
    }
}

impl FromStr for WaitInterval {
    type Err = WaitError;

    fn from_str(s: &str) -> Result<WaitInterval, WaitError> {
        let time = |s: &str| s.parse::<Span>().map(|span| span.0).map_err(WaitError::Unit);
        let (word, rest) = s.split_once(':').map_or((s, None), |(w, r)| (w, Some(r)));
        if !matches!(word, "adaptive" | "auto") {
            return Ok(WaitInterval { waiting: Waiting::Fixed, interval: time(s)? });
        }
        let interval = rest.map_or(Ok(FALLBACK), time)?;
        if interval.is_zero() {
            return Err(WaitError::Zero);
        }
        Ok(WaitInterval { waiting: Waiting::Adaptive, interval })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_words() {
        let of = |s: &str| s.parse::<WaitInterval>().map(|w| (w.waiting, w.interval.as_millis()));
        assert_eq!(of("250ms").unwrap(), (Waiting::Fixed, 250));
        assert_eq!(of("0s").unwrap(), (Waiting::Fixed, 0));
        assert_eq!(of("adaptive").unwrap(), (Waiting::Adaptive, 1000));
        assert_eq!(of("auto").unwrap(), (Waiting::Adaptive, 1000));
        assert_eq!(of("adaptive:3s").unwrap(), (Waiting::Adaptive, 3000));
        for bad in ["", "10", "adaptive:", "adaptive:3", "adaptively", "1s:adaptive", "auto:0s"] {
            let e = of(bad).expect_err(bad);
            assert!(e.to_string().contains("adaptive"), "{bad}: {e}");
        }
    }
}
