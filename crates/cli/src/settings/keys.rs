//! The table of settings: every key that a config file, the environment and a flag may set, with
//! its form and its default. A new setting is a row here, a flag in `options.rs` and, when a
//! daemon must know it, a line in `plan.rs`.

use crate::settings::wait::WaitInterval;
use ebb_fs_client::config::PolicyKind;
use ebb_types::units::{Percent, Size, Span};

/// The form of a setting's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Any text.
    Text,
    /// A path; relative ones start at the working directory.
    Path,
    /// A number of bytes with a unit.
    Size,
    /// A share with `%`.
    Percent,
    /// A time with a unit.
    Span,
    /// The same, or one that is learned.
    Wait,
    /// A whole number between the two.
    Count(u64, u64),
    /// One of these words.
    Word(&'static [&'static str]),
    /// `true` or `false`.
    Switch,
    /// `GLOB=MODEL`, any number of them.
    Rules,
}

/// One setting.
#[derive(Debug)]
pub struct Key {
    /// Its name in the config file; `--NAME` is its flag, `EBB_NAME` its variable.
    pub name: &'static str,
    /// The form of its value.
    pub form: Form,
    /// Value when nobody sets it; empty: none, or computed at start.
    pub default: &'static str,
    /// What an empty value means.
    pub when_empty: &'static str,
}

const fn key(name: &'static str, form: Form, default: &'static str) -> Key {
    Key { name, form, default, when_empty: "" }
}

const fn computed(name: &'static str, form: Form, when_empty: &'static str) -> Key {
    Key { name, form, default: "", when_empty }
}

const FLUSH: &[&str] = &PolicyKind::NAMES;
const FLUSH_IO: &[&str] = &["normal", "low", "idle"];
const EVICT: &[&str] = &["lru", "mru", "fifo", "lfu"];
const VERIFY: &[&str] = &["memory", "storage"];
const DURABILITY: &[&str] = &["local", "backing", "none"];
const IO_PATH: &[&str] = &["auto", "passthrough", "daemon"];
const TRACKER: &[&str] = &["auto", "on", "off"];
const SUPERVISE: &[&str] = &["auto", "off"];
const TRANSPORT: &[&str] = &["auto", "tcp", "rdma"];
const CHECKSUMS: &[&str] = &["on", "off"];
const SECURE: &[&str] = &["on", "loopback", "off"];

/// All settings, in the order in which they are shown.
pub static KEYS: [Key; 40] = [
    key("consistency", Form::Text, "session"),
    computed("rule", Form::Rules, "no rules"),
    computed("meta", Form::Text, "an embedded metadata service is started"),
    computed("cache", Form::Path, "a directory per user and mount under $TMPDIR"),
    computed("cache-size", Form::Size, "80 % of the file system that holds the cache"),
    computed("state", Form::Path, "meta/ in the cache directory"),
    computed("node", Form::Text, "HOST-xxxxxx, made of the host name and the mount point"),
    key("listen", Form::Text, "127.0.0.1:0"),
    key("flush", Form::Word(FLUSH), "idle"),
    key("wait-interval", Form::Wait, "1s"),
    key("flush-threads", Form::Count(1, 256), "8"),
    computed("flush-bandwidth", Form::Size, "no cap"),
    key("flush-nice", Form::Count(0, 19), "10"),
    key("flush-io", Form::Word(FLUSH_IO), "low"),
    key("verify", Form::Word(VERIFY), "memory"),
    key("low-watermark", Form::Percent, "10%"),
    key("high-watermark", Form::Percent, "50%"),
    key("evict", Form::Word(EVICT), "lru"),
    computed("jobs-hint", Form::Count(1, 100_000), "striping is left to the backing"),
    key("inodes-max", Form::Count(1000, 1_000_000_000), "500000"),
    key("files-max", Form::Count(100, 1_000_000_000), "100000"),
    key("durability", Form::Word(DURABILITY), "local"),
    key("checksums", Form::Word(CHECKSUMS), "on"),
    key("transport", Form::Word(TRANSPORT), "tcp"),
    computed("rdma-device", Form::Text, "the first device with an address of RoCE v2"),
    computed("token-file", Form::Path, "no token: only loopback is served"),
    key("secure", Form::Word(SECURE), "loopback"),
    computed("log", Form::Path, "ebb.log in the cache directory; standard error in the foreground"),
    key("log-level", Form::Text, "info"),
    key("allow-other", Form::Switch, "false"),
    key("request-timeout", Form::Span, "10s"),
    computed("stuck-after", Form::Span, "eight times the request timeout"),
    key("stop-timeout", Form::Span, "10m"),
    key("fuse-threads", Form::Count(1, 64), "2"),
    key("replicas", Form::Count(1, 2), "1"),
    key("supervise", Form::Word(SUPERVISE), "auto"),
    key("restart-timeout", Form::Span, "30s"),
    key("naive", Form::Switch, "false"),
    key("io-path", Form::Word(IO_PATH), "daemon"),
    key("tracker", Form::Word(TRACKER), "auto"),
];

/// The row of a name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.name == name)
}

impl Key {
    /// The environment variable that sets it.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("EBB_{}", self.name.to_uppercase().replace('-', "_"))
    }

    /// Says what is wrong with a value, if anything; an empty one stands for "not set".
    pub fn check(&self, value: &str) -> Result<(), String> {
        if value.is_empty() {
            return Ok(());
        }
        match self.form {
            Form::Text | Form::Path => Ok(()),
            Form::Size => value.parse::<Size>().map(drop).map_err(|e| e.to_string()),
            Form::Percent => value.parse::<Percent>().map(drop).map_err(|e| e.to_string()),
            Form::Span => value.parse::<Span>().map(drop).map_err(|e| e.to_string()),
            Form::Wait => value.parse::<WaitInterval>().map(drop).map_err(|e| e.to_string()),
            Form::Count(least, most) => match value.parse::<u64>() {
                Ok(n) if (least..=most).contains(&n) => Ok(()),
                _ => Err(format!("'{value}' is not a whole number from {least} to {most}")),
            },
            Form::Word(words) if words.contains(&value) => Ok(()),
            Form::Word(words) => Err(format!("'{value}' is none of {}", words.join(", "))),
            Form::Switch if matches!(value, "true" | "false") => Ok(()),
            Form::Switch => Err(format!("'{value}' is neither true nor false")),
            Form::Rules => check_rule(value),
        }
    }
}

fn check_rule(value: &str) -> Result<(), String> {
    match value.rsplit_once('=') {
        Some((glob, model)) if !glob.is_empty() && !model.is_empty() => {
            globset::Glob::new(glob).map(drop).map_err(|e| format!("'{value}': {e}"))
        }
        _ => Err(format!("'{value}' is not GLOB=MODEL (like '*.log=posix')")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_pass_their_own_checks() {
        for key in &KEYS {
            assert_eq!(key.check(key.default), Ok(()), "{}", key.name);
            assert!(!key.default.is_empty() || !key.when_empty.is_empty(), "{}", key.name);
        }
    }

    #[test]
    fn values_without_form_are_refused() {
        for (name, bad) in [
            ("cache-size", "3 parsecs"),
            ("wait-interval", "10"),
            ("wait-interval", "adaptive:10"),
            ("wait-interval", "adaptive:"),
            ("wait-interval", "adaptive:0s"),
            ("jobs-hint", "0"),
            ("low-watermark", "80"),
            ("flush-threads", "0"),
            ("flush-threads", "many"),
            ("flush", "sometimes"),
            ("allow-other", "maybe"),
            ("rule", "*.log"),
            ("rule", "a[=posix"),
        ] {
            let key = find(name).unwrap();
            assert!(key.check(bad).is_err(), "{name} = {bad}");
        }
    }
}
