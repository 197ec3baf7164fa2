//! Claims of bytes by a writer whose exact writes are not known: the kernel wrote for it
//! (passthrough), and all there is to see is which blocks of its cache file hold data now. Pure
//! rules; how the blocks are found and who is asked is the daemon's business.
//!
//! # The parts of a file that is written past the daemon
//!
//! At a sync event the daemon looks at the cache file and knows for each byte what it was at the
//! event before ([`crate::FileView`] says how it is held):
//!
//! * *absent* (a hole then, zeros for everybody this node has heard of): where there is data now,
//!   somewhere in each block something was written. These blocks are claimed as *guessed*.
//! * *owned* (attached by this node before): perhaps written again; claimed *again* when anything
//!   was written since.
//! * *clean* (fetched from others meanwhile): the daemon kept a twin of what it fetched; what
//!   differs from it was written here, exactly ([`changed_runs`]).
//! * *dirty*: known already.
//!
//! The service grants a guessed block where nobody else has the bytes ([`Claim::Guessed`]: they are
//! this node's, or unowned zeros), and an again-claim only where they are still this node's
//! ([`Claim::Again`]). What it refuses is *contested*. Of contested guessed bytes exactly those that
//! are not zero are attached, whoever has them ([`changed_runs`] against nothing); contested again
//! bytes are left to their new owner.
//!
//! # Why this is exact
//!
//! Let the model's chain end with an operation of the second process
//! ([`crate::Msc::ends_with_observation`]), let the program be race-free, and let every observation
//! of a node (a query) first attach what the node wrote, and then bring what it shows into the
//! cache file before it returns.
//!
//! 1. *A byte that was not written and is claimed.* It is zero here, and was zero or this node's for
//!    everybody when it was granted, so the claim changes no value. Another node that wrote the byte
//!    takes it later: by name if it knows its writes, else because its own byte is not zero; and
//!    if it wrote a zero there, a zero is what is there. Nor does the claim make longer a file that
//!    another node has cut and this one has not heard of: that is refused.
//! 2. *A guessed byte that was written and is not claimed.* It is zero and another node N has it. If
//!    N wrote it too, the two writes are in order. N's first: this node observed it before its own
//!    write, so the byte was clean, not absent. This node's first: N wrote after it, N's stands. If
//!    N did not write it, N's claim was a guessed one, and its byte is zero as well.
//! 3. *A guessed byte that was written, is not zero, and takes the byte from N.* Had N written it
//!    before, it would have been observed and not be absent; had N written it after observing
//!    ours, ours would have been published before, and be owned, not guessed. So N's is a guess.
//! 4. *An again byte that N has now.* N took it by name or with a byte that is not zero: N wrote it.
//!    This node has not observed that (the byte would be clean), so it has not written it since,
//!    and N's stands.
//! 5. *A truncate by N* takes bytes from this node without an owner to show. Again-claims are not
//!    granted there, so old bytes do not come back.
//! 6. *A clean byte* that equals its twin was not written, or written with the value that it had:
//!    any other write between the observation and ours would be a race.
//!
//! # A node that dies
//!
//! A node that synced bytes and died before it published them has them in its journal, and the
//! daemon that takes its cache over asks which of them were overtaken since. A claim of a whole
//! block overtakes nothing for certain: the claimant may never have written there. The service
//! remembers what was published by a claim ([`crate::FileState::claim`]), also when the bytes went to
//! the backing, and when they had changed before. Where a claim is all that came since, what is there
//! now is looked at: a zero is no byte of the claimant's (or one that the program raced for), so the synced
//! byte comes back; anything else was written, and the synced byte is kept aside. By rule 2 a
//! program that follows its model never gets there: had the claimant written the byte, then before
//! this node saw it, and it would not be absent here, or after this node published it. Own
//! bytes that were published, flushed and written again past the daemon are noted at every sync, since a
//! journal knows nothing of flushed bytes.
//!
//! Under posix and commit the chain may end with a message alone: another node writes 5 and
//! commits, this one learns of it from the program and overwrites with 0 without ever asking.
//! Step 2 fails. There a claim is right only for a node that nobody else can write beside, for the
//! whole time of the open.
//!
//! The explorer runs every small program of this kind through every schedule
//! (`explore/past.rs`), and `tests/tests/past/passthrough.rs` tries this on real mounts: several nodes that change each other's
//! blocks in turn, with zeros, cuts and mappings, against an array.

use crate::model::Model;
use ebb_types::{ByteRange, Version};

/// Size of the blocks in which a file system tells data from holes.
pub const BLOCK: u64 = 4096;

/// What a claim of bytes asks of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Claim {
    /// Attach what nobody else has: unowned zeros and what is the claimant's. Not what changed after
    /// the version that the claimant knew when it looked: where somebody has cut the file since, zeros
    /// that nobody wrote would make it long again. (Zero: not told.)
    Guessed {
        /// That version.
        known: Version,
    },
    /// Attach what is the claimant's still.
    Again,
}

/// May several nodes write one file through the kernel at once under this model, and claim blocks
/// afterwards?
#[must_use]
pub fn shared_claims_are_exact(model: &Model) -> bool {
    model.msc().ends_with_observation()
}

/// The whole blocks that `segment` touches, up to the size of the file.
#[must_use]
pub fn blocks_of(segment: ByteRange, size: u64) -> ByteRange {
    let start = segment.start() / BLOCK * BLOCK;
    let end = segment.end().checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX).min(size);
    ByteRange::new(start, if segment.is_empty() { start } else { end })
}

/// The runs of bytes in which `now` differs from `then`, as ranges of a file in which both begin
/// at `at`. Where `then` is shorter it counts as zeros.
#[must_use]
pub fn changed_runs(at: u64, now: &[u8], then: &[u8]) -> Vec<ByteRange> {
    let mut runs = Vec::new();
    let mut i = 0;
    while i < now.len() {
        if same(now, then, i, WORD) {
            i += WORD;
            continue;
        }
        if same(now, then, i, 1) {
            i += 1;
            continue;
        }
        let start = i;
        while i < now.len() && !same(now, then, i, 1) {
            i += 1;
        }
        runs.push(ByteRange::new(at + start as u64, at + i as u64));
    }
    runs
}

/// Most of what is compared is equal: words are faster than bytes.
const WORD: usize = 16;

fn same(now: &[u8], then: &[u8], i: usize, n: usize) -> bool {
    let Some(new) = now.get(i..i + n) else { return false };
    match then.get(i..i + n) {
        Some(old) => new == old,
        None => (0..n).all(|k| new[k] == then.get(i + k).copied().unwrap_or(0)),
    }
}

#[cfg(test)]
#[path = "claim_tests.rs"]
mod tests;
