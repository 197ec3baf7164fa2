//! N processes on one shared file: contiguous and strided writes (CN-W, SN-W), and reads of what the
//! other half of the nodes wrote, contiguous or strided (CC-R, CS-R). Every process does the same
//! number of accesses of one size.

use crate::content::{stamp, verify};
use crate::crew::{Place, Rank, open_read, open_write, remove};
use crate::{Measure, PageBuffer, Told, WorkloadError};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::os::unix::fs::FileExt;

/// Where the accesses of a process lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One after the other: each process has a stretch of its own.
    Contiguous,
    /// In turn with those of all others.
    Strided,
}

/// The order in which a reader goes through its accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From the first to the last.
    Forward,
    /// In a random order that depends on the round alone.
    Random,
}

/// A pattern on one shared file.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// How writers write.
    pub write: Layout,
    /// How the other nodes read it, if they do.
    pub read: Option<(Layout, Order)>,
    /// Bytes of an access.
    pub size: usize,
    /// Accesses of a process.
    pub accesses: usize,
    /// How often a reader goes through its accesses with the file open.
    pub passes: usize,
}

fn offset(layout: Layout, rank: Rank<'_>, access: usize, s: &Shared) -> u64 {
    let record = match layout {
        Layout::Contiguous => rank.number * s.accesses + access,
        Layout::Strided => access * rank.of + rank.number,
    };
    record as u64 * s.size as u64
}

impl Shared {
    /// Runs it once. With reads, the first half of the nodes writes and the second half reads, and
    /// only the reads are timed as such.
    pub fn run(&self, place: &Place, round: u64) -> Result<Vec<Measure>, WorkloadError> {
        let name = format!("shared-{round}");
        let half = if self.read.is_some() { place.nodes.len() / 2 } else { place.nodes.len() };
        let writers = place.part(0, half);
        // The file is there before anyone opens it, as after MPI_File_open.
        drop(open_write(&writers.nodes[0].join(&name))?);
        let (_, seconds) = writers.all(|rank| self.write(&writers, rank, &name, round))?;
        let bytes = (half * place.per_node * self.accesses * self.size) as u64;
        let mut measures = vec![Measure::bandwidth("write", bytes, seconds)];
        if let Some((layout, order)) = self.read {
            let readers = place.part(half, 2 * half);
            let read = |rank: Rank<'_>| self.read(rank, layout, order, &name, round);
            let (_, seconds) = readers.all(read)?;
            measures.push(Measure::bandwidth("read", bytes * self.passes as u64, seconds));
        }
        remove(&place.nodes[0].join(&name))?;
        Ok(measures)
    }

    fn write(
        &self,
        place: &Place,
        rank: Rank<'_>,
        name: &str,
        round: u64,
    ) -> Result<(), WorkloadError> {
        let path = rank.dir.join(name);
        let file = open_write(&path)?;
        let mut record = PageBuffer::filled(0x5a, self.size);
        for access in 0..self.accesses {
            let at = offset(self.write, rank, access, self);
            stamp(&mut record, at, round);
            file.write_all_at(&record, at).told(|| format!("write {}", path.display()))?;
        }
        place.finish(file, &path)
    }

    fn read(
        &self,
        rank: Rank<'_>,
        layout: Layout,
        order: Order,
        name: &str,
        round: u64,
    ) -> Result<(), WorkloadError> {
        let path = rank.dir.join(name);
        let file = open_read(&path)?;
        let mut record = PageBuffer::filled(0, self.size);
        let mut accesses: Vec<usize> = (0..self.accesses).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(round * 1000 + rank.number as u64);
        for _ in 0..self.passes {
            if order == Order::Random {
                accesses.shuffle(&mut rng);
            }
            for access in &accesses {
                let at = offset(layout, rank, *access, self);
                file.read_exact_at(&mut record, at).told(|| format!("read {}", path.display()))?;
                verify(&record, at, round, &path)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Publish;

    #[test]
    fn every_layout_covers_the_file_once_and_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = vec![dir.path().to_owned(); 4];
        for write in [Layout::Contiguous, Layout::Strided] {
            for read in [Layout::Contiguous, Layout::Strided] {
                let s = Shared {
                    write,
                    read: Some((read, Order::Random)),
                    size: 5000,
                    accesses: 7,
                    passes: 2,
                };
                let place = Place { nodes: nodes.clone(), per_node: 3, publish: Publish::Fsync };
                let measures = s.run(&place, 5).unwrap();
                assert_eq!(measures.len(), 2);
                assert!(measures.iter().all(|m| m.value > 0.0));
            }
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "it cleans up");
    }

    #[test]
    fn a_reader_notices_what_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let s =
            Shared { write: Layout::Contiguous, read: None, size: 4096, accesses: 3, passes: 1 };
        std::fs::write(dir.path().join("f"), vec![0; 4096 * 3]).unwrap();
        let place = Place::single(dir.path().to_owned(), 1);
        let read = place.all(|r| s.read(r, Layout::Contiguous, Order::Forward, "f", 1));
        assert!(matches!(read, Err(WorkloadError::Wrong { .. })));
    }
}
