//! Whose locks they are and when they end: record locks belong to a process and end when it closes
//! any descriptor of the file; `flock` and `F_OFD_SETLK` belong to what was opened.

use super::locks::{flock, set};
use super::{create, errno, open, two, wait_for};
use ebb_testkit::{Cluster, record_lock};
use ebb_tests::tools::wait_until;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(10);

/// Long enough for what the kernel tells of a closed file later.
const LATER: Duration = Duration::from_millis(600);

/// A child process that keeps its copy of one descriptor, and nothing else, until it is told.
struct Keeper {
    pid: libc::pid_t,
    end: RawFd,
}

impl Keeper {
    fn of(file: &File) -> Keeper {
        let kept = file.as_raw_fd();
        let mut pipe = [0; 2];
        // SAFETY: an array that lives through the call; the child only makes system calls.
        let pid = unsafe {
            assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
            let pid = libc::fork();
            if pid == 0 {
                libc::close(pipe[1]);
                for fd in 3..4096 {
                    if fd != kept && fd != pipe[0] {
                        libc::close(fd);
                    }
                }
                let mut byte = 0_u8;
                libc::read(pipe[0], (&raw mut byte).cast(), 1);
                libc::_exit(0);
            }
            libc::close(pipe[0]);
            pid
        };
        assert!(pid > 0, "fork: {}", io::Error::last_os_error());
        Keeper { pid, end: pipe[1] }
    }

    /// It ends, and its descriptor with it.
    fn end(self) {
        // SAFETY: our own descriptor.
        unsafe { libc::close(self.end) };
        assert_eq!(wait_for(self.pid), 0);
    }
}

/// Nobody else gets it, now and for a while.
fn stays_locked(other: &File) {
    let start = Instant::now();
    while start.elapsed() < LATER {
        assert_eq!(errno(set(other, libc::F_WRLCK, 0, 0, false)), libc::EAGAIN);
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn shared(cluster: &Cluster) -> File {
    create(&cluster.node(0).path("f"));
    open(&cluster.node(1).path("f"))
}

#[test]
fn a_lock_that_is_taken_anew_survives_the_last_close_of_an_older_descriptor() {
    let cluster = two();
    let other = shared(&cluster);
    let old = open(&cluster.node(0).path("f"));
    set(&old, libc::F_WRLCK, 0, 0, false).expect("lock");
    let child = Keeper::of(&old);
    drop(old);
    let new = open(&cluster.node(0).path("f"));
    set(&new, libc::F_WRLCK, 0, 0, false).expect("lock again");
    child.end();
    stays_locked(&other);
    drop(new);
    set(&other, libc::F_WRLCK, 0, 0, false).expect("free after the close");
}

#[test]
fn a_child_that_closes_its_copy_takes_nothing_from_its_parent() {
    let cluster = two();
    let other = shared(&cluster);
    let file = open(&cluster.node(0).path("f"));
    set(&file, libc::F_WRLCK, 0, 0, false).expect("lock");
    Keeper::of(&file).end();
    stays_locked(&other);
}

#[test]
fn a_child_has_none_of_its_parents_record_locks() {
    let cluster = two();
    let other = shared(&cluster);
    let file = open(&cluster.node(0).path("f"));
    set(&file, libc::F_WRLCK, 0, 0, false).expect("lock");
    let child = Keeper::of(&file);
    drop(file);
    set(&other, libc::F_WRLCK, 0, 0, false).expect("the parent has closed, the child holds none");
    child.end();
}

fn set_ofd(file: &File, kind: i32) -> io::Result<i64> {
    record_lock(file, libc::F_OFD_SETLK, kind, (0, 0)).map(|()| 0)
}

#[test]
fn locks_of_a_description_end_with_its_last_descriptor_and_no_sooner() {
    let cluster = two();
    let other = shared(&cluster);
    for flocks in [false, true] {
        let file = open(&cluster.node(0).path("f"));
        let locked =
            if flocks { flock(&file, libc::LOCK_EX) } else { set_ofd(&file, libc::F_WRLCK) };
        locked.expect("lock");
        let is_free = || match flocks {
            true => flock(&other, libc::LOCK_EX | libc::LOCK_NB).is_ok(),
            false => set_ofd(&other, libc::F_WRLCK).is_ok(),
        };
        let child = Keeper::of(&file);
        // Another descriptor of the same file, and the first one of this description.
        drop(open(&cluster.node(0).path("f")));
        drop(file);
        std::thread::sleep(LATER);
        assert!(!is_free(), "the child has it open (flock: {flocks})");
        child.end();
        wait_until(SOON, "the end of the last descriptor", is_free);
    }
}

/// What a daemon left of owners and handles must not give back what they do not hold any more.
#[test]
fn a_daemon_that_goes_on_knows_whose_locks_had_ended() {
    let cluster = Cluster::builder().nodes(2).consistency("posix").supervised().start();
    let other = shared(&cluster);
    let old = open(&cluster.node(0).path("f"));
    set(&old, libc::F_WRLCK, 0, 0, false).expect("lock");
    let child = Keeper::of(&old);
    drop(old);
    let new = open(&cluster.node(0).path("f"));
    set(&new, libc::F_WRLCK, 0, 0, false).expect("lock again");
    assert!(cluster.node(0).kill_daemon_only(), "a daemon to kill");
    wait_until(SOON, "another daemon", || cluster.node(0).path("f").metadata().is_ok());
    child.end();
    stays_locked(&other);
    drop(new);
    set(&other, libc::F_WRLCK, 0, 0, false).expect("free after the close");
}
