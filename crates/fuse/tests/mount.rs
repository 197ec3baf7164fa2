//! A tiny file system on real mounts: what comes from the kernel and what it makes of the answers,
//! signals for those who wait, the two kinds of locks, and a session that another one goes on with.

#![allow(clippy::unwrap_used)] // a failure here is a failed test

mod tiny;

use ebb_fuse::{Notifier, Options, Session};
use ebb_testkit::skip_reason;
use rustix::fs::FlockOperation;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiny::{Shared, Tiny};

fn options(loops: usize) -> Options {
    Options { default_permissions: true, loops, ..Options::new("tiny") }
}

/// Runs `test` on a mount with so many event loops.
fn mounted(loops: usize, test: impl FnOnce(&Path, &Arc<Shared>, Notifier)) {
    if skip_reason().is_some() {
        return;
    }
    let at = tempfile::tempdir().unwrap();
    let shared = Arc::new(Shared::default());
    let session = Session::mount(Tiny(Arc::clone(&shared)), at.path(), &options(loops)).unwrap();
    let notifier = session.notifier();
    let running = session.spawn().unwrap();
    test(at.path(), &shared, notifier);
    drop(running);
    assert_eq!(fs::read_dir(at.path()).unwrap().count(), 0, "it is unmounted");
}

/// Waits until it is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn files_are_made_written_listed_and_removed() {
    mounted(2, |at, shared, _| {
        let file = at.join("a file");
        let large: Vec<u8> = (0..3_000_000_u32).map(|n| n as u8).collect();
        fs::write(&file, &large).unwrap();
        assert_eq!(fs::read(&file).unwrap(), large);
        assert_eq!(fs::metadata(&file).unwrap().len(), large.len() as u64);
        assert_eq!(shared.largest_write(), 1 << 20, "as large as was agreed");

        File::options().write(true).open(&file).unwrap().set_len(10).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().len(), 10);
        let names: Vec<String> = (0..500).map(|n| format!("name-{n:0100}")).collect();
        names.iter().for_each(|name| drop(File::create(at.join(name)).unwrap()));
        let mut listed: Vec<_> = fs::read_dir(at)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        listed.sort();
        assert_eq!(listed[0], "a file");
        assert_eq!(listed[1..], names, "in several pieces");

        fs::rename(&file, at.join("other")).unwrap();
        fs::remove_file(at.join("other")).unwrap();
        assert_eq!(fs::metadata(at.join("other")).unwrap_err().kind(), io::ErrorKind::NotFound);
    });
}

#[test]
fn what_is_not_there_is_enosys_and_errors_are_told() {
    mounted(1, |at, _, _| {
        let link = std::os::unix::fs::symlink("x", at.join("link")).unwrap_err();
        assert_eq!(link.raw_os_error(), Some(libc::ENOSYS));
        fs::write(at.join("drops"), "x").unwrap();
        let dropped = fs::read(at.join("drops")).unwrap_err();
        assert_eq!(dropped.raw_os_error(), Some(libc::EIO), "an answer that was dropped");
    });
}

/// The kernel's word for a signal reaches the request that waits, and the process gets EINTR.
#[test]
fn a_signal_ends_a_wait() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    mounted(2, |at, shared, _| {
        fs::write(at.join("waits"), "x").unwrap();
        // SAFETY: the handler does nothing; without SA_RESTART, so that a wait ends.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
        }
        let file = File::open(at.join("waits")).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            // SAFETY: no arguments.
            tell.send(unsafe { libc::pthread_self() }).unwrap();
            let mut byte = [0];
            (&file).read(&mut byte)
        });
        let thread = told.recv().unwrap();
        until("the read waits", || shared.waiting() == 1);
        // SAFETY: the thread is there until it is joined.
        assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
        let read = reader.join().unwrap();
        assert_eq!(read.unwrap_err().raw_os_error(), Some(libc::EINTR));
        assert_eq!(shared.waiting(), 0);
    });
}

#[test]
fn flock_and_fcntl_are_told_apart() {
    mounted(1, |at, shared, _| {
        let file = File::create(at.join("f")).unwrap();
        rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
        // SAFETY: all zeros is a lock of the whole file.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as i16;
        // SAFETY: the descriptor is open, the lock outlives the calls.
        let set = |command| unsafe { libc::fcntl(file.as_raw_fd(), command, &lock) };
        assert_eq!(set(libc::F_SETLK), 0);
        assert_eq!(set(libc::F_SETLKW), 0);
        // Of flock, and whether it is waited for.
        let heard = shared.locks();
        assert_eq!(heard, [(true, true), (false, false), (false, true)]);
    });
}

#[test]
fn while_it_refuses_everything_fails_but_ends() {
    mounted(1, |at, shared, _| {
        fs::write(at.join("f"), "x").unwrap();
        let file = File::open(at.join("f")).unwrap();
        shared.refuse(true);
        let read = file.read_at(&mut [0], 0).unwrap_err();
        assert_eq!(read.raw_os_error(), Some(libc::ENOTCONN));
        assert_eq!(fs::metadata(at).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
        let released = shared.released();
        drop(file);
        until("the handle is released", || shared.released() == released + 1);
        shared.refuse(false);
        assert_eq!(fs::read(at.join("f")).unwrap(), b"x");
    });
}

#[test]
fn the_kernel_is_told_what_to_forget_and_what_to_keep() {
    mounted(1, |at, shared, notifier| {
        shared.cache(true);
        fs::write(at.join("f"), "old").unwrap();
        assert_eq!(fs::read(at.join("f")).unwrap(), b"old");
        let inode = ebb_fuse::INodeNo(fs::metadata(at.join("f")).unwrap().ino());
        shared.change("f", b"new");
        let file = File::open(at.join("f")).unwrap();
        let mut bytes = [0; 3];
        file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"old", "the kernel was not told");
        notifier.inval_inode(inode, 0, 0).unwrap();
        file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"new");
        notifier.store(inode, 0, b"own").unwrap();
        file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"own");

        let looked_up = shared.lookups();
        let root = ebb_fuse::INodeNo::ROOT;
        fs::metadata(at.join("f")).unwrap();
        assert_eq!(shared.lookups(), looked_up, "the kernel keeps the name");
        notifier.inval_entry(root, b"f").unwrap();
        fs::metadata(at.join("f")).unwrap();
        assert_eq!(shared.lookups(), looked_up + 1);
        notifier.inval_entry(root, b"a name that it never knew").unwrap();
        notifier.delete(root, inode, b"f").unwrap();
        until("the kernel lets go", || {
            drop(fs::metadata(at.join("f")));
            shared.lookups() > looked_up + 1
        });
    });
}

/// The devices of a session are held while it ends, and another one answers what it left.
#[test]
fn another_session_goes_on_with_the_devices() {
    if skip_reason().is_some() {
        return;
    }
    let at = tempfile::tempdir().unwrap();
    let shared = Arc::new(Shared::default());
    let first = Tiny(Arc::clone(&shared));
    let mut session = Session::mount(first, at.path(), &options(2)).unwrap();
    if !shared.resends() {
        println!("SKIPPED: this kernel does not send requests again");
        return;
    }
    let held: Vec<OwnedFd> =
        session.devices().unwrap().iter().map(|d| d.try_clone_to_owned().unwrap()).collect();
    assert_eq!(held.len(), 2, "one for each event loop");
    let running = session.spawn().unwrap();
    let file = at.path().join("f");
    fs::write(&file, "what was written").unwrap();
    // The first session reads this request and does not answer it.
    shared.deaf(true);
    let path = file.clone();
    let reader = std::thread::spawn(move || fs::metadata(path).map(|m| m.len()));
    until("the request was read", || shared.unanswered() > 0);

    let again = Tiny(Arc::clone(&shared));
    let second = Session::resume(again, held, &options(2)).unwrap();
    let notifier = second.notifier();
    shared.deaf(false);
    let second = second.spawn().unwrap();
    notifier.resend().unwrap();
    assert_eq!(reader.join().unwrap().unwrap(), 16);
    assert!(shared.came_again() > 0, "and it says that it came before");
    assert_eq!(fs::read(&file).unwrap(), b"what was written");
    drop(running);
    second.join().unwrap();
}

/// A mount that is gone is not unmounted again: another one can be at its place.
#[test]
fn what_is_mounted_there_later_stays() {
    if skip_reason().is_some() {
        return;
    }
    let at = tempfile::tempdir().unwrap();
    let mount = || Session::mount(Tiny(Arc::default()), at.path(), &options(1)).unwrap();
    let first = mount().spawn().unwrap();
    ebb_fuse::unmount(at.path(), false).unwrap();
    let second = mount().spawn().unwrap();
    first.join().unwrap();
    fs::write(at.path().join("f"), "x").unwrap();
    ebb_fuse::unmount(at.path(), false).unwrap();
    second.join().unwrap();
    ebb_fuse::unmount(at.path(), false).expect("nothing there is what was wanted");
}

#[test]
fn a_file_is_read_and_written_past_the_session() {
    if skip_reason().is_some() || !rustix::process::geteuid().is_root() {
        return;
    }
    let at = tempfile::tempdir().unwrap();
    let behind = tempfile::tempfile().unwrap();
    behind.write_all_at(b"bytes of another file", 0).unwrap();
    let shared = Arc::new(Shared::default());
    let session = Session::mount(Tiny(Arc::clone(&shared)), at.path(), &options(1)).unwrap();
    let id = match session.device().open_backing(&behind) {
        Ok(id) if shared.passes_through() => id,
        other => return println!("SKIPPED: this kernel passes nothing through: {other:?}"),
    };
    drop(id);
    shared.pass("f", behind.try_clone().unwrap());
    let running = session.spawn().unwrap();
    drop(File::create(at.path().join("f")).unwrap());
    let mut file = File::options().read(true).write(true).open(at.path().join("f")).unwrap();
    let (reads, writes) = (shared.reads(), shared.largest_write());
    let mut text = [0; 21];
    file.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"bytes of another file");
    file.write_all(b" and more").unwrap();
    assert_eq!((shared.reads(), shared.largest_write()), (reads, writes), "nobody was asked");
    assert_eq!(behind.metadata().unwrap().len(), 30);
    drop((file, running));
}
