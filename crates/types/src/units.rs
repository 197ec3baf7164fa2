//! Sizes, shares and durations as users write them. A number without a clear unit is an error.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What was wrong with a value the user wrote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UnitError(String);

/// A number of bytes: `4096`, `64KiB`, `1.5GiB`, `10GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Size(pub u64);

const SIZE_UNITS: [(&str, u64); 13] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("PiB", 1 << 50),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
    ("T", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

fn split_number(s: &str) -> (&str, &str) {
    let t = s.trim();
    let end = t.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(t.len());
    (&t[..end], t[end..].trim())
}

impl FromStr for Size {
    type Err = UnitError;

    fn from_str(s: &str) -> Result<Size, UnitError> {
        let (number, unit) = split_number(s);
        let factor = if unit.is_empty() {
            1
        } else {
            SIZE_UNITS.iter().find(|(n, _)| n.eq_ignore_ascii_case(unit)).map(|u| u.1).ok_or_else(
                || UnitError(format!("'{s}': unknown unit '{unit}' (use B, KiB, MiB, GiB, TiB)")),
            )?
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole
                .checked_mul(factor)
                .map(Size)
                .ok_or_else(|| UnitError(format!("'{s}' is too large")));
        }
        let value: f64 =
            number.parse().map_err(|_| UnitError(format!("'{s}' is not a size (like 64MiB)")))?;
        let bytes = value * factor as f64;
        if unit.is_empty() || !bytes.is_finite() || bytes > u64::MAX as f64 {
            return Err(UnitError(format!("'{s}' is not a size (like 1.5GiB)")));
        }
        Ok(Size(bytes as u64))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, unit) in
            [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
        {
            if self.0 >= unit {
                return if self.0.is_multiple_of(unit) {
                    write!(f, "{}{name}", self.0 / unit)
                } else {
                    write!(f, "{:.2}{name}", self.0 as f64 / unit as f64)
                };
            }
        }
        write!(f, "{}B", self.0)
    }
}

impl TryFrom<String> for Size {
    type Error = UnitError;
    fn try_from(s: String) -> Result<Size, UnitError> {
        s.parse()
    }
}

impl From<Size> for String {
    fn from(s: Size) -> String {
        format!("{}B", s.0)
    }
}

/// A share of something: `80%`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Percent(pub f64);

impl FromStr for Percent {
    type Err = UnitError;

    fn from_str(s: &str) -> Result<Percent, UnitError> {
        let bad = || UnitError(format!("'{s}' is not a share between 0% and 100% (like 50%)"));
        let number = s.trim().strip_suffix('%').ok_or_else(bad)?;
        match number.trim().parse::<f64>() {
            Ok(v) if (0.0..=100.0).contains(&v) => Ok(Percent(v)),
            _ => Err(bad()),
        }
    }
}

impl Percent {
    /// That share of `whole`.
    #[must_use]
    pub fn of(self, whole: u64) -> u64 {
        (whole as f64 * self.0 / 100.0) as u64
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

impl TryFrom<String> for Percent {
    type Error = UnitError;
    fn try_from(s: String) -> Result<Percent, UnitError> {
        s.parse()
    }
}

impl From<Percent> for String {
    fn from(p: Percent) -> String {
        p.to_string()
    }
}

/// A time span: `500ms`, `1s`, `1.5s`, `10m`, `2h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = UnitError;

    fn from_str(s: &str) -> Result<Span, UnitError> {
        let (number, unit) = split_number(s);
        let seconds = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => return Err(UnitError(format!("'{s}': say ms, s, m or h (like 1s)"))),
        };
        let value: f64 =
            number.parse().map_err(|_| UnitError(format!("'{s}' is not a time (like 500ms)")))?;
        Duration::try_from_secs_f64(value * seconds)
            .map(Span)
            .map_err(|_| UnitError(format!("'{s}' is too long")))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl TryFrom<String> for Span {
    type Error = UnitError;
    fn try_from(s: String) -> Result<Span, UnitError> {
        s.parse()
    }
}

impl From<Span> for String {
    fn from(s: Span) -> String {
        format!("{}ms", s.0.as_millis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!("64MiB".parse(), Ok(Size(64 << 20)));
        assert_eq!("1.5GiB".parse(), Ok(Size(3 << 29)));
        assert_eq!("4096".parse(), Ok(Size(4096)));
        assert_eq!("10GB".parse(), Ok(Size(10_000_000_000)));
        for bad in ["", "GiB", "1.5", "3 parsecs", "-1B", "99999999999TiB", "1e3"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
        assert_eq!(Size(1536).to_string(), "1.50KiB");
    }

    #[test]
    fn shares_and_spans() {
        assert_eq!("80%".parse::<Percent>().map(|p| p.of(1000)), Ok(800));
        assert!("80".parse::<Percent>().is_err());
        assert!("101%".parse::<Percent>().is_err());
        assert_eq!("500ms".parse(), Ok(Span(Duration::from_millis(500))));
        assert_eq!("1.5s".parse(), Ok(Span(Duration::from_millis(1500))));
        assert_eq!("10m".parse(), Ok(Span(Duration::from_secs(600))));
        assert!("10".parse::<Span>().is_err());
    }
}
