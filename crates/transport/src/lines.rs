//! Work for peers, the asking end: a few connections to every peer, each with one request at a time, or
//! with the frames of one request ahead of their answers.
//!
//! * Every frame is answered; work is as good as its answers. Nothing is sent twice: an answer that does
//!   not come leaves open what the peer has done.
//! * Bounds: bytes and ranges of a frame, frames without an answer, the time of every step.

use crate::dial::Dialer;
use crate::peer::{WorkError, WorkRequest};
use crate::secure::Channel;
use crate::source::{CopySet, SeatWork, Work};
use crate::wire::{
    self, KEEP_BYTES_MAX, Order, Payload, RANGE_LEN, RANGES_MAX, REQUEST_LEN, Status, TRAILER_LEN,
};
use ebb_types::{ByteRange, Errno, Ino, NodeId, in_steps};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::timeout;

/// Connections to a peer: files are copied beside each other.
const CONNECTIONS: usize = 4;

/// Frames that are on their way before an answer is awaited.
const FRAMES_AHEAD: u64 = 4;

/// A connection that was not used for so long may be closed at the other end; well below
/// what servers allow.
const IDLE_MAX: Duration = Duration::from_secs(60);

fn silent(e: impl std::fmt::Display) -> WorkError {
    WorkError::Silent(e.to_string())
}

fn unreached(e: impl std::fmt::Display) -> WorkError {
    WorkError::Unreached(e.to_string())
}

struct Line {
    stream: Channel,
    used: Instant,
    next_id: u64,
}

/// The connections to one peer.
pub(crate) struct Lines {
    address: Arc<str>,
    dialer: Dialer,
    /// Of every step: to connect, to send a frame, to be answered.
    patience: Duration,
    lines: [Mutex<Option<Line>>; CONNECTIONS],
    next: AtomicUsize,
}

impl Lines {
    pub(crate) fn new(address: Arc<str>, dialer: Dialer, patience: Duration) -> Lines {
        let lines = std::array::from_fn(|_| Mutex::new(None));
        Lines { address, dialer, patience, lines, next: AtomicUsize::new(0) }
    }

    /// Makes sure that the peer answers, on a new connection if an old one is of no use any more.
    pub(crate) async fn reach(&self) -> Result<(), WorkError> {
        let look = WorkRequest {
            set: CopySet { owner: NodeId::NOBODY, epoch: 0 },
            ino: Ino(0),
            work: Work::AtSeat(SeatWork::Look),
            ranges: &[],
            read: &|_, _| Ok(()),
        };
        for last in [false, true] {
            match self.work(&look).await {
                // No such file sits there: it answers.
                Ok(()) | Err(WorkError::Refused(_)) => return Ok(()),
                Err(e) if last => return Err(e),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Has it done. When it fails with [`WorkError::Silent`] it may have been done.
    pub(crate) async fn work(&self, request: &WorkRequest<'_>) -> Result<(), WorkError> {
        let mut line = self.line().await?;
        if request.work == Work::AtSeat(SeatWork::Append) {
            // What must not be done twice: a connection that is broken is found out before it matters.
            let look = WorkRequest { work: Work::AtSeat(SeatWork::Look), ranges: &[], ..*request };
            self.work_on(&mut line, &look).await.map_err(|e| match e {
                WorkError::Silent(why) => WorkError::Unreached(why),
                other => other,
            })?;
        }
        self.work_on(&mut line, request).await
    }

    async fn work_on(
        &self,
        line: &mut Option<Line>,
        request: &WorkRequest<'_>,
    ) -> Result<(), WorkError> {
        let open = line.as_mut().ok_or_else(|| unreached("not connected"))?;
        let done = self.send_all(open, request).await;
        match &done {
            Ok(()) => {}
            Err(WorkError::Refused(_)) if request.ranges.is_empty() => {}
            // Answers that are still to come would be taken for those of others.
            Err(WorkError::Refused(_) | WorkError::Local(_)) => *line = None,
            // A peer that has begun again knows none of the connections.
            Err(WorkError::Silent(_) | WorkError::Unreached(_)) => {
                *line = None;
                for mut idle in self.lines.iter().filter_map(|l| l.try_lock().ok()) {
                    *idle = None;
                }
            }
        }
        done
    }

    async fn send_all(&self, line: &mut Line, request: &WorkRequest<'_>) -> Result<(), WorkError> {
        let mut waiting = 0u64;
        for part in parts(request) {
            let (bytes, payload) = read_part(request, &part)?;
            let id = line.next_id;
            line.next_id += 1;
            line.used = Instant::now();
            let order = Order {
                id,
                set: request.set,
                ino: request.ino,
                ranges: part,
                work: request.work,
                payload,
            };
            let mut frame = Vec::with_capacity(REQUEST_LEN + order.ranges.len() * RANGE_LEN);
            wire::put_order(&mut frame, &order);
            let sent = async {
                line.stream.write_all(&frame).await?;
                line.stream.write_all(&bytes).await
            };
            self.in_time(sent).await?;
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

    /// The answer to the oldest of `waiting` frames.
    async fn answer(&self, line: &mut Line, waiting: u64) -> Result<(), WorkError> {
        let mut trailer = [0; TRAILER_LEN];
        let read = async { line.stream.read_exact(&mut trailer).await };
        self.in_time(read).await?;
        match wire::decode_trailer(&trailer, line.next_id - waiting).map_err(silent)? {
            Status::Ok => Ok(()),
            Status::NotHere => Err(WorkError::Refused(Errno::ESTALE)),
            Status::Errno(errno) => Err(WorkError::Refused(errno)),
            Status::Malformed => Err(WorkError::Refused(Errno::EPROTO)),
        }
    }

    async fn in_time(&self, work: impl Future<Output = io::Result<()>>) -> Result<(), WorkError> {
        match timeout(self.patience, work).await {
            Ok(done) => done.map_err(silent),
            Err(_) => Err(silent(io::Error::from(io::ErrorKind::TimedOut))),
        }
    }

    /// A connection that nobody else uses, made when needed.
    async fn line(&self) -> Result<MutexGuard<'_, Option<Line>>, WorkError> {
        let free = self.lines.iter().find_map(|line| line.try_lock().ok().filter(|l| l.is_some()));
        let mut line = match free.or_else(|| self.lines.iter().find_map(|l| l.try_lock().ok())) {
            Some(line) => line,
            None => self.lines[self.next.fetch_add(1, Relaxed) % CONNECTIONS].lock().await,
        };
        if line.as_ref().is_none_or(|l| l.used.elapsed() > IDLE_MAX) {
            *line = None;
            let stream = match timeout(self.patience, self.connect()).await {
                Ok(stream) => stream?,
                Err(_) => return Err(self.unreached(&io::Error::from(io::ErrorKind::TimedOut))),
            };
            *line = Some(Line { stream, used: Instant::now(), next_id: 0 });
        }
        Ok(line)
    }

    async fn connect(&self) -> Result<Channel, WorkError> {
        self.dialer.dial(&self.address).await.map_err(|e| self.unreached(&e))
    }

    fn unreached(&self, e: &dyn std::fmt::Display) -> WorkError {
        WorkError::Unreached(format!("{}: {e}", self.address))
    }
}

/// The ranges of each frame. What brings no bytes has one frame for each so many ranges, and at least one.
fn parts(request: &WorkRequest<'_>) -> Vec<Vec<ByteRange>> {
    match request.work {
        work if work.brings_bytes() => in_steps(request.ranges, KEEP_BYTES_MAX, RANGES_MAX),
        _ if request.ranges.is_empty() => vec![Vec::new()],
        _ => request.ranges.chunks(RANGES_MAX).map(<[ByteRange]>::to_vec).collect(),
    }
}

fn read_part(
    request: &WorkRequest<'_>,
    part: &[ByteRange],
) -> Result<(Vec<u8>, Payload), WorkError> {
    if !request.work.brings_bytes() {
        return Ok((Vec::new(), Payload::default()));
    }
    let total: u64 = part.iter().map(|r| r.len()).sum();
    let mut bytes = vec![0; total as usize];
    let mut at = 0;
    for range in part {
        let end = at + range.len() as usize;
        (request.read)(*range, &mut bytes[at..end]).map_err(|e| WorkError::Local(e.into()))?;
        at = end;
    }
    let crc = crc32c::crc32c(&bytes);
    Ok((bytes, Payload { total, crc }))
}
