//! The queue against a simulated world: random files, workers, failures, interruptions and
//! drains, and the promises that must hold after every step.

use super::*;
use ebb_types::Errno;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// File length in the simulation, in grants.
const GRANTS: u64 = 4;

fn options(streams: usize) -> Options {
    Options {
        streams_per_file: streams,
        drain_streams_per_file: streams,
        drain_attempts: 3,
        threads: 2,
        ..Options::default()
    }
}

fn io_error() -> FlushError {
    FlushError::Cache { offset: 0, errno: Errno::EIO }
}

/// A file that is brought to the backing alone.
fn large(ino: u64) -> Listed {
    Listed { ino: Ino(ino), bytes: 1 << 30 }
}

/// The only step that a worker gets.
fn one(queue: &mut Queue, lane: Lane, now: Instant) -> Option<Ask> {
    let mut asks = queue.take(lane, u64::MAX, now);
    assert!(asks.len() <= 1, "{asks:?}");
    asks.pop()
}

/// Brings the time to when everything that failed is due again.
fn later(now: Instant) -> Instant {
    now + Duration::from_secs(100)
}

#[test]
fn files_become_whole_one_after_the_other() {
    let activity = crate::Activity::new();
    let now = Instant::now();
    let mut queue = Queue::new(&options(2));
    queue.start_run(vec![large(5), large(6)], Halt::Never, activity.epoch());
    let first = one(&mut queue, Lane::Background, now).unwrap();
    assert_eq!((first.ino, first.from, first.interrupt), (Ino(5), 0, None));
    // While the first is being asked for, others take the next file.
    assert_eq!(one(&mut queue, Lane::Background, now).map(|a| a.ino), Some(Ino(6)));
    assert_eq!(one(&mut queue, Lane::Background, now), None);
    queue.granted(Ino(5), Some(10));
    // A second stream, where the first one ends.
    let second = one(&mut queue, Lane::Background, now).unwrap();
    assert_eq!((second.ino, second.from), (Ino(5), 10));
    queue.granted(Ino(5), Some(20));
    assert_eq!(one(&mut queue, Lane::Background, now), None, "two streams are enough");
    assert!(queue.written(Ino(5), 10, 0, now).is_none());
    assert_eq!(one(&mut queue, Lane::Background, now).map(|a| a.from), Some(20));
    assert!(queue.nothing(Ino(5), now).is_none(), "one stream is still writing");
    let ended = queue.written(Ino(5), 10, 0, now).unwrap();
    assert!(ended.complete && ended.error.is_none());
    assert!(queue.finish_run().is_none(), "the other file is not done");
    assert!(queue.nothing(Ino(6), now).is_some());
    assert!(queue.finish_run().is_some_and(|run| !run.interrupted));
}

#[test]
fn activity_ends_a_run_that_must_give_way() {
    let activity = crate::Activity::new();
    let now = Instant::now();
    let mut queue = Queue::new(&options(1));
    queue.start_run(vec![large(5), large(6)], Halt::OnActivity, activity.epoch());
    let ask = one(&mut queue, Lane::Background, now).unwrap();
    assert_eq!(ask.interrupt, Some(activity.epoch()));
    queue.granted(Ino(5), Some(10));
    assert!(!queue.give_way(activity.epoch()));
    drop(activity.enter());
    assert!(queue.give_way(activity.epoch()));
    assert!(!queue.give_way(activity.epoch()), "said once");
    assert_eq!(one(&mut queue, Lane::Background, now), None);
    assert!(queue.interrupted(Ino(5), now).is_some_and(|e| !e.complete && e.error.is_none()));
    assert!(queue.finish_run().is_some_and(|run| run.interrupted));
}

#[test]
fn a_drain_takes_a_file_over_from_the_background() {
    let activity = crate::Activity::new();
    let now = Instant::now();
    let mut queue = Queue::new(&options(1));
    queue.start_run(vec![large(5), large(6)], Halt::Never, activity.epoch());
    assert!(one(&mut queue, Lane::Background, now).is_some());
    queue.granted(Ino(5), Some(10));
    let id = queue.begin_drain(&[large(5)], false);
    assert_eq!(one(&mut queue, Lane::Drain, now), None, "one pass of a file at a time");
    assert!(queue.written(Ino(5), 10, 0, now).is_some_and(|e| !e.complete));
    let ask = one(&mut queue, Lane::Drain, now).unwrap();
    assert_eq!((ask.ino, ask.from), (Ino(5), 0), "from the beginning");
    assert_eq!(one(&mut queue, Lane::Background, now).map(|a| a.ino), Some(Ino(6)));
    queue.granted(Ino(5), None);
    assert!(queue.written(Ino(5), 7, 7, now).is_some_and(|e| e.complete));
    let drain = queue.end_drain(id).unwrap();
    assert_eq!((drain.files_done, drain.bytes, drain.verified_bytes), (1, 17, 7));
    assert!(drain.pending.is_empty());
}

#[test]
fn a_pass_older_than_the_drain_proves_nothing() {
    let now = Instant::now();
    let mut queue = Queue::new(&options(1));
    let first = queue.begin_drain(&[large(5)], false);
    assert!(one(&mut queue, Lane::Drain, now).is_some());
    queue.granted(Ino(5), None);
    let second = queue.begin_drain(&[large(5)], true);
    assert!(queue.draining_everything());
    assert_eq!(one(&mut queue, Lane::Drain, now), None);
    assert!(queue.written(Ino(5), 1, 1, now).is_some());
    assert!(queue.drain(first).is_some_and(|d| d.pending.is_empty()));
    assert!(queue.drain(second).is_some_and(|d| d.pending.len() == 1));
    assert!(one(&mut queue, Lane::Drain, now).is_some());
    assert!(queue.nothing(Ino(5), now).is_some());
    assert!(queue.drain(second).is_some_and(|d| d.pending.is_empty()));
}

#[test]
fn a_drain_gives_a_file_up_after_its_attempts() {
    let mut now = Instant::now();
    let mut queue = Queue::new(&options(1));
    let id = queue.begin_drain(&[large(5)], true);
    for attempt in 1..=3 {
        assert!(one(&mut queue, Lane::Drain, now).is_some(), "attempt {attempt}");
        assert!(queue.refused(Ino(5), io_error(), now).is_some());
        assert_eq!(one(&mut queue, Lane::Drain, now), None, "not before its pause");
        now = later(now);
    }
    assert_eq!(one(&mut queue, Lane::Drain, now), None);
    let drain = queue.end_drain(id).unwrap();
    assert!(drain.pending.is_empty());
    assert_eq!(drain.given_up, [(Ino(5), io_error())]);
    assert_eq!(drain.files_done, 0);
}

#[test]
fn one_bad_place_does_not_keep_the_rest_of_a_file_back() {
    let now = Instant::now();
    let mut queue = Queue::new(&options(1));
    let id = queue.begin_drain(&[large(5)], true);
    assert!(one(&mut queue, Lane::Drain, now).is_some());
    queue.granted(Ino(5), Some(10));
    assert!(queue.failed(Ino(5), io_error(), now).is_none());
    assert_eq!(one(&mut queue, Lane::Drain, now).map(|a| a.from), Some(10));
    queue.granted(Ino(5), None);
    let ended = queue.written(Ino(5), 1, 1, now).unwrap();
    assert!(ended.complete && ended.error == Some(io_error()));
    assert!(queue.drain(id).is_some_and(|d| d.pending.contains_key(&Ino(5))), "tried again");
}

#[test]
fn small_files_are_taken_together() {
    let now = Instant::now();
    let mut queue = Queue::new(&options(1));
    let small = (0..10).map(|ino| Listed { ino: Ino(ino), bytes: 10 });
    let files: Vec<Listed> = small.chain([large(10)]).collect();
    queue.begin_drain(&files, true);
    let take = |queue: &mut Queue, most| -> Vec<u64> {
        queue.take(Lane::Drain, most, now).iter().map(|ask| ask.ino.0).collect()
    };
    assert_eq!(take(&mut queue, 1000), [0, 1, 2, 3, 4], "half of them for each of two threads");
    assert_eq!(take(&mut queue, 20), [5, 6], "no more bytes than asked for");
    // The one that did not fit any more; then a share of what is left.
    assert_eq!(take(&mut queue, 1000), [7]);
    assert_eq!(take(&mut queue, 1000), [8]);
    assert_eq!(take(&mut queue, 1000), [9]);
    assert_eq!(take(&mut queue, 1000), [10]);
    assert_eq!(take(&mut queue, 1000), [0u64; 0]);
}

#[derive(Clone, Debug)]
enum Act {
    StartRun(bool),
    Activity,
    StopRun,
    Drain(u8),
    EndOldestDrain,
    Take(bool),
    /// The oldest open question or write is answered in this way.
    Answer(u8),
    Time,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        2 => any::<bool>().prop_map(Act::StartRun),
        1 => Just(Act::Activity),
        1 => Just(Act::StopRun),
        2 => any::<u8>().prop_map(Act::Drain),
        1 => Just(Act::EndOldestDrain),
        10 => any::<bool>().prop_map(Act::Take),
        14 => (0u8..10).prop_map(Act::Answer),
        1 => Just(Act::Time),
    ];
    proptest::collection::vec(act, 0..200)
}

/// Some of them small.
const FILES: u64 = 8;
/// What a worker may take at once.
const MOST: u64 = 5 * SMALL / 2;

fn listed(ino: u64) -> Listed {
    Listed { ino: Ino(ino), bytes: [SMALL, SMALL / 2, 1, 2 * SMALL][ino as usize % 4] }
}

/// What the simulated workers are doing.
enum Busy {
    /// With the step at which it was taken.
    Asking(Lane, Ask, u64),
    /// The same, of its question.
    Writing(Lane, Ino, u64, u64),
}

/// A drain and when it began; what it waits for.
struct Begun {
    id: DrainId,
    step: u64,
    waits_for: HashSet<Ino>,
}

struct World {
    queue: Queue,
    activity: std::sync::Arc<crate::Activity>,
    now: Instant,
    busy: VecDeque<Busy>,
    drains: VecDeque<Begun>,
    streams: usize,
    step: u64,
    /// The latest question about each grant of each file that ended well.
    well: HashMap<(Ino, u64), u64>,
}

impl World {
    fn act(&mut self, act: &Act) {
        match act {
            Act::StartRun(idle) if self.queue.run_halt().is_none() => {
                let halt = if *idle { Halt::OnActivity } else { Halt::Never };
                self.queue.start_run((0..FILES).map(listed).collect(), halt, self.activity.epoch());
            }
            Act::StartRun(_) => {}
            Act::Activity => {
                drop(self.activity.enter());
                self.queue.give_way(self.activity.epoch());
            }
            Act::StopRun => self.queue.stop_run(),
            Act::Drain(set) => {
                let files: Vec<Listed> =
                    (0..FILES).filter(|i| set & (1 << i) != 0).map(listed).collect();
                let id = self.queue.begin_drain(&files, *set == u8::MAX);
                let waits_for = files.into_iter().map(|f| f.ino).collect();
                self.drains.push_back(Begun { id, step: self.step, waits_for });
            }
            Act::EndOldestDrain => {
                if let Some(begun) = self.drains.pop_front() {
                    assert!(self.queue.end_drain(begun.id).is_some());
                }
            }
            Act::Take(background) => {
                let lane = if *background { Lane::Background } else { Lane::Drain };
                self.take(lane);
            }
            Act::Answer(how) => self.answer(*how),
            Act::Time => self.now = later(self.now),
        }
        self.queue.settle_all(self.now);
        self.queue.finish_run();
    }

    fn take(&mut self, lane: Lane) -> bool {
        let asks = self.queue.take(lane, MOST, self.now);
        let bytes: u64 = asks.iter().map(|ask| listed(ask.ino.0).bytes).sum();
        let small = asks.iter().all(|ask| ask.small && listed(ask.ino.0).bytes <= SMALL);
        assert!(asks.len() < 2 || (small && bytes <= MOST), "{asks:?}");
        self.step += 1;
        for ask in &asks {
            self.busy.push_back(Busy::Asking(lane, *ask, self.step));
        }
        !asks.is_empty()
    }

    fn saw(&mut self, ino: Ino, grants: std::ops::Range<u64>, asked: u64) {
        for grant in grants {
            let latest = self.well.entry((ino, grant)).or_default();
            *latest = (*latest).max(asked);
        }
    }

    fn answer(&mut self, how: u8) {
        match self.busy.pop_front() {
            Some(Busy::Asking(lane, ask, asked)) => match how {
                0 => {
                    self.saw(ask.ino, ask.from..GRANTS, asked);
                    drop(self.queue.nothing(ask.ino, self.now));
                }
                1 => drop(self.queue.refused(ask.ino, io_error(), self.now)),
                _ => {
                    let next = (ask.from + 1 < GRANTS).then_some(ask.from + 1);
                    self.queue.granted(ask.ino, next);
                    self.busy.push_back(Busy::Writing(lane, ask.ino, ask.from, asked));
                }
            },
            Some(Busy::Writing(_, ino, from, asked)) => match how {
                0 => drop(self.queue.failed(ino, io_error(), self.now)),
                1 => drop(self.queue.interrupted(ino, self.now)),
                _ => {
                    self.saw(ino, from..from + 1, asked);
                    drop(self.queue.written(ino, 1, 1, self.now));
                }
            },
            None => {}
        }
    }

    fn check(&self) {
        let mut asking: HashSet<Ino> = HashSet::new();
        let mut on: HashMap<Ino, (Lane, usize)> = HashMap::new();
        for busy in &self.busy {
            let (lane, ino) = match busy {
                Busy::Asking(lane, ask, _) => {
                    assert!(asking.insert(ask.ino), "two ask for {:?} at once", ask.ino);
                    (*lane, ask.ino)
                }
                Busy::Writing(lane, ino, ..) => (*lane, *ino),
            };
            let entry = on.entry(ino).or_insert((lane, 0));
            assert_eq!(entry.0, lane, "{ino:?} is in both lanes");
            entry.1 += 1;
        }
        for (ino, (_, workers)) in on {
            assert!(workers <= self.streams, "{workers} on {ino:?}");
        }
        assert_eq!(self.queue.in_flight(), self.busy.len());
        self.check_drains();
    }

    /// What a drain calls done was asked for after it began, from first to last byte, and
    /// written or found needless.
    fn check_drains(&self) {
        for begun in &self.drains {
            let drain = self.queue.drain(begun.id).unwrap();
            for ino in &begun.waits_for {
                let given_up = drain.given_up.iter().any(|(i, _)| i == ino);
                if drain.pending.contains_key(ino) || given_up {
                    continue;
                }
                for grant in 0..GRANTS {
                    let asked = self.well.get(&(*ino, grant)).copied();
                    assert!(asked > Some(begun.step), "{ino:?}: grant {grant} was left out");
                }
            }
        }
    }

    /// From any state, healthy workers bring everything to an end.
    fn finish(&mut self) {
        for _ in 0..1000 {
            self.now = later(self.now);
            for lane in [Lane::Background, Lane::Drain] {
                while self.take(lane) {}
            }
            if self.busy.is_empty() {
                break;
            }
            self.answer(9);
            self.queue.settle_all(self.now);
            self.check();
        }
        assert!(self.busy.is_empty());
        self.queue.finish_run();
        assert!(self.queue.run_halt().is_none(), "the run never ends");
        assert!(self.queue.passes.is_empty(), "a pass never ends");
        for begun in &self.drains {
            let drain = self.queue.drain(begun.id).unwrap();
            assert!(drain.pending.is_empty(), "a drain never ends");
        }
    }
}

proptest! {
    // Cheap cases; the rare interleavings need many.
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn promises_hold_and_everything_ends(acts in acts(), streams in 1usize..4) {
        let mut world = World {
            queue: Queue::new(&options(streams)),
            activity: crate::Activity::new(),
            now: Instant::now(),
            busy: VecDeque::new(),
            drains: VecDeque::new(),
            streams,
            step: 0,
            well: HashMap::new(),
        };
        for act in &acts {
            world.act(act);
            world.check();
        }
        world.finish();
    }
}
