//! Programs tell each other what they have written, and whoever is told must see it: after the step that
//! its model asks of a reader. Messages go past the mounts, as those of MPI do.

use super::book::COMMON;
use super::{Setup, Work};
use crate::content;
use crate::crash::Expected;
use crate::model::Model;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

/// A file has so many places; what was told of one stays there until the other has read it.
const PLACES: u64 = 24;
/// Not aligned to anything, and some share pages.
const PLACE_BYTES: u64 = 1_700;

#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// This is there now.
    Told { round: u64, from: u64, place: u64, number: u64, len: u64 },
    /// It was read, or could not be.
    Read { round: u64, place: u64 },
}

/// The own file, and those of the others.
#[derive(Debug)]
pub(super) struct Told {
    who: u64,
    post: UnixDatagram,
    book: Expected,
    /// Places that somebody may be reading.
    taken: BTreeMap<u64, u64>,
    open: Option<File>,
    theirs: BTreeMap<u64, File>,
}

fn address(post: &Path, who: u64) -> PathBuf {
    post.join(who.to_string())
}

fn name(who: u64) -> String {
    format!("told-{who}")
}

fn bytes(who: u64, place: u64, number: u64, len: u64) -> Vec<u8> {
    content::bytes(who + 50, number, place * PLACE_BYTES, len)
}

impl Told {
    pub fn new(setup: &Setup) -> Option<Told> {
        let post = setup.extra.post.as_ref()?;
        let post = UnixDatagram::bind(address(post, setup.who)).expect("a socket for messages");
        post.set_nonblocking(true).expect("a socket that does not wait");
        let (book, taken, theirs) = Default::default();
        Some(Told { who: setup.who, post, book, taken, open: None, theirs })
    }

    fn path(&self, root: &Path) -> PathBuf {
        root.join(COMMON).join(name(self.who))
    }

    fn say(&self, setup: &Setup, to: u64, message: &Message) {
        let post = setup.extra.post.as_ref().expect("there is a socket");
        let text = serde_json::to_vec(message).expect("messages can be written");
        // Whoever does not listen, or too slowly, is told something else.
        let _ = self.post.send_to(&text, address(post, to));
    }

    /// A new round: nobody reads what was told before.
    pub fn begin(&mut self) {
        self.taken.clear();
    }

    /// Writes something, publishes it, and says so.
    pub fn tell(
        &mut self,
        setup: &Setup,
        dice: &mut ChaCha8Rng,
        (round, number): (u64, u64),
    ) -> io::Result<()> {
        let to = (setup.who + dice.random_range(1..setup.of.max(2))) % setup.of;
        let place = dice.random_range(0..PLACES);
        if to == setup.who || self.taken.contains_key(&place) {
            return Ok(());
        }
        let len = dice.random_range(1..=PLACE_BYTES);
        let (offset, data) = (place * PLACE_BYTES, bytes(self.who, place, number, len));
        let file = match self.open.take() {
            Some(file) => file,
            None => {
                let mut options = File::options();
                options.read(true).write(true).create(true).truncate(false);
                options.open(self.path(&setup.root))?
            }
        };
        self.book.write(offset, &data);
        file.write_all_at(&data, offset)?;
        self.open = setup.model.publish(file)?;
        self.book.acknowledge(offset, len);
        self.taken.insert(place, number);
        self.say(setup, to, &Message::Told { round, from: self.who, place, number, len });
        Ok(())
    }

    /// Looks at what it was told of, if it was.
    pub fn hear(&mut self, setup: &Setup, now: u64, work: &mut Work) {
        let mut text = [0; 256];
        let Ok(n) = self.post.recv(&mut text) else { return };
        match serde_json::from_slice(&text[..n]).expect("a message") {
            // Of a round before: its place may have been written again.
            Message::Told { round, .. } | Message::Read { round, .. } if round != now => {}
            Message::Read { place, .. } => drop(self.taken.remove(&place)),
            Message::Told { round, from, place, number, len } => {
                self.look(setup, from, (place, number, len), work);
                self.say(setup, from, &Message::Read { round, place });
            }
        }
    }

    fn look(
        &mut self,
        setup: &Setup,
        from: u64,
        (place, number, len): (u64, u64, u64),
        work: &mut Work,
    ) {
        let path = setup.root.join(COMMON).join(name(from));
        let open = self.theirs.remove(&from);
        let mut got = vec![0; len as usize];
        let read = setup.model.look_up(open, &path).and_then(|file| {
            file.read_exact_at(&mut got, place * PLACE_BYTES)?;
            Ok(file)
        });
        match read {
            Ok(file) => {
                let what = format!("{} as it was told, place {place}", path.display());
                content::same(&what, &got, &bytes(from, place, number, len));
                work.heard += 1;
                if setup.model != Model::Session {
                    self.theirs.insert(from, file);
                }
            }
            Err(e) => work.miss(&path, &e),
        }
    }

    /// Before a pause, and after a failure.
    pub fn close(&mut self) -> io::Result<()> {
        self.theirs.clear();
        match self.open.take() {
            Some(file) => crate::model::close(file),
            None => Ok(()),
        }
    }

    /// After whatever happened: what is there is the truth from here on, and published.
    pub fn settle(&mut self, what: &str, setup: &Setup) {
        drop(self.close());
        self.check(what, &setup.root);
        if !self.book.is_empty() {
            super::judge::publish_at(what, &self.path(&setup.root));
            self.book.acknowledge_all();
        }
    }

    /// In another directory, when everything is published.
    pub fn check(&mut self, what: &str, root: &Path) {
        let path = self.path(root);
        match std::fs::read(&path) {
            Ok(got) => self.book.settle(&format!("{what}: {}", path.display()), &got),
            Err(e) if e.kind() == ErrorKind::NotFound && self.book.size_least() == 0 => {
                self.book = Expected::default();
            }
            Err(e) => panic!("{what}: {}: {e}", path.display()),
        }
    }
}
