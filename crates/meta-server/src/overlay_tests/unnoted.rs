//! What a service brought to the backing, as nobody's request, and died before it noted it: the
//! next one must not take it for something that is only in the job.

use super::{Act, Overlay, component, overlay, scratch};
use ebb_types::Errno;
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// None of these does so much on the backing.
const EFFECTS: u32 = 30;

impl Overlay {
    /// Asks a service that dies after so many effects on the backing, and does not ask the next one
    /// again. True when it died.
    async fn ask_dying(&mut self, op: Op, effects: u32) -> bool {
        self.next += 1;
        let backing = Arc::clone(&self.core.backing);
        backing.death.after(effects);
        let died = tokio::select! {
            _ = self.call().answer(op) => false,
            () = backing.death.came.notified() => true,
        };
        if died {
            // What it had begun side by side ends, and lets go of the state.
            tokio::task::yield_now().await;
            self.reopen();
        }
        self.core.backing.death.after(u32::MAX);
        died
    }

    async fn begin_flush(&mut self, ino: u64) -> pb::FlushGrant {
        let ranges = vec![pb::Range { start: 0, end: 1 << 40 }];
        match self.ask(Op::FlushBegin(pb::FlushBegin { ino, ranges })).await {
            Ok(Some(Body::FlushGrant(grant))) => grant,
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(super) fn on_a_runtime<F: Future<Output = ()>>(
    work: impl FnOnce(Overlay, std::path::PathBuf) -> F,
) {
    let dir = scratch();
    let backing = dir.path().join("backing");
    std::fs::create_dir(&backing).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let overlay = Overlay::open(&backing, &dir.path().join("state"));
    runtime.block_on(work(overlay, backing));
}

/// Flushes a file with the names a, b and c by a service that dies, then takes names away.
async fn linked(mut o: Overlay, backing: &Path, effects: u32, gone: &[u8]) -> bool {
    o.write(&[0], b"content").await.unwrap();
    overlay(&mut o, &Act::Link(vec![0], vec![1])).await.unwrap();
    overlay(&mut o, &Act::Link(vec![0], vec![2])).await.unwrap();
    let ino = o.find(&[0]).await.unwrap().ino;
    let cached = std::mem::take(&mut o.cache);
    let grant = o.begin_flush(ino).await;
    let place = grant.backing.clone().unwrap_or_default();
    let part = backing.join(String::from_utf8(place.path).unwrap());
    let file = std::fs::OpenOptions::new().write(true).open(part).unwrap();
    file.write_all_at(b"content", 0).unwrap();
    let end = Op::FlushEnd(pb::FlushEnd { ino, grant: grant.grant, done: true, shaped: false });
    let died = o.ask_dying(end, effects).await;
    for name in gone {
        overlay(&mut o, &Act::Unlink(vec![*name])).await.unwrap();
        assert_eq!(o.find(&[*name]).await.err(), Some(Errno::ENOENT), "after {effects} effects");
    }
    o.core.forget_checked();
    let mut left = Vec::new();
    for name in [0, 1, 2] {
        match gone.contains(&name) {
            true => {
                assert_eq!(
                    o.find(&[name]).await.err(),
                    Some(Errno::ENOENT),
                    "after {effects} effects"
                );
            }
            false => {
                assert_eq!(o.find(&[name]).await.unwrap().ino, ino);
                left.push(component(name));
            }
        }
    }
    o.cache = cached;
    if !left.is_empty() {
        o.flush_all().await;
    }
    assert_eq!(o.materialize().await, Vec::new());
    assert_eq!(names(backing), left, "after {effects} effects");
    for name in &left {
        assert_eq!(std::fs::read(backing.join(name)).unwrap(), b"content");
    }
    died
}

#[test]
fn a_name_that_got_there_unnoted_goes_when_it_is_taken_away() {
    let mut deaths = 0;
    for gone in [&[0][..], &[1], &[2], &[0, 1], &[1, 2], &[0, 1, 2]] {
        for effects in 0..EFFECTS {
            on_a_runtime(|o, backing| async {
                let backing = backing;
                deaths += u32::from(linked(o, &backing, effects, gone).await);
            });
        }
    }
    assert!((6 * 10..6 * EFFECTS).contains(&deaths), "it died {deaths} times");
}

#[test]
fn things_without_content_that_got_there_unnoted_go_when_they_are_taken_away() {
    let mut deaths = 0;
    for act in [Act::Mkdir(vec![3]), Act::Symlink(vec![3]), Act::Fifo(vec![3])] {
        for effects in 0..EFFECTS {
            on_a_runtime(|mut o, backing| {
                let (act, deaths) = (act.clone(), &mut deaths);
                async move {
                    overlay(&mut o, &act).await.unwrap();
                    let publish =
                        Op::Materialize(pb::Materialize { limit: 1, ..Default::default() });
                    *deaths += u32::from(o.ask_dying(publish, effects).await);
                    let gone = match act {
                        Act::Mkdir(path) => Act::Rmdir(path),
                        _ => Act::Unlink(vec![3]),
                    };
                    overlay(&mut o, &gone).await.unwrap();
                    o.core.forget_checked();
                    assert_eq!(o.find(&[3]).await.err(), Some(Errno::ENOENT));
                    assert_eq!(names(&backing), Vec::<String>::new(), "after {effects} effects");
                }
            });
        }
    }
    assert!((3 * 2..3 * EFFECTS).contains(&deaths), "it died {deaths} times");
}

/// A file with several names there, of which the job has given all but one to other files, loses
/// the last one while bytes of it are unflushed: nobody can see them any more.
#[test]
fn the_last_name_goes_when_the_others_were_given_to_other_files() {
    on_a_runtime(|mut o, backing| async move {
        o.write(&[0], b"old").await.unwrap();
        overlay(&mut o, &Act::Link(vec![0], vec![1])).await.unwrap();
        o.flush_all().await;
        assert_eq!(names(&backing), ["a", "b"]);
        o.write(&[0], b"older").await.unwrap();
        o.write(&[2], b"new").await.unwrap();
        overlay(&mut o, &Act::Rename(vec![2], vec![1], 0)).await.unwrap();
        assert_eq!(overlay(&mut o, &Act::Unlink(vec![0])).await, Ok(()));
        o.cache.retain(|_, data| data == b"new");
        o.flush_all().await;
        assert_eq!(names(&backing), ["b"]);
        assert_eq!(std::fs::read(backing.join("b")).unwrap(), b"new");
    });
}

/// The service dies while it makes a place for a file's bytes, and then the file goes, or goes elsewhere, before
/// anybody tries to flush it again.
#[test]
fn a_part_file_that_was_made_unnoted_goes_with_its_file() {
    let mut deaths = 0;
    let rename = |from: &[u8], to: &[u8]| Act::Rename(from.to_vec(), to.to_vec(), 0);
    let ways: [&[Act]; 5] = [
        &[Act::Unlink(vec![0])],
        &[rename(&[1], &[0])],
        &[rename(&[0], &[3, 0]), Act::Unlink(vec![3, 0])],
        &[Act::Link(vec![0], vec![3, 1]), Act::Unlink(vec![0]), Act::Unlink(vec![3, 1])],
        &[rename(&[0], &[3, 0]), rename(&[1], &[3, 0])],
    ];
    for way in ways {
        for effects in 0..4 {
            on_a_runtime(|mut o, backing| {
                let deaths = &mut deaths;
                async move {
                    overlay(&mut o, &Act::Mkdir(vec![3])).await.unwrap();
                    assert_eq!(o.materialize().await, Vec::new());
                    o.write(&[0], b"content").await.unwrap();
                    let ino = o.find(&[0]).await.unwrap().ino;
                    let ranges = vec![pb::Range { start: 0, end: 1 << 40 }];
                    let begin = Op::FlushBegin(pb::FlushBegin { ino, ranges });
                    *deaths += u32::from(o.ask_dying(begin, effects).await);
                    o.write(&[1], b"other").await.unwrap();
                    for act in way {
                        overlay(&mut o, act).await.unwrap();
                    }
                    o.cache.retain(|_, data| data == b"other");
                    o.flush_all().await;
                    assert_eq!(o.materialize().await, Vec::new());
                    let parts = |dir: &Path| {
                        let all = names(dir);
                        all.into_iter().filter(|n| n.starts_with(".ebb")).collect::<Vec<_>>()
                    };
                    let dir = backing.join(component(3));
                    assert_eq!(parts(&backing), Vec::<String>::new(), "{way:?}, {effects}");
                    assert_eq!(parts(&dir), Vec::<String>::new(), "{way:?}, {effects}");
                }
            });
        }
    }
    assert!(deaths > 0, "it never died");
}
