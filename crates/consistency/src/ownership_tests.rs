//! A file's state against an array with one element per unit of bytes: exact owners, exact
//! versions, exact effects of flushes that end at any later time.

use super::answer::OPEN_ENTRIES;
use super::*;
use crate::tree::MERGE_SPAN;
use proptest::prelude::*;

/// Bytes per unit: eight units are one merge span.
const UNIT: u64 = MERGE_SPAN / 8;
const UNITS: usize = 40;

#[derive(Clone, Debug)]
enum Op {
    Attach(u32, Vec<(usize, usize)>),
    /// What was written, and what is claimed.
    Claim(u32, (usize, usize), (usize, usize)),
    Append(u32, usize),
    /// The last: anew.
    Detach(u32, usize, usize, bool),
    Truncate(usize),
    Grant(u32, usize, usize),
    /// Ends the n-th grant that is out; false: it failed.
    End(usize, bool),
    Gone(u32),
    BaseChanged(usize),
    /// With an object on the backing, or without one.
    BelieveTheBacking(Option<usize>),
    Compact,
    Store,
}

fn span() -> impl Strategy<Value = (usize, usize)> {
    (0..UNITS, 0..12usize).prop_map(|(a, n)| (a, (a + n).min(UNITS)))
}

fn op() -> impl Strategy<Value = Op> {
    let node = 1..4u32;
    prop_oneof![
        8 => (node.clone(), prop::collection::vec(span(), 1..3)).prop_map(|(n, r)| Op::Attach(n, r)),
        3 => (node.clone(), span(), span()).prop_map(|(n, r, c)| Op::Claim(n, r, c)),
        1 => (node.clone(), 0..3usize).prop_map(|(n, l)| Op::Append(n, l)),
        2 => (node.clone(), span(), any::<bool>())
            .prop_map(|(n, (a, b), anew)| Op::Detach(n, a, b, anew)),
        1 => (0..UNITS).prop_map(Op::Truncate),
        4 => (node.clone(), span()).prop_map(|(n, (a, b))| Op::Grant(n, a, b)),
        4 => (0..3usize, prop::bool::weighted(0.8)).prop_map(|(i, ok)| Op::End(i, ok)),
        1 => node.prop_map(Op::Gone),
        1 => (0..UNITS).prop_map(Op::BaseChanged),
        1 => prop::option::of(0..UNITS).prop_map(Op::BelieveTheBacking),
        1 => Just(Op::Compact),
        1 => Just(Op::Store),
    ]
}

fn bytes(a: usize, b: usize) -> ByteRange {
    ByteRange::new(a as u64 * UNIT, b as u64 * UNIT)
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Unit {
    owner: Option<(u32, bool)>,
    /// The version of the last change of its content.
    changed: u64,
    /// It was flushed since, and may have taken the version of a neighbour in its span.
    merged: bool,
    /// Published last by a guess: when it had changed before that.
    guess: Option<u64>,
}

struct Grant {
    node: u32,
    granted: Vec<Owned>,
    /// Units in it, with the version of their last change.
    units: Vec<(usize, u64)>,
}

struct Reference {
    units: [Unit; UNITS],
    size: u64,
    base_len: u64,
    grants: Vec<Grant>,
    compacted: bool,
    /// The version at which the backing was believed last: what it has may have changed then.
    believed: u64,
}

impl Reference {
    fn owned_by(&self, node: u32, a: usize, b: usize, flushed: bool) -> Vec<usize> {
        (a..b).filter(|u| self.units[*u].owner == Some((node, flushed))).collect()
    }

    fn give_back(&mut self, units: &[usize]) {
        for u in units {
            self.units[*u].owner = None;
            self.base_len = self.base_len.max((*u as u64 + 1) * UNIT);
        }
    }

    fn attach(&mut self, node: u32, a: usize, b: usize, version: Version) {
        for u in a..b {
            let owner = Some((node, false));
            self.units[u] = Unit { owner, changed: version.0, merged: false, guess: None };
            self.size = self.size.max((u as u64 + 1) * UNIT);
        }
    }

    fn claim(
        &mut self,
        node: u32,
        written: (usize, usize),
        granted: &[ByteRange],
        version: Version,
    ) {
        let units: Vec<usize> = granted
            .iter()
            .flat_map(|r| (r.start() / UNIT) as usize..(r.end() / UNIT) as usize)
            .collect();
        let before = self.units;
        self.attach(node, written.0, written.1, version);
        for u in units {
            let Unit { owner, changed, guess, .. } = before[u];
            assert!(owner.is_none_or(|(n, _)| n == node), "nobody else has it");
            let is_written = (written.0..written.1).contains(&u);
            let fresh = if owner.is_none() { Some(changed) } else { guess };
            let guess = if is_written { None } else { fresh };
            let owner = Some((node, false));
            self.units[u] = Unit { owner, changed: version.0, merged: false, guess };
            self.size = self.size.max((u as u64 + 1) * UNIT);
        }
    }

    fn cut(&mut self, from: usize, version: Version) {
        for u in from..UNITS {
            self.units[u] = Unit { owner: None, changed: version.0, merged: false, guess: None };
        }
    }
}

fn step(file: &mut FileState, reference: &mut Reference, op: &Op) {
    let before = file.version();
    match op {
        Op::Attach(node, ranges) => {
            let list: Vec<_> = ranges.iter().map(|(a, b)| bytes(*a, *b)).collect();
            let version = file.attach(NodeId(*node), &list);
            let some = ranges.iter().any(|(a, b)| a < b);
            assert_eq!(version, if some { before.next() } else { before });
            ranges.iter().for_each(|(a, b)| reference.attach(*node, *a, *b, version));
        }
        Op::Claim(node, (a, b), (c, d)) => {
            let (granted, _) = file.judge_claim(
                NodeId(*node),
                bytes(*c, *d),
                Claim::Guessed { known: Version::ZERO },
            );
            let version = file.claim(NodeId(*node), &[bytes(*a, *b)], &granted);
            let none = a == b && granted.iter().all(|r| r.is_empty());
            assert_eq!(version, if none { before } else { before.next() });
            reference.claim(*node, (*a, *b), &granted, version);
        }
        Op::Append(node, len) => {
            let start = (reference.size / UNIT) as usize;
            if start + len <= UNITS && reference.size.is_multiple_of(UNIT) {
                let got = file.append(NodeId(*node), *len as u64 * UNIT);
                let (offset, version) = got.expect("small");
                assert_eq!(offset, reference.size);
                reference.attach(*node, start, start + len, version);
            }
        }
        Op::Detach(node, a, b, anew) => {
            let copy = file.clone();
            let range = [bytes(*a, *b)];
            let unflushed = reference.owned_by(*node, *a, *b, false);
            let done = match anew {
                true => file.detach_anew(NodeId(*node), &range),
                false => file.detach(NodeId(*node), &range),
            };
            match done {
                Err(_) => {
                    assert!(!unflushed.is_empty());
                    assert_eq!(*file, copy, "an error changes nothing");
                }
                Ok(answer) => {
                    assert!(unflushed.is_empty());
                    let given = reference.owned_by(*node, *a, *b, true);
                    let version = answer.version;
                    assert_eq!((answer.size, answer.base_len), (file.size(), file.base_len()));
                    assert_eq!(version, if given.is_empty() { before } else { before.next() });
                    reference.give_back(&given);
                    if *anew && !given.is_empty() {
                        for u in &given {
                            let guess = reference.units[*u].guess;
                            reference.units[*u] =
                                Unit { owner: None, changed: version.0, merged: false, guess };
                        }
                    }
                }
            }
        }
        Op::Truncate(len) => {
            let len = *len as u64 * UNIT;
            let version = file.truncate(len);
            if len < reference.size {
                reference.cut((len / UNIT) as usize, version);
                reference.base_len = reference.base_len.min(len);
                // Every byte below it is said to have changed as well; readers ask again.
            }
            reference.size = len;
        }
        Op::Grant(node, a, b) => {
            let granted = file.grantable(NodeId(*node), &[bytes(*a, *b)]);
            let units = reference.owned_by(*node, *a, *b, false);
            let total: u64 = granted.iter().map(|g| g.range.len()).sum();
            assert_eq!(total, units.len() as u64 * UNIT);
            let units = units.into_iter().map(|u| (u, reference.units[u].changed)).collect();
            // As the service does: no two flushes of the same bytes at once.
            let overlaps = |g: &Grant| {
                g.granted.iter().any(|x| granted.iter().any(|y| x.range.overlaps(y.range)))
            };
            if !reference.grants.iter().any(overlaps) {
                reference.grants.push(Grant { node: *node, granted, units });
            }
        }
        Op::End(which, done) => {
            if *which < reference.grants.len() {
                let grant = reference.grants.remove(*which);
                if *done {
                    end_grant(file, reference, &grant);
                }
            }
        }
        Op::Gone(node) => {
            let lost = reference.owned_by(*node, 0, UNITS, false);
            let got: u64 = file.node_gone(NodeId(*node)).iter().map(|r| r.len()).sum();
            assert_eq!(got, lost.len() as u64 * UNIT);
            let given = reference.owned_by(*node, 0, UNITS, true);
            reference.give_back(&given);
        }
        Op::BaseChanged(len) => {
            if file.is_clean() {
                let version = file.base_changed(*len as u64 * UNIT);
                reference.cut(0, version);
                (reference.size, reference.base_len) = (*len as u64 * UNIT, *len as u64 * UNIT);
            }
        }
        Op::BelieveTheBacking(len) => {
            file.believe_the_backing(len.map(|len| len as u64 * UNIT));
            let flushed = |u: &usize| reference.units[*u].owner.is_some_and(|(_, flushed)| flushed);
            let flushed: Vec<usize> = (0..UNITS).filter(flushed).collect();
            reference.give_back(&flushed);
            let version = file.version().0;
            for unit in reference.units.iter_mut().filter(|unit| unit.owner.is_none()) {
                *unit = Unit { owner: None, changed: version, merged: false, guess: None };
            }
            reference.units.iter_mut().for_each(|unit| unit.guess = None);
            reference.believed = version;
            if let Some(len) = len {
                let owned = (0..UNITS).rev().find(|u| reference.units[*u].owner.is_some());
                let end = owned.map_or(0, |u| (u as u64 + 1) * UNIT);
                reference.base_len = *len as u64 * UNIT;
                reference.size = reference.base_len.max(end);
            }
        }
        Op::Compact => {
            let grants = reference.grants.iter();
            let busy: Vec<_> = grants.flat_map(|g| &g.granted).map(|o| o.range).collect();
            file.compact(&busy);
            reference.compacted = true;
        }
        Op::Store => {
            let stored = postcard::to_stdvec(file).unwrap();
            let mut read: FileState = postcard::from_bytes(&stored).unwrap();
            if let Some(changes) = file.stored_changes() {
                let stored = postcard::to_stdvec(&changes).unwrap();
                read.restore_changes(&postcard::from_bytes(&stored).unwrap());
            }
            if let Some(guesses) = file.stored_guesses() {
                let stored = postcard::to_stdvec(&guesses).unwrap();
                read.restore_guesses(&postcard::from_bytes(&stored).unwrap());
            }
            assert_eq!(read, *file);
        }
    }
}

/// Exactly what was neither attached again nor taken since the grant is flushed.
fn end_grant(file: &mut FileState, reference: &mut Reference, grant: &Grant) {
    let marked = file.mark_flushed(NodeId(grant.node), &grant.granted);
    let mut expected = 0;
    for (u, changed) in &grant.units {
        let unit = &mut reference.units[*u];
        if unit.changed == *changed && unit.owner == Some((grant.node, false)) {
            unit.owner = Some((grant.node, true));
            unit.merged = true;
            reference.base_len = reference.base_len.max((*u as u64 + 1) * UNIT);
            expected += UNIT;
        }
    }
    assert_eq!(marked, expected);
}

fn check(file: &FileState, reference: &Reference) {
    assert_eq!((file.size(), file.base_len()), (reference.size, reference.base_len));
    let mut by_node = BTreeMap::new();
    let mut exact = [None; UNITS];
    for o in file.owned() {
        assert!(o.version <= file.version());
        for unit in &mut exact[(o.range.start() / UNIT) as usize..(o.range.end() / UNIT) as usize] {
            *unit = Some(o);
        }
        if !o.flushed {
            *by_node.entry(o.node).or_insert(0) += o.range.len();
        }
    }
    assert_eq!(file.unflushed_by_node(), &by_node);
    assert_eq!(file.unflushed_bytes(), by_node.values().sum::<u64>());
    assert_eq!(file.is_clean(), by_node.is_empty());
    for (u, unit) in reference.units.iter().enumerate() {
        check_guess(file, u, unit);
        let got = exact[u];
        assert_eq!(got.map(|o| (o.node.0, o.flushed)), unit.owner, "unit {u}");
        match got {
            Some(o) if o.flushed || reference.compacted => check_raised(o, u, reference),
            Some(o) => assert_eq!(o.version.0, unit.changed, "unit {u}"),
            None if (u as u64) < reference.size / UNIT => {
                assert!(file.base_version().0 >= unit.changed, "unit {u}");
                check_changed(file, u, reference);
            }
            None => {}
        }
    }
}

/// A guess is known as one to whoever knows all that came before it, and to nobody who does not.
fn check_guess(file: &FileState, u: usize, unit: &Unit) {
    let after = |known: Version| {
        let ranges = file.guessed_after(known);
        ranges.iter().any(|r| r.contains_offset(u as u64 * UNIT))
    };
    assert_eq!(after(file.version()), unit.guess.is_some(), "unit {u}");
    if let Some(before) = unit.guess.and_then(|v| v.checked_sub(1)) {
        assert!(!after(Version(before)), "unit {u}: something else changed it");
    }
}

/// It is said to have changed after every version before its change, and after none from it on;
/// where versions were merged, from the newest change in its span on.
fn check_changed(file: &FileState, u: usize, reference: &Reference) {
    let Unit { changed, merged, .. } = reference.units[u];
    let after = |known: u64| {
        let ranges = file.changed_after(Version(known));
        ranges.iter().any(|r| r.contains_offset(u as u64 * UNIT))
    };
    assert!(after(changed - 1), "unit {u} changed at {changed}");
    let last = if merged || reference.compacted { newest_in_span(reference, u) } else { changed };
    assert!(
        !after(last.max(reference.believed)),
        "unit {u} changed at {changed} and not after {last}"
    );
}

/// A version is that of the byte, or a newer one of the same owner in the same span.
fn check_raised(o: Owned, u: usize, reference: &Reference) {
    assert!(o.version.0 >= reference.units[u].changed);
    assert!(o.version.0 <= newest_in_span(reference, u));
}

/// A span's older versions may be remembered by bytes that were since taken by others, so the
/// bound is the newest change that ever fell into the span.
fn newest_in_span(reference: &Reference, u: usize) -> u64 {
    let span = u / 8 * 8..u / 8 * 8 + 8;
    reference.units[span].iter().map(|x| x.changed).fold(0, u64::max)
}

fn check_query(file: &FileState, reference: &Reference, a: usize, b: usize) {
    let asked = bytes(a, b);
    let answer = file.query(asked, Version::ZERO);
    assert!(!answer.unchanged && answer.covers.contains(asked));
    let told = (answer.version, answer.size, answer.base_len, answer.base_version);
    assert_eq!(told, (file.version(), file.size(), file.base_len(), file.base_version()));
    for (u, unit) in reference.units.iter().enumerate() {
        let byte = u as u64 * UNIT;
        if !answer.covers.contains_offset(byte) {
            continue;
        }
        let mut hits = answer.ranges.iter().filter(|o| o.range.contains_offset(byte));
        let hit = hits.next();
        assert!(hits.next().is_none(), "disjoint");
        assert_eq!(hit.map(|o| (o.node.0, o.flushed)), unit.owner);
        assert!(hit.is_none_or(|o| o.version.0 >= unit.changed && o.version <= file.version()));
    }
    let again = file.query(asked, file.version());
    assert!(again.unchanged && again.ranges.is_empty() && again.size == file.size());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_file_is_as_the_array(
        size in 0..UNITS,
        ops in prop::collection::vec(op(), 1..60),
        asked in span(),
    ) {
        let bytes = size as u64 * UNIT;
        let mut file = FileState::new(bytes);
        let unit = Unit { owner: None, changed: 1, merged: false, guess: None };
        let mut reference = Reference {
            units: [unit; UNITS], size: bytes, base_len: bytes, grants: Vec::new(), compacted: false,
            believed: 0,
        };
        for op in &ops {
            step(&mut file, &mut reference, op);
            check(&file, &reference);
            check_query(&file, &reference, asked.0, asked.1);
        }
    }
}

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);

#[test]
fn many_entries_are_answered_in_part() {
    let mut file = FileState::new(0);
    for i in 0..1000 {
        file.attach(if i % 2 == 0 { A } else { B }, &[ByteRange::at(i * 10, 10)]);
    }
    let asked = ByteRange::new(95, 125);
    let answer = file.query(asked, Version::ZERO);
    assert_eq!(answer.covers, asked);
    let got: Vec<_> = answer.ranges.iter().map(|o| (o.range, o.node)).collect();
    let expected = [(95, 100, B), (100, 110, A), (110, 120, B), (120, 125, A)];
    assert_eq!(got, expected.map(|(a, b, n)| (ByteRange::new(a, b), n)));

    let whole = file.query(ByteRange::ALL, Version::ZERO);
    assert_eq!((whole.covers, whole.ranges.len()), (ByteRange::ALL, 1000));
}

/// A writer of small records: exact inside, one entry per span for readers.
#[test]
fn small_records_of_one_writer_are_one_range_for_readers() {
    let mut file = FileState::new(0);
    for i in 0..200 {
        file.attach(A, &[ByteRange::at(i * 100, 100)]);
    }
    assert_eq!(file.entries(), 200);
    let answer = file.query(ByteRange::new(0, 10), Version::ZERO);
    assert_eq!((answer.covers, answer.ranges.len()), (ByteRange::ALL, 1));
    let all = file.grantable(A, &[ByteRange::ALL]);
    assert_eq!(all.len(), 1);
    file.mark_flushed(A, &all);
    assert_eq!(file.entries(), 1);
}

/// The flush of the beginning is out while the same span grows: it counts in full.
#[test]
fn a_flush_does_not_fall_short_beside_an_appender() {
    let mut file = FileState::new(0);
    file.attach(A, &[ByteRange::new(0, 100)]);
    let grant = file.grantable(A, &[ByteRange::ALL]);
    for _ in 0..10 {
        file.append(A, 50).unwrap();
    }
    file.attach(A, &[ByteRange::new(10, 20)]);
    assert_eq!(file.mark_flushed(A, &grant), 90);
    assert_eq!(file.mark_flushed(A, &grant), 0, "marked once");
    assert_eq!(file.mark_flushed(B, &grant), 0, "by its owner only");
}

#[test]
fn an_append_past_the_largest_size_changes_nothing() {
    let mut file = FileState::new(SIZE_MAX - 10);
    let copy = file.clone();
    assert_eq!(file.append(A, 11), None);
    assert_eq!(file.append(A, u64::MAX), None);
    assert_eq!(file, copy);
    assert_eq!(file.append(A, 10), Some((SIZE_MAX - 10, Version(2))));
}

/// Clean copies that others fetched after the last attach survive the owner's detach.
#[test]
fn a_detach_does_not_age_the_bytes() {
    let mut file = FileState::new(0);
    let attached = file.attach(A, &[ByteRange::new(0, 100)]);
    let grant = file.grantable(A, &[ByteRange::ALL]);
    file.mark_flushed(A, &grant);
    let detached = file.detach(A, &[ByteRange::new(0, 50), ByteRange::new(30, 100)]).unwrap();
    assert!(detached.version > attached);
    assert_eq!(file.base_version(), attached);
    assert_eq!((file.base_len(), file.entries()), (100, 0));
}

/// It may have written over them and told nobody: what others fetched from it may be that.
#[test]
fn copies_from_a_node_that_is_gone_are_not_the_newest() {
    let mut file = FileState::new(0);
    let version = file.attach(A, &[ByteRange::new(0, 10)]);
    let grant = file.grantable(A, &[ByteRange::ALL]);
    file.mark_flushed(A, &grant);
    assert!(file.node_gone(A).is_empty());
    assert!(file.base_version() > version);
    assert!(file.changed_after(version).is_empty(), "nobody overtook what it wrote itself");
}

#[test]
fn outside_changes_keep_what_is_not_flushed() {
    let mut file = FileState::new(10);
    file.attach(A, &[ByteRange::new(0, 100)]);
    file.base_changed(5);
    assert_eq!((file.size(), file.base_len(), file.unflushed_bytes()), (100, 5, 100));
}

#[test]
fn stored_states_are_checked() {
    let mut file = FileState::new(0);
    file.attach(A, &[ByteRange::new(0, 100)]);
    let json = serde_json::to_string(&file).unwrap();
    let damaged = json.replace("\"node\":1", "\"node\":0");
    assert_ne!(json, damaged);
    assert!(serde_json::from_str::<FileState>(&damaged).is_err());
    assert_eq!(serde_json::from_str::<FileState>(&json).unwrap(), file);
}

proptest! {
    /// Every byte of a claim is judged by itself, as the definition says.
    #[test]
    fn claims_are_judged_byte_by_byte(
        base in 0..30u64,
        attaches in prop::collection::vec((1..4u32, 0..60u64, 1..20u64), 0..8),
        cut in prop::option::of(0..60u64),
        (start, len) in (0..60u64, 0..40u64),
        again in any::<bool>(),
        heard in any::<bool>(),
    ) {
        let mut file = FileState::new(base);
        for (node, at, n) in &attaches {
            file.attach(NodeId(*node), &[ByteRange::at(*at, *n)]);
        }
        let (mut known, before) = (file.version(), file.size());
        if let Some(len) = cut {
            file.truncate(len);
        }
        if heard {
            known = file.version();
        }
        let unheard = cut.filter(|len| *len < before && !heard && known != Version::ZERO);
        let claim = if again { crate::Claim::Again } else { crate::Claim::Guessed { known } };
        let range = ByteRange::at(start, len);
        let (granted, contested) = file.judge_claim(A, range, claim);
        let has = |list: &[ByteRange], b| list.iter().filter(|r| r.contains_offset(b)).count();
        for byte in 0..120 {
            let owner = file.owned_in(ByteRange::at(byte, 1)).next().map(|o| o.node);
            let was_cut = unheard.is_some_and(|len| byte >= len);
            let free = owner.is_none() && byte >= file.base_len() && !again && !was_cut;
            let yes = range.contains_offset(byte) && (owner == Some(A) || free);
            let no = range.contains_offset(byte) && !yes;
            prop_assert_eq!((has(&granted, byte), has(&contested, byte)),
                (usize::from(yes), usize::from(no)), "byte {}", byte);
        }
        prop_assert!(contested.is_sorted() && granted.is_sorted());
    }
}

/// An append that never came into being leaves no trace behind the end, and zeros before others' bytes.
#[test]
fn an_append_can_be_undone() {
    let (lost, other) = (NodeId(1), NodeId(2));
    for (behind, adopted, size, left) in [
        (None, None, 10, vec![]),
        (Some((20, 25)), None, 25, vec![(20, 25)]),
        (None, Some((10, 14)), 14, vec![(10, 14)]),
    ] {
        let mut file = FileState::new(10);
        let (start, version) = file.append(lost, 10).expect("a place");
        let range = ByteRange::at(start, 10);
        for (start, end) in [behind, adopted].into_iter().flatten() {
            file.attach(other, &[ByteRange::new(start, end)]);
        }
        let before = file.query(ByteRange::ALL, Version::ZERO);
        let undone = file.undo_append(lost, range);
        assert!(undone > before.version && undone > version);
        let after = file.query(ByteRange::ALL, Version::ZERO);
        assert_eq!((after.size, after.base_version), (size, undone), "copies of it are old");
        let owned: Vec<_> = after.ranges.iter().map(|o| (o.range.start(), o.range.end())).collect();
        assert_eq!(owned, left);
        assert_eq!(file.undo_append(lost, range), undone, "once");
    }
}

#[test]
fn growing_never_cuts() {
    let mut file = FileState::new(0);
    let version = file.attach(A, &[ByteRange::new(0, 100)]);
    assert_eq!((file.grow(50), file.grow(100), file.size()), (version, version, 100));
    assert!(file.grow(200) > version);
    assert_eq!((file.size(), file.unflushed_bytes(), file.base_len()), (200, 100, 0));
}

/// However many nodes write one file, an open tells as much; what is asked for then is the rest.
#[test]
fn an_open_tells_no_more_of_a_larger_file() {
    const RECORD: u64 = 47_008;
    for nodes in [10, 300, 5_000u64] {
        let mut file = FileState::new(0);
        for node in 0..nodes {
            file.attach(NodeId(node as u32 + 1), &[ByteRange::at(node * RECORD, RECORD)]);
        }
        let opened = file.query_at_open(Version::ZERO);
        assert_eq!(opened.ranges.len() as u64, nodes.min(OPEN_ENTRIES as u64));
        assert_eq!((opened.version, opened.size), (file.version(), nodes * RECORD));
        assert!(file.query_at_open(opened.version).unchanged);
        let mut told = opened.ranges.clone();
        if let Some(rest) = opened.rest_of(ByteRange::ALL) {
            let rest = file.query(rest, Version::ZERO);
            assert_eq!(rest.covers.start(), opened.covers.end());
            told.extend(rest.ranges);
        }
        assert_eq!(told, file.query(ByteRange::ALL, Version::ZERO).ranges);
    }
}
