//! The frames of the TCP transport: pure encoding and checked decoding. All numbers are
//! little-endian.
//!
//! ```text
//! request   magic u32 | kind u16 | count u16 | id u64 | ino u64 | total u64 | [since u64] | [landing] | count x (start u64, len u64)
//! reply     magic u32 | status u8 | flags u8 | errno u16 | id u64 | len u64 | len bytes | trailer, when len > 0
//! trailer   magic u32 | status u8 | 0 u8     | errno u16 | id u64
//! meet      a request alone; answered by a trailer, and when that says Ok by a meeting (`rdma`)
//! order     a request without since, then owner u32 | CRC32C of the bytes u32 | epoch u64, then the ranges, then total bytes
//! ```
//!
//! A read over RDMA can have a landing (address u64 | key u32 | 0 u32) into which the bytes are written before the reply
//! is sent; of the reply then only head and trailer come.
//!
//! A request for copies since a version has `since`; one for the copies that are held for
//! another node has owner, 0 and epoch there. An order is about copies that a partner keeps (begin,
//! keep, drop), or to be done to a file that sits at the peer: owner and epoch are 0 there. It is answered by a
//! trailer alone. Replies come in the order of the requests. Only the trailer tells whether the bytes before it
//! are good: a file that was cut while it was sent is filled up to `len` and then disowned.

use crate::source::{CopySet, SeatWork, Subject, Work};
use ebb_rdma::Place;
use ebb_types::{ByteRange, Errno, Ino, NodeId, Version};

/// Version of the protocol, in both greetings.
pub const VERSION: u16 = 1;
/// Most ranges of one request; bounds what an unfinished request can occupy.
pub const RANGES_MAX: usize = 1024;
/// Most bytes of one reply.
pub const REPLY_BYTES_MAX: u64 = crate::peer::READ_BYTES_MAX;

/// Length of a request without its ranges.
pub const REQUEST_LEN: usize = 32;
/// Length of one range.
pub const RANGE_LEN: usize = 16;
/// Length of a reply without its bytes.
pub const REPLY_LEN: usize = 24;
/// Length of what follows the bytes of a reply.
pub const TRAILER_LEN: usize = 16;

const REQUEST_MAGIC: u32 = u32::from_le_bytes(*b"EbRq");
const REPLY_MAGIC: u32 = u32::from_le_bytes(*b"EbRp");
const TRAILER_MAGIC: u32 = u32::from_le_bytes(*b"EbEn");

const KIND_READ: u16 = 1;
const KIND_RECEIVED: u16 = 2;
const KIND_READ_COPY: u16 = 3;
const KIND_READ_HELD: u16 = 4;
const KIND_BEGIN: u16 = 5;
const KIND_KEEP: u16 = 6;
const KIND_DROP: u16 = 7;
const KIND_SEAT_LOOK: u16 = 8;
const KIND_SEAT_WRITE: u16 = 9;
const KIND_SEAT_APPEND: u16 = 10;
const KIND_SEAT_CUT: u16 = 11;
const KIND_SEAT_SYNC: u16 = 12;
const KIND_SEAT_GROW: u16 = 13;
const KIND_MEET: u16 = 14;
const KIND_LAST: u16 = KIND_MEET;
/// Beside the kind of a read: it has a landing.
const LANDING: u16 = 0x100;
const LANDING_LEN: usize = 16;
const SINCE_LEN: usize = 8;
const SET_LEN: usize = 16;
/// Most bytes of one frame of copies.
pub const KEEP_BYTES_MAX: u64 = 1 << 20;
const FLAG_HELD: u8 = 1;
const FLAG_PLACED: u8 = 2;

/// What makes a frame unusable. The connection that carried it is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not this protocol, or out of step.
    #[error("bad magic number")]
    Magic,
    /// A value that this version does not define.
    #[error("undefined {0}")]
    Undefined(&'static str),
    /// A length or offset beyond what is allowed, or one that disagrees with another.
    #[error("bad {0}")]
    Bound(&'static str),
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The bytes are good.
    Ok,
    /// The bytes are not here (any more).
    NotHere,
    /// Reading them failed.
    Errno(Errno),
    /// The request was not understood; the connection ends.
    Malformed,
}

impl Status {
    fn to_wire(self) -> (u8, u16) {
        match self {
            Status::Ok => (0, 0),
            Status::NotHere => (1, 0),
            Status::Errno(Errno(n)) => (2, u16::try_from(n).unwrap_or(libc::EIO as u16)),
            Status::Malformed => (3, 0),
        }
    }

    fn from_wire(status: u8, errno: u16) -> Result<Status, FrameError> {
        match (status, errno) {
            (0, 0) => Ok(Status::Ok),
            (1, 0) => Ok(Status::NotHere),
            // 4095 is the largest errno that Linux can return.
            (2, 1..=4095) => Ok(Status::Errno(Errno(i32::from(errno)))),
            (3, 0) => Ok(Status::Malformed),
            _ => Err(FrameError::Undefined("status")),
        }
    }
}

/// What a client sends after the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Send these bytes.
    Read {
        /// Chosen by the client; comes back in the reply.
        id: u64,
        /// The file, and on which terms.
        subject: Subject,
        /// Not empty, each within the largest file offset.
        ranges: Vec<ByteRange>,
        /// Their bytes together, at most [`REPLY_BYTES_MAX`].
        total: u64,
        /// Where they shall be written.
        landing: Option<Place>,
    },
    /// Where is this node reached over RDMA?
    Meet {
        /// Comes back in the trailer.
        id: u64,
    },
    /// The bytes of a reply with `held` have arrived.
    Received {
        /// Of that reply.
        id: u64,
    },
    /// Do something with copies, or with a file that sits here.
    Order(Order),
}

/// What a node wants done by a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Chosen by the client; comes back in the trailer.
    pub id: u64,
    /// Which copies; of nobody for what is not about copies.
    pub set: CopySet,
    /// The file; 0 when there are no ranges.
    pub ino: Ino,
    /// What of it.
    pub ranges: Vec<ByteRange>,
    /// What to do.
    pub work: Work,
    /// The bytes that follow; nothing unless the work [brings bytes](Work::brings_bytes).
    pub payload: Payload,
}

/// What is known beforehand of bytes that follow a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// How many, at most [`KEEP_BYTES_MAX`].
    pub total: u64,
    /// Their CRC32C.
    pub crc: u32,
}

/// How many ranges an order has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Count {
    None,
    One,
    Some,
    Any,
}

impl Count {
    fn allows(self, count: usize) -> bool {
        match self {
            Count::None => count == 0,
            Count::One => count == 1,
            Count::Some => count > 0,
            Count::Any => true,
        }
    }
}

/// All that can be ordered.
const WORKS: [Work; 9] = [
    Work::BeginCopies,
    Work::Keep,
    Work::Drop,
    Work::AtSeat(SeatWork::Look),
    Work::AtSeat(SeatWork::Write),
    Work::AtSeat(SeatWork::Append),
    Work::AtSeat(SeatWork::Cut),
    Work::AtSeat(SeatWork::Sync),
    Work::AtSeat(SeatWork::Grow),
];

/// The kind of request that orders it, and how many ranges that has.
fn form_of(work: Work) -> (u16, Count) {
    match work {
        Work::BeginCopies => (KIND_BEGIN, Count::None),
        Work::Keep => (KIND_KEEP, Count::Some),
        Work::Drop => (KIND_DROP, Count::Any),
        Work::AtSeat(SeatWork::Look) => (KIND_SEAT_LOOK, Count::None),
        Work::AtSeat(SeatWork::Write) => (KIND_SEAT_WRITE, Count::Some),
        Work::AtSeat(SeatWork::Append) => (KIND_SEAT_APPEND, Count::One),
        Work::AtSeat(SeatWork::Cut) => (KIND_SEAT_CUT, Count::One),
        Work::AtSeat(SeatWork::Sync) => (KIND_SEAT_SYNC, Count::None),
        Work::AtSeat(SeatWork::Grow) => (KIND_SEAT_GROW, Count::One),
    }
}

fn work_of(kind: u16) -> Option<Work> {
    WORKS.into_iter().find(|work| form_of(*work).0 == kind)
}

/// A reply without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// [`Status::Ok`] when bytes follow.
    pub status: Status,
    /// The server wants to hear when the bytes have arrived.
    pub held: bool,
    /// The bytes are in the landing already and do not follow.
    pub placed: bool,
    /// Of the request.
    pub id: u64,
    /// How many bytes follow; 0 unless `status` is Ok.
    pub len: u64,
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

fn put_request(out: &mut Vec<u8>, kind: u16, count: u16, id: u64, ino: u64, total: u64) {
    out.extend_from_slice(&REQUEST_MAGIC.to_le_bytes());
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&count.to_le_bytes());
    for n in [id, ino, total] {
        out.extend_from_slice(&n.to_le_bytes());
    }
}

/// Appends a read request. The caller keeps to the bounds (asserted: it is our own mistake).
pub fn put_read(out: &mut Vec<u8>, id: u64, subject: impl Into<Subject>, ranges: &[ByteRange]) {
    put_read_to(out, id, subject, ranges, None);
}

/// The same, with a landing for the bytes.
pub fn put_read_to(
    out: &mut Vec<u8>,
    id: u64,
    subject: impl Into<Subject>,
    ranges: &[ByteRange],
    landing: Option<Place>,
) {
    let Subject { ino, copy_since, held } = subject.into();
    assert!(!ranges.is_empty() && ranges.len() <= RANGES_MAX, "split before sending");
    let total = ranges.iter().map(|r| r.len()).sum();
    let kind = match (copy_since, held) {
        (_, Some(_)) => KIND_READ_HELD,
        (Some(_), None) => KIND_READ_COPY,
        (None, None) => KIND_READ,
    };
    let kind = if landing.is_some() { kind | LANDING } else { kind };
    put_request(out, kind, ranges.len() as u16, id, ino.0, total);
    match (copy_since, held) {
        (_, Some(set)) => put_set(out, set, 0),
        (Some(since), None) => out.extend_from_slice(&since.0.to_le_bytes()),
        (None, None) => {}
    }
    if let Some(Place { address, key }) = landing {
        out.extend_from_slice(&address.to_le_bytes());
        out.extend_from_slice(&u64::from(key).to_le_bytes());
    }
    put_ranges(out, ranges);
}

fn put_ranges(out: &mut Vec<u8>, ranges: &[ByteRange]) {
    for range in ranges {
        out.extend_from_slice(&range.start().to_le_bytes());
        out.extend_from_slice(&range.len().to_le_bytes());
    }
}

fn put_set(out: &mut Vec<u8>, set: CopySet, crc: u32) {
    out.extend_from_slice(&set.owner.0.to_le_bytes());
    out.extend_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(&set.epoch.to_le_bytes());
}

/// Appends an order, without the bytes that follow it.
pub fn put_order(out: &mut Vec<u8>, order: &Order) {
    let Order { id, set, ino, ref ranges, work, payload } = *order;
    assert!(ranges.len() <= RANGES_MAX, "split before sending");
    put_request(out, form_of(work).0, ranges.len() as u16, id, ino.0, payload.total);
    put_set(out, set, payload.crc);
    put_ranges(out, ranges);
}

/// Appends the word that a held reply has arrived.
pub fn put_received(out: &mut Vec<u8>, id: u64) {
    put_request(out, KIND_RECEIVED, 0, id, 0, 0);
}

/// Appends the question where the node is reached over RDMA.
pub fn put_meet(out: &mut Vec<u8>, id: u64) {
    put_request(out, KIND_MEET, 0, id, 0, 0);
}

/// Takes one request from the front of `bytes`: the request and its length, or `None` while it
/// is not whole yet.
pub fn take_request(bytes: &[u8]) -> Result<Option<(Request, usize)>, FrameError> {
    // A wrong beginning is refused without waiting for the rest.
    if bytes.len() >= 4 && u32_at(bytes, 0) != REQUEST_MAGIC {
        return Err(FrameError::Magic);
    }
    if bytes.len() < REQUEST_LEN {
        return Ok(None);
    }
    let (kind, count) = (u16_at(bytes, 4), usize::from(u16_at(bytes, 6)));
    let (kind, landing) = match kind & LANDING {
        0 => (kind, false),
        _ => (kind & !LANDING, true),
    };
    if landing && !matches!(kind, KIND_READ | KIND_READ_COPY | KIND_READ_HELD) {
        return Err(FrameError::Undefined("request"));
    }
    let (id, ino, total) = (u64_at(bytes, 8), u64_at(bytes, 16), u64_at(bytes, 24));
    match kind {
        KIND_RECEIVED if count == 0 && ino == 0 && total == 0 => {
            Ok(Some((Request::Received { id }, REQUEST_LEN)))
        }
        KIND_MEET if count == 0 && ino == 0 && total == 0 => {
            Ok(Some((Request::Meet { id }, REQUEST_LEN)))
        }
        KIND_READ..=KIND_LAST if kind != KIND_RECEIVED && count > RANGES_MAX => {
            Err(FrameError::Bound("range count"))
        }
        KIND_READ | KIND_READ_COPY | KIND_READ_HELD if count == 0 => {
            Err(FrameError::Bound("range count"))
        }
        KIND_READ..=KIND_LAST if total > most_bytes(kind) => Err(FrameError::Bound("total")),
        KIND_READ | KIND_READ_COPY | KIND_READ_HELD => {
            let (is_copy, is_held) = (kind == KIND_READ_COPY, kind == KIND_READ_HELD);
            let more = usize::from(is_copy) * SINCE_LEN + usize::from(is_held) * SET_LEN;
            let place = REQUEST_LEN + more;
            let start = place + usize::from(landing) * LANDING_LEN;
            let len = start + count * RANGE_LEN;
            let Some(list) = bytes.get(start..len) else { return Ok(None) };
            let ranges = take_ranges(list, total)?;
            let landing = landing.then(|| take_landing(&bytes[place..])).transpose()?;
            let copy_since = is_copy.then(|| Version(u64_at(bytes, REQUEST_LEN)));
            let held = is_held.then(|| take_set(bytes).0);
            let subject = Subject { ino: Ino(ino), copy_since, held };
            Ok(Some((Request::Read { id, subject, ranges, total, landing }, len)))
        }
        _ => match work_of(kind) {
            Some(work) if !form_of(work).1.allows(count) => Err(FrameError::Bound("range count")),
            Some(work) => take_order(bytes, work, count),
            None => Err(FrameError::Undefined("request")),
        },
    }
}

fn take_landing(bytes: &[u8]) -> Result<Place, FrameError> {
    let key = u32::try_from(u64_at(bytes, 8)).map_err(|_| FrameError::Bound("landing"))?;
    Ok(Place { address: u64_at(bytes, 0), key })
}

/// An order whose kind and number of ranges are right.
fn take_order(
    bytes: &[u8],
    work: Work,
    count: usize,
) -> Result<Option<(Request, usize)>, FrameError> {
    let start = REQUEST_LEN + SET_LEN;
    let len = start + count * RANGE_LEN;
    let Some(list) = bytes.get(start..len) else { return Ok(None) };
    let (id, ino, total) = (u64_at(bytes, 8), Ino(u64_at(bytes, 16)), u64_at(bytes, 24));
    let (set, crc) = take_set(bytes);
    let (ranges, payload) = match work.brings_bytes() {
        true => (take_ranges(list, total)?, Payload { total, crc }),
        false => (take_any_ranges(list)?, Payload::default()),
    };
    Ok(Some((Request::Order(Order { id, set, ino, ranges, work, payload }), len)))
}

/// Most bytes that a request asks for or brings.
fn most_bytes(kind: u16) -> u64 {
    match kind {
        KIND_READ | KIND_READ_COPY | KIND_READ_HELD => REPLY_BYTES_MAX,
        _ => work_of(kind).filter(|work| work.brings_bytes()).map_or(0, |_| KEEP_BYTES_MAX),
    }
}

/// Owner, epoch and checksum behind the head of a request that is long enough for them.
fn take_set(bytes: &[u8]) -> (CopySet, u32) {
    let owner = NodeId(u32_at(bytes, REQUEST_LEN));
    let crc = u32_at(bytes, REQUEST_LEN + 4);
    (CopySet { owner, epoch: u64_at(bytes, REQUEST_LEN + 8) }, crc)
}

/// Ranges whose bytes do not travel: each within the largest offset, however long together.
fn take_any_ranges(list: &[u8]) -> Result<Vec<ByteRange>, FrameError> {
    let one = |entry: &[u8]| {
        let (start, len) = (u64_at(entry, 0), u64_at(entry, 8));
        let end = start.checked_add(len).filter(|end| *end <= i64::MAX as u64);
        end.map(|end| ByteRange::new(start, end)).ok_or(FrameError::Bound("range"))
    };
    list.chunks_exact(RANGE_LEN).map(one).collect()
}

fn take_ranges(list: &[u8], total: u64) -> Result<Vec<ByteRange>, FrameError> {
    let mut sum = 0u64;
    let mut ranges = Vec::with_capacity(list.len() / RANGE_LEN);
    for entry in list.chunks_exact(RANGE_LEN) {
        let (start, len) = (u64_at(entry, 0), u64_at(entry, 8));
        let end = start.checked_add(len).filter(|end| *end <= i64::MAX as u64);
        let end = end.ok_or(FrameError::Bound("range"))?;
        sum = sum.checked_add(len).filter(|s| *s <= total).ok_or(FrameError::Bound("total"))?;
        if len == 0 {
            return Err(FrameError::Bound("range"));
        }
        ranges.push(ByteRange::new(start, end));
    }
    if sum == total { Ok(ranges) } else { Err(FrameError::Bound("total")) }
}

/// A reply's bytes on the wire.
#[must_use]
pub fn encode_reply(reply: &Reply) -> [u8; REPLY_LEN] {
    let mut out = [0; REPLY_LEN];
    let (status, errno) = reply.status.to_wire();
    out[..4].copy_from_slice(&REPLY_MAGIC.to_le_bytes());
    out[4] = status;
    out[5] = match (reply.held, reply.placed) {
        (true, _) => FLAG_HELD,
        (false, true) => FLAG_PLACED,
        (false, false) => 0,
    };
    out[6..8].copy_from_slice(&errno.to_le_bytes());
    out[8..16].copy_from_slice(&reply.id.to_le_bytes());
    out[16..].copy_from_slice(&reply.len.to_le_bytes());
    out
}

/// Checks and reads a reply.
pub fn decode_reply(bytes: &[u8; REPLY_LEN]) -> Result<Reply, FrameError> {
    if u32_at(bytes, 0) != REPLY_MAGIC {
        return Err(FrameError::Magic);
    }
    let status = Status::from_wire(bytes[4], u16_at(bytes, 6))?;
    let (held, placed) = match bytes[5] {
        0 => (false, false),
        FLAG_HELD => (true, false),
        FLAG_PLACED => (false, true),
        _ => return Err(FrameError::Undefined("flag")),
    };
    let reply = Reply { status, held, placed, id: u64_at(bytes, 8), len: u64_at(bytes, 16) };
    if reply.len > REPLY_BYTES_MAX || (reply.len > 0) != (status == Status::Ok) {
        return Err(FrameError::Bound("reply length"));
    }
    Ok(reply)
}

/// The trailer that ends the bytes of reply `id`.
#[must_use]
pub fn encode_trailer(id: u64, status: Status) -> [u8; TRAILER_LEN] {
    let mut out = [0; TRAILER_LEN];
    let (code, errno) = status.to_wire();
    out[..4].copy_from_slice(&TRAILER_MAGIC.to_le_bytes());
    out[4] = code;
    out[6..8].copy_from_slice(&errno.to_le_bytes());
    out[8..].copy_from_slice(&id.to_le_bytes());
    out
}

/// Checks and reads the trailer of reply `id`.
pub fn decode_trailer(bytes: &[u8; TRAILER_LEN], id: u64) -> Result<Status, FrameError> {
    if u32_at(bytes, 0) != TRAILER_MAGIC {
        return Err(FrameError::Magic);
    }
    if bytes[5] != 0 || u64_at(bytes, 8) != id {
        return Err(FrameError::Bound("trailer"));
    }
    Status::from_wire(bytes[4], u16_at(bytes, 6))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges() -> impl Strategy<Value = Vec<ByteRange>> {
        let one = (0..1u64 << 62, 1..1u64 << 14).prop_map(|(s, l)| ByteRange::at(s, l));
        prop::collection::vec(one, 1..60)
    }

    fn statuses() -> impl Strategy<Value = Status> {
        prop_oneof![
            Just(Status::Ok),
            Just(Status::NotHere),
            Just(Status::Malformed),
            (1..=4095i32).prop_map(|n| Status::Errno(Errno(n))),
        ]
    }

    proptest! {
        #[test]
        fn requests_survive_and_wait_until_they_are_whole(
            id: u64, ino: u64, since: Option<u64>, ranges in ranges(), ack: u64,
            landing: Option<(u64, u32)>, cut: prop::sample::Index,
        ) {
            let mut bytes = Vec::new();
            let subject = Subject { ino: Ino(ino), copy_since: since.map(Version), held: None };
            let landing = landing.map(|(address, key)| Place { address, key });
            put_read_to(&mut bytes, id, subject, &ranges, landing);
            let len = bytes.len();
            put_received(&mut bytes, ack);
            let total = ranges.iter().map(|r| r.len()).sum();
            let read = Request::Read { id, subject, ranges, total, landing };
            prop_assert_eq!(take_request(&bytes), Ok(Some((read, len))));
            let ack = (Request::Received { id: ack }, REQUEST_LEN);
            prop_assert_eq!(take_request(&bytes[len..]), Ok(Some(ack)));
            prop_assert_eq!(take_request(&bytes[..cut.index(len)]), Ok(None));
        }

        #[test]
        fn replies_and_trailers_survive(
            status in statuses(), flag in 0..3u8, id: u64, n in 1..=REPLY_BYTES_MAX,
        ) {
            let len = if status == Status::Ok { n } else { 0 };
            let reply = Reply { status, held: flag == 1, placed: flag == 2, id, len };
            prop_assert_eq!(decode_reply(&encode_reply(&reply)), Ok(reply));
            prop_assert_eq!(decode_trailer(&encode_trailer(id, status), id), Ok(status));
            prop_assert!(decode_trailer(&encode_trailer(id, status), id ^ 1).is_err());
        }

        #[test]
        fn orders_survive(
            id: u64, ino: u64, owner: u32, epoch: u64, crc: u32, ranges in ranges(), kind in 0..=9u8,
            cut: prop::sample::Index,
        ) {
            let set = CopySet { owner: NodeId(owner), epoch };
            let total = ranges.iter().map(|r| r.len()).sum::<u64>();
            let mut bytes = Vec::new();
            let wanted = match kind {
                0 => {
                    let subject = Subject { ino: Ino(ino), copy_since: None, held: Some(set) };
                    put_read(&mut bytes, id, subject, &ranges);
                    Request::Read { id, subject, ranges, total, landing: None }
                }
                kind => {
                    let work = WORKS[usize::from(kind) - 1];
                    let ranges = match form_of(work).1 {
                        Count::None => Vec::new(),
                        Count::One => ranges[..1].to_vec(),
                        Count::Some | Count::Any => ranges,
                    };
                    let payload = match work.brings_bytes() {
                        true => Payload { total: ranges.iter().map(|r| r.len()).sum(), crc },
                        false => Payload::default(),
                    };
                    let order = Order { id, set, ino: Ino(ino), ranges, work, payload };
                    put_order(&mut bytes, &order);
                    Request::Order(order)
                }
            };
            let len = bytes.len();
            prop_assert_eq!(take_request(&bytes), Ok(Some((wanted, len))));
            prop_assert_eq!(take_request(&bytes[..cut.index(len)]), Ok(None));
        }

        /// Whatever arrives: no panic, and what is accepted keeps every bound.
        #[test]
        fn mutated_requests_are_refused_or_within_bounds(
            ranges in ranges(), at: prop::sample::Index, with: [u8; 8], since: Option<u64>,
            landing: Option<(u64, u32)>,
        ) {
            let mut bytes = Vec::new();
            let subject = Subject { ino: Ino(2), copy_since: since.map(Version), held: None };
            let landing = landing.map(|(address, key)| Place { address, key });
            put_read_to(&mut bytes, 1, subject, &ranges, landing);
            let at = at.index(bytes.len());
            for (byte, new) in bytes[at..].iter_mut().zip(with) { *byte = new; }
            check_accepted(&bytes)?;
        }

        #[test]
        fn garbage_requests_are_refused_or_within_bounds(mut bytes: Vec<u8>, with_magic: bool) {
            if with_magic && bytes.len() >= 8 {
                let (kind, landing) = (bytes[4] % 15, bytes[5] & 1);
                bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_le_bytes());
                bytes[4..8].copy_from_slice(&[kind, landing, 1, 0]);
            }
            check_accepted(&bytes)?;
        }

        #[test]
        fn garbage_replies_are_refused_or_within_bounds(mut bytes: [u8; REPLY_LEN], with_magic: bool) {
            if with_magic {
                bytes[..4].copy_from_slice(&REPLY_MAGIC.to_le_bytes());
            }
            if let Ok(reply) = decode_reply(&bytes) {
                prop_assert!(reply.len <= REPLY_BYTES_MAX);
                prop_assert_eq!(encode_reply(&reply), bytes);
            }
        }
    }

    fn check_accepted(bytes: &[u8]) -> Result<(), TestCaseError> {
        if let Ok(Some((Request::Read { ranges, total, .. }, len))) = take_request(bytes) {
            prop_assert!(len <= bytes.len() && ranges.len() <= RANGES_MAX);
            prop_assert!(total <= REPLY_BYTES_MAX);
            prop_assert_eq!(total, ranges.iter().map(|r| r.len()).sum::<u64>());
            prop_assert!(ranges.iter().all(|r| !r.is_empty() && r.end() <= i64::MAX as u64));
        }
        Ok(())
    }

    #[test]
    fn what_is_too_large_is_refused_before_it_is_read() {
        let head = |kind, count, total| {
            let mut out = Vec::new();
            put_request(&mut out, kind, count, 1, 1, total);
            take_request(&out)
        };
        assert_eq!(head(KIND_READ, 0, 0), Err(FrameError::Bound("range count")));
        assert_eq!(head(KIND_READ, 1025, 5), Err(FrameError::Bound("range count")));
        assert_eq!(head(KIND_READ, 1, REPLY_BYTES_MAX + 1), Err(FrameError::Bound("total")));
        assert_eq!(head(KIND_READ_COPY, 1, REPLY_BYTES_MAX + 1), Err(FrameError::Bound("total")));
        assert_eq!(head(KIND_KEEP, 1, KEEP_BYTES_MAX + 1), Err(FrameError::Bound("total")));
        assert_eq!(head(KIND_KEEP, 1025, 5), Err(FrameError::Bound("range count")));
        assert_eq!(head(KIND_DROP, 1, 1), Err(FrameError::Bound("total")));
        let too_much = KEEP_BYTES_MAX + 1;
        assert_eq!(head(KIND_SEAT_WRITE, 1, too_much), Err(FrameError::Bound("total")));
        assert_eq!(head(KIND_SEAT_APPEND, 1, too_much), Err(FrameError::Bound("total")));
        assert_eq!(head(KIND_SEAT_WRITE, 0, 0), Err(FrameError::Bound("range count")));
        assert_eq!(head(KIND_SEAT_SYNC, 0, 1), Err(FrameError::Bound("total")));
        assert_eq!(head(KIND_READ, 1, 5), Ok(None));
        assert_eq!(head(KIND_MEET, 1, 0), Err(FrameError::Undefined("request")));
        assert_eq!(head(KIND_KEEP | LANDING, 1, 5), Err(FrameError::Undefined("request")));
        assert_eq!(head(KIND_LAST + 1, 0, 0), Err(FrameError::Undefined("request")));
        assert_eq!(take_request(b"GET "), Err(FrameError::Magic));
    }
}
