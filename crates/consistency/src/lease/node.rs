//! A node's side: how long it may trust, and what it holds of the map of one file.

use super::LeaseSeq;
use ebb_types::Version;

/// An epoch is the number of the stream, and in its low bits how often trust lapsed on it.
const LAPSE_BITS: u32 = 32;

/// The stream of an epoch: numbers of grants and recalls are those of one service only within one.
pub(super) fn stream_of(epoch: u64) -> u64 {
    epoch >> LAPSE_BITS
}

/// Until when a node may trust its leases. Times are milliseconds of any clock that never stops.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Trust {
    duration: u64,
    until: u64,
    epoch: u64,
}

impl Trust {
    /// A new stream: nothing that was granted before it is trusted any more. `lease` is the
    /// service's lease time, 0 when it grants none.
    pub fn begin(&mut self, lease: u64) {
        let epoch = (stream_of(self.epoch) + 1) << LAPSE_BITS;
        // A tenth for clocks that do not run alike.
        *self = Trust { duration: lease - lease / 10, until: 0, epoch };
    }

    /// A sign of life that was sent at `sent` has been answered; it is `now`.
    pub fn answered(&mut self, sent: u64, now: u64) {
        if now >= self.until {
            // The service may have given us up in between.
            self.epoch += 1;
        }
        self.until = self.until.max(sent.saturating_add(self.duration));
    }

    /// The epoch that a request which is sent now can get a lease in; `None` while there is no
    /// trust.
    #[must_use]
    pub fn epoch(&self, now: u64) -> Option<u64> {
        (now < self.until).then_some(self.epoch)
    }
}

/// What came with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// Its place among all grants and recalls.
    pub seq: LeaseSeq,
    /// The file's version when it was granted.
    pub version: Version,
    /// Others than this job can change the file on the backing: the service must be asked where
    /// that is to be noticed.
    pub compared: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Held {
    grant: Grant,
    epoch: u64,
}

/// What a node holds of the map of one file. (Its attributes are in [`super::Known`].)
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FileLease {
    held: Option<Held>,
    recalled: LeaseSeq,
    narrow: u8,
}

/// Answers about a part of a large map before the whole of it is asked for.
const NARROW_MAX: u8 = 8;

impl FileLease {
    /// True when something is held, if it can be trusted.
    #[must_use]
    pub fn is_some(&self) -> bool {
        self.held.is_some()
    }

    /// A grant came with an answer to a request that was sent in `epoch`. False when it was
    /// recalled before it came.
    pub fn granted(&mut self, grant: Grant, epoch: u64) -> bool {
        let newer = self.held.is_none_or(|h| h.epoch != epoch || h.grant.seq < grant.seq);
        if grant.seq <= self.recalled || !newer {
            return false;
        }
        self.held = Some(Held { grant, epoch });
        true
    }

    /// The service wants every grant before `seq` back.
    pub fn recall(&mut self, seq: LeaseSeq) {
        self.recalled = self.recalled.max(seq);
        self.narrow = 0;
        if self.held.is_some_and(|h| h.grant.seq < seq) {
            self.held = None;
        }
    }

    /// Gives up what is held; its number, to be returned.
    pub fn give_up(&mut self) -> Option<LeaseSeq> {
        self.held.take().map(|h| h.grant.seq)
    }

    fn valid(&self, epoch: Option<u64>) -> Option<&Held> {
        self.held.as_ref().filter(|h| epoch == Some(h.epoch))
    }

    /// True while the file is as it was granted, but for what this node did. `epoch` is
    /// [`Trust::epoch`] of now.
    #[must_use]
    pub fn holds(&self, epoch: Option<u64>) -> bool {
        self.valid(epoch).is_some()
    }

    /// True while a map that is known as of `known` needs no question.
    #[must_use]
    pub fn covers_map(&self, epoch: Option<u64>, known: Version) -> bool {
        self.valid(epoch).is_some_and(|h| known >= h.grant.version)
    }

    /// True while an open of the file that this node has open already needs no question.
    #[must_use]
    pub fn covers_open(&self, epoch: Option<u64>, known: Version) -> bool {
        self.covers_map(epoch, known) && self.held.is_some_and(|h| !h.grant.compared)
    }

    /// A part of the map is about to be asked for. True when it pays to ask for all of it: reads
    /// here and there go on, nobody changes the file, and only a map that is known wholly is
    /// covered by a lease.
    pub fn widen(&mut self) -> bool {
        self.narrow = self.narrow.saturating_add(1);
        self.narrow > NARROW_MAX
    }
}
