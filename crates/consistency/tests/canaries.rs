//! The explorer can fail: every planted bug is caught by a program that is race-free and, without
//! the bug, right. One line per bug: where it is caught.

use ebb_consistency::explore::{Bounds, Fault, Program, Telling, explore, is_race_free, replay};
use ebb_consistency::{Model, ModelTable};
use std::collections::HashSet;
use std::sync::Arc;

fn model(name: &str) -> Arc<Model> {
    ModelTable::builtin().get(name).expect("a built-in model")
}

/// A reader that may have a lease when another node writes.
const LEASED: &str = "base 2 | 0: write 0..1, send 0 | 1: read 1..2, recv 0, read 0..1";

/// A writer that may write without telling, from its second write on.
const QUIET: &str = "base 0 | 0: write 0..1, write 1..2, send 0 | 1: recv 0, read 0..2";

/// (bug, model, flushes, evictions, read-aheads, program)
const CANARIES: [(Fault, &str, [u8; 3], &str); 54] = {
    use Fault::*;
    [
        (
            NoQueryAtOpen,
            "session",
            [0, 0, 0],
            "base 1 | 0: write 0..1, close, send 0 | 1: recv 0, open, read 0..1",
        ),
        (
            NoQueryAtRead,
            "posix",
            [0, 0, 0],
            "base 1 | 0: write 0..1, send 0 | 1: recv 0, read 0..1",
        ),
        (
            NoQueryAtRead,
            "commit",
            [0, 0, 0],
            "base 1 | 0: write 0..1, fsync, send 0 | 1: recv 0, read 0..1",
        ),
        (
            NoAttachAtClose,
            "session",
            [0, 0, 0],
            "base 1 | 0: write 1..2, close, send 0 | 1: recv 0, open, read 0..2",
        ),
        (
            NoAttachAtClose,
            "mpiio",
            [0, 0, 0],
            "base 1 | 0: write 0..1, close, send 0 | 1: recv 0, fsync, read 0..1",
        ),
        (AttachLost, "posix", [0, 0, 0], "base 1 | 0: write 0..1, send 0 | 1: recv 0, read 0..1"),
        (
            AttachLost,
            "session",
            [0, 0, 0],
            "base 1 | 0: write 0..1, close, send 0 | 1: recv 0, open, read 0..1",
        ),
        (
            AttachCoversRewritten,
            "session",
            [1, 0, 1],
            "base 1 | 0: write 0..1, write 0..1, close, send 0 | 1: open, recv 0, open, read 0..1",
        ),
        (
            NoWaitForAttaches,
            "session",
            [1, 0, 0],
            "base 1 | 0: write 0..1, close, send 0 | 1: recv 0, open, read 0..1",
        ),
        (
            MergeAcrossOwners,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 0..1, close, send 0 | 1: write 1..2, close, send 1 | 2: recv 0, recv 1, open, read 0..2",
        ),
        (
            RangeAnswerIsWhole,
            "posix",
            [0, 0, 0],
            "base 2 | 0: read 1..2, send 0, recv 1, read 0..1, read 1..2 | 1: recv 0, write 1..2, send 1",
        ),
        (
            BaseNeverAges,
            "session",
            [0, 0, 0],
            "base 2 | 0: read 0..2, send 0, recv 1, open, read 0..2 | 1: recv 0, truncate 1, truncate 2, close, send 1",
        ),
        (
            BaseNeverAges,
            "session",
            [1, 1, 0],
            "base 1 | 0: read 0..1, send 0, recv 1, open, read 0..1 | 1: recv 0, write 0..1, close, send 1",
        ),
        (
            SizeNeverGrows,
            "mpiio",
            [0, 0, 0],
            "base 1 | 0: write 3..4, fsync, send 0 | 1: recv 0, fsync, read 3..4",
        ),
        (
            KeepStale,
            "session",
            [0, 0, 0],
            "base 1 | 0: read 0..1, send 0, recv 1, open, read 0..1 | 1: recv 0, write 0..1, close, send 1",
        ),
        (
            KeepOvertaken,
            "posix",
            [0, 0, 0],
            "base 1 | 0: write 0..1, send 0, recv 1, read 0..1 | 1: recv 0, write 0..1, send 1",
        ),
        (FillOverLocal, "session", [0, 0, 1], "base 1 | 0: write 0..1, read 0..1"),
        (
            FetchedNeverAges,
            "session",
            [0, 0, 1],
            "base 1 | 0: write 0..1, close, send 0 | 1: recv 0, open, read 0..1",
        ),
        (
            FlushWithoutGrant,
            "session",
            [2, 1, 0],
            "base 1 | 0: write 0..1, close, send 0, recv 1, open, read 0..1 | 1: recv 0, open, write 0..1, close, send 1",
        ),
        (
            MarkWithoutGrant,
            "session",
            [1, 1, 0],
            "base 1 | 0: write 0..1, close, write 0..1, close, read 0..1",
        ),
        (
            TruncateIgnoresGrants,
            "session",
            [1, 0, 0],
            "base 1 | 0: write 1..2, close, truncate 1, truncate 2, read 1..2",
        ),
        (TruncateBesideAttaches, "commit", [1, 0, 0], "base 1 | 0: write 0..2, truncate 1, fsync"),
        (
            TruncateKeepsLocal,
            "session",
            [0, 0, 0],
            "base 1 | 0: write 0..3, truncate 1, truncate 3, read 0..3",
        ),
        (WriteAnnouncedLate, "posix", [0, 0, 1], "base 1 | 0: write 0..1, read 0..1"),
        (WriteBesideLock, "session", [1, 1, 0], "base 1 | 0: write 0..1, read 0..1"),
        (AckBeforeRecall, "posix", [0, 0, 0], LEASED),
        (TrustForEver, "posix", [0, 0, 0], LEASED),
        (GrantAfterLook, "posix", [0, 0, 0], LEASED),
        (ForgetRecalls, "posix", [0, 0, 0], LEASED),
        (
            AckBeforeRecall,
            "commit",
            [1, 0, 0],
            "base 2 | 0: write 0..1, fsync, send 0 | 1: read 1..2, recv 0, read 0..1",
        ),
        (
            NoQueryAtOpen,
            "mpiio",
            [0, 0, 0],
            "base 1 | 0: write 0..1, fsync, send 0 | 1: recv 0, open, read 0..1",
        ),
        (
            NotLookedFor,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 0..1, close, send 0 | 1: recv 0, open, read 0..1",
        ),
        (
            GuessesTakeAll,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 0..1, close, send 0 | 1: write 1..2, recv 0, close, open, read 0..1",
        ),
        (
            AgainTakesAll,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 0..2, commit, send 0, close, send 1 | 1: recv 0, open, truncate 1 | 0: recv 1, open, write 0..1",
        ),
        (
            NoTwin,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 0..1, close, send 0, recv 1, open, read 0..1 | 1: recv 0, open, zero 0..1, close, send 1",
        ),
        (
            NotBrought,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 0..1, close, send 0 | 1: recv 0, open, read 0..1",
        ),
        (
            GuessesOvertake,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 0..1, write 2..3, close | 1: write 1..2, restart, open, read 1..2",
        ),
        (
            GuessesOvertake,
            "session",
            [1, 0, 0],
            "base 0 | 0: write 0..1, write 2..3, close | 1: write 1..2, restart, open, read 1..2",
        ),
        (
            LossNotTold,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 0..1, close, send 0 | 1: recv 0, open, read 0..1",
        ),
        (
            AgainNotNoted,
            "session",
            [1, 0, 0],
            "base 0 | 0: write 0..1, close, write 0..1, restart, open, read 0..1",
        ),
        (QuietNotAsked, "posix", [0, 0, 0], QUIET),
        (QuietKept, "posix", [0, 0, 0], QUIET),
        (LapseForgets, "posix", [0, 0, 0], QUIET),
        (
            QuietForEver,
            "posix",
            [0, 0, 0],
            "base 0 | 0: write 0..1, send 0, recv 1, write 0..1, send 2 | 1: recv 0, read 0..1, send 1, recv 2, read 0..1",
        ),
        (
            NewerCountsAsFlushed,
            "posix",
            [1, 0, 0],
            "base 1 | 0: write 0..1, write 0..1, send 0 | 1: recv 0, read 0..1",
        ),
        (
            QuietBesideFlush,
            "posix",
            [1, 0, 0],
            "base 0 | 0: write 0..1, send 0, recv 1, write 1..2, write 0..1, send 2 | 1: recv 0, read 0..1, send 1, recv 2, read 0..1",
        ),
        (SeatNotAsked, "posix", [0, 0, 0], QUIET),
        (
            SeatPassedBy,
            "commit",
            [0, 0, 0],
            "base 0 | 0: recv 0, read 0..1 | 1: write 0..1, fsync, send 0",
        ),
        (
            SeatLeftUntold,
            "posix",
            [0, 0, 0],
            "base 0 | 0: write 0..1, send 0 | 1: recv 0, read 0..1",
        ),
        (
            SeatNotLearned,
            "commit",
            [1, 0, 0],
            "base 1 | 0: send 0 | 1: write 0..1, recv 0, read 0..1",
        ),
        (SeatNotCut, "posix", [0, 0, 0], "base 2 | 0: recv 0, read 1..2 | 1: truncate 1, send 0"),
        (
            WindowsRequireNothing,
            "session",
            [0, 0, 0],
            "base 2 | 0: read 1..2, send 0, recv 1, open, read 1..2 | 1: recv 0, write 1..2, close, send 1",
        ),
        (
            WindowsRequireNothing,
            "session",
            [0, 0, 0],
            "base 0 | 0: write 1..2, close, send 0, recv 1, open, read 1..2 | 1: recv 0, open, write 1..2, close, send 1",
        ),
        (
            WindowsRequireNothing,
            "mpiio",
            [0, 0, 0],
            "base 2 | 0: recv 0, fsync, read 1..2 | 1: write 1..2, fsync, send 0",
        ),
    ]
};

#[test]
fn every_planted_bug_is_caught() {
    for (fault, name, [flushes, evictions, aheads], text) in CANARIES {
        let model = model(name);
        let program: Program = text.parse().unwrap();
        assert!(is_race_free(&program, &model, false), "{name}: {text}");
        let leases = matches!(
            fault,
            Fault::AckBeforeRecall
                | Fault::TrustForEver
                | Fault::GrantAfterLook
                | Fault::ForgetRecalls
        );
        let bounds = match leases {
            _ if fault == Fault::LossNotTold => Bounds::told(flushes, Telling::Losing),
            _ if fault.is_of_seats() => Bounds::seated(flushes, evictions, aheads),
            _ if fault.is_past() => Bounds::past(flushes),
            _ if fault == Fault::WindowsRequireNothing => {
                Bounds::windows(flushes, evictions, aheads)
            }
            // Long enough without splitting them.
            _ if fault == Fault::QuietBesideFlush => {
                Bounds { split: false, ..Bounds::quiet(flushes, evictions, aheads) }
            }
            _ if fault.is_quiet() => Bounds::quiet(flushes, evictions, aheads),
            true => Bounds::leased(flushes, evictions, aheads),
            false => Bounds::split(flushes, evictions, aheads),
        };
        let healthy = explore(&program, &model, bounds, None);
        assert_eq!((healthy.failure, healthy.cut_short), (None, false), "{text}");

        let failure = explore(&program, &model, bounds, Some(fault)).failure;
        let failure = failure.unwrap_or_else(|| panic!("{fault:?} is not caught by {text}"));
        let schedule: Vec<String> = failure.schedule.iter().map(|s| s.to_string()).collect();
        let again = replay(&program, &model, bounds, Some(fault), &schedule.join(" "));
        assert_eq!(again, Err(failure.wrong.clone()), "the printed schedule shows it again");
        assert!(failure.to_string().contains(text), "{failure}");
    }
}

#[test]
fn no_planted_bug_is_forgotten() {
    let planted: HashSet<Fault> = CANARIES.iter().map(|c| c.0).collect();
    for fault in Fault::ALL {
        assert!(planted.contains(&fault), "{fault:?}");
    }
}

/// Why nothing is passed through where reads ask, not even handles that only write and are told of:
/// what one process brings in, another one of the node may just have written over.
#[test]
fn writing_past_the_daemon_is_not_safe_where_reads_ask() {
    let text = "base 0 | 0: truncate 1 | 1: write 0..1, fsync, send 0 | 0: recv 0, zero 0..1";
    let (model, program) = (model("commit"), text.parse::<Program>().unwrap());
    assert!(is_race_free(&program, &model, false));
    let told = Bounds::told(0, Telling::All);
    assert!(explore(&program, &model, told, None).failure.is_some());
    let through = explore(&program, &model, Bounds::split(0, 0, 0), None);
    assert_eq!((through.failure, through.cut_short), (None, false));
}

/// Programs that race do see other things, so race-freeness is not an empty condition.
#[test]
fn races_are_visible() {
    for (name, text) in [
        ("session", "base 1 | 0: write 0..1, close, send 0 | 1: recv 0, read 0..1"),
        ("session", "base 1 | 0: write 0..1, send 0 | 1: recv 0, open, read 0..1"),
        ("commit", "base 1 | 0: write 0..1, send 0 | 1: recv 0, read 0..1"),
        ("mpiio", "base 1 | 0: write 0..1, fsync, send 0 | 1: fsync, recv 0, read 0..1"),
    ] {
        let (model, program) = (model(name), text.parse::<Program>().unwrap());
        assert!(!is_race_free(&program, &model, false), "{name}: {text}");
        let report = explore(&program, &model, Bounds::plain(), None);
        assert!(report.failure.is_some(), "{name}: {text}");
    }
}
