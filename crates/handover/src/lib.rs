//! What outlives a daemon, so that the next one goes on where it was killed and applications do
//! not notice. A supervisor (`cli/src/keeper/mod.rs`) holds the devices of the mount and a piece of
//! memory; this is the daemon's side of both.
//!
//! # What must be known again, and from where
//! * Requests that were read and not answered: the kernel sends them again ([`Notifier::resend`],
//!   Linux 6.9) under their old numbers. What must not be done twice is known by that number: at
//!   the metadata service (`meta-client/src/once.rs`), in the table of open files, and, for
//!   appends, by the place that the first try took ([`table`]).
//! * Open files: [`table`]. Directories and files of `.ebb` come from the requests themselves:
//!   positions in a directory mean the same in every listing of it (`ops/dirs.rs`).
//! * Bytes: the node journal and, of its last moment, the [`ring`]; judged as in any takeover
//!   (`restore.rs`), but what was written here is never put aside: its writers live.
//! * Locks, opens: the service keeps them for the heir (`Hello.heir_of`).
//! * Bytes on the backing of a file that lost its last name while it was open here: the supervisor
//!   keeps its descriptor.
//!
//! [`Notifier::resend`]: ebb_fuse::Notifier::resend

mod area;
mod line;
mod ring;
mod table;

pub use area::Area;
pub use line::{Line, Word};
pub use ring::{Mark, Ring};
pub use table::{Opened, Placed, Table};

use ebb_locks::Mutex;
use ebb_types::{Incarnation, Ino};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

/// Requests that the kernel sends again have this bit in their number.
pub const AGAIN: u64 = 1 << 63;

/// Generations are this far apart in what they count.
const GENERATION_SHIFT: u32 = 40;

/// What a supervisor gave a daemon at its start.
pub struct Heirloom {
    line: Line,
    area: Arc<Area>,
    devices: Mutex<Vec<OwnedFd>>,
    kept: Mutex<HashMap<u64, OwnedFd>>,
    generation: u64,
    /// Daemons of this mount before this one.
    pub restarts: u32,
    /// How the last of them ended.
    pub reason: String,
    /// The supervisor's process.
    pub supervisor: u32,
    /// Open files, for the daemon after this one.
    pub table: Table,
    /// The supervisor has the devices of the mount.
    handed_over: AtomicBool,
    orphaned: AtomicBool,
}

/// What a dead daemon left in the memory.
pub struct Inheritance {
    /// Its lives.
    pub lives: Vec<Incarnation>,
    /// Records for the node journal that may not be in the file.
    pub records: Vec<u8>,
    /// Open files.
    pub opened: Vec<Opened>,
    /// Appends that may be unanswered, oldest first.
    pub placed: Vec<Placed>,
}

impl Heirloom {
    /// Hears what the supervisor hands over.
    pub fn receive(line: Line) -> io::Result<Heirloom> {
        let strange = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let (mut area, mut devices, mut kept) = (None, Vec::new(), HashMap::new());
        loop {
            match line.hear(true)? {
                Some(Word::Area(fd)) => area = Some(Arc::new(Area::open(&fd)?)),
                Some(Word::Device(fd)) => devices.push(fd),
                Some(Word::Keep(id, fd)) => drop(kept.insert(id, fd)),
                Some(Word::Start(restarts, supervisor, reason)) => {
                    let area = area.ok_or_else(|| strange("a start without a memory"))?;
                    let generation = area.get(area::GENERATION) + 1;
                    area.set(area::GENERATION, generation);
                    return Ok(Heirloom {
                        table: Table::new(Arc::clone(&area)),
                        handed_over: AtomicBool::new(!devices.is_empty()),
                        orphaned: AtomicBool::new(false),
                        line,
                        area,
                        devices: Mutex::new(devices),
                        kept: Mutex::new(kept),
                        generation,
                        restarts,
                        reason,
                        supervisor,
                    });
                }
                Some(_) => {}
                None => return Err(strange("the supervisor is gone")),
            }
        }
    }

    /// What the daemon before this one left; none when the mount is still to be made.
    pub fn inheritance(&self) -> io::Result<Option<Inheritance>> {
        if self.devices.lock().is_empty() {
            return Ok(None);
        }
        let lives = [area::INCARNATION, area::NEXT_INCARNATION].map(|at| self.area.get(at));
        let lives = lives.into_iter().filter(|n| *n != 0).map(Incarnation).collect();
        let records = ring::left(&self.area).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "the last notes make no sense")
        })?;
        let (opened, placed) = (table::opened(&self.area), table::placed(&self.area));
        Ok(Some(Inheritance { lives, records, opened, placed }))
    }

    /// The devices of the mount, once.
    pub fn take_devices(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.devices.lock())
    }

    /// Above all numbers of handles and requests that were given before.
    #[must_use]
    pub fn first_number(&self) -> u64 {
        self.generation << GENERATION_SHIFT
    }

    /// This daemon is going to join under this number.
    pub fn joining(&self, life: Incarnation) {
        self.area.set(area::NEXT_INCARNATION, life.0);
    }

    /// It has.
    pub fn joined(&self, life: Incarnation) {
        self.area.set(area::INCARNATION, life.0);
    }

    /// Where the embedded metadata service and the peer port were, if anywhere.
    #[must_use]
    pub fn addresses(&self) -> (String, String) {
        (self.area.text(area::META_ADDRESS), self.area.text(area::PEER_ADDRESS))
    }

    /// Where the embedded metadata service is: it must be there again.
    pub fn meta_is_at(&self, address: &str) {
        self.area.set_text(area::META_ADDRESS, address);
    }

    /// The same for the port where peers come.
    pub fn peers_come_to(&self, address: &str) {
        self.area.set_text(area::PEER_ADDRESS, address);
    }

    /// A ring for a journal that has everything.
    #[must_use]
    pub fn ring(&self) -> Ring {
        Ring::new(Arc::clone(&self.area))
    }

    /// Gives the supervisor the devices of a new mount.
    pub fn hand_over<'a>(
        &self,
        devices: impl IntoIterator<Item = std::os::fd::BorrowedFd<'a>>,
    ) -> io::Result<()> {
        devices.into_iter().try_for_each(|fd| self.line.lend_device(fd))?;
        self.handed_over.store(true, Release);
        Ok(())
    }

    /// True when another daemon can go on after this one.
    #[must_use]
    pub fn is_handed_over(&self) -> bool {
        self.handed_over.load(Acquire)
    }

    /// True as long as there is somebody to start it.
    #[must_use]
    pub fn has_supervisor(&self) -> bool {
        !self.orphaned.load(Acquire)
    }

    /// Has the supervisor keep a file of the backing that is about to lose its name.
    pub fn keep(&self, ino: Ino, fd: OwnedFd) -> io::Result<()> {
        let word = Word::Keep(ino.0, fd);
        self.line.say(&word)?;
        if let Word::Keep(id, fd) = word {
            self.kept.lock().insert(id, fd);
        }
        Ok(())
    }

    /// True for a file of which the supervisor has a descriptor.
    #[must_use]
    pub fn is_kept(&self, ino: Ino) -> bool {
        self.kept.lock().contains_key(&ino.0)
    }

    /// A file of the backing that was kept.
    #[must_use]
    pub fn kept(&self, ino: Ino) -> Option<OwnedFd> {
        self.kept.lock().get(&ino.0).and_then(|fd| fd.as_fd().try_clone_to_owned().ok())
    }

    /// Nobody has the file open any more.
    pub fn forget(&self, ino: Ino) {
        self.kept.lock().remove(&ino.0);
        let _ = self.line.say(&Word::Forget(ino.0));
    }

    /// Tells the supervisor; one that is gone cannot be told.
    pub fn say(&self, word: &Word) {
        if let Err(e) = self.line.say(word) {
            tracing::debug!(error = %e, "the supervisor does not hear");
        }
    }

    /// Waits until the supervisor is gone. Blocks.
    pub fn wait_for_its_end(&self) {
        while let Ok(Some(_)) = self.line.hear(true) {}
        self.orphaned.store(true, Release);
    }
}
