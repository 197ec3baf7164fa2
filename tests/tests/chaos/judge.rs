//! What programs may notice of what was broken in a round: all rules of it are here.
//!
//! An operation may fail when its own daemon was killed; with ENOSPC or EDQUOT while a disk was full; with
//! EIO while something else answered in the place of the service; and, where a node was silent for so long
//! that it lost its locks, with EIO on what is locked, and, from one lease on, on files that sit there. Bytes
//! of other nodes may be out of reach while a daemon is dead, a link is broken or a node is silent. Nothing
//! may ever be wrong, and every operation ends in time.

use crate::faults::Hit;
use ebb_tests::load::{Failure, Work};

/// One operation: a request that takes all its time, a lease of another node, and some.
const OPERATION_MS_MAX: u64 = 45_000;

/// Operations on files that programs of all nodes use.
const COMMON: [&str; 4] = ["count", "hand over", "tell of", "shared"];

/// `may_sit`: files may sit at nodes that have them open past their daemons; whoever compared a program's file last
/// may be silent now.
///
/// # Panics
/// When something happened that nothing in the round explains.
pub fn judge(what: &str, node: usize, work: &Work, hit: &Hit, may_sit: bool) {
    let (ms, longest) = (work.longest_ms, &work.longest);
    assert!(ms <= OPERATION_MS_MAX, "{what}: node {node}: '{longest}' took {ms} ms");
    if let Some(failure) = &work.failure {
        assert!(may_fail(failure, node, hit, may_sit), "{what}: node {node}: {failure:?}");
    }
    for missed in &work.missed {
        let full = is_for_space(missed, hit);
        assert!(full || may_be_out_of_reach(hit), "{what}: node {node}: {missed:?}");
    }
    assert!(
        work.went_back == 0 || !hit.silent.is_empty() || hit.silent_before,
        "{what}: node {node}: a lock was no lock"
    );
}

fn is_for_space(failure: &Failure, hit: &Hit) -> bool {
    // A store into a mapping has no room, either: the kernel has no better word for it.
    hit.was_full && [libc::ENOSPC, libc::EDQUOT, libc::EFAULT].contains(&failure.errno)
}

fn may_fail(failure: &Failure, node: usize, hit: &Hit, may_sit: bool) -> bool {
    let common = COMMON.iter().any(|word| failure.operation.contains(word));
    hit.killed.contains(&node)
        || is_for_space(failure, hit)
        || hit.was_refused && [libc::EIO, libc::EFAULT].contains(&failure.errno)
        || (hit.was_unheard || !hit.silent.is_empty()) && common && failure.errno == libc::EIO
        || may_sit && !hit.silent.is_empty() && is_of_content(failure) && failure.errno == libc::EIO
}

/// Operations on the content of a file, or its size; not on names.
fn is_of_content(failure: &Failure) -> bool {
    let words = ["write", "rewrite", "read", "truncate", "sync", "close", "mapped"];
    words.iter().any(|word| failure.operation.contains(word))
}

fn may_be_out_of_reach(hit: &Hit) -> bool {
    !hit.killed.is_empty()
        || hit.was_lost
        || hit.was_cut
        || hit.was_refused
        || !hit.silent.is_empty()
}
