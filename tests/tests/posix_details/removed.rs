//! What was removed while somebody has a descriptor of it, or works in it.

use super::{c, checked, create, errno, two};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

/// A descriptor that only says which object is meant.
fn path_only(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW);
    options.open(path).expect("open O_PATH")
}

/// The entries of a directory by its descriptor, with the dots.
fn listed(dir: &File) -> io::Result<usize> {
    let mut buffer = [0u8; 4096];
    // SAFETY: the buffer lives through the call.
    let got = unsafe {
        libc::syscall(libc::SYS_getdents64, dir.as_raw_fd(), buffer.as_mut_ptr(), buffer.len())
    };
    match checked(got) {
        Ok(n) => Ok(n as usize),
        // The C library takes this for the end.
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(0),
        Err(e) => Err(e),
    }
}

/// What a directory that is no more answers, as on a local file system.
fn is_removed(dir: &File, what: &str) {
    let at = dir.as_raw_fd();
    let before = dir.metadata().unwrap_or_else(|e| panic!("{what}: fstat: {e}"));
    assert!(before.is_dir() && before.nlink() == 0, "{what}: {} links", before.nlink());
    assert_eq!(listed(dir).unwrap_or_else(|e| panic!("{what}: list: {e}")), 0, "{what}");
    let mode = fs::Permissions::from_mode(0o711);
    dir.set_permissions(mode).unwrap_or_else(|e| panic!("{what}: fchmod: {e}"));
    let times = [libc::timespec { tv_sec: 5, tv_nsec: 6 }; 2];
    // SAFETY: the times live through the call.
    let set = unsafe { libc::futimens(at, times.as_ptr()) };
    checked(set).unwrap_or_else(|e| panic!("{what}: futimens: {e}"));
    let after = dir.metadata().expect("fstat");
    let seen = (after.ino(), after.mode() & 0o777, after.mtime(), after.mtime_nsec());
    assert_eq!(seen, (before.ino(), 0o711, 5, 6), "{what}");
    let name = c(Path::new("new"));
    // SAFETY: the name lives through the calls.
    let made = unsafe {
        [
            checked(libc::openat(at, name.as_ptr(), libc::O_CREAT | libc::O_RDWR, 0o600)),
            checked(libc::mkdirat(at, name.as_ptr(), 0o700)),
            checked(libc::symlinkat(name.as_ptr(), at, name.as_ptr())),
            checked(libc::mknodat(at, name.as_ptr(), libc::S_IFIFO | 0o600, 0)),
            checked(libc::openat(at, name.as_ptr(), libc::O_RDONLY)),
            checked(libc::unlinkat(at, name.as_ptr(), 0)),
        ]
    };
    for (i, made) in made.into_iter().enumerate() {
        assert_eq!(errno(made), libc::ENOENT, "{what}: call {i}");
    }
}

#[test]
fn a_removed_directory_is_there_for_who_has_it_open() {
    let cluster = two();
    for remover in 0..2 {
        let node = cluster.node(0);
        fs::create_dir(node.path("d")).expect("mkdir");
        let (open, path) = (File::open(node.path("d")).expect("open"), path_only(&node.path("d")));
        fs::remove_dir(cluster.node(remover).path("d")).expect("rmdir");
        is_removed(&open, &format!("removed by node {remover}"));
        assert_eq!(path.metadata().expect("fstat of O_PATH").nlink(), 0);
    }
}

#[test]
fn a_directory_that_another_one_replaced_is_there_for_who_has_it_open() {
    let cluster = two();
    for remover in 0..2 {
        let node = cluster.node(0);
        fs::create_dir(node.path("d")).expect("mkdir");
        let open = File::open(node.path("d")).expect("open");
        let other = cluster.node(remover);
        fs::create_dir(other.path("next")).expect("mkdir");
        fs::rename(other.path("next"), other.path("d")).expect("rename");
        is_removed(&open, &format!("replaced by node {remover}"));
        fs::remove_dir(node.path("d")).expect("rmdir");
    }
}

#[test]
fn a_directory_of_the_backing_that_was_removed_is_there_for_who_has_it_open() {
    let cluster = two();
    let node = cluster.node(0);
    for (name, remover) in [("one", 0), ("two", 1)] {
        fs::create_dir(cluster.backing().join(name)).expect("mkdir");
        let open = File::open(node.path(name)).expect("open");
        fs::remove_dir(cluster.node(remover).path(name)).expect("rmdir");
        is_removed(&open, name);
    }
}

#[test]
fn a_removed_working_directory_can_be_asked() {
    let cluster = two();
    let script = "mkdir d; cd d; rmdir ../d; stat -c %h .; ls -a; ! touch x 2>/dev/null";
    let said = cluster.node(0).shell(script);
    assert_eq!(said.trim(), "0");
}

#[test]
fn what_was_unlinked_can_be_asked_through_its_descriptor() {
    let cluster = two();
    let node = cluster.node(0);
    create(&node.path("f")).set_len(77).expect("extend");
    symlink("target", node.path("l")).expect("symlink");
    for (name, len) in [("f", 77), ("l", 6)] {
        let there = path_only(&node.path(name));
        let before = there.metadata().expect("fstat");
        fs::remove_file(node.path(name)).expect("unlink");
        let after = there.metadata().unwrap_or_else(|e| panic!("{name}: fstat: {e}"));
        assert_eq!((after.len(), after.nlink(), after.ino()), (len, 0, before.ino()), "{name}");
        assert_eq!(after.mode(), before.mode());
    }
    // Replaced by a rename.
    create(&node.path("f"));
    create(&node.path("g"));
    let there = path_only(&node.path("f"));
    fs::rename(node.path("g"), node.path("f")).expect("rename");
    assert_eq!(there.metadata().expect("fstat").nlink(), 0);
}
