//! Lustre's striping: is this directory on Lustre, how many storage targets are there, which
//! stripes does a file have, and which shall a new file get. Decides nothing about how many
//! stripes are good.
//!
//! A file's stripes are fixed with its first object, so they must be set before the first write:
//! the file is opened with [`DELAYED`] (`O_LOV_DELAY_CREATE`: no objects yet) and then given a
//! `lov_user_md_v1` as the extended attribute `lustre.lov`. That is what `liblustreapi` does
//! (`llapi_layout_file_create`); the older way, the ioctl `LL_IOC_LOV_SETSTRIPE`
//! (`_IOW('f', 154, long)`) with the same structure, leads to the same place in the client.
//! Structures and numbers are those of Lustre's `lustre/include/uapi/linux/lustre/lustre_user.h`,
//! written down here once more because its headers are on few machines.
//!
//! Tested byte for byte against those definitions and against a file system that is *not*
//! Lustre. Not run on a real Lustre.

use ebb_types::Errno;
pub use ebb_types::Striping;
use rustix::fs::{OFlags, XattrFlags};
use rustix::io::Errno as Os;
use std::os::fd::AsFd;

/// `LL_SUPER_MAGIC`: what statfs says of a mounted Lustre client.
const SUPER_MAGIC: u32 = 0x0BD0_0BD0;
/// `LOV_USER_MAGIC_V1`: stripes over any targets.
const MAGIC_V1: u32 = 0x0BD1_0BD0;
/// `LOV_USER_MAGIC_V3`: the same, with the name of a pool of targets behind the header.
const MAGIC_V3: u32 = 0x0BD3_0BD0;
/// `LOV_PATTERN_RAID0`: plain stripes.
const PATTERN_RAID0: u32 = 1;
/// `LOV_OFFSET_DEFAULT`, (u16)-1: the file system chooses the first target.
const OFFSET_ANY: u16 = u16::MAX;
/// `LOV_ALL_STRIPES`, and larger numbers that mean errors.
const COUNT_ALL: u16 = u16::MAX;
/// `LOV_MAX_STRIPE_COUNT`.
pub const STRIPES_MAX: u16 = 2000;
/// `LOV_MIN_STRIPE_SIZE`: sizes are multiples of it.
pub const STRIPE_SIZE_UNIT: u32 = 1 << 16;
/// What a file system uses when nobody says anything else.
pub const STRIPE_SIZE_DEFAULT: u32 = 1 << 20;
/// `XATTR_LUSTRE_LOV`.
const XATTR: &str = "lustre.lov";
/// Size of `lov_user_md_v1` without objects.
const HEADER_BYTES: usize = 32;

/// `O_LOV_DELAY_CREATE`: `O_NOCTTY | FASYNC`, which survives the kernel's check of open flags,
/// and the bit that clients of 1.8 looked at. Means nothing to other file systems when a regular
/// file is opened. Not for `openat2`, which refuses bits it does not know.
pub const DELAYED: OFlags = OFlags::from_bits_retain(0o100_000_000 | 0o400 | 0o20_000);

/// What there is to know about the Lustre file system that a directory is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Storage targets (OSTs).
    pub targets: u32,
    /// Stripe size that new files in the directory get.
    pub stripe_size: u32,
}

/// The facts of an open directory; None when it is not on Lustre.
pub fn facts(dir: impl AsFd) -> Result<Option<Facts>, Errno> {
    if !is_lustre(&dir)? {
        return Ok(None);
    }
    let targets = target_count(&dir)?;
    Ok(Some(Facts { targets, stripe_size: stripe_size(&dir)? }))
}

/// Whether an open file or directory is on Lustre.
pub fn is_lustre(file: impl AsFd) -> Result<bool, Errno> {
    let fs = rustix::fs::fstatfs(file).map_err(errno)?;
    // The type of the field differs between machines; the magic number has 32 bits.
    Ok(is_magic(fs.f_type as u64))
}

fn is_magic(f_type: u64) -> bool {
    f_type as u32 == SUPER_MAGIC
}

/// The stripe size that new files in an open directory of Lustre get.
pub fn stripe_size(dir: impl AsFd) -> Result<u32, Errno> {
    let set = get_striping(dir)?.map_or(0, |s| s.size);
    Ok(if set == 0 { STRIPE_SIZE_DEFAULT } else { set })
}

/// How many targets the file system has, by `LL_IOC_GETOBDCOUNT` on an open directory.
fn target_count(dir: impl AsFd) -> Result<u32, Errno> {
    /// `_IOR('f', 168, long)`. The call reads and writes an int: 0 asks for OSTs.
    const GETOBDCOUNT: rustix::ioctl::Opcode =
        rustix::ioctl::opcode::read::<std::ffi::c_long>(b'f', 168);
    let mut count: std::ffi::c_int = 0;
    // SAFETY: on Lustre the call reads and writes one int at the pointer; `count` is one, and
    // lives until it returns. Only called after statfs said that this is Lustre.
    let asked = unsafe {
        rustix::ioctl::ioctl(
            dir,
            rustix::ioctl::Updater::<{ GETOBDCOUNT }, std::ffi::c_int>::new(&mut count),
        )
    };
    asked.map_err(errno)?;
    u32::try_from(count).ok().filter(|n| *n > 0).ok_or(Errno::EIO)
}

/// Gives a file that was opened with [`DELAYED`] and has no objects yet its stripes.
pub fn set_striping(file: impl AsFd, striping: Striping) -> Result<(), Errno> {
    let header = encode(striping).ok_or(Errno::EINVAL)?;
    rustix::fs::fsetxattr(file, XATTR, &header, XattrFlags::CREATE).map_err(errno)
}

/// The stripes of a file, or the default for new files of a directory. None when there is no
/// default, or a layout that is not plain stripes (a composite one, say).
pub fn get_striping(file: impl AsFd) -> Result<Option<Striping>, Errno> {
    // The header stands first, but a buffer that is too small is an error: 2000 stripes of 24
    // bytes fit, and so does everything that an attribute may hold.
    let mut value = vec![0u8; 1 << 16];
    match rustix::fs::fgetxattr(file, XATTR, &mut value[..]) {
        Ok(len) => Ok(decode(value.get(..len).unwrap_or_default())),
        Err(Os::NODATA) => Ok(None),
        Err(e) => Err(errno(e)),
    }
}

/// A size for writes: the smallest multiple of the stripe size that is not below `least`.
#[must_use]
pub fn aligned_chunk(least: u64, stripe_size: u32) -> u64 {
    let stripe = u64::from(stripe_size);
    if stripe == 0 { least } else { least.max(1).div_ceil(stripe).saturating_mul(stripe) }
}

fn is_possible(striping: Striping) -> bool {
    (1..=STRIPES_MAX).contains(&striping.count)
        && striping.size > 0
        && striping.size.is_multiple_of(STRIPE_SIZE_UNIT)
}

/// `struct lov_user_md_v1`, packed, in the byte order of this machine:
///
/// | bytes  | field                                    |
/// |--------|------------------------------------------|
/// | 0..4   | `lmm_magic`                              |
/// | 4..8   | `lmm_pattern`                            |
/// | 8..24  | `lmm_oi`: of the file, ignored when set  |
/// | 24..28 | `lmm_stripe_size`                        |
/// | 28..30 | `lmm_stripe_count`                       |
/// | 30..32 | `lmm_stripe_offset`: the first target    |
fn encode(striping: Striping) -> Option<[u8; HEADER_BYTES]> {
    if !is_possible(striping) {
        return None;
    }
    let mut header = [0u8; HEADER_BYTES];
    header[0..4].copy_from_slice(&MAGIC_V1.to_ne_bytes());
    header[4..8].copy_from_slice(&PATTERN_RAID0.to_ne_bytes());
    header[24..28].copy_from_slice(&striping.size.to_ne_bytes());
    header[28..30].copy_from_slice(&striping.count.to_ne_bytes());
    header[30..32].copy_from_slice(&OFFSET_ANY.to_ne_bytes());
    Some(header)
}

fn decode(value: &[u8]) -> Option<Striping> {
    let four = |at: usize| Some(u32::from_ne_bytes(value.get(at..at + 4)?.try_into().ok()?));
    let magic = four(0)?;
    if magic != MAGIC_V1 && magic != MAGIC_V3 {
        return None;
    }
    let size = four(24)?;
    let count = u16::from_ne_bytes(value.get(28..30)?.try_into().ok()?);
    Some(Striping { count, size }).filter(|s| s.count <= STRIPES_MAX || s.count == COUNT_ALL)
}

fn errno(e: Os) -> Errno {
    Errno(e.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::fs::Mode;

    #[test]
    fn a_header_is_right_byte_for_byte() {
        // 4 stripes of 1 MiB, as `lfs setstripe -c 4 -S 1M` sends them on a little-endian machine.
        let mut expected = vec![
            0xD0, 0x0B, 0xD1, 0x0B, // lmm_magic
            0x01, 0x00, 0x00, 0x00, // lmm_pattern
        ];
        expected.extend([0; 16]); // lmm_oi
        expected.extend([0x00, 0x00, 0x10, 0x00]); // lmm_stripe_size
        expected.extend([0x04, 0x00]); // lmm_stripe_count
        expected.extend([0xFF, 0xFF]); // lmm_stripe_offset
        if cfg!(target_endian = "big") {
            for (from, to) in [(0, 4), (4, 8), (24, 28), (28, 30), (30, 32)] {
                expected[from..to].reverse();
            }
        }
        assert_eq!(encode(Striping { count: 4, size: 1 << 20 }).unwrap().as_slice(), expected);
    }

    #[test]
    fn numbers_are_those_of_the_header_file() {
        assert_eq!(DELAYED.bits(), (0o100_000_000 | libc::O_NOCTTY | libc::O_ASYNC) as u32);
        let opcode = rustix::ioctl::opcode::read::<std::ffi::c_long>(b'f', 168);
        if cfg!(all(target_os = "linux", target_pointer_width = "64", target_arch = "x86_64")) {
            assert_eq!(opcode, 0x8008_66A8);
        }
    }

    #[test]
    fn stripes_that_cannot_be_are_not_sent() {
        for (count, size) in [(0, 1 << 20), (2001, 1 << 20), (4, 0), (4, 4096), (4, (1 << 20) + 1)]
        {
            assert_eq!(encode(Striping { count, size }), None, "{count} {size}");
        }
    }

    #[test]
    fn other_layouts_and_garbage_are_no_plain_stripes() {
        let header = encode(Striping { count: 8, size: 1 << 22 }).unwrap();
        let mut pool = header.to_vec();
        pool[0..4].copy_from_slice(&MAGIC_V3.to_ne_bytes());
        pool.extend(*b"flash\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(decode(&pool), Some(Striping { count: 8, size: 1 << 22 }));
        let mut composite = header.to_vec();
        composite[0..4].copy_from_slice(&0x0BD6_0BD0u32.to_ne_bytes());
        assert_eq!(decode(&composite), None);
        assert_eq!(decode(&header[..29]), None);
        assert_eq!(decode(&[]), None);
        let mut all = header;
        all[28..30].copy_from_slice(&COUNT_ALL.to_ne_bytes());
        assert_eq!(decode(&all).map(|s| s.count), Some(COUNT_ALL));
        all[28..30].copy_from_slice(&65_532u16.to_ne_bytes());
        assert_eq!(decode(&all), None, "an insane stripe count");
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(count in 1u16..=STRIPES_MAX, units in 1u32..=u32::MAX >> 16) {
            let striping = Striping { count, size: units * STRIPE_SIZE_UNIT };
            prop_assert_eq!(decode(&encode(striping).unwrap()), Some(striping));
        }

        #[test]
        fn nothing_read_from_outside_makes_it_fail(value in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(s) = decode(&value) {
                prop_assert!(s.count <= STRIPES_MAX || s.count == COUNT_ALL);
            }
        }

        #[test]
        fn chunks_are_the_next_multiple(least in 0u64..1 << 40, stripe in 0u32..1 << 30) {
            let chunk = aligned_chunk(least, stripe);
            prop_assert!(chunk >= least);
            if stripe > 0 {
                prop_assert!(chunk.is_multiple_of(stripe.into()) && chunk > 0);
                prop_assert!(chunk - least.max(1) < u64::from(stripe));
            }
        }
    }

    #[test]
    fn only_the_magic_number_of_lustre_is_lustre() {
        assert!(is_magic(0x0BD0_0BD0));
        // ext4, tmpfs, NFS, FUSE, and a value that was widened with its sign.
        for other in [0xEF53, 0x0102_1994, 0x6969, 0x6573_5546, 0, 0x0BD1_0BD0] {
            assert!(!is_magic(other), "{other:x}");
        }
        assert!(is_magic(0xFFFF_FFFF_0BD0_0BD0));
    }

    /// Where there is no Lustre nothing is found, nothing can be set, and the file is as usual.
    #[test]
    fn another_file_system_says_no_and_keeps_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let root = rustix::fs::open(dir.path(), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty());
        let root = root.unwrap();
        if is_lustre(&root).unwrap() {
            return;
        }
        assert_eq!(facts(&root), Ok(None));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | DELAYED;
        let file = rustix::fs::openat(&root, "part", flags, Mode::RUSR | Mode::WUSR).unwrap();
        let set = set_striping(&file, Striping { count: 4, size: 1 << 20 });
        assert_eq!(set, Err(Errno::EOPNOTSUPP));
        assert!(get_striping(&file).is_err());
        assert_eq!(rustix::io::write(&file, b"bytes"), Ok(5));
        assert_eq!(std::fs::read(dir.path().join("part")).unwrap(), b"bytes");
    }
}
