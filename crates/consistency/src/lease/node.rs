//! A node's side: how long it may trust, and what it holds of one file.

use super::LeaseSeq;
use ebb_types::Version;

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
        // A tenth for clocks that do not run alike.
        *self = Trust { duration: lease - lease / 10, until: 0, epoch: self.epoch + 1 };
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
    since: u64,
    /// The node knows the attributes as they were at the grant, or as it changed them since.
    attributes: bool,
}

/// What a node holds of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FileLease {
    held: Option<Held>,
    recalled: LeaseSeq,
    /// Counts this node's own changes of the attributes.
    changes: u64,
    narrow: u8,
}

/// Answers about a part of a large map before the whole of it is asked for.
const NARROW_MAX: u8 = 8;

impl FileLease {
    /// What an answer must be compared with when it comes: attributes that were told before this
    /// node changed them itself are no good.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// This node changes the attributes: what it knew of them, or is being told now, is no good.
    pub fn attributes_change(&mut self) {
        self.changes += 1;
        if let Some(held) = &mut self.held {
            held.attributes = false;
        }
    }

    /// This node has changed the attributes and knows what they are now; an answer to an earlier
    /// question does not.
    pub fn attributes_known(&mut self) {
        self.changes += 1;
    }

    /// True when what is held was granted after `seq`.
    #[must_use]
    pub fn is_after(&self, seq: LeaseSeq) -> bool {
        self.held.is_some_and(|h| h.grant.seq > seq)
    }

    /// A grant came with an answer to a request that was sent in `epoch`. False when it was
    /// recalled before it came. `asked_at`: what [`FileLease::changes`] was when the request was
    /// sent, for an answer that tells the attributes.
    pub fn granted(&mut self, grant: Grant, epoch: u64, now: u64, asked_at: Option<u64>) -> bool {
        let newer = self.held.is_none_or(|h| h.epoch != epoch || h.grant.seq < grant.seq);
        if grant.seq <= self.recalled || !newer {
            return false;
        }
        let attributes = asked_at == Some(self.changes);
        self.held = Some(Held { grant, epoch, since: now, attributes });
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

    /// True while the attributes need no question. Of a file that others can change on the
    /// backing they are good for `fresh` after the grant.
    #[must_use]
    pub fn covers_attributes(&self, epoch: Option<u64>, now: u64, fresh: u64) -> bool {
        let young = |h: &Held| !h.grant.compared || now < h.since.saturating_add(fresh);
        self.valid(epoch).is_some_and(|h| h.attributes && young(h))
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
