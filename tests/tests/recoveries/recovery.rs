//! What a user does after a daemon died: mount again, or `ebb recover`. With the journal of the
//! embedded metadata service and without one, after a power loss, with a damaged node journal,
//! and with a backing that changed meanwhile.

use ebb_testkit::{Cluster, Node, describe, mounts, random, skip_reason};
use ebb_tests::content::same;
use ebb_tests::reboot;
use ebb_tests::tools::names;
use rand::Rng;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

fn one() -> Option<Cluster> {
    skip_reason().is_none().then(|| Cluster::builder().flush("end").start())
}

fn ended_with(output: &Output, status: i32, words: &[&str]) {
    assert_eq!(output.status.code(), Some(status), "{}", describe(output));
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    for word in words {
        assert!(said.contains(word), "no '{word}' in: {said}");
    }
}

fn recover_at(cluster: &Cluster, cache: &Path, backing: &Path, more: &[&str]) -> Output {
    let mut command = cluster.ebb();
    command.arg("recover").arg(cache).arg("--backing").arg(backing).args(more);
    command.output().expect("ebb can be started")
}

fn recover(cluster: &Cluster, node: &Node, more: &[&str]) -> Output {
    recover_at(cluster, node.cache(), cluster.backing(), more)
}

fn die(node: &Node) {
    node.kill9();
    let output = node.ebb("umount", &[], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
}

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    let path = path.as_ref();
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("mkdir");
    let copy = Command::new("cp").arg("-a").arg(from.join(".")).arg(to).status();
    assert!(copy.expect("cp").success());
}

/// Every file below a directory, with its content and mtime.
fn tree(root: &Path) -> BTreeMap<PathBuf, (Vec<u8>, i64, i64)> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).expect("a directory").flatten() {
            let meta = entry.metadata().expect("an entry");
            // Locks tell who has them now.
            if meta.is_dir() {
                dirs.push(entry.path());
            } else if entry.file_name() != "lock" {
                let content = if meta.is_file() { read(entry.path()) } else { Vec::new() };
                found.insert(entry.path(), (content, meta.mtime(), meta.mtime_nsec()));
            }
        }
    }
    found
}

/// A program that writes a file and keeps it open, until its input ends. A process of its own: when
/// this one starts others, they close what they inherit, and a close publishes.
fn keeps_open(cluster: &Cluster, node: &Node, name: &str, data: &[u8]) -> (Child, File) {
    let pipe = cluster.root().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo").success());
    let mut dd = node.command("dd");
    dd.arg(format!("if={}", pipe.display())).arg(format!("of={name}")).arg("status=none");
    let child = dd.arg(format!("bs={}", data.len())).stderr(Stdio::null()).spawn();
    let mut input = File::options().write(true).open(&pipe).expect("a reader");
    input.write_all(data).expect("write");
    (child.expect("dd"), input)
}

#[test]
fn everything_of_a_dead_daemon_is_there_again() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().flush("end").start();
    let node = cluster.node(0);
    std::fs::write(cluster.backing().join("old"), vec![1; 10_000]).expect("write");
    node.shell("mkdir d; echo content > d/f; ln -s f d/l; : > empty; ln d/f hard; chmod 640 d/f");
    let old = File::options().write(true).open(node.path("old")).expect("open");
    old.write_all_at(&[2; 100], 500).expect("write");
    drop(old);
    // Never published, but noted after a second.
    let (mut writer, input) = keeps_open(&cluster, node, "open", &[3; 5000]);
    std::thread::sleep(Duration::from_millis(2500));
    node.kill9();
    let said = node.ebb("umount", &[], &[]);
    ended_with(
        &said,
        3,
        &[
            "d/f: 8 bytes",
            "old: 100 bytes",
            "open: 5000 bytes in 1 range(s) (written, not published)",
            "d/l: symbolic link",
            "ebb mount",
            "ebb recover",
        ],
    );
    drop(input);
    let _ = writer.wait();
    node.mount_with(&["--node", "another-name"]);
    assert_eq!(node.status()["node"], node.name(), "it goes on under its own name");
    assert_eq!(node.status()["dirty_bytes"], 8 + 100 + 5000);
    assert_eq!(read(node.path("d/f")), b"content\n");
    assert_eq!(read(node.path("open")), [3; 5000]);
    let mut wanted = vec![1; 10_000];
    wanted[500..600].fill(2);
    assert_eq!(read(node.path("old")), wanted);
    assert_eq!(std::fs::metadata(node.path("d/f")).expect("stat").mode() & 0o777, 0o640);
    node.umount();
    assert_eq!(read(cluster.backing().join("old")), wanted);
    assert_eq!(read(cluster.backing().join("hard")), b"content\n");
    assert_eq!(read(cluster.backing().join("open")), [3; 5000]);
    assert!(cluster.backing().join("d/l").is_symlink() && cluster.backing().join("empty").exists());
    for left in ["journal", "data", "meta"] {
        assert!(!node.cache().join(left).exists(), "{left} is left after a clean end");
    }
}

#[test]
fn an_unmount_without_draining_can_be_continued() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("f"), vec![5; 9000]).expect("write");
    ended_with(&node.ebb("umount", &["--no-drain"], &[]), 3, &["f: 9000 bytes"]);
    node.mount();
    assert_eq!(read(node.path("f")), [5; 9000]);
    ended_with(&node.ebb("umount", &["--no-drain"], &[]), 3, &["f: 9000 bytes"]);
    ended_with(&recover(&cluster, node, &[]), 0, &["f: 9000 bytes"]);
    assert_eq!(read(cluster.backing().join("f")), [5; 9000]);
}

#[test]
fn other_nodes_read_the_bytes_of_one_that_came_back() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(2).flush("end").start();
    let (home, away) = (cluster.node(0), cluster.node(1));
    std::fs::write(away.path("theirs"), vec![7; 50_000]).expect("write");
    std::fs::write(away.path("both"), vec![1; 3000]).expect("write");
    away.kill9();
    // Somebody else takes bytes over while it is dead: the old ones must not come back.
    let both = File::options().write(true).open(home.path("both")).expect("open");
    both.write_all_at(&[2; 1000], 1000).expect("write");
    drop(both);
    ended_with(&away.ebb("umount", &[], &[]), 3, &["theirs: 50000 bytes"]);
    away.mount();
    let mut wanted = vec![1; 3000];
    wanted[1000..2000].fill(2);
    for node in [home, away] {
        assert_eq!(read(node.path("theirs")), [7; 50_000], "{}", node.name());
        assert_eq!(read(node.path("both")), wanted, "{}", node.name());
    }
    away.umount();
    home.umount();
    assert_eq!(read(cluster.backing().join("both")), wanted);
    assert_eq!(read(cluster.backing().join("theirs")), [7; 50_000]);
}

#[test]
fn a_dry_run_changes_nothing_and_a_second_run_does_nothing() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    node.shell("mkdir -p a/b; head -c 300000 /dev/zero | tr '\\0' x > a/b/f; : > a/empty");
    ended_with(&recover(&cluster, node, &[]), 2, &["in use"]);
    node.kill9();
    let _ = node.ebb("umount", &[], &[]);
    let before = (tree(node.cache()), tree(cluster.backing()));
    let dry = recover(&cluster, node, &["--dry-run"]);
    ended_with(&dry, 3, &["a/b/f: 300000 bytes in 1 range(s) (published)", "a: directory"]);
    assert!(before == (tree(node.cache()), tree(cluster.backing())), "a dry run changed things");
    let elsewhere = cluster.root().join("elsewhere");
    std::fs::create_dir(&elsewhere).expect("mkdir");
    ended_with(&recover_at(&cluster, node.cache(), &elsewhere, &[]), 2, &["not the directory"]);
    ended_with(&recover_at(&cluster, &elsewhere, cluster.backing(), &[]), 2, &["not a cache"]);
    assert_eq!(std::fs::read_dir(&elsewhere).expect("list").count(), 0, "nothing is made there");
    ended_with(&recover(&cluster, node, &[]), 0, &[]);
    assert_eq!(read(cluster.backing().join("a/b/f")), [b'x'; 300_000]);
    assert!(cluster.backing().join("a/empty").exists());
    let after = tree(cluster.backing());
    ended_with(&recover(&cluster, node, &[]), 0, &["nothing"]);
    assert!(after == tree(cluster.backing()), "the second run did something");
    node.mount();
    node.umount();
}

/// A node of an external service, both dead: all that is left is the cache.
fn orphan(prepare: impl FnOnce(&Cluster, &Node)) -> Option<Cluster> {
    if skip_reason().is_some() {
        return None;
    }
    let mut cluster = Cluster::builder().separate_meta().flush("end").start();
    prepare(&cluster, cluster.node(0));
    cluster.node(0).kill9();
    cluster.kill_meta();
    let _ = cluster.node(0).ebb("umount", &[], &[]);
    Some(cluster)
}

#[test]
fn a_cache_alone_is_enough_for_its_bytes() {
    let prepared = orphan(|cluster, node| {
        let backing = cluster.backing();
        std::fs::write(backing.join("in-place"), vec![1; 10_000]).expect("write");
        std::fs::write(backing.join("checkpoint"), "old").expect("write");
        std::fs::write(backing.join("deleted"), "old").expect("write");
        node.shell(
            "mkdir -p x/y; echo new > x/y/new; chmod 604 x/y/new; touch -d @1000000000 x/y/new
             printf 0123 | dd of=in-place bs=1 seek=5000 conv=notrunc status=none
             echo written > tmp; mv tmp checkpoint
             echo gone > deleted; rm deleted; echo never > never; rm never
             echo moved > x/before; mv x z; truncate -s 9000 z/before",
        );
    });
    let Some(cluster) = prepared else { return };
    let (node, backing) = (cluster.node(0), cluster.backing());
    ended_with(&recover(&cluster, node, &["--dry-run"]), 3, &["z/y/new: 4 bytes", "checkpoint"]);
    ended_with(&recover(&cluster, node, &[]), 0, &[]);
    assert_eq!(read(backing.join("z/y/new")), b"new\n");
    let meta = std::fs::metadata(backing.join("z/y/new")).expect("stat");
    assert_eq!((meta.mode() & 0o777, meta.mtime()), (0o604, 1_000_000_000));
    let mut wanted = vec![1; 10_000];
    wanted[5000..5004].copy_from_slice(b"0123");
    assert_eq!(read(backing.join("in-place")), wanted);
    assert_eq!(read(backing.join("checkpoint")), b"written\n");
    let mut grown = b"moved\n".to_vec();
    grown.resize(9000, 0);
    assert_eq!(read(backing.join("z/before")), grown);
    let mut names: Vec<_> = std::fs::read_dir(backing).expect("list").flatten().collect();
    names.sort_by_key(std::fs::DirEntry::file_name);
    let names: Vec<_> = names.iter().map(|e| e.file_name().into_string().expect("name")).collect();
    assert_eq!(names, ["checkpoint", "in-place", "z"], "nothing else, and no part files");
    ended_with(&recover(&cluster, node, &[]), 0, &["nothing"]);
}

/// All daemons die, with the service that was in one of them; its state is there. Names of the last moment are in
/// it and in no node's journal.
#[test]
fn caches_that_are_mounted_again_bring_everything_where_the_state_is() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(3).flush("end").fixed_port().start();
    let [first, second, third] = cluster.nodes() else { panic!("three nodes") };
    for (i, node) in cluster.nodes().iter().enumerate() {
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).open(node.path("f"));
        file.expect("open").write_all_at(&[i as u8 + 1; 5000], i as u64 * 5000).expect("write");
    }
    std::fs::create_dir(first.path("d")).expect("mkdir");
    std::fs::write(second.path("d/2"), "two").expect("write");
    std::fs::write(third.path("d/3"), "three").expect("write");
    cluster.nodes().iter().for_each(Node::kill9);
    for node in cluster.nodes() {
        let _ = node.ebb("umount", &[], &[]);
    }
    let said = recover(&cluster, first, &["--dry-run"]);
    ended_with(&said, 3, &["f: bytes in the caches of other nodes"]);
    cluster.nodes().iter().for_each(Node::mount);
    for node in [third, second, first] {
        node.umount();
    }
    let wanted = [[1; 5000], [2; 5000], [3; 5000]].concat();
    assert!(read(cluster.backing().join("f")) == wanted, "not what was written");
    assert_eq!(read(cluster.backing().join("d/2")), b"two");
    assert_eq!(read(cluster.backing().join("d/3")), b"three");
    assert_eq!(names(cluster.backing()), ["d", "f"], "no part file is left");
}

#[test]
fn files_of_several_nodes_are_put_together_from_caches_and_part_file() {
    if skip_reason().is_some() {
        return;
    }
    let mut cluster = Cluster::builder().nodes(2).separate_meta().flush("end").start();
    let write = |node: &Node, offset: u64, byte: u8, len: usize| {
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).open(node.path("f"));
        file.expect("open").write_all_at(&vec![byte; len], offset).expect("write");
    };
    let (first, second) = (cluster.node(0), cluster.node(1));
    write(first, 100_000, 1, 50_000);
    write(second, 0, 2, 100_000);
    // The second node's bytes reach the part file; the first one's are missing there.
    let _ = second.ebb("drain", &[], &[]);
    assert!(!cluster.backing().join("f").exists(), "it is not whole");
    write(second, 150_000, 3, 1000);
    write(second, 500, 4, 1000);
    for node in cluster.nodes() {
        node.kill9();
        let _ = node.ebb("umount", &[], &[]);
    }
    cluster.kill_meta();
    for _ in 0..2 {
        let said = recover(&cluster, cluster.node(1), &["--wait", "0s"]);
        let here = "f: 2000 bytes in 2 range(s) (published); 100000 more in a part file";
        // Its own newer ones among them: for all that it knows the other node flushed there since.
        let rest = "f: 51000 bytes (waiting for bytes of other nodes";
        ended_with(&said, 3, &[here, rest, "100000-150000"]);
    }
    ended_with(&recover(&cluster, cluster.node(0), &[]), 3, &["500-1500 not yet brought by node1"]);
    ended_with(&recover(&cluster, cluster.node(1), &[]), 0, &[]);
    ended_with(&recover(&cluster, cluster.node(0), &[]), 0, &[]);
    ended_with(&recover(&cluster, cluster.node(1), &[]), 0, &["nothing"]);
    let mut wanted = vec![2; 100_000];
    wanted[500..1500].fill(4);
    wanted.extend([1; 50_000]);
    wanted.extend([3; 1000]);
    assert!(read(cluster.backing().join("f")) == wanted, "not what was written");
    assert_eq!(names(cluster.backing()), ["f"], "no part file is left");
}

#[test]
fn conflicts_are_listed_and_left_alone() {
    let prepared = orphan(|cluster, node| {
        for name in ["changed", "replaced", "same"] {
            std::fs::write(cluster.backing().join(name), vec![1; 5000]).expect("write");
            let file = File::options().write(true).open(node.path(name)).expect("open");
            file.write_all_at(&[2; 100], 0).expect("write");
        }
        node.shell("echo new > occupied; echo new > directory");
    });
    let Some(cluster) = prepared else { return };
    let (node, backing) = (cluster.node(0), cluster.backing());
    std::thread::sleep(Duration::from_millis(20));
    std::fs::write(backing.join("changed"), vec![9; 5000]).expect("write");
    std::fs::write(backing.join("replaced-new"), vec![8; 5000]).expect("write");
    std::fs::rename(backing.join("replaced-new"), backing.join("replaced")).expect("rename");
    std::fs::write(backing.join("occupied"), "theirs").expect("write");
    std::fs::create_dir(backing.join("directory")).expect("mkdir");
    let output = recover(&cluster, node, &[]);
    ended_with(
        &output,
        3,
        &[
            "changed: 100 bytes (the file on the backing was changed",
            "replaced: 100 bytes (another",
            "occupied: 4 bytes (something else",
            "directory: 4 bytes (something else",
        ],
    );
    let mut same = vec![1; 5000];
    same[..100].fill(2);
    assert_eq!(read(backing.join("same")), same, "what is no conflict is drained");
    assert_eq!(read(backing.join("changed")), [9; 5000]);
    assert_eq!(read(backing.join("occupied")), b"theirs");
    let forced = recover(&cluster, node, &["--force"]);
    ended_with(&forced, 3, &["directory: 4 bytes"]);
    let mut changed = vec![9; 5000];
    changed[..100].fill(2);
    assert_eq!(read(backing.join("changed")), changed, "in place: only the bytes of the cache");
    assert_eq!(read(backing.join("occupied")), b"new\n");
    std::fs::remove_dir(backing.join("directory")).expect("rmdir");
    ended_with(&recover(&cluster, node, &[]), 0, &[]);
    assert_eq!(read(backing.join("directory")), b"new\n");
}

#[test]
fn a_mount_without_the_state_of_its_service_is_refused() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("f"), vec![5; 9000]).expect("write");
    die(node);
    std::fs::remove_dir_all(node.cache().join("meta")).expect("remove");
    for _ in 0..2 {
        let refused = node.mount_command(&[]).output().expect("ebb");
        ended_with(&refused, 2, &["ebb recover", &node.cache().display().to_string(), "8.79KiB"]);
    }
    // Nor does a state of another job help.
    let state = cluster.root().join("state").display().to_string();
    let other = cluster.root().join("other");
    std::fs::create_dir_all(&other).expect("mkdir");
    let mut command = cluster.ebb();
    command.args(["mount", "--state", &state, "--cache"]).arg(cluster.root().join("c2"));
    command.arg(cluster.backing()).arg(&other);
    assert!(command.status().expect("ebb").success());
    let umount = cluster.ebb().arg("umount").arg(&other).status();
    assert!(umount.expect("ebb").success());
    let refused = node.mount_command(&["--state", &state]).output().expect("ebb");
    ended_with(&refused, 2, &["ebb recover"]);
    ended_with(&recover(&cluster, node, &[]), 0, &[]);
    assert_eq!(read(cluster.backing().join("f")), [5; 9000]);
    node.mount();
    node.umount();
}

#[test]
fn after_a_power_loss_what_was_synced_is_there_and_the_rest_is_no_zeros() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().flush("end").consistency("commit").start();
    let node = cluster.node(0);
    let synced = File::create(node.path("synced")).expect("create");
    synced.write_all_at(&[7; 100_000], 0).expect("write");
    synced.sync_all().expect("fsync");
    // Published by an explicit commit, and never synced.
    let unsynced = File::create(node.path("unsynced")).expect("create");
    unsynced.write_all_at(&[8; 100_000], 0).expect("write");
    rustix::fs::fsetxattr(&unsynced, "user.ebb.commit", b"1", rustix::fs::XattrFlags::empty())
        .expect("commit");
    node.kill9();
    drop((synced, unsynced));
    let _ = node.ebb("umount", &[], &[]);
    reboot::of_a_node(&node.cache().join("journal"));
    node.mount();
    assert_eq!(read(node.path("synced")), [7; 100_000]);
    let lost = std::fs::read(node.path("unsynced")).expect_err("lost bytes are no zeros");
    assert_eq!(lost.raw_os_error(), Some(libc::EIO));
    // However often one asks.
    for _ in 0..3 {
        ended_with(&node.ebb("umount", &[], &[]), 3, &["unsynced: 100000 bytes"]);
        assert!(mounts::is_mounted(node.mountpoint()), "it stays mounted");
    }
    assert_eq!(read(cluster.backing().join("synced")), [7; 100_000]);
    assert!(!cluster.backing().join("unsynced").exists(), "a file that is not whole has no name");
}

/// What a program synced and had not closed when its daemon died is still the newest when others
/// have published other bytes of the file since, and given them to the backing.
#[test]
fn only_bytes_that_others_wrote_over_are_set_aside() {
    if skip_reason().is_some() {
        return;
    }
    let cluster =
        Cluster::builder().nodes(2).separate_meta().flush("end").consistency("session").start();
    let (ours, theirs) = (cluster.node(0), cluster.node(1));
    std::fs::write(cluster.backing().join("f"), vec![1; 100_000]).expect("write");
    // A process of its own: when this one starts others, they close what they inherit.
    let write = "open(my $f, '+<', $ARGV[0]) or die; sysseek($f, 10_000, 0) or die; \
                 syswrite($f, chr(2) x 2_000) == 2_000 or die; $f->sync or die; \
                 print qq(synced\\n); STDOUT->flush; <STDIN>";
    let mut perl = Command::new("perl");
    perl.args(["-MIO::Handle", "-e", write]).arg(ours.path("f"));
    let mut writer = perl.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("perl");
    let mut said = [0; 6];
    writer.stdout.as_mut().expect("piped").read_exact(&mut said).expect("it synced");
    let other = File::options().write(true).open(theirs.path("f")).expect("open");
    other.write_all_at(&[3; 2_000], 11_000).expect("write");
    other.write_all_at(&[3; 2_000], 50_000).expect("write");
    drop(other);
    theirs.umount();
    ours.kill9();
    drop(writer.stdin.take());
    writer.wait().expect("perl");
    let _ = ours.ebb("umount", &[], &[]);
    ours.mount();
    let mut expected = vec![1; 100_000];
    expected[10_000..11_000].fill(2);
    // These were overtaken by a publication; nobody may bring them back.
    expected[11_000..13_000].fill(3);
    expected[50_000..52_000].fill(3);
    ebb_tests::content::same("after the takeover", &read(ours.path("f")), &expected);
    let aside = std::fs::read_dir(ours.cache().join("aside")).expect("aside").count();
    assert_eq!(aside, 1, "what was overtaken is kept aside");
    ours.umount();
    assert!(read(cluster.backing().join("f")) == expected);
}

/// A journal that ends in the middle of the last flush: its part file has become the file since.
#[test]
fn what_cannot_be_put_together_leaves_the_file_on_the_backing_alone() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    // The first half was never written, so the cache alone does not make the file whole.
    let file = File::create(node.path("f")).expect("create");
    file.write_all_at(&[7; 5_904], 4_096).expect("write");
    drop(file);
    let journal = node.cache().join("journal");
    let before = read(&journal).len();
    let _ = node.ebb("drain", &[], &[]);
    die(node);
    let all = read(&journal);
    let target = cluster.backing().join("f");
    let whole = read(&target);
    let none = cluster.root().join("none").display().to_string();
    for len in (before..all.len()).step_by(20) {
        let cache = cluster.root().join(format!("cut{len}"));
        copy(node.cache(), &cache);
        std::fs::write(cache.join("journal"), &all[..len]).expect("write");
        // Another inode: what the journal knows of the file and of its part file is gone.
        std::fs::remove_file(&target).expect("remove");
        std::fs::write(&target, &whole).expect("write");
        let options = ["--force", "--state", &none];
        let forced = recover_at(&cluster, &cache, cluster.backing(), &options);
        assert!(read(&target) == whole, "cut at {len}: {}", describe(&forced));
        if forced.status.code() != Some(0) {
            ended_with(&forced, 3, &["f: "]);
        }
        assert_eq!(names(cluster.backing()), ["f"], "cut at {len}: {}", describe(&forced));
    }
}

/// Damaged journals: an error that names the file, or a prefix; never a wrong byte.
#[test]
fn a_damaged_journal_never_leads_to_wrong_bytes() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    let content = |i: usize| vec![b'a' + i as u8; 10_000 * (i + 1)];
    for i in 0..8 {
        std::fs::write(node.path(format!("f{i}")), content(i)).expect("write");
    }
    let _ = node.ebb("drain", &[], &[&node.path("f0").display().to_string()]);
    die(node);
    let backing = cluster.backing();
    let saved = cluster.root().join("saved");
    copy(backing, &saved);
    let mut dice = random::generator(random::seed());
    let mut refused = 0;
    for case in 0..16 {
        let cache = cluster.root().join(format!("case{case}"));
        copy(node.cache(), &cache);
        for entry in std::fs::read_dir(backing).expect("list").flatten() {
            // One that does not know any more that its node was alone leaves word for others.
            match entry.path().is_dir() {
                true => std::fs::remove_dir_all(entry.path()).expect("remove"),
                false => std::fs::remove_file(entry.path()).expect("remove"),
            }
        }
        copy(&saved, backing);
        let journal = cache.join("journal");
        let mut bytes = read(&journal);
        let at = dice.random_range(0..bytes.len());
        match case % 2 {
            0 => bytes.truncate(at),
            _ => bytes[at] ^= 1 << dice.random_range(0..8),
        }
        std::fs::write(&journal, &bytes).expect("write");
        // With the service's journal and without it.
        let state = cache.join(if case % 4 < 2 { "meta" } else { "none" }).display().to_string();
        let options = ["--force", "--state", &state];
        let plain = recover_at(&cluster, &cache, backing, &options[1..]);
        let said = String::from_utf8_lossy(&plain.stderr);
        if !matches!(plain.status.code(), Some(0 | 3)) {
            refused += 1;
            // The copies above have other inode numbers than what the service remembers.
            let stale = said.contains("cannot put the files together");
            assert!(said.contains("journal") || stale, "case {case}: {}", describe(&plain));
        }
        // A user who insists gets what is known for certain.
        let _ = recover_at(&cluster, &cache, backing, &options);
        for i in 0..8 {
            match std::fs::read(backing.join(format!("f{i}"))) {
                // What comes before the damage is of an earlier moment, when it had no bytes yet.
                Ok(got) if got.is_empty() => {}
                Ok(got) => same(&format!("case {case}, byte {at}: f{i}"), &got, &content(i)),
                Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::NotFound),
            }
        }
    }
    assert!(refused > 0, "no damage was ever noticed");
    // A mount does not guess either.
    let journal = node.cache().join("journal");
    let good = read(&journal);
    let mut bad = good.clone();
    bad[100] ^= 1;
    std::fs::write(&journal, bad).expect("write");
    let mount = node.mount_command(&[]).output().expect("ebb");
    ended_with(&mount, 2, &["damaged", "ebb recover"]);
    std::fs::write(&journal, good).expect("write");
    node.mount();
    (0..8).for_each(|i| assert!(read(node.path(format!("f{i}"))) == content(i)));
    node.umount();
}

#[test]
fn files_that_were_made_private_stay_private() {
    let Some(cluster) = one() else { return };
    let node = cluster.node(0);
    std::fs::write(node.path("secret"), "secret").expect("write");
    std::fs::set_permissions(node.path("secret"), PermissionsExt::from_mode(0o600)).expect("chmod");
    symlink("/etc/passwd", cluster.backing().join("link")).expect("symlink");
    for name in ["journal", "data", "meta"] {
        let mode = std::fs::metadata(node.cache().join(name)).expect("stat").mode();
        assert_eq!(mode & 0o077, 0, "{name} has mode {mode:o}");
    }
    die(node);
    std::fs::remove_dir_all(node.cache().join("meta")).expect("remove");
    ended_with(&recover(&cluster, node, &[]), 0, &[]);
    let mode = std::fs::metadata(cluster.backing().join("secret")).expect("stat").mode();
    assert_eq!(mode & 0o777, 0o600);
}
