//! `ebb check`: storage races of a traced program, under any model.

use crate::exit::{Context, Failure};
use crate::models;
use crate::settings::{Settings, file};
use ebb_consistency::{Model, ModelTable};
use ebb_trace_check::{Nodes, Traced};
use globset::{Glob, GlobMatcher};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a trace is and how it is looked at, for `check` and `advise`.
#[derive(clap::Args)]
pub struct Source {
    /// The directory that `ebb trace` filled
    dir: PathBuf,
    /// Which processes share a node: `tasks`: those of one task of a launcher (mpiexec, srun), which may
    /// put its tasks anywhere; `hosts`: those of a host, as traced; `each`: none
    #[arg(long, value_name = "WHICH", default_value = "tasks")]
    nodes: WhichNodes,
    /// Config file (TOML) with models of one's own [default: as for `ebb mount`]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum WhichNodes {
    Tasks,
    Hosts,
    Each,
}

impl Source {
    /// The models that there are.
    pub fn table(&self) -> Result<ModelTable, Failure> {
        let mut settings = Settings::new();
        if let Some(path) = file::locate(self.config.as_deref()) {
            file::load(&path, &mut settings)?;
        }
        models::table(&settings.models_toml)
    }

    /// Reads the trace.
    pub fn load(&self, models: &[Arc<Model>]) -> Result<Traced, Failure> {
        let nodes = match self.nodes {
            WhichNodes::Tasks => Nodes::Tasks,
            WhichNodes::Hosts => Nodes::Hosts,
            WhichNodes::Each => Nodes::Each,
        };
        ebb_trace_check::load(&self.dir, nodes, models).map_err(|e| Failure::usage(e.to_string()))
    }
}

/// All models of a table, the weaker ones first.
pub fn all(table: &ModelTable) -> Vec<Arc<Model>> {
    let mut models: Vec<Arc<Model>> = Vec::new();
    for model in table.names().into_iter().filter_map(|name| table.get(name)) {
        let stronger = |m: &Arc<Model>| model.msc().is_weaker_than(&m.msc());
        let at = models.iter().position(stronger).unwrap_or(models.len());
        models.insert(at, model);
    }
    models
}

/// Look for storage races in a trace: accesses of different processes to the same bytes, one of them a
/// write, that are not synchronised as a model asks for. Exit status 0: none; 1: some; 2: usage
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb check trace                                   under every model
  ebb check trace --model session --model commit
  ebb check trace --model session --rule '**/log.*=posix' --html races.html")]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// The model, or `all`; repeatable
    #[arg(long = "model", value_name = "NAME", default_value = "all")]
    models: Vec<String>,
    /// Another model for the files that match, as for `ebb mount`; a pattern is matched against the
    /// whole path; repeatable
    #[arg(long = "rule", value_name = "GLOB=MODEL")]
    rules: Vec<String>,
    /// Write a report with a time line of one race to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Runs the command; 1 when there are races.
    pub fn run(self) -> Result<u8, Failure> {
        let table = self.source.table()?;
        let models = self.chosen(&table)?;
        let rules = rules(&self.rules, &table)?;
        let traced = self.source.load(&models)?;
        let rule = |path: &[u8]| {
            let path = Path::new(OsStr::from_bytes(path));
            rules.iter().find(|(glob, _)| glob.is_match(path)).map(|(_, model)| model.clone())
        };
        let checked = ebb_trace_check::check(&traced, &models, &rule);
        if let Some(file) = &self.html {
            let page = ebb_trace_check::page(&traced, &checked);
            std::fs::write(file, page).or_failed(file.display())?;
        }
        match self.json {
            true => println!("{}", ebb_trace_check::json(&traced, &checked)),
            false => print!("{}", ebb_trace_check::text(&traced, &checked)),
        }
        Ok(u8::from(checked.iter().any(|c| c.verdict.races() > 0)))
    }

    fn chosen(&self, table: &ModelTable) -> Result<Vec<Arc<Model>>, Failure> {
        if self.models.iter().any(|m| m == "all") {
            return Ok(all(table));
        }
        let of = |name: &String| {
            models::known(table, name, "--model")?;
            Ok(table.get(name))
        };
        let chosen: Result<Vec<_>, Failure> = self.models.iter().map(of).collect();
        Ok(chosen?.into_iter().flatten().collect())
    }
}

fn rules(of: &[String], table: &ModelTable) -> Result<Vec<(GlobMatcher, Arc<Model>)>, Failure> {
    let mut rules = Vec::new();
    for rule in of {
        let (glob, name) = rule
            .rsplit_once('=')
            .ok_or_else(|| Failure::usage(format!("--rule {rule}: expected GLOB=MODEL")))?;
        models::known(table, name, &format!("--rule {rule}"))?;
        let glob = Glob::new(glob).or_usage(format!("--rule {rule}"))?.compile_matcher();
        rules.extend(table.get(name).map(|model| (glob, model)));
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weaker_models_come_first() {
        let order = all(&ModelTable::builtin());
        let names: Vec<&str> = order.iter().map(|m| m.name()).collect();
        let at = |name: &str| names.iter().position(|n| *n == name).unwrap();
        assert!(at("session") < at("mpiio") && at("mpiio") < at("commit"), "{names:?}");
        assert!(at("commit") < at("posix") && at("romio") < at("posix"), "{names:?}");
    }

    #[test]
    fn rules_are_refused_in_words() {
        let refused = |rule: &str| rules(&[rule.to_owned()], &ModelTable::builtin()).unwrap_err();
        assert!(refused("*.log").text.contains("expected GLOB=MODEL"));
        assert!(refused("*.log=sesion").text.contains("unknown model 'sesion'"));
        assert!(refused("[=posix").text.contains("--rule [=posix"));
        assert_eq!(refused("[=posix").status, 2);
    }
}
