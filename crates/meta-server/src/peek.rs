//! A look into a state directory without a service and without changing it: which names and
//! bytes of the job had not reached the backing when its last service ended.

use crate::journal;
use crate::remembered::Remembered;
use crate::state::{self, State};
use ebb_namespace::Home;
use ebb_types::{FileKind, Ino};

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

impl Remembered {
    /// What was missing on the backing when its last service ended.
    #[must_use]
    pub fn peek(&self) -> Peek {
        let state = &self.state;
        let nodes = self.nodes().map(str::to_owned).collect();
        let pending = state.ns.pending_after(None).filter_map(|ino| missing(state, ino)).collect();
        Peek { job: self.job(), nodes, pending }
    }
}

/// Not what is only due: times of a directory are no loss.
fn missing(state: &State, ino: Ino) -> Option<Pending> {
    let inode = state.ns.get(ino)?;
    let by_node = state.files.get(&ino).map(|f| f.unflushed_by_node().clone()).unwrap_or_default();
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
