//! What the service is told at start, and why it may not start.

use crate::journal::JournalError;
use ebb_coordinator::Tenure;
use ebb_transport::{Secure, Token};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// What a service is told.
#[derive(Debug)]
pub struct Config {
    /// The directory that the job's file system overlays.
    pub backing: PathBuf,
    /// Where the journal is; one service at a time.
    pub state_dir: PathBuf,
    /// The secret of the job; without one only this machine is served.
    pub token: Option<Token>,
    /// Which connections must be encrypted.
    pub secure: Secure,
    /// What all nodes must agree on, when the first node shall not decide.
    pub consistency: Option<String>,
    /// A node that is silent for longer counts as gone.
    pub lease: Duration,
    /// How long a node may trust what it was answered, without asking again (at most half of
    /// `lease`); zero: not at all. A node that is gone delays others' changes for so long.
    pub trust: Duration,
    /// A node that is there has so long to publish what it wrote where another one locks: less than
    /// the deadline of who waits. Then the lock fails.
    pub publishes_within: Duration,
    /// How many jobs write to the backing at the same time, this one included. On Lustre the
    /// stripes of new files are chosen from it; without it the directory's defaults are kept.
    pub jobs_hint: Option<u32>,
    /// Above so many inodes, those that are exactly as the backing has them are forgotten, the ones
    /// that were used longest ago first. What the job has made or changed is always known.
    pub inodes_max: usize,
    /// Begin with what so many nodes of the job know, instead of what the state directory has (it is
    /// kept under another name).
    pub rebuild: Option<u32>,
    /// Until when it may answer, where another service can take its place.
    pub tenure: Tenure,
}

impl Config {
    /// The usual lease.
    pub const LEASE: Duration = Duration::from_secs(10);

    /// The usual time of trust.
    pub const TRUST: Duration = Duration::from_secs(5);

    /// The usual time to publish for a lock.
    pub const PUBLISHES_WITHIN: Duration = Duration::from_secs(20);

    /// Inodes that are known at most, as far as they can be forgotten: about 1 GB.
    pub const INODES_MAX: usize = 500_000;

    /// A configuration with the defaults.
    #[must_use]
    pub fn new(backing: impl Into<PathBuf>, state_dir: impl Into<PathBuf>) -> Config {
        Config {
            backing: backing.into(),
            state_dir: state_dir.into(),
            token: None,
            secure: Secure::default(),
            consistency: None,
            lease: Config::LEASE,
            trust: Config::TRUST,
            publishes_within: Config::PUBLISHES_WITHIN,
            jobs_hint: None,
            inodes_max: Config::INODES_MAX,
            rebuild: None,
            tenure: Tenure::default(),
        }
    }
}

/// Why a service does not start, or stopped serving.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The backing directory cannot be used.
    #[error("backing directory {}: {source}", path.display())]
    Backing {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The state belongs to another directory.
    #[error(
        "state directory {} belongs to another backing directory than {}",
        state_dir.display(), backing.display()
    )]
    OtherBacking {
        /// The state directory.
        state_dir: PathBuf,
        /// The backing directory that was asked for.
        backing: PathBuf,
    },
    /// The job runs under another consistency model.
    #[error("this job's consistency is '{had}', not '{wanted}'")]
    Consistency {
        /// The job's.
        had: String,
        /// What was asked for.
        wanted: String,
    },
    /// Without a token everybody who reaches the address could read and change the job's files.
    #[error("refusing to listen on {address} without a job token (only loopback is safe)")]
    NeedsToken {
        /// Where it would have listened.
        address: SocketAddr,
    },
    /// The listener failed.
    #[error("metadata service: {0}")]
    Serve(String),
}
