//! Daemons that die while the kernel writes past them: what was synced is there again, whatever other
//! nodes have claimed of the blocks around it meanwhile. The writers are processes of their own: a
//! test process that starts another one closes copies of its descriptors, and that publishes.

use ebb_testkit::steps::Step;
use ebb_testkit::{Builder, Cluster, Node, Steps};
use ebb_tests::content::same;
use ebb_tests::model::close;
use std::fs::OpenOptions;

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
