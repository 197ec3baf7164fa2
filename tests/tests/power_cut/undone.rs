//! What the service had answered and not on stable storage yet is undone by a power cut. What was
//! synced before must not be gone by then, nor what a drain or an unmount has said 0 of.

use super::{MODELS, begin_again, builder, disk, end_everything};
use ebb_testkit::power::Cut;
use ebb_testkit::{Builder, Cluster, Node, PowerDisk, mounts};
use ebb_tests::content;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const KEPT: &str = "ebb_kept_until_stable_total";
const BYTES: u64 = 300_000;

/// So often it is tried, until a power cut has undone what it should.
const ROUNDS: usize = 12;

/// By itself the service syncs its journal every second.
const SYNCED_WITHIN: Duration = Duration::from_millis(1_300);

const SOON: Duration = Duration::from_secs(20);

/// A way to mount.
#[derive(Clone, Copy, Debug)]
struct Way {
    model: &'static str,
    supervised: bool,
    options: &'static [(&'static str, &'static str)],
}

const fn way(model: &'static str, options: &'static [(&'static str, &'static str)]) -> Way {
    Way { model, supervised: false, options }
}

const PAST: &[(&str, &str)] = &[("--io-path", "auto")];
const COPIES: &[(&str, &str)] = &[("--replicas", "2")];
const SMALL: &[(&str, &str)] = &[("--cache-size", "64MiB")];
const DEFAULT: Way = way("posix", &[]);
const SUPERVISED: Way = Way { supervised: true, ..DEFAULT };
const EVERYWHERE: [Way; 8] = [
    DEFAULT,
    SUPERVISED,
    way("posix", PAST),
    way("posix", COPIES),
    way("posix", SMALL),
    way("commit", &[]),
    way("session", PAST),
    way("mpiio", COPIES),
];

impl Way {
    fn start(&self, disk: &PowerDisk, flush: &str) -> Cluster {
        let more = |builder: Builder, (name, value): &(&str, &str)| builder.option(name, value);
        let cluster = builder(&disk.path(), self.model, flush);
        let cluster = self.options.iter().fold(cluster, more);
        let cluster = if self.supervised { cluster.supervised() } else { cluster }.start();
        if self.options == COPIES {
            cluster.node(0).wait_status(SOON, |s| !s["copies"]["partner"].is_null());
        }
        cluster
    }

    /// The node did what this is about.
    fn was_gone(&self, node: &Node) {
        let status = node.status();
        if self.options == PAST && status["io_path_obstacle"].is_null() {
            let past = status["opens"]["passthrough-write"].as_u64();
            assert!(past > Some(0), "{self:?}: {}", status["opens"]);
        }
        if self.options == COPIES {
            let copied = status["copies"]["copied_bytes"].as_u64();
            assert!(copied > Some(0), "{self:?}: {}", status["copies"]);
        }
        if self.options == SMALL {
            assert_eq!(status["cache_capacity_bytes"], 64 << 20, "{self:?}");
        }
        assert_eq!(status["supervisor"].is_null(), !self.supervised, "{self:?}");
    }
}

fn wanted() -> Vec<u8> {
    content::bytes(1, 2, 0, BYTES)
}

fn written(path: &Path) -> File {
    let file = File::create(path).expect("create");
    file.write_all_at(&wanted(), 0).expect("write");
    file
}

fn synced(cluster: &Cluster) -> File {
    let file = written(&cluster.node(0).path("f"));
    file.sync_all().expect("fsync");
    File::open(cluster.node(0).mountpoint()).and_then(|d| d.sync_all()).expect("fsync");
    file
}

fn is_on_the_backing(cluster: &Cluster) -> bool {
    std::fs::metadata(cluster.backing().join("f")).is_ok_and(|m| m.len() == BYTES)
}

/// The kernel writes what it likes and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writes {
    /// The journals of nodes, and not the service's.
    NodeJournals,
    /// What was removed from caches, and no journal.
    Removals,
}

fn cut(disk: &mut PowerDisk, cluster: &mut Cluster, writes: Writes) {
    cut_under(disk, cluster, writes, None);
}

/// The same while a program has a file open.
fn cut_under(disk: &mut PowerDisk, cluster: &mut Cluster, writes: Writes, open: Option<File>) {
    match writes {
        Writes::NodeJournals => {
            let journals =
                cluster.nodes().iter().map(|node| File::open(node.cache().join("journal")));
            // Who has left has none.
            journals.flatten().for_each(|journal| journal.sync_all().expect("fsync"));
        }
        Writes::Removals => {
            let other = File::create(disk.path().join("other")).expect("create");
            other.sync_all().expect("fsync");
        }
    }
    disk.power_off();
    end_everything(cluster, Vec::new());
    drop(open);
    disk.power_on(Cut::Everything, 1);
    begin_again(cluster);
}

fn is_whole(cluster: &Cluster, what: &str) {
    for node in cluster.nodes() {
        let what = format!("{what}, {}", node.name());
        let got = std::fs::read(node.path("f")).unwrap_or_else(|e| panic!("{what}: {e}"));
        content::same(&what, &got, &wanted());
    }
}

/// Everything is drained with 0, and there.
fn ends(disk: &mut PowerDisk, cluster: Cluster, what: &str) {
    cluster.umount_all();
    let there = std::fs::read(cluster.backing().join("f"));
    let there = there.unwrap_or_else(|e| panic!("{what}: on the backing: {e}"));
    content::same(what, &there, &wanted());
    drop(cluster);
    disk.reset();
}

/// When the service has lost that it was deleted, the file is there again, with all that it had: also when
/// somebody had it open.
#[test]
fn a_synced_file_that_comes_back_is_whole() {
    let Some(mut disk) = disk() else { return };
    let ways = EVERYWHERE.map(|way| (way, false));
    for (way, open) in ways.into_iter().chain([(DEFAULT, true), (SUPERVISED, true)]) {
        let what = format!("{way:?}, open: {open}");
        let came_back = (0..ROUNDS).any(|_| {
            let mut cluster = way.start(&disk, "end");
            let file = synced(&cluster);
            let _open = open.then_some(file);
            way.was_gone(cluster.node(0));
            std::fs::remove_file(cluster.node(0).path("f")).expect("unlink");
            let kept = cluster.node(0).counter(KEPT);
            cut(&mut disk, &mut cluster, Writes::Removals);
            if let Err(e) = std::fs::metadata(cluster.node(0).path("f")) {
                assert_eq!(e.kind(), ErrorKind::NotFound, "{what}: {e}");
                cluster.umount_all();
                drop(cluster);
                disk.reset();
                return false;
            }
            is_whole(&cluster, &what);
            // What is nameless under a supervisor stays noted for who has it open.
            assert!(kept > 0 || open && way.supervised, "{what}: it was not this that kept it");
            ends(&mut disk, cluster, &what);
            true
        });
        assert!(came_back, "{what}: no deletion was ever undone");
    }
}

/// The node's journal says that it was flushed, and the service's does not any more.
#[test]
fn a_synced_file_whose_flush_is_forgotten_is_whole() {
    let Some(mut disk) = disk() else { return };
    for way in EVERYWHERE {
        let what = format!("{way:?}");
        let forgotten = (0..ROUNDS).any(|_| {
            let mut cluster = way.start(&disk, "close");
            drop(synced(&cluster));
            let there = mounts::wait_until(SOON, || is_on_the_backing(&cluster));
            assert!(there, "{what}: it is not flushed");
            // The node hears of it a little later.
            cluster.node(0).wait_status(SOON, |s| s["dirty_bytes"] == 0);
            way.was_gone(cluster.node(0));
            let kept = cluster.node(0).counter(KEPT);
            cut(&mut disk, &mut cluster, Writes::NodeJournals);
            is_whole(&cluster, &what);
            // What is not flushed as far as the service knows is taken over as this node's.
            let forgotten = cluster.node(0).log().contains("files=1");
            assert!(!forgotten || kept > 0, "{what}: it was not this that kept it");
            ends(&mut disk, cluster, &what);
            forgotten
        });
        assert!(forgotten, "{what}: no flush was ever forgotten");
    }
}

/// What a drain, an unmount, or fsync under `--durability backing` has answered for is not forgotten by the
/// service, whether it was synced before or not.
#[test]
fn what_was_said_to_be_on_the_backing_is_known_to_be_there() {
    let Some(mut disk) = disk() else { return };
    let said = [("drain", Node::drain as fn(&Node)), ("umount", Node::umount)];
    for way in EVERYWHERE {
        for (name, say) in said {
            let what = format!("{way:?}, {name}");
            let mut cluster = way.start(&disk, "end");
            drop(written(&cluster.node(0).path("f")));
            way.was_gone(cluster.node(0));
            // So that the service does not forget who has written it.
            std::thread::sleep(SYNCED_WITHIN);
            say(cluster.node(0));
            cut(&mut disk, &mut cluster, Writes::NodeJournals);
            is_whole(&cluster, &what);
            ends(&mut disk, cluster, &what);
        }
    }
    let options = &[("--durability", "backing")];
    for way in MODELS.map(|model| way(model, options)) {
        let what = format!("{way:?}");
        let mut cluster = way.start(&disk, "end");
        let file = written(&cluster.node(0).path("f"));
        std::thread::sleep(SYNCED_WITHIN);
        file.sync_all().expect("fsync");
        cut(&mut disk, &mut cluster, Writes::NodeJournals);
        drop(file);
        is_whole(&cluster, &what);
        ends(&mut disk, cluster, &what);
    }
}

/// So many bytes are left of what is cut.
const CUT_TO: u64 = 1_000;

/// The kernel keeps what was cut off, or one of the journals, or neither: a cut of synced bytes that was
/// answered is not undone, and nothing else of the file is missed.
#[test]
fn a_synced_file_that_was_cut_stays_so_and_is_whole() {
    let Some(mut disk) = disk() else { return };
    let cuts = [
        (CUT_TO, Writes::Removals),
        (CUT_TO, Writes::NodeJournals),
        (0, Writes::Removals),
        (0, Writes::NodeJournals),
    ];
    for (n, way) in EVERYWHERE.into_iter().chain([way("session", &[])]).enumerate() {
        // Every way with each number of bytes, and with each kind of loss.
        for (to, writes) in [cuts[n % 2], cuts[3 - n % 2]] {
            let what = format!("{way:?}, to {to}, {writes:?}");
            let mut cluster = way.start(&disk, "end");
            let file = synced(&cluster);
            way.was_gone(cluster.node(0));
            match to {
                0 => drop(File::create(cluster.node(0).path("f")).expect("O_TRUNC")),
                to => file.set_len(to).expect("ftruncate"),
            }
            cut_under(&mut disk, &mut cluster, writes, Some(file));
            let got = std::fs::read(cluster.node(0).path("f"));
            let got = got.unwrap_or_else(|e| panic!("{what}: {e}"));
            let left = &wanted()[..to as usize];
            content::same(&what, &got, left);
            assert!(!cluster.node(0).log().contains("ERROR"), "{what}: {}", cluster.node(0).log());
            cluster.umount_all();
            let there = std::fs::read(cluster.backing().join("f"));
            content::same(&what, &there.unwrap_or_else(|e| panic!("{what}: {e}")), left);
            drop(cluster);
            disk.reset();
        }
    }
}

/// The node's journal says that it was deleted, and the service's does not any more: it is told so.
#[test]
fn a_deleted_file_stays_deleted_when_its_node_knows() {
    let Some(mut disk) = disk() else { return };
    for way in EVERYWHERE {
        let mut cluster = way.start(&disk, "end");
        drop(synced(&cluster));
        way.was_gone(cluster.node(0));
        std::fs::remove_file(cluster.node(0).path("f")).expect("unlink");
        assert_eq!(cluster.node(0).counter(KEPT), 1, "{way:?}");
        cut(&mut disk, &mut cluster, Writes::NodeJournals);
        for node in cluster.nodes() {
            let gone = std::fs::metadata(node.path("f")).expect_err("it was deleted");
            assert_eq!(gone.kind(), ErrorKind::NotFound, "{way:?}");
        }
        cluster.umount_all();
        assert!(!cluster.backing().join("f").exists(), "{way:?}");
        drop(cluster);
        disk.reset();
    }
}
