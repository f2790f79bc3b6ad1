// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Sealed records are the encrypted units of a TCP connection after its handshake. No I/O here.
//!
//! ```text
//! record    header | payload, encrypted | tag (16 bytes)
//! header    u32 length of the payload, little endian | u8 kind | 11 zero bytes
//! nonce     4 or 8 zero bytes | u64 number of the record, little endian
//! ```
//!
//! The header is authenticated with the payload. Each direction of each connection has a separate
//! key and counts its records from zero, so a record that was changed, repeated, omitted, inserted,
//! or taken from another connection cannot be opened. After such a record, no further record is
//! opened.
//!
//! All payloads are encrypted, because this is the cheapest way to authenticate them (`cargo run
//! --release -p farandole-transport --example seal_speed`).

mod cipher_suite;
mod layout;

pub(crate) use cipher_suite::CipherSuite;
use cipher_suite::RecordCipher;
pub(crate) use layout::{RECORD_HEADER_BYTES, RECORD_TAG_BYTES};

/// Payload that, with its record, fills one packet of the Linux network stack: up to 64 KiB of
/// whole segments, of 1,500 or 9,000 bytes on the network. A payload of 64 KiB needs a second
/// packet for the last few hundred bytes, which costs as much as a full one and is acknowledged
/// early: an allreduce of 64 MiB among 4 hosts with 2 ranks took 243 ms with such packets and takes
/// 182 ms without them.
pub const PACKET_PAYLOAD_BYTES: usize = 61 << 10;
/// Largest payload of a record: it stays in the cache of a core while the core encrypts it and
/// passes it to the kernel.
pub(crate) const MAX_RECORD_PAYLOAD: usize = 4 * PACKET_PAYLOAD_BYTES;
/// Payload of a control message on a heartbeat connection.
pub(crate) const CONTROL_PAYLOAD_BYTES: usize = 128;

/// The content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// Bytes of a link.
    Bytes,
    /// End of the stream: no payload, and no record follows.
    End,
    /// A control message on a heartbeat connection.
    Control,
}

impl RecordKind {
    fn to_code(self) -> u8 {
        match self {
            Self::Bytes => 1,
            Self::End => 2,
            Self::Control => 3,
        }
    }
}

/// The first bytes of a record, as received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader(pub(crate) [u8; RECORD_HEADER_BYTES]);

impl RecordHeader {
    fn new(kind: RecordKind, length: usize) -> Option<Self> {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        bytes[..4].copy_from_slice(&u32::try_from(length).ok()?.to_le_bytes());
        bytes[4] = kind.to_code();
        Some(Self(bytes))
    }

    /// Returns the kind and the length of the record that the header announces; `None` for a header
    /// that no sender writes. The values are unauthenticated until the record was opened.
    pub(crate) fn announced_kind_and_length(self) -> Option<(RecordKind, usize)> {
        let (length, rest) = self.0.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let [kind, rest @ ..] = rest else { return None };
        // Zero today, so that a later version can give these bytes a meaning.
        if rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        let (kind, fits) = match kind {
            1 => (RecordKind::Bytes, (1..=MAX_RECORD_PAYLOAD).contains(&length)),
            2 => (RecordKind::End, length == 0),
            3 => (RecordKind::Control, length == CONTROL_PAYLOAD_BYTES),
            _ => return None,
        };
        fits.then_some((kind, length))
    }
}

/// A record that could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TamperedRecord {
    /// Number of the record, from zero.
    pub(crate) record: u64,
}

/// The key of one direction of one connection, with the number of the next record.
pub(crate) struct RecordSeal {
    cipher: RecordCipher,
    record: u64,
}

impl RecordSeal {
    /// Creates a seal; returns `None` if the key has another length, or if this processor does not
    /// support the suite.
    pub(crate) fn new(suite: CipherSuite, key: &[u8]) -> Option<Self> {
        Some(Self { cipher: RecordCipher::new(suite, key)?, record: 0 })
    }

    /// Encrypts a payload in place, and returns the header and the tag. Returns `None` if the
    /// payload is longer than a record may be, and leaves it unchanged.
    pub(crate) fn seal_payload(
        &mut self,
        kind: RecordKind,
        payload: &mut [u8],
    ) -> Option<(RecordHeader, [u8; RECORD_TAG_BYTES])> {
        let header = RecordHeader::new(kind, payload.len())
            // The receiver treats such a record as tampered, so the sender must not produce it.
            .filter(|header| header.announced_kind_and_length().is_some())?;
        // A number must never repeat: with a repeated nonce, AES-GCM reveals its authentication
        // key.
        let next = self.record.checked_add(1)?;
        let tag = self.cipher.encrypt_payload(self.record, &header.0, payload)?;
        self.record = next;
        Some((header, tag))
    }

    /// Decrypts a payload in place if it belongs to the next record and matches this header and
    /// tag. Otherwise the bytes of `payload` are invalid, and this seal must open no further
    /// record.
    pub(crate) fn open_payload(
        &mut self,
        header: RecordHeader,
        payload: &mut [u8],
        tag: [u8; RECORD_TAG_BYTES],
    ) -> Result<(), TamperedRecord> {
        let tampered = TamperedRecord { record: self.record };
        let next = self.record.checked_add(1).ok_or(tampered)?;
        self.cipher.decrypt_payload(self.record, &header.0, payload, &tag).ok_or(tampered)?;
        // After the check: the error must name a bad record by its own number.
        self.record = next;
        Ok(())
    }

    /// Returns the error for an invalid record at this position.
    pub(crate) fn tampered_record_error(&self) -> TamperedRecord {
        TamperedRecord { record: self.record }
    }
}

impl std::fmt::Debug for RecordSeal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seal").field("record", &self.record).finish_non_exhaustive()
    }
}

impl std::fmt::Display for TamperedRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { record } = self;
        write!(
            f,
            "record {record} is not what its sender sealed: changed, repeated, left out or put in \
             on the way"
        )
    }
}

#[cfg(test)]
mod tests;
