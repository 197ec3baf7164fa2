//! Files go from producers to consumers, and are no more.

use crate::together::*;
use ebb_testkit::{Builder, Cluster, Node, skip_reason};
use ebb_tests::nodes::went_past;
use ebb_tests::{content, tools};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::PathBuf;

const MODELS: [&str; 5] = ["posix", "commit", "session", "mpiio", "romio"];

/// Of each producer.
const PART: u64 = 3 << 20;

fn builder(model: &str) -> Builder {
    Cluster::builder().nodes(2).separate_meta().consistency(model).flush("immediate")
}

fn part(cluster: &Cluster, who: u64) -> PathBuf {
    let path = cluster.root().join(format!("part{who}"));
    fs::write(&path, content::bytes(who, 1, who * PART, PART)).expect("a part");
    path
}

fn whole() -> Vec<u8> {
    (0..2).flat_map(|who| content::bytes(who, 1, who * PART, PART)).collect()
}

/// Two producers and two consumers on two nodes; the consumers come first, when there is no such name.
/// `went`: true when the nodes say that it went the way that is tried.
fn hand_on(builder: Builder, went: impl Fn(&[Value; 2]) -> bool) {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    let cluster = builder.start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=2 consumers=2 wait=60s");
    for round in 0..3 {
        let file = format!("d/step{round}");
        let copies = [cluster.root().join("copy0"), cluster.root().join("copy1")];
        let awaited = [a, b].map(|node| node.counter("ebb_awaited_files_total"));
        let consumers = [reads(a, &file, &copies[0]), reads(b, &file, &copies[1])];
        wait_awaiting(&cluster, 2);
        assert!(!a.path(&file).exists(), "who only looks is told that it is not there");
        is_done(writes(a, &file, &part(&cluster, 0), 0), "the first producer");
        wait_awaiting(&cluster, 2);
        wait_stands(b, &file, "awaited: 1 of 2 producers");
        is_done(writes(b, &file, &part(&cluster, 1), PART), "the second producer");
        for (consumer, copy) in consumers.into_iter().zip(&copies) {
            is_done(consumer, "a consumer");
            content::same("what was handed on", &fs::read(copy).expect("a copy"), &whole());
        }
        wait_released(&cluster, &file);
        for (node, before) in [a, b].into_iter().zip(awaited) {
            let asked = node.counter("ebb_awaited_files_total") - before;
            assert!((1..=3).contains(&asked), "a wait is one request, not {asked}");
        }
    }
    assert_eq!(coupled(&cluster)["files"], 0);
    let statuses = [a, b].map(Node::status);
    for status in &statuses {
        assert_eq!(status["flushed_bytes"], 0, "nothing of it went to the backing");
    }
    assert!(went(&statuses), "it did not go the way that is tried: {statuses:#?}");
    cluster.umount_all();
}

#[test]
fn files_are_handed_on_and_released_under_every_model() {
    for model in MODELS {
        eprintln!("{model}");
        let past = |status: &Value| status["opens"]["passthrough-write"].as_u64() > Some(0);
        hand_on(builder(model), |nodes| !nodes.iter().any(past));
    }
}

#[test]
fn files_are_handed_on_past_the_daemon_with_copies_and_supervisors() {
    for model in ["posix", "session"] {
        // The first producer's bytes; the second one finds bytes of another node, and reads and writes through its
        // daemon.
        let past = builder(model).option("--io-path", "auto");
        hand_on(past, |nodes| nodes.iter().any(went_past));
    }
    let supervised = |status: &Value| status["unsupervised"].is_null();
    hand_on(builder("posix").supervised().token(), |nodes| nodes.iter().all(supervised));
    let copied = |status: &Value| status["copies"]["copied_bytes"].as_u64() > Some(0);
    hand_on(builder("session").option("--replicas", "2"), |nodes| nodes.iter().all(copied));
}

/// Who makes a file that somebody waits for makes a new one.
#[test]
fn a_name_that_is_awaited_is_not_there_for_who_makes_it() {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    let cluster = builder("posix").start();
    let node = cluster.node(0);
    couple(node, "d", "producers=1 consumers=1");
    for how in ["exclusive", "renamed", "linked"] {
        let copy = cluster.root().join("copy");
        let consumer = reads(node, "d/new", &copy);
        wait_awaiting(&cluster, 1);
        let made = match how {
            "exclusive" => "set -C; echo hello > d/new",
            "renamed" => "echo hello > d/part; mv d/part d/new",
            _ => "echo hello > d/part; ln d/part d/new",
        };
        node.shell(made);
        is_done(consumer, how);
        assert_eq!(fs::read(&copy).expect("a copy"), b"hello\n", "{how}");
        // With all of its names.
        wait_released(&cluster, "d/new");
        assert_eq!(tools::names(&node.path("d")), Vec::<String>::new(), "{how}");
    }
    cluster.umount_all();
}

#[test]
fn what_is_to_be_kept_gets_to_the_backing_and_stays() {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    let cluster = builder("session").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=1 consumers=1 keep=pfs");
    let copy = cluster.root().join("copy");
    let consumer = reads(b, "d/f", &copy);
    is_done(writes(a, "d/f", &part(&cluster, 0), 0), "the producer");
    is_done(consumer, "the consumer");
    let want = content::bytes(0, 1, 0, PART);
    content::same("what was handed on", &fs::read(&copy).expect("a copy"), &want);
    // And again, without a wait.
    content::same("read once more", &fs::read(a.path("d/f")).expect("it is there"), &want);
    cluster.umount_all();
    let kept = fs::read(cluster.backing().join("d/f")).expect("on the backing");
    content::same("on the backing", &kept, &want);
}

/// What has a name elsewhere stays there: only names in the coupled directory go.
#[test]
fn what_was_moved_or_linked_elsewhere_stays() {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    let cluster = builder("session").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=1 consumers=1");
    fs::create_dir(a.path("archive")).expect("a directory");
    a.shell("echo moved > d/f; mv d/f archive/f; echo linked > d/g; ln d/g archive/g");
    for (file, want) in [("archive/f", "moved\n"), ("d/g", "linked\n")] {
        assert_eq!(fs::read_to_string(b.path(file)).expect("ready"), want);
    }
    tools::wait_until(LIMIT, "its name in the directory is gone", || !a.path("d/g").exists());
    let none = || coupled(&cluster)["files"] == 0;
    tools::wait_until(LIMIT, "they are plain files", none);
    for _ in 0..2 {
        assert_eq!(fs::read_to_string(b.path("archive/f")).expect("there"), "moved\n");
        assert_eq!(fs::read_to_string(a.path("archive/g")).expect("there"), "linked\n");
    }
    cluster.umount_all();
    let drained = fs::read_to_string(cluster.backing().join("archive/g"));
    assert_eq!(drained.expect("on the backing"), "linked\n");
}

/// Making a file that is there is opening it, also for who only reads.
#[test]
fn who_makes_a_file_to_read_it_waits_and_keeps_nobody_from_making_others() {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    let cluster = builder("posix").start();
    let node = cluster.node(0);
    couple(node, "d", "producers=2 consumers=1");
    node.shell("echo half > d/f");
    let path = node.path("d/f");
    let reader = std::thread::spawn(move || {
        let mut got = String::new();
        let how = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CREATE;
        let file = rustix::fs::open(&path, how, rustix::fs::Mode::RUSR).expect("opened");
        fs::File::from(file).read_to_string(&mut got).map(|_| got)
    });
    wait_awaiting(&cluster, 1);
    node.shell("echo other > d/other; echo whole >> d/f");
    assert_eq!(reader.join().expect("no panic").expect("read"), "half\nwhole\n");
    cluster.umount_all();
}

/// Nothing that was written is lost because nobody came to read it.
#[test]
fn what_nobody_has_read_gets_to_the_backing_at_the_end() {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    let cluster = builder("session").start();
    let node = cluster.node(0);
    couple(node, "d", "producers=1 consumers=2");
    is_done(writes(node, "d/f", &part(&cluster, 0), 0), "the producer");
    let copy = cluster.root().join("copy");
    is_done(reads(node, "d/f", &copy), "one of two consumers");
    std::thread::sleep(std::time::Duration::from_secs(2));
    let early = fs::read(cluster.backing().join("d/f"));
    assert!(early.is_err(), "it is flushed although somebody is to read it");
    cluster.umount_all();
    let drained = fs::read(cluster.backing().join("d/f")).expect("on the backing");
    content::same("drained", &drained, &content::bytes(0, 1, 0, PART));
}

/// A cache that is nearly full is more important.
#[test]
fn a_full_cache_flushes_what_is_to_be_handed_on() {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    let cluster = builder("session").option("--cache-size", "16MiB").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=1 consumers=1");
    for step in 0..8 {
        is_done(writes(a, &format!("d/f{step}"), &part(&cluster, 0), 0), "the producer");
    }
    let want = content::bytes(0, 1, 0, PART);
    for step in 0..8 {
        let file = format!("d/f{step}");
        let copy = cluster.root().join("copy");
        is_done(reads(b, &file, &copy), "the consumer");
        content::same(&file, &fs::read(&copy).expect("a copy"), &want);
    }
    for step in 0..8 {
        wait_released(&cluster, &format!("d/f{step}"));
    }
    assert!(a.status()["flushed_bytes"].as_u64() > Some(0), "it had room for all of it");
    cluster.umount_all();
}

/// A time step is written over the last one.
#[test]
fn a_file_that_is_written_anew_is_awaited_anew() {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    let cluster = builder("session").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    couple(a, "d", "producers=1 consumers=1 keep=pfs");
    a.shell("echo first > d/f");
    let mut got = String::new();
    fs::File::open(b.path("d/f")).expect("ready").read_to_string(&mut got).expect("read");
    assert_eq!(got, "first\n");
    let writer = a.spawn("exec 3> d/f; echo second >&3; sleep 1; echo end >&3");
    let anew = || attribute(&b.path("d/f")).is_ok_and(|text| text.starts_with("awaited"));
    tools::wait_until(LIMIT, "it is written anew", anew);
    let got = fs::read_to_string(b.path("d/f")).expect("when it is ready");
    assert_eq!(got, "second\nend\n");
    is_done(writer, "the writer");
    cluster.umount_all();
}
