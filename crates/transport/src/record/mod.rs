// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Sealed records: what crosses a TCP connection after its handshake. No I/O here.
//!
//! ```text
//! record    header | payload, encrypted | tag (16 bytes)
//! header    u32 length of the payload, little endian | u8 kind | 11 zero bytes
//! nonce     4 or 8 zero bytes | u64 number of the record, little endian
//! ```
//!
//! The header is authenticated with the payload. Each direction of each connection has a key of its
//! own and counts its records from zero, so a record that was changed, repeated, left out, put in,
//! or taken from elsewhere does not open; after the first of these nothing opens any more.
//!
//! Everything is encrypted, as that is the cheapest way to authenticate (`cargo run --release -p
//! farandole-transport --example seal_speed`).

mod suite;

use suite::Cipher;
pub(crate) use suite::Suite;

/// Records of this process go in clear, for measurements of what sealing costs. Only the test
/// harness has this.
#[cfg(feature = "_test-harness")]
pub(crate) static IN_CLEAR: std::sync::atomic::AtomicBool =
    std::sync::atomic::AtomicBool::new(false);

#[cfg(feature = "_test-harness")]
fn in_clear() -> bool {
    IN_CLEAR.load(std::sync::atomic::Ordering::Relaxed)
}

#[cfg(not(feature = "_test-harness"))]
const fn in_clear() -> bool {
    false
}

/// As long as a tag: the kernel copies bytes that follow a header of 4 bytes at half the speed.
pub(crate) const HEADER: usize = 16;
pub(crate) const TAG: usize = 16;
/// Bytes that fill a packet with their record, as far as Linux fills one: up to 64 KiB of whole
/// segments, of 1,500 or 9,000 bytes on the network. 64 KiB of payload need a second packet for the
/// last few hundred bytes, which costs as much as a full one and is acknowledged early: an
/// allreduce of 64 MiB among 4 hosts with 2 ranks took 243 ms with such packets and takes 182 ms
/// without them.
pub const PACKET: usize = 61 << 10;
/// Largest payload of a record: what a core keeps near while it seals it and hands it to the
/// kernel.
pub(crate) const MOST: usize = 4 * PACKET;
/// Payload of a word of heartbeats.
pub(crate) const WORD: usize = 128;

/// The content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes of a link.
    Bytes,
    /// Nothing; no record follows.
    End,
    /// A word of heartbeats.
    Word,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Bytes => 1,
            Self::End => 2,
            Self::Word => 3,
        }
    }
}

/// The first bytes of a record, as they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header(pub(crate) [u8; HEADER]);

impl Header {
    fn new(kind: Kind, length: usize) -> Option<Self> {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&u32::try_from(length).ok()?.to_le_bytes());
        bytes[4] = kind.code();
        Some(Self(bytes))
    }

    /// Returns the promised record. `None` for one that no sender writes; before the record has
    /// opened, nothing proves the sender.
    pub(crate) fn promises(self) -> Option<(Kind, usize)> {
        let (length, rest) = self.0.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let [kind, rest @ ..] = rest else { return None };
        if rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        let (kind, fits) = match kind {
            1 => (Kind::Bytes, (1..=MOST).contains(&length)),
            2 => (Kind::End, length == 0),
            3 => (Kind::Word, length == WORD),
            _ => return None,
        };
        fits.then_some((kind, length))
    }
}

/// A record did not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tampered {
    /// Its number, from zero.
    pub(crate) record: u64,
}

/// The key of one direction of one connection, and how many records it has served.
pub(crate) struct Seal {
    cipher: Cipher,
    record: u64,
}

impl Seal {
    /// `None` for a key of another length, and for a suite that this processor does not have.
    pub(crate) fn new(suite: Suite, key: &[u8]) -> Option<Self> {
        Some(Self { cipher: Cipher::new(suite, key)?, record: 0 })
    }

    /// Encrypts a payload where it lies. `None` for one that is longer than a record may be; it is
    /// left alone.
    pub(crate) fn seal(&mut self, kind: Kind, payload: &mut [u8]) -> Option<(Header, [u8; TAG])> {
        let header =
            Header::new(kind, payload.len()).filter(|header| header.promises().is_some())?;
        let next = self.record.checked_add(1)?;
        if in_clear() {
            return Some((header, [0; TAG]));
        }
        let tag = self.cipher.seal(self.record, &header.0, payload)?;
        self.record = next;
        Some((header, tag))
    }

    /// Decrypts a payload where it lies if it is the one that follows, with this header and this
    /// tag. Else its bytes mean nothing, and this must open nothing more.
    pub(crate) fn open(
        &mut self,
        header: Header,
        payload: &mut [u8],
        tag: [u8; TAG],
    ) -> Result<(), Tampered> {
        let tampered = Tampered { record: self.record };
        if in_clear() {
            return Ok(());
        }
        let next = self.record.checked_add(1).ok_or(tampered)?;
        self.cipher.open(self.record, &header.0, payload, &tag).ok_or(tampered)?;
        self.record = next;
        Ok(())
    }

    /// Returns the error for an invalid record.
    pub(crate) fn tampered(&self) -> Tampered {
        Tampered { record: self.record }
    }
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seal").field("record", &self.record).finish_non_exhaustive()
    }
}

impl std::fmt::Display for Tampered {
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
