//! Reads of a training job: one file of samples of 116 KiB, written by all nodes, from which every
//! process reads a random share per epoch. Strong scaling: a mini-batch of fixed size is divided
//! among all; weak scaling: every process reads the same number.

use crate::content::{stamp, verify};
use crate::crew::{Place, Rank, open_read, open_write, remove};
use crate::{Measure, PageBuffer, Told, WorkloadError};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::os::unix::fs::FileExt;

/// Bytes of a sample.
pub const SAMPLE: usize = 116 << 10;

/// How the work grows with the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// This many samples in a mini-batch, for all together.
    Strong(usize),
    /// This many samples for each.
    Weak(usize),
}

/// The reads of a few mini-batches.
#[derive(Clone, Copy, Debug)]
pub struct Samples {
    /// How many each reads.
    pub scaling: Scaling,
    /// Mini-batches of an epoch.
    pub batches: usize,
    /// Epochs: the same samples, shuffled anew.
    pub epochs: usize,
}

impl Samples {
    fn batch(&self, processes: usize) -> usize {
        match self.scaling {
            Scaling::Strong(all) => all,
            Scaling::Weak(each) => each * processes,
        }
    }

    /// Runs it once: the data set is written, then every epoch is timed.
    pub fn run(&self, place: &Place, round: u64) -> Result<Vec<Measure>, WorkloadError> {
        let name = format!("samples-{round}");
        let processes = place.nodes.len() * place.per_node;
        let samples = self.batch(processes) * self.batches;
        drop(open_write(&place.nodes[0].join(&name))?);
        place.all(|rank| write(place, rank, &name, samples, round))?;
        let mut measures = Vec::new();
        for epoch in 0..self.epochs {
            // One shuffle that all processes know, as with a common seed.
            let mut order: Vec<usize> = (0..samples).collect();
            order.shuffle(&mut ChaCha8Rng::seed_from_u64(round * 100 + epoch as u64));
            let (_, seconds) = place.all(|rank| read(rank, &name, &order, round))?;
            let phase = if epoch == 0 { "first epoch" } else { "later epoch" };
            measures.push(Measure::bandwidth(phase, (samples * SAMPLE) as u64, seconds));
        }
        remove(&place.nodes[0].join(&name))?;
        Ok(measures)
    }
}

fn write(
    place: &Place,
    rank: Rank<'_>,
    name: &str,
    samples: usize,
    round: u64,
) -> Result<(), WorkloadError> {
    let path = rank.dir.join(name);
    let file = open_write(&path)?;
    let mut sample = PageBuffer::filled(0x77, SAMPLE);
    for n in (rank.number..samples).step_by(rank.of) {
        let at = (n * SAMPLE) as u64;
        stamp(&mut sample, at, round);
        file.write_all_at(&sample, at).told(|| format!("write {}", path.display()))?;
    }
    place.finish(file, &path)
}

fn read(rank: Rank<'_>, name: &str, order: &[usize], round: u64) -> Result<(), WorkloadError> {
    let path = rank.dir.join(name);
    let file = open_read(&path)?;
    let mut sample = PageBuffer::filled(0, SAMPLE);
    for n in order.iter().skip(rank.number).step_by(rank.of) {
        let at = (n * SAMPLE) as u64;
        file.read_exact_at(&mut sample, at).told(|| format!("read {}", path.display()))?;
        verify(&sample, at, round, &path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Publish;

    #[test]
    fn both_scalings() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = vec![dir.path().to_owned(); 2];
        let place = Place { nodes, per_node: 2, publish: Publish::Fsync };
        for scaling in [Scaling::Strong(10), Scaling::Weak(3)] {
            let measures = Samples { scaling, batches: 2, epochs: 2 }.run(&place, 1).unwrap();
            assert_eq!(measures.len(), 2);
        }
        let s = Samples { scaling: Scaling::Weak(3), batches: 1, epochs: 1 };
        assert_eq!((s.batch(4), s.batch(8)), (12, 24));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
