// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The keys of a connection: a Diffie-Hellman exchange in the handshake, whose codes prove the
//! job's key.
//!
//! ```text
//! secret = HKDF-Extract(salt: the job's key, X25519(own, other))
//! key    = HKDF-Expand(secret, "farandole link" | direction | hello | challenge)      one each way
//! ```
//!
//! Hello and challenge hold both ranks, the generation, the channel, the number of the stream, both
//! nonces and both public keys, so no two connections have a key in common. The private keys are
//! forgotten with the handshake: the job's key does not open what was recorded before it became
//! known.

use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use ring::rand::SystemRandom;

use crate::record::{Seal, Suite};
use crate::{Error, Result};

/// Bytes of a public key.
pub(crate) const PUBLIC: usize = 32;

const LABEL: &[u8] = b"farandole link";

/// One side's half of an exchange. Serves once.
pub(crate) struct Half {
    private: EphemeralPrivateKey,
    pub(crate) public: [u8; PUBLIC],
}

impl Half {
    pub(crate) fn new() -> Result<Self> {
        let failed = |_| Error::System { what: "X25519", reason: "no random numbers".to_owned() };
        let private =
            EphemeralPrivateKey::generate(&X25519, &SystemRandom::new()).map_err(failed)?;
        let computed = private.compute_public_key().map_err(failed)?;
        let mut public = [0; PUBLIC];
        public.copy_from_slice(computed.as_ref());
        Ok(Self { private, public })
    }

    /// Returns the common secret; `None` if the other side's public key is invalid.
    pub(crate) fn meet(self, job: &[u8; 32], other: &[u8; PUBLIC]) -> Option<Secret> {
        let other = UnparsedPublicKey::new(&X25519, other);
        let salt = Salt::new(HKDF_SHA256, job);
        agree_ephemeral(self.private, &other, |shared| Secret(salt.extract(shared))).ok()
    }
}

/// The common secret of two sides of an exchange.
#[derive(Clone)]
pub(crate) struct Secret(Prk);

/// Bytes of a key, as HKDF asks for it.
#[derive(Clone, Copy, Debug)]
struct KeyLength(usize);

impl KeyType for KeyLength {
    fn len(&self) -> usize {
        self.0
    }
}

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
    /// The keys of a side, bound to all that was said. `None` for a suite that this processor does
    /// not have.
    pub(crate) fn keys(
        &self,
        side: Side,
        suite: Suite,
        hello: &[u8],
        challenge: &[u8],
    ) -> Option<Keys> {
        let key = |from: &'static [u8]| {
            let info = [LABEL, from, hello, challenge];
            let mut key = vec![0; suite.key_len()];
            self.0.expand(&info, KeyLength(key.len())).ok()?.fill(&mut key).ok()?;
            Seal::new(suite, &key)
        };
        let (own, other): (&[u8], &[u8]) = match side {
            Side::Dialer => (b" from dialer ", b" from acceptor "),
            Side::Acceptor => (b" from acceptor ", b" from dialer "),
        };
        Some(Keys { sending: key(own)?, receiving: key(other)? })
    }
}
