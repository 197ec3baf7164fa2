//! Several nodes that change one file in turn, past their daemons.

use crate::content::same;
use ebb_testkit::{Cluster, Node};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Opens that went this way so far.
#[must_use]
pub fn opens(node: &Node, way: &str) -> u64 {
    node.status()["opens"][way].as_u64().unwrap_or(0)
}

/// Opens an existing file for both.
///
/// # Panics
/// When that fails.
#[must_use]
pub fn rw(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("open")
}

/// A record lock as a process on one node would take it.
///
/// # Panics
/// When it is refused.
pub fn lock(file: &File, kind: i32) {
    // SAFETY: an all-zero flock is one, and it lives for the call.
    let done = unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = kind as i16;
        libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, &lock)
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

const SPACE: u64 = 20_000;

/// Several nodes keep one file open past the daemon and change it in turn under a lock: bytes of
/// each other's blocks, zeros, cuts, mappings. Everybody sees what an array shows.
pub struct Turns<'a> {
    /// Nodes whose files are passed through.
    pub cluster: &'a Cluster,
    /// Their model, for messages.
    pub model: &'a str,
    /// Of the dice.
    pub seed: u64,
    /// Daemons are killed under it all, and others go on for them.
    pub kills: bool,
}

impl Turns<'_> {
    /// Takes so many.
    ///
    /// # Panics
    /// When somebody sees something else.
    pub fn take(&self, steps: u64) {
        let Turns { cluster, model, seed, kills } = self;
        File::create(cluster.nodes()[0].path("f")).expect("create");
        let files: Vec<File> = cluster.nodes().iter().map(|n| rw(&n.path("f"))).collect();
        let mut random = ChaCha8Rng::seed_from_u64(*seed);
        let mut oracle: Vec<u8> = Vec::new();
        for step in 0..steps {
            let who = random.random_range(0..files.len());
            let file = &files[who];
            let what = format!("EBB_SEED={seed}, {model}, step {step}, node {who}");
            self.perhaps_kill(&mut random);
            lock(file, libc::F_WRLCK);
            assert_eq!(file.metadata().expect("stat").size(), oracle.len() as u64, "{what}: size");
            let mut got = vec![0; oracle.len()];
            file.read_exact_at(&mut got, 0).expect("read");
            same(&what, &got, &oracle);
            for _ in 0..random.random_range(0..4) {
                let done = change(file, &mut oracle, &mut random);
                eprintln!("step {step}, node {who}: {done}");
                self.perhaps_kill(&mut random);
            }
            lock(file, libc::F_UNLCK);
            if random.random_ratio(1, 10) {
                // A second handle comes and goes, and must see everything as well.
                let shown = std::fs::read(cluster.nodes()[who].path("f")).expect("read");
                same(&format!("{what}, another handle"), &shown, &oracle);
            }
            if !kills && random.random_ratio(1, 20) {
                cluster.nodes()[who].drain();
            }
        }
        drop(files);
        for node in cluster.nodes() {
            let got = std::fs::read(node.path("f")).expect("read");
            same(&format!("EBB_SEED={seed}, {model}, at the end"), &got, &oracle);
            node.drain();
        }
        let got = std::fs::read(cluster.backing().join("f")).expect("read");
        same(&format!("EBB_SEED={seed}, {model}, backing"), &got, &oracle);
        if !kills {
            let passed: u64 = cluster.nodes().iter().map(|n| opens(n, "passthrough-write")).sum();
            assert!(passed > 0, "nothing was passed through");
        }
    }

    fn perhaps_kill(&self, random: &mut ChaCha8Rng) {
        if self.kills && random.random_ratio(1, 8) {
            let node = &self.cluster.nodes()[random.random_range(0..self.cluster.nodes().len())];
            // One that is not up yet is left alone.
            let waits = random.random();
            eprintln!("kill {}, waits {waits}", node.name());
            let _ = if waits { node.kill_daemon() } else { node.kill_daemon_only() };
        }
    }
}

/// Changes something; what.
fn change(file: &File, oracle: &mut Vec<u8>, random: &mut ChaCha8Rng) -> String {
    let at = random.random_range(0..SPACE);
    let most = if random.random_ratio(1, 4) { 6000 } else { 50 };
    let len = random.random_range(1..=most);
    match random.random_range(0..10) {
        0 => {
            file.set_len(at).expect("truncate");
            oracle.resize(at as usize, 0);
            format!("set_len {at}")
        }
        1 if at + len <= oracle.len() as u64 => {
            store_mapped(file, at, &vec![7; len as usize], oracle);
            format!("mapped {at}+{len}")
        }
        _ => {
            let zeros = random.random_ratio(1, 3);
            let data: Vec<u8> =
                (0..len).map(|_| if zeros { 0 } else { random.random_range(0..3) }).collect();
            file.write_all_at(&data, at).expect("write");
            put(oracle, at, &data);
            format!("write {at}+{len}")
        }
    }
}

/// The same in an array.
pub fn put(oracle: &mut Vec<u8>, at: u64, data: &[u8]) {
    let end = at as usize + data.len();
    oracle.resize(oracle.len().max(end), 0);
    oracle[at as usize..end].copy_from_slice(data);
}

/// Stores through a shared mapping.
///
/// # Panics
/// When it cannot be mapped.
pub fn store_mapped(file: &File, at: u64, data: &[u8], oracle: &mut Vec<u8>) {
    // SAFETY: the mapping is as long as the file, which nobody cuts meanwhile, and is taken away
    // before the function ends.
    unsafe {
        let len = oracle.len();
        let how = libc::PROT_READ | libc::PROT_WRITE;
        let map = libc::mmap(std::ptr::null_mut(), len, how, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let to = map.cast::<u8>().add(at as usize);
        std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
        assert_eq!(libc::munmap(map, len), 0);
    }
    put(oracle, at, data);
}
