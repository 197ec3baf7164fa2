//! Daemons that die while the kernel writes past them: what was synced is there again, whatever other
//! nodes have claimed of the blocks around it meanwhile. The writers are processes of their own: a
//! test process that starts another one closes copies of its descriptors, and that publishes.

use ebb_testkit::steps::{Answer, Step};
use ebb_testkit::{Builder, Cluster, Node, Steps, describe};
use ebb_tests::content::same;
use ebb_tests::model::close;
use ebb_tests::nodes;
use serde_json::Value;
use std::fs::OpenOptions;
use std::path::Path;
use std::time::Duration;

const F: u32 = 1;

fn past(nodes: usize) -> Builder {
    let cluster = Cluster::builder().nodes(nodes).consistency("session");
    cluster.flush("end").option("--io-path", "passthrough")
}

fn put(oracle: &mut Vec<u8>, at: usize, data: &[u8]) {
    oracle.resize(oracle.len().max(at + data.len()), 0);
    oracle[at..at + data.len()].copy_from_slice(data);
}

/// Every node and then the backing show `want`.
fn everywhere(cluster: &Cluster, want: &[u8]) {
    for node in cluster.nodes() {
        let shown = std::fs::read(node.path("f")).expect("read");
        same(&format!("on {}", node.name()), &shown, want);
    }
    cluster.nodes().iter().for_each(Node::drain);
    let drained = std::fs::read(cluster.backing().join("f")).expect("read");
    same("on the backing", &drained, want);
}

/// A process that has the file open past the daemon.
fn writer(node: &Node) -> Steps {
    let mut steps = Steps::spawn(node.mountpoint());
    steps.must(Step::Open { file: F, path: "f".into() });
    steps
}

fn write(steps: &mut Steps, offset: u64, data: &[u8]) {
    steps.must(Step::Write { file: F, offset, data: data.to_vec() });
}

fn passed(node: &Node) {
    assert_eq!(node.status()["opens"]["passthrough-write"], 1, "{}", node.name());
}

/// The mount of a dead daemon goes, and with it what the writer had.
fn remounted(node: &Node, writer: Steps) {
    drop(writer);
    let _ = node.ebb("umount", &[], &[]);
    node.mount();
}

/// What came back is published by the next close.
fn published(node: &Node) {
    close(OpenOptions::new().write(true).open(node.path("f")).expect("open")).expect("publish");
}

/// A node wrote and synced, and died before it published; another one published its own records of
/// the same block meanwhile, past the daemon. The claim is of the whole block; it may be on the backing
/// already, and its node may be dead as well.
#[test]
fn synced_bytes_beside_a_claimed_block_are_there_again() {
    for (dies, flushed) in [(false, false), (false, true), (true, false), (true, true)] {
        let cluster = past(3).start();
        let [_, one, two] = cluster.nodes() else { panic!("three nodes") };
        let (mut theirs, mut ours) = (writer(one), writer(two));
        [one, two].into_iter().for_each(passed);
        write(&mut ours, 1000, &[2; 1000]);
        ours.must(Step::Fsync { file: F });
        write(&mut theirs, 0, &[1; 1000]);
        write(&mut theirs, 2500, &[3; 1000]);
        theirs.must(Step::Close { file: F });
        two.kill9();
        if flushed {
            one.drain();
        }
        if dies {
            one.kill9();
        }
        remounted(two, ours);
        if dies {
            remounted(one, theirs);
        }
        let mut want = Vec::new();
        put(&mut want, 2500, &[3; 1000]);
        put(&mut want, 1000, &[2; 1000]);
        put(&mut want, 0, &[1; 1000]);
        let shown = std::fs::read(two.path("f")).expect("read");
        same(&format!("dies: {dies}, flushed: {flushed}"), &shown, &want);
        published(two);
        everywhere(&cluster, &want);
    }
}

/// The service is started anew between the claim and the daemon that takes the cache over.
#[test]
fn a_claim_is_remembered_as_one_by_the_next_service() {
    let mut cluster = past(2).separate_meta().start();
    let (mut theirs, mut ours) = (writer(cluster.node(0)), writer(cluster.node(1)));
    write(&mut ours, 1000, &[2; 1000]);
    ours.must(Step::Fsync { file: F });
    write(&mut theirs, 2500, &[3; 1000]);
    theirs.must(Step::Close { file: F });
    cluster.node(1).kill9();
    cluster.kill_meta();
    cluster.restart_meta();
    let two = cluster.node(1);
    remounted(two, ours);
    let mut want = Vec::new();
    put(&mut want, 2500, &[3; 1000]);
    put(&mut want, 1000, &[2; 1000]);
    same("after a crash", &std::fs::read(two.path("f")).expect("read"), &want);
    published(two);
    everywhere(&cluster, &want);
}

/// Bytes that are on the backing already are written again past the daemon and synced, which publishes
/// nothing and shows in no journal of what is dirty.
#[test]
fn bytes_that_were_flushed_and_written_again_are_there_again() {
    let cluster = past(2).start();
    let node = &cluster.nodes()[1];
    let mut ours = writer(node);
    write(&mut ours, 0, &[1; 9000]);
    node.drain();
    assert_eq!(std::fs::read(cluster.backing().join("f")).expect("drained"), [1; 9000]);
    write(&mut ours, 50, &[2; 100]);
    ours.must(Step::Fsync { file: F });
    passed(node);
    node.kill9();
    remounted(node, ours);
    let mut want = vec![1; 9000];
    put(&mut want, 50, &[2; 100]);
    same("after a crash", &std::fs::read(node.path("f")).expect("read"), &want);
    published(node);
    everywhere(&cluster, &want);
}

/// An msync of a mapping past the daemon does not come to the daemon, as the kernel has it: what was stored is
/// safe with an fsync of the file, and without one within a second or two.
#[test]
fn stores_into_a_mapping_are_there_again_after_fsync_and_soon_without() {
    for fsync in [true, false] {
        let cluster = past(2).start();
        let [one, two] = cluster.nodes() else { panic!("two nodes") };
        // Otherwise the file sits at this node, whose whole cache file counts then.
        let (theirs, mut ours) = (writer(one), writer(two));
        write(&mut ours, 0, &[1; 20_000]);
        ours.must(Step::Fsync { file: F });
        two.drain();
        ours.must(Step::Store { file: F, offset: 9_000, data: vec![2; 500] });
        match fsync {
            true => ours.must(Step::Fsync { file: F }),
            false => std::thread::sleep(std::time::Duration::from_millis(2_500)),
        }
        passed(two);
        two.kill9();
        remounted(two, ours);
        let mut want = vec![1; 20_000];
        put(&mut want, 9_000, &[2; 500]);
        let got = std::fs::read(two.path("f")).expect("read");
        same(&format!("after a crash, fsync: {fsync}"), &got, &want);
        drop(theirs);
    }
}

/// A program that does not follow its model: another node wrote, and published, where this one had
/// synced. What is there stays, and the synced bytes are kept for whoever wants them.
#[test]
fn bytes_that_another_node_wrote_there_are_not_written_over() {
    let cluster = past(2).start();
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let (mut theirs, mut ours) = (writer(one), writer(two));
    write(&mut ours, 1000, &[2; 1000]);
    ours.must(Step::Fsync { file: F });
    write(&mut theirs, 1200, &[3; 500]);
    write(&mut theirs, 3000, &[1; 10]);
    theirs.must(Step::Close { file: F });
    two.kill9();
    remounted(two, ours);
    let mut want = Vec::new();
    put(&mut want, 3000, &[1; 10]);
    put(&mut want, 1000, &[2; 1000]);
    put(&mut want, 1200, &[3; 500]);
    same("after a crash", &std::fs::read(two.path("f")).expect("read"), &want);
    let kept = std::fs::read_dir(two.cache().join("aside")).expect("kept aside");
    let kept = kept.map(|e| std::fs::read(e.expect("entry").path()).expect("read"));
    let kept: Vec<Vec<u8>> = kept.collect();
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0][1200..1700], [2; 500]);
    published(two);
    everywhere(&cluster, &want);
}

/// What the next daemon does with programs of the dead one: on ext4 they are refused, elsewhere what they
/// write is told.
fn is_refused(cache: &Path) -> bool {
    const EXT4: i64 = 0xef53;
    let there = rustix::fs::statfs(cache).expect("statfs");
    let refused = there.f_type == EXT4 && rustix::process::geteuid().is_root();
    println!("{}: {}", cache.display(), if refused { "refused" } else { "told" });
    refused
}

/// The daemon dies, a program writes on past it, and another daemon takes the cache over: `first` is
/// synced, `meanwhile` is written to the dead mount.
fn outlived(cluster: &Cluster, first: &[u8], meanwhile: &[u8]) -> Steps {
    let node = cluster.node(0);
    let mut program = writer(node);
    write(&mut program, 0, first);
    program.must(Step::Store { file: F, offset: 0, data: vec![7; 10] });
    program.must(Step::Fsync { file: F });
    passed(node);
    node.kill9();
    write(&mut program, first.len() as u64, meanwhile);
    let _ = node.ebb("umount", &[], &[]);
    node.mount();
    program
}

fn lost(node: &Node) -> Vec<Value> {
    let status = node.status();
    let all = status["errors"].as_array().expect("errors").iter();
    all.filter(|e| e["text"].as_str().is_some_and(|text| text.contains("lost"))).cloned().collect()
}

/// Its next write fails, or is told of, at the latest when the node ends: whatever the program is told, nothing
/// is lost without a word.
fn nothing_is_lost_without_a_word(cluster: &Cluster, acknowledged: bool) {
    let node = cluster.node(0);
    let mut program = outlived(cluster, &[1; 9000], &[2; 9000]);
    assert!(lost(node).is_empty(), "nobody wrote since");
    let written = Step::Write { file: F, offset: 18_000, data: vec![3; 500] };
    let answer = program.step(written);
    let shown = std::fs::read(node.path("f")).expect("read");
    let mut want = vec![1; 9000];
    put(&mut want, 0, &[7; 10]);
    if acknowledged {
        // A write is published as it is acknowledged, dead daemon or not.
        put(&mut want, 9000, &[2; 9000]);
    }
    same("what was written before the mount", &shown, &want);
    if is_refused(node.cache()) {
        assert_eq!(answer, Answer::Errno(libc::EPERM));
        assert!(lost(node).is_empty());
        node.drain();
        drop(program);
        return node.umount();
    }
    assert_eq!(answer, Answer::Done);
    assert_eq!(lost(node)[0]["path"], "f", "{:?}", lost(node));
    for command in ["drain", "umount"] {
        let ended = node.ebb(command, &[], &[]);
        assert_eq!(ended.status.code(), Some(3), "{command}: {}", describe(&ended));
        let text = describe(&ended);
        assert!(text.contains("went on writing"), "{command}: {text}");
    }
    assert!(node.log().contains("goes on writing"));
    let drained = std::fs::read(cluster.backing().join("f")).expect("read");
    same("on the backing", &drained, &want);
    drop(program);
    let kept = std::fs::read_dir(node.cache().join("aside")).expect("kept aside");
    let kept: Vec<_> = kept.map(|entry| entry.expect("entry").path()).collect();
    assert_eq!(kept.len(), 1);
    let old = std::fs::read(&kept[0]).expect("read");
    assert!(old.len() == 18_500 && old[18_000..] == [3; 500]);
    std::fs::remove_file(&kept[0]).expect("somebody has looked at it");
    node.umount();
}

/// One node of that model; none where files of it are not written past the daemon.
fn seated(model: &str) -> Option<Cluster> {
    let cluster = Cluster::builder().nodes(1).consistency(model);
    let cluster = cluster.flush("end").option("--io-path", "passthrough").start();
    nodes::told(cluster)
}

#[test]
fn a_program_whose_daemon_was_killed_loses_no_write_without_a_word() {
    for model in ["posix", "commit", "session"] {
        let cluster = if model == "session" { Some(past(1).start()) } else { seated(model) };
        let Some(cluster) = cluster else { continue };
        nothing_is_lost_without_a_word(&cluster, model != "session");
    }
}

/// The cache is in memory, where writes are not refused.
#[test]
fn a_program_whose_daemon_was_killed_is_told_of_where_it_is_not_refused() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
        return println!("SKIPPED: no /dev/shm");
    };
    let cluster = past(1).caches_below(memory.path()).start();
    nothing_is_lost_without_a_word(&cluster, false);
}

/// Into pages that the program has mapped, and has written to, since before the daemon died.
#[test]
fn a_store_to_a_mapping_of_before_ends_the_program_or_is_told() {
    let cluster = past(1).start();
    let node = cluster.node(0);
    let mut program = outlived(&cluster, &[1; 9000], &[2; 10]);
    let store = Step::StoreAgain { offset: 5, data: vec![9; 3] };
    if is_refused(node.cache()) {
        assert_eq!(program.killed_by(&store), libc::SIGBUS);
        assert!(lost(node).is_empty());
        node.drain();
    } else {
        program.must(store);
        node.wait_status(Duration::from_secs(10), |status| {
            status["errors"].as_array().is_some_and(|all| !all.is_empty())
        });
        assert_eq!(lost(node)[0]["path"], "f");
        assert_eq!(node.ebb("drain", &[], &[]).status.code(), Some(3));
    }
    let mut want = vec![1; 9000];
    put(&mut want, 0, &[7; 10]);
    same("through the mount", &std::fs::read(node.path("f")).expect("read"), &want);
}

/// A program that writes all the time while the daemon dies and the cache is taken over: what it was told is
/// written is there, up to where it is refused or from where it is told.
#[test]
fn what_is_written_while_the_cache_is_taken_over_is_there() {
    const RECORD: usize = 4096;
    let Some(cluster) = seated("posix") else { return };
    let node = cluster.node(0);
    let mut program = writer(node);
    write(&mut program, 0, &[1; RECORD]);
    passed(node);
    node.kill9();
    let _ = node.ebb("umount", &[], &[]);
    let (mut acknowledged, mut refused) = (1, false);
    std::thread::scope(|scope| {
        let mounting = scope.spawn(|| node.mount());
        while !mounting.is_finished() && !refused {
            let offset = (acknowledged * RECORD) as u64;
            let data = vec![1; RECORD];
            match program.step(Step::Write { file: F, offset, data }) {
                Answer::Done => acknowledged += 1,
                Answer::Errno(libc::EPERM) => refused = true,
                other => panic!("{other:?}"),
            }
        }
    });
    println!("{acknowledged} records");
    assert!(acknowledged > 1, "it wrote on past the dead daemon");
    let shown = std::fs::read(node.path("f")).expect("read");
    let there = shown.iter().filter(|b| **b == 1).count() / RECORD;
    if is_refused(node.cache()) {
        assert!(refused, "it goes on writing");
        // In the moment of the rename it may be refused one and not the next.
        assert!(there >= acknowledged, "{there} of {acknowledged}");
    } else {
        assert!(there >= acknowledged || !lost(node).is_empty(), "{there} of {acknowledged}");
    }
}

/// Without a mount: what is written until the recovery is on the backing, what is written then is refused.
#[test]
fn a_program_whose_daemon_was_killed_writes_nothing_any_more_when_it_is_recovered() {
    let Some(cluster) = seated("posix") else { return };
    let node = cluster.node(0);
    let mut program = writer(node);
    write(&mut program, 0, &[1; 9000]);
    passed(node);
    node.kill9();
    write(&mut program, 9000, &[2; 9000]);
    let backing = cluster.backing().to_str().expect("a path");
    let cache = node.cache().to_str().expect("a path");
    let recover = || cluster.run_ebb(&["recover", cache, "--backing", backing]);
    let done = recover();
    assert_eq!(done.status.code(), Some(0), "{}", describe(&done));
    let answer = program.step(Step::Write { file: F, offset: 0, data: vec![3; 500] });
    let mut want = vec![1; 9000];
    put(&mut want, 9000, &[2; 9000]);
    same("on the backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &want);
    if is_refused(node.cache()) {
        assert_eq!(answer, Answer::Errno(libc::EPERM));
    }
    let _ = node.ebb("umount", &[], &[]);
}
