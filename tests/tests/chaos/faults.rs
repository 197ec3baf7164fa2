//! The hand that breaks things, and mends them.

use crate::backing::Backing;
use crate::plan::Fault;
use ebb_testkit::{Cluster, Node, describe};
use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::Duration;

/// What happened in a round, as far as programs may notice.
#[derive(Debug, Default)]
pub struct Hit {
    /// Nodes whose daemon was killed.
    pub killed: BTreeSet<usize>,
    pub was_full: bool,
}

pub struct Hand<'a> {
    cluster: &'a mut Cluster,
    backing: &'a Backing,
    hit: Hit,
}

impl<'a> Hand<'a> {
    pub fn new(cluster: &'a mut Cluster, backing: &'a Backing) -> Hand<'a> {
        Hand { cluster, backing, hit: Hit::default() }
    }

    /// When it returns, everything is there again.
    pub fn carry_out(&mut self, fault: Fault) {
        match fault {
            Fault::KillDaemon(node) => {
                self.kill_daemon(node);
                mount_again(self.cluster.node(node));
            }
            Fault::KillService(away) => {
                self.cluster.kill_meta();
                sleep(away);
                self.cluster.restart_meta();
            }
            Fault::KillBoth(node) => {
                self.cluster.kill_meta();
                self.kill_daemon(node);
                self.cluster.restart_meta();
                mount_again(self.cluster.node(node));
            }
            Fault::StopDaemon(node, time) => {
                stop(self.cluster.node(node).pid().expect("it is mounted"), time);
            }
            Fault::StopService(time) => stop(self.cluster.meta_pid(), time),
            Fault::FillBacking(time) => {
                self.backing.fill();
                self.hit.was_full = true;
                sleep(time);
                self.backing.make_room();
            }
        }
    }

    fn kill_daemon(&mut self, node: usize) {
        self.cluster.node(node).kill9();
        self.hit.killed.insert(node);
    }

    pub fn done(self) -> Hit {
        self.hit
    }
}

fn mount_again(node: &Node) {
    let output = node.ebb("umount", &[], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
    node.mount();
}

fn stop(pid: u32, time: Duration) {
    let pid = libc::pid_t::try_from(pid).expect("a process number");
    // SAFETY: signals to a process of our own that nobody else ends.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    sleep(time);
    // SAFETY: as above.
    unsafe { libc::kill(pid, libc::SIGCONT) };
}
