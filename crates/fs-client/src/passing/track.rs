//! Finding out afterwards what was written past the daemon: when a cache file was changed last,
//! where it has data, and what it held where others' bytes were put into it (the twin). Where the
//! kernel tells what was written, all of that is for the case that something of it was lost.

use crate::cache;
use ebb_consistency::claim::{blocks_of, changed_runs};
use ebb_consistency::{FileView, Source};
use ebb_tracker::{Watched, Why};
use ebb_types::{ByteRange, Time};
use rangemap::RangeSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

/// Bytes compared at a time.
const STEP: usize = 1 << 20;

/// Two ticks of the slowest clock that file systems take their times from, and some: times that
/// are younger may be those of a later write as well.
const YOUNG_NS: i128 = 25_000_000;

/// When a cache file was changed last, as far as its attributes tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Its length.
    pub len: u64,
    modified_ns: i128,
    changed_ns: i128,
    /// Somebody may have mapped it since it was marked.
    accessed: bool,
}

impl Stamp {
    /// As it is now.
    pub fn of(file: &File) -> io::Result<Stamp> {
        Ok(Stamp::from_meta(&file.metadata()?))
    }

    /// As these attributes tell.
    #[must_use]
    pub fn from_meta(meta: &Metadata) -> Stamp {
        let ns = |sec: i64, nsec: i64| i128::from(sec) * 1_000_000_000 + i128::from(nsec);
        Stamp {
            len: meta.len(),
            modified_ns: ns(meta.mtime(), meta.mtime_nsec()),
            changed_ns: ns(meta.ctime(), meta.ctime_nsec()),
            accessed: cache::was_accessed(meta),
        }
    }

    /// When the content was changed last.
    #[must_use]
    pub fn modified(&self) -> Time {
        let sec = self.modified_ns.div_euclid(1_000_000_000);
        let nsec = self.modified_ns.rem_euclid(1_000_000_000);
        Time { sec: i64::try_from(sec).unwrap_or(0), nsec: u32::try_from(nsec).unwrap_or(0) }
    }

    /// A number that differs when the stamp does, mostly.
    #[must_use]
    pub fn mark(&self) -> u64 {
        (self.modified_ns as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.len
    }

    fn is_young(&self) -> bool {
        let now = Time::now();
        let now_ns = i128::from(now.sec) * 1_000_000_000 + i128::from(now.nsec);
        now_ns - self.modified_ns.max(self.changed_ns) < YOUNG_NS
    }
}

/// Whether somebody has it mapped writably: stores into pages that are dirty already change no
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mapped {
    /// Nobody who could has had it open.
    Never,
    /// Not before the file's access time moves: mapping moves it.
    WhenAccessed,
    /// That cannot be seen.
    Perhaps,
}

/// What a look found. What was written over own bytes is not among it, where nothing tells.
#[derive(Default)]
pub struct Seen {
    /// What is new in the cache file: blocks, or bytes.
    pub new: Vec<ByteRange>,
    /// How many bytes were written, these or over what was there.
    pub bytes: u64,
    /// Something that should have been told was not.
    pub lost: Option<Why>,
}

/// What is remembered of an inode that is written past the daemon.
pub struct Track {
    /// At the last look.
    seen: Stamp,
    /// A write since then need not show in the stamp.
    doubtful: bool,
    mapped: Mapped,
    /// Something was written since the own bytes were attached last.
    due: bool,
    /// What was put into the cache file of others' bytes, at the same offsets.
    twin: Option<File>,
    /// Bytes of our blocks that others have and that never were here: zeros, and written only where they are
    /// not. What has been put there, by whomever, is in it no more.
    refused: RangeSet<u64>,
    /// Bytes that others have by now and of which the twin could not take what was here: as long as theirs
    /// are not here, a difference says nothing.
    blind: RangeSet<u64>,
    fine_times: bool,
    /// The kernel tells what is written.
    told: Option<Watched>,
    /// It will not any more.
    given_up: Option<Why>,
}

impl Track {
    /// From now on; `told` since before that, where the kernel tells.
    pub fn start(cache: &File, fine_times: bool, told: Option<Watched>) -> io::Result<Track> {
        let seen = Stamp::of(cache)?;
        let doubtful = !fine_times && seen.is_young();
        Ok(Track {
            seen,
            doubtful,
            mapped: Mapped::Never,
            due: false,
            twin: None,
            refused: RangeSet::new(),
            blind: RangeSet::new(),
            fine_times,
            told,
            given_up: None,
        })
    }

    /// Somebody who may map it writably is about to have it open. `access_times`: that would be
    /// seen.
    pub fn may_be_mapped(&mut self, cache: &File, access_times: bool) -> io::Result<()> {
        if self.mapped == Mapped::Never && access_times {
            cache::mark_unaccessed(cache)?;
            self.mapped = Mapped::WhenAccessed;
        } else if self.mapped == Mapped::Never {
            self.mapped = Mapped::Perhaps;
        }
        Ok(())
    }

    /// True when the stamp shows a change since the last look.
    #[must_use]
    pub fn shows_change(&self, now: &Stamp) -> bool {
        Stamp { accessed: self.seen.accessed, ..*now } != self.seen
    }

    /// True when something may have been written since the last look.
    #[must_use]
    pub fn may_have_changed(&self, now: &Stamp) -> bool {
        let mapped = match (&self.told, self.mapped) {
            // Mapped, or written in a way that times tell too early of.
            (Some(told), _) => told.is_lost(),
            (None, Mapped::Never) => false,
            (None, Mapped::WhenAccessed) => now.accessed,
            (None, Mapped::Perhaps) => true,
        };
        mapped || self.doubtful || self.shows_change(now)
    }

    /// Writes are told, and none need be looked for so far.
    #[must_use]
    pub fn is_told(&self) -> bool {
        self.told.is_some() && self.given_up.is_none()
    }

    /// Takes the blame for own bytes being written again: once.
    pub fn take_due(&mut self) -> bool {
        std::mem::take(&mut self.due)
    }

    /// Own bytes may have been written again since they were attached.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.due
    }

    /// The attach of them came to nothing.
    pub fn set_due(&mut self) {
        self.due = true;
    }

    /// Finds out what was written into the cache file, of which `now` was the stamp before, and tells
    /// the view.
    pub fn look(&mut self, cache: &File, now: Stamp, view: &mut FileView) -> io::Result<Seen> {
        let mut seen = self.hear(cache, view)?;
        if self.told.is_none() || seen.lost.is_some() {
            let found = self.look_for(cache, now, view)?;
            seen.new.extend(found.new);
            seen.bytes += found.bytes;
            self.due = true;
        }
        // What lasts is news once.
        let lasting = seen.lost.filter(|why| why.lasts());
        if lasting.is_some() && std::mem::replace(&mut self.given_up, lasting) == lasting {
            seen.lost = None;
        }
        self.doubtful = !self.fine_times && now.is_young();
        self.seen = now;
        Ok(seen)
    }

    /// What the kernel tells.
    fn hear(&mut self, cache: &File, view: &mut FileView) -> io::Result<Seen> {
        let (ranges, lost) = match self.told.as_ref().map(Watched::drain) {
            None => return Ok(Seen::default()),
            Some(Ok(written)) => (written.ranges, None),
            Some(Err(lost)) => (lost.known, Some(lost.why)),
        };
        // What was cut off since is not to come back as zeros.
        let whole = ByteRange::new(0, cache.metadata()?.len());
        let ranges = ranges.iter().map(|r| ByteRange::new(r.start, r.end).intersect(whole));
        let ranges: Vec<ByteRange> = ranges.filter(|r| !r.is_empty()).collect();
        let new = view.absent_of(&ranges);
        view.write_all(&ranges);
        Ok(Seen { new, bytes: sum(&ranges), lost })
    }

    fn look_for(&mut self, cache: &File, now: Stamp, view: &mut FileView) -> io::Result<Seen> {
        let mut changed = match &self.twin {
            Some(twin) => differing(cache, twin, &view.clean(ByteRange::new(0, now.len)))?,
            None => Vec::new(),
        };
        let blocks = data_blocks(cache, now.len)?;
        let (zeros, others) = self.by_refusal(&blocks);
        let absent = zeros.iter().flat_map(|r| view.absent(*r)).collect::<Vec<_>>();
        let written = written_runs(cache, &absent)?;
        written.iter().for_each(|run| self.refused.remove(run.to_std()));
        changed.extend(written);
        let (remote, others) = by_source(view, &others);
        let remote = remote.iter().flat_map(|r| gaps(&self.blind, *r)).collect::<Vec<_>>();
        changed.extend(match &self.twin {
            Some(twin) => differing(cache, twin, &remote)?,
            None => written_runs(cache, &remote)?,
        });
        let new = view.found(&others);
        changed.iter().for_each(|run| view.write(*run));
        let bytes = sum(&new) + sum(&changed);
        Ok(Seen { new, bytes, lost: None })
    }

    fn by_refusal(&self, blocks: &[ByteRange]) -> (Vec<ByteRange>, Vec<ByteRange>) {
        let (mut refused, mut others) = (Vec::new(), Vec::new());
        for block in blocks {
            let outer = block.to_std();
            let known = self.refused.overlapping(&outer);
            refused.extend(known.map(|r| ByteRange::new(r.start, r.end).intersect(*block)));
            others.extend(gaps(&self.refused, *block));
        }
        (refused, others)
    }

    /// Others have these bytes of blocks that were claimed, and here they are zeros.
    pub fn refuse(&mut self, ranges: &[ByteRange]) {
        ranges.iter().filter(|r| !r.is_empty()).for_each(|r| self.refused.insert(r.to_std()));
    }

    /// Puts others' bytes into the cache file without touching what is written there meanwhile:
    /// only bytes that differ from what was there when it was looked at last.
    pub fn merge(&mut self, cache: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
        let twin = self.twin(cache)?;
        let mut old = vec![0; bytes.len()];
        cache::read_padded(twin, &mut old, at)?;
        let range = ByteRange::at(at, bytes.len() as u64);
        // On a disk that is full either nothing changes, or the twin as the cache file does: else
        // others' bytes would be taken for written here.
        cache::reserve(twin, range)?;
        // From now on the twin says what is there. They would be taken for written here when others have
        // newer ones that are still on their way.
        self.refused.remove(range.to_std());
        for part in self.blind.overlapping(&range.to_std()) {
            let part = ByteRange::new(part.start, part.end).intersect(range);
            let part = (part.start() - at) as usize..(part.end() - at) as usize;
            old[part.clone()].iter_mut().zip(&bytes[part]).for_each(|(old, new)| *old = !new);
        }
        let twin = self.twin.as_ref().ok_or(io::ErrorKind::NotFound)?;
        for run in changed_runs(at, bytes, &old) {
            let from = (run.start() - at) as usize;
            let new = &bytes[from..from + run.len() as usize];
            let done = cache.write_all_at(new, run.start());
            let arrived = match done {
                Ok(()) => new.len(),
                Err(_) => equal_prefix(cache, new, run.start())?,
            };
            twin.write_all_at(&new[..arrived], run.start())?;
            done?;
        }
        twin.write_all_at(bytes, at)?;
        self.blind.remove(range.to_std());
        Ok(())
    }

    /// Others have newer ones of these own bytes, which stay until those are here. On a disk that is full
    /// nothing remembers what they are.
    pub fn overtaken(&mut self, cache: &File, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        self.blind.insert(range.to_std());
        self.refused.remove(range.to_std());
        match self.remember(cache, range) {
            Ok(()) => self.blind.remove(range.to_std()),
            Err(e) => tracing::debug!(error = %e, "what others have overwritten is not remembered"),
        }
    }

    /// The cache file's bytes in `range` are what was there when it was looked at last.
    pub fn remember(&mut self, cache: &File, range: ByteRange) -> io::Result<()> {
        let twin = self.twin(cache)?;
        each_step(range, |at, n| {
            let mut bytes = vec![0; n];
            cache::read_padded(cache, &mut bytes, at)?;
            twin.write_all_at(&bytes, at)
        })
    }

    /// Those bytes are zeros now.
    pub fn clear(&mut self, range: ByteRange) -> io::Result<()> {
        if !range.is_empty() {
            self.refused.remove(range.to_std());
            self.blind.remove(range.to_std());
        }
        let Some(twin) = &self.twin else { return Ok(()) };
        match twin.metadata()?.len() {
            len if len <= range.start() => Ok(()),
            len if len <= range.end() => twin.set_len(range.start()),
            _ => cache::punch(twin, range),
        }
    }

    fn twin(&mut self, cache: &File) -> io::Result<&File> {
        if self.twin.is_none() {
            self.twin = Some(cache::nameless_beside(cache)?);
        }
        self.twin.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// The parts of `range` that are not in the set.
fn gaps(set: &RangeSet<u64>, range: ByteRange) -> Vec<ByteRange> {
    set.gaps(&range.to_std()).map(|r| ByteRange::new(r.start, r.end)).collect()
}

fn sum(ranges: &[ByteRange]) -> u64 {
    ranges.iter().map(|range| range.len()).sum()
}

/// Cuts `blocks` into absent bytes that others have, as far as is known, and the rest. What the
/// first were at the last look is in the twin: they are on their way here, or could not be had.
fn by_source(view: &FileView, blocks: &[ByteRange]) -> (Vec<ByteRange>, Vec<ByteRange>) {
    let (mut remote, mut rest) = (Vec::new(), Vec::new());
    for block in blocks {
        let mut at = block.start();
        for piece in view.plan_read(*block) {
            if matches!(piece.source, Source::Peer { .. } | Source::Backing) {
                rest.push(ByteRange::new(at, piece.range.start()));
                remote.push(piece.range);
                at = piece.range.end();
            }
        }
        rest.push(ByteRange::new(at, block.end()));
    }
    rest.retain(|r| !r.is_empty());
    (remote, rest)
}

/// How many of `bytes` are in the file at `at`.
fn equal_prefix(file: &File, bytes: &[u8], at: u64) -> io::Result<usize> {
    let mut there = vec![0; bytes.len()];
    cache::read_padded(file, &mut there, at)?;
    Ok(bytes.iter().zip(&there).take_while(|(a, b)| a == b).count())
}

fn each_step(
    range: ByteRange,
    mut work: impl FnMut(u64, usize) -> io::Result<()>,
) -> io::Result<()> {
    let mut at = range.start();
    while at < range.end() {
        let n = (range.end() - at).min(STEP as u64) as usize;
        work(at, n)?;
        at += n as u64;
    }
    Ok(())
}

/// The runs within `ranges` in which the two files differ.
fn differing(now: &File, then: &File, ranges: &[ByteRange]) -> io::Result<Vec<ByteRange>> {
    let mut runs = Vec::new();
    let (mut new, mut old) = (vec![0; STEP], vec![0; STEP]);
    for range in ranges {
        each_step(*range, |at, n| {
            cache::read_padded(now, &mut new[..n], at)?;
            cache::read_padded(then, &mut old[..n], at)?;
            runs.extend(changed_runs(at, &new[..n], &old[..n]));
            Ok(())
        })?;
    }
    Ok(runs)
}

/// The runs of bytes within `ranges` that are not zero.
pub fn written_runs(cache: &File, ranges: &[ByteRange]) -> io::Result<Vec<ByteRange>> {
    let mut runs = Vec::new();
    let mut bytes = vec![0; STEP];
    for range in ranges {
        each_step(*range, |at, n| {
            cache::read_padded(cache, &mut bytes[..n], at)?;
            runs.extend(changed_runs(at, &bytes[..n], &[]));
            Ok(())
        })?;
    }
    Ok(runs)
}

/// The blocks of a cache file that hold data, neighbours as one.
fn data_blocks(cache: &File, len: u64) -> io::Result<Vec<ByteRange>> {
    let mut out: Vec<ByteRange> = Vec::new();
    let mut at = 0;
    while at < len {
        let Some(start) = cache::next_data(cache, at)? else { break };
        let end = cache::next_hole(cache, start)?;
        let blocks = blocks_of(ByteRange::new(start, end), len);
        match out.last_mut() {
            Some(last) if last.end() >= blocks.start() => {
                *last = ByteRange::new(last.start(), blocks.end().max(last.end()));
            }
            _ if blocks.is_empty() => {}
            _ => out.push(blocks),
        }
        at = end.max(start + 1);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_consistency::claim::BLOCK;
    use ebb_types::{NodeId, Version};

    fn scratch() -> File {
        tempfile::tempfile().expect("a file")
    }

    fn known_blank() -> FileView {
        let mut view = FileView::new(NodeId(1));
        let answer = ebb_consistency::FileState::new(0).query(ByteRange::ALL, Version::ZERO);
        view.apply(&answer);
        view
    }

    #[test]
    fn a_look_finds_new_blocks_up_to_the_size() {
        let cache = scratch();
        let mut track = Track::start(&cache, true, None).expect("track");
        let mut view = known_blank();
        cache.write_all_at(b"x", 5 * BLOCK + 10).expect("write");
        let now = Stamp::of(&cache).expect("stamp");
        assert!(track.shows_change(&now));
        let new = track.look(&cache, now, &mut view).expect("look").new;
        assert_eq!(new.iter().map(|r| r.len()).sum::<u64>(), 11);
        assert_eq!(view.unattached(ByteRange::ALL), [ByteRange::new(5 * BLOCK, 5 * BLOCK + 11)]);
        assert!(!track.may_have_changed(&Stamp::of(&cache).expect("stamp")));
        assert!(track.take_due() && !track.take_due());
        track.may_be_mapped(&cache, false).expect("noted");
        assert!(track.may_have_changed(&now), "stores need not show");
    }

    #[test]
    fn coarse_times_are_not_trusted_while_young() {
        let cache = scratch();
        cache.write_all_at(b"x", 0).expect("write");
        let young = Track::start(&cache, false, None).expect("track");
        assert!(young.may_have_changed(&Stamp::of(&cache).expect("stamp")));
        std::thread::sleep(std::time::Duration::from_millis(60));
        let old = Track::start(&cache, false, None).expect("track");
        assert!(!old.may_have_changed(&Stamp::of(&cache).expect("stamp")));
    }

    /// Others' bytes that do not arrive, as on a full disk, are not taken for written here later.
    #[test]
    fn a_merge_that_fails_claims_nothing() {
        let cache = scratch();
        let mut track = Track::start(&cache, true, None).expect("track");
        let mut view = known_blank();
        let mut service = ebb_consistency::FileState::new(0);
        service.attach(NodeId(2), &[ByteRange::new(0, 100)]);
        let answer = service.query(ByteRange::ALL, Version::ZERO);
        view.apply(&answer);
        view.fetched(ByteRange::new(0, 100), answer.version);
        let refusing = cache::reopened_for_reading(&cache).expect("open");
        track.merge(&refusing, 0, &[5; 100]).expect_err("it cannot be written to");
        view.drop_clean(ByteRange::new(0, 100));
        cache.write_all_at(&[9; 3], 20).expect("our own write");
        let now = Stamp::of(&cache).expect("stamp");
        track.look(&cache, now, &mut view).expect("look");
        assert_eq!(view.unattached(ByteRange::ALL), [ByteRange::new(20, 23)]);
    }

    /// What others have overwritten, and the full disk could not remember, is not taken for written here
    /// over theirs; theirs come in whole.
    #[test]
    fn what_others_have_overwritten_is_not_claimed_again_on_a_full_disk() {
        let cache = scratch();
        let mut track = Track::start(&cache, true, None).expect("track");
        let mut view = known_blank();
        let own = ByteRange::new(0, 3 * BLOCK);
        cache.write_all_at(&[7; 3 * BLOCK as usize], 0).expect("our own write");
        view.write(own);
        let mut service = ebb_consistency::FileState::new(0);
        let taken = view.take_unattached(ByteRange::ALL);
        view.attached(&taken, service.attach(NodeId(1), &taken), service.size());
        let theirs = ByteRange::new(BLOCK, 2 * BLOCK);
        service.attach(NodeId(2), &[theirs]);
        let answer = service.query(ByteRange::ALL, Version::ZERO);
        assert_eq!(view.apply(&answer).overtaken, [theirs]);
        track.twin = Some(cache::reopened_for_reading(&scratch()).expect("a twin that is full"));
        track.overtaken(&cache, theirs);
        assert!(track.remember(&cache, theirs).is_err(), "nothing goes into the twin");
        let look = |track: &mut Track, view: &mut FileView| {
            track.look(&cache, Stamp::of(&cache).expect("stamp"), view).expect("look");
            view.unattached(ByteRange::ALL)
        };
        assert_eq!(look(&mut track, &mut view), [], "it is still theirs");
        // There is room again. Some of their bytes are what the empty twin has.
        track.twin = None;
        let bytes = [[0u8; 100], [9; 100]].concat().repeat(BLOCK as usize / 200 + 1);
        let bytes = &bytes[..BLOCK as usize];
        assert_eq!(view.fetched(theirs, answer.version), [theirs]);
        track.merge(&cache, BLOCK, bytes).expect("merge");
        let mut there = vec![0; 3 * BLOCK as usize];
        cache.read_exact_at(&mut there, 0).expect("read");
        let own = vec![7; BLOCK as usize];
        assert_eq!(there, [&own, bytes, &own].concat());
        assert_eq!(look(&mut track, &mut view), []);
        cache.write_all_at(&[8; 3], BLOCK + 50).expect("over theirs");
        let new = ByteRange::new(BLOCK + 50, BLOCK + 53);
        assert_eq!(look(&mut track, &mut view), [new], "writes are seen again");
    }

    /// A claim of a block was refused where others had bytes; theirs came, and then newer ones that are still
    /// on their way: what is here of the older ones was not written here.
    #[test]
    fn older_bytes_of_others_in_a_claimed_block_are_not_taken_for_written_here() {
        let cache = scratch();
        let mut track = Track::start(&cache, true, None).expect("track");
        let mut view = known_blank();
        let mut service = ebb_consistency::FileState::new(0);
        let theirs = ByteRange::new(100, 200);
        let publish = |service: &mut ebb_consistency::FileState, view: &mut FileView| {
            service.attach(NodeId(2), &[theirs]);
            let answer = service.query(ByteRange::ALL, Version::ZERO);
            view.apply(&answer);
            answer.version
        };
        let look = |track: &mut Track, view: &mut FileView| {
            track.look(&cache, Stamp::of(&cache).expect("stamp"), view).expect("look");
            view.unattached(ByteRange::ALL)
        };
        let first = publish(&mut service, &mut view);
        cache.write_all_at(&[7; 50], 0).expect("our own write");
        track.refuse(&[theirs]);
        let own = ByteRange::new(0, 50);
        assert_eq!(look(&mut track, &mut view), [own]);
        assert_eq!(view.fetched(theirs, first), [theirs]);
        track.merge(&cache, theirs.start(), &[5; 100]).expect("merge");
        publish(&mut service, &mut view);
        assert!(!view.local(theirs), "they have newer ones");
        cache.write_all_at(&[8; 3], 60).expect("our own write");
        let own = ByteRange::new(0, 100);
        assert_eq!(look(&mut track, &mut view), [own], "the rest of the block is a guess");
        // What is written over the older ones is.
        cache.write_all_at(&[8; 3], 120).expect("our own write");
        let over = ByteRange::new(120, 123);
        assert_eq!(look(&mut track, &mut view), [own, over]);
        // Nor what was written here once, and others have written over since.
        let taken = view.take_unattached(ByteRange::ALL);
        view.attached(&taken, service.attach(NodeId(1), &taken), service.size());
        service.attach(NodeId(2), &[over]);
        let answer = service.query(ByteRange::ALL, Version::ZERO);
        assert_eq!(view.apply(&answer).overtaken, [over]);
        track.overtaken(&cache, over);
        assert_eq!(look(&mut track, &mut view), []);
    }

    /// Foreign bytes come in beside bytes that are being written here, and what is written over
    /// them is found by the byte.
    #[test]
    fn merged_bytes_and_own_writes_are_kept_apart() {
        let cache = scratch();
        let mut track = Track::start(&cache, true, None).expect("track");
        let mut view = known_blank();
        // Another node owns 0..100 as one claim, of which it wrote 0..50.
        let mut service = ebb_consistency::FileState::new(0);
        service.attach(NodeId(2), &[ByteRange::new(0, 100)]);
        let answer = service.query(ByteRange::ALL, Version::ZERO);
        view.apply(&answer);
        cache.write_all_at(&[7; 20], 60).expect("our own write, not looked for yet");
        let theirs = [[5u8; 50], [0u8; 50]].concat();
        let accepted = view.fetched(ByteRange::new(0, 100), answer.version);
        assert_eq!(accepted, [ByteRange::new(0, 100)]);
        track.merge(&cache, 0, &theirs).expect("merge");
        cache.write_all_at(&[8; 3], 10).expect("over theirs");
        let now = Stamp::of(&cache).expect("stamp");
        let seen = track.look(&cache, now, &mut view).expect("look");
        let written = [ByteRange::new(10, 13), ByteRange::new(60, 80)];
        assert_eq!(seen.bytes, sum(&written));
        assert_eq!(view.unattached(ByteRange::ALL), written);
        assert!(!view.has_guessed());
        let mut bytes = [0; 80];
        cache.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!((bytes[9], bytes[10], bytes[59], bytes[60], bytes[79]), (5, 8, 0, 7, 7));
    }
}
