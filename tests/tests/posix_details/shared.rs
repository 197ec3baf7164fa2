//! Other users on the mount: permissions, sticky directories, setuid bits.

use super::{as_user, c, create, errno, is_root, one, two_for_all_users, verdict};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

pub const USER: u32 = 61_001;
pub const OTHER: u32 = 61_002;

pub fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
}

/// Opens as that user; 0 or the errno.
pub fn may_open(user: u32, path: &Path, flags: i32) -> i32 {
    let path = c(path);
    // SAFETY: the string lives through the call.
    as_user(user, || verdict(unsafe { libc::open(path.as_ptr(), flags, 0o640) }))
}

fn may_unlink(user: u32, path: &Path) -> i32 {
    let path = c(path);
    // SAFETY: the string lives through the call.
    as_user(user, || verdict(unsafe { libc::unlink(path.as_ptr()) }))
}

#[test]
fn without_allow_other_another_user_sees_nothing() {
    if !is_root() {
        return;
    }
    let cluster = one();
    fs::write(cluster.node(0).path("f"), "x").expect("write");
    for dir in cluster.node(0).mountpoint().ancestors().skip(1) {
        if dir.starts_with(cluster.root()) {
            mode(dir, 0o755);
        }
    }
    mode(&cluster.node(0).path("f"), 0o666);
    assert_eq!(may_open(USER, &cluster.node(0).path("f"), libc::O_RDONLY), libc::EACCES);
}

#[test]
fn modes_and_owners_decide_for_other_users_on_all_nodes() {
    if !is_root() {
        return;
    }
    let cluster = two_for_all_users();
    let at = |n: usize, p: &str| cluster.node(n).path(p);
    fs::write(at(0, "private"), "x").expect("write");
    mode(&at(0, "private"), 0o600);
    fs::write(at(0, "public"), "x").expect("write");
    mode(&at(0, "public"), 0o644);
    fs::create_dir(at(0, "closed")).expect("mkdir");
    fs::write(at(0, "closed/f"), "x").expect("write");
    mode(&at(0, "closed/f"), 0o666);
    mode(&at(0, "closed"), 0o700);
    fs::create_dir(at(0, "shared")).expect("mkdir");
    mode(&at(0, "shared"), 0o777);
    for n in 0..2 {
        assert_eq!(may_open(USER, &at(n, "private"), libc::O_RDONLY), libc::EACCES);
        assert_eq!(may_open(USER, &at(n, "public"), libc::O_RDONLY), 0);
        assert_eq!(may_open(USER, &at(n, "public"), libc::O_WRONLY), libc::EACCES);
        assert_eq!(may_open(USER, &at(n, "closed/f"), libc::O_RDONLY), libc::EACCES);
        let new = at(n, &format!("shared/of-{n}"));
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        assert_eq!(may_open(USER, &at(n, "new"), flags), libc::EACCES);
        assert_eq!(may_open(USER, &new, flags), 0);
        let meta = fs::metadata(at(1 - n, &format!("shared/of-{n}"))).expect("stat");
        assert_eq!((meta.uid(), meta.gid()), (USER, USER));
    }
    chown(at(0, "private"), Some(USER), None).expect("chown");
    assert_eq!(may_open(USER, &at(1, "private"), libc::O_RDWR), 0, "its owner by now");
    let path = c(&at(1, "public"));
    // SAFETY: the string lives through the calls.
    let chmod = as_user(USER, || verdict(unsafe { libc::chmod(path.as_ptr(), 0o777) }));
    assert_eq!(chmod, libc::EPERM);
    // SAFETY: as above.
    let chowned = as_user(USER, || verdict(unsafe { libc::chown(path.as_ptr(), USER, USER) }));
    assert_eq!(chowned, libc::EPERM);
    cluster.node(0).drain();
    let drained = fs::metadata(cluster.backing().join("shared/of-1")).expect("stat");
    assert_eq!((drained.uid(), drained.gid()), (USER, USER));
}

#[test]
fn in_a_sticky_directory_only_owners_remove() {
    if !is_root() {
        return;
    }
    let cluster = two_for_all_users();
    let at = |n: usize, p: &str| cluster.node(n).path(p);
    fs::create_dir(at(0, "tmp")).expect("mkdir");
    mode(&at(0, "tmp"), 0o1777);
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    assert_eq!(may_open(USER, &at(0, "tmp/mine"), flags), 0);
    assert_eq!(may_open(OTHER, &at(0, "tmp/other"), flags), 0);
    for n in 0..2 {
        assert_eq!(may_unlink(OTHER, &at(n, "tmp/mine")), libc::EPERM);
        let (from, to) = (c(&at(n, "tmp/mine")), c(&at(n, "tmp/taken")));
        // SAFETY: both strings live through the call.
        let renamed =
            as_user(OTHER, || verdict(unsafe { libc::rename(from.as_ptr(), to.as_ptr()) }));
        assert_eq!(renamed, libc::EPERM);
    }
    assert_eq!(may_unlink(USER, &at(1, "tmp/mine")), 0);
    assert_eq!(may_unlink(OTHER, &at(1, "tmp/other")), 0);
}

#[test]
fn setuid_and_setgid_are_cleared_by_a_write_of_another_user() {
    if !is_root() {
        return;
    }
    let cluster = two_for_all_users();
    let bits = |n: usize| fs::metadata(cluster.node(n).path("f")).expect("stat").mode() & 0o7777;
    create(&cluster.node(0).path("f"));
    let path = c(&cluster.node(1).path("f"));
    let changes: [(&str, &dyn Fn() -> i32); 3] = [
        ("write", &|| {
            // SAFETY: the strings live through the calls.
            unsafe {
                let fd = libc::open(path.as_ptr(), libc::O_WRONLY);
                if fd < 0 { -1 } else { (libc::write(fd, b"x".as_ptr().cast(), 1) as i32).min(0) }
            }
        }),
        // SAFETY: as above.
        ("truncate", &|| unsafe { libc::truncate(path.as_ptr(), 7) }),
        // SAFETY: as above.
        ("O_TRUNC", &|| unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_TRUNC) }),
    ];
    for (what, change) in changes {
        mode(&cluster.node(0).path("f"), 0o6777);
        assert_eq!(as_user(USER, || verdict(change())), 0, "{what}");
        for n in 0..2 {
            assert_eq!(bits(n), 0o777, "{what}, node {n}: {:o}", bits(n));
        }
    }
    mode(&cluster.node(0).path("f"), 0o6777);
    fs::write(cluster.node(0).path("f"), "by root").expect("write");
    assert_eq!(bits(1), 0o6777, "root may write without clearing them");
    fs::File::options()
        .write(true)
        .open(cluster.node(0).path("f"))
        .expect("open")
        .set_len(3)
        .expect("truncate");
    assert_eq!(bits(1), 0o6777, "root may cut it without clearing them");
    chown(cluster.node(0).path("f"), Some(USER), None).expect("chown");
    assert_eq!(bits(1), 0o777, "chown clears them for everybody");
}

#[test]
fn the_setgid_bit_is_not_given_to_who_is_not_in_the_group() {
    if !is_root() {
        return;
    }
    let cluster = two_for_all_users();
    let path = cluster.node(0).path("f");
    create(&path);
    chown(&path, Some(USER), Some(OTHER)).expect("chown");
    let name = c(&path);
    // SAFETY: the string lives through the call.
    let changed = as_user(USER, || verdict(unsafe { libc::chmod(name.as_ptr(), 0o2755) }));
    assert_eq!(changed, 0);
    assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o7777, 0o755);
    let dir = fs::metadata(cluster.node(0).path("")).expect("stat");
    assert_eq!(dir.uid(), 0);
    assert_eq!(errno(fs::read(path.join("x"))), libc::ENOTDIR);
}
