// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The messages with which two ranks prove to each other that they hold the job's key, and agree on
//! the keys of a connection. No I/O here.
//!
//! ```text
//! dialer   -> hello      magic, version, carrier, suite, generation, channel, ranks, size, stream, streams, capacity,
//!                        nonce, public key, HMAC(key, "hello" | what stands before it)
//! acceptor -> challenge  magic, version, status, suite, nonce, public key, HMAC(key, "acceptor" | hello | challenge)
//! dialer   -> proof      HMAC(key, "dialer" | hello | challenge)            (+ descriptors)
//! acceptor -> accepted   status, HMAC(key, "accepted" | status | hello | challenge)   (+ descriptors)
//! ```
//!
//! Every message has a fixed size; numbers are little endian. Both nonces enter every code but the
//! first, so nothing can be replayed, and the role does, so nothing can be reflected. The first
//! code can be replayed: it only distinguishes strangers from possible ranks, before anything is
//! computed for them. What follows on TCP is sealed ([`crate::record`]) with keys of the
//! [`exchange`]; a segment of shared memory needs none, and then public keys are zero.
//!
//! Magic and version stand first in all versions, and a rank that reads another version there
//! answers or reports it.

pub(crate) mod exchange;

use std::fmt;

use farandole_world::{Generation, Rank};
use hmac::{Hmac, Mac};
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::Sha256;

use crate::record::Suite;
use crate::{Error, Result};
use exchange::{Half, Keys, PUBLIC, Secret, Side};

pub(crate) const VERSION: u16 = 6;
/// The channel of heartbeats; not for users.
pub(crate) const CONTROL: u32 = u32::MAX;

const MAGIC: [u8; 8] = *b"farandol";
const CODE: usize = 32;
/// Magic, version, and what a challenge says next: its status.
pub(crate) const OPENING: usize = 12;
const HELLO_HEAD: usize = 112;
/// Offset of a hello's public key.
const HELLO_PUBLIC: usize = HELLO_HEAD - PUBLIC;
pub(crate) const HELLO: usize = HELLO_HEAD + CODE;
const CHALLENGE_PUBLIC: usize = OPENING + 2 + 32;
const CHALLENGE_HEAD: usize = CHALLENGE_PUBLIC + PUBLIC;
pub(crate) const CHALLENGE: usize = CHALLENGE_HEAD + CODE;
pub(crate) const PROOF: usize = CODE;
pub(crate) const ACCEPTED: usize = 2 + CODE;

/// The job's key. Its bytes appear in no message and no log.
#[derive(Clone)]
pub(crate) struct Key(pub(crate) [u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    fn mac(&self, parts: &[&[u8]]) -> Option<Hmac<Sha256>> {
        // A key of any length is taken, so there is always a code.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        parts.iter().for_each(|part| mac.update(part));
        Some(mac)
    }

    fn code(&self, parts: &[&[u8]]) -> [u8; CODE] {
        self.mac(parts).map_or([0; CODE], |mac| mac.finalize().into_bytes().into())
    }
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    Tcp,
    SharedMemory,
    Control,
}

/// The answer of an acceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Welcome,
    Version,
    Generation,
    World,
    NoSharedMemory,
    Stranger,
}

impl Status {
    const ALL: [Self; 6] = [
        Self::Welcome,
        Self::Version,
        Self::Generation,
        Self::World,
        Self::NoSharedMemory,
        Self::Stranger,
    ];

    fn code(self) -> [u8; 2] {
        let at = Self::ALL.iter().position(|one| *one == self).unwrap_or(0);
        u16::try_from(at).unwrap_or(u16::MAX).to_le_bytes()
    }

    fn from_code(code: [u8; 2]) -> Option<Self> {
        Self::ALL.get(usize::from(u16::from_le_bytes(code))).copied()
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Welcome => "welcome",
            Self::Version => "it speaks another version of the protocol",
            Self::Generation => "it belongs to another generation of the job",
            Self::World => "it has another rank or another world size",
            Self::NoSharedMemory => "it cannot map the segment",
            Self::Stranger => "our key is not that of its job",
        })
    }
}

/// The first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) version: u16,
    pub(crate) carrier: Carrier,
    /// The suite that the dialer proposes.
    pub(crate) suite: Suite,
    pub(crate) generation: Generation,
    pub(crate) channel: u32,
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) size: u32,
    /// Number of this connection among those of its link.
    pub(crate) stream: u16,
    /// Connections of the link.
    pub(crate) streams: u16,
    pub(crate) capacity: u64,
    pub(crate) nonce: [u8; 32],
}

pub(crate) fn nonce() -> Result<[u8; 32]> {
    let mut nonce = [0; 32];
    OsRng.try_fill_bytes(&mut nonce).map_err(Error::of("getrandom"))?;
    Ok(nonce)
}

impl Hello {
    /// Without public key and code, which [`Offer`] adds.
    fn encode(&self) -> [u8; HELLO] {
        let carrier = match self.carrier {
            Carrier::Tcp => 1,
            Carrier::SharedMemory => 2,
            Carrier::Control => 3,
        };
        let mut bytes = [0; HELLO];
        let parts: [&[u8]; 11] = [
            &MAGIC,
            &self.version.to_le_bytes(),
            &[carrier, self.suite.code()],
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

    /// `None` for anything that is no hello.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.take::<8>()? != MAGIC {
            return None;
        }
        let version = u16::from_le_bytes(reader.take()?);
        let [carrier, suite] = reader.take()?;
        let carrier = match carrier {
            1 => Carrier::Tcp,
            2 => Carrier::SharedMemory,
            3 => Carrier::Control,
            _ => return None,
        };
        Some(Self {
            version,
            carrier,
            suite: Suite::from_code(suite)?,
            generation: Generation(u64::from_le_bytes(reader.take()?)),
            channel: u32::from_le_bytes(reader.take()?),
            from: Rank(u32::from_le_bytes(reader.take()?)),
            to: Rank(u32::from_le_bytes(reader.take()?)),
            size: u32::from_le_bytes(reader.take()?),
            stream: u16::from_le_bytes(reader.take()?),
            streams: u16::from_le_bytes(reader.take()?),
            capacity: u64::from_le_bytes(reader.take()?),
            nonce: reader.take()?,
        })
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
}

/// Returns whether the first bytes of a message are ours, and else what speaks there; `None` when
/// it is no version of this.
pub(crate) fn version(bytes: &[u8]) -> Option<u16> {
    let mut reader = Reader(bytes);
    (reader.take::<8>()? == MAGIC).then(|| reader.take().map(u16::from_le_bytes))?
}

/// Returns the answer to a rank of another version: this much is the same in all versions.
pub(crate) fn other_version() -> [u8; OPENING] {
    let mut bytes = [0; OPENING];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
    bytes[10..].copy_from_slice(&Status::Version.code());
    bytes
}

/// The dialer before it is answered.
pub(crate) struct Offer {
    key: Key,
    hello: [u8; HELLO],
    half: Option<Half>,
}

impl Offer {
    pub(crate) fn new(key: &Key, hello: &Hello) -> Result<Self> {
        let half = if hello.carrier == Carrier::SharedMemory { None } else { Some(Half::new()?) };
        let mut bytes = hello.encode();
        if let Some(half) = &half {
            bytes[HELLO_PUBLIC..HELLO_HEAD].copy_from_slice(&half.public);
        }
        let (head, code) = bytes.split_at_mut(HELLO_HEAD);
        code.copy_from_slice(&key.code(&[b"hello", &[0], head]));
        Ok(Self { key: key.clone(), hello: bytes, half })
    }

    /// The first message.
    pub(crate) fn hello(&self) -> &[u8; HELLO] {
        &self.hello
    }

    /// Reads the challenge. The error says why this is no acceptor of this job.
    pub(crate) fn read(
        self,
        bytes: &[u8; CHALLENGE],
    ) -> std::result::Result<(Transcript, Status), &'static str> {
        let (head, code) = bytes.split_at(CHALLENGE_HEAD);
        let challenge: [u8; CHALLENGE_HEAD] =
            head.try_into().map_err(|_| "a challenge of another size")?;
        let mut transcript =
            Transcript { key: self.key, hello: self.hello, challenge, secret: None };
        if !transcript.holds(b"acceptor", &[], code) {
            return Err("what listens there does not hold the key of this job");
        }
        let status =
            Status::from_code([challenge[10], challenge[11]]).ok_or("an unknown status")?;
        if let (Some(half), Status::Welcome) = (self.half, status) {
            transcript.exchange(Side::Dialer, half);
        }
        Ok((transcript, status))
    }
}

/// The messages of both sides so far, the codes over them, and the keys that follow from them.
#[derive(Clone)]
pub(crate) struct Transcript {
    key: Key,
    hello: [u8; HELLO],
    challenge: [u8; CHALLENGE_HEAD],
    /// The common secret, if there is an exchange and the other's public key is valid.
    secret: Option<Secret>,
}

impl Transcript {
    /// Acceptor: whether a hello's code holds.
    pub(crate) fn knows(key: &Key, hello: &[u8; HELLO]) -> bool {
        let (head, code) = hello.split_at(HELLO_HEAD);
        key.mac(&[b"hello", &[0], head]).is_some_and(|mac| mac.verify_slice(code).is_ok())
    }

    /// Acceptor: answers a hello; the second part goes to the dialer. Unwelcome callers cost
    /// little.
    pub(crate) fn answer(
        key: &Key,
        hello: [u8; HELLO],
        status: Status,
    ) -> Result<(Self, [u8; CHALLENGE])> {
        let decoded = Hello::decode(&hello).filter(|_| status == Status::Welcome);
        let half = match decoded.as_ref().map(|hello| hello.carrier) {
            Some(Carrier::Tcp | Carrier::Control) => Some(Half::new()?),
            Some(Carrier::SharedMemory) | None => None,
        };
        let suite = decoded.map_or(Suite::own(), |hello| hello.suite.of_both(Suite::own()));
        let mut bytes = [0; CHALLENGE];
        bytes[..OPENING].copy_from_slice(&other_version());
        bytes[10..OPENING].copy_from_slice(&status.code());
        bytes[OPENING] = suite.code();
        bytes[OPENING + 2..CHALLENGE_PUBLIC].copy_from_slice(&nonce()?);
        if let Some(half) = &half {
            bytes[CHALLENGE_PUBLIC..CHALLENGE_HEAD].copy_from_slice(&half.public);
        }
        let mut challenge = [0; CHALLENGE_HEAD];
        challenge.copy_from_slice(&bytes[..CHALLENGE_HEAD]);
        let mut transcript = Self { key: key.clone(), hello, challenge, secret: None };
        bytes[CHALLENGE_HEAD..].copy_from_slice(&transcript.code(b"acceptor", &[]));
        if let Some(half) = half {
            transcript.exchange(Side::Acceptor, half);
        }
        Ok((transcript, bytes))
    }

    fn exchange(&mut self, side: Side, half: Half) {
        let other = match side {
            Side::Dialer => &self.challenge[CHALLENGE_PUBLIC..],
            Side::Acceptor => &self.hello[HELLO_PUBLIC..HELLO_HEAD],
        };
        self.secret = other.first_chunk().and_then(|other| half.meet(&self.key.0, other));
    }

    /// Returns the keys that seal the connection from now on; `None` if none were exchanged.
    pub(crate) fn keys(&self, side: Side) -> Option<Keys> {
        let suite = Suite::from_code(self.challenge[OPENING])?;
        self.secret.as_ref()?.keys(side, suite, &self.hello, &self.challenge)
    }

    /// Dialer: its proof.
    pub(crate) fn proof(&self) -> [u8; PROOF] {
        self.code(b"dialer", &[])
    }

    /// Acceptor: whether the proof holds.
    pub(crate) fn proved(&self, proof: &[u8]) -> bool {
        self.holds(b"dialer", &[], proof)
    }

    /// Acceptor: the last message.
    pub(crate) fn accept(&self, status: Status) -> [u8; ACCEPTED] {
        let mut bytes = [0; ACCEPTED];
        bytes[..2].copy_from_slice(&status.code());
        bytes[2..].copy_from_slice(&self.code(b"accepted", &status.code()));
        bytes
    }

    /// Dialer: reads the last message; `None` when its code does not hold.
    pub(crate) fn accepted(&self, bytes: &[u8; ACCEPTED]) -> Option<Status> {
        let [a, b, ..] = *bytes;
        if self.holds(b"accepted", &[a, b], &bytes[2..]) { Status::from_code([a, b]) } else { None }
    }

    fn code(&self, role: &[u8], extra: &[u8]) -> [u8; CODE] {
        self.key.code(&[role, &[0], extra, &self.hello, &self.challenge])
    }

    /// Compares in constant time.
    fn holds(&self, role: &[u8], extra: &[u8], code: &[u8]) -> bool {
        let mac = self.key.mac(&[role, &[0], extra, &self.hello, &self.challenge]);
        mac.is_some_and(|mac| mac.verify_slice(code).is_ok())
    }
}

#[cfg(test)]
mod tests;
