//! Which model a program needs, by its trace.

use crate::report::path;
use crate::{Checked, Traced, words};
use ebb_consistency::Model;
use ebb_consistency::checker::File;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Files that are named in rules at most: more of them want a directory of their own.
const RULES_MAX: usize = 8;
/// What most systems hand from one writer to another as a whole.
const PAGE: u64 = 4096;

/// What is advised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// The weakest model without races; none when every model has some.
    pub model: Option<String>,
    /// A weaker model, and the files that need more: path and model.
    pub rules: Option<(String, Vec<(String, String)>)>,
    /// Things that are no races.
    pub warnings: Vec<String>,
}

/// Advises by the verdicts of `models`, in the same order.
#[must_use]
pub fn advise(traced: &Traced, models: &[Arc<Model>], checked: &[Checked]) -> Advice {
    let racing: Vec<BTreeSet<File>> =
        checked.iter().map(|c| c.verdict.groups.iter().map(|g| g.file).collect()).collect();
    let model = weakest(traced, models, &|i| racing[i].is_empty());
    let rules = model.and_then(|best| rules(traced, models, &racing, best));
    let name = |i: usize| models[i].name().to_owned();
    Advice {
        model: model.map(name),
        rules: rules.map(|(base, of)| {
            (name(base), of.into_iter().map(|(f, m)| (path(traced, f), name(m))).collect())
        }),
        warnings: warnings(traced, checked),
    }
}

/// Of the models that will do, one that none of the others is weaker than; of several the cheapest.
fn weakest(
    traced: &Traced,
    models: &[Arc<Model>],
    will_do: &dyn Fn(usize) -> bool,
) -> Option<usize> {
    let fine: Vec<usize> = (0..models.len()).filter(|i| will_do(*i)).collect();
    let is_least =
        |i: &&usize| !fine.iter().any(|j| models[*j].msc().is_weaker_than(&models[**i].msc()));
    let cost = |i: &&usize| traced.requests.get(**i).map_or(0, crate::Requests::all);
    fine.iter().filter(is_least).min_by_key(cost).copied()
}

/// The weakest model with which only a few files need another one.
fn rules(
    traced: &Traced,
    models: &[Arc<Model>],
    racing: &[BTreeSet<File>],
    best: usize,
) -> Option<(usize, BTreeMap<File, usize>)> {
    let few = |i: usize| {
        let weaker = models[i].msc().is_weaker_than(&models[best].msc());
        weaker && racing[i].len() <= RULES_MAX && racing[i].len() < traced.files.len()
    };
    let base = weakest(traced, models, &few)?;
    let mut of = BTreeMap::new();
    for file in &racing[base] {
        of.insert(*file, weakest(traced, models, &|i| !racing[i].contains(file))?);
    }
    Some((base, of))
}

fn warnings(traced: &Traced, checked: &[Checked]) -> Vec<String> {
    let mut said = words::doubts(&traced.doubts);
    if traced.doubts.idle_syncs > 0 {
        said.push(format!(
            "{} call(s) of MPI_File_sync did not reach the file system: the MPI library leaves out those of \
             processes that have written nothing, so under the model mpiio they do not look for what others \
             wrote (romio is made for that)",
            traced.doubts.idle_syncs
        ));
    }
    let late = |c: &&Checked| {
        let is_chain = |g: &ebb_consistency::sweep::Group| {
            g.example.missing == ebb_consistency::checker::Missing::Chain
        };
        c.verdict.groups.iter().any(is_chain)
    };
    if let Some(c) = checked.iter().find(late) {
        said.push(format!(
            "files are opened by readers before their writers have closed or synced them (under {}): close \
             before the barrier, open after it",
            c.name
        ));
    }
    for (file, places) in traced.sorted.shared_spans(PAGE) {
        said.push(format!(
            "{}: different processes write into the same {PAGE} bytes without overlapping, at {places} \
             place(s): align their parts",
            path(traced, file)
        ));
    }
    said
}

impl Advice {
    /// In words, with what each model would cost.
    #[must_use]
    pub fn text(&self, traced: &Traced, checked: &[Checked]) -> String {
        let mut out =
            format!("{:<16} {:>12} {:>12} {:>12}\n", "model", "races", "attaches", "queries");
        for c in checked {
            let asked = traced.requests.iter().find(|r| r.model == c.name);
            let (attaches, queries) = asked.map_or((0, 0), |r| (r.attaches, r.queries));
            let races = c.verdict.races();
            out += &format!("{:<16} {races:>12} {attaches:>12} {queries:>12}\n", c.name);
        }
        out += "(requests at most, counted from the calls; leases save most queries)\n\n";
        out += &match &self.model {
            Some(model) => format!("advice: --consistency {model}\n"),
            None => "advice: none of these models makes the program right: the races that all of them have \
                     must be fixed in it (`ebb check DIR --model posix` names them)\n"
                .to_owned(),
        };
        if let Some((base, rules)) = &self.rules {
            let rule = |(path, model): &(String, String)| {
                let name = path.rsplit('/').next().unwrap_or_default();
                format!(" --rule '**/{name}={model}'")
            };
            let rules: String = rules.iter().map(rule).collect();
            out += &format!("or, weaker where that will do: --consistency {base}{rules}\n");
        }
        for warning in &self.warnings {
            out += &format!("note: {warning}\n");
        }
        out
    }

    /// As JSON.
    #[must_use]
    pub fn json(&self, traced: &Traced, checked: &[Checked]) -> serde_json::Value {
        let model = |c: &Checked| {
            let asked = traced.requests.iter().find(|r| r.model == c.name);
            serde_json::json!({
                "model": c.name, "races": c.verdict.races(),
                "attaches": asked.map(|r| r.attaches), "queries": asked.map(|r| r.queries),
            })
        };
        serde_json::json!({
            "model": self.model,
            "rules": self.rules.as_ref().map(|(base, of)| serde_json::json!({
                "model": base,
                "files": of.iter().map(|(path, model)| serde_json::json!({"file": path, "model": model}))
                    .collect::<Vec<_>>(),
            })),
            "warnings": self.warnings,
            "models": checked.iter().map(model).collect::<Vec<_>>(),
        })
    }
}
