// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The messages with which two ranks prove to each other that they have the job's key, and agree on
//! the keys of a connection. No I/O here.
//!
//! ```text
//! dialer   -> hello      magic, version, carrier, suite, generation, channel, ranks, size, stream, streams, capacity,
//!                        nonce, public key, HMAC(key, "hello" | all fields before)
//! acceptor -> challenge  magic, version, status, suite, nonce, public key, HMAC(key, "acceptor" | hello | challenge)
//! dialer   -> proof      HMAC(key, "dialer" | hello | challenge)            (+ descriptors)
//! acceptor -> accepted   status, HMAC(key, "accepted" | status | hello | challenge)   (+ descriptors)
//! ```
//!
//! Every message has a fixed size; numbers are little endian. Every code except the first covers
//! both nonces, so messages cannot be replayed, and the role of the sender, so they cannot be
//! reflected. The first code can be replayed: it only separates strangers from possible ranks,
//! before this rank computes anything for them. Later bytes on TCP are sealed ([`crate::record`])
//! with keys of the [`key_exchange`]. A segment of shared memory needs no keys; the public keys are
//! then zero.
//!
//! All versions begin with magic and version, and a rank that reads another version answers or
//! reports it.

pub(crate) mod key_exchange;

use std::fmt;
use std::time::Duration;

use farandole_world::{Generation, Rank};
use hmac::{Hmac, Mac};
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::Sha256;

use crate::record::CipherSuite;
use crate::{Error, Result};
use key_exchange::{
    ConnectionKeys, HandshakeSide, KeyExchangeHalf, PUBLIC_KEY_BYTES, SharedSecret,
};

/// Time limit of a handshake.
// Bounds the time for which a stranger that sends nothing occupies a slot.
pub(crate) const HANDSHAKE_TIME_LIMIT: Duration = Duration::from_secs(5);

// Raise it with every change of a message or a record; `docs/developer-guide/network-security.md`
// states it, too.
pub(crate) const PROTOCOL_VERSION: u16 = 6;
/// The channel of heartbeat connections, reserved for the mesh.
pub(crate) const CONTROL_CHANNEL: u32 = u32::MAX;

const PROTOCOL_MAGIC: [u8; 8] = *b"farandol";
const MAC_BYTES: usize = 32;
/// Size of magic, version and the next field, which is the status in a challenge.
pub(crate) const OPENING_BYTES: usize = 12;
const HELLO_HEAD_BYTES: usize = 112;
/// Offset of the public key in a hello.
const HELLO_PUBLIC_KEY_OFFSET: usize = HELLO_HEAD_BYTES - PUBLIC_KEY_BYTES;
pub(crate) const HELLO_BYTES: usize = HELLO_HEAD_BYTES + MAC_BYTES;
const CHALLENGE_PUBLIC_KEY_OFFSET: usize = OPENING_BYTES + 2 + 32;
const CHALLENGE_HEAD_BYTES: usize = CHALLENGE_PUBLIC_KEY_OFFSET + PUBLIC_KEY_BYTES;
pub(crate) const CHALLENGE_BYTES: usize = CHALLENGE_HEAD_BYTES + MAC_BYTES;
pub(crate) const PROOF_BYTES: usize = MAC_BYTES;
pub(crate) const ACCEPTED_BYTES: usize = 2 + MAC_BYTES;

/// The job's key. Its bytes appear in no message and no log.
#[derive(Clone)]
pub(crate) struct JobKey(pub(crate) [u8; 32]);

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A derived `Debug` would print the key into a log.
        f.write_str("Key(..)")
    }
}

impl JobKey {
    fn start_mac(&self, parts: &[&[u8]]) -> Option<Hmac<Sha256>> {
        // HMAC accepts keys of any length, so this never returns `None`.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        parts.iter().for_each(|part| mac.update(part));
        Some(mac)
    }

    fn compute_mac(&self, parts: &[&[u8]]) -> [u8; MAC_BYTES] {
        self.start_mac(parts).map_or([0; MAC_BYTES], |mac| mac.finalize().into_bytes().into())
    }
}

/// The kind of link that a connection serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionCarrier {
    Tcp,
    SharedMemory,
    Control,
}

/// The answer of an acceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeStatus {
    Welcome,
    OtherVersion,
    OtherGeneration,
    OtherWorld,
    NoSharedMemory,
    WrongKey,
}

impl HandshakeStatus {
    // The position of a status is its code on the wire, so the order is part of the protocol.
    const ALL_STATUSES: [Self; 6] = [
        Self::Welcome,
        Self::OtherVersion,
        Self::OtherGeneration,
        Self::OtherWorld,
        Self::NoSharedMemory,
        Self::WrongKey,
    ];

    fn to_code(self) -> [u8; 2] {
        let at = Self::ALL_STATUSES.iter().position(|one| *one == self).unwrap_or(0);
        u16::try_from(at).unwrap_or(u16::MAX).to_le_bytes()
    }

    fn from_code(code: [u8; 2]) -> Option<Self> {
        Self::ALL_STATUSES.get(usize::from(u16::from_le_bytes(code))).copied()
    }
}

impl fmt::Display for HandshakeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Welcome => "welcome",
            Self::OtherVersion => "it speaks another version of the protocol",
            Self::OtherGeneration => "it belongs to another generation of the job",
            Self::OtherWorld => "it has another rank or another world size",
            Self::NoSharedMemory => "it cannot map the segment",
            Self::WrongKey => "our key is not that of its job",
        })
    }
}

/// The first message of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HelloMessage {
    pub(crate) version: u16,
    pub(crate) carrier: ConnectionCarrier,
    /// The fastest suite that the dialer supports.
    pub(crate) suite: CipherSuite,
    pub(crate) generation: Generation,
    pub(crate) channel: u32,
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) size: u32,
    /// Number of this connection in its link.
    pub(crate) stream: u16,
    /// Number of connections of the link.
    pub(crate) streams: u16,
    pub(crate) capacity: u64,
    pub(crate) nonce: [u8; 32],
}

pub(crate) fn random_nonce() -> Result<[u8; 32]> {
    let mut nonce = [0; 32];
    OsRng.try_fill_bytes(&mut nonce).map_err(Error::failed_call_mapper("getrandom"))?;
    Ok(nonce)
}

impl HelloMessage {
    /// Encodes the message without public key and code, which [`DialerHandshake`] adds.
    fn encode(&self) -> [u8; HELLO_BYTES] {
        let carrier = match self.carrier {
            ConnectionCarrier::Tcp => 1,
            ConnectionCarrier::SharedMemory => 2,
            ConnectionCarrier::Control => 3,
        };
        let mut bytes = [0; HELLO_BYTES];
        let parts: [&[u8]; 11] = [
            &PROTOCOL_MAGIC,
            &self.version.to_le_bytes(),
            &[carrier, self.suite.to_code()],
            &self.generation.0.to_le_bytes(),
            &self.channel.to_le_bytes(),
            &self.from.0.to_le_bytes(),
            &self.to.0.to_le_bytes(),
            &self.size.to_le_bytes(),
            &self.stream.to_le_bytes(),
            &self.streams.to_le_bytes(),
            &self.capacity.to_le_bytes(),
        ];
        let mut at = 0;
        for part in parts.into_iter().chain([&self.nonce[..]]) {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        bytes
    }

    /// Decodes a hello; returns `None` for other bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = HandshakeReader(bytes);
        if reader.take_array::<8>()? != PROTOCOL_MAGIC {
            return None;
        }
        let version = u16::from_le_bytes(reader.take_array()?);
        let [carrier, suite] = reader.take_array()?;
        let carrier = match carrier {
            1 => ConnectionCarrier::Tcp,
            2 => ConnectionCarrier::SharedMemory,
            3 => ConnectionCarrier::Control,
            _ => return None,
        };
        Some(Self {
            version,
            carrier,
            suite: CipherSuite::from_code(suite)?,
            generation: Generation(u64::from_le_bytes(reader.take_array()?)),
            channel: u32::from_le_bytes(reader.take_array()?),
            from: Rank(u32::from_le_bytes(reader.take_array()?)),
            to: Rank(u32::from_le_bytes(reader.take_array()?)),
            size: u32::from_le_bytes(reader.take_array()?),
            stream: u16::from_le_bytes(reader.take_array()?),
            streams: u16::from_le_bytes(reader.take_array()?),
            capacity: u64::from_le_bytes(reader.take_array()?),
            nonce: reader.take_array()?,
        })
    }
}

struct HandshakeReader<'a>(&'a [u8]);

impl HandshakeReader<'_> {
    fn take_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
}

/// Returns the protocol version at the beginning of a message; `None` if the bytes are not of this
/// protocol.
pub(crate) fn read_version(bytes: &[u8]) -> Option<u16> {
    let mut reader = HandshakeReader(bytes);
    (reader.take_array::<8>()? == PROTOCOL_MAGIC)
        .then(|| reader.take_array().map(u16::from_le_bytes))?
}

/// Returns the answer to a rank of another version. These bytes have the same meaning in all
/// versions.
pub(crate) fn encode_version_mismatch() -> [u8; OPENING_BYTES] {
    let mut bytes = [0; OPENING_BYTES];
    bytes[..8].copy_from_slice(&PROTOCOL_MAGIC);
    bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    // No code follows: another version may compute codes in another way, and this answer reveals
    // only the version.
    bytes[10..].copy_from_slice(&HandshakeStatus::OtherVersion.to_code());
    bytes
}

/// State of the dialer between hello and challenge.
pub(crate) struct DialerHandshake {
    key: JobKey,
    hello: [u8; HELLO_BYTES],
    half: Option<KeyExchangeHalf>,
}

impl DialerHandshake {
    pub(crate) fn new(key: &JobKey, hello: &HelloMessage) -> Result<Self> {
        // The kernel isolates memory that is passed as a descriptor, so a segment needs no keys.
        let half = if hello.carrier == ConnectionCarrier::SharedMemory {
            None
        } else {
            Some(KeyExchangeHalf::new()?)
        };
        let mut bytes = hello.encode();
        if let Some(half) = &half {
            bytes[HELLO_PUBLIC_KEY_OFFSET..HELLO_HEAD_BYTES].copy_from_slice(&half.public);
        }
        let (head, code) = bytes.split_at_mut(HELLO_HEAD_BYTES);
        // The zero byte ends the role, so no role is the prefix of another one.
        code.copy_from_slice(&key.compute_mac(&[b"hello", &[0], head]));
        Ok(Self { key: key.clone(), hello: bytes, half })
    }

    /// Returns the hello.
    pub(crate) fn hello_message(&self) -> &[u8; HELLO_BYTES] {
        &self.hello
    }

    /// Reads the challenge. The error says why the sender is not an acceptor of this job.
    pub(crate) fn read_challenge(
        self,
        bytes: &[u8; CHALLENGE_BYTES],
    ) -> std::result::Result<(HandshakeTranscript, HandshakeStatus), &'static str> {
        let (head, code) = bytes.split_at(CHALLENGE_HEAD_BYTES);
        let challenge: [u8; CHALLENGE_HEAD_BYTES] =
            head.try_into().map_err(|_| "a challenge of another size")?;
        let mut transcript =
            HandshakeTranscript { key: self.key, hello: self.hello, challenge, secret: None };
        // The status is read only after this check: an attacker could otherwise turn ranks away.
        if !transcript.verify_mac(b"acceptor", &[], code) {
            return Err("what listens there does not hold the key of this job");
        }
        let status = HandshakeStatus::from_code([challenge[10], challenge[11]])
            .ok_or("an unknown status")?;
        // A refusal carries no public key, so an exchange would fail on its zero bytes.
        if let (Some(half), HandshakeStatus::Welcome) = (self.half, status) {
            transcript.complete_key_exchange(HandshakeSide::Dialer, half);
        }
        Ok((transcript, status))
    }
}

/// The messages of both sides so far, the codes over them, and the keys that follow from them.
#[derive(Clone)]
pub(crate) struct HandshakeTranscript {
    key: JobKey,
    hello: [u8; HELLO_BYTES],
    challenge: [u8; CHALLENGE_HEAD_BYTES],
    /// The common secret, if keys are exchanged and the public key of the other side is valid.
    secret: Option<SharedSecret>,
}

impl HandshakeTranscript {
    /// Acceptor: returns whether the code of a hello is valid.
    pub(crate) fn verify_hello(key: &JobKey, hello: &[u8; HELLO_BYTES]) -> bool {
        let (head, code) = hello.split_at(HELLO_HEAD_BYTES);
        key.start_mac(&[b"hello", &[0], head]).is_some_and(|mac| mac.verify_slice(code).is_ok())
    }

    /// Acceptor: answers a hello; the second part of the result is the message to the dialer. For a
    /// refused hello, no keys are computed.
    pub(crate) fn answer_hello(
        key: &JobKey,
        hello: [u8; HELLO_BYTES],
        status: HandshakeStatus,
    ) -> Result<(Self, [u8; CHALLENGE_BYTES])> {
        let decoded = HelloMessage::decode(&hello).filter(|_| status == HandshakeStatus::Welcome);
        let half = match decoded.as_ref().map(|hello| hello.carrier) {
            Some(ConnectionCarrier::Tcp | ConnectionCarrier::Control) => {
                Some(KeyExchangeHalf::new()?)
            }
            Some(ConnectionCarrier::SharedMemory) | None => None,
        };
        // The hello is under the code of the job's key, so an attacker cannot downgrade the suite.
        let suite = decoded.map_or(CipherSuite::fastest_local(), |hello| {
            hello.suite.fastest_common(CipherSuite::fastest_local())
        });
        let mut bytes = [0; CHALLENGE_BYTES];
        bytes[..OPENING_BYTES].copy_from_slice(&encode_version_mismatch());
        bytes[10..OPENING_BYTES].copy_from_slice(&status.to_code());
        bytes[OPENING_BYTES] = suite.to_code();
        bytes[OPENING_BYTES + 2..CHALLENGE_PUBLIC_KEY_OFFSET].copy_from_slice(&random_nonce()?);
        if let Some(half) = &half {
            bytes[CHALLENGE_PUBLIC_KEY_OFFSET..CHALLENGE_HEAD_BYTES].copy_from_slice(&half.public);
        }
        let mut challenge = [0; CHALLENGE_HEAD_BYTES];
        challenge.copy_from_slice(&bytes[..CHALLENGE_HEAD_BYTES]);
        let mut transcript = Self { key: key.clone(), hello, challenge, secret: None };
        bytes[CHALLENGE_HEAD_BYTES..].copy_from_slice(&transcript.compute_mac(b"acceptor", &[]));
        if let Some(half) = half {
            transcript.complete_key_exchange(HandshakeSide::Acceptor, half);
        }
        Ok((transcript, bytes))
    }

    fn complete_key_exchange(&mut self, side: HandshakeSide, half: KeyExchangeHalf) {
        let other = match side {
            HandshakeSide::Dialer => &self.challenge[CHALLENGE_PUBLIC_KEY_OFFSET..],
            HandshakeSide::Acceptor => &self.hello[HELLO_PUBLIC_KEY_OFFSET..HELLO_HEAD_BYTES],
        };
        // `None` for a key of small order. `derive_keys` then returns no keys, which ends the
        // handshake.
        self.secret =
            other.first_chunk().and_then(|other| half.compute_shared_secret(&self.key.0, other));
    }

    /// Returns the keys that seal the connection from now on; `None` if none were exchanged.
    pub(crate) fn derive_keys(&self, side: HandshakeSide) -> Option<ConnectionKeys> {
        let suite = CipherSuite::from_code(self.challenge[OPENING_BYTES])?;
        self.secret.as_ref()?.derive_keys(side, suite, &self.hello, &self.challenge)
    }

    /// Dialer: returns the proof.
    pub(crate) fn dialer_proof(&self) -> [u8; PROOF_BYTES] {
        self.compute_mac(b"dialer", &[])
    }

    /// Acceptor: returns whether the proof is valid.
    pub(crate) fn verify_proof(&self, proof: &[u8]) -> bool {
        self.verify_mac(b"dialer", &[], proof)
    }

    /// Acceptor: returns the last message.
    pub(crate) fn accepted_message(&self, status: HandshakeStatus) -> [u8; ACCEPTED_BYTES] {
        let mut bytes = [0; ACCEPTED_BYTES];
        bytes[..2].copy_from_slice(&status.to_code());
        bytes[2..].copy_from_slice(&self.compute_mac(b"accepted", &status.to_code()));
        bytes
    }

    /// Dialer: reads the last message; returns `None` if its code is invalid.
    pub(crate) fn read_accepted_message(
        &self,
        bytes: &[u8; ACCEPTED_BYTES],
    ) -> Option<HandshakeStatus> {
        let [a, b, ..] = *bytes;
        if self.verify_mac(b"accepted", &[a, b], &bytes[2..]) {
            HandshakeStatus::from_code([a, b])
        } else {
            None
        }
    }

    fn compute_mac(&self, role: &[u8], extra: &[u8]) -> [u8; MAC_BYTES] {
        self.key.compute_mac(&[role, &[0], extra, &self.hello, &self.challenge])
    }

    /// Verifies a code, in constant time.
    fn verify_mac(&self, role: &[u8], extra: &[u8], code: &[u8]) -> bool {
        let mac = self.key.start_mac(&[role, &[0], extra, &self.hello, &self.challenge]);
        mac.is_some_and(|mac| mac.verify_slice(code).is_ok())
    }
}

#[cfg(test)]
mod tests;
