// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ciphers of records: which one a processor is fast at, and their keys.
//!
//! AEGIS-128X2 (RFC 10032) where the processor has vector instructions for AES: there it takes a
//! third of the time of AES-128-GCM. `docs/developer-guide/network-security.md` has the reasons and
//! the measurements.

#[cfg(target_arch = "x86_64")]
use aegis::aegis128x2::Aegis128X2;
use ring::aead::{AES_128_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use super::{HEADER, TAG};

/// A cipher suite that seals the records of a connection. A processor that supports one supports
/// those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Suite {
    ChaCha20Poly1305,
    Aes128Gcm,
    Aegis128X2,
}

impl Suite {
    pub(crate) const ALL: [Self; 3] = [Self::ChaCha20Poly1305, Self::Aes128Gcm, Self::Aegis128X2];

    /// The one that this processor is fastest at.
    pub(crate) fn own() -> Self {
        match (aes(), vector_aes()) {
            (true, true) => Self::Aegis128X2,
            (true, false) => Self::Aes128Gcm,
            _ => Self::ChaCha20Poly1305,
        }
    }

    /// The fastest that both have.
    pub(crate) fn of_both(self, other: Self) -> Self {
        self.min(other)
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Aes128Gcm => 1,
            Self::ChaCha20Poly1305 => 2,
            Self::Aegis128X2 => 3,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.code() == code)
    }

    /// Bytes of a key.
    pub(crate) fn key_len(self) -> usize {
        match self {
            Self::ChaCha20Poly1305 => CHACHA20_POLY1305.key_len(),
            Self::Aes128Gcm => AES_128_GCM.key_len(),
            Self::Aegis128X2 => 16,
        }
    }
}

/// The key of a suite.
pub(super) enum Cipher {
    Ring(Box<LessSafeKey>),
    #[cfg(target_arch = "x86_64")]
    Aegis([u8; 16]),
}

impl Cipher {
    /// `None` for a key of another length, and for a suite that this processor does not have.
    pub(super) fn new(suite: Suite, key: &[u8]) -> Option<Self> {
        let algorithm = match suite {
            Suite::ChaCha20Poly1305 => &CHACHA20_POLY1305,
            Suite::Aes128Gcm => &AES_128_GCM,
            #[cfg(target_arch = "x86_64")]
            Suite::Aegis128X2 => return key.try_into().ok().filter(|_| aes()).map(Self::Aegis),
            #[cfg(not(target_arch = "x86_64"))]
            Suite::Aegis128X2 => return None,
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key).ok()?);
        Some(Self::Ring(Box::new(key)))
    }

    /// Encrypts a payload where it lies.
    pub(super) fn seal(
        &self,
        record: u64,
        header: &[u8; HEADER],
        payload: &mut [u8],
    ) -> Option<[u8; TAG]> {
        match self {
            Self::Ring(key) => {
                let tag = key
                    .seal_in_place_separate_tag(short_nonce(record), Aad::from(header), payload)
                    .ok()?;
                tag.as_ref().try_into().ok()
            }
            #[cfg(target_arch = "x86_64")]
            Self::Aegis(key) => {
                Some(Aegis128X2::new(key, &nonce(record)).encrypt_in_place(payload, header))
            }
        }
    }

    /// Decrypts a payload where it lies. Where it returns `None`, its bytes mean nothing.
    pub(super) fn open(
        &self,
        record: u64,
        header: &[u8; HEADER],
        payload: &mut [u8],
        tag: &[u8; TAG],
    ) -> Option<()> {
        match self {
            Self::Ring(key) => {
                let (nonce, aad) = (short_nonce(record), Aad::from(header));
                key.open_in_place_separate_tag(nonce, aad, (*tag).into(), payload, 0..)
                    .ok()
                    .map(drop)
            }
            #[cfg(target_arch = "x86_64")]
            Self::Aegis(key) => {
                Aegis128X2::new(key, &nonce(record)).decrypt_in_place(payload, tag, header).ok()
            }
        }
    }
}

/// The number of a record behind zero bytes.
fn nonce<const BYTES: usize>(record: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[BYTES - 8..].copy_from_slice(&record.to_le_bytes());
    bytes
}

fn short_nonce(record: u64) -> Nonce {
    Nonce::assume_unique_for_key(nonce(record))
}

#[cfg(target_arch = "x86_64")]
fn aes() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "x86_64")]
fn vector_aes() -> bool {
    std::arch::is_x86_feature_detected!("vaes") && std::arch::is_x86_feature_detected!("avx2")
}

#[cfg(target_arch = "aarch64")]
fn aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn aes() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn vector_aes() -> bool {
    false
}
