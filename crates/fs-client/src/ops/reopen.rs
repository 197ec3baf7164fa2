//! Going on with the files that a dead daemon of this mount had open: the kernel still holds their
//! handles, and the service still knows that they are open here.

use crate::file::CachedFile;
use crate::handles::OpenFile;
use crate::node::Node;
use crate::ops::open::Again;
use crate::read_ahead::ReadAhead;
use ebb_consistency::{IoPath, Reason};
use ebb_handover::{Inheritance, Opened, Placed};
use ebb_locks::Mutex;
use ebb_meta_client::Wish;
use ebb_node_journal::Image;
use ebb_types::{Errno, Ino, Version};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Files asked for at once.
const STEP: usize = 128;

impl Node {
    /// Opens them again; how many handles there are.
    pub(crate) async fn reopen(self: &Arc<Self>, opened: &[Opened]) -> Result<usize, Errno> {
        let mut files: BTreeMap<Ino, Vec<Opened>> = BTreeMap::new();
        for handle in opened {
            files.entry(handle.ino).or_default().push(handle.clone());
        }
        let files: Vec<_> = files.into_iter().collect();
        let mut count = 0;
        for step in files.chunks(STEP) {
            let mut asked = tokio::task::JoinSet::new();
            for (ino, handles) in step.iter().cloned() {
                let node = Arc::clone(self);
                asked.spawn(async move { node.reopen_file(ino, handles).await });
            }
            while let Some(done) = asked.join_next().await {
                count += done.map_err(|_| Errno::EIO)??;
            }
        }
        Ok(count)
    }

    async fn reopen_file(&self, ino: Ino, handles: Vec<Opened>) -> Result<usize, Errno> {
        let file = self.file_or_new(ino, self.rules.job());
        match self.open_once_more(&file).await {
            Ok(()) => {}
            // What was open is no more: the service has lost it, or given it up.
            Err(e @ (Errno::ENOENT | Errno::ESTALE | Errno::EISDIR)) => {
                tracing::error!(%ino, error = %e, "an open file is gone");
                handles.iter().for_each(|h| self.handles.forget(h.fh));
                return Ok(0);
            }
            Err(e) => return Err(e),
        }
        file.state.write().opens += handles.len() as u32 - 1;
        file.inherit_locks(&handles);
        let count = handles.len();
        let coupled = file.state.read().coupled;
        for handle in handles {
            if coupled {
                let writes = handle.access.is_none_or(|access| access.writes());
                self.counted.begins(ino, handle.request, writes);
                self.counted.is_told(ino, handle.request, true);
            }
            let open = OpenFile {
                fh: handle.fh,
                file: Arc::clone(&file),
                path: IoPath::Daemon(Reason::SwitchedOff),
                access: handle.access,
                // A mapping that was made meanwhile is not known of.
                mappable: Some(Arc::clone(&file.mappable)),
                read_ahead: Mutex::new(ReadAhead::default()),
                couple: if coupled { handle.request } else { 0 },
                closed_well: AtomicBool::new(false),
                killed: AtomicBool::new(false),
                told: AtomicBool::new(false),
            };
            self.handles.adopt(handle.request, open);
        }
        Ok(count)
    }

    async fn open_once_more(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        let mut again = Again::within(self.deadline());
        loop {
            let opened = self.meta.open(file.ino, false, false, Version::ZERO, Wish::No).await?;
            if self.take_opened(file, opened, false, None).await? {
                self.kept_backing(file);
                return Ok(());
            }
            again.pause().await?;
        }
    }
}

/// Where unanswered appends went: those whose bytes the next daemon has. What of an append was
/// not noted did not happen; it takes its place anew. Those that were sent to other nodes stay doubtful.
pub(crate) fn certain(left: &Inheritance, image: &Image) -> HashMap<u64, Placed> {
    let mut last: HashMap<u64, Placed> = HashMap::new();
    // A later try of the same request counts.
    last.extend(left.placed.iter().map(|p| (p.request, *p)));
    last.retain(|_, p| {
        if p.is_sent_on() {
            return true;
        }
        let held = image.file(p.ino).map(|n| n.held_in(p.range)).unwrap_or_default();
        !p.range.is_empty() && held.iter().map(|(r, _)| r.len()).sum::<u64>() == p.range.len()
    });
    last
}
