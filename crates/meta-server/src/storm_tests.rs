//! Many come at the same time, while the journal stands still.

use crate::config::Config;
use crate::core::Core;
use crate::journal::tests::on_a_disk_that_stands_still;
use crate::server::Server;
use ebb_transport::auth::{self, SessionHandshake};
use ebb_transport::{Secure, Token};
use ebb_wire::pb;
use ebb_wire::pb::metadata_client::MetadataClient;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use prost::Message;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// More than there are places for strangers.
const FLOOD: usize = 300;

struct Service {
    _dir: tempfile::TempDir,
    address: SocketAddr,
    token: Option<Token>,
    still: Arc<AtomicBool>,
}

impl Service {
    async fn start(with_token: bool) -> Service {
        let dir = tempfile::tempdir().unwrap();
        let [backing, state, disk, secret] =
            ["backing", "state", "disk", "token"].map(|d| dir.path().join(d));
        [&backing, &disk].iter().for_each(|d| std::fs::create_dir(d).unwrap());
        let token = with_token.then(|| Token::generate_to(&secret).unwrap());
        let mut config = Config::new(backing, state);
        config.token = with_token.then(|| Token::load(&secret).unwrap());
        config.secure = Secure::Off;
        let still = Arc::new(AtomicBool::new(false));
        let mut core = Core::open(&config).unwrap();
        core.journal = on_a_disk_that_stands_still(&disk, &still);
        let server = Server::of(Arc::new(core), config);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { server.serve(listener, std::future::pending()).await });
        Service { _dir: dir, address, token, still }
    }

    /// Strangers that say nothing, each one let in by the time that the next one comes.
    async fn flood(&self) -> Vec<TcpStream> {
        let mut all = Vec::new();
        for _ in 0..FLOOD {
            all.push(TcpStream::connect(self.address).await.unwrap());
        }
        // The first ones were sent away for the last ones: all are in.
        let (first, mut heard) = (&mut all[0], [0; 1024]);
        let gone = tokio::time::timeout(Duration::from_secs(5), first.read(&mut heard));
        drop(gone.await.expect("the first stranger is sent away"));
        all
    }
}

/// A node whose welcome is on its way.
struct Comer {
    _to: mpsc::Sender<pb::ClientFrame>,
    from: Streaming<pb::ServerFrame>,
}

fn frame(id: u64, op: Op) -> pb::ClientFrame {
    pb::ClientFrame { requests: vec![pb::Request { id, op: Some(op), ..Default::default() }] }
}

impl Comer {
    /// Says all that a node says for its welcome.
    async fn greet(service: &Service) -> Comer {
        let endpoint =
            tonic::transport::Endpoint::from_shared(format!("http://{}", service.address)).unwrap();
        let mut client = MetadataClient::new(endpoint.connect().await.unwrap());
        let nonce = auth::nonce();
        let hello = pb::Hello {
            protocol: ebb_wire::PROTOCOL,
            node: "a".to_owned(),
            incarnation: 1,
            nonce: nonce.to_vec(),
            ..Default::default()
        };
        let said = hello.encode_to_vec();
        let (to, out) = mpsc::channel(4);
        to.send(frame(1, Op::Hello(hello))).await.unwrap();
        let from = client.session(ReceiverStream::new(out)).await.unwrap().into_inner();
        let mut comer = Comer { _to: to.clone(), from };
        if let Some(token) = &service.token {
            let Ok(Some(Body::Challenge(c))) = comer.answer().await else { panic!("no challenge") };
            let shake =
                SessionHandshake { hello_nonce: &nonce, service_nonce: &c.nonce, hello: &said };
            let proof = shake.node_proof(token).to_vec();
            to.send(frame(2, Op::Prove(pb::Prove { proof }))).await.unwrap();
        }
        comer
    }

    async fn answer(&mut self) -> Result<Option<Body>, Status> {
        let frame = self.from.message().await?;
        Ok(frame.and_then(|mut f| f.replies.pop()).and_then(|r| r.body))
    }
}

async fn is_welcomed_though_strangers_come(with_token: bool) {
    let service = Service::start(with_token).await;
    service.still.store(true, Relaxed);
    let mut comer = Comer::greet(&service).await;
    let early = tokio::time::timeout(Duration::from_millis(100), comer.answer()).await;
    assert!(early.is_err(), "nothing is answered before it is in the journal: {early:?}");
    let strangers = service.flood().await;
    service.still.store(false, Relaxed);
    let answer = tokio::time::timeout(Duration::from_secs(20), comer.answer()).await.unwrap();
    assert!(matches!(answer, Ok(Some(Body::Welcome(_)))), "{answer:?}");
    drop(strangers);
}

#[tokio::test]
async fn who_has_proven_the_token_is_not_sent_away_for_strangers() {
    is_welcomed_though_strangers_come(true).await;
}

#[tokio::test]
async fn nor_is_who_need_not_prove_one() {
    is_welcomed_though_strangers_come(false).await;
}
