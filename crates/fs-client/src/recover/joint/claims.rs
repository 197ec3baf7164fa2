//! What a node's journal and cache say of a file, as a statement, and where its bytes are read from.

use super::statement::{Claim, Fate, Key, Kind, Statement};
use crate::cache::CacheDir;
use crate::passing::written_runs;
use crate::recover::places::Places;
use ebb_node_journal::{Held, Kept, Note};
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
    let nothing_held = had.is_empty();
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
    // Whoever cut the file after the flush need not have noted it: the file itself says how far it goes.
    let len = home.as_ref().map(|home| home.metadata().map(|meta| meta.len())).transpose()?;
    let mut flushed = Vec::new();
    for (range, version) in note.flushed() {
        let there = range.intersect(ByteRange::new(0, len.unwrap_or(u64::MAX)));
        for gap in claims.gaps(there).collect::<Vec<_>>() {
            let fate = if home.is_some() { Fate::Pending } else { Fate::Lost };
            claims.insert(gap, claim(version, Kind::Published, fate));
            flushed.push(gap);
        }
    }
    let mut statement = Statement { claims, ..Statement::of(node, &note) };
    let set_here = note.cuts.iter().any(|(set, _)| *set == statement.size);
    if let Some(len) = len.filter(|_| nothing_held && !set_here) {
        statement.size = statement.size.min(len);
    }
    Ok((statement, Sources { cache: file, flushed, home }))
}

fn version_of(held: &Held, note: &Note) -> (Version, Kind) {
    match held.kept {
        Kept::Owned(version) | Kept::Again(version) => (version, Kind::Published),
        Kept::Written | Kept::Attaching => (note.known, Kind::Written),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_node_journal::{Header, Home};
    use ebb_types::Time;

    fn note(home: &std::path::Path, size: u64) -> Note {
        let ino = std::fs::metadata(home).unwrap().ino();
        let time = Time { sec: 1, nsec: 0 };
        Note::new(Header {
            path: b"f".to_vec(),
            perm: 0o644,
            uid: 0,
            gid: 0,
            atime: time,
            mtime: time,
            size,
            home: Some(Home { path: b"f".to_vec(), ino, seen: None, changing: false }),
            under: None,
            shared: true,
        })
    }

    /// Another node was the only one that used the file when it cut it, and noted nothing of that.
    #[test]
    fn what_was_flushed_ends_where_the_file_was_cut_since() {
        let backing = tempfile::tempdir().unwrap();
        let cache = tempfile::tempdir().unwrap();
        let home = backing.path().join("f");
        std::fs::write(&home, [1; 80]).unwrap();
        let cache = CacheDir::open(cache.path()).unwrap();
        let places = Places::open(backing.path()).unwrap();
        let said = |note: &Note| {
            let (said, sources) = claims("a", Ino(7), note, false, &cache, &places).unwrap();
            let end = said.claims.iter().map(|(r, _)| r.end()).max();
            assert_eq!(sources.flushed().iter().map(|r| r.end()).max(), end);
            (said.size, end)
        };
        let mut note = note(&home, 550);
        let ranges = [ByteRange::new(60, 100), ByteRange::new(360, 410)];
        note.set_held(ranges.map(|range| (range, Held::new(Kept::Owned(Version(3))))));
        ranges.iter().for_each(|range| note.flush(*range, Version(3)));
        assert_eq!(said(&note), (80, Some(80)));
        // It was this node that made it so long, of zeros.
        note.cuts.push((550, Version(4)));
        assert_eq!(said(&note), (550, Some(80)));
    }
}
