//! Every decoder of bytes from the network or the disk behind one function ([`entries`]), and a
//! seeded mutator ([`feed`]) that runs them on what real ones look like, and on what they do not.
//! An entry may refuse what it gets; it must not panic, and must not take long.

pub mod entries;

use rand::seq::IndexedRandom;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// How long an entry may take for one input.
const INPUT_TIME_MAX: Duration = Duration::from_secs(2);

/// Longest input; the decoders have their own bounds.
const INPUT_BYTES_MAX: usize = 1 << 16;

/// Numbers that break things.
const EDGES: [u64; 9] =
    [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, 1 << 63, u64::MAX];

/// Runs an entry on mutations of `seeds`: for `EBB_FUZZ_SECONDS`, or so often as a test allows.
/// `EBB_SEED` repeats a run. Answers how many inputs were tried.
///
/// # Panics
/// When the entry does, or takes too long; the input is kept in a file that the message names.
pub fn feed(name: &str, seeds: &[Vec<u8>], entry: impl Fn(&[u8])) -> u64 {
    let number = |variable: &str| std::env::var(variable).ok().and_then(|n| n.parse::<u64>().ok());
    let seed = number("EBB_SEED").unwrap_or(0x_ebb0_0001);
    let limit = number("EBB_FUZZ_SECONDS").map(Duration::from_secs);
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    let (start, mut tried) = (Instant::now(), 0);
    seeds.iter().for_each(|s| try_one(name, seed, s, &entry));
    loop {
        let is_over = match limit {
            Some(limit) => start.elapsed() >= limit,
            None => tried >= 4000 || start.elapsed() >= Duration::from_secs(5),
        };
        if is_over {
            println!("{name}: {tried} inputs, seed {seed}");
            return tried;
        }
        try_one(name, seed, &mutated(seeds, &mut dice), &entry);
        tried += 1;
    }
}

fn try_one(name: &str, seed: u64, input: &[u8], entry: &impl Fn(&[u8])) {
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| entry(input)));
    let time = start.elapsed();
    if outcome.is_ok() && time < INPUT_TIME_MAX {
        return;
    }
    let file = std::env::temp_dir().join(format!("ebb-fuzz-{name}-{seed}"));
    let kept = std::fs::write(&file, input).map(|()| file.display().to_string());
    eprintln!("{name}: seed {seed}, {} bytes in {kept:?}, {time:?}", input.len());
    match outcome {
        Err(panic) => resume_unwind(panic),
        Ok(()) => panic!("{name}: {time:?} for one input"),
    }
}

/// A few changes to one of the seeds.
fn mutated(seeds: &[Vec<u8>], dice: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = seeds.choose(dice).cloned().unwrap_or_default();
    for _ in 0..dice.random_range(1..6) {
        mutate(&mut bytes, seeds, dice);
    }
    bytes.truncate(INPUT_BYTES_MAX);
    bytes
}

fn mutate(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], dice: &mut ChaCha8Rng) {
    let len = bytes.len();
    let at = dice.random_range(0..=len);
    let to = dice.random_range(at..=len.min(at + 64));
    match dice.random_range(0..8) {
        0 if at < len => bytes[at] ^= 1 << dice.random_range(0..8),
        1 if at < len => bytes[at] = dice.random(),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..to)),
        4 => {
            let copy = bytes[at..to].to_vec();
            bytes.splice(at..at, copy);
        }
        5 => {
            let edge = EDGES.choose(dice).copied().unwrap_or_default().to_le_bytes();
            let width = *[1, 2, 4, 8].choose(dice).unwrap_or(&8);
            let end = len.min(at + width);
            bytes[at..end].copy_from_slice(&edge[..end - at]);
        }
        6 => {
            // The end of another one.
            if let Some(other) = seeds.choose(dice) {
                let from = dice.random_range(0..=other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
        _ => {
            let mut noise = vec![0; dice.random_range(1..40)];
            dice.fill_bytes(&mut noise);
            bytes.splice(at..to, noise);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mutator finds a bug that needs two things at once.
    #[test]
    fn a_planted_bug_is_found() {
        let seeds = vec![b"head and a length \x10\0\0\0 and more".to_vec()];
        let found = catch_unwind(|| {
            feed("planted", &seeds, |bytes| {
                let is_head = bytes.starts_with(b"head");
                assert!(!(is_head && bytes.windows(4).any(|w| w == [0xff; 4])), "planted");
            })
        });
        assert!(found.is_err());
    }
}
