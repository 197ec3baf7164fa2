//! One small stable hash, for file names made of long paths.

/// FNV-1a of `bytes`.
#[must_use]
pub fn bytes(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}
