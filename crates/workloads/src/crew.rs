//! The processes of a workload: threads that start together, on the directories of their nodes, and
//! how long the slowest took.

use crate::{Told, WorkloadError};
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Instant;

/// What a correct program does before it tells others about its bytes, besides closing the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Publish {
    /// Nothing: writing, or closing, does it.
    Close,
    /// fsync.
    Fsync,
}

/// Where a workload runs.
#[derive(Clone, Debug)]
pub struct Place {
    /// The same directory as each node sees it.
    pub nodes: Vec<PathBuf>,
    /// Processes on each node.
    pub per_node: usize,
    /// How writers publish.
    pub publish: Publish,
}

/// One process.
#[derive(Clone, Copy, Debug)]
pub struct Rank<'a> {
    /// Its number among all.
    pub number: usize,
    /// All of them.
    pub of: usize,
    /// Its node.
    pub node: usize,
    /// The directory as its node sees it.
    pub dir: &'a Path,
}

impl Place {
    /// A single directory.
    #[must_use]
    pub fn single(dir: PathBuf, per_node: usize) -> Place {
        Place { nodes: vec![dir], per_node, publish: Publish::Close }
    }

    /// The nodes `from..to` of this place.
    #[must_use]
    pub fn part(&self, from: usize, to: usize) -> Place {
        Place { nodes: self.nodes[from..to].to_vec(), ..self.clone() }
    }

    /// Runs `work` in every process at once. Returns the results by number, and the seconds from
    /// the common start until the last was done.
    pub fn all<T: Send>(
        &self,
        work: impl Fn(Rank<'_>) -> Result<T, WorkloadError> + Sync,
    ) -> Result<(Vec<T>, f64), WorkloadError> {
        let of = self.nodes.len() * self.per_node;
        let ready = Barrier::new(of + 1);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..of)
                .map(|number| {
                    let node = number / self.per_node;
                    let rank = Rank { number, of, node, dir: &self.nodes[node] };
                    let (ready, work) = (&ready, &work);
                    scope.spawn(move || {
                        ready.wait();
                        let done = work(rank)?;
                        Ok((done, Instant::now()))
                    })
                })
                .collect();
            ready.wait();
            let start = Instant::now();
            let ended: Result<Vec<_>, WorkloadError> = threads
                .into_iter()
                .map(|t| t.join().map_err(|_| WorkloadError::Died).and_then(|r| r))
                .collect();
            let (results, ends): (Vec<T>, Vec<Instant>) = ended?.into_iter().unzip();
            let last = ends.into_iter().max().unwrap_or(start);
            Ok((results, last.duration_since(start).as_secs_f64()))
        })
    }

    /// Publishes what was written to `file` and closes it.
    pub fn finish(&self, file: File, path: &Path) -> Result<(), WorkloadError> {
        if self.publish == Publish::Fsync {
            file.sync_all().told(|| format!("fsync {}", path.display()))?;
        }
        close(file).told(|| format!("close {}", path.display()))
    }
}

/// Closes and tells the error, which dropping would hide.
fn close(file: File) -> std::io::Result<()> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was just taken out of its owner.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Opens for writing; made when it is not there, never cut.
pub fn open_write(path: &Path) -> Result<File, WorkloadError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    options.open(path).told(|| format!("open {} for writing", path.display()))
}

/// Opens for reading.
pub fn open_read(path: &Path) -> Result<File, WorkloadError> {
    File::open(path).told(|| format!("open {}", path.display()))
}

/// Removes a file of a finished round.
pub fn remove(path: &Path) -> Result<(), WorkloadError> {
    std::fs::remove_file(path).told(|| format!("remove {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_fill_the_nodes_in_blocks() {
        let place = Place {
            nodes: vec!["a".into(), "b".into(), "c".into()],
            per_node: 2,
            publish: Publish::Close,
        };
        let (seen, _) = place.all(|r| Ok((r.number, r.node, r.of, r.dir.to_owned()))).unwrap();
        let expected: Vec<_> =
            [(0, 0, "a"), (1, 0, "a"), (2, 1, "b"), (3, 1, "b"), (4, 2, "c"), (5, 2, "c")]
                .map(|(n, node, dir)| (n, node, 6, PathBuf::from(dir)))
                .to_vec();
        assert_eq!(seen, expected);
    }

    #[test]
    fn an_error_of_one_is_an_error() {
        let place = Place::single("x".into(), 3);
        let failed = place.all(|r| if r.number == 1 { Err(WorkloadError::Died) } else { Ok(()) });
        assert!(failed.is_err());
    }
}
