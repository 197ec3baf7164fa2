//! A disk that can lose its power: ext4 on a loop device on a file that a process of its own
//! serves by FUSE and that knows which sectors were flushed. Everything of a node, or of a whole
//! job, can lie there. Needs root, loop devices and mkfs.ext4.

mod medium;
mod server;

pub use medium::{Cut, Loss, Medium, SECTOR_BYTES};
pub use server::serve;

use crate::disk::run;
use crate::environment::binary;
use crate::mounts::{self, wait_until};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Until the kernel has let go of a device.
const PATIENCE: Duration = Duration::from_secs(20);

/// A file system of its own whose power can be cut.
#[derive(Debug)]
pub struct PowerDisk {
    dir: TempDir,
    server: Child,
    device: Option<String>,
}

impl PowerDisk {
    /// A disk of so many MiB, formatted and mounted; or why there can be none on this machine.
    ///
    /// # Errors
    /// Not root, no loop devices, no mkfs.ext4.
    pub fn new(mib: u64) -> Result<PowerDisk, String> {
        let dir = TempDir::with_prefix("ebb-power-").map_err(|e| e.to_string())?;
        for name in ["raw", "mnt"] {
            fs::create_dir(dir.path().join(name)).map_err(|e| e.to_string())?;
        }
        let server = Command::new(binary("ebb-power-disk"))
            .arg(dir.path().join("raw"))
            .arg((mib << 20).to_string())
            .stdin(Stdio::null())
            .spawn()
            .map_err(|e| format!("ebb-power-disk: {e}"))?;
        let mut disk = PowerDisk { dir, server, device: None };
        if !wait_until(PATIENCE, || disk.image().exists()) {
            return Err("ebb-power-disk does not come up".to_owned());
        }
        run("mkfs.ext4", &["-q", "-m", "0", "-E", "lazy_itable_init=0", &text(&disk.image())])?;
        disk.tell("save")?;
        disk.attach()?;
        Ok(disk)
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("mnt").canonicalize().unwrap_or_else(|_| self.dir.path().join("mnt"))
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("raw/disk")
    }

    fn tell(&self, what: &str) -> Result<(), String> {
        let control = self.dir.path().join("raw/control");
        fs::write(&control, what).map_err(|e| format!("{what}: {e}"))
    }

    fn attach(&mut self) -> Result<(), String> {
        let device = run("losetup", &["--find", "--show", &text(&self.image())])?;
        self.device = Some(device.clone());
        run(
            "mount",
            &["-t", "ext4", "-o", "errors=continue,commit=1", &device, &text(&self.path())],
        )?;
        let _ = fs::remove_dir(self.path().join("lost+found"));
        Ok(())
    }

    fn detach(&mut self) -> Result<(), String> {
        let at = self.path();
        let gone = || !mounts::is_mounted(&at) || run("umount", &[&text(&at)]).is_ok();
        if !wait_until(PATIENCE, gone) {
            return Err(format!("{} cannot be unmounted: is a process left?", at.display()));
        }
        let Some(device) = self.device.take() else { return Ok(()) };
        run("losetup", &["-d", &device])?;
        // Only then nobody writes any more.
        let image = text(&self.image());
        let free = || run("losetup", &["-j", &image]).is_ok_and(|list| list.is_empty());
        wait_until(PATIENCE, free).then_some(()).ok_or(format!("{device} stays in use"))
    }

    /// From now on nothing is read or written any more: every access is an error.
    ///
    /// # Panics
    /// When the disk does not answer.
    pub fn power_off(&self) {
        self.tell("off").expect("the disk answers");
    }

    /// After [`PowerDisk::power_off`], and when no process has anything open there: some of what
    /// was not flushed is lost, as `seed` decides, and the file system is mounted again.
    ///
    /// # Panics
    /// When it cannot be unmounted or mounted.
    pub fn power_on(&mut self, cut: Cut, seed: u64) -> Loss {
        self.detach().expect("nobody uses it");
        self.tell(&format!("on {} {seed}", cut as u8)).expect("the disk answers");
        self.attach().expect("ext4 knows how to begin again");
        let said = fs::read_to_string(self.dir.path().join("raw/control")).expect("the disk");
        let mut sectors = said.split(' ').map(|n| n.parse().expect("a number of sectors"));
        let mut next = || sectors.next().expect("two numbers");
        Loss { at_stake: next(), lost: next() }
    }

    /// Empty, as it was when it was new.
    ///
    /// # Panics
    /// As above.
    pub fn reset(&mut self) {
        self.detach().expect("nobody uses it");
        self.tell("reset").expect("the disk answers");
        self.attach().expect("it was formatted");
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

impl Drop for PowerDisk {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("EBB_TEST_KEEP").is_some() {
            let dir = std::mem::replace(&mut self.dir, TempDir::new().expect("a directory"));
            return eprintln!("kept, and mounted: {}", dir.keep().display());
        }
        // Each of these may find that there is nothing to do.
        let _ = self.tell("on 1 0");
        if self.detach().is_err() {
            let _ = run("umount", &["-l", &text(&self.path())]);
        }
        let _ = run("umount", &[&text(&self.dir.path().join("raw"))]);
        if !wait_until(Duration::from_secs(5), || !matches!(self.server.try_wait(), Ok(None))) {
            let _ = self.server.kill();
            let _ = self.server.wait();
        }
        mounts::clear(self.dir.path());
    }
}
