//! The proof that a single administrative call carries. There is no challenge in such a call, so
//! the proof covers the time and a nonce: who takes it off the wire can use it neither later nor
//! again. It covers the call's name and what is asked, too: it is good for no other call.
//!
//! ```text
//! seconds since 1970, u64 LE | nonce [32] | proof [32] over both, name and request
//! ```

use crate::auth::{self, PROOF_LEN, Token};
use ebb_locks::Mutex;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

const ROLE: &str = "admin";
const TIME_LEN: usize = 8;
const PROVEN_LEN: usize = TIME_LEN + 2 * PROOF_LEN;

/// How far the clocks of a job's machines may be apart.
const SKEW_SECONDS: u64 = 120;

/// Proofs that are remembered; more within the time that they are good for are refused.
const SEEN_MAX: usize = 1 << 16;

/// A call of administration: what a proof is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call<'a> {
    /// As the protocol names it.
    pub name: &'a str,
    /// The encoded request.
    pub request: &'a [u8],
}

impl Call<'_> {
    fn prove(self, token: &Token, time: &[u8], nonce: &[u8]) -> auth::Proof {
        token.prove(ROLE, &[time, nonce, self.name.as_bytes(), self.request])
    }

    fn is_proven(self, token: &Token, time: &[u8], nonce: &[u8], proof: &[u8]) -> bool {
        token.verify(ROLE, &[time, nonce, self.name.as_bytes(), self.request], proof)
    }
}

/// What to send with a call.
#[must_use]
pub fn proof(token: &Token, call: Call<'_>) -> Vec<u8> {
    proof_at(token, call, now())
}

fn proof_at(token: &Token, call: Call<'_>, seconds: u64) -> Vec<u8> {
    let nonce = auth::nonce();
    let mut out = seconds.to_le_bytes().to_vec();
    out.extend_from_slice(&nonce);
    out.extend_from_slice(&call.prove(token, &seconds.to_le_bytes(), &nonce));
    out
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Checks the proofs of calls, each good once.
#[derive(Debug, Default)]
pub struct Calls {
    /// Nonces that were used, by the time in their proof.
    seen: Mutex<BTreeMap<(u64, auth::Proof), ()>>,
}

impl Calls {
    /// True for a proof of `token` for this call that is fresh and was not used before.
    #[must_use]
    pub fn admit(&self, token: &Token, call: Call<'_>, proof: &[u8]) -> bool {
        self.admit_at(token, call, proof, now())
    }

    fn admit_at(&self, token: &Token, call: Call<'_>, proof: &[u8], now: u64) -> bool {
        let Ok(proof) = <&[u8; PROVEN_LEN]>::try_from(proof) else { return false };
        let (time, rest) = proof.split_at(TIME_LEN);
        let (nonce, proof) = rest.split_at(PROOF_LEN);
        let (Ok(seconds), Ok(nonce)) = (time.try_into(), auth::Proof::try_from(nonce)) else {
            return false;
        };
        let seconds = u64::from_le_bytes(seconds);
        let is_fresh = seconds.abs_diff(now) <= SKEW_SECONDS;
        if !is_fresh || !call.is_proven(token, time, &nonce, proof) {
            return false;
        }
        let mut seen = self.seen.lock();
        // What is too old to be good needs not be remembered.
        let oldest = now.saturating_sub(SKEW_SECONDS);
        let kept = seen.split_off(&(oldest, [0; PROOF_LEN]));
        *seen = kept;
        seen.len() < SEEN_MAX && seen.insert((seconds, nonce), ()).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: Call<'_> = Call { name: "status", request: b"" };

    fn token(dir: &tempfile::TempDir, name: &str) -> Token {
        Token::generate_to(dir.path().join(name)).unwrap()
    }

    #[test]
    fn a_proof_is_good_once_and_not_for_long() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (token(&dir, "a"), token(&dir, "b"));
        let calls = Calls::default();
        let call = proof_at(&ours, STATUS, 1000);
        assert!(!calls.admit_at(&other, STATUS, &call, 1000), "another token");
        assert!(!calls.admit_at(&ours, STATUS, &call, 1000 + SKEW_SECONDS + 1), "too old");
        assert!(!calls.admit_at(&ours, STATUS, &call, 1000 - SKEW_SECONDS - 1), "from the future");
        for other in [Call { name: "echo", ..STATUS }, Call { request: b"x", ..STATUS }] {
            assert!(!calls.admit_at(&ours, other, &call, 1000), "good for {other:?}");
        }
        assert!(calls.admit_at(&ours, STATUS, &call, 1000));
        assert!(!calls.admit_at(&ours, STATUS, &call, 1000), "replayed");
        assert!(!calls.admit_at(&ours, STATUS, &call, 1000 + SKEW_SECONDS), "replayed later");
        assert!(
            calls.admit_at(&ours, STATUS, &proof_at(&ours, STATUS, 1000), 1000),
            "another call"
        );
        assert!(calls.admit(&ours, STATUS, &proof(&ours, STATUS)), "now");
    }

    #[test]
    fn every_bit_counts() {
        let dir = tempfile::tempdir().unwrap();
        let ours = token(&dir, "a");
        let calls = Calls::default();
        let call = proof_at(&ours, STATUS, 5);
        for bit in 0..PROVEN_LEN * 8 {
            let mut bad = call.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!calls.admit_at(&ours, STATUS, &bad, 5), "bit {bit}");
        }
        assert!(
            !calls.admit_at(&ours, STATUS, &call[1..], 5) && !calls.admit_at(&ours, STATUS, b"", 5)
        );
        assert!(calls.admit_at(&ours, STATUS, &call, 5), "the refused ones did not use it up");
    }

    #[test]
    fn what_is_remembered_is_bounded_by_time() {
        let dir = tempfile::tempdir().unwrap();
        let ours = token(&dir, "a");
        let calls = Calls::default();
        for second in 1000..1500 {
            assert!(calls.admit_at(&ours, STATUS, &proof_at(&ours, STATUS, second), second));
        }
        assert!(calls.seen.lock().len() <= SKEW_SECONDS as usize + 1);
    }
}
