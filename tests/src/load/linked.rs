//! A small tree of files with several names, in directories that come, go and move with what is in them.
//! Each change is made to a copy of the books first: what is found later is the one or the other.

use super::directories::make_directory;
use crate::content;
use crate::model::close;
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Every file is as long.
const BYTES: u64 = 2_500;
/// The directories that stay, and the one that moves between them.
const DIRECTORIES: [&str; 2] = ["l", "m"];
const MOVING: &str = "deep";
const NAMES: [&str; 3] = ["a", "b", "c"];

/// What is at a path, below the tree's root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Directory,
    /// Names with the same number are of the same file.
    File(u64),
}

type Tree = BTreeMap<String, Entry>;

#[derive(Debug)]
pub(super) struct Linked {
    who: u64,
    now: Tree,
    /// What the change makes of it that was not answered.
    tried: Option<Tree>,
    /// What is in the files: the number that made the bytes.
    contents: BTreeMap<u64, u64>,
    /// A file that was being written.
    in_doubt: Option<u64>,
    files: u64,
}

/// What is found at a path.
#[derive(Debug)]
struct Found {
    inode: u64,
    names: u64,
    bytes: Vec<u8>,
}

impl Linked {
    pub fn new(who: u64) -> Linked {
        let now = DIRECTORIES.map(|d| (d.to_owned(), Entry::Directory)).into();
        let (tried, contents, in_doubt, files) = Default::default();
        Linked { who, now, tried, contents, in_doubt, files }
    }

    /// The directories that are always there.
    pub fn make(&self, root: &Path) -> io::Result<()> {
        let root = self.root(root);
        make_directory(&root)?;
        DIRECTORIES.iter().try_for_each(|d| make_directory(&root.join(d)))
    }

    fn root(&self, root: &Path) -> std::path::PathBuf {
        root.join(format!("x{}", self.who))
    }

    fn bytes(&self, number: u64) -> Vec<u8> {
        content::bytes(self.who + 150, number, 0, BYTES)
    }

    fn moving(&self) -> Option<String> {
        let is = |path: &&String| path.ends_with(MOVING);
        self.now.keys().find(is).cloned()
    }

    /// One change; how many names the file of it has then, and whether a directory went somewhere.
    pub fn step(&mut self, root: &Path, dice: &mut ChaCha8Rng, number: u64) -> io::Result<u64> {
        let at = self.root(root);
        let mut directories: Vec<String> = DIRECTORIES.map(str::to_owned).to_vec();
        directories.extend(self.moving());
        let mut path = || {
            let directory = directories.choose(dice).expect("there are some");
            format!("{directory}/{}", NAMES.choose(dice).expect("there are some"))
        };
        let (from, to) = (path(), path());
        let (what, other) = (dice.random_range(0..12), DIRECTORIES[dice.random_range(0..2)]);
        let entry = |path: &String| self.now.get(path).copied();
        match (what, entry(&from), entry(&to)) {
            (0..3, None, _) => self.create(&at, &from, number),
            (0..3, Some(Entry::File(file)), _) => self.write(&at, &from, file, number),
            (3..6, Some(file), None) => {
                self.change(|tree| tree.insert(to.clone(), file));
                self.done(fs::hard_link(at.join(&from), at.join(&to)), &to)
            }
            (6..8, Some(file), there) if from != to => {
                // Another name of the same file stays, and nothing happens.
                if there != Some(file) {
                    self.change(|tree| {
                        tree.remove(&from);
                        tree.insert(to.clone(), file);
                    });
                }
                self.done(fs::rename(at.join(&from), at.join(&to)), &to)
            }
            (8, Some(_), _) => {
                self.change(|tree| tree.remove(&from));
                self.done(fs::remove_file(at.join(&from)), &from)
            }
            (9.., ..) => self.directory(&at, other),
            _ => Ok(0),
        }
    }

    /// What the next change makes of the tree; whatever `how` answers does not matter.
    fn change<T>(&mut self, how: impl FnOnce(&mut Tree) -> T) {
        let mut tree = self.now.clone();
        how(&mut tree);
        self.tried = Some(tree);
    }

    /// A change was answered.
    fn done(&mut self, done: io::Result<()>, path: &str) -> io::Result<u64> {
        done?;
        if let Some(tree) = self.tried.take() {
            self.now = tree;
        }
        Ok(self.now.get(path).map_or(0, |e| self.names_of(*e)))
    }

    fn names_of(&self, entry: Entry) -> u64 {
        let same = |e: &&Entry| **e == entry && entry != Entry::Directory;
        self.now.values().filter(same).count() as u64
    }

    fn create(&mut self, at: &Path, path: &str, number: u64) -> io::Result<u64> {
        self.files += 1;
        let file = self.files;
        self.contents.insert(file, number);
        self.in_doubt = Some(file);
        self.change(|tree| tree.insert(path.to_owned(), Entry::File(file)));
        let made = File::options().write(true).create_new(true).open(at.join(path));
        let made = made.and_then(|made| {
            made.write_all_at(&self.bytes(number), 0)?;
            close(made)
        });
        let names = self.done(made, path)?;
        self.in_doubt = None;
        Ok(names)
    }

    fn write(&mut self, at: &Path, path: &str, file: u64, number: u64) -> io::Result<u64> {
        self.in_doubt = Some(file);
        self.contents.insert(file, number);
        let opened = File::options().write(true).open(at.join(path))?;
        opened.write_all_at(&self.bytes(number), 0)?;
        close(opened)?;
        self.in_doubt = None;
        Ok(self.names_of(Entry::File(file)))
    }

    /// Makes the moving directory, takes it elsewhere with what is in it, or away when that is nothing.
    fn directory(&mut self, at: &Path, other: &str) -> io::Result<u64> {
        let to = format!("{other}/{MOVING}");
        let Some(from) = self.moving() else {
            self.change(|tree| tree.insert(to.clone(), Entry::Directory));
            return self.done(fs::create_dir(at.join(&to)), &to);
        };
        let inside = format!("{from}/");
        let is_empty = !self.now.keys().any(|path| path.starts_with(&inside));
        if from != to {
            self.change(|tree| {
                let moved = std::mem::take(tree).into_iter().map(|(path, entry)| {
                    let goes = path == from || path.starts_with(&inside);
                    let new = goes.then(|| format!("{to}{}", &path[from.len()..]));
                    (new.unwrap_or(path), entry)
                });
                *tree = moved.collect();
            });
            return self.done(fs::rename(at.join(&from), at.join(&to)), &to);
        }
        if is_empty {
            self.change(|tree| tree.remove(&from));
            return self.done(fs::remove_dir(at.join(&from)), &from);
        }
        match fs::remove_dir(at.join(&from)) {
            Ok(()) => panic!("{from} is not empty and was removed"),
            Err(e) if e.raw_os_error() == Some(libc::ENOTEMPTY) => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// After whatever happened: what is there is the truth from here on.
    pub fn settle(&mut self, what: &str, root: &Path) {
        let at = self.root(root);
        let found = look(what, &at, &self.now);
        let tried = self.tried.take();
        let is = |tree: &Tree| difference(tree, &found).is_none();
        if let Some(tried) = tried.filter(is) {
            self.now = tried;
        }
        if let Some(file) = self.in_doubt.take() {
            self.write_again(what, &at, file);
        }
        self.check(what, root);
    }

    /// As a program does that got no answer.
    fn write_again(&mut self, what: &str, at: &Path, file: u64) {
        let name =
            self.now.iter().find(|(_, e)| **e == Entry::File(file)).map(|(path, _)| path.clone());
        let Some(path) = name else { return };
        let done = self.write(at, &path, file, self.contents[&file]);
        done.unwrap_or_else(|e| panic!("{what}: {path} once more: {e}"));
    }

    /// In another directory, when everything is settled.
    pub fn check(&self, what: &str, root: &Path) {
        let at = self.root(root);
        let what = format!("{what}: {}", at.display());
        let found = look(&what, &at, &self.now);
        if let Some(difference) = difference(&self.now, &found) {
            panic!("{what}: {difference}; {:?}", self.now);
        }
        for (path, entry) in &self.now {
            if let Entry::File(file) = entry {
                let got = &found[path].as_ref().expect("a file, as was just seen").bytes;
                content::same(&format!("{what}/{path}"), got, &self.bytes(self.contents[file]));
            }
        }
    }
}

/// Everything that is there. A job that has made nothing may have no directories yet.
fn look(what: &str, at: &Path, known: &Tree) -> BTreeMap<String, Option<Found>> {
    let mut found = BTreeMap::new();
    let mut left: Vec<String> = DIRECTORIES.map(str::to_owned).to_vec();
    while let Some(directory) = left.pop() {
        let list = match fs::read_dir(at.join(&directory)) {
            Err(e) if e.kind() == ErrorKind::NotFound && known.len() == DIRECTORIES.len() => {
                found.insert(directory, None);
                continue;
            }
            list => list.unwrap_or_else(|e| panic!("{what}: {directory}: {e}")),
        };
        for entry in list {
            let entry = entry.unwrap_or_else(|e| panic!("{what}: {directory}: {e}"));
            let path = format!("{directory}/{}", entry.file_name().to_string_lossy());
            let stat = fs::symlink_metadata(entry.path());
            let stat = stat.unwrap_or_else(|e| panic!("{what}: {path}: {e}"));
            if stat.is_dir() {
                left.push(path);
                continue;
            }
            let bytes = fs::read(entry.path());
            let bytes = bytes.unwrap_or_else(|e| panic!("{what}: {path}: {e}"));
            found.insert(path, Some(Found { inode: stat.ino(), names: stat.nlink(), bytes }));
        }
        found.insert(directory, None);
    }
    found
}

/// Where names, kinds, or which names are of one file, differ.
fn difference(tree: &Tree, found: &BTreeMap<String, Option<Found>>) -> Option<String> {
    let paths = |keys: BTreeSet<&String>| format!("{keys:?}");
    let (want, have): (BTreeSet<_>, BTreeSet<_>) = (tree.keys().collect(), found.keys().collect());
    if want != have {
        return Some(format!("names {}, and not {}", paths(have), paths(want)));
    }
    let mut inodes = BTreeMap::new();
    let mut files = BTreeMap::new();
    for (path, entry) in tree {
        match (entry, &found[path]) {
            (Entry::Directory, None) => {}
            (Entry::File(file), Some(it)) => {
                let names = tree.values().filter(|e| *e == entry).count() as u64;
                let is_new = *inodes.entry(it.inode).or_insert(file) == file;
                let is_same = *files.entry(file).or_insert(it.inode) == it.inode;
                if !is_new || !is_same || it.names != names {
                    return Some(format!(
                        "{path} has {} names, and not {names}, or is another file",
                        it.names
                    ));
                }
            }
            _ => return Some(format!("{path} is something else")),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn a_tree_is_followed_and_what_is_wrong_in_it_is_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut linked = Linked::new(3);
        linked.make(dir.path()).expect("directories");
        let mut dice = ChaCha8Rng::seed_from_u64(1);
        let mut most = 0;
        for number in 0..2_000 {
            most = most.max(linked.step(dir.path(), &mut dice, number).expect("a step"));
            if number % 100 == 0 {
                linked.settle("test", dir.path());
            }
        }
        assert!(most > 3, "{most} names of one file at most");
        let fails = || catch_unwind(AssertUnwindSafe(|| linked.check("test", dir.path()))).is_err();
        assert!(!fails());
        let file = linked.now.iter().find(|(_, e)| **e != Entry::Directory).expect("a file").0;
        let path = dir.path().join("x3").join(file);
        let bytes = fs::read(&path).expect("read");
        fs::write(&path, &bytes[1..]).expect("write");
        assert!(fails(), "other bytes");
        fs::write(&path, &bytes).expect("write");
        assert!(!fails());
        fs::hard_link(&path, dir.path().join("x3/one more")).expect("link");
        assert!(fails(), "a name more");
    }

    #[test]
    fn a_change_that_was_not_answered_is_done_or_not() {
        for done in [false, true] {
            let dir = tempfile::tempdir().expect("a directory");
            let mut linked = Linked::new(3);
            linked.make(dir.path()).expect("directories");
            linked.create(&linked.root(dir.path()), "l/a", 7).expect("create");
            linked.change(|tree| tree.insert("m/b".to_owned(), Entry::File(1)));
            if done {
                let at = linked.root(dir.path());
                fs::hard_link(at.join("l/a"), at.join("m/b")).expect("link");
            }
            linked.settle("test", dir.path());
            assert_eq!(linked.now.contains_key("m/b"), done);
        }
    }
}
