//! Chaos: several nodes with programs that write, and a hand that kills, stops and fills whatever
//! it likes. After each round, and on the backing at the end, every acknowledged byte and name
//! must be right. `make chaos SECONDS=60 [SEED=n]`; `make test` leaves it out: some seeds still
//! find what docs/testing.md lists.
//!
//! The seed decides the cluster, the operations and the faults; which operation a fault hits is a
//! matter of the machine. A run leaves its events, curves of memory, descriptors and cache bytes,
//! and, when something was wrong, the last operations of the program that found it, in
//! `target/chaos/SEED/`.

mod backing;
mod faults;
mod plan;
mod record;

use backing::Backing;
use ebb_testkit::node::is_running;
use ebb_testkit::{Cluster, random, skip_reason};
use ebb_tests::load::{Load, Mix, Order, Setup, Work, all_right};
use ebb_tests::tools::amount;
use faults::Hand;
use plan::Plan;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use record::Record;
use std::path::Path;
use std::time::{Duration, Instant};

/// For everything that a program does until it answers.
const ANSWER_MAX: Duration = Duration::from_secs(90);
/// After so many rounds everything is unmounted, compared, and mounted again.
const DRAINED_EVERY: u64 = 6;

#[test]
#[ignore = "runs as long as it is told to: `make chaos SECONDS=60`"]
fn chaos() {
    if skip_reason().is_some() {
        return;
    }
    let (seed, seconds) = (random::seed(), amount("EBB_CHAOS_SECONDS", 60));
    let _replay = Replay { seed, seconds };
    let mut dice = random::generator(seed);
    let plan = Plan::new(&mut dice);
    let mut run = Run::start(plan, seed, dice);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut round = 0;
    while Instant::now() < end {
        round += 1;
        run.round(round);
        if round.is_multiple_of(DRAINED_EVERY) {
            run.drain(&format!("seed {seed}, drained after round {round}"));
            run.cluster.nodes().iter().for_each(ebb_testkit::Node::mount);
        }
    }
    run.drain(&format!("seed {seed}, drained"));
    run.record.total(round);
}

/// Says how to do it again when it failed.
struct Replay {
    seed: u64,
    seconds: u64,
}

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Replay { seed, seconds } = self;
            eprintln!("VIOLATION. To replay it: make chaos SECONDS={seconds} SEED={seed}");
        }
    }
}

struct Run {
    seed: u64,
    plan: Plan,
    dice: ChaCha8Rng,
    loads: Vec<Load>,
    record: Record,
    cluster: Cluster,
    /// Behind the cluster: what it mounts must outlive the daemons.
    backing: Backing,
}

impl Run {
    fn start(plan: Plan, seed: u64, dice: ChaCha8Rng) -> Run {
        let mut record = Record::new(seed);
        record.event(&format!("{plan:?}"));
        let backing = Backing::new(plan.backing);
        let mut builder = Cluster::builder()
            .nodes(plan.nodes)
            .consistency(plan.model.name())
            .flush(plan.flush)
            .option("--durability", plan.durability)
            .option("--request-timeout", "30s")
            .separate_meta()
            // A killed process is gone when its last fsync is, which a busy disk can make long.
            .below("/dev/shm")
            .backing(backing.path());
        if let Some(size) = plan.cache_size {
            builder = builder.option("--cache-size", size);
        }
        let cluster = builder.start();
        let of = plan.nodes * plan.loads_per_node;
        let loads = (0..of).map(|who| start_load(&cluster, &plan, &record, seed, who, of));
        Run { seed, loads: loads.collect(), plan, dice, record, cluster, backing }
    }

    fn round(&mut self, round: u64) {
        let what = format!("seed {}, round {round}", self.seed);
        self.loads.iter_mut().for_each(|load| load.tell(&Order::Go { round }));
        let mut hand = Hand::new(&mut self.cluster, &self.backing);
        for _ in 0..self.dice.random_range(1..4) {
            let before = Duration::from_millis(self.dice.random_range(20..500));
            std::thread::sleep(before);
            let fault = self.plan.fault(&mut self.dice);
            self.record.event(&format!("round {round}: {fault:?}"));
            hand.carry_out(fault);
        }
        let hit = hand.done();
        std::thread::sleep(Duration::from_millis(self.dice.random_range(50..400)));
        self.loads.iter_mut().for_each(|load| load.tell(&Order::Pause));
        for load in &self.loads {
            let work = load.paused(ANSWER_MAX);
            let node = load.setup.who as usize % self.plan.nodes;
            judge_failure(&what, node, &work, hit.killed.contains(&node), hit.was_full);
            self.record.add(&work);
        }
        all_right(&mut self.loads, ANSWER_MAX, |_| Order::Settle(what.clone()));
        all_right(&mut self.loads, ANSWER_MAX, |setup| Order::Compare {
            what: format!("{what}, on another node"),
            root: setup.elsewhere.clone(),
        });
        self.all_alive(&what);
        self.record.sample(round, &self.cluster);
    }

    /// Nothing died but what was killed.
    fn all_alive(&self, what: &str) {
        assert!(is_running(self.cluster.meta_pid()), "{what}: the service is gone");
        for node in self.cluster.nodes() {
            let pid = node.pid().expect("it is mounted");
            assert!(is_running(pid), "{what}: {} is gone", node.name());
            assert!(!node.log().contains("panicked"), "{what}: {} panicked", node.name());
        }
    }

    /// Everything must be on the backing, and the same there.
    fn drain(&mut self, what: &str) {
        self.cluster.umount_all();
        all_right(&mut self.loads, ANSWER_MAX, |_| Order::Compare {
            what: what.to_owned(),
            root: self.backing.path().to_owned(),
        });
        self.record.event(what);
    }
}

fn start_load(
    cluster: &Cluster,
    plan: &Plan,
    record: &Record,
    seed: u64,
    who: usize,
    of: usize,
) -> Load {
    let (node, elsewhere) = (who % plan.nodes, (who + 1 + who / plan.nodes) % plan.nodes);
    let setup = Setup {
        model: plan.model,
        mix: Mix::All,
        seed,
        who: who as u64,
        of: of as u64,
        root: cluster.node(node).mountpoint().to_owned(),
        elsewhere: cluster.node(elsewhere).mountpoint().to_owned(),
        log: record.directory().join(format!("operations-{who}")),
    };
    Load::start(Path::new(env!("CARGO_BIN_EXE_ebb-load")), setup)
}

/// An operation may fail when its own daemon was killed, or for want of space on the backing.
fn judge_failure(what: &str, node: usize, work: &Work, was_killed: bool, was_full: bool) {
    let Some(failure) = &work.failure else { return };
    let is_for_space = was_full && [libc::ENOSPC, libc::EDQUOT].contains(&failure.errno);
    assert!(was_killed || is_for_space, "{what}: node {node}: {failure:?}");
}
