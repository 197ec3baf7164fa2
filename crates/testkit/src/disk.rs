//! A small disk of its own, as a backing that can be slow, full, failing or hanging: ext4 without
//! a journal on a loop device over an image in memory. Needs root, loop devices and mkfs.ext4; to
//! be slow also the v1 blkio controller of cgroups. Everything goes when it is dropped.
//!
//! How it fails: one made by [`Disk::faulty`] (with the programs nbdkit and nbdfuse) answers writes
//! with EIO. Any other fails as thin provisioned storage does: its image is sparse and lies on a
//! tmpfs that can be made too small for it. Writes to new blocks then fail with ENOSPC when they
//! are written back, hence at fsync, while what was written before stays readable.

use crate::mounts::wait_until;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// The throttle of block devices for everybody, write-back included.
const THROTTLE: &str = "/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device";

/// Bytes that a failing disk still takes.
const LAST_BYTES: u64 = 1 << 20;

/// A file system of its own.
#[derive(Debug)]
pub struct Disk {
    dir: TempDir,
    device: String,
    throttled: bool,
    /// What returns the errors, with the file that makes it do so.
    faulty: Option<(Child, PathBuf)>,
}

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{program}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let error = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {}: {}", arguments.join(" "), error.trim()))
}

fn must(program: &str, arguments: &[&str]) -> String {
    run(program, arguments).unwrap_or_else(|e| panic!("{e}"))
}

impl Disk {
    /// A disk of so many MiB; or why there can be none on this machine.
    ///
    /// # Errors
    /// Not root, no loop devices, no mkfs.ext4.
    pub fn new(mib: u64) -> Result<Disk, String> {
        Disk::build(mib, false)
    }

    /// One that fails with EIO; slower than others. Needs nbdkit and nbdfuse.
    ///
    /// # Errors
    /// As above.
    pub fn faulty(mib: u64) -> Result<Disk, String> {
        Disk::build(mib, true)
    }

    fn build(mib: u64, faulty: bool) -> Result<Disk, String> {
        let dir = TempDir::with_prefix("ebb-disk-").map_err(|e| e.to_string())?;
        let pool = dir.path().join("pool");
        for made in [&pool, &dir.path().join("mnt")] {
            fs::create_dir(made).map_err(|e| e.to_string())?;
        }
        let size = format!("size={}m", mib + 64);
        run("mount", &["-t", "tmpfs", "-o", &size, "ebb-disk", &text(&pool)])?;
        let mut disk = Disk { dir, device: String::new(), throttled: false, faulty: None };
        let image = text(&pool.join("image"));
        run("truncate", &["-s", &format!("{mib}M"), &image])?;
        let image = if faulty { disk.interpose(&image)? } else { image };
        disk.device = run("losetup", &["--find", "--show", &image])?;
        let options = ["-q", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0"];
        run("mkfs.ext4", &[&options[..], &[&disk.device]].concat())?;
        let at = text(&disk.path());
        run("mount", &["-o", "errors=continue", &disk.device, &at])?;
        let _ = fs::remove_dir(disk.path().join("lost+found"));
        Ok(disk)
    }

    /// Puts something between the image and the device that can return errors; the path of it.
    fn interpose(&mut self, image: &str) -> Result<String, String> {
        let (nbd, switch) = (self.dir.path().join("nbd"), self.dir.path().join("fail"));
        fs::create_dir(&nbd).map_err(|e| e.to_string())?;
        let file = nbd.join("disk");
        let child = Command::new("nbdfuse")
            .arg(&file)
            .args(["--command", "nbdkit", "-s", "--exit-with-parent", "--filter=error", "file"])
            .args([image, "error-pwrite=EIO", "error-pwrite-rate=100%"])
            .arg(format!("error-pwrite-file={}", switch.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("nbdfuse: {e}"))?;
        self.faulty = Some((child, switch));
        match wait_until(Duration::from_secs(10), || file.exists()) {
            true => Ok(text(&file)),
            false => Err("nbdfuse does not come up".to_owned()),
        }
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("mnt").canonicalize().unwrap_or_else(|_| self.dir.path().join("mnt"))
    }

    fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    /// Takes so many bytes per second from now on; or why it cannot be slowed here.
    ///
    /// # Errors
    /// No v1 blkio controller.
    pub fn throttle(&mut self, bytes_per_second: u64) -> Result<(), String> {
        self.throttled = true;
        let number = must("lsblk", &["-ndo", "MAJ:MIN", &self.device]);
        fs::write(THROTTLE, format!("{} {bytes_per_second}", number.trim()))
            .map_err(|e| format!("{THROTTLE}: {e}"))
    }

    /// From now on writes fail: all of them with EIO, or those to new blocks.
    pub fn fail(&self) {
        if let Some((_, switch)) = &self.faulty {
            return fs::write(switch, "").expect("the switch");
        }
        must("sync", &["-f", &text(&self.path())]);
        let used = must("du", &["-B1", "-s", &text(&self.pool())]);
        let used: u64 = used.split_whitespace().next().and_then(|n| n.parse().ok()).expect("du");
        self.resize_pool(used + LAST_BYTES);
    }

    /// Ends [`Disk::fail`].
    pub fn heal(&self) {
        if let Some((_, switch)) = &self.faulty {
            return fs::remove_file(switch).expect("the switch was on");
        }
        self.resize_pool(1 << 40);
    }

    fn resize_pool(&self, bytes: u64) {
        let option = format!("remount,size={}k", bytes >> 10);
        must("mount", &["-o", &option, &text(&self.pool())]);
    }

    /// From now on there is no space left.
    pub fn fill(&self) {
        let free = must("df", &["--output=avail", "-B1", &text(&self.path())]);
        let free: u64 = free.lines().last().and_then(|n| n.trim().parse().ok()).expect("df");
        must("fallocate", &["-l", &free.to_string(), &text(&self.filler())]);
    }

    /// Ends [`Disk::fill`].
    pub fn unfill(&self) {
        fs::remove_file(self.filler()).expect("the filler is there");
    }

    fn filler(&self) -> PathBuf {
        self.path().join(".filler")
    }

    /// From now on whoever writes hangs.
    pub fn freeze(&self) {
        must("fsfreeze", &["--freeze", &text(&self.path())]);
    }

    /// Ends [`Disk::freeze`].
    pub fn thaw(&self) {
        must("fsfreeze", &["--unfreeze", &text(&self.path())]);
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Each of these may find that there is nothing to do.
        if self.throttled {
            let _ = self.throttle(0);
        }
        if let Some((_, switch)) = &self.faulty {
            let _ = fs::remove_file(switch);
        }
        let _ = run("fsfreeze", &["--unfreeze", &text(&self.path())]);
        let _ = run("mount", &["-o", "remount,size=1t", &text(&self.pool())]);
        let mount = text(&self.dir.path().join("mnt"));
        if run("umount", &[&mount]).is_err() {
            let _ = run("umount", &["-l", &mount]);
        }
        if !self.device.is_empty() {
            let _ = run("losetup", &["-d", &self.device]);
        }
        if let Some((child, _)) = &mut self.faulty {
            let _ = run("umount", &[&text(&self.dir.path().join("nbd"))]);
            if !wait_until(Duration::from_secs(5), || !matches!(child.try_wait(), Ok(None))) {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        let _ = run("umount", &["-l", &text(&self.pool())]);
    }
}
