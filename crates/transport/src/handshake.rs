//! How a connection between peers begins: versions, then the proof of the job token in both
//! directions.
//!
//! ```text
//! client    magic u32 | version u16 | 0 u16 | nonce [32]
//! server    magic u32 | version u16 | verdict u16 | nonce [32] | proof [32]
//! client    proof [32]                       only after verdict Prove
//! server    magic u32 | version u16 | verdict u16   only after that
//! ```
//!
//! A node that takes this port for the metadata service's begins as HTTP/2 does. It is answered
//! with a head, so that it can say where it is, and turned away as every other stranger.
//!
//! On an encrypted connection the keys have proven the token before the first of these bytes, and
//! the verdict is Welcome. Each proof covers both nonces and the role of who makes it, so neither can be replayed or
//! reflected. The server proves first: a client with a token never talks to a stranger.

use crate::auth::{self, PROOF_LEN, Token};
use crate::secure::{Channel, MUST_ENCRYPT, SecureError};
use crate::wire::VERSION;
use std::io;
use std::time::Duration;
use tokio::time::timeout;

const MAGIC: u32 = u32::from_le_bytes(*b"EbP2");
const HEAD_LEN: usize = 8;
const CLIENT_LEN: usize = HEAD_LEN + PROOF_LEN;
const SERVER_LEN: usize = HEAD_LEN + 2 * PROOF_LEN;

const CLIENT_ROLE: &str = "peer-client";
const SERVER_ROLE: &str = "peer-server";

/// How HTTP/2 begins.
const HTTP: [u8; HEAD_LEN] = *b"PRI * HT";

/// More than a client of HTTP/2 sends before it hears anything.
const BEGINNING_BYTES: usize = 4096;

/// Until such a client has heard the answer and hung up.
const BEGINNING_WITHIN: Duration = Duration::from_secs(1);

/// True when a peer port has answered so.
#[must_use]
pub fn begins_as_peer(answer: &[u8]) -> bool {
    answer.starts_with(&MAGIC.to_le_bytes())
}

/// What a server thinks of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Welcome,
    Prove,
    WrongVersion,
    Busy,
    WrongToken,
    MustEncrypt,
}

impl Verdict {
    const ALL: [Verdict; 6] = [
        Verdict::Welcome,
        Verdict::Prove,
        Verdict::WrongVersion,
        Verdict::Busy,
        Verdict::WrongToken,
        Verdict::MustEncrypt,
    ];

    fn from_wire(n: u16) -> Option<Verdict> {
        Verdict::ALL.get(usize::from(n)).copied()
    }
}

/// Why a connection did not come about.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    /// It broke.
    #[error(transparent)]
    Io(io::Error),
    /// It is not encrypted as it should be.
    #[error(transparent)]
    Insecure(SecureError),
    /// The other end has no room; later it may.
    #[error("has too many connections")]
    Busy,
    /// The ends do not accept each other, and will not later.
    #[error("{0}")]
    Refused(&'static str),
}

impl From<io::Error> for HandshakeError {
    fn from(e: io::Error) -> HandshakeError {
        match SecureError::in_io(&e) {
            Some(why) => HandshakeError::Insecure(why.clone()),
            None => HandshakeError::Io(e),
        }
    }
}

fn head(version: u16, verdict: Verdict) -> [u8; HEAD_LEN] {
    let mut out = [0; HEAD_LEN];
    out[..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4..6].copy_from_slice(&version.to_le_bytes());
    out[6..].copy_from_slice(&(verdict as u16).to_le_bytes());
    out
}

/// Version and verdict of a head, when it is one.
fn read_head(bytes: &[u8]) -> Result<(u16, u16), HandshakeError> {
    if bytes[..4] != MAGIC.to_le_bytes() {
        return Err(HandshakeError::Refused("does not speak this protocol"));
    }
    Ok((u16::from_le_bytes([bytes[4], bytes[5]]), u16::from_le_bytes([bytes[6], bytes[7]])))
}

fn read_verdict(bytes: &[u8]) -> Result<Verdict, HandshakeError> {
    let (version, verdict) = read_head(bytes)?;
    match Verdict::from_wire(verdict) {
        Some(Verdict::WrongVersion) => {
            Err(HandshakeError::Refused("speaks another version of the peer protocol"))
        }
        Some(Verdict::Busy) => Err(HandshakeError::Busy),
        Some(Verdict::MustEncrypt) => Err(HandshakeError::Refused(MUST_ENCRYPT)),
        Some(Verdict::WrongToken) => Err(HandshakeError::Refused("has another job token")),
        Some(verdict) if version == VERSION => Ok(verdict),
        _ => Err(HandshakeError::Refused("does not speak this protocol")),
    }
}

/// The client's end.
pub(crate) async fn greet_server(
    stream: &Channel,
    token: Option<&Token>,
) -> Result<(), HandshakeError> {
    let token = token.filter(|_| !stream.is_secure());
    let nonce = auth::nonce();
    let mut hello = [0; CLIENT_LEN];
    hello[..HEAD_LEN].copy_from_slice(&head(VERSION, Verdict::Welcome));
    hello[HEAD_LEN..].copy_from_slice(&nonce);
    stream.write_all(&hello).await?;

    let mut answer = [0; SERVER_LEN];
    stream.read_exact(&mut answer).await?;
    let (server_nonce, server_proof) = answer[HEAD_LEN..].split_at(PROOF_LEN);
    match (read_verdict(&answer)?, token) {
        (Verdict::Welcome, None) => Ok(()),
        (Verdict::Welcome, Some(_)) => Err(HandshakeError::Refused("has no job token")),
        (_, None) => Err(HandshakeError::Refused("asks for the job token (--token-file)")),
        (_, Some(token)) => {
            if !token.verify(SERVER_ROLE, &[&nonce, server_nonce], server_proof) {
                return Err(HandshakeError::Refused("has another job token"));
            }
            stream.write_all(&token.prove(CLIENT_ROLE, &[server_nonce, &nonce])).await?;
            let mut end = [0; HEAD_LEN];
            stream.read_exact(&mut end).await?;
            match read_verdict(&end)? {
                Verdict::Welcome => Ok(()),
                _ => Err(HandshakeError::Refused("does not speak this protocol")),
            }
        }
    }
}

/// The server's end.
pub(crate) async fn greet_client(
    stream: &Channel,
    token: Option<&Token>,
) -> Result<(), HandshakeError> {
    let client_nonce = read_hello(stream).await?;
    let nonce = auth::nonce();
    let Some(token) = token.filter(|_| !stream.is_secure()) else {
        return answer(stream, Verdict::Welcome, &nonce, &[0; PROOF_LEN]).await;
    };
    let proof = token.prove(SERVER_ROLE, &[&client_nonce, &nonce]);
    answer(stream, Verdict::Prove, &nonce, &proof).await?;
    let mut proof = [0; PROOF_LEN];
    stream.read_exact(&mut proof).await?;
    if !token.verify(CLIENT_ROLE, &[&nonce, &client_nonce], &proof) {
        stream.write_all(&head(VERSION, Verdict::WrongToken)).await?;
        return Err(HandshakeError::Refused("has another job token"));
    }
    Ok(stream.write_all(&head(VERSION, Verdict::Welcome)).await?)
}

/// The server's end when there is no room.
pub(crate) async fn turn_away(stream: &Channel) -> Result<(), HandshakeError> {
    read_hello(stream).await?;
    answer(stream, Verdict::Busy, &[0; PROOF_LEN], &[0; PROOF_LEN]).await
}

/// The server's end when the client should encrypt and does not.
pub(crate) async fn ask_to_encrypt(stream: &Channel) -> Result<(), HandshakeError> {
    read_hello(stream).await?;
    answer(stream, Verdict::MustEncrypt, &[0; PROOF_LEN], &[0; PROOF_LEN]).await?;
    Err(HandshakeError::Refused("does not encrypt"))
}

async fn read_hello(stream: &Channel) -> Result<auth::Proof, HandshakeError> {
    let mut hello = [0; CLIENT_LEN];
    // The head alone first: a stranger who sends less than a hello is turned away at once.
    stream.read_exact(&mut hello[..HEAD_LEN]).await?;
    if hello.starts_with(&HTTP) {
        return Err(answer_http(stream).await);
    }
    let (version, zero) = read_head(&hello)?;
    stream.read_exact(&mut hello[HEAD_LEN..]).await?;
    if version != VERSION || zero != 0 {
        let none = [0; PROOF_LEN];
        answer(stream, Verdict::WrongVersion, &none, &none).await?;
        return Err(HandshakeError::Refused("speaks another version of the peer protocol"));
    }
    let mut nonce = [0; PROOF_LEN];
    nonce.copy_from_slice(&hello[HEAD_LEN..]);
    Ok(nonce)
}

/// One head, in which there is nothing that a stranger may not know.
async fn answer_http(stream: &Channel) -> HandshakeError {
    // Whether the other end hears it is its own concern.
    if stream.write_all(&head(VERSION, Verdict::WrongVersion)).await.is_ok() {
        // Bytes that nobody has read when a socket is closed take the answer away with them.
        let _ = rustix::net::shutdown(stream.tcp(), rustix::net::Shutdown::Write);
        let mut beginning = [0; BEGINNING_BYTES];
        let _ = timeout(BEGINNING_WITHIN, stream.read_exact(&mut beginning)).await;
    }
    HandshakeError::Refused("takes this port for a metadata service")
}

async fn answer(
    stream: &Channel,
    verdict: Verdict,
    nonce: &auth::Proof,
    proof: &auth::Proof,
) -> Result<(), HandshakeError> {
    let mut out = [0; SERVER_LEN];
    out[..HEAD_LEN].copy_from_slice(&head(VERSION, verdict));
    out[HEAD_LEN..HEAD_LEN + PROOF_LEN].copy_from_slice(nonce);
    out[HEAD_LEN + PROOF_LEN..].copy_from_slice(proof);
    Ok(stream.write_all(&out).await?)
}
