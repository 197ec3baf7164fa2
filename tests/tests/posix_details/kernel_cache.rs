//! What the kernel keeps of a file beside the daemon: pages for splice and mappings. After a lock they
//! are what the other node wrote. (The size that it goes by there is not covered.)

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
