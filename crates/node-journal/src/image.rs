//! What the cache of a node holds that the backing does not: records of what happened, and the
//! image that they add up to. Pure; how records get to disk is in [`crate::journal`].
//!
//! The image of a file is kept only while something of it is not on the backing.

use super::note::{Note, apply_to};
use super::record::{Held, Life, Record};
use ebb_namespace::Book;
use ebb_types::{ByteRange, Ino, Lives, Subjects};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// All that a cache holds and the backing does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The daemon that wrote last.
    pub life: Option<Life>,
    /// The lives of nodes that this cache answers for.
    pub lives: Lives,
    files: BTreeMap<Ino, Note>,
    /// Which files have a component of that name in their path.
    names: HashMap<Vec<u8>, BTreeSet<Ino>>,
    /// What is known of names that the backing lacks.
    pub book: Book,
    /// Changes of names that were asked for, and of which it is not known what came of them.
    pub asked: BTreeMap<u64, Subjects>,
}

impl Image {
    /// The files, by inode number.
    pub fn files(&self) -> impl Iterator<Item = (Ino, &Note)> {
        self.files.iter().map(|(i, n)| (*i, n))
    }

    /// One file.
    #[must_use]
    pub fn file(&self, ino: Ino) -> Option<&Note> {
        self.files.get(&ino)
    }

    /// Files of which a recovery without the service has something to say: also of bytes that are
    /// under their name already, so that others do not write older ones over them; and of what was cut.
    pub fn sayable(&self) -> impl Iterator<Item = (Ino, &Note)> {
        self.files().filter(|(_, n)| !n.nameless && (n.has_bytes() || n.overrides))
    }

    /// Files of which bytes are not under their name on the backing.
    pub fn unpublished(&self) -> impl Iterator<Item = (Ino, &Note)> {
        self.files().filter(|(_, n)| n.is_unpublished())
    }

    /// Files of which bytes are held that belong on the backing.
    pub fn unflushed(&self) -> impl Iterator<Item = (Ino, &Note)> {
        self.files().filter(|(_, n)| !n.is_empty() && !n.nameless)
    }

    /// Files that may be at, or below, a thing of this name.
    #[must_use]
    pub fn named(&self, name: &[u8]) -> Vec<Ino> {
        self.names.get(name).map(|s| s.iter().copied().collect()).unwrap_or_default()
    }

    /// Puts a whole file in.
    pub fn insert(&mut self, ino: Ino, note: Note) {
        self.remove(ino);
        for part in components(&note.header.path) {
            self.names.entry(part.to_vec()).or_default().insert(ino);
        }
        self.files.insert(ino, note);
    }

    /// Forgets a file.
    pub fn remove(&mut self, ino: Ino) -> Option<Note> {
        let note = self.files.remove(&ino)?;
        for part in components(&note.header.path) {
            if let Some(set) = self.names.get_mut(part) {
                set.remove(&ino);
                if set.is_empty() {
                    self.names.remove(part);
                }
            }
        }
        Some(note)
    }

    /// Makes a record true. One about a file that was not introduced is about nothing.
    pub fn apply(&mut self, record: &Record) {
        match record {
            Record::Life(life) => self.life = Some((**life).clone()),
            Record::File(ino, header) => {
                let mut note = self.remove(*ino).unwrap_or_else(|| Note::new((**header).clone()));
                note.header = (**header).clone();
                note.nameless &= note.header.path.is_empty();
                note.whole();
                self.insert(*ino, note);
            }
            Record::Gone(ino) => drop(self.remove(*ino)),
            Record::Synced(_) => {}
            Record::Names(facts) => self.book.hear(facts),
            Record::Lives(lives) => self.lives = lives.clone(),
            Record::Asked(number, about) => drop(self.asked.insert(*number, (**about).clone())),
            Record::Answered(number) => drop(self.asked.remove(number)),
            about => {
                let Some(ino) = about.ino() else { return };
                let Some(note) = self.files.get_mut(&ino) else { return };
                let less = apply_to(note, about);
                if less && note.is_of_no_use() {
                    self.remove(ino);
                }
            }
        }
    }

    /// The records of which a replay gives this image.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Record> {
        /// Extents to a record: keeps records far below the limit of a body.
        const STEP: usize = 8192;
        let mut out: Vec<Record> =
            self.life.iter().map(|l| Record::Life(Box::new(l.clone()))).collect();
        out.extend((!self.lives.is_empty()).then(|| Record::Lives(self.lives.clone())));
        for (ino, note) in self.files() {
            out.push(Record::File(ino, Box::new(note.header.clone())));
            let held: Vec<(ByteRange, Held)> = note.held().collect();
            // One even when nothing is held: the version and the append count too.
            let chunks = held.chunks(STEP).map(<[_]>::to_vec);
            let chunks = chunks.chain(held.is_empty().then(Vec::new));
            out.extend(chunks.map(|c| Record::Extents(ino, c, note.known, note.appending)));
            out.extend(note.nameless.then_some(Record::Nameless(ino)));
            out.extend(note.window.map(|w| Record::Window(ino, w, note.known)));
            out.extend((note.seat != 0).then_some(Record::Seat(ino, note.seat, note.known)));
            out.extend(note.alone.then_some(Record::Alone(ino, true)));
            out.extend((!note.cuts.is_empty()).then(|| Record::Cuts(ino, note.cuts.clone())));
            out.extend(note.overrides.then_some(Record::Overrides(ino)));
            let flushed: Vec<_> = note.flushed().collect();
            out.extend(flushed.chunks(STEP).map(|c| Record::Home(ino, c.to_vec())));
        }
        out.extend(self.book.facts().into_iter().map(|facts| Record::Names(Box::new(facts))));
        let asked = self.asked.iter();
        out.extend(asked.map(|(number, about)| Record::Asked(*number, Box::new(about.clone()))));
        out
    }
}

fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty())
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
