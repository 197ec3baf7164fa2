//! The first reading of a trace: who took part, which files there are, what belongs together.

use crate::{Doubts, Place, TracedFile};
use ebb_trace_format::{Call, ENDING, Header, Reader, Record, What};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A directory in which no trace can be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// It cannot be listed, or a file of it cannot be opened.
    #[error("{}: {cause}", path.display())]
    Io {
        /// Which path.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// There is nothing.
    #[error("{}: no trace files here (`ebb trace -o DIR -- CMD` makes them)", .0.display())]
    Empty(PathBuf),
    /// No file of it can be read.
    #[error("{}: {what}", path.display())]
    Damaged {
        /// The first one.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

/// How much a trace is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Processes.
    pub processes: usize,
    /// Records of all of them.
    pub records: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// What of it cannot be read, in words.
    pub damaged: Vec<String>,
}

/// Reads a trace for its size.
pub fn count(dir: &Path) -> Result<Counts, Unreadable> {
    let survey = Survey::of(dir)?;
    let parts = survey.lives.iter().flat_map(|l| &l.parts);
    let bytes = parts.map(|p| std::fs::metadata(&p.path).map_or(0, |m| m.len())).sum();
    Ok(Counts {
        processes: survey.lives.len(),
        records: survey.records,
        bytes,
        damaged: survey.doubts.damaged,
    })
}

/// A record: which process, and which of its records.
pub(crate) type Point = (usize, u64);

/// One trace file.
#[derive(Debug)]
pub(crate) struct Part {
    pub path: PathBuf,
    pub header: Header,
    pub records: u64,
    /// By the numbers of the file: which file of the trace.
    pub files: HashMap<u32, u32>,
    /// By the numbers of the file: which object and where in it.
    pub sites: HashMap<u32, (Vec<u8>, u64)>,
    has_exit: bool,
    last: u64,
}

/// A process: the programs that it ran one after the other.
#[derive(Debug)]
pub(crate) struct Life {
    pub parts: Vec<Part>,
    pub rank: Option<u32>,
    /// The record of its parent that it follows.
    pub after: Option<Point>,
    pub start: u64,
    pub end: u64,
    /// Its parent, when nobody told of its beginning.
    pub spawned_by: Option<usize>,
    /// Times and records at which it makes children: with their number, or without.
    forks: Vec<(u64, u64, Option<u32>)>,
}

impl Life {
    pub fn header(&self) -> &Header {
        &self.parts[0].header
    }

    /// Which task of a launcher it is: a launcher's child becomes one when it runs its program.
    pub fn task(&self) -> &[u8] {
        let of = self.parts.iter().rev().map(|p| &p.header.task);
        of.into_iter().find(|t| !t.is_empty()).map_or(&[], Vec::as_slice)
    }
}

/// A channel of messages: communicator, sender, receiver, tag.
pub(crate) type Channel = (u64, u32, u32, i32);

/// What the first reading found.
#[derive(Debug)]
pub(crate) struct Survey {
    pub lives: Vec<Life>,
    pub files: Vec<TracedFile>,
    /// Per channel the receives in the order in which they were posted.
    pub posted: HashMap<Channel, Vec<u64>>,
    pub doubts: Doubts,
    pub records: u64,
}

#[derive(Debug, Default)]
struct Found {
    files: Vec<TracedFile>,
    known: HashMap<(u64, u64, Vec<u8>), u32>,
    posted: HashMap<Channel, Vec<u64>>,
    doubts: Doubts,
    silent: HashMap<Vec<u8>, bool>,
}

impl Survey {
    pub fn of(dir: &Path) -> Result<Survey, Unreadable> {
        let io = |cause| Unreadable::Io { path: dir.to_owned(), cause };
        let mut paths: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|e| e == ENDING) {
                paths.push(path);
            }
        }
        paths.sort();
        let first = paths.first().cloned().ok_or_else(|| Unreadable::Empty(dir.to_owned()))?;
        let mut found = Found::default();
        let mut read = Vec::new();
        for path in paths {
            match found.part(&path) {
                Ok(part) => read.push(part),
                Err(what) => found.doubts.damaged.push(format!("{}: {what}", path.display())),
            }
        }
        if read.is_empty() {
            let what = found.doubts.damaged.swap_remove(0);
            let what = what.trim_start_matches(&format!("{}: ", first.display())).to_owned();
            return Err(Unreadable::Damaged { path: first, what });
        }
        let records = read.iter().map(|(part, ..)| part.records).sum();
        let mut lives = lives_of(read);
        link(&mut lives);
        found.posted.values_mut().for_each(|numbers| numbers.sort_unstable());
        let silent = found.silent.values().filter(|tells| !**tells).count();
        found.doubts.silent_tasks = if found.silent.len() > 1 { silent } else { 0 };
        let Found { files, posted, doubts, .. } = found;
        Ok(Survey { lives, files, posted, doubts, records })
    }
}

/// A part with what its life needs: the rank, and where children are made.
type Read = (Part, Option<u32>, Vec<(u64, u64, Option<u32>)>);

impl Found {
    fn part(&mut self, path: &Path) -> Result<Read, String> {
        let file = File::open(path).map_err(|e| e.to_string())?;
        let mut reader = Reader::new(file).map_err(|e| e.to_string())?;
        let header = reader.header().clone();
        let last = header.since_1970(header.start);
        let mut part = Part {
            path: path.to_owned(),
            header,
            records: 0,
            files: HashMap::new(),
            sites: HashMap::new(),
            has_exit: false,
            last,
        };
        let (mut rank, mut forks) = (None, Vec::new());
        loop {
            match reader.read() {
                Ok(Some(record)) => self.record(record, &mut part, &mut rank, &mut forks),
                Ok(None) => break,
                Err(damage) => {
                    let text = format!("{}: {damage}; what follows is not read", path.display());
                    self.doubts.damaged.push(text);
                    break;
                }
            }
        }
        if !part.header.task.is_empty() {
            // Only of MPI programs is it known that they are; some task must have told of its rank.
            *self.silent.entry(part.header.task.clone()).or_default() |= rank.is_some();
        }
        Ok((part, rank, forks))
    }

    fn record(
        &mut self,
        record: Record,
        part: &mut Part,
        rank: &mut Option<u32>,
        forks: &mut Vec<(u64, u64, Option<u32>)>,
    ) {
        let number = part.records;
        part.records += 1;
        let time = part.header.since_1970(record.end);
        part.last = part.last.max(time);
        match record.what {
            What::File { file, ino, born, path } => {
                part.files.insert(file, self.file(ino, born, path));
            }
            What::Site { site, offset, object } => {
                part.sites.insert(site, (object, offset));
            }
            What::World { rank: own, .. } => *rank = Some(own),
            What::Fork { pid } => forks.push((time, number, Some(pid))),
            What::Spawning => forks.push((time, number, None)),
            What::Exit => part.has_exit = true,
            What::Recv { comm, from, to, tag, posted } => {
                self.posted.entry((comm, from, to, tag)).or_default().push(posted);
            }
            What::Unknown => self.doubts.unknown += 1,
            _ => {}
        }
    }

    /// Files are known by inode and birth, on all hosts; where the file system tells no birth, by path.
    fn file(&mut self, ino: u64, born: u64, path: Vec<u8>) -> u32 {
        let key = match born {
            0 => (0, 0, path.clone()),
            _ => (ino, born, Vec::new()),
        };
        let next = self.files.len() as u32;
        let files = &mut self.files;
        *self.known.entry(key).or_insert_with(|| {
            files.push(TracedFile { path });
            next
        })
    }
}

fn lives_of(mut read: Vec<Read>) -> Vec<Life> {
    read.sort_by_key(|(part, ..)| {
        let h = &part.header;
        (h.host.clone(), h.pid, h.since_1970(h.start))
    });
    let mut lives: Vec<Life> = Vec::new();
    for (part, rank, forks) in read {
        let start = part.header.since_1970(part.header.start);
        let same = |life: &&mut Life| {
            let before = &life.parts[life.parts.len() - 1];
            (&before.header.host, before.header.pid) == (&part.header.host, part.header.pid)
                && !before.has_exit
        };
        match lives.last_mut().filter(|life| same(life)) {
            Some(life) => {
                let base: u64 = life.parts.iter().map(|p| p.records).sum();
                life.forks.extend(forks.into_iter().map(|(t, n, pid)| (t, n + base, pid)));
                life.rank = rank.or(life.rank);
                life.end = life.end.max(part.last);
                life.parts.push(part);
            }
            None => {
                let end = part.last;
                let (after, spawned_by) = (None, None);
                lives.push(Life { parts: vec![part], rank, after, start, end, spawned_by, forks });
            }
        }
    }
    lives
}

/// Finds the record of its parent that each process follows.
fn link(lives: &mut [Life]) {
    let mut by_pid: HashMap<(Vec<u8>, u32), Vec<usize>> = HashMap::new();
    for (i, life) in lives.iter().enumerate() {
        by_pid.entry((life.header().host.clone(), life.header().pid)).or_default().push(i);
    }
    for child in 0..lives.len() {
        let (start, header) = (lives[child].start, lives[child].header());
        let parents = by_pid.get(&(header.host.clone(), header.parent));
        let before = |i: &&usize| lives[**i].start <= start && **i != child;
        let Some(parent) = parents.into_iter().flatten().rev().find(before).copied() else {
            continue;
        };
        let forks = &lives[parent].forks;
        let told = forks.iter().filter(|(.., pid)| *pid == Some(header.pid));
        let told = told.min_by_key(|(time, ..)| time.abs_diff(start));
        let untold = forks.iter().rev().find(|(time, _, pid)| pid.is_none() && *time <= start);
        let spawned_by = (told.is_none() && untold.is_some()).then_some(parent);
        let after = told.or(untold).map(|(_, number, _)| (parent, *number));
        (lives[child].after, lives[child].spawned_by) = (after, spawned_by);
    }
}

impl Part {
    /// The place that a record was made at.
    pub fn place(&self, site: u32, call: Call) -> Place {
        let (object, offset) = self.sites.get(&site).cloned().unwrap_or_default();
        Place { call, object, offset }
    }
}
