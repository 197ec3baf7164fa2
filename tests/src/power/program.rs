//! The program: random operations on its files, told of before and after.

use super::{Id, Line, NAMES, Op};
use crate::content;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Most files are small, some have several pieces of a flush: where writes begin, and how long they are.
const SMALL_BYTES: u64 = 60_000;
const SMALL_WRITE: u64 = 9_000;
const LARGE_BYTES: u64 = 3 << 20;
const LARGE_WRITE: u64 = 400_000;

/// No file becomes longer.
pub(super) const LONGEST: u64 = LARGE_BYTES + LARGE_WRITE;

struct Program {
    directory: PathBuf,
    dice: ChaCha8Rng,
    /// Which files have names and are open.
    files: BTreeMap<String, (Id, File)>,
    last: u64,
}

/// `ebb-power-load DIRECTORY SEED`: until an operation fails.
///
/// # Panics
/// When it was not called like that, or nobody listens.
pub fn run() {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().expect("a directory"));
    let seed = arguments.next().and_then(|s| s.parse().ok()).expect("a seed");
    let dice = ChaCha8Rng::seed_from_u64(seed);
    let mut program = Program { directory, dice, files: BTreeMap::new(), last: 0 };
    loop {
        for op in program.next() {
            say(&Line::Try(op.clone()));
            match program.carry_out(&op) {
                Ok(()) => say(&Line::Done),
                Err(e) => return say(&Line::Failed(e.to_string())),
            }
        }
    }
}

fn say(line: &Line) {
    let mut text = serde_json::to_vec(line).expect("a line of JSON");
    text.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&text).and_then(|()| out.flush()).expect("somebody listens");
}

impl Program {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn name(&mut self) -> String {
        (*NAMES.choose(&mut self.dice).expect("some names")).to_owned()
    }

    /// One operation, or several that belong together.
    fn next(&mut self) -> Vec<Op> {
        let name = self.name();
        let Some(id) = self.files.get(&name).map(|(id, _)| *id) else {
            return vec![Op::Create { name, id: self.number() }];
        };
        match self.dice.random_range(0..100) {
            0..50 => vec![self.write(id)],
            50..72 => vec![Op::Sync { id }],
            72..78 => vec![Op::Cut { id, len: self.dice.random_range(0..SMALL_BYTES) }],
            78..82 => vec![Op::Cut { id, len: 0 }],
            82..88 => self.replace(name),
            88..91 => vec![Op::Unlink { name }],
            91..94 => vec![Op::Rename { from: name, to: self.name() }],
            _ => vec![Op::SyncNames],
        }
    }

    fn write(&mut self, id: Id) -> Op {
        let is_large = self.dice.random_bool(0.15);
        let (large, small) = ((LARGE_BYTES, LARGE_WRITE), (SMALL_BYTES, SMALL_WRITE));
        let (within, most) = if is_large { large } else { small };
        let offset = self.dice.random_range(0..within);
        Op::Write { id, operation: self.number(), offset, len: self.dice.random_range(1..most) }
    }

    /// As editors and checkpoint libraries do.
    fn replace(&mut self, to: String) -> Vec<Op> {
        let (from, id) = ("new".to_owned(), self.number());
        let create = Op::Create { name: from.clone(), id };
        let (first, second) = (self.write(id), self.write(id));
        let rename = Op::Rename { from, to };
        vec![create, first, second, Op::Sync { id }, rename, Op::SyncNames]
    }

    fn file(&self, id: Id) -> io::Result<&File> {
        let found = self.files.values().find(|(i, _)| *i == id).map(|(_, file)| file);
        found.ok_or_else(|| io::Error::other("the program has lost a file"))
    }

    fn carry_out(&mut self, op: &Op) -> io::Result<()> {
        match op {
            Op::Create { name, id } => {
                let path = self.directory.join(name);
                if self.files.remove(name).is_some() {
                    fs::remove_file(&path)?;
                }
                let file = File::options().read(true).write(true).create_new(true).open(path)?;
                self.files.insert(name.clone(), (*id, file));
                Ok(())
            }
            Op::Write { id, operation, offset, len } => {
                let data = content::bytes(*id % 251, *operation, *offset, *len);
                self.file(*id)?.write_all_at(&data, *offset)
            }
            Op::Cut { id, len: 0 } => {
                let name = self.files.iter().find(|(_, (i, _))| i == id).map(|(name, _)| name);
                let path = self.directory.join(name.expect("it has a name"));
                File::options().write(true).truncate(true).open(path).map(drop)
            }
            Op::Cut { id, len } => self.file(*id)?.set_len(*len),
            Op::Sync { id } => self.file(*id)?.sync_all(),
            Op::Rename { from, to } if from == to => Ok(()),
            Op::Rename { from, to } => {
                fs::rename(self.directory.join(from), self.directory.join(to))?;
                let file = self.files.remove(from).expect("only known files are renamed");
                self.files.insert(to.clone(), file);
                Ok(())
            }
            Op::Unlink { name } => {
                self.files.remove(name);
                fs::remove_file(self.directory.join(name))
            }
            Op::SyncNames => File::open(&self.directory)?.sync_all(),
        }
    }
}
