//! A directory tree grown from a seed: nested directories, files of many sizes, symbolic and
//! hard links, execute bits and old times. The same seed grows the same tree anywhere.

use crate::content::bytes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Grows `files` files below `root`.
pub fn grow(root: &Path, seed: u64, files: usize) -> io::Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut dirs = vec![PathBuf::new()];
    let mut made: Vec<PathBuf> = Vec::new();
    for n in 0..files {
        if rng.random_range(0..12) == 0 {
            let dir = dirs[rng.random_range(0..dirs.len())].join(format!("dir {n}"));
            fs::create_dir(root.join(&dir))?;
            dirs.push(dir);
        }
        let path = dirs[rng.random_range(0..dirs.len())].join(format!("file-{n}.dat"));
        leaf(root, &path, &made, n as u64, &mut rng)?;
        made.push(path);
    }
    Ok(())
}

fn leaf(
    root: &Path,
    path: &Path,
    made: &[PathBuf],
    n: u64,
    rng: &mut ChaCha8Rng,
) -> io::Result<()> {
    let at = root.join(path);
    match rng.random_range(0..20) {
        0 => symlink(format!("../target of {n}"), at),
        1 if !made.is_empty() => {
            let old = root.join(&made[rng.random_range(0..made.len())]);
            fs::hard_link(old, at)
        }
        _ => {
            let len = match rng.random_range(0..10) {
                0 => 0,
                1 => rng.random_range(100_000..400_000),
                _ => rng.random_range(1..12_000),
            };
            fs::write(&at, bytes(7, n, 0, len))?;
            let mode = [0o644, 0o600, 0o755, 0o444][rng.random_range(0..4)];
            fs::set_permissions(&at, Permissions::from_mode(mode))?;
            let age = Duration::new(rng.random_range(1..1_000_000_000), n as u32 * 1013);
            fs::File::open(&at)?.set_modified(SystemTime::UNIX_EPOCH + age)
        }
    }
}
