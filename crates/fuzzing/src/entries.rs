//! The decoders. What one accepts must keep its bounds, which the entry asserts.

use ebb_fs_client::control;
use ebb_fuse::{Head, Request};
use ebb_meta_client::{detached_from_pb, map_from_pb};
use ebb_node_journal::format as node_journal;
use ebb_rdma::flow::{self, Flow};
use ebb_trace_format::{BLOCK, HEAD, Reader, What};
use ebb_transport::secure::{Keys, Purpose, Tls};
use ebb_transport::{Token, wire};
use ebb_types::{Name, Version};
use ebb_wire::{attr_from_pb, pb, range_from_pb, time_from_pb};
use prost::Message;
use std::path::Path;
use std::sync::OnceLock;

/// Requests of a peer.
pub fn peer_requests(mut bytes: &[u8]) {
    while let Ok(Some((request, len))) = wire::take_request(bytes) {
        assert!(len <= bytes.len() && len > 0);
        if let wire::Request::Order(wire::Order { ranges, work, payload, .. }) = &request {
            assert!(ranges.len() <= wire::RANGES_MAX && payload.total <= wire::KEEP_BYTES_MAX);
            let brought =
                if work.brings_bytes() { ranges.iter().map(|r| r.len()).sum() } else { 0 };
            assert_eq!(payload.total, brought);
        }
        if let wire::Request::Read { ranges, total, .. } = request {
            assert!(ranges.len() <= wire::RANGES_MAX && total <= wire::REPLY_BYTES_MAX);
            assert_eq!(total, ranges.iter().map(|r| r.len()).sum::<u64>());
        }
        bytes = &bytes[len..];
    }
}

/// Messages of a stream over RDMA, each as a whole: the account that they are entered into never holds more than the
/// window.
pub fn rdma_messages(bytes: &[u8]) {
    let mut flow = Flow::default();
    let mut unread = 0;
    // As often as a window has room, and once more.
    for _ in 0..=flow::WINDOW {
        let Ok((head, inside)) = flow::Head::decode(bytes) else { return };
        assert!(inside.len() == head.len as usize && bytes.len() <= flow::MESSAGE_BYTES);
        if flow.receive(head).is_err() {
            return;
        }
        unread += u16::from(head.len > 0);
        assert!(unread <= flow::WINDOW);
    }
    assert!(unread == 0, "the window is full before");
}

/// What a stranger says where connections are encrypted, in pieces.
pub fn tls_server(bytes: &[u8]) {
    stranger(Tls::server(keys(), Purpose::Service), bytes);
}

/// The same where this end connects to a stranger.
pub fn tls_client(bytes: &[u8]) {
    let mut tls = Tls::client(keys(), Purpose::Service);
    tls.greet().expect("a client begins");
    stranger(tls, bytes);
}

fn stranger(mut tls: Tls, mut bytes: &[u8]) {
    let mut said = Vec::new();
    let mut size = 1;
    while !bytes.is_empty() {
        let n = tls.space().len().min(bytes.len()).min(size);
        tls.space()[..n].copy_from_slice(&bytes[..n]);
        bytes = &bytes[n..];
        size = size * 3 + 1;
        let heard = tls.received(n, &mut said);
        assert!(!tls.is_open() && said.is_empty(), "nobody without the token is let in");
        let unsent = tls.unsent().len();
        assert!(unsent < 64 << 10, "{unsent} bytes for a stranger");
        if heard.is_err() {
            assert!(tls.received(0, &mut said).is_err(), "and that is final");
            return;
        }
    }
}

/// Keys of a job that no seed is of.
fn keys() -> &'static Keys {
    static TOKEN: OnceLock<Token> = OnceLock::new();
    let token = TOKEN.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("ebb-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let token = Token::generate_to(dir.join("token")).expect("a token");
        let _ = std::fs::remove_dir_all(&dir);
        token
    });
    token.keys()
}

/// Replies of a peer, and what ends them.
pub fn peer_replies(bytes: &[u8]) {
    if let Some(reply) = bytes.first_chunk::<{ wire::REPLY_LEN }>()
        && let Ok(reply) = wire::decode_reply(reply)
    {
        assert!(reply.len <= wire::REPLY_BYTES_MAX);
    }
    if let Some(trailer) = bytes.first_chunk::<{ wire::TRAILER_LEN }>() {
        let _ = wire::decode_trailer(trailer, 7);
    }
}

/// What nodes send to the service.
pub fn client_frames(bytes: &[u8]) {
    use pb::request::Op;
    let Ok(frame) = pb::ClientFrame::decode(bytes) else { return };
    for request in frame.requests {
        let (ranges, names, time): (Vec<pb::Range>, Vec<Vec<u8>>, Option<pb::Time>) =
            match request.op {
                Some(Op::Attach(a)) => (a.ranges, vec![], a.mtime),
                Some(Op::Detach(d)) => (d.ranges, vec![], None),
                Some(Op::FlushBegin(f)) => (f.ranges, vec![], None),
                Some(Op::Query(q)) => (q.range.into_iter().collect(), vec![], None),
                Some(Op::SetLock(l)) => (l.range.into_iter().collect(), vec![], None),
                Some(Op::Rename(r)) => (vec![], vec![r.name, r.new_name], None),
                Some(Op::Make(m)) => (vec![], vec![m.name], None),
                Some(Op::Append(a)) => (vec![], vec![], a.mtime),
                _ => continue,
            };
        for range in ranges.into_iter().flat_map(range_from_pb) {
            assert!(range.start() <= range.end());
        }
        for name in names.iter().flat_map(|n| Name::new(n)) {
            let bytes = name.as_bytes();
            assert!(!bytes.is_empty() && bytes.len() <= Name::MAX);
            assert!(!bytes.contains(&b'/') && !bytes.contains(&0) && bytes != b"..");
        }
        let _ = time.map(time_from_pb);
    }
}

/// What the service sends to nodes.
pub fn server_frames(bytes: &[u8]) {
    use pb::reply::Body;
    let Ok(frame) = pb::ServerFrame::decode(bytes) else { return };
    for reply in frame.replies {
        let (attr, map) = match reply.body {
            Some(Body::Entry(e)) => (e.attr, e.map),
            Some(Body::Opened(o)) => (o.attr, o.map),
            Some(Body::Map(m)) => (None, Some(m)),
            Some(Body::Attached(a)) => {
                if let Ok(detached) = detached_from_pb(&a) {
                    assert!(detached.base_len <= a.size && detached.version != Version::ZERO);
                }
                (None, a.map)
            }
            _ => continue,
        };
        let _ = attr.as_ref().map(attr_from_pb);
        if let Some(Ok(mapped)) = map.map(map_from_pb) {
            // Whatever it says, it can be looked at.
            let _ = format!("{mapped:?}");
        }
    }
}

/// A journal of the service, as a file.
pub fn service_journal(bytes: &[u8]) {
    let _ = ebb_meta_server::judge(bytes);
}

/// The body of a record of the service: framed as it should be, so that its content is reached.
pub fn service_record(body: &[u8]) {
    if let Some(file) = service_file(&[body]) {
        let _ = ebb_meta_server::judge(&file);
    }
}

/// A service journal of the first format, which has the shortest header, with these bodies.
#[must_use]
pub fn service_file(bodies: &[&[u8]]) -> Option<Vec<u8>> {
    let mut file = b"EBBJRNL1".to_vec();
    file.extend_from_slice(&1u32.to_le_bytes());
    file.extend_from_slice(&7u64.to_le_bytes());
    let sum = ebb_journal::crc(&file);
    file.extend_from_slice(&sum.to_le_bytes());
    bodies.iter().for_each(|b| ebb_journal::put_long(&mut file, b, usize::MAX));
    bodies.iter().all(|b| !b.is_empty()).then_some(file)
}

/// A journal of a node, as a file: in this boot, after another, and looked past its damage.
pub fn node_journal(bytes: &[u8]) {
    for (boot, past_damage) in [("here", false), ("elsewhere", false), ("here", true)] {
        let _ = node_journal::judge(Path::new("journal"), bytes, boot, past_damage);
    }
}

/// The body of a record of a node behind the `beginning` of a journal.
pub fn node_record(beginning: &[u8], body: &[u8]) {
    let mut file = beginning.to_vec();
    ebb_journal::put_long(&mut file, body, usize::MAX);
    node_journal(&file);
}

/// Requests of the kernel: as they are, and with the length that they have.
pub fn kernel_request(bytes: &[u8]) {
    kernel_request_as_it_is(bytes);
    if let (Ok(len), Some(rest)) = (u32::try_from(bytes.len()), bytes.get(4..)) {
        kernel_request_as_it_is(&[&len.to_ne_bytes(), rest].concat());
    }
}

fn kernel_request_as_it_is(bytes: &[u8]) {
    let Ok((head, body)) = Head::decode(bytes) else { return };
    let Ok(request) = Request::decode(&head, body) else { return };
    let names = match &request {
        Request::Lookup(asked) => vec![asked.name],
        Request::SymLink(asked) => vec![asked.name, asked.target],
        Request::Rename(asked) => vec![asked.name, asked.new_name],
        Request::SetXattr(asked) => {
            assert!(asked.name.len() + 1 + asked.value.len() <= body.len());
            vec![asked.name]
        }
        Request::Write(asked) => {
            assert!(asked.data.len() <= body.len() && asked.offset <= i64::MAX as u64);
            vec![]
        }
        Request::Forget(forgets) => {
            assert!(forgets.iter().count() <= body.len() / 8);
            vec![]
        }
        _ => vec![],
    };
    assert!(names.iter().all(|name| !name.contains(&0) && name.len() < body.len()));
}

/// What a program asks by an ioctl, and what it is answered.
pub fn library_call(bytes: &[u8]) {
    use ebb_api_format::{OFFSET_MAX, Owners, PiecesRead, Request, Span, Stat, Stored};
    match Request::decode(bytes) {
        Ok(Request::Write { pieces, data, .. }) => {
            assert_eq!(pieces.iter().map(|p| p.len).sum::<u64>(), data.len() as u64);
        }
        Ok(Request::Read { pieces, .. } | Request::Fetch { pieces, .. }) => {
            assert!(pieces.len() <= bytes.len() && pieces.iter().all(|p| p.end() <= OFFSET_MAX));
        }
        _ => {}
    }
    if let Ok(owners) = Owners::decode(bytes) {
        assert!(owners.owned.windows(2).all(|w| w[0].span.end() <= w[1].span.offset));
    }
    let asked = [Span { offset: 0, len: 5 }, Span { offset: 9, len: 300 }];
    if let Ok(parts) = PiecesRead::decode(bytes, &asked) {
        assert!(parts.iter().zip(asked).all(|(part, piece)| part.len() as u64 <= piece.len));
    }
    let _ = (Stat::decode(bytes), Stored::decode(bytes, 9));
}

/// A line on the control socket, in both directions.
pub fn control_line(line: &[u8]) {
    let _ = control::Request::decode(line);
    let _ = serde_json::from_slice::<control::Event>(line);
}

/// A trace file, as it is.
pub fn trace_file(bytes: &[u8]) {
    let Ok(mut reader) = Reader::new(bytes) else { return };
    let mut records = 0;
    while let Ok(Some(record)) = reader.read() {
        records += 1;
        assert!(record.begin <= record.end && records <= bytes.len());
        match record.what {
            What::Access { start, end, .. }
            | What::Lock { start, end, .. }
            | What::Unlock { start, end, .. } => assert!(start <= end),
            What::Enter { rank, size, root, .. } => assert!(rank < size && root < size),
            What::File { path, .. } => assert!(path.len() <= ebb_trace_format::PATH_MAX),
            _ => {}
        }
    }
}

/// Records of a trace, in a block with a good checksum behind the `beginning` of a file, so that their
/// content is reached.
pub fn trace_records(beginning: &[u8], records: &[u8]) {
    let mut block = vec![0; BLOCK];
    let used = records.len().min(BLOCK - HEAD);
    block[..4].copy_from_slice(b"EBBK");
    block[4..8].copy_from_slice(&(used as u32).to_le_bytes());
    block[8] = 1;
    block[12..16].copy_from_slice(&ebb_journal::crc(&records[..used]).to_le_bytes());
    block[HEAD..HEAD + used].copy_from_slice(&records[..used]);
    trace_file(&[beginning, &block].concat());
}
