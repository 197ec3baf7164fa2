//! Requests.

use crate::bytes::{Reader, put_span};
use crate::list::{self, Builder};
use crate::{BODY_MAX, BUFFER_MAX, FETCH_MAX, HEAD, Malformed, Span};

const VERSION: u8 = 1;

/// Which bytes of a file a primitive is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All that there are.
    File,
    /// These.
    Range(Span),
}

/// What may be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// How long it is, and what of it is only here.
    Stat,
    /// Publish what was written here.
    Attach(Which),
    /// Who owns what.
    Query(Which),
    /// Give up what was attached here.
    Detach(Which),
    /// Copy what was written here to the backing.
    Flush(Which),
    /// The bytes as that node has them; 0: as the backing does.
    ReadFrom {
        /// Which.
        span: Span,
        /// Whose.
        owner: u32,
    },
    /// Store pieces; where they meet, a later one counts.
    Write {
        /// Where.
        pieces: Vec<Span>,
        /// Their bytes, one after the other.
        data: &'a [u8],
        /// They are the last ones of a list: now happens what the model says of a write of these bytes.
        publish: Option<Span>,
    },
    /// Read pieces.
    Read {
        /// Which.
        pieces: Vec<Span>,
        /// First happens what the model says of a read of these bytes.
        ask: Option<Span>,
    },
    /// Bring pieces here that are elsewhere; they are going to be read.
    Fetch {
        /// Which.
        pieces: Vec<Span>,
        /// As above.
        ask: Option<Span>,
    },
    /// The rest of a list is not written: now happens what the model says of a write of these bytes.
    Publish(Span),
    /// A handle of the file.
    Handle,
    /// Of a coupled file: this open is one of so many producers, or consumers; 0: of as many as are known.
    Join(u32),
    /// Of a coupled file: this open came to nothing. A file that it was to write is lost.
    Fail,
    /// Of a coupled file: this open has neither read nor written.
    Withdraw,
    /// Of a coupled file: this open is through with it; what it wrote is published.
    Done,
    /// Of a coupled directory: wait until there is a file of that name, and it can be read.
    Await(&'a [u8]),
}

const WHOLE: u16 = 1;
const WITH_SPAN: u16 = 2;

/// Operation, flags and body of a request that is going to be encoded.
struct Parts {
    operation: u8,
    flags: u16,
    body: Vec<u8>,
}

impl Parts {
    fn new(operation: u8) -> Parts {
        Parts { operation, flags: 0, body: Vec::new() }
    }

    fn which(operation: u8, which: Which) -> Parts {
        match which {
            Which::File => Parts { flags: WHOLE, ..Parts::new(operation) },
            Which::Range(span) => Parts::new(operation).span(span),
        }
    }

    fn span(mut self, span: Span) -> Parts {
        put_span(&mut self.body, span);
        self
    }

    fn maybe(self, span: Option<Span>) -> Parts {
        match span {
            Some(span) => Parts { flags: WITH_SPAN, ..self }.span(span),
            None => self,
        }
    }

    fn list(mut self, list: &Builder) -> Parts {
        list.put(&mut self.body);
        self
    }

    /// None when it does not fit.
    fn encoded(self) -> Option<Vec<u8>> {
        let Parts { operation, flags, body } = self;
        let mut bytes = vec![VERSION, operation];
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        (bytes.len() <= BUFFER_MAX).then_some(bytes)
    }
}

impl<'a> Request<'a> {
    /// As bytes; `None` when it is too long for one request.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        match self {
            Request::Write { pieces, data, publish } => {
                return encode_write(&list::of(pieces), data, *publish);
            }
            Request::Stat => Parts::new(1),
            Request::Attach(which) => Parts::which(2, *which),
            Request::Query(which) => Parts::which(3, *which),
            Request::Detach(which) => Parts::which(4, *which),
            Request::Flush(which) => Parts::which(5, *which),
            Request::ReadFrom { span, owner } => {
                let mut parts = Parts::new(6).span(*span);
                parts.body.extend_from_slice(&owner.to_le_bytes());
                parts
            }
            Request::Read { pieces, ask } => Parts::new(8).maybe(*ask).list(&list::of(pieces)),
            Request::Fetch { pieces, ask } => Parts::new(9).maybe(*ask).list(&list::of(pieces)),
            Request::Publish(span) => Parts::new(10).span(*span),
            Request::Handle => Parts::new(11),
            Request::Join(of) => {
                let mut parts = Parts::new(12);
                parts.body.extend_from_slice(&of.to_le_bytes());
                parts
            }
            Request::Fail => Parts::new(13),
            Request::Done => Parts::new(15),
            Request::Withdraw => Parts::new(16),
            Request::Await(name) => Parts { body: name.to_vec(), ..Parts::new(14) },
        }
        .encoded()
    }

    /// What a buffer asks. What is behind the request in it does not count.
    ///
    /// # Errors
    /// When it is not a request, with everything in it that it should have and nothing more.
    pub fn decode(buffer: &'a [u8]) -> Result<Request<'a>, Malformed> {
        let mut head = Reader(buffer);
        if head.byte()? != VERSION {
            return Err(Malformed);
        }
        let (operation, flags, len) = (head.byte()?, head.u16()?, head.u32()? as usize);
        let mut body = Reader(head.take(len)?);
        let from = &mut body;
        let allowed = match operation {
            2..=5 => WHOLE,
            7..=9 => WITH_SPAN,
            _ => 0,
        };
        if flags & !allowed != 0 {
            return Err(Malformed);
        }
        let which = |from: &mut Reader<'_>| match flags {
            0 => from.span().map(Which::Range),
            _ => Ok(Which::File),
        };
        let maybe = |from: &mut Reader<'_>| match flags {
            0 => Ok(None),
            _ => from.span().map(Some),
        };
        let request = match operation {
            1 => Request::Stat,
            2 => Request::Attach(which(from)?),
            3 => Request::Query(which(from)?),
            4 => Request::Detach(which(from)?),
            5 => Request::Flush(which(from)?),
            6 => Request::ReadFrom { span: from.span()?, owner: from.u32()? },
            7 => {
                let (publish, pieces) = (maybe(from)?, list::take(from)?);
                let data = from.take(from.0.len())?;
                if list::total(&pieces)? != data.len() as u64 {
                    return Err(Malformed);
                }
                Request::Write { pieces, data, publish }
            }
            8 => Request::Read { ask: maybe(from)?, pieces: bounded(from, BODY_MAX as u64)? },
            9 => Request::Fetch { ask: maybe(from)?, pieces: bounded(from, FETCH_MAX)? },
            10 => Request::Publish(from.span()?),
            11 => Request::Handle,
            12 => Request::Join(from.u32()?),
            13 => Request::Fail,
            14 => Request::Await(from.take(from.0.len())?),
            15 => Request::Done,
            16 => Request::Withdraw,
            _ => return Err(Malformed),
        };
        body.end()?;
        Ok(request)
    }
}

/// A list whose pieces have no more bytes than that together.
fn bounded(from: &mut Reader<'_>, most: u64) -> Result<Vec<Span>, Malformed> {
    let pieces = list::take(from)?;
    if list::total(&pieces)? <= most { Ok(pieces) } else { Err(Malformed) }
}

/// A request to store the pieces of a list.
#[must_use]
pub fn encode_write(list: &Builder, data: &[u8], publish: Option<Span>) -> Option<Vec<u8>> {
    let mut parts = Parts::new(7).maybe(publish).list(list);
    parts.body.extend_from_slice(data);
    parts.encoded()
}

/// Bytes of a [`Request::Write`] besides its list and its data.
pub const WRITE_BYTES: usize = HEAD + 16;
