//! What a directory of trace files says: [`load`] reads it twice, first for who took part, then call by call
//! in an order in which they could have happened, and gives a [`Traced`]; that has the races under each
//! model, counted requests, and words and pages for people.
//!
//! What a race is, `ebb_consistency` decides. Nothing here knows daemons, mounts or services.

mod advice;
mod html;
mod meet;
mod merge;
mod places;
mod report;
mod requests;
mod survey;
mod words;

pub use advice::{Advice, advise};
pub use html::page;
pub use places::Places;
pub use report::{Checked, check, json, text};
pub use requests::Requests;
pub use survey::{Counts, Unreadable, count};

use ebb_consistency::sweep::Sorted;
use ebb_consistency::{Model, run::Site};
use std::path::Path;
use std::sync::Arc;

/// Which processes count as on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// Each task of a launcher with its children; processes of none by their host. A launcher may put
    /// its tasks anywhere.
    Tasks,
    /// Those of one host, as it was when it was traced.
    Hosts,
    /// Nobody with anybody, as in the papers.
    Each,
}

/// A file of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedFile {
    /// A path by which it was opened.
    pub path: Vec<u8>,
}

/// A process of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedProcess {
    /// Its host.
    pub host: String,
    /// Its number there.
    pub pid: u32,
    /// The last program that it ran.
    pub program: String,
    /// Its rank in an MPI job, if it is of one.
    pub rank: Option<u32>,
}

/// A place in a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Which call is made there.
    pub call: ebb_trace_format::Call,
    /// The program or library; empty where that is not known.
    pub object: Vec<u8>,
    /// The return address in it.
    pub offset: u64,
}

/// What was noticed on the way: reasons why the verdict may be wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Doubts {
    /// Files that end early or are damaged, in words.
    pub damaged: Vec<String>,
    /// Causes that are not in the trace (a message that nobody sent, a call in which not all took part).
    pub unmatched: u64,
    /// Calls of MPI that are not understood.
    pub unknown: u64,
    /// Tasks of a launcher that tell nothing of MPI.
    pub silent_tasks: usize,
    /// MPI_File_sync calls that did not reach the file system.
    pub idle_syncs: u64,
}

/// A trace, read and put in order.
#[derive(Debug)]
pub struct Traced {
    /// Its processes.
    pub processes: Vec<TracedProcess>,
    /// Its files.
    pub files: Vec<TracedFile>,
    /// Where accesses were made from: [`Site`]s are indexes.
    pub places: Vec<Place>,
    /// The accesses, as they are swept.
    pub sorted: Sorted,
    /// What each model would ask of the service.
    pub requests: Vec<Requests>,
    /// Records read.
    pub records: u64,
    /// Reasons to doubt.
    pub doubts: Doubts,
    /// Where each process was when: for time lines.
    pub(crate) lines: merge::Lines,
}

impl Traced {
    /// The place of a site.
    #[must_use]
    pub fn place(&self, site: Site) -> &Place {
        &self.places[site.0 as usize]
    }
}

/// Reads the traces of a directory. `models` are those whose requests are counted.
pub fn load(dir: &Path, nodes: Nodes, models: &[Arc<Model>]) -> Result<Traced, Unreadable> {
    let survey = survey::Survey::of(dir)?;
    merge::Merge::new(survey, nodes, models).all()
}

#[cfg(test)]
mod tests;
