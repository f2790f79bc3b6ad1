// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The keys of a connection come from a Diffie-Hellman exchange in the handshake. The codes of the
//! handshake, which need the job's key, authenticate the exchange.
//!
//! ```text
//! secret = HKDF-Extract(salt: the job's key, X25519(own, other))
//! key    = HKDF-Expand(secret, "farandole link" | direction | hello | challenge)      one each way
//! ```
//!
//! Hello and challenge hold both ranks, the generation, the channel, the number of the stream, both
//! nonces and both public keys, so no two connections have a key in common. The private keys are
//! dropped after the handshake: an attacker who later learns the job's key cannot decrypt recorded
//! traffic.

use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use ring::rand::SystemRandom;

use crate::record::{CipherSuite, RecordSeal};
use crate::{Error, Result};

/// Size of a public key in bytes.
pub(crate) const PUBLIC_KEY_BYTES: usize = 32;

const KEY_DERIVATION_LABEL: &[u8] = b"farandole link";

/// One side's half of an exchange, for a single use.
pub(crate) struct KeyExchangeHalf {
    private: EphemeralPrivateKey,
    pub(crate) public: [u8; PUBLIC_KEY_BYTES],
}

impl KeyExchangeHalf {
    pub(crate) fn new() -> Result<Self> {
        let failed = |_| Error::System { what: "X25519", reason: "no random numbers".to_owned() };
        let private =
            EphemeralPrivateKey::generate(&X25519, &SystemRandom::new()).map_err(failed)?;
        let computed = private.compute_public_key().map_err(failed)?;
        let mut public = [0; PUBLIC_KEY_BYTES];
        public.copy_from_slice(computed.as_ref());
        Ok(Self { private, public })
    }

    /// Returns the common secret; `None` if the other side's public key is invalid.
    pub(crate) fn compute_shared_secret(
        self,
        job: &[u8; 32],
        other: &[u8; PUBLIC_KEY_BYTES],
    ) -> Option<SharedSecret> {
        let other = UnparsedPublicKey::new(&X25519, other);
        // With the job's key as the salt, a break of X25519 alone does not reveal the keys.
        let salt = Salt::new(HKDF_SHA256, job);
        agree_ephemeral(self.private, &other, |shared| SharedSecret(salt.extract(shared))).ok()
    }
}

/// The common secret of the two sides of an exchange.
#[derive(Clone)]
pub(crate) struct SharedSecret(Prk);

/// Size of a key in bytes, in the form that HKDF expects.
#[derive(Clone, Copy, Debug)]
struct KeyLength(usize);

impl KeyType for KeyLength {
    fn len(&self) -> usize {
        self.0
    }
}

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeSide {
    Dialer,
    Acceptor,
}

/// The keys of one end of a connection.
#[derive(Debug)]
pub(crate) struct ConnectionKeys {
    pub(crate) sending: RecordSeal,
    pub(crate) receiving: RecordSeal,
}

impl SharedSecret {
    /// Derives the keys of a side, bound to all messages of the handshake. Returns `None` for a
    /// suite that this processor does not support.
    pub(crate) fn derive_keys(
        &self,
        side: HandshakeSide,
        suite: CipherSuite,
        hello: &[u8],
        challenge: &[u8],
    ) -> Option<ConnectionKeys> {
        let key = |from: &'static [u8]| {
            let info = [KEY_DERIVATION_LABEL, from, hello, challenge];
            let mut key = vec![0; suite.key_len()];
            self.0.expand(&info, KeyLength(key.len())).ok()?.fill(&mut key).ok()?;
            RecordSeal::new(suite, &key)
        };
        let (own, other): (&[u8], &[u8]) = match side {
            // One key for each direction: both count records from zero, so a shared key would
            // repeat nonces, and a record could be reflected to its sender.
            HandshakeSide::Dialer => (b" from dialer ", b" from acceptor "),
            HandshakeSide::Acceptor => (b" from acceptor ", b" from dialer "),
        };
        Some(ConnectionKeys { sending: key(own)?, receiving: key(other)? })
    }
}
