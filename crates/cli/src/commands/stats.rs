//! `ebb stats`: the counters and latency histograms of one daemon.

use crate::client;
use crate::exit::{Context, Failure};
use crate::mounts;
use ebb_fs_client::control::Request;
use serde_json::Value;
use std::path::PathBuf;

/// Counters and latency histograms of a mount
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb stats /local/run7
  ebb stats /local/run7 --prometheus > /var/lib/node_exporter/ebb.prom")]
pub struct Args {
    /// As Prometheus text
    #[arg(long)]
    prometheus: bool,
    /// The mount point
    mountpoint: PathBuf,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let point = mounts::resolve(&self.mountpoint).or_usage(self.mountpoint.display())?;
        let request = Request::Stats { prometheus: self.prometheus };
        match client::ask_body(&client::daemon_of(&point)?, &request)? {
            Value::String(text) => print!("{text}"),
            body => print!("{}", lines(&body)),
        }
        Ok(())
    }
}

/// One line for each number: the path to it, then it.
fn lines(body: &Value) -> String {
    let mut out = String::new();
    flatten("", body, &mut out);
    out
}

fn flatten(prefix: &str, value: &Value, out: &mut String) {
    let below = |key: &str| match prefix {
        "" => key.to_owned(),
        _ => format!("{prefix}.{key}"),
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(k, v)| flatten(&below(k), v, out)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, v)| flatten(&below(&i.to_string()), v, out));
        }
        leaf => out.push_str(&format!("{prefix:<40} {leaf}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_named_by_their_path() {
        let text = lines(&serde_json::json!({"ops": {"read": 3, "write": [1, 2]}, "up": 1.5}));
        let words: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(
            words,
            [["ops.read", "3"], ["ops.write.0", "1"], ["ops.write.1", "2"], ["up", "1.5"]]
        );
    }
}
