//! What the kernel keeps of a file beside the daemon: pages for splice and mappings, and the size by
//! which it goes there. Both are what the model says.

use super::locks::{flock, set};
use super::mapped::Map;
use super::{checked, create, open};
use ebb_testkit::Cluster;
use ebb_tests::tools::wait_until;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

/// What sendfile(2) gives of the beginning of a file.
fn sent(file: &File, len: usize) -> io::Result<Vec<u8>> {
    let mut pipe = [0; 2];
    let mut at: libc::off_t = 0;
    // SAFETY: memory that lives through the calls, and descriptors that are ours.
    let (mut out, n) = unsafe {
        checked(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC))?;
        let (out, into) = (File::from_raw_fd(pipe[0]), File::from_raw_fd(pipe[1]));
        let n = libc::sendfile(into.as_raw_fd(), file.as_raw_fd(), &raw mut at, len);
        (out, checked(n as i64)?)
    };
    let mut got = vec![0; n as usize];
    out.read_exact(&mut got)?;
    Ok(got)
}

#[test]
fn sendfile_after_a_lock_gives_what_the_other_node_wrote() {
    for (model, flocks) in [("posix", true), ("posix", false), ("session", true)] {
        let cluster = Cluster::builder().nodes(2).consistency(model).start();
        drop(create(&cluster.node(0).path("f")));
        std::fs::write(cluster.node(0).path("f"), [b'a'; 1000]).expect("write");
        let a = open(&cluster.node(0).path("f"));
        assert_eq!(sent(&a, 9000).expect("sendfile"), [b'a'; 1000]);
        let b = open(&cluster.node(1).path("f"));
        b.write_all_at(&[b'b'; 1000], 0).expect("write");
        drop(b);
        let locked = match flocks {
            true => flock(&a, libc::LOCK_SH),
            false => set(&a, libc::F_RDLCK, 0, 0, false),
        };
        locked.expect("lock");
        assert_eq!(sent(&a, 9000).expect("sendfile"), [b'b'; 1000], "under {model}");
    }
}

/// The same with splice(2).
fn spliced(file: &File, len: usize) -> io::Result<Vec<u8>> {
    let mut pipe = [0; 2];
    let mut at: libc::off64_t = 0;
    // SAFETY: memory that lives through the calls, and descriptors that are ours.
    let (mut out, n) = unsafe {
        checked(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC))?;
        let (out, into) = (File::from_raw_fd(pipe[0]), File::from_raw_fd(pipe[1]));
        let to = into.as_raw_fd();
        let n = libc::splice(file.as_raw_fd(), &raw mut at, to, std::ptr::null_mut(), len, 0);
        (out, checked(n as i64)?)
    };
    let mut got = vec![0; n as usize];
    out.read_exact(&mut got)?;
    Ok(got)
}

/// What copy_file_range(2) takes over into another file of the same mount.
fn copied(file: &File, beside: &Path, len: usize) -> io::Result<Vec<u8>> {
    let into = File::create(beside)?;
    let (mut from, mut to): (libc::off64_t, libc::off64_t) = (0, 0);
    // SAFETY: both offsets live through the call.
    let n = unsafe {
        let (file, into) = (file.as_raw_fd(), into.as_raw_fd());
        libc::copy_file_range(file, &raw mut from, into, &raw mut to, len, 0)
    };
    let n = checked(n as i64)?;
    drop(into);
    let got = fs::read(beside)?;
    assert_eq!(got.len() as i64, n, "as much as was said");
    Ok(got)
}

/// Most that a file of these tests has.
const MOST: usize = 60_000;

/// One node's end of a file that two share.
struct End<'a> {
    file: File,
    beside: &'a Path,
    /// Made when the file was short.
    map: Map,
}

impl<'a> End<'a> {
    fn open(path: &Path, beside: &'a Path) -> End<'a> {
        let file = open(path);
        let map = Map::new(&file, MOST, libc::PROT_READ, libc::MAP_SHARED);
        End { file, beside, map }
    }

    /// By each of these programs alone: a stat would tell the kernel the size.
    fn sees(&self, want: &[u8], program: usize, what: &str) {
        let got = self.got(want.len(), program);
        let name = ["sendfile", "splice", "copy_file_range", "mmap", "stat"][program % PROGRAMS];
        assert!(got == want, "{what}: {name}: {} bytes for {}", got.len(), want.len());
    }

    /// The same within a moment.
    fn sees_soon(&self, want: &[u8], program: usize, what: &str) {
        wait_until(Duration::from_secs(2), what, || {
            // A load beyond the size that the kernel knows would be the end.
            self.file.metadata().expect("stat");
            self.got(want.len(), program) == want
        });
    }

    fn got(&self, len: usize, program: usize) -> Vec<u8> {
        match program % PROGRAMS {
            0 => sent(&self.file, MOST).expect("sendfile"),
            1 => spliced(&self.file, MOST).expect("splice"),
            2 => copied(&self.file, self.beside, MOST).expect("copy_file_range"),
            3 => self.map.load(0, len),
            _ => {
                let len = self.file.metadata().expect("stat").len();
                let mut got = vec![0; len as usize];
                self.file.read_exact_at(&mut got, 0).expect("read");
                got
            }
        }
    }
}

const PROGRAMS: usize = 5;

/// Writes behind each other and in place: longer by each.
fn content(round: usize) -> Vec<u8> {
    vec![b'A' + (round % 50) as u8; 1000 + round * 700]
}

/// Under posix every program of the other node sees a write when it is done, and a cut.
#[test]
fn programs_beside_the_daemon_see_writes_of_the_other_node_under_posix() {
    for path in ["daemon", "auto"] {
        let cluster =
            Cluster::builder().nodes(2).consistency("posix").option("--io-path", path).start();
        fs::write(cluster.node(0).path("f"), content(0)).expect("write");
        let beside = [0, 1].map(|n| cluster.node(n).path(format!("copy{n}")));
        let ends = [0, 1].map(|n| End::open(&cluster.node(n).path("f"), &beside[n]));
        // A file that is written past the daemon at one node is read at others without leases.
        let sees = if path == "auto" { End::sees_soon } else { End::sees };
        for round in 1..=4 * PROGRAMS {
            let (writer, reader) = (&ends[round / PROGRAMS % 2], &ends[(round / PROGRAMS + 1) % 2]);
            // Something is in the kernel.
            for program in 0..4 {
                sees(reader, &content(round - 1), program, &format!("{path} {round} before"));
            }
            writer.file.write_all_at(&content(round), 0).expect("write");
            sees(reader, &content(round), round, &format!("{path} {round}"));
            sees(writer, &content(round), round, &format!("{path} {round} writer"));
        }
        // Several changes, of which nothing was looked at in between.
        for program in 0..PROGRAMS {
            let want = content(60 + program);
            for end in (1000..want.len()).step_by(5000).chain([want.len()]) {
                ends[0].file.write_all_at(&want[..end], 0).expect("write");
            }
            sees(&ends[1], &want, program, &format!("{path} after many"));
        }
        for program in [0, 1, 2, 4] {
            let want = vec![b'a' + program as u8; 5000 - program];
            ends[0].file.set_len(0).expect("cut");
            ends[0].file.write_all_at(&want, 0).expect("write");
            sees(&ends[1], &want, program, &format!("{path} cut"));
        }
    }
}

/// Under the weak models they do when it is looked up: at an open, a lock, an fsync.
#[test]
fn programs_beside_the_daemon_see_what_was_looked_up() {
    let look_ups: [(&str, &str, &dyn Fn(&File, &Path)); 5] = [
        ("session", "open", &|_, path| drop(open(path))),
        ("session", "flock", &|file, _| assert!(flock(file, libc::LOCK_SH).is_ok())),
        ("session", "fcntl", &|file, _| assert!(set(file, libc::F_RDLCK, 0, 0, false).is_ok())),
        ("mpiio", "fsync", &|file, _| file.sync_all().expect("fsync")),
        ("commit", "nothing", &|_, _| {}),
    ];
    for (model, name, look_up) in look_ups {
        let cluster = Cluster::builder().nodes(2).consistency(model).start();
        let paths = [0, 1].map(|n| cluster.node(n).path("f"));
        fs::write(&paths[0], content(0)).expect("write");
        let beside = cluster.node(1).path("copy");
        let reader = End::open(&paths[1], &beside);
        for round in 1..=2 * PROGRAMS {
            for program in 0..4 {
                reader.sees(&content(round - 1), program, &format!("{model} {round} before"));
            }
            fs::write(&paths[0], content(round)).expect("write");
            look_up(&reader.file, &paths[1]);
            // Under session a stat goes by the open of this descriptor, too.
            reader.sees(&content(round), round, &format!("{model} {name} {round}"));
            if name == "flock" {
                flock(&reader.file, libc::LOCK_UN).expect("unlock");
            }
        }
    }
}
