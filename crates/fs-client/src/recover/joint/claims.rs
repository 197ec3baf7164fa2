//! What a node's journal and cache say of a file, as a statement, and where its bytes are read from.

use super::statement::{Claim, Fate, Key, Kind, Statement};
use crate::cache::CacheDir;
use crate::journal::{Held, Kept, Note};
use crate::passing::written_runs;
use crate::recover::places::Places;
use ebb_types::{ByteRange, Extents, Ino, Version};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

/// Where a node has its bytes.
pub(super) struct Sources {
    cache: Option<File>,
    /// What this node had flushed already, as the journal knows it: `home`.
    flushed: Vec<ByteRange>,
    home: Option<File>,
}

impl Sources {
    /// Reads claimed bytes. What is verified about bytes of a cache is verified here.
    pub fn read(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let range = ByteRange::at(at, buf.len() as u64);
        if let Some(cache) = &self.cache {
            crate::cache::read_padded(cache, buf, at)?;
        }
        for part in self.flushed.iter().map(|r| r.intersect(range)).filter(|r| !r.is_empty()) {
            let home = self.home.as_ref().ok_or(io::ErrorKind::NotFound)?;
            let from = (part.start() - at) as usize;
            home.read_exact_at(&mut buf[from..from + part.len() as usize], part.start())?;
        }
        Ok(())
    }

    /// True when what was flushed is in the file of that number.
    pub fn is_home(&self, ino: u64) -> bool {
        let meta = self.home.as_ref().and_then(|home| home.metadata().ok());
        meta.is_some_and(|meta| meta.ino() == ino)
    }

    /// What this node had flushed already, as far as it is claimed so.
    pub fn flushed(&self) -> &[ByteRange] {
        &self.flushed
    }

    /// Pieces that come from one source each, and of which a buffer can hold one.
    pub fn pieces(&self, range: ByteRange, most: u64) -> Vec<ByteRange> {
        ebb_types::in_steps(&[range], most, 1).into_iter().flatten().collect()
    }
}

/// The statement of a node, and what is left of it when the power was lost in between.
pub(super) fn claims(
    node: &str,
    ino: Ino,
    note: &Note,
    rebooted: bool,
    cache: &CacheDir,
    places: &Places,
) -> io::Result<(Statement, Sources)> {
    let mut note = note.clone();
    let had: Vec<_> = note.held().collect();
    note.trim(cache.len(ino)?);
    let file = if note.is_empty() { None } else { Some(cache.read_only(ino)?) };
    // An error of write-back that nobody was told of.
    file.as_ref().map_or(Ok(()), crate::medium::told)?;
    let mut claims: Extents<Claim> = Extents::new();
    let claim = |version, kind, fate| Claim { key: Key { version, kind }, fate };
    // Nothing is in a cache file that is shorter than it was.
    for (range, held) in had {
        claims.insert(
            range,
            claim(version_of(&held, &note).0, version_of(&held, &note).1, Fate::Lost),
        );
    }
    for (range, held) in note.held().filter(|(_, h)| (h.durable || !rebooted) && !h.damaged) {
        let (version, kind) = version_of(&held, &note);
        let exact = match (&file, held.guessed) {
            (Some(file), true) => written_runs(file, &[range])?,
            _ => vec![range],
        };
        claims.insert(range, claim(Version::ZERO, Kind::Zeros, Fate::Pending));
        exact.into_iter().for_each(|r| claims.insert(r, claim(version, kind, Fate::Pending)));
    }
    let home = match &note.header.home {
        Some(home) => places.home(home, &note.header.path)?.map(|(_, file)| file),
        None => None,
    };
    let mut flushed = Vec::new();
    for (range, version) in note.flushed() {
        for gap in claims.gaps(range).collect::<Vec<_>>() {
            let fate = if home.is_some() { Fate::Pending } else { Fate::Lost };
            claims.insert(gap, claim(version, Kind::Published, fate));
            flushed.push(gap);
        }
    }
    let statement = Statement { claims, ..Statement::of(node, &note) };
    Ok((statement, Sources { cache: file, flushed, home }))
}

fn version_of(held: &Held, note: &Note) -> (Version, Kind) {
    match held.kept {
        Kept::Owned(version) | Kept::Again(version) => (version, Kind::Published),
        Kept::Written | Kept::Attaching => (note.known, Kind::Written),
    }
}
