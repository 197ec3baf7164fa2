//! What is Ebb's own, or the file system's as a whole: `.ebb`, extended attributes, space, special
//! files, and changes of the backing behind our back.

use super::{c, checked, create, errno, one, open, two};
use ebb_testkit::Cluster;
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::only_asked;
use ebb_tests::tools::wait_until;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

pub fn attr(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let (path, name) = (c(path), CString::new(name).expect("name"));
    let mut value = vec![0u8; 65_536];
    let at = value.as_mut_ptr().cast();
    // SAFETY: all pointers live through the call.
    let n = checked(unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), at, 65_536) } as i64)?;
    value.truncate(n as usize);
    Ok(value)
}

pub fn set_attr(path: &Path, name: &str, value: &[u8], flags: i32) -> io::Result<i64> {
    let (path, name) = (c(path), CString::new(name).expect("name"));
    let (at, len) = (value.as_ptr().cast(), value.len());
    // SAFETY: all pointers live through the call.
    checked(unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), at, len, flags) })
}

pub fn attr_names(path: &Path) -> Vec<String> {
    let path = c(path);
    let mut list = vec![0u8; 65_536];
    // SAFETY: all pointers live through the call.
    let n = unsafe { libc::llistxattr(path.as_ptr(), list.as_mut_ptr().cast(), list.len()) };
    list.truncate(checked(n as i64).expect("listxattr") as usize);
    let mut names: Vec<String> = list
        .split(|b| *b == 0)
        .filter(|n| !n.is_empty())
        .map(|n| String::from_utf8_lossy(n).into_owned())
        .collect();
    names.sort();
    names
}

pub fn remove_attr(path: &Path, name: &str) -> io::Result<i64> {
    let (path, name) = (c(path), CString::new(name).expect("name"));
    // SAFETY: both strings live through the call.
    checked(unsafe { libc::lremovexattr(path.as_ptr(), name.as_ptr()) })
}

#[test]
fn extended_attributes_are_the_same_everywhere() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    create(&a);
    set_attr(&a, "user.one", b"1", 0).expect("set");
    set_attr(&a, "user.large", &[7; 3_000], libc::XATTR_CREATE).expect("set");
    set_attr(&a, "user.empty", b"", 0).expect("set");
    assert_eq!(attr_names(&b), ["user.empty", "user.large", "user.one"]);
    assert_eq!(attr(&b, "user.large").expect("get"), vec![7; 3_000]);
    assert_eq!(attr(&b, "user.empty").expect("get"), b"");
    assert_eq!(errno(set_attr(&b, "user.one", b"2", libc::XATTR_CREATE)), libc::EEXIST);
    assert_eq!(errno(set_attr(&b, "user.two", b"2", libc::XATTR_REPLACE)), libc::ENODATA);
    assert_eq!(errno(attr(&b, "user.none")), libc::ENODATA);
    set_attr(&b, "user.one", b"changed", libc::XATTR_REPLACE).expect("set");
    remove_attr(&b, "user.empty").expect("remove");
    assert_eq!(attr_names(&a), ["user.large", "user.one"]);
    cluster.node(0).drain();
    let drained = cluster.backing().join("f");
    assert_eq!(attr_names(&drained), ["user.large", "user.one"]);
    assert_eq!(attr(&drained, "user.one").expect("get"), b"changed");
    let acl = set_attr(&a, "system.posix_acl_access", &[2, 0, 0, 0], 0);
    assert_eq!(errno(acl), libc::EOPNOTSUPP, "no ACLs");
}

#[test]
fn attributes_of_backing_files_are_seen() {
    let cluster = one();
    let old = cluster.backing().join("old");
    create(&old);
    set_attr(&old, "user.from", b"before", 0).expect("set");
    assert_eq!(attr(&cluster.node(0).path("old"), "user.from").expect("get"), b"before");
    set_attr(&cluster.node(0).path("old"), "user.from", b"after", 0).expect("set");
    assert_eq!(attr(&old, "user.from").expect("get"), b"after", "written through");
}

#[test]
fn the_ebb_directory_tells_and_is_not_listed() {
    let cluster = one();
    let at = |p: &str| cluster.node(0).path(p);
    fs::write(at("f"), "12345").expect("write");
    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(at(name)).expect("read")).expect("JSON")
    };
    let status = json(".ebb/status.json");
    assert_eq!(status["consistency"], "posix");
    assert_eq!(status["node"], "node0");
    let metrics = fs::read_to_string(at(".ebb/metrics")).expect("read");
    assert!(metrics.contains("# TYPE"), "{metrics}");
    assert!(json(".ebb/config").is_object());
    let listed = fs::read_dir(at("")).expect("list").map(|e| e.expect("entry").file_name());
    assert_eq!(listed.collect::<Vec<_>>(), ["f"]);
    for refused in [
        File::create(at(".ebb/new")).map(drop),
        fs::write(at(".ebb/config"), "x"),
        fs::remove_file(at(".ebb/config")),
        fs::create_dir(at(".ebb/dir")),
        fs::rename(at(".ebb/config"), at("g")),
        fs::rename(at("f"), at(".ebb/config")),
        fs::hard_link(at(".ebb/config"), at("h")),
        fs::remove_dir(at(".ebb")),
        fs::create_dir(at(".ebb")),
    ] {
        let e = errno(refused);
        let fit = [libc::EACCES, libc::EPERM, libc::EEXIST, libc::EROFS, libc::EXDEV];
        assert!(fit.contains(&e), "{}", io::Error::from_raw_os_error(e));
    }
    assert_eq!(fs::read(at("f")).expect("read"), b"12345");
    assert!(json(".ebb/status.json").is_object());
}

#[test]
fn user_ebb_commit_publishes_and_state_tells() {
    let cluster = only_asked(2).start();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    let file = create(&a);
    file.write_all_at(&[7; 100], 0).expect("write");
    let state =
        |p: &Path| String::from_utf8(attr(p, "user.ebb.state").expect("get")).expect("text");
    assert!(state(&a).contains("unpublished=100"), "{}", state(&a));
    assert_eq!(fs::read(&b).expect("read"), b"", "not published yet");
    set_attr(&a, "user.ebb.commit", b"1", 0).expect("commit");
    assert!(state(&a).contains("unpublished=0 unflushed=100"), "{}", state(&a));
    assert_eq!(fs::read(&b).expect("read"), [7; 100]);
    assert_eq!(attr(&a, "user.ebb.consistency").expect("get"), b"asked");
    assert_eq!(errno(set_attr(&a, "user.ebb.other", b"1", 0)), libc::EPERM);
    assert_eq!(attr_names(&a), Vec::<String>::new());
}

#[test]
fn user_ebb_consistency_on_an_empty_directory_rules_below_it() {
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").start();
    let at = |n: usize, p: &str| cluster.node(n).path(p);
    fs::create_dir(at(0, "strict")).expect("mkdir");
    set_attr(&at(0, "strict"), "user.ebb.consistency", b"posix", 0).expect("set");
    assert_eq!(attr(&at(1, "strict"), "user.ebb.consistency").expect("get"), b"posix");
    let file = create(&at(0, "strict/f"));
    let reader = open(&at(1, "strict/f"));
    file.write_all_at(b"at once", 0).expect("write");
    let mut got = [0; 7];
    reader.read_exact_at(&mut got, 0).expect("read");
    assert_eq!(&got, b"at once");
    let set =
        |path: std::path::PathBuf, model: &[u8]| set_attr(&path, "user.ebb.consistency", model, 0);
    assert_eq!(errno(set(at(0, "strict"), b"commit")), libc::ENOTEMPTY);
    fs::create_dir(at(0, "d")).expect("mkdir");
    assert_eq!(errno(set(at(0, "d"), b"no-such-model")), libc::EINVAL);
    assert_eq!(errno(set(at(0, "strict/f"), b"commit")), libc::ENOTDIR);
}

#[test]
fn changes_of_the_backing_are_seen_at_the_next_open() {
    let cluster = two();
    let behind = cluster.backing().join("f");
    fs::write(&behind, bytes(1, 1, 0, 200_000)).expect("write");
    let shown = |n: usize| fs::read(cluster.node(n).path("f")).expect("read");
    for n in 0..2 {
        same("at first", &shown(n), &bytes(1, 1, 0, 200_000));
    }
    let versions: [(&str, u64, u64); 3] =
        [("longer", 2, 300_000), ("shorter", 3, 1_000), ("same length", 4, 1_000)];
    for (what, round, len) in versions {
        std::thread::sleep(Duration::from_millis(20));
        fs::write(&behind, bytes(1, round, 0, len)).expect("write");
        for n in 0..2 {
            same(&format!("{what}, node {n}"), &shown(n), &bytes(1, round, 0, len));
            let size = fs::metadata(cluster.node(n).path("f")).expect("stat").len();
            assert_eq!(size, len, "{what}: size on node {n}");
        }
    }
    fs::write(cluster.backing().join("g"), "replaced").expect("write");
    fs::rename(cluster.backing().join("g"), &behind).expect("rename");
    for n in 0..2 {
        assert_eq!(shown(n), b"replaced", "another inode under the name, node {n}");
    }
}

/// What was replaced lives on for those who have it open, and for nobody else.
#[test]
fn what_was_replaced_on_the_backing_is_not_opened_by_its_name_again() {
    let cluster = two();
    let behind = cluster.backing().join("f");
    fs::write(&behind, "first").expect("write");
    for round in 0..20 {
        let path = cluster.node(0).path("f");
        let before = fs::read(&path).expect("read");
        let mut held = File::open(cluster.node(1).path("f")).expect("open");
        let replaced = format!("replaced {round}");
        fs::write(cluster.backing().join("g"), &replaced).expect("write");
        fs::rename(cluster.backing().join("g"), &behind).expect("rename");
        let got = fs::read_to_string(&path).expect("read");
        assert_eq!(got, replaced, "round {round}");
        let mut old = Vec::new();
        held.read_to_end(&mut old).expect("read");
        assert_eq!(old, before, "by a descriptor of before, round {round}");
    }
}

#[test]
fn new_names_on_the_backing_are_found_within_seconds() {
    let cluster = two();
    let late = cluster.node(1).path("late");
    assert!(!late.exists());
    fs::write(cluster.backing().join("late"), "x").expect("write");
    // A directory is compared with the backing once a second at most.
    wait_until(Duration::from_secs(5), "a new name on the backing", || late.exists());
    assert_eq!(fs::read(&late).expect("read"), b"x");
    fs::create_dir(cluster.backing().join("dir")).expect("mkdir");
    fs::write(cluster.backing().join("dir/f"), "y").expect("write");
    assert_eq!(fs::read(cluster.node(0).path("dir/f")).expect("read"), b"y");
}

#[test]
fn statfs_shows_the_backings_space() {
    let cluster = one();
    let space = |path: &Path| {
        let path = c(path);
        // SAFETY: plain data, and pointers that live through the call.
        unsafe {
            let mut found: libc::statvfs = std::mem::zeroed();
            checked(libc::statvfs(path.as_ptr(), &raw mut found)).expect("statvfs");
            found
        }
    };
    let (mount, backing) = (space(&cluster.node(0).path("")), space(cluster.backing()));
    let bytes = |s: &libc::statvfs| s.f_blocks * s.f_frsize;
    assert_eq!(bytes(&mount), bytes(&backing));
    assert_eq!(mount.f_namemax, 255);
    assert!(mount.f_bavail > 0 && mount.f_bavail <= mount.f_blocks);
}

#[test]
fn fifos_and_sockets_work_on_their_node() {
    let cluster = two();
    let fifo = cluster.node(0).path("fifo");
    // SAFETY: the string lives through the call.
    checked(unsafe { libc::mkfifo(c(&fifo).as_ptr(), 0o600) }).expect("mkfifo");
    assert!(fs::metadata(cluster.node(1).path("fifo")).expect("stat").file_type().is_fifo());
    let reading = fifo.clone();
    let reader = std::thread::spawn(move || fs::read(reading).expect("read"));
    let mut options = fs::OpenOptions::new();
    fs::write(&fifo, "through").expect("write");
    assert_eq!(reader.join().expect("no panic"), b"through");
    let nobody = options.write(true).custom_flags(libc::O_NONBLOCK).open(&fifo);
    assert_eq!(errno(nobody), libc::ENXIO);
    let socket = cluster.node(0).path("s");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("bind");
    let client = std::os::unix::net::UnixStream::connect(&socket).expect("connect");
    listener.accept().expect("accept");
    drop(client);
    let kind = fs::metadata(cluster.node(1).path("s")).expect("stat");
    assert!(kind.file_type().is_socket() && kind.size() == 0);
}

#[test]
fn part_files_are_hidden_and_their_names_refused() {
    let cluster = one();
    fs::write(cluster.backing().join(".ebb-part-77"), "x").expect("write");
    let at = |p: &str| cluster.node(0).path(p);
    assert_eq!(fs::read_dir(at("")).expect("list").count(), 0);
    assert!(!at(".ebb-part-77").exists());
    assert!(File::create(at(".ebb-part-78")).is_err());
    assert!(fs::create_dir(at(".ebb-part-79")).is_err());
    fs::write(at("f"), "x").expect("write");
    assert!(fs::rename(at("f"), at(".ebb-part-80")).is_err());
    assert!(at("f").exists());
}

/// isatty(3) asks with an ioctl at every open in many languages: an ordinary answer, and no line of the
/// log.
#[test]
fn a_file_is_no_terminal_and_that_is_not_worth_a_line() {
    let cluster = super::one();
    let file = super::create(&cluster.node(0).path("f"));
    let before = cluster.node(0).log();
    for _ in 0..3 {
        // SAFETY: an open descriptor.
        let is_terminal = unsafe { libc::isatty(std::os::fd::AsRawFd::as_raw_fd(&file)) };
        assert_eq!(is_terminal, 0);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOTTY));
    }
    assert_eq!(cluster.node(0).log(), before);
}
