//! The config file: TOML with the keys of the table at the top level and one `[models.NAME]`
//! table per user-defined model. What is not known is an error.

use super::keys::{self, Form};
use super::{Origin, Settings};
use crate::exit::{Context, Failure};
use std::path::{Path, PathBuf};

/// Which config file counts: the flag's, else `$EBB_CONFIG`, else the user's own if there is one.
#[must_use]
pub fn locate(flag: Option<&Path>) -> Option<PathBuf> {
    let from_env = || std::env::var_os("EBB_CONFIG").filter(|v| !v.is_empty()).map(PathBuf::from);
    let own = || {
        let path = PathBuf::from(std::env::var_os("HOME")?).join(".config/ebb/config.toml");
        path.exists().then_some(path)
    };
    flag.map(Path::to_owned).or_else(from_env).or_else(own)
}

/// Puts a config file's settings over what is there.
pub fn load(path: &Path, settings: &mut Settings) -> Result<(), Failure> {
    let name = format!("config file {}", path.display());
    let text = std::fs::read_to_string(path).or_usage(&name)?;
    let table: toml::Table = text.parse().or_usage(&name)?;
    for (key, value) in table {
        if key == "models" {
            settings.models_toml = models_text(value).or_usage(&name)?;
            continue;
        }
        let Some(row) = keys::find(&key) else {
            return Err(Failure::usage(format!("{name}: unknown key '{key}'")));
        };
        let parts = parts_of(row.form, value)
            .map_err(|why| Failure::usage(format!("{name}: key '{key}': {why}")))?;
        settings.set(row.name, parts, Origin::File(path.to_owned()))?;
    }
    Ok(())
}

fn models_text(value: toml::Value) -> Result<String, String> {
    if !value.is_table() {
        return Err("'models' must be tables ([models.NAME])".to_owned());
    }
    let outer = toml::Table::from_iter([("models".to_owned(), value)]);
    toml::to_string(&outer).map_err(|e| e.to_string())
}

/// The value as text. Numbers and truth values are taken where the setting is one; a number
/// without a unit where a unit belongs is left for the check of its form to refuse.
fn parts_of(form: Form, value: toml::Value) -> Result<Vec<String>, String> {
    match (form, value) {
        (_, toml::Value::String(s)) => Ok(vec![s]),
        (Form::Switch, toml::Value::Boolean(b)) => Ok(vec![b.to_string()]),
        (
            Form::Count(..) | Form::Size | Form::Span | Form::Wait | Form::Percent,
            toml::Value::Integer(n),
        ) => Ok(vec![n.to_string()]),
        (Form::Rules, toml::Value::Array(items)) => items
            .into_iter()
            .map(|item| match item {
                toml::Value::String(s) => Ok(s),
                other => Err(format!("{other} is not a text (like \"*.log=posix\")")),
            })
            .collect(),
        (_, other) => Err(format!("{} does not fit here", other.type_str())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load_text(text: &str) -> Result<Settings, Failure> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let mut settings = Settings::new();
        load(file.path(), &mut settings).map(|()| settings)
    }

    #[test]
    fn any_bytes_are_settings_or_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let seeds = [
            &b"consistency = 'mine'\nflush-threads = 4\ncache-size = '10GiB'\n"[..],
            b"rule = ['*.log=posix', 'a=commit']\n[models.mine]\nclose = 'attach'\n",
            b"[models.x]\nbase = 'session'\nwrite = ['attach range']\n",
        ];
        ebb_fuzzing::feed("config-file", &seeds.map(<[u8]>::to_vec), |bytes| {
            std::fs::write(file.path(), bytes).unwrap();
            let _ = load(file.path(), &mut Settings::new());
        });
    }

    #[test]
    fn keys_and_models_are_taken() {
        let s = load_text(
            "consistency = 'mine'\nflush-threads = 4\nallow-other = true\ncache-size = '10GiB'\n\
             rule = ['*.log=posix', 'a=commit']\n[models.mine]\nclose = 'attach'\n",
        )
        .unwrap();
        assert_eq!(s.text("consistency"), Some("mine"));
        assert_eq!(s.text("flush-threads"), Some("4"));
        assert_eq!(s.text("allow-other"), Some("true"));
        assert_eq!(s.value("rule").parts.len(), 2);
        let back: toml::Table = s.models_toml.parse().unwrap();
        assert_eq!(back["models"]["mine"]["close"].as_str(), Some("attach"));
    }

    #[test]
    fn what_is_unknown_or_misformed_is_an_error_that_names_the_key() {
        for (text, named) in [
            ("flush-thread = 3", "flush-thread"),
            ("flush-threads = 'x'", "flush-threads"),
            ("wait-interval = 10", "wait-interval"),
            ("cache-size = '1 league'", "cache-size"),
            ("flush = true", "flush"),
            ("rule = [1]", "rule"),
            ("models = 3", "models"),
            ("[daemon]\nflush = 'idle'", "daemon"),
            ("flush = ", "config file"),
        ] {
            let e = load_text(text).unwrap_err();
            assert!(e.status == 2 && e.text.contains(named), "{text}: {e}");
        }
    }
}
