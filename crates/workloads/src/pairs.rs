//! Producers and consumers: the first half of the nodes writes a file for each step, a part for each process, the
//! second half reads each of them once. On mounts the files are handed on by a coupled directory; on a bare
//! directory by what programs do without one: files are synced, marks say that a part is there, readers look for them.

use crate::content::{stamp, verify};
use crate::crew::{Place, Rank, open_write, remove};
use crate::{Measure, PageBuffer, Told, WorkloadError};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// What takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A producer and a consumer.
#[derive(Clone, Copy, Debug)]
pub struct Pairs {
    /// Files.
    pub steps: usize,
    /// Bytes of an access.
    pub size: usize,
    /// Accesses of a producer to each file.
    pub accesses: usize,
}

/// Who takes part.
struct Sides<'a> {
    producers: usize,
    consumers: usize,
    round: u64,
    /// How many have read each file; none where they are coupled.
    read: Option<&'a [AtomicUsize]>,
}

impl Pairs {
    /// Runs it once on mounts of an even number of nodes.
    ///
    /// # Errors
    /// When the directory cannot be coupled, or a call fails, or bytes are wrong.
    pub fn run(&self, place: &Place, round: u64) -> Result<Vec<Measure>, WorkloadError> {
        let dir = format!("pairs-{round}");
        let half = place.nodes.len() / 2 * place.per_node;
        let made = place.nodes[0].join(&dir);
        std::fs::create_dir(&made).told(|| format!("mkdir {}", made.display()))?;
        couple(&made, &format!("producers={half} consumers={half} wait=60s"))?;
        let sides = Sides { producers: half, consumers: half, round, read: None };
        let measures = self.both(place, &dir, &sides)?;
        // What all have read goes by itself.
        wait_for(&made, || std::fs::remove_dir(&made).is_ok())?;
        Ok(measures)
    }

    /// The same on a bare directory, with so many processes.
    ///
    /// # Errors
    /// When a call fails, or bytes are wrong.
    pub fn bare(
        &self,
        dir: &Path,
        processes: usize,
        round: u64,
    ) -> Result<Vec<Measure>, WorkloadError> {
        let name = format!("pairs-{round}");
        let made = dir.join(&name);
        std::fs::create_dir(&made).told(|| format!("mkdir {}", made.display()))?;
        let read: Vec<AtomicUsize> = (0..self.steps).map(|_| AtomicUsize::new(0)).collect();
        let half = processes / 2;
        let sides = Sides { producers: half, consumers: half, round, read: Some(&read) };
        let measures = self.both(&Place::single(dir.to_owned(), 2 * half), &name, &sides)?;
        std::fs::remove_dir(&made).told(|| format!("rmdir {}", made.display()))?;
        Ok(measures)
    }

    fn both(
        &self,
        place: &Place,
        dir: &str,
        sides: &Sides<'_>,
    ) -> Result<Vec<Measure>, WorkloadError> {
        let (_, seconds) = place.all(|rank| {
            (0..self.steps).try_for_each(|step| match rank.number < sides.producers {
                true => self.produce(rank, dir, step, sides),
                false => self.consume(rank, dir, step, sides),
            })
        })?;
        let bytes = (self.steps * sides.producers * self.accesses * self.size) as u64;
        Ok(vec![Measure::bandwidth("written and read", bytes, seconds)])
    }

    /// Its own stretch of the file.
    fn produce(
        &self,
        rank: Rank<'_>,
        dir: &str,
        step: usize,
        sides: &Sides<'_>,
    ) -> Result<(), WorkloadError> {
        let path = step_of(rank, dir, step);
        let file = open_write(&path)?;
        let mut record = PageBuffer::filled(0x5a, self.size);
        for access in 0..self.accesses {
            let at = ((rank.number * self.accesses + access) * self.size) as u64;
            stamp(&mut record, at, sides.round + step as u64);
            file.write_all_at(&record, at).told(|| format!("write {}", path.display()))?;
        }
        if sides.read.is_some() {
            file.sync_all().told(|| format!("fsync {}", path.display()))?;
            let mark = mark(&path, rank.number);
            File::create(&mark).told(|| format!("create {}", mark.display()))?;
        }
        Ok(())
    }

    /// Every so many accesses of all, in turn with the other consumers.
    fn consume(
        &self,
        rank: Rank<'_>,
        dir: &str,
        step: usize,
        sides: &Sides<'_>,
    ) -> Result<(), WorkloadError> {
        let path = step_of(rank, dir, step);
        if sides.read.is_some() {
            for producer in 0..sides.producers {
                let mark = mark(&path, producer);
                wait_for(&mark, || mark.exists())?;
            }
        }
        let file = open_read(&path)?;
        let mut record = PageBuffer::filled(0, self.size);
        let first = rank.number - sides.producers;
        for access in (first..sides.producers * self.accesses).step_by(sides.consumers) {
            let at = (access * self.size) as u64;
            file.read_exact_at(&mut record, at).told(|| format!("read {}", path.display()))?;
            verify(&record, at, sides.round + step as u64, &path)?;
        }
        drop(file);
        // The last one tidies up.
        if let Some(read) = sides.read
            && read[step].fetch_add(1, Ordering::AcqRel) + 1 == sides.consumers
        {
            (0..sides.producers).try_for_each(|producer| remove(&mark(&path, producer)))?;
            remove(&path)?;
        }
        Ok(())
    }
}

fn step_of(rank: Rank<'_>, dir: &str, step: usize) -> PathBuf {
    rank.dir.join(dir).join(format!("step{step}"))
}

fn mark(path: &Path, producer: usize) -> PathBuf {
    path.with_extension(format!("{producer}"))
}

fn wait_for(path: &Path, done: impl Fn() -> bool) -> Result<(), WorkloadError> {
    let end = Instant::now() + PATIENCE;
    while !done() {
        if Instant::now() > end {
            let late = Err(io::Error::from(io::ErrorKind::TimedOut));
            return late.told(|| format!("wait for {}", path.display()));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

/// Opens for reading. Where a daemon may not see which call a look-up is for, it does not wait for the name.
fn open_read(path: &Path) -> Result<File, WorkloadError> {
    let end = Instant::now() + PATIENCE;
    loop {
        match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && Instant::now() < end => {
                std::thread::sleep(LOOK_AGAIN);
            }
            other => return other.told(|| format!("open {}", path.display())),
        }
    }
}

fn couple(dir: &Path, terms: &str) -> Result<(), WorkloadError> {
    let path = CString::new(dir.as_os_str().as_bytes()).map_err(io::Error::from);
    let path = path.told(|| dir.display().to_string())?;
    // SAFETY: both strings end with a zero, and there are so many bytes of terms.
    let set = unsafe {
        let (value, len) = (terms.as_ptr().cast(), terms.len());
        libc::setxattr(path.as_ptr(), c"user.ebb.couple".as_ptr(), value, len, 0)
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()).told(|| format!("couple {}", dir.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_pair_reads_everything_and_cleans_up() {
        let dir = tempfile::tempdir().unwrap();
        let pairs = Pairs { steps: 3, size: 5000, accesses: 4 };
        for processes in [2, 6] {
            let measures = pairs.bare(dir.path(), processes, 7).unwrap();
            assert!(measures.len() == 1 && measures[0].value > 0.0);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "it cleans up");
    }

    #[test]
    fn a_consumer_notices_what_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let pairs = Pairs { steps: 1, size: 4096, accesses: 3 };
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::write(dir.path().join("d/step0"), vec![0; 3 * 4096]).unwrap();
        let sides = Sides { producers: 1, consumers: 1, round: 1, read: None };
        let place = Place::single(dir.path().to_owned(), 2);
        let read = place.all(|rank| match rank.number {
            0 => Ok(()),
            _ => pairs.consume(rank, "d", 0, &sides),
        });
        assert!(matches!(read, Err(WorkloadError::Wrong { .. })));
    }
}
