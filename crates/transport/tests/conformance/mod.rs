//! What every peer transport must do, whatever carries the bytes. `suite` runs it all against
//! one; a new transport needs one file with its own call of it.

pub mod files;
mod works;

use ebb_transport::auth::Token;
use ebb_transport::{
    PeerChannel, PeerServing, PeerTransport, READ_BYTES_MAX, ReadError, ReadRequest, ServeError,
};
use ebb_types::{ByteRange, Errno, Ino};
use files::{Files, Lending};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;
use tokio::net::TcpListener;

const INO: Ino = Ino(7);
const LOOPBACK: &str = "127.0.0.1:0";

struct Pair {
    files: Arc<Files>,
    server: Box<dyn PeerServing>,
    channel: Arc<dyn PeerChannel>,
}

/// Lends at a local address.
async fn serve(
    transport: &dyn PeerTransport,
    at: &str,
    files: &Arc<Files>,
    token: Option<Arc<Token>>,
) -> Result<Box<dyn PeerServing>, ServeError> {
    transport.serve(TcpListener::bind(at).await?, files.clone(), token)
}

impl Pair {
    async fn new(transport: &dyn PeerTransport, lending: Lending) -> Pair {
        let files = Arc::new(Files::new(lending));
        let server = serve(transport, LOOPBACK, &files, None).await.unwrap();
        Pair { files, server, channel: transport.channel(None) }
    }

    async fn read(&self, ranges: Vec<ByteRange>) -> Result<bytes::Bytes, ReadError> {
        self.channel.read(&self.server.address(), &ReadRequest::of_owner(INO, ranges)).await
    }
}

/// Every check, for both ways of lending.
pub async fn suite(transport: &dyn PeerTransport) {
    for lending in [Lending::Held, Lending::Copied] {
        random_scatter_lists(transport, lending).await;
        sizes_around_every_limit(transport, lending).await;
        bytes_that_are_not_in_memory(transport, lending).await;
        concurrent_reads(transport, lending).await;
        cut_files_are_disowned(transport, lending).await;
        overtaken_bytes_are_disowned(transport, lending).await;
        errors_are_told_apart(transport, lending).await;
    }
    oversized_reads_are_refused_here(transport).await;
    tokens_must_agree(transport).await;
    strangers_are_not_served(transport).await;
    nobody_there(transport).await;
    a_stopped_server_breaks_reads_and_a_new_one_serves(transport).await;
    works::suite(transport).await;
}

fn expected(content: &[u8], ranges: &[ByteRange]) -> Vec<u8> {
    let slices: Vec<_> =
        ranges.iter().map(|r| &content[r.start() as usize..r.end() as usize]).collect();
    slices.concat()
}

fn random_ranges(rng: &mut ChaCha8Rng, size: u64) -> Vec<ByteRange> {
    let count = if rng.random_bool(0.1) { 3000 } else { rng.random_range(0..20) };
    let longest = [1u64, 100, 5000, 200_000, 1_200_000][rng.random_range(0..5)];
    let longest = if count > 100 { longest.min(5000) } else { longest };
    (0..count)
        .map(|_| {
            let len = rng.random_range(0..=longest.min(size));
            ByteRange::at(rng.random_range(0..=size - len), len)
        })
        .collect()
}

async fn random_scatter_lists(transport: &dyn PeerTransport, lending: Lending) {
    let pair = Pair::new(transport, lending).await;
    let content = pair.files.fill(INO, 5_000_000, 1);
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut bytes = 0;
    for _ in 0..40 {
        let ranges = random_ranges(&mut rng, content.len() as u64);
        let want = expected(&content, &ranges);
        bytes += want.len() as u64;
        // Compared by hand: a failed assert_eq would print megabytes.
        assert!(pair.read(ranges.clone()).await.unwrap() == want, "{ranges:?}");
    }
    // A server counts when it has sent; a reader may be faster.
    files::eventually("all bytes are counted", || pair.server.stats().bytes_sent == bytes).await;
    let stats = pair.server.stats();
    assert_eq!((stats.not_here, stats.errors), (0, 0));
    pair.files.expect_all_holds_dropped().await;
}

async fn sizes_around_every_limit(transport: &dyn PeerTransport, lending: Lending) {
    let pair = Pair::new(transport, lending).await;
    let content = pair.files.fill(INO, 3 << 20, 2);
    for size in [1, 4096, 128 << 10, 512 << 10, 1 << 20, 2 << 20, 3 << 20] {
        for len in [size - 1, size, size + 1] {
            let len = len.min(content.len() as u64);
            let got =
                pair.read(vec![ByteRange::at(content.len() as u64 - len, len)]).await.unwrap();
            assert!(got == content[content.len() - len as usize..], "{len}");
        }
    }
    let many = vec![ByteRange::at(5, 1); 5000];
    assert_eq!(pair.read(many).await.unwrap(), vec![content[5]; 5000]);
}

async fn bytes_that_are_not_in_memory(transport: &dyn PeerTransport, lending: Lending) {
    let pair = Pair::new(transport, lending).await;
    let content = pair.files.fill(INO, 3_000_001, 9);
    for len in [10, 100_000, 700_000, 3_000_001] {
        pair.files.forget_pages(INO);
        let start = content.len() as u64 - len;
        let got = pair.read(vec![ByteRange::at(start, len)]).await.unwrap();
        assert!(got == content[start as usize..], "{len}");
    }
}

async fn concurrent_reads(transport: &dyn PeerTransport, lending: Lending) {
    let pair = Arc::new(Pair::new(transport, lending).await);
    let content = Arc::new(pair.files.fill(INO, 2_000_000, 3));
    let mut tasks = tokio::task::JoinSet::new();
    for seed in 0..16 {
        let (pair, content) = (pair.clone(), content.clone());
        tasks.spawn(async move {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            for _ in 0..10 {
                let ranges = random_ranges(&mut rng, content.len() as u64);
                let want = expected(&content, &ranges);
                assert!(pair.read(ranges).await.unwrap() == want);
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    pair.files.expect_all_holds_dropped().await;
}

/// The file is shorter than the source says: cut after it was lent.
async fn cut_files_are_disowned(transport: &dyn PeerTransport, lending: Lending) {
    let pair = Pair::new(transport, lending).await;
    for (size, cut_to) in [(8192, 4000), (1 << 20, 700_001), (3 << 20, 2_500_000), (400_000, 0)] {
        let content = pair.files.fill(INO, size, 4);
        pair.files.cut_when_lent(INO, cut_to);
        let whole = vec![ByteRange::new(0, size)];
        assert_eq!(pair.read(whole).await, Err(ReadError::NotHere), "{size} cut to {cut_to}");
        // What is left of it is still served, over the same connections.
        let rest = pair.read(vec![ByteRange::new(0, cut_to)]).await.unwrap();
        assert!(rest == content[..cut_to as usize]);
    }
    assert_eq!(pair.server.stats().errors, 0);
    pair.files.expect_all_holds_dropped().await;
}

/// The file is whole but the source says afterwards that the bytes were not its own any more.
async fn overtaken_bytes_are_disowned(transport: &dyn PeerTransport, lending: Lending) {
    let pair = Pair::new(transport, lending).await;
    for size in [100, 8192, 200_000, 2 << 20] {
        let content = pair.files.fill(INO, size, 5);
        pair.files.disown(INO, true);
        let whole = vec![ByteRange::new(0, size)];
        assert_eq!(pair.read(whole.clone()).await, Err(ReadError::NotHere), "{size}");
        pair.files.disown(INO, false);
        assert!(pair.read(whole).await.unwrap() == content);
    }
}

async fn errors_are_told_apart(transport: &dyn PeerTransport, lending: Lending) {
    let pair = Pair::new(transport, lending).await;
    pair.files.fill(INO, 100_000, 6);
    let beyond = vec![ByteRange::new(0, 10), ByteRange::new(99_999, 100_001)];
    assert_eq!(pair.read(beyond).await, Err(ReadError::NotHere));
    pair.files.fail(INO, Some(Errno::EIO));
    let one = vec![ByteRange::new(0, 10)];
    assert_eq!(pair.read(one.clone()).await, Err(ReadError::Errno(Errno::EIO)));
    pair.files.fail(INO, None);
    assert!(pair.read(one).await.is_ok());
    let other = ReadRequest::of_owner(Ino(99), vec![ByteRange::new(0, 1)]);
    let other = pair.channel.read(&pair.server.address(), &other).await;
    assert_eq!(other, Err(ReadError::NotHere));
    // A file that cannot be read: the error of the system call reaches the reader.
    pair.files.lend_a_directory(INO);
    for size in [10, 1_000_000] {
        let unreadable = pair.read(vec![ByteRange::new(0, size)]).await;
        assert!(matches!(unreadable, Err(ReadError::Errno(_))), "{unreadable:?}");
    }
}

async fn oversized_reads_are_refused_here(transport: &dyn PeerTransport) {
    let pair = Pair::new(transport, Lending::Copied).await;
    for range in
        [ByteRange::at(0, READ_BYTES_MAX + 1), ByteRange::ALL, ByteRange::at(i64::MAX as u64, 1)]
    {
        assert_eq!(pair.read(vec![range]).await, Err(ReadError::Oversized));
    }
    assert_eq!(pair.read(vec![]).await, Ok(bytes::Bytes::new()));
    assert_eq!(pair.server.stats().requests, 0);
}

fn token(dir: &tempfile::TempDir, name: &str) -> Arc<Token> {
    Arc::new(Token::generate_to(dir.path().join(name)).unwrap())
}

async fn tokens_must_agree(transport: &dyn PeerTransport) {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (token(&dir, "a"), token(&dir, "b"));
    let files = Arc::new(Files::new(Lending::Held));
    let content = files.fill(INO, 1000, 7);
    let request = ReadRequest::of_owner(INO, vec![ByteRange::new(0, 1000)]);
    let guarded = serve(transport, LOOPBACK, &files, Some(ours.clone())).await.unwrap();
    let open = serve(transport, LOOPBACK, &files, None).await.unwrap();
    let read = async |server: &dyn PeerServing, token: Option<Arc<Token>>| {
        transport.channel(token).read(&server.address(), &request).await
    };
    assert!(read(&*guarded, Some(ours.clone())).await.unwrap() == content);
    for (server, token) in [(&guarded, Some(other)), (&guarded, None), (&open, Some(ours))] {
        let refused = read(&**server, token).await;
        let Err(ReadError::Refused(text)) = refused else { panic!("{refused:?}") };
        assert!(text.contains(&server.address()), "{text}");
    }
    assert!(guarded.stats().requests <= 1, "no stranger got as far as a request");
}

async fn strangers_are_not_served(transport: &dyn PeerTransport) {
    let files = Arc::new(Files::new(Lending::Held));
    let everywhere = serve(transport, "0.0.0.0:0", &files, None).await;
    let error = everywhere.err().expect("an open server without a token");
    assert!(error.to_string().contains("token"), "{error}");
}

async fn nobody_there(transport: &dyn PeerTransport) {
    let pair = Pair::new(transport, Lending::Held).await;
    let address = pair.server.address();
    drop(pair.server);
    let request = ReadRequest::of_owner(INO, vec![ByteRange::new(0, 1)]);
    for address in [address.as_str(), "not-an-address"] {
        let result = pair.channel.read(address, &request).await;
        let Err(ReadError::Unreachable(text)) = result else { panic!("{result:?}") };
        assert!(text.contains(address), "{text}");
    }
}

async fn a_stopped_server_breaks_reads_and_a_new_one_serves(transport: &dyn PeerTransport) {
    let pair = Pair::new(transport, Lending::Held).await;
    let content = pair.files.fill(INO, 100_000, 8);
    let whole = vec![ByteRange::new(0, 100_000)];
    assert!(pair.read(whole.clone()).await.is_ok());
    let address = pair.server.address();
    pair.server.stop();
    // The listener and its connections close a moment later.
    let mut broken = pair.read(whole.clone()).await;
    for _ in 0..200 {
        if broken.is_err() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        broken = pair.read(whole.clone()).await;
    }
    assert!(matches!(broken, Err(ReadError::Unreachable(_))), "{broken:?}");
    let again = serve(transport, &address, &pair.files, None).await.unwrap();
    let request = ReadRequest::of_owner(INO, whole);
    assert!(pair.channel.read(&again.address(), &request).await.unwrap() == content);
}
