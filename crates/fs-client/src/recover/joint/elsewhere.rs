//! Files that are under another name on the backing than this node knows. What was done there to the name of
//! a file that had been flushed, its doer forgets when it is done; a node that died before it heard of that
//! knows an old name, or none. Such a file is found by its number.
//!
//! Numbers are used again. So the file has to belong to whom it belonged to, and to be as this node saw it last; or to
//! be as long as it knows it and no older, and to have in it all that it holds, which must be all that it is known to have
//! written.

use super::file::{Site, len_of, mtime_of};
use crate::cache::read_padded;
use ebb_node_journal::{Home, Image, Note};
use ebb_types::{ByteRange, Extents, Ino, in_steps};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are compared at once.
const PIECE_BYTES: u64 = 1 << 20;

/// The numbers of files that are in place on the backing, as a node knows it.
pub(super) fn numbers(image: &Image) -> BTreeSet<u64> {
    image.sayable().filter_map(|(_, note)| in_place(note)).map(|home| home.ino).collect()
}

fn in_place(note: &Note) -> Option<&Home> {
    note.header.home.as_ref().filter(|home| !home.is_part())
}

/// The files with the names that they are found under.
pub(super) fn located(site: &Site<'_>, image: &Image) -> Image {
    let mut new = image.clone();
    for (ino, note) in image.sayable() {
        match locate(site, ino, note) {
            Ok(Some(path)) => {
                tracing::info!(%ino, path = %String::from_utf8_lossy(&path), "found by its number");
                let mut note = note.clone();
                note.header.path.clone_from(&path);
                if let Some(home) = &mut note.header.home {
                    home.path = path;
                }
                new.insert(ino, note);
            }
            Ok(None) => {}
            // What is known of it stays as it is, and is looked at again where it is written.
            Err(e) => tracing::debug!(%ino, error = %e, "cannot look for it"),
        }
    }
    new
}

/// The name under which the file is, when that is not the one that is known.
fn locate(site: &Site<'_>, ino: Ino, note: &Note) -> io::Result<Option<Vec<u8>>> {
    let Some(home) = in_place(note) else { return Ok(None) };
    let is_known = |path: &[u8]| match path.is_empty() {
        true => Ok(false),
        false => site.places.file(path, home.ino).map(|found| found.is_some()),
    };
    if is_known(&note.header.path)? {
        return Ok(None);
    }
    if home.changing && is_known(&home.path)? {
        return Ok(Some(home.path.clone()));
    }
    let found = site.in_listing(|all| all.numbered.get(&home.ino).cloned());
    for path in found.flatten().unwrap_or_default() {
        if let Some(file) = site.places.file(&path, home.ino)?
            && is_same(site, ino, note, &file)?
        {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

fn is_same(site: &Site<'_>, ino: Ino, note: &Note, there: &File) -> io::Result<bool> {
    let stat = rustix::fs::fstat(there)?;
    if stat.st_uid != note.header.uid {
        return Ok(false);
    }
    let Some(home) = in_place(note) else { return Ok(false) };
    let (len, mtime) = (len_of(&stat), mtime_of(&stat));
    if let Some(seen) = home.seen.filter(|_| !home.changing)
        && (len, mtime) == (seen.size, seen.mtime)
    {
        return Ok(true);
    }
    let is_older = home.seen.is_some_and(|seen| mtime < seen.mtime);
    if is_older || len != note.header.size || !holds_all(note) {
        return Ok(false);
    }
    has_all(&site.cache.read_only(ino)?, note, there)
}

/// True when all that the node ever wrote to it is in its cache, for certain.
fn holds_all(note: &Note) -> bool {
    let held: Extents<()> = note.held().map(|(range, _)| (range, ())).collect();
    let is_certain = note.held().all(|(_, held)| !held.guessed && !held.damaged);
    let is_held = |range: ByteRange| held.gaps(range).next().is_none();
    is_certain && !note.is_empty() && note.flushed().all(|(range, _)| is_held(range))
}

/// True when everything that is held is in it, and that is more than zeros, which many files have.
fn has_all(cache: &File, note: &Note, there: &File) -> io::Result<bool> {
    let held: Vec<ByteRange> = note.held().map(|(range, _)| range).collect();
    let len = there.metadata()?.len();
    if held.iter().any(|range| range.end() > len) {
        return Ok(false);
    }
    let mut ours = vec![0; PIECE_BYTES as usize];
    let mut theirs = ours.clone();
    let mut is_something = false;
    for piece in in_steps(&held, PIECE_BYTES, 1).into_iter().flatten() {
        let n = piece.len() as usize;
        read_padded(cache, &mut ours[..n], piece.start())?;
        there.read_exact_at(&mut theirs[..n], piece.start())?;
        if ours[..n] != theirs[..n] {
            return Ok(false);
        }
        is_something |= ours[..n].iter().any(|byte| *byte != 0);
    }
    Ok(is_something)
}

#[cfg(test)]
mod tests {
    use super::super::board::Board;
    use super::*;
    use crate::cache::CacheDir;
    use crate::recover::places::Places;
    use ebb_locks::Mutex;
    use ebb_node_journal::{Header, Held, Kept, Seen};
    use ebb_types::{Time, Version};
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    const INO: Ino = Ino(7);
    const OURS: [u8; 4] = [5; 4];

    /// A node that has flushed a file of 100 bytes to `f`, of which by now nothing is there, and holds four of
    /// them.
    struct Moved {
        dir: tempfile::TempDir,
        note: Note,
    }

    impl Moved {
        fn new() -> Moved {
            let dir = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(dir.path().join("backing/d/e")).unwrap();
            std::fs::create_dir(dir.path().join("cache")).unwrap();
            let file = dir.path().join("backing/d/e/g");
            std::fs::write(&file, [&OURS[..], &[1; 96]].concat()).unwrap();
            let stat = std::fs::metadata(&file).unwrap();
            let time = Time { sec: stat.mtime(), nsec: u32::try_from(stat.mtime_nsec()).unwrap() };
            let home = Home {
                path: b"f".to_vec(),
                ino: stat.ino(),
                seen: Some(Seen { size: 100, mtime: time }),
                changing: false,
            };
            let mut note = Note::new(Header {
                path: b"f".to_vec(),
                perm: 0o644,
                uid: stat.uid(),
                gid: stat.gid(),
                atime: time,
                mtime: time,
                size: 100,
                home: Some(home),
                under: None,
                shared: true,
            });
            note.set_held([(ByteRange::new(0, 4), Held::new(Kept::Owned(Version(3))))]);
            Moved { dir, note }
        }

        fn home(&mut self) -> &mut Home {
            self.note.header.home.as_mut().unwrap()
        }

        fn backing(&self, path: &str) -> std::path::PathBuf {
            self.dir.path().join("backing").join(Path::new(path))
        }

        /// Where it is found by a node that has these bytes in its cache.
        fn found(&self, cached: &[u8]) -> Option<Vec<u8>> {
            let cache = CacheDir::open(&self.dir.path().join("cache")).unwrap();
            std::fs::write(cache.path(INO), cached).unwrap();
            let places = Places::open(&self.backing("")).unwrap();
            let board = Board::open(&places, "1").unwrap();
            let mut image = Image::default();
            image.insert(INO, self.note.clone());
            let site = Site {
                places: &places,
                board: &board,
                cache: &cache,
                node: "a",
                rebooted: false,
                force: false,
                shared: true,
                told: BTreeSet::new(),
                named: BTreeSet::new(),
                shaped: BTreeSet::new(),
                everybody: false.into(),
                zeros: Mutex::default(),
                numbers: numbers(&image),
                listing: Mutex::default(),
            };
            let path = located(&site, &image).file(INO).unwrap().header.path.clone();
            (path != self.note.header.path).then_some(path)
        }
    }

    #[test]
    fn what_is_as_it_was_seen_last_is_found_wherever_it_is() {
        let mut moved = Moved::new();
        assert_eq!(moved.found(&[9; 4]), Some(b"d/e/g".to_vec()));
        // Of one that has several names any will do, and always the same.
        std::fs::hard_link(moved.backing("d/e/g"), moved.backing("a")).unwrap();
        assert_eq!(moved.found(&[9; 4]), Some(b"a".to_vec()));
        // Something else has its old name.
        std::fs::write(moved.backing("f"), "a stranger's").unwrap();
        assert_eq!(moved.found(&[9; 4]), Some(b"a".to_vec()));
        // It is not known how it is called.
        moved.note.header.path.clear();
        assert_eq!(moved.found(&[9; 4]), Some(b"a".to_vec()));
    }

    #[test]
    fn what_has_its_name_is_not_looked_for() {
        let moved = Moved::new();
        std::fs::hard_link(moved.backing("d/e/g"), moved.backing("f")).unwrap();
        std::fs::hard_link(moved.backing("d/e/g"), moved.backing("a")).unwrap();
        assert_eq!(moved.found(&[9; 4]), None);
    }

    /// The node was flushing to it, or somebody has changed it since.
    #[test]
    fn what_has_all_bytes_of_the_node_is_found() {
        let mut moved = Moved::new();
        moved.home().changing = true;
        assert_eq!(moved.found(&OURS), Some(b"d/e/g".to_vec()));
        assert_eq!(moved.found(&[5, 5, 5, 6]), None, "other bytes");
        let flushed = ByteRange::new(8, 12);
        moved.note.set_held([(flushed, Held::new(Kept::Owned(Version(3))))]);
        moved.note.flush(flushed, Version(3));
        assert_eq!(moved.found(&OURS), None, "it does not hold all that it wrote");
        let mut moved = Moved::new();
        moved.home().changing = true;
        moved.note.header.size = 101;
        assert_eq!(moved.found(&OURS), None, "another length");
    }

    #[test]
    fn another_file_of_that_number_is_not_taken_for_it() {
        let mut moved = Moved::new();
        moved.home().seen = Some(Seen { size: 100, mtime: Time { sec: 1, nsec: 1 } });
        assert_eq!(moved.found(&[9; 4]), None, "of another time");
        let mut moved = Moved::new();
        moved.note.header.uid += 1;
        assert_eq!(moved.found(&OURS), None, "somebody else's");
        let mut moved = Moved::new();
        moved.home().ino += 1000;
        assert_eq!(moved.found(&OURS), None, "of another number");
        // Where nothing of it is held, nothing but how it was seen tells.
        let mut moved = Moved::new();
        moved.note.flush(ByteRange::new(0, 4), Version(3));
        assert_eq!(moved.found(&OURS), Some(b"d/e/g".to_vec()));
        moved.home().changing = true;
        assert_eq!(moved.found(&OURS), None);
    }
}
