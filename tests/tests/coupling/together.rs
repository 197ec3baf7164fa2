//! What the tests of coupled directories share.

use ebb_testkit::{Cluster, Node};
use ebb_tests::tools;
use rustix::fs::XattrFlags;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Everything of one test ends in this time.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The attribute.
pub const COUPLE: &str = "user.ebb.couple";

/// Couples a directory, which is made, and is seen by the other nodes then.
pub fn couple(node: &Node, dir: &str, terms: &str) {
    let path = node.path(dir);
    std::fs::create_dir(&path).expect("a directory");
    rustix::fs::setxattr(&path, COUPLE, terms.as_bytes(), XattrFlags::empty()).expect(terms);
}

/// What `getfattr` would say.
pub fn attribute(path: &Path) -> Result<String, rustix::io::Errno> {
    let mut text = vec![0; 512];
    let length = rustix::fs::getxattr(path, COUPLE, &mut text)?;
    text.truncate(length);
    Ok(String::from_utf8(text).expect("text"))
}

/// A consumer: `cat FILE > COPY`, with the copy outside of all mounts.
pub fn reads(node: &Node, file: &str, copy: &Path) -> Child {
    let copy = std::fs::File::create(copy).expect("a copy");
    let mut command = node.command("cat");
    command.arg(file).stdin(Stdio::null()).stdout(copy).stderr(Stdio::null());
    command.spawn().expect("cat")
}

/// A producer: writes `content` from `offset` on, and does not cut what is there.
pub fn writes(node: &Node, file: &str, content: &Path, offset: u64) -> Child {
    let mut command = node.command("dd");
    command.arg(format!("if={}", content.display())).arg(format!("of={file}"));
    // In small pieces, so that there is a time in which it can be killed.
    command.args(["bs=16k", "oflag=seek_bytes", "conv=notrunc", "status=none"]);
    command.arg(format!("seek={offset}")).stdin(Stdio::null());
    command.spawn().expect("dd")
}

/// The kernel tells of the end of an open after `close` has returned.
pub fn wait_stands(node: &Node, file: &str, begin: &str) {
    let stands = || attribute(&node.path(file)).is_ok_and(|text| text.starts_with(begin));
    tools::wait_until(LIMIT, begin, stands);
}

/// How it ended.
pub fn ended(mut child: Child, what: &str) -> ExitStatus {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().expect("waits") {
            return status;
        }
        if Instant::now() > end {
            let _ = child.kill();
            panic!("{what} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// It ended well.
pub fn is_done(child: Child, what: &str) {
    let status = ended(child, what);
    assert!(status.success(), "{what}: {status}");
}

/// So many requests wait at the service.
pub fn wait_awaiting(cluster: &Cluster, count: u64) {
    tools::wait_until(LIMIT, "somebody waits at the service", || {
        coupled(cluster)["awaiting"] == count
    });
}

/// What the service's status says of coupled files.
pub fn coupled(cluster: &Cluster) -> serde_json::Value {
    let output = cluster.run_ebb(&["status", cluster.meta_address().expect("a service"), "--json"]);
    let status: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    status["coupled"].clone()
}

/// Waits until the file is gone on every node, and nothing of it is in any cache or on the backing.
pub fn wait_released(cluster: &Cluster, file: &str) {
    for node in cluster.nodes() {
        let is_gone = || !node.path(file).exists();
        tools::wait_until(LIMIT, "it is gone", is_gone);
        let empty = |status: &serde_json::Value| status["cache_bytes"] == 0;
        node.wait_status(LIMIT, empty);
        let cached = || cached_bytes(node.cache());
        tools::wait_until(LIMIT, "its cache file is gone", || cached() == 0);
    }
    assert!(!cluster.backing().join(file).exists());
}

/// Bytes of files that are cached, as the disk has them.
fn cached_bytes(cache: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let mut sum = 0;
    let mut dirs = vec![cache.join("data")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let Ok(found) = entry.metadata() else { continue };
            match found.is_dir() {
                true => dirs.push(entry.path()),
                false => sum += found.blocks() * 512,
            }
        }
    }
    sum
}
