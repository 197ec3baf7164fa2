//! The hand that breaks things, and mends them.

use crate::backing::Backing;
use crate::instead;
use crate::plan::{Fault, Lasting, Victim};
use ebb_testkit::{Cluster, Network, Node, Port, describe};
use ebb_tests::copies::{clear, is_whole};
use std::collections::{BTreeMap, BTreeSet};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A spoiled link.
const DELAY: Duration = Duration::from_millis(60);
const LOST_PERCENT: u32 = 10;
const FLAP: Duration = Duration::from_millis(150);
/// The lease of a service, less what a test machine takes; shorter ones are for silences alone.
const ABOUT_A_LEASE: Duration = Duration::from_secs(9);
/// Until every unflushed byte has a copy.
const WHOLE_MAX: Duration = Duration::from_secs(60);

/// What happened in a round, as far as programs may notice.
#[derive(Debug, Default)]
pub struct Hit {
    /// Nodes whose daemon was killed.
    pub killed: BTreeSet<usize>,
    pub was_full: bool,
    /// A node was lost with its cache.
    pub was_lost: bool,
    /// Links were broken.
    pub was_cut: bool,
    /// Nodes that were silent for longer than the service waits for them.
    pub silent: BTreeSet<usize>,
    /// The same in a round before: not every program takes every lock in each.
    pub silent_before: bool,
    /// Nodes and the service did not hear each other for about a lease, or longer.
    pub was_unheard: bool,
    /// Something else answered in the place of the service.
    pub was_refused: bool,
    /// What took place, and how often.
    pub took_place: BTreeMap<String, u64>,
}

/// What can be broken.
pub struct Place<'a> {
    pub cluster: &'a mut Cluster,
    pub backing: &'a mut Backing,
    pub caches: Option<&'a Backing>,
    pub network: Option<&'a Network>,
    /// fsync says nothing of stable storage.
    pub syncs_nothing: bool,
}

pub struct Hand<'a> {
    at: Place<'a>,
    hit: Hit,
}

impl<'a> Hand<'a> {
    pub fn new(at: Place<'a>) -> Hand<'a> {
        Hand { at, hit: Hit::default() }
    }

    /// When it returns, everything is there again.
    pub fn carry_out(&mut self, fault: Fault) {
        *self.hit.took_place.entry(name_of(&fault)).or_default() += 1;
        match fault {
            Fault::KillDaemon(node) => {
                self.kill_daemon(node);
                mount_again(self.at.cluster.node(node));
            }
            Fault::CrashDaemon(node) => {
                let another = self.at.cluster.node(node).kill_daemon();
                assert!(another, "node {node}: no other daemon");
            }
            Fault::KillService(away) => self.kill_service(away),
            Fault::KillBoth(node) if !self.at.cluster.has_meta() => {
                // Both are one daemon here, so these are two.
                let other = if node == 0 { 1 } else { node };
                self.kill_daemon(0);
                self.kill_daemon(other);
                mount_again(self.at.cluster.node(0));
                mount_again(self.at.cluster.node(other));
            }
            Fault::KillBoth(node) => {
                self.at.cluster.kill_meta();
                self.kill_daemon(node);
                self.at.cluster.restart_meta();
                mount_again(self.at.cluster.node(node));
            }
            Fault::LoseNode(node) => {
                self.kill_daemon(node);
                let lost = self.at.cluster.node(node);
                std::fs::remove_dir_all(lost.cache()).expect("its cache goes, too");
                clear(lost);
                lost.mount();
                self.hit.was_lost = true;
            }
            Fault::Instead(which, time) => {
                self.hit.was_refused = true;
                let Place { cluster, network, syncs_nothing, .. } = &mut self.at;
                instead::answer(cluster, *network, *syncs_nothing, which, time);
            }
            Fault::Silence(node, time) => {
                self.switch(Lasting::StopDaemon(node), true);
                sleep(time);
                self.switch(Lasting::StopDaemon(node), false);
                self.hit.silent.insert(node);
            }
            Fault::While(what, time, victim) => {
                let unheard =
                    matches!(what, Lasting::Cut(_) | Lasting::StopDaemon(_) | Lasting::StopService);
                self.hit.was_unheard |= unheard && time > ABOUT_A_LEASE;
                self.switch(what, true);
                self.wait(what, time, victim);
                self.switch(what, false);
            }
        }
    }

    fn wait(&mut self, what: Lasting, time: Duration, victim: Option<Victim>) {
        let end = Instant::now() + time;
        if victim.is_some() {
            sleep(time / 2);
        }
        match victim {
            Some(Victim::Daemon(node)) => self.carry_out(Fault::KillDaemon(node)),
            Some(Victim::Service) => self.kill_service(Duration::ZERO),
            None => {}
        }
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            let Lasting::Flap(_) = what else { return sleep(left) };
            sleep(left.min(FLAP));
            self.switch(what, false);
            sleep(left.min(FLAP));
            self.switch(what, true);
        }
    }

    fn switch(&mut self, what: Lasting, on: bool) {
        let Place { cluster, backing, caches, network, .. } = &mut self.at;
        let network = || network.expect("links break where there is a network");
        let signal = if on { libc::SIGSTOP } else { libc::SIGCONT };
        match what {
            Lasting::StopDaemon(node) => {
                send(cluster.node(node).pid().expect("it is mounted"), signal);
            }
            Lasting::StopService if !cluster.has_meta() => {
                send(cluster.node(0).pid().expect("it is mounted"), signal);
            }
            Lasting::StopService => send(cluster.meta_pid(), signal),
            Lasting::Cut(port) | Lasting::Flap(port) if on => network().cut(port),
            Lasting::Cut(port) | Lasting::Flap(port) => network().join(port),
            Lasting::Part(a, b) => network().part(Port::Node(a), Port::Node(b), on),
            Lasting::Spoil(port) if on => network().spoil(port, DELAY, LOST_PERCENT),
            Lasting::Spoil(port) => network().repair(port),
            Lasting::HangingBacking => backing.hang(on),
            Lasting::SlowBacking => {
                let slowed = backing.slow_down(on);
                slowed.unwrap_or_else(|why| println!("no slow disks here: {why}"));
            }
            Lasting::FullBacking => backing.fill(on),
            Lasting::FullCaches => caches.expect("small ones").fill(on),
        }
        self.hit.was_full |= matches!(what, Lasting::FullBacking | Lasting::FullCaches);
        let links = matches!(
            what,
            Lasting::Cut(_) | Lasting::Flap(_) | Lasting::Part(..) | Lasting::Spoil(_)
        );
        self.hit.was_cut |= links;
    }

    fn kill_daemon(&mut self, node: usize) {
        self.at.cluster.node(node).kill9();
        self.hit.killed.insert(node);
    }

    fn kill_service(&mut self, away: Duration) {
        if !self.at.cluster.has_meta() {
            self.kill_daemon(0);
            sleep(away);
            return mount_again(self.at.cluster.node(0));
        }
        self.at.cluster.kill_meta();
        sleep(away);
        self.at.cluster.restart_meta();
    }

    pub fn done(self) -> Hit {
        self.hit
    }
}

/// Without what it is done to.
fn name_of(fault: &Fault) -> String {
    let text = match fault {
        Fault::Instead(which, _) => format!("Instead{which:?}"),
        Fault::While(what, ..) => format!("{what:?}"),
        fault => format!("{fault:?}"),
    };
    text.split('(').next().unwrap_or_default().to_owned()
}

fn mount_again(node: &Node) {
    let output = node.ebb("umount", &[], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
    node.mount();
}

fn send(pid: u32, signal: i32) {
    let pid = libc::pid_t::try_from(pid).expect("a process number");
    // SAFETY: a signal to a process of our own that nobody else ends.
    unsafe { libc::kill(pid, signal) };
}

/// Waits until everything unflushed has a copy, and nothing of a lost node waits to be adopted.
pub fn wait_until_whole(cluster: &Cluster, what: &str) {
    let end = Instant::now() + WHOLE_MAX;
    loop {
        let status: Vec<_> = cluster.nodes().iter().map(Node::status).collect();
        if is_whole(&status) {
            return;
        }
        let copies: Vec<_> = status.iter().map(|s| &s["copies"]).collect();
        assert!(Instant::now() < end, "{what}: still not whole: {copies:#?}");
        sleep(Duration::from_millis(50));
    }
}
