//! Values of byte ranges. Like a map from every byte to a value, but kept as extents: neighbours of
//! one value are one extent. Made for ranges that change their value as a whole, again and again.

use crate::ByteRange;
use std::collections::BTreeMap;

/// Extents with a value each, sorted and disjoint; neighbours differ in their values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Extents<V> {
    /// By where they start: where they end.
    map: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for Extents<V> {
    fn default() -> Extents<V> {
        Extents { map: BTreeMap::new() }
    }
}

impl<V: Copy + Eq> Extents<V> {
    /// No byte has a value.
    #[must_use]
    pub fn new() -> Extents<V> {
        Extents::default()
    }

    /// Number of extents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// True when no byte has a value.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// All extents, in order.
    pub fn iter(&self) -> impl Iterator<Item = (ByteRange, V)> + '_ {
        self.map.iter().map(|(start, (end, value))| (ByteRange::new(*start, *end), *value))
    }

    /// The extent that holds `offset`.
    #[must_use]
    pub fn get(&self, offset: u64) -> Option<(ByteRange, V)> {
        let (start, (end, value)) = self.map.range(..=offset).next_back()?;
        (offset < *end).then(|| (ByteRange::new(*start, *end), *value))
    }

    /// One past the last byte that has a value; 0 when none has.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.map.last_key_value().map_or(0, |(_, (end, _))| *end)
    }

    /// What there is within `range`, clipped to it, in order.
    pub fn overlapping(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, V)> + '_ {
        let from = self.get(range.start()).map_or(range.start(), |(first, _)| first.start());
        // An empty range has nothing in it, also where an extent goes across it.
        let until = if range.is_empty() { from } else { range.end() };
        let found = self.map.range(from..until);
        found.map(move |(start, (end, value))| {
            (ByteRange::new(*start, *end).intersect(range), *value)
        })
    }

    /// What there is within each of `ranges`, one after the other. Cheap for many ranges that are in
    /// order.
    #[must_use]
    pub fn within(&self, ranges: &[ByteRange]) -> Vec<(ByteRange, V)> {
        match self.is_pass_cheaper(ranges.len()) && ranges.is_sorted_by(precedes) {
            true => self.within_in_order(ranges),
            false => ranges.iter().flat_map(|range| self.overlapping(*range)).collect(),
        }
    }

    /// One pass over all there is.
    fn within_in_order(&self, ranges: &[ByteRange]) -> Vec<(ByteRange, V)> {
        let mut found = Vec::with_capacity(ranges.len());
        let mut extents = self.iter().peekable();
        for range in ranges {
            while extents.next_if(|(extent, _)| extent.end() <= range.start()).is_some() {}
            while let Some((extent, value)) = extents.peek().copied() {
                let part = extent.intersect(*range);
                found.extend((!part.is_empty()).then_some((part, value)));
                // It may reach into the next range as well.
                if extent.end() >= range.end() {
                    break;
                }
                extents.next();
            }
        }
        found
    }

    /// Whether one pass over everything is cheaper than so many looks.
    fn is_pass_cheaper(&self, looks: usize) -> bool {
        looks >= MANY_LOOKS && self.len() / looks <= EXTENTS_A_LOOK
    }

    /// The parts of `range` that have no value, in order.
    pub fn gaps(&self, range: ByteRange) -> impl Iterator<Item = ByteRange> + '_ {
        let end = ByteRange::at(range.end(), 0);
        let mut at = range.start();
        let found = self.overlapping(range).map(|(r, _)| r).chain([end]);
        found.filter_map(move |next| {
            let gap = ByteRange::new(at, next.start());
            at = next.end();
            (!gap.is_empty()).then_some(gap)
        })
    }

    /// Every byte of `range` has this value from now on.
    pub fn insert(&mut self, range: ByteRange, value: V) {
        if range.is_empty() {
            return;
        }
        self.remove(range);
        let mut end = range.end();
        if let Some((right, _)) = self.map.get(&end).filter(|(_, v)| *v == value).copied() {
            self.map.remove(&end);
            end = right;
        }
        let left = self.map.range_mut(..range.start()).next_back();
        match left.filter(|(_, (at, v))| *at == range.start() && *v == value) {
            Some((_, (at, _))) => *at = end,
            None => drop(self.map.insert(range.start(), (end, value))),
        }
    }

    /// No byte of `range` has a value any more. Returns how many had one.
    pub fn remove(&mut self, range: ByteRange) -> u64 {
        let mut removed = 0;
        if range.is_empty() {
            return removed;
        }
        while let Some((start, (end, value))) = self.map.range_mut(..range.end()).next_back() {
            let extent = ByteRange::new(*start, *end);
            let hit = extent.intersect(range);
            if hit.is_empty() {
                break;
            }
            let value = *value;
            removed += hit.len();
            if extent.start() < range.start() {
                *end = range.start();
            } else {
                self.map.remove(&extent.start());
            }
            if range.end() < extent.end() {
                self.map.insert(range.end(), (extent.end(), value));
            }
        }
        removed
    }
}

/// A list of ranges is cheaper taken as a whole from this length on, and when there are not more
/// than so many extents for each of them.
const MANY_LOOKS: usize = 16;
const EXTENTS_A_LOOK: usize = 8;

fn precedes(one: &ByteRange, next: &ByteRange) -> bool {
    one.end() <= next.start()
}

impl<V: Copy + Eq> Extents<V> {
    /// All of these changes, in turn: every byte of a range has its value from now on, or none.
    /// Returns how many bytes that had a value were in the ranges. Cheap for many ranges that are in
    /// order.
    pub fn assign(&mut self, changes: &[(ByteRange, Option<V>)]) -> u64 {
        let in_order = || changes.is_sorted_by(|(one, _), (next, _)| precedes(one, next));
        if self.is_pass_cheaper(changes.len()) && in_order() {
            return self.assign_in_order(changes);
        }
        let mut had = 0;
        for (range, value) in changes {
            had += self.remove(*range);
            if let Some(value) = value {
                self.insert(*range, *value);
            }
        }
        had
    }

    /// One pass over all there is and all that changes.
    fn assign_in_order(&mut self, changes: &[(ByteRange, Option<V>)]) -> u64 {
        let mut had = 0;
        let mut new: Vec<(u64, (u64, V))> = Vec::with_capacity(self.len() + changes.len());
        let mut push = |range: ByteRange, value: V| match new.last_mut() {
            _ if range.is_empty() => {}
            Some((_, (end, last))) if *end == range.start() && *last == value => *end = range.end(),
            _ => new.push((range.start(), (range.end(), value))),
        };
        let mut old = self.iter();
        let mut next = old.next();
        for (range, value) in changes.iter().filter(|(range, _)| !range.is_empty()) {
            // What lies before the change stays, what lies in it goes; what goes on behind it is next.
            while let Some((extent, kept)) = next.filter(|(e, _)| e.start() < range.end()) {
                push(ByteRange::new(extent.start(), extent.end().min(range.start())), kept);
                had += extent.intersect(*range).len();
                if extent.end() > range.end() {
                    next = Some((ByteRange::new(range.end(), extent.end()), kept));
                    break;
                }
                next = old.next();
            }
            if let Some(value) = value {
                push(*range, *value);
            }
        }
        next.into_iter().chain(old).for_each(|(extent, kept)| push(extent, kept));
        self.map = new.into_iter().collect();
        had
    }
}

/// Joining neighbours that differ.
impl<V: Copy + Eq> Extents<V> {
    /// The two extents that meet at `at` become one with the value that `both` has for them, if any.
    pub fn join_at(&mut self, at: u64, both: impl Fn((ByteRange, V), (ByteRange, V)) -> Option<V>) {
        let left = at.checked_sub(1).and_then(|before| self.get(before));
        let (Some(left), Some(right)) = (left, self.get(at)) else { return };
        if left.0.end() == right.0.start()
            && let Some(value) = both(left, right)
        {
            self.insert(ByteRange::new(left.0.start(), right.0.end()), value);
        }
    }

    /// The same wherever two meet, from the first one on.
    pub fn join(&mut self, both: impl Fn((ByteRange, V), (ByteRange, V)) -> Option<V>) {
        let mut out: Vec<(ByteRange, V)> = Vec::with_capacity(self.len());
        for next in self.iter() {
            let meets = out.last().copied().filter(|(last, _)| last.end() == next.0.start());
            match meets.and_then(|last| both(last, next)) {
                Some(value) => {
                    if let Some((last, old)) = out.last_mut() {
                        (*last, *old) = (ByteRange::new(last.start(), next.0.end()), value);
                    }
                }
                None => out.push(next),
            }
        }
        *self = out.into_iter().collect();
    }
}

impl<V: Copy + Eq> FromIterator<(ByteRange, V)> for Extents<V> {
    fn from_iter<I: IntoIterator<Item = (ByteRange, V)>>(extents: I) -> Extents<V> {
        let mut all = Extents::new();
        let changes: Vec<_> = extents.into_iter().map(|(range, v)| (range, Some(v))).collect();
        all.assign(&changes);
        all
    }
}

/// Cuts `ranges` into what is outside of `marked` and what is inside.
#[must_use]
pub fn split_by(ranges: &[ByteRange], marked: &[ByteRange]) -> (Vec<ByteRange>, Vec<ByteRange>) {
    if marked.is_empty() {
        return (ranges.to_vec(), Vec::new());
    }
    let marked: Extents<()> = marked.iter().map(|r| (*r, ())).collect();
    let outside = ranges.iter().flat_map(|r| marked.gaps(*r)).collect();
    let inside = ranges.iter().flat_map(|r| marked.overlapping(*r)).map(|(r, ())| r).collect();
    (outside, inside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BYTES: u64 = 24;

    /// One value per byte: what [`Extents`] must be equal to.
    #[derive(Clone, Debug, Default)]
    struct Plain([Option<u8>; BYTES as usize]);

    impl Plain {
        fn set(&mut self, range: ByteRange, value: Option<u8>) -> u64 {
            let bytes = &mut self.0[range.start() as usize..range.end() as usize];
            let had = bytes.iter().flatten().count() as u64;
            bytes.fill(value);
            had
        }

        fn within(&self, range: ByteRange) -> Vec<(ByteRange, Option<u8>)> {
            let mut out: Vec<(ByteRange, Option<u8>)> = Vec::new();
            for at in range.start()..range.end() {
                let value = self.0[at as usize];
                match out.last_mut() {
                    Some((r, v)) if *v == value => *r = ByteRange::new(r.start(), at + 1),
                    _ => out.push((ByteRange::at(at, 1), value)),
                }
            }
            out
        }
    }

    fn range() -> impl Strategy<Value = ByteRange> {
        (0..=BYTES, 0..=BYTES).prop_map(|(a, b)| ByteRange::new(a.min(b), a.max(b)))
    }

    proptest! {
        #[test]
        fn extents_are_a_value_per_byte(
            changes in prop::collection::vec((range(), prop::option::of(0..3u8)), 0..24),
            look in range(),
        ) {
            let (mut extents, mut plain) = (Extents::new(), Plain::default());
            for (range, value) in changes {
                let had = plain.set(range, value);
                match value {
                    Some(value) => extents.insert(range, value),
                    None => prop_assert_eq!(extents.remove(range), had),
                }
                let all = plain.within(ByteRange::new(0, BYTES));
                let all: Vec<_> = all.into_iter().filter_map(|(r, v)| Some((r, v?))).collect();
                prop_assert_eq!(extents.iter().collect::<Vec<_>>(), all.clone());
                prop_assert_eq!(extents.len(), all.len());
                prop_assert_eq!(extents.end(), all.last().map_or(0, |(r, _)| r.end()));
                prop_assert_eq!(&all.into_iter().collect::<Extents<u8>>(), &extents);
            }
            let (there, gaps): (Vec<_>, Vec<_>) =
                plain.within(look).into_iter().partition(|(_, v)| v.is_some());
            let there: Vec<_> = there.into_iter().filter_map(|(r, v)| Some((r, v?))).collect();
            prop_assert_eq!(extents.overlapping(look).collect::<Vec<_>>(), there);
            let gaps: Vec<_> = gaps.into_iter().map(|(r, _)| r).collect();
            prop_assert_eq!(extents.gaps(look).collect::<Vec<_>>(), gaps);
            for at in 0..BYTES {
                prop_assert_eq!(extents.get(at).map(|(_, v)| v), plain.0[at as usize]);
            }
        }
    }

    proptest! {
        /// In one pass, in turn, and byte by byte: it is the same.
        #[test]
        fn changes_as_a_whole_are_changes_in_turn(
            before in prop::collection::vec((range(), 0..3u8), 0..12),
            cuts in prop::collection::vec((0..=BYTES, prop::option::of(0..3u8)), 0..12),
            any in prop::collection::vec((range(), prop::option::of(0..3u8)), 0..2 * MANY_LOOKS),
        ) {
            let (mut extents, mut plain) = (Extents::new(), Plain::default());
            for (range, value) in before {
                plain.set(range, Some(value));
                extents.insert(range, value);
            }
            let mut cuts = cuts;
            cuts.sort_unstable_by_key(|(at, _)| *at);
            let pairs = cuts.chunks_exact(2);
            let in_order: Vec<_> =
                pairs.map(|p| (ByteRange::new(p[0].0, p[1].0), p[0].1)).collect();
            for (whole, changes) in [(true, in_order), (false, any)] {
                let had: u64 = changes.iter().map(|(r, v)| plain.set(*r, *v)).sum();
                let all = plain.within(ByteRange::new(0, BYTES));
                let all: Vec<_> = all.into_iter().filter_map(|(r, v)| Some((r, v?))).collect();
                prop_assert_eq!(match whole {
                    true => extents.assign_in_order(&changes),
                    false => extents.assign(&changes),
                }, had);
                prop_assert_eq!(extents.iter().collect::<Vec<_>>(), all);
                let ranges: Vec<ByteRange> = changes.iter().map(|(range, _)| *range).collect();
                let each = ranges.iter().flat_map(|range| extents.overlapping(*range));
                let each: Vec<_> = each.collect();
                prop_assert_eq!(&extents.within(&ranges), &each);
                if whole {
                    prop_assert_eq!(extents.within_in_order(&ranges), each);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_byte_is_outside_or_inside(
            list in prop::collection::vec((0..40u64, 0..9u64), 0..8),
            cuts in prop::collection::vec((0..40u64, 0..9u64), 0..8),
        ) {
            let ranges = |list: &[(u64, u64)]| -> Vec<ByteRange> {
                list.iter().map(|(at, len)| ByteRange::at(*at, *len)).collect()
            };
            let bytes = |ranges: &[ByteRange]| -> Vec<u64> {
                ranges.iter().flat_map(|r| r.to_std()).collect()
            };
            let (list, cuts) = (ranges(&list), ranges(&cuts));
            let (outside, inside) = split_by(&list, &cuts);
            let is_cut = |byte: &u64| cuts.iter().any(|c| c.contains_offset(*byte));
            let (cut, rest): (Vec<u64>, Vec<u64>) = bytes(&list).into_iter().partition(is_cut);
            prop_assert_eq!((bytes(&outside), bytes(&inside)), (rest, cut));
        }
    }

    #[test]
    fn neighbours_are_joined_where_they_may_be() {
        let at = |start, end, value| (ByteRange::new(start, end), value);
        let all = [at(0, 5, 1), at(5, 9, 2), at(9, 12, 7), at(20, 25, 1), at(25, 30, 2)];
        let small =
            |(_, a): (ByteRange, u8), (_, b): (ByteRange, u8)| (a.max(b) < 5).then_some(a.max(b));
        let mut extents: Extents<u8> = all.into_iter().collect();
        for nowhere in [0, 3, 9, 12, 20, 30] {
            extents.join_at(nowhere, small);
        }
        assert!(extents.iter().eq(all));
        extents.join_at(25, small);
        assert!(extents.iter().eq([all[0], all[1], all[2], at(20, 30, 2)]));
        extents.join(small);
        assert!(extents.iter().eq([at(0, 9, 2), all[2], at(20, 30, 2)]));
    }

    #[test]
    fn the_whole_file_is_a_range_like_others() {
        let mut extents = Extents::new();
        extents.insert(ByteRange::ALL, 1);
        extents.insert(ByteRange::new(10, 20), 2);
        assert_eq!(extents.len(), 3);
        assert_eq!(extents.get(20), Some((ByteRange::from(20), 1)));
        assert_eq!(extents.gaps(ByteRange::ALL).count(), 0);
        assert_eq!(extents.remove(ByteRange::from(15)), u64::MAX - 15);
        assert_eq!(extents.end(), 15);
    }
}
