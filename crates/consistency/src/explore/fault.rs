//! Planted bugs of whoever drives the structures (a daemon, a service). They live in the
//! explorer's harness; the structures themselves have no switches.

use crate::model::{Actions, SyncEvent};
use crate::ownership::{FileState, MapAnswer};
use ebb_types::{ByteRange, Version};

/// One bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Open does not ask.
    NoQueryAtOpen,
    /// Reads do not ask.
    NoQueryAtRead,
    /// Close publishes nothing.
    NoAttachAtClose,
    /// The service forgets an attach that it acknowledged.
    AttachLost,
    /// An attach reply is taken for bytes, too, that were written after it was sent.
    AttachCoversRewritten,
    /// A sync operation does not wait for attaches that somebody else has under way.
    NoWaitForAttaches,
    /// Neighbours of different owners are answered as one.
    MergeAcrossOwners,
    /// An answer about a range is taken for one about the whole file.
    RangeAnswerIsWhole,
    /// The version of unowned bytes stays the first one.
    BaseNeverAges,
    /// Answers tell the size that the file had at first.
    SizeNeverGrows,
    /// Clean bytes stay after an answer said that they changed.
    KeepStale,
    /// Owned bytes stay after an answer said that another node took them.
    KeepOvertaken,
    /// Fetched bytes are put into the cache file also where newer ones are by now.
    FillOverLocal,
    /// Fetched bytes are taken as current, whatever was learned since they were asked for.
    FetchedNeverAges,
    /// The flusher writes to the backing what it thinks it owns, without a grant.
    FlushWithoutGrant,
    /// At the end of a flush everything the node owns by then counts as flushed.
    MarkWithoutGrant,
    /// A truncate goes ahead while a flush of the same bytes is out.
    TruncateIgnoresGrants,
    /// A truncate does not wait for the attaches of its node, nor they for it.
    TruncateBesideAttaches,
    /// The own truncate leaves unattached bytes beyond the cut.
    TruncateKeepsLocal,
    /// Written bytes are announced to the view only after they are in the cache file, where
    /// read-ahead has overwritten them by then.
    WriteAnnouncedLate,
    /// The view is told of a write before and after it, and others use it in between.
    WriteBesideLock,
    /// A change is acknowledged before the leases of others are returned.
    AckBeforeRecall,
    /// A node uses its lease after its time.
    TrustForEver,
    /// The service looks at the file first and grants the lease later.
    GrantAfterLook,
    /// A node takes a grant that was recalled before it came.
    ForgetRecalls,
    /// What was written past the daemon is not looked for.
    NotLookedFor,
    /// Blocks in which something was written are attached whoever has their bytes.
    GuessesTakeAll,
    /// Bytes that may have been written again are attached although another node took them.
    AgainTakesAll,
    /// Nothing is remembered of others' bytes that were put into the cache file.
    NoTwin,
    /// What a question shows is not brought into the cache file.
    NotBrought,
    /// Claimed zeros count as written over what a node synced there and did not publish.
    GuessesOvertake,
    /// The journal does not say that own bytes were written again before they were synced.
    AgainNotNoted,
    /// What the kernel tells of writes is taken for whole when some of it was lost.
    LossNotTold,
    /// Others are answered without asking who writes quietly.
    QuietNotAsked,
    /// A lease is returned before what was written quietly is told.
    QuietKept,
    /// A node writes quietly after its time.
    QuietForEver,
    /// Who wrote quietly is given up, and what it may have written does not become its own.
    LapseForgets,
    /// Bytes are written quietly while they are flushed.
    QuietBesideFlush,
    /// Bytes that got a new version while they were flushed count as flushed at their node.
    NewerCountsAsFlushed,
    /// Others are answered without asking the node at which the file sits.
    SeatNotAsked,
    /// Others attach at the service what they write to a file that sits somewhere.
    SeatPassedBy,
    /// A seat ends before everything that was written there is published.
    SeatLeftUntold,
    /// What was brought to the seat goes from its node before that knows where it is.
    SeatNotLearned,
    /// A truncate elsewhere leaves the cache file as it was where the file sits.
    SeatNotCut,
    /// An open that hears of a part of the file goes by what was known of the rest.
    WindowsRequireNothing,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Fault; 45] = [
        Fault::NoQueryAtOpen,
        Fault::NoQueryAtRead,
        Fault::NoAttachAtClose,
        Fault::AttachLost,
        Fault::AttachCoversRewritten,
        Fault::NoWaitForAttaches,
        Fault::MergeAcrossOwners,
        Fault::RangeAnswerIsWhole,
        Fault::BaseNeverAges,
        Fault::SizeNeverGrows,
        Fault::KeepStale,
        Fault::KeepOvertaken,
        Fault::FillOverLocal,
        Fault::FetchedNeverAges,
        Fault::FlushWithoutGrant,
        Fault::MarkWithoutGrant,
        Fault::TruncateIgnoresGrants,
        Fault::TruncateBesideAttaches,
        Fault::TruncateKeepsLocal,
        Fault::WriteAnnouncedLate,
        Fault::WriteBesideLock,
        Fault::AckBeforeRecall,
        Fault::TrustForEver,
        Fault::GrantAfterLook,
        Fault::ForgetRecalls,
        Fault::NotLookedFor,
        Fault::GuessesTakeAll,
        Fault::AgainTakesAll,
        Fault::NoTwin,
        Fault::NotBrought,
        Fault::GuessesOvertake,
        Fault::AgainNotNoted,
        Fault::LossNotTold,
        Fault::QuietNotAsked,
        Fault::QuietKept,
        Fault::QuietForEver,
        Fault::LapseForgets,
        Fault::QuietBesideFlush,
        Fault::NewerCountsAsFlushed,
        Fault::SeatNotAsked,
        Fault::SeatPassedBy,
        Fault::SeatLeftUntold,
        Fault::SeatNotLearned,
        Fault::SeatNotCut,
        Fault::WindowsRequireNothing,
    ];

    /// It is one of those about a file that sits at a node.
    #[must_use]
    pub fn is_of_seats(self) -> bool {
        use Fault::{SeatLeftUntold, SeatNotAsked, SeatNotCut, SeatNotLearned, SeatPassedBy};
        matches!(self, SeatNotAsked | SeatNotLearned | SeatPassedBy | SeatLeftUntold | SeatNotCut)
    }

    /// It is one of those who look for what was written past the daemon.
    #[must_use]
    pub fn is_past(self) -> bool {
        use Fault::{AgainNotNoted, AgainTakesAll, GuessesOvertake, GuessesTakeAll};
        use Fault::{LossNotTold, NoTwin, NotBrought, NotLookedFor};
        matches!(
            self,
            NotLookedFor
                | LossNotTold
                | GuessesTakeAll
                | AgainTakesAll
                | NoTwin
                | NotBrought
                | GuessesOvertake
                | AgainNotNoted
        )
    }

    /// It is one of those who write without telling.
    #[must_use]
    pub fn is_quiet(self) -> bool {
        use Fault::{LapseForgets, NewerCountsAsFlushed, QuietBesideFlush};
        use Fault::{QuietForEver, QuietKept, QuietNotAsked};
        let asked = matches!(self, QuietNotAsked | QuietKept | QuietForEver);
        asked || matches!(self, LapseForgets | QuietBesideFlush | NewerCountsAsFlushed)
    }

    /// What a daemon with this bug does at an event.
    #[must_use]
    pub fn actions(self, event: SyncEvent, right: Actions) -> Actions {
        match (self, event) {
            (Fault::NoQueryAtOpen, SyncEvent::Open) => Actions { query: None, ..right },
            (Fault::NoQueryAtRead, SyncEvent::Read) => Actions { query: None, ..right },
            (Fault::NoAttachAtClose, SyncEvent::Close) => Actions { attach: None, ..right },
            _ => right,
        }
    }

    /// What a service with this bug answers.
    pub fn spoil(self, answer: &mut MapAnswer, service: &FileState, first_size: u64) {
        match self {
            Fault::MergeAcrossOwners => merge_across(answer),
            Fault::RangeAnswerIsWhole => answer.covers = ByteRange::ALL,
            Fault::BaseNeverAges => answer.base_version = Version::ZERO.next(),
            Fault::SizeNeverGrows => answer.size = service.size().min(first_size),
            _ => {}
        }
    }
}

fn merge_across(answer: &mut MapAnswer) {
    let list = std::mem::take(&mut answer.ranges);
    for next in list {
        match answer.ranges.last_mut() {
            Some(last) if last.range.end() == next.range.start() => {
                last.range = ByteRange::new(last.range.start(), next.range.end());
                last.version = last.version.max(next.version);
            }
            _ => answer.ranges.push(next),
        }
    }
}
