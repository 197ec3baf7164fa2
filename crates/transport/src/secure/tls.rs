//! One end of an encrypted connection without its socket: bytes that came in, bytes to send out,
//! and what they mean. Everything that parses what a stranger sent is in here.

use super::keys::{Keys, Purpose, SecureCells};
use bytes::{Buf, BufMut, BytesMut};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use std::fmt;
use std::sync::Arc;

/// The longest record on the wire.
pub(super) const RECORD_BYTES_MAX: usize = 5 + (16 << 10) + 256;

/// Room for what came in: one record at first, several when much comes.
const INCOMING_BYTES_MIN: usize = RECORD_BYTES_MAX;
const INCOMING_BYTES_MAX: usize = 4 * RECORD_BYTES_MAX;

/// Bytes that are encrypted in one go; bounds what waits for the socket.
pub(super) const SEAL_BYTES_MAX: usize = 64 << 10;

/// What a record adds: header, kind and tag.
const RECORD_OVERHEAD: usize = 5 + 1 + 16;

/// What the other end may send before it has proven itself. A hello and a finish are some 500 bytes.
const HANDSHAKE_BYTES_MAX: usize = 16 << 10;

/// One end.
pub struct Tls {
    session: Session,
    /// What came and is not decrypted: `incoming[start..end]`.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// What is encrypted and not sent: `outgoing[sent..]`.
    outgoing: Vec<u8>,
    sent: usize,
    /// What is decrypted and nobody has taken.
    plain: BytesMut,
    /// Bytes that came before the handshake was over.
    greeting_bytes: usize,
    open: bool,
    /// The other end has said that nothing follows.
    ended: bool,
    /// Something was wrong: nothing is done any more.
    broken: bool,
    cells: Arc<SecureCells>,
}

enum Session {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// What came of one step of the protocol.
enum Step {
    /// Another one can be made at once.
    Again,
    /// Nothing more can be done with what came.
    Waits,
    /// What was to be encrypted is.
    Sealed,
    /// The other end has said that nothing follows.
    Ended,
}

/// Where the result of a step goes.
struct Work<'a, B> {
    outgoing: &'a mut Vec<u8>,
    plain: &'a mut BytesMut,
    into: &'a mut B,
    seal: Option<&'a [u8]>,
    given: usize,
}

impl Tls {
    /// The end that connects.
    pub fn client(keys: &Keys, purpose: Purpose) -> Tls {
        // No name: who the server is is decided by its key alone.
        let name = ServerName::try_from("ebb").expect("a valid name");
        let session = UnbufferedClientConnection::new(keys.client(purpose), name)
            .expect("the configuration is complete");
        Tls::new(Session::Client(Box::new(session)), keys)
    }

    /// The end that is connected to.
    pub fn server(keys: &Keys, purpose: Purpose) -> Tls {
        let session = UnbufferedServerConnection::new(keys.server(purpose))
            .expect("the configuration is complete");
        Tls::new(Session::Server(Box::new(session)), keys)
    }

    fn new(session: Session, keys: &Keys) -> Tls {
        Tls {
            session,
            incoming: Vec::new(),
            start: 0,
            end: 0,
            outgoing: Vec::new(),
            sent: 0,
            plain: BytesMut::new(),
            greeting_bytes: 0,
            open: false,
            ended: false,
            broken: false,
            cells: keys.cells.clone(),
        }
    }

    /// Both ends have proven themselves.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Nothing follows.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Where bytes from the other end go; then [`Tls::received`]. Never empty.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.end == self.incoming.len() {
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            // It was filled to the end: more will come.
            let grown = (2 * self.incoming.len()).clamp(INCOMING_BYTES_MIN, INCOMING_BYTES_MAX);
            self.incoming.resize(grown, 0);
        }
        &mut self.incoming[self.end..]
    }

    /// `n` bytes were put there. What they hold goes to `into`, as far as there is room, or is kept:
    /// how many bytes went there.
    pub fn received(&mut self, n: usize, into: &mut impl BufMut) -> Result<usize, rustls::Error> {
        self.end += n;
        if !self.open {
            self.greeting_bytes += n;
        }
        self.work(None, into)
    }

    /// How much of what came is not decrypted yet: less than a record.
    pub fn undecrypted(&self) -> usize {
        self.end - self.start
    }

    /// Nothing has come for now.
    pub fn rest(&mut self) {
        if self.start == self.end && self.incoming.len() > INCOMING_BYTES_MIN {
            self.incoming = Vec::new();
        }
    }

    /// Moves what was kept to `into`, as far as there is room.
    pub fn take(&mut self, into: &mut impl BufMut) -> usize {
        let n = self.plain.len().min(into.remaining_mut());
        into.put_slice(&self.plain[..n]);
        self.plain.advance(n);
        n
    }

    /// Begins the handshake, or goes on with it.
    pub fn greet(&mut self) -> Result<(), rustls::Error> {
        self.work(None, &mut nothing()).map(drop)
    }

    /// Encrypts `bytes`, at most [`SEAL_BYTES_MAX`], behind what is to be sent.
    pub fn seal(&mut self, bytes: &[u8]) -> Result<(), rustls::Error> {
        debug_assert!(bytes.len() <= SEAL_BYTES_MAX, "what waits for a socket is bounded");
        SecureCells::add(&self.cells.sent_bytes, bytes.len());
        self.work(Some(bytes), &mut nothing()).map(drop)
    }

    /// Says that nothing follows.
    pub fn close(&mut self) {
        if self.broken {
            return;
        }
        let Tls { session, outgoing, incoming, .. } = self;
        // What came in part belongs to the state of the session.
        let came = &mut incoming[self.start..self.end];
        match session {
            Session::Client(c) => put_close(c.process_tls_records(came), outgoing),
            Session::Server(c) => put_close(c.process_tls_records(came), outgoing),
        }
    }

    /// What the socket shall send.
    pub fn unsent(&self) -> &[u8] {
        &self.outgoing[self.sent..]
    }

    /// It took `n` bytes of it.
    pub fn was_sent(&mut self, n: usize) {
        self.sent += n;
        if self.sent == self.outgoing.len() {
            self.outgoing.clear();
            self.sent = 0;
        }
    }

    fn work(
        &mut self,
        seal: Option<&[u8]>,
        into: &mut impl BufMut,
    ) -> Result<usize, rustls::Error> {
        if self.broken {
            return Err(rustls::Error::General("broken before".into()));
        }
        let worked = self.steps(seal, into);
        if worked.is_err() {
            self.broken = true;
            let cell = if self.open { &self.cells.broken } else { &self.cells.refused };
            SecureCells::add(cell, 1);
            self.put_alert();
        }
        let given = worked?;
        if !self.open && !self.is_handshaking() {
            self.open = true;
            SecureCells::add(&self.cells.handshakes, 1);
        }
        if !self.open && self.greeting_bytes > HANDSHAKE_BYTES_MAX {
            self.broken = true;
            return Err(rustls::Error::General("too long a handshake".into()));
        }
        Ok(given)
    }

    fn steps(
        &mut self,
        mut seal: Option<&[u8]>,
        into: &mut impl BufMut,
    ) -> Result<usize, rustls::Error> {
        let mut given = 0;
        loop {
            let kept = self.plain.len();
            let Tls { session, incoming, outgoing, plain, .. } = self;
            let came = &mut incoming[self.start..self.end];
            let mut work = Work { outgoing, plain, into, seal, given: 0 };
            let (discard, step) = match session {
                Session::Client(c) => work.step(c.process_tls_records(came)),
                Session::Server(c) => work.step(c.process_tls_records(came)),
            };
            let now = work.given;
            self.start += discard;
            given += now;
            SecureCells::add(&self.cells.received_bytes, now + self.plain.len() - kept);
            match step? {
                Step::Again => {}
                Step::Sealed => seal = None,
                Step::Ended => self.ended = true,
                Step::Waits if seal.is_some() => {
                    return Err(rustls::Error::HandshakeNotComplete);
                }
                Step::Waits => return Ok(given),
            }
        }
    }

    fn is_handshaking(&self) -> bool {
        match &self.session {
            Session::Client(c) => c.is_handshaking(),
            Session::Server(c) => c.is_handshaking(),
        }
    }

    /// After an error: what tells the other end why, if it is told.
    fn put_alert(&mut self) {
        let Tls { session, incoming, outgoing, plain, .. } = self;
        let came = &mut incoming[self.start..self.end];
        let mut work = Work { outgoing, plain, into: &mut nothing(), seal: None, given: 0 };
        let _ = match session {
            Session::Client(c) => work.step(c.process_tls_records(came)),
            Session::Server(c) => work.step(c.process_tls_records(came)),
        };
    }
}

impl<B: BufMut> Work<'_, B> {
    /// Does what the protocol is ready for: how many bytes of what came are used up, and what next.
    fn step<D>(
        &mut self,
        status: UnbufferedStatus<'_, '_, D>,
    ) -> (usize, Result<Step, rustls::Error>) {
        let UnbufferedStatus { mut discard, state } = status;
        let step = match state {
            Err(e) => Err(e),
            Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
                match traffic.next_record() {
                    None => break Ok(Step::Again),
                    Some(Err(e)) => break Err(e),
                    Some(Ok(record)) => {
                        discard += record.discard;
                        self.give(record.payload);
                    }
                }
            },
            Ok(ConnectionState::EncodeTlsData(mut data)) => {
                put(self.outgoing, 0, |out| match data.encode(out) {
                    Ok(n) => Ok(n),
                    Err(EncodeError::InsufficientSize(e)) => Err(e.required_size),
                    Err(EncodeError::AlreadyEncoded) => Ok(0),
                });
                Ok(Step::Again)
            }
            Ok(ConnectionState::TransmitTlsData(data)) => {
                // It is in the order of what goes out, which is as good as sent.
                data.done();
                Ok(Step::Again)
            }
            Ok(ConnectionState::WriteTraffic(mut traffic)) => match self.seal.take() {
                Some(bytes) => seal_into(self.outgoing, bytes, |b, out| traffic.encrypt(b, out)),
                None => Ok(Step::Waits),
            },
            Ok(ConnectionState::PeerClosed) => Ok(Step::Ended),
            Ok(ConnectionState::BlockedHandshake | ConnectionState::Closed) => Ok(Step::Waits),
            // Early data is not offered; others are of the future.
            Ok(_) => Err(rustls::Error::General("an unexpected state".into())),
        };
        (discard, step)
    }

    fn give(&mut self, payload: &[u8]) {
        // Whoever reads gets the bytes in their order.
        let room = if self.plain.is_empty() { self.into.remaining_mut() } else { 0 };
        let (now, later) = payload.split_at(payload.len().min(room));
        self.into.put_slice(now);
        self.plain.extend_from_slice(later);
        self.given += now.len();
    }
}

/// Where nothing goes.
pub(super) fn nothing() -> &'static mut [u8] {
    &mut []
}

fn seal_into(
    outgoing: &mut Vec<u8>,
    bytes: &[u8],
    mut encrypt: impl FnMut(&[u8], &mut [u8]) -> Result<usize, EncryptError>,
) -> Result<Step, rustls::Error> {
    let mut exhausted = false;
    let records = bytes.len() / (16 << 10) + 1;
    let room = bytes.len() + records * RECORD_OVERHEAD;
    put(outgoing, room, |out| match encrypt(bytes, out) {
        Ok(n) => Ok(n),
        Err(EncryptError::InsufficientSize(e)) => Err(e.required_size),
        Err(EncryptError::EncryptExhausted) => {
            exhausted = true;
            Ok(0)
        }
    });
    if exhausted { Err(rustls::Error::EncryptError) } else { Ok(Step::Sealed) }
}

/// Appends what `write` writes into `room` bytes; when they are too few it names how many it needs.
fn put(
    outgoing: &mut Vec<u8>,
    mut room: usize,
    mut write: impl FnMut(&mut [u8]) -> Result<usize, usize>,
) {
    let before = outgoing.len();
    loop {
        outgoing.resize(before + room, 0);
        match write(&mut outgoing[before..]) {
            Ok(n) => return outgoing.truncate(before + n),
            Err(needed) => room = needed.max(room + 1),
        }
    }
}

fn put_close<D>(status: UnbufferedStatus<'_, '_, D>, outgoing: &mut Vec<u8>) {
    if let Ok(ConnectionState::WriteTraffic(mut traffic)) = status.state {
        put(outgoing, RECORD_OVERHEAD + 2, |out| match traffic.queue_close_notify(out) {
            Err(EncryptError::InsufficientSize(e)) => Err(e.required_size),
            Ok(n) => Ok(n),
            Err(EncryptError::EncryptExhausted) => Ok(0),
        });
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("open", &self.open).finish_non_exhaustive()
    }
}
