//! Which metadata service is the job's, and where it is: terms, numbered from 1, each of one service. The newest
//! one counts. They are in a directory that all nodes of the job reach, so that a service can begin on another
//! machine than the one before it, and that one, should it wake up, says nothing any more.
//!
//! * [`term`]: what is known of a term, as bytes, and who holds it.
//! * [`directory`]: terms as files. Taking one is a compare-and-set: `link(2)` gives a number to one only.
//! * [`tenure`]: a service's right to answer. It lasts for a lease after each look that has found no newer term;
//!   whoever takes the next term waits for as long.
//! * [`succession`]: when a standby may take the next term by itself.
//!
//! ```text
//!             claim                      a newer term is seen
//!   (none) ---------> held <-> doubtful ----------------------> over
//!                      |    the last look is older than a lease   |
//!                      +--------------- end ---------------------> ended (a file says so: nobody need wait)
//! ```
//!
//! Nothing here knows what a service answers.

pub mod directory;
pub mod succession;
pub mod tenure;
pub mod term;

pub use directory::{CoordinatorError, Directory};
pub use succession::{Seen, Succession};
pub use tenure::{Ended, Taken, Tenure, take};
pub use term::{Holder, Term};

/// The newest term in a directory; none: no service has come yet, not even to make the directory.
pub fn newest_in(dir: &std::path::Path) -> Result<Option<Term>, CoordinatorError> {
    match Directory::open(dir) {
        Ok(dir) => dir.newest(),
        Err(e) if e.is_not_there() => Ok(None),
        Err(e) => Err(e),
    }
}

/// How a directory of terms is named where an address may stand.
const PREFIX: &str = "dir:";

/// The directory that `dir:DIR` names; none: it is an address, or something else.
#[must_use]
pub fn directory_of(text: &str) -> Option<&std::path::Path> {
    text.strip_prefix(PREFIX).map(std::path::Path::new)
}
