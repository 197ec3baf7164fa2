//! Lists of pieces, cut into requests. The table of `ebb_api_format::list` says which.

use crate::call::{ask, error, malformed, send};
use ebb_api_format::list::Builder;
use ebb_api_format::{
    BODY_MAX, BUFFER_MAX, HEAD, PiecesRead, Request, Span, Stored, WRITE_BYTES, encode_write,
    read_overhead,
};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes that are fetched before they are read, and pieces of one question about them.
const FETCH_BYTES: u64 = 4 << 20;
/// A piece has three bytes or more in a question, 20 at most.
const FETCH_LIST: usize = BODY_MAX - 64 - Builder::PIECE_BYTES;

/// A piece to be written.
#[derive(Clone, Copy, Debug)]
pub struct WritePiece<'a> {
    /// Where it goes.
    pub offset: u64,
    /// What it is.
    pub data: &'a [u8],
}

/// A piece to be read.
#[derive(Debug)]
pub struct ReadPiece<'a> {
    /// Where it is.
    pub offset: u64,
    /// Where it goes.
    pub buffer: &'a mut [u8],
    /// How much of it there is.
    pub got: usize,
}

/// Anything wrong with a piece is found before the first one is touched.
fn spans(pieces: impl Iterator<Item = (u64, usize)>) -> io::Result<Vec<Span>> {
    let span = |(offset, len)| Span::new(offset, len as u64).map_err(|_| error(libc::EINVAL));
    pieces.map(span).collect()
}

/// One request of a list that is written.
struct Frame {
    list: Builder,
    data: Vec<u8>,
}

impl Frame {
    fn new() -> Frame {
        Frame { list: Builder::default(), data: Vec::with_capacity(BUFFER_MAX) }
    }

    /// How many bytes of another piece have room.
    fn room(&self) -> usize {
        let used = WRITE_BYTES + self.list.len() + Builder::PIECE_BYTES + self.data.len();
        BUFFER_MAX.saturating_sub(used)
    }

    fn push(&mut self, offset: u64, data: &[u8]) {
        self.list.push(Span { offset, len: data.len() as u64 });
        self.data.extend_from_slice(data);
    }
}

/// What was written so far.
struct Progress<'a> {
    fd: BorrowedFd<'a>,
    around: Span,
    written: usize,
    /// Something waits to be published.
    owes: bool,
}

impl Progress<'_> {
    /// Sends a frame; `last`: with it what is owed is published. What stopped it.
    fn send(&mut self, frame: &Frame, last: bool) -> io::Result<()> {
        let publish = (last && self.owes).then_some(self.around);
        let bytes =
            encode_write(&frame.list, &frame.data, publish).ok_or_else(|| error(libc::E2BIG))?;
        let answer = send(self.fd, bytes, 0)?;
        let stored = Stored::decode(&answer, frame.data.len()).map_err(malformed)?;
        self.written += stored.bytes as usize;
        self.owes = stored.publish || self.owes && publish.is_none();
        if stored.errno == 0 { Ok(()) } else { Err(error(stored.errno as i32)) }
    }

    fn publish(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.owes) {
            ask(self.fd, &Request::Publish(self.around), 0)?;
        }
        Ok(())
    }
}

pub(crate) fn write_list(fd: BorrowedFd<'_>, pieces: &[WritePiece<'_>]) -> io::Result<usize> {
    // SAFETY: the descriptor is open.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // Where pieces go they say themselves.
    if flags & libc::O_APPEND != 0 {
        return Err(error(libc::EINVAL));
    }
    let around = Span::around(spans(pieces.iter().map(|p| (p.offset, p.data.len())))?);
    let mut progress = Progress { fd, around, written: 0, owes: false };
    let stopped = write_pieces(&mut progress, pieces);
    let published = progress.publish();
    match (stopped, published) {
        (_, Err(e)) => Err(e),
        (Err(e), Ok(())) if progress.written == 0 => Err(e),
        _ => Ok(progress.written),
    }
}

fn write_pieces(progress: &mut Progress<'_>, pieces: &[WritePiece<'_>]) -> io::Result<()> {
    let mut frame = Frame::new();
    for piece in pieces {
        let (mut offset, mut data) = (piece.offset, piece.data);
        while !data.is_empty() {
            if frame.room() == 0 {
                progress.send(&frame, false)?;
                frame = Frame::new();
            }
            let (now, rest) = data.split_at(data.len().min(frame.room()));
            frame.push(offset, now);
            (offset, data) = (offset + now.len() as u64, rest);
        }
    }
    progress.send(&frame, true)
}

/// How many of the pieces from `at` on are fetched together.
fn batch(spans: &[Span], at: usize) -> usize {
    let (mut list, mut bytes) = (Builder::default(), 0);
    for (n, span) in spans[at..].iter().enumerate() {
        bytes += span.len;
        list.push(*span);
        if n > 0 && (bytes > FETCH_BYTES || list.len() > FETCH_LIST) {
            return n;
        }
    }
    spans.len() - at
}

/// How many of the pieces from `at` on one answer has room for.
fn answered(spans: &[Span], at: usize) -> usize {
    let (mut list, mut bytes) = (Builder::default(), 0);
    for (n, span) in spans[at..].iter().enumerate() {
        bytes += span.len as usize;
        list.push(*span);
        let question = HEAD + 16 + list.len();
        if question > BUFFER_MAX || bytes + read_overhead(n + 1) > BUFFER_MAX {
            return n;
        }
    }
    spans.len() - at
}

/// Pieces that are longer than an answer, in parts; which piece each part is of.
fn parts_of(spans: &[Span]) -> (Vec<Span>, Vec<usize>) {
    const PART: u64 = (BUFFER_MAX - 64) as u64;
    let (mut parts, mut of) = (Vec::with_capacity(spans.len()), Vec::with_capacity(spans.len()));
    for (n, span) in spans.iter().enumerate() {
        let mut at = span.offset;
        while at < span.end() {
            let len = PART.min(span.end() - at);
            parts.push(Span { offset: at, len });
            of.push(n);
            at += len;
        }
    }
    (parts, of)
}

pub(crate) fn read_list(fd: BorrowedFd<'_>, pieces: &mut [ReadPiece<'_>]) -> io::Result<usize> {
    let whole = spans(pieces.iter().map(|p| (p.offset, p.buffer.len())))?;
    pieces.iter_mut().for_each(|p| p.got = 0);
    let (parts, of) = parts_of(&whole);
    let mut ask_first = Some(Span::around(whole.iter().copied()));
    let (mut at, mut fetched) = (0, 0);
    let mut total = 0;
    while at < parts.len() {
        let n = answered(&parts, at).max(1);
        if at >= fetched && at + n < parts.len() {
            let n = batch(&parts, at);
            let pieces = parts[at..at + n].to_vec();
            ask(fd, &Request::Fetch { pieces, ask: ask_first.take() }, 0)?;
            fetched = at + n;
        }
        let these = &parts[at..at + n];
        let room = these.iter().map(|p| p.len as usize).sum::<usize>() + read_overhead(n);
        let request = Request::Read { pieces: these.to_vec(), ask: ask_first.take() };
        let answer = ask(fd, &request, room)?;
        let found = PiecesRead::decode(&answer, these).map_err(malformed)?;
        for ((part, bytes), n) in these.iter().zip(found).zip(&of[at..]) {
            let piece = &mut pieces[*n];
            let from = (part.offset - piece.offset) as usize;
            // After the end of the file there is nothing, or it has grown meanwhile.
            if from == piece.got {
                piece.buffer[from..from + bytes.len()].copy_from_slice(bytes);
                piece.got += bytes.len();
                total += bytes.len();
            }
        }
        at += n;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_pieces() {
        let spans = [
            Span { offset: 7, len: 100_000 },
            Span { offset: 3, len: 0 },
            Span { offset: 1, len: 9 },
        ];
        let (parts, of) = parts_of(&spans);
        for (n, span) in spans.iter().enumerate() {
            let mine: Vec<_> =
                parts.iter().zip(&of).filter(|(_, o)| **o == n).map(|(p, _)| p).collect();
            assert_eq!(mine.iter().map(|p| p.len).sum::<u64>(), span.len);
            assert!(mine.windows(2).all(|w| w[0].end() == w[1].offset));
            assert!(mine.first().is_none_or(|p| p.offset == span.offset));
        }
        assert!(parts.iter().all(|p| p.len as usize + read_overhead(1) <= BUFFER_MAX));
    }

    /// However the pieces are, a request of so many of them can be sent and answered.
    #[test]
    fn what_goes_together_fits() {
        let far: Vec<Span> =
            (0..5000_u64).map(|n| Span { offset: (n * 7919 % 5000) << 40, len: n % 130 }).collect();
        let mut at = 0;
        while at < far.len() {
            let n = answered(&far, at);
            let pieces = far[at..at + n].to_vec();
            let ask = Some(Span { offset: 0, len: 1 << 50 });
            assert!(n > 0 && Request::Read { pieces: pieces.clone(), ask }.encode().is_some());
            assert!(ebb_api_format::fits(&pieces, BUFFER_MAX));
            let n = batch(&far, at);
            let pieces = far[at..at + n].to_vec();
            assert!(n > 0 && Request::Fetch { pieces, ask }.encode().is_some());
            at += answered(&far, at);
        }
        let mut frame = Frame::new();
        let mut n = 0;
        while frame.room() > 0 {
            n += 1;
            frame.push((n * 7919 % 5000) << 40, &[1; 100][..frame.room().min(100)]);
        }
        let publish = Some(Span { offset: 0, len: 1 });
        assert!(encode_write(&frame.list, &frame.data, publish).is_some() && n > 100);
    }
}
