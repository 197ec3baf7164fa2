//! What every backend must do. A new backend is one file that passes this suite.

use ebb_backend::{Access, Backend, BackendError, BackingFile};
use ebb_types::{ByteRange, Errno};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A backend over a fresh directory that the test can look into from outside.
pub struct Place {
    pub dir: tempfile::TempDir,
    pub backend: Arc<dyn Backend>,
}

impl Place {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a file from outside; its inode number.
    fn make(&self, name: &str, content: &[u8]) -> u64 {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        std::fs::symlink_metadata(&path).unwrap().ino()
    }

    fn open(&self, name: &str, ino: u64) -> Arc<dyn BackingFile> {
        self.backend.open(name.as_bytes(), ino, Access::Write).unwrap()
    }

    fn refusal(&self, name: &str, ino: u64) -> BackendError {
        match self.backend.open(name.as_bytes(), ino, Access::Write) {
            Ok(_) => panic!("{name}: opened"),
            Err(e) => e,
        }
    }
}

/// Runs every check, each on a place of its own.
pub fn run(make: &dyn Fn() -> Place) {
    let checks: [(&str, fn(&Place)); 9] = [
        ("bytes go where they are told", bytes_go_where_they_are_told),
        ("reads end at the end", reads_end_at_the_end),
        ("a path that changed hands is noticed", changed_hands),
        ("an open file outlives its name", open_file_outlives_its_name),
        ("nothing leads out of the backing", nothing_leads_out),
        ("only regular files", only_regular_files),
        ("read access cannot write", read_access_cannot_write),
        ("identity and space tell the truth", identity_and_space),
        ("dropping the cache loses nothing", dropping_the_cache),
    ];
    for (name, check) in checks {
        println!("- {name}");
        check(&make());
    }
    println!("- any sequence of writes, as a vector would do it");
    like_a_vector(make);
}

fn bytes_go_where_they_are_told(place: &Place) {
    let ino = place.make("a/b/file", b"");
    let file = place.open("a/b/file", ino);
    file.write_all_at(b"world", 7).unwrap();
    file.write_all_at(b"hello, ", 0).unwrap();
    file.sync_data().unwrap();
    assert_eq!(std::fs::read(place.path("a/b/file")).unwrap(), b"hello, world");
}

fn reads_end_at_the_end(place: &Place) {
    let ino = place.make("f", b"0123456789");
    let file = place.backend.open_read(b"f", ino).unwrap();
    let mut buf = [0; 8];
    assert_eq!(file.read_full_at(&mut buf, 6).unwrap(), 4);
    assert_eq!(&buf[..4], b"6789");
    assert_eq!(file.read_full_at(&mut buf, 10).unwrap(), 0);
    assert_eq!(file.read_full_at(&mut buf, 1 << 40).unwrap(), 0);
}

fn changed_hands(place: &Place) {
    let old = place.make("f", b"old");
    let new = place.make("g", b"new");
    std::fs::rename(place.path("g"), place.path("f")).unwrap();
    match place.refusal("f", old) {
        BackendError::Moved { expected, found, .. } => {
            assert_eq!((expected, found), (old, Some(new)));
        }
        e => panic!("{e}"),
    }
    assert_eq!(std::fs::read(place.path("f")).unwrap(), b"new");
    for gone in ["never", "no/such/dir", "f/below-a-file"] {
        let e = place.refusal(gone, old);
        assert!(matches!(e, BackendError::Moved { found: None, .. }), "{gone}: {e}");
        assert_eq!(e.errno(), Errno::ESTALE);
    }
}

fn open_file_outlives_its_name(place: &Place) {
    let ino = place.make("f", b"x");
    let file = place.open("f", ino);
    std::fs::rename(place.path("f"), place.path("renamed")).unwrap();
    file.write_all_at(b"y", 0).unwrap();
    assert_eq!(std::fs::read(place.path("renamed")).unwrap(), b"y");
}

fn nothing_leads_out(place: &Place) {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), b"secret").unwrap();
    let ino = std::fs::metadata(outside.path().join("secret")).unwrap().ino();
    let inside = place.make("dir/f", b"");
    symlink(outside.path(), place.path("way-out")).unwrap();
    symlink(outside.path().join("secret"), place.path("link")).unwrap();
    symlink("dir", place.path("link-inside")).unwrap();
    let up = format!("../{}/secret", outside.path().file_name().unwrap().to_str().unwrap());
    let absolute = outside.path().join("secret");
    for path in ["way-out/secret", "link", &up, absolute.to_str().unwrap(), "dir/../dir/f", ""] {
        let e = place.refusal(path, ino);
        assert!(!matches!(e, BackendError::Moved { found: Some(_), .. }), "{path}: {e}");
    }
    // Not even when the link stays inside: the service resolves names, not we.
    let e = place.refusal("link-inside/f", inside);
    assert!(!matches!(e, BackendError::Moved { found: Some(_), .. }), "{e}");
    assert_eq!(std::fs::read(outside.path().join("secret")).unwrap(), b"secret");
}

fn only_regular_files(place: &Place) {
    std::fs::create_dir(place.path("dir")).unwrap();
    let ino = std::fs::metadata(place.path("dir")).unwrap().ino();
    assert!(place.backend.open(b"dir", ino, Access::Read).is_err());
    let fifo = place.path("pipe");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let ino = std::fs::metadata(&fifo).unwrap().ino();
    // Must answer, not wait for somebody at the other end.
    assert!(place.backend.open(b"pipe", ino, Access::Read).is_err());
}

fn read_access_cannot_write(place: &Place) {
    let ino = place.make("f", b"safe");
    let file = place.backend.open_read(b"f", ino).unwrap();
    assert_eq!(file.write_at(b"gone", 0).unwrap_err().errno(), Errno::EBADF);
    assert_eq!(std::fs::read(place.path("f")).unwrap(), b"safe");
}

fn identity_and_space(place: &Place) {
    let ino = place.make("d/f", b"12345");
    let by_path = place.backend.identity(b"d/f").unwrap();
    let file = place.open("d/f", ino);
    assert_eq!(by_path, file.identity().unwrap());
    assert_eq!((by_path.ino, by_path.size), (ino, 5));
    let outside = std::fs::metadata(place.path("d/f")).unwrap();
    assert_eq!(by_path.mtime, outside.modified().unwrap().into());
    file.write_all_at(b"x", 9).unwrap();
    assert_eq!(file.identity().unwrap().size, 10);
    assert_eq!(place.backend.identity(b"d/none").unwrap_err().errno(), Errno::ENOENT);
    let space = place.backend.space().unwrap();
    assert!(space.total_bytes > 0 && space.available_bytes <= space.total_bytes);
}

fn dropping_the_cache(place: &Place) {
    let ino = place.make("f", b"");
    let file = place.open("f", ino);
    let content: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
    file.write_all_at(&content, 1000).unwrap();
    // Also before the sync: advice must not cost a byte.
    file.drop_cached(ByteRange::at(1000, 200_000)).unwrap();
    file.sync_data().unwrap();
    for range in [ByteRange::new(5, 5), ByteRange::ALL, ByteRange::at(1000, 1), ByteRange::from(7)]
    {
        file.drop_cached(range).unwrap();
    }
    let mut back = vec![0; 200_000];
    assert_eq!(file.read_full_at(&mut back, 1000).unwrap(), 200_000);
    assert!(back == content);
}

fn like_a_vector(make: &dyn Fn() -> Place) {
    let write = (0usize..5000, proptest::collection::vec(any::<u8>(), 0..3000));
    let mut runner =
        TestRunner::new(Config { cases: 32, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&proptest::collection::vec(write, 1..12), |writes| {
        let place = make();
        let ino = place.make("f", b"");
        let file = place.open("f", ino);
        let mut want = Vec::new();
        for (offset, bytes) in &writes {
            file.write_all_at(bytes, *offset as u64).unwrap();
            if !bytes.is_empty() {
                let end = offset + bytes.len();
                want.resize(want.len().max(end), 0);
                want[*offset..end].copy_from_slice(bytes);
            }
        }
        file.sync_data().unwrap();
        prop_assert_eq!(&read_all(&place.path("f")), &want);
        let mut back = vec![0xff; want.len() + 7];
        prop_assert_eq!(file.read_full_at(&mut back, 0).unwrap(), want.len());
        prop_assert_eq!(&back[..want.len()], &want[..]);
        Ok(())
    });
    outcome.unwrap();
}

fn read_all(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}
