//! What goes over the network is encrypted, and both ends know that the other holds the job's
//! token: TLS 1.3 with a key pair for each role that both derive from the token. There are no
//! certificates, names or authorities; whoever has not exactly the expected public key is hung up on
//! before anything of the protocol inside is said.
//!
//! * [`keys`]: from the token to what TLS needs.
//! * [`tls`]: the protocol without sockets.
//! * [`channel`]: a connection that may be encrypted.
//! * [`arrival`]: a connection that came in and has not said yet whether it is.

mod arrival;
mod channel;
mod keys;
mod tls;

pub use arrival::{Arrival, Spoken};
pub use channel::{Channel, SecureError, connect};
pub use keys::{Keys, Purpose, SecureStats};
pub use tls::Tls;

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Which connections are encrypted. A job without a token has no keys: it stays on loopback, and
/// nothing is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Secure {
    /// None.
    Off,
    /// All but those over loopback, where the kernel tells whose the other end is.
    #[default]
    Loopback,
    /// All of them.
    On,
}

/// What is done with a connection that came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is served as it is, not encrypted.
    Plain,
    /// The TLS handshake goes on.
    Encrypt,
    /// It is told that it has to encrypt.
    MustEncrypt,
    /// It is told that nothing is encrypted here.
    CannotEncrypt,
}

/// Whose the other end of a connection is that came in, as far as the kernel knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// That of a process of this user or root on this machine.
    Ours,
    /// Anybody's.
    Anybodys,
}

impl Secure {
    /// Whether this end encrypts a connection that it makes to `to`.
    #[must_use]
    pub fn encrypts(self, to: IpAddr, has_token: bool) -> bool {
        let near = to.to_canonical().is_loopback();
        has_token && (self == Secure::On || self == Secure::Loopback && !near)
    }

    /// What this end does with a connection that came in and begins as TLS does, or does not.
    #[must_use]
    pub fn answers(self, from: Whose, begins_as_tls: bool, has_token: bool) -> Answer {
        match (self, begins_as_tls, from, has_token) {
            (Secure::Off, true, _, _) | (_, true, _, false) => Answer::CannotEncrypt,
            (Secure::Loopback | Secure::On, true, _, true) => Answer::Encrypt,
            // Who may come in without a token is asked elsewhere.
            (Secure::Off, false, _, _) | (_, false, _, false) => Answer::Plain,
            (Secure::Loopback, false, Whose::Ours, true) => Answer::Plain,
            (Secure::Loopback, false, Whose::Anybodys, true) | (Secure::On, false, _, true) => {
                Answer::MustEncrypt
            }
        }
    }

    /// As it is written in options and in status.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Secure::Off => "off",
            Secure::Loopback => "loopback",
            Secure::On => "on",
        }
    }
}

impl fmt::Display for Secure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Secure {
    type Err = String;

    fn from_str(word: &str) -> Result<Secure, String> {
        let all = [Secure::Off, Secure::Loopback, Secure::On];
        let found = all.into_iter().find(|s| s.word() == word);
        found.ok_or_else(|| format!("'{word}' is none of on, off, loopback"))
    }
}

/// To a peer or a node that does not encrypt and has to.
pub const MUST_ENCRYPT: &str = "takes only encrypted connections from here: this end lacks the job's --token-file, or its \
     --secure is weaker than there (other users' daemons need --secure on over loopback, too)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_of_who_encrypts() {
        let (near, far): (IpAddr, IpAddr) =
            ("127.0.0.1".parse().unwrap(), "10.0.0.1".parse().unwrap());
        let mapped: IpAddr = "::ffff:127.0.0.1".parse().unwrap();
        for (secure, to, expected) in [
            (Secure::Off, near, false),
            (Secure::Off, far, false),
            (Secure::Loopback, near, false),
            (Secure::Loopback, mapped, false),
            (Secure::Loopback, far, true),
            (Secure::On, near, true),
            (Secure::On, far, true),
        ] {
            assert_eq!(secure.encrypts(to, true), expected, "{secure} to {to}");
            assert!(!secure.encrypts(to, false), "there are no keys without a token");
        }
    }

    #[test]
    fn every_case_of_who_is_answered_how() {
        use Answer::{CannotEncrypt, Encrypt, MustEncrypt, Plain};
        use Whose::{Anybodys, Ours};
        for (secure, from, tls, expected) in [
            (Secure::Off, Ours, false, Plain),
            (Secure::Off, Anybodys, false, Plain),
            (Secure::Off, Ours, true, CannotEncrypt),
            (Secure::Off, Anybodys, true, CannotEncrypt),
            (Secure::Loopback, Ours, false, Plain),
            (Secure::Loopback, Anybodys, false, MustEncrypt),
            (Secure::Loopback, Ours, true, Encrypt),
            (Secure::Loopback, Anybodys, true, Encrypt),
            (Secure::On, Ours, false, MustEncrypt),
            (Secure::On, Anybodys, false, MustEncrypt),
            (Secure::On, Ours, true, Encrypt),
            (Secure::On, Anybodys, true, Encrypt),
        ] {
            assert_eq!(secure.answers(from, tls, true), expected, "{secure} {from:?} tls {tls}");
            let without = if tls { CannotEncrypt } else { Plain };
            assert_eq!(secure.answers(from, tls, false), without, "without a token");
        }
    }

    #[test]
    fn what_one_end_does_the_other_end_of_the_same_mode_takes() {
        for secure in [Secure::Off, Secure::Loopback, Secure::On] {
            for (to, from) in [("127.0.0.1", Whose::Ours), ("10.0.0.1", Whose::Anybodys)] {
                let tls = secure.encrypts(to.parse().unwrap(), true);
                let answer = secure.answers(from, tls, true);
                assert_eq!(answer, if tls { Answer::Encrypt } else { Answer::Plain });
            }
        }
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for secure in [Secure::Off, Secure::Loopback, Secure::On] {
            assert_eq!(secure.to_string().parse(), Ok(secure));
        }
        assert!("maybe".parse::<Secure>().is_err());
    }
}
