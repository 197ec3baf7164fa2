//! Extended attributes that the backing cannot hold.

use super::special::{attr, attr_names, remove_attr, set_attr};
use super::{create, errno, one};
use ebb_testkit::describe;
use std::fs;
use std::os::unix::fs::FileExt;

/// More than a block: ext4 has no room for it, and XFS has.
const LARGE: usize = 8_000;

/// Whether the backing takes an attribute of this size is found out on the backing.
#[test]
fn what_the_backing_cannot_hold_is_refused_at_once() {
    let cluster = one();
    let node = cluster.node(0);
    let direct = cluster.backing().join("direct");
    create(&direct);
    let there = set_attr(&direct, "user.big", &[7; LARGE], 0);
    fs::create_dir_all(node.path("new/dir")).expect("mkdir");
    create(&node.path("new/dir/f"));
    for name in ["new/dir/f", "new/dir"] {
        let here = set_attr(&node.path(name), "user.big", &[7; LARGE], 0);
        match &there {
            Ok(_) => drop(here.expect("as on the backing")),
            Err(e) => assert_eq!(errno(here), e.raw_os_error().expect("an errno"), "{name}"),
        }
        set_attr(&node.path(name), "user.small", b"1", 0).expect("set");
    }
    // Many small ones are as large.
    let many = (0..LARGE / 500).map(|i| format!("user.n{i}"));
    let set = |i: String, at: &std::path::Path| set_attr(at, &i, &[1; 500], 0).is_ok();
    let on_backing = many.clone().filter(|n| set(n.clone(), &direct)).count();
    create(&node.path("many"));
    let here = many.filter(|n| set(n.clone(), &node.path("many"))).count();
    assert!(here <= on_backing, "{here} of {on_backing}");
    node.umount();
    let names = attr_names(&cluster.backing().join("new/dir/f"));
    assert!(names.contains(&"user.small".to_string()), "{names:?}");
}

/// The backing can change its mind: here it has no room left because of an ACL that new files
/// inherit.
#[test]
fn an_attribute_that_cannot_be_set_holds_no_bytes_back_and_is_named() {
    let cluster = one();
    let node = cluster.node(0);
    let file = create(&node.path("f"));
    let probe = cluster.backing().join("probe");
    create(&probe);
    let fits = (1..40).rev().map(|n| n * 100);
    let fits = fits.into_iter().find(|n| set_attr(&probe, "user.most", &vec![3; *n], 0).is_ok());
    let value = vec![3; fits.expect("some size fits")];
    set_attr(&node.path("f"), "user.most", &value, 0).expect("it fits");
    set_attr(&node.path("f"), "user.little", b"1", 0).expect("it fits");
    if set_attr(cluster.backing(), "system.posix_acl_default", &long_acl(), 0).is_err() {
        return println!("SKIPPED: no ACLs on the backing");
    }
    let probe = cluster.backing().join("probe2");
    create(&probe);
    if set_attr(&probe, "user.most", &value, 0).is_ok() {
        return println!("SKIPPED: this backing has room for ACLs elsewhere");
    }
    file.write_all_at(b"precious", 0).expect("write");
    drop(file);

    let drained = node.ebb("drain", &[], &[]);
    let said = describe(&drained);
    assert_eq!(drained.status.code(), Some(3), "{said}");
    assert!(said.contains("user.most") && said.contains("f: "), "{said}");
    let there = cluster.backing().join("f");
    assert_eq!(fs::read(&there).expect("the bytes are there"), b"precious");
    assert!(attr(&there, "user.most").is_err());
    // It is not lost here, and can be changed.
    assert_eq!(attr(&node.path("f"), "user.most").expect("get"), value);
    assert_eq!(attr(&node.path("f"), "user.little").expect("get"), b"1");
    assert_eq!(attr_names(&node.path("f")), ["user.little", "user.most"]);
    let create = libc::XATTR_CREATE;
    assert_eq!(errno(set_attr(&node.path("f"), "user.most", b"2", create)), libc::EEXIST);
    remove_attr(&node.path("f"), "user.most").expect("remove");
    assert_eq!(attr_names(&node.path("f")), ["user.little"]);
    node.umount();
    assert_eq!(attr(&there, "user.little").expect("get"), b"1");
}

/// A default ACL with entries for very many users, as Linux stores it.
fn long_acl() -> Vec<u8> {
    let mut acl = 2u32.to_le_bytes().to_vec();
    let mut entry = |tag: u16, id: u32| {
        acl.extend_from_slice(&tag.to_le_bytes());
        acl.extend_from_slice(&6u16.to_le_bytes());
        acl.extend_from_slice(&id.to_le_bytes());
    };
    let nobody = u32::MAX;
    entry(1, nobody);
    (1..=100).for_each(|user| entry(2, user));
    for tag in [4, 16, 32] {
        entry(tag, nobody);
    }
    acl
}
