//! Many nodes of one job against one metadata service, which is a process of its own: what they cost
//! it, phase by phase. The nodes are clients in this process; they speak the protocol of daemons, and
//! have neither caches nor mounts, so thousands fit on one machine.
//!
//! * [`pattern`]: who writes which bytes of the shared file, and whether a map says so.
//! * [`service`]: the process, what it has used, its restart.
//! * [`traffic`]: bytes on the connections to it.
//! * [`probe`]: how long it lets another client wait.
//! * [`crowd`]: the clients.
//! * [`phase`]: what there is to run, and what must have run before.
//! * [`stage`]: runs it and measures.
//! * [`report`]: tables and JSON.

pub mod crowd;
pub mod pattern;
pub mod phase;
pub mod probe;
pub mod report;
pub mod service;
pub mod stage;
pub mod traffic;

use ebb_transport::Secure;
use pattern::Pattern;
use phase::Phase;
use rustix::process::{Resource, getrlimit, setrlimit};
use stage::{Measured, Outcome, Stage};
use std::time::Duration;

/// Descriptors beside those of the connections: files of the service, the runtime, the probe.
const OTHER_DESCRIPTORS: u64 = 200;

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Records of each node in the shared file.
    pub records: u64,
    /// How they lie.
    pub pattern: Pattern,
    /// What is run and reported.
    pub phases: Vec<Phase>,
    /// Which connections are encrypted.
    pub secure: Secure,
    /// `--lease` of the service. Nodes trust for half of it, at most 5 s, and send three heartbeats in that time.
    pub lease: Duration,
    /// A phase that takes longer is cut short.
    pub limit: Duration,
    /// How long nothing is done in the idle phase.
    pub idle: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            records: 100,
            pattern: Pattern::Strided,
            phases: Phase::ALL.to_vec(),
            secure: Secure::On,
            lease: Duration::from_secs(10),
            limit: Duration::from_secs(30),
            idle: Duration::from_secs(5),
        }
    }
}

/// Lets this process, and the service that it starts, have as many descriptors as they may.
pub fn raise_descriptors(nodes: u64) -> Result<(), String> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).map_err(|e| format!("RLIMIT_NOFILE: {e}"))?;
    match limit.current {
        Some(most) if most < nodes + OTHER_DESCRIPTORS => Err(format!(
            "{nodes} nodes need {} descriptors, and `ulimit -Hn` is {most}",
            nodes + OTHER_DESCRIPTORS
        )),
        _ => Ok(()),
    }
}

/// Runs all phases with so many nodes; `told` hears of each when it has ended. A phase that was not
/// completed is the last one of its service: what follows would measure something else.
pub async fn run(
    settings: &Settings,
    nodes: usize,
    mut told: impl FnMut(&Measured),
) -> Result<Vec<Measured>, String> {
    let mut rows = Vec::new();
    for wanted in phase::by_service(&settings.phases) {
        let mut stage = Stage::start(settings, nodes).await?;
        for phase in phase::with_needed(&wanted) {
            let measured = stage.run(phase).await;
            let is_done = measured.outcome == Outcome::Done;
            // What only prepares is of interest when it fails.
            if !is_done || wanted.contains(&phase) {
                told(&measured);
                rows.push(measured);
            }
            if !is_done {
                break;
            }
        }
    }
    Ok(rows)
}
