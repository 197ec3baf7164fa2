//! From effective settings to what one daemon is told: fills in the computed defaults. Whether
//! the machine agrees with the plan is asked by `checks.rs`.

use crate::exit::{Context, Failure};
use crate::mounts;
use crate::settings::Settings;
use crate::settings::wait::WaitInterval;
use ebb_fs_client::config::{MountConfig, Rule};
use ebb_types::units::Span;
use serde::{Deserialize, Serialize};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Everything that a daemon process needs to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// For the daemon itself.
    pub config: MountConfig,
    /// Its log; none: `ebb.log` in the cache, or standard error in the foreground.
    pub log: Option<PathBuf>,
    /// What is logged.
    pub log_level: String,
    /// Jobs that write to the backing at the same time, for an embedded metadata service.
    #[serde(default)]
    pub jobs_hint: Option<u32>,
    /// Inodes that an embedded service knows at most, as far as it can forget some.
    pub inodes_max: usize,
    /// How long it drains when a signal ends it.
    pub stop_timeout: Span,
    /// Another daemon goes on when this one ends unexpectedly.
    #[serde(default)]
    pub supervise: bool,
    /// How long operations wait for it.
    pub restart_timeout: Span,
    /// True when the state directory is Ebb's own choice and may be taken away at a clean end.
    pub own_state: bool,
}

impl Plan {
    /// The plan for mounting `backing` at `mountpoint`.
    pub fn new(settings: &Settings, backing: &Path, mountpoint: &Path) -> Result<Plan, Failure> {
        let backing = std::path::absolute(backing).or_usage(backing.display())?;
        let mountpoint = mounts::resolve(mountpoint)
            .or_usage(format!("mount point {}", mountpoint.display()))?;
        let cache = match path(settings, "cache")? {
            Some(dir) => dir,
            None => default_cache(&mountpoint)?,
        };
        let state = path(settings, "state")?;
        let wait: WaitInterval = required(settings, "wait-interval")?;
        let config = MountConfig {
            consistency: required(settings, "consistency")?,
            rules: settings.value("rule").parts.iter().filter_map(|r| rule(r)).collect(),
            models_toml: settings.models_toml.clone(),
            meta: settings.text("meta").map(str::to_owned),
            cache_size: parsed(settings, "cache-size")?,
            state: state.clone().unwrap_or_else(|| cache.join("meta")),
            cache,
            node: settings.text("node").map_or_else(|| default_node(&mountpoint), str::to_owned),
            listen: required(settings, "listen")?,
            flush: from_word(&required::<String>(settings, "flush")?)?,
            wait_interval: wait.interval,
            waiting: wait.waiting,
            flush_threads: required(settings, "flush-threads")?,
            flush_bandwidth: parsed(settings, "flush-bandwidth")?,
            flush_nice: required(settings, "flush-nice")?,
            flush_io: from_word(&required::<String>(settings, "flush-io")?)?,
            verify: from_word(&required::<String>(settings, "verify")?)?,
            low_watermark: required(settings, "low-watermark")?,
            high_watermark: required(settings, "high-watermark")?,
            evict: from_word(&required::<String>(settings, "evict")?)?,
            durability: from_word(&required::<String>(settings, "durability")?)?,
            checksums: required::<String>(settings, "checksums")? == "on",
            token_file: path(settings, "token-file")?,
            secure: required(settings, "secure")?,
            transport: from_word(&required::<String>(settings, "transport")?)?,
            rdma_device: settings.text("rdma-device").map(str::to_owned),
            allow_other: required(settings, "allow-other")?,
            request_timeout: span(settings, "request-timeout")?,
            stuck_after: parsed::<Span>(settings, "stuck-after")?.map(|s| s.0),
            fuse_threads: required(settings, "fuse-threads")?,
            files_max: required(settings, "files-max")?,
            naive: required(settings, "naive")?,
            io_path: from_word(&required::<String>(settings, "io-path")?)?,
            tracker: from_word(&required::<String>(settings, "tracker")?)?,
            replicas: required(settings, "replicas")?,
            backing,
            mountpoint,
        };
        Ok(Plan {
            config,
            log: path(settings, "log")?,
            log_level: required(settings, "log-level")?,
            jobs_hint: parsed(settings, "jobs-hint")?,
            inodes_max: required(settings, "inodes-max")?,
            stop_timeout: Span(span(settings, "stop-timeout")?),
            // An heir would not know what was written past the daemon before it.
            supervise: settings.text("supervise") == Some("auto")
                && settings.text("io-path") == Some("daemon"),
            restart_timeout: Span(span(settings, "restart-timeout")?),
            own_state: state.is_none(),
        })
    }

    /// Where a daemon in the background logs.
    #[must_use]
    pub fn log_file(&self) -> PathBuf {
        self.log.clone().unwrap_or_else(|| self.config.cache.join("ebb.log"))
    }
}

fn parsed<T: FromStr>(settings: &Settings, key: &str) -> Result<Option<T>, Failure>
where
    T::Err: std::fmt::Display,
{
    settings.text(key).map(|text| text.parse().or_usage(settings.named(key))).transpose()
}

fn required<T: FromStr>(settings: &Settings, key: &str) -> Result<T, Failure>
where
    T::Err: std::fmt::Display,
{
    let empty = || Failure::usage(format!("{}: must not be empty", settings.named(key)));
    parsed(settings, key)?.ok_or_else(empty)
}

fn span(settings: &Settings, key: &str) -> Result<Duration, Failure> {
    required::<Span>(settings, key).map(|s| s.0)
}

fn path(settings: &Settings, key: &str) -> Result<Option<PathBuf>, Failure> {
    settings.text(key).map(|p| std::path::absolute(p).or_usage(settings.named(key))).transpose()
}

fn rule(text: &str) -> Option<Rule> {
    let (glob, model) = text.rsplit_once('=')?;
    Some(Rule { glob: glob.to_owned(), model: model.to_owned() })
}

/// The words of the settings are the serialised names of the enums.
fn from_word<T: for<'de> Deserialize<'de>>(word: &str) -> Result<T, Failure> {
    serde_json::from_value(serde_json::Value::from(word)).or_usage(word)
}

/// Six hexadecimal digits that stand for a mount point.
fn mark(mountpoint: &Path) -> String {
    format!("{:06x}", ebb_fs_client::hash::bytes(mountpoint.as_os_str().as_bytes()) & 0xff_ffff)
}

/// `$TMPDIR/ebb-UID/NAME-xxxxxx`.
fn default_cache(mountpoint: &Path) -> Result<PathBuf, Failure> {
    let tmp = std::env::var_os("TMPDIR").filter(|t| !t.is_empty()).map(PathBuf::from);
    let tmp =
        std::path::absolute(tmp.unwrap_or_else(|| PathBuf::from("/tmp"))).or_usage("TMPDIR")?;
    let user = crate::cachedir::user_directory(rustix::process::geteuid().as_raw());
    let name = mountpoint.file_name().unwrap_or_default().to_string_lossy();
    Ok(tmp.join(user).join(format!("{name}-{}", mark(mountpoint))))
}

/// The host's name and a mark of the machine and the mount point: two daemons of one host differ, also
/// of two hosts that are both called localhost, and a daemon that comes back at the same mount point,
/// after a boot too, takes its predecessor's place.
fn default_node(mountpoint: &Path) -> String {
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    node_on(machine.trim(), mountpoint)
}

fn node_on(machine: &str, mountpoint: &Path) -> String {
    let place = Path::new(machine).join(mountpoint.strip_prefix("/").unwrap_or(mountpoint));
    format!("{}-{}", host_name(), mark(&place))
}

/// The name of this machine.
#[must_use]
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".to_owned(),
        known => known.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Origin;
    use ebb_fs_client::config::{Durability, EvictPolicy, IoClass, PolicyKind, Waiting};

    fn plan(pairs: &[(&'static str, &str)]) -> Result<Plan, Failure> {
        let mut settings = Settings::new();
        for (key, value) in pairs {
            settings.set(key, vec![(*value).to_owned()], Origin::Flag(key))?;
        }
        Plan::new(&settings, Path::new("/pfs/run"), Path::new("/tmp/somewhere"))
    }

    #[test]
    fn computed_defaults_differ_by_mount_and_follow_the_cache() {
        let p = plan(&[]).unwrap().config;
        assert!(p.cache.to_string_lossy().contains("/ebb-"), "{:?}", p.cache);
        assert_eq!(p.state, p.cache.join("meta"));
        assert!(p.node.starts_with(&host_name()));
        assert_ne!(default_node(Path::new("/a")), default_node(Path::new("/b")));
        assert_eq!(default_node(Path::new("/a")), default_node(Path::new("/a")));
        assert_ne!(node_on("1f", Path::new("/a")), node_on("2e", Path::new("/a")));
        let p = plan(&[("cache", "/nvme/x")]).unwrap();
        assert_eq!(p.config.state, Path::new("/nvme/x/meta"));
        assert_eq!(p.log_file(), Path::new("/nvme/x/ebb.log"));
        assert!(p.own_state);
    }

    #[test]
    fn words_and_units_arrive_typed_and_survive_the_hand_over() {
        let p = plan(&[
            ("flush", "watermark"),
            ("evict", "mru"),
            ("flush-bandwidth", "20MiB"),
            ("flush-io", "idle"),
            ("durability", "none"),
            ("checksums", "off"),
            ("wait-interval", "adaptive:250ms"),
            ("jobs-hint", "7"),
            ("cache-size", "3GiB"),
            ("rule", "a=b=posix"),
        ])
        .unwrap();
        assert_eq!(p.config.flush, PolicyKind::Watermark);
        assert_eq!(p.config.durability, Durability::None);
        assert!(!p.config.checksums);
        assert_eq!((p.config.evict, p.config.flush_io), (EvictPolicy::Mru, IoClass::Idle));
        assert_eq!(p.config.flush_bandwidth.map(|s| s.0), Some(20 << 20));
        assert_eq!(p.config.rules[0], Rule { glob: "a=b".into(), model: "posix".into() });
        let text = serde_json::to_string(&p).unwrap();
        let back: Plan = serde_json::from_str(&text).unwrap();
        assert_eq!(back.config.wait_interval, Duration::from_millis(250));
        assert_eq!((back.config.waiting, back.jobs_hint), (Waiting::Adaptive, Some(7)));
        assert_eq!(back.config.cache_size.map(|s| s.0), Some(3 << 30));
        assert_eq!(back.stop_timeout.0, Duration::from_secs(600));
    }
}
