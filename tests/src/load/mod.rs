//! Programs on a mount whose daemon or metadata service dies under them: processes of their own,
//! which keep the books of every operation that was acknowledged, and judge what is there
//! afterwards.
//!
//! They are processes of their own because a process that starts others must not have files open
//! on such a mount: the child closes them, and waits for a service that is not there.

mod blocks;
mod book;
mod counter;
mod directories;
mod handover;
mod judge;
mod layout;
mod linked;
mod mapped;
mod names;
mod process;
mod program;
mod told;

pub use counter::counted;
pub use directories::make_directory;
pub use layout::Layout;
pub use process::{Load, all_right};

use crate::model::Model;
use program::Program;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};

/// What such a process is told once.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// What it may rely on.
    pub model: Model,
    /// What it does.
    pub mix: Mix,
    /// Its operations follow from the seed and its number.
    pub seed: u64,
    /// Its number among all programs of the job, from 0 on.
    pub who: u64,
    /// How many there are.
    pub of: u64,
    /// Where it writes.
    pub root: PathBuf,
    /// The mount of another node, where it looks for what it has published.
    pub elsewhere: PathBuf,
    /// How many blocks of 64 KiB its large file has at most; 0: it has none.
    pub blocks: u64,
    /// Where its last operations are written when it finds something wrong.
    pub log: PathBuf,
    /// What only some tests have.
    pub extra: Extra,
}

/// What only some tests have.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Extra {
    /// A directory for the sockets through which programs tell each other what they wrote; without it they
    /// do not.
    pub post: Option<PathBuf>,
    /// A node may be silent for so long that it loses its locks: what it wrote under one comes late, and is
    /// counted instead of being wrong.
    pub loses_locks: bool,
    /// Files may be mapped past the daemon, where no msync comes to it.
    pub past: bool,
}

/// What a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mix {
    /// Opens, writes, syncs, reads and closes.
    Data,
    /// These, and truncates, renames and unlinks.
    All,
    /// These, and what is written through the other node's mount, large files, shared mappings, links and
    /// directories that move, and what programs tell each other.
    Wide,
    /// These, and numbers that all count up under locks of them, of both kinds. (What a daemon that was
    /// killed had not published comes when it is back: no lock outlives that.)
    Locks,
}

impl Mix {
    /// More than a program's own files by their names.
    fn is_wide(self) -> bool {
        matches!(self, Mix::Wide | Mix::Locks)
    }
}

/// What it is told again and again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Work until told to pause, or until an operation fails.
    Go {
        /// Marks what is written.
        round: u64,
    },
    /// Finish at least one more operation, close all files, and say how it went.
    Pause,
    /// Every file must be as acknowledged. What was not is settled by what is there; unanswered
    /// operations are looked up or repeated, and everything is published.
    Settle(String),
    /// The same in another directory, without doing anything: files must be as they were settled.
    Compare {
        /// For messages.
        what: String,
        /// Another mount, or the backing.
        root: PathBuf,
    },
}

/// What it answers, to each order but `Go`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Report {
    /// It has paused.
    Paused(Work),
    /// It has found nothing wrong.
    Right,
}

/// What was done since the last `Go`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Work {
    /// Operations that succeeded.
    pub operations: u64,
    /// How often published bytes were read on the other node, and were right.
    pub read_elsewhere: u64,
    /// How often something was written on the other node, and was right here.
    pub written_elsewhere: u64,
    /// How often the common counter was counted up under its lock: for certain, and perhaps.
    pub counted: (u64, u64),
    /// How often something was stored through a mapping.
    pub mapped: u64,
    /// How often this program read what another one had told it of, and found it.
    pub heard: u64,
    /// How often it took a lock of a block that another program had changed last.
    pub handed: u64,
    /// How often a number under such a lock had gone back.
    pub went_back: u64,
    /// How often a file had several names after something was done to it.
    pub linked: u64,
    /// What others had published and could not be read.
    pub missed: Vec<Failure>,
    /// How long the longest operation took.
    pub longest_ms: u64,
    /// Which one that was.
    pub longest: String,
    /// What made it stop early.
    pub failure: Option<Failure>,
}

/// An operation that failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// Which, and on what.
    pub operation: String,
    /// Its errno.
    pub errno: i32,
}

impl Work {
    /// Something that is on other nodes could not be read: it depends on what was broken whether it may.
    fn miss(&mut self, path: &Path, e: &std::io::Error) {
        let operation = format!("read {}", path.display());
        self.missed.push(Failure { operation, errno: e.raw_os_error().unwrap_or(0) });
    }
}

/// The process: carries out the orders of standard input until that ends.
///
/// # Panics
/// When something is wrong on the mount: that is how it tells.
pub fn serve() {
    let setup = std::env::args().nth(1).expect("the setup is the argument");
    let mut program = Program::new(serde_json::from_str(&setup).expect("a setup"));
    let orders = read_orders();
    while let Ok(order) = orders.recv() {
        let report = match order {
            Order::Go { round } => {
                let Some(work) = program.run(round, &orders) else { return };
                Report::Paused(work)
            }
            Order::Pause => panic!("told to pause, and not at work"),
            Order::Settle(what) => {
                program.settle(&what);
                Report::Right
            }
            Order::Compare { what, root } => {
                program.compare(&what, &root);
                Report::Right
            }
        };
        let mut line = serde_json::to_vec(&report).expect("reports can be written");
        line.push(b'\n');
        std::io::stdout().write_all(&line).expect("the test reads reports");
    }
}

fn read_orders() -> Receiver<Order> {
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if tx.send(serde_json::from_str(&line).expect("an order")).is_err() {
                return;
            }
        }
    });
    rx
}
