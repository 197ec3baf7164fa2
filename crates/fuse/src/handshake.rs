//! The start of a session: what the kernel offers, and what of that the file system asks for.

use crate::Init;
use crate::abi;
use fuser::InitFlags;

/// The largest write and read of one request that a session takes.
pub const REQUEST_DATA_MAX: u32 = 1 << 20;

/// Requests that nobody waits for (read ahead and the like) at a time, unless more are asked for.
const BACKGROUND_REQUESTS: u16 = 16;

/// The kernel's offer, and the answer that it will get.
#[derive(Debug)]
pub struct Handshake {
    offered: InitFlags,
    asked: InitFlags,
    max_readahead: u32,
    max_write: u32,
    max_background: u16,
    max_stack_depth: u32,
}

impl Handshake {
    pub(crate) fn new(offer: &Init) -> Handshake {
        let mut handshake = Handshake {
            offered: offer.flags,
            asked: InitFlags::empty(),
            max_readahead: offer.max_readahead,
            max_write: REQUEST_DATA_MAX,
            max_background: BACKGROUND_REQUESTS,
            max_stack_depth: 0,
        };
        // Requests larger than a page, the reads among them side by side; and, where the kernel says so,
        // that the upper half of the flags counts.
        for flag in [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_BIG_WRITES,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_INIT_EXT,
        ] {
            handshake.ask_for(flag);
        }
        handshake
    }

    /// Asks for something; false when the kernel does not offer it.
    pub fn ask_for(&mut self, flags: InitFlags) -> bool {
        let is_offered = self.offered.contains(flags);
        if is_offered {
            self.asked |= flags;
        }
        is_offered
    }

    /// The largest write of one request, up to [`REQUEST_DATA_MAX`].
    pub fn set_max_write(&mut self, bytes: u32) {
        self.max_write = bytes.clamp(4096, REQUEST_DATA_MAX);
    }

    /// Requests that nobody waits for at a time.
    pub fn set_max_background(&mut self, requests: u16) {
        self.max_background = requests.max(1);
    }

    /// How many file systems may be stacked below this one where files are passed through: 1, or 2 when
    /// those are on an overlay.
    pub fn set_max_stack_depth(&mut self, depth: u32) {
        self.max_stack_depth = depth.min(2);
    }

    pub(crate) fn answer(&self) -> abi::InitOut {
        let page = u32::try_from(rustix::param::page_size()).unwrap_or(4096);
        let pages = self.max_write.max(self.max_readahead).div_ceil(page);
        let flags = self.asked.bits();
        abi::InitOut {
            major: abi::VERSION,
            minor: abi::MINOR_VERSION,
            max_readahead: self.max_readahead,
            flags: flags as u32,
            max_background: self.max_background,
            // The usual part of it: from there on the kernel takes the file system for busy.
            congestion_threshold: self.max_background - self.max_background / 4,
            max_write: self.max_write,
            time_gran: 1,
            max_pages: u16::try_from(pages).unwrap_or(u16::MAX),
            flags2: (flags >> 32) as u32,
            max_stack_depth: self.max_stack_depth,
            ..abi::InitOut::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(flags: InitFlags) -> Handshake {
        Handshake::new(&Init { major: 7, minor: 45, max_readahead: 128 << 10, flags })
    }

    #[test]
    fn nothing_is_asked_for_that_is_not_offered() {
        let mut handshake = offer(InitFlags::FUSE_ASYNC_READ | InitFlags::FUSE_POSIX_LOCKS);
        assert!(handshake.ask_for(InitFlags::FUSE_POSIX_LOCKS));
        assert!(!handshake.ask_for(InitFlags::FUSE_PASSTHROUGH));
        let answer = handshake.answer();
        assert_eq!((answer.flags, answer.flags2), (0b11, 0));
    }

    #[test]
    fn the_upper_half_counts_where_the_kernel_says_so() {
        let mut handshake = offer(InitFlags::FUSE_INIT_EXT | InitFlags::FUSE_PASSTHROUGH);
        assert!(handshake.ask_for(InitFlags::FUSE_PASSTHROUGH));
        handshake.set_max_stack_depth(7);
        handshake.set_max_background(128);
        let answer = handshake.answer();
        assert_eq!((answer.flags, answer.flags2), (1 << 30, 1 << 5));
        assert_eq!((answer.max_stack_depth, answer.congestion_threshold), (2, 96));
        assert_eq!((answer.max_write, answer.max_pages), (1 << 20, 256));
    }
}
