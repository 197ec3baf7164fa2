//! Files that sit at a node: posix and commit past the daemon. What a node alone does costs
//! nothing, what others do goes to where the file sits, everybody sees what the model promises, and
//! what is left when the node stands still, or it or the service is dead. Where the kernel cannot
//! tell writes, these say SKIPPED (EBB_REQUIRE_TRACKER=1: fail).

use ebb_testkit::random::generator;
use ebb_testkit::steps::Step;
use ebb_testkit::{Cluster, Node, Steps};
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::{self, append, open, requests, unasked};
use ebb_tests::turns::Turns;
use rand::Rng;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::Signal;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const RECORD: u64 = 8 << 10;

fn asked(node: &Node) -> u64 {
    requests(node, "attach") + requests(node, "append") + requests(node, "query")
}

fn seats(node: &Node) -> u64 {
    unasked(node, "seats")
}

fn at_seats(node: &Node) -> u64 {
    unasked(node, "at_seats")
}

/// Nodes past whose daemons files can be written.
fn told(model: &str, nodes: usize, flush: &str) -> Option<Cluster> {
    let cluster = Cluster::builder().nodes(nodes).consistency(model).flush(flush);
    nodes::told(cluster.option("--io-path", "auto").separate_meta().start())
}

/// Opens until the file sits at the node: what was closed before, there or elsewhere, is let go a
/// moment later.
fn seated(node: &Node, open: impl Fn() -> File) -> File {
    let (before, end) = (seats(node), Instant::now() + Duration::from_secs(10));
    loop {
        let file = open();
        if seats(node) > before {
            return file;
        }
        drop(file);
        assert!(Instant::now() < end, "it does not sit here: {:#}", node.status());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn record(step: u64) -> Vec<u8> {
    bytes(1, 0, step * RECORD, RECORD)
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).expect("read")
}

#[test]
fn a_node_alone_asks_nothing() {
    for model in ["posix", "commit"] {
        let Some(cluster) = told(model, 2, "end") else { return };
        let a = cluster.node(0);
        let file = open(&a.path("f"));
        let before = asked(a);
        for step in 0..1000 {
            file.write_all_at(&record(step), step * RECORD).expect("write");
        }
        let mut got = vec![0; RECORD as usize];
        for step in (0..1000).rev() {
            file.read_exact_at(&mut got, step * RECORD).expect("read");
            same("read back", &got, &record(step));
        }
        let cost = asked(a) - before;
        assert!(cost < 10, "{model}: {cost} requests");
        assert_eq!(seats(a), 1, "{model}: {:#}", a.status());
        if model == "commit" {
            file.sync_all().expect("fsync");
        }
        let want = bytes(1, 0, 0, 1000 * RECORD);
        same("on the other node", &read(&cluster.node(1).path("f")), &want);
        drop(file);
        // Once more, with content, for reading and for writing.
        let file = seated(a, || open(&a.path("f")));
        file.write_all_at(&record(7), 0).expect("write");
        drop(file);
        drop(seated(a, || File::open(a.path("f")).expect("open")));
        let mut want = want;
        want[..RECORD as usize].copy_from_slice(&record(7));
        cluster.umount_all();
        same("on the backing", &read(&cluster.backing().join("f")), &want);
    }
}

/// A file that sits at node 0, which has written `steps` records.
fn sitting(cluster: &Cluster, steps: u64) -> File {
    let a = cluster.node(0);
    let file = seated(a, || open(&a.path("f")));
    for step in 0..steps {
        file.write_all_at(&record(step), step * RECORD).expect("write");
    }
    file
}

#[test]
fn others_write_where_the_file_sits() {
    let Some(cluster) = told("posix", 3, "end") else { return };
    let (a, b, c) = (cluster.node(0), cluster.node(1), cluster.node(2));
    let file = sitting(&cluster, 20);
    let other = open(&b.path("f"));
    let mut want = bytes(1, 0, 0, 20 * RECORD);
    same("read elsewhere", &read(&b.path("f")), &want);
    for step in 0..30u64 {
        let at = (step * 5 % 23) * RECORD + step;
        let data = bytes(2, 0, at, 3000);
        if want.len() < at as usize + data.len() {
            want.resize(at as usize + data.len(), 0);
        }
        want[at as usize..at as usize + data.len()].copy_from_slice(&data);
        match step % 3 {
            0 => other.write_all_at(&data, at).expect("write elsewhere"),
            1 => file.write_all_at(&data, at).expect("write where it sits"),
            _ => open(&c.path("f")).write_all_at(&data, at).expect("write"),
        }
        let mut got = vec![0; want.len()];
        file.read_exact_at(&mut got, 0).expect("read where it sits");
        same(&format!("step {step} where it sits"), &got, &want);
        other.read_exact_at(&mut got, 0).expect("read elsewhere");
        same(&format!("step {step} elsewhere"), &got, &want);
        for node in [a, b, c] {
            let len = std::fs::metadata(node.path("f")).expect("stat").len();
            assert_eq!(len, want.len() as u64, "step {step} on {}", node.name());
        }
    }
    assert!(at_seats(b) >= 10 && at_seats(c) >= 10, "{} {}", at_seats(b), at_seats(c));
    // Appends, cuts and a truncating open.
    append(&b.path("f")).write_all(b"appended elsewhere").expect("append");
    want.extend(b"appended elsewhere");
    append(&a.path("f")).write_all(b"and here").expect("append");
    want.extend(b"and here");
    for node in [c, a, b] {
        same("appended", &read(&node.path("f")), &want);
    }
    other.set_len(5 * RECORD + 7).expect("cut");
    want.truncate(5 * RECORD as usize + 7);
    for node in [a, c] {
        same("cut", &read(&node.path("f")), &want);
    }
    let mut got = vec![0; RECORD as usize];
    assert_eq!(file.read_at(&mut got, 5 * RECORD).expect("read"), 7);
    std::fs::write(c.path("f"), b"new").expect("truncate and write");
    assert_eq!(file.read_at(&mut got, 0).expect("read"), 3);
    same("anew", &got[..3], b"new");
    file.write_all_at(b"er", 3).expect("write");
    same("written on", &read(&b.path("f")), b"newer");
    // It has lost its name, and who has it open goes on.
    std::fs::remove_file(b.path("f")).expect("unlink");
    file.write_all_at(b"est", 3).expect("write");
    assert_eq!(other.read_at(&mut got, 0).expect("read"), 6);
    same("unlinked", &got[..6], b"newest");
    drop((file, other));
    cluster.umount_all();
    assert_eq!(std::fs::read_dir(cluster.backing()).expect("list").count(), 0);
}

#[test]
fn what_others_commit_is_read_where_the_file_sits() {
    let Some(cluster) = told("commit", 2, "end") else { return };
    let b = cluster.node(1);
    let file = sitting(&cluster, 20);
    file.sync_all().expect("commit");
    let other = open(&b.path("f"));
    let mut want = bytes(1, 0, 0, 20 * RECORD);
    for step in 0..20 {
        let at = step * RECORD;
        let data = bytes(3, 0, at, RECORD);
        other.write_all_at(&data, at).expect("write");
        other.sync_all().expect("commit");
        want[at as usize..(at + RECORD) as usize].copy_from_slice(&data);
        let mut got = vec![0; want.len()];
        file.read_exact_at(&mut got, 0).expect("read");
        same(&format!("step {step}"), &got, &want);
        let data = bytes(4, 0, at, 100);
        file.write_all_at(&data, at + 50).expect("write over it");
        want[at as usize + 50..at as usize + 150].copy_from_slice(&data);
        file.sync_all().expect("commit");
        other.read_exact_at(&mut got, 0).expect("read");
        same(&format!("step {step} elsewhere"), &got, &want);
    }
    assert!(at_seats(b) >= 20, "{}", at_seats(b));
    drop((file, other));
    cluster.umount_all();
    same("on the backing", &read(&cluster.backing().join("f")), &want);
}

#[test]
fn appends_of_two_nodes_are_all_there() {
    const EACH: u64 = 300;
    let Some(cluster) = told("posix", 2, "end") else { return };
    std::thread::scope(|scope| {
        for n in 0..2u64 {
            let cluster = &cluster;
            scope.spawn(move || {
                let mut random = generator(n);
                // The file sits at node 0, mostly.
                std::thread::sleep(Duration::from_millis(20 * n));
                let mut file = append(&cluster.node(n as usize).path("f"));
                for step in 0..EACH {
                    file.write_all(format!("{n} {step:06}\n").as_bytes()).expect("append");
                    if random.random_range(0..5) == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    if random.random_range(0..100) == 0 && n == 1 {
                        drop(file);
                        file = append(&cluster.node(n as usize).path("f"));
                    }
                }
            });
        }
    });
    let text = std::fs::read_to_string(cluster.node(0).path("f")).expect("read");
    for n in 0..2 {
        let mine: Vec<&str> = text.lines().filter(|l| l.starts_with(&format!("{n} "))).collect();
        let want: Vec<String> = (0..EACH).map(|s| format!("{n} {s:06}")).collect();
        assert_eq!(mine, want, "of node {n}");
    }
    let (here, there) = (
        cluster.nodes().iter().map(seats).sum::<u64>(),
        at_seats(cluster.node(0)) + at_seats(cluster.node(1)),
    );
    println!("{here} seats, {there} operations at them");
    assert!(here > 0 && there > 0);
}

/// Nobody is told anything old while the node at which a file sits stands still.
#[test]
fn a_stopped_seat_is_waited_for_and_then_an_error() {
    let Some(cluster) = told("posix", 2, "end") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    let file = sitting(&cluster, 20);
    same("before", &read(&b.path("f")), &bytes(1, 0, 0, 20 * RECORD));
    let other = File::open(b.path("f")).expect("open");
    file.write_all_at(&record(77), 3 * RECORD).expect("write");
    a.signal(Signal::STOP);
    // The kernel goes on without the daemon.
    file.write_all_at(&record(78), 4 * RECORD).expect("write");
    let start = Instant::now();
    let mut got = vec![0; RECORD as usize];
    let read_there = other.read_exact_at(&mut got, 3 * RECORD);
    println!("{read_there:?} after {:?}", start.elapsed());
    a.signal(Signal::CONT);
    assert!(read_there.is_err(), "read beside a node that stands still");
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
    let end = Instant::now() + Duration::from_secs(20);
    while let Err(e) = other.read_exact_at(&mut got, 3 * RECORD) {
        assert!(Instant::now() < end, "{e}");
        std::thread::sleep(Duration::from_millis(100));
    }
    same("afterwards", &got, &record(77));
    other.read_exact_at(&mut got, 4 * RECORD).expect("read");
    same("afterwards", &got, &record(78));
    drop((file, other));
    cluster.umount_all();
}

#[test]
fn a_dead_seat_loses_no_byte_silently() {
    for model in ["posix", "commit"] {
        let Some(cluster) = told(model, 2, "end") else { return };
        let (a, b) = (cluster.node(0), cluster.node(1));
        let file = sitting(&cluster, 10);
        file.sync_all().expect("fsync");
        same("before", &read(&b.path("f")), &bytes(1, 0, 0, 10 * RECORD));
        for step in 10..20 {
            file.write_all_at(&record(step), step * RECORD).expect("write");
        }
        file.write_all_at(&record(99), 0).expect("write again");
        a.kill9();
        drop(file);
        let _ = a.ebb("umount", &[], &[]);
        if model == "posix" {
            let other = File::open(b.path("f"));
            let mut got = vec![0; RECORD as usize];
            let read = other.and_then(|f| f.read_exact_at(&mut got, 0));
            assert!(read.is_err(), "a byte that may be old was read");
        }
        // Its bytes are in its cache, and its next daemon brings them.
        a.mount();
        let mut want = bytes(1, 0, 0, 20 * RECORD);
        want[..RECORD as usize].copy_from_slice(&record(99));
        for node in [a, b] {
            same(&format!("{model} on {}", node.name()), &read(&node.path("f")), &want);
        }
        let again = open(&b.path("f"));
        again.write_all_at(&record(5), 0).expect("write");
        again.sync_all().expect("fsync");
        want[..RECORD as usize].copy_from_slice(&record(5));
        same("written on", &read(&a.path("f")), &want);
        drop(again);
        cluster.umount_all();
        same("on the backing", &read(&cluster.backing().join("f")), &want);
    }
}

/// A connection that broke with the daemon before is no reason to fail: nothing was sent on it.
#[test]
fn an_append_goes_to_the_next_daemon_of_a_seat() {
    let Some(cluster) = told("posix", 2, "end") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    let mut want = Vec::new();
    for round in 0..4u8 {
        let file = seated(a, || open(&a.path("f")));
        let mut theirs = append(&b.path("f"));
        let before = at_seats(b);
        for more in [&[round; 500][..], &[round + 100; 7]] {
            theirs.write_all(more).unwrap_or_else(|e| panic!("round {round}: append: {e}"));
            want.extend_from_slice(more);
        }
        assert!(at_seats(b) > before, "it did not sit there");
        a.kill9();
        drop(file);
        let _ = a.ebb("umount", &[], &[]);
        a.mount();
        drop(theirs);
    }
    same("at last", &read(&a.path("f")), &want);
    cluster.umount_all();
}

/// The same when somebody has looked at it before: what he found counts as seen, and is not published by that.
#[test]
fn what_was_noted_is_published_in_a_moment() {
    let Some(cluster) = told("posix", 1, "end") else { return };
    let path = cluster.node(0).path("f");
    let file = seated(cluster.node(0), || open(&path));
    let unpublished = || {
        let mut state = [0; 200];
        let n = rustix::fs::getxattr(&path, "user.ebb.state", &mut state).expect("its state");
        let text = String::from_utf8_lossy(&state[..n]).into_owned();
        let first = text.split([' ', '=']).nth(1).and_then(|n| n.parse::<u64>().ok());
        first.unwrap_or_else(|| panic!("{text}"))
    };
    file.write_all_at(&record(1), 0).expect("write");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(unpublished(), RECORD, "it was just looked at");
    let end = Instant::now() + Duration::from_secs(10);
    while unpublished() > 0 {
        assert!(Instant::now() < end, "nobody publishes it");
        std::thread::sleep(Duration::from_millis(200));
    }
    drop(file);
    cluster.umount_all();
}

/// A file that was closed is released later: what was written before the close, and only noted between the two,
/// is published with the release. (A descriptor in a socket that goes is released without being closed.)
#[test]
fn what_was_noted_since_the_close_is_published_with_the_release() {
    let Some(cluster) = told("posix", 2, "end") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    let mut sat = 0;
    for round in 0..8 {
        let path = a.path(format!("f{round}"));
        let before = seats(a);
        let file = open(&path);
        file.write_all_at(&record(round), 0).expect("write");
        sat += seats(a) - before;
        let ends = UnixStream::pair().expect("sockets");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut also = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(also.push(SendAncillaryMessage::ScmRights(&files)));
        let some = [IoSlice::new(b"x")];
        rustix::net::sendmsg(&ends.0, &some, &mut also, SendFlags::empty()).expect("sent");
        // From then on its times tell whether it was written to.
        std::thread::sleep(Duration::from_millis(100));
        drop(file);
        let mut noted = [0; 200];
        rustix::fs::getxattr(&path, "user.ebb.state", &mut noted).expect("its state");
        drop(ends);
        same(&format!("round {round}"), &read(&b.path(format!("f{round}"))), &record(round));
    }
    assert!(sat >= 8, "it sat here {sat} times");
    cluster.umount_all();
}

/// A daemon that takes over bytes of a file needs nothing of the node at which the file sits by now.
#[test]
fn a_cache_is_taken_over_while_a_seat_does_not_answer() {
    let Some(cluster) = told("posix", 2, "end") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    std::fs::write(b.path("f"), bytes(7, 0, 0, 10 * RECORD)).expect("write");
    same("there", &read(&a.path("f")), &bytes(7, 0, 0, 10 * RECORD));
    drop(seated(a, || open(&a.path("f"))));
    // Another process: one that starts programs must not have files open on a mount that stands still.
    let (before, mut theirs) = (seats(a), Steps::spawn(a.mountpoint()));
    theirs.must(Step::Open { file: 1, path: a.path("f") });
    theirs.must(Step::Write { file: 1, offset: 0, data: record(99) });
    assert!(seats(a) > before, "it does not sit there");
    a.signal(Signal::STOP);
    b.kill9();
    let _ = b.ebb("umount", &[], &[]);
    let start = Instant::now();
    let mounted = b.mount_command(&[]).output().expect("ebb can be started");
    let took = start.elapsed();
    a.signal(Signal::CONT);
    assert!(mounted.status.success(), "{}", ebb_testkit::describe(&mounted));
    println!("mounted after {took:?}");
    // What it may trust is waited for, and not until it counts as gone.
    assert!(took < Duration::from_secs(9), "{took:?}");
    let mut want = bytes(7, 0, 0, 10 * RECORD);
    want[..RECORD as usize].copy_from_slice(&record(99));
    for node in [a, b] {
        same(node.name(), &read(&node.path("f")), &want);
    }
    theirs.must(Step::Close { file: 1 });
    drop(theirs);
    cluster.umount_all();
    same("on the backing", &read(&cluster.backing().join("f")), &want);
}

/// What the next daemon of a seat has published is published, also to the daemon after that.
#[test]
fn a_seat_that_ended_publishes_nothing_a_second_time() {
    for model in ["posix", "commit"] {
        let Some(cluster) = told(model, 2, "end") else { return };
        let (a, b) = (cluster.node(0), cluster.node(1));
        let again = |what: &str| {
            a.kill9();
            let _ = a.ebb("umount", &[], &[]);
            a.mount();
            eprintln!("{model}: mounted again {what}");
        };
        let file = sitting(&cluster, 20);
        let before = seats(a);
        assert!(before > 0, "{model}: it never sat here");
        again("after the file sat here");
        drop(file);
        let mut want = bytes(1, 0, 0, 20 * RECORD);
        for (node, step) in [(b, 41), (b, 43), (a, 42)] {
            // The last one knows what the other one has published, and has not read it.
            let at = (step - 40) * 2 * RECORD;
            let file = open(&node.path("f"));
            file.write_all_at(&record(step), at).expect("write");
            file.sync_all().expect("fsync");
            want[at as usize..][..RECORD as usize].copy_from_slice(&record(step));
            same(&format!("{model}, step {step}"), &read(&b.path("f")), &want);
        }
        again("after others have written");
        for node in [b, a] {
            same(&format!("{model} on {}", node.name()), &read(&node.path("f")), &want);
        }
        assert!(!a.log().contains("overwritten since"), "{model}: {}", a.log());
        cluster.umount_all();
        same("on the backing", &read(&cluster.backing().join("f")), &want);
    }
}

/// The end of a seat is in the node's journal before others may write: a daemon that dies after it leaves no
/// seat, in which every byte of the cache file would be right.
#[test]
fn a_closed_file_of_a_dead_node_is_no_seat() {
    for (model, flush) in [("posix", "end"), ("commit", "end"), ("posix", "immediate")] {
        let Some(cluster) = told(model, 2, flush) else { return };
        let (a, b) = (cluster.node(0), cluster.node(1));
        let label = format!("{model}, flush {flush}");
        let mut sat = 0;
        for round in 0..2 {
            let name = format!("f{round}");
            let before = seats(a);
            let file = open(&a.path(&name));
            (0..20).for_each(|n| file.write_all_at(&record(n), n * RECORD).expect("write"));
            sat += seats(a) - before;
            file.sync_all().expect("fsync");
            drop(file);
            let other = open(&b.path(&name));
            other.write_all_at(&record(40 + round), 4 * RECORD).expect("write");
            other.sync_all().expect("fsync");
            a.kill9();
            let _ = a.ebb("umount", &[], &[]);
            a.mount();
            let mut want = bytes(1, 0, 0, 20 * RECORD);
            want[4 * RECORD as usize..][..RECORD as usize].copy_from_slice(&record(40 + round));
            for node in [b, a] {
                let what = format!("{label}, round {round} on {}", node.name());
                same(&what, &read(&node.path(&name)), &want);
            }
            assert!(!a.log().contains("overwritten since"), "{label}: {}", a.log());
        }
        assert!(sat > 0, "{label}: it never sat here");
        cluster.umount_all();
    }
}

/// A node that is lost takes little with it: it publishes though nobody asks.
#[test]
fn what_is_written_is_published_in_a_moment() {
    let Some(cluster) = told("posix", 1, "end") else { return };
    let a = cluster.node(0);
    let file = sitting(&cluster, 5);
    for step in 5..8 {
        let before = requests(a, "attach");
        file.write_all_at(&record(step), step * RECORD).expect("write");
        let end = Instant::now() + Duration::from_secs(10);
        while requests(a, "attach") == before {
            assert!(Instant::now() < end, "not published");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    // Nothing was written, and nothing is told.
    let before = requests(a, "attach");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(requests(a, "attach"), before);
}

/// A node that is lost with its cache: what was flushed is there when that is known.
#[test]
fn a_lost_seat_ends_with_its_name() {
    let Some(cluster) = told("posix", 2, "end") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    let file = sitting(&cluster, 10);
    a.drain();
    a.kill9();
    drop(file);
    let read_there = || {
        let mut got = vec![0; 10 * RECORD as usize];
        File::open(b.path("f")).and_then(|f| f.read_exact_at(&mut got, 0)).map(|()| got)
    };
    read_there().expect_err("nobody knows what the node wrote at last");
    let _ = a.ebb("umount", &[], &[]);
    std::fs::remove_dir_all(a.cache()).expect("its cache goes, too");
    a.mount();
    same("flushed", &read_there().expect("read"), &bytes(1, 0, 0, 10 * RECORD));
    open(&b.path("f")).write_all_at(&record(3), 0).expect("write");
    same("written on", &read(&a.path("f"))[..RECORD as usize], &record(3));
    cluster.umount_all();
}

#[test]
fn a_restarted_service_knows_where_files_sit() {
    for model in ["posix", "commit"] {
        let Some(mut cluster) = told(model, 2, "end") else { return };
        let file = sitting(&cluster, 20);
        let mut want = bytes(1, 0, 0, 20 * RECORD);
        for round in 0..3 {
            cluster.kill_meta();
            file.write_all_at(&record(50 + round), round * RECORD).expect("write");
            cluster.restart_meta();
            file.sync_all().expect("fsync");
            let at = (round * RECORD) as usize;
            want[at..at + RECORD as usize].copy_from_slice(&record(50 + round));
            same("read elsewhere", &read(&cluster.node(1).path("f")), &want);
            let data = bytes(9, 0, round, 100);
            let other = open(&cluster.node(1).path("f"));
            other.write_all_at(&data, 10 * RECORD + round * 100).expect("write elsewhere");
            drop(other);
            let at = (10 * RECORD + round * 100) as usize;
            want[at..at + 100].copy_from_slice(&data);
            let mut got = vec![0; want.len()];
            file.read_exact_at(&mut got, 0).expect("read");
            same("where it sits", &got, &want);
        }
        drop(file);
        cluster.umount_all();
        same("on the backing", &read(&cluster.backing().join("f")), &want);
    }
}

/// Under commit every change is committed before the next operation.
fn turns(model: &str, nodes: usize, flush: &str) {
    let Some(cluster) = told(model, nodes, flush) else { return };
    let commits = model == "commit";
    Turns { steps: 1500, in_a_row: 12, pauses: false, commits }.take(&cluster, |cluster| {
        let here: u64 = cluster.nodes().iter().map(seats).sum();
        let there: u64 = cluster.nodes().iter().map(at_seats).sum();
        println!("{model}, {nodes} nodes: {here} seats, {there} operations at them");
        assert!(here > 30 && there > 5, "{here}, {there}");
    });
}

#[test]
fn two_nodes_in_turn_under_posix() {
    turns("posix", 2, "end");
}

#[test]
fn three_nodes_in_turn_under_posix_while_it_is_flushed() {
    turns("posix", 3, "immediate");
}

#[test]
fn two_nodes_in_turn_under_commit() {
    turns("commit", 2, "end");
}

#[test]
fn three_nodes_in_turn_under_commit_while_it_is_flushed() {
    turns("commit", 3, "immediate");
}
