//! What one call costs: alone (a round trip over loopback), and many at a time, against a unary
//! gRPC call and a bare TCP round trip in the same run.

#![allow(clippy::unwrap_used)] // a failure here is a failed bench

#[path = "../tests/scripted/mod.rs"]
#[allow(dead_code)]
mod scripted;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ebb_meta_client::MetaClient;
use ebb_types::{Ino, Name};
use ebb_wire::pb::{self, metadata_client::MetadataClient, request::Op};
use scripted::{Service, entry};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// A service on a runtime of its own that knows every name.
fn service() -> (Runtime, std::net::SocketAddr) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut service = runtime.block_on(Service::start());
    let address = service.address;
    runtime.spawn(async move {
        loop {
            let (mut peer, _) = service.welcome(1).await;
            tokio::spawn(async move {
                loop {
                    let replies = peer.frame().await.into_iter().map(|(id, op)| {
                        let body = matches!(op, Op::Lookup(_)).then(|| entry(2));
                        pb::Reply { id, body, ..Default::default() }
                    });
                    let replies = replies.collect();
                    peer.send(replies).await;
                }
            });
        }
    });
    (runtime, address)
}

fn client_runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn raw_round_trip(c: &mut Criterion) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        let mut bytes = [0; 64];
        while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {}
    });
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    let mut bytes = [0; 64];
    c.benchmark_group("call").bench_function("raw tcp", |b| {
        b.iter(|| {
            stream.write_all(&bytes).unwrap();
            stream.read_exact(&mut bytes).unwrap();
        });
    });
}

fn unary(c: &mut Criterion) {
    let (_service, address) = service();
    let runtime = client_runtime();
    let url = format!("http://{address}");
    let endpoint = tonic::transport::Endpoint::from_shared(url).unwrap().tcp_nodelay(true);
    let client = MetadataClient::new(runtime.block_on(endpoint.connect()).unwrap());
    c.benchmark_group("call").bench_function("unary echo", |b| {
        b.iter_custom(|rounds| {
            let mut client = client.clone();
            let work = runtime.spawn(async move {
                let begin = Instant::now();
                for id in 0..rounds {
                    let message = pb::EchoMessage { id, payload: vec![0; 32] };
                    client.echo(message).await.unwrap();
                }
                begin.elapsed()
            });
            runtime.block_on(work).unwrap()
        });
    });
}

/// `callers` tasks, each with one lookup at a time.
fn lookups(c: &mut Criterion, name: &str, callers: u64) {
    let (_service, address) = service();
    let runtime = client_runtime();
    let options = ebb_meta_client::ConnectOptions::new(address.to_string(), "n");
    let (client, _) = runtime.block_on(MetaClient::connect(options)).unwrap();
    let mut group = c.benchmark_group("call");
    group.throughput(Throughput::Elements(1));
    group.bench_function(name, |b| {
        b.iter_custom(|rounds| {
            runtime.block_on(async {
                let begin = Instant::now();
                let mut tasks = tokio::task::JoinSet::new();
                for _ in 0..callers {
                    let client = client.clone();
                    let x = Name::new(b"x").unwrap();
                    tasks.spawn(async move {
                        for _ in 0..rounds.div_ceil(callers) {
                            client.lookup(Ino(1), &x).await.unwrap();
                        }
                    });
                }
                while let Some(done) = tasks.join_next().await {
                    done.unwrap();
                }
                begin.elapsed()
            })
        });
    });
    group.finish();
}

fn calls(c: &mut Criterion) {
    raw_round_trip(c);
    unary(c);
    lookups(c, "stream, 1 caller", 1);
    lookups(c, "stream, 8 callers", 8);
    lookups(c, "stream, 256 callers", 256);
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = calls
}
criterion_main!(benches);
