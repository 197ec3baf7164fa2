//! What was encoded is decoded as it was; anything else is refused or keeps its bounds.

use crate::*;
use proptest::prelude::*;

fn span() -> impl Strategy<Value = Span> {
    let offset = prop_oneof![0_u64..1 << 20, 0..=OFFSET_MAX];
    (offset, 0_u64..1 << 20).prop_map(|(offset, len)| {
        let len = len.min(OFFSET_MAX - offset);
        Span { offset, len }
    })
}

fn which() -> impl Strategy<Value = Which> {
    prop_oneof![Just(Which::File), span().prop_map(Which::Range)]
}

fn small_list() -> impl Strategy<Value = Vec<Span>> {
    prop::collection::vec((0..=OFFSET_MAX - 100, 0_u64..100), 0..40)
        .prop_map(|all| all.into_iter().map(|(offset, len)| Span { offset, len }).collect())
}

fn same(request: &Request<'_>) {
    let bytes = request.encode().expect("it fits");
    let mut buffer = bytes.clone();
    buffer.extend_from_slice(&[7; 9]);
    assert_eq!(Request::decode(&buffer).as_ref(), Ok(request), "with what is behind it");
    for short in 0..bytes.len() {
        assert!(Request::decode(&bytes[..short]).is_err(), "{short} of {}", bytes.len());
    }
}

proptest! {
    #[test]
    fn requests_come_back(which in which(), span in span(), owner: u32, pieces in small_list(), ask in prop::option::of(span())) {
        same(&Request::Stat);
        same(&Request::Handle);
        same(&Request::Join(owner));
        same(&Request::Fail);
        same(&Request::Withdraw);
        same(&Request::Done);
        same(&Request::Await(b"a name"));
        same(&Request::Attach(which));
        same(&Request::Query(which));
        same(&Request::Detach(which));
        same(&Request::Flush(which));
        same(&Request::ReadFrom { span, owner });
        same(&Request::Publish(span));
        let data = vec![3; pieces.iter().map(|p| p.len as usize).sum()];
        same(&Request::Write { pieces: pieces.clone(), data: &data, publish: ask });
        same(&Request::Read { pieces: pieces.clone(), ask });
        same(&Request::Fetch { pieces, ask });
    }

    /// Whatever somebody sends: what is accepted has spans that a file may have, and lists that are
    /// no longer than what was sent.
    #[test]
    fn what_is_accepted_keeps_its_bounds(
        head in prop::array::uniform2(0_u8..14), flags in 0_u16..4,
        body in prop::collection::vec(any::<u8>(), 0..200), lie in -2_i64..3,
    ) {
        let len = (body.len() as i64 + lie).max(0) as u32;
        let mut bytes = vec![1, head[1]];
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&body);
        match Request::decode(&bytes) {
            Ok(Request::Write { pieces, data, .. }) => {
                prop_assert_eq!(pieces.iter().map(|p| p.len).sum::<u64>(), data.len() as u64);
                prop_assert!(pieces.iter().all(|p| p.end() <= OFFSET_MAX));
            }
            Ok(Request::Read { pieces, .. } | Request::Fetch { pieces, .. }) => {
                prop_assert!(pieces.iter().all(|p| p.end() <= OFFSET_MAX));
                prop_assert!(pieces.len() <= body.len());
                prop_assert!(pieces.iter().map(|p| p.len).sum::<u64>() <= FETCH_MAX);
            }
            _ => {}
        }
        let _ = (Stat::decode(&body), Owners::decode(&body), Stored::decode(&body, 10));
    }

    #[test]
    fn owners_come_back_in_pages(gaps in prop::collection::vec((0_u64..1 << 30, 1_u64..1 << 30, 1_u32..9), 0..300), room in 64_usize..2000) {
        let mut end = 0;
        let all: Vec<Owned> = gaps.into_iter().map(|(gap, len, owner)| {
            let span = Span { offset: end + gap, len };
            end = span.end();
            Owned { span, owner }
        }).collect();
        let (mut found, mut rest) = (Vec::new(), &all[..]);
        loop {
            let bytes = Owners::encode(rest, None, room);
            prop_assert!(bytes.len() <= room);
            let page = Owners::decode(&bytes).expect("an answer");
            found.extend_from_slice(&page.owned);
            let Some(next) = page.next else { break };
            prop_assert!(!page.owned.is_empty(), "it gets on");
            rest = &rest[page.owned.len()..];
            prop_assert_eq!(rest[0].span.offset, next);
        }
        prop_assert_eq!(found, all);
    }

    #[test]
    fn pieces_that_were_read_come_back(lengths in prop::collection::vec((0_u64..300, 0_u64..300), 0..50)) {
        let pieces: Vec<Span> = lengths.iter().map(|(n, m)| Span { offset: 5, len: n + m }).collect();
        let mut answer = PiecesRead::default();
        let parts: Vec<Vec<u8>> = lengths.iter().map(|(n, _)| vec![*n as u8; *n as usize]).collect();
        parts.iter().for_each(|part| answer.push(part));
        let bytes = answer.encode();
        prop_assert!(fits(&pieces, bytes.len() + 100_000));
        let found = PiecesRead::decode(&bytes, &pieces).expect("an answer");
        prop_assert_eq!(found, parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
        prop_assert!(PiecesRead::decode(&[&bytes[..], b"x"].concat(), &pieces).is_err());
    }

    #[test]
    fn the_number_of_the_ioctl_says_how_long_the_buffer_is(buffer in HEAD..=BUFFER_MAX, other: u32) {
        prop_assert_eq!(buffer_of(command(buffer)), Some(buffer));
        if let Some(buffer) = buffer_of(other) {
            prop_assert_eq!(command(buffer), other);
        }
    }

    #[test]
    fn a_handle_has_one_name(handle in prop::array::uniform32(any::<u8>()), at in 0_usize..135, byte: u8) {
        let mut whole = [0; HANDLE];
        whole[..32].copy_from_slice(&handle);
        let mut name = handle_name(&whole);
        prop_assert_eq!(handle_of_name(&name), Some(whole));
        let was = std::mem::replace(&mut name[at], byte);
        match handle_of_name(&name) {
            Some(other) => prop_assert!(was == byte || other != whole),
            None => prop_assert!(was != byte),
        }
        name.push(b'0');
        prop_assert_eq!(handle_of_name(&name), None);
    }
}

#[test]
fn absurd_ranges_are_refused() {
    assert!(Span::new(OFFSET_MAX, 1).is_err() && Span::new(u64::MAX, u64::MAX).is_err());
    assert!(Span::new(OFFSET_MAX, 0).is_ok());
    let beyond = Span { offset: u64::MAX - 3, len: 9 };
    let bytes = Request::Attach(Which::Range(beyond)).encode().expect("it fits");
    assert_eq!(Request::decode(&bytes), Err(Malformed));
    // A list that says it is longer than memory.
    let mut bytes = vec![1, 9, 0, 0, 9, 0, 0, 0];
    bytes.extend_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0]);
    assert_eq!(Request::decode(&bytes), Err(Malformed));
    // Pieces that are longer together than may be asked for.
    let much = Request::Fetch { pieces: vec![Span { offset: 0, len: FETCH_MAX + 1 }], ask: None };
    assert_eq!(Request::decode(&much.encode().expect("it fits")), Err(Malformed));
}
