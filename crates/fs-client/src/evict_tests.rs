//! The order of eviction against a list of all uses that is searched anew for every question.

use super::*;
use proptest::prelude::*;

const ALL: [EvictPolicy; 4] =
    [EvictPolicy::Lru, EvictPolicy::Mru, EvictPolicy::Fifo, EvictPolicy::Lfu];

#[derive(Clone, Debug)]
enum Step {
    Touch(u64, u64),
    Remember(u64, u64),
    /// Out and in again, as when an eviction finds that not all of it may go.
    OutAndBack(u64, u64),
    /// The same, and it is used in between.
    OutUsedAndBack(u64, u64),
    Take(u64, u64),
    TakeFile(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let at = || (1u64..4, 0u64..4);
    prop_oneof![
        6 => at().prop_map(|(f, i)| Step::Touch(f, i)),
        1 => at().prop_map(|(f, i)| Step::Remember(f, i)),
        1 => at().prop_map(|(f, i)| Step::OutAndBack(f, i)),
        1 => at().prop_map(|(f, i)| Step::OutUsedAndBack(f, i)),
        1 => at().prop_map(|(f, i)| Step::Take(f, i)),
        1 => (1u64..4).prop_map(Step::TakeFile),
    ]
}

/// The reference: every use of what is in, oldest first, one entry for each use.
#[derive(Default)]
struct Uses(Vec<Chunk>);

impl Uses {
    fn in_order(&self, policy: EvictPolicy) -> Vec<Chunk> {
        let mut chunks: Vec<Chunk> = Vec::new();
        for chunk in &self.0 {
            if !chunks.contains(chunk) {
                chunks.push(*chunk);
            }
        }
        let last = |c: &Chunk| self.0.iter().rposition(|u| u == c).unwrap();
        let first = |c: &Chunk| self.0.iter().position(|u| u == c).unwrap();
        let visits = |c: &Chunk| self.0.iter().filter(|u| *u == c).count();
        chunks.sort_by(|a, b| match policy {
            EvictPolicy::Lru => last(a).cmp(&last(b)),
            EvictPolicy::Mru => last(b).cmp(&last(a)),
            EvictPolicy::Fifo => first(a).cmp(&first(b)),
            EvictPolicy::Lfu => visits(a).cmp(&visits(b)).then(last(a).cmp(&last(b))),
        });
        chunks
    }
}

proptest! {
    #[test]
    fn the_order_is_that_of_the_uses(
        steps in proptest::collection::vec(step(), 0..60),
        batch in 1usize..5,
    ) {
        for policy in ALL {
            let (mut order, mut uses) = (Order::new(policy), Uses::default());
            for step in &steps {
                match step.clone() {
                    Step::Touch(f, index) => {
                        let chunk = Chunk { ino: Ino(f), index };
                        order.touch(chunk);
                        uses.0.push(chunk);
                    }
                    Step::Remember(f, index) => {
                        let chunk = Chunk { ino: Ino(f), index };
                        order.remember(chunk);
                        if !uses.0.contains(&chunk) {
                            uses.0.push(chunk);
                        }
                    }
                    Step::OutAndBack(f, index) => {
                        let chunk = Chunk { ino: Ino(f), index };
                        if let Some(old) = order.take(chunk) {
                            order.put_back(chunk, old);
                        }
                    }
                    Step::OutUsedAndBack(f, index) => {
                        let chunk = Chunk { ino: Ino(f), index };
                        let old = order.take(chunk);
                        order.touch(chunk);
                        uses.0.retain(|c| *c != chunk);
                        uses.0.push(chunk);
                        if let Some(old) = old {
                            order.put_back(chunk, old);
                        }
                    }
                    Step::Take(f, index) => {
                        let chunk = Chunk { ino: Ino(f), index };
                        prop_assert_eq!(order.take(chunk).is_some(), uses.0.contains(&chunk));
                        uses.0.retain(|c| *c != chunk);
                    }
                    Step::TakeFile(f) => {
                        order.take_file(Ino(f));
                        uses.0.retain(|c| c.ino != Ino(f));
                    }
                }
            }
            let mut got: Vec<Chunk> = Vec::new();
            let mut at = None;
            loop {
                let next = order.behind(at, batch);
                prop_assert!(next.len() <= batch);
                let Some(last) = next.last() else { break };
                at = Some(*last);
                got.extend(next.iter().map(|place| place.chunk()));
            }
            prop_assert_eq!(order.len(), got.len());
            prop_assert_eq!(got, uses.in_order(policy), "{:?}", policy);
        }
    }

    #[test]
    fn chunks_cover_a_range_and_no_more(start in 0u64..1 << 30, len in 0u64..64 << 20) {
        let range = ByteRange::at(start, len);
        let chunks: Vec<Chunk> = Chunk::of(Ino(7), range).collect();
        let covered: u64 = chunks.iter().map(|c| c.range().intersect(range).len()).sum();
        prop_assert_eq!(covered, len);
        prop_assert!(chunks.iter().all(|c| c.range().overlaps(range)));
    }
}

#[test]
fn every_policy_has_a_row_and_reads_as_written() {
    for policy in ALL {
        assert!(Order::new(policy).is_empty());
        let word = serde_json::to_value(policy).unwrap();
        assert_eq!(serde_json::from_value::<EvictPolicy>(word).unwrap(), policy);
    }
}
