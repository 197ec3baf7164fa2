//! Buffers are put and got through libebb by as many as say so.

use crate::together::*;
use ebb::exchange::{exchange, get, put};
use ebb::{ReadPiece, WritePiece};
use ebb_testkit::{Cluster, Node, skip_reason};
use ebb_tests::{content, tools};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

const PART: u64 = 700_000;

fn two_nodes(model: &str) -> Option<Cluster> {
    let builder = Cluster::builder().nodes(2).separate_meta().consistency(model);
    skip_reason().is_none().then(|| builder.flush("immediate").start())
}

fn made(node: &Node, terms: &str) -> File {
    exchange(&node.path("x"), Some(terms)).expect("an exchange")
}

fn there(node: &Node) -> File {
    exchange(&node.path("x"), None).expect("the exchange")
}

fn put_at(x: &File, name: &str, offset: u64, data: &[u8], of: u32) -> io::Result<()> {
    put(x.as_fd(), Path::new(name), &[WritePiece { offset, data }], of)
}

fn got(x: &File, name: &str, len: usize, of: u32) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; len];
    let mut piece = [ReadPiece { offset: 0, buffer: &mut buffer, got: 0 }];
    let n = get(x.as_fd(), Path::new(name), &mut piece, of)?;
    assert_eq!(piece[0].got, n);
    buffer.truncate(n);
    Ok(buffer)
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.expect_err("it must fail").raw_os_error().expect("of the system")
}

#[test]
fn a_buffer_is_got_when_all_have_put_their_part_and_gone_when_all_have_got_it() {
    for model in ["posix", "commit", "session", "mpiio", "romio"] {
        let Some(cluster) = two_nodes(model) else { return };
        let (a, b) = (cluster.node(0), cluster.node(1));
        let x = [made(a, "producers=1 consumers=1 wait=60s"), there(b)];
        let want: Vec<u8> =
            (0..4).flat_map(|who| content::bytes(who, 1, who * PART, PART)).collect();
        for step in 0..3 {
            let name = format!("step{step}");
            thread::scope(|scope| {
                // Consumers first; one of them wants pieces.
                for who in 0..3 {
                    let (x, name, want) = (&x[who % 2], &name, &want);
                    scope.spawn(move || {
                        if who < 2 {
                            let whole = got(x, name, want.len() + 9, 3).expect("get");
                            return content::same(model, &whole, want);
                        }
                        let (mut one, mut two) = (vec![0; 1000], vec![0; 1000]);
                        let (far, past) = (3 * PART + 17, 4 * PART - 10);
                        let mut pieces = [
                            ReadPiece { offset: far, buffer: &mut one, got: 0 },
                            ReadPiece { offset: past, buffer: &mut two, got: 0 },
                        ];
                        let n = get(x.as_fd(), Path::new(name), &mut pieces, 3).expect("get");
                        assert_eq!((n, pieces[1].got), (1010, 10), "{model}");
                        let far = far as usize;
                        content::same(model, &one, &want[far..far + 1000]);
                    });
                }
                wait_awaiting(&cluster, 3);
                for who in 0..4 {
                    let (x, name, want) = (&x[who as usize % 2], &name, &want);
                    scope.spawn(move || {
                        let at = |from: u64, len: u64| WritePiece {
                            offset: who * PART + from,
                            data: &want[(who * PART + from) as usize..][..len as usize],
                        };
                        let parts = match who % 2 {
                            0 => vec![at(0, PART)],
                            _ => vec![at(0, 5), at(5, 70_000), at(70_005, PART - 70_005)],
                        };
                        put(x.as_fd(), Path::new(name), &parts, 4).expect("put");
                    });
                }
            });
            wait_released(&cluster, &format!("x/{name}"));
        }
        assert_eq!(tools::names(&a.path("x")), Vec::<String>::new(), "{model}");
        for node in [a, b] {
            assert_eq!(node.status()["flushed_bytes"], 0, "{model}");
        }
        drop(x);
        cluster.umount_all();
    }
}

/// A put makes the buffer, says of how many it is one, publishes, and says that it is through; a get opens, says of how
/// many it is one, and that it is through. Beside that are what every open and close asks.
#[test]
fn what_a_put_and_a_get_ask() {
    let Some(cluster) = two_nodes("session") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    let (x, y) = (made(a, "producers=1 consumers=1"), there(b));
    // What is asked once, and not again.
    put_at(&x, "first", 0, b"1", 0).expect("put");
    got(&y, "first", 10, 0).expect("get");
    wait_released(&cluster, "x/first");
    let rpc = |node: &Node| -> BTreeMap<String, u64> {
        let status = node.status();
        let all = status["rpc"].as_object().expect("a table");
        all.iter().map(|(name, n)| (name.clone(), n.as_u64().expect("a number"))).collect()
    };
    let asked = |node: &Node, work: &dyn Fn()| -> BTreeMap<String, u64> {
        let before = rpc(node);
        work();
        // The close is told after it.
        thread::sleep(Duration::from_millis(300));
        let after = rpc(node).into_iter();
        let new = after.map(|(name, n)| (name.clone(), n - before.get(&name).unwrap_or(&0)));
        new.filter(|(name, n)| *n > 0 && name != "heartbeat").collect()
    };
    let put = asked(a, &|| put_at(&x, "second", 0, &[7; 100_000], 0).expect("put"));
    let get = asked(b, &|| assert_eq!(got(&y, "second", 100_000, 0).expect("get").len(), 100_000));
    println!("put {put:?}, get {get:?}");
    let count = |asked: &BTreeMap<String, u64>, name: &str| asked.get(name).copied().unwrap_or(0);
    let once = |asked, names: &[&str]| names.iter().all(|name| count(asked, name) == 1);
    assert!(once(&put, &["create", "join", "attach", "leave"]), "{put:?}");
    assert!(once(&get, &["open", "join", "leave"]), "{get:?}");
    assert!(put.values().sum::<u64>() <= 10 && get.values().sum::<u64>() <= 9);
}

#[test]
fn nobody_is_one_more_than_there_are() {
    let Some(cluster) = two_nodes("session") else { return };
    let (x, y) = (made(cluster.node(0), "producers=1 consumers=1"), there(cluster.node(1)));
    put_at(&x, "f", 0, b"once", 0).expect("put");
    assert_eq!(errno(put_at(&y, "f", 0, b"twice", 0)), libc::EEXIST);
    assert_eq!(errno(put_at(&x, "f", 0, b"twice", 1)), libc::EEXIST);
    let other = File::open(cluster.node(1).path("x/f")).expect("who knows nothing of libebb");
    for of in [0, 1] {
        assert_eq!(errno(got(&x, "f", 10, of)), libc::EUSERS);
    }
    assert_eq!(got(&x, "f", 10, 2).expect("one of two"), b"once");
    assert_eq!(errno(got(&x, "f", 10, 1)), libc::EUSERS);
    drop(other);
    wait_released(&cluster, "x/f");
    // Who was told that it is none does not count, nor that there are fewer than others have said.
    put_at(&x, "h", 0, b"one", 3).expect("put");
    assert_eq!(errno(put_at(&y, "h", 3, b"two", 2)), libc::EINVAL);
    assert_eq!(errno(put_at(&y, "h", 3, b"two", u32::MAX)), libc::EINVAL);
    wait_stands(cluster.node(0), "x/h", "awaited: 1 of 3 producers through, 0 writing");
    put_at(&y, "h", 3, b"two", 3).expect("put");
    put_at(&y, "h", 6, b"six", 0).expect("put");
    assert_eq!(errno(put_at(&y, "h", 9, b"more", 5)), libc::EEXIST);
    assert_eq!(errno(got(&y, "h", 10, u32::MAX)), libc::EINVAL);
    assert_eq!(got(&y, "h", 10, 0).expect("get"), b"onetwosix");
    // The same name again and again, as soon as it is free.
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..200_u32 {
                let until = Instant::now() + Duration::from_secs(30);
                while let Err(e) = put_at(&x, "g", 0, &round.to_le_bytes(), 1) {
                    let waits = e.raw_os_error() == Some(libc::EEXIST) && Instant::now() < until;
                    assert!(waits, "round {round}: {e}");
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        for round in 0..200_u32 {
            assert_eq!(got(&y, "g", 10, 1).expect("get"), round.to_le_bytes());
        }
    });
    drop((x, y));
    cluster.umount_all();
}

#[test]
fn what_does_not_come_ends_in_time_and_what_fails_is_told() {
    let Some(cluster) = two_nodes("posix") else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    let (x, y) = (made(a, "producers=1 consumers=1 wait=1500ms"), there(b));
    let began = Instant::now();
    assert_eq!(errno(got(&y, "never", 10, 1)), libc::ETIMEDOUT);
    put_at(&x, "half", 0, b"1 of 2", 2).expect("put");
    assert_eq!(errno(got(&y, "half", 10, 1)), libc::ETIMEDOUT);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    put_at(&y, "half", 6, b"!", 2).expect("put");
    assert_eq!(got(&y, "half", 10, 1).expect("get"), b"1 of 2!");
    // No file is so long.
    assert_eq!(errno(put_at(&x, "bad", i64::MAX as u64 - 1, b"1", 1)), libc::EFBIG);
    wait_stands(b, "x/bad", "lost");
    assert_eq!(errno(got(&y, "bad", 10, 1)), libc::EIO);
    assert_eq!(errno(put_at(&y, "bad", 0, b"anew", 1)), libc::EIO);
    fs::remove_file(b.path("x/bad")).expect("unlink");
    put_at(&y, "bad", 0, b"anew", 1).expect("put");
    assert_eq!(got(&x, "bad", 10, 1).expect("get"), b"anew");
    drop((x, y));
    cluster.umount_all();
}

#[test]
fn what_is_no_exchange_is_told() {
    let Some(cluster) = two_nodes("posix") else { return };
    let node = cluster.node(0);
    fs::create_dir(node.path("d")).expect("mkdir");
    assert_eq!(errno(exchange(&node.path("d"), None)), libc::ENODATA);
    assert_eq!(errno(exchange(&node.path("d"), Some("producers=0"))), libc::EINVAL);
    assert_eq!(errno(exchange(cluster.root(), None)), libc::ENOTTY);
    assert_eq!(errno(exchange(&node.path("none"), None)), libc::ENOENT);
    fs::write(node.path("d/f"), "f").expect("write");
    let terms = "producers=1 consumers=1";
    assert_eq!(errno(exchange(&node.path("d"), Some(terms))), libc::ENOTEMPTY);
    let d = File::open(node.path("d")).expect("open");
    for result in [put_at(&d, "f", 0, b"1", 1), got(&d, "f", 1, 1).map(drop)] {
        assert_eq!(errno(result), libc::ENODATA);
    }
    assert_eq!(errno(got(&d, "g", 1, 1)), libc::ENODATA);
    let x = made(node, terms);
    assert_eq!(errno(put_at(&x, "../d/f", 0, b"1", 1)), libc::EINVAL);
    assert_eq!(errno(got(&x, "..", 1, 1)), libc::EINVAL);
    assert_eq!(errno(put_at(&x, "f", 0, b"1", u32::MAX)), libc::EINVAL);
    wait_stands(node, "x/f", "awaited: 0 of 1 producers through, 0 writing");
    let outside = cluster.root().join("outside");
    assert_eq!(errno(exchange(&outside, Some(terms))), libc::ENOTTY);
    assert!(!outside.exists(), "nobody has asked for it");
    // Opened by several ranks, also when there is something in it.
    put_at(&x, "g", 0, b"1", 1).expect("put");
    let as_said = "producers=1 consumers=1 keep=none wait=30s";
    let more = exchange(&cluster.node(1).path("x"), Some("producers=7 consumers=7"));
    assert_eq!(attribute(&node.path("x")).expect("terms"), as_said, "what it says stays");
    drop((made(cluster.node(1), terms), more, x, d));
    cluster.umount_all();
}

/// Of how many each one said that it was one the service knows afterwards.
#[test]
fn a_service_that_begins_again_knows_of_how_many_each_one_is() {
    let Some(mut cluster) = two_nodes("session") else { return };
    let terms = "producers=1 consumers=1 wait=60s";
    let (x, y) = (made(cluster.node(0), terms), there(cluster.node(1)));
    put_at(&x, "f", 0, b"a", 3).expect("put");
    cluster.kill_meta();
    cluster.restart_meta();
    put_at(&y, "f", 1, b"b", 3).expect("put");
    wait_stands(cluster.node(0), "x/f", "awaited: 2 of 3");
    drop(x);
    cluster.node(0).kill9();
    let _ = cluster.node(0).ebb("umount", &[], &[]);
    cluster.node(0).mount();
    let x = there(cluster.node(0));
    put_at(&x, "f", 2, b"c", 3).expect("put");
    assert_eq!(got(&x, "f", 9, 2).expect("get"), b"abc");
    cluster.kill_meta();
    cluster.restart_meta();
    assert_eq!(got(&y, "f", 9, 2).expect("get"), b"abc");
    wait_released(&cluster, "x/f");
    drop((x, y));
    cluster.umount_all();
}
