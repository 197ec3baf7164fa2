//! What the rules of the house say of the tree, looked at.

use ebb_consistency::{Actions, ModelTable, Scope, SyncEvent};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Lines of a source file.
const LINES_MAX: usize = 700;
/// Words in docs with so many underscores, or more, are names of tests.
const UNDERSCORES: usize = 3;
/// Dependencies that are there for what they make cargo do, for code that is generated, or by another name.
const UNNAMED: [(&str, &str); 5] = [
    ("ebb-testkit", "proptest"),
    ("ebb-wire", "prost"),
    ("ebb-wire", "tonic-prost"),
    // Its library is called `ebb`.
    ("ebb-tests", "ebb-api"),
    ("ebb-benches", "ebb-api"),
];
/// So begin the names of numbers that Prometheus reads.
const NUMBER: &str = "ebb_";

/// Types whose methods are in more than [`FILES_MAX`] files, and in how many. No number may grow, and no type may come.
const SPREAD: [(&str, &str, usize); 7] = [
    ("consistency", "World", 8),
    ("fs-client", "Adapter", 9),
    ("fs-client", "Node", 46),
    ("meta-client", "MetaClient", 7),
    ("meta-server", "Call", 14),
    ("meta-server", "Core", 20),
    ("namespace", "Namespace", 13),
];
/// Files that the methods of one type may be in.
const FILES_MAX: usize = 5;
/// Where a model has its name in code: the default.
const NAMES_A_MODEL: [&str; 1] = ["crates/cli/src/settings/keys.rs"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

fn files_below(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() && entry.file_name() != "target" {
            found.extend(files_below(&path, ending));
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found
}

fn sources() -> Vec<PathBuf> {
    let dirs = ["crates", "tests", "benches"];
    dirs.iter().flat_map(|dir| files_below(&root().join(dir), ".rs")).collect()
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All words of some sources.
fn words(of: &[PathBuf]) -> BTreeSet<String> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let all = of.iter().map(|path| text(path));
    all.flat_map(|t| t.split(|c| !is_part(c)).map(str::to_owned).collect::<Vec<_>>()).collect()
}

struct Package {
    name: String,
    dir: PathBuf,
    /// Those that are built with it, and those of its tests and build scripts.
    needs: BTreeSet<String>,
    others: BTreeSet<String>,
}

fn packages() -> Vec<Package> {
    let mut manifests = vec![root().join("tests/Cargo.toml"), root().join("benches/Cargo.toml")];
    let crates = std::fs::read_dir(root().join("crates")).expect("crates").flatten();
    manifests.extend(crates.map(|entry| entry.path().join("Cargo.toml")));
    let package = |path: &PathBuf| {
        let manifest: toml::Table = text(path).parse().expect("a manifest");
        let of = |section: &str| -> BTreeSet<String> {
            let table = manifest.get(section).and_then(toml::Value::as_table);
            table.into_iter().flat_map(|t| t.keys().cloned()).collect()
        };
        Package {
            name: manifest["package"]["name"].as_str().expect("a name").to_owned(),
            dir: path.parent().expect("its directory").to_owned(),
            needs: of("dependencies"),
            others: of("dev-dependencies").union(&of("build-dependencies")).cloned().collect(),
        }
    };
    manifests.iter().map(package).collect()
}

#[test]
fn every_dependency_is_used_and_known_to_the_workspace() {
    let mut wrong = Vec::new();
    let mut used = BTreeSet::new();
    for package in packages() {
        let words = words(&files_below(&package.dir, ".rs"));
        for needed in package.needs.union(&package.others) {
            used.insert(needed.clone());
            let unnamed = UNNAMED.contains(&(package.name.as_str(), needed.as_str()));
            if !words.contains(&needed.replace('-', "_")) && !unnamed {
                wrong.push(format!("{} does not use {needed}", package.name));
            }
        }
    }
    let workspace: toml::Table = text(&root().join("Cargo.toml")).parse().expect("a manifest");
    let listed = workspace["workspace"]["dependencies"].as_table().expect("dependencies");
    let idle = listed.keys().filter(|name| !used.contains(*name));
    wrong.extend(idle.map(|name| format!("nobody uses {name}")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The list in the workspace's manifest says which are lower.
#[test]
fn dependencies_go_down_only() {
    let manifest = text(&root().join("Cargo.toml"));
    let own = manifest.lines().filter(|line| line.contains("path = \"crates/"));
    let order: Vec<&str> = own.filter_map(|line| line.split(' ').next()).collect();
    let level: BTreeMap<&str, usize> =
        order.iter().enumerate().map(|(i, name)| (*name, i)).collect();
    assert!(level.len() > 15, "the list was read");
    let mut wrong = Vec::new();
    for package in packages() {
        let own = level.get(package.name.as_str()).copied().unwrap_or(usize::MAX);
        let above = |needed: &&String| level.get(needed.as_str()).is_some_and(|at| *at >= own);
        let needs = package.needs.iter().filter(above);
        wrong.extend(needs.map(|needed| format!("{} needs {needed}", package.name)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_file_is_longer_than_a_reader_can_bear() {
    let long = |path: &PathBuf| text(path).lines().count() > LINES_MAX;
    let long: Vec<PathBuf> = sources().into_iter().filter(long).collect();
    assert!(long.is_empty(), "{long:?}");
}

/// A row of docs that says which test shows it.
/// Examples in documentation are not compiled: looking for them takes minutes, and there are none.
#[test]
fn what_documentation_shows_is_marked_as_text() {
    let mut wrong = Vec::new();
    for path in sources() {
        let text = text(&path);
        let words = text.lines().map(str::trim_start);
        let docs = words.filter_map(|l| l.strip_prefix("///").or_else(|| l.strip_prefix("//!")));
        let fences = docs.map(str::trim).filter(|line| line.starts_with("```"));
        let begins = fences.step_by(2);
        wrong
            .extend(begins.filter(|f| *f != "```text").map(|f| format!("{}: {f}", path.display())));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_test_that_docs_name_is_there() {
    let words = words(&sources());
    let (mut named, mut missing) = (0, Vec::new());
    for doc in files_below(&root().join("docs"), ".md") {
        let text = text(&doc);
        // What is between two of them is code.
        for name in text.split('`').skip(1).step_by(2) {
            let is_name =
                name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            let is_test = is_name && !name.starts_with(NUMBER);
            if is_test && name.matches('_').count() >= UNDERSCORES {
                named += 1;
                if !words.contains(name) {
                    missing.push(format!("{}: {name}", doc.display()));
                }
            }
        }
    }
    assert!(named > 100, "docs were read: {named}");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// The crates' code, without that of tests.
fn shipped() -> Vec<(PathBuf, String)> {
    let is_shipped = |path: &PathBuf| {
        let name = path.file_stem().expect("a name").to_string_lossy();
        let of_tests = path.components().any(|part| part.as_os_str() == "tests");
        !of_tests && name != "tests" && !name.ends_with("_tests")
    };
    let files = files_below(&root().join("crates"), ".rs");
    let code = files.into_iter().filter(is_shipped).map(|path| {
        let text = text(&path);
        let code = text.split("#[cfg(test)]\nmod tests {").next().expect("the first part");
        let relative = path.strip_prefix(root()).expect("below the root").to_owned();
        (relative, code.to_owned())
    });
    code.collect()
}

/// A model is a row of a table: what else would have to be changed for another one?
#[test]
fn no_code_outside_of_consistency_names_a_model() {
    let table = ModelTable::builtin();
    let names: Vec<String> = table.names().iter().map(|name| format!("\"{name}\"")).collect();
    let mut wrong = Vec::new();
    for (path, code) in shipped() {
        let known = NAMES_A_MODEL.iter().any(|known| path.ends_with(known));
        if known || ["crates/consistency", "crates/testkit"].iter().any(|c| path.starts_with(c)) {
            continue;
        }
        let named = names.iter().filter(|name| code.contains(name.as_str()));
        wrong.extend(named.map(|name| format!("{}: {name}", path.display())));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The cells of a table's row, after the name of the model.
fn cells(line: &str) -> Vec<&str> {
    line.trim_matches('|').split('|').skip(1).map(str::trim).collect()
}

fn in_words(does: Actions) -> String {
    let (publish, look_up) = (does.attach.map(|_| "publish"), does.query.map(|_| "look up"));
    publish.into_iter().chain(look_up).collect::<Vec<_>>().join(", ")
}

fn in_letters(does: Actions) -> String {
    let of = |what, scope: Option<Scope>| scope.map(|s| format!("{what}{}", &s.name()[..1]));
    let both = [of("A", does.attach), of("Q", does.query)];
    both.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// The tables of models in documentation are the one that decides.
#[test]
fn tables_of_models_are_what_is_done() {
    let pages: [(&str, fn(Actions) -> String); 2] =
        [("docs/semantics.md", in_words), ("crates/consistency/src/table.rs", in_letters)];
    let mut rows = 0;
    for (page, said) in pages {
        let text = text(&root().join(page));
        for line in text.lines() {
            let line = line.trim_start_matches("//! ");
            let name = line.strip_prefix("| ").and_then(|rest| rest.split([' ', '|']).next());
            let Some(model) = name.and_then(|name| ModelTable::builtin().get(name)) else {
                continue;
            };
            for (cell, event) in cells(line).into_iter().zip(SyncEvent::ALL) {
                let done = said(model.on(event));
                assert_eq!(
                    cell.trim_matches('–'),
                    done,
                    "{page}: {}, {}",
                    model.name(),
                    event.name()
                );
            }
            rows += 1;
        }
    }
    assert_eq!(rows, 2 * ModelTable::builtin().names().len(), "every model has its row");
}

/// The number that stands behind `word` for the first time.
fn number_behind(text: &str, word: &str) -> Option<u32> {
    let rest = text.split_once(word)?.1;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// docs/journal.md describes the formats that are written.
#[test]
fn formats_of_journals_are_those_that_docs_describe() {
    let page = text(&root().join("docs/journal.md"));
    let journals = [
        ("crates/meta-server/src/journal/format.rs", "\"EBBJRNL1\" | "),
        ("crates/node-journal/src/format.rs", "\"EBBNODE1\" | "),
    ];
    for (code, header) in journals {
        let written = number_behind(&text(&root().join(code)), "const FORMAT: u32 = ");
        assert!(written.is_some(), "{code} has no format");
        assert_eq!(number_behind(&page, header), written, "docs/journal.md beside {code}");
    }
}

#[test]
fn every_benchmark_is_in_the_table_of_docs() {
    let page = text(&root().join("docs/benchmarks.md"));
    let mut dirs = vec![root().join("benches/benches")];
    let crates = std::fs::read_dir(root().join("crates")).expect("crates").flatten();
    dirs.extend(crates.map(|entry| entry.path().join("benches")).filter(|dir| dir.is_dir()));
    let all = dirs.iter().flat_map(|dir| files_below(dir, ".rs"));
    let all =
        all.map(|path| path.strip_prefix(root()).expect("below the root").display().to_string());
    let missing: Vec<String> = all.filter(|path| !page.contains(path)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The files in which each type has methods. (A name that several types of a crate have is none of them.)
fn spread() -> BTreeMap<(String, String), BTreeSet<PathBuf>> {
    let mut found: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    let mut types: BTreeMap<_, usize> = BTreeMap::new();
    for (path, code) in shipped() {
        let of = path.components().nth(1).expect("a crate").as_os_str().to_string_lossy();
        let named = |rest: &str| {
            let name = rest.split(|c: char| !c.is_alphanumeric()).next().expect("the first part");
            (of.to_string(), name.to_owned())
        };
        for line in code.lines() {
            let public = line.split_once("struct ").or_else(|| line.split_once("enum "));
            if let Some((_, rest)) = public.filter(|(before, _)| {
                before.is_empty() || *before == "pub " || *before == "pub(crate) "
            }) {
                *types.entry(named(rest)).or_default() += 1;
            }
            // Behind `impl<..>`.
            if let Some(rest) = line.strip_prefix("impl").filter(|rest| !rest.contains(" for ")) {
                let rest =
                    rest.strip_prefix('<').and_then(|l| l.split_once("> ")).map_or(rest, |l| l.1);
                found.entry(named(rest.trim())).or_default().insert(path.clone());
            }
        }
    }
    found.retain(|name, _| types.get(name).is_none_or(|n| *n == 1));
    found
}

/// Who reads a type should not have to open many files. What is spread already may not be more so.
#[test]
fn no_type_is_spread_over_more_files_than_before() {
    let found = spread();
    let wide = found.iter().filter(|(_, files)| files.len() > FILES_MAX);
    let wide: Vec<_> =
        wide.map(|((of, name), files)| (of.as_str(), name.as_str(), files.len())).collect();
    assert_eq!(wide, SPREAD, "fewer: lower the number; more: cut the type");
}
