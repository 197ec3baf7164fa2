//! Handles: 64 bytes that stand for a file on every node of the job. Who has the file open gets one, sends
//! it to others in any way, and they open it on their nodes without its path: by the name
//! `.ebb/handle-…`, which leads to the file by its number.
//!
//! ```text
//! version u8 = 1 | zeros | job u64 | inode u64 | zeros to 32 bytes | HMAC-SHA256 of these under the job token
//! ```
//!
//! * Nobody without the token can make one, so it is proven that a process of this job had the file open.
//!   It stands for the way to the file and nothing else: the kernel checks the permissions of the file for
//!   whoever opens it, as for a link to it in a directory that all may search.
//! * A number is never given again, so an old handle opens its file or none.
//! * Without a job token there is nothing to sign with, and there are no handles.

use crate::node::Node;
use crate::virtual_files;
use ebb_api_format::{HANDLE, handle_of_name};
use ebb_transport::Token;
use ebb_types::{Errno, Ino};
use std::sync::Arc;

const VERSION: u8 = 1;
const ROLE: &str = "file handle";
/// What is signed.
const SIGNED: usize = 32;

/// What signs handles.
#[derive(Debug)]
pub(crate) struct References {
    token: Option<Arc<Token>>,
    job: u64,
}

impl References {
    pub fn new(token: Option<Arc<Token>>, job: u64) -> References {
        References { token, job }
    }

    fn body(&self, ino: Ino) -> [u8; SIGNED] {
        let mut body = [0; SIGNED];
        body[0] = VERSION;
        body[8..16].copy_from_slice(&self.job.to_le_bytes());
        body[16..24].copy_from_slice(&ino.0.to_le_bytes());
        body
    }

    fn sign(&self, ino: Ino) -> Result<[u8; HANDLE], Errno> {
        let token = self.token.as_ref().ok_or(Errno::ENOKEY)?;
        let body = self.body(ino);
        let mut handle = [0; HANDLE];
        handle[..SIGNED].copy_from_slice(&body);
        handle[SIGNED..].copy_from_slice(&token.prove(ROLE, &[&body]));
        Ok(handle)
    }

    fn check(&self, handle: &[u8; HANDLE]) -> Result<Ino, Errno> {
        let token = self.token.as_ref().ok_or(Errno::ENOKEY)?;
        let (body, proof) = handle.split_at(SIGNED);
        if !token.verify(ROLE, &[body], proof) {
            return Err(Errno::EACCES);
        }
        let number = body[16..24].try_into().map_err(|_| Errno::EACCES)?;
        let ino = Ino(u64::from_le_bytes(number));
        // Of this job, in these words and no others.
        if body != self.body(ino) || virtual_files::is_virtual(ino) {
            return Err(Errno::ESTALE);
        }
        Ok(ino)
    }
}

impl Node {
    /// A handle of a file.
    pub(crate) fn reference(&self, ino: Ino) -> Result<[u8; HANDLE], Errno> {
        self.references.get().ok_or(Errno::EAGAIN)?.sign(ino)
    }

    /// The inode that a name in `.ebb` stands for. ENOENT: it is not the name of a handle; EACCES: nobody of
    /// this job made it.
    pub(crate) fn referred(&self, name: &[u8]) -> Result<Ino, Errno> {
        let handle = handle_of_name(name).ok_or(Errno::ENOENT)?;
        self.references.get().ok_or(Errno::EAGAIN)?.check(&handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn token() -> Arc<Token> {
        let dir = tempfile::tempdir().expect("a directory");
        Arc::new(Token::generate_to(dir.path().join("token")).expect("a token"))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_handle_leads_to_its_file_and_nothing_else_is_one(
            ino in 0_u64..u64::MAX - 9, job: u64, bit in 0_usize..8 * HANDLE,
        ) {
            let ours = References::new(Some(token()), job);
            let handle = ours.sign(Ino(ino)).expect("there is a token");
            prop_assert_eq!(ours.check(&handle), Ok(Ino(ino)));
            let mut changed = handle;
            changed[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(ours.check(&changed), Err(Errno::EACCES));
            // The same token, and another job.
            let others = References::new(ours.token.clone(), job ^ 1);
            prop_assert_eq!(others.check(&handle), Err(Errno::ESTALE));
            let strangers = References::new(Some(token()), job);
            prop_assert_eq!(strangers.check(&handle), Err(Errno::EACCES));
            let none = References::new(None, job);
            prop_assert_eq!(none.check(&handle), Err(Errno::ENOKEY));
            prop_assert!(none.sign(Ino(ino)).is_err());
        }
    }

    #[test]
    fn files_of_the_daemon_have_no_handles() {
        let ours = References::new(Some(token()), 3);
        let handle = ours.sign(Ino(u64::MAX - 2)).expect("there is a token");
        assert_eq!(ours.check(&handle), Err(Errno::ESTALE));
    }
}
