//! What is measured: the sections, their workloads with the parameters of the literature, and the
//! variants that are compared.

use ebb_consistency::{Model, SyncEvent};
use ebb_workloads::checkpoint::Checkpoint;
use ebb_workloads::pairs::Pairs;
use ebb_workloads::remote::{Ends, FirstTouch};
use ebb_workloads::samples::{Samples, Scaling};
use ebb_workloads::shared::{Layout, Order, Shared};
use ebb_workloads::single::{Records, SmallFiles};
use ebb_workloads::{Measure, Place, Publish, WorkloadError};
use std::path::Path;

/// One way to mount.
pub struct Variant {
    /// In the report.
    pub name: String,
    /// Options of `ebb mount`.
    pub options: Vec<String>,
    /// What a writer does under its model.
    pub publish: Publish,
}

impl Variant {
    /// A model; `naive` turns off what makes it cheap while nodes do not share: leases and the
    /// way past the daemon.
    pub fn of(model: &Model, naive: bool) -> Variant {
        // fsync for its meaning in the model: stable storage would measure the disk.
        let options = ["--consistency", model.name(), "--flush", "end", "--durability", "none"];
        let mut options: Vec<String> = options.map(str::to_owned).to_vec();
        if naive {
            options.extend(["--naive", "--io-path", "daemon"].map(str::to_owned));
        }
        // Where readers ask at every read and writes alone are not seen, programs commit.
        let commits = model.reads_ask() && model.on(SyncEvent::Write).attach.is_none();
        Variant {
            name: format!("{}{}", model.name(), if naive { " naive" } else { "" }),
            options,
            publish: if commits { Publish::Fsync } else { Publish::Close },
        }
    }
}

/// Workloads that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Section {
    /// One node: records of several sizes against the bare directory
    Single,
    /// Small files made, looked at, removed
    Files,
    /// All processes on one shared file
    Shared,
    /// Checkpoint with partner copies and restart
    Checkpoint,
    /// Random reads of training samples
    Samples,
    /// First reads of another node's bytes, against plain TCP
    Remote,
    /// Producers and consumers, coupled, against the same through the backing
    Pairs,
}

/// How much is done.
pub struct Scale {
    /// Accesses of a process to a shared file.
    pub accesses: usize,
    /// Bytes of a large access.
    pub large: usize,
    /// As little as makes sense.
    pub quick: bool,
}

/// One workload with its parameters.
pub struct Work {
    /// Where it stands in the report.
    pub section: Section,
    /// What it is called there.
    pub name: String,
    kind: Kind,
}

enum Kind {
    Shared(Shared),
    Checkpoint(Checkpoint),
    Samples(Samples),
    Records(Records),
    SmallFiles(SmallFiles),
    FirstTouch(FirstTouch),
    Pairs(Pairs),
}

type Outcome = Result<Vec<Measure>, WorkloadError>;

const SMALL: usize = 8 << 10;

fn size_name(bytes: usize) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

impl Work {
    /// Runs it on mounts.
    pub fn on(&self, place: &Place, round: u64) -> Outcome {
        match &self.kind {
            Kind::Shared(w) => w.run(place, round),
            Kind::Checkpoint(w) => w.run(place, round),
            Kind::Samples(w) => w.run(place, round),
            Kind::Records(w) => w.run(place, round),
            Kind::SmallFiles(w) => w.run(place, round),
            Kind::FirstTouch(w) => w.run(place, round),
            Kind::Pairs(w) => w.run(place, round),
        }
    }

    /// Runs what it is compared with, where there is such a thing: the bare directory with as many
    /// processes, or plain TCP. `backing`: a directory beside the mounted ones.
    pub fn bare(
        &self,
        (dir, backing): (&Path, &Path),
        (nodes, per_node): (usize, usize),
        round: u64,
        ends: Ends<'_>,
    ) -> Option<Outcome> {
        let place = Place::single(dir.to_owned(), nodes * per_node);
        match &self.kind {
            Kind::Records(w) => Some(w.run(&place, round)),
            Kind::SmallFiles(w) => Some(w.run(&place, round)),
            Kind::FirstTouch(w) => Some(w.plain_tcp(dir, round, ends)),
            Kind::Pairs(w) => Some(w.bare(backing, nodes * per_node, round)),
            Kind::Shared(_) | Kind::Checkpoint(_) | Kind::Samples(_) => None,
        }
    }
}

impl Section {
    /// All, in the order of the report.
    pub const ALL: [Section; 7] = [
        Section::Single,
        Section::Files,
        Section::Shared,
        Section::Checkpoint,
        Section::Samples,
        Section::Remote,
        Section::Pairs,
    ];

    /// Its heading.
    pub fn title(self) -> &'static str {
        match self {
            Section::Single => "One node and the bare directory",
            Section::Files => "Small files",
            Section::Shared => "One shared file",
            Section::Checkpoint => "Checkpoint and restart (partner copies, nine arrays)",
            Section::Samples => "Training samples of 116 KiB",
            Section::Remote => "First reads of another node's bytes (bare: plain TCP)",
            Section::Pairs => "Producers and consumers (bare: through the backing, synced)",
        }
    }

    /// Its workloads for so many nodes.
    pub fn work(self, nodes: usize, scale: &Scale) -> Vec<Work> {
        let named = |name: String, kind: Kind| Work { section: self, name, kind };
        match self {
            Section::Single if nodes == 1 => self.records(scale),
            Section::Remote if nodes == 2 => self.first_touch(scale),
            Section::Files => {
                let files = if scale.quick { 400 } else { 2000 };
                vec![named(
                    format!("{files} files of 4 KiB"),
                    Kind::SmallFiles(SmallFiles { files, size: 4096 }),
                )]
            }
            Section::Shared => self.shared(nodes, scale),
            Section::Checkpoint if nodes > 1 => {
                let particles = if scale.quick { 20_000 } else { 200_000 };
                let name = format!("{particles} particles per process");
                vec![named(name, Kind::Checkpoint(Checkpoint { particles }))]
            }
            Section::Samples if nodes > 1 => {
                let (batch, each, batches) = if scale.quick { (64, 8, 1) } else { (1024, 32, 1) };
                let samples = |scaling| Kind::Samples(Samples { scaling, batches, epochs: 2 });
                vec![
                    named(
                        format!("strong scaling, {batch} samples"),
                        samples(Scaling::Strong(batch)),
                    ),
                    named(
                        format!("weak scaling, {each} per process"),
                        samples(Scaling::Weak(each)),
                    ),
                ]
            }
            Section::Pairs if nodes >= 2 && nodes.is_multiple_of(2) => {
                let (steps, accesses) = (if scale.quick { 3 } else { 6 }, scale.accesses);
                let name = format!("{steps} files of {accesses} x {}", size_name(scale.large));
                let pairs = Pairs { steps, size: scale.large, accesses };
                vec![named(name, Kind::Pairs(pairs))]
            }
            Section::Single
            | Section::Remote
            | Section::Checkpoint
            | Section::Samples
            | Section::Pairs => Vec::new(),
        }
    }

    fn records(self, scale: &Scale) -> Vec<Work> {
        let sizes =
            [(4 << 10, 8 << 20), (SMALL, 16 << 20), (64 << 10, 32 << 20), (1 << 20, 32 << 20)];
        let work = |(size, bytes): (usize, usize)| {
            let bytes = if scale.quick { bytes / 4 } else { bytes };
            let name = format!("records of {}", size_name(size));
            Work { section: self, name, kind: Kind::Records(Records { size, bytes }) }
        };
        sizes.into_iter().map(work).collect()
    }

    fn first_touch(self, scale: &Scale) -> Vec<Work> {
        let bytes = if scale.quick { 16 << 20 } else { 64 << 20 };
        let work = |size: usize, random: bool, order: &str| Work {
            section: self,
            name: format!("{} {order}", size_name(size)),
            kind: Kind::FirstTouch(FirstTouch { bytes, size, random }),
        };
        vec![work(1 << 20, false, "in order"), work(SMALL, true, "at random")]
    }

    fn shared(self, nodes: usize, scale: &Scale) -> Vec<Work> {
        use Layout::{Contiguous, Strided};
        let mut all = Vec::new();
        for size in [SMALL, scale.large] {
            let mut add = |name: &str, write, read, passes| {
                let shared = Shared { write, read, size, accesses: scale.accesses, passes };
                let name = format!("{name} {}", size_name(size));
                all.push(Work { section: self, name, kind: Kind::Shared(shared) });
            };
            add("CN-W", Contiguous, None, 1);
            add("SN-W", Strided, None, 1);
            if nodes >= 2 && nodes.is_multiple_of(2) {
                add("CC-R", Contiguous, Some((Contiguous, Order::Forward)), 1);
                add("CS-R", Contiguous, Some((Strided, Order::Forward)), 1);
                if size == SMALL {
                    // What a reader pays for asking shows when the bytes are there already.
                    add(
                        "CC-R, 50 random passes,",
                        Contiguous,
                        Some((Contiguous, Order::Random)),
                        50,
                    );
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale() -> Scale {
        Scale { accesses: 3, large: 1 << 20, quick: true }
    }

    #[test]
    fn every_section_has_work_for_some_number_of_nodes() {
        for section in Section::ALL {
            let all: Vec<Work> = [1, 2].iter().flat_map(|n| section.work(*n, &scale())).collect();
            assert!(!all.is_empty(), "{section:?}");
            assert!(all.iter().all(|w| w.section == section && !w.name.is_empty()));
        }
        assert!(Section::Shared.work(3, &scale()).iter().all(|w| w.name.contains("-W")));
    }

    #[test]
    fn commit_programs_commit() {
        let table = ebb_consistency::ModelTable::builtin();
        let publish = |name| Variant::of(&table.get(name).unwrap(), false).publish;
        assert_eq!(publish("commit"), Publish::Fsync);
        assert_eq!((publish("session"), publish("posix")), (Publish::Close, Publish::Close));
        let naive = Variant::of(&table.get("commit").unwrap(), true);
        assert_eq!(naive.name, "commit naive");
        assert!(naive.options.ends_with(&["--naive", "--io-path", "daemon"].map(str::to_owned)));
    }
}
