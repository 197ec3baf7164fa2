//! What was done to names in the last moment of a daemon, and the service did, comes back without the
//! service, too: a daemon that took the cache over has asked what came of it.

use crate::recovery_names::{assert_same, tree};
use ebb_testkit::{Cluster, Node, skip_reason};
use ebb_tests::recoveries::{all_die, ended_with, recover};
use std::time::Duration;

/// Journals are written once a second.
const WRITTEN_AFTER: Duration = Duration::from_millis(1_500);
/// A request is on its way to the service, which stands still.
const SENT_AFTER: Duration = Duration::from_millis(300);

fn signal(pid: u32, signal: libc::c_int) {
    // SAFETY: a signal to a process of our own that nobody else ends.
    unsafe { libc::kill(libc::pid_t::try_from(pid).expect("a process number"), signal) };
}

/// The daemon is killed, and another one takes its place.
fn replace(node: &Node, supervised: bool) {
    if supervised {
        assert!(node.kill_daemon(), "no other daemon");
        return;
    }
    node.kill9();
    let _ = node.ebb("umount", &[], &[]);
    node.mount();
}

fn clusters() -> impl Iterator<Item = (Cluster, bool)> {
    let ways = [("posix", false), ("session", false), ("session", true)];
    let ways = ways.into_iter().filter(|_| skip_reason().is_none());
    ways.map(|(model, supervised)| {
        let builder = Cluster::builder().separate_meta().flush("end").consistency(model);
        let builder = if supervised { builder.supervised() } else { builder };
        (builder.start(), supervised)
    })
}

/// Everything else is gone, and the only cache has all of it.
fn comes_back(cluster: &mut Cluster) {
    let wanted = tree(cluster.node(0).mountpoint());
    let tags = tags(cluster.node(0).mountpoint());
    std::thread::sleep(WRITTEN_AFTER);
    all_die(cluster);
    assert!(tree(cluster.backing()).len() < wanted.len(), "it is not on the backing");
    ended_with(&recover(cluster, cluster.node(0), &[]), 0, &[]);
    assert_same(&tree(cluster.backing()), &wanted);
    assert_eq!(self::tags(cluster.backing()), tags);
}

/// The extended attributes of the files named f.
fn tags(root: &std::path::Path) -> String {
    let mut shown = std::process::Command::new("sh");
    shown.args(["-c", "getfattr -R -d -m user. . | sort"]).current_dir(root);
    String::from_utf8_lossy(&shown.output().expect("getfattr").stdout).into_owned()
}

#[test]
fn what_was_done_just_before_the_daemon_was_killed_comes_back() {
    for (mut cluster, supervised) in clusters() {
        let node = cluster.node(0);
        for round in 0..3 {
            node.shell(&format!(
                "mkdir -p {round}/a/b {round}/c && : > {round}/f && : > {round}/gone"
            ));
            std::thread::sleep(WRITTEN_AFTER);
            node.shell(&format!(
                "cd {round} && mv a/b c/b && mkdir new && rm gone && ln -s x link && ln f g && \
                 chmod 600 f && setfattr -n user.tag -v {round} f"
            ));
            replace(node, supervised);
        }
        comes_back(&mut cluster);
    }
}

#[test]
fn what_the_service_did_and_nobody_heard_comes_back() {
    const CHANGES: [&str; 6] = [
        "mkdir d/new",
        "mv d/from d/to",
        "rm d/gone",
        "setfattr -n user.tag -v 1 d/f",
        "chmod 640 d/f",
        "ln d/f d/second",
    ];
    for (mut cluster, supervised) in clusters() {
        let node = cluster.node(0);
        node.shell("mkdir -p d/from && : > d/f && : > d/gone && chmod 600 d/f");
        std::thread::sleep(WRITTEN_AFTER);
        let mut done = 0;
        for change in CHANGES {
            let before = (tree(node.mountpoint()), tags(node.mountpoint()));
            let service = cluster.meta_pid();
            std::thread::scope(|scope| {
                // Found before, so that it has nothing else to ask.
                scope.spawn(|| {
                    signal(service, libc::SIGSTOP);
                    let mut program = std::process::Command::new("sh");
                    let _ = program.args(["-c", change]).current_dir(node.mountpoint()).output();
                });
                std::thread::sleep(SENT_AFTER);
                if supervised {
                    scope.spawn(|| {
                        std::thread::sleep(SENT_AFTER);
                        signal(service, libc::SIGCONT);
                    });
                    return replace(node, true);
                }
                node.kill9();
                signal(service, libc::SIGCONT);
            });
            if !supervised {
                let _ = node.ebb("umount", &[], &[]);
                node.mount();
            }
            done += u64::from(before != (tree(node.mountpoint()), tags(node.mountpoint())));
        }
        assert!(done >= 3, "only {done} of {} were done", CHANGES.len());
        comes_back(&mut cluster);
    }
}
