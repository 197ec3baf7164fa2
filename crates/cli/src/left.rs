//! What is in the cache directory of a dead daemon and not on the backing, for people: the bytes
//! that its journal knows, and the names that only its embedded metadata service had.

use crate::exit::{Context, Failure};
use ebb_fs_client::config::MountConfig;
use ebb_fs_client::leftover::{self, LeftFile, Leftover};
use ebb_meta_server::{Peek, Pending, Remembered};
use ebb_types::FileKind;
use std::path::{Path, PathBuf};

/// More lines than this are summed up.
const LINES_SHOWN: usize = 50;

/// What is left.
pub struct Left {
    /// Of the node.
    pub bytes: Leftover,
    /// The dead daemon's configuration, if its journal has one.
    pub config: Option<MountConfig>,
    /// Of its embedded metadata service, when that is of the same job.
    pub service: Option<Peek>,
    /// The state of that.
    pub remembered: Option<Remembered>,
    /// Where that is.
    pub state: PathBuf,
}

impl Left {
    /// Looks into a cache directory.
    pub fn of(cache: &Path) -> Result<Left, Failure> {
        let bytes = leftover::read(cache);
        Left::with(bytes.map_err(|e| Failure::failed(e.to_string()))?, cache, None)
    }

    /// The same for a journal that was read already, and another state directory.
    pub fn with(bytes: Leftover, cache: &Path, state: Option<&Path>) -> Result<Left, Failure> {
        let config = bytes.config();
        let embedded = config.as_ref().filter(|c| c.meta.is_none()).map(|c| c.state.clone());
        let named = state.map(Path::to_owned).or(embedded);
        let state = named.unwrap_or_else(|| cache.join("meta"));
        let found = Remembered::read(&state).or_failed("state of the metadata service")?;
        // A service of another job knows other files under the same numbers.
        let remembered = found.filter(|r| bytes.is_of_job(r.job()));
        let service = remembered.as_ref().map(Remembered::peek);
        Ok(Left { bytes, config, service, remembered, state })
    }

    /// True when the service knew of other nodes that had not left the job.
    pub fn has_other_nodes(&self) -> bool {
        let own = self.config.as_ref().map(|c| c.node.as_str());
        let nodes = self.remembered.iter().flat_map(Remembered::nodes);
        nodes.into_iter().any(|node| Some(node) != own)
    }

    /// True when everything is on the backing.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
            && self.names().next().is_none()
            && self.others().next().is_none()
            && self.noted_names().is_empty()
    }

    /// Names that the node's journal tells of. Where the service's own journal is there, that counts.
    fn noted_names(&self) -> Vec<(String, FileKind)> {
        if self.service.is_some() { Vec::new() } else { self.bytes.names() }
    }

    /// Things without bytes that the backing does not have.
    pub fn names(&self) -> impl Iterator<Item = &Pending> {
        let pending = self.service.iter().flat_map(|p| &p.pending);
        pending.filter(|p| p.unflushed.is_empty() && !self.is_held(p))
    }

    /// Files of which other nodes hold bytes.
    pub fn others(&self) -> impl Iterator<Item = &Pending> {
        let own = self.config.as_ref().map(|c| c.node.as_str());
        let pending = self.service.iter().flat_map(|p| &p.pending);
        pending.filter(move |p| p.unflushed.iter().any(|(node, _)| Some(node.as_str()) != own))
    }

    fn is_held(&self, pending: &Pending) -> bool {
        let found = self.bytes.found();
        found.and_then(|f| f.image.file(pending.ino)).is_some_and(|n| !n.is_empty())
    }

    /// The backing directory, as a command line names it.
    pub fn backing(&self) -> String {
        match &self.config {
            Some(config) => config.backing.display().to_string(),
            None => "BACKING".to_owned(),
        }
    }

    /// One line each, and a sum.
    pub fn listing(&self) -> String {
        let mut lines: Vec<String> = self.bytes.files().iter().map(bytes_line).collect();
        lines.extend(self.names().map(|p| name_line(&path_of(p), p.kind)));
        lines.extend(self.noted_names().iter().map(|(path, kind)| name_line(path, *kind)));
        lines.extend(self.others().map(others_line));
        let total = lines.len();
        if total > LINES_SHOWN {
            lines.truncate(LINES_SHOWN);
            lines.push(format!("  ... and {} more", total - LINES_SHOWN));
        }
        let bytes: u64 = self.bytes.files().iter().map(LeftFile::bytes).sum();
        lines.push(format!("  in all {total} path(s), {bytes} bytes"));
        lines.join("\n")
    }
}

fn bytes_line(file: &LeftFile) -> String {
    let state = match (file.published, file.written) {
        (_, 0) => "published".to_owned(),
        (0, _) => "written, not published".to_owned(),
        (published, written) => {
            format!("{published} published, {written} written and not published")
        }
    };
    let ranges = file.ranges.len();
    let mut line =
        format!("  {}: {} bytes in {ranges} range(s) ({state})", file.path, file.bytes());
    if file.in_part > 0 {
        line.push_str(&format!("; {} more in a part file on the backing", file.in_part));
    }
    if file.shared {
        line.push_str("; other nodes had bytes of it, too");
    }
    line
}

fn path_of(pending: &Pending) -> String {
    String::from_utf8_lossy(&pending.path).into_owned()
}

fn name_line(path: &str, kind: FileKind) -> String {
    let what = match kind {
        FileKind::Directory => "directory",
        FileKind::Symlink => "symbolic link",
        FileKind::Regular => "file without unflushed bytes",
        _ => "special file",
    };
    format!("  {path}: {what}")
}

fn others_line(pending: &Pending) -> String {
    let nodes: Vec<String> =
        pending.unflushed.iter().map(|(node, bytes)| format!("{node} {bytes}")).collect();
    format!("  {}: bytes in the caches of other nodes ({})", path_of(pending), nodes.join(", "))
}
