//! What the rules of the house say of the tree, looked at.

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
