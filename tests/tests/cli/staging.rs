//! `ebb stage-in`: what it brings is read from the backing once, and stays clean. The books, and
//! the summary at the end of a job.

use ebb_testkit::cluster::number;
use ebb_testkit::{Cluster, Node, describe, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::wait_until;
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn cluster(nodes: usize, options: &[(&str, &str)]) -> Option<Cluster> {
    if let Some(why) = skip_reason() {
        println!("SKIPPED: {why}");
        return None;
    }
    let builder = Cluster::builder().nodes(nodes);
    let builder = options.iter().fold(builder, |b, (name, value)| b.option(name, value));
    Some(builder.start())
}

/// A tree on the backing that was there before the job; its bytes together.
fn put_inputs(cluster: &Cluster) -> u64 {
    let root = cluster.backing().join("in");
    fs::create_dir_all(root.join("deep/er")).expect("mkdir");
    let mut all = 0;
    for i in 0..20 {
        let place = ["", "deep", "deep/er"][i % 3];
        let len = 1000 + i as u64 * 333_333;
        fs::write(root.join(place).join(format!("f{i}")), bytes(i as u64, 0, 0, len)).expect("put");
        all += len;
    }
    fs::write(root.join("empty"), "").expect("put");
    all
}

fn check_inputs(node: &Node) {
    for i in 0..20u64 {
        let place = ["", "deep", "deep/er"][i as usize % 3];
        let got = fs::read(node.path("in").join(place).join(format!("f{i}"))).expect("read");
        same("staged", &got, &bytes(i, 0, 0, 1000 + i * 333_333));
    }
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", describe(output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", describe(output)))
}

#[test]
fn staged_files_are_read_from_the_backing_once_and_stay_clean() {
    let Some(cluster) = cluster(2, &[]) else { return };
    let all = put_inputs(&cluster);
    for (node, from_backing) in cluster.nodes().iter().zip([all, 0]) {
        let inputs = node.path("in").display().to_string();
        let report = json(&node.ebb("stage-in", &["--json"], &[&inputs]));
        assert_eq!((number(&report, "files"), number(&report, "bytes")), (21, all), "{report}");
        let staged = node.status();
        assert_eq!(number(&staged, "clean_bytes"), all, "{staged:#}");
        assert_eq!(number(&staged, "dirty_bytes"), 0);
        assert_eq!(staged["ledger"]["staged_bytes"], all);
        assert_eq!(number(&staged, "fetched_bytes_backing"), from_backing, "each byte once");
        assert_eq!(number(&staged, "fetched_bytes_peer"), all - from_backing);
        check_inputs(node);
        let _ = json(&node.ebb("stage-in", &["--json"], &[&inputs]));
        let after = node.status();
        assert_eq!(number(&after, "fetched_bytes_backing"), from_backing, "fetched it again");
        assert_eq!(number(&after, "fetched_bytes_peer"), all - from_backing, "fetched it again");
    }
    cluster.umount_all();
}

#[test]
fn nodes_that_stage_at_the_same_time_share_the_reading() {
    let Some(cluster) = cluster(3, &[]) else { return };
    let all = put_inputs(&cluster);
    std::thread::scope(|scope| {
        for node in cluster.nodes() {
            scope.spawn(|| {
                let inputs = node.path("in").display().to_string();
                json(&node.ebb("stage-in", &["--json"], &[&inputs]));
            });
        }
    });
    let read = |node: &Node| number(&node.status(), "fetched_bytes_backing");
    let reads: Vec<u64> = cluster.nodes().iter().map(read).collect();
    assert_eq!(reads.iter().sum::<u64>(), all, "{reads:?}");
    cluster.nodes().iter().for_each(check_inputs);
    cluster.umount_all();
}

/// A copy is no good when it was written over, or when the file has changed since.
#[test]
fn only_good_copies_are_shared() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").start();
    let old = bytes(8, 0, 0, 600_000);
    fs::write(cluster.backing().join("input"), &old).expect("put");
    let stage = |node: &Node| {
        json(&node.ebb("stage-in", &["--json"], &[&node.path("input").display().to_string()]));
    };
    let (first, second) = (cluster.node(0), cluster.node(1));
    stage(first);
    // A process of its own: starting `ebb` would close copies of this one's descriptors, and that
    // publishes.
    let mut writer = Command::new("perl")
        .args([
            "-e",
            "open F, '+<', 'input'; syswrite F, 'not published'; print 'x'; close STDOUT; <STDIN>",
        ])
        .current_dir(first.mountpoint())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("perl");
    let written = std::io::read_to_string(writer.stdout.take().expect("piped")).expect("read");
    assert_eq!(written, "x");
    stage(second);
    same("staged", &fs::read(second.path("input")).expect("read"), &old);
    let fetched = second.status();
    assert!(number(&fetched, "fetched_bytes_backing") > 0, "{fetched:#}");
    drop(writer.stdin.take());
    assert!(writer.wait().expect("perl").success());

    let new = bytes(9, 0, 0, 600_000);
    first.drain();
    fs::write(cluster.backing().join("input"), &new).expect("put");
    std::thread::sleep(Duration::from_millis(1100));
    stage(second);
    same("staged anew", &fs::read(second.path("input")).expect("read"), &new);
    cluster.umount_all();
}

#[test]
fn bytes_of_another_node_come_from_that_node() {
    let Some(cluster) = cluster(2, &[("--flush", "end")]) else { return };
    let content = bytes(5, 0, 0, 9_000_000);
    fs::write(cluster.node(0).path("made"), &content).expect("write");
    let node = cluster.node(1);
    let made = node.path("made").display().to_string();
    let report = json(&node.ebb("stage-in", &["--json"], &[&made]));
    assert_eq!(number(&report, "bytes"), 9_000_000);
    let status = node.status();
    assert_eq!(number(&status, "fetched_bytes_peer"), 9_000_000);
    assert_eq!(number(&status, "fetched_bytes_backing"), 0);
    same("made", &fs::read(node.path("made")).expect("read"), &content);
    cluster.umount_all();
}

/// However slowly it reads: also where everything it asks for is here already.
#[test]
fn a_reader_in_order_finds_what_it_wants_next() {
    const MIB: u64 = 1 << 20;
    const SIZE: u64 = 40 * MIB;
    let Some(cluster) = cluster(2, &[("--flush", "end")]) else { return };
    let (writer, reader) = (cluster.node(0), cluster.node(1));
    fs::write(writer.path("f"), vec![7; SIZE as usize]).expect("write");
    let mut file = fs::File::open(reader.path("f")).expect("open");
    let mut record = vec![0; MIB as usize];
    for read in (MIB..=SIZE).step_by(MIB as usize) {
        file.read_exact(&mut record).expect("read");
        assert!(record.iter().all(|b| *b == 7));
        let ahead = (read + 2 * MIB).min(SIZE);
        let fetched = |s: &Value| number(s, "fetched_bytes_peer") >= ahead;
        reader.wait_status(Duration::from_secs(10), fetched);
    }
    assert_eq!(number(&reader.status(), "fetched_bytes_peer"), SIZE, "something came twice");
}

#[test]
fn lists_missing_files_and_too_much_are_told() {
    let Some(cluster) = cluster(1, &[("--cache-size", "16MiB")]) else { return };
    put_inputs(&cluster);
    let node = cluster.node(0);
    let list = cluster.root().join("list");
    let lines = ["in/f0", "in/deep/f1"].map(|f| node.path(f).display().to_string()).join("\n");
    fs::write(&list, lines + "\n").expect("list");
    let list = list.display().to_string();
    let output = cluster
        .ebb()
        .args(["stage-in", &node.mountpoint().display().to_string(), "--list", &list, "--json"])
        .stdin(Stdio::null())
        .output()
        .expect("ebb");
    assert_eq!(number(&json(&output), "files"), 2);

    let (there, missing) = (node.path("in/f3"), node.path("in/none"));
    let paths = [there, missing].map(|p| p.display().to_string());
    let output = node.ebb("stage-in", &[], &[&paths[0], &paths[1]]);
    assert_eq!(output.status.code(), Some(1), "{}", describe(&output));
    assert!(describe(&output).contains("in/none"), "{}", describe(&output));
    assert_eq!(node.status()["ledger"]["staged_files"], 3, "what is there was staged");

    let output = node.ebb("stage-in", &[], &[&node.path("in").display().to_string()]);
    assert_eq!(output.status.code(), Some(1), "{}", describe(&output));
    assert!(describe(&output).contains("do not fit"), "{}", describe(&output));
    cluster.umount_all();
}

#[test]
fn the_books_tell_what_became_of_every_byte() {
    const MIB: u64 = 1 << 20;
    let Some(cluster) = cluster(1, &[("--flush", "end")]) else { return };
    let node = cluster.node(0);
    let ledger = || node.status()["ledger"].clone();
    let mib = vec![7; MIB as usize];
    fs::write(node.path("kept"), &mib).expect("write");
    fs::write(node.path("temporary"), &mib).expect("write");
    assert_eq!(ledger()["absorbed_bytes"], 2 * MIB);
    fs::remove_file(node.path("temporary")).expect("remove");
    // The kernel tells of the end of a file when it lets go of it.
    wait_until(Duration::from_secs(10), "deleted bytes count as skipped", || {
        ledger()["skipped_bytes"] == MIB
    });
    let f = fs::File::options().write(true).open(node.path("kept")).expect("open");
    f.write_all_at(&mib[..1000], 0).expect("write");
    assert_eq!(ledger()["skipped_bytes"], MIB + 1000, "written over: {:#}", ledger());
    f.set_len(MIB - 500).expect("cut");
    assert_eq!(ledger()["skipped_bytes"], MIB + 1500, "cut: {:#}", ledger());
    drop(f);
    assert_eq!(ledger()["dirty_bytes"], MIB - 500);
    node.drain();
    f_after(&ledger(), MIB);
    let output = node.ebb("umount", &[], &[]);
    assert!(output.status.success(), "{}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("job summary: 2.00MiB absorbed"), "{said}");
    assert!(!cluster.backing().join("temporary").exists());
}

fn f_after(ledger: &Value, mib: u64) {
    assert_eq!(ledger["flushed_bytes"], mib - 500, "{ledger:#}");
    assert_eq!(ledger["skipped_bytes"], mib + 1500, "{ledger:#}");
    assert_eq!((&ledger["dirty_bytes"], &ledger["failed_bytes"]), (&0.into(), &0.into()));
}

#[test]
fn run_ends_with_the_summary() {
    let Some(cluster) = cluster(1, &[]) else { return };
    cluster.umount_all();
    let (backing, mount) = (cluster.backing(), cluster.node(0).mountpoint());
    let script = "head -c 3000000 /dev/zero > out; : > sub.txt";
    let output = cluster
        .ebb()
        .args(["run", "--flush", "end"])
        .args([backing, mount])
        .args(["--", "sh", "-c", &format!("cd '{}' && {script}", mount.display())])
        .output()
        .expect("ebb run");
    assert!(output.status.success(), "{}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("job summary: 2.86MiB absorbed, 2.86MiB flushed"), "{said}");
    assert_eq!(fs::metadata(backing.join("out")).expect("out").len(), 3_000_000);
}
