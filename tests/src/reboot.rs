//! Journals as another boot of the machine would find them (what was not synced is not trusted), and older
//! copies of them.

use std::path::Path;

/// A copy of a state directory, to be put back later.
///
/// # Panics
/// When it cannot be copied.
pub fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("mkdir");
    for entry in std::fs::read_dir(from).expect("list").flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copy");
    }
}

/// In the header: magic, format, job, boot, and the sum of these.
pub fn of_the_service(journal: &Path) {
    let mut bytes = std::fs::read(journal).expect("the service's journal");
    bytes[20] ^= 1;
    let sum = crc32c::crc32c(&bytes[..28]);
    bytes[28..32].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(journal, bytes).expect("write");
}

/// A text in the first record: length, sum, body.
pub fn of_a_node(journal: &Path) {
    let mut bytes = std::fs::read(journal).expect("a node journal");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot id");
    let boot = boot.trim().as_bytes();
    let at = bytes.windows(boot.len()).position(|w| w == boot).expect("the boot id");
    bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
    let len = u32::from_le_bytes(bytes[16..20].try_into().expect("4 bytes")) as usize;
    let sum = crc32c::crc32c_append(crc32c::crc32c(&bytes[16..20]), &bytes[24..24 + len]);
    bytes[20..24].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(journal, bytes).expect("write");
}
