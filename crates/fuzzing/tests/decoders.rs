//! Every decoder on mutations of real frames and real journals. `EBB_FUZZ_SECONDS=60` for each in
//! the long form.

#![allow(clippy::unwrap_used)] // a failure here is a failed test

use ebb_fuzzing::{entries, feed};
use ebb_node_journal::{Header, Image, Introduction, Journal, Kept, Life, Record};
use ebb_transport::secure::{Purpose, Tls};
use ebb_transport::{CopySet, SeatWork, Token, Work, wire};
use ebb_types::{ByteRange, Errno, Ino, NodeId, Time, Version};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use prost::Message;

#[test]
fn peer_requests() {
    let mut bytes = Vec::new();
    wire::put_read(&mut bytes, 1, Ino(2), &[ByteRange::at(0, 100), ByteRange::at(1 << 40, 9)]);
    wire::put_received(&mut bytes, 1);
    wire::put_meet(&mut bytes, 2);
    let place = ebb_rdma::Place { address: 1 << 40, key: 7 };
    wire::put_read_to(&mut bytes, 2, Ino(2), &[ByteRange::at(0, 100)], Some(place));
    let many: Vec<ByteRange> = (0..500).map(|i| ByteRange::at(i * 9, 5)).collect();
    wire::put_read(&mut bytes, 3, Ino(7), &many);
    let set = CopySet { owner: NodeId(0), epoch: 0 };
    let one = vec![ByteRange::new(5, 105)];
    let brought = wire::Payload { total: 100, crc: 5 };
    let works = [
        (Vec::new(), Work::BeginCopies, wire::Payload::default()),
        (one.clone(), Work::Keep, brought),
        (one.clone(), Work::Drop, wire::Payload::default()),
        (one.clone(), Work::AtSeat(SeatWork::Write), brought),
        (one.clone(), Work::AtSeat(SeatWork::Append), brought),
        (one.clone(), Work::AtSeat(SeatWork::Cut), wire::Payload::default()),
        (one, Work::AtSeat(SeatWork::Grow), wire::Payload::default()),
        (Vec::new(), Work::AtSeat(SeatWork::Sync), wire::Payload::default()),
    ];
    let orders = works.map(|(ranges, work, payload)| {
        let mut bytes = Vec::new();
        let order = wire::Order { id: 4, set, ino: Ino(7), ranges, work, payload };
        wire::put_order(&mut bytes, &order);
        bytes
    });
    feed("peer-requests", &[&[bytes][..], &orders].concat(), entries::peer_requests);
}

#[test]
fn library_calls() {
    use ebb_api_format::{Owned, Owners, PiecesRead, Request, Span, Stat, Stored, Which};
    let span = Span { offset: 1 << 40, len: 77 };
    let pieces: Vec<Span> = (0..50).map(|n| Span { offset: n * 1000, len: n % 7 }).collect();
    let data = vec![1; pieces.iter().map(|p| p.len as usize).sum()];
    let requests = [
        Request::Attach(Which::Range(span)),
        Request::Query(Which::File),
        Request::ReadFrom { span, owner: 3 },
        Request::Write { pieces: pieces.clone(), data: &data, publish: Some(span) },
        Request::Read { pieces: pieces.clone(), ask: Some(span) },
        Request::Fetch { pieces, ask: None },
    ];
    let mut seeds: Vec<Vec<u8>> = requests.iter().filter_map(Request::encode).collect();
    let owned: Vec<Owned> =
        (0..30).map(|n| Owned { span: Span { offset: n * 9, len: 4 }, owner: 2 }).collect();
    seeds.push(Owners::encode(&owned, Some(1 << 50), 4000));
    seeds.push(
        Stat { size: 9, node: 1, unattached: 2, unflushed: 3, model: "posix".into() }.encode(),
    );
    seeds.push(Stored { bytes: 9, errno: 0, publish: true }.encode());
    let mut read = PiecesRead::default();
    read.push(&[1; 5]);
    read.push(&[2; 200]);
    seeds.push(read.encode());
    feed("library-calls", &seeds, entries::library_call);
}

#[test]
fn peer_replies() {
    let reply = |status, len| {
        wire::encode_reply(&wire::Reply { status, held: true, placed: false, id: 7, len })
    };
    let seeds = [
        reply(wire::Status::Ok, 100).to_vec(),
        reply(wire::Status::Errno(Errno(5)), 0).to_vec(),
        wire::encode_trailer(7, wire::Status::NotHere).to_vec(),
    ];
    feed("peer-replies", &seeds, entries::peer_replies);
}

#[test]
fn rdma_messages() {
    let message = |credits, bytes: &[u8]| {
        let head = ebb_rdma::flow::Head { credits, len: bytes.len() as u32 };
        [&head.encode()[..], bytes].concat()
    };
    let seeds = [message(3, b""), message(0, b"some bytes"), message(16, &[7; 8000])];
    feed("rdma-messages", &seeds, entries::rdma_messages);
}

/// What the ends of a real connection say until both have proven themselves.
fn handshake() -> (Vec<u8>, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let token = Token::generate_to(dir.path().join("token")).unwrap();
    let mut client = Tls::client(token.keys(), Purpose::Service);
    let mut server = Tls::server(token.keys(), Purpose::Service);
    let (mut of_client, mut of_server, mut nothing) = (Vec::new(), Vec::new(), Vec::new());
    client.greet().unwrap();
    while !(client.is_open() && server.is_open()) {
        pass(&mut client, &mut server, &mut of_client, &mut nothing);
        pass(&mut server, &mut client, &mut of_server, &mut nothing);
    }
    client.seal(b"what only the job may know").unwrap();
    pass(&mut client, &mut server, &mut of_client, &mut nothing);
    assert_eq!(nothing, b"what only the job may know");
    (of_client, of_server)
}

fn pass(from: &mut Tls, to: &mut Tls, record: &mut Vec<u8>, into: &mut Vec<u8>) {
    let said = from.unsent().to_vec();
    from.was_sent(said.len());
    record.extend_from_slice(&said);
    for piece in said.chunks(1000) {
        to.space()[..piece.len()].copy_from_slice(piece);
        to.received(piece.len(), into).unwrap();
    }
}

#[test]
fn handshakes_of_strangers() {
    let (client, server) = handshake();
    feed("tls-server", &[client], entries::tls_server);
    feed("tls-client", &[server], entries::tls_client);
}

fn range(start: u64, end: u64) -> pb::Range {
    pb::Range { start, end }
}

#[test]
fn client_frames() {
    let time = Some(pb::Time { sec: 5, nsec: 6 });
    let ops = vec![
        Op::Hello(pb::Hello {
            protocol: 1,
            node: "n".into(),
            nonce: vec![1; 32],
            ..Default::default()
        }),
        Op::Make(pb::Make {
            parent: 1,
            name: b"name".to_vec(),
            mode: 0o100644,
            ..Default::default()
        }),
        Op::Attach(pb::Attach {
            ino: 9,
            ranges: vec![range(0, 9), range(20, 90)],
            mtime: time,
            ..Default::default()
        }),
        Op::FlushBegin(pb::FlushBegin { ino: 9, ranges: vec![range(0, 1 << 40)] }),
        Op::Rename(pb::Rename {
            parent: 1,
            name: b"a".to_vec(),
            new_parent: 2,
            new_name: b"b".to_vec(),
            flags: 0,
            lease: 1,
            ino: 5,
            new_ino: 6,
        }),
        Op::SetLock(pb::SetLock { ino: 9, range: Some(range(0, u64::MAX)), ..Default::default() }),
        Op::Append(pb::Append { ino: 9, len: 100, mtime: time, copies: 3, not_below: 7, lease: 1 }),
        Op::Query(pb::Query {
            ino: 9,
            range: Some(range(5, 6)),
            known_version: 4,
            lease: 2,
            changed_after: Some(3),
        }),
        Op::Open(pb::Open {
            ino: 9,
            write: true,
            truncate: true,
            known_version: 4,
            lease: 2,
            seat: Some(pb::Seat { id: 77, asked: true }),
            handle: 6,
        }),
        Op::Await(pb::Await { ino: 0, parent: 9, name: b"name".to_vec() }),
        Op::Leave(pb::Leave { ino: 9, handle: 6, through: true, withdraws: false, asks: false }),
        Op::Join(pb::Join { ino: 9, handle: 6, of: 3 }),
        Op::Published(pb::Published { ino: 9, seat: 77, seq: 1 << 50, seated: true }),
    ];
    let requests: Vec<_> = (1..)
        .zip(ops)
        .map(|(id, op)| pb::Request { id, op: Some(op), ..Default::default() })
        .collect();
    let alone =
        requests.iter().map(|r| pb::ClientFrame { requests: vec![r.clone()] }.encode_to_vec());
    let mut seeds: Vec<Vec<u8>> = alone.collect();
    seeds.push(pb::ClientFrame { requests }.encode_to_vec());
    feed("client-frames", &seeds, entries::client_frames);
}

#[test]
fn server_frames() {
    let time = Some(pb::Time { sec: 5, nsec: 6 });
    let attr = Some(pb::Attr {
        ino: 3,
        mode: 0o100644,
        nlink: 1,
        atime: time,
        mtime: time,
        ctime: time,
        ..Default::default()
    });
    let owned = |start, end| pb::OwnedRange { start, end, node: 2, version: 5, flushed: false };
    let map = pb::FileMap {
        version: 9,
        size: 100,
        base_version: 1,
        base_len: 50,
        unchanged: false,
        covers: Some(range(0, u64::MAX)),
        ranges: vec![owned(0, 10), owned(20, 30)],
        mtime: time,
        lease: Some(pb::Lease { seq: 5, version: 9, compared: true }),
        changed: vec![range(1, 2)],
        guessed: vec![range(1, 2)],
        object: 5,
        replaces: 6,
    };
    let dir = Some(pb::Told { attr, lease: map.lease, ino: 7, complete: true });
    let bodies = [
        Body::Entry(pb::Entry {
            attr,
            map: Some(map.clone()),
            lease: map.lease,
            dir,
            new_dir: dir,
            gone: 5,
            seat: 6,
            await_ms: 30_000,
        }),
        Body::Map(map.clone()),
        Body::Attached(pb::Attached {
            version: 3,
            map: Some(map),
            size: 100,
            contested: vec![range(1, 2)],
            attr,
            lease: Some(pb::Lease { seq: 6, version: 9, compared: true }),
            quiet_end: 1 << 20,
            overtaken: vec![range(3, 4)],
            seat: 4,
            others: true,
            backing: Some(pb::BackingRef { path: b"f".to_vec(), ino: 7 }),
            base_len: Some(50),
        }),
    ];
    let reply = |body| pb::Reply { id: 1, body: Some(body), ..Default::default() };
    let frame = |body| pb::ServerFrame { replies: vec![reply(body)], ..Default::default() };
    let seeds: Vec<_> = bodies.into_iter().map(|b| frame(b).encode_to_vec()).collect();
    feed("server-frames", &seeds, entries::server_frames);
}

#[test]
fn control_lines() {
    let seeds = [
        &b"{\"cmd\":\"status\"}"[..],
        b"{\"cmd\":\"drain\",\"paths\":[\"a\",\"b/c\"],\"timeout_ms\":5}",
        b"{\"cmd\":\"unmount\",\"drain\":true,\"timeout_ms\":null}",
        b"{\"event\":\"done\",\"outcome\":\"failed\",\"text\":\"x\"}",
    ];
    feed("control-lines", &seeds.map(<[u8]>::to_vec), entries::control_line);
}

/// What a service leaves behind that has done a bit of everything that needs no node.
fn service_seed() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let backing = dir.path().join("backing");
    std::fs::create_dir_all(backing.join("d")).unwrap();
    std::fs::write(backing.join("f"), b"x").unwrap();
    let config = ebb_meta_server::Config::new(backing, dir.path().join("state"));
    let server = ebb_meta_server::Server::open(config).unwrap();
    server.shutdown();
    drop(server);
    std::fs::read(dir.path().join("state/journal")).unwrap()
}

/// The bodies of the records in a file, whatever its header.
fn bodies(file: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < file.len() {
        match ebb_journal::body_at(file, at, 1 << 20) {
            Some((body, next)) => {
                found.push(body.to_vec());
                at = next;
            }
            None => at += 1,
        }
    }
    found
}

#[test]
fn service_journals() {
    let seed = service_seed();
    assert!(ebb_meta_server::judge(&seed).is_ok(), "a real journal");
    feed("service-journal", &[seed], entries::service_journal);
}

#[test]
fn service_records() {
    let seeds = bodies(&service_seed());
    assert!(!seeds.is_empty());
    feed("service-record", &seeds, entries::service_record);
}

fn node_seed() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let mut image = Image::default();
    image.apply(&Record::Life(Box::new(Life {
        node: "n".to_owned(),
        config: "{}".to_owned(),
        boot: "here".to_owned(),
        job: 7,
        backing_ino: 2,
        began: Time::default(),
    })));
    let journal = Journal::start(dir.path(), image).unwrap();
    let header = Header {
        path: b"dir/file".to_vec(),
        perm: 0o600,
        uid: 0,
        gid: 0,
        atime: Time::default(),
        mtime: Time::default(),
        size: 0,
        home: None,
        under: None,
        shared: false,
    };
    let introduction =
        || Introduction { header: header.clone(), alone: true, cuts: vec![(5000, Version(1))] };
    let ranges = vec![ByteRange::at(0, 100), ByteRange::at(4096, 100)];
    let (ino, now) = (Ino(9), Time::default());
    let records = [
        Record::Written(ino, ranges.clone(), Version(1), now),
        Record::Attaching(ino, ranges.clone(), Version(1), now),
        Record::Attached(ino, ranges.clone(), Version(2), 5000),
        Record::Durable(ino, ranges.clone()),
        Record::Guessed(ino, ranges.clone(), Kept::Written, Version(2), now),
        Record::Again(ino, ranges.clone(), Version(2)),
        Record::Refused(ino, ranges.clone()),
        Record::Flushed(ino, ranges.iter().map(|r| (*r, Version(2))).collect()),
    ];
    records.iter().for_each(|r| journal.push_about(ino, introduction, r));
    journal.sync().unwrap();
    drop(journal);
    std::fs::read(dir.path().join("journal")).unwrap()
}

#[test]
fn node_journals() {
    let seed = node_seed();
    feed("node-journal", &[seed], entries::node_journal);
}

#[test]
fn node_records() {
    let file = node_seed();
    let seeds = bodies(&file);
    assert!(seeds.len() > 4, "real records");
    feed("node-record", &seeds, |body| entries::node_record(&file, body));
}

#[test]
fn kernel_requests() {
    let request = |opcode: u32, body: &[u8]| {
        let words = [7_u64, 1, 0, 0]; // a number, the root, and who asks
        let len = 40 + body.len() as u32;
        let head = [len.to_ne_bytes(), opcode.to_ne_bytes()].concat();
        [head, words.map(u64::to_ne_bytes).concat(), body.to_vec()].concat()
    };
    let numbers =
        |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|w| w.to_ne_bytes()).collect() };
    // Every operation with a body of numbers and names that many of them can have.
    let mut seeds: Vec<Vec<u8>> = (0..=52)
        .map(|opcode| {
            let body = [numbers(&[5, 0, 2, 0, 1, 0, 0, 0, 0, 0]), b"name\0other\0".to_vec()];
            request(opcode, &body.concat())
        })
        .collect();
    seeds.push(request(1, b"name\0"));
    seeds.push(request(6, b"name\0a target\0"));
    seeds.push(request(45, &[numbers(&[9, 0, 1, 0]), b"name\0other\0".to_vec()].concat()));
    seeds.push(request(21, &[numbers(&[5, 0]), b"user.a\0value".to_vec()].concat()));
    let write = numbers(&[3, 0, 100, 0, 5, 2, 11, 0, 0, 0]);
    seeds.push(request(16, &[write, b"bytes".to_vec()].concat()));
    seeds.push(request(42, &numbers(&[2, 0, 5, 0, 1, 0, 6, 0, 2, 0])));
    seeds.push(request(26, &numbers(&[7, 45, 131_072, u32::MAX, 0x7ff])));
    feed("kernel-requests", &seeds, entries::kernel_request);
}

/// A trace file, and its records in blocks whose checksum is right.
#[test]
fn trace_files() {
    use ebb_trace_format::{Act, BLOCK, Block, Call, Event, Flow, HEAD, Header, Record, What};
    let mut bytes = vec![0; BLOCK];
    let mut block = Block::begin(&mut bytes, 1000);
    let whats = [
        What::File { file: 1, ino: 5, born: 77, path: b"/scratch/file".to_vec() },
        What::Site { site: 1, offset: 0x1234, object: b"/bin/true".to_vec() },
        What::Sync { file: 1, event: Event::Open },
        What::Access { file: 1, act: Act::Write, start: 10, end: u64::MAX },
        What::Lock { file: 1, start: 0, end: u64::MAX, exclusive: true },
        What::Unlock { file: 1, start: 0, end: u64::MAX },
        What::World { comm: 9, rank: 0, size: 2 },
        What::Send { comm: 9, from: 0, to: 1, tag: -1 },
        What::Recv { comm: 9, from: 1, to: 0, tag: 3, posted: 1 },
        What::Enter { comm: 9, number: 0, rank: 0, size: 2, root: 1, flow: Flow::ToRoot },
        What::Leave { comm: 9, number: 0, rank: 0 },
        What::Reaped { pid: 7 },
        What::Exit,
    ];
    for (i, what) in (0..).zip(whats) {
        let (begin, end) = (1000 + i * 10, 1005 + i * 10);
        let record = Record { begin, end, thread: 0, call: Call::Pwrite, site: 1, what };
        block.push(&record).unwrap();
    }
    let used = block.state().0;
    block.seal();
    let beginning = Header { host: b"node".to_vec(), pid: 7, ..Header::default() }.encode();
    let records = bytes[HEAD..HEAD + used].to_vec();
    bytes.truncate(HEAD + used);
    feed("trace-file", &[[&beginning[..], &bytes].concat()], entries::trace_file);
    let twice = [&records[..], &records].concat();
    feed("trace-records", &[records, twice], |r| entries::trace_records(&beginning, r));
}
