//! Names that are not there yet and that somebody opens to read, in a directory whose files are coupled.
//!
//! While the kernel looks a name up it holds a lock of the directory, without which nobody on this node could
//! make the file. So who opens such a name is told of an inode that stands for it, whose open waits. When the
//! file is there the open fails with ESTALE: the kernel then looks the name up again, once, and finds it.
//! Everybody else is told that the name is not there.

use ebb_locks::Mutex;
use ebb_types::{Attr, FileKind, Ino, Name, Time};
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Their numbers, below those of `.ebb`; no file has such a one.
const LAST: u64 = u64::MAX - 16;
const FIRST: u64 = LAST - (1 << 32);

/// What a request of a thread says in `/proc` is looked at so often: it may not have begun to sleep.
const LOOKS: u32 = 20;
const PAUSE: Duration = Duration::from_micros(500);

/// So many threads are looked at at a time, and each so long; who is not is told that the name is not there.
const LOOKS_AT_ONCE: usize = 8;
const LOOK_WITHIN: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct Entry {
    at: (Ino, Name),
    wait: Duration,
    /// So often the kernel was told of it and has not forgotten it.
    known: u64,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<Ino, Entry>,
    numbers: HashMap<(Ino, Name), Ino>,
    last: u64,
    /// The same for the daemon after this one: an open that waits comes to it again.
    notes: Option<PathBuf>,
}

impl Inner {
    fn insert(&mut self, ino: Ino, at: (Ino, Name), wait: Duration) {
        self.numbers.insert(at.clone(), ino);
        self.entries.insert(ino, Entry { at, wait, known: 1 });
    }
}

fn append(notes: &Path, line: &str) -> io::Result<()> {
    let file = OpenOptions::new().create(true).mode(0o600).append(true).open(notes);
    file?.write_all(line.as_bytes())
}

fn remove(notes: &Path) -> io::Result<()> {
    match std::fs::remove_file(notes) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// A line of the notes.
fn line_of(ino: Ino, (parent, name): &(Ino, Name), wait: Duration) -> String {
    let hex: String = name.as_bytes().iter().map(|b| format!("{b:02x}")).collect();
    format!("{} {} {} {hex}\n", ino.0, parent.0, wait.as_millis())
}

fn told_by(line: &str) -> Option<(Ino, (Ino, Name), Duration)> {
    let mut words = line.split(' ');
    let mut number = || words.next()?.parse::<u64>().ok();
    let (ino, parent, wait) = (Ino(number()?), Ino(number()?), number()?);
    let hex = words.next()?;
    let byte = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
    let name: Option<Vec<u8>> = (0..hex.len()).step_by(2).map(byte).collect();
    let name = Name::new(&name?).ok()?;
    is_awaited(ino).then_some((ino, (parent, name), Duration::from_millis(wait)))
}

/// The names that are awaited here.
#[derive(Debug, Default)]
pub struct AwaitedNames {
    inner: Mutex<Inner>,
}

/// True for an inode that stands for a name.
#[must_use]
pub fn is_awaited(ino: Ino) -> bool {
    (FIRST..=LAST).contains(&ino.0)
}

/// What `stat` would tell of it. Whether the file itself may be read is seen when it is there.
#[must_use]
pub fn attr(ino: Ino) -> Attr {
    let (at, root) = (Time::now(), 0);
    Attr {
        ino,
        kind: FileKind::Regular,
        perm: 0o444,
        nlink: 1,
        uid: root,
        gid: root,
        rdev: 0,
        size: 0,
        atime: at,
        mtime: at,
        ctime: at,
    }
}

impl AwaitedNames {
    /// The kernel is told of the inode that stands for this name.
    pub fn tell(&self, parent: Ino, name: Name, wait: Duration) -> Ino {
        let mut inner = self.inner.lock();
        let at = (parent, name);
        if let Some(ino) = inner.numbers.get(&at).copied() {
            if let Some(entry) = inner.entries.get_mut(&ino) {
                entry.known += 1;
            }
            return ino;
        }
        let ino = loop {
            inner.last = (inner.last + 1) % (LAST - FIRST);
            let ino = Ino(FIRST + inner.last);
            if !inner.entries.contains_key(&ino) {
                break ino;
            }
        };
        let line = line_of(ino, &at, wait);
        if let Some(Err(e)) = inner.notes.as_deref().map(|notes| append(notes, &line)) {
            tracing::warn!(error = %e, "who waits for a name fails should this daemon die");
        }
        inner.insert(ino, at, wait);
        ino
    }

    /// A daemon begins, after which another may go on with what the kernel knows: it is noted in this file, while
    /// there is something. `inherits`: and so it was by the one before.
    pub fn begin(&self, notes: &Path, inherits: bool) -> io::Result<()> {
        let mut inner = self.inner.lock();
        let text = match std::fs::read_to_string(notes) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            read => read?,
        };
        match inherits {
            true => {
                for (ino, at, wait) in text.lines().filter_map(told_by) {
                    inner.last = inner.last.max(ino.0 - FIRST);
                    inner.insert(ino, at, wait);
                }
            }
            false => remove(notes)?,
        }
        inner.notes = Some(notes.to_owned());
        Ok(())
    }

    /// The mount is gone: nobody waits. Nothing of it stays in the cache.
    pub fn end(&self) {
        let inner = self.inner.lock();
        if let Some(Err(e)) = inner.notes.as_deref().map(remove) {
            tracing::warn!(error = %e, "notes of awaited names stay in the cache");
        }
    }

    /// The name that it stands for, and how long who opens it waits.
    pub fn name(&self, ino: Ino) -> Option<(Ino, Name, Duration)> {
        let inner = self.inner.lock();
        inner.entries.get(&ino).map(|e| (e.at.0, e.at.1.clone(), e.wait))
    }

    /// The kernel forgets it so often.
    pub fn forget(&self, ino: Ino, times: u64) {
        let mut inner = self.inner.lock();
        let Some(entry) = inner.entries.get_mut(&ino) else { return };
        entry.known = entry.known.saturating_sub(times);
        if entry.known == 0
            && let Some(entry) = inner.entries.remove(&ino)
        {
            inner.numbers.remove(&entry.at);
        }
        if inner.entries.is_empty()
            && let Some(Err(e)) = inner.notes.as_deref().map(remove)
        {
            tracing::debug!(error = %e, "old notes of awaited names stay");
        }
    }
}

/// True when that thread is in a call that opens a file to read it, and does not make it. False where that
/// cannot be known: `/proc/PID/syscall` may be read by root, and by the same user where ptrace is allowed.
pub async fn opens_to_read(thread: u32) -> bool {
    // The kernel lets nobody look at a process that executes another program, and that may take for ever. The
    // permit goes with the look, not with who waits for it.
    static LOOKING: Semaphore = Semaphore::const_new(LOOKS_AT_ONCE);
    let looked = async {
        let permit = LOOKING.acquire().await.ok()?;
        let look = move || {
            let _permit = permit;
            looks_like_reading(thread)
        };
        tokio::task::spawn_blocking(look).await.ok()
    };
    tokio::time::timeout(LOOK_WITHIN, looked).await.ok().flatten().unwrap_or(false)
}

fn looks_like_reading(thread: u32) -> bool {
    for _ in 0..LOOKS {
        match std::fs::read_to_string(format!("/proc/{thread}/syscall")) {
            Ok(text) if text.starts_with("running") => std::thread::sleep(PAUSE),
            Ok(text) => return flags_of(&text).is_some_and(only_reads),
            Err(_) => return false,
        }
    }
    false
}

fn only_reads(flags: u64) -> bool {
    let has = |flag: i32| flags & u64::from(flag.unsigned_abs()) != 0;
    let writes = flags & libc::O_ACCMODE as u64 != libc::O_RDONLY as u64;
    let other = has(libc::O_CREAT) || has(libc::O_TRUNC) || has(libc::O_PATH);
    // O_NOATIME is for who owns the file, which nobody does yet.
    let special = has(libc::O_DIRECTORY) || has(libc::O_NONBLOCK) || has(libc::O_NOATIME);
    !writes && !other && !special
}

/// The flags of the open that a line of `/proc/PID/syscall` shows.
fn flags_of(text: &str) -> Option<u64> {
    let mut words = text.split_whitespace();
    let number: i64 = words.next()?.parse().ok()?;
    let mut arguments = words.map(|w| u64::from_str_radix(w.trim_start_matches("0x"), 16).ok());
    #[cfg(target_arch = "x86_64")]
    if number == libc::SYS_open {
        return arguments.nth(1)?;
    }
    match number {
        libc::SYS_openat => arguments.nth(2)?,
        // What openat2 wants is in the program's memory, which is not looked at: it may be such that a look
        // never ends.
        _ => None,
    }
}

/// True when that thread is ending because a signal killed its process.
///
/// Called while the thread waits for the answer to its close. It may be executing another program, which closes
/// some of its files: until that is answered nobody can read `stat`, and who tried would wait for himself.
/// `status` can be read always, and tells of memory but for threads that are ending.
pub fn is_killed(thread: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
    if !status.is_ok_and(|text| has_no_memory(&text)) {
        return false;
    }
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat"));
    stat.is_ok_and(|text| shows_kill(&text).unwrap_or(false))
}

fn has_no_memory(status: &str) -> bool {
    !status.lines().any(|line| line.starts_with("VmSize:"))
}

/// The kernel's own flag of a thread that has begun to end.
const PF_EXITING: u64 = 0x4;

/// In `/proc/PID/stat`, counted after the name, which may have anything in it.
const FLAGS: usize = 6;
const EXIT_CODE: usize = 49;

fn shows_kill(text: &str) -> Option<bool> {
    let mut words = text.rsplit_once(')')?.1.split_whitespace();
    let flags: u64 = words.nth(FLAGS)?.parse().ok()?;
    let code: u64 = words.nth(EXIT_CODE - FLAGS - 1)?.parse().ok()?;
    // The low bits are the signal's number.
    Some(flags & PF_EXITING != 0 && code & 0x7f != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_number_until_the_kernel_has_forgotten_it() {
        let names = AwaitedNames::default();
        let name = |n: &str| Name::new(n.as_bytes()).expect("a name");
        let wait = Duration::from_secs(1);
        let a = names.tell(Ino(7), name("a"), wait);
        let b = names.tell(Ino(7), name("b"), wait);
        assert_eq!(names.tell(Ino(7), name("a"), wait), a);
        assert!(a != b && is_awaited(a) && is_awaited(b));
        assert!(!is_awaited(Ino(7)) && !is_awaited(Ino(u64::MAX - 1)));
        assert_eq!(names.name(a), Some((Ino(7), name("a"), wait)));
        names.forget(a, 1);
        assert!(names.name(a).is_some());
        names.forget(a, 1);
        assert_eq!(names.name(a), None);
        assert_ne!(names.tell(Ino(7), name("a"), wait), b);
        names.forget(Ino(9), 3);
    }

    #[test]
    fn the_next_daemon_knows_the_names_of_this_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let notes = dir.path().join("awaited");
        let (wait, name) = (Duration::from_millis(1500), Name::new(b"a \xff\n").expect("a name"));
        let first = AwaitedNames::default();
        first.begin(&notes, false).expect("begins");
        assert!(!notes.exists(), "nobody waits");
        let ino = first.tell(Ino(7), name.clone(), wait);
        let next = AwaitedNames::default();
        next.begin(&notes, true).expect("begins");
        assert_eq!(next.name(ino), Some((Ino(7), name.clone(), wait)));
        let other = next.tell(Ino(7), Name::new(b"b").expect("a name"), wait);
        assert_ne!(other, ino);
        let third = AwaitedNames::default();
        third.begin(&notes, true).expect("begins");
        assert!(third.name(ino).is_some() && third.name(other).is_some());
        third.forget(ino, 2);
        third.forget(other, 1);
        assert!(!notes.exists(), "nobody waits any more");
        third.tell(Ino(7), name, wait);
        assert!(notes.exists());
        third.end();
        assert!(!notes.exists(), "there is no mount any more");
        let alone = AwaitedNames::default();
        alone.begin(&notes, false).expect("begins");
        assert_eq!(alone.name(ino), None);
        for line in ["", "1", "1 2 3 61", "18446744073709551599 2 3 6", "18446744073709551599 2 3"]
        {
            assert_eq!(told_by(line), None, "{line}");
        }
    }

    #[test]
    fn the_kernel_says_which_call_a_thread_is_in() {
        let openat = |flags: i32| format!("{} 0xffffff9c 0x7f00 {flags:#x} 0x0", libc::SYS_openat);
        let reads = |text: &str| flags_of(text).is_some_and(only_reads);
        assert!(reads(&openat(libc::O_RDONLY | libc::O_CLOEXEC)));
        for flag in [libc::O_WRONLY, libc::O_RDWR, libc::O_CREAT, libc::O_PATH, libc::O_NONBLOCK] {
            assert!(!reads(&openat(flag)), "{flag:#x}");
        }
        for text in ["", "running", "-1 0x0 0x0", "257", "257 x y z", "4 0x0 0x0 0x0"] {
            assert!(!reads(text), "{text}");
        }
    }

    #[test]
    fn a_thread_that_lives_is_not_killed() {
        let me = std::process::id();
        assert!(!is_killed(me));
        let status = std::fs::read_to_string(format!("/proc/{me}/status")).expect("status");
        assert!(!has_no_memory(&status), "{status}");
        assert!(has_no_memory("Name:\tx\nState:\tS (sleeping)\n"));
        let stat = std::fs::read_to_string(format!("/proc/{me}/stat")).expect("stat");
        assert_eq!(shows_kill(&stat), Some(false), "{stat}");
        // It is exiting, and signal 9 is why.
        let (head, rest) = stat.rsplit_once(')').expect("a name");
        let mut words: Vec<String> = rest.split_whitespace().map(str::to_owned).collect();
        (words[FLAGS], words[EXIT_CODE]) = ("4".to_owned(), "9".to_owned());
        assert_eq!(shows_kill(&format!("{head}) {}", words.join(" "))), Some(true));
        words[EXIT_CODE] = "256".to_owned();
        assert_eq!(shows_kill(&format!("{head}) {}", words.join(" "))), Some(false));
    }
}
