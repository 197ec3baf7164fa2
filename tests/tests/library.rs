//! libebb's primitives on real mounts of two nodes: what each one does, and what it refuses
//! (docs/libebb.md has the table).

use ebb::{Extended, NOBODY, Owner};
use ebb_testkit::Cluster;
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::{only_asked, open, requests};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

fn two_nodes() -> Cluster {
    only_asked(2).start()
}

fn both(cluster: &Cluster, name: &str) -> (File, File) {
    (open(&cluster.node(0).path(name)), open(&cluster.node(1).path(name)))
}

fn number(file: &File) -> u32 {
    file.ebb_stat().expect("stat").node
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.expect_err("it must fail").raw_os_error().expect("of the system")
}

fn read(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut got = vec![0; len];
    let n = file.read_at(&mut got, offset).expect("read");
    got.truncate(n);
    got
}

fn read_owner(file: &File, offset: u64, len: usize, owner: u32) -> io::Result<Vec<u8>> {
    let mut got = vec![0; len];
    let n = file.read_owner(&mut got, offset, owner)?;
    got.truncate(n);
    Ok(got)
}

fn owner(range: std::ops::Range<u64>, node: u32) -> Owner {
    Owner { range, node }
}

#[test]
fn what_is_attached_is_seen_and_what_is_not_is_not() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    assert!(a.is_ebb() && number(&a) != number(&b));
    let data = bytes(1, 0, 0, 10_000);
    a.write_all_at(&data, 0).expect("write");
    assert_eq!(read(&a, 0, 10_000), data, "who wrote sees it");
    assert_eq!(b.query(None).expect("query"), [], "nobody has attached anything");
    same("and nothing is seen", &read(&b, 0, 10_000), &[]);
    assert_eq!(a.ebb_stat().expect("stat").unattached, 10_000);

    // A part of a write.
    a.attach(Some(2000..3000)).expect("attach");
    assert_eq!(b.query(None).expect("query"), [owner(2000..3000, number(&a))]);
    same("attached", &read(&b, 2000, 5000), &data[2000..3000]);
    same("before it are zeros", &read(&b, 0, 2000), &[0; 2000]);
    assert_eq!(a.ebb_stat().expect("stat").unattached, 9000);

    // Without a query the other node goes by what it knows.
    a.attach(None).expect("attach the file");
    assert_eq!(read(&b, 0, 10_000).len(), 3000, "no query, nothing new");
    assert_eq!(b.query(Some(0..1 << 40)).expect("query"), [owner(0..10_000, number(&a))]);
    same("all", &read(&b, 0, 20_000), &data);
}

#[test]
fn bytes_that_were_never_written_cannot_be_attached() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    // Whoever starts a program, as this does, closes copies of its files in it, which publishes.
    let sent = requests(cluster.node(0), "attach");
    a.write_all_at(&[1; 100], 50).expect("write");
    for never in [0..10, 0..100, 149..151, 200..300, 1 << 40..(1 << 40) + 1] {
        assert_eq!(errno(a.attach(Some(never.clone()))), libc::ENODATA, "{never:?}");
        assert_eq!(errno(b.attach(Some(never))), libc::ENODATA);
    }
    assert_eq!(b.query(None).expect("query"), [], "nothing of it was done");
    a.attach(Some(70..70)).expect("nothing is nothing");
    a.attach(Some(50..150)).expect("attach");
    assert_eq!(requests(cluster.node(0), "attach"), sent + 1);
    // It is not sent twice, nor when there is nothing.
    a.attach(Some(60..100)).expect("attached already");
    a.attach(None).expect("attached already");
    b.attach(None).expect("nothing was ever written there");
    assert_eq!(requests(cluster.node(0), "attach"), sent + 1);
    assert_eq!(requests(cluster.node(1), "attach"), 0);
}

#[test]
fn an_attach_takes_bytes_from_who_had_them() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    a.write_all_at(&[1; 300], 0).expect("write");
    a.attach(None).expect("attach");
    b.write_all_at(&[2; 100], 100).expect("write");
    b.attach(Some(100..200)).expect("attach");
    let (na, nb) = (number(&a), number(&b));
    let owners = [owner(0..100, na), owner(100..200, nb), owner(200..300, na)];
    assert_eq!(a.query(None).expect("query"), owners);
    assert_eq!(b.query(Some(150..250)).expect("query"), [owner(150..200, nb), owner(200..250, na)]);
    let want = [[1; 100], [2; 100], [1; 100]].concat();
    assert_eq!(read(&a, 0, 400), want);
    // What was attached once is not written newly by attaching it again.
    a.attach(Some(0..300)).expect("it was attached, and is another's by now");
    assert_eq!(a.query(None).expect("query"), owners);
}

#[test]
fn files_are_attached_and_queried_in_one_request() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    let before = requests(cluster.node(0), "attach");
    for n in 0..2000 {
        a.write_all_at(&[n as u8; 10], n * 20).expect("write");
    }
    a.attach(None).expect("attach");
    assert_eq!(requests(cluster.node(0), "attach"), before + 1);
    let before = requests(cluster.node(1), "query");
    let owners = b.query(None).expect("query");
    assert_eq!(requests(cluster.node(1), "query"), before + 1);
    let na = number(&a);
    // Neighbours within a megabyte may be told as one; here there are gaps between them.
    let want: Vec<Owner> = (0..2000).map(|n| owner(n * 20..n * 20 + 10, na)).collect();
    assert_eq!(owners, want);
}

#[test]
fn many_owned_ranges_come_in_pages() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    let pieces: Vec<ebb::WritePiece<'_>> =
        (0..20_000).map(|n| ebb::WritePiece { offset: n * 1000, data: &[7; 9] }).collect();
    assert_eq!(a.write_list(&pieces).expect("write"), 180_000);
    a.attach(None).expect("attach");
    let owners = b.query(None).expect("query");
    let na = number(&a);
    assert_eq!(owners.len(), 20_000);
    assert!(owners.iter().zip(0..).all(|(o, n)| *o == owner(n * 1000..n * 1000 + 9, na)));
}

#[test]
fn an_owner_is_read_as_long_as_it_is_the_owner() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    let (na, nb) = (number(&a), number(&b));
    let data = bytes(1, 0, 0, 100_000);
    a.write_all_at(&data, 0).expect("write");
    same(
        "one's own, also unpublished",
        &read_owner(&a, 10, 50_000, na).expect("read"),
        &data[10..50_010],
    );
    same("nothing is there yet", &read_owner(&b, 0, 100, na).expect("read"), &[]);
    a.attach(None).expect("attach");
    same("another's", &read_owner(&b, 5, 100_000, na).expect("read"), &data[5..]);
    assert_eq!(errno(read_owner(&b, 0, 100, nb)), libc::ESTALE, "it has nothing");
    assert_eq!(errno(read_owner(&b, 0, 100, NOBODY)), libc::ESTALE, "they are not the backing's");
    assert_eq!(errno(read_owner(&b, 0, 100, 12_345)), libc::ESTALE, "no such node");
    same("behind the end", &read_owner(&b, 200_000, 10, na).expect("read"), &[]);

    // Over bytes of another one can write, and still read the other's.
    b.write_all_at(&[9; 100], 1000).expect("write");
    same("mine", &read_owner(&b, 1000, 100, nb).expect("read"), &[9; 100]);
    same("the owner's", &read_owner(&b, 900, 300, na).expect("read"), &data[900..1200]);
    same("as the mount shows it", &read(&b, 1000, 100), &[9; 100]);
    b.attach(Some(1000..1100)).expect("attach");
    assert_eq!(errno(read_owner(&b, 900, 300, na)), libc::ESTALE);
    a.query(None).expect("query");
    assert_eq!(errno(read_owner(&a, 1000, 100, na)), libc::ESTALE, "it was overtaken");
    same("the new owner's", &read_owner(&a, 1000, 100, nb).expect("read"), &[9; 100]);
    same("what is left", &read_owner(&a, 0, 1000, na).expect("read"), &data[..1000]);
}

#[test]
fn what_nobody_owns_is_the_backings() {
    let cluster = two_nodes();
    std::fs::write(cluster.backing().join("f"), bytes(5, 0, 0, 5000)).expect("prepare");
    let (a, b) = both(&cluster, "f");
    same(
        "the backing's",
        &read_owner(&b, 100, 9000, NOBODY).expect("read"),
        &bytes(5, 0, 100, 4900),
    );
    b.write_all_at(&[1; 10], 200).expect("write");
    same(
        "below what was written here",
        &read_owner(&b, 200, 10, NOBODY).expect("read"),
        &bytes(5, 0, 200, 10),
    );
    // Bytes before the end that nobody ever wrote are zeros.
    a.write_all_at(&[1], 8000).expect("write");
    a.attach(None).expect("attach");
    same("zeros", &read_owner(&b, 5000, 3000, NOBODY).expect("read"), &[0; 3000]);
    assert_eq!(errno(read_owner(&b, 5000, 3001, NOBODY)), libc::ESTALE);
}

#[test]
fn flushed_bytes_are_on_the_backing_and_stay_their_owners() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    let (data, na) = (bytes(1, 0, 0, 100_000), number(&a));
    a.write_all_at(&data, 0).expect("write");
    assert_eq!(a.ebb_stat().expect("stat").unflushed, 100_000);
    a.flush(Some(0..100_000)).expect("flush");
    same("on the backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &data);
    assert_eq!(a.ebb_stat().expect("stat").unflushed, 0);
    assert_eq!(b.query(None).expect("query"), [owner(0..100_000, na)]);
    let before = requests(cluster.node(0), "flush_begin");
    a.flush(None).expect("nothing is left to do");
    b.flush(None).expect("nor there");
    assert_eq!(requests(cluster.node(0), "flush_begin"), before);
}

#[test]
fn a_detach_gives_up_what_was_attached() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    let (data, na) = (bytes(1, 0, 0, 1000), number(&a));
    a.write_all_at(&data, 0).expect("write");
    assert_eq!(errno(a.detach(Some(0..1000))), libc::ENODATA, "it was never attached");
    a.attach(None).expect("attach");
    assert_eq!(errno(a.detach(Some(500..1001))), libc::ENODATA, "not all of it was");
    assert_eq!(errno(b.detach(Some(0..10))), libc::ENODATA, "not by this node");
    b.detach(None).expect("of a file: whatever there is");

    // Nothing is lost with it.
    a.detach(Some(100..300)).expect("detach");
    assert_eq!(b.query(None).expect("query"), [owner(0..100, na), owner(300..1000, na)]);
    same("the backing's", &read_owner(&b, 100, 200, NOBODY).expect("read"), &data[100..300]);
    same("for everybody", &read(&b, 0, 2000), &data);
    same("and here", &read(&a, 0, 2000), &data);
    assert_eq!(errno(a.detach(Some(100..300))), libc::ENODATA, "it was given up");
    assert_eq!(errno(read_owner(&a, 100, 200, na)), libc::ESTALE);

    // Written again, it is to be attached again.
    a.write_all_at(&[3; 10], 500).expect("write");
    assert_eq!(errno(a.detach(Some(400..600))), libc::ENODATA);
    a.attach(Some(500..510)).expect("attach");
    a.detach(None).expect("detach");
    assert_eq!(b.query(None).expect("query"), []);
    let want = [&data[..500], &[3; 10], &data[510..]].concat();
    same("all of it", &read(&b, 0, 2000), &want);
}

#[test]
fn a_detach_of_what_others_have_taken_over_does_nothing() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    a.write_all_at(&[1; 100], 0).expect("write");
    a.attach(None).expect("attach");
    b.write_all_at(&[2; 100], 0).expect("write");
    b.attach(None).expect("attach");
    // Whether this node has heard of it or not.
    for heard in [false, true] {
        if heard {
            a.write_all_at(&[1; 50], 100).expect("write");
            a.attach(None).expect("attach");
            b.write_all_at(&[2; 50], 100).expect("write");
            b.attach(None).expect("attach");
            a.query(None).expect("query");
        }
        let range = if heard { 100..150 } else { 0..100 };
        a.detach(Some(range.clone())).expect("detach");
        assert_eq!(errno(a.detach(Some(range))), libc::ENODATA, "once");
    }
    assert_eq!(a.query(None).expect("query"), [owner(0..150, number(&b))]);
    assert_eq!(read(&a, 0, 200), [2; 150]);
}

#[test]
fn what_was_cut_off_was_never_written() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    a.write_all_at(&[1; 100], 0).expect("write");
    a.attach(None).expect("attach");
    a.set_len(50).expect("cut");
    assert_eq!(errno(a.attach(Some(0..100))), libc::ENODATA);
    assert_eq!(errno(a.detach(Some(50..100))), libc::ENODATA);
    a.attach(Some(0..50)).expect("this is there");
    assert_eq!(b.query(None).expect("query"), [owner(0..50, number(&a))]);
    assert_eq!(b.ebb_stat().expect("stat").size, 50);
}

/// The primitives are there under every model; the models' own events go on beside them.
#[test]
fn primitives_work_in_every_model() {
    for model in ["posix", "commit", "session", "mpiio", "romio"] {
        let cluster = Cluster::builder().nodes(2).consistency(model).flush("end").start();
        let (a, b) = both(&cluster, "f");
        assert_eq!(a.ebb_stat().expect("stat").model, model);
        let data = bytes(1, 0, 0, 50_000);
        a.write_all_at(&data, 0).expect("write");
        a.attach(Some(0..50_000)).expect("attach");
        assert_eq!(b.query(None).expect("query"), [owner(0..50_000, number(&a))], "{model}");
        same(model, &read(&b, 0, 60_000), &data);
        same(model, &read_owner(&b, 0, 60_000, number(&a)).expect("read"), &data);
        b.write_all_at(&[1; 10], 0).expect("write");
        b.attach(Some(0..10)).expect("attach");
        assert_eq!(a.query(Some(0..20)).expect("query").len(), 2, "{model}");
        assert_eq!(read(&a, 0, 10), [1; 10], "{model}");
        a.detach(Some(10..50_000)).expect("detach");
        assert_eq!(b.query(None).expect("query"), [owner(0..10, number(&b))], "{model}");
        same(model, &read(&b, 10, 60_000), &data[10..]);
    }
}

#[test]
fn a_daemon_that_is_killed_ends_calls_with_an_error() {
    let cluster = two_nodes();
    let (a, b) = both(&cluster, "f");
    drop(a);
    b.write_all_at(&[1; 4096], 0).expect("write");
    let began = Instant::now();
    let errors: Vec<i32> = std::thread::scope(|threads| {
        let busy = |n: u64| {
            let b = &b;
            threads.spawn(move || {
                loop {
                    let at = n * 100_000;
                    let done = (|| {
                        let data = [3; 100];
                        let pieces: Vec<ebb::WritePiece<'_>> = (0..500)
                            .map(|i| ebb::WritePiece { offset: at + i * 200, data: &data })
                            .collect();
                        b.write_list(&pieces)?;
                        b.attach(Some(at..at + 100))?;
                        b.query(None)?;
                        b.ebb_stat().map(drop)
                    })();
                    if let Err(e) = done {
                        return e.raw_os_error().expect("of the system");
                    }
                    assert!(began.elapsed() < Duration::from_secs(60), "it goes on for ever");
                }
            })
        };
        let all: Vec<_> = (1..5).map(busy).collect();
        std::thread::sleep(Duration::from_millis(700));
        cluster.node(1).kill9();
        all.into_iter().map(|t| t.join().expect("it ends")).collect()
    });
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    for errno in errors {
        let expected = [libc::ENOTCONN, libc::ECONNABORTED, libc::EIO, libc::ESTALE];
        assert!(expected.contains(&errno), "{}", io::Error::from_raw_os_error(errno));
    }
    assert_ne!(errno(b.attach(None)), libc::ENODATA, "and so do later ones");
}

/// Under a supervisor another daemon goes on: calls wait for it and are carried out, and the handles of
/// before are still good for what they were opened for.
#[test]
fn another_daemon_goes_on_with_the_calls() {
    let builder = only_asked(2);
    let cluster = builder.supervised().separate_meta().start();
    let (a, b) = both(&cluster, "f");
    let reader = File::open(cluster.node(1).path("f")).expect("open");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            let mut n = 0_u64;
            while !stop.load(std::sync::atomic::Ordering::Acquire) {
                let data = bytes(2, n, n * 1000, 1000);
                let pieces = [
                    ebb::WritePiece { offset: n * 1000, data: &data[..400] },
                    ebb::WritePiece { offset: n * 1000 + 400, data: &data[400..] },
                ];
                assert_eq!(b.write_list(&pieces).expect("write"), 1000);
                b.attach(Some(n * 1000..(n + 1) * 1000)).expect("attach");
                n += 1;
            }
            n
        });
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(500));
            assert!(cluster.node(1).kill_daemon(), "another one goes on");
        }
        std::thread::sleep(Duration::from_millis(300));
        stop.store(true, std::sync::atomic::Ordering::Release);
        let n = writer.join().expect("no call failed");
        assert!(n > 3);
        assert_eq!(a.query(None).expect("query"), [owner(0..n * 1000, number(&b))]);
        for n in 0..n {
            same("attached", &read(&a, n * 1000, 1000), &bytes(2, n, n * 1000, 1000));
        }
    });
    assert_eq!(errno(reader.attach(None)), libc::EBADF, "how it was opened is still known");
    assert_eq!(read_owner(&reader, 0, 10, number(&b)).expect("read"), bytes(2, 0, 0, 10));
    b.detach(Some(0..500)).expect("what an earlier daemon attached is attached");
}
