//! Random operations over the whole namespace, on two mounts of the posix model in turn, compared
//! step by step with the same operations on a local directory: every result (errno or value), and
//! the whole tree from both mounts again and again; at the end the drained backing.
//!
//! Replay: `EBB_SEED=N cargo test … namespace`.

use ebb_testkit::Cluster;
use ebb_tests::tree;
use rand::prelude::*;
use rand_chacha::ChaCha8Rng;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const STEPS: usize = 1500;
const COMPARE_EVERY: usize = 100;

/// What a step gave, in a form that can be compared.
type Outcome = Result<String, i32>;

#[derive(Clone, Debug)]
enum Op {
    Create {
        path: String,
        exclusive: bool,
    },
    Write {
        path: String,
        offset: u64,
        len: usize,
        fill: u8,
    },
    Append {
        path: String,
        len: usize,
        fill: u8,
    },
    Read {
        path: String,
        offset: u64,
        len: usize,
    },
    Truncate {
        path: String,
        len: u64,
    },
    Mkdir {
        path: String,
    },
    Rmdir {
        path: String,
    },
    Unlink {
        path: String,
    },
    Rename {
        from: String,
        to: String,
        flags: u32,
    },
    Link {
        from: String,
        to: String,
    },
    Symlink {
        target: String,
        path: String,
    },
    Readlink {
        path: String,
    },
    Chmod {
        path: String,
        mode: u32,
    },
    Chown {
        path: String,
        uid: u32,
        gid: u32,
    },
    Utimens {
        path: String,
        sec: i64,
        nsec: i64,
    },
    Stat {
        path: String,
    },
    List {
        path: String,
    },
    SetXattr {
        path: String,
        name: u8,
        len: usize,
        flags: i32,
    },
    GetXattr {
        path: String,
        name: u8,
    },
    RemoveXattr {
        path: String,
        name: u8,
    },
    Fifo {
        path: String,
    },
    Access {
        path: String,
    },
    Punch {
        path: String,
        offset: u64,
        len: u64,
    },
    /// Open, unlink, then write and read through the handle.
    Orphan {
        path: String,
        len: usize,
        fill: u8,
    },
    /// Two handles of one file fight for a byte range (open file description locks).
    Locks {
        path: String,
        first: (u64, u64),
        second: (u64, u64),
        shared: bool,
    },
}

fn name(rng: &mut ChaCha8Rng) -> String {
    match rng.random_range(0..40) {
        0 => "n".repeat(255),
        1 => "x".repeat(256),
        2 => "with space and ünïcode".into(),
        n => format!("n{}", n % 7),
    }
}

fn path(rng: &mut ChaCha8Rng) -> String {
    let depth = rng.random_range(1..4);
    (0..depth).map(|_| name(rng)).collect::<Vec<_>>().join("/")
}

fn op(rng: &mut ChaCha8Rng) -> Op {
    let p = path(rng);
    let fill = rng.random_range(1..=255);
    let offset = rng.random_range(0..20_000);
    match rng.random_range(0..33) {
        0..=2 => Op::Create { path: p, exclusive: rng.random() },
        3..=5 => Op::Write { path: p, offset, len: rng.random_range(1..9000), fill },
        6 => Op::Append { path: p, len: rng.random_range(1..3000), fill },
        7..=8 => Op::Read { path: p, offset, len: rng.random_range(1..9000) },
        9 => Op::Truncate { path: p, len: rng.random_range(0..30_000) },
        10..=13 => Op::Mkdir { path: p },
        14 => Op::Rmdir { path: p },
        15 => Op::Unlink { path: p },
        16..=18 => Op::Rename { from: p, to: path(rng), flags: 0 },
        19 => Op::Rename { from: p, to: path(rng), flags: libc::RENAME_NOREPLACE },
        20 => Op::Rename { from: p, to: path(rng), flags: libc::RENAME_EXCHANGE },
        21 => Op::Link { from: p, to: path(rng) },
        22 => Op::Symlink { target: path(rng), path: p },
        23 => Op::Readlink { path: p },
        24 => Op::Chmod { path: p, mode: rng.random_range(0..0o10000) },
        25 => match rng.random_range(0..2) {
            0 => Op::Chown { path: p, uid: rng.random_range(0..3), gid: rng.random_range(0..3) },
            _ => Op::Utimens {
                path: p,
                sec: rng.random_range(-1000..2_000_000_000),
                nsec: rng.random_range(0..1_000_000_000),
            },
        },
        26 => Op::Stat { path: p },
        27 => Op::List { path: p },
        28 => match rng.random_range(0..3) {
            0 => Op::SetXattr {
                path: p,
                name: rng.random_range(0..3),
                len: rng.random_range(0..200),
                flags: [0, libc::XATTR_CREATE, libc::XATTR_REPLACE][rng.random_range(0..3)],
            },
            1 => Op::GetXattr { path: p, name: rng.random_range(0..3) },
            _ => Op::RemoveXattr { path: p, name: rng.random_range(0..3) },
        },
        29 => match rng.random_range(0..2) {
            0 => Op::Fifo { path: p },
            _ => Op::Access { path: p },
        },
        30 => Op::Punch { path: p, offset, len: rng.random_range(1..9000) },
        31 => Op::Orphan { path: p, len: rng.random_range(1..9000), fill },
        _ => Op::Locks {
            path: p,
            first: (rng.random_range(0..50), rng.random_range(1..50)),
            second: (rng.random_range(0..50), rng.random_range(1..50)),
            shared: rng.random(),
        },
    }
}

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("no NUL in test paths")
}

fn done(code: libc::c_int) -> Outcome {
    if code < 0 {
        Err(io::Error::last_os_error().raw_os_error().expect("errno"))
    } else {
        Ok(code.to_string())
    }
}

fn told<T>(result: io::Result<T>, show: impl FnOnce(T) -> String) -> Outcome {
    result
        .map(show)
        .map_err(|e| e.raw_os_error().unwrap_or_else(|| panic!("not from the system: {e}")))
}

fn attributes(m: &fs::Metadata) -> String {
    let (size, nlink) = if m.is_dir() { (0, 0) } else { (m.size(), m.nlink()) };
    format!("{:o} {nlink} {}:{} {size}", m.mode(), m.uid(), m.gid())
}

/// A regular file only: opening a fifo would block.
fn file(path: &Path, options: &OpenOptions) -> io::Result<File> {
    let file = options.clone().custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::from_raw_os_error(libc::EISDIR))
    }
}

fn run(root: &Path, op: &Op) -> Outcome {
    let at = |p: &str| root.join(p);
    match op {
        Op::Create { path, exclusive } => {
            let mut options = OpenOptions::new();
            options.write(true).mode(0o640).custom_flags(libc::O_NONBLOCK);
            if *exclusive {
                options.create_new(true);
            } else {
                options.create(true).truncate(false);
            }
            told(options.open(at(path)), |_| "created".into())
        }
        Op::Write { path, offset, len, fill } => {
            let written = file(&at(path), OpenOptions::new().write(true))
                .and_then(|f| f.write_all_at(&vec![*fill; *len], *offset));
            told(written, |()| "written".into())
        }
        Op::Append { path, len, fill } => {
            let written = file(&at(path), OpenOptions::new().append(true))
                .and_then(|mut f| io::Write::write_all(&mut f, &vec![*fill; *len]));
            told(written, |()| "appended".into())
        }
        Op::Read { path, offset, len } => {
            let mut buf = vec![0; *len];
            let read = file(&at(path), OpenOptions::new().read(true))
                .and_then(|f| f.read_at(&mut buf, *offset));
            told(read, |n| format!("{:?}", &buf[..n]))
        }
        Op::Truncate { path, len } => {
            let cut = file(&at(path), OpenOptions::new().write(true)).and_then(|f| f.set_len(*len));
            told(cut, |()| "cut".into())
        }
        Op::Mkdir { path } => told(fs::create_dir(at(path)), |()| "made".into()),
        Op::Rmdir { path } => told(fs::remove_dir(at(path)), |()| "removed".into()),
        Op::Unlink { path } => told(fs::remove_file(at(path)), |()| "removed".into()),
        Op::Rename { from, to, flags } => {
            let (from, to) = (c(&at(from)), c(&at(to)));
            // SAFETY: both strings live through the call.
            done(unsafe {
                libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), *flags)
            })
        }
        Op::Link { from, to } => {
            let (from, to) = (c(&at(from)), c(&at(to)));
            // SAFETY: both strings live through the call.
            done(unsafe { libc::link(from.as_ptr(), to.as_ptr()) })
        }
        Op::Symlink { target, path } => {
            told(std::os::unix::fs::symlink(target, at(path)), |()| "linked".into())
        }
        Op::Readlink { path } => told(fs::read_link(at(path)), |t| t.display().to_string()),
        Op::Chmod { path, mode } => {
            let changed = fs::set_permissions(at(path), fs::Permissions::from_mode(*mode));
            told(changed, |()| "changed".into())
        }
        Op::Chown { path, uid, gid } => {
            told(std::os::unix::fs::lchown(at(path), Some(*uid), Some(*gid)), |()| "changed".into())
        }
        Op::Utimens { path, sec, nsec } => utimens(&at(path), *sec, *nsec),
        Op::Stat { path } => told(fs::symlink_metadata(at(path)), |m| attributes(&m)),
        Op::List { path } => told(fs::read_dir(at(path)), |items| {
            let mut names: Vec<_> = items.map(|i| i.expect("entry").file_name()).collect();
            names.sort();
            format!("{names:?}")
        }),
        Op::SetXattr { path, name, len, flags } => {
            let (path, name) = (c(&at(path)), CString::new(format!("user.t{name}")).expect("name"));
            let value = vec![7u8; *len];
            // SAFETY: the pointers live through the call.
            done(unsafe {
                libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), *len, *flags)
            })
        }
        Op::GetXattr { path, name } => {
            let (path, name) = (c(&at(path)), CString::new(format!("user.t{name}")).expect("name"));
            let mut value = [0u8; 300];
            // SAFETY: the pointers live through the call.
            let n = unsafe {
                libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len())
            };
            done(n as libc::c_int)
        }
        Op::RemoveXattr { path, name } => {
            let (path, name) = (c(&at(path)), CString::new(format!("user.t{name}")).expect("name"));
            // SAFETY: the pointers live through the call.
            done(unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) })
        }
        Op::Fifo { path } => {
            let path = c(&at(path));
            // SAFETY: the string lives through the call.
            done(unsafe { libc::mkfifo(path.as_ptr(), 0o600) })
        }
        Op::Access { path } => {
            let path = c(&at(path));
            // SAFETY: the string lives through the call.
            done(unsafe { libc::access(path.as_ptr(), libc::R_OK) })
        }
        Op::Punch { path, offset, len } => punch(&at(path), *offset, *len),
        Op::Orphan { path, len, fill } => orphan(&at(path), *len, *fill),
        Op::Locks { path, first, second, shared } => locks(&at(path), *first, *second, *shared),
    }
}

fn utimens(path: &Path, sec: i64, nsec: i64) -> Outcome {
    let path_c = c(path);
    let time = libc::timespec { tv_sec: sec, tv_nsec: nsec };
    // SAFETY: the pointers live through the call.
    done(unsafe {
        libc::utimensat(
            libc::AT_FDCWD,
            path_c.as_ptr(),
            [time, time].as_ptr(),
            libc::AT_SYMLINK_NOFOLLOW,
        )
    })?;
    let meta = fs::symlink_metadata(path).expect("just changed");
    Ok(format!("{}.{} {}.{}", meta.atime(), meta.atime_nsec(), meta.mtime(), meta.mtime_nsec()))
}

fn punch(path: &Path, offset: u64, len: u64) -> Outcome {
    let file = match file(path, OpenOptions::new().write(true)) {
        Ok(file) => file,
        Err(e) => return told(Err::<(), _>(e), |()| String::new()),
    };
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: an open descriptor.
    done(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64) })
}

fn orphan(path: &Path, len: usize, fill: u8) -> Outcome {
    let file = match file(path, OpenOptions::new().read(true).write(true)) {
        Ok(file) => file,
        Err(e) => return told(Err::<(), _>(e), |()| String::new()),
    };
    told(fs::remove_file(path), |()| String::new())?;
    file.write_all_at(&vec![fill; len], 10).expect("write to an unlinked file");
    let mut got = vec![0; len];
    file.read_exact_at(&mut got, 10).expect("read of an unlinked file");
    assert_eq!(got, vec![fill; len], "content of an unlinked file");
    told(file.metadata(), |m| format!("{} {}", m.size(), m.nlink()))
}

fn locks(path: &Path, first: (u64, u64), second: (u64, u64), shared: bool) -> Outcome {
    let open = || file(path, OpenOptions::new().read(true).write(true));
    let (one, two) = match (open(), open()) {
        (Ok(one), Ok(two)) => (one, two),
        (Err(e), _) | (_, Err(e)) => return told(Err::<(), _>(e), |()| String::new()),
    };
    let set = |file: &File, range: (u64, u64), kind: i32| {
        // SAFETY: plain data.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as i16;
        lock.l_start = range.0 as i64;
        lock.l_len = range.1 as i64;
        // SAFETY: the lock lives through the call.
        done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) })
    };
    let kind = if shared { libc::F_RDLCK } else { libc::F_WRLCK };
    let flock = |file: &File, how: i32| {
        // SAFETY: an open descriptor.
        done(unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) })
    };
    let mut said = vec![set(&one, first, kind), set(&two, second, libc::F_WRLCK)];
    said.push(set(&one, (first.0, 1), libc::F_UNLCK));
    said.push(set(&two, (first.0, 1), libc::F_WRLCK));
    // flock and record locks do not see each other.
    said.push(flock(&two, libc::LOCK_EX));
    said.push(flock(&one, libc::LOCK_SH));
    Ok(format!("{said:?}"))
}

fn seed() -> u64 {
    std::env::var("EBB_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20_261_120)
}

fn steps() -> usize {
    std::env::var("EBB_STEPS").ok().and_then(|s| s.parse().ok()).unwrap_or(STEPS)
}

#[test]
fn two_mounts_agree_with_a_local_directory() {
    let seed = seed();
    println!("seed {seed} (EBB_SEED replays it)");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let cluster = Cluster::builder().nodes(2).consistency("posix").start();
    let reference = tempfile::tempdir().expect("tempdir");
    let roots: Vec<PathBuf> = cluster.nodes().iter().map(|n| n.path("")).collect();
    fs::set_permissions(reference.path(), fs::metadata(&roots[0]).expect("stat").permissions())
        .expect("chmod");
    let mut log = Vec::new();
    for step in 0..steps() {
        let op = op(&mut rng);
        let node = rng.random_range(0..roots.len());
        let want = run(reference.path(), &op);
        let got = run(&roots[node], &op);
        log.push(format!("{step}: node {node}: {op:?}"));
        assert_eq!(
            got,
            want,
            "seed {seed}, step {step}, node {node}: {op:?}\nlast steps:\n{}",
            log[log.len().saturating_sub(30)..].join("\n")
        );
        if step % COMPARE_EVERY == COMPARE_EVERY - 1 {
            for (node, root) in roots.iter().enumerate() {
                let what = format!("seed {seed}, after step {step}, node {node}");
                tree::assert_same(&what, root, reference.path());
            }
        }
        if step % 400 == 399 {
            cluster.nodes()[node].drain();
        }
    }
    for node in cluster.nodes() {
        node.drain();
    }
    tree::assert_same("the drained backing", cluster.backing(), reference.path());
}

/// The other name was made before the job, or by a service before this one: what is written by the name that
/// goes must be there by the one that stays.
#[test]
fn the_only_known_name_of_a_file_that_has_others_can_go_while_it_is_dirty() {
    for model in ["posix", "session"] {
        let cluster = Cluster::builder().nodes(1).consistency(model).flush("end").prepare();
        for (name, other) in [("a", "b"), ("c", "d")] {
            fs::write(cluster.backing().join(name), "old").expect("write");
            fs::hard_link(cluster.backing().join(name), cluster.backing().join(other))
                .expect("link");
        }
        cluster.nodes().iter().for_each(ebb_testkit::Node::mount);
        let node = cluster.node(0);
        for name in ["a", "c"] {
            let mut file = OpenOptions::new().append(true).open(node.path(name)).expect("open");
            io::Write::write_all(&mut file, b" and new").expect("write");
        }
        fs::write(node.path("over"), "another").expect("write");
        fs::remove_file(node.path("a")).expect("unlink");
        fs::rename(node.path("over"), node.path("c")).expect("rename over");
        let read = |name: &str| fs::read_to_string(node.path(name)).expect("read");
        let got = ["b", "c", "d"].map(read);
        assert_eq!(got, ["old and new", "another", "old and new"], "{model}");
        cluster.umount_all();
        assert!(!cluster.backing().join("a").exists());
        let there = fs::read_to_string(cluster.backing().join("d")).expect("read");
        assert_eq!(there, "old and new", "{model}");
    }
}
