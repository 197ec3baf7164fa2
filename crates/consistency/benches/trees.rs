//! How the ownership tree and a node's view scale with the number of extents. What is called for
//! every read or write must not grow with it.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use ebb_consistency::{FileState, FileView};
use ebb_types::{ByteRange, NodeId, Version};
use std::hint::black_box;

const ME: NodeId = NodeId(1);
const SIZES: [u64; 3] = [1_000, 10_000, 100_000];
/// The record of a well-known N-to-1 checkpoint: it divides no power of two.
const RECORD: u64 = 47_008;

/// A shared file of `n` records, written in turns by `nodes` nodes.
fn strided(n: u64, nodes: u64) -> FileState {
    let mut file = FileState::new(0);
    for i in 0..n {
        file.attach(NodeId((i % nodes) as u32 + 1), &[ByteRange::at(i * RECORD, RECORD)]);
    }
    file
}

/// What the node sees of it, with its own records local and unflushed.
fn view_of(file: &FileState) -> FileView {
    let mut view = FileView::new(ME);
    let own: Vec<ByteRange> = file.owned().filter(|o| o.node == ME).map(|o| o.range).collect();
    own.iter().for_each(|r| view.write(*r));
    let taken = view.take_unattached(ByteRange::ALL);
    view.attached(&taken, Version(1), file.size());
    view.apply(&file.query(ByteRange::ALL, Version::ZERO));
    view
}

/// A place in the file that is another one each time.
fn walk(at: &mut u64, n: u64) -> u64 {
    *at = (*at + 7_919) % n;
    *at
}

fn service(c: &mut Criterion) {
    let mut group = c.benchmark_group("service");
    for n in SIZES {
        let (mut file, mut at) = (strided(n, 64), 0);
        group.bench_function(BenchmarkId::new("attach 47008 strided", n), |b| {
            b.iter(|| {
                let i = walk(&mut at, n);
                file.attach(NodeId((i % 64) as u32 + 1), &[ByteRange::at(i * RECORD, RECORD)])
            });
        });
        group.bench_function(BenchmarkId::new("query range", n), |b| {
            b.iter(|| {
                let asked = ByteRange::at(walk(&mut at, n) * RECORD, 116 << 10);
                black_box(file.query(asked, Version::ZERO))
            });
        });
        group.bench_function(BenchmarkId::new("grant and mark", n), |b| {
            b.iter(|| {
                let i = walk(&mut at, n);
                let (node, range) =
                    (NodeId((i % 64) as u32 + 1), ByteRange::at(i * RECORD, RECORD));
                file.attach(node, &[range]);
                let granted = file.grantable(node, &[range]);
                file.mark_flushed(node, &granted)
            });
        });
        group.bench_function(BenchmarkId::new("unflushed bytes", n), |b| {
            b.iter(|| black_box(file.unflushed_bytes()));
        });
        let mut small = FileState::new(0);
        for i in 0..n {
            small.attach(ME, &[ByteRange::at(i * 100, 100)]);
        }
        group.bench_function(BenchmarkId::new("attach 100 sequential", n), |b| {
            b.iter(|| {
                let at = ByteRange::at(walk(&mut at, n) * 100, 100);
                small.attach(ME, &[at])
            });
        });
    }
    group.finish();
}

fn node(c: &mut Criterion) {
    let mut group = c.benchmark_group("node");
    for n in SIZES {
        let mut file = strided(n, 2);
        let (mut view, mut at) = (view_of(&file), 0);
        group.bench_function(BenchmarkId::new("write, take, attached", n), |b| {
            b.iter(|| {
                let range = ByteRange::at(walk(&mut at, n / 2) * 2 * RECORD, RECORD);
                view.write(range);
                let taken = view.take_unattached(range);
                let version = file.attach(ME, &taken);
                view.attached(&taken, version, file.size());
            });
        });
        group.bench_function(BenchmarkId::new("write, take of whole file, attached", n), |b| {
            b.iter(|| {
                view.write(ByteRange::at(walk(&mut at, n / 2) * 2 * RECORD, RECORD));
                let taken = view.take_unattached(ByteRange::ALL);
                let version = file.attach(ME, &taken);
                view.attached(&taken, version, file.size());
            });
        });
        group.bench_function(BenchmarkId::new("plan_read 116 KiB", n), |b| {
            b.iter(|| {
                black_box(view.plan_read(ByteRange::at(walk(&mut at, n) * RECORD, 116 << 10)))
            });
        });
        group.bench_function(BenchmarkId::new("query range, apply", n), |b| {
            b.iter(|| {
                let asked = ByteRange::at(walk(&mut at, n) * RECORD, 116 << 10);
                let answer = file.query(asked, Version::ZERO);
                view.apply(&answer)
            });
        });
        group.bench_function(BenchmarkId::new("fetched, drop", n), |b| {
            b.iter(|| {
                let range = ByteRange::at((walk(&mut at, n / 2) * 2 + 1) * RECORD, RECORD);
                view.fetched(range, file.version());
                view.drop_clean(range)
            });
        });
        group.bench_function(BenchmarkId::new("sums", n), |b| {
            b.iter(|| black_box((view.unflushed_bytes(), view.clean_bytes(), view.size())));
        });
        group.bench_function(BenchmarkId::new("apply whole map, one change", n), |b| {
            b.iter(|| {
                let i = walk(&mut at, n / 2) * 2 + 1;
                file.attach(NodeId(2), &[ByteRange::at(i * RECORD, RECORD)]);
                let answer = file.query(ByteRange::ALL, view.known_version());
                view.apply(&answer)
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(800));
    targets = service, node
}
criterion_main!(benches);
