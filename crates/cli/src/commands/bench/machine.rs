//! What a reader must know about the machine to judge the numbers.

use crate::mounts;
use std::path::Path;

fn line_of(file: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|l| l.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Lines of a name and a value.
pub fn about(buffer: &Path) -> Vec<(String, String)> {
    let unknown = || "unknown".to_owned();
    let kernel = rustix::system::uname();
    let buffer = buffer.canonicalize().unwrap_or_else(|_| buffer.to_owned());
    let below = mounts::holding(&buffer).ok().flatten();
    let threads =
        std::thread::available_parallelism().map_or_else(|_| unknown(), |n| n.to_string());
    vec![
        ("ebb".into(), env!("CARGO_PKG_VERSION").into()),
        ("processor".into(), line_of("/proc/cpuinfo", "model name").unwrap_or_else(unknown)),
        ("hardware threads".into(), threads),
        ("memory".into(), line_of("/proc/meminfo", "MemTotal").unwrap_or_else(unknown)),
        ("kernel".into(), kernel.release().to_string_lossy().into_owned()),
        ("file system of the buffers".into(), below.map_or_else(unknown, |m| m.fstype)),
    ]
}
