//! How the bytes of a new file are to be spread over the targets of a Lustre backing: asked once
//! for each file, just before its part file is made, because stripes cannot be changed after the
//! first write. On any other backing, and without `--jobs-hint`, nothing is chosen and files are
//! made as they always are. How stripes are set is `ebb-backend`'s.

use crate::backing::Backing;
use crate::core::Core;
use crate::state::State;
use ebb_backend::lustre::{Facts, STRIPES_MAX};
use ebb_contention::{Question, advise};
use ebb_types::{Ino, Striping};

/// What is known when files are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripes {
    jobs: u32,
    facts: Facts,
}

/// A file that gets its place on the backing now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NewFile {
    /// Its size, as published; later writes may make it longer.
    size: u64,
    /// Nodes whose caches have bytes of it.
    writers: usize,
    /// Nodes of the job.
    nodes: usize,
}

impl Stripes {
    /// Looks whether there is anything to choose on this backing.
    pub fn on(backing: &Backing, jobs_hint: Option<u32>) -> Option<Stripes> {
        let jobs = jobs_hint?;
        match backing.lustre() {
            Ok(Some(facts)) => {
                tracing::info!(?facts, jobs, "stripes of new files are chosen by the load");
                Some(Stripes { jobs, facts })
            }
            Ok(None) => {
                tracing::info!("the backing is not Lustre: the jobs hint changes nothing");
                None
            }
            Err(errno) => {
                tracing::warn!(?errno, "Lustre does not say what it has: its defaults are kept");
                None
            }
        }
    }

    /// A file with bytes of one node is taken for one of many (a file for each process); one
    /// with bytes of several for the file that all nodes share.
    fn choose(&self, file: NewFile) -> Option<Striping> {
        let count = |n: usize| u32::try_from(n.max(1)).unwrap_or(u32::MAX);
        let shared = file.writers > 1;
        let question = Question {
            targets: self.facts.targets,
            jobs: self.jobs,
            files: if shared { 1 } else { count(file.nodes) },
            nodes: if shared { count(file.nodes.max(file.writers)) } else { 1 },
            file_size: file.size,
            stripe_size: self.facts.stripe_size.into(),
        };
        let advice = match advise(&question) {
            Ok(advice) => advice,
            Err(e) => {
                tracing::warn!("no stripe count for {question:?}: {e}");
                return None;
            }
        };
        let stripes = u16::try_from(advice.stripes).unwrap_or(STRIPES_MAX).min(STRIPES_MAX);
        Some(Striping { count: stripes, size: self.facts.stripe_size })
    }
}

impl Core {
    /// The stripes that a file should get which is to be made on the backing.
    pub fn striping_of(&self, state: &State, ino: Ino) -> Option<Striping> {
        let stripes = self.stripes?;
        let file = state.files.get(&ino)?;
        stripes.choose(NewFile {
            size: file.size(),
            writers: file.unflushed_by_node().len(),
            nodes: state.nodes.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_namespace::{BackingPath, Effect};
    use ebb_types::Name;
    use std::os::unix::fs::MetadataExt;

    const LUSTRE: Stripes =
        Stripes { jobs: 4, facts: Facts { targets: 480, stripe_size: 1 << 20 } };

    fn chosen(size: u64, writers: usize, nodes: usize) -> u16 {
        let striping = LUSTRE.choose(NewFile { size, writers, nodes }).unwrap();
        assert_eq!(striping.size, 1 << 20);
        striping.count
    }

    #[test]
    fn shared_files_are_spread_and_files_of_one_node_are_not() {
        assert_eq!(chosen(1 << 40, 64, 64), 256, "4 targets for each of 64 nodes");
        assert_eq!(chosen(1 << 40, 2, 64), 256, "a shared file that others join later");
        assert_eq!(chosen(1 << 40, 1, 64), 4, "a file for each node");
        assert_eq!(chosen(1 << 20, 64, 64), 1, "too small to be spread");
        assert_eq!(chosen(0, 0, 0), 1);
        let crowded = Stripes { jobs: 100, ..LUSTRE };
        let one = crowded.choose(NewFile { size: 1 << 40, writers: 64, nodes: 64 }).unwrap();
        assert!(one.count < 16, "{one:?}");
    }

    #[test]
    fn the_file_system_takes_no_more_stripes_than_it_can() {
        let huge = Stripes { jobs: 1, facts: Facts { targets: 5000, stripe_size: 1 << 20 } };
        let file = NewFile { size: 1 << 50, writers: 9000, nodes: 9000 };
        assert_eq!(huge.choose(file).map(|s| s.count), Some(STRIPES_MAX));
        let nonsense = Stripes { jobs: 0, ..LUSTRE };
        assert_eq!(nonsense.choose(NewFile { size: 1, writers: 1, nodes: 1 }), None);
    }

    #[test]
    fn elsewhere_a_hint_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let backing = Backing::open(dir.path()).unwrap();
        if backing.lustre() == Ok(None) {
            assert_eq!(Stripes::on(&backing, Some(4)), None);
        }
        assert_eq!(Stripes::on(&backing, None), None);
    }

    /// Where stripes cannot be set the part file is made all the same, empty and private.
    #[test]
    fn a_part_file_is_made_with_stripes_or_without() {
        let dir = tempfile::tempdir().unwrap();
        let backing = Backing::open(dir.path()).unwrap();
        let name = Name::new(b".ebb-part-7").unwrap();
        let path = BackingPath::ROOT.join(&name);
        let on_disk = dir.path().join(".ebb-part-7");
        for striping in [None, Some(Striping { count: 4, size: 1 << 20 })] {
            let effect = Effect::CreatePart { path: path.clone(), striping };
            for _ in 0..2 {
                backing.effect(&effect, &ebb_namespace::Known::new()).unwrap();
                let made = std::fs::metadata(&on_disk).unwrap();
                assert_eq!((made.len(), made.mode() & 0o7777), (0, 0o600), "{striping:?}");
                // What a crash left there is emptied by the next.
                std::fs::write(&on_disk, b"left over").unwrap();
            }
        }
    }
}
