//! One term: which service has it, and where that is.

use rustix::io::Errno;
use rustix::process::getpid;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::time::Duration;

/// Longest encoded term.
pub const BYTES_MAX: usize = 4096;
/// Longest `HOST:PORT`.
const ADDRESS_MAX: usize = 300;
const LEASE_MAX: Duration = Duration::from_secs(3600);
const FORMAT: u32 = 1;

/// One term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// Its number; the largest one counts.
    pub number: u64,
    /// Where the service is: HOST:PORT.
    pub address: String,
    /// It answers for at most so long after its last look at the terms.
    pub lease: Duration,
    /// The process that has it.
    pub holder: Holder,
}

/// A process, so that another one on the same machine can tell that it is dead.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Which boot of which machine.
    boot: String,
    /// In which namespace its number means something.
    pid_ns: String,
    pid: i32,
    /// In ticks after the boot.
    started: u64,
}

impl Holder {
    /// This process.
    #[must_use]
    pub fn me() -> Holder {
        let pid = getpid().as_raw_nonzero().get();
        Holder {
            boot: ebb_journal::boot_id(),
            pid_ns: pid_namespace(),
            pid,
            started: started(pid).ok().flatten().unwrap_or(0),
        }
    }

    /// True when it is dead for certain. Of a process on another machine, or in another container, this one
    /// cannot know.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        let here = Holder { pid: self.pid, started: self.started, ..Holder::me() };
        let is_known = !self.boot.is_empty() && !self.pid_ns.is_empty() && self.started != 0;
        is_known && *self == here && started(self.pid).is_ok_and(|s| s != Some(self.started))
    }
}

fn pid_namespace() -> String {
    let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    link.to_string_lossy().into_owned()
}

/// When a process began; none: no thread of a process of that number runs any more. An error says nothing.
fn started(pid: i32) -> io::Result<Option<u64>> {
    let Some(tasks) = unless_gone(std::fs::read_dir(format!("/proc/{pid}/task")))? else {
        return Ok(None);
    };
    // Of a process that was killed a thread can still be in a system call.
    let mut runs = false;
    for task in tasks {
        let Some(task) = unless_gone(task)? else { continue };
        runs |= stat(&task.path())?.is_some_and(|(state, _)| !"ZX".contains(state));
    }
    match runs {
        true => Ok(stat(format!("/proc/{pid}").as_ref())?.map(|(_, started)| started)),
        false => Ok(None),
    }
}

/// The state of a thread, and when it began.
fn stat(dir: &Path) -> io::Result<Option<(char, u64)>> {
    let Some(stat) = unless_gone(std::fs::read_to_string(dir.join("stat")))? else {
        return Ok(None);
    };
    let parse = || {
        // Its name, in brackets, may have blanks.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_whitespace();
        let state = fields.next()?.chars().next()?;
        Some((state, fields.nth(18)?.parse().ok()?))
    };
    parse().map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Ok(None),
        Err(e) => Err(e),
    }
}

#[derive(Serialize, Deserialize)]
struct Stored {
    format: u32,
    number: u64,
    address: String,
    lease_ms: u64,
    holder: Holder,
}

impl Term {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let stored = Stored {
            format: FORMAT,
            number: self.number,
            address: self.address.clone(),
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            holder: self.holder.clone(),
        };
        // A structure of numbers and strings always is.
        let mut bytes = serde_json::to_vec(&stored).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// What bytes say, or why they say nothing.
    pub fn decode(bytes: &[u8]) -> Result<Term, String> {
        if bytes.len() > BYTES_MAX {
            return Err("it is too long".to_owned());
        }
        let stored: Stored = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if stored.format != FORMAT {
            return Err(format!("format {}, not {FORMAT}: another version of Ebb", stored.format));
        }
        let lease = Duration::from_millis(stored.lease_ms);
        if !(Duration::from_millis(1)..=LEASE_MAX).contains(&lease) {
            return Err(format!("a lease of {} ms", stored.lease_ms));
        }
        if !is_address(&stored.address) {
            return Err("its address is not HOST:PORT".to_owned());
        }
        Ok(Term { number: stored.number, address: stored.address, lease, holder: stored.holder })
    }
}

/// True for HOST:PORT of characters that an address can have.
fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let fits = |c: char| c.is_ascii_alphanumeric() || ".-_:[]%".contains(c);
    let port = port.parse::<u16>().is_ok_and(|port| port != 0);
    port && !host.is_empty() && text.len() <= ADDRESS_MAX && host.chars().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn term() -> Term {
        Term {
            number: 7,
            address: "node1.cluster:7400".to_owned(),
            lease: Duration::from_secs(10),
            holder: Holder::me(),
        }
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        assert_eq!(Term::decode(&term().encode()), Ok(term()));
        for address in ["[::1]:7400", "10.0.0.1:1", "[fe80::1%eth0]:65535"] {
            let there = Term { address: address.to_owned(), ..term() };
            assert_eq!(Term::decode(&there.encode()), Ok(there));
        }
    }

    #[test]
    fn what_cannot_be_a_term_is_refused() {
        for address in ["", ":1", "h", "h:", "h:0", "h:70000", "h/x:1", "h x:1", "h\n:1", "ü:1"] {
            let there = Term { address: address.to_owned(), ..term() };
            assert!(Term::decode(&there.encode()).is_err(), "{address:?}");
        }
        let long = Term { address: format!("{}:1", "h".repeat(400)), ..term() };
        assert!(Term::decode(&long.encode()).is_err());
        for lease in [Duration::ZERO, Duration::from_secs(3601), Duration::MAX] {
            assert!(Term::decode(&Term { lease, ..term() }.encode()).is_err(), "{lease:?}");
        }
        let newer = String::from_utf8(term().encode()).expect("it is text");
        assert!(Term::decode(newer.replace("\"format\":1", "\"format\":2").as_bytes()).is_err());
        assert!(Term::decode(&vec![b' '; BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn who_runs_is_not_dead_and_who_has_ended_is() {
        let me = Holder::me();
        assert!(!me.is_dead());
        assert!(!Holder { boot: "another".to_owned(), pid: i32::MAX, ..me.clone() }.is_dead());
        assert!(!Holder { pid_ns: "another".to_owned(), pid: i32::MAX, ..me.clone() }.is_dead());
        assert!(
            Holder { started: me.started + 1, ..me.clone() }.is_dead(),
            "the number is used again"
        );
        assert!(!Holder { started: 0, ..me.clone() }.is_dead(), "it could not see itself");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id() as i32;
        let theirs =
            Holder { pid, started: started(pid).expect("it is seen").expect("it runs"), ..me };
        assert!(!theirs.is_dead());
        child.kill().expect("kill");
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while !theirs.is_dead() {
            assert!(std::time::Instant::now() < end, "not dead, though nobody has waited for it");
        }
        child.wait().expect("wait");
        assert!(theirs.is_dead());
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_terms_or_errors(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            at in 0..120_usize,
        ) {
            let mut broken = term().encode();
            let end = (at + bytes.len().min(8)).min(broken.len());
            let at = at.min(end);
            broken.splice(at..end, bytes.iter().take(8).copied());
            for bytes in [bytes, broken] {
                if let Ok(term) = Term::decode(&bytes) {
                    prop_assert!(is_address(&term.address) && term.lease <= LEASE_MAX);
                    prop_assert_eq!(Term::decode(&term.encode()), Ok(term));
                }
            }
        }
    }
}
