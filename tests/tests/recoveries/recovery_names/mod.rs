//! All nodes of a job and its service are gone, with the service's state: `ebb recover` brings back
//! what nodes did to names (directories, empty files, links of both kinds, special files, modes, renames,
//! removals), whichever of them did it, in whatever order the recoveries run.

mod attributes;
mod doubts;
mod elsewhere;
mod moved;
mod removed;
mod zeros;

use ebb_testkit::{Cluster, Node, random, skip_reason};
use ebb_tests::recoveries::{all_die, ended_with, recover, said, start};
use ebb_tests::tools::names;
use ebb_tests::tree::{Entry, snapshot};
use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::time::Duration;

type Tree = BTreeMap<Vec<u8>, Entry>;

fn cluster(nodes: usize) -> Option<Cluster> {
    cluster_of("session", nodes)
}

fn cluster_of(model: &str, nodes: usize) -> Option<Cluster> {
    let builder = Cluster::builder().nodes(nodes).separate_meta().flush("end");
    skip_reason().is_none().then(|| builder.consistency(model).start())
}

/// Names are in the node's journal on disk, and the node has heard what is on the backing.
fn sync(node: &Node) {
    File::open(node.mountpoint()).and_then(|dir| dir.sync_all()).expect("fsync of a directory");
}

/// The service looks once a second what has reached the backing.
const LOOKED_AFTER: Duration = Duration::from_millis(1_200);

/// The service has looked, and this node has heard what it saw.
fn look(node: &Node) {
    std::thread::sleep(LOOKED_AFTER);
    sync(node);
}

/// What is in a directory, apart from what recoveries tell each other.
fn tree(root: &Path) -> Tree {
    let mut tree = snapshot(root).expect("a tree");
    tree.retain(|path, _| !path.starts_with(b".ebb-part-recovery-"));
    tree
}

fn assert_same(got: &Tree, want: &Tree) {
    let all = got.keys().chain(want.keys());
    let wrong: Vec<String> = all
        .filter(|path| got.get(*path) != want.get(*path))
        .map(|path| {
            let name = String::from_utf8_lossy(path).into_owned();
            format!("{name}:\n  got {:?}\n  wanted {:?}", got.get(path), want.get(path))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

const EVERYTHING: &str = r"
umask 022
mkdir -m 2750 d && mkdir -p d/e/f empty && chmod 500 empty
: > d/nothing && chmod 600 d/nothing
printf data > d/e/file && ln d/e/file d/second && chmod 640 d/e/file
ln -s ../x/y d/link && ln -sfn elsewhere d/link
mkfifo -m 604 d/pipe
mkdir old && printf more > old/one && mv old new && mv new/one new/two
printf gone > d/gone && rm d/gone && mkdir d/gonedir && rmdir d/gonedir
setfattr -n user.note -v remember d/nothing && setfattr -n user.dir -v too d/e
";

#[test]
fn everything_that_one_node_did_to_names_comes_back() {
    let Some(mut cluster) = cluster(1) else { return };
    let node = cluster.node(0);
    node.shell(EVERYTHING);
    node.shell("sync -f .");
    sync(node);
    let wanted = tree(node.mountpoint());
    assert!(wanted.len() == 11 && wanted[&b"d/second"[..]].nlink == 2, "{wanted:?}");
    all_die(&mut cluster);
    let node = cluster.node(0);
    assert!(tree(cluster.backing()).is_empty(), "nothing was there before");
    let listed = recover(&cluster, node, &["--dry-run"]);
    ended_with(
        &listed,
        3,
        &["d/link: symbolic link", "empty: directory", "d/nothing: file without"],
    );
    ended_with(&recover(&cluster, node, &[]), 0, &[]);
    assert_same(&tree(cluster.backing()), &wanted);
    let xattr = |path: &str, name: &str| {
        let shown = std::process::Command::new("getfattr")
            .args(["--only-values", "-n", name])
            .arg(cluster.backing().join(path))
            .output();
        String::from_utf8_lossy(&shown.expect("getfattr").stdout).into_owned()
    };
    assert_eq!(xattr("d/nothing", "user.note"), "remember");
    assert_eq!(xattr("d/e", "user.dir"), "too");
    let left: Vec<_> = std::fs::read_dir(cluster.backing()).expect("list").flatten().collect();
    assert!(!left.iter().any(|e| e.file_name().to_string_lossy().starts_with(".ebb")), "{left:?}");
    ended_with(&recover(&cluster, node, &["--dry-run"]), 0, &["nothing"]);
}

#[test]
fn what_the_backing_has_is_not_brought_back() {
    let Some(mut cluster) = cluster(2) else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    a.shell("mkdir d && : > d/empty && ln -s x d/link && printf data > d/file");
    b.shell("mkdir d/b && : > d/b/empty && mv d/empty d/moved");
    a.drain();
    b.drain();
    // The nodes hear with the next heartbeat that all of it is there.
    for node in cluster.nodes() {
        node.wait_status(Duration::from_secs(20), |s| s["names_noted"] == 0);
    }
    sync(a);
    sync(b);
    all_die(&mut cluster);
    // Somebody tidies up.
    std::fs::remove_dir_all(cluster.backing().join("d")).expect("rm");
    for node in cluster.nodes() {
        ended_with(&recover(&cluster, node, &[]), 0, &[]);
    }
    assert!(tree(cluster.backing()).is_empty());
}

#[test]
fn a_new_service_does_not_take_over_a_cache_that_holds_names() {
    let builder = Cluster::builder().flush("end");
    if skip_reason().is_some() {
        return;
    }
    let cluster = builder.start();
    let node = cluster.node(0);
    node.shell("mkdir d && : > d/empty");
    sync(node);
    node.kill9();
    let _ = node.ebb("umount", &[], &[]);
    let state = node.cache().join("meta");
    std::fs::remove_dir_all(&state).expect("the state");
    let refused = node.mount_command(&[]).output().expect("ebb can be started");
    ended_with(&refused, 2, &["2 name(s)", "ebb recover"]);
    ended_with(&recover(&cluster, node, &[]), 0, &[]);
    assert!(cluster.backing().join("d/empty").is_file());
    node.mount();
    node.umount();
}

#[test]
fn names_of_others_and_strangers_on_the_backing_stay_as_they_are() {
    let Some(mut cluster) = cluster(1) else { return };
    let node = cluster.node(0);
    node.shell("mkdir d && ln -s ours link && mkfifo pipe && : > empty && chmod 600 empty");
    sync(node);
    all_die(&mut cluster);
    let backing = cluster.backing();
    std::fs::write(backing.join("link"), "a stranger's").expect("write");
    std::fs::write(backing.join("empty"), "a stranger's").expect("write");
    std::fs::write(backing.join("d"), "a stranger's").expect("write");
    let before = tree(backing);
    let output = recover(&cluster, cluster.node(0), &[]);
    ended_with(&output, 3, &["link: 0 bytes (something else", "d: 0 bytes (something else"]);
    let mut after = tree(backing);
    assert!(after.remove(&b"pipe"[..]).is_some(), "what can be made is: {}", said(&output));
    assert_same(&after, &before);
    std::fs::remove_file(backing.join("link")).expect("rm");
    std::fs::remove_file(backing.join("d")).expect("rm");
    ended_with(&recover(&cluster, cluster.node(0), &[]), 0, &[]);
    assert!(backing.join("d").is_dir() && backing.join("link").is_symlink());
}

/// How the recoveries run.
#[derive(Clone, Copy, Debug)]
enum Way {
    AtOnce,
    InTurn,
    Killed,
}

fn run_all(cluster: &Cluster, way: Way, dice: &mut ChaCha8Rng) {
    let mut order: Vec<&Node> = cluster.nodes().iter().collect();
    order.shuffle(dice);
    if matches!(way, Way::Killed) {
        for _ in 0..4 {
            let mut running: Vec<Child> = order.iter().map(|n| start(cluster, n)).collect();
            for child in &mut running {
                std::thread::sleep(std::time::Duration::from_micros(dice.random_range(0..12_000)));
                let _ = child.kill();
            }
            running.iter_mut().for_each(|c| drop(c.wait()));
        }
    }
    let check = |output: &Output| {
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 3)), "{way:?} {code:?}: {}", said(output));
    };
    match way {
        Way::InTurn => {
            order.iter().for_each(|n| check(&recover(cluster, n, &["--wait", "0s"])));
        }
        Way::AtOnce | Way::Killed => {
            let running: Vec<Child> = order.iter().map(|n| start(cluster, n)).collect();
            let ended = running.into_iter().map(|c| c.wait_with_output().expect("wait"));
            ended.for_each(|o| check(&o));
        }
    }
    // Whoever was told that others were missing runs it again.
    for node in &order {
        ended_with(&recover(cluster, node, &["--wait", "0s"]), 0, &[]);
    }
}

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

fn path(dice: &mut ChaCha8Rng, dirs: &[PathBuf]) -> PathBuf {
    let dir = dirs.choose(dice).cloned().unwrap_or_default();
    dir.join(NAMES.choose(dice).expect("names"))
}

/// One change of names by one node. What cannot be done is not done.
fn change(node: &Node, dice: &mut ChaCha8Rng, dirs: &[PathBuf]) {
    let (from, to) = (node.path(path(dice, dirs)), node.path(path(dice, dirs)));
    let perm = dice.random_range(0..0o100) | 0o700;
    match dice.random_range(0..14) {
        0..3 => drop(std::fs::create_dir(&from)),
        3..5 => drop(File::create_new(&from)),
        5 | 6 => {
            if let Ok(mut file) = File::create_new(&from) {
                let data = random::bytes(dice, 5000);
                std::io::Write::write_all(&mut file, &data).expect("write");
                file.sync_all().expect("fsync");
            }
        }
        7 => drop(std::os::unix::fs::symlink("some/where", &from)),
        8 => drop(std::fs::hard_link(&from, &to)),
        9..12 => drop(std::fs::rename(&from, &to)),
        12 => {
            let removed = std::fs::remove_file(&from).or_else(|_| std::fs::remove_dir(&from));
            drop(removed);
        }
        _ => {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(perm);
            if !from.is_symlink() {
                drop(std::fs::set_permissions(&from, mode));
            }
        }
    }
}

fn directories(root: &Path) -> Vec<PathBuf> {
    let tree = tree(root);
    let dirs = tree.iter().filter(|(_, e)| e.mode & libc::S_IFMT == libc::S_IFDIR);
    let dirs = dirs.map(|(path, _)| PathBuf::from(String::from_utf8_lossy(path).into_owned()));
    dirs.chain([PathBuf::new()]).collect()
}

#[test]
fn what_several_nodes_did_comes_back_in_any_order() {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let rounds = ebb_tests::tools::amount("EBB_RECOVERY_ROUNDS", 3);
    for round in 0..rounds {
        let mut dice = random::generator(seed.wrapping_add(round));
        let way = [Way::AtOnce, Way::InTurn, Way::Killed][(seed.wrapping_add(round) % 3) as usize];
        println!("seed {} {way:?}", seed.wrapping_add(round));
        let Some(mut cluster) = cluster(3) else { return };
        for step in 0..120 {
            let dirs = directories(cluster.node(0).mountpoint());
            let node = cluster.nodes().choose(&mut dice).expect("a node");
            change(node, &mut dice, &dirs);
            if step % 40 == 39 && dice.random_bool(0.5) {
                node.drain();
            }
        }
        cluster.nodes().iter().for_each(sync);
        let wanted = tree(cluster.node(1).mountpoint());
        all_die(&mut cluster);
        run_all(&cluster, way, &mut dice);
        assert_same(&tree(cluster.backing()), &wanted);
    }
}

/// A file that was synced and deleted stays in the cache until the service has that on stable storage, and
/// is not brought back from there.
#[test]
fn a_deleted_file_stays_deleted_without_the_service() {
    for model in ["posix", "session"] {
        let Some(mut cluster) = cluster_of(model, 1) else { return };
        let node = cluster.node(0);
        for name in ["kept", "deleted", "replaced", "new"] {
            let mut file = File::create(node.path(name)).expect("create");
            file.write_all(name.as_bytes()).expect("write");
            file.sync_all().expect("fsync");
        }
        sync(node);
        std::fs::remove_file(node.path("deleted")).expect("unlink");
        std::fs::rename(node.path("new"), node.path("replaced")).expect("rename");
        assert_eq!(node.counter("ebb_kept_until_stable_total"), 2, "{model}");
        all_die(&mut cluster);
        ended_with(&recover(&cluster, cluster.node(0), &["--wait", "0s"]), 0, &[]);
        assert_eq!(names(cluster.backing()), ["kept", "replaced"], "{model}");
        let replaced = std::fs::read(cluster.backing().join("replaced")).expect("read");
        assert_eq!(replaced, b"new", "{model}");
    }
}

/// A mode that has reached the backing is in nobody's journal any more; what another node knew of the file
/// before does not take it back.
#[test]
fn a_mode_that_is_on_the_backing_is_not_taken_back_by_who_knew_an_older_one() {
    use std::os::unix::fs::{FileExt, PermissionsExt};
    for model in ["session", "mpiio"] {
        let Some(mut cluster) = cluster_of(model, 2) else { return };
        let (first, second) = (cluster.node(0), cluster.node(1));
        std::fs::write(first.path("f"), [1; 10_000]).expect("write");
        first.drain();
        let file = File::options().write(true).open(second.path("f")).expect("open");
        file.write_all_at(&[2; 4_000], 0).expect("write");
        file.sync_all().expect("fsync");
        let private = std::fs::Permissions::from_mode(0o640);
        std::fs::set_permissions(first.path("f"), private).expect("chmod");
        sync(first);
        first.drain();
        // That it is settled, each node hears with a sign of life.
        std::thread::sleep(std::time::Duration::from_secs(2));
        sync(first);
        let mode = |cluster: &Cluster| {
            let meta = std::fs::metadata(cluster.backing().join("f")).expect("stat");
            meta.permissions().mode() & 0o7777
        };
        assert_eq!(mode(&cluster), 0o640, "{model}: it is on the backing");
        drop(file);
        all_die(&mut cluster);
        for node in cluster.nodes() {
            ended_with(&recover(&cluster, node, &["--wait", "0s"]), 0, &[]);
        }
        assert_eq!(mode(&cluster), 0o640, "{model}");
        let wanted = [vec![2; 4_000], vec![1; 6_000]].concat();
        assert_eq!(std::fs::read(cluster.backing().join("f")).expect("read"), wanted, "{model}");
    }
}
