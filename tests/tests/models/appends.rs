//! Appends that are cut short: by a daemon that dies in the middle of one.

use ebb_testkit::{Builder, Cluster, Node, skip_reason};
use ebb_tests::copies::{self, has_partner};
use ebb_tests::nodes::{self, unasked};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn appends(node: &Node) -> u64 {
    // Not by a process, which would tell a node that stands still of what it closes as it begins.
    node.counter("ebb_requests_total{request=\"append\"}")
}

/// Another node cuts the file. The append is refused, asked for again and made, and the daemon dies before
/// its bytes are stored: what it has at their place was cut, and does not come back.
fn killed_in_an_append_behind_a_cut(cluster: &Cluster) {
    let [writer, cutter, reader] = [0, 1, 2].map(|i| cluster.node(i));
    let mut file =
        File::options().append(true).create(true).open(writer.path("log")).expect("open");
    file.write_all(b"some lines\n").expect("append");
    File::options().write(true).open(cutter.path("log")).expect("open").set_len(4).expect("cut");
    // Whoever has a lease is waited for before a change is answered.
    let held = File::open(reader.path("log")).expect("open");
    held.read_exact_at(&mut [0; 4], 0).expect("read");
    if writer.status()["copies"]["replicas"] == 2 {
        assert_eq!(writer.counter("ebb_copied_bytes_total"), 11, "it had a copy");
    }
    let before = appends(writer);
    reader.signal(Signal::STOP);
    let appending = std::thread::spawn(move || file.write_all(b" and more"));
    std::thread::sleep(Duration::from_secs(1));
    let (waits, asked) = (!appending.is_finished(), appends(writer) - before);
    writer.kill9();
    reader.signal(Signal::CONT);
    assert!(waits, "nobody was waited for");
    assert_eq!(asked, 2, "refused, and made");
    appending.join().expect("no panic").expect_err("the daemon is dead");
    drop(held);
    // What its cache has is not lost: it is mounted again.
    let _ = writer.ebb("umount", &["--no-drain"], &[]);
    writer.mount();
    for node in [reader, cutter, writer] {
        let found = fs::read(node.path("log")).expect("read");
        assert!(found == b"some\0\0\0\0\0\0\0\0\0", "{}", found.escape_ascii());
    }
    cluster.umount_all();
    let found = fs::read(cluster.backing().join("log")).expect("read");
    assert!(found == b"some\0\0\0\0\0\0\0\0\0", "{}", found.escape_ascii());
}

fn builder() -> Builder {
    Cluster::builder().nodes(3).consistency("posix").flush("end").separate_meta()
}

/// (Past the daemon the other node has the cut made here.)
#[test]
fn what_another_node_cut_does_not_come_back_where_an_append_is_lost() {
    if skip_reason().is_none() {
        killed_in_an_append_behind_a_cut(&builder().option("--io-path", "daemon").start());
    }
}

#[test]
fn what_another_node_cut_does_not_come_back_with_copies() {
    if skip_reason().is_none() {
        let cluster = copies::builder(3, "posix").separate_meta().start();
        cluster.nodes().iter().for_each(has_partner);
        killed_in_an_append_behind_a_cut(&cluster);
    }
}

const KILLS: usize = 4;
const PROGRAMS: usize = 4;

/// Lines to a file, and what the program was told of each.
fn append_until(ended: &AtomicBool, path: &Path) -> Vec<(String, io::Result<()>)> {
    let mut file = File::options().append(true).open(path).expect("open");
    let (mut told, start) = (Vec::new(), Instant::now());
    while !ended.load(Ordering::Relaxed) && start.elapsed() < Duration::from_secs(120) {
        let line = told.len().to_string();
        let made = file.write_all(format!("{line}\n").as_bytes());
        told.push((line, made));
    }
    told
}

/// The files sit at another node, to which appends are sent. Whether one was made there when the daemon
/// died is not known to the next one: it fails once, and is made at most once.
#[test]
fn an_append_to_where_the_file_sits_is_not_made_twice() {
    let cluster = Cluster::builder().nodes(2).consistency("posix").flush("end").separate_meta();
    let cluster = cluster.supervised().prepare();
    let (seat, writer) = (cluster.node(0), cluster.node(1));
    seat.mount_with(&["--supervise", "off", "--io-path", "auto"]);
    writer.mount();
    let Some(cluster) = nodes::told(cluster) else { return };
    let (seat, writer) = (cluster.node(0), cluster.node(1));
    let names: Vec<String> = (0..PROGRAMS).map(|i| format!("log-{i}")).collect();
    let held: Vec<File> = names.iter().map(|name| nodes::open(&seat.path(name))).collect();
    held.iter().for_each(|file| file.write_all_at(b"begin\n", 0).expect("write"));
    assert_eq!(unasked(seat, "seats"), PROGRAMS as u64, "{:#}", seat.status());
    let ended = &AtomicBool::new(false);
    let told: Vec<Vec<_>> = std::thread::scope(|scope| {
        let start = |name| scope.spawn(move || append_until(ended, &writer.path(name)));
        let programs: Vec<_> = names.iter().map(start).collect();
        for _ in 0..KILLS {
            std::thread::sleep(Duration::from_millis(200));
            if !writer.kill_daemon() {
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(200));
        ended.store(true, Ordering::Relaxed);
        programs.into_iter().map(|p| p.join().expect("no panic")).collect()
    });
    assert_eq!(writer.status()["supervisor"]["restarts"], KILLS, "{:#}", writer.status());
    assert!(unasked(writer, "at_seats") > 0, "the last daemon sent them, too");
    let mut failed = 0;
    for (name, told) in names.iter().zip(&told) {
        let log = fs::read_to_string(writer.path(name)).expect("read");
        for (line, made) in told {
            let times = log.lines().filter(|other| other == line).count();
            match made {
                Ok(()) => assert_eq!(times, 1, "{name}: line {line}"),
                Err(e) => {
                    assert_eq!(e.raw_os_error(), Some(libc::EIO), "{name}: line {line}: {e}");
                    assert!(times <= 1, "{name}: line {line} has failed, and is there twice");
                    failed += 1;
                }
            }
        }
    }
    println!("{} appends, {failed} failed", told.iter().map(Vec::len).sum::<usize>());
    assert!((1..=KILLS * PROGRAMS).contains(&failed), "{failed} failed");
    drop(held);
    cluster.umount_all();
}
