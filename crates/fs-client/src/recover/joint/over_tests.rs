//! What a recovery says of a file of which its node holds nothing, and which is not where it was.

use super::board::Board;
use super::file::{Site, Stay, Work};
use super::statement::Fate;
use crate::cache::CacheDir;
use crate::recover::places::{Listing, Places};
use ebb_locks::Mutex;
use ebb_node_journal::{Header, Held, Home, Kept, Note};
use ebb_types::{ByteRange, Ino, Time, Version};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const INO: Ino = Ino(77);
const PART: &[u8] = b"d/.ebb-part-77-0123456789abcdef";

/// A node that has flushed a file of 100 bytes to this file.
fn flushed_to(home: &[u8], number: u64) -> Note {
    let time = Time { sec: 1, nsec: 0 };
    let mut note = Note::new(Header {
        path: b"d/f".to_vec(),
        perm: 0o644,
        uid: 0,
        gid: 0,
        atime: time,
        mtime: time,
        size: 100,
        home: Some(Home { path: home.to_vec(), ino: number, seen: None, changing: true }),
        under: None,
        shared: true,
    });
    note.set_held([(ByteRange::new(0, 100), Held::new(Kept::Owned(Version(3))))]);
    note.flush(ByteRange::new(0, 100), Version(3));
    assert!(note.is_empty() && note.has_bytes());
    note
}

struct Backing {
    dir: tempfile::TempDir,
    cache: CacheDir,
    places: Places,
    board: Board,
}

impl Backing {
    /// With something else under the name of the file.
    fn new() -> Backing {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("backing");
        std::fs::create_dir_all(root.join("d")).unwrap();
        std::fs::create_dir(dir.path().join("cache")).unwrap();
        std::fs::write(root.join("d/f"), b"another one").unwrap();
        let cache = CacheDir::open(&dir.path().join("cache")).unwrap();
        let places = Places::open(&root).unwrap();
        let board = Board::open(&places, "1").unwrap();
        Backing { dir, cache, places, board }
    }

    fn part(&self, path: &str) -> u64 {
        let path = self.dir.path().join("backing").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, [3; 100]).unwrap();
        std::fs::metadata(&path).unwrap().ino()
    }

    fn site<'a>(&'a self, node: &'a str) -> Site<'a> {
        Site {
            places: &self.places,
            board: &self.board,
            cache: &self.cache,
            node,
            rebooted: false,
            force: false,
            shared: true,
            told: std::collections::BTreeSet::new(),
            named: std::collections::BTreeSet::new(),
            shaped: std::collections::BTreeSet::new(),
            everybody: false.into(),
            zeros: Mutex::default(),
            numbers: std::collections::BTreeSet::new(),
            listing: Mutex::default(),
        }
    }

    fn begin(&self, node: &str, note: &Note) -> Result<Work, Stay> {
        self.begin_having_found(node, note, None)
    }

    fn begin_having_found(
        &self,
        node: &str,
        note: &Note,
        listing: Option<Option<Listing>>,
    ) -> Result<Work, Stay> {
        let site = Site { listing: Mutex::new(listing), ..self.site(node) };
        Work::begin(&site, INO, note)
    }

    /// What one node does not bring it has said, and nobody goes by that: not its own next run, either.
    fn is_kept(&self, bytes: u64) {
        assert!(!self.board.has(INO).unwrap(), "somebody goes by it");
        let said = self.board.corner(INO).unwrap().statements().unwrap();
        assert!(matches!(&said[..], [one] if one.with(Fate::Overtaken) == bytes), "{said:?}");
    }

    fn is_over(&self, node: &str, note: &Note) -> bool {
        matches!(self.begin(node, note), Err(Stay::Over))
    }
}

fn is_conflict(begun: &Result<Work, Stay>) -> bool {
    matches!(begun, Err(Stay::Conflict(_)))
}

#[test]
fn who_has_flushed_a_file_that_the_job_has_replaced_says_so_and_decides_nothing() {
    let at = Backing::new();
    let number = at.part("d/g");
    let notes = [flushed_to(PART, number + 1000), flushed_to(b"d/f", number)];
    // Twice, and both of them: who says it must not take what it has said itself for somebody's who has bytes.
    for node in ["a", "b", "a", "b"] {
        assert!(notes.iter().all(|note| at.is_over(node, note)), "{node}");
    }
    assert!(at.board.place(INO).unwrap().is_none(), "nobody has anything to write");
    let said = at.board.corner(INO).unwrap().statements().unwrap();
    let nodes: Vec<&str> = said.iter().map(|s| s.node.as_str()).collect();
    assert_eq!(nodes, ["a", "b"]);
    assert!(said.iter().all(|s| s.with(Fate::Lost) == 100), "others must not take it for a hole");
    let f = at.dir.path().join("backing").join(Path::new("d/f"));
    assert_eq!(std::fs::read(f).unwrap(), b"another one");
}

/// What it flushed to files with names, others may have replaced, also when it had heard last that it was
/// alone; and of some files it does not know any more where they were.
#[test]
fn what_has_its_name_is_over_whoever_had_it() {
    let at = Backing::new();
    let mut alone = flushed_to(b"d/f", at.part("d/g"));
    (alone.alone, alone.header.shared) = (true, false);
    assert!(at.is_over("a", &alone));
    let mut nowhere = flushed_to(b"d/f", 1);
    (nowhere.header.home, nowhere.header.path) = (None, Vec::new());
    assert!(at.is_over("b", &nowhere));
}

#[test]
fn what_waits_in_a_part_file_somewhere_is_not_over() {
    let at = Backing::new();
    let number = at.part("moved/deep/.ebb-part-77-0123456789abcdef");
    assert!(is_conflict(&at.begin("a", &flushed_to(PART, number))), "its directory was moved");
    assert!(at.is_over("a", &flushed_to(PART, number + 1)), "one of another number");
    let other = b"d/.ebb-part-77-000000000000000f";
    assert!(at.is_over("a", &flushed_to(other, number)), "one of another name");
}

#[test]
fn a_part_file_is_found_however_deep() {
    let at = Backing::new();
    let number = at.part(&format!("{}.ebb-part-77-0123456789abcdef", "d/".repeat(300)));
    assert!(is_conflict(&at.begin("a", &flushed_to(PART, number))));
}

/// As with directories that a user may not read.
#[test]
fn where_not_all_of_the_backing_can_be_read_nothing_is_over() {
    let at = Backing::new();
    let note = flushed_to(PART, 1);
    assert!(is_conflict(&at.begin_having_found("a", &note, Some(None))));
    at.is_kept(100);
    assert!(at.is_over("a", &note));
}

#[test]
fn what_is_held_or_was_nobody_elses_is_not_over() {
    let at = Backing::new();
    let mut alone = flushed_to(PART, 1);
    (alone.alone, alone.header.shared) = (true, false);
    assert!(is_conflict(&at.begin("a", &alone)), "others cannot have replaced it");
    let mut held = flushed_to(PART, 1);
    held.set_held([(ByteRange::new(0, 10), Held::new(Kept::Written))]);
    assert!(is_conflict(&at.begin("a", &held)));
    at.is_kept(100);
}
