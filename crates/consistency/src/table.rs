//! The table of models: the built-in rows and those that a user adds in TOML. Four are the models
//! of the literature; `romio` is `mpiio` for a library that leaves out half of its syncs.
//!
//! Legend: `A` attach, `Q` query, `r` of the call's range, `f` of the whole file. When a cell
//! has both, the attach comes first.
//!
//! | model   | open | stat | read | write | fsync  | close | lock | unlock | commit |
//! |---------|------|------|------|-------|--------|-------|------|--------|--------|
//! | posix   | Qf   | Qf   | Qr   | Ar    | –      | –     | Qf   | Af     | Af     |
//! | commit  | –    | Qf   | Qr   | –     | Af     | Af    | Qf   | Af     | Af     |
//! | session | Qf   | –    | –    | –     | –      | Af    | Qf   | Af     | Af     |
//! | mpiio   | Qf   | Qf   | –    | –     | Af Qf  | Af    | Qf   | Af     | Af Qf  |
//! | romio   | Qf   | Qf   | Qr   | –     | Af Qf  | Af    | Qf   | Af     | Af Qf  |
//!
//! Why `romio`: MPI_File_sync of MPICH's ROMIO calls fsync only in a process that has written since
//! its last one, so the sync of a reader never reaches a file system, and under `mpiio` it would
//! not look up. There the read itself does.
//!
//! A new model is a row here (or in the user's file) and nothing else: the engine that carries
//! actions out, the checker's minimum synchronisation and the explorer all read the row.

use crate::model::{Actions, Model, Row, Scope, SyncEvent};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What was wrong with a user's models.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The text is not TOML.
    #[error("the models are not valid TOML: {0}")]
    Syntax(String),
    /// A key that means nothing here.
    #[error("unknown key '{key}' (a model has: {expected})")]
    UnknownKey {
        /// The key with its path.
        key: String,
        /// What may stand there.
        expected: String,
    },
    /// A value that means nothing here.
    #[error(
        "{key}: '{value}' is not an action (use \"attach file\", \"query file\" and, at read and write, \"attach range\", \"query range\")"
    )]
    BadAction {
        /// The key with its path.
        key: String,
        /// The value.
        value: String,
    },
    /// The same action twice in one cell.
    #[error("{key}: '{action}' stands there twice")]
    Duplicate {
        /// The key with its path.
        key: String,
        /// `attach` or `query`.
        action: &'static str,
    },
    /// The name is one of the built-in ones, or taken by an earlier file.
    #[error("models.{name}: there is already a model of that name")]
    Taken {
        /// The name.
        name: String,
    },
    /// A name that cannot be one.
    #[error("models.{name}: a model's name has 1 to 32 letters, digits, '-' or '_'")]
    BadName {
        /// The name.
        name: String,
    },
    /// `base` names no model.
    #[error("models.{name}.base: there is no model '{base}' (there are: {known})")]
    NoBase {
        /// The model with that base.
        name: String,
        /// What it names.
        base: String,
        /// What there is.
        known: String,
    },
    /// The bases go in a circle.
    #[error("models.{name}.base: its bases lead back to itself")]
    Circle {
        /// One model of the circle.
        name: String,
    },
    /// No event publishes, or none observes: no two processes could ever share a file.
    #[error("models.{name}: nothing in this row makes bytes {what}")]
    Useless {
        /// The model.
        name: String,
        /// What is missing.
        what: &'static str,
    },
}

const NO: Actions = Actions::NONE;
const AF: Actions = Actions { attach: Some(Scope::File), query: None };
const AR: Actions = Actions { attach: Some(Scope::Range), query: None };
const QF: Actions = Actions { attach: None, query: Some(Scope::File) };
const QR: Actions = Actions { attach: None, query: Some(Scope::Range) };
const AF_QF: Actions = Actions { attach: Some(Scope::File), query: Some(Scope::File) };

#[rustfmt::skip]
const BUILTIN: [(&str, Row); 5] = [
    //            open stat read write fsync  close lock unlock commit
    ("posix",   [ QF,  QF,  QR,  AR,   NO,    NO,   QF,  AF,    AF    ]),
    ("commit",  [ NO,  QF,  QR,  NO,   AF,    AF,   QF,  AF,    AF    ]),
    ("session", [ QF,  NO,  NO,  NO,   NO,    AF,   QF,  AF,    AF    ]),
    ("mpiio",   [ QF,  QF,  NO,  NO,   AF_QF, AF,   QF,  AF,    AF_QF ]),
    ("romio",   [ QF,  QF,  QR,  NO,   AF_QF, AF,   QF,  AF,    AF_QF ]),
];

/// All models a job can choose from.
#[derive(Clone, Debug)]
pub struct ModelTable {
    models: BTreeMap<String, Arc<Model>>,
}

impl ModelTable {
    /// The built-in models.
    #[must_use]
    pub fn builtin() -> ModelTable {
        let models = BUILTIN
            .iter()
            .map(|(name, row)| ((*name).to_owned(), Arc::new(Model::new(name, *row))))
            .collect();
        ModelTable { models }
    }

    /// Adds the models of a user's file: tables `[models.NAME]`, whose keys are event names with
    /// a list of actions, and optionally `base`, the row to start from. Other top-level keys are
    /// not looked at. Nothing is added when anything is wrong.
    pub fn with_user(mut self, toml_text: &str) -> Result<ModelTable, ModelError> {
        let document: toml::Table =
            toml_text.parse().map_err(|e: toml::de::Error| ModelError::Syntax(e.to_string()))?;
        let Some(models) = document.get("models") else { return Ok(self) };
        let models = models.as_table().ok_or_else(|| unknown("models", "[models.NAME] tables"))?;
        let mut waiting = Vec::new();
        for (name, body) in models {
            self.check_name(name)?;
            let key = format!("models.{name}");
            let body = body.as_table().ok_or_else(|| unknown(&key, "[models.NAME] tables"))?;
            waiting.push((name.as_str(), base_of(name, body)?, cells_of(name, body)?));
        }
        self.add_in_order_of_bases(waiting)?;
        Ok(self)
    }

    /// The model of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<Model>> {
        self.models.get(name).cloned()
    }

    /// All names, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.models.keys().map(String::as_str).collect()
    }

    fn check_name(&self, name: &str) -> Result<(), ModelError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > 32 || !name.chars().all(fits) {
            return Err(ModelError::BadName { name: name.to_owned() });
        }
        if self.models.contains_key(name) {
            return Err(ModelError::Taken { name: name.to_owned() });
        }
        Ok(())
    }

    /// A base may be a user's model that stands later in the file.
    fn add_in_order_of_bases(
        &mut self,
        mut waiting: Vec<(&str, Option<&str>, Cells)>,
    ) -> Result<(), ModelError> {
        while !waiting.is_empty() {
            let ready = waiting
                .iter()
                .position(|(_, base, _)| base.is_none_or(|b| self.models.contains_key(b)));
            let Some(ready) = ready else { return Err(self.why_no_base(&waiting)) };
            let (name, base, cells) = waiting.swap_remove(ready);
            let mut row = base.map_or([NO; 9], |b| *self.models[b].row());
            for (event, actions) in cells {
                row[event as usize] = actions;
            }
            let model = Model::new(name, row);
            check_useful(&model)?;
            self.models.insert(name.to_owned(), Arc::new(model));
        }
        Ok(())
    }

    fn why_no_base(&self, waiting: &[(&str, Option<&str>, Cells)]) -> ModelError {
        let is_waiting = |name: &str| waiting.iter().any(|w| w.0 == name);
        for (name, base, _) in waiting {
            if let Some(base) = base.filter(|b| !is_waiting(b)) {
                return ModelError::NoBase {
                    name: (*name).to_owned(),
                    base: base.to_owned(),
                    known: self.names().join(", "),
                };
            }
        }
        ModelError::Circle { name: waiting.first().map_or("", |w| w.0).to_owned() }
    }
}

type Cells = Vec<(SyncEvent, Actions)>;

fn unknown(key: &str, expected: &str) -> ModelError {
    ModelError::UnknownKey { key: key.to_owned(), expected: expected.to_owned() }
}

fn base_of<'a>(name: &str, body: &'a toml::Table) -> Result<Option<&'a str>, ModelError> {
    body.get("base")
        .map(|v| {
            v.as_str().ok_or_else(|| unknown(&format!("models.{name}.base"), "a model's name"))
        })
        .transpose()
}

fn cells_of(name: &str, body: &toml::Table) -> Result<Cells, ModelError> {
    let mut cells = Vec::new();
    for (key, value) in body.iter().filter(|(k, _)| *k != "base") {
        let path = format!("models.{name}.{key}");
        let Some(event) = SyncEvent::from_name(key) else {
            let names: Vec<_> = SyncEvent::ALL.iter().map(|e| e.name()).collect();
            return Err(unknown(&path, &format!("base, {}", names.join(", "))));
        };
        cells.push((event, actions_of(&path, event, value)?));
    }
    Ok(cells)
}

fn actions_of(path: &str, event: SyncEvent, value: &toml::Value) -> Result<Actions, ModelError> {
    let bad = |v: &dyn std::fmt::Display| ModelError::BadAction {
        key: path.to_owned(),
        value: v.to_string(),
    };
    let list = value.as_array().ok_or_else(|| bad(value))?;
    let mut actions = Actions::NONE;
    for item in list {
        let text = item.as_str().ok_or_else(|| bad(item))?;
        let (slot, action, scope) = match text {
            "attach file" => (&mut actions.attach, "attach", Scope::File),
            "attach range" if event.has_range() => (&mut actions.attach, "attach", Scope::Range),
            "query file" => (&mut actions.query, "query", Scope::File),
            "query range" if event.has_range() => (&mut actions.query, "query", Scope::Range),
            other => return Err(bad(&other)),
        };
        if slot.replace(scope).is_some() {
            return Err(ModelError::Duplicate { key: path.to_owned(), action });
        }
    }
    Ok(actions)
}

fn check_useful(model: &Model) -> Result<(), ModelError> {
    let msc = model.msc();
    let name = || model.name().to_owned();
    if msc.publish.is_some_and(|s| s.is_empty()) {
        return Err(ModelError::Useless { name: name(), what: "visible (no attach)" });
    }
    if msc.observe.is_some_and(|s| s.is_empty()) {
        return Err(ModelError::Useless { name: name(), what: "of others seen (no query)" });
    }
    Ok(())
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
