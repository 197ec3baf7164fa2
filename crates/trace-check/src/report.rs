//! The verdicts, as text and as JSON.

use crate::{Places, Traced, words};
use ebb_consistency::Model;
use ebb_consistency::checker::File;
use ebb_consistency::sweep::{Group, Party, Verdict};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// Races of one model that are shown; the rest is counted.
const SHOWN: usize = 20;

/// What a model makes of a trace.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The model, or models.
    pub name: String,
    /// The races.
    pub verdict: Verdict,
}

impl Checked {
    /// How many files are raced for.
    #[must_use]
    pub fn files(&self) -> usize {
        let mut files: Vec<File> = self.verdict.groups.iter().map(|g| g.file).collect();
        files.dedup();
        files.len()
    }
}

/// Checks a trace under several models; `rule` has a model for paths that need another one.
#[must_use]
pub fn check(
    traced: &Traced,
    models: &[Arc<Model>],
    rule: &(dyn Fn(&[u8]) -> Option<Arc<Model>> + Sync),
) -> Vec<Checked> {
    let others: Vec<Option<Arc<Model>>> = traced.files.iter().map(|f| rule(&f.path)).collect();
    let one = |model: &Arc<Model>| -> Checked {
        let of =
            |file: File| -> &Model { others[file.0 as usize].as_deref().unwrap_or(model.as_ref()) };
        let verdict = traced.sorted.check_with(&of);
        Checked { name: model.name().to_owned(), verdict }
    };
    let mut checked = Vec::new();
    let together = std::thread::available_parallelism().map_or(1, usize::from).min(4);
    for some in models.chunks(together) {
        std::thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|m| scope.spawn(|| one(m))).collect();
            for thread in threads {
                match thread.join() {
                    Ok(done) => checked.push(done),
                    Err(cause) => std::panic::resume_unwind(cause),
                }
            }
        });
    }
    checked
}

/// The places that a report names.
pub(crate) fn named<'a>(traced: &'a Traced, checked: &[Checked]) -> Places {
    let groups = checked.iter().flat_map(|c| c.verdict.groups.iter().take(SHOWN));
    let sites = groups.flat_map(|g| [g.example.first.site, g.example.second.site]);
    let places: Vec<&'a crate::Place> = sites.map(|s| traced.place(s)).collect();
    Places::of(places.into_iter())
}

pub(crate) fn path(traced: &Traced, file: File) -> String {
    String::from_utf8_lossy(&traced.files[file.0 as usize].path).into_owned()
}

/// The report as text.
#[must_use]
pub fn text(traced: &Traced, checked: &[Checked]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_text(traced, checked, &mut out);
    out
}

fn write_text(traced: &Traced, checked: &[Checked], out: &mut String) -> std::fmt::Result {
    let (processes, files) = (traced.processes.len(), traced.files.len());
    writeln!(out, "{processes} process(es), {files} file(s), {} records", traced.records)?;
    for doubt in words::doubts(&traced.doubts) {
        writeln!(out, "note: {doubt}")?;
    }
    writeln!(out, "\n{:<16} {:>12} {:>8} {:>8}", "model", "races", "places", "files")?;
    for c in checked {
        let (races, places) = (c.verdict.races(), c.verdict.groups.len());
        writeln!(out, "{:<16} {races:>12} {places:>8} {:>8}", c.name, c.files())?;
    }
    let places = named(traced, checked);
    for c in checked {
        for group in c.verdict.groups.iter().take(SHOWN) {
            write_group(traced, &places, &c.name, group, out)?;
        }
        if c.verdict.groups.len() > SHOWN {
            let more = c.verdict.groups.len() - SHOWN;
            writeln!(
                out,
                "\n{more} more pair(s) of places race under {} (--json has all)",
                c.name
            )?;
        }
    }
    Ok(())
}

fn write_group(
    traced: &Traced,
    places: &Places,
    model: &str,
    group: &Group,
    out: &mut String,
) -> std::fmt::Result {
    let e = &group.example;
    writeln!(out, "\n{model}: {}, {}", path(traced, group.file), words::bytes(e.range))?;
    writeln!(out, "  {}", words::party(traced, places, &e.first))?;
    writeln!(out, "  {}", words::party(traced, places, &e.second))?;
    writeln!(out, "  {}", words::missing(&e.missing))?;
    if group.pairs > 1 {
        let (pairs, hull) = (group.pairs, words::bytes(group.hull));
        writeln!(out, "  {pairs} pairs of these two places race, within {hull}")?;
    }
    Ok(())
}

/// The report as JSON.
#[must_use]
pub fn json(traced: &Traced, checked: &[Checked]) -> Value {
    let places = named(traced, checked);
    let party = |p: &Party| {
        let (process, place) = (&traced.processes[p.process.0 as usize], traced.place(p.site));
        json!({
            "host": process.host, "pid": process.pid, "rank": process.rank, "program": process.program,
            "record": p.step, "call": place.call.name(), "act": format!("{:?}", p.act).to_lowercase(),
            "start": p.range.start(), "end": p.range.end(), "place": places.name(place),
        })
    };
    let group = |g: &Group| {
        json!({
            "file": path(traced, g.file), "start": g.hull.start(), "end": g.hull.end(),
            "pairs": g.pairs, "unordered": g.unordered,
            "first": party(&g.example.first), "second": party(&g.example.second),
            "missing": words::missing(&g.example.missing),
        })
    };
    let model = |c: &Checked| {
        json!({
            "model": c.name, "races": c.verdict.races(), "conflicts": c.verdict.conflicts,
            "files": c.files(), "groups": c.verdict.groups.iter().map(group).collect::<Vec<_>>(),
        })
    };
    json!({
        "processes": traced.processes.len(), "files": traced.files.len(), "records": traced.records,
        "notes": words::doubts(&traced.doubts), "idle_syncs": traced.doubts.idle_syncs,
        "models": checked.iter().map(model).collect::<Vec<_>>(),
    })
}
