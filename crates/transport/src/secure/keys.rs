//! From the job's token to key pairs, one for each role, and the two halves of TLS that take only
//! those.

use crate::stats::add;
use hkdf::Hkdf;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, ClientConfig, Resumption};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, ServerConfig};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerMisbehaved,
    SignatureScheme,
};
use sha2::Sha256;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use zeroize::Zeroizing;

/// What a connection is for. Keys of one purpose are no good for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// From a node, or a command, to the metadata service.
    Service,
    /// From a node to a node.
    Peer,
}

/// Goes into all keys; another version of how they are made is another salt.
const SALT: &[u8] = b"ebb connection keys 1";

/// What stands before the 32 bytes of an Ed25519 key in PKCS #8 (RFC 8410).
const PKCS8_HEAD: [u8; 16] =
    [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

const SEED_LEN: usize = 32;

/// All that a process of the job needs to encrypt; made once.
pub struct Keys {
    service: Ends,
    peer: Ends,
    pub(super) cells: Arc<SecureCells>,
}

struct Ends {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// What went encrypted since the keys were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecureStats {
    /// Handshakes that were completed, of either role.
    pub handshakes: u64,
    /// Connections that failed the handshake: another token, no TLS, altered on the way.
    pub refused: u64,
    /// Connections that broke later because what came was altered.
    pub broken: u64,
    /// Bytes that were encrypted and sent.
    pub sent_bytes: u64,
    /// Bytes that were received and found authentic.
    pub received_bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct SecureCells {
    pub handshakes: AtomicU64,
    pub refused: AtomicU64,
    pub broken: AtomicU64,
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
}

impl SecureCells {
    pub fn add(cell: &AtomicU64, n: usize) {
        add(cell, n as u64);
    }
}

impl Keys {
    /// Derives them from the secret.
    #[must_use]
    pub(crate) fn of(secret: &[u8]) -> Keys {
        let hkdf = Hkdf::<Sha256>::new(Some(SALT), secret);
        Keys {
            service: Ends::new(&hkdf, "service", "node", Some("peer server")),
            peer: Ends::new(&hkdf, "peer server", "peer client", None),
            cells: Arc::default(),
        }
    }

    pub(super) fn client(&self, purpose: Purpose) -> Arc<ClientConfig> {
        self.ends(purpose).client.clone()
    }

    pub(super) fn server(&self, purpose: Purpose) -> Arc<ServerConfig> {
        self.ends(purpose).server.clone()
    }

    fn ends(&self, purpose: Purpose) -> &Ends {
        match purpose {
            Purpose::Service => &self.service,
            Purpose::Peer => &self.peer,
        }
    }

    /// What went encrypted so far.
    #[must_use]
    pub fn stats(&self) -> SecureStats {
        let cells = &self.cells;
        SecureStats {
            handshakes: cells.handshakes.load(Relaxed),
            refused: cells.refused.load(Relaxed),
            broken: cells.broken.load(Relaxed),
            sent_bytes: cells.sent_bytes.load(Relaxed),
            received_bytes: cells.received_bytes.load(Relaxed),
        }
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys(..)")
    }
}

impl Ends {
    /// Both ends of one purpose: each has its own key and takes exactly the other's. `mistaken`: a
    /// role that somebody may connect to who means this server.
    fn new(hkdf: &Hkdf<Sha256>, server: &str, client: &str, mistaken: Option<&str>) -> Ends {
        let provider = Arc::new(provider());
        let (server, client) = (key_of(hkdf, server), key_of(hkdf, client));
        let algorithms = provider.signature_verification_algorithms;
        let public = |key: &CertifiedKey| key.cert[0].as_ref().to_vec();
        let mistaken = mistaken.map(|role| public(&key_of(hkdf, role)));
        let only_server = Arc::new(Only { public: public(&server), mistaken, algorithms });
        let only_client = Arc::new(Only { public: public(&client), mistaken: None, algorithms });
        Ends {
            client: Arc::new(client_config(provider.clone(), only_server, client)),
            server: Arc::new(server_config(provider, only_client, server)),
        }
    }
}

/// AES-128 first: the fastest by far where the processor has it, and as strong as the keys.
fn provider() -> CryptoProvider {
    use ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256};
    CryptoProvider {
        cipher_suites: vec![TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256],
        kx_groups: vec![ring::kx_group::X25519],
        ..ring::default_provider()
    }
}

fn client_config(
    provider: Arc<CryptoProvider>,
    server: Arc<Only>,
    own: Arc<CertifiedKey>,
) -> ClientConfig {
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("the cipher suites are of this version")
        .dangerous()
        .with_custom_certificate_verifier(server)
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config
}

fn server_config(
    provider: Arc<CryptoProvider>,
    client: Arc<Only>,
    own: Arc<CertifiedKey>,
) -> ServerConfig {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("the cipher suites are of this version")
        .with_client_cert_verifier(client)
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
    // Nobody resumes: a handshake is cheap beside what a connection is used for.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config
}

/// The key pair of a role.
fn key_of(hkdf: &Hkdf<Sha256>, role: &str) -> Arc<CertifiedKey> {
    let mut der = Zeroizing::new([0; PKCS8_HEAD.len() + SEED_LEN]);
    der[..PKCS8_HEAD.len()].copy_from_slice(&PKCS8_HEAD);
    hkdf.expand(role.as_bytes(), &mut der[PKCS8_HEAD.len()..])
        .expect("32 bytes are less than HKDF can give");
    let private = PrivatePkcs8KeyDer::from(der.as_slice());
    let key = ring::sign::any_eddsa_type(&private).expect("any 32 bytes are a key");
    let public = key.public_key().expect("an Ed25519 key knows its public half");
    Arc::new(CertifiedKey::new(vec![CertificateDer::from(public.as_ref().to_vec())], key))
}

/// Takes one public key and no other.
#[derive(Debug)]
struct Only {
    public: Vec<u8>,
    /// One that is not taken either, but told apart from a stranger's.
    mistaken: Option<Vec<u8>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Only {
    fn check(&self, offered: &[u8], others: &[CertificateDer<'_>]) -> Result<(), Error> {
        if offered == self.public && others.is_empty() {
            return Ok(());
        }
        if self.mistaken.as_deref() == Some(offered) {
            return Err(another_role());
        }
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }

    fn check_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        rustls::crypto::verify_tls13_signature_with_raw_key(message, &key, signed, &self.algorithms)
    }
}

/// The key is one of this job, and of another role.
pub(super) fn another_role() -> Error {
    Error::InvalidCertificate(CertificateError::InvalidPurpose)
}

fn not_in_tls12() -> Error {
    PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into()
}

impl ServerCertVerifier for Only {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity, intermediates).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(not_in_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Only {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity, intermediates).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(not_in_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
