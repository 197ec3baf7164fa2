//! The file itself: appended by many, compacted under way, synced once for all who wait.

use super::*;
use ebb_types::{Time, Version};

fn header() -> Header {
    Header {
        path: b"f".to_vec(),
        perm: 0o600,
        uid: 0,
        gid: 0,
        atime: Time::default(),
        mtime: Time::default(),
        size: 0,
        home: None,
        under: None,
        shared: false,
    }
}

fn image() -> Image {
    let mut image = Image::default();
    let life = Life {
        node: String::new(),
        config: String::new(),
        boot: boot_id(),
        job: 1,
        backing_ino: 1,
        began: Time::default(),
    };
    image.apply(&Record::Life(Box::new(life)));
    image
}

fn attach(journal: &Journal, ino: u64, i: u64) {
    let range = ByteRange::at(i * 10, 10);
    let (now, v) = (Time::default(), Version(i));
    let record = Record::Attaching(Ino(ino), vec![range], v, now);
    let introduction = || Introduction { header: header(), alone: false, cuts: Vec::new() };
    journal.push_about(Ino(ino), introduction, &record);
    journal.push(&Record::Attached(Ino(ino), vec![range], v.next(), range.end()));
}

#[test]
fn what_was_written_is_read_and_what_was_not_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::start(dir.path(), image()).unwrap();
    attach(&journal, 1, 0);
    journal.write().unwrap();
    let written = journal.image();
    attach(&journal, 1, 1);
    drop(journal);
    let found = read(dir.path(), false).unwrap().unwrap();
    assert!(!found.torn && !found.rebooted);
    assert_eq!(found.image, written);
}

#[test]
fn many_threads_append_while_it_is_compacted_and_synced() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Arc::new(Journal::start(dir.path(), image()).unwrap());
    let threads: Vec<_> = (1..5u64)
        .map(|ino| {
            let journal = Arc::clone(&journal);
            std::thread::spawn(move || {
                for i in 0..8000 {
                    attach(&journal, ino, i);
                    journal.write().unwrap();
                    if i % 1000 == 0 {
                        journal.sync().unwrap();
                    }
                    if i % 100 == 99 {
                        let all = (ByteRange::new(0, i * 10), Version(i + 1));
                        journal.push(&Record::Flushed(Ino(ino), vec![all]));
                    }
                }
            })
        })
        .collect();
    let mut compactions = 0;
    while threads.iter().any(|t| !t.is_finished()) {
        let before = journal.out.lock().len;
        journal.tend().unwrap();
        compactions += u32::from(journal.out.lock().len < before);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    threads.into_iter().for_each(|t| t.join().unwrap());
    journal.sync().unwrap();
    journal.write().unwrap();
    assert!(compactions > 0, "never compacted");
    let found = read(dir.path(), false).unwrap().unwrap();
    assert_eq!(found.image, journal.image());
    assert!(found.image.unflushed().count() == 4 && !found.torn);
}

#[test]
fn a_full_disk_delays_records_and_loses_none() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::start(dir.path(), image()).unwrap();
    attach(&journal, 1, 0);
    // A file that cannot be written stands for the full disk.
    let good = {
        let mut out = journal.out.lock();
        let unwritable = std::fs::File::open(path_in(dir.path())).unwrap();
        std::mem::replace(&mut out.file, Arc::new(unwritable))
    };
    assert!(journal.write().is_err() && journal.sync().is_err());
    attach(&journal, 1, 1);
    assert!(journal.write().is_err());
    journal.out.lock().file = good;
    journal.write().unwrap();
    let found = read(dir.path(), false).unwrap().unwrap();
    assert_eq!(found.image, journal.image());
}

/// What was asked and has no answer is known to whoever reads the journal, also after it was replaced.
#[test]
fn what_has_no_noted_answer_is_asked_about_by_the_next_one() {
    let about = |name: &[u8]| Subjects {
        names: vec![(Ino(1), ebb_types::Name::new(name).unwrap())],
        inos: vec![Ino(5)],
        xattrs: vec![(Ino(6), b"user.a"[..].into())],
    };
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::start(dir.path(), image()).unwrap();
    let numbers: Vec<u64> = [b"a", b"b", b"c"].map(|name| journal.ask(about(name))).into();
    assert!(journal.doubts().is_empty(), "they are waited for");
    journal.answered(numbers[0]);
    journal.unanswered(numbers[1]);
    assert_eq!(journal.doubts(), [(numbers[1], about(b"b"))]);
    // The answer to the first one was not written: only that it was asked.
    let found = read(dir.path(), false).unwrap().unwrap();
    assert_eq!(found.image.asked.keys().copied().collect::<Vec<_>>(), numbers);
    journal.write().unwrap();
    for _ in 0..2 {
        let found = read(dir.path(), false).unwrap().unwrap();
        let next = Journal::start(dir.path(), found.image).unwrap();
        assert_eq!(next.doubts(), [(numbers[1], about(b"b")), (numbers[2], about(b"c"))]);
        assert!(next.ask(about(b"d")) > numbers[2]);
        assert_eq!(next.doubts().len(), 2, "the new one is waited for");
        next.answered(numbers[2] + 1);
        next.write().unwrap();
    }
}
