//! Terms as files of a directory: `service-NUMBER`, written whole before they have that name, and never changed;
//! `service-NUMBER.ended` when that service says nothing any more. `service-NUMBER.beat` is a number that a service
//! with a standby counts up as long as it may answer.

use crate::term::{BYTES_MAX, Term};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawMode, fstat, linkat, openat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::fs::File;
use std::io::{self, Read, Write};
use std::num::ParseIntError;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const TERM: &str = "service-";
const ENDED: &str = ".ended";
const BEAT: &str = ".beat";
/// Digits of a beat.
const BEAT_BYTES: usize = 20;
const NEW: &str = ".new-";
/// Files of so many terms before the newest one are kept, for people.
const KEPT: u64 = 8;

/// Why the terms cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    /// The directory, or a file of it.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others could say where the service is.
    #[error(
        "{}: {why} (it must be a directory of this user's or root's, mode 0755 at most, and so must what is in it)",
        path.display()
    )]
    Open {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// What a service would say of itself there is no term.
    #[error(
        "{}: no term can be made of the address '{address}' and a lease of {lease:?} (HOST:PORT, 1ms to 1h, and the \
         number of the last term below the largest one)",
        path.display()
    )]
    Absurd {
        /// The directory.
        path: PathBuf,
        /// The address.
        address: String,
        /// The lease.
        lease: std::time::Duration,
    },
    /// A service's own term.
    #[error("{}: term {number}, which this service has, is not there any more", path.display())]
    Gone {
        /// The directory.
        path: PathBuf,
        /// The term.
        number: u64,
    },
    /// A file that is no term.
    #[error("{} is no service's: {why} (if no service of a job wrote it, remove it)", path.display())]
    Garbage {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

impl CoordinatorError {
    /// There is nothing of that name.
    #[must_use]
    pub fn is_not_there(&self) -> bool {
        matches!(self, CoordinatorError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// A directory of terms.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    dir: OwnedFd,
}

type Res<T> = Result<T, CoordinatorError>;

impl Directory {
    /// Opens it; others must not be able to write to it.
    pub fn open(path: &Path) -> Res<Directory> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| io_error(path, e))?;
        let opened = Directory { path: path.to_owned(), dir };
        check_owner(path, &opened.dir)?;
        Ok(opened)
    }

    /// The same; it is made when it is not there.
    pub fn make(path: &Path) -> Res<Directory> {
        match rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => Directory::open(path),
            Err(e) => Err(io_error(path, e)),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The newest term; none: no service has come yet.
    pub fn newest(&self) -> Res<Option<Term>> {
        match self.numbers()?.into_iter().max() {
            None => Ok(None),
            Some(number) => self.read(number).map(Some),
        }
    }

    /// The terms that there are files of.
    pub fn terms(&self) -> Res<Vec<Term>> {
        let read = |number| match self.read(number) {
            // It was removed since.
            Err(e) if e.is_not_there() => None,
            read => Some(read),
        };
        self.numbers()?.into_iter().filter_map(read).collect()
    }

    /// Takes a term, if no other service has taken that number. What is there afterwards may be newer still.
    pub fn claim(&self, term: &Term) -> Res<bool> {
        let name = term_name(term.number);
        let mut random = [0; 8];
        getrandom::fill(&mut random)
            .map_err(|e| self.failed(NEW, io::Error::other(format!("no randomness: {e}"))))?;
        let new = format!("{NEW}{:016x}", u64::from_le_bytes(random));
        let written = self.write(&new, &term.encode());
        let linked = written.and_then(|()| {
            match linkat(&self.dir, new.as_str(), &self.dir, name.as_str(), AtFlags::empty()) {
                Ok(()) => Ok(true),
                Err(Errno::EXIST) => Ok(false),
                Err(e) => Err(self.failed(&name, e.into())),
            }
        });
        let _ = unlinkat(&self.dir, new.as_str(), AtFlags::empty());
        let synced = rustix::fs::fsync(&self.dir);
        let taken = linked?;
        if let Err(e) = synced {
            if taken {
                // Nobody waits for who does not know that he has it.
                let _ = self.end(term.number);
            }
            return Err(self.failed(&name, e.into()));
        }
        Ok(taken)
    }

    /// The service of that term says nothing any more.
    pub fn end(&self, number: u64) -> Res<()> {
        let name = format!("{}{ENDED}", term_name(number));
        match self.write(&name, b"") {
            Err(CoordinatorError::Io { source, .. })
                if source.kind() == io::ErrorKind::AlreadyExists =>
            {
                Ok(())
            }
            written => written,
        }
    }

    /// True when it has said so.
    pub fn has_ended(&self, number: u64) -> Res<bool> {
        let name = format!("{}{ENDED}", term_name(number));
        match rustix::fs::statat(&self.dir, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => check_stat(&self.path.join(&name), &stat).map(|()| true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(self.failed(&name, e.into())),
        }
    }

    /// Removes the files of terms long before this one.
    pub fn tidy(&self, newest: u64) -> Res<()> {
        for number in self.numbers()?.into_iter().filter(|n| n.saturating_add(KEPT) < newest) {
            for what in [BEAT, ENDED, ""] {
                let name = format!("{}{what}", term_name(number));
                match unlinkat(&self.dir, name.as_str(), AtFlags::empty()) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(e) => return Err(self.failed(&name, e.into())),
                }
            }
        }
        Ok(())
    }

    /// Says that the service of that term lives: another number than the last time.
    pub fn beat(&self, number: u64, beat: u64) -> Res<()> {
        let name = format!("{}{BEAT}", term_name(number));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.dir, name.as_str(), flags, Mode::from_raw_mode(0o644));
        let file = file.map_err(|e| self.failed(&name, e.into()))?;
        let stat = fstat(&file).map_err(|e| self.failed(&name, e.into()))?;
        check_stat(&self.path.join(&name), &stat)?;
        let file = File::from(file);
        let written = file.write_all_at(format!("{beat:020}").as_bytes(), 0);
        written.and_then(|()| file.sync_data()).map_err(|e| self.failed(&name, e))
    }

    /// What it said last, as it stands there: whatever that is, it is another text when the service has beaten again.
    /// None: it never has.
    pub fn last_beat(&self, number: u64) -> Res<Option<String>> {
        let name = format!("{}{BEAT}", term_name(number));
        let path = self.path.join(&name);
        // Opened each time: a network file system shows what is new at an open.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.dir, name.as_str(), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(io_error(&path, e)),
        };
        check_stat(&path, &fstat(&file).map_err(|e| io_error(&path, e))?)?;
        let mut bytes = Vec::new();
        let read = File::from(file).take(BEAT_BYTES as u64).read_to_end(&mut bytes);
        read.map_err(|source| CoordinatorError::Io { path, source })?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn numbers(&self) -> Res<Vec<u64>> {
        let entries = rustix::fs::Dir::read_from(&self.dir);
        let entries = entries.map_err(|e| io_error(&self.path, e))?;
        let mut numbers = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| io_error(&self.path, e))?;
            let name = entry.file_name().to_str().ok().and_then(|n| n.strip_prefix(TERM));
            let digits = name.filter(|n| n.len() == 20 && n.bytes().all(|b| b.is_ascii_digit()));
            let Some(digits) = digits else { continue };
            numbers.push(digits.parse().map_err(|e: ParseIntError| CoordinatorError::Garbage {
                path: self.path.join(format!("{TERM}{digits}")),
                why: e.to_string(),
            })?);
        }
        Ok(numbers)
    }

    fn read(&self, number: u64) -> Res<Term> {
        let name = term_name(number);
        let path = self.path.join(&name);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&self.dir, name.as_str(), flags, Mode::empty());
        let file = file.map_err(|e| io_error(&path, e))?;
        check_stat(&path, &fstat(&file).map_err(|e| io_error(&path, e))?)?;
        let mut bytes = Vec::new();
        let read = File::from(file).take(BYTES_MAX as u64 + 1).read_to_end(&mut bytes);
        read.map_err(|source| CoordinatorError::Io { path: path.clone(), source })?;
        let term = match Term::decode(&bytes) {
            Ok(term) if term.number == number => Ok(term),
            Ok(term) => Err(format!("it says that it is term {}", term.number)),
            Err(why) => Err(why),
        };
        term.map_err(|why| CoordinatorError::Garbage { path, why })
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Res<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o644);
        let file = openat(&self.dir, name, flags, mode).map_err(|e| self.failed(name, e.into()))?;
        let mut file = File::from(file);
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|e| self.failed(name, e))
    }

    fn failed(&self, name: &str, source: io::Error) -> CoordinatorError {
        CoordinatorError::Io { path: self.path.join(name), source }
    }
}

fn term_name(number: u64) -> String {
    format!("{TERM}{number:020}")
}

fn io_error(path: &Path, e: Errno) -> CoordinatorError {
    CoordinatorError::Io { path: path.to_owned(), source: e.into() }
}

fn check_owner(path: &Path, dir: &OwnedFd) -> Res<()> {
    let stat = fstat(dir).map_err(|e| io_error(path, e))?;
    is_ours(path, stat.st_uid, stat.st_mode)
}

fn check_stat(path: &Path, stat: &rustix::fs::Stat) -> Res<()> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(CoordinatorError::Open { path: path.to_owned(), why: "not a file".to_owned() });
    }
    is_ours(path, stat.st_uid, stat.st_mode)
}

fn is_ours(path: &Path, uid: u32, mode: RawMode) -> Res<()> {
    let open = |why: String| Err(CoordinatorError::Open { path: path.to_owned(), why });
    match () {
        () if uid != 0 && uid != geteuid().as_raw() => open(format!("it is user {uid}'s")),
        () if mode & 0o022 != 0 => {
            open(format!("others can write to it (mode {:o})", mode & 0o7777))
        }
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::term::Holder;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Barrier;
    use std::time::Duration;

    fn term(number: u64, address: &str) -> Term {
        let (address, lease) = (address.to_owned(), Duration::from_secs(1));
        Term { number, address, lease, holder: Holder::me() }
    }

    fn made() -> (tempfile::TempDir, Directory) {
        let root = tempfile::tempdir().expect("tempdir");
        let dir = Directory::make(&root.path().join("terms")).expect("a directory");
        (root, dir)
    }

    #[test]
    fn a_number_is_given_once_and_the_newest_counts() {
        let (_root, dir) = made();
        assert_eq!(dir.newest().expect("look"), None);
        assert!(dir.claim(&term(1, "a:1")).expect("claim"));
        assert!(!dir.claim(&term(1, "b:1")).expect("claim"), "it is taken");
        assert_eq!(dir.newest().expect("look"), Some(term(1, "a:1")));
        assert!(dir.claim(&term(3, "c:1")).expect("claim"));
        assert_eq!(dir.newest().expect("look").expect("one").address, "c:1");
        assert!(!dir.has_ended(3).expect("look"));
        dir.end(3).expect("end");
        dir.end(3).expect("again");
        assert!(dir.has_ended(3).expect("look") && !dir.has_ended(1).expect("look"));
        assert_eq!(dir.newest().expect("look").expect("one").number, 3, "also when it has ended");
    }

    #[test]
    fn of_many_who_claim_at_once_one_gets_each_number() {
        let (root, _) = made();
        let path = root.path().join("terms");
        let (count, rounds) = (8, 20);
        let barrier = Barrier::new(count);
        let won: Vec<Vec<u64>> = std::thread::scope(|threads| {
            let claim = |who: usize| {
                let dir = Directory::open(&path).expect("open");
                let mine = term(0, &format!("n{who}:1"));
                (1..=rounds)
                    .filter(|number| {
                        barrier.wait();
                        dir.claim(&Term { number: *number, ..mine.clone() }).expect("claim")
                    })
                    .collect()
            };
            let running: Vec<_> = (0..count).map(|who| threads.spawn(move || claim(who))).collect();
            running.into_iter().map(|t| t.join().expect("no panic")).collect()
        });
        let mut all: Vec<u64> = won.concat();
        all.sort_unstable();
        assert_eq!(all, (1..=rounds).collect::<Vec<_>>());
        let dir = Directory::open(&path).expect("open");
        for (who, numbers) in won.iter().enumerate() {
            for number in numbers {
                assert_eq!(dir.read(*number).expect("read").address, format!("n{who}:1"));
            }
        }
        let names = std::fs::read_dir(&path).expect("list").count();
        assert_eq!(names as u64, rounds, "nothing else is left");
    }

    #[test]
    fn old_terms_go_and_the_last_ones_stay() {
        let (_root, dir) = made();
        for number in 1..=20 {
            assert!(dir.claim(&term(number, "a:1")).expect("claim"));
            dir.end(number).expect("end");
        }
        dir.tidy(20).expect("tidy");
        let mut left = dir.numbers().expect("list");
        left.sort_unstable();
        assert_eq!(left, (12..=20).collect::<Vec<_>>());
        assert!(!dir.has_ended(11).expect("look") && dir.has_ended(12).expect("look"));
    }

    #[test]
    fn what_others_can_write_says_nothing() {
        let (root, dir) = made();
        let path = root.path().join("terms");
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("chmod");
        };
        for open in [0o777, 0o775, 0o1777, 0o757] {
            mode(&path, open);
            let refused = Directory::open(&path);
            assert!(matches!(refused, Err(CoordinatorError::Open { .. })), "{open:o}");
        }
        mode(&path, 0o700);
        assert!(Directory::open(&path).is_ok());
        assert!(dir.claim(&term(1, "a:1")).expect("claim"));
        mode(&path.join(term_name(1)), 0o666);
        assert!(matches!(dir.newest(), Err(CoordinatorError::Open { .. })));
        mode(&path.join(term_name(1)), 0o644);
        assert!(dir.newest().is_ok());
        symlink(path.join(term_name(1)), path.join(term_name(2))).expect("symlink");
        assert!(dir.newest().is_err(), "a link");
        std::fs::remove_file(path.join(term_name(2))).expect("remove");
        rustix::fs::mkfifoat(&dir.dir, term_name(2), Mode::from_raw_mode(0o600)).expect("a pipe");
        assert!(matches!(dir.newest(), Err(CoordinatorError::Open { .. })), "and it does not wait");
        assert!(matches!(
            Directory::open(&path.join(term_name(1))),
            Err(CoordinatorError::Io { .. })
        ));
        if geteuid().is_root() {
            let stranger = Some(rustix::fs::Uid::from_raw(4321));
            rustix::fs::chown(&path, stranger, None).expect("chown");
            assert!(matches!(Directory::open(&path), Err(CoordinatorError::Open { .. })));
        }
    }

    #[test]
    fn a_damaged_term_is_not_passed_over() {
        let (root, dir) = made();
        let path = root.path().join("terms");
        assert!(dir.claim(&term(1, "a:1")).expect("claim"));
        let other = term(1, "b:1").encode();
        for (bytes, why) in [(&b""[..], "EOF"), (b"{}", "format"), (&other, "term 1")] {
            std::fs::write(path.join(term_name(2)), bytes).expect("write");
            let e = dir.newest().expect_err("it is damaged").to_string();
            assert!(e.contains(why) && e.contains(&term_name(2)), "{e}");
        }
        let large = path.join("service-99999999999999999999");
        std::fs::write(&large, "x").expect("write");
        assert!(matches!(dir.newest(), Err(CoordinatorError::Garbage { .. })), "no such number");
        std::fs::remove_file(large).expect("remove");
        for name in ["service-", "service-3", "service-x0000000000000000009", "other", ".new-1"] {
            std::fs::write(path.join(name), "x").expect("write");
        }
        std::fs::remove_file(path.join(term_name(2))).expect("remove");
        assert_eq!(dir.newest().expect("look").expect("one").number, 1, "names of no term");
    }
}
