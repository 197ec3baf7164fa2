//! Locks across nodes: `flock`, `fcntl`, waiting for them, and not waiting for ever.

use super::{c, checked, create, errno, open, two, wait_for};
use ebb_testkit::{Cluster, record_lock};
use ebb_tests::tools::{wait_until, within};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(10);

pub(super) fn flock(file: &File, how: i32) -> io::Result<i64> {
    // SAFETY: an open descriptor.
    checked(unsafe { libc::flock(file.as_raw_fd(), how) })
}

pub(super) fn region(kind: i32, start: i64, len: i64) -> libc::flock {
    // SAFETY: plain numbers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start;
    lock.l_len = len;
    lock
}

pub(super) fn set(file: &File, kind: i32, start: i64, len: i64, wait: bool) -> io::Result<i64> {
    let command = if wait { libc::F_SETLKW } else { libc::F_SETLK };
    record_lock(file, command, kind, (start as u64, len as u64)).map(|()| 0)
}

/// The lock that would be in the way.
fn get(file: &File, kind: i32, start: i64, len: i64) -> Option<(i32, i64, i64)> {
    let mut lock = region(kind, start, len);
    // SAFETY: as above.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) };
    checked(done).expect("F_GETLK");
    let kind = i32::from(lock.l_type);
    (kind != libc::F_UNLCK).then_some((kind, lock.l_start, lock.l_len))
}

/// One file, open on both nodes.
fn shared_file(cluster: &Cluster) -> (File, File) {
    create(&cluster.node(0).path("f"));
    (open(&cluster.node(0).path("f")), open(&cluster.node(1).path("f")))
}

#[test]
fn flock_excludes_the_other_node_until_it_is_given_back() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    flock(&a, libc::LOCK_EX).expect("lock");
    assert_eq!(errno(flock(&b, libc::LOCK_EX | libc::LOCK_NB)), libc::EWOULDBLOCK);
    assert_eq!(errno(flock(&b, libc::LOCK_SH | libc::LOCK_NB)), libc::EWOULDBLOCK);
    flock(&a, libc::LOCK_SH).expect("downgrade");
    flock(&b, libc::LOCK_SH | libc::LOCK_NB).expect("shared");
    assert_eq!(errno(flock(&b, libc::LOCK_EX | libc::LOCK_NB)), libc::EWOULDBLOCK);
    let twin = a.try_clone().expect("dup");
    drop(a);
    let still = flock(&open(&cluster.node(0).path("f")), libc::LOCK_EX | libc::LOCK_NB);
    assert_eq!(errno(still), libc::EWOULDBLOCK, "the duplicate and the other node hold it");
    drop(twin);
    wait_until(SOON, "closing gives a flock back", || {
        flock(&b, libc::LOCK_EX | libc::LOCK_NB).is_ok()
    });
}

#[test]
fn a_waiting_flock_is_taken_when_the_other_node_lets_go() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    flock(&a, libc::LOCK_EX).expect("lock");
    let free = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&free);
    let waiter = std::thread::spawn(move || {
        flock(&b, libc::LOCK_EX).expect("lock");
        assert!(seen.load(Ordering::SeqCst), "taken before it was free");
    });
    std::thread::sleep(Duration::from_millis(300));
    free.store(true, Ordering::SeqCst);
    flock(&a, libc::LOCK_UN).expect("unlock");
    within(SOON, "waiting flock", move || waiter.join()).expect("no panic");
}

#[test]
fn fcntl_locks_of_nodes_conflict_by_range() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    set(&a, libc::F_WRLCK, 100, 100, false).expect("lock");
    let refused = |r: io::Result<i64>| {
        let e = errno(r);
        assert!(e == libc::EAGAIN || e == libc::EACCES, "errno {e}");
    };
    refused(set(&b, libc::F_RDLCK, 150, 1, false));
    refused(set(&b, libc::F_WRLCK, 0, 0, false));
    set(&b, libc::F_WRLCK, 0, 100, false).expect("before it");
    set(&b, libc::F_WRLCK, 200, 0, false).expect("behind it");
    assert_eq!(get(&b, libc::F_WRLCK, 0, 0), Some((libc::F_WRLCK, 100, 100)));
    set(&a, libc::F_UNLCK, 120, 10, false).expect("a hole in it");
    assert_eq!(get(&b, libc::F_RDLCK, 0, 0), Some((libc::F_WRLCK, 100, 20)));
    set(&b, libc::F_WRLCK, 120, 10, false).expect("in the hole");
    refused(set(&a, libc::F_RDLCK, 125, 1, false));
    // Shared locks go together.
    set(&a, libc::F_RDLCK, 100, 20, false).expect("downgrade");
    set(&b, libc::F_RDLCK, 100, 20, false).expect("shared");
    refused(set(&b, libc::F_WRLCK, 100, 20, false));
    assert_eq!(get(&b, libc::F_RDLCK, 100, 20), None);
}

#[test]
fn closing_any_descriptor_gives_the_processs_record_locks_back() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    set(&a, libc::F_WRLCK, 0, 0, false).expect("lock");
    drop(open(&cluster.node(0).path("f")));
    set(&b, libc::F_WRLCK, 0, 0, false).expect("free by now");
}

/// Two nodes count in one file; every step is read, add, write under a lock.
#[test]
fn a_counter_under_fcntl_locks_loses_nothing() {
    const EACH: u64 = 150;
    for model in ["posix", "session"] {
        let cluster = Cluster::builder().nodes(2).consistency(model).start();
        std::fs::write(cluster.node(0).path("f"), [0; 8]).expect("write");
        std::thread::scope(|threads| {
            for node in cluster.nodes() {
                threads.spawn(|| count(&node.path("f"), EACH));
            }
        });
        let got = std::fs::read(cluster.node(0).path("f")).expect("read");
        let got = u64::from_le_bytes(got.try_into().expect("8 bytes"));
        assert_eq!(got, 2 * EACH, "under {model}");
    }
}

fn count(path: &std::path::Path, times: u64) {
    let file = open(path);
    for _ in 0..times {
        set(&file, libc::F_WRLCK, 0, 8, true).expect("lock");
        let mut number = [0; 8];
        file.read_exact_at(&mut number, 0).expect("read");
        let next = u64::from_le_bytes(number) + 1;
        file.write_all_at(&next.to_le_bytes(), 0).expect("write");
        set(&file, libc::F_UNLCK, 0, 8, false).expect("unlock");
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// A handler without SA_RESTART: a blocked call ends with EINTR.
fn catch(signal: i32) {
    // SAFETY: plain data, and a handler that does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// Blocks in `call` in a thread of its own, sends it a signal, and answers its error.
fn interrupted(call: impl FnOnce() -> io::Result<i64> + Send + 'static) -> i32 {
    catch(libc::SIGUSR1);
    let thread_id = Arc::new(AtomicU64::new(0));
    let told = Arc::clone(&thread_id);
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        // SAFETY: no arguments, no failure.
        told.store(unsafe { libc::pthread_self() } as u64, Ordering::SeqCst);
        let _ = tx.send(errno(call()));
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(rx.try_recv().is_err(), "it must wait");
    let start = Instant::now();
    loop {
        // SAFETY: the thread has not ended: it has not sent its answer.
        unsafe {
            libc::pthread_kill(thread_id.load(Ordering::SeqCst) as libc::pthread_t, libc::SIGUSR1)
        };
        match rx.recv_timeout(Duration::from_secs(1)) {
            Ok(errno) => return errno,
            Err(_) => assert!(start.elapsed() < SOON, "a signal does not end the wait"),
        }
    }
}

#[test]
fn a_waiting_fcntl_lock_is_interrupted_by_a_signal() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    set(&a, libc::F_WRLCK, 0, 0, false).expect("lock");
    assert_eq!(interrupted(move || set(&b, libc::F_WRLCK, 0, 0, true)), libc::EINTR);
    nobody_waits(&cluster, &a);
}

#[test]
fn a_waiting_flock_is_interrupted_by_a_signal() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    flock(&a, libc::LOCK_EX).expect("lock");
    assert_eq!(interrupted(move || flock(&b, libc::LOCK_EX)), libc::EINTR);
    flock(&a, libc::LOCK_UN).expect("unlock");
    let again = open(&cluster.node(1).path("f"));
    flock(&again, libc::LOCK_EX | libc::LOCK_NB).expect("nobody waits any more");
}

/// Another node has to publish before a lock is granted, and takes its time; who is interrupted meanwhile, asks
/// again and gets it, has it.
#[test]
fn a_lock_that_is_asked_for_again_after_a_signal_is_kept() {
    let cluster = Cluster::builder().nodes(3).consistency("commit").separate_meta().start();
    std::fs::write(cluster.node(0).path("f"), b"published").expect("write");
    let [a, b, c] = [0, 1, 2].map(|i| open(&cluster.node(i).path("f")));
    b.write_all_at(b"not published", 0).expect("write");
    cluster.node(1).signal(rustix::process::Signal::STOP);
    let first = a.try_clone().expect("clone");
    let interrupted = interrupted(move || set(&first, libc::F_WRLCK, 0, 8, true));
    let again = std::thread::spawn(move || (set(&a, libc::F_WRLCK, 0, 8, true), a));
    std::thread::sleep(Duration::from_millis(500));
    let waits = !again.is_finished();
    cluster.node(1).signal(rustix::process::Signal::CONT);
    assert_eq!(interrupted, libc::EINTR);
    assert!(waits, "nobody was waited for");
    let (locked, a) = again.join().expect("no panic");
    locked.expect("lock");
    for _ in 0..20 {
        let other = set(&c, libc::F_WRLCK, 0, 8, false);
        assert_eq!(errno(other), libc::EAGAIN, "two nodes have it");
        std::thread::sleep(Duration::from_millis(50));
    }
    set(&a, libc::F_UNLCK, 0, 8, false).expect("unlock");
    set(&c, libc::F_WRLCK, 0, 8, false).expect("it is free");
}

/// Who was interrupted must not get the lock later.
fn nobody_waits(cluster: &Cluster, holder: &File) {
    set(holder, libc::F_UNLCK, 0, 0, false).expect("unlock");
    let again = open(&cluster.node(1).path("f"));
    set(&again, libc::F_WRLCK, 0, 0, false).expect("nobody got it meanwhile");
    assert_eq!(errno(set(holder, libc::F_WRLCK, 0, 0, false)), libc::EAGAIN);
}

#[test]
fn a_process_that_waits_for_a_lock_can_be_killed() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    drop(b);
    set(&a, libc::F_WRLCK, 0, 0, false).expect("lock");
    let path = c(&cluster.node(1).path("f"));
    let lock = region(libc::F_WRLCK, 0, 0);
    // SAFETY: the child only makes system calls and ends by _exit.
    let pid = unsafe {
        let pid = libc::fork();
        if pid == 0 {
            let fd = libc::open(path.as_ptr(), libc::O_RDWR);
            let code = libc::fcntl(fd, libc::F_SETLKW, &raw const lock);
            libc::_exit(code);
        }
        pid
    };
    assert!(pid > 0, "fork: {}", io::Error::last_os_error());
    std::thread::sleep(Duration::from_millis(400));
    // SAFETY: our own child, not yet waited for.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    let status = within(SOON, "end of the killed process", move || wait_for(pid));
    assert_eq!(status, 128 + libc::SIGKILL);
    nobody_waits(&cluster, &a);
}

#[test]
fn locks_of_a_process_that_died_are_given_back() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    drop(b);
    let path = c(&cluster.node(1).path("f"));
    let lock = region(libc::F_WRLCK, 0, 0);
    // SAFETY: the child only makes system calls and ends by a signal.
    let pid = unsafe {
        let pid = libc::fork();
        if pid == 0 {
            let fd = libc::open(path.as_ptr(), libc::O_RDWR);
            if libc::fcntl(fd, libc::F_SETLK, &raw const lock) != 0 {
                libc::_exit(1);
            }
            libc::kill(libc::getpid(), libc::SIGKILL);
        }
        pid
    };
    assert!(pid > 0, "fork: {}", io::Error::last_os_error());
    assert_eq!(wait_for(pid), 128 + libc::SIGKILL, "it had the lock");
    wait_until(SOON, "its lock is free", || set(&a, libc::F_WRLCK, 0, 0, false).is_ok());
}

#[test]
fn a_deadlock_of_two_nodes_is_found() {
    let cluster = two();
    let (a, b) = shared_file(&cluster);
    set(&a, libc::F_WRLCK, 0, 1, false).expect("lock");
    set(&b, libc::F_WRLCK, 1, 1, false).expect("lock");
    let first = a.try_clone().expect("dup");
    let waiting = std::thread::spawn(move || set(&first, libc::F_WRLCK, 1, 1, true));
    std::thread::sleep(Duration::from_millis(300));
    let second = b.try_clone().expect("dup");
    let refused =
        within(SOON, "the deadlock is found", move || set(&second, libc::F_WRLCK, 0, 1, true));
    assert_eq!(errno(refused), libc::EDEADLK);
    set(&b, libc::F_UNLCK, 1, 1, false).expect("unlock");
    let got = within(SOON, "the other one gets its lock", move || waiting.join());
    got.expect("no panic").expect("lock");
}

/// Opens, looks at and reads a file; which call failed with what.
fn use_file(path: &std::ffi::CStr) -> Result<(), (&'static str, io::Error)> {
    let mut buffer = [0u8; 4_096];
    // SAFETY: plain data, and pointers that live through the calls.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let done = |what, code: i64| checked(code).map_err(|e| (what, e));
        done("stat", libc::stat(path.as_ptr(), &raw mut stat).into())?;
        let fd = done("open", libc::open(path.as_ptr(), libc::O_RDWR).into())? as i32;
        done("pread", libc::pread(fd, buffer.as_mut_ptr().cast(), 4_096, 0) as i64)?;
        done("pwrite", libc::pwrite(fd, buffer.as_ptr().cast(), 4_096, 0) as i64)?;
        done("fsync", libc::fsync(fd).into())?;
        done("close", libc::close(fd).into())?;
    }
    Ok(())
}

/// Signals end waits for locks, and nothing else: programs do not expect EINTR from files.
#[test]
fn signals_do_not_interrupt_file_operations() {
    let cluster = two();
    std::fs::write(cluster.node(0).path("f"), [7; 8_192]).expect("write");
    let path = c(&cluster.node(1).path("f"));
    catch(libc::SIGUSR2);
    let (told, thread_id) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        // SAFETY: no arguments, no failure.
        told.send(unsafe { libc::pthread_self() } as u64).expect("somebody listens");
        for round in 0..400 {
            if let Err((what, e)) = use_file(&path) {
                panic!("round {round}: {what}: {e}");
            }
        }
    });
    let id = thread_id.recv().expect("started") as libc::pthread_t;
    let mut signals = 0;
    while !worker.is_finished() {
        // SAFETY: the thread is not joined yet, so its id is valid.
        unsafe { libc::pthread_kill(id, libc::SIGUSR2) };
        signals += 1;
        std::thread::sleep(Duration::from_micros(300));
    }
    worker.join().expect("no panic");
    println!("{signals} signals");
}
