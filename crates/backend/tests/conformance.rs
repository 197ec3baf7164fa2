//! The conformance suite for each backend, and what is particular to one of them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod suite;

use ebb_backend::faulty::Faults;
use ebb_backend::{Access, Backend, BackendError, Confinement, Faulty, PosixDir};
use ebb_types::Errno;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;
use suite::Place;

fn posix(how: Confinement) -> Place {
    let dir = tempfile::tempdir().unwrap();
    let backend = Arc::new(PosixDir::open_root_with(dir.path(), how).unwrap());
    Place { dir, backend }
}

fn faulty(faults: Faults) -> (Place, Arc<Faulty>) {
    let place = posix(Confinement::Walk);
    let faulty = Faulty::new(place.backend, 42);
    faulty.set(faults);
    (Place { dir: place.dir, backend: Arc::clone(&faulty) as Arc<dyn Backend> }, faulty)
}

#[test]
fn posix_directory_confined_by_the_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let found = PosixDir::open_root(dir.path()).unwrap();
    assert_eq!(found.confinement(), Confinement::Kernel, "openat2 is missing on this machine");
    suite::run(&|| posix(Confinement::Kernel));
}

#[test]
fn posix_directory_walked() {
    suite::run(&|| posix(Confinement::Walk));
}

#[test]
fn faulty_backend_without_faults() {
    suite::run(&|| faulty(Faults::default()).0);
}

#[test]
fn faulty_backend_with_short_and_slow_operations() {
    let faults = Faults {
        short: 0.7,
        delay: 0.1,
        delay_for: Duration::from_micros(200),
        ..Faults::default()
    };
    suite::run(&|| faulty(faults).0);
}

#[test]
fn faults_come_as_asked_and_from_the_seed() {
    let outcomes = |seed: u64| {
        let place = posix(Confinement::Kernel);
        std::fs::write(place.dir.path().join("f"), b"").unwrap();
        let ino = std::fs::metadata(place.dir.path().join("f")).unwrap().ino();
        let faulty = Faulty::new(place.backend, seed);
        let file = faulty.open(b"f", ino, Access::Write).unwrap();
        faulty.set(Faults { eio: 0.3, enospc: 0.3, ..Faults::default() });
        let one = |i| file.write_at(&[i], 0).err().map(|e| e.errno());
        (0..200).map(one).collect::<Vec<_>>()
    };
    let first = outcomes(7);
    assert_eq!(first, outcomes(7));
    assert_ne!(first, outcomes(8));
    for want in [None, Some(Errno::EIO), Some(Errno::ENOSPC)] {
        let share = first.iter().filter(|o| **o == want).count();
        assert!((20..150).contains(&share), "{want:?}: {share} of 200");
    }
}

#[test]
fn damage_is_silent() {
    let (place, faulty) = faulty(Faults { damage: 1.0, ..Faults::default() });
    std::fs::write(place.dir.path().join("f"), b"").unwrap();
    let ino = std::fs::metadata(place.dir.path().join("f")).unwrap().ino();
    let file = place.backend.open(b"f", ino, Access::Write).unwrap();
    file.write_all_at(b"precious", 0).unwrap();
    let stored = std::fs::read(place.dir.path().join("f")).unwrap();
    assert_eq!(stored.len(), 8);
    assert_ne!(stored, b"precious");
    assert_eq!(faulty.injected(), 1);
}

#[test]
fn hangs_last_until_they_are_released() {
    let (place, faulty) = faulty(Faults::default());
    for name in ["slow", "other"] {
        std::fs::write(place.dir.path().join(name), b"").unwrap();
    }
    let ino = |name| std::fs::metadata(place.dir.path().join(name)).unwrap().ino();
    let slow = place.backend.open(b"slow", ino("slow"), Access::Write).unwrap();
    faulty.hang(b"slow");
    let writer = std::thread::spawn(move || slow.write_all_at(b"late", 0));
    while faulty.hanging() == 0 {
        std::thread::yield_now();
    }
    let other = place.backend.open(b"other", ino("other"), Access::Write).unwrap();
    other.write_all_at(b"now", 0).unwrap();
    assert!(!writer.is_finished());
    assert_eq!(std::fs::read(place.dir.path().join("slow")).unwrap(), b"");
    faulty.release();
    writer.join().unwrap().unwrap();
    assert_eq!(std::fs::read(place.dir.path().join("slow")).unwrap(), b"late");
}

#[test]
fn a_backing_that_is_not_there_says_so() {
    let e = PosixDir::open_root(std::path::Path::new("/no/such/backing")).unwrap_err();
    assert_eq!(e.errno(), Errno::ENOENT);
    assert!(e.to_string().contains("/no/such/backing"), "{e}");
    let dir = tempfile::NamedTempFile::new().unwrap();
    let e = PosixDir::open_root(dir.path()).unwrap_err();
    assert!(matches!(e, BackendError::Io { errno: Errno::ENOTDIR, .. }), "{e}");
}
