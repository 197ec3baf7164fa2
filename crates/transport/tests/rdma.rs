//! The peer protocol over a real RDMA device, both ends in this process. Without a device there is nothing to
//! test; where there must be one `EBB_REQUIRE_RDMA=1` says so.
#![cfg(feature = "rdma")]
#![allow(clippy::unwrap_used)] // a failure here is a failed test

mod conformance;

use conformance::files::{Files, Lending, eventually};
use ebb_rdma::{Options, local};
use ebb_transport::{
    Fabric, PeerChannel, PeerServing, PeerTransport, PoolOptions, Rdma, ReadError, ReadRequest,
    ServeOptions, Tcp, Token, wire,
};
use ebb_types::{ByteRange, Ino};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const INO: Ino = Ino(3);
const MIB: u64 = 1 << 20;

fn fabric(change: impl FnOnce(&mut Options)) -> Option<Arc<Fabric>> {
    let opened = local::choose(&local::gids(), None).and_then(|address| {
        let mut options = Options::at(address);
        change(&mut options);
        Fabric::open(options).map_err(|e| e.to_string())
    });
    match opened {
        Ok(fabric) => Some(Arc::new(fabric)),
        Err(why) if std::env::var_os("EBB_REQUIRE_RDMA").is_none() => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

/// Machines with soft-RoCE may be emulated ones, where everything takes its time.
fn patient() -> Tcp {
    let long = Duration::from_secs(300);
    let serve = ServeOptions { stall_timeout: 2 * long, ..ServeOptions::default() };
    let pool = PoolOptions { read_timeout: long, ..PoolOptions::default() };
    Tcp { serve, pool }
}

/// Runs a test where there is a device.
fn on_device<F: Future<Output = ()>>(test: impl FnOnce(Rdma) -> F) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        if let Some(fabric) = fabric(|_| {}) {
            test(Rdma { tcp: patient(), fabric }).await;
        }
    });
}

async fn serve(transport: &dyn PeerTransport, files: &Arc<Files>) -> Box<dyn PeerServing> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    transport.serve(listener, files.clone(), None).unwrap()
}

fn request(start: u64, end: u64) -> ReadRequest {
    ReadRequest::of_owner(INO, vec![ByteRange::new(start, end)])
}

async fn no_memory_stays(rdma: &Rdma) {
    let fabric = &rdma.fabric;
    eventually("no landing is left", || fabric.report().stats.landing_bytes == 0).await;
}

#[test]
fn conforms() {
    on_device(|rdma| async move {
        conformance::suite(&rdma).await;
        let report = rdma.fabric.report();
        assert!(report.moved > 50 && report.placed_bytes > 100 << 20, "{report:?}");
        no_memory_stays(&rdma).await;
        eventually("all connections are gone", || rdma.fabric.report().stats.connections == 0)
            .await;
    });
}

#[test]
fn conforms_where_one_end_has_no_rdma() {
    on_device(|rdma| async move {
        for (with, without) in [(true, false), (false, true)] {
            let mixed = Mixed { rdma: rdma.clone(), serves: with, asks: without };
            conformance::suite(&mixed).await;
        }
        let report = rdma.fabric.report();
        assert_eq!(report.stats.connections, 0);
        assert!(report.fell_back > 20 && report.moved == 0, "{report:?}");
        let why: Vec<_> = report.peers.values().flatten().collect();
        assert!(why.iter().all(|why| *why == "has no RDMA"), "{why:?}");
    });
}

/// One end has RDMA.
struct Mixed {
    rdma: Rdma,
    serves: bool,
    asks: bool,
}

impl PeerTransport for Mixed {
    fn serve(
        &self,
        listener: TcpListener,
        source: Arc<dyn ebb_transport::ByteSource>,
        token: Option<Arc<Token>>,
    ) -> Result<Box<dyn PeerServing>, ebb_transport::ServeError> {
        match self.serves {
            true => self.rdma.serve(listener, source, token),
            false => self.rdma.tcp.serve(listener, source, token),
        }
    }

    fn channel(&self, token: Option<Arc<Token>>) -> Arc<dyn PeerChannel> {
        if self.asks { self.rdma.channel(token) } else { self.rdma.tcp.channel(token) }
    }
}

#[test]
fn a_server_that_stops_in_the_middle_of_many_reads_gives_whole_answers_or_errors() {
    on_device(|rdma| async move {
        let files = Arc::new(Files::new(Lending::Held));
        let content = Arc::new(files.fill(INO, 4 * MIB, 1));
        for round in 0..5 {
            let server = serve(&rdma, &files).await;
            let (address, channel) = (server.address(), rdma.channel(None));
            let mut tasks = tokio::task::JoinSet::new();
            for _ in 0..4 {
                let (channel, address) = (channel.clone(), address.clone());
                let content = content.clone();
                tasks.spawn(async move {
                    loop {
                        match channel.read(&address, &request(0, 4 * MIB)).await {
                            Ok(got) => assert!(got == *content),
                            Err(ReadError::Unreachable(_)) => return,
                            Err(e) => panic!("{e:?}"),
                        }
                    }
                });
            }
            tokio::time::sleep(Duration::from_millis(300 + 170 * round)).await;
            drop(server);
            while let Some(done) = tasks.join_next().await {
                done.unwrap();
            }
        }
        files.expect_all_holds_dropped().await;
        no_memory_stays(&rdma).await;
    });
}

#[test]
fn reads_that_are_given_up_do_not_disturb_others() {
    on_device(|rdma| async move {
        let files = Arc::new(Files::new(Lending::Held));
        let content = files.fill(INO, 4 * MIB, 1);
        let server = serve(&rdma, &files).await;
        let (address, channel) = (server.address(), rdma.channel(None));
        for i in 0..60u64 {
            let given_up = Duration::from_micros(i * 500);
            let whole = request(0, 4 * MIB);
            let _ = tokio::time::timeout(given_up, channel.read(&address, &whole)).await;
            let start = i * 1000;
            let got = channel.read(&address, &request(start, start + 90_000)).await.unwrap();
            assert!(got == content[start as usize..][..90_000]);
        }
        assert_eq!(channel.stats().retries, 0, "no connection broke for it");
        no_memory_stays(&rdma).await;
    });
}

#[test]
fn where_no_memory_can_be_registered_bytes_come_all_the_same() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let Some(fabric) = fabric(|options| options.landing_bytes_max = MIB) else { return };
        let rdma = Rdma { tcp: patient(), fabric };
        let files = Arc::new(Files::new(Lending::Copied));
        let content = files.fill(INO, 3 * MIB, 1);
        let server = serve(&rdma, &files).await;
        let channel = rdma.channel(None);
        assert!(channel.read(&server.address(), &request(0, 3 * MIB)).await.unwrap() == content);
        assert_eq!(rdma.fabric.report().placed_bytes, 0);
        let one = channel.read(&server.address(), &request(0, MIB)).await.unwrap();
        assert!(one == content[..MIB as usize]);
        assert_eq!(rdma.fabric.report().placed_bytes, MIB);
    });
}

/// A server that invites to a place where nobody is, once for each connection that asks.
async fn misleading(files: &Arc<Files>, rdma: &Rdma) -> String {
    let real = serve(&rdma.tcp, files).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut meeting = [0; 64];
    meeting[..16].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 99]);
    meeting[16] = 9;
    tokio::spawn(async move {
        loop {
            let (mut peer, _) = listener.accept().await.unwrap();
            let to = real.address();
            tokio::spawn(async move {
                let mut behind = TcpStream::connect(to).await?;
                let mut hello = [0; 40];
                peer.read_exact(&mut hello).await?;
                behind.write_all(&hello).await?;
                let mut answer = [0; 72];
                behind.read_exact(&mut answer).await?;
                peer.write_all(&answer).await?;
                let mut first = vec![0; wire::REQUEST_LEN];
                peer.read_exact(&mut first).await?;
                if let Ok(Some((wire::Request::Meet { id }, _))) = wire::take_request(&first) {
                    peer.write_all(&wire::encode_trailer(id, wire::Status::Ok)).await?;
                    peer.write_all(&meeting).await?;
                    return peer.read_to_end(&mut Vec::new()).await.map(drop);
                }
                behind.write_all(&first).await?;
                tokio::io::copy_bidirectional(&mut peer, &mut behind).await.map(drop)
            });
        }
    });
    address
}

#[test]
fn a_peer_that_is_not_reached_over_rdma_is_spoken_to_over_tcp_and_that_is_seen() {
    on_device(|rdma| async move {
        let files = Arc::new(Files::new(Lending::Copied));
        let content = files.fill(INO, 100_000, 1);
        let address = misleading(&files, &rdma).await;
        let pool = PoolOptions { connect_timeout: Duration::from_secs(10), ..rdma.tcp.pool };
        let rdma = Rdma { tcp: Tcp { pool, ..rdma.tcp }, fabric: rdma.fabric };
        let channel = rdma.channel(None);
        for _ in 0..3 {
            assert!(channel.read(&address, &request(0, 100_000)).await.unwrap() == content);
        }
        let report = channel.rdma().unwrap();
        assert_eq!((report.moved, report.fell_back), (0, 1), "asked once: {report:?}");
        let why = report.peers[&address].clone().unwrap();
        assert!(why.contains("over RDMA"), "{why}");
    });
}

/// Processor time of this process so far.
fn processor() -> Duration {
    let usage = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = usage.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

/// Reads of one size, one after the other or several at a time: how long each takes, and what processor time a MiB
/// costs at both ends together.
async fn measure_reads(
    what: &str,
    transport: &dyn PeerTransport,
    bytes: u64,
    at_once: usize,
    seconds: f64,
) {
    let files = Arc::new(Files::new(Lending::Held));
    files.fill(INO, bytes, 1);
    let server = serve(transport, &files).await;
    let (channel, address) = (transport.channel(None), server.address());
    channel.read(&address, &request(0, bytes)).await.unwrap();
    let (begin, before) = (std::time::Instant::now(), processor());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..at_once {
        let (channel, address) = (channel.clone(), address.clone());
        tasks.spawn(async move {
            let (mut done, mut buffer) = (0u64, bytes::BytesMut::new());
            while begin.elapsed().as_secs_f64() < seconds {
                buffer = channel.read_into(&address, &request(0, bytes), buffer).await.unwrap();
                done += 1;
            }
            done
        });
    }
    let mut reads = 0;
    while let Some(done) = tasks.join_next().await {
        reads += done.unwrap();
    }
    let (took, spent) = (begin.elapsed().as_secs_f64(), processor() - before);
    let mib = (reads * bytes) as f64 / MIB as f64;
    println!(
        "{what:5} {:7} KiB x{at_once}: {:9.1} us a read, {:7.1} MiB/s, {:6.2} ms of processor a MiB",
        bytes >> 10,
        took * 1e6 / reads as f64 * at_once as f64,
        mib / took,
        spent.as_secs_f64() * 1e3 / mib,
    );
}

/// Both carriers in turns, on this machine as it is.
#[test]
#[ignore = "measures; tests/rdma/measure"]
fn measured() {
    on_device(|rdma| async move {
        for round in 0..2 {
            println!("round {round}");
            for (bytes, at_once) in
                [(4 << 10, 1), (64 << 10, 1), (MIB, 1), (8 * MIB, 1), (8 * MIB, 4)]
            {
                measure_reads("tcp", &rdma.tcp, bytes, at_once, 5.0).await;
                measure_reads("rdma", &rdma, bytes, at_once, 5.0).await;
            }
        }
    });
}
