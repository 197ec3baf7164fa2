//! What was written is read again; damage is found and costs only what follows it.

use super::*;
use proptest::prelude::*;

fn header() -> Header {
    Header {
        host: b"node1".to_vec(),
        pid: 7,
        parent: 1,
        generation: 2,
        start: 1000,
        since_1970: 1 << 60,
        task: b"PMI_RANK=3".to_vec(),
        program: b"/bin/true".to_vec(),
    }
}

fn what() -> impl Strategy<Value = What> {
    let n = any::<u32>;
    let path = prop::collection::vec(any::<u8>(), 0..40);
    let act = prop_oneof![Just(Act::Read), Just(Act::Write), Just(Act::Append)];
    let event =
        prop_oneof![Just(Event::Open), Just(Event::Close), Just(Event::Fsync), Just(Event::Commit)];
    let flow =
        prop_oneof![Just(Flow::All), Just(Flow::FromRoot), Just(Flow::ToRoot), Just(Flow::Prefix)];
    let range = (any::<u64>(), any::<u64>()).prop_map(|(a, b)| (a.min(b), a.max(b)));
    prop_oneof![
        (n(), any::<u64>(), any::<u64>(), path.clone())
            .prop_map(|(file, ino, born, path)| What::File { file, ino, born, path }),
        (n(), any::<u64>(), path).prop_map(|(site, offset, object)| What::Site {
            site,
            offset,
            object
        }),
        (n(), act, range.clone()).prop_map(|(file, act, (start, end))| What::Access {
            file,
            act,
            start,
            end
        }),
        (n(), event).prop_map(|(file, event)| What::Sync { file, event }),
        (n(), range.clone(), any::<bool>())
            .prop_map(|(file, (start, end), exclusive)| What::Lock { file, start, end, exclusive }),
        (n(), range).prop_map(|(file, (start, end))| What::Unlock { file, start, end }),
        n().prop_map(|pid| What::Fork { pid }),
        n().prop_map(|pid| What::Reaped { pid }),
        (any::<u64>(), n(), n()).prop_map(|(comm, rank, size)| What::World { comm, rank, size }),
        (any::<u64>(), n(), n(), any::<i32>()).prop_map(|(comm, from, to, tag)| What::Send {
            comm,
            from,
            to,
            tag
        }),
        (any::<u64>(), n(), n(), any::<i32>(), any::<u64>())
            .prop_map(|(comm, from, to, tag, posted)| What::Recv { comm, from, to, tag, posted }),
        (any::<u64>(), any::<u64>(), 0..9u32, 0..9u32, flow).prop_map(
            |(comm, number, rank, root, flow)| What::Enter {
                comm,
                number,
                rank,
                size: 9,
                root,
                flow
            }
        ),
        (any::<u64>(), any::<u64>(), n()).prop_map(|(comm, number, rank)| What::Leave {
            comm,
            number,
            rank
        }),
        Just(What::Spawning),
        Just(What::Spawned),
        Just(What::Exit),
        Just(What::Asked),
        Just(What::Answered),
        Just(What::Unknown),
    ]
}

fn record() -> impl Strategy<Value = Record> {
    let call = (0..Call::ALL.len()).prop_map(|i| Call::ALL[i]);
    (0..1u64 << 62, 0..1u64 << 40, any::<u32>(), call, any::<u32>(), what()).prop_map(
        |(begin, time, thread, call, site, what)| Record {
            begin,
            end: begin + time,
            thread,
            call,
            site,
            what,
        },
    )
}

/// Blocks of `per_block` records each; the last one is sealed only when `seal_last`.
fn file_of(records: &[Record], per_block: usize, seal_last: bool) -> Vec<u8> {
    let mut file = header().encode();
    let chunks: Vec<_> = records.chunks(per_block).collect();
    for (i, chunk) in chunks.iter().enumerate() {
        let mut bytes = vec![0; BLOCK];
        let mut block = Block::begin(&mut bytes, chunk[0].begin);
        for record in *chunk {
            let (used, base) = block.state();
            // As the tracer does, which keeps no reference between two calls.
            block = Block::resume(block.into_bytes(), used, base);
            block.push(record).unwrap();
        }
        if seal_last || i + 1 < chunks.len() {
            block.seal();
        }
        file.extend_from_slice(&bytes);
    }
    file
}

fn read_all(file: &[u8]) -> (Vec<Record>, Option<Damage>) {
    let mut reader = Reader::new(file).unwrap();
    let mut records = Vec::new();
    loop {
        match reader.read() {
            Ok(Some(record)) => records.push(record),
            Ok(None) => return (records, None),
            Err(damage) => {
                assert!(matches!(reader.read(), Ok(None)), "nothing after damage");
                return (records, Some(damage));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(
        records in prop::collection::vec(record(), 1..40), per_block in 1..12usize, seal in any::<bool>()
    ) {
        let file = file_of(&records, per_block, seal);
        let reader = Reader::new(&file[..]).unwrap();
        prop_assert_eq!(reader.header(), &header());
        let (read, damage) = read_all(&file);
        prop_assert!(damage.is_none());
        prop_assert_eq!(read, records);
    }

    /// A flipped bit in a sealed block costs that block and what follows.
    #[test]
    fn damage_costs_what_follows_it(
        records in prop::collection::vec(record(), 12..40), at in any::<prop::sample::Index>(), bit in 0..8u8
    ) {
        let mut file = file_of(&records, 4, true);
        let blocks = records.len().div_ceil(4);
        let block = at.index(blocks);
        let used = u32::from_le_bytes(file[HEADER + block * BLOCK + 4..][..4].try_into().unwrap());
        let in_block = at.index(used as usize);
        file[HEADER + block * BLOCK + HEAD + in_block] ^= 1 << bit;
        let (read, damage) = read_all(&file);
        let is_there = matches!(damage, Some(Damage::Block { block: b, .. }) if b == block as u64);
        prop_assert!(is_there);
        prop_assert_eq!(&read[..], &records[..block * 4]);
    }

    #[test]
    fn a_cut_file_is_good_up_to_its_last_whole_block(
        records in prop::collection::vec(record(), 12..40), at in any::<prop::sample::Index>()
    ) {
        let file = file_of(&records, 4, true);
        let len = HEADER + at.index(file.len() - HEADER);
        let (read, _) = read_all(&file[..len]);
        prop_assert!(records.starts_with(&read));
        prop_assert!(read.len() >= (len - HEADER) / BLOCK * 4);
    }
}

#[test]
fn what_does_not_fit_leaves_the_block_as_it_was() {
    let mut bytes = vec![0; BLOCK];
    let what = What::File { file: 1, ino: 2, born: 3, path: vec![b'x'; 3000] };
    let record = Record { begin: 5, end: 6, thread: 0, call: Call::Open, site: 0, what };
    let mut block = Block::begin(&mut bytes, 0);
    let mut n = 0;
    while block.push(&record).is_ok() {
        n += 1;
    }
    assert_eq!(n, (BLOCK - HEAD) / 3015, "as many as there is room for");
    block.seal();
    let file = [header().encode(), bytes].concat();
    assert_eq!(read_all(&file).0.len(), n);
}

#[test]
fn other_files_are_refused_in_words() {
    let refused = |page: &[u8]| Reader::new(page).unwrap_err().to_string();
    assert_eq!(refused(b""), "not a trace file");
    let mut newer = header().encode();
    newer[8] = 9;
    assert_eq!(refused(&newer), "written by another version of ebb");
    let mut damaged = header().encode();
    damaged[22] ^= 1;
    assert_eq!(refused(&damaged), "its header is damaged");
    assert_eq!(refused(&header().encode()[..30]), "its header is cut off");
}

#[test]
fn calls_are_known_by_their_numbers() {
    for (i, call) in Call::ALL.iter().enumerate() {
        assert_eq!(Call::from_number(i as u8), Some(*call));
    }
    assert_eq!(Call::from_number(200), None);
}
