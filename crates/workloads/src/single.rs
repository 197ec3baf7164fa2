//! One node: records of one size written to a new file, written over, read in order and at random;
//! and small files made, looked at and removed.
//!
//! Fresh memory hides everything that is to be measured here: a new file is written in rounds of
//! some megabytes and removed again, after a first one that does not count.

use crate::content::{stamp, verify};
use crate::crew::{Place, open_read, open_write, remove};
use crate::{Measure, PageBuffer, Told, WorkloadError};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// Records of one size.
#[derive(Clone, Copy, Debug)]
pub struct Records {
    /// Bytes of a record.
    pub size: usize,
    /// Bytes of the file.
    pub bytes: usize,
}

impl Records {
    /// Runs it once with one process per `per_node`, each on its own file.
    pub fn run(&self, place: &Place, round: u64) -> Result<Vec<Measure>, WorkloadError> {
        let name = |number: usize| format!("records-{}-{number}", self.size);
        let total = (self.count() * self.size * place.nodes.len() * place.per_node) as u64;
        let mut measures = Vec::new();
        let mut timed =
            |phase: &str, work: &(dyn Fn(&Path) -> Result<(), WorkloadError> + Sync)| {
                let (_, seconds) = place.all(|rank| work(&rank.dir.join(name(rank.number))))?;
                measures.push(Measure::bandwidth(phase, total, seconds));
                Ok::<(), WorkloadError>(())
            };
        timed("write new", &|path| self.write(path, round))?;
        timed("rewrite", &|path| self.write(path, round + 1))?;
        timed("read", &|path| self.read(path, round + 1, 1))?;
        // A step that has no common divisor with the number of records visits each once.
        timed("random read", &|path| self.read(path, round + 1, self.far()))?;
        place.all(|rank| remove(&rank.dir.join(name(rank.number))))?;
        Ok(measures)
    }

    fn count(&self) -> usize {
        (self.bytes / self.size).max(1)
    }

    fn far(&self) -> usize {
        let count = self.count();
        let start = count * 2 / 5 + 1;
        (start..).find(|s| gcd(*s, count) == 1).unwrap_or(1)
    }

    fn write(&self, path: &Path, round: u64) -> Result<(), WorkloadError> {
        let file = open_write(path)?;
        let mut record = PageBuffer::filled(0x5a, self.size);
        for n in 0..self.count() {
            let at = (n * self.size) as u64;
            stamp(&mut record, at, round);
            file.write_all_at(&record, at).told(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }

    fn read(&self, path: &Path, round: u64, step: usize) -> Result<(), WorkloadError> {
        let file = open_read(path)?;
        let mut record = PageBuffer::filled(0, self.size);
        let mut n = 0;
        for _ in 0..self.count() {
            let at = (n * self.size) as u64;
            file.read_exact_at(&mut record, at).told(|| format!("read {}", path.display()))?;
            verify(&record, at, round, path)?;
            n = (n + step) % self.count();
        }
        Ok(())
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Small files.
#[derive(Clone, Copy, Debug)]
pub struct SmallFiles {
    /// How many, of all processes together.
    pub files: usize,
    /// Bytes of each.
    pub size: usize,
}

impl SmallFiles {
    /// Runs it once: each process in a directory of its own.
    pub fn run(&self, place: &Place, round: u64) -> Result<Vec<Measure>, WorkloadError> {
        let processes = place.nodes.len() * place.per_node;
        let each = self.files.div_ceil(processes);
        let dir = |number: usize| format!("small-{round}-{number}");
        for n in 0..processes {
            let path = place.nodes[0].join(dir(n));
            std::fs::create_dir(&path).told(|| format!("mkdir {}", path.display()))?;
        }
        let data = PageBuffer::filled(0x44u8, self.size);
        let mut measures = Vec::new();
        let mut timed =
            |phase: &str, work: &(dyn Fn(&Path) -> Result<(), WorkloadError> + Sync)| {
                let (_, seconds) = place.all(|rank| {
                    let dir = rank.dir.join(dir(rank.number));
                    (0..each).try_for_each(|n| work(&dir.join(format!("file-{n:06}"))))
                })?;
                measures.push(Measure::rate(phase, (each * processes) as u64, seconds));
                Ok::<(), WorkloadError>(())
            };
        timed("create", &|path| {
            let file = open_write(path)?;
            file.write_all_at(&data, 0).told(|| format!("write {}", path.display()))?;
            place.finish(file, path)
        })?;
        timed("stat", &|path| {
            let found = std::fs::metadata(path).told(|| format!("stat {}", path.display()))?;
            let wrong = || WorkloadError::Wrong { path: path.display().to_string(), offset: 0 };
            if found.len() == self.size as u64 { Ok(()) } else { Err(wrong()) }
        })?;
        timed("unlink", &remove)?;
        for n in 0..processes {
            let path = place.nodes[0].join(dir(n));
            std::fs::remove_dir(&path).told(|| format!("rmdir {}", path.display()))?;
        }
        Ok(measures)
    }
}

/// Seconds of one call.
pub fn seconds<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let done = work();
    (done, start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_small_files_in_a_plain_directory() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::single(dir.path().to_owned(), 2);
        let records = Records { size: 4096, bytes: 1 << 20 };
        assert_eq!(records.run(&place, 1).unwrap().len(), 4);
        let small = SmallFiles { files: 21, size: 100 };
        assert_eq!(small.run(&place, 1).unwrap().len(), 3);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_random_order_visits_everything() {
        for bytes in [1 << 20, 3 << 20, 5 << 20] {
            let r = Records { size: 8192, bytes };
            let mut seen: Vec<usize> = (0..r.count())
                .scan(0, |n, _| {
                    let now = *n;
                    *n = (*n + r.far()) % r.count();
                    Some(now)
                })
                .collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..r.count()).collect::<Vec<_>>());
        }
    }
}
