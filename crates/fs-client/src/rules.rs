//! Which model applies to which path: the job's, unless a `--rule` says otherwise.

use crate::config::MountConfig;
use ebb_consistency::{Model, ModelTable};
use globset::{Glob, GlobMatcher};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

/// What is wrong with the models that were asked for.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// No such model.
    #[error("--consistency or --rule: no model is named '{name}' (there are: {known})")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// Not a pattern.
    #[error("--rule: '{glob}' is not a pattern: {cause}")]
    Glob {
        /// What was asked for.
        glob: String,
        /// What is wrong with it.
        cause: globset::Error,
    },
    /// The config file's models are wrong.
    #[error("the config file's models: {0}")]
    Models(String),
}

/// The models of one mount.
#[derive(Clone)]
pub struct Rules {
    table: Arc<ModelTable>,
    job: Arc<Model>,
    rules: Vec<(GlobMatcher, Arc<Model>)>,
}

impl Rules {
    /// Looks all names up.
    pub fn new(config: &MountConfig) -> Result<Rules, RulesError> {
        let table = ModelTable::builtin()
            .with_user(&config.models_toml)
            .map_err(|e| RulesError::Models(e.to_string()))?;
        let find = |name: &str| {
            table.get(name).ok_or_else(|| RulesError::Unknown {
                name: name.to_string(),
                known: table.names().join(", "),
            })
        };
        let job = find(&config.consistency)?;
        let mut rules = Vec::new();
        for rule in &config.rules {
            let glob = Glob::new(&rule.glob)
                .map_err(|cause| RulesError::Glob { glob: rule.glob.clone(), cause })?;
            rules.push((glob.compile_matcher(), find(&rule.model)?));
        }
        Ok(Rules { job, rules, table: Arc::new(table) })
    }

    /// The job's model.
    #[must_use]
    pub fn job(&self) -> &Arc<Model> {
        &self.job
    }

    /// The model of a path; `chosen` is what the directory above it says, if anything.
    #[must_use]
    pub fn of(&self, path: &[u8], chosen: &str) -> Arc<Model> {
        if let Some(model) = (!chosen.is_empty()).then(|| self.table.get(chosen)).flatten() {
            return model;
        }
        let path = Path::new(OsStr::from_bytes(path));
        let rule = self.rules.iter().find(|(glob, _)| glob.is_match(path));
        rule.map_or_else(|| Arc::clone(&self.job), |(_, model)| Arc::clone(model))
    }

    /// True when a model of that name can be chosen.
    #[must_use]
    pub fn knows(&self, name: &str) -> bool {
        self.table.get(name).is_some()
    }

    /// What all nodes of the job must agree on, as text.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut text = self.job.describe();
        for (glob, model) in &self.rules {
            text.push_str(&format!("; {}={}", glob.glob(), model.describe()));
        }
        text
    }
}
