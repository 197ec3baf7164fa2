//! Whether the kernel tells what is written past the daemon (`ebb_tracker`), or why it does not:
//! then it is looked for ([`super::Track`]).

use crate::cache;
use crate::config::TrackerMode;
use ebb_tracker::{Tracker, Watched, Why, Writers};
use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The tracker of the cache's file system.
#[derive(Default)]
pub struct Telling {
    tracker: OnceLock<Result<Tracker, String>>,
    losses: AtomicU64,
}

impl Telling {
    /// Tries it, once: the cache is in `dir`. What is in the way is told.
    pub fn start(&self, mode: TrackerMode, dir: &Path) {
        let _ = self.tracker.set(match mode {
            TrackerMode::Off => Err("switched off".into()),
            TrackerMode::Auto | TrackerMode::On => Tracker::open(dir).map_err(|e| e.to_string()),
        });
        if let (Err(why), false) = (self.state(), mode == TrackerMode::Off) {
            tracing::info!(why, "the kernel does not tell what is written past the daemon");
        }
    }

    fn tracker(&self) -> Option<&Tracker> {
        self.tracker.get()?.as_ref().ok()
    }

    /// It is there, or why not.
    pub fn state(&self) -> Result<(), &str> {
        match self.tracker.get() {
            Some(Ok(_)) => Ok(()),
            Some(Err(why)) => Err(why),
            None => Err("nothing is written past the daemon"),
        }
    }

    /// From now on what others write into this file is told. Where that cannot be, it is looked for.
    pub fn watch(&self, cache: &File) -> Option<Watched> {
        let tracker = self.tracker()?;
        // For reading: who asks whether anybody can still write must not find the tracker.
        let read_only = cache::reopened_for_reading(cache);
        match read_only.and_then(|file| tracker.watch(&file, Writers::Others)) {
            Ok(watched) => Some(watched),
            Err(e) => {
                tracing::warn!(error = %e, "a file of the cache is not tracked");
                None
            }
        }
    }

    /// A number that moves with every write that is told.
    pub fn activity(&self) -> u64 {
        self.tracker().map_or(0, Tracker::activity)
    }

    /// What was written of a file was not told for certain.
    pub fn note_loss(&self, label: &str, why: Why) {
        self.losses.fetch_add(1, Relaxed);
        if why.lasts() {
            tracing::debug!(file = label, %why, "writes are looked for from now on");
        } else {
            tracing::warn!(file = label, %why, "what was written is looked for");
        }
    }

    /// How often that was.
    pub fn losses(&self) -> u64 {
        self.losses.load(Relaxed)
    }
}
