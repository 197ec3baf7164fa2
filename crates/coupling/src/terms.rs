//! What is said of a directory: `producers=P consumers=C [keep=none|pfs] [wait=30s]`.

use ebb_types::units::Span;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Longer texts are not terms.
pub const TERMS_BYTES_MAX: usize = 256;

/// So many may take part.
pub const PARTIES_MAX: u32 = 1 << 20;

/// Nobody waits longer than a day.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);

const WAIT: Duration = Duration::from_secs(30);

/// What becomes of a file when all have read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keep {
    /// It is removed. It gets to the backing only when the cache is full, or when the job ends before.
    None,
    /// It stays, and gets to the backing as every file does.
    Pfs,
}

/// How the files of a directory are handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// A file is ready when so many opens for writing were closed.
    pub producers: u32,
    /// It is consumed when so many opens for reading were closed.
    pub consumers: u32,
    /// And then?
    pub keep: Keep,
    /// Who opens a file for reading waits so long at most.
    pub wait: Duration,
}

/// A text that is not terms.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}': {what} (like \"producers=4 consumers=2 keep=none wait=30s\")")]
pub struct TermsError {
    text: String,
    what: String,
}

impl FromStr for Terms {
    type Err = TermsError;

    fn from_str(text: &str) -> Result<Terms, TermsError> {
        let wrong = |what: String| TermsError { text: text.chars().take(80).collect(), what };
        if text.len() > TERMS_BYTES_MAX {
            return Err(wrong("too long".to_owned()));
        }
        let (mut producers, mut consumers, mut keep, mut wait) = (None, None, None, None);
        for word in text.split_whitespace() {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let count = || match value.parse::<u32>() {
                Ok(n) if (1..=PARTIES_MAX).contains(&n) => Ok(n),
                _ => Err(wrong(format!("{name} must be a number from 1 to {PARTIES_MAX}"))),
            };
            let twice = match name {
                "producers" => producers.replace(count()?).is_some(),
                "consumers" => consumers.replace(count()?).is_some(),
                "keep" => {
                    let kept = match value {
                        "none" => Keep::None,
                        "pfs" => Keep::Pfs,
                        _ => return Err(wrong("keep must be none or pfs".to_owned())),
                    };
                    keep.replace(kept).is_some()
                }
                "wait" => {
                    let Span(time) = value.parse().map_err(|e| wrong(format!("wait: {e}")))?;
                    if time.is_zero() || time > WAIT_MAX {
                        return Err(wrong(
                            "wait must be longer than 0s, and a day at most".to_owned(),
                        ));
                    }
                    wait.replace(time).is_some()
                }
                _ => return Err(wrong(format!("there is no '{name}'"))),
            };
            if twice {
                return Err(wrong(format!("{name} is there twice")));
            }
        }
        let needed = |count: Option<u32>, name: &str| {
            count.ok_or_else(|| wrong(format!("{name}= is missing")))
        };
        Ok(Terms {
            producers: needed(producers, "producers")?,
            consumers: needed(consumers, "consumers")?,
            keep: keep.unwrap_or(Keep::None),
            wait: wait.unwrap_or(WAIT),
        })
    }
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Terms { producers, consumers, keep, wait } = self;
        let keep = match keep {
            Keep::None => "none",
            Keep::Pfs => "pfs",
        };
        write!(f, "producers={producers} consumers={consumers} keep={keep} wait=")?;
        match wait.subsec_millis() {
            0 => write!(f, "{}s", wait.as_secs()),
            _ => write!(f, "{}ms", wait.as_millis()),
        }
    }
}
