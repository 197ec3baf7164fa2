//! What an earlier daemon left in a cache directory, as its journal tells it: whose it is, whether
//! a new daemon may take it over, and what to tell a user whose daemon is dead. Starts nothing
//! and changes nothing but in [`clear`].

use crate::cache::CacheDir;
use crate::config::MountConfig;
use crate::daemon::RunError;
use ebb_namespace::Missing;
use ebb_node_journal::{self as journal, Found, Held, Kept, Life, Note};
use ebb_types::units::Size;
use ebb_types::{ByteRange, Facts, FileKind, Ino, Time};
use ebb_wire::pb::Welcome;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What is left of an earlier daemon.
#[derive(Debug, Default)]
pub struct Leftover(Option<Found>);

impl Leftover {
    /// The journal, when there is one.
    #[must_use]
    pub fn found(&self) -> Option<&Found> {
        self.0.as_ref()
    }

    /// Goes on with what the dead daemon had pushed to its journal and perhaps not written.
    pub(crate) fn go_on(&mut self, records: &[journal::Record]) {
        if let Some(found) = &mut self.0 {
            records.iter().for_each(|record| found.image.apply(record));
        }
    }

    /// The state of its service says this.
    pub(crate) fn hear(&mut self, facts: &Facts) {
        if let Some(found) = &mut self.0 {
            found.image.book.hear(facts);
            found.image.lives.hear(facts.lives);
        }
    }

    /// True when no bytes are held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.found().is_none_or(|f| f.image.unpublished().next().is_none())
    }

    /// True when a recovery without the service has nothing to do, nor to say to those of others.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.found().is_none_or(|f| {
            let others = f.image.lives.has_others();
            f.image.sayable().next().is_none() && f.image.book.is_silent() && !others
        })
    }

    /// Names that this node made or changed and that the backing has not, other than those of files of
    /// which bytes are held: paths and types.
    #[must_use]
    pub fn names(&self) -> Vec<(String, FileKind)> {
        let Some(found) = self.found() else { return Vec::new() };
        let held = |ino| found.image.file(ino).is_some_and(|n| n.is_unpublished());
        let missing = found.image.book.missing().0.into_iter().filter(|m| !held(m.ino));
        let path = |m: &Missing<'_>| m.path.iter().map(ToString::to_string).collect::<Vec<_>>();
        missing.map(|m| (path(&m).join("/"), m.shape.kind)).collect()
    }

    /// True when bytes of files are held that have no name any more: a power cut may have brought the
    /// names back.
    #[must_use]
    pub fn has_nameless(&self) -> bool {
        let holds = |note: &Note| note.nameless && !note.is_empty();
        self.found().is_some_and(|f| f.image.files().any(|(_, note)| holds(note)))
    }

    /// True when the daemon may have been about to write without a note.
    #[must_use]
    pub fn has_untold(&self) -> bool {
        self.found().is_some_and(|f| f.image.files().any(|(_, note)| note.is_untold()))
    }

    /// What the cache files have where the daemon wrote without notes was written. After a boot
    /// nothing shows that it is what was written.
    fn with_untold(mut self, cache: &Path) -> Leftover {
        if let Some(found) = self.0.as_mut().filter(|f| !f.rebooted) {
            let untold = found.image.files().filter(|(_, note)| note.is_untold());
            for (ino, mut note) in untold.map(|(i, n)| (i, n.clone())).collect::<Vec<_>>() {
                note.fill_untold(crate::cache::len_in(cache, ino));
                found.image.insert(ino, note);
            }
        }
        self
    }

    /// Whoever could write past the dead daemon until now cannot any more, or it can be told by [`unheard`].
    pub fn part_from_writers(&mut self, cache: &Path) -> io::Result<()> {
        match self.0 {
            Some(_) => crate::restore::part_from_writers(&CacheDir::open(cache)?, self, false),
            None => Ok(()),
        }
    }

    /// What is held of a file whose cache file has this length by now. `noted`: there is a note of all of it.
    pub(crate) fn held_of(&mut self, ino: Ino, len: u64, noted: bool) -> Vec<ByteRange> {
        let Some(found) = &mut self.0 else { return Vec::new() };
        let Some(mut note) = found.image.file(ino).cloned() else { return Vec::new() };
        if note.is_untold() && !noted && !found.rebooted {
            note.fill_untold(len);
            found.image.insert(ino, note.clone());
        }
        note.held().map(|(range, _)| range).collect()
    }

    /// The name of its node.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        Some(&self.found()?.image.life.as_ref()?.node)
    }

    /// The configuration of that daemon; `None` also when another version of the program wrote it.
    #[must_use]
    pub fn config(&self) -> Option<MountConfig> {
        let life = self.found()?.image.life.as_ref()?;
        serde_json::from_str(&life.config).ok()
    }

    /// True when the service is of the same job, so that inode numbers mean the same.
    #[must_use]
    pub fn is_of_job(&self, job: u64) -> bool {
        let life = self.found().and_then(|f| f.image.life.as_ref());
        job != 0 && life.is_some_and(|l| l.job == job)
    }

    /// The files of which bytes are held.
    #[must_use]
    pub fn files(&self) -> Vec<LeftFile> {
        let found = self.found();
        let noted = found.into_iter().flat_map(|f| f.image.unpublished());
        noted.map(|(i, n)| left_file(i, n)).collect()
    }
}

/// A file of which the cache holds bytes that are not on the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftFile {
    /// Its inode number in the job.
    pub ino: Ino,
    /// Where it was in the mount.
    pub path: String,
    /// Bytes that are published (or were being published).
    pub published: u64,
    /// Bytes that were written and never published.
    pub written: u64,
    /// The ranges, neighbours as one.
    pub ranges: Vec<ByteRange>,
    /// Other nodes had bytes of it, too.
    pub shared: bool,
    /// Bytes that were brought to the backing, where the file has no name yet.
    pub in_part: u64,
}

impl LeftFile {
    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.published + self.written
    }
}

fn left_file(ino: Ino, note: &Note) -> LeftFile {
    let mut file = LeftFile {
        ino,
        path: label(ino, note),
        published: 0,
        written: 0,
        ranges: Vec::new(),
        shared: note.header.shared,
        in_part: 0,
    };
    if note.header.home.as_ref().is_some_and(journal::Home::is_part) {
        file.in_part = note.flushed().map(|(r, _)| r.len()).sum();
    }
    for (range, Held { kept, .. }) in note.held() {
        match kept {
            Kept::Written => file.written += range.len(),
            Kept::Attaching | Kept::Owned(_) | Kept::Again(_) => file.published += range.len(),
        }
        match file.ranges.last_mut() {
            Some(last) if last.end() == range.start() => {
                *last = ByteRange::new(last.start(), range.end());
            }
            _ => file.ranges.push(range),
        }
    }
    file
}

pub(crate) fn label(ino: Ino, note: &Note) -> String {
    if note.header.path.is_empty() {
        return format!("inode {ino}");
    }
    String::from_utf8_lossy(&note.header.path).into_owned()
}

/// Reads what is left in a cache directory.
pub fn read(cache: &Path) -> Result<Leftover, RunError> {
    read_noted(cache).map(|left| left.with_untold(cache))
}

/// The same as far as it is noted: whoever goes on for the dead daemon has heard of every write.
pub(crate) fn read_noted(cache: &Path) -> Result<Leftover, RunError> {
    journal::read(cache, false).map(Leftover).map_err(|e| {
        let cache = cache.display();
        RunError::Config(format!(
            "{e}: what this cache holds is not known for certain; \
             `ebb recover {cache} --backing BACKING --force` brings what is known to the backing"
        ))
    })
}

/// The same past a damaged record, for those who know what they do.
pub fn read_past_damage(cache: &Path) -> Result<Leftover, RunError> {
    let left = journal::read(cache, true).map_err(|e| RunError::Config(e.to_string()))?;
    Ok(Leftover(left).with_untold(cache))
}

/// What is left for a daemon of this configuration: an error when it may not take it over. To be
/// asked before a service is started: it must not begin a new job over the bytes of an old one.
pub fn of(config: &MountConfig) -> Result<Leftover, RunError> {
    let left = read(&config.cache)?;
    let holds = !left.is_empty() || !left.names().is_empty();
    let Some(found) = left.found().filter(|_| holds) else { return Ok(left) };
    let cache = config.cache.display();
    let held = backing_of(found);
    let mine = std::fs::metadata(&config.backing).map(|m| m.ino()).unwrap_or(0);
    if held != 0 && mine != 0 && held != mine {
        return Err(RunError::Config(format!(
            "cache {cache}: holds {} that belong to another backing directory than {} \
             (`ebb recover {cache} --backing BACKING` drains them)",
            amount(&left),
            config.backing.display()
        )));
    }
    if config.meta.is_none() && !config.state.join("journal").exists() {
        return Err(RunError::Config(orphaned_text(config, found)));
    }
    Ok(left)
}

fn backing_of(found: &Found) -> u64 {
    found.image.life.as_ref().map_or(0, |l| l.backing_ino)
}

/// So many bytes of so many files, and so many names.
#[must_use]
pub fn amount(left: &Leftover) -> String {
    let (files, names) = (left.files(), left.names().len());
    let bytes = files.iter().map(LeftFile::bytes).sum();
    let text = format!("{} of {} file(s)", Size(bytes), files.len());
    if names == 0 { text } else { format!("{text} and {names} name(s)") }
}

/// Why a cache is not taken over by a service that does not know its files.
pub(crate) fn orphaned_text(config: &MountConfig, found: &Found) -> String {
    let cache = config.cache.display();
    let amount = amount(&Leftover(Some(found.clone())));
    let whose = match &config.meta {
        Some(address) => format!("the metadata service {address} does not know them"),
        None => format!("the journal of its metadata service ({}) is gone", config.state.display()),
    };
    format!(
        "cache {cache}: holds {amount} that are not on the backing, and {whose}: run \
         `ebb recover {cache} --backing {}` first",
        config.backing.display()
    )
}

/// What programs wrote past a dead daemon after its cache was parted from them: where that is.
pub fn unheard(cache: &Path) -> io::Result<Vec<PathBuf>> {
    let cache = CacheDir::at(cache.join("data"));
    cache.watch_old_again()?;
    let found = cache.unheard().into_iter().map(|unheard| unheard.kept).collect();
    cache.forget_old();
    Ok(found)
}

/// The life that begins now.
pub(crate) fn life(config: &MountConfig, welcome: &Welcome) -> Life {
    Life {
        node: config.node.clone(),
        config: serde_json::to_string(config).unwrap_or_default(),
        boot: journal::boot_id(),
        job: welcome.job,
        backing_ino: welcome.backing_dev_ino,
        began: Time::now(),
    }
}

/// The journal of a cache of which everything is on the backing, while the rest is taken away.
const DONE: &str = "journal.done";

/// Everything is on the backing: takes away what a cache directory holds. Killed in between, it is
/// [gone on with](finish_clearing): no files are left of which nothing is known.
pub fn clear(cache: &Path) -> io::Result<()> {
    match std::fs::rename(journal::path_in(cache), cache.join(DONE)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let data = cache.join("data");
    let removed = match std::fs::remove_dir_all(&data) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            crate::parting::thaw_all(&data)?;
            std::fs::remove_dir_all(&data)
        }
        other => other,
    };
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    match std::fs::remove_file(cache.join(DONE)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Clears a cache of which the clearing was begun, and nothing else.
pub fn finish_clearing(cache: &Path) -> io::Result<()> {
    let begun = cache.join(DONE).exists() && !journal::path_in(cache).exists();
    if begun { clear(cache) } else { Ok(()) }
}
