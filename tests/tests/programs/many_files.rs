//! More files than may be kept in memory: a program walks over them, reads and changes them, and the
//! service and the daemon forget what the backing has, without anybody noticing but in memory.
//!
//! `EBB_MANY_FILES` (default 4,000; the full figure is 60,000): files of the walk. From 50,000 on the memory
//! of the service is compared as well; with fewer it is mostly what every service needs.

use ebb_testkit::{Cluster, describe, number};
use ebb_tests::tools::{amount, shell, wait_until};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

const FILES: u64 = 4_000;
const PER_DIRECTORY: u64 = 200;
const LIMIT: Duration = Duration::from_secs(180);
/// The least that `--inodes-max` takes.
const FEW: u64 = 1000;

fn place(n: u64) -> PathBuf {
    PathBuf::from(format!("tree/{}/file-{n}", n / PER_DIRECTORY))
}

fn content(n: u64) -> String {
    format!("content of file {n}\n")
}

fn populate(root: &Path, files: u64) {
    for n in 0..files {
        let path = root.join(place(n));
        if n % PER_DIRECTORY == 0 {
            fs::create_dir_all(path.parent().expect("it has one")).expect("mkdir");
        }
        fs::write(path, content(n)).expect("write");
    }
}

fn service(cluster: &Cluster) -> Value {
    let address = cluster.meta_address().expect("a service");
    let output = cluster.run_ebb(&["status", address, "--json"]);
    assert!(output.status.success(), "{}", describe(&output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("VmHWM");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

fn cluster(inodes_max: u64, files_max: u64, files: u64) -> Cluster {
    let cluster = Cluster::builder()
        .nodes(2)
        .consistency("session")
        .separate_meta()
        .option("--inodes-max", &inodes_max.to_string())
        .option("--files-max", &files_max.to_string())
        .prepare();
    populate(cluster.backing(), files);
    cluster.nodes().iter().for_each(ebb_testkit::Node::mount);
    cluster
}

/// Reads every file, each once.
fn read_all(root: &Path, files: u64) {
    for n in 0..files {
        let got = fs::read_to_string(root.join(place(n))).expect("read");
        assert_eq!(got, content(n), "{n}");
    }
}

/// What the service and a daemon grow by when all is listed and read.
fn grown(cluster: &Cluster, files: u64, names: &str) -> (u64, u64) {
    let node = cluster.node(0);
    let daemon = node.pid().expect("a daemon");
    let before = (resident(cluster.meta_pid()), resident(daemon));
    let listed = shell(node.mountpoint(), "find . -type f | wc -l", LIMIT);
    assert_eq!(listed.trim(), files.to_string());
    read_all(node.mountpoint(), files);
    let after = (resident(cluster.meta_pid()), resident(daemon));
    let by = (after.0 - before.0, after.1 - before.1);
    println!(
        "{names}: {files} files listed and read: service + {} KiB, daemon + {} KiB at most",
        by.0 >> 10,
        by.1 >> 10
    );
    by
}

#[test]
fn a_walk_over_many_files_stays_within_the_bounds() {
    let files = amount("EBB_MANY_FILES", FILES);
    let max = (files / 12).max(FEW);
    let bounded = cluster(max, max, files);
    let few = grown(&bounded, files, "bounded");
    let node = bounded.node(0);
    wait_until(LIMIT, "the service is small", || number(&service(&bounded), "inodes") <= max);
    wait_until(LIMIT, "the daemon is small", || number(&node.status(), "files") <= max);
    let (at_service, at_node) = (service(&bounded), node.status());
    println!(
        "{} inodes and {} places at the service, {} forgotten; {} files at the node, {} forgotten",
        number(&at_service, "inodes"),
        number(&at_service, "places"),
        number(&at_service, "forgotten"),
        number(&at_node, "files"),
        number(&at_node, "files_forgotten"),
    );
    assert!(number(&at_service, "forgotten") >= files - max);
    assert!(number(&at_node, "files_forgotten") >= files - max);
    // And once more, from the beginning.
    read_all(node.mountpoint(), files);
    bounded.umount_all();
    drop(bounded);

    let all = cluster(10 * files, 10 * files, files);
    let many = grown(&all, files, "unbounded");
    assert!(number(&service(&all), "inodes") > files);
    assert!(number(&all.node(0).status(), "files") >= files);
    // With what was found in the last half second, the leases, and the names of what is forgotten.
    assert!(files < 50_000 || few.0 < many.0 / 4 * 3, "service: {few:?} and {many:?}");
    assert!(files < 10_000 || few.1 < many.1 / 2, "daemon: {few:?} and {many:?}");
}

/// Looks at everything below `other` until hardly anything else is known, and says how many were forgotten
/// meanwhile: none when nothing else was known before.
fn forget_all_but(cluster: &Cluster, other: &Path) -> u64 {
    // What is below `other`, and what is open, was changed, or leads to such things.
    let most = FEW + FEW / 20;
    let before = number(&service(cluster), "forgotten");
    let began = Instant::now();
    wait_until(LIMIT, "what is not used is forgotten", || {
        shell(other, "find . -type f -exec stat -c %i {} + > /dev/null", LIMIT);
        began.elapsed() > Duration::from_secs(1) && number(&service(cluster), "inodes") <= most
    });
    number(&service(cluster), "forgotten") - before
}

#[test]
fn a_forgotten_tree_is_used_as_if_it_were_known() {
    let files = 1600;
    let mut cluster = cluster(FEW, 100, files);
    let backing = cluster.backing().to_owned();
    for n in 0..FEW {
        let dir = backing.join(format!("other/{}", n / 100));
        fs::create_dir_all(&dir).expect("mkdir");
        fs::write(dir.join(format!("{n}")), "x").expect("write");
    }
    fs::hard_link(backing.join(place(0)), backing.join("tree/second name")).expect("link");
    let root = cluster.node(0).mountpoint().to_owned();
    let forget = |cluster: &Cluster| forget_all_but(cluster, &root.join("other"));
    let stat = |n: u64| fs::metadata(root.join(place(n))).expect("stat");

    let before: Vec<(u64, i64)> = (0..files).map(|n| (stat(n).ino(), stat(n).mtime())).collect();
    let directory = File::open(root.join("tree/3")).expect("open");
    let mut stream = fs::read_dir(root.join("tree/1")).expect("list");
    let first = stream.next().expect("a name").expect("entry").file_name();
    let script = "cd tree/2 && echo there && read go && cat file-400 && stat -c %i . && ls | wc -l";
    let mut inside = cluster.node(0).command("sh");
    let inside = inside.args(["-ec", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut inside = inside.spawn().expect("sh can be started");
    let mut said = std::io::BufReader::new(inside.stdout.take().expect("piped"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).expect("read");
    let inside_ino = fs::metadata(root.join("tree/2")).expect("stat").ino();
    assert!(forget(&cluster) > files / 4, "all of it was known");

    // By number alone: a descriptor of a directory, a directory stream, a working directory.
    assert_eq!(
        directory.metadata().expect("fstat").ino(),
        fs::metadata(root.join("tree/3")).expect("stat").ino()
    );
    let mut names: Vec<_> = stream.map(|e| e.expect("entry").file_name()).collect();
    names.push(first);
    names.sort();
    names.dedup();
    assert_eq!(names.len() as u64, PER_DIRECTORY);
    std::io::Write::write_all(&mut inside.stdin.take().expect("piped"), b"go\n").expect("write");
    line.clear();
    std::io::Read::read_to_string(&mut said, &mut line).expect("read");
    assert_eq!(line, format!("{}{inside_ino}\n{PER_DIRECTORY}\n", content(400)));
    assert!(inside.wait().expect("wait").success());

    // Numbers, times and links are as before; the other node sees the same.
    forget(&cluster);
    let after: Vec<(u64, i64)> = (0..files).map(|n| (stat(n).ino(), stat(n).mtime())).collect();
    assert_eq!(before, after);
    assert!(forget(&cluster) > files / 4, "all of it was known again");
    let second = fs::metadata(root.join("tree/second name")).expect("stat");
    assert_eq!((second.ino(), second.nlink()), (before[0].0, 2));
    let theirs = fs::metadata(cluster.node(1).path(place(7))).expect("stat");
    assert_eq!(theirs.ino(), before[7].0);

    // What others changed on the backing meanwhile is seen, also where bytes of before were cached.
    assert_eq!(fs::read_to_string(root.join(place(9))).expect("read"), content(9));
    forget(&cluster);
    fs::write(backing.join(place(9)), "changed behind its back\n").expect("write");
    wait_until(LIMIT, "the change", || {
        fs::read_to_string(root.join(place(9))).expect("read") == "changed behind its back\n"
    });

    // A service that was restarted knows no more than it did, and finds the same.
    forget(&cluster);
    cluster.kill_meta();
    cluster.restart_meta();
    assert_eq!(stat(11).ino(), before[11].0);
    assert_eq!(directory.metadata().expect("fstat").nlink(), 2);

    // Changes.
    forget(&cluster);
    fs::rename(root.join(place(21)), root.join(place(20))).expect("rename over");
    assert_eq!(fs::read_to_string(root.join(place(20))).expect("read"), content(21));
    fs::create_dir(root.join("moved")).expect("mkdir");
    fs::rename(root.join("tree/4"), root.join("moved")).expect("over an empty directory");
    forget(&cluster);
    assert_eq!(fs::read_to_string(root.join("moved/file-800")).expect("read"), content(800));
    let kept = fs::rename(root.join("tree/6"), root.join("tree/5")).expect_err("it has files");
    assert_eq!(kept.raw_os_error(), Some(libc::ENOTEMPTY));
    let full = fs::remove_dir(root.join("tree/5")).expect_err("it has files");
    assert_eq!(full.raw_os_error(), Some(libc::ENOTEMPTY));
    fs::write(root.join(place(23)), "written anew").expect("write");
    forget(&cluster);
    assert_eq!(fs::read_to_string(root.join(place(23))).expect("read"), "written anew");
    shell(&root, "rm -r tree moved", LIMIT);
    drop(directory);
    cluster.umount_all();
    assert_eq!(fs::read_dir(&backing).expect("list").count(), 1, "only the other tree is left");
}
