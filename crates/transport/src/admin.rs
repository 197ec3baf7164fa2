//! The proof that a single administrative call carries. There is no challenge in such a call, so
//! the proof covers the time and a nonce: who takes it off the wire can use it neither later nor
//! again.
//!
//! ```text
//! seconds since 1970, u64 LE | nonce [32] | proof [32] over both
//! ```

use crate::auth::{self, PROOF_LEN, Token};
use ebb_locks::Mutex;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

const ROLE: &str = "admin";
const TIME_LEN: usize = 8;
const CALL_LEN: usize = TIME_LEN + 2 * PROOF_LEN;

/// How far the clocks of a job's machines may be apart.
const SKEW_SECONDS: u64 = 120;

/// Proofs that are remembered; more within the time that they are good for are refused.
const SEEN_MAX: usize = 1 << 16;

/// What to send with a call.
#[must_use]
pub fn proof(token: &Token) -> Vec<u8> {
    proof_at(token, now())
}

fn proof_at(token: &Token, seconds: u64) -> Vec<u8> {
    let nonce = auth::nonce();
    let mut out = seconds.to_le_bytes().to_vec();
    out.extend_from_slice(&nonce);
    out.extend_from_slice(&token.prove(ROLE, &[&seconds.to_le_bytes(), &nonce]));
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
    /// True for a proof of `token` that is fresh and was not used before.
    #[must_use]
    pub fn admit(&self, token: &Token, call: &[u8]) -> bool {
        self.admit_at(token, call, now())
    }

    fn admit_at(&self, token: &Token, call: &[u8], now: u64) -> bool {
        let Ok(call) = <&[u8; CALL_LEN]>::try_from(call) else { return false };
        let (time, rest) = call.split_at(TIME_LEN);
        let (nonce, proof) = rest.split_at(PROOF_LEN);
        let (Ok(seconds), Ok(nonce)) = (time.try_into(), auth::Proof::try_from(nonce)) else {
            return false;
        };
        let seconds = u64::from_le_bytes(seconds);
        if seconds.abs_diff(now) > SKEW_SECONDS || !token.verify(ROLE, &[time, &nonce], proof) {
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

    fn token(dir: &tempfile::TempDir, name: &str) -> Token {
        Token::generate_to(dir.path().join(name)).unwrap()
    }

    #[test]
    fn a_proof_is_good_once_and_not_for_long() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (token(&dir, "a"), token(&dir, "b"));
        let calls = Calls::default();
        let call = proof_at(&ours, 1000);
        assert!(!calls.admit_at(&other, &call, 1000), "another token");
        assert!(!calls.admit_at(&ours, &call, 1000 + SKEW_SECONDS + 1), "too old");
        assert!(!calls.admit_at(&ours, &call, 1000 - SKEW_SECONDS - 1), "from the future");
        assert!(calls.admit_at(&ours, &call, 1000));
        assert!(!calls.admit_at(&ours, &call, 1000), "replayed");
        assert!(!calls.admit_at(&ours, &call, 1000 + SKEW_SECONDS), "replayed later");
        assert!(calls.admit_at(&ours, &proof_at(&ours, 1000), 1000), "another call");
        assert!(calls.admit(&ours, &proof(&ours)), "now");
    }

    #[test]
    fn every_bit_counts() {
        let dir = tempfile::tempdir().unwrap();
        let ours = token(&dir, "a");
        let calls = Calls::default();
        let call = proof_at(&ours, 5);
        for bit in 0..CALL_LEN * 8 {
            let mut bad = call.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!calls.admit_at(&ours, &bad, 5), "bit {bit}");
        }
        assert!(!calls.admit_at(&ours, &call[1..], 5) && !calls.admit_at(&ours, b"", 5));
        assert!(calls.admit_at(&ours, &call, 5), "the refused ones did not use it up");
    }

    #[test]
    fn what_is_remembered_is_bounded_by_time() {
        let dir = tempfile::tempdir().unwrap();
        let ours = token(&dir, "a");
        let calls = Calls::default();
        for second in 1000..1500 {
            assert!(calls.admit_at(&ours, &proof_at(&ours, second), second));
        }
        assert!(calls.seen.lock().len() <= SKEW_SECONDS as usize + 1);
    }
}
