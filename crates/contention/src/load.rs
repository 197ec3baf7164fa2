//! The formulas.

/// Stripes of each rank's log in the log-structured case.
pub const LOG_STRUCTURED_STRIPES: u32 = 2;

/// More targets than any file system has; keeps counts far from overflow.
pub const TARGETS_MAX: u32 = 1_000_000;

/// More jobs (or ranks) than anybody asks about; for the same reason.
pub const JOBS_MAX: u32 = 100_000_000;

/// How a number of jobs uses the targets together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// How many jobs.
    pub jobs: u32,
    /// Targets that at least one job uses; an expected value.
    pub in_use: f64,
    /// Targets that the jobs would use if none were shared: the sum of their stripes.
    pub required: u64,
}

impl Load {
    /// Jobs on a target in use, on average; 0 without jobs.
    #[must_use]
    pub fn load(&self) -> f64 {
        if self.required == 0 { 0.0 } else { self.required as f64 / self.in_use }
    }
}

/// A question that has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No targets, or more than there can be.
    #[error("{targets} targets: from 1 to {TARGETS_MAX} are possible")]
    Targets {
        /// As asked.
        targets: u32,
    },
    /// A job without stripes, or with more of them than targets.
    #[error("{stripes} stripes: from 1 to the number of targets ({targets}) are possible")]
    Stripes {
        /// As asked.
        stripes: u32,
        /// How many there are.
        targets: u32,
    },
    /// No jobs, or more than there can be.
    #[error("{jobs} jobs: from 1 to {JOBS_MAX} are possible")]
    Jobs {
        /// As asked.
        jobs: u32,
    },
    /// Stripes of no bytes.
    #[error("a stripe size of 0 bytes")]
    StripeSize,
    /// Nobody writes.
    #[error("a file that 0 nodes write")]
    Nodes,
}

pub(crate) fn check_targets(targets: u32) -> Result<(), LoadError> {
    match targets {
        1..=TARGETS_MAX => Ok(()),
        _ => Err(LoadError::Targets { targets }),
    }
}

pub(crate) fn check_jobs(jobs: u32) -> Result<(), LoadError> {
    if (1..=JOBS_MAX).contains(&jobs) { Ok(()) } else { Err(LoadError::Jobs { jobs }) }
}

fn check(targets: u32, stripes: u32) -> Result<(), LoadError> {
    check_targets(targets)?;
    let possible = (1..=targets).contains(&stripes);
    if possible { Ok(()) } else { Err(LoadError::Stripes { stripes, targets }) }
}

/// The load after each job of a list of unequal ones, by the recurrence.
pub fn unequal(targets: u32, stripes: &[u32]) -> Result<Vec<Load>, LoadError> {
    check_targets(targets)?;
    let jobs = u32::try_from(stripes.len()).unwrap_or(u32::MAX);
    check_jobs(jobs)?;
    let mut now = Load { jobs: 0, in_use: 0.0, required: 0 };
    stripes
        .iter()
        .map(|r| {
            check(targets, *r)?;
            let r_jobs = f64::from(*r);
            now.jobs += 1;
            now.in_use += r_jobs - r_jobs * now.in_use / f64::from(targets);
            now.required += u64::from(*r);
            Ok(now)
        })
        .collect()
}

/// The load of `jobs` jobs with the same number of stripes, by the closed form.
pub fn equal(targets: u32, stripes: u32, jobs: u32) -> Result<Load, LoadError> {
    check(targets, stripes)?;
    check_jobs(jobs)?;
    let d = f64::from(targets);
    let untouched = (1.0 - f64::from(stripes) / d).powf(f64::from(jobs));
    Ok(Load { jobs, in_use: d - d * untouched, required: u64::from(stripes) * u64::from(jobs) })
}

/// The load of a log-structured layout that `ranks` ranks write; on a single target they can
/// have no more than one stripe each.
pub fn log_structured(targets: u32, ranks: u32) -> Result<Load, LoadError> {
    check_targets(targets)?;
    equal(targets, LOG_STRUCTURED_STRIPES.min(targets), ranks)
}
