//! Two nodes that store into one file through shared mappings, under each model and on both data
//! paths: what docs/semantics.md says of mappings. What it promises must be on both mounts and on
//! the backing; of stores into one page at the same time, one of the results that it allows.

use ebb_testkit::{Cluster, Node, record_lock, skip_reason};
use ebb_tests::content::same;
use ebb_tests::mapping::Map;
use ebb_tests::model::{Model, close};
use ebb_tests::nodes::open;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Barrier;

const ROUNDS: usize = 6;
const PAGE: usize = 4096;
/// The last page is no whole one.
const LEN: usize = 3 * PAGE - 777;

/// Who stores a byte: of three in a row one each, and one nobody. No two neighbours are of one
/// node.
fn storer(round: usize, at: usize) -> Option<usize> {
    match (at + round) % 3 {
        2 => None,
        who => Some(who),
    }
}

/// What is stored there: of each node other values, and other ones than were there before.
fn stored(who: usize, round: usize, at: usize) -> u8 {
    let spread = (at * 31 + round * 7) % 80;
    (1 + 80 * who + spread) as u8
}

/// What was there before: in every other round nothing but a length.
fn before(round: usize) -> Vec<u8> {
    let old = |at: usize| if round.is_multiple_of(2) { 0 } else { 200 + (at % 50) as u8 };
    (0..LEN).map(old).collect()
}

/// One file in one round of one program.
struct Scene<'a> {
    nodes: [&'a Node; 2],
    name: String,
    round: usize,
}

impl Scene<'_> {
    fn path(&self, who: usize) -> PathBuf {
        self.nodes[who].path(&self.name)
    }

    /// Offsets in these bytes of the file that `who` stores.
    fn own(&self, who: usize, bytes: std::ops::Range<usize>) -> impl Iterator<Item = usize> {
        let round = self.round;
        bytes.filter(move |at| storer(round, *at) == Some(who))
    }

    fn store(&self, map: &Map, who: usize, bytes: std::ops::Range<usize>) {
        for at in self.own(who, bytes) {
            map.store(at, &[stored(who, self.round, at)]);
        }
    }

    /// Puts what `who` stores there into what should be there.
    fn expect(&self, want: &mut [u8], who: usize, bytes: std::ops::Range<usize>) {
        for at in self.own(who, bytes) {
            want[at] = stored(who, self.round, at);
        }
    }

    /// Opens and maps, and has the pages there.
    fn mapped(&self, who: usize) -> (File, Map) {
        let file = open(&self.path(who));
        let map = Map::shared(&file, LEN);
        assert_eq!(map.load(0, LEN).len(), LEN);
        (file, map)
    }

    /// Publishes what was stored: with msync in some rounds, by munmap and close alone in the
    /// others.
    fn publish(&self, file: File, map: Map) {
        if !self.round.is_multiple_of(3) {
            map.sync();
        }
        drop(map);
        close(file).expect("close");
    }

    fn read(&self, who: usize) -> Vec<u8> {
        std::fs::read(self.path(who)).expect("read")
    }

    /// Both nodes do their part at the same time, with the file mapped from before until after
    /// both.
    fn at_the_same_time(&self, bytes: [std::ops::Range<usize>; 2]) {
        let barrier = Barrier::new(2);
        std::thread::scope(|threads| {
            for (who, bytes) in bytes.into_iter().enumerate() {
                let barrier = &barrier;
                threads.spawn(move || {
                    let (file, map) = self.mapped(who);
                    barrier.wait();
                    self.store(&map, who, bytes);
                    barrier.wait();
                    self.publish(file, map);
                });
            }
        });
    }
}

const WHOLE: std::ops::Range<usize> = 0..LEN;

/// One node after the other: maps, stores, publishes.
fn l14_one_page_in_turn(s: &Scene) -> Vec<u8> {
    let mut want = before(s.round);
    for who in [0, 1] {
        let (file, map) = s.mapped(who);
        same("loaded", &map.load(0, LEN), &want);
        s.store(&map, who, WHOLE);
        s.expect(&mut want, who, WHOLE);
        s.publish(file, map);
    }
    want
}

/// Of the handle, for both nodes are in one process.
fn lock(file: &File, kind: libc::c_int) {
    record_lock(file, libc::F_OFD_SETLKW, kind, (0, 0)).expect("lock");
}

/// Both have it mapped all the time; who stores has a lock, and ends with msync.
fn l15_one_page_under_locks(s: &Scene) -> Vec<u8> {
    let mut want = before(s.round);
    let open = [s.mapped(0), s.mapped(1)];
    for turn in 0..4 {
        let who = turn % 2;
        let part = LEN * (turn / 2) / 2..LEN * (turn / 2 + 1) / 2;
        let (file, map) = &open[who];
        lock(file, libc::F_WRLCK);
        same(&format!("loaded in turn {turn}"), &map.load(0, LEN), &want);
        s.store(map, who, part.clone());
        s.expect(&mut want, who, part);
        map.sync();
        lock(file, libc::F_UNLCK);
    }
    for (file, map) in open {
        s.publish(file, map);
    }
    want
}

/// Each in pages of its own.
fn l16_two_pages_at_the_same_time(s: &Scene) -> Vec<u8> {
    let bytes = [0..PAGE, PAGE..LEN];
    s.at_the_same_time(bytes.clone());
    let mut want = before(s.round);
    for (who, bytes) in bytes.into_iter().enumerate() {
        s.expect(&mut want, who, bytes);
    }
    want
}

/// A page is written back as a whole, or byte by byte: all that one of them has stored is there,
/// and of the other's each byte is, or is as before.
fn l17_one_page_at_the_same_time(s: &Scene) -> Vec<u8> {
    let bytes = PAGE..2 * PAGE;
    s.at_the_same_time([bytes.clone(), bytes.clone()]);
    let (old, got) = (before(s.round), s.read(0));
    let is_there = |who| s.own(who, bytes.clone()).all(|at| got[at] == stored(who, s.round, at));
    for (at, byte) in got.iter().enumerate() {
        let may_be = storer(s.round, at).filter(|_| bytes.contains(&at));
        let may_be = may_be.map(|who| stored(who, s.round, at));
        assert!(*byte == old[at] || may_be == Some(*byte), "{byte} at {at} is nobody's");
    }
    assert!(is_there(0) || is_there(1), "of both something is lost");
    got
}

type Program = (&'static str, fn(&Scene<'_>) -> Vec<u8>);

const PROGRAMS: [Program; 4] = [
    ("L14", l14_one_page_in_turn),
    ("L15", l15_one_page_under_locks),
    ("L16", l16_two_pages_at_the_same_time),
    ("L17", l17_one_page_at_the_same_time),
];

/// Every program under one model; how many opens went past the daemons.
fn run_all(model: Model, io_path: &str) -> u64 {
    let builder = Cluster::builder().nodes(2).consistency(model.name());
    let cluster = builder.option("--io-path", io_path).start();
    let mut there = Vec::new();
    for ((name, program), round) in PROGRAMS.iter().flat_map(|p| (0..ROUNDS).map(move |r| (p, r))) {
        let first = round / 2 % 2;
        let nodes = [cluster.node(first), cluster.node(1 - first)];
        let scene = Scene { nodes, name: format!("{name}-{round}"), round };
        prepare(&scene);
        let what = format!("{} under {} ({io_path})", scene.name, model.name());
        let run = std::panic::AssertUnwindSafe(|| program(&scene));
        let outcome = std::panic::catch_unwind(run);
        let want = outcome.unwrap_or_else(|_| panic!("{what}"));
        for who in [0, 1] {
            same(&format!("{what}: node {who}"), &scene.read(who), &want);
        }
        there.push((scene.name.clone(), want));
    }
    let past = cluster.nodes().iter().map(past_the_daemon).sum();
    cluster.umount_all();
    for (name, want) in there {
        let got = std::fs::read(cluster.backing().join(&name)).expect("on the backing");
        same(&format!("{name} under {} ({io_path}): backing", model.name()), &got, &want);
    }
    past
}

fn prepare(scene: &Scene) {
    let file = open(&scene.path(0));
    if scene.round.is_multiple_of(2) {
        file.set_len(LEN as u64).expect("extend");
    } else {
        std::fs::write(scene.path(0), before(scene.round)).expect("write");
    }
    close(file).expect("close");
}

/// Opens for writing whose mappings the daemon did not see.
fn past_the_daemon(node: &Node) -> u64 {
    node.status()["opens"]["passthrough-write"].as_u64().unwrap_or(0)
}

#[test]
fn through_the_daemon() {
    if skip_reason().is_some() {
        return;
    }
    for model in Model::ALL {
        assert_eq!(run_all(model, "daemon"), 0, "{}", model.name());
    }
}

#[test]
fn past_the_daemon_under_every_model() {
    if skip_reason().is_some() {
        return;
    }
    for model in Model::ALL {
        assert!(run_all(model, "auto") > 0, "{}: nothing was past the daemon", model.name());
    }
}
