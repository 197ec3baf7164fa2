//! What a run is, as the seed decides: the cluster, the kinds of faults that it has, and one fault
//! after the other.

use crate::backing::Kind;
use ebb_testkit::Port;
use ebb_tests::model::Model;
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

const FLUSHES: [&str; 6] = ["idle", "immediate", "close", "watermark", "periodic", "end"];
/// A process may be stopped for so long.
const STOP_MS_MAX: u64 = 4_000;
const FULL_MS_MAX: u64 = 1_500;
const HANG_MS_MAX: u64 = 3_000;
/// Mostly links are gone for less than a lease of the service, which is ten seconds.
const CUT_MS_MAX: u64 = 4_000;
const LONG_CUT_MS_MAX: u64 = 13_000;

/// The cluster of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub nodes: usize,
    pub loads_per_node: usize,
    pub model: Model,
    pub flush: &'static str,
    pub durability: &'static str,
    pub replicas: &'static str,
    pub cache_size: Option<&'static str>,
    pub backing: Kind,
    /// A network of their own, whose links can break.
    pub network: bool,
    /// What the caches are on.
    pub caches: Caches,
    /// `--io-path`.
    pub io_path: &'static str,
    /// With a job token, also where no network asks for one.
    pub token: bool,
    /// Another model for some of the files: a stronger one than the job's, which programs need not know.
    pub rule: Option<&'static str>,
    /// The large file of each program, in blocks of 64 KiB; 0: none.
    pub blocks: u64,
    /// Daemons are unmounted at each drain; else they live as long as no fault ends them.
    pub remounts: bool,
    /// Each daemon has a supervisor that starts another one.
    pub supervised: bool,
    pub faults: Vec<Family>,
}

/// What the caches of a run are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caches {
    /// Memory: nothing of it is ever written back, and no write is tracked.
    Memory,
    /// A small file system in memory that others can fill.
    Small,
    /// An ext4 that others can fill: the kernel writes past the daemon there, and tells.
    Disk,
}

/// Kinds of faults, of which a plan has some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Kills,
    Stops,
    Links,
    Backing,
    Caches,
    /// Nodes with their caches, which needs a second copy.
    Losses,
}

/// What can be done to a run.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// kill -9 of all that serves a mount, umount, and mount again on the same cache.
    KillDaemon(usize),
    /// kill -9 of a daemon under its supervisor: its programs must not notice.
    CrashDaemon(usize),
    /// kill -9, and started again after a while.
    KillService(Duration),
    /// Both at the same time.
    KillBoth(usize),
    /// kill -9, the cache deleted, and mounted again.
    LoseNode(usize),
    /// Something that lasts a while, and perhaps a kill in the middle of it.
    While(Lasting, Duration, Option<Victim>),
}

/// Who is killed during another fault.
#[derive(Clone, Copy, Debug)]
pub enum Victim {
    Daemon(usize),
    Service,
}

/// A fault that begins and ends.
#[derive(Clone, Copy, Debug)]
pub enum Lasting {
    StopDaemon(usize),
    StopService,
    /// Nothing gets through to it or from it.
    Cut(Port),
    /// Up and down again, quickly.
    Flap(Port),
    /// Two nodes do not reach each other, but the service.
    Part(usize, usize),
    /// Late and lost packets.
    Spoil(Port),
    FullBacking,
    HangingBacking,
    SlowBacking,
    FullCaches,
}

fn one<T: Copy>(dice: &mut ChaCha8Rng, of: &[T]) -> T {
    *of.choose(dice).expect("never empty")
}

fn up_to(dice: &mut ChaCha8Rng, ms: u64) -> Duration {
    Duration::from_millis(dice.random_range(10..ms))
}

impl Plan {
    pub fn new(dice: &mut ChaCha8Rng) -> Plan {
        let mut plan = Plan {
            nodes: dice.random_range(2..=4),
            loads_per_node: dice.random_range(1..=2),
            model: one(dice, &Model::ALL),
            flush: one(dice, &FLUSHES),
            durability: one(dice, &["local", "local", "backing", "none"]),
            replicas: one(dice, &["1", "1", "2"]),
            cache_size: one(dice, &[None, None, Some("2MiB"), Some("400KiB")]),
            backing: one(dice, &Kind::ALL),
            network: dice.random_bool(0.7),
            caches: one(dice, &[Caches::Memory, Caches::Small, Caches::Disk, Caches::Disk]),
            io_path: one(dice, &["auto", "auto", "daemon"]),
            token: dice.random_bool(0.5),
            rule: one(dice, &[None, None, Some("p*/s/*=posix")]),
            blocks: one(dice, &[0, 0, 0, 16, 64, 200]),
            remounts: dice.random_bool(0.4),
            supervised: dice.random_bool(0.5),
            faults: Vec::new(),
        };
        if let Ok(wanted) = std::env::var("EBB_CHAOS_MODEL") {
            let known = Model::ALL.into_iter().find(|m| m.name() == wanted);
            plan.model = known.unwrap_or_else(|| panic!("EBB_CHAOS_MODEL={wanted}: no model"));
        }
        if std::env::var("EBB_TEST_IO_PATH").is_ok_and(|way| way == "auto") {
            // With any of these nothing, or little, goes past the daemon.
            (plan.replicas, plan.cache_size, plan.io_path) = ("1", None, "auto");
            (plan.caches, plan.token) = (Caches::Disk, false);
        }
        if plan.io_path == "auto" {
            plan.supervised = false;
        }
        let families = [
            (Family::Kills, 0.75),
            (Family::Stops, 0.4),
            (Family::Links, 0.8),
            (Family::Backing, 0.8),
            (Family::Caches, 0.8),
            (Family::Losses, 0.7),
        ];
        let drawn = families.into_iter().filter(|(_, chance)| dice.random_bool(*chance));
        plan.faults = drawn.map(|(family, _)| family).collect();
        plan.keep_possible();
        if plan.faults.contains(&Family::Losses) {
            // A partner that has no room for copies refuses them: a loss then costs bytes.
            plan.cache_size = None;
        }
        plan
    }

    /// Leaves out what this cluster cannot have.
    pub fn keep_possible(&mut self) {
        let (network, caches) = (self.network, self.caches != Caches::Memory);
        let (backing, replicas) = (self.backing, self.replicas);
        self.faults.retain(|family| match family {
            Family::Kills | Family::Stops => true,
            Family::Links => network,
            Family::Backing => backing != Kind::Directory,
            Family::Caches => caches,
            Family::Losses => replicas == "2",
        });
        if self.faults.is_empty() {
            self.faults.push(Family::Kills);
        }
    }

    /// The faults of a round, one after the other. A loss comes alone: another one before there
    /// is a second copy again may cost bytes.
    pub fn faults(&self, dice: &mut ChaCha8Rng) -> Vec<Fault> {
        if self.faults.contains(&Family::Losses) && dice.random_bool(0.3) {
            return vec![Fault::LoseNode(dice.random_range(0..self.nodes))];
        }
        let others = self.faults.iter().copied().filter(|f| *f != Family::Losses);
        let families: Vec<Family> = others.collect();
        let count = if families.is_empty() { 0 } else { dice.random_range(1..4) };
        (0..count).map(|_| self.fault(one(dice, &families), dice)).collect()
    }

    fn fault(&self, family: Family, dice: &mut ChaCha8Rng) -> Fault {
        let node = dice.random_range(0..self.nodes);
        let second = dice.random_range(0..100);
        let lasting = |what, time| Fault::While(what, time, None);
        match (family, second) {
            (Family::Kills | Family::Losses, 0..30) if self.supervised => Fault::CrashDaemon(node),
            (Family::Kills | Family::Losses, 0..45) => Fault::KillDaemon(node),
            (Family::Kills | Family::Losses, 45..85) => Fault::KillService(up_to(dice, 1_000)),
            (Family::Kills | Family::Losses, _) => Fault::KillBoth(node),
            (Family::Stops, 0..60) => lasting(Lasting::StopDaemon(node), up_to(dice, STOP_MS_MAX)),
            (Family::Stops, _) => lasting(Lasting::StopService, up_to(dice, STOP_MS_MAX)),
            (Family::Links, _) => self.broken_link(node, dice),
            (Family::Backing, _) => self.broken_backing(dice),
            (Family::Caches, _) => lasting(Lasting::FullCaches, up_to(dice, FULL_MS_MAX)),
        }
    }

    fn broken_link(&self, node: usize, dice: &mut ChaCha8Rng) -> Fault {
        let other = (node + dice.random_range(1..self.nodes)) % self.nodes;
        let port = if dice.random_bool(0.25) { Port::Service } else { Port::Node(node) };
        let what = match dice.random_range(0..100) {
            0..35 => Lasting::Cut(port),
            35..55 => Lasting::Part(node, other),
            55..70 => Lasting::Flap(port),
            _ => Lasting::Spoil(port),
        };
        let is_long = dice.random_bool(0.15);
        let time = up_to(dice, if is_long { LONG_CUT_MS_MAX } else { CUT_MS_MAX });
        // Whoever is killed must be reached when it is started again.
        let reached = !matches!(what, Lasting::Cut(Port::Service) | Lasting::Flap(Port::Service));
        let kills = self.faults.contains(&Family::Kills) && reached && dice.random_bool(0.3);
        let victim = if dice.random_bool(0.4) { Victim::Service } else { Victim::Daemon(other) };
        Fault::While(what, time, kills.then_some(victim))
    }

    fn broken_backing(&self, dice: &mut ChaCha8Rng) -> Fault {
        let full = (Lasting::FullBacking, FULL_MS_MAX);
        let (what, most) = match (self.backing, dice.random_range(0..3)) {
            (Kind::Disk, 0) => (Lasting::HangingBacking, HANG_MS_MAX),
            (Kind::Disk, 1) => (Lasting::SlowBacking, CUT_MS_MAX),
            _ => full,
        };
        Fault::While(what, up_to(dice, most), None)
    }
}
