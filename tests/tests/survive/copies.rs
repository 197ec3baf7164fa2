//! Daemons that die under their supervisors while their bytes have copies with a partner.

use ebb_testkit::skip_reason;
use ebb_tests::content::{bytes, same};
use ebb_tests::copies::{builder, clear, has_partner, lose, partner_of, wait_adopted};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const PIECE: u64 = 300_000;

/// Both die in turn, and go on; then one is lost with all it had.
#[test]
fn what_was_synced_around_deaths_has_its_copies() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = builder(2, "commit").separate_meta().supervised().start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    cluster.nodes().iter().for_each(has_partner);
    let file = File::create(a.path("f")).expect("create");
    let mut whole = Vec::new();
    let mut more = |piece: u64| {
        let data = bytes(7, piece, piece * PIECE, PIECE);
        file.write_all_at(&data, piece * PIECE).expect("write");
        file.sync_all().expect("fsync");
        whole.extend(data);
    };
    more(0);
    assert!(a.kill_daemon());
    more(1);
    assert!(b.kill_daemon());
    more(2);
    has_partner(a);
    assert!(a.kill_daemon());
    assert!(b.kill_daemon());
    more(3);
    has_partner(a);
    lose(a);
    drop(file);
    wait_adopted(b, 4 * PIECE);
    same("f", &fs::read(b.path("f")).expect("read"), &whole);
    clear(a);
    b.umount();
    same("f", &fs::read(cluster.backing().join("f")).expect("read"), &whole);
}

/// The partner has cut the file, so that the service refuses an append and it is asked for once more; the
/// daemon dies before it is answered, and the next one asks again.
#[test]
fn an_append_that_was_asked_for_twice_is_made_once() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = builder(3, "posix").separate_meta().supervised().start();
    cluster.nodes().iter().for_each(has_partner);
    let partner = partner_of(&cluster, 0);
    let (writer, cutter) = (cluster.node(0), cluster.node(partner));
    let reader = cluster.node(3 - partner);
    let mut file =
        File::options().append(true).create(true).open(writer.path("log")).expect("open");
    file.write_all(b"some lines\n").expect("append");
    assert_eq!(writer.counter("ebb_copied_bytes_total"), 11, "it has a copy");
    // Whoever has a lease is waited for before a change is answered.
    let held = File::open(reader.path("log")).expect("open");
    File::options().write(true).open(cutter.path("log")).unwrap().set_len(4).expect("cut");
    let mut some = [0; 4];
    held.read_exact_at(&mut some, 0).expect("read");
    // Not by a process, which would tell the node that stands still of what it closes as it begins.
    let appends = || writer.counter("ebb_requests_total{request=\"append\"}");
    let before = appends();
    reader.signal(Signal::STOP);
    let appending = std::thread::spawn(move || file.write_all(b" and more").map(|()| file));
    std::thread::sleep(Duration::from_secs(1));
    let (waits, asked) = (!appending.is_finished(), appends() - before);
    let killed = writer.kill_daemon();
    reader.signal(Signal::CONT);
    assert!(waits && killed, "somebody is waited for: {waits}, killed: {killed}");
    assert_eq!(asked, 2, "refused, and made");
    drop(appending.join().expect("no panic").expect("append"));
    for node in [reader, cutter, writer] {
        same("log", &fs::read(node.path("log")).expect("read"), b"some and more");
    }
    assert_eq!(appends(), 1, "the next daemon has asked again");
    drop(held);
    cluster.umount_all();
    same("log", &fs::read(cluster.backing().join("log")).expect("read"), b"some and more");
}
