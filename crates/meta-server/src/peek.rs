//! A look into a state directory without a service and without changing it: which names and
//! bytes of the job had not reached the backing when its last service ended.

use crate::journal::{self, JournalError, Read, StateDir};
use crate::state::{self, State};
use ebb_namespace::Home;
use ebb_types::{FileKind, Ino};
use std::path::Path;

/// What a state directory tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peek {
    /// The job.
    pub job: u64,
    /// Names of its nodes.
    pub nodes: Vec<String>,
    /// What is missing on the backing, in order of inode numbers.
    pub pending: Vec<Pending>,
}

/// Something that is missing on the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// One of its paths in the mount.
    pub path: Vec<u8>,
    /// Its type.
    pub kind: FileKind,
    /// Its inode number.
    pub ino: Ino,
    /// Bytes that only the caches of nodes hold: name of the node and number.
    pub unflushed: Vec<(String, u64)>,
}

/// Looks into a state directory; `None` when there is no journal in it.
pub fn peek(state_dir: &Path) -> Result<Option<Peek>, JournalError> {
    if !state_dir.join("journal").exists() {
        return Ok(None);
    }
    let dir = StateDir::take(state_dir)?;
    let Some(Read { job, bodies, .. }) = dir.read()? else { return Ok(None) };
    let path = state_dir.join("journal");
    let state = state::replay(&bodies).map_err(|what| JournalError::Header { path, what })?;
    let nodes = state.nodes.values().map(|n| n.name.clone()).collect();
    let pending = state.ns.pending_after(None).filter_map(|ino| missing(&state, ino)).collect();
    Ok(Some(Peek { job, nodes, pending }))
}

/// Not what is only due: times of a directory are no loss.
fn missing(state: &State, ino: Ino) -> Option<Pending> {
    let inode = state.ns.get(ino)?;
    let by_node = state.files.get(&ino).map(|f| f.unflushed_by_node()).unwrap_or_default();
    if inode.home == Home::Own && by_node.is_empty() {
        return None;
    }
    let name = |node| match state.nodes.get(&node) {
        Some(n) => n.name.clone(),
        None => format!("node {node} (gone)"),
    };
    Some(Pending {
        path: state.ns.path(ino)?.to_bytes(),
        kind: inode.kind,
        ino,
        unflushed: by_node.into_iter().map(|(node, bytes)| (name(node), bytes)).collect(),
    })
}

/// How many inodes the bytes of a journal lead to, or why they are not believed.
pub fn judge(bytes: &[u8]) -> Result<usize, String> {
    let read = journal::judge(bytes).map_err(|e| e.to_string())?;
    state::replay(&read.bodies).map(|state| state.ns.len())
}
