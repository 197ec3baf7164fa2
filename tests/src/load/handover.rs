//! A block that all programs change, each its own number in it, by reading all of it and writing all of it
//! back under a lock of either kind: no node may bring back what another one had before.

use super::Work;
use super::book::COMMON;
use super::counter::lock_record;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Unaligned, all in one page.
const AT: u64 = 7;

/// The two kinds of locks do not know of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `fcntl`.
    Record,
    /// `flock`.
    Whole,
}

/// What one program knows of the block of one kind.
#[derive(Debug)]
struct Known {
    /// The numbers as they were seen last, under the lock.
    seen: Vec<u64>,
    /// An own one that may have been written.
    tried: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Handover {
    who: usize,
    of: [Known; 2],
    /// A node that is silent for too long loses its locks, and what it wrote under one comes late.
    forgives: bool,
}

fn flock(file: &File, how: libc::c_int) -> io::Result<()> {
    // SAFETY: an open descriptor.
    match unsafe { libc::flock(file.as_raw_fd(), how) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Handover {
    pub fn new(who: u64, of: u64, forgives: bool) -> Handover {
        let new = || Known { seen: vec![0; of as usize], tried: None };
        Handover { who: who as usize, of: [new(), new()], forgives }
    }

    /// Takes the lock, changes the block and gives it back. Nothing where the block is at a node that does
    /// not answer just now.
    pub fn step(&mut self, root: &Path, kind: Kind, work: &mut Work) -> io::Result<()> {
        let name = if kind == Kind::Record { "slots-record" } else { "slots-whole" };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(root.join(COMMON).join(name))?;
        let len = 8 * (self.of[0].seen.len() as u64 + 1);
        match kind {
            Kind::Record => lock_record(&file, libc::F_WRLCK, AT, len)?,
            Kind::Whole => flock(&file, libc::LOCK_EX)?,
        }
        let mut block = match read(&file, len as usize) {
            Err(e) if e.raw_os_error() == Some(libc::EIO) => return Ok(()),
            block => block?,
        };
        self.judge(kind, &block[1..], work);
        let known = &mut self.of[kind as usize];
        let handed = block[0] != 0 && block[0] != self.who as u64 + 1;
        block[0] = self.who as u64 + 1;
        block[1 + self.who] += 1;
        known.seen.copy_from_slice(&block[1..]);
        // The last one that is certain is the one before.
        known.tried = Some(known.seen[self.who]);
        known.seen[self.who] -= 1;
        let bytes: Vec<u8> = block.iter().flat_map(|n| n.to_le_bytes()).collect();
        file.write_all_at(&bytes, AT)?;
        match kind {
            Kind::Record => lock_record(&file, libc::F_UNLCK, AT, len)?,
            Kind::Whole => flock(&file, libc::LOCK_UN)?,
        }
        crate::model::close(file)?;
        known.seen[self.who] += 1;
        known.tried = None;
        work.handed += u64::from(handed);
        Ok(())
    }

    /// No number goes back, and nobody else has changed the own one.
    fn judge(&mut self, kind: Kind, found: &[u64], work: &mut Work) {
        let (who, known) = (self.who, &self.of[kind as usize]);
        let mine = [Some(known.seen[who]), known.tried].contains(&Some(found[who]));
        let others = (0..found.len()).filter(|i| *i != who).all(|i| found[i] >= known.seen[i]);
        if mine && others {
            return;
        }
        let text = format!("{kind:?}: {found:?} under the lock of {who}, which knows {known:?}");
        assert!(self.forgives, "{text}");
        work.went_back += 1;
    }
}

/// The holder before, and the numbers; what was never written counts as 0.
fn read(file: &File, len: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; len];
    let mut have = 0;
    while have < len {
        match file.read_at(&mut bytes[have..], AT + have as u64)? {
            0 => break,
            n => have += n,
        }
    }
    let number = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes"));
    Ok(bytes.chunks(8).map(number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn a_number_that_goes_back_is_found() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join(COMMON)).expect("mkdir");
        let path = dir.path().join(COMMON).join("slots-whole");
        let (mut a, mut b) = (Handover::new(0, 2, false), Handover::new(1, 2, false));
        let mut work = Work::default();
        for _ in 0..2 {
            for kind in [Kind::Record, Kind::Whole] {
                a.step(dir.path(), kind, &mut work).expect("a");
                b.step(dir.path(), kind, &mut work).expect("b");
            }
        }
        assert_eq!(work.handed, 6);
        let before = std::fs::read(&path).expect("read");
        a.step(dir.path(), Kind::Whole, &mut work).expect("a");
        b.step(dir.path(), Kind::Whole, &mut work).expect("b");
        std::fs::write(&path, before).expect("write");
        for program in [&mut a, &mut b] {
            let step = || program.step(dir.path(), Kind::Whole, &mut Work::default());
            assert!(catch_unwind(AssertUnwindSafe(step)).is_err(), "an old number came back");
        }
        a.forgives = true;
        let mut work = Work::default();
        a.step(dir.path(), Kind::Whole, &mut work).expect("a");
        assert_eq!(work.went_back, 1);
    }
}
