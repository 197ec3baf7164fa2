//! PosixFS, CommitFS and SessionFS over libebb's primitives, beside mounts of these models: the litmus
//! programs of docs/semantics.md (those that are about bytes), run on both. What a program reads must be the
//! same, also where nothing is promised: then what is seen shows which operations publish and look up.

use ebb::layers::{CommitFs, PosixFs, SessionFs};
use ebb_testkit::{Cluster, record_lock};
use ebb_tests::content::bytes;
use ebb_tests::model::close;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const SIZE: u64 = 16 << 10;
const ROUNDS: u64 = 4;

/// The models that there are layers for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Posix,
    Commit,
    Session,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Posix, Kind::Commit, Kind::Session];

    fn name(self) -> &'static str {
        match self {
            Kind::Posix => "posix",
            Kind::Commit => "commit",
            Kind::Session => "session",
        }
    }
}

/// One open file, as the programs below use it.
enum Open {
    /// On a mount of the model.
    Mount(File),
    Posix(PosixFs),
    Commit(CommitFs),
    Session(SessionFs),
}

/// Where a program runs.
#[derive(Clone, Copy)]
enum Place {
    Mount,
    Layer(Kind),
}

impl Place {
    /// SessionFS: an open is a session_open.
    fn open(self, path: &Path) -> Open {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("open");
        match self {
            Place::Mount => Open::Mount(file),
            Place::Layer(Kind::Posix) => Open::Posix(PosixFs(file)),
            Place::Layer(Kind::Commit) => Open::Commit(CommitFs(file)),
            Place::Layer(Kind::Session) => {
                let session = SessionFs(file);
                session.session_open().expect("session_open");
                Open::Session(session)
            }
        }
    }
}

impl Open {
    fn write(&self, data: &[u8], offset: u64) {
        match self {
            Open::Mount(f) => f.write_all_at(data, offset),
            Open::Posix(f) => f.write(data, offset),
            Open::Commit(f) => f.write(data, offset),
            Open::Session(f) => f.write(data, offset),
        }
        .expect("write");
    }

    fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut got = vec![0; len as usize];
        let n = match self {
            Open::Mount(f) => f.read_at(&mut got, offset),
            Open::Posix(f) => f.read(&mut got, offset),
            Open::Commit(f) => f.read(&mut got, offset),
            Open::Session(f) => f.read(&mut got, offset),
        }
        .expect("read");
        got.truncate(n);
        got
    }

    /// fsync: a commit where that is what there is.
    fn sync(&self) {
        match self {
            Open::Mount(f) => f.sync_all().expect("fsync"),
            Open::Commit(f) => f.commit().expect("commit"),
            Open::Posix(_) | Open::Session(_) => {}
        }
    }

    /// A close is a commit, and ends a session.
    fn close(self) {
        let file = match self {
            Open::Mount(f) | Open::Posix(PosixFs(f)) => f,
            Open::Commit(f) => {
                f.commit().expect("commit");
                f.0
            }
            Open::Session(f) => {
                f.session_close().expect("session_close");
                f.0
            }
        };
        close(file).expect("close");
    }

    fn file(&self) -> &File {
        match self {
            Open::Mount(f) | Open::Posix(PosixFs(f)) => f,
            Open::Commit(CommitFs(f)) | Open::Session(SessionFs(f)) => f,
        }
    }
}

struct Scene {
    place: Place,
    a: PathBuf,
    b: PathBuf,
    round: u64,
}

impl Scene {
    fn at(&self) -> (u64, u64) {
        ((self.round * 7919) % (SIZE / 2), 1 + (self.round * 104_729) % (SIZE / 2))
    }

    fn open_a(&self) -> Open {
        self.place.open(&self.a)
    }

    fn open_b(&self) -> Open {
        self.place.open(&self.b)
    }

    fn write(&self, file: &Open) {
        let (offset, len) = self.at();
        file.write(&bytes(1, self.round, offset, len), offset);
    }

    fn read(&self, file: &Open) -> Vec<u8> {
        let (offset, len) = self.at();
        file.read(offset, len)
    }
}

/// What a program has read, in order.
type Seen = Vec<Vec<u8>>;
type Program = (&'static str, &'static [Kind], fn(&Scene) -> Seen);

/// Name, the models that promise that the last read sees what was written, and what it does.
const PROGRAMS: &[Program] = &[
    ("L1 write, read", &[Kind::Posix], |s| {
        let (a, b) = (s.open_a(), s.open_b());
        let before = s.read(&b);
        s.write(&a);
        vec![before, s.read(&a), s.read(&b)]
    }),
    ("L2 fsync, read", &[Kind::Posix, Kind::Commit], |s| {
        let (a, b) = (s.open_a(), s.open_b());
        let before = s.read(&b);
        s.write(&a);
        a.sync();
        vec![before, s.read(&b)]
    }),
    ("L3 close, open", &Kind::ALL, |s| {
        let b = s.open_b();
        let before = s.read(&b);
        b.close();
        let a = s.open_a();
        s.write(&a);
        a.close();
        vec![before, s.read(&s.open_b())]
    }),
    ("close, read without an open", &[Kind::Posix, Kind::Commit], |s| {
        let (a, b) = (s.open_a(), s.open_b());
        let before = s.read(&b);
        s.write(&a);
        a.close();
        vec![before, s.read(&b)]
    }),
    ("L5 fsync, open", &[Kind::Posix, Kind::Commit], |s| {
        let a = s.open_a();
        s.write(&a);
        a.sync();
        vec![s.read(&s.open_b())]
    }),
    ("L7 one after the other", &Kind::ALL, |s| {
        let (offset, len) = s.at();
        let (first, second) = (bytes(1, s.round, offset, len), bytes(2, s.round, offset, len));
        let a = s.open_a();
        a.write(&first, offset);
        a.close();
        let b = s.open_b();
        let seen = b.read(offset, len);
        b.write(&second[..len as usize / 2], offset);
        b.close();
        let half = len as usize / 2;
        let last = s.open_a().read(offset, len);
        // What the last read promises to see is compared as the others' is: the first node's write.
        assert_eq!(last[..half], second[..half]);
        vec![seen, [&first[..half], &last[half..]].concat()]
    }),
    ("two sessions of a reader", &Kind::ALL, |s| {
        let a = s.open_a();
        let b = s.open_b();
        let before = s.read(&b);
        s.write(&a);
        a.close();
        let old = s.read(&b);
        b.close();
        vec![before, old, s.read(&s.open_b())]
    }),
    ("who writes sees it", &[], |s| {
        let a = s.open_a();
        s.write(&a);
        let own = s.read(&a);
        a.write(&[7; 10], s.at().0 + 3);
        vec![own, s.read(&a), s.read(&s.open_b())]
    }),
];

fn run(kind: Kind) {
    let start = |model| Cluster::builder().nodes(2).consistency(model).flush("end").start();
    let (mount, base) = (start(kind.name()), start("session"));
    let mut ran = 0;
    for (n, (name, promised, program)) in PROGRAMS.iter().enumerate() {
        for round in 0..ROUNDS {
            let (first, second) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
            let on = |cluster: &Cluster, place| {
                let file = format!("{n}-{round}");
                let (a, b) = (cluster.node(first).path(&file), cluster.node(second).path(&file));
                std::fs::write(&a, vec![0; SIZE as usize]).expect("prepare");
                program(&Scene { place, a, b, round })
            };
            let there = on(&mount, Place::Mount);
            let here = on(&base, Place::Layer(kind));
            assert_eq!(here, there, "{name}, round {round}: the layer and the mount of {kind:?}");
            if promised.contains(&kind) {
                let (offset, len) =
                    ((round * 7919) % (SIZE / 2), 1 + (round * 104_729) % (SIZE / 2));
                let want = bytes(1, round, offset, len);
                assert_eq!(here.last(), Some(&want), "{name}, round {round}: promised by {kind:?}");
            }
            ran += 1;
        }
    }
    println!("{ran} programs on a layer and on a mount of {}", kind.name());
}

#[test]
fn posix_fs_is_a_mount_under_posix() {
    run(Kind::Posix);
}

#[test]
fn commit_fs_is_a_mount_under_commit() {
    run(Kind::Commit);
}

#[test]
fn session_fs_is_a_mount_under_session() {
    run(Kind::Session);
}

/// Disjoint records of two nodes at once, nothing aligned to anything (L8).
#[test]
fn disjoint_records_at_the_same_time() {
    const RECORD: u64 = 1237;
    const RECORDS: u64 = 60;
    let cluster = Cluster::builder().nodes(2).consistency("session").start();
    for (n, kind) in Kind::ALL.into_iter().enumerate() {
        let paths = [0, 1].map(|node| cluster.node(node).path(format!("f{n}")));
        std::fs::write(&paths[0], []).expect("prepare");
        let place = Place::Layer(kind);
        std::thread::scope(|threads| {
            for (who, path) in (0..).zip(&paths) {
                threads.spawn(move || {
                    let file = place.open(path);
                    for r in (who..RECORDS).step_by(2) {
                        file.write(&bytes(1 + who, 0, r * RECORD, RECORD), r * RECORD);
                    }
                    file.close();
                });
            }
        });
        let record = |r: u64| bytes(1 + r % 2, 0, r * RECORD, RECORD);
        let want: Vec<u8> = (0..RECORDS).flat_map(record).collect();
        for path in &paths {
            assert!(place.open(path).read(0, RECORDS * RECORD) == want, "{kind:?}");
        }
    }
}

/// Locks work beside the layers (L6), as everywhere.
#[test]
fn locks_beside_the_layers() {
    let cluster = Cluster::builder().nodes(2).consistency("session").start();
    let paths = [0, 1].map(|node| cluster.node(node).path("f"));
    std::fs::write(&paths[0], vec![0; 1000]).expect("prepare");
    for kind in Kind::ALL {
        let (a, b) = (Place::Layer(kind).open(&paths[0]), Place::Layer(kind).open(&paths[1]));
        let lock = |file: &Open, how| {
            record_lock(file.file(), libc::F_SETLKW, how, (0, 0)).expect("lock");
        };
        b.read(0, 1000);
        lock(&a, libc::F_WRLCK);
        a.write(&[kind as u8 + 1; 1000], 0);
        lock(&a, libc::F_UNLCK);
        lock(&b, libc::F_RDLCK);
        assert_eq!(b.read(0, 1000), [kind as u8 + 1; 1000]);
        lock(&b, libc::F_UNLCK);
    }
}
