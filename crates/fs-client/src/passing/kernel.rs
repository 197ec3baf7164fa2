//! The kernel's number of a cache file that is passed through.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

/// `_IOW(229, 2, uint32_t)`: gives a number back.
const BACKING_CLOSE: libc::Ioctl = 0x4004_e502;

/// The device of the mount, once there is one.
#[derive(Clone, Debug, Default)]
pub struct Device(Arc<OnceLock<OwnedFd>>);

impl Device {
    /// From now on it is known.
    pub fn set(&self, device: OwnedFd) {
        let _ = self.0.set(device);
    }

    /// Gives a number back that nothing is passed through by any more.
    pub fn give_back(&self, id: u32) {
        let Some(device) = self.0.get() else { return };
        // SAFETY: the device is open, and the kernel copies the number.
        let done = unsafe { libc::ioctl(device.as_raw_fd(), BACKING_CLOSE, &id) };
        if done != 0 {
            // The mount may be gone, and its numbers with it.
            tracing::debug!(id, error = %std::io::Error::last_os_error(), "number not given back");
        }
    }
}

/// A number that the kernel knows until this goes.
#[derive(Debug)]
pub struct KernelId {
    /// The number.
    pub raw: u32,
    device: Device,
}

impl KernelId {
    /// Takes the number over.
    #[must_use]
    pub fn new(raw: u32, device: &Device) -> KernelId {
        KernelId { raw, device: device.clone() }
    }
}

impl Drop for KernelId {
    fn drop(&mut self) {
        self.device.give_back(self.raw);
    }
}
