//! The races of a [`Run`], grouped and counted. What a race is, [`crate::checker`] defines; this is the
//! same for millions of operations, and is compared with it by a property test.
//!
//! Accesses of one process at one place in the program to the same bytes are a *bundle*. A sweep over
//! each file finds the bundles of different processes that meet, one of which writes. Whether one access is
//! in order before another one gets no truer the later the first and no falser the later the second is, so
//! for each access of the smaller bundle those of the larger one that race with it are a stretch, of
//! which two binary searches find the ends. The time is n log n in the accesses, and linear in the pairs
//! of bundles that meet; pairs of accesses are counted without being made.

use crate::checker::{File, Missing, Process};
use crate::model::Model;
use crate::msc::Msc;
use crate::run::{Access, Act, Run, Site};
use ebb_types::ByteRange;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Processes that a sweep looks at although nothing of them is open.
const IDLE_MAX: usize = 16;
/// No step, or no segment.
const NONE: u32 = u32::MAX;

/// One of two accesses that race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Party {
    /// Who.
    pub process: Process,
    /// Its step ([`Run::step`]).
    pub step: u32,
    /// What it does.
    pub act: Act,
    /// Where in the program.
    pub site: Site,
    /// The bytes that it touches.
    pub range: ByteRange,
}

/// Two accesses that race.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// The one that was told first.
    pub first: Party,
    /// The other.
    pub second: Party,
    /// The bytes that both touch.
    pub range: ByteRange,
    /// What is missing between them.
    pub missing: Missing,
}

/// All races of a file between two places in the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The file.
    pub file: File,
    /// From the first byte to the last one that is raced for.
    pub hull: ByteRange,
    /// Pairs of accesses.
    pub pairs: u64,
    /// Those of them that nothing orders.
    pub unordered: u64,
    /// The earliest one.
    pub example: Example,
    /// Its place in the run: the later access, then the earlier one.
    at: (u32, u32),
}

/// What a model makes of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The races, in the order of their files and examples.
    pub groups: Vec<Group>,
    /// Pairs of accesses that conflict, racing or not.
    pub conflicts: u64,
}

impl Verdict {
    /// How many pairs race.
    #[must_use]
    pub fn races(&self) -> u64 {
        self.groups.iter().map(|g| g.pairs).sum()
    }
}

#[derive(Clone, Debug)]
struct Bundle {
    file: u32,
    process: u32,
    site: u32,
    act: Act,
    range: ByteRange,
    /// Its accesses, in the order of their steps.
    members: Range<usize>,
}

/// A run whose accesses lie in the order in which they are swept.
#[derive(Clone, Debug)]
pub struct Sorted {
    run: Run,
    accesses: Vec<Access>,
    bundles: Vec<Bundle>,
}

impl Sorted {
    /// Puts a run in order.
    #[must_use]
    pub fn new(mut run: Run) -> Sorted {
        let mut accesses = run.take_accesses();
        let key = |a: &Access| (a.file, a.start, a.end, a.process, a.act, a.site);
        accesses.sort_unstable_by_key(|a| (key(a), a.id));
        let mut bundles = Vec::new();
        let mut from = 0;
        for same in accesses.chunk_by(|a, b| key(a) == key(b)) {
            let members = from..from + same.len();
            from = members.end;
            let Access { file, process, site, act, start, end, .. } = same[0];
            let range = ByteRange::new(start, end);
            bundles.push(Bundle { file, process, site, act, range, members });
        }
        Sorted { run, accesses, bundles }
    }

    /// What a model makes of it.
    #[must_use]
    pub fn check(&self, model: &Model) -> Verdict {
        self.check_with(&|_| model)
    }

    /// Places where different processes write next to each other within one span of `size` bytes, such as
    /// a page, per file: no race, but such writers wait for each other on many systems.
    #[must_use]
    pub fn shared_spans(&self, size: u64) -> BTreeMap<File, u64> {
        let mut found = BTreeMap::new();
        for of_file in self.bundles.chunk_by(|a, b| a.file == b.file) {
            let mut last: Option<&Bundle> = None;
            for bundle in of_file.iter().filter(|b| b.act != Act::Read) {
                let is_shared = last.is_some_and(|l| {
                    let near = (l.range.end().max(1) - 1) / size == bundle.range.start() / size;
                    near && l.process != bundle.process && !l.range.overlaps(bundle.range)
                });
                if is_shared {
                    *found.entry(File(bundle.file)).or_default() += 1;
                }
                last = Some(bundle);
            }
        }
        found
    }

    /// What models make of it, one for each file.
    #[must_use]
    pub fn check_with<'m>(&self, model_of: &dyn Fn(File) -> &'m Model) -> Verdict {
        let mut sweep = Sweep::new(self);
        let mut verdict = Verdict::default();
        for of_file in self.bundles.chunk_by(|a, b| a.file == b.file) {
            sweep.file(of_file, model_of(File(of_file[0].file)), &mut verdict);
        }
        let mut groups: Vec<Group> = sweep.groups.into_values().collect();
        groups.sort_by_key(|g| (g.file, g.at));
        verdict.groups = groups;
        verdict
    }
}

type Place = (Act, u32);

/// The races of two bundles.
struct Counted {
    pairs: u64,
    unordered: u64,
    at: (u32, u32),
    /// The accesses of the earliest.
    first: usize,
    second: usize,
}

struct Sweep<'a> {
    of: &'a Sorted,
    /// Per access: the step of its process that publishes it, and the segment of the one that observed
    /// for it.
    published: Vec<u32>,
    observed: Vec<u32>,
    groups: HashMap<(u32, Place, Place), Group>,
}

impl<'a> Sweep<'a> {
    fn new(of: &'a Sorted) -> Sweep<'a> {
        let none = vec![NONE; of.accesses.len()];
        Sweep { of, published: none.clone(), observed: none, groups: HashMap::new() }
    }

    fn file(&mut self, bundles: &[Bundle], model: &Model, verdict: &mut Verdict) {
        let several = bundles.iter().any(|b| b.process != bundles[0].process);
        if !several || bundles.iter().all(|b| b.act == Act::Read) {
            return;
        }
        let msc = model.msc();
        self.chains(bundles, &msc);
        let mut swept: Vec<(ByteRange, &Bundle)> =
            bundles.iter().map(|b| (touched(b, model), b)).collect();
        swept.sort_by_key(|(range, _)| range.start());
        let mut open: BTreeMap<u32, [Vec<(ByteRange, &Bundle)>; 2]> = BTreeMap::new();
        for (range, bundle) in swept {
            let writes = bundle.act != Act::Read;
            for (_, sides) in open.iter_mut().filter(|(process, _)| **process != bundle.process) {
                // Reads and reads do not conflict.
                let from = usize::from(!writes);
                for side in &mut sides[from..] {
                    side.retain(|(other, _)| other.end() > range.start());
                    for (other_range, other) in side.iter() {
                        let both = range.intersect(*other_range);
                        verdict.conflicts += (bundle.members.len() * other.members.len()) as u64;
                        self.pair(other, bundle, both, &msc);
                    }
                }
            }
            // Processes of which nothing is open cost little, unless there are many.
            if open.len() > IDLE_MAX {
                open.retain(|_, sides| sides.iter().any(|side| !side.is_empty()));
            }
            open.entry(bundle.process).or_default()[usize::from(writes)].push((range, bundle));
        }
    }

    /// For the accesses of a file: what publishes them and what observed for them.
    fn chains(&mut self, bundles: &[Bundle], msc: &Msc) {
        let mut known: HashMap<u32, (Vec<u32>, Vec<(u32, u32)>)> = HashMap::new();
        let run = &self.of.run;
        for bundle in bundles {
            let (publishes, observes) = known.entry(bundle.process).or_insert_with(|| {
                let syncs = run.syncs_of(bundle.process, bundle.file);
                let publishes = msc.publish.iter().flat_map(|events| {
                    syncs.iter().filter(|s| events.contains(&s.event)).map(|s| s.number)
                });
                let observes = msc.observe.iter().flat_map(|events| {
                    let those = syncs.iter().filter(|s| events.contains(&s.event));
                    those.map(|s| (s.number, s.segment))
                });
                (publishes.collect(), observes.collect())
            });
            for i in bundle.members.clone() {
                let access = &self.of.accesses[i];
                self.published[i] = match msc.publish {
                    None => access.number,
                    Some(_) => {
                        let next = publishes.partition_point(|p| *p <= access.number);
                        publishes.get(next).copied().unwrap_or(NONE)
                    }
                };
                self.observed[i] = match msc.observe {
                    None => access.segment,
                    Some(_) => {
                        let next = observes.partition_point(|(o, _)| *o < access.number);
                        next.checked_sub(1).map_or(NONE, |last| observes[last].1)
                    }
                };
            }
        }
    }

    /// Adds the races of two bundles that meet in `both`.
    fn pair(&mut self, a: &Bundle, b: &Bundle, both: ByteRange, msc: &Msc) {
        let Some(found) = self.count(a, b) else { return };
        let (p, q) = ((a.act, a.site), (b.act, b.site));
        let key = (a.file, p.min(q), p.max(q));
        let known = self.groups.get(&key).map(|group| group.at);
        let example = known.is_none_or(|at| found.at < at).then(|| self.example(&found, both, msc));
        let Counted { pairs, unordered, at, .. } = found;
        match (self.groups.get_mut(&key), example) {
            (None, None) => {}
            (None, Some(example)) => {
                let file = File(a.file);
                let group = Group { file, hull: both, pairs, unordered, example, at };
                self.groups.insert(key, group);
            }
            (Some(group), example) => {
                group.pairs += pairs;
                group.unordered += unordered;
                let start = group.hull.start().min(both.start());
                group.hull = ByteRange::new(start, group.hull.end().max(both.end()));
                if let Some(example) = example {
                    (group.example, group.at) = (example, at);
                }
            }
        }
    }

    /// Counts the races of two bundles that meet; nothing when there are none.
    fn count(&self, a: &Bundle, b: &Bundle) -> Option<Counted> {
        let (few, many) = if a.members.len() < b.members.len() { (a, b) } else { (b, a) };
        let same_view = self.of.run.same_view(few.process, many.process);
        let (mut pairs, mut unordered) = (0, 0);
        let mut earliest: Option<((u32, u32), usize, usize)> = None;
        for y in few.members.clone() {
            let racing = self.stretch(&many.members, |x| {
                (self.in_order(x, y, same_view), self.in_order(y, x, same_view))
            });
            if racing.is_empty() {
                continue;
            }
            pairs += racing.len() as u64;
            let without = self.stretch(&many.members, |x| (self.hb(x, y), self.hb(y, x)));
            unordered += without.len() as u64;
            let (i, j) = (self.of.accesses[y].id, self.of.accesses[racing.start].id);
            let at = (i.max(j), i.min(j));
            if earliest.is_none_or(|(so_far, ..)| at < so_far) {
                let (first, second) = if i < j { (y, racing.start) } else { (racing.start, y) };
                earliest = Some((at, first, second));
            }
        }
        let (at, first, second) = earliest?;
        Some(Counted { pairs, unordered, at, first, second })
    }

    /// Those of `members` that are neither in order before the other access nor after it.
    fn stretch(
        &self,
        members: &Range<usize>,
        order: impl Fn(usize) -> (bool, bool),
    ) -> Range<usize> {
        let from = partition(members.clone(), |x| order(x).0);
        let to = partition(from..members.end, |x| !order(x).1);
        from..to
    }

    fn hb(&self, x: usize, y: usize) -> bool {
        let (a, b) = (&self.of.accesses[x], &self.of.accesses[y]);
        self.of.run.before(a.process, a.number, b.process, b.segment)
    }

    /// Whether `x` is properly synchronised before `y`.
    fn in_order(&self, x: usize, y: usize, same_view: bool) -> bool {
        let (a, b) = (&self.of.accesses[x], &self.of.accesses[y]);
        if a.act == Act::Read || same_view {
            return self.hb(x, y);
        }
        let (s1, s2) = (self.published[x], self.observed[y]);
        s1 != NONE && s2 != NONE && self.of.run.before(a.process, s1, b.process, s2)
    }

    fn example(&self, found: &Counted, both: ByteRange, msc: &Msc) -> Example {
        let (x, y) = (found.first, found.second);
        let missing = if !self.hb(x, y) {
            Missing::Order
        } else if let (NONE, Some(events)) = (self.published[x], &msc.publish) {
            Missing::Publish(events.clone())
        } else if let (NONE, Some(events)) = (self.observed[y], &msc.observe) {
            Missing::Observe(events.clone())
        } else {
            Missing::Chain
        };
        let party = |i: usize| {
            let a = &self.of.accesses[i];
            Party {
                process: Process(a.process),
                step: a.number,
                act: a.act,
                site: Site(a.site),
                range: ByteRange::new(a.start, a.end),
            }
        };
        Example { first: party(x), second: party(y), range: both, missing }
    }
}

/// The bytes that count under a model.
fn touched(bundle: &Bundle, model: &Model) -> ByteRange {
    bundle.act.touches(bundle.range, model)
}

impl Act {
    /// The bytes that an access to `range` touches under a model: a place at the end of a file depends
    /// on who wrote the byte before it, unless the service gives such places out one by one.
    #[must_use]
    pub fn touches(self, range: ByteRange, model: &Model) -> ByteRange {
        if self == Act::Append && !model.append_is_atomic() {
            return ByteRange::new(range.start().saturating_sub(1), range.end());
        }
        range
    }
}

/// The first of `range` for which `holds` does not hold.
fn partition(range: Range<usize>, holds: impl Fn(usize) -> bool) -> usize {
    let (mut from, mut to) = (range.start, range.end);
    while from < to {
        let middle = from + (to - from) / 2;
        if holds(middle) { from = middle + 1 } else { to = middle }
    }
    from
}

#[cfg(test)]
#[path = "sweep_tests.rs"]
mod tests;
