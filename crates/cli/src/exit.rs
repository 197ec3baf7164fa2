//! How a command ends: its exit status and the one line that says why. The numbers are part of
//! the command line's contract; scripts branch on them.

use std::fmt;

/// Exit status of a command that did not end with everything done and durable (0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Something failed.
    Failed = 1,
    /// The command line, the environment or the config file is wrong.
    Usage = 2,
    /// Something is still not on the backing.
    Incomplete = 3,
    /// Time ran out.
    TimedOut = 4,
    /// The metadata service or a peer cannot be reached.
    Unreachable = 5,
}

/// Why a command failed: names the path, key or host to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Exit status.
    pub status: u8,
    /// Text for the user; without the program's name and without a final newline.
    pub text: String,
}

impl Failure {
    /// A failure with this status.
    pub fn new(code: Code, text: impl Into<String>) -> Failure {
        Failure { status: code as u8, text: text.into() }
    }

    /// Something failed: exit status 1.
    pub fn failed(text: impl Into<String>) -> Failure {
        Failure::new(Code::Failed, text)
    }

    /// Wrong usage or configuration: exit status 2.
    pub fn usage(text: impl Into<String>) -> Failure {
        Failure::new(Code::Usage, text)
    }

    /// A failure with a status that another process chose; what no status can be becomes 1.
    pub fn with_status(status: i32, text: impl Into<String>) -> Failure {
        let status = u8::try_from(status).ok().filter(|s| *s != 0).unwrap_or(Code::Failed as u8);
        Failure { status, text: text.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}

/// Says what was being done when an error came up.
pub trait Context<T> {
    /// `what: error`, exit status 1.
    fn or_failed(self, what: impl fmt::Display) -> Result<T, Failure>;
    /// `what: error`, exit status 2.
    fn or_usage(self, what: impl fmt::Display) -> Result<T, Failure>;
}

impl<T, E: fmt::Display> Context<T> for Result<T, E> {
    fn or_failed(self, what: impl fmt::Display) -> Result<T, Failure> {
        self.map_err(|e| Failure::failed(format!("{what}: {e}")))
    }

    fn or_usage(self, what: impl fmt::Display) -> Result<T, Failure> {
        self.map_err(|e| Failure::usage(format!("{what}: {e}")))
    }
}
