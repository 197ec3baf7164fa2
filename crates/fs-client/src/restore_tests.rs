//! The table of verdicts, every row, and segments that cover every byte once.

use super::*;
use ebb_node_journal::{Header, Record};
use ebb_types::Time;
use proptest::prelude::*;

const ME: NodeId = NodeId(1);
const OTHER: NodeId = NodeId(2);

fn case() -> Case {
    Case {
        me: ME,
        rebooted: false,
        file: Version(9),
        known: Version(5),
        appending: false,
        heir: false,
    }
}

fn held(kept: Kept) -> Option<Held> {
    Some(Held::new(kept))
}

fn today(owner: NodeId, version: u64, flushed: bool) -> Today {
    Today { owner, version: Version(version), flushed }
}

#[test]
fn every_row_of_the_table() {
    use Verdict::*;
    let owned = held(Kept::Owned(Version(4)));
    let rows = [
        (held(Kept::Owned(Version(10))), today(OTHER, 9, false), Dirty),
        (owned, today(ME, 7, false), Owned(Version(7))),
        (owned, today(ME, 7, true), GiveBack),
        (owned, today(OTHER, 7, false), Drop),
        (owned, today(NodeId::NOBODY, 7, false), Drop),
        (held(Kept::Again(Version(10))), today(OTHER, 9, false), Dirty),
        (held(Kept::Again(Version(4))), today(ME, 7, false), Owned(Version(7))),
        (held(Kept::Again(Version(4))), today(ME, 7, true), Again),
        (held(Kept::Again(Version(4))), today(OTHER, 7, false), Drop),
        (held(Kept::Attaching), today(ME, 7, false), Owned(Version(7))),
        (held(Kept::Attaching), today(ME, 7, true), Dirty),
        (held(Kept::Written), today(ME, 7, false), Dirty),
        (held(Kept::Written), today(ME, 7, true), Dirty),
        (held(Kept::Written), today(OTHER, 5, false), Dirty),
        (held(Kept::Written), today(OTHER, 6, false), Aside),
        (held(Kept::Attaching), today(NodeId::NOBODY, 5, false), Dirty),
        (held(Kept::Attaching), today(NodeId::NOBODY, 6, false), Aside),
        (None, today(ME, 7, false), Lost),
        (None, today(ME, 7, true), GiveBack),
        (None, today(OTHER, 7, false), Drop),
        (None, today(NodeId::NOBODY, 7, false), Drop),
    ];
    for (held, today, wanted) in rows {
        assert_eq!(verdict(held, today, &case()), wanted, "{held:?} {today:?}");
    }
    let appending = Case { appending: true, ..case() };
    assert_eq!(verdict(None, today(ME, 7, false), &appending), OwnedZeros(Version(7)));
    // Held or not, an append touches no other bytes.
    assert_eq!(verdict(owned, today(ME, 7, false), &appending), Owned(Version(7)));
}

#[test]
fn after_a_boot_only_what_was_synced_is_held() {
    let rebooted = Case { rebooted: true, appending: true, ..case() };
    let kinds = [Kept::Owned(Version(4)), Kept::Again(Version(4)), Kept::Attaching, Kept::Written];
    for kept in kinds {
        let durable = Some(Held { durable: true, ..Held::new(kept) });
        for today in [today(ME, 7, false), today(OTHER, 7, false), today(ME, 7, true)] {
            assert_eq!(verdict(durable, today, &rebooted), verdict(held(kept), today, &case()));
            let lost = verdict(held(kept), today, &rebooted);
            assert_eq!(lost, verdict(None, today, &case()), "{kept:?} {today:?}");
        }
    }
}

/// A daemon that took over published the middle; the rest waits, and what is owned has its versions.
#[test]
fn what_was_published_meanwhile_is_noted_as_published() {
    let (at, v) = (|from, to| ByteRange::new(from, to), Version);
    let its = Owned { range: at(30, 40), node: ME, version: v(3), flushed: false };
    let answer = MapAnswer {
        version: v(5),
        size: 40,
        base_version: v(0),
        base_len: 0,
        unchanged: false,
        covers: ByteRange::ALL,
        ranges: vec![its],
    };
    let view = || FileView::restored(ME, &answer, &[(at(30, 40), v(3))], &[at(0, 30)]);
    let judged = [
        (at(0, 30), Verdict::Dirty, held(Kept::Written)),
        (at(30, 40), Verdict::Owned(v(3)), held(Kept::Owned(v(2)))),
        (at(40, 50), Verdict::Drop, held(Kept::Owned(v(1)))),
    ];
    let kept = |view: &FileView| {
        let now = held_now(&judged, view);
        now.into_iter().map(|(r, h)| (r, h.kept)).collect::<Vec<_>>()
    };
    let owned = (at(30, 40), Kept::Owned(v(3)));
    assert_eq!(kept(&view()), [(at(0, 30), Kept::Written), owned]);
    let mut told = view();
    assert_eq!(told.take_unattached(at(10, 20)), [at(10, 20)]);
    told.attached(&[at(10, 20)], v(7), 40);
    let parts = [(at(0, 10), Kept::Written), (at(10, 20), Kept::Owned(v(7)))];
    assert_eq!(kept(&told), [&parts[..], &[(at(20, 30), Kept::Written), owned]].concat());
}

proptest! {
    /// Segments are sorted and disjoint, and no byte that is held or owned here is forgotten.
    #[test]
    fn every_byte_is_judged_once(
        held in prop::collection::vec((0..60u64, 1..9u64, 0..4u8, any::<bool>()), 0..6),
        owners in prop::collection::vec((1..9u64, 0..6u64, 1..3u32, any::<bool>()), 0..6),
        changed in prop::collection::vec((0..60u64, 0..9u64), 0..4),
        rebooted: bool,
    ) {
        let mut image = Image::default();
        let header = Header {
            path: b"f".to_vec(), perm: 0, uid: 0, gid: 0, atime: Time::default(),
            mtime: Time::default(), size: 0, home: None, under: None, shared: false,
        };
        image.apply(&Record::File(Ino(1), Box::new(header)));
        let extents: Vec<_> = held.iter().map(|(s, l, k, durable)| {
            let kinds =
                [Kept::Written, Kept::Attaching, Kept::Owned(Version(3)), Kept::Again(Version(3))];
            (ByteRange::at(*s, *l), Held { durable: *durable, ..Held::new(kinds[*k as usize]) })
        }).collect();
        image.apply(&Record::Extents(Ino(1), extents, Version(3), false));
        let mut at = 0;
        let mut ranges = Vec::new();
        for (len, gap, node, flushed) in owners {
            let range = ByteRange::at(at + gap, len);
            at = range.end();
            ranges.push(Owned { range, node: NodeId(node), version: Version(4), flushed });
        }
        let answer = MapAnswer {
            version: Version(6), size: at, base_version: Version(2), base_len: 0,
            unchanged: false, covers: ByteRange::ALL, ranges,
        };
        let note = image.file(Ino(1)).unwrap();
        let changed: Vec<_> = changed.iter().map(|(s, l)| ByteRange::at(*s, *l)).collect();
        let judged = judge(Some(note), &answer, &changed, ME, rebooted, false);
        for pair in judged.windows(2) {
            prop_assert!(pair[0].0.end() <= pair[1].0.start());
        }
        let case = Case { me: ME, rebooted, file: answer.version, known: note.known, appending: false, heir: false };
        for offset in 0..80u64 {
            let byte = ByteRange::at(offset, 1);
            let held = note.held_in(byte).first().map(|p| p.1);
            let owner = answer.ranges.iter().find(|o| o.range.contains_offset(offset));
            let newer = changed.iter().any(|r| r.contains_offset(offset));
            let nobody = today(NodeId::NOBODY, note.known.0 + u64::from(newer), false);
            let today = owner.map_or(nobody, |o| Today {
                owner: o.node, version: o.version, flushed: o.flushed,
            });
            let got = judged.iter().find(|(r, ..)| r.contains_offset(offset)).map(|p| p.1);
            prop_assert_eq!(got.unwrap_or(Verdict::Drop), verdict(held, today, &case));
        }
    }
}

#[test]
fn the_rest_of_a_cache_file_becomes_holes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    for (len, end) in [(20_000u64, 0u64), (9_000, 0), (9_000, 30_000), (0, 12_000)] {
        std::fs::write(&path, vec![7; len as usize]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let kept = [ByteRange::new(100, 200), ByteRange::new(5_000, 9_000)];
        clear_the_rest(&file, &kept, end).unwrap();
        let got = std::fs::read(&path).unwrap();
        assert_eq!(got.len() as u64, end.max(9_000));
        for (at, byte) in got.iter().enumerate() {
            let at = at as u64;
            let inside = kept.iter().any(|r| r.contains_offset(at)) && at < len;
            assert_eq!(*byte, if inside { 7 } else { 0 }, "byte {at} of {len}, {end}");
        }
    }
}
