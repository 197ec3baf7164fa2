//! Extended attributes: the service keeps them; `user.ebb.*` speak with the daemon.

use crate::node::Node;
use crate::ops::coupling::{self, COUPLE};
use ebb_types::{Attr, Errno, FileKind, Ino};

const STATE: &[u8] = b"user.ebb.state";
const COMMIT: &[u8] = b"user.ebb.commit";
const CONSISTENCY: &[u8] = b"user.ebb.consistency";

fn is_ours(name: &[u8]) -> bool {
    name.starts_with(b"user.ebb.")
}

impl Node {
    /// `getxattr`.
    pub async fn get_xattr(&self, ino: Ino, name: Vec<u8>) -> Result<Vec<u8>, Errno> {
        if crate::virtual_files::is_virtual(ino) {
            return Err(Errno::ENODATA);
        }
        match &name[..] {
            STATE => self.state_text(ino).await.map(String::into_bytes),
            COUPLE => coupling::coupling(self, ino).await.map(String::into_bytes),
            CONSISTENCY => self.model_name(ino).await.map(String::into_bytes),
            n if is_ours(n) => Err(Errno::ENODATA),
            _ => match self.meta.getxattr(ino, &name).await {
                Err(e) if self.gone(ino, e).await.is_some() => Err(Errno::ENODATA),
                got => got,
            },
        }
    }

    /// `setxattr`.
    pub async fn set_xattr(
        &self,
        ino: Ino,
        name: Vec<u8>,
        value: Vec<u8>,
        flags: u32,
    ) -> Result<(), Errno> {
        match &name[..] {
            COMMIT => match self.file(ino) {
                Some(file) => self.commit(&file).await,
                None => Ok(()),
            },
            CONSISTENCY => self.choose_model(ino, value).await,
            COUPLE => coupling::couple(self, ino, value).await,
            n if is_ours(n) => Err(Errno::EPERM),
            _ => self.meta.setxattr(ino, &name, &value, flags).await,
        }
    }

    /// Names of the attributes, each ended by a NUL.
    pub async fn list_xattr(&self, ino: Ino) -> Result<Vec<u8>, Errno> {
        if crate::virtual_files::is_virtual(ino) {
            return Ok(Vec::new());
        }
        let names = match self.meta.listxattr(ino).await {
            Err(e) if self.gone(ino, e).await.is_some() => Vec::new(),
            listed => listed?,
        };
        let shown = names.iter().filter(|n| !is_ours(n));
        Ok(shown.flat_map(|n| n.iter().copied().chain(std::iter::once(0))).collect())
    }

    /// `removexattr`.
    pub async fn remove_xattr(&self, ino: Ino, name: Vec<u8>) -> Result<(), Errno> {
        match &name[..] {
            CONSISTENCY | COUPLE => self.meta.removexattr(ino, &name).await,
            n if is_ours(n) => Err(Errno::EPERM),
            _ => self.meta.removexattr(ino, &name).await,
        }
    }

    async fn state_text(&self, ino: Ino) -> Result<String, Errno> {
        let attr = self.meta.getattr(ino).await?;
        if attr.kind != FileKind::Regular {
            return Err(Errno::ENODATA);
        }
        let Some(file) = self.file(ino) else {
            return Ok("unpublished=0 unflushed=0 clean=0".to_string());
        };
        self.collect(&file)?;
        let state = file.state.read();
        Ok(format!(
            "unpublished={} unflushed={} clean={}",
            state.view.unattached_bytes(),
            state.view.unflushed_bytes(),
            state.view.clean_bytes()
        ))
    }

    async fn model_name(&self, ino: Ino) -> Result<String, Errno> {
        let info = self.meta.describe(ino).await?;
        Ok(self.rules.of(&info.path, &info.model).name().to_string())
    }

    /// Chooses the model for everything that is made below an empty directory.
    async fn choose_model(&self, ino: Ino, value: Vec<u8>) -> Result<(), Errno> {
        let name = std::str::from_utf8(&value).map_err(|_| Errno::EINVAL)?;
        if !self.rules.knows(name) {
            return Err(Errno::EINVAL);
        }
        self.is_empty_directory(ino).await?;
        self.meta.setxattr(ino, CONSISTENCY, &value, 0).await
    }

    /// What is chosen for a directory holds for all that is made in it: there must be nothing.
    pub(crate) async fn is_empty_directory(&self, ino: Ino) -> Result<(), Errno> {
        let attr: Attr = self.meta.getattr(ino).await?;
        if attr.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        if !self.meta.readdir(ino, None, 1).await?.entries.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        Ok(())
    }
}
