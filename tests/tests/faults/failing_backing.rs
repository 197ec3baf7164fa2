//! A backing that returns EIO, is full, or hangs now and then, while a job goes on: before it
//! recovers, status and exit codes tell which files are not safe; afterwards everything arrives.
//!
//! `EBB_HANG_SECONDS` (default 6; the full figure is 30) is how long it hangs.

use ebb_testkit::{Cluster, Disk, Node, describe, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::{amount, available, wait_until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

/// Long enough for the flusher's longest pause between two attempts.
const RECOVERS_WITHIN: Duration = Duration::from_secs(90);

/// What the job has written, newest content by name.
type Written = BTreeMap<String, Vec<u8>>;

fn setup(flush: &str) -> Option<(Disk, Cluster)> {
    if let Some(why) = skip_reason() {
        println!("SKIPPED: {why}");
        return None;
    }
    if !available(&["nbdkit", "nbdfuse", "mkfs.ext4"]) {
        return None;
    }
    let disk = match Disk::faulty(192) {
        Ok(disk) => disk,
        Err(why) => {
            println!("SKIPPED: {why}");
            return None;
        }
    };
    let builder = Cluster::builder().nodes(1).flush(flush).option("--wait-interval", "100ms");
    let cluster = builder.backing(disk.path()).start();
    Some((disk, cluster))
}

/// Makes new files and writes over an old one.
fn write_some(node: &Node, written: &mut Written, round: u64) {
    for who in 0..4 {
        let name = format!("round{round}-{who}");
        let content = bytes(who, round, 0, 900_000 + who * 77_777);
        fs::write(node.path(&name), &content).expect("the buffer takes it");
        written.insert(name, content);
    }
    let content = bytes(9, round, 0, 300_000);
    // Without a cut, which is written through: that would have to wait for the disk.
    let mut options = fs::File::options();
    let again = options.write(true).create(true).truncate(false).open(node.path("again"));
    again.expect("open").write_all_at(&content, 0).expect("the buffer takes it");
    written.insert("again".to_owned(), content);
}

fn check(root: &Path, written: &Written) {
    for (name, content) in written {
        same(name, &fs::read(root.join(name)).expect("read"), content);
    }
}

/// Paths in the list of errors.
fn unsafe_files(status: &Value) -> Vec<String> {
    let errors = status["errors"].as_array().expect("a list");
    errors.iter().filter_map(|e| Some(e["path"].as_str()?.to_owned())).collect()
}

/// While the disk fails: what is not on it is named, by a drain and by status.
fn is_told(node: &Node, round: u64, status_code: i32, timeout: &str) {
    let output = node.ebb("drain", &["--timeout", timeout], &[]);
    assert_eq!(output.status.code(), Some(status_code), "{}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&format!("round{round}-")), "{}", describe(&output));
    assert!(node.status()["dirty_bytes"].as_u64() > Some(0));
}

fn recovers(node: &Node) {
    wait_until(RECOVERS_WITHIN, "everything is flushed after the recovery", || {
        let status = node.status();
        status["dirty_bytes"] == 0 && unsafe_files(&status).is_empty()
    });
    node.drain();
}

#[test]
fn errors_and_full_disks_now_and_then_lose_nothing() {
    let Some((disk, cluster)) = setup("immediate") else { return };
    let node = cluster.node(0);
    let mut written = Written::new();
    for round in 0..2 {
        write_some(node, &mut written, 10 * round);
        node.drain();

        disk.fail();
        write_some(node, &mut written, 10 * round + 1);
        is_told(node, 10 * round + 1, 3, "60s");
        let status = node.status();
        let text = format!("{:#}", status["errors"]);
        assert!(text.contains("Input/output error"), "{text}");
        assert!(!unsafe_files(&status).is_empty(), "{status:#}");
        assert!(status["ledger"]["failed_bytes"].as_u64() > Some(0), "{status:#}");
        check(node.mountpoint(), &written);
        disk.heal();
        recovers(node);
        check(cluster.backing(), &written);

        disk.fill();
        write_some(node, &mut written, 10 * round + 2);
        is_told(node, 10 * round + 2, 3, "60s");
        let text = format!("{:#}", node.status()["errors"]);
        assert!(text.contains("28") || text.contains("No space"), "{text}");
        check(node.mountpoint(), &written);
        disk.unfill();
        recovers(node);
        check(cluster.backing(), &written);
    }
    cluster.umount_all();
    check(cluster.backing(), &written);
}

#[test]
fn a_hanging_disk_holds_up_no_application_and_loses_nothing() {
    let Some((disk, cluster)) = setup("immediate") else { return };
    let node = cluster.node(0);
    let mut written = Written::new();
    write_some(node, &mut written, 0);
    node.drain();
    disk.freeze();
    let seconds = amount("EBB_HANG_SECONDS", 6);
    let began = std::time::Instant::now();
    write_some(node, &mut written, 1);
    check(node.mountpoint(), &written);
    assert!(began.elapsed() < Duration::from_secs(5), "the job waited for the disk");
    is_told(node, 1, 4, "2s");
    std::thread::sleep(Duration::from_secs(seconds).saturating_sub(began.elapsed()));
    disk.thaw();
    recovers(node);
    cluster.umount_all();
    check(cluster.backing(), &written);
}

#[test]
fn an_unmount_from_a_failing_disk_says_so_and_can_be_repeated() {
    let Some((disk, cluster)) = setup("end") else { return };
    let node = cluster.node(0);
    let mut written = Written::new();
    write_some(node, &mut written, 0);
    disk.fail();
    let output = node.ebb("umount", &["--timeout", "60s"], &[]);
    assert_eq!(output.status.code(), Some(3), "{}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("again") && said.contains("job summary"), "{}", describe(&output));
    check(node.mountpoint(), &written);
    disk.heal();
    node.umount();
    check(cluster.backing(), &written);
}
