//! Numbers with their spread.

use std::fmt;

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// Bandwidth.
    MibPerSecond,
    /// Rate.
    PerSecond,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unit::MibPerSecond => "MiB/s",
            Unit::PerSecond => "1/s",
        })
    }
}

/// One number of one round.
#[derive(Clone, Debug, PartialEq)]
pub struct Measure {
    /// Which part of the pattern: `write`, `read`, `create`...
    pub phase: String,
    /// What it counts.
    pub unit: Unit,
    /// How many.
    pub value: f64,
}

impl Measure {
    /// `bytes` in `seconds`.
    #[must_use]
    pub fn bandwidth(phase: impl Into<String>, bytes: u64, seconds: f64) -> Measure {
        let value = bytes as f64 / f64::from(1 << 20) / seconds.max(1e-9);
        Measure { phase: phase.into(), unit: Unit::MibPerSecond, value }
    }

    /// `count` in `seconds`.
    #[must_use]
    pub fn rate(phase: impl Into<String>, count: u64, seconds: f64) -> Measure {
        let value = count as f64 / seconds.max(1e-9);
        Measure { phase: phase.into(), unit: Unit::PerSecond, value }
    }
}

/// Several rounds of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Half of the rounds were above, half below.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// How many rounds.
    pub rounds: usize,
}

impl Spread {
    /// Of these values; none when there are none.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (least, most) = (*sorted.first()?, *sorted.last()?);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Spread { median: f64::midpoint(low, high), least, most, rounds: sorted.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let s = Spread::of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((s.median, s.least, s.most, s.rounds), (2.0, 1.0, 3.0, 3));
        assert_eq!(Spread::of(&[4.0, 1.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn units() {
        assert_eq!(Measure::bandwidth("w", 3 << 20, 1.5).value, 2.0);
        assert_eq!(Measure::rate("c", 10, 2.0).value, 5.0);
    }
}
