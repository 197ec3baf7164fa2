//! A program that knows exactly what it must see: one directory, files held open for long, every
//! kind of call, each checked against a model in memory. No call may fail.

use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

const NAMES: usize = 12;
const BYTES_MAX: u64 = 200 << 10;

/// An open file: its content is in `Program::contents`.
struct Open {
    file: File,
    content: usize,
    append: bool,
}

/// One program.
pub struct Program<'a> {
    dir: PathBuf,
    dice: ChaCha8Rng,
    /// Content of every file that has a name or is open, by a number that is never used again.
    contents: BTreeMap<usize, Vec<u8>>,
    names: BTreeMap<String, usize>,
    dirs: BTreeSet<String>,
    open: Vec<Open>,
    next: usize,
    done: &'a AtomicU64,
}

impl<'a> Program<'a> {
    pub fn new(dir: PathBuf, dice: ChaCha8Rng, done: &'a AtomicU64) -> Program<'a> {
        fs::create_dir(&dir).expect("the program's directory");
        Program {
            dir,
            dice,
            contents: BTreeMap::new(),
            names: BTreeMap::new(),
            dirs: BTreeSet::new(),
            open: Vec::new(),
            next: 0,
            done,
        }
    }

    /// Works until told to stop; then everything is compared once more.
    pub fn run(&mut self, stop: &AtomicBool) {
        while !stop.load(Relaxed) {
            // A handful stays open, for long.
            let step = if self.open.len() > 12 { 99 } else { self.dice.random_range(0..100) };
            if let Err(e) = self.step(step) {
                panic!("{}: step {step} failed: {e}", self.dir.display());
            }
            self.done.fetch_add(1, Relaxed);
        }
        self.open.clear();
        self.list().expect("listing at the end");
        for (name, content) in &self.names {
            let found = fs::read(self.dir.join(name)).expect("reading at the end");
            compare(name, 0, &found, &self.contents[content]);
        }
    }

    fn step(&mut self, step: u32) -> io::Result<()> {
        match step {
            0..12 => self.create(),
            12..20 => self.open(),
            20..38 => self.write(),
            38..58 => self.append(),
            58..72 => self.read(),
            72..77 => self.rename(),
            77..82 => self.unlink(),
            82..86 => self.make_or_remove_dir(),
            86..89 => self.cut(),
            89..93 => self.list(),
            93..95 => self.link(),
            95..97 => self.sync(),
            _ => self.close(),
        }
    }

    fn unused(&mut self) -> Option<String> {
        let name = format!("f{}", self.dice.random_range(0..NAMES));
        (!self.names.contains_key(&name)).then_some(name)
    }

    fn used(&mut self) -> Option<(String, usize)> {
        let all: Vec<_> = self.names.iter().collect();
        all.choose(&mut self.dice).map(|(n, c)| ((*n).clone(), **c))
    }

    fn some_open(&mut self) -> Option<usize> {
        (!self.open.is_empty()).then(|| self.dice.random_range(0..self.open.len()))
    }

    fn create(&mut self) -> io::Result<()> {
        let Some(name) = self.unused() else { return self.unlink() };
        let append = self.dice.random_bool(0.4);
        let mut options = File::options();
        options.read(true).append(append).write(!append).create_new(true);
        let file = options.open(self.dir.join(&name))?;
        self.next += 1;
        self.contents.insert(self.next, Vec::new());
        self.names.insert(name, self.next);
        self.open.push(Open { file, content: self.next, append });
        Ok(())
    }

    fn open(&mut self) -> io::Result<()> {
        let Some((name, content)) = self.used() else { return self.create() };
        let append = self.dice.random_bool(0.4);
        let mut options = File::options();
        let file = options.read(true).append(append).write(!append).open(self.dir.join(name))?;
        self.open.push(Open { file, content, append });
        Ok(())
    }

    fn data(&mut self, most: usize) -> Vec<u8> {
        let len = self.dice.random_range(1..=most);
        (0..len).map(|_| self.dice.random()).collect()
    }

    fn write(&mut self) -> io::Result<()> {
        let Some(at) = self.some_open() else { return self.open() };
        let data = self.data(30_000);
        let offset = self.dice.random_range(0..BYTES_MAX);
        let open = &self.open[at];
        if open.append {
            return Ok(());
        }
        open.file.write_all_at(&data, offset)?;
        let content = self.contents.get_mut(&open.content).expect("open");
        let end = offset as usize + data.len();
        content.resize(content.len().max(end), 0);
        content[offset as usize..end].copy_from_slice(&data);
        Ok(())
    }

    fn append(&mut self) -> io::Result<()> {
        let Some(at) = self.some_open() else { return self.open() };
        let data = self.data(3000);
        let open = &mut self.open[at];
        if !open.append {
            return Ok(());
        }
        open.file.write_all(&data)?;
        let content = self.contents.get_mut(&open.content).expect("open");
        content.extend_from_slice(&data);
        let len = open.file.metadata()?.len();
        if len != content.len() as u64 {
            let (appended, dir) = (data.len(), self.dir.display());
            let wanted = content.len();
            let there = std::fs::read(format!("/proc/self/fd/{}", open.file.as_raw_fd()))?;
            let same = there.iter().zip(content.iter()).take_while(|(a, b)| a == b).count();
            let again = open.file.metadata()?.len();
            panic!(
                "after an append of {appended} in {dir}: {len} bytes, and then {again}, of which \
                 {same} are right; it should have {wanted}"
            );
        }
        Ok(())
    }

    fn read(&mut self) -> io::Result<()> {
        let Some(at) = self.some_open() else { return self.open() };
        let offset = self.dice.random_range(0..BYTES_MAX);
        let mut bytes = vec![0; self.dice.random_range(1..60_000)];
        let open = &self.open[at];
        let got = open.file.read_at(&mut bytes, offset)?;
        let content = &self.contents[&open.content];
        let from = (offset as usize).min(content.len());
        let to = (from + bytes.len()).min(content.len());
        compare(&format!("open file {}", open.content), offset, &bytes[..got], &content[from..to]);
        Ok(())
    }

    fn rename(&mut self) -> io::Result<()> {
        let Some((from, content)) = self.used() else { return Ok(()) };
        let to = format!("f{}", self.dice.random_range(0..NAMES));
        fs::rename(self.dir.join(&from), self.dir.join(&to))?;
        let same = self.names.get(&to) == Some(&content);
        // Two names of one file: nothing happens.
        if !same {
            self.names.remove(&from);
            self.names.insert(to, content);
        }
        Ok(())
    }

    fn unlink(&mut self) -> io::Result<()> {
        let Some((name, _)) = self.used() else { return Ok(()) };
        fs::remove_file(self.dir.join(&name))?;
        self.names.remove(&name);
        Ok(())
    }

    fn link(&mut self) -> io::Result<()> {
        let (Some((old, content)), Some(new)) = (self.used(), self.unused()) else { return Ok(()) };
        fs::hard_link(self.dir.join(old), self.dir.join(&new))?;
        self.names.insert(new, content);
        Ok(())
    }

    fn make_or_remove_dir(&mut self) -> io::Result<()> {
        let name = format!("d{}", self.dice.random_range(0..4));
        if self.dirs.remove(&name) {
            return fs::remove_dir(self.dir.join(name));
        }
        fs::create_dir(self.dir.join(&name))?;
        self.dirs.insert(name);
        Ok(())
    }

    fn cut(&mut self) -> io::Result<()> {
        let Some(at) = self.some_open() else { return self.open() };
        let open = &self.open[at];
        let content = self.contents.get_mut(&open.content).expect("open");
        let len = self.dice.random_range(0..=content.len() as u64);
        open.file.set_len(len)?;
        content.truncate(len as usize);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let Some(at) = self.some_open() else { return self.open() };
        self.open[at].file.sync_all()
    }

    fn close(&mut self) -> io::Result<()> {
        if let Some(at) = self.some_open() {
            drop(self.open.swap_remove(at));
        }
        Ok(())
    }

    fn list(&mut self) -> io::Result<()> {
        let names =
            fs::read_dir(&self.dir)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned()));
        let mut found = names.collect::<io::Result<Vec<String>>>()?;
        found.sort();
        let mut wanted: Vec<String> = self.names.keys().chain(&self.dirs).cloned().collect();
        wanted.sort();
        assert_eq!(found, wanted, "names in {}", self.dir.display());
        Ok(())
    }
}

fn compare(what: &str, offset: u64, found: &[u8], wanted: &[u8]) {
    if found == wanted {
        return;
    }
    let at = found.iter().zip(wanted).position(|(a, b)| a != b);
    panic!(
        "{what}: {} bytes at {offset} where {} were expected; first difference at {:?}",
        found.len(),
        wanted.len(),
        at.map(|a| offset + a as u64)
    );
}
