//! The mounts of one variant: several daemons of this machine with one backing, made with this
//! same binary, and taken away when dropped, also after an error.

use super::plan::Variant;
use super::text;
use crate::exit::{Context, Failure};
use ebb_links::{Network, Port};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A directory of its own that goes when dropped.
pub struct Directory(PathBuf);

impl Directory {
    /// A new one below `base`.
    pub fn new(base: &Path, purpose: &str) -> Result<Directory, Failure> {
        let name = format!("ebb-bench-{}-{purpose}", std::process::id());
        let path = base.join(name);
        std::fs::create_dir(&path).or_failed(path.display())?;
        let path = path.canonicalize().or_failed(path.display())?;
        Ok(Directory(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Daemons with their mounts.
pub struct Job {
    /// Before the directories: the mounts must be gone first.
    mounts: Mounts,
    _buffer: Directory,
    _backing: Directory,
}

struct Mounts(Vec<PathBuf>);

impl Drop for Mounts {
    fn drop(&mut self) {
        // The first one holds the metadata service.
        for mount in self.0.iter().rev() {
            if let Err(e) = ebb(&["umount", "--no-drain", "--timeout", "30s", &text(mount)]) {
                eprintln!("ebb bench: {e}");
            }
        }
    }
}

/// Runs this binary; what it printed.
fn ebb(arguments: &[&str]) -> Result<String, Failure> {
    let exe = std::env::current_exe().or_failed("own binary")?;
    let done = Command::new(exe).args(arguments).output().or_failed("ebb")?;
    // An unmount without draining ends with 3: measured bytes are thrown away on purpose.
    let fine = done.status.success() || (arguments[0] == "umount" && done.status.code() == Some(3));
    if fine {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(Failure::failed(format!("ebb {}: {}", arguments.join(" "), said.trim())))
}

impl Job {
    /// Mounts all nodes; the first one has the metadata service.
    pub fn start(
        variant: &Variant,
        nodes: usize,
        base: &Path,
        backing: &Path,
        network: Option<&Network>,
    ) -> Result<Job, Failure> {
        let label = format!("{}-{nodes}", variant.name.replace(' ', "-"));
        let buffer = Directory::new(base, &format!("{label}-buffer"))?;
        let backing = Directory::new(backing, &format!("{label}-backing"))?;
        let mut job = Job { mounts: Mounts(Vec::new()), _buffer: buffer, _backing: backing };
        let mut meta: Option<String> = None;
        let token = text(&job._buffer.path().join("token"));
        if network.is_some() {
            ebb(&["token", &token])?;
        }
        for node in 0..nodes {
            let mount = job._buffer.path().join(format!("mount-{node}"));
            std::fs::create_dir(&mount).or_failed(mount.display())?;
            let cache = text(&job._buffer.path().join(format!("cache-{node}")));
            let name = format!("node{node}");
            let mut arguments = vec!["mount", "--node", &name, "--cache", &cache];
            arguments.extend(variant.options.iter().map(String::as_str));
            if let Some(address) = &meta {
                arguments.extend(["--meta", address]);
            }
            let (from, to) = (text(job._backing.path()), text(&mount));
            let listen = network.map(|n| format!("{}:0", n.host(Port::Node(node))));
            if let Some(listen) = &listen {
                arguments.extend(["--listen", listen, "--token-file", &token]);
            }
            arguments.extend([from.as_str(), to.as_str()]);
            match network {
                Some(network) => network
                    .inside(Port::Node(node), || ebb(&arguments))
                    .or_failed(format!("the network of {name}"))??,
                None => ebb(&arguments)?,
            };
            job.mounts.0.push(mount);
            if meta.is_none() {
                meta = Some(address_of(&to)?);
            }
        }
        Ok(job)
    }

    /// The mounts of the nodes.
    pub fn mounts(&self) -> Vec<PathBuf> {
        self.mounts.0.clone()
    }
}

fn address_of(mount: &str) -> Result<String, Failure> {
    let status = ebb(&["status", "--json", mount])?;
    let status: serde_json::Value = serde_json::from_str(&status).or_failed("ebb status")?;
    let address = status.get("meta").and_then(|m| m.as_str());
    address
        .map(str::to_owned)
        .ok_or_else(|| Failure::failed("ebb status: no address of the service"))
}
