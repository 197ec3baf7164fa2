//! Bytes that tell who wrote them: a wrong byte names its writer, its round and its place.

/// The byte that writer `who` puts at `offset` in `round`. Never 0, so that holes stand out.
#[must_use]
pub fn byte(who: u64, round: u64, offset: u64) -> u8 {
    let mut x = offset ^ (who << 56) ^ (round << 40) ^ 0x9e37_79b9_7f4a_7c15;
    x ^= x >> 31;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 29;
    ((x >> 32) % 255) as u8 + 1
}

/// `len` such bytes from `offset` on.
#[must_use]
pub fn bytes(who: u64, round: u64, offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|o| byte(who, round, o)).collect()
}

/// Compares and says where and how they differ.
pub fn same(what: &str, got: &[u8], want: &[u8]) {
    if got == want {
        return;
    }
    let at = got.iter().zip(want).position(|(g, w)| g != w).unwrap_or(got.len().min(want.len()));
    panic!(
        "{what}: {} bytes, wanted {}; first difference at {at}: got {:?}, wanted {:?}",
        got.len(),
        want.len(),
        got.get(at..(at + 16).min(got.len())),
        want.get(at..(at + 16).min(want.len())),
    );
}
