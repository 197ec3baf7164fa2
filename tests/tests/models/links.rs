//! Links between nodes and to the metadata service that are cut for a while: what waits goes on,
//! nothing that was acknowledged is lost, and a node can be mounted again at once. Needs root and
//! network namespaces.

use ebb_testkit::{Cluster, Disk, Network, Port, describe, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::within;
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A cut, a lease, and some.
const OPERATION_MAX: Duration = Duration::from_secs(40);

fn network(nodes: usize) -> Option<Arc<Network>> {
    if skip_reason().is_some() {
        return None;
    }
    let made = Network::new(nodes).inspect_err(|why| println!("SKIPPED: {why}"));
    made.ok().map(Arc::new)
}

fn cluster(network: &Arc<Network>, nodes: usize, model: &str) -> Cluster {
    let builder = Cluster::builder().nodes(nodes).consistency(model).flush("end");
    builder.option("--request-timeout", "30s").network(Arc::clone(network)).start()
}

/// Under posix every write needs the service: it waits for it.
#[test]
fn operations_wait_for_a_link_that_comes_back() {
    let Some(network) = network(2) else { return };
    let cluster = cluster(&network, 2, "posix");
    for port in [Port::Service, Port::Node(0)] {
        let (path, content) = (cluster.node(0).path("f"), bytes(1, 1, 0, 70_000));
        fs::write(cluster.node(0).path("before"), "before").expect("write");
        network.cut(port);
        let (at, data) = (path.clone(), content.clone());
        let writer = std::thread::spawn(move || fs::write(at, data));
        std::thread::sleep(Duration::from_secs(3));
        assert!(!writer.is_finished(), "nobody can have answered");
        network.join(port);
        let wrote = within(OPERATION_MAX, "write", move || writer.join()).expect("no panic");
        wrote.expect("a write over a cut link");
        let seen = cluster.node(1).path("f");
        let seen = within(OPERATION_MAX, "read", move || fs::read(seen)).expect("read");
        same("on the other node", &seen, &content);
        fs::remove_file(path).expect("unlink");
    }
    cluster.umount_all();
}

/// Longer than the service waits for a silent node.
#[test]
fn a_node_that_was_cut_off_past_its_lease_has_its_bytes() {
    let Some(network) = network(2) else { return };
    let cluster = cluster(&network, 2, "session");
    let content = bytes(1, 1, 0, 700_000);
    fs::write(cluster.node(0).path("f"), &content).expect("write");
    network.cut(Port::Node(0));
    std::thread::sleep(Duration::from_secs(13));
    network.join(Port::Node(0));
    for node in cluster.nodes() {
        let path = node.path("f");
        let read = within(OPERATION_MAX, "read", move || fs::read(path)).expect("read");
        same(node.name(), &read, &content);
    }
    cluster.umount_all();
    same("backing", &fs::read(cluster.backing().join("f")).expect("read"), &content);
}

/// What a node may have written quietly is its own when it is given up. One that has told everything and
/// closed the file, and could not say so, has nothing there; nor has the daemon after it.
#[test]
fn a_node_that_was_cut_off_as_it_closed_a_file_leaves_no_bytes_that_nobody_has() {
    for killed in [false, true] {
        let Some(network) = network(2) else { return };
        let builder = Cluster::builder().nodes(2).consistency("posix").flush("end");
        let builder = builder.option("--io-path", "daemon").option("--request-timeout", "30s");
        let cluster = builder.network(Arc::clone(&network)).start();
        let (a, b) = (cluster.node(0), cluster.node(1));
        // One request, whose answer brings the right to write more without telling.
        let content = bytes(1, 1, 0, 100_000);
        let file = fs::File::create(a.path("f")).expect("create");
        file.write_all_at(&content, 0).expect("write");
        network.cut(Port::Node(0));
        within(OPERATION_MAX, "close", move || drop(file));
        // Longer than the lease that the right came with.
        std::thread::sleep(Duration::from_secs(8));
        let path = b.path("f");
        let len = within(OPERATION_MAX, "stat", move || fs::metadata(path)).expect("stat").len();
        assert!(len > 100_000, "{len}: it had no such right, or was not given up");
        if killed {
            a.kill9();
            let _ = a.ebb("umount", &[], &[]);
        }
        network.join(Port::Node(0));
        if killed {
            a.mount();
        }
        for node in [a, b] {
            let end = Instant::now() + OPERATION_MAX;
            let read = loop {
                let path = node.path("f");
                match within(OPERATION_MAX, "read", move || fs::read(path)) {
                    Err(_) if Instant::now() < end - Duration::from_secs(20) => {}
                    read => {
                        break read.unwrap_or_else(|e| panic!("{} ({killed}): {e}", node.name()));
                    }
                }
                std::thread::sleep(Duration::from_millis(300));
            };
            same(&format!("{} ({killed})", node.name()), &read, &content);
        }
        cluster.umount_all();
        same("backing", &fs::read(cluster.backing().join("f")).expect("read"), &content);
    }
}

/// The service may not have heard that a daemon is dead: its successor waits for that, with
/// whatever is left in the cache, instead of being refused.
#[test]
fn a_daemon_waits_until_the_service_knows_that_its_predecessor_is_gone() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(1).separate_meta().start();
    let node = cluster.node(0);
    let second = cluster.root().join("second");
    fs::create_dir(&second).expect("mkdir");
    let meta = cluster.meta_address().expect("a service of its own");
    let mut command = cluster.ebb();
    command.args(["mount", "--meta", meta, "--node", node.name(), "--cache"]);
    command.arg(cluster.root().join("second cache")).arg(cluster.backing()).arg(&second);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut waiting = command.spawn().expect("ebb can be started");
    std::thread::sleep(Duration::from_secs(2));
    assert!(waiting.try_wait().expect("a child").is_none(), "the first one lives");
    node.kill9();
    let output = waiting.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", describe(&output));
    fs::write(second.join("f"), "f").expect("write");
    let gone = cluster.run_ebb(&["umount", &second.display().to_string()]);
    assert!(gone.status.success(), "{}", describe(&gone));
    assert_eq!(fs::read(cluster.backing().join("f")).expect("read"), b"f");
}

/// Between the moment when a file gets its name on the backing and the one when the service says
/// so, the way to it leads nowhere: whoever opens it waits that out.
#[test]
fn a_file_can_be_opened_while_it_gets_its_name_on_a_slow_backing() {
    if skip_reason().is_some() {
        return;
    }
    let mut disk = match Disk::new(64).and_then(|mut d| d.throttle(1_000_000).map(|()| d)) {
        Ok(disk) => disk,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let builder = Cluster::builder().nodes(2).consistency("posix").flush("immediate");
    let builder = builder.option("--cache-size", "400KiB").backing(disk.path());
    let cluster = builder.start();
    let mount = cluster.node(0).mountpoint().to_owned();
    // Each has a name of its own: one that is replaced while it is open elsewhere is another matter.
    let begun = Arc::new(AtomicU64::new(0));
    let next = Arc::clone(&begun);
    let writing = std::thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(8);
        while Instant::now() < end {
            let name = next.fetch_add(1, Ordering::Relaxed).to_string();
            let file = fs::File::create(mount.join(format!("{name}.new"))).expect("create");
            for piece in 0..12 {
                file.write_all_at(&bytes(1, piece, 0, 9_000), piece * 9_000).expect("write");
            }
            drop(file);
            fs::rename(mount.join(format!("{name}.new")), mount.join(name)).expect("rename");
        }
    });
    let read_all = || {
        let mut opened = 0;
        while !writing.is_finished() {
            let newest = begun.load(Ordering::Relaxed);
            for file in newest.saturating_sub(4)..newest {
                for name in [format!("{file}"), format!("{file}.new")] {
                    match fs::read(cluster.node(1).path(&name)) {
                        Ok(_) => opened += 1,
                        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                        Err(e) => panic!("{name}, after {opened} opens: {e}"),
                    }
                }
            }
        }
        opened
    };
    let opened: u32 = std::thread::scope(|scope| {
        let readers = [0; 4].map(|_| scope.spawn(read_all));
        readers.into_iter().map(|reader| reader.join().expect("no panic")).sum()
    });
    writing.join().expect("no panic");
    println!("{} files, {opened} opens", begun.load(Ordering::Relaxed));
    assert!(opened > 0);
    disk.throttle(0).expect("as above");
    cluster.umount_all();
}
