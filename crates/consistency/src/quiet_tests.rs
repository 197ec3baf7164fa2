//! Quiet writes against an array with one element per byte: one node that writes quietly, is asked,
//! is given up and comes back; another one that writes and cuts.

use super::*;
use crate::planted::every_one_is_caught;
use ebb_types::ByteRange;
use std::collections::BTreeSet;

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);
const BYTES: u64 = 60;

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// What was written quietly is attached whatever others did since.
    SettleOverwrites,
    /// A node that may have written is given up and its bytes are not made its own.
    ForgetConversion,
    /// Others go on without asking the node.
    SkipSettle,
    /// What was never written is not given back.
    KeepUnwritten,
}

/// Who wrote a byte last, as everybody must see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Last {
    #[default]
    Nobody,
    ByA,
    ByB,
}

struct World {
    file: FileState,
    last: [Last; BYTES as usize],
    size: u64,
    /// What A wrote quietly and has not told, since a grant at that version.
    deferred: BTreeSet<u64>,
    since: Version,
    /// A believes that it may write quietly.
    holds: bool,
    /// A was given up and does not know it yet.
    lost: bool,
    random: u64,
    bug: Option<Bug>,
}

impl World {
    fn new(seed: u64, bug: Option<Bug>) -> World {
        World {
            file: FileState::new(0),
            last: [Last::Nobody; BYTES as usize],
            size: 0,
            deferred: BTreeSet::new(),
            since: Version::ZERO,
            holds: false,
            lost: false,
            random: (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            bug,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % n
    }

    fn range(&mut self) -> ByteRange {
        let start = self.below(BYTES - 8);
        let len = 1 + self.below(8);
        ByteRange::at(start, len)
    }

    fn step(&mut self) {
        let range = self.range();
        match self.below(12) {
            0..2 => self.write_by_a(range),
            2..6 => self.write_quietly(range),
            6 => self.settle(true),
            7 => self.write_by_b(range),
            8 => self.cut_by_b(range.start()),
            9 => self.give_up(),
            10 => self.come_back(),
            _ => self.flush(range),
        }
    }

    /// An attach of A, which tells everything and asks for more.
    fn write_by_a(&mut self, range: ByteRange) {
        if self.lost {
            self.come_back();
        }
        self.settle(false);
        self.file.attach(A, &[range]);
        self.wrote(range, Last::ByA);
        let end = self.file.size() + 10;
        self.file.lend_quiet(A, end.min(BYTES));
        (self.holds, self.since) = (true, self.file.version());
    }

    fn wrote(&mut self, range: ByteRange, by: Last) {
        range.to_std().for_each(|b| self.last[b as usize] = by);
        self.size = self.size.max(range.end());
    }

    fn write_quietly(&mut self, range: ByteRange) {
        let Some(quiet) = self.file.quiet().filter(|_| self.holds && !self.lost) else { return };
        let allowed = |b: u64| {
            let own = self.file.owned_in(ByteRange::at(b, 1)).any(|o| o.node == A && !o.flushed);
            own || self.deferred.contains(&b) || quiet.window.contains_offset(b)
        };
        if range.to_std().all(allowed) {
            self.deferred.extend(range.to_std());
            self.wrote(range, Last::ByA);
        }
    }

    /// A tells what it wrote.
    fn settle(&mut self, last: bool) {
        let ranges: Vec<ByteRange> =
            std::mem::take(&mut self.deferred).into_iter().map(|b| ByteRange::at(b, 1)).collect();
        let (granted, _) = match self.bug {
            Some(Bug::SettleOverwrites) => (ranges, Vec::new()),
            _ => self.file.judge_quiet(A, &ranges, self.since),
        };
        self.file.attach(A, &granted);
        if self.bug != Some(Bug::KeepUnwritten) {
            self.file.take_back(A);
        }
        if last {
            self.file.end_quiet(A);
            self.holds = false;
        }
    }

    /// What others do comes after what A was told to tell.
    fn before_others(&mut self) {
        if !self.lost && self.bug != Some(Bug::SkipSettle) {
            self.settle(true);
        }
    }

    fn write_by_b(&mut self, range: ByteRange) {
        self.before_others();
        self.file.attach(B, &[range]);
        self.wrote(range, Last::ByB);
    }

    fn cut_by_b(&mut self, len: u64) {
        self.before_others();
        // Of a file that is as long as A may have written, nobody knows the length.
        if self.lost {
            return;
        }
        self.file.truncate(len);
        self.last[len as usize..].fill(Last::Nobody);
        self.size = len;
    }

    /// A is not heard any more.
    fn give_up(&mut self) {
        if self.file.quiet().is_none() {
            return;
        }
        self.lost = true;
        match self.bug {
            Some(Bug::ForgetConversion) => self.file.end_quiet(A),
            _ => drop(self.file.lapse()),
        }
    }

    fn come_back(&mut self) {
        if !std::mem::take(&mut self.lost) {
            return;
        }
        self.settle(true);
    }

    fn flush(&mut self, range: ByteRange) {
        if self.lost || self.deferred.iter().any(|b| range.contains_offset(*b)) {
            return;
        }
        let granted = self.file.grantable(A, &[range]);
        self.file.mark_flushed(A, &granted);
        if self.below(2) == 0 {
            let flushed: Vec<ByteRange> = granted.iter().map(|o| o.range).collect();
            self.file.detach(A, &flushed).expect("just flushed");
        }
    }

    /// What another node would read, were it to ask now.
    fn wrong(&mut self) -> Option<String> {
        if !self.lost {
            self.before_others();
        }
        for byte in 0..BYTES {
            let owner = self.file.owned_in(ByteRange::at(byte, 1)).next().map(|o| o.node);
            let last = self.last[byte as usize];
            let inside = byte < self.file.size();
            let right = match last {
                // Zeros, or an error while nobody knows whether A wrote here.
                Last::Nobody => owner.is_none() || (self.lost && owner == Some(A)),
                Last::ByA => owner == Some(A) || (owner.is_none() && byte < self.file.base_len()),
                Last::ByB => owner == Some(B),
            };
            if !right || (last != Last::Nobody && !inside) {
                return Some(format!("byte {byte}: {last:?} wrote it, {owner:?} has it"));
            }
        }
        let size = self.file.size();
        let right = if self.lost { size >= self.size } else { size == self.size };
        (!right).then(|| format!("{size} bytes in place of {}", self.size))
    }
}

fn run(seed: u64, bug: Option<Bug>) -> Result<(), String> {
    let mut world = World::new(seed, bug);
    for step in 0..60 {
        world.step();
        // Seldom, so that quiet writes add up.
        if world.below(6) == 0
            && let Some(what) = world.wrong()
        {
            return Err(format!("seed {seed}, step {step}: {what}"));
        }
    }
    world.come_back();
    world.wrong().map_or(Ok(()), |what| Err(format!("seed {seed}, at the end: {what}")))
}

#[test]
fn what_was_written_quietly_is_seen_or_an_error() {
    (0..20_000).for_each(|seed| run(seed, None).unwrap_or_else(|e| panic!("{e}")));
}

#[test]
fn every_planted_bug_is_caught() {
    let bugs = [Bug::SettleOverwrites, Bug::ForgetConversion, Bug::SkipSettle, Bug::KeepUnwritten];
    every_one_is_caught(&bugs, 5_000, run);
}

#[test]
fn a_node_that_comes_back_gives_back_what_it_never_wrote() {
    let mut file = FileState::new(0);
    file.attach(A, &[ByteRange::new(0, 10)]);
    file.lend_quiet(A, 100);
    let known = file.version();
    file.lapse();
    assert_eq!((file.size(), file.quiet()), (100, None));
    assert!(file.has_lapsed(A));
    let (granted, refused) = file.judge_quiet(A, &[ByteRange::new(12, 30)], known);
    assert_eq!((granted.clone(), refused), (vec![ByteRange::new(12, 30)], vec![]));
    file.attach(A, &granted);
    file.take_back(A);
    assert_eq!((file.size(), file.has_lapsed(A)), (30, false));
    assert_eq!(file.owned_in(ByteRange::new(10, 12)).count(), 0);
}

#[test]
fn it_is_stored_beside_the_state() {
    let mut file = FileState::new(5);
    assert_eq!(file.stored_quiet(), None);
    file.lend_quiet(A, 50);
    let stored = file.stored_quiet().expect("somebody is quiet");
    let bytes = postcard::to_stdvec(&file).expect("a state");
    let mut read: FileState = postcard::from_bytes(&bytes).expect("the same");
    read.restore_quiet(
        &postcard::from_bytes(&postcard::to_stdvec(&stored).expect("it")).expect("it"),
    );
    assert_eq!(read, file);
}
