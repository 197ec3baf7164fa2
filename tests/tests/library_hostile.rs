//! Hostile callers of libebb: what the daemon is asked comes from programs that nobody need trust. A
//! request reaches nothing but the file whose descriptor it comes through, and no more of that than it was
//! opened for.

use ebb::{Extended, ReadPiece, WritePiece, open_handle};
use ebb_api_format::{BUFFER_MAX, HANDLE, Request, Span, Which, command, handle_name};
use ebb_testkit::Cluster;
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::{only_asked, open};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.expect_err("it must fail").raw_os_error().expect("of the system")
}

/// An ioctl as anybody can make it.
fn raw(file: &File, number: u32, buffer: &mut [u8]) -> Result<usize, i32> {
    // The kernel copies as many bytes as the number says, if it believes it.
    let mut room = vec![0_u8; 1 << 14];
    room[..buffer.len()].copy_from_slice(buffer);
    // SAFETY: no ioctl's number says more than 2^14 bytes.
    let n = unsafe { libc::ioctl(file.as_raw_fd(), number as libc::Ioctl, room.as_mut_ptr()) };
    buffer.copy_from_slice(&room[..buffer.len()]);
    match n {
        n if n >= 0 => Ok(n as usize),
        _ => Err(io::Error::last_os_error().raw_os_error().expect("of the system")),
    }
}

fn asked(file: &File, request: &Request<'_>) -> Result<usize, i32> {
    let mut buffer = request.encode().expect("it fits");
    raw(file, command(buffer.len()), &mut buffer)
}

#[test]
fn only_files_of_mounts_are_asked() {
    let dir = tempfile::tempdir().expect("a directory");
    let bare = open(&dir.path().join("f"));
    let passwd = File::open("/etc/passwd").expect("open");
    let null = File::open("/dev/null").expect("open");
    for file in [&bare, &passwd, &null] {
        assert!(!file.is_ebb());
        assert_eq!(errno(file.attach(None)), libc::ENOTTY);
        assert_eq!(errno(file.write_list(&[WritePiece { offset: 0, data: b"x" }])), libc::ENOTTY);
        assert_eq!(errno(file.handle()), libc::ENOTTY);
    }
    let cluster = Cluster::builder().nodes(1).start();
    let directory = File::open(cluster.node(0).mountpoint()).expect("open");
    assert_eq!(errno(directory.query(None)), libc::ENOTTY, "a directory");
    let status = File::open(cluster.node(0).path(".ebb/status.json")).expect("open");
    assert_eq!(errno(status.query(None)), libc::ENOTTY, "the daemon's own file");
}

#[test]
fn a_descriptor_is_good_for_what_it_was_opened_for() {
    let cluster = only_asked(1).start();
    let path = cluster.node(0).path("f");
    let both = open(&path);
    both.write_all_at(&[1; 100], 0).expect("write");
    let reader = File::open(&path).expect("open");
    let writer = OpenOptions::new().write(true).open(&path).expect("open");
    let span = Span { offset: 0, len: 100 };
    let which = Which::Range(span);
    let (pieces, data) = (vec![span], &[9; 100][..]);
    let writes = [
        Request::Attach(which),
        Request::Attach(Which::File),
        Request::Detach(Which::File),
        Request::Flush(Which::File),
        Request::Write { pieces: pieces.clone(), data, publish: Some(span) },
        Request::Publish(span),
    ];
    for request in &writes {
        assert_eq!(asked(&reader, request), Err(libc::EBADF), "{request:?}");
    }
    let reads = [
        Request::ReadFrom { span, owner: 0 },
        Request::ReadFrom { span, owner: 1 },
        Request::Fetch { pieces: pieces.clone(), ask: Some(span) },
        Request::Read { pieces, ask: None },
    ];
    for request in &reads {
        assert_eq!(asked(&writer, request), Err(libc::EBADF), "{request:?}");
    }
    let mut got = [0; 100];
    reader.read_exact_at(&mut got, 0).expect("read");
    assert_eq!(got, [1; 100]);
    assert_eq!(both.ebb_stat().expect("stat").unattached, 100, "nothing was done");
    assert!(
        reader.query(None).is_ok() && writer.query(None).is_ok(),
        "who owns what both may know"
    );
    for request in &writes {
        assert!(asked(&writer, request).is_ok(), "{request:?}");
    }
}

/// Numbers and buffers that are no requests, and requests with anything in them: each is answered, with an
/// error or not, and afterwards the daemon serves as before and the file of others is what it was.
#[test]
fn garbage_is_answered_with_errors() {
    let cluster = Cluster::builder().nodes(2).consistency("posix").start();
    let other = open(&cluster.node(0).path("other"));
    let data = bytes(1, 0, 0, 100_000);
    other.write_all_at(&data, 0).expect("write");
    let file = open(&cluster.node(0).path("f"));
    file.write_all_at(&data, 0).expect("write");

    for number in
        [0, command(0), command(7), command(16_383), command(100) ^ 1, command(64) ^ (1 << 30)]
    {
        assert_eq!(raw(&file, number, &mut [0; 64]), Err(libc::ENOTTY), "{number:x}");
    }
    let mut runner =
        TestRunner::new(Config { cases: 3000, failure_persistence: None, ..Config::default() });
    let strategy = (
        prop::collection::vec(any::<u8>(), 8..120),
        0_u8..14,
        0_u16..5,
        prop_oneof![Just(-1_i64), Just(0), Just(1), Just(1 << 30)],
        8_usize..200,
    );
    let garbage = runner.run(&strategy, |(body, operation, flags, lie, size)| {
        let mut buffer = vec![1, operation];
        buffer.extend_from_slice(&flags.to_le_bytes());
        buffer.extend_from_slice(&((body.len() as i64 + lie) as u32).to_le_bytes());
        buffer.extend_from_slice(&body);
        buffer.resize(size, 0);
        // A hole of exabytes may be written into; that is anybody's right in a file of his own.
        let done = raw(&file, command(size), &mut buffer);
        prop_assert!(
            done.is_ok_and(|n| n <= size) || done.is_err_and(|e| e != libc::EIO),
            "{:?}",
            done
        );
        Ok(())
    });
    garbage.expect("all of it is answered");
    let mut got = vec![0; data.len()];
    other.read_exact_at(&mut got, 0).expect("read");
    same("another file", &got, &data);
    assert!(cluster.node(0).pid().is_some() && other.query(None).expect("query").len() == 1);
}

#[test]
fn absurd_ranges_are_errors() {
    let cluster = Cluster::builder().nodes(1).consistency("session").start();
    let file = open(&cluster.node(0).path("f"));
    file.write_all_at(&[1; 10], 0).expect("write");
    let (end, backwards) = (i64::MAX as u64, std::ops::Range { start: 10, end: 5 });
    for range in [end..end + 1, u64::MAX - 1..u64::MAX, backwards, 0..u64::MAX] {
        assert_eq!(errno(file.attach(Some(range.clone()))), libc::EINVAL, "{range:?}");
        assert_eq!(errno(file.query(Some(range.clone()))), libc::EINVAL);
        assert_eq!(errno(file.detach(Some(range.clone()))), libc::EINVAL);
        assert_eq!(errno(file.flush(Some(range))), libc::EINVAL);
    }
    assert_eq!(errno(file.read_owner(&mut [0; 10], u64::MAX - 2, 0)), libc::EINVAL);
    assert_eq!(errno(file.attach(Some(0..end))), libc::ENODATA);
    // More than the answer has room for is refused, not cut.
    let pieces = vec![Span { offset: 0, len: 16_000 }];
    let mut buffer = Request::Read { pieces, ask: None }.encode().expect("it fits");
    assert_eq!(raw(&file, command(buffer.len()), &mut buffer), Err(libc::EINVAL));
    // A list of more pieces than a request can have bytes.
    let span = Span { offset: 0, len: 0 };
    assert!(Request::Fetch { pieces: vec![span; BUFFER_MAX], ask: None }.encode().is_none());
}

fn tokened() -> Cluster {
    Cluster::builder().nodes(2).consistency("session").token().start()
}

#[test]
fn a_handle_opens_its_file_on_every_node_of_the_job() {
    let cluster = tokened();
    std::fs::create_dir_all(cluster.node(0).path("a/b")).expect("mkdir");
    let a = open(&cluster.node(0).path("a/b/f"));
    let data = bytes(1, 0, 0, 5000);
    a.write_all_at(&data, 0).expect("write");
    a.attach(None).expect("attach");
    let handle = a.handle().expect("a handle");
    assert_eq!(handle, a.handle().expect("the same one"));
    let mount = cluster.node(1).mountpoint();
    let names = |node: usize| {
        let status = cluster.node(node).status();
        status["rpc"]["lookup"].as_u64().unwrap_or(0)
    };
    let before = names(1);
    let b = open_handle(mount, &handle, libc::O_RDWR).expect("open");
    assert_eq!(names(1), before, "no name is looked up");
    let mut got = vec![0; 5000];
    b.read_exact_at(&mut got, 0).expect("read");
    same("its bytes", &got, &data);
    b.write_all_at(&[7; 10], 0).expect("write");
    b.attach(Some(0..10)).expect("attach");
    assert_eq!(a.query(Some(0..20)).expect("query").len(), 2);
    let path = cluster.node(1).path("a/b/f");
    use std::os::unix::fs::MetadataExt;
    assert_eq!(b.metadata().expect("stat").ino(), std::fs::metadata(&path).expect("stat").ino());
    // It is no name of the file: nothing can be done with it but open.
    let name = String::from_utf8(handle_name(&handle)).expect("digits");
    let as_name = mount.join(".ebb").join(name);
    assert_eq!(errno(std::fs::remove_file(&as_name)), libc::EPERM);
    assert_eq!(errno(std::fs::rename(&as_name, mount.join("x"))), libc::EPERM);
    assert!(std::fs::read_dir(mount.join(".ebb")).expect("list").flatten().count() <= 3);
    // A file that is renamed is the same one; one that is gone is none.
    std::fs::rename(&path, cluster.node(1).path("g")).expect("rename");
    assert!(open_handle(mount, &handle, libc::O_RDONLY).is_ok());
    drop((a, b));
    std::fs::remove_file(cluster.node(0).path("g")).expect("unlink");
    let gone = open_handle(mount, &handle, libc::O_RDONLY);
    assert!([libc::ESTALE, libc::ENOENT].contains(&errno(gone)));
}

#[test]
fn a_handle_that_nobody_gave_opens_nothing() {
    let cluster = tokened();
    let a = open(&cluster.node(0).path("f"));
    let handle = a.handle().expect("a handle");
    let mount = cluster.node(1).mountpoint();
    for at in 0..HANDLE {
        let mut forged = handle;
        forged[at] ^= 4;
        assert_eq!(errno(open_handle(mount, &forged, libc::O_RDONLY)), libc::EACCES, "{at}");
    }
    assert_eq!(errno(open_handle(mount, &[0; HANDLE], libc::O_RDONLY)), libc::EACCES);
    assert_eq!(errno(open_handle(mount, &handle, libc::O_RDWR | libc::O_CREAT)), libc::EINVAL);
    assert_eq!(errno(open_handle("/tmp".as_ref(), &handle, libc::O_RDONLY)), libc::ENOENT);
    let strangers = tokened();
    let other = open_handle(strangers.node(0).mountpoint(), &handle, libc::O_RDONLY);
    assert_eq!(errno(other), libc::EACCES, "of another job");
    let tokenless = Cluster::builder().nodes(1).start();
    assert_eq!(errno(open(&tokenless.node(0).path("f")).handle()), libc::ENOKEY);
    let other = open_handle(tokenless.node(0).mountpoint(), &handle, libc::O_RDONLY);
    assert_eq!(errno(other), libc::ENOKEY);
}

/// This test program once more, as another user, in the part of a test that its environment names.
fn as_nobody(dir: &Path, test: &str, variables: &[(&str, String)]) -> std::process::Output {
    // Where it was built another user may not look.
    let program = dir.join("program");
    std::fs::copy(std::env::current_exe().expect("this program"), &program).expect("copy");
    let mut command = Command::new(program);
    command.current_dir("/");
    command.args(["--exact", test, "--nocapture"]).envs(variables.iter().cloned());
    command.uid(65534).gid(65534).output().expect("it can be started")
}

/// A handle is the way to a file and no right to it; and what another user may not open he cannot ask
/// about.
#[test]
fn other_users_have_the_rights_that_the_mount_gives_them() {
    if let Ok(mount) = std::env::var("EBB_TEST_MOUNT") {
        return other_user(&mount);
    }
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: another user can only be had by root");
    }
    let cluster = Cluster::builder().nodes(1).consistency("session").token().prepare();
    let node = cluster.node(0);
    node.mount_with(&["--allow-other"]);
    let share = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode));
    let scratch = tempfile::tempdir().expect("a directory");
    for dir in [node.mountpoint(), scratch.path()] {
        let own = dir.ancestors().filter(|d| d.starts_with(std::env::temp_dir()));
        own.filter(|d| *d != std::env::temp_dir()).for_each(|d| share(d, 0o755).expect("chmod"));
    }
    std::fs::create_dir(node.path("closed")).expect("mkdir");
    let mut handles = Vec::new();
    for (name, mode) in [("closed/secret", 0o600), ("closed/shared", 0o644), ("ours", 0o666)] {
        let file = open(&node.path(name));
        file.write_all_at(b"content", 0).expect("write");
        share(&node.path(name), mode).expect("chmod");
        let name = handle_name(&file.handle().expect("a handle"));
        handles.push(String::from_utf8(name).expect("digits"));
    }
    share(&node.path("closed"), 0o700).expect("chmod");
    let suid = node.path("suid");
    open(&suid).write_all_at(b"content", 0).expect("write");
    share(&suid, 0o4777).expect("chmod");
    let variables = [
        ("EBB_TEST_MOUNT", node.mountpoint().display().to_string()),
        ("EBB_TEST_HANDLES", handles.join(" ")),
    ];
    let output = as_nobody(
        scratch.path(),
        "other_users_have_the_rights_that_the_mount_gives_them",
        &variables,
    );
    assert!(output.status.success(), "{}", ebb_testkit::describe(&output));
    let mode = std::fs::metadata(&suid).expect("stat").permissions().mode();
    assert_eq!(mode & 0o7777, 0o777, "a write of a list clears setuid as every write does");
}

fn other_user(mount: &str) {
    let mount = Path::new(mount);
    let handles = std::env::var("EBB_TEST_HANDLES").expect("it is given");
    let handle = |n: usize| {
        let name = handles.split(' ').nth(n).expect("three of them");
        ebb_api_format::handle_of_name(name.as_bytes()).expect("a handle")
    };
    let at = |name: &str| mount.join(name);
    assert_eq!(errno(File::open(at("closed/shared"))), libc::EACCES, "the way is closed");
    assert_eq!(errno(open_handle(mount, &handle(0), libc::O_RDONLY)), libc::EACCES, "the file is");
    let shared = open_handle(mount, &handle(1), libc::O_RDONLY).expect("a handle is the way");
    assert_eq!(errno(shared.attach(None)), libc::EBADF);
    assert_eq!(errno(open_handle(mount, &handle(1), libc::O_RDWR)), libc::EACCES);
    let mut buffer = [0; 7];
    let mut pieces = [ReadPiece { offset: 0, buffer: &mut buffer, got: 0 }];
    assert_eq!(shared.read_list(&mut pieces).expect("read"), 7);
    assert_eq!(&buffer, b"content");
    let ours = OpenOptions::new().write(true).open(at("ours")).expect("open");
    assert_eq!(ours.write_list(&[WritePiece { offset: 0, data: b"C" }]).expect("write"), 1);
    ours.attach(None).expect("attach");
    let suid = OpenOptions::new().write(true).open(at("suid")).expect("open");
    assert_eq!(suid.write_list(&[WritePiece { offset: 0, data: b"x" }]).expect("write"), 1);
    // A descriptor without rights (O_PATH) proves nothing.
    let path =
        std::ffi::CString::new(at("ours").into_os_string().into_encoded_bytes()).expect("a path");
    // SAFETY: the path ends with a zero; the descriptor is nobody else's.
    let bare = unsafe { File::from_raw_fd(libc::open(path.as_ptr(), libc::O_PATH)) };
    assert_eq!(errno(bare.query(None)), libc::EBADF);
}
