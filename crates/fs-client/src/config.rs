//! Everything a daemon is told at start, already checked for form. The command line makes it;
//! nothing here reads files or the environment.

pub use crate::evict::EvictPolicy;
pub use ebb_flusher::{IoClass, PolicyKind, ReadBack, Waiting};
use ebb_transport::Secure;
use ebb_types::units::{Percent, Size};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// What `fsync` promises besides what the consistency model says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The bytes are on this node's NVMe.
    Local,
    /// The bytes are on the backing.
    Backing,
    /// Nothing: fsync is only a synchronisation call.
    None,
}

/// Which way reads and writes of applications go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoMode {
    /// Past the daemon where that is right and the machine can.
    Auto,
    /// The same; a machine that cannot is an error.
    Passthrough,
    /// Through the daemon, always.
    #[default]
    Daemon,
}

/// Whether the kernel is asked to tell what is written past the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrackerMode {
    /// Where it can.
    #[default]
    Auto,
    /// The same; a machine that cannot is an error.
    On,
    /// Never: what was written is looked for.
    Off,
}

/// How bytes come from other nodes; see [`crate::carrier`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// Over RDMA where it is there and nothing is to be encrypted.
    Auto,
    /// Over TCP.
    #[default]
    Tcp,
    /// Over RDMA; a node that has none is an error.
    Rdma,
}

fn usual_nice() -> i32 {
    ebb_flusher::Options::default().nice
}

/// One `--rule GLOB=MODEL`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Matches paths relative to the mount point.
    pub glob: String,
    /// Name of a model.
    pub model: String,
}

/// The configuration of one daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountConfig {
    /// The backing directory, absolute.
    pub backing: PathBuf,
    /// Where it is mounted, absolute.
    pub mountpoint: PathBuf,
    /// The job's model.
    pub consistency: String,
    /// Models of single paths; the first match wins.
    pub rules: Vec<Rule>,
    /// User-defined models: the text of the config file's `[models]` tables, or empty.
    pub models_toml: String,
    /// The metadata service to join; none: an embedded one is started.
    pub meta: Option<String>,
    /// Node-local buffer.
    pub cache: PathBuf,
    /// Cap of the buffer; none: 80 % of the file system that holds it.
    pub cache_size: Option<Size>,
    /// Journal of the embedded metadata service.
    pub state: PathBuf,
    /// This node's name, unique in the job.
    pub node: String,
    /// Where peers reach this node, and where an embedded service listens (the next free port
    /// when it names port 0).
    pub listen: String,
    /// When dirty bytes go to the backing.
    pub flush: PolicyKind,
    /// How long the applications must pause before the idle policy flushes.
    #[serde(with = "millis")]
    pub wait_interval: Duration,
    /// Whether that is learned from the applications' rhythm.
    #[serde(default)]
    pub waiting: Waiting,
    /// Threads that copy to the backing.
    pub flush_threads: usize,
    /// Most bytes per second of background flushing; none: no cap. Drains are not held back.
    #[serde(default)]
    pub flush_bandwidth: Option<Size>,
    /// CPU niceness of the threads that flush in the background.
    #[serde(default = "usual_nice")]
    pub flush_nice: i32,
    /// How the disk scheduler ranks them.
    #[serde(default)]
    pub flush_io: IoClass,
    /// From where a drain reads back what it wrote.
    #[serde(default)]
    pub verify: ReadBack,
    /// Where watermark flushing stops.
    pub low_watermark: Percent,
    /// Where watermark flushing starts.
    pub high_watermark: Percent,
    /// Which clean bytes leave a full buffer first.
    #[serde(default)]
    pub evict: EvictPolicy,
    /// What fsync promises.
    pub durability: Durability,
    /// File with the job's secret.
    pub token_file: Option<PathBuf>,
    /// Which connections are encrypted.
    #[serde(default, with = "word")]
    pub secure: Secure,
    /// How bytes come from other nodes.
    #[serde(default)]
    pub transport: Carrier,
    /// Which RDMA device, or at which address; none: the first that has one.
    #[serde(default)]
    pub rdma_device: Option<String>,
    /// Let other users see the mount.
    pub allow_other: bool,
    /// Deadline of every remote request.
    #[serde(with = "millis")]
    pub request_timeout: Duration,
    /// An operation that takes longer is stuck; none: eight times the deadline of a request.
    #[serde(default)]
    pub stuck_after: Option<Duration>,
    /// FUSE event loops.
    pub fuse_threads: usize,
    /// Above so many files, closed ones without unflushed bytes are forgotten.
    pub files_max: usize,
    /// Ask the service at every event of the model, without leases: for measurements.
    #[serde(default)]
    pub naive: bool,
    /// Whether reads and writes may pass the daemon.
    #[serde(default)]
    pub io_path: IoMode,
    /// Whether the kernel is asked to tell what is written past the daemon.
    #[serde(default)]
    pub tracker: TrackerMode,
    /// Whether sums are kept of what is written into the cache, and looked at when it leaves.
    #[serde(default = "yes")]
    pub checksums: bool,
    /// On how many nodes unflushed bytes are: 1, or 2 (also with a partner).
    #[serde(default = "one")]
    pub replicas: u32,
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

/// Values of other crates as the word that stands for them.
mod word {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Display;
    use std::str::FromStr;

    pub fn serialize<T: Display, S: Serializer>(value: &T, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(value)
    }

    pub fn deserialize<'de, T, D>(d: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}

/// Durations as whole milliseconds, for status and hand-over files.
mod millis {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::time::Duration;

    pub fn serialize<S: Serializer>(d: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(d.as_millis() as u64)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        u64::deserialize(d).map(Duration::from_millis)
    }
}
