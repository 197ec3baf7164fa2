//! Lists of pieces through libebb (`ebb_writex`, `ebb_readx`): 10,000 pieces of 100 bytes of a file that two
//! nodes have open and both write, in one call, beside the same pieces one by one, beside data sieving (what MPI
//! libraries do with such pieces: blocks are locked, read, changed and written back, with the bytes of others), and
//! beside one by one on the bare directory.

use ebb::{Extended, ReadPiece, WritePiece};
use ebb_benches::{Report, rate};
use ebb_testkit::{Cluster, record_lock};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

const PIECES: u64 = 10_000;
const LEN: usize = 100;
/// From piece to piece: what is between them is the other node's.
const STRIDE: u64 = 200;

fn open(path: &Path) -> File {
    let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    options.expect("open")
}

fn write_single(file: &File, data: &[u8]) -> f64 {
    rate(|| {
        for n in 0..PIECES {
            file.write_all_at(data, n * STRIDE).expect("write");
        }
        PIECES as f64
    })
}

fn write_list(file: &File, data: &[u8]) -> f64 {
    let pieces: Vec<_> = (0..PIECES).map(|n| WritePiece { offset: n * STRIDE, data }).collect();
    rate(|| {
        assert_eq!(file.write_list(&pieces).expect("write"), PIECES as usize * LEN);
        PIECES as f64
    })
}

/// A block at a time, as ROMIO does (`ind_wr_buffer_size`).
fn write_sieving(file: &File, data: &[u8]) -> f64 {
    const BLOCK: u64 = 512 << 10;
    let end = (PIECES - 1) * STRIDE + LEN as u64;
    let mut block = vec![0; BLOCK as usize];
    rate(|| {
        for from in (0..end).step_by(BLOCK as usize) {
            let to = (from + BLOCK).min(end);
            let within = (from, to - from);
            record_lock(file, libc::F_SETLKW, libc::F_WRLCK, within).expect("lock");
            let block = &mut block[..(to - from) as usize];
            file.read_exact_at(block, from).expect("read");
            for at in (0..PIECES).map(|n| n * STRIDE) {
                // A piece across two blocks is written in two parts.
                let (first, last) = (at.max(from), (at + LEN as u64).min(to));
                if first < last {
                    let part = &data[(first - at) as usize..(last - at) as usize];
                    block[(first - from) as usize..(last - from) as usize].copy_from_slice(part);
                }
            }
            file.write_all_at(block, from).expect("write");
            record_lock(file, libc::F_SETLKW, libc::F_UNLCK, within).expect("unlock");
        }
        PIECES as f64
    })
}

fn read_single(file: &File, want: u8) -> f64 {
    rate(|| {
        let mut got = [0; LEN];
        for n in 0..PIECES {
            file.read_exact_at(&mut got, n * STRIDE).expect("read");
            assert_eq!(got, [want; LEN]);
        }
        PIECES as f64
    })
}

fn read_list(file: &File, want: u8) -> f64 {
    let mut buffers = vec![[0; LEN]; PIECES as usize];
    let read = |buffers: &mut Vec<[u8; LEN]>| {
        let mut pieces: Vec<ReadPiece<'_>> = (0..)
            .zip(buffers.iter_mut())
            .map(|(n, buffer)| ReadPiece { offset: n * STRIDE, buffer: &mut buffer[..], got: 0 })
            .collect();
        assert_eq!(file.read_list(&mut pieces).expect("read"), PIECES as usize * LEN);
        PIECES as f64
    };
    let speed = rate(|| read(&mut buffers));
    assert!(buffers.iter().all(|b| *b == [want; LEN]));
    speed
}

fn main() {
    let mut report = Report::new("lists");
    report.head("one by one", "list");
    for model in ["posix", "commit", "session"] {
        let cluster = Cluster::builder().nodes(2).consistency(model).flush("end").separate_meta();
        let cluster = cluster.start();
        let (a, b) = (open(&cluster.node(0).path("f")), open(&cluster.node(1).path("f")));
        // Both write it, so that neither may do so without telling.
        let shared = || {
            b.write_all_at(&[9; LEN], LEN as u64).expect("write");
            a.sync_all().expect("fsync");
            b.sync_all().expect("fsync");
        };
        report.compare(
            format!("{model}: write {PIECES} pieces of a shared file"),
            "pieces/s",
            || {
                shared();
                write_single(&a, &[1; LEN])
            },
            || {
                shared();
                write_list(&a, &[2; LEN])
            },
        );
        report.compare(
            format!("{model}: the same, by data sieving"),
            "pieces/s",
            || {
                shared();
                write_sieving(&a, &[3; LEN])
            },
            || {
                shared();
                write_list(&a, &[4; LEN])
            },
        );
        let bare = open(&cluster.backing().join("bare"));
        report.compare(
            format!("{model}: the same, one by one on the bare directory"),
            "pieces/s",
            || write_single(&bare, &[1; LEN]),
            || {
                shared();
                write_list(&a, &[2; LEN])
            },
        );
        if model == "session" {
            continue;
        }
        let mut round = 10;
        // The other node writes them anew each time: all of them are there.
        let mut fresh = || {
            round += 1;
            write_list(&a, &[round; LEN]);
            a.sync_all().expect("fsync");
            round
        };
        report.compare(
            format!("{model}: read {PIECES} pieces of another node"),
            "pieces/s",
            || {
                let want = fresh();
                read_single(&b, want)
            },
            || {
                // `compare` takes two functions that cannot share one counter.
                write_list(&a, &[250; LEN]);
                a.sync_all().expect("fsync");
                read_list(&b, 250)
            },
        );
    }
    println!("{}", report.save().expect("save").display());
}
