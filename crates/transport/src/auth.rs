//! The job token: the secret that the daemons and the service of one job share, and the proofs
//! of it. It never travels; both ends of a connection prove that they hold it. Where connections are
//! encrypted ([`crate::secure`]) their keys prove it too; here are the proofs for those that are not.

use crate::secure::{Keys, SecureStats};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// Length of a token, a nonce and a proof in bytes.
pub const PROOF_LEN: usize = 32;

/// A nonce or a proof.
pub type Proof = [u8; PROOF_LEN];

/// Why a token file cannot be used. Every text names the file.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file could not be opened, read or written.
    #[error("token file {}: {source}", path.display())]
    Io {
        /// The token file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else than its owner can read or change the file.
    #[error("token file {}: mode {mode:04o} lets others use it (chmod 600 it)", path.display())]
    Exposed {
        /// The token file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is somebody else's file, who knows what is in it.
    #[error("token file {}: belongs to user {uid} (it must be yours or root's)", path.display())]
    Foreign {
        /// The token file.
        path: PathBuf,
        /// Whose it is.
        uid: u32,
    },
    /// The file is not one line of 64 hexadecimal digits.
    #[error("token file {}: not one line of 64 hexadecimal digits", path.display())]
    Malformed {
        /// The token file.
        path: PathBuf,
    },
}

/// The secret of a job. Its `Debug` shows nothing of it, and dropping it wipes it.
pub struct Token {
    secret: Zeroizing<[u8; PROOF_LEN]>,
    /// For encrypted connections; made when they are first needed.
    keys: OnceLock<Keys>,
}

impl Token {
    pub(crate) fn of(secret: [u8; PROOF_LEN]) -> Token {
        Token { secret: Zeroizing::new(secret), keys: OnceLock::new() }
    }

    /// The keys of encrypted connections.
    #[must_use]
    pub fn keys(&self) -> &Keys {
        self.keys.get_or_init(|| Keys::of(&*self.secret))
    }

    /// What went encrypted with these keys so far.
    #[must_use]
    pub fn encrypted(&self) -> SecureStats {
        self.keys.get().map(Keys::stats).unwrap_or_default()
    }

    /// Makes a new token and stores it in a new file that only its owner can read; an existing
    /// file is an error.
    pub fn generate_to(path: impl AsRef<Path>) -> Result<Token, TokenError> {
        let path = path.as_ref();
        let token = Token::of(nonce());
        let mut line: String = token.secret.iter().map(|b| format!("{b:02x}")).collect();
        line.push('\n');
        write_new(path, line.as_bytes())
            .map_err(|source| TokenError::Io { path: path.to_owned(), source })?;
        Ok(token)
    }

    /// Reads a token file; refuses one that group or others may touch, or of another user.
    pub fn load(path: impl AsRef<Path>) -> Result<Token, TokenError> {
        let path = path.as_ref();
        let failed = |source| TokenError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if meta.uid() != 0 && meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(TokenError::Foreign { path: path.to_owned(), uid: meta.uid() });
        }
        let mode = meta.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(TokenError::Exposed { path: path.to_owned(), mode });
        }
        // One byte more than a token and CRLF, so that a longer file is noticed.
        let mut text = Vec::with_capacity(2 * PROOF_LEN + 3);
        file.take(2 * PROOF_LEN as u64 + 3).read_to_end(&mut text).map_err(failed)?;
        Token::parse(&text).ok_or_else(|| TokenError::Malformed { path: path.to_owned() })
    }

    fn parse(text: &[u8]) -> Option<Token> {
        let line = text.strip_suffix(b"\n").unwrap_or(text);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.len() != 2 * PROOF_LEN {
            return None;
        }
        let mut token = Token::of([0; PROOF_LEN]);
        for (byte, digits) in token.secret.iter_mut().zip(line.chunks_exact(2)) {
            *byte = hex_digit(digits[0])? << 4 | hex_digit(digits[1])?;
        }
        Some(token)
    }

    /// A proof that its maker holds the token, bound to a role and to what both ends have said.
    /// Every part goes in with its length, so that no two lists of parts look alike.
    #[must_use]
    pub fn prove(&self, role: &str, parts: &[&[u8]]) -> Proof {
        self.mac(role, parts).finalize().into_bytes().into()
    }

    /// True when `proof` is the one that [`Token::prove`] makes of the same; takes the same time
    /// wherever they differ.
    #[must_use]
    pub fn verify(&self, role: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        self.prove(role, parts).ct_eq(proof).into()
    }

    fn mac(&self, role: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&*self.secret).expect("HMAC takes keys of every length");
        for part in [b"ebb-token-1", role.as_bytes()].into_iter().chain(parts.iter().copied()) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// 32 unpredictable bytes.
#[must_use]
pub fn nonce() -> Proof {
    let mut bytes = [0; PROOF_LEN];
    getrandom::fill(&mut bytes).expect("getrandom(2) has no failure on a booted Linux");
    bytes
}

/// The handshake between a node and the metadata service, as both have said it so far.
#[derive(Clone, Copy, Debug)]
pub struct SessionHandshake<'a> {
    /// `Hello.nonce`.
    pub hello_nonce: &'a [u8],
    /// `Challenge.nonce`.
    pub service_nonce: &'a [u8],
    /// All of `Hello`, encoded: whoever changes a word of it on the way makes both proofs wrong.
    pub hello: &'a [u8],
}

impl SessionHandshake<'_> {
    /// `Challenge.proof`: the service holds the token.
    #[must_use]
    pub fn service_proof(&self, token: &Token) -> Proof {
        self.proof(token, "service", self.hello_nonce, self.service_nonce)
    }

    /// `Prove.proof`: the node holds the token.
    #[must_use]
    pub fn node_proof(&self, token: &Token) -> Proof {
        self.proof(token, "node", self.service_nonce, self.hello_nonce)
    }

    /// Is this what [`SessionHandshake::service_proof`] makes, and did the service choose a
    /// nonce of its own?
    #[must_use]
    pub fn service_proof_is(&self, token: &Token, proof: &[u8]) -> bool {
        self.nonces_are_whole() && self.service_proof(token).ct_eq(proof).into()
    }

    /// Is this what [`SessionHandshake::node_proof`] makes?
    #[must_use]
    pub fn node_proof_is(&self, token: &Token, proof: &[u8]) -> bool {
        self.nonces_are_whole() && self.node_proof(token).ct_eq(proof).into()
    }

    fn proof(&self, token: &Token, role: &str, first: &[u8], second: &[u8]) -> Proof {
        token.prove(role, &[first, second, self.hello])
    }

    fn nonces_are_whole(&self) -> bool {
        self.hello_nonce.len() == PROOF_LEN && self.service_nonce.len() == PROOF_LEN
    }
}

/// `Challenge.proof` of a handshake: see [`SessionHandshake::service_proof`].
#[must_use]
pub fn service_proof(
    token: &Token,
    hello_nonce: &[u8],
    service_nonce: &[u8],
    hello: &[u8],
) -> Proof {
    SessionHandshake { hello_nonce, service_nonce, hello }.service_proof(token)
}

/// `Prove.proof` of a handshake: see [`SessionHandshake::node_proof`].
#[must_use]
pub fn node_proof(token: &Token, hello_nonce: &[u8], service_nonce: &[u8], hello: &[u8]) -> Proof {
    SessionHandshake { hello_nonce, service_nonce, hello }.node_proof(token)
}

fn write_new(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text)?;
    file.sync_all()
}

fn hex_digit(c: u8) -> Option<u8> {
    char::from(c).to_digit(16).map(|d| d as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::PermissionsExt;

    fn write(path: &Path, text: &[u8], mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_generated_token_is_loaded_as_the_same_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let made = Token::generate_to(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(Token::load(&path).unwrap().secret, made.secret);
        assert!(matches!(Token::generate_to(&path), Err(TokenError::Io { .. })));
        assert_eq!(
            Token::load(&path).unwrap().secret,
            made.secret,
            "the refused one left it alone"
        );
    }

    #[test]
    fn exposed_and_malformed_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let good = [b'a'; 64];
        for mode in [0o640, 0o604, 0o620, 0o677] {
            write(&path, &good, mode);
            let error = Token::load(&path).unwrap_err();
            assert!(matches!(error, TokenError::Exposed { .. }), "{mode:o}");
            assert!(error.to_string().contains(path.to_str().unwrap()));
        }
        let long = [b'a'; 65];
        for bad in
            [&b""[..], b"\n", &good[..63], &long, &[b'g'; 64], &[&good[..], b"\n\n"].concat()]
        {
            write(&path, bad, 0o600);
            assert!(matches!(Token::load(&path), Err(TokenError::Malformed { .. })), "{bad:?}");
        }
        for fine in [&good[..], &[&good[..], b"\n"].concat(), &[&good[..], b"\r\n"].concat()] {
            write(&path, fine, 0o400);
            assert_eq!(Token::load(&path).unwrap().secret.as_slice(), [0xaa; 32]);
        }
        assert!(Token::load(dir.path().join("none")).unwrap_err().to_string().contains("none"));
    }

    #[test]
    fn nothing_of_a_token_is_printed() {
        assert_eq!(format!("{:?}", Token::of([0xab; 32])), "Token(..)");
    }

    #[test]
    fn a_proof_depends_on_every_part_and_on_where_it_ends() {
        let token = Token::of([7; 32]);
        let proof = token.prove("node", &[b"ab", b"c"]);
        assert!(token.verify("node", &[b"ab", b"c"], &proof));
        assert!(!token.verify("node", &[b"a", b"bc"], &proof));
        assert!(!token.verify("node", &[b"abc"], &proof));
        assert!(!token.verify("nodeab", &[b"c"], &proof));
        assert!(!token.verify("service", &[b"ab", b"c"], &proof));
        assert!(!token.verify("node", &[b"ab", b"c"], &proof[..31]));
        assert!(!token.verify("node", &[b"ab", b"c"], b""));
        assert!(!Token::of([8; 32]).verify("node", &[b"ab", b"c"], &proof));
    }

    #[test]
    fn the_ends_of_a_handshake_prove_different_things() {
        let token = Token::of([7; 32]);
        let (a, b) = (nonce(), nonce());
        assert_ne!(a, b);
        let talk = SessionHandshake { hello_nonce: &a, service_nonce: &b, hello: b"n1, life 5" };
        let (service, node) = (talk.service_proof(&token), talk.node_proof(&token));
        assert!(talk.service_proof_is(&token, &service) && talk.node_proof_is(&token, &node));
        assert!(!talk.service_proof_is(&token, &node) && !talk.node_proof_is(&token, &service));
        assert_eq!(service, service_proof(&token, &a, &b, b"n1, life 5"));
        assert_eq!(node, node_proof(&token, &a, &b, b"n1, life 5"));
        let other = SessionHandshake { hello: b"n1, life 6", ..talk };
        assert!(!other.node_proof_is(&token, &node));
        let none = SessionHandshake { service_nonce: b"", ..talk };
        let proof = none.service_proof(&token);
        assert!(!none.service_proof_is(&token, &proof), "an empty nonce proves nothing");
        // The same nonces swapped by a reflecting attacker do not turn one proof into the other.
        let swapped = SessionHandshake { hello_nonce: &b, service_nonce: &a, ..talk };
        assert_ne!(swapped.service_proof(&token), node);
    }

    proptest! {
        #[test]
        fn one_flipped_bit_breaks_a_proof(bit in 0usize..256, part in any::<Vec<u8>>()) {
            let token = Token::of([3; 32]);
            let mut proof = token.prove("peer", &[&part]);
            proof[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!token.verify("peer", &[&part], &proof));
        }
    }
}
