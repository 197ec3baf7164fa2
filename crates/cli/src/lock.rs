//! The right to use a cache directory: one process has it at a time, and says in the file of the
//! lock what it does. Who is refused is told that, and what to do about it.

use crate::exit::{Context, Failure};
use crate::mounts;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// In each cache.
pub const LOCK: &str = "lock";

/// What is in it begins like this.
const HOLDER: &str = "process ";
const HOLDER_BYTES_MAX: usize = 4096;

/// What the holder does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Use {
    /// Its mount comes up, serves, or has just gone.
    Mount(PathBuf),
    /// Its mount is gone, and the metadata service in it stays for other nodes.
    Service {
        /// Where it was mounted.
        was: PathBuf,
        /// HOST:PORT of the service.
        address: String,
        /// The other nodes.
        nodes: String,
    },
    /// A command that works on the cache.
    Command(&'static str),
}

const MOUNT: &str = "the mount at ";
const SERVICE: &str = "the metadata service ";

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Use::Mount(point) => write!(f, "{MOUNT}{}", point.display()),
            Use::Service { was, address, nodes } => {
                let was = was.display();
                write!(
                    f,
                    "{SERVICE}{address} of the job, which stays for {nodes}; the mount at {was} is \
                     gone"
                )
            }
            Use::Command(name) => f.write_str(name),
        }
    }
}

/// Taken; ends with the process, however it ends.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the directory; refuses when another process has it.
    pub fn take(dir: &Path, purpose: &Use) -> Result<Lock, Failure> {
        let path = dir.join(LOCK);
        let what = format!("{}", path.display());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .or_usage(&what)?;
        // Before anything waits or is written: it may be a file of somebody else's.
        let holder = said(&file).or_usage(&what)?;
        if !holder.is_empty() && !holder.starts_with(HOLDER) {
            return Err(Failure::usage(format!("{what}: not a lock of Ebb; name another cache")));
        }
        match ebb_journal::take_lock(&file) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                // It may do something else by now.
                let holder = said(&file).or_usage(&what)?;
                return Err(refusal(dir, &holder));
            }
            Err(e) => return Err(e).or_failed(&what),
        }
        let lock = Lock { file };
        lock.say(purpose).or_failed(&what)?;
        Ok(lock)
    }

    /// Says what is done from now on.
    pub fn say(&self, purpose: &Use) -> io::Result<()> {
        let text = format!("{HOLDER}{} ({purpose})\n", std::process::id());
        self.file.write_all_at(text.as_bytes(), 0)?;
        self.file.set_len(text.len() as u64)
    }
}

/// The first line of the file of a lock: what was longer before is not cut at the same moment. After a power
/// cut that may be zeros.
fn said(file: &File) -> io::Result<String> {
    let mut text = vec![0; HOLDER_BYTES_MAX];
    let n = file.read_at(&mut text, 0)?;
    let text = String::from_utf8_lossy(&text[..n]);
    let line = text.lines().next().unwrap_or_default();
    Ok(line.trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned())
}

fn refusal(dir: &Path, holder: &str) -> Failure {
    let shown = dir.display();
    let holder = if holder.is_empty() { "another process" } else { holder };
    let purpose = holder.split_once(" (").and_then(|(_, rest)| rest.strip_suffix(')'));
    let purpose = purpose.unwrap_or_default();
    let advice = if let Some(point) = purpose.strip_prefix(MOUNT) {
        of_mount(Path::new(point), dir)
    } else if let Some(service) = purpose.strip_prefix(SERVICE) {
        let address = service.split(' ').next().unwrap_or_default();
        format!(
            "it ends when these have left (`ebb umount` there; `ebb status {address}` shows them). \
             To be a node of that job again before: --meta {address} and another --cache"
        )
    } else {
        "wait for its end".to_owned()
    };
    Failure::usage(format!("{shown} is in use by {holder}: {advice}"))
}

fn of_mount(point: &Path, dir: &Path) -> String {
    let shown = point.display();
    if matches!(mounts::at(point), Ok(Some(m)) if m.is_ebb()) {
        return format!("`ebb status {shown}` shows what it does, `ebb umount {shown}` ends it");
    }
    let log = dir.join("ebb.log");
    format!(
        "nothing is mounted there yet, or any more: it is starting, or brings what it has to the \
         backing ({} tells); wait for its end",
        log.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_at_a_time_and_the_other_hears_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(LOCK);
        let refused = || Lock::take(dir.path(), &Use::Mount("/n".into())).unwrap_err();
        let first = Lock::take(dir.path(), &Use::Mount("/no such place (1)".into())).unwrap();
        let pid = std::process::id();
        let e = refused();
        assert!(
            e.status == 2 && e.text.contains(&format!("process {pid} (the mount at /no")),
            "{e}"
        );
        assert!(e.text.contains("any more") && e.text.contains("ebb.log"), "{e}");
        let service = Use::Service {
            was: "/m".into(),
            address: "h:7".into(),
            nodes: "a very long list of nodes, so that the next text is shorter".into(),
        };
        first.say(&service).unwrap();
        let e = refused();
        assert!(
            e.text.contains("stays for a very long") && e.text.contains("--meta h:7 and"),
            "{e}"
        );
        first.say(&Use::Command("ebb recover")).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text, format!("process {pid} (ebb recover)\n"), "nothing of the longer one");
        std::fs::write(&file, text + "of the longer one, not cut yet)\n").unwrap();
        let e = refused();
        assert!(e.text.ends_with("(ebb recover): wait for its end"), "{e}");
        drop(first);
        Lock::take(dir.path(), &Use::Mount("/n".into())).unwrap();
    }

    #[test]
    fn a_lock_that_lost_its_text_with_the_power_is_one() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(LOCK), [0; 40]).unwrap();
        let lock = Lock::take(dir.path(), &Use::Command("test")).unwrap();
        assert!(said(&lock.file).unwrap().ends_with("(test)"));
    }

    #[test]
    fn a_file_of_somebody_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let lock = dir.path().join(LOCK);
        std::fs::write(&lock, "mine\n").unwrap();
        assert_eq!(Lock::take(dir.path(), &Use::Command("test")).unwrap_err().status, 2);
        assert_eq!(std::fs::read(&lock).unwrap(), b"mine\n");
    }
}
