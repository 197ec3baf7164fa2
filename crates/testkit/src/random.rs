//! Random but repeatable: a generator whose seed is printed, and can be given.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A seed from `EBB_SEED`, else a fresh one; printed, so that a failure can be repeated.
#[must_use]
pub fn seed() -> u64 {
    let seed = match std::env::var("EBB_SEED") {
        Ok(text) => text.parse().expect("EBB_SEED is a number"),
        Err(_) => rand::rng().next_u64(),
    };
    println!("seed {seed} (EBB_SEED={seed} repeats it)");
    seed
}

/// A generator of that seed. The sequence is the same on every machine and in every release.
#[must_use]
pub fn generator(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Another generator, whose sequence this one decides.
pub fn derived(generator: &mut ChaCha8Rng) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(generator.next_u64())
}

/// `len` random bytes.
pub fn bytes(generator: &mut ChaCha8Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    generator.fill_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        assert_eq!(bytes(&mut generator(7), 100), bytes(&mut generator(7), 100));
        assert_ne!(bytes(&mut generator(7), 100), bytes(&mut generator(8), 100));
    }
}
