//! Small programs: a few processes on a few nodes that share one file. As data, and as text that
//! can be written down in a test or pasted from a failure.

use crate::model::SyncEvent;
use ebb_types::ByteRange;
use std::fmt;
use std::str::FromStr;

/// One more than the largest offset that a program may use.
pub const FILE_MAX: u64 = 6;

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// A call that is only a sync event: open, stat, fsync, close, commit.
    Sync(SyncEvent),
    /// Takes the one exclusive lock.
    Lock,
    /// Gives it up.
    Unlock,
    /// Reads.
    Read(ByteRange),
    /// Writes bytes that nobody else writes.
    Write(ByteRange),
    /// Writes zeros.
    Zero(ByteRange),
    /// Syncs; then the daemon of the node dies, and another one takes its cache over. What was open
    /// must be opened again.
    Restart,
    /// Sets the size.
    Truncate(u64),
    /// Sends a message, once.
    Send(u8),
    /// Waits for that message.
    Recv(u8),
}

/// A process: where it runs and what it does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Process {
    /// Its node.
    pub node: usize,
    /// Its operations.
    pub ops: Vec<Op>,
}

/// A program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// Bytes that the backing has at the start.
    pub base: u64,
    /// The processes.
    pub processes: Vec<Process>,
}

impl Program {
    /// A process per node.
    #[must_use]
    pub fn of(base: u64, processes: Vec<Vec<Op>>) -> Program {
        let place = |(node, ops)| Process { node, ops };
        Program { base, processes: processes.into_iter().enumerate().map(place).collect() }
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.processes.iter().map(|p| p.node + 1).max().unwrap_or(0)
    }

    /// True when the order of its runs decides what happens before what.
    #[must_use]
    pub fn has_locks(&self) -> bool {
        self.processes.iter().flat_map(|p| &p.ops).any(|o| *o == Op::Lock)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Sync(event) => write!(f, "{}", event.name()),
            Op::Lock => write!(f, "lock"),
            Op::Unlock => write!(f, "unlock"),
            Op::Read(r) => write!(f, "read {r}"),
            Op::Write(r) => write!(f, "write {r}"),
            Op::Zero(r) => write!(f, "zero {r}"),
            Op::Restart => write!(f, "restart"),
            Op::Truncate(len) => write!(f, "truncate {len}"),
            Op::Send(m) => write!(f, "send {m}"),
            Op::Recv(m) => write!(f, "recv {m}"),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "base {}", self.base)?;
        for p in &self.processes {
            let ops: Vec<String> = p.ops.iter().map(Op::to_string).collect();
            write!(f, " | {}: {}", p.node, ops.join(", "))?;
        }
        Ok(())
    }
}

/// A program's text that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not part of a program (like: base 2 | 0: write 0..1, close, send 0 | 1: recv 0, open, read 0..2)"
)]
pub struct BadProgram(String);

impl FromStr for Op {
    type Err = BadProgram;

    fn from_str(text: &str) -> Result<Op, BadProgram> {
        let bad = || BadProgram(text.to_owned());
        let (word, rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        let number = || rest.trim().parse::<u8>().map_err(|_| bad());
        let range = || {
            let (a, b) = rest.trim().split_once("..").ok_or_else(bad)?;
            let (a, b) = (a.parse().map_err(|_| bad())?, b.parse().map_err(|_| bad())?);
            if a < b && b <= FILE_MAX { Ok(ByteRange::new(a, b)) } else { Err(bad()) }
        };
        Ok(match word {
            "read" => Op::Read(range()?),
            "write" => Op::Write(range()?),
            "zero" => Op::Zero(range()?),
            "truncate" => Op::Truncate(u64::from(number()?).min(FILE_MAX)),
            "send" => Op::Send(number()?),
            "recv" => Op::Recv(number()?),
            "lock" => Op::Lock,
            "restart" => Op::Restart,
            "unlock" => Op::Unlock,
            word => Op::Sync(SyncEvent::from_name(word).ok_or_else(bad)?),
        })
    }
}

impl FromStr for Program {
    type Err = BadProgram;

    fn from_str(text: &str) -> Result<Program, BadProgram> {
        let bad = |t: &str| BadProgram(t.to_owned());
        let mut parts = text.split('|');
        let head = parts.next().unwrap_or("").trim();
        let base = head.strip_prefix("base ").and_then(|n| n.trim().parse().ok());
        let base = base.filter(|b| *b <= FILE_MAX).ok_or_else(|| bad(head))?;
        let mut processes = Vec::new();
        for part in parts {
            let (node, ops) = part.split_once(':').ok_or_else(|| bad(part))?;
            let node = node.trim().parse().ok().filter(|n| *n < 8).ok_or_else(|| bad(part))?;
            let ops = ops.split(',').map(str::parse).collect::<Result<_, _>>()?;
            processes.push(Process { node, ops });
        }
        Ok(Program { base, processes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_text() {
        let text = "base 2 | 0: write 0..1, fsync, lock, unlock, send 3 | 1: recv 3, open, zero 1..2, truncate 1, read 0..2";
        let program: Program = text.parse().unwrap();
        assert_eq!(program.to_string(), text);
        assert_eq!((program.nodes(), program.has_locks()), (2, true));
        for bad in ["", "base 9", "base 1 | x: open", "base 1 | 0: read 1..1", "base 1 | 0: jump"] {
            assert!(bad.parse::<Program>().is_err(), "{bad}");
        }
    }
}
