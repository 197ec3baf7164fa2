//! Who the service is: one that has lost its state, or has an older one, or is somebody else's, destroys
//! nothing on nodes that live, and ends no mount; what ends a mount unasked does not uncover the
//! directory below it. Only a proof of deletion takes bytes that are nowhere else.

use ebb_testkit::{Builder, Cluster, Node, describe, mounts};
use ebb_tests::content::{bytes, same};
use ebb_tests::copies::{clear, lose};
use ebb_tests::load::make_directory;
use ebb_tests::reboot::copy_dir;
use ebb_tests::tools::wait_until;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(30);
/// The service's lease of a silent node, and some.
const LEASE: Duration = Duration::from_secs(60);

fn builder(nodes: usize) -> Builder {
    let cluster = Cluster::builder().nodes(nodes).flush("end").separate_meta();
    cluster.consistency("session").option("--request-timeout", "3s")
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{}", describe(output)))
}

/// Writes a file that a crash may not take away any more.
fn write_synced(path: &Path, data: &[u8]) {
    let mut file = File::create(path).expect("create");
    file.write_all(data).expect("write");
    file.sync_all().expect("fsync");
}

/// What the status says of the service, once it says something that has `text`.
fn wait_refused(node: &Node, text: &str) {
    let says = |status: &serde_json::Value| {
        let errors = status["errors"].as_array().cloned().unwrap_or_default();
        let of_service = |e: &&serde_json::Value| e["operation"] == "metadata service";
        errors
            .iter()
            .filter(of_service)
            .any(|e| e["text"].as_str().is_some_and(|t| t.contains(text)))
    };
    node.wait_status(SOON, says);
    assert!(node.log().contains(text), "the log says it too");
}

/// Unmounts as a user would who has read what it says, and brings the rest to the backing.
fn umount_and_recover(cluster: &Cluster, node: &Node) {
    let asked = node.ebb("umount", &["--timeout", "20s"], &[]);
    assert!([3, 5].contains(&code(&asked)), "{}", describe(&asked));
    let ended = node.ebb("umount", &["--no-drain"], &[]);
    assert_eq!(code(&ended), 3, "{}", describe(&ended));
    assert!(!mounts::is_mounted(node.mountpoint()));
    recover(cluster, node);
}

fn recover(cluster: &Cluster, node: &Node) {
    let (cache, backing) =
        (node.cache().display().to_string(), cluster.backing().display().to_string());
    let recovered = cluster.run_ebb(&["recover", &cache, "--backing", &backing]);
    assert_eq!(code(&recovered), 0, "{}", describe(&recovered));
}

#[test]
fn a_service_that_lost_its_state_destroys_nothing_on_a_living_node() {
    let mut cluster = builder(1).start();
    let data = bytes(1, 1, 0, 6_000_000);
    fs::create_dir(cluster.node(0).path("d")).expect("mkdir");
    write_synced(&cluster.node(0).path("d/file"), &data);
    cluster.kill_meta();
    fs::remove_dir_all(cluster.meta_state()).expect("remove the state");
    cluster.restart_meta();

    let node = cluster.node(0);
    wait_refused(node, "another job");
    let error = fs::write(node.path("new"), "x").expect_err("nothing new can be made");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let listed = fs::read_dir(node.path("")).and_then(|l| l.collect::<Result<Vec<_>, _>>());
    listed.expect_err("nor listed");
    let drain = node.ebb("drain", &[], &[]);
    assert_eq!(code(&drain), 3, "{}", describe(&drain));
    umount_and_recover(&cluster, node);
    same("file", &fs::read(cluster.backing().join("d/file")).expect("recovered"), &data);
}

/// As the hooks of Slurm mount it: the service is in the first node, at a port that is known before, and all
/// have a token. That node is lost with its cache and mounted again by the same line.
#[test]
fn a_first_node_that_begins_anew_takes_nothing_from_the_second() {
    for then in [Then::Asked, Then::Killed] {
        begins_anew(then);
    }
}

/// What happens to the second node's daemon once it has refused the new service.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    Asked,
    /// The next ones refuse it too, until the supervisor gives up.
    Killed,
}

fn begins_anew(then: Then) {
    let cluster = Cluster::builder().nodes(2).flush("end").consistency("session");
    let cluster =
        cluster.option("--request-timeout", "3s").fixed_port().token().supervised().start();
    let (first, second) = (cluster.node(0), cluster.node(1));
    let data = bytes(1, 1, 0, 6_000_000);
    fs::create_dir(second.path("d")).expect("mkdir");
    write_synced(&second.path("d/file"), &data);
    second.wait_closed();
    let was_at = second.status()["meta"].clone();
    lose(first);
    clear(first);
    first.mount();
    assert_eq!(first.status()["meta"], was_at, "another service, where the lost one was");
    wait_refused(second, "another job");
    let error = fs::write(second.path("new"), "x").expect_err("nothing new can be made");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let drain = second.ebb("drain", &[], &[]);
    assert_eq!(code(&drain), 3, "{}", describe(&drain));
    match then {
        Then::Asked => umount_and_recover(&cluster, second),
        Then::Killed => {
            assert!(second.kill_daemon_only(), "it has a supervisor");
            wait_until(SOON, "the end of it", || second.log().contains("no daemon can go on"));
            assert!(second.log().contains("run `ebb recover"), "{}", second.log());
            let ended = second.ebb("umount", &["--no-drain"], &[]);
            assert_ne!(code(&ended), 0, "{}", describe(&ended));
            assert!(!mounts::is_mounted(second.mountpoint()));
            recover(&cluster, second);
        }
    }
    same("file", &fs::read(cluster.backing().join("d/file")).expect("recovered"), &data);
    // The new job goes on.
    write_synced(&first.path("after"), b"after");
    first.umount();
    assert_eq!(fs::read(cluster.backing().join("after")).expect("drained"), b"after");
    same("file", &fs::read(cluster.backing().join("d/file")).expect("it stays"), &data);
}

#[test]
fn a_service_with_an_older_state_destroys_nothing_and_the_newest_one_goes_on() {
    let mut cluster = builder(2).start();
    let (state, old) = (cluster.meta_state(), cluster.root().join("old"));
    let newest = cluster.root().join("newest");
    let [early, late, over] = [1, 2, 3].map(|n| bytes(n, 1, 0, 300_000));
    write_synced(&cluster.node(0).path("early"), &early);
    write_synced(&cluster.node(0).path("over"), &early);
    copy_dir(&state, &old);
    write_synced(&cluster.node(0).path("late"), &late);
    write_synced(&cluster.node(0).path("over"), &over);
    write_synced(&cluster.node(1).path("others"), &late);
    cluster.kill_meta();
    fs::rename(&state, &newest).expect("put the newest state away");
    copy_dir(&old, &state);
    cluster.restart_meta();
    for node in cluster.nodes() {
        wait_refused(node, "older one");
        fs::write(node.path("new"), "x").expect_err("nothing new can be made");
    }
    let drain = cluster.node(0).ebb("drain", &[], &[]);
    assert_eq!(code(&drain), 3, "{}", describe(&drain));

    cluster.kill_meta();
    fs::remove_dir_all(&state).expect("remove");
    fs::rename(&newest, &state).expect("put it back");
    cluster.restart_meta();
    wait_until(SOON, "the right service is spoken to again", || {
        fs::write(cluster.node(1).path("new"), "x").is_ok()
            && fs::read(cluster.node(0).path("late")).is_ok()
    });
    cluster.umount_all();
    for (name, want) in [("early", &early), ("late", &late), ("over", &over), ("others", &late)] {
        same(name, &fs::read(cluster.backing().join(name)).expect(name), want);
    }
}

/// A power loss of the service's machine takes what was not synced there. A file that was made then is
/// not known any more, but it was not deleted.
#[test]
fn a_file_that_the_service_forgot_is_kept_and_not_called_drained() {
    let mut cluster = builder(1).start();
    let (state, old) = (cluster.meta_state(), cluster.root().join("old"));
    let data = bytes(1, 1, 0, 400_000);
    // Now and then the syncer comes in between, and the node is told of it: once more then, and at
    // another moment of the second that it takes from one time to the next.
    for round in 0..20 {
        fs::write(cluster.node(0).path(format!("before-{round}")), "x").expect("write");
        std::thread::sleep(Duration::from_millis(1200 + 130 * round));
        copy_dir(&state, &old);
        fs::write(cluster.node(0).path("file"), &data).expect("write");
        cluster.kill_meta();
        let newest = cluster.root().join(format!("newest-{round}"));
        fs::rename(&state, &newest).expect("put it away");
        copy_dir(&old, &state);
        cluster.restart_meta();
        let node = cluster.node(0);
        let mut refused = false;
        wait_until(SOON, "the node has seen the service", || {
            let status = node.status().to_string();
            refused = status.contains("older one");
            refused || fs::read_dir(node.path("")).is_ok()
        });
        if !refused {
            break;
        }
        assert!(round < 19, "never without the syncer");
        cluster.kill_meta();
        fs::remove_dir_all(&state).expect("remove");
        fs::rename(&newest, &state).expect("put it back");
        cluster.restart_meta();
        wait_until(SOON, "the right service", || {
            fs::remove_file(cluster.node(0).path("file")).is_ok()
        });
    }
    let node = cluster.node(0);
    let drain = node.ebb("drain", &["--timeout", "20s"], &[]);
    assert!([3, 4].contains(&code(&drain)), "{}", describe(&drain));
    umount_and_recover(&cluster, node);
    same("file", &fs::read(cluster.backing().join("file")).expect("recovered"), &data);
}

/// The other half: what was deleted goes, also when its owner hears of it from a service after the one
/// that deleted it.
#[test]
fn a_deleted_file_goes_also_after_a_restart_of_the_service() {
    let mut cluster = builder(2).start();
    write_synced(&cluster.node(0).path("gone"), &bytes(1, 1, 0, 500_000));
    write_synced(&cluster.node(0).path("stays"), b"stays");
    cluster.node(0).wait_closed();
    fs::remove_file(cluster.node(1).path("gone")).expect("unlink elsewhere");
    cluster.kill_meta();
    cluster.restart_meta();
    cluster.node(0).drain();
    assert_eq!(fs::read(cluster.backing().join("stays")).expect("drained"), b"stays");
    assert!(!cluster.backing().join("gone").exists());
    cluster.umount_all();
}

#[test]
fn a_stranger_in_the_place_of_the_service_ends_no_mount() {
    for secure in ["on", "off"] {
        let mut cluster = builder(1).token().option("--secure", secure).start();
        let data = bytes(1, 1, 0, 200_000);
        write_synced(&cluster.node(0).path("file"), &data);
        cluster.kill_meta();
        let stranger = cluster.start_stranger();
        let node = cluster.node(0);
        wait_refused(node, "has not shown that it is the service of this job");
        assert!(mounts::is_mounted(node.mountpoint()));
        fs::write(node.path("new"), "x").expect_err("nothing can be made");
        drop(stranger);
        cluster.restart_meta();
        let node = cluster.node(0);
        wait_until(SOON, "the service is back", || fs::write(node.path("new"), "x").is_ok());
        cluster.umount_all();
        same("file", &fs::read(cluster.backing().join("file")).expect("drained"), &data);
    }
}

#[test]
fn a_first_mount_where_something_else_answers_fails_in_seconds() {
    let garbage = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = garbage.local_addr().expect("address").to_string();
    std::thread::spawn(move || {
        for stream in garbage.incoming().flatten() {
            let mut stream = stream;
            let _ = stream.write_all(&[0xa5; 4096]);
            std::mem::forget(stream);
        }
    });
    let cluster = builder(1).prepare();
    let node = cluster.node(0);
    let start = std::time::Instant::now();
    let mut command = cluster.ebb();
    command.args(["mount", "--meta", &address, "--cache"]).arg(node.cache());
    let output = command.arg(cluster.backing()).arg(node.mountpoint()).output().expect("ebb mount");
    let took = start.elapsed();
    assert!([2, 5].contains(&code(&output)) && took < Duration::from_secs(25), "{took:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&address), "{said}");
    assert!(!mounts::is_mounted(node.mountpoint()));
}

/// A daemon that another one has replaced: programs that go on in its mount get errors, and nothing of
/// what they write is in the directory below.
#[test]
fn a_mount_that_ends_unasked_does_not_uncover_the_directory_below() {
    let cluster = builder(1).start();
    let node = cluster.node(0);
    write_synced(&node.path("file"), b"content");
    node.signal(Signal::STOP);
    let (point, cache) = (cluster.root().join("other"), cluster.root().join("other cache"));
    fs::create_dir(&point).expect("mkdir");
    wait_until(LEASE, "another daemon takes the name", || {
        let mut command = node.mount_command_at(&cache, &point, &["--supervise", "off"]);
        command.output().expect("ebb mount").status.success()
    });
    node.signal(Signal::CONT);
    wait_until(SOON, "it is out of the job", || {
        fs::write(node.path("after"), "lost?")
            .is_err_and(|e| e.raw_os_error() == Some(libc::ENOTCONN))
    });
    assert!(mounts::is_mounted(node.mountpoint()), "it stays, though dead");
    fs::create_dir(node.path("d")).expect_err("nothing can be made");
    let status = node.status().to_string();
    assert!(status.contains("another daemon took this node's name"), "{status}");
    let ended = node.ebb("umount", &[], &[]);
    assert_ne!(code(&ended), 0, "{}", describe(&ended));
    assert!(!mounts::is_mounted(node.mountpoint()));
    let below: Vec<_> = fs::read_dir(node.mountpoint()).expect("list").flatten().collect();
    assert!(below.is_empty(), "{below:?}");
    assert!(node.cache().join("journal").exists(), "what it has is kept");
    let gone = cluster.ebb().arg("umount").arg(&point).output().expect("ebb umount");
    // The bytes of the name's first life are in the other cache.
    assert_eq!(code(&gone), 3, "{}", describe(&gone));
}

/// Also when the test is given up.
const LOOKS_MAX: Duration = Duration::from_secs(120);

type Errno = Option<i32>;
/// What was told, and how often.
type Told<T> = BTreeMap<T, u64>;

fn errno<T>(done: io::Result<T>) -> Errno {
    done.err().and_then(|e| e.raw_os_error())
}

fn ask_until<T: Ord>(ended: &AtomicBool, ask: impl Fn() -> T) -> Told<T> {
    let (mut told, start) = (Told::new(), Instant::now());
    while !ended.load(Ordering::Relaxed) && start.elapsed() < LOOKS_MAX {
        *told.entry(ask()).or_default() += 1;
    }
    told
}

fn add<T: Ord>(all: &mut Told<T>, told: Told<T>) {
    told.into_iter().for_each(|(what, n)| *all.entry(what).or_default() += n);
}

/// A service without state is there for a while, and the right one comes back.
fn exchange(cluster: &mut Cluster) {
    let (state, newest) = (cluster.meta_state(), cluster.root().join("newest"));
    let list = |node: &Node| fs::read_dir(node.path("")).and_then(|mut l| l.next().transpose());
    cluster.kill_meta();
    fs::rename(&state, &newest).expect("put it away");
    cluster.restart_meta();
    for node in cluster.nodes() {
        wait_until(SOON, "the node refuses the service", || list(node).is_err());
    }
    cluster.kill_meta();
    fs::remove_dir_all(&state).expect("remove");
    fs::rename(&newest, &state).expect("put it back");
    cluster.restart_meta();
    for node in cluster.nodes() {
        wait_until(SOON, "the right service is spoken to again", || list(node).is_ok());
    }
}

/// What programs that look for a directory again and again are told while the service is exchanged.
#[derive(Default)]
struct Looks {
    /// By mkdir, and at once after it by stat.
    pairs: Told<(Errno, Errno)>,
    /// By `make_directory`.
    made: Told<Errno>,
}

impl Looks {
    fn look(&mut self, cluster: &mut Cluster, directories: &[PathBuf]) {
        let ended = &AtomicBool::new(false);
        let pair = |d: &PathBuf| (errno(fs::create_dir(d)), errno(fs::metadata(d)));
        let make = |d: &PathBuf| errno(make_directory(d));
        std::thread::scope(|scope| {
            let asks = directories.iter().map(|d| {
                let pairs = scope.spawn(move || ask_until(ended, || pair(d)));
                (pairs, scope.spawn(move || ask_until(ended, || make(d))))
            });
            let asks: Vec<_> = asks.collect();
            exchange(cluster);
            ended.store(true, Ordering::Relaxed);
            for (pairs, made) in asks {
                add(&mut self.pairs, pairs.join().expect("no panic"));
                add(&mut self.made, made.join().expect("no panic"));
            }
        });
    }
}

/// While another service answers it is there (EEXIST), or nobody can say (EIO). A program can be told both,
/// one after the other, which some libraries make an EEXIST of.
#[test]
fn a_directory_that_is_there_is_never_said_to_be_missing_while_another_service_answers() {
    let mut cluster = builder(2).start();
    let directories: Vec<PathBuf> = cluster.nodes().iter().map(|n| n.path("d")).collect();
    fs::create_dir(&directories[0]).expect("mkdir");
    let [there, refused] = [Some(libc::EEXIST), Some(libc::EIO)];
    let both = |looks: &Looks| looks.pairs.get(&(there, refused)).copied().unwrap_or(0);
    let mut looks = Looks::default();
    for _ in 0..40 {
        looks.look(&mut cluster, &directories);
        if both(&looks) >= 6 {
            break;
        }
    }
    println!("mkdir and stat: {:?}; make_directory: {:?}", looks.pairs, looks.made);
    assert!(both(&looks) >= 6, "seldom between the two: {:?}", looks.pairs);
    for (mkdir, stat) in looks.pairs.keys() {
        assert!([there, refused].contains(mkdir), "mkdir: {:?}", looks.pairs);
        assert!([None, refused].contains(stat), "stat: {:?}", looks.pairs);
    }
    let made: Vec<Errno> = looks.made.keys().copied().collect();
    assert_eq!(made, [None, refused], "{:?}", looks.made);
}
