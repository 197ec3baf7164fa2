//! A node leaves the job with status 0 and takes its journal along. What is in it that a recovery of
//! other caches would need, when the service is lost later, it says on the board before: which bytes
//! of files that others have, too, it has flushed, and what it cut. So nobody writes older bytes over
//! them, or looks for them in vain.
//!
//! All of it is in one file, for this happens at every orderly end of a job of several nodes; also when it
//! has nothing to say but that it has gone, so that nobody waits for it.
//! Only of a file that has no name yet, because others have not flushed theirs, it is also decided that
//! the bytes go into its part file, of which nobody else need know. The service takes everything away
//! when its last node has left.

use super::board::{Board, Place, Spoken};
use super::statement::{Claim, Fate, Key, Kind, Statement};
use crate::recover::places::Places;
use ebb_node_journal::{Home, Image, Note};
use ebb_types::{Ino, Time};
use std::io;
use std::path::Path;

/// Files that have no name yet, and of which this node has flushed bytes; and where they are.
pub(crate) fn waiting<'a>(
    places: &Places,
    image: &'a Image,
) -> io::Result<Vec<(Ino, &'a Note, Home)>> {
    let mut waiting = Vec::new();
    for (ino, note) in image.sayable().filter(|(_, note)| note.waits()) {
        let Some(home) = note.header.home.as_ref() else { continue };
        // What has got its name meanwhile, or was deleted, this node need not have heard of.
        let found = places.home(home, &note.header.path)?;
        let found = found.map(|(path, _)| Home { path, ..home.clone() });
        waiting.extend(found.filter(Home::is_part).map(|home| (ino, note, home)));
    }
    Ok(waiting)
}

/// Says what there is to say.
pub(crate) fn say(backing: &Path, image: &Image) -> io::Result<()> {
    // Who is the last leaves nothing to anybody. Whoever is not says at least that it has gone.
    let others = image.book.nodes() > 1;
    let Some(life) = image.life.as_ref().filter(|_| others) else { return Ok(()) };
    let places = Places::open(backing)?;
    let board = Board::open(&places, &super::job_label(Some(life)))?;
    // Another daemon may join under the same name, and have other things to say.
    let Time { sec, nsec } = Time::now();
    let node = format!("{} (left at {sec}.{nsec:09})", life.node);
    for (ino, _, home) in waiting(&places, image)? {
        let place = Place::of(home.path, home.ino);
        board.corner(ino)?.settle(&node, &place)?;
    }
    let said = image.sayable().map(|(ino, note)| (ino, statement(&node, note).encode()));
    let spoken = Spoken { lives: image.lives.clone(), done: true, said: said.collect() };
    board.speak(&node, &spoken)
}

fn statement(node: &str, note: &Note) -> Statement {
    // Others may have come since it was told that it was alone.
    let mut statement = Statement { alone: false, ..Statement::of(node, note) };
    for (range, version) in note.flushed() {
        let key = Key { version, kind: Kind::Published };
        statement.claims.insert(range, Claim { key, fate: Fate::Written });
    }
    statement
}
