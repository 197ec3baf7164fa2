//! Names: lengths, links, renames, unlinked files, listing.

use super::{c, checked, create, errno, one, open, two};
use ebb_testkit::Cluster;
use ebb_testkit::mounts::wait_until;
use ebb_tests::content::{bytes, same};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::time::Duration;

fn rename2(from: &Path, to: &Path, flags: u32) -> io::Result<i64> {
    let (from, to) = (c(from), c(to));
    let cwd = libc::AT_FDCWD;
    // SAFETY: both strings live through the call.
    checked(unsafe { libc::renameat2(cwd, from.as_ptr(), cwd, to.as_ptr(), flags) })
}

fn names(dir: &Path) -> BTreeSet<String> {
    let all = fs::read_dir(dir).expect("list").map(|e| e.expect("entry").file_name());
    all.map(|n| n.into_string().expect("UTF-8")).collect()
}

#[test]
fn names_of_255_bytes_are_kept_and_of_256_refused() {
    let cluster = two();
    let longest = "é".repeat(127) + "x";
    assert_eq!(longest.len(), 255);
    let node = cluster.node(0);
    fs::write(node.path(&longest), "content").expect("write");
    fs::create_dir(node.path("d")).expect("mkdir");
    fs::rename(node.path(&longest), node.path("d").join(&longest)).expect("rename");
    assert_eq!(names(&cluster.node(1).path("d")), BTreeSet::from([longest.clone()]));
    let too_long = "y".repeat(256);
    assert_eq!(errno(File::create(node.path(&too_long))), libc::ENAMETOOLONG);
    assert_eq!(errno(fs::create_dir(node.path(&too_long))), libc::ENAMETOOLONG);
    assert_eq!(errno(fs::metadata(node.path(&too_long))), libc::ENAMETOOLONG);
    let renamed = fs::rename(node.path("d"), node.path(&too_long));
    assert_eq!(errno(renamed), libc::ENAMETOOLONG);
    node.drain();
    let drained = fs::read(cluster.backing().join("d").join(&longest)).expect("read");
    assert_eq!(drained, b"content");
}

#[test]
fn names_may_hold_any_byte_but_slash_and_nul() {
    use std::os::unix::ffi::OsStrExt;
    let cluster = two();
    let strange: Vec<u8> = (1..=255).filter(|b| *b != b'/').collect();
    let (left, right) = strange.split_at(127);
    for name in [left, right, b" ", b"-", b"\n", b"..."] {
        let name = std::ffi::OsStr::from_bytes(name);
        fs::write(cluster.node(0).path(name), "x").expect("write");
        assert_eq!(fs::read(cluster.node(1).path(name)).expect("read"), b"x");
    }
    cluster.node(0).drain();
    let list = |dir: &Path| -> BTreeSet<_> {
        fs::read_dir(dir).expect("list").map(|e| e.expect("entry").file_name()).collect()
    };
    assert_eq!(list(cluster.backing()), list(&cluster.node(1).path("")));
}

#[test]
fn a_file_unlinked_on_one_node_lives_while_another_has_it_open() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    let data = bytes(1, 1, 0, 200_000);
    let file = create(&a);
    file.write_all_at(&data, 0).expect("write");
    let other = open(&b);
    fs::remove_file(&b).expect("unlink");
    assert_eq!(errno(fs::metadata(&a)), libc::ENOENT);
    for file in [&file, &other] {
        let mut got = vec![0; data.len()];
        file.read_exact_at(&mut got, 0).expect("read");
        same("unlinked", &got, &data);
        assert_eq!(file.metadata().expect("stat").nlink(), 0);
    }
    other.write_all_at(b"new", 100).expect("write");
    let mut got = [0; 3];
    file.read_exact_at(&mut got, 100).expect("read");
    assert_eq!(&got, b"new");
    other.set_len(50).expect("truncate");
    assert_eq!(file.metadata().expect("stat").len(), 50);
    // A new file of the same name is another file.
    fs::write(&a, "second").expect("write");
    assert_eq!(file.metadata().expect("stat").len(), 50);
    drop((file, other));
    cluster.nodes().iter().for_each(ebb_testkit::Node::drain);
    assert_eq!(names(cluster.backing()), BTreeSet::from(["f".to_string()]));
    assert_eq!(fs::read(cluster.backing().join("f")).expect("read"), b"second");
}

#[test]
fn an_unlinked_file_of_the_backing_can_still_be_read() {
    let cluster = two();
    let data = bytes(1, 1, 0, 3_000_000);
    fs::write(cluster.backing().join("old"), &data).expect("write");
    let file = File::open(cluster.node(0).path("old")).expect("open");
    let mut first = [0; 10];
    file.read_exact_at(&mut first, 0).expect("read");
    fs::remove_file(cluster.node(1).path("old")).expect("unlink");
    assert!(!cluster.backing().join("old").exists(), "unlink is written through");
    let mut got = vec![0; data.len()];
    file.read_exact_at(&mut got, 0).expect("read after unlink");
    same("after unlink", &got, &data);
}

#[test]
fn a_file_replaced_by_rename_lives_while_it_is_open() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    fs::write(&a, "old content").expect("write");
    let old = File::open(&b).expect("open");
    fs::write(a.with_extension("new"), "new").expect("write");
    fs::rename(a.with_extension("new"), &a).expect("rename");
    assert_eq!(fs::read(&b).expect("read"), b"new");
    let mut got = [0; 11];
    old.read_exact_at(&mut got, 0).expect("read");
    assert_eq!(&got, b"old content");
}

#[test]
fn rename_noreplace_and_exchange_do_what_they_say() {
    let cluster = two();
    let at = |n: usize, p: &str| cluster.node(n).path(p);
    fs::write(at(0, "a"), "a").expect("write");
    fs::write(at(0, "b"), "b").expect("write");
    fs::create_dir(at(0, "d")).expect("mkdir");
    fs::write(at(0, "d/inside"), "x").expect("write");
    let kept = rename2(&at(1, "a"), &at(1, "b"), libc::RENAME_NOREPLACE);
    assert_eq!(errno(kept), libc::EEXIST);
    rename2(&at(1, "a"), &at(1, "c"), libc::RENAME_NOREPLACE).expect("rename");
    rename2(&at(1, "c"), &at(1, "d"), libc::RENAME_EXCHANGE).expect("exchange");
    assert_eq!(fs::read(at(0, "d")).expect("read"), b"a");
    assert_eq!(fs::read(at(0, "c/inside")).expect("read"), b"x");
    let missing = rename2(&at(1, "b"), &at(1, "none"), libc::RENAME_EXCHANGE);
    assert_eq!(errno(missing), libc::ENOENT);
    rename2(&at(0, "b"), &at(0, "c/inside"), libc::RENAME_EXCHANGE).expect("across directories");
    cluster.node(0).drain();
    assert_eq!(fs::read(cluster.backing().join("c/inside")).expect("read"), b"b");
    assert_eq!(fs::read(cluster.backing().join("b")).expect("read"), b"x");
    // The same on names that the backing has by now.
    rename2(&at(1, "b"), &at(1, "c"), libc::RENAME_EXCHANGE).expect("exchange");
    assert_eq!(fs::read(cluster.backing().join("b/inside")).expect("read"), b"b");
    assert_eq!(fs::read(at(0, "c")).expect("read"), b"x");
}

#[test]
fn rename_refuses_what_posix_refuses() {
    let cluster = one();
    let at = |p: &str| cluster.node(0).path(p);
    fs::create_dir_all(at("d/e/f")).expect("mkdir");
    fs::create_dir(at("empty")).expect("mkdir");
    fs::write(at("file"), "x").expect("write");
    assert_eq!(errno(fs::rename(at("d"), at("d/e/g"))), libc::EINVAL);
    assert_eq!(errno(fs::rename(at("empty"), at("d"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::rename(at("file"), at("empty"))), libc::EISDIR);
    assert_eq!(errno(fs::rename(at("empty"), at("file"))), libc::ENOTDIR);
    assert_eq!(errno(fs::rename(at("none"), at("other"))), libc::ENOENT);
    fs::rename(at("d/e"), at("empty")).expect("over an empty directory");
    fs::rename(at("file"), at("file")).expect("onto itself");
    assert!(at("empty/f").is_dir() && !at("d/e").exists());
    assert_eq!(errno(fs::remove_dir(at("empty"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::remove_dir(at("file"))), libc::ENOTDIR);
    assert_eq!(errno(fs::remove_file(at("empty"))), libc::EISDIR);
}

#[test]
fn a_directory_with_open_files_can_be_renamed_under_them() {
    let cluster = two();
    let at = |n: usize, p: &str| cluster.node(n).path(p);
    fs::create_dir_all(cluster.backing().join("top/old")).expect("mkdir");
    fs::write(cluster.backing().join("top/old/drained"), "drained").expect("write");
    fs::create_dir(at(0, "top/new")).expect("mkdir");
    let dirty = create(&at(0, "top/new/dirty"));
    dirty.write_all_at(b"first", 0).expect("write");
    let drained = open(&at(1, "top/old/drained"));
    fs::rename(at(1, "top"), at(1, "moved")).expect("rename");
    dirty.write_all_at(b" second", 5).expect("write");
    drained.write_all_at(b"DR", 0).expect("write");
    assert!(!at(0, "top").exists());
    assert_eq!(fs::read(at(1, "moved/new/dirty")).expect("read"), b"first second");
    assert_eq!(fs::read(at(0, "moved/old/drained")).expect("read"), b"DRained");
    drop((dirty, drained));
    cluster.nodes().iter().for_each(ebb_testkit::Node::drain);
    let backing = |p: &str| fs::read(cluster.backing().join(p)).expect("read");
    assert_eq!(backing("moved/new/dirty"), b"first second");
    assert_eq!(backing("moved/old/drained"), b"DRained");
    assert!(!cluster.backing().join("top").exists());
}

#[test]
fn hard_links_are_one_file_on_all_nodes_and_on_the_backing() {
    let cluster = two();
    let at = |n: usize, p: &str| cluster.node(n).path(p);
    fs::write(at(0, "a"), "one").expect("write");
    fs::hard_link(at(1, "a"), at(1, "b")).expect("link");
    fs::create_dir(at(0, "d")).expect("mkdir");
    fs::hard_link(at(0, "b"), at(0, "d/c")).expect("link");
    fs::write(at(1, "d/c"), "all three").expect("write");
    for name in ["a", "b", "d/c"] {
        assert_eq!(fs::read(at(0, name)).expect("read"), b"all three");
        assert_eq!(fs::metadata(at(1, name)).expect("stat").nlink(), 3);
    }
    let ino = fs::metadata(at(0, "a")).expect("stat").ino();
    assert_eq!(fs::metadata(at(0, "d/c")).expect("stat").ino(), ino);
    fs::remove_file(at(0, "a")).expect("unlink");
    assert_eq!(fs::metadata(at(1, "b")).expect("stat").nlink(), 2);
    assert_eq!(errno(fs::hard_link(at(0, "d"), at(0, "e"))), libc::EPERM);
    cluster.nodes().iter().for_each(ebb_testkit::Node::drain);
    let stat = |p: &str| fs::metadata(cluster.backing().join(p)).expect("stat");
    assert_eq!(stat("b").ino(), stat("d/c").ino());
    assert_eq!((stat("b").nlink(), stat("b").len()), (2, 9));
}

#[test]
fn a_name_that_was_replaced_in_the_job_counts_no_more() {
    let cluster = two();
    let backing = cluster.backing();
    fs::write(backing.join("a"), "old").expect("write");
    fs::hard_link(backing.join("a"), backing.join("b")).expect("link");
    fs::hard_link(backing.join("a"), backing.join("unseen")).expect("link");
    let at = |n: usize, p: &str| cluster.node(n).path(p);
    let nlink = |n: usize, p: &str| fs::metadata(at(n, p)).expect("stat").nlink();
    assert_eq!((nlink(0, "a"), nlink(1, "b")), (3, 3));
    fs::write(at(0, "new"), "new").expect("write");
    fs::rename(at(0, "new"), at(0, "a")).expect("rename");
    assert_eq!((nlink(0, "b"), nlink(1, "b"), nlink(1, "a")), (2, 2, 1));
    cluster.nodes().iter().for_each(ebb_testkit::Node::drain);
    assert_eq!((nlink(0, "b"), nlink(1, "b"), nlink(1, "a")), (2, 2, 1));
    fs::write(at(1, "newer"), "newer").expect("write");
    fs::rename(at(1, "newer"), at(1, "b")).expect("rename");
    assert_eq!((nlink(0, "unseen"), nlink(1, "unseen")), (1, 1));
    fs::remove_file(at(0, "b")).expect("unlink");
    assert_eq!((nlink(0, "unseen"), nlink(1, "unseen")), (1, 1));
    assert_eq!(fs::read(at(1, "unseen")).expect("read"), b"old");
}

#[test]
fn symbolic_links_keep_their_text() {
    let cluster = two();
    let at = |n: usize, p: &str| cluster.node(n).path(p);
    let long = "x/".repeat(2_000);
    for (name, target) in [("rel", "d/file"), ("dangling", "no/such"), ("long", long.as_str())] {
        symlink(target, at(0, name)).expect("symlink");
        assert_eq!(fs::read_link(at(1, name)).expect("readlink"), Path::new(target));
        assert_eq!(fs::symlink_metadata(at(1, name)).expect("stat").len(), target.len() as u64);
    }
    fs::create_dir(at(0, "d")).expect("mkdir");
    fs::write(at(0, "d/file"), "through").expect("write");
    assert_eq!(fs::read(at(1, "rel")).expect("read"), b"through");
    symlink("loop", at(0, "loop")).expect("symlink");
    assert_eq!(errno(fs::read(at(1, "loop"))), libc::ELOOP);
    assert_eq!(errno(fs::read(at(1, "dangling"))), libc::ENOENT);
    cluster.node(0).drain();
    let drained = fs::read_link(cluster.backing().join("long")).expect("readlink");
    assert_eq!(drained, Path::new(&long));
}

#[test]
fn listing_a_changing_directory_misses_nothing_that_stays() {
    let cluster = two();
    let dir = |n: usize| cluster.node(n).path("d");
    fs::create_dir(dir(0)).expect("mkdir");
    let staying: BTreeSet<String> = (0..700).map(|n| format!("stays-{n:04}")).collect();
    for name in &staying {
        create(&dir(0).join(name));
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut n = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let path = dir(1).join(format!("passes-{:03}", n % 40));
                fs::write(&path, "x").expect("write");
                fs::rename(&path, path.with_extension("r")).expect("rename");
                fs::remove_file(path.with_extension("r")).expect("unlink");
                n += 1;
            }
        });
        for _ in 0..15 {
            let mut seen = BTreeSet::new();
            for entry in fs::read_dir(dir(0)).expect("list") {
                let name = entry.expect("entry").file_name().into_string().expect("UTF-8");
                assert!(seen.insert(name.clone()), "{name} twice in one listing");
            }
            let missing: Vec<_> = staying.difference(&seen).collect();
            assert!(missing.is_empty(), "missing: {missing:?}");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(names(&dir(0)), staying);
}

#[test]
fn removing_while_listing_removes_everything() {
    let cluster = one();
    let dir = cluster.node(0).path("d");
    fs::create_dir(&dir).expect("mkdir");
    for n in 0..5_000 {
        create(&dir.join(format!("file-{n}")));
    }
    let mut removed = 0;
    for entry in fs::read_dir(&dir).expect("list") {
        fs::remove_file(entry.expect("entry").path()).expect("unlink");
        removed += 1;
    }
    assert_eq!(removed, 5_000);
    fs::remove_dir(&dir).expect("rmdir");
}

/// The kernel of the other node still has the directory in its old place, and cannot move it
/// while a rename between directories looks its last names up.
#[test]
fn a_directory_moved_by_another_node_is_in_the_way_of_a_rename_as_a_directory() {
    let cluster = two();
    let (here, there) = (cluster.node(0), cluster.node(1));
    fs::create_dir_all(here.path("a/d")).expect("mkdir");
    fs::create_dir(here.path("b")).expect("mkdir");
    fs::write(here.path("b/f"), "x").expect("write");
    for (from, to) in [("a/d", "d"), ("d", "a/d")] {
        assert!(fs::metadata(there.path(from)).expect("stat").is_dir());
        fs::rename(here.path(from), here.path(to)).expect("rename");
        let moved = fs::rename(there.path("b/f"), there.path(to));
        assert_eq!(moved.expect_err("a directory").raw_os_error(), Some(libc::EISDIR), "{to}");
    }
}

/// A file that loses its last name before its bytes are on the backing: they stay where they are
/// for as long as a program has it open, on whichever node, and no longer.
#[test]
fn a_file_without_a_name_is_read_by_another_node_before_it_was_flushed() {
    for how in ["unlink", "rename"] {
        let builder = Cluster::builder().nodes(2).consistency("posix");
        let cluster = builder.flush("immediate").option("--flush-bandwidth", "1KiB").start();
        let (writer, reader) = (cluster.node(0), cluster.node(1));
        let content: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        fs::write(writer.path("f"), &content).expect("write");
        let file = File::open(reader.path("f")).expect("open");
        if how == "unlink" {
            fs::remove_file(writer.path("f")).expect("unlink");
        } else {
            fs::write(writer.path("g"), b"other").expect("write");
            fs::rename(writer.path("g"), writer.path("f")).expect("rename");
        }
        // Long enough for the flusher to have heard of it, and to ask again.
        std::thread::sleep(Duration::from_secs(4));
        let mut found = vec![0; content.len()];
        file.read_exact_at(&mut found, 0).unwrap_or_else(|e| panic!("{how}: {e}"));
        assert_eq!(found, content, "{how}");
        drop(file);
        let cached = || cached_bytes(writer.cache());
        let gone = wait_until(Duration::from_secs(30), || cached() < 10_000);
        assert!(gone, "{how}: the writer keeps {} bytes", cached());
        cluster.umount_all();
    }
}

/// The same after its bytes went to the backing and are nowhere else: an error, and no zeros. What
/// was read before, and other files, are not concerned.
#[test]
fn a_file_that_was_flushed_and_given_up_is_gone_with_its_name_for_another_node() {
    let cluster = Cluster::builder().nodes(3).consistency("posix").separate_meta().start();
    let [writer, reader, remover] = [0, 1, 2].map(|n| cluster.node(n));
    let content = vec![7; 300_000];
    fs::write(writer.path("f"), &content).expect("write");
    fs::write(writer.path("other"), &content).expect("write");
    let file = File::open(reader.path("f")).expect("open");
    writer.umount();
    fs::remove_file(remover.path("f")).expect("unlink");
    let mut found = vec![0; content.len()];
    let read = file.read_at(&mut found, 0).map_err(|e| e.raw_os_error());
    assert_eq!(read, Err(Some(libc::EIO)));
    assert_eq!(fs::read(reader.path("other")).expect("read"), content);
    drop(file);
    writer.mount();
}

/// What files of a cache hold.
fn cached_bytes(cache: &Path) -> u64 {
    let below = |dir: &Path| fs::read_dir(dir).map(|d| d.flatten().collect()).unwrap_or_default();
    let shards: Vec<fs::DirEntry> = below(&cache.join("data"));
    let files = shards.iter().flat_map(|shard| -> Vec<fs::DirEntry> { below(&shard.path()) });
    files.filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum()
}
