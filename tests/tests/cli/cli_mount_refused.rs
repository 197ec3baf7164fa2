//! What `ebb mount` says where something else is in its way: who answers at `--meta` is no metadata
//! service, or another daemon has the cache. Causes and remedies; that nothing is left is in
//! `cli_mount.rs`.

use ebb_testkit::node::is_running;
use ebb_testkit::{Cluster, Node, describe, mounts, skip_reason};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What a user is asked in the end.
const ADVICE: &str = "is it the address that `ebb meta` or the first node's `ebb mount` printed?";

fn ended_with(output: &Output, status: i32, words: &[&str]) {
    assert_eq!(output.status.code(), Some(status), "{}", describe(output));
    let said = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(said.contains(word), "no '{word}' in: {said}");
    }
}

/// Listens until the test is over, and answers everybody in its way.
struct Stranger {
    address: String,
    came: Arc<AtomicU32>,
}

impl Stranger {
    fn answering(answer: fn(TcpStream)) -> Stranger {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let came = Arc::new(AtomicU32::new(0));
        let counted = came.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                counted.fetch_add(1, Relaxed);
                std::thread::spawn(move || answer(stream));
            }
        });
        Stranger { address, came }
    }
}

/// As a web server does when it gets what it does not know.
fn speak_http(mut stream: TcpStream) {
    let _ = stream.read(&mut [0; 4096]);
    let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
    let _ = stream.shutdown(Shutdown::Write);
    // To close with bytes unread would break the connection, and take the answer away.
    say_nothing(stream);
}

/// Reads whatever comes, until the other end has had enough.
fn say_nothing(mut stream: TcpStream) {
    while stream.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
}

/// `ebb mount --meta ADDRESS`, which must fail as one that finds no service; how long that took.
fn refused_by(node: &Node, address: &str, more: &[&str], words: &[&str]) -> Duration {
    let begun = Instant::now();
    let output = node.mount_command(&[&["--meta", address], more].concat()).output();
    let took = begun.elapsed();
    let output = output.expect("ebb can be started");
    ended_with(&output, 5, &[&[address, ADVICE], words].concat());
    assert!(!mounts::is_mounted(node.mountpoint()), "a mount is left");
    took
}

#[test]
fn who_answers_in_place_of_the_service_is_said_and_what_to_do() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().prepare();
    let node = cluster.node(0);
    let http = Stranger::answering(speak_http);
    let words = ["is no metadata service of Ebb", "\"HTTP/1.1 400 Bad Request\""];
    let took = refused_by(node, &http.address, &[], &words);
    // Nobody waits for it to become another one.
    assert!(took < Duration::from_secs(4) && http.came.load(Relaxed) == 1, "{took:?}");
    let silent = Stranger::answering(say_nothing);
    let words = ["takes the connection and says nothing", "it hangs, or it is no metadata service"];
    let took = refused_by(node, &silent.address, &[], &words);
    assert!(took < Duration::from_secs(10) && silent.came.load(Relaxed) == 1, "{took:?}");
    let closing = Stranger::answering(drop);
    let took = refused_by(node, &closing.address, &[], &["hangs up without a word"]);
    // That may be a service that is asked by many at once.
    assert!(took < Duration::from_secs(10) && closing.came.load(Relaxed) > 1, "{took:?}");
}

/// The port beside the service's is the likely mistake: without a token, with one, and encrypted,
/// as between machines.
#[test]
fn the_peer_port_of_a_node_is_called_that() {
    if skip_reason().is_some() {
        return;
    }
    for secure in [None, Some("loopback"), Some("on")] {
        let builder = Cluster::builder().flush("end");
        let job = match secure {
            None => builder.start(),
            Some(secure) => builder.token().option("--secure", secure).start(),
        };
        let config = std::fs::read(job.node(0).path(".ebb/config")).expect("the configuration");
        let config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
        let peer = config["listen"].as_str().expect("the peer port");
        let token = job.root().join("token").display().to_string();
        let with = ["--token-file", &token, "--secure", secure.unwrap_or_default()];
        let more = if secure.is_some() { &with[..] } else { &[] };
        let others = Cluster::builder().nodes(2).backing(job.backing()).prepare();
        // The first one has the name of the job's own node.
        let other = others.node(1);
        let words = ["is the port where a node of Ebb lends its bytes"];
        let took = refused_by(other, peer, more, &words);
        assert!(took < Duration::from_secs(4), "{secure:?}: {took:?}");
        // The address that is meant leads in, with the same options.
        let status = job.node(0).status();
        let meta = status["meta"].as_str().expect("the service");
        other.mount_with(&[&["--meta", meta], more].concat());
        other.umount();
    }
}

/// A node whose mount is up has its cache for itself.
#[test]
fn who_has_a_cache_is_said_and_how_to_get_it() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().flush("end").start();
    let node = cluster.node(0);
    let (point, cache) = (node.mountpoint().display().to_string(), node.cache());
    let other = cluster.root().join("other");
    std::fs::create_dir(&other).expect("mkdir");
    let second = || node.mount_command_at(cache, &other, &[]).output().expect("ebb");
    let holder = format!("process {} (the mount at {point})", node.pid().expect("mounted"));
    let (look, end) = (format!("`ebb status {point}`"), format!("`ebb umount {point}` ends it"));
    ended_with(&second(), 2, &[&cache.display().to_string(), &holder, &look, &end]);
    // What it says to do helps.
    node.umount();
    assert!(second().status.success());
    let ended = cluster.run_ebb(&["umount", &other.display().to_string()]);
    assert!(ended.status.success(), "{}", describe(&ended));
}

/// As long as a daemon works after its mount has gone (here it stands still), there is no mount
/// point to unmount.
#[test]
fn a_cache_of_a_daemon_without_its_mount_is_waited_for() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().flush("end").start();
    let node = cluster.node(0);
    std::fs::write(node.path("f"), "content").expect("write");
    let pid = node.pid().expect("mounted");
    node.signal(Signal::STOP);
    let gone = mounts::clear(node.mountpoint());
    let again = node.mount_command(&[]).output();
    node.signal(Signal::CONT);
    assert!(gone, "it is still mounted");
    let again = again.expect("ebb can be started");
    let log = node.cache().join("ebb.log").display().to_string();
    let words = ["nothing is mounted there yet, or any more", "wait for its end", &log];
    ended_with(&again, 2, &words);
    assert!(mounts::wait_until(Duration::from_secs(20), || !is_running(pid)), "{}", node.log());
    node.mount();
    assert_eq!(std::fs::read_to_string(node.path("f")).expect("read"), "content");
    node.umount();
}

/// The first node is unmounted, and the service in its daemon stays for the second.
#[test]
fn a_cache_whose_daemon_stays_as_the_service_says_for_whom_and_how_to_join() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(2).flush("end").start();
    let [first, second] = [cluster.node(0), cluster.node(1)];
    let pid = first.pid().expect("mounted");
    let meta = first.status()["meta"].as_str().expect("the service").to_owned();
    std::fs::write(second.path("f"), "content").expect("write");
    first.umount();
    let again = first.mount_command(&[]).output().expect("ebb");
    let holder = format!("process {pid} (the metadata service {meta} of the job, which stays for");
    let (name, point) = (second.name(), first.mountpoint().display().to_string());
    let was = format!("stays for {name}; the mount at {point} is gone");
    let join = format!("--meta {meta} and another --cache");
    let look = format!("`ebb status {meta}`");
    ended_with(&again, 2, &[&first.cache().display().to_string(), &holder, &was, &look, &join]);
    // Both of what it says to do: to join with another cache, and to wait until nobody needs the
    // service.
    let cache = cluster.root().join("another cache");
    let joined = first.mount_command_at(&cache, first.mountpoint(), &["--meta", &meta]).output();
    let joined = joined.expect("ebb can be started");
    assert!(joined.status.success(), "{}", describe(&joined));
    assert_eq!(std::fs::read_to_string(first.path("f")).expect("read"), "content");
    first.umount();
    second.umount();
    assert!(mounts::wait_until(Duration::from_secs(20), || !is_running(pid)), "{}", first.log());
    first.mount();
    assert_eq!(std::fs::read_to_string(first.path("f")).expect("read"), "content");
    first.umount();
}
