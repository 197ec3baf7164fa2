//! Nodes that open, write, append, cut, look at and close files in turn, one operation at a time: each
//! sees what all have done before.

use crate::content::same;
use crate::nodes::{append, open};
use ebb_testkit::Cluster;
use ebb_testkit::random::{generator, seed};
use rand::{Rng, RngCore};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// How they take turns.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// Operations of all nodes together.
    pub steps: usize,
    /// Another node has the turn after so many, about; mostly the one before closes its files then.
    pub in_a_row: u32,
    /// Now and then nobody does anything for a moment.
    pub pauses: bool,
    /// Every change is followed by an fsync, for models that publish there.
    pub commits: bool,
}

const FILES: usize = 3;

impl Turns {
    /// Has the nodes do so, and `counted` look at them; unmounts, and compares the backing.
    ///
    /// # Panics
    /// When somebody sees anything else than what was done.
    pub fn take(self, cluster: &Cluster, counted: impl FnOnce(&Cluster)) {
        let seed = seed();
        let mut random = generator(seed);
        let mut want: Vec<Vec<u8>> = vec![Vec::new(); FILES];
        let nodes = cluster.nodes().len();
        let mut files: Vec<Vec<Option<File>>> =
            (0..nodes).map(|_| (0..FILES).map(|_| None).collect()).collect();
        (0..FILES).for_each(|f| drop(open(&cluster.node(0).path(format!("f{f}")))));
        let mut n = 0;
        for step in 0..self.steps {
            if random.random_range(0..self.in_a_row) == 0 {
                if random.random_range(0..3) > 0 {
                    files[n].iter_mut().for_each(|file| *file = None);
                }
                n = random.random_range(0..nodes);
            }
            if self.pauses && random.random_range(0..30) == 0 {
                std::thread::sleep(Duration::from_millis(700));
            }
            let f = random.random_range(0..FILES);
            let path = cluster.node(n).path(format!("f{f}"));
            let what = format!("seed {seed}, step {step}, node {n}, file {f}");
            let content = &mut want[f];
            let mut data = vec![0; random.random_range(1..5000)];
            random.fill_bytes(&mut data);
            let commit = |file: &File| {
                if self.commits {
                    file.sync_all().expect("commit");
                }
            };
            let choice = random.random_range(0..22);
            if choice >= 19 {
                files[n][f] = None;
                if choice == 21 {
                    std::fs::write(&path, &data).expect("write anew");
                    content.clone_from(&data);
                }
                continue;
            }
            let file = files[n][f].get_or_insert_with(|| open(&path));
            match choice {
                0..9 => {
                    let offset = random.random_range(0..=content.len() + 500);
                    file.write_all_at(&data, offset as u64).expect("write");
                    let end = (offset + data.len()).max(content.len());
                    content.resize(end, 0);
                    content[offset..offset + data.len()].copy_from_slice(&data);
                    commit(file);
                }
                9..12 => {
                    let mut end = append(&path);
                    end.write_all(&data).expect("append");
                    content.extend(&data);
                    commit(&end);
                }
                12 => {
                    let len = random.random_range(0..=content.len() + 2000);
                    file.set_len(len as u64).expect("cut");
                    content.resize(len, 0);
                }
                13 => file.sync_all().expect("fsync"),
                14..17 => {
                    same(&what, &std::fs::read(&path).expect("read"), content);
                    let mut got = vec![0; content.len()];
                    file.read_exact_at(&mut got, 0).expect("read");
                    same(&format!("{what}, by the open file"), &got, content);
                }
                _ => {
                    assert_eq!(
                        file.metadata().expect("stat").len(),
                        content.len() as u64,
                        "{what}"
                    );
                    let stat = std::fs::metadata(&path).expect("stat");
                    assert_eq!(stat.len(), content.len() as u64, "{what}: by its name");
                }
            }
        }
        counted(cluster);
        drop(files);
        cluster.umount_all();
        for (f, want) in want.iter().enumerate() {
            let there = std::fs::read(cluster.backing().join(format!("f{f}"))).expect("read");
            same(&format!("seed {seed}: file {f} on the backing"), &there, want);
        }
    }
}
