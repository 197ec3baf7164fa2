//! A backing that fails on purpose, for tests: it wraps another one and adds errors, short
//! writes, delays, silent damage and hangs, drawn from a seed.

use crate::error::{BackendError, Operation};
use crate::paths::shown;
use crate::{Access, Backend, BackingFile, Identity, Space};
use ebb_locks::{Condvar, Mutex};
use ebb_types::{Attr, ByteRange, Errno};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Shares (0.0 to 1.0) of the operations that get each fault.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Opens, reads, writes and syncs that answer EIO.
    pub eio: f64,
    /// Writes that answer ENOSPC.
    pub enospc: f64,
    /// Reads and writes that move only a part.
    pub short: f64,
    /// Writes that succeed but store one wrong byte.
    pub damage: f64,
    /// Operations that take `delay_for` longer.
    pub delay: f64,
    /// How long a delayed operation takes.
    pub delay_for: Duration,
}

/// A backing with faults. None until [`Faulty::set`].
pub struct Faulty {
    inner: Arc<dyn Backend>,
    dice: Arc<Dice>,
}

/// Seeded decisions, shared by a backing and its open files.
struct Dice {
    state: AtomicU64,
    injected: AtomicU64,
    faults: Mutex<Faults>,
    /// Paths that hang, when any do. Held for no longer than a look.
    hang: Mutex<Hang>,
    released: Condvar,
}

#[derive(Default)]
struct Hang {
    /// Operations on paths that contain this hang; empty bytes match all.
    paths: Option<Vec<u8>>,
    waiting: usize,
}

impl Faulty {
    /// Wraps `inner`; the same seed and order of operations meet the same faults.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>, seed: u64) -> Arc<Faulty> {
        Arc::new(Faulty {
            inner,
            dice: Arc::new(Dice {
                state: AtomicU64::new(seed),
                injected: AtomicU64::new(0),
                faults: Mutex::new(Faults::default()),
                hang: Mutex::new(Hang::default()),
                released: Condvar::new(),
            }),
        })
    }

    /// Faults from now on; the default is none.
    pub fn set(&self, faults: Faults) {
        *self.dice.faults.lock() = faults;
    }

    /// From now on operations on paths that contain `part` hang until [`Faulty::release`].
    pub fn hang(&self, part: &[u8]) {
        self.dice.hang.lock().paths = Some(part.to_vec());
    }

    /// Lets hanging operations go on, and new ones pass.
    pub fn release(&self) {
        self.dice.hang.lock().paths = None;
        self.dice.released.notify_all();
    }

    /// Operations that hang right now.
    #[must_use]
    pub fn hanging(&self) -> usize {
        self.dice.hang.lock().waiting
    }

    /// Faults given so far (hangs not counted).
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.dice.injected.load(Ordering::Relaxed)
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.release();
    }
}

impl Dice {
    /// The next number of the sequence (splitmix64).
    fn roll(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.state.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn hits(&self, share: f64) -> bool {
        let hit = share > 0.0 && ((self.roll() >> 11) as f64 / (1u64 << 53) as f64) < share;
        if hit {
            self.injected.fetch_add(1, Ordering::Relaxed);
        }
        hit
    }

    /// What comes before every operation: hang, delay, then perhaps an error.
    fn before(&self, operation: Operation, path: &[u8]) -> Result<Faults, BackendError> {
        self.wait_while_hung(path);
        let faults = *self.faults.lock();
        if self.hits(faults.delay) {
            std::thread::sleep(faults.delay_for);
        }
        let errno = if self.hits(faults.eio) {
            Errno::EIO
        } else if operation == Operation::Write && self.hits(faults.enospc) {
            Errno::ENOSPC
        } else {
            return Ok(faults);
        };
        Err(BackendError::Io { operation, path: shown(path), errno })
    }

    fn wait_while_hung(&self, path: &[u8]) {
        let mut hang = self.hang.lock();
        hang.waiting += 1;
        while hang.paths.as_ref().is_some_and(|part| contains(path, part)) {
            self.released.wait(&mut hang);
        }
        hang.waiting -= 1;
    }

    fn shortened(&self, faults: &Faults, len: usize) -> usize {
        if len > 1 && self.hits(faults.short) { 1 + self.roll() as usize % (len - 1) } else { len }
    }
}

fn contains(path: &[u8], part: &[u8]) -> bool {
    part.is_empty() || path.windows(part.len()).any(|w| w == part)
}

impl Backend for Faulty {
    fn open(
        &self,
        path: &[u8],
        ino: u64,
        access: Access,
    ) -> Result<Arc<dyn BackingFile>, BackendError> {
        self.dice.before(Operation::Open, path)?;
        let inner = self.inner.open(path, ino, access)?;
        Ok(Arc::new(FaultyFile { inner, dice: Arc::clone(&self.dice), path: path.to_vec() }))
    }

    fn identity(&self, path: &[u8]) -> Result<Identity, BackendError> {
        self.dice.wait_while_hung(path);
        self.inner.identity(path)
    }

    fn space(&self) -> Result<Space, BackendError> {
        self.inner.space()
    }

    fn stripe_size(&self) -> Option<u32> {
        self.inner.stripe_size()
    }
}

struct FaultyFile {
    inner: Arc<dyn BackingFile>,
    dice: Arc<Dice>,
    path: Vec<u8>,
}

impl BackingFile for FaultyFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, BackendError> {
        let faults = self.dice.before(Operation::Read, &self.path)?;
        let len = self.dice.shortened(&faults, buf.len());
        self.inner.read_at(&mut buf[..len], offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> Result<usize, BackendError> {
        let faults = self.dice.before(Operation::Write, &self.path)?;
        let len = self.dice.shortened(&faults, buf.len());
        if len > 0 && self.dice.hits(faults.damage) {
            let mut wrong = buf[..len].to_vec();
            let at = self.dice.roll() as usize % len;
            wrong[at] ^= 0x40;
            return self.inner.write_at(&wrong, offset);
        }
        self.inner.write_at(&buf[..len], offset)
    }

    fn sync_data(&self) -> Result<(), BackendError> {
        self.dice.before(Operation::Sync, &self.path)?;
        self.inner.sync_data()
    }

    fn sync_all(&self) -> Result<(), BackendError> {
        self.dice.before(Operation::Sync, &self.path)?;
        self.inner.sync_all()
    }

    fn check_owner(&self, owner: u32) -> Result<(), BackendError> {
        self.inner.check_owner(owner)
    }

    fn take_shape(&self, shape: &Attr) -> Result<bool, BackendError> {
        self.dice.before(Operation::Attributes, &self.path)?;
        self.inner.take_shape(shape)
    }

    fn identity(&self) -> Result<Identity, BackendError> {
        self.dice.wait_while_hung(&self.path);
        self.inner.identity()
    }

    fn start_writing(&self, range: ByteRange) {
        self.inner.start_writing(range);
    }

    fn drop_cached(&self, range: ByteRange) -> Result<(), BackendError> {
        self.inner.drop_cached(range)
    }
}
