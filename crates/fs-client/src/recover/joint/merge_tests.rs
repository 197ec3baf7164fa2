//! Recoveries of several nodes on a real backing directory, stepped in random order and killed at
//! random effects, against an array that knows the newest byte.

use super::board::Board;
use super::file::{Progress, Site, Work};
use super::statement::{Claim, Fate, Key, Kind, Shape, Statement};
use super::{merge, tick};
use crate::cache::CacheDir;
use crate::recover::places::Places;
use ebb_locks::Mutex;
use ebb_node_journal::remember_cut;
use ebb_node_journal::{Header, Held, Home, Kept, Note, Seen};
use ebb_types::{ByteRange, Extents, Ino, Time, Version};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::path::Path;

const INO: Ino = Ino(77);
const SIZE: u64 = 3000;

fn header(size: u64) -> Header {
    Header {
        path: b"d/f".to_vec(),
        perm: 0o640,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        atime: Time::default(),
        mtime: Time { sec: 1_000_000, nsec: 7 },
        size,
        home: None,
        under: None,
        shared: false,
    }
}

/// A node: its cache, and what its journal says of the file.
struct Node {
    name: String,
    cache: CacheDir,
    note: Note,
    held: Vec<(ByteRange, Version)>,
    work: Option<Work>,
    done: bool,
    /// It had nothing but cuts to tell of, and has told; nobody runs it again.
    told: bool,
    /// It has said what it has.
    spoke: bool,
}

/// Per byte the newest version and its value; values are different for each version.
struct Truth(Vec<(u64, u8)>);

impl Truth {
    fn gap(&self) -> Option<u64> {
        self.0.iter().position(|b| b.0 == 0).map(|at| at as u64)
    }
}

/// What a run does besides writing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mix {
    Writes,
    /// Nodes cut the file now and then, and the others do not hear of it.
    Cuts,
    /// The same, and at some time everything is flushed: from then on the file is under its name, and
    /// whoever cuts it cuts it there.
    InPlace,
    /// At some time everything is flushed, and from then on each node flushes now and then what it has by
    /// then. Those who have older bytes there do not hear of it.
    Flushes,
}

fn node(dir: &Path, number: usize) -> Node {
    let root = dir.join(format!("cache{number}"));
    std::fs::create_dir(&root).unwrap();
    Node {
        name: format!("n{number}"),
        cache: CacheDir::open(&root).unwrap(),
        note: Note::new(header(0)),
        held: Vec::new(),
        work: None,
        done: false,
        told: false,
        spoke: false,
    }
}

fn cluster(dice: &mut ChaCha8Rng, dir: &Path, mix: Mix) -> (Vec<Node>, Truth) {
    let cuts = matches!(mix, Mix::Cuts | Mix::InPlace);
    let named = dir.join("backing/d/f");
    let count = dice.random_range(2..5);
    let mut nodes: Vec<Node> = (0..count).map(|i| node(dir, i)).collect();
    let mut truth = Truth(if cuts { Vec::new() } else { vec![(0, 0); SIZE as usize] });
    let mut held: Vec<Extents<Held>> = vec![Extents::new(); count];
    let writes = dice.random_range(4..40);
    let named_at = match mix {
        Mix::InPlace => dice.random_range(1..=writes),
        Mix::Flushes => dice.random_range(1..=writes / 2),
        _ => 0,
    };
    let often = if mix == Mix::InPlace { 0.5 } else { 0.2 };
    for version in 1..=writes {
        let mut who = dice.random_range(0..count);
        if version == named_at {
            flush(&mut nodes, &mut held, &named, &truth);
            // One of them was told so, and does not hear of what others do later.
            nodes[who].note.alone = mix == Mix::InPlace;
        }
        if mix == Mix::Flushes && version > named_at && dice.random_bool(0.3) {
            let by = dice.random_range(0..count);
            flush_of(&mut nodes[by], &mut held[by], &named, &truth);
        }
        if version > named_at && nodes[who].note.alone {
            who = (who + 1) % count;
        }
        if cuts && dice.random_bool(often) {
            let most = if dice.random_bool(0.3) { 0 } else { truth.0.len() as u64 };
            let len = dice.random_range(0..=most);
            cut(&mut nodes[who], &mut held[who], len, version, &mut truth);
            if let Ok(file) = std::fs::File::options().write(true).open(&named) {
                let there = file.metadata().unwrap().len();
                file.set_len(there.min(len as u64)).unwrap();
            }
            continue;
        }
        let (start, len) = (dice.random_range(0..SIZE), dice.random_range(1..SIZE / 2));
        // The last ones fill what is left, so that the file is whole.
        let (start, len) = match truth.gap() {
            Some(at) if version + 6 > writes => (at, if version == writes { SIZE } else { len }),
            _ => (start, len),
        };
        let range = ByteRange::new(start, (start + len).min(SIZE));
        write(&mut nodes[who], &mut held[who], range, version, &mut truth);
    }
    let mut newest = writes;
    while let Some(at) = truth.gap() {
        newest += 1;
        let who = dice.random_range(0..count);
        let end = truth.0.len() as u64;
        write(&mut nodes[who], &mut held[who], ByteRange::new(at, end), newest, &mut truth);
    }
    for (node, held) in nodes.iter_mut().zip(held) {
        let end = held.end();
        if !cuts {
            node.note.header.size = if dice.random_bool(0.5) { end } else { SIZE };
        }
        node.held = held.iter().map(|(r, h)| (r, version(h))).collect();
        node.note.set_held(held.iter().collect::<Vec<_>>());
    }
    (nodes, truth)
}

fn version(held: Held) -> Version {
    match held.kept {
        Kept::Owned(version) => version,
        _ => unreachable!("only published bytes here"),
    }
}

fn write(node: &mut Node, held: &mut Extents<Held>, range: ByteRange, at: u64, truth: &mut Truth) {
    use std::os::unix::fs::FileExt;
    let value = u8::try_from(at).unwrap();
    let file = node.cache.file(INO).unwrap();
    file.write_all_at(&vec![value; range.len() as usize], range.start()).unwrap();
    held.insert(range, Held::new(Kept::Owned(Version(at))));
    node.note.known = Version(at);
    truth.0.resize(truth.0.len().max(range.end() as usize), (0, 0));
    truth.0[range.start() as usize..range.end() as usize].fill((at, value));
    node.note.header.size = truth.0.len() as u64;
}

fn cut(node: &mut Node, held: &mut Extents<Held>, len: u64, at: u64, truth: &mut Truth) {
    held.remove(ByteRange::from(len));
    truth.0.truncate(len as usize);
    remember_cut(&mut node.note.cuts, len, Version(at));
    (node.note.overrides, node.note.known) = (true, Version(at));
    node.note.header.size = len;
}

/// Everybody's bytes are on the backing, and their journals say so.
fn flush(nodes: &mut [Node], held: &mut [Extents<Held>], to: &Path, truth: &Truth) {
    use std::os::unix::fs::MetadataExt;
    std::fs::create_dir(to.parent().unwrap()).unwrap();
    let content: Vec<u8> = truth.0.iter().map(|b| b.1).collect();
    std::fs::write(to, content).unwrap();
    let ino = std::fs::metadata(to).unwrap().ino();
    for (node, held) in nodes.iter_mut().zip(held) {
        let home = Home { path: b"d/f".to_vec(), ino, seen: None, changing: false };
        (node.note.header.home, node.note.header.shared) = (Some(home), true);
        node.note.set_held(held.iter().collect::<Vec<_>>());
        node.note.flush(ByteRange::ALL, Version(u64::MAX));
        held.remove(ByteRange::ALL);
    }
}

/// One node flushes those of its bytes that nobody has written over.
fn flush_of(node: &mut Node, held: &mut Extents<Held>, to: &Path, truth: &Truth) {
    use std::os::unix::fs::FileExt;
    node.note.set_held(held.iter().collect::<Vec<_>>());
    let file = std::fs::File::options().write(true).open(to).unwrap();
    for (range, had) in held.iter().collect::<Vec<_>>() {
        let newest = |at: &u64| truth.0[*at as usize].0 == version(had).0;
        for at in (range.start()..range.end()).filter(newest) {
            file.write_all_at(&[truth.0[at as usize].1], at).unwrap();
            node.note.flush(ByteRange::at(at, 1), version(had));
            held.remove(ByteRange::at(at, 1));
        }
    }
}

fn site<'a>(node: &'a Node, places: &'a Places, board: &'a Board, everybody: bool) -> Site<'a> {
    let (cache, name) = (&node.cache, node.name.as_str());
    let is_part = node.note.header.home.as_ref().is_some_and(Home::is_part);
    let told = is_part.then_some(INO).into_iter().collect();
    Site {
        places,
        board,
        cache,
        node: name,
        rebooted: false,
        force: false,
        shared: true,
        told,
        named: std::collections::BTreeSet::new(),
        shaped: std::collections::BTreeSet::new(),
        everybody: everybody.into(),
        zeros: Mutex::default(),
        numbers: std::collections::BTreeSet::new(),
        listing: Mutex::default(),
    }
}

/// Goes on with one node for a while. It is killed when `effects` are done.
fn go_on(nodes: &mut [Node], at: usize, places: &Places, board: &Board, effects: u64) {
    let everybody = nodes.iter().all(|n| n.spoke || !n.note.has_bytes() && !n.note.overrides);
    let node = &mut nodes[at];
    if node.told {
        return;
    }
    tick::allow(effects);
    let mut work = node.work.take();
    let ended = {
        let site = site(node, places, board, everybody);
        match &mut work {
            None if !node.note.has_bytes() && node.note.overrides => {
                let begun = Work::begin_of_cuts(&site, INO, &node.note);
                begun.map(|new| {
                    node.told = new.is_none();
                    work = new;
                })
            }
            None => Work::begin(&site, INO, &node.note).map(|new| work = Some(new)),
            Some(work) => work.step(&site).map(|p| node.done = matches!(p, Progress::Done)),
        }
    };
    tick::allow(u64::MAX);
    node.work = work.filter(|_| ended.is_ok());
    node.spoke |= node.work.is_some() || node.told;
}

/// A node that was told that the file is whole finds nothing older than its own bytes there. Where it is not
/// its first time on the backing, there may be holes that others have cut and not filled yet: then at least
/// those of its bytes are there that nobody has changed since.
fn check_done(node: &Node, root: &Path, seed: u64, (truth, mix): (&Truth, Mix)) {
    let content = std::fs::read(root.join("d/f")).unwrap();
    let in_place = matches!(mix, Mix::InPlace | Mix::Flushes);
    let filled = in_place || content.iter().all(|b| *b != 0);
    assert!(filled, "seed {seed}: a hole in a file that is whole");
    for (range, version) in &node.held {
        // Somebody may have cut it.
        let [start, end] = [range.start(), range.end()].map(|at| content.len().min(at as usize));
        let newest = |at: usize| truth.0.get(at).is_some_and(|b| b.0 == version.0);
        let counts = |at: &usize| !in_place || newest(*at);
        let older = (start..end).filter(counts).find(|at| u64::from(content[*at]) < version.0);
        assert_eq!(older, None, "seed {seed}: {}", node.name);
    }
}

/// How often one was killed, how many nodes had nothing but cuts, and whether one that believed to be alone
/// knew of more than was there.
fn run(seed: u64, mix: Mix) -> (u64, u64, bool) {
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    // Each step syncs several times, which says nothing here and takes long on a busy disk.
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let dir = dir.unwrap();
    let root = dir.path().join("backing");
    std::fs::create_dir(&root).unwrap();
    let (mut nodes, truth) = cluster(&mut dice, dir.path(), mix);
    let there = std::fs::metadata(root.join("d/f")).map_or(0, |m| m.len());
    let stale = nodes.iter().any(|n| n.note.alone && n.note.header.size > there);
    let places = Places::open(&root).unwrap();
    let board = Board::open(&places, "1").unwrap();
    let mut killed = 0;
    for _ in 0..dice.random_range(0..60) {
        let who = dice.random_range(0..2);
        let at = dice.random_range(0..12);
        let effects = if dice.random_bool(0.4) { at } else { u64::MAX };
        go_on(&mut nodes, who, &places, &board, effects);
        let node = &mut nodes[who];
        killed += u64::from(node.work.is_none());
        if std::mem::take(&mut node.done) {
            check_done(node, &root, seed, (&truth, mix));
        }
    }
    for _ in 0..3 {
        for at in (0..nodes.len()).rev() {
            (0..2).for_each(|_| go_on(&mut nodes, at, &places, &board, u64::MAX));
        }
    }
    let wanted: Vec<u8> = truth.0.iter().map(|b| b.1).collect();
    let somebody = nodes.iter().any(|n| !n.held.is_empty());
    // A file without bytes is made for its name's sake: see `names`.
    let content = if somebody || matches!(mix, Mix::InPlace | Mix::Flushes) {
        std::fs::read(root.join("d/f")).unwrap()
    } else {
        wanted.clone()
    };
    assert!(content == wanted, "seed {seed}: {} bytes, not {}", content.len(), wanted.len());
    let whole = |node: &Node| node.done || node.held.is_empty();
    assert!(nodes.iter().all(whole), "seed {seed}: not whole in the end");
    (killed, nodes.iter().filter(|n| n.told).count() as u64, stale)
}

#[test]
fn the_newest_bytes_win_in_any_order_and_wherever_recoveries_are_killed() {
    let runs = std::env::var("EBB_RECOVERY_RUNS").ok().and_then(|v| v.parse().ok()).unwrap_or(40);
    let killed: u64 = (0..runs).map(|seed| run(seed, Mix::Writes).0).sum();
    assert!(killed > runs / 2, "hardly anything was killed");
}

#[test]
fn what_a_node_cut_stays_away_in_any_order_and_wherever_recoveries_are_killed() {
    let runs = std::env::var("EBB_RECOVERY_RUNS").ok().and_then(|v| v.parse().ok()).unwrap_or(60);
    let all: Vec<_> = (0..runs).map(|seed| run(seed, Mix::Cuts)).collect();
    let (killed, told): (u64, u64) = all.iter().fold((0, 0), |(k, t), r| (k + r.0, t + r.1));
    assert!(killed > runs / 2, "hardly anything was killed");
    assert!(told > runs / 40, "hardly any node had nothing but cuts to tell of: {told}");
}

#[test]
fn what_is_under_its_name_is_as_long_as_it_was_cut_in_any_order() {
    let runs = std::env::var("EBB_RECOVERY_RUNS").ok().and_then(|v| v.parse().ok()).unwrap_or(200);
    let all: Vec<_> = (0..runs).map(|seed| run(seed, Mix::InPlace)).collect();
    let killed: u64 = all.iter().map(|r| r.0).sum();
    assert!(killed > runs / 2, "hardly anything was killed");
    let stale = all.iter().filter(|r| r.2).count() as u64;
    assert!(stale > runs / 20, "hardly anything was cut that a node did not hear of: {stale}");
}

/// It has a byte of a file of its own, as far as it has heard, and another one, which has flushed there since,
/// is just going to say so.
#[test]
fn who_believes_to_be_alone_while_another_one_begins_to_speak_writes_over_nothing() {
    use std::os::unix::fs::MetadataExt;
    for effects in 0..12 {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("backing/d/f");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, [9; 50]).unwrap();
        let looked = std::fs::metadata(&file).unwrap();
        let mut nodes = [node(dir.path(), 0), node(dir.path(), 1)];
        let mut truth = Truth(vec![(1, 9); 50]);
        for (at, range) in [ByteRange::new(0, 30), ByteRange::new(20, 40)].into_iter().enumerate() {
            let (node, mut held) = (&mut nodes[at], Extents::new());
            let seen = Seen { size: 50, mtime: Time { sec: looked.mtime(), nsec: 0 } };
            let seen = (at == 0).then_some(seen);
            let home = Home { path: b"d/f".to_vec(), ino: looked.ino(), seen, changing: at == 1 };
            (node.note.alone, node.note.header.shared) = (at == 0, at == 1);
            node.note.header.home = Some(home);
            write(node, &mut held, range, at as u64 + 2, &mut truth);
            node.held = held.iter().map(|(range, held)| (range, version(held))).collect();
            match at {
                0 => node.note.set_held(held.iter().collect::<Vec<_>>()),
                _ => flush_of(node, &mut held, &file, &truth),
            }
        }
        let places = Places::open(&dir.path().join("backing")).unwrap();
        let board = Board::open(&places, "1").unwrap();
        go_on(&mut nodes, 1, &places, &board, effects);
        for at in [0, 0, 1, 1, 0, 0, 1, 1] {
            go_on(&mut nodes, at, &places, &board, u64::MAX);
        }
        let wanted: Vec<u8> = truth.0.iter().map(|b| b.1).collect();
        assert_eq!(std::fs::read(&file).unwrap(), wanted, "{effects} effects");
    }
}

/// What is flushed is in the file alone, and older bytes in the caches of others.
#[test]
fn what_was_flushed_is_not_written_over_by_who_has_not_heard_of_it() {
    let runs = std::env::var("EBB_RECOVERY_RUNS").ok().and_then(|v| v.parse().ok()).unwrap_or(60);
    let killed: u64 = (0..runs).map(|seed| run(seed, Mix::Flushes).0).sum();
    assert!(killed > runs / 2, "hardly anything was killed");
}

/// Another node knew an older object and an older name only, and has chosen a new one: that takes the place of
/// the object under the name that it has by now, and what users keep with the file goes along.
#[test]
fn what_is_under_its_name_is_replaced_by_the_file_that_others_have_chosen() {
    (0..12).for_each(replaced_by_the_chosen);
}

/// The one that knows of it is killed after so many effects, so that the other one may have to give it its
/// name.
fn replaced_by_the_chosen(effects: u64) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("backing")).unwrap();
    let (mut nodes, truth) = (Vec::new(), Truth(vec![(3, 3); 100]));
    for name in ["older", "newer"] {
        let root = dir.path().join(name);
        std::fs::create_dir(&root).unwrap();
        let (cache, note) = (CacheDir::open(&root).unwrap(), Note::new(header(100)));
        let (held, name) = (Vec::new(), name.to_owned());
        nodes.push(Node {
            name,
            cache,
            note,
            held,
            work: None,
            done: false,
            told: false,
            spoke: false,
        });
    }
    let place = dir.path().join("backing/d/f");
    flush(&mut nodes[1..], &mut [Extents::new()], &place, &truth);
    let file = std::fs::File::open(&place).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    if rustix::fs::fsetxattr(&file, "user.tag", b"kept", flags).is_err() {
        return println!("SKIPPED: no extended attributes in {}", dir.path().display());
    }
    let gone = Home { path: b"d/.ebb-part-1".to_vec(), ino: 1, seen: None, changing: true };
    (nodes[0].note.header.path, nodes[0].note.header.home) = (b"d/old".to_vec(), Some(gone));
    for (node, version) in [(0, 1), (1, 3)] {
        let note = &mut nodes[node].note;
        note.set_held(vec![(ByteRange::new(0, 100), Held::new(Kept::Owned(Version(version))))]);
        note.flush(ByteRange::ALL, Version(version));
        (note.header.shared, note.known) = (true, Version(version));
    }
    (nodes[1].note.cuts, nodes[1].note.overrides) = (vec![(0, Version(2))], true);
    let root = dir.path().join("backing");
    let (places, board) =
        (Places::open(&root).unwrap(), Board::open(&Places::open(&root).unwrap(), "1").unwrap());
    go_on(&mut nodes, 0, &places, &board, u64::MAX);
    for limit in [u64::MAX, effects, u64::MAX, u64::MAX, u64::MAX] {
        go_on(&mut nodes, 1, &places, &board, limit);
        go_on(&mut nodes, 0, &places, &board, u64::MAX);
    }
    assert!(nodes.iter().all(|node| node.done), "it is whole");
    assert!(!root.join("d/old").exists() && std::fs::read(&place).unwrap() == [3; 100]);
    let mut value = [0; 9];
    let len = rustix::fs::getxattr(&place, "user.tag", &mut value).unwrap();
    assert_eq!(&value[..len], b"kept");
    let ino = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&place).unwrap());
    assert_ne!(Some(ino), nodes[1].note.header.home.as_ref().map(|h| h.ino), "it is the new one");
}

pub(super) fn statement(node: &str, claims: &[(u64, u64, u64, Fate)]) -> Statement {
    let claims = claims.iter().map(|(start, end, version, fate)| {
        let key = Key { version: Version(*version), kind: Kind::Published };
        (ByteRange::new(*start, *end), Claim { key, fate: *fate })
    });
    let claims: Extents<Claim> = claims.collect();
    let h = header(0);
    Statement {
        node: node.to_owned(),
        shape: Shape {
            path: h.path,
            perm: h.perm,
            uid: h.uid,
            gid: h.gid,
            atime: h.atime,
            mtime: h.mtime,
        },
        size: claims.end(),
        known: Version(9),
        cuts: Vec::new(),
        alone: false,
        under: None,
        claims,
    }
}

#[test]
fn older_bytes_are_given_up_and_newer_ones_wait_for_older_ones() {
    let mine = statement("b", &[(0, 100, 5, Fate::Pending)]);
    let older = statement("a", &[(0, 10, 4, Fate::Pending), (10, 20, 4, Fate::Written)]);
    let newer = statement("c", &[(50, 60, 6, Fate::Pending), (60, 70, 6, Fate::Lost)]);
    let others = [older, newer];
    let decision = merge::decide(&mine, &others, false);
    let ranges =
        |list: &[(u64, u64)]| list.iter().map(|(a, b)| ByteRange::new(*a, *b)).collect::<Vec<_>>();
    assert_eq!(decision.write, ranges(&[(10, 50), (70, 100)]));
    assert_eq!(decision.overtaken, ranges(&[(50, 70)]));
    assert_eq!(decision.wait, [(ByteRange::new(0, 10), "a".to_owned())]);
    let forced = merge::decide(&mine, &others, true);
    assert_eq!(forced.write, ranges(&[(0, 100)]), "what nobody has brought does not count");
}

#[test]
fn holes_are_missing_unless_somebody_knows_that_they_are_holes() {
    let mut mine = statement("a", &[(0, 10, 1, Fate::Written), (20, 30, 1, Fate::Written)]);
    let missing = merge::missing(std::slice::from_ref(&mine), 0, false);
    assert_eq!(missing.holes, [ByteRange::new(10, 20)]);
    assert!(
        merge::missing(std::slice::from_ref(&mine), 20, false).is_empty(),
        "the backing has them"
    );
    mine.alone = true;
    assert!(merge::missing(std::slice::from_ref(&mine), 0, false).is_empty());
    let both = [mine, statement("b", &[(0, 5, 2, Fate::Pending)])];
    let missing = merge::missing(&both, 0, false);
    assert_eq!(missing.holes, [ByteRange::new(10, 20)], "it was not alone after all");
    assert_eq!(missing.waiting, [(ByteRange::new(0, 5), "b".to_owned())]);
    let missing = merge::missing(&both, 0, true);
    assert!(missing.holes.is_empty(), "nobody else can have it");
    assert_eq!(
        missing.waiting,
        [(ByteRange::new(0, 5), "b".to_owned())],
        "but b has not brought it"
    );
    let longer = Statement { size: 90, ..both[0].clone() };
    let missing = merge::missing(&[longer.clone(), both[1].clone()], 0, true);
    assert_eq!(missing.holes, [ByteRange::new(30, 90)], "it may have been cut since");
    let mut set = both[1].clone();
    set.cuts = vec![(90, Version(3))];
    let missing = merge::missing(&[longer, set], 0, true);
    assert!(missing.holes.is_empty(), "somebody made it so long");
}

#[test]
fn what_is_on_the_backing_behind_a_cut_is_nobodys_word() {
    let mut cutter = statement("a", &[]);
    (cutter.cuts, cutter.size) = (vec![(50, Version(5))], 50);
    let flushed = Statement { known: Version(4), ..statement("b", &[(0, 100, 4, Fate::Written)]) };
    let missing = merge::missing(&[cutter.clone(), flushed.clone()], 100, true);
    assert_eq!(missing.holes, [ByteRange::new(50, 100)], "the cut may have got there, or not");
    assert!(merge::missing(&[cutter.clone(), flushed], 50, true).is_empty(), "it has");
    let newer = statement("b", &[(0, 100, 6, Fate::Written)]);
    assert!(merge::missing(&[cutter, newer], 100, true).is_empty(), "written since");
}

#[test]
fn what_was_cut_off_is_void_for_older_bytes_only() {
    let mut cutter = statement("a", &[]);
    cutter.cuts = vec![(50, Version(5))];
    cutter.size = 50;
    let older = Statement { known: Version(4), ..statement("b", &[(0, 100, 4, Fate::Written)]) };
    assert_eq!(merge::size(&[cutter.clone(), older.clone()]), 50);
    let newer = statement("c", &[(90, 95, 6, Fate::Written)]);
    let all = [cutter, older, newer];
    assert_eq!(merge::size(&all), 95);
    assert_eq!(merge::void(&all, 0), [ByteRange::new(50, 90)]);
}

#[test]
fn statements_are_read_as_they_were_written_and_damage_is_noticed() {
    let said = statement("a", &[(0, 10, 1, Fate::Written), (20, 30, 2, Fate::Lost)]);
    let bytes = said.encode();
    assert_eq!(Statement::decode(&bytes), Some(said));
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 1;
        assert_eq!(Statement::decode(&bad), None, "byte {at}");
        assert_eq!(Statement::decode(&bytes[..at]), None);
    }
}

#[test]
fn a_directory_that_others_can_change_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let places = Places::open(dir.path()).unwrap();
    let at = dir.path().join(".ebb-part-recovery-1");
    std::fs::create_dir(&at).unwrap();
    std::fs::set_permissions(&at, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(Board::open(&places, "1").is_err());
    std::os::unix::fs::symlink(dir.path(), dir.path().join(".ebb-part-recovery-2")).unwrap();
    assert!(Board::open(&places, "2").is_err(), "through a link");
    Board::open(&places, "3").unwrap().leave(&places);
    assert!(!dir.path().join(".ebb-part-recovery-3").exists());
}
