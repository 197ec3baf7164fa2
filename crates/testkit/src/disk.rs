//! A small disk of its own, as a backing that can be slow, full, failing or hanging: ext4 without
//! a journal (or btrfs, whose quotas hold for root too) on a loop device over an image in memory.
//! Needs root, loop devices and mkfs.ext4; to be slow also the v1 blkio controller of cgroups; to
//! fail nbdkit and nbdfuse; for a quota mkfs.btrfs. Everything goes when it is dropped.

use crate::mounts::wait_until;
use rustix::fs::{Advice, fadvise};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// The throttle of block devices for everybody, write-back included.
const THROTTLE: &str = "/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device";

/// A file system of its own.
#[derive(Debug)]
pub struct Disk {
    dir: TempDir,
    device: String,
    throttled: bool,
    /// What returns the errors, with the file that makes it do so.
    faulty: Option<(Child, PathBuf)>,
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
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

fn format_ext4(inodes: Option<u64>) -> Vec<String> {
    let options = ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0"];
    let inodes = inodes.map(|n| ["-N".to_owned(), n.to_string()]);
    options.iter().map(|&o| o.to_owned()).chain(inodes.into_iter().flatten()).collect()
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
        Disk::build(mib, false, &format_ext4(None))
    }

    /// One with room for so many files and directories only.
    ///
    /// # Errors
    /// As above.
    pub fn with_inodes(mib: u64, inodes: u64) -> Result<Disk, String> {
        Disk::build(mib, false, &format_ext4(Some(inodes)))
    }

    /// One that knows quotas: see [`Disk::limit`]. At least 110 MiB.
    ///
    /// # Errors
    /// As above, and without btrfs in the kernel or its programs.
    pub fn with_quota(mib: u64) -> Result<Disk, String> {
        let format = ["mkfs.btrfs", "-q", "-m", "single", "-d", "single"];
        let disk = Disk::build(mib, false, &format.map(str::to_owned))?;
        let (at, top) = (text(&disk.path()), text(&disk.top()));
        run("umount", &[&at])?;
        fs::create_dir(&top).map_err(|e| e.to_string())?;
        run("mount", &[&disk.device, &top])?;
        run("btrfs", &["quota", "enable", &top])?;
        run("btrfs", &["subvolume", "create", &format!("{top}/limited")])?;
        run("mount", &["-o", "subvol=limited", &disk.device, &at])?;
        Ok(disk)
    }

    /// One that fails with EIO; slower than others. Needs nbdkit and nbdfuse.
    ///
    /// # Errors
    /// As above.
    pub fn faulty(mib: u64) -> Result<Disk, String> {
        Disk::build(mib, true, &format_ext4(None))
    }

    fn build(mib: u64, faulty: bool, format: &[String]) -> Result<Disk, String> {
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
        let (program, options) = format.split_first().ok_or("no way to format it")?;
        let options = options.iter().map(String::as_str).chain([disk.device.as_str()]);
        run(program, &options.collect::<Vec<_>>())?;
        let at = text(&disk.path());
        let on_error = if program == "mkfs.ext4" { "errors=continue" } else { "rw" };
        run("mount", &["-o", on_error, &disk.device, &at])?;
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

    /// No more than so many bytes from now on, for whoever writes; none: no bound.
    ///
    /// # Panics
    /// When it is not one with a quota.
    pub fn limit(&self, bytes: Option<u64>) {
        let bytes = bytes.map_or_else(|| "none".to_owned(), |n| n.to_string());
        // From outside the subvolume, which may have no room for the note of it; 256 is the number
        // of a first subvolume.
        must("btrfs", &["qgroup", "limit", &bytes, "0/256", &text(&self.top())]);
    }

    /// Where all of a disk with a quota is mounted.
    fn top(&self) -> PathBuf {
        self.dir.path().join("top")
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

    /// From now on every write fails with EIO.
    ///
    /// # Panics
    /// When it is not one of the faulty ones.
    pub fn fail(&self) {
        // The loop device takes a write that was begun well for done well.
        // Errors of an earlier failure are told here once more.
        let _ = run("sync", &["-f", &text(&self.path())]);
        fs::write(self.switch(), "").expect("the switch");
    }

    /// Ends [`Disk::fail`].
    ///
    /// # Panics
    /// When it does not fail.
    pub fn heal(&self) {
        fs::remove_file(self.switch()).expect("the switch was on");
    }

    fn switch(&self) -> &Path {
        &self.faulty.as_ref().expect("a disk made by Disk::faulty").1
    }

    /// From now on there is no space left.
    pub fn fill(&self) {
        let free = must("df", &["--output=avail", "-B1", &text(&self.path())]);
        let free: u64 = free.lines().last().and_then(|n| n.trim().parse().ok()).expect("df");
        // Most of it at once, unless others take it at the same time; the rest in pieces that get smaller,
        // until nothing fits.
        let most = run("fallocate", &["-l", &(free / 10 * 9).to_string(), &text(&self.filler())]);
        assert!(most.as_ref().is_err_and(|e| e.contains("No space")) || most.is_ok(), "{most:?}");
        let mut rest = fs::File::create(self.filler().with_extension("rest")).expect("create");
        let mut piece = vec![0; 1 << 20];
        while !piece.is_empty() {
            if std::io::Write::write_all(&mut rest, &piece).is_err() {
                piece.truncate(piece.len() / 4);
            }
        }
    }

    /// Ends [`Disk::fill`].
    pub fn unfill(&self) {
        for file in [self.filler(), self.filler().with_extension("rest")] {
            fs::remove_file(file).expect("the filler is there");
        }
    }

    fn filler(&self) -> PathBuf {
        self.path().join(".filler")
    }

    /// From now on whoever writes hangs.
    pub fn freeze(&self) {
        must("fsfreeze", &["--freeze", &text(&self.path())]);
    }

    /// From now on whoever reads from it what the kernel does not have hangs, and whoever syncs. Only one
    /// made by [`Disk::faulty`].
    ///
    /// # Panics
    /// When it is another one.
    pub fn stall(&self) {
        must("sync", &["--file-system", &text(&self.path())]);
        let kept = [self.dir.path().join("nbd/disk"), PathBuf::from(&self.device)];
        for kept in kept {
            let file = fs::File::open(&kept).expect("the disk below the file system");
            file.sync_all().expect("sync");
            fadvise(&file, 0, None, Advice::DontNeed).expect("fadvise");
        }
        assert!(self.signal(Signal::STOP), "only a faulty disk can be stalled");
    }

    /// Ends [`Disk::stall`].
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) -> bool {
        let child = self.faulty.as_ref().map(|(child, _)| child.id());
        let pid = child.and_then(|id| Pid::from_raw(id.cast_signed()));
        pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
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
        self.go_on();
        if self.throttled {
            let _ = self.throttle(0);
        }
        if let Some((_, switch)) = &self.faulty {
            let _ = fs::remove_file(switch);
        }
        let _ = run("fsfreeze", &["--unfreeze", &text(&self.path())]);
        for mount in [text(&self.dir.path().join("mnt")), text(&self.top())] {
            if run("umount", &[&mount]).is_err() {
                let _ = run("umount", &["-l", &mount]);
            }
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
