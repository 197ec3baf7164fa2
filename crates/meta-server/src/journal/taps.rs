//! Others who keep the journal as well, beside the disk: what they still have to get, and what they have.
//!
//! Consistency: a record is on stable storage when it is so here and with everyone who keeps up
//! ([`Keepers::least`]). Who keeps up is counted on from when it has what nodes were told was lasting until
//! who follows it can know that it is not counted on any more ([`Keeper`]).

use super::Lsn;
use ebb_locks::Mutex;
use std::sync::Arc;
use tokio::sync::{Notify, watch};

/// More than this nobody may be behind.
const BEHIND_BYTES_MAX: usize = 256 << 20;

/// Records for one who follows, as they are appended.
#[derive(Debug, Default)]
pub struct Tap {
    waiting: Mutex<Records>,
    more: Notify,
}

/// Framed records, and the last one of them.
#[derive(Debug, Default)]
pub struct Records {
    /// Their bytes.
    pub bytes: Vec<u8>,
    /// Everything up to this one was taken with these, or before.
    pub upto: Lsn,
    /// Some are lost: he is too far behind.
    pub lost: bool,
}

impl Tap {
    pub(super) fn from(upto: Lsn) -> Tap {
        Tap { waiting: Mutex::new(Records { upto, ..Records::default() }), more: Notify::new() }
    }

    /// False when he gets nothing any more.
    pub(super) fn put(&self, record: &[u8], lsn: Lsn) -> bool {
        let mut waiting = self.waiting.lock();
        if waiting.bytes.len() + record.len() > BEHIND_BYTES_MAX {
            waiting.lost = true;
            waiting.bytes = Vec::new();
        }
        if !waiting.lost {
            waiting.bytes.extend_from_slice(record);
            waiting.upto = lsn;
        }
        let goes_on = !waiting.lost;
        drop(waiting);
        self.more.notify_one();
        goes_on
    }

    /// What has come since the last time, without waiting.
    pub fn take(&self) -> Records {
        let mut waiting = self.waiting.lock();
        let rest = Records { upto: waiting.upto, lost: waiting.lost, bytes: Vec::new() };
        std::mem::replace(&mut *waiting, rest)
    }

    /// Waits until there is something.
    pub async fn some(&self) {
        loop {
            {
                let waiting = self.waiting.lock();
                if waiting.lost || !waiting.bytes.is_empty() {
                    return;
                }
            }
            self.more.notified().await;
        }
    }
}

/// Up to where everyone has the journal who is counted on.
#[derive(Debug)]
pub struct Keepers {
    all: Mutex<Vec<(u64, Lsn)>>,
    least: watch::Sender<Lsn>,
}

impl Default for Keepers {
    fn default() -> Keepers {
        Keepers { all: Mutex::default(), least: watch::Sender::new(Lsn::MAX) }
    }
}

impl Keepers {
    /// So far all have it; the largest number when nobody is counted on.
    pub fn least(&self) -> Lsn {
        *self.least.borrow()
    }

    pub(super) fn watch(&self) -> watch::Receiver<Lsn> {
        self.least.subscribe()
    }

    /// One who has everything up to `has` is counted on from now on.
    pub fn count_on(self: &Arc<Keepers>, has: Lsn) -> Keeper {
        let mut all = self.all.lock();
        let id = all.iter().map(|(id, _)| id + 1).max().unwrap_or(0);
        all.push((id, has));
        self.tell(&all);
        Keeper { id, keepers: Arc::clone(self) }
    }

    fn tell(&self, all: &[(u64, Lsn)]) {
        self.least.send_replace(all.iter().map(|(_, has)| *has).min().unwrap_or(Lsn::MAX));
    }
}

/// One who is counted on, as long as this lives.
#[derive(Debug)]
pub struct Keeper {
    id: u64,
    keepers: Arc<Keepers>,
}

impl Keeper {
    /// It has everything up to there.
    pub fn has(&self, upto: Lsn) {
        let mut all = self.keepers.all.lock();
        for (_, has) in all.iter_mut().filter(|(id, _)| *id == self.id) {
            *has = upto.max(*has);
        }
        self.keepers.tell(&all);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let mut all = self.keepers.all.lock();
        all.retain(|(id, _)| *id != self.id);
        self.keepers.tell(&all);
    }
}
