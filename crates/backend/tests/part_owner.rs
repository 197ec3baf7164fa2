//! A part file that somebody else has put in the place of ours, with the same inode number.

#![allow(clippy::unwrap_used)]

use ebb_backend::{Access, Backend, BackendError, PosixDir};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

const STRANGER: u32 = 65_534;
const OWNER: u32 = 4321;

#[test]
fn only_our_part_files_and_those_of_the_files_user_are_written_to() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root gives files away");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(".ebb-part-1");
    let root = PosixDir::open_root(dir.path()).unwrap();
    for mode in [0o600, 0o666] {
        std::fs::write(&path, "x").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let ino = std::fs::metadata(&path).unwrap().ino();
        let file = root.open(b".ebb-part-1", ino, Access::Write).unwrap();
        file.check_owner(OWNER).unwrap();
        chown(&path, Some(OWNER), None).unwrap();
        file.check_owner(OWNER).unwrap();
        chown(&path, Some(STRANGER), None).unwrap();
        for _again in 0..2 {
            let refused = file.check_owner(OWNER);
            assert!(matches!(refused, Err(BackendError::Foreign { uid: STRANGER, .. })));
        }
        assert_eq!(std::fs::metadata(&path).unwrap().uid(), STRANGER, "it is left to him");
        std::fs::remove_file(&path).unwrap();
    }
}
