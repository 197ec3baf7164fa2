//! Work for peers: copies that are kept and files that are written there, whatever carries the bytes.

use super::files::{Files, Lending};
use super::{INO, LOOPBACK, Pair, serve, token};
use ebb_locks::Mutex;
use ebb_transport::{CopyLink, CopySet, PeerChannel, PeerTransport, SeatLink, SeatWork, WorkError};
use ebb_types::{ByteRange, Errno, Ino, NodeId};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

const SET: CopySet = CopySet { owner: NodeId(3), epoch: 8 };
/// A file that sits at the server.
const SEATED: Ino = Ino(5);

/// The copies and the seated file of a server: in memory, with every call that came.
#[derive(Default)]
pub struct Desk {
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    sets: HashMap<CopySet, HashMap<Ino, Vec<Option<u8>>>>,
    seated: Vec<u8>,
    syncs: usize,
    /// So long each append takes before it is done.
    delay: Duration,
    fails: Option<Errno>,
}

impl Desk {
    pub fn begin(&self, set: CopySet) -> Result<(), Errno> {
        self.inside.lock().sets.insert(set, HashMap::new());
        Ok(())
    }

    pub fn keep(
        &self,
        set: CopySet,
        ino: Ino,
        ranges: &[ByteRange],
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let mut inside = self.inside.lock();
        let kept = inside.sets.get_mut(&set).ok_or(Errno::ESTALE)?.entry(ino).or_default();
        let mut at = 0;
        for r in ranges {
            let (start, end) = (r.start() as usize, r.end() as usize);
            kept.resize(kept.len().max(end), None);
            for (to, from) in kept[start..end].iter_mut().zip(&bytes[at..]) {
                *to = Some(*from);
            }
            at += end - start;
        }
        assert_eq!(at, bytes.len(), "the bytes of the ranges, no more");
        Ok(())
    }

    pub fn drop(&self, set: CopySet, ino: Ino, ranges: &[ByteRange]) -> Result<(), Errno> {
        let mut inside = self.inside.lock();
        let files = inside.sets.get_mut(&set).ok_or(Errno::ESTALE)?;
        for r in ranges {
            let kept = files.entry(ino).or_default();
            let end = kept.len().min(r.end() as usize);
            kept[(r.start() as usize).min(end)..end].fill(None);
        }
        Ok(())
    }

    pub fn at_seat(
        &self,
        ino: Ino,
        work: SeatWork,
        ranges: &[ByteRange],
        bytes: &[u8],
    ) -> Result<(), Errno> {
        if ino != SEATED {
            return Err(Errno::ESTALE);
        }
        if work == SeatWork::Append {
            let delay = self.inside.lock().delay;
            std::thread::sleep(delay);
        }
        let mut inside = self.inside.lock();
        if let Some(errno) = inside.fails {
            return Err(errno);
        }
        let seated = &mut inside.seated;
        let end = ranges.first().map_or(0, |r| r.end() as usize);
        match work {
            SeatWork::Look => {}
            SeatWork::Sync => inside.syncs += 1,
            SeatWork::Cut => seated.resize(end, 0),
            SeatWork::Grow => seated.resize(end.max(seated.len()), 0),
            SeatWork::Append => seated.extend_from_slice(bytes),
            SeatWork::Write => write(seated, ranges, bytes),
        }
        Ok(())
    }

    fn copies(&self, ino: Ino) -> Vec<Option<u8>> {
        self.inside.lock().sets[&SET].get(&ino).cloned().unwrap_or_default()
    }
}

fn write(file: &mut Vec<u8>, ranges: &[ByteRange], bytes: &[u8]) {
    let mut at = 0;
    for r in ranges {
        let (start, end) = (r.start() as usize, r.end() as usize);
        file.resize(file.len().max(end), 0);
        file[start..end].copy_from_slice(&bytes[at..at + end - start]);
        at += end - start;
    }
}

pub async fn suite(transport: &dyn PeerTransport) {
    copies_are_kept_and_dropped(transport).await;
    a_seated_file_is_what_was_done_to_it(transport).await;
    refusals_and_local_errors_harm_nobody(transport).await;
    who_is_not_there_has_done_nothing(transport).await;
    appends_beside_a_server_that_stops_are_done_once_or_not_at_all(transport).await;
}

fn reader(content: &[u8]) -> impl Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send + Sync + '_ {
    |r, into| {
        into.copy_from_slice(&content[r.start() as usize..r.end() as usize]);
        Ok(())
    }
}

async fn copies_of(pair: &Pair) -> CopyLink {
    let channel = Arc::clone(&pair.channel);
    CopyLink::begin(channel, pair.server.address(), SET).await.unwrap()
}

async fn copies_are_kept_and_dropped(transport: &dyn PeerTransport) {
    let pair = Pair::new(transport, Lending::Held).await;
    let content = Files::new(Lending::Held).fill(INO, 6_000_000, 21);
    let mut expected: Vec<Option<u8>> = Vec::new();
    let link = copies_of(&pair).await;
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for round in 0..30 {
        let mut ranges = super::random_ranges(&mut rng, content.len() as u64);
        ranges.retain(|r| !r.is_empty());
        if round % 5 == 4 {
            link.drop_ranges(INO, &ranges).await.unwrap();
            for r in &ranges {
                let end = expected.len().min(r.end() as usize);
                expected[(r.start() as usize).min(end)..end].fill(None);
            }
        } else {
            link.keep(INO, &ranges, reader(&content)).await.unwrap();
            for r in &ranges {
                let (start, end) = (r.start() as usize, r.end() as usize);
                expected.resize(expected.len().max(end), None);
                for (to, from) in expected[start..end].iter_mut().zip(&content[start..]) {
                    *to = Some(*from);
                }
            }
        }
        assert!(pair.files.desk.copies(INO) == expected, "round {round}");
    }
    // Larger than a frame, and no bytes at all.
    link.keep(Ino(9), &[ByteRange::new(0, 6_000_000)], reader(&content)).await.unwrap();
    link.keep(Ino(9), &[], reader(&content)).await.unwrap();
    link.drop_ranges(Ino(9), &[]).await.unwrap();
    let kept: Option<Vec<u8>> = pair.files.desk.copies(Ino(9)).into_iter().collect();
    assert!(kept.unwrap() == content);
    link.check().await.unwrap();
    assert_eq!(link.set(), SET);
    pair.files.desk.inside.lock().sets.clear();
    assert_eq!(link.check().await, Err(WorkError::Refused(Errno::ESTALE)));
    let refused = link.keep(INO, &[ByteRange::new(0, 5)], reader(&content)).await;
    assert_eq!(refused, Err(WorkError::Refused(Errno::ESTALE)));
}

async fn a_seated_file_is_what_was_done_to_it(transport: &dyn PeerTransport) {
    let pair = Pair::new(transport, Lending::Held).await;
    let content = Files::new(Lending::Held).fill(INO, 3_000_000, 22);
    let link = SeatLink::new(Arc::clone(&pair.channel), pair.server.address());
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let (mut expected, mut syncs) = (Vec::new(), 0);
    for _ in 0..60 {
        let size = rng.random_range(0..content.len() as u64);
        match rng.random_range(0..6) {
            0 | 1 => {
                let mut ranges = super::random_ranges(&mut rng, content.len() as u64);
                ranges.retain(|r| !r.is_empty());
                link.write(SEATED, &ranges, reader(&content)).await.unwrap();
                let bytes = super::expected(&content, &ranges);
                write(&mut expected, &ranges, &bytes);
            }
            2 => {
                let data = &content[..(size as usize).min(1 << 20)];
                link.append(SEATED, data).await.unwrap();
                expected.extend_from_slice(data);
            }
            3 => {
                link.cut(SEATED, size).await.unwrap();
                expected.resize(size as usize, 0);
            }
            4 => {
                link.grow(SEATED, size).await.unwrap();
                expected.resize(expected.len().max(size as usize), 0);
            }
            _ => {
                link.sync(SEATED).await.unwrap();
                syncs += 1;
            }
        }
        assert!(pair.files.desk.inside.lock().seated == expected);
    }
    assert_eq!(pair.files.desk.inside.lock().syncs, syncs);
    let too_much = vec![0; (1 << 20) + 1];
    assert_eq!(link.append(SEATED, &too_much).await, Err(WorkError::Local(Errno::EINVAL)));
}

async fn refusals_and_local_errors_harm_nobody(transport: &dyn PeerTransport) {
    let pair = Pair::new(transport, Lending::Held).await;
    let link = SeatLink::new(Arc::clone(&pair.channel), pair.server.address());
    let whole = [ByteRange::new(0, 5_000_000)];
    let content = vec![7; 5_000_000];
    let fail = |errno| pair.files.desk.inside.lock().fails = errno;
    for _ in 0..3 {
        assert_eq!(link.sync(Ino(1)).await, Err(WorkError::Refused(Errno::ESTALE)));
        fail(Some(Errno::ENOSPC));
        let refused = link.write(SEATED, &whole, reader(&content)).await;
        assert_eq!(refused, Err(WorkError::Refused(Errno::ENOSPC)));
        fail(None);
        // The bytes of the second half are not there: some frames are on their way by then.
        let half = |r: ByteRange, into: &mut [u8]| match r.end() <= 2_500_000 {
            true => reader(&content)(r, into),
            false => Err(io::Error::from_raw_os_error(libc::EIO)),
        };
        let local = link.write(SEATED, &whole, half).await;
        assert_eq!(local, Err(WorkError::Local(Errno::EIO)));
        link.write(SEATED, &whole, reader(&content)).await.unwrap();
        assert!(pair.files.desk.inside.lock().seated == content);
    }
}

async fn who_is_not_there_has_done_nothing(transport: &dyn PeerTransport) {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (token(&dir, "a"), token(&dir, "b"));
    let files = Arc::new(Files::new(Lending::Held));
    let server = serve(transport, LOOPBACK, &files, Some(ours.clone())).await.unwrap();
    let address = server.address();
    let ask = async |token: Arc<ebb_transport::Token>, address: &str| {
        let channel: Arc<dyn PeerChannel> = transport.channel(Some(token));
        let reached = channel.reach(address).await;
        let appended = SeatLink::new(channel, address.to_owned()).append(SEATED, b"a").await;
        (reached, appended)
    };
    assert_eq!(ask(ours.clone(), &address).await, (Ok(()), Ok(())));
    for (token, address) in [(other, address.as_str()), (ours.clone(), "not-an-address")] {
        let (reached, appended) = ask(token, address).await;
        for result in [reached, appended] {
            let Err(WorkError::Unreached(text)) = result else { panic!("{result:?}") };
            assert!(text.contains(address), "{text}");
        }
    }
    assert_eq!(files.desk.inside.lock().seated, b"a");

    // One that has begun again is reached by a channel that knew the one before.
    let channel = transport.channel(Some(ours.clone()));
    channel.reach(&address).await.unwrap();
    let link = SeatLink::new(Arc::clone(&channel), address.clone());
    link.append(SEATED, b"b").await.unwrap();
    drop(server);
    let again = loop {
        match serve(transport, &address, &files, Some(ours.clone())).await {
            Ok(server) => break server,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    channel.reach(&again.address()).await.unwrap();
    // Its old connection is found out before anything is appended through it.
    let appended = link.append(SEATED, b"c").await;
    assert!(matches!(appended, Ok(()) | Err(WorkError::Unreached(_))), "{appended:?}");
    link.append(SEATED, b"d").await.unwrap();
}

/// What was answered is there, what was never reached is not, and nothing is there twice.
async fn appends_beside_a_server_that_stops_are_done_once_or_not_at_all(
    transport: &dyn PeerTransport,
) {
    let pair = Pair::new(transport, Lending::Held).await;
    pair.files.desk.inside.lock().delay = Duration::from_millis(1);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..6u8 {
        let link = SeatLink::new(Arc::clone(&pair.channel), pair.server.address());
        tasks.spawn(async move {
            let mut answers = Vec::new();
            for i in 0..200u8 {
                answers.push(([task, i], link.append(SEATED, &[task, i]).await));
            }
            answers
        });
    }
    tokio::time::sleep(Duration::from_millis(60)).await;
    let address = pair.server.address();
    pair.server.stop();
    tokio::time::sleep(Duration::from_millis(30)).await;
    let again = loop {
        match serve(transport, &address, &pair.files, None).await {
            Ok(server) => break server,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    let (mut answered, mut open) = (0, 0);
    let mut answers = Vec::new();
    while let Some(task) = tasks.join_next().await {
        answers.extend(task.unwrap());
    }
    drop(again);
    // What was begun before the server stopped may still be under way there.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let seated = pair.files.desk.inside.lock().seated.clone();
    let mut times: HashMap<[u8; 2], usize> = HashMap::new();
    for pair in seated.chunks(2) {
        *times.entry([pair[0], pair[1]]).or_default() += 1;
    }
    for (bytes, answer) in answers {
        let times = times.get(&bytes).copied().unwrap_or(0);
        match answer {
            Ok(()) => {
                assert_eq!(times, 1, "{bytes:?}");
                answered += 1;
            }
            Err(WorkError::Unreached(why)) => assert_eq!(times, 0, "{bytes:?}: {why}"),
            Err(WorkError::Silent(_)) => {
                assert!(times <= 1, "{bytes:?}");
                open += 1;
            }
            Err(e) => panic!("{bytes:?}: {e}"),
        }
    }
    assert!(answered > 0 && answered + open < 1200, "{answered} answered, {open} open");
}
