//! Bytes: large and sparse files, appending, open flags, fallocate and its kind, copying.

use super::{checked, create, errno, one, open, two};
use ebb_tests::content::{byte, bytes, same};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

fn fallocate(file: &File, mode: i32, offset: u64, len: u64) -> io::Result<i64> {
    // SAFETY: an open descriptor.
    checked(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64) })
}

fn seek(file: &File, offset: u64, whence: i32) -> io::Result<i64> {
    // SAFETY: an open descriptor.
    checked(unsafe { libc::lseek(file.as_raw_fd(), offset as i64, whence) })
}

#[test]
fn a_sparse_file_goes_beyond_4_gib() {
    const GIB: u64 = 1 << 30;
    let cluster = two();
    let (a, b) = (cluster.node(0).path("big"), cluster.node(1).path("big"));
    let places = [0, 2 * GIB - 3, 4 * GIB - 50_000, 5 * GIB + 12_345];
    let file = create(&a);
    for at in places {
        file.write_all_at(&bytes(1, 1, at, 100_000), at).expect("write");
    }
    let size = 5 * GIB + 112_345;
    assert_eq!(fs::metadata(&b).expect("stat").len(), size);
    cluster.node(0).drain();
    for path in [&a, &b, &cluster.backing().join("big")] {
        let file = File::open(path).expect("open");
        for at in places {
            let mut got = vec![0; 100_000];
            file.read_exact_at(&mut got, at).expect("read");
            same(&format!("{} at {at}", path.display()), &got, &bytes(1, 1, at, 100_000));
            if file.read_exact_at(&mut got, at + 1_000_000).is_ok() {
                same("a hole", &got, &[0; 100_000]);
            }
        }
    }
    let meta = fs::metadata(cluster.backing().join("big")).expect("stat");
    assert_eq!(meta.len(), size);
    assert!(std::os::unix::fs::MetadataExt::blocks(&meta) * 512 < GIB, "it must stay sparse");
    open(&b).set_len(4 * GIB + 10).expect("truncate");
    assert_eq!(fs::metadata(&a).expect("stat").len(), 4 * GIB + 10);
    assert_eq!(file.read_at(&mut [0; 100], 4 * GIB).expect("read"), 10);
    assert_eq!(file.read_at(&mut [0; 100], 5 * GIB).expect("read"), 0);
}

#[test]
fn o_excl_lets_exactly_one_node_win() {
    let cluster = two();
    let mut wins = [0; 2];
    for n in 0..60 {
        let name = format!("x{n}");
        let barrier = std::sync::Barrier::new(2);
        let won: Vec<bool> = std::thread::scope(|threads| {
            let make = |node: usize| {
                let (path, barrier) = (cluster.node(node).path(&name), &barrier);
                threads.spawn(move || {
                    barrier.wait();
                    match OpenOptions::new().write(true).create_new(true).open(path) {
                        Ok(_) => true,
                        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => false,
                        Err(e) => panic!("create: {e}"),
                    }
                })
            };
            let threads: Vec<_> = (0..2).map(make).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect()
        });
        assert_eq!(won.iter().filter(|w| **w).count(), 1, "{name}: {won:?}");
        wins[usize::from(won[1])] += 1;
    }
    println!("wins: {wins:?}");
}

#[test]
fn o_excl_refuses_a_name_that_only_the_backing_has() {
    let cluster = one();
    fs::write(cluster.backing().join("old"), "old").expect("write");
    let made = OpenOptions::new().write(true).create_new(true).open(cluster.node(0).path("old"));
    assert_eq!(errno(made), libc::EEXIST);
    assert_eq!(fs::read(cluster.node(0).path("old")).expect("read"), b"old");
}

#[test]
fn o_trunc_on_one_node_empties_the_file_on_the_other() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    fs::write(&a, bytes(1, 1, 0, 300_000)).expect("write");
    let reader = File::open(&b).expect("open");
    let mut got = vec![0; 300_000];
    reader.read_exact_at(&mut got, 0).expect("read");
    let again = OpenOptions::new().write(true).truncate(true).open(&a).expect("open");
    assert_eq!(reader.metadata().expect("stat").len(), 0);
    assert_eq!(reader.read_at(&mut got, 0).expect("read"), 0);
    again.write_all_at(b"end", 1_000).expect("write");
    assert_eq!(reader.read_at(&mut got, 0).expect("read"), 1_003);
    same("zeros, then the end", &got[..1_003], &[&[0; 1_000][..], b"end"].concat());
}

/// A record that can be told apart: who, which, how long, then bytes that follow from these.
fn record(who: u64, number: u64) -> Vec<u8> {
    let len = 20 + (number * 7919 + who * 131) % 3_000;
    let head = [who, number, len].map(u64::to_le_bytes).concat();
    [head, bytes(who, number, 0, len)].concat()
}

fn check_records(what: &str, mut rest: &[u8], each: u64) {
    let mut next = [0; 2];
    while !rest.is_empty() {
        let number = |at: usize| u64::from_le_bytes(rest[at..at + 8].try_into().expect("8 bytes"));
        let who = number(0);
        assert!(who < 2, "{what}: a torn record, {} bytes before the end", rest.len());
        let want = record(who, next[who as usize]);
        assert!(rest.len() >= want.len(), "{what}: a short record at the end");
        same(&format!("{what}: record {next:?} of {who}"), &rest[..want.len()], &want);
        next[who as usize] += 1;
        rest = &rest[want.len()..];
    }
    assert_eq!(next, [each; 2], "{what}: records lost");
}

#[test]
fn concurrent_appends_of_two_nodes_are_neither_lost_nor_torn() {
    const EACH: u64 = 300;
    let cluster = two();
    create(&cluster.node(0).path("log"));
    std::thread::scope(|threads| {
        for who in 0..2 {
            let path = cluster.node(who as usize).path("log");
            threads.spawn(move || {
                let mut file = OpenOptions::new().append(true).open(path).expect("open");
                for number in 0..EACH {
                    let data = record(who, number);
                    assert_eq!(file.write(&data).expect("append"), data.len());
                }
            });
        }
    });
    for node in cluster.nodes() {
        check_records(node.name(), &fs::read(node.path("log")).expect("read"), EACH);
    }
    cluster.nodes().iter().for_each(ebb_testkit::Node::drain);
    check_records("backing", &fs::read(cluster.backing().join("log")).expect("read"), EACH);
}

#[test]
fn punch_hole_zero_range_and_fallocate_change_what_they_say() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    let file = create(&a);
    let mut want = bytes(1, 1, 0, 100_000);
    file.write_all_at(&want, 0).expect("write");
    let check = |what: &str, want: &[u8]| {
        same(what, &fs::read(&a).expect("read"), want);
        same(&format!("{what}, other node"), &fs::read(&b).expect("read"), want);
    };
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    fallocate(&file, punch, 5_001, 20_000).expect("punch");
    want[5_001..25_001].fill(0);
    check("punched", &want);
    fallocate(&file, libc::FALLOC_FL_ZERO_RANGE, 90_000, 20_000).expect("zero");
    want[90_000..].fill(0);
    want.resize(110_000, 0);
    check("zeroed beyond the end", &want);
    let keep = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    fallocate(&file, keep, 80_000, 1_000_000).expect("zero");
    want[80_000..].fill(0);
    check("zeroed, size kept", &want);
    fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, 0, 300_000).expect("reserve");
    check("reserved", &want);
    fallocate(&file, 0, 40_000, 100_000).expect("allocate");
    want.resize(140_000, 0);
    check("allocated", &want);
    fallocate(&file, punch, 130_000, 1_000_000).expect("punch beyond the end");
    check("punched beyond the end", &want);
    assert_eq!(errno(fallocate(&file, punch, 0, 0)), libc::EINVAL);
    let collapse = fallocate(&file, libc::FALLOC_FL_COLLAPSE_RANGE, 0, 4_096);
    assert_eq!(errno(collapse), libc::EOPNOTSUPP);
    cluster.node(0).drain();
    same("backing", &fs::read(cluster.backing().join("f")).expect("read"), &want);
}

#[test]
fn seek_data_and_seek_hole_never_hide_data() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    let file = create(&a);
    file.write_all_at(&[1; 10_000], 1_000_000).expect("write");
    file.set_len(3_000_000).expect("extend");
    for (what, file) in [("writer", &file), ("other node", &File::open(&b).expect("open"))] {
        let data = seek(file, 0, libc::SEEK_DATA).expect("data");
        assert!((0..=1_000_000).contains(&data), "{what}: data at {data}");
        let hole = seek(file, 1_000_000, libc::SEEK_HOLE).expect("hole");
        assert!((1_010_000..=3_000_000).contains(&hole), "{what}: hole at {hole}");
        let hole = seek(file, 0, libc::SEEK_HOLE).expect("hole");
        assert!(hole == 0 || hole >= 1_010_000, "{what}: hole at {hole}");
        assert_eq!(errno(seek(file, 3_000_000, libc::SEEK_DATA)), libc::ENXIO, "{what}");
        assert_eq!(errno(seek(file, 4_000_000, libc::SEEK_HOLE)), libc::ENXIO, "{what}");
        assert_eq!(seek(file, 0, libc::SEEK_END).expect("end"), 3_000_000, "{what}");
    }
    let hole = seek(&file, 0, libc::SEEK_HOLE).expect("hole");
    assert_eq!(hole, 0, "the node that knows every byte finds the hole at the start");
}

#[test]
fn copy_file_range_copies_between_and_within_files() {
    let cluster = two();
    let from = create(&cluster.node(0).path("from"));
    let to = create(&cluster.node(0).path("to"));
    let data = bytes(1, 1, 0, 3_000_000);
    from.write_all_at(&data, 0).expect("write");
    let copy = |from: &File, mut at: i64, to: &File, mut to_at: i64, len: usize| {
        let (f, t) = (from.as_raw_fd(), to.as_raw_fd());
        // SAFETY: open descriptors, and offsets that live through the call.
        checked(unsafe { libc::copy_file_range(f, &raw mut at, t, &raw mut to_at, len, 0) } as i64)
    };
    let mut done = 0;
    while done < 2_500_000 {
        let n = copy(&from, 7 + done, &to, 101 + done, 2_500_000 - done as usize).expect("copy");
        assert!(n > 0, "copy stops at {done}");
        done += n;
    }
    let want = [&[0; 101][..], &data[7..2_500_007]].concat();
    same("copied", &fs::read(cluster.node(1).path("to")).expect("read"), &want);
    assert_eq!(copy(&from, 0, &from, 2_000_000, 500_000).expect("within"), 500_000);
    let mut want = data.clone();
    want.copy_within(..500_000, 2_000_000);
    same("within", &fs::read(cluster.node(1).path("from")).expect("read"), &want);
    assert_eq!(errno(copy(&from, 0, &from, 10, 100)), libc::EINVAL, "ranges that overlap");
    assert_eq!(copy(&from, 2_999_990, &to, 0, 100).expect("end"), 10);
    assert_eq!(copy(&from, 5_000_000, &to, 0, 100).expect("beyond"), 0);
}

#[test]
fn reads_and_writes_through_duplicates_share_one_position() {
    let cluster = one();
    let mut file = create(&cluster.node(0).path("f"));
    let mut twin = file.try_clone().expect("dup");
    file.write_all(b"one ").expect("write");
    twin.write_all(b"two").expect("write");
    drop(file);
    let mut got = String::new();
    twin.read_to_string(&mut got).expect("read");
    assert_eq!(got, "");
    assert_eq!(fs::read(cluster.node(0).path("f")).expect("read"), b"one two");
}

#[test]
fn access_modes_of_a_descriptor_are_kept() {
    let cluster = one();
    let path = cluster.node(0).path("f");
    fs::write(&path, "x").expect("write");
    let reader = File::open(&path).expect("open");
    assert_eq!(errno(reader.write_at(b"y", 0)), libc::EBADF);
    assert_eq!(errno(reader.set_len(0)), libc::EINVAL);
    let writer = OpenOptions::new().write(true).open(&path).expect("open");
    assert_eq!(errno(writer.read_at(&mut [0], 0)), libc::EBADF);
    assert_eq!(errno(File::open(path.join("below"))), libc::ENOTDIR);
    let dir = OpenOptions::new().write(true).open(cluster.node(0).path(""));
    assert_eq!(errno(dir), libc::EISDIR);
}

fn vectored(path: &Path, direct: i32) {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).custom_flags(direct);
    let mut file = options.open(path).expect("open");
    let parts: Vec<Vec<u8>> = (0..9).map(|n| bytes(n, 2, 0, n * 4_096)).collect();
    let slices: Vec<_> = parts.iter().map(|p| io::IoSlice::new(p)).collect();
    let all = parts.concat();
    assert_eq!(file.write_vectored(&slices).expect("writev"), all.len());
    let mut got = vec![0; all.len() + 10];
    let (left, right) = got.split_at_mut(5_000);
    let mut slices = [io::IoSliceMut::new(left), io::IoSliceMut::new(right)];
    let mut again = File::open(path).expect("open");
    assert_eq!(again.read_vectored(&mut slices).expect("readv"), all.len());
    same("readv", &got[..all.len()], &all);
    assert_eq!(got[4_096 + 17], byte(2, 2, 17));
}

#[test]
fn vectored_and_o_direct_io_are_whole() {
    vectored(&one().node(0).path("buffered"), 0);
    // Past the daemon the disk of the cache wants such buffers aligned.
    let through =
        ebb_testkit::Cluster::builder().consistency("posix").option("--io-path", "daemon").start();
    vectored(&through.node(0).path("direct"), libc::O_DIRECT);
}
