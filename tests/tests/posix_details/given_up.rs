//! A node that was silent for three leases has lost its locks and opens: who had locked there hears of it,
//! and who had not goes on.
//!
//! Everything is opened by processes of its own: each start of a program would else close copies of
//! descriptors, and wait for a daemon that is stopped.

use super::{c, create};
use crate::locks::region;
use ebb_testkit::Cluster;
use ebb_tests::tools::wait_until;
use rustix::process::Signal;
use std::ffi::CString;
use std::io::{self, Read, Write};
use std::os::fd::FromRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);

const LOST: &str = "ebb_locks_lost_total";

fn pair(model: &str) -> Cluster {
    pair_by(model, "daemon")
}

/// Of a file that is passed through the kernel asks nobody (docs/operations.md).
fn pair_by(model: &str, io_path: &str) -> Cluster {
    let cluster = Cluster::builder().nodes(2).consistency(model).lease("1500ms");
    cluster.option("--io-path", io_path).start()
}

/// What a [`User`] can do. Each is answered with 0 or an errno.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Do {
    Open = 0,
    Lock,
    Flock,
    Write,
    Read,
    Sync,
    Close,
    /// The same file once more, beside the first one.
    OpenOther,
    WriteOther,
}

/// A process that has one file open.
struct User {
    pid: libc::pid_t,
    say: std::fs::File,
    hear: std::fs::File,
}

impl User {
    fn of(path: &Path) -> User {
        let path = c(path);
        let (mut there, mut back) = ([0; 2], [0; 2]);
        // SAFETY: arrays that live through the calls; the child only makes system calls.
        unsafe {
            assert_eq!(libc::pipe2(there.as_mut_ptr(), libc::O_CLOEXEC), 0);
            assert_eq!(libc::pipe2(back.as_mut_ptr(), libc::O_CLOEXEC), 0);
            let pid = libc::fork();
            if pid == 0 {
                for fd in 3..4096 {
                    if fd != there[0] && fd != back[1] {
                        libc::close(fd);
                    }
                }
                serve(&path, there[0], back[1]);
            }
            assert!(pid > 0, "fork: {}", io::Error::last_os_error());
            libc::close(there[0]);
            libc::close(back[1]);
            let (say, hear) =
                (std::fs::File::from_raw_fd(there[1]), std::fs::File::from_raw_fd(back[0]));
            let mut user = User { pid, say, hear };
            user.ok(Do::Open);
            user
        }
    }

    /// 0 or an errno.
    fn does(&mut self, what: Do) -> i32 {
        self.say.write_all(&[what as u8]).expect("a process that lives");
        let mut answer = [0; 4];
        self.hear.read_exact(&mut answer).expect("an answer");
        i32::from_ne_bytes(answer)
    }

    fn ok(&mut self, what: Do) {
        assert_eq!(self.does(what), 0, "errno of step {}", what as u8);
    }

    fn fails(&mut self, what: Do) {
        assert_eq!(self.does(what), libc::EIO, "step {}", what as u8);
    }

    fn gets(&mut self, what: Do) {
        wait_until(SOON, "a lock", || self.does(what) == 0);
    }

    /// What had locked fails until it is closed, and what is opened then does not.
    fn fails_until_closed(&mut self) {
        self.fails(Do::Write);
        self.fails(Do::Read);
        self.fails(Do::Sync);
        self.fails(Do::Lock);
        self.fails(Do::Close);
        self.ok(Do::Open);
        self.ok(Do::Read);
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // SAFETY: our own child, not yet waited for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// The child: does what it is told until nobody tells it anything.
unsafe fn serve(path: &CString, orders: i32, answers: i32) -> ! {
    let lock = region(libc::F_WRLCK, 0, 0);
    let (mut fd, mut other) = (-1, -1);
    let mut byte = [b'x'; 1];
    loop {
        let mut order = 0_u8;
        // SAFETY: plain system calls on memory of this frame.
        unsafe {
            if libc::read(orders, (&raw mut order).cast(), 1) != 1 {
                libc::_exit(0);
            }
            let code = match order {
                0 => {
                    fd = libc::open(path.as_ptr(), libc::O_RDWR);
                    fd as isize
                }
                1 => libc::fcntl(fd, libc::F_SETLK, &raw const lock) as isize,
                2 => libc::flock(fd, libc::LOCK_EX | libc::LOCK_NB) as isize,
                3 => libc::pwrite(fd, byte.as_ptr().cast(), 1, 0),
                4 => libc::pread(fd, byte.as_mut_ptr().cast(), 1, 0),
                5 => libc::fsync(fd) as isize,
                6 => libc::close(fd) as isize,
                7 => {
                    other = libc::open(path.as_ptr(), libc::O_RDWR);
                    other as isize
                }
                _ => libc::pwrite(other, byte.as_ptr().cast(), 1, 0),
            };
            let errno = if code < 0 { *libc::__errno_location() } else { 0 };
            libc::write(answers, (&raw const errno).cast(), 4);
        }
    }
}

#[test]
fn who_had_locked_at_a_silent_node_fails_until_it_has_closed() {
    let cluster = pair("posix");
    for name in ["records", "whole", "free"] {
        drop(create(&cluster.node(0).path(name)));
    }
    let at = |node: usize, name: &str| User::of(&cluster.node(node).path(name));
    let (mut records, mut whole, mut free) = (at(0, "records"), at(0, "whole"), at(0, "free"));
    records.ok(Do::Lock);
    records.ok(Do::OpenOther);
    records.ok(Do::WriteOther);
    whole.ok(Do::Flock);
    let (mut b, mut c) = (at(1, "records"), at(1, "whole"));
    assert_eq!(b.does(Do::Lock), libc::EAGAIN);
    cluster.node(0).signal(Signal::STOP);
    b.gets(Do::Lock);
    c.gets(Do::Flock);
    b.ok(Do::Write);
    cluster.node(0).signal(Signal::CONT);
    // The process that had locked, whichever descriptor it takes.
    records.fails(Do::WriteOther);
    records.fails_until_closed();
    whole.fails_until_closed();
    free.ok(Do::Write);
    drop((b, c));
    records.gets(Do::Lock);
    records.ok(Do::Write);
    assert!(cluster.node(0).log().contains("locks may be others' now"));
    assert_eq!(cluster.node(0).counter(LOST), 2, "both files");
}

/// Its reads and writes do not come to the daemon and go on; whatever does come there fails.
#[test]
fn who_had_locked_past_the_daemon_of_a_silent_node_hears_of_it_at_sync_lock_and_close() {
    for model in ["session", "commit"] {
        let cluster = pair_by(model, "auto");
        let node = cluster.node(0);
        let past = || node.status()["opens"]["passthrough-write"].as_u64().unwrap_or(0);
        drop(create(&node.path("f")));
        node.wait_closed();
        let before = past();
        let mut a = User::of(&node.path("f"));
        assert!(past() > before, "{model}: it is not passed through: {}", node.status());
        a.ok(Do::Lock);
        a.ok(Do::Write);
        let mut b = User::of(&cluster.node(1).path("f"));
        assert_eq!(b.does(Do::Lock), libc::EAGAIN);
        node.signal(Signal::STOP);
        let end = Instant::now() + SOON;
        let mut got = b.does(Do::Lock);
        while got != 0 && Instant::now() < end {
            got = b.does(Do::Lock);
        }
        node.signal(Signal::CONT);
        assert_eq!(got, 0, "{model}: the lock of a node that is silent");
        wait_until(SOON, "the node hears of it", || {
            node.log().contains("locks may be others' now")
        });
        assert_eq!(node.counter(LOST), 1, "{model}");
        a.ok(Do::Write);
        a.ok(Do::Read);
        a.fails(Do::Sync);
        a.fails(Do::Lock);
        a.fails(Do::Close);
        drop(b);
        a.ok(Do::Open);
        a.gets(Do::Lock);
        a.ok(Do::Write);
        a.ok(Do::Sync);
        a.ok(Do::Close);
    }
}

/// The service that gave the locks to somebody else is not the one that the node comes back to.
#[test]
fn a_restarted_service_remembers_whom_it_gave_up() {
    let mut cluster = pair("posix");
    drop(create(&cluster.node(0).path("f")));
    let mut a = User::of(&cluster.node(0).path("f"));
    a.ok(Do::Lock);
    let mut b = User::of(&cluster.node(1).path("f"));
    cluster.node(0).signal(Signal::STOP);
    b.gets(Do::Lock);
    cluster.kill_meta();
    cluster.restart_meta();
    b.ok(Do::Write);
    cluster.node(0).signal(Signal::CONT);
    a.fails_until_closed();
    b.ok(Do::Write);
}

/// Nobody tells it, and it must not go on: others may have its locks by now.
#[test]
fn a_node_that_hears_nothing_trusts_its_locks_no_longer_than_others_wait_for_it() {
    let mut cluster = pair("session");
    drop(create(&cluster.node(0).path("f")));
    let mut a = User::of(&cluster.node(0).path("f"));
    a.ok(Do::Lock);
    a.ok(Do::Write);
    cluster.kill_meta();
    wait_until(SOON, "the end of its locks", || a.does(Do::Write) == libc::EIO);
    cluster.restart_meta();
    let mut b = User::of(&cluster.node(1).path("f"));
    b.gets(Do::Lock);
    a.fails(Do::Write);
}

#[test]
fn what_is_open_at_a_node_that_came_back_is_known_to_be_open() {
    let cluster = pair("posix");
    std::fs::write(cluster.node(1).path("f"), vec![7; 100_000]).expect("write");
    let mut a = User::of(&cluster.node(0).path("f"));
    drop(create(&cluster.node(0).path("locked")));
    let mut locked = User::of(&cluster.node(0).path("locked"));
    locked.ok(Do::Lock);
    let mut b = User::of(&cluster.node(1).path("locked"));
    cluster.node(0).signal(Signal::STOP);
    b.gets(Do::Lock);
    cluster.node(0).signal(Signal::CONT);
    wait_until(SOON, "the node", || cluster.node(0).log().contains("knows its opens again"));
    std::fs::remove_file(cluster.node(1).path("f")).expect("unlink");
    a.ok(Do::Read);
}
