//! The second reading: the records of all processes in one order in which they could have happened.
//!
//! Each process is read from its own files. Of those that can go on the one with the earliest next record
//! does. One whose next record has a cause in another process (a message, a barrier, a child's end)
//! waits for it. When everybody waits, a cause is not in the trace: the earliest record is taken without it,
//! and that is counted.

use crate::meet::{Entry, Meetings, Need};
use crate::requests::Counter;
use crate::survey::{Life, Part, Point, Survey, Unreadable};
use crate::{Doubts, Nodes, Place, Traced, TracedProcess};
use ebb_consistency::checker::{File, LockKind, Process};
use ebb_consistency::run::{Act, Moment, Run, Site};
use ebb_consistency::sweep::Sorted;
use ebb_consistency::{Model, SyncEvent};
use ebb_trace_format::{Act as Does, Call, Event, Reader, Record, What};
use ebb_types::ByteRange;
use rangemap::RangeMap;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

/// Where each process's records are, to read some of them again.
#[derive(Debug)]
pub(crate) struct Lines {
    pub parts: Vec<Vec<Part>>,
}

struct Line {
    /// The files that are still to be read, the last one first.
    parts: Vec<usize>,
    reader: Option<(usize, Reader<std::fs::File>)>,
    next: Option<Record>,
    /// Its time, and how many records were taken.
    time: u64,
    taken: u64,
    asked: bool,
    synced: bool,
}

/// Reads the records of all processes together.
pub(crate) struct Merge {
    lives: Vec<Life>,
    lines: Vec<Line>,
    survey_files: Vec<crate::TracedFile>,
    posted: HashMap<crate::survey::Channel, Vec<u64>>,
    doubts: Doubts,
    run: Run,
    meetings: Meetings,
    counter: Counter,
    places: Vec<Place>,
    known_places: HashMap<Place, u32>,
    /// Per process, part and local site with call: the site of the run.
    sites: HashMap<(usize, usize, u32, Call), u32>,
    held: HashMap<(usize, u32), RangeMap<u64, bool>>,
    wanted: HashSet<Point>,
    moments: HashMap<Point, Moment>,
    ended: HashMap<usize, Moment>,
    ready: BinaryHeap<Reverse<(u64, usize)>>,
    waiting: HashMap<Need, Vec<usize>>,
    blocked: HashMap<usize, Need>,
    records: u64,
}

impl Merge {
    pub fn new(survey: Survey, nodes: Nodes, models: &[Arc<Model>]) -> Merge {
        let Survey { lives, files, posted, doubts, records } = survey;
        let mut run = Run::new(lives.len());
        let mut known: HashMap<(Vec<u8>, Vec<u8>), u32> = HashMap::new();
        for (i, life) in lives.iter().enumerate() {
            let header = life.header();
            let task = match nodes {
                Nodes::Tasks => life.task().to_vec(),
                Nodes::Hosts => Vec::new(),
                Nodes::Each => continue,
            };
            let next = known.len() as u32;
            let node = *known.entry((header.host.clone(), task)).or_insert(next);
            run.place(Process(i as u32), node);
        }
        let line = |life: &Life| Line {
            parts: (0..life.parts.len()).rev().collect(),
            reader: None,
            next: None,
            time: 0,
            taken: 0,
            asked: false,
            synced: false,
        };
        let lines = lives.iter().map(line).collect();
        let wanted = lives.iter().filter_map(|l| l.after).collect();
        let meetings = Meetings::new(lives.len());
        Merge {
            lines,
            survey_files: files,
            posted,
            doubts,
            run,
            meetings,
            counter: Counter::new(models),
            places: Vec::new(),
            known_places: HashMap::new(),
            sites: HashMap::new(),
            held: HashMap::new(),
            wanted,
            moments: HashMap::new(),
            ended: HashMap::new(),
            ready: BinaryHeap::new(),
            waiting: HashMap::new(),
            blocked: HashMap::new(),
            records,
            lives,
        }
    }

    /// Takes all records.
    pub fn all(mut self) -> Result<Traced, Unreadable> {
        for i in 0..self.lines.len() {
            let start = self.lives[i].start;
            self.ready.push(Reverse((start, i)));
        }
        loop {
            while let Some(Reverse((_, i))) = self.ready.pop() {
                self.go_on(i)?;
            }
            let Some(i) = self.blocked.keys().copied().min_by_key(|i| self.lines[*i].time) else {
                break;
            };
            // Nobody can go on: the cause is not in the trace.
            self.doubts.unmatched += 1;
            if let Some(need) = self.blocked.remove(&i)
                && let Some(waiting) = self.waiting.get_mut(&need)
            {
                waiting.retain(|w| *w != i);
            }
            self.begin(i)?;
            self.take(i);
            self.again(i)?;
        }
        Ok(self.traced())
    }

    fn traced(self) -> Traced {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let process = |life: &Life| {
            let last = &life.parts[life.parts.len() - 1].header;
            TracedProcess {
                host: text(&last.host),
                pid: last.pid,
                program: text(&last.program),
                rank: life.rank,
            }
        };
        Traced {
            processes: self.lives.iter().map(process).collect(),
            files: self.survey_files,
            places: self.places,
            sorted: Sorted::new(self.run),
            requests: self.counter.requests(),
            records: self.records,
            doubts: self.doubts,
            lines: Lines { parts: self.lives.into_iter().map(|l| l.parts).collect() },
        }
    }

    /// Takes the next record of a process, if its cause is there.
    fn go_on(&mut self, i: usize) -> Result<(), Unreadable> {
        if self.lines[i].taken == 0
            && self.lines[i].next.is_none()
            && let Some(point) = self.lives[i].after
            && !self.moments.contains_key(&point)
        {
            self.lines[i].time = self.lives[i].start;
            self.wait(i, Need::Record(point));
            return Ok(());
        }
        self.begin(i)?;
        match self.need(i) {
            Some(need) => self.wait(i, need),
            None => {
                self.take(i);
                self.again(i)?;
            }
        }
        Ok(())
    }

    fn wait(&mut self, i: usize, need: Need) {
        self.waiting.entry(need).or_default().push(i);
        self.blocked.insert(i, need);
    }

    fn wake(&mut self, need: Need) {
        for i in self.waiting.remove(&need).unwrap_or_default() {
            self.blocked.remove(&i);
            self.ready.push(Reverse((self.lines[i].time, i)));
        }
    }

    /// Reads the first record of a process.
    fn begin(&mut self, i: usize) -> Result<(), Unreadable> {
        if self.lines[i].taken == 0 && self.lines[i].next.is_none() {
            if let Some(moment) = self.lives[i].after.and_then(|p| self.moments.get(&p)) {
                self.run.after(Process(i as u32), &moment.clone());
            }
            self.advance(i)?;
        }
        Ok(())
    }

    /// The next record, and the turn of its process.
    fn again(&mut self, i: usize) -> Result<(), Unreadable> {
        self.lines[i].taken += 1;
        self.advance(i)?;
        match self.lines[i].next {
            Some(_) => self.ready.push(Reverse((self.lines[i].time, i))),
            None => {
                self.ended.insert(i, self.run.moment(Process(i as u32)));
                self.wake(Need::End(i));
            }
        }
        Ok(())
    }

    fn advance(&mut self, i: usize) -> Result<(), Unreadable> {
        let (line, life) = (&mut self.lines[i], &self.lives[i]);
        line.next = None;
        loop {
            if let Some((part, reader)) = &mut line.reader {
                // Damage was told of at the first reading.
                if let Ok(Some(record)) = reader.read() {
                    line.time = life.parts[*part].header.since_1970(record.end);
                    line.next = Some(record);
                    return Ok(());
                }
            }
            line.reader = None;
            let Some(part) = line.parts.pop() else { return Ok(()) };
            let path = &life.parts[part].path;
            let io = |cause| Unreadable::Io { path: path.clone(), cause };
            let reader = Reader::new(std::fs::File::open(path).map_err(io)?)
                .map_err(|e| Unreadable::Damaged { path: path.clone(), what: e.to_string() })?;
            line.reader = Some((part, reader));
        }
    }

    /// What the next record of a process waits for.
    fn need(&mut self, i: usize) -> Option<Need> {
        match self.lines[i].next.as_ref()?.what {
            What::Recv { comm, from, to, tag, posted } => {
                let channel = (comm, from, to, tag);
                let number = self.number_of(channel, posted);
                let is_there = self.meetings.has(channel, number);
                (!is_there).then_some(Need::Message(channel, number))
            }
            What::Leave { comm, number, rank } => {
                let is_ready = self.meetings.may_leave((comm, number), rank);
                (!is_ready).then_some(Need::Collective(comm, number))
            }
            What::Reaped { .. } | What::Spawned => {
                let child = self.children(i).into_iter().find(|c| !self.ended.contains_key(c));
                child.map(Need::End)
            }
            _ => None,
        }
    }

    fn number_of(&self, channel: crate::survey::Channel, posted: u64) -> u64 {
        let of = self.posted.get(&channel);
        of.map_or(0, |numbers| numbers.partition_point(|n| *n < posted) as u64)
    }

    /// The children whose end the next record of a process tells of.
    fn children(&self, i: usize) -> Vec<usize> {
        let Some(record) = &self.lines[i].next else { return Vec::new() };
        let now = self.lines[i].time;
        let host = &self.lives[i].header().host;
        let is_over = |life: &&(usize, &Life)| life.1.end <= now && &life.1.header().host == host;
        let lives = self.lives.iter().enumerate();
        match record.what {
            What::Reaped { pid } => {
                let same = lives.filter(|(_, l)| l.header().pid == pid);
                same.filter(|l| is_over(&l)).map(|(c, _)| c).next_back().into_iter().collect()
            }
            _ => {
                let own = lives.filter(|(_, l)| l.spawned_by == Some(i));
                own.filter(|l| is_over(&l)).map(|(c, _)| c).collect()
            }
        }
    }

    /// Takes the next record of a process.
    fn take(&mut self, i: usize) {
        let process = Process(i as u32);
        let children = match self.lines[i].next.as_ref().map(|r| &r.what) {
            Some(What::Reaped { .. } | What::Spawned) => self.children(i),
            _ => Vec::new(),
        };
        let Some(record) = self.lines[i].next.take() else { return };
        self.run.step(process);
        for child in children {
            if let Some(moment) = self.ended.get(&child) {
                self.run.after(process, &moment.clone());
            }
        }
        match record.what {
            What::Access { .. } | What::Sync { .. } | What::Lock { .. } | What::Unlock { .. } => {
                self.file_record(i, &record);
            }
            _ => self.order_record(i, &record),
        }
        let point = (i, self.lines[i].taken);
        if self.wanted.contains(&point) {
            self.moments.insert(point, self.run.moment(process));
            self.wake(Need::Record(point));
        }
    }

    fn file_of(&self, i: usize, file: u32) -> Option<u32> {
        let (part, _) = self.lines[i].reader.as_ref()?;
        self.lives[i].parts[*part].files.get(&file).copied()
    }

    fn site_of(&mut self, i: usize, site: u32, call: Call) -> Site {
        let part = self.lines[i].reader.as_ref().map_or(0, |(part, _)| *part);
        let key = (i, part, site, call);
        if let Some(known) = self.sites.get(&key) {
            return Site(*known);
        }
        let place = self.lives[i].parts[part].place(site, call);
        let next = self.places.len() as u32;
        let number = *self.known_places.entry(place.clone()).or_insert(next);
        if number == next {
            self.places.push(place);
        }
        self.sites.insert(key, number);
        Site(number)
    }

    fn file_record(&mut self, i: usize, record: &Record) {
        let process = Process(i as u32);
        let (What::Access { file, .. }
        | What::Sync { file, .. }
        | What::Lock { file, .. }
        | What::Unlock { file, .. }) = record.what
        else {
            return;
        };
        // A number that nothing was told of comes from a damaged trace.
        let Some(number) = self.file_of(i, file) else { return };
        let file = File(number);
        match record.what {
            What::Access { act, start, end, .. } => {
                let (act, event) = match act {
                    Does::Read => (Act::Read, SyncEvent::Read),
                    Does::Write => (Act::Write, SyncEvent::Write),
                    Does::Append => (Act::Append, SyncEvent::Write),
                };
                let site = self.site_of(i, record.site, record.call);
                self.run.access(process, file, ByteRange::new(start, end.max(start)), act, site);
                self.counter.event(process.0, number, event);
            }
            What::Sync { event, .. } => {
                let event = match event {
                    Event::Open => SyncEvent::Open,
                    Event::Close => SyncEvent::Close,
                    Event::Fsync => SyncEvent::Fsync,
                    Event::Commit => SyncEvent::Commit,
                };
                self.lines[i].synced |= event == SyncEvent::Fsync;
                self.run.sync(process, file, event);
                self.counter.event(process.0, number, event);
            }
            What::Lock { start, end, exclusive, .. } => {
                let range = ByteRange::new(start, end.max(start));
                if !exclusive {
                    // What was exclusive before is let go to others that share.
                    self.unlock(i, file, range, true);
                }
                let kind = if exclusive { LockKind::Exclusive } else { LockKind::Shared };
                self.run.lock(process, file, range, kind);
                self.counter.event(process.0, number, SyncEvent::Lock);
                if !range.is_empty() {
                    self.held.entry((i, number)).or_default().insert(range.to_std(), exclusive);
                }
            }
            What::Unlock { start, end, .. } => {
                self.unlock(i, file, ByteRange::new(start, end.max(start)), false);
                self.counter.event(process.0, number, SyncEvent::Unlock);
            }
            _ => {}
        }
    }

    fn unlock(&mut self, i: usize, file: File, range: ByteRange, only_exclusive: bool) {
        let Some(held) = self.held.get_mut(&(i, file.0)).filter(|_| !range.is_empty()) else {
            return;
        };
        let pieces: Vec<(ByteRange, bool)> = held
            .overlapping(range.to_std())
            .map(|(at, kind)| (ByteRange::new(at.start, at.end).intersect(range), *kind))
            .filter(|(_, kind)| *kind || !only_exclusive)
            .collect();
        for (piece, exclusive) in pieces {
            held.remove(piece.to_std());
            let kind = if exclusive { LockKind::Exclusive } else { LockKind::Shared };
            self.run.unlock(Process(i as u32), file, piece, kind);
        }
    }

    fn order_record(&mut self, i: usize, record: &Record) {
        let process = Process(i as u32);
        match record.what {
            What::Send { comm, from, to, tag } => {
                let moment = self.run.moment(process);
                let need = self.meetings.send((comm, from, to, tag), moment);
                self.wake(need);
            }
            What::Recv { comm, from, to, tag, posted } => {
                let channel = (comm, from, to, tag);
                let number = self.number_of(channel, posted);
                if let Some(moment) = self.meetings.receive(channel, number) {
                    self.run.after(process, &moment);
                }
            }
            What::Enter { comm, number, rank, size, root, flow } => {
                let entry = Entry { key: (comm, number), rank, size, root, flow };
                let moment = self.run.moment(process);
                let need = self.meetings.enter(entry, moment);
                self.wake(need);
            }
            What::Leave { comm, number, rank } => {
                let heard = self.meetings.leave((comm, number), rank);
                heard.into_iter().for_each(|moment| self.run.after(process, &moment));
            }
            What::Asked => (self.lines[i].asked, self.lines[i].synced) = (true, false),
            What::Answered => {
                let is_idle = self.lines[i].asked && !self.lines[i].synced;
                self.doubts.idle_syncs += u64::from(is_idle);
                self.lines[i].asked = false;
            }
            _ => {}
        }
    }
}
