//! What a run is, as the seed decides: the cluster, and one fault after the other.

use crate::backing::Kind;
use ebb_tests::model::Model;
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

const FLUSHES: [&str; 6] = ["idle", "immediate", "close", "watermark", "periodic", "end"];
/// A process may be stopped for so long.
const STOP_MS_MAX: u64 = 4_000;
const FULL_MS_MAX: u64 = 1_500;

/// The cluster of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub nodes: usize,
    pub loads_per_node: usize,
    pub model: Model,
    pub flush: &'static str,
    pub durability: &'static str,
    pub cache_size: Option<&'static str>,
    pub backing: Kind,
}

/// What can be done to a run.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// kill -9, umount, and mount again on the same cache.
    KillDaemon(usize),
    /// kill -9, and started again after a while.
    KillService(Duration),
    /// Both at the same time.
    KillBoth(usize),
    /// SIGSTOP, and SIGCONT after a while.
    StopDaemon(usize, Duration),
    StopService(Duration),
    /// No space on the backing for a while.
    FillBacking(Duration),
}

fn one<T: Copy>(dice: &mut ChaCha8Rng, of: &[T]) -> T {
    *of.choose(dice).expect("never empty")
}

impl Plan {
    pub fn new(dice: &mut ChaCha8Rng) -> Plan {
        Plan {
            nodes: dice.random_range(2..=4),
            loads_per_node: dice.random_range(1..=2),
            model: one(dice, &Model::ALL),
            flush: one(dice, &FLUSHES),
            durability: one(dice, &["local", "local", "backing", "none"]),
            cache_size: one(dice, &[None, None, Some("2MiB"), Some("400KiB")]),
            backing: one(dice, &[Kind::Directory, Kind::Small]),
        }
    }

    pub fn fault(&self, dice: &mut ChaCha8Rng) -> Fault {
        let node = dice.random_range(0..self.nodes);
        let up_to = |dice: &mut ChaCha8Rng, ms| Duration::from_millis(dice.random_range(10..ms));
        match dice.random_range(0..100) {
            0..30 => Fault::KillDaemon(node),
            30..55 => Fault::KillService(up_to(dice, 1_000)),
            55..65 => Fault::KillBoth(node),
            65..80 => Fault::StopDaemon(node, up_to(dice, STOP_MS_MAX)),
            80..90 => Fault::StopService(up_to(dice, STOP_MS_MAX)),
            _ if self.backing == Kind::Small => Fault::FillBacking(up_to(dice, FULL_MS_MAX)),
            _ => Fault::KillService(Duration::ZERO),
        }
    }
}
