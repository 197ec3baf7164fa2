//! No room, or no right, where bytes are to go: quota and inodes of the backing, room and inodes of the
//! disk with the cache, and permission. What is acknowledged stays, the error says which path and
//! why, and with room again everything arrives.

use ebb_testkit::environment::wrapped;
use ebb_testkit::{Cluster, Disk, Node, describe, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::model::close;
use ebb_tests::tools::{available, wait_until, within};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What the job has written.
type Written = Vec<(String, Vec<u8>)>;

/// The disk, or nothing where this machine has none of that kind.
fn disk(made: impl FnOnce() -> Result<Disk, String>) -> Option<Disk> {
    if skip_reason().is_some() {
        return None;
    }
    made().inspect_err(|why| println!("SKIPPED: {why}")).ok()
}

fn on_backing(disk: &Disk, flush: &str, cache_size: &str) -> Cluster {
    let builder = Cluster::builder().nodes(1).flush(flush).option("--cache-size", cache_size);
    builder.backing(disk.path()).start()
}

/// The backing is elsewhere.
fn with_cache_on(disk: &Disk, model: &str, flush: &str) -> Cluster {
    let builder = Cluster::builder().nodes(1).consistency(model).flush(flush);
    builder.option("--wait-interval", "100ms").caches_below(disk.path()).start()
}

fn store(path: &Path, content: &[u8]) -> io::Result<()> {
    let file = File::create(path)?;
    file.write_all_at(content, 0)?;
    close(file)
}

fn write_files(node: &Node, what: &str, count: u64, len: u64) -> Written {
    let write = |i| {
        let (name, content) = (format!("{what}-{i}"), bytes(1, i, 0, len));
        store(&node.path(&name), &content).expect("the buffer takes it");
        (name, content)
    };
    (0..count).map(write).collect()
}

fn check(root: &Path, written: &Written) {
    for (name, content) in written {
        same(name, &fs::read(root.join(name)).expect("read"), content);
    }
}

/// A drain and an unmount end with status 3, and say all of this.
fn is_refused(node: &Node, says: &[&str]) {
    for command in ["drain", "umount"] {
        let output = node.ebb(command, &[], &[]);
        assert_eq!(output.status.code(), Some(3), "{}", describe(&output));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let missing: Vec<_> = says.iter().filter(|text| !said.contains(**text)).collect();
        assert!(missing.is_empty(), "{command} does not say {missing:?}: {}", describe(&output));
        println!("{command}: {said}");
    }
}

/// Files of somebody else, until no further one can be made.
fn take_inodes(dir: &Path) -> Vec<PathBuf> {
    fs::create_dir_all(dir).expect("a directory for them");
    let made =
        (0..).map(|i| dir.join(format!("other-{i}"))).take_while(|p| File::create(p).is_ok());
    made.collect()
}

fn give_back(files: &[PathBuf]) {
    files.iter().for_each(|file| fs::remove_file(file).expect("it was made"));
}

/// Writes pieces at the end until one is refused; what was acknowledged, and the errno.
fn write_until_refused(path: &Path, appends: bool, most: u64) -> (Vec<u8>, Option<i32>) {
    let mut options = File::options();
    let mut file = options.create(true).write(true).append(appends).open(path).expect("open");
    let mut acknowledged = Vec::new();
    for i in 0..most {
        let piece = bytes(2, i, 0, 50_000);
        match file.write(&piece) {
            Ok(n) => acknowledged.extend_from_slice(&piece[..n]),
            Err(e) => return (acknowledged, e.raw_os_error()),
        }
    }
    (acknowledged, None)
}

#[test]
fn an_exceeded_quota_of_the_backing_is_told_and_made_good_later() {
    let Some(disk) = disk(|| Disk::with_quota(160)) else { return };
    let cluster = on_backing(&disk, "end", "64MiB");
    let node = cluster.node(0);
    let mut written = write_files(node, "small", 3, 10_000);
    node.drain();
    disk.limit(Some(8 << 20));
    written.extend(write_files(node, "large", 1, 20_000_000));
    is_refused(node, &["large-0: ", "quota"]);
    assert!(!cluster.backing().join("large-0").exists(), "never short under its own name");
    check(node.mountpoint(), &written);
    disk.limit(None);
    node.drain();
    check(cluster.backing(), &written);
    assert_eq!(node.status()["errors"].as_array().map(Vec::len), Some(0), "made good");
    node.umount();
}

#[test]
fn a_writer_behind_an_exceeded_quota_and_a_full_buffer_is_told_so() {
    let Some(disk) = disk(|| Disk::with_quota(160)) else { return };
    let cluster = on_backing(&disk, "immediate", "4MiB");
    let node = cluster.node(0);
    disk.limit(Some(6 << 20));
    let (acknowledged, errno) = write_until_refused(&node.path("much"), false, 800);
    assert_eq!(errno, Some(libc::EDQUOT), "after {} bytes", acknowledged.len());
    same("acknowledged", &fs::read(node.path("much")).expect("read"), &acknowledged);
    disk.limit(None);
    node.umount();
    same("backing", &fs::read(cluster.backing().join("much")).expect("read"), &acknowledged);
}

#[test]
fn a_backing_without_inodes_is_told_and_made_good_later() {
    let Some(disk) = disk(|| Disk::with_inodes(64, 64)) else { return };
    let cluster = on_backing(&disk, "end", "64MiB");
    let node = cluster.node(0);
    let mut written = write_files(node, "before", 3, 10_000);
    node.drain();
    let others = take_inodes(&disk.path());
    written.extend(write_files(node, "more", 5, 10_000));
    fs::create_dir(node.path("dir")).expect("new names wait in the job");
    // What needs no new file goes on.
    written[0].1 = bytes(7, 7, 0, 10_000);
    let again = File::options().write(true).open(node.path("before-0")).expect("open");
    again.write_all_at(&written[0].1, 0).expect("write");
    close(again).expect("close");
    is_refused(node, &["more-0: ", "more-4: ", "dir", "No space left", "inodes"]);
    check(node.mountpoint(), &written);
    same("an old one", &fs::read(disk.path().join("before-0")).expect("read"), &written[0].1);
    give_back(&others);
    node.drain();
    check(cluster.backing(), &written);
    assert!(cluster.backing().join("dir").is_dir());
    node.umount();
}

#[test]
fn more_files_than_the_cache_has_inodes_go_through_it() {
    for flush in ["immediate", "end"] {
        let Some(disk) = disk(|| Disk::with_inodes(64, 340)) else { return };
        let cluster = with_cache_on(&disk, "session", flush);
        let written = write_files(cluster.node(0), "file", 200, 3_000);
        check(cluster.node(0).mountpoint(), &written);
        cluster.umount_all();
        check(cluster.backing(), &written);
    }
}

/// While others have all inodes of the cache's disk, a new file takes the place of one that can be
/// flushed; where there is none, a write says ENOSPC, and what is not here is read all the same.
#[test]
fn a_cache_without_inodes_is_told_and_made_good_later() {
    let Some(disk) = disk(|| Disk::with_inodes(64, 400)) else { return };
    let cluster = with_cache_on(&disk, "session", "end");
    let node = cluster.node(0);
    fs::write(cluster.backing().join("old"), bytes(5, 5, 0, 10_000)).expect("write");
    let others = take_inodes(&disk.path().join("others"));
    let refusal = store(&node.path("refused"), b"new").expect_err("no inode for it");
    assert_eq!(refusal.raw_os_error(), Some(libc::ENOSPC));
    is_told_in_status(node);
    same("old", &fs::read(node.path("old")).expect("read"), &bytes(5, 5, 0, 10_000));
    give_back(&others[..5]);
    let mut written = write_files(node, "mine", 20, 10_000);
    check(node.mountpoint(), &written);
    give_back(&others[5..]);
    written.extend(write_files(node, "later", 3, 4_000));
    assert_eq!(node.status()["errors"].as_array().map(Vec::len), Some(0), "made good");
    node.umount();
    check(cluster.backing(), &written);
}

fn is_told_in_status(node: &Node) {
    let errors = node.status()["errors"].clone();
    let cache = node.cache().display().to_string();
    let is_named = |e: &serde_json::Value| {
        e["path"] == cache && e["text"].as_str().is_some_and(|t| t.contains("--cache"))
    };
    assert!(errors.as_array().expect("a list").iter().any(is_named), "{errors:#}");
}

fn cache_full_of_others(model: &str, flush: &str, appends: bool) {
    let Some(disk) = disk(|| Disk::new(64)) else { return };
    let cluster = with_cache_on(&disk, model, flush);
    let node = cluster.node(0);
    let written = write_files(node, "mine", 8, 700_000);
    disk.fill();
    let (acknowledged, errno) = write_until_refused(&node.path("much"), appends, 400);
    println!("{model}, {flush}: {} bytes went through, then {errno:?}", acknowledged.len());
    check(node.mountpoint(), &written);
    same("acknowledged", &fs::read(node.path("much")).expect("read"), &acknowledged);
    if let Some(errno) = errno {
        assert_eq!(errno, libc::ENOSPC);
    }
    disk.unfill();
    let later = write_files(node, "later", 3, 400_000);
    assert_eq!(node.status()["errors"].as_array().map(Vec::len), Some(0), "made good");
    node.umount();
    [written, later].iter().for_each(|files| check(cluster.backing(), files));
    same("backing", &fs::read(cluster.backing().join("much")).expect("read"), &acknowledged);
}

#[test]
fn a_cache_full_of_others_files_goes_on_with_what_it_can_flush() {
    cache_full_of_others("session", "end", false);
    cache_full_of_others("posix", "immediate", true);
}

/// Nothing of the job is in the cache that could make room.
#[test]
fn a_cache_with_no_room_at_all_is_told_and_made_good_later() {
    let Some(disk) = disk(|| Disk::new(64)) else { return };
    for (model, appends) in [("session", false), ("posix", true)] {
        let cluster = with_cache_on(&disk, model, "end");
        let node = cluster.node(0);
        fs::write(cluster.backing().join("old"), bytes(5, 5, 0, 90_000)).expect("write");
        disk.fill();
        let (acknowledged, errno) = write_until_refused(&node.path("much"), appends, 400);
        // It lives on what it can flush. Others take that, too, until nothing is left.
        let mut more = Vec::new();
        let refusal = errno.or_else(|| {
            node.drain();
            (0..50).find_map(|i| {
                more.push(disk.path().join(format!("more-{i}")));
                let mut file = File::create(more.last()?).ok()?;
                while file.write_all(&[1; 4096]).is_ok() {}
                let (_, errno) = write_until_refused(&node.path(format!("more-{i}")), appends, 1);
                errno
            })
        });
        println!("{model}: {} bytes went through, then {refusal:?}", acknowledged.len());
        assert_eq!(refusal, Some(libc::ENOSPC));
        is_told_in_status(node);
        same("acknowledged", &fs::read(node.path("much")).expect("read"), &acknowledged);
        same("old", &fs::read(node.path("old")).expect("read"), &bytes(5, 5, 0, 90_000));
        disk.unfill();
        give_back(&more);
        let later = write_files(node, "later", 3, 400_000);
        assert_eq!(node.status()["errors"].as_array().map(Vec::len), Some(0), "made good");
        node.umount();
        check(cluster.backing(), &later);
        same("backing", &fs::read(cluster.backing().join("much")).expect("read"), &acknowledged);
        drop(cluster);
        let _ = fs::remove_dir_all(disk.path().join("node0"));
    }
}

/// The service's journal is on the same disk: what it cannot write down is refused with the reason.
#[test]
fn names_and_modes_without_room_for_the_services_journal_are_refused_with_enospc() {
    let Some(disk) = disk(|| Disk::new(64)) else { return };
    let cluster = with_cache_on(&disk, "posix", "end");
    let node = cluster.node(0);
    let dir = node.path("dir");
    fs::create_dir(&dir).expect("mkdir");
    disk.fill();
    let change = |i: u32| -> io::Result<()> {
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700 + i % 8))?;
        let name = dir.join(format!("{}-{i}", "long".repeat(60)));
        std::os::unix::fs::symlink("x".repeat(4000), &name)?;
        fs::remove_file(&name)
    };
    let refusal = (0..200_000).find_map(|i| change(i).err()).expect("no room for so much");
    assert_eq!(refusal.raw_os_error(), Some(libc::ENOSPC), "{refusal}");
    disk.unfill();
    let made = || fs::create_dir(node.path("later")).is_ok();
    wait_until(Duration::from_secs(20), "it goes on when there is room", made);
    node.umount();
    assert!(cluster.backing().join("later").is_dir());
}

/// The right to flush a file was granted, and the answer could not be given for want of room for the service's
/// journal: the node knows of no right and ends none. When there is room again the file can be flushed all
/// the same. It could not once, as long as its node was mounted.
#[test]
fn a_flush_that_was_refused_without_room_for_the_services_journal_is_made_good_later() {
    let Some(disk) = disk(|| Disk::new(64)) else { return };
    let cluster = with_cache_on(&disk, "session", "end");
    let node = cluster.node(0);
    let path = node.path("f");
    // It has a place on the backing, and bytes that are published and not there.
    let write = |round| {
        let file = File::options().write(true).create(true).truncate(false).open(&path)?;
        file.write_all_at(&bytes(1, round, 0, 100_000), 0)?;
        close(file)
    };
    write(0).expect("there is room");
    node.drain();
    write(1).expect("there is room");
    let dir = node.path("dir");
    fs::create_dir(&dir).expect("mkdir");
    disk.fill();
    let change = |i: u32| std::os::unix::fs::symlink("x".repeat(4000), dir.join(i.to_string()));
    let refusal = (0..200_000).find_map(|i| change(i).err()).expect("no room for so much");
    assert_eq!(refusal.raw_os_error(), Some(libc::ENOSPC), "{refusal}");
    let waited = std::thread::scope(|scope| {
        let drain = scope.spawn(|| node.ebb("drain", &[], &[]));
        std::thread::sleep(Duration::from_secs(2));
        disk.unfill();
        let start = Instant::now();
        let _ = drain.join().expect("no panic");
        node.drain();
        start.elapsed()
    });
    let log = node.log();
    assert!(log.contains("flush_begin: the metadata service has no room"), "refused: {log}");
    assert!(waited < Duration::from_secs(20), "{waited:?}");
    let on_backing = fs::read(cluster.backing().join("f")).expect("read");
    same("on the backing", &on_backing, &bytes(1, 1, 0, 100_000));
    node.umount();
}

/// A file that is open and has no name any more is never flushed: its bytes cannot make room, and
/// a writer is told so soon. When others make room meanwhile, it goes on at once.
#[test]
fn bytes_of_a_nameless_file_are_not_waited_for() {
    let Some(disk) = disk(|| Disk::new(64)) else { return };
    let cluster = with_cache_on(&disk, "session", "immediate");
    let node = cluster.node(0);
    let nameless = File::create_new(node.path("nameless")).expect("create");
    fs::remove_file(node.path("nameless")).expect("unlink");
    let content = bytes(4, 4, 0, 300_000);
    nameless.write_all_at(&content, 0).expect("the buffer takes it");
    disk.fill();
    for _ in 0..2 {
        let path = node.path("refused");
        let refused = within(Duration::from_secs(20), "write", move || store(&path, &[1; 200_000]));
        let refused = refused.expect_err("there is no room").raw_os_error();
        assert_eq!(refused, Some(libc::ENOSPC));
    }
    is_told_in_status(node);
    let path = node.path("written");
    let waiting = std::thread::spawn(move || store(&path, &[2; 200_000]));
    std::thread::sleep(Duration::from_secs(1));
    disk.unfill();
    let done = within(Duration::from_secs(20), "write", move || waiting.join()).expect("no panic");
    done.expect("there is room again");
    drop(nameless);
    node.umount();
    same("written", &fs::read(cluster.backing().join("written")).expect("read"), &[2; 200_000]);
}

/// The job's user may not write in a directory of the backing, or not any more.
#[test]
fn without_permission_on_the_backing_nothing_is_dropped() {
    const USER: u32 = 12_345;
    if skip_reason().is_some() || !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root may give files away");
        return;
    }
    if !available(&["setpriv"]) {
        return;
    }
    let cluster = Cluster::builder().nodes(1).flush("end").squashed().start();
    let (node, backing) = (cluster.node(0), cluster.backing());
    let open_dir = backing.join("mine");
    fs::create_dir(&open_dir).expect("mkdir");
    fs::create_dir(backing.join("others")).expect("mkdir");
    fs::write(backing.join("others/old"), "old").expect("write");
    for path in ["others", "others/old"] {
        std::os::unix::fs::chown(backing.join(path), Some(USER), Some(USER)).expect("chown");
    }
    let refused = |script: &str| {
        let output = node.command("sh").args(["-ec", script]).output().expect("sh");
        assert!(!output.status.success(), "{script}: {}", describe(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains("ermission"), "{script}");
    };
    refused("rm -f others/old");
    refused("mv others/old mine/old");
    refused("truncate -s 1 others/old");
    node.shell("seq 1 30000 > mine/numbers; mkdir mine/dir; cat others/old");
    // Taken away while bytes wait for it.
    let owner = |id| std::os::unix::fs::chown(&open_dir, Some(id), Some(id)).expect("chown");
    owner(USER);
    fs::set_permissions(&open_dir, fs::Permissions::from_mode(0o755)).expect("chmod");
    is_refused(node, &["mine/numbers: ", "ermission denied"]);
    let numbers: String = (1..=30_000).map(|i| format!("{i}\n")).collect();
    assert_eq!(node.shell("cat mine/numbers"), numbers);
    owner(0);
    node.umount();
    let arrived = fs::read_to_string(open_dir.join("numbers")).expect("read");
    assert!(arrived == numbers && open_dir.join("dir").is_dir());
}

/// As on a server that squashes root: what another user's program wrote through the mount must not be
/// open to others because the owner is lost, and nobody may take it for done.
#[test]
fn a_file_that_cannot_get_its_owner_is_closed_to_others_and_not_drained() {
    if skip_reason().is_some() {
        return;
    }
    const USER: u32 = 12_345;
    let cluster = Cluster::builder().nodes(1).flush("end").prepare();
    let (node, backing) = (cluster.node(0), cluster.backing());
    let mount = node.mount_command(&[]);
    let without_chown = ["--inh-caps", "-chown", "--bounding-set", "-chown"];
    let output = wrapped(&mount, "setpriv", &without_chown).output().expect("setpriv");
    assert!(output.status.success(), "{}", describe(&output));
    node.shell("echo mine > mine; echo theirs > theirs; chmod 664 mine theirs");
    node.shell(&format!("chown {USER}:{USER} theirs; mkdir dir; chown {USER} dir"));
    is_refused(node, &["theirs", "dir", "set owner and group"]);
    let of = |name: &str| {
        let meta = fs::metadata(backing.join(name)).expect("published");
        (meta.uid(), meta.mode() & 0o7777)
    };
    assert_eq!((of("mine"), of("theirs"), of("dir")), ((0, 0o664), (0, 0o600), (0, 0o700)));
    assert_eq!(fs::read(backing.join("theirs")).expect("read"), b"theirs\n");
    let shown = fs::metadata(node.path("theirs")).expect("stat");
    assert_eq!((shown.uid(), shown.mode() & 0o7777), (USER, 0o664), "in the job it is theirs");
    // An administrator puts it right.
    for name in ["theirs", "dir"] {
        let id = (name == "theirs").then_some(USER);
        std::os::unix::fs::chown(backing.join(name), Some(USER), id).expect("chown");
    }
    node.umount();
    assert_eq!((of("theirs"), of("dir")), ((USER, 0o664), (USER, 0o755)));
}

/// The log of a daemon is in its cache: what cannot be written there ends nothing.
#[test]
fn a_log_that_cannot_be_written_ends_no_daemon() {
    let Some(disk) = disk(|| Disk::new(64)) else { return };
    let cluster = Cluster::builder().caches_below(disk.path()).prepare();
    let node = cluster.node(0);
    // Every request is a line.
    node.mount_with(&["--log-level", "debug"]);
    fs::write(cluster.backing().join("f"), "content").expect("write");
    disk.fill();
    // What is left of the last pages.
    let mut more: Vec<_> = (0..3).map(|n| disk.path().join(format!("more-{n}"))).collect();
    for path in &more {
        if let Ok(mut file) = File::create(path) {
            while file.write_all(&[1; 100]).is_ok() {}
        }
    }
    more.retain(|path| path.exists());
    let pid = node.pid();
    for _ in 0..100 {
        let names = fs::read_dir(node.path("")).expect("the directory").count();
        assert_eq!(names, 1);
    }
    disk.unfill();
    give_back(&more);
    assert_eq!(fs::read(node.path("f")).expect("read"), b"content");
    assert_eq!(node.pid(), pid);
    node.umount();
}

/// More than the backing can take is refused, however large the buffer is; both ways to the bytes.
#[test]
fn an_allocation_beyond_what_the_backing_has_is_refused() {
    let Some(disk) = disk(|| Disk::new(64)) else { return };
    for io_path in ["daemon", "auto"] {
        let builder = Cluster::builder().nodes(1).flush("end").option("--io-path", io_path);
        let cluster = builder.backing(disk.path()).start();
        let file = File::create(cluster.node(0).path("f")).expect("create");
        let allocate = |from: u64, len: u64, keep_size: bool| {
            let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
            let flags = if keep_size { keep } else { rustix::fs::FallocateFlags::empty() };
            rustix::fs::fallocate(&file, flags, from, len)
        };
        let len = || file.metadata().expect("stat").len();
        let full = Err(rustix::io::Errno::NOSPC);
        for (from, much) in [(0, 1 << 50), (0, 100 << 20), (1 << 20, 100 << 20)] {
            for keep_size in [false, true] {
                assert_eq!(allocate(from, much, keep_size), full, "{io_path}: {much} from {from}");
            }
        }
        assert_eq!(len(), 0, "{io_path}");
        assert_eq!(allocate(0, 10 << 20, false), Ok(()), "{io_path}");
        assert_eq!(len(), 10 << 20, "{io_path}");
        // What is there already needs no more room.
        file.write_all_at(&[7; 1000], 500).expect("write");
        disk.fill();
        assert_eq!(allocate(0, 10 << 20, false), Ok(()), "{io_path}");
        assert_eq!(allocate(0, 20 << 20, false), full, "{io_path}");
        disk.unfill();
        drop(file);
        cluster.node(0).umount();
        assert_eq!(fs::metadata(disk.path().join("f")).expect("stat").len(), 10 << 20);
        fs::remove_file(disk.path().join("f")).expect("remove");
    }
}
