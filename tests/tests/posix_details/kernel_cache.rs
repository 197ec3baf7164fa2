//! What the kernel keeps of a file beside the daemon: pages for splice and mappings. They follow the
//! model as read(2) does. (The size that it goes by there is the one of the last stat or open.)

use super::locks::{flock, set};
use super::{checked, create, open};
use ebb_testkit::Cluster;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

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

/// What splice(2) gives of the beginning of a file.
fn spliced(file: &File, len: usize) -> io::Result<Vec<u8>> {
    let mut pipe = [0; 2];
    let mut at: libc::off_t = 0;
    let mut got = vec![0; len];
    // SAFETY: memory that lives through the calls, and descriptors that are ours.
    unsafe {
        checked(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC))?;
        let (mut out, into) = (File::from_raw_fd(pipe[0]), File::from_raw_fd(pipe[1]));
        let mut done = 0;
        while done < len {
            let (from, to, null) = (file.as_raw_fd(), into.as_raw_fd(), std::ptr::null_mut());
            let n = libc::splice(from, &raw mut at, to, null, len - done, 0);
            let n = checked(n as i64)? as usize;
            if n == 0 {
                break;
            }
            out.read_exact(&mut got[done..done + n])?;
            done += n;
        }
        got.truncate(done);
    }
    Ok(got)
}

/// What copy_file_range(2) puts into `into`, read from there.
fn copied(file: &File, into: &File, len: usize) -> io::Result<Vec<u8>> {
    let (mut at, mut to): (libc::off_t, libc::off_t) = (0, 0);
    let mut done = 0;
    while done < len {
        let (from, out) = (file.as_raw_fd(), into.as_raw_fd());
        // SAFETY: memory that lives through the call.
        let n =
            unsafe { libc::copy_file_range(from, &raw mut at, out, &raw mut to, len - done, 0) };
        let n = checked(n as i64)? as usize;
        if n == 0 {
            break;
        }
        done += n;
    }
    let mut got = vec![0; done];
    into.read_exact_at(&mut got, 0)?;
    Ok(got)
}

const DROPPED: &str = "ebb_kernel_pages_dropped_total";

/// A read-only mapping of a page, looked at as often as one likes.
struct Mapped(*const u8);

impl Mapped {
    fn new(file: &File) -> Mapped {
        // SAFETY: a new mapping of an open file, taken away when this is dropped.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Mapped(at.cast())
    }

    fn first(&self) -> u8 {
        // SAFETY: the file is as long as that.
        unsafe { self.0.read_volatile() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping of this.
        unsafe { libc::munmap(self.0.cast_mut().cast(), 4096) };
    }
}

/// Under a model that shows writes at once no lock and no open is needed: B writes, A sends, and looks at
/// its mapping. Each time, with and without a close, and whichever way the opens go.
#[test]
fn sendfile_and_mappings_give_what_the_other_node_wrote() {
    for (io_path, closes) in [("daemon", false), ("daemon", true), ("auto", false)] {
        let what = format!("--io-path {io_path}, closes: {closes}");
        let cluster =
            Cluster::builder().nodes(2).consistency("posix").option("--io-path", io_path).start();
        std::fs::write(cluster.node(0).path("f"), [b'a'; 9000]).expect("write");
        let a = File::open(cluster.node(0).path("f")).expect("open");
        let mapped = Mapped::new(&a);
        assert_eq!((sent(&a, 9000).expect("sendfile"), mapped.first()), (vec![b'a'; 9000], b'a'));
        let b = open(&cluster.node(1).path("f"));
        for round in 1..=20 {
            let bytes = [b'a' + round; 9000];
            match closes {
                true => open(&cluster.node(1).path("f")).write_all_at(&bytes, 0).expect("write"),
                false => b.write_all_at(&bytes, 0).expect("write"),
            }
            assert_eq!(mapped.first(), bytes[0], "{what}: mapped, round {round}");
            assert!(sent(&a, 9000).expect("sendfile") == bytes, "{what}: sent, round {round}");
        }
        let dropped = cluster.node(0).counter(DROPPED);
        assert!(io_path == "auto" || dropped >= 20, "{what}: it was not this: {dropped}");
    }
}

/// Where fsync looks up what others have published, pages of before are gone after it.
#[test]
fn sendfile_after_an_fsync_that_looks_gives_what_was_published() {
    let cluster = Cluster::builder().nodes(2).consistency("commit").start();
    std::fs::write(cluster.node(0).path("f"), [b'a'; 9000]).expect("write");
    let a = File::open(cluster.node(0).path("f")).expect("open");
    assert_eq!(sent(&a, 9000).expect("sendfile"), [b'a'; 9000]);
    let b = open(&cluster.node(1).path("f"));
    b.write_all_at(&[b'b'; 9000], 0).expect("write");
    b.sync_all().expect("fsync");
    a.sync_all().expect("fsync");
    assert_eq!(sent(&a, 9000).expect("sendfile"), [b'b'; 9000]);
}

/// The other calls that go by the kernel's pages.
#[test]
fn splice_and_copy_file_range_give_what_the_other_node_wrote() {
    for io_path in ["daemon", "auto"] {
        let cluster =
            Cluster::builder().nodes(2).consistency("posix").option("--io-path", io_path).start();
        std::fs::write(cluster.node(0).path("f"), [b'a'; 9000]).expect("write");
        let a = File::open(cluster.node(0).path("f")).expect("open");
        let copy = create(&cluster.node(0).path("copy"));
        let before = [b'a'; 9000];
        assert!(spliced(&a, 9000).expect("splice") == before, "{io_path}: at first");
        assert!(copied(&a, &copy, 9000).expect("copy_file_range") == before, "{io_path}: at first");
        let b = open(&cluster.node(1).path("f"));
        for round in 1..=20 {
            let bytes = [b'a' + round; 9000];
            b.write_all_at(&bytes, 0).expect("write");
            // Each of them is the first one to look in every other round.
            let both: [(&str, &dyn Fn() -> io::Result<Vec<u8>>); 2] = [
                ("splice", &|| spliced(&a, 9000)),
                ("copy_file_range", &|| copied(&a, &copy, 9000)),
            ];
            for n in 0..2 {
                let (call, gives) = both[(n + usize::from(round)) % 2];
                let got = gives().unwrap_or_else(|e| panic!("{io_path}: {call}: {e}"));
                assert!(got == bytes, "{io_path}: {call}, round {round}: {:?}", got.first());
            }
        }
        let dropped = cluster.node(0).counter(DROPPED);
        println!("{io_path}: {dropped} times pages were dropped");
        assert!(io_path == "auto" || dropped >= 20, "{io_path}: it was not this: {dropped}");
    }
}
