//! What the peer transport costs: reads of one file over loopback against a bare loop of pread,
//! write and read on one TCP connection, in the same run. `lent` compares copying with sending
//! from the page cache, which decides `PAGES_BYTES_MIN`.

#![allow(clippy::unwrap_used)] // a failure here is a failed test or bench

use bytes::BytesMut;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ebb_transport::{
    ByteSource, Lent, PeerPool, PeerServer, PoolOptions, ReadRequest, ServeOptions, SourceError,
    Subject,
};
use ebb_types::{ByteRange, Ino};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

const FILE_BYTES: usize = 16 << 20;

struct OneFile {
    file: Arc<File>,
    held: bool,
}

impl ByteSource for OneFile {
    fn open_read(&self, _: Subject, _: &[ByteRange]) -> Result<Lent, SourceError> {
        let file = self.file.clone();
        Ok(if self.held { Lent::held(file, Box::new(())) } else { Lent::copied(file) })
    }

    fn still_here(&self, _: Subject, _: &[ByteRange]) -> bool {
        true
    }
}

fn file(dir: &tempfile::TempDir) -> Arc<File> {
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7u8; FILE_BYTES]).unwrap();
    Arc::new(File::open(path).unwrap())
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

fn server(runtime: &tokio::runtime::Runtime, file: &Arc<File>, held: bool) -> PeerServer {
    let source = Arc::new(OneFile { file: file.clone(), held });
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        PeerServer::serve(listener, source, None, ServeOptions::default()).unwrap()
    })
}

/// Answers every offset of 8 bytes with `len` bytes from there.
fn raw_server(file: Arc<File>, len: usize) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        let (mut offset, mut bytes) = ([0; 8], vec![0; len]);
        while stream.read_exact(&mut offset).is_ok() {
            file.read_exact_at(&mut bytes, u64::from_le_bytes(offset)).unwrap();
            if stream.write_all(&bytes).is_err() {
                return;
            }
        }
    });
    let stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// One reader after the other, offsets that walk through the file.
fn peer_read(c: &mut Criterion, group: &str, name: &str, held: bool, len: usize) {
    let dir = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let server = server(&runtime, &file(&dir), held);
    let address = server.address().to_string();
    let pool = Arc::new(PeerPool::new(None, PoolOptions::default()));
    let mut group = c.benchmark_group(group);
    group.throughput(Throughput::Bytes(len as u64));
    group.bench_function(name, |b| {
        b.iter_custom(|rounds| {
            let (pool, address) = (pool.clone(), address.clone());
            let work = runtime.spawn(async move {
                let mut buffer = BytesMut::with_capacity(len);
                let begin = std::time::Instant::now();
                for i in 0..rounds {
                    let start = (i as usize * len % (FILE_BYTES - len + 1)) as u64;
                    let ranges = vec![ByteRange::at(start, len as u64)];
                    let request = ReadRequest::of_owner(Ino(2), ranges);
                    buffer = pool.read_into(&address, &request, buffer).await.unwrap();
                }
                begin.elapsed()
            });
            runtime.block_on(work).unwrap()
        });
    });
    group.finish();
}

fn raw_read(c: &mut Criterion, group: &str, len: usize) {
    let dir = tempfile::tempdir().unwrap();
    let mut stream = raw_server(file(&dir), len);
    let mut bytes = vec![0; len];
    let mut i = 0;
    let mut group = c.benchmark_group(group);
    group.throughput(Throughput::Bytes(len as u64));
    group.bench_function("raw tcp", |b| {
        b.iter(|| {
            let start = (i * len % (FILE_BYTES - len + 1)) as u64;
            i += 1;
            stream.write_all(&start.to_le_bytes()).unwrap();
            stream.read_exact(&mut bytes).unwrap();
        });
    });
    group.finish();
}

/// Eight readers of 8 KiB at a time, as random readers on one node make them.
fn many_small(c: &mut Criterion) {
    const READERS: u64 = 8;
    let dir = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let server = server(&runtime, &file(&dir), true);
    let address = server.address().to_string();
    let pool = Arc::new(PeerPool::new(None, PoolOptions::default()));
    let mut group = c.benchmark_group("8KiB");
    group.throughput(Throughput::Bytes(8192));
    group.bench_function("peer, 8 readers", |b| {
        b.iter_custom(|rounds| {
            runtime.block_on(async {
                let begin = std::time::Instant::now();
                let mut readers = tokio::task::JoinSet::new();
                for reader in 0..READERS {
                    let (pool, address) = (pool.clone(), address.clone());
                    readers.spawn(async move {
                        let mut buffer = BytesMut::with_capacity(8192);
                        for i in 0..rounds.div_ceil(READERS) {
                            let start = (reader * 997 + i) % 2000 * 8192;
                            let ranges = vec![ByteRange::at(start, 8192)];
                            let request = ReadRequest::of_owner(Ino(2), ranges);
                            buffer = pool.read_into(&address, &request, buffer).await.unwrap();
                        }
                    });
                }
                while let Some(done) = readers.join_next().await {
                    done.unwrap();
                }
                begin.elapsed()
            })
        });
    });
    group.finish();
}

fn peers(c: &mut Criterion) {
    raw_read(c, "8KiB", 8 << 10);
    peer_read(c, "8KiB", "peer", true, 8 << 10);
    many_small(c);
    raw_read(c, "1MiB", 1 << 20);
    peer_read(c, "1MiB", "peer, held", true, 1 << 20);
    peer_read(c, "1MiB", "peer, copied", false, 1 << 20);
    raw_read(c, "8MiB", 8 << 20);
    peer_read(c, "8MiB", "peer, held", true, 8 << 20);
}

/// Below `PAGES_BYTES_MIN` both are copied; set that to 0 to find it anew.
fn lent(c: &mut Criterion) {
    for kib in [128, 256, 512, 1024] {
        let group = format!("lent {kib}KiB");
        peer_read(c, &group, "held", true, kib << 10);
        peer_read(c, &group, "copied", false, kib << 10);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = peers, lent
}
criterion_main!(benches);
