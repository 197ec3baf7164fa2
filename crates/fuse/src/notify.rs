//! What the kernel is told without having asked.

use crate::Device;
use crate::abi::{self, notification};
use fuser::INodeNo;
use std::io;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Tells the kernel of one mount. Calls wait for the kernel's locks: whoever holds up a request that
/// has one of them waits for itself.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<Device>);

impl Notifier {
    /// For the mount of a device.
    #[must_use]
    pub fn new(device: Arc<Device>) -> Notifier {
        Notifier(device)
    }

    /// The kernel forgets a name.
    ///
    /// # Errors
    /// When it cannot; that it did not know the name is none.
    pub fn inval_entry(&self, parent: INodeNo, name: &[u8]) -> io::Result<()> {
        let namelen = length(name)?;
        let entry = abi::NotifyInvalEntry { parent: parent.0, namelen, flags: 0 };
        self.named(notification::INVAL_ENTRY, entry.as_bytes(), name)
    }

    /// The same, and whoever watches the directory hears that the name was removed.
    ///
    /// # Errors
    /// When it cannot; that it did not know the name is none.
    pub fn delete(&self, parent: INodeNo, child: INodeNo, name: &[u8]) -> io::Result<()> {
        let namelen = length(name)?;
        let entry = abi::NotifyDelete { parent: parent.0, child: child.0, namelen, padding: 0 };
        self.named(notification::DELETE, entry.as_bytes(), name)
    }

    fn named(&self, code: i32, head: &[u8], name: &[u8]) -> io::Result<()> {
        known(self.0.notify(code, [head, &[name, b"\0"].concat()]))
    }

    /// The kernel forgets attributes and bytes of an inode; with a length of 0 all from `offset` on,
    /// with a negative offset the attributes alone.
    ///
    /// # Errors
    /// When it cannot; that it did not know the inode is none.
    pub fn inval_inode(&self, inode: INodeNo, offset: i64, len: i64) -> io::Result<()> {
        let range = abi::NotifyInvalInode { ino: inode.0, off: offset, len };
        known(self.0.notify(notification::INVAL_INODE, [range.as_bytes(), &[]]))
    }

    /// Puts bytes of a file into the page cache.
    ///
    /// # Errors
    /// When it cannot; that the kernel did not know the inode is none.
    pub fn store(&self, inode: INodeNo, offset: u64, data: &[u8]) -> io::Result<()> {
        let range = abi::NotifyStore { nodeid: inode.0, offset, size: length(data)?, padding: 0 };
        known(self.0.notify(notification::STORE, [range.as_bytes(), data]))
    }

    /// Asks for all requests again that were read and not answered, also by processes that are no
    /// more (Linux 6.9). Their numbers have the highest bit set from then on.
    ///
    /// # Errors
    /// When the kernel cannot do that.
    pub fn resend(&self) -> io::Result<()> {
        self.0.notify(notification::RESEND, [&[], &[]])
    }
}

fn length(bytes: &[u8]) -> io::Result<u32> {
    u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// The kernel may have let go by itself.
fn known(told: io::Result<()>) -> io::Result<()> {
    match told {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}
