// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The keys of a connection: a Diffie-Hellman exchange in the handshake, whose codes prove the job's key.
//!
//! ```text
//! secret = HKDF-Extract(salt: the job's key, X25519(own, other))
//! key    = HKDF-Expand(secret, "farandole link" | direction | hello | challenge)      one each way
//! ```
//!
//! Hello and challenge hold both ranks, the generation, the channel, the number of the stream, both nonces and both public
//! keys, so no two connections have a key in common. The private keys are forgotten with the handshake: the job's key does
//! not open what was recorded before it became known.

use ring::aead::{AES_128_GCM, Algorithm, CHACHA20_POLY1305, UnboundKey};
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::rand::SystemRandom;

use crate::record::Seal;
use crate::{Error, Result};

/// Bytes of a public key.
pub(crate) const PUBLIC: usize = 32;

const LABEL: &[u8] = b"farandole link";

/// What seals the records of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suite {
    Aes128Gcm,
    ChaCha20Poly1305,
}

impl Suite {
    /// The one that this processor is faster at.
    pub(crate) fn own() -> Self {
        if aes() { Self::Aes128Gcm } else { Self::ChaCha20Poly1305 }
    }

    /// The one for both: without instructions for AES it is several times slower than the other.
    pub(crate) fn of_both(self, other: Self) -> Self {
        if self == other { self } else { Self::ChaCha20Poly1305 }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Aes128Gcm => 1,
            Self::ChaCha20Poly1305 => 2,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Aes128Gcm, Self::ChaCha20Poly1305].into_iter().find(|one| one.code() == code)
    }

    fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::Aes128Gcm => &AES_128_GCM,
            Self::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn aes() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn aes() -> bool {
    false
}

/// One side's half of an exchange. Serves once.
pub(crate) struct Half {
    private: EphemeralPrivateKey,
    pub(crate) public: [u8; PUBLIC],
}

impl Half {
    pub(crate) fn new() -> Result<Self> {
        let failed = |_| Error::System { what: "X25519", reason: "no random numbers".to_owned() };
        let private = EphemeralPrivateKey::generate(&X25519, &SystemRandom::new()).map_err(failed)?;
        let computed = private.compute_public_key().map_err(failed)?;
        let mut public = [0; PUBLIC];
        public.copy_from_slice(computed.as_ref());
        Ok(Self { private, public })
    }

    /// What both sides then hold; `None` when the other side sent what is no public key.
    pub(crate) fn meet(self, job: &[u8; 32], other: &[u8; PUBLIC]) -> Option<Secret> {
        let other = UnparsedPublicKey::new(&X25519, other);
        let salt = Salt::new(HKDF_SHA256, job);
        agree_ephemeral(self.private, &other, |shared| Secret(salt.extract(shared))).ok()
    }
}

/// What two sides of an exchange have in common.
#[derive(Clone)]
pub(crate) struct Secret(Prk);

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Dialer,
    Acceptor,
}

/// The keys of one end.
#[derive(Debug)]
pub(crate) struct Keys {
    pub(crate) sending: Seal,
    pub(crate) receiving: Seal,
}

impl Secret {
    /// The keys of a side, bound to all that was said.
    pub(crate) fn keys(&self, side: Side, suite: Suite, hello: &[u8], challenge: &[u8]) -> Option<Keys> {
        let key = |from: &'static [u8]| {
            let info = [LABEL, from, hello, challenge];
            let okm = self.0.expand(&info, suite.algorithm()).ok()?;
            Some(Seal::new(UnboundKey::from(okm)))
        };
        let (own, other): (&[u8], &[u8]) = match side {
            Side::Dialer => (b" from dialer ", b" from acceptor "),
            Side::Acceptor => (b" from acceptor ", b" from dialer "),
        };
        Some(Keys { sending: key(own)?, receiving: key(other)? })
    }
}
