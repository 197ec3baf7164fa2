//! `ebb config`: every effective setting and where it came from, in the form of a config file.

use crate::client;
use crate::exit::{Context, Failure};
use crate::mounts;
use crate::options::MountOptions;
use crate::settings::Settings;
use crate::settings::keys::{Form, KEYS, Key};
use ebb_fs_client::control::Request;
use serde_json::json;
use std::path::PathBuf;

/// Show every effective setting and where it came from (default, file, env or flag)
#[derive(clap::Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:
  ebb config --show                                    what a mount would use now
  ebb config --show --consistency commit --config job.toml
  ebb config --show --of /local/run7                   what a running daemon uses"
)]
pub struct Args {
    /// Show the settings (there is nothing else to do yet)
    #[arg(long)]
    show: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Show the configuration of the daemon at this mount point instead
    #[arg(long, value_name = "MOUNTPOINT")]
    of: Option<PathBuf>,
    #[command(flatten)]
    options: MountOptions,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        if let Some(point) = &self.of {
            let point = mounts::resolve(point).or_usage(point.display())?;
            let body = client::ask_body(&client::daemon_of(&point)?, &Request::Config)?;
            println!("{body:#}");
            return Ok(());
        }
        let settings = self.options.resolve()?;
        crate::models::check_names(&settings)?;
        if self.json {
            println!("{:#}", as_json(&settings));
        } else {
            print!("{}", as_toml(&settings));
        }
        Ok(())
    }
}

fn as_json(settings: &Settings) -> serde_json::Value {
    let one = |key: &Key| {
        let value = settings.value(key.name);
        let shown = match key.form {
            Form::Rules => json!(value.parts),
            _ => json!(value.parts.first()),
        };
        (key.name.to_owned(), json!({ "value": shown, "origin": value.origin.to_string() }))
    };
    serde_json::Value::Object(KEYS.iter().map(one).collect())
}

/// The settings as a config file that would make them so.
fn as_toml(settings: &Settings) -> String {
    let mut text = String::new();
    for key in &KEYS {
        let value = settings.value(key.name);
        let quoted: Vec<String> =
            value.parts.iter().map(|p| toml::Value::String(p.clone()).to_string()).collect();
        let shown = match (key.form, quoted.first()) {
            (Form::Rules, _) => format!("[{}]", quoted.join(", ")),
            (_, None) => "\"\"".to_owned(),
            (Form::Count(..) | Form::Switch, Some(_)) => value.parts[0].clone(),
            (_, Some(q)) => q.clone(),
        };
        let meaning =
            if value.parts.is_empty() { format!(": {}", key.when_empty) } else { String::new() };
        let setting = format!("{} = {shown}", key.name);
        text.push_str(&format!("{setting:<32} # {}{meaning}\n", value.origin));
    }
    if !settings.models_toml.is_empty() {
        text.push('\n');
        text.push_str(&settings.models_toml);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Origin, file};

    #[test]
    fn what_is_shown_is_a_config_file_with_the_same_settings() {
        let mut settings = Settings::new();
        for (key, parts) in [
            ("rule", vec!["*.log=posix".to_owned(), "a\"b=commit".to_owned()]),
            ("allow-other", vec!["true".to_owned()]),
            ("flush-threads", vec!["3".to_owned()]),
            ("cache", vec!["/tmp/a b".to_owned()]),
        ] {
            settings.set(key, parts, Origin::Flag("x")).unwrap();
        }
        let text = as_toml(&settings);
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(path.path(), &text).unwrap();
        let mut back = Settings::new();
        file::load(path.path(), &mut back).unwrap();
        for key in &KEYS {
            assert_eq!(back.value(key.name).parts, settings.value(key.name).parts, "{text}");
        }
        assert_eq!(as_json(&settings)["flush-threads"]["value"], "3");
    }
}
