//! One file: where its bytes go, writing them, and giving it its name.

use super::board::{Board, Corner, Place, check_own};
use super::claims::{Sources, claims};
use super::merge::{self, Missing};
use super::statement::{Fate, Statement};
use super::tick;
use crate::cache::CacheDir;
use crate::passing::written_runs;
use crate::recover::places::{Listing, Places, copy_xattrs, dress, kind};
use ebb_locks::Mutex;
use ebb_node_journal::{Home, Note, Seen};
use ebb_types::{ByteRange, Extents, Ino, Time};
use rustix::fs::{FileType, Stat};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that are moved at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What all files of a recovery share.
pub(super) struct Site<'a> {
    pub places: &'a Places,
    pub board: &'a Board,
    pub cache: &'a CacheDir,
    pub node: &'a str,
    pub rebooted: bool,
    pub force: bool,
    /// There were other nodes in the job.
    pub shared: bool,
    /// Files of which other recoveries must know which object they are, also when nobody else had them.
    pub told: BTreeSet<Ino>,
    /// Files of which it is known from all journals which name they have.
    pub named: BTreeSet<Ino>,
    /// Files of which it is known from journals which modes and owner they have.
    pub shaped: BTreeSet<Ino>,
    /// Every node that ever was in the job has said all that it has to say.
    pub everybody: AtomicBool,
    /// Files that are zeros and nothing else, as far as all nodes together have heard; and how long.
    pub zeros: Mutex<BTreeMap<Ino, u64>>,
    /// The numbers of files that this node knows to be in place on the backing.
    pub numbers: BTreeSet<u64>,
    /// What a look at all of the backing has found, when there was one; `None` in it: that cannot be read.
    pub listing: Mutex<Option<Option<Listing>>>,
}

impl Site<'_> {
    /// What is found by looking at all of the backing, once; `None` where not all of it can be read.
    pub fn in_listing<T>(&self, look: impl FnOnce(&Listing) -> T) -> Option<T> {
        let mut listing = self.listing.lock();
        let listing = listing.get_or_insert_with(|| {
            let found = self.places.listing(&self.numbers);
            let why =
                |e: &io::Error| tracing::warn!(error = %e, "cannot look at all of the backing");
            found.inspect_err(why).ok()
        });
        listing.as_ref().map(look)
    }

    /// True when a part file of this name and number is anywhere on the backing, or may be: where not all
    /// of that can be read nobody knows.
    fn may_have_part(&self, home: &Home) -> bool {
        let is_it =
            |all: &Listing| all.has_closed || all.parts.contains(&(home.last().to_vec(), home.ino));
        self.in_listing(is_it).unwrap_or(true)
    }

    /// True when the backing has nothing that this node knows to be the file.
    pub fn is_nowhere(&self, note: &Note) -> bool {
        let Some(home) = &note.header.home else { return true };
        matches!(self.places.home(home, &note.header.path), Ok(None))
    }
}

/// A file on its way.
pub(super) struct Work {
    ino: Ino,
    statement: Statement,
    sources: Sources,
    corner: Corner,
    place: Place,
    /// This recovery knows from all journals which name it has.
    named: bool,
    /// Other nodes may have flushed to the file what nobody has but the file itself, and what may be newer
    /// than what this node has: until everybody has said what it flushed, nothing is written over what
    /// is there.
    careful: bool,
    /// It changes with everything that any node says of it.
    pub seen: u64,
}

/// Why a file stays where it is.
#[derive(Debug)]
pub(super) enum Stay {
    /// What is on the backing is not what was known.
    Conflict(String),
    /// Nothing is held of it, what was flushed is not where it was, and is in no part file: the job has
    /// published or deleted it, and this node did not hear of that. It is said what was flushed.
    Over,
    Io(io::Error),
}

impl From<io::Error> for Stay {
    fn from(e: io::Error) -> Stay {
        Stay::Io(e)
    }
}

impl Stay {
    pub fn text(&self) -> String {
        match self {
            Stay::Conflict(why) => why.clone(),
            Stay::Over => "published or deleted by the job".to_owned(),
            Stay::Io(e) => match e.raw_os_error() {
                Some(code) => ebb_types::Errno(code).to_string(),
                None => e.to_string(),
            },
        }
    }
}

/// How far a file is.
#[derive(Debug)]
pub(super) enum Progress {
    /// It is whole, under its name.
    Done,
    /// Others have to come.
    Missing(Missing),
}

impl Work {
    /// Says what this node has of the file, before anything is written; also when it cannot bring that.
    pub fn begin(site: &Site<'_>, ino: Ino, note: &Note) -> Result<Work, Stay> {
        let (statement, sources) =
            claims(site.node, ino, note, site.rebooted, site.cache, site.places)?;
        let begun = Work::begin_with(site, ino, note, statement, sources);
        if matches!(begun, Err(Stay::Conflict(_))) && note.has_bytes() {
            let (mut kept, _) =
                claims(site.node, ino, note, site.rebooted, site.cache, site.places)?;
            let all: Vec<ByteRange> = kept.claims.iter().map(|(range, _)| range).collect();
            kept.set(&all, Fate::Overtaken);
            site.board.corner(ino)?.keep(&kept)?;
        }
        begun
    }

    fn begin_with(
        site: &Site<'_>,
        ino: Ino,
        note: &Note,
        mut statement: Statement,
        sources: Sources,
    ) -> Result<Work, Stay> {
        // Who has nothing to write decides nothing.
        let known = match is_flushed(note) {
            true => site.board.place(ino)?.is_some(),
            false => site.board.has(ino)?,
        };
        let why = match note.header.path.is_empty() {
            true => {
                Some("deleted or moved, as far as is known, and nobody has said where to".into())
            }
            false if known || site.force => None,
            false => conflict(site, note)?,
        };
        if let Some(why) = why {
            if !is_over(site, note) {
                return Err(Stay::Conflict(why));
            }
            site.board.corner(ino)?.say(&statement)?;
            return Err(Stay::Over);
        }
        // Nobody else has anything to say of it. Who shared it once may have heard last that it was alone.
        let told = known || note.overrides || note.header.shared || site.told.contains(&ino);
        let alone = note.alone && !told;
        let mut corner = match alone {
            true => site.board.alone(ino, &statement)?,
            false => site.board.corner(ino)?,
        };
        let place = match corner.place()? {
            Some(place) => place,
            None => corner.settle(site.node, &choose(site, note, &statement, &corner)?)?,
        };
        let before = corner.statements()?;
        if let Some(mine) = before.iter().find(|s| s.node == site.node) {
            statement.go_on_from(mine);
        }
        // Others, who know of an older object only, have chosen a new one: it takes the place of this.
        let old = note.header.home.as_ref().filter(|h| !h.is_part() && h.ino != place.ino);
        if let Some(old) = old
            && let Some(file) = site.places.file(&old.path, old.ino)?
            && let Some((new, _)) = find(site, &corner, &place, &before)?
        {
            copy_xattrs(&file, &new);
            statement.under = Some(old.clone());
        }
        // What is in the file need not be written to it.
        if sources.is_home(place.ino) {
            statement.set(sources.flushed(), Fate::Written);
        }
        corner.say(&statement)?;
        let named = site.named.contains(&ino);
        let seen = note.header.home.as_ref().and_then(|h| h.seen.filter(|_| !h.changing));
        let unchanged = seen.is_some() && seen == place.was;
        let careful = !alone && !site.force && corner.was_there(&place) && !unchanged;
        Ok(Work { ino, statement, sources, corner, place, named, careful, seen: 0 })
    }

    /// Says which bytes of others this node has cut, of a file of which it holds nothing: whoever writes
    /// to the file later goes by it. The file itself, where somebody has begun to write to it.
    pub fn begin_of_cuts(site: &Site<'_>, ino: Ino, note: &Note) -> Result<Option<Work>, Stay> {
        let known = site.board.place(ino)?.is_some();
        let home = note.header.home.as_ref().filter(|h| h.path == note.header.path);
        let in_place = match (home, site.places.stat(&note.header.path)?) {
            (Some(home), Some(there)) => home.ino == there.st_ino,
            _ => false,
        };
        let (statement, _) = claims(site.node, ino, note, site.rebooted, site.cache, site.places)?;
        let mut corner = site.board.corner(ino)?;
        corner.say(&statement)?;
        // Whoever decides where the bytes go after this look reads what is said here.
        let begun = known || in_place || corner.place()?.is_some();
        let named = !note.header.path.is_empty();
        if begun && named { Work::begin(site, ino, note).map(Some) } else { Ok(None) }
    }

    /// Where the file is on the backing, for the journal: a run that comes after this one must not
    /// take it for somebody else's.
    pub fn home(&self) -> Home {
        Home { path: self.place.path.clone(), ino: self.place.ino, seen: None, changing: true }
    }

    /// The path that it has, or is to have: as the node knows it that has heard of it last.
    pub fn path<'a>(&'a self, all: &'a [Statement]) -> &'a [u8] {
        if self.named {
            return &self.statement.shape.path;
        }
        &newest(all).unwrap_or(&self.statement).shape.path
    }

    fn statements(&mut self) -> io::Result<Vec<Statement>> {
        let all = self.corner.statements()?;
        let text: Vec<u8> = all.iter().flat_map(Statement::encode).collect();
        self.seen = crate::hash::bytes(&text);
        Ok(all)
    }

    /// Writes what may be written now, and gives the file its name when it is whole.
    pub fn step(&mut self, site: &Site<'_>) -> Result<Progress, Stay> {
        loop {
            let progress = self.step_once(site)?;
            // Who has said meanwhile where the file ends may have looked at it before this one made it longer.
            let before = self.seen;
            self.statements()?;
            if self.seen == before || matches!(progress, Progress::Missing(_)) {
                return Ok(progress);
            }
        }
    }

    fn step_once(&mut self, site: &Site<'_>) -> Result<Progress, Stay> {
        // First: what they have said is read after it.
        let everybody = site.everybody.load(Ordering::Acquire);
        let mut all = self.statements()?;
        let Some((file, found_at)) = self.find(site, &all)? else {
            return Err(Stay::Conflict("the file that recoveries write to is gone".to_owned()));
        };
        let doubtful = loop {
            let others: Vec<_> = all.iter().filter(|s| s.node != site.node).cloned().collect();
            let mut decision = merge::decide(&self.statement, &others, site.force);
            let doubtful = match self.careful && !everybody {
                true => keep_off(&file, &mut decision.write)?,
                false => Vec::new(),
            };
            if decision.write.is_empty() && decision.overtaken.is_empty() {
                break doubtful;
            }
            self.write(&file, &decision.write)?;
            self.statement.set(&decision.write, Fate::Written);
            self.statement.set(&decision.overtaken, Fate::Overtaken);
            self.corner.say(&self.statement)?;
            all = self.statements()?;
        };
        let mut missing = merge::missing(&all, self.place.base, everybody);
        if self.zeros(site, &all) == Some(merge::size(&all)) {
            (missing.holes, missing.silent) = (Vec::new(), false);
        }
        let told = |r: &ByteRange| doubtful.iter().any(|d| d.overlaps(*r));
        missing.waiting.retain(|(r, node)| node != site.node || !told(r));
        missing.doubtful = doubtful;
        if !missing.is_empty() && !site.force {
            return Ok(Progress::Missing(missing));
        }
        self.publish(site, &file, &found_at, &all)?;
        let own = missing.lost.iter().any(|(_, node)| node == site.node);
        Ok(if own { Progress::Missing(missing) } else { Progress::Done })
    }

    /// The same of a file that had no bytes but zeros as far as this node has heard: when nobody says
    /// otherwise.
    pub fn step_zeros(&mut self, site: &Site<'_>) -> Result<Progress, Stay> {
        let all = self.statements()?;
        if !merge::is_nobodys(&all) {
            return self.step(site);
        }
        let Some((file, found_at)) = self.find(site, &all)? else {
            return Err(Stay::Conflict("the file that recoveries write to is gone".to_owned()));
        };
        self.publish(site, &file, &found_at, &all)?;
        Ok(Progress::Done)
    }

    /// How long it is, if it is of zeros alone and nobody says otherwise.
    fn zeros(&self, site: &Site<'_>, all: &[Statement]) -> Option<u64> {
        let heard = site.zeros.lock().get(&self.ino).copied();
        heard.filter(|_| merge::is_nobodys(all))
    }

    fn find(&self, site: &Site<'_>, all: &[Statement]) -> io::Result<Option<(File, Vec<u8>)>> {
        find(site, &self.corner, &self.place, all)
    }

    /// The bytes are on stable storage, and what is read back is what was written.
    fn write(&self, file: &File, ranges: &[ByteRange]) -> io::Result<()> {
        let mut buf = vec![0; PIECE_BYTES as usize];
        let mut sums = Vec::new();
        let pieces = ranges.iter().flat_map(|r| self.sources.pieces(*r, PIECE_BYTES));
        for piece in pieces {
            let data = &mut buf[..piece.len() as usize];
            self.sources.read(data, piece.start())?;
            sums.push((piece, crc32c::crc32c(data)));
            tick::effect()?;
            file.write_all_at(data, piece.start())?;
        }
        if sums.is_empty() {
            return Ok(());
        }
        file.sync_data()?;
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
        for (piece, sum) in sums {
            let data = &mut buf[..piece.len() as usize];
            file.read_exact_at(data, piece.start())?;
            if crc32c::crc32c(data) != sum {
                let text = format!("bytes {piece:?} are not on the backing as they were written");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
        }
        Ok(())
    }

    /// A part file of the service from which all that is known to be in it was taken is of no use.
    pub fn tidy(&self, site: &Site<'_>, note: &Note) {
        let old = note.header.home.as_ref().filter(|h| h.is_part() && h.ino != self.place.ino);
        let Some(old) = old else { return };
        let removed = site.places.home(old, &note.header.path).and_then(|found| match found {
            Some((path, file)) if self.is_used_up(&file)? => site.places.at(&path, false)?.remove(),
            _ => Ok(()),
        });
        if let Err(e) = removed {
            tracing::debug!(error = %e, "an old part file stays");
        }
    }

    fn is_used_up(&self, file: &File) -> io::Result<bool> {
        check_own(file)?;
        let data = written_runs(file, &[ByteRange::new(0, file.metadata()?.len())])?;
        let all = self.corner.statements()?;
        let mut claimed: Extents<()> = Extents::new();
        all.iter().flat_map(|s| s.claims.iter()).for_each(|(r, _)| claimed.insert(r, ()));
        Ok(data.iter().all(|run| claimed.gaps(*run).next().is_none()))
    }

    /// Size, attributes, name. Whoever finds the file whole does this, and all do the same.
    fn publish(
        &self,
        site: &Site<'_>,
        file: &File,
        found_at: &[u8],
        all: &[Statement],
    ) -> Result<(), Stay> {
        let path = self.path(all).to_vec();
        // Recoveries made it, of zeros: it is as long as this one has heard.
        let zeros = self.zeros(site, all).filter(|_| self.home().is_part());
        let size = zeros.unwrap_or_else(|| merge::size(all).max(self.place.base));
        let (len, untouched) = (file.metadata()?.len(), is_hollow(file)?);
        // Longer than all that is known: others have written there, unless that was a recovery which had
        // not heard who cut it.
        let is_cut = all.iter().any(|s| !s.cuts.is_empty());
        let grown = is_cut && len > size && is_grown(file, all, size, len)?;
        let cut = || is_cut && is_written_behind(all, size) || grown;
        // Of a file that has its name and of which no recovery has a byte, those that are in it are its
        // user's.
        let named = !Home::is_part(&Home { path: found_at.to_vec(), ..self.home() });
        let in_use = named && !untouched && merge::is_nobodys(all);
        let cuts = len > size && (zeros.is_some() && untouched || cut());
        if in_use && !cuts {
            return Ok(());
        }
        if len < size || cuts {
            file.set_len(size)?;
        }
        for range in merge::void(all, self.place.base) {
            zero(file, range)?;
        }
        let newest = newest(all).filter(|_| !self.named);
        let shape = &newest.unwrap_or(&self.statement).shape;
        let mtime = all.iter().map(|s| s.shape.mtime).max().unwrap_or(shape.mtime);
        let stat = rustix::fs::fstat(file).map_err(io::Error::from)?;
        // What nobody has noted is on the backing already, and newer than what a node had heard of it once.
        let (perm, owner) = match named && !site.shaped.contains(&self.ino) {
            true => (stat.st_mode & 0o7777, (stat.st_uid, stat.st_gid)),
            false => (shape.perm, (shape.uid, shape.gid)),
        };
        dress(file, perm, owner, (shape.atime, mtime))?;
        file.sync_all()?;
        tick::effect()?;
        if named {
            return Ok(());
        }
        let (from, to) = (site.places.at(found_at, false)?, site.places.at(&path, true)?);
        let there = to.stat()?;
        let mut unders = all.iter().filter_map(|s| s.under.as_ref());
        let older = unders.find(|u| there.is_some_and(|t| t.st_ino == u.ino));
        self.corner.note_name(site.node, &path)?;
        tick::effect()?;
        let renamed = match there {
            Some(t) if older.is_some() || site.force && kind(&t) == FileType::RegularFile => {
                from.rename_over(&to)
            }
            _ => from.rename_to_free(&to),
        };
        match renamed {
            Ok(()) => Ok(()),
            Err(e) => match to.stat()? {
                // Another recovery was faster.
                Some(t) if t.st_ino == self.place.ino => Ok(()),
                Some(_) => Err(Stay::Conflict(OCCUPIED.to_owned())),
                None => Err(e.into()),
            },
        }
    }
}

/// Takes those off the list where something is in the file; which.
fn keep_off(file: &File, write: &mut Vec<ByteRange>) -> io::Result<Vec<ByteRange>> {
    let there = written_runs(file, write)?;
    let mut free: Extents<()> = write.iter().map(|r| (*r, ())).collect();
    for run in &there {
        free.remove(*run);
    }
    *write = free.iter().map(|(r, ())| r).collect();
    Ok(there)
}

/// The file that the bytes go into, under whatever name it has by now.
fn find(
    site: &Site<'_>,
    corner: &Corner,
    place: &Place,
    all: &[Statement],
) -> io::Result<Option<(File, Vec<u8>)>> {
    let ready = corner.ready();
    let mut paths: Vec<&[u8]> = all.iter().map(|s| &s.shape.path[..]).collect();
    paths.insert(0, &ready);
    paths.dedup();
    let home = Home { path: place.path.clone(), ino: place.ino, seen: None, changing: false };
    // Between the looks at two names it may get the second one.
    for path in paths.iter().chain(&paths.clone()) {
        if let Some((path, file)) = site.places.home(&home, path)? {
            return Ok(Some((file, path)));
        }
    }
    Ok(None)
}

/// Who has heard of the file last. Of one that was only cut a node may not have heard the name.
fn newest(all: &[Statement]) -> Option<&Statement> {
    all.iter().filter(|s| !s.shape.path.is_empty()).max_by_key(|s| (s.known, &s.node))
}

/// True when nobody has written a byte into it, not even somebody who uses what an earlier recovery made.
pub(super) fn is_hollow(file: &File) -> io::Result<bool> {
    Ok(std::os::unix::fs::MetadataExt::blocks(&file.metadata()?) == 0)
}

/// True when recoveries have written behind this length, or are about to.
fn is_written_behind(all: &[Statement], size: u64) -> bool {
    let mut claims = all.iter().flat_map(|s| s.claims.iter());
    claims.any(|(range, claim)| range.end() > size && claim.fate != Fate::Lost)
}

/// True when nothing but a hole is behind this length, as long as a recovery makes it that has heard of no
/// cut.
fn is_grown(file: &File, all: &[Statement], size: u64, len: u64) -> io::Result<bool> {
    let heard = all.iter().any(|s| s.size == len);
    Ok(heard && written_runs(file, &[ByteRange::new(size, len)])?.is_empty())
}

fn zero(file: &File, range: ByteRange) -> io::Result<()> {
    let zeros = vec![0; PIECE_BYTES.min(range.len()) as usize];
    let mut at = range.start();
    while at < range.end() {
        let n = (range.end() - at).min(PIECE_BYTES);
        file.write_all_at(&zeros[..n as usize], at)?;
        at += n;
    }
    Ok(())
}

const OCCUPIED: &str = "something else has this name on the backing now";

/// Where the bytes go when nobody has decided that yet.
fn choose(site: &Site<'_>, note: &Note, mine: &Statement, corner: &Corner) -> Result<Place, Stay> {
    let there = site.places.stat(&note.header.path)?;
    let in_place = |t: &Stat, base| {
        let was = Some(Seen { size: len_of(t), mtime: mtime_of(t) });
        Place { path: note.header.path.clone(), ino: t.st_ino, base, was }
    };
    match (&note.header.home, there) {
        (Some(home), Some(there)) if home.ino == there.st_ino => {
            let len = len_of(&there);
            // What grew since the look is a node's doing, and may have holes.
            let seen = home.seen.filter(|_| !home.is_part()).map_or(len, |s| s.size.min(len));
            return Ok(in_place(&there, seen));
        }
        (Some(home), _) if home.is_part() => {
            if let Some((path, file)) = site.places.home(home, &note.header.path)? {
                check_own(&file)?;
                return Ok(Place::of(path, home.ino));
            }
        }
        _ => {}
    }
    let whole = merge::missing(std::slice::from_ref(mine), 0, false);
    let whole = whole.holes.is_empty() && whole.lost.is_empty();
    let replaced = |t: &Stat| note.header.under.as_ref().is_some_and(|u| u.ino == t.st_ino);
    match there {
        // A file may replace a symbolic link.
        Some(t) if kind(&t) != FileType::RegularFile && !replaced(&t) => {
            let text = "something else has this name on the backing now, and it is not a file";
            Err(Stay::Conflict(text.to_owned()))
        }
        // By force: what lacks bytes cannot take the place of what is there.
        Some(t) if site.force && note.header.under.is_none() && !whole => {
            Ok(in_place(&t, len_of(&t)))
        }
        _ => Ok(corner.whole()?),
    }
}

/// Nobody else of the job has, or had, bytes of it to flush.
fn is_alone(note: &Note) -> bool {
    note.alone && !note.header.shared
}

/// Why the backing is not as the journal knew it, if it is not.
fn conflict(site: &Site<'_>, note: &Note) -> io::Result<Option<String>> {
    let header = &note.header;
    let there = site.places.stat(&header.path)?;
    let home = header.home.as_ref();
    let expected = match home {
        Some(home) if !home.is_part() => Some(home),
        _ => header.under.as_ref(),
    };
    let why = match (there, expected) {
        (None, None) => None,
        // A part file keeps its number when it gets its name.
        (Some(there), _) if home.is_some_and(|h| h.is_part() && h.ino == there.st_ino) => None,
        (None, Some(home)) if home.is_part() || header.under.is_some() => None,
        (None, Some(_)) => Some("the file on the backing is gone"),
        (Some(there), None) if home.is_some_and(|h| h.ino == there.st_ino) => None,
        (Some(_), None) => Some(OCCUPIED),
        (Some(there), Some(home)) if home.ino != there.st_ino => {
            Some("another file has this name on the backing now")
        }
        (Some(there), Some(home)) => {
            let seen = home.seen.filter(|_| !home.changing);
            // What others of the job may have changed shows no stranger.
            let changed = seen.is_some_and(|seen| is_newer(&there, seen)) && is_alone(note);
            changed.then_some("the file on the backing was changed since")
        }
    };
    Ok(why.map(str::to_owned))
}

/// True when nothing of the file can be brought by this node, and none of it waits anywhere. What waits
/// in a part file of a file that only this node had, the job cannot have published or deleted without
/// its knowing.
fn is_over(site: &Site<'_>, note: &Note) -> bool {
    is_flushed(note)
        && match note.header.home.as_ref() {
            Some(home) if home.is_part() => !is_alone(note) && !site.may_have_part(home),
            _ => true,
        }
}

/// Nothing of it is in the cache, and something was flushed.
fn is_flushed(note: &Note) -> bool {
    note.is_empty() && note.has_bytes()
}

fn is_newer(there: &Stat, seen: Seen) -> bool {
    mtime_of(there) > seen.mtime || u64::try_from(there.st_size) != Ok(seen.size)
}

pub(super) fn len_of(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

pub(super) fn mtime_of(stat: &Stat) -> Time {
    Time { sec: stat.st_mtime, nsec: u32::try_from(stat.st_mtime_nsec).unwrap_or(0) }
}
