//! Random operations on an overlay of a real directory, beside the same operations on another
//! real directory: every errno must be the same, and after everything was brought to the backing
//! both trees must be the same. The journal, replayed, must give the state that was there.

mod acts;
mod forgotten;
mod side_by_side;
mod unnoted;

use crate::config::Config;
use crate::core::Core;
use crate::journal::StateDir;
use crate::ops::{Call, OpResult};
use crate::sessions::{Line, Who};
use crate::state::{self, Entry, NodeRecord, State};
use acts::{Act, act, act_on, act_or_death, act_or_failure};
use acts::{component, near, populate, reference, tree};
use ebb_namespace::{Home, Namespace, Record, Under};
use ebb_types::name::PART_PREFIX;
use ebb_types::{Errno, FileKind, Incarnation, Ino, NodeId, Time};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use proptest::prelude::*;
use rustix::fs::{Mode, Timespec, Timestamps};
use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

const NODE: NodeId = NodeId(1);

/// What a flusher does before it syncs. False where the file must still be made longer.
fn take_shape(file: &std::fs::File, shape: &pb::Attr) -> bool {
    if file.metadata().unwrap().len() != shape.size {
        return false;
    }
    let shape = ebb_wire::attr_from_pb(shape).unwrap();
    let spec = |t: Time| Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() };
    let times = Timestamps { last_access: spec(shape.atime), last_modification: spec(shape.mtime) };
    std::os::unix::fs::fchown(file, Some(shape.uid), Some(shape.gid)).unwrap();
    rustix::fs::fchmod(file, Mode::from_raw_mode(shape.perm)).unwrap();
    rustix::fs::futimens(file, &times).unwrap();
    true
}

/// The overlay, with a cache that has what was written and not flushed.
struct Overlay {
    core: Arc<Core>,
    config: (PathBuf, PathBuf),
    cache: BTreeMap<Ino, Vec<u8>>,
    next: u64,
    stream: ebb_consistency::StreamId,
}

impl Overlay {
    fn open(backing: &Path, state: &Path) -> Overlay {
        let core = Arc::new(open(backing, state));
        let record = NodeRecord {
            id: NODE,
            name: "n".into(),
            incarnation: Incarnation(1),
            peer_address: String::new(),
        };
        core.commit(&mut core.state(), &[Entry::Node(record)]);
        let who = Who { node: NODE, incarnation: Incarnation(1) };
        let stream = core.desk.join(who, 0).0;
        let (out, recalls) = (mpsc::channel(1).0, mpsc::unbounded_channel().0);
        let line = Line { serial: stream, out, recalls, end: watch::channel(false).0 };
        core.sessions.attach(who, line, false);
        let config = (backing.to_owned(), state.to_owned());
        Overlay { core, config, cache: BTreeMap::new(), next: 0, stream }
    }

    async fn ask(&mut self, op: Op) -> OpResult {
        self.next += 1;
        let once = Call::is_once(&op);
        let backing = Arc::clone(&self.core.backing);
        let answer = tokio::select! {
            answer = self.call().answer(op.clone()) => Some(answer),
            () = backing.death.came.notified() => None,
        };
        if let Some(answer) = answer {
            return answer;
        }
        self.reopen();
        match self.call().answered_before(&op).filter(|_| once) {
            Some(answer) => answer,
            None => self.call().answer(op).await,
        }
    }

    fn call(&self) -> Call {
        let who = Who { node: NODE, incarnation: Incarnation(1) };
        let (core, stream, id) = (Arc::clone(&self.core), self.stream, self.next);
        Call { core, who, stream, id, beside_seats: false }
    }

    async fn ask_errno(&mut self, op: Op) -> Result<(), Errno> {
        self.ask(op).await.map(drop).map_err(|e| e.errno)
    }

    async fn lookup(&mut self, parent: u64, name: &str) -> Result<pb::Attr, Errno> {
        let op =
            Op::Lookup(pb::Lookup { parent, name: name.into(), lease: 0, ..Default::default() });
        match self.ask(op).await.map_err(|e| e.errno)? {
            Some(Body::Entry(e)) => Ok(e.attr.unwrap()),
            other => panic!("{other:?}"),
        }
    }

    /// What the kernel does: every component but the last must be a directory. The test's
    /// symbolic links are followed by neither side, as intermediate ones are refused first.
    async fn parent(&mut self, path: &[u8]) -> Result<(u64, String), Errno> {
        let (last, dirs) = path.split_last().unwrap();
        let mut at = Ino::ROOT.0;
        for c in dirs {
            let attr = self.lookup(at, &component(*c)).await?;
            if FileKind::from_mode(attr.mode) != Some(FileKind::Directory) {
                return Err(Errno::ENOTDIR);
            }
            at = attr.ino;
        }
        Ok((at, component(*last)))
    }

    async fn find(&mut self, path: &[u8]) -> Result<pb::Attr, Errno> {
        let (parent, name) = self.parent(path).await?;
        self.lookup(parent, &name).await
    }

    async fn make(&mut self, path: &[u8], mode: u32, target: &[u8]) -> Result<Ino, Errno> {
        let (parent, name) = self.parent(path).await?;
        let op = pb::Make {
            parent,
            name: name.into(),
            mode,
            target: target.into(),
            ..Default::default()
        };
        match self.ask(Op::Make(op)).await.map_err(|e| e.errno)? {
            Some(Body::Entry(e)) => Ok(Ino(e.attr.unwrap().ino)),
            other => panic!("{other:?}"),
        }
    }

    async fn write(&mut self, path: &[u8], data: &[u8]) -> Result<(), Errno> {
        let ino = match self.find(path).await {
            Ok(a) if FileKind::from_mode(a.mode) == Some(FileKind::Regular) => Ino(a.ino),
            Ok(_) => return Err(Errno::EINVAL),
            Err(Errno::ENOENT) => self.make(path, libc::S_IFREG | 0o644, b"").await?,
            Err(e) => return Err(e),
        };
        if data.is_empty() {
            return Ok(());
        }
        let ranges = vec![pb::Range { start: 0, end: data.len() as u64 }];
        self.ask_errno(Op::Attach(pb::Attach { ino: ino.0, ranges, ..Default::default() })).await?;
        let cached = self.cache.entry(ino).or_default();
        if cached.len() < data.len() {
            cached.resize(data.len(), 0);
        }
        cached[..data.len()].copy_from_slice(data);
        Ok(())
    }

    /// Flushes what it can; when others meddle with the backing, that may be less than all.
    async fn try_flush_all(&mut self) {
        for (ino, data) in std::mem::take(&mut self.cache) {
            let ranges = vec![pb::Range { start: 0, end: 1 << 40 }];
            let begin = Op::FlushBegin(pb::FlushBegin { ino: ino.0, ranges });
            let Ok(Some(Body::FlushGrant(grant))) = self.ask(begin).await else { continue };
            if grant.grant == 0 {
                continue;
            }
            let place = grant.backing.unwrap_or_default();
            let path = self.config.0.join(String::from_utf8(place.path).unwrap());
            // Others may have put a fifo there: nobody must wait for its reader.
            let mut options = std::fs::OpenOptions::new();
            let open = options.write(true).custom_flags(libc::O_NONBLOCK).open(path);
            let file = open.ok().filter(|f| f.metadata().is_ok_and(|m| m.ino() == place.ino));
            let write = |f: &std::fs::File, r: &pb::OwnedRange| {
                f.write_all_at(&data[r.start as usize..r.end as usize], r.start).is_ok()
            };
            let done = file.is_some_and(|f| grant.ranges.iter().all(|r| write(&f, r)));
            let end = pb::FlushEnd { ino: ino.0, grant: grant.grant, done, shaped: false };
            let _ = self.ask(Op::FlushEnd(end)).await;
        }
    }

    async fn begin_flushes(&mut self) {
        for ino in self.cache.keys().copied().collect::<Vec<_>>() {
            let ranges = vec![pb::Range { start: 0, end: 1 << 40 }];
            let begin = Op::FlushBegin(pb::FlushBegin { ino: ino.0, ranges });
            if let Ok(Some(Body::FlushGrant(grant))) = self.ask(begin).await
                && grant.grant != 0
            {
                let (ino, grant) = (ino.0, grant.grant);
                let end = pb::FlushEnd { ino, grant, done: false, shaped: false };
                let _ = self.ask(Op::FlushEnd(end)).await;
            }
        }
    }

    async fn flush_all(&mut self) {
        for (ino, data) in std::mem::take(&mut self.cache) {
            let ranges = vec![pb::Range { start: 0, end: 1 << 40 }];
            let begin = Op::FlushBegin(pb::FlushBegin { ino: ino.0, ranges });
            let grant = match self.ask(begin).await {
                Ok(Some(Body::FlushGrant(g))) => g,
                Err(e) if matches!(e.errno, Errno::ENOENT | Errno::ESTALE) => continue,
                other => panic!("{other:?}"),
            };
            if grant.grant == 0 {
                continue;
            }
            let backing = grant.backing.unwrap();
            let path = self.config.0.join(String::from_utf8(backing.path).unwrap());
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            assert_eq!(file.metadata().unwrap().ino(), backing.ino);
            for r in &grant.ranges {
                let (start, end) = (r.start as usize, r.end as usize);
                file.write_all_at(&data[start..end], r.start).unwrap();
            }
            // Every other one, as a flusher that may: the rest is then only the name.
            let shape = grant.shape.filter(|_| ino.0 % 2 == 0);
            let shaped = shape.is_some_and(|shape| take_shape(&file, &shape));
            let end = pb::FlushEnd { ino: ino.0, grant: grant.grant, done: true, shaped };
            match self.ask(Op::FlushEnd(end)).await {
                Ok(Some(Body::FlushDone(d))) => assert!(d.published),
                other => panic!("{other:?}"),
            }
        }
    }

    /// As a drain does: its first pass may go on where another one ended.
    async fn materialize(&mut self) -> Vec<pb::Unfinished> {
        self.pass().await;
        self.pass().await
    }

    async fn pass(&mut self) -> Vec<pb::Unfinished> {
        let mut unfinished = Vec::new();
        for _ in 0..1000 {
            match self
                .ask(Op::Materialize(pb::Materialize { limit: 3, ..Default::default() }))
                .await
            {
                Ok(Some(Body::Materialize(m))) => {
                    assert_eq!(m.failures, Vec::new());
                    unfinished.extend(m.unfinished);
                    if m.remaining == 0 {
                        return unfinished;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("materialising never ends");
    }

    fn restart(&mut self) {
        let before = snapshot(&self.core.state());
        self.close();
        assert_eq!(before, snapshot(&replay(&self.config.1)));
        self.core = Arc::new(open(&self.config.0, &self.config.1));
        assert_eq!(before, snapshot(&self.core.state()));
    }

    /// The old one gives the directory up only when it is dropped.
    fn close(&mut self) {
        self.core.journal.stop();
        drop(std::mem::replace(&mut self.core, dummy()));
    }

    /// What the service that follows a dead one does.
    fn reopen(&mut self) {
        self.close();
        self.core = Arc::new(open(&self.config.0, &self.config.1));
        assert_eq!(self.core.state().begun, None);
    }

    /// Names and inodes agree; there are no circles and no nameless inodes that nobody uses.
    fn check_links(&self) {
        let state = self.core.state();
        for inode in state.ns.inodes() {
            for link in &inode.links {
                let dentry = state.ns.dentry(link.parent, &link.name).unwrap().unwrap();
                assert_eq!(dentry.ino, inode.ino);
            }
            assert!(inode.ino == Ino::ROOT || !inode.links.is_empty(), "{inode:?}");
            assert!(!inode.is_dir() || inode.links.len() <= 1, "{inode:?}");
            assert!(state.ns.is_within(inode.ino, Ino::ROOT), "{inode:?}");
        }
    }

    fn check_invariants(&self) {
        self.check_links();
        let state = self.core.state();
        for inode in state.ns.inodes() {
            for link in &inode.links {
                let dentry = state.ns.dentry(link.parent, &link.name).unwrap().unwrap();
                assert_eq!(dentry.ino, inode.ino);
                assert_eq!(dentry.under == Under::This, inode.home == Home::Own, "{inode:?}");
                let parent = state.ns.get(link.parent).unwrap();
                assert!(inode.home != Home::Own || parent.home == Home::Own, "{inode:?}");
            }
            if let Home::Part { dir } = inode.home {
                assert!(inode.links.iter().any(|l| l.parent == dir), "{inode:?}");
                assert_eq!(state.ns.get(dir).unwrap().home, Home::Own, "{inode:?}");
            }
            if let Some(path) = state.ns.home_path(inode.ino) {
                let path = self.config.0.join(String::from_utf8(path.to_bytes()).unwrap());
                let meta = std::fs::symlink_metadata(&path).expect("what is at home is there");
                assert_eq!(Some(meta.ino()), inode.seen.map(|s| s.key.ino), "{inode:?}");
            }
        }
    }
}

/// Nothing is kept that can be forgotten, once somebody says [`Act::Forget`].
fn open(backing: &Path, state: &Path) -> Core {
    Core::open(&Config { inodes_max: 0, ..Config::new(backing, state) }).unwrap()
}

impl Call {
    async fn answer(self, op: Op) -> OpResult {
        for ino in self.core.note_use(&op) {
            let _ = self.core.find_again(ino).await;
        }
        match self.fast(op) {
            crate::ops::Fast::Done(result) => result,
            crate::ops::Fast::Slow(op) => self.slow(op).await,
            crate::ops::Fast::Lock(..) => unreachable!("no locks here"),
        }
    }
}

fn dummy() -> Arc<Core> {
    let dir = scratch();
    Arc::new(Core::open(&Config::new(dir.path(), dir.path().join("s"))).unwrap())
}

/// All but what each start of a service adds: itself, and the place of its inode numbers.
fn snapshot(state: &State) -> Vec<u8> {
    let entries = state.snapshot().filter(|entry| {
        !matches!(entry, Entry::Started(_) | Entry::Journalled(_) | Entry::Ns(Record::NextIno(_)))
    });
    state::encode_snapshot(entries)
}

fn replay(dir: &Path) -> State {
    let bodies = StateDir::take(dir).unwrap().read().unwrap().unwrap().bodies;
    let mut state = State::new(Namespace::empty());
    for body in bodies {
        for entry in state::decode(&body).unwrap() {
            state.apply(&entry).unwrap();
        }
    }
    state
}

async fn overlay(o: &mut Overlay, act: &Act) -> Result<(), Errno> {
    match act {
        Act::Mkdir(p) => o.make(p, libc::S_IFDIR | 0o755, b"").await.map(drop),
        Act::Write(p, len, fill) => o.write(p, &vec![*fill; *len as usize]).await,
        Act::Symlink(p) => o.make(p, libc::S_IFLNK | 0o777, b"x/y").await.map(drop),
        Act::Fifo(p) => o.make(p, libc::S_IFIFO | 0o640, b"").await.map(drop),
        Act::Unlink(p) | Act::Rmdir(p) => {
            let (parent, name) = o.parent(p).await?;
            let dir = matches!(act, Act::Rmdir(_));
            o.ask_errno(Op::Unlink(pb::Unlink {
                parent,
                name: name.into(),
                dir,
                ..Default::default()
            }))
            .await
        }
        Act::Rename(a, b, flags) => {
            let (parent, name) = o.parent(a).await?;
            let (new_parent, new_name) = o.parent(b).await?;
            let (name, new_name, flags) = (name.into(), new_name.into(), *flags);
            o.ask_errno(Op::Rename(pb::Rename {
                parent,
                name,
                new_parent,
                new_name,
                flags,
                ..Default::default()
            }))
            .await
        }
        Act::Link(a, b) => {
            let (parent, name) = o.parent(a).await?;
            let (new_parent, new_name) = o.parent(b).await?;
            let ino = o.lookup(parent, &name).await?.ino;
            o.ask_errno(Op::Link(pb::Link { ino, new_parent, new_name: new_name.into(), lease: 0 }))
                .await
        }
        Act::Chmod(p, mode) => {
            let ino = o.find(p).await?.ino;
            let set = pb::SetAttr { ino, mode: Some(*mode), ..Default::default() };
            o.ask_errno(Op::SetAttr(set)).await
        }
        Act::Truncate(p, len) => {
            let ino = o.find(p).await?.ino;
            let set = pb::SetAttr { ino, size: Some(u64::from(*len)), ..Default::default() };
            o.ask_errno(Op::SetAttr(set)).await?;
            if let Some(cached) = o.cache.get_mut(&Ino(ino)) {
                cached.truncate(*len as usize);
            }
            Ok(())
        }
        Act::SetXattr(p, v) => {
            let ino = o.find(p).await?.ino;
            let (name, flags) = (b"user.t".to_vec(), u32::from(*v) % 3);
            let set = pb::SetXattr { ino, name, value: vec![*v], flags };
            o.ask_errno(Op::SetXattr(set)).await
        }
        Act::List(p) => {
            if let Ok(a) = o.find(p).await {
                let _ = o.ask(Op::ReadDir(pb::ReadDir { ino: a.ino, ..Default::default() })).await;
            }
            Ok(())
        }
        Act::Flush => {
            o.flush_all().await;
            Ok(())
        }
        Act::BeginFlush => {
            o.begin_flushes().await;
            Ok(())
        }
        Act::Materialize => {
            o.materialize().await;
            Ok(())
        }
        Act::Restart => {
            o.restart();
            Ok(())
        }
        Act::Forget => {
            o.core.grow_old();
            let _ = o.core.forget_some().await;
            Ok(())
        }
        Act::Fails(act, effects) => {
            let cache = o.cache.clone();
            o.core.backing.death.fails_after(*effects);
            match **act {
                Act::Flush => o.try_flush_all().await,
                Act::Materialize => {
                    let _ = o
                        .ask(Op::Materialize(pb::Materialize { limit: 100, ..Default::default() }))
                        .await;
                }
                _ => {
                    let done = Box::pin(overlay(o, act)).await;
                    o.core.backing.death.fails_after(u32::MAX);
                    if done != Err(Errno::EDQUOT) {
                        return done;
                    }
                    o.check_invariants();
                }
            }
            o.core.backing.death.fails_after(u32::MAX);
            // What could not be flushed is still to be.
            if matches!(**act, Act::Flush) {
                let state = o.core.state();
                o.cache.extend(cache.into_iter().filter(|(ino, _)| state.is_dirty(*ino)));
                drop(state);
                o.check_invariants();
            }
            Box::pin(overlay(o, act)).await
        }
        Act::Dies(act, effects) => {
            o.core.backing.death.after(*effects);
            let done = Box::pin(overlay(o, act)).await;
            o.core.backing.death.after(u32::MAX);
            done
        }
    }
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn run(acts: &[Act]) {
    let dir = scratch();
    let (backing, other) = (dir.path().join("backing"), dir.path().join("reference"));
    populate(&backing);
    populate(&other);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut o = Overlay::open(&backing, &dir.path().join("state"));
        for (i, act) in acts.iter().enumerate() {
            let mut got = overlay(&mut o, act).await;
            if got == Err(Errno::EBUSY) {
                // Unflushed bytes of a file that has names which the job never saw.
                o.flush_all().await;
                got = overlay(&mut o, act).await;
            }
            let wanted = reference(&other, act);
            assert_eq!(got, wanted, "step {i}: {act:?}");
            o.check_invariants();
        }
        o.flush_all().await;
        assert_eq!(o.materialize().await, Vec::new());
        o.check_invariants();
        assert_eq!(o.core.state().ns.pending_len(), 0);
        o.restart();
    });
    let (mut ours, mut theirs) = (BTreeMap::new(), BTreeMap::new());
    tree(&backing, &backing, &mut ours);
    tree(&other, &other, &mut theirs);
    // What could not be removed when it became useless is known to one life of the service only.
    if acts.iter().any(|a| matches!(a, Act::Fails(..))) {
        let is_part = |path: &Path| {
            path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(PART_PREFIX))
        };
        ours.retain(|path, _| !acts.iter().any(|a| matches!(a, Act::Restart)) || !is_part(path));
    }
    assert_eq!(ours, theirs);
}

/// The same with somebody else at work on the backing: no answer is promised, but nothing may
/// break, and what the job knows must stay consistent and replayable.
fn run_meddled(acts: &[(Act, bool)]) {
    let dir = scratch();
    let backing = dir.path().join("backing");
    populate(&backing);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut o = Overlay::open(&backing, &dir.path().join("state"));
        for (act, others) in acts {
            match (act, others) {
                (
                    Act::Flush
                    | Act::BeginFlush
                    | Act::Materialize
                    | Act::Restart
                    | Act::Forget
                    | Act::List(_),
                    true,
                ) => {
                    // What was compared with the backing a moment ago is compared again.
                    o.core.forget_checked();
                }
                (_, true) => drop(reference(&backing, act)),
                (Act::Flush, false) => o.try_flush_all().await,
                (Act::Materialize, false) => {
                    let op = Op::Materialize(pb::Materialize { limit: 100, ..Default::default() });
                    let _ = o.ask(op).await;
                }
                (_, false) => drop(overlay(&mut o, act).await),
            }
            o.check_links();
        }
        o.restart();
        o.check_links();
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn others_on_the_backing_cannot_break_the_state(
        acts in prop::collection::vec((act(), prop::bool::weighted(0.4)), 1..60)
    ) {
        run_meddled(&acts);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn what_the_service_died_of_is_answered_as_if_it_had_not(
        acts in prop::collection::vec(act_or_death(), 1..60)
    ) {
        run(&acts);
    }

    #[test]
    fn the_overlay_is_what_the_kernel_would_have_made(acts in prop::collection::vec(act(), 1..60)) {
        run(&acts);
    }

    #[test]
    fn names_of_one_file_meet_again_and_again(acts in prop::collection::vec(act_on(near), 1..60)) {
        run(&acts);
    }
}

/// The names of a link that are missing come with the next drain.
#[test]
fn a_drain_that_failed_between_two_names_is_finished_by_the_next_one() {
    for after in 0..8 {
        run(&[
            Act::Rename(vec![0, 1], vec![2], 0),
            Act::Symlink(vec![2, 3]),
            Act::Link(vec![2, 3], vec![2, 0]),
            Act::Fails(Box::new(Act::Materialize), after),
        ]);
    }
}

#[test]
fn a_new_directory_changes_places_with_a_file_that_was_moved() {
    run(&[
        Act::Rename(vec![0, 3], vec![2], 0),
        Act::Write(vec![0, 3], 0, 0),
        Act::Unlink(vec![1]),
        Act::Rename(vec![0, 3], vec![0, 2], 0),
        Act::Mkdir(vec![1]),
        Act::Rename(vec![1], vec![0, 2], 2),
    ]);
}

/// A new file has taken one of an older file's names, and then takes the other one before it is on the
/// backing: the older file ends, and what hid it is taken away there.
#[test]
fn a_name_over_an_older_file_moves_over_its_other_name() {
    let known = |path: &[u8]| Act::Chmod(path.to_vec(), 0o640);
    run(&[
        known(&[1]),
        known(&[0, 3]),
        Act::Write(vec![2], 100, 1),
        Act::Rename(vec![2], vec![0, 3], 0),
        Act::Rename(vec![0, 3], vec![1], 0),
    ]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// A change of which a part failed is as one that was never asked for.
    #[test]
    fn what_failed_can_be_asked_for_again(
        acts in prop::collection::vec(act_or_failure(), 1..60)
    ) {
        run(&acts);
    }
}
