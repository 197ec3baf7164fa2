//! Races in words.

use crate::{Doubts, Places, Traced};
use ebb_consistency::SyncEvent;
use ebb_consistency::checker::{Missing, Process};
use ebb_consistency::run::Act;
use ebb_consistency::sweep::Party;
use ebb_types::ByteRange;

/// A range of bytes; one that has no end is said so.
pub(crate) fn bytes(range: ByteRange) -> String {
    match range.end() {
        u64::MAX => format!("bytes from {} on", range.start()),
        end => format!("bytes {} to {}", range.start(), end - 1),
    }
}

/// Who a process is.
pub(crate) fn process(traced: &Traced, process: Process) -> String {
    let p = &traced.processes[process.0 as usize];
    let program = p.program.rsplit('/').next().unwrap_or_default();
    match p.rank {
        Some(rank) => format!("rank {rank} (pid {} on {}, {program})", p.pid, p.host),
        None => format!("pid {} on {} ({program})", p.pid, p.host),
    }
}

/// One of two accesses.
pub(crate) fn party(traced: &Traced, places: &Places, party: &Party) -> String {
    let does = match party.act {
        Act::Read => "reads",
        Act::Write => "writes",
        Act::Append => "appends",
    };
    let place = traced.place(party.site);
    let at = places.name(place).map_or(String::new(), |name| format!(" at {name}"));
    format!(
        "{}, record {}: {} {does} {}{at}",
        process(traced, party.process),
        party.step,
        place.call.name(),
        bytes(party.range)
    )
}

fn one_of(events: &[SyncEvent]) -> String {
    events.iter().map(|e| e.name()).collect::<Vec<_>>().join(" or ")
}

/// What is missing between two accesses.
pub(crate) fn missing(missing: &Missing) -> String {
    match missing {
        Missing::Order => {
            "nothing orders them: no message, collective call, lock or wait comes between".to_owned()
        }
        Missing::Publish(events) => format!(
            "they are in order, but what the first one wrote is not published: its process makes no {} of \
             the file after it",
            one_of(events)
        ),
        Missing::Observe(events) => format!(
            "they are in order, but the second process does not look for it: it makes no {} of the file \
             before it",
            one_of(events)
        ),
        Missing::Chain => "they are in order, but the second process looked before the first one had \
                           published: its open (or what else looks) must come after the other's close (or \
                           what else publishes)"
            .to_owned(),
    }
}

/// Reasons to doubt, in words.
pub(crate) fn doubts(doubts: &Doubts) -> Vec<String> {
    let mut words: Vec<String> = doubts.damaged.clone();
    if doubts.unmatched > 0 {
        words.push(format!(
            "{} time(s) the other side of a message, collective call or wait is not in the trace: order may \
             be missing, and races be false",
            doubts.unmatched
        ));
    }
    if doubts.unknown > 0 {
        words.push(format!(
            "{} call(s) of MPI that are not understood (one-sided, intercommunicators, matched probes): \
             order through them is missing, and races may be false",
            doubts.unknown
        ));
    }
    if doubts.silent_tasks > 0 {
        words.push(format!(
            "{} task(s) of a launcher tell nothing of MPI: when they are an MPI program, trace it with \
             `ebb trace --mpicc` and the compiler that built it",
            doubts.silent_tasks
        ));
    }
    words
}
