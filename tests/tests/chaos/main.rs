//! Chaos: several nodes with programs that write, and a hand that kills, stops, cuts, fills and
//! slows whatever it likes. After each round, and on the backing now and then, every acknowledged
//! byte and name must be right; at the end nothing may have leaked. `make chaos SECONDS=60
//! [SEED=n] [ROUNDS=n]`, where ROUNDS is after how many rounds another cluster is drawn.
//!
//! The seed decides the cluster, the operations and the faults; which operation a fault hits is a
//! matter of the machine. Each further cluster has the next seed, which alone repeats it. A run
//! leaves its events, curves of what its processes use, and, when something was wrong, the last
//! operations of the program that found it, in `target/chaos/SEED/`.

mod backing;
mod ending;
mod faults;
mod instead;
mod judge;
mod leaks;
mod plan;
mod record;

use backing::{Backing, Kind};
use ebb_testkit::node::is_running;
use ebb_testkit::{Cluster, Network, Node, random, skip_reason};
use ebb_tests::load::{Extra, Load, Mix, Order, Setup, all_right, counted};
use ebb_tests::tools::amount;
use faults::{Hand, Hit, Place, wait_until_whole};
use judge::judge;
use plan::{Caches, Ending, Family, Fault, Plan};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use record::{Moment, Record};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// For everything that a program does until it answers.
const ANSWER_MAX: Duration = Duration::from_secs(150);
/// What the daemons are told about remote requests.
const REQUEST_TIMEOUT: &str = "30s";
/// After so many rounds everything is drained and compared.
const DRAINED_EVERY: u64 = 6;
/// What supervisors say of each daemon that they replace, and of those that the test has killed.
const ANOTHER_DAEMON: &str = "; starting another one";
const WAS_KILLED: &str = "the daemon ended: killed by signal 9; starting another one";
/// What a daemon says of a program that wrote past the one before it, when that was dead.
const WRITTEN_ON: &str = "a program of a dead daemon goes on writing";
/// More than all programs write, several times.
const CACHES_MIB: u64 = 400;

#[test]
#[ignore = "runs as long as it is told to: `make chaos SECONDS=60`"]
fn chaos() {
    if skip_reason().is_some() {
        return;
    }
    let (first, seconds) = (random::seed(), amount("EBB_CHAOS_SECONDS", 60));
    let rounds = amount("EBB_CHAOS_ROUNDS", u64::MAX);
    let end = Instant::now() + Duration::from_secs(seconds);
    for seed in first.. {
        let _replay = Replay { seed, seconds: if rounds == u64::MAX { seconds } else { 300 } };
        one_cluster(seed, rounds, end);
        if Instant::now() >= end {
            return;
        }
    }
}

fn one_cluster(seed: u64, rounds: u64, end: Instant) {
    let mut dice = random::generator(seed);
    let plan = Plan::new(&mut dice);
    let mut run = Run::start(plan, seed, dice);
    let mut round = 0;
    while Instant::now() < end && round < rounds {
        round += 1;
        run.round(round);
        if round.is_multiple_of(DRAINED_EVERY) {
            run.drain(round, &format!("seed {seed}, drained after round {round}"));
        }
    }
    match run.plan.ending {
        Ending::Unmount => run.end(&format!("seed {seed}, unmounted")),
        Ending::Recover => run.recover(&format!("seed {seed}, recovered")),
    }
    run.record.judge_leaks(&format!("seed {seed}"));
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
    /// Behind the cluster: what it uses must outlive the daemons.
    backing: Backing,
    caches: Option<Backing>,
    network: Option<Arc<Network>>,
    was_silent: bool,
    /// Nodes whose daemon was killed since the last drain.
    killed: BTreeSet<usize>,
    /// Where programs send each other messages.
    _post: TempDir,
}

/// What this machine cannot do is left out of the plan, and said.
fn or_without<T>(record: &mut Record, what: &str, made: Result<T, String>) -> Option<T> {
    made.inspect_err(|why| record.event(&format!("left out: {what}: {why}"))).ok()
}

impl Run {
    fn start(mut plan: Plan, seed: u64, dice: ChaCha8Rng) -> Run {
        let mut record = Record::new(seed);
        record.event(&format!("seed {seed}: {plan:?}"));
        let backing = or_without(&mut record, "this backing", Backing::new(plan.backing));
        let backing = backing.unwrap_or_else(|| {
            plan.backing = Kind::Directory;
            Backing::new(plan.backing).expect("a directory needs nothing")
        });
        let network = plan.network.then(|| Network::new(plan.nodes));
        let network =
            network.and_then(|n| or_without(&mut record, "broken links", n)).map(Arc::new);
        if network.as_ref().is_some_and(|n| !n.has_netem()) {
            record.event("no netem: spoiled links are narrow ones with a short queue");
        }
        let caches = match plan.caches {
            Caches::Memory => None,
            Caches::Small => Some(Backing::of_mib(Kind::Small, CACHES_MIB)),
            Caches::Disk => Some(Backing::of_mib(Kind::Disk, CACHES_MIB)),
        };
        let caches = caches.and_then(|c| or_without(&mut record, "full cache disks", c));
        plan.network = network.is_some();
        if caches.is_none() {
            plan.caches = Caches::Memory;
        }
        plan.keep_possible();
        let cluster = start_cluster(&plan, &backing, caches.as_ref(), network.as_ref());
        let of = plan.nodes * plan.loads_per_node;
        let post = TempDir::with_prefix("ebb-post-").expect("a directory for sockets");
        let start = |who| start_load(&cluster, &plan, (&record, post.path()), seed, who, of);
        let loads = (0..of).map(start).collect();
        record.count("embedded services", u64::from(plan.embedded));
        record.count("encrypted clusters", u64::from(plan.secure));
        let was_silent = false;
        Run {
            seed,
            loads,
            plan,
            dice,
            record,
            cluster,
            backing,
            caches,
            network,
            was_silent,
            killed: BTreeSet::new(),
            _post: post,
        }
    }

    fn round(&mut self, round: u64) {
        let what = format!("seed {}, round {round}", self.seed);
        let faults = self.plan.faults(&mut self.dice);
        if faults.iter().any(|f| matches!(f, Fault::LoseNode(_))) {
            wait_until_whole(&self.cluster, &what);
        }
        self.loads.iter_mut().for_each(|load| load.tell(&Order::Go { round }));
        let mut hit = self.carry_out(round, faults);
        hit.silent_before = self.was_silent;
        self.was_silent |= !hit.silent.is_empty();
        self.killed.extend(&hit.killed);
        std::thread::sleep(Duration::from_millis(self.dice.random_range(50..400)));
        self.loads.iter_mut().for_each(|load| load.tell(&Order::Pause));
        for load in &self.loads {
            let work = load.paused(ANSWER_MAX);
            let node = load.setup.who as usize % self.plan.nodes;
            judge(&what, node, &work, &hit, self.plan.may_sit());
            self.record.add(&work);
        }
        hit.took_place.iter().for_each(|(fault, n)| self.record.count(fault, *n));
        if hit.was_lost {
            // What it was just publishing may come from its partner until then.
            wait_until_whole(&self.cluster, &what);
        }
        all_right(&mut self.loads, ANSWER_MAX, |_| Order::Settle(what.clone()));
        all_right(&mut self.loads, ANSWER_MAX, |setup| Order::Compare {
            what: format!("{what}, on another node"),
            root: setup.elsewhere.clone(),
        });
        let found = counted(self.cluster.node(0).mountpoint());
        self.record.judge_count(&what, found, !hit.silent.is_empty());
        self.all_alive(&what);
        self.record.sample(round, Moment::AfterRound, &self.cluster);
    }

    fn carry_out(&mut self, round: u64, faults: Vec<Fault>) -> Hit {
        let mut hand = Hand::new(Place {
            cluster: &mut self.cluster,
            backing: &mut self.backing,
            caches: self.caches.as_ref(),
            network: self.network.as_deref(),
            syncs_nothing: self.plan.durability == "none",
        });
        for fault in faults {
            std::thread::sleep(Duration::from_millis(self.dice.random_range(20..500)));
            self.record.event(&format!("round {round}: {fault:?}"));
            hand.carry_out(fault);
        }
        hand.done()
    }

    /// Nothing died but what was killed.
    fn all_alive(&self, what: &str) {
        let service = self.cluster.has_meta().then(|| self.cluster.meta_pid());
        assert!(service.is_none_or(is_running), "{what}: the service is gone");
        for node in self.cluster.nodes() {
            let pid = node.pid().expect("it is mounted");
            assert!(is_running(pid), "{what}: {} is gone", node.name());
            let log = node.log();
            assert!(!log.contains("panicked"), "{what}: {} panicked", node.name());
            let others = log.lines().filter(|line| line.contains(ANOTHER_DAEMON));
            for line in others {
                assert!(line.contains(WAS_KILLED), "{what}: {}: {line}", node.name());
            }
        }
    }

    /// Everything must be on the backing, and the same there.
    fn drain(&mut self, round: u64, what: &str) {
        if self.plan.remounts {
            self.end(what);
            self.cluster.nodes().iter().for_each(Node::mount);
            return;
        }
        self.drain_nodes(|_| true);
        self.compare_backing(what);
        self.record.sample(round, Moment::Drained, &self.cluster);
    }

    fn drain_nodes(&mut self, which: impl Fn(&Node) -> bool) {
        let mut late = 0;
        for (at, node) in self.cluster.nodes().iter().enumerate().filter(|(_, node)| which(node)) {
            let written = ending::drain_but_late_writes(node);
            assert!(written == 0 || self.killed.contains(&at), "node {at}: no daemon was killed");
            late += written;
        }
        self.killed.clear();
        assert!(late == 0 || self.plan.io_path != "daemon", "{late} files written past no daemon");
        self.record.count("files that programs wrote to past dead daemons", late);
    }

    fn end(&mut self, what: &str) {
        self.cluster.nodes().iter().for_each(|node| self.record.add_status(&node.status()));
        self.drain_nodes(|node| node.log().contains(WRITTEN_ON));
        self.cluster.umount_all();
        self.compare_backing(what);
    }

    /// Nothing is left but the caches.
    fn recover(&mut self, what: &str) {
        self.cluster.nodes().iter().for_each(|node| self.record.add_status(&node.status()));
        let (count, unsure) = ending::recover_side_by_side(&mut self.cluster, what);
        self.record.count("recoveries side by side", count);
        self.record.count("recoveries that call something missing", unsure);
        self.compare_backing(what);
        self.record.judge_count(what, counted(&self.backing.path()), false);
    }

    fn compare_backing(&mut self, what: &str) {
        let root = self.backing.path();
        all_right(&mut self.loads, ANSWER_MAX, |_| Order::Compare {
            what: what.to_owned(),
            root: root.clone(),
        });
        self.record.event(what);
    }
}

fn start_cluster(
    plan: &Plan,
    backing: &Backing,
    caches: Option<&Backing>,
    network: Option<&Arc<Network>>,
) -> Cluster {
    let mut builder = Cluster::builder()
        .nodes(plan.nodes)
        .consistency(plan.model.name())
        .flush(plan.flush)
        .option("--durability", plan.durability)
        .option("--replicas", plan.replicas)
        .option("--request-timeout", REQUEST_TIMEOUT)
        .option("--io-path", plan.io_path)
        // A killed process is gone when its last fsync is, which a busy disk can make long.
        .below("/dev/shm")
        .backing(backing.path());
    if plan.supervised {
        builder = builder.supervised();
    }
    builder = if plan.embedded { builder.fixed_port() } else { builder.separate_meta() };
    if let Some(lease) = plan.lease {
        builder = builder.lease(lease);
    }
    if plan.token {
        builder = builder.token();
    }
    if plan.secure {
        builder = builder.option("--secure", "on");
    }
    if let Some(rule) = plan.rule {
        builder = builder.option("--rule", rule);
    }
    if let Some(size) = plan.cache_size {
        builder = builder.option("--cache-size", size);
    }
    if let Some(caches) = caches {
        builder = builder.caches_below(caches.path());
    }
    if let Some(network) = network {
        builder = builder.network(Arc::clone(network));
    }
    builder.start()
}

fn start_load(
    cluster: &Cluster,
    plan: &Plan,
    (record, post): (&Record, &Path),
    seed: u64,
    who: usize,
    of: usize,
) -> Load {
    let (node, elsewhere) = (who % plan.nodes, (who + 1 + who / plan.nodes) % plan.nodes);
    let setup = Setup {
        model: plan.model,
        mix: if plan.ends_daemons() { Mix::Wide } else { Mix::Locks },
        seed,
        who: who as u64,
        of: of as u64,
        root: cluster.node(node).mountpoint().to_owned(),
        elsewhere: cluster.node(elsewhere).mountpoint().to_owned(),
        blocks: plan.blocks_of(who),
        extra: Extra {
            post: Some(post.to_owned()),
            past: plan.io_path != "daemon",
            loses_locks: plan.faults.contains(&Family::Silence),
        },
        log: record.directory().join(format!("operations-{who}")),
    };
    Load::start(Path::new(env!("CARGO_BIN_EXE_ebb-load")), setup)
}
