//! A standby keeps a copy of the service's journal and takes its place when it falls silent, by itself: nobody says
//! so. What was on stable storage is there, and never do two of them answer.

use super::service_moves::{
    begun, builder, content, goes_on, has_told_again, under_load, write_all,
};
use ebb_testkit::{Builder, Cluster, Standby, mounts};
use ebb_tests::content::same;
use ebb_tests::nodes::{open, went_past};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);

/// One that could take over now.
fn in_step(cluster: &Cluster, state: &str) -> Standby {
    let standby = cluster.start_standby(state);
    let _ = standby.says("in step", SOON);
    standby
}

/// The same of one that followed others before.
fn in_step_with(standby: &Standby, term: u64) {
    let follows = format!("follows the service of term {term} ");
    let is = || {
        let said = standby.has_said();
        let after = said.iter().rposition(|line| line.contains(&follows));
        after.is_some_and(|at| said[at..].iter().any(|line| line.contains("in step")))
    };
    assert!(mounts::wait_until(SOON, is), "{:?}", standby.has_said());
}

fn status_of_service(cluster: &Cluster) -> Value {
    let terms = format!("dir:{}", cluster.root().join("terms").display());
    let mut line = vec!["status".to_owned(), terms, "--json".to_owned()];
    let token = cluster.root().join("token");
    if token.exists() {
        line.extend(["--token-file".to_owned(), token.display().to_string()]);
    }
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let said = cluster.run_ebb(&line);
    serde_json::from_slice(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said:?}"))
}

/// It stands still, as one whose machine is lost for all that others see, with the lease that users get. Nobody
/// is told anything by it any more when it wakes up.
#[test]
fn a_standby_goes_on_within_seconds_of_a_service_that_falls_silent() {
    for model in ["posix", "session"] {
        let Some(mut cluster) = begun(builder(model).lease("10s")) else { return };
        let standby = in_step(&cluster, "standby");
        let status = status_of_service(&cluster);
        assert_eq!(status["standbys"][0]["in_step"], true, "{status}");
        write_all(&cluster, 1);
        let begun = Instant::now();
        cluster.signal_meta(Signal::STOP);
        // A process of its own: what this one has open is closed by each program that it starts.
        let path = cluster.node(1).path("asked");
        let asks = format!("printf asked > {}", path.display());
        let mut asks = Command::new("sh").args(["-c", &asks]).spawn().expect("sh");
        let mut old = cluster.is_succeeded_by(standby, SOON);
        assert!(asks.wait().expect("wait").success(), "asked of the one that stands still");
        let took = begun.elapsed();
        println!("{model}: a change was made {took:?} after the service fell silent");
        assert!(took >= Duration::from_secs(4), "it may still answer for its lease: {took:?}");
        assert!(took < SOON, "{took:?}");
        assert_eq!(fs::read(cluster.node(0).path("asked")).expect("read"), b"asked");
        old.signal(Signal::CONT);
        assert_eq!(old.ends_within(Duration::from_secs(10)).code(), Some(1));
        let log = fs::read_to_string(cluster.root().join("meta.log")).expect("its log");
        assert!(log.contains("another metadata service has taken over: term 2"), "{log}");
        goes_on(&cluster, 2, model);
    }
}

/// One after the other, each of which is ended in order: as for an upgrade.
#[test]
fn a_service_that_is_ended_in_order_is_succeeded_at_once() {
    let Some(mut cluster) = begun(builder("posix").supervised().token()) else { return };
    let file = open(&cluster.node(0).path("d0/own0"));
    for round in 1..4 {
        let standby = in_step(&cluster, &format!("standby{round}"));
        write_all(&cluster, round);
        let begun = Instant::now();
        // The service waits for it, and lives on for a while.
        let hangs = (round == 2).then(|| cluster.node(2).signal(Signal::STOP));
        cluster.signal_meta(Signal::TERM);
        let mut old = cluster.is_succeeded_by(standby, SOON);
        assert_eq!(old.ends_within(Duration::from_secs(5)).code(), Some(0));
        if hangs.is_some() {
            assert!(begun.elapsed() > Duration::from_secs(2), "it did not wait");
            cluster.node(2).signal(Signal::CONT);
        }
        file.write_all_at(&content(100)[..10], 0).expect("through a handle from before");
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    }
    drop(file);
    goes_on(&cluster, 4, "ended in order");
}

/// What was on stable storage while the standby was away is not in its copy: it must not take over, and says so.
#[test]
fn a_standby_that_is_not_in_step_does_not_take_over() {
    let Some(mut cluster) = begun(builder("posix")) else { return };
    let standby = in_step(&cluster, "standby");
    standby.process.signal(Signal::STOP);
    let begun = Instant::now();
    // It is waited for, but not for ever.
    write_all(&cluster, 1);
    assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
    let gone = || status_of_service(&cluster)["standbys"] == serde_json::json!([]);
    assert!(mounts::wait_until(SOON, gone), "{}", status_of_service(&cluster));
    write_all(&cluster, 2);
    cluster.kill_meta();
    standby.process.signal(Signal::CONT);
    let _ = standby.says("may have known more", SOON);
    std::thread::sleep(Duration::from_secs(4));
    let said = standby.has_said();
    assert!(!said.iter().any(|line| line.contains("listening")), "{said:?}");
    // On its own state it goes on; then the standby follows that one.
    fs::rename(cluster.meta_state(), cluster.root().join("moved")).expect("rename");
    drop(cluster.begin_meta_elsewhere("moved", &[]));
    in_step_with(&standby, 2);
    write_all(&cluster, 3);
    cluster.kill_meta();
    fs::remove_dir_all(cluster.meta_state()).expect("the state is lost");
    drop(cluster.is_succeeded_by(standby, SOON));
    goes_on(&cluster, 4, "in step again");
}

/// With the service a node is lost: the others go on, and what the node had is there when it comes back.
#[test]
fn a_node_that_is_lost_with_the_service_comes_back_to_the_standby() {
    let Some(mut cluster) = begun(builder("session").lease("3s")) else { return };
    let standby = in_step(&cluster, "standby");
    write_all(&cluster, 1);
    cluster.signal_meta(Signal::STOP);
    cluster.node(2).kill9();
    let begun = Instant::now();
    drop(cluster.is_succeeded_by(standby, SOON));
    let path = cluster.node(0).path("after");
    fs::write(&path, "after").expect("the others go on");
    println!("a file was made {:?} after both were lost", begun.elapsed());
    assert_eq!(fs::read(cluster.node(1).path("after")).expect("read"), b"after");
    let _ = cluster.node(2).ebb("umount", &[], &[]);
    cluster.node(2).mount();
    goes_on(&cluster, 2, "with the node");
}

/// Many losses: killed, standing still or ended, at random moments.
fn losses(cluster: &mut Cluster, seed: u64, n: u64) -> String {
    let way = (n + seed) % 3;
    let standby = in_step(cluster, &format!("standby{n}"));
    let state = cluster.meta_state();
    match way {
        0 => cluster.kill_meta(),
        1 => cluster.signal_meta(Signal::STOP),
        _ => cluster.signal_meta(Signal::TERM),
    }
    let mut old = cluster.is_succeeded_by(standby, SOON);
    if way == 1 {
        old.signal(Signal::CONT);
        assert_eq!(old.ends_within(Duration::from_secs(10)).code(), Some(1));
    }
    drop(old);
    fs::remove_dir_all(state).expect("the state is lost");
    format!("way {way}")
}

fn lost_under_load(builder: Builder, way: impl Fn(&Value) -> bool) {
    let losses_of_run = std::env::var("EBB_MOVES").ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    under_load(builder, losses_of_run, losses, |statuses| {
        assert!(statuses.iter().any(way), "nobody went that way: {statuses:?}");
        assert!(statuses.iter().all(has_told_again), "on a copy: {statuses:?}");
    });
}

#[test]
fn services_are_lost_again_and_again_under_load() {
    lost_under_load(builder("posix"), |_| true);
}

#[test]
fn services_are_lost_again_and_again_past_the_daemon() {
    lost_under_load(builder("posix").option("--io-path", "auto"), went_past);
}

/// And with a small buffer, under supervisors.
#[test]
fn services_are_lost_again_and_again_with_copies() {
    let builder = builder("posix").supervised().option("--replicas", "2");
    let copied = |status: &Value| status["copies"]["copied_bytes"].as_u64() > Some(0);
    lost_under_load(builder.option("--cache-size", "8MiB"), copied);
}

/// Two at once, each with a state of its own: one takes over, and the other one follows it.
#[test]
fn a_state_is_one_standbys_and_a_term_too() {
    let Some(mut cluster) = begun(builder("posix")) else { return };
    let first = in_step(&cluster, "standby");
    let mut refused = cluster.start_standby("standby");
    assert_eq!(refused.process.ends_within(SOON).code(), Some(2), "its state is the other one's");
    let second = in_step(&cluster, "second");
    write_all(&cluster, 1);
    cluster.kill_meta();
    let took = |standby: &Standby| standby.has_said().iter().any(|l| l.contains("listening on"));
    assert!(mounts::wait_until(SOON, || took(&first) || took(&second)), "nobody takes over");
    let (heir, other) = if took(&first) { (first, second) } else { (second, first) };
    drop(cluster.is_succeeded_by(heir, SOON));
    in_step_with(&other, 2);
    write_all(&cluster, 2);
    cluster.kill_meta();
    drop(cluster.is_succeeded_by(other, SOON));
    same("seen", &fs::read(cluster.node(0).path("d2/seen1")).expect("read"), &content(21));
    goes_on(&cluster, 3, "the second one");
}

/// What would be wrong with it as a service is said before it takes anybody's place.
#[test]
fn a_standby_of_another_backing_or_model_is_never_in_step() {
    let Some(cluster) = begun(builder("posix")) else { return };
    let at = |name: &str| cluster.root().join(name).display().to_string();
    fs::create_dir(at("other")).expect("mkdir");
    let terms = format!("dir:{}", at("terms"));
    let backing = cluster.backing().display().to_string();
    let other = at("other");
    for (backing, model, why) in [
        (&other, "posix", "it is of another backing than"),
        (&backing, "commit", "the job's consistency is '"),
    ] {
        let said = cluster.root().join(format!("said-{model}"));
        let mut standby = cluster.ebb();
        standby.args(["meta", "--standby", "--coordinator", &terms, "--listen", "127.0.0.1:0"]);
        standby.args(["--state", &at(model), "--consistency", model, backing.as_str()]);
        standby
            .stdout(fs::File::create(&said).expect("a file"))
            .stderr(std::process::Stdio::null());
        let mut standby = standby.spawn().expect("ebb meta --standby");
        let says = || fs::read_to_string(&said).expect("what it says");
        assert!(mounts::wait_until(SOON, || says().contains(why)), "{}", says());
        standby.kill().and_then(|()| standby.wait()).expect("kill");
        assert!(!says().contains("in step"), "{}", says());
    }
    goes_on(&cluster, 1, "none took over");
}
