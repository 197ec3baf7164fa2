//! All nodes of a job and its service are gone, with the service's state: `ebb recover` on each
//! cache, at once or in turn, killed and repeated, brings every byte of shared files to the backing,
//! and never says 0 when some are missing.

use ebb_testkit::{Cluster, Node, describe, number, random, skip_reason};
use ebb_tests::content::same;
use ebb_tests::recoveries::{Way, all_die, ended_with, recover, run_and_kill, run_at_once, start};
use ebb_tests::tools::{names, wait_until};
use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Child;
use std::time::Duration;

const RECORD: usize = 3_000;

fn rounds() -> u64 {
    std::env::var("EBB_RECOVERY_ROUNDS").ok().and_then(|v| v.parse().ok()).unwrap_or(3)
}

fn cluster(nodes: usize, model: &str) -> Option<Cluster> {
    let builder = Cluster::builder().nodes(nodes).separate_meta().flush("end");
    skip_reason().is_none().then(|| builder.consistency(model).start())
}

fn open(node: &Node, name: &str) -> File {
    let mut options = File::options();
    options.write(true).create(true).truncate(false).open(node.path(name)).expect("open")
}

/// Every node writes its records, fsyncs, closes; all have it open at the same time.
fn interleaved(cluster: &Cluster, name: &str, dice: &mut ChaCha8Rng) -> Vec<u8> {
    let nodes = cluster.nodes();
    let records = nodes.len() * dice.random_range(2..9);
    let short = dice.random_range(0..RECORD);
    let content = random::bytes(dice, records * RECORD - short);
    let files: Vec<File> = nodes.iter().map(|n| open(n, name)).collect();
    for (i, record) in content.chunks(RECORD).enumerate() {
        let file = &files[i % nodes.len()];
        file.write_all_at(record, (i * RECORD) as u64).expect("write");
    }
    files.iter().for_each(|f| f.sync_all().expect("fsync"));
    content
}

fn run_all(cluster: &Cluster, way: Way, content: &[u8], dice: &mut ChaCha8Rng) {
    let mut order: Vec<&Node> = cluster.nodes().iter().collect();
    order.shuffle(dice);
    let last = order.len() - 1;
    match way {
        Way::AtOnce => at_once(cluster, &order, content),
        Way::InTurn => {
            for (i, node) in order.iter().enumerate() {
                let output = recover(cluster, node, &["--wait", "0s"]);
                match i == last {
                    true => ended_with(&output, 0, &[]),
                    false => ended_with(&output, 3, &["f: ", "waiting for bytes of other nodes"]),
                }
                assert_eq!(cluster.backing().join("f").exists(), i == last, "a name too early");
            }
        }
        Way::Killed => {
            run_and_kill(cluster, &order, dice);
            at_once(cluster, &order, content);
        }
    }
    // Whoever was first was told that others were missing; by now they are not.
    for node in order {
        ended_with(&recover(cluster, node, &["--wait", "0s"]), 0, &[]);
        ended_with(&recover(cluster, node, &["--dry-run"]), 0, &["nothing"]);
    }
}

fn at_once(cluster: &Cluster, order: &[&Node], content: &[u8]) {
    let ended = run_at_once(cluster, order);
    for output in &ended {
        match output.status.code() {
            Some(0) => {}
            _ => ended_with(output, 3, &["f: ", "by"]),
        }
    }
    assert!(ended.iter().any(|o| o.status.success()), "the last one sees that all is there");
    same("at once", &std::fs::read(cluster.backing().join("f")).expect("the file"), content);
}

#[test]
fn recoveries_bring_every_byte_of_a_shared_file_in_any_order() {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    for round in 0..rounds() {
        let mut dice = random::generator(seed ^ round);
        let count = if dice.random_bool(0.5) { 4 } else { 2 };
        let model = ["session", "commit", "posix"][dice.random_range(0..3)];
        // Each of them, however few rounds there are.
        let way = [Way::AtOnce, Way::InTurn, Way::Killed][round as usize % 3];
        let Some(mut cluster) = cluster(count, model) else { return };
        let content = interleaved(&cluster, "f", &mut dice);
        all_die(&mut cluster);
        println!("round {round}: {count} nodes, {model}, {way:?}");
        run_all(&cluster, way, &content, &mut dice);
        let got = std::fs::read(cluster.backing().join("f")).expect("the file");
        same(&format!("seed {seed} round {round} {way:?}"), &got, &content);
        assert_eq!(names(cluster.backing()), ["f"]);
    }
}

#[test]
fn of_bytes_that_nodes_wrote_over_each_other_the_newest_are_recovered() {
    for backwards in [false, true] {
        let Some(mut cluster) = cluster(3, "session") else { return };
        let content = rewritten(&cluster);
        all_die(&mut cluster);
        let mut order: Vec<&Node> = cluster.nodes().iter().collect();
        if backwards {
            order.reverse();
        }
        // In the first round not everybody has said what it has, in the second the newer bytes may come
        // after the older ones.
        for _ in 0..2 {
            order.iter().for_each(|n| drop(recover(&cluster, n, &["--wait", "0s"])));
        }
        for node in order {
            ended_with(&recover(&cluster, node, &["--wait", "0s"]), 0, &[]);
        }
        let got = std::fs::read(cluster.backing().join("f")).expect("the file");
        same(&format!("backwards {backwards}"), &got, &content);
    }
}

/// Three nodes write over each other's bytes, one after the other; part of it is flushed.
fn rewritten(cluster: &Cluster) -> Vec<u8> {
    let mut content = vec![0; 40_000];
    let files: Vec<File> = cluster.nodes().iter().map(|n| open(n, "f")).collect();
    drop(files);
    let writes = [(0, 0, 40_000), (1, 5_000, 10_000), (2, 10_000, 20_000), (0, 12_000, 1_000)];
    for (i, (node, at, len)) in writes.into_iter().enumerate() {
        let value = vec![i as u8 + 1; len];
        let file = open(cluster.node(node), "f");
        file.write_all_at(&value, at as u64).expect("write");
        drop(file);
        content[at..at + len].copy_from_slice(&value);
        if i == 1 {
            let _ = cluster.node(1).ebb("drain", &[], &[]);
        }
    }
    content
}

#[test]
fn bytes_in_a_file_that_was_published_are_merged_by_their_versions() {
    let Some(mut cluster) = cluster(2, "session") else { return };
    let (first, second) = (cluster.node(0), cluster.node(1));
    let mut content = vec![1; 30_000];
    open(first, "f").write_all_at(&content, 0).expect("write");
    first.drain();
    assert_eq!(std::fs::read(cluster.backing().join("f")).expect("published").len(), 30_000);
    // The second node publishes; the first one writes over a part of that and flushes it.
    for (node, at, value) in [(second, 1_000, 2u8), (first, 2_000, 3)] {
        let bytes = vec![value; 2_000];
        open(node, "f").write_all_at(&bytes, at).expect("write");
        content[at as usize..at as usize + 2_000].copy_from_slice(&bytes);
    }
    first.drain();
    all_die(&mut cluster);
    for node in cluster.nodes() {
        ended_with(&recover(&cluster, node, &[]), 0, &[]);
    }
    same("merged", &std::fs::read(cluster.backing().join("f")).expect("the file"), &content);
}

#[test]
fn a_file_with_holes_that_others_may_have_filled_is_not_done() {
    let Some(mut cluster) = cluster(2, "session") else { return };
    let (first, second) = (cluster.node(0), cluster.node(1));
    let files = [open(first, "f"), open(second, "f")];
    files[0].write_all_at(&[1; 1_000], 5_000).expect("write");
    drop(files);
    let sparse = open(first, "sparse");
    sparse.write_all_at(&[2; 1_000], 5_000).expect("write");
    drop(sparse);
    all_die(&mut cluster);
    let first = cluster.node(0);
    let output = recover(&cluster, first, &["--wait", "0s"]);
    ended_with(&output, 3, &["f: 5000 bytes (waiting for bytes of other nodes", "0-5000"]);
    assert_eq!(names(cluster.backing()), ["sparse"], "the service said that nobody else had it");
    ended_with(&recover(&cluster, first, &["--dry-run"]), 3, &["f: 1000 bytes"]);
    ended_with(&recover(&cluster, first, &["--force"]), 0, &[]);
    let mut wanted = vec![0; 5_000];
    wanted.extend([1; 1_000]);
    same("forced", &std::fs::read(cluster.backing().join("f")).expect("the file"), &wanted);
    let meta = std::fs::metadata(cluster.backing().join("sparse")).expect("stat");
    assert_eq!(meta.len(), 6_000);
}

#[test]
fn what_a_node_had_flushed_to_a_part_file_is_not_forgotten() {
    let Some(mut cluster) = cluster(2, "session") else { return };
    let (first, second) = (cluster.node(0), cluster.node(1));
    let files = [open(first, "f"), open(second, "f")];
    files[0].write_all_at(&[1; 10_000], 0).expect("write");
    files[1].write_all_at(&[2; 10_000], 10_000).expect("write");
    drop(files);
    // Nothing is unflushed at the first node; the file has no name, because the second one's is.
    let _ = first.ebb("drain", &[], &[]);
    assert!(!cluster.backing().join("f").exists(), "it is not whole");
    all_die(&mut cluster);
    let first = cluster.node(0);
    let output = recover(&cluster, first, &["--wait", "0s"]);
    ended_with(&output, 3, &["10000 more in a part file", "waiting for bytes of other nodes"]);
    ended_with(&recover(&cluster, cluster.node(1), &[]), 0, &[]);
    ended_with(&recover(&cluster, first, &[]), 0, &[]);
    let wanted = [[1; 10_000], [2; 10_000]].concat();
    same("f", &std::fs::read(cluster.backing().join("f")).expect("the file"), &wanted);
    assert_eq!(names(cluster.backing()), ["f"], "no part file is left");
}

/// What happens to a job, before everything dies, between the writes of two nodes that leave holes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Nothing,
    /// A daemon dies and is mounted again on its cache.
    DaemonBack,
    /// The service dies and is started again.
    ServiceBack,
    /// A third node comes, and writes what is a hole for the others.
    Third,
    /// The second node goes, with all flushed to a file that has no name, and comes back.
    Returned,
    /// The second node comes back without its cache.
    CacheLost,
    /// Before all that a third node was there, did nothing and left.
    Visited,
    /// Before all that everybody had left and come back.
    AllReturned,
}

const LATER: u64 = 20_000;

/// A file of holes that two nodes have written, when both are recovered: the status of the last recovery, and
/// whether nobody has to be asked any more.
fn recovered_with_holes(fate: Fate, way: Way) {
    let third = matches!(fate, Fate::Third | Fate::Visited);
    let Some(mut cluster) = cluster(if third { 3 } else { 2 }, "session") else { return };
    if fate == Fate::AllReturned {
        // Each in another life than it was in before.
        open(cluster.node(0), "before").write_all_at(&[1; 100], 0).expect("write");
        cluster.umount_all();
        cluster.nodes().iter().for_each(Node::mount);
    }
    let write = |node: usize, byte: u8, at: u64| {
        let file = open(cluster.node(node), "f");
        file.write_all_at(&[byte; 1_000], at).expect("write");
    };
    // Nobody is told that he has it alone.
    let held = [open(cluster.node(0), "f"), open(cluster.node(1), "f")];
    write(0, 1, 5_000);
    write(1, 2, 9_000);
    drop(held);
    match fate {
        Fate::Nothing | Fate::AllReturned => {}
        Fate::Visited => cluster.node(2).umount(),
        Fate::DaemonBack => {
            cluster.node(1).kill9();
            let _ = cluster.node(1).ebb("umount", &[], &[]);
            cluster.node(1).mount();
            write(1, 4, LATER);
        }
        Fate::ServiceBack => {
            cluster.kill_meta();
            cluster.restart_meta();
        }
        Fate::Third => write(2, 3, 1_000),
        Fate::Returned => {
            cluster.node(1).umount();
            cluster.node(1).mount();
        }
        Fate::CacheLost => {
            cluster.node(1).kill9();
            let _ = cluster.node(1).ebb("umount", &[], &[]);
            std::fs::remove_dir_all(cluster.node(1).cache()).expect("the cache");
            cluster.node(1).mount();
        }
    }
    // What is younger than a second may not be in the journals yet.
    std::thread::sleep(Duration::from_millis(2_500));
    match fate {
        Fate::Visited => these_die(&mut cluster, &[0, 1]),
        _ => all_die(&mut cluster),
    }
    let mut wanted = vec![0; 10_000];
    wanted[5_000..6_000].fill(1);
    wanted[9_000..].fill(2);
    if fate == Fate::DaemonBack {
        wanted.resize(LATER as usize, 0);
        wanted.extend([4; 1_000]);
    }
    let (first, second) = (cluster.node(0), cluster.node(1));
    let file = cluster.backing().join("f");
    match way {
        Way::AtOnce => {
            let running = [first, second].map(|node| start(&cluster, node));
            for child in running {
                let _ = child.wait_with_output().expect("wait");
            }
        }
        _ => ended_with(&recover(&cluster, first, &["--wait", "0s"]), 3, &["f: "]),
    }
    let again = [second, first].map(|node| recover(&cluster, node, &["--wait", "0s"]));
    match fate {
        Fate::Third => {
            again.iter().for_each(|output| ended_with(output, 3, &["f: ", "nobody has said"]));
            assert!(!file.exists(), "the third one was not asked");
            ended_with(&recover(&cluster, cluster.node(2), &[]), 0, &[]);
            [first, second].iter().for_each(|n| ended_with(&recover(&cluster, n, &[]), 0, &[]));
            wanted[1_000..2_000].fill(3);
        }
        Fate::CacheLost => {
            ended_with(&again[1], 3, &["f: ", "nobody has said"]);
            assert!(!file.exists(), "a part of it is lost");
            return;
        }
        _ => again.iter().for_each(|output| ended_with(output, 0, &[])),
    }
    same(&format!("{fate:?}, {way:?}"), &std::fs::read(&file).expect("the file"), &wanted);
    assert!(board(&cluster).is_none(), "nobody needs to be told anything any more");
}

/// Where recoveries tell each other what they have.
fn board(cluster: &Cluster) -> Option<std::path::PathBuf> {
    let entries = std::fs::read_dir(cluster.backing()).expect("the backing");
    let mut paths = entries.map(|entry| entry.expect("entry").path());
    paths.find(|path| path.to_string_lossy().contains(".ebb-part-recovery-"))
}

#[test]
fn a_file_with_holes_is_whole_when_every_node_of_the_job_has_spoken() {
    let fates = [Fate::Nothing, Fate::DaemonBack, Fate::ServiceBack, Fate::Returned];
    for fate in fates.into_iter().chain([Fate::Visited, Fate::AllReturned]) {
        recovered_with_holes(fate, Way::AtOnce);
    }
    recovered_with_holes(Fate::Nothing, Way::InTurn);
}

#[test]
fn as_long_as_one_has_not_spoken_a_gap_is_not_taken_for_a_hole() {
    for fate in [Fate::Third, Fate::CacheLost] {
        recovered_with_holes(fate, Way::AtOnce);
    }
    recovered_with_holes(Fate::Third, Way::InTurn);
}

/// What a node does to a file that another one has unflushed bytes of, before it leaves with status 0.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Last {
    /// It writes, and its bytes wait in a part file for those of the other.
    Waits,
    /// It writes over a file that is on the backing.
    InPlace,
    /// It cuts it.
    Cuts,
}

/// These are the last ones of the job.
fn these_die(cluster: &mut Cluster, nodes: &[usize]) {
    nodes.iter().for_each(|node| cluster.node(*node).kill9());
    cluster.kill_meta();
    std::fs::remove_dir_all(cluster.meta_state()).expect("the state");
    for node in nodes {
        let _ = cluster.node(*node).ebb("umount", &[], &[]);
    }
}

/// The first node writes to a file; then the second one does its part, of which the first one need not hear.
/// What holds the file open for the first one.
fn both_write(cluster: &Cluster, last: Last) -> File {
    let (first, second) = (cluster.node(0), cluster.node(1));
    if last != Last::Waits {
        std::fs::write(first.path("f"), [9; 5_000]).expect("write");
        first.drain();
    }
    // Open from before the other one writes: only then it need not hear of it.
    let held = open(first, "f");
    open(first, "f").write_all_at(&[1; 3_000], 0).expect("write");
    let theirs = open(second, "f");
    match last {
        Last::Cuts => theirs.set_len(100).expect("cut"),
        _ => theirs.write_all_at(&[2; 2_000], 2_000).expect("write"),
    }
    held
}

/// What is in the file when both of them are recovered.
fn both_are_there(cluster: &Cluster, last: Last, what: &str) {
    let wanted = match last {
        Last::Waits => [vec![1; 2_000], vec![2; 2_000]].concat(),
        Last::InPlace => [vec![1; 2_000], vec![2; 2_000], vec![9; 1_000]].concat(),
        Last::Cuts => vec![1; 100],
    };
    let got = std::fs::read(cluster.backing().join("f")).expect("the file");
    same(&format!("{last:?}, {what}"), &got, &wanted);
    assert_eq!(names(cluster.backing()), ["f"], "nothing is left beside it");
    assert!(board(cluster).is_none(), "nobody needs to be told anything any more");
}

fn left_before(last: Last, model: &str) {
    let Some(mut cluster) = cluster(2, model) else { return };
    let held = both_write(&cluster, last);
    cluster.node(1).umount();
    assert!(board(&cluster).is_some(), "{last:?}, {model}: the other one has not heard of it");
    std::thread::sleep(Duration::from_millis(1_500));
    drop(held);
    these_die(&mut cluster, &[0]);
    ended_with(&recover(&cluster, cluster.node(0), &[]), 0, &[]);
    both_are_there(&cluster, last, model);
}

/// A cut says what no later one to a greater length does.
#[test]
fn many_cuts_to_growing_lengths_count_all() {
    let Some(mut cluster) = cluster(2, "session") else { return };
    let held = open(cluster.node(0), "f");
    open(cluster.node(0), "f").write_all_at(&[1; 5_000], 0).expect("write");
    let theirs = open(cluster.node(1), "f");
    for len in (100..4_100).step_by(20) {
        theirs.set_len(len).expect("cut");
    }
    std::thread::sleep(Duration::from_millis(1_500));
    drop((held, theirs));
    these_die(&mut cluster, &[0, 1]);
    for wait in ["0s", "1m"] {
        for node in [0, 1] {
            let output = recover(&cluster, cluster.node(node), &["--wait", wait]);
            assert!(wait == "0s" || output.status.success(), "{}", describe(&output));
        }
    }
    let wanted = [vec![1; 100], vec![0; 3_980]].concat();
    same("cut", &std::fs::read(cluster.backing().join("f")).expect("the file"), &wanted);
}

/// The service knew what the node had done, and that is gone; the other node has not heard of it.
#[test]
fn what_a_node_did_before_it_left_is_not_lost_with_the_service() {
    for model in ["session", "commit", "mpiio"] {
        left_before(Last::Waits, model);
    }
    left_before(Last::InPlace, "session");
    left_before(Last::Cuts, "session");
}

/// What a node had done to a file that another one has unflushed bytes of, before its daemon was killed and
/// mounted again: of these it holds nothing any more.
fn mounted_again_after(last: Last, model: &str, way: Way, supervised: bool) {
    if skip_reason().is_some() {
        return;
    }
    let builder = Cluster::builder().nodes(2).separate_meta().flush("end").consistency(model);
    let mut cluster = if supervised { builder.supervised().start() } else { builder.start() };
    let held = both_write(&cluster, last);
    let second = cluster.node(1);
    let drained = second.ebb("drain", &[], &[]);
    assert_eq!(second.status()["dirty_bytes"], 0, "{last:?}, {model}: {}", describe(&drained));
    // It went where the name of this says.
    let there = std::fs::read(cluster.backing().join("f"));
    let there = there.map(|bytes| (bytes.len(), bytes.get(3_000).copied()));
    match last {
        Last::Waits => assert!(there.is_err(), "it has no name yet"),
        Last::InPlace => assert_eq!(there.expect("the file"), (5_000, Some(2)), "flushed"),
        Last::Cuts => {}
    }
    if supervised {
        assert!(second.kill_daemon(), "no other daemon");
    } else {
        second.kill9();
        let _ = second.ebb("umount", &[], &[]);
        second.mount();
    }
    std::thread::sleep(Duration::from_millis(1_500));
    drop(held);
    all_die(&mut cluster);
    let (first, second) = (cluster.node(0), cluster.node(1));
    let order = match way {
        Way::AtOnce => [start(&cluster, first), start(&cluster, second)]
            .map(|child| child.wait_with_output().expect("wait")),
        _ => [first, second].map(|node| recover(&cluster, node, &["--wait", "0s"])),
    };
    order.iter().for_each(|o| assert!(matches!(o.status.code(), Some(0 | 3)), "{}", describe(o)));
    for node in [second, first] {
        ended_with(&recover(&cluster, node, &["--wait", "0s"]), 0, &[]);
    }
    both_are_there(&cluster, last, &format!("{model}, {way:?}"));
}

#[test]
fn what_a_node_had_flushed_is_known_to_the_daemon_after_the_killed_one() {
    for way in [Way::AtOnce, Way::InTurn] {
        let models = ["session", "commit", "mpiio", "posix"].map(|model| (model, false));
        for (model, supervised) in models.into_iter().chain([("session", true), ("posix", true)]) {
            mounted_again_after(Last::Waits, model, way, supervised);
            mounted_again_after(Last::InPlace, model, way, supervised);
        }
        mounted_again_after(Last::Cuts, "session", way, false);
    }
}

/// A file without a name of its own yet goes along into another directory, and who flushed to it need not hear.
#[test]
fn what_was_flushed_to_a_part_file_is_found_when_the_file_was_moved() {
    for (gone, model) in [(false, "session"), (false, "posix"), (true, "session")] {
        let Some(mut cluster) = cluster(2, model) else { return };
        let (first, second) = (cluster.node(0), cluster.node(1));
        std::fs::create_dir(first.path("d")).expect("mkdir");
        let files = [open(first, "f"), open(second, "f")];
        files[0].write_all_at(&[1; 10_000], 0).expect("write");
        files[1].write_all_at(&[2; 10_000], 10_000).expect("write");
        drop(files);
        let _ = second.ebb("drain", &[], &[]);
        std::fs::rename(first.path("f"), first.path("d/g")).expect("rename");
        if gone {
            second.umount();
        }
        std::thread::sleep(Duration::from_millis(1_500));
        let nodes: Vec<&Node> = if gone {
            these_die(&mut cluster, &[0]);
            vec![cluster.node(0)]
        } else {
            all_die(&mut cluster);
            cluster.nodes().iter().collect()
        };
        nodes.iter().for_each(|node| drop(recover(&cluster, node, &["--wait", "0s"])));
        nodes.iter().for_each(|node| ended_with(&recover(&cluster, node, &[]), 0, &[]));
        let wanted = [[1; 10_000], [2; 10_000]].concat();
        let got = std::fs::read(cluster.backing().join("d/g")).expect("the file");
        same(&format!("{model}, {gone}"), &got, &wanted);
        let there = [names(cluster.backing()), names(&cluster.backing().join("d"))];
        assert_eq!(there, [["d"], ["g"]], "no part file is left");
    }
}

/// A file that begins anew over a published one, of which a node has flushed its part, forgotten the rest
/// and opened it again: where it flushed that is still in its journal.
#[test]
fn where_a_node_has_flushed_stays_noted_when_it_opens_the_file_again() {
    if skip_reason().is_some() {
        return;
    }
    let builder = Cluster::builder().nodes(2).separate_meta().flush("end");
    let builder = builder.consistency("session").option("--files-max", "100");
    let mut cluster = builder.start();
    let (first, second) = (cluster.node(0), cluster.node(1));
    std::fs::write(first.path("f"), [9; 5_000]).expect("write");
    first.drain();
    std::fs::write(first.path("f"), [1; 10_000]).expect("write");
    open(second, "f").write_all_at(&[2; 10_000], 10_000).expect("write");
    let _ = first.ebb("drain", &[], &[]);
    assert_eq!(std::fs::read(cluster.backing().join("f")).expect("read"), [9; 5_000]);
    let forgotten = || number(&first.status(), "files_forgotten");
    let before = forgotten();
    for i in 0..220 {
        std::fs::write(first.path(format!("other-{i}")), "x").expect("write");
    }
    let _ = first.ebb("drain", &[], &[]);
    wait_until(Duration::from_secs(20), "it is forgotten", || forgotten() > before + 120);
    assert_eq!(std::fs::read(first.path("f")).expect("read").len(), 20_000);
    std::thread::sleep(Duration::from_millis(1_500));
    all_die(&mut cluster);
    let order: Vec<&Node> = cluster.nodes().iter().collect();
    let running: Vec<Child> = order.iter().map(|n| start(&cluster, n)).collect();
    running.into_iter().for_each(|c| drop(c.wait_with_output().expect("wait")));
    for node in order {
        ended_with(&recover(&cluster, node, &["--wait", "0s"]), 0, &[]);
    }
    let got = std::fs::read(cluster.backing().join("f")).expect("read");
    same("begun anew", &got, &[[1; 10_000], [2; 10_000]].concat());
}

#[test]
fn what_was_said_for_recoveries_goes_with_the_last_node() {
    let Some(cluster) = cluster(2, "session") else { return };
    let (first, second) = (cluster.node(0), cluster.node(1));
    open(first, "f").write_all_at(&[1; 3_000], 0).expect("write");
    open(second, "f").write_all_at(&[2; 2_000], 2_000).expect("write");
    second.umount();
    assert!(board(&cluster).is_some(), "the first one's bytes are not flushed");
    first.umount();
    let wanted = [vec![1; 2_000], vec![2; 2_000]].concat();
    same("f", &std::fs::read(cluster.backing().join("f")).expect("the file"), &wanted);
    assert!(board(&cluster).is_none(), "it stays for nobody");
}
