//! Checks the paths that come from the metadata service. Does no I/O.

use crate::error::BackendError;
use ebb_types::Name;

/// A path for messages.
pub(crate) fn shown(path: &[u8]) -> String {
    if path.is_empty() { ".".to_owned() } else { String::from_utf8_lossy(path).into_owned() }
}

/// The components of a relative path: each a proper name, at least one. `..`, `.`, empty
/// components (and with them absolute paths) and NUL are refused, so that no answer of a
/// service can lead out of the backing whatever the kernel supports.
pub(crate) fn components(path: &[u8]) -> Result<Vec<Name>, BackendError> {
    path.split(|c| *c == b'/')
        .map(|part| Name::new(part).map_err(|_| BackendError::BadPath { path: shown(path) }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_proper_relative_paths_pass() {
        for bad in ["", "/", "/etc/passwd", "..", "a/../b", "a/./b", "a//b", "a/", "a\0b"] {
            let got = components(bad.as_bytes());
            assert!(matches!(got, Err(BackendError::BadPath { .. })), "{bad:?}: {got:?}");
        }
        assert_eq!(components(b"a/b.c/...").map(|c| c.len()), Ok(3));
    }
}
