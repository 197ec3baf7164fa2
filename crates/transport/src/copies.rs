//! Copies of unflushed bytes on their way to the partner that keeps them: the sending end, and what
//! the serving end does with a request. The same connections bring what a node wants done to a file that
//! sits at a peer. What copies and seats mean is decided elsewhere.
//!
//! * Every request is answered; a set of copies is as good as its answers. Nothing is sent twice: an
//!   answer that does not come leaves open what the partner has, and the sender begins another
//!   set, perhaps elsewhere.
//! * Bounds: bytes and ranges of a frame, frames without an answer, the time of every step.

use crate::auth::Token;
use crate::handshake;
use crate::secure::{self, Channel, Purpose, Secure};
use crate::source::{ByteSource, CopySet};
use crate::wire::{
    self, Copies, CopyWork, KEEP_BYTES_MAX, RANGES_MAX, SeatWork, Status, TRAILER_LEN,
};
use ebb_types::{ByteRange, Errno, Ino, NodeId, in_steps};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::timeout;

/// Connections to a partner: files are copied beside each other.
const CONNECTIONS: usize = 4;

/// Frames that are on their way before an answer is awaited.
const FRAMES_AHEAD: u64 = 4;

/// A connection that was not used for so long may be closed at the other end; well below
/// what servers allow.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Why a partner does not have the copies, or perhaps not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// It says no.
    #[error("the partner refuses: {0}")]
    Refused(Errno),
    /// It does not answer, or not in time.
    #[error("the partner does not answer: {0}")]
    Silent(String),
    /// The same, before it was asked to do anything.
    #[error("the partner is not reached: {0}")]
    Unreached(String),
    /// The bytes cannot be read here.
    #[error("reading the bytes to copy: {0}")]
    Local(Errno),
}

fn silent(e: io::Error) -> CopyError {
    CopyError::Silent(e.to_string())
}

struct Line {
    stream: Channel,
    used: Instant,
    next_id: u64,
}

/// The connections to one partner for one set of copies.
pub struct CopyLink {
    address: String,
    token: Option<Arc<Token>>,
    secure: Secure,
    set: CopySet,
    /// Of every step: to connect, to send a frame, to be answered.
    patience: Duration,
    lines: [Mutex<Option<Line>>; CONNECTIONS],
    next: AtomicUsize,
}

impl CopyLink {
    /// Makes sure that the node at `address` can be reached, before it is said that copies are
    /// there.
    pub async fn reach(
        address: String,
        token: Option<Arc<Token>>,
        secure: Secure,
        patience: Duration,
    ) -> Result<CopyLink, CopyError> {
        let lines = std::array::from_fn(|_| Mutex::new(None));
        let set = CopySet { owner: NodeId::NOBODY, epoch: 0 };
        let next = AtomicUsize::new(0);
        let link = CopyLink { address, token, secure, set, patience, lines, next };
        drop(link.line().await?);
        Ok(link)
    }

    /// Begins a set of copies there.
    pub async fn begin(self, set: CopySet) -> Result<CopyLink, CopyError> {
        let link = CopyLink { set, ..self };
        link.ask(Ino(0), Vec::new(), CopyWork::Begin).await?;
        Ok(link)
    }

    /// Which copies these are.
    #[must_use]
    pub fn set(&self) -> CopySet {
        self.set
    }

    /// Whether the partner still keeps the set.
    pub async fn check(&self) -> Result<(), CopyError> {
        self.ask(Ino(0), Vec::new(), CopyWork::Drop).await
    }

    /// Copies of these bytes are not needed any more.
    pub async fn drop_ranges(&self, ino: Ino, ranges: &[ByteRange]) -> Result<(), CopyError> {
        for some in ranges.chunks(RANGES_MAX) {
            self.ask(ino, some.to_vec(), CopyWork::Drop).await?;
        }
        Ok(())
    }

    /// Copies bytes of a file; `read` fills a buffer with a range of them. When this returns
    /// the partner has all of them.
    pub async fn keep(
        &self,
        ino: Ino,
        ranges: &[ByteRange],
        read: impl Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send,
    ) -> Result<(), CopyError> {
        let what = |total, crc| CopyWork::Keep { total, crc };
        self.bring(ino, ranges, what, read).await
    }

    /// Writes bytes to a file that sits there, like [`CopyLink::keep`].
    pub async fn write_at_seat(
        &self,
        ino: Ino,
        ranges: &[ByteRange],
        read: impl Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send,
    ) -> Result<(), CopyError> {
        let what = |total, crc| CopyWork::AtSeat(SeatWork::Write { total, crc });
        self.bring(ino, ranges, what, read).await
    }

    /// Writes bytes, at most [`KEEP_BYTES_MAX`], behind the end of a file that sits there. When this
    /// fails with [`CopyError::Silent`] nobody knows whether it was done.
    pub async fn append_at_seat(&self, ino: Ino, data: &[u8]) -> Result<(), CopyError> {
        let unreached = |e| match e {
            CopyError::Silent(why) => CopyError::Unreached(why),
            other => other,
        };
        let mut line = self.line().await.map_err(unreached)?;
        // A connection that is broken is found out before it matters.
        let look = CopyWork::AtSeat(SeatWork::Look);
        self.ask_on(&mut line, ino, Vec::new(), look).await.map_err(unreached)?;
        let total = data.len() as u64;
        let what = |total, crc| CopyWork::AtSeat(SeatWork::Append { total, crc });
        let read = |range: ByteRange, into: &mut [u8]| {
            into.copy_from_slice(&data[range.start() as usize..range.end() as usize]);
            Ok(())
        };
        self.bring_on(&mut line, ino, &[ByteRange::new(0, total)], what, read).await
    }

    /// Cuts or extends a file that sits there.
    pub async fn cut_at_seat(&self, ino: Ino, size: u64) -> Result<(), CopyError> {
        let end = vec![ByteRange::new(0, size)];
        self.ask(ino, end, CopyWork::AtSeat(SeatWork::Cut)).await
    }

    /// Extends a file that sits there, if it is shorter.
    pub async fn grow_at_seat(&self, ino: Ino, size: u64) -> Result<(), CopyError> {
        let end = vec![ByteRange::new(0, size)];
        self.ask(ino, end, CopyWork::AtSeat(SeatWork::Grow)).await
    }

    /// `fsync` of a file that sits there.
    pub async fn sync_at_seat(&self, ino: Ino) -> Result<(), CopyError> {
        self.ask(ino, Vec::new(), CopyWork::AtSeat(SeatWork::Sync)).await
    }

    async fn bring(
        &self,
        ino: Ino,
        ranges: &[ByteRange],
        what: impl Fn(u64, u32) -> CopyWork + Send,
        read: impl Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send,
    ) -> Result<(), CopyError> {
        let mut line = self.line().await?;
        self.bring_on(&mut line, ino, ranges, what, read).await
    }

    async fn bring_on(
        &self,
        line: &mut Option<Line>,
        ino: Ino,
        ranges: &[ByteRange],
        what: impl Fn(u64, u32) -> CopyWork + Send,
        read: impl Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send,
    ) -> Result<(), CopyError> {
        let open = line.as_mut().ok_or(CopyError::Silent("not connected".into()))?;
        let done = self.send_all(open, ino, ranges, what, read).await;
        if done.is_err() {
            // Answers that are still to come would be taken for those of others.
            *line = None;
        }
        done
    }

    async fn send_all(
        &self,
        line: &mut Line,
        ino: Ino,
        ranges: &[ByteRange],
        what: impl Fn(u64, u32) -> CopyWork + Send,
        read: impl Fn(ByteRange, &mut [u8]) -> io::Result<()> + Send,
    ) -> Result<(), CopyError> {
        let mut waiting = 0u64;
        for part in in_steps(ranges, KEEP_BYTES_MAX, RANGES_MAX) {
            let total: u64 = part.iter().map(|r| r.len()).sum();
            let mut bytes = vec![0; total as usize];
            let mut at = 0;
            for range in &part {
                let end = at + range.len() as usize;
                read(*range, &mut bytes[at..end]).map_err(|e| CopyError::Local(e.into()))?;
                at = end;
            }
            let what = what(total, crc32c::crc32c(&bytes));
            self.send(line, ino, part, what, &bytes).await?;
            waiting += 1;
            if waiting > FRAMES_AHEAD {
                self.answer(line, waiting).await?;
                waiting -= 1;
            }
        }
        while waiting > 0 {
            self.answer(line, waiting).await?;
            waiting -= 1;
        }
        Ok(())
    }

    async fn ask(&self, ino: Ino, ranges: Vec<ByteRange>, what: CopyWork) -> Result<(), CopyError> {
        let mut line = self.line().await?;
        self.ask_on(&mut line, ino, ranges, what).await
    }

    async fn ask_on(
        &self,
        line: &mut Option<Line>,
        ino: Ino,
        ranges: Vec<ByteRange>,
        what: CopyWork,
    ) -> Result<(), CopyError> {
        let open = line.as_mut().ok_or(CopyError::Silent("not connected".into()))?;
        let asked = async {
            self.send(open, ino, ranges, what, &[]).await?;
            self.answer(open, 1).await
        };
        let done = asked.await;
        if done.is_err() {
            *line = None;
        }
        done
    }

    async fn send(
        &self,
        line: &mut Line,
        ino: Ino,
        ranges: Vec<ByteRange>,
        what: CopyWork,
        bytes: &[u8],
    ) -> Result<(), CopyError> {
        let id = line.next_id;
        line.next_id += 1;
        line.used = Instant::now();
        let mut frame = Vec::new();
        wire::put_copies(&mut frame, &Copies { id, set: self.set, ino, ranges, what });
        let sent = async {
            line.stream.write_all(&frame).await?;
            line.stream.write_all(bytes).await
        };
        self.in_time(sent).await
    }

    /// The answer to the oldest of `waiting` requests.
    async fn answer(&self, line: &mut Line, waiting: u64) -> Result<(), CopyError> {
        let mut trailer = [0; TRAILER_LEN];
        let read = async { line.stream.read_exact(&mut trailer).await };
        self.in_time(read).await?;
        let status = wire::decode_trailer(&trailer, line.next_id - waiting);
        match status.map_err(|e| CopyError::Silent(e.to_string()))? {
            Status::Ok => Ok(()),
            Status::NotHere => Err(CopyError::Refused(Errno::ESTALE)),
            Status::Errno(errno) => Err(CopyError::Refused(errno)),
            Status::Malformed => Err(CopyError::Refused(Errno::EPROTO)),
        }
    }

    async fn in_time(&self, work: impl Future<Output = io::Result<()>>) -> Result<(), CopyError> {
        match timeout(self.patience, work).await {
            Ok(done) => done.map_err(silent),
            Err(_) => Err(silent(io::ErrorKind::TimedOut.into())),
        }
    }

    /// A connection that nobody else uses, made when needed.
    async fn line(&self) -> Result<MutexGuard<'_, Option<Line>>, CopyError> {
        let free = self.lines.iter().find_map(|line| line.try_lock().ok().filter(|l| l.is_some()));
        let mut line = match free.or_else(|| self.lines.iter().find_map(|l| l.try_lock().ok())) {
            Some(line) => line,
            None => self.lines[self.next.fetch_add(1, Relaxed) % CONNECTIONS].lock().await,
        };
        if line.as_ref().is_none_or(|l| l.used.elapsed() > IDLE_MAX) {
            *line = None;
            let stream = timeout(self.patience, self.connect()).await;
            let stream = stream.map_err(|_| silent(io::ErrorKind::TimedOut.into()))??;
            *line = Some(Line { stream, used: Instant::now(), next_id: 0 });
        }
        Ok(line)
    }

    async fn connect(&self) -> Result<Channel, CopyError> {
        let token = self.token.as_deref();
        let stream = secure::connect(&self.address, Purpose::Peer, token, self.secure).await;
        let stream = stream.map_err(silent)?;
        let greeted = handshake::greet_server(&stream, token).await;
        greeted.map_err(|e| CopyError::Silent(e.to_string()))?;
        Ok(stream)
    }
}

/// Does what a request about copies asks for, where it may wait for the disk.
pub(crate) async fn work(source: &Arc<dyn ByteSource>, asked: Copies, bytes: Vec<u8>) -> Status {
    let source = Arc::clone(source);
    let done = tokio::task::spawn_blocking(move || match asked.what {
        CopyWork::Begin => source.begin_copies(asked.set),
        CopyWork::Drop => source.drop_copies(asked.set, asked.ino, &asked.ranges),
        what if what.payload().is_some_and(|(_, crc)| crc32c::crc32c(&bytes) != crc) => {
            Err(Errno::EPROTO)
        }
        CopyWork::Keep { .. } => source.keep_copies(asked.set, asked.ino, &asked.ranges, &bytes),
        CopyWork::AtSeat(work) => source.at_seat(asked.ino, work, &asked.ranges, &bytes),
    });
    match done.await {
        Ok(Ok(())) => Status::Ok,
        Ok(Err(errno)) => Status::Errno(errno),
        Err(_) => Status::Errno(Errno::EIO),
    }
}
