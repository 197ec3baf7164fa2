//! A node leaves the job, and files that it has flushed bytes of have no name yet, because other
//! nodes have not flushed theirs. That the bytes are there, and in which part file, is known to the
//! service and to the journal of the node, and that goes. So the node says on the board what its
//! recovery would: whoever recovers without a service puts the others' bytes into the same file, and
//! does not write older ones over these.

use super::board::{Board, Spoken};
use super::file::{Site, Stay, Work};
use crate::cache::CacheDir;
use crate::journal::{Image, Note};
use crate::recover::places::Places;
use ebb_locks::Mutex;
use ebb_types::{Ino, Time};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// Says it of all files that wait for others; which of them it could not say it of.
pub(crate) fn say(
    backing: &Path,
    cache: &CacheDir,
    image: &Image,
) -> io::Result<Vec<(Ino, String)>> {
    let places = Places::open(backing)?;
    let mut waiting: Vec<(Ino, &Note)> = Vec::new();
    for (ino, note) in image.sayable().filter(|(_, note)| note.waits()) {
        let home = note.header.home.as_ref().filter(|_| !note.header.path.is_empty());
        let part = home.map(|home| places.file(&home.path, home.ino)).transpose()?.flatten();
        // What has got its name meanwhile, or was deleted, this node need not have heard of.
        waiting.extend(part.map(|_| (ino, note)));
    }
    let Some(life) = image.life.as_ref().filter(|_| !waiting.is_empty()) else {
        return Ok(Vec::new());
    };
    let board = Board::open(&places, &format!("{:016x}", life.job))?;
    // Another daemon may join under the same name, and have other things to say.
    let Time { sec, nsec } = Time::now();
    let node = format!("{} (left at {sec}.{nsec:09})", life.node);
    let told: BTreeSet<Ino> = waiting.iter().map(|(ino, _)| *ino).collect();
    let site = Site {
        places: &places,
        board: &board,
        cache,
        node: &node,
        rebooted: false,
        // What else is there by now is for those who stay.
        force: true,
        shared: true,
        told,
        named: BTreeSet::new(),
        shaped: BTreeSet::new(),
        everybody: false.into(),
        zeros: Mutex::default(),
    };
    let said = waiting.iter().map(|(ino, note)| {
        let said = Work::begin(&site, *ino, note).and_then(|work| work.leave(note));
        (*ino, said)
    });
    let failed: Vec<_> = said
        .filter_map(|(ino, said): (Ino, Result<(), Stay>)| Some((ino, said.err()?.text())))
        .collect();
    if failed.is_empty() {
        board.speak(&node, &Spoken { lives: image.lives.clone(), done: true })?;
    }
    Ok(failed)
}
