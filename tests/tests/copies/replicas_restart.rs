//! `--replicas 2`: what a node keeps for others outlives its daemon. The partner is killed and mounted
//! again on its old cache: before its owner is lost, after it, and while it adopts.

use ebb_testkit::{Node, describe, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::copies::{
    LEASE_MAX, adopted, builder, clear, cluster, copies, has_partner, lose, on_backing, partner_of,
    store, wait_adopted,
};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

fn mount_again(node: &Node) {
    clear(node);
    node.mount();
}

/// Both are dead before either has noticed anything of the other; the partner has its cache.
fn partner_comes_back(model: &str) {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(2, model);
    let (owner, partner) = (cluster.node(0), cluster.node(1));
    let (theirs, own) = (bytes(1, 1, 0, 700_000), bytes(1, 2, 0, 90_000));
    store(owner, "theirs", &theirs);
    store(partner, "own", &own);
    // A part that the partner has written over: of that the copy is not the newest.
    let mut want = theirs;
    let over = bytes(1, 3, 0, 60_000);
    let file = File::options().write(true).open(partner.path("theirs")).expect("open");
    file.write_all_at(&over, 200_000).expect("write");
    file.sync_all().expect("fsync");
    drop(file);
    want[200_000..260_000].copy_from_slice(&over);
    // Flushed: its copies are dropped.
    store(owner, "short", &own);
    has_partner(owner);
    owner.signal(rustix::process::Signal::STOP);
    partner.kill9();
    lose(owner);
    mount_again(partner);
    wait_adopted(partner, 600_000);
    let files = [("theirs", &want), ("own", &own), ("short", &own)];
    for (name, want) in files {
        same(name, &fs::read(partner.path(name)).expect("read"), want);
    }
    // Nothing is kept twice.
    partner.wait_status(LEASE_MAX, |s| s["copies"]["held_sets"] == 0);
    clear(owner);
    partner.umount();
    assert!(!partner.cache().join("copies").exists(), "a clean end leaves nothing");
    files.iter().for_each(|(name, want)| on_backing(&cluster, name, want));
}

#[test]
fn copies_outlive_the_partners_daemon_under_session() {
    partner_comes_back("session");
}

#[test]
fn copies_outlive_the_partners_daemon_under_posix() {
    partner_comes_back("posix");
}

/// Killed again and again while it takes over what the lost node had. What the service has moved
/// and the daemon had not stored yet is in the copies.
#[test]
fn a_partner_that_dies_while_it_adopts_goes_on_after_it() {
    if skip_reason().is_some() {
        return;
    }
    const FILES: u64 = 300;
    let cluster = cluster(3, "commit");
    let at = partner_of(&cluster, 0);
    let (owner, partner, third) = (cluster.node(0), cluster.node(at), cluster.node(3 - at));
    let content = |i: u64| bytes(2, i, 0, 150_000 + i);
    (0..FILES).for_each(|i| store(owner, &format!("f{i}"), &content(i)));
    has_partner(owner);
    lose(owner);
    // Silent and not connected: the service gives the bytes to the partner at once.
    same("f0", &fs::read(third.path("f0")).expect("read"), &content(0));
    let held = |node: &Node| copies(node)["held_bytes"].as_u64().expect("a number");
    let mut kills = 0;
    for wait_ms in [0, 5, 15, 30, 50, 80] {
        let before = held(partner);
        let start = Instant::now();
        while held(partner) == before && start.elapsed() < LEASE_MAX && before > 0 {}
        std::thread::sleep(Duration::from_millis(wait_ms));
        partner.kill9();
        kills += 1;
        mount_again(partner);
    }
    let left = |s: &serde_json::Value| s["copies"]["held_bytes"] == 0;
    partner.wait_status(LEASE_MAX, left);
    let resumed = partner.log().matches("adopted by an earlier daemon").count();
    println!("{kills} kills, {resumed} files resumed, then adopted: {}", adopted(partner));
    for node in [partner, third] {
        for i in 0..FILES {
            let name = format!("f{i}");
            same(&name, &fs::read(node.path(&name)).expect("read"), &content(i));
        }
    }
    clear(owner);
    third.umount();
    partner.umount();
    (0..FILES).for_each(|i| on_backing(&cluster, &format!("f{i}"), &content(i)));
}

/// The owner lives: it says that it is alone, and how much of it; then it copies everything again.
#[test]
fn an_owner_whose_partner_was_restarted_copies_again() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(2, "session");
    let (owner, partner) = (cluster.node(0), cluster.node(1));
    let data = bytes(1, 1, 0, 500_000);
    store(owner, "f", &data);
    has_partner(owner);
    partner.kill9();
    owner.wait_status(LEASE_MAX, |s| s["copies"]["uncopied_bytes"] == 500_000);
    let screen = owner.ebb("status", &[], &[]);
    let text = String::from_utf8_lossy(&screen.stdout);
    assert!(text.contains("here alone"), "{}", describe(&screen));
    mount_again(partner);
    has_partner(owner);
    partner.wait_status(LEASE_MAX, |s| {
        s["copies"]["held_sets"] == 1 && s["copies"]["held_bytes"] == 500_000
    });
    lose(owner);
    same("f", &fs::read(partner.path("f")).expect("read"), &data);
    clear(owner);
    partner.umount();
    on_backing(&cluster, "f", &data);
}

/// Nobody can be asked whose the copies are: the partner's end is no clean one, and they stay.
#[test]
fn copies_of_a_lost_node_are_not_thrown_away_while_the_service_is_away() {
    if skip_reason().is_some() {
        return;
    }
    let mut cluster = cluster(2, "session");
    let data = bytes(1, 1, 0, 400_000);
    store(cluster.node(0), "f", &data);
    has_partner(cluster.node(0));
    cluster.kill_meta();
    lose(cluster.node(0));
    let start = Instant::now();
    let output = cluster.node(1).ebb("umount", &["--timeout", "5s"], &[]);
    println!("{:?}: {}", start.elapsed(), describe(&output));
    assert!(!output.status.success(), "{}", describe(&output));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    cluster.restart_meta();
    if cluster.node(1).ebb("status", &[], &[]).status.success() {
        cluster.node(1).kill9();
    }
    mount_again(cluster.node(1));
    wait_adopted(cluster.node(1), 400_000);
    same("f", &fs::read(cluster.node(1).path("f")).expect("read"), &data);
    clear(cluster.node(0));
    cluster.node(1).umount();
    on_backing(&cluster, "f", &data);
}

/// The service was part of the lost node: it was said before, and what is lost is an error.
#[test]
fn a_service_that_is_lost_with_its_node_is_an_error_and_was_said_before() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = builder(2, "session").prepare();
    let first = cluster.node(0);
    let output = first.mount_command(&[]).output().expect("mount");
    let said = describe(&output);
    assert!(output.status.success() && said.contains("--replicas 2 without --meta"), "{said}");
    clear(first);
    first.mount();
    cluster.node(1).mount();
    cluster.nodes().iter().for_each(has_partner);
    assert_eq!(copies(first)["lost_with_this_node"], true);
    assert_eq!(copies(cluster.node(1))["lost_with_this_node"], false);
    let (theirs, own) = (bytes(1, 1, 0, 300_000), bytes(1, 2, 0, 200_000));
    store(first, "theirs", &theirs);
    store(cluster.node(1), "own", &own);
    lose(first);
    let start = Instant::now();
    let error = fs::read(cluster.node(1).path("theirs")).expect_err("nobody knows where it is");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    println!("{:?}: {error}", start.elapsed());
    let output = cluster.node(1).ebb("umount", &["--timeout", "5s"], &[]);
    println!("{}", describe(&output));
    assert!(!output.status.success(), "{}", describe(&output));
    if cluster.node(1).ebb("status", &[], &[]).status.success() {
        cluster.node(1).kill9();
    }
    clear(cluster.node(1));
    // What the other node itself had is brought to the backing without a service.
    let cache = cluster.node(1).cache().display().to_string();
    let backing = cluster.backing().display().to_string();
    let output = cluster.run_ebb(&["recover", &cache, "--backing", &backing]);
    assert!(output.status.success(), "{}", describe(&output));
    on_backing(&cluster, "own", &own);
    assert!(!cluster.backing().join("theirs").exists(), "nothing is made up");
    clear(first);
}
