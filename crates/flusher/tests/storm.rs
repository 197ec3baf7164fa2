//! Seeded storms: writes, removals, pauses, activity and drains at random over a faulty backing,
//! under every policy. At the end everything that was written is on the backing.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod world;

use ebb_backend::faulty::Faults;
use ebb_flusher::{DrainScope, Engine, FileUse, Options, Policy, PolicyKind};
use ebb_types::Ino;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashSet;
use std::time::{Duration, Instant};
use world::{PATIENCE, World, quick};

/// Each thread has files of its own, so that it knows what they must contain.
const THREADS: u64 = 3;
const FILES: u64 = 4;
const STEPS: usize = 120;
const LONGEST_FILE: u64 = 3 << 20;

fn storm(world: &World, engine: &Engine, thread: u64, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed * 1000 + thread);
    // A removed file's number is not used again, as in the real file system.
    let mut inos: Vec<Ino> = (0..FILES).map(|i| Ino(100 * (thread + 1) + i)).collect();
    let mut fresh = 100 * (thread + 1) + FILES;
    for _ in 0..STEPS {
        let which = rng.random_range(0..inos.len());
        let ino = inos[which];
        match rng.random_range(0..100) {
            0..70 => {
                let offset = rng.random_range(0..LONGEST_FILE);
                let len = if rng.random_bool(0.1) { 400_000 } else { rng.random_range(1..5000) };
                world.write(ino, offset, &world::pattern(rng.random(), len));
                world.set_use(ino, [FileUse::Closed, FileUse::Open][rng.random_range(0..2)]);
                engine.kick();
            }
            70..76 => {
                world.remove(ino);
                inos[which] = Ino(fresh);
                fresh += 1;
            }
            76..84 => std::thread::sleep(Duration::from_millis(rng.random_range(1..8))),
            84..90 => engine.pause(),
            90..96 => engine.resume(),
            _ => {
                let scope = DrainScope::Files(HashSet::from([ino]));
                let deadline = Instant::now() + Duration::from_millis(rng.random_range(1..200));
                let report = engine.drain(&scope, deadline, &mut |_| {});
                assert!(report.failures.is_empty() || !report.remaining.is_empty(), "{report:?}");
                if report.is_clean() {
                    assert_eq!(world.dirty_of(ino), 0);
                }
            }
        }
    }
}

#[test]
fn everything_arrives_under_every_policy() {
    for (seed, kind) in PolicyKind::ALL.into_iter().enumerate() {
        let world = World::new(seed as u64);
        world.set_capacity(24 << 20);
        world.faulty.set(Faults {
            eio: 0.02,
            enospc: 0.02,
            short: 0.2,
            delay: 0.1,
            delay_for: Duration::from_millis(1),
            ..Faults::default()
        });
        let policy = Policy {
            wait_interval: Duration::from_millis(3),
            period: Duration::from_millis(20),
            ..Policy::of(kind)
        };
        let engine = world.start(Options { drain_attempts: 1000, ..quick() }, policy);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (world, engine) = (&world, &engine);
                scope.spawn(move || storm(world, engine, thread, seed as u64));
            }
        });
        engine.resume();
        let report = world.drain(&engine);
        assert!(report.is_clean(), "{kind}: {report:?}");
        // A file that was removed is nothing that a drain waits for; its grant may still be written.
        assert!(engine.shutdown(PATIENCE), "{kind}: threads left behind");
        world.assert_all_arrived();
    }
}
