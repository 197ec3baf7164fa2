//! Attributes: modes, times, and what changes them.

use super::{c, checked, create, one, two};
use ebb_testkit::Cluster;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{
    DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown,
};
use std::path::Path;
use std::time::Duration;

fn stat(path: &Path) -> fs::Metadata {
    fs::symlink_metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn ctime(path: &Path) -> (i64, i64) {
    (stat(path).ctime(), stat(path).ctime_nsec())
}

fn mtime(path: &Path) -> (i64, i64) {
    (stat(path).mtime(), stat(path).mtime_nsec())
}

fn set_times(path: &Path, atime: libc::timespec, mtime: libc::timespec) -> io::Result<i64> {
    let times = [atime, mtime];
    let path = c(path);
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: path and times live through the call.
    checked(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), flags) })
}

fn spec(sec: i64, nsec: i64) -> libc::timespec {
    libc::timespec { tv_sec: sec, tv_nsec: nsec }
}

fn pause() {
    std::thread::sleep(Duration::from_millis(12));
}

#[test]
fn what_changes_a_file_changes_its_ctime_on_all_nodes() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    fs::write(&a, "x").expect("write");
    let changes: [(&str, &dyn Fn()); 6] = [
        ("chmod", &|| fs::set_permissions(&a, Permissions::from_mode(0o600)).expect("chmod")),
        ("chown", &|| chown(&a, Some(12), Some(34)).expect("chown")),
        ("link", &|| fs::hard_link(&a, a.with_extension("l")).expect("link")),
        ("unlink", &|| fs::remove_file(a.with_extension("l")).expect("unlink")),
        ("utimens", &|| {
            set_times(&a, spec(1, 1), spec(2, 2)).expect("utimens");
        }),
        ("truncate", &|| drop(fs::OpenOptions::new().write(true).truncate(true).open(&a))),
    ];
    for (what, change) in changes {
        let before = ctime(&a);
        pause();
        change();
        let after = ctime(&a);
        assert!(after > before, "{what}: ctime {before:?} then {after:?}");
        assert_eq!(ctime(&b), after, "{what}: other node");
    }
    let meta = stat(&b);
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o600, 12, 34));
}

#[test]
fn writing_moves_mtime_and_ctime_and_reading_does_not() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    let file = create(&a);
    file.write_all_at(b"one", 0).expect("write");
    let (m, c) = (mtime(&b), ctime(&b));
    pause();
    fs::read(&b).expect("read");
    assert_eq!((mtime(&a), ctime(&a)), (m, c), "after reading");
    file.write_all_at(b"two", 0).expect("write");
    assert!(mtime(&b) > m && ctime(&b) > c, "after writing");
}

#[test]
fn entries_that_come_and_go_move_the_mtime_of_their_directory() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("d"), cluster.node(1).path("d"));
    fs::create_dir(&a).expect("mkdir");
    let changes: [(&str, &dyn Fn()); 4] = [
        ("create", &|| drop(create(&b.join("f")))),
        ("rename", &|| fs::rename(b.join("f"), b.join("g")).expect("rename")),
        ("unlink", &|| fs::remove_file(b.join("g")).expect("unlink")),
        ("mkdir", &|| fs::create_dir(b.join("s")).expect("mkdir")),
    ];
    for (what, change) in changes {
        let before = mtime(&a);
        pause();
        change();
        assert!(mtime(&a) > before, "{what}");
    }
    assert_eq!(stat(&a).nlink(), 3, "a directory has its subdirectories' links");
}

#[test]
fn times_keep_their_nanoseconds_also_on_the_backing() {
    let cluster = two();
    let node = cluster.node(0);
    fs::write(node.path("f"), "x").expect("write");
    fs::create_dir(node.path("d")).expect("mkdir");
    std::os::unix::fs::symlink("f", node.path("l")).expect("symlink");
    let times = [(1, 999_999_999), (1_700_000_000, 123_456_789), (4_000_000_000, 1)];
    for (sec, nsec) in times {
        for name in ["f", "d", "l"] {
            set_times(&node.path(name), spec(sec / 2, nsec), spec(sec, nsec)).expect("utimens");
            let meta = stat(&cluster.node(1).path(name));
            assert_eq!((meta.atime(), meta.atime_nsec()), (sec / 2, nsec), "{name}");
            assert_eq!((meta.mtime(), meta.mtime_nsec()), (sec, nsec), "{name}");
        }
        node.drain();
        for name in ["f", "d", "l"] {
            assert_eq!(mtime(&cluster.backing().join(name)), (sec, nsec), "{name} on the backing");
        }
    }
    let before = mtime(&node.path("f"));
    set_times(&node.path("f"), spec(77, 7), spec(0, libc::UTIME_OMIT)).expect("utimens");
    assert_eq!(mtime(&node.path("f")), before);
    assert_eq!(stat(&node.path("f")).atime(), 77);
    set_times(&node.path("f"), spec(0, libc::UTIME_OMIT), spec(0, libc::UTIME_NOW)).expect("now");
    assert!(mtime(&node.path("f")).0 > 1_700_000_000 && stat(&node.path("f")).atime() == 77);
}

/// As tar does it: times are set on the open file, before the close that publishes its bytes.
#[test]
fn a_time_set_before_close_stays_in_every_model() {
    for model in ebb_tests::model::Model::ALL {
        let cluster = Cluster::builder().nodes(2).consistency(model.name()).start();
        let path = cluster.node(0).path("f");
        let file = create(&path);
        file.write_all_at(b"written", 0).expect("write");
        let then = std::time::UNIX_EPOCH + Duration::new(1_000_000_000, 5);
        file.set_modified(then).expect("set");
        drop(file);
        let check = |what: &str, path: &Path| {
            assert_eq!(mtime(path), (1_000_000_000, 5), "{}, {what}", model.name());
        };
        check("after close", &path);
        check("other node", &cluster.node(1).path("f"));
        cluster.node(0).drain();
        check("after drain", &path);
        check("backing", &cluster.backing().join("f"));
        let file = super::open(&path);
        file.set_modified(then).expect("set");
        file.write_all_at(b"again", 0).expect("write");
        drop(file);
        assert!(mtime(&path).0 > 1_600_000_000, "{}: written after it was set", model.name());
    }
}

/// The umask belongs to the whole process: a child takes it.
#[test]
fn the_umask_is_taken_off_new_modes() {
    let cluster = two();
    let script = "umask 027; : > f; mkdir d; mkfifo p; umask 0; : > open; mkdir wide";
    cluster.node(0).shell(script);
    let modes = [("f", 0o640), ("d", 0o750), ("p", 0o640), ("open", 0o666), ("wide", 0o777)];
    for (name, mode) in modes {
        let got = stat(&cluster.node(1).path(name)).mode() & 0o7777;
        assert_eq!(got, mode, "{name}: {got:o}");
    }
    cluster.node(0).drain();
    for (name, mode) in modes {
        let got = stat(&cluster.backing().join(name)).mode() & 0o7777;
        assert_eq!(got, mode, "{name} on the backing: {got:o}");
    }
}

#[test]
fn a_mode_without_write_permission_does_not_stop_its_creator() {
    let cluster = one();
    let path = cluster.node(0).path("f");
    let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o400).open(&path);
    file.expect("create").write_all_at(b"written", 0).expect("write");
    assert_eq!(stat(&path).mode() & 0o7777, 0o400);
    cluster.node(0).drain();
    let drained = cluster.backing().join("f");
    assert_eq!(fs::read(&drained).expect("read"), b"written");
    assert_eq!(stat(&drained).mode() & 0o7777, 0o400);
}

#[test]
fn entries_of_a_setgid_directory_take_its_group() {
    let cluster = two();
    let node = cluster.node(0);
    fs::DirBuilder::new().mode(0o777).create(node.path("d")).expect("mkdir");
    chown(node.path("d"), None, Some(4_321)).expect("chown");
    fs::set_permissions(node.path("d"), Permissions::from_mode(0o2775)).expect("chmod");
    create(&node.path("d/file"));
    fs::create_dir(node.path("d/sub")).expect("mkdir");
    create(&cluster.node(1).path("d/sub/below"));
    for name in ["d/file", "d/sub", "d/sub/below"] {
        assert_eq!(stat(&cluster.node(1).path(name)).gid(), 4_321, "{name}");
    }
    assert_eq!(stat(&node.path("d/sub")).mode() & 0o2000, 0o2000, "handed down");
    assert_eq!(stat(&node.path("d/file")).mode() & 0o2000, 0, "not to files");
    node.drain();
    assert_eq!(stat(&cluster.backing().join("d/sub/below")).gid(), 4_321);
}

/// The flusher publishes while the service is asked for attributes: its answer may be from before
/// that and be heard after it.
#[test]
fn the_size_after_an_append_is_never_that_of_before() {
    let cluster = Cluster::builder().consistency("commit").flush("immediate").prepare();
    cluster.node(0).mount_with(&["--naive"]);
    let append = |n: u32| {
        let path = cluster.node(0).path(format!("f{n}"));
        let mut file = File::options().create(true).append(true).open(path).expect("open");
        for size in (700..=8_000 * 700).step_by(700) {
            file.write_all(&[7; 700]).expect("append");
            assert_eq!(file.metadata().expect("fstat").len(), size);
        }
    };
    std::thread::scope(|s| (0..3).for_each(|n| drop(s.spawn(move || append(n)))));
}
