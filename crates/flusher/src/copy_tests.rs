//! One grant at a time, against a real directory, with and without faults.

use super::*;
use ebb_backend::faulty::Faults;
use ebb_backend::{BackendError, Faulty, PosixDir};
use ebb_types::{FileKind, Ino, Version};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::MetadataExt;

struct Fixture {
    dir: tempfile::TempDir,
    faulty: Arc<Faulty>,
    cache: Arc<File>,
}

/// A cache file of `size` bytes without two equal neighbours, and an empty backing file.
fn fixture(size: u64) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("backing")).unwrap();
    std::fs::write(dir.path().join("backing/f"), b"").unwrap();
    let content: Vec<u8> = (0..size).map(|i| (i % 251) as u8 + 1).collect();
    std::fs::write(dir.path().join("cache"), content).unwrap();
    let cache = Arc::new(File::open(dir.path().join("cache")).unwrap());
    let posix = PosixDir::open_root(&dir.path().join("backing")).unwrap();
    Fixture { faulty: Faulty::new(Arc::new(posix), 1), dir, cache }
}

impl Fixture {
    fn grant(&self, ranges: &[ByteRange]) -> Grant {
        Grant {
            ino: Ino(9),
            id: 1,
            ranges: ranges.iter().map(|r| (*r, Version(1))).collect(),
            next: None,
            shape: None,
            cache: Arc::clone(&self.cache),
            guard: None,
            backing_path: b"f".to_vec(),
            backing_ino: std::fs::metadata(self.dir.path().join("backing/f")).unwrap().ino(),
            owner: 0,
            label: "f".to_owned(),
        }
    }

    fn stored(&self) -> Vec<u8> {
        std::fs::read(self.dir.path().join("backing/f")).unwrap()
    }

    fn move_it(&self, ranges: &[ByteRange], verify: bool) -> Result<Moved, Unmoved> {
        let mut buf = Vec::new();
        let how = How { verify: verify.then_some(ReadBack::Storage), eager: verify };
        move_grant(self.faulty.as_ref(), &self.grant(ranges), how, &mut buf, &mut |_| true)
    }
}

/// Both halves.
fn move_grant(
    backend: &dyn Backend,
    grant: &Grant,
    how: How,
    buf: &mut Vec<u8>,
    proceed: &mut dyn FnMut(Step) -> bool,
) -> Result<Moved, Unmoved> {
    match write_grant(backend, grant, how, buf, proceed)? {
        Some(written) => written.finish(buf, proceed),
        None => Ok(Moved::default()),
    }
}

const PLAIN: How = How { verify: None, eager: false };
const VERIFIED: How = How { verify: Some(ReadBack::Memory), eager: true };

fn failure(outcome: Result<Moved, Unmoved>) -> FlushError {
    match outcome {
        Err(Unmoved::Failed(e)) => e,
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn exactly_the_granted_bytes_arrive(
        ranges in proptest::collection::vec((0u64..5000, 0u64..700), 0..8),
        verify in any::<bool>(),
    ) {
        let fixture = fixture(6000);
        let ranges: Vec<ByteRange> = ranges.iter().map(|(at, len)| ByteRange::at(*at, *len)).collect();
        let moved = fixture.move_it(&ranges, verify).unwrap();
        let granted = |i: u64| ranges.iter().any(|r| r.contains_offset(i));
        let end = (0..6000).filter(|i| granted(*i)).max().map_or(0, |last| last + 1);
        let want: Vec<u8> =
            (0..end).map(|i| if granted(i) { (i % 251) as u8 + 1 } else { 0 }).collect();
        prop_assert_eq!(fixture.stored(), want);
        prop_assert_eq!(moved.bytes, (0..6000).filter(|i| granted(*i)).count() as u64);
        prop_assert_eq!(moved.verified, if verify { moved.bytes } else { 0 });
    }
}

#[test]
fn large_grants_arrive_through_short_writes() {
    let size = 3 * plan::PIECE + 12345;
    let fixture = fixture(size);
    fixture.faulty.set(Faults { short: 0.5, ..Faults::default() });
    let moved = fixture.move_it(&[ByteRange::at(0, size)], true).unwrap();
    assert_eq!(moved, Moved { bytes: size, verified: size, shaped: false });
    let want = std::fs::read(fixture.dir.path().join("cache")).unwrap();
    assert!(fixture.stored() == want);
}

#[test]
fn silent_damage_is_found_by_verification_and_only_by_it() {
    let fixture = fixture(5000);
    fixture.faulty.set(Faults { damage: 1.0, ..Faults::default() });
    let range = ByteRange::at(0, 5000);
    assert_eq!(failure(fixture.move_it(&[range], true)), FlushError::Mismatch { range });
    assert!(fixture.move_it(&[range], false).is_ok(), "the damage went unnoticed");
}

#[test]
fn errors_keep_their_errno_and_operation() {
    let fixture = fixture(100);
    for (faults, errno) in [
        (Faults { eio: 1.0, ..Faults::default() }, Errno::EIO),
        (Faults { enospc: 1.0, ..Faults::default() }, Errno::ENOSPC),
    ] {
        fixture.faulty.set(faults);
        let e = failure(fixture.move_it(&[ByteRange::at(0, 100)], true));
        assert_eq!(e.errno(), errno);
        assert_eq!(e.operation(), if errno == Errno::EIO { "open" } else { "write" });
    }
}

#[test]
fn a_short_cache_file_is_an_error_not_zeros() {
    let fixture = fixture(100);
    let e = failure(fixture.move_it(&[ByteRange::at(90, 20)], false));
    assert!(matches!(e, FlushError::Cache { offset: 90, .. }), "{e}");
    assert_eq!(fixture.stored(), b"");
}

#[test]
fn a_file_that_changed_hands_is_left_alone() {
    let fixture = fixture(100);
    let mut grant = fixture.grant(&[ByteRange::at(0, 100)]);
    grant.backing_ino += 1;
    let outcome =
        move_grant(fixture.faulty.as_ref(), &grant, PLAIN, &mut Vec::new(), &mut |_| true);
    let e = failure(outcome);
    assert!(matches!(e, FlushError::Backing(BackendError::Moved { .. })), "{e}");
    assert_eq!(fixture.stored(), b"");
}

#[test]
fn a_file_gets_its_shape_when_it_has_its_size() {
    let fixture = fixture(100);
    let time = ebb_types::Time { sec: 1_000_000, nsec: 7 };
    let meta = std::fs::metadata(fixture.dir.path().join("cache")).unwrap();
    let (uid, gid) = (meta.uid(), meta.gid());
    for (size, shaped) in [(101, false), (100, true)] {
        let shape = Attr {
            ino: Ino(9),
            kind: FileKind::Regular,
            perm: 0o640,
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            size,
            atime: time,
            mtime: time,
            ctime: time,
        };
        let mut grant = fixture.grant(&[ByteRange::at(0, 100)]);
        grant.shape = Some(shape);
        let mut buf = Vec::new();
        let moved =
            move_grant(fixture.faulty.as_ref(), &grant, VERIFIED, &mut buf, &mut |_| true).unwrap();
        assert_eq!(moved, Moved { bytes: 100, verified: 100, shaped });
        let there = std::fs::metadata(fixture.dir.path().join("backing/f")).unwrap();
        assert_eq!((there.mtime(), there.mtime_nsec()) == (1_000_000, 7), shaped);
        assert_eq!(there.mode() & 0o7777 == 0o640, shaped);
    }
}

#[test]
fn impossible_ranges_are_refused() {
    let fixture = fixture(100);
    let e = failure(fixture.move_it(&[ByteRange::from(10)], false));
    assert!(matches!(e, FlushError::BadGrant { .. }), "{e}");
}

#[test]
fn a_stop_comes_between_pieces_or_before_the_sync() {
    let fixture = fixture(3 * plan::PIECE);
    let grant = fixture.grant(&[ByteRange::at(0, 3 * plan::PIECE)]);
    for allowed in 0..5 {
        let (mut writes, mut steps) = (0, Vec::new());
        let mut proceed = |step: Step| {
            steps.push(step.name());
            if !matches!(step, Step::Write(_) | Step::Sync) {
                // A no to anything else means nothing.
                return false;
            }
            writes += 1;
            writes <= allowed
        };
        let outcome =
            move_grant(fixture.faulty.as_ref(), &grant, VERIFIED, &mut Vec::new(), &mut proceed);
        if allowed < 4 {
            assert!(matches!(outcome, Err(Unmoved::Stopped)), "{outcome:?}");
            assert_eq!(steps.len(), allowed + 2);
        } else {
            assert!(outcome.is_ok());
            assert_eq!(steps, ["open", "write", "write", "write", "fsync", "verify"]);
        }
    }
}
