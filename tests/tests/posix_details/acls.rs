//! What mounts show of rights that are more than a mode: ACLs and file capabilities of the backing.

use super::shared::{OTHER, USER, may_open, mode};
use super::special::{attr, attr_names, set_attr};
use super::{create, errno, is_root, two_for_all_users};
use ebb_testkit::Cluster;
use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;

const ACL: &str = "system.posix_acl_access";
const CAPABILITIES: &str = "security.capability";

/// An ACL as Linux stores it: nothing for the group, `named` for a user, under this mask.
fn acl(owner: u16, named: u16, mask: u16, others: u16) -> Vec<u8> {
    let mut acl = 2u32.to_le_bytes().to_vec();
    let nobody = u32::MAX;
    let entries = [
        (1, owner, nobody),
        (2, named, USER),
        (4, 0, nobody),
        (16, mask, nobody),
        (32, others, nobody),
    ];
    for (tag, bits, id) in entries {
        acl.extend_from_slice(&u16::to_le_bytes(tag));
        acl.extend_from_slice(&bits.to_le_bytes());
        acl.extend_from_slice(&id.to_le_bytes());
    }
    acl
}

fn bits(path: &Path) -> u32 {
    fs::metadata(path).expect("stat").mode() & 0o7777
}

#[test]
fn an_acl_that_refuses_the_group_refuses_it_on_mounts() {
    if !is_root() {
        return;
    }
    let cluster = two_for_all_users();
    let (there, dir) = (cluster.backing().join("f"), cluster.backing().join("d"));
    fs::write(&there, "secret").expect("write");
    chown(&there, None, Some(OTHER)).expect("chown");
    fs::create_dir(&dir).expect("mkdir");
    fs::write(dir.join("open"), "x").expect("write");
    mode(&dir.join("open"), 0o666);
    chown(&dir, None, Some(OTHER)).expect("chown");
    let value = acl(6, 6, 6, 0);
    if set_attr(&there, ACL, &value, 0).is_err() {
        return println!("SKIPPED: no ACLs on the backing");
    }
    set_attr(&dir, ACL, &acl(7, 7, 7, 0), 0).expect("set");
    assert_eq!(bits(&there), 0o660, "there the group bits are the mask");
    for node in cluster.nodes() {
        // By a look at the name, and by a listing.
        assert_eq!(bits(&node.path("f")), 0o600);
        assert_eq!(fs::read_dir(node.path("")).expect("list").count(), 2);
        assert_eq!(bits(&node.path("d")), 0o700);
        for way in [libc::O_RDONLY, libc::O_WRONLY] {
            assert_eq!(may_open(OTHER, &node.path("f"), way), libc::EACCES, "its group");
            assert_eq!(may_open(USER, &node.path("f"), way), libc::EACCES, "named: gets less");
        }
        assert_eq!(may_open(OTHER, &node.path("d/open"), libc::O_RDONLY), libc::EACCES);
    }
    // A mode that nobody changed is not written back: it would be another mask.
    fs::write(cluster.node(1).path("f"), "changed").expect("write");
    cluster.node(1).drain();
    assert_eq!(fs::read(&there).expect("read"), b"changed");
    assert_eq!(attr(&there, ACL).expect("get"), value);
    assert_eq!(bits(&there), 0o660);
    // One that its owner sets is a mask, as anywhere, and gives the group nothing.
    mode(&cluster.node(0).path("f"), 0o664);
    assert_eq!(attr(&there, ACL).expect("get"), acl(6, 6, 6, 4));
    for node in cluster.nodes() {
        assert_eq!(bits(&node.path("f")), 0o604);
        assert_eq!(may_open(OTHER, &node.path("f"), libc::O_RDONLY), libc::EACCES);
        assert_eq!(may_open(USER, &node.path("f"), libc::O_RDONLY), 0);
    }
}

#[test]
fn there_are_no_file_capabilities_and_a_write_drops_those_of_the_backing() {
    if !is_root() {
        return;
    }
    // CAP_NET_RAW, permitted and effective.
    let words = [0x0200_0001u32, 1 << 13, 0, 0, 0];
    let value: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    for way in ["daemon", "auto"] {
        let cluster = Cluster::builder().nodes(1).consistency("posix").prepare();
        let node = cluster.node(0);
        let there = cluster.backing().join("program");
        fs::write(&there, "trusted").expect("write");
        if let Err(e) = set_attr(&there, CAPABILITIES, &value, 0) {
            return println!("SKIPPED: no capabilities on the backing: {e}");
        }
        node.mount_with(&["--io-path", way]);
        let here = node.path("program");
        assert_eq!(errno(attr(&here, CAPABILITIES)), libc::ENODATA, "{way}");
        assert!(attr_names(&here).is_empty(), "{way}");
        create(&node.path("new"));
        for file in [&here, &node.path("new")] {
            let set = set_attr(file, CAPABILITIES, &value, 0);
            assert_eq!(errno(set), libc::EOPNOTSUPP, "{way}");
        }
        assert!(attr(&there, CAPABILITIES).is_ok(), "nothing was written yet");
        let file = super::open(&here);
        std::os::unix::fs::FileExt::write_all_at(&file, b"T", 0).expect("write");
        drop(file);
        node.drain();
        assert_eq!(fs::read(&there).expect("read"), b"Trusted", "{way}");
        assert_eq!(errno(attr(&there, CAPABILITIES)), libc::ENODATA, "{way}");
        assert!(attr_names(&cluster.backing().join("new")).is_empty(), "{way}");
        node.umount();
    }
}
