//! The mount options as flags. They only carry what was written: form and meaning are checked
//! together with the config file and the environment (`settings`).

use crate::exit::Failure;
use crate::settings::{Layer, Settings, file};
use clap::Args;
use std::path::PathBuf;

/// Options of `mount`, `run` and `config`.
#[derive(Args, Clone, Debug, Default)]
pub struct MountOptions {
    /// When other nodes see what is written here: posix, commit, session, mpiio, romio, or a model
    /// that the config file defines [default: session]
    #[arg(long, value_name = "MODEL")]
    pub consistency: Option<String>,
    /// Another model for the paths that match; may be repeated, the first match wins
    #[arg(long, value_name = "GLOB=MODEL")]
    pub rule: Vec<String>,
    /// Metadata service to join, or dir:DIR, where it says where it is (`ebb meta --coordinator`)
    /// [default: an embedded one is started; `ebb status` shows its address for others to join]
    #[arg(long, value_name = "HOST:PORT|dir:DIR")]
    pub meta: Option<String>,
    /// Node-local buffer directory [default: one per user and mount under $TMPDIR]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<String>,
    /// Cap of the buffer, in B, KiB, MiB, GiB, TiB (like 200GiB) [default: 80 % of the file
    /// system that holds it]
    #[arg(long, value_name = "SIZE")]
    pub cache_size: Option<String>,
    /// Where an embedded metadata service keeps its journal [default: CACHE/meta]
    #[arg(long, value_name = "DIR")]
    pub state: Option<String>,
    /// This node's name, unique in the job [default: the host name and a mark of the mount point]
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// Address where peers reach this node, and where an embedded metadata service listens on
    /// the next free port; anything but loopback needs --token-file [default: 127.0.0.1:0]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// When dirty bytes go to the backing: idle, immediate, close, watermark, periodic or end
    /// [default: idle]
    #[arg(long, value_name = "WHEN")]
    pub flush: Option<String>,
    /// How long applications must pause before the idle policy flushes, in ms, s, m, h; or
    /// adaptive: learned from their rhythm, with adaptive:TIME as what it falls back to
    /// [default: 1s]
    #[arg(long, value_name = "TIME|adaptive")]
    pub wait_interval: Option<String>,
    /// Threads that copy to the backing [default: 8]
    #[arg(long, value_name = "N")]
    pub flush_threads: Option<String>,
    /// Most bytes per second of background flushing, in B, KiB, MiB, GiB, TiB (like 200MiB);
    /// drains are not held back [default: no cap]
    #[arg(long, value_name = "SIZE")]
    pub flush_bandwidth: Option<String>,
    /// CPU niceness of background flushing, 0 to 19 [default: 10]
    #[arg(long, value_name = "N")]
    pub flush_nice: Option<String>,
    /// How the disk scheduler ranks background flushing: normal, low (last in line) or idle (only
    /// when the disk has nothing else to do) [default: low]
    #[arg(long, value_name = "RANK")]
    pub flush_io: Option<String>,
    /// From where a drain reads back what it wrote, to compare it: memory (the kernel's, after the
    /// fsync) or storage (everything is read once from the backing) [default: memory]
    #[arg(long, value_name = "WHERE")]
    pub verify: Option<String>,
    /// Share of the buffer, in %, where watermark flushing stops [default: 10%]
    #[arg(long, value_name = "SHARE")]
    pub low_watermark: Option<String>,
    /// Share of the buffer, in %, where watermark flushing starts [default: 50%]
    #[arg(long, value_name = "SHARE")]
    pub high_watermark: Option<String>,
    /// Which bytes that are on the backing leave a full buffer first: lru (used longest ago), mru
    /// (used last: for reading more than fits, again and again), fifo (oldest) or lfu (seldom
    /// used) [default: lru]
    #[arg(long, value_name = "WHICH")]
    pub evict: Option<String>,
    /// Jobs that write to the backing at the same time, this one included: on Lustre the stripe
    /// count of new files is chosen from it (`ebb ost-load --advise`). For the embedded metadata
    /// service; with --meta, give it to `ebb meta` [default: striping is left to the backing]
    #[arg(long, value_name = "N")]
    pub jobs_hint: Option<String>,
    /// The embedded metadata service forgets inodes that are exactly as the backing has them when it
    /// knows more than so many; with --meta, give it to `ebb meta` [default: 500000]
    #[arg(long, value_name = "N")]
    pub inodes_max: Option<String>,
    /// Closed files without unflushed bytes that this node remembers at most; the cached bytes of
    /// others are given up, those that were used longest ago first [default: 100000]
    #[arg(long, value_name = "N")]
    pub files_max: Option<String>,
    /// What fsync promises besides the model: local (on this node's NVMe), backing or none
    /// [default: local]
    #[arg(long, value_name = "WHERE")]
    pub durability: Option<String>,
    /// Keep sums of what is written into the cache, and look at them before it is flushed or lent:
    /// on or off [default: on]
    #[arg(long, value_name = "WHEN")]
    pub checksums: Option<String>,
    /// How bytes come from other nodes: tcp, rdma (not encrypted; fails where this node has none,
    /// and goes over TCP to nodes that have none) or auto (rdma where it is there and nothing is to be
    /// encrypted) [default: auto]
    #[arg(long, value_name = "KIND")]
    pub transport: Option<String>,
    /// The RDMA device: its name, NAME:GID with the place of an address in its table, or one of its
    /// IP addresses [default: the first device with an address of RoCE v2]
    #[arg(long, value_name = "DEVICE")]
    pub rdma_device: Option<String>,
    /// The job's shared secret, made by `ebb token`
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<String>,
    /// Which connections to peers and to the metadata service are encrypted, with keys made of the
    /// job's secret: on (all), loopback (all but those over loopback, where the kernel tells whose
    /// process is at the other end) or off (none); the same for all of a job [default: loopback]
    #[arg(long, value_name = "WHICH")]
    pub secure: Option<String>,
    /// The daemon's log [default: CACHE/ebb.log]
    #[arg(long, value_name = "FILE")]
    pub log: Option<String>,
    /// What is logged: error, warn, info, debug, trace, or a filter like info,ebb_flusher=debug
    /// [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Let other users see the mount (for others than root: user_allow_other in /etc/fuse.conf).
    /// Mode bits decide; where the backing has an ACL they show no more than it grants, and who is
    /// named in it may get less
    #[arg(long)]
    pub allow_other: bool,
    /// Deadline of every request to the metadata service and to peers, in ms, s, m, h
    /// [default: 10s]
    #[arg(long, value_name = "TIME")]
    pub request_timeout: Option<String>,
    /// An operation that takes longer is called stuck in the log and in `ebb status`, in ms, s, m,
    /// h [default: eight times the request timeout]
    #[arg(long, value_name = "TIME")]
    pub stuck_after: Option<String>,
    /// How long the daemon drains when a signal ends it, and `ebb run` at its end, in ms, s, m, h
    /// [default: 10m]
    #[arg(long, value_name = "TIME")]
    pub stop_timeout: Option<String>,
    /// FUSE event loops [default: 2]
    #[arg(long, value_name = "N")]
    pub fuse_threads: Option<String>,
    /// On how many nodes what is not on the backing yet is kept: 1, or 2 (each sync event also
    /// copies it to a partner node before it returns, so that the loss of one node loses nothing)
    /// [default: 1]
    #[arg(long, value_name = "N")]
    pub replicas: Option<String>,
    /// Whether a supervisor starts another daemon when this one ends unexpectedly, and open files
    /// go on: auto (where the kernel can: Linux 6.9; not with --io-path auto or passthrough) or off
    /// [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub supervise: Option<String>,
    /// How long operations wait for another daemon before they fail, in ms, s, m, h
    /// [default: 30s]
    #[arg(long, value_name = "TIME")]
    pub restart_timeout: Option<String>,
    /// For measurements: ask the metadata service at every event that the model names, without
    /// leases on this node
    #[arg(long)]
    pub naive: bool,
    /// Which way reads and writes go: daemon (through the daemon, always), auto (past it, by kernel
    /// passthrough, where that is right and the machine can; writes only where --cache-size is about
    /// the size of the disk) or passthrough (the same, but a machine that cannot is an error)
    /// [default: daemon]
    #[arg(long, value_name = "WAY")]
    pub io_path: Option<String>,
    /// With --io-path auto or passthrough: whether the kernel is asked to tell which bytes are written
    /// past the daemon, so that files with content can be, too: auto (where it can: ext4 or xfs, root,
    /// Linux 6.12), on (a machine that cannot is an error) or off (what was written is looked for)
    /// [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub tracker: Option<String>,
    /// Config file (TOML) [default: $EBB_CONFIG, else ~/.config/ebb/config.toml if present]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

impl MountOptions {
    fn layer(self) -> Layer {
        let single = [
            ("consistency", self.consistency),
            ("meta", self.meta),
            ("cache", self.cache),
            ("cache-size", self.cache_size),
            ("state", self.state),
            ("node", self.node),
            ("listen", self.listen),
            ("flush", self.flush),
            ("wait-interval", self.wait_interval),
            ("flush-threads", self.flush_threads),
            ("flush-bandwidth", self.flush_bandwidth),
            ("flush-nice", self.flush_nice),
            ("flush-io", self.flush_io),
            ("verify", self.verify),
            ("low-watermark", self.low_watermark),
            ("high-watermark", self.high_watermark),
            ("evict", self.evict),
            ("jobs-hint", self.jobs_hint),
            ("inodes-max", self.inodes_max),
            ("files-max", self.files_max),
            ("durability", self.durability),
            ("checksums", self.checksums),
            ("transport", self.transport),
            ("rdma-device", self.rdma_device),
            ("token-file", self.token_file),
            ("secure", self.secure),
            ("log", self.log),
            ("log-level", self.log_level),
            ("allow-other", self.allow_other.then(|| "true".to_owned())),
            ("request-timeout", self.request_timeout),
            ("stuck-after", self.stuck_after),
            ("stop-timeout", self.stop_timeout),
            ("fuse-threads", self.fuse_threads),
            ("replicas", self.replicas),
            ("supervise", self.supervise),
            ("restart-timeout", self.restart_timeout),
            ("naive", self.naive.then(|| "true".to_owned())),
            ("io-path", self.io_path),
            ("tracker", self.tracker),
        ];
        let rules = (!self.rule.is_empty()).then_some(("rule", self.rule));
        let one = |(key, value): (_, Option<String>)| value.map(|v| (key, vec![v]));
        single.into_iter().filter_map(one).chain(rules).collect()
    }

    /// The effective settings of config file, environment and these flags.
    pub fn resolve(self) -> Result<Settings, Failure> {
        let mut settings = Settings::new();
        if let Some(path) = file::locate(self.config.as_deref()) {
            file::load(&path, &mut settings)?;
        }
        settings.set_from_env(std::env::vars_os())?;
        settings.set_from_flags(self.layer())?;
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::keys::KEYS;
    use clap::CommandFactory;

    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        options: MountOptions,
    }

    /// A key without a flag, or a flag that the layer forgets, is found here.
    #[test]
    fn every_key_has_a_flag_that_reaches_its_layer() {
        let command = Flags::command();
        for key in &KEYS {
            let flag = format!("--{}", key.name);
            assert!(command.get_arguments().any(|a| a.get_long() == Some(key.name)), "{flag}");
            let value = match key.form {
                crate::settings::keys::Form::Switch => vec!["ebb".to_owned(), flag],
                _ => vec!["ebb".to_owned(), flag, "x".to_owned()],
            };
            let parsed = <Flags as clap::Parser>::try_parse_from(value).unwrap();
            let layer = parsed.options.layer();
            assert_eq!(layer.len(), 1, "{}", key.name);
            assert_eq!(layer[0].0, key.name);
        }
    }
}
