//! How two nodes meet over RDMA: what is said of it on the connection over TCP, and the proofs with which the other
//! one begins. Pure.
//!
//! ```text
//! meeting   address [16] | port u16 | 0 u16 | 0 u32 | number u64 | secret [32]
//! hello     number u64 | proof of the client [32]     with the request to connect over RDMA
//! answer    proof of the server [32]                  with its acceptance
//! ```
//!
//! The connection over TCP has proven the token in both directions. The secret is of one meeting; both proofs cover
//! it and the job's token where there is one, so neither whoever saw the secret on a connection that is not
//! encrypted nor whoever holds the token but was not asked can connect in place of the other end.

use crate::auth::{self, PROOF_LEN, Proof, Token};
use ebb_rdma::{ANSWER_BYTES, Answer, HELLO_BYTES, Hello, NUMBER_BYTES};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Length of a meeting.
pub(crate) const MEETING_LEN: usize = 64;

const CLIENT_ROLE: &str = "rdma-client";
const SERVER_ROLE: &str = "rdma-server";

/// Where and how one node shall connect to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Meeting {
    pub address: SocketAddr,
    pub number: u64,
    secret: Proof,
}

impl Meeting {
    /// A new one, at an endpoint's address.
    pub fn new(address: SocketAddr) -> Meeting {
        let random = auth::nonce();
        let number = u64::from_le_bytes(std::array::from_fn(|i| random[i]));
        Meeting { address, number, secret: auth::nonce() }
    }

    pub fn encode(&self) -> [u8; MEETING_LEN] {
        let mut out = [0; MEETING_LEN];
        let address = match self.address.ip() {
            IpAddr::V4(a) => a.to_ipv6_mapped(),
            IpAddr::V6(a) => a,
        };
        out[..16].copy_from_slice(&address.octets());
        out[16..18].copy_from_slice(&self.address.port().to_le_bytes());
        out[24..32].copy_from_slice(&self.number.to_le_bytes());
        out[32..].copy_from_slice(&self.secret);
        out
    }

    /// None when it is none.
    pub fn decode(bytes: &[u8; MEETING_LEN]) -> Option<Meeting> {
        let address: [u8; 16] = std::array::from_fn(|i| bytes[i]);
        let address = Ipv6Addr::from(address).to_canonical();
        let port = u16::from_le_bytes([bytes[16], bytes[17]]);
        let number = u64::from_le_bytes(std::array::from_fn(|i| bytes[24 + i]));
        let secret = std::array::from_fn(|i| bytes[32 + i]);
        let sound = port != 0 && bytes[18..24] == [0; 6] && !address.is_unspecified();
        sound.then_some(Meeting { address: SocketAddr::new(address, port), number, secret })
    }

    /// What the client says.
    pub fn hello(&self, token: Option<&Token>) -> Hello {
        let mut hello = [0; HELLO_BYTES];
        hello[..NUMBER_BYTES].copy_from_slice(&self.number.to_le_bytes());
        hello[NUMBER_BYTES..].copy_from_slice(&self.proof(CLIENT_ROLE, token));
        hello
    }

    /// What the server answers.
    pub fn answer(&self, token: Option<&Token>) -> Answer {
        const { assert!(ANSWER_BYTES == PROOF_LEN) }
        self.proof(SERVER_ROLE, token)
    }

    /// Whether the server has answered so.
    pub fn is_answer(&self, token: Option<&Token>, answer: &Answer) -> bool {
        subtle::ConstantTimeEq::ct_eq(&self.answer(token)[..], &answer[..]).into()
    }

    fn proof(&self, role: &str, token: Option<&Token>) -> Proof {
        let number = self.number.to_le_bytes();
        match token {
            Some(token) => token.prove(role, &[&self.secret, &number]),
            None => Token::of(self.secret).prove(role, &[&number]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn meetings_survive(v4: bool, address: u128, port in 1..=u16::MAX, number: u64, secret: [u8; 32]) {
            let ip: IpAddr = match v4 {
                true => std::net::Ipv4Addr::from(address as u32 | 1).into(),
                false => Ipv6Addr::from(address | 1 << 127).into(),
            };
            let meeting = Meeting { address: SocketAddr::new(ip, port), number, secret };
            prop_assert_eq!(Meeting::decode(&meeting.encode()), Some(meeting));
        }

        #[test]
        fn any_bytes_are_a_meeting_as_it_is_encoded_or_none(bytes: [[u8; 32]; 2], sound: bool) {
            let mut all = [0; MEETING_LEN];
            all.copy_from_slice(bytes.as_flattened());
            if sound {
                all[18..24].fill(0);
            }
            if let Some(meeting) = Meeting::decode(&all) {
                prop_assert_eq!(meeting.encode(), all);
            }
        }
    }

    #[test]
    fn proofs_are_of_one_meeting_one_role_and_one_token() {
        let place = tempfile::tempdir().unwrap();
        let token = |name| Token::generate_to(place.path().join(name)).unwrap();
        let (ours, other) = (token("a"), token("b"));
        let (one, two) = {
            let address = "10.0.0.1:5".parse().unwrap();
            (Meeting::new(address), Meeting::new(address))
        };
        for token in [None, Some(&ours)] {
            assert!(one.is_answer(token, &one.answer(token)));
            assert!(!one.is_answer(token, &two.answer(token)));
            assert!(!one.is_answer(Some(&other), &one.answer(token)));
            assert_ne!(one.hello(token)[NUMBER_BYTES..], one.answer(token), "roles differ");
            assert_ne!(one.hello(token), two.hello(token));
        }
    }
}
