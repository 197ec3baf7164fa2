//! Traces that are written by hand: order that is there, and order that is missing.

use super::*;
use ebb_consistency::ModelTable;
use ebb_trace_format::{
    Act, BLOCK, Block, Call, ENDING, Event, Flow, HEADER, Header, Record, What,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const FILE: What = What::File { file: 1, ino: 5, born: 6, path: Vec::new() };
const OPEN: What = What::Sync { file: 1, event: Event::Open };
const CLOSE: What = What::Sync { file: 1, event: Event::Close };
const WRITE: What = What::Access { file: 1, act: Act::Write, start: 0, end: 10 };
const READ: What = What::Access { file: 1, act: Act::Read, start: 0, end: 10 };

fn enter(rank: u32, size: u32) -> What {
    What::Enter { comm: 1, number: 0, rank, size, root: 0, flow: Flow::All }
}

fn leave(rank: u32) -> What {
    What::Leave { comm: 1, number: 0, rank }
}

/// A trace of processes with these records; the clock of each begins `100 * pid` later.
fn written(processes: &[&[What]]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (pid, whats) in (0..).zip(processes) {
        let header = Header {
            host: b"node".to_vec(),
            pid,
            parent: 99,
            start: 1 + 100 * u64::from(pid),
            task: format!("PMI_RANK={pid}").into_bytes(),
            ..Header::default()
        };
        let mut bytes = vec![0; BLOCK];
        let mut block = Block::begin(&mut bytes, header.start);
        for (i, what) in (1..).zip(*whats) {
            let end = header.start + i;
            let what = what.clone();
            let record = Record { begin: end, end, thread: 0, call: Call::Pwrite, site: 0, what };
            block.push(&record).unwrap();
        }
        block.seal();
        let file = [header.encode(), bytes].concat();
        assert_eq!(file.len(), HEADER + BLOCK);
        std::fs::write(dir.path().join(format!("node-{pid}-0.{ENDING}")), file).unwrap();
    }
    dir
}

/// Races under a model, and what was noticed.
fn races(processes: &[&[What]], model: &str) -> (u64, Doubts) {
    let dir = written(processes);
    let models = [ModelTable::builtin().get(model).unwrap()];
    let traced = load(dir.path(), Nodes::Tasks, &models).unwrap();
    let checked = check(&traced, &models, &|_| None);
    (checked[0].verdict.races(), traced.doubts)
}

fn world(rank: u32) -> What {
    What::World { comm: 1, rank, size: 2 }
}

#[test]
fn a_barrier_counts_whatever_the_clocks_say() {
    let writer = [world(0), FILE, OPEN, WRITE, CLOSE, enter(0, 2), leave(0)];
    let reader = [world(1), enter(1, 2), leave(1), FILE, OPEN, READ, CLOSE];
    let fine = Doubts::default();
    assert_eq!(races(&[&writer, &reader], "session"), (0, fine.clone()));
    // The reader's clock is behind.
    assert_eq!(races(&[&reader, &writer], "session"), (0, fine.clone()));
    let early = [world(1), FILE, OPEN, enter(1, 2), leave(1), READ, CLOSE];
    assert_eq!(races(&[&writer, &early], "session"), (1, fine.clone()));
    assert_eq!(races(&[&writer, &early], "commit"), (0, fine));
}

#[test]
fn receives_are_matched_in_the_order_in_which_they_were_posted() {
    let send = || What::Send { comm: 1, from: 0, to: 1, tag: 7 };
    let receive = |posted| What::Recv { comm: 1, from: 0, to: 1, tag: 7, posted };
    let writer = [world(0), send(), FILE, OPEN, WRITE, CLOSE, send()];
    let of = |first, second| {
        let reader = [world(1), receive(first), FILE, OPEN, READ, CLOSE, receive(second)];
        races(&[&writer, &reader], "session")
    };
    assert_eq!(of(4, 3), (0, Doubts::default()), "the second message is heard of first");
    assert_eq!(of(3, 4), (1, Doubts::default()));
}

#[test]
fn what_is_not_in_the_trace_is_counted_and_not_waited_for() {
    let alone = [world(0), FILE, OPEN, WRITE, enter(0, 2), leave(0), CLOSE];
    let other = [world(1), FILE, OPEN, READ, CLOSE];
    let (found, doubts) = races(&[&alone, &other], "posix");
    assert_eq!((found, doubts.unmatched), (1, 1));
    let deaf = [world(1), What::Recv { comm: 1, from: 0, to: 1, tag: 7, posted: 1 }, FILE, READ];
    let (found, doubts) = races(&[&alone[..4], &deaf], "posix");
    assert_eq!((found, doubts.unmatched), (1, 1));
}

#[test]
fn locks_are_in_the_order_of_the_clock() {
    let lock = |exclusive| What::Lock { file: 1, start: 0, end: 10, exclusive };
    let unlock = || What::Unlock { file: 1, start: 0, end: 10 };
    let of = |exclusive| {
        let one = [world(0), FILE, OPEN, lock(exclusive), WRITE, unlock(), CLOSE];
        let two = [world(1), FILE, OPEN, lock(exclusive), READ, WRITE, unlock(), CLOSE];
        races(&[&one, &two], "session").0
    };
    assert_eq!((of(true), of(false)), (0, 2));
}

#[test]
fn tasks_that_tell_nothing_of_mpi_are_doubted() {
    let plain = [FILE, OPEN, READ, CLOSE];
    assert_eq!(races(&[&plain, &plain], "session").1.silent_tasks, 2);
    assert_eq!(races(&[&plain], "session").1.silent_tasks, 0, "one alone may be anything");
}

#[test]
fn syncs_that_do_nothing_are_counted() {
    let sync = What::Sync { file: 1, event: Event::Fsync };
    let two =
        [world(0), FILE, OPEN, What::Asked, sync, What::Answered, What::Asked, What::Answered];
    assert_eq!(races(&[&two], "session").1.idle_syncs, 1);
}

/// Only one file needs more than the others: a rule is cheaper than a stronger model.
#[test]
fn advice_names_the_file_that_needs_more() {
    let other = What::File { file: 2, ino: 8, born: 9, path: b"/scratch/log".to_vec() };
    let write = What::Access { file: 2, act: Act::Write, start: 0, end: 10 };
    let read = What::Access { file: 2, act: Act::Read, start: 0, end: 10 };
    let open = || What::Sync { file: 2, event: Event::Open };
    let writer =
        [world(0), FILE, OPEN, WRITE, CLOSE, other.clone(), open(), write, enter(0, 2), leave(0)];
    let reader = [world(1), enter(1, 2), leave(1), FILE, OPEN, READ, CLOSE, other, open(), read];
    let dir = written(&[&writer, &reader]);
    let table = ModelTable::builtin();
    let models: Vec<_> = ["session", "commit", "posix"].map(|n| table.get(n).unwrap()).into();
    let traced = load(dir.path(), Nodes::Tasks, &models).unwrap();
    let checked = check(&traced, &models, &|_| None);
    let advice = advise(&traced, &models, &checked);
    assert_eq!(advice.model.as_deref(), Some("posix"));
    let rule = vec![("/scratch/log".to_owned(), "posix".to_owned())];
    assert_eq!(advice.rules, Some(("session".to_owned(), rule)));
    let text = advice.text(&traced, &checked);
    assert!(text.contains("--consistency session --rule '**/log=posix'"), "{text}");
    // And with that rule there is no race.
    let posix = table.get("posix").unwrap();
    let log = |path: &[u8]| path.ends_with(b"/log").then(|| posix.clone());
    assert_eq!(check(&traced, &models[..1], &log)[0].verdict.races(), 0);
}

/// Whatever is in the files: they are refused, or judged. Nothing that they say ends the reader.
#[test]
fn mutated_traces_are_refused_or_judged() {
    let table = ModelTable::builtin();
    let models: Vec<_> = ["session", "posix"].map(|n| table.get(n).unwrap()).into();
    let lock = || What::Lock { file: 1, start: 0, end: 10, exclusive: true };
    let unlock = || What::Unlock { file: 1, start: 0, end: 10 };
    let send = || What::Send { comm: 1, from: 0, to: 1, tag: 7 };
    let receive = || What::Recv { comm: 1, from: 0, to: 1, tag: 7, posted: 3 };
    let site = || What::Site { site: 1, offset: 8, object: b"/bin/program".to_vec() };
    let (fork, reaped) = (|| What::Fork { pid: 1 }, || What::Reaped { pid: 1 });
    let one = [
        world(0),
        site(),
        FILE,
        OPEN,
        lock(),
        WRITE,
        unlock(),
        send(),
        enter(0, 2),
        leave(0),
        fork(),
        reaped(),
        CLOSE,
        What::Exit,
    ];
    let two = [
        world(1),
        FILE,
        OPEN,
        receive(),
        enter(1, 2),
        leave(1),
        lock(),
        READ,
        WRITE,
        unlock(),
        CLOSE,
        What::Exit,
    ];
    let mut dice = ChaCha8Rng::seed_from_u64(4);
    let (mut judged, mut refused) = (0, 0);
    for _ in 0..1000 {
        let dir = written(&[&one, &two]);
        for pid in 0..2 {
            let path = dir.path().join(format!("node-{pid}-0.{ENDING}"));
            let mut bytes = std::fs::read(&path).unwrap();
            // A block that is not sealed has no checksum: its records are read as they are.
            bytes[HEADER + 8..HEADER + 12].fill(0);
            for _ in 0..dice.random_range(0..4) {
                let at = HEADER + dice.random_range(0..250);
                bytes[at] = dice.random();
            }
            if dice.random_bool(0.1) {
                let header = Header {
                    start: dice.random(),
                    since_1970: dice.random(),
                    pid,
                    ..Header::default()
                };
                bytes[..HEADER].copy_from_slice(&header.encode());
            }
            std::fs::write(&path, bytes).unwrap();
        }
        let Ok(traced) = load(dir.path(), Nodes::Tasks, &models) else {
            refused += 1;
            continue;
        };
        let checked = check(&traced, &models, &|_| None);
        let said = text(&traced, &checked) + &page(&traced, &checked);
        assert!(said.contains("session"));
        assert!(advise(&traced, &models, &checked).text(&traced, &checked).contains("advice"));
        judged += 1;
    }
    assert!(judged > 600, "{judged} judged, {refused} refused");
}
