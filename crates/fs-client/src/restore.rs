//! Taking over the cache of a daemon that is no more: what its journal says it held, against what
//! the service says today. [`judge`] decides byte by byte and is a table; [`take_over`] carries
//! that out for every cache file, before anything is mounted.
//!
//! | the journal: these bytes are | the service: the owner is | then they are |
//! |---|---|---|
//! | published at v, and the service's file is older than v | anybody | dirty (the service forgot them) |
//! | published | this node, unflushed | owned |
//! | published and perhaps written again | this node, flushed | published again |
//! | published | anybody else, or flushed | dropped |
//! | being published | this node, unflushed | owned |
//! | being published, or written | this node (else) | dirty |
//! | being published, or written | another, or nobody, unchanged since | dirty |
//! | being published, or written | another, or nobody, changed since (these bytes) | kept aside, but see [`crate::overtaken`]; dirty when its writers live |
//! | not held, an append was under way | this node, unflushed | owned zeros |
//! | not held | this node, unflushed | lost |
//! | not held | this node, flushed | given back |
//! | not held | another, or nobody | dropped |
//!
//! "Published" is also what was published and perhaps written again, where nothing else is said.
//! Under a model whose writes publish, what is dirty is published before anything is mounted
//! (`publish_what_was_begun`): until then only this node would see it.
//!
//! What is owned gets a new version (`renew`): it may have been written again, or a publication of
//! it may not have arrived, and then the copies that other nodes have are not what is here. What
//! is given back gets one too (`detach_anew`): the flush may have taken newer bytes along.
//!
//! What was flushed and perhaps written again past the daemon is attached again where it is this node's
//! still, and owned then: the flush may have been of what was there before.
//!
//! "Not held" is also what the journal says was held and nothing shows that the device has it: what the
//! disk was found to have lost, and after a boot, everything that was not synced. Lost bytes read as EIO and a drain lists them.
//! Owned zeros are bytes of an append that was never answered.

use crate::alone::Alone;
use crate::cache::{self, CacheDir};
use crate::file::CachedFile;
use crate::home::Whereabouts;
use crate::leftover::Leftover;
use crate::node::{Fate, Node};
use crate::overtaken::{Silent, look_again};
use ebb_consistency::{FileView, MapAnswer, Owned, QuietWrites};
use ebb_meta_client::Changes;
use ebb_node_journal::{Found, Held, Image, Kept, Note};
use ebb_types::{ByteRange, Errno, Ino, NodeId, Version};
use rangemap::RangeSet;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Files asked for at once.
const STEP: usize = 128;

/// What becomes of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Owned(Version),
    OwnedZeros(Version),
    Dirty,
    Again,
    Aside,
    Lost,
    GiveBack,
    Drop,
}

/// Who has bytes today.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Today {
    owner: NodeId,
    version: Version,
    flushed: bool,
}

/// The circumstances that are the same for all bytes of a file.
#[derive(Clone, Copy, Debug)]
struct Case {
    me: NodeId,
    rebooted: bool,
    /// Version of the file today.
    file: Version,
    known: Version,
    appending: bool,
    /// Whoever wrote here goes on with this daemon: what is written is theirs, whatever others did.
    heir: bool,
}

fn verdict(held: Option<Held>, today: Today, case: &Case) -> Verdict {
    let mine = today.owner == case.me;
    let trusted = held.filter(|h| (h.durable || !case.rebooted) && !h.damaged);
    match trusted.map(|h| h.kept) {
        Some(Kept::Owned(v) | Kept::Again(v)) if v > case.file => Verdict::Dirty,
        Some(Kept::Owned(_) | Kept::Again(_) | Kept::Attaching) if mine && !today.flushed => {
            Verdict::Owned(today.version)
        }
        Some(Kept::Again(_)) if mine => Verdict::Again,
        Some(Kept::Owned(_)) if mine => Verdict::GiveBack,
        Some(Kept::Owned(_) | Kept::Again(_)) => Verdict::Drop,
        Some(Kept::Attaching | Kept::Written) if mine => Verdict::Dirty,
        Some(Kept::Attaching | Kept::Written) if case.heir => Verdict::Dirty,
        Some(Kept::Attaching | Kept::Written) if today.version <= case.known => Verdict::Dirty,
        Some(Kept::Attaching | Kept::Written) => Verdict::Aside,
        None if mine && today.flushed => Verdict::GiveBack,
        None if mine && case.appending && !case.rebooted => Verdict::OwnedZeros(today.version),
        None if mine => Verdict::Lost,
        None => Verdict::Drop,
    }
}

/// Decides about every byte of a file: sorted, disjoint, without the dropped ones. `changed`: the
/// unowned bytes that changed since the version that the note knows.
pub(crate) fn judge(
    note: Option<&Note>,
    answer: &MapAnswer,
    changed: &[ByteRange],
    me: NodeId,
    rebooted: bool,
    heir: bool,
) -> Vec<(ByteRange, Verdict, Option<Held>)> {
    let case = Case {
        me,
        rebooted,
        file: answer.version,
        known: note.map_or(Version::ZERO, |n| n.known),
        appending: note.is_some_and(|n| n.appending),
        heir,
    };
    let mut out = Vec::new();
    for (range, today) in whole(answer, changed, case.known) {
        let mut at = range.start();
        for (part, held) in note.map(|n| n.held_in(range)).unwrap_or_default() {
            out.push((ByteRange::new(at, part.start()), verdict(None, today, &case), None));
            out.push((part, verdict(Some(held), today, &case), Some(held)));
            at = part.end();
        }
        out.push((ByteRange::new(at, range.end()), verdict(None, today, &case), None));
    }
    out.retain(|(range, verdict, _)| !range.is_empty() && *verdict != Verdict::Drop);
    out
}

/// The answer as segments that cover every offset.
fn whole(answer: &MapAnswer, changed: &[ByteRange], known: Version) -> Vec<(ByteRange, Today)> {
    let changed: RangeSet<u64> =
        changed.iter().filter(|r| !r.is_empty()).map(|r| r.to_std()).collect();
    let nobody = |version| Today { owner: NodeId::NOBODY, version, flushed: false };
    let mut out = Vec::new();
    let unowned = |range: ByteRange, out: &mut Vec<(ByteRange, Today)>| {
        if range.is_empty() {
            return;
        }
        let mut at = range.start();
        for newer in changed.overlapping(range.to_std()) {
            let newer = ByteRange::new(newer.start, newer.end).intersect(range);
            out.push((ByteRange::new(at, newer.start()), nobody(known)));
            out.push((newer, nobody(known.next())));
            at = newer.end();
        }
        out.push((ByteRange::new(at, range.end()), nobody(known)));
    };
    let mut at = 0;
    for Owned { range, node, version, flushed } in answer.ranges.iter().copied() {
        unowned(ByteRange::new(at, range.start()), &mut out);
        out.push((range, Today { owner: node, version, flushed }));
        at = range.end();
    }
    unowned(ByteRange::from(at), &mut out);
    out
}

/// What came of taking a cache over.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    /// What this node holds now.
    pub image: Image,
    /// Noted files that the service does not know although it should: it lost its state.
    pub unknown: Vec<Ino>,
    /// Files and bytes that are here again.
    pub files: u64,
    pub bytes: u64,
    /// Of these, what nobody had been told of.
    pub untold: u64,
    /// Published bytes that are not on this device (a power loss before they were synced).
    pub lost: Vec<(String, u64)>,
    /// Unpublished bytes that others wrote over meanwhile.
    pub aside: Vec<(String, u64)>,
    /// Nodes that did not answer when they were asked what they have.
    silent: Silent,
}

/// Programs that had files passed through by the dead daemon write to none of them any more; `left` has what
/// they wrote before that. `noted`: of each write there is a note.
pub(crate) fn part_from_writers(
    cache: &CacheDir,
    left: &mut Leftover,
    noted: bool,
) -> io::Result<()> {
    if left.found().is_none() {
        return Ok(());
    }
    cache.watch_old_again()?;
    for ino in cache.inos()? {
        cache.part_from_writers(ino, |len| left.held_of(ino, len, noted))?;
    }
    Ok(())
}

/// Puts a node's files together again. `same_job`: the service is the one (or has the journal of
/// the one) that gave the inodes their numbers, so what it does not know was deleted. `open`: what
/// the applications of the dead daemon have open, when they live.
pub(crate) async fn take_over(
    node: &Arc<Node>,
    found: &Found,
    same_job: bool,
    open: Option<&HashSet<Ino>>,
) -> Result<Restored, Errno> {
    let meta = node.meta.beside_seats();
    let mut done = Restored::default();
    done.image.life.clone_from(&found.image.life);
    if !same_job {
        done.unknown = found.image.unpublished().map(|(ino, _)| ino).collect();
    }
    let mut inos = node.cache.inos()?;
    inos.extend(found.image.files().map(|(ino, _)| ino));
    inos.extend(node.replicas.held.files_adopting());
    inos.sort_unstable();
    inos.dedup();
    // First what others may be waiting to be told of: they may have to tell of the rest.
    let untold = |ino: &Ino| found.image.file(*ino).is_some_and(Note::is_untold);
    let (first, rest): (Vec<Ino>, Vec<Ino>) = inos.into_iter().partition(untold);
    for step in first.chunks(STEP).chain(rest.chunks(STEP)) {
        let mut asked = tokio::task::JoinSet::new();
        for ino in step.iter().copied() {
            if done.unknown.contains(&ino) {
                continue;
            }
            let known = found.image.file(ino).map_or(Version::ZERO, |n| n.known);
            let meta = meta.clone();
            asked.spawn(async move { (ino, meta.query_changes(ino, known).await) });
        }
        while let Some(answer) = asked.join_next().await {
            let (ino, answer) = answer.map_err(|_| Errno::EIO)?;
            let note = found.image.file(ino);
            match answer {
                // Another job's numbers may mean other files: nothing in this cache is theirs.
                Ok(_) if !same_job => node.cache.remove(ino)?,
                Ok(answer) => {
                    let taken =
                        one(node, ino, note, &answer, found.rebooted, open, &mut done).await;
                    if let Err(e) = taken {
                        unless_deleted(node, ino, note, e, &mut done).await?;
                    }
                }
                Err(e) => unless_deleted(node, ino, note, e, &mut done).await?,
            }
        }
    }
    Ok(done)
}

/// A file may be gone, also between two questions about it: with the dead daemon went what held
/// the files that were open and had no name any more. What is nowhere else goes only when that is
/// proven.
async fn unless_deleted(
    node: &Node,
    ino: Ino,
    note: Option<&Note>,
    e: Errno,
    done: &mut Restored,
) -> Result<(), Errno> {
    match e {
        Errno::ENOENT | Errno::ESTALE | Errno::EISDIR | Errno::EINVAL => {
            let precious = note.is_some_and(|n| !n.is_empty() && !n.nameless);
            if precious && node.fate(ino).await? == Fate::Kept {
                tracing::warn!(%ino, "not known to the service, and not deleted");
                done.unknown.push(ino);
                return Ok(());
            }
            tracing::debug!(%ino, "deleted meanwhile");
            node.cache.remove(ino).map_err(Errno::from)
        }
        e => Err(e),
    }
}

/// What became this node's when it was given up, and is not in the cache file, was never written:
/// the service takes it back when it hears what was.
fn without_unwritten(
    judged: Vec<(ByteRange, Verdict, Option<Held>)>,
    window: ByteRange,
) -> Vec<(ByteRange, Verdict, Option<Held>)> {
    let mut out = Vec::with_capacity(judged.len());
    for (range, verdict, held) in judged {
        if verdict != Verdict::Lost {
            out.push((range, verdict, held));
            continue;
        }
        let before =
            ByteRange::new(range.start(), range.end().min(window.start().max(range.start())));
        let after = ByteRange::new(range.start().max(window.end().min(range.end())), range.end());
        let rest = [before, after].into_iter().filter(|r| !r.is_empty());
        out.extend(rest.map(|r| (r, verdict, held)));
    }
    out
}

fn ranges_of<'a>(
    judged: &'a [(ByteRange, Verdict, Option<Held>)],
    wanted: impl Fn(Verdict) -> bool + 'a,
) -> Vec<ByteRange> {
    judged.iter().filter(|(_, v, _)| wanted(*v)).map(|(r, ..)| *r).collect()
}

/// Dirty bytes that are only guessed to be written.
fn guessed(judged: &[(ByteRange, Verdict, Option<Held>)]) -> Vec<ByteRange> {
    let some = judged
        .iter()
        .filter(|(_, v, held)| *v == Verdict::Dirty && held.is_some_and(|h| h.guessed));
    some.map(|(r, ..)| *r).collect()
}

fn sum(ranges: &[ByteRange]) -> u64 {
    ranges.iter().map(|r| r.len()).sum()
}

/// One file.
async fn one(
    node: &Arc<Node>,
    ino: Ino,
    note: Option<&Note>,
    since: &Changes,
    rebooted: bool,
    open: Option<&HashSet<Ino>>,
    done: &mut Restored,
) -> Result<(), Errno> {
    let meta = node.meta.beside_seats();
    let place = meta.describe(ino).await?;
    let nameless = place.path.is_empty();
    if nameless && !open.is_some_and(|open| open.contains(&ino)) {
        return node.cache.remove(ino).map_err(Errno::from);
    }
    let label = String::from_utf8_lossy(&place.path).into_owned();
    let mut note = note.cloned();
    let missing = note.as_mut().map_or(Ok(0), |n| node.cache.len(ino).map(|len| n.trim(len)))?;
    if missing > 0 {
        tracing::error!(path = label, bytes = missing, "the cache file is shorter than it was");
        done.lost.push((label.clone(), missing));
    }
    let window = note.as_ref().and_then(|n| n.window);
    let mut since = Cow::Borrowed(since);
    if let Some(note) = note.as_ref().filter(|n| n.window.is_some() && rebooted) {
        // Nothing shows that what is in the window is what was written there, and nobody was told of it.
        tracing::warn!(
            path = label,
            "written without a word when the node went down: what was not synced is lost"
        );
        meta.tell_quiet(ino).await?;
        since = Cow::Owned(meta.query_changes(ino, note.known).await?);
    }
    // Of a file that sat here nobody else has changed a byte: the cache file is what it is.
    let seat = note.as_ref().map_or(0, |n| n.seat);
    let seated = seat != 0 && ends_with(node, ino, seat, !rebooted).await?;
    if seat != 0 && rebooted {
        tracing::warn!(
            path = label,
            "written past the daemon when the node went down: what was not published is lost"
        );
    }
    let (answer, changed) = (&since.map, &since.changed);
    node.resume_adoption(ino, &place.path, &mut note, answer).await?;
    let heir = open.is_some() || seated;
    let mut judged = judge(note.as_ref(), answer, changed, node.me, rebooted, heir);
    let here = ranges_of(&judged, |v| matches!(v, Verdict::Owned(_)));
    let again = ranges_of(&judged, |v| v == Verdict::Again);
    let mut renewed = match here.is_empty() {
        true => None,
        false => Some(meta.renew(ino, &here).await?),
    };
    if !again.is_empty() {
        renewed = Some(meta.attach_again(ino, &again).await?);
    }
    let answer = renewed.as_ref().unwrap_or(answer);
    if renewed.is_some() {
        judged = judge(note.as_ref(), answer, changed, node.me, rebooted, heir);
    }
    if judged.iter().any(|(_, v, _)| *v == Verdict::Again) {
        tracing::error!(path = label, "own bytes were not published again");
        return Err(Errno::EPROTO);
    }
    if let Some(window) = window.filter(|_| !rebooted) {
        judged = without_unwritten(judged, window);
    }
    let judged = look_again(node, ino, judged, answer, &since.guessed, &mut done.silent).await?;
    let back = ranges_of(&judged, |v| v == Verdict::GiveBack);
    let given_back = match back.is_empty() {
        true => None,
        false => {
            // The daemon before this one may not have come to noting it.
            if let Some(note) = note.as_mut() {
                back.iter().for_each(|range| note.flush(*range, answer.version));
            }
            meta.detach_anew(ino, &back).await?;
            Some(meta.query_whole(ino).await?)
        }
    };
    let answer = given_back.as_ref().unwrap_or(answer);
    let lost = ranges_of(&judged, |v| v == Verdict::Lost);
    if !lost.is_empty() {
        tracing::error!(path = label, bytes = sum(&lost), "published bytes are lost");
        done.lost.push((label.clone(), sum(&lost)));
    }
    tracing::debug!(path = label, version = ?answer.version, ?judged, "judged");
    let aside = ranges_of(&judged, |v| v == Verdict::Aside);
    if !aside.is_empty() {
        tracing::warn!(path = label, bytes = sum(&aside), "unpublished bytes, overwritten since");
        keep_aside(node, ino, &aside)?;
        done.aside.push((label.clone(), sum(&aside)));
    }
    let owned: Vec<(ByteRange, Version)> = judged
        .iter()
        .filter_map(|(r, v, _)| match v {
            Verdict::Owned(version) | Verdict::OwnedZeros(version) => Some((*r, *version)),
            _ => None,
        })
        .collect();
    let dirty = ranges_of(&judged, |v| v == Verdict::Dirty);
    if owned.is_empty() && dirty.is_empty() {
        if window.is_some() {
            meta.tell_quiet(ino).await?;
        }
        if seated {
            ends_with(node, ino, seat, false).await?;
        }
        let left = note.filter(|_| !nameless).map(|note| of_nothing_held(note, place.path));
        if let Some(left) = left.filter(|n| n.has_bytes() || n.overrides) {
            done.image.insert(ino, left);
        }
        return node.cache.remove(ino).map_err(Errno::from);
    }
    let kept = ranges_of(&judged, |v| matches!(v, Verdict::Owned(_) | Verdict::Dirty));
    let end = owned.iter().map(|(r, _)| r.end()).max().unwrap_or(0);
    clear_the_rest(&node.cache.file(ino)?, &kept, end)?;
    done.files += 1;
    done.bytes += sum(&kept);
    done.untold += sum(&dirty);
    let attr = meta.getattr(ino).await?;
    let file = CachedFile::new(ino, node.me, node.rules.of(&place.path, &place.model));
    {
        let mut state = file.state.write();
        state.view = FileView::restored(node.me, answer, &owned, &dirty);
        state.view.guess(&guessed(&judged));
        state.path.clone_from(&place.path);
        if let Some(note) = &note {
            state.home = Whereabouts::restored(note.header.home.clone());
            state.under.clone_from(&note.header.under);
            state.alone = Alone::noted(note.alone);
            state.mtime = (!dirty.is_empty()).then_some(note.header.mtime);
        }
        if let Some(note) = note.as_ref().filter(|n| n.window.is_some()) {
            state.quiet = QuietWrites::inherited(&dirty, note.known);
        }
        state.attr = Some(attr);
        state.orphan = nameless;
    }
    let file = Arc::new(file);
    file.goes_on(&node.cache)?;
    node.adopt(Arc::clone(&file));
    if seated {
        {
            let _turn = file.turn.lock().await;
            node.attach(&file, ByteRange::ALL, false, false).await?;
        }
        ends_with(node, ino, seat, false).await?;
    } else if window.is_some() {
        tell_window(node, &file, note.as_mut()).await;
    }
    if let Some(mut note) = note {
        note.seat = 0;
        note.header.path = place.path;
        note.known = note.known.max(answer.version);
        note.appending = false;
        note.nameless = nameless;
        note.set_held(held_now(&judged, &file.state.read().view));
        done.image.insert(ino, note);
    }
    Ok(())
}

/// Nothing of the file is held any more, but others may have older bytes of what this node had flushed, or
/// some of what it had cut.
fn of_nothing_held(mut note: Note, path: Vec<u8>) -> Note {
    note.set_held([]);
    (note.header.path, note.window, note.seat, note.appending) = (path, None, 0, false);
    note
}

/// What is here after that, for the node journal: some of what was dirty may be published by now. As long as
/// it counted as unpublished, a daemon after this one would publish it over what others write from now on.
fn held_now(
    judged: &[(ByteRange, Verdict, Option<Held>)],
    view: &FileView,
) -> Vec<(ByteRange, Held)> {
    let mut now = Vec::with_capacity(judged.len());
    for (range, verdict, held) in judged {
        let held = held.unwrap_or(Held::new(Kept::Written));
        match verdict {
            Verdict::Owned(v) | Verdict::OwnedZeros(v) => {
                now.push((*range, Held { kept: Kept::Owned(*v), ..held }));
            }
            Verdict::Dirty => {
                let written = view.unattached(*range).into_iter().map(|r| (r, Kept::Written));
                let owned = view.unflushed(*range).into_iter().map(|(r, v)| (r, Kept::Owned(v)));
                let mut parts: Vec<_> = written.chain(owned).collect();
                parts.sort_unstable_by_key(|(r, _)| *r);
                now.extend(parts.into_iter().map(|(r, kept)| (r, Held { kept, ..held })));
            }
            _ => {}
        }
    }
    now
}

/// What was written quietly is told at once. Who waits for it may be taking a cache over, too, and have to
/// tell what this node is going to ask for next: neither may be told only when all is done.
async fn tell_window(node: &Arc<Node>, file: &Arc<CachedFile>, note: Option<&mut Note>) {
    let _turn = file.turn.lock().await;
    match node.end_quiet_in_turn(file).await {
        Ok(()) => note.into_iter().for_each(|n| n.window = None),
        // It is tried again before anything is mounted, and after that.
        Err(error) => tracing::warn!(ino = %file.ino, %error, "cannot be told yet"),
    }
}

/// Tells the service that a seat goes on, or that it ends; whether it was one.
async fn ends_with(node: &Node, ino: Ino, seat: u64, on: bool) -> Result<bool, Errno> {
    match node.meta.published(ino, seat, 0, on).await {
        Ok(()) => Ok(on),
        Err(Errno::ESTALE) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Bytes that are neither published nor right any more: nobody reads them, but they were
/// written here, and only their writer can say that they are worthless.
fn keep_aside(node: &Node, ino: Ino, ranges: &[ByteRange]) -> io::Result<()> {
    let dir = node.cache.aside();
    std::fs::create_dir_all(&dir)?;
    let name = format!("{:016x}-{}", ino.0, std::process::id());
    let to = File::create(dir.join(name))?;
    cache::copy(&node.cache.file(ino)?, &to, ranges)
}

/// Everything in a cache file but `kept` becomes a hole, up to at least `end`.
fn clear_the_rest(file: &File, kept: &[ByteRange], end: u64) -> io::Result<()> {
    let len = file.metadata()?.len();
    let mut at = 0;
    for range in kept {
        cache::punch(file, ByteRange::new(at, range.start().min(len)))?;
        at = range.end();
    }
    let needed = kept.last().map_or(0, |r| r.end()).max(end);
    if len != needed {
        file.set_len(needed)?;
    }
    if at < needed.min(len) {
        cache::punch(file, ByteRange::new(at, needed))?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "restore_tests.rs"]
mod tests;
