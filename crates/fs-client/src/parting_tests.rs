//! Bodies that programs of a dead daemon can still write to, on file systems that refuse and that do not.

use super::*;

/// A cache on the file system of the temporary directory, and one in memory, where nothing is refused.
fn caches() -> Vec<(tempfile::TempDir, CacheDir)> {
    let dirs = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm")];
    let open = |dir: tempfile::TempDir| {
        let cache = CacheDir::open(dir.path()).expect("cache");
        (dir, cache)
    };
    dirs.into_iter().filter_map(Result::ok).map(open).collect()
}

fn refusing() -> Option<(tempfile::TempDir, CacheDir)> {
    let found = caches().into_iter().find(|(_, cache)| cache.freezes());
    if found.is_none() {
        println!("SKIPPED: no file system here refuses writes to immutable files, or not root");
    }
    found
}

fn telling() -> Option<(tempfile::TempDir, CacheDir)> {
    let found = caches().into_iter().find(|(_, cache)| !cache.freezes());
    if found.is_none() {
        println!("SKIPPED: all file systems here refuse writes to immutable files");
    }
    found
}

fn content(cache: &CacheDir, ino: Ino) -> Vec<u8> {
    std::fs::read(cache.path(ino)).expect("read")
}

fn whole(len: u64) -> Vec<ByteRange> {
    vec![ByteRange::new(0, len)]
}

/// A byte stored by the kernel, so that it fails where a store of a program would end it.
fn store(map: *mut libc::c_void, at: usize) -> io::Result<()> {
    // SAFETY: the byte is in the mapping.
    match unsafe { libc::getrandom(map.byte_add(at), 1, 0) } {
        1 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn map(file: &File, len: usize) -> *mut libc::c_void {
    let how = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, which nobody takes away.
    let map = unsafe {
        libc::mmap(std::ptr::null_mut(), len, how, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(map, libc::MAP_FAILED);
    map
}

#[test]
fn a_file_that_somebody_can_write_to_gets_a_new_body() {
    for (_dir, cache) in caches() {
        let theirs = cache.file(Ino(7)).expect("file");
        theirs.write_all_at(&[1; 9000], 0).expect("write");
        let kept = [ByteRange::new(10, 20), ByteRange::new(5000, 9000)];
        assert!(cache.part_from_writers(Ino(7), |_| kept.to_vec()).expect("parted"));
        let _ = theirs.write_all_at(&[2; 9000], 0);
        drop(theirs);
        let mut want = vec![0; 9000];
        kept.iter().for_each(|r| want[r.start() as usize..r.end() as usize].fill(1));
        assert!(content(&cache, Ino(7)) == want);
        let again = cache.part_from_writers(Ino(7), |_| kept.to_vec());
        assert!(!again.expect("nobody writes any more"));
        assert!(!cache.part_from_writers(Ino(8), whole).expect("no such file"));
        assert_eq!(cache.inos().expect("list"), [Ino(7)]);
    }
}

#[test]
fn who_had_it_open_or_mapped_can_change_nothing_any_more_where_that_is_refused() {
    let Some((_dir, cache)) = refusing() else { return };
    let theirs = cache.file(Ino(7)).expect("file");
    theirs.write_all_at(&[1; 20_000], 0).expect("write");
    let append = cache::reopened_for_appending(&theirs).expect("append");
    let direct =
        OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(cache.path(Ino(7)));
    let map = map(&theirs, 20_000);
    store(map, 0).expect("a page that is dirty");
    assert!(cache.part_from_writers(Ino(7), whole).expect("parted"));
    let refused = |what: &str, done: io::Result<()>, errno: i32| {
        assert_eq!(done.map_err(|e| e.raw_os_error()), Err(Some(errno)), "{what}");
    };
    refused("write", theirs.write_all_at(b"x", 5), libc::EPERM);
    refused("append", cache::append(&append, b"x").map(drop), libc::EPERM);
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    refused("direct", direct.expect("open").write_all_at(&Page([0; 4096]).0, 0), libc::EPERM);
    refused("truncate", theirs.set_len(5), libc::EPERM);
    refused("fallocate", cache::extend(&theirs, 90_000), libc::EPERM);
    refused("punch", cache::punch(&theirs, ByteRange::new(0, 4096)), libc::EPERM);
    refused("a store to a dirty page", store(map, 1), libc::EFAULT);
    refused("a store to another page", store(map, 9000), libc::EFAULT);
    assert_eq!(theirs.metadata().expect("stat").nlink(), 0);
    assert!(cache.unheard().is_empty() && !cache.aside().exists());
    let ours = cache.file(Ino(7)).expect("the new body");
    ours.write_all_at(b"ours", 0).expect("is written as ever");
    cache.remove(Ino(7)).expect("and removed");
}

/// A program that writes all the time: what it was told is written is in the new body, up to where it
/// is refused or from where it is told.
#[test]
fn what_is_written_meanwhile_is_in_the_new_body_or_told() {
    for (_dir, cache) in caches() {
        for _ in 0..20 {
            let theirs = cache.file(Ino(7)).expect("file");
            theirs.write_all_at(&vec![1; 3 << 20], 0).expect("write");
            let begun = std::sync::Barrier::new(2);
            let written = std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    let mut n = 0;
                    for at in 0..20_000 {
                        if at == 10 {
                            begun.wait();
                        }
                        match theirs.write_all_at(&[2], (at * 4099) % (6 << 20)) {
                            Ok(()) => n = at + 1,
                            Err(_) => break,
                        }
                    }
                    n
                });
                begun.wait();
                assert!(cache.part_from_writers(Ino(7), whole).expect("parted"));
                writer.join().expect("writer")
            });
            let new = content(&cache, Ino(7));
            let missing =
                (0..written).filter(|at| new.get((at * 4099 % (6 << 20)) as usize) != Some(&2));
            let missing = missing.count();
            let told = cache.unheard();
            assert!(missing == 0 || !told.is_empty(), "{missing} of {written}");
            assert!(!cache.freezes() || told.is_empty());
            drop(theirs);
            cache.unheard().iter().for_each(|u| std::fs::remove_file(&u.kept).expect("remove"));
            cache.remove(Ino(7)).expect("remove");
        }
    }
}

/// Not refused, and not too late either.
#[test]
fn what_is_written_while_it_is_copied_is_in_the_new_body() {
    let Some((_dir, cache)) = telling() else { return };
    let theirs = cache.file(Ino(7)).expect("file");
    theirs.write_all_at(&[1; 9000], 0).expect("write");
    std::thread::sleep(TICK);
    let mut asked = 0;
    let held = |len| {
        asked += 1;
        if asked == 1 {
            theirs.write_all_at(&[2; 9000], 5000).expect("write");
        }
        whole(len)
    };
    assert!(cache.part_from_writers(Ino(7), held).expect("parted"));
    let new = content(&cache, Ino(7));
    assert!(new[..5000] == [1; 5000] && new[5000..] == [2; 9000], "{}", new.len());
    assert!(cache.unheard().is_empty());
}

#[test]
fn what_is_written_to_an_old_body_is_told_and_kept_where_it_is_not_refused() {
    let Some((_dir, cache)) = telling() else { return };
    let theirs = cache.file(Ino(7)).expect("file");
    theirs.write_all_at(&[1; 9000], 0).expect("write");
    assert!(cache.part_from_writers(Ino(7), whole).expect("parted"));
    assert!(cache.unheard().is_empty(), "nothing was written yet");
    theirs.write_all_at(&[2; 100], 8950).expect("write");
    let [told] = &cache.unheard()[..] else { panic!("one") };
    assert!(told.ino == Ino(7) && told.bytes == 50 && told.is_new);
    drop(theirs);
    // A daemon after this one, and none that looks when nobody can write any more, forgets it.
    let next = CacheDir::open(cache.aside().parent().expect("root")).expect("cache");
    next.watch_old_again().expect("listed");
    for cache in [&cache, &next] {
        cache.unheard();
        let [told] = &cache.unheard()[..] else { panic!("one") };
        assert_eq!(std::fs::read(&told.kept).expect("read")[8950..], [2; 100]);
    }
    assert!(content(&cache, Ino(7)) == [1; 9000]);
    next.forget_old();
    std::fs::remove_file(&cache.unheard()[0].kept).expect("somebody has looked at it");
    assert!(cache.unheard().is_empty());
}

#[test]
fn an_old_body_that_nobody_wrote_to_goes_with_its_writers() {
    let Some((_dir, cache)) = telling() else { return };
    let theirs = cache.file(Ino(7)).expect("file");
    theirs.write_all_at(&[1; 9000], 0).expect("write");
    assert!(cache.part_from_writers(Ino(7), whole).expect("parted"));
    let kept = || std::fs::read_dir(cache.aside()).expect("list").count();
    assert!(cache.unheard().is_empty());
    assert_eq!(kept(), 1, "it can be written to");
    drop(theirs);
    assert!(cache.unheard().is_empty());
    assert_eq!(kept(), 0);
}

/// A daemon that died with a file frozen under its name.
#[test]
fn a_file_that_was_left_frozen_is_written_and_removed_as_ever() {
    let Some((dir, cache)) = refusing() else { return };
    let frozen = |ino| {
        let file = cache.file(ino).expect("file");
        file.write_all_at(&[1; 9000], 0).expect("write");
        freeze(&file).expect("frozen");
        file
    };
    let theirs = frozen(Ino(7));
    assert!(cache.part_from_writers(Ino(7), whole).expect("parted"));
    assert!(theirs.write_all_at(b"x", 0).is_err());
    assert!(content(&cache, Ino(7)) == [1; 9000]);
    drop(frozen(Ino(8)));
    cache.file(Ino(8)).expect("open").write_all_at(b"x", 0).expect("write");
    drop(frozen(Ino(9)));
    cache.remove(Ino(9)).expect("remove");
    drop(frozen(Ino(10)));
    crate::leftover::clear(dir.path()).expect("cleared");
    assert!(!cache.path(Ino(8)).exists() && !cache.path(Ino(10)).exists());
}

#[test]
fn names_of_old_bodies_say_what_they_were() {
    let copied = Seen { modified: 0x1234_5678_9abc, len: 77 };
    assert_eq!(parse(Path::new(&name_of(Ino(9), copied))), Some((Ino(9), copied)));
    assert_eq!(parse(Path::new("0000000000000009-4242")), None);
}
