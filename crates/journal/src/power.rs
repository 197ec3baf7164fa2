//! A storage in memory that remembers every step, so that a test can ask what the disk may hold
//! when the power went after any of them: what was synced is there; what was not is there or not,
//! sector by sector, in any order; names change in order, but late.

use crate::storage::{Storage, Stored};
use ebb_locks::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// What a disk writes at once.
pub const SECTOR_BYTES: usize = 512;

/// Up to so many sectors in doubt every combination is tried.
const ALL_COMBINATIONS_MAX: usize = 6;

type FileId = usize;

#[derive(Clone, Debug)]
enum Step {
    Create(FileId, String),
    Write(FileId, u64, Vec<u8>),
    Sync(FileId),
    Rename(String, String),
    SyncNames,
    Note(u64),
}

/// The storage; clones are the same one.
#[derive(Clone, Default)]
pub struct Disk(Arc<Mutex<Vec<Step>>>);

struct DiskFile {
    disk: Disk,
    id: FileId,
}

/// Files by name, as somebody finds them who switches the machine on again.
pub type Image = BTreeMap<String, Vec<u8>>;

/// How much of what was not synced is there after a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Only the process died: everything written is there.
    Process,
    /// The power went.
    Power,
}

impl Disk {
    /// Notes that something was promised now.
    pub fn note(&self, what: u64) {
        self.0.lock().push(Step::Note(what));
    }

    /// How many steps were made.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.0.lock().len()
    }

    /// What had been noted before step `cut`.
    #[must_use]
    pub fn notes(&self, cut: usize) -> Vec<u64> {
        let note = |s: &Step| if let Step::Note(n) = s { Some(*n) } else { None };
        self.0.lock()[..cut].iter().filter_map(note).collect()
    }

    /// Everything that may be found when it ended after `cut` steps. `variants` bounds the random
    /// combinations where there are too many for all of them.
    #[must_use]
    pub fn images(&self, cut: usize, loss: Loss, variants: usize, seed: u64) -> Vec<Image> {
        let steps = self.0.lock()[..cut].to_vec();
        let world = World::after(&steps);
        if loss == Loss::Process {
            return vec![world.image(usize::MAX, &|_, _| true)];
        }
        let sectors: usize = world.files.values().map(|f| f.doubtful.len()).sum();
        let mut images = Vec::new();
        for names in 0..=world.late_names.len() {
            let mut with = |kept: &dyn Fn(usize) -> bool| {
                let image = world.image(names, &|base, i| kept(base + i));
                if !images.contains(&image) {
                    images.push(image);
                }
            };
            if sectors <= ALL_COMBINATIONS_MAX {
                (0u32..1 << sectors).for_each(|set| with(&|i| set >> i & 1 == 1));
                continue;
            }
            (0..=sectors).for_each(|n| with(&|i| i < n)); // torn at every sector
            (0..sectors).for_each(|n| with(&|i| i == n)); // one alone is there
            (0..sectors).for_each(|n| with(&|i| i != n)); // one alone is missing
            for variant in 0..variants {
                let mut dice = ChaCha8Rng::seed_from_u64(seed ^ variant as u64);
                let share = dice.random_range(0.05..0.95);
                let set: Vec<bool> = (0..sectors).map(|_| dice.random_bool(share)).collect();
                with(&|i| set[i]);
            }
        }
        images
    }

    fn push(&self, step: Step) {
        self.0.lock().push(step);
    }
}

/// What is certain and what is in doubt after some steps.
#[derive(Default)]
struct World {
    files: BTreeMap<FileId, OneFile>,
    names: BTreeMap<String, FileId>,
    late_names: Vec<Step>,
}

#[derive(Default)]
struct OneFile {
    certain: Vec<u8>,
    /// Pieces of at most a sector, in the order they were written.
    doubtful: Vec<(usize, Vec<u8>)>,
}

impl World {
    fn after(steps: &[Step]) -> World {
        let mut world = World::default();
        for step in steps {
            match step {
                Step::Create(id, _) => {
                    world.files.insert(*id, OneFile::default());
                    world.late_names.push(step.clone());
                }
                Step::Rename(..) => world.late_names.push(step.clone()),
                Step::Write(id, at, bytes) => {
                    let file = world.files.entry(*id).or_default();
                    file.doubtful.extend(sectors(*at as usize, bytes));
                }
                Step::Sync(id) => world.files.entry(*id).or_default().settle(),
                Step::SyncNames => {
                    let late = std::mem::take(&mut world.late_names);
                    late.iter().for_each(|s| change_names(&mut world.names, s));
                }
                Step::Note(_) => {}
            }
        }
        world
    }

    fn image(&self, late_names: usize, kept: &dyn Fn(usize, usize) -> bool) -> Image {
        let mut names = self.names.clone();
        let late = late_names.min(self.late_names.len());
        self.late_names[..late].iter().for_each(|s| change_names(&mut names, s));
        let mut contents = BTreeMap::new();
        let mut base = 0;
        for (id, file) in &self.files {
            contents.insert(*id, file.with(&|i| kept(base, i)));
            base += file.doubtful.len();
        }
        let content = |id| contents.get(&id).cloned().unwrap_or_default();
        names.into_iter().map(|(name, id)| (name, content(id))).collect()
    }
}

fn change_names(names: &mut BTreeMap<String, FileId>, step: &Step) {
    match step {
        Step::Create(id, name) => drop(names.insert(name.clone(), *id)),
        Step::Rename(from, to) => {
            if let Some(id) = names.remove(from) {
                names.insert(to.clone(), id);
            }
        }
        _ => {}
    }
}

fn sectors(mut at: usize, mut bytes: &[u8]) -> Vec<(usize, Vec<u8>)> {
    let mut out = Vec::new();
    while !bytes.is_empty() {
        let n = (SECTOR_BYTES - at % SECTOR_BYTES).min(bytes.len());
        out.push((at, bytes[..n].to_vec()));
        (at, bytes) = (at + n, &bytes[n..]);
    }
    out
}

impl OneFile {
    fn settle(&mut self) {
        self.certain = self.with(&|_| true);
        self.doubtful.clear();
    }

    fn with(&self, kept: &dyn Fn(usize) -> bool) -> Vec<u8> {
        let mut out = self.certain.clone();
        for (i, (at, bytes)) in self.doubtful.iter().enumerate() {
            if kept(i) {
                // A file that is longer than what reached it has zeros in between.
                out.resize(out.len().max(at + bytes.len()), 0);
                out[*at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
        out
    }
}

impl Storage for Disk {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let steps = self.0.lock().clone();
        let world = World::after(&steps);
        Ok(world.image(usize::MAX, &|_, _| true).remove(name))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn Stored>> {
        let mut steps = self.0.lock();
        let id = steps.len();
        steps.push(Step::Create(id, name.to_owned()));
        Ok(Arc::new(DiskFile { disk: self.clone(), id }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.push(Step::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.push(Step::SyncNames);
        Ok(())
    }
}

impl Stored for DiskFile {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.disk.push(Step::Write(self.id, offset, bytes.to_vec()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.push(Step::Sync(self.id));
        Ok(())
    }

    fn reserve(&self, _offset: u64, _len: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_synced_is_always_there_and_the_rest_in_every_combination() {
        let disk = Disk::default();
        let file = disk.create("new").unwrap();
        file.write_at(&[1; 600], 0).unwrap();
        file.sync().unwrap();
        disk.rename("new", "j").unwrap();
        disk.sync_names().unwrap();
        file.write_at(&[2; 512], 1024).unwrap();
        file.write_at(&[3; 100], 600).unwrap();
        let images = disk.images(disk.steps(), Loss::Power, 0, 1);
        assert_eq!(images.len(), 4);
        for image in &images {
            let found = &image["j"];
            assert!(found.len() >= 600 && found[..600] == [1; 600]);
        }
        let lost_first = images.iter().find(|i| i["j"].len() == 1536 && i["j"][600] == 0);
        assert!(lost_first.is_some_and(|i| i["j"][1024..] == [2; 512]), "reordered");
        let before = disk.images(4, Loss::Power, 0, 1);
        let has = |name: &str| before.iter().any(|i| i.contains_key(name));
        assert!(has("j") && has("new") && before.iter().any(Image::is_empty));
        let process = disk.images(4, Loss::Process, 0, 1);
        assert_eq!(process.len(), 1);
        assert_eq!(process[0]["j"], [1; 600]);
    }
}
