//! The same as `halo.c`: two processes on two nodes write halves of a file and read each other's edge.
//!
//! ```text
//! halo MOUNT/file 0     and, on another node,     halo MOUNT/file 1
//! ```

use ebb::Extended;
use std::fs::OpenOptions;
use std::io::{Error, Result};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const HALF: u64 = 1 << 20;
const EDGE: u64 = 4096;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, which] = &arguments[..] else { return Err(Error::other("halo FILE 0|1")) };
    run(Path::new(path), which)
}

/// One half.
pub fn run(path: &Path, which: &str) -> Result<()> {
    let (mine, edge) = if which == "0" { (0, HALF) } else { (HALF, HALF - EDGE) };
    let (own, other) = if which == "0" { (b'a', b'b') } else { (b'b', b'a') };
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;

    file.write_all_at(&vec![own; HALF as usize], mine)?;
    file.attach(Some(mine..mine + HALF))?;
    let owner = loop {
        let owners = file.query(Some(edge..edge + EDGE))?;
        if let [owner] = &owners[..]
            && owner.range == (edge..edge + EDGE)
        {
            break owner.node;
        }
        // A program would wait for a message of the other one.
        std::thread::sleep(Duration::from_millis(50));
    };
    let mut got = vec![0; EDGE as usize];
    assert_eq!(file.read_owner(&mut got, edge, owner)?, got.len());
    assert!(got.iter().all(|b| *b == other));
    file.flush(Some(mine..mine + HALF))?;
    println!("the edge of the other half is right");
    Ok(())
}
