//! Lists of pieces through libebb on real mounts of two nodes: the bytes that single calls would have
//! written and read, under every model; how few requests they take; what they refuse.

use ebb::{Extended, ReadPiece, WritePiece};
use ebb_testkit::Cluster;
use ebb_tests::content::{bytes, same};
use ebb_tests::model::Model;
use ebb_tests::nodes::{open, requests};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

const MODELS: [Model; 5] = Model::ALL;

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.expect_err("it must fail").raw_os_error().expect("of the system")
}

fn read_list(file: &File, pieces: &[(u64, usize)]) -> Vec<Vec<u8>> {
    let mut buffers: Vec<Vec<u8>> = pieces.iter().map(|(_, len)| vec![0xEE; *len]).collect();
    let mut asked: Vec<ReadPiece<'_>> = pieces
        .iter()
        .zip(&mut buffers)
        .map(|((offset, _), buffer)| ReadPiece { offset: *offset, buffer, got: 77 })
        .collect();
    let sum = file.read_list(&mut asked).expect("read");
    let got: Vec<usize> = asked.iter().map(|p| p.got).collect();
    assert_eq!(sum, got.iter().sum::<usize>());
    for (buffer, got) in buffers.iter_mut().zip(got) {
        assert!(buffer[got..].iter().all(|b| *b == 0xEE), "nothing behind what there is");
        buffer.truncate(got);
    }
    buffers
}

fn pieces_of(data: &[(u64, Vec<u8>)]) -> Vec<WritePiece<'_>> {
    data.iter().map(|(offset, data)| WritePiece { offset: *offset, data }).collect()
}

/// Both nodes write lists into one file, each its own records; then both read all of them.
#[test]
fn ten_thousand_pieces_are_right_in_every_model() {
    const PIECES: u64 = 10_000;
    const LEN: u64 = 100;
    for model in MODELS {
        let cluster = Cluster::builder().nodes(2).consistency(model.name()).start();
        let paths = [cluster.node(0).path("f"), cluster.node(1).path("f")];
        let mut files = [Some(open(&paths[0])), Some(open(&paths[1]))];
        for (who, file) in (0..).zip(&mut files) {
            let data: Vec<_> = (0..PIECES)
                .map(|n| (n * 2 + who) * LEN)
                .map(|at| (at, bytes(1 + who, 0, at, LEN)))
                .collect();
            let open = file.take().expect("it is open");
            let before = requests(cluster.node(who as usize), "attach");
            assert_eq!(open.write_list(&pieces_of(&data)).expect("write"), (PIECES * LEN) as usize);
            let sent = requests(cluster.node(who as usize), "attach") - before;
            // Some are not for the list: rights are renewed, and taken up again.
            assert!(sent <= 10, "{sent} attaches under {}", model.name());
            *file = model.publish(open).expect("publish");
        }
        for (node, (file, path)) in files.into_iter().zip(&paths).enumerate() {
            let file = model.look_up(file, path).expect("look up");
            let asked: Vec<_> = (0..2 * PIECES).map(|n| (n * LEN, LEN as usize)).collect();
            let before = requests(cluster.node(node), "query");
            for (n, got) in (0..).zip(read_list(&file, &asked)) {
                same(model.name(), &got, &bytes(1 + n % 2, 0, n * LEN, LEN));
            }
            let sent = requests(cluster.node(node), "query") - before;
            assert!(sent <= 10, "{sent} queries under {}", model.name());
        }
    }
}

/// Between the pieces are others' bytes, which stay: nothing is read, changed and written back.
#[test]
fn what_is_between_the_pieces_is_left_alone() {
    let cluster = Cluster::builder().nodes(2).consistency("posix").start();
    let (a, b) = (open(&cluster.node(0).path("f")), open(&cluster.node(1).path("f")));
    std::thread::scope(|threads| {
        for (who, file) in [(0_u64, &a), (1, &b)] {
            threads.spawn(move || {
                for round in 0..20 {
                    let data: Vec<_> = (0..500)
                        .map(|n| (n * 2 + who) * 7)
                        .map(|at| (at, bytes(1 + who, round, at, 7)))
                        .collect();
                    file.write_list(&pieces_of(&data)).expect("write");
                }
            });
        }
    });
    for file in [&a, &b] {
        let mut got = vec![0; 7000];
        file.read_exact_at(&mut got, 0).expect("read");
        for n in 0..1000 {
            let at = n * 7;
            let want = bytes(1 + n % 2, 19, at, 7);
            same("a piece", &got[at as usize..at as usize + 7], &want);
        }
    }
}

/// Lists of every shape, beside single calls on a file of the bare directory.
#[test]
fn lists_do_what_single_calls_do() {
    let seed = seed_of_run();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for model in MODELS {
        let cluster = Cluster::builder().nodes(2).consistency(model.name()).start();
        let path = cluster.node(0).path("f");
        let (file, twin) = (open(&path), open(&cluster.root().join("twin")));
        for round in 0..25 {
            let count = [0, 1, 2, 40, 900][random.random_range(0..5)];
            let most = [9, 300, 70_000][random.random_range(0..3)];
            let most = if count > 100 { most.min(300) } else { most };
            let data: Vec<(u64, Vec<u8>)> = (0..count)
                .map(|n| {
                    let (at, len) = (random.random_range(0..400_000), random.random_range(0..most));
                    (at, bytes(n, round, at, len))
                })
                .collect();
            let all: usize = data.iter().map(|(_, d)| d.len()).sum();
            assert_eq!(file.write_list(&pieces_of(&data)).expect("write"), all, "seed {seed}");
            data.iter().for_each(|(at, d)| twin.write_all_at(d, *at).expect("write"));
            let asked: Vec<(u64, usize)> = (0..count)
                .map(|_| (random.random_range(0..600_000), random.random_range(0..most) as usize))
                .collect();
            for ((at, len), got) in asked.iter().zip(read_list(&file, &asked)) {
                let mut want = vec![0; *len];
                let n = twin.read_at(&mut want, *at).expect("read");
                same(&format!("{} at {at}, seed {seed}", model.name()), &got, &want[..n]);
            }
        }
        // And for the other node.
        let published = model.publish(file).expect("publish");
        drop(published);
        let other = model.look_up(None, &cluster.node(1).path("f")).expect("look up");
        let (mut got, mut want) = (vec![0; 600_000], vec![0; 600_000]);
        let (n, m) =
            (other.read_at(&mut got, 0).expect("read"), twin.read_at(&mut want, 0).expect("read"));
        same(model.name(), &got[..n], &want[..m]);
    }
}

fn seed_of_run() -> u64 {
    std::env::var("EBB_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(23)
}

/// What others have comes in few messages, however many pieces it is.
#[test]
fn pieces_of_other_nodes_are_fetched_together() {
    let cluster = Cluster::builder().nodes(2).consistency("posix").start();
    let (a, b) = (open(&cluster.node(0).path("f")), open(&cluster.node(1).path("f")));
    let data = bytes(1, 0, 0, 1 << 20);
    a.write_all_at(&data, 0).expect("write");
    let asked: Vec<(u64, usize)> = (0..10_000).map(|n| (n * 104, 50)).collect();
    for ((at, len), got) in asked.iter().zip(read_list(&b, &asked)) {
        same("a piece", &got, &data[*at as usize..*at as usize + len]);
    }
    let served = cluster.node(0).status()["served_reads_peer"].as_u64().expect("a number");
    assert!((1..=20).contains(&served), "{served} reads of 10,000 pieces");
}

#[test]
fn absurd_lists_are_refused_before_anything_is_done() {
    let cluster = Cluster::builder().nodes(1).consistency("posix").start();
    let path = cluster.node(0).path("f");
    let file = open(&path);
    file.write_all_at(&[1; 100], 0).expect("write");
    let write = |file: &File, offset| {
        file.write_list(&[
            WritePiece { offset: 0, data: &[2; 10] },
            WritePiece { offset, data: &[3; 10] },
        ])
    };
    for offset in [i64::MAX as u64 - 5, i64::MAX as u64 + 1, u64::MAX - 3, u64::MAX] {
        assert_eq!(errno(write(&file, offset)), libc::EINVAL, "{offset}");
        let mut buffer = [0; 10];
        let mut piece = [ReadPiece { offset, buffer: &mut buffer, got: 0 }];
        assert_eq!(errno(file.read_list(&mut piece)), libc::EINVAL);
    }
    let append = OpenOptions::new().append(true).open(&path).expect("open");
    assert_eq!(errno(write(&append, 0)), libc::EINVAL, "it says itself where its bytes go");
    let reader = File::open(&path).expect("open");
    assert_eq!(errno(write(&reader, 20)), libc::EBADF);
    let writer = OpenOptions::new().write(true).open(&path).expect("open");
    let mut buffer = [0; 10];
    let mut piece = [ReadPiece { offset: 0, buffer: &mut buffer, got: 0 }];
    assert_eq!(errno(writer.read_list(&mut piece)), libc::EBADF);
    let mut got = [0; 200];
    assert_eq!(reader_at(&reader, &mut got), 100);
    assert_eq!(got[..100], [1; 100], "nothing was written");
    assert_eq!(file.write_list(&[]).expect("nothing"), 0);
    assert_eq!(file.read_list(&mut []).expect("nothing"), 0);
}

fn reader_at(file: &File, into: &mut [u8]) -> usize {
    file.read_at(into, 0).expect("read")
}

/// A list that is larger than the buffer: room is made under way, as for single writes.
#[test]
fn a_list_may_be_larger_than_the_buffer() {
    let builder = Cluster::builder().nodes(2).consistency("posix");
    let cluster = builder.option("--cache-size", "16MiB").start();
    let (a, b) = (open(&cluster.node(0).path("f")), open(&cluster.node(1).path("f")));
    let data: Vec<_> = (0..48).map(|n| (n << 21, bytes(n, 0, 0, 1 << 20))).collect();
    assert_eq!(a.write_list(&pieces_of(&data)).expect("write"), 48 << 20);
    let asked: Vec<_> = data.iter().map(|(at, d)| (*at, d.len())).collect();
    for ((_, want), got) in data.iter().zip(read_list(&b, &asked)) {
        same("a piece", &got, want);
    }
}
