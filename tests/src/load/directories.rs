//! Directories that may be there already.

use std::io::{self, ErrorKind};
use std::path::Path;

/// Makes it, unless it is there. (`create_dir_all` says EEXIST of a directory that is there and cannot be
/// looked at just then, and not why.)
pub fn make_directory(path: &Path) -> io::Result<()> {
    let made = std::fs::create_dir(path);
    if made.as_ref().is_err_and(|e| e.kind() == ErrorKind::AlreadyExists)
        && std::fs::metadata(path)?.is_dir()
    {
        return Ok(());
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_directory_that_is_there_and_cannot_be_looked_at_is_no_eexist() {
        let place = tempfile::TempDir::new().expect("a directory");
        let at = |name: &str| place.path().join(name);
        // What has this name is there, and whoever follows it is told ELOOP.
        symlink("around", at("around")).expect("symlink");
        let errno = |path: &str| make_directory(&at(path)).map_err(|e| e.raw_os_error());
        assert_eq!(errno("around"), Err(Some(libc::ELOOP)));
        assert_eq!(errno("d"), Ok(()));
        assert_eq!(errno("d"), Ok(()), "it is there");
        std::fs::write(at("file"), "x").expect("write");
        assert_eq!(errno("file"), Err(Some(libc::EEXIST)));
        assert_eq!(errno("none/d"), Err(Some(libc::ENOENT)));
        symlink("gone", at("nowhere")).expect("symlink");
        assert_eq!(errno("nowhere"), Err(Some(libc::ENOENT)));
    }
}
