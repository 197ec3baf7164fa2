//! What POSIX and Linux say about single calls, tried on real mounts: one test per behaviour,
//! under the `posix` model unless it says otherwise, on two nodes where that makes a difference.

mod acls;
mod attributes;
mod data;
mod given_up;
mod kernel_cache;
mod lock_owners;
mod locks;
mod mapped;
mod names;
mod removed;
mod shared;
mod special;
mod xattrs;

use ebb_testkit::Cluster;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn one() -> Cluster {
    Cluster::builder().nodes(1).consistency("posix").start()
}

fn two() -> Cluster {
    Cluster::builder().nodes(2).consistency("posix").start()
}

/// Other users may look into these mounts; every directory above them can be passed.
fn two_for_all_users() -> Cluster {
    use std::os::unix::fs::PermissionsExt;
    let cluster = Cluster::builder().nodes(2).consistency("posix").prepare();
    for node in cluster.nodes() {
        node.mount_with(&["--allow-other"]);
        let above = node.mountpoint().ancestors().skip(1);
        for dir in above.take_while(|d| d.starts_with(cluster.root())) {
            let open = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(dir, open).expect("chmod");
        }
    }
    cluster
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("open")
}

fn create(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("create")
}

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("no NUL in test paths")
}

/// The result of a system call that answers -1 for an error.
fn checked(code: impl Into<i64>) -> io::Result<i64> {
    match code.into() {
        -1 => Err(io::Error::last_os_error()),
        n => Ok(n),
    }
}

/// The errno of a call that must fail.
fn errno<T>(result: io::Result<T>) -> i32 {
    let error = result.err().expect("must fail");
    error.raw_os_error().unwrap_or_else(|| panic!("not from the system: {error}"))
}

/// Tests that become another user need to be root.
fn is_root() -> bool {
    // SAFETY: no arguments, no failure.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("SKIPPED: only root may become another user");
    }
    root
}

/// Does `work` in a child process as user and group `id`. `work` answers 0 or an errno; it must
/// only make system calls (the child is a fork of a program with many threads).
fn as_user(id: u32, work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child only makes system calls and ends by _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: plain system calls; the child ends here.
        unsafe {
            if libc::setgroups(0, std::ptr::null()) != 0
                || libc::setgid(id) != 0
                || libc::setuid(id) != 0
            {
                libc::_exit(255);
            }
            libc::_exit(work());
        }
    }
    wait_for(pid)
}

/// The exit status of a child; 128 and the signal when it was killed.
fn wait_for(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: `status` lives through the call.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid, "waitpid: {}", io::Error::last_os_error());
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) }
}

/// 0, or the errno of a system call that has just answered `code`.
fn verdict(code: i32) -> i32 {
    if code == -1 { io::Error::last_os_error().raw_os_error().unwrap_or(254) } else { 0 }
}
