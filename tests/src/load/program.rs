//! The program: random operations on its files, one after the other, each entered in the books
//! before it is tried and when it has succeeded.

use super::blocks::Blocks;
use super::book::{BIG, Book, COMMON, NAMES, Open, SHARED, Unanswered};
use super::counter;
use super::directories::make_directory;
use super::handover::{Handover, Kind};
use super::linked::Linked;
use super::mapped::Mapped;
use super::told::Told;
use super::{Failure, Mix, Order, Setup, Work};
use crate::content;
use crate::model::{Model, close};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

const FILE_BYTES: u64 = 96 << 10;
/// Of the shared file, per program.
const SHARE_BYTES: u64 = 30_000;
pub(super) const WRITE_MAX: u64 = 9_000;
/// How many operations are shown when something is wrong.
const REMEMBERED: usize = 3_000;

pub(super) struct Program {
    pub setup: Setup,
    pub book: Book,
    pub big: Blocks,
    pub mapped: Mapped,
    pub linked: Linked,
    pub told: Option<Told>,
    handover: Handover,
    pub(super) dice: ChaCha8Rng,
    pub(super) round: u64,
    /// Since the start: content is made from it.
    pub(super) operation: u64,
    work: Work,
    recent: VecDeque<String>,
    /// The mount in which it works, as its device number.
    mount: u64,
    /// The backing takes extended attributes.
    pub(super) tags: bool,
}

/// What can be done with a file.
#[derive(Clone, Copy, Debug)]
enum Action {
    Write,
    Sync,
    Close,
    Read,
    ReadElsewhere,
    Truncate,
    Rename,
    Unlink,
    WriteElsewhere,
    Big,
    Count,
    Rewrite,
    Link,
    Attributes,
    Directory,
    Mapped,
    Linked,
    HandOver,
    Tell,
}

impl Program {
    pub fn new(setup: Setup) -> Program {
        let dice = ChaCha8Rng::seed_from_u64(setup.seed.wrapping_mul(1000) + setup.who);
        let book = Book::new(setup.who, setup.of);
        let big = Blocks::new(setup.who);
        let (work, recent) = (Work::default(), VecDeque::new());
        let told = if setup.mix.is_wide() { Told::new(&setup) } else { None };
        let handover = Handover::new(setup.who, setup.of, setup.extra.loses_locks);
        Program {
            mapped: Mapped::new(setup.who),
            linked: Linked::new(setup.who),
            told,
            handover,
            setup,
            book,
            big,
            dice,
            round: 0,
            operation: 0,
            work,
            recent,
            mount: 0,
            tags: true,
        }
    }

    /// Works until told to pause, and at least one operation beyond that, or until one fails.
    /// Nothing when nobody is there any more.
    pub fn run(&mut self, round: u64, orders: &Receiver<Order>) -> Option<Work> {
        (self.round, self.work) = (round, Work::default());
        self.told.iter_mut().for_each(Told::begin);
        self.attempt("make directories".to_owned(), Program::make_directories);
        while self.work.failure.is_none() {
            let order = orders.try_recv();
            self.step();
            match order {
                Ok(Order::Pause) => {
                    self.close_all();
                    return Some(std::mem::take(&mut self.work));
                }
                Ok(order) => panic!("{order:?} while at work"),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return None,
            }
        }
        self.close_all();
        match orders.recv() {
            Ok(Order::Pause) => Some(std::mem::take(&mut self.work)),
            Ok(order) => panic!("{order:?} while at work"),
            Err(_) => None,
        }
    }

    pub(super) fn attempt(
        &mut self,
        what: String,
        work: impl FnOnce(&mut Program) -> io::Result<()>,
    ) {
        let start = Instant::now();
        let done = work(self);
        let ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        while self.recent.len() >= REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back(format!("round {}: {what}: {done:?}, {ms} ms", self.round));
        if ms > self.work.longest_ms {
            (self.work.longest_ms, self.work.longest) = (ms, what.clone());
        }
        match done {
            Ok(()) => self.work.operations += 1,
            Err(e) if self.work.failure.is_none() => {
                let errno = e.raw_os_error().unwrap_or(0);
                self.work.failure = Some(Failure { operation: what, errno });
                self.write_log();
            }
            // What fails after that is closing files.
            Err(_) => {}
        }
    }

    /// In the mount, and never in the directory below it, when the daemon is gone just now.
    fn make_directories(&mut self) -> io::Result<()> {
        let root = File::open(&self.setup.root)?;
        let below = self.setup.root.parent().map(std::fs::metadata).transpose()?;
        if below.is_some_and(|below| root.metadata().is_ok_and(|m| m.dev() == below.dev())) {
            return Err(io::Error::from_raw_os_error(libc::ENOTCONN));
        }
        self.mount = root.metadata()?.dev();
        let root = PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd()));
        make_directory(&root.join(COMMON))?;
        let own = root.join(self.book.directory());
        make_directory(&own)?;
        make_directory(&own.join("s"))?;
        if self.setup.mix.is_wide() { self.linked.make(&root) } else { Ok(()) }
    }

    fn step(&mut self) {
        self.operation += 1;
        let name = match self.dice.random_range(0..8) {
            0 => SHARED,
            _ => NAMES[self.dice.random_range(0..NAMES.len())],
        };
        if let Some(told) = &mut self.told {
            told.hear(&self.setup, self.round, &mut self.work);
        }
        match self.choose(name) {
            Action::Write => self.write(name),
            Action::Sync => self.sync(name),
            Action::Close => self.close(name),
            Action::Read => self.read(name),
            Action::ReadElsewhere => self.read_elsewhere(name),
            Action::Truncate => self.truncate(name),
            Action::Rename => self.rename(name),
            Action::Unlink => self.unlink(name),
            Action::WriteElsewhere => self.write_elsewhere(name),
            Action::Big => self.write_big(),
            Action::Count => self.count(),
            Action::Rewrite => self.rewrite(name),
            Action::Link => self.link(name),
            Action::Attributes => self.attributes(name),
            Action::Directory => self.directory(),
            Action::Mapped => self.map(),
            Action::Linked => self.link_or_move(),
            Action::HandOver => self.hand_over(),
            Action::Tell => self.tell(),
        }
    }

    fn choose(&mut self, name: &str) -> Action {
        let action = match self.dice.random_range(0..100) {
            0..21 => Action::Write,
            21..25 => Action::Mapped,
            25..28 => Action::Linked,
            28..31 => Action::Tell,
            31..33 => Action::Rewrite,
            33..35 => Action::Link,
            35..38 => Action::Attributes,
            38..40 => Action::Directory,
            40..44 => Action::WriteElsewhere,
            44..46 => Action::Count,
            46..48 => Action::HandOver,
            48..52 => Action::Big,
            52..64 => Action::Sync,
            64..75 => Action::Close,
            75..82 => Action::Read,
            82..87 => Action::ReadElsewhere,
            87..92 => Action::Truncate,
            92..96 => Action::Rename,
            _ => Action::Unlink,
        };
        let mix = self.setup.mix;
        let is_plain = name == SHARED || mix == Mix::Data;
        let is_wide = mix.is_wide();
        let is_doubted = self.book.files.get(name).is_some_and(|known| known.in_doubt_elsewhere);
        match action {
            Action::Count | Action::HandOver if mix == Mix::Locks => action,
            Action::Mapped | Action::Linked if is_wide => action,
            Action::Tell if self.told.is_some() => action,
            Action::Big if is_wide && self.setup.blocks > 0 => action,
            // Bytes that the other node has and did not answer for may still come.
            _ if is_doubted => Action::Close,
            Action::WriteElsewhere if is_wide && !is_plain => action,
            Action::Rewrite | Action::Link | Action::Attributes | Action::Directory
                if is_wide && !is_plain =>
            {
                action
            }
            Action::Count | Action::Big | Action::WriteElsewhere => Action::Write,
            Action::HandOver | Action::Mapped | Action::Linked | Action::Tell => Action::Write,
            Action::Rewrite | Action::Link | Action::Attributes | Action::Directory => {
                Action::Write
            }
            Action::Truncate | Action::Rename | Action::Unlink if is_plain => Action::Write,
            action => action,
        }
    }

    /// Opens the file when it is not, and makes it.
    pub(super) fn open(&mut self, name: &str) -> io::Result<()> {
        if self.book.files.get(name).is_some_and(|known| known.open.is_some()) {
            return Ok(());
        }
        let is_new = !self.book.files.contains_key(name);
        if is_new {
            self.book.unanswered = Some(Unanswered::Create(name.to_owned()));
        }
        let appends = name != SHARED && self.dice.random_bool(0.2);
        let mut options = File::options();
        options.read(true).write(true).create(true).append(appends).truncate(false);
        let file = options.open(self.book.path(&self.setup.root, name))?;
        let known = self.book.files.entry(name.to_owned()).or_default();
        known.open = Some(Open { file, appends });
        if is_new {
            self.book.unanswered = None;
        }
        Ok(())
    }

    fn write(&mut self, name: &'static str) {
        let bytes = if name == SHARED { SHARE_BYTES } else { FILE_BYTES };
        // Now and then a single byte.
        let most = if self.dice.random_bool(0.1) { 2 } else { WRITE_MAX };
        let (offset, len) = (self.dice.random_range(0..bytes), self.dice.random_range(1..most));
        self.attempt(format!("write {len} at {offset} of {name}"), |p| {
            p.open(name)?;
            let layout = p.book.layout(name);
            let known = p.book.files.get_mut(name).expect("it was opened");
            let open = known.open.as_ref().expect("it was opened");
            let offset = if open.appends { known.expected.len() } else { offset };
            let data = content::bytes(p.round % 200, p.operation, offset, len);
            known.is_published = false;
            known.in_doubt = true;
            known.expected.write(offset, &data);
            for (place, own, len) in layout.pieces(offset, len) {
                let from = (own - offset) as usize;
                open.file.write_all_at(&data[from..from + len as usize], place)?;
            }
            known.in_doubt = false;
            if p.setup.model == Model::Posix {
                known.expected.acknowledge(offset, len);
                known.is_published = known.expected.unanswered_cut().is_none();
            }
            Ok(())
        });
    }

    /// A synced byte survives the daemon under every model; whether others see it is the model's.
    fn sync(&mut self, name: &'static str) {
        self.attempt(format!("sync {name}"), |p| {
            let Some(known) = p.book.files.get_mut(name) else { return Ok(()) };
            let Some(open) = &known.open else { return Ok(()) };
            open.file.sync_all()?;
            known.acknowledge();
            known.is_published |= p.setup.model != Model::Session;
            Ok(())
        });
    }

    pub(super) fn close(&mut self, name: &str) {
        self.attempt(format!("close {name}"), |p| {
            let Some(known) = p.book.files.get_mut(name) else { return Ok(()) };
            let Some(open) = known.open.take() else { return Ok(()) };
            close(open.file)?;
            known.acknowledge();
            known.is_published = true;
            Ok(())
        });
    }

    fn close_all(&mut self) {
        let names: Vec<String> = self.book.files.keys().cloned().collect();
        names.iter().for_each(|name| self.close(name));
        self.attempt(format!("close {BIG}"), Program::close_big);
        self.attempt("close the mapped file".to_owned(), |p| p.mapped.close());
        self.attempt("close what is told of".to_owned(), |p| {
            p.told.as_mut().map_or(Ok(()), Told::close)
        });
    }

    /// What a program wrote, it reads.
    fn read(&mut self, name: &'static str) {
        self.attempt(format!("read {name}"), |p| {
            let Some(known) = p.book.files.get(name) else { return Ok(()) };
            let mut file = File::open(p.book.path(&p.setup.root, name))?;
            // What was not synced is gone when the mount is another one by now, which a program
            // may not have noticed between two operations.
            if file.metadata()?.dev() != p.mount {
                return Err(io::Error::from_raw_os_error(libc::ENOTCONN));
            }
            let mut read = Vec::new();
            let file = match file.read_to_end(&mut read).map(|_| read) {
                // Others' records, and what was written there, may be on a node that does not answer
                // just now.
                Err(e)
                    if (name == SHARED || known.was_elsewhere)
                        && e.raw_os_error() == Some(libc::EIO) =>
                {
                    return Ok(());
                }
                file => file?,
            };
            let (want, got) = (known.expected.latest(), p.book.layout(name));
            content::same(
                &format!("{name} on its own node"),
                &got.own(file, known.expected.len()),
                &want,
            );
            Ok(())
        });
    }

    /// What it has published, it reads on the other node, when that node answers.
    fn read_elsewhere(&mut self, name: &'static str) {
        let Some(known) = self.book.files.get(name).filter(|known| known.is_published) else {
            return;
        };
        let path = self.book.path(&self.setup.elsewhere, name);
        let file = match std::fs::read(&path) {
            Ok(file) => file,
            Err(e) => return self.work.miss(&path, &e),
        };
        let own = self.book.layout(name).own(file, known.expected.len());
        content::same(&path.display().to_string(), &own, &known.expected.latest());
        self.work.read_elsewhere += 1;
    }

    /// On the other node, over what this one has published, and published there: from then on this one
    /// must see it. What fails there may be done all the same, also later.
    fn write_elsewhere(&mut self, name: &'static str) {
        self.close(name);
        let Some(known) = self.book.files.get(name).filter(|known| known.is_published) else {
            return;
        };
        let len = self.dice.random_range(1..WRITE_MAX);
        let offset = self.dice.random_range(0..known.expected.len() + 100);
        let data = content::bytes(self.round % 200, self.operation, offset, len);
        let path = self.book.path(&self.setup.elsewhere, name);
        let known = self.book.files.get_mut(name).expect("it was just there");
        known.expected.write(offset, &data);
        known.was_elsewhere = true;
        let done = File::options().write(true).open(path).and_then(|file| {
            file.write_all_at(&data, offset)?;
            close(file)
        });
        self.recent.push_back(format!("elsewhere: write {len} at {offset} of {name}: {done:?}"));
        if done.is_err() {
            (known.in_doubt, known.in_doubt_elsewhere) = (true, true);
            known.is_published = false;
            return;
        }
        known.acknowledge();
        self.work.written_elsewhere += 1;
        self.read(name);
    }

    /// Some blocks of the large file.
    fn write_big(&mut self) {
        let count = self.dice.random_range(1..=self.setup.blocks.div_ceil(4).min(32));
        let first = self.dice.random_range(0..self.setup.blocks);
        let count = count.min(self.setup.blocks - first);
        let ends = self.dice.random_range(0..4);
        self.attempt(format!("write blocks {first} and {count} more of {BIG}"), |p| {
            if p.big.open.is_none() {
                let mut options = File::options();
                options.read(true).write(true).create(true).truncate(false);
                p.big.open = Some(options.open(p.book.path(&p.setup.root, BIG))?);
            }
            p.big.begin(first, count, p.operation);
            p.big.carry_out(first, count, p.operation)?;
            p.big.in_doubt = false;
            if p.setup.model == Model::Posix {
                p.big.acknowledge(first, count);
                p.big.is_published = true;
            }
            Ok(())
        });
        match ends {
            0 => self.attempt(format!("close {BIG}"), Program::close_big),
            1 => self.attempt(format!("sync {BIG}"), |p| {
                let Some(file) = &p.big.open else { return Ok(()) };
                file.sync_all()?;
                p.big.acknowledge_all();
                p.big.is_published |= p.setup.model != Model::Session;
                Ok(())
            }),
            _ => {}
        }
    }

    fn close_big(&mut self) -> io::Result<()> {
        let Some(file) = self.big.open.take() else { return Ok(()) };
        close(file)?;
        self.big.acknowledge_all();
        self.big.is_published = true;
        Ok(())
    }

    /// Everybody's number, one higher.
    fn count(&mut self) {
        self.attempt("count".to_owned(), |p| {
            p.work.counted.1 += 1;
            p.work.counted.0 += u64::from(counter::count(&p.setup.root)?);
            Ok(())
        });
    }

    fn hand_over(&mut self) {
        let kind = if self.dice.random_bool(0.5) { Kind::Record } else { Kind::Whole };
        self.attempt(format!("hand over under a lock: {kind:?}"), |p| {
            p.handover.step(&p.setup.root, kind, &mut p.work)
        });
    }

    fn map(&mut self) {
        let (now, dice) = ((self.round, self.operation), derived(&mut self.dice));
        self.attempt("the mapped file".to_owned(), |p| {
            p.mapped.step(&p.setup, &mut { dice }, now, &mut p.work)
        });
        self.recent.push_back(format!("mapped: {}", self.mapped.did));
    }

    fn link_or_move(&mut self) {
        let (number, mut dice) = (self.operation, derived(&mut self.dice));
        self.attempt("links and directories".to_owned(), |p| {
            for _ in 0..dice.random_range(1..8) {
                let names = p.linked.step(&p.setup.root, &mut dice, number)?;
                p.work.linked += u64::from(names > 1);
            }
            Ok(())
        });
    }

    fn tell(&mut self) {
        let (now, dice) = ((self.round, self.operation), derived(&mut self.dice));
        self.attempt("tell of what is written".to_owned(), |p| match &mut p.told {
            Some(told) => told.tell(&p.setup, &mut { dice }, now),
            None => Ok(()),
        });
    }

    /// For whoever wonders why an operation failed.
    fn write_log(&self) {
        let lines: Vec<&str> = self.recent.iter().map(String::as_str).collect();
        let _ = std::fs::write(&self.setup.log, lines.join("\n"));
    }
}

/// Of its own, so that what one part does with its dice is nothing to the others.
fn derived(dice: &mut ChaCha8Rng) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(dice.random())
}

/// What became of it is known now.
pub(super) fn answered(book: &mut Book, done: io::Result<()>) -> io::Result<()> {
    if done.is_ok() {
        book.unanswered = None;
    }
    done
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.write_log();
        }
    }
}
