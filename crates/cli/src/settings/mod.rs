//! Effective settings: what the config file, the environment and the flags say, the later over
//! the earlier, each with where it came from. Values are checked for form here; what they mean
//! together is checked by `plan.rs` and `checks.rs`.

pub mod file;
pub mod keys;
pub mod wait;

use crate::exit::Failure;
use keys::{Form, KEYS, Key};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// The config file.
    File(PathBuf),
    /// An environment variable.
    Env(String),
    /// The command line.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => write!(f, "file {}", path.display()),
            Origin::Env(name) => write!(f, "env {name}"),
            Origin::Flag(name) => write!(f, "flag --{name}"),
        }
    }
}

/// One effective value. Only `rule` has more than one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Its parts as the user wrote them; none when it is not set.
    pub parts: Vec<String>,
    /// Where it came from.
    pub origin: Origin,
}

/// What one layer sets: key and parts.
pub type Layer = Vec<(&'static str, Vec<String>)>;

/// All effective settings.
#[derive(Clone, Debug)]
pub struct Settings {
    values: BTreeMap<&'static str, Value>,
    /// The `[models]` tables of the config file as TOML text, or empty.
    pub models_toml: String,
}

impl Settings {
    /// The defaults.
    #[must_use]
    pub fn new() -> Settings {
        let value = |k: &Key| Value { parts: parts_of(k.default), origin: Origin::Default };
        Settings {
            values: KEYS.iter().map(|k| (k.name, value(k))).collect(),
            models_toml: String::new(),
        }
    }

    /// Puts one value over what is there, after a check of its form.
    pub fn set(&mut self, name: &str, parts: Vec<String>, origin: Origin) -> Result<(), Failure> {
        let Some(key) = keys::find(name) else {
            return Err(Failure::usage(format!("{origin}: unknown key '{name}'")));
        };
        for part in &parts {
            let wrong = |why| Failure::usage(format!("{}: {why}", named(key, &origin)));
            key.check(part).map_err(wrong)?;
        }
        let parts = parts.into_iter().filter(|p| !p.is_empty()).collect();
        self.values.insert(key.name, Value { parts, origin });
        Ok(())
    }

    /// Puts the variables of an environment over what is there.
    pub fn set_from_env(
        &mut self,
        vars: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<(), Failure> {
        for (name, value) in vars {
            let Some(name) = name.to_str().filter(|n| n.starts_with("EBB_")) else { continue };
            let Some(key) = KEYS.iter().find(|k| k.variable() == name) else {
                if is_no_setting(name) {
                    continue;
                }
                return Err(Failure::usage(format!(
                    "environment: {name} is no setting (`ebb config --show` lists them; unset it)"
                )));
            };
            let Some(value) = value.to_str() else {
                return Err(Failure::usage(format!("environment: {name} is not UTF-8")));
            };
            if value.is_empty() {
                continue;
            }
            let parts = match key.form {
                Form::Rules => value.split(';').map(|r| r.trim().to_owned()).collect(),
                _ => vec![value.to_owned()],
            };
            self.set(key.name, parts, Origin::Env(name.to_owned()))?;
        }
        Ok(())
    }

    /// Puts the flags over what is there.
    pub fn set_from_flags(&mut self, layer: Layer) -> Result<(), Failure> {
        for (name, parts) in layer {
            self.set(name, parts, Origin::Flag(name))?;
        }
        Ok(())
    }

    /// The value of a key of the table.
    #[must_use]
    pub fn value(&self, name: &str) -> &Value {
        self.values.get(name).expect("callers name keys of the table")
    }

    /// The one part of a value, unless it is not set.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.value(name).parts.first().map(String::as_str)
    }

    /// The key as the user who set it knows it: `--listen`, `EBB_LISTEN`, `listen in FILE`.
    #[must_use]
    pub fn named(&self, name: &str) -> String {
        match keys::find(name) {
            Some(key) => named(key, &self.value(name).origin),
            None => name.to_owned(),
        }
    }
}

fn parts_of(default: &str) -> Vec<String> {
    if default.is_empty() { Vec::new() } else { vec![default.to_owned()] }
}

fn named(key: &Key, origin: &Origin) -> String {
    match origin {
        Origin::Default | Origin::Flag(_) => format!("--{}", key.name),
        Origin::File(path) => format!("{}: key '{}'", path.display(), key.name),
        Origin::Env(name) => format!("environment variable {name}"),
    }
}

/// Variables that are not settings: where the config file and the registry are, what module
/// systems set, what programs with libebb-mpi are told, and what the tests, benches and hooks of Ebb use.
fn is_no_setting(name: &str) -> bool {
    const NAMES: [&str; 11] = [
        "EBB_CONFIG",
        "EBB_RUNTIME_DIR",
        "EBB_BIN",
        "EBB_REQUIRE_FUSE",
        "EBB_SEED",
        "EBB_ROOT",
        "EBB_HOME",
        "EBB_DIR",
        "EBB_VERSION",
        "EBB_MPI",
        "EBB_MPI_VERBOSE",
    ];
    const PREFIXES: [&str; 4] = ["EBB_TEST_", "EBB_BENCH_", "EBB_HOOK_", "EBB_DEMO_"];
    NAMES.contains(&name) || PREFIXES.iter().any(|p| name.starts_with(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        pairs.iter().map(|(k, v)| (OsString::from(k), OsString::from(v))).collect()
    }

    #[test]
    fn later_layers_win_and_say_where_they_are_from() {
        let mut s = Settings::new();
        let file = Origin::File(PathBuf::from("/c.toml"));
        s.set("flush-threads", vec!["3".into()], file.clone()).unwrap();
        s.set("flush", vec!["end".into()], file.clone()).unwrap();
        s.set("consistency", vec!["posix".into()], file).unwrap();
        s.set_from_env(env(&[("EBB_FLUSH", "close"), ("EBB_CONSISTENCY", "commit")]).into_iter())
            .unwrap();
        s.set_from_flags(vec![("consistency", vec!["mpiio".into()])]).unwrap();
        assert_eq!(s.text("consistency"), Some("mpiio"));
        assert_eq!(s.value("consistency").origin.to_string(), "flag --consistency");
        assert_eq!(s.text("flush"), Some("close"));
        assert_eq!(s.value("flush").origin.to_string(), "env EBB_FLUSH");
        assert_eq!(s.text("flush-threads"), Some("3"));
        assert_eq!(s.value("flush-threads").origin.to_string(), "file /c.toml");
        assert_eq!(s.text("durability"), Some("local"));
        assert_eq!(s.value("durability").origin, Origin::Default);
        assert_eq!(s.text("meta"), None);
    }

    #[test]
    fn unknown_variables_and_units_are_errors_that_name_them() {
        let mut s = Settings::new();
        let e = s.set_from_env(env(&[("EBB_CONSISTENCE", "posix")]).into_iter()).unwrap_err();
        assert_eq!(e.status, 2);
        assert!(e.text.contains("EBB_CONSISTENCE"), "{e}");
        let e = s.set_from_env(env(&[("EBB_CACHE_SIZE", "3 parsecs")]).into_iter()).unwrap_err();
        assert!(e.status == 2 && e.text.contains("EBB_CACHE_SIZE") && e.text.contains("parsecs"));
        s.set_from_env(env(&[("EBB_CONFIG", "x"), ("PATH", "y"), ("EBB_NODE", "")]).into_iter())
            .unwrap();
        assert_eq!(s.value("node").origin, Origin::Default);
    }

    #[test]
    fn rules_of_the_environment_are_separated_by_semicolons() {
        let mut s = Settings::new();
        s.set_from_env(env(&[("EBB_RULE", "*.{log,txt}=posix; out/**=commit")]).into_iter())
            .unwrap();
        assert_eq!(s.value("rule").parts, ["*.{log,txt}=posix", "out/**=commit"]);
    }
}
