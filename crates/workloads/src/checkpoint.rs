//! Checkpoint and restart with partner copies, as SCR does it, of the nine arrays of HACC-IO: each
//! process writes its own file, then its partner on the next node reads it and keeps a copy. At
//! restart one node has failed: its processes read from the partners' copies.

use crate::content::{stamp, verify};
use crate::crew::{Place, Rank, open_read, open_write, remove};
use crate::{Measure, Told, WorkloadError};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of one particle in each of the arrays: positions, velocities and potential, the 64-bit
/// identity and the 16-bit mask.
pub const ARRAYS: [usize; 9] = [4, 4, 4, 4, 4, 4, 4, 8, 2];

/// The largest single write.
const PIECE: usize = 8 << 20;

/// A checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoint {
    /// Particles of a process.
    pub particles: usize,
}

fn own(rank: usize, round: u64) -> String {
    format!("rank-{rank}-{round}")
}

fn copy_of(rank: usize, round: u64) -> String {
    format!("partner-of-{rank}-{round}")
}

impl Checkpoint {
    fn bytes(&self) -> u64 {
        (ARRAYS.iter().sum::<usize>() * self.particles) as u64
    }

    /// Runs it once.
    pub fn run(&self, place: &Place, round: u64) -> Result<Vec<Measure>, WorkloadError> {
        let processes = place.nodes.len() * place.per_node;
        let total = self.bytes() * processes as u64;
        let (_, write) = place.all(|r| self.write(place, r, round))?;
        let (_, partner) = place.all(|r| self.keep_copy(place, r, round))?;
        let (_, restart) = place.all(|r| self.restart(r, round))?;
        for n in 0..processes {
            remove(&place.nodes[0].join(own(n, round)))?;
            remove(&place.nodes[0].join(copy_of(n, round)))?;
        }
        Ok(vec![
            Measure::bandwidth("checkpoint", total, write),
            Measure::bandwidth("partner copy", total, partner),
            Measure::bandwidth("restart", total, restart),
        ])
    }

    fn write(&self, place: &Place, rank: Rank<'_>, round: u64) -> Result<(), WorkloadError> {
        let path = rank.dir.join(own(rank.number, round));
        let file = open_write(&path)?;
        let mut at = 0u64;
        for width in ARRAYS {
            let mut array = vec![0x33; width * self.particles];
            stamp(&mut array, at, round + rank.number as u64);
            for piece in array.chunks(PIECE) {
                file.write_all_at(piece, at).told(|| format!("write {}", path.display()))?;
                at += piece.len() as u64;
            }
        }
        place.finish(file, &path)
    }

    /// The process of the next node that keeps the copy of the one `from`.
    fn partner(rank: Rank<'_>, per_node: usize) -> usize {
        (rank.number + per_node) % rank.of
    }

    fn keep_copy(&self, place: &Place, rank: Rank<'_>, round: u64) -> Result<(), WorkloadError> {
        let whose = Self::partner(rank, place.per_node);
        let from = rank.dir.join(own(whose, round));
        let to = rank.dir.join(copy_of(whose, round));
        let (source, target) = (open_read(&from)?, open_write(&to)?);
        let (mut buffer, mut at) = (vec![0; 1 << 20], 0u64);
        while at < self.bytes() {
            let n = buffer.len().min((self.bytes() - at) as usize);
            source
                .read_exact_at(&mut buffer[..n], at)
                .told(|| format!("read {}", from.display()))?;
            target.write_all_at(&buffer[..n], at).told(|| format!("write {}", to.display()))?;
            at += n as u64;
        }
        place.finish(target, &to)
    }

    /// Node 0 failed: its processes take the copies.
    fn restart(&self, rank: Rank<'_>, round: u64) -> Result<(), WorkloadError> {
        let name = match rank.node {
            0 => copy_of(rank.number, round),
            _ => own(rank.number, round),
        };
        self.read(&rank.dir.join(name), round + rank.number as u64)
    }

    fn read(&self, path: &Path, round: u64) -> Result<(), WorkloadError> {
        let file = open_read(path)?;
        let mut at = 0u64;
        for width in ARRAYS {
            let mut array = vec![0; width * self.particles];
            let start = at;
            for piece in array.chunks_mut(PIECE) {
                file.read_exact_at(piece, at).told(|| format!("read {}", path.display()))?;
                at += piece.len() as u64;
            }
            verify(&array, start, round, path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Publish;

    #[test]
    fn it_reads_back_what_was_written_and_cleans_up() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = vec![dir.path().to_owned(); 3];
        let place = Place { nodes, per_node: 2, publish: Publish::Close };
        let measures = Checkpoint { particles: 3000 }.run(&place, 1).unwrap();
        assert_eq!(measures.len(), 3);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
