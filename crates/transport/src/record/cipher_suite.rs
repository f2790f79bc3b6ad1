// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The cipher suites of records: their keys, and the choice of the suite that a processor runs
//! fastest.
//!
//! If the processor has vector instructions for AES, this is AEGIS-128X2 (RFC 10032), which then
//! takes a third of the time of AES-128-GCM. `docs/developer-guide/network-security.md` has the
//! reasons and the measurements.

#[cfg(target_arch = "x86_64")]
use aegis::aegis128x2::Aegis128X2;
use ring::aead::{AES_128_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use super::layout::{RECORD_HEADER_BYTES, RECORD_TAG_BYTES};

/// A cipher suite that seals the records of a connection. Ordered by speed: a processor that
/// supports one supports all earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CipherSuite {
    ChaCha20Poly1305,
    Aes128Gcm,
    Aegis128X2,
}

impl CipherSuite {
    pub(crate) const ALL_SUITES: [Self; 3] =
        [Self::ChaCha20Poly1305, Self::Aes128Gcm, Self::Aegis128X2];

    /// Returns the fastest suite of this processor.
    pub(crate) fn fastest_local() -> Self {
        match (has_aes(), has_vector_aes()) {
            (true, true) => Self::Aegis128X2,
            (true, false) => Self::Aes128Gcm,
            _ => Self::ChaCha20Poly1305,
        }
    }

    /// Returns the fastest suite that both sides support.
    pub(crate) fn fastest_common(self, other: Self) -> Self {
        // A processor that supports a suite supports all earlier ones, so the smaller suite works
        // on both.
        self.min(other)
    }

    pub(crate) fn to_code(self) -> u8 {
        match self {
            // Codes of the wire. They stay the same if a new suite changes the order by speed.
            Self::Aes128Gcm => 1,
            Self::ChaCha20Poly1305 => 2,
            Self::Aegis128X2 => 3,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL_SUITES.into_iter().find(|one| one.to_code() == code)
    }

    /// Returns the size of a key in bytes.
    pub(crate) fn key_len(self) -> usize {
        match self {
            Self::ChaCha20Poly1305 => CHACHA20_POLY1305.key_len(),
            Self::Aes128Gcm => AES_128_GCM.key_len(),
            Self::Aegis128X2 => 16,
        }
    }
}

/// A cipher of a suite, with its key.
pub(super) enum RecordCipher {
    Ring(Box<LessSafeKey>),
    #[cfg(target_arch = "x86_64")]
    Aegis([u8; 16]),
}

impl RecordCipher {
    /// Creates a cipher; returns `None` if the key has another length, or if this processor does
    /// not support the suite.
    pub(super) fn new(suite: CipherSuite, key: &[u8]) -> Option<Self> {
        let algorithm = match suite {
            CipherSuite::ChaCha20Poly1305 => &CHACHA20_POLY1305,
            CipherSuite::Aes128Gcm => &AES_128_GCM,
            #[cfg(target_arch = "x86_64")]
            CipherSuite::Aegis128X2 => {
                return key.try_into().ok().filter(|_| has_aes()).map(Self::Aegis);
            }
            #[cfg(not(target_arch = "x86_64"))]
            CipherSuite::Aegis128X2 => return None,
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key).ok()?);
        Some(Self::Ring(Box::new(key)))
    }

    /// Encrypts a payload in place, and returns its tag.
    pub(super) fn encrypt_payload(
        &self,
        record: u64,
        header: &[u8; RECORD_HEADER_BYTES],
        payload: &mut [u8],
    ) -> Option<[u8; RECORD_TAG_BYTES]> {
        match self {
            Self::Ring(key) => {
                let tag = key
                    .seal_in_place_separate_tag(short_nonce(record), Aad::from(header), payload)
                    .ok()?;
                tag.as_ref().try_into().ok()
            }
            #[cfg(target_arch = "x86_64")]
            Self::Aegis(key) => {
                Some(Aegis128X2::new(key, &record_nonce(record)).encrypt_in_place(payload, header))
            }
        }
    }

    /// Decrypts a payload in place. If it returns `None`, the bytes of `payload` are invalid.
    pub(super) fn decrypt_payload(
        &self,
        record: u64,
        header: &[u8; RECORD_HEADER_BYTES],
        payload: &mut [u8],
        tag: &[u8; RECORD_TAG_BYTES],
    ) -> Option<()> {
        match self {
            Self::Ring(key) => {
                let (nonce, aad) = (short_nonce(record), Aad::from(header));
                key.open_in_place_separate_tag(nonce, aad, (*tag).into(), payload, 0..)
                    .ok()
                    .map(drop)
            }
            #[cfg(target_arch = "x86_64")]
            Self::Aegis(key) => Aegis128X2::new(key, &record_nonce(record))
                .decrypt_in_place(payload, tag, header)
                .ok(),
        }
    }
}

/// Returns the number of a record as a nonce: zero bytes, then the number.
fn record_nonce<const BYTES: usize>(record: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[BYTES - 8..].copy_from_slice(&record.to_le_bytes());
    bytes
}

fn short_nonce(record: u64) -> Nonce {
    Nonce::assume_unique_for_key(record_nonce(record))
}

#[cfg(target_arch = "x86_64")]
fn has_aes() -> bool {
    // AES-GCM also needs carry-less multiplication for its authentication.
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "x86_64")]
fn has_vector_aes() -> bool {
    std::arch::is_x86_feature_detected!("vaes") && std::arch::is_x86_feature_detected!("avx2")
}

#[cfg(target_arch = "aarch64")]
fn has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_vector_aes() -> bool {
    false
}
