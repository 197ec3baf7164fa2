//! Random histories of three nodes on one tree, with a rebuild of the service after every few dozen steps.

use super::{builder, lose_and_rebuild, read, sync};
use ebb_testkit::{Node, random};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::amount;
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

/// What the tree should be: directories, and files with their bytes and modes. Links share a number.
#[derive(Default)]
struct Tree {
    dirs: BTreeSet<String>,
    names: BTreeMap<String, u64>,
    files: BTreeMap<u64, (Vec<u8>, u32)>,
    writers: BTreeMap<u64, BTreeSet<String>>,
    next: u64,
}

impl Tree {
    fn some_name(&self, dice: &mut ChaCha8Rng) -> Option<String> {
        let names: Vec<&String> = self.names.keys().collect();
        names.choose(dice).map(|name| (*name).clone())
    }

    fn new_name(&self, dice: &mut ChaCha8Rng) -> String {
        let dirs: Vec<&String> = self.dirs.iter().collect();
        let n = dice.random_range(0..12);
        match dirs.choose(dice).filter(|_| dice.random_bool(0.6)) {
            Some(dir) => format!("{dir}/f{n}"),
            None => format!("f{n}"),
        }
    }

    fn act(&mut self, node: &Node, dice: &mut ChaCha8Rng) {
        self.do_it(dice.random_range(0..100), node, dice);
    }

    /// True when nobody but this node has written to what has this name. What a node had not published of
    /// a file that another one has removed just before is not known to be deleted afterwards.
    fn is_of(&self, name: &str, node: &Node) -> bool {
        let number = self.names.get(name);
        number.is_none_or(|n| self.writers[n].iter().all(|writer| writer == node.name()))
    }

    fn wrote(&mut self, name: &str, node: &Node) {
        let number = self.names[name];
        self.writers.entry(number).or_default().insert(node.name().to_owned());
    }

    fn do_it(&mut self, what: u32, node: &Node, dice: &mut ChaCha8Rng) {
        match what {
            0..35 => {
                let name = self.new_name(dice);
                let data = bytes(3, self.next, 0, dice.random_range(1..100_000));
                told(node, format_args!("create {name}, {} bytes", data.len()));
                let mut file = File::create(node.path(&name)).expect("create");
                file.write_all(&data).expect("write");
                if dice.random_bool(0.5) {
                    file.sync_all().expect("fsync");
                }
                self.next += 1;
                let number = *self.names.entry(name.clone()).or_insert(self.next);
                self.wrote(&name, node);
                self.files.entry(number).or_insert((Vec::new(), 0o644)).0 = data;
            }
            35..50 => {
                let Some(name) = self.some_name(dice) else { return };
                let (data, _) = self.files.get_mut(&self.names[&name]).expect("a file");
                let at = dice.random_range(0..=data.len());
                let patch = vec![dice.random_range(1..=255u8); dice.random_range(1..9_000)];
                told(node, format_args!("write {name} at {at}, {} bytes", patch.len()));
                let file = File::options().write(true).open(node.path(&name)).expect("open");
                file.write_all_at(&patch, at as u64).expect("write");
                data.resize(data.len().max(at + patch.len()), 0);
                data[at..at + patch.len()].copy_from_slice(&patch);
                self.wrote(&name, node);
            }
            50..58 => {
                let Some(name) = self.some_name(dice) else { return };
                let (data, _) = self.files.get_mut(&self.names[&name]).expect("a file");
                let len = dice.random_range(0..=data.len() + 5_000);
                told(node, format_args!("truncate {name} to {len}"));
                let file = File::options().write(true).open(node.path(&name)).expect("open");
                file.set_len(len as u64).expect("truncate");
                data.resize(len, 0);
                self.wrote(&name, node);
            }
            58..70 => {
                let Some(from) = self.some_name(dice) else { return };
                let to = self.new_name(dice);
                if !self.is_of(&to, node) {
                    return;
                }
                told(node, format_args!("rename {from} to {to}"));
                fs::rename(node.path(&from), node.path(&to)).expect("rename");
                // Of two names of one file neither goes.
                if self.names.get(&to) != self.names.get(&from) {
                    let number = self.names.remove(&from).expect("it was there");
                    self.names.insert(to, number);
                }
            }
            70..78 => {
                let Some(name) = self.some_name(dice).filter(|name| self.is_of(name, node)) else {
                    return;
                };
                told(node, format_args!("unlink {name}"));
                fs::remove_file(node.path(&name)).expect("unlink");
                self.names.remove(&name);
            }
            78..84 => {
                let Some(name) = self.some_name(dice) else { return };
                let mode = dice.random_range(0o400..0o777) | 0o600;
                told(node, format_args!("chmod {name}"));
                fs::set_permissions(node.path(&name), Permissions::from_mode(mode)).expect("chmod");
                self.files.get_mut(&self.names[&name]).expect("a file").1 = mode;
            }
            84..90 => {
                let (Some(name), to) = (self.some_name(dice), self.new_name(dice)) else { return };
                if !self.names.contains_key(&to) {
                    told(node, format_args!("link {name} as {to}"));
                    fs::hard_link(node.path(&name), node.path(&to)).expect("link");
                    let number = self.names[&name];
                    self.names.insert(to, number);
                }
            }
            90..96 => {
                let parent = self.dirs.iter().nth(dice.random_range(0..=self.dirs.len()));
                let within = parent.map_or(String::new(), |parent| format!("{parent}/"));
                let dir = format!("{within}d{}", self.dirs.len());
                told(node, format_args!("mkdir {dir}"));
                fs::create_dir(node.path(&dir)).expect("mkdir");
                self.dirs.insert(dir);
            }
            _ => {
                told(node, format_args!("drain"));
                node.drain();
            }
        }
    }

    fn is_at(&self, root: &Path, what: &str) {
        let mut found = BTreeMap::new();
        list(root, "", &mut found);
        let files = self.names.iter().map(|(name, number)| {
            let (data, mode) = &self.files[number];
            (name.clone(), Some((data.clone(), *mode)))
        });
        let want: BTreeMap<_, _> =
            files.chain(self.dirs.iter().map(|dir| (dir.clone(), None))).collect();
        let names = |tree: &BTreeMap<String, Option<(Vec<u8>, u32)>>| {
            tree.iter()
                .map(|(name, of)| (name.clone(), of.as_ref().map(|f| f.1)))
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&found), names(&want), "{what}");
        for (name, file) in &want {
            if let Some((data, _)) = file {
                let got = found[name].as_ref().map(|f| f.0.clone()).unwrap_or_default();
                same(&format!("{what}: {name}"), &got, data);
            }
        }
    }
}

/// What is done is printed: shown when the test fails.
fn told(node: &Node, what: fmt::Arguments<'_>) {
    println!("{}: {what}", node.name());
}

fn list(root: &Path, below: &str, found: &mut BTreeMap<String, Option<(Vec<u8>, u32)>>) {
    for entry in fs::read_dir(root.join(below)).expect("list") {
        let entry = entry.expect("list");
        let name = entry.file_name().into_string().expect("a name of ours");
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        if entry.file_type().expect("type").is_dir() {
            found.insert(path.clone(), None);
            list(root, &path, found);
        } else {
            let mode = fs::metadata(root.join(&path)).expect("stat").mode() & 0o7777;
            found.insert(path.clone(), Some((read(&root.join(&path)), mode)));
        }
    }
}

/// Whatever was done before, on whichever node, and however much of it is on the backing.
#[test]
fn a_random_history_is_there_after_each_rebuild() {
    let seed = random::seed();
    for (round, flush) in ["end", "immediate", "idle"].into_iter().enumerate() {
        let seed = seed + round as u64;
        let mut dice = random::generator(seed);
        let mut cluster = builder("posix").flush(flush).start();
        let mut tree = Tree::default();
        for step in 0..amount("EBB_REBUILDS", 4) {
            for _ in 0..dice.random_range(1..40) {
                let node = dice.random_range(0..3);
                tree.act(cluster.node(node), &mut dice);
            }
            cluster.nodes().iter().for_each(sync);
            // Services are told apart by the second in which they begin.
            std::thread::sleep(Duration::from_millis(1100));
            let what = format!("seed {seed}, {flush}, rebuild {step}");
            println!("{what}");
            lose_and_rebuild(&mut cluster, 3);
            for node in cluster.nodes() {
                tree.is_at(node.mountpoint(), &format!("{what}, {}", node.name()));
            }
        }
        cluster.umount_all();
        tree.is_at(cluster.backing(), &format!("seed {seed}, {flush}, on the backing"));
    }
}
