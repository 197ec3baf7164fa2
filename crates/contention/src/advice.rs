//! From the load formulas to a stripe count for one new file, and the reasons in words.
//!
//! Four limits, and the smallest one is the advice: what the file is large enough for, what its
//! writers can keep busy, what leaves the load under [`LOAD_LIMIT`], and what there is. The load
//! limit is the paper's; [`TARGETS_PER_NODE`] and [`BYTES_PER_STRIPE_MIN`] are rules of thumb,
//! not measured here.

use crate::load::{LoadError, check_jobs, check_targets, equal};
use ebb_types::units::Size;

/// Above about this load the bandwidth of each writer falls visibly.
pub const LOAD_LIMIT: f64 = 3.0;

/// Storage targets that one node can keep busy: its network link is a few times as fast as a
/// target.
pub const TARGETS_PER_NODE: u32 = 4;

/// A stripe object that gets fewer bytes than this costs more to make, open and remove than its
/// bandwidth is worth.
pub const BYTES_PER_STRIPE_MIN: u64 = 64 << 20;

/// About one new file, and who else is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Storage targets of the file system.
    pub targets: u32,
    /// Jobs that write to it at the same time, this one included.
    pub jobs: u32,
    /// Files that each of these jobs writes at the same time: 1 for a shared file, the number
    /// of writers for a file for each.
    pub files: u32,
    /// Nodes that write this file.
    pub nodes: u32,
    /// Its size in bytes, as far as known.
    pub file_size: u64,
    /// Bytes of a stripe.
    pub stripe_size: u64,
}

/// What bounds the number of stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The size of the file.
    Size,
    /// How many nodes write it.
    Writers,
    /// The load of the targets.
    Load,
    /// The number of targets.
    Targets,
}

/// A stripe count and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// How many stripes.
    pub stripes: u32,
    /// What decided it.
    pub limit: Limit,
    /// The load when all jobs do the same.
    pub load: f64,
    /// One sentence for each limit, then the result.
    pub reasons: Vec<String>,
}

/// How many stripes the file should have.
pub fn advise(question: &Question) -> Result<Advice, LoadError> {
    let q = question;
    check_targets(q.targets)?;
    check_jobs(q.jobs)?;
    let layouts = layouts(q)?;
    if q.nodes == 0 {
        return Err(LoadError::Nodes);
    }
    if q.stripe_size == 0 {
        return Err(LoadError::StripeSize);
    }
    let by_load = most_under_limit(q.targets, layouts)?;
    // The first of equal limits is named.
    let limits = [
        (Limit::Size, by_size(q)),
        (Limit::Writers, q.nodes.saturating_mul(TARGETS_PER_NODE)),
        (Limit::Targets, q.targets),
        (Limit::Load, by_load),
    ];
    let (limit, stripes) =
        limits.into_iter().min_by_key(|(_, most)| *most).expect("there are four limits");
    let load = equal(q.targets, stripes, layouts)?.load();
    let mut reasons: Vec<String> =
        limits.iter().map(|(limit, most)| in_words(*limit, *most, q, layouts)).collect();
    reasons.push(result_in_words(stripes, load, q));
    Ok(Advice { stripes, limit, load, reasons })
}

/// Files that are striped at the same time, each like a job of the formulas.
fn layouts(q: &Question) -> Result<u32, LoadError> {
    let all = q.jobs.saturating_mul(q.files);
    check_jobs(all)?;
    Ok(all)
}

fn by_size(q: &Question) -> u32 {
    let worth = q.file_size / BYTES_PER_STRIPE_MIN.max(q.stripe_size);
    u32::try_from(worth).unwrap_or(u32::MAX).max(1)
}

/// The most stripes with which `layouts` files stay within the load limit; at least 1. The load
/// grows with the stripes (tested), so that the place can be searched by halves.
fn most_under_limit(targets: u32, layouts: u32) -> Result<u32, LoadError> {
    let (mut good, mut bad) = (1, targets + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if equal(targets, middle, layouts)?.load() <= LOAD_LIMIT {
            good = middle;
        } else {
            bad = middle;
        }
    }
    Ok(good)
}

fn in_words(limit: Limit, most: u32, q: &Question, layouts: u32) -> String {
    match limit {
        Limit::Size => format!(
            "size: {} in stripes of {} is worth {}, at {} or more to each",
            Size(q.file_size),
            Size(q.stripe_size),
            counted(most),
            Size(BYTES_PER_STRIPE_MIN.max(q.stripe_size))
        ),
        Limit::Writers => format!(
            "writers: {} can keep {most} targets busy ({TARGETS_PER_NODE} each)",
            plural(q.nodes, "node")
        ),
        Limit::Load => format!(
            "load: {} of this kind on {} stay within a load of {LOAD_LIMIT} with up to {}",
            plural(layouts, "file"),
            plural(q.targets, "target"),
            counted(most)
        ),
        Limit::Targets => format!("targets: there are {most}"),
    }
}

fn result_in_words(stripes: u32, load: f64, q: &Question) -> String {
    let verdict = if load > LOAD_LIMIT {
        format!(", above {LOAD_LIMIT} even so: fewer files at the same time would help")
    } else {
        String::new()
    };
    format!("with {}, {} give a load of {load:.2}{verdict}", counted(stripes), asked(q))
}

fn asked(q: &Question) -> String {
    match q.files {
        1 => plural(q.jobs, "job"),
        files => format!("{} of {} each", plural(q.jobs, "job"), plural(files, "file")),
    }
}

fn counted(stripes: u32) -> String {
    plural(stripes, "stripe")
}

fn plural(n: u32, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}
