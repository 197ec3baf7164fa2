//! The image against an array of bytes, and its snapshots.

use super::*;
use crate::record::{Header, Home, Kept};
use ebb_types::facts::Shape;
use ebb_types::{FileKind, Time, Version};
use proptest::prelude::*;

const N: u64 = 24;
const INO: Ino = Ino(77);

fn header(path: &str) -> Header {
    Header {
        path: path.as_bytes().to_vec(),
        perm: 0o640,
        uid: 1,
        gid: 2,
        atime: Time::default(),
        mtime: Time::default(),
        size: 0,
        home: None,
        under: None,
        shared: false,
    }
}

fn record() -> impl Strategy<Value = Record> {
    let span = || (0..N, 0..8u64).prop_map(|(a, l)| ByteRange::new(a, (a + l).min(N)));
    let ranges = move || prop::collection::vec(span(), 0..3);
    let version = || (1..6u64).prop_map(Version);
    let now = Time { sec: 5, nsec: 0 };
    prop_oneof![
        4 => (ranges(), version()).prop_map(move |(r, v)| Record::Written(INO, r, v, now)),
        4 => (ranges(), version()).prop_map(move |(r, v)| Record::Attaching(INO, r, v, now)),
        4 => (ranges(), version()).prop_map(|(r, v)| Record::Attached(INO, r, v, N)),
        4 => (ranges(), any::<bool>(), version()).prop_map(move |(r, sent, v)| {
            let kept = if sent { Kept::Attaching } else { Kept::Written };
            Record::Guessed(INO, r, kept, v, now)
        }),
        2 => (ranges(), version()).prop_map(|(r, v)| Record::Again(INO, r, v)),
        2 => ranges().prop_map(|r| Record::Refused(INO, r)),
        1 => Just(Record::Appending(INO)),
        1 => (span(), version()).prop_map(move |(r, v)| Record::Appended(INO, r, v, N, now)),
        3 => (ranges(), version()).prop_map(|(r, v)| {
            Record::Flushed(INO, r.into_iter().map(|r| (r, v)).collect())
        }),
        1 => ranges().prop_map(|r| Record::Lost(INO, r)),
        1 => (0..N, version()).prop_map(|(l, v)| Record::Cut(INO, l, v)),
        2 => ranges().prop_map(|r| Record::Durable(INO, r)),
        1 => ranges().prop_map(|r| Record::Damaged(INO, r)),
        1 => any::<bool>().prop_map(|alone| Record::Alone(INO, alone)),
        1 => Just(Record::Overrides(INO)),
        1 => Just(Record::Gone(INO)),
        2 => Just(Record::File(INO, Box::new(header("d/f")))),
    ]
}

/// The same rules for one byte.
fn step(old: Option<Held>, hit: bool, record: &Record, at: u64) -> Option<Held> {
    let durable = old.is_some_and(|h| h.durable);
    let by_name = |kept| Some(Held { kept, durable, guessed: false, damaged: false });
    match record {
        Record::Written(..) if hit => by_name(Kept::Written),
        Record::Attaching(..) if hit => by_name(Kept::Attaching),
        Record::Guessed(_, _, kept, ..) if hit => {
            Some(Held { kept: *kept, durable, guessed: true, damaged: false })
        }
        Record::Again(_, _, v) if hit => match old {
            None => by_name(Kept::Again(*v)),
            Some(h) if matches!(h.kept, Kept::Owned(_) | Kept::Again(_)) => {
                Some(Held { kept: Kept::Again(*v), ..h })
            }
            unpublished => unpublished,
        },
        Record::Refused(..) if hit => None,
        Record::Attached(_, _, v, _) if hit => old.map(|h| match h.kept {
            Kept::Attaching => Held { kept: Kept::Owned(*v), ..h },
            Kept::Owned(o) | Kept::Again(o) => Held { kept: Kept::Owned(o.max(*v)), ..h },
            Kept::Written => h,
        }),
        Record::Appended(_, _, v, ..) if hit => by_name(Kept::Owned(*v)),
        Record::Lost(..) if hit => {
            old.filter(|h| !matches!(h.kept, Kept::Owned(_) | Kept::Again(_)))
        }
        Record::Durable(..) if hit => old.map(|h| Held { durable: true, ..h }),
        Record::Damaged(..) if hit => old.map(|h| Held { durable: false, damaged: true, ..h }),
        Record::Cut(_, len, _) if at >= *len => None,
        Record::Flushed(_, ranges) => {
            let upto = ranges.iter().filter(|(r, _)| r.contains_offset(at)).map(|p| p.1).max();
            old.filter(|h| !matches!(h.kept, Kept::Owned(v) if Some(v) <= upto))
        }
        _ => old,
    }
}

fn hits(record: &Record, at: u64) -> bool {
    match record {
        Record::Written(_, r, ..)
        | Record::Attaching(_, r, ..)
        | Record::Attached(_, r, ..)
        | Record::Lost(_, r)
        | Record::Guessed(_, r, ..)
        | Record::Again(_, r, _)
        | Record::Refused(_, r)
        | Record::Damaged(_, r)
        | Record::Durable(_, r) => r.iter().any(|r| r.contains_offset(at)),
        Record::Appended(_, r, ..) => r.contains_offset(at),
        _ => false,
    }
}

fn at(image: &Image, offset: u64) -> Option<Held> {
    let found = image.file(INO)?.held_in(ByteRange::at(offset, 1));
    found.first().map(|(_, h)| *h)
}

proptest! {
    #[test]
    fn every_byte_follows_its_rules(records in prop::collection::vec(record(), 0..40)) {
        let mut image = Image::default();
        let mut bytes = [None; N as usize];
        for record in &records {
            let known = image.file(INO).is_some();
            image.apply(record);
            for (offset, byte) in bytes.iter_mut().enumerate() {
                let offset = offset as u64;
                match record {
                    Record::Gone(_) => *byte = None,
                    r if known => *byte = step(*byte, hits(r, offset), r, offset),
                    _ => {}
                }
                prop_assert_eq!(at(&image, offset), *byte, "byte {} after {:?}", offset, record);
            }
        }
        let held = bytes.iter().filter(|b| b.is_some()).count() as u64;
        prop_assert_eq!(image.file(INO).map_or(0, Note::len), held);
    }

    #[test]
    fn a_replayed_snapshot_is_the_image(records in prop::collection::vec(record(), 0..40)) {
        let mut image = Image::default();
        records.iter().for_each(|r| image.apply(r));
        let mut again = Image::default();
        image.snapshot().iter().for_each(|r| again.apply(r));
        prop_assert_eq!(again, image);
    }

    #[test]
    fn what_is_not_written_is_the_rest(
        records in prop::collection::vec(record(), 0..20),
        start in 0..N,
        len in 1..N,
    ) {
        let mut image = Image::default();
        image.apply(&Record::File(INO, Box::new(header("f"))));
        records.iter().for_each(|r| image.apply(r));
        let Some(note) = image.file(INO) else { return Ok(()) };
        let range = ByteRange::new(start, start + len);
        let missing = note.not_written(&[range]);
        for offset in range.to_std() {
            let kept = at(&image, offset).map(|h| h.kept);
            let wanted = !matches!(kept, Some(Kept::Written | Kept::Attaching));
            prop_assert_eq!(missing.iter().any(|r| r.contains_offset(offset)), wanted);
        }
    }
}

#[test]
fn files_are_found_by_any_name_in_their_path() {
    let mut image = Image::default();
    for (ino, path) in [(1, "a/b/c"), (2, "a/x"), (3, "c")] {
        image.apply(&Record::File(Ino(ino), Box::new(header(path))));
    }
    assert_eq!(image.named(b"a"), [Ino(1), Ino(2)]);
    assert_eq!(image.named(b"c"), [Ino(1), Ino(3)]);
    image.apply(&Record::File(Ino(1), Box::new(header("z"))));
    image.apply(&Record::Gone(Ino(3)));
    assert_eq!(image.named(b"a"), [Ino(2)]);
    assert_eq!(image.named(b"c"), []);
    assert_eq!(image.named(b"z"), [Ino(1)]);
}

#[test]
fn what_no_daemon_writes_is_not_sound() {
    // Inverted: as only a hostile journal has it.
    let inverted: ByteRange = postcard::from_bytes(&[5, 3]).unwrap();
    assert!(!Record::Lost(INO, vec![inverted]).is_sound());
    let beyond = ByteRange::new(0, u64::MAX);
    assert!(!Record::Durable(INO, vec![beyond]).is_sound());
    assert!(!Record::Cut(INO, u64::MAX, Version(1)).is_sound());
    assert!(Record::Lost(INO, vec![ByteRange::new(3, 5)]).is_sound());
    let guessed = |kept| Record::Guessed(INO, vec![], kept, Version(1), Time::default());
    assert!(guessed(Kept::Attaching).is_sound() && !guessed(Kept::Owned(Version(1))).is_sound());
}

#[test]
fn held_bytes_of_older_formats_are_understood() {
    for durable in [false, true] {
        let old = postcard::to_stdvec(&(Kept::Owned(Version(300)), durable)).unwrap();
        let held: Held = postcard::from_bytes(&old).unwrap();
        assert_eq!(
            held,
            Held { kept: Kept::Owned(Version(300)), durable, guessed: false, damaged: false }
        );
        assert_eq!(postcard::to_stdvec(&held).unwrap(), old);
    }
    let unknown = postcard::to_stdvec(&(Kept::Written, 8u8)).unwrap();
    assert!(postcard::from_bytes::<Held>(&unknown).is_err());
}

#[test]
fn shapes_of_older_formats_are_understood() {
    let (time, kind) = (Time::default(), FileKind::Regular);
    let old = (kind, 0o644u32, 1u32, 2u32, 0u32, time, time, None::<Box<[u8]>>, 77u64, 5u64);
    let old = postcard::to_stdvec(&old).unwrap();
    let mut shape: Shape = postcard::from_bytes(&old).unwrap();
    assert_eq!((shape.size, shape.zeros, shape.placed, shape.is_zeros()), (77, false, 5, false));
    assert_eq!(postcard::to_stdvec(&shape).unwrap(), old);
    shape.zeros = true;
    let new = postcard::to_stdvec(&shape).unwrap();
    let read: Shape = postcard::from_bytes(&new).unwrap();
    assert!(read == shape && read.is_zeros() && read.size == 77);
}

#[test]
fn cuts_of_others_bytes_are_kept_when_nothing_is_held() {
    let mut image = Image::default();
    image.apply(&Record::File(INO, Box::new(header("f"))));
    image.apply(&Record::Overrides(INO));
    image.apply(&Record::Cut(INO, 100, Version(5)));
    let cuts = |image: &Image| image.sayable().map(|(_, n)| n.cuts.clone()).collect::<Vec<_>>();
    assert_eq!(cuts(&image), [vec![(100, Version(5))]]);
    assert!(
        image.file(INO).is_some_and(|n| n.overrides && !n.has_bytes())
            && image.unpublished().next().is_none()
    );

    // What was flushed since is remembered with them, also when nobody else has the file by now.
    let home = Home { path: b"f".to_vec(), ino: 5, seen: None, changing: false };
    image.apply(&Record::File(INO, Box::new(Header { home: Some(home), ..header("f") })));
    image.apply(&Record::Alone(INO, true));
    let range = ByteRange::new(0, 50);
    image.apply(&Record::Attaching(INO, vec![range], Version(5), Time::default()));
    image.apply(&Record::Attached(INO, vec![range], Version(6), 50));
    image.apply(&Record::Flushed(INO, vec![(range, Version(6))]));
    let note = image.file(INO).expect("it is kept");
    assert!(note.flushed().eq([(range, Version(6))]) && note.overrides);

    let mut again = Image::default();
    image.snapshot().iter().for_each(|record| again.apply(record));
    assert_eq!(again, image);
    image.apply(&Record::Gone(INO));
    assert!(image.sayable().next().is_none());
}

/// Whoever had older bytes of it may still have them, whatever the service knows by now.
#[test]
fn what_was_flushed_beside_others_is_remembered_also_when_they_have_gone() {
    let home = Home { path: b"f".to_vec(), ino: 5, seen: None, changing: false };
    let range = ByteRange::new(0, 50);
    for (beside, kept) in [(false, false), (true, true)] {
        let mut image = Image::default();
        image.apply(&Record::File(
            INO,
            Box::new(Header { home: Some(home.clone()), ..header("f") }),
        ));
        image.apply(&Record::Alone(INO, !beside));
        image.apply(&Record::Attaching(INO, vec![range], Version(5), Time::default()));
        image.apply(&Record::Attached(INO, vec![range], Version(6), 50));
        image.apply(&Record::Attaching(
            INO,
            vec![ByteRange::new(60, 70)],
            Version(6),
            Time::default(),
        ));
        image.apply(&Record::Flushed(INO, vec![(range, Version(6))]));
        image.apply(&Record::Alone(INO, true));
        let note = image.file(INO).expect("more is held");
        assert_eq!((note.flushed().next().is_some(), note.alone), (kept, !beside));
    }
}

#[test]
fn what_is_in_a_window_was_written_as_far_as_the_cache_file_goes() {
    let mut image = Image::default();
    image.apply(&Record::File(INO, Box::new(header("f"))));
    let window = ByteRange::new(10, 50);
    let owned = ByteRange::new(15, 20);
    image.apply(&Record::Attaching(INO, vec![owned], Version(3), Time::default()));
    image.apply(&Record::Attached(INO, vec![owned], Version(4), 20));
    image.apply(&Record::Window(INO, window, Version(5)));
    let mut note = image.file(INO).expect("a file").clone();
    assert_eq!((note.window, note.known, note.len()), (Some(window), Version(5), 5));
    note.fill_untold(30);
    let written = Held::new(Kept::Written);
    let want = [(10, 15, written), (15, 20, Held::new(Kept::Owned(Version(4)))), (20, 30, written)];
    let want = want.map(|(a, b, held)| (ByteRange::new(a, b), held));
    assert_eq!(note.held().collect::<Vec<_>>(), want);
    image.apply(&Record::Flushed(INO, vec![(owned, Version(4))]));
    assert!(image.file(INO).is_some(), "more may have been written");
    image.apply(&Record::Window(INO, ByteRange::new(0, 0), Version(0)));
    assert!(image.file(INO).is_none());
}

/// Nobody else knows of them when the service is gone.
#[test]
fn what_was_flushed_is_remembered_until_the_file_has_its_name() {
    let home = |path: &str| {
        let home = Home { path: path.into(), ino: 5, seen: None, changing: false };
        Record::File(INO, Box::new(Header { home: Some(home), ..header("f") }))
    };
    let range = ByteRange::new(10, 20);
    let written = [
        Record::Attaching(INO, vec![range], Version(3), Time::default()),
        Record::Attached(INO, vec![range], Version(4), 20),
        Record::Flushed(INO, vec![(range, Version(4))]),
    ];
    for (alone, path, kept) in [
        (true, ".ebb-part-1", true),
        (false, ".ebb-part-1", true),
        (false, "f", true),
        (true, "f", false),
    ] {
        let mut image = Image::default();
        [home(path), Record::Alone(INO, alone)].iter().for_each(|r| image.apply(r));
        written.iter().for_each(|r| image.apply(r));
        assert_eq!(image.file(INO).is_some(), kept, "{alone} {path}");
        let Some(note) = image.file(INO) else { continue };
        assert_eq!(note.flushed().collect::<Vec<_>>(), [(range, Version(4))]);
        assert_eq!(note.is_unpublished(), path != "f");
        let mut again = Image::default();
        image.snapshot().iter().for_each(|r| again.apply(r));
        assert_eq!(again, image);
        image.apply(&home("f"));
        let left = image.file(INO).expect("known").flushed().count();
        assert_eq!(left, usize::from(!alone), "others may have older bytes of it");
        image.apply(&Record::Cut(INO, 15, Version(5)));
        let note = image.file(INO).filter(|_| !alone);
        let cut = note.is_none_or(|n| n.flushed().all(|(r, _)| r.end() <= 15));
        assert!(cut, "what was cut off is no more");
    }
}

/// Of a file that sits here all of the cache file was written, and nothing else.
#[test]
fn what_a_seat_has_is_its_cache_file() {
    let mut image = Image::default();
    image.apply(&Record::File(INO, Box::new(header("f"))));
    let owned = ByteRange::new(15, 20);
    image.apply(&Record::Attaching(INO, vec![owned], Version(3), Time::default()));
    image.apply(&Record::Attached(INO, vec![owned], Version(4), 20));
    image.apply(&Record::Seat(INO, 9, Version(6)));
    image.apply(&Record::Flushed(INO, vec![(owned, Version(4))]));
    let mut again = Image::default();
    image.snapshot().iter().for_each(|record| again.apply(record));
    let mut note = again.file(INO).expect("it sits here").clone();
    assert_eq!((note.seat, note.known), (9, Version(6)));
    for len in [30, 10, 0] {
        note.fill_untold(len);
        assert_eq!((note.len(), note.header.size), (len, len));
        assert!(note.held().all(|(_, held)| held == Held::new(Kept::Written)));
    }
    image.apply(&Record::Seat(INO, 0, Version(0)));
    assert!(image.file(INO).is_none());
}

#[test]
fn a_file_is_as_long_as_the_service_said_last() {
    let mut image = Image::default();
    let mut header = header("f");
    header.size = 900;
    image.apply(&Record::File(INO, Box::new(header)));
    let range = ByteRange::new(10, 20);
    let size = |image: &Image| image.file(INO).unwrap().header.size;
    for (version, told, want) in [(5, 300, 300), (4, 400, 400), (6, 15, 20)] {
        let now = Time::default();
        image.apply(&Record::Attaching(INO, vec![range], Version(1), now));
        image.apply(&Record::Attached(INO, vec![range], Version(version), told));
        assert_eq!(size(&image), want, "version {version}, {told}");
    }
}
