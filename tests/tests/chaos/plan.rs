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
/// The lease of a service whose nodes are to be silent for longer than three of it, and how long they are.
const SHORT_LEASE: &str = "3s";
const SILENCE_MS: std::ops::Range<u64> = 9_500..12_000;
/// Somebody else answers in the place of the service.
const STRANGE_MS_MAX: u64 = 3_000;
/// Blocks of a large file that is flushed in several grants, of one program of two nodes.
const HUGE_BLOCKS: u64 = 1_100;
const LARGE_BLOCKS: u64 = 16;

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
    /// Everything is encrypted.
    pub secure: bool,
    /// The service is in the first node's daemon.
    pub embedded: bool,
    /// The service's lease, where it is another one than usual.
    pub lease: Option<&'static str>,
    /// What becomes of the cluster at last.
    pub ending: Ending,
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

/// How a cluster ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All is unmounted.
    Unmount,
    /// All daemons and the service are killed, the service's state is lost, and `ebb recover` runs on all
    /// caches at the same time.
    Recover,
}

/// Kinds of faults, of which a plan has some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    Kills,
    /// Of the service, and of daemons under supervisors: what programs need not notice.
    Crashes,
    Stops,
    Links,
    Backing,
    Caches,
    /// Nodes with their caches, which needs a second copy.
    Losses,
    /// Something else answers in the place of the service.
    Strangers,
    /// Nodes that are silent for so long that they lose their locks.
    Silence,
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
    /// The service is away, and this answers where it was; then it is back.
    Instead(Stranger, Duration),
    /// A node stands still for longer than three leases.
    Silence(usize, Duration),
    /// Something that lasts a while, and perhaps a kill in the middle of it.
    While(Lasting, Duration, Option<Victim>),
}

/// Who is killed during another fault.
#[derive(Clone, Copy, Debug)]
pub enum Victim {
    Daemon(usize),
    Service,
}

/// What answers in the place of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stranger {
    /// The service with a copy of its state of before.
    OldState,
    /// The service without its state.
    NoState,
    /// A service of another job.
    OtherJob,
    /// Something that says what nobody understands.
    Garbage,
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
            secure: dice.random_bool(0.25),
            embedded: dice.random_bool(0.2),
            lease: None,
            ending: one(dice, &[Ending::Unmount, Ending::Recover]),
            rule: one(dice, &[None, None, Some("p*/s/*=posix")]),
            blocks: one(dice, &[0, 0, 0, 0, LARGE_BLOCKS, LARGE_BLOCKS, 64, 200, 200, HUGE_BLOCKS]),
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
        plan.draw_faults(dice);
        plan.keep_possible();
        if plan.faults.contains(&Family::Losses) {
            // A partner that has no room for copies refuses them: a loss then costs bytes.
            plan.cache_size = None;
        }
        plan
    }

    fn draw_faults(&mut self, dice: &mut ChaCha8Rng) {
        let families = [
            (Family::Kills, 0.6),
            (Family::Crashes, 0.4),
            (Family::Stops, 0.4),
            (Family::Links, 0.8),
            (Family::Backing, 0.8),
            (Family::Caches, 0.8),
            (Family::Losses, 0.7),
            (Family::Strangers, 0.25),
            (Family::Silence, 0.15),
        ];
        let drawn = families.into_iter().filter(|(_, chance)| dice.random_bool(*chance));
        self.faults = drawn.map(|(family, _)| family).collect();
        if self.faults.contains(&Family::Silence) {
            // What else makes a node silent, or takes locks away, could not be told from it.
            let others = [Family::Crashes, Family::Backing, Family::Caches, Family::Silence];
            self.faults.retain(|family| others.contains(family));
            (self.lease, self.embedded, self.replicas) = (Some(SHORT_LEASE), false, "1");
        }
    }

    /// Leaves out what this cluster cannot have.
    pub fn keep_possible(&mut self) {
        if self.io_path == "auto" {
            self.supervised = false;
        }
        if self.embedded {
            // It has its state in the first cache, and no place of its own on a network.
            (self.network, self.replicas, self.ending) = (false, "1", Ending::Unmount);
        }
        if self.replicas != "1" {
            // Copies of lost nodes are of no use without the service's state (docs/operations.md).
            self.ending = Ending::Unmount;
        }
        if self.secure {
            self.token = true;
        }
        if self.blocks == HUGE_BLOCKS {
            (self.nodes, self.loads_per_node) = (2, 1);
        }
        let embedded = self.embedded;
        let (network, caches) = (self.network, self.caches != Caches::Memory);
        let (backing, replicas) = (self.backing, self.replicas);
        self.faults.retain(|family| match family {
            Family::Kills | Family::Crashes | Family::Stops | Family::Silence => true,
            Family::Strangers => !embedded,
            Family::Links => network,
            Family::Backing => backing != Kind::Directory,
            Family::Caches => caches,
            Family::Losses => replicas == "2",
        });
        if self.faults.is_empty() {
            self.faults.push(Family::Kills);
        }
    }

    /// Files may sit at nodes that have them open past their daemons.
    pub fn may_sit(&self) -> bool {
        let strict = self.model == Model::Posix || self.rule.is_some_and(|r| r.ends_with("posix"));
        strict && self.io_path == "auto"
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
        let drawn = (0..count).map(|_| self.fault(one(dice, &families), dice));
        let mut drawn: Vec<Fault> = drawn.collect();
        // One silence in a round is long enough.
        let is_silence = |f: &Fault| matches!(f, Fault::Silence(..));
        let first = drawn.iter().position(is_silence);
        let mut at = 0..;
        drawn.retain(|f| at.next() == first || !is_silence(f));
        drawn
    }

    /// How many blocks the large file of a program has.
    pub fn blocks_of(&self, who: usize) -> u64 {
        match self.blocks {
            HUGE_BLOCKS if who > 0 => LARGE_BLOCKS,
            blocks => blocks,
        }
    }

    /// True when a daemon may be killed, or stand still, in a way that its programs notice.
    pub fn ends_daemons(&self) -> bool {
        self.faults.iter().any(|f| matches!(f, Family::Kills | Family::Losses))
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
            (Family::Crashes, 0..50) if self.supervised => Fault::CrashDaemon(node),
            // Without a supervisor the first daemon takes an embedded service with it, and its programs.
            (Family::Crashes, _) if self.embedded && !self.supervised => {
                lasting(Lasting::StopDaemon(0), up_to(dice, STOP_MS_MAX))
            }
            (Family::Crashes, _) if self.embedded => Fault::CrashDaemon(0),
            (Family::Crashes, _) => Fault::KillService(up_to(dice, 1_000)),
            (Family::Strangers, _) => {
                use Stranger::{Garbage, NoState, OldState, OtherJob};
                let which = one(dice, &[OldState, NoState, OtherJob, Garbage]);
                Fault::Instead(which, up_to(dice, STRANGE_MS_MAX))
            }
            (Family::Silence, _) => {
                Fault::Silence(node, Duration::from_millis(dice.random_range(SILENCE_MS)))
            }
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
        let victim = if dice.random_bool(0.4) && !self.embedded {
            Victim::Service
        } else {
            Victim::Daemon(other)
        };
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

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_testkit::random::generator;
    use std::collections::BTreeSet;

    /// Of what a run prints counters at its end, every kind is drawn soon: a plan that never has one of
    /// them tests nothing of it.
    #[test]
    fn every_kind_is_drawn_within_forty_seeds() {
        let mut drawn: BTreeSet<String> = BTreeSet::new();
        let mut note = |what: &str, of: &dyn std::fmt::Debug| {
            drawn.insert(format!("{what} {of:?}"));
        };
        for seed in 1..=40 {
            let mut dice = generator(seed);
            let plan = Plan::new(&mut dice);
            note("model", &plan.model);
            note("caches", &plan.caches);
            note("backing", &plan.backing);
            note("io-path", &plan.io_path);
            note("replicas", &plan.replicas);
            note("embedded", &plan.embedded);
            note("secure", &plan.secure);
            note("token", &plan.token);
            note("rule", &plan.rule.is_some());
            note("supervised", &plan.supervised);
            note("ending", &plan.ending);
            note("blocks", &plan.blocks);
            note("small cache", &plan.cache_size.is_some());
            note("locks", &!plan.ends_daemons());
            note("silence with locks", &(plan.lease.is_some() && !plan.ends_daemons()));
            plan.faults.iter().for_each(|family| note("faults", family));
            for _ in 0..10 {
                for fault in plan.faults(&mut dice) {
                    match fault {
                        Fault::Instead(which, _) => note("instead", &which),
                        Fault::While(what, ..) => {
                            let text = format!("{what:?}");
                            note("lasting", &text.split('(').next().expect("a name"));
                        }
                        fault => {
                            let text = format!("{fault:?}");
                            note("fault", &text.split('(').next().expect("a name"));
                        }
                    }
                }
            }
        }
        let all = [
            "model Posix, model Commit, model Session, model Mpiio",
            "caches Memory, caches Small, caches Disk",
            "backing Directory, backing Small, backing Disk, backing Quota",
            "io-path \"auto\", io-path \"daemon\", replicas \"1\", replicas \"2\"",
            "embedded true, embedded false, secure true, secure false, token true, token false",
            "rule true, supervised true, supervised false, small cache true, locks true, locks false",
            "ending Unmount, ending Recover, blocks 0, blocks 16, blocks 64, blocks 200, blocks 1100",
            "faults Kills, faults Crashes, faults Stops, faults Links, faults Backing, faults Caches",
            "faults Losses, faults Strangers, faults Silence, silence with locks true",
            "instead OldState, instead NoState, instead OtherJob, instead Garbage",
            "fault \"KillDaemon\", fault \"CrashDaemon\", fault \"KillService\", fault \"KillBoth\"",
            "fault \"LoseNode\", fault \"Silence\", lasting \"StopDaemon\", lasting \"StopService\"",
            "lasting \"Cut\", lasting \"Flap\", lasting \"Part\", lasting \"Spoil\"",
            "lasting \"FullBacking\", lasting \"HangingBacking\", lasting \"SlowBacking\"",
            "lasting \"FullCaches\"",
        ];
        let missing: Vec<&str> =
            all.iter().flat_map(|l| l.split(", ")).filter(|w| !drawn.contains(*w)).collect();
        assert!(missing.is_empty(), "never drawn: {missing:?}");
    }
}
